"""The connector in a worker of vLLM: it reads requests into the worker's cache."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvplan import Blocks, KVPlanError, tails
from kvplan import Request as Binding
from kvplan.protocol import Claims, DigestRequest, Read, System
from kvplan_nixl import NixlExecutor
from kvplan_nixl.digest import WorkerDigests
from kvplan_nixl.kernel import with_staging
from kvplan_nixl.mapped import make_executor
from kvplan_nixl.reads import make_reads, pipeline_of
from kvplan_nixl.rearrange import memories_of, set_zero
from kvplan_nixl.vllm.description import worker_of
from kvplan_nixl.vllm.engine_hooks import WorkerAdapters
from kvplan_nixl.vllm.host_cache import HostCache, check_platform
from kvplan_nixl.vllm.metadata import KvplanMetadata, KvplanWorkerMetadata
from kvplan_nixl.vllm.metrics import KvplanStats
from kvplan_nixl.vllm.settings import ConnectorSettings, uses_host_cache

logger = init_logger(f"vllm.{__name__}")


class Worker:
    """Reads what the scheduler tells it to read, and reports the requests that have ended."""

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        settings: ConnectorSettings,
        system: System,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._config = config
        self._facts = facts
        self.adapters = WorkerAdapters()
        self._cache = cache
        self._settings = settings
        self._executor: NixlExecutor | None = None
        self._host_cache: HostCache | None = None
        self._system = system
        self._key = settings.access().key
        self._claims = Claims(logger, system, settings.max_peers)
        self._released: set[str] = set()
        self._failed: set[str] = set()
        self._digests: dict[DigestRequest, list[dict[str, Any]]] = {}
        self.stats = KvplanStats()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the worker's caches and register them with NIXL, or those in main memory."""
        settings = self._settings
        if uses_host_cache(self._config.kv_transfer_config):
            check_platform(current_platform)
            self._host_cache = HostCache(self._cache, kv_caches)
            kv_caches = self._host_cache.tensors
        worker = worker_of(self._config, self._cache, kv_caches, settings)
        worker = attrs.evolve(worker, model=self._facts)
        self.model = worker.model
        # Only a reader stages.
        is_reader = self._config.kv_transfer_config.is_kv_consumer or settings.bidirectional_kv_xfer
        worker, copier = with_staging(worker, settings.staging_bytes if is_reader else 0)
        self._memories = memories_of(kv_caches.values())
        self._executor = make_executor(
            worker,
            settings.backends,
            map_memory=settings.map_memory,
            logger=logger,
            key=self._key,
        )
        self._reads = make_reads(
            self._executor,
            self._claims,
            logger,
            key=self._key,
            system=self._system,
            pipeline=pipeline_of(self._executor, copier, settings.measured_rates()),
            digest=self._digest_read if settings.verify else None,
            handshakes=settings.handshakes(self.stats.record_handshake),
        )
        self._digester = WorkerDigests(self._reads.worker, self._memories)
        logger.info("%s", worker)

    def set_copies(self, copy_blocks: CopyBlocksOp) -> None:
        """Take the operation by which vLLM's platform copies blocks to main memory and back."""
        if self._host_cache is not None:
            self._host_cache.set_copies(copy_blocks)

    def save(self, step: KvplanMetadata) -> None:
        """Copy to main memory what readers may read after a step."""
        if self._host_cache is not None:
            self._host_cache.save(step.saves)

    def envelope(self) -> bytes:
        """Return the worker's envelope."""
        assert self._executor is not None
        return self._executor.envelope()

    def start_step(self, step: KvplanMetadata) -> None:
        """Start the reads of a step, and compute its digests."""
        self._released |= step.released
        for request, blocks in step.digests.items():
            self._digests[request] = [self._digest_pinned(request, blocks)]
        for partial_read in step.partial_reads:
            try:
                if partial_read.read is not None:
                    self._prepare_blocks(partial_read.read)
            except KVPlanError as error:
                self._reads.submit(attrs.evolve(partial_read, read=None, error=error))
            else:
                self._reads.submit(partial_read)

    def _prepare_blocks(self, read: Read) -> None:
        """Copy or zero what a read leaves of its blocks, before any of its bytes arrives."""
        if self._host_cache is not None:
            self._host_cache.begin_read(read, self._reads.worker.groups)
        if self._cache.needs_kv_cache_zeroing:
            self._clear_tail(read)

    def _digest_read(self, binding: Binding) -> Mapping[str, Any]:
        """Digest what has arrived of a request."""
        return self._digester.of(binding["local"], binding["tokens"])

    def _digest_pinned(
        self, request: DigestRequest, blocks: Mapping[str, Blocks]
    ) -> dict[str, Any]:
        """Digest what another engine reads of a request, as far as this worker has it.

        The digests are empty if that fails.
        """
        worker = self._reads.worker
        tokens = dict(request.tokens)
        # Readers name ranges of token groups; each state group has one state to digest.
        states = {group.name for group in worker.groups if group.is_state}
        groups = {group.name for group in worker.groups} & (tokens.keys() | states)
        tables = {group: blocks[group] for group in groups}
        ranges = {group: tokens[group] for group in groups - states}
        try:
            return self._digester.of(tables, ranges)
        except KVPlanError as error:
            logger.error("no digest of lease %s: %s", request.lease, error)
            return {}

    def take_report(self) -> KvplanWorkerMetadata | None:
        """Return the digests of this step, changes of adapters, and requests that have failed."""
        changes = self.adapters.take()
        if not self._digests and not changes and not self._failed:
            return None
        digests, failed = self._digests, self._failed
        self._digests, self._failed = {}, set()
        return KvplanWorkerMetadata(digests, [changes] if changes else [], failed)

    def _clear_tail(self, read: Read) -> None:
        """Set to zero the rest of a request's last blocks, as vLLM leaves to connectors."""
        worker = self._reads.worker
        groups = {group.name for group in worker.groups} & read.tokens.keys()
        tables = {group: read.local[group] for group in groups}
        tokens = {group: read.tokens[group] for group in groups}
        for rows in tails(worker, tables, tokens).values():
            set_zero(self._memories, rows)

    def results(self) -> KVConnectorTransferResults:
        """Return the requests that have ended since the last step."""
        if self._executor is not None:
            self._executor.discard_messages()
        released = self._released
        self._released = set()
        results = self._reads.poll()
        for result in results:
            self.stats.record_read(result)
            if self._host_cache is not None:
                self._host_cache.end_read(result)
        self.stats.count_total("num_failed_notifications", self._claims.num_unanswered)
        self.stats.set("num_held_reads", self._reads.num_held)
        # vLLM ends a failed request at once. It frees the blocks when finished_recving has it: not
        # while bytes may still move.
        failed = {result.request for result in results if result.error is not None}
        failed.update(self._reads.late())
        self._failed |= failed
        return KVConnectorTransferResults(
            finished_sending=released,
            finished_recving={result.request for result in results},
            failed_recving=failed,
        )

    def close(self) -> None:
        """Free what is registered. No byte moves afterwards."""
        if self._executor is not None:
            self._executor.close()
