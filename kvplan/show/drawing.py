"""Drawings: pages and plans as plain text of so many columns, from the strides and descriptors there really are.

The rows of a page are its axes, the slowest at the top, and the columns its bytes from left to right. So the order of
the rows is the order of the axes in memory. Of axes of many parts some are shown: the first, the second and the last,
as many as fit. Where these are too wide, the drawing goes on below, each part with its rows; where they are too many,
the first part of an axis is opened alone.

>>> from kvplan import Model
>>> model = Model.shipped("llama-3.1-8b")
>>> for layout in ("LBNHC", "LBHNC", "BLHNC"):
...     print(layout)
...     print(draw_page(pages(model.engine("decode", tp=4, layout=layout)[1])[0]))
LBNHC
token │ 0                 │ 1                     │ 2                     │ ···│ 15                        │
head  │ 2       │ 3       │ 2         │ 3         │ 2         │ 3         │    │ 2           │ 3           │
kv    │ K  │ V  │ K  │ V  │ K   │ V   │ K   │ V   │ K   │ V   │ K   │ V   │    │ K    │ V    │ K    │ V    │
byte  │ 0  │ 256│ 512│ 768│ 1024│ 1280│ 1536│ 1792│ 2048│ 2304│ 2560│ 2816│    │ 15360│ 15616│ 15872│ 16128│
LBHNC
head  │ 2                                              │ 3                                                    │
token │ 0       │ 1       │ 2         │ ···│ 15        │ 0         │ 1         │ 2         │ ···│ 15          │
kv    │ K  │ V  │ K  │ V  │ K   │ V   │    │ K   │ V   │ K   │ V   │ K   │ V   │ K   │ V   │    │ K    │ V    │
byte  │ 0  │ 256│ 512│ 768│ 1024│ 1280│    │ 7680│ 7936│ 8192│ 8448│ 8704│ 8960│ 9216│ 9472│    │ 15872│ 16128│
BLHNC
layer │ 0                                   │ 1    │ 2    │ ···│ 31    │
head  │ 2                             │ 3   │      │      │    │       │
token │ 0       │ 1  │ 2   │ ···│ 15  │     │      │      │    │       │
kv    │ K  │ V  │    │     │    │     │     │      │      │    │       │
byte  │ 0  │ 256│ 512│ 1024│    │ 7680│ 8192│ 16384│ 32768│    │ 507904│

"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kvplan._text import count
from kvplan.describe.worker import Worker
from kvplan.show.copies import Panel
from kvplan.show.grids import Cell, Grid, common, opened
from kvplan.show.pages import Page, pages, titled
from kvplan.show.spreads import Spread

COLUMNS: Final = 120
"""Characters of a line at most, where nothing else is said. What can't be narrower than that is wider."""

FOLD: Final = "···"
"""More of the same."""

REST: Final = "░"
"""Bytes that hold nothing of the group, or that do not move."""

SHORT: Final = 8
"""What does not move is told in at most so many characters."""

MOST: Final = 20
"""About so many copies, or leaves of a page, are shown of a kind of layer at most."""

FEW: Final = 12
"""So many copies are shown of a panel also where they are too wide for a line: then in several parts."""

LETTERS: Final = string.ascii_letters

NONE: Final[Mapping[int | None, str]] = MappingProxyType({})

WAYS: Final = ((4, True), (3, True), (4, False), (3, False), (2, False), (1, False))
"""How much of a page to show: how many parts of an axis, and whether each of them is opened. The first that fits."""


def draw_worker(worker: Worker, columns: int = COLUMNS) -> str:
    """What each block of a worker looks like: a drawing for each kind of page."""
    drawn = [f"{page.title}\n{told(page)}\n{draw_page(page, columns)}" for page in pages(worker)]
    return _with_legend(drawn, "padding, or of others")


def draw_panels(panels: Sequence[Panel], operation: str, columns: int = COLUMNS) -> str:
    """What a plan moves: a drawing for each kind of layer."""
    return _with_legend([draw_panel(panel, operation, columns) for panel in panels], "not moved")


def _with_legend(drawings: Sequence[str], rest: str) -> str:
    """Drawings one below the other, and what :data:`REST` is, if it is in any."""
    legend = [f"{REST} {rest}"] if any(REST in drawing for drawing in drawings) else []
    return "\n\n".join([*drawings, *legend])


def told(page: Page) -> str:
    """What a page is, in words."""
    layers = f"one of {len(page.places)} equal layers, " if len(page.places) > 1 else ""
    blocks = f"each of {count(page.num_blocks, 'block')} of group {page.group}, step {page.block_stride_bytes}"
    return f"{layers}{count(sum(view.block_bytes for view in page.views), 'byte')} in {blocks}"


def draw_page(page: Page, columns: int = COLUMNS) -> str:
    """A page, and the bytes at which its parts begin."""
    for keep, every in WAYS:
        grid = Grid.of(opened(page, keep, every))
        if _width(draw_grid(grid)) <= columns or (keep == 3 and every and len(grid.leaves) <= MOST):
            break
    return "\n\n".join("\n".join(lines) for lines in _wrapped(grid, columns))


