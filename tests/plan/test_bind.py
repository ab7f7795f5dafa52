"""Bind (B)."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import (
    Axis,
    Blocks,
    Group,
    KVPlanError,
    Region,
    View,
    Worker,
    Workspace,
    plan_mesh,
    plan_reads,
    plan_writes,
    verify,
)
from tests.small import HEAD_BYTES, engine


def test_b2_no_range_means_all_that_the_destination_lists():
    """plan.B2: without tokens, the destination's blocks say what moves."""
    (mine,), (other,) = engine("d", order="NH"), engine("p", order="NH")
    report = verify(
        plan_reads(mine, [other]), local={"attn": Blocks([9, 5], first=1)}, remote={"attn": Blocks(range(3))}
    )
    assert report.ok, str(report)
    assert report.num_bytes == 8 * 2 * 4 * HEAD_BYTES


def test_specs_are_int32_equal_long_and_read_only():
    """A spec's ids are what NIXL takes, and cannot be changed."""
    (mine,), (other,) = engine("d"), engine("p")
    (spec,) = plan_reads(mine, [other]).bind(local={"attn": Blocks([1])}, remote={"attn": Blocks([2])})
    assert spec.local_ids.dtype == spec.remote_ids.dtype == np.int32
    assert spec.local_ids.shape == spec.remote_ids.shape
    with pytest.raises(ValueError, match="read-only"):
        spec.local_ids[0] = 0


def test_blocks_stay_read_only_through_pickling():
    """Blocks owns its ids: neither the caller's array nor a pickle makes them writeable."""
    given = np.array([3, 1, 2])
    blocks = pickle.loads(pickle.dumps(Blocks(given, first=4)))
    given[0] = 9
    assert repr(blocks) == "Blocks([3, 1, 2], first=4)"
    assert not blocks.ids.flags.writeable


@pytest.mark.parametrize(
    ("local", "remote", "tokens"),
    [
        ({"attn": Blocks([1, 10])}, {"attn": Blocks([1, 2])}, (0, 8)),
        ({"attn": Blocks([1, 2])}, {"attn": Blocks([1])}, (5, 7)),
        ({"attn": Blocks([1, 2])}, {"attn": Blocks([2], first=1)}, (1, 3)),
        ({"attn": Blocks([1])}, {}, (0, 4)),
    ],
)
def test_b4_a_bad_request_is_refused_before_any_id(local, remote, tokens):
    """plan.B4: an id beyond the local pool, tables that end before or begin behind the token that moves, and none at
    all.
    """
    (mine,), (other,) = engine("d"), engine("p")
    with pytest.raises(KVPlanError, match=r"^BLOCKS: "):
        plan_reads(mine, [other]).bind(local=local, remote=remote, tokens=tokens)


def test_b4_ids_that_do_not_fit_are_refused():
    """INT: the largest id is checked before any is narrowed."""
    (mine,), (other,) = engine("d", blocks=1 << 28, layers=1), engine("p", blocks=1 << 28, layers=1)
    plan = plan_reads(mine, [other])
    fits = plan.bind(local={"attn": Blocks([5])}, remote={"attn": Blocks([5])}, tokens=(0, 4))
    assert fits[0].num_bytes == 16 * HEAD_BYTES
    high = Blocks([(1 << 28) - 1])
    with pytest.raises(KVPlanError, match=r"^INT: .* expected ids below 2147483648, got \d+"):
        plan.bind(local={"attn": high}, remote={"attn": high}, tokens=(0, 3))


def states(name: str, *pools: int) -> Worker:
    """A worker with a state of one byte in each block of some pools."""
    regions = [Region(f"{i}", i + 1 << 40, blocks) for i, blocks in enumerate(pools)]
    axes = (Axis("dim", 0, 1, 1, 1),)
    views = [View(f"{i}", f"{i}", f"{i}", "uint8", axes, blocks, 1) for i, blocks in enumerate(pools)]
    return Worker(name, 0, regions, [Group(f"{i}") for i in range(len(pools))], views)


