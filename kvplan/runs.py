"""Runs (R): the bytes of a cell that are contiguous on both sides, as long as they can be.

- R1: an axis whose stride equals the run's length on both sides makes the run longer; every other axis is listed.
- R2: the runs of one token are sorted and joined wherever one ends, on both sides, where another begins, across
  axes, views and tensors. What is left are *strands*: the same bytes of every slot.
- R3: a strand whose step from slot to slot equals its length, on both sides, is joined over the tokens of each
  piece of the period; then all runs of a block pair are sorted and joined once more.
- R4: strands that R3 joined to nothing move token by token. So does the rest of a strand where a request begins or
  ends inside one of its runs: *cuts* are the positions of the period that no run crosses.

Nothing is joined across regions (a descriptor lies in one region) or across blocks (any two may lie anywhere).
Arrays named ``region``, ``offset``, ... are (2, n): destination, then source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import attrs
import numpy as np

from kvplan.align import align, offsets, paged, period
from kvplan.axes import Ints, Segments, heads, numbered
from kvplan.cells import Bools, Cell
from kvplan.views import TOKEN, Geometry, Group

MAX_UNITS: Final = 1 << 22
"""Strands whose pieces in one period would be more than this move token by token."""


@attrs.frozen(eq=False)
class Spans:
    """Bytes on both sides: region index, offset in it, stride and number of blocks; and one length."""

    region: Ints
    offset: Ints
    block_stride: Ints
    num_blocks: Ints
    length: Ints

    def take(self, which: Ints | Bools) -> Spans:
        """The spans at these indices."""
        two = (self.region, self.offset, self.block_stride, self.num_blocks)
        return Spans(*(array[:, which] for array in two), self.length[which])


@attrs.frozen(eq=False)
class Lane:
    """Strands that share a token axis on each side, and the positions they carry."""

    token: tuple[Segments, Segments]
    turn: Bools
    strands: Spans
    joined: bool


@attrs.frozen(eq=False)
class Section:
    """All that moves between one group of the destination and one group of a source.

    ``runs`` are the joined runs of one period, with the block in the period on each side (2, n) and the first
    position of each; ``cuts`` (n, 2) are the spans of positions that runs cover.
    """

    groups: tuple[Group, Group]
    period: int
    lanes: tuple[Lane, ...]
    runs: Spans
    block: Ints
    position: Ints
    cuts: Ints


def sections(cells: Iterable[Cell]) -> tuple[Section, ...]:
    """The sections of the cells that one source serves."""
    by_groups: dict[tuple[Group, Group], list[Cell]] = {}
    for cell in cells:
        by_groups.setdefault((_sides(cell)[0].group, _sides(cell)[1].group), []).append(cell)
    return tuple(_section(groups, members) for groups, members in by_groups.items())


def _sides(cell: Cell) -> tuple[Geometry, Geometry]:
    return cell.match.destination[cell.destination], cell.match.sources[cell.source][1]


def content(ours: Geometry, theirs: Geometry, box: dict[str, Segments]) -> tuple[Ints, Ints]:
    """The runs of one token of one view pair by rule R1: offsets (2, n) at slot 0, and lengths (n,)."""
    length, listed = ours.itemsize, np.zeros((2, 1), np.int64)
    for axis in sorted(box, key=lambda axis: int(ours.segments[axis].stride[0])):
        sides = [ours.segments[axis], theirs.segments[axis]]
        common = align(sides[0], sides[1])
        wanted = align(Segments(common.start, common.length, common.start, common.length), box[axis])
        segment, start, extent = common.segment[:, wanted.segment[0]], wanted.start, wanted.length
        first = np.stack([offsets(side, i, start) for side, i in zip(sides, segment, strict=True)])
        stride = np.stack([side.stride[i] for side, i in zip(sides, segment, strict=True)])
        if (extent == extent[0]).all() and ((stride == length).all() or extent[0] == 1):
            length *= int(extent[0])
        else:
            step = np.arange(extent.sum()) - np.repeat(np.cumsum(extent) - extent, extent)
            first = np.repeat(first, extent, axis=1) + step * np.repeat(stride, extent, axis=1)
        listed = (listed[:, :, None] + first[:, None, :]).reshape(2, -1)
    return listed, np.full(listed.shape[1], length, np.int64)


def join(same: Sequence[Ints], offset: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Chains of spans that continue each other on both sides: an order, and where in it each chain begins.

    Only spans with equal values in every array of ``same`` are joined.

    >>> join([], np.array([[0, 8, 32], [64, 72, 96]]), np.array([8, 8, 8]))
    (array([0, 1, 2]), array([0, 2]))
    """
    order = np.lexsort((offset[0], *same))
    length, offset = length[order], offset[:, order]
    goes_on = (offset[:, :-1] + length[:-1] == offset[:, 1:]).all(0)
    for key in same:
        goes_on &= key[order][:-1] == key[order][1:]
    return order, heads(goes_on)


