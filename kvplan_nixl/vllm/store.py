"""The connector to a store as vLLM sees it."""

from __future__ import annotations

from secrets import token_hex
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvplan_nixl.vllm.base import BlockConnector
from kvplan_nixl.vllm.engine_hooks import watch_adapters, watch_engine
from kvplan_nixl.vllm.engine_state import EngineState
from kvplan_nixl.vllm.identity import check_models, identity_of
from kvplan_nixl.vllm.store_scheduler import KvplanStoreWorkerMetadata, StoreScheduler
from kvplan_nixl.vllm.store_settings import check_store_engine, store_settings_of
from kvplan_nixl.vllm.store_worker import StoreWorker


class KvplanStore(BlockConnector):
    """Saves the caches of finished requests in a store, and loads the prefixes of new ones.

    Engines that share the store may differ in parallel sizes, blocks and layout.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_store_engine(vllm_config, kv_cache_config)
        settings = store_settings_of(vllm_config)
        facts = identity_of(vllm_config, settings)
        if role == KVConnectorRole.SCHEDULER:
            watch_engine(vllm_config)
            self.state = EngineState(facts, token_hex)
            self._scheduler = StoreScheduler(vllm_config, kv_cache_config, settings, self.state)
        else:
            watch_adapters(vllm_config)
            self._worker = StoreWorker(vllm_config, kv_cache_config, settings, facts)
            self.adapters = self._worker.adapters

    # In the scheduler

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KvplanStoreWorkerMetadata) and metadata.offers:
            check_models(self.state.started, metadata.models)
            self._scheduler.set_offers(metadata.offers)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens = self._scheduler.count_tokens_to_load(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.begin_load(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.state.step_begun()
        return self._scheduler.take_step()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_saved = self._scheduler.begin_save(request, block_ids)
        self.state.forget(request.request_id)
        return is_saved, None

    def reset_cache(self) -> bool:
        self.state.store_reset()
        return True
