"""Chunks: how many positions fit into a staging region at a time, and which of a request's go together.

- S6: a chunk covers a window of ``W`` positions; the kth begins at ``k * W``. ``W`` is a multiple of the period after
  which the blocks and contexts of all groups repeat, so that few blocks are cut. If no such window fits, ``W`` is a
  multiple of the longest period of a single group that fits, then of what divides all periods, then any number.
- S7: every staging buffer has room for two chunks, so that one is filled while the other is emptied: for each group
  twice the most blocks that a window touches, and twice one state.
- S8: ``W`` is the greatest that fits.

>>> fit([(Group("attn", 16), 4096), (Group("state"), 1000)], 1 << 20)
Fit(num_positions=2032, places=((0, 127), (1040384, 1)))
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final

import attrs
import numpy as np

from kvplan.describe.blocks import Blocks, Range
from kvplan.describe.views import Group
from kvplan.errors import KVPlanError
from kvplan.plan.align import cycle, period, position_of, slots
from kvplan.staging.copies import BothGroups

Demand = tuple[Group, int]
"""A group, and the bytes of one block of a pool."""

GroupRanges = Mapping[str, Range]
"""A range of positions, or of states, by name of the local group."""

WantedRanges = Mapping[BothGroups, Range]
"""The positions, or states, of a request that a destination's group wants from a source's."""

BlockTables = Mapping[str, Blocks]
"""Block tables by group name."""

ALIGNMENT: Final = 64
"""Pools begin at multiples of this many bytes, so that copies can use wide words."""

MAX_WINDOW: Final = 1 << 30
"""The most positions of a chunk, so that block ids fit."""


@attrs.frozen
class Fit:
    """The positions of a window and, for each pool, its offset in the region and the blocks of one buffer slot."""

    num_positions: int
    places: tuple[tuple[int, int], ...]


def fit(demands: Sequence[Demand], size_bytes: int) -> Fit:
    """The longest window for which the pools of ``demands`` fit into a region. Raises ``MEMORY`` if none does."""
    periods = {period(group) for group, _ in demands if group.tokens_per_block is not None} or {MAX_WINDOW}
    for grain in sorted({math.lcm(*periods), *periods, math.gcd(*periods), 1}, reverse=True):
        windows = range(grain, MAX_WINDOW + 1, grain)
        fitting = bisect_right(windows, size_bytes, key=lambda window: _laid_out(demands, window, grain)[1])
        if fitting:
            return Fit(fitting * grain, _laid_out(demands, fitting * grain, grain)[0])
    needed = _laid_out(demands, 1, 1)[1]
    expected, got = f"a staging region of at least {needed} bytes, two blocks of each group", f"{size_bytes}"
    raise KVPlanError(
        "MEMORY", "stage a request", expected=expected, got=got, needed_bytes=needed, size_bytes=size_bytes
    )


def blocks_touched(group: Group, window: int, grain: int) -> int:
    """The most blocks of a group that one window touches; windows begin at multiples of ``grain``.

    >>> [blocks_touched(Group("attn", 16), *window) for window in ((64, 64), (64, 8), (64, 1), (8, 8))]
    [4, 5, 5, 1]
    """
    if group.tokens_per_block is None:
        return 1
    every, run = cycle(group), group.context.interleave_tokens
    if grain % every:
        held, step = window // every * run + min(window % every, run), 1
    else:
        held, step = window // group.context.size, math.gcd(grain // group.context.size, slots(group))
    # the worker holds at most `held` positions of a window, which begins at most `slots - step` slots into a block
    return (slots(group) - step + held - 1) // slots(group) + 1


def _laid_out(demands: Sequence[Demand], window: int, grain: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """The places of the pools, and where the last one ends."""
    places, end = [], 0
    touched = {group: blocks_touched(group, window, grain) for group in {group for group, _ in demands}}
    for group, block_bytes in demands:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        places.append((offset, touched[group]))
        end = offset + 2 * touched[group] * block_bytes
    return tuple(places), end


def chunk_ranges(
    wanted: Iterable[WantedRanges], tables: BlockTables, window: int, local_side: int
) -> Iterator[GroupRanges]:
    """The ranges of each chunk of a request, by local group: rule S13 of :mod:`kvplan.staging.plan`.

    ``wanted`` has the ranges of each peer, ``tables`` the destination's blocks. ``local_side`` is 0 where the
    destination is local, 1 where the source is.

    >>> ours, theirs = Group("window", 16), Group("attn", 32)
    >>> list(chunk_ranges([{(ours, theirs): (40, 100)}], {"window": Blocks(range(8))}, 64, local_side=1))
    [{'attn': (40, 64)}, {'attn': (64, 100)}]
    """
    positions: dict[int, dict[str, Range]] = {}
    states: dict[str, set[int]] = {}
    empty, nothing = dict[str, Range](), dict[str, Range]()
    for groups, (low, high) in (item for ranges in wanted for item in ranges.items()):
        key, group, table = groups[local_side].name, groups[0], tables[groups[0].name]
        empty[key] = 0, 0
        if group.tokens_per_block is None:
            ordinals = table.ordinals[(low <= table.ordinals) & (table.ordinals < high)]
            states.setdefault(key, set()).update(ordinals.tolist())
            continue
        for number in _windows(group, table, low, high, window):
            start, stop = max(low, number * window), min(high, (number + 1) * window)
            first, last = positions.setdefault(number, {}).get(key, (start, stop))
            positions[number][key] = min(first, start), max(last, stop)
    with_tokens = [positions[number] for number in sorted(positions)]
    each = [[(key, (at, at + 1)) for at in sorted(found)] for key, found in states.items()]
    with_states = [dict(filter(None, some)) for some in zip_longest(*each)]
    for some, others in zip_longest(with_tokens, with_states, fillvalue=nothing):
        yield {**empty, **some, **others}


def _windows(group: Group, table: Blocks, low: int, high: int, window: int) -> Iterable[int]:
    """The numbers of the windows in which a destination has blocks for some of ``[low, high)``."""
    if low >= high:
        return ()
    if table.scattered is None:
        return range(low // window, (high - 1) // window + 1)
    # for each block the positions of its first and last slot, then the windows that these are in
    start = position_of(group, table.scattered * slots(group))
    last = position_of(group, (table.scattered + 1) * slots(group) - 1)
    begin, end = np.maximum(start, low) // window, np.minimum(last, high - 1) // window
    return {number for one, other in zip(begin.tolist(), end.tolist(), strict=True) for number in range(one, other + 1)}
