"""Diagrams of a block or a plan: columns of bytes by address, under headers with coordinates.

Text and SVG are drawn from the same diagrams. A block map makes one; a panel makes two, for the
source and for the destination, that show the same copies. What repeats is folded: a diagram has the
first parts of an axis and the last, or the copies at which something changes.
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
"""The meaning of the numbers of bytes. They count from the first byte drawn of a block."""

MAX_COLUMNS: Final = 20
"""A drawing shows about so many copies of a panel, or columns of a block map, at most."""

MIN_COLUMNS: Final = 12
"""A drawing too wide for a line shows fewer copies, down to this number; then it goes on below."""

MAX_VALUES: Final = 8
"""Of an axis on which copies have more intervals than this, some are folded."""

OPENINGS: Final = ((4, True), (3, True), (4, False), (3, False), (2, False), (1, False))
"""Ways to open a block map, the furthest first: the parts of an axis, and whether all open."""

Fill = Literal["bytes", "rest", "fold"]
"""Bytes that are shown; bytes that are not copied or hold something else; columns left out."""


@attrs.frozen
class Column:
    """Bytes ``[start, stop)`` of a block and the path to them. ``copy`` is the index of a panel's
    copy.

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
    """The interval above columns ``first`` to ``last``, in ``rows`` rows from ``row`` on."""

    row: int
    rows: int
    first: int
    last: int
    fill: Fill
    interval: Interval | None


@attrs.frozen
class Diagram:
    """Columns with their headers. ``axes`` names each row, empty where a row has several axes."""

    columns: tuple[Column, ...]
    headers: tuple[Header, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, columns: Iterable[Column]) -> Diagram:
        """Return the diagram of some columns; neighbours that are folded become one."""
        # Folds that touch show one thing: that columns are left out.
        joined: list[Column] = []
        for column in columns:
            if column.fill == "fold" and joined and joined[-1].fill == "fold":
                before = joined[-1]
                path = common(before.path, column.path)
                joined[-1] = attrs.evolve(before, path=path, stop=column.stop)
            else:
                joined.append(column)
        headers = tuple(_headers(joined))
        axes = []
        for row in range(max(map(_depth, joined), default=0)):
            intervals = [header.interval for header in headers if header.row == row]
            # A row has an axis name only if all its headers are of one axis.
            names = {interval.axis for interval in intervals if interval}
            axes.append(names.pop() if len(names) == 1 else "")
        return cls(tuple(joined), headers, tuple(axes))

    def text(self, header: Header, with_more: bool = False) -> str:
        """Return the text of a header.

        It has the axis where the row has several, and ``more`` of its interval if asked for.
        """
        interval = header.interval
        if interval is None:
            return ""
        has_name = self.axes[header.row] or interval.name
        text = str(interval) if has_name else f"{interval.axis} {interval}"
        return f"{text}: {interval.more}" if with_more and interval.more else text


@attrs.frozen
class Drawing:
    """A block map or a panel: one diagram, or the source's and the destination's.

    ``choices`` has the fullest first.
    """

    title: str
    facts: str
    choices: Iterable[tuple[Diagram, ...]]


