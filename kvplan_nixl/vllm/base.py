"""What vLLM asks of each of kvplan's connectors, and all of them answer alike."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.request import Request


class BlockConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector that moves the blocks of whole requests, between steps, in registered memory."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for heads outside tokens: the longest runs if engines divide heads differently."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return no: sleep mode would move memory that is described."""
        return False

    # In the scheduler

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        ended: tuple[bool, dict[str, Any] | None]
        ended = self.request_finished_all_groups(request, (block_ids,))
        return ended

    # In a worker

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: bytes move between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save nothing: a request moves once it is computed."""

    def wait_for_save(self) -> None:
        """Wait for nothing: no layer is saved."""
