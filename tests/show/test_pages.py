"""Pages: what one block looks like, for every kind of cache and layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvplan import Axis, Group, Model, Region, View, Worker
from kvplan.show.bands import Band
from kvplan.show.pages import Page, pages

LLAMA = Model.shipped("llama-3.1-8b")
GRANITE = Model.shipped("granite-4.0-h-tiny")


def chains(bands: Sequence[Band], base: int = 0, outer: tuple[str, ...] = ()) -> Iterator[str]:
    """Each way from a page to elements, one axis after another, without the elements."""
    for band in bands:
        if band.inside:
            yield from chains(band.inside, base + band.offset_bytes, (*outer, str(band)))
        else:
            yield f"{band.tensor} at {base + band.offset_bytes}: {', '.join(outer)}"


def only(model: Model, **options: Any) -> Page:
    (page,) = pages(model.engine("e", **options)[0])
    return page


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
    page = only(LLAMA, tp=4, layout=layout, num_blocks=10)
    assert list(chains(page.whole)) == [f"attn at 0: {expected}"]
    assert (page.title, len(page.places)) == ("layers.0-31.attn", 32)


def test_k_and_v_apart_are_two_pages() -> None:
    """K and V in regions of their own are a page each, and the page says which it is."""
    found = pages(LLAMA.engine("e", tp=8, kv="split", num_blocks=10)[3])
    assert [list(chains(page.whole)) for page in found] == [
        ["attn at 0: head 1 x 4096, kv 1 x 4096, token 16 x 256"]
    ] * 2
    steps = [[str(step) for step in next(page.boxes(0, 256)).steps] for page in found]
    assert steps == [["3", "K", "0"], ["3", "V", "0"]]


def test_latents_have_no_heads() -> None:
    """A latent is tokens alone."""
    page = only(Model.shipped("deepseek-v3"), num_blocks=10)
    assert list(chains(page.bands)) == ["attn at 0: token 16 x 1152"]


def test_an_indexer_has_a_page_of_its_own() -> None:
    """Keys and scales of an indexer stand one behind the other in their own page."""
    _, index = pages(Model.shipped("deepseek-v3.2").engine("e", num_blocks=10)[0])
    assert list(chains(index.bands)) == ["index at 0: token 16 x 128", "index.scale at 2048: token 16 x 4"]
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
def test_scales_nest_where_they_stand(scales: str, expected: list[str]) -> None:
    """Inline scales are inside each token of each head; those of a page follow all heads' data."""
    page = only(LLAMA.quantized(8), tp=4, scales=scales, num_blocks=10)
    assert list(chains(page.bands)) == expected


def test_states_are_tensors_one_behind_another() -> None:
    """A state is its convolution, then its SSM state; with steps outside, the parts of the convolution alternate."""
    channels, steps = (pages(GRANITE.engine("e", tp=2, conv_order=order, num_blocks=3)[0])[0] for order in ("DS", "SD"))
    assert [band.tensor for band in channels.bands] == ["conv.x", "conv.B", "conv.C", "ssm"]
    assert [(band.tensor, str(band)) for band in steps.bands] == [
        ("conv.x + conv.B + conv.C", "step 3 x 3584"),
        ("ssm", "head 24 x 32768"),
    ]
    assert channels.title == "layers.0-4,6-14,16-24,26-34,36-39.{conv.x, conv.B, conv.C, ssm}"


def test_groups_over_each_other_leave_a_rest() -> None:
    """Where a hybrid pool gives small pages the room of large ones, the page says how much is left."""
    state, attn = pages(GRANITE.engine("e", tp=2, shared=True, num_blocks=3)[0])
    assert (state.size_bytes, state.rest_bytes) == (797184, 0)
    assert (attn.size_bytes, attn.rest_bytes) == (16384, 797184 - 16384)
    assert (attn.group, len(attn.places)) == ("attn", 4)


def test_padding_is_a_rest() -> None:
    """Bytes between blocks that belong to nobody follow the page."""
    assert only(LLAMA, tp=4, pad=4096, num_blocks=10).rest_bytes == 4096


