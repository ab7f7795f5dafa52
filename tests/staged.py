"""Staging regions for tests, and requests carried out through them in fake memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from kvplan import Axis, FakeMemory, Region, View, Worker
from kvplan.arenas import Cells
from kvplan.rearrange import run
from kvplan.staging import StagedPlan, stage

NAME, ADDRESS = "staging", 1 << 50


def with_staging(worker: Worker, size: int = 1 << 20) -> Worker:
    """A worker that has set so many bytes aside."""
    return attrs.evolve(worker, regions=(*worker.regions, Region(NAME, ADDRESS, size)))


def staged(worker: Worker, sources: Sequence[Worker], size: int = 1 << 20, **options: Any) -> StagedPlan:
    """A plan staged in so many bytes."""
    return stage(with_staging(worker, size), sources, staging=NAME, **options)


def cells(memory: FakeMemory, worker: Worker) -> dict[str, Cells]:
    """All cells of a worker's regions, not copied."""
    found = {}
    for region in worker.regions:
        every = View("all", "none", region, "uint8", [Axis("byte", 0, region.size_bytes, region.size_bytes, 1)], 1, 0)
        found[region.name] = memory.array(worker, every).reshape(-1)
    return found


def carry_out(plan: StagedPlan, memory: FakeMemory, request: dict[str, Any]) -> None:
    """A request in fake memory, chunk by chunk."""
    arrays = cells(memory, plan.direct.local)
    for chunk in plan.bind(**request):
        for spec in chunk.specs:
            memory.execute(spec)
        run(chunk.copies, arrays)


def descriptors(plan: StagedPlan, request: dict[str, Any]) -> list[int]:
    """The lengths of all that leg 1 reads of a request."""
    return [
        length
        for chunk in plan.bind(**request)
        for spec in chunk.specs
        for length in spec.descriptors()[1][:, 1].tolist()
    ]


def labelled(memory: FakeMemory, workers: Iterable[Worker]) -> None:
    """Fill the memory of workers with numbers of no pattern."""
    for worker in workers:
        for number, array in enumerate(cells(memory, worker).values()):
            array[:] = [
                (at * 2654435761 + worker.rank * 97 + number * 31 + 1 >> 7) % 255 + 1 for at in range(array.size)
            ]
