"""Match (M)."""

from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from kvplan import Axis, Group, KVPlanError, Region, View, Worker
from kvplan.plan.match import AxisSlice, Sources, SourceViews, match
from tests.small import engine


def with_views(worker: Worker, change) -> Worker:
    return attrs.evolve(worker, views=tuple(change(view) for view in worker.views))


def test_m2_what_only_a_source_has_is_left_alone():
    """plan.M2: extra tensors of a source are ignored."""
    (ours,), (theirs,) = engine("decode", layers=1), engine("prefill", layers=3)
    assert [m.names for m in match(ours, Sources([theirs]))] == [("layers.0",)]


def renamed(view: View, old: str, new: str) -> View:
    axes = tuple(attrs.evolve(a, name=new if a.name == old else a.name) for a in view.axes)
    return attrs.evolve(view, axes=axes)


@pytest.mark.parametrize(
    ("code", "field", "change", "values"),
    [
        ("AXES", "the axes", lambda view: renamed(view, "dim", "width"), ("dim head kv", "head kv width")),
        ("DTYPE", "the dtype", lambda view: attrs.evolve(view, dtype="float16"), ("bfloat16", "float16")),
        ("SIZE", "the size of axis 'head'", lambda view: attrs.evolve(view, axes=grown(view, "head")), (4, 5)),
    ],
)
def test_m3_a_difference_names_the_field_and_both_values(code, field, change, values):
    """plan.M3: whatever differs, the message gives the tensor, the field and each side's value."""
    (ours,), (theirs,) = engine("decode"), engine("prefill")
    with pytest.raises(KVPlanError) as caught:
        match(ours, Sources([with_views(theirs, change)]))
    error = caught.value
    assert (error.code, error.details["field"], error.details["tensor"]) == (code, field, "layers.0")
    assert (error.details["destination"], error.details["source"]) == values
    for side in ("destination decode/0", "source prefill/0"):
        assert side in str(error)


def test_m3_a_difference_names_the_first_source_that_has_it():
    """plan.M3: also where that source comes between others that list the same."""
    (ours,), sources = engine("decode", layers=1), engine("prefill", tp=3, layers=2)
    other, third = (with_views(one, lambda view: attrs.evolve(view, dtype="float16")) for one in sources[1:])
    second = attrs.evolve(other, views=other.views[:1])
    with pytest.raises(KVPlanError, match=r"DTYPE: .* \(source prefill/1\)"):
        match(ours, Sources([sources[0], second, third]))


def grown(view: View, name: str) -> tuple[Axis, ...]:
    return tuple(attrs.evolve(a, size=a.size + (a.name == name)) for a in view.axes)


@pytest.mark.parametrize(
    ("ours", "theirs", "hint"),
    [("int8", "uint8", True), ("uint8", "int8", True), ("bfloat16", "float16", False), ("bfloat16", "uint8", False)],
)
def test_m3_bytes_of_one_meaning_may_be_described_alike(ours, theirs, hint):
    """plan.M3: the hint is for elements of one byte, whatever engines call them."""
    mine, other = (
        Worker(
            name, 0, [Region("r", 0, 64)], [Group("g")], [View("t", "g", "r", dtype, [Axis("dim", 0, 4, 4, 2)], 1, 8)]
        )
        for name, dtype in (("d", ours), ("p", theirs))
    )
    with pytest.raises(KVPlanError, match=r"^DTYPE: ") as caught:
        match(mine, Sources([other]))
    assert ("describe both sides as uint8" in str(caught.value)) == hint


def test_m5_equal_layers_are_one_match_and_others_are_not():
    """plan.M5: layers of one geometry share a match; a layer of another dtype has its own."""
    (ours,), (theirs,) = engine("decode", layers=4), engine("prefill", layers=4)

    def change(view: View) -> View:
        return attrs.evolve(view, dtype="float16") if view.name == "layers.2" else view

    found = match(with_views(ours, change), Sources([with_views(theirs, change)]))
    assert [m.names for m in found] == [("layers.0", "layers.1", "layers.3"), ("layers.2",)]


def test_m4_another_model_is_no_source() -> None:
    """plan.M4: the same tensors of another model are another cache, whichever worker of the sources runs it."""
    (ours,), sources = engine("decode"), engine("prefill", tp=2)
    ours, same, other = (attrs.evolve(one, model=model) for one, model in zip((ours, *sources), "aab", strict=True))
    with pytest.raises(KVPlanError) as caught:
        match(ours, Sources([same, other]))
    assert str(caught.value) == (
        "MODEL: cannot pair workers: expected model 'a' (destination decode/0), got 'b' (source prefill/1) "
        "(if their caches are equal, give both workers the same model)"
    )


def test_m4_the_facts_that_differ_are_named() -> None:
    """plan.M4: of two models with many facts, an error names the ones that differ, with both values."""
    (ours,), (theirs,) = engine("decode"), engine("prefill")
    same = {f"config.key{i}": i for i in range(200)}
    ours = attrs.evolve(ours, model={**same, "config.rope_theta": 10000, "quantization": "fp8"})
    with pytest.raises(KVPlanError) as caught:
        match(ours, Sources([attrs.evolve(theirs, model={**same, "config.rope_theta": 500000})]))
    assert str(caught.value) == (
        'MODEL: cannot pair workers: expected config.rope_theta 10000, quantization "fp8" (destination decode/0), got '
        "config.rope_theta 500000, quantization none (source prefill/0) "
        "(if their caches are equal, give both workers the same model)"
    )
    # in any order of keys, facts are the same model
    theirs = attrs.evolve(theirs, model={"quantization": "fp8", "config.rope_theta": 10000, **same})
    match(ours, Sources([theirs]))


def test_m4_an_unknown_model_goes_with_any() -> None:
    """plan.M4: a worker that does not say which model it runs is not refused, on either side."""
    (ours,), (theirs,) = engine("decode"), engine("prefill")
    for mine, other in (("a", "a"), ("a", ""), ("", "b")):
        assert match(attrs.evolve(ours, model=mine), Sources([attrs.evolve(theirs, model=other)]))


def geometry(*intervals):
    """All that slices need of a geometry: the intervals that it has of the axis ``head``."""
    return SimpleNamespace(segments={"head": SimpleNamespace(covered=intervals, start=np.zeros(len(intervals)))})


def test_slices_are_computed_once():
    """The slices of equal coordinates are one object, for all destinations of a mesh."""
    views = SourceViews(((0, geometry((0, 4))),), (0,))
    assert views.slices(geometry((0, 2)), "head", 1) is views.slices(geometry((0, 2)), "head", 1)
    assert views.slices(geometry((0, 2)), "head", 1) is not views.slices(geometry((0, 3)), "head", 1)


def test_a_slice_has_a_size_a_span_and_a_shape():
    """The coordinates in it, from the first to past the last; its shape is the same wherever it begins."""
    one, other, third = (
        AxisSlice(np.array(intervals), np.ones(1, bool))
        for intervals in ([[2, 4], [6, 9]], [[12, 14], [16, 19]], [[2, 4], [7, 10]])
    )
    assert (one.size, one.span, other.span) == (5, (2, 9), (12, 19))
    assert one.shape == other.shape != third.shape
    assert str(AxisSlice(np.array([[2 * n, 2 * n + 1] for n in range(40)]), np.ones(1, bool))).endswith(
        "[30, 31) and 24 more"
    )
