"""Pure rooms: which modules may touch the world outside their arguments, and that no module keeps state.

The rules are read from what modules import, and seen in a run of every pure room whose audit events are kept.
"""

from __future__ import annotations

import ast
import collections
import enum
import functools
import importlib
import json
import operator
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest

from tests.sources import MODULES, imports, modules_of_ours, room, tree

RESOURCES = {
    "sockets": {"asyncio", "http", "select", "selectors", "socket", "socketserver", "ssl", "urllib"},
    "threads": {"_thread", "concurrent", "multiprocessing", "queue", "threading"},
    "files": {
        "errno",
        "fcntl",
        "glob",
        "io",
        "open",
        "os",
        "pathlib",
        "shutil",
        "stat",
        "tempfile",
        "np.load",
        "np.save",
        "np.fromfile",
    },
    "clocks": {"datetime", "time"},
    "randomness": {"random", "secrets", "uuid", "np.random"},
    "processes": {"signal", "subprocess"},
    "environment": {"argparse", "importlib.metadata", "platform", "input", "print"},
    "logging": {"logging", "warnings"},
    "interpreter": {
        "__import__",
        "eval",
        "exec",
        "gc",
        "globals",
        "importlib.util",
        "sys",
        "traceback",
    },
    "mapped memory": {"ctypes", "np.memmap"},
    "": {"importlib", "importlib.resources", "mmap"},
}
"""Modules, builtins and parts of numpy, by what they touch outside a function's arguments.

The last ones are for the package's own modules and data, and for anonymous memory; the run below sees any other use.
"""

QUIET = """
    __future__ abc array ast base64 bisect collections contextlib contextvars difflib enum functools hashlib heapq hmac
    html ipaddress itertools json math operator re reprlib shlex string textwrap types typing unittest weakref xml zlib
"""
"""The modules of the standard library that touch nothing outside."""

IMPURE = {
    "cli": {"clocks", "files", "environment", "interpreter", "processes"},
    "testing": {"clocks", "randomness", "interpreter", "logging", "environment", "mapped memory"},
    "__main__": {"interpreter"},
}
"""The rooms that serve, print and drive, with all that their modules use."""

STATE = {
    "staging.pipeline": {"Pipeline._by_region"},  # the pipelines in use, by staging region, held weakly
    "models.families": {"_TABLE"},  # lists of the data file, of which frozen values are made at once
}
"""Names of modules and classes whose values can change."""

PURE = sorted(name for name in MODULES if room(name) not in IMPURE)


def resources(module: ast.Module) -> set[str]:
    """The kinds of things outside that a module's imports, builtins and calls of numpy reach."""
    kinds = {name: kind for kind, names in RESOURCES.items() for name in names}
    reached: set[str] = set()
    for name, _, typed in imports(module):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names and top not in QUIET.split() and not typed:
            # the longest known part of a dotted name says what it is; an unknown module is named
            parts = name.split(".")
            dotted = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
            reached.add(next((kinds[part] for part in dotted if part in kinds), name))
    for node in ast.walk(module):
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in kinds:
            used = ast.unparse(node)
            if used.startswith("np.") or used in {"open", "input", "print", "eval", "exec", "globals", "__import__"}:
                reached.add(kinds[used])
    return reached - {""}


def test_a_pure_module_touches_nothing_outside() -> None:
    """No socket, thread, file, clock, random number, process, environment or log."""
    assert {module: found for module in PURE if (found := resources(tree(module)))} == {}


@pytest.mark.parametrize("name", IMPURE)
def test_an_impure_room_uses_what_is_listed(name: str) -> None:
    """What rooms may use is what they use: a right that nothing needs any more leaves the list."""
    used = (resources(tree(module)) for module in MODULES if room(module) == name)
    assert set().union(*used) == IMPURE[name]


def test_a_pure_module_imports_no_impure_one() -> None:
    """Neither by itself nor through others, which are pure too."""
    found = [(module, other) for module in PURE for other in modules_of_ours(module, typed=False)]
    assert [f"{module} imports {other}" for module, other in found if room(other) in IMPURE] == []


