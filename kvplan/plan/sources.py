"""Sources: an index of what every source holds, made once and used for all destinations of a mesh.

The ranks of an engine usually list the same tensors with the same geometries, and differ in the parts they hold. The
index therefore groups ranks of equal lists, and layers of equal geometry: all tensors that the sources hold in the same
way share one :class:`Holding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import attrs
import numpy as np

from kvplan._arrays import Bools, Ints, distinct, heads
from kvplan.describe.views import Geometry, Group
from kvplan.describe.worker import Worker
from kvplan.plan.align import holds

Value = TypeVar("Value")
Intervals = tuple[tuple[int, int], ...]


@attrs.frozen(eq=False)
class Part:
    """Coordinates of one axis that the same views hold.

    ``intervals`` is (n, 2) int64, ascending; ``held`` is (views,) bool.
    """

    intervals: Ints
    held: Bools

    @cached_property
    def size(self) -> int:
        """The number of coordinates."""
        return int((self.intervals[:, 1] - self.intervals[:, 0]).sum())

    @cached_property
    def span(self) -> tuple[int, int]:
        """The start of the first interval and the stop of the last one."""
        return int(self.intervals[0, 0]), int(self.intervals[-1, 1])

    @cached_property
    def shape(self) -> bytes:
        """The intervals relative to the start of the first one, as bytes: a key for parts of equal shape."""
        return (self.intervals - self.span[0]).tobytes()

    def __str__(self) -> str:
        first = heads(self.intervals[1:, 0] == self.intervals[:-1, 1])
        last = np.append(first[1:], len(self.intervals)) - 1
        ends = zip(self.intervals[first, 0], self.intervals[last, 1], strict=True)
        return " ".join(f"[{start}, {stop})" for start, stop in ends)


@attrs.frozen(eq=False)
class Cover:
    """The coordinates of one axis that each view holds.

    Views with equal coordinates share a set of intervals: ``intervals`` is (n, 2) int64 and lists all sets, ``of`` (n,)
    has the set of each interval, ``which`` (views,) the set of each view.
    """

    intervals: Ints
    of: Ints
    which: Ints
    _known: dict[Intervals, tuple[Part, ...]] = attrs.field(factory=dict, init=False)

    def parts(self, covered: Intervals) -> tuple[Part, ...]:
        """The parts of a destination's intervals: cut wherever a view begins or ends, then grouped by their holders."""
        if covered not in self._known:
            ours = np.array(covered, np.int64)
            # `bounds` are all ends of intervals; `held` is (pieces between bounds that the destination has, views).
            bounds = distinct(np.concatenate([ours, self.intervals]))
            wanted = _inside(bounds, ours, np.zeros(len(ours), np.int64))[0]
            held = _inside(bounds, self.intervals, self.of)[:, wanted][self.which].T
            self._known[covered] = _by_holders(np.stack([bounds[:-1], bounds[1:]], axis=1)[wanted], held)
        return self._known[covered]


def _inside(bounds: Ints, intervals: Ints, of: Ints) -> Bools:
    """Whether each piece between neighbouring bounds lies in each set of intervals, (sets, bounds - 1) bool.

    The intervals of one set must not touch each other.
    """
    steps = np.zeros((int(of.max(initial=-1)) + 1, bounds.size), np.int8)
    # +1 where an interval begins, -1 where it ends; the running sum is 1 inside an interval.
    begins, ends = np.searchsorted(bounds, intervals).T
    steps[of, begins] = 1
    steps[of, ends] = -1
    inside: Bools = np.cumsum(steps, axis=1, dtype=np.int8)[:, :-1] > 0
    return inside


def _by_holders(intervals: Ints, held: Bools) -> tuple[Part, ...]:
    """One part for each distinct row of ``held``, (intervals, views)."""
    by_holders: dict[bytes, list[int]] = {}
    for i, holders in enumerate(held):
        by_holders.setdefault(holders.tobytes(), []).append(i)
    return tuple(Part(intervals=intervals[which], held=held[which[0]]) for which in by_holders.values())


