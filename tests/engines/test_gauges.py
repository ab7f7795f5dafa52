"""Gauges of what is held for other engines, with vLLM's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvplan_nixl.vllm.metrics import KvplanPromMetrics, KvplanStats

GAUGES = ("vllm:kvplan_pinned_blocks", "vllm:kvplan_oldest_lease_seconds", "vllm:kvplan_held_reads")


def test_a_gauge_has_the_last_value_of_a_step() -> None:
    """The highest of all workers, 0 from the start and again when nothing is held; nothing is told that is not new."""
    registry = CollectorRegistry()

    def collector(kind: type) -> Any:
        return lambda **options: kind(**options, registry=registry)

    kinds: Any = {kind: collector(kind) for kind in (Gauge, Counter, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = KvplanPromMetrics(config, kinds, ["engine"], {0: ["0"]})

    def values() -> list[float | None]:
        return [registry.get_sample_value(name, {"engine": "0"}) for name in GAUGES]

    assert values() == [0, 0, 0]
    scheduler, workers = KvplanStats(), [KvplanStats(), KvplanStats()]
    scheduler.set("num_pinned_blocks", 12)
    scheduler.set("oldest_lease", 3)
    for number, worker in enumerate(workers):
        worker.set("num_held_reads", 2 - number)
    told = scheduler.take()
    assert told is not None
    for worker in workers:
        taken = worker.take()
        assert taken is not None
        told.aggregate(taken)
    metrics.observe(told.data)
    assert values() == [12, 3, 2]
    scheduler.set("num_pinned_blocks", 12)
    assert scheduler.take() is None
    scheduler.set("num_pinned_blocks", 0)
    told = scheduler.take()
    assert told is not None
    metrics.observe(told.data)
    assert values() == [0, 3, 2]
