"""Labels: a different number for every byte that a destination worker needs, and where in memory each label belongs.

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
from kvplan.describe.blocks import Blocks, Range
from kvplan.describe.views import Group, View
from kvplan.describe.worker import Worker
from kvplan.verification.memory import Cells, FakeMemory, runs_of
from kvplan.verification.pieces import Place, Weights, numbering, pieces_of_slot, slots_of_block

CHUNK_CELLS: Final = 1 << 22
"""Labels are made for at most this many cells at a time, or for one position."""


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
