"""Block pairs: one block of each side, and the ranges of positions that lie in both.

Positions repeat after a period. In a period there are a few block pairs: one block of the
destination with one of the source, and the positions that are in both. Inside a block pair, tokens
may follow each other without a gap on both sides: then a run of one token continues into the next
one, rule plan.R3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from kvplan._arrays import Ints, distinct, heads, integers_in
from kvplan.describe.axes import Segments
from kvplan.describe.blocks import POSITION_END
from kvplan.describe.views import Group
from kvplan.plan.align import blocks_and_slots, position_of

MAX_JOINED: Final = 1 << 20
"""The most block pairs and runs of a period that are listed to join runs of one token.

Where there would be more, these move token by token."""


@attrs.frozen(eq=False)
class BlockPairs:
    """Ranges of consecutive positions in one block of each side, by position, of one period.

    ``position`` and ``num_tokens`` (n,) say which positions; ``block`` and ``slot`` (2, n) where
    the first of them is.
    """

    position: Ints
    num_tokens: Ints
    block: Ints
    slot: Ints


@attrs.frozen(eq=False)
class TokenChains:
    """Tokens that follow each other without a gap inside one block of each side.

    ``offset`` (2, n) is that of the first token in its block, ``block`` (2, n) the ordinal of that
    block, ``num_tokens`` (n,) their number. They are the positions ``[start, stop)``, each (n,).
    """

    offset: Ints
    block: Ints
    num_tokens: Ints
    start: Ints
    stop: Ints


def most_pairs(groups: Sequence[Group], intervals: Ints, cycle: int, num_positions: int) -> int:
    """Return a bound of the number of :func:`block_pairs`: blocks and intervals of a period."""
    num_blocks = [num_positions // (group.context.size * group.num_slots) for group in groups]
    # without context parallelism every position moves: one interval
    moves_all = intervals[0, 1] - intervals[0, 0] == cycle
    return sum(num_blocks) + (1 if moves_all else num_positions // cycle * len(intervals))


def block_pairs(
    groups: Sequence[Group],
    intervals: Ints,
    cycle: int,
    num_positions: int,
    limit: int = MAX_JOINED,
) -> BlockPairs | None:
    """Return the block pairs of ``num_positions``, a period, or ``None`` for more than ``limit``.

    Positions move that are in ``intervals``, (n, 2), modulo ``cycle``.

    >>> destination, source = Group("attn", 48), Group("attn", 32)
    >>> pairs = block_pairs((destination, source), np.array([[0, 1]]), 1, 96)
    >>> pairs.position.tolist(), pairs.block.tolist(), pairs.slot.tolist()
    ([0, 32, 48, 64], [[0, 0, 1, 1], [0, 1, 1, 2]], [[0, 32, 0, 16], [0, 0, 16, 0]])
    """
    # Without context parallelism every position moves: a single interval.
    if intervals[0, 1] - intervals[0, 0] == cycle:
        intervals = np.array([[0, num_positions]])
        cycle = num_positions
    # Refuse before anything of this size is listed.
    num_blocks = [num_positions // (group.context.size * group.num_slots) for group in groups]
    num_intervals = num_positions // cycle * len(intervals)
    if max(*num_blocks, num_intervals) > limit or num_positions > POSITION_END:
        return None
    first_of_cycle = np.arange(0, num_positions, cycle)
    starts, stops = np.add.outer(first_of_cycle, intervals).reshape(-1, 2).T
    block_starts = []
    for group, number in zip(groups, num_blocks, strict=True):
        block_starts.append(position_of(group, np.arange(number) * group.num_slots))
    # A range begins with each interval and with each block inside an interval, and ends before
    # the next one. `interval` is the last one that begins at or before each bound.
    bounds = distinct(np.concatenate([starts, *block_starts]))
    interval = np.searchsorted(starts, bounds, "right") - 1
    is_inside = (interval >= 0) & (bounds < stops[interval])
    ends = np.minimum(np.append(bounds[1:], num_positions), stops[interval])
    position = bounds[is_inside]
    num_tokens = (ends - bounds)[is_inside]
    return BlockPairs(position, num_tokens, *blocks_and_slots(groups, position))


def can_continue(token_axis: Segments, length: int) -> bool:
    """Return whether tokens of a block can be ``length`` bytes apart.

    They can by the stride, or where one segment meets another.
    """
    return token_axis.start.size > 1 or bool(token_axis.stride[0] == length)


def cut_at_segments(
    pairs: BlockPairs, token_axes: tuple[Segments, Segments], length: int, limit: int
) -> BlockPairs | None:
    """Return the block pairs, cut where a segment of either side's token axis begins.

    Where tokens of a segment are not ``length`` bytes apart, each token is a range. Return ``None``
    for more than ``limit`` ranges.
    """
    is_dense = all(axis.stride[0] == length for axis in token_axes)
    ranges = pairs
    for side, axis in enumerate(token_axes):
        first_slot = ranges.slot[side]
        first_segment = np.searchsorted(axis.start, first_slot, "right") - 1
        num_cut = ranges.num_tokens
        if is_dense:
            end_segment = np.searchsorted(axis.start, first_slot + ranges.num_tokens, "left")
            num_cut = end_segment - first_segment
        total = int(num_cut.sum())
        if total > limit:
            return None
        if total == num_cut.size:
            continue
        # One element for each new range: the range that it is cut from, its number there, and its
        # first and end token, counted from the first one of that range.
        whole = np.repeat(np.arange(num_cut.size), num_cut)
        nth = integers_in(np.stack([0 * num_cut, num_cut], axis=1))
        first_token = nth
        end_token = nth + 1
        if is_dense:
            segment = first_segment[whole] + nth
            first_token = np.maximum(axis.start[segment] - first_slot[whole], 0)
            segment_end = axis.stop[segment] - first_slot[whole]
            end_token = np.minimum(segment_end, ranges.num_tokens[whole])
        ranges = BlockPairs(
            ranges.position[whole] + first_token,
            end_token - first_token,
            ranges.block[:, whole],
            ranges.slot[:, whole] + first_token,
        )
    return ranges


def chain_tokens(
    ranges: BlockPairs, token_axes: tuple[Segments, Segments], length: int
) -> TokenChains:
    """Return the longest chains of tokens that are ``length`` bytes apart on both sides."""
    # A range continues the one before it if it is in the same blocks and begins where that ends,
    # on both sides.
    offsets = [axis.at(slot) for axis, slot in zip(token_axes, ranges.slot, strict=True)]
    offset = np.stack(offsets)
    end = offset + ranges.num_tokens * length
    same_block = ranges.block[:, 1:] == ranges.block[:, :-1]
    first = heads((same_block & (offset[:, 1:] == end[:, :-1])).all(0))
    last = np.append(first[1:], ranges.num_tokens.size) - 1
    return TokenChains(
        offset=offset[:, first],
        block=ranges.block[:, first],
        num_tokens=np.add.reduceat(ranges.num_tokens, first),
        start=ranges.position[first],
        stop=ranges.position[last] + ranges.num_tokens[last],
    )
