"""Cold planning: from the descriptions of two engines to the tables, which are registered once.

The model has 80 layers with 8 KV heads of 128, blocks of 16 tokens; a decode worker (TP 4) reads from prefill workers
(TP 8), two of which have its heads. Each round has new workers, without cached results. It is compared with the
construction of these nine workers, which every handshake needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.scale import received
from kvplan import Model, TransferPlan, Worker, plan_reads

LAYOUTS = ("LBHNC", "LBNHC")
MODEL = Model.shipped("llama-3.1-70b")

Record = Callable[[str, Any], None]


@pytest.fixture
def fresh(layout: str) -> Callable[[], list[Worker]]:
    """Makes a decode worker and the prefill workers that it reads from, as decoded from messages."""
    sources = MODEL.engine("prefill", tp=8, layout=layout, num_blocks=4096)
    return received(MODEL.engine("decode", tp=4, layout=layout, num_blocks=4096)[1], *sources)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plan(fresh: Callable[[], list[Worker]], benchmark: Any, layout: str, record: Record) -> None:
    """One decode worker's plan with all prefill workers."""

    def setup() -> tuple[tuple[Worker, list[Worker]], dict[str, Any]]:
        local, *remotes = fresh()
        return (local, remotes), {}

    plan: TransferPlan = benchmark.pedantic(plan_reads, setup=setup, rounds=100, warmup_rounds=5)
    assert [len(pair.local_table.rows) > 0 for pair in plan.pairs] == [rank in (2, 3) for rank in range(8)]
    record(f"plan {layout}", benchmark)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_describe(fresh: Callable[[], list[Worker]], benchmark: Any, layout: str, record: Record) -> None:
    """The construction of the nine workers, with all checks."""

    def check(workers: list[tuple[Any, ...]]) -> list[Worker]:
        return [Worker(*fields) for fields in workers]

    def setup() -> tuple[tuple[list[tuple[Any, ...]]], dict[str, Any]]:
        return ([(w.engine_id, w.rank, w.regions, w.groups, w.views) for w in fresh()],), {}

    workers = benchmark.pedantic(check, setup=setup, rounds=100, warmup_rounds=5)
    assert [len(worker.views) for worker in workers] == [80] * 9
    record(f"describe {layout}", benchmark)
