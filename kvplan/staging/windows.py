"""Windows: how many positions at a time go through a staging region, and which of a request do.

- S6: a request is moved in windows of ``W`` positions, the kth from ``k * W`` on. Few blocks are cut where ``W`` is a
  multiple of the period after which the blocks and contexts of all groups repeat; if none such fits, of the longest
  period of a group that does; if none does, of what divides all periods; or else it is any number.
- S7: pools have room for two windows, so that one can be read while the other is put in order: for each twice the
  blocks that a window touches at most, and twice one state.
- S8: ``W`` is the most that fits.

>>> fit([(Group("attn", 16), 4096), (Group("state"), 1000)], 1 << 20)
Fit(num_positions=2032, places=((0, 127), (1040384, 1)))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final

import attrs
import numpy as np

from kvplan.describe.blocks import Blocks, Range
from kvplan.describe.views import Group
from kvplan.errors import KVPlanError
from kvplan.plan.align import cycle, period, position_of, slots

Demand = tuple[Group, int]
"""A group, and the bytes that one block of a pool has."""

Spans = Mapping[str, Range]
"""A range of positions, or of states, by group of the local worker."""

Wants = Mapping[tuple[Group, Group], Range]
"""The positions, or states, of a request that a destination's group wants of a source's."""

Tables = Mapping[str, Blocks]
"""Block tables by group."""

ALIGNMENT: Final = 64
"""Pools begin at multiples of so many bytes, so that copies can be of wide words."""

MAX_WINDOW: Final = 1 << 30
"""No more positions at a time than this, so that ids of blocks fit."""


@attrs.frozen
class Fit:
    """How many positions a window has, and for each pool its offset in the region and the blocks of each half."""

    num_positions: int
    places: tuple[tuple[int, int], ...]


def fit(demands: Sequence[Demand], size_bytes: int) -> Fit:
    """The longest window for which the pools of ``demands`` go into a region. Raises ``MEMORY`` if none does."""
    periods = {period(group) for group, _ in demands if group.tokens_per_block is not None} or {MAX_WINDOW}
    for grain in sorted({math.lcm(*periods), *periods, math.gcd(*periods), 1}, reverse=True):
        low, high = 0, MAX_WINDOW // grain
        while low < high:
            middle = (low + high + 1) // 2
            if _laid(demands, middle * grain, grain)[1] <= size_bytes:
                low = middle
            else:
                high = middle - 1
        if low:
            return Fit(low * grain, _laid(demands, low * grain, grain)[0])
    needed = _laid(demands, 1, 1)[1]
    raise KVPlanError(
        "MEMORY",
        "stage a request",
        expected=f"a staging region of at least {needed} bytes, two blocks of each group",
        got=f"{size_bytes}",
        needed_bytes=needed,
        size_bytes=size_bytes,
    )


def blocks(group: Group, window: int, grain: int) -> int:
    """The most blocks of a group that one window touches; windows begin at multiples of ``grain``.

    >>> [blocks(Group("attn", 16), *window) for window in ((64, 64), (64, 8), (64, 1), (8, 8))]
    [4, 5, 5, 1]
    """
    if group.tokens_per_block is None:
        return 1
    turn, run = cycle(group), group.context.interleave_tokens
    if grain % turn:
        held, step = window // turn * run + min(window % turn, run), 1
    else:
        held, step = window // group.context.size, math.gcd(grain // group.context.size, slots(group))
    return (slots(group) - step + held - 1) // slots(group) + 1


def _laid(demands: Sequence[Demand], window: int, grain: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """The places of the pools, and where the last one ends."""
    places, end = [], 0
    for group, block_bytes in demands:
        offset, half = -(-end // ALIGNMENT) * ALIGNMENT, blocks(group, window, grain)
        places.append((offset, half))
        end = offset + 2 * half * block_bytes
    return tuple(places), end


def windows(wants: Iterable[Wants], tables: Tables, size: int, near: int) -> Iterator[Spans]:
    """The ranges of a request by local group, for each window of so many positions that has any: rule S13 of staging.

    ``wants`` are those of all mirrors, ``tables`` the destination's; ``near`` says whether destination, 0, or source,
    1, is local. States come one of each group with each window; those that are left have windows of their own.

    >>> ours, theirs = Group("window", 16), Group("attn", 32)
    >>> list(windows([{(ours, theirs): (40, 100)}], {"window": Blocks(range(8))}, 64, near=1))
    [{'attn': (40, 64)}, {'attn': (64, 100)}]
    """
    positions: dict[int, dict[str, Range]] = {}
    states: dict[str, set[int]] = {}
    idle, nothing = dict[str, Range](), dict[str, Range]()
    for groups, (low, high) in (item for want in wants for item in want.items()):
        key, group, table = groups[near].name, groups[0], tables[groups[0].name]
        idle[key] = 0, 0
        if group.tokens_per_block is None:
            kept = table.ordinals[(low <= table.ordinals) & (table.ordinals < high)]
            states.setdefault(key, set()).update(kept.tolist())
            continue
        for turn in _turns(group, table, low, high, size):
            start, stop = max(low, turn * size), min(high, (turn + 1) * size)
            first, last = positions.setdefault(turn, {}).get(key, (start, stop))
            positions[turn][key] = min(first, start), max(last, stop)
    in_order = [positions[turn] for turn in sorted(positions)]
    each = [[(key, (at, at + 1)) for at in sorted(kept)] for key, kept in states.items()]
    at_once = [dict(filter(None, some)) for some in zip_longest(*each)]
    for some, others in zip_longest(in_order, at_once, fillvalue=nothing):
        yield {**idle, **some, **others}


def _turns(group: Group, table: Blocks, low: int, high: int, size: int) -> Iterable[int]:
    """The windows in which a destination has blocks for some of ``[low, high)``."""
    if low >= high:
        return ()
    if table.scattered is None:
        return range(low // size, (high - 1) // size + 1)
    start = position_of(group, table.scattered * slots(group))
    last = position_of(group, (table.scattered + 1) * slots(group) - 1)
    first, last = np.maximum(start, low) // size, np.minimum(last, high - 1) // size
    return {turn for begin, end in zip(first.tolist(), last.tolist(), strict=True) for turn in range(begin, end + 1)}
