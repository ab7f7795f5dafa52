"""Staging buffers: where staging memory stores what a worker exchanges with a peer (staging.S1 to staging.S5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from kvplan import Axis, Blocks, Context, Group, Model, Region, View, Worker
from kvplan.describe._overlap import overlaps
from kvplan.staging import buffers as module
from kvplan.staging.buffers import StagingBuffer
from tests.small import engine, padded
from tests.staged import (
    descriptors,
    plans_of,
    request_of,
    same_as_direct,
    staged,
)

OURS, THEIRS = Blocks([7, 3, 5, 0, 9]), Blocks([2, 8, 4, 6, 1])

QWEN = Model.shipped("qwen2.5-1.5b")  # 28 layers, 2 heads


def buffers(local: Worker, sources: Sequence[Worker], **options: Any) -> list[StagingBuffer]:
    return [peer.buffer for peer in staged(local, sources, 1 << 26, **options).peers]


def lengths(destination: Worker, source: Worker, **options: Any) -> set[int]:
    """The lengths of the descriptors that read three scattered blocks."""
    plan = staged(destination, [source], 1 << 26, **options)
    blocks = {group.name: Blocks([7, 2, 5]) for group in destination.groups}
    return set(descriptors(plan, {"local": blocks, "remote": blocks}))


def views(*given: tuple[str, int, int, tuple[int, int]], block: int, heads: int = 4, size: int = 0) -> Worker:
    """A source of one region with blocks of 2 tokens, given each view's name, offset, stride of heads, and heads."""
    made = [
        View(
            name,
            "attn",
            "kv",
            "uint8",
            [
                Axis("head", *held, heads, step),
                Axis("token", 0, 2, 2, 8),
                Axis("dim", 0, 8, 8, 1),
            ],
            10,
            block,
            offset,
        )
        for name, offset, step, held in given
    ]
    return Worker("prefill", 0, [Region("kv", 4096, size or 10 * block)], [Group("attn", 2)], made)


def tokens_first(names: Sequence[str], held: tuple[int, int], heads: int = 4) -> Worker:
    """A destination with tokens outside heads, and a region for each tensor."""
    some = held[1] - held[0]
    axes = [Axis("token", 0, 2, 2, 8 * some), Axis("head", *held, heads, 8), Axis("dim", 0, 8, 8, 1)]
    return Worker(
        "decode",
        0,
        [Region(name, (i + 1) << 20, 160 * some) for i, name in enumerate(names)],
        [Group("attn", 2)],
        [View(name, "attn", name, "uint8", axes, 10, 16 * some) for name in names],
    )


def test_a_buffer_has_a_group_for_each_pair_between_which_bytes_move() -> None:
    """staging.S1: with the source's block size and context, under the source's key, in the destination's regions."""
    (local,), sources = engine("decode", tokens=6), engine("prefill", tokens=4, contexts=(2, 3))
    plan = staged(local, sources, 1 << 26)
    first, second = (peer.buffer for peer in plan.peers)
    assert first.worker.groups == (Group("attn<-attn", 4, Context(0, 2, 3)),)
    assert second.worker.groups == (Group("attn<-attn", 4, Context(1, 2, 3)),)
    assert (first.worker.key, plan.transfers[1].local.key) == (("prefill", 0), ("decode", 0))
    assert first.worker.regions == second.worker.regions == plan.transfers[1].local.regions
    assert {view.region for view in first.worker.views} == {"staging"}


def test_groups_of_the_destination_have_pools_of_their_own() -> None:
    """staging.S1: where a source has in one group what the destination has in two."""
    (local,), (source,) = engine("decode"), engine("prefill")
    groups = Group("a", 4), Group("b", 4)
    local = attrs.evolve(
        local, groups=groups, views=[attrs.evolve(v, group=g) for v, g in zip(local.views, groups, strict=True)]
    )
    (found,) = buffers(local, [source])
    assert [(view.name, view.group) for view in found.worker.views] == [
        ("layers.0", "a<-attn"),
        ("layers.1", "b<-attn"),
    ]


def test_a_buffer_has_the_interval_that_is_needed() -> None:
    """staging.S2: of 4 heads those that the destination has; with ``whole`` all."""
    (_, local), (source,) = engine("decode", tp=2), engine("prefill")
    for whole, part in ((False, (2, 4)), (True, (0, 4))):
        (found,) = buffers(local, [source], whole=whole)
        heads = {(a.start, a.stop, a.size) for view in found.worker.views for a in view.axes if a.name == "head"}
        assert heads == {(*part, 4)}


