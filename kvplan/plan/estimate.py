"""Estimates: what a plan spends of its budget, counted before anything of that size is listed.

Each function counts what the stage after it lists: the workers, the cells of a destination, and the
runs and rows between two workers. :mod:`kvplan.plan.pairs` calls them between the stages, which
know no budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvplan._arrays import Ints
from kvplan.budget import Budget
from kvplan.describe.axes import most_segments
from kvplan.describe.blocks import POSITION_END
from kvplan.describe.views import TOKEN, Group
from kvplan.describe.worker import Worker
from kvplan.plan.align import period
from kvplan.plan.block_pairs import MAX_JOINED, most_pairs
from kvplan.plan.cells import Cell, axis_slices, cycle_of
from kvplan.plan.match import Match
from kvplan.plan.runs import count_runs

WORKER_BYTES = 20_000
SEGMENT_BYTES = 300
INTERVAL_BYTES = 400
RANGE_BYTES = 1000
CELL_BYTES = 20_000
HOLDER_BYTES = 20
RUN_BYTES = 250
SLOT_BYTES = 130
POSITION_BYTES = 64
ROW_BYTES = 60
"""The estimated cost of one of each; a row also where it is handed to a transfer backend."""

HELD_BYTES = 8
"""The cost of knowing whether one source view holds one range."""


def spend_on_workers(budget: Budget, workers: Sequence[Worker]) -> None:
    """Spend what workers cost, whatever they exchange."""
    budget.spend(len(workers), "workers", WORKER_BYTES, "plan")
    for worker in workers:
        number = sum(most_segments(geometry.axes) for geometry in worker.geometries)
        budget.spend(number, "segments of axes", SEGMENT_BYTES, f"plan with {worker.label}")


def spend_on_cells(budget: Budget, matches: Sequence[Match]) -> None:
    """Spend what the cells of a destination cost, and the choice of their sources."""
    num_cells = 0
    for match in matches:
        label = match.workers[0].label
        num_views, num_sources = len(match.sources.views), len(match.workers[1])
        for view, geometry in enumerate(match.destination):
            num_positions = cycle_of(match, view)
            for axis in {**dict.fromkeys(geometry.sizes), TOKEN: None}:
                action = f"divide axis {axis!r}"
                number = match.sources.num_intervals(geometry, axis, num_positions)
                budget.spend(number, "intervals", INTERVAL_BYTES, action)
                number = match.sources.num_ranges(geometry, axis, num_positions)
                budget.spend(number, "ranges of axes", RANGE_BYTES + HELD_BYTES * num_views, action)
            number = math.prod(map(len, axis_slices(match, view).values()))
            cell_bytes = CELL_BYTES + HOLDER_BYTES * (num_views + num_sources)
            budget.spend(number, "cells", cell_bytes, f"plan for {label}")
            num_cells += number
    if matches:
        # each choice of another source looks at all cells and sources
        num_sources = len(matches[0].workers[1])
        number = min(num_cells, num_sources) * num_cells * num_sources
        budget.spend(number, "comparisons of replica sets", 1, "choose sources")


def spend_on_geometry(budget: Budget, cells: Iterable[Cell]) -> None:
    """Spend what it costs to compare cells with those of other pairs of workers."""
    for cell in cells:
        number = sum(len(each.intervals) for each in cell.slices.values())
        for geometry in cell.sides:
            number += sum(segments.start.size for segments in geometry.segments.values())
        action = f"compare {cell.match.names[0]!r} with others"
        budget.spend(number, "segments of axes", SEGMENT_BYTES, action)


def spend_on_runs(budget: Budget, cells: Sequence[Cell]) -> None:
    """Spend what the runs and ids of the cells cost that one source serves."""
    periods: dict[tuple[Group, Group], int] = {}
    for cell in cells:
        groups = _groups(cell)
        periods[groups] = math.lcm(periods.get(groups, period(*groups)), cell.cycle)
    # what blocks share is listed once for all cells of the same positions
    num_pairs: dict[object, int] = {}
    num_joined = 0
    for cell in cells:
        action = f"plan {cell.match.names[0]!r}"
        groups, tokens = _groups(cell), cell.slices[TOKEN]
        number = count_runs(cell)
        budget.spend(number, "runs of one token", RUN_BYTES, action)
        num_slots = sum(group.num_slots for group in groups)
        budget.spend(number * num_slots, "slots of runs", SLOT_BYTES, action)
        budget.spend(tokens.size, "positions of a cycle", POSITION_BYTES, action)
        num_positions = periods[groups]
        pairs = most_pairs(groups, tokens.intervals, cell.cycle, num_positions)
        if pairs <= MAX_JOINED and num_positions <= POSITION_END:
            num_pairs[groups, cell.cycle, tokens.intervals.tobytes()] = pairs
            num_tokens = tokens.size * (num_positions // cell.cycle)
            strides = {stride for side in cell.sides for stride in side.segments[TOKEN].stride}
            is_even = all(side.segments[TOKEN].start.size == 1 for side in cell.sides)
            if not is_even:
                num_joined += number * num_tokens
            elif len(strides) == 1 and strides != {0}:
                num_joined += number * pairs
    budget.spend(sum(num_pairs.values()), "block pairs", RUN_BYTES, "pair blocks")
    budget.spend(min(num_joined, MAX_JOINED), "runs of a period", 2 * RUN_BYTES, "join runs")


def spend_on_rows(budget: Budget, destination: Worker, rows: Iterable[Ints]) -> None:
    """Spend what the rows of both tables of a pair cost."""
    number = sum(map(len, rows))
    budget.spend(number, "rows", ROW_BYTES, f"plan for {destination.label}")


def _groups(cell: Cell) -> tuple[Group, Group]:
    destination, source = cell.sides
    return destination.group, source.group
