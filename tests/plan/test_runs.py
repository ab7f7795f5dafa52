"""Runs (R)."""

import attrs
import numpy as np
import pytest

from kvplan import Axis, Blocks, Context, Group, KVPlanError, Region, View, Worker, plan_reads, verify
from kvplan.plan.align import cycle, period
from kvplan.plan.block_pairs import block_pairs
from kvplan.plan.cells import cells
from kvplan.plan.match import AxisSlice, Sources, match
from kvplan.plan.runs import cell_geometry, find_chains, group_runs
from tests.counted import numbers_of
from tests.small import engine


def runs_of(ours, theirs):
    (found,) = group_runs(cells(match(ours, Sources([theirs]))))
    return found


def test_r3_tokens_of_different_blocks_are_not_joined() -> None:
    """plan.R3: every third position of a source's blocks of two is slot 0, 1, 0, 1, ... of blocks 0, 1, 3, 4, ..., so
    slots that follow each other say nothing; the blocks must be the same.
    """
    ours = engine("d", layers=1, order="NH", contexts=(3, 1))[0]
    (theirs,) = engine("p", layers=1, order="NH", tokens=2)
    assert runs_of(ours, theirs).runs.length.size == 0


def brute_force(offset, length):
    """How many runs are left when spans that continue each other on both sides are joined, pair by pair."""
    spans = {(int(a), int(b), int(n)) for a, b, n in zip(*offset, length, strict=True)}
    while True:
        pair = next(
            ((x, y) for x in spans for y in spans if (x[0] + x[2], x[1] + x[2]) == (y[0], y[1])),
            None,
        )
        if pair is None:
            return len(spans)
        (x, y) = pair
        spans = spans - {x, y} | {(x[0], x[1], x[2] + y[2])}


@pytest.mark.parametrize("seed", range(50))
def test_r2_joining_leaves_as_few_spans_as_can_be(seed):
    """plan.R2: one pass over sorted spans equals joining any two that fit until none do."""
    rng = np.random.default_rng(seed)
    size = 12
    length = rng.integers(1, 4, size)
    ours = np.cumsum(length + rng.integers(0, 2, size)) - length
    theirs = ours + np.repeat(rng.integers(0, 2, 4) * 100, 3)
    mixed = rng.permutation(size)
    offset = np.stack([ours, theirs])[:, mixed]
    _, first = find_chains([], offset, length[mixed])
    assert len(first) == brute_force(offset, length[mixed])


def test_r1_more_runs_than_can_be_listed_are_refused() -> None:
    """plan.R1: two axes of 2049, in one order here and in the other there, are four million runs of one byte."""

    def square(name: str, order: str) -> Worker:
        """One layer of 2049 by 2049 bytes a token; the last of ``order`` is the finer axis."""
        axes = [Axis(axis, 0, 2049, 2049, 1 if axis == order[-1] else 2049) for axis in "ab"]
        view = View("layers.0", "attn", "kv", "uint8", (*axes, Axis("token", 0, 1, 1, 2049**2)), 2, 2049**2)
        return Worker(name, 0, [Region("kv", 1 << 40, 2 * 2049**2)], [Group("attn", 1)], [view])

    assert plan_reads(square("d", "ab"), [square("p", "ab")]).cost().num_descriptors == 1
    with pytest.raises(
        KVPlanError,
        match=r"RANGE: cannot plan .*: expected work of at most 1.25 GiB, got .* with 8396802 slots of runs",
    ):
        plan_reads(square("d", "ab"), [square("p", "ba")])


def only_cell(ours, theirs):
    (found,) = cells(match(ours, Sources([theirs])))
    return found


def test_ranks_that_hold_other_heads_in_the_same_way_have_one_cell_geometry():
    """Heads [0, 2) to [0, 2) or [2, 4) to [2, 4): the same rows, in other regions."""
    pairs = zip(engine("d", tp=2), engine("p", tp=2), strict=True)
    (one, begin), (other, there) = (cell_geometry([only_cell(ours, theirs)]) for ours, theirs in pairs)
    assert one == other
    assert begin.tolist() == there.tolist()


