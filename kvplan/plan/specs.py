"""Pairs of tables, and read specs: what one request moves between two workers, as ids and as descriptors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from kvplan._arrays import heads, read_only
from kvplan.describe.worker import Key, Worker, label_of
from kvplan.plan.bind import Ids, Shapes
from kvplan.plan.rows import Descriptors, GroupPair, Table

Sum = tuple[Ids, Ids]
"""Ids as a sum: the first id of each run, (n, 1), and the distances of the others from it, (1, m)."""

_NOTHING: Final = (np.zeros(0, np.int64),) * 4


_EMPTY: Final = Table(
    (),
    *(
        read_only(np.zeros(shape, kind))
        for shape, kind in ((0, int), ((0, 5), np.uint64), (0, int))
    ),
)


@attrs.frozen(eq=False, repr=False)
class Pair:
    """The tables of the local worker and one remote worker. Both are empty if no bytes move between them.

    Ids of the two tables go in pairs: the n-th local id and the n-th remote id of a request are one copy.
    """

    remote: Key
    local_table: Table
    remote_table: Table
    group_pairs: tuple[GroupPair, ...]

    def __repr__(self) -> str:
        return f"<Pair with {label_of(self.remote)}: {len(self.local_table.rows)} local rows>"


def idle_pair(remote: Worker) -> Pair:
    """The pair with a remote worker with which no bytes are exchanged."""
    return Pair(remote.key, _EMPTY, _EMPTY, ())


@attrs.frozen(eq=False, repr=False, slots=False)  # a dict is filled sooner than frozen slots are
class ReadSpec:
    """What one request reads from, or writes to, one remote worker: two int32 arrays of ids of equal length.

    ``operation`` is ``READ`` (from remote to local) or ``WRITE``. ``local`` and ``remote`` are (engine id, rank). The
    n-th local id and the n-th remote id, each in its table, are one copy. ``shapes`` optionally lists the (runs,
    occurrences) of consecutive parts of the ids; :meth:`descriptors` is faster with it. Threads may share a spec that
    was bound without a workspace.
    """

    operation: str
    local: Key
    remote: Key
    local_table: Table
    remote_table: Table
    local_ids: Ids
    remote_ids: Ids
    shapes: Shapes = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that move. Cheaper than :meth:`descriptors`: ids are counted by row."""
        table, ids = self.local_table, np.sort(self.local_ids)
        by_row = np.diff(np.searchsorted(ids, table.first), append=ids.size)
        return int(by_row @ table.rows[:, 1].astype(np.int64))

    @property
    def num_descriptors(self) -> int:
        """Descriptors on each side after coalescing: the fewest that can move these bytes."""
        return len(self._descriptors[0])

    def descriptors(self) -> tuple[Descriptors, Descriptors]:
        """Local and remote descriptors, (n, 3) uint64 each: address, length, device, in order of local address.

        They are coalesced: descriptors that continue each other on both sides, inside one region each, are one.
        """
        return self._descriptors

    @cached_property
    def _descriptors(self) -> tuple[Descriptors, Descriptors]:
        parts, tables = list(self._strands()), (self.local_table, self.remote_table)
        if not parts:
            return tables[0].descriptors(*_NOTHING), tables[1].descriptors(*_NOTHING)
        rows, places = [], []
        for side, table in enumerate(tables):
            each = [table.row_of(part[side][0][:, 0]) for part in parts]
            place = [
                table.places(*part[side], row).reshape(-1)
                for part, row in zip(parts, each, strict=True)
            ]
            rows.append(np.concatenate(each))
            places.append(np.concatenate(place))
        times = np.concatenate([np.full(first.size, along.size) for (first, along), _ in parts])
        run = np.repeat(np.arange(times.size), times)
        if (places[0][1:] < places[0][:-1]).any():
            order = np.argsort(places[0], kind="stable")
            places, run = [side[order] for side in places], run[order]
        length = self.local_table.rows[:, 1].astype(np.int64)[rows[0]][run]
        goes_on = np.logical_and(*(side[:-1] + length[:-1] == side[1:] for side in places))
        if goes_on.any():
            first = heads(goes_on)
            places, run, length = (
                [side[first] for side in places],
                run[first],
                np.add.reduceat(length, first),
            )
        local, remote = (
            table.descriptors(place, length, row, run)
            for table, place, row in zip(tables, places, rows, strict=True)
        )
        if (local[1:, 0] < local[:-1, 0]).any():  # regions that are not listed in order of address
            order = np.argsort(local[:, 0], kind="stable")
            local, remote = read_only(local[order]), read_only(remote[order])
        return local, remote

    def _strands(self) -> Iterator[tuple[Sum, Sum]]:
        """The ids of each part as sums, one for each side; the ids of one run lie in one row of each table.

        A part that is no such sum is listed id by id.
        """
        sides, size, start = (self.local_ids, self.remote_ids), self.local_ids.size, 0
        known = sum(map(math.prod, self.shapes)) == size
        for n, m in filter(math.prod, self.shapes if known else [(size, 1)]):
            stop = start + n * m
            ids = [side[start:stop].reshape(n, m) for side in sides]
            sums = [(side[:, :1], side[:1] - side[:1, :1]) for side in ids]
            if not all(map(_is_sum, (self.local_table, self.remote_table), ids, sums)):
                sums = [(side.reshape(-1, 1), np.zeros((1, 1), np.int32)) for side in ids]
            order = np.argsort(sums[0][1][0], kind="stable")
            ours, theirs = ((first, along[:, order]) for first, along in sums)
            yield ours, theirs
            start = stop

    def __repr__(self) -> str:
        arrow = "<-" if self.operation == "READ" else "->"
        return f"<ReadSpec {label_of(self.local)} {arrow} {label_of(self.remote)}: {self.local_ids.size} ids>"


def _is_sum(table: Table, ids: Ids, terms: Sum) -> bool:
    """Whether ``ids`` equal the sum, with one row of the table for each run."""
    first, along = terms
    low, high = (table.row_of(first + end) for end in (along.min(), along.max()))
    return bool((ids == first + along).all() and (low == high).all())