def in_one_group(worker: Worker) -> Worker:
    """The worker with all its states in the first group."""
    views = [attrs.evolve(view, group=worker.groups[0].name) for view in worker.views]
    return attrs.evolve(worker, groups=worker.groups[:1], views=views)


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize("remotes", [1, 2])
def test_b4_block_ids_are_below_the_size_of_the_smallest_pool(side, remotes):
    """plan.B4: of pools of 10 and of 8 blocks in one group, with both tensors on one remote worker or on two."""
    pools = {"local": (20, 20), "remote": (20, 20), side: (10, 8)}
    ours, theirs = (in_one_group(states(name, *pools[name])) for name in pools)
    plan = plan_reads(ours, [attrs.evolve(theirs, rank=i, views=theirs.views[i::remotes]) for i in range(remotes)])
    tables: dict[str, Any] = {name: {"0": Blocks([7])} for name in pools}
    assert plan.bind(**tables)
    with pytest.raises(KVPlanError, match=rf"^BLOCKS: cannot bind {side} .* expected block ids below 8, .* got 8"):
        plan.bind(**{**tables, side: {"0": Blocks([8])}})


def test_b4_a_writers_block_ids_are_below_the_size_of_its_own_pool():
    """plan.B4: the local worker of a write is the source."""
    plan = plan_writes(states("p", 8), [states("d", 10)])
    tables: dict[str, Any] = {"local": {"0": Blocks([7])}, "remote": {"0": Blocks([9])}}
    assert plan.bind(**tables)
    with pytest.raises(KVPlanError, match=r"^BLOCKS: cannot bind local .* expected block ids below 8, .* got 8"):
        plan.bind(**{**tables, "local": {"0": Blocks([8])}})


def test_b3_layers_inside_a_block_step_by_their_number():
    """plan.B3: of a source whose blocks hold all layers, one row has them all, and ids grow by as many a block."""
    axes = (Axis("dim", 0, 1, 1, 1),)
    views = [View(f"{i}", "0", "r", "uint8", axes, 10, 3, i) for i in range(3)]
    together = Worker("together", 0, [Region("r", 1 << 40, 30)], [Group("0")], views)
    plan = plan_reads(in_one_group(states("apart", 10, 10, 10)), [together])
    (spec,) = plan.bind(local={"0": Blocks([7, 1])}, remote={"0": Blocks([2, 4])})
    assert spec.local_ids.tolist() == [7, 1, 17, 11, 27, 21]
    assert spec.remote_ids.tolist() == [6, 12, 7, 13, 8, 14]


END = 1 << 31


@pytest.mark.parametrize(("blocks", "dtype"), [(END, np.int32), (END + 1, np.int64)])
def test_b3_ids_are_wide_only_where_a_table_has_more_than_2_to_31(blocks, dtype):
    """plan.B3: the last id of a table of 2**31 still fits."""
    (pair,) = plan_reads(states("d", blocks), [states("p", 10)]).pairs
    assert pair.group_pairs[0].tokens[0].base.dtype == dtype


@pytest.mark.parametrize(("block", "last"), [(9, END - 1), (10, END), (11, END + 1)])
@pytest.mark.parametrize("wide", ["local", "remote"])
def test_b4_the_last_id_that_fits_is_below_2_to_31(wide, block, last):
    """INT: of a table with more ids than fit, each that does can be asked for, on either side."""
    large, small = states("large", END - 10, 100), states("small", 50, 50)
    plan = plan_reads(large, [small]) if wide == "local" else plan_reads(small, [large])
    tables = {"large": {"0": Blocks([0]), "1": Blocks([block])}, "small": {"0": Blocks([49]), "1": Blocks([49])}}
    near, far = ("large", "small") if wide == "local" else ("small", "large")
    if last < END:
        (spec,) = plan.bind(local=tables[near], remote=tables[far])
        ids = {"local": spec.local_ids, "remote": spec.remote_ids}
        assert ids.pop(wide).tolist() == [0, last]
        assert [side.tolist() for side in ids.values()] == [[49, 99]]
    else:
        with pytest.raises(KVPlanError, match=rf"^INT: .* expected ids below {END}, got {last}\b") as caught:
            plan.bind(local=tables[near], remote=tables[far])
        assert caught.value.details["id"] == last


