"""Drawings as SVG, with no script, in the reader's light or dark scheme, the same for equal values.

The source's bytes are above and the destination's below, each with its slowest axis at the edge of
the picture. Ribbons between them are copies, in the colour of the remote worker. The mouse shows
coordinates, addresses and bytes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvplan.display.diagram import NOTE, Column, Diagram, Drawing, common

SVG_WIDTH: Final = 1160
LEFT: Final = 84
EDGE: Final = 20
ROW: Final = 20
BYTES_HEIGHT: Final = 22
RIBBONS: Final = 110
LETTER: Final = 7.2
PANEL_LETTER: Final = 8.8
TITLE_LETTER: Final = 11.5
"""Pixels: the width of the picture, where columns begin, the margin, the heights of a row of
headers, of bytes and of ribbons, and the approximate widths of a letter, and of one of titles."""

BYTE_SIZES: Final = (11, 10, 9)
"""Pixels: sizes of the numbers of bytes, of which the first one counts that lets all fit."""

DIGIT: Final = 0.64
"""The width of a digit, relative to its size."""

LEGEND: Final = f"{NOTE}; ⋯ more of the same; widths are not to scale"

NARROW: Final[Mapping[str, float]] = MappingProxyType({"bytes": 0.0, "fold": 24.0, "rest": 18.0})
"""Widths of columns that do not share the room."""

LIGHT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ground": "#ffffff",
        "ink": "#1f2328",
        "faint": "#6b7280",
        "cell": "#eef0f3",
        "line": "#c5cad3",
        "veil": ".33",
    }
)
DARK: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ground": "#0f1318",
        "ink": "#e6e9ee",
        "faint": "#8d97a5",
        "cell": "#1e242c",
        "line": "#3a434f",
        "veil": ".42",
    }
)
"""Colours by their use, and how opaque copies are, in the reader's light and dark scheme."""

WORKER_COLOURS: Final = (
    *("#6ea4f4", "#f5ae5b", "#74c69d", "#e78ab0", "#ab98de"),
    *("#e3cf5b", "#6cc5d6", "#c79f7c", "#a2b57f", "#ef8a80"),
)
"""Colours of remote workers, in both schemes; one more has the first again."""

SCHEME_STYLE: Final = """\
.kvplan text { fill: %(ink)s }
.kvplan .ground { fill: %(ground)s }
.kvplan .hatch { stroke: %(line)s }
.kvplan .faint, .kvplan .axis { fill: %(faint)s }
.kvplan .cell rect { fill: %(cell)s }
.kvplan path, .kvplan .cell .tint { opacity: %(veil)s }
"""
FIXED_STYLE: Final = """\
.kvplan text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif }
.kvplan .title { font-size: 17px; font-weight: 600 }
.kvplan .panel { font-size: 13px; font-weight: 600 }
.kvplan .axis { font-size: 11px; text-anchor: end }
.kvplan .byte { font-size: 11px; fill: #10131a; text-anchor: middle }
.kvplan .cell text { text-anchor: middle }
.kvplan .end { text-anchor: end }
.kvplan .rest { fill: url(#kvplan-rest) }
.kvplan path:hover { opacity: .9 }
"""


def _style() -> str:
    """Return the style sheet.

    Its colours are literal, since many programs know neither variables nor media, and the dark
    scheme comes on top. Of two rules for one element, the later one counts.
    """
    # The dark scheme states the same rules again, with other colours.
    schemes = SCHEME_STYLE % LIGHT
    schemes += f"@media (prefers-color-scheme: dark) {{\n{SCHEME_STYLE % DARK}}}\n"
    # Cells have a fill of their own, which the colour of a worker has to replace.
    colours = ""
    for number, colour in enumerate(WORKER_COLOURS):
        colours += f".kvplan .c{number}, .kvplan .cell .c{number} {{ fill: {colour} }}\n"
    return f"\n{schemes}{FIXED_STYLE}{colours}"


