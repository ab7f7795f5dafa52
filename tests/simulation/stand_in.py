"""Stand-ins for an engine's modules, which are not imported: they have the few values that a connector reads."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from kvplan_nixl.serving.access import Access


class _StandIn(ModuleType):
    """A module of an engine: it has each name that is asked for, by default an empty class."""

    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.values[name] if name in self.values else type(name, (), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for the modules of an engine."""

    def __init__(self, engine: str, values: Mapping[str, Any]) -> None:
        self._engine = engine
        self._values = values

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self._engine:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.values = self._values
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def stand_in(engine: str, names: Sequence[str], values: Mapping[str, Any]) -> list[ModuleType]:
    """Return modules of ``kvplan_nixl``'s connector for an engine, which see stand-ins. Nobody else sees them."""
    finder = _Finder(engine, values)
    prefixes = (engine, f"kvplan_nixl.{engine}")

    def is_hidden(name: str) -> bool:
        return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)

    hidden = {name: module for name, module in sys.modules.items() if is_hidden(name)}
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        return [importlib.import_module(f"kvplan_nixl.{engine}.{name}") for name in names]
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if is_hidden(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)
        # what a package has been given as its attribute, too
        if prefixes[1] in hidden:
            setattr(sys.modules["kvplan_nixl"], engine, hidden[prefixes[1]])


def check_server(address: str, port: int) -> None:
    """Refuse a server of rooms that is not a prefill engine's, as an operator who lists them in bootstrap_servers."""
    hosts = [f"prefill-{number}{place}" for number in range(4) for place in ("", "-elsewhere")]
    Access(key=b"the key of all engines", servers=tuple(f"{host}:{port}" for host in hosts)).check_server(address)