def test_a_workspace_is_used_again_and_no_larger_than_it_must_be():
    """From the second request of a size on, ids are where they were before, and both sides fill the memory."""
    (ours,), (theirs,) = engine("d"), engine("p")
    plan, workspace = plan_reads(ours, [theirs]), Workspace()
    seen = []
    for block in (1, 2, 3):
        (spec,) = plan.bind(local={"attn": Blocks([block])}, remote={"attn": Blocks([block])}, workspace=workspace)
        assert spec.local_ids.tolist() == spec.remote_ids.tolist() == [block, 10 + block]
        assert spec.local_ids.dtype == spec.remote_ids.dtype == np.int32
        seen.append([side.ctypes.data for side in (spec.local_ids, spec.remote_ids)])
    assert seen[1] == seen[2]
    (memory,) = {id(side.base): side.base for side in (spec.local_ids, spec.remote_ids)}.values()
    assert memory is not None
    assert memory.size == spec.local_ids.size + spec.remote_ids.size


@pytest.mark.parametrize("blocks", [255, 256, 3000])
def test_the_buffers_of_numpy_are_as_before(blocks):
    """However long a request is, and also if its ids are refused, numpy's buffers have their size again."""
    before = np.getbufsize()
    (ours,), (theirs,) = (engine(name, blocks=1 << 28, layers=1) for name in "dp")
    plan, low = plan_reads(ours, [theirs]), Blocks(np.arange(blocks))
    (spec,) = plan.bind(local={"attn": low}, remote={"attn": low})
    assert spec.local_ids.tolist() == spec.remote_ids.tolist() == list(range(blocks))
    assert np.getbufsize() == before
    high = Blocks(np.arange((1 << 28) - blocks, 1 << 28))
    with pytest.raises(KVPlanError, match=r"^INT"):
        plan.bind(local={"attn": high}, remote={"attn": high}, tokens=(0, 4 * blocks - 1))
    assert np.getbufsize() == before


def test_b5_pairs_that_differ_by_an_offset_share_their_ids():
    """Two ranks' halves of the heads are the same rows elsewhere."""
    (ours,), theirs = engine("d"), engine("p", tp=2)
    plan = plan_reads(ours, theirs)
    request: dict[str, Any] = {"local": {"attn": Blocks([3, 1, 7])}, "remote": {"attn": Blocks([2, 5, 4])}}
    one, other = plan.bind(**request, tokens=(2, 11))
    assert one.local_ids.size
    assert one.local_ids is other.local_ids
    assert one.remote_ids is other.remote_ids
    assert (one.local_table.rows != other.local_table.rows).any()
    assert verify(plan, **request, tokens=(2, 11)).ok


def test_what_moves_nothing_is_the_same_for_every_request():
    """Of four ranks one serves; the specs of the others are in order too, and made once."""
    (ours, *_), theirs = engine("d", tp=4), engine("p", tp=4)
    plan = plan_reads(ours, theirs)
    first, again = (
        plan.bind(local={"attn": Blocks([block])}, remote={"attn": Blocks([block])}, tokens=(0, 4)) for block in (1, 2)
    )
    assert [spec.remote for spec in first] == [worker.key for worker in theirs]
    assert [spec.local_ids.size > 0 for spec in first] == [True, False, False, False]
    assert first[1:] == again[1:] == tuple(plan.idle.values())[1:]
    assert [spec.remote_ids.tolist() for spec in plan.idle.values()] == [[], [], [], []]
    assert first[0].local_ids.tolist() != again[0].local_ids.tolist()


