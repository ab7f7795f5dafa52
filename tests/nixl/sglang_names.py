"""SGLang's names, made where SGLang is not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import pytest


def made(
    monkeypatch: pytest.MonkeyPatch, names: Mapping[str, Mapping[str, Any]], modules: Iterable[str]
) -> dict[str, ModuleType]:
    """The plugin's modules, which import SGLang's names from modules that are made of them."""
    for name, contents in names.items():
        module = ModuleType(name)
        vars(module).update(contents)
        parts = name.split(".")
        for i in range(1, len(parts)):
            parent = ".".join(parts[:i])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    found = {}
    for each in modules:
        monkeypatch.delitem(sys.modules, f"kvplan_nixl.sglang.{each}", raising=False)
        found[each] = importlib.import_module(f"kvplan_nixl.sglang.{each}")
    return found
