"""Lines: every public value class has one that says what it is, and two levels that fit a terminal."""

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
    compare,
    explain,
    plan_mesh,
    plan_reads,
    plan_writes,
    verify,
)
from kvplan.bridges import Seat
from kvplan.handshake import Difference, Problem
from kvplan.plan import Completions
from kvplan.plan.cost import PairCost
from kvplan.show import show
from kvplan.show.lines import WIDTH, cut, fit, line
from kvplan.show.text import DETAILS
from kvplan.staging import Rates, choose
from kvplan.verification import Certificate
from kvplan.verification.report import Tail
from tests.small import engine
from tests.staged import staged, staged_writes

DECODE, PREFILL = engine("decode", tokens=8), engine("prefill", tp=2)
MESH = plan_mesh(DECODE, PREFILL)
PLAN = MESH.plans[0]
REQUEST: dict[str, Any] = {"local": {"attn": Blocks([7])}, "remote": {"attn": Blocks([4, 9])}}
COMPARISON = compare(DECODE[0], PREFILL[0])
REPORT = verify(PLAN, **REQUEST, tokens=(0, 5))
PROBLEM = Problem("layouts[3].axes[0].start", "TYPE", "cannot read start: expected an integer, got None")
REFUSAL = KVPlanError("INT", "count", expected="1", got="2")
WRITE = plan_writes(PREFILL[0], DECODE, PREFILL[1:])
STAGED = staged(DECODE[0], PREFILL)
CHOICE = choose(DECODE[0], PREFILL, tokens=5, rates=Rates("by hand", 0.5, 0.125, 0.001, 1, 0))
(SENT,) = staged_writes(PREFILL, DECODE)[0].bind(local=REQUEST["remote"], remote=REQUEST["local"], tokens=(0, 5))
(CHUNK,) = STAGED.bind(**REQUEST, tokens=(0, 5))
NOTHING = plan_reads(Worker("none", 0, (), (), ()), PREFILL)

LINES = [
    (Axis("head", 4, 8, 8, 4096), "axis head [4, 8) of 8 step 4096"),
    (Blocks([4, 9], first=3), "blocks [3, 5) of a request: ids 4, 9"),
    (Certificate(96, 3, True), "certificate: 96 bytes of each period, in 3 parts, complete"),
    (Certificate(96, 1, False), "certificate: 96 bytes of each period, in 1 part, without those of other writers"),
    (COMPARISON, "decode/0 and prefill/0: 5 differences, none refused"),
    (CHUNK, "chunk of attn [0, 5): 640 bytes read, 640 bytes put in order"),
    (SENT, "chunk of attn [0, 5): 320 bytes put in order, 320 bytes written"),
    (Completions((("p", 1), ("q", 0), ("p", 0)), ()), "completions: sends to p/0-1, q/0; awaits nobody"),
    (Context(1, 2), "context: worker 1 of 2 in turns of 1 position"),
    (PLAN.cost(), "8 tokens: 1024 bytes in 16 descriptors of 64 bytes"),
    (Difference("dtype", "a", "uint8", "int8", "refused", "DTYPE"), "dtype of a: uint8 and int8, refused DTYPE"),
    (Group("attn", 16), "group attn: 16 tokens a block"),
    (REFUSAL, "INT: cannot count: expected 1, got 2"),
    (MESH, "1 plan of 3 workers, 2 pairs with bytes to move: 1520 ids in 8 local rows"),
    (Model.shipped("llama-3.2-1b"), "llama-3.2-1b: 16 layers, bfloat16, groups attn"),
    (PLAN.pairs[1], "pair with prefill/1: 760 ids in 4 local rows of 16 bytes to 64 bytes"),
    (
        PairCost(("d", 0), ("p", 1), 2, 2, 6, {8: 2, 16: 4}),
        "d/0 and p/1: 80 bytes in 6 descriptors of 8 bytes to 16 bytes",
    ),
    (PairCost(("d", 0), ("p", 1), 0, 0, 0, {}), "d/0 and p/1: nothing"),
    (PeerError([PROBLEM], REFUSAL), "INT: cannot count at layouts[3].axes[0].start: expected 1, got 2"),
    (show(PLAN), "picture: decode/0 reads from prefill/0-1"),
    (PROBLEM, f"{PROBLEM}"),
    (PLAN.bind(**REQUEST, tokens=(0, 4))[1], "decode/0 <- prefill/1: 256 bytes in 4 descriptors of 64 bytes"),
    (WRITE.bind(local=REQUEST["remote"], remote=REQUEST["local"], tokens=(0, 0))[0], "prefill/0 -> decode/0: nothing"),
    (Region("kv", 4096, 512), "region kv: 512 bytes at 0x1000, DRAM 0"),
    (REPORT, f"{REPORT}"),
    (
        Report(9, 3, 1, ("VALUE", "OWN"), (("VALUE", "one"), ("VALUE", "two"), ("OWN", "three"))),
        "not verified: 9 bytes in 3 descriptors to 1 worker: VALUE, OWN",
    ),
    (Seat("prefill", 5, 1, 4), "seat prefill/5: rank 1 of tp 4"),
    (Seat("p", context=Context(1, 2, 8)), "seat p/0: rank 0 of tp 1, worker 1 of 2 in turns of 8 positions"),
    (PLAN.pairs[1].local_table, "table: 760 ids in 4 rows of 16 bytes to 64 bytes"),
    (NOTHING.pairs[0].local_table, "table: nothing"),
    (STAGED, "decode/0 reads from 2 of 2 workers in two legs: 4096 positions at a time"),
    (CHOICE, "decode/0, 5 tokens: direct"),
    (CHOICE.best, "direct: 3640 ms for 16 descriptors, 640 bytes"),
    (CHOICE.rates, "rates: by hand"),
    (STAGED.cost(5), "5 tokens staged: 640 bytes in 12 descriptors of 16 bytes (8) and 128 bytes (4)"),
    (Tail("decode/0", "attn", 5, 8), "decode/0 attn [5, 8)"),
    (PLAN, "decode/0 reads from 2 of 2 workers: 1520 ids in 8 local rows"),
    (WRITE, "prefill/0 writes to 1 of 1 worker: 200 ids in 4 local rows"),
    (NOTHING, "none/0 reads from 0 of 2 workers: 0 ids in 0 local rows"),
    (
        View("k", "attn", "kv", "uint8", [Axis("token", 0, 4, 4, 1)], 1, 0),
        "view k in group attn: uint8, 4 bytes in each of 1 block, step 0",
    ),
    (DECODE[0], "decode/0: 2 views of 2 tensors in 2 regions, 1 group"),
]
VALUES = [value for value, _ in LINES]