def test_heads_of_one_rank_have_one_cell_geometry():
    """Heads [0, 2) and [2, 4) of one source: the same rows, shifted on its side."""
    pairs = [(ours, THEIRS) for ours in engine("d", tp=2)]
    (one, begin), (other, there) = (cell_geometry([only_cell(*pair)]) for pair in pairs)
    assert one == other
    assert (there - begin).tolist() == [0, 2 * 64]  # bytes to a head


def test_where_cells_lie_to_each_other_is_in_the_cell_geometry():
    """Two cells of a pair, in one order or the other, or one of them twice."""
    one, other = (only_cell(ours, THEIRS) for ours in engine("d", tp=2))
    assert len({cell_geometry(pair)[0] for pair in ([one, other], [other, one], [one, one])}) == 3


def changed(worker: Worker, **changes) -> Worker:
    """A worker whose group, or whose views, have other values."""
    if "group" not in changes:
        return attrs.evolve(worker, views=[attrs.evolve(view, **changes) for view in worker.views])
    views = [attrs.evolve(view, group=changes["group"]) for view in worker.views]
    return attrs.evolve(worker, groups=[attrs.evolve(worker.groups[0], name=changes["group"])], views=views)


OURS, THEIRS = engine("d", tp=2)[0], engine("p")[0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (engine("d", tp=2, tokens=2)[0], THEIRS),
        (OURS, engine("p", tokens=2)[0]),
        (engine("d", tp=2, order="NH")[0], THEIRS),
        (OURS, engine("p", order="NH")[0]),
        (engine("d", tp=2, blocks=9)[0], THEIRS),
        (OURS, engine("p", blocks=9)[0]),
        (engine("d", tp=2, layers=1)[0], THEIRS),
        (engine("d", tp=2, contexts=(2, 1))[0], engine("p", contexts=(2, 1))[0]),
        (changed(OURS, group="other"), THEIRS),
        (OURS, changed(THEIRS, group="other")),
        (changed(OURS, dtype="uint8"), changed(THEIRS, dtype="uint8")),
        (attrs.evolve(OURS, regions=OURS.regions[::-1]), THEIRS),
    ],
)
def test_whatever_changes_rows_changes_the_cell_geometry(ours, theirs):
    """Heads, tokens, order, pools, layers, positions, groups, dtype and offsets of either side."""
    assert cell_geometry([only_cell(ours, theirs)])[0] != cell_geometry([only_cell(OURS, THEIRS)])[0]


def padded(worker: Worker, **strides: int) -> Worker:
    """A worker of large blocks, with other strides in them."""
    views = [
        attrs.evolve(
            view,
            block_stride_bytes=1024,
            axes=[attrs.evolve(a, stride_bytes=strides.get(a.name, a.stride_bytes)) for a in view.axes],
        )
        for view in worker.views
    ]
    regions = [attrs.evolve(region, size_bytes=1 << 14) for region in worker.regions]
    return attrs.evolve(worker, regions=regions, views=views)


@pytest.mark.parametrize("strides", [{"head": 104}, {"token": 24}, {"kv": 12}])
def test_every_stride_of_either_side_is_in_the_cell_geometry(strides):
    """Blocks, the other axes and the other side stay as they are."""
    first = {"head": 100, "token": 20}
    same, others = ([padded(side, **every) for side in (OURS, THEIRS)] for every in (first, first | strides))
    pairs = [same, (others[0], same[1]), (same[0], others[1])]
    assert len({cell_geometry([only_cell(*pair)])[0] for pair in pairs}) == 3


