"""Tables: the rows that one side registers, and where in its regions the descriptors of ids are.

A row is a strided range of memory, as NIXL registers it: ``count`` descriptors of ``length`` bytes,
``stride`` apart. Ids number the descriptors, row after row, so the address of an id is a linear
function in each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, read_only
from kvplan._checks import INT64_END, instance, integer, wrong_type
from kvplan.describe.views import Region
from kvplan.describe.worker import Worker

Descriptors = npt.NDArray[np.uint64]


@attrs.frozen(eq=False)
class Table:
    """The rows of one side: ``rows`` is (n, 5) uint64: address, length, device, stride, count.

    ``first`` (n,) has the first id of each row, ``region`` (n,) the index of its region in the
    worker's ``regions``.
    """

    regions: tuple[Region, ...]
    region: Ints
    rows: npt.NDArray[np.uint64]
    first: Ints

    @classmethod
    def at(cls, worker: Worker, rows: Ints, shift: int) -> Table:
        """Return the table of rows with offsets, (n, 5), moved by ``shift`` bytes."""
        instance(Worker, worker, "worker of a table")
        if instance(np.ndarray, rows, "rows of a table").shape[1:] != (5,):
            raise wrong_type("rows of a table", "rows of 5 numbers", rows)
        integer(shift, "shift of a table", low=-INT64_END)
        region, offset, length, stride, count = rows.T
        address, device = bases(worker.regions)
        with_addresses = np.empty(rows.shape, np.uint64)
        with_addresses[:, 0] = address[region] + (offset + shift).astype(np.uint64)
        with_addresses[:, 1] = length
        with_addresses[:, 2] = device[region]
        with_addresses[:, 3] = stride
        with_addresses[:, 4] = count
        first = np.cumsum(count) - count
        return cls(worker.regions, read_only(region), read_only(with_addresses), read_only(first))

    @property
    def num_ids(self) -> int:
        """The number of descriptors of all rows: ids are in ``[0, num_ids)``."""
        return int(self.first[-1]) + int(self.rows[-1, 4]) if len(self.rows) else 0

    def row_of(self, ids: npt.NDArray[np.integer[Any]]) -> Ints:
        """Return the index of the row of each id."""
        return np.searchsorted(self.first, ids, "right") - 1

    @cached_property
    def _bases(self) -> npt.NDArray[np.uint64]:
        return bases(self.regions)

    @cached_property
    def _arena(self) -> Ints:
        """The start of each region, (regions,), all one after another with a byte between."""
        sizes = [region.size_bytes + 1 for region in self.regions]
        return np.cumsum([0, *sizes[:-1]])

    @cached_property
    def _lines(self) -> tuple[Ints, Ints]:
        """The offset of an id by row, a linear function: slope, and value at id 0, (rows,)."""
        offset = (self.rows[:, 0] - self._bases[0][self.region]).astype(np.int64)
        stride = self.rows[:, 3].astype(np.int64)
        return stride, self._arena[self.region] + offset - self.first * stride

    def offsets(
        self, first: npt.NDArray[np.int32], along: npt.NDArray[np.int32], row: Ints
    ) -> Ints:
        """Return the offsets, (n, m), of ids ``first`` (n, 1) + ``along`` (1, m).

        Ids of line ``i`` are in the row ``row[i]``. Offsets count through all regions one after
        another, with gaps, so that no two regions are contiguous.
        """
        stride, start = self._lines
        offset: Ints = stride[row][:, None] * along
        offset += (start[row] + stride[row] * first[:, 0])[:, None]
        return offset

    def descriptors(self, offset: Ints, length: Ints, row: Ints, run: Ints) -> Descriptors:
        """Return address, length and device, (n, 3) uint64, of ``length`` bytes at each offset.

        Offset ``i`` is in the row ``row[run[i]]``.
        """
        base, device = self._bases
        shift = base - self._arena.astype(np.uint64)
        region = self.region[row]
        descriptors = np.empty((offset.size, 3), np.uint64)
        np.add(offset.view(np.uint64), shift[region][run], out=descriptors[:, 0])
        descriptors[:, 1] = length
        descriptors[:, 2] = device[region][run]
        return read_only(descriptors)

    def in_regions(self, regions: tuple[Region, ...]) -> Table:
        """Return the same rows in other regions, region by region."""
        address, device = bases(regions)
        rows = self.rows.copy()
        rows[:, 0] += (address - self._bases[0])[self.region]
        rows[:, 2] = device[self.region]
        return Table(regions, self.region, read_only(rows), self.first)

    def __repr__(self) -> str:
        return f"<Table of {len(self.rows)} rows, {self.num_ids} ids>"


def bases(regions: Sequence[Region]) -> npt.NDArray[np.uint64]:
    """Return addresses and devices of regions, (2, n) uint64."""
    addresses = [region.address for region in regions]
    devices = [region.device_id for region in regions]
    return np.array([addresses, devices], np.uint64)
