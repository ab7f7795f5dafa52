"""Tables (T)."""

import pickle

import attrs
import numpy as np
import pytest

from kvplan import Axis, Group, KVPlanError, Model, Region, View, Worker, certify, plan_reads
from kvplan.plan.rows import RowIds, RowJob, _run_series, assign_rows
from kvplan.plan.runs import GroupRuns, Runs
from tests.small import HEAD_BYTES, engine


def job(offsets, length=64, stride=256, blocks=10, region=0):
    """Bytes at these offsets of a block, each by itself, in the order that place takes."""
    alike = np.array([[value] * len(offsets) for value in (0, region, stride, blocks, length)])
    return RowJob(alike, np.array(offsets)[:, None])


def expanded(rows):
    """Offset of every id."""
    return [offset + i * stride for _, offset, _, stride, count in rows.tolist() for i in range(count)]


@pytest.mark.parametrize("offsets", [[0], [0, 64, 128, 192], [64, 192], [0, 64], [192, 0, 64], [8, 72, 136]])
@pytest.mark.parametrize("stride", [256, 320, 300])
def test_t2_ids_find_their_bytes_in_every_block(offsets, stride):
    """T2, T3: ``id + step * block`` is, for every block, the id of the same offset in that block."""
    rows, (ids,) = assign_rows([job(offsets, stride=stride)])
    where = expanded(rows)
    for offset, first, step in zip(offsets, ids.first[:, 0].tolist(), ids.step[:, 0].tolist(), strict=True):
        assert [where[first + step * block] for block in range(10)] == [offset + stride * block for block in range(10)]


def test_t2_dense_pieces_are_one_row():
    """T2: four pieces that fill a block are one row with four counts per block."""
    rows, _ = assign_rows([job([0, 64, 128, 192])])
    assert rows.tolist() == [[0, 0, 64, 64, 40]]


def test_t2_a_step_shorter_than_the_bytes_is_never_taken():
    """T2: rows never overlap themselves: offsets 0 and 100 of 64 bytes have the common step 4, so stay apart."""
    rows, _ = assign_rows([job([0, 100])])
    assert rows.tolist() == [[0, 0, 64, 256, 10], [0, 100, 64, 256, 10]]


def test_t2_a_row_ends_with_the_last_byte_it_needs():
    """T2: offsets 0 and 64 of a block of 256 leave the last block's second half out of the count."""
    rows, _ = assign_rows([job([0, 64], stride=256, blocks=3)])
    assert rows.tolist() == [[0, 0, 64, 64, 10]]


def test_t2_equal_bytes_share_an_id():
    """T2: two strands that read the same bytes of a source use the same row."""
    _, (a, b) = assign_rows([job([0, 128]), job([128])])
    assert (b.first[0], b.step[0]) == (a.first[1], a.step[1])


def test_t1_one_block_needs_no_stride():
    """T2: a pool of one block is rows of one descriptor each, whatever its block stride."""
    rows, (ids,) = assign_rows([job([0, 100], stride=0, blocks=1)])
    assert expanded(rows) == [0, 100]
    assert ids.first[:, 0].tolist() == [0, 1]


def test_t4_pools_may_differ():
    """T4: each side's rows count its own blocks."""
    (ours,), (theirs,) = engine("d", blocks=7, layers=1), engine("p", blocks=12, layers=1)
    (pair,) = plan_reads(ours, [theirs]).pairs
    page = 16 * HEAD_BYTES
    assert pair.local_table.rows[0].tolist() == [ours.regions[0].address, page, 0, page, 7]
    assert pair.remote_table.rows[0].tolist() == [theirs.regions[0].address, page, 0, page, 12]


def test_t1_tables_are_read_only_and_small():
    """T1: a plan's size does not grow with the number of blocks."""
    small, large = (
        plan_reads(engine("d", blocks=n)[0], engine("p", blocks=n)).pairs[0].local_table for n in (10, 10_000)
    )
    assert small.rows.shape == large.rows.shape
    with pytest.raises(ValueError, match="read-only"):
        small.rows[0, 0] = 1


def test_t1_addresses_up_to_the_end_of_memory_are_exact():
    """T1: rows near 2**64 keep every bit."""
    (ours,), (theirs,) = engine("d", layers=1), engine("p", layers=1)
    top = attrs.evolve(ours, regions=(attrs.evolve(ours.regions[0], address=2**64 - ours.regions[0].size_bytes),))
    rows = plan_reads(top, [theirs]).pairs[0].local_table.rows
    assert int(rows[0, 0]) == 2**64 - ours.regions[0].size_bytes


def test_plans_survive_pickling():
    """A plan is plain data."""
    plan = plan_reads(engine("d")[0], engine("p"))
    again = pickle.loads(pickle.dumps(plan))
    assert (again.pairs[0].local_table.rows == plan.pairs[0].local_table.rows).all()


def test_t2_a_row_of_mostly_unused_ids_is_split():
    """T2: two values at the start of a block of a mebibyte are two rows of a hundred ids, not one of fifty million."""
    rows, (ids,) = assign_rows([job([0, 2], length=2, stride=1 << 20, blocks=100)])
    assert rows.tolist() == [[0, 0, 2, 1 << 20, 100], [0, 2, 2, 1 << 20, 100]]
    assert [column[:, 0].tolist() for column in ids] == [[0, 100], [1, 1]]


