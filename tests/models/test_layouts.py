"""Layouts and pools, compared with arrays that numpy lays out in the order of the letters."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvplan import Axis, Group, KVPlanError, Model, Region, View, Worker, view_of
from kvplan.models.layouts import CONV_ORDERS, KV_FORMS, ORDERS, Layout, LocalTensor, Page
from kvplan.models.pools import page_stride, place_pool
from kvplan.models.tensors import mamba2

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 7, 4, 6, 5
EXTENT = {"layer": LAYERS, "block": BLOCKS, "head": HEADS, "token": TOKENS, "kv": 2, "dim": DIM}
WORD = {"L": "layer", "B": "block", "H": "head", "N": "token", "C": "dim"}

ATTENTION = (
    Axis("kv", 0, 2, 2, 0),
    Axis("head", 4, 8, 12, 0),
    Axis("token", 0, TOKENS, TOKENS, 0),
    Axis("dim", 0, DIM, DIM, 0),
)
LATENT = (Axis("token", 0, TOKENS, TOKENS, 0), Axis("dim", 0, DIM, DIM, 0))


def held(axes: tuple[Axis, ...] = ATTENTION, layers: int = LAYERS, dtype: str = "float16") -> list[Page]:
    return [Page.of(LocalTensor(f"layers.{i}.attn", "attn", dtype, axes)) for i in range(layers)]


def pattern(order: str, kv: str) -> list[str]:
    """The dimensions of a pool as words, written out per form."""
    words = [WORD[letter] for letter in order]
    if kv == "content":
        words.insert(words.index("dim"), "kv")
    if kv == "axis":
        words.insert(max(words.index("layer"), words.index("block")) + 1, "kv")
    return words


def of_array(array: np.ndarray, words: list[str], layer: int) -> View:
    """The view of one layer of ``array``, by numpy's own strides."""
    one = array[tuple(layer if word == "layer" else slice(None) for word in words)]
    region = Region("pool", array.__array_interface__["data"][0], array.nbytes)
    inner = " ".join(word for word in words if word != "layer")
    return view_of(one, inner, name=f"layers.{layer}.attn", group="attn", region=region, shards={"head": (4, 8, 12)})


def places(view: View, region_offset: int = 0) -> tuple[object, ...]:
    return view.axes, view.block_stride_bytes, view.offset_bytes + region_offset


@pytest.mark.parametrize("kv", ["content", "axis"])
@pytest.mark.parametrize("order", ORDERS)
def test_each_order_is_the_array_that_its_letters_spell(order: str, kv: str) -> None:
    """Strides and offsets of every layer equal those of an array with the dimensions in that order."""
    words = pattern(order, kv)
    array = np.zeros([EXTENT[word] for word in words], np.float16)
    views, sizes = place_pool(Layout(order, kv), "pool", held(), BLOCKS)
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()])[:-1].tolist(), strict=True))
    expected = [places(of_array(array, words, layer)) for layer in range(LAYERS)]
    assert [places(view, starts[view.region]) for view in views] == expected
    assert sum(sizes.values()) == array.nbytes


@pytest.mark.parametrize("order", ORDERS)
def test_split_keeps_each_half_as_an_order_of_its_own(order: str) -> None:
    """K and V lie each in its own region, with the strides of a pool that has no kv."""
    words = [WORD[letter] for letter in order]
    array = np.zeros([EXTENT[word] for word in words], np.float16)
    views, sizes = place_pool(Layout(order, "split"), "pool", held(layers=1), BLOCKS)
    one = array[tuple(slice(0, 1) if word == "layer" else slice(None) for word in words)].copy()
    expected = of_array(one, words, 0)
    for view, suffix, half in zip(views, (".k", ".v"), range(2), strict=True):
        assert view.region.endswith(suffix)
        assert [a for a in view.axes if a.name == "kv"] == [Axis("kv", half, half + 1, 2, 0)]
        assert tuple(a for a in view.axes if a.name != "kv") == expected.axes
        assert view.block_stride_bytes == expected.block_stride_bytes
    assert set(sizes.values()) == {one.nbytes}


