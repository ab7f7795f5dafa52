"""States: which rank holds which channels, and how a page of them lies in memory."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import KVPlanError, Region, view_of
from kvplan.models.layouts import CONV_ORDERS, Held, Layout, Page
from kvplan.models.pools import place
from kvplan.models.states import delta, mamba1, mamba2
from kvplan.models.tensors import Layer

BLOCKS, STEPS = 3, 3


def page(layer: Layer, rank: int, tp: int) -> Page:
    held = {t.kind: Held(t.kind, t.group, t.dtype or "", t.parts(rank, tp)) for t in layer}
    *conv, ssm = held.values()
    return Page("state", (tuple(conv), (ssm,)))


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 6, 8, 12, 16, 24])
@pytest.mark.parametrize("groups", [1, 2, 3, 8, 24])
def test_a_rank_holds_the_groups_of_its_heads(groups: int, tp: int) -> None:
    """Head h uses group h * G // H; a rank has exactly those of its heads, fewer, as many or more than ranks."""
    heads = 24
    x, b, c, ssm = mamba2(heads, 4, groups, 8, STEPS, "bfloat16", "float32")
    for rank in range(tp):
        used = {head * groups // heads for head in ssm.units(rank, tp)}
        assert set(b.units(rank, tp)) == set(c.units(rank, tp)) == used
        assert x.units(rank, tp) == ssm.units(rank, tp)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8, 16, 32])
def test_a_rank_holds_the_key_heads_of_its_value_heads(tp: int) -> None:
    """Of 16 key heads and 32 value heads, q and k follow the value heads that use them."""
    q, k, v, ssm = delta(16, 4, 32, 4, STEPS, "bfloat16", "float32")
    for rank in range(tp):
        used = {head // 2 for head in v.units(rank, tp)}
        assert set(q.units(rank, tp)) == set(k.units(rank, tp)) == used
        assert v.units(rank, tp) == ssm.units(rank, tp)


@pytest.mark.parametrize("order", CONV_ORDERS)
@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (1, 2), (2, 3)])
def test_a_convolution_is_one_array(order: str, rank: int, tp: int) -> None:
    """x, B and C lie as slices of the engine's [channel, step] or [step, channel] array, with the SSM behind it."""
    made = page(mamba2(6, 4, 2, 8, STEPS, "float16", "float32"), rank, tp)
    views, sizes = place(Layout(conv=order), "state", [made], BLOCKS)
    conv, (ssm,) = made.strips
    widths = [tensor.axes[0].extent for tensor in conv]
    total = sum(widths)
    stride = 2 * total * STEPS + ssm.block_bytes
    assert sizes == {"state": BLOCKS * stride}
    memory = np.zeros((BLOCKS, stride), np.uint8)
    rows = memory[:, : 2 * total * STEPS].view(np.float16)
    array = rows.reshape(BLOCKS, *((total, STEPS) if order == "DS" else (STEPS, total)))
    base = memory.__array_interface__["data"][0]
    start = 0
    for tensor, view, width in zip(conv, views, widths, strict=False):
        part = array[:, start : start + width] if order == "DS" else array[:, :, start : start + width]
        parts = {axis.name: (axis.start, axis.stop, axis.size) for axis in tensor.axes}
        words = "block channel step" if order == "DS" else "block step channel"
        region = Region("state", base, memory.nbytes)
        expected = view_of(part, words, name=tensor.name, group="state", region=region, parts=parts)
        assert sorted(map(str, view.axes)) == sorted(map(str, expected.axes))
        assert (view.offset_bytes, view.block_stride_bytes) == (expected.offset_bytes, expected.block_stride_bytes)
        start += width
    assert views[-1].offset_bytes == 2 * total * STEPS
    assert views[-1].block_bytes == ssm.block_bytes


def test_a_mamba_layer_divides_channel_by_channel() -> None:
    """Without heads any number of ranks has its share of channels, in the convolution and in the SSM."""
    x, ssm = mamba1(10, 4, STEPS, "bfloat16", "float32")
    assert [x.units(rank, 3) for rank in range(3)] == [range(4), range(3, 7), range(6, 10)]
    assert [ssm.units(rank, 3) for rank in range(3)] == [range(4), range(3, 7), range(6, 10)]


def test_an_unknown_order_lists_both() -> None:
    """A convolution's state is channels outside steps or steps outside channels."""
    with pytest.raises(KVPlanError, match="cannot read conv: expected one of DS, SD, got 'NHC'") as caught:
        Layout(conv="NHC")
    assert caught.value.code == "LAYOUT"