def test_t2_a_row_ends_at_a_gap():
    """T2: two layers that are a tebibyte apart in one region are two rows; no id stands for what is between them."""
    rows, (ids,) = assign_rows([job([0, 64, 1 << 40, (1 << 40) + 64], stride=128, blocks=100)])
    assert rows.tolist() == [[0, 0, 64, 64, 200], [0, 1 << 40, 64, 64, 200]]
    assert [column[:, 0].tolist() for column in ids] == [[0, 1, 200, 201], [2, 2, 2, 2]]


def test_t2_layers_one_behind_another_are_one_row():
    """T2: the ids of neighbouring layers are neighbours, also where a layer ends with some unused bytes."""
    rows, _ = assign_rows([job([0, 64, 12800 + 128, 12800 + 192], stride=128, blocks=100)])
    assert rows.tolist() == [[0, 0, 64, 64, 402]]


def test_t2_layers_far_apart_have_as_many_ids_as_layers_of_two_regions():
    """T2: two layers a tebibyte apart in one region, as in two regions; every byte arrives."""
    ours, theirs = (engine(name, blocks=80, order=order)[0] for name, order in (("d", "HN"), ("p", "NH")))
    (near,) = plan_reads(ours, [theirs]).pairs
    region = attrs.evolve(theirs.regions[0], size_bytes=(1 << 40) + theirs.regions[0].size_bytes)
    views = [attrs.evolve(view, region=region.name, offset_bytes=i << 40) for i, view in enumerate(theirs.views)]
    plan = plan_reads(ours, [attrs.evolve(theirs, regions=[region], views=views)])
    assert certify(plan).complete
    assert plan.pairs[0].remote_table.num_ids == near.remote_table.num_ids


def test_t2_more_slots_than_can_be_listed_are_refused():
    """T2: four heads in two layers of blocks of four million tokens are more slots than are listed."""
    (ours,), (theirs,) = (engine(name, tokens=1 << 22, blocks=1) for name in "dp")
    with pytest.raises(KVPlanError, match=r"^RANGE: cannot number .*: expected at most 8388608 slots .*, got 33554432"):
        plan_reads(ours, [theirs])


def test_a_table_is_one_short_line():
    """Tables print as how much they register, and how much that stands for."""
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


def test_t3_whole_blocks_need_no_arithmetic_on_slots():
    """T3: runs that fill a block on each side are one series, whose nth run is in the nth block of both."""
    (runs,), (tokens,) = ids_of(engine("d")[0], engine("p"))
    assert (runs.starts.tolist(), blocks_of(runs), runs.step) == ([0], [([0], 1, 1, None)] * 2, (1, 1))
    assert (tokens.starts.tolist(), tokens.period, tokens.only_at_cuts, tokens.step) == ([0], 1, True, (16, 16))
    assert [side.tolist() for side in tokens.slot_terms] == [[0, 1, 2, 3]] * 2


def test_t3_pieces_of_a_block_are_one_series():
    """T3: two blocks of 4 to one of 8 are one series with two starts, which differ by what their slots add."""
    (runs,), _ = ids_of(engine("d", tokens=8)[0], engine("p"))
    assert (runs.starts.tolist(), blocks_of(runs)) == ([0, 4], [([0, 0], 1, 0, [0, 1]), ([0, 1], 2, 1, None)])


def test_t3_runs_of_many_lengths_are_few_series():
    """T3: blocks of 40 from blocks of 7 make 46 runs in a period; their ids are five series."""
    series, _ = ids_of(engine("d", tokens=40, order="NH", blocks=60)[0], engine("p", tokens=7, order="NH", blocks=60))
    starts = sorted(start for runs in series for start in runs.starts.tolist())
    assert starts == sorted({*range(0, 280, 7), *range(0, 280, 40)})
    assert len(series) == 5


def test_t3_ids_behind_those_of_another_group_are_as_few_series():
    """T3: the second of two groups has ids behind the first one's, and as many series and starts."""
    (ours, *_), theirs = (
        Model.shipped("gpt-oss-20b").engine(name, num_blocks=9, tokens_per_block=n)
        for name, n in (("d", 32), ("p", 16))
    )
    (pair,) = plan_reads(ours, theirs).pairs
    first, second = pair.group_pairs
    assert [runs.starts.size for runs in second.runs] == [runs.starts.size for runs in first.runs]
    assert (second.runs[0].base.min(axis=1) > first.runs[0].base.max(axis=1)).all()


def test_t3_one_slot_of_each_block_is_part_of_what_slots_add():
    """T3: the second of two context ranks fills slot 1 of every block of the destination."""
    pairs = plan_reads(engine("d", tokens=2)[0], engine("p", tokens=1, contexts=(2, 1))).pairs
    first, second = (pair.group_pairs[0].tokens[0] for pair in pairs)
    assert (first.starts.tolist(), second.starts.tolist(), first.period, first.only_at_cuts) == ([0], [1], 2, False)
    assert [side.tolist() for side in second.slot_terms] == [[0, 1], [0]]


