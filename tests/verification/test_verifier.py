"""verify: a right plan passes; every kind of fault is found, and named by coordinates."""

from __future__ import annotations

import textwrap
from pathlib import Path
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
    Region,
    TransferPlan,
    View,
    Worker,
    plan_mesh,
    plan_reads,
    plan_writes,
    verify,
    verify_together,
)
from kvplan.verification import Report, Tail
from tests import edits
from tests.edits import Edit, Ranges, edited
from tests.pages import failed_examples
from tests.small import engine

REQUEST: dict[str, Any] = {
    "local": {"attn": Blocks([7, 3, 5])},
    "remote": {"attn": Blocks([2, 9, 4])},
    "tokens": (1, 11),
}
WRITE = {"local": REQUEST["remote"], "remote": REQUEST["local"]}
REPORTS = Path(__file__).with_name("reports.txt")
(DECODE,), (PREFILL,) = engine("decode"), engine("prefill")
NUM_BYTES = 10 * 2 * 4 * 16  # positions, layers, heads, bytes of a head


def reads(tp: int = 2) -> TransferPlan:
    """One worker that reads all heads, token-major, from an engine of two head-major workers."""
    (destination,) = engine("decode", order="NH")
    return plan_reads(destination, engine("prefill", tp))


def writes() -> list[TransferPlan]:
    """Two workers that write the same to one."""
    destinations, sources = engine("decode", order="NH"), engine("prefill", 2)
    return [
        plan_writes(source, destinations, [other for other in sources if other is not source]) for source in sources
    ]


def report_of(plan: Any, **changed: Any) -> Report:
    return verify(plan, **{**REQUEST, **changed})


def report(plan: Any, **changed: Any) -> None:
    """Print a report, each failure wrapped."""
    for line in str(report_of(plan, **changed)).splitlines():
        print(textwrap.fill(line, 120, subsequent_indent="    ", break_long_words=False))


def swap(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
    """Two descriptors read each other's bytes."""
    remote[[0, 1]] = remote[[1, 0]]
    return local, remote


def shifted(side: int, num_bytes: int) -> Edit:
    """The first descriptor of the local side, 0, or of the remote one, 1, is so many bytes off."""

    def edit(*ranges: Ranges) -> tuple[Ranges, Ranges]:
        ranges[side][0, 0] = int(ranges[side][0, 0]) + num_bytes
        return ranges[0], ranges[1]

    return edit


def stray(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
    """The first bytes are also copied to the next block of the pool."""
    extra = local[:1] + np.array([(256, 0, 0)], np.uint64)
    return np.concatenate([local, extra]), np.concatenate([remote, remote[:1]])


def from_slot_0(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
    """What position 1 needs is read from position 0."""
    remote[np.flatnonzero(remote[:, 0] == (1 << 40) + 2 * 128 + 16), 0] -= np.uint64(16)
    return local, remote


def two_heads_on(local: Ranges, remote: Ranges) -> tuple[Ranges, Ranges]:
    """Heads 2 and 3 are read in place of 0 and 1."""
    remote[:, 0] += np.uint64(2 * 4 * 16)
    return local, remote


def crossed(plan: TransferPlan) -> dict[Any, Any]:
    """Copies of a plan in which the first two sources are read at each other's addresses."""
    copies = {(plan.local.key, spec.remote): spec.descriptors() for spec in plan.bind(**REQUEST)}
    first, second, *_ = copies
    (ours, theirs), (mine, others) = copies[first], copies[second]
    return copies | {first: (ours, others), second: (mine, theirs)}


def test_reports_are_as_written_down() -> None:
    """Each fault is found and named as in the file beside this one."""
    assert failed_examples(REPORTS, vars(edits) | globals()) == 0


def codes(report: Any) -> list[str]:
    return [code for code, _ in report.failures]


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


def test_two_destinations_of_one_name_are_refused() -> None:
    """Plans that are verified together must agree on each destination worker."""
    other = plan_reads(engine("decode", blocks=11)[0], engine("prefill"))
    with pytest.raises(KVPlanError, match=r"^WORKER: "):
        verify([reads(), other], **REQUEST)


def test_block_tables_of_two_groups_that_share_memory_are_found() -> None:
    """If attention and states share a pool and list the same block in two parts, no transfer can make both right."""
    model = Model.shipped("granite-4.0-h-tiny")
    destinations, sources = model.engine("d", shared=True, num_blocks=9), model.engine("s", num_blocks=9)
    mesh, none = plan_mesh(destinations, sources), Blocks([])
    parts = {"attn": Blocks([1, 2, 3, 4]), "state": none}, {"attn": none, "state": Blocks([1])}
    spans = {"attn": (0, 50)}, {"attn": (0, 0)}
    both = [
        (mesh, {"local": tables, "remote": tables, "tokens": span}) for tables, span in zip(parts, spans, strict=True)
    ]
    report = verify_together(both)
    assert " bytes needed by two groups, whose blocks share memory" in str(report)


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
    assert (
        "1 byte wrong: layers.1, position 3, V, head 3: byte 7 of dim holds byte 6 of dim\n  first: layers.1 "
        in failure[1]
    )
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
    first_line, second_line = report.failures[0][1].splitlines()
    assert first_line == "at decode/0: 1 byte missing: layers.1, position 10, V, byte 7 of dim, head 3"
    assert second_line.startswith("  first: layers.1 dim 3 head 3 kv 1 byte 1 of position 10 ")


def test_a_report_without_failures_is_one_true_line() -> None:
    """It has the bytes, descriptors, workers, unused slots and promises."""
    report = Report(1, 2, 1, ("VALUE", "COVER"), tails=(Tail("decode/0", "attn", 5, 8),))
    assert report
    assert report.ok
    moved = "verified: 1 byte in 2 descriptors to 1 worker, 3 unused slots"
    assert str(report) == f"{moved}; 2 checks passed, DISJOINT, BOUNDS, OWN, IDS not checked"
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


def test_a_source_without_a_part_of_a_tensor() -> None:
    """It sends another tensor. Of this one it has coordinates before or behind those that the destination needs."""

    def worker(engine_id: str, rank: int, start: int, stop: int, *, whole: bool) -> Worker:
        regions = Region("whole", 4096, 1), Region("part", 8192, stop - start)
        views = (
            View("part", "states", "part", "uint8", (Axis("head", start, stop, 6, 1),), 1, stop - start),
            View("whole", "states", "whole", "uint8", (Axis("dim", 0, 1, 1, 1),), 1, 1),
        )
        return Worker(engine_id, rank, regions, (Group("states"),), views[: 1 + whole])

    sources = [worker("prefill", rank, 2 * rank, 2 * rank + 2, whole=rank == 1) for rank in range(3)]
    for head in range(6):
        plan = plan_reads(worker("decode", head, head, head + 1, whole=True), sources)
        tables = {"states": Blocks([0])}
        report = verify(plan, local=tables, remote=tables)
        assert (report.ok, report.num_bytes) == (True, 2), str(report)
