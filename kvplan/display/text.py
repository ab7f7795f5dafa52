"""Drawings as plain text: a line for each axis, the slowest at the top.

Bytes go from left to right. The order of the lines is the order of the axes in memory. What is too
wide goes on below, each part with its lines.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from types import MappingProxyType
from typing import Final

from kvplan._text import WIDTH
from kvplan.display.diagram import MAX_COLUMNS, NOTE, Column, Diagram, Drawing, Header, common

FOLD: Final = "···"
REST: Final = "░"

MAX_REST: Final = 8
"""Coordinates of bytes that are not copied are printed up to this number of characters."""

NO_LETTERS: Final[Mapping[int | None, str]] = MappingProxyType({})


def draw_text(drawings: Iterable[Drawing], rest: str, width: int = WIDTH) -> str:
    """Return drawings one below the other. The legend says what the hatched ``rest`` is."""
    texts = []
    for drawing in drawings:
        titles = [*wrap(drawing.title, width), *wrap(drawing.facts, width)]
        texts.append("\n".join([*titles, _drawn(drawing, width)]))
    legend = f"{REST} {rest}; {NOTE}" if any(REST in text for text in texts) else NOTE
    return "\n\n".join([*texts, legend]) if texts else ""


def _drawn(drawing: Drawing, width: int) -> str:
    """Return the fullest choice that fits, with one letter on both sides below each copy."""
    for number, diagrams in enumerate(drawing.choices):
        copies = [column.copy for column in diagrams[0].columns if column.copy is not None]
        letters = dict[int | None, str](zip(sorted(copies), string.ascii_letters, strict=False))
        # of a block map, three opened parts of each axis are worth a second line
        is_map = len(diagrams) == 1
        is_worth = number == 1 and is_map and len(diagrams[0].columns) <= MAX_COLUMNS
        if is_worth or all(_width(_lines(diagram, letters)) <= width for diagram in diagrams):
            break
    top, *bottom = (list(_wrapped(diagram, width, letters)) for diagram in diagrams)
    parts = [*top]
    for side in bottom:
        parts += [lines[::-1] for lines in side]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _wrapped(
    diagram: Diagram,
    width: int,
    letters: Mapping[int | None, str] = NO_LETTERS,
) -> Iterator[list[str]]:
    """Yield a diagram in parts that fit, of one column at least.

    A part ends where the slowest axis goes on.
    """
    # Columns from `first` on are not drawn yet; a part takes as many of them as fit.
    columns = diagram.columns
    first = 0
    while first < len(columns):
        last = len(columns)
        while last > first + 1 and _part_width(columns[first:last], letters) > width:
            last -= 1
        if last < len(columns):
            # Of the last two thirds of what fits, the end at which the paths differ the most.
            ends = range(last, first + (last - first) // 3, -1)
            last = min(ends, key=lambda end: len(common(columns[end - 1].path, columns[end].path)))
        yield _lines(Diagram.of(columns[first:last]), letters)
        first = last


def _part_width(columns: Sequence[Column], letters: Mapping[int | None, str]) -> int:
    return _width(_lines(Diagram.of(columns), letters))


def _width(lines: Sequence[str]) -> int:
    return max(map(len, lines))


_HeaderTexts = list[tuple[int, int, str]]
"""Texts from left to right, each with the first and the last column that it spans."""


def _lines(diagram: Diagram, letters: Mapping[int | None, str] = NO_LETTERS) -> list[str]:
    """Return a diagram: headers, the byte at which each column begins, and letters of copies."""
    columns = diagram.columns
    rows = [_header_row(diagram, row) for row in range(len(diagram.axes))]
    # One text for each column: the byte at which it begins.
    starts = ["" if column.fill == "fold" else str(column.start) for column in columns]
    rows.append([(i, i, start) for i, start in enumerate(starts)])
    names = [*diagram.axes, "byte"]
    if letters:
        rest = [REST if column.fill == "rest" else "" for column in columns]
        rows.append([(i, i, letters.get(column.copy, rest[i])) for i, column in enumerate(columns)])
        names.append("copy")
    widths = [len(FOLD)] * len(columns)

    def room(first: int, last: int) -> int:
        return sum(widths[first : last + 1]) + 2 * (last - first)

    # texts over few columns first: what a text lacks is added to its last column
    texts = itertools.chain.from_iterable(rows)
    for first, last, text in sorted(texts, key=_span_and_length):
        widths[last] += max(len(text) - room(first, last), 0)
    margin = max(map(len, names))
    lines = []
    for name, row in zip(names, rows, strict=True):
        cells = [f"│ {text:<{room(first, last)}}" for first, last, text in row]
        lines.append(f"{name:<{margin}} {''.join(cells)}│")
    return lines


def _span_and_length(header_text: tuple[int, int, str]) -> tuple[int, ...]:
    first, last, text = header_text
    return last - first, first, last, len(text)


def _header_row(diagram: Diagram, row: int) -> _HeaderTexts:
    """Return the texts of one row. A header of several rows has its text in the first of them."""
    # The headers that cross this row, by their first column.
    spans: dict[int, tuple[int, str]] = {}
    for header in diagram.headers:
        if header.row <= row < header.row + header.rows:
            text = _text(diagram, header) if header.row == row else ""
            spans[header.first] = header.last, text
    texts: _HeaderTexts = []
    first = 0
    while first < len(diagram.columns):
        column = diagram.columns[first]
        blank = REST if column.fill == "rest" and len(column.path) == row else ""
        last, text = spans.get(first, (first, blank))
        texts.append((first, last, text))
        first = last + 1
    return texts


def _text(diagram: Diagram, header: Header) -> str:
    if header.fill == "fold":
        return FOLD
    text = diagram.text(header)
    return REST if header.fill == "rest" and not 0 < len(text) <= MAX_REST else text
