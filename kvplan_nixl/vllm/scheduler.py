"""The connector's part in vLLM's scheduler.

It decides which requests are read, and whose blocks stay for a reader.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvplan.protocol.system import System
from kvplan_nixl.identity import Identity
from kvplan_nixl.vllm.description import check_kinds
from kvplan_nixl.vllm.engine_state import EngineState
from kvplan_nixl.vllm.lent_requests import LentRequests
from kvplan_nixl.vllm.metadata import KvplanMetadata, KvplanWorkerMetadata
from kvplan_nixl.vllm.metrics import KvplanStats
from kvplan_nixl.vllm.read_requests import ReadRequests
from kvplan_nixl.vllm.settings import ConnectorSettings
from kvplan_nixl.vllm.tables import BlockTables


class Scheduler:
    """Prefill and decode in one: a request's ``kv_transfer_params`` say which one it meets.

    A request with a handoff reads the positions that its prompt shares, and computes the others,
    at least the last one. One with a transfer id asks prefill for handoffs, and reads the prompt
    part by part. Windows and states come with the last part. What an engine computes for another
    one is lent to it, and what it has read may be lent to a third.
    """

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        settings: ConnectorSettings,
        system: System,
        state: EngineState | None = None,
    ) -> None:
        check_kinds(cache)
        self._state = state or EngineState(Identity({}, system.token_hex))
        self.stats = KvplanStats()
        self._tables = BlockTables(config, cache)
        self._read = ReadRequests(
            config, cache, settings, self._tables, self.stats, system, self._state
        )
        self._lent = LentRequests(config, settings, self._tables, self.stats, system, self._state)

    def set_managers(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        """Take the managers of all cache groups, which register blocks in the prefix cache."""
        self._tables.set_managers(managers)

    def set_siblings(self, siblings: set[str]) -> None:
        """Take the names of the engine's other connectors, which may store the blocks it fills.

        vLLM's OffloadingConnector stores a block by its hash, also one that has no place in the
        prefix cache.
        """
        self._read.siblings = siblings

    def serve_offers(self, envelopes: Sequence[bytes]) -> None:
        """Serve the envelopes of all workers to other engines, if they may read from this one.

        Raises ``WORKER`` where another connector's took their place: vLLM's MultiConnector passes
        on what the first of its connectors has.
        """
        self._lent.serve_offers(envelopes)

    def close(self) -> None:
        """Stop serving."""
        self._read.close()
        self._lent.close()

    def add(self, request: Request) -> None:
        """Take a request that has arrived: claim its lease, or shorten its prompt for decode."""
        self._read.add(request)
        self._lent.add(request)

    def count_tokens_to_read(self, request: Request, num_cached: int) -> int | None:
        """Return the number of positions to read after the first ``num_cached`` of a request.

        Returns None of a request of which prefill has published nothing yet.
        """
        self._state.begin(request, num_cached)
        return self._read.count_tokens(request, num_cached)

    def begin_read(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Read ``num_tokens`` positions of a request into its blocks. A request is read once."""
        if num_tokens:
            self._state.load(request.request_id)
        self._read.begin(request, blocks, num_tokens)

    def end_reads(self, requests: set[str], failed: Collection[str] = ()) -> None:
        """End the claims of requests whose reads have ended in all workers.

        No more is read of those that have ``failed``.
        """
        self._read.end(requests, failed)

    def hand_over(self, request: Request, ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Return the parameters with which others read a finished request, whose blocks stay.

        Returns None if nobody reads it; then its blocks are free.
        """
        read_from = self._read.finish(request.request_id)
        params = self._lent.hand_over(request, ids, read_from)
        self._state.end(request.request_id)
        return params

    def publish(self, scheduled: SchedulerOutput) -> None:
        """Publish what is computed of requests that decode waits for, before a step.

        The lease of one that was preempted is revoked, since this step may write into its blocks.
        """
        self._state.step_begun()
        self._lent.publish(scheduled, self._read.read_from)

    def save(self, scheduled: SchedulerOutput) -> None:
        """Have workers copy to main memory what a step computes of requests that may be lent."""
        self._lent.save(scheduled)

    def take_step(self) -> KvplanMetadata:
        """Return the work of the workers in this step."""
        step = self._read.take_step()
        self._lent.add_to(step)
        return step

    def reset(self) -> None:
        """Free the blocks of all requests that were handed over: their readers fail.

        A reset alone does not separate decode from prefill: their weights are the same as before,
        unless vLLM has said that they changed.
        """
        self._lent.reset()

    def take_digests(self, metadata: KvplanWorkerMetadata) -> None:
        """Take the digests that all workers have computed, those of replicas once."""
        self._lent.take_digests(metadata)