def _strands(cells: Sequence[Cell]) -> Spans:
    """Rule R2 for cells of one lane."""
    region, offset, length = [], [], []
    for cell in cells:
        ours, theirs = _sides(cell)
        box = {axis: Segments(at[:, 0], at[:, 1] - at[:, 0], at[:, 0], at[:, 0]) for axis, at in cell.box.items()}
        inner, lengths = content(ours, theirs, box)
        places = cell.match.places[:, [cell.destination, len(cell.match.destination) + cell.source], :]
        tensors = len(places)
        region.append(np.repeat(places[:, :, 0].T, inner.shape[1], axis=1))
        offset.append((places[:, :, 1].T[:, :, None] + inner[:, None, :]).reshape(2, -1))
        length.append(np.tile(lengths, tensors))
    regions, offset_, lengths = np.concatenate(region, axis=1), np.concatenate(offset, axis=1), np.concatenate(length)
    order, first = join([regions[0], regions[1]], offset_, lengths)
    leads = order[first]
    ones = np.ones((2, len(leads)), np.int64)
    return Spans(
        region=regions[:, leads],
        offset=offset_[:, leads],
        block_stride=ones * np.array([[side.block_stride_bytes] for side in _sides(cells[0])]),
        num_blocks=ones * np.array([[side.num_blocks] for side in _sides(cells[0])]),
        length=np.add.reduceat(lengths[order], first),
    )


@attrs.frozen(eq=False)
class _Units:
    """One strand over one piece of the period each: the spans, blocks, first position and number of tokens."""

    strand: Ints
    spans: Spans
    block: Ints
    position: Ints
    tokens: Ints


