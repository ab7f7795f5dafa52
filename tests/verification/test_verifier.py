"""verify: a right plan passes; every kind of fault is found, and named by coordinates."""

from __future__ import annotations

import re
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import (
    Axis,
    Blocks,
    Group,
    KVPlanError,
    Model,
    ReadSpec,
    Region,
    TransferPlan,
    View,
    Worker,
    plan_mesh,
    plan_reads,
    plan_writes,
    verify,
)
from kvplan.verification import PROMISES, Report, Tail
from tests.edits import Ranges, edited, edited_specs
from tests.small import engine

REQUEST: dict[str, Any] = {
    "local": {"attn": Blocks([7, 3, 5])},
    "remote": {"attn": Blocks([2, 9, 4])},
    "tokens": (1, 11),
}
NUM_BYTES = 10 * 2 * 4 * 16  # positions, layers, heads, bytes of a head


def reads(tp: int = 2) -> TransferPlan:
    """One worker that reads all heads, token-major, from an engine of two head-major workers."""
    (destination,) = engine("decode", order="NH")
    return plan_reads(destination, engine("prefill", tp))


def report_of(plan: TransferPlan, **changed: Any) -> Any:
    return verify(plan, **{**REQUEST, **changed})


def codes(report: Any) -> list[str]:
    return [code for code, _ in report.failures]


def test_a_right_plan_is_verified() -> None:
    """All promises hold, the bytes are counted, and the unused slots are listed."""
    report = report_of(reads())
    assert report.ok
    assert report.num_bytes == NUM_BYTES
    assert report.num_descriptors == sum(spec.num_descriptors for spec in reads().bind(**REQUEST))
    assert report.promises == dict.fromkeys(PROMISES, True)
    assert [str(tail) for tail in report.tails] == ["decode/0 attn [0, 1)", "decode/0 attn [11, 12)"]


def test_unused_slots_are_listed_as_intervals() -> None:
    """Neighbouring unused slots are one tail, before the range and behind it."""
    tails = report_of(reads(), tokens=(2, 9)).tails
    assert [str(tail) for tail in tails] == ["decode/0 attn [0, 2)", "decode/0 attn [9, 12)"]


def test_a_plan_that_moves_nothing_is_verified() -> None:
    """Without tensors, nothing is needed and nothing is wrong."""
    plan = plan_reads(engine("decode")[0], engine("prefill"), not_transferred=["layers.0", "layers.1"])
    report = report_of(plan)
    assert report.ok
    assert (report.num_bytes, report.num_descriptors) == (0, 0)


def split_heads(worker: Worker) -> Worker:
    """The same bytes described otherwise: layer 0 by a view for each pair of heads, layer 1 by digits of its heads."""
    first, second = worker.views
    page = {axis.name: axis for axis in first.axes}
    step = page["head"].stride_bytes
    halves = [
        attrs.evolve(
            first,
            offset_bytes=low * step,
            axes=[attrs.evolve(axis, start=low, stop=low + 2) if axis.name == "head" else axis for axis in first.axes],
        )
        for low in (0, 2)
    ]
    digits = [Axis("head", 0, 2, 2, 2 * step), Axis("head", 0, 2, 2, step)]
    rest = [axis for axis in second.axes if axis.name != "head"]
    return attrs.evolve(worker, views=[*halves, attrs.evolve(second, axes=[*digits, *rest])])


@pytest.mark.parametrize("ours, theirs", [(True, False), (False, True), (True, True)])
def test_tensors_in_several_views_and_digits_are_verified(ours: bool, theirs: bool) -> None:
    """All coordinates of all views are labelled in the sources, also if an axis consists of digits."""
    (destination,), (source,) = engine("decode", order="NH"), engine("prefill")
    plan = plan_reads(split_heads(destination) if ours else destination, [split_heads(source) if theirs else source])
    report = report_of(plan)
    assert report.ok, str(report)
    assert report.num_bytes == NUM_BYTES


