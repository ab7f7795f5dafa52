"""Staging regions for tests, and requests carried out through them in fake memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from kvplan import Axis, FakeMemory, Region, View, Worker
from kvplan.arenas import Cells
from kvplan.rearrange import run
from kvplan.staging import StagedPlan, stage, stage_writes

NAME, ADDRESS = "staging", 1 << 50


def with_staging(worker: Worker, size: int = 1 << 20) -> Worker:
    """A worker that has set so many bytes aside."""
    return attrs.evolve(worker, regions=(*worker.regions, Region(NAME, ADDRESS, size)))


def staged(worker: Worker, sources: Sequence[Worker], size: int = 1 << 20, **options: Any) -> StagedPlan:
    """A plan staged in so many bytes."""
    return stage(with_staging(worker, size), sources, staging=NAME, **options)


def staged_writes(
    sources: Sequence[Worker], destinations: Sequence[Worker], size: int = 1 << 20, **options: Any
) -> list[StagedPlan]:
    """A plan for each source, staged in so many bytes."""
    return [
        stage_writes(
            with_staging(worker, size),
            destinations,
            [other for other in sources if other is not worker],
            staging=NAME,
            **options,
        )
        for worker in sources
    ]


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
        if chunk.operation == "WRITE":
            run(chunk.copies, arrays)
        for spec in chunk.specs:
            memory.execute(spec)
        if chunk.operation == "READ":
            run(chunk.copies, arrays)


def written(
    sources: Sequence[Worker],
    destinations: Sequence[Worker],
    request: dict[str, Any],
    size: int = 1 << 16,
    **options: Any,
) -> list[StagedPlan]:
    """The plans of all sources, after making sure that they write to a request what direct plans do, byte for byte."""
    plans = staged_writes(sources, destinations, size, **options)
    every = [*(plan.direct.local for plan in plans), *destinations]
    with FakeMemory(every) as one, FakeMemory(every) as other:
        for memory in (one, other):
            labelled(memory, every[: len(plans)])
        for plan in plans:
            for spec in plan.direct.bind(**request):
                one.execute(spec)
            carry_out(plan, other, request)
        for worker in every:
            wanted, found = cells(one, worker), cells(other, worker)
            assert all(np.array_equal(wanted[name], found[name]) for name in wanted if name != NAME)
        assert any(array.any() for worker in destinations for array in cells(other, worker).values())
    return plans


def descriptors(plan: StagedPlan, request: dict[str, Any]) -> list[int]:
    """The lengths of all that goes between workers for a request."""
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
