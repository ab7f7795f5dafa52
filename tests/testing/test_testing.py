"""kvplan.testing: right copies pass however they are cut, planted faults are found, and what is no copy is refused."""

from __future__ import annotations

import importlib
import itertools
import random
import re
import subprocess
import sys
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty

from kvplan import Blocks, KVPlanError, Model, plan_mesh, plan_reads, verify, verify_together
from kvplan.testing import assert_copies
from kvplan.testing.strategies import Case, cases, requests
from kvplan.verification.memory import expand
from property_tests import fewer
from tests.shortened import shortened
from tests.small import engine

DECODE, PREFILL = engine("decode", tp=2, order="NH"), engine("prefill", tp=4)
TABLES = (Blocks([7, 3, 5]), Blocks([2, 9, 4]))
REQUEST: dict[str, Any] = {"local": {"attn": TABLES[0]}, "remote": {"attn": TABLES[1]}, "tokens": (1, 11)}
WRITE: dict[str, Any] = {**REQUEST, "local": {"attn": TABLES[1]}, "remote": {"attn": TABLES[0]}, "operation": "WRITE"}
NUM_BYTES = 10 * 2 * 4 * 16  # positions, layers, heads, bytes of a head
PAIR = (("decode", 0), ("prefill", 0))
OTHER = (("decode", 0), ("prefill", 1))


def copies_of(request: dict[str, Any] = REQUEST) -> dict[Any, Any]:
    """kvplan's copies by pair, as lists of rows for edits."""
    operation = request.get("operation", "READ")
    mesh = plan_mesh(DECODE, PREFILL, operation)
    bound = {key: value for key, value in request.items() if key != "operation"}
    specs = [spec for plan in mesh.plans for spec in plan.bind(**bound)]
    return {(spec.local, spec.remote): tuple(side.tolist() for side in spec.descriptors()) for spec in specs}


def cut(rows: tuple[Any, Any], seed: int) -> tuple[Any, Any]:
    """The same bytes, with each pair of ranges cut at random, in random order."""
    choice, ranges = random.Random(seed), []
    for (here, length, device), (there, _, other) in zip(*rows, strict=True):
        ends = sorted({0, int(length), *(choice.randrange(length) for _ in range(choice.randrange(3)))})
        for start, end in itertools.pairwise(ends):
            ranges.append(([here + start, end - start, device], [there + start, end - start, other]))
    choice.shuffle(ranges)
    return [ours for ours, _ in ranges], [theirs for _, theirs in ranges]


def copies_error(copies: Any, **changed: Any) -> KVPlanError:
    with pytest.raises(KVPlanError) as caught:
        assert_copies(DECODE, PREFILL, copies, **{**REQUEST, **changed})
    return caught.value


def fails(copies: Any, request: dict[str, Any] = REQUEST) -> str:
    """The message of the assertion."""
    with pytest.raises(AssertionError) as caught:
        assert_copies(DECODE, PREFILL, copies, **request)
    return str(caught.value)


def codes(text: str) -> list[str]:
    return re.findall(r"^([A-Z]+):", text, re.MULTILINE)


@pytest.mark.parametrize("request_", [REQUEST, WRITE], ids=["READ", "WRITE"])
def test_right_copies_pass(request_: dict[str, Any]) -> None:
    """kvplan's copies pass in both directions, and the report lists what it checked, without ids."""
    report = assert_copies(DECODE, PREFILL, copies_of(request_), **request_)
    assert report.ok
    assert (report.num_bytes, report.num_workers) == (NUM_BYTES, 2)
    assert report.checked == ("VALUE", "COVER", "DISJOINT", "BOUNDS", "OWN")


