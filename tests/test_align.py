"""Align (A)."""

import math

import numpy as np
import pytest

from kvplan import Axis, Context, Group
from kvplan.align import MAX_PIECES, align, holds, local_index, paged, period, position_of
from kvplan.axes import segments


def pieces(ours, theirs):
    found = align(segments(ours), segments(theirs))
    return list(zip(found.start.tolist(), (found.start + found.length).tolist(), strict=True))


def test_a1_two_shards_meet_in_their_intersection():
    """A1: heads [2, 6) against [4, 8) have [4, 6) in common."""
    assert pieces([Axis("head", 2, 6, 8, 16)], [Axis("head", 4, 8, 8, 16)]) == [(4, 6)]


def test_a1_shards_that_do_not_meet_have_nothing_in_common():
    """A1: heads [0, 2) against [2, 4) have nothing in common."""
    assert pieces([Axis("head", 0, 2, 4, 16)], [Axis("head", 2, 4, 4, 16)]) == []


def test_a1_an_axis_is_cut_where_digits_of_either_side_end():
    """A1: three kernel blocks of 4 against two of 6 cut 12 slots at 4, 6 and 8."""
    ours = [Axis("token", 0, 3, 3, 100), Axis("token", 0, 4, 4, 2)]
    theirs = [Axis("token", 0, 2, 2, 100), Axis("token", 0, 6, 6, 2)]
    assert pieces(ours, theirs) == [(0, 4), (4, 6), (6, 8), (8, 12)]


GROUPS = [
    Group("g", tokens, Context(rank, size, interleave))
    for tokens in (1, 3, 4)
    for size, interleave in ((1, 1), (2, 1), (3, 2), (2, 5))
    for rank in range(size)
]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a2_local_indices_count_a_workers_own_positions(group):
    """A2: the nth position that a worker holds has local index n, and back."""
    held = np.array([p for p in range(60) if p in group.context])
    assert local_index(group, held).tolist() == list(range(len(held)))
    assert position_of(group, np.arange(len(held))).tolist() == held.tolist()
    assert np.flatnonzero(holds(group, np.arange(60))).tolist() == held.tolist()


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a3_the_pattern_repeats_after_a_period_and_not_before(group):
    """A3: (held, slot) by position has exactly the period that is claimed."""

    def pattern(position: int) -> tuple[bool, int, int]:
        held = position in group.context
        local = sum(p in group.context for p in range(position))
        return held, local % group.tokens_per_block if held else 0, 0

    length = period(group)
    listed = [pattern(p) for p in range(3 * length)]
    assert listed[:length] == listed[length : 2 * length] == listed[2 * length :]
    assert not any(length % n == 0 and listed == listed[:n] * (3 * length // n) for n in range(1, length))


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("digits", [1, 2])
def test_a2_a_period_lists_each_held_position_once_where_it_stands(group, digits):
    """A2: every held position of two periods is in one segment, with its block and the byte offset of its slot."""
    size = group.tokens_per_block
    axes = [Axis("token", 0, size, size, 10)]
    if digits == 2:
        axes = [Axis("token", 0, size, size, 1000), Axis("token", 0, 1, 1, 0)]
    step = axes[0].stride_bytes if size > 1 else 0
    page = paged(group, segments(axes), 2 * period(group))
    seen = {}
    for i, (start, stop) in enumerate(zip(page.positions.start.tolist(), page.positions.stop.tolist(), strict=True)):
        for position in range(start, stop):
            offset = page.positions.offset[i] + (position - start) * page.positions.stride[i]
            assert position not in seen
            seen[position] = (int(page.block[i]), int(offset))
    held = [p for p in range(2 * period(group)) if p in group.context]
    assert seen == {p: (n // size, n % size * step) for n, p in enumerate(held)}


def test_a3_a_period_too_long_to_list_is_not_listed():
    """A3: beyond MAX_PIECES there is no list; the planner then moves token by token."""
    ours, theirs = Group("a", 4093), Group("b", 4099)
    together = math.lcm(period(ours), period(theirs))
    token = segments([Axis("token", 0, 4093, 4093, 2)])
    assert paged(ours, token, together) is not None
    assert paged(Group("c", 1), segments([Axis("token", 0, 1, 1, 0)]), MAX_PIECES + 1) is None
