"""The independent oracle: what every byte means, one element at a time from the formula of a view.

It is as slow as it is simple, and shares no code with the planner or with kvplan.verification.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvplan import Blocks, Group, ReadSpec, Region, View, Worker

Place = tuple[int, int]
"""Device and address of a byte."""

Meaning = tuple[str, int, tuple[tuple[str, int], ...], int]
"""Tensor, position, coordinates, and byte of the element."""

Copy = tuple[tuple[str, int], Place, Place]
"""The copy of one byte: the source worker, the place there, and the place at the destination."""

Span = tuple[int, int] | None


def held_positions(group: Group) -> Iterator[int]:
    """All positions that the group's context holds: each turn ``interleave_tokens`` of them."""
    run, size = group.context.interleave_tokens, group.context.size
    for start in itertools.count(group.context.rank * run, run * size):
        yield from range(start, start + run)


def positions_of(group: Group, end: int) -> list[int]:
    """The positions below ``end`` that the group's context holds."""
    return list(itertools.takewhile(lambda position: position < end, held_positions(group)))


def elements(view: View) -> Iterator[tuple[int, int, tuple[tuple[str, int], ...]]]:
    """Slot, byte offset in block 0, and coordinates of every element of a block."""
    for point in itertools.product(*(range(axis.start, axis.stop) for axis in view.axes)):
        offset, coordinates = view.offset_bytes, dict[str, int]()
        for axis, coordinate in zip(view.axes, point, strict=True):
            offset += (coordinate - axis.start) * axis.stride_bytes
            coordinates[axis.name] = coordinates.get(axis.name, 0) * axis.size + coordinate
        slot = coordinates.pop("token", 0)
        yield slot, offset, tuple(sorted((name, at) for name, at in coordinates.items() if view.sizes[name] > 1))


def contents(worker: Worker, tables: Mapping[str, Blocks], spans: Mapping[str, Span]) -> dict[Place, Meaning]:
    """What each byte of a request's blocks means, at positions in the span of its tensor; None is all positions."""
    found: dict[Place, Meaning] = {}
    for view in worker.views:
        group = next(group for group in worker.groups if group.name == view.group)
        region = next(region for region in worker.regions if region.name == view.region)
        if view.name not in spans or view.group not in tables:
            continue
        span, slots = spans[view.name], group.tokens_per_block or 1
        blocks = tables[view.group]
        held = list(itertools.islice(held_positions(group), blocks.stop * slots))
        for ordinal, block in zip(blocks.ordinals.tolist(), blocks.ids.tolist(), strict=True):
            for slot, offset, coordinates in elements(view):
                position = held[ordinal * slots + slot]
                if span is None or span[0] <= position < span[1]:
                    for byte in range(view.itemsize):
                        place = (region.device_id, region.address + offset + block * view.block_stride_bytes + byte)
                        assert place not in found, f"two meanings of {place} of {worker}"
                        found[place] = (view.name, position, coordinates, byte)
    return found


def copies_of(spec: ReadSpec) -> list[Copy]:
    """The copies of a spec's coalesced descriptors, byte by byte, in order."""
    local, remote = spec.descriptors()
    return by_byte(spec.remote, remote, local) if spec.operation == "READ" else by_byte(spec.local, local, remote)


def by_byte(source: tuple[str, int], reads: Any, writes: Any) -> list[Copy]:
    """The copies of ranges of address, length and device, byte by byte, in order."""
    return [
        (source, (read[2], read[0] + byte), (write[2], write[0] + byte))
        for read, write in zip(reads.tolist(), writes.tolist(), strict=True)
        for byte in range(read[1])
    ]


def copies_by_id(spec: ReadSpec) -> list[Copy]:
    """The copies of a spec's ids, byte by byte. Ids number the elements of the rows, one row after the other."""
    sides = []
    for table, ids in ((spec.local_table, spec.local_ids), (spec.remote_table, spec.remote_ids)):
        rows = table.rows.tolist()
        sides.append([element_of(rows, i) for i in ids.tolist()])
    local, remote = sides
    reads, writes, source = (remote, local, spec.remote) if spec.operation == "READ" else (local, remote, spec.local)
    copies: list[Any] = []
    for read, write in zip(reads, writes, strict=True):
        assert read[1] == write[1], "paired ids of different lengths"
        copies += [(source, (read[2], read[0] + byte), (write[2], write[0] + byte)) for byte in range(read[1])]
    return copies


def element_of(rows: Sequence[Sequence[int]], number: int) -> tuple[int, int, int]:
    """Address, length and device of the element with a number, counted through all rows."""
    for address, length, device, stride, count in rows:
        if 0 <= number < count:
            return address + number * stride, length, device
        number -= count
    raise AssertionError(f"no element {number}")


def problems(
    needed: Mapping[Place, Meaning], held: Mapping[tuple[str, int], Mapping[Place, Meaning]], copies: Iterable[Any]
) -> list[str]:
    """The faults of copies to one worker that needs ``needed``, from sources that hold ``held``."""
    wrong, written = [], set()
    for source, read, write in copies:
        if write in written:
            wrong.append(f"{write} written twice")
        written.add(write)
        if write not in needed:
            wrong.append(f"{write} written, not needed")
        elif held[source].get(read) != needed[write]:
            wrong.append(f"{write} needs {needed[write]}, got {held[source].get(read)}")
    wrong += [f"{place} not written: {meaning}" for place, meaning in needed.items() if place not in written]
    return wrong


def region_of(worker: Worker, place: Place) -> Region:
    """The one region of a byte."""
    device, address = place
    (region,) = (
        region
        for region in worker.regions
        if region.device_id == device and region.address <= address < region.address + region.size_bytes
    )
    return region


def fewest_descriptors(destination: Worker, source: Worker, copies: Sequence[Any]) -> int:
    """How many maximal runs the copied bytes form, each contiguous on both sides and inside one region."""
    runs, last = 0, None
    for _, read, write in sorted(copies, key=lambda copy: copy[2]):
        regions = (region_of(source, read), region_of(destination, write))
        here = (*regions, read[1], write[1])
        if last is None or here != (last[0], last[1], last[2] + 1, last[3] + 1):
            runs += 1
        last = here
    return runs
