"""Tables (T)."""

import pickle

import attrs
import numpy as np
import pytest

from kvplan import Axis, Group, KVPlanError, Region, View, Worker, certify, plan_reads
from kvplan.plan.rows import RowJob, assign_rows
from tests.counted import numbers_of
from tests.small import engine


def job(offsets, length=64, stride=256, blocks=10, region=0):
    """Bytes at these offsets of a block, each by itself, in the order that assign_rows takes."""
    alike = np.array([[value] * len(offsets) for value in (0, region, stride, blocks, length)])
    return RowJob(alike, np.array(offsets)[:, None])


def expanded(rows):
    """Offset of every id."""
    return [offset + i * stride for _, offset, _, stride, count in rows.tolist() for i in range(count)]


@pytest.mark.parametrize("offsets", [[0], [0, 64, 128, 192], [64, 192], [0, 64], [192, 0, 64], [8, 72, 136]])
@pytest.mark.parametrize("stride", [256, 320, 300])
def test_t2_ids_find_their_bytes_in_every_block(offsets, stride):
    """plan.T2, plan.T3: ``id + step * block`` is, for every block, the id of the same offset in that block."""
    rows, (ids,) = assign_rows([job(offsets, stride=stride)])
    where = expanded(rows)
    for offset, first, step in zip(offsets, ids.first[:, 0].tolist(), ids.step[:, 0].tolist(), strict=True):
        assert [where[first + step * block] for block in range(10)] == [offset + stride * block for block in range(10)]


def test_t2_a_step_shorter_than_the_bytes_is_never_taken():
    """plan.T2: rows never overlap themselves: offsets 0 and 100 of 64 bytes have the common step 4, so stay apart."""
    rows, _ = assign_rows([job([0, 100])])
    assert rows.tolist() == [[0, 0, 64, 256, 10], [0, 100, 64, 256, 10]]


def test_t1_tables_are_read_only_and_small():
    """plan.T1: a plan's size does not grow with the number of blocks."""
    small, large = (
        plan_reads(engine("d", blocks=n)[0], engine("p", blocks=n)).pairs[0].local_table for n in (10, 10_000)
    )
    assert small.rows.shape == large.rows.shape
    with pytest.raises(ValueError, match="read-only"):
        small.rows[0, 0] = 1


def test_t1_addresses_up_to_the_end_of_memory_are_exact():
    """plan.T1: rows near 2**64 keep every bit."""
    (ours,), (theirs,) = engine("d", layers=1), engine("p", layers=1)
    top = attrs.evolve(ours, regions=(attrs.evolve(ours.regions[0], address=2**64 - ours.regions[0].size_bytes),))
    rows = plan_reads(top, [theirs]).pairs[0].local_table.rows
    assert int(rows[0, 0]) == 2**64 - ours.regions[0].size_bytes


def test_plans_survive_pickling():
    """A plan is plain data."""
    plan = plan_reads(engine("d")[0], engine("p"))
    again = pickle.loads(pickle.dumps(plan))
    assert (again.pairs[0].local_table.rows == plan.pairs[0].local_table.rows).all()


def test_t2_layers_one_behind_another_are_one_row():
    """plan.T2: the ids of neighbouring layers are neighbours, also where a layer ends with some unused bytes."""
    rows, _ = assign_rows([job([0, 64, 12800 + 128, 12800 + 192], stride=128, blocks=100)])
    assert rows.tolist() == [[0, 0, 64, 64, 402]]


def test_t2_layers_far_apart_have_as_many_ids_as_layers_of_two_regions():
    """plan.T2: two layers a tebibyte apart in one region, as in two regions; every byte arrives."""
    ours, theirs = (engine(name, blocks=80, order=order)[0] for name, order in (("d", "HN"), ("p", "NH")))
    (near,) = plan_reads(ours, [theirs]).pairs
    region = attrs.evolve(theirs.regions[0], size_bytes=(1 << 40) + theirs.regions[0].size_bytes)
    views = [attrs.evolve(view, region=region.name, offset_bytes=i << 40) for i, view in enumerate(theirs.views)]
    plan = plan_reads(ours, [attrs.evolve(theirs, regions=[region], views=views)])
    assert certify(plan).complete
    assert plan.pairs[0].remote_table.num_ids == near.remote_table.num_ids


def test_t2_more_slots_than_can_be_listed_are_refused():
    """plan.T2: four heads in two layers of blocks of four million tokens are more slots than are listed."""
    (ours,), (theirs,) = (engine(name, tokens=1 << 22, blocks=1) for name in "dp")
    with pytest.raises(
        KVPlanError,
        match=r"^RANGE: cannot plan .* at most 1.25 GiB, got an estimate of 8.* with 67108864 slots",
    ):
        plan_reads(ours, [theirs])


def test_a_table_is_one_short_line():
    """Tables print as how much they register, and how many descriptors these are."""
    (ours,), sources = engine("d", blocks=7, heads=1), engine("p", tp=2, heads=1)
    used, idle = plan_reads(ours, sources).pairs
    assert [repr(pair.local_table) for pair in (used, idle)] == [
        "<Table of 4 rows, 70 ids>",
        "<Table of 0 rows, 0 ids>",
    ]


