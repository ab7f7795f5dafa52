"""Match (M): pairs the tensors of a destination with the views of the sources.

- M1: Tensors pair by name, and by nothing else.
- M2: Every tensor of the destination needs a source, except those that the caller lists as not transferred. Tensors
  that only sources have do not take part.
- M3: Both sides of a tensor have the same axis names, global sizes and dtype. A token group pairs with a token group,
  a state group with a state group.
- M4: Both sides run the same model, unless one of them does not say which.
- M5: Tensors whose views have equal geometries on the same workers form one *match* and are planned once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan.describe.views import TOKEN, Geometry
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.sources import Holding, Sources


@attrs.frozen(eq=False)
class Match:
    """Tensors with equal geometries on both sides.

    ``destination`` has the geometries of the destination's views of such a tensor; ``holding`` describes the views of
    the sources. ``views`` has, for each side, the view indices of every tensor, (tensors, views) int64.
    """

    names: tuple[str, ...]
    destination: tuple[Geometry, ...]
    holding: Holding
    views: tuple[Ints, Ints]
    workers: tuple[Worker, tuple[Worker, ...]]

    def places(self, destination: int, source: int) -> Ints:
        """The places of one view of each side for every tensor, (2, tensors, 2) int64: region index and offset."""
        (ours, theirs), (local, workers) = self.views, self.workers
        sender = workers[self.holding.sources[source][0]]
        return np.stack([local.places[ours[:, destination]], sender.places[theirs[:, self.holding.column[source]]]])


def match(destination: Worker, sources: Sources, not_transferred: Collection[str] = ()) -> tuple[Match, ...]:
    """The matches of a destination with its sources.

    Raises ``GROUP``, ``DTYPE``, ``AXES`` or ``SIZE``, by rule M3, or ``MODEL``, by rule M4.
    """
    for source in sources.workers:
        if source.model != destination.model and source.model and destination.model:
            raise KVPlanError(
                "MODEL",
                "pair workers",
                expected=f"model {destination.model!r} (destination {destination.label})",
                got=f"{source.model!r} (source {source.label})",
                hint="if their caches are equal, give both workers the same model",
                destination=destination.model,
                source=source.model,
            )
    tensors: dict[Any, list[str]] = {}  # names by what their views have in common, rule M5
    geometry_of = destination.geometry_of
    for name, views in destination.tensors.items():
        if name not in not_transferred:
            key = (sources.holding(name), tuple([geometry_of[view] for view in views]))
            tensors.setdefault(key, []).append(name)
    matches = []
    for (holding, ours), names in tensors.items():
        geometries = tuple(destination.geometries[g] for g in ours)
        for mine in geometries:
            for i, other in holding.kinds:
                _check(names[0], destination, mine, sources.workers[i], other)
        sides = destination.tensors, sources.views
        rows = [np.array([side.get(name, ()) for name in names], np.int64) for side in sides]
        workers = destination, sources.workers
        matches.append(Match(tuple(names), geometries, holding, (rows[0], rows[1]), workers))
    return tuple(matches)


def _check(name: str, destination: Worker, ours: Geometry, source: Worker, theirs: Geometry) -> None:
    def differ(code: str, what: str, mine: object, other: object) -> KVPlanError:
        return KVPlanError(
            code,
            f"pair {what} of tensor {name!r}",
            expected=f"{mine} (destination {destination.label})",
            got=f"{other} (source {source.label})",
            tensor=name,
            field=what,
            destination=mine,
            source=other,
        )

    kinds = ["state" if side.group.tokens_per_block is None else "token" for side in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise differ("GROUP", "the group", f"a {kinds[0]} group", f"a {kinds[1]} group")
    if ours.dtype != theirs.dtype:
        raise differ("DTYPE", "the dtype", ours.dtype, theirs.dtype)
    mine, other = ({k: v for k, v in side.sizes.items() if k != TOKEN} for side in (ours, theirs))
    if mine.keys() != other.keys():
        raise differ("AXES", "the axes", " ".join(sorted(mine)), " ".join(sorted(other)))
    for axis, size in mine.items():
        if other[axis] != size:
            raise differ("SIZE", f"the size of axis {axis!r}", size, other[axis])
