"""explain: every public value is text in each detail; equal layers are folded, and rows have every number."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import kvplan
from kvplan import (
    Axis,
    Blocks,
    Budget,
    Context,
    Executor,
    Group,
    KVPlanError,
    Model,
    PeerError,
    Region,
    Request,
    Status,
    Transfer,
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
from kvplan._text import WIDTH
from kvplan.display.explanation import DETAILS, rows_of, wrap_line
from kvplan.staging import Rates, choose
from kvplan.verification import FakeMemory, Report
from tests.pages import failed_examples
from tests.small import engine
from tests.staged import staged

EXPLANATIONS = Path(__file__).with_name("explanations.txt")

(DECODE,), PREFILL = engine("decode", tokens=8), engine("prefill", tp=2)
MESH = plan_mesh([DECODE], PREFILL)
(PLAN,) = MESH.plans
REQUEST: dict[str, Any] = {"local": {"attn": Blocks([7])}, "remote": {"attn": Blocks([4, 9])}}
REFUSED = KVPlanError("INT", "count", expected="1", got="2")
WRITE = plan_writes(PREFILL[0], [DECODE], PREFILL[1:])
STAGED = staged(DECODE, PREFILL)
CHOICE = choose(DECODE, PREFILL, tokens=5, rates=Rates("by hand", 0.5, 0.125, 0.001, 1, 0))
(CHUNK,) = STAGED.bind(**REQUEST, tokens=(0, 5))
IDLE = plan_reads(Worker("none", 0, (), (), ()), PREFILL)
with pytest.raises(PeerError) as caught:
    decode(b'{"kvplan": 1, "engine_id": "", "rank": true}')
MALFORMED = caught.value

PRINTED = [
    *(Axis("head", 4, 8, 8, 4096), Region("kv", 4096, 512), Context(1, 2), Model.shipped("llama-3.2-1b")),
    *(REFUSED, MALFORMED.problems[0], compare(DECODE, PREFILL[0]), compare(DECODE, PREFILL[0]).differences[0]),
    *(PLAN.cost(), PLAN.cost().pairs[0], certify(PLAN)),
    *(verify(PLAN, **REQUEST, tokens=(0, 5)), Report(9, 3, 1, ("VALUE", "OWN"), (("VALUE", "one"), ("OWN", "two")))),
    *(CHUNK, CHUNK.copies[0], STAGED.cost(5), CHOICE, CHOICE.best, CHOICE.rates),
]
"""Values that are explained by what they print."""

LISTED = [
    *(DECODE.groups[0], DECODE.views[0], Blocks([9, 5], ordinals=[30, 10]), DECODE, PLAN, IDLE, MESH, STAGED),
    *(PLAN.pairs[1], PLAN.pairs[1].remote_table, PLAN.bind(**REQUEST, tokens=(0, 4))[1], MALFORMED),
]
"""Values with parts to list."""


def test_explanations_are_as_written_down() -> None:
    """The text of each class of values, in the file beside this one, is what explain says."""
    assert failed_examples(EXPLANATIONS, globals()) == 0


def fitted(text: str) -> list[str]:
    return [line for long in text.splitlines() for line in wrap_line(long)]


@pytest.mark.parametrize("value", PRINTED, ids=lambda value: type(value).__name__)
def test_what_a_value_prints_explains_it(value: object) -> None:
    """A value without parts to list is explained by its own str."""
    assert explain(value) == "\n".join(fitted(str(value)))
    assert explain(value, detail="rows").startswith(str(value))


def test_every_public_value_class_is_explained() -> None:
    """No public class is left out but those that hold memory, those of transfers under way, and a type of mappings."""
    public = {each for name in kvplan.__all__ if inspect.isclass(each := getattr(kvplan, name))}
    left_out = {Budget, Executor, FakeMemory, Request, Status, Transfer, Workspace}
    assert public - left_out <= {type(value) for value in (*LISTED, *PRINTED)}


@pytest.mark.parametrize("value", [*LISTED, *PRINTED], ids=lambda value: type(value).__name__)
def test_each_detail_says_more(value: object) -> None:
    """Each detail gives text that ends with no line break, and says no less than the one before."""
    texts = [explain(value, detail=detail) for detail in DETAILS]
    assert all(text and text == text.strip("\n") for text in texts)
    counts = [len(text.splitlines()) for text in texts[:1]] + [len(texts[1].split()), len(texts[2].split())]
    assert counts[0] == 1
    assert counts[1] <= counts[2]
    assert texts[1].splitlines()[0] == texts[0] or texts[0].endswith("...")


LONG = ("very long engine " * 20).strip()


@pytest.mark.parametrize("name", [LONG, LONG.replace(" ", "-"), f"{'deep':>200}"], ids=["words", "one word", "spaces"])
def test_lines_fit_a_terminal(name: str) -> None:
    """However long names are, lines of the first two details wrap_line, and the second leaves no letter out."""
    worker = Worker(name, 0, DECODE.regions, DECODE.groups, DECODE.views)
    for value in (worker, plan_mesh([worker], PREFILL), compare(worker, PREFILL[0]), REFUSED):
        for width in (WIDTH, 80):
            assert len(explain(value, detail="line", width=width)) <= width
            assert max(map(len, explain(value, width=width).splitlines())) <= width
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
    assert wrap_line(text) == lines


@pytest.mark.parametrize("size", [WIDTH - 1, WIDTH, WIDTH + 1])
def test_a_line_is_cut_at_its_end(size: int) -> None:
    """What is cut ends in dots; what fits is not cut."""
    text = f"group {'a' * (size - len('group : one state per block'))}: one state per block"
    line = explain(Group(text[6:].partition(":")[0]), detail="line")
    assert line == (text if size <= WIDTH else f"{text[:117]}...")


def test_an_engine_has_a_hint() -> None:
    """The refusal of a whole engine says what it is."""
    with pytest.raises(KVPlanError, match=r"got tuple \(an engine is a tuple of workers: explain\(engine\[0\]\)\)$"):
        explain(engine("p"))


def test_rows_have_the_numbers_of_the_table() -> None:
    """A row is a row of the table with its ids and the name of its region."""
    table = PLAN.pairs[1].local_table
    found = list(rows_of(table))
    assert len(found) == len(table.rows)
    for row, first, region, whole in zip(found, table.first, table.region, table.rows.tolist(), strict=True):
        ids = int(first), int(first) + whole[4]
        assert tuple(row.values()) == (*ids, *whole, DECODE.regions[region].name)
    assert list(found[0]) == ["first_id", "stop_id", "address", "length", "device", "stride", "count", "region"]
    assert found[-1]["stop_id"] == table.num_ids


def test_a_plan_says_which_groups_move_token_by_token() -> None:
    """Where no run is longer than a token, there is a line that says what would help; it is absent where runs are."""
    (same,), (turned,) = (engine("p", order=order) for order in ("HN", "NH"))
    (decode,) = engine("d", order="HN")
    line = "  group attn: tokens move one by one; see 'kvplan advise' for layouts, choose for staging, with longer runs"
    assert line in kvplan.explain(plan_reads(decode, [turned])).splitlines()
    assert line in kvplan.explain(kvplan.plan_writes(turned, [decode])).splitlines()
    assert "one by one" not in kvplan.explain(plan_reads(decode, [same]))
    (single,) = engine("s", tokens=1, order="NH")
    assert "one by one" not in kvplan.explain(plan_reads(decode, [single]))
