"""Align (A): the block and the slot of every position, on each side.

- plan.A1: A worker counts the positions that its context gives it: the n-th of them has local index
  n.
- plan.A2: Local index ``n`` is in slot ``n % slots`` of the request's block ``n // slots``. A state
  is a block of one slot. Where a slot has one value of several tokens, positions count these
  values.
- plan.A3: Blocks and slots of both sides repeat after a *period* of positions: the least common
  multiple of both sides' own periods. Any two block sizes have one; neither has to divide the
  other.

>>> destination, source = Group("attn", 16), Group("attn", 48)
>>> period(destination, source)
48
>>> block, slot = blocks_and_slots((destination, source), np.array([0, 16, 47, 48]))
>>> block.tolist(), slot.tolist()
([[0, 1, 2, 3], [0, 0, 0, 1]], [[0, 0, 15, 0], [0, 16, 47, 0]])
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeVar

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan.describe.blocks import Range
from kvplan.describe.views import Group
from kvplan.errors import KVPlanError

Position = TypeVar("Position", int, Ints)


def in_slots(group: Group, tokens: Range) -> Range:
    """Return the positions whose values a range of tokens needs, where a slot has several tokens.

    The last value may be of more tokens than the range has. Raises ``TOKENS`` for a range that
    begins inside a slot: its value would replace that of the tokens before.

    >>> in_slots(Group("scales", 64, tokens_per_slot=16), (32, 100))
    (2, 7)
    """
    size = group.tokens_per_slot
    start, stop = tokens
    if start % size and start < stop:
        raise KVPlanError(
            "TOKENS",
            f"bind tokens of group {group.name!r}",
            expected=f"a start that is a multiple of {size}, as a slot has one value of so many",
            got=f"[{start}, {stop})",
            hint="move the tokens from there on too: their values go together",
            tokens=tokens,
            tokens_per_slot=size,
        )
    return -(-start // size), -(-stop // size)


def in_tokens(group: Group, positions: Range) -> Range:
    """Return the range of tokens of some positions; the inverse of :func:`in_slots`."""
    start, stop = positions
    return start * group.tokens_per_slot, stop * group.tokens_per_slot


def of_rank(group: Group, rank: int) -> Group:
    """Return the group as another rank of its context has it."""
    if group.context.rank == rank:
        return group
    return attrs.evolve(group, context=attrs.evolve(group.context, rank=rank))


def cycle(*groups: Group) -> int:
    """Return the positions after which the same ranks of all groups hold positions again."""
    return math.lcm(*(group.context.size * group.interleave_slots for group in groups))


def period(*groups: Group) -> int:
    """Return the positions after which ranks, block boundaries and slots repeat, rule plan.A3."""
    slots_of_turns = (math.lcm(group.num_slots, group.interleave_slots) for group in groups)
    sizes = (group.context.size for group in groups)
    return math.lcm(*(size * turn for size, turn in zip(sizes, slots_of_turns, strict=True)))


def held_positions(group: Group, num_positions: int) -> tuple[Range, ...]:
    """Return the positions in ``[0, num_positions)`` that the group's worker holds.

    They are intervals, ascending. ``num_positions`` is a multiple of the group's cycle.

    >>> from kvplan import Context
    >>> held_positions(Group("attn", 16, Context(1, 2, 4)), 16)
    ((4, 8), (12, 16))
    >>> held_positions(Group("attn", 16), 16)
    ((0, 16),)
    """
    if group.context.size == 1:
        return ((0, num_positions),)
    interleave = group.interleave_slots
    starts = range(group.context.rank * interleave, num_positions, cycle(group))
    return tuple([(start, start + interleave) for start in starts])


def num_turns(group: Group, num_positions: int) -> int:
    """Return how many intervals of :func:`held_positions` there are.

    >>> from kvplan import Context
    >>> num_turns(Group("attn", 16, Context(1, 2, 4)), 16), num_turns(Group("attn", 16), 16)
    (2, 1)
    """
    return 1 if group.context.size == 1 else num_positions // cycle(group)


def local_index(group: Group, position: Position) -> Position:
    """Return the local index, rule plan.A1, of one position or more that the worker holds."""
    if group.context.size == 1:
        return position
    interleave = group.interleave_slots
    return position // cycle(group) * interleave + position % interleave


def position_of(group: Group, local: Position) -> Position:
    """Return the position that has local index ``local``; the inverse of :func:`local_index`."""
    context = group.context
    interleave = group.interleave_slots
    turn = local // interleave * context.size + context.rank
    return turn * interleave + local % interleave


def before(group: Group, position: int) -> int:
    """Return the number of positions below ``position`` that the worker holds.

    >>> from kvplan import Context
    >>> [before(Group("attn", 16, Context(1, 2, 4)), position) for position in (4, 5, 8, 13)]
    [0, 1, 4, 5]
    """
    interleave = group.interleave_slots
    # Whole cycles count whole turns; the last one what is before `position` and in the worker's
    # turn.
    num_cycles, offset = divmod(position, cycle(group))
    num_in_cycle = min(max(offset - group.context.rank * interleave, 0), interleave)
    return num_cycles * interleave + num_in_cycle


def blocks_and_slots(groups: Sequence[Group], positions: Ints) -> tuple[Ints, Ints]:
    """Return the block ordinal and the slot of each position, in each group.

    Both are (groups, positions) int64. Every group must hold every position.
    """
    blocks, slots_of = np.empty((2, len(groups), positions.size), np.int64)
    for i, group in enumerate(groups):
        np.divmod(local_index(group, positions), group.num_slots, out=(blocks[i], slots_of[i]))
    return blocks, slots_of


def reach(group: Group, first_block: int, num_blocks: int) -> Range:
    """Return the positions ``[start, stop)`` in blocks from ordinal ``first_block`` on.

    >>> reach(Group("attn", 16), 3, 2)
    (48, 80)
    """
    if not num_blocks:
        return 0, 0
    first_slot = first_block * group.num_slots
    last_slot = (first_block + num_blocks) * group.num_slots - 1
    return position_of(group, first_slot), position_of(group, last_slot) + 1


def count_below(starts: Ints | Sequence[int], period: int, position: int) -> int:
    """Return how many positions below ``position`` are in ``starts``, ascending, modulo ``period``.

    >>> count_below([0, 3], 4, 9)
    5
    """
    num_periods, offset = divmod(position, period)
    return num_periods * len(starts) + bisect_left(starts, offset)


def first_and_last(
    starts: Ints | Sequence[int], period: int, low: int, high: int
) -> tuple[int, int] | None:
    """Return the first and the last position in ``[low, high)`` that is in ``starts``.

    ``starts`` repeat after ``period`` positions. Return ``None`` if there is none.

    >>> first_and_last([0, 3], 4, 1, 9), first_and_last([0, 3], 4, 1, 3)
    ((3, 8), None)
    """
    # Starts are numbered over all periods: a number says which period, and which of `starts`.
    first_number = count_below(starts, period, low)
    last_number = count_below(starts, period, high) - 1
    if first_number > last_number:
        return None
    first_period, first_start = divmod(first_number, len(starts))
    last_period, last_start = divmod(last_number, len(starts))
    first = first_period * period + int(starts[first_start])
    return first, last_period * period + int(starts[last_start])


def positions_between(starts: Ints, period: int, low: int, high: int) -> Ints:
    """Return all positions in ``[low, high)`` that are in ``starts`` modulo ``period``, ascending.

    >>> positions_between(np.array([0, 3]), 4, 3, 9).tolist()
    [3, 4, 7, 8]
    """
    # Every start of every period that reaches into the range, then those inside it.
    first_of_period = np.arange(low - low % period, high, period)
    positions: Ints = np.add.outer(first_of_period, starts).reshape(-1)
    return positions[(positions >= low) & (positions < high)]
