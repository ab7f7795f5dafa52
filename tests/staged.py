"""Staging regions for tests, and requests carried out through them in fake memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Axis, Blocks, FakeMemory, Group, KVPlanError, Region, View, Worker
from kvplan.staging.plan import StagedPlan, stage, stage_writes
from kvplan.staging.rearrange import run
from kvplan.verification.memory import Cells

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


def refused_as_direct(plan: StagedPlan, request: dict[str, Any], code: str) -> None:
    """Make sure that a request is refused as the direct plan refuses it, before there is a chunk."""
    with pytest.raises(KVPlanError) as direct:
        plan.direct.bind(**request)
    with pytest.raises(KVPlanError) as refused:
        plan.bind(**request)
    assert refused.value.code == code
    assert str(refused.value) == str(direct.value)


def ends_of_ids() -> tuple[Worker, Worker]:
    """A worker of ten blocks, and one of other order with more blocks than there are ids for its single heads."""
    group, axes = [Group("attn", 4)], [Axis("token", 0, 4, 4, 8), Axis("head", 0, 2, 2, 4), Axis("dim", 0, 4, 4, 1)]
    swapped = [attrs.evolve(axes[0], stride_bytes=4), attrs.evolve(axes[1], stride_bytes=16), axes[2]]
    small = Worker("small", 0, [Region("kv", 0, 320)], group, [View("a", "attn", "kv", "uint8", swapped, 10, 32)])
    view = View("a", "attn", "kv", "uint8", axes, 1 << 30, 32)
    return small, Worker("large", 0, [Region("kv", 0, 1 << 36)], group, [view])


def last_id_refused(plan: StagedPlan) -> None:
    """Make sure that the last block of a remote with too many ids is refused, and an earlier one is not."""
    tables: dict[str, Any] = {"local": {"attn": Blocks([1, 2])}, "tokens": (0, 7)}
    assert len(list(plan.bind(**tables, remote={"attn": Blocks([5, 9])}))) == 2
    with pytest.raises(KVPlanError) as refused:
        plan.bind(**tables, remote={"attn": Blocks([5, (1 << 30) - 1])})
    assert refused.value.code == "INT"


def labelled(memory: FakeMemory, workers: Iterable[Worker]) -> None:
    """Fill the memory of workers with numbers of no pattern."""
    for worker in workers:
        for number, array in enumerate(cells(memory, worker).values()):
            array[:] = [
                (at * 2654435761 + worker.rank * 97 + number * 31 + 1 >> 7) % 255 + 1 for at in range(array.size)
            ]
