"""Align (A): the block and the slot of every position, on each side.

- A1: A worker counts the positions that its context gives it: the n-th of them has local index n.
- A2: Local index ``n`` is in slot ``n % slots`` of the request's block ``n // slots``. A state is a block of one slot.
- A3: Blocks and slots of both sides repeat after a *period* of positions: the least common multiple of both sides'
  own periods. Any two block sizes have one; neither has to divide the other.

>>> ours, theirs = Group("attn", 16), Group("attn", 48)
>>> period(ours, theirs)
48
>>> block, slot = blocks_and_slots((ours, theirs), np.array([0, 16, 47, 48]))
>>> block.tolist(), slot.tolist()
([[0, 1, 2, 3], [0, 0, 0, 1]], [[0, 0, 15, 0], [0, 16, 47, 0]])
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from kvplan._arrays import Ints
from kvplan.describe.views import Group

Position = TypeVar("Position", int, Ints)


def slots(group: Group) -> int:
    """Slots in a block; a block of a state group counts as one slot."""
    return group.tokens_per_block or 1


def cycle(*groups: Group) -> int:
    """The number of positions after which the same ranks hold positions again, for all given groups together."""
    return math.lcm(*(group.context.size * group.context.interleave_tokens for group in groups))


def period(*groups: Group) -> int:
    """The number of positions after which ranks, block boundaries and slots repeat, by rule A3."""
    return math.lcm(
        *(g.context.size * math.lcm(slots(g), g.context.interleave_tokens) for g in groups)
    )


def held_positions(group: Group, every: int) -> tuple[tuple[int, int], ...]:
    """The positions in ``[0, every)``, a multiple of the group's cycle, that its worker holds: intervals, ascending.

    >>> from kvplan import Context
    >>> held_positions(Group("attn", 16, Context(1, 2, 4)), 16), held_positions(Group("attn", 16), 16)
    (((4, 8), (12, 16)), ((0, 16),))
    """
    if group.context.size == 1:
        return ((0, every),)
    run = group.context.interleave_tokens
    return tuple(
        [(start, start + run) for start in range(group.context.rank * run, every, cycle(group))]
    )


def local_index(group: Group, position: Position) -> Position:
    """The local index, by rule A1, of a position that the worker holds, or of each one in an array."""
    run = group.context.interleave_tokens
    return position // cycle(group) * run + position % run if group.context.size > 1 else position


def position_of(group: Group, local: Position) -> Position:
    """The position that has local index ``local``; the inverse of :func:`local_index`."""
    run, context = group.context.interleave_tokens, group.context
    return (local // run * context.size + context.rank) * run + local % run


def before(group: Group, position: int) -> int:
    """The number of positions below ``position`` that the worker holds.

    >>> from kvplan import Context
    >>> [before(Group("attn", 16, Context(1, 2, 4)), position) for position in (4, 5, 8, 13)]
    [0, 1, 4, 5]
    """
    run, context = group.context.interleave_tokens, group.context
    turn, rest = divmod(position, cycle(group))
    return turn * run + min(max(rest - context.rank * run, 0), run)


def blocks_and_slots(groups: Sequence[Group], position: Ints) -> tuple[Ints, Ints]:
    """The block ordinal and the slot of each position, in each group: two int64 arrays of shape (groups, positions).

    Every group must hold every position.
    """
    block, slot = np.empty((2, len(groups), position.size), np.int64)
    for i, group in enumerate(groups):
        np.divmod(local_index(group, position), slots(group), out=(block[i], slot[i]))
    return block, slot


def reach(group: Group, first: int, count: int) -> tuple[int, int]:
    """The positions in ``count`` blocks from ordinal ``first`` on, as ``[start, stop)``.

    >>> reach(Group("attn", 16), 3, 2)
    (48, 80)
    """
    if not count:
        return 0, 0
    return position_of(group, first * slots(group)), position_of(
        group, (first + count) * slots(group) - 1
    ) + 1


def ends(starts: Ints | Sequence[int], every: int, low: int, high: int) -> tuple[int, int] | None:
    """The first and the last position in ``[low, high)`` that is in ``starts`` modulo ``every``; ``None`` without one.

    >>> ends([0, 3], 4, 1, 9), ends([0, 3], 4, 1, 3)
    ((3, 8), None)
    """
    turn, rest = divmod(low, every)
    more, i = divmod(bisect_left(starts, rest), len(starts))
    first = (turn + more) * every + starts[i]
    turn, rest = divmod(high, every)
    more, i = divmod(bisect_left(starts, rest) - 1, len(starts))
    last = (turn + more) * every + starts[i]
    return (int(first), int(last)) if first <= last else None


def repeated(starts: Ints, every: int, low: int, high: int) -> Ints:
    """All positions in ``[low, high)`` that are in ``starts`` modulo ``every``, ascending.

    >>> repeated(np.array([0, 3]), 4, 3, 9).tolist()
    [3, 4, 7, 8]
    """
    position: Ints = np.add.outer(np.arange(low - low % every, high, every), starts).reshape(-1)
    return position[(position >= low) & (position < high)]
