"""Pairs of workers: the loop of planning, from cells to the tables of each local and remote worker.

Reads, writes, meshes and staged plans all run it. :func:`assignments` says which source serves
which cells of each destination. :class:`PairPlanner` makes the tables of such an assignment. Most
assignments of a mesh have an equal geometry: other heads in the same layout, or the same layers at
other addresses. Their rows and ids are computed once, and the rows moved to each worker's offsets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import attrs

from kvplan._arrays import Ints
from kvplan._checks import instance
from kvplan.budget import Budget
from kvplan.describe.worker import Key, Worker
from kvplan.plan.cells import Cell, cells
from kvplan.plan.estimate import (
    spend_on_cells,
    spend_on_geometry,
    spend_on_rows,
    spend_on_runs,
    spend_on_workers,
)
from kvplan.plan.match import Sources, match
from kvplan.plan.rows import assign_ids
from kvplan.plan.runs import cell_geometry, group_runs
from kvplan.plan.series import GroupPair
from kvplan.plan.specs import NO_ROWS, Direction, Pair
from kvplan.plan.tables import Table


class Assignment(NamedTuple):
    """The cells that a destination gets from one source."""

    destination: Worker
    source: Worker
    cells: list[Cell]


def assignments(
    destinations: Iterable[Worker],
    sources: Iterable[Worker],
    skipped: Collection[str],
    budget: Budget,
) -> Iterator[Assignment]:
    """Yield every destination and source that exchange bytes, with their cells.

    ``skipped`` names tensors that are not transferred. Sources are sorted by their keys, so that
    every worker computes the same choice. Raises ``RANGE`` for more than is left of the budget.
    """
    receivers = tuple(destinations)
    senders = sorted(sources, key=lambda worker: worker.key)
    spend_on_workers(budget, [*receivers, *senders])
    offered = Sources(senders)
    for destination in receivers:
        cells_by_source: dict[int, list[Cell]] = {}
        matches = match(destination, offered, skipped)
        spend_on_cells(budget, matches)
        for cell in cells(matches):
            cells_by_source.setdefault(cell.source_worker, []).append(cell)
        for source, source_cells in sorted(cells_by_source.items()):
            yield Assignment(destination, offered.workers[source], source_cells)


def budget_of(budget: Budget | None, num_destinations: int = 1) -> Budget:
    """Return the caller's budget, or else as much as each destination may cost that plans alone."""
    if budget is None:
        return Budget(max(num_destinations, 1) * Budget.DEFAULT_BYTES)
    return instance(Budget, budget, "budget")


@attrs.frozen(eq=False)
class PlannedGeometry:
    """Ids and rows of a pair of workers, for all pairs of equal geometry.

    ``rows`` has offsets, (n, 5) for each side; ``base_offset`` (2,) is that of the pair they were
    planned for.
    """

    group_pairs: tuple[GroupPair, ...]
    rows: tuple[Ints, Ints]
    base_offset: Ints


class PairPlanner:
    """Plans pairs of workers, each geometry once, within a budget."""

    def __init__(self, direction: Direction, budget: Budget) -> None:
        self._direction = direction
        self._budget = budget
        self._planned: dict[tuple[Any, ...], PlannedGeometry] = {}

    def pair(self, assignment: Assignment) -> Pair:
        """Return the pair of the two workers of an assignment."""
        spend_on_geometry(self._budget, assignment.cells)
        geometry = cell_geometry(assignment.cells)
        planned = self._planned.get(geometry.key)
        if planned is None:
            spend_on_runs(self._budget, assignment.cells)
            group_pairs, rows = assign_ids(group_runs(assignment.cells))
            planned = PlannedGeometry(group_pairs, rows, geometry.base_offset)
            self._planned[geometry.key] = planned
        # Rows of an equal geometry begin elsewhere: they are moved by the difference.
        shift = geometry.base_offset - planned.base_offset
        spend_on_rows(self._budget, assignment.destination, planned.rows)
        tables = (
            Table.at(assignment.destination, planned.rows[0], shift[0]),
            Table.at(assignment.source, planned.rows[1], shift[1]),
        )
        _, remote = self._direction.by_role(assignment.destination, assignment.source)
        local_table, remote_table = self._direction.by_role(*tables)
        return Pair(remote.key, local_table, remote_table, planned.group_pairs)


def plan_pairs(
    direction: Direction,
    local_workers: Iterable[Worker],
    remotes: Iterable[Worker],
    assigned: Iterable[Assignment],
    budget: Budget,
) -> Mapping[Key, tuple[Pair, ...]]:
    """Return the pairs of each local worker with all remotes, in their order.

    Those of other local workers, such as siblings, are left out.
    """
    # Workers that exchange nothing keep an idle pair.
    planner = PairPlanner(direction, budget)
    idle = {remote.key: Pair(remote.key, NO_ROWS, NO_ROWS, ()) for remote in remotes}
    pairs = {local.key: dict(idle) for local in local_workers}
    for assignment in assigned:
        local, remote = direction.by_role(assignment.destination, assignment.source)
        if local.key in pairs:
            pairs[local.key][remote.key] = planner.pair(assignment)
    return {key: tuple(by_remote.values()) for key, by_remote in pairs.items()}