def ids_of(ours, theirs, tokens):
    """How many ids each spec of a request has."""
    local, remote = (
        {"attn": Blocks(np.arange(-(-40 // worker.groups[0].tokens_per_block)))} for worker in (ours, theirs[0])
    )
    return [spec.local_ids.size for spec in plan_reads(ours, theirs).bind(local=local, remote=remote, tokens=tokens)]


@pytest.mark.parametrize(
    ("ours", "theirs", "tokens", "moved"),
    [
        (4, 4, (0, 8), 2 * 2),
        (4, 4, (4, 12), 2 * 2),
        (4, 4, (4, 13), 2 * 2 + 8),
        (4, 4, (3, 8), 2 + 8),
        (4, 4, (5, 7), 2 * 8),
        (6, 4, (0, 12), 4 * 8),
        (6, 4, (4, 16), 4 * 8),
        (6, 4, (0, 17), 6 * 8),
        (6, 4, (5, 18), 5 * 8),
    ],
)
def test_b2_no_run_is_cut_that_the_range_holds_whole(ours, theirs, tokens, moved):
    """plan.B2: ids are as few as runs and the tokens left at both ends: 2 pages to a block, or 8 heads to a range of
    one.
    """
    (mine,), others = engine("d", tokens=ours, blocks=40), engine("p", tokens=theirs, blocks=40)
    assert ids_of(mine, others, tokens) == [moved]


def test_b2_what_holds_no_run_whole_is_one_part():
    """plan.B2: of the last two tokens of a block and the first two of the next one, the four tokens of eight heads."""
    (mine,), (other,) = engine("d"), engine("p")
    tables = {"attn": Blocks([3, 5])}
    (spec,) = plan_reads(mine, [other]).bind(local=tables, remote=tables, tokens=(2, 6))
    assert spec.shapes == ((8, 4),)


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: ({"blocks": 24, **ours}, {"blocks": 24, **theirs})
    for name, ours, theirs in (
        ("heads", {"tp": 2}, {"tp": 4}),
        ("heads, apart", {"tp": 3, "order": "NH"}, {"tp": 2}),
        ("blocks", {"tokens": 6}, {"tokens": 4}),
        ("single tokens", {"tokens": 1, "order": "NH"}, {"tokens": 3, "order": "NH"}),
        ("orders", {"order": "NH", "tokens": 3}, {"order": "HN", "tp": 2}),
        ("three contexts", {}, {"contexts": (3, 1)}),
        ("contexts", {"contexts": (2, 1)}, {"contexts": (3, 2), "tokens": 2}),
        ("one context", {"tokens": 2}, {"contexts": (2, 1), "tokens": 1}),
        ("contexts and heads", {"contexts": (2, 2), "tp": 2}, {"tp": 4, "order": "NH"}),
        ("pools", {"blocks": 25}, {"blocks": 40, "order": "NH"}),
        ("a layer less", {"layers": 1}, {}),
    )
}


@pytest.mark.parametrize("tokens", [(0, 24), (3, 20), (12, 13), (7, 7), (14, 24)])
@pytest.mark.parametrize("name", SHAPES)
def test_every_byte_of_a_request_is_right(name, tokens):
    """plan.B1, plan.B2: engines that differ in one thing or two: what is bound is verified, from reads and from writes.

    Of requests from position 12 on, tables list no first block, as after a hit of a prefix cache.
    """
    ours, theirs = (engine(role, **how) for role, how in zip("dp", SHAPES[name], strict=True))
    rng, first = np.random.default_rng(3), int(tokens[0] >= 12)
    ids = (rng.permutation(24)[: -(-24 // how.get("tokens", 4))] for how in SHAPES[name])
    local, remote = ({"attn": Blocks(side[first:], first)} for side in ids)
    report = verify(plan_mesh(ours, theirs), local=local, remote=remote, tokens=tokens)
    assert report.ok, str(report)
    report = verify(plan_mesh(ours, theirs, "WRITE"), local=remote, remote=local, tokens=tokens)
    assert report.ok, str(report)


@pytest.mark.parametrize(("groups", "known"), [([Group("b", 4), Group("a", 4)], "'a', 'b'"), ([], "none")])
def test_names_that_no_worker_has_are_told_from_those_that_it_has(groups, known):
    """The error lists the groups in order, and says which name it is about."""
    plan = plan_reads(Worker("d", 0, [], groups, []), [])
    with pytest.raises(KVPlanError, match=f"^NAME: .* expected a group of {known}, got 'c'$") as caught:
        plan.bind(local={"c": Blocks([1])}, remote={})
    assert caught.value.details["group"] == "c"


@pytest.mark.parametrize("sizes", [(8, 4), (6, 4), (4, 8), (3, 5)])
@pytest.mark.parametrize("tokens", [(0, 24), (1, 23), (5, 21), (9, 10), (10, 13), (17, 24)])
def test_b2_exactly_the_positions_of_a_range_move_around_gaps(sizes, tokens):
    """plan.B2: with every second block null, the range's positions in the others move, whole runs or single tokens."""
    (mine,), (other,) = (
        engine(name, tokens=size, order="NH", blocks=40) for name, size in zip("dp", sizes, strict=True)
    )
    ours = Blocks([0 if i % 2 else 30 - i for i in range(-(-24 // sizes[0]))], null=0)
    theirs = Blocks([i * 7 % 40 for i in range(-(-24 // sizes[1]))])
    report = verify(plan_reads(mine, [other]), local={"attn": ours}, remote={"attn": theirs}, tokens=tokens)
    assert report.ok, str(report)
    moved = sum(p // sizes[0] in ours.ordinals for p in range(*tokens))
    assert report.num_bytes == moved * 2 * 4 * HEAD_BYTES


def test_as_many_ids_as_may_be_are_bound(monkeypatch):
    """RANGE: a request of two blocks of two runs, and not one id less allowed."""
    (mine,), (other,) = engine("d"), engine("p")
    plan, blocks = plan_reads(mine, [other]), {"attn": Blocks([3, 5])}
    monkeypatch.setattr("kvplan.plan.bind.MAX_IDS", 4)
    assert plan.bind(local=blocks, remote=blocks)[0].local_ids.size == 4
    monkeypatch.setattr("kvplan.plan.bind.MAX_IDS", 3)
    with pytest.raises(KVPlanError, match=r"^RANGE: .* expected at most 3 ids with one worker, got 4"):
        plan.bind(local=blocks, remote=blocks)


def test_b4_a_table_with_gaps_lists_the_whole_range():
    """plan.B4: null blocks count as listed, but what is before or behind a table is not a gap."""
    (mine,), (other,) = engine("d"), engine("p")
    plan = plan_reads(mine, [other])
    ours, theirs = Blocks([5, 0, 6], first=2, null=0), Blocks(range(1, 7))
    tables: dict[str, Any] = {"local": {"attn": ours}, "remote": {"attn": theirs}}
    moved = [verify(plan, **tables, tokens=tokens).num_bytes for tokens in ((8, 20), (7, 7))]
    assert moved == [8 * 2 * 4 * HEAD_BYTES, 0]
    for tokens in ((7, 20), (8, 21)):
        with pytest.raises(KVPlanError, match=r"^BLOCKS: "):
            plan.bind(**tables, tokens=tokens)


def pool_of_two_groups(name, strides=(64, 64), offsets=(0, 0)):
    """A worker whose groups "full" and "window" have their blocks in one region."""
    axes = (Axis("token", 0, 4, 4, 16), Axis("dim", 0, 16, 16, 1))
    views = [
        View(f"layers.{i}", group, "pool", "uint8", axes, 10, strides[i], offsets[i])
        for i, group in enumerate(("full", "window"))
    ]
    return Worker(name, 0, [Region("pool", 4096, 10 * 128 + 64)], [Group("full", 4), Group("window", 4)], views)


@pytest.mark.parametrize("side", ["local", "remote"])
def test_b4_a_block_of_two_groups_that_share_bytes(side):
    """plan.B4: in a pool that groups share, a block id belongs to one group at a time; null entries are no blocks."""
    plan = plan_reads(pool_of_two_groups("d"), [pool_of_two_groups("p")])
    right = {"full": Blocks([1, 2]), "window": Blocks([0, 3], null=0)}
    request: dict[str, Any] = {"local": right, "remote": right, "tokens": (4, 8)}
    assert len(plan.bind(**request)[0].local_ids) == 2
    for wrong in (
        {"full": Blocks([1, 3]), "window": Blocks([0, 3], null=0)},
        {"full": Blocks([0, 2]), "window": Blocks([0, 3])},
    ):
        with pytest.raises(
            KVPlanError, match=f"BLOCKS: cannot bind {side} group 'full': expected no block of group"
        ) as caught:
            plan.bind(**{**request, side: wrong})
        assert caught.value.details["id"] in (0, 3)


def test_b4_groups_that_lie_side_by_side_may_have_one_block():
    """plan.B4: groups whose blocks are in one region, but share no byte, number their blocks alike."""
    workers = [pool_of_two_groups(name, (128, 128), (0, 64)) for name in "dp"]
    tables = {"full": Blocks([1]), "window": Blocks([1])}
    assert plan_reads(workers[0], workers[1:]).bind(local=tables, remote=tables)[0].num_bytes == 128


def test_threads_may_share_plan_and_tables_and_have_a_workspace_each():
    """A plan that is bound first, and at once, by eight threads gives each the ids of its own requests."""
    plan = plan_reads(engine("d", tokens=6, blocks=400)[0], engine("p", tp=2, tokens=4, blocks=400))
    shared = Blocks(range(200))
    alone = pickle.loads(pickle.dumps(plan))

    def request(number):
        start = number % 37
        return {"local": {"attn": shared}, "remote": {"attn": Blocks(range(300))}, "tokens": (start, start + 900)}

    def ids(specs):
        return [
            (spec.local_ids.tobytes(), spec.remote_ids.tobytes(), spec.descriptors()[0].tobytes()) for spec in specs
        ]

    def work(thread):
        workspace = Workspace()
        return [ids(plan.bind(**request(thread * 25 + i), workspace=workspace)) for i in range(25)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    assert found == [[ids(alone.bind(**request(thread * 25 + i))) for i in range(25)] for thread in range(8)]


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        ({"tokens": 4}, {"tokens": 4}),
        ({"tokens": 4}, {"tokens": 8}),
        ({"tokens": 8}, {"tokens": 4}),
        ({"tokens": 4, "contexts": (2, 3)}, {"tokens": 6}),
        ({"tokens": 6}, {"tokens": 4, "contexts": (3, 2)}),
        ({"tokens": 4, "contexts": (2, 1)}, {"tokens": 4, "contexts": (3, 1)}),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 7, 24, 25])
def test_b4_without_a_range_a_source_lists_the_same_request(local, remote, num_tokens) -> None:
    """plan.B4: tables of one request pass whatever the blocks are; one with more blocks counts in another unit."""
    sides = engine("d", **local), engine("p", **remote)
    ends = []
    for workers, shape in zip(sides, (local, remote), strict=True):
        (group,) = workers[0].groups
        ends.append(-(-num_tokens // (shape["tokens"] * group.context.size)))
    tables: dict[str, Any] = {"local": {"attn": Blocks(range(ends[0]))}, "remote": {"attn": Blocks(range(9))}}
    # what the source has of the positions in the destination's blocks
    positions = ends[0] * local["tokens"] * sides[0][0].groups[0].context.size
    needed = -(-positions // (remote["tokens"] * sides[1][0].groups[0].context.size))
    for worker in sides[0]:
        plan = plan_reads(worker, sides[1])
        assert plan.bind(**{**tables, "remote": {"attn": Blocks(range(needed))}})
        with pytest.raises(
            KVPlanError, match=rf"^BLOCKS: cannot bind remote .* blocks \[0, {needed}\) .* got \[0, 9\)"
        ):
            plan.bind(**tables)
        # a range says what moves, so blocks that an engine has allocated ahead change nothing
        listed = {
            side: {"attn": Blocks(table["attn"].ids[:end])}
            for (side, table), end in zip(tables.items(), (ends[0], needed), strict=True)
        }
        for longer, exact in zip(
            *(plan.bind(**each, tokens=(0, num_tokens)) for each in (tables, listed)), strict=True
        ):
            assert longer.remote_ids.tolist() == exact.remote_ids.tolist()


def test_b4_states_without_a_range_are_as_many_at_the_source() -> None:
    """plan.B4: where a destination has one of a source's states, its ordinal or a range says which."""
    plan = plan_reads(states("d", 10), [states("p", 10)])
    saved = {"0": Blocks([7, 8, 9])}
    with pytest.raises(KVPlanError, match=r"^BLOCKS: cannot bind remote group '0': expected blocks \[0, 1\)"):
        plan.bind(local={"0": Blocks([3])}, remote=saved)
    (first,) = plan.bind(local={"0": Blocks([3])}, remote=saved, tokens={"0": (0, 1)})
    (last,) = plan.bind(local={"0": Blocks([3], ordinals=[2])}, remote=saved)
    assert [spec.remote_ids.tolist() for spec in (first, last)] == [[7], [9]]


def test_b4_positions_are_counted_below_2_to_48() -> None:
    """plan.B4: blocks with positions beyond that are refused, and numbers that would wrap are never made."""
    (mine,), (other,) = engine("d", tokens=65_536, layers=1), engine("p", tokens=65_536, layers=1)
    last = {"attn": Blocks([1], first=(1 << 48) - 1)}
    with pytest.raises(KVPlanError, match=r"^BLOCKS: cannot bind local .* blocks of positions below 281474976710656"):
        plan_reads(mine, [other]).bind(local=last, remote=last)
    fits = {"attn": Blocks([1], first=(1 << 32) - 1)}
    assert plan_reads(mine, [other]).bind(local=fits, remote=fits)