def _units(groups: tuple[Group, Group], positions: int, lane: Lane, first_strand: int) -> _Units | None:
    """Rule R3 within pieces; None where the lane's strands are not dense or the period is too long to list."""
    pages = [paged(group, token, positions) for group, token in zip(groups, lane.token, strict=True)]
    ours, theirs = pages
    if ours is None or theirs is None:
        return None
    pieces = align(ours.positions, theirs.positions)
    start, tokens, segment = pieces.start, pieces.length, pieces.segment
    if not lane.turn.all():
        carried = np.flatnonzero(np.diff(np.tile(lane.turn, positions // lane.turn.size), prepend=False, append=False))
        turns = Segments(carried[::2], carried[1::2] - carried[::2], carried[::2], carried[::2])
        cut = align(Segments(start, tokens, start, start), turns)
        start, tokens, segment = cut.start, cut.length, segment[:, cut.segment[0]]
    sides = list(zip((ours, theirs), segment, strict=True))
    stride = np.stack([side.positions.stride[i] for side, i in sides])
    offset = np.stack([offsets(side.positions, i, start) for side, i in sides])
    block = np.stack([side.block[i] for side, i in sides])
    length = lane.strands.length
    dense = ((stride[:, None, :] == length[None, :, None]).all(0) | (tokens == 1)).all(1)
    which = np.flatnonzero(dense)
    if not 0 < which.size * start.size <= MAX_UNITS:
        return None
    strand, piece = np.repeat(which, start.size), np.tile(np.arange(start.size), which.size)
    spans = lane.strands.take(strand)
    spans = attrs.evolve(spans, offset=spans.offset + offset[:, piece], length=spans.length * tokens[piece])
    return _Units(first_strand + strand, spans, block[:, piece], start[piece], tokens[piece])


def _section(groups: tuple[Group, Group], cells: Sequence[Cell]) -> Section:
    by_lane: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        token = [tuple(a for a in side.axes if a.name == TOKEN) for side in _sides(cell)]
        block = [(side.block_stride_bytes, side.num_blocks) for side in _sides(cell)]
        by_lane.setdefault((*token, *block, cell.turn.tobytes()), []).append(cell)
    lanes = []
    for members in by_lane.values():
        ours, theirs = _sides(members[0])
        token_axes = (ours.segments[TOKEN], theirs.segments[TOKEN])
        lanes.append(Lane(token=token_axes, turn=members[0].turn, strands=_strands(members), joined=False))
    positions = math.lcm(*map(period, groups), *(lane.turn.size for lane in lanes))
    first_strand = np.cumsum([0, *(lane.strands.length.size for lane in lanes)])
    units = [
        found
        for lane, first in zip(lanes, first_strand.tolist(), strict=False)
        if (found := _units(groups, positions, lane, first)) is not None
    ]
    joined = np.zeros(int(first_strand[-1]), bool)
    runs, block, position, cuts = _joined(units, joined)
    split = [
        Lane(token=lane.token, turn=lane.turn, strands=lane.strands.take(which), joined=is_joined)
        for lane, first in zip(lanes, first_strand.tolist(), strict=False)
        for is_joined in (True, False)
        if (which := np.flatnonzero(joined[first : first + lane.strands.length.size] == is_joined)).size
    ]
    return Section(groups, positions, tuple(split), runs, block, position, cuts)


def _joined(units: Sequence[_Units], joined: Bools) -> tuple[Spans, Ints, Ints, Ints]:
    """Rules R3 and R4: the runs of all lanes; marks in ``joined`` the strands that gained by it."""
    if not units:
        none = np.zeros((2, 0), np.int64)
        return Spans(none, none, none, none, none[0]), none, none[0], _spans_of(none[0], none[0])
    spans = Spans(
        *(
            np.concatenate([getattr(unit.spans, field.name) for unit in units], axis=-1)
            for field in attrs.fields(Spans)
        )
    )
    block, position, tokens, strand = (
        np.concatenate([getattr(unit, name) for unit in units], axis=-1)
        for name in ("block", "position", "tokens", "strand")
    )
    same = [row for array in (block, spans.region, spans.block_stride, spans.num_blocks) for row in array]
    order, first = join(same, spans.offset, spans.length)
    longer = np.add.reduceat(tokens[order], first) > 1
    joined[strand[order][longer[numbered(first, order.size)]]] = True
    kept = joined[strand[order[first]]]
    low = np.minimum.reduceat(position[order], first)[kept]
    high = np.maximum.reduceat((position + tokens)[order], first)[kept]
    length = np.add.reduceat(spans.length[order], first)[kept]
    leads = order[first][kept]
    return attrs.evolve(spans.take(leads), length=length), block[:, leads], low, _spans_of(low, high)


def _spans_of(low: Ints, high: Ints) -> Ints:
    """The union of intervals, (n, 2), ascending; intervals that merely touch stay apart."""
    if not low.size:
        return np.zeros((0, 2), np.int64)
    order = np.argsort(low, kind="stable")
    low, reach = low[order], np.maximum.accumulate(high[order])
    first = heads(low[1:] < reach[:-1])
    return np.stack([low[first], reach[np.append(first[1:], low.size) - 1]], axis=1)