@pytest.mark.parametrize("kv", KV_FORMS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_latent_ignores_the_head_letter_and_the_kv_form(order: str, kv: str) -> None:
    """A tensor without head and kv lies as one with a single head and no kv would, in one region per pool."""
    words = [WORD[letter] for letter in order if letter != "H"]
    array = np.zeros([EXTENT[word] for word in words], np.float16)
    views, sizes = place_pool(Layout(order, kv), "pool", held(LATENT), BLOCKS)
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()])[:-1].tolist(), strict=True))
    strides = dict(zip(words, array.strides, strict=True))
    for layer, view in enumerate(views):
        assert [(a.name, a.stride_bytes) for a in view.axes] == [("token", strides["token"]), ("dim", 2)]
        assert view.block_stride_bytes == strides["block"]
        assert starts[view.region] + view.offset_bytes == layer * strides["layer"]


@pytest.mark.parametrize("kv", ["content", "axis"])
@pytest.mark.parametrize("order", ORDERS)
def test_kernel_blocks_make_a_pool_of_smaller_blocks(order: str, kv: str) -> None:
    """A pool of B blocks of 6 tokens in kernel blocks of 2 is the pool of 3*B blocks of 2 tokens."""
    small = tuple(Axis("token", 0, 2, 2, 0) if axis.name == "token" else axis for axis in ATTENTION)
    whole, sizes = place_pool(Layout(order, kv, kernel_tokens=2), "pool", held(), BLOCKS)
    pieces, piece_sizes = place_pool(Layout(order, kv), "pool", held(small), BLOCKS * 3)
    assert sizes == piece_sizes
    for view, piece in zip(whole, pieces, strict=True):
        outer = next(axis for axis in view.axes if axis.name == "token")
        assert outer == Axis("token", 0, 3, 3, piece.block_stride_bytes)
        assert tuple(axis for axis in view.axes if axis is not outer) == piece.axes
        assert view.block_stride_bytes == 3 * piece.block_stride_bytes
        assert view.offset_bytes == piece.offset_bytes


def test_only_content_axes_have_an_order_of_their_own() -> None:
    """A tensor may list kv, heads and slots in any order: the layout decides where they are."""
    for kv in KV_FORMS:
        layout = Layout("LBNHC", kv)
        assert place_pool(layout, "pool", held(ATTENTION[::-1]), BLOCKS) == place_pool(layout, "pool", held(), BLOCKS)


def test_a_kernel_block_as_large_as_the_block_changes_nothing() -> None:
    """One kernel block a block leaves the token axis a single digit."""
    layout = Layout("LBNHC", kernel_tokens=TOKENS)
    assert place_pool(layout, "pool", held(), BLOCKS) == place_pool(Layout("LBNHC"), "pool", held(), BLOCKS)


def test_kernel_blocks_must_divide_the_block() -> None:
    """4 slots do not divide 6: both numbers are named."""
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .*tokens_per_block 6, got 4"):
        place_pool(Layout(kernel_tokens=4), "pool", held(), BLOCKS)


def test_pad_follows_each_block() -> None:
    """In LBHNC, blocks step over the pad, and nothing inside a block moves."""
    plain, sizes = place_pool(Layout("LBHNC"), "pool", held(), BLOCKS)
    padded, padded_sizes = place_pool(Layout("LBHNC", pad_bytes=24), "pool", held(), BLOCKS)
    for before, after in zip(plain, padded, strict=True):
        assert after.axes == before.axes
        assert after.block_stride_bytes == before.block_stride_bytes + 24
    assert [size + 24 * BLOCKS for size in sizes.values()] == list(padded_sizes.values())


