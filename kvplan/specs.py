"""Read specs: what one request moves between two workers, as ids and as descriptors."""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.axes import heads, read_only
from kvplan.bind import Ids
from kvplan.tables import Table
from kvplan.workers import Key, label_of

Descriptors = npt.NDArray[np.uint64]


@attrs.frozen(eq=False, repr=False)
class ReadSpec:
    """What one request moves from, or to, one remote worker: two equally long arrays of ids, int32.

    ``operation`` is ``READ`` (bytes go from remote to local) or ``WRITE``. ``local`` and ``remote`` are
    (engine id, rank). The nth local id and the nth remote id, in their tables, are one copy.
    """

    operation: str
    local: Key
    remote: Key
    local_table: Table
    remote_table: Table
    local_ids: Ids
    remote_ids: Ids

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return int(self._descriptors[0][:, 1].sum())

    @property
    def num_descriptors(self) -> int:
        """Descriptors on each side after coalescing, the fewest that can move these bytes."""
        return len(self._descriptors[0])

    def descriptors(self) -> tuple[Descriptors, Descriptors]:
        """Local and remote descriptors, (n, 3) uint64: address, length, device; coalesced, in order of local address.

        Descriptors that continue each other on both sides, inside one region each, are one.
        """
        return self._descriptors

    @cached_property
    def _descriptors(self) -> tuple[Descriptors, Descriptors]:
        tables, every = (self.local_table, self.remote_table), (self.local_ids, self.remote_ids)
        rows = [table.row_of(ids) for table, ids in zip(tables, every, strict=True)]
        address = [
            table.rows[row, 0] + (ids - table.first[row]).astype(np.uint64) * table.rows[row, 3]
            for table, ids, row in zip(tables, every, rows, strict=True)
        ]
        order = np.lexsort((address[0], tables[0].region[rows[0]]))
        length = tables[0].rows[rows[0], 1][order]
        goes_on = np.ones(max(order.size - 1, 0), bool)
        for table, row, at in zip(tables, rows, address, strict=True):
            region, start = table.region[row][order], at[order]
            goes_on &= (region[1:] == region[:-1]) & (start[:-1] + length[:-1] == start[1:])
        first = heads(goes_on)[: order.size]
        joined = np.add.reduceat(length, first) if first.size else length
        ours, theirs = (
            read_only(np.stack([at[order][first], joined, table.rows[row[order][first], 2]], axis=1))
            for table, row, at in zip(tables, rows, address, strict=True)
        )
        return ours, theirs

    def __repr__(self) -> str:
        arrow = "<-" if self.operation == "READ" else "->"
        return f"<ReadSpec {label_of(self.local)} {arrow} {label_of(self.remote)}: {self.local_ids.size} ids>"