@fewer(4)
@given(cases(), st.integers(0, 99), st.sampled_from(["READ", "WRITE"]))
def test_any_engines_copies_pass_however_they_are_cut(case: Case, seed: int, operation: Any) -> None:
    """The descriptors of any two engines pass, by range or by id, cut or not, in both directions."""
    copies: dict[Any, Any] = {}
    plans = map(case.reads, case.destinations) if operation == "READ" else map(case.writes, case.sources)
    for plan in plans:
        for spec in plan.bind(**case.request(plan)):
            by_id = expand(spec.local_table.rows, spec.local_ids), expand(spec.remote_table.rows, spec.remote_ids)
            rows = by_id if seed % 2 else spec.descriptors()
            copies[spec.local, spec.remote] = cut((rows[0].tolist(), rows[1].tolist()), seed) if seed % 3 else rows
    assert_copies(case.destinations, case.sources, copies, **case.arguments(operation))


def test_a_wrong_byte_is_named_on_both_sides() -> None:
    """A copy from the address of the next position is reported with its count, both meanings, and its origin."""
    copies = copies_of()
    copies[PAIR][1][0][0] += 16
    text = fails(copies)
    assert codes(text) == ["VALUE"]
    assert text.splitlines()[0] == f"not verified: {NUM_BYTES} bytes in 80 descriptors to 2 workers"
    assert "VALUE: at decode/0: 16 bytes wrong: layers.0, head 0: position 4 holds position 5\n" in text
    assert "\n  first: layers.0 dim 0 head 0 kv 0 byte 0 of position 4 (" in text
    assert "block 3 slot 0, address" in text
    assert "holds layers.0 dim 0 head 0 kv 0 byte 0 of position 5, copied from layers.0 dim 0 head 0" in text
    assert text.endswith("of prefill/0")


def test_swapped_ranks_are_found() -> None:
    """Heads from the other rank are wrong bytes, also where both ranks have memory at one address, as processes do."""
    copies = copies_of()
    copies[PAIR], copies[OTHER] = copies[OTHER], copies[PAIR]
    assert codes(fails(copies)) == ["BOUNDS", "BOUNDS", "COVER"]
    same = [attrs.evolve(worker, regions=PREFILL[0].regions) for worker in PREFILL]
    specs = plan_reads(DECODE[0], same).bind(**REQUEST)
    copies = {(spec.local, spec.remote): spec.descriptors() for spec in specs}
    assert assert_copies(DECODE[:1], same, copies, **REQUEST).ok
    copies[PAIR], copies[OTHER] = copies[OTHER], copies[PAIR]
    with pytest.raises(AssertionError, match=f"VALUE: at decode/0: {NUM_BYTES // 2} bytes wrong"):
        assert_copies(DECODE[:1], same, copies, **REQUEST)


@pytest.mark.parametrize(
    "form",
    [
        lambda rows: np.array(rows),
        lambda rows: np.array(rows, np.uint64),
        lambda rows: [tuple(row) for row in rows],
        lambda rows: (np.array(row) for row in rows),
        lambda rows: [[np.uint64(address), np.int32(length), device] for address, length, device in rows],
    ],
    ids=["int64", "uint64", "tuples", "generator", "scalars"],
)
def test_descriptors_come_in_any_form(form: Any) -> None:
    """Arrays, sequences and scalars of any integer type are equal descriptors."""
    copies = {pair: tuple(map(form, rows)) for pair, rows in copies_of().items()}
    assert assert_copies(DECODE, PREFILL, copies, **REQUEST).ok


def test_addresses_of_64_bits_stay_exact() -> None:
    """An address beyond float64's integers is not rounded, also among scalars of mixed types."""
    high = (1 << 64) - 1
    error = fails({PAIR: ([[np.uint64(high), np.int64(1), 0]], [[high, 1, 0]])})
    assert f"1 bytes at {high:#x} on device 0" in error


