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

from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints, distinct, heads
from kvplan.describe.axes import Segments
from kvplan.describe.views import TOKEN, Group
from kvplan.errors import KVPlanError
from kvplan.plan.align import period, repeated, slots, stand
from kvplan.plan.cells import Cell

MAX_LISTED: Final = 1 << 20
"""The most runs of one token, and the most positions or runs of one period, that are listed. With a longer period, all
runs move token by token."""


@attrs.frozen(eq=False)
class Spans:
    """Runs in block 0 of their pools. Each array but ``length`` (n,) is (2, n) int64, the destination's row first.

    ``region`` is an index, ``offset`` in bytes within it. ``block_stride`` and ``num_blocks`` are those of the pool.
    """

    region: Ints
    offset: Ints
    block_stride: Ints
    num_blocks: Ints
    length: Ints

    def take(self, which: Any, **changes: Ints) -> Spans:
        """The runs at these indices, with some arrays replaced."""
        return Spans(**{f.name: changes.get(f.name, getattr(self, f.name)[..., which]) for f in attrs.fields(Spans)})


def _all(parts: Sequence[Spans]) -> Spans:
    """The runs of all parts, one part after another."""
    return Spans(*(np.concatenate([getattr(part, f.name) for part in parts], axis=-1) for f in attrs.fields(Spans)))


@attrs.frozen(eq=False)
class Lane:
    """Runs of one token that share a token axis on each side, and the positions at which they move.

    ``carried`` lists these positions in ``[0, every)``. ``joined`` says whether longer runs cover them, so that they
    move token by token only at the ends of a range.
    """

    token: tuple[Segments, Segments]
    carried: Ints
    every: int
    strands: Spans
    joined: bool


@attrs.frozen(eq=False)
class Section:
    """Everything that moves between one group of the destination and one group of a source.

    ``runs`` are the joined runs of one period, (n,); ``position`` (n,) has the first position of each. ``cuts`` (m, 2)
    has the spans of positions that they cover, ascending.
    """

    groups: tuple[Group, Group]
    period: int
    lanes: tuple[Lane, ...]
    runs: Spans
    position: Ints
    cuts: Ints


def sections(cells: Iterable[Cell]) -> tuple[Section, ...]:
    """The sections of all cells that one source serves."""
    by_groups: dict[tuple[Group, Group], dict[Any, list[Cell]]] = {}
    for cell in cells:
        ours, theirs = cell.sides
        by_groups.setdefault((ours.group, theirs.group), {}).setdefault(_pace(cell), []).append(cell)
    return tuple(_section(groups, [_lane(cells) for cells in lanes.values()]) for groups, lanes in by_groups.items())


