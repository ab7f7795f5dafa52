"""Diagrams of blocks: columns of bytes by address, under headers with coordinates.

Those of a plan come in pairs, for the source and for the destination, that show the same copies.
What repeats is left out: of each axis a diagram has the first coordinates and the last, and those
at which something changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import attrs
import numpy as np

from kvplan.display.blocks import TENSOR, DrawnLayer, Interval, boxes, name_in_layer
from kvplan.display.copies import POSITION, CopyEnd, Panel

NOTE: Final = "byte: offset in one block"
"""The meaning of the numbers of bytes. They count from the first byte drawn of a block."""

MAX_COLUMNS: Final = 20
"""A drawing shows about so many copies of a plan, or boxes of a block, at most."""

MIN_COLUMNS: Final = 12
"""A drawing too wide for a line shows fewer, down to this number; then it goes on below."""

MAX_VALUES: Final = 8
"""Of an axis on which copies have more intervals than this, some are left out."""

OPENED: Final = (TENSOR, "token", "head", "kv")
"""Axes along which a drawing of a block has boxes apart. Others are drawn whole."""

RowLabels = tuple[str, ...]
"""The texts above a column, the slowest axis first: all, or those of what it is within."""

Fill = Literal["bytes", "rest", "fold"]
"""Bytes that are shown; bytes that are not copied or of others; bytes that are left out."""


@attrs.frozen
class Column:
    """Bytes of a block from ``start`` on; they are one end of the copy of that number."""

    fill: Fill
    labels: RowLabels
    start: int
    copy: int | None = None


@attrs.frozen
class Diagram:
    """Columns by ascending address, and the names of the rows of their labels."""

    axes: tuple[str, ...]
    columns: tuple[Column, ...]

    def headers(self, row: int) -> Iterator[tuple[int, int, Fill, str]]:
        """Yield the first and the last column, kind and text of each header in a row.

        Neighbours whose labels agree up to the row have one. A column that is ``rest`` or ``fold``
        has a header of that kind in the first row that it has no label in, and then empty ones.
        """
        first = 0
        while first < len(self.columns):
            labels = self.columns[first].labels
            last = first
            if len(labels) > row:
                while last + 1 < len(self.columns) and (
                    self.columns[last + 1].labels[: row + 1] == labels[: row + 1]
                ):
                    last += 1
                yield first, last, "bytes", labels[row]
            else:
                yield first, last, self.columns[first].fill if len(labels) == row else "bytes", ""
            first = last + 1


@attrs.frozen
class Drawing:
    """A title, a line of facts, and the diagrams one below the other; the fullest choice first."""

    title: str
    facts: str
    choices: Sequence[tuple[Diagram, ...]]


def common(one: RowLabels, other: RowLabels) -> RowLabels:
    """Return the labels with which both begin."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(label for label, _ in pairs)


@attrs.frozen
class _Box:
    """Bytes of a block that could be shown, with an interval on each axis that they have."""

    start: int
    stop: int
    intervals: Mapping[str, Interval | str]
    number: int


_Strip = tuple[RowLabels, int, Sequence[_Box]]
"""The labels of a block, the bytes that it has, and its boxes by ascending address."""


def block_drawing(title: str, facts: str, layers: Sequence[DrawnLayer]) -> Drawing:
    """Return the drawing of one block of a layer. Equal ones are drawn once."""
    layer = layers[0]
    found = [*_boxes(layer)]
    axes = _rows(layer, [box.intervals for box in found]) or layer.cells.axes[-1:]
    strip = (), layer.size_bytes + layer.rest_bytes, found
    values = [
        {(box.intervals[TENSOR], axis): held for axis, held in box.intervals.items()}
        for box in found
    ]
    choices = [
        (_diagram((), axes, [strip], shown),) for shown in _choices(values, [()] * len(found))
    ]
    return Drawing(title, facts, choices)


