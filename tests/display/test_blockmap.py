"""Block maps: what each byte of a block holds, for every kind of cache and layout, and the way back from bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest

from kvplan import Axis, Group, KVPlanError, Model, Region, View, Worker
from kvplan.display import blockmap as module
from kvplan.display.blockmap import BlockMap, Box, StridedAxis, block_maps

LLAMA = Model.shipped("llama-3.1-8b")
GRANITE = Model.shipped("granite-4.0-h-tiny")


def chains(bands: Sequence[StridedAxis], base: int = 0, outer: tuple[str, ...] = ()) -> Iterator[str]:
    """Each way from a one to elements, one axis after another, without the elements."""
    for band in bands:
        if band.inside:
            yield from chains(band.inside, base + band.offset, (*outer, str(band)))
        else:
            yield f"{band.tensor} at {base + band.offset}: {', '.join(outer)}"


def only(model: Model, **options: Any) -> BlockMap:
    (one,) = block_maps(model.engine("e", **options)[0])
    return one


@pytest.mark.parametrize(
    "layout, expected",
    [
        ("LBHNC", "head 2 x 8192, token 16 x 512, kv 2 x 256"),
        ("LBNHC", "token 16 x 1024, head 2 x 512, kv 2 x 256"),
        ("LHBNC", "head 2 x 81920, token 16 x 512, kv 2 x 256"),
        ("BLHNC", "layer 32 x 16384, head 2 x 8192, token 16 x 512, kv 2 x 256"),
        ("BLNHC", "layer 32 x 16384, token 16 x 1024, head 2 x 512, kv 2 x 256"),
        ("BHLNC", "head 2 x 262144, layer 32 x 8192, token 16 x 512, kv 2 x 256"),
    ],
)
def test_axes_nest_as_in_memory(layout: str, expected: str) -> None:
    """Each of the six orders shows as the order of the bands, layers of one block included."""
    one = only(LLAMA, tp=4, layout=layout, num_blocks=10)
    assert list(chains(one.all_layers)) == [f"attn at 0: {expected}"]
    assert (one.title, len(one.places)) == ("layers.0-31.attn", 32)


def test_an_indexer_has_a_map_of_its_own() -> None:
    """An indexer's keys are followed by its scales, in a block map of their own."""
    _, index = block_maps(Model.shipped("deepseek-v3.2").engine("e", num_blocks=10)[0])
    assert list(chains(index.axes)) == ["index at 0: token 16 x 128", "index.scale at 2048: token 16 x 4"]
    assert index.title == "layers.0-60.{index, index.scale}"


@pytest.mark.parametrize(
    "scales, expected",
    [
        (
            "inline",
            [
                "attn at 0: head 2 x 4224, token 16 x 264, kv 2 x 128",
                "attn.scale at 256: head 2 x 4224, token 16 x 264",
            ],
        ),
        (
            "page",
            ["attn at 0: head 2 x 4096, token 16 x 256, kv 2 x 128", "attn.scale at 8192: head 2 x 128, token 16 x 8"],
        ),
    ],
)
def test_scales_nest_where_they_are(scales: str, expected: list[str]) -> None:
    """Inline scales are inside each token of each head; those of a one follow all heads' data."""
    one = only(LLAMA.quantized(8), tp=4, scales=scales, num_blocks=10)
    assert list(chains(one.axes)) == expected


def test_states_are_tensors_one_after_another() -> None:
    """A state is its convolution, then its SSM state; with steps outside, the parts of the convolution alternate."""
    channels, steps = (
        block_maps(GRANITE.engine("e", tp=2, conv_order=order, num_blocks=3)[0])[0] for order in ("DS", "SD")
    )
    assert [band.tensor for band in channels.axes] == ["conv.x", "conv.B", "conv.C", "ssm"]
    assert [(band.tensor, str(band)) for band in steps.axes] == [
        ("conv.x + conv.B + conv.C", "step 3 x 3584"),
        ("ssm", "head 24 x 32768"),
    ]
    assert channels.title == "layers.0-4,6-14,16-24,26-34,36-39.{conv.x, conv.B, conv.C, ssm}"


def test_groups_over_each_other_leave_a_rest() -> None:
    """Where a hybrid pool gives small blocks the room of large ones, the map says how many bytes are left."""
    state, attn = block_maps(GRANITE.engine("e", tp=2, shared=True, num_blocks=3)[0])
    assert (state.size_bytes, state.rest_bytes) == (797184, 0)
    assert (attn.size_bytes, attn.rest_bytes) == (16384, 797184 - 16384)
    assert (attn.group.name, len(attn.places)) == ("attn", 4)


