"""Runs (R): the longest pieces of a cell that are contiguous on both sides.

- R1: Within one token, an axis whose stride equals the run's length on both sides makes the run longer. Every other
  axis is listed.
- R2: The runs of one token are sorted and joined wherever one ends and another begins on both sides: across axes, views
  and tensors. The result is the *runs of one token*, the same in every slot.
- R3: A run of one token continues into the next token where both sides step by its length inside one block. All runs of
  a block pair are then sorted and joined once more.
- R4: Runs that do not continue move token by token. So does the part of a longer run that a request's range cuts off:
  ``cuts`` are the spans of positions that the longer runs cover.

Runs never join across regions, because a descriptor lies in one region, nor across blocks, because any two blocks may
be anywhere in the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints, distinct, heads, listed
from kvplan._checks import at_most
from kvplan.describe.axes import Segments
from kvplan.describe.blocks import POSITION_END
from kvplan.describe.views import TOKEN, Group
from kvplan.plan.align import blocks_and_slots, period, position_of, slots
from kvplan.plan.cells import Cell

MAX_LISTED: Final = 1 << 22
"""The most runs of one token that one source may serve, and the most block pairs and runs of a period that are listed
to join them. Where there would be more, they move token by token."""


@attrs.frozen(eq=False)
class Runs:
    """Runs in block 0 of their pools. Each array but ``length`` (n,) is (2, n) int64, the destination's row first.

    ``region`` is an index, ``offset`` in bytes within it. ``block_stride`` and ``num_blocks`` are those of the pool.
    """

    region: Ints
    offset: Ints
    block_stride: Ints
    num_blocks: Ints
    length: Ints

    def take(self, which: Any, **changes: Ints) -> Runs:
        """The runs at these indices, with some arrays replaced."""
        return Runs(
            **{
                f.name: changes.get(f.name, getattr(self, f.name)[..., which])
                for f in attrs.fields(Runs)
            }
        )


def _all(parts: Sequence[Runs]) -> Runs:
    """The runs of all parts, one part after another."""
    return Runs(
        *(
            np.concatenate([getattr(part, f.name) for part in parts], axis=-1)
            for f in attrs.fields(Runs)
        )
    )


@attrs.frozen(eq=False)
class TokenRuns:
    """Runs of one token that share a token axis on each side, and the positions at which they move.

    ``carried`` are the intervals of these positions in ``[0, every)``, (n, 2). ``joined`` says whether longer runs
    cover them, so that they move token by token only at the ends of a range.
    """

    token: tuple[Segments, Segments]
    carried: Ints
    every: int
    runs: Runs
    joined: bool


@attrs.frozen(eq=False)
class GroupRuns:
    """Everything that moves between one group of the destination and one group of a source.

    ``runs`` are the joined runs of one period, (n,); ``position`` (n,) has the first position of each. ``cuts`` (m, 2)
    has the spans of positions that they cover, ascending.
    """

    groups: tuple[Group, Group]
    period: int
    tokens: tuple[TokenRuns, ...]
    runs: Runs
    position: Ints
    cuts: Ints


@attrs.frozen(eq=False)
class BlockPairs:
    """Stretches of consecutive positions in one block of each side, by position, of one period.

    ``position`` and ``count`` (n,) say which positions; ``block`` and ``slot`` (2, n) where the first of them is.
    """

    position: Ints
    count: Ints
    block: Ints
    slot: Ints


def group_runs(cells: Iterable[Cell]) -> tuple[GroupRuns, ...]:
    """The runs of all cells that one source serves, by pair of groups."""
    by_groups: dict[tuple[Group, Group], dict[Any, list[tuple[Cell, Runs]]]] = {}
    number = 0
    for cell in cells:
        runs = _cell_runs(cell)
        number += runs.length.size
        at_most(
            MAX_LISTED,
            number,
            "runs of one token",
            f"plan {cell.match.names[0]!r} and the tensors before it",
        )
        groups = cell.sides[0].group, cell.sides[1].group
        by_groups.setdefault(groups, {}).setdefault(_strides(cell), []).append((cell, runs))
    found = [
        (groups, [_token_runs(each) for each in equal.values()])
        for groups, equal in by_groups.items()
    ]
    # Runs of one token and of one length are joined together; all of them share the limit evenly.
    several = sum(distinct(one.runs.length).size for _, tokens in found for one in tokens)
    return tuple(_group_runs(groups, tokens, MAX_LISTED // several) for groups, tokens in found)


def geometry_key(cells: Iterable[Cell]) -> tuple[tuple[Any, ...], Ints]:
    """A key of the cells' geometry, and their base offset on each side, (2,) int64.

    Cells with equal keys have the same runs and rows, shifted by the difference of their base offsets: ranks that
    hold other heads in the same layout, or other parts of one rank's heads.
    """
    found: list[tuple[Any, ...]] = []
    begin = np.zeros(2, np.int64)
    for cell in cells:
        sides, places, at = cell.sides, cell.match.places(cell.destination, cell.source), [0, 0]
        axes: list[Any] = []
        for axis, part in cell.parts.items():
            if axis != TOKEN:
                seen = [side.segments[axis].seen(*part.span) for side in sides]
                at = [first + more for first, (more, _) in zip(at, seen, strict=True)]
                axes += part.shape, seen[0][1], seen[1][1]
        begin = begin if found else places[:, 0, 1] + at
        places[:, :, 1] += (at - begin)[:, None]
        groups, itemsize = [side.group for side in sides], sides[0].itemsize
        found.append((*groups, itemsize, *_strides(cell), *axes, places.tobytes()))
    return tuple(found), begin


def _strides(cell: Cell) -> tuple[Any, ...]:
    """A key that is equal for cells with the same strides from token to token and from block to block."""
    sides = cell.sides
    token = [side.segments[TOKEN].seen(0, slots(side.group)) for side in sides]
    blocks = [(side.block_stride_bytes, side.num_blocks) for side in sides]
    return *token, *blocks, cell.every, cell.parts[TOKEN].intervals.tobytes()


def content(cell: Cell) -> tuple[Ints, int]:
    """The runs of one token of one tensor, by rule R1: their offsets in slot 0, (2, n) int64, and their length."""
    ours, theirs = cell.sides
    length, found = ours.itemsize, np.zeros((2, 1), np.int64)
    # Axes by the destination's ascending stride, so that an axis can only continue the finer ones before it.
    axes = [axis for axis in cell.parts if axis != TOKEN]
    for axis in sorted(axes, key=lambda axis: int(ours.segments[axis].stride[0])):
        part, sides = cell.parts[axis], (ours.segments[axis], theirs.segments[axis])
        if len(part.intervals) == 1 and all(side.steps(*part.span, length) for side in sides):
            length, coordinate = length * part.size, part.intervals[0, :1]
        else:
            number = found.shape[1] * part.size * len(cell.match.names)
            at_most(
                MAX_LISTED, number, "runs of one token", f"plan {cell.match.names[0]!r}", axis=axis
            )
            coordinate = listed(part.intervals)
        at = np.stack([side.at(coordinate) for side in sides])
        found = (found[:, :, None] + at[:, None, :]).reshape(2, -1)
    return found, length


def _cell_runs(cell: Cell) -> Runs:
    """The runs of one token of every tensor of a cell, each at the tensor's own place."""
    inner, length = content(cell)
    places = cell.match.places(cell.destination, cell.source)
    region, offset = np.repeat(
        np.moveaxis(places, 2, 0), inner.shape[1], axis=2
    )  # each (2, tensors * runs)
    every = np.ones((2, region.shape[1]), np.int64)
    return Runs(
        region=region,
        offset=offset + np.tile(inner, places.shape[1]),
        block_stride=every * [[side.block_stride_bytes] for side in cell.sides],
        num_blocks=every * [[side.num_blocks] for side in cell.sides],
        length=every[0] * length,
    )


