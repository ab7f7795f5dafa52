"""Pieces: which bytes of a tensor a worker's blocks hold, and where, from the address formula of views alone.

The bytes of a tensor at one position are *numbered* in the order in which the destination stores them; both sides of a
transfer use the same numbers. So a byte arrives where it belongs if tensor, position and number are equal. A *piece* is
a run of bytes in one slot of a block that are contiguous in memory and in number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan.describe.axes import Axis
from kvplan.describe.blocks import Range
from kvplan.describe.views import TOKEN, Geometry, Region, View
from kvplan.describe.worker import Worker

Weights = tuple[tuple[str, int], ...]
"""By how much the number of a byte grows along each axis of a tensor but the token axis."""


def numbering(view: View | Geometry) -> Weights:
    """The weights that number a tensor's bytes as ``view`` stores them: finest axis first, one-element axes last."""
    sizes = view.sizes
    steps = {name: [a.stride_bytes for a in view.axes if a.name == name and a.extent > 1] for name in sizes}
    weight, weights = view.itemsize, []
    for name in sorted(steps, key=lambda name: min(steps[name], default=math.inf)):
        if name != TOKEN:
            weights.append((name, weight))
            weight *= sizes[name]
    return tuple(weights)


def pieces_of_slot(
    view: View | Geometry, weights: Weights, parts: Mapping[str, Range] | None = None
) -> tuple[Ints, Ints, int]:
    """The pieces of one slot: the offset of each, the number of its first byte, and the length of all of them.

    With ``parts``, only coordinates inside these intervals; an axis of several digits is not narrowed.

    >>> view = View("a", "g", "r", "uint8", (Axis("head", 0, 2, 8, 16), Axis("dim", 0, 4, 4, 1)), 1, 0)
    >>> pieces_of_slot(view, numbering(view))
    (array([ 0, 16]), array([0, 4]), 4)
    """
    offset, number, length = np.zeros(1, np.int64), np.zeros(1, np.int64), view.itemsize
    for axis, weight in sorted(_weighted(view.axes, dict(weights)), key=lambda pair: pair[0].stride_bytes):
        low, high = axis.start, axis.stop
        if parts and axis.name in parts and axis.size == view.sizes[axis.name]:
            low, high = max(low, parts[axis.name][0]), min(high, parts[axis.name][1])
        extent = max(high - low, 0)
        offset = offset + (low - axis.start) * axis.stride_bytes
        number = number + low * weight
        if offset.size == 1 and axis.stride_bytes == weight == length:
            length *= extent
        elif extent != 1:
            # Every piece so far, once for each coordinate of this axis.
            steps = np.arange(extent, dtype=np.int64)
            offset = np.add.outer(steps * axis.stride_bytes, offset).reshape(-1)
            number = np.add.outer(steps * weight, number).reshape(-1)
    return offset, number, length


def slots_of_block(view: View | Geometry) -> Ints:
    """The offset of each slot in a block, in order: one slot for a view without token axis."""
    offset = np.zeros(1, np.int64)
    for axis in view.axes:
        if axis.name == TOKEN:
            offset = np.add.outer(offset, np.arange(axis.extent, dtype=np.int64) * axis.stride_bytes).reshape(-1)
    return offset


def _weighted(axes: tuple[Axis, ...], weights: Mapping[str, int]) -> list[tuple[Axis, int]]:
    """Every axis but the token axis, with its weight. The weight of a digit counts the finer digits of its name."""
    found = []
    for i, axis in enumerate(axes):
        if axis.name != TOKEN:
            finer = math.prod(other.size for other in axes[i + 1 :] if other.name == axis.name)
            found.append((axis, weights[axis.name] * finer))
    return found


@attrs.frozen
class Place:
    """What a worker stores at an address: ``what`` in words, and the block and slot of ``view`` if it is in a view."""

    worker: Worker
    address: int
    what: str = "no region"
    region: Region | None = None
    view: View | None = None
    block: int = 0
    slot: int = 0

    def __str__(self) -> str:
        return f"{self.what}, address {self.address:#x} of {self.worker.label}"


def locate(worker: Worker, address: int, device_id: int) -> Place:
    """The place of an address: the address formula of the worker's views, inverted. The first matching view counts.

    >>> from kvplan import Group
    >>> view = View("mla", "attn", "kv", "uint8", (Axis("token", 0, 4, 4, 8), Axis("dim", 0, 6, 6, 1)), 10, 32)
    >>> worker = Worker("decode", 0, (Region("kv", 4096, 320),), (Group("attn", 4),), (view,))
    >>> print(locate(worker, 4096 + 3 * 32 + 2 * 8 + 5, 0))
    mla dim 5 byte 0 in group attn block 3 slot 2, address 0x1075 of decode/0
    >>> print(locate(worker, 4096 + 7, 0))
    padding of region kv, address 0x1007 of decode/0
    """
    found = Place(worker, address)
    for region in worker.regions:
        offset = address - region.address
        if region.device_id == device_id and 0 <= offset < region.size_bytes:
            found = Place(worker, address, f"padding of region {region.name}", region)
            for view in worker.views:
                if view.region == region.name and (element := _invert(view, offset - view.offset_bytes)):
                    return Place(worker, address, element[0], region, view, *element[1:])
    return found


def _invert(view: View, offset: int) -> tuple[str, int, int] | None:
    """The element at an offset from a view's first byte, if there is one: in words, its block and its slot."""
    dims = [(view.block_stride_bytes if view.num_blocks > 1 else 0, view.num_blocks, -1)]
    dims += [(axis.stride_bytes, axis.extent, i) for i, axis in enumerate(view.axes)]
    at = {}
    # The longest stride first: what is left of the offset is that of the finer axes.
    for stride, extent, i in sorted(dims, reverse=True):
        at[i] = min(max(offset, 0) // stride, extent - 1) if extent > 1 else 0
        offset -= at[i] * stride
    if not 0 <= offset < view.itemsize:
        return None
    coordinates: dict[str, int] = {}
    for i, axis in enumerate(view.axes):
        coordinates[axis.name] = coordinates.get(axis.name, 0) * axis.size + axis.start + at[i]
    slot = coordinates.pop(TOKEN, None)
    words = " ".join([view.name, *(f"{name} {value}" for name, value in sorted(coordinates.items())), f"byte {offset}"])
    words += f" in group {view.group} block {at[-1]}" + ("" if slot is None else f" slot {slot}")
    return words, at[-1], slot or 0