@pytest.mark.parametrize("value, text", LINES, ids=[type(value).__name__ for value in VALUES])
def test_a_value_is_a_line(value: object, text: str) -> None:
    """Each value class has one line that tells what a value is."""
    assert line(value) == text
    assert explain(value, detail="line") == cut(text)


def test_every_public_value_class_has_a_line() -> None:
    """No public class is left out but those that hold memory, and those of transfers under way."""
    public = {each for name in kvplan.__all__ if inspect.isclass(each := getattr(kvplan, name))}
    assert public - {Executor, FakeMemory, Notice, Status, Transfer, Workspace} <= {type(value) for value in VALUES}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_is_explained_in_any_detail(value: object) -> None:
    """Each detail gives text that ends with no line break, and says no less than the one before."""
    texts = [explain(value, detail=detail) for detail in DETAILS]
    for text in texts:
        assert text
        assert text == text.strip("\n")
    counts = [len(text.splitlines()) for text in texts]
    assert counts[0] == 1
    assert counts == sorted(counts)


LONG = ("very long engine " * 20).strip()


@pytest.mark.parametrize("name", [LONG, LONG.replace(" ", "-"), f"{'deep':>200}"], ids=["words", "one word", "spaces"])
def test_lines_fit_a_terminal(name: str) -> None:
    """However long names are, lines of the first two details fit, and the second leaves no letter out."""
    worker = Worker(name, 0, DECODE[0].regions, DECODE[0].groups, DECODE[0].views)
    for value in (worker, plan_mesh([worker], PREFILL), compare(worker, PREFILL[0]), REFUSAL):
        assert len(explain(value, detail="line")) <= WIDTH
        text = explain(value)
        assert max(map(len, text.splitlines())) <= WIDTH
    assert re.sub(r"\s", "", explain(worker)).startswith(re.sub(r"\s", "", str(worker)))


def test_a_line_is_cut_at_its_end() -> None:
    """What is cut ends in dots; what fits is not cut."""
    assert cut("a" * WIDTH) == "a" * WIDTH
    assert cut("a" * (WIDTH + 1)) == "a" * (WIDTH - 3) + "..."


@pytest.mark.parametrize(
    "text, lines",
    [
        ("a" * 120, ["a" * 120]),
        ("a" * 121, ["a" * 120, "    a"]),
        ("  " + "b" * 70 + ", " + "c" * 60, ["  " + "b" * 70 + ",", "      " + "c" * 60]),
        ("b" * 30 + ", " + "c" * 60 + " " + "d" * 40, ["b" * 30 + ", " + "c" * 60, "    " + "d" * 40]),
        ("one\ntwo", ["one", "two"]),
    ],
    ids=["fits", "one word", "comma", "early comma", "lines"],
)
def test_long_lines_go_on_below(text: str, lines: list[str]) -> None:
    """A line is broken after a comma of its second half, else between words, else anywhere."""
    assert list(fit(text)) == lines
