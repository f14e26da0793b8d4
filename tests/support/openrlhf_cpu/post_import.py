"""Run a function on a module right after it was imported, whoever imports it."""

import importlib.abc
import importlib.util
import sys

_hooks = {}


def on_import(name, function):
    """Call ``function(module)`` when ``name`` has been imported; at once where it has been."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        _hooks.setdefault(name, []).append(function)


class _Loader(importlib.abc.Loader):
    def __init__(self, inner, name):
        self._inner, self._name = inner, name

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        self._inner.exec_module(module)
        for function in _hooks[self._name]:
            function(module)

    def __getattr__(self, name):  # get_code and others, for runpy
        return getattr(self._inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self._inside = set()

    def find_spec(self, name, path, target=None):
        if name not in _hooks or name in self._inside:
            return None
        self._inside.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._inside.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name)
        return spec


sys.meta_path.insert(0, _Finder())
