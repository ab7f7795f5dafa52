"""Match (M): pairs the tensors of a destination with the views of the sources.

- M1: Tensors pair by name, and by nothing else.
- M2: Every tensor of the destination needs a source, except those that the caller lists as not transferred. Tensors
  that only sources have do not take part.
- M3: Both sides of a tensor have the same dtype, and the same axis names and global sizes; axes of size 1 do not count.
  A token group pairs with a token group, a state group with a state group.
- M4: Both sides run the same model, unless one of them does not say which.
- M5: Tensors whose views have equal geometries on the same workers form one *match* and are planned once.

The ranks of an engine usually list the same tensors with the same geometries, and differ in the parts they hold.
:class:`Sources` therefore groups ranks of equal lists, once for all destinations of a mesh.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Bools, Ints, distinct
from kvplan._checks import at_most
from kvplan._text import few
from kvplan.describe.axes import global_sizes
from kvplan.describe.views import TOKEN, Geometry, Group
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.align import held_positions

MAX_HELD: Final = 1 << 26
"""The most stretches of an axis, times source views of a tensor, that are compared for one destination."""

Intervals = tuple[tuple[int, int], ...]


@attrs.frozen(eq=False)
class Part:
    """Coordinates of one axis that the same source views hold.

    ``intervals`` is (n, 2) int64, ascending; they do not touch. ``held`` is (views,) bool.
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
        return few([f"[{start}, {stop})" for start, stop in self.intervals.tolist()], " ")


@attrs.frozen(eq=False)
class SourceViews:
    """All views of one tensor among the sources; equal for every tensor that the sources hold in the same way.

    ``views`` has the index of each view's worker, and its geometry. ``column`` has the index of that view in
    :attr:`Sources.views` of the tensor.
    """

    views: tuple[tuple[int, Geometry], ...]
    column: tuple[int, ...]
    _parts: dict[Any, tuple[Part, ...]] = attrs.field(factory=dict, init=False)
    _held: dict[tuple[str, int], tuple[Ints, Ints, Ints]] = attrs.field(factory=dict, init=False)

    @cached_property
    def worker(self) -> Ints:
        """The index of each view's worker, (views,)."""
        return np.array([i for i, _ in self.views], np.int64)

    @cached_property
    def groups(self) -> frozenset[Group]:
        """The groups of the views."""
        return frozenset(geometry.group for _, geometry in self.views)

    @cached_property
    def kinds(self) -> tuple[tuple[int, Geometry], ...]:
        """One view and its worker for each distinct dtype, global sizes, and kind of group: what rule M3 checks."""
        found: dict[Hashable, tuple[int, Geometry]] = {}
        for i, geometry in self.views:
            key = (geometry.dtype, geometry.group.tokens_per_block is None, *geometry.sizes.items())
            found.setdefault(key, (i, geometry))
        return tuple(found.values())

    def parts(self, ours: Geometry, axis: str, every: int) -> tuple[Part, ...]:
        """The parts of what a destination's view holds of an axis: cut where a source view begins or ends.

        The token axis counts positions in ``[0, every)``. Coordinates that the same views hold make one part.
        """
        covered = _covered(ours, axis, every)
        if (axis, every, covered) not in self._parts:
            mine = np.array(covered, np.int64)
            intervals, of, which = self._intervals(axis, every)
            # `bounds` are all ends of intervals; `held` is (stretches between bounds that the destination has, views).
            bounds = distinct(np.concatenate([mine, intervals]))
            at_most(
                MAX_HELD,
                bounds.size * len(self.views),
                "stretches of views",
                f"divide axis {axis!r}",
            )
            wanted = _inside(bounds, mine, np.zeros(len(mine), np.int64))[0]
            held = _inside(bounds, intervals, of)[:, wanted][which].T
            stretches = np.stack([bounds[:-1], bounds[1:]], axis=1)[wanted]
            self._parts[axis, every, covered] = _by_holders(stretches, held)
        return self._parts[axis, every, covered]

    def _intervals(self, axis: str, every: int) -> tuple[Ints, Ints, Ints]:
        """What the views hold of an axis: views of equal coordinates share a set of intervals.

        Returns the intervals of all sets, (n, 2); the set of each interval, (n,); the set of each view, (views,).
        """
        if (axis, every) not in self._held:
            sets: dict[Intervals, int] = {}
            which = [
                sets.setdefault(_covered(geometry, axis, every), len(sets))
                for _, geometry in self.views
            ]
            intervals = np.array([ends for each in sets for ends in each], np.int64).reshape(-1, 2)
            of = np.repeat(np.arange(len(sets)), [len(each) for each in sets])
            self._held[axis, every] = intervals, of, np.array(which, np.int64)
        return self._held[axis, every]


