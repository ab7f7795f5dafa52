"""Pictures: what a worker's blocks look like, and what a plan moves, for terminals, notebooks and pages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from kvplan._checks import integer, name, wrong_type
from kvplan._text import fold
from kvplan.describe.blocks import Blocks, Tokens
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.mesh import MeshPlan
from kvplan.plan.transfer import TransferPlan
from kvplan.show.copies import Panel
from kvplan.show.drawing import COLUMNS, draw_panels, draw_worker
from kvplan.show.panels import panels
from kvplan.show.svg import draw_pages, draw_plan


@attrs.frozen(repr=False)
class Picture:
    """A drawing as plain ``text`` and as ``svg``, equal for equal values.

    ``str(picture)`` is the text; a notebook shows the SVG; :meth:`save` keeps either.
    """

    title: str
    text: str
    svg: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file: the SVG where its name ends in ``.svg``, the text where it ends in ``.txt``.

        Raises ``NAME`` for any other name, and where the file cannot be written.

        >>> from kvplan import Model
        >>> from kvplan.show import show
        >>> show(Model.shipped("llama-3.1-8b").engine("decode")[0]).save("a.png")
        Traceback (most recent call last):
        ...
        kvplan.errors.KVPlanError: NAME: cannot save a picture: expected a path that ends in .svg or .txt, got 'a.png'
        """
        try:
            ending = Path(path).suffix.lower()
        except TypeError:
            raise wrong_type("path of a picture", "a path", path) from None
        if ending not in (".svg", ".txt"):
            raise _unsaved("a path that ends in .svg or .txt", repr(os.fspath(path)))
        try:
            Path(path).write_text(self.svg if ending == ".svg" else f"{self.text}\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            raise _unsaved("a path that can be written to", f"{os.fspath(path)!r}: {reason}") from None

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Picture: {self.title}>"


def _unsaved(expected: str, got: str) -> KVPlanError:
    return KVPlanError("NAME", "save a picture", expected=expected, got=got)


def show(
    value: object,
    *,
    local: Mapping[str, Blocks] | None = None,
    remote: Mapping[str, Blocks] | None = None,
    tokens: Tokens = None,
    about: str = "",
    width: int = COLUMNS,
) -> Picture:
    """The picture of a worker: what one block looks like. Or of a plan: which bytes go where.

    Rows are axes, from the slowest in memory to the fastest; columns are bytes, what repeats left out in the middle.
    Equal layers are one. Of a plan, letters or ribbons say which bytes are copied to which: in the first blocks, as
    many as tell how both sides meet, of the request that ``local``, ``remote`` and ``tokens`` are, as
    :meth:`TransferPlan.bind` takes them, or of any; blocks are told by their place in the request, and by the ids of
    one that is given. ``about`` is a line under the title of the SVG, ``width`` how many characters the lines of the
    text may have: what is wider goes on below.

    >>> from kvplan import Model, plan_reads
    >>> from kvplan.show import show
    >>> model = Model.shipped("llama-3.1-70b")
    >>> prefill, decode = model.engine("prefill", tp=8), model.engine("decode", tp=4, layout="BLNHC")
    >>> print(show(decode[1]))
    layers.0-79.attn
    one of 80 equal layers, 16384 bytes in each of 4096 blocks of group attn, step 1310720
    layer │ 0                                    │ 1    │ 2    │ ···│ 79     │
    token │ 0            │ 1   │ 2   │ ···│ 15   │      │      │    │        │
    head  │ 2       │ 3  │     │     │    │      │      │      │    │        │
    kv    │ K  │ V  │    │     │     │    │      │      │      │    │        │
    byte  │ 0  │ 256│ 512│ 1024│ 2048│    │ 15360│ 16384│ 32768│    │ 1294336│
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

    Raises ``TYPE`` for another value, ``NAME`` for an ``about`` of several lines, ``RANGE`` for pages of too many
    pieces and a ``width`` below 1, and what ``bind`` raises.
    """
    about = name(about, "about of a picture") if about else ""
    width = integer(width, "width of a picture", low=1)
    match value:
        case Worker():
            title = f"One block of {value.label}"
            return Picture(title, draw_worker(value, width), draw_pages(title, about, value))
        case TransferPlan():
            given = any(part is not None for part in (local, remote, tokens))
            request = (local or {}, remote or {}, tokens) if given else None
            found = panels(value, request)
            reads = value.operation == "READ"
            title = f"{value.local.label} {'reads from' if reads else 'writes to'} {_names(found)}"
            text = draw_panels(found, value.operation, width)
            return Picture(title, text, draw_plan(title, about, found, value.operation))
        case _:
            hint = "a mesh has a plan for each worker: show(mesh.plans[0])" if isinstance(value, MeshPlan) else ""
            got = type(value).__name__
            raise KVPlanError("TYPE", "show a value", expected="a Worker or a TransferPlan", got=got, hint=hint)


def _names(found: Sequence[Panel]) -> str:
    """The remote workers of some panels."""
    labels = dict.fromkeys(copy.remote.worker.label for panel in found for copy in panel.copies)
    return fold(labels) or "nobody"