@pytest.mark.parametrize(
    "source, kind",
    [
        ("import socket", "sockets"),
        ("def f():\n    from http.client import HTTPConnection", "sockets"),
        ("from threading import Lock", "threads"),
        ("from concurrent.futures import Future", "threads"),
        ("import pathlib", "files"),
        ("def f(path): return open(path)", "files"),
        ("import numpy as np\na = np.load", "files"),
        ("import time", "clocks"),
        ("from datetime import datetime", "clocks"),
        ("import random", "randomness"),
        ("import numpy as np\ndef f(): return np.random.default_rng()", "randomness"),
        ("import subprocess", "processes"),
        ("from platform import node", "environment"),
        ("def f(): print(1)", "environment"),
        ("import logging", "logging"),
        ("import sys", "interpreter"),
        ("def f(): exec('import os')", "interpreter"),
        ("import ctypes", "mapped memory"),
        ("import sqlite3", "sqlite3"),
    ],
)
def test_what_a_module_touches_would_be_found(source: str, kind: str) -> None:
    """The checks above see each kind of thing, and a module that no list has."""
    assert resources(ast.parse(source)) == {kind}


RUN = """
import json, random, sys, threading, time
import attrs
import numpy as np
import numpy.ma, numpy.random
import kvplan
for room in kvplan.PACKAGES: getattr(kvplan, room)
from kvplan import *
from kvplan.handshake import decode, encode
from kvplan.staging import stage

events = []

def audit(event, arguments):
    if events is not None:
        events.append((event, [str(argument) for argument in arguments]))

def recorded(name):
    def record(*arguments, **options):
        events.append((name, []))
        return 0
    return record

for module in (time, random):
    for name in dir(module):
        if type(getattr(module, name)).__name__ in ("builtin_function_or_method", "method"):
            setattr(module, name, recorded(f"{module.__name__}.{name}"))
np.random.default_rng = recorded("np.random.default_rng")
threading.Thread.start = recorded("threading.Thread.start")
sys.addaudithook(audit)

def run():
    PLANTED
    model = Model.shipped("granite-4.0-h-tiny")
    sources = model.engine("prefill", tp=2, num_blocks=50)
    destinations = model.engine("decode", tp=3, num_blocks=50)
    staging = Region("staging", 1 << 60, 1 << 26)
    local = attrs.evolve(destinations[0], regions=(*destinations[0].regions, staging))
    staged = stage(local, sources, staging="staging")
    tables = {"attn": Blocks([4, 0, 7], null=0), "state": Blocks([5, 6], ordinals=[100, 107])}
    request = dict(local=tables, remote=tables, tokens=(0, 40))
    plan = plan_reads(destinations[0], sources)
    assert sum(spec.num_bytes for spec in plan.bind(**request))
    assert verify(plan, **request).ok
    assert certify(plan).complete and certify(plan_mesh(destinations, sources)).complete
    plan_writes(sources[0], destinations, siblings=sources[1:]).bind(**request)
    assert sum(len(chunk.copies) for chunk in staged.bind(**request))
    offers = [encode(worker) for worker in sources]
    assert [decode(offer) for offer in offers] == list(sources)
    compare(destinations[0], sources[0]), problems(b"{}"), plan.cost(40), tails(destinations[0], tables, (0, 40))
    assert explain(plan), str(show(plan))

run()
found, events = events, None
print(json.dumps(found))
"""
"""Plans, binds, proves, verifies, encodes, decodes, stages and draws; prints each audit event and clock read."""

ALLOWED_EVENTS = ("array.__new__", "builtins.id", "object.__getattr__", "sys._getframe")
"""Events of the interpreter that say nothing of the world outside."""


def seen_events(planted: str = "") -> Iterator[tuple[str, list[str]]]:
    """The events of a run in a process of its own, without those of anonymous memory and of the package's data."""
    program = RUN.replace("PLANTED", planted)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for event, arguments in json.loads(run.stdout):
        anonymous = event == "mmap.__new__" and arguments[0] == "-1"
        data = event == "open" and re.search(r"kvplan/models/\w+\.json$", arguments[0]) and arguments[1] != "w"
        if not (event in ALLOWED_EVENTS or anonymous or data):
            yield event, arguments


def test_a_run_of_the_pure_rooms_touches_nothing_outside() -> None:
    """Python reports no file, socket, process, import or thread, and no clock or random number is asked for."""
    assert list(seen_events()) == []


PLANTED = {
    "open": "open('/dev/null').close()",
    "socket.__new__": "__import__('socket').socket().close()",
    "os.listdir": "__import__('os').listdir('.')",
    "os.system": "__import__('os').system('true')",
    "threading.Thread.start": "threading.Thread(target=int).start()",
    "time.monotonic": "time.monotonic()",
    "random.random": "random.random()",
    "np.random.default_rng": "np.random.default_rng()",
}
"""What touches the world outside, by the event that says so."""


