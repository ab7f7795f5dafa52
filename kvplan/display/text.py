"""Drawings as plain text: a line for each axis, the slowest at the top.

Bytes go from left to right. The order of the lines is the order of the axes in memory. What is too
wide goes on below.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap
from types import MappingProxyType
from typing import Final

import attrs

from kvplan._text import WIDTH
from kvplan.display.diagram import NOTE, Diagram, Drawing, common

FOLD: Final = "···"
REST: Final = "░"
MARKS: Final[Mapping[str, str]] = MappingProxyType({"fold": FOLD, "rest": REST, "bytes": ""})


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
    for diagrams in drawing.choices:
        copies = sorted(each.copy for each in diagrams[0].columns if each.copy is not None)
        letters = dict[int | None, str](zip(copies, string.ascii_letters, strict=False))
        letters = letters if len(diagrams) > 1 else {}
        if all(len(_lines(diagram, letters)[0]) <= width for diagram in diagrams):
            break
    top, *bottom = (list(_wrapped(diagram, width, letters)) for diagram in diagrams)
    rows = [*top, *(lines[::-1] for side in bottom for lines in side)]
    return "\n\n".join("\n".join(lines) for lines in rows)


def _wrapped(
    diagram: Diagram, width: int, letters: Mapping[int | None, str]
) -> Iterator[list[str]]:
    """Yield a diagram in rows that fit, of one column at least, cut where slow axes change."""
    columns = diagram.columns
    first = 0
    while first < len(columns):
        last = len(columns)
        while True:
            lines = _lines(attrs.evolve(diagram, columns=columns[first:last]), letters)
            if len(lines[0]) <= width or last == first + 1:
                break
            last -= 1
        if last < len(columns):
            # Of the last two thirds of what fits, the end at which the labels differ the most.
            ends = range(last, first + (last - first) // 3, -1)
            last = min(
                ends, key=lambda end: len(common(*(c.labels for c in columns[end - 1 : end + 1])))
            )
            lines = _lines(attrs.evolve(diagram, columns=columns[first:last]), letters)
        yield lines
        first = last


def _lines(diagram: Diagram, letters: Mapping[int | None, str]) -> list[str]:
    """Return a diagram: headers, the byte at which each column begins, and letters of copies."""
    columns = [*enumerate(diagram.columns)]
    rows = []
    for depth in range(len(diagram.axes)):
        headers = diagram.headers(depth)
        rows.append([(first, last, text or MARKS[fill]) for first, last, fill, text in headers])
    rows.append([(i, i, "" if each.fill == "fold" else f"{each.start}") for i, each in columns])
    names = [*diagram.axes, "byte"]
    if letters:
        marks = [REST if each.fill == "rest" else "" for _, each in columns]
        rows.append([(i, i, letters.get(each.copy, marks[i])) for i, each in columns])
        names.append("copy")
    widths = [len(FOLD)] * len(columns)

    def room(first: int, last: int) -> int:
        return sum(widths[first : last + 1]) + 2 * (last - first)

    # texts over few columns first: what a text lacks is added to its last column
    texts = itertools.chain.from_iterable(rows)
    for first, last, text in sorted(texts, key=lambda span: (span[1] - span[0], *span[:2])):
        widths[last] += max(len(text) - room(first, last), 0)
    margin = max(map(len, names))
    lines = []
    for name, row in zip(names, rows, strict=True):
        cells = (f"│ {text:<{room(first, last)}}" for first, last, text in row)
        lines.append(f"{name:<{margin}} {''.join(cells)}│")
    return lines
