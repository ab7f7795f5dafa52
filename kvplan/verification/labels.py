"""Labels: a different number for every byte that a destination worker needs, and its address.

The bytes of a tensor at one position are *numbered* in the order in which the destination stores
them; both sides of a transfer use the same numbers. So a byte arrives where it belongs if tensor,
position and number are equal. A *segment* is a run of bytes in one slot of a block that are
contiguous in memory and in number.

Everything here follows from the address formula of a view and from two rules, so that plans can be
checked by code that does not know how plans are made:

- verify.Q1: a destination worker needs the elements of its views whose tensor some source
  has, at the positions of the range that its context holds; in a state group, at the block ordinals
  of the range. It needs nothing where its block table has a gap.
- verify.Q2: a context (rank ``r``, size ``n``, interleave ``i``) holds position ``p`` if
  ``p // i % n == r``, in local slot ``p // (n * i) * i + p % i``. Divided by tokens_per_block, that
  is block ordinal and slot in the block.
- verify.Q3: where a slot has one value of ``s`` tokens, positions count these values: those
  of tokens ``[a, b)`` are ``a / s`` to ``b / s``, rounded up, and an interleave of ``i`` tokens is
  ``i / s``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from kvplan._checks import INT64_END, at_most
from kvplan.describe.axes import Axis
from kvplan.describe.blocks import Blocks, Range
from kvplan.describe.views import TOKEN, Geometry, Group, Region, View
from kvplan.describe.worker import Worker
from kvplan.verification.memory import Cells, FakeMemory, runs_of

if TYPE_CHECKING:
    from kvplan._arrays import Ints

CHUNK_CELLS: Final = 1 << 19
"""Labels are made for at most this many cells at a time, or for one position."""

Weights = tuple[tuple[str, int], ...]
"""By how much the number of a byte grows along each axis of a tensor but the token axis."""


def numbering(view: View | Geometry) -> Weights:
    """Return the weights that number a tensor's bytes as ``view`` stores them: finest axis first.

    Axes with one element here come last. Axes of size 1 have no weight: the other side may lack
    them. Raises ``RANGE`` for a tensor of more bytes than 64 bits number.
    """
    sizes = {name: size for name, size in view.sizes.items() if size > 1 and name != TOKEN}
    shortest_stride = dict.fromkeys(sizes, math.inf)
    for axis in view.axes:
        if axis.name in sizes and axis.extent > 1:
            shortest_stride[axis.name] = min(shortest_stride[axis.name], axis.stride_bytes)
    weight = view.itemsize
    weights = []
    for name in sorted(sizes, key=lambda name: shortest_stride[name]):
        weights.append((name, weight))
        weight *= sizes[name]
    at_most(INT64_END - 1, weight, "bytes at one position", "number the bytes of a tensor")
    return tuple(weights)


def segments_of_slot(
    view: View | Geometry,
    weights: Weights,
    slices: Mapping[str, Range] | None = None,
) -> tuple[Ints, Ints, int]:
    """Return the segments of one slot: their offsets, the numbers of their first bytes, one length.

    With ``slices``, only coordinates inside these ranges, perhaps none; an axis of several digits
    is not narrowed.

    >>> axes = (Axis("head", 0, 2, 8, 16), Axis("dim", 0, 4, 4, 1))
    >>> view = View("a", "g", "r", "uint8", axes, 1, 0)
    >>> segments_of_slot(view, numbering(view))
    (array([ 0, 16]), array([0, 4]), 4)
    """
    # At first one element; then its segments along every axis, from the finest to the coarsest.
    offset = np.zeros(1, np.int64)
    number = np.zeros(1, np.int64)
    length = view.itemsize
    for axis, weight in sorted(_weighted(view.axes, dict(weights)), key=_stride_of_weighted):
        low, high = axis.start, axis.stop
        if slices and axis.name in slices and axis.size == view.sizes[axis.name]:
            start, stop = slices[axis.name]
            low, high = max(low, start), min(high, stop)
        extent = max(high - low, 0)
        offset = offset + (low - axis.start) * axis.stride_bytes
        number = number + low * weight
        if extent and offset.size == 1 and axis.stride_bytes == weight == length:
            length *= extent
        elif extent != 1:
            # Every segment so far, once for each coordinate of this axis.
            steps = np.arange(extent, dtype=np.int64)
            offset = np.add.outer(steps * axis.stride_bytes, offset).reshape(-1)
            number = np.add.outer(steps * weight, number).reshape(-1)
    return offset, number, length


def num_segments_of_slot(view: View | Geometry, weights: Weights) -> int:
    """Return the number of the segments of one slot that :func:`segments_of_slot` lists."""
    number = 1
    length = view.itemsize
    for axis, weight in sorted(_weighted(view.axes, dict(weights)), key=_stride_of_weighted):
        if number == 1 and axis.stride_bytes == weight == length:
            length *= axis.extent
        else:
            number *= axis.extent
    return number


def slots_of_block(view: View | Geometry) -> Ints:
    """Return the offset of each slot in a block: one slot for a view without token axis."""
    offset = np.zeros(1, np.int64)
    for axis in view.axes:
        if axis.name == TOKEN:
            # Every slot of the coarser digits, once for each value of this digit.
            steps = np.arange(axis.extent, dtype=np.int64) * axis.stride_bytes
            offset = np.add.outer(offset, steps).reshape(-1)
    return offset


def _weighted(axes: Sequence[Axis], weights: Mapping[str, int]) -> list[tuple[Axis, int]]:
    """Return every axis but the token axis, with its weight.

    The weight of a digit counts the finer digits of its name.
    """
    weighted = []
    for i, axis in enumerate(axes):
        if axis.name != TOKEN:
            finer_digits = [finer.size for finer in axes[i + 1 :] if finer.name == axis.name]
            weight = weights[axis.name] * math.prod(finer_digits) if axis.size > 1 else 0
            weighted.append((axis, weight))
    return weighted


def _stride_of_weighted(weighted: tuple[Axis, int]) -> int:
    axis, _ = weighted
    return axis.stride_bytes


@attrs.frozen
class Location:
    """An address of a worker in words, and the view that has it, if one does."""

    worker: Worker
    address: int
    words: str = "no region"
    region: Region | None = None
    view: View | None = None

    def __str__(self) -> str:
        return f"{self.words}, address {self.address:#x} of {self.worker.label}"


def locate(worker: Worker, address: int, device_id: int) -> Location:
    """Return the location of an address: the address formula of the worker's views, inverted.

    The first view that has the address counts.

    >>> from kvplan import Group
    >>> axes = (Axis("token", 0, 4, 4, 8), Axis("dim", 0, 6, 6, 1))
    >>> view = View("mla", "attn", "kv", "uint8", axes, 10, 32)
    >>> worker = Worker("decode", 0, (Region("kv", 4096, 320),), (Group("attn", 4),), (view,))
    >>> print(locate(worker, 4096 + 3 * 32 + 2 * 8 + 5, 0))
    mla dim 5 byte 0 in group attn block 3 slot 2, address 0x1075 of decode/0
    >>> print(locate(worker, 4096 + 7, 0))
    padding of region kv, address 0x1007 of decode/0
    """
    location = Location(worker, address)
    for region in worker.regions:
        offset = address - region.address
        if region.device_id == device_id and 0 <= offset < region.size_bytes:
            location = Location(worker, address, f"padding of region {region.name}", region)
            for view in worker.views:
                if view.region != region.name:
                    continue
                words = _element_at(view, offset - view.offset_bytes)
                if words:
                    return Location(worker, address, words, region, view)
    return location


def _element_at(view: View, offset: int) -> str:
    """Return the element at an offset of a view in words; an empty string if there is none."""
    # Stride and extent of each dimension, and the index of its axis; that of the blocks is -1.
    block_stride = view.block_stride_bytes if view.num_blocks > 1 else 0
    dims = [(block_stride, view.num_blocks, -1)]
    dims += [(axis.stride_bytes, axis.extent, i) for i, axis in enumerate(view.axes)]
    index: dict[int, int] = {}
    # The longest stride first: what is left of the offset is that of the finer axes.
    for stride, extent, i in sorted(dims, reverse=True):
        index[i] = min(max(offset, 0) // stride, extent - 1) if extent > 1 else 0
        offset -= index[i] * stride
    if not 0 <= offset < view.itemsize:
        return ""
    coordinates: dict[str, int] = {}
    for i, axis in enumerate(view.axes):
        coarser = coordinates.get(axis.name, 0)
        coordinates[axis.name] = coarser * axis.size + axis.start + index[i]
    slot = coordinates.pop(TOKEN, None)
    words = [view.name]
    words += [f"{name} {coordinate}" for name, coordinate in sorted(coordinates.items())]
    words.append(f"byte {offset} in group {view.group} block {index[-1]}")
    if slot is not None:
        words.append(f"slot {slot}")
    return " ".join(words)


def slots_of(group: Group) -> int:
    """Return the number of slots in a block; a state is one."""
    return (group.tokens_per_block or 1) // group.tokens_per_slot


def interleave_of(group: Group) -> int:
    """Return the number of consecutive positions that one rank of the context has
    (verify.Q3).
    """
    if group.context.size == 1:
        return 1
    return group.context.interleave_tokens // group.tokens_per_slot


def positions_in(group: Group, tokens: Range) -> Range:
    """Return the positions of a range of tokens (verify.Q3)."""
    start, stop = tokens
    return -(-start // group.tokens_per_slot), -(-stop // group.tokens_per_slot)


def listed_slots(group: Group, blocks: Blocks | None) -> Ints:
    """Return the local slots that a block table has blocks for, ascending."""
    slots = slots_of(group)
    ordinals = np.empty(0, np.int64) if blocks is None else blocks.ordinals
    return np.add.outer(ordinals * slots, np.arange(slots)).reshape(-1)


def local_slots(group: Group, positions: Ints) -> Ints:
    """Return the local slots of positions that the group's context holds (rule verify.Q2)."""
    interleave = interleave_of(group)
    cycle = group.context.size * interleave
    return positions // cycle * interleave + positions % interleave