def test_kernel_blocks_are_digits() -> None:
    """A token axis of two digits whose bytes are apart has a band for each."""
    one = only(LLAMA, tp=4, kv="axis", tokens_per_block=64, kernel_tokens=16, num_blocks=10)
    assert list(chains(one.axes)) == ["attn at 0: token 4 x 16384, kv 2 x 8192, head 2 x 4096, token 16 x 256"]
    assert [str(step) for step in next(one.boxes(16384 + 512, 16384 + 1024)).path] == ["16-31", "K", "0", "18-19"]


def test_dense_digits_are_one_band() -> None:
    """Kernel blocks that follow each other without a gap look like one block."""
    one = only(Model.shipped("deepseek-v3"), tokens_per_block=64, kernel_tokens=16, num_blocks=10)
    assert list(chains(one.axes)) == ["attn at 0: token 64 x 1152"]


def test_layers_that_differ_have_maps_of_their_own() -> None:
    """Layers share a map only if they are equal in all but place."""
    region = Region("kv", 4096, 1 << 20)
    axes = [(Axis("token", 0, 4, 4, 8 * wide), Axis("dim", 0, wide, wide, 8)) for wide in (1, 2, 2)]
    views = [View(f"layers.{i}.k", "g", region, "float64", each, 4, 1024, 64 * i) for i, each in enumerate(axes)]
    found = block_maps(Worker("e", 0, [region], [Group("g", 4)], views))
    assert [one.title for one in found] == ["layers.0.k", "layers.1-2.k"]


def test_names_without_numbers_have_maps_of_their_own() -> None:
    """Tensors without a number are no layers: each has a map, whose rest does not include the next."""
    region = Region("kv", 4096, 4096)
    axes = (Axis("token", 0, 4, 4, 16), Axis("dim", 0, 2, 2, 8))
    views = [View(name, "g", region, "float64", axes, 4, 128, 64 * i) for i, name in enumerate("kv")]
    found = block_maps(Worker("e", 0, [region], [Group("g", 4)], views))
    assert [(one.title, one.rest_bytes) for one in found] == [("k", 0), ("v", 0)]


def bytes_of(one: BlockMap, start: int, stop: int) -> list[str]:
    """The steps to each byte."""
    return [" ".join(map(str, box.path)) for at in range(start, stop) for box in one.boxes(at, at + 1)]


def test_digits_that_do_not_nest_are_found_one_by_one() -> None:
    """Where the outer digit of an axis is the finer one in memory, neighbouring bytes are far apart on the axis."""
    region = Region("kv", 4096, 4096)
    axes = (Axis("token", 0, 2, 2, 1), Axis("token", 0, 4, 4, 2))
    (one,) = block_maps(
        Worker("e", 0, [region], [Group("g", 8)], [View("layers.0.k", "g", region, "uint8", axes, 4, 8)])
    )
    last = [step.rpartition(" ")[2] for step in bytes_of(one, 0, 8)]
    assert last == ["0", "4", "1", "5", "2", "6", "3", "7"]


DIGITS = Axis("token", 0, 2, 2, 1), Axis("token", 0, 4, 4, 4)


@pytest.mark.parametrize(
    "names, views",
    [
        (("kv K", "kv V"), [("layers.0.kv", (*DIGITS, Axis("kv", 0, 2, 2, 2)), 0)]),
        (("tensor k", "tensor v"), [("layers.0.k", DIGITS, 0), ("layers.0.v", DIGITS, 2)]),
    ],
)
def test_a_box_has_an_interval_of_each_axis(names: tuple[str, str], views: list[tuple[str, Any, int]]) -> None:
    """Where the coarser digit of tokens is inside K and V, and the finer one outside, K has tokens that are apart."""
    region = Region("kv", 4096, 4096)
    made = [View(name, "g", region, "uint8", axes, 4, 16, offset) for name, axes, offset in views]
    (one,) = block_maps(Worker("e", 0, [region], [Group("g", 8)], made))
    found = [text(box) for box in one.boxes(4, 8)]
    assert found == [f"{at}-{at + 1} token 1..5 {names[at > 5]} token {1 + at % 2 * 4}" for at in range(4, 8)]


def test_views_that_alternate_without_a_common_axis_stay_apart() -> None:
    """Tensors whose bytes alternate along axes of different names are a band each, and bytes are found in them."""
    region = Region("kv", 4096, 4096)
    views = [
        View(f"layers.0.{axis}", "g", region, "uint8", (Axis(axis, 0, 3, 3, 4),), 4, 16, offset)
        for axis, offset in (("x", 0), ("y", 2))
    ]
    (one,) = block_maps(Worker("e", 0, [region], [Group("g")], views))
    assert [str(band) for band in one.axes] == ["x 3 x 4", "y 3 x 4"]
    assert bytes_of(one, 0, 12) == ["x 0", "y 0", "x 1", "y 1", "x 2", "y 2"]


