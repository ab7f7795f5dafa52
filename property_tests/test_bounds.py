"""Bounds: whatever two offers describe, planning ends with a plan or a RANGE error, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import assume, event, example, given, reject
from hypothesis import strategies as st

from kvplan import Axis, Blocks, Context, Group, KVPlanError, Region, View, Worker, plan_reads

SMALLER = 8
"""Limits are divided by two to this power, so that memory shows what they hold back and examples take little time."""

LIMITS = {
    "kvplan.describe.axes.MAX_SEGMENTS": 20,
    "kvplan.describe.worker.MAX_SEGMENTS": 20,
    "kvplan.plan.cells.MAX_SEGMENTS": 20,
    "kvplan.plan.cells.MAX_CELLS": 14,
    "kvplan.plan.cells.MAX_HELD": 26,
    "kvplan.plan.match.MAX_HELD": 26,
    "kvplan.plan.runs.MAX_TOKEN_RUNS": 22,
    "kvplan.plan.rows.MAX_SLOTS": 23,
    "kvplan.plan.cost.MAX_COUNTED": 24,
    "kvplan.plan.bind.MAX_IDS": 28,
}
"""Each limit's power of two."""

MOST_BYTES = 52 << 20
"""Of planning with the smaller limits; with those of the package it is 256 times as much, 13 GiB.

The most that was found is 47.9 MiB, of :func:`most`.
"""


@pytest.fixture(autouse=True, scope="module")
def _smaller_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, power in LIMITS.items():
            patch.setattr(name, 1 << power - SMALLER)
        yield


def numbers(most: int) -> st.SearchStrategy[int]:
    """Numbers of any size alike, not only small or large ones."""
    return st.integers(0, most.bit_length() - 1).flatmap(lambda bits: st.integers(1 << bits, min(2 << bits, most)))


@st.composite
def offers(draw: st.DrawFn) -> tuple[Worker, Worker]:
    """Two workers with the same tensors: axes nested in any order with any gaps, block sizes, contexts and digits."""
    layers, size = draw(numbers(64)), draw(numbers(1 << 10))
    state = draw(st.integers(0, 5)) == 0
    steps = draw(st.lists(st.sampled_from([0, 1, 8]), min_size=3, max_size=3))

    def side(engine: str) -> Worker:
        outer = 1 if state or draw(st.booleans()) else draw(numbers(1 << 9))
        slots = 1 if state else outer * draw(numbers(1 << 20 if outer == 1 else 1 << 11))
        context = (
            Context(0, draw(numbers(1 << 8)), draw(numbers(1 << 8))) if draw(st.integers(0, 3)) == 0 else Context()
        )
        group = Group("g") if state else Group("g", slots, context)
        digits = [("dim", size), ("head", 4), *([] if state else [("token", slots // outer), ("token", outer)])]
        gaps = draw(st.lists(st.sampled_from([0, 0, 1, 64]), min_size=4, max_size=4))
        order = draw(st.permutations(range(len(digits))))
        regions, views, address = [], [], 0
        for layer in range(layers):
            span, axes = 1, dict[int, Axis]()
            for n, gap in zip(order, gaps, strict=False):
                name, extent = digits[n]
                stride = span + gap + steps[layer % 3]
                axes[n] = Axis(name, 0, extent, extent, stride)
                span += (extent - 1) * stride
            view = View(f"layers.{layer}", "g", f"r.{layer}", "uint8", [axes[n] for n in sorted(axes)][::-1], 4, span)
            assume(address + view.end_bytes < 1 << 63)
            regions.append(Region(view.region, address, view.end_bytes))
            views.append(view)
            address += view.end_bytes
        try:
            return Worker(engine, 0, regions, [group], views)
        except KVPlanError as error:  # decode refuses such an offer
            assert error.code == "RANGE"
            reject()

    return side("d"), side("s")


def most(engine: str) -> Worker:
    """As many slots as the smaller limits allow, with a gap after each of 4 heads and after the block."""
    axes = [Axis("token", 0, 8192, 8192, 260), Axis("head", 0, 4, 4, 65)]
    view = View("layers.0", "g", "r", "uint8", axes, 4, 260 * 8192 + 8)
    return Worker(engine, 0, [Region("r", 0, view.end_bytes)], [Group("g", 8192)], [view])


@given(offers())
@example((most("d"), most("s")))
def test_planning_is_bounded(pair: tuple[Worker, Worker]) -> None:
    """Planning, counting and binding use memory for their limits, however large the numbers in an offer are."""
    local, remote = pair
    outcome = "planned"
    tracemalloc.start()
    try:
        plan = plan_reads(local, [remote])
        plan.cost()
        plan.bind(local={"g": Blocks([0])}, remote={"g": Blocks(range(4))}, tokens={"g": (0, 1)})
    except KVPlanError as error:
        outcome = error.code
        assert outcome in {"RANGE", "COVER", "BLOCKS"}, error
        assert len(str(error)) < 10_000
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    event(outcome)
    assert peak < MOST_BYTES, f"{peak} bytes"
