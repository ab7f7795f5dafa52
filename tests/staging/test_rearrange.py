"""Rearrangement: strided copies from mirrors into a destination's blocks (S11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Axis, Blocks, Context, FakeMemory, Group, Model, Region, View, Worker
from kvplan._arrays import Ints
from kvplan.describe.views import Geometry
from kvplan.staging.plan import StagedPlan
from kvplan.staging.rearrange import Copy, Paging, Side, run
from kvplan.verification.memory import Cells
from tests.small import engine, padded, worker
from tests.staged import NAME, carry_out, cells, labelled, staged

LOCAL, STAGING = Region("kv", (1 << 63) - 8, 4096, device_id=3), Region("staging", 1 << 40, 4096, device_id=3)


def copy_of(offset: int = 64, length: int = 8, **changes: Any) -> Copy:
    """Blocks 2 and 0, each 3 boxes of 2 slots, from slots 1 and 3 of blocks 1 and 5."""
    ours = Side(((LOCAL, offset),), (4, 2), (256, 64), (np.array([2, 0]), np.array([1, 0])), (16, 128))
    theirs = Side(((STAGING, 8),), (8, 4), (512, 128), (np.array([1, 5]), np.array([1, 3])), (32, 8))
    return Copy(attrs.evolve(ours, **changes), theirs, (2, 1), length)


def filled(dtype: type = np.uint8) -> dict[str, Cells]:
    made: Cells = np.random.default_rng(7).integers(0, 200, (2, 4096)).astype(dtype)
    return {"kv": made[0].copy(), "staging": made[1].copy()}


def by_ranges(copy: Copy, arrays: dict[str, Cells]) -> Cells:
    """What a destination should hold after a copy, range by range."""
    made = arrays["kv"].copy()
    for write, read in zip(*(side.tolist() for side in copy.ranges()), strict=True):
        assert write[1:] == read[1:]
        ours, theirs = write[0] - LOCAL.address, read[0] - STAGING.address
        made[ours : ours + write[1]] = arrays["staging"][theirs : theirs + read[1]]
    return made


def test_ranges_are_where_indices_and_strides_say() -> None:
    """Address, length and device of every run, those of one entry of the index after those of the one before."""
    written, read = copy_of().ranges()
    at = LOCAL.address + 64
    assert written.tolist() == [[at + more, 8, 3] for more in (576, 592, 0, 16)]
    assert read.tolist() == [[STAGING.address + 8 + more, 8, 3] for more in (640, 672, 2944, 2976)]
    assert copy_of().num_bytes == 32


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("offset, length", [(64, 8), (68, 8), (66, 6), (65, 8), (64, 5)])
def test_a_copy_does_what_its_ranges_say(dtype: type, offset: int, length: int) -> None:
    """In words of any size, for elements of any width that stand for bytes."""
    copy, arrays = copy_of(offset, length), filled(dtype)
    expected, staging = by_ranges(copy, arrays), arrays["staging"].copy()
    run([copy], arrays)
    assert np.array_equal(arrays["kv"], expected)
    assert np.array_equal(arrays["staging"], staging)


def test_origins_are_taken_one_after_the_other() -> None:
    """A copy of two origins is that of the first one, and then that of the other, each in words of its own."""
    one, other = copy_of(64, 8), copy_of(1100, 8)
    both = attrs.evolve(
        one,
        destination=attrs.evolve(one.destination, origins=((LOCAL, 64), (LOCAL, 1100))),
        source=attrs.evolve(one.source, origins=((STAGING, 8), (STAGING, 8))),
    )
    assert (both.num_origins, both.num_bytes) == (2, 64)
    for whole, *parts in zip(both.ranges(), one.ranges(), other.ranges(), strict=True):
        assert np.array_equal(whole, np.concatenate(parts))
    arrays = filled()
    expected = by_ranges(both, arrays)
    run([both], arrays)
    assert np.array_equal(arrays["kv"], expected)
    assert repr(both) == "<Copy kv <- staging: 2 times 2 boxes of 2 x 1 x 8 bytes>"


def test_what_is_aligned_is_copied_in_wide_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest word that divides every offset, stride and length of both sides."""
    words = []
    made = np.ndarray

    def spy(*given: Any) -> Any:
        words.append(given[1].itemsize)
        return made(*given)

    monkeypatch.setattr("kvplan.staging.rearrange.np.ndarray", spy)
    for offset, there in ((64, 8), (68, 8), (66, 8), (65, 8), (64, 12), (64, 14), (64, 15)):
        copy = copy_of(offset, 8)
        run([attrs.evolve(copy, source=attrs.evolve(copy.source, origins=((STAGING, there),)))], filled())
    assert words == [8, 8, 4, 4, 2, 2, 1, 1, 4, 4, 2, 2, 1, 1]