def hand(*axes: StridedAxis, size: int = 99) -> BlockMap:
    """A block map of axes made by hand."""
    return BlockMap(Group("g", 4), ("layers.0",), (), ((0, 0),), 1, 0, size, 0, axes, axes)


def strided(axis: str, coordinates: range, offset: int, step: int, size: int, *inside: StridedAxis) -> StridedAxis:
    return StridedAxis("k", (0,), axis, coordinates, coordinates.step, offset, step, size, inside)


TOKENS = strided("token", range(4), 0, 8, 8)
HEADS = strided("head", range(4, 6), 0, 32, 32, TOKENS)
PADDED = strided("head", range(2), 4, 40, 32, TOKENS)


def text(box: Box) -> str:
    return " ".join([f"{box.start}-{box.stop}", *(f"{interval.axis} {interval}" for interval in box.path)])


@pytest.mark.parametrize(
    "axis, start, stop, expected",
    [
        (HEADS, 0, 64, ["0-64 head 4-5"]),
        (HEADS, 32, 64, ["32-64 head 5"]),
        (HEADS, 8, 24, ["8-24 head 4 token 1-2"]),
        (HEADS, 24, 40, ["24-32 head 4 token 3", "32-40 head 5 token 0"]),
        (HEADS, 24, 64, ["24-32 head 4 token 3", "32-64 head 5"]),
        (HEADS, 64, 99, []),
        (PADDED, 0, 99, ["4-36 head 0", "44-76 head 1"]),
        (PADDED, 12, 52, ["12-36 head 0 token 1-3", "44-52 head 1 token 0"]),
        (PADDED, 36, 44, []),
        (
            strided("token", range(0, 32, 16), 0, 256, 128, strided("token", range(16), 0, 8, 8)),
            256,
            280,
            ["256-280 token 16-31 token 16-18"],
        ),
    ],
)
def test_bytes_are_boxes(axis: StridedAxis, start: int, stop: int, expected: list[str]) -> None:
    """A box has the slowest axis that has its bytes whole, and all before it. Bytes between parts are in no box.

    A finer digit of an axis is printed in coordinates of the whole axis.
    """
    assert [text(box) for box in hand(axis).boxes(start, stop)] == expected


def test_tensors_beside_each_other_are_named() -> None:
    """Where a part holds several tensors, an interval says which."""
    x = attrs.evolve(strided("dim", range(4), 0, 2, 2), tensor="x")
    y = attrs.evolve(strided("dim", range(2), 8, 2, 2), tensor="y")
    assert [text(box) for box in hand(x, y).boxes(6, 10)] == ["6-8 tensor x dim 3", "8-10 tensor y dim 0"]


def test_pieces_are_as_long_as_they_can_be() -> None:
    """Dense axes are one piece; a gap divides, and bytes of another tensor fill it."""
    assert hand(HEADS).pieces.tolist() == [[0, 64]]
    padded = strided("head", range(3), 4, 40, 32, TOKENS)
    assert hand(padded, size=999).pieces.tolist() == [[4, 36], [44, 76], [84, 116]]
    assert hand(padded, strided("head", range(3), 36, 40, 8), size=999).pieces.tolist() == [[4, 124]]


def test_too_many_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of more pieces than can be listed is refused by name."""
    monkeypatch.setattr(module, "MAX_PIECES", 8)
    assert len(hand(strided("head", range(8), 0, 40, 32, TOKENS), size=999).pieces) == 8
    with pytest.raises(
        KVPlanError, match=r"RANGE: cannot draw layers\.0: expected at most 8 contiguous pieces of a block"
    ):
        hand(strided("head", range(9), 0, 40, 32, TOKENS), size=999).pieces  # noqa: B018


def test_tensors_that_alternate_farther_apart_than_they_repeat_stay_apart() -> None:
    """Two tensors of heads 16 bytes apart, the second 20 bytes behind the first: no head has both side by side."""
    axes = [Axis("head", 0, 3, 3, 16), Axis("dim", 0, 4, 4, 1)]
    views = [
        View(name, "state", "pool", "uint8", axes, 2, 64, offset)
        for name, offset in (("layers.0.a", 0), ("layers.0.b", 20))
    ]
    worker = Worker("e", 0, [Region("pool", 4096, 128)], [Group("state")], views)
    (one,) = block_maps(worker)
    assert [(axis.tensor, axis.offset, axis.step) for axis in one.axes] == [("a", 0, 16), ("b", 20, 16)]
