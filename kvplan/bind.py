"""Bind (B): a request's block tables become descriptor ids.

- B1: blocks pair by position. A block's ordinal in the request, never its place in a list, says which positions it
  holds.
- B2: exactly the positions of the range move. Joined runs between the outermost cuts inside the range move as they
  are, what is left at its two ends token by token.
- B3: an id is ``base + step * block id + sub``, one broadcast add for all strands of a family. Inside a strand ids
  follow positions, so neighbouring blocks are neighbouring ids.
- B4: whatever is wrong with the tables or the range is an error before any id is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.align import local_index, position_of, slots
from kvplan.axes import Ints, integer
from kvplan.errors import KVPlanError
from kvplan.tables import Family, Layout, Table, TokenFamily, read_only
from kvplan.views import Group

Ids = npt.NDArray[np.int32]
Range = tuple[int, int]
ID_END: Final = 1 << 31
MAX_POSITION: Final = 1 << 48


def _block_ids(values: Any) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise KVPlanError(
            "TYPE", "read a block table", expected="a flat sequence of integers", got=f"{array.dtype} of {array.shape}"
        )
    if array.size and (array.min() < 0 or array.max() >= ID_END):
        wrong = array.min() if array.min() < 0 else array.max()
        raise KVPlanError("BLOCKS", "read a block table", expected=f"ids in [0, {ID_END})", got=f"{wrong}", id=int(wrong))
    return np.array(array, np.int64)


@attrs.frozen(eq=False)
class Blocks:
    """The ids of consecutive blocks of a request in one group; ``first`` is the first one's ordinal.

    >>> Blocks([7, 3, 9], first=2)
    Blocks([7, 3, 9], first=2)
    """

    ids: Ints = attrs.field(converter=lambda v: read_only(_block_ids(v)))
    first: int = attrs.field(default=0, converter=lambda v: integer(v, "first of Blocks", high=MAX_POSITION))

    def __repr__(self) -> str:
        return f"Blocks({self.ids.tolist()}, first={self.first})"

    def __getstate__(self) -> tuple[list[int], int]:
        return self.ids.tolist(), self.first

    def __setstate__(self, state: tuple[list[int], int]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def held_range(group: Group, blocks: Blocks) -> Range:
    """The positions that listed blocks can hold: from the first to past the last.

    >>> held_range(Group("attn", 16), Blocks([4, 5], first=3))
    (48, 80)
    """
    if not blocks.ids.size:
        return (0, 0)
    ends = np.array([blocks.first, blocks.first + blocks.ids.size], np.int64) * slots(group) - [0, 1]
    low, high = position_of(group, ends).tolist()
    return low, high + 1


Terms = tuple[Ints, Ints]
"""Ids as a sum: one term for each strand, one for each run or token of the request."""


def terms(layout: Layout, blocks: Sequence[Blocks], tokens: Range) -> Iterator[tuple[Terms, Terms]]:
    """The ids of one section, each side's, destination first."""
    start, stop = tokens
    low, high = _cut(layout, start, stop)
    for family in layout.families:
        yield _terms(family.base, _pieces(layout, family, blocks, (low, high)))
    for single in layout.token_families:
        ends = [(start, low), (high, stop)] if single.joined else [(start, stop)]
        yield _terms(single.base, _tokens(layout, single, blocks, ends))


def _terms(base: Ints, variable: Sequence[Ints]) -> tuple[Terms, Terms]:
    return (base[0], variable[0]), (base[1], variable[1])


def add(parts: Sequence[Terms]) -> Ids:
    """Rule B3: all ids of one side, one broadcast add per family. Raises ``INT``."""
    ids = np.empty(sum(strand.size * variable.size for strand, variable in parts), np.int32)
    done = 0
    for strand, variable in parts:
        size = strand.size * variable.size
        if not size:
            continue
        if (last := int(strand.max()) + int(variable.max())) >= ID_END:
            raise KVPlanError(
                "INT",
                "number the descriptors of a request",
                expected=f"ids below {ID_END}",
                got=f"{last}",
                hint="a smaller pool, or fewer tensors per plan, has fewer ids",
                id=last,
            )
        out = ids[done : done + size].reshape(strand.size, variable.size)
        np.add.outer(strand.astype(np.int32), variable.astype(np.int32), out=out)
        done += size
    ids.flags.writeable = False
    return ids


def _cut(layout: Layout, start: int, stop: int) -> Range:
    """The part of ``[start, stop)`` that no run sticks out of."""
    low, high = start, stop
    for begin, end in layout.cuts[_at(layout, start)].tolist():
        base = start - start % layout.period
        low = base + end if begin < start - base < end else start
    for begin, end in layout.cuts[_at(layout, stop)].tolist():
        base = stop - stop % layout.period
        high = base + begin if begin < stop - base < end else stop
    return (low, high) if low < high else (stop, stop)


def _at(layout: Layout, position: int) -> slice:
    """The span of :attr:`Layout.cuts`, if any, that begins last before a position of the period."""
    i = int(np.searchsorted(layout.cuts[:, 0], position % layout.period))
    return slice(max(i - 1, 0), i)


