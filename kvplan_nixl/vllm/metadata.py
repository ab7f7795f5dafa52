"""Messages between the connector in vLLM's scheduler and those in its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvplan import Blocks, KVPlanError
from kvplan.connector import Read, ReadResult
from kvplan.connector.digest_requests import DigestRequest


@dataclass
class KvplanHandshakeMetadata(KVConnectorHandshakeMetadata):
    """The envelope of one worker, which it sends once."""

    envelope: bytes


@dataclass
class KvplanMetadata(KVConnectorMetadata):
    """The work of all workers in one step.

    ``reads`` begin. ``digests`` are to be computed, of the blocks by group of each request.
    ``refused`` has the errors of requests that cannot be read. The blocks of ``released`` requests
    are free.
    """

    reads: list[Read] = field(default_factory=list)
    digests: dict[DigestRequest, Mapping[str, Blocks]] = field(default_factory=dict)
    refused: dict[str, KVPlanError] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)


@dataclass
class KvplanWorkerMetadata(KVConnectorWorkerMetadata):
    """The digests that workers have computed in a step, one mapping for each worker."""

    digests: dict[DigestRequest, list[dict[str, Any]]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvplanWorkerMetadata:
        assert isinstance(other, KvplanWorkerMetadata)
        for request, digests in other.digests.items():
            self.digests.setdefault(request, []).extend(digests)
        return self


@dataclass
class KvplanStats(KVConnectorStats):
    """Counts for the line that vLLM logs every few seconds.

    ``data`` has the ``seconds`` and ``bytes`` of each request that was read, the number of those
    that ``failed``, and on prefill the number of ``stale`` claims: they came when the lease was
    over.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {"seconds": [], "bytes": [], "failed": 0, "stale": 0}

    def record(self, result: ReadResult) -> None:
        """Count a request that was read or has failed."""
        if result.error is not None:
            self.data["failed"] += 1
        else:
            self.data["seconds"].append(result.seconds)
            self.data["bytes"].append(result.num_bytes)

    def record_stale(self, num_claims: int) -> None:
        """Count claims that came when the lease was over."""
        self.data["stale"] += num_claims

    def take(self) -> KvplanStats | None:
        """Return the counts since the last call."""
        if self.is_empty():
            return None
        counts = KvplanStats(self.data)
        self.reset()
        return counts

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            self.data[key] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds = self.data["seconds"]
        mean_ms = round(1000 * sum(seconds) / len(seconds), 3) if seconds else 0
        num_mebibytes = sum(self.data["bytes"]) >> 20
        return {
            "reads": len(seconds),
            "failed": self.data["failed"],
            "stale": self.data["stale"],
            "MiB": num_mebibytes,
            "mean ms": mean_ms,
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())
