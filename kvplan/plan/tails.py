"""Tails: the bytes of a request's blocks after its last position.

An engine sees whole blocks. The slots after the last transferred position still hold the bytes of
an earlier request until the engine writes them or sets them to zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvplan._arrays import Ints, heads, read_only
from kvplan._checks import instance
from kvplan.describe.axes import contiguous, offsets_along
from kvplan.describe.blocks import Blocks, Tokens, check_blocks
from kvplan.describe.views import TOKEN, Geometry
from kvplan.describe.worker import Worker
from kvplan.plan.align import before
from kvplan.plan.bind import check_names, range_of
from kvplan.plan.tables import Descriptors


def tails(worker: Worker, blocks: Mapping[str, Blocks], tokens: Tokens) -> dict[str, Descriptors]:
    """Return the bytes of a destination's blocks after the request's range, by tensor.

    They are (n, 3) uint64: address, length, device. ``blocks`` and ``tokens`` are the arguments of
    ``bind`` for this worker. A group without a table or a range has no tail. Slots before the range
    are not listed: the worker already holds those tokens. Raises what ``bind`` raises.

    >>> from kvplan import Axis, Group, Region, View
    >>> axes = (Axis("token", 0, 4, 4, 8), Axis("dim", 0, 6, 6, 1))
    >>> view = View("mla", "attn", "kv", "uint8", axes, num_blocks=10, block_stride_bytes=32)
    >>> worker = Worker("decode", 0, (Region("kv", 4096, 320),), (Group("attn", 4),), (view,))
    >>> tails(worker, {"attn": Blocks([3, 9])}, (0, 6))["mla"].tolist()
    [[4400, 6, 0], [4408, 6, 0]]
    """
    groups = {group.name: group for group in instance(Worker, worker, "worker of tails").groups}
    check_names(groups, instance(Mapping, blocks, "block tables"), "block table")
    check_names(groups, tokens if isinstance(tokens, Mapping) else (), "token range")
    # The local index of each group's first slot after the range.
    first_slots = {}
    for name in blocks:
        token_range = range_of(tokens, groups[name])
        if token_range:
            first_slots[name] = before(groups[name], token_range[1])
    tails_of_geometry = {}
    for i, geometry in enumerate(worker.geometries):
        name = geometry.group.name
        if name in first_slots:
            tails_of_geometry[i] = _tail(geometry, blocks[name], first_slots[name])
    # Views of one geometry have the same tail, each at its own offset.
    descriptors: dict[str, list[Descriptors]] = {}
    views = zip(worker.views, worker.geometry_of, worker.region_offsets.tolist(), strict=True)
    for view, geometry_index, (region_index, view_offset) in views:
        if geometry_index not in tails_of_geometry:
            continue
        offset, length = tails_of_geometry[geometry_index]
        region = worker.regions[region_index]
        address = np.uint64(region.address + view_offset) + offset.astype(np.uint64)
        device = np.full(offset.size, region.device_id, np.uint64)
        columns = [address, length.astype(np.uint64), device]
        descriptors.setdefault(view.name, []).append(np.stack(columns, axis=1))
    return {name: read_only(np.concatenate(of_views)) for name, of_views in descriptors.items()}


def _tail(geometry: Geometry, table: Blocks, first_slot: int) -> tuple[Ints, Ints]:
    """Return the bytes of the request's slots from local index ``first_slot`` on.

    They are offsets in the pool, ascending, and lengths.
    """
    check_blocks(geometry.group.name, table, geometry.num_blocks, is_destination=True)
    num_slots = geometry.group.num_slots
    ordinals = table.ordinals
    block, slot = divmod(first_slot, num_slots)
    slot_offsets = geometry.segments[TOKEN].at(np.arange(num_slots))
    content = [axis for axis in geometry.axes if axis.name != TOKEN]
    length, outer_axes = contiguous(content, geometry.itemsize)
    # Offsets of all contiguous runs: blocks outside, slots next, the runs of one slot inside. The
    # first block counts from `slot` on, later ones from slot 0.
    offsets_of_blocks = []
    for chosen, start in ((ordinals == block, slot), (ordinals > block, 0)):
        block_offsets = table.ids[chosen].astype(np.int64) * geometry.block_stride_bytes
        offsets = np.add.outer(block_offsets, slot_offsets[start:])
        offsets_of_blocks.append(np.add.outer(offsets, offsets_along(outer_axes)).reshape(-1))
    # Runs that continue each other are joined.
    offset = np.sort(np.concatenate(offsets_of_blocks))
    first = heads(offset[1:] == offset[:-1] + length)[: offset.size]
    return offset[first], np.diff(first, append=offset.size) * length