def test_a_slice_of_an_axis_has_its_own_layout():
    """One head of two that both sides hold, or both of them."""
    cell = only_cell(OURS, THEIRS)
    one = AxisSlice(intervals=np.array([[0, 1]]), held=cell.slices["head"].held)
    assert cell_geometry([attrs.evolve(cell, slices={**cell.slices, "head": one})])[0] != cell_geometry([cell])[0]


def test_each_tensors_place_is_in_the_cell_geometry():
    """Of two ranks that have the same layers at other offsets of one region, neither has the other's rows."""

    def in_one_region(worker, order):
        size = worker.regions[0].size_bytes
        views = [
            attrs.evolve(view, region="kv", offset_bytes=size * at)
            for view, at in zip(worker.views, order, strict=True)
        ]
        return attrs.evolve(worker, regions=[Region("kv", worker.regions[0].address, 3 * size)], views=views)

    (ours,), (first, second) = engine("d", layers=3), engine("p", tp=2, layers=3)
    sources = [in_one_region(first, (0, 1, 2)), in_one_region(second, (1, 0, 2))]
    plan = plan_reads(ours, sources)
    assert verify(plan, local={"attn": Blocks([3, 5])}, remote={"attn": Blocks([8, 1])}, tokens=(0, 8)).ok


def test_ranks_whose_layers_begin_elsewhere_have_one_cell_geometry():
    """Places count from where the first one begins: three layers of one rank lie 64 bytes further in their region."""
    (ours,), (first, second) = engine("d", layers=3), engine("p", tp=2, layers=3)
    regions = [attrs.evolve(region, size_bytes=region.size_bytes + 64) for region in second.regions]
    views = [attrs.evolve(view, offset_bytes=64) for view in second.views]
    moved = attrs.evolve(second, regions=regions, views=views)
    made = [cell_geometry(cells(match(ours, Sources([first, other])))[1:])[0] for other in (second, moved)]
    assert made[0] == made[1]


def two_layers(name, *pages):
    """A worker with a layer of each page: tokens of some bytes, so many bytes apart, in blocks of two tokens."""
    views = [
        View(
            f"layers.{i}",
            "attn",
            "kv",
            "uint8",
            (Axis("token", 0, tokens, tokens, step), Axis("dim", 0, size, size, 1)),
            9,
            512,
            128 * i,
        )
        for i, (tokens, size, step) in enumerate(pages)
    ]
    return Worker(name, 0, [Region("kv", 1 << 40, 9 * 512)], [Group("attn", pages[0][0])], views)


@pytest.mark.parametrize(
    "pages",
    [
        ((2, 8, 8), (2, 8, 32)),  # the second token of a block lies elsewhere
        ((4, 16, 16), (4, 8, 16)),  # one is in one piece, the other has gaps
    ],
)
def test_layers_that_step_differently_or_join_differently_are_told_apart(pages):
    """plan.R2: within one group, and both layers of one block of the pool."""
    ours, theirs = two_layers("d", *pages), two_layers("p", *pages)
    size = pages[0][0]
    near, far = {"attn": Blocks([3, 5])}, {"attn": Blocks([8, 1])}
    for tokens in ((0, 2 * size), (1, 2 * size - 1)):
        assert verify(plan_reads(ours, [theirs]), local=near, remote=far, tokens=tokens).ok


@pytest.mark.parametrize(("order", "number"), [("NH", 2), ("HN", 8)])
def test_r1_runs_of_a_token_are_counted_before_they_are_listed(order, number):
    """plan.R1: two contiguous layers are two runs; four heads apart in both layers are eight."""
    (ours,), (theirs,) = engine("d", order="NH"), engine("p", order=order)
    assert numbers_of(lambda budget: plan_reads(ours, [theirs], budget=budget))["runs of one token"] == number