def _boxes(layer: DrawnLayer) -> Iterator[_Box]:
    """Yield the boxes of a block: cells side by side that differ along the fastest axes alone."""
    cells = layer.cells
    opened = [number for number, axis in enumerate(cells.axes) if axis in OPENED]
    is_apart = (cells.low[1:, opened] != cells.low[:-1, opened]).any(axis=1)
    is_apart |= cells.start[1:] != cells.stop[:-1]
    bounds = [0, *(np.flatnonzero(is_apart) + 1).tolist(), cells.start.size]
    number = itertools.count()
    for first, stop in itertools.pairwise(bounds):
        sides = [(cells.low[first:stop], cells.high[first:stop])]
        lengths = (cells.stop - cells.start)[first:stop]
        for box in boxes(sides, lengths, int(cells.itemsize[first])):
            part = slice(first + box.start, first + box.stop)
            lows, highs = cells.low[part].min(axis=0).tolist(), cells.high[part].max(axis=0)
            sizes = layer.views[int(cells.view[first])].sizes
            intervals: dict[str, Interval | str] = {}
            for axis, low, high in zip(cells.axes, lows, highs.tolist(), strict=True):
                if axis == TENSOR:
                    intervals[axis] = cells.names[low]
                elif sizes.get(axis, 1) > 1:
                    intervals[axis] = Interval(axis, low, high)
            begin, end = int(cells.start[part.start]), int(cells.stop[part.stop - 1])
            yield _Box(begin, end, intervals, next(number))


