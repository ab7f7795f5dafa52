"""Boxes: what moves, as few strided boxes (S9, S10)."""

from __future__ import annotations

import itertools

import attrs

from kvplan import Region
from kvplan.boxes import Box, Pair, merged, nested

KV, STAGING = Region("kv", 0, 1 << 20), Region("staging", 1 << 30, 1 << 20)


def box(ours: int, theirs: int, length: int = 8, region: Region = KV) -> Box:
    return Box((region, STAGING), (ours, theirs), length, ())


def places(found: Box) -> list[Pair]:
    """Where all runs of a box begin, on both sides."""
    made = []
    for point in itertools.product(*(range(extent) for extent, _, _ in found.dims)):
        steps = list(zip(point, found.dims, strict=True))
        ours, theirs = (sum(i * dim[side] for i, dim in steps) for side in (1, 2))
        made.append((found.offsets[0] + ours, found.offsets[1] + theirs))
    return made


def test_layers_of_one_step_are_one_box() -> None:
    """S10: 28 layers, as far from each other as the next on either side."""
    (found,) = merged([box(i * 4096, 512 + i * 64) for i in range(28)])
    assert found == Box((KV, STAGING), (0, 512), 8, ((28, 4096, 64),))


def test_layers_and_halves_are_one_box() -> None:
    """S10: steps inside steps, such as K and V of each layer."""
    (found,) = merged([box(i * 4096 + half * 100, i * 64 + half * 32) for i in range(5) for half in (0, 1)])
    assert found == Box((KV, STAGING), (0, 0), 8, ((2, 100, 32), (5, 4096, 64)))


def test_neighbours_on_both_sides_become_longer_runs() -> None:
    """S10: what goes on where another ends, on both sides, is one run."""
    assert merged([box(i * 8, 64 + i * 8) for i in range(4)]) == (box(0, 64, 32),)


def test_what_differs_stays_apart() -> None:
    """S10: boxes of another region, another length or another step are others, and no step goes backwards."""
    other = attrs.evolve(KV, name="other")
    apart = [box(0, 0), box(100, 50, region=other), box(100, 100, length=4)]
    assert set(merged(apart)) == set(apart)
    backwards = [box(0, 100), box(100, 0)]
    assert set(merged(backwards)) == set(backwards)


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
