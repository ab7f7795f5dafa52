"""Metrics: what the connector counts, for the line that vLLM logs and for Prometheus.

Figures that mean the same as in vLLM's own ``NixlConnector`` have its names, there and in
:data:`METRICS` (vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py), so that its dashboards
stay right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import attrs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from kvplan.protocol import HandshakeResult, ReadResult

# the upper bounds of NixlConnector's buckets
POST_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
SECONDS: Final = POST_SECONDS[1:]
BYTES: Final = tuple(2.0**power for power in range(11, 35, 2))
DESCRIPTORS: Final = tuple(
    float(number)
    for number in (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
)


@attrs.frozen
class Metric:
    """A metric for Prometheus: the observations of some ``keys`` of :class:`KvplanStats`.

    A histogram has the upper bounds of its ``buckets``, a counter none. A counter with a ``label``
    counts how often each value of the label was observed. A gauge has the highest value that parts
    of the connector have observed in a step.
    """

    name: str
    keys: tuple[str, ...]
    documentation: str
    buckets: tuple[float, ...] = ()
    label: str = ""
    is_gauge: bool = False


METRICS: Final = (
    # those of NixlConnector
    Metric(
        "vllm:nixl_xfer_time_seconds",
        ("transfer_duration",),
        "Seconds until the last byte of a request was there, in one worker.",
        SECONDS,
    ),
    Metric(
        "vllm:nixl_post_time_seconds",
        ("post_duration",),
        "Seconds until all transfers of a request were posted, in one worker.",
        POST_SECONDS,
    ),
    Metric(
        "vllm:nixl_bytes_transferred",
        ("bytes_transferred",),
        "Bytes that one worker has read of a request.",
        BYTES,
    ),
    Metric(
        "vllm:nixl_num_descriptors",
        ("num_descriptors",),
        "Descriptors that NIXL has made of a request, in one worker.",
        DESCRIPTORS,
    ),
    Metric(
        "vllm:nixl_num_failed_transfers",
        ("num_failed_transfers", "num_failed_notifications"),
        "Requests that could not be read, counted by each worker, and messages without an answer.",
    ),
    Metric(
        "vllm:nixl_num_failed_notifications",
        ("num_failed_notifications",),
        "Messages about leases to which a prefill engine gave no answer.",
    ),
    Metric(
        "vllm:nixl_num_kv_expired_reqs",
        ("num_kv_expired_reqs",),
        "Requests whose blocks prefill has freed since no reader claimed them in time.",
    ),
    Metric(
        "vllm:nixl_num_notifications_after_expiry",
        ("num_notifications_after_expiry",),
        "Claims and questions that came to prefill when the lease was over. Their requests fail.",
    ),
    # those of kvplan alone, of reads
    Metric(
        "vllm:kvplan_read_time_seconds",
        ("read_duration",),
        "Seconds until a request was known to be right, in one worker.",
        SECONDS,
    ),
    Metric(
        "vllm:kvplan_num_direct_reads",
        ("num_direct_reads",),
        "Requests that were read straight into their blocks, counted by each worker.",
    ),
    Metric(
        "vllm:kvplan_num_staged_reads",
        ("num_staged_reads",),
        "Requests that were read through a staging region, counted by each worker.",
    ),
    Metric(
        "vllm:kvplan_num_failed_reads",
        ("failed_codes",),
        "Requests that could not be read, by the code of the error, counted by each worker.",
        label="code",
    ),
    # of handshakes, one for each engine that a worker meets
    Metric(
        "vllm:kvplan_handshake_time_seconds",
        ("handshake_duration",),
        "Seconds until a worker could read from an engine that it met.",
        SECONDS,
    ),
    Metric(
        "vllm:kvplan_plan_time_seconds",
        ("plan_duration",),
        "Seconds in which a worker planned how to read from an engine that it met.",
        POST_SECONDS,
    ),
    Metric(
        "vllm:kvplan_num_failed_handshakes",
        ("num_failed_handshakes",),
        "Handshakes that failed, counted by each worker.",
    ),
    # and of claims, in the scheduler
    Metric(
        "vllm:kvplan_num_claims",
        ("num_claims",),
        "Leases that this engine has claimed, one for each request to read.",
    ),
    Metric(
        "vllm:kvplan_num_refused_claims",
        ("num_refused_claims",),
        "Claims that a prefill engine has refused, because the lease was over.",
    ),
    # of what is held for others
    Metric(
        "vllm:kvplan_pinned_blocks",
        ("num_pinned_blocks",),
        "Blocks of finished requests that stay for readers, of all groups.",
        is_gauge=True,
    ),
    Metric(
        "vllm:kvplan_oldest_lease_seconds",
        ("oldest_lease",),
        "Seconds for which the oldest of these requests has been kept.",
        is_gauge=True,
    ),
    Metric(
        "vllm:kvplan_held_reads",
        ("num_held_reads",),
        "Failed requests of a worker whose blocks stay, since bytes may still move into them.",
        is_gauge=True,
    ),
)
"""All metrics. Prometheus appends ``_total`` to the names of counters."""

KEYS: Final = tuple(dict.fromkeys(key for metric in METRICS for key in metric.keys))


@dataclass
class KvplanStats(KVConnectorStats):
    """Observations of one process of the connector since they were last taken, in lists by key."""

    def __post_init__(self) -> None:
        # what has been counted of totals that others keep, and the last values of gauges
        self._totals: dict[str, int] = {}
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, list[Any]] = {key: [] for key in KEYS}

    def count(self, key: str, times: int = 1) -> None:
        """Count what has happened some times."""
        if times:
            self.data[key].append(times)

    def count_total(self, key: str, total: int) -> int:
        """Count what a total has grown by since the last call, and return that."""
        times = total - self._totals.get(key, 0)
        self._totals[key] = total
        self.count(key, times)
        return times

    def set(self, key: str, value: int) -> None:
        """Set a gauge, whose value is told when it changes."""
        if self._totals.get(key, 0) != value:
            self._totals[key] = value
            self.data[key] = [value]

    def record_read(self, result: ReadResult) -> None:
        """Record a request that was read or has failed."""
        if result.error is not None:
            self.count("num_failed_transfers")
            self.data["failed_codes"].append(result.error.code)
            return
        self.data["transfer_duration"].append(result.transfer_seconds)
        self.data["post_duration"].append(result.post_seconds)
        self.data["bytes_transferred"].append(result.num_bytes)
        self.data["num_descriptors"].append(result.num_descriptors)
        self.data["read_duration"].append(result.seconds)
        self.count("num_staged_reads" if result.is_staged else "num_direct_reads")

    def record_handshake(self, result: HandshakeResult) -> None:
        """Record a handshake that has ended."""
        if result.error is not None:
            self.count("num_failed_handshakes")
            return
        self.data["handshake_duration"].append(result.seconds)
        self.data["plan_duration"].append(result.plan_seconds)

    def take(self) -> KvplanStats | None:
        """Return the observations since the last call, if there are any."""
        if self.is_empty():
            return None
        observed = KvplanStats(self.data)
        self.reset()
        return observed

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, observations in other.data.items():
            self.data[key] += observations
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of the line in the log."""
        data = self.data
        return {
            "reads": len(data["read_duration"]),
            "staged": sum(data["num_staged_reads"]),
            "failed": sum(data["num_failed_transfers"]),
            "unanswered": sum(data["num_failed_notifications"]),
            "expired": sum(data["num_kv_expired_reqs"]),
            "stale": sum(data["num_notifications_after_expiry"]),
            "MiB": round(sum(data["bytes_transferred"]) / 2**20, 3),
            "mean ms": _mean_ms(data["read_duration"]),
            "transfer ms": _mean_ms(data["transfer_duration"]),
            "post ms": _mean_ms(data["post_duration"]),
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


def _mean_ms(seconds: list[float]) -> float:
    """Return a mean in milliseconds, 0 of nothing."""
    return round(1000 * math.fsum(seconds) / len(seconds), 3) if seconds else 0.0


class KvplanPromMetrics(KVConnectorPromMetrics):
    """Observes what :class:`KvplanStats` has, as :data:`METRICS` say."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._collectors = [self._collector(metric) for metric in METRICS]
        # A counter without labels of its own is 0 from the start, and so is a gauge.
        for engine in per_engine_labelvalues:
            self.observe(dict.fromkeys(KEYS, ()), engine)

    def _collector(self, metric: Metric) -> Any:
        """Return what Prometheus collects of a metric, for all engines."""
        common: dict[str, Any] = {"name": metric.name, "documentation": metric.documentation}
        if metric.buckets:
            buckets = list(metric.buckets)
            return self._histogram_cls(**common, buckets=buckets, labelnames=self._labelnames)
        if metric.is_gauge:
            return self._gauge_cls(
                **common, labelnames=self._labelnames, multiprocess_mode="mostrecent"
            )
        own_label = [metric.label] if metric.label else []
        return self._counter_cls(**common, labelnames=[*self._labelnames, *own_label])

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for metric, collector in zip(METRICS, self._collectors, strict=True):
            observations = [item for key in metric.keys for item in transfer_stats_data[key]]
            # values of a label are not known before
            if metric.label:
                for value in observations:
                    collector.labels(*labels, value).inc()
                continue
            of_engine = collector.labels(*labels)
            if metric.is_gauge:
                if observations:
                    of_engine.set(max(observations))
                continue
            for number in observations:
                if metric.buckets:
                    of_engine.observe(number)
                else:
                    of_engine.inc(number)