def test_a_buffer_has_the_interval_around_all_that_is_needed() -> None:
    """staging.S2: where different cells take different heads of one view, from the first to the last."""
    names = ["a"]
    wide, narrow = tokens_first(names, (0, 1)), tokens_first(names, (3, 4))
    both = Worker(
        "decode",
        0,
        [*wide.regions, attrs.evolve(narrow.regions[0], name="b", address=1 << 30)],
        wide.groups,
        [wide.views[0], attrs.evolve(narrow.views[0], region="b")],
    )
    plan = staged(both, [views(("a", 0, 16, (0, 4)), block=64)])
    (view,) = plan.peers[0].buffer.worker.views
    assert [(axis.start, axis.stop) for axis in view.axes if axis.name == "head"] == [(0, 4)]
    assert plan.cost(2).read_amplification == 2


def test_axes_of_several_digits_and_the_token_axis_are_whole() -> None:
    """staging.S2: all digits stay, with their coordinates, and so do all slots of kernel blocks."""
    axes = [
        Axis("head", 0, 2, 2, 64),
        Axis("head", 0, 2, 2, 16),
        Axis("token", 0, 2, 2, 32),
        Axis("token", 0, 2, 2, 8),
        Axis("dim", 0, 8, 8, 1),
    ]
    source = Worker(
        "prefill", 0, [Region("kv", 4096, 1280)], [Group("attn", 4)], [View("a", "attn", "kv", "uint8", axes, 10, 128)]
    )
    (found,) = buffers(attrs.evolve(tokens_first(["a"], (0, 1)), groups=[Group("attn", 2)]), [source])
    assert [attrs.evolve(axis, stride_bytes=0) for axis in found.worker.views[0].axes] == [
        attrs.evolve(axis, stride_bytes=0) for axis in axes
    ]
    assert found.worker.views[0].block_stride_bytes == 128


@pytest.mark.parametrize("layout", ["BLNHC", "BLHNC", "BHLNC"])
def test_layers_inside_blocks_stay_in_one_run(layout: str) -> None:
    """staging.S3: a block of all layers is one run of the source and of the buffer, in any order of axes."""
    ((source,), (local,)) = (
        QWEN.engine(name, num_blocks=9, layout=kind) for name, kind in (("p", layout), ("d", "LBNHC"))
    )
    assert lengths(local, source) == {16 * 28 * 1024}


def test_trimmed_layers_inside_blocks_stay_in_one_run() -> None:
    """staging.S3: with heads outside layers, what one of two ranks needs of a block is one run, half as long."""
    (source,), (_, local) = (
        QWEN.engine(name, tp, num_blocks=9, layout=kind) for name, tp, kind in (("p", 1, "BHLNC"), ("d", 2, "LBNHC"))
    )
    assert lengths(local, source) == {16 * 28 * 512}
    assert lengths(local, source, whole=True) == {16 * 28 * 1024}


def test_parts_of_views_stay_in_the_order_of_the_source() -> None:
    """staging.S3: of two layers in turns under each head, the second head of one and both of the other are one run."""
    source = views(("a", 0, 32, (0, 2)), ("b", 16, 32, (0, 2)), block=64, heads=2)
    local = tokens_first(["a", "b"], (0, 2), heads=2)
    part = attrs.evolve(tokens_first(["a"], (1, 2), heads=2).views[0])
    local = attrs.evolve(local, views=[part, local.views[1]])
    (found,) = buffers(local, [source])
    assert {view.name: view.offset_bytes for view in found.worker.views} == {"b": 0, "a": 16}
    assert lengths(local, source) == {48}


