"""Excess: what is read into mirrors of sources beyond the need, counted over a period of positions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvplan.describe.views import TOKEN
from kvplan.plan.align import cycle, period, repeated
from kvplan.plan.cells import Cell
from kvplan.staging.mirrors import Groups, Mirror
from kvplan.staging.rearrange import ordinals

MAX_LISTED: Final = 1 << 20
"""At most about so many positions are gone through."""


def excess(served: Iterable[tuple[Mirror, Sequence[Cell]]]) -> Mapping[str, float]:
    """For each group of a destination, the bytes that move beyond the need, over those needed: only reads have any."""
    found: dict[str, list[float]] = {}
    for staged, share in served:
        for groups, group in staged.groups.items():
            sums = found.setdefault(groups[0].name, [0.0, 0.0])
            if staged.side == 1:
                cells = [cell for cell in share if tuple(side.group for side in cell.sides) == groups]
                block_bytes = sum(view.block_bytes for view in staged.worker.views if view.group == group.name)
                needed, read = _counted(cells, groups, block_bytes)
                sums[0], sums[1] = sums[0] + needed, sums[1] + read
    return {key: read / needed - 1 if needed else 0.0 for key, (needed, read) in found.items()}


def _counted(cells: Sequence[Cell], groups: Groups, block_bytes: int) -> tuple[float, float]:
    """Bytes needed and bytes read for each position, or for a state, between two groups."""
    every = math.lcm(cycle(groups[1]), *(cell.every for cell in cells))
    positions = every * min(period(*groups) // math.gcd(period(*groups), every), -(-MAX_LISTED // every))
    carried = [repeated(cell.parts[TOKEN].intervals[:, 0], cell.every, 0, positions) for cell in cells]
    needed = 0
    for cell, position in zip(cells, carried, strict=True):
        sizes = [part.size for axis, part in cell.parts.items() if axis != TOKEN]
        needed += len(cell.match.names) * cell.sides[0].itemsize * math.prod(sizes) * position.size
    return needed / positions, block_bytes * ordinals(groups[1], carried).size / positions
