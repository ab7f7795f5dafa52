"""Hooks of vLLM that kvplan's connectors share."""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

ONE_PIECE: Final = "BLHNC"
"""The layout in which a block of all layers is contiguous, and each head within it."""


class LayoutRequest(NamedTuple):
    """The layout that a connector asks vLLM for, ``None`` for vLLM's own choice, and why."""

    layout: str | None
    reason: str

    @classmethod
    def of(cls, config: VllmConfig) -> LayoutRequest:
        """Return what to ask for.

        vLLM takes a connector's layout if all attention backends of the model can read it;
        otherwise it warns and takes the first that they have in common. MLA is left to vLLM: a
        latent has one head, so a block of one layer is a long run in every layout, and kernels of
        sparse MLA assert strides of whole rows, which blocks of all layers break.
        """
        model = config.model_config
        if model is None:
            return cls(None, "there is no model")
        if model.use_mla:
            return cls(None, "latents (MLA) are long runs in every layout")
        if current_platform.is_cpu():
            return cls("LBHNC", "attention on CPUs reads it alone")
        return cls(ONE_PIECE, "a block of all layers is contiguous")

    def note(self, layout: str, setting: str | None) -> str:
        """Return the log line about the layout that vLLM has taken."""
        if setting is not None:
            return f"KV cache layout {layout}, by VLLM_KV_CACHE_LAYOUT={setting}"
        if self.layout is None:
            return f"KV cache layout {layout}, by vLLM's choice: {self.reason}"
        if layout == self.layout:
            return f"KV cache layout {layout}, as kvplan asked: {self.reason}"
        return (
            f"KV cache layout {layout}: kvplan asked for {self.layout} ({self.reason}), which this "
            "model's attention backends do not take together; VLLM_KV_CACHE_LAYOUT sets another"
        )


_BOUND: Final[WeakKeyDictionary[KVCacheManager, list[BlockConnector]]] = WeakKeyDictionary()
"""Connectors by the manager that vLLM binds them to: a MultiConnector tells them of no other."""


class BlockConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector that moves the blocks of whole requests, between steps, in registered memory.

    vLLM makes it once in the scheduler and once in each worker. It only hands calls on, to the half
    of that process: ``_scheduler`` or ``_worker``.
    """

    _scheduler: Any
    _worker: Any

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return LayoutRequest.of(vllm_config).layout

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Sleep mode would release memory that NIXL has registered."""
        return False

    @property
    def _half(self) -> Any:
        """The half of this process."""
        return self._scheduler if self._role == KVConnectorRole.SCHEDULER else self._worker

    def shutdown(self) -> None:
        self._half.close()

    # In the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Meet the engine's other connectors of kvplan: vLLM binds all of them to one manager."""
        others = _BOUND.setdefault(kv_cache_manager, [])
        for other in others:
            other.meet(self)
            self.meet(other)
        others.append(self)

    def meet(self, other: BlockConnector) -> None:
        """Take another connector of the engine."""

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        ended: tuple[bool, dict[str, Any] | None]
        ended = self.request_finished_all_groups(request, (block_ids,))
        return ended

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layout = self._vllm_config.cache_config.kv_cache_layout
        request = LayoutRequest.of(self._vllm_config)
        logger.info_once("%s", request.note(str(layout), envs.VLLM_KV_CACHE_LAYOUT))
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_step(self._get_connector_metadata())

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report: KVConnectorWorkerMetadata | None = self._worker.take_report()
        return report

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results: KVConnectorTransferResults = self._worker.results()
        return results

    def wait_for_layer_load(self, layer_name: str) -> None:
        """vLLM calls this before each layer. Bytes move between steps, so nothing is to do."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """vLLM calls this after each layer. A request moves once it is computed."""

    def wait_for_save(self) -> None:
        """vLLM calls this after each step. No layer is saved."""