def test_copies_are_in_words_of_torch() -> None:
    """A copy is an assignment between strided tensors, as its docstring says."""
    torch = pytest.importorskip("torch")
    copy, arrays = copy_of(), filled()
    expected = by_ranges(copy, arrays)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    ours, theirs = (
        tensors[region.name][offset:].as_strided(
            (*side.shape, *copy.extents, copy.length_bytes), (*side.strides_bytes, *side.inner_bytes, 1)
        )
        for side in (copy.destination, copy.source)
        for region, offset in side.origins
    )
    ours[tuple(map(torch.from_numpy, copy.destination.index))] = theirs[tuple(map(torch.from_numpy, copy.source.index))]
    assert np.array_equal(tensors["kv"].numpy(), expected)


def test_a_copy_that_leaves_its_region_is_refused() -> None:
    """No array is written past its end, whatever a copy says."""
    with pytest.raises((TypeError, ValueError)):
        run([copy_of(offset=4096)], filled())


def test_a_copy_prints_as_one_line() -> None:
    """Regions, how many boxes and of what."""
    assert repr(copy_of()) == "<Copy kv <- staging: 2 boxes of 2 x 1 x 8 bytes>"


def test_dense_digits_of_the_token_axis_are_one() -> None:
    """Kernel blocks that follow each other are no digits; others are, outer first."""
    dense = [Axis("token", 0, 3, 3, 64), Axis("token", 0, 4, 4, 16), Axis("dim", 0, 16, 16, 1)]
    apart = [Axis("token", 0, 3, 3, 100), Axis("token", 0, 1, 1, 0), *dense[1:]]
    made = [Paging.of(Geometry(tuple(axes), "uint8", Group("attn", 12), 5, 400)) for axes in (dense, apart, dense[2:])]
    assert [paging.digits for paging in made] == [((12, 16),), ((3, 100), (4, 16)), ()]
    assert made[1].steps(2) == ((5, 3, 2), (400, 100, 32))
    assert made[2].steps(1) == ((5,), (400,))
    assert [at.tolist() for at in made[1].found(np.array([4]), np.array([10]), 2)] == [[4], [2], [1]]


@pytest.mark.parametrize(
    "ours, theirs, length",
    [
        ({"tokens": 4}, {"tokens": 4}, 4),
        ({"tokens": 8}, {"tokens": 2}, 2),
        ({"tokens": 12}, {"tokens": 8}, 4),
        ({"tokens": 8, "contexts": (2, 4)}, {"tokens": 8}, 4),
        ({"tokens": 8, "contexts": (2, 3)}, {"tokens": 8}, 1),
        ({"tokens": 8, "contexts": (2, 4)}, {"tokens": 8, "contexts": (2, 6)}, 2),
        ({"tokens": 4, "contexts": (2, 3)}, {"tokens": 4, "contexts": (3, 2)}, 1),
    ],
)
def test_runs_lie_within_blocks_and_turns_of_both_sides(
    ours: dict[str, Any], theirs: dict[str, Any], length: int
) -> None:
    """S11: as long as one block and one turn of a context on either side allow, wherever runs begin."""
    (local, *_), sources = engine("decode", **ours), engine("prefill", **theirs)
    assert {lane.run for found in staged(local, sources).lanes for lane in found} == {length}


