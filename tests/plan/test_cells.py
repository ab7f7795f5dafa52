"""Cells (C)."""

import itertools

import attrs
import numpy as np
import pytest

from kvplan import Axis, Group, KVPlanError, Region, View, Worker, plan_reads
from kvplan._text import FEW
from kvplan.plan.cells import axis_slices, cells, choose_sources
from kvplan.plan.match import AxisSlice, Sources, match
from tests.counted import numbers_of
from tests.small import engine


def served(ours, sources):
    """(source rank, axis box) of every cell of a one-layer destination."""
    found = cells(match(ours, Sources(sources)))
    return [
        (
            sources[cell.match.sources.worker[cell.source]].rank,
            cell.slices["head"].intervals.tolist() if "head" in cell.slices else [[0, 1]],
            cell.slices["token"].intervals[:, 0].tolist(),
        )
        for cell in found
    ]


def test_c2_what_nobody_holds_is_listed_whole():
    """plan.C2: with two of four sources lost, one error lists both missing intervals."""
    (ours,) = engine("d", tp=1, heads=8)
    sources = [engine("p", tp=4, heads=8)[i] for i in (0, 2)]
    with pytest.raises(KVPlanError) as caught:
        cells(match(ours, Sources(sources)))
    assert str(caught.value) == (
        "COVER: cannot plan for d/0: expected a source for every slice of its tensors, "
        "got layers.0 and 1 like it: head [2, 4) [6, 8) of 8"
    )


def states(name, *names):
    """A worker with a state of four bytes for each name."""
    views = [View(each, "g", "r", "uint8", [Axis("dim", 0, 4, 4, 1)], 1, 4, 4 * i) for i, each in enumerate(names)]
    return Worker(name, 0, [Region("r", 0, 4 * len(names))], [Group("g")], views)


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (["layers.0.states_of_a_convolution", "layers.0.attention"], "the sources have 'layers.0.attention': "),
        (
            [f"layers.0.states_of_a_convolution_{n}" for n in "dabc"],
            "the sources have 'layers.0.states_of_a_convolution_d', 'layers.0.states_of_a_convolution_a', "
            "'layers.0.states_of_a_convolution_b': ",
        ),
        (
            [*(f"layers.0.states_of_a_convolution_{n}" for n in range(FEW)), "layers.0.attention"],
            "the sources have 'layers.0.states_of_a_convolution_0', ",
        ),
        (["layers.1.attn"], "name tensors in not_transferred"),
    ],
)
def test_m2_the_hint_names_what_is_nearest_to_a_missing_tensor(names, hint):
    """plan.M2: of the first names that the sources have for its layer, those that are alike, else three of them."""
    with pytest.raises(KVPlanError, match=r"^TENSOR: ") as caught:
        plan_reads(states("d", "layers.0.attn"), [states("p", *names)])
    assert caught.value.hint.startswith(hint)