def ids_of(ours, theirs):
    """The ids of the only pair of workers, with one group on each side."""
    (pair,) = plan_reads(ours, theirs).pairs
    (groups,) = pair.group_pairs
    return groups.runs, groups.tokens


def blocks_of(runs):
    """The blocks of a period as numbers: ordinals, blocks in a period, their step, and what slots add."""
    return [
        (
            side.ordinal.tolist(),
            side.num_blocks,
            side.step,
            None if side.slot_terms is None else side.slot_terms.tolist(),
        )
        for side in runs.blocks
    ]


def test_t3_pieces_of_a_block_are_one_series():
    """plan.T3: two blocks of 4 to one of 8 are one series with two starts, which differ by what their slots add."""
    (runs,), _ = ids_of(engine("d", tokens=8)[0], engine("p"))
    assert (runs.starts.tolist(), blocks_of(runs)) == ([0, 4], [([0, 0], 1, 0, [0, 1]), ([0, 1], 2, 1, None)])


def rows_of(*jobs):
    rows, _ = assign_rows(list(jobs))
    return rows.tolist()


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ({"offsets": [5], "blocks": 1, "stride": 0}, [[0, 5, 64, 64, 1]]),
        ({"offsets": [0, 100], "blocks": 1}, [[0, 0, 64, 100, 2]]),
        ({"offsets": [8, 72, 136]}, [[0, 8, 64, 64, 39]]),
        ({"offsets": [0, 64], "blocks": 2}, [[0, 0, 64, 64, 6]]),
        ({"offsets": [0, 64], "stride": 2240}, [[0, 0, 64, 64, 317]]),
        ({"offsets": [0, 64], "stride": 2304}, [[0, 0, 64, 2304, 10], [0, 64, 64, 2304, 10]]),
        ({"offsets": [0, 64], "blocks": 2, "stride": 3968}, [[0, 0, 64, 64, 64]]),
        ({"offsets": [0, 64], "blocks": 2, "stride": 4032}, [[0, 0, 64, 4032, 2], [0, 64, 64, 4032, 2]]),
        ({"offsets": [0, 64, 2240, 2304], "stride": 128}, [[0, 0, 64, 64, 55]]),
        ({"offsets": [0, 64, 2304, 2368], "stride": 128}, [[0, 0, 64, 64, 20], [0, 2304, 64, 64, 20]]),
        ({"offsets": [0, 100, 100]}, [[0, 0, 64, 256, 10], [0, 100, 64, 256, 10]]),
    ],
)
def test_t2_bytes_are_one_row_where_they_can_be(how, rows):
    """plan.T2: one block, a first offset, few blocks; the most unused ids, and one more; the same bytes twice."""
    assert rows_of(job(**how)) == rows


@pytest.mark.parametrize(("local", "remote"), [(4, 2), (2, 4)])
def test_t2_slots_of_both_sides_are_counted(local, remote):
    """plan.T2: eight runs of four slots on one side and of two on the other."""
    (ours,), theirs = engine("d", tokens=local), engine("p", tokens=remote)
    assert numbers_of(lambda budget: plan_reads(ours, theirs, budget=budget))["slots of runs"] == 8 * (4 + 2)


@pytest.mark.parametrize("layers", [3, 4])
def test_more_ids_than_64_bits_hold_are_refused(layers):
    """INT: rows of about 2**60 descriptors, where fewer than 2**62 are numbered, so that no sum wraps."""
    axes = (Axis("token", 0, 1 << 16, 1 << 16, 1),)
    mine, other = (
        Worker(
            name,
            0,
            [Region(f"r{i}", 0, 1 << 60, device_id=i) for i in range(layers)],
            [Group("g", 1 << 16)],
            [View(f"t{i}", "g", f"r{i}", "uint8", axes, (1 << 40) - 1, 1 << 20) for i in range(layers)],
        )
        for name in "dp"
    )
    if layers == 3:
        assert plan_reads(mine, [other]).pairs[0].local_table.num_ids > 3 << 59
    else:
        with pytest.raises(
            KVPlanError, match=r"^INT: cannot number .*: expected fewer than 4611686018427387904 in all"
        ):
            plan_reads(mine, [other])


def test_as_many_ids_as_can_be_summed_are_numbered(monkeypatch):
    """INT: the ids of the larger side are fewer than the limit."""
    (ours,), theirs = engine("d"), engine("p", blocks=12)
    ids = plan_reads(ours, theirs).pairs[0].remote_table.num_ids
    monkeypatch.setattr("kvplan.plan.rows.NUMBERED_END", ids + 1)
    assert plan_reads(ours, theirs).pairs[0].group_pairs
    monkeypatch.setattr("kvplan.plan.rows.NUMBERED_END", ids)
    with pytest.raises(KVPlanError, match=rf"^INT: .* expected fewer than {ids} in all rows"):
        plan_reads(ours, theirs)
