"""Tables (T): the strided rows that both sides register once, and how ids are found in them.

- T1: a row is (address, length, device, stride, count). Ids number a table's descriptors row after row.
- T2: bytes of one length, at offsets of a block whose differences and block stride are multiples of one step no
  shorter than they, are one row of that step: four 16-token pieces of a dense 64-token block, or the tokens of
  all heads of a page. Where that would leave most ids unused, or there is no such step, each offset is a row, one
  descriptor per block.
- T3: so every id is ``base + step * block id + sub``: ``base`` tells strands apart, ``sub`` the slot of the block
  where a run begins. Both sides list the same strands and positions in the same order, so paired ids are equally
  many.
- T4: a row counts the blocks of its own pool; pools may differ by group, by worker and by side.

Rows are made with offsets in regions, and become addresses at the end: equal geometry differs by that alone.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, heads, numbered, read_only
from kvplan._checks import ID_END
from kvplan.describe.views import Group, Region
from kvplan.errors import KVPlanError
from kvplan.plan.align import period, repeated, slots, stand
from kvplan.plan.runs import Lane, Section, Spans

Descriptors = npt.NDArray[np.uint64]

MAX_ROWS: Final = 1 << 24
"""The strands of one side of a pair times their slots may be at most this."""

MAX_STARTS: Final = 1 << 10
"""The positions of a turn at which a family has descriptors are listed if they are at most this many."""

MAX_IDS_PER_USED: Final = 16
"""A row of more ids than this for each that can be used is split by offset, so that ids last for large pools."""


@attrs.frozen(eq=False)
class Table:
    """One side's rows. ``rows`` is (n, 5) uint64: address, length, device, stride, count.

    ``first`` has each row's first id, ``region`` the index in ``regions``, the worker's, that the row lies in.
    """

    regions: tuple[Region, ...]
    region: Ints
    rows: npt.NDArray[np.uint64]
    first: Ints

    @property
    def num_ids(self) -> int:
        """How many descriptors the rows stand for: ids are in ``[0, num_ids)``."""
        return int(self.first[-1]) + int(self.rows[-1, 4]) if len(self.rows) else 0

    def row_of(self, ids: npt.NDArray[np.integer[Any]]) -> Ints:
        """The row each id lies in."""
        return np.searchsorted(self.first, ids, "right") - 1

    @cached_property
    def _bases(self) -> npt.NDArray[np.uint64]:
        return bases(self.regions)

    @cached_property
    def _arena(self) -> Ints:
        """Where each region would begin if all stood one after another, with a byte between."""
        sizes = [region.size_bytes + 1 for region in self.regions]
        return np.cumsum([0, *sizes[:-1]])

    @cached_property
    def _lines(self) -> tuple[Ints, Ints]:
        """Each row's place as a line over ids: its slope, and where it would be at id 0."""
        offset = (self.rows[:, 0] - self._bases[0][self.region]).astype(np.int64) + self._arena[self.region]
        stride = self.rows[:, 3].astype(np.int64)
        return stride, offset - self.first * stride

    def places(self, first: npt.NDArray[np.int32], along: npt.NDArray[np.int32], row: Ints) -> Ints:
        """Where the bytes of ids ``first`` (n, 1) + ``along`` (1, m) in these rows (n,) stand among all regions.

        Regions follow each other, none next to another.
        """
        stride, start = self._lines
        place: Ints = stride[row][:, None] * along
        place += (start[row] + stride[row] * first[:, 0])[:, None]
        return place

    def descriptors(self, place: Ints, length: Ints, row: Ints, which: Ints) -> Descriptors:
        """Address, length and device, (n, 3), of bytes at these places, each in ``row[which]``."""
        base, device = self._bases
        shift, region = base - self._arena.astype(np.uint64), self.region[row]
        found = np.empty((place.size, 3), np.uint64)
        np.add(place.view(np.uint64), shift[region][which], out=found[:, 0])
        found[:, 1] = length
        found[:, 2] = device[region][which]
        return read_only(found)

    def in_regions(self, regions: tuple[Region, ...]) -> Table:
        """The same rows in other regions, one in the place of each."""
        after = bases(regions)
        rows = self.rows.copy()
        rows[:, 0] += (after[0] - self._bases[0])[self.region]
        rows[:, 2] = after[1][self.region]
        return Table(regions, self.region, read_only(rows), self.first)

    def __repr__(self) -> str:
        return f"<Table of {len(self.rows)} rows, {self.num_ids} ids>"


