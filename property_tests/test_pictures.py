"""PICTURES: what a picture says of a block or a plan is true of any, and any worker and plan has a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from kvplan import TransferPlan, show
from kvplan.display.blockmap import BlockMap, Box, block_maps
from kvplan.display.copies import by_remote_group, excerpt, panels
from kvplan.testing.strategies import Case, cases
from property_tests import fewer
from property_tests.oracle import elements


def plans(case: Case) -> Iterator[TransferPlan]:
    """The plan of each worker, reads and writes."""
    yield from map(case.reads, case.destinations)
    yield from map(case.writes, case.sources)


def words(coordinates: str) -> set[tuple[str, frozenset[str]]]:
    """Tensors with their intervals, in no order: each side has the axes in the order of its own views."""
    parts = (one.partition(": ") for one in coordinates.split("; "))
    return {(tensor, frozenset(intervals.split(", "))) for tensor, _, intervals in parts}


def named(one: BlockMap, box: Box) -> list[int]:
    """The bytes whose coordinates the path of a box names."""
    path = {interval.axis: range(interval.start, interval.stop) for interval in box.path}
    found: list[int] = []
    for view in (one.views[i] for i in box.views):
        for slot, offset, coordinates in elements(view):
            if all(at in path.get(axis, (at,)) for axis, at in (("token", slot), *coordinates)):
                found += range(offset - one.places[0][1], offset - one.places[0][1] + view.itemsize)
    return sorted(found)


@given(cases(), st.tuples(st.integers(0), st.integers(0)))
def test_a_box_has_the_bytes_that_its_path_names(case: Case, cut: tuple[int, int]) -> None:
    """All of them and no others. The boxes of a part of a piece follow each other."""
    for one in itertools.chain(*map(block_maps, (*case.destinations, *case.sources))):
        offsets = sorted({offset - one.places[0][1] for view in one.views for _, offset, _ in elements(view)})
        for first, last in one.pieces.tolist():
            edges = [*(offset for offset in offsets if first <= offset < last), last]
            start, stop = sorted(edges[at % len(edges)] for at in cut)
            for box in one.boxes(start, stop):
                assert box.start == start
                assert named(one, box) == [*range(start, box.stop)]
                start = box.stop
            assert start == stop


@given(cases())
@fewer(5)
def test_panels_are_true_and_complete(case: Case) -> None:
    """Each end of a copy has coordinates from its own address and views, and both ends have the same.

    The copies of all panels, each as often as it has layers, are the bytes that the examples of all groups move. The
    same holds for the blocks of a request.
    """
    for plan in plans(case):
        request, found = case.request(plan), panels(plan)
        real = panels(plan, {key: request[key] for key in ("local", "remote", "tokens")})
        for copy in (copy for panel in (*found, *real) for copy in panel.copies):
            assert words(copy.local.coordinates) == words(copy.remote.coordinates)
            assert copy.num_bytes == copy.remote.box.stop - copy.remote.box.start <= copy.run_bytes
        assert sum(copy.num_bytes * panel.num_layers for panel in found for copy in panel.copies) == in_examples(plan)


def in_examples(plan: TransferPlan) -> int:
    """The bytes that the examples of all groups move."""
    maps = [block_maps(worker) for worker in (plan.local, *plan.remotes)]
    examples = [excerpt(plan, group, maps, None) for group in plan.local.groups]
    given = [drawn[0] for drawn in examples if drawn]
    return sum(spec.num_bytes for one in by_remote_group(plan) for request in given for spec in one.bind(**request))


@given(cases())
@fewer(10)
def test_every_worker_and_plan_has_a_picture(case: Case) -> None:
    """Whatever the views, there is a text and a well-formed SVG."""
    for value in (*case.destinations, *case.sources, *plans(case)):
        picture = show(value)
        assert ElementTree.fromstring(picture.svg).get("class") == "kvplan"
        assert bool(picture.text) == ("│" in picture.text)
