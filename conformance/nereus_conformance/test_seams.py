"""The names in a framework that an adapter stands on, read from source and never imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nereus_conformance.suite import Suite
from nereus_core.declaration import Seam
from nereus_core.errors import SeamBroken
from nereus_core.seams import check_seam, source_of


def _seams(suite: Suite) -> tuple[Seam, ...]:
    if not suite.declaration.seams:
        pytest.skip("the adapter declares no seams")
    if suite.status.installed is None:
        pytest.skip("the backend's source is not installed")
    return suite.declaration.seams


def _broken(seams: Iterable[Seam]) -> list[str]:
    found = []
    for seam in seams:
        try:
            check_seam(seam)
        except SeamBroken as error:
            found.append(str(error))
    return found


def test_every_seam_resolves(suite: Suite) -> None:
    """Each name that the adapter stands on is in the installed framework.

    If this fails, check what the framework's new version calls it, and the requirement.
    """
    from dataclasses import replace

    broken = _broken([replace(seam, parameters=None) for seam in _seams(suite)])
    assert not broken, "\n".join(broken)


def test_seam_signatures_match(suite: Suite) -> None:
    """Each function that the adapter calls still takes the arguments it passes.

    If this fails, check the call beside the seam.
    """
    broken = _broken([seam for seam in _seams(suite) if seam.parameters is not None])
    assert not broken, "\n".join(broken)


def test_no_framework_name_is_used_that_is_not_a_seam(suite: Suite) -> None:
    """What the adapter imports of its framework is declared, so that the seam cases see it.

    If this fails, check the imports listed, and add a Seam for each.
    """
    declared = {(s.module, s.qualname.partition(".")[0]) for s in _seams(suite)}
    name = Requirement(str(suite.declaration.requirement)).name
    roots = {m for m, owners in metadata.packages_distributions().items() if name in owners}
    source = Path(str(getattr(suite.plugin.module, "__file__", "")))
    files = source.parent.rglob("*.py") if source.name == "__init__.py" else [source]
    used = set()
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.ImportFrom)
                and not node.level
                and (node.module or "").partition(".")[0] in roots
            ):
                used |= {(str(node.module), alias.name) for alias in node.names}
    # `from package import module` names a module, whose parts are seams of their own.
    undeclared = sorted(
        f"{module}:{name}"
        for module, name in used - declared
        if source_of(f"{module}.{name}") is None
    )
    assert not undeclared, f"used and not declared as seams: {', '.join(undeclared)}"
