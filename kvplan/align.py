"""Align (A): where both sides of an axis are affine.

- A1: an axis is cut wherever a segment of either side begins or ends; on each piece both sides step evenly.
- A2: a token axis is aligned over positions, not slots. A context spreads positions over workers, a block
  holds ``tokens_per_block`` consecutive local indices.
- A3: the pattern of blocks and slots repeats with a *period* of positions, the least common multiple of both
  sides' own, so one period says all. Any two block sizes have one; nothing has to divide.

>>> from kvplan.views import Group
>>> blocks16, blocks48 = Group("a", 16), Group("b", 48)
>>> period(blocks16), period(blocks48), math.lcm(period(blocks16), period(blocks48))
(16, 48, 48)
"""

from __future__ import annotations

import math
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.axes import Ints, Segments
from kvplan.views import Group

MAX_PIECES: Final = 1 << 18
"""A period of more pieces than this on one side is not listed: every token is then a run of its own."""


@attrs.frozen(eq=False)
class Pieces:
    """Intervals of a coordinate that lie in one segment of each side: (2, n) indices, destination first."""

    start: Ints
    length: Ints
    segment: Ints


def align(destination: Segments, source: Segments) -> Pieces:
    """The common intervals of two ascending lists of segments, cut as rule A1 says."""
    sides = (destination, source)
    if destination.start.size == source.start.size == 1:
        begin, end = max(s.start[0] for s in sides), min(s.stop[0] for s in sides)
        found = 1 if begin < end else 0
        return Pieces(np.full(found, begin), np.full(found, end - begin), np.zeros((2, found), np.int64))
    bounds = np.unique(np.concatenate([part for side in sides for part in (side.start, side.stop)]))
    low, high = bounds[:-1], bounds[1:]
    segment = np.stack([np.searchsorted(side.start, low, "right") - 1 for side in sides])
    inside = np.all([(i >= 0) & (low < side.stop[i]) for i, side in zip(segment, sides, strict=True)], axis=0)
    return Pieces(start=low[inside], length=(high - low)[inside], segment=segment[:, inside])


def offsets(side: Segments, segment: Ints, start: Ints) -> Ints:
    """The byte offset of each coordinate ``start``, which lies in ``segment``."""
    offset: Ints = side.offset[segment] + (start - side.start[segment]) * side.stride[segment]
    return offset


def slots(group: Group) -> int:
    """Slots per block: a state is one slot."""
    return group.tokens_per_block or 1


def period(group: Group) -> int:
    """After how many positions a group's pattern of workers, blocks and slots repeats."""
    context = group.context
    return context.size * math.lcm(slots(group), context.interleave_tokens)


def cycle_of(group: Group) -> int:
    """After how many positions it is the same worker's turn again."""
    return group.context.size * group.context.interleave_tokens


def holds(group: Group, position: Ints) -> npt.NDArray[np.bool_]:
    """Whether a worker holds each position."""
    held: npt.NDArray[np.bool_] = position // group.context.interleave_tokens % group.context.size == group.context.rank
    return held


def local_index(group: Group, position: Ints) -> Ints:
    """Which of its own tokens a worker counts each of its positions as."""
    run = group.context.interleave_tokens
    return position // cycle_of(group) * run + position % run


def position_of(group: Group, local: Ints) -> Ints:
    """The inverse of :func:`local_index`."""
    context, run = group.context, group.context.interleave_tokens
    return (local // run * context.size + context.rank) * run + local % run


@attrs.frozen(eq=False)
class Paged:
    """The token axis over one period: segments of positions, and the block in the period that each lies in."""

    positions: Segments
    block: Ints


def paged(group: Group, token: Segments, positions: int) -> Paged | None:
    """The token axis of one side over ``positions``, a multiple of its period; None beyond MAX_PIECES."""
    context, size = group.context, slots(group)
    local = positions // context.size
    pieces = local // size * token.start.size + (local // context.interleave_tokens if context.size > 1 else 0)
    if pieces > MAX_PIECES:
        return None
    blocks = np.arange(local // size, dtype=np.int64)
    tiled = Segments(
        start=np.add.outer(blocks * size, token.start).reshape(-1),
        length=np.tile(token.length, blocks.size),
        offset=np.tile(token.offset, blocks.size),
        stride=np.tile(token.stride, blocks.size),
    )
    if context.size > 1:
        turns = np.arange(0, local, context.interleave_tokens, dtype=np.int64)
        runs = Segments(turns, np.full_like(turns, context.interleave_tokens), turns, np.ones_like(turns))
        cut = align(tiled, runs)
        tiled = Segments(
            start=cut.start,
            length=cut.length,
            offset=offsets(tiled, cut.segment[0], cut.start),
            stride=tiled.stride[cut.segment[0]],
        )
    positions_held = attrs.evolve(tiled, start=position_of(group, tiled.start))
    return Paged(positions=positions_held, block=tiled.start // size)
