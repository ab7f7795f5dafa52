"""Mistakes of geometry: workers with wrong descriptions, and plans for them or cut into pieces by hand."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from kvplan import MeshPlan, Model, TransferPlan, View, Worker
from tests.edits import EditedPlan, edited_specs
from tests.known_bugs.faults import by_hand, moving


def layers_of(model: str, first: int, count: int = 1) -> Model:
    """A few layers of a shipped model, from number ``first`` on.

    >>> print(layers_of("qwen3-next-80b", 2, 2))
    qwen3-next-80b: 2 layers, bfloat16, groups state, attn
    """
    shipped = Model.shipped(model)
    return attrs.evolve(shipped, layers=shipped.layers[first : first + count])


def with_views(worker: Worker, *views: View) -> Worker:
    """The worker with other views of its memory."""
    made: Worker = attrs.evolve(worker, views=views)
    return made


def with_axis(worker: Worker, axis: str, **changes: Any) -> Worker:
    """The worker with an axis changed in all views, in the same memory."""
    return with_views(
        worker,
        *(
            attrs.evolve(view, axes=[attrs.evolve(a, **changes) if a.name == axis else a for a in view.axes])
            for view in worker.views
        ),
    )


def holding(worker: Worker, head: int, heads: int) -> Worker:
    """A worker of one head, described as one that holds another head, or the same of another number of ``heads``.

    >>> from tests.small import engine
    >>> print(*holding(engine("decode", 4)[1], 3, 4).views[0].axes, sep="; ")
    kv [0, 2) of 2 stride 8; head [3, 4) of 4 stride 0; token [0, 4) of 4 stride 16; dim [0, 4) of 4 stride 2
    """
    return with_axis(worker, "head", start=head, stop=head + 1, size=heads)


def taken_for(right: MeshPlan, wrong: MeshPlan, **request: Any) -> list[EditedPlan]:
    """The plans of ``right`` with the specs of ``wrong``, which are plans for workers with other descriptions."""
    return [moving(plan, other, **request) for plan, other in zip(right.plans, wrong.plans, strict=True)]


def in_pieces(plan: TransferPlan, length: int, **request: Any) -> EditedPlan:
    """``plan`` with each descriptor cut into pieces of ``length`` bytes."""
    specs = []
    for spec in plan.bind(**request):
        sides = []
        for side in spec.descriptors():
            pieces = (side[:, 1] // np.uint64(length)).astype(np.int64)
            number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            cut = np.repeat(side, pieces, axis=0)
            cut[:, 0] += number.astype(np.uint64) * np.uint64(length)
            cut[:, 1] = length
            sides.append(cut)
        specs.append(by_hand(spec, *sides))
    return edited_specs(plan, *specs)
