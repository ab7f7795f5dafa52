"""Grids: bands of bytes as columns and rows, what repeats left out in the middle.

A column is a leaf: some bytes of a page, in order of address. Rows are the axes from the slowest to the fastest, and
a cell spans the leaves that are inside one part of an axis. What is folded, and what does not move, are leaves too.
Grids know no paper: texts and pictures are drawn from the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import attrs

from kvplan.show.bands import TENSOR, Band, Step, within
from kvplan.show.pages import Page

WORKER: Final = "worker"
BLOCK: Final = "block"
REGION: Final = "region"

Kind = Literal["bytes", "rest", "fold"]
"""Bytes that are shown, bytes that hold something else or do not move, and what is folded."""


@attrs.frozen
class Leaf:
    """Bytes ``[start, stop)`` of a page and the steps to them; ``copy`` says which copy of a panel moves them."""

    kind: Kind
    steps: tuple[Step, ...]
    start: int
    stop: int
    page: Page = attrs.field(repr=False)
    copy: int | None = None


@attrs.frozen
class Cell:
    """What stands in ``rows`` rows from ``row`` on, over the leaves from the ``first`` to the ``last``."""

    row: int
    rows: int
    first: int
    last: int
    kind: Kind
    step: Step | None


@attrs.frozen
class Grid:
    """Leaves, the cells over them, and for each row the name of its axis, empty where it has several."""

    leaves: tuple[Leaf, ...]
    cells: tuple[Cell, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Grid:
        """The grid over some leaves."""
        depth = max((len(leaf.steps) + (leaf.kind == "fold") for leaf in leaves), default=0)
        cells = tuple(_cells(leaves, depth))
        axes = []
        for row in range(depth):
            names = {cell.step.axis for cell in cells if cell.row == row and cell.step}
            axes.append(names.pop() if len(names) == 1 else "")
        return cls(tuple(leaves), cells, tuple(axes))

    def text(self, cell: Cell, more: bool = False) -> str:
        """What a cell says: its coordinates, with their axis where its row has several, and ``more`` if there is."""
        if cell.step is None:
            return ""
        text = str(cell.step) if self.axes[cell.row] or cell.step.name else f"{cell.step.axis} {cell.step}"
        return f"{text}: {cell.step.more}" if more and cell.step.more else text


def _cells(leaves: Sequence[Leaf], depth: int) -> Iterator[Cell]:
    for row in range(depth):
        first = 0
        while first < len(leaves):
            leaf, last = leaves[first], first
            if len(leaf.steps) > row:
                same = leaf.steps[: row + 1]
                while last + 1 < len(leaves) and leaves[last + 1].steps[: row + 1] == same:
                    last += 1
                inside = max(len(one.steps) + (one.kind == "fold") for one in leaves[first : last + 1])
                kind: Kind = "rest" if all(one.kind == "rest" for one in leaves[first : last + 1]) else "bytes"
                yield Cell(row, 1 if inside > row + 1 else depth - row, first, last, kind, same[-1])
            elif len(leaf.steps) == row and (leaf.kind == "fold" or not leaf.steps):
                yield Cell(row, depth - row, first, first, leaf.kind, None)
            first = last + 1


def opened(page: Page, keep: int, every: bool) -> list[Leaf]:
    """The leaves of a page, layers of a block included: of each axis ``keep`` parts, the first opened, or ``every``.

    The finest axis of elements is left whole.
    """
    return merged(_opened(page, page.whole, (), 0, page.size_bytes + page.rest_bytes, keep, every))


def _opened(
    page: Page, bands: Sequence[Band], steps: tuple[Step, ...], base: int, end: int, keep: int, every: bool
) -> Iterator[Leaf]:
    at = base
    several = len({band.tensor for band in bands}) > 1
    for band in bands:
        named = (*steps, Step(TENSOR, 0, 1, band.tensor)) if several else steps
        start = base + band.offset_bytes
        if at < start:
            yield Leaf("rest", steps, at, start, page)
        number = len(band.coordinates)
        if band.inside and keep == 1 and number > 1:
            at = base + band.stop_bytes
            yield Leaf("bytes", (*named, within(named, band.step(0, number - 1))), start, at, page)
            continue
        shown = [0] if not band.inside else [*range(number)] if number <= keep + 1 else [*range(keep - 1), number - 1]
        if not band.inside:
            at = base + band.stop_bytes
            yield Leaf("bytes", named if named else (band.step(0, number - 1),), start, at, page)
            continue
        for before, i in zip([-1, *shown], shown, strict=False):
            low = start + i * band.step_bytes
            if i > before + 1:
                yield Leaf("fold", named, start + (before + 1) * band.step_bytes, low, page)
            path, stop = (*named, within(named, band.step(i, i))), low + band.size_bytes
            if (every or i == 0) and any(inner.inside or len(band.inside) > 1 for inner in band.inside):
                yield from _opened(page, band.inside, path, low, stop, keep, every)
            else:
                yield Leaf("bytes", path, low, stop, page)
            if i + 1 < number and band.size_bytes < band.step_bytes:
                yield Leaf("rest", named, stop, low + band.step_bytes, page)
            at = stop
    if at < end:
        yield Leaf("rest", steps, at, end, page)


def common(a: tuple[Step, ...], b: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps that two paths begin with alike."""
    return tuple(mine for mine, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def merged(leaves: Iterable[Leaf]) -> list[Leaf]:
    """Neighbours that are folded, as one."""
    made: list[Leaf] = []
    for leaf in leaves:
        if leaf.kind == "fold" and made and made[-1].kind == "fold":
            made[-1] = attrs.evolve(made[-1], steps=common(made[-1].steps, leaf.steps), stop=leaf.stop)
        else:
            made.append(leaf)
    return made
