"""An importable nothing in place of triton: decorators pass functions through, and nothing can run.

The real package serves as well on a CPU; it is 900 MB installed.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.9.0"


class _Nothing(types.ModuleType):
    """A module whose every attribute exists: a class for a capital letter, else a submodule."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            value = _Nothing(f"{self.__name__}.{name}")
            sys.modules.setdefault(value.__name__, value)
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # @triton.jit
        return lambda function: function  # @triton.autotune(...)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every ``triton.*`` module, as nothing."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("triton."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Nothing(spec.name)

    def exec_module(self, module):
        """There is no code to run."""


sys.meta_path.insert(0, _Finder())
_top = _Nothing("triton")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_top, name)


def cdiv(a, b):
    """Quotient, rounded up; SGLang computes sizes with it on the host."""
    return -(a // -b)


def next_power_of_2(n):
    """The smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length() if n > 0 else 1
