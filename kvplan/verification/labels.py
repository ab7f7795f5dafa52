"""Labels: a different number for every byte that a destination worker needs, and where in memory each label belongs.

The bytes of a tensor at one position are *numbered* in the order in which the destination stores them; both sides of a
transfer use the same numbers. So a byte arrives where it belongs if tensor, position and number are equal. A *piece* is
a run of bytes in one slot of a block that are contiguous in memory and in number.

Everything here follows from the address formula of a view and from two rules, so that plans can be checked by code that
does not know how plans are made:

- Q1: a destination worker needs the elements of its views whose tensor some source has, at the positions of the range
  that its context holds; in a state group, at the block ordinals of the range. It needs nothing where its block table
  has a gap.
- Q2: a context (rank ``r``, size ``n``, interleave ``i``) holds position ``p`` if ``p // i % n == r``, in local slot
  ``p // (n * i) * i + p % i``. Divided by tokens_per_block, that is block ordinal and slot in the block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan.describe.axes import Axis
from kvplan.describe.blocks import Blocks, Range
from kvplan.describe.views import TOKEN, Geometry, Group, Region, View
from kvplan.describe.worker import Worker
from kvplan.verification.memory import Cells, FakeMemory, runs_of

CHUNK_CELLS: Final = 1 << 22
"""Labels are made for at most this many cells at a time, or for one position."""

Weights = tuple[tuple[str, int], ...]
"""By how much the number of a byte grows along each axis of a tensor but the token axis."""


def numbering(view: View | Geometry) -> Weights:
    """The weights that number a tensor's bytes as ``view`` stores them: finest axis first, one-element axes last.

    Axes of size 1 have none: the other side may lack them.
    """
    sizes = {name: size for name, size in view.sizes.items() if size > 1}
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

    With ``parts``, only coordinates inside these intervals, perhaps none; an axis of several digits is not narrowed.

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
        if extent and offset.size == 1 and axis.stride_bytes == weight == length:
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
            found.append((axis, weights[axis.name] * finer if axis.size > 1 else 0))
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


def listed_slots(group: Group, blocks: Blocks | None) -> Ints:
    """The local slots that a block table has blocks for, ascending: ``tokens_per_block`` for each block."""
    slots = group.tokens_per_block or 1
    ordinals = np.empty(0, np.int64) if blocks is None else blocks.ordinals
    return np.add.outer(ordinals * slots, np.arange(slots)).reshape(-1)


def local_slots(group: Group, positions: Ints) -> Ints:
    """The local slots of positions that the group's context holds (rule Q2)."""
    run, size = group.context.interleave_tokens, group.context.size
    return positions // (size * run) * run + positions % run


def positions_of(group: Group, slots: Ints) -> Ints:
    """The positions in local slots: rule Q2, inverted."""
    run, size, rank = group.context.interleave_tokens, group.context.size, group.context.rank
    return slots // run * (size * run) + rank * run + slots % run


def needed(group: Group, blocks: Blocks | None, tokens: Range | None) -> Ints:
    """The positions of a range that the group's context holds, or without one all in its blocks (Q1), ascending.

    >>> from kvplan import Context
    >>> group = Group("attn", 4, Context(rank=1, size=2, interleave_tokens=2))
    >>> needed(group, Blocks([7, 8]), (3, 9)).tolist()
    [3, 6, 7]
    >>> needed(group, Blocks([7, 8]), None).tolist()
    [2, 3, 6, 7, 10, 11, 14, 15]
    >>> needed(group, Blocks([0, 8], null=0), (3, 13)).tolist()
    [10, 11]
    """
    if tokens is None:
        return positions_of(group, listed_slots(group, blocks))
    positions = np.arange(*tokens, dtype=np.int64)
    held = positions // group.context.interleave_tokens % group.context.size == group.context.rank
    if blocks is not None and blocks.has_gaps:
        held &= np.isin(local_slots(group, positions), listed_slots(group, blocks))
    return np.asarray(positions[held])


def position_at(place: Place, tables: Mapping[str, Blocks]) -> int | None:
    """The position that a request's block tables give to a place; ``None`` if they do not have its block."""
    if place.view is None or (blocks := tables.get(place.view.group)) is None:
        return None
    group = next(group for group in place.worker.groups if group.name == place.view.group)
    slots = blocks.ordinals[blocks.ids == place.block] * (group.tokens_per_block or 1) + place.slot
    return int(positions_of(group, slots)[0]) if slots.size else None


