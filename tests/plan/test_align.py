"""Align (A)."""

import numpy as np
import pytest

from kvplan import Context, Group
from kvplan._arrays import integers_in
from kvplan.plan.align import (
    before,
    blocks_and_slots,
    cycle,
    first_and_last,
    held_positions,
    period,
    positions_between,
    reach,
)

GROUPS = [
    Group("g", tokens, Context(rank, size, interleave))
    for tokens in (None, 1, 3, 4)
    for size, interleave in ((1, 1), (2, 1), (3, 2), (2, 5))
    for rank in range(size)
    if tokens or size == 1
]


def by_hand(group: Group, count: int) -> dict[int, tuple[int, int]]:
    """(block, slot) of every position held below ``count``, counting one by one."""
    held = [p for p in range(count) if p in group.context]
    return {p: divmod(n, group.tokens_per_block or 1) for n, p in enumerate(held)}


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a1_a2_positions_stand_where_counting_puts_them(group):
    """plan.A1, plan.A2: block and slot of each held position equal those of counting."""
    expected = by_hand(group, 60)
    position = integers_in(np.array(held_positions(group, 60 * cycle(group))))
    position = position[position < 60]
    block, slot = blocks_and_slots([group], position)
    found = {p: (b, s) for p, b, s in zip(position.tolist(), block[0].tolist(), slot[0].tolist(), strict=True)}
    assert found == expected


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a1_positions_before_one_are_those_that_counting_finds(group):
    """plan.A1: how many positions a worker holds below each, counted one by one."""
    assert [before(group, p) for p in range(60)] == [len(by_hand(group, p)) for p in range(60)]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a3_the_pattern_repeats_after_a_period_and_not_before(group):
    """plan.A3: whether a position is held, and in which slot, has exactly the period that is claimed."""
    length = period(group)
    stands = by_hand(group, 3 * length)
    slot = [stands[p][1] if p in stands else None for p in range(3 * length)]
    assert slot[:length] == slot[length : 2 * length] == slot[2 * length :]
    assert not any(length % n == 0 and slot == slot[:n] * (3 * length // n) for n in range(1, length))


def test_a3_two_groups_repeat_together():
    """plan.A3: the period of two groups is the least common multiple, the cycle that of their contexts alone."""
    ours, theirs = Group("a", 16, Context(0, 2)), Group("b", 48, Context(0, 3, 2))
    assert period(ours, theirs) == 288
    assert cycle(ours, theirs) == 6


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_blocks_reach_from_their_first_position_past_their_last(group):
    """The reach of blocks [1, 3) is exactly the span of the positions they hold."""
    positions = [p for p, (block, _) in by_hand(group, 200).items() if 1 <= block < 3]
    assert reach(group, 1, 2) == (positions[0], positions[-1] + 1)
    assert reach(group, 1, 0) == (0, 0)


@pytest.mark.parametrize("starts", [[0], [2], [0, 1, 4], [3, 4]])
def test_repeated_positions_are_those_of_every_turn(starts):
    """Positions that recur are listed once each, ascending, in any range."""
    for low in range(12):
        for high in range(low, 20):
            expected = [p for p in range(low, high) if p % 5 in starts]
            assert positions_between(np.array(starts), 5, low, high).tolist() == expected
            assert first_and_last(starts, 5, low, high) == ((expected[0], expected[-1]) if expected else None)