def common(a: Path, b: Path) -> Path:
    """Return the intervals with which both paths begin."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return tuple(interval for interval, _ in pairs)


def _depth(column: Column) -> int:
    """Return how many rows a column needs. A fold has a row of its own below its path."""
    return len(column.path) + (column.fill == "fold")


def _headers(columns: Sequence[Column]) -> Iterator[Header]:
    """Yield the headers, row by row: one for neighbours whose paths agree up to the row."""
    depth = max(map(_depth, columns), default=0)
    for row in range(depth):
        first = 0
        while first < len(columns):
            column = columns[first]
            last = first
            if len(column.path) > row:
                last = _last_alike(columns, first, row + 1)
                below = columns[first : last + 1]
                # A header with no deeper row below it reaches down to the bytes.
                rows = 1 if max(map(_depth, below)) > row + 1 else depth - row
                fill: Fill = "rest" if {column.fill for column in below} == {"rest"} else "bytes"
                yield Header(row, rows, first, last, fill, column.path[row])
            # Folds, and columns without any path, have an empty header under their path.
            elif len(column.path) == row and (column.fill == "fold" or not column.path):
                yield Header(row, depth - row, first, first, column.fill, None)
            first = last + 1


def _last_alike(columns: Sequence[Column], first: int, depth: int) -> int:
    """Return the last column after ``first`` up to which paths begin with the same intervals."""
    path = columns[first].path[:depth]
    last = first
    while last + 1 < len(columns) and columns[last + 1].path[:depth] == path:
        last += 1
    return last


def map_diagrams(block_map: BlockMap) -> Iterator[tuple[Diagram]]:
    """Yield a block map, opened less and less far. The fastest axis is never opened."""
    end = block_map.size_bytes + block_map.rest_bytes
    for max_parts, opens_all in OPENINGS:
        columns = _opened(block_map.all_layers, (), 0, end, max_parts, opens_all)
        yield (Diagram.of(_with_colour(column, block_map) for column in columns),)


def _with_colour(column: Column, block_map: BlockMap) -> Column:
    """Return a column with its hover text, and a colour for each tensor, K and V apart."""
    hover = _in_block(column.start, column.stop)
    if column.fill != "bytes":
        return attrs.evolve(column, hover=hover)
    tensor = block_map.axes[0].tensor
    for interval in column.path:
        if interval.axis == TENSOR:
            tensor = interval.name
    keys_or_values = [str(interval) for interval in column.path if interval.axis == "kv"]
    where = ", ".join(f"{interval.axis} {interval}" for interval in column.path)
    colour = " ".join([tensor, *keys_or_values])
    return attrs.evolve(column, hover=f"{where}\n{hover}", colour=colour)


def _in_block(start: int, stop: int) -> str:
    return f"{count(stop - start, 'byte')} at byte {start} of the block"


def _opened(
    axes: Sequence[StridedAxis],
    path: Path,
    base: int,
    end: int,
    max_parts: int,
    opens_all: bool,
) -> Iterator[Column]:
    """Yield the columns of bytes ``[base, end)``.

    They show ``max_parts`` parts of each axis. All of these are opened, or the first alone.
    """
    reached = base
    for axis, axis_path in named(axes, path):
        start = base + axis.offset
        stop = base + axis.stop
        # Bytes between two axes are padding, or of other groups.
        if reached < start:
            yield Column("rest", path, reached, start)
        reached = stop
        last = len(axis.coordinates) - 1
        if not axis.inside:
            yield Column("bytes", axis_path or (axis.interval(0, last),), start, stop)
        elif max_parts == 1 and last > 0:
            yield Column("bytes", extend(axis_path, axis.interval(0, last)), start, stop)
        else:
            yield from _opened_parts(axis, axis_path, start, max_parts, opens_all)
    if reached < end:
        yield Column("rest", path, reached, end)


def _opened_parts(
    axis: StridedAxis,
    path: Path,
    start: int,
    max_parts: int,
    opens_all: bool,
) -> Iterator[Column]:
    """Yield the columns of an axis that begins at byte ``start``: its first parts and the last."""
    num_parts = len(axis.coordinates)
    # A fold is worth its column only if it hides two parts or more.
    shown = [*range(num_parts)]
    if num_parts > max_parts + 1:
        shown = [*range(max_parts - 1), num_parts - 1]
    for before, part in itertools.pairwise([-1, *shown]):
        part_start = start + part * axis.step
        part_stop = part_start + axis.size
        part_path = extend(path, axis.interval(part, part))
        if part > before + 1:
            yield Column("fold", path, start + (before + 1) * axis.step, part_start)
        # An inner axis of single elements tells nothing that the part does not tell.
        can_open = any(inner.inside or len(axis.inside) > 1 for inner in axis.inside)
        if can_open and (opens_all or part == 0):
            yield from _opened(axis.inside, part_path, part_start, part_stop, max_parts, opens_all)
        else:
            yield Column("bytes", part_path, part_start, part_stop)
        if part + 1 < num_parts and axis.size < axis.step:
            yield Column("rest", path, part_stop, part_start + axis.step)


def panel_diagrams(panel: Panel) -> Iterator[tuple[Diagram, ...]]:
    """Yield the source's side and the destination's, with fewer and fewer copies on both."""
    values, ranked = _values(panel.copies)
    source = [copy.remote for copy in panel.copies]
    destination = [copy.local for copy in panel.copies]
    if panel.operation != "READ":
        source, destination = destination, source
    tokens = None if panel.is_example else panel.tokens
    sides = [_blocks(source, tokens), _blocks(destination, tokens)]
    # The caller takes the first drawing that fits the line.
    for max_copies in range(MAX_COLUMNS, MIN_COLUMNS - 1, -1):
        shown = _chosen(values, ranked, max_copies)
        yield tuple(_panel_diagram(panel, blocks, shown) for blocks in sides)


def _panel_diagram(
    panel: Panel,
    blocks: Sequence[tuple[Path, _Block]],
    shown: frozenset[int],
) -> Diagram:
    """Return the diagram of one side of a panel."""
    columns: list[Column] = []
    for path, block in blocks:
        columns += _block_columns(panel, path, block, shown)
    return Diagram.of(columns)


_Values = Sequence[Mapping[Any, tuple[int, int]]]
"""The interval of each copy on each axis, by the names of tensor and axis."""

_Ranked = Mapping[Any, Sequence[tuple[int, int]]]
"""The intervals that copies have on each axis, those first that are shown first."""


def _values(copies: Sequence[BoxCopy]) -> tuple[_Values, _Ranked]:
    """Return the interval of each copy on each axis, and the order in which each axis is shown.

    First come the first, the last and the second; then both sides of the first and of the last
    change of block or remote worker; then the rest.
    """
    values: list[dict[Any, tuple[int, int]]] = []
    places: dict[Any, dict[tuple[int, int], set[Any]]] = {}
    for copy in copies:
        path = copy.local.path
        tensors = tuple(interval.name for interval in path if interval.axis == TENSOR)
        value_of_axis: dict[Any, tuple[int, int]] = {}
        for interval in path:
            if interval.axis != TENSOR:
                value_of_axis[tensors, interval.axis] = interval.start, interval.stop
        value_of_axis[tensors, BLOCK] = copy.local.ordinal, copy.local.ordinal + 1
        values.append(value_of_axis)
        # The blocks and the worker that copies of these intervals connect: _rank looks for changes.
        remote_place = copy.remote_index, copy.remote.map.places, copy.remote.ordinal
        for axis, value in value_of_axis.items():
            places_of_value = places.setdefault(axis, {}).setdefault(value, set())
            places_of_value.add((*remote_place, copy.local.ordinal))
    ranked = {axis: _rank(places_by_value) for axis, places_by_value in places.items()}
    return values, ranked


def _rank(places_by_value: Mapping[tuple[int, int], set[Any]]) -> list[tuple[int, int]]:
    """Return the intervals of an axis, those first that are shown first."""
    order = sorted(places_by_value)
    # Where the connected blocks or workers change from one interval to the next.
    changes = []
    for i, (before, after) in enumerate(itertools.pairwise(order)):
        if places_by_value[before] != places_by_value[after]:
            changes.append(i + 1)
    first = [0, len(order) - 1, min(1, len(order) - 1)]
    for i in (*changes[:1], *changes[-1:]):
        first += [i, i - 1]
    return [order[i] for i in dict.fromkeys([*first, *range(len(order))])]


def _chosen(values: _Values, ranked: _Ranked, max_copies: int) -> frozenset[int]:
    """Return the indices of about ``max_copies`` copies.

    Each axis keeps fewer and fewer intervals, until the copies that have them are few.
    """
    shown = list(range(len(values)))
    max_values = len(values) if len(shown) <= max_copies else MAX_VALUES
    num_kept = {axis: min(len(order), max_values) for axis, order in ranked.items()}
    while True:
        kept = {axis: frozenset(order[: num_kept[axis]]) for axis, order in ranked.items()}
        shown = [i for i in shown if all(value in kept[axis] for axis, value in values[i].items())]
        # Of the axes with three intervals left, or else two, shorten the one with the most in all.
        longest = max(num_kept, key=lambda axis: (min(num_kept[axis], 3), len(ranked[axis])))
        if len(shown) <= max_copies or num_kept[longest] == 1:
            return frozenset(shown)
        num_kept[longest] -= 1


_Block = Sequence[tuple[int, CopyEnd]]
"""The ends of copies in one block, by ascending bytes, each with the index of its copy."""


def _blocks(ends: Sequence[CopyEnd], tokens: Range | None) -> list[tuple[Path, _Block]]:
    """Return the blocks on one side, by worker, region and ordinal, each with the path to it.

    Blocks of a request have their ids, and the positions of its ``tokens`` that they hold.
    """
    # Blocks of one worker may lie in several regions: a block is known by all three.
    ends_by_block: dict[Any, list[tuple[int, CopyEnd]]] = {}
    for i, end in enumerate(ends):
        key = end.worker.key, end.map.places, end.ordinal
        ends_by_block.setdefault(key, []).append((i, end))
    workers = {worker for worker, _, _ in ends_by_block}
    has_regions = len({(worker, places) for worker, places, _ in ends_by_block}) > len(workers)
    blocks: list[tuple[Path, _Block]] = []
    for key in sorted(ends_by_block):
        block = sorted(ends_by_block[key], key=_first_byte)
        _, end = block[0]
        path = [Interval(WORKER, 0, 1, end.worker.label)]
        if has_regions:
            path.append(Interval(REGION, 0, 1, end.region))
        if end.map.group.tokens_per_block is not None:
            path.append(_block_interval(end, tokens))
        blocks.append((tuple(path), block))
    return blocks


def _first_byte(indexed_end: tuple[int, CopyEnd]) -> int:
    _, end = indexed_end
    return end.box.start


def _block_interval(end: CopyEnd, tokens: Range | None) -> Interval:
    """Return the interval of a block: its ordinal, its id in a request, and the positions in it."""
    positions = end.positions
    name = ""
    if tokens is not None:
        name = f"{end.ordinal} (id {end.block})"
    if tokens and not positions.name:
        start = max(positions.start, tokens[0])
        stop = min(positions.stop, tokens[1])
        positions = attrs.evolve(positions, start=start, stop=stop)
    return Interval(BLOCK, end.ordinal, end.ordinal + 1, name, f"positions {positions}")


def _block_columns(
    panel: Panel,
    path: Path,
    block: _Block,
    shown: frozenset[int],
) -> Iterator[Column]:
    """Yield the columns of one block: the copies that are ``shown``, and the bytes between them."""
    _, last_end = block[-1]
    block_map = last_end.map
    if not any(i in shown for i, _ in block):
        yield Column("fold", path[:1], 0, block_map.size_bytes)
        return
    reached = 0
    last_path = path
    is_folded = False
    for i, end in block:
        if i not in shown:
            is_folded = True
            continue
        copy = panel.copies[i]
        copy_path = (*path, *end.path)
        shared_path = common(last_path, copy_path)
        yield from _between(end, reached, end.box.start, path, shared_path, is_folded)
        yield Column(
            fill="bytes",
            path=copy_path,
            start=end.box.start,
            stop=end.box.stop,
            hover=panel.details(copy),
            colour=copy.remote.worker.label,
            copy=i,
        )
        reached = end.box.stop
        last_path = copy_path
        is_folded = False
    block_end = block_map.size_bytes + block_map.rest_bytes
    yield from _between(last_end, reached, block_end, path, path, is_folded)


def _between(
    end: CopyEnd,
    start: int,
    stop: int,
    block_path: Path,
    path: Path,
    is_folded: bool,
) -> Iterator[Column]:
    """Yield the column between two copies of a block: a fold, or bytes that are not copied.

    These have their own path if they are one box.
    """
    if is_folded:
        yield Column("fold", path, start, stop)
    elif start < stop:
        # One box has coordinates to show; several would need a column each.
        boxes = tuple(end.map.boxes(start, stop))
        if [(box.start, box.stop) for box in boxes] == [(start, stop)]:
            path = (*block_path, *attrs.evolve(end, box=boxes[0]).path)
        yield Column("rest", path, start, stop, _in_block(start, stop))
