"""What to draw of a block or of a plan: columns of bytes in order of address, under headers that name coordinates.

Text and SVG are drawn from the same diagrams. A block map makes one; a panel makes two, for the source and for the
destination, that show the same copies. What repeats is folded: a diagram has the first parts of an axis and the last,
or the copies at which something changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from kvplan._text import count
from kvplan.describe.blocks import Range
from kvplan.display.blockmap import TENSOR, BlockMap, Interval, Path, StridedAxis, extend, named
from kvplan.display.copies import BoxCopy, CopyEnd, Panel

WORKER: Final = "worker"
BLOCK: Final = "block"
REGION: Final = "region"

NOTE: Final = "byte: offset in one block"
"""What the numbers of bytes are. It counts from the first byte that is drawn of a block."""

MAX_COLUMNS: Final = 20
"""A drawing shows about so many copies of a panel, or columns of a block map, at most."""

FEW: Final = 12
"""A drawing that is too wide for a line shows fewer copies, down to this number; then it goes on below."""

MAX_VALUES: Final = 8
"""Of an axis on which copies have more intervals than this, some are folded."""

OPENINGS: Final = ((4, True), (3, True), (4, False), (3, False), (2, False), (1, False))
"""How far to open a block map, the furthest first: how many parts of an axis, and whether each of them or the first."""

Fill = Literal["bytes", "rest", "fold"]
"""Bytes that are shown; bytes that hold something else or are not copied; or columns that are left out."""


@attrs.frozen
class Column:
    """Bytes ``[start, stop)`` of a block and the path to them. ``copy`` is the index of a panel's copy.

    ``colour`` is the name of the colour in the legend, and ``hover`` the text that the mouse shows.
    """

    fill: Fill
    path: Path
    start: int
    stop: int
    hover: str = ""
    colour: str = ""
    copy: int | None = None


@attrs.frozen
class Header:
    """The interval above the columns from the ``first`` to the ``last``, in ``rows`` rows from ``row`` on."""

    row: int
    rows: int
    first: int
    last: int
    fill: Fill
    interval: Interval | None


@attrs.frozen
class Diagram:
    """Columns with their headers. ``axes`` has the name of each row, empty where a row has several axes."""

    columns: tuple[Column, ...]
    headers: tuple[Header, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, columns: Iterable[Column]) -> Diagram:
        """The diagram of some columns; neighbours that are folded become one."""
        made: list[Column] = []
        for column in columns:
            if column.fill == "fold" and made and made[-1].fill == "fold":
                made[-1] = attrs.evolve(made[-1], path=common(made[-1].path, column.path), stop=column.stop)
            else:
                made.append(column)
        headers = tuple(_headers(made))
        axes = []
        for row in range(max(map(_depth, made), default=0)):
            names = {header.interval.axis for header in headers if header.row == row and header.interval}
            axes.append(names.pop() if len(names) == 1 else "")
        return cls(tuple(made), headers, tuple(axes))

    def text(self, header: Header, more: bool = False) -> str:
        """The text of a header: with its axis where the row has several, and with ``more`` if there is any."""
        interval = header.interval
        if interval is None:
            return ""
        text = str(interval) if self.axes[header.row] or interval.name else f"{interval.axis} {interval}"
        return f"{text}: {interval.more}" if more and interval.more else text


@attrs.frozen
class Drawing:
    """A block map or a panel: one diagram, or the source's and the destination's. ``choices`` has the fullest first."""

    title: str
    facts: str
    choices: Iterable[tuple[Diagram, ...]]


def common(a: Path, b: Path) -> Path:
    """The intervals with which both paths begin."""
    return tuple(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _depth(column: Column) -> int:
    """How many rows a column needs. A fold has a row of its own below its path."""
    return len(column.path) + (column.fill == "fold")


def _headers(columns: Sequence[Column]) -> Iterator[Header]:
    depth = max(map(_depth, columns), default=0)
    for row in range(depth):
        first = 0
        while first < len(columns):
            column, last = columns[first], first
            if len(column.path) > row:
                while last + 1 < len(columns) and columns[last + 1].path[: row + 1] == column.path[: row + 1]:
                    last += 1
                below = columns[first : last + 1]
                rows = 1 if max(map(_depth, below)) > row + 1 else depth - row
                fill: Fill = "rest" if all(one.fill == "rest" for one in below) else "bytes"
                yield Header(row, rows, first, last, fill, column.path[row])
            elif len(column.path) == row and (column.fill == "fold" or not column.path):
                yield Header(row, depth - row, first, first, column.fill, None)
            first = last + 1


def map_diagrams(one: BlockMap) -> Iterator[tuple[Diagram]]:
    """A block map, opened less and less far. The fastest axis is never opened."""
    for keep, every in OPENINGS:
        end = one.size_bytes + one.rest_bytes
        columns = _opened(one.all_layers, (), 0, end, keep, every)
        yield (Diagram.of(_with_colour(column, one) for column in columns),)


def _with_colour(column: Column, one: BlockMap) -> Column:
    """A column with its hover text, and a colour for each tensor, K and V apart."""
    hover = _at(column.start, column.stop)
    if column.fill != "bytes":
        return attrs.evolve(column, hover=hover)
    tensors = [one.axes[0].tensor, *(interval.name for interval in column.path if interval.axis == TENSOR)]
    colour = " ".join([tensors[-1], *(str(interval) for interval in column.path if interval.axis == "kv")])
    where = ", ".join(f"{interval.axis} {interval}" for interval in column.path)
    return attrs.evolve(column, hover=f"{where}\n{hover}", colour=colour)


def _at(start: int, stop: int) -> str:
    return f"{count(stop - start, 'byte')} at byte {start} of the block"


def _opened(axes: Sequence[StridedAxis], path: Path, base: int, end: int, keep: int, every: bool) -> Iterator[Column]:
    """The columns of bytes ``[base, end)``: ``keep`` parts of each axis, ``every`` one opened or the first alone."""
    at = base
    for axis, here in named(axes, path):
        start, number = base + axis.offset, len(axis.coordinates)
        if at < start:
            yield Column("rest", path, at, start)
        at = base + axis.stop
        if not axis.inside:
            yield Column("bytes", here or (axis.interval(0, number - 1),), start, at)
            continue
        if keep == 1 and number > 1:
            yield Column("bytes", extend(here, axis.interval(0, number - 1)), start, at)
            continue
        shown = [*range(number)] if number <= keep + 1 else [*range(keep - 1), number - 1]
        for before, i in itertools.pairwise([-1, *shown]):
            low = start + i * axis.step
            inner, stop = extend(here, axis.interval(i, i)), low + axis.size
            if i > before + 1:
                yield Column("fold", here, start + (before + 1) * axis.step, low)
            if (every or i == 0) and any(one.inside or len(axis.inside) > 1 for one in axis.inside):
                yield from _opened(axis.inside, inner, low, stop, keep, every)
            else:
                yield Column("bytes", inner, low, stop)
            if i + 1 < number and axis.size < axis.step:
                yield Column("rest", here, stop, low + axis.step)
    if at < end:
        yield Column("rest", path, at, end)


def panel_diagrams(panel: Panel) -> Iterator[tuple[Diagram, ...]]:
    """The source's side and the destination's, with fewer and fewer copies. Both show the same ones."""
    values, ranked = _values(panel.copies)
    ends = [copy.remote for copy in panel.copies], [copy.local for copy in panel.copies]
    sides = [
        _blocks(side, None if panel.is_example else panel.tokens)
        for side in (ends if panel.operation == "READ" else ends[::-1])
    ]
    for most in range(MAX_COLUMNS, FEW - 1, -1):
        shown = _chosen(values, ranked, most)
        yield tuple(
            Diagram.of(column for path, block in blocks for column in _block_columns(panel, path, block, shown))
            for blocks in sides
        )


_Values = Sequence[Mapping[Any, tuple[int, int]]]
"""The interval of each copy on each axis, by the names of tensor and axis."""

_Ranked = Mapping[Any, Sequence[tuple[int, int]]]
"""The intervals that copies have on each axis, those first that are shown first."""


def _values(copies: Sequence[BoxCopy]) -> tuple[_Values, _Ranked]:
    """The interval of each copy on each axis, and the order in which those of each axis are shown.

    First come the first, the last and the second; then both sides of the first and of the last change of block or
    remote worker; then the rest.
    """
    values: list[dict[Any, tuple[int, int]]] = []
    near: dict[Any, dict[tuple[int, int], set[Any]]] = {}
    for copy in copies:
        tensors = tuple(interval.name for interval in copy.local.path if interval.axis == TENSOR)
        found = {(tensors, one.axis): (one.start, one.stop) for one in copy.local.path if one.axis != TENSOR}
        found[tensors, BLOCK] = copy.local.ordinal, copy.local.ordinal + 1
        values.append(found)
        where = copy.remote_index, copy.remote.map.places, copy.remote.ordinal, copy.local.ordinal
        for key, value in found.items():
            near.setdefault(key, {}).setdefault(value, set()).add(where)
    ranked = {}
    for key, beside in near.items():
        order = sorted(beside)
        changes = [i for i in range(1, len(order)) if beside[order[i]] != beside[order[i - 1]]]
        first = [0, len(order) - 1, min(1, len(order) - 1)]
        first += [at for i in (*changes[:1], *changes[-1:]) for at in (i, i - 1)]
        ranked[key] = [order[i] for i in dict.fromkeys([*first, *range(len(order))])]
    return values, ranked


def _chosen(values: _Values, ranked: _Ranked, most: int) -> frozenset[int]:
    """The indices of about ``most`` copies: fewer intervals of each axis, until the copies that have them are few."""
    shown = list(range(len(values)))
    keep = {key: len(order) if len(shown) <= most else min(len(order), MAX_VALUES) for key, order in ranked.items()}
    while True:
        taken = {key: frozenset(order[: keep[key]]) for key, order in ranked.items()}
        shown = [i for i in shown if all(value in taken[key] for key, value in values[i].items())]
        longest = max(keep, key=lambda key: (min(keep[key], 3), len(ranked[key])))
        if len(shown) <= most or keep[longest] == 1:
            return frozenset(shown)
        keep[longest] -= 1


_Block = Sequence[tuple[int, CopyEnd]]
"""The ends of copies in one block, by ascending bytes, each with the index of its copy."""


def _blocks(ends: Sequence[CopyEnd], tokens: Range | None) -> list[tuple[Path, _Block]]:
    """The blocks on one side, by worker, region and ordinal, each with the path to it.

    Blocks of a request have their ids, and the positions of its ``tokens`` that they hold.
    """
    blocks: dict[Any, list[tuple[int, CopyEnd]]] = {}
    for i, end in enumerate(ends):
        blocks.setdefault((end.worker.key, end.map.places, end.ordinal), []).append((i, end))
    has_regions = len({key[:2] for key in blocks}) > len({key[0] for key in blocks})
    found: list[tuple[Path, _Block]] = []
    for key in sorted(blocks):
        block = sorted(blocks[key], key=lambda each: each[1].box.start)
        (_, end), *_ = block
        path = [Interval(WORKER, 0, 1, end.worker.label)]
        if has_regions:
            path.append(Interval(REGION, 0, 1, end.region))
        if end.map.group.tokens_per_block is not None:
            name, held = "" if tokens is None else f"{end.ordinal} (id {end.block})", end.positions
            if tokens and not held.name:
                held = attrs.evolve(held, start=max(held.start, tokens[0]), stop=min(held.stop, tokens[1]))
            path.append(Interval(BLOCK, end.ordinal, end.ordinal + 1, name, f"positions {held}"))
        found.append((tuple(path), block))
    return found


def _block_columns(panel: Panel, path: Path, block: _Block, shown: frozenset[int]) -> Iterator[Column]:
    """The columns of one block: the copies that are ``shown``, and what is between them."""
    one = block[0][1].map
    if not any(i in shown for i, _ in block):
        yield Column("fold", path[:1], 0, one.size_bytes)
        return
    at, last, is_folded = 0, path, False
    for i, end in block:
        if i not in shown:
            is_folded = True
            continue
        here, copy = (*path, *end.path), panel.copies[i]
        yield from _between(end, at, end.box.start, path, common(last, here), is_folded)
        label, details = copy.remote.worker.label, panel.details(copy)
        yield Column("bytes", here, end.box.start, end.box.stop, details, label, i)
        at, last, is_folded = end.box.stop, here, False
    yield from _between(block[-1][1], at, one.size_bytes + one.rest_bytes, path, path, is_folded)


def _between(end: CopyEnd, start: int, stop: int, path: Path, here: Path, is_folded: bool) -> Iterator[Column]:
    """What is between two copies of a block: a fold, or bytes that are not copied, with their own path if one box."""
    if is_folded:
        yield Column("fold", here, start, stop)
    elif start < stop:
        boxes = tuple(end.map.boxes(start, stop))
        if [(box.start, box.stop) for box in boxes] == [(start, stop)]:
            here = (*path, *attrs.evolve(end, box=boxes[0]).path)
        yield Column("rest", here, start, stop, _at(start, stop))
