"""Legs: each of the two steps between a peer and a worker that has a mirror of it, as cells.

A cell of the direct plan says what goes from some views of a source to those of a destination. With the mirror's views
in the place of the peer's, it says what goes between mirror and worker, at home. With the mirror's views in the place
of the worker's, what goes between mirror and peer. Either way the coordinates and positions stay, so that no other byte
moves. Only what is read from a peer is more: all that its mirror has, which keeps runs long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress

import attrs
import numpy as np

from kvplan._arrays import Ints, distinct
from kvplan.describe.views import Geometry, Group
from kvplan.describe.worker import Worker
from kvplan.plan.cells import Cell
from kvplan.plan.sources import Holding
from kvplan.plan.transfer import shares
from kvplan.staging.mirrors import Mirror, view_numbers


def at_home(staged: Mirror, share: Iterable[Cell]) -> Iterator[Cell]:
    """The cells between a mirror and its worker, of those between its peer and its worker."""
    return _replaced(staged, share, staged.side)


def on_the_way(staged: Mirror, peer: Worker, share: Iterable[Cell]) -> Iterator[Cell]:
    """The cells between a mirror and its peer, of those between its worker and its peer."""
    if staged.side == 0:
        yield from _replaced(staged, share, 1)
        return
    for (_, theirs), group in staged.groups.items():
        for _, _, cells in shares([_only(staged.worker, group)], [_only(peer, theirs)], (), 1):
            yield from cells


def _only(worker: Worker, group: Group) -> Worker:
    """A worker with the views of one group: another group of a peer may hold some of the same, in other blocks."""
    return attrs.evolve(worker, views=[view for view in worker.views if view.group == group.name])


def _replaced(staged: Mirror, share: Iterable[Cell], side: int) -> Iterator[Cell]:
    """Cells with views of the mirror on one side: one for each of their geometries."""
    geometry_of = np.array(staged.worker.geometry_of, np.int64)
    for cell in share:
        ours, theirs = cell.sides
        key = staged.groups[ours.group, theirs.group].name
        numbers = np.array([staged.numbers[key, number] for number in view_numbers(cell)[staged.side].tolist()])
        kinds = geometry_of[numbers]
        for kind in distinct(kinds).tolist():
            yield _with(staged, staged.worker.geometries[kind], cell, side, numbers, kinds == kind)


def _with(staged: Mirror, geometry: Geometry, cell: Cell, side: int, numbers: Ints, which: Ints) -> Cell:
    """Some tensors of a cell with one view of the mirror each on one side."""
    ours, theirs = (views[which] for views in cell.match.views)
    names, mirrored = tuple(compress(cell.match.names, which)), numbers[which][:, None]
    local, sources = cell.match.workers
    if side:
        match = attrs.evolve(
            cell.match,
            names=names,
            holding=Holding(((0, geometry),), (0,)),
            views=(ours, mirrored),
            workers=(local, (staged.worker,)),
        )
        return attrs.evolve(cell, match=match, source=0)
    match = attrs.evolve(
        cell.match,
        names=names,
        destination=(geometry,),
        views=(mirrored, theirs),
        workers=(staged.worker, sources),
    )
    return attrs.evolve(cell, match=match, destination=0)
