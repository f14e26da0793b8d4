"""Stand-ins for two packages that SGLang imports and that have no wheel for a plain CPU.

The environment `real-sglang` puts this folder on PYTHONPATH; no product code knows of it. SGLang
imports ``sgl_kernel`` (CUDA kernels) and ``torchvision`` (images) at the top of files whose other
parts it needs. Names exist, classes may be derived from, decorators leave functions as they are;
whatever else calls into a stand-in raises, so no result can come out of one.
"""

import importlib.abc
import importlib.machinery
import sys
import types

ABSENT = ("sgl_kernel", "torchvision")


class StandInCalled(RuntimeError):
    """Something that no CPU wheel provides was called."""


class _Class(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = f"{cls.__name__}.{name}"
        setattr(cls, name, value)
        return value

    def __call__(cls, *args, **kwargs):
        if cls.__module__.split(".")[0] in ABSENT:
            raise StandInCalled(f"{cls.__module__}.{cls.__name__}")
        return super().__call__(*args, **kwargs)


class _Root(metaclass=_Class):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__()


class _Module(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__, self.__file__, self.__version__ = [], __file__, "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            value = _Class(name, (_Root,), {"__module__": self.__name__})
        else:
            value = _Module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and isinstance(args[0], types.FunctionType) and not kwargs:
            return args[0]  # used as a decorator
        raise StandInCalled(self.__name__)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
