"""show: pictures of workers and plans."""

from __future__ import annotations

import pytest

from kvplan import KVPlanError, Worker, plan_mesh, plan_reads
from kvplan.display import show
from tests.small import engine


def test_the_numbers_of_bytes_are_explained() -> None:
    """A picture says what the numbers in a row of bytes are."""
    for value in (engine("decode")[0], plan_reads(engine("decode")[0], engine("prefill"))):
        assert show(value).endswith("byte: offset in one block")


def test_an_empty_picture() -> None:
    """A worker without views and a plan that moves nothing have empty pictures."""
    nothing = Worker("decode", 0, (), (), ())
    for value in (nothing, plan_reads(nothing, engine("p"))):
        assert show(value) == ""


def test_a_mesh_and_an_engine_have_a_hint() -> None:
    """The refusal of a mesh or an engine has a hint how to draw one plan or worker; other refusals have none."""
    mesh = plan_mesh(engine("d"), engine("p"))
    with pytest.raises(
        KVPlanError, match=r"got MeshPlan \(a mesh has a plan for each worker: show\(mesh.plans\[0\]\)\)$"
    ):
        show(mesh)
    with pytest.raises(KVPlanError, match=r"got tuple \(an engine is a tuple of workers: show\(engine\[0\]\)\)$"):
        show(engine("p"))
    with pytest.raises(KVPlanError, match=r"got NoneType$"):
        show(None)


def test_a_width_is_a_number_of_characters() -> None:
    """Lines of the text have at most the width given, which is at least 1."""
    plan = plan_reads(engine("decode")[0], engine("prefill", tp=2, tokens=2, order="NH"))
    wide, narrow = show(plan), show(plan, width=50)
    assert max(map(len, narrow.splitlines())) <= 50 < max(map(len, wide.splitlines()[2:])) <= 120
