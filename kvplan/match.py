"""Match (M): which views of the sources hold the tensors that a destination needs.

- M1: tensors pair by name alone.
- M2: a tensor that the destination needs and no source offers matches no source, unless the caller says that it is
  not transferred. What only sources have is left alone.
- M3: both sides of a tensor have the same axis names, global sizes and dtype. Token groups pair with token
  groups, state groups with state groups.
- M4: tensors whose views have the same geometries on the same workers are one *match*, planned once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs
import numpy as np

from kvplan.axes import Ints
from kvplan.errors import KVPlanError
from kvplan.views import TOKEN, Geometry
from kvplan.workers import Worker


@attrs.frozen(eq=False)
class Match:
    """Tensors of equal geometry, and every view of them.

    ``sources`` pairs each source view's geometry with the index of its worker. ``places`` is
    (tensors, views, 2): region index and offset of each view, the destination's views first.
    """

    names: tuple[str, ...]
    destination: tuple[Geometry, ...]
    sources: tuple[tuple[int, Geometry], ...]
    places: Ints


def match(destination: Worker, sources: Sequence[Worker], not_transferred: Collection[str] = ()) -> tuple[Match, ...]:
    """The matches of a destination with sources. Raises ``GROUP``, ``DTYPE``, ``AXES`` or ``SIZE``."""
    workers = (destination, *sources)
    offers = [(worker.tensors, worker.geometry_of) for worker in workers]
    alike: dict[tuple[tuple[int, int], ...], list[tuple[str, list[int]]]] = {}
    for name in destination.tensors:
        if name in not_transferred:
            continue
        key, views = [], []
        for i, (tensors, geometry_of) in enumerate(offers):
            for view in tensors.get(name, ()):
                key.append((i, geometry_of[view]))
                views.append(view)
        alike.setdefault(tuple(key), []).append((name, views))
    matches = []
    for found, members in alike.items():
        names, indices = tuple(name for name, _ in members), np.array([views for _, views in members])
        places = np.stack([workers[i].places[indices[:, n]] for n, (i, _) in enumerate(found)], axis=1)
        ours = tuple(destination.geometries[g] for i, g in found if i == 0)
        theirs = tuple((i - 1, sources[i - 1].geometries[g]) for i, g in found if i > 0)
        for mine in ours:
            for i, other in theirs:
                _check(names[0], destination, mine, sources[i], other)
        matches.append(Match(names=names, destination=ours, sources=theirs, places=places))
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