def test_padding_is_dropped_and_views_of_other_shapes_stay() -> None:
    """staging.S3: values and scales that alternate are one run, though their axes differ."""
    model = QWEN.quantized(8)
    (source,), (local,) = (model.engine(name, num_blocks=9, pad=pad) for name, pad in (("p", 512), ("d", 0)))
    (found,) = buffers(local, [source])
    assert {view.block_stride_bytes for view in found.worker.views} == {sum(v.block_bytes for v in source.views) // 28}
    assert lengths(local, source) == {sum(view.block_bytes for view in source.views) // 28}


def test_neighbouring_blocks_of_a_layer_stay_in_one_run() -> None:
    """staging.S3 and staging.S5: where layers lie outside blocks, they do in the buffer."""
    ((source,), (local,)) = (
        QWEN.engine(name, num_blocks=9, layout=kind) for name, kind in (("p", "LBHNC"), ("d", "LBNHC"))
    )
    blocks = {"attn": Blocks([4, 5, 6])}
    plan = staged(local, [source], 1 << 26)
    assert descriptors(plan, {"local": {"attn": Blocks([8, 0, 3])}, "remote": blocks}) == 28 * [3 * 16 * 1024]


def test_views_that_strides_cannot_pack_together_are_packed_alone() -> None:
    """staging.S4: where layers alternate under each head and have different heads, the strides of heads would vary."""
    source = views(("a", 0, 32, (0, 4)), ("b", 16, 32, (0, 2)), block=128)
    local = tokens_first(["a", "b"], (0, 4))
    local = attrs.evolve(local, views=[local.views[0], attrs.evolve(tokens_first(["b"], (0, 2)).views[0], region="b")])
    (found,) = buffers(local, [source])
    assert [(v.name, v.block_stride_bytes, v.axes[0].stride_bytes) for v in found.worker.views] == [
        ("a", 64, 16),
        ("b", 32, 16),
    ]
    assert lengths(local, source) == {16}


def test_frames_of_too_many_runs_are_packed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """staging.S4: frames of many runs would take long to pack together."""
    source, local = views(("a", 0, 32, (0, 4)), ("b", 16, 32, (0, 4)), block=128), tokens_first(["a", "b"], (0, 4))
    assert lengths(local, source) == {128}
    monkeypatch.setattr(module, "MAX_RUNS", 7)
    assert lengths(local, source) == {16}
    assert {view.block_stride_bytes for view in buffers(local, [source])[0].worker.views} == {64}


def test_blocks_inside_an_axis_stay_inside_it() -> None:
    """staging.S4: with heads outside blocks, neighbouring blocks of a head are one run, also in the buffer."""
    source, local = views(("a", 0, 160, (0, 4)), block=16, size=640), tokens_first(["a"], (0, 4))
    plan = staged(local, [source], 4 * 2 * 3 * 16)
    (view,) = plan.peers[0].buffer.worker.views
    assert (view.num_blocks, view.block_stride_bytes, view.axes[0].stride_bytes) == (6, 16, 96)
    blocks = {"attn": Blocks([4, 5, 6])}
    assert descriptors(plan, {"local": {"attn": Blocks([8, 0, 3])}, "remote": blocks}) == 4 * [48]


def test_a_view_that_blocks_lie_inside_of_is_alone() -> None:
    """staging.S4: also where another view has the rest of its blocks' step."""
    source = views(("a", 0, 320, (0, 2)), ("b", 16, 0, (0, 1)), block=32, heads=2, size=640)
    local = tokens_first(["a", "b"], (0, 2), heads=2)
    one = attrs.evolve(tokens_first(["b"], (0, 1), heads=2).views[0])
    (found,) = buffers(attrs.evolve(local, views=[local.views[0], one]), [source])
    assert {view.name: view.block_stride_bytes for view in found.worker.views} == {"a": 16, "b": 16}


def test_the_one_block_of_a_pool_lies_outside_all_axes() -> None:
    """staging.S4: a step to a second block that is not there says nothing, even if it is 0."""
    source, local = views(("a", 0, 16, (0, 4)), block=64), tokens_first(["a"], (0, 4))
    source = attrs.evolve(source, views=[attrs.evolve(source.views[0], num_blocks=1, block_stride_bytes=0)])
    (view,) = buffers(local, [source])[0].worker.views
    assert (view.block_stride_bytes, view.axes[0].stride_bytes) == (64, 16)


def test_pools_follow_each_other() -> None:
    """staging.S5: no two views of any buffers share a byte, and none leaves the staging region."""
    local, sources = engine("decode", tp=2, order="NH")[0], engine("prefill", tp=4, contexts=(2, 1))
    plan = staged(local, sources, 4000)
    assert len(plan.peers) == 4
    every = [attrs.evolve(view, group="all") for peer in plan.peers for view in peer.buffer.worker.views]
    assert list(overlaps(every)) == []
    assert max(view.end_bytes for view in every) <= 4000


def test_views_of_both_sides_have_numbers_of_their_own() -> None:
    """staging.S2: where a destination lists its layers the other way round, and has one more in between."""
    (source,), (destination,) = engine("prefill", layers=3), engine("decode", order="NH", layers=3)
    destination, given = attrs.evolve(destination, views=destination.views[::-1]), request_of(OURS, THEIRS)
    plans = plans_of([source], [destination], 1 << 16, not_transferred=["layers.1"])
    assert sorted(view.name for view in plans[0].peers[0].buffer.worker.views) == ["layers.0", "layers.2"]
    same_as_direct(plans, given)
    stages = [
        attrs.evolve(source, rank=rank, views=views) for rank, views in enumerate((source.views[1:], source.views[:1]))
    ]
    same_as_direct(plans_of(stages, [destination], 1 << 16), given)


def test_views_of_one_shape_are_packed_in_blocks_of_several_sizes() -> None:
    """staging.S3: of two equal layers of a peer, one has scales behind it in its pool, the other has none."""
    (plan,) = plans_of([*map(padded, engine("prefill"))], [*map(padded, engine("decode", order="NH"))], 1 << 16)
    steps = {view.name: view.block_stride_bytes for view in plan.peers[0].buffer.worker.views}
    assert steps == {"layers.0": 256, "layers.1": 264, "scales": 264}
    same_as_direct([plan], request_of(OURS, THEIRS, (1, 18)))
