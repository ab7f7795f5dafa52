"""SVG: the picture of a plan or of a worker's pages, as text that is the same for equal values.

Above are the source's bytes, below the destination's, each with its axes from the slowest to the fastest towards the
edge of the picture, and ribbons between them: one for each copy, in the colour of the remote worker. What the mouse
points at tells its coordinates, addresses and bytes. There is no script in it; colours follow the reader's light or
dark scheme.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final
from xml.etree.ElementTree import Element

from kvplan._text import count
from kvplan.describe.worker import Worker
from kvplan.show.bands import TENSOR
from kvplan.show.copies import Panel
from kvplan.show.drawing import MOST, WAYS, told
from kvplan.show.grids import BLOCK, WORKER, Grid, Leaf, opened
from kvplan.show.pages import Page, pages, titled
from kvplan.show.sheets import BYTES, COLOURS, DIGIT, EDGE, LEFT, LETTER, RIBBONS, ROW, WIDTH, Sheet, add, fits, fitting
from kvplan.show.spreads import Spread

NARROW: Final[Mapping[str, float]] = MappingProxyType({"bytes": 0.0, "fold": 24.0, "rest": 18.0})
"""How wide leaves are that do not share the room."""

NO_TINTS: Final[Mapping[str, str]] = MappingProxyType({})


def draw_plan(title: str, about: str, panels: Sequence[Panel], operation: str) -> str:
    """The picture of what a plan moves, ``about`` a line under its title."""
    sheet = Sheet(title, about)
    remotes = {copy.remote_index: copy.remote.worker.label for panel in panels for copy in panel.copies}
    colours = {index: f"c{i % COLOURS}" for i, index in enumerate(sorted(remotes))}
    drawn = [Spread.of(panel).sides(MOST) for panel in panels]
    rest = _rest((grid for pair in drawn for grid in pair), "not moved")
    sheet.legend({remotes[index]: colour for index, colour in colours.items()} | rest)
    for panel, pair in zip(panels, drawn, strict=True):
        sheet.heading(titled(panel.tensors), panel.facts)
        _draw_panel(sheet, panel, pair if operation == "WRITE" else pair[::-1], operation, colours)
    return sheet.text()


def _rest(grids: Iterable[Grid], name: str) -> dict[str, str]:
    """A line of the legend for what is hatched, if anything is."""
    return {name: "rest"} if any(leaf.kind == "rest" for grid in grids for leaf in grid.leaves) else {}


def draw_pages(title: str, about: str, worker: Worker) -> str:
    """The picture of what each block of a worker looks like, in a colour for each tensor, K and V apart."""
    sheet = Sheet(title, about)
    kept = [(page, _fitting(page)) for page in pages(worker)]
    kinds = dict.fromkeys(_kind(leaf) for _, grid in kept for leaf in grid.leaves if leaf.kind == "bytes")
    colours = {kind: f"c{i % COLOURS}" for i, kind in enumerate(kinds)}
    sheet.legend(colours | _rest((grid for _, grid in kept), "padding, or of others"))
    for page, grid in kept:
        sheet.heading(page.title, told(page))
        spans = columns(grid)
        marks = {i: (colours[_kind(leaf)], _hover(leaf)) for i, leaf in enumerate(grid.leaves) if leaf.kind == "bytes"}
        _draw_rows(sheet.root, grid, spans, sheet.y, down=False)
        sheet.y += len(grid.axes) * ROW
        _draw_bytes(sheet.root, grid, spans, sheet.y, marks)
        sheet.y += BYTES
    return sheet.text()


def _fitting(page: Page) -> Grid:
    """As much of a page as there is room for."""
    for keep, every in WAYS:
        grid = Grid.of(opened(page, keep, every))
        if len(grid.leaves) <= MOST:
            break
    return grid


def _kind(leaf: Leaf) -> str:
    """What is in a leaf, as far as that is one thing: its tensor, and K or V."""
    tensors = [step.name for step in leaf.steps if step.axis == TENSOR] or [leaf.page.bands[0].tensor]
    return " ".join([tensors[-1], *(str(step) for step in leaf.steps if step.axis == "kv")])


def _hover(leaf: Leaf) -> str:
    where = ", ".join(f"{step.axis} {step}" for step in leaf.steps)
    return f"{where}\n{count(leaf.stop - leaf.start, 'byte')} at byte {leaf.start} of a page"


Spans = Sequence[tuple[float, float]]
"""Where each leaf begins and ends, from left to right."""


Marks = Mapping[int, tuple[str, str]]
"""By leaf, or by copy: the class of its colour, and what it tells when pointed at."""


def _draw_panel(
    sheet: Sheet, panel: Panel, drawn: tuple[Grid, Grid], operation: str, colours: Mapping[int, str]
) -> None:
    """The source's side of a panel, the destination's, and ribbons between them."""
    top, bottom = drawn
    above, below = columns(top), columns(bottom)
    shown = {leaf.copy: panel.copies[leaf.copy] for leaf in top.leaves if leaf.copy is not None}
    marks = {i: (colours[copy.remote_index], copy.told(operation)) for i, copy in shown.items()}
    tints = {copy.remote.worker.label: colours[copy.remote_index] for copy in shown.values()}
    y0 = sheet.y + len(top.axes) * ROW + BYTES
    y1 = y0 + RIBBONS
    _draw_rows(sheet.root, top, above, sheet.y, down=False, tints=tints)
    _draw_bytes(sheet.root, top, above, y0 - BYTES, _of_leaves(top, marks))
    add(sheet.root, "text", "↓", x=LEFT - 10, y=(y0 + y1) / 2 + 4, class_="axis")
    _draw_ribbons(sheet.root, (top, above), (bottom, below), y0, marks)
    _draw_bytes(sheet.root, bottom, below, y1, _of_leaves(bottom, marks))
    _draw_rows(sheet.root, bottom, below, y1 + BYTES, down=True, tints=tints)
    sheet.y = y1 + BYTES + len(bottom.axes) * ROW


def _of_leaves(grid: Grid, marks: Marks) -> Marks:
    return {i: marks[leaf.copy] for i, leaf in enumerate(grid.leaves) if leaf.copy is not None}


def columns(grid: Grid) -> Spans:
    """The leaves from the left to the right edge: wide where many bytes are, gaps wider where coarser axes change."""
    gaps = [_gap(a, b, len(grid.axes)) for a, b in itertools.pairwise(grid.leaves)]
    narrow = [NARROW[leaf.kind] for leaf in grid.leaves]
    width = WIDTH - LEFT - EDGE
    squeeze = min(1.0, width / 2 / max(sum(narrow) + sum(gaps), 1))
    sizes = [leaf.stop - leaf.start if leaf.kind == "bytes" else 0 for leaf in grid.leaves]
    least = min(filter(None, sizes), default=1)
    weight = [1 + 0.3 * math.log2(size / least) if size else 0 for size in sizes]
    room = (width - squeeze * (sum(narrow) + sum(gaps))) / max(sum(weight), 1)
    x, found = float(LEFT), []
    for share, extra, gap in zip(weight, narrow, [*gaps, 0.0], strict=True):
        found.append((x, x + share * room + squeeze * extra))
        x = found[-1][1] + squeeze * gap
    return found


def _gap(a: Leaf, b: Leaf, depth: int) -> float:
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.steps, b.steps, strict=False)))
    return 1.0 + 2.0 * max(depth - 1 - same, 0)


def _draw_rows(
    parent: Element, grid: Grid, spans: Spans, y: float, *, down: bool, tints: Mapping[str, str] = NO_TINTS
) -> None:
    """The cells of a side; ``down`` where the slowest axis is at the bottom. Workers in ``tints`` have a colour."""
    depth = len(grid.axes)
    for row, axis in enumerate(grid.axes):
        at = y + (depth - 1 - row if down else row) * ROW
        add(parent, "text", axis, x=LEFT - 10, y=at + 14, class_="axis")
    group = add(parent, "g", class_="cell")
    for cell in grid.cells:
        (low, _), (_, high) = spans[cell.first], spans[cell.last]
        at = y + (depth - cell.row - cell.rows if down else cell.row) * ROW
        middle = {"x": (low + high) / 2, "y": at + cell.rows * ROW / 2 + 4}
        if cell.kind == "fold":
            add(group, "text", "⋯", **middle, class_="faint")
            continue
        box = {"x": low, "y": at, "width": high - low, "height": cell.rows * ROW - 1}
        add(group, "rect", **box, class_="still" if cell.kind == "rest" else "")
        if cell.step and cell.step.axis == WORKER and cell.step.name in tints:
            add(group, "rect", **box, class_=f"tint {tints[cell.step.name]}")
        number = str(cell.step.start) if cell.step and cell.step.axis == BLOCK else ""
        texts = [grid.text(cell, more=True), grid.text(cell), str(cell.step or ""), number]
        fitting(group, texts, high - low, LETTER, **middle)


def _draw_bytes(parent: Element, grid: Grid, spans: Spans, y: float, marks: Marks) -> None:
    """The bytes at which leaves begin, on their colours."""
    add(parent, "text", "byte", x=LEFT - 10, y=y + 15, class_="axis")
    ranges = [f"{leaf.start}-{leaf.stop - 1}" for leaf in grid.leaves]
    all_fit = all(fits(ranges[i], spans[i][1] - spans[i][0], DIGIT) for i in marks)
    for i, (leaf, (low, high)) in enumerate(zip(grid.leaves, spans, strict=True)):
        if leaf.kind == "fold":
            continue
        number = count(leaf.stop - leaf.start, "byte")
        kind, hover = marks.get(i, ("rest", f"{number} at byte {leaf.start} of a page"))
        group = add(parent, "g")
        add(group, "title", hover)
        add(group, "rect", x=low, y=y, width=high - low, height=BYTES - 1, class_=kind)
        if i in marks:
            texts = [ranges[i] if all_fit else str(leaf.start)]
            fitting(group, texts, high - low, DIGIT, x=(low + high) / 2, y=y + 15, class_="byte")


def _draw_ribbons(parent: Element, top: tuple[Grid, Spans], bottom: tuple[Grid, Spans], y: float, marks: Marks) -> None:
    """A ribbon for each copy that is shown."""
    ends = [{leaf.copy: span for leaf, span in zip(grid.leaves, spans, strict=True)} for grid, spans in (top, bottom)]
    y0, y1, bend = y + 1, y + RIBBONS - 2, RIBBONS * 0.45
    for leaf in top[0].leaves:
        if leaf.copy is not None:
            (a, b), (c, d) = (side[leaf.copy] for side in ends)
            curve = f"M{a:.1f} {y0:.1f}C{a:.1f} {y0 + bend:.1f} {c:.1f} {y1 - bend:.1f} {c:.1f} {y1:.1f}H{d:.1f}"
            curve += f"C{d:.1f} {y1 - bend:.1f} {b:.1f} {y0 + bend:.1f} {b:.1f} {y0:.1f}Z"
            kind, hover = marks[leaf.copy]
            add(add(parent, "path", d=curve, class_=kind), "title", hover)
