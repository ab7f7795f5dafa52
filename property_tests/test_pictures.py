"""PICTURES: what a picture says of a plan is true of any plan, and any plan has a picture."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from hypothesis import given

from kvplan import TransferPlan
from kvplan.show import show
from kvplan.show.pages import pages
from kvplan.show.panels import panels
from kvplan.show.samples import sample
from kvplan.testing.strategies import Case, cases
from property_tests import fewer


def plans(case: Case) -> Iterator[TransferPlan]:
    """The plan of each worker, reads and writes."""
    yield from map(case.reads, case.destinations)
    yield from map(case.writes, case.sources)


def words(coordinates: str) -> set[tuple[str, frozenset[str]]]:
    """Tensors with their intervals, in no order: each side tells axes as its own views have them."""
    parts = (one.partition(": ") for one in coordinates.split("; "))
    return {(tensor, frozenset(intervals.split(", "))) for tensor, _, intervals in parts}


@given(cases())
@fewer(5)
def test_panels_are_true_and_complete(case: Case) -> None:
    """Each side finds a copy's coordinates by its own addresses and views, and both find the same.

    The copies of all panels, each as often as it has layers, are the bytes that the samples of all groups move. A real
    request is as true.
    """
    for plan in plans(case):
        request, found = case.request(plan), panels(plan)
        real = panels(plan, (request["local"], request["remote"], request["tokens"]))
        for copy in (copy for panel in (*found, *real) for copy in panel.copies):
            assert words(copy.local.coordinates) == words(copy.remote.coordinates)
            assert copy.num_bytes == copy.remote.box.stop - copy.remote.box.start <= copy.run_bytes
        assert sum(copy.num_bytes * panel.num_layers for panel in found for copy in panel.copies) == sampled(plan)


def sampled(plan: TransferPlan) -> int:
    """The bytes that the samples of all groups move."""
    far, moved = [pages(worker) for worker in plan.remotes], 0
    for group in plan.local.groups:
        if request := sample(plan, group, far):
            specs = plan.bind(local=request[0], remote=request[1], tokens=request[2])
            moved += sum(spec.num_bytes for spec in specs)
    return moved


@given(cases())
@fewer(10)
def test_every_worker_and_plan_has_a_picture(case: Case) -> None:
    """Whatever the views, there is a text and a well-formed SVG."""
    for value in (*case.destinations, *case.sources, *plans(case)):
        picture = show(value)
        assert ElementTree.fromstring(picture.svg).get("class") == "kvplan"
        assert bool(picture.text) == ("│" in picture.text)
