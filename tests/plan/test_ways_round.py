"""Pairs that no single plan describes as they are, and the description or the two requests that move them."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import (
    Axis,
    Blocks,
    Context,
    Group,
    KVPlanError,
    Region,
    View,
    Worker,
    certify,
    plan_reads,
    verify,
    verify_together,
)
from kvplan.testing import assert_copies
from kvplan.verification import FakeMemory
from tests.small import engine


def plan_error(*given: Any) -> KVPlanError:
    """The error of planning a read."""
    with pytest.raises(KVPlanError) as caught:
        plan_reads(*given)
    return caught.value


def with_views(worker: Worker, **changes: Any) -> Worker:
    return attrs.evolve(worker, views=[attrs.evolve(view, **changes) for view in worker.views])


def request(ours: list[int], theirs: list[int], tokens: tuple[int, int]) -> dict[str, Any]:
    return {"local": {"attn": Blocks(ours)}, "remote": {"attn": Blocks(theirs)}, "tokens": tokens}


def test_fp8_in_plain_bytes_pairs_with_fp8_where_the_caller_says_so() -> None:
    """The dtypes differ, so the pair is refused; described as bytes on both sides, it moves."""
    kinds = ("uint8", "float8_e4m3fn")
    dense = [[attrs.evolve(axis, stride_bytes=axis.stride_bytes // 2) for axis in engine()[0].views[0].axes]] * 2
    ours, theirs = (
        with_views(engine(name)[0], dtype=kind, axes=axes) for name, kind, axes in zip("dp", kinds, dense, strict=True)
    )
    error = plan_error(ours, [theirs])
    assert error.code == "DTYPE"
    assert error.hint == "if their bytes mean the same, describe both sides as uint8"
    assert plan_error(engine("d")[0], [with_views(engine("p")[0], dtype="float16")]).hint == ""
    plan = plan_reads(ours, [with_views(theirs, dtype="uint8")])
    assert certify(plan).complete
    assert verify(plan, **request([3, 1], [5, 0], (1, 8))).ok


def test_k_and_v_of_unequal_head_size_are_two_tensors() -> None:
    """K of 24 and V of 16 bytes a head: side by side in each slot on one side, apart on the other."""

    def worker(name: str, offsets: dict[str, tuple[int, int, int]]) -> Worker:
        axes = {
            part: (Axis("token", 0, 4, 4, token), Axis("dim", 0, dim, dim, 1))
            for part, (dim, token, _) in offsets.items()
        }
        views = [
            View(f"layers.0.{part}", "attn", "kv", "uint8", axes[part], 9, 160, offsets[part][2]) for part in offsets
        ]
        return Worker(name, 0, [Region("kv", 4096 if name == "d" else 1 << 40, 9 * 160)], [Group("attn", 4)], views)

    side_by_side = worker("d", {"k": (24, 40, 0), "v": (16, 40, 24)})
    apart = worker("p", {"k": (24, 24, 0), "v": (16, 16, 96)})
    plan = plan_reads(side_by_side, [apart])
    assert certify(plan).complete
    assert verify(plan, **request([3, 1], [5, 0], (1, 8))).num_bytes == 7 * 40


def test_layers_that_share_a_cache_at_the_source_are_read_by_a_plan_each() -> None:
    """Of two plans, the second names the source's cache after the layer that shares it."""
    (ours,), (theirs,) = engine("d"), engine("p", order="NH", layers=1)
    assert plan_error(ours, [theirs]).code == "TENSOR"
    again = with_views(theirs, name="layers.1")
    parts = [
        (plan_reads(ours, [source], not_transferred=[left]), request([3, 1], [5, 0], (1, 8)))
        for source, left in ((theirs, "layers.1"), (again, "layers.0"))
    ]
    assert all(certify(plan).complete for plan, _ in parts)
    with FakeMemory([ours, theirs]) as memory:
        values = np.random.default_rng(1).integers(1, 256, theirs.regions[0].size_bytes)
        memory.write(theirs, theirs.regions[0].address, values)
        for plan, given in parts:
            for spec in plan.bind(**given):
                memory.execute(spec)
        first, second = (memory.array(ours, view) for view in ours.views)
        assert first.any()
        assert (first == second).all()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("contexts", [(1, 1), (2, 2)])
def test_an_axis_of_size_1_pairs_with_none(contexts: tuple[int, int], turned: bool) -> None:
    """One head is as good as no axis of heads, on either side, for plans, certificates, verify and the oracle."""
    (ours,), theirs = engine("d", heads=1, tokens=6), list(engine("p", heads=1, order="NH", contexts=contexts))
    without = [axis for axis in ours.views[0].axes if axis.name != "head"]
    if turned:
        theirs = [
            with_views(worker, axes=[axis for axis in worker.views[0].axes if axis.name != "head"]) for worker in theirs
        ]
    else:
        ours = with_views(ours, axes=without)
    plan, given = plan_reads(ours, theirs), request([3, 1, 2], [4, 5, 6, 1], (1, 14))
    assert certify(plan).complete
    assert verify(plan, **given).ok
    copies = {(spec.local, spec.remote): spec.descriptors() for spec in plan.bind(**given)}
    assert assert_copies([ours], theirs, copies, **given).num_bytes == 13 * 2 * 16


