"""Reprs: one line of a debugger or of a failed test, however much a value holds."""

from __future__ import annotations

import importlib
import inspect
import io
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis.vendor.pretty import pretty

import kvplan
from kvplan import Blocks, Budget, Model, Status, Transfer, plan_mesh, plan_reads, verify
from kvplan._text import brief_repr
from kvplan.staging import SHARED_MEMORY, Pipeline, StagedTransfer, choose, stage
from kvplan.testing import FakeCopier, FakeNetwork
from tests.small import engine
from tests.staged import NAME, with_staging

MAX_CHARACTERS = 200
ROOMS = ("kvplan", *(f"kvplan.{room}" for room in kvplan.PACKAGES), "kvplan.testing.strategies", "kvplan_nixl")
LARGE: dict[str, Any] = {"text": "x" * 10_000, "list": list(range(10_000)), "array": np.arange(10_000)}


def public_classes() -> list[type]:
    """The classes behind every room's names."""
    rooms = [importlib.import_module(room) for room in ROOMS]
    values = [getattr(room, name) for room in rooms for name in getattr(room, "__all__", ())]
    return sorted({value for value in values if inspect.isclass(value)}, key=lambda value: value.__qualname__)


WITHOUT_VALUES: set[Any] = {BaseException.__repr__, Enum.__repr__, dict.__repr__, object.__repr__}
"""Reprs that show a message, a name, or values that have short reprs."""


def is_brief(kind: Any) -> bool:
    """Whether a class has the repr that most have."""
    return bool(kind.__repr__ == brief_repr)


def large_values() -> Iterator[Any]:
    """Values of the classes that write their reprs themselves, large ones where these can be large."""
    model = Model.shipped("deepseek-v3")
    decode, prefill = model.engine("decode", tp=4, num_blocks=1000), model.engine("prefill", tp=8, num_blocks=1000)
    mesh = plan_mesh(decode, prefill)
    plan = mesh.plans[0]
    tables: Any = {"local": {"attn": Blocks(range(900))}, "remote": {"attn": Blocks(range(900))}}
    (spec, *_) = plan.bind(**tables)
    yield from (decode[0], mesh, plan, spec, spec.local_table, plan.pairs[0], plan.cost(100))
    yield from (Blocks(range(100_000)), Blocks([0] * 9999 + [7], null=0), Blocks([1, 2], ordinals=[0, 1 << 40]))
    local, remotes = with_staging(engine("decode", layers=40)[0]), engine("prefill", 4, layers=40, order="NH")
    staged = stage(local, remotes, staging=NAME)
    request: Any = {"local": {"attn": Blocks([7, 3, 5])}, "remote": {"attn": Blocks([2, 9, 4])}}
    chunk = next(iter(staged.bind(**request)))
    yield from (choose(local, remotes, tokens=40, rates=SHARED_MEMORY), staged, staged.cost(40), chunk, *chunk.copies)
    yield verify(staged.direct, **request, copies={})
    network = FakeNetwork([local, *remotes])
    yield Pipeline(network.executor(local), NAME, FakeCopier(network.memory, local.key))
    yield Budget(1 << 61)
    yield StagedTransfer("r" * 40)
    yield Transfer(spec, "r" * 40, Status.RUNNING)


@pytest.mark.parametrize("content", LARGE)
@pytest.mark.parametrize("kind", [kind for kind in public_classes() if is_brief(kind)])
def test_a_value_of_large_fields_has_a_short_repr(kind: Any, content: str) -> None:
    """A class with ``brief_repr`` is short whatever its fields hold."""
    value = kind.__new__(kind)
    for field in attrs.fields(kind):
        object.__setattr__(value, field.name, LARGE[content])
    assert len(repr(value)) <= MAX_CHARACTERS


def test_large_values_have_short_reprs() -> None:
    """Every public class that writes its repr itself has a value here."""
    kinds = set[str]()
    for value in large_values():
        assert len(repr(value)) <= MAX_CHARACTERS, repr(value)[:1000]
        kinds.add(type(value).__name__)
    own = {kind.__name__ for kind in public_classes() if not (is_brief(kind) or kind.__repr__ in WITHOUT_VALUES)}
    assert own - kinds == {
        "NixlExecutor",
        "NixlTransfer",
        "SharedKey",
    }  # short by what they show


def test_a_short_table_is_shown_as_the_call_that_makes_it() -> None:
    """A long one says how many blocks it has; Hypothesis prints all."""
    assert repr(Blocks([7, 3], first=2)) == "Blocks([7, 3], first=2)"
    assert repr(Blocks(range(100_000))) == "<Blocks 0, 1, 2, ..., 99999: 100000 of ordinals [0, 100000)>"
    assert pretty(Blocks(range(99))) == f"Blocks({[*range(99)]})"
    prompt = io.StringIO()
    Blocks(range(100_000))._repr_pretty_(SimpleNamespace(text=prompt.write), False)  # as IPython calls it
    assert prompt.getvalue() == repr(Blocks(range(100_000)))


def test_pytest_shows_what_is_wrong_of_a_report() -> None:
    """The repr of a report is its first lines."""
    (local,), (remote,) = engine("decode"), engine("prefill")
    tables: Any = {"local": {"attn": Blocks([7])}, "remote": {"attn": Blocks([2])}}
    report = verify(plan_reads(local, [remote]), **tables, copies={})
    assert repr(report) == (
        "<Report not verified: 0 bytes in 0 descriptors to 1 worker; COVER: at decode/0: 512 bytes missing: everywhere>"
    )