def positions_of(group: Group, slots: Ints) -> Ints:
    """Return the positions in local slots: rule verify.Q2, inverted."""
    interleave = interleave_of(group)
    cycle = group.context.size * interleave
    first = group.context.rank * interleave
    return slots // interleave * cycle + first + slots % interleave


def needed(group: Group, blocks: Blocks | None, tokens: Range | None) -> Ints:
    """Return the positions of a range that the group's context holds, ascending (verify.Q1).

    Without a range, these are all positions in its blocks.

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
    turns = positions // interleave_of(group)
    held = turns % group.context.size == group.context.rank
    if blocks is not None and blocks.has_gaps:
        held &= np.isin(local_slots(group, positions), listed_slots(group, blocks))
    return np.asarray(positions[held])


def _group_of(worker: Worker, view: View) -> Group:
    return next(group for group in worker.groups if group.name == view.group)


@attrs.frozen(eq=False)
class Labels:
    """The labels of one tensor.

    A label is ``base``, plus the bytes of all positions since the first, plus the byte's number.
    ``slices`` are the coordinates along each axis that are labelled in the sources.
    """

    name: str
    base: int
    positions: Ints
    weights: Weights
    sizes: Mapping[str, int]
    itemsize: int
    slices: Mapping[str, Range]

    @property
    def bytes_per_position(self) -> int:
        """The distance between the labels of neighbouring positions."""
        return self.itemsize * math.prod(self.sizes[name] for name, _ in self.weights)

    @property
    def end(self) -> int:
        """The label after the last one."""
        if not self.positions.size:
            return self.base
        num_positions = int(self.positions[-1] - self.positions[0]) + 1
        return self.base + num_positions * self.bytes_per_position

    def first(self, positions: Ints) -> Ints:
        """Return the first label of each position."""
        return np.asarray(self.base + (positions - self.positions[0]) * self.bytes_per_position)

    def describe(self, label: int) -> str:
        """Return the byte that a label of this tensor means, by coordinates."""
        position, byte = divmod(label - self.base, self.bytes_per_position)
        words = [self.name]
        for name, weight in sorted(self.weights):
            words.append(f"{name} {byte // weight % self.sizes[name]}")
        words.append(f"byte {byte % self.itemsize} of position {position + int(self.positions[0])}")
        return " ".join(words)


def label_tensors(
    positions_by_view: Iterable[tuple[View, Ints]],
    source_positions: Mapping[str, Ints] | None = None,
) -> dict[str, Labels]:
    """Return labels by tensor, from 1 on, for destination views with the positions that each needs.

    With ``source_positions``, by tensor, these have labels too, and all coordinates along each
    axis: of what no destination needs, it can then be said what it is.

    >>> from kvplan import Axis
    >>> axes = (Axis("token", 0, 4, 4, 4), Axis("dim", 0, 2, 2, 2))
    >>> view = View("layers.0", "attn", "kv", "float16", axes, 9, 16)
    >>> labels = label_tensors([(view, np.arange(100, 104))])["layers.0"]
    >>> labels.base, labels.end, labels.describe(7)
    (1, 17, 'layers.0 dim 1 byte 0 of position 101')
    """
    # Several views may hold slices of one tensor: they share the numbering of the first.
    first_view: dict[str, View] = {}
    positions: dict[str, Ints] = {}
    slices: dict[str, dict[str, Range]] = {}
    for view, needed_positions in positions_by_view:
        first_view.setdefault(view.name, view)
        before = positions.get(view.name, needed_positions)
        positions[view.name] = np.union1d(before, needed_positions)
        if source_positions is not None:
            at_sources = source_positions[view.name]
            positions[view.name] = np.union1d(positions[view.name], at_sources)
            slices[view.name] = {name: (0, size) for name, size in view.sizes.items()}
        else:
            _extend_slices(slices.setdefault(view.name, {}), view)
    labels: dict[str, Labels] = {}
    base = 1
    for name, view in first_view.items():
        weights = numbering(view)
        labels[name] = Labels(
            name,
            base,
            positions[name],
            weights,
            view.sizes,
            view.itemsize,
            slices[name],
        )
        base = labels[name].end
    return labels


def _extend_slices(slices: dict[str, Range], view: View) -> None:
    """Extend the slice of each axis by that of a view."""
    for axis in view.axes:
        size = view.sizes[axis.name]
        # What a view holds of an axis in several digits is no range: take all of it.
        low, high = (axis.start, axis.stop) if axis.size == size else (0, size)
        start, stop = slices.get(axis.name, (low, high))
        slices[axis.name] = min(low, start), max(high, stop)


@attrs.frozen(eq=False)
class Window:
    """A view's bytes for some positions.

    Segment ``j`` of ``positions[i]`` is ``cells[start[i] + offset[j]]``. ``cells`` are all runs of
    cells in the view's region that are as long as a segment; ``number`` has the number of each
    segment's first byte.
    """

    labels: Labels
    cells: Cells
    positions: Ints
    start: Ints
    offset: Ints
    number: Ints

    def chunks(self) -> Iterator[tuple[Ints, Cells]]:
        """Yield indices into ``cells`` and the labels that belong there, chunk by chunk.

        Indices are (positions, segments), labels (positions, segments, bytes).
        """
        segment_bytes = self.cells.shape[1]
        positions_per_chunk = max(1, CHUNK_CELLS // max(self.offset.size * segment_bytes, 1))
        # The number of every byte of a position, (segments, bytes).
        number = np.add.outer(self.number, np.arange(segment_bytes)).astype(self.cells.dtype)
        for low in range(0, self.positions.size, positions_per_chunk):
            chunk = slice(low, low + positions_per_chunk)
            first = self.labels.first(self.positions[chunk]).astype(self.cells.dtype)
            yield np.add.outer(self.start[chunk], self.offset), np.add.outer(first, number)


def window(
    memory: FakeMemory,
    worker: Worker,
    view: View,
    labels: Labels,
    blocks: Blocks | None,
    positions: Ints | None = None,
) -> Window:
    """Return a view's bytes for all positions of its tensor that the worker holds in its blocks.

    With ``positions``, for those of them alone.
    """
    group = _group_of(worker, view)
    if positions is None:
        positions = labels.positions
    # Of these positions, those that the worker's context and blocks hold.
    in_blocks = needed(group, blocks, None)
    positions = positions[np.isin(positions, in_blocks, assume_unique=True)]
    # The offset of each position in the region.
    ordinal, slot = np.divmod(local_slots(group, positions), slots_of(group))
    start = view.offset_bytes + slots_of_block(view)[slot]
    if blocks is not None:
        # Ordinals ascend, and each position's is among them: so this is the index of its block.
        block = blocks.ids[np.searchsorted(blocks.ordinals, ordinal)]
        start += block.astype(np.int64) * view.block_stride_bytes
    offset, number, length = segments_of_slot(view, labels.weights, labels.slices)
    cells = runs_of(memory.region(worker, view), length)
    return Window(labels, cells, positions, start, offset, number)
