"""Pieces: what the bytes of a block are, by the formula of views alone.

A *piece* is a run of bytes of one slot: where it starts in block 0, how long it is, and the number of its first byte
among the bytes of its tensor at one position. Both sides of a transfer number a tensor's bytes alike, as the
destination keeps them, so a byte moves to where it belongs if tensor, position and number are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.describe.axes import Axis
from kvplan.describe.views import TOKEN, Geometry, Group
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError

Ints = npt.NDArray[np.int64]

Weights = tuple[tuple[str, int], ...]
"""By how much a byte's number grows along each axis of a tensor."""


@attrs.frozen(eq=False)
class Pieces:
    """Pieces of some views of one group, by ascending start, in arrays of one length.

    ``start`` counts through the worker's regions, one laid behind another.
    """

    start: Ints
    length: Ints
    slot: Ints
    tensor: Ints
    number: Ints
    block_stride: Ints
    num_blocks: Ints

    def cut(self, start: Ints, length: Ints) -> tuple[Ints, Ints, Ints, Ints] | None:
        """Ranges cut at the pieces: of each part its range, its piece, its start and its length.

        ``None`` where a range has a byte that is in no piece.
        """
        low = np.searchsorted(self.start, start, "right") - 1
        high = np.searchsorted(self.start, start + length, "left")
        if (low < 0).any():
            return None
        number = high - low
        of = np.repeat(np.arange(start.size), number)
        piece = np.arange(of.size) - np.repeat(np.cumsum(number) - number - low, number)
        begin = np.maximum(start[of], self.start[piece])
        size = np.minimum((start + length)[of], (self.start + self.length)[piece]) - begin
        if (size <= 0).any() or size.sum() != length.sum():
            return None
        return of, piece, begin, size


def numbering(geometry: Geometry) -> Weights:
    """The weights by which a tensor is numbered as a view keeps it: the finest axis first, single coordinates last."""
    steps = {
        name: [a.stride_bytes for a in geometry.axes if a.name == name and a.extent > 1] for name in geometry.sizes
    }
    weight, weights = geometry.itemsize, []
    for name in sorted(steps, key=lambda name: min(steps[name], default=math.inf)):
        if name != TOKEN:
            weights.append((name, weight))
            weight *= geometry.sizes[name]
    return tuple(weights)


def regions_in_a_row(worker: Worker) -> Ints:
    """Where each region begins when they are laid one behind another."""
    total = sum(region.size_bytes for region in worker.regions)
    if total >= 1 << 62:
        raise KVPlanError(
            "RANGE",
            f"certify the regions of {worker.label}",
            expected=f"fewer than {1 << 62} bytes in all",
            got=f"{total}",
            size_bytes=total,
        )
    return np.cumsum([0, *(region.size_bytes for region in worker.regions)])


def pieces(worker: Worker, group: Group, tensors: Mapping[str, tuple[int, Weights]]) -> Pieces:
    """The pieces of those tensors, each with its index and its weights, that a worker has in a group."""
    alike: dict[tuple[int, Weights], tuple[list[int], list[int]]] = {}
    for view, number in enumerate(worker.geometry_of):
        found = tensors.get(worker.views[view].name)
        if found and worker.geometries[number].group == group:
            views, indices = alike.setdefault((number, found[1]), ([], []))
            views.append(view)
            indices.append(found[0])
    base = regions_in_a_row(worker)
    columns: list[list[Ints]] = [[np.empty(0, np.int64)] * 7]
    for (number, weights), (views, indices) in alike.items():
        geometry = worker.geometries[number]
        slot, offset, numbers, length = _of_block(geometry, dict(weights))
        region, place = worker.places[views].T
        every = np.ones((len(views), slot.size), np.int64)
        start = np.add.outer(base[region] + place, offset)
        columns.append(
            [
                start,
                every * length,
                every * slot,
                every * np.array(indices)[:, None],
                every * numbers,
                every * geometry.block_stride_bytes,
                every * geometry.num_blocks,
            ]
        )
    arrays = [np.concatenate([column[i].reshape(-1) for column in columns]) for i in range(7)]
    order = np.argsort(arrays[0])
    return Pieces(*(array[order] for array in arrays))


def _of_block(geometry: Geometry, weights: Mapping[str, int]) -> tuple[Ints, Ints, Ints, int]:
    """Slot, offset and number of each piece of a block, and the length of all of them."""
    offset, number, length = np.zeros(1, np.int64), np.zeros(1, np.int64), geometry.itemsize
    for axis, weight in sorted(_weighted(geometry.axes, weights), key=lambda pair: pair[0].stride_bytes):
        number = number + axis.start * weight
        if offset.size == 1 and axis.stride_bytes == weight == length:
            length *= axis.extent
        elif axis.extent > 1:
            step = np.arange(axis.extent, dtype=np.int64)
            offset = np.add.outer(offset, step * axis.stride_bytes).reshape(-1)
            number = np.add.outer(number, step * weight).reshape(-1)
    at = np.zeros(1, np.int64)
    for axis in geometry.axes:
        if axis.name == TOKEN:
            at = np.add.outer(at, np.arange(axis.extent, dtype=np.int64) * axis.stride_bytes).reshape(-1)
    slots = np.repeat(np.arange(at.size), offset.size)
    return slots, np.add.outer(at, offset).reshape(-1), np.tile(number, at.size), length


def _weighted(axes: tuple[Axis, ...], weights: Mapping[str, int]) -> list[tuple[Axis, int]]:
    """Each axis but those of tokens, with its weight: a digit's is that of the finer digits of its name together."""
    found = []
    for i, axis in enumerate(axes):
        if axis.name != TOKEN:
            finer = math.prod(other.size for other in axes[i + 1 :] if other.name == axis.name)
            found.append((axis, weights[axis.name] * finer))
    return found