def bases(regions: Sequence[Region]) -> npt.NDArray[np.uint64]:
    """Addresses and devices of regions, (2, n)."""
    return np.array([[region.address for region in regions], [region.device_id for region in regions]], np.uint64)


@attrs.frozen(eq=False)
class Turn:
    """What the starts of a family are on one side: the ordinals of their blocks in the first turn of positions, (n,).

    Each turn goes on by ``num_blocks``. ``step`` is by how many blocks every start goes on from the one before it, 0
    where they differ in that or share a block. ``sub`` is what slots add to ids, ``None`` where that is nothing.
    """

    ordinal: Ints
    num_blocks: int
    step: int
    sub: Ints | None


@attrs.frozen(eq=False)
class Family:
    """The ids of strands that begin runs, or lie in slots, alike: for each side, destination first.

    At position ``p`` the id of strand ``j`` is ``base[j] + step * block id + sub[slot of p]``, where ``p`` is any
    position that equals one of ``starts`` modulo ``every``. ``share`` says which of a request's positions:
    ``runs``, those between its cuts; ``ends``, those outside them; ``all``.

    ``base`` is (2, strands, 1); it and ``sub``, 0 in the slot of the first start, are of int32 where every id of both
    tables fits. Where blocks and slots repeat every ``every`` positions, ``turns`` says how.
    """

    base: Ints
    step: tuple[int, int]
    sub: tuple[Ints, Ints]
    starts: Ints
    every: int
    share: Literal["runs", "ends", "all"]
    turns: tuple[Turn, Turn] | None

    def before(self, position: int) -> int:
        """How many of its positions are below some position."""
        turn, rest = divmod(position, self.every)
        return turn * self.starts.size + bisect_left(self.starts, rest)


@attrs.frozen(eq=False)
class Layout:
    """A section with its ids: all that bind needs to know. ``num_blocks`` is each side's smallest pool."""

    groups: tuple[Group, Group]
    num_blocks: tuple[int, int]
    period: int
    cuts: tuple[tuple[int, int], ...]
    families: tuple[Family, ...]


def layouts(sections: Sequence[Section]) -> tuple[tuple[Layout, ...], tuple[Ints, Ints]]:
    """The ids of all sections of a pair, and each side's rows: (n, 5) region, offset, length, stride, count."""
    lanes = [(section.groups, lane) for section in sections for lane in section.lanes]
    rows, ids = [], []
    for side in (0, 1):
        of_runs = [(_columns(0, section.runs, side), section.runs.offset[side][:, None]) for section in sections]
        of_slots = [
            (_columns(1, lane.strands, side), _slot_offsets(groups[side], lane, side)) for groups, lane in lanes
        ]
        side_rows, side_ids = place([*of_runs, *of_slots])
        rows.append(side_rows)
        ids.append(side_ids)
    dtype = np.int32 if max(side_rows[:, 4].sum() for side_rows in rows) <= ID_END else np.int64
    every = list(zip(*ids, strict=True))
    slot_ids, made = iter(every[len(sections) :]), []
    for section, found in zip(sections, every, strict=False):
        families = _run_families(section, np.stack(found)[..., 0], dtype)
        for lane in section.lanes:
            families += _lane_families(section.groups, lane, next(slot_ids), dtype)
        pools = np.min([lane.strands.num_blocks.min(axis=1) for lane in section.lanes], axis=0).tolist()
        cuts = tuple((low, high) for low, high in section.cuts.tolist())
        made.append(Layout(section.groups, (pools[0], pools[1]), section.period, cuts, tuple(families)))
    return tuple(made), (rows[0], rows[1])