@pytest.mark.parametrize(
    "copies, code, text",
    [
        ([PAIR], "TYPE", "expected a mapping of pairs of workers to descriptors, got a list of 1"),
        (
            {PAIR[::-1]: ([], [])},
            "NAME",
            "such as (('decode', 0), ('prefill', 0)), got (('prefill', 0), ('decode', 0))",
        ),
        ({"decode": ([], [])}, "NAME", "got 'decode'"),
        ({PAIR: [[1, 2, 0]]}, "TYPE", "expected (local descriptors, remote descriptors), got a list of 1"),
        ({PAIR: "ab"}, "TYPE", "expected (local descriptors, remote descriptors), got 'ab'"),
        ({PAIR: ("ab", "cd")}, "TYPE", "local descriptors of copies between decode/0 and prefill/0"),
        ({PAIR: ([], [(1, 2)])}, "TYPE", "remote descriptors of copies between decode/0 and prefill/0"),
        ({PAIR: ([], 7)}, "TYPE", "expected rows of address, length and device, got 7"),
        ({PAIR: ((1, 2, 0), (1, 2, 0))}, "TYPE", "expected rows of address, length and device, got 1"),
        ({PAIR: ([(1, 2.0, 0)], [])}, "TYPE", "expected an integer, got 2.0"),
        ({PAIR: ([(True, 2, 0)], [])}, "TYPE", "expected an integer, got True"),
        ({PAIR: (np.array([(0.5, 2, 0)]), [])}, "TYPE", "expected an integer, got 0.5"),
        ({PAIR: ([(-1, 2, 0)], [])}, "RANGE", "got -1"),
        ({PAIR: (np.array([(1, -2, 0)]), [])}, "RANGE", "got -2"),
        ({PAIR: ([(1 << 64, 2, 0)], [])}, "RANGE", "got 18446744073709551616"),
        ({PAIR: ([(1, 0, 0)], [(1, 0, 0)])}, "RANGE", "expected an integer in [1, "),
        ({PAIR: ([(1, 2, 0)], [])}, "SIZE", "expected as many local descriptors as remote ones, got 1 and 0"),
        (
            {PAIR: ([(1, 2, 0), (3, 4, 0)], [(1, 2, 0), (3, 6, 0)])},
            "SIZE",
            "expected paired descriptors of equal lengths, got 4 and 6 bytes in number 1",
        ),
    ],
)
def test_malformed_copies_are_refused(copies: Any, code: str, text: str) -> None:
    """Malformed copies raise a KVPlanError that says what is wrong with them."""
    error = copies_error(copies)
    assert error.code == code
    assert text in str(error)


def test_a_connector_that_returns_nothing_is_refused() -> None:
    """None is no copies: in verify it means those of the plan, which would always be right."""
    with pytest.raises(KVPlanError, match="TYPE: cannot read copies: expected a mapping of pairs of workers"):
        assert_copies(DECODE, PREFILL, None, **REQUEST)  # type: ignore[arg-type]


def test_malformed_requests_are_refused() -> None:
    """Requests that plans refuse are refused."""
    assert copies_error(copies_of(), tokens=(0, 99)).code == "BLOCKS"
    assert copies_error(copies_of(), operation="PULL").code == "NAME"
    assert copies_error(copies_of(), not_transferred=[7]).code == "TYPE"


def test_tensors_that_are_not_transferred_must_be_left_alone() -> None:
    """No byte of an excluded tensor is missing, and every byte that is written to it breaks OWN."""
    copies = copies_of()
    apart = {**REQUEST, "not_transferred": ["layers.1"]}
    text = fails(copies, apart)
    assert codes(text) == ["OWN"]
    assert f"OWN: at decode/0-1: {NUM_BYTES // 2} bytes written outside the request, first: layers.1 " in text
    for rows in copies.values():
        for side in rows:
            side[:] = [row for row in side if row[0] % (1 << 40) < 1 << 30]  # the region of layers.0
    assert assert_copies(DECODE, PREFILL, copies, **apart).num_bytes == NUM_BYTES // 2