def test_r1_coordinates_with_a_gap_are_runs_of_their_own():
    """plan.R1: of four bytes that one source has, another has the middle two; the rest is a slice of two intervals."""
    dims = {"d": (0, 4), "p": (0, 4), "q": (1, 3)}
    workers = [
        Worker(
            name,
            0,
            [Region("kv", 4096, 40)],
            [Group("attn", 1)],
            [View("t", "attn", "kv", "uint8", (Axis("token", 0, 1, 1, 4), Axis("dim", *ends, 4, 1)), 10, 4)],
        )
        for name, ends in dims.items()
    ]
    plan = plan_reads(workers[0], workers[1:])
    tables = {"attn": Blocks([3])}
    assert verify(plan, local=tables, remote=tables, tokens=(0, 1)).ok


def test_r1_runs_of_all_tensors_count():
    """plan.R1: two layers that step differently, with one run of a token each, are two runs."""
    ours, theirs = (two_layers(name, (2, 8, 8), (2, 8, 32)) for name in "dp")
    assert numbers_of(lambda budget: plan_reads(ours, [theirs], budget=budget))["runs of one token"] == 2


@pytest.mark.parametrize(
    ("groups", "carried"),
    [
        ((Group("a", 48), Group("a", 32)), None),
        ((Group("a", 5), Group("a", 7, Context(1, 3, 2))), None),
        ((Group("a", 4, Context(0, 2, 3)), Group("a", 6, Context(1, 3, 2))), None),
        ((Group("a", 4, Context(1, 2, 4)), Group("a", 16)), [4, 5, 7]),
    ],
)
def test_a3_block_pairs_are_all_positions_in_order(groups, carried):
    """plan.A3, plan.R3: every carried position is in one range, whose block and slot are those of each side, one by
    one.
    """
    every = cycle(*groups)
    held = [p for p in range(every) if all(p in group.context for group in groups)]
    carried = held if carried is None else carried
    size = period(*groups)
    pairs = block_pairs(groups, np.array([(p, p + 1) for p in carried]), every, size)
    assert pairs is not None
    found = []
    for position, count, block, slot in zip(pairs.position, pairs.num_tokens, pairs.block.T, pairs.slot.T, strict=True):
        found += [(position + n, *block, *(slot + n)) for n in range(count)]
    counts = [[p for p in range(size) if p in group.context] for group in groups]
    expected = []
    for p in (p for p in range(size) if p % every in carried):
        at = [divmod(mine.index(p), group.tokens_per_block) for mine, group in zip(counts, groups, strict=True)]
        expected.append((p, at[0][0], at[1][0], at[0][1], at[1][1]))
    assert [tuple(map(int, one)) for one in found] == expected
    assert (pairs.num_tokens > 0).all()


@pytest.mark.parametrize(
    ("groups", "carried", "every", "least"),
    [
        ((Group("a", 48), Group("a", 32)), [[0, 1]], 1, 3),  # blocks of 32 in a period
        ((Group("a", 4), Group("a", 4)), [[0, 1], [2, 3]], 4, 2),  # intervals
        ((Group("a", 1 << 30), Group("a", (1 << 30) - (1 << 11))), [[0, 1]], 1, None),  # too many positions
    ],
)
def test_r3_block_pairs_are_listed_up_to_a_limit(groups, carried, every, least):
    """plan.R3: of a period with more blocks or intervals none is listed, nor of positions that no request has."""
    for limit in (1, 2, 3, 1 << 22):
        pairs = block_pairs(groups, np.array(carried), every, period(*groups), limit)
        assert (pairs is not None) == (least is not None and limit >= least)


def test_r3_as_many_block_pairs_as_can_be_listed(monkeypatch):
    """plan.R3: blocks of 6 and 4 meet in periods of two and three blocks; if three may not be listed, none join."""
    (ours,), (theirs,) = engine("d", tokens=6, order="NH", layers=1), engine("p", tokens=4, order="NH", layers=1)
    for most, runs in ((4, 4), (3, 0), (2, 0)):
        monkeypatch.setattr("kvplan.plan.runs.MAX_JOINED", most)
        assert runs_of(ours, theirs).position.size == runs
    assert verify(
        plan_reads(ours, [theirs]), local={"attn": Blocks([1, 2])}, remote={"attn": Blocks([4, 3, 2])}, tokens=(0, 12)
    ).ok


