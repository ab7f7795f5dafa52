"""Cells: what the bytes of a block hold, for every kind of cache and layout."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan import Axis, Group, KVPlanError, Model, Region, View, Worker
from kvplan.display import blocks as module
from kvplan.display.blocks import DrawnLayer, layers_of

LLAMA = Model.shipped("llama-3.1-8b")
GRANITE = Model.shipped("granite-4.0-h-tiny")


def kinds(model: Model, **options: Any) -> dict[int, DrawnLayer]:
    """The last one of equal layers, of each kind."""
    return {id(layer.cells): layer for layer in layers_of(model.engine("e", **options)[0])}


@pytest.mark.parametrize(
    "layout, axes",
    [("LBHNC", "head token kv dim"), ("LBNHC", "token head kv dim"), ("BHLNC", "head token kv dim")],
)
def test_axes_are_in_the_order_of_memory(layout: str, axes: str) -> None:
    """From the slowest to the fastest; equal layers share their cells."""
    (layer,) = kinds(LLAMA, tp=4, layout=layout, num_blocks=10).values()
    assert layer.cells.axes == ("tensor", *axes.split())
    assert layer.names == ("layers.31.attn",)


def test_states_are_tensors_one_after_another() -> None:
    """Each has a name within its layer, and the axes that it has."""
    state, attention = kinds(GRANITE, num_blocks=10).values()
    assert state.cells.names == ("conv.x", "conv.B", "conv.C", "ssm")
    assert attention.cells.names == ("attn",)


def test_groups_over_each_other_leave_a_rest() -> None:
    """Where the blocks of a group are shorter than the pool that it shares, the rest belongs to others."""
    state, attention = kinds(GRANITE, num_blocks=10, shared=True).values()
    assert state.size_bytes + state.rest_bytes == attention.size_bytes + attention.rest_bytes
    assert state.rest_bytes or attention.rest_bytes


def test_too_many_cells_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there are any."""
    monkeypatch.setattr(module, "MAX_CELLS", 63)
    region = Region("kv", 4096, 1 << 20)
    axes = (Axis("token", 0, 64, 64, 16), Axis("dim", 0, 4, 4, 2))
    worker = Worker("e", 0, [region], [Group("attn", 64)], [View("layers.0", "attn", region, "float16", axes, 9, 1024)])
    with pytest.raises(
        KVPlanError, match=r"RANGE: cannot draw layers\.0: expected at most 63 cells of a block, got 64"
    ):
        layers_of(worker)
