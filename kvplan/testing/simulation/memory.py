"""Memory whose cells carry labels: of which tokens each byte is, and which part of the cache.

What a token caches depends on all tokens before it. So the label of a byte at position ``p`` is of
the first ``p + 1`` tokens and of the byte's number in the logical tensors, which is the same in all
engines. A recurrent state has the labels of the last position that it has passed. A request attends
to its own bytes if each cell that it needs has the label of its own tokens. What drafts cache has
the label of the next token too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from zlib import crc32

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints
from kvplan.describe import View, Worker
from kvplan.testing.simulation.catalog import GroupShape
from kvplan.verification.labels import Weights, numbering, segments_of_slot, slots_of_block
from kvplan.verification.memory import ByteRanges

CellLabels = npt.NDArray[np.uint64]

NUMBER_BITS: Final = 20
"""The bits of a label that number the bytes of one position; the others are of its tokens."""

TENSOR_BITS: Final = 14
"""The bits of a number that are of one tensor."""

MULTIPLIER: Final = 0xD6E8FEB86659FD93
"""An odd number by which a hash of tokens is multiplied."""


def prefix_labels(tokens: Sequence[int], facts: Sequence[tuple[int, str]] = ()) -> CellLabels:
    """Return for each position the label of its first byte, of all tokens and facts up to it.

    Each fact is that of a position. Those of one position may come in any order.
    """
    labels = []
    facts = sorted(facts)
    state = 0x9E3779B97F4A7C15
    # a hash of all tokens so far, of which the high bits are the label
    for position, token in enumerate(tokens):
        for at, fact in facts:
            if at == position:
                # multiplied, or else two facts that end alike would cancel each other
                state = (state ^ crc32(fact.encode()) << 20) * MULTIPLIER & (1 << 64) - 1
        state = (state ^ token + 1) * MULTIPLIER & (1 << 64) - 1
        state ^= state >> 32
        labels.append(state >> NUMBER_BITS << NUMBER_BITS)
    return np.array(labels, np.uint64)


@attrs.frozen(eq=False)
class Numbers:
    """How all engines number the bytes of a position: the weights and the place of each tensor."""

    weights: Mapping[str, Weights]

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> Numbers:
        """Number the tensors of some workers. Any of them will do for all."""
        views = dict[str, View]()
        for worker in workers:
            views.update({view.name: view for view in worker.views})
        return cls({name: numbering(views[name]) for name in sorted(views)})


@attrs.frozen(eq=False)
class _GroupCells:
    """Where the bytes of a group's positions are: (slots of a block, bytes), and their numbers."""

    tokens_per_block: int
    slots: Ints
    strides: Ints
    numbers: CellLabels
    num_ahead: int

    def labels(self, prefixes: CellLabels, start: int, stop: int) -> CellLabels:
        """Return the labels of positions, (positions, bytes)."""
        return prefixes[start + self.num_ahead : stop + self.num_ahead, None] + self.numbers

    def at(self, blocks: Sequence[int], start: int, stop: int) -> Ints:
        """Return the cells of positions, (positions, bytes)."""
        # each position is in a slot of a block of the table; a block of states has one slot
        positions = np.arange(start, stop)
        ordinals = positions // self.tokens_per_block
        slots = positions % len(self.slots)
        table = np.asarray(blocks, np.int64)
        return self.slots[slots] + table[ordinals, None] * self.strides

    def of_block(self, block: int) -> Ints:
        """Return all cells of a block."""
        return self.slots + block * self.strides


