"""Pictures of a worker's blocks and of a plan's copies, for terminals, notebooks and pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from kvplan._checks import integer, name
from kvplan._text import WIDTH, count, fold, size
from kvplan.budget import limited
from kvplan.describe.blocks import Blocks, Request, Tokens
from kvplan.describe.worker import Worker
from kvplan.display.blockmap import BlockMap, block_maps
from kvplan.display.copies import Panel, panels
from kvplan.display.diagram import Drawing, map_diagrams, panel_diagrams
from kvplan.display.svg import draw_svg
from kvplan.display.text import draw_text
from kvplan.errors import KVPlanError
from kvplan.plan.mesh import MeshPlan
from kvplan.plan.transfer import TransferPlan


@attrs.frozen(repr=False)
class Picture:
    """A drawing as plain ``text`` and as ``svg``, equal for equal values.

    ``str(picture)`` is the text. A notebook displays the SVG.
    """

    title: str
    text: str
    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Picture: {self.title}>"


def show(
    value: object,
    *,
    local: Mapping[str, Blocks] | None = None,
    remote: Mapping[str, Blocks] | None = None,
    tokens: Tokens = None,
    about: str = "",
    width: int = WIDTH,
) -> Picture:
    """Return a picture of one block of a worker, or of the bytes that a plan copies.

    Rows are axes, from the slowest in memory to the fastest; columns are bytes. What repeats is
    folded, and equal layers are drawn once. In the picture of a plan, letters or ribbons connect
    the bytes that are copied. It shows the first blocks of the request that ``local``, ``remote``
    and ``tokens`` describe, as :meth:`TransferPlan.bind` takes them, with their block ids, and says
    what all of it moves; without these arguments, the first blocks of an example. ``about`` is a
    line under the title of the SVG. ``width`` is how many characters a line of the text may have:
    what is wider goes on below.

    >>> from kvplan import Model, plan_reads, show
    >>> model = Model.shipped("llama-3.1-70b")
    >>> prefill = model.engine("prefill", tp=8)
    >>> decode = model.engine("decode", tp=4, layout="BLNHC")
    >>> print(show(decode[1]))
    layers.0-79.attn
    one of 80 equal layers, 16384 bytes in each of 4096 blocks of group attn, stride 1310720
    layer │ 0                                    │ 1    │ 2    │ ···│ 79     │
    token │ 0            │ 1   │ 2   │ ···│ 15   │      │      │    │        │
    head  │ 2       │ 3  │     │     │    │      │      │      │    │        │
    kv    │ K  │ V  │    │     │     │    │      │      │      │    │        │
    byte  │ 0  │ 256│ 512│ 1024│ 2048│    │ 15360│ 16384│ 32768│    │ 1294336│
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

    Raises ``TYPE`` for another value, ``NAME`` for an ``about`` of several lines, ``RANGE`` for a
    ``width`` below 1 and for blocks of too many pieces, and what ``bind`` raises.
    """  # noqa: E501  a picture stands in the example as it is printed
    about = "" if isinstance(about, str) and not about else name(about, "about of a picture")
    width = integer(width, "width of a picture", low=1)
    with limited():
        return _shown(value, local, remote, tokens, about, width)


def _shown(
    value: object,
    local: Mapping[str, Blocks] | None,
    remote: Mapping[str, Blocks] | None,
    tokens: Tokens,
    about: str,
    width: int,
) -> Picture:
    """Return the picture of a value. Raises ``TYPE`` for one that has none."""
    if isinstance(value, Worker):
        return _picture(f"One block of {value.label}", block_maps(value), about, width)
    if isinstance(value, TransferPlan):
        request: Request | None = None
        if any(argument is not None for argument in (local, remote, tokens)):
            local = {} if local is None else local
            remote = {} if remote is None else remote
            request = {"local": local, "remote": remote, "tokens": tokens}
        drawn = panels(value, request)
        return _picture(_title(value, drawn, request), drawn, about, width)
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


def _title(plan: TransferPlan, drawn: Sequence[Panel], request: Request | None) -> str:
    """Return who copies from or to whom, and how much a request copies."""
    labels: dict[str, None] = {}
    for panel in drawn:
        labels |= {copy.remote.worker.label: None for copy in panel.copies}
    verb = "reads from" if plan.operation == "READ" else "writes to"
    title = f"{plan.local.label} {verb} {fold(labels) or 'nobody'}"
    if request is None:
        return title
    specs = plan.bind(**request)
    num_bytes = sum(spec.num_bytes for spec in specs)
    num_descriptors = sum(spec.num_descriptors for spec in specs)
    return f"{title}: {size(num_bytes)} in {count(num_descriptors, 'descriptor')}"


def _picture(
    title: str,
    drawn: Sequence[BlockMap] | Sequence[Panel],
    about: str,
    width: int,
) -> Picture:
    """Return the picture of block maps or of panels."""
    # Colours in the order of the plan's remote workers, so that panels agree.
    remotes: dict[int, str] = {}
    for part in drawn:
        if isinstance(part, Panel):
            remotes |= {copy.remote_index: copy.remote.worker.label for copy in part.copies}
    rest = "not moved" if remotes else "padding, or other groups' bytes"
    labels = [label for _, label in sorted(remotes.items())]
    svg = draw_svg(title, about, _drawings(drawn), labels, rest)
    return Picture(title, draw_text(_drawings(drawn), rest, width), svg)


def _drawings(drawn: Sequence[BlockMap] | Sequence[Panel]) -> Iterator[Drawing]:
    for part in drawn:
        choices = panel_diagrams(part) if isinstance(part, Panel) else map_diagrams(part)
        yield Drawing(part.title, part.facts, choices)