def fewest(held):
    """The size of the smallest set of sources that serves every cell, by trying all of them."""
    for size in range(1, held.shape[1] + 1):
        for some in itertools.combinations(range(held.shape[1]), size):
            if held[:, some].any(1).all():
                return size
    raise AssertionError


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
def test_c3_no_set_of_fewer_sources_would_do(heads):
    """plan.C3: for tensor-parallel engines of any sizes, replicated or overlapping, the peers are as few as can be."""
    for src, dst in itertools.product([1, 2, 3, 4, 6, 8, 16], repeat=2):
        sources = engine("p", tp=src, heads=heads, layers=1)
        for ours in engine("d", tp=dst, heads=heads, layers=1)[:: max(dst // 4, 1)]:
            (found,) = match(ours, Sources(sources))
            axes = axis_slices(found, 0)
            held = np.array([each.held for each in axes["head" if heads > 1 else "kv"]])
            assert len({rank for rank, _, _ in served(ours, sources)}) == fewest(held), (src, dst, ours.rank)


@pytest.mark.parametrize(("src", "dst", "heads"), [(16, 8, 1), (16, 4, 4), (8, 16, 4), (4, 4, 1), (8, 32, 2)])
def test_c4_replicas_share_the_load(src, dst, heads):
    """plan.C4: over all destinations no source serves more than one above its fair share of the replicas in use."""
    sources = engine("p", tp=src, heads=heads, layers=1)
    load = np.zeros(src, int)
    for ours in engine("d", tp=dst, heads=heads, layers=1):
        for rank, _, _ in served(ours, sources):
            load[rank] += 1
    assert load.max() == max(-(-dst // src), 1)


def test_c4_states_do_not_weigh_on_who_sends_tokens():
    """plan.C4: a source of a large state is as likely to send tokens as one without."""
    held = np.array([[1, 0], [0, 1], [1, 1], [1, 1]], bool)
    weight, states = np.array([100.0, 1, 2, 2]), np.array([True, True, False, False])
    assert sorted(choose_sources(held, weight, states, 0)[2:].tolist()) == [0, 1]


def of_tensors(ours, sources):
    """The rank that serves each tensor of a destination."""
    found = cells(match(ours, Sources(sources)))
    ranks = [sources[cell.match.sources.worker[cell.source]].rank for cell in found]
    return {name: rank for cell, rank in zip(found, ranks, strict=True) for name in cell.match.names}


def test_c2_what_is_missing_is_told_by_all_its_axes():
    """plan.C2: intervals that touch are one; several, and several axes, are listed."""
    held = np.ones(1, bool)
    assert str(AxisSlice(intervals=np.array([[0, 5], [7, 8]]), held=held)) == "[0, 5) [7, 8)"
    (ours,) = engine("d", layers=1)
    sources = [engine("p", tp=2, layers=1, contexts=(2, 1))[rank] for rank in (0, 1, 2)]
    with pytest.raises(KVPlanError) as caught:
        cells(match(ours, Sources(sources)))
    assert caught.value.details["missing"] == ("layers.0: head [2, 4) of 4, positions [1, 2) of every 2",)


@pytest.mark.parametrize(
    ("shared", "weight", "owners"),
    [
        ([[1, 1, 0], [1, 1, 0], [1, 1, 0]], [1, 1, 2], [1, 1, 0]),  # the heaviest is the first to be given away
        ([[1, 1, 0], [1, 1, 1]], [1, 5], [0, 1]),  # before it, those that fewer sources could serve
        ([[1, 1, 0]] * 4, [3, 2, 2, 1], [0, 1, 1, 0]),  # loads add up
    ],
)
def test_c4_lots_go_to_the_source_with_the_least_load(shared, weight, owners):
    """plan.C4: of three sources that are asked anyway."""
    held = np.concatenate([np.eye(3, dtype=bool), np.array(shared, bool)])
    found = choose_sources(held, np.array([0.0, 0, 0, *weight]), np.zeros(len(held), bool), 0)
    assert found[3:].tolist() == owners


def flat(name, tensors):
    """A worker with tensors, each by its name and number of elements of a type, in a region of its own."""
    regions = [Region(key, (i + 1) << 40, 64 * 10) for i, key in enumerate(tensors)]
    views = [
        View(
            key,
            "attn",
            key,
            dtype,
            (Axis("token", 0, 1, 1, size * itemsize), Axis("dim", 0, size, size, itemsize)),
            10,
            64,
        )
        for key, (size, dtype, itemsize) in tensors.items()
    ]
    return Worker(name, 0, regions, [Group("attn", 1)], views)


def test_c4_loads_are_bytes():
    """plan.C4: one source sends 64 bytes in one cell, another 28 in two: what both have comes from the second."""
    every = {
        "a": (32, "bfloat16", 2),
        "b": (20, "uint8", 1),
        "c": (8, "uint8", 1),
        "d": (4, "uint8", 1),
    }
    sources = [flat(name, {key: every[key] for key in keys}) for name, keys in (("p", "ad"), ("q", "bcd"))]
    found = cells(match(flat("decode", every), Sources(sources)))
    assert {cell.match.names: cell.match.sources.worker[cell.source] for cell in found} == {
        ("a",): 0,
        ("b",): 1,
        ("c",): 1,
        ("d",): 1,
    }


def test_c4_equal_replica_sets_are_weighed_in_one_order():
    """plan.C4: each of four sources has a tensor alone, and one with each other; workers must not come to other
    choices.
    """
    held = [(i,) for i in range(4)] + list(itertools.combinations(range(4), 2))
    every = {str(which): (4, "uint8", 1) for which in held}
    sources = [
        attrs.evolve(flat("p", {key: every[key] for key in every if str(rank) in key}), rank=rank) for rank in range(4)
    ]
    served = of_tensors(flat("d", every), sources)
    assert [served[str(which)] for which in held] == [0, 1, 2, 3, 0, 0, 0, 1, 1, 2]


def test_c2_each_tensor_that_is_not_whole_is_told():
    """plan.C2: of tensors that differ each is listed, in one error that names the sources that were looked through."""
    ours, whole = (flat(name, {"a": (8, "uint8", 1), "b": (6, "uint8", 1)}) for name in ("d", "p"))
    views = [attrs.evolve(view, axes=(view.axes[0], attrs.evolve(view.axes[1], stop=4))) for view in whole.views]
    with pytest.raises(KVPlanError, match=r"got a: dim \[4, 8\) of 8; b: dim \[4, 6\) of 6$") as caught:
        cells(match(ours, Sources([attrs.evolve(whole, views=views)])))
    assert caught.value.details["sources"] == ("p/0",)


def test_what_all_tensors_take_is_counted():
    """Two tensors of unequal size are a cell each. Either axis of each, tokens and dim, has two bounds."""
    ours, theirs = (flat(name, {"a": (8, "uint8", 1), "b": (6, "uint8", 1)}) for name in "dp")
    numbers = numbers_of(lambda budget: plan_reads(ours, [theirs], budget=budget))
    assert numbers["cells"] == 2
    assert numbers["ranges of axes"] == 2 * 2 * 2


def test_c1_contexts_of_too_long_a_cycle_are_refused(monkeypatch):
    """plan.C1: two and three ranks take six turns: as many as may be, and more than that."""
    ours, sources = engine("d", layers=1, contexts=(2, 1))[0], engine("p", layers=1, contexts=(3, 1))
    monkeypatch.setattr("kvplan.plan.cells.MAX_SEGMENTS", 6)
    assert cells(match(ours, Sources(sources)))
    monkeypatch.setattr("kvplan.plan.cells.MAX_SEGMENTS", 5)
    with pytest.raises(KVPlanError, match="expected at most 5 positions in a common cycle, got 6") as caught:
        cells(match(ours, Sources(sources)))
    assert dict(caught.value.details) == {"value": 6}
