"""Drawings as SVG, with no script, in the reader's light or dark scheme, the same for equal values.

The source's bytes are above and the destination's below, each with its slowest axis at the edge of
the picture. Ribbons between them are copies, in the colour of the remote worker. The mouse shows
coordinates, addresses and bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvplan.display.diagram import BLOCK, MAX_COLUMNS, NOTE, WORKER, Column, Diagram, Drawing, common

WIDTH: Final = 1160
LEFT: Final = 84
EDGE: Final = 20
ROW: Final = 20
BYTES: Final = 22
RIBBONS: Final = 110
LETTER: Final = 7.2
DIGIT: Final = 6.9
"""Pixels: the width of the picture, where columns begin, the margin, the heights of a row of
headers, of bytes and of ribbons, and the approximate widths of a letter and of a small digit."""

COLOURS: Final = 10

LEGEND: Final = f"{NOTE}; ⋯ more of the same; widths are not to scale"

NARROW: Final[Mapping[str, float]] = MappingProxyType({"bytes": 0.0, "fold": 24.0, "rest": 18.0})
"""Widths of columns that do not share the room."""

STYLE: Final = """
.kvplan { --bg: #ffffff; --ink: #1f2328; --faint: #6b7280; --cell: #eef0f3; --line: #c5cad3; --on: #10131a; --veil: .33;
  --c0: #6ea4f4; --c1: #f5ae5b; --c2: #74c69d; --c3: #e78ab0; --c4: #ab98de;
  --c5: #e3cf5b; --c6: #6cc5d6; --c7: #c79f7c; --c8: #a2b57f; --c9: #ef8a80 }
@media (prefers-color-scheme: dark) { .kvplan { --bg: #0f1318; --ink: #e6e9ee; --faint: #8d97a5; --cell: #1e242c;
  --line: #3a434f; --veil: .42 } }
.kvplan text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink) }
.kvplan .title { font-size: 17px; font-weight: 600 }
.kvplan .panel { font-size: 13px; font-weight: 600 }
.kvplan .faint { fill: var(--faint) }
.kvplan .axis { font-size: 11px; fill: var(--faint); text-anchor: end }
.kvplan .byte { font-size: 11px; fill: var(--on); text-anchor: middle }
.kvplan .cell text { text-anchor: middle }
.kvplan .end { text-anchor: end }
.kvplan .cell rect { fill: var(--cell) }
.kvplan .cell .still { opacity: .55 }
.kvplan .rest { fill: url(#kvplan-rest) }
.kvplan path, .kvplan .cell .tint { opacity: var(--veil) }
.kvplan path:hover { opacity: .9 }
""" + "".join(f".kvplan .c{i}, .kvplan .cell .c{i} {{ fill: var(--c{i}) }}\n" for i in range(COLOURS))


def draw_svg(
    title: str,
    about: str,
    drawings: Iterable[Drawing],
    names: Sequence[str],
    rest: str,
) -> str:
    """The picture: titles, a legend of the ``names`` that have colours and of the hatched ``rest``, the drawings."""
    parts = [(drawing, _fitting(drawing.choices)) for drawing in drawings]
    every = [column for _, diagrams in parts for diagram in diagrams for column in diagram.columns]
    named = dict.fromkeys([*names, *(column.colour for column in every if column.colour)])
    colours = {name: f"c{i % COLOURS}" for i, name in enumerate(named)}
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "kvplan", "role": "img"})
    _add(root, "title", title)
    _add(root, "style", STYLE)
    tile = {"width": 5, "height": 5}
    pattern = _add(_add(root, "defs"), "pattern", id="kvplan-rest", **tile, patternUnits="userSpaceOnUse")
    _add(pattern, "rect", **tile, fill="var(--bg)")
    _add(pattern, "line", x1=0, y1=5, x2=5, y2=0, stroke="var(--line)")
    _add(root, "rect", width="100%", height="100%", rx=8, fill="var(--bg)")
    _add(root, "text", title, x=EDGE, y=34, class_="title")
    if about:
        _add(root, "text", about, x=EDGE, y=54, class_="faint")
    has_rest = any(column.fill == "rest" for column in every)
    y = _draw_legend(root, 62.0 if about else 42.0, colours | ({rest: "rest"} if has_rest else {}))
    for drawing, diagrams in parts:
        y += 34
        _add(root, "text", drawing.title, x=EDGE, y=y, class_="panel")
        _add(root, "text", drawing.facts, x=WIDTH - EDGE, y=y, class_="faint end")
        y = _draw_part(root, y + 12, diagrams, colours)
    height = math.ceil(y + EDGE)
    for key, value in (("viewBox", f"0 0 {WIDTH} {height}"), ("width", str(WIDTH)), ("height", str(height))):
        root.set(key, value)
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _fitting(choices: Iterable[tuple[Diagram, ...]]) -> tuple[Diagram, ...]:
    """The first choice of both sides of a plan; of a block, the first of few columns."""
    for diagrams in choices:
        if len(diagrams) > 1 or len(diagrams[0].columns) <= MAX_COLUMNS:
            break
    return diagrams


def _draw_legend(root: Element, top: float, colours: Mapping[str, str]) -> float:
    """What colours mean, in as many lines as it takes; returns where it ends."""
    x, y = float(EDGE), top + 16
    for name, kind in colours.items():
        wide = 34 + len(name) * LETTER
        if x + wide > WIDTH - EDGE - len(LEGEND) * LETTER:
            x, y = float(EDGE), y + ROW
        _add(root, "rect", x=x, y=y - 10, width=11, height=11, rx=2, class_=kind)
        _add(root, "text", name, x=x + 16, y=y, class_="faint")
        x += wide
    _add(root, "text", LEGEND, x=WIDTH - EDGE, y=y, class_="faint end")
    return y + 8


def _draw_part(
    root: Element,
    y: float,
    diagrams: Sequence[Diagram],
    colours: Mapping[str, str],
) -> float:
    """A block; or the source's blocks, the destination's, and ribbons between them. Returns where it ends."""
    top, *others = diagrams
    above = _spans(top)
    is_plan = bool(others)
    _draw_headers(root, top, above, y, colours if is_plan else {}, is_down=False)
    y += len(top.axes) * ROW
    _draw_bytes(root, top, above, y, colours)
    y += BYTES
    for bottom in others:
        below, end = _spans(bottom), y + RIBBONS
        _add(root, "text", "↓", x=LEFT - 10, y=(y + end) / 2 + 4, class_="axis")
        target = {column.copy: span for column, span in zip(bottom.columns, below, strict=True)}
        for column, span in zip(top.columns, above, strict=True):
            if column.copy is not None:
                ribbon = _ribbon(span, target[column.copy], y + 1, end - 2)
                _add(_add(root, "path", d=ribbon, class_=colours[column.colour]), "title", column.hover)
        _draw_bytes(root, bottom, below, end, colours)
        _draw_headers(root, bottom, below, end + BYTES, colours, is_down=True)
        y = end + BYTES + len(bottom.axes) * ROW
    return y


def _ribbon(top: tuple[float, float], bottom: tuple[float, float], y0: float, y1: float) -> str:
    """The outline of a band from one span to another below it."""
    (a, b), (c, d), bend = top, bottom, RIBBONS * 0.45
    curve = f"M{a:.1f} {y0:.1f}C{a:.1f} {y0 + bend:.1f} {c:.1f} {y1 - bend:.1f} {c:.1f} {y1:.1f}H{d:.1f}"
    return f"{curve}C{d:.1f} {y1 - bend:.1f} {b:.1f} {y0 + bend:.1f} {b:.1f} {y0:.1f}Z"


_ColumnSpans = Sequence[tuple[float, float]]
"""Where each column begins and ends, from left to right."""


def _spans(diagram: Diagram) -> _ColumnSpans:
    """The columns from the left to the right edge: wider for more bytes, with wider gaps where slower axes change."""
    columns = diagram.columns
    gaps = [_gap(a, b, len(diagram.axes)) for a, b in itertools.pairwise(columns)]
    narrow = [NARROW[column.fill] for column in columns]
    width = WIDTH - LEFT - EDGE
    squeeze = min(1.0, width / 2 / max(sum(narrow) + sum(gaps), 1))
    sizes = [column.stop - column.start if column.fill == "bytes" else 0 for column in columns]
    least = min(filter(None, sizes), default=1)
    weight = [1 + 0.3 * math.log2(size / least) if size else 0 for size in sizes]
    room = (width - squeeze * (sum(narrow) + sum(gaps))) / max(sum(weight), 1)
    x, found = float(LEFT), []
    for share, extra, gap in zip(weight, narrow, [*gaps, 0.0], strict=True):
        found.append((x, x + share * room + squeeze * extra))
        x = found[-1][1] + squeeze * gap
    return found


def _gap(a: Column, b: Column, depth: int) -> float:
    return 1.0 + 2.0 * max(depth - 1 - len(common(a.path, b.path)), 0)


def _draw_headers(
    root: Element, diagram: Diagram, spans: _ColumnSpans, y: float, colours: Mapping[str, str], *, is_down: bool
) -> None:
    """The headers, the slowest axis at the bottom if ``is_down``; workers that have a colour in it."""
    depth = len(diagram.axes)
    for row, axis in enumerate(diagram.axes):
        at = y + (depth - 1 - row if is_down else row) * ROW
        _add(root, "text", axis, x=LEFT - 10, y=at + 14, class_="axis")
    group = _add(root, "g", class_="cell")
    for header in diagram.headers:
        (low, _), (_, high) = spans[header.first], spans[header.last]
        at = y + (depth - header.row - header.rows if is_down else header.row) * ROW
        middle = {"x": (low + high) / 2, "y": at + header.rows * ROW / 2 + 4}
        if header.fill == "fold":
            _add(group, "text", "⋯", **middle, class_="faint")
            continue
        box = {"x": low, "y": at, "width": high - low, "height": header.rows * ROW - 1}
        _add(group, "rect", **box, class_="still" if header.fill == "rest" else "")
        interval = header.interval
        if interval and interval.axis == WORKER and interval.name in colours:
            _add(group, "rect", **box, class_=f"tint {colours[interval.name]}")
        number = str(interval.start) if interval and interval.axis == BLOCK else ""
        texts = [diagram.text(header, with_more=True), diagram.text(header), str(interval or ""), number]
        for text in [text for text in texts if text and _fits(text, high - low, LETTER)][:1]:
            _add(group, "text", text, **middle)


def _draw_bytes(
    root: Element,
    diagram: Diagram,
    spans: _ColumnSpans,
    y: float,
    colours: Mapping[str, str],
) -> None:
    """The bytes of each column on their colour: from the first to the last where there is room in all columns."""
    _add(root, "text", "byte", x=LEFT - 10, y=y + 15, class_="axis")
    shown = [(column, span) for column, span in zip(diagram.columns, spans, strict=True) if column.fill != "fold"]
    texts = {column: f"{column.start}-{column.stop - 1}" for column, _ in shown if column.colour}
    if not all(_fits(texts[column], high - low, DIGIT) for column, (low, high) in shown if column.colour):
        texts = {column: str(column.start) for column in texts}
    for column, (low, high) in shown:
        group = _add(root, "g")
        _add(group, "title", column.hover)
        kind = colours.get(column.colour, "rest")
        _add(group, "rect", x=low, y=y, width=high - low, height=BYTES - 1, class_=kind)
        if column in texts and _fits(texts[column], high - low, DIGIT):
            _add(group, "text", texts[column], x=(low + high) / 2, y=y + 15, class_="byte")


def _fits(text: str, width: float, letter: float) -> bool:
    return len(text) * letter + 2 <= width


def _add(parent: Element, tag: str, content: str = "", /, **attributes: Any) -> Element:
    """A new last child. Numbers have one decimal; ``class_`` is the attribute ``class``; empty ones are left out."""
    values = {
        key.rstrip("_"): f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
        for key, value in attributes.items()
        if value != ""
    }
    element = ElementTree.SubElement(parent, tag, values)
    element.text = content or None
    return element
