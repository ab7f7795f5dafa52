"""Match (M): pairs the tensors of a destination with the views of the sources.

- plan.M1: Tensors pair by name, and by nothing else.
- plan.M2: Every tensor of the destination needs a source, except those that the caller lists as not
  transferred. Tensors that only sources have are left out.
- plan.M3: Both sides of a tensor have the same dtype, and the same axis names and global sizes;
  axes of size 1 do not count. A token group pairs with a token group, a state group with a state
  group.
- plan.M4: Both sides run the same model, unless one of them does not say which.
- plan.M5: Tensors whose views have equal geometries on the same workers form one *match* and are
  planned once.

The ranks of an engine usually list the same tensors with the same geometries, and differ in the
shards they hold. :class:`Sources` therefore groups ranks of equal lists, once for all destinations
of a mesh.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress
from typing import Any, Final, NamedTuple

import attrs
import numpy as np

from kvplan._arrays import Bools, Ints, distinct
from kvplan._text import FEW, few
from kvplan.describe.model import model_values
from kvplan.describe.views import TOKEN, Geometry, Group
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.align import held_positions, num_turns

UNEQUAL_SLOTS: Final = "a value of several tokens cannot be divided or merged"

Intervals = tuple[tuple[int, int], ...]


@attrs.frozen(eq=False)
class AxisSlice:
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
        """The intervals relative to the first start, as bytes: equal for equal shapes."""
        return (self.intervals - self.span[0]).tobytes()

    def __str__(self) -> str:
        first = [f"[{start}, {stop})" for start, stop in self.intervals[:FEW].tolist()]
        return few(first, " ", number=len(self.intervals))


@attrs.frozen(eq=False)
class IntervalSets:
    """The coordinates of one axis that source views hold: views of equal coordinates share a set.

    ``intervals`` (n, 2) are those of all sets, ``set_of_interval`` (n,) the set of each, and
    ``set_of_view`` (views,) the set of each view.
    """

    intervals: Ints
    set_of_interval: Ints
    set_of_view: Ints

    @classmethod
    def of(cls, intervals_of_views: Iterable[Intervals]) -> IntervalSets:
        """Return the sets of the intervals of each view."""
        sets: dict[Intervals, int] = {}
        # A view's set is numbered by its first appearance.
        set_of_view = [sets.setdefault(intervals, len(sets)) for intervals in intervals_of_views]
        flat = np.array(list(chain.from_iterable(sets)), np.int64).reshape(-1, 2)
        set_of_interval = np.repeat(np.arange(len(sets)), [len(intervals) for intervals in sets])
        return cls(flat, set_of_interval, np.array(set_of_view, np.int64))


@attrs.frozen(eq=False)
class SourceViews:
    """All views of one tensor among the sources.

    Tensors that the sources hold in the same way share one. ``views`` has the index of each view's
    worker, and its geometry. ``column`` has the index of that view in :attr:`Sources.views` of the
    tensor.
    """

    views: tuple[tuple[int, Geometry], ...]
    column: tuple[int, ...]
    _slices: dict[Any, tuple[AxisSlice, ...]] = attrs.field(factory=dict, init=False)
    _interval_sets: dict[tuple[str, int], IntervalSets] = attrs.field(factory=dict, init=False)

    @cached_property
    def worker(self) -> Ints:
        """The index of each view's worker, (views,)."""
        return np.array([worker_index for worker_index, _ in self.views], np.int64)

    @cached_property
    def groups(self) -> frozenset[Group]:
        """The groups of the views."""
        return frozenset(geometry.group for _, geometry in self.views)

    @cached_property
    def samples(self) -> tuple[tuple[int, Geometry], ...]:
        """One view of each dtype, global sizes and kind of group: what plan.M3 compares."""
        # Views of equal key pass or fail the check alike.
        samples: dict[Hashable, tuple[int, Geometry]] = {}
        for worker_index, geometry in self.views:
            key = (geometry.dtype, _kind(geometry.group), *geometry.sizes.items())
            samples.setdefault(key, (worker_index, geometry))
        return tuple(samples.values())

    def slices(self, destination: Geometry, axis: str, cycle: int) -> tuple[AxisSlice, ...]:
        """Return a destination view's axis, cut where a source view begins or ends.

        The token axis counts positions in ``[0, cycle)``. Coordinates that the same source views
        hold make one slice.
        """
        covered = _covered(destination, axis, cycle)
        key = (axis, cycle, covered)
        if key not in self._slices:
            needed, sources, bounds = self._bounds(covered, axis, cycle)
            ranges = np.stack([bounds[:-1], bounds[1:]], axis=1)
            is_needed = _inside(bounds, needed)[0]
            # (sets, ranges) to (ranges, views), for the ranges that are needed
            held = _inside(bounds, sources)[:, is_needed][sources.set_of_view].T
            self._slices[key] = _by_holders(ranges[is_needed], held)
        return self._slices[key]

    def num_intervals(self, destination: Geometry, axis: str, cycle: int) -> int:
        """Return how many intervals of an axis :meth:`num_ranges` lists, or a few more."""
        number = _num_intervals(destination, axis, cycle)
        if (axis, cycle) not in self._interval_sets:
            number += sum(_num_intervals(geometry, axis, cycle) for _, geometry in self.views)
        return number

    def num_ranges(self, destination: Geometry, axis: str, cycle: int) -> int:
        """Return how many ranges of an axis :meth:`slices` lists."""
        covered = _covered(destination, axis, cycle)
        if (axis, cycle, covered) in self._slices:
            return 0
        *_, bounds = self._bounds(covered, axis, cycle)
        return bounds.size

    def _bounds(
        self, covered: Intervals, axis: str, cycle: int
    ) -> tuple[IntervalSets, IntervalSets, Ints]:
        """Return the intervals of both sides, and all their ends: ranges lie between two."""
        needed, sources = IntervalSets.of([covered]), self._sets(axis, cycle)
        return needed, sources, distinct(np.concatenate([needed.intervals, sources.intervals]))

    def _sets(self, axis: str, cycle: int) -> IntervalSets:
        """Return what the views hold of an axis."""
        key = (axis, cycle)
        if key not in self._interval_sets:
            covered = [_covered(geometry, axis, cycle) for _, geometry in self.views]
            self._interval_sets[key] = IntervalSets.of(covered)
        return self._interval_sets[key]


