"""Cells (C): which source serves which part of a destination.

- C1: along each axis, coordinates that the same source views hold form one *part*. For the token axis these are
  the position classes that the contexts make; block sizes play no role in who holds what.
- C2: a cell is a product of parts. What no source holds is one error that lists every missing interval.
- C3: fewest peers first. Sources that alone hold some cell are needed anyway; to them are added, one by one,
  the source that holds the most bytes still without one.
- C4: a cell goes to the needed holder with the fewest bytes so far. Ties, here and in C3, are broken by turns: the
  destination's rank says whose turn it is, so every worker comes to the same answer alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.align import cycle_of, holds
from kvplan.axes import MAX_SEGMENTS, Ints, Segments, heads
from kvplan.errors import KVPlanError
from kvplan.match import Match
from kvplan.views import TOKEN, Group
from kvplan.workers import Worker

Bools = npt.NDArray[np.bool_]


@attrs.frozen(eq=False)
class Part:
    """Intervals of one axis, (n, 2), and which source views hold all of them."""

    intervals: Ints
    held: Bools

    @property
    def size(self) -> int:
        """How many coordinates."""
        return int((self.intervals[:, 1] - self.intervals[:, 0]).sum())


@attrs.frozen(eq=False)
class Cell:
    """What one source view sends to one destination view: a box, for every tensor of a match.

    ``box`` has the intervals of every axis but the token axis; ``turn`` tells for each position in
    a cycle of the contexts whether it belongs to this cell.
    """

    match: Match
    destination: int
    source: int
    box: Mapping[str, Ints]
    turn: Bools


def cells(matches: Sequence[Match], destination: Worker, sources: Sequence[Worker]) -> tuple[Cell, ...]:
    """Every cell of a destination, each with exactly one source. Raises ``COVER``."""
    products: list[tuple[Match, int, tuple[Part, ...]]] = []
    held: list[Bools] = []
    missing: list[str] = []
    for found in matches:
        for i in range(len(found.destination)):
            axes, cycle = parts(found, i), _cycle(found, i)
            for product in itertools.product(*axes.values()):
                holders = np.logical_and.reduce([part.held for part in product])
                products.append((found, i, product))
                by_worker = np.zeros(len(sources), bool)
                by_worker[[worker for worker, _ in itertools.compress(found.sources, holders)]] = True
                held.append(by_worker)
                if not holders.any():
                    missing.append(_describe(found, i, dict(zip(axes, product, strict=True)), cycle))
    if missing:
        raise KVPlanError(
            "COVER",
            f"plan for {destination.label}",
            expected="every part of its tensors to be held by a source",
            got="; ".join(missing),
            missing=tuple(missing),
            sources=tuple(worker.label for worker in sources),
        )
    if not products:
        return ()
    weight = [
        len(found.names) * found.destination[i].itemsize * math.prod(part.size for part in product)
        for found, i, product in products
    ]
    owners = choose(np.array(held), np.array(weight, float), destination.rank)
    return tuple(_join(products, owners))


def parts(found: Match, destination: int) -> dict[str, list[Part]]:
    """The parts of each axis of one destination view, the token axis last."""
    geometry = found.destination[destination]
    result = {
        axis: _grouped(*_held_intervals(geometry.segments[axis], [g.segments[axis] for _, g in found.sources]))
        for axis in geometry.sizes
        if axis != TOKEN
    }
    result[TOKEN] = _grouped(*_held_positions(geometry.group, [g.group for _, g in found.sources], _cycle(found, destination)))
    return result


def _cycle(found: Match, destination: int) -> int:
    """After how many positions it is the same workers' turn again, on all sides."""
    groups = {found.destination[destination].group, *(geometry.group for _, geometry in found.sources)}
    cycle = math.lcm(*map(cycle_of, groups))
    if cycle > MAX_SEGMENTS:
        raise KVPlanError(
            "RANGE",
            "align the contexts of two engines",
            expected=f"a common cycle of at most {MAX_SEGMENTS} positions",
            got=f"{cycle}",
            cycle=cycle,
        )
    return cycle


def choose(held: Bools, weight: npt.NDArray[np.float64], rank: int) -> Ints:
    """The source of each cell by rules C3 and C4. ``held`` is (cells, sources), ``weight`` the cells' bytes.

    >>> replicas = np.ones((1, 4), bool)
    >>> [int(choose(replicas, np.ones(1), rank)[0]) for rank in range(5)]
    [0, 1, 2, 3, 0]
    """
    needed = held[held.sum(1) == 1].any(0)
    while not (served := (held & needed).any(1)).all():
        gain = np.where(needed, 0.0, weight[~served] @ held[~served])
        needed[_by_turn(np.flatnonzero(gain == gain.max()), rank)] = True
    load = np.zeros(held.shape[1])
    owner = np.zeros(len(held), np.int64)
    for cell in np.lexsort((-weight, (held & needed).sum(1))).tolist():
        holders = np.flatnonzero(held[cell] & needed)
        owner[cell] = _by_turn(holders[load[holders] == load[holders].min()], rank)
        load[owner[cell]] += weight[cell]
    return owner


