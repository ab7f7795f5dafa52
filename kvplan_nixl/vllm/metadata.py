"""What the connector in vLLM's scheduler and those in its workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvplan import KVPlanError
from kvplan.connector import Read, ReadResult


@dataclass
class KvplanHandshakeMetadata(KVConnectorHandshakeMetadata):
    """The envelope of one worker, once."""

    envelope: bytes


@dataclass
class KvplanMetadata(KVConnectorMetadata):
    """For each step: what to read, which requests can't be read and why, and whose blocks are not read any more."""

    reads: list[Read] = field(default_factory=list)
    refused: dict[str, KVPlanError] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)


@dataclass
class KvplanStats(KVConnectorStats):
    """What vLLM logs every few seconds: requests, bytes, failures, and how long requests took.

    ``data`` has the seconds and bytes of each request that was read, and the number of those that failed.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {"seconds": [], "bytes": [], "failed": 0}

    def record(self, ended: ReadResult) -> None:
        """Count a request."""
        if ended.error is not None:
            self.data["failed"] += 1
        else:
            self.data["seconds"].append(ended.seconds)
            self.data["bytes"].append(ended.num_bytes)

    def take(self) -> KvplanStats | None:
        """What was counted since the last call."""
        if self.is_empty():
            return None
        taken = KvplanStats(self.data)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            self.data[key] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds, sizes = self.data["seconds"], self.data["bytes"]
        mean_ms = round(1000 * sum(seconds) / len(seconds), 3) if seconds else 0
        return {"reads": len(seconds), "failed": self.data["failed"], "MiB": sum(sizes) >> 20, "mean ms": mean_ms}

    def is_empty(self) -> bool:
        return not (self.data["seconds"] or self.data["failed"])
