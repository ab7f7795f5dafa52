"""Pairs of tables, and read specs: what a request moves between two workers.

Both workers of a pair register a table of rows once. A spec has two lists of ids, one into each
table: the n-th ids of both are one copy. A library that takes ids, such as NIXL, needs no more. For
others :meth:`ReadSpec.descriptors` lists addresses, joined where they continue each other on both
sides. It does not look up every id: the ids of a series are sums ``first + along``, of run and
occurrence, and only the row of each ``first`` is looked up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple, TypeVar

import attrs
import numpy as np

from kvplan._arrays import Bools, Ints, heads, read_only
from kvplan._checks import is_one_of
from kvplan._text import shown
from kvplan.describe.worker import Key, label_of
from kvplan.errors import KVPlanError
from kvplan.plan.bind import Shapes
from kvplan.plan.series import GroupPair, Ids
from kvplan.plan.tables import Descriptors, Table

Item = TypeVar("Item")

_NO_OFFSETS: Final = (np.zeros(0, np.int64),) * 4
NO_ROWS: Final = Table(
    (),
    read_only(np.zeros(0, int)),
    read_only(np.zeros((0, 5), np.uint64)),
    read_only(np.zeros(0, int)),
)


@attrs.frozen
class Direction:
    """Which side of a transfer is local: the destination reads, the source writes.

    ``local`` and ``remote`` are indices of sides, 0 for the destination and 1 for the source.
    ``arrow`` is the way that bytes go, with the local worker on the left.

    >>> READ.by_role("mine", "theirs"), WRITE.by_role("mine", "theirs")
    (('mine', 'theirs'), ('theirs', 'mine'))
    """

    operation: str
    local: int
    remote: int
    arrow: str

    def by_role(self, local: Item, remote: Item) -> tuple[Item, Item]:
        """Return what the local and the remote side have, the destination's first.

        The other way round, it returns what destination and source have, the local side's first.
        """
        return (local, remote) if self.local == 0 else (remote, local)


READ: Final = Direction("READ", 0, 1, "<-")
WRITE: Final = Direction("WRITE", 1, 0, "->")
DIRECTIONS: Final = MappingProxyType({"READ": READ, "WRITE": WRITE})


def direction_of(operation: object, action: str) -> Direction:
    """Return the direction of an operation. Raises ``NAME`` for one that is unknown."""
    if not is_one_of(operation, DIRECTIONS):
        expected = f"operation {' or '.join(DIRECTIONS)}"
        raise KVPlanError("NAME", action, expected=expected, got=shown(operation))
    return DIRECTIONS[str(operation)]


@attrs.frozen(eq=False, repr=False)
class Pair:
    """The tables of the local worker and one remote worker, empty if no bytes move between them.

    Ids of the two tables go in pairs: the n-th local id and the n-th remote id of a request are one
    copy.
    """

    remote: Key
    local_table: Table
    remote_table: Table
    group_pairs: tuple[GroupPair, ...]

    def __repr__(self) -> str:
        return f"<Pair with {label_of(self.remote)}: {len(self.local_table.rows)} local rows>"


class IdSum(NamedTuple):
    """Ids of one side as a sum: the first of each run, (n, 1), and distances from it, (1, m)."""

    first: Ids
    along: Ids

    def is_of(self, ids: Ids, table: Table) -> bool:
        """Return whether ``ids`` (n, m) equal the sum, with one row of the table for each run."""
        if not (ids == self.first + self.along).all():
            return False
        low_row = table.row_of(self.first + self.along.min())
        high_row = table.row_of(self.first + self.along.max())
        return bool((low_row == high_row).all())


@attrs.frozen(eq=False, repr=False, slots=False)  # a dict is filled sooner than frozen slots are
class ReadSpec:
    """What one request reads from, or writes to, one remote worker.

    ``local_ids`` and ``remote_ids`` are int32 arrays of equal length. ``operation`` is ``READ``
    (from remote to local) or ``WRITE``. ``local`` and ``remote`` are (engine id, rank). The n-th
    local id and the n-th remote id, each in its table, are one copy. ``shapes`` optionally lists
    the (runs, occurrences) of consecutive slices of the ids; :meth:`descriptors` is faster with it.
    Threads may share a spec that was bound without a workspace.
    """

    operation: str
    local: Key
    remote: Key
    local_table: Table
    remote_table: Table
    local_ids: Ids
    remote_ids: Ids
    shapes: Shapes = ()

    lists_ids: ClassVar[bool] = True
    """A subclass whose executor needs no ids lists them only if somebody asks for them."""

    @property
    def num_ids(self) -> int:
        """Descriptors on each side before coalescing."""
        return int(self.local_ids.size)

    @property
    def num_bytes(self) -> int:
        """Bytes that move. Cheaper than :meth:`descriptors`: ids are counted by row."""
        # Ids of a row follow each other: sorted, they are counted between two rows' first ids.
        table = self.local_table
        ids = np.sort(self.local_ids)
        ids_of_row = np.diff(np.searchsorted(ids, table.first), append=ids.size)
        return int(ids_of_row @ table.rows[:, 1].astype(np.int64))

    @property
    def num_descriptors(self) -> int:
        """Descriptors on each side after coalescing: the fewest that can move these bytes."""
        return len(self._descriptors[0])

    def descriptors(self) -> tuple[Descriptors, Descriptors]:
        """Return local and remote descriptors, (n, 3) uint64 each: address, length, device.

        They are in order of local address, and coalesced: descriptors that continue each other on
        both sides, inside one region each, are one.
        """
        return self._descriptors

    @cached_property
    def _descriptors(self) -> tuple[Descriptors, Descriptors]:
        tables = (self.local_table, self.remote_table)
        sums = list(self._sums())
        if not sums:
            return tables[0].descriptors(*_NO_OFFSETS), tables[1].descriptors(*_NO_OFFSETS)
        # The row of each run of ids, and the offset of each id, on both sides.
        rows = []
        offsets = []
        for side, table in enumerate(tables):
            sum_rows = [table.row_of(both[side].first[:, 0]) for both in sums]
            sum_offsets = []
            for both, row in zip(sums, sum_rows, strict=True):
                sum_offsets.append(table.offsets(*both[side], row).reshape(-1))
            rows.append(np.concatenate(sum_rows))
            offsets.append(np.concatenate(sum_offsets))
        ids_of_run = [np.full(first.size, along.size) for (first, along), _ in sums]
        run = np.repeat(np.arange(rows[0].size), np.concatenate(ids_of_run))
        # By local offset, so that descriptors that continue each other are neighbours.
        if (offsets[0][1:] < offsets[0][:-1]).any():
            order = np.argsort(offsets[0], kind="stable")
            offsets = [side_offsets[order] for side_offsets in offsets]
            run = run[order]
        length = self.local_table.rows[:, 1].astype(np.int64)[rows[0]][run]
        # A descriptor continues the one before it if it does on both sides.
        goes_on = _goes_on(offsets[0], length) & _goes_on(offsets[1], length)
        if goes_on.any():
            first = heads(goes_on)
            offsets = [side_offsets[first] for side_offsets in offsets]
            run = run[first]
            length = np.add.reduceat(length, first)
        local = tables[0].descriptors(offsets[0], length, rows[0], run)
        remote = tables[1].descriptors(offsets[1], length, rows[1], run)
        # Regions may not be listed in order of address.
        if (local[1:, 0] < local[:-1, 0]).any():
            order = np.argsort(local[:, 0], kind="stable")
            return read_only(local[order]), read_only(remote[order])
        return local, remote

    def _sums(self) -> Iterator[tuple[IdSum, IdSum]]:
        """Yield the ids of each shape as sums, local and remote.

        Ids of a run lie in one row of each table. Ids that are no such sum are listed one by one.
        """
        num_ids = self.local_ids.size
        shapes_are_true = sum(map(math.prod, self.shapes)) == num_ids
        start = 0
        for shape in self.shapes if shapes_are_true else [(num_ids, 1)]:
            if not math.prod(shape):
                continue
            stop = start + math.prod(shape)
            local_ids = self.local_ids[start:stop].reshape(shape)
            remote_ids = self.remote_ids[start:stop].reshape(shape)
            local = _sum_of(local_ids)
            remote = _sum_of(remote_ids)
            is_sum = local.is_of(local_ids, self.local_table)
            if not (is_sum and remote.is_of(remote_ids, self.remote_table)):
                no_distance = np.zeros((1, 1), np.int32)
                local = IdSum(local_ids.reshape(-1, 1), no_distance)
                remote = IdSum(remote_ids.reshape(-1, 1), no_distance)
            order = np.argsort(local.along[0], kind="stable")
            yield (
                IdSum(local.first, local.along[:, order]),
                IdSum(remote.first, remote.along[:, order]),
            )
            start = stop

    def __repr__(self) -> str:
        is_known = is_one_of(self.operation, DIRECTIONS)
        arrow = DIRECTIONS[self.operation].arrow if is_known else shown(self.operation)
        workers = f"{label_of(self.local)} {arrow} {label_of(self.remote)}"
        return f"<ReadSpec {workers}: {self.num_ids} ids>"


def _sum_of(ids: Ids) -> IdSum:
    """Return the sum that ``ids`` (n, m) are if all runs have the same distances."""
    return IdSum(ids[:, :1], ids[:1] - ids[:1, :1])


def _goes_on(offset: Ints, length: Ints) -> Bools:
    """Return whether each descriptor ends where the next one begins, on one side."""
    goes_on: Bools = offset[:-1] + length[:-1] == offset[1:]
    return goes_on
