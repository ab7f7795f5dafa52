"""Tails: the bytes of a request's blocks after its last position.

An engine sees whole blocks. The slots after the last transferred position still hold the bytes of an earlier request
until the engine writes them or sets them to zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvplan._arrays import Ints, heads, read_only
from kvplan._checks import instance
from kvplan.describe.blocks import Blocks, Tokens, check_blocks
from kvplan.describe.views import TOKEN, Geometry
from kvplan.describe.worker import Worker
from kvplan.plan.align import before, slots
from kvplan.plan.bind import check_names, range_of
from kvplan.plan.rows import Descriptors


def tails(worker: Worker, blocks: Mapping[str, Blocks], tokens: Tokens) -> dict[str, Descriptors]:
    """The bytes of a destination's blocks after the request's range, by tensor: (n, 3) uint64 address, length, device.

    ``blocks`` and ``tokens`` are the arguments of ``bind`` for this worker. A group without a table or a range has no
    tail. Slots before the range are not listed: the worker already holds those tokens. Raises what ``bind`` raises.

    >>> from kvplan import Axis, Group, Region, View
    >>> view = View("mla", "attn", "kv", "uint8", (Axis("token", 0, 4, 4, 8), Axis("dim", 0, 6, 6, 1)), 10, 32)
    >>> worker = Worker("decode", 0, (Region("kv", 4096, 320),), (Group("attn", 4),), (view,))
    >>> tails(worker, {"attn": Blocks([3, 9])}, (0, 6))["mla"].tolist()
    [[4400, 6, 0], [4408, 6, 0]]
    """
    groups = {group.name: group for group in instance(Worker, worker, "worker of tails").groups}
    check_names(groups, instance(Mapping, blocks, "block tables"), "block table")
    check_names(groups, tokens if isinstance(tokens, Mapping) else (), "token range")
    ranges = {name: range_of(tokens, groups[name]) for name in blocks}
    starts = {name: before(groups[name], given[1]) for name, given in ranges.items() if given}
    pieces = {
        number: _pieces(geometry, blocks[key], starts[key])
        for number, geometry in enumerate(worker.geometries)
        if (key := geometry.group.name) in starts
    }
    found: dict[str, list[Descriptors]] = {}
    for view, number, (at, place) in zip(
        worker.views, worker.geometry_of, worker.places.tolist(), strict=True
    ):
        if number in pieces:
            offset, length = pieces[number]
            region = worker.regions[at]
            address = np.uint64(region.address + place) + offset.astype(np.uint64)
            device = np.full(offset.size, region.device_id, np.uint64)
            found.setdefault(view.name, []).append(
                np.stack([address, length.astype(np.uint64), device], axis=1)
            )
    return {name: read_only(np.concatenate(parts)) for name, parts in found.items()}


def _pieces(geometry: Geometry, table: Blocks, start: int) -> tuple[Ints, Ints]:
    """The bytes of the request's slots from local index ``start`` on: offsets in the pool and lengths, ascending."""
    check_blocks(geometry.group.name, table, geometry.num_blocks, is_destination=True)
    size, ordinals = slots(geometry.group), table.ordinals
    block, slot = divmod(start, size)
    token = geometry.segments[TOKEN].at(np.arange(size))
    inner, length = _content(geometry)
    # Offsets of all contiguous runs: blocks outside, slots next, the runs of one slot inside. The first block counts
    # from `slot` on, later ones from slot 0. Runs that continue each other are then joined.
    parts = []
    for which, first in ((ordinals == block, slot), (ordinals > block, 0)):
        pages = np.add.outer(
            table.ids[which].astype(np.int64) * geometry.block_stride_bytes, token[first:]
        )
        parts.append(np.add.outer(pages, inner).reshape(-1))
    offset = np.sort(np.concatenate(parts))
    first_of = heads(offset[1:] == offset[:-1] + length)[: offset.size]
    return offset[first_of], np.diff(first_of, append=offset.size) * length


def _content(geometry: Geometry) -> tuple[Ints, int]:
    """The contiguous runs of one slot: their offsets, and the length that they share."""
    offset, length = np.zeros(1, np.int64), geometry.itemsize
    for axis in sorted(geometry.axes, key=lambda axis: axis.stride_bytes):
        if axis.name == TOKEN or axis.extent == 1:
            continue
        if offset.size == 1 and axis.stride_bytes == length:
            length *= axis.extent
        else:
            offset = np.add.outer(offset, np.arange(axis.extent) * axis.stride_bytes).reshape(-1)
    return offset, length
