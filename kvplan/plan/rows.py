"""Tables (T): the strided rows that both sides register once, and the formula of the ids in them.

- T1: A row is (address, length, device, stride, count): ``count`` descriptors of ``length`` bytes, ``stride`` apart.
  Ids number the descriptors of a table, row after row.
- T2: Runs of one length share a row if one step, at least as long as they are, divides the differences of their offsets
  and the block stride: four 16-token pieces of a dense 64-token block, or the tokens of all heads of a page. If there
  is no such step, or most ids of the row would be unused, each offset gets a row with one descriptor for each block.
- T3: Therefore every id is ``base + step * block id + sub``, where ``base`` belongs to a run and ``sub`` to the slot at
  which it begins. Both sides list the same runs and positions in the same order, so their ids pair up.
- T4: A row counts the blocks of its own pool. Pools may differ by group, by worker and by side.

Rows hold offsets in regions first and addresses at the end, so plans of equal geometry differ in that last step only.
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
"""The most runs of one token times slots that one side of a pair may have."""

MAX_STARTS: Final = 1 << 10
"""The most positions of a period that a family lists."""

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
        offset = (self.rows[:, 0] - self._bases[0][self.region]).astype(np.int64) + self._arena[self.region]
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
    return np.array([[region.address for region in regions], [region.device_id for region in regions]], np.uint64)


@attrs.frozen(eq=False)
class Turn:
    """Block ordinals of one side within a period, (n,).

    The next period begins ``num_blocks`` later. ``step`` is the constant difference between consecutive ordinals, 0 if
    there is none. ``sub`` (n,) is what the slots add to the ids, ``None`` if that is nothing.
    """

    ordinal: Ints
    num_blocks: int
    step: int
    sub: Ints | None


@attrs.frozen(eq=False)
class Family:
    """The ids of runs that begin at the same positions with the same formula, for both sides, destination first.

    At a position ``p`` that is in ``starts`` modulo ``every``, run ``j`` has the id
    ``base[j] + step * block id + sub[slot of p]``. ``share`` selects the positions of a request: ``runs`` between its
    cuts, ``ends`` outside of them, or ``all``.

    ``base`` is (2, runs, 1). It and ``sub``, which is 0 in the slot of the first start, are int32 if all ids of both
    tables fit, else int64. If blocks and slots repeat every ``every`` positions, ``turns`` has the ordinals.
    """

    base: Ints
    step: tuple[int, int]
    sub: tuple[Ints, Ints]
    starts: Ints
    every: int
    share: Literal["runs", "ends", "all"]
    turns: tuple[Turn, Turn] | None

    def before(self, position: int) -> int:
        """The number of the family's positions below ``position``."""
        turn, rest = divmod(position, self.every)
        return turn * self.starts.size + bisect_left(self.starts, rest)


@attrs.frozen(eq=False)
class Layout:
    """A pair of groups with its ids: all that bind needs. ``num_blocks`` has the size of each side's smallest pool."""

    groups: tuple[Group, Group]
    num_blocks: tuple[int, int]
    period: int
    cuts: tuple[tuple[int, int], ...]
    families: tuple[Family, ...]


def layouts(sections: Sequence[Section]) -> tuple[tuple[Layout, ...], tuple[Ints, Ints]]:
    """The ids of all sections of a pair, and the rows of each side, (n, 5): region, offset, length, stride, count."""
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
    """Assigns runs to rows, by rule T2.

    A job is two arrays: (5, n) with kind, region, block stride, number of blocks and length of each run, and (n, m)
    with its offsets in block 0. Runs of different kinds share no row. Returns the rows, (r, 5): region, offset, length,
    stride, count; and for each job (2, n, m): the id of each offset in block 0, and the step of that id per block.

    >>> alike = np.array([[0], [0], [16384], [100], [4096]])
    >>> rows, (ids,) = place([(alike, np.array([[0, 4096, 8192, 12288]]))])
    >>> rows.tolist(), ids.tolist()
    ([[0, 0, 4096, 4096, 400]], [[[0, 1, 2, 3]], [[4, 4, 4, 4]]])
    """
    # Runs with equal columns form a candidate row each: `group` is the number of its candidate, for every offset.
    columns = np.concatenate([alike for alike, _ in jobs], axis=1)
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    start = heads((ordered[:, 1:] == ordered[:, :-1]).all(0))
    _, region, stride, blocks, length = ordered[:, start]
    numbers = np.empty(order.size, np.int64)
    numbers[order] = numbered(start, order.size)
    group = np.repeat(numbers, np.repeat(*np.array([offsets.shape[::-1] for _, offsets in jobs]).T))
    offset = np.concatenate([offsets.reshape(-1) for _, offsets in jobs])

    # Offsets by candidate, ascending. The step of a candidate is the common divisor of its offsets' differences and
    # its block stride; `used` counts its distinct offsets, which are the ids in use for each block.
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

    # A row begins with each candidate, and with each new offset of a candidate that is not one row.
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
    """The offset of every run of one token in every slot, (runs, slots)."""
    start, size = lane.strands.offset[side], slots(group)
    if start.size * size > MAX_ROWS:
        raise KVPlanError(
            "RANGE",
            f"list the slots of group {group.name!r}",
            expected=f"at most {MAX_ROWS} of all runs",
            got=f"{start.size} runs of {size} slots",
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
    """A family of ``base`` (2, runs). Lists the starts of a whole period if they are few enough."""
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
    """The families of a section's joined runs; ``ids`` is (sides, 2, n): the id in block 0, and its step.

    Runs at all positions form one family if what their slots add is the same for all of them; else each position gets
    a family of its own.
    """
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
    """What each slot adds to ``ids``, (sides, starts, runs), if that is the same for all runs; else ``None``."""
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
    """The families of runs that move token by token; ``ids`` is (2, runs, slots) for each side.

    Runs with the same steps, and with the same terms in all slots, form one family.
    """
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
