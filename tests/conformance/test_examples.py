import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from nereus_core.capabilities import Feature

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    "nereus" not in {p.name for p in metadata.entry_points(group="pytest11")},
    reason="nereus is not installed here: its pytest plugin cannot be found",
)


def hold(folder, name, **environment):
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"),
            *("--pyargs", "nereus_conformance", f"--adapter={name}"),
        ],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_reference_adapter_keeps_the_contract(tmp_path):
    run = hold(tmp_path, "sim")

    assert run.returncode == 0, run.stdout[-4000:]
    assert f"  features     {len(Feature)} passed" in run.stdout


def test_the_toy_adapter_keeps_the_contract_as_an_installed_plugin(tmp_path):
    info = tmp_path / "nereus_toy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nereus-toy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[nereus]\ntoy = nereus_toy\n")
    seen = {p.name for p in metadata.entry_points(group="nereus")}
    added = [] if "toy" in seen else [str(tmp_path), str(ROOT / "examples/toy_adapter")]
    path = os.pathsep.join([*added, *filter(None, [os.environ.get("PYTHONPATH")])])
    run = hold(tmp_path, "toy", PYTHONPATH=path)

    assert run.returncode == 0, run.stdout[-4000:]
    assert "  split        refused      passed       passed" in run.stdout


def test_every_case_is_listed_in_the_changes_and_only_those():
    from nereus_conformance.suite import case_names

    text = (ROOT / "conformance/CHANGES.md").read_text(encoding="utf-8")
    listed = {part.strip("`") for part in text.split() for part in [part.strip(",")]}

    assert {name for name in listed if name.startswith("test_")} == case_names()


def test_every_case_says_what_to_check_when_it_fails():
    import ast

    silent = []
    for path in sorted((ROOT / "conformance/nereus_conformance").glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = " ".join((ast.get_docstring(node) or "").split())
                if "If this fails, check" not in text:
                    silent.append(node.name)

    assert not silent
