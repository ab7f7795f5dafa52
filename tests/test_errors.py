"""The error table: every kind of malformed description, pair and request, with its exact message."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

import kvplan
from kvplan import (
    Axis,
    Blocks,
    Context,
    Group,
    KVPlanError,
    Region,
    View,
    Worker,
    certify,
    plan_reads,
    plan_writes,
    view_of,
)
from kvplan._text import shown
from kvplan.describe.axes import MAX_SEGMENTS
from kvplan.errors import CODES
from tests.pages import ROOT
from tests.small import engine
from tests.stand_in import StandIn

NOT_CORE = {
    "LEASE",
    "PROMPT",
    "LAYOUT",
    "CONFIG",
    "SETTING",
    "MEMORY",
    "BACKEND",
    "PAGE",
    "PEER",
    "TRANSFER",
    "MESSAGE",
    "VERSION",
    "KEY",
}
"""Codes of modules that make layouts, read configurations or messages, keep leases and move bytes, with own tests."""

PIECES = MAX_SEGMENTS + 1
TOKEN, DIM = Axis("token", 0, 4, 4, 16), Axis("dim", 0, 8, 8, 2)


def region(**changes: Any) -> Region:
    return Region(**{"name": "kv", "address": 4096, "size_bytes": 640, **changes})


def axis(**changes: Any) -> Axis:
    return Axis(**{"name": "head", "start": 0, "stop": 4, "size": 8, "stride_bytes": 256, **changes})


def view(**changes: Any) -> View:
    fields = {"name": "layers.0", "group": "attn", "region": "kv", "dtype": "bfloat16", "axes": (TOKEN, DIM)}
    return View(**{**fields, "num_blocks": 10, "block_stride_bytes": 64, **changes})


def worker(**changes: Any) -> Worker:
    fields = {"engine_id": "p", "rank": 0, "regions": [region()], "groups": [Group("attn", 4)], "views": [view()]}
    return Worker(**{**fields, **changes})


def read_view(tensor: Any = None, pattern: Any = "block token dim", **changes: Any) -> View:
    whole = StandIn((10, 4, 8)) if tensor is None else tensor
    return view_of(whole, pattern, **{"name": "layers.0", "group": "attn", "region": region(), **changes})


def pair(**changes: Any) -> object:
    """A plan for a worker like the source, but for these fields of its view."""
    return plan_reads(worker(engine_id="d", views=[view(**changes)]), [worker()])


def head_pair(ours: Axis, theirs: Sequence[Axis]) -> object:
    """A plan where each worker's view holds a part of the head axis."""

    def holder(engine_id: str, rank: int, part: Axis) -> Worker:
        held = view(axes=(part, TOKEN, DIM), block_stride_bytes=4096)
        return worker(engine_id=engine_id, rank=rank, regions=[region(size_bytes=40960)], views=[held])

    return plan_reads(holder("d", 0, ours), [holder("p", rank, part) for rank, part in enumerate(theirs)])


def group_pair(ours: Group, theirs: Group, *digits: Axis) -> object:
    """A plan between two groups."""

    def holder(engine_id: str, group: Group) -> Worker:
        axes = (DIM,) if group.is_state else (*(digits or [TOKEN]), DIM)
        return worker(
            engine_id=engine_id,
            groups=[group],
            regions=[region(size_bytes=1 << 40)],
            views=[view(axes=axes, num_blocks=1)],
        )

    return plan_reads(holder("d", ours), [holder("p", theirs)])


def bind(local: Any = None, remote: Any = None, tokens: Any = (0, 12)) -> object:
    (mine,), (other,) = engine("d"), engine("p")
    tables = [{"attn": Blocks([3, 1, 2])} if table is None else table for table in (local, remote)]
    return plan_reads(mine, [other]).bind(local=tables[0], remote=tables[1], tokens=tokens)


def bind_writes(local: Blocks, remote: Blocks) -> object:
    (mine,), (other,) = engine("p"), engine("d")
    return plan_writes(mine, [other]).bind(local={"attn": local}, remote={"attn": remote}, tokens=(0, 12))


def bind_large() -> object:
    (mine,), (other,) = engine("d", blocks=1 << 30, layers=1), engine("p", blocks=1 << 30, layers=1)
    last = {"attn": Blocks([(1 << 30) - 1])}
    return plan_reads(mine, [other]).bind(local=last, remote=last, tokens=(0, 3))


@attrs.frozen
class Row:
    """A call that is refused, the message, and the details."""

    call: str
    message: str
    details: str

    @property
    def code(self) -> str:
        """The message's code."""
        return self.message.split(":")[0]

    def error(self) -> KVPlanError:
        """What the call raises."""
        return error_of(lambda: eval(self.call, vars(kvplan) | globals()))


def certify_nothing() -> object:
    """The certificate of a plan whose only pair was emptied."""
    plan = plan_reads(worker(engine_id="d"), [worker()])
    return certify(attrs.evolve(plan, pairs=(attrs.evolve(plan.pairs[0], group_pairs=()),)))


TABLE = (ROOT / "tests" / "golden" / "refusals.txt").read_text().splitlines()
LINES = [line.strip() for line in TABLE if line and not line.startswith("#")]
REFUSALS = list(itertools.starmap(Row, zip(LINES[::3], LINES[1::3], LINES[2::3], strict=True)))
"""Each call of the table, and below it the message that it is refused with, and the details."""