def _covered(geometry: Geometry, axis: str, every: int) -> Intervals:
    """The coordinates of an axis that a view holds; of the token axis, the positions in ``[0, every)``."""
    return (
        held_positions(geometry.group, every) if axis == TOKEN else geometry.segments[axis].covered
    )


def _inside(bounds: Ints, intervals: Ints, of: Ints) -> Bools:
    """Whether each stretch between neighbouring bounds lies in each set of intervals, (sets, bounds - 1) bool.

    The intervals of one set must not touch each other.
    """
    steps = np.zeros((int(of.max(initial=-1)) + 1, bounds.size), np.int8)
    # +1 where an interval begins, -1 where it ends; the running sum is 1 inside an interval.
    begins, ends = np.searchsorted(bounds, intervals).T
    steps[of, begins] = 1
    steps[of, ends] = -1
    inside: Bools = np.cumsum(steps, axis=1, dtype=np.int8)[:, :-1] > 0
    return inside


def _by_holders(stretches: Ints, held: Bools) -> tuple[Part, ...]:
    """One part for each distinct row of ``held``, (stretches, views)."""
    by_holders: dict[bytes, list[int]] = {}
    for i, holders in enumerate(held):
        by_holders.setdefault(holders.tobytes(), []).append(i)
    return tuple(Part(stretches[which], held[which[0]]) for which in by_holders.values())


