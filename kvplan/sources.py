"""Sources: what those that can send hold, looked through once for all destinations of a mesh.

Ranks of an engine list the same tensors in the same way and differ in which part they hold. So tensors are told apart
once for all such ranks, and a tensor that all of them hold alike in every layer is one *holding*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import attrs
import numpy as np

from kvplan.axes import Bools, Ints
from kvplan.views import Geometry, Group
from kvplan.workers import Worker

Value = TypeVar("Value")


@attrs.frozen(eq=False)
class Cover:
    """The coordinates of one axis that each of some views holds: the different sets of intervals, and whose each is.

    ``start`` and ``stop`` are the intervals of all sets, ``first`` where each set begins, ``which`` the set of a view.
    """

    start: Ints
    stop: Ints
    first: Ints
    which: Ints

    @cached_property
    def _ends(self) -> Ints:
        return np.unique(np.concatenate([self.start, self.stop]))

    def cut(self, low: int, high: int) -> Ints:
        """The interval ``[low, high)``, cut where any view begins or ends: (n, 2)."""
        first, last = np.searchsorted(self._ends, low, "right"), np.searchsorted(self._ends, high)
        bounds = np.array([low, *self._ends[first:last], high], np.int64)
        return np.stack([bounds[:-1], bounds[1:]], axis=1)

    def holds(self, coordinate: Ints) -> Bools:
        """Whether each view holds each coordinate, (coordinates, views)."""
        inside = (self.start[:, None] <= coordinate) & (coordinate < self.stop[:, None])
        held: Bools = np.logical_or.reduceat(inside, self.first, axis=0)[self.which].T
        return held


@attrs.frozen(eq=False)
class Holding:
    """The views by which sources hold some tensors, the same of each: the index of the source, and the geometry.

    ``column`` says which of the views of such a tensor, in :attr:`Sources.views`, each of them is.
    """

    sources: tuple[tuple[int, Geometry], ...]
    column: tuple[int, ...]

    @cached_property
    def worker(self) -> Ints:
        """The index of each view's source."""
        return np.array([i for i, _ in self.sources], np.int64)

    @cached_property
    def groups(self) -> tuple[tuple[Group, ...], Ints]:
        """The different groups of the views, and which each has."""
        return _different(self.sources, lambda geometry: geometry.group)

    @cached_property
    def kinds(self) -> tuple[tuple[int, Geometry], ...]:
        """The first of the views of each dtype, global sizes, and kind of group."""
        found: dict[Any, tuple[int, Geometry]] = {}
        for i, geometry in self.sources:
            key = (geometry.dtype, geometry.group.tokens_per_block is None, *geometry.sizes.items())
            found.setdefault(key, (i, geometry))
        return tuple(found.values())

    @cached_property
    def _covers(self) -> dict[str, Cover]:
        return {}

    def cover(self, axis: str) -> Cover:
        """What each view holds of an axis."""
        if axis not in self._covers:
            sets, which = _different(self.sources, lambda geometry: geometry.segments[axis].covered)
            first = np.cumsum([0, *map(len, sets)])[:-1]
            start, stop = (
                np.array([interval for intervals in sets for interval in intervals], np.int64).reshape(-1, 2).T
            )
            self._covers[axis] = Cover(start, stop, first, which)
        return self._covers[axis]


def _different(
    sources: Iterable[tuple[int, Geometry]], value: Callable[[Geometry], Value]
) -> tuple[tuple[Value, ...], Ints]:
    """The different values that geometries have, and which each has."""
    known: dict[Value, int] = {}
    which = np.array([known.setdefault(value(geometry), len(known)) for _, geometry in sources], np.int64)
    return tuple(known), which


class Sources:
    """Workers that may send, and the holding of each of their tensors."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = tuple(workers)
        self.views: dict[str, tuple[int, ...]] = {}
        """The indices of a tensor's views, those of each cohort after another."""
        cohorts: dict[Any, list[int]] = {}
        for i, worker in enumerate(self.workers):
            cohorts.setdefault((tuple(view.name for view in worker.views), worker.geometry_of), []).append(i)
        self._cohorts = tuple(cohorts.values())
        self._kinds: dict[str, tuple[tuple[int, int, tuple[int, ...]], ...]] = {}
        self._holdings: dict[Any, Holding] = {(): Holding((), ())}
        for cohort, (first, *_) in enumerate(self._cohorts):
            worker = self.workers[first]
            for name, views in worker.tensors.items():
                before = self.views.get(name, ())
                alike = (cohort, len(before), tuple([worker.geometry_of[view] for view in views]))
                self.views[name] = before + views
                self._kinds[name] = (*self._kinds.get(name, ()), alike)

    def holding(self, name: str) -> Holding:
        """How the sources hold a tensor: the same value for all tensors that they hold alike."""
        kind = self._kinds.get(name, ())
        if kind not in self._holdings:
            found = [
                (i, column + n, self.workers[i].geometries[geometry])
                for cohort, column, geometries in kind
                for i in self._cohorts[cohort]
                for n, geometry in enumerate(geometries)
            ]
            found.sort(key=lambda view: view[:2])
            sources = tuple((i, geometry) for i, _, geometry in found)
            self._holdings[kind] = Holding(sources, tuple(column for _, column, _ in found))
        return self._holdings[kind]
