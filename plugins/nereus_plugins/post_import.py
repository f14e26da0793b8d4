"""post_import: run a function right after a module was imported, without importing it.

Standard library only: a framework loads this in every one of its processes.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

Then = Callable[[ModuleType], None]
"""Called with the module; must not raise where its importer did nothing wrong."""


def after_import(name: str, then: Then) -> None:
    """Call ``then(module)`` as soon as the module called ``name`` has been imported.

    At once when it has been; otherwise from the import itself, once.
    """
    module = sys.modules.get(name)
    if module is not None and not _initializing(module):
        then(module)
        return
    _FINDER.waiting.setdefault(name, []).append(then)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder(MetaPathFinder):
    """Finds nothing of its own: wraps the loader of the modules that somebody waits for."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Then]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for then in self.waiting.pop(fullname, []):
                then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader's alone
        return spec


_FINDER = _Finder()