def copies(
    plan: StagedPlan, tokens: tuple[int, int], ours: Sequence[int] = range(6), theirs: Sequence[int] = range(6)
) -> list[Copy]:
    request: dict[str, Any] = {"local": {"attn": Blocks(ours)}, "remote": {"attn": Blocks(theirs)}, "tokens": tokens}
    return [copy for chunk in plan.bind(**request) for copy in chunk.copies]


def in_one_region(order: str, tokens: int = 4) -> tuple[Any, ...]:
    """A small engine whose layers lie in one region."""
    (worker,) = engine(order, tokens=tokens, order=order)
    size = worker.regions[0].size_bytes
    views = [attrs.evolve(view, region="kv", offset_bytes=i * size) for i, view in enumerate(worker.views)]
    return (attrs.evolve(worker, regions=[Region("kv", 1 << 40, 2 * size)], views=views),)


def test_one_copy_serves_all_layers_and_blocks() -> None:
    """S10 and S11: a request of whole runs between regions of all layers is one copy."""
    (local,), sources = in_one_region("NH"), in_one_region("HN")
    (copy,) = copies(staged(local, sources), (4, 20))
    assert [index.tolist() for index in copy.destination.index] == [[1, 2, 3, 4], 4 * [0]]
    assert [index.tolist() for index in copy.source.index] == [[0, 1, 2, 3], 4 * [0]]
    assert (copy.extents, copy.length_bytes, copy.num_bytes) == ((4, 4, 2), 16, 4 * 2 * 4 * 64)


def test_one_copy_serves_layers_in_regions_of_their_own() -> None:
    """S10: each layer is an origin of the one copy."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    (copy,) = copies(staged(local, sources), (4, 20))
    assert [region.name for region, _ in copy.destination.origins] == ["kv.0", "kv.1"]
    assert {region.name for region, _ in copy.source.origins} == {NAME}
    assert copy.num_bytes == 4 * 2 * 4 * 64
    assert repr(copy) == "<Copy kv.0-1 <- staging: 2 times 4 boxes of 4 x 4 x 16 bytes>"


def test_what_a_range_cuts_off_goes_token_by_token() -> None:
    """S11: a second copy has the tokens of runs that begin before the range or end behind it."""
    (local,), sources = in_one_region("NH"), in_one_region("HN")
    body, ends = copies(staged(local, sources), (3, 17))
    assert [index.tolist() for index in body.destination.index] == [[1, 2, 3], 3 * [0]]
    assert [index.tolist() for index in ends.destination.index] == [[0, 4], [3, 0]]
    assert ends.num_bytes + body.num_bytes == 14 * 2 * 64
    (only,) = copies(staged(local, sources), (5, 7))
    assert only.destination.index[1].tolist() == [1, 2]


def every_run(copy: Copy) -> Ints:
    """Where each run of each box begins that a copy's destination could be asked for, (origins, runs)."""
    side = copy.destination
    at = np.array([[offset] for _, offset in side.origins])
    for extent, stride in zip((*side.shape, *copy.extents), (*side.strides_bytes, *side.inner_bytes), strict=True):
        at = np.add.outer(at, np.arange(extent) * stride).reshape(len(at), -1)
    return at


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BHLNC", "LHBNC"])
def test_no_two_elements_of_a_destination_share_a_byte(layout: str) -> None:
    """So that a strided tensor may be written: over all blocks and slots, also those that the request has not."""
    model = Model.shipped("qwen2.5-1.5b")
    (local,) = model.engine("d", num_blocks=3, layout=layout, tokens_per_block=32)
    sources = model.engine("p", num_blocks=9, layout="BLNHC")
    found = copies(staged(local, sources, 1 << 25), (5, 70), [2, 0, 1], [5, 3, 1, 8, 2])
    assert found
    for copy in found:
        assert {region.size_bytes for region, _ in copy.destination.origins} == {local.regions[0].size_bytes}
        for at in every_run(copy):
            assert (np.diff(np.sort(at)) >= copy.length_bytes).all()
            assert at.max() + copy.length_bytes <= local.regions[0].size_bytes