def test_a_head_outside_the_block_steps_over_every_padded_block() -> None:
    """In LHBNC a head's stride is the whole pool of its blocks, pads included."""
    view = place_pool(Layout("LHBNC", pad_bytes=24), "pool", held(), BLOCKS)[0][0]
    block = TOKENS * 2 * DIM * 2 + 24
    assert view.block_stride_bytes == block
    assert view.axes[0] == Axis("head", 4, 8, 12, BLOCKS * block)


def test_pad_of_a_block_that_holds_all_layers_comes_once() -> None:
    """In BLHNC the pad follows the last layer of a block, not each layer."""
    views, sizes = place_pool(Layout("BLHNC", pad_bytes=24), "pool", held(), BLOCKS)
    page = HEADS * TOKENS * 2 * DIM * 2
    assert [view.offset_bytes for view in views] == [0, page, 2 * page]
    assert {view.block_stride_bytes for view in views} == {LAYERS * page + 24}
    assert sizes == {"pool": BLOCKS * (LAYERS * page + 24)}


@pytest.mark.parametrize("order", ORDERS)
def test_regions_hold_one_layer_or_all(order: str) -> None:
    """Orders with the layer slowest register a region per layer, the others one for the pool."""
    _, sizes = place_pool(Layout(order), "pool", held(), BLOCKS)
    assert list(sizes) == ([page.name for page in held()] if order[0] == "L" else ["pool"])


@pytest.mark.parametrize("kernel", [None, 3])
@pytest.mark.parametrize("kv", KV_FORMS)
@pytest.mark.parametrize("order", ORDERS)
def test_views_fill_their_regions_and_share_no_byte(order: str, kv: str, kernel: int | None) -> None:
    """Without pad every byte of every region belongs to exactly one element."""
    views, sizes = place_pool(Layout(order, kv, 0, kernel), "pool", held(), BLOCKS)
    regions = [Region(name, i << 20, size) for i, (name, size) in enumerate(sizes.items())]
    Worker("e", 0, regions, [Group("attn", TOKENS)], views)
    assert sum(view.block_bytes * BLOCKS for view in views) == sum(sizes.values())
    assert sum(sizes.values()) == math.prod(EXTENT.values()) * 2


def test_a_state_has_no_token_slots() -> None:
    """A tensor of a state group keeps its content axes in their order, slowest first."""
    axes = (Axis("step", 0, 3, 3, 0), Axis("channel", 8, 16, 32, 0))
    (view,), sizes = place_pool(
        Layout("LBHNC"), "pool", [Page.of(LocalTensor("layers.0.conv", "state", "bfloat16", axes))], BLOCKS
    )
    assert view.axes == (Axis("step", 0, 3, 3, 16), Axis("channel", 8, 16, 32, 2))
    assert sizes == {"layers.0.conv": BLOCKS * 48}


def test_a_pool_of_one_block_keeps_its_stride() -> None:
    """The block stride does not depend on how many blocks there are."""
    (one, *_), _ = place_pool(Layout("LBHNC"), "pool", held(), 1)
    assert one.block_stride_bytes == HEADS * TOKENS * 2 * DIM * 2


def test_layers_of_one_pool_have_one_shape() -> None:
    """Pages of unequal size in one region are refused by name."""
    other = Page.of(LocalTensor("layers.9.attn", "attn", "float16", LATENT))
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .*'layers\.9\.attn'"):
        place_pool(Layout("BLHNC"), "pool", [*held(), other], BLOCKS)


