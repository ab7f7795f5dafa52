"""PICTURES: what a picture says of a block or a plan is true of any, and any worker and plan has a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given

from kvplan import TransferPlan, show
from kvplan.display.blocks import DrawnLayer, Interval, layers_of
from kvplan.display.copies import POSITION, CopyEnd, by_remote_group, example, panels, positions_in
from kvplan.testing.strategies import Case, cases
from property_tests import fewer
from property_tests.oracle import elements


def plans(case: Case) -> Iterator[TransferPlan]:
    """The plan of each worker, reads and writes."""
    yield from map(case.reads, case.destinations)
    yield from map(case.writes, case.sources)


def coordinates(end: CopyEnd) -> tuple[str, dict[str, Interval]]:
    """The tensor and its intervals; each side has the axes of several elements, in its own order."""
    group, sizes = end.layer.group, end.layer.views[end.view].sizes
    held = {axis: each for axis, each in end.intervals.items() if sizes.get(axis, 2) > 1}
    if not group.is_state:
        held.setdefault(POSITION, positions_in(group, end.ordinal))
    return end.tensor, held


def named(layer: DrawnLayer, cell: int) -> list[int]:
    """The bytes whose coordinates a cell names."""
    cells, view = layer.cells, layer.views[int(layer.cells.view[cell])]
    held = dict(zip(cells.axes, map(range, cells.low[cell].tolist(), cells.high[cell].tolist()), strict=True))
    found: list[int] = []
    for slot, offset, coordinates in elements(view):
        if all(at in held.get(axis, (at,)) for axis, at in (("token", slot), *coordinates)):
            found += range(offset - layer.offset, offset - layer.offset + view.itemsize)
    return sorted(found)


@given(cases())
def test_a_cell_has_the_bytes_that_its_coordinates_name(case: Case) -> None:
    """All of them and no others; cells have all bytes of all views, and runs are cells that follow each other."""
    for layer in itertools.chain(*map(layers_of, (*case.destinations, *case.sources))):
        cells = layer.cells
        for cell, (start, stop) in enumerate(zip(cells.start.tolist(), cells.stop.tolist(), strict=True)):
            assert named(layer, cell) == [*range(start, stop)]
        num_bytes = sum(view.itemsize * len([*elements(view)]) for view in layer.views)
        assert int((cells.stop - cells.start).sum()) == num_bytes == sum(stop - start for start, stop in cells.runs)


@given(cases())
@fewer(5)
def test_panels_are_true_and_complete(case: Case) -> None:
    """Each end of a copy has coordinates from its own address and views, and both ends have the same.

    The copies of all panels, each as often as it has layers, are the bytes that the examples of all groups move.
    """
    for plan in plans(case):
        found = panels(plan)
        for copy in (copy for panel in found for copy in panel.copies):
            assert coordinates(copy.local) == coordinates(copy.remote)
            assert copy.num_bytes == copy.remote.stop - copy.remote.start
        assert sum(copy.num_bytes * panel.num_layers for panel in found for copy in panel.copies) == in_examples(plan)


def in_examples(plan: TransferPlan) -> int:
    """The bytes that the examples of all groups move."""
    given = [example(plan, group) for group in plan.local.groups]
    return sum(spec.num_bytes for _, one in by_remote_group(plan) for request in given for spec in one.bind(**request))


@given(cases())
@fewer(10)
def test_every_worker_and_plan_has_a_picture(case: Case) -> None:
    """Whatever the views."""
    for value in (*case.destinations, *case.sources, *plans(case)):
        picture = show(value)
        assert bool(picture) == ("│" in picture)
