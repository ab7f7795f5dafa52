"""Cells (C)."""

import itertools

import numpy as np
import pytest

from kvplan import KVPlanError
from kvplan.cells import cells, choose, parts
from kvplan.match import match
from tests.small import engine


def served(ours, sources):
    """(source rank, axis box) of every cell of a one-layer destination."""
    found = cells(match(ours, sources), ours, sources)
    return [
        (
            sources[cell.match.sources[cell.source][0]].rank,
            cell.parts["head"].intervals.tolist(),
            cell.parts["token"].intervals[:, 0].tolist(),
        )
        for cell in found
    ]


def test_c1_heads_held_alike_are_one_part():
    """C1: a destination of heads [0, 6) over sources of three heads each has two parts, not six."""
    (ours,) = engine("d", tp=1, heads=6, layers=1)
    sources = engine("p", tp=2, heads=6, layers=1)
    (found,) = match(ours, sources)
    axes = parts(found, 0)
    assert [part.intervals.tolist() for part in axes["head"]] == [[[0, 3]], [[3, 6]]]
    assert [part.held.tolist() for part in axes["head"]] == [[True, False], [False, True]]


def test_c1_positions_held_alike_are_one_part():
    """C1: context rank 1 of 2 needs odd positions; of sources spread over 4 ranks, two hold them."""
    ours = engine("d", layers=1, contexts=(2, 1))[1]
    sources = engine("p", layers=1, contexts=(4, 1))
    assert [(rank, turn) for rank, _, turn in served(ours, sources)] == [(1, [1]), (3, [3])]


@pytest.mark.parametrize(("src", "dst"), [(2, 3), (3, 2), (4, 6), (3, 8), (1, 5), (5, 1), (8, 8), (12, 5)])
def test_c2_every_head_has_exactly_one_source(src, dst):
    """C2: without any ratio between the sizes, the cells' boxes tile each destination's heads."""
    sources = engine("p", tp=src, heads=24, layers=1)
    for ours in engine("d", tp=dst, heads=24, layers=1):
        heads = [h for _, box, _ in served(ours, sources) for low, high in box for h in range(low, high)]
        axis = next(a for a in ours.views[0].axes if a.name == "head")
        assert sorted(heads) == list(range(axis.start, axis.stop))


def test_c2_what_nobody_holds_is_listed_whole():
    """C2: with two of four sources lost, one error lists both missing intervals."""
    (ours,) = engine("d", tp=1, heads=8)
    sources = [engine("p", tp=4, heads=8)[i] for i in (0, 2)]
    with pytest.raises(KVPlanError) as caught:
        cells(match(ours, sources), ours, sources)
    assert str(caught.value) == (
        "COVER: cannot plan for d/0: expected every part of its tensors to be held by a source, "
        "got layers.0 and 1 like it: head [2, 4) [6, 8) of 8"
    )


def test_c2_positions_that_nobody_holds_are_listed():
    """C2: with one of two context ranks lost, the error says which positions are missing."""
    (ours,) = engine("d", layers=1)
    sources = engine("p", layers=1, contexts=(2, 1))[:1]
    with pytest.raises(KVPlanError, match=r"layers\.0: positions \[1, 2\) of every 2$"):
        cells(match(ours, sources), ours, sources)


def fewest(held):
    """The size of the smallest set of sources that serves every cell, by trying all of them."""
    for size in range(1, held.shape[1] + 1):
        for some in itertools.combinations(range(held.shape[1]), size):
            if held[:, some].any(1).all():
                return size
    raise AssertionError


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(("src", "dst"), list(itertools.product([1, 2, 3, 4, 6, 8, 16], repeat=2)))
def test_c3_no_set_of_fewer_sources_would_do(heads, src, dst):
    """C3: for tensor-parallel engines of any sizes, replicated or overlapping, the peers are as few as can be."""
    sources = engine("p", tp=src, heads=heads, layers=1)
    for ours in engine("d", tp=dst, heads=heads, layers=1)[:: max(dst // 4, 1)]:
        (found,) = match(ours, sources)
        held = np.array([part.held for part in parts(found, 0)["head"]])
        assert len({rank for rank, _, _ in served(ours, sources)}) == fewest(held)


@pytest.mark.parametrize(("src", "dst", "heads"), [(16, 8, 1), (16, 4, 4), (8, 16, 4), (4, 4, 1), (8, 32, 2)])
def test_c4_replicas_share_the_load(src, dst, heads):
    """C4: over all destinations no source serves more than one above its fair share of the replicas in use."""
    sources = engine("p", tp=src, heads=heads, layers=1)
    load = np.zeros(src, int)
    for ours in engine("d", tp=dst, heads=heads, layers=1):
        for rank, _, _ in served(ours, sources):
            load[rank] += 1
    assert load.max() == max(-(-dst // src), 1)


def test_c4_the_load_of_one_destination_is_even():
    """C4: among needed sources the one with the fewest bytes so far takes the next cell."""
    held = np.array([[1, 0], [0, 1], [1, 1], [1, 1], [1, 1]], bool)
    owner = choose(held, np.array([4.0, 1, 2, 1, 1]), 0)
    load = np.bincount(owner, np.array([4.0, 1, 2, 1, 1]))
    assert owner[:2].tolist() == [0, 1]
    assert sorted(load.tolist()) == [4, 5]


def test_c4_every_worker_comes_to_the_same_answer():
    """C4: the choice depends on the destination's rank and the sources alone, so repeating it changes nothing."""
    sources = engine("p", tp=8, heads=2, layers=1)
    for ours in engine("d", tp=4, heads=2, layers=1):
        assert served(ours, sources) == served(ours, sources)
