"""The connector between engines as vLLM sees it.

It hands calls on to a :class:`~kvplan_nixl.vllm.scheduler.Scheduler` or a
:class:`~kvplan_nixl.vllm.worker.Worker`.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvplan_nixl.serving import Driver
from kvplan_nixl.vllm.base import BlockConnector
from kvplan_nixl.vllm.drafts import check_drafts
from kvplan_nixl.vllm.engine_hooks import watch_adapters, watch_engine
from kvplan_nixl.vllm.engine_state import EngineState
from kvplan_nixl.vllm.identity import check_models, identity_of
from kvplan_nixl.vllm.metadata import KvplanHandshakeMetadata, KvplanWorkerMetadata
from kvplan_nixl.vllm.metrics import KvplanPromMetrics, KvplanStats
from kvplan_nixl.vllm.registration import register
from kvplan_nixl.vllm.scheduler import Scheduler
from kvplan_nixl.vllm.settings import check_engine, settings_of, uses_host_cache
from kvplan_nixl.vllm.store import KvplanStore
from kvplan_nixl.vllm.worker import Worker


class KvplanConnector(BlockConnector):
    """Reads a request's KV cache from the engine that computed it.

    The two engines may differ in parallel sizes, blocks and layout.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_drafts(vllm_config, kv_cache_config)
        check_engine(vllm_config)
        settings = settings_of(vllm_config)
        facts = identity_of(vllm_config, settings, settings.draft)
        system = Driver(settings.access())
        self._has_host_cache = uses_host_cache(vllm_config.kv_transfer_config)
        if role == KVConnectorRole.SCHEDULER:
            watch_engine(vllm_config)
            self.state = EngineState(facts, system.token_hex)
            self._scheduler = Scheduler(vllm_config, kv_cache_config, settings, system, self.state)
        else:
            watch_adapters(vllm_config)
            self._worker = Worker(vllm_config, kv_cache_config, settings, system, facts)
            self.adapters = self._worker.adapters

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A read has the state after its last position, whatever states are cached."""
        return True

    # In the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.set_managers(kv_cache_manager.coordinator.single_type_managers)

    def meet(self, other: BlockConnector) -> None:
        if isinstance(other, KvplanStore):
            self._scheduler.stores.append(other._scheduler)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens = self._scheduler.count_tokens_to_read(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.begin_read(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._scheduler.publish(scheduler_output)
        if self._has_host_cache:
            self._scheduler.save(scheduler_output)
        return self._scheduler.take_step()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        received = connector_output.finished_recving or set()
        self._scheduler.end_reads(received, connector_output.failed_recving)
        self._scheduler.end_exports(connector_output.finished_sending or set())
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KvplanWorkerMetadata):
            self._scheduler.take_digests(metadata)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = self._scheduler.hand_over(request, block_ids)
        return params is not None, params

    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        handshakes = [
            value for value in metadata.values() if isinstance(value, KvplanHandshakeMetadata)
        ]
        check_models(self.state.started, (handshake.model for handshake in handshakes))
        siblings = {name for value in handshakes for name in value.siblings}
        # the store is told what it may not save
        if self._scheduler.stores:
            siblings.discard(KvplanStore.__name__)
        self._scheduler.set_siblings(siblings)
        self._scheduler.serve_offers([handshake.envelope for handshake in handshakes])

    # In a worker

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        self._worker.set_copies(copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        # vLLM tells a connector nothing of its siblings: MultiConnector has them.
        group = get_kv_transfer_group()
        connectors = [self] if group is self else group.sub_connectors
        siblings = [type(connector).__name__ for connector in connectors if connector is not self]
        return KvplanHandshakeMetadata(self._worker.envelope(), tuple(siblings), self._worker.model)

    def wait_for_save(self) -> None:
        """Wait until a host cache has what readers may read after this step."""
        self._worker.save(self._get_connector_metadata())

    def get_kv_connector_stats(self) -> KvplanStats | None:
        stats: KvplanStats = self._half.stats
        return stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvplanStats:
        return KvplanStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvplanPromMetrics:
        return KvplanPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# MultiConnector asks for the class by its name, also where vLLM loads no plugins.
register()
