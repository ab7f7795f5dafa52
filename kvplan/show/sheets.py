"""Sheets: the paper of a picture, an SVG document with styles for light and dark schemes, built element by element."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

WIDTH: Final = 1160
LEFT: Final = 84
EDGE: Final = 20
ROW: Final = 20
BYTES: Final = 22
RIBBONS: Final = 110
LETTER: Final = 7.2
DIGIT: Final = 6.3
"""Pixels: the width of the picture, where columns begin, its edge, the height of a row, of one of bytes and of ribbons,
and about the width of a letter and of a small digit."""

COLOURS: Final = 10

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
.kvplan .byte { font-size: 10px; fill: var(--on); text-anchor: middle }
.kvplan .cell text { text-anchor: middle }
.kvplan .end { text-anchor: end }
.kvplan .cell rect { fill: var(--cell) }
.kvplan .cell .still { opacity: .55 }
.kvplan .rest { fill: url(#kvplan-rest) }
.kvplan path, .kvplan .cell .tint { opacity: var(--veil) }
.kvplan path:hover { opacity: .9 }
""" + "".join(f".kvplan .c{i}, .kvplan .cell .c{i} {{ fill: var(--c{i}) }}\n" for i in range(COLOURS))


class Sheet:
    """A picture under way: its elements, and how far down it reaches."""

    def __init__(self, title: str, about: str) -> None:
        self.root: Element[str] = Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "kvplan", "role": "img"}
        )
        add(self.root, "title", title)
        add(self.root, "style", STYLE)
        tile = {"width": 5, "height": 5}
        pattern = add(add(self.root, "defs"), "pattern", id="kvplan-rest", **tile, patternUnits="userSpaceOnUse")
        add(pattern, "rect", **tile, fill="var(--bg)")
        add(pattern, "line", x1=0, y1=5, x2=5, y2=0, stroke="var(--line)")
        add(self.root, "rect", width="100%", height="100%", rx=8, fill="var(--bg)")
        add(self.root, "text", title, x=EDGE, y=34, class_="title")
        self.y: float = 42.0
        if about:
            add(self.root, "text", about, x=EDGE, y=54, class_="faint")
            self.y = 62.0

    def legend(self, colours: Mapping[str, str]) -> None:
        """What colours mean, in as many lines as it takes."""
        x, y = float(EDGE), self.y + 16
        for name, kind in colours.items():
            wide = 34 + len(name) * LETTER
            if x + wide > WIDTH - EDGE:
                x, y = float(EDGE), y + ROW
            add(self.root, "rect", x=x, y=y - 10, width=11, height=11, rx=2, class_=kind)
            add(self.root, "text", name, x=x + 16, y=y, class_="faint")
            x += wide
        add(self.root, "text", "⋯ more of the same; widths are not to scale", x=WIDTH - EDGE, y=y, class_="faint end")
        self.y = y + 8

    def heading(self, text: str, facts: str) -> None:
        """The first line of a part of the picture."""
        self.y += 34
        add(self.root, "text", text, x=EDGE, y=self.y, class_="panel")
        add(self.root, "text", facts, x=WIDTH - EDGE, y=self.y, class_="faint end")
        self.y += 12

    def text(self) -> str:
        height = math.ceil(self.y + EDGE)
        self.root.set("viewBox", f"0 0 {WIDTH} {height}")
        self.root.set("width", str(WIDTH))
        self.root.set("height", str(height))
        ElementTree.indent(self.root, " ")
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"


def add(parent: Element, tag: str, content: str = "", /, **attributes: Any) -> Element:
    """A new last child, numbers to a tenth; ``class_`` is the attribute ``class``, and what is empty is left out."""
    named = {key.rstrip("_"): _number(value) for key, value in attributes.items() if value != ""}
    element = ElementTree.SubElement(parent, tag, named)
    element.text = content or None
    return element


def _number(value: Any) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def fitting(parent: Element, texts: Sequence[str], width: float, letter: float, **attributes: Any) -> None:
    """The first of some texts that fits in a width, or none."""
    for text in texts:
        if text and fits(text, width, letter):
            add(parent, "text", text, **attributes)
            break


def fits(text: str, width: float, letter: float) -> bool:
    """Whether a text fits in a width, both about."""
    return len(text) * letter + 2 <= width
