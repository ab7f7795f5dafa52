"""All public functions, constructors and class methods, given nothing but wrong values: a KVPlanError, or a result.

``tests.bad_values`` passes one wrong value among right ones, to what the rooms list. Here everything is called that can
be reached without an underscore, by its signature alone, so that nothing new has to be listed.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import KVPlanError

WRONG: dict[str, Any] = {
    "None": None,
    "True": True,
    "-1": -1,
    "1 << 70": 1 << 70,
    "1.5": 1.5,
    "nan": float("nan"),
    "''": "",
    "'x'": "x",
    "b''": b"",
    "[]": [],
    "{}": {},
    "()": (),
    "object()": object(),
    "int": int,
    "array": np.arange(3),
}

OTHER_ROOMS = ("cli", "support")
"""The command line reads text; its tests are its own. Checks get values to check, and the rest from code."""


def rooms() -> Iterator[ModuleType]:
    """The package, its rooms, and the package for NIXL if that is there."""
    yield kvplan
    for module in pkgutil.iter_modules(kvplan.__path__):
        if not module.name.startswith("_") and module.name not in OTHER_ROOMS:
            yield importlib.import_module(f"kvplan.{module.name}")
    yield importlib.import_module("kvplan_nixl.serving.store")
    if importlib.util.find_spec("nixl") is not None:
        yield importlib.import_module("kvplan_nixl")


def names_of(room: ModuleType) -> Iterator[str]:
    """What a room lists or, if it lists nothing, what it defines."""
    listed = getattr(room, "__all__", None)
    if listed is None:
        listed = [name for name, value in vars(room).items() if getattr(value, "__module__", None) == room.__name__]
    yield from (name for name in listed if not name.startswith("_"))


def classes() -> set[type]:
    """All classes, but enumerations and protocols, of which nobody makes an instance."""
    values = {
        getattr(room, name) for room in rooms() for name in names_of(room) if inspect.isclass(getattr(room, name))
    }
    return {value for value in values if not getattr(value, "_is_protocol", False) and not issubclass(value, Enum)}


def public() -> dict[str, Callable[..., Any]]:
    """All functions, constructors, and methods of classes, by their names."""
    calls: dict[str, Callable[..., Any]] = {}
    for room in rooms():
        for name in names_of(room):
            value = getattr(room, name)
            label = f"{room.__name__}.{name}"
            if inspect.isfunction(value):
                calls[label] = value
            # a protocol has no constructor, and Python's own looks up the members of an enumeration
            if (
                not inspect.isclass(value)
                or inspect.isabstract(value)
                or getattr(value, "_is_protocol", False)
                or issubclass(value, Enum | dict)
            ):
                continue
            calls[label] = value
            for method, kind in vars(value).items():
                if isinstance(kind, classmethod | staticmethod) and not method.startswith("_"):
                    calls[f"{label}.{method}"] = getattr(value, method)
    return calls


CALLS = public()


def arguments_of(call: Callable[..., Any], value: Any) -> Iterator[dict[str, Any]]:
    """The value for all parameters without a default, and for one of the others too."""
    parameters = inspect.signature(call).parameters.values()
    required: dict[str, Any] = {}
    optional: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            required[parameter.name] = value
        else:
            optional.append(parameter.name)
    yield required
    for name in optional:
        yield {**required, name: value}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_wrong_values_end_in_typed_errors(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is passed, no error of Python's own comes out."""
    monkeypatch.chdir(tmp_path)
    for value in WRONG.values():
        for arguments in arguments_of(CALLS[name], value):
            with suppress(KVPlanError):
                result = CALLS[name](**arguments)
                # generators begin to work when they are asked
                if inspect.isgenerator(result):
                    next(result, None)
                if hasattr(result, "close"):
                    result.close()


def test_functions_methods_and_other_rooms_are_found() -> None:
    """Nothing is left out for want of a list."""
    assert {"kvplan.plan_reads", "kvplan.executor.not_planned_for", "kvplan.plan.PairCost.of"} <= {*CALLS}
    assert {"kvplan.staging.choose", "kvplan_nixl.serving.store.evict", "kvplan.PeerError"} <= {*CALLS}