def _rows(layer: DrawnLayer, intervals: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the axes that say something: not all boxes have all of them."""
    sizes = dict(zip(layer.cells.axes, layer.cells.sizes, strict=True))
    rows = []
    for axis, size in sizes.items():
        name = axis if axis in intervals[0] or axis != "token" else POSITION
        held = {each[name] for each in intervals if name in each}
        whole = {Interval(name, 0, size)} if name != POSITION else set()
        if (axis == TENSOR and size > 1) or (axis != TENSOR and held - whole):
            rows.append(name)
    return tuple(rows)


def panel_drawing(panel: Panel) -> Drawing:
    """Return the drawing of the source's side and of the destination's."""
    ends = [[copy.remote for copy in panel.copies], [copy.local for copy in panel.copies]]
    if panel.operation != "READ":
        ends.reverse()
    sides = [_side(panel, side) for side in ends]
    values = []
    for copy in panel.copies:
        held: dict[Any, Any] = {
            (copy.local.tensor, axis): interval for axis, interval in copy.local.intervals.items()
        }
        values.append(held | {(copy.local.tensor, "block"): copy.local.ordinal})
    places = [
        (copy.remote_index, copy.remote.layer.region, copy.remote.ordinal, copy.local.ordinal)
        for copy in panel.copies
    ]
    choices = [
        tuple(_diagram(outer, axes, strips, shown) for outer, axes, strips in sides)
        for shown in _choices(values, places)
    ]
    return Drawing(panel.title, panel.facts, choices)


def _side(panel: Panel, ends: Sequence[CopyEnd]) -> tuple[RowLabels, RowLabels, list[_Strip]]:
    """Return the rows of blocks and of axes, and the blocks, by worker, region and ordinal."""
    by_block: dict[Any, list[tuple[int, CopyEnd]]] = {}
    for number, end in enumerate(ends):
        key = end.worker.key, end.layer.region, end.layer.offset, end.ordinal
        by_block.setdefault(key, []).append((number, end))
    has_regions = len({key[:3] for key in by_block}) > len({key[0] for key in by_block})
    has_blocks = not ends[0].layer.group.is_state
    outer = ("worker", *["region"] * has_regions, *["block"] * has_blocks)
    strips: list[_Strip] = []
    rows: dict[str, None] = {}
    for key in sorted(by_block):
        block = sorted(by_block[key], key=lambda member: member[1].start)
        _, end = block[0]
        ordinals = [f"{end.ordinal}"] * has_blocks
        labels = (end.worker.label, *[end.region] * has_regions, *ordinals)
        found = []
        for number, end in block:
            sizes = end.layer.views[end.view].sizes
            intervals: dict[str, Interval | str] = {
                axis: interval
                for axis, interval in end.intervals.items()
                if axis == POSITION or sizes.get(axis, 1) > 1
            }
            intervals[TENSOR] = name_in_layer(end.layer.views[end.view])
            found.append(_Box(end.start, end.stop, intervals, number))
        rows |= dict.fromkeys(_rows(end.layer, [box.intervals for box in found]))
        strips.append((labels, end.layer.size_bytes, found))
    # where all copies of each block have the same positions, the block says it
    if all(len({box.intervals.get(POSITION) for box in found}) == 1 for _, _, found in strips):
        rows.pop(POSITION, None)
    return outer, tuple(rows), strips


def _diagram(
    outer: RowLabels, axes: RowLabels, strips: Iterable[_Strip], shown: frozenset[int]
) -> Diagram:
    """Return the boxes that are shown, and what is between them."""
    columns: list[Column] = []

    def between(fill: Fill, labels: RowLabels, start: int) -> None:
        if fill == "fold" and columns and columns[-1].fill == "fold":
            labels = common(columns.pop().labels, labels)
        columns.append(Column(fill, labels, start))

    for block, size, found in strips:
        before: RowLabels = block
        reached = 0
        is_left_out = False
        for box in found:
            if box.number not in shown:
                is_left_out = True
                continue
            labels = (*block, *(f"{box.intervals.get(axis, '')}" for axis in axes))
            within = common(before, labels) if reached else block
            if is_left_out:
                between("fold", within, reached)
            elif reached < box.start:
                between("rest", within, reached)
            columns.append(Column("bytes", labels, box.start, box.number))
            before, reached, is_left_out = labels, box.stop, False
        if is_left_out:
            between("fold", block, reached)
        elif reached < size:
            between("rest", block, reached)
    return Diagram((*outer, *axes), tuple(columns))


def _choices(
    values: Sequence[Mapping[Any, Any]], places: Sequence[Any]
) -> Iterator[frozenset[int]]:
    """Yield the numbers of the boxes to show, fewer and fewer.

    Each axis keeps fewer and fewer of its ``values``, until those that have them are few. The
    first, the last and the second come first, then both sides of the first and of the last change
    of what ``places`` a value connects.
    """
    connected: dict[Any, dict[Any, set[Any]]] = {}
    for held, place in zip(values, places, strict=True):
        for axis, value in held.items():
            connected.setdefault(axis, {}).setdefault(value, set()).add(place)
    ranked = {axis: _ranked(places_of) for axis, places_of in connected.items()}
    for most in range(MAX_COLUMNS, MIN_COLUMNS - 1, -1):
        yield _chosen(values, ranked, most)


def _ranked(places_of: Mapping[Any, set[Any]]) -> list[Any]:
    """Return the values of an axis, those first that are shown first."""
    order = sorted(places_of, key=lambda v: (v.start, v.stop) if isinstance(v, Interval) else (v,))
    changes = [
        number + 1
        for number, (one, other) in enumerate(itertools.pairwise(order))
        if places_of[one] != places_of[other]
    ]
    first = [0, len(order) - 1, min(1, len(order) - 1)]
    for number in (*changes[:1], *changes[-1:]):
        first += [number, number - 1]
    return [order[number] for number in dict.fromkeys([*first, *range(len(order))])]


def _chosen(
    values: Sequence[Mapping[Any, Any]], ranked: Mapping[Any, Sequence[Any]], most: int
) -> frozenset[int]:
    shown = [*range(len(values))]
    max_values = len(values) if len(shown) <= most else MAX_VALUES
    num_kept = {axis: min(len(order), max_values) for axis, order in ranked.items()}
    while True:
        kept = {axis: frozenset(order[: num_kept[axis]]) for axis, order in ranked.items()}
        shown = [i for i in shown if all(value in kept[axis] for axis, value in values[i].items())]
        # Of the axes with three values left, or else two, shorten the one with the most in all.
        longest = max(num_kept, key=lambda axis: (min(num_kept[axis], 3), len(ranked[axis])))
        if len(shown) <= most or num_kept[longest] == 1:
            return frozenset(shown)
        num_kept[longest] -= 1