def test_t3_runs_whose_ids_step_differently_are_series_of_their_own():
    """T3: in tokens of 24 bytes, two heads in rows of a step of 8, and a latent in rows of a step of 24."""
    token = Axis("token", 0, 2, 2, 24)
    views = [
        View("heads", "attn", "kv", "uint8", (token, Axis("head", 0, 2, 2, 8), Axis("dim", 0, 4, 4, 1)), 5, 48),
        View("latent", "attn", "kv", "uint8", (token, Axis("dim", 0, 8, 8, 1)), 5, 48, 16),
    ]
    ours, theirs = (Worker(name, 0, [Region("kv", 1 << 40, 240)], [Group("attn", 2)], views) for name in "dp")
    _, tokens = ids_of(ours, [theirs])
    assert [(one.base.shape[1], one.step, one.slot_terms[0].tolist()) for one in tokens] == [
        (1, (2, 2), [0, 1]),
        (2, (6, 6), [0, 3]),
    ]


@pytest.mark.parametrize("tokens", [4, 6, 8])
def test_t3_ids_that_fit_are_narrow_and_in_order(tokens):
    """T3: int32 without gaps in memory, and runs in order of the destination's ids."""
    every_run, every_token = ids_of(engine("d", tokens=tokens)[0], engine("p"))
    for ids in (*every_run, *every_token):
        assert ids.base.dtype == np.int32
        assert ids.base.flags.c_contiguous
        assert (np.diff(ids.base[0, :, 0]) > 0).all()
    assert {side.dtype for ids in every_token for side in ids.slot_terms} == {np.dtype(np.int32)}
    assert {side.slot_terms.dtype for ids in every_run for side in ids.blocks if side.slot_terms is not None} <= {
        np.dtype(np.int32)
    }


def test_t3_runs_are_in_the_destinations_order():
    """T3: where the source has its layers the other way round, runs are in order of the destination's ids."""
    (ours,), (theirs,) = engine("d"), engine("p")
    (runs,), _ = ids_of(ours, [attrs.evolve(theirs, regions=theirs.regions[::-1])])
    assert (np.diff(runs.base[0, :, 0]) > 0).all()
    assert (np.diff(runs.base[1, :, 0]) < 0).any()


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
    """T2: one block, a first offset, few blocks; as many unused ids as may be, and one more; the same bytes twice."""
    assert rows_of(job(**how)) == rows


def test_t2_kinds_are_told_apart_in_any_order():
    """T2: bytes of two regions, of two pools and of two lengths, in turns, are rows of each."""
    kinds = [{"region": 1}, {"blocks": 9}, {"length": 32}, {"stride": 320}]
    for kind in kinds:
        jobs = [job([64 * i], **(kind if i % 2 else {})) for i in range(4)]
        found = rows_of(*jobs)
        assert sorted(found) == sorted(rows_of(*jobs[::2]) + rows_of(*jobs[1::2]))
        assert len(found) == 2


def test_t2_a_gap_in_one_region_leaves_others_alone():
    """T2: where the runs of one region are two rows, those of the next one are in their own."""
    split, other = job([0, 64, 2304, 2368], stride=128), job([5], region=1)
    assert rows_of(split, other) == [[0, 0, 64, 64, 20], [0, 2304, 64, 64, 20], [1, 5, 64, 256, 10]]


@pytest.mark.parametrize(("local", "remote"), [(4, 2), (2, 4)])
def test_t2_as_many_slots_as_can_be_listed_are_listed(monkeypatch, local, remote):
    """T2: eight runs of four slots on one side, and not one less allowed."""
    (ours,), theirs = engine("d", tokens=local), engine("p", tokens=remote)
    monkeypatch.setattr("kvplan.plan.rows.MAX_SLOTS", 32)
    assert plan_reads(ours, theirs).pairs[0].group_pairs
    monkeypatch.setattr("kvplan.plan.rows.MAX_SLOTS", 31)
    with pytest.raises(KVPlanError, match="expected at most 31 slots of runs of one token, got 32"):
        plan_reads(ours, theirs)


@pytest.mark.parametrize("ids", [([0, 10], [1, 11, 21]), ([0, 10], [1, 21])])
def test_t3_starts_of_unequal_runs_are_series_of_their_own(ids):
    """T3: two runs begin at position 0, and at position 2 three, or two whose ids are further apart."""
    none = np.zeros((2, 5), np.int64)
    groups = Group("attn", 4), Group("attn", 4)
    runs = Runs(none, none, none, none, none[0])
    position, base = np.repeat([0, 2], [len(each) for each in ids]), np.concatenate(ids)
    side = RowIds(base[:, None], np.ones_like(base)[:, None])
    found = _run_series(GroupRuns(groups, 4, (), runs, position, np.array([[0, 4]])), (side, side), np.int32)
    assert [(one.starts.tolist(), one.base[0, :, 0].tolist()) for one in found] == [([0], ids[0]), ([2], ids[1])]


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