def _pieces(layout: Layout, family: Family, blocks: Sequence[Blocks], tokens: Range) -> tuple[Ints, Ints]:
    """``step * block id + sub`` of every run in a range, each side."""
    count = family.position.size

    def index(position: int) -> int:
        """How many runs of the request begin before a position."""
        whole, rest = divmod(position, layout.period)
        return whole * count + int(np.searchsorted(family.position, rest))

    turn, piece = np.divmod(np.arange(index(tokens[0]), index(tokens[1])), count)
    ordinals = [
        turn * (layout.period // group.context.size // slots(group)) + family.block[side][piece]
        for side, group in enumerate(layout.groups)
    ]
    return _variable(layout, blocks, family.step, ordinals, [sub[piece] for sub in family.sub])


def _tokens(
    layout: Layout, family: TokenFamily, blocks: Sequence[Blocks], ends: Sequence[Range]
) -> tuple[Ints, Ints]:
    """``step * block id + sub`` of every token in the ranges, each side."""
    position = np.concatenate([np.arange(*end) for end in ends])
    position = position[family.turn[position % family.turn.size]]
    ordinals, subs = [], []
    for group, sub in zip(layout.groups, family.sub, strict=True):
        ordinal, slot = np.divmod(local_index(group, position), slots(group))
        ordinals.append(ordinal)
        subs.append(sub[slot])
    return _variable(layout, blocks, family.step, ordinals, subs)


def _variable(
    layout: Layout, blocks: Sequence[Blocks], step: Ints, ordinals: Sequence[Ints], subs: Sequence[Ints]
) -> tuple[Ints, Ints]:
    """The part of an id that depends on the block, for both sides."""
    sides = []
    for group, table, ordinal, sub, scale in zip(layout.groups, blocks, ordinals, subs, step, strict=True):
        index = ordinal - table.first
        if index.size and (index.min() < 0 or index.max() >= table.ids.size):
            raise KVPlanError(
                "BLOCKS",
                f"bind group {group.name!r}",
                expected=f"blocks [{ordinal.min()}, {ordinal.max() + 1}) of the request to be listed",
                got=f"[{table.first}, {table.first + table.ids.size})",
                group=group.name,
                needed=(int(ordinal.min()), int(ordinal.max()) + 1),
                listed=(table.first, table.first + table.ids.size),
            )
        sides.append(table.ids[index] * scale + sub)
    return sides[0], sides[1]


def check_blocks(key: str, blocks: object, num_blocks: int, is_destination: bool) -> None:
    """One group's block table against the smallest pool that it indexes. A destination block may stand once."""
    if blocks is None:
        raise KVPlanError("BLOCKS", f"bind group {key!r}", expected="a block table", got="none", group=key)
    if not isinstance(blocks, Blocks):
        raise KVPlanError("TYPE", f"bind group {key!r}", expected="Blocks", got=f"{blocks!r}", group=key)
    ids = blocks.ids
    if ids.size and ids.max() >= num_blocks:
        raise KVPlanError(
            "BLOCKS",
            f"bind group {key!r}",
            expected=f"block ids below {num_blocks}, the pool's size",
            got=f"{ids.max()}",
            group=key,
            num_blocks=num_blocks,
            id=int(ids.max()),
        )
    if is_destination and (ordered := np.sort(ids)).size and (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise KVPlanError(
            "BLOCKS",
            f"bind group {key!r}",
            expected="each destination block once",
            got=f"block {twice[0]} twice",
            group=key,
            id=int(twice[0]),
        )


@attrs.frozen(eq=False, repr=False)
class ReadSpec:
    """What one request moves from, or to, one remote worker: two equally long arrays of ids, int32.

    ``operation`` is ``READ`` (bytes go from remote to local) or ``WRITE``. ``local`` and ``remote`` are
    (engine id, rank).
    """

    operation: str
    local: tuple[str, int]
    remote: tuple[str, int]
    local_table: Table
    remote_table: Table
    local_ids: Ids
    remote_ids: Ids

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        lengths = self.local_table.rows[:, 1]
        times = np.bincount(self.local_table.row_of(self.local_ids), minlength=len(lengths))
        return int((lengths * times.astype(np.uint64)).sum())

    @property
    def num_descriptors(self) -> int:
        """Descriptors on each side after coalescing, the fewest that can move these bytes."""
        return len(self.descriptors()[0])

    def descriptors(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Both sides as (n, 3) uint64: address, length, device; coalesced, ordered by local region and address.

        Descriptors that continue each other on both sides, inside one region each, are one.
        """
        sides = ((self.local_table, self.local_ids), (self.remote_table, self.remote_ids))
        row = [table.row_of(ids) for table, ids in sides]
        region = [table.region[i] for (table, _), i in zip(sides, row, strict=True)]
        address = [
            table.rows[i, 0] + (ids - table.first[i]).astype(np.uint64) * table.rows[i, 3]
            for (table, ids), i in zip(sides, row, strict=True)
        ]
        order = np.lexsort((address[0], region[0]))
        region, address = [r[order] for r in region], [a[order] for a in address]
        length, devices = self.local_table.rows[row[0][order], 1], [t.rows[i[order], 2] for (t, _), i in zip(sides, row, strict=True)]
        goes_on = np.ones(max(order.size - 1, 0), bool)
        for r, a in zip(region, address, strict=True):
            goes_on &= (r[1:] == r[:-1]) & (a[1:] == a[:-1] + length[:-1])
        first = np.flatnonzero(np.r_[np.ones(min(order.size, 1), bool), ~goes_on])
        total = np.add.reduceat(length, first) if first.size else length
        ours, theirs = (
            np.stack([a[first], total, d[first]], axis=1) for a, d in zip(address, devices, strict=True)
        )
        return ours, theirs

    def __repr__(self) -> str:
        (engine, rank), arrow = self.remote, "<-" if self.operation == "READ" else "->"
        return f"<ReadSpec {self.local[0]}/{self.local[1]} {arrow} {engine}/{rank}: {self.local_ids.size} ids>"
