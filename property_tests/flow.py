"""The lowest maximum: how evenly lots can be divided among those that hold them, exactly, by flows."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from kvplan import Worker
from kvplan.describe.views import TOKEN
from kvplan.plan.cells import cells
from kvplan.plan.match import match
from kvplan.plan.sources import Sources

Holders = frozenset[int]
"""Sources, by index, that all hold something."""

Lots = dict[tuple[int, bool, Holders], Fraction]
Flow = dict[tuple[Holders, int], Fraction]


def lots(destinations: Sequence[Worker], sources: Sequence[Worker], tokens: int) -> Lots:
    """The bytes that each destination needs of a request, by its index, whether they are states, and who holds them."""
    found: Lots = defaultdict(Fraction)
    for index, destination in enumerate(destinations):
        for cell in cells(match(destination, Sources(sources))):
            ours = cell.match.destination[cell.destination]
            which = np.flatnonzero(np.logical_and.reduce([part.held for part in cell.parts.values()]))
            holders = frozenset(cell.match.holding.worker[which].tolist())
            number = len(cell.match.names) * math.prod(p.size for axis, p in cell.parts.items() if axis != TOKEN)
            states = ours.group.tokens_per_block is None
            times = Fraction(1) if states else Fraction(tokens * cell.parts[TOKEN].size, cell.every)
            found[index, states, holders] += number * ours.itemsize * times
    return found


def lowest(bytes_of: Mapping[Holders, int | Fraction]) -> Fraction:
    """The least that the busiest source can serve, where every lot may be divided in any way among its holders.

    A limit is too low only if some sources have more to serve alone than they can all together; then the limit is
    raised to their share, until none is.

    >>> lowest({frozenset({0, 1}): 4, frozenset({1}): 3, frozenset({2}): 1})
    Fraction(7, 2)
    """
    limit = max((Fraction(number) / len(holders) for holders, number in bytes_of.items()), default=Fraction(0))
    while some := _overfull(bytes_of, limit):
        limit = sum((Fraction(n) for holders, n in bytes_of.items() if holders <= some), Fraction(0)) / len(some)
    return limit


def _overfull(bytes_of: Mapping[Holders, int | Fraction], limit: Fraction) -> set[int]:
    """Sources that cannot serve within the limit what only they hold; none, where a flow serves all."""
    flow: Flow = defaultdict(Fraction)
    load: dict[int, Fraction] = defaultdict(Fraction)
    for holders, number in bytes_of.items():
        left = Fraction(number)
        while left:
            path = _path(holders, flow, load, limit)
            if isinstance(path, set):
                return path
            moved = min(
                left, limit - load[path[-1][1]], *(flow[lot, path[i][1]] for i, (lot, _) in enumerate(path[1:]))
            )
            for i, (lot, source) in enumerate(path):
                flow[lot, source] += moved
                if i:
                    flow[lot, path[i - 1][1]] -= moved
            load[path[-1][1]] += moved
            left -= moved
    return set()


def _path(
    lot: Holders, flow: Flow, load: Mapping[int, Fraction], limit: Fraction
) -> list[tuple[Holders, int]] | set[int]:
    """How a lot comes to a source with room: who takes it, and which lot that one hands on to whom; or all reached."""
    before: dict[int, tuple[Holders, int | None]] = dict.fromkeys(sorted(lot), (lot, None))
    queue = deque(before)
    while queue:
        source = queue.popleft()
        if load[source] < limit:
            path = []
            at: int | None = source
            while at is not None:
                path.append((before[at][0], at))
                at = before[at][1]
            return path[::-1]
        for (other, holder), number in flow.items():
            if holder == source and number:
                for onward in sorted(other - before.keys()):
                    before[onward] = other, source
                    queue.append(onward)
    return set(before)