def join(same: Sequence[Ints], offset: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Chains of runs that continue each other on both sides: an order (n,), and the start of each chain in it.

    ``offset`` is (2, n). Runs join only if they have equal values in every array of ``same``.

    >>> join([], np.array([[0, 8, 32], [64, 72, 96]]), np.array([8, 8, 8]))
    (array([0, 1, 2]), array([0, 2]))
    """
    # By the keys, then by local offset: runs that can continue each other are neighbours.
    order = np.lexsort((offset[0], *same))
    length, offset = length[order], offset[:, order]
    goes_on = (offset[:, :-1] + length[:-1] == offset[:, 1:]).all(0)
    for key in same:
        ordered = key[order]
        goes_on &= ordered[:-1] == ordered[1:]
    return order, heads(goes_on)


def _token_runs(found: Sequence[tuple[Cell, Runs]]) -> TokenRuns:
    """The runs of one token of cells with equal strides, by rule R2."""
    cell, _ = found[0]
    runs = _all([runs for _, runs in found])
    order, first = join([*runs.region], runs.offset, runs.length)
    return TokenRuns(
        token=(cell.sides[0].segments[TOKEN], cell.sides[1].segments[TOKEN]),
        carried=cell.parts[TOKEN].intervals,
        every=cell.every,
        runs=runs.take(order[first], length=np.add.reduceat(runs.length[order], first)),
        joined=False,
    )


def _group_runs(groups: tuple[Group, Group], tokens: Sequence[TokenRuns], limit: int) -> GroupRuns:
    """Joins runs across tokens, by rule R3; those of one length only if there are at most ``limit`` pieces to join."""
    every = math.lcm(period(*groups), *(one.every for one in tokens))
    split: list[TokenRuns] = []
    longer: list[tuple[Runs, Ints]] = []
    for one in tokens:
        alone = np.ones(one.runs.length.size, bool)
        lengths = [
            n
            for n in distinct(one.runs.length).tolist()
            if all(_continues(side, n) for side in one.token)
        ]
        pairs = block_pairs(groups, one.carried, one.every, every, limit) if lengths else None
        for length in lengths:
            which = np.flatnonzero(one.runs.length == length)
            chains = (
                None if pairs is None else _chains(pairs, one.token, length, limit // which.size)
            )
            if chains is not None and (chains[1] > 1).any():
                alone[which] = False
                longer.append(_over(one.runs.take(which), *chains))
        split += [
            attrs.evolve(one, runs=one.runs.take(mask), joined=joined)
            for mask, joined in ((~alone, True), (alone, False))
            if mask.any()
        ]
    return GroupRuns(groups, every, tuple(split), *_join_longer(longer))


def block_pairs(
    groups: Sequence[Group], carried: Ints, every: int, positions: int, limit: int = MAX_LISTED
) -> BlockPairs | None:
    """The block pairs of a period of ``positions``; ``None`` if there would be more than ``limit``.

    Positions move that are in the intervals ``carried``, (n, 2), modulo ``every``.

    >>> pairs = block_pairs((Group("attn", 48), Group("attn", 32)), np.array([[0, 1]]), 1, 96)
    >>> pairs.position.tolist(), pairs.block.tolist(), pairs.slot.tolist()
    ([0, 32, 48, 64], [[0, 0, 1, 1], [0, 1, 1, 2]], [[0, 32, 0, 16], [0, 0, 16, 0]])
    """
    if carried[0, 1] - carried[0, 0] == every:  # every position moves: one interval
        carried, every = np.array([[0, positions]]), positions
    blocks = [positions // (group.context.size * slots(group)) for group in groups]
    if max(*blocks, positions // every * len(carried)) > limit or positions > POSITION_END:
        return None
    start, stop = np.add.outer(np.arange(0, positions, every), carried).reshape(-1, 2).T
    bounds = [
        position_of(group, np.arange(n) * slots(group))
        for group, n in zip(groups, blocks, strict=True)
    ]
    # A stretch begins with each interval and with each block inside an interval, and ends before the next one.
    position = distinct(np.concatenate([start, *bounds]))
    of = np.searchsorted(start, position, "right") - 1
    inside = (of >= 0) & (position < stop[of])
    count = np.minimum(np.append(position[1:], positions), stop[of]) - position
    position = position[inside]
    return BlockPairs(position, count[inside], *blocks_and_slots(groups, position))


def _continues(token: Segments, length: int) -> bool:
    """Whether tokens of a block can be ``length`` bytes apart: by the stride, or where one segment meets another."""
    return token.start.size > 1 or bool(token.stride[0] == length)


def _chains(
    pairs: BlockPairs, token: tuple[Segments, Segments], length: int, limit: int
) -> tuple[Ints, Ints, Ints] | None:
    """The longest chains of tokens that are ``length`` bytes apart on both sides, inside one block of each side.

    Returns their offsets in a block, (2, n), their tokens, (n,), and (4, n): both block ordinals, the first position
    and the end of the last one. Returns ``None`` if they have more than ``limit`` pieces.
    """
    position, count, block, slot = pairs.position, pairs.count, pairs.block, pairs.slot
    whole = all(side.stride[0] == length for side in token)
    for side, axis in enumerate(token):
        # Cut stretches into pieces: where a segment begins or, if its tokens are further apart, at each token.
        low = np.searchsorted(axis.start, slot[side], "right") - 1
        number = np.searchsorted(axis.start, slot[side] + count, "left") - low if whole else count
        if (total := int(number.sum())) > limit:
            return None
        if total == count.size:
            continue
        of = np.repeat(np.arange(count.size), number)
        nth = listed(np.stack([0 * number, number], axis=1))
        first, size = slot[side][of], count[of]
        begin = np.maximum(axis.start[low[of] + nth] - first, 0) if whole else nth
        end = np.minimum(axis.stop[low[of] + nth] - first, size) if whole else nth + 1
        position, count, block, slot = (
            position[of] + begin,
            end - begin,
            block[:, of],
            slot[:, of] + begin,
        )
    at = np.stack([axis.at(where) for axis, where in zip(token, slot, strict=True)])
    first = heads(
        ((block[:, 1:] == block[:, :-1]) & (at[:, 1:] == at[:, :-1] + count[:-1] * length)).all(0)
    )
    last = np.append(first[1:], count.size) - 1
    spans = np.concatenate([block[:, first], [position[first], position[last] + count[last]]])
    return at[:, first], np.add.reduceat(count, first), spans


def _over(runs: Runs, at: Ints, count: Ints, spans: Ints) -> tuple[Runs, Ints]:
    """Every run of one token over every chain of tokens, and the spans of each, the chains of one run together."""
    each = np.repeat(np.arange(runs.length.size), count.size)
    longer = runs.take(
        each,
        offset=(runs.offset[:, :, None] + at[:, None]).reshape(2, -1),
        length=np.multiply.outer(runs.length, count).reshape(-1),
    )
    return longer, np.tile(spans, runs.length.size)


def _join_longer(parts: Sequence[tuple[Runs, Ints]]) -> tuple[Runs, Ints, Ints]:
    """Joins longer runs of one block pair, by rule R3: the runs, the first position of each, and the cuts."""
    if not parts:
        none = np.zeros((2, 0), np.int64)
        return Runs(none, none, none, none, none[0]), none[0], none.T
    runs, spans = (
        _all([runs for runs, _ in parts]),
        np.concatenate([where for _, where in parts], axis=1),
    )
    # Runs may only join in the same block pair, regions and pools. A joined run spans the positions of all its parts.
    same = [*runs.num_blocks, *runs.block_stride, *spans[:2], *runs.region]
    order, first = join(same, runs.offset, runs.length)
    low = np.minimum.reduceat(spans[2, order], first)
    high = np.maximum.reduceat(spans[3, order], first)
    runs = runs.take(order[first], length=np.add.reduceat(runs.length[order], first))
    return runs, low, _union(low, high)


def _union(low: Ints, high: Ints) -> Ints:
    """The union of intervals, (n, 2), ascending; intervals that merely touch stay separate."""
    # By ascending start, a new interval begins where the start is not below the highest end so far.
    order = np.argsort(low, kind="stable")
    low, reach = low[order], np.maximum.accumulate(high[order])
    first = heads(low[1:] < reach[:-1])
    return np.stack([low[first], reach[np.append(first[1:], low.size) - 1]], axis=1)
