"""Tables (T): the strided rows that both sides register once, and how ids are found in them.

- T1: a row is (address, length, device, stride, count). Ids number a table's descriptors row after row.
- T2: bytes of one length, at offsets of a block whose differences and block stride are multiples of one step no
  shorter than they, are one row of that step: four 16-token pieces of a dense 64-token block, or the tokens of
  all heads of a page. Otherwise each offset is a row, one descriptor per block.
- T3: so every id is ``base + step * block id + sub``: ``base`` tells strands apart, ``sub`` the pieces or slots.
  Both sides list the same strands and pieces in the same order, so paired ids have equal length.
- T4: a row counts the blocks of its own pool; pools may differ by group, by worker and by side.

Rows are made with offsets in regions, and become addresses at the end: equal geometry differs by that alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.align import slots
from kvplan.axes import Ints, heads, numbered
from kvplan.cells import Bools
from kvplan.errors import KVPlanError
from kvplan.runs import Lane, Section, Spans
from kvplan.views import Group, Region

Addresses = npt.NDArray[np.uint64]
MAX_ROWS: Final = 1 << 24
"""A group's strands times its slots, on one side of a pair, may be at most this."""


def read_only(array: Any) -> Any:
    """The array, which nobody can write to from now on."""
    array.flags.writeable = False
    return array


_NO_ROWS: Final = read_only(np.zeros((0, 5), np.int64))


@attrs.frozen(eq=False)
class Table:
    """One side's rows. ``regions`` are the worker's; ``region`` tells which of them each row lies in.

    ``rows`` is (n, 5) uint64, columns address, length, device, stride, count; ``first`` has each row's first id.
    """

    regions: tuple[Region, ...] = attrs.field(repr=False)
    region: Ints = attrs.field(repr=False)
    rows: Addresses
    first: Ints = attrs.field(repr=False)

    @property
    def num_ids(self) -> int:
        """How many descriptors the rows stand for: ids are in ``[0, num_ids)``."""
        return int(self.first[-1]) + int(self.rows[-1, 4]) if len(self.rows) else 0

    @property
    def memory(self) -> tuple[str, ...]:
        """The memory kinds of the rows."""
        return tuple(dict.fromkeys(self.regions[i].memory for i in np.unique(self.region).tolist()))

    def row_of(self, ids: npt.NDArray[np.int32]) -> Ints:
        """The row each id lies in."""
        return np.searchsorted(self.first, ids, "right") - 1

    def __repr__(self) -> str:
        return f"<Table of {len(self.rows)} rows, {self.num_ids} ids>"


@attrs.frozen(eq=False)
class Family:
    """Ids of strands that share their pieces: ``base[:, j] + step * block id + sub[:, q]``, (2, n), destination first.

    Piece ``q`` stands in block ``block[:, q]`` of the period; ``position[q]``, ascending, is its first position.
    """

    base: Ints
    step: Ints
    sub: Ints
    block: Ints
    position: Ints


@attrs.frozen(eq=False)
class TokenFamily:
    """Ids of strands token by token: ``base[:, j] + step * block id + sub`` with ``sub`` by slot, for each side.

    ``turn`` tells which positions of a cycle move. Where ``joined``, runs carry what they can of them.
    """

    base: Ints
    step: Ints
    sub: tuple[Ints, Ints]
    turn: Bools
    joined: bool


@attrs.frozen(eq=False)
class Layout:
    """A section with its ids: all that bind needs to know. ``cuts`` are ascending spans of positions."""

    groups: tuple[Group, Group]
    num_blocks: tuple[int, int]
    period: int
    cuts: Ints
    families: tuple[Family, ...]
    token_families: tuple[TokenFamily, ...]


def layouts(sections: Sequence[Section]) -> tuple[tuple[Layout, ...], tuple[Ints, Ints]]:
    """The ids of all sections of a pair, and each side's rows: (r, 5) region, offset, stride, length, count."""
    if not sections:
        return (), (_NO_ROWS, _NO_ROWS)
    lanes = [(section, lane) for section in sections for lane in section.lanes]
    rows, run_ids, token_ids = [], [], []
    for side in (0, 1):
        run_rows, run_found = place([_columns(section.runs, side) for section in sections])
        token_rows, token_found = place([_slot_columns(section.groups[side], lane, side) for section, lane in lanes])
        for ids in token_found:
            ids[0] += run_rows[:, 4].sum()
        rows.append(np.concatenate([run_rows, token_rows]))
        run_ids.append(run_found)
        token_ids.append(token_found)
    families: dict[int, list[TokenFamily]] = {id(section): [] for section in sections}
    for (section, lane), ours, theirs in zip(lanes, *token_ids, strict=True):
        families[id(section)] += _token_families(lane, (ours, theirs))
    made = tuple(
        Layout(
            groups=section.groups,
            num_blocks=(_pool(section.lanes, 0), _pool(section.lanes, 1)),
            period=section.period,
            cuts=section.cuts,
            families=tuple(_families(section, (ours, theirs))),
            token_families=tuple(families[id(section)]),
        )
        for section, ours, theirs in zip(sections, *run_ids, strict=True)
    )
    return made, (rows[0], rows[1])


