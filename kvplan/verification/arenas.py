"""Arenas: where the cells of one worker's fake memory are, by virtual address.

A *cell* stands for one byte address. Regions of one device that overlap share an arena, every other region has its
own, and an arena takes memory only where it was touched.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.describe.views import Region
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError

Cells = npt.NDArray[np.unsignedinteger[Any]]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@attrs.frozen(eq=False)
class _Space:
    """One worker's regions on one device, ascending. Ends are inclusive, since 2**64 is no uint64."""

    start: Words
    reach: Words
    """The furthest last byte of any region that starts no later."""
    arena: npt.NDArray[np.int64]
    base: Words
    """First address of the arena of each region."""

    def find(self, address: Words, length: Words) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], Words]:
        """Per range: whether one region holds it, its arena, its first cell."""
        region = np.searchsorted(self.start, address, side="right") - 1
        last = address + (length - np.uint64(1))
        inside = (region >= 0) & (length > 0) & (last >= address) & (last <= self.reach[region])
        return inside, self.arena[region], address - self.base[region]


class Arenas:
    """The arenas of one worker, made when first touched.

    >>> from kvplan import Region, Worker
    >>> arenas = Arenas(Worker("decode", 0, (Region("a", 4096, 64), Region("b", 4160, 64)), (), ()), np.dtype("u1"))
    >>> arenas.place(np.array([(4096, 64, 0), (4170, 8, 0)], np.uint64))
    (array([0, 1]), array([ 0, 10]))
    """

    def __init__(self, worker: Worker, dtype: np.dtype[np.unsignedinteger[Any]]) -> None:
        self.worker = worker
        self.dtype = dtype
        self._sizes: list[int] = []
        self._cells: dict[int, Cells] = {}
        self._spaces: dict[int, _Space] = {}
        for device in sorted({region.device_id for region in worker.regions}):
            regions = [region for region in worker.regions if region.device_id == device]
            self._spaces[device] = _space(sorted(regions, key=lambda region: region.address), self._sizes)
        self._closed = False

    def close(self) -> None:
        """Let the arenas go; a later touch raises ``MEMORY``."""
        self._cells.clear()
        self._closed = True

    def place(self, ranges: Words) -> tuple[Ints, Ints]:
        """Arena and first cell of each range, (n, 3): address, length, device.

        Raises ``BOUNDS`` for the first one that is empty, wraps at 2**64, or is in no single region.
        """
        inside = np.zeros(len(ranges), bool)
        arena, cell = np.zeros(len(ranges), np.int64), np.zeros(len(ranges), np.uint64)
        for device, space in self._spaces.items():
            here = np.flatnonzero(ranges[:, 2] == device)
            inside[here], arena[here], cell[here] = space.find(ranges[here, 0], ranges[here, 1])
        if not inside.all():
            address, length, device = ranges[int(np.argmin(inside))].tolist()
            raise KVPlanError(
                "BOUNDS",
                f"touch fake memory of {self.worker.label}",
                expected="every range in one region",
                got=f"{length} bytes at {address:#x} on device {device}",
                worker=self.worker.label,
                address=address,
                length=length,
                device=device,
            )
        return arena, cell.view(np.int64)

    def cells(self, number: int) -> Cells:
        """All cells of an arena. Raises ``MEMORY`` where the system cannot map them."""
        if number not in self._cells:
            if self._closed:
                raise KVPlanError("MEMORY", "touch fake memory", expected="open memory", got="memory that was closed")
            self._cells[number] = _map(self._sizes[number], self.dtype)
        return self._cells[number]


def _space(regions: list[Region], sizes: list[int]) -> _Space:
    """Regions of one device by address; the arenas that they need are appended to ``sizes``, in cells."""
    arenas, bases, reaches = [], [], []
    base = reach = -1
    for region in regions:
        if region.address > reach:
            base = region.address
            sizes.append(0)
        reach = max(reach, region.address + region.size_bytes - 1)
        sizes[-1] = reach + 1 - base
        arenas.append(len(sizes) - 1)
        bases.append(base)
        reaches.append(reach)
    start = np.array([region.address for region in regions], np.uint64)
    return _Space(start, np.array(reaches, np.uint64), np.array(arenas, np.int64), np.array(bases, np.uint64))


def _map(size: int, dtype: np.dtype[np.unsignedinteger[Any]]) -> Cells:
    """``size`` cells of 0 that take memory only where they are touched, a small page at a time."""
    try:
        if sys.platform != "linux":
            return np.zeros(size, dtype)
        reserve_nothing = getattr(mmap, "MAP_NORESERVE", 0x4000)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve_nothing
        arena = mmap.mmap(-1, size * dtype.itemsize, flags=flags)
        return np.frombuffer(arena, dtype)
    except (OSError, OverflowError, MemoryError, ValueError):
        raise KVPlanError(
            "MEMORY",
            "map an arena of fake memory",
            expected="a size that the system can map",
            got=f"{size} cells of {dtype.itemsize} bytes",
            cells=size,
        ) from None