def test_layers_of_unequal_shape_may_have_regions_of_their_own() -> None:
    """If the layer is the slowest dimension, no region is shared, so pages may differ."""
    other = Page.of(LocalTensor("layers.9.attn", "attn", "float16", LATENT))
    assert len(place_pool(Layout("LBHNC"), "pool", [*held(), other], BLOCKS)[0]) == LAYERS + 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"order": "HND"}, r"layout: expected one of LBHNC, .*, BHLNC, got 'HND' \(vLLM's HND is LBHNC\)"),
        ({"order": "lbhnc"}, r"layout: .*, got 'lbhnc' \(L layer, B block, H head, N token, C content\)"),
        ({"order": ""}, "layout: .*, got ''"),
        ({"order": 5}, "layout: .*, got 5"),
        ({"order": None}, "layout: .*, got None"),
        ({"kv": "interleaved"}, "kv: expected one of content, axis, split, got 'interleaved'"),
        ({"conv": "NHC"}, "conv: expected one of DS, SD, got 'NHC'"),
    ],
)
def test_an_unknown_word_lists_the_known_ones(options: dict[str, Any], text: str) -> None:
    """Any other order, kv form or order of the convolution is refused with all that there are."""
    with pytest.raises(KVPlanError, match=f"^LAYOUT: .*cannot read {text}"):
        Layout(**options)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"pad_bytes": -1}, "RANGE"),
        ({"pad_bytes": True}, "TYPE"),
        ({"pad_bytes": 1.0}, "TYPE"),
        ({"kernel_tokens": 0}, "RANGE"),
        ({"kernel_tokens": "16"}, "TYPE"),
    ],
)
def test_numbers_of_a_layout_are_exact_integers(options: dict[str, Any], code: str) -> None:
    """Bools, floats, strings and numbers out of range are refused."""
    with pytest.raises(KVPlanError, match=f"^{code}: "):
        Layout(**options)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_has_blocks(num_blocks: int) -> None:
    """A pool of no blocks is refused."""
    with pytest.raises(KVPlanError, match=r"^RANGE: .*num_blocks"):
        place_pool(Layout(), "pool", held(), num_blocks)


@pytest.mark.parametrize("axis", ["layer", "block"])
def test_a_tensor_has_no_axis_that_the_pool_has(axis: str) -> None:
    """Layers and blocks are the pool's own dimensions."""
    with pytest.raises(KVPlanError, match=axis) as caught:
        LocalTensor("layers.0.attn", "attn", "float16", (Axis(axis, 0, 4, 4, 0),))
    assert caught.value.code == "AXES"


def test_an_unknown_dtype_is_refused() -> None:
    """Strides need an element size."""
    with pytest.raises(KVPlanError, match=r"^DTYPE: .*int4"):
        held(dtype="int4")


@pytest.mark.parametrize("order", CONV_ORDERS)
@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (1, 2), (2, 3)])
def test_a_convolution_is_one_array(order: str, rank: int, tp: int) -> None:
    """x, B and C lie as slices of the engine's [channel, step] or [step, channel] array, with the SSM behind it."""
    layer = mamba2(6, 4, 2, 8, 3, "float16", "float32")
    *conv, ssm = (LocalTensor(t.kind, t.group, t.dtype or "", t.local_axes(rank, tp)) for t in layer)
    made = Page("state", (tuple(conv), (ssm,)))
    views, sizes = place_pool(Layout(conv=order), "state", [made], BLOCKS)
    widths = [tensor.axes[0].extent for tensor in conv]
    total = sum(widths)
    stride = 2 * total * 3 + ssm.block_bytes
    assert sizes == {"state": BLOCKS * stride}
    memory = np.zeros((BLOCKS, stride), np.uint8)
    rows = memory[:, : 2 * total * 3].view(np.float16)
    array = rows.reshape(BLOCKS, *((total, 3) if order == "DS" else (3, total)))
    base = memory.__array_interface__["data"][0]
    start = 0
    for tensor, view, width in zip(conv, views, widths, strict=False):
        part = array[:, start : start + width] if order == "DS" else array[:, :, start : start + width]
        shards = {axis.name: (axis.start, axis.stop, axis.size) for axis in tensor.axes}
        words = "block channel step" if order == "DS" else "block step channel"
        region = Region("state", base, memory.nbytes)
        expected = view_of(part, words, name=tensor.name, group="state", region=region, shards=shards)
        assert sorted(map(str, view.axes)) == sorted(map(str, expected.axes))
        assert (view.offset_bytes, view.block_stride_bytes) == (expected.offset_bytes, expected.block_stride_bytes)
        start += width
    assert views[-1].offset_bytes == 2 * total * 3
    assert views[-1].block_bytes == ssm.block_bytes


