"""The lowest maximum: how evenly bytes can be divided among the sources that hold them, exactly, by flows."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from fractions import Fraction

from kvplan import View, Worker

Holders = frozenset[int]
"""Sources, by index, that all hold the same bytes."""

Needs = dict[tuple[int, bool, Holders], Fraction]
Flow = dict[tuple[Holders, int], Fraction]


def needs(destinations: Sequence[Worker], sources: Sequence[Worker], tokens: int) -> Needs:
    """The bytes of a request by the destination's index, whether they are states, and the sources that hold them.

    Workers without context parallelism only.
    """
    found: Needs = defaultdict(Fraction)
    for index, destination in enumerate(destinations):
        paged = {group.name: group.tokens_per_block is not None for group in destination.groups}
        for view in destination.views:
            times = tokens if paged[view.group] else 1
            held = [(i, _box(other)) for i, one in enumerate(sources) for other in one.views if other.name == view.name]
            for cell in _cells(_box(view), [box for _, box in held]):
                holders = frozenset(i for i, box in held if all(_inside(cell[axis], box[axis]) for axis in cell))
                size = math.prod(stop - start for start, stop in cell.values()) * view.itemsize
                found[index, not paged[view.group], holders] += size * times
    return found


Box = dict[str, tuple[int, int]]


def _box(view: View) -> Box:
    """The coordinates that a view holds, by axis, without tokens."""
    return {axis.name: (axis.start, axis.stop) for axis in view.axes if axis.name != "token"}


def _inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _cells(box: Box, others: Sequence[Box]) -> list[Box]:
    """A box, cut on each axis wherever one of the others begins or ends."""
    cuts = {
        axis: [start, *sorted({cut for other in others for cut in other[axis] if start < cut < stop}), stop]
        for axis, (start, stop) in box.items()
    }
    return [
        dict(zip(cuts, cell, strict=True))
        for cell in itertools.product(*(itertools.pairwise(c) for c in cuts.values()))
    ]


def lowest(bytes_of: Mapping[Holders, int | Fraction]) -> Fraction:
    """The least that the busiest source serves, where bytes can be divided in any way among their holders.

    A limit is too low only if some sources together hold more, that nobody else holds, than the limit lets them serve.
    Then the limit rises to their mean, until there are no such sources.

    >>> lowest({frozenset({0, 1}): 4, frozenset({1}): 3, frozenset({2}): 1})
    Fraction(7, 2)
    """
    limit = max((Fraction(number) / len(holders) for holders, number in bytes_of.items()), default=Fraction(0))
    while some := _overfull(bytes_of, limit):
        limit = sum((Fraction(n) for holders, n in bytes_of.items() if holders <= some), Fraction(0)) / len(some)
    return limit


def _overfull(bytes_of: Mapping[Holders, int | Fraction], limit: Fraction) -> set[int]:
    """Sources that cannot serve within the limit what they alone hold; none where a flow serves everything."""
    flow: Flow = defaultdict(Fraction)
    load: dict[int, Fraction] = defaultdict(Fraction)
    for holders, number in bytes_of.items():
        left = Fraction(number)
        while left:
            path = _path(holders, flow, load, limit)
            if isinstance(path, set):
                return path
            moved = min(
                left, limit - load[path[-1][1]], *(flow[part, path[i][1]] for i, (part, _) in enumerate(path[1:]))
            )
            for i, (part, source) in enumerate(path):
                flow[part, source] += moved
                if i:
                    flow[part, path[i - 1][1]] -= moved
            load[path[-1][1]] += moved
            left -= moved
    return set()


def _path(
    part: Holders, flow: Flow, load: Mapping[int, Fraction], limit: Fraction
) -> list[tuple[Holders, int]] | set[int]:
    """A path to a source below its limit, on which sources pass other parts on, or all sources that were reached."""
    before: dict[int, tuple[Holders, int | None]] = dict.fromkeys(sorted(part), (part, None))
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