def _num_intervals(geometry: Geometry, axis: str, cycle: int) -> int:
    """Return how many intervals :func:`_covered` lists, or a few more."""
    if axis == TOKEN:
        return num_turns(geometry.group, cycle)
    return int(geometry.segments[axis].start.size)


def _covered(geometry: Geometry, axis: str, cycle: int) -> Intervals:
    """Return the coordinates of an axis that a view holds, positions in ``[0, cycle)``."""
    if axis == TOKEN:
        return held_positions(geometry.group, cycle)
    return geometry.segments[axis].covered


def _inside(bounds: Ints, sets: IntervalSets) -> Bools:
    """Return whether each range between neighbouring bounds is in each set, (sets, bounds - 1).

    The intervals of one set must not touch each other.
    """
    num_sets = int(sets.set_of_interval.max(initial=-1)) + 1
    steps = np.zeros((num_sets, bounds.size), np.int8)
    # +1 where an interval begins, -1 where it ends; the running sum is 1 inside an interval.
    starts, stops = np.searchsorted(bounds, sets.intervals).T
    steps[sets.set_of_interval, starts] = 1
    steps[sets.set_of_interval, stops] = -1
    inside: Bools = np.cumsum(steps, axis=1, dtype=np.int8)[:, :-1] > 0
    return inside


def _by_holders(ranges: Ints, held: Bools) -> tuple[AxisSlice, ...]:
    """Return one slice for each distinct row of ``held``, (ranges, views)."""
    # Ranges with equal rows, by the row's bytes: the same views hold all of them.
    by_holders: dict[bytes, list[int]] = {}
    for index, holders in enumerate(held):
        by_holders.setdefault(holders.tobytes(), []).append(index)
    return tuple(AxisSlice(ranges[alike], held[alike[0]]) for alike in by_holders.values())


class RankViews(NamedTuple):
    """The views of one tensor on all ranks that list the same tensors with the same geometries.

    ``first_worker`` is the index of the first such rank, ``first_column`` the column of the first
    view, ``geometries`` has an index in a worker's geometries for each view.
    """

    first_worker: int
    first_column: int
    geometries: tuple[int, ...]


