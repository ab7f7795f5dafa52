"""Boxes: what a cell moves of one run of tokens, as few strided boxes.

- S9: along each axis both sides' segments and the cell's intervals cut intervals of constant strides. A box is a
  product of these.
- S10: boxes that are alike, in the same regions, and whose offsets grow by one step on either side, are one box with
  one more extent: layers, K and V, the digits of an axis. Boxes that are alike elsewhere differ in their *origins*
  alone: layers in regions of their own. So one copy serves all layers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from kvplan.describe.axes import Segments
from kvplan.describe.views import TOKEN, Region
from kvplan.plan.cells import Cell
from kvplan.plan.sources import Part

Pair = tuple[int, int]

Origin = tuple[Region, int]
"""A region and an offset in it, in bytes."""

Dims = tuple[tuple[int, int, int], ...]
"""Extents, each with the strides of the destination and of the source, in bytes; by ascending stride of the first."""


@attrs.frozen
class Box:
    """Runs of ``length`` bytes along ``dims``, from ``offsets`` on in ``regions``; of each the destination's first."""

    regions: tuple[Region, Region]
    offsets: Pair
    length: int
    dims: Dims


@attrs.frozen
class Boxes:
    """Boxes that are alike: one from each of a side's ``origins`` on, of which the destination's come first."""

    origins: tuple[tuple[Origin, ...], tuple[Origin, ...]]
    length: int
    dims: Dims


def pieces(cell: Cell) -> Iterator[tuple[Pair, Dims]]:
    """What a cell moves of one token of one tensor: boxes by offsets on both sides and dims, rule S9."""
    (ours, theirs), axes = cell.sides, [axis for axis in cell.parts if axis != TOKEN]
    every = [_cut(cell.parts[axis], ours.segments[axis], theirs.segments[axis]) for axis in axes]
    for product in itertools.product(*every):
        offsets = sum(at[0] for at, _ in product), sum(at[1] for at, _ in product)
        yield offsets, tuple(itertools.chain.from_iterable(dims for _, dims in product))


def _cut(part: Part, ours: Segments, theirs: Segments) -> list[tuple[Pair, Dims]]:
    """The intervals of one axis that both sides step through evenly."""
    found: list[tuple[Pair, Dims]] = []
    for low, high in part.intervals.tolist():
        inner = {int(at) for side in (ours, theirs) for at in (*side.start, *side.stop) if low < at < high}
        cuts = sorted({low, high, *inner})
        for start, stop in itertools.pairwise(cuts):
            at = np.array([start])
            steps = [int(side.stride[np.searchsorted(side.start, start, "right") - 1]) for side in (ours, theirs)]
            found.append(((int(ours.at(at)[0]), int(theirs.at(at)[0])), ((stop - start, steps[0], steps[1]),)))
    return found


def nested(length: int, dims: Iterable[tuple[int, int, int]]) -> tuple[int, Dims]:
    """Dims by ascending stride of the destination, those that go on from one another joined; and the run's length.

    >>> nested(2, [(4, 256, 64), (32, 2, 2), (8, 1024, 256), (2, 64, 4096)])
    (64, ((2, 64, 4096), (32, 256, 64)))
    """
    made: list[tuple[int, int, int]] = []
    for extent, ours, theirs in sorted(dims, key=lambda dim: dim[1:]):
        if extent == 1:
            continue
        if not made and ours == theirs == length:
            length *= extent
        elif made and (ours, theirs) == (made[-1][0] * made[-1][1], made[-1][0] * made[-1][2]):
            made[-1] = made[-1][0] * extent, *made[-1][1:]
        else:
            made.append((extent, ours, theirs))
    return length, tuple(made)


def merged(boxes: Iterable[Box]) -> tuple[Boxes, ...]:
    """As few boxes as rule S10 makes of them: again and again the steps that most boxes are apart."""
    found = list(boxes)
    while len(fewer := list(_joined(found))) < len(found):
        found = fewer
    alike: dict[tuple[int, Dims], list[Box]] = {}
    for box in found:
        alike.setdefault((box.length, box.dims), []).append(box)
    return tuple(Boxes((_origins(same, 0), _origins(same, 1)), *shape) for shape, same in alike.items())


def _origins(boxes: Iterable[Box], side: int) -> tuple[Origin, ...]:
    return tuple((box.regions[side], box.offsets[side]) for box in boxes)


def _joined(boxes: Iterable[Box]) -> Iterator[Box]:
    """Boxes with one more extent for each step that is frequent, where there are any."""
    alike: dict[Any, list[Pair]] = {}
    for box in boxes:
        alike.setdefault((box.regions, box.length, box.dims), []).append(box.offsets)
    for (regions, length, dims), offsets in alike.items():
        for start, extent in _chains(sorted(offsets)):
            yield Box(regions, start, *nested(length, [*dims, extent]))


def _chains(offsets: Sequence[Pair]) -> Iterator[tuple[Pair, tuple[int, int, int]]]:
    """Offsets as chains by the step that is most frequent between neighbours: where each begins, its extent and step.

    >>> list(_chains([(0, 0), (10, 8), (110, 24), (210, 40), (310, 56)]))
    [((0, 0), (1, 100, 16)), ((10, 8), (4, 100, 16))]
    """
    steps = [(there[0] - here[0], there[1] - here[1]) for here, there in itertools.pairwise(offsets)]
    usual = Counter(step for step in steps if min(step) >= 0).most_common(1)
    step, first = usual[0][0] if usual else (0, 0), 0
    for last in range(len(offsets)):
        if last == len(steps) or steps[last] != step:
            yield offsets[first], (last - first + 1, *step)
            first = last + 1