def same_as_direct(local: Worker, sources: Sequence[Worker], size: int = 1 << 16) -> StagedPlan:
    """A staged plan, after making sure that it brings what a direct plan does."""
    plan = staged(local, sources, size)
    tables: dict[str, Any] = {"local": {"attn": Blocks([3, 0, 6, 1])}, "remote": {"attn": Blocks([5, 2, 7, 4, 8, 1])}}
    with FakeMemory([plan.direct.local, *sources]) as one, FakeMemory([plan.direct.local, *sources]) as other:
        for memory in (one, other):
            labelled(memory, sources)
        for spec in plan.direct.bind(**tables, tokens=(1, 16)):
            one.execute(spec)
        carry_out(plan, other, {**tables, "tokens": (1, 16)})
        wanted, found = (cells(memory, plan.direct.local) for memory in (one, other))
        assert all(np.array_equal(wanted[region.name], found[region.name]) for region in local.regions)
    return plan


@pytest.mark.parametrize(
    "context, lanes",
    [
        (Context(2, 3, 2), [(6, [0, 1, 2, 3], 2), (6, [4, 5], 2)]),
        (Context(1, 2, 1), [(2, [0], 1), (2, [1], 1)]),
    ],
)
def test_runs_do_not_go_on_where_other_positions_move(
    context: Context, lanes: list[tuple[int, list[int], int]]
) -> None:
    """S11: positions that another source has as well are moved apart, and runs begin where theirs can."""
    (local,) = engine("decode", tokens=4, order="NH")
    sources = [worker("prefill", i, 0, 1, 4, 4, "HN", 2, 10, each) for i, each in enumerate([Context(), context])]
    plan = same_as_direct(local, sources)
    assert [(lane.every, lane.carried.tolist(), lane.run) for found in plan.lanes for lane in found] == lanes


@pytest.mark.parametrize("ours_apart", [False, True])
def test_digits_of_an_axis_are_cut_where_either_side_breaks(ours_apart: bool) -> None:
    """S9: four heads as two times two with a token between, against four in a row."""
    digits = [Axis("head", 0, 2, 2, 64), Axis("head", 0, 2, 2, 8), Axis("token", 0, 4, 4, 16), Axis("dim", 0, 8, 8, 1)]
    dense = [Axis("token", 0, 4, 4, 32), Axis("head", 0, 4, 4, 8), Axis("dim", 0, 8, 8, 1)]
    local, source = (
        Worker(
            name,
            0,
            [Region("kv", 1 << 40, 1280)],
            [Group("attn", 4)],
            [View("a", "attn", "kv", "uint8", axes, 10, 128)],
        )
        for name, axes in (("decode", digits if ours_apart else dense), ("prefill", dense if ours_apart else digits))
    )
    (lanes,) = same_as_direct(local, [source]).lanes
    assert [len(boxes) for lane in lanes for boxes in lane.boxes.values()] == [1, 1]


def test_contexts_on_both_sides_meet_token_by_token() -> None:
    """Slots that are neighbours on one side only are found by index."""
    local = engine("decode", tokens=4, contexts=(2, 1))[1]
    assert local.groups[0].context == Context(1, 2, 1)
    (copy, *_) = copies(staged(local, engine("prefill", tokens=4)), (0, 8))
    assert [index.tolist() for index in copy.destination.index] == [[0, 0, 0, 0], [0, 1, 2, 3]]
    assert [index.tolist() for index in copy.source.index] == [[0, 0, 1, 1], [1, 3, 1, 3]]


def test_views_of_one_shape_are_put_in_order_from_blocks_of_several_sizes() -> None:
    """S3: of two layers that a source keeps alike, one has scales behind it in its pool, the other has not."""
    (local,), (source,) = engine("decode", order="NH"), engine("prefill")
    plan = same_as_direct(padded(local), [padded(source)])
    steps = {view.name: view.block_stride_bytes for view in plan.mirrors[0].worker.views}
    assert steps == {"layers.0": 256, "layers.1": 264, "scales": 264}