def test_kernel_blocks_are_digits() -> None:
    """A token axis of two digits whose bytes are apart has a band for each."""
    page = only(LLAMA, tp=4, kv="axis", tokens_per_block=64, kernel_tokens=16, num_blocks=10)
    assert list(chains(page.bands)) == ["attn at 0: token 4 x 16384, kv 2 x 8192, head 2 x 4096, token 16 x 256"]
    assert [str(step) for step in next(page.boxes(16384 + 512, 16384 + 1024)).steps] == ["16-31", "K", "0", "18-19"]


def test_dense_digits_are_one_band() -> None:
    """Kernel blocks that follow each other without a gap look like one block."""
    page = only(Model.shipped("deepseek-v3"), tokens_per_block=64, kernel_tokens=16, num_blocks=10)
    assert list(chains(page.bands)) == ["attn at 0: token 64 x 1152"]


def test_layers_that_differ_are_told_apart() -> None:
    """Layers are one page only if they are equal in all but place."""
    region = Region("kv", 4096, 1 << 20)
    axes = [(Axis("token", 0, 4, 4, 8 * wide), Axis("dim", 0, wide, wide, 8)) for wide in (1, 2, 2)]
    views = [View(f"layers.{i}.k", "g", region, "float64", each, 4, 1024, 64 * i) for i, each in enumerate(axes)]
    found = pages(Worker("e", 0, [region], [Group("g", 4)], views))
    assert [page.title for page in found] == ["layers.0.k", "layers.1-2.k"]


def test_names_without_numbers_are_pages_of_their_own() -> None:
    """Tensors without a number are no layers: each is a page, and the next one is no rest of it."""
    region = Region("kv", 4096, 4096)
    axes = (Axis("token", 0, 4, 4, 16), Axis("dim", 0, 2, 2, 8))
    views = [View(name, "g", region, "float64", axes, 4, 128, 64 * i) for i, name in enumerate("kv")]
    found = pages(Worker("e", 0, [region], [Group("g", 4)], views))
    assert [(page.title, page.rest_bytes) for page in found] == [("k", 0), ("v", 0)]


def test_a_worker_without_views_has_no_pages() -> None:
    """A worker that keeps nothing has nothing to show."""
    assert pages(Worker("e", 0, (), (), ())) == ()


def bytes_of(page: Page, start: int, stop: int) -> list[str]:
    """The steps to each byte."""
    return [" ".join(map(str, box.steps)) for at in range(start, stop) for box in page.boxes(at, at + 1)]


def test_digits_that_do_not_nest_are_found_one_by_one() -> None:
    """Where the outer digit of an axis is the finer one in memory, neighbouring bytes are far apart on the axis."""
    region = Region("kv", 4096, 4096)
    axes = (Axis("token", 0, 2, 2, 1), Axis("token", 0, 4, 4, 2))
    (page,) = pages(Worker("e", 0, [region], [Group("g", 8)], [View("layers.0.k", "g", region, "uint8", axes, 4, 8)]))
    last = [step.rpartition(" ")[2] for step in bytes_of(page, 0, 8)]
    assert last == ["0", "4", "1", "5", "2", "6", "3", "7"]


def test_views_that_alternate_without_a_common_axis_are_told_apart() -> None:
    """Tensors whose bytes alternate along axes of different names are a band each, and bytes are found in them."""
    region = Region("kv", 4096, 4096)
    views = [
        View(f"layers.0.{axis}", "g", region, "uint8", (Axis(axis, 0, 3, 3, 4),), 4, 16, offset)
        for axis, offset in (("x", 0), ("y", 2))
    ]
    (page,) = pages(Worker("e", 0, [region], [Group("g")], views))
    assert [str(band) for band in page.bands] == ["x 3 x 4", "y 3 x 4"]
    assert bytes_of(page, 0, 12) == ["x 0", "y 0", "x 1", "y 1", "x 2", "y 2"]