class Sources:
    """The workers that can send, and the views of each of their tensors.

    ``views`` has the view indices of a tensor by its name: those of the first ranks with equal lists, then of the next.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers: tuple[Worker, ...] = tuple(workers)
        self.views: dict[str, tuple[int, ...]] = {}
        alike: dict[
            Hashable, list[int]
        ] = {}  # workers by the list of tensors and geometries that they share
        for i, worker in enumerate(self.workers):
            alike.setdefault(
                (tuple([view.name for view in worker.views]), worker.geometry_of), []
            ).append(i)
        kinds: dict[str, tuple[Any, ...]] = {}
        for members in alike.values():
            worker = self.workers[members[0]]
            for name, views in worker.tensors.items():
                before = self.views.get(name, ())
                equal = (
                    members[0],
                    len(before),
                    tuple([worker.geometry_of[view] for view in views]),
                )
                self.views[name] = before + views
                kinds[name] = (*kinds.get(name, ()), equal)
        by_first = {members[0]: members for members in alike.values()}
        made = {
            kind: self._views_of(kind, by_first) for kind in dict.fromkeys([(), *kinds.values()])
        }
        self._nobody = made[()]
        self._by_name = {name: made[kind] for name, kind in kinds.items()}

    def of(self, name: str) -> SourceViews:
        """The views of a tensor: one object for all tensors that the sources hold in the same way."""
        return self._by_name.get(name, self._nobody)

    def _views_of(
        self, kind: Iterable[tuple[int, int, tuple[int, ...]]], alike: Mapping[int, Sequence[int]]
    ) -> SourceViews:
        found = [
            (i, column + n, self.workers[i].geometries[geometry])
            for first, column, geometries in kind
            for i in alike[first]
            for n, geometry in enumerate(geometries)
        ]
        found.sort(key=lambda view: view[:2])
        return SourceViews(
            tuple((i, geometry) for i, _, geometry in found),
            tuple(column for _, column, _ in found),
        )


@attrs.frozen(eq=False)
class Match:
    """Tensors with equal geometries on both sides.

    ``destination`` has the geometries of the destination's views of such a tensor, ``sources`` the views of the
    sources. ``views`` has, for each side, the view indices of every tensor, (tensors, views) int64.
    """

    names: tuple[str, ...]
    destination: tuple[Geometry, ...]
    sources: SourceViews
    views: tuple[Ints, Ints]
    workers: tuple[Worker, tuple[Worker, ...]]

    def places(self, destination: int, source: int) -> Ints:
        """The places of one view of each side for every tensor, (2, tensors, 2) int64: region index and offset."""
        (ours, theirs), (local, workers) = self.views, self.workers
        sender = workers[self.sources.views[source][0]]
        return np.stack(
            [
                local.places[ours[:, destination]],
                sender.places[theirs[:, self.sources.column[source]]],
            ]
        )

    def of_tensors(self, which: Bools) -> Match:
        """Return the match of some of the tensors, (tensors,) bool."""
        views = self.views[0][which], self.views[1][which]
        return attrs.evolve(self, names=tuple(compress(self.names, which)), views=views)

    def with_destination(self, worker: Worker, geometry: Geometry, views: Ints) -> Match:
        """Return the match with another destination, which has one view of each tensor: (tensors,)."""
        return attrs.evolve(
            self,
            destination=(geometry,),
            views=(views[:, None], self.views[1]),
            workers=(worker, self.workers[1]),
        )

    def with_source(self, worker: Worker, geometry: Geometry, views: Ints) -> Match:
        """Return the match with another, single source, which has one view of each tensor: (tensors,)."""
        return attrs.evolve(
            self,
            sources=SourceViews(((0, geometry),), (0,)),
            views=(self.views[0], views[:, None]),
            workers=(self.workers[0], (worker,)),
        )


def match(
    destination: Worker, sources: Sources, not_transferred: Collection[str] = ()
) -> tuple[Match, ...]:
    """The matches of a destination with its sources.

    Raises ``GROUP``, ``DTYPE``, ``AXES`` or ``SIZE``, by rule M3, or ``MODEL``, by rule M4.
    """
    for source in sources.workers:
        if source.model != destination.model and source.model and destination.model:
            raise KVPlanError(
                "MODEL",
                "pair workers",
                expected=f"model {destination.model!r} (destination {destination.label})",
                got=f"{source.model!r} (source {source.label})",
                hint="if their caches are equal, give both workers the same model",
                destination=destination.model,
                source=source.model,
            )
    tensors: dict[Any, list[str]] = {}  # names by what their views have in common, rule M5
    geometry_of = destination.geometry_of
    for name, views in destination.tensors.items():
        if name not in not_transferred:
            key = (sources.of(name), tuple([geometry_of[view] for view in views]))
            tensors.setdefault(key, []).append(name)
    matches = []
    for (found, ours), names in tensors.items():
        geometries = tuple(destination.geometries[g] for g in ours)
        for mine in geometries:
            for i, other in found.kinds:
                _check(names[0], destination, mine, sources.workers[i], other)
        sides = destination.tensors, sources.views
        rows = [np.array([side.get(name, ()) for name in names], np.int64) for side in sides]
        workers = destination, sources.workers
        matches.append(Match(tuple(names), geometries, found, (rows[0], rows[1]), workers))
    return tuple(matches)


def _check(
    name: str, destination: Worker, ours: Geometry, source: Worker, theirs: Geometry
) -> None:
    def differ(code: str, what: str, mine: object, other: object) -> KVPlanError:
        return KVPlanError(
            code,
            f"pair {what} of tensor {name!r}",
            expected=f"{mine} (destination {destination.label})",
            got=f"{other} (source {source.label})",
            tensor=name,
            field=what,
            destination=mine,
            source=other,
        )

    kinds = ["state" if side.group.tokens_per_block is None else "token" for side in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise differ("GROUP", "the group", f"a {kinds[0]} group", f"a {kinds[1]} group")
    if ours.dtype != theirs.dtype:
        error = differ("DTYPE", "the dtype", ours.dtype, theirs.dtype)
        same = ours.itemsize == theirs.itemsize and {ours.dtype, theirs.dtype} & {"int8", "uint8"}
        raise (
            error.with_hint("if their bytes mean the same, describe both sides as uint8")
            if same
            else error
        )
    mine, other = (
        {k: v for k, v in global_sizes(side.axes).items() if k != TOKEN} for side in (ours, theirs)
    )
    for axis, size in mine.items():
        if other.get(axis, size) != size:
            raise differ("SIZE", f"the size of axis {axis!r}", size, other[axis])
    if ours.sizes.keys() - {TOKEN} != theirs.sizes.keys() - {TOKEN}:
        raise differ("AXES", "the axes", " ".join(sorted(mine)), " ".join(sorted(other)))
