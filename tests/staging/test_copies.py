"""Local copies: as few strided copies as possible, between staging buffers and a worker's own blocks (staging.S9 to
staging.S11).
"""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Axis, Blocks, Context, Group, Model, Region, View, Worker
from kvplan.staging import Copy, StagedPlan
from kvplan.staging.copies import Boxes, CopySide, Dim, joined_dims, merged
from tests.small import engine, worker
from tests.staged import (
    NAME,
    descriptors,
    plans_of,
    request_of,
    same_as_direct,
    staged,
)

KV, STAGING = Region("kv", (1 << 63) - 8, 4096, device_id=3), Region(NAME, 1 << 40, 4096, device_id=3)
OTHER = attrs.evolve(KV, name="other")


def boxes(*origins: tuple[int, int], length: int = 8, dims: tuple[Dim, ...] = (), region: Region = KV) -> Boxes:
    """Boxes of a region and of the staging region, that begin at such offsets."""
    return {(length, dims): [((region, ours), (STAGING, theirs)) for ours, theirs in origins]}


def runs(found: Boxes) -> list[tuple[int, int]]:
    """Where all runs of 8 bytes of boxes begin, on both sides."""
    return [
        (here + ours + more, there + theirs + more)
        for (length, dims), origins in found.items()
        for (_, here), (_, there) in origins
        for point in itertools.product(*(range(extent) for extent, *_ in dims))
        for ours, theirs in [[sum(i * dim[side] for i, dim in zip(point, dims, strict=True)) for side in (1, 2)]]
        for more in range(0, length, 8)
    ]


@pytest.mark.parametrize(
    "given, expected",
    [
        ([(i * 4096, 512 + i * 64) for i in range(28)], boxes((0, 512), dims=((28, 4096, 64),))),
        (
            [(i * 4096 + kv * 100, i * 64 + kv * 32) for i in range(5) for kv in (0, 1)],
            boxes((0, 0), dims=((2, 100, 32), (5, 4096, 64))),
        ),
        ([(i * 8, 64 + i * 8) for i in range(4)], boxes((0, 64), length=32)),
        ([(0, 100), (100, 0)], boxes((0, 100), (100, 0))),
    ],
)
def test_boxes_of_one_step_are_one_box(given: list[tuple[int, int]], expected: Boxes) -> None:
    """staging.S10: layers; K and V of each layer; runs that continue each other; but no step back."""
    assert merged(boxes(*given)) == expected


def test_boxes_of_other_regions_are_origins() -> None:
    """staging.S10: boxes of equal shape stay origins of one copy; those of another length are another copy's."""
    ((shape, origins),) = boxes((0, 0)).items()
    ((_, others),) = boxes((100, 50), region=OTHER).items()
    short = boxes((4, 100), length=4)
    assert merged({shape: [*origins, *others], **short}) == {shape: [*origins, *others], **short}


def test_no_run_is_lost_or_made() -> None:
    """staging.S10: whatever the offsets, the boxes made of them have the same runs."""
    for seed in range(200):
        count = 1 + seed % 7
        offsets = {((i * i * (seed % 3) + i * 16) * 8, (i % (1 + seed % 5)) * 48 + i * 8) for i in range(count)}
        assert sorted(runs(merged(boxes(*offsets)))) == sorted(offsets)


def test_dims_go_by_the_stride_of_the_destination() -> None:
    """Finest first, without those of one coordinate, joined where one continues another on all sides."""
    assert joined_dims(2, [(3, 1024, 100), (1, 0, 0), (64, 2, 2), (4, 128, 512), (2, 512, 2048)]) == (
        128,
        ((8, 128, 512), (3, 1024, 100)),
    )
    assert joined_dims(2, [(4, 32), (8, 2), (2, 16)]) == (16 * 2 * 4, ())


def copy_of(*origins: tuple[int, int]) -> Copy:
    """Two boxes, of 2 runs of 8 bytes each, from each origin."""
    ours = CopySide(tuple((KV, offset) for offset, _ in origins), np.array([576, 0]), (16, 128))
    theirs = CopySide(tuple((STAGING, offset) for _, offset in origins), np.array([640, 2944]), (32, 8))
    return Copy(ours, theirs, (2, 1), 8)


