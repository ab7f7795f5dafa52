"""Read specs: what one request moves between two workers, as ids and as descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import attrs
import numpy as np

from kvplan.axes import Ints, heads
from kvplan.bind import Ids
from kvplan.tables import Descriptors, Table
from kvplan.workers import Key, label_of


@attrs.frozen(eq=False, repr=False)
class ReadSpec:
    """What one request moves from, or to, one remote worker: two equally long arrays of ids, int32.

    ``operation`` is ``READ`` (bytes go from remote to local) or ``WRITE``. ``local`` and ``remote`` are
    (engine id, rank). The nth local id and the nth remote id, in their tables, are one copy. ``shapes`` tells how ids
    are made up, if it is known: parts of so many strands with so many blocks or tokens each.
    """

    operation: str
    local: Key
    remote: Key
    local_table: Table
    remote_table: Table
    local_ids: Ids
    remote_ids: Ids
    shapes: tuple[tuple[int, int], ...] = ()

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
        parts = list(zip(*self._spans(), strict=True))
        spans = [np.concatenate(column) if len(column) > 1 else column[0] for column in parts]
        if (spans[0][1:] < spans[0][:-1]).any():
            order = np.argsort(spans[0], kind="stable")
            spans = [column[order] for column in spans]
        ours, theirs, length, row, far_row = spans
        first = heads((ours[:-1] + length[:-1] == ours[1:]) & (theirs[:-1] + length[:-1] == theirs[1:]))[: ours.size]
        joined = np.add.reduceat(length, first) if first.size else length
        local = self.local_table.descriptors(ours[first], joined, row[first])
        return local, self.remote_table.descriptors(theirs[first], joined, far_row[first])

    def _spans(self) -> Iterator[tuple[Ints, ...]]:
        """The bytes of each part of the ids, nearly in order: where on either side, how many, and the row on either.

        Strands that list their blocks in one order are sorted all at once, and one that lies in one row has a single
        row to look up.
        """
        tables, size, start = (self.local_table, self.remote_table), self.local_ids.size, 0
        known = self.shapes and sum(n * m for n, m in self.shapes) == size
        for n, m in self.shapes if known else ((1, size),):
            stop = start + n * m
            ids = [side[start:stop].reshape(n, m) for side in (self.local_ids, self.remote_ids)]
            order = np.argsort(ids[0][:1], axis=1, kind="stable")[0]
            ids = [side[:, order] for side in ids]
            rows = [table.rows_of(side) for table, side in zip(tables, ids, strict=True)]
            columns = [table.places(side, row) for table, side, row in zip(tables, ids, rows, strict=True)]
            columns += [self.local_table.rows[:, 1].astype(np.int64)[rows[0]], *rows]
            yield tuple(np.broadcast_to(column, (n, m)).reshape(-1) for column in columns)
            start = stop

    def __repr__(self) -> str:
        arrow = "<-" if self.operation == "READ" else "->"
        return f"<ReadSpec {label_of(self.local)} {arrow} {label_of(self.remote)}: {self.local_ids.size} ids>"