def draw_panel(panel: Panel, operation: str, columns: int = COLUMNS) -> str:
    """What moves of a kind of layer: the source's bytes, the destination's, and letters that say which are the same."""
    spread = Spread.of(panel)
    for most in range(MOST, FEW - 1, -1):
        local, remote = spread.sides(most)
        shown = sorted(leaf.copy for leaf in local.leaves if leaf.copy is not None)
        letters: dict[int | None, str] = dict(zip(shown, LETTERS, strict=False))
        if all(_width(draw_grid(grid, letters)) <= columns for grid in (local, remote)):
            break
    top, bottom = (remote, local) if operation == "READ" else (local, remote)
    parts = [*_wrapped(top, columns, letters), *(lines[::-1] for lines in _wrapped(bottom, columns, letters))]
    return "\n".join([titled(panel.tensors), panel.facts, "\n\n".join("\n".join(lines) for lines in parts)])


def _width(lines: Sequence[str]) -> int:
    return max(map(len, lines))


def _wrapped(grid: Grid, columns: int, letters: Mapping[int | None, str] = NONE) -> Iterator[list[str]]:
    """A grid in parts that are not too wide, each of a leaf at least, cut where the coarsest axis goes on."""
    first = 0
    while first < len(grid.leaves):
        last = len(grid.leaves)
        while last > first + 1 and _width(draw_grid(Grid.of(grid.leaves[first:last]), letters)) > columns:
            last -= 1
        if last < len(grid.leaves):
            cuts = range(last, first + (last - first) // 3, -1)
            last = min(cuts, key=lambda cut: len(common(grid.leaves[cut - 1].steps, grid.leaves[cut].steps)))
        yield draw_grid(Grid.of(grid.leaves[first:last]), letters)
        first = last


def draw_grid(grid: Grid, letters: Mapping[int | None, str] = NONE) -> list[str]:
    """A grid, names of rows before it; under it the byte at which each leaf begins, and the letters of copies."""
    rows = [_row(grid, row) for row in range(len(grid.axes))]
    rows.append([(i, "" if leaf.kind == "fold" else str(leaf.start)) for i, leaf in enumerate(grid.leaves)])
    names = [*grid.axes, "byte"]
    if letters:
        rest = [REST if leaf.kind == "rest" else "" for leaf in grid.leaves]
        rows.append([(i, letters.get(leaf.copy, rest[i])) for i, leaf in enumerate(grid.leaves)])
        names.append("copy")
    widths = _widths(rows, len(grid.leaves))
    margin = max(map(len, names))
    return [f"{name:<{margin}} {_line(row, widths)}" for name, row in zip(names, rows, strict=True)]


_Row = list[tuple[int, str]]
"""The texts of a row, each with the last leaf that it spans."""


def _row(grid: Grid, row: int) -> _Row:
    """What stands in a row, from the left to the right. A cell of several rows says its text in the first of them."""
    over = sorted((cell for cell in grid.cells if cell.row <= row < cell.row + cell.rows), key=lambda cell: cell.first)
    found, at = _Row(), 0
    for cell in over:
        found += [(i, _blank(grid, i, row)) for i in range(at, cell.first)]
        found.append((cell.last, _text(grid, cell) if cell.row == row else ""))
        at = cell.last + 1
    return found + [(i, _blank(grid, i, row)) for i in range(at, len(grid.leaves))]


def _blank(grid: Grid, i: int, row: int) -> str:
    """What stands where no cell is: in the first such row of a leaf, whether it is :data:`REST`."""
    return REST if grid.leaves[i].kind == "rest" and len(grid.leaves[i].steps) == row else ""


def _widths(rows: Sequence[_Row], number: int) -> list[int]:
    """How many letters each leaf takes, so that all texts fit; the last leaf of a text gets what it lacks."""
    widths = [len(FOLD)] * number
    spans = [(last - first, first, last, len(text)) for row in rows for first, last, text in _placed(row)]
    for _, first, last, letters in sorted(spans):
        widths[last] += max(letters - _room(widths, first, last), 0)
    return widths


def _placed(row: _Row) -> Iterator[tuple[int, int, str]]:
    first = 0
    for last, text in row:
        yield first, last, text
        first = last + 1


def _room(widths: Sequence[int], first: int, last: int) -> int:
    return sum(widths[first : last + 1]) + 2 * (last - first)


def _line(row: _Row, widths: Sequence[int]) -> str:
    return "".join(f"│ {text:<{_room(widths, first, last)}}" for first, last, text in _placed(row)) + "│"


def _text(grid: Grid, cell: Cell) -> str:
    if cell.kind == "fold":
        return FOLD
    text = grid.text(cell)
    return REST if cell.kind == "rest" and not 0 < len(text) <= SHORT else text