def words(details: Mapping[str, Any]) -> str:
    """Details on one line."""
    texts = {key: shown(value) if isinstance(value, int) else repr(value) for key, value in details.items()}
    return ", ".join(f"{key}={text}" for key, text in texts.items()) or "no details"


def error_of(call: Callable[[], object]) -> KVPlanError:
    """The error that a call ends in."""
    with pytest.raises(KVPlanError) as caught:
        call()
    return caught.value


def test_the_table_has_every_code_of_the_core() -> None:
    """No code that values, pairs and requests can be refused with is missing from the table."""
    assert {row.code for row in REFUSALS} == set(CODES) - NOT_CORE


GRAMMAR = re.compile(r"[A-Z]+: cannot .+: expected .+, got .+?( \(.+\))?")
FOREIGN = re.compile(r"np\.|array\(|dtype\(|<.* at 0x|<class|<attrs|Attribute\(|Error")


def in_grammar(text: str) -> bool:
    """Whether a message is one printable line of the one grammar, without any library's notation for a value."""
    return text.isprintable() and GRAMMAR.fullmatch(text) is not None and FOREIGN.search(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "SIZE: cannot pair x: expected 1",
        "SIZE: cannot pair x, got 2",
        "SIZE: cannot pair x: expected 1,\n got 2",
        "SIZE: cannot pair x: expected 1, got np.int64(2)",
        "SIZE: cannot pair x: expected 1, got array([1, 2])",
        "SIZE: cannot pair x: expected 1, got <object object at 0x7f00>",
    ],
)
def test_the_grammar_refuses_what_it_should(text: str) -> None:
    """The check of the grammar can fail: messages with a part missing, two lines or a foreign notation do."""
    assert not in_grammar(text)


def plain(value: object) -> bool:
    """Whether a value is made of the standard library's plain types."""
    if isinstance(value, tuple):
        return all(map(plain, value))
    return type(value) in (int, str, bool, float, type(None))


@pytest.mark.parametrize("row", REFUSALS, ids=[row.code for row in REFUSALS])
def test_a_refusal_says_exactly_this(row: Row) -> None:
    """A code of the closed set, one line of the grammar, and plain details; a worker process reports it as it is."""
    error = row.error()
    for one in (error, pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(one) is KVPlanError
        assert (one.code, str(one), words(one.details)) == (row.code, row.message, row.details)
        assert dict(one.details) == dict(error.details)
        # never an array, a numpy scalar or the object that was refused
        assert all(map(plain, one.details.values())), dict(one.details)
    assert row.code in CODES
    assert in_grammar(row.message)


def test_details_cannot_be_changed() -> None:
    """Details are read-only."""
    details = error_of(lambda: region(size_bytes=0)).details
    with pytest.raises(TypeError, match="does not support item assignment"):
        details["value"] = 1  # type: ignore[index]


def test_a_hint_stands_in_brackets_at_the_end() -> None:
    """With a hint the text ends in it, without one it ends in the value."""
    with_hint = KVPlanError("SIZE", "pair", expected="1", got="2", hint="try 1", size=2)
    assert str(with_hint) == "SIZE: cannot pair: expected 1, got 2 (try 1)"
    assert str(KVPlanError("SIZE", "pair", expected="1", got="2")) == "SIZE: cannot pair: expected 1, got 2"
    assert with_hint.details == {"size": 2}


WRONG: tuple[Any, ...] = (
    *(None, "", "x", "x\ny", "\ud800", b"x", True, np.True_, 1.0, np.float64(2), np.longdouble(1), float("nan"), 1j),
    *(-1, np.int64(-1), np.uint64(1 << 63), 1 << 63, 1 << 64, 1 << 20000, np.str_("q"), np.dtype("float16")),
    *((), [], {}, {1: 2}, set(), (1, 2), [None], ["x"], range(3), object(), int, iter(())),
    *(np.arange(2), np.array(3), np.zeros(0), TOKEN, Group("attn", 4), StandIn((1,))),
)
MAKERS: Mapping[Callable[..., object], tuple[str, ...]] = {
    region: ("name", "address", "size_bytes", "memory", "device_id"),
    axis: ("name", "start", "stop", "size", "stride_bytes"),
    Context: ("rank", "size", "interleave_tokens"),
    lambda **changes: Group(**{"name": "attn", **changes}): ("name", "tokens_per_block", "context"),
    view: tuple(field.name for field in attrs.fields(View)),
    worker: tuple(field.name for field in attrs.fields(Worker)),
    read_view: ("tensor", "pattern", "name", "group", "region", "shards"),
    lambda **changes: read_view(shards={"dim": changes["part"]}): ("part",),
    lambda **changes: read_view(shards={"dim": (changes["start"], 8, 8)}): ("start",),
}


@pytest.mark.parametrize(("make", "field"), [(make, field) for make, fields in MAKERS.items() for field in fields])
def test_a_value_of_any_type_is_taken_or_refused_in_the_grammar(make: Callable[..., object], field: str) -> None:
    """No wrong type in any field ends in another exception, or in a message that shows how Python prints it."""
    errors = []
    for wrong in WRONG:
        try:
            make(**{field: wrong})
        except KVPlanError as caught:
            errors.append(caught)
    assert len(errors) > len(WRONG) // 2
    for error in errors:
        assert in_grammar(str(error))
        assert all(map(plain, error.details.values()))


def test_shown_is_short() -> None:
    """A long string or number does not make a long message."""
    assert shown("x" * 1000) == f"'{'x' * 79}..."
    assert shown(-(1 << 5000)) == "an integer of 5001 bits"