def test_ranges_are_where_offsets_and_strides_say() -> None:
    """Address, length and device of every run, box by box and origin by origin."""
    written, read = copy_of((64, 8)).ranges()
    assert written.tolist() == [[KV.address + 64 + more, 8, 3] for more in (576, 592, 0, 16)]
    assert read.tolist() == [[STAGING.address + 8 + more, 8, 3] for more in (640, 672, 2944, 2976)]
    both, other = copy_of((64, 8), (1100, 16)), copy_of((1100, 16))
    assert [(copy.num_origins, copy.num_bytes) for copy in (other, both)] == [(1, 32), (2, 64)]
    for whole, *parts in zip(both.ranges(), (written, read), other.ranges(), strict=True):
        assert np.array_equal(whole, np.concatenate(parts))
    assert repr(both) == "<Copy kv <- staging: 2 times 2 boxes of 2 x 1 x 8 bytes>"


def templates(plan: StagedPlan) -> list[tuple[int, list[int], int]]:
    """Of each template its period, the positions that it carries, and the tokens of a run."""
    return [(each.period, each.carried.tolist(), each.run_tokens) for peer in plan.peers for each in peer.templates]


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
    """staging.S11: as long as one block and one turn of a context on either side allow, wherever runs begin."""
    (local, *_), sources = engine("decode", **ours), engine("prefill", **theirs)
    assert {run_tokens for *_, run_tokens in templates(staged(local, sources))} == {length}


def copies(plan: StagedPlan, tokens: tuple[int, int], ours: Any = range(6), theirs: Any = range(6)) -> list[Copy]:
    request = request_of(Blocks(ours), Blocks(theirs), tokens)
    return [copy for chunk in plan.bind(**request) for copy in chunk.copies]


def in_one_region(order: str) -> tuple[Worker, ...]:
    """A small engine whose layers lie in one region."""
    (worker,) = engine(order, order=order)
    size = worker.regions[0].size_bytes
    views = [attrs.evolve(view, region="kv", offset_bytes=i * size) for i, view in enumerate(worker.views)]
    return (attrs.evolve(worker, regions=[Region("kv", 1 << 40, 2 * size)], views=views),)


def test_one_copy_serves_all_layers_and_blocks() -> None:
    """staging.S10 and staging.S11: a request of whole runs between regions of all layers is one copy of one origin."""
    (local,), sources = in_one_region("NH"), in_one_region("HN")
    (copy,) = copies(staged(local, sources), (4, 20))
    assert [side.offsets.tolist() for side in (copy.destination, copy.source)] == [
        [256, 512, 768, 1024],
        [0, 256, 512, 768],
    ]
    assert (copy.extents, copy.length_bytes, copy.num_bytes) == ((4, 4, 2), 16, 4 * 2 * 4 * 64)


