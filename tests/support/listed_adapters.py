"""What ``nereus adapters`` says of an installed engine."""

import json
import subprocess
import sys


def require_listed(name, version):
    """Require an engine to be listed as ready, by its version, with what it can and cannot do."""
    command = [sys.executable, "-m", "nereus_core.cli", "adapters"]
    wide = {"COLUMNS": "300", "PATH": "/usr/bin"}
    table, listed = (
        subprocess.run(
            [*command, *more], capture_output=True, text=True, check=True, timeout=60, env=wide
        ).stdout
        for more in ((), ("--json",))
    )
    (row,) = [line.split() for line in table.splitlines() if line.split()[:1] == [name]]
    assert {version, "ready"} <= set(row)
    assert row.count("G") == 4  # split, merge, extend, destroy; of generate stages
    (told,) = [one for one in json.loads(listed)["adapters"] if one["name"] == name]
    assert (told["installed"], told["status"], told["todo"]) == (version, "ready", "")
    for primitive in ("split", "merge", "extend", "destroy"):
        can = told["capabilities"][primitive]
        assert can["generate"]["level"] == "full"
        assert can["train"]["level"] == can["infer"]["level"] == "unsupported"
        assert can["train"]["reason"]
    assert told["features"]
