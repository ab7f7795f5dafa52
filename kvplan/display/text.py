"""Drawings as plain text: a line for each axis, the slowest at the top, and bytes from left to right.

The order of the lines is the order of the axes in memory. What is too wide goes on below, each part with its lines.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from types import MappingProxyType
from typing import Final

from kvplan._text import WIDTH
from kvplan.display.diagram import MAX_COLUMNS, NOTE, Diagram, Drawing, Header, common

FOLD: Final = "···"
REST: Final = "░"

MAX_REST: Final = 8
"""The coordinates of bytes that are not copied are printed if they have at most so many characters."""

NONE: Final[Mapping[int | None, str]] = MappingProxyType({})


def draw_text(drawings: Iterable[Drawing], rest: str, width: int = WIDTH) -> str:
    """Drawings one below the other. The legend says what the ``rest`` is that is hatched."""
    texts = [
        "\n".join([*wrap(drawing.title, width), *wrap(drawing.facts, width), _drawn(drawing, width)])
        for drawing in drawings
    ]
    legend = f"{REST} {rest}; {NOTE}" if any(REST in text for text in texts) else NOTE
    return "\n\n".join([*texts, legend]) if texts else ""


def _drawn(drawing: Drawing, width: int) -> str:
    """The fullest choice that fits, with a letter below each copy, which it has on both sides."""
    for number, diagrams in enumerate(drawing.choices):
        shown = sorted(column.copy for column in diagrams[0].columns if column.copy is not None)
        letters = dict[int | None, str](zip(shown, string.ascii_letters, strict=False))
        # of a block map, three opened parts of each axis are worth a second line
        is_worth = number == 1 and len(diagrams) == 1 and len(diagrams[0].columns) <= MAX_COLUMNS
        if is_worth or all(_width(_lines(diagram, letters)) <= width for diagram in diagrams):
            break
    top, *bottom = (list(_wrapped(diagram, width, letters)) for diagram in diagrams)
    parts = [*top, *(lines[::-1] for side in bottom for lines in side)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _wrapped(diagram: Diagram, width: int, letters: Mapping[int | None, str] = NONE) -> Iterator[list[str]]:
    """A diagram in parts that fit, each of one column at least. A part ends where the slowest axis goes on."""
    columns, first = diagram.columns, 0
    while first < len(columns):
        last = len(columns)
        while last > first + 1 and _width(_lines(Diagram.of(columns[first:last]), letters)) > width:
            last -= 1
        if last < len(columns):
            ends = range(last, first + (last - first) // 3, -1)
            last = min(ends, key=lambda end: len(common(columns[end - 1].path, columns[end].path)))
        yield _lines(Diagram.of(columns[first:last]), letters)
        first = last


def _width(lines: Sequence[str]) -> int:
    return max(map(len, lines))


_HeaderTexts = list[tuple[int, int, str]]
"""Texts from left to right, each with the first and the last column that it spans."""


def _lines(diagram: Diagram, letters: Mapping[int | None, str] = NONE) -> list[str]:
    """A diagram: its headers, the byte at which each column begins, and the letters of copies."""
    columns = diagram.columns
    rows = [_header_row(diagram, row) for row in range(len(diagram.axes))]
    rows.append([(i, i, "" if column.fill == "fold" else str(column.start)) for i, column in enumerate(columns)])
    names = [*diagram.axes, "byte"]
    if letters:
        rest = [REST if column.fill == "rest" else "" for column in columns]
        rows.append([(i, i, letters.get(column.copy, rest[i])) for i, column in enumerate(columns)])
        names.append("copy")
    widths = [len(FOLD)] * len(columns)

    def room(first: int, last: int) -> int:
        return sum(widths[first : last + 1]) + 2 * (last - first)

    # texts over few columns first: what a text lacks is added to its last column
    for _, first, last, letters_of in sorted(
        (last - first, first, last, len(t)) for row in rows for first, last, t in row
    ):
        widths[last] += max(letters_of - room(first, last), 0)
    margin = max(map(len, names))
    cells = ("".join(f"│ {text:<{room(first, last)}}" for first, last, text in row) for row in rows)
    return [f"{name:<{margin}} {line}│" for name, line in zip(names, cells, strict=True)]


def _header_row(diagram: Diagram, row: int) -> _HeaderTexts:
    """The texts of one row. A header of several rows has its text in the first of them."""
    spans = {
        header.first: (header.last, _text(diagram, header) if header.row == row else "")
        for header in diagram.headers
        if header.row <= row < header.row + header.rows
    }
    found: _HeaderTexts = []
    while (at := found[-1][1] + 1 if found else 0) < len(diagram.columns):
        column = diagram.columns[at]
        blank = REST if column.fill == "rest" and len(column.path) == row else ""
        found.append((at, *spans.get(at, (at, blank))))
    return found


def _text(diagram: Diagram, header: Header) -> str:
    if header.fill == "fold":
        return FOLD
    text = diagram.text(header)
    return REST if header.fill == "rest" and not 0 < len(text) <= MAX_REST else text