@attrs.frozen(eq=False)
class Labels:
    """The labels of one tensor: ``base``, plus the bytes of all positions since the first, plus the byte's number.

    ``parts`` are the coordinates that the destination has along each axis: no others are labelled in the sources.
    """

    name: str
    base: int
    positions: Ints
    weights: Weights
    sizes: Mapping[str, int]
    itemsize: int
    parts: Mapping[str, Range]

    @property
    def bytes_per_position(self) -> int:
        """The distance between the labels of neighbouring positions."""
        return self.itemsize * math.prod(self.sizes[name] for name, _ in self.weights)

    @property
    def end(self) -> int:
        """The label after the last one."""
        positions = int(self.positions[-1] - self.positions[0]) + 1 if self.positions.size else 0
        return self.base + positions * self.bytes_per_position

    def first(self, positions: Ints) -> Ints:
        """The first label of each position."""
        return np.asarray(self.base + (positions - self.positions[0]) * self.bytes_per_position)

    def describe(self, label: int) -> str:
        """The byte that a label of this tensor means, by coordinates."""
        position, byte = divmod(label - self.base, self.bytes_per_position)
        words = [f"{name} {byte // weight % self.sizes[name]}" for name, weight in sorted(self.weights)]
        words.append(f"byte {byte % self.itemsize} of position {position + int(self.positions[0])}")
        return f"{self.name} {' '.join(words)}"


def number(views: Iterable[tuple[View, Ints]]) -> dict[str, Labels]:
    """Labels by tensor, from 1 on, for destination views with the positions that each needs.

    >>> from kvplan import Axis
    >>> view = View("layers.0", "attn", "kv", "float16", (Axis("token", 0, 4, 4, 4), Axis("dim", 0, 2, 2, 2)), 9, 16)
    >>> labels = number([(view, np.arange(100, 104))])["layers.0"]
    >>> labels.base, labels.end, labels.describe(7)
    (1, 17, 'layers.0 dim 1 byte 0 of position 101')
    """
    found: dict[str, tuple[View, Ints, dict[str, Range]]] = {}
    for view, wanted in views:
        first, positions, parts = found.get(view.name, (view, wanted, {}))
        for axis in view.axes:
            # The part of an axis in several digits is no interval: take all of it.
            whole = view.sizes[axis.name]
            low, high = (axis.start, axis.stop) if axis.size == whole else (0, whole)
            known = parts.get(axis.name, (low, high))
            parts[axis.name] = min(low, known[0]), max(high, known[1])
        found[view.name] = first, np.union1d(positions, wanted), parts
    made: dict[str, Labels] = {}
    base = 1
    for name, (view, positions, parts) in found.items():
        made[name] = Labels(name, base, positions, numbering(view), view.sizes, view.itemsize, parts)
        base = made[name].end
    return made


@attrs.frozen(eq=False)
class Window:
    """A view's bytes for some positions: ``cells[start[i] + offset[j]]`` is piece ``j`` of ``positions[i]``.

    ``cells`` are all runs of cells in the view's region that are as long as a piece; ``number`` has the number of each
    piece's first byte.
    """

    labels: Labels
    cells: Cells
    positions: Ints
    start: Ints
    offset: Ints
    number: Ints

    def chunks(self) -> Iterator[tuple[Ints, Cells]]:
        """Indices into ``cells``, (positions, pieces), and labels, (positions, pieces, bytes), some at a time."""
        length = self.cells.shape[1]
        step = max(1, CHUNK_CELLS // max(self.offset.size * length, 1))
        number = np.add.outer(self.number, np.arange(length)).astype(self.cells.dtype)
        for low in range(0, self.positions.size, step):
            some = slice(low, low + step)
            first = self.labels.first(self.positions[some]).astype(self.cells.dtype)
            yield np.add.outer(self.start[some], self.offset), np.add.outer(first, number)


def window(memory: FakeMemory, worker: Worker, view: View, labels: Labels, blocks: Blocks | None) -> Window:
    """A view's bytes for all positions of its tensor that the worker holds in its blocks."""
    group = next(group for group in worker.groups if group.name == view.group)
    positions = labels.positions[np.isin(labels.positions, needed(group, blocks, None), assume_unique=True)]
    ordinal, slot = np.divmod(local_slots(group, positions), group.tokens_per_block or 1)
    start = view.offset_bytes + slots_of_block(view)[slot]
    if blocks is not None:
        # Ordinals ascend, and each position's is among them: so this is the place of its block in the table.
        start += blocks.ids[np.searchsorted(blocks.ordinals, ordinal)].astype(np.int64) * view.block_stride_bytes
    offset, numbers, length = pieces_of_slot(view, labels.weights, labels.parts)
    return Window(labels, runs_of(memory.region(worker, view), length), positions, start, offset, numbers)