def place(jobs: Sequence[Ints]) -> tuple[Ints, list[Ints]]:
    """Rows by rule T2 for bytes given as (5, n): region, block stride, number of blocks, length, offset.

    Returns the rows, (r, 5): region, offset, stride, length, count; and for each job (2, n): the id of each of its
    bytes in block 0, and the step of that id from block to block.

    >>> rows, (ids,) = place([np.array([[0] * 4, [16384] * 4, [100] * 4, [4096] * 4, [0, 4096, 8192, 12288]])])
    >>> rows.tolist(), ids.tolist()
    ([[0, 0, 4096, 4096, 400]], [[0, 1, 2, 3], [4, 4, 4, 4]])
    """
    columns = np.concatenate([*jobs, np.zeros((5, 0), np.int64)], axis=1)
    order = np.lexsort(columns[::-1])
    if not order.size:
        return _NO_ROWS, [np.zeros((2, 0), np.int64) for _ in jobs]
    region, stride, blocks, length, offset = columns = columns[:, order]
    alike = (columns[:4, 1:] == columns[:4, :-1]).all(0)
    start = heads(alike)
    group = numbered(start, order.size)
    block_step = np.where(blocks > 1, stride, 0)[start]
    step = np.gcd(np.gcd.reduceat(offset - offset[start][group], start), block_step)
    step = np.where(step == 0, length[start], step)
    one_row = step >= length[start]
    step = np.where(one_row, step, np.where(block_step > 0, block_step, length[start]))
    per_block = np.where(one_row, block_step // step, 1)

    first = heads(alike & (one_row[group][1:] | (offset[1:] == offset[:-1])))
    row = numbered(first, order.size)
    sub = (offset - offset[first][row]) // step[group]
    count = (blocks[first] - 1) * per_block[group][first] + np.maximum.reduceat(sub, first) + 1
    ids = np.empty((2, order.size), np.int64)
    ids[:, order] = (np.cumsum(count) - count)[row] + sub, per_block[group]
    rows = np.stack([region[first], offset[first], step[group][first], length[first], count], axis=1)
    return rows, np.split(ids, np.cumsum([job.shape[1] for job in jobs])[:-1], axis=1)


def _columns(spans: Spans, side: int) -> Ints:
    stride, blocks = spans.block_stride[side], spans.num_blocks[side]
    return np.stack([spans.region[side], stride, blocks, spans.length, spans.offset[side]])


def _slot_columns(group: Group, lane: Lane, side: int) -> Ints:
    """The bytes of every strand in every slot: strands outside, slots inside."""
    token, strands = lane.token[side], _columns(lane.strands, side)
    if strands.shape[1] * slots(group) > MAX_ROWS:
        raise KVPlanError(
            "RANGE",
            f"list the slots of group {group.name!r}",
            expected=f"at most {MAX_ROWS} of all strands",
            got=f"{strands.shape[1] * slots(group)}",
            tokens_per_block=slots(group),
            strands=strands.shape[1],
        )
    inside = np.arange(slots(group)) - np.repeat(token.start, token.length)
    by_slot = np.repeat(token.offset, token.length) + inside * np.repeat(token.stride, token.length)
    unfolded = np.repeat(strands, by_slot.size, axis=1)
    unfolded[4] += np.tile(by_slot, strands.shape[1])
    return unfolded


def _families(section: Section, ids: tuple[Ints, Ints]) -> list[Family]:
    """The runs of a section by their pieces: one family where every piece has the same strands, else one a piece."""
    base, step = np.stack([ids[0][0], ids[1][0]]), np.stack([ids[0][1], ids[1][1]])
    families: list[Family] = []
    for kind in sorted(set(zip(*step.tolist(), strict=True))):
        kind = np.array(kind)
        runs = np.flatnonzero((step == kind[:, None]).all(0))
        runs = runs[np.lexsort((base[0, runs], *section.block[:, runs], section.position[runs]))]
        piece = np.stack([section.position[runs], *section.block[:, runs]])
        first = heads((piece[:, 1:] == piece[:, :-1]).all(0))
        sets = [base[:, runs]] if first.size == 1 else np.split(base[:, runs], first[1:], axis=1)
        pieces = piece[:, first]
        if all(part.shape == sets[0].shape for part in sets):
            together = np.stack(sets, axis=2)
            sub = together[:, :1, :] - together[:, :1, :1]
            if (together - sub == together[:, :, :1]).all():
                families.append(Family(together[:, :, 0], kind, sub[:, 0, :], pieces[1:], pieces[0]))
                continue
        for part, at in zip(sets, pieces.T, strict=True):
            families.append(Family(part, kind, np.zeros((2, 1), np.int64), at[1:, None], at[:1]))
    return families


def _token_families(lane: Lane, ids: tuple[Ints, Ints]) -> list[TokenFamily]:
    strands = lane.strands.length.size
    base, step, sub = [], [], []
    for found in ids:
        by_slot = found[0].reshape(strands, -1)
        base.append(by_slot[:, 0])
        step.append(found[1].reshape(strands, -1)[:, 0])
        sub.append(by_slot - by_slot[:, :1])
    alike = np.concatenate([np.stack(step, axis=1), *sub], axis=1)
    kinds: list[Ints] = [np.arange(strands)]
    if (alike != alike[0]).any():
        _, which = np.unique(alike, axis=0, return_inverse=True)
        kinds = [np.flatnonzero(which.reshape(-1) == k) for k in range(int(which.max()) + 1)]
    return [
        TokenFamily(
            base=np.stack(base)[:, kind],
            step=alike[kind[0], :2],
            sub=(sub[0][kind[0]], sub[1][kind[0]]),
            turn=lane.turn,
            joined=lane.joined,
        )
        for kind in kinds
    ]


def _pool(lanes: Sequence[Lane], side: int) -> int:
    return min(int(lane.strands.num_blocks[side].min()) for lane in lanes)
