"""Empty stand-ins for modules that a peer imports and its planner never calls.

A serving engine's planner is in modules that import half of the engine. :func:`only` loads the named modules of a
package as they are, and an empty module in place of every other one. While modules load, names from an empty module
can be subclassed, subscripted and used as decorators. After :func:`close`, calling one raises an error, so no plan
depends on a stand-in.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class StandInCalledError(Exception):
    """A peer's function called a stand-in."""


class _Kind(type):
    """The type of stand-ins: empty classes whose attributes are stand-ins too."""

    closed = False

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "stands_in" not in vars(cls):  # a peer's own class, made from a stand-in
            return super().__call__(*args, **kwargs)
        if _Kind.closed:
            raise StandInCalledError(cls.__name__)
        return args[0] if len(args) == 1 and callable(args[0]) else cls  # as a decorator, or as anything else

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _stand_in(name: str) -> Any:
    return _Kind(name, (), {"stands_in": True})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Finds empty modules for some packages, except for the real modules, which it leaves to other finders."""

    def __init__(self, packages: Iterable[str], real: Iterable[str]) -> None:
        self.packages, self.real = set(packages), set(real)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname in self.real or fullname.partition(".")[0] not in self.packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        made = _Module(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def only(package: str, sources: Path, real: Iterable[str], absent: Iterable[str] = ()) -> None:
    """Load only the ``real`` modules of a package in ``sources``, and none of the packages ``absent``.

    Their parent packages load without their ``__init__``, which may import the whole engine, unless they are named too.
    """
    real = set(real)
    for module in sorted(real):
        parts = module.split(".")
        for name in (".".join(parts[:end]) for end in range(1, len(parts))):
            if name not in real and name not in sys.modules:
                bare = types.ModuleType(name)
                bare.__path__ = [str(sources.joinpath(*name.split(".")))]
                sys.modules[name] = bare
    sys.meta_path.insert(0, _Finder({package, *absent}, real))


def close() -> None:
    """From here on calling a stand-in raises :class:`StandInCalledError`."""
    _Kind.closed = True
