"""What the connector in vLLM's scheduler and those in its workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvplan import KVPlanError
from kvplan.connector import Read


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
