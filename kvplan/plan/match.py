"""Match (M): which views of the sources hold the tensors that a destination needs.

- M1: tensors pair by name alone.
- M2: a tensor that the destination needs and no source offers matches no source, unless the caller says that it is
  not transferred. What only sources have is left alone.
- M3: both sides of a tensor have the same axis names, global sizes and dtype. Token groups pair with token
  groups, state groups with state groups.
- M4: tensors whose views have the same geometries on the same workers are one *match*, planned once.
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
    """Tensors of equal geometry: the destination's views of each, and how sources hold them.

    ``views`` are, for each side, (tensors, views) indices into a worker's views.
    """

    names: tuple[str, ...]
    destination: tuple[Geometry, ...]
    holding: Holding
    views: tuple[Ints, Ints]
    workers: tuple[Worker, tuple[Worker, ...]]

    def places(self, destination: int, source: int) -> Ints:
        """Where one view of each side stands, for every tensor: (2, tensors, 2), region index and offset."""
        (ours, theirs), (local, workers) = self.views, self.workers
        sender = workers[self.holding.sources[source][0]]
        return np.stack([local.places[ours[:, destination]], sender.places[theirs[:, self.holding.column[source]]]])


def match(destination: Worker, sources: Sources, not_transferred: Collection[str] = ()) -> tuple[Match, ...]:
    """The matches of a destination with sources. Raises ``GROUP``, ``DTYPE``, ``AXES`` or ``SIZE``."""
    alike: dict[Any, list[str]] = {}
    geometry_of = destination.geometry_of
    for name, views in destination.tensors.items():
        if name not in not_transferred:
            key = (sources.holding(name), tuple([geometry_of[view] for view in views]))
            alike.setdefault(key, []).append(name)
    matches = []
    for (holding, ours), names in alike.items():
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
