"""Decoding: any message gives a checked worker, or every problem with its path."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvplan import Axis, Group, KVPlanError, PeerError, Region, View, Worker, decode, encode, problems
from kvplan.errors import CODES
from kvplan.handshake import Problem
from kvplan.handshake.messages import MAX_PROBLEMS
from kvplan.handshake.schema import MAX_ROWS
from tests import hostile
from tests.small import engine
from tests.test_errors import in_grammar

OFFER = encode(engine(contexts=(2, 4))[1])
Edit = Callable[[Any], object]


def edited(*edits: Edit) -> bytes:
    """The offer of two layers with some parts edited."""
    message = json.loads(OFFER)
    for edit in edits:
        edit(message)
    return json.dumps(message).encode()


def put(value: Any, *keys: str | int) -> Edit:
    """An edit that sets the value at a path."""

    def edit(message: Any) -> None:
        for key in keys[:-1]:
            message = message[key]
        message[keys[-1]] = value

    return edit


def drop(key: str) -> Edit:
    """An edit that removes a key."""
    return lambda message: message.pop(key)


def column(table: str, key: str, row: int, value: Any) -> Edit:
    """An edit that sets a value in a row of a table."""
    return put(value, table, key, row)


def paths(message: Any) -> list[str]:
    """The paths of all problems of a message."""
    return [problem.path for problem in problems(json.dumps(message).encode())]


HEAD, TOKEN = ("layouts", 0, "axes", 1), ("layouts", 0, "axes", 2)
EDITS = [
    drop("rank"),
    put(1, "rang"),
    put(1, "views", "n\n" + "x" * 99),
    put("", "engine_id"),
    put("a\u0000b", "engine_id"),
    put("\ud800", "engine_id"),
    put("x" * 257, "engine_id"),
    put(5, "engine_id"),
    put(True, "rank"),
    put(3.0, "rank"),
    put("3", "rank"),
    put(None, "rank"),
    put(-1, "rank"),
    put(1 << 63, "rank"),
    put({}, "groups"),
    put([], "groups", 0),
    put("x", "groups", 0, "tokens_per_block"),
    put(None, "groups", 0, "tokens_per_block"),
    put(2, "groups", 0, "context", "rank"),
    put(0, "groups", 0, "context", "interleave_tokens"),
    put(5, "groups", 0, "tokens_per_block"),
    put(1, "layouts", 0, "group"),
    put("int4", "layouts", 0, "dtype"),
    put(1 << 40, "layouts", 0, "num_blocks"),
    put((1 << 39) - 1, "layouts", 0, "num_blocks"),
    put(1 << 60, "layouts", 0, "block_stride_bytes"),
    put([], "layouts", 0, "axes"),
    put({}, "layouts", 0, "axes"),
    put(5, *HEAD, "stop"),
    put(50, *HEAD, "stride_bytes"),
    put(5, *TOKEN, "size"),
    put("HBM", "memories", 0, "memory"),
    put(0, "memories", 0, "size_bytes"),
    put("\n", "stems", 0, "after"),
    column("regions", "stem", 1, 2),
    column("regions", "number", 1, False),
    column("regions", "memory", 1, 9),
    column("regions", "address", 1, 1 << 64),
    column("regions", "address", 1, (1 << 64) - 2559),
    column("regions", "number", 1, 0),
    put([], "views", "layout"),
    put([0] * (MAX_ROWS + 1), "views", "stem"),
    column("views", "stem", 0, -1),
    column("views", "layout", 1, 1),
    column("views", "region", 1, 2),
    column("views", "offset_bytes", 1, 2),
    column("views", "region", 1, 0),
]
"""One mistake each; the golden file has the line of each problem, in the same order."""

LINES = (Path(__file__).parents[1] / "golden" / "problems.txt").read_text().splitlines()


@pytest.mark.parametrize(
    "edit, line", list(zip(EDITS, LINES, strict=True)), ids=[line.partition(": cannot")[0] for line in LINES]
)
def test_a_mistake_is_the_first_problem(edit, line):
    """On the golden line, with a path into the message. The error has its code and path, and all problems."""
    data = edited(edit)
    first, *_ = found = problems(data)
    assert str(first) == line
    with pytest.raises(PeerError) as caught:
        decode(data)
    error = caught.value
    assert (error.problems, error.code) == (found, first.code)
    assert error.code in CODES
    assert in_grammar(str(error))
    assert first.path in str(error)
    for problem in found:
        part = json.loads(data)
        *steps, last = re.findall(r"[^.\[\]]+", problem.path)
        for step in steps:
            part = part[int(step)] if isinstance(part, list) else part[step]
        assert problem.code == "KEY" or (part[int(last)] if isinstance(part, list) else part[last]) is not Ellipsis


def test_an_error_says_where_and_how_many_more():
    """The message has the path of the first problem and the number of the others."""
    with pytest.raises(PeerError) as caught:
        decode(edited(put(None, "rank"), put("", "engine_id")))
    assert str(caught.value) == (
        "NAME: cannot read engine_id at engine_id: expected a non-empty string of printable characters, got '' "
        "(and 1 more problem)"
    )
    assert [problem.path for problem in caught.value.problems] == ["engine_id", "rank"]


def test_an_error_survives_a_pickle():
    """An error that crosses processes keeps its parts."""
    with pytest.raises(PeerError) as caught:
        decode(edited(put(None, "rank")))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is PeerError
    assert (str(copy), copy.code, copy.problems) == (str(caught.value), "TYPE", caught.value.problems)


def test_independent_problems_are_listed_together():
    """A problem hides only what depends on it; the others are listed with it."""
    data = edited(
        put(None, "rank"),
        put(7, "groups", 0, "name"),
        put(0, *HEAD, "size"),
        put([], "memories", 0, "memory"),
        column("regions", "stem", 0, 9),
        column("views", "stem", 1, "x"),
        column("views", "region", 0, 7),
    )
    assert [(problem.path, problem.code) for problem in problems(data)] == [
        ("rank", "TYPE"),
        ("groups[0].name", "TYPE"),
        ("memories[0].memory", "TYPE"),
        ("views.stem[1]", "TYPE"),
        ("regions.stem[0]", "RANGE"),
        ("layouts[0].axes[1]", "RANGE"),
        ("views.region[0]", "RANGE"),
    ]


def test_each_view_that_leaves_its_region_is_listed():
    """Every view that leaves its region is listed, not only the first."""
    three = json.loads(encode(engine("prefill", layers=3)[0]))
    three["views"]["offset_bytes"] = [2, 0, 4]
    assert paths(three) == ["views.offset_bytes[0]", "views.offset_bytes[2]"]


@pytest.mark.parametrize("size_bytes", [1, 2559])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_regions_that_are_too_small_are_listed_once(layers, size_bytes):
    """If no offset could help, the problem is the size, once, and not each view or region."""
    message = json.loads(encode(engine("prefill", layers=layers)[0]))
    message["memories"][0]["size_bytes"] = size_bytes
    (problem,) = problems(json.dumps(message).encode())
    assert (problem.path, problem.code) == ("memories[0].size_bytes", "BOUNDS")
    assert problem.text == (
        f"cannot fit views: expected at least 2560 bytes, the end of view 'layers.0' of 10 blocks, got {size_bytes}"
    )
    with pytest.raises(PeerError) as caught:
        decode(json.dumps(message).encode())
    assert dict(caught.value.details) == {"size_bytes": size_bytes, "end_bytes": 2560}


def halved(*sizes):
    """An offer of regions of these sizes, each with K in its first 128 bytes, and V behind that."""
    views = [
        View(f"{i}.{kind}", "g", f"kv.{i}", "uint8", (Axis("dim", 0, 16, 16, 1),), 8, 16, offset)
        for i, _ in enumerate(sizes)
        for kind, offset in (("k", 0), ("v", 128))
    ]
    regions = [Region(f"kv.{i}", i << 20, size) for i, size in enumerate(sizes)]
    return json.loads(encode(Worker("p", 0, regions, [Group("g")], views)))


def test_several_views_that_leave_all_regions_of_a_size_are_its_fault():
    """If a view leaves every region, the problem is the size; if one stays inside, it is each view."""
    offer = halved(256, 256, 300)
    offer["memories"][0]["size_bytes"] = 200
    assert paths(offer) == ["memories[0].size_bytes"]
    offer["memories"][1]["size_bytes"] = 200
    assert paths(offer) == ["memories[0].size_bytes", "views.offset_bytes[5]"]
    offer = halved(256, 256, 300)
    offer["views"]["offset_bytes"][1] = 129
    assert paths(offer) == ["views.offset_bytes[1]"]
    offer["views"]["offset_bytes"][5] = 129
    assert paths(offer) == ["views.offset_bytes[1]"]


def without(offer, table, column, much):
    """An offer in which one column of a table is a row short, or missing."""
    del offer[table][column][-1:]
    if much:
        del offer[table][column]
    return offer


@pytest.mark.parametrize("table, column", [("regions", "address"), ("regions", "stem"), ("views", "layout")])
def test_a_column_that_is_short_or_missing_is_the_only_problem(table, column):
    """References to rows of an unreadable table are not listed: they may be right."""
    data = json.loads(OFFER)
    assert paths(without(data, table, column, much=False)) == [table]
    assert paths(without(data, table, column, much=True)) == [f"{table}.{column}"]


@pytest.mark.parametrize("key", ["groups", "layouts", "memories", "stems", "regions", "views"])
def test_a_missing_part_is_the_only_problem(key):
    """The same holds for any part of a message that others refer to."""
    message = json.loads(OFFER)
    del message[key]
    assert paths(message) == [key]


def test_an_empty_name_is_listed_at_its_stem():
    """An empty name is listed at the row that refers to the stem."""
    message = json.loads(OFFER)
    message["stems"].append({"before": "", "after": ""})
    for table in ("regions", "views"):
        message[table]["stem"][1], message[table]["number"][1] = len(message["stems"]) - 1, None
    assert paths(message) == ["regions.stem[1]", "views.stem[1]"]


def test_views_are_checked_although_others_are_bad():
    """A bad region does not hide that another view leaves its own region."""
    data = edited(column("regions", "stem", 0, 9), column("views", "offset_bytes", 1, 2))
    assert [problem.path for problem in problems(data)] == ["regions.stem[0]", "views.offset_bytes[1]"]


def test_a_layout_is_listed_once():
    """A problem of a layout is listed once, however many views use it."""
    assert len(problems(edited(put("int4", "layouts", 0, "dtype")))) == 1


def test_two_groups_of_one_name_are_refused():
    """Block tables are named by group, so names must differ."""
    data = edited(lambda message: message["groups"].append(message["groups"][0]))
    assert [(problem.path, problem.code) for problem in problems(data)] == [("groups", "NAME")]


def test_the_number_of_problems_is_limited():
    """At most a hundred problems are listed, and a last line counts the others."""
    data = edited(put(dict.fromkeys(map(str, range(250))), "views"))
    found = problems(data)
    assert len(found) == MAX_PROBLEMS + 1
    assert str(found[-1]) == "message: MESSAGE: 155 more problems not listed"


def test_an_offer_has_no_problems():
    """A message that decodes has no problems."""
    assert problems(OFFER) == ()


def test_an_offer_cut_off_anywhere_is_refused():
    """A truncated message is never taken for a smaller worker."""
    cuts = {length: problems(OFFER[:length]) for length in range(len(OFFER))}
    assert {length for length, found in cuts.items() if [each.code for each in found] != ["MESSAGE"]} == set()


def test_problems_are_values():
    """Problems compare by what they say."""
    text = "cannot read a message: expected JSON, got Expecting value at character 0"
    assert problems(b"") == (Problem("", "MESSAGE", text),)


def test_canonical_values_come_of_others():
    """A peer may send other forms: strides of one-element axes, an interleave for one worker, spaces."""
    worker = engine(layers=1, heads=1)[0]
    message = json.loads(encode(worker))
    message["layouts"][0]["axes"][1]["stride_bytes"] = 77
    message["groups"][0]["context"]["interleave_tokens"] = 3
    message["stems"] = [{"before": "", "after": ""}, *message["stems"], {"before": "layers", "after": ".0"}]
    message["regions"]["stem"] = [1]
    message["views"] |= {"stem": [3], "number": [None]}
    data = json.dumps(dict(reversed(message.items())), indent=2).encode()
    assert decode(data) == worker
    assert encode(decode(data)) == encode(worker)


@pytest.mark.parametrize("value, code", [(7, "TYPE"), ("x" * 65537, "RANGE"), ("a\nb", "NAME"), (None, "TYPE")])
def test_a_model_is_a_name(value, code):
    """A model has the rules of other names but for its length, and its problem hides no other."""
    data = edited(put({"kvplan/model": value}, "extensions"), put(-1, "rank"))
    rank, model = problems(data)
    assert (rank.path, model.path, model.code) == ("rank", "extensions.kvplan/model", code)


def test_a_worker_of_a_peer_is_a_worker():
    """A decoded worker can be changed like any other, and is checked again."""
    worker = decode(OFFER)
    with pytest.raises(KVPlanError, match=r"^OVERLAP: ") as caught:
        attrs.evolve(worker, views=worker.views * 2)
    assert not isinstance(caught.value, PeerError)


@pytest.fixture(scope="module")
def taken() -> Any:
    """The cost of reading the hostile messages, in their own process."""
    run = subprocess.run([sys.executable, "-m", "tests.hostile"], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_no_message_takes_64_mib(taken):
    """All hostile messages, read one after another, make the process grow by less than 64 MiB at its peak."""
    assert taken["grown_bytes"] < 64 << 20


def test_no_message_takes_long(taken):
    """Reading a hostile message of up to 1 MiB calls fewer than two million functions, nearly all of them built in."""
    assert taken["taken"].keys() == {*hostile.inputs()}
    assert {name: one["calls"] for name, one in taken["taken"].items() if one["calls"] >= 2_000_000} == {}


def test_hostile_messages_meet_the_limits(taken):
    """The messages get as far as intended: to JSON, to the schema, to the checks of workers, or through."""
    codes = {one["code"] for one in taken["taken"].values()}
    assert codes == {"", "MESSAGE", "VERSION", "KEY", "RANGE", "BOUNDS", "OVERLAP"}