def test_what_a_run_touches_would_be_seen() -> None:
    """The run above reports what is planted in it."""
    assert PLANTED.keys() <= {event for event, _ in seen_events("; ".join(PLANTED.values()))}


FIELD = type(vars(collections.namedtuple("Pair", "first"))["first"])
FROZEN = (
    types.NoneType, bool, int, float, str, bytes, range, enum.Enum, type, re.Pattern, np.dtype, np.generic,
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType,
    types.MemberDescriptorType, types.GetSetDescriptorType, types.GenericAlias, types.UnionType,
    property, functools.cached_property, operator.attrgetter, json.JSONDecoder, FIELD, pathlib.Path,
)  # fmt: skip
"""Types whose values do not change, or hold nothing that a program keeps there."""

FROZEN_SETATTR = attrs.frozen(type("Frozen", (), {})).__setattr__

OF_PYTHON = re.compile("__|_abc_|_field_|_fields|_member_|_value2|_value_repr|_unhash")
"""Attributes that Python itself gives classes, named tuples and enumerations."""


def is_frozen(value: Any) -> bool:
    """Return whether a program can change no part of a value."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_frozen, value))
    if isinstance(value, types.MappingProxyType):
        return all(map(is_frozen, value.values()))
    if isinstance(value, functools.partial):
        return is_frozen((value.func, value.args))
    if isinstance(value, staticmethod | classmethod):
        return is_frozen(value.__func__)
    if isinstance(value, np.ndarray):
        return not value.size or not value.flags.writeable
    if attrs.has(type(value)) and type(value).__setattr__ is FROZEN_SETATTR:
        return all(is_frozen(getattr(value, field.name)) for field in attrs.fields(type(value)))
    of_python = type(value).__module__ in {"typing", "collections.abc", "__future__"} or type(value) is object
    of_click = any(base.__module__ in {"click.core"} for base in type(value).__mro__)
    return of_python or of_click or isinstance(value, FROZEN)


def state_of(module: types.ModuleType) -> set[str]:
    """The names of a module and of the classes that it defines whose values a program could change."""
    values = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    for name, value in list(values.items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            values |= {f"{name}.{key}": part for key, part in vars(value).items() if not OF_PYTHON.match(key)}
    return {name for name, value in values.items() if not is_frozen(value)}


def test_a_module_keeps_no_state() -> None:
    """What modules and classes hold is frozen to its depth: a call leaves nothing behind for the next one."""
    names = {name: "kvplan" if name == "__init__" else f"kvplan.{name}" for name in MODULES if name != "__main__"}
    states = {name: state_of(importlib.import_module(names[name])) - {"__all__"} for name in names}
    assert {name: state for name, state in states.items() if state} == STATE


@pytest.mark.parametrize(
    "source, name",
    [
        ("a = {}", "a"),
        ("a: list[int] = []", "a"),
        ("a = {1}", "a"),
        ("a = [0] * 3", "a"),
        ("import collections\na = collections.deque()", "a"),
        ("import json\na = json.loads('{}')", "a"),
        ("a, b = 1, []", "b"),
        ("if True:\n    a = dict(b=1)", "a"),
        ("import numpy\na = numpy.zeros(2)", "a"),
        ("from types import MappingProxyType\na = MappingProxyType({'b': []})", "a"),
        ("a = (1, ([],))", "a"),
        ("class A:\n    a = []", "A.a"),
        ("import functools\n@functools.cache\ndef f(): pass", "f"),
        ("import attrs\n@attrs.define\nclass A:\n    b: int = 1\na = A()", "a"),
        ("import attrs\n@attrs.frozen\nclass A:\n    b: list\na = A([])", "a"),
        ("import itertools\na = itertools.count()", "a"),
    ],
)
def test_state_would_be_found(source: str, name: str) -> None:
    """The check above sees the ways in which a module could keep state."""
    module = types.ModuleType("planted")
    exec(source, vars(module))
    assert state_of(module) == {name}


@pytest.mark.parametrize("source", ["a = (1, 'b', None)", "a = frozenset({1})", "def f(): return []", "a = object()"])
def test_values_that_stay_are_no_state(source: str) -> None:
    """The check above lets frozen values be."""
    module = types.ModuleType("planted")
    exec(source, vars(module))
    assert state_of(module) == set()
