"""Distributions put on the path of one test: plugins come in through real entry points."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path

import pytest

from nereus_core.registry import Registry

ADAPTER = """
from nereus_core.capabilities import Capabilities
from nereus_core.declaration import AdapterDeclaration
from nereus_core.hookspecs import hookimpl

@hookimpl
def nereus_declare_adapter():
    return AdapterDeclaration("NAME", "for tests", Capabilities.everything(), REQUIREMENT, INSTALL)
"""


class Shelf:
    """A folder on sys.path that distributions are put on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.modules: list[str] = []

    def put(self, distribution: str, version: str = "1.0", **modules: str) -> None:
        """Install a distribution with one entry point per module (name=source)."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        lines = ["[nereus]"]
        for name, source in modules.items():
            module = f"plugin_{distribution.replace('-', '_')}_{name}"
            (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
            lines.append(f"{name} = {module}")
            self.modules.append(module)
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        importlib.invalidate_caches()

    def adapter(
        self,
        name: str,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        requirement: str | None = None,
        install: str = "",
        more: str = "",
    ) -> None:
        """Install a distribution with one adapter of this name."""
        source = ADAPTER.replace("NAME", name).replace("REQUIREMENT", repr(requirement))
        source = source.replace("INSTALL", repr(install)) + textwrap.dedent(more)
        self.put(distribution or f"dist-{name}", version, **{name: source})

    def registry(self, *names: str, strict: bool = False) -> Registry:
        """Load what the environment has, restricted to these entry points."""
        self._monkeypatch.setenv("NEREUS_PLUGINS", ",".join(names))
        self._monkeypatch.setenv("NEREUS_STRICT_PLUGINS", "1" if strict else "0")
        self._monkeypatch.setattr(Registry, "_of_process", {})
        return Registry.load()


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(Registry, "_of_process", {})
    made = Shelf(folder, monkeypatch)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)
