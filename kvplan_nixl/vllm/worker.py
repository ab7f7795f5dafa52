"""The connector's part in a worker of vLLM: it reads requests into the worker's cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvplan import Blocks, KVPlanError, tails
from kvplan.bridges import RankInfo
from kvplan.connector import Claims, Read, send_claims
from kvplan.connector.digest_requests import DigestRequest
from kvplan.describe.blocks import Request as Binding
from kvplan_nixl import UCX, NixlExecutor
from kvplan_nixl.digest import cache_digests
from kvplan_nixl.reads import make_reads
from kvplan_nixl.rearrange import memories_of, set_zero, with_staging
from kvplan_nixl.vllm.description import worker_of
from kvplan_nixl.vllm.metadata import KvplanMetadata, KvplanStats, KvplanWorkerMetadata

logger = init_logger(f"vllm.{__name__}")


class Worker:
    """Reads what the scheduler tells it to read, and reports what has ended."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig) -> None:
        self._config = config
        self._cache = cache
        self._executor: NixlExecutor | None = None
        self._released: set[str] = set()
        self._digests: dict[DigestRequest, list[dict[str, Any]]] = {}
        self.stats = KvplanStats()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the worker's caches and register them with NIXL."""
        transfer, parallel = self._config.kv_transfer_config, self._config.parallel_config
        assert transfer is not None
        assert transfer.engine_id is not None
        tp_rank, tp = get_tensor_model_parallel_rank(), parallel.tensor_parallel_size
        info = RankInfo(
            transfer.engine_id, get_pp_group().rank_in_group * tp + tp_rank, tp_rank, tp
        )
        worker = worker_of(self._config, self._cache, info, kv_caches)
        worker, copier = with_staging(
            worker, int(transfer.get_from_extra_config("staging_bytes", 0))
        )
        backends: list[str] = transfer.get_from_extra_config("backends", ["UCX"])
        self._memories = memories_of(kv_caches.values())
        key = str(transfer.get_from_extra_config("key", "")).encode()
        self._executor = NixlExecutor(
            worker, {name: UCX.get(name, {}) for name in backends}, key=key
        )
        self._reads = make_reads(
            self._executor,
            Claims(logger, send_claims),
            logger,
            key=key,
            copier=copier,
            timeout_s=float(transfer.get_from_extra_config("handshake_timeout_s", 30)),
            digest=self._digests_of if transfer.get_from_extra_config("verify", False) else None,
        )
        logger.info("%s", worker)

    def envelope(self) -> bytes:
        """The worker's envelope."""
        assert self._executor is not None
        return self._executor.envelope()

    def begin(self, step: KvplanMetadata) -> None:
        """Begin the reads of a step."""
        self._released |= step.released
        for request, blocks in step.digests.items():
            self._digests[request] = [self._digest(request, blocks)]
        for name, error in step.refused.items():
            self._reads.fail(name, error)
        for read in step.reads:
            try:
                if self._cache.needs_kv_cache_zeroing:
                    self._clear(read)
            except KVPlanError as error:
                self._reads.fail(read.request, error)
            else:
                self._reads.begin(read)

    def _digests_of(self, arrived: Binding) -> Mapping[str, Any]:
        """Digest what has arrived of a request."""
        return cache_digests(
            self._reads.worker, self._memories, arrived["local"], arrived["tokens"]
        )

    def _digest(self, request: DigestRequest, blocks: Mapping[str, Blocks]) -> dict[str, Any]:
        """Digest what another engine reads of a request, as far as this worker has it; nothing where that fails."""
        worker = self._reads.worker
        tokens = dict(request.tokens)
        states = {group.name for group in worker.groups if group.tokens_per_block is None}
        groups = {group.name for group in worker.groups} & (tokens.keys() | states)
        tables = {group: blocks[group] for group in groups}
        ranges = {group: tokens[group] for group in groups - states}
        try:
            return cache_digests(worker, self._memories, tables, ranges)
        except KVPlanError as error:
            logger.error("%s is not digested: %s", request.lease, error)
            return {}

    def take_digests(self) -> KvplanWorkerMetadata | None:
        """Return the digests that were computed since the last step."""
        if not self._digests:
            return None
        digests = self._digests
        self._digests = {}
        return KvplanWorkerMetadata(digests)

    def _clear(self, read: Read) -> None:
        """Set to zero what is after a request's last position in its blocks, which vLLM leaves to who fills them."""
        worker = self._reads.worker
        ours = {group.name for group in worker.groups} & read.tokens.keys()
        tokens = {name: read.tokens[name] for name in ours}
        for rows in tails(worker, {name: read.local[name] for name in ours}, tokens).values():
            set_zero(self._memories, rows)

    def results(self) -> KVConnectorTransferResults:
        """What has ended since the last step."""
        released, self._released = self._released, set()
        ended = self._reads.poll()
        for one in ended:
            self.stats.record(one)
        return KVConnectorTransferResults(
            finished_sending=released,
            finished_recving={one.request for one in ended},
            # vLLM ends a failed request at once, and frees its blocks when it is in finished_recving.
            failed_recving={one.request for one in ended if one.error is not None}.union(
                self._reads.late()
            ),
        )

    def close(self) -> None:
        """Free what is registered. No byte moves afterwards."""
        if self._executor is not None:
            self._executor.close()
