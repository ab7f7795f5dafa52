"""Pictures of a worker's blocks and of a plan's copies, as text.

A line for each axis, the slowest at the top; bytes go from left to right. The order of the lines is
the order of the axes in memory.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import integer
from kvplan._text import WIDTH
from kvplan.describe.worker import Worker
from kvplan.display.blocks import DrawnLayer, facts, folded, layers_of
from kvplan.display.copies import panels
from kvplan.display.diagram import (
    NOTE,
    Diagram,
    Drawing,
    block_drawing,
    common,
    panel_drawing,
)
from kvplan.errors import KVPlanError
from kvplan.plan.mesh import MeshPlan
from kvplan.plan.transfer import TransferPlan

FOLD: Final = "···"
REST: Final = "░"
MARKS: Final[Mapping[str, str]] = MappingProxyType({"fold": FOLD, "rest": REST, "bytes": ""})


def show(value: object, *, width: int = WIDTH) -> str:
    """Return a picture of one block of a worker, or of the bytes that a plan copies.

    Rows are axes, from the slowest in memory to the fastest; columns are bytes. What repeats is
    folded, and equal layers are drawn once. The picture of a plan has the source above and the
    destination below, of the first blocks of a request; both ends of a copy have the same letter.
    ``width`` is how many characters a line may have: what is wider goes on below.

    >>> from kvplan import Model, plan_reads, show
    >>> model = Model.shipped("llama-3.1-70b")
    >>> prefill = model.engine("prefill", tp=8)
    >>> decode = model.engine("decode", tp=4, layout="BLNHC")
    >>> print(show(decode[1]))
    layers.0-79.attn
    one of 80 equal layers 16384 bytes apart, 16384 bytes in each of 4096 blocks of group attn, stride 1310720
    token │ 0                 │ 1                     │ 2                     │ ···│ 15                        │
    head  │ 2       │ 3       │ 2         │ 3         │ 2         │ 3         │    │ 2           │ 3           │
    kv    │ K  │ V  │ K  │ V  │ K   │ V   │ K   │ V   │ K   │ V   │ K   │ V   │    │ K    │ V    │ K    │ V    │
    byte  │ 0  │ 256│ 512│ 768│ 1024│ 1280│ 1536│ 1792│ 2048│ 2304│ 2560│ 2816│    │ 15360│ 15616│ 15872│ 16128│
    <BLANKLINE>
    byte: offset in one block
    >>> print(show(plan_reads(decode[1], prefill)))
    layers.0-79.attn
    positions [0, 16) of one of 80 equal layers: 16 KiB in 32 copies of 512 bytes
    worker   │ prefill/2                                        │ prefill/3                                        │
    block    │ 0                                                │ 0                                                │
    head     │ 2                                                │ 3                                                │
    position │ 0  │ 1  │ 2   │ 3   │ 4   │ 5   │ 6   │ ···│ 15  │ 0  │ 1  │ 2   │ 3   │ 4   │ 5   │ 6   │ ···│ 15  │
    byte     │ 0  │ 512│ 1024│ 1536│ 2048│ 2560│ 3072│    │ 7680│ 0  │ 512│ 1024│ 1536│ 2048│ 2560│ 3072│    │ 7680│
    copy     │ a  │ b  │ c   │ d   │ e   │ f   │ g   │    │ h   │ i  │ j  │ k   │ l   │ m   │ n   │ o   │    │ p   │
    <BLANKLINE>
    copy     │ a  │ i  │ b   │ j   │ c   │ k   │ d   │ l   │ e   │ m   │ f   │ n   │ g   │ o   │    │ h    │ p    │
    byte     │ 0  │ 512│ 1024│ 1536│ 2048│ 2560│ 3072│ 3584│ 4096│ 4608│ 5120│ 5632│ 6144│ 6656│    │ 15360│ 15872│
    head     │ 2  │ 3  │ 2   │ 3   │ 2   │ 3   │ 2   │ 3   │ 2   │ 3   │ 2   │ 3   │ 2   │ 3   │    │ 2    │ 3    │
    position │ 0       │ 1         │ 2         │ 3         │ 4         │ 5         │ 6         │ ···│ 15          │
    block    │ 0                                                                                                  │
    worker   │ decode/1                                                                                           │
    <BLANKLINE>
    byte: offset in one block

    Raises ``TYPE`` for another value, ``RANGE`` for a ``width`` below 1 and for blocks of too many
    cells.
    """  # noqa: E501  the example is printed so
    width = integer(width, "width of a picture", low=1)
    if isinstance(value, Worker):
        equal: dict[Any, list[DrawnLayer]] = {}
        for layer in layers_of(value):
            equal.setdefault(id(layer.cells), []).append(layer)
        drawings = []
        for layers in equal.values():
            names = folded(name for layer in layers for name in layer.names)
            drawings.append(block_drawing(names, facts(layers), layers))
        return _drawings(drawings, "padding, or other groups' bytes", width)
    if isinstance(value, TransferPlan):
        return _drawings(map(panel_drawing, panels(value)), "not moved", width)
    hints = {
        MeshPlan: "a mesh has a plan for each worker: show(mesh.plans[0])",
        tuple: "an engine is a tuple of workers: show(engine[0])",
    }
    raise KVPlanError(
        "TYPE",
        "show a value",
        expected="a Worker or a TransferPlan",
        got=type(value).__name__,
        hint=hints.get(type(value), ""),
    )


def _drawings(drawings: Iterable[Drawing], rest: str, width: int) -> str:
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
