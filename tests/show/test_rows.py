"""Rows: nothing is folded or left out, and every number stands as it is in the value."""

from __future__ import annotations

import re
from typing import Any

import attrs

from kvplan import Blocks, explain, plan_mesh, plan_reads, plan_writes, verify
from kvplan.show.rows import rows_of
from tests.small import engine

DECODE, PREFILL = engine("decode", tokens=8), engine("prefill", tp=2)
PLAN = plan_reads(DECODE[0], PREFILL)
REQUEST: dict[str, Any] = {"local": {"attn": Blocks([7])}, "remote": {"attn": Blocks([4, 9])}}


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
        assert attrs.astuple(row) == (*ids, *whole, DECODE[0].regions[region].name)
    assert found[-1].stop_id == table.num_ids


def test_a_plan_tells_every_row_of_both_sides() -> None:
    """Below each remote worker stand all rows of both tables, in order of their ids."""
    lines = explain(PLAN, detail="rows").splitlines()
    tables = [table for pair in PLAN.pairs for table in (pair.local_table, pair.remote_table)]
    found = [text for text in lines if re.match(r" +\[\d+, \d+\)  0x", text)]
    for row, text in zip([row for table in tables for row in rows_of(table)], found, strict=True):
        rest, region = text.rsplit("  ", 1)
        assert region == row.region
        told = [row.first_id, row.stop_id, row.address, row.length, row.device, row.stride, row.count]
        assert numbers(rest) == told
    assert [text for text in lines if text.startswith("  <-")] == ["  <- prefill/0", "  <- prefill/1"]


def test_a_pair_that_moves_nothing_is_told() -> None:
    """A remote worker without rows is not left out."""
    plan = plan_writes(PREFILL[0], engine("decode", tp=2), PREFILL[1:])
    *_, last = explain(plan, detail="rows").splitlines()
    assert last == "  -> decode/1: nothing"
    assert explain(plan.pairs[1], detail="rows") == "pair with decode/1: nothing"


def test_a_mesh_tells_the_completions_of_every_worker() -> None:
    """Behind the rows of all plans, each worker has a line with those whom it tells and awaits."""
    mesh = plan_mesh(DECODE, PREFILL)
    text = explain(mesh, detail="rows")
    assert text.startswith(
        "1 plan of 3 workers\n  decode/0 reads from 2 of 2 workers\n    <- prefill/0\n      local rows\n"
    )
    assert text.splitlines()[-3:] == [
        "  decode/0 sends completions to prefill/0, prefill/1, awaits those of nobody",
        "  prefill/0 sends completions to nobody, awaits those of decode/0",
        "  prefill/1 sends completions to nobody, awaits those of decode/0",
    ]


def test_a_spec_tells_every_descriptor() -> None:
    """Each descriptor is a line with its length and where it lies on both sides; one that moves nothing has none."""
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
    (idle, _) = PLAN.bind(**REQUEST, tokens=(3, 3))
    assert explain(idle, detail="rows") == "decode/0 <- prefill/0: nothing"


def test_a_worker_tells_every_region_and_view() -> None:
    """Each region and each view has its own lines, and a view says where in its region it stands."""
    worker = DECODE[0]
    lines = explain(worker, detail="rows").splitlines()
    assert lines[:2] == [str(worker), "  group attn: 8 tokens a block"]
    assert [text for text in lines if text.startswith("  region")] == [
        f"  region {region}" for region in worker.regions
    ]
    told = [text.partition(":")[0] for text in lines if text.startswith("  view")]
    places = [f"byte {view.offset_bytes} of region {view.region}" for view in worker.views]
    assert told == [f"  view {v.name} in group attn at {at}" for v, at in zip(worker.views, places, strict=True)]
    assert lines.count("    head [0, 4) of 4 step 128") == len(worker.views)
    assert explain(worker.views[1], detail="rows").splitlines()[1:] == [f"  {axis}" for axis in worker.views[1].axes]


def test_a_cost_tells_pairs_that_move_nothing_and_every_length() -> None:
    """No pair is left out, and descriptors of each length are a line of their own."""
    writer = plan_writes(PREFILL[0], engine("decode", tp=2, tokens=6), PREFILL[1:])
    cost = writer.cost(9)
    assert len(cost.pairs[0].lengths) > 1
    lengths = [f"    {times} descriptors of {length} bytes" for length, times in cost.pairs[0].lengths.items()]
    assert explain(cost, detail="rows").splitlines() == [
        str(cost).splitlines()[0],
        f"  prefill/0 -> decode/0: {cost.pairs[0].local_rows} and {cost.pairs[0].remote_rows} rows",
        *lengths,
        "  prefill/0 -> decode/1: 0 and 0 rows",
    ]


def test_a_report_tells_what_was_left_alone() -> None:
    """Slots that were not written are told span by span."""
    text = explain(verify(PLAN, **REQUEST, tokens=(0, 5)), detail="rows")
    assert text.splitlines()[1:] == ["  left alone: decode/0 attn [5, 8)"]


def test_blocks_are_told_one_by_one() -> None:
    """Each block has its ordinal in the request, also where these are not neighbours."""
    assert explain(Blocks([9, 5], ordinals=[30, 10]), detail="rows").splitlines()[1:] == [
        "  block 10 of the request: id 5",
        "  block 30 of the request: id 9",
    ]


def test_a_table_of_its_own_is_told() -> None:
    """A table has a line for what it is, and a line for each row."""
    title, heads, *lines = explain(PLAN.pairs[0].remote_table, detail="rows").splitlines()
    assert title == "table: 200 ids in 4 rows of 16 bytes to 64 bytes"
    assert heads.split() == ["ids", "address", "length", "device", "stride", "count", "region"]
    assert len(lines) == 4