def test_r2_all_runs_of_a_period_count(monkeypatch):
    """plan.R2: eight heads with two runs each are sixteen runs."""
    (ours,), (theirs,) = engine("d", heads=8, tokens=8, layers=1), engine("p", heads=8, layers=1)
    for most, runs in ((16, 16), (15, 0)):
        monkeypatch.setattr("kvplan.plan.runs.MAX_JOINED", most)
        assert runs_of(ours, theirs).position.size == runs


def test_r3_runs_of_two_lengths_share_the_limit(monkeypatch):
    """plan.R3: layers of 16 and of 8 bytes a token meet twice in a period: each may list half of all ranges."""
    ours, theirs = (two_layers(name, (size, 16, 16), (size, 8, 8)) for name, size in (("d", 8), ("p", 4)))
    for most, runs in ((4, 4), (3, 0)):
        monkeypatch.setattr("kvplan.plan.runs.MAX_JOINED", most)
        assert runs_of(ours, theirs).position.size == runs


@pytest.mark.parametrize("dense", ["", "d", "p"])
def test_r3_tokens_that_only_meet_between_segments_join(dense):
    """plan.R3: two slots 6 bytes apart, 4 bytes behind them two more: tokens of 4 bytes join there alone."""
    sides = []
    for name in "dp":
        axes = [Axis("token", 0, 2, 2, 10), Axis("token", 0, 2, 2, 6)]
        axes = [Axis("token", 0, 4, 4, 4)] if name == dense else axes
        view = View("layers.0", "attn", "kv", "uint8", [*axes, Axis("dim", 0, 4, 4, 1)], 3, 40)
        sides.append(Worker(name, 0, [Region("kv", 1 << 40, 120)], [Group("attn", 4)], [view]))
    found = runs_of(*sides)
    assert sorted(found.runs.length.tolist()) == [4, 4, 8]
    assert found.spans.tolist() == [[0, 1], [1, 3], [3, 4]]


def test_r3_runs_of_one_block_pair_join_wherever_they_begin():
    """plan.R3: two tokens of one layer, the same two of the other, then the next two of each: one run of the whole
    block.
    """
    axes = (Axis("token", 0, 2, 2, 16), Axis("token", 0, 2, 2, 4), Axis("dim", 0, 4, 4, 1))
    views = [View(f"layers.{i}", "attn", "kv", "uint8", axes, 3, 32, 8 * i) for i in range(2)]
    sides = [Worker(name, 0, [Region("kv", 1 << 40, 96)], [Group("attn", 4)], views) for name in "dp"]
    found = runs_of(*sides)
    assert (found.runs.length.tolist(), found.position.tolist(), found.spans.tolist()) == ([32], [0], [[0, 4]])


def test_r3_runs_end_where_a_segment_ends():
    """plan.R3: slots in two pairs, from blocks of three: a run ends where a pair does, wherever it begins."""
    sides = []
    for name, tokens, axes in (
        ("d", 4, [Axis("token", 0, 2, 2, 32), Axis("token", 0, 2, 2, 4)]),
        ("p", 3, [Axis("token", 0, 3, 3, 4)]),
    ):
        view = View("layers.0", "attn", "kv", "uint8", [*axes, Axis("dim", 0, 4, 4, 1)], 4, 40)
        sides.append(Worker(name, 0, [Region("kv", 1 << 40, 160)], [Group("attn", tokens)], [view]))
    found = runs_of(*sides)
    order = np.argsort(found.position, kind="stable")
    assert found.position[order].tolist() == [0, 2, 3, 4, 6, 8, 9, 10]
    assert found.runs.length[order].tolist() == [8, 4, 4, 8, 8, 4, 4, 8]