@pytest.mark.parametrize(("heads", "swapped"), [(1 << 31, (0, 1)), (1 << 30, (0, 2))])
def test_bytes_that_are_far_apart_have_labels_of_their_own(heads: int, swapped: tuple[int, int]) -> None:
    """Positions whose labels are 2**32 apart do not get the same label."""

    def worker(name: str) -> Worker:
        axes = (Axis("head", 0, 1, heads, 0), Axis("token", 0, 4, 4, 2))
        view = View("layers.0", "attn", "kv", "bfloat16", axes, 4, 8)
        return Worker(name, 0, [Region("kv", 1 << 40, 32)], [Group("attn", 4)], [view])

    plan = plan_reads(worker("decode"), [worker("prefill")])
    local, remote = (np.array([((1 << 40) + 2 * i, 2, 0) for i in range(3)], np.uint64) for _ in "ab")
    request: dict[str, Any] = {"local": {"attn": Blocks([0])}, "remote": {"attn": Blocks([0])}, "tokens": (0, 3)}
    pair = (plan.local.key, plan.remotes[0].key)
    assert verify(plan, **request, copies={pair: (local, remote)}).ok
    remote[list(swapped)] = remote[list(swapped)[::-1]]
    assert codes(verify(plan, **request, copies={pair: (local, remote)})) == ["VALUE"]


def test_an_empty_request_is_verified() -> None:
    """An empty range moves nothing, and all slots are unused."""
    report = report_of(reads(), tokens=(3, 3))
    assert report.ok
    assert (report.num_bytes, report.num_tail_slots) == (0, 12)


