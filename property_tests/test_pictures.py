"""PICTURES: what a picture says of a plan is true of any plan, and any worker and plan has a picture."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from hypothesis import given

from kvplan import TransferPlan, show
from kvplan.display.blockmap import block_maps
from kvplan.display.copies import by_remote_group, excerpt, panels
from kvplan.testing.strategies import Case, cases
from property_tests import fewer


def plans(case: Case) -> Iterator[TransferPlan]:
    """The plan of each worker, reads and writes."""
    yield from map(case.reads, case.destinations)
    yield from map(case.writes, case.sources)


def words(coordinates: str) -> set[tuple[str, frozenset[str]]]:
    """Tensors with their intervals, in no order: each side has the axes in the order of its own views."""
    parts = (one.partition(": ") for one in coordinates.split("; "))
    return {(tensor, frozenset(intervals.split(", "))) for tensor, _, intervals in parts}


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