@attrs.frozen(eq=False)
class Holding:
    """All views of one tensor among the sources; equal for every tensor that the sources hold in the same way.

    ``sources`` has, for each view, the index of its worker and its geometry. ``column`` has the index of that view in
    :attr:`Sources.views` of the tensor.
    """

    sources: tuple[tuple[int, Geometry], ...]
    column: tuple[int, ...]
    _covers: dict[str, Cover] = attrs.field(factory=dict, init=False)
    _positions: dict[Group, tuple[Part, ...]] = attrs.field(factory=dict, init=False)

    @cached_property
    def worker(self) -> Ints:
        """The index of each view's worker, (views,)."""
        return np.array([i for i, _ in self.sources], np.int64)

    @cached_property
    def groups(self) -> tuple[tuple[Group, ...], Ints]:
        """The distinct groups of the views, and the index of each view's group, (views,)."""
        return _different(self.sources, lambda geometry: geometry.group)

    @cached_property
    def kinds(self) -> tuple[tuple[int, Geometry], ...]:
        """One view and its worker for each distinct dtype, global sizes and kind of group: what rule M3 checks."""
        found: dict[Any, tuple[int, Geometry]] = {}
        for i, geometry in self.sources:
            key = (geometry.dtype, geometry.group.tokens_per_block is None, *geometry.sizes.items())
            found.setdefault(key, (i, geometry))
        return tuple(found.values())

    def cover(self, axis: str) -> Cover:
        """The coordinates of an axis that each view holds."""
        if axis not in self._covers:
            sets, which = _different(self.sources, lambda geometry: geometry.segments[axis].covered)
            intervals = np.array([ends for each in sets for ends in each], np.int64).reshape(-1, 2)
            of = np.repeat(np.arange(len(sets)), [len(each) for each in sets])
            self._covers[axis] = Cover(intervals, of, which)
        return self._covers[axis]

    def positions(self, group: Group, every: int) -> tuple[Part, ...]:
        """The parts of the positions ``[0, every)`` that a destination's group holds, by the views that hold them."""
        if group not in self._positions:
            position = np.arange(every, dtype=np.int64)
            mine = position[holds(group, position)]
            groups, which = self.groups
            held = np.array([holds(other, mine) for other in groups], bool).reshape(-1, mine.size)[which].T
            self._positions[group] = _by_holders(np.stack([mine, mine + 1], axis=1), held)
        return self._positions[group]


def _different(
    sources: Iterable[tuple[int, Geometry]], value: Callable[[Geometry], Value]
) -> tuple[tuple[Value, ...], Ints]:
    """The distinct values of the views' geometries, and the index of each view's value, (views,)."""
    known: dict[Value, int] = {}
    which = np.array([known.setdefault(value(geometry), len(known)) for _, geometry in sources], np.int64)
    return tuple(known), which


class Sources:
    """The workers that can send, and the holding of each of their tensors.

    ``views`` has the view indices of a tensor by its name: those of the first ranks with equal lists, then of the next.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers: tuple[Worker, ...] = tuple(workers)
        self.views: dict[str, tuple[int, ...]] = {}
        cohorts: dict[Any, list[int]] = {}  # workers by the list of tensors and geometries that they share
        for i, worker in enumerate(self.workers):
            cohorts.setdefault((tuple([view.name for view in worker.views]), worker.geometry_of), []).append(i)
        kinds: dict[str, tuple[Any, ...]] = {}
        for members in cohorts.values():
            worker = self.workers[members[0]]
            for name, views in worker.tensors.items():
                before = self.views.get(name, ())
                equal = (members[0], len(before), tuple([worker.geometry_of[view] for view in views]))
                self.views[name] = before + views
                kinds[name] = (*kinds.get(name, ()), equal)
        by_first = {members[0]: members for members in cohorts.values()}
        made = {kind: self._holding(kind, by_first) for kind in dict.fromkeys([(), *kinds.values()])}
        self._nobody = made[()]
        self._holdings = {name: made[kind] for name, kind in kinds.items()}

    def holding(self, name: str) -> Holding:
        """The holding of a tensor: one object for all tensors that the sources hold in the same way."""
        return self._holdings.get(name, self._nobody)

    def _holding(
        self, kind: Iterable[tuple[int, int, tuple[int, ...]]], cohorts: Mapping[int, Sequence[int]]
    ) -> Holding:
        found = [
            (i, column + n, self.workers[i].geometries[geometry])
            for first, column, geometries in kind
            for i in cohorts[first]
            for n, geometry in enumerate(geometries)
        ]
        found.sort(key=lambda view: view[:2])
        return Holding(tuple((i, geometry) for i, _, geometry in found), tuple(column for _, column, _ in found))