def draw_svg(
    title: str,
    about: str,
    drawings: Iterable[Drawing],
    names: Sequence[str],
    rest: str,
) -> str:
    """Return the picture: titles, a legend, the drawings.

    The legend has the ``names`` that have colours, and the hatched ``rest``.
    """
    parts = [(drawing, drawing.choices[0]) for drawing in drawings]
    columns = [each for _, diagrams in parts for diagram in diagrams for each in diagram.columns]
    coloured = dict.fromkeys([*names, *(column.colour for column in columns if column.colour)])
    colours = {name: f"c{i % len(WORKER_COLOURS)}" for i, name in enumerate(coloured)}
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "kvplan", "role": "img"})
    _add(root, "title", title)
    _add(root, "style", _style())
    _add_hatching(root)
    _add(root, "rect", width="100%", height="100%", rx=8, class_="ground")
    y = _draw_lines(root, 34.0, title, TITLE_LETTER, "title")
    if about:
        y = _draw_lines(root, y + ROW, about, LETTER, "faint")
    # The hatching is explained only if there is some.
    legend = dict(colours)
    if any(column.fill == "rest" for column in columns):
        legend[rest] = "rest"
    y = _draw_legend(root, y + 8, legend)
    for drawing, diagrams in parts:
        y = _draw_lines(root, y + 34, drawing.title, PANEL_LETTER, "panel")
        # Facts follow the last line of the title, or are below it.
        last_line = _lines(drawing.title, PANEL_LETTER)[-1]
        width = len(last_line) * PANEL_LETTER + len(drawing.facts) * LETTER
        if width > SVG_WIDTH - 3 * EDGE:
            y += ROW
        _add(root, "text", drawing.facts, x=SVG_WIDTH - EDGE, y=y, class_="faint end")
        y = _draw_part(root, y + 12, diagrams, colours)
    height = math.ceil(y + EDGE)
    root.set("viewBox", f"0 0 {SVG_WIDTH} {height}")
    root.set("width", str(SVG_WIDTH))
    root.set("height", str(height))
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _lines(text: str, letter: float) -> list[str]:
    """Return a text in lines that fit into the picture, which end after a comma or a space."""
    most = int((SVG_WIDTH - 2 * EDGE) / letter)
    return re.findall(rf".{{1,{most}}}(?:(?<=[, ])|$)|.{{1,{most}}}", text)


def _draw_lines(root: Element, y: float, text: str, letter: float, style: str) -> float:
    """Draw a text, in as many lines as it takes; return the offset of the last one."""
    lines = _lines(text, letter)
    for number, line in enumerate(lines):
        _add(root, "text", line, x=EDGE, y=y + number * ROW, class_=style)
    return y + (len(lines) - 1) * ROW


def _add_hatching(root: Element) -> None:
    """Add the pattern that fills bytes that are not copied."""
    defs = _add(root, "defs")
    tile = {"width": 5, "height": 5}
    pattern = _add(defs, "pattern", id="kvplan-rest", **tile, patternUnits="userSpaceOnUse")
    _add(pattern, "rect", **tile, class_="ground")
    _add(pattern, "line", x1=0, y1=5, x2=5, y2=0, class_="hatch")


def _draw_legend(root: Element, top: float, colours: Mapping[str, str]) -> float:
    """Draw the meaning of colours, in as many lines as it takes; return where it ends."""
    x = float(EDGE)
    y = top + 16
    for name, colour in colours.items():
        width = 34 + len(name) * LETTER
        if x + width > SVG_WIDTH - EDGE - len(LEGEND) * LETTER:
            x = float(EDGE)
            y += ROW
        _add(root, "rect", x=x, y=y - 10, width=11, height=11, rx=2, class_=colour)
        _add(root, "text", name, x=x + 16, y=y, class_="faint")
        x += width
    _add(root, "text", LEGEND, x=SVG_WIDTH - EDGE, y=y, class_="faint end")
    return y + 8


def _draw_part(
    root: Element,
    y: float,
    diagrams: Sequence[Diagram],
    colours: Mapping[str, str],
) -> float:
    """Draw a block, or the source's blocks, the destination's, and ribbons between them.

    Return where it ends.
    """
    top, *bottoms = diagrams
    top_spans = _spans(top)
    is_plan = bool(bottoms)
    _draw_headers(root, top, top_spans, y, colours if is_plan else {}, is_down=False)
    y += len(top.axes) * ROW
    _draw_bytes(root, top, top_spans, y, colours)
    y += BYTES_HEIGHT
    for bottom in bottoms:
        bottom_spans = _spans(bottom)
        bytes_y = y + RIBBONS
        _add(root, "text", "↓", x=LEFT - 10, y=(y + bytes_y) / 2 + 4, class_="axis")
        columns = zip(bottom.columns, bottom_spans, strict=True)
        # Both sides show the same copies: each ribbon has a span on either side.
        span_of_copy = {column.copy: span for column, span in columns}
        for column, span in zip(top.columns, top_spans, strict=True):
            if column.copy is not None:
                outline = _ribbon(span, span_of_copy[column.copy], y + 1, bytes_y - 2)
                ribbon = _add(root, "path", d=outline, class_=colours[column.colour])
                _add(ribbon, "title", column.hover)
        _draw_bytes(root, bottom, bottom_spans, bytes_y, colours)
        headers_y = bytes_y + BYTES_HEIGHT
        _draw_headers(root, bottom, bottom_spans, headers_y, colours, is_down=True)
        y = headers_y + len(bottom.axes) * ROW
    return y


def _ribbon(top: tuple[float, float], bottom: tuple[float, float], y0: float, y1: float) -> str:
    """Return the outline of a band from one span to another below it."""
    left, right = top
    low, high = bottom
    bend0 = y0 + RIBBONS * 0.45
    bend1 = y1 - RIBBONS * 0.45
    down = f"M{left:.1f} {y0:.1f}C{left:.1f} {bend0:.1f} {low:.1f} {bend1:.1f} {low:.1f} {y1:.1f}"
    up = f"C{high:.1f} {bend1:.1f} {right:.1f} {bend0:.1f} {right:.1f} {y0:.1f}Z"
    return f"{down}H{high:.1f}{up}"