def test_a_wrong_head_is_named_on_both_sides() -> None:
    """Head 1 in place of head 0: the text says what belongs there, what is there, and where it was copied from."""

    def swap(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        remote[[0, 1]] = remote[[1, 0]]
        return local, remote

    report = report_of(edited(reads(), swap, REQUEST))
    assert codes(report) == ["IDS", "VALUE"]
    ours, theirs = 1 << 40, 1 << 40
    destination, source = ours + 3 * 256 + 0 * 64, theirs + 9 * 128 + 1 * 64
    assert report.failures[1][1] == (
        "at decode/0: 32 bytes wrong, first: "
        "layers.0 dim 0 head 0 kv 0 byte 0 of position 4 "
        f"(layers.0 dim 0 head 0 kv 0 byte 0 in group attn block 3 slot 0, address {destination:#x} of decode/0) "
        "holds layers.0 dim 0 head 1 kv 0 byte 0 of position 4, copied from "
        f"layers.0 dim 0 head 1 kv 0 byte 0 in group attn block 9 slot 0, address {source:#x} of prefill/0"
    )


def test_the_last_of_two_copies_is_where_a_byte_is_from() -> None:
    """If a later copy overwrites a right byte, the text names the later copy."""

    def swap(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        remote[[0, 1]] = remote[[1, 0]]
        return local, remote

    report = verify([reads(), edited(reads(), swap, REQUEST)], **REQUEST)
    assert codes(report) == ["IDS", "VALUE", "DISJOINT"]
    assert "head 0 kv 0 byte 0 of position 4 (" in report.failures[1][1]
    assert "copied from layers.0 dim 0 head 1" in report.failures[1][1]


def test_a_byte_is_not_from_another_devices_copy() -> None:
    """With regions at one address on two devices, the copy of a byte is found on its own device."""

    def on_two_devices(worker: Worker) -> Worker:
        regions = [attrs.evolve(r, address=1 << 40, device_id=i) for i, r in enumerate(worker.regions)]
        return attrs.evolve(worker, regions=regions)

    def swap(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        first, second = np.flatnonzero(local[:, 2] == 0)[:2]
        remote[[first, second]] = remote[[second, first]]
        return local, remote

    destination, *sources = map(on_two_devices, (*engine("decode", order="NH"), *engine("prefill")))
    plan = plan_reads(destination, sources)
    assert report_of(plan).ok
    report = report_of(edited(plan, swap, REQUEST))
    assert codes(report) == ["IDS", "VALUE"]
    assert "copied from layers.0 " in report.failures[1][1]


def test_a_dropped_descriptor_is_found() -> None:
    """A byte that no copy writes breaks COVER, and is named."""
    plan = edited(reads(), lambda local, remote: (local[1:], remote[1:]), REQUEST)
    report = report_of(plan)
    assert codes(report) == ["IDS", "COVER"]
    assert "16 bytes missing, first: layers.0 dim 0 head 0 kv 0 byte 0 of position 4 " in report.failures[1][1]
    assert report.failures[1][1].endswith("of decode/0) was never written")


def test_a_byte_written_twice_is_found() -> None:
    """The same right bytes written again break DISJOINT and nothing else."""
    plan = edited(
        reads(), lambda local, remote: (local[[0, *range(len(local))]], remote[[0, *range(len(local))]]), REQUEST
    )
    report = report_of(plan)
    assert codes(report) == ["IDS", "DISJOINT"]
    assert "16 bytes written again, first: layers.0 dim 0 head 0 kv 0 byte 0 in group attn" in report.failures[1][1]


@pytest.mark.parametrize("side", [0, 1])
def test_a_range_outside_its_region_is_found(side: int) -> None:
    """The copies of that pair are not carried out: BOUNDS fails, and their bytes are missing."""

    def leave(*ranges: Ranges) -> tuple[Ranges, Ranges]:
        ranges[side][0, 0] -= np.uint64(1 << 39)
        return ranges[0], ranges[1]

    report = report_of(edited(reads(), leave, REQUEST))
    assert codes(report) == ["IDS", "BOUNDS", "COVER"]
    assert f"{NUM_BYTES // 2} bytes missing" in report.failures[2][1]


def test_an_address_of_another_worker_is_named_as_that() -> None:
    """A read from one source at the addresses of another: the report names the worker that has them."""
    plan = reads()
    first, second = plan.bind(**REQUEST)
    (ours, theirs), (mine, others) = first.descriptors(), second.descriptors()
    copies = {
        (plan.local.key, plan.remotes[0].key): (ours, others),
        (plan.local.key, plan.remotes[1].key): (mine, theirs),
    }
    report = verify(plan, **REQUEST, copies=copies)
    assert codes(report) == ["BOUNDS", "BOUNDS", "COVER"]
    assert report.failures[0][1] == (
        "at decode/0: cannot touch fake memory of prefill/0: expected every range inside one region, got 16 bytes at "
        f"{others[0, 0]:#x} on device 0, which is layers.0 dim 0 head 2 kv 0 byte 0 in group attn block 9 slot 0, "
        f"address {others[0, 0]:#x} of prefill/1"
    )


def test_an_address_that_several_workers_have_is_named_once() -> None:
    """If two other sources have regions at one address, the first of them is named."""
    first, second, third, fourth = engine("prefill", 4)
    third, fourth = (attrs.evolve(worker, regions=second.regions) for worker in (third, fourth))
    (local,) = engine("decode", order="NH")
    plan = plan_reads(local, [first, second, third, fourth])
    specs = plan.bind(**REQUEST)
    copies = {(local.key, spec.remote): spec.descriptors() for spec in specs}
    copies[local.key, first.key] = (specs[0].descriptors()[0], specs[1].descriptors()[1])
    (found,) = (text for code, text in verify(plan, **REQUEST, copies=copies).failures if code == "BOUNDS")
    assert found.count(", which is ") == 1
    assert found.endswith(" of prefill/1")


def test_a_write_outside_the_requests_blocks_is_found() -> None:
    """One extra copy of right bytes, to a block of another request, breaks OWN."""

    def stray(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        extra = local[:1] + np.array([(256, 0, 0)], np.uint64)
        return np.concatenate([local, extra]), np.concatenate([remote, remote[:1]])

    report = report_of(edited(reads(), stray, REQUEST))
    assert codes(report) == ["IDS", "OWN"]
    assert "16 bytes written outside the request, first: layers.0 dim 0 head 0 kv 0" in report.failures[1][1]
    assert "block 4 slot 0" in report.failures[1][1]


def test_a_write_to_a_slot_out_of_the_range_is_found() -> None:
    """A write to a slot of the request's blocks that is outside its range breaks OWN."""
    whole = reads().bind(**{**REQUEST, "tokens": (0, 11)})
    report = report_of(edited_specs(reads(), *whole))
    assert codes(report) == ["OWN"]
    assert f"{2 * 4 * 16} bytes written outside the request" in report.failures[0][1]
    assert "block 7 slot 0" in report.failures[0][1]


@pytest.mark.parametrize("side", [0, 1])
def test_a_shift_by_one_byte_is_found(side: int) -> None:
    """A copy that is one byte off, in source or destination, is wrong."""

    def shift(*ranges: Ranges) -> tuple[Ranges, Ranges]:
        ranges[side][0, 0] += np.uint64(1)
        return ranges[0], ranges[1]

    report = report_of(edited(reads(), shift, REQUEST))
    assert "VALUE" in codes(report)


def test_bytes_from_outside_the_request_are_wrong_and_not_missing() -> None:
    """Bytes from a slot outside the range are wrong, not missing, and the text says where they came from."""

    def from_slot_0(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        first = np.flatnonzero(remote[:, 0] == (1 << 40) + 2 * 128 + 16)
        remote[first, 0] -= np.uint64(16)
        return local, remote

    report = report_of(edited(reads(), from_slot_0, REQUEST))
    assert codes(report) == ["IDS", "VALUE"]
    assert "16 bytes wrong" in report.failures[1][1]
    assert "of position 1 (" in report.failures[1][1]
    assert "holds position 0 outside the request, copied from layers.0 dim 0 head 0" in report.failures[1][1]
    assert "block 2 slot 0" in report.failures[1][1]


def test_blocks_paired_by_list_head_are_found() -> None:
    """A destination that already has a prefix must not get the bytes of the prefix."""
    request = {**REQUEST, "local": {"attn": Blocks([3, 5], first=1)}, "tokens": (4, 11)}
    unaware = reads().bind(**{**REQUEST, "local": {"attn": Blocks([3, 5])}, "tokens": (0, 7)})
    report = verify(edited_specs(reads(), *unaware), **request)
    assert codes(report) == ["VALUE"]
    assert "of position 4 (" in report.failures[0][1]
    assert "holds position 0 outside the request" in report.failures[0][1]


def test_heads_that_are_not_needed_are_no_other_position() -> None:
    """Heads that only another destination worker needs are outside the request of this one."""

    def two_heads_on(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        remote[:, 0] += np.uint64(2 * 4 * 16)
        return local, remote

    plan = plan_reads(engine("decode", tp=2)[0], engine("prefill"))
    report = report_of(edited(plan, two_heads_on, REQUEST))
    assert "holds bytes outside the request, copied from layers.0 dim 0 head 2" in report.failures[1][1]


def test_tensors_paired_by_place_are_found() -> None:
    """Layer 1 in the place of layer 0 is wrong, although the geometry is the same."""
    renamed = attrs.evolve(
        engine("prefill")[0],
        views=[attrs.evolve(view, name=f"layers.{1 - i}") for i, view in enumerate(engine("prefill")[0].views)],
    )
    (destination,) = engine("decode")
    specs = plan_reads(destination, [renamed]).bind(**REQUEST)
    report = report_of(edited_specs(plan_reads(destination, engine("prefill")), *specs))
    assert codes(report) == ["VALUE"]
    assert "first: layers.0 dim 0 head 0 kv 0 byte 0 of position 1 (" in report.failures[0][1]
    assert "holds layers.1 dim 0 head 0 kv 0 byte 0 of position 1," in report.failures[0][1]


def test_ids_that_disagree_with_the_descriptors_are_found() -> None:
    """Wrong ids are found although the descriptors are right: a transfer library gets the ids."""
    plan = reads()
    specs = list(plan.bind(**REQUEST))
    whole = edited(plan, lambda local, remote: (local, remote), REQUEST)
    wrong = attrs.evolve(whole.bind()[0], remote_ids=specs[0].remote_ids[::-1])
    report = report_of(edited_specs(plan, wrong, specs[1]))
    assert codes(report) == ["IDS"]
    outside = attrs.evolve(whole.bind()[0], local_ids=specs[0].local_ids + np.int32(10_000))
    assert "IDS" in codes(report_of(edited_specs(plan, outside, specs[1])))


def test_a_spec_that_names_another_worker_is_found() -> None:
    """A copy goes where its spec says, not where the plan lists it."""
    plan = reads()
    first, second = plan.bind(**REQUEST)
    moved = ReadSpec(**{f.name: getattr(first, f.name) for f in attrs.fields(ReadSpec)} | {"remote": ("prefill", 9)})
    report = report_of(edited_specs(plan, moved, second))
    assert codes(report) == ["BOUNDS", "COVER"]
    assert "prefill/9" in report.failures[0][1]


def test_writes_are_verified_together() -> None:
    """The writes of both sources cover what the destination needs."""
    destinations, sources = engine("decode", order="NH"), engine("prefill", 2)
    plans = [plan_writes(w, destinations, [s for s in sources if s is not w]) for w in sources]
    report = verify(plans, local=REQUEST["remote"], remote=REQUEST["local"], tokens=REQUEST["tokens"])
    assert report.ok
    assert report.num_bytes == NUM_BYTES
    assert "COVER" in report.checked


def test_one_of_two_writers_is_verified_without_cover() -> None:
    """Half of the bytes are right, and the rest is not reported as missing."""
    sources = engine("prefill", 2)
    plan = plan_writes(sources[0], engine("decode"), sources[1:])
    report = verify(plan, local=REQUEST["remote"], remote=REQUEST["local"], tokens=REQUEST["tokens"])
    assert report.ok
    assert report.num_bytes == NUM_BYTES // 2
    assert "COVER" not in report.checked


def test_one_of_two_writers_must_not_stray() -> None:
    """OWN and VALUE are checked even if only some writers are given."""
    sources = engine("prefill", 2)
    request = {"local": REQUEST["remote"], "remote": REQUEST["local"], "tokens": REQUEST["tokens"]}
    plan = plan_writes(sources[0], engine("decode"), sources[1:])

    def shift(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        remote[0, 0] += np.uint64(256)
        return local, remote

    report = verify(edited(plan, shift, request), **request)
    assert "OWN" in codes(report)
    assert "COVER" not in codes(report)


def test_the_same_bytes_from_two_plans_are_written_twice() -> None:
    """Plans verified together share their destinations."""
    report = verify([reads(), reads()], **REQUEST)
    assert codes(report) == ["DISJOINT"]
    assert f"{NUM_BYTES} bytes written again" in report.failures[0][1]


def test_a_mesh_is_verified_worker_by_worker() -> None:
    """Failures and tails name the destination worker."""
    mesh = plan_mesh(engine("decode", 4, order="NH"), engine("prefill", 2, tokens=3))
    report = verify(mesh, local=REQUEST["local"], remote={"attn": Blocks([2, 9, 4, 0])}, tokens=(1, 11))
    assert report.ok
    assert (report.num_workers, report.num_bytes) == (4, NUM_BYTES)
    assert {tail.worker for tail in report.tails} == {f"decode/{rank}" for rank in range(4)}


def test_tensors_not_transferred_are_not_needed() -> None:
    """An excluded tensor is not needed."""
    (destination,) = engine("decode")
    plan = plan_reads(destination, engine("prefill"), not_transferred=["layers.1"])
    report = report_of(plan)
    assert report.ok
    assert report.num_bytes == NUM_BYTES // 2


def state_worker(engine_id: str) -> Worker:
    axes = (Axis("dim", 0, 3, 3, 4),)
    paged = View("layers.0", "attn", "kv", "uint8", (Axis("token", 0, 4, 4, 1),), 9, 4)
    return Worker(
        engine_id,
        0,
        [Region("ssm", 1 << 41, 9 * 12), Region("kv", 1 << 42, 36)],
        [Group("state"), Group("attn", 4)],
        [View("layers.1", "state", "ssm", "float32", axes, 9, 12), paged],
    )


@pytest.mark.parametrize(("tokens", "states"), [((0, 7), 3), (None, 3), ({"attn": (0, 7), "state": (1, 2)}, 1)])
def test_states_count_by_block(tokens: Any, states: int) -> None:
    """One range is for tokens alone; a range of a state group counts states."""
    plan = plan_reads(state_worker("decode"), [state_worker("prefill")])
    local = {"attn": Blocks([3, 1]), "state": Blocks([8, 0, 2])}
    remote = {"attn": Blocks([0, 8]), "state": Blocks([4, 5, 6])}
    report = verify(plan, local=local, remote=remote, tokens=tokens)
    assert report.ok, str(report)
    assert report.num_bytes == states * 12 + (8 if tokens is None else 7)
    assert sum(tail.stop - tail.start for tail in report.tails if tail.group == "state") == 3 - states


def test_a_request_that_bind_refuses_is_refused() -> None:
    """A request that bind refuses raises the same error, also for a group that no worker has."""
    with pytest.raises(KVPlanError) as caught:
        report_of(reads(), tokens=(0, 99))
    assert caught.value.code == "BLOCKS"
    with pytest.raises(KVPlanError) as caught:
        report_of(reads(), local={"attn": Blocks([7, 3, 5]), "atn": Blocks([1])})
    assert caught.value.code == "NAME"


def test_two_destinations_of_one_name_are_refused() -> None:
    """Plans that are verified together must agree on each destination worker."""
    other = plan_reads(engine("decode", blocks=11)[0], engine("prefill"))
    with pytest.raises(KVPlanError) as caught:
        verify([reads(), other], **REQUEST)
    assert caught.value.code == "WORKER"


def test_block_tables_of_two_groups_that_share_memory_are_found() -> None:
    """If attention and states share a pool and list the same block, no transfer can make both right."""
    model = Model.shipped("granite-4.0-h-tiny")
    destinations, sources = model.engine("d", shared=True, num_blocks=9), model.engine("s", num_blocks=9)
    tables = {"attn": Blocks([1, 2, 3, 4]), "state": Blocks([1])}
    report = verify(plan_mesh(destinations, sources), local=tables, remote=tables, tokens={"attn": (0, 50)})
    assert re.search(r": [1-9]\d+ bytes needed by two groups, whose blocks share memory", str(report))
    assert set(codes(report)) == {"VALUE", "DISJOINT"}


def test_a_region_too_large_to_map_is_an_error() -> None:
    """If this machine cannot map a region, verify raises MEMORY instead of reporting a failure."""
    (destination,) = engine("decode", layers=1)
    large = attrs.evolve(destination, regions=[attrs.evolve(destination.regions[0], size_bytes=1 << 60)])
    with pytest.raises(KVPlanError, match=r"^MEMORY: cannot map the regions of decode/0 as fake memory"):
        report_of(plan_reads(large, engine("prefill", layers=1)))


def test_a_copy_into_a_region_too_large_to_map_is_an_error() -> None:
    """A copy that fails because memory cannot be mapped raises MEMORY, and is not a BOUNDS failure."""
    (destination,) = engine("decode", order="NH")
    more = attrs.evolve(destination, regions=[*destination.regions, Region("more", 1 << 62, 1 << 60)])

    def stray(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
        local[0, 0] = 1 << 62
        return local, remote

    with pytest.raises(KVPlanError, match=r"^MEMORY: cannot map the regions of decode/0 as fake memory"):
        report_of(edited(plan_reads(more, engine("prefill")), stray, REQUEST))


def test_ids_that_are_no_pairs_are_found() -> None:
    """If one side has fewer ids, nothing moves."""
    (mine,), (other,) = engine("d"), engine("p")
    plan = plan_reads(mine, [other])
    (spec,) = plan.bind(**REQUEST)
    report = verify(edited_specs(plan, attrs.evolve(spec, remote_ids=spec.remote_ids[:-1])), **REQUEST)
    assert codes(report) == ["IDS", "COVER"]
    ids = len(spec.local_ids)
    assert f"IDS: at d/0: copy from p/0: {ids} local ids and {ids - 1} remote ids do not pair\n" in str(report)


def on_one_address(worker: Worker) -> Worker:
    """Each layer behind 64 bytes of a region of its own device, all regions at one address."""
    return attrs.evolve(
        worker,
        regions=[
            attrs.evolve(region, address=1 << 40, device_id=i, size_bytes=region.size_bytes + 64)
            for i, region in enumerate(worker.regions)
        ],
        views=[attrs.evolve(view, offset_bytes=64) for view in worker.views],
    )


def copies_of(plan: TransferPlan) -> tuple[Ranges, Ranges]:
    """What a plan of one remote copies, sorted by device and address of the destination."""
    (spec,) = plan.bind(**REQUEST)
    local, remote = (side.copy() for side in spec.descriptors())
    order = np.lexsort((local[:, 0], local[:, 2]))
    return local[order], remote[order]


def report_of_copies(plan: TransferPlan, local: Ranges, remote: Ranges) -> Any:
    return verify(plan, **REQUEST, copies={(plan.local.key, plan.remotes[0].key): (local, remote)})


def test_a_wrong_byte_inside_a_copy_is_named_where_it_is() -> None:
    """The last byte of a copy is wrong, in layer 1, on the second device, behind the start of its region."""
    destination, source = map(on_one_address, (*engine("decode"), *engine("prefill")))
    plan = plan_reads(destination, [source])
    local, remote = copies_of(plan)
    assert local[-1, 2] == 1
    split = int(local[-1, 1]) - 1
    parts = [np.concatenate([side, side[-1:]]) for side in (local, remote)]
    for side in parts:
        side[-2, 1], side[-1, 1] = split, 1
        side[-1, 0] += np.uint64(split)
    assert report_of_copies(plan, *parts).ok
    parts[1][-1, 0] -= np.uint64(1)  # the byte before the right one
    (failure,) = report_of_copies(plan, *parts).failures
    address = int(parts[0][-1, 0])
    assert "1 byte wrong, first: layers.1 " in failure[1]
    assert f"address {address:#x} of decode/0) holds layers.1" in failure[1]
    assert f"address {int(parts[1][-1, 0]):#x} of prefill/0" in failure[1]


def test_a_byte_is_not_from_the_copy_before_it() -> None:
    """Of two copies that touch, a wrong first byte of the second is reported as that copy's."""
    destination, source = map(on_one_address, (*engine("decode"), *engine("prefill")))
    plan = plan_reads(destination, [source])
    local, remote = copies_of(plan)
    halves = [np.concatenate([side[-1:], side]) for side in (local, remote)]
    for side in halves:
        side[[0, -1], 1] //= np.uint64(2)
        side[0, 0] += side[0, 1]
    assert report_of_copies(plan, *halves).ok
    halves[1][0, 0] -= np.uint64(1)
    ((_, failure),) = report_of_copies(plan, *halves).failures
    assert f"address {int(halves[0][0, 0]):#x} of decode/0) holds" in failure
    assert f"address {int(halves[1][0, 0]):#x} of prefill/0" in failure


def test_the_first_stray_byte_of_a_copy_is_named() -> None:
    """Of a copy that is one slot too long, only the bytes behind the request are reported."""
    destination, source = map(on_one_address, (*engine("decode"), *engine("prefill")))
    plan = plan_reads(destination, [source])
    local, remote = copies_of(plan)
    length = int(local[-1, 1])
    local[-1, 1] = remote[-1, 1] = length + 16
    (failure,) = report_of_copies(plan, local, remote).failures
    assert failure[0] == "OWN"
    stray = int(local[-1, 0]) + length
    assert "16 bytes written outside the request, first: layers.1 dim 0 head 0 kv 0" in failure[1]
    assert f"block 8 slot 0, address {stray:#x} of decode/0" in failure[1]


def test_a_fault_behind_many_right_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are compared in chunks, including the last positions."""
    monkeypatch.setattr("kvplan.verification.labels.CHUNK_CELLS", 1)
    (destination,), (source,) = engine("decode"), engine("prefill")
    plan = plan_reads(destination, [source])
    local, remote = copies_of(plan)
    assert report_of_copies(plan, local, remote).ok
    (last,) = np.flatnonzero(local[:, 0] == destination.regions[1].address + 5 * 256 + 3 * 64)
    local[last, 1] = remote[last, 1] = local[last, 1] - 1
    report = report_of_copies(plan, local, remote)
    assert codes(report) == ["COVER"]
    assert "1 byte missing, first: layers.1 dim 3 head 3 kv 1 byte 1 of position 10 " in report.failures[0][1]


def test_a_report_without_failures_is_one_true_line() -> None:
    """It has the bytes, descriptors, workers, unused slots and promises."""
    report = Report(1, 2, 1, ("VALUE", "COVER"), tails=(Tail("decode/0", "attn", 5, 8),))
    assert report
    assert report.ok
    assert str(report) == "verified: 1 byte in 2 descriptors to 1 worker, 3 unused slots; VALUE, COVER hold"
    assert report.promises == {"VALUE": True, "COVER": True}


def test_a_report_with_failures_lists_them() -> None:
    """Each failure is a line that begins with its code."""
    report = Report(8, 1, 2, ("VALUE", "OWN"), failures=(("OWN", "at decode/0: far off"),))
    assert not report
    assert str(report) == "not verified: 8 bytes in 1 descriptor to 2 workers\nOWN: at decode/0: far off"
    assert report.promises == {"VALUE": True, "OWN": False}


def test_reports_of_several_workers_add_up() -> None:
    """Numbers are sums; a promise counts as checked only if it was checked for every worker."""
    one, other = Report(4, 1, 1, ("VALUE", "COVER")), Report(8, 2, 1, ("VALUE", "OWN"), (("OWN", "far off"),))
    both = Report.of([one, other])
    assert (both.num_bytes, both.num_descriptors, both.num_workers) == (12, 3, 2)
    assert (both.checked, both.failures) == (("VALUE",), (("OWN", "far off"),))


def test_a_source_needs_no_table_of_a_group_that_nothing_is_read_from():
    """A source may keep a tensor in two groups; the plan reads from the first, and a request names that one alone."""
    (ours,), (theirs,) = engine("d"), engine("p")
    again = [attrs.evolve(view, group="again", region=f"{view.region}.again") for view in theirs.views]
    regions = [
        attrs.evolve(region, name=f"{region.name}.again", address=region.address + (1 << 30))
        for region in theirs.regions
    ]
    both = attrs.evolve(
        theirs,
        regions=[*theirs.regions, *regions],
        groups=[*theirs.groups, Group("again", theirs.groups[0].tokens_per_block)],
        views=[*theirs.views, *again],
    )
    tables = {"attn": Blocks([3])}
    report = verify(plan_reads(ours, [both]), local=tables, remote=tables, tokens=(0, 4))
    assert report.ok, str(report)
