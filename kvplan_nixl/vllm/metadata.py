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

from kvplan import Blocks
from kvplan.protocol import DigestRequest, PartialRead
from kvplan_nixl.vllm.engine_state import AdapterChanges


@dataclass
class KvplanHandshakeMetadata(KVConnectorHandshakeMetadata):
    """The envelope of one worker, which it sends once.

    ``siblings`` names the other connectors of the engine, in a MultiConnector.
    ``model`` is the model of its worker, as text.
    """

    envelope: bytes
    siblings: tuple[str, ...] = ()
    model: str = ""


@dataclass
class KvplanMetadata(KVConnectorMetadata):
    """The work of all workers in one step.

    Workers start the ``partial_reads``, and compute ``digests`` of the blocks by group of each
    request. ``saves`` are blocks by group that others may read from main memory once this step has
    computed them. The blocks of ``released`` requests are free.
    """

    partial_reads: list[PartialRead] = field(default_factory=list)
    saves: dict[str, set[int]] = field(default_factory=dict)
    digests: dict[DigestRequest, Mapping[str, Blocks]] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)


@dataclass
class KvplanWorkerMetadata(KVConnectorWorkerMetadata):
    """What workers say of a step: digests, changes of adapters, and the requests that have failed.

    vLLM passes on a failure of one worker only when all have received the request, and bytes may
    move until then. So workers tell it here too.
    """

    digests: dict[DigestRequest, list[dict[str, Any]]]
    adapters: list[AdapterChanges] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvplanWorkerMetadata:
        assert isinstance(other, KvplanWorkerMetadata)
        for request, digests in other.digests.items():
            self.digests.setdefault(request, []).extend(digests)
        self.adapters.extend(other.adapters)
        self.failed |= other.failed
        return self