def outline(cells: Iterable[Cell]) -> tuple[tuple[Any, ...], Ints]:
    """A key of the cells' geometry, and their base offset on each side, (2,) int64.

    Cells with equal keys have the same sections and rows, shifted by the difference of their base offsets: ranks that
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
        found.append((*groups, itemsize, *_pace(cell), *axes, places.tobytes()))
    return tuple(found), begin


def _pace(cell: Cell) -> tuple[Any, ...]:
    """A key that is equal for cells with the same strides from token to token and from block to block."""
    sides = cell.sides
    token = [side.segments[TOKEN].seen(0, slots(side.group)) for side in sides]
    blocks = [(side.block_stride_bytes, side.num_blocks) for side in sides]
    return *token, *blocks, cell.every, cell.parts[TOKEN].intervals.tobytes()


def content(cell: Cell) -> tuple[Ints, int]:
    """The runs of one token of one tensor, by rule R1: their offsets in slot 0, (2, n) int64, and their length."""
    ours, theirs = cell.sides
    length, listed = ours.itemsize, np.zeros((2, 1), np.int64)
    # Axes by the destination's ascending stride, so that an axis can only continue the finer ones before it.
    axes = [axis for axis in cell.parts if axis != TOKEN]
    for axis in sorted(axes, key=lambda axis: int(ours.segments[axis].stride[0])):
        part, sides = cell.parts[axis], (ours.segments[axis], theirs.segments[axis])
        (start, stop), *more = part.intervals.tolist()
        if not more and all(side.steps(start, stop, length) for side in sides):
            length, coordinate = length * part.size, np.array([start])
        elif listed.shape[1] * part.size <= MAX_LISTED:
            coordinate = np.concatenate([np.arange(*interval) for interval in part.intervals])
        else:
            raise KVPlanError(
                "RANGE",
                f"list the runs of tensor {cell.match.names[0]!r}",
                expected=f"at most {MAX_LISTED} in a token",
                got=f"{listed.shape[1] * part.size} or more",
                axis=axis,
            )
        at = np.stack([side.at(coordinate) for side in sides])
        listed = (listed[:, :, None] + at[:, None, :]).reshape(2, -1)
    return listed, length


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


def _lane(cells: Sequence[Cell]) -> Lane:
    """The runs of one token of cells with equal strides, by rule R2."""
    sides = cells[0].sides
    found = []
    for cell in cells:
        # Every tensor of the match has these runs, each at the tensor's own place: (2, tensors, runs), flattened.
        inner, length = content(cell)
        places = cell.match.places(cell.destination, cell.source)
        region, offset = np.repeat(np.moveaxis(places, 2, 0), inner.shape[1], axis=2)
        every = np.ones((2, region.shape[1]), np.int64)
        found.append(
            Spans(
                region=region,
                offset=offset + np.tile(inner, places.shape[1]),
                block_stride=every * [[side.block_stride_bytes] for side in sides],
                num_blocks=every * [[side.num_blocks] for side in sides],
                length=every[0] * length,
            )
        )
    spans = _all(found)
    order, first = join([*spans.region], spans.offset, spans.length)
    return Lane(
        token=(sides[0].segments[TOKEN], sides[1].segments[TOKEN]),
        carried=cells[0].parts[TOKEN].intervals[:, 0],
        every=cells[0].every,
        strands=spans.take(order[first], length=np.add.reduceat(spans.length[order], first)),
        joined=False,
    )


def _section(groups: tuple[Group, Group], lanes: Sequence[Lane]) -> Section:
    positions = int(np.lcm.reduce([period(*groups), *(lane.every for lane in lanes)]))
    split: list[Lane] = []
    units: list[tuple[Spans, Ints]] = []
    for lane in lanes:
        alone = np.ones(lane.strands.length.size, bool)
        if positions <= MAX_LISTED:
            position = repeated(lane.carried, lane.every, 0, positions)
            block, slot = stand(groups, position)
            at = np.stack([token.at(where) for token, where in zip(lane.token, slot, strict=True)])
            # `at` is the offset of every position's slot on both sides, (2, positions). Runs of one length continue
            # wherever both offsets grow by that length within one pair of blocks.
            for length in distinct(lane.strands.length).tolist():
                which = np.flatnonzero(lane.strands.length == length)
                goes_on = ((block[:, 1:] == block[:, :-1]) & (at[:, 1:] - at[:, :-1] == length)).all(0)
                if goes_on.any() and which.size * (first := heads(goes_on)).size <= MAX_LISTED:
                    alone[which] = False
                    units.append(_over(lane.strands.take(which), first, position, block, at))
        split += [
            attrs.evolve(lane, strands=lane.strands.take(which), joined=joined)
            for which, joined in ((~alone, True), (alone, False))
            if which.any()
        ]
    return Section(groups, positions, tuple(split), *_join_units(units))


def _over(strands: Spans, first: Ints, position: Ints, block: Ints, at: Ints) -> tuple[Spans, Ints]:
    """Every run of one token over every chain of tokens, the chains of one run after those of another.

    Returns the longer runs, and for each of them (4, n): both block ordinals, its first position and its end.
    """
    last = np.append(first[1:], position.size) - 1
    pieces = np.concatenate([block[:, first], [position[first], position[last] + 1]])
    each = np.repeat(np.arange(strands.length.size), first.size)
    spans = strands.take(
        each,
        offset=(strands.offset[:, :, None] + at[:, None, first]).reshape(2, -1),
        length=np.multiply.outer(strands.length, last - first + 1).reshape(-1),
    )
    return spans, np.tile(pieces, strands.length.size)


def _join_units(units: Sequence[tuple[Spans, Ints]]) -> tuple[Spans, Ints, Ints]:
    """Joins longer runs of one block pair, by rule R3: the runs, the first position of each, and the cuts."""
    if not units:
        none = np.zeros((2, 0), np.int64)
        return Spans(none, none, none, none, none[0]), none[0], none.T
    spans, pieces = _all([spans for spans, _ in units]), np.concatenate([where for _, where in units], axis=1)
    # Runs may only join in the same block pair, regions and pools. A joined run spans the positions of all its parts.
    same = [*spans.num_blocks, *spans.block_stride, *pieces[:2], *spans.region]
    order, first = join(same, spans.offset, spans.length)
    low = np.minimum.reduceat(pieces[2, order], first)
    high = np.maximum.reduceat(pieces[3, order], first)
    runs = spans.take(order[first], length=np.add.reduceat(spans.length[order], first))
    return runs, low, _union(low, high)


def _union(low: Ints, high: Ints) -> Ints:
    """The union of intervals, (n, 2), ascending; intervals that merely touch stay separate."""
    # By ascending start, a new interval begins where the start is not below the highest end so far.
    order = np.argsort(low, kind="stable")
    low, reach = low[order], np.maximum.accumulate(high[order])
    first = heads(low[1:] < reach[:-1])
    return np.stack([low[first], reach[np.append(first[1:], low.size) - 1]], axis=1)
