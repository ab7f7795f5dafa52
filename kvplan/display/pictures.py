"""Pictures of a worker's blocks and of a plan's copies, as text."""

from __future__ import annotations

from typing import Any

from kvplan._checks import integer
from kvplan._text import WIDTH
from kvplan.describe.worker import Worker
from kvplan.display.blocks import DrawnLayer, facts, folded, layers_of
from kvplan.display.copies import panels
from kvplan.display.diagram import block_drawing, panel_drawing
from kvplan.display.text import draw_text
from kvplan.errors import KVPlanError
from kvplan.plan.mesh import MeshPlan
from kvplan.plan.transfer import TransferPlan


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
        return draw_text(drawings, "padding, or other groups' bytes", width)
    if isinstance(value, TransferPlan):
        return draw_text(map(panel_drawing, panels(value)), "not moved", width)
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