_ColumnSpans = Sequence[tuple[float, float]]
"""The left and right edge of each column, from left to right."""


def _spans(diagram: Diagram) -> _ColumnSpans:
    """Return the spans of columns over the whole width.

    Columns of more bytes are wider, and gaps where slower axes change.
    """
    columns = diagram.columns
    gaps = [_gap(a, b, len(diagram.axes)) for a, b in itertools.pairwise(columns)]
    narrow = [NARROW[column.fill] for column in columns]
    width = SVG_WIDTH - LEFT - EDGE
    # Gaps and narrow columns take half of the width at most; the bytes share the room that is left.
    fixed = sum(narrow) + sum(gaps)
    squeeze = min(1.0, width / 2 / max(fixed, 1))
    sizes = [column.stop - column.start if column.fill == "bytes" else 0 for column in columns]
    # A column of twice the bytes is 30 % of a unit wider, so that small ones stay readable.
    smallest = min(filter(None, sizes), default=1)
    weights = [1 + 0.3 * math.log2(size / smallest) if size else 0 for size in sizes]
    room = (width - squeeze * fixed) / max(sum(weights), 1)
    x = float(LEFT)
    spans = []
    for weight, narrow_width, gap in zip(weights, narrow, [*gaps, 0.0], strict=True):
        right = x + weight * room + squeeze * narrow_width
        spans.append((x, right))
        x = right + squeeze * gap
    return spans


def _gap(a: Column, b: Column, depth: int) -> float:
    return 1.0 + 2.0 * max(depth - 1 - len(common(a.labels, b.labels)), 0)


def _draw_headers(
    root: Element,
    diagram: Diagram,
    spans: _ColumnSpans,
    y: float,
    colours: Mapping[str, str],
    *,
    is_down: bool,
) -> None:
    """Draw the headers, with the slowest axis at the bottom if ``is_down``; workers in colour."""
    depth = len(diagram.axes)
    group = Element("g", {"class": "cell"})
    for row, axis in enumerate(diagram.axes):
        row_y = y + (depth - 1 - row if is_down else row) * ROW
        _add(root, "text", axis, x=LEFT - 10, y=row_y + 14, class_="axis")
        for first, last, fill, text in diagram.headers(row):
            left, right = spans[first][0], spans[last][1]
            middle = {"x": (left + right) / 2, "y": row_y + ROW / 2 + 4}
            if fill == "fold":
                _add(group, "text", "⋯", **middle, class_="faint")
            if not text:
                continue
            box = {"x": left, "y": row_y, "width": right - left, "height": ROW - 1}
            _add(group, "rect", **box)
            if row == 0 and text in colours:
                _add(group, "rect", **box, class_=f"tint {colours[text]}")
            if _fits(text, right - left, LETTER):
                _add(group, "text", text, **middle)
    root.append(group)


def _draw_bytes(
    root: Element,
    diagram: Diagram,
    spans: _ColumnSpans,
    y: float,
    colours: Mapping[str, str],
) -> None:
    """Draw the bytes of each column on their colour.

    They are numbered from the first to the last where there is room in all columns.
    """
    _add(root, "text", "byte", x=LEFT - 10, y=y + 15, class_="axis")
    coloured = []
    for column, (left, right) in zip(diagram.columns, spans, strict=True):
        if column.colour:
            coloured.append((column, right - left))
    # First and last byte in all columns, or the first byte in all: never a mixture.
    size = BYTE_SIZES[0]
    texts = {column: f"{column.start}-{column.stop - 1}" for column, _ in coloured}
    if not all(_fits(texts[column], width, DIGIT * size) for column, width in coloured):
        texts = {column: str(column.start) for column, _ in coloured}
        for size in BYTE_SIZES:
            if all(_fits(texts[column], width, DIGIT * size) for column, width in coloured):
                break
    style = "" if size == BYTE_SIZES[0] else f"font-size: {size}px"
    for column, (left, right) in zip(diagram.columns, spans, strict=True):
        if column.fill == "fold":
            continue
        width = right - left
        group = _add(root, "g")
        _add(group, "title", column.hover)
        colour = colours.get(column.colour, "rest")
        _add(group, "rect", x=left, y=y, width=width, height=BYTES_HEIGHT - 1, class_=colour)
        if column in texts and _fits(texts[column], width, DIGIT * size):
            middle = {"x": (left + right) / 2, "y": y + 15}
            _add(group, "text", texts[column], **middle, class_="byte", style=style)


def _fits(text: str, width: float, letter: float) -> bool:
    return len(text) * letter + 2 <= width


def _add(parent: Element, tag: str, content: str = "", /, **attributes: Any) -> Element:
    """Add a last child, and return it.

    Numbers have one decimal; ``class_`` is the attribute ``class``; empty ones are left out.
    """
    texts = {}
    for key, attribute in attributes.items():
        is_float = isinstance(attribute, float)
        text = f"{attribute:.1f}".removesuffix(".0") if is_float else str(attribute)
        if text:
            texts[key.rstrip("_")] = text
    element = ElementTree.SubElement(parent, tag, texts)
    element.text = content or None
    return element
