"""explain: every public value is text in each detail; equal layers are folded, and rows have every number."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import kvplan
from kvplan import (
    Axis,
    Blocks,
    Context,
    Executor,
    FakeMemory,
    Group,
    KVPlanError,
    Model,
    Notice,
    PeerError,
    Region,
    Report,
    Status,
    Transfer,
    View,
    Worker,
    Workspace,
    certify,
    compare,
    decode,
    explain,
    plan_mesh,
    plan_reads,
    plan_writes,
    verify,
)
from kvplan.show.explanation import DETAILS, WIDTH, fit, rows_of
from kvplan.staging import Rates, choose, stage, stage_writes
from tests.small import engine
from tests.staged import staged, staged_writes, with_staging

DECODE, PREFILL = engine("decode", tokens=8), engine("prefill", tp=2)
MESH = plan_mesh(DECODE, PREFILL)
PLAN = MESH.plans[0]
REQUEST: dict[str, Any] = {"local": {"attn": Blocks([7])}, "remote": {"attn": Blocks([4, 9])}}
REFUSED = KVPlanError("INT", "count", expected="1", got="2")
WRITE = plan_writes(PREFILL[0], DECODE, PREFILL[1:])
STAGED = staged(DECODE[0], PREFILL)
CHOICE = choose(DECODE[0], PREFILL, tokens=5, rates=Rates("by hand", 0.5, 0.125, 0.001, 1, 0))
(SENT,) = staged_writes(PREFILL, DECODE)[0].bind(local=REQUEST["remote"], remote=REQUEST["local"], tokens=(0, 5))
(CHUNK,) = STAGED.bind(**REQUEST, tokens=(0, 5))
IDLE = plan_reads(Worker("none", 0, (), (), ()), PREFILL)
with pytest.raises(PeerError) as caught:
    decode(b'{"kvplan": 1, "engine_id": "", "rank": true}')

TEXTS = [
    (Group("attn", 16), "group attn: 16 tokens per block"),
    (Group("attn", 1), "group attn: 1 token per block"),
    (Group("state"), "group state: one state per block"),
    (
        Group("attn", 16, Context(rank=1, size=2, interleave_tokens=8)),
        "group attn: 16 tokens per block, context rank 1 of 2, interleaved by 8 positions",
    ),
    (
        View("k", "attn", "kv", "uint8", [Axis("token", 0, 4, 4, 1)], 1, 0),
        "view k in group attn: uint8, 4 bytes in each of 1 block, stride 0\n  token [0, 4) of 4 stride 1",
    ),
    (Blocks([4, 9], first=3), "blocks [3, 5) of a request: ids 4, 9"),
    (Blocks(range(8)), "blocks [0, 8) of a request: ids 0, 1, 2, 3, 4, 5, 6, 7"),
    (Blocks(range(9)), "blocks [0, 9) of a request: ids 0, 1, 2, 3, 4, 5, 6, 7, ... 8"),
    (Blocks([9, 5], ordinals=[30, 10]), "2 of blocks [10, 31) of a request: ids 5, 9"),
    (Blocks([]), "blocks [0, 0) of a request: ids none"),
    (
        DECODE[0],
        "decode/0: 2 views of 2 tensors in 2 regions, 1 group\n"
        "  group attn: 8 tokens per block\n"
        "  regions kv.0-1: 5120 bytes each, DRAM 0, the first at 0x10000000000\n"
        "  views layers.0-1 in group attn: bfloat16, 512 bytes in each of 10 blocks, stride 512\n"
        "    kv [0, 2) of 2 stride 8\n"
        "    head [0, 4) of 4 stride 128\n"
        "    token [0, 8) of 8 stride 16\n"
        "    dim [0, 4) of 4 stride 2",
    ),
    (Worker("e", 0, [], [], []), "e/0: 0 views of 0 tensors in 0 regions, 0 groups"),
    (
        PLAN,
        "decode/0 reads from 2 of 2 workers: 1520 ids in 8 local rows\n"
        "  <- prefill/0: 760 ids in 2 local rows of 64 bytes, 2 of 16 bytes\n"
        "  <- prefill/1: 760 ids in 2 local rows of 64 bytes, 2 of 16 bytes",
    ),
    (
        plan_writes(PREFILL[0], engine("decode", tp=2), PREFILL[1:]),
        "prefill/0 writes to 1 of 2 workers: 180 ids in 4 local rows\n"
        "  -> decode/0: 180 ids in 2 local rows of 128 bytes, 2 of 16 bytes",
    ),
    (IDLE, "none/0 reads from 0 of 2 workers: 0 ids in 0 local rows"),
    (PLAN.pairs[1], "pair with prefill/1: 760 ids in 2 local rows of 64 bytes, 2 of 16 bytes"),
    (PLAN.pairs[1].remote_table, "table: 200 ids in 2 rows of 64 bytes, 2 of 16 bytes"),
    (IDLE.pairs[0].local_table, "table: nothing"),
    (PLAN.bind(**REQUEST, tokens=(0, 4))[1], "decode/0 <- prefill/1: 256 bytes in 4 descriptors of 64 bytes"),
    (WRITE.bind(local=REQUEST["remote"], remote=REQUEST["local"], tokens=(0, 0))[0], "prefill/0 -> decode/0: nothing"),
    (
        MESH,
        "1 plan for 3 workers, 2 pairs with bytes to move: 1520 ids in 8 local rows\n"
        "  decode/0 reads from 2 of 2 workers: 1520 ids in 8 local rows\n"
        "    <- prefill/0: 760 ids in 2 local rows of 64 bytes, 2 of 16 bytes\n"
        "    <- prefill/1: 760 ids in 2 local rows of 64 bytes, 2 of 16 bytes\n"
        "  prefill/0-1: each awaits 1 completion",
    ),
    (
        plan_mesh(engine("d", tp=2), engine("p")),
        "2 plans for 3 workers, 2 pairs with bytes to move: 360 ids in 8 local rows\n"
        "  d/0 reads from 1 of 1 worker: 180 ids in 4 local rows\n"
        "    <- p/0: 180 ids in 2 local rows of 128 bytes, 2 of 16 bytes\n"
        "  d/1 reads from 1 of 1 worker: 180 ids in 4 local rows\n"
        "    <- p/0: 180 ids in 2 local rows of 128 bytes, 2 of 16 bytes\n"
        "  p/0 awaits 2 completions",
    ),
    (
        caught.value,
        f"{caught.value}\n" + "\n".join(f"  {problem}" for problem in caught.value.problems),
    ),
]
"""Values with the whole of their text."""

PRINTED = [
    *(Axis("head", 4, 8, 8, 4096), Region("kv", 4096, 512), Context(1, 2), Model.shipped("llama-3.2-1b")),
    *(REFUSED, caught.value.problems[0], compare(DECODE[0], PREFILL[0]), compare(DECODE[0], PREFILL[0]).differences[0]),
    *(PLAN.cost(), PLAN.cost().pairs[0], MESH.completions["prefill", 0], certify(PLAN)),
    *(verify(PLAN, **REQUEST, tokens=(0, 5)), Report(9, 3, 1, ("VALUE", "OWN"), (("VALUE", "one"), ("OWN", "two")))),
    *(CHUNK, SENT, CHUNK.copies[0], STAGED.cost(5), CHOICE, CHOICE.best, CHOICE.rates),
]
"""Values that are explained by what they print."""

VALUES = [STAGED, *(value for value, _ in TEXTS), *PRINTED]


@pytest.mark.parametrize("value, text", TEXTS, ids=[type(value).__name__ for value, _ in TEXTS])
def test_a_value_has_a_text(value: object, text: str) -> None:
    """The text of each class says what a value is, equal layers folded; its first line is the line for a log."""
    assert explain(value) == "\n".join(fitted(text))
    line = text.splitlines()[0]
    assert explain(value, detail="line") == (line if len(line) <= WIDTH else f"{line[:117]}...")


def fitted(text: str) -> list[str]:
    return [line for long in text.splitlines() for line in fit(long)]


@pytest.mark.parametrize("value", PRINTED, ids=lambda value: type(value).__name__)
def test_what_a_value_prints_explains_it(value: object) -> None:
    """A value without parts to list is explained by its own str."""
    assert explain(value) == "\n".join(fitted(str(value)))
    assert explain(value, detail="rows").startswith(str(value))


def test_every_public_value_class_is_explained() -> None:
    """No public class is left out but those that hold memory, and those of transfers under way."""
    public = {each for name in kvplan.__all__ if inspect.isclass(each := getattr(kvplan, name))}
    assert public - {Executor, FakeMemory, Notice, Status, Transfer, Workspace} <= {type(value) for value in VALUES}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_each_detail_says_more(value: object) -> None:
    """Each detail gives text that ends with no line break, and says no less than the one before."""
    texts = [explain(value, detail=detail) for detail in DETAILS]
    assert all(text and text == text.strip("\n") for text in texts)
    counts = [len(text.splitlines()) for text in texts[:1]] + [len(texts[1].split()), len(texts[2].split())]
    assert counts[0] == 1
    assert counts[1] <= counts[2]


LONG = ("very long engine " * 20).strip()


@pytest.mark.parametrize("name", [LONG, LONG.replace(" ", "-"), f"{'deep':>200}"], ids=["words", "one word", "spaces"])
def test_lines_fit_a_terminal(name: str) -> None:
    """However long names are, lines of the first two details fit, and the second leaves no letter out."""
    worker = Worker(name, 0, DECODE[0].regions, DECODE[0].groups, DECODE[0].views)
    for value in (worker, plan_mesh([worker], PREFILL), compare(worker, PREFILL[0]), REFUSED):
        assert len(explain(value, detail="line")) <= WIDTH
        assert max(map(len, explain(value).splitlines())) <= WIDTH
    assert re.sub(r"\s", "", explain(worker)).startswith(re.sub(r"\s", "", str(worker)))


@pytest.mark.parametrize(
    "text, lines",
    [
        ("a" * 120, ["a" * 120]),
        ("a" * 121, ["a" * 120, "    a"]),
        ("  " + "b" * 70 + " " + "c" * 60, ["  " + "b" * 70, "      " + "c" * 60]),
        ("b-" * 70, ["b-" * 60, "    " + "b-" * 10]),
    ],
    ids=["fits", "one word", "words", "hyphens"],
)
def test_a_long_line_goes_on_below(text: str, lines: list[str]) -> None:
    """A line is broken between words, else anywhere, and goes on indented by four more."""
    assert fit(text) == lines


@pytest.mark.parametrize("size", [WIDTH - 1, WIDTH, WIDTH + 1])
def test_a_line_is_cut_at_its_end(size: int) -> None:
    """What is cut ends in dots; what fits is not cut."""
    text = f"group {'a' * (size - len('group : one state per block'))}: one state per block"
    line = explain(Group(text[6:].partition(":")[0]), detail="line")
    assert line == (text if size <= WIDTH else f"{text[:117]}...")


def test_views_that_differ_are_not_folded() -> None:
    """K and V in views of their own are two lines of views."""
    split = Model.shipped("qwen3-0.6b").engine("split", kv="split", num_blocks=8)[0]
    assert explain(split).count("views layers.0-27.attn in group attn") == 2


def test_rows_of_many_lengths_are_one_list() -> None:
    """Rows of three lengths and more are one list, the longest first."""
    model = Model.shipped("granite-4.0-h-tiny")
    plan = plan_reads(model.engine("d", tp=2, num_blocks=8)[0], model.engine("s", tp=4, num_blocks=8))
    first = explain(plan).splitlines()[1]
    assert first.endswith("36 local rows of 385.5 KiB, 4 of 8192 bytes, 36 of 4608 bytes, 4 of 512 bytes")


def test_a_staged_plan_has_its_cost() -> None:
    """A staged plan says whom it reads from or writes to, in two steps, and what that costs."""
    (near, _), (far,) = (engine(name, tp, order=order) for name, tp, order in (("d", 2, "NH"), ("p", 1, "HN")))
    for plan, title in (
        (stage(with_staging(near), [far], staging="staging"), "d/0 reads from 1 of 1 worker"),
        (stage_writes(with_staging(far), [near], staging="staging"), "p/0 writes to 1 of 1 worker"),
    ):
        line, *cost = explain(plan).splitlines()
        assert line == explain(plan, detail="line") == f"{title} in two steps, through a staging buffer"
        assert cost == [f"  {text}" for text in str(plan.cost()).splitlines()]


@pytest.mark.parametrize("value", [{}, 3, None, Worker, explain], ids=["dict", "integer", "none", "class", "function"])
def test_other_values_are_refused(value: object) -> None:
    """What is no value of kvplan is refused by its type."""
    with pytest.raises(KVPlanError, match="TYPE: cannot explain a value: expected a value of kvplan, got "):
        explain(value)


def test_an_unknown_detail_is_refused() -> None:
    """The detail is one of three words."""
    with pytest.raises(
        KVPlanError, match="NAME: cannot explain a value: expected detail in line, workers, rows, got 3"
    ):
        explain(PLAN, detail=3)  # type: ignore[arg-type]


def numbers(text: str) -> list[int]:
    """The numbers of a line."""
    return [int(found, 0) for found in re.findall(r"0x[0-9a-f]+|\d+", text)]


def test_rows_have_the_numbers_of_the_table() -> None:
    """A row is a row of the table with its ids and the name of its region."""
    table = PLAN.pairs[1].local_table
    found = list(rows_of(table))
    assert len(found) == len(table.rows)
    for row, first, region, whole in zip(found, table.first, table.region, table.rows.tolist(), strict=True):
        ids = int(first), int(first) + whole[4]
        assert tuple(row.values()) == (*ids, *whole, DECODE[0].regions[region].name)
    assert list(found[0]) == ["first_id", "stop_id", "address", "length", "device", "stride", "count", "region"]
    assert found[-1]["stop_id"] == table.num_ids


def test_a_plan_has_every_row_of_both_sides() -> None:
    """Below each remote worker are all rows of both tables, in order of their ids; also where there are none."""
    lines = explain(PLAN, detail="rows").splitlines()
    tables = [table for pair in PLAN.pairs for table in (pair.local_table, pair.remote_table)]
    found = [text for text in lines if re.match(r" +\[\d+, \d+\)  0x", text)]
    for row, text in zip([row for table in tables for row in rows_of(table)], found, strict=True):
        rest, region = text.rsplit("  ", 1)
        assert region == row.pop("region")
        assert numbers(rest) == list(row.values())
    assert [text[:14] for text in lines if text.startswith("  <-")] == ["  <- prefill/0", "  <- prefill/1"]
    assert [text.strip() for text in lines if text.endswith(" rows")][1:] == ["local rows", "remote rows"] * 2
    plan = plan_writes(PREFILL[0], engine("decode", tp=2), PREFILL[1:])
    assert explain(plan, detail="rows").endswith("\n  -> decode/1: nothing")
    assert explain(plan.pairs[1], detail="rows") == "pair with decode/1: nothing"


def test_rows_are_aligned_below_their_heads() -> None:
    """Numbers are aligned to the right, the region to the left."""
    assert explain(PLAN.pairs[0].remote_table, detail="rows").splitlines()[1:] == [
        "         ids        address  length  device  stride  count  region",
        "     [0, 20)  0x10000000000      64       0      64     20  kv.0",
        "    [20, 40)  0x10040000000      64       0      64     20  kv.1",
        "   [40, 120)  0x10000000000      16       0      16     80  kv.0",
        "  [120, 200)  0x10040000000      16       0      16     80  kv.1",
    ]


def test_a_mesh_has_the_completions_of_every_worker() -> None:
    """Behind the rows of all plans, each worker has a line with those that it notifies and those that it awaits."""
    text = explain(MESH, detail="rows")
    assert text.splitlines()[1:4] == [
        "  decode/0 reads from 2 of 2 workers: 1520 ids in 8 local rows",
        "    <- prefill/0: 760 ids in 2 local rows of 64 bytes, 2 of 16 bytes",
        "      local rows",
    ]
    assert text.splitlines()[-3:] == [
        "  decode/0 sends completions to prefill/0, prefill/1, awaits those of nobody",
        "  prefill/0 sends completions to nobody, awaits those of decode/0",
        "  prefill/1 sends completions to nobody, awaits those of decode/0",
    ]


def test_a_spec_has_every_descriptor() -> None:
    """Each descriptor is a line with its length and where it is on both sides."""
    spec, _ = PLAN.bind(**REQUEST, tokens=(0, 5))
    title, heads, *lines = explain(spec, detail="rows").splitlines()
    assert title == explain(spec)
    assert heads.split("  ")[1:] == ["length", "device", "address of decode/0", "device", "address of prefill/0"]
    ours, theirs = spec.descriptors()
    expected = [
        [length, device, near, far_device, far]
        for (near, length, device), (far, _, far_device) in zip(ours.tolist(), theirs.tolist(), strict=True)
    ]
    assert list(map(numbers, lines)) == expected


def test_a_worker_has_every_region_and_view() -> None:
    """Each region and each view has its own lines, and a view says where in its region it is."""
    worker = DECODE[0]
    lines = explain(worker, detail="rows").splitlines()
    assert lines[:4] == [
        str(worker),
        "  group attn: 8 tokens per block",
        "  region kv.0: 5120 bytes, DRAM 0, at 0x10000000000",
        "  region kv.1: 5120 bytes, DRAM 0, at 0x10040000000",
    ]
    titles = [text.partition(":")[0] for text in lines if text.startswith("  view")]
    assert titles == [f"  view layers.{i} in group attn at byte 0 of region kv.{i}" for i in (0, 1)]
    assert lines.count("    head [0, 4) of 4 stride 128") == len(worker.views)
    large = Worker("e", 0, [Region("kv", 0, (1 << 20) + 1)], [], [])
    assert "region kv: 1048577 bytes," in explain(large, detail="rows")
    assert "region kv: 1 MiB," in explain(large)


def test_a_report_has_the_slots_that_were_not_written() -> None:
    """Slots that were not written are listed by worker and group."""
    text = explain(verify(PLAN, **REQUEST, tokens=(0, 5)), detail="rows")
    assert text.splitlines()[1:] == ["  not written: decode/0 attn [5, 8)"]


def test_blocks_are_listed_one_by_one() -> None:
    """Each block has its ordinal in the request, also where these are not neighbours."""
    assert explain(Blocks([9, 5], ordinals=[30, 10]), detail="rows").splitlines()[1:] == [
        "  block 10 of the request: id 5",
        "  block 30 of the request: id 9",
    ]
