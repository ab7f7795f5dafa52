"""Bounds: whatever two offers describe, planning ends with a plan or a RANGE error, in bounded memory."""

from __future__ import annotations

import tracemalloc

from hypothesis import assume, event, example, given, reject
from hypothesis import strategies as st

from kvplan import Axis, Blocks, Budget, Context, Group, KVPlanError, Region, View, Worker, plan_reads

BUDGET = 1 << 22
"""The bytes of a small budget, so that memory shows what it holds back and examples take little time."""

MOST_BYTES = BUDGET + BUDGET // 2
"""Of planning in that budget, with what every plan needs, and with arrays that steps make on the way."""


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
    """About as many slots as a small budget allows, with a gap after each of 4 heads and after the block."""
    axes = [Axis("token", 0, 3600, 3600, 260), Axis("head", 0, 4, 4, 65)]
    view = View("layers.0", "g", "r", "uint8", axes, 4, 260 * 3600 + 8)
    return Worker(engine, 0, [Region("r", 0, view.end_bytes)], [Group("g", 3600)], [view])


@given(offers())
@example((most("d"), most("s")))
def test_planning_is_bounded(pair: tuple[Worker, Worker]) -> None:
    """Planning, counting and binding use memory for their limits, however large the numbers in an offer are."""
    local, remote = pair
    outcome = "planned"
    tracemalloc.start()
    try:
        plan = plan_reads(local, [remote], budget=Budget(BUDGET))
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