def test_more_than_one_coordinate_needs_the_axis_on_both_sides() -> None:
    """Two heads are not one, with or without the axis."""
    (one,), (two,) = engine("d", heads=1), engine("p", heads=2)
    assert plan_error(one, [two]).code == "SIZE"
    none = with_views(one, axes=[axis for axis in one.views[0].axes if axis.name != "head"])
    assert plan_error(none, [two]).code == "AXES"
    assert plan_error(attrs.evolve(two, engine_id="d"), [attrs.evolve(none, engine_id="p")]).code == "AXES"


def test_a_ring_buffer_is_bound_on_either_side_of_its_wrap() -> None:
    """A ring of four blocks: the last four positions are in the block that had the first twelve."""
    (ours,), (theirs,) = engine("d", tokens=16), engine("p", tokens=16, order="NH")
    plan, source = plan_reads(ours, [theirs]), list(range(9))
    with pytest.raises(KVPlanError, match=r"block 2 twice \(bind the ranges on either side of a ring buffer's wrap"):
        plan.bind(local={"attn": Blocks([2, 7, 5, 3, 2])}, remote={"attn": Blocks(source)}, tokens=(4, 68))
    remote = {"attn": Blocks(source)}
    parts: list[Any] = [
        (plan, {"local": {"attn": Blocks([2, 7, 5, 3])}, "remote": remote, "tokens": (4, 64)}),
        (plan, {"local": {"attn": Blocks([2], first=4)}, "remote": remote, "tokens": (64, 68)}),
    ]
    report = verify_together(parts)
    assert report.ok, str(report)
    assert report.num_bytes == 64 * 2 * 4 * 16


@pytest.mark.parametrize("order", ["channel step", "step channel"])
def test_steps_of_drafts_are_padding_of_a_convolution_state(order: str) -> None:
    """Five stored steps, of which the first three are the state that the other side has."""

    def worker(name: str, steps: int, outer: str) -> Worker:
        strides = {"channel": 2 * steps, "step": 2} if outer == "channel" else {"channel": 2, "step": 2 * 8}
        axes = (Axis("channel", 0, 8, 8, strides["channel"]), Axis("step", 0, 3, 3, strides["step"]))
        view = View("layers.0.conv.x", "state", "kv", "bfloat16", axes, 9, 16 * steps)
        region = Region("kv", 4096 if name == "d" else 1 << 40, 9 * 16 * steps)
        return Worker(name, 0, [region], [Group("state")], [view])

    plan = plan_reads(worker("d", 5, order.split()[0]), [worker("p", 3, "channel")])
    assert certify(plan).complete
    report = verify(plan, local={"state": Blocks([4])}, remote={"state": Blocks([7])})
    assert report.ok
    assert report.num_bytes == 8 * 3 * 2


def test_a_token_axis_in_two_regions_is_two_workers_with_a_context() -> None:
    """Slots 0-7 of every block in one region and slots 8-15 in another: each region is a context rank's."""
    axes = (Axis("token", 0, 8, 16, 8), Axis("dim", 0, 8, 8, 1))
    with pytest.raises(
        KVPlanError, match=r"SIZE: .* \(a Context spreads positions over workers: describe one for each"
    ):
        View("layers.0", "attn", "kv", "uint8", axes, 9, 64)
    view = View("layers.0", "attn", "kv", "uint8", (Axis("token", 0, 8, 8, 8), axes[1]), 9, 64)
    halves = [
        Worker("p", i, [Region("kv", (i + 1) << 40, 9 * 64)], [Group("attn", 8, Context(i, 2, 8))], [view])
        for i in (0, 1)
    ]
    (whole,) = (
        Worker("d", 0, [Region("kv", 4096, 9 * 128)], [Group("attn", 16)], [
            View("layers.0", "attn", "kv", "uint8", (Axis("token", 0, 16, 16, 8), axes[1]), 9, 128)
        ]),
    )  # fmt: skip
    plan, given = plan_reads(whole, halves), request([3, 1, 2], [4, 5, 0], (3, 41))
    assert certify(plan).complete
    assert verify(plan, **given).num_bytes == 38 * 8


@pytest.mark.parametrize("kind", ["BLOCK", "BLK", "OBJ"])
def test_memory_of_block_devices_and_objects_is_described_as_files(kind: str) -> None:
    """Addresses are offsets either way; the refusal says so."""
    with pytest.raises(KVPlanError, match="FILE describes a block device or an object: offsets in it"):
        Region("kv", 0, 4096, kind)
    assert Region("kv", 0, 4096, "FILE", 7).memory == "FILE"