class Sources:
    """The workers that can send, and the views of each of their tensors.

    Columns of ``views``, by the name of a tensor, are view indices: those of the first ranks with
    equal lists, then of the next. With ranks 0 and 1 alike, and rank 2 with two views of it::

        views["layers.0"]  =  (3,       0, 7)      view 3 of rank 0 and of rank 1; 0 and 7 of rank 2
        of("layers.0")     :  column 0 of workers 0 and 1, columns 1 and 2 of worker 2
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers: tuple[Worker, ...] = tuple(workers)
        self.views: dict[str, tuple[int, ...]] = {}
        ranks = _ranks_with_equal_lists(self.workers)
        rank_views: dict[str, tuple[RankViews, ...]] = {}
        for first_worker in ranks:
            worker = self.workers[first_worker]
            for name, views in worker.tensors.items():
                columns = self.views.get(name, ())
                geometries = tuple([worker.geometry_of[view] for view in views])
                alike = RankViews(first_worker, len(columns), geometries)
                self.views[name] = columns + views
                rank_views[name] = (*rank_views.get(name, ()), alike)
        # Tensors that all sources hold in the same way share their source views.
        shared = {key: self._source_views(key, ranks) for key in {(), *rank_views.values()}}
        self._no_views = shared[()]
        self._by_name = {name: shared[key] for name, key in rank_views.items()}

    def of(self, name: str) -> SourceViews:
        """Return the views of a tensor: one object for all that are held in the same way."""
        return self._by_name.get(name, self._no_views)

    def _source_views(
        self, rank_views: Iterable[RankViews], ranks: Mapping[int, Sequence[int]]
    ) -> SourceViews:
        """Return the views of a tensor on all workers, by worker and column."""
        views: list[tuple[int, int, Geometry]] = []
        for alike in rank_views:
            for worker_index in ranks[alike.first_worker]:
                geometries = self.workers[worker_index].geometries
                for column, geometry in enumerate(alike.geometries, alike.first_column):
                    views.append((worker_index, column, geometries[geometry]))
        views.sort(key=lambda view: view[:2])
        return SourceViews(
            tuple([(worker_index, geometry) for worker_index, _, geometry in views]),
            tuple([column for _, column, _ in views]),
        )


def _ranks_with_equal_lists(workers: Sequence[Worker]) -> dict[int, list[int]]:
    """Return workers with equal lists of tensors and geometries, as indices, by the first."""
    # A worker's list: the name of every view, and the index of its geometry.
    by_lists: dict[Hashable, list[int]] = {}
    for i, worker in enumerate(workers):
        names = tuple([view.name for view in worker.views])
        by_lists.setdefault((names, worker.geometry_of), []).append(i)
    return {ranks[0]: ranks for ranks in by_lists.values()}


@attrs.frozen(eq=False)
class Match:
    """Tensors with equal geometries on both sides.

    ``destination`` has the geometries of the destination's views of such a tensor, ``sources`` the
    views of the sources. ``views`` has, for each side, the view indices of every tensor, (tensors,
    views) int64.
    """

    names: tuple[str, ...]
    destination: tuple[Geometry, ...]
    sources: SourceViews
    views: tuple[Ints, Ints]
    workers: tuple[Worker, tuple[Worker, ...]]

    def region_offsets(self, destination: int, source: int) -> Ints:
        """Return the region index and offset of one view of each side, (2, tensors, 2) int64."""
        local, senders = self.workers
        sender = senders[self.sources.views[source][0]]
        destination_views = self.views[0][:, destination]
        source_views = self.views[1][:, self.sources.column[source]]
        offsets = local.region_offsets[destination_views], sender.region_offsets[source_views]
        return np.stack(offsets)

    def of_tensors(self, chosen: Bools) -> Match:
        """Return the match of some of the tensors, (tensors,) bool."""
        views = self.views[0][chosen], self.views[1][chosen]
        return attrs.evolve(self, names=tuple(compress(self.names, chosen)), views=views)

    def with_source(self, worker: Worker, geometry: Geometry, views: Ints) -> Match:
        """Return the match with one other source, with one view of each tensor: (tensors,)."""
        return attrs.evolve(
            self,
            sources=SourceViews(((0, geometry),), (0,)),
            views=(self.views[0], views[:, None]),
            workers=(self.workers[0], (worker,)),
        )


def match(
    destination: Worker, sources: Sources, not_transferred: Collection[str] = ()
) -> tuple[Match, ...]:
    """Return the matches of a destination with its sources.

    Raises ``GROUP``, ``DTYPE``, ``AXES`` or ``SIZE``, by rule plan.M3, or ``MODEL``, by rule
    plan.M4.
    """
    _check_models(destination, sources.workers)
    # Names of tensors by their source views and the destination's geometries, rule plan.M5.
    names_by_key: dict[tuple[SourceViews, tuple[int, ...]], list[str]] = {}
    geometry_of = destination.geometry_of
    for name, views in destination.tensors.items():
        if name not in not_transferred:
            key = (sources.of(name), tuple([geometry_of[view] for view in views]))
            names_by_key.setdefault(key, []).append(name)
    # All tensors of a key are checked by the first one.
    matches = []
    for (source_views, geometry_indices), names in names_by_key.items():
        geometries = tuple(destination.geometries[i] for i in geometry_indices)
        for geometry in geometries:
            for worker_index, sample in source_views.samples:
                source = sources.workers[worker_index]
                _check_tensor(names[0], destination, geometry, source, sample)
        indices = _view_indices(names, destination.tensors), _view_indices(names, sources.views)
        workers = (destination, sources.workers)
        matches.append(Match(tuple(names), geometries, source_views, indices, workers))
    return tuple(matches)


def _view_indices(names: Iterable[str], views_by_name: Mapping[str, tuple[int, ...]]) -> Ints:
    """Return the view indices of each tensor, (tensors, views)."""
    return np.array([views_by_name.get(name, ()) for name in names], np.int64)


def _check_models(destination: Worker, sources: Iterable[Worker]) -> None:
    """Raise ``MODEL`` for a source of another model, rule plan.M4."""
    for source in sources:
        if source.model != destination.model and source.model and destination.model:
            expected, got = model_values(destination.model, source.model)
            raise KVPlanError(
                "MODEL",
                "pair workers",
                expected=f"{expected} (destination {destination.label})",
                got=f"{got} (source {source.label})",
                hint="if their caches are equal, give both workers the same model",
                destination=destination.model,
                source=source.model,
            )


def _check_tensor(
    name: str,
    destination: Worker,
    destination_view: Geometry,
    source: Worker,
    source_view: Geometry,
) -> None:
    """Raise ``GROUP``, ``DTYPE``, ``SIZE`` or ``AXES`` where views differ, rule plan.M3."""

    def differ(code: str, field: str, at_destination: object, at_source: object) -> KVPlanError:
        return KVPlanError(
            code,
            f"pair {field} of tensor {name!r}",
            expected=f"{at_destination} (destination {destination.label})",
            got=f"{at_source} (source {source.label})",
            tensor=name,
            field=field,
            destination=at_destination,
            source=at_source,
        )

    needed_kind = _kind(destination_view.group)
    sent_kind = _kind(source_view.group)
    if needed_kind != sent_kind:
        error = differ("GROUP", "the group", f"a {needed_kind}", f"a {sent_kind}")
        tokens_per_slot = {view.group.tokens_per_slot for view in (destination_view, source_view)}
        raise error if tokens_per_slot == {1} else error.with_hint(UNEQUAL_SLOTS)
    if destination_view.dtype != source_view.dtype:
        error = differ("DTYPE", "the dtype", destination_view.dtype, source_view.dtype)
        has_bytes = {destination_view.dtype, source_view.dtype} & {"int8", "uint8"}
        if has_bytes and destination_view.itemsize == source_view.itemsize:
            error = error.with_hint("if their bytes mean the same, describe both sides as uint8")
        raise error
    needed_sizes = destination_view.content_sizes
    sent_sizes = source_view.content_sizes
    for axis, size in needed_sizes.items():
        if sent_sizes.get(axis, size) != size:
            raise differ("SIZE", f"the size of axis {axis!r}", size, sent_sizes[axis])
    # axes of size 1 do not count
    if destination_view.sizes.keys() - {TOKEN} != source_view.sizes.keys() - {TOKEN}:
        axes = " ".join(sorted(needed_sizes)), " ".join(sorted(sent_sizes))
        raise differ("AXES", "the axes", *axes)


def _kind(group: Group) -> str:
    """Return what a slot of the group has, in words: equal for groups whose tensors may pair."""
    if group.is_state:
        return "state group"
    if group.tokens_per_slot == 1:
        return "token group"
    return f"group of one value for {group.tokens_per_slot} tokens"