SLOTS = Axis("token", 0, 4, 4, 0)


def two(apart: bool, **axes: int) -> Page:
    """A tensor of 2 heads of 8 bytes and one of ``axes``, in two sections or in one."""
    first = LocalTensor("a", "g", "uint8", (Axis("head", 0, 2, 2, 0), SLOTS, Axis("dim", 0, 8, 8, 0)))
    second = LocalTensor("b", "g", "uint8", (*(Axis(key, 0, size, size, 0) for key, size in axes.items()), SLOTS))
    return Page("page", ((first,), (second,)) if apart else ((first, second),))


@pytest.mark.parametrize(("apart", "offset", "head"), [(False, 8, 4 * 10), (True, 64, 4 * 2)])
def test_sections_follow_one_another(apart: bool, offset: int, head: int) -> None:
    """Tensors of one section alternate slot by slot; two sections follow each other. The page has the same size."""
    views, sizes = place_pool(Layout(), "pool", [two(apart, head=2, scale=2)], 3)
    assert views[1].offset_bytes == offset
    assert views[1].axes[0].stride_bytes == head
    assert sizes == {"page": 3 * (64 + 16)}
    assert page_stride(Layout(), two(apart, head=2, scale=2)) == 64 + 16


def test_tensors_of_one_section_have_one_set_of_heads() -> None:
    """A tensor without the heads of its section is refused."""
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .*place tensor 'b' in region 'page'"):
        place_pool(Layout(), "pool", [two(False, scale=2)], 3)
    place_pool(Layout(), "pool", [two(True, scale=2)], 3)


def test_heads_outside_a_page_are_those_of_all_its_sections() -> None:
    """If heads are outside the page, a section without them is refused."""
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .*place tensor 'b' in region 'page'"):
        place_pool(Layout("LHBNC"), "pool", [two(True, scale=2)], 3)


def test_pages_of_one_pool_have_equal_sections() -> None:
    """A layer with one more tensor is refused by name."""
    page = two(True, scale=2)
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .*2 tensors in 2 sections"):
        place_pool(Layout("BLHNC"), "pool", [Page("first", page.sections[:1]), page], 3)


def test_a_page_that_splits_has_k_and_v_throughout() -> None:
    """If K and V are split, a page refuses a tensor that has neither."""
    page = Page("page", (two(True, kv=2, scale=2).sections[1], two(True, scale=2).sections[0]))
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .*split page 'page' into K and V: .* got none in 'a'"):
        place_pool(Layout(kv="split"), "pool", [page], 3)


@pytest.mark.parametrize("value", [1 << 20000, np.True_, np.int64(3), b"LBHNC", ["LBHNC"]], ids=type)
def test_a_word_of_another_type_is_refused_with_plain_details(value: Any) -> None:
    """However large it is: no error of Python's own, and no value of numpy's in a message or its details."""
    model = Model.shipped("qwen3-0.6b")
    refusals: list[Callable[[], Any]] = [
        *(partial(model.engine, "e", **{key: value}) for key in ("layout", "kv", "conv_order", "scales")),
        *(partial(model.kernel_blocks, kv=value), partial(Model.shipped, value)),
        partial(Model.from_config, {"model_type": value}),
    ]
    for refused in refusals:
        with pytest.raises(KVPlanError) as caught:
            refused()
        assert {type(detail) for detail in caught.value.details.values()} <= {str, type(None)}
        assert "np." not in str(caught.value)
