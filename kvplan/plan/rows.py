"""Tables (T): the strided rows that both sides register once, and the formula of the ids in them.

- T1: A row is (address, length, device, stride, count): ``count`` descriptors of ``length`` bytes, ``stride`` apart.
  Ids number the descriptors of a table, row after row.
- T2: Runs of one length share a row if one step, at least as long as they are, divides the differences of their offsets
  and the block stride: four 16-token pieces of a dense 64-token block, or the tokens of all heads of a page. If there
  is no such step, or most ids of the row would be unused, each offset gets a row with one descriptor for each block. A
  row ends at a gap between two layers of a region that is longer than a block.
- T3: Therefore every id is ``base + step * block id + sub``, where ``base`` belongs to a run and ``sub`` to the slot at
  which it begins. Both sides list the same runs and positions in the same order, so their ids pair up.
- T4: A row counts the blocks of its own pool. Pools may differ by group, by worker and by side.

Rows hold offsets in regions first and addresses at the end, so plans of equal geometry differ in that last step only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, distinct, heads, listed, numbered, read_only
from kvplan._checks import ID_END, at_most
from kvplan.describe.views import Group, Region
from kvplan.errors import KVPlanError
from kvplan.plan.align import blocks_and_slots, slots
from kvplan.plan.runs import GroupRuns, Runs, TokenRuns

Descriptors = npt.NDArray[np.uint64]

MAX_SLOTS: Final = 1 << 23
"""The most runs of one token, times the slots of a block, that one side of a pair may have."""

NUMBERED_END: Final = 1 << 62
"""The rows of one side have fewer descriptors than this, so that no sum of ids wraps."""

MAX_IDS_PER_USED: Final = 16
"""A row with more ids than this for each usable one is split by offset, so that 31 bits last for large pools."""


@attrs.frozen(eq=False)
class Table:
    """The rows of one side: ``rows`` is (n, 5) uint64: address, length, device, stride, count.

    ``first`` (n,) has the first id of each row, ``region`` (n,) the index of its region in the worker's ``regions``.
    """

    regions: tuple[Region, ...]
    region: Ints
    rows: npt.NDArray[np.uint64]
    first: Ints

    @property
    def num_ids(self) -> int:
        """The number of descriptors of all rows: ids are in ``[0, num_ids)``."""
        return int(self.first[-1]) + int(self.rows[-1, 4]) if len(self.rows) else 0

    def row_of(self, ids: npt.NDArray[np.integer[Any]]) -> Ints:
        """The index of the row of each id."""
        return np.searchsorted(self.first, ids, "right") - 1

    @cached_property
    def _bases(self) -> npt.NDArray[np.uint64]:
        return bases(self.regions)

    @cached_property
    def _arena(self) -> Ints:
        """The start of each region if all regions followed each other with a gap of one byte, (regions,)."""
        sizes = [region.size_bytes + 1 for region in self.regions]
        return np.cumsum([0, *sizes[:-1]])

    @cached_property
    def _lines(self) -> tuple[Ints, Ints]:
        """The place of an id as a linear function of each row, (rows,): its slope, and its value at id 0."""
        offset = (self.rows[:, 0] - self._bases[0][self.region]).astype(np.int64) + self._arena[
            self.region
        ]
        stride = self.rows[:, 3].astype(np.int64)
        return stride, offset - self.first * stride

    def places(self, first: npt.NDArray[np.int32], along: npt.NDArray[np.int32], row: Ints) -> Ints:
        """The places, (n, m), of ids ``first`` (n, 1) + ``along`` (1, m), which lie in the rows ``row`` (n,).

        A place is an offset in all regions one after another, with gaps, so that no two regions are contiguous.
        """
        stride, start = self._lines
        place: Ints = stride[row][:, None] * along
        place += (start[row] + stride[row] * first[:, 0])[:, None]
        return place

    def descriptors(self, place: Ints, length: Ints, row: Ints, which: Ints) -> Descriptors:
        """Address, length and device, (n, 3) uint64, of ``length`` bytes at each place, in the rows ``row[which]``."""
        base, device = self._bases
        shift, region = base - self._arena.astype(np.uint64), self.region[row]
        found = np.empty((place.size, 3), np.uint64)
        np.add(place.view(np.uint64), shift[region][which], out=found[:, 0])
        found[:, 1] = length
        found[:, 2] = device[region][which]
        return read_only(found)

    def in_regions(self, regions: tuple[Region, ...]) -> Table:
        """The same rows in other regions, region by region."""
        after = bases(regions)
        rows = self.rows.copy()
        rows[:, 0] += (after[0] - self._bases[0])[self.region]
        rows[:, 2] = after[1][self.region]
        return Table(regions, self.region, read_only(rows), self.first)

    def __repr__(self) -> str:
        return f"<Table of {len(self.rows)} rows, {self.num_ids} ids>"


def bases(regions: Sequence[Region]) -> npt.NDArray[np.uint64]:
    """Addresses and devices of regions, (2, n) uint64."""
    return np.array(
        [[region.address for region in regions], [region.device_id for region in regions]],
        np.uint64,
    )


@attrs.frozen(eq=False)
class PeriodBlocks:
    """Block ordinals of one side within a period, (n,).

    The next period begins ``num_blocks`` later. ``step`` is the constant difference between consecutive ordinals, 0 if
    there is none. ``sub`` (n,) is what the slots add to the ids, ``None`` if that is nothing.
    """

    ordinal: Ints
    num_blocks: int
    step: int
    sub: Ints | None


@attrs.frozen(eq=False)
class RunIds:
    """The ids of joined runs that begin at the same positions, for both sides, destination first.

    At the n-th position of ``starts``, modulo ``every``, run ``j`` has the id ``base[j] + step * block id + sub[n]``;
    ``blocks`` has the ordinal of that block, and ``sub``, for each side. ``base`` is (2, runs, 1), int32 if all ids of
    both tables fit, else int64.
    """

    base: Ints
    step: tuple[int, int]
    starts: Ints
    every: int
    blocks: tuple[PeriodBlocks, PeriodBlocks]

    def before(self, position: int) -> int:
        """The number of starts below ``position``, over all periods."""
        turn, rest = divmod(position, self.every)
        return turn * self.starts.size + bisect_left(self.starts, rest)


@attrs.frozen(eq=False)
class TokenIds:
    """The ids of runs of one token, for both sides, destination first.

    At a position ``p`` that is in ``carried`` modulo ``every``, run ``j`` has the id
    ``base[j] + step * block id + sub[slot of p]``. ``joined`` says that longer runs move these tokens, except at the
    ends of a range. ``base`` is (2, runs, 1); it and ``sub`` are int32 if all ids of both tables fit, else int64.
    """

    base: Ints
    step: tuple[int, int]
    sub: tuple[Ints, Ints]
    carried: Ints
    every: int
    joined: bool


@attrs.frozen(eq=False)
class GroupPair:
    """All ids of one group of the destination and one of a source: all that bind needs.

    ``num_blocks`` has the size of each side's smallest pool. ``cuts`` are the spans of positions in a period, of
    ``period`` positions, that joined runs cover.
    """

    groups: tuple[Group, Group]
    num_blocks: tuple[int, int]
    period: int
    cuts: tuple[tuple[int, int], ...]
    runs: tuple[RunIds, ...]
    tokens: tuple[TokenIds, ...]


def number(found: Sequence[GroupRuns]) -> tuple[tuple[GroupPair, ...], tuple[Ints, Ints]]:
    """All ids of a pair of workers, and the rows of each side, (n, 5): region, offset, length, stride, count."""
    tokens = [(each.groups, one) for each in found for one in each.tokens]
    for side in (0, 1):
        listed_slots = sum(one.runs.length.size * slots(groups[side]) for groups, one in tokens)
        at_most(
            MAX_SLOTS,
            listed_slots,
            "slots of runs of one token",
            "number the descriptors of a pair of workers",
        )
    rows, ids = [], []
    for side in (0, 1):
        of_runs = [
            (_columns(0, each.runs, side), each.runs.offset[side][:, None]) for each in found
        ]
        of_slots = [
            (_columns(1, one.runs, side), _slot_offsets(groups[side], one, side))
            for groups, one in tokens
        ]
        side_rows, side_ids = assign_rows([*of_runs, *of_slots])
        rows.append(side_rows)
        ids.append(side_ids)
    most = max(
        float(side_rows[:, 4].sum(dtype=float)) for side_rows in rows
    )  # exact enough: sums of int64 may wrap
    if most >= NUMBERED_END:
        raise KVPlanError(
            "INT",
            "number the descriptors of a pair of workers",
            expected=f"fewer than {NUMBERED_END} in all rows",
            got=f"about {most:.3g}",
            hint="a smaller pool, or fewer tensors per plan, has fewer ids",
        )
    dtype = np.int32 if most <= ID_END else np.int64
    every = list(zip(*ids, strict=True))
    slot_ids, made = iter(every[len(found) :]), []
    for each, run_ids in zip(found, every, strict=False):
        runs = tuple(_run_ids(each, np.stack(run_ids)[..., 0], dtype))
        by_token = tuple(
            ids for one in each.tokens for ids in _token_ids(one, next(slot_ids), dtype)
        )
        pools = np.min([one.runs.num_blocks.min(axis=1) for one in each.tokens], axis=0).tolist()
        cuts = tuple((low, high) for low, high in each.cuts.tolist())
        made.append(GroupPair(each.groups, (pools[0], pools[1]), each.period, cuts, runs, by_token))
    return tuple(made), (rows[0], rows[1])


def assign_rows(jobs: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, list[Ints]]:
    """Assigns runs to rows, by rule T2.

    A job is two arrays: (5, n) with kind, region, block stride, number of blocks and length of each run, and (n, m)
    with its offsets in block 0. Runs of different kinds share no row. Returns the rows, (r, 5): region, offset, length,
    stride, count; and for each job (2, n, m): the id of each offset in block 0, and the step of that id per block.

    >>> pieces = np.array([[0], [0], [16384], [100], [4096]])
    >>> rows, (ids,) = assign_rows([(pieces, np.array([[0, 4096, 8192, 12288]]))])
    >>> rows.tolist(), ids.tolist()
    ([[0, 0, 4096, 4096, 400]], [[[0, 1, 2, 3]], [[4, 4, 4, 4]]])
    """
    # Runs with equal columns form a candidate row each: `group` is the number of its candidate, for every offset.
    columns = np.concatenate([runs for runs, _ in jobs], axis=1)
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    start = heads((ordered[:, 1:] == ordered[:, :-1]).all(0))
    _, region, stride, blocks, length = ordered[:, start]
    numbers = np.empty(order.size, np.int64)
    numbers[order] = numbered(start, order.size)
    group = np.repeat(numbers, np.repeat(*np.array([offsets.shape[::-1] for _, offsets in jobs]).T))
    offset = np.concatenate([offsets.reshape(-1) for _, offsets in jobs])

    # Offsets by candidate, ascending. The step of a candidate is the common divisor of its offsets' differences and
    # its block stride.
    order = np.lexsort((offset, group))
    group, offset = group[order], offset[order]
    goes_on, same = group[1:] == group[:-1], offset[1:] == offset[:-1]
    start = heads(goes_on)
    block_step = np.where(blocks > 1, stride, 0)
    step = np.gcd(np.gcd.reduceat(offset - offset[start][group], start), block_step)
    step = np.where(step == 0, length, step)

    # A candidate is split where more ids than a block has would be between the last block at one offset and the first
    # at the next. `used` counts the distinct offsets, which are the ids in use for each block.
    gap = (np.diff(offset) - ((blocks - 1) * block_step)[group[1:]]) // step[group[1:]]
    goes_on &= gap <= np.maximum(block_step // step, MAX_IDS_PER_USED)[group[1:]]
    start = heads(goes_on)
    region, blocks, length, block_step, step = (
        each[group[start]] for each in (region, blocks, length, block_step, step)
    )
    group = numbered(start, order.size)
    used = np.bincount(group[heads(goes_on & same)])
    all_ids = (
        (blocks - 1) * block_step + np.maximum.reduceat(offset, start) - offset[start]
    ) // step + 1
    one_row = (step >= length) & (all_ids <= used * blocks * MAX_IDS_PER_USED)
    step = np.where(one_row, step, np.maximum(block_step, length))
    per_block = np.where(one_row, block_step // step, 1)

    # A row begins with each candidate, and with each new offset of a candidate that is not one row.
    first = heads(goes_on & (one_row[group[1:]] | same))
    row, of = numbered(first, order.size), group[first]
    sub = (offset - offset[first][row]) // step[group]
    count = (blocks[of] - 1) * per_block[of] + np.maximum.reduceat(sub, first) + 1
    ids = np.empty((2, order.size), np.int64)
    ids[:, order] = (np.cumsum(count) - count)[row] + sub, per_block[group]
    rows = np.stack([region[of], offset[first], length[of], step[of], count], axis=1)
    parts = np.split(ids, np.cumsum([offsets.size for _, offsets in jobs])[:-1], axis=1)
    return rows, [
        part.reshape(2, *offsets.shape) for part, (_, offsets) in zip(parts, jobs, strict=True)
    ]


def _columns(kind: int, runs: Runs, side: int) -> Ints:
    stride, blocks = runs.block_stride[side], runs.num_blocks[side]
    return np.stack([np.full_like(stride, kind), runs.region[side], stride, blocks, runs.length])


def _slot_offsets(group: Group, one: TokenRuns, side: int) -> Ints:
    """The offset of every run of one token in every slot, (runs, slots)."""
    start, size = one.runs.offset[side], slots(group)
    offsets: Ints = np.add.outer(start, one.token[side].at(np.arange(size)))
    return offsets


def _period_blocks(group: Group, ordinal: Ints, every: int, sub: Ints) -> PeriodBlocks:
    num_blocks = every // (group.context.size * slots(group))
    steps = np.diff(ordinal, append=ordinal[0] + num_blocks)
    step = int(steps[0]) if (steps == steps[0]).all() else 0
    return PeriodBlocks(ordinal, num_blocks, step, sub if sub.any() else None)


def _run_ids(found: GroupRuns, ids: Ints, dtype: type) -> Iterator[RunIds]:
    """The ids of joined runs; ``ids`` is (sides, 2, n): the id in block 0, and its step per block.

    All positions at which runs with the same steps begin, and with the same differences between their ids, form one
    series: they differ in one number for each side, however long the runs are.
    """
    base, step = ids[:, 0], ids[:, 1]
    for steps in sorted(set(zip(*step.tolist(), strict=True))):
        # Runs by position, then by local id. `first` has the index of the first run of each position.
        runs = np.flatnonzero((step[0] == steps[0]) & (step[1] == steps[1]))
        runs = runs[np.lexsort((base[0, runs], found.position[runs]))]
        first = heads(found.position[runs][1:] == found.position[runs][:-1])
        number = np.diff(first, append=runs.size)
        equal: dict[tuple[int, bytes], list[int]] = {}
        for size in distinct(number).tolist():
            begins = np.flatnonzero(number == size)
            together = base[:, runs[np.add.outer(first[begins], np.arange(size))]]
            apart = np.ascontiguousarray(np.moveaxis(together - together[..., :1], 1, 0))
            for i, differences in zip(begins.tolist(), apart, strict=True):
                equal.setdefault((size, differences.tobytes()), []).append(i)
        for (size, _), which in equal.items():
            begins = first[which]
            starts = found.position[runs[begins]]
            sub: Ints = (base[:, runs[begins]] - base[:, runs[begins[:1]]]).astype(dtype)
            ordinals, _ = blocks_and_slots(found.groups, starts)
            sides = [
                _period_blocks(group, ordinal, found.period, more)
                for group, ordinal, more in zip(found.groups, ordinals, sub, strict=True)
            ]
            of_first: Ints = base[:, runs[begins[0] : begins[0] + size], None].astype(
                dtype, order="C"
            )
            yield RunIds(
                of_first, (int(steps[0]), int(steps[1])), starts, found.period, (sides[0], sides[1])
            )


def _token_ids(one: TokenRuns, ids: Sequence[Ints], dtype: type) -> Iterator[TokenIds]:
    """The ids of runs that move token by token; ``ids`` is (2, runs, slots) for each side.

    Runs with the same steps, and to which all slots add the same, form one series.
    """
    runs = one.runs.length.size
    base = np.stack([found[0, :, 0] for found in ids])
    sub = [found[0] - found[0, :, :1] for found in ids]
    # One row for each run: its steps, and what each slot adds, on both sides. Equal rows become neighbours.
    rows = np.concatenate([*(found[1, :, :1] for found in ids), *sub], axis=1)
    order = np.lexsort(rows.T[::-1])
    which = np.empty(runs, np.int64)
    which[order] = numbered(heads((rows[order[1:]] == rows[order[:-1]]).all(1)), runs)
    for n in range(int(which.max()) + 1):
        same = np.flatnonzero(which == n)
        steps, subs = rows[same[0], :2].tolist(), [side[same[0]].astype(dtype) for side in sub]
        of_slot_0: Ints = base[:, same, None].astype(dtype, order="C")
        yield TokenIds(
            of_slot_0,
            (steps[0], steps[1]),
            (subs[0], subs[1]),
            listed(one.carried),
            one.every,
            one.joined,
        )
