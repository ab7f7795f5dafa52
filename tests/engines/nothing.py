"""The control: a connector that promises a prompt's cache and moves nothing."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class NothingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Says that all of a prompt but its last token is loaded, and leaves what the blocks held before."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        promised = bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
        return (request.num_prompt_tokens - 1 - num_computed_tokens if promised else 0), False

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        asked = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
        return False, ({"do_remote_prefill": True} if asked else None)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


NixlConnector = NothingConnector  # for routers that know the name