class LabelledMemory:
    """The memory of one worker, with a cell for each byte, and the cache groups in it.

    ``cells`` has the labels. Others read ``exported``: the cells themselves, or with ``has_copies``
    those that were copied by :meth:`copy`. What is read lands in the cells, or in the copies after
    :meth:`read_into_copies`. ``landing`` counts the writes under way into each cell, of which the
    last one ended at ``last_landing_at``.
    """

    def __init__(
        self,
        worker: Worker,
        groups: Iterable[GroupShape],
        numbers: Numbers,
        *,
        has_copies: bool = False,
    ) -> None:
        # regions lie one behind another in the cells, in the order of their addresses
        regions = sorted(worker.regions, key=lambda region: region.address)
        self._starts = np.array([region.address for region in regions], np.uint64)
        sizes = [region.size_bytes for region in regions]
        self._firsts = np.cumsum([0, *sizes])
        # the first cell of each region
        first_of = dict(zip((region.name for region in regions), self._firsts, strict=False))
        self.cells: CellLabels = np.zeros(sum(sizes), np.uint64)
        self.exported: CellLabels = self.cells.copy() if has_copies else self.cells
        self.landing = np.zeros(sum(sizes), np.int16)
        # where bytes land in copies: the cells that got some since their block was copied
        self._has_landed: npt.NDArray[np.bool_] | None = None
        self.last_landing_at = 0.0
        tensors = [*numbers.weights]
        self._groups: dict[str, _GroupCells] = {}
        for group in groups:
            # without bytes, where a pipeline stage has no layer of the group
            num_slots = 1 if group.is_state else group.tokens_per_block
            slots = [np.zeros((num_slots, 0), np.int64)]
            strides = [np.zeros(0, np.int64)]
            labels = [np.zeros(0, np.int64)]
            for view in worker.views:
                if view.group != group.name:
                    continue
                # each byte of a slot: where it is, and its number
                offset, number, length = segments_of_slot(view, numbers.weights[view.name])
                steps = np.arange(length)
                offsets = np.add.outer(offset, steps).reshape(-1) + view.offset_bytes
                offsets = offsets + first_of[view.region]
                slots.append(np.add.outer(slots_of_block(view), offsets))
                strides.append(np.full(offsets.size, view.block_stride_bytes))
                first_number = tensors.index(view.name) << TENSOR_BITS
                labels.append(np.add.outer(number, steps).reshape(-1) + first_number)
            self._groups[group.name] = _GroupCells(
                group.tokens_per_block,
                np.concatenate(slots, axis=1),
                np.concatenate(strides),
                np.concatenate(labels).astype(np.uint64),
                group.num_ahead,
            )

    def cells_of(self, ranges: ByteRanges) -> Ints:
        """Return the cells of ranges of bytes, in order."""
        region = np.searchsorted(self._starts, ranges[:, 0], side="right") - 1
        first = (ranges[:, 0] - self._starts[region]).astype(np.int64) + self._firsts[region]
        lengths = ranges[:, 1].astype(np.int64)
        # for each byte: the first cell of its range, and how far it is from there
        offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        cells: Ints = np.repeat(first, lengths) + offsets
        return cells

    def write(
        self, group: str, blocks: Sequence[int], prefixes: CellLabels, start: int, stop: int
    ) -> None:
        """Compute positions of a request into its blocks."""
        cells = self._groups[group]
        self.cells[cells.at(blocks, start, stop)] = cells.labels(prefixes, start, stop)

    def wrong_position(
        self, group: str, blocks: Sequence[int], prefixes: CellLabels, start: int, stop: int
    ) -> tuple[int, int] | None:
        """Return the first position whose bytes are not the request's, and a label found there."""
        cells = self._groups[group]
        labels = self.cells[cells.at(blocks, start, stop)]
        # (positions, bytes): where the label is not that of the request's tokens
        wrong = labels != cells.labels(prefixes, start, stop)
        if not wrong.any():
            return None
        position, byte = np.unravel_index(int(wrong.argmax()), wrong.shape)
        return start + int(position), int(labels[position, byte])

    def copy(self, saves: Mapping[str, Iterable[int]] | None) -> None:
        """Copy blocks by group for others, who read the blocks themselves if it is None."""
        if saves is None:
            self.exported = self.cells
        elif self.exported is not self.cells:
            for group, blocks in saves.items():
                for block in blocks:
                    self.copy_block(group, block, to_device=False)

    def copy_block(self, group: str, block: int, *, to_device: bool) -> None:
        """Copy a block for others, or what has landed in its copy to the device."""
        cells = self.cells_of_block(group, block)
        source, destination = self.cells, self.exported
        if to_device:
            source, destination = destination, source
        destination[cells] = source[cells]
        if self._has_landed is not None:
            self._has_landed[cells] = False

    def read_into_copies(self) -> None:
        """Let bytes that are read land in the copies from now on."""
        self._has_landed = np.zeros(self.cells.size, np.bool_)

    @property
    def landed(self) -> CellLabels:
        """The cells where bytes land that are read."""
        return self.cells if self._has_landed is None else self.exported

    def land(self, cells: Ints, labels: CellLabels) -> None:
        """Write labels that were read."""
        self.landed[cells] = labels
        if self._has_landed is not None:
            self._has_landed[cells] = True

    def is_mixed(self, group: str, block: int) -> bool:
        """Return whether a block's copy differs from the device where nothing was read."""
        cells = self.cells_of_block(group, block)
        is_other = self.exported[cells] != self.cells[cells]
        return self._has_landed is not None and bool((is_other & ~self._has_landed[cells]).any())

    def cells_of_block(self, group: str, block: int) -> Ints:
        """Return the cells of a block, (positions, bytes)."""
        return self._groups[group].of_block(block)

    def is_landing(self, group: str, block: int) -> bool:
        """Return whether a byte may still land in a block."""
        return bool(self.landing[self.cells_of_block(group, block)].any())
