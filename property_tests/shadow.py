"""The expected memory of a worker beside its real memory: a number in every cell that says what the cell holds.

The oracle's elements decide where everything belongs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvplan import Axis, View, Worker
from kvplan.verification import FakeMemory
from property_tests.oracle import elements, positions_of

Ints = npt.NDArray[np.int64]
Labels = npt.NDArray[np.uint64]

END = 128
"""Positions are below this."""


class Content:
    """Numbers for the contents of cells: byte of an element of a tensor, position, and the text's owner."""

    def __init__(self) -> None:
        self.codes: dict[Any, int] = {}

    def code(self, *meaning: Any) -> int:
        """A number for a byte of an element, the same for all engines."""
        return self.codes.setdefault(meaning, len(self.codes))

    def label(self, owner: Ints, code: Ints, position: Ints) -> Labels:
        """The numbers of cells, never 0."""
        return ((owner << 24 | code) * END + position + 1).astype(np.uint64)

    def name(self, label: int) -> str:
        """The meaning of a number."""
        if not 0 < label < 1 << 62:
            return "nothing" if label == 0 else "a copy of nothing"
        rest, position = divmod(label - 1, END)
        meaning = list(self.codes)[rest % (1 << 24)]
        return f"{meaning} at position {position} of text {rest >> 24}"


class Shadow:
    """The cells of one worker, all regions one after another.

    ``expected`` has the number that each cell should hold, ``parts`` the real cells of the regions.
    """

    def __init__(self, worker: Worker, memory: FakeMemory, content: Content) -> None:
        self.worker, self.content = worker, content
        self.parts: list[tuple[int, Any]] = []
        self.starts: dict[str, int] = {}
        total = 0
        for region in worker.regions:
            whole = View("all", "all", region, "uint8", [Axis("at", 0, region.size_bytes, region.size_bytes, 1)], 1, 0)
            self.parts.append((total, memory.array(worker, whole).reshape(-1)))
            self.starts[region.name] = total
            total += region.size_bytes
        self.expected = np.zeros(total, np.uint64)
        self.groups = {group.name: group for group in worker.groups}
        self.positions = {group.name: positions_of(group, END) for group in worker.groups}
        self.slots = {name: self._slots(name) for name in self.groups}

    def _slots(self, group: str) -> Ints:
        """For each slot and each byte in it: its cell in block 0, the cells to the next block, its code. (n, m, 3)"""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for view in (view for view in self.worker.views if view.group == group):
            for slot, offset, coordinates in elements(view):
                for byte in range(view.itemsize):
                    cell = self.starts[view.region] + offset + byte
                    code = self.content.code(view.name, coordinates, byte)
                    found.setdefault(slot, []).append((cell, view.block_stride_bytes, code))
        return np.array([found[slot] for slot in sorted(found)], np.int64)

    def cells(
        self, group: str, blocks: Mapping[int, int], owners: Sequence[int], positions: Collection[int]
    ) -> tuple[Ints, Labels]:
        """The cells of a request's positions in its blocks, by ordinal, and the numbers that they should hold."""
        if group not in self.groups:
            return np.empty(0, np.int64), np.empty(0, np.uint64)
        slots = self.groups[group].tokens_per_block or 1
        found = [
            (slot, block, owners[at], at)
            for ordinal, block in blocks.items()
            for slot, at in enumerate(self.positions[group][ordinal * slots : (ordinal + 1) * slots])
            if at in positions
        ]
        slot, block, owner, position = np.array(found, np.int64).reshape(-1, 4).T
        cell, stride, code = np.moveaxis(self.slots[group][slot], 2, 0)
        where = cell + block[:, None] * stride
        return where.reshape(-1), self.content.label(owner[:, None], code, position[:, None]).reshape(-1)

    def cells_of(self, ranges: npt.NDArray[np.uint64]) -> Ints:
        """The cells of descriptors, (n, 3): address, length, device, each in one region."""
        found = [np.empty(0, np.int64)]
        for address, length, device in ranges.tolist():
            (region,) = (
                region
                for region in self.worker.regions
                if region.device_id == device
                and region.address <= address < address + length <= region.address + region.size_bytes
            )
            start = self.starts[region.name] + address - region.address
            found.append(np.arange(start, start + length))
        return np.concatenate(found)

    def fill(self, where: Ints, labels: Labels) -> None:
        """Let the worker itself write some cells."""
        self.expected[where] = labels
        for start, cells in self.parts:
            inside = (start <= where) & (where < start + cells.size)
            cells[where[inside] - start] = labels[inside]

    def check(self) -> None:
        """Assert that every cell holds its expected number."""
        actual = np.concatenate([np.empty(0, np.uint64), *(cells for _, cells in self.parts)])
        wrong = np.flatnonzero(actual != self.expected)
        if wrong.size:
            should, does = (self.content.name(int(of[wrong[0]])) for of in (self.expected, actual))
            label, cell = self.worker.label, int(wrong[0])
            raise AssertionError(f"{wrong.size} cells of {label}, first {cell}: should hold {should}, holds {does}")
