"""Boxes: what moves, as few strided boxes (S9, S10)."""

from __future__ import annotations

import itertools

import attrs

from kvplan import Region
from kvplan.staging.boxes import Box, Boxes, Dims, Pair, merged, nested

KV, STAGING = Region("kv", 0, 1 << 20), Region("staging", 1 << 30, 1 << 20)


def box(ours: int, theirs: int, length: int = 8, region: Region = KV) -> Box:
    return Box((region, STAGING), (ours, theirs), length, ())


def boxes(*origins: Pair, length: int = 8, dims: Dims = ()) -> Boxes:
    """Boxes of the one region and the other, from such offsets on."""
    return Boxes((tuple((KV, ours) for ours, _ in origins), tuple((STAGING, at) for _, at in origins)), length, dims)


def places(found: Boxes) -> list[Pair]:
    """Where all runs of boxes begin, on both sides."""
    made = []
    for (_, here), (_, there) in zip(*found.origins, strict=True):
        for point in itertools.product(*(range(extent) for extent, _, _ in found.dims)):
            steps = list(zip(point, found.dims, strict=True))
            ours, theirs = (sum(i * dim[side] for i, dim in steps) for side in (1, 2))
            made.append((here + ours, there + theirs))
    return made


def test_layers_of_one_step_are_one_box() -> None:
    """S10: 28 layers, as far from each other as the next on either side."""
    assert merged([box(i * 4096, 512 + i * 64) for i in range(28)]) == (boxes((0, 512), dims=((28, 4096, 64),)),)


def test_layers_and_halves_are_one_box() -> None:
    """S10: steps inside steps, such as K and V of each layer."""
    found = merged([box(i * 4096 + half * 100, i * 64 + half * 32) for i in range(5) for half in (0, 1)])
    assert found == (boxes((0, 0), dims=((2, 100, 32), (5, 4096, 64))),)


def test_neighbours_on_both_sides_become_longer_runs() -> None:
    """S10: what goes on where another ends, on both sides, is one run."""
    assert merged([box(i * 8, 64 + i * 8) for i in range(4)]) == (boxes((0, 64), length=32),)


def test_what_is_alike_elsewhere_differs_in_its_origins() -> None:
    """S10: boxes of other regions, or one step back, are origins of their own; those of another length are others."""
    other = attrs.evolve(KV, name="other")
    apart = [box(0, 0), box(100, 50, region=other), box(4, 100, length=4)]
    alike, short = merged(apart)
    assert alike == Boxes((((KV, 0), (other, 100)), ((STAGING, 0), (STAGING, 50))), 8, ())
    assert short == boxes((4, 100), length=4)
    assert merged([box(0, 100), box(100, 0)]) == (boxes((0, 100), (100, 0)),)


def test_no_run_is_lost_or_made() -> None:
    """S10: whatever the offsets, the boxes made of them have the same runs."""
    for seed in range(200):
        count = 1 + seed % 7
        offsets = {((i * i * (seed % 3) + i * 16) * 8, (i % (1 + seed % 5)) * 48 + i * 8) for i in range(count)}
        found = merged([box(*offset) for offset in offsets])
        pieces = [
            (ours + more, theirs + more)
            for one in found
            for ours, theirs in places(one)
            for more in range(0, one.length, 8)
        ]
        assert sorted(pieces) == sorted(offsets)


def test_dims_go_by_the_stride_of_the_destination() -> None:
    """Finest first, those of one coordinate left out, joined where one continues another on both sides."""
    assert nested(2, [(3, 1024, 100), (1, 0, 0), (64, 2, 2), (4, 128, 512), (2, 512, 2048)]) == (
        128,
        ((8, 128, 512), (3, 1024, 100)),
    )
