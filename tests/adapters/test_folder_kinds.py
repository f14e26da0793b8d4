"""No folder that nobody locks has a name that a sweep of killed processes' folders would take."""

import re
from pathlib import Path

import nereus_adapters

MADE = re.compile(r"""prefix=f?["']([^"']+)["']""")
KIND = re.compile(r"""OwnFolder\(["']([^"']+)["']\)""")


def test_no_other_folder_begins_as_those_that_are_swept_do():
    (root,) = nereus_adapters.__path__
    text = "\n".join(path.read_text(encoding="utf-8") for path in Path(root).rglob("*.py"))
    kinds, prefixes = set(KIND.findall(text)), set(MADE.findall(text))
    assert len(kinds) == 2
    assert prefixes
    assert not [p for p in prefixes for kind in kinds if p.startswith(kind)]