def _by_turn(candidates: Ints, rank: int) -> int:
    return int(candidates[rank % len(candidates)])


def _held_intervals(ours: Segments, theirs: Sequence[Segments]) -> tuple[Ints, Bools]:
    """Intervals of the destination's part of an axis, cut where any side begins or ends, and who holds them."""
    spans = [ours.covered, *(side.covered for side in theirs)]
    if all(span == spans[0] for span in spans):
        return np.array(ours.covered, np.int64), np.ones((len(ours.covered), len(theirs)), bool)
    bounds = np.array(sorted({bound for span in set(spans) for interval in span for bound in interval}), np.int64)
    low = bounds[:-1]
    inside = {}
    for span in set(spans):
        start, stop = np.array(span, np.int64).T
        i = np.searchsorted(start, low, "right") - 1
        inside[span] = (i >= 0) & (low < stop[i])
    wanted = inside[ours.covered]
    intervals = np.stack([low, bounds[1:]], axis=1)[wanted]
    return intervals, np.stack([inside[span][wanted] for span in spans[1:]], axis=1)


def _held_positions(ours: Group, theirs: Sequence[Group], cycle: int) -> tuple[Ints, Bools]:
    """The destination's positions in one cycle of all contexts, and who holds them."""
    position = np.arange(cycle, dtype=np.int64)
    inside = {group.context: holds(group, position) for group in (ours, *theirs)}
    wanted = inside[ours.context]
    held = np.stack([inside[group.context][wanted] for group in theirs], axis=1)
    return np.stack([position, position + 1], axis=1)[wanted], held


def _grouped(intervals: Ints, held: Bools) -> list[Part]:
    """The parts of rule C1: intervals with the same holders, together."""
    alike: dict[bytes, list[int]] = {}
    for i, pattern in enumerate(held):
        alike.setdefault(pattern.tobytes(), []).append(i)
    return [Part(intervals=intervals[which], held=held[which[0]]) for which in alike.values()]


def _join(products: Sequence[tuple[Match, int, tuple[Part, ...]]], owners: Ints) -> list[Cell]:
    """Cells of one view pair that differ in positions alone are one cell."""
    joined: dict[tuple[object, ...], tuple[Match, int, int, tuple[Part, ...], list[Part]]] = {}
    for (found, i, (*box, positions)), owner in zip(products, owners.tolist(), strict=True):
        holders = np.logical_and.reduce([part.held for part in (*box, positions)])
        source = next(j for j in np.flatnonzero(holders).tolist() if found.sources[j][0] == owner)
        key = (id(found), i, source, *map(id, box))
        joined.setdefault(key, (found, i, source, tuple(box), []))[-1].append(positions)
    result = []
    for found, i, source, parts_, turns in joined.values():
        names = [axis for axis in found.destination[i].sizes if axis != TOKEN]
        turn = np.zeros(_cycle(found, i), bool)
        for part in turns:
            turn[part.intervals[:, 0]] = True
        box_of = {axis: part.intervals for axis, part in zip(names, parts_, strict=True)}
        result.append(Cell(match=found, destination=i, source=source, box=box_of, turn=turn))
    return result


def _joined(intervals: Ints) -> list[tuple[int, int]]:
    first = heads(intervals[1:, 0] == intervals[:-1, 1])
    last = np.append(first[1:], len(intervals)) - 1
    return list(zip(intervals[first, 0].tolist(), intervals[last, 1].tolist(), strict=True))


def _describe(found: Match, destination: int, product: Mapping[str, Part], cycle: int) -> str:
    """What a cell is, without the axes that it has whole."""
    shown = []
    for axis, part in product.items():
        size = cycle if axis == TOKEN else found.destination[destination].sizes[axis]
        if part.size < size:
            intervals = " ".join(f"[{a}, {b})" for a, b in _joined(part.intervals))
            shown.append(f"positions {intervals} of every {size}" if axis == TOKEN else f"{axis} {intervals} of {size}")
    names = found.names[0] if len(found.names) == 1 else f"{found.names[0]} and {len(found.names) - 1} like it"
    return f"{names}: {', '.join(shown) or 'all of it'}"
