"""Caches: scales, packed values and pages of several tensors."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan import Axis, KVPlanError
from kvplan.models.layouts import Held, Layout, Page
from kvplan.models.pools import page_bytes, place
from kvplan.models.tensors import Tensor, attention, latent, packed_bytes, quantized, sparse_latent

TOKENS = Axis("token", 0, 4, 4, 0)


@pytest.mark.parametrize(("elements", "bits", "size"), [(128, 4, 64), (16, 6, 12), (5, 8, 5), (8, 1, 1)])
def test_packed_bytes(elements: int, bits: int, size: int) -> None:
    """Elements stand side by side, bit after bit."""
    assert packed_bytes(elements, bits, "a head") == size


def test_a_byte_that_is_not_full_is_refused() -> None:
    """3 elements of 4 bits end inside a byte."""
    with pytest.raises(KVPlanError, match="pack a head into bytes: expected a whole number of bytes") as caught:
        packed_bytes(3, 4, "a head")
    assert (caught.value.code, dict(caught.value.details)) == ("SIZE", {"elements": 3, "bits": 4})


def test_scales_divide_like_their_heads() -> None:
    """Whichever heads a rank holds, it holds their scales."""
    values, scales = quantized(attention(12, 128), 8, "float32", None)
    for tp in (1, 5, 12, 24):
        for rank in range(tp):
            assert values.units(rank, tp) == scales.units(rank, tp)
    assert dict(scales.axes)["scale"] == 1


@pytest.mark.parametrize("layer", [latent(12, 4), sparse_latent(128, 64, 128)])
def test_latents_are_not_scaled_by_head(layer: Any) -> None:
    """What has no heads stays as it is."""
    assert quantized(layer, 8, "float32", None) == layer


@pytest.mark.parametrize(
    ("options", "code"), [((8, "float32", 3), "SIZE"), ((8, "fp4", None), "DTYPE"), ((0, "float32", None), "RANGE")]
)
def test_scales_that_cannot_be_are_refused(options: tuple[int, str, int | None], code: str) -> None:
    """Scales divide a head, and are of a known dtype."""
    with pytest.raises(KVPlanError) as caught:
        quantized(attention(2, 8), *options)
    assert caught.value.code == code


def test_holders_are_counted_rank_by_rank() -> None:
    """The fewest ranks that hold a shard are those that its units name, for any number of ranks and shards."""
    for shards in range(1, 9):
        tensor = Tensor("t", "g", (("head", shards),), sharded="head", shards=shards)
        for ranks in range(1, 20):
            held = [sum(unit in tensor.units(rank, ranks) for rank in range(ranks)) for unit in range(shards)]
            assert tensor.holders(ranks) == min(held)
    assert latent(12, 4)[0].holders(7) == 7


def two(strips: bool, **axes: int) -> Page:
    """A tensor of 2 heads of 8 bytes and one of ``axes``, as two strips or as one."""
    first = Held("a", "g", "uint8", (Axis("head", 0, 2, 2, 0), TOKENS, Axis("dim", 0, 8, 8, 0)))
    second = Held("b", "g", "uint8", (*(Axis(key, 0, size, size, 0) for key, size in axes.items()), TOKENS))
    return Page("page", ((first,), (second,)) if strips else ((first, second),))


@pytest.mark.parametrize(("strips", "offset", "head"), [(False, 8, 4 * 10), (True, 64, 4 * 2)])
def test_strips_follow_one_another(strips: bool, offset: int, head: int) -> None:
    """Tensors of one strip alternate by slot, tensors of two stand one behind the other, in a page of one size."""
    views, sizes = place(Layout(), "pool", [two(strips, head=2, scale=2)], 3)
    assert views[1].offset_bytes == offset
    assert views[1].axes[0].stride_bytes == head
    assert sizes == {"page": 3 * (64 + 16)}
    assert page_bytes(Layout(), two(strips, head=2, scale=2)) == 64 + 16


def test_tensors_of_one_strip_have_one_set_of_heads() -> None:
    """A tensor without the heads of the strip it stands in is refused."""
    with pytest.raises(KVPlanError, match="place tensor 'b' in region 'page'") as caught:
        place(Layout(), "pool", [two(False, scale=2)], 3)
    assert caught.value.code == "LAYOUT"
    place(Layout(), "pool", [two(True, scale=2)], 3)


def test_heads_outside_a_page_are_those_of_all_its_strips() -> None:
    """Where heads stand outside the page, a strip without them has no place."""
    with pytest.raises(KVPlanError, match="place tensor 'b' in region 'page'") as caught:
        place(Layout("LHBNC"), "pool", [two(True, scale=2)], 3)
    assert caught.value.code == "LAYOUT"


def test_pages_of_one_pool_have_equal_strips() -> None:
    """A layer with one tensor more is refused by name."""
    page = two(True, scale=2)
    with pytest.raises(KVPlanError, match="2 tensors in 2 strips") as caught:
        place(Layout("BLHNC"), "pool", [Page("first", page.strips[:1]), page], 3)
    assert caught.value.code == "LAYOUT"


def test_a_page_that_splits_has_k_and_v_throughout() -> None:
    """A tensor without K and V has no place in a page of which half lies elsewhere."""
    page = Page("page", (two(True, kv=2, scale=2).strips[1], two(True, scale=2).strips[0]))
    with pytest.raises(KVPlanError, match=r"split page 'page' into K and V: .* got none in 'a'") as caught:
        place(Layout(kv="split"), "pool", [page], 3)
    assert caught.value.code == "LAYOUT"