def place(jobs: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, list[Ints]]:
    """Rows by rule T2 for bytes: kind, region, block stride, number of blocks and length (5, n), and offsets (n, m).

    Bytes of different kinds share no row. Returns the rows, (r, 5): region, offset, length, stride, count; and for
    each job (2, n, m): the id of each of its bytes in block 0, and the step of that id from block to block.

    >>> alike = np.array([[0], [0], [16384], [100], [4096]])
    >>> rows, (ids,) = place([(alike, np.array([[0, 4096, 8192, 12288]]))])
    >>> rows.tolist(), ids.tolist()
    ([[0, 0, 4096, 4096, 400]], [[[0, 1, 2, 3]], [[4, 4, 4, 4]]])
    """
    columns = np.concatenate([alike for alike, _ in jobs], axis=1)
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    start = heads((ordered[:, 1:] == ordered[:, :-1]).all(0))
    _, region, stride, blocks, length = ordered[:, start]
    numbers = np.empty(order.size, np.int64)
    numbers[order] = numbered(start, order.size)
    group = np.repeat(numbers, np.repeat(*np.array([offsets.shape[::-1] for _, offsets in jobs]).T))
    offset = np.concatenate([offsets.reshape(-1) for _, offsets in jobs])

    order = np.lexsort((offset, group))
    group, offset = group[order], offset[order]
    alike, same = group[1:] == group[:-1], offset[1:] == offset[:-1]
    start = heads(alike)
    block_step = np.where(blocks > 1, stride, 0)
    step = np.gcd(np.gcd.reduceat(offset - offset[start][group], start), block_step)
    step = np.where(step == 0, length, step)
    used = np.bincount(group[heads(alike & same)])
    one_row = (step >= length) & (block_step <= step * used * MAX_IDS_PER_USED)
    step = np.where(one_row, step, np.maximum(block_step, length))
    per_block = np.where(one_row, block_step // step, 1)

    first = heads(alike & (one_row[group[1:]] | same))
    row, of = numbered(first, order.size), group[first]
    sub = (offset - offset[first][row]) // step[group]
    count = (blocks[of] - 1) * per_block[of] + np.maximum.reduceat(sub, first) + 1
    ids = np.empty((2, order.size), np.int64)
    ids[:, order] = (np.cumsum(count) - count)[row] + sub, per_block[group]
    rows = np.stack([region[of], offset[first], length[of], step[of], count], axis=1)
    parts = np.split(ids, np.cumsum([offsets.size for _, offsets in jobs])[:-1], axis=1)
    return rows, [part.reshape(2, *offsets.shape) for part, (_, offsets) in zip(parts, jobs, strict=True)]


def _columns(kind: int, spans: Spans, side: int) -> Ints:
    stride, blocks = spans.block_stride[side], spans.num_blocks[side]
    return np.stack([np.full_like(stride, kind), spans.region[side], stride, blocks, spans.length])


def _slot_offsets(group: Group, lane: Lane, side: int) -> Ints:
    """Where every strand is in every slot, (strands, slots)."""
    start, size = lane.strands.offset[side], slots(group)
    if start.size * size > MAX_ROWS:
        raise KVPlanError(
            "RANGE",
            f"list the slots of group {group.name!r}",
            expected=f"at most {MAX_ROWS} of all strands",
            got=f"{start.size} strands of {size} slots",
            group=group.name,
            tokens_per_block=size,
            strands=start.size,
        )
    offsets: Ints = np.add.outer(start, lane.token[side].at(np.arange(size)))
    return offsets


def _family(
    groups: tuple[Group, Group],
    dtype: type,
    base: Ints,
    step: Sequence[int],
    sub: Sequence[Ints],
    starts: Ints,
    every: int,
    share: Literal["runs", "ends", "all"],
) -> Family:
    """A family of ``base`` (2, strands)."""
    turn = math.lcm(every, period(*groups))
    if turn // every * starts.size <= MAX_STARTS:
        starts, every = repeated(starts, every, 0, turn), turn
    ordinal, slot = stand(groups, starts)
    first = np.array([[side[where[0]]] for side, where in zip(sub, slot, strict=True)])
    subs = [(side - less).astype(dtype) for side, less in zip(sub, first, strict=True)]
    turns = []
    for group, block, where, side in zip(groups, ordinal, slot, subs, strict=True):
        num_blocks, more = turn // (group.context.size * slots(group)), side[where]
        steps = np.diff(block, append=block[0] + num_blocks)
        turns.append(
            Turn(block, num_blocks, int(steps[0]) if (steps == steps[0]).all() else 0, more if more.any() else None)
        )
    return Family(
        (base + first).astype(dtype, order="C")[:, :, None],
        (int(step[0]), int(step[1])),
        (subs[0], subs[1]),
        starts,
        every,
        share,
        (turns[0], turns[1]) if every == turn else None,
    )


def _run_families(section: Section, ids: Ints, dtype: type) -> list[Family]:
    """The runs of a section, ``ids`` (sides, 2, n): one family if their strands are alike, else one a position."""
    base, step = ids[:, 0], ids[:, 1]
    families: list[Family] = []
    made = functools.partial(_family, section.groups, dtype, every=section.period, share="runs")
    for steps in sorted(set(zip(*step.tolist(), strict=True))):
        runs = np.flatnonzero((step[0] == steps[0]) & (step[1] == steps[1]))
        runs = runs[np.lexsort((base[0, runs], section.position[runs]))]
        first = heads(section.position[runs][1:] == section.position[runs][:-1])
        starts, strands = section.position[runs[first]], runs.size // first.size
        if (np.diff(first, append=runs.size) == strands).all():
            together = base[:, runs].reshape(2, first.size, strands)
            sub = _by_slot(section, starts, together)
            if sub is not None:
                families.append(made(together[:, 0], steps, sub, starts))
                continue
        for start, same in zip(starts, np.split(runs, first[1:]), strict=True):
            none = [np.zeros(slots(group), np.int64) for group in section.groups]
            families.append(made(base[:, same], steps, none, start[None]))
    return families


def _by_slot(section: Section, starts: Ints, ids: Ints) -> list[Ints] | None:
    """What the slot of a start adds to ``ids`` (sides, starts, strands), if that is the same for all strands."""
    _, slot = stand(section.groups, starts)
    found = []
    for group, where, side in zip(section.groups, slot, ids, strict=True):
        sub = np.zeros(slots(group), np.int64)
        sub[where] = side[:, 0] - side[0, 0]
        if (side != side[0] + sub[where][:, None]).any():
            return None
        found.append(sub)
    return found


def _lane_families(groups: tuple[Group, Group], lane: Lane, ids: Sequence[Ints], dtype: type) -> list[Family]:
    """The strands of a lane token by token, ``ids`` (2, strands, slots) for each side."""
    strands = lane.strands.length.size
    base = np.stack([found[0, :, 0] for found in ids])
    sub = [found[0] - found[0, :, :1] for found in ids]
    alike = np.concatenate([*(found[1, :, :1] for found in ids), *sub], axis=1)
    order = np.lexsort(alike.T[::-1])
    which = np.empty(strands, np.int64)
    which[order] = numbered(heads((alike[order[1:]] == alike[order[:-1]]).all(1)), strands)
    made = functools.partial(_family, groups, dtype, starts=lane.carried, every=lane.every)
    share: Literal["ends", "all"] = "ends" if lane.joined else "all"
    return [
        made(base[:, same], alike[same[0], :2].tolist(), [side[same[0]] for side in sub], share=share)
        for same in (np.flatnonzero(which == n) for n in range(int(which.max()) + 1))
    ]
