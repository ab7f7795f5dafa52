"""Align (A): where a position stands on each side.

- A1: a worker counts its own positions: the nth that its context gives it has local index n.
- A2: local index ``n`` stands in slot ``n % slots`` of the request's block ``n // slots``. One state is one slot.
- A3: with both sides' contexts and block sizes, blocks and slots repeat after a *period* of positions, the least
  common multiple of both sides' own. Any two block sizes have one; nothing has to divide.

>>> ours, theirs = Group("attn", 16), Group("attn", 48)
>>> period(ours, theirs)
48
>>> block, slot = stand((ours, theirs), np.array([0, 16, 47, 48]))
>>> block.tolist(), slot.tolist()
([[0, 1, 2, 3], [0, 0, 0, 1]], [[0, 0, 15, 0], [0, 16, 47, 0]])
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from kvplan._arrays import Bools, Ints
from kvplan.describe.views import Group

Position = TypeVar("Position", int, Ints)


def slots(group: Group) -> int:
    """Slots per block: a state is one slot."""
    return group.tokens_per_block or 1


def cycle(*groups: Group) -> int:
    """After how many positions it is the same workers' turn again."""
    return math.lcm(*(group.context.size * group.context.interleave_tokens for group in groups))


def period(*groups: Group) -> int:
    """After how many positions workers, blocks and slots repeat, rule A3."""
    return math.lcm(*(g.context.size * math.lcm(slots(g), g.context.interleave_tokens) for g in groups))


def holds(group: Group, position: Ints) -> Bools:
    """Whether a worker holds each position."""
    held: Bools = position // group.context.interleave_tokens % group.context.size == group.context.rank
    return held


def local_index(group: Group, position: Position) -> Position:
    """How many positions before a held one the worker holds, rule A1; of one position, or of each in an array."""
    run = group.context.interleave_tokens
    return position // cycle(group) * run + position % run if group.context.size > 1 else position


def position_of(group: Group, local: Position) -> Position:
    """The position of local index ``local``."""
    run, context = group.context.interleave_tokens, group.context
    return (local // run * context.size + context.rank) * run + local % run


def before(group: Group, position: int) -> int:
    """How many positions below ``position`` the worker holds.

    >>> from kvplan import Context
    >>> [before(Group("attn", 16, Context(1, 2, 4)), position) for position in (4, 5, 8, 13)]
    [0, 1, 4, 5]
    """
    run, context = group.context.interleave_tokens, group.context
    turn, rest = divmod(position, cycle(group))
    return turn * run + min(max(rest - context.rank * run, 0), run)


def stand(groups: Sequence[Group], position: Ints) -> tuple[Ints, Ints]:
    """The block of the request and the slot of each position that all groups hold: two arrays (groups, positions)."""
    block, slot = np.empty((2, len(groups), position.size), np.int64)
    for i, group in enumerate(groups):
        np.divmod(local_index(group, position), slots(group), out=(block[i], slot[i]))
    return block, slot


def reach(group: Group, first: int, count: int) -> tuple[int, int]:
    """The positions that ``count`` blocks from block ``first`` on hold: from the first to past the last.

    >>> reach(Group("attn", 16), 3, 2)
    (48, 80)
    """
    if not count:
        return 0, 0
    return position_of(group, first * slots(group)), position_of(group, (first + count) * slots(group) - 1) + 1


def ends(starts: Ints | Sequence[int], every: int, low: int, high: int) -> tuple[int, int] | None:
    """The first and last position in ``[low, high)`` that equals one of ``starts``, ascending, modulo ``every``.

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
    """The positions in ``[low, high)`` that equal one of ``starts``, ascending, modulo ``every``.

    >>> repeated(np.array([0, 3]), 4, 3, 9).tolist()
    [3, 4, 7, 8]
    """
    position: Ints = np.add.outer(np.arange(low - low % every, high, every), starts).reshape(-1)
    return position[(position >= low) & (position < high)]