def test_copies_of_a_part_are_verified_with_the_rest() -> None:
    """One chunk by copies and the next one by a plan are verified together, without ids."""
    (mine,), (other,) = engine("d"), engine("p", tokens=8)
    plan = plan_reads(mine, [other])
    tables: dict[str, Any] = {"local": {"attn": Blocks([3, 9])}, "remote": {"attn": Blocks([2])}}
    (spec,) = plan.bind(**tables, tokens=(0, 3))
    copies = {(spec.local, spec.remote): spec.descriptors()}
    parts = [(plan, {**tables, "tokens": (0, 3), "copies": copies}), (plan, {**tables, "tokens": (3, 8)})]
    report = verify_together(parts, tokens=(0, 8))
    assert report.ok, str(report)
    assert "IDS" not in report.checked
    assert not verify_together([(plan, {**tables, "tokens": (0, 3), "copies": {}}), parts[1]], tokens=(0, 8)).ok


HYBRID = shortened(Model.shipped("granite-4.0-h-tiny"))
ENGINES = {
    "blocks": (engine("d", tokens=6), engine("p", tokens=4, tp=2)),
    "contexts": (engine("d", contexts=(3, 2)), engine("p", tokens=5, contexts=(2, 3))),
    "tiny": (engine("d", blocks=1), engine("p", blocks=2)),
    "hybrid": (HYBRID.engine("d", shared=True, num_blocks=12), HYBRID.engine("p", tp=2, num_blocks=9)),
}


@pytest.mark.parametrize("name", ENGINES)
@fewer(8)
@given(data=st.data(), operation=st.sampled_from(["READ", "WRITE"]))
def test_requests_fit_the_engines(name: str, data: st.DataObject, operation: Any) -> None:
    """Plans accept every request, and are right for it. No block is in two groups."""
    destinations, sources = ENGINES[name]
    request = data.draw(requests(destinations, sources, operation, max_tokens=40, min_tokens=0))
    for tables in (request["local"], request["remote"]):
        ids = [block for table in tables.values() for block in table.ids.tolist()]
        assert len(ids) == len(set(ids))
    assert isinstance(request["tokens"], tuple)
    start, stop = request["tokens"]
    assert 0 <= stop - start <= 40
    report = verify(plan_mesh(destinations, sources, operation), **request)
    assert report, str(report)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "tiny"])
def test_requests_are_of_all_kinds(name: str) -> None:
    """Requests include scattered blocks and late starts, and empty ones where they are asked for."""
    kinds = set()

    @given(requests(*ENGINES[name], min_tokens=0))
    def look(request: Any) -> None:
        (table, *_) = request["local"].values()
        kinds.add("late" if table.first else "early")
        kinds.add("in order" if (np.diff(table.ids) == 1).all() else "scattered")
        kinds.add("blocks" if table.ids.size else "none")

    look()
    assert kinds == {"late", "early", "in order", "scattered", "blocks", "none"}


def test_requests_have_a_range_that_is_not_empty() -> None:
    """By default every request has an explicit range with at least one position."""

    @given(requests(*ENGINES["blocks"]))
    def look(request: Any) -> None:
        start, stop = request["tokens"]
        assert start < stop

    look()


def test_hypothesis_prints_blocks_in_one_line() -> None:
    """A failing example shows a block table as it is written, without its fields."""
    assert pretty({"attn": Blocks([24])}) == "{'attn': Blocks([24])}"


def test_the_assertion_needs_no_hypothesis() -> None:
    """The assertion works without hypothesis."""
    code = "import sys; sys.modules['hypothesis'] = None; import kvplan.testing; print(kvplan.testing.__all__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.startswith("['FakeCopier', ")


def test_strategies_without_hypothesis_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hypothesis, importing the strategies says how to install it."""
    monkeypatch.delitem(sys.modules, "kvplan.testing.strategies")
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError) as refused:
        importlib.import_module("kvplan.testing.strategies")
    assert str(refused.value) == "kvplan.testing.strategies needs hypothesis: pip install hypothesis"


def test_requests_may_all_begin_at_their_first_block() -> None:
    """With ``first=False`` no block table begins later, nor does a range."""
    destinations = engine("decode", order="NH")

    @settings(max_examples=20, deadline=None, database=None)
    @given(requests(destinations, engine("prefill"), first=False))
    def check(request: Any) -> None:
        assert request["tokens"][0] == 0
        assert {request[side]["attn"].first for side in ("local", "remote")} == {0}

    check()