def test_one_copy_serves_layers_in_regions_of_their_own() -> None:
    """staging.S10: each layer is an origin of the one copy."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    (copy,) = copies(staged(local, sources), (4, 20))
    assert [region.name for region, _ in copy.destination.origins] == ["kv.0", "kv.1"]
    assert {region.name for region, _ in copy.source.origins} == {NAME}
    assert copy.num_bytes == 4 * 2 * 4 * 64
    assert repr(copy) == "<Copy kv.0-1 <- staging: 2 times 4 boxes of 4 x 4 x 16 bytes>"


def test_cut_runs_are_copied_token_by_token() -> None:
    """staging.S11: a second copy has the tokens of runs that begin before the range or end behind it."""
    (local,), sources = in_one_region("NH"), in_one_region("HN")
    body, ends = copies(staged(local, sources), (3, 17))
    assert [copy.destination.offsets.tolist() for copy in (body, ends)] == [[256, 512, 768], [192, 1024]]
    assert ends.num_bytes + body.num_bytes == 14 * 2 * 64
    (only,) = copies(staged(local, sources), (5, 7))
    assert only.destination.offsets.tolist() == [256 + 64, 256 + 128]


def test_contexts_on_both_sides_meet_token_by_token() -> None:
    """staging.S11: slots that are neighbours on one side only are separate boxes."""
    local = engine("decode", tokens=4, contexts=(2, 1))[1]
    assert local.groups[0].context == Context(1, 2, 1)
    (copy, *_) = copies(staged(local, engine("prefill", tokens=4)), (0, 8))
    assert copy.destination.offsets.tolist() == [0, 16, 32, 48]
    assert copy.source.offsets.tolist() == [16, 48, 256 + 16, 256 + 48]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BHLNC", "LHBNC"])
def test_no_two_runs_of_a_destination_share_a_byte(layout: str) -> None:
    """A copy never writes a byte twice, nor outside its region, from any of its origins."""
    model = Model.shipped("qwen2.5-1.5b")
    destinations = model.engine("d", num_blocks=3, layout=layout, tokens_per_block=32)
    (plan,) = plans_of(model.engine("p", num_blocks=9, layout="BLNHC"), destinations, 1 << 25)
    found = copies(plan, (5, 70), [2, 0, 1], [5, 3, 1, 8, 2])
    assert found
    for copy in found:
        start, length = np.sort(copy.ranges()[0][:, 0]), np.uint64(copy.length_bytes)
        assert (start[1:] - start[:-1] >= length).all()
        spans = [(region.address, region.address + region.size_bytes) for region, _ in copy.destination.origins]
        assert min(low for low, _ in spans) <= start[0]
        assert start[-1] + length <= max(high for _, high in spans)


@pytest.mark.parametrize(
    "context, expected",
    [
        (Context(2, 3, 2), [(6, [0, 1, 2, 3], 2), (6, [4, 5], 2)]),
        (Context(1, 2, 1), [(2, [0], 1), (2, [1], 1)]),
    ],
)
def test_runs_end_where_other_positions_move(context: Context, expected: list[tuple[int, list[int], int]]) -> None:
    """staging.S11: positions that another source has as well are copied apart, and transferred in one run."""
    sources = [worker("prefill", i, 0, 1, 4, 4, "HN", 2, 10, each) for i, each in enumerate([Context(), context])]
    plans = plans_of(sources, engine("decode", tokens=4, order="NH"), 1 << 16)
    assert [found for plan in plans for found in templates(plan)] == expected
    blocks = Blocks([3, 0, 6, 1]), Blocks([5, 2, 7, 4, 8, 1])
    same_as_direct(plans, request_of(*blocks, (1, 16)))
    assert descriptors(plans[0], request_of(*blocks, (4, 8))) == 2 * [4 * 4 * 16]


@pytest.mark.parametrize("ours_apart", [False, True])
def test_digits_of_an_axis_are_cut_where_either_side_breaks(ours_apart: bool) -> None:
    """staging.S9: four heads as two times two with a token between, against four in a row."""
    digits = [Axis("head", 0, 2, 2, 64), Axis("head", 0, 2, 2, 8), Axis("token", 0, 4, 4, 16), Axis("dim", 0, 8, 8, 1)]
    dense = [Axis("token", 0, 4, 4, 32), Axis("head", 0, 4, 4, 8), Axis("dim", 0, 8, 8, 1)]
    decode, prefill = (
        Worker(name, 0, [Region("kv", 1 << 40, 1280)], [Group("attn", 4)], [view])
        for name, axes in (("decode", digits if ours_apart else dense), ("prefill", dense if ours_apart else digits))
        for view in (View("a", "attn", "kv", "uint8", axes, 10, 128),)
    )
    (plan,) = plans_of([prefill], [decode], 1 << 16)
    ((template,),) = (peer.templates for peer in plan.peers)
    assert [sum(map(len, found.values())) for found in template.boxes.values()] == [1, 1]
    same_as_direct([plan], request_of(Blocks([3, 0, 6, 1]), Blocks([5, 2, 7, 4]), (1, 16)))


@pytest.mark.parametrize("outer, run_tokens", [(64, 4), (100, 4), (48, 12)])
def test_kernel_blocks_are_one_digit_where_they_follow_each_other(outer: int, run_tokens: int) -> None:
    """staging.S11: a token axis of two digits is copied in runs of the inner one, or of both where they are dense."""
    axes = [
        Axis("token", 0, 3, 3, outer),
        Axis("token", 0, 4, 4, 12),
        Axis("head", 0, 3, 3, 4),
        Axis("dim", 0, 4, 4, 1),
    ]
    swapped = [Axis("head", 0, 3, 3, 48), Axis("token", 0, 12, 12, 4), Axis("dim", 0, 4, 4, 1)]
    local, source = (
        Worker(
            name,
            0,
            [Region("kv", 1 << 40, 5120)],
            [Group("attn", 12)],
            [View("a", "attn", "kv", "uint8", each, 10, 512)],
        )
        for name, each in (("decode", axes), ("prefill", swapped))
    )
    plan = staged(local, [source])
    assert templates(plan) == [(1, [0], run_tokens)]
    same_as_direct([plan], request_of(Blocks([3, 0, 6]), Blocks([5, 2, 7]), (2, 33)))
