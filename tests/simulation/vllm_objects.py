"""vLLM's objects of a scheduler where vLLM is not: of each class what the connector reads, and no more.

``tests/engines/test_stand_ins.py`` holds them to vLLM's own classes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs


class RequestStatus(enum.Enum):
    """The statuses of requests that the connector knows, and others."""

    WAITING = -1
    RUNNING = 0
    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3
    FINISHED_ERROR = 4
    PREEMPTED = 5


@attrs.define
class SamplingParams:
    allowed_token_ids: Sequence[int] | None = None


@attrs.define
class LoRARequest:
    lora_name: str = "sql"
    lora_int_id: int = 1
    lora_path: str = "/nowhere"
    load_inplace: bool = False


@attrs.define
class PlaceholderRange:
    offset: int
    length: int = 1


@attrs.define
class MultiModalFeatureSpec:
    identifier: str
    mm_position: PlaceholderRange


@attrs.define
class Request:
    request_id: str
    kv_transfer_params: Mapping[str, Any] | None
    prompt_token_ids: list[int] | None
    _all_token_ids: list[int] = attrs.field(alias="_all_token_ids")
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    status: RequestStatus
    max_tokens: int
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None
    mm_features: Sequence[MultiModalFeatureSpec] = ()
    prompt_embeds: Any = None
    prompt_is_token_ids: Sequence[bool] | None = None
    sampling_params: Any = attrs.field(factory=SamplingParams)
    use_structured_output: bool = False
    num_output_tokens: int = 0
    client_index: int = 0
    trace_headers: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    def take_events(self) -> None: ...

    def get_finished_reason(self) -> str:
        return "error"


@attrs.define
class KVCacheBlock:
    block_id: int
    is_null: bool = False
    block_hash: Any = None


@attrs.frozen
class KVCacheBlocks:
    blocks: Sequence[Sequence[KVCacheBlock]]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in group] for group in self.blocks)


@attrs.define
class BlockPool:
    num_free: int = 10**6

    def get_num_free_blocks(self) -> int:
        return self.num_free


@attrs.define
class SingleTypeKVCacheManager:
    block_size: int
    block_pool: BlockPool
    num_cached_block: dict[str, int] = attrs.field(factory=dict)
    req_to_blocks: dict[str, list[KVCacheBlock]] = attrs.field(factory=dict)


# A step


@attrs.frozen
class NewRequestData:
    req_id: str


@attrs.frozen
class CachedRequestData:
    resumed_req_ids: set[str]


@attrs.frozen
class SchedulerOutput:
    num_scheduled_tokens: Mapping[str, int]
    scheduled_new_reqs: Sequence[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    preempted_req_ids: set[str] | None


def scheduled(
    new: Iterable[str] = (),
    resumed: Iterable[str] = (),
    preempted: Iterable[str] = (),
    num_scheduled: Mapping[str, int] | None = None,
) -> SchedulerOutput:
    """The output of a step by the names of its requests."""
    new_requests, others = [NewRequestData(name) for name in new], CachedRequestData({*resumed})
    return SchedulerOutput(num_scheduled or {}, new_requests, others, {*preempted})


@attrs.define
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    events: Any = None
    trace_headers: Any = None


@attrs.define
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput] = attrs.field(factory=list)


@attrs.frozen
class KVConnectorOutput:
    kv_connector_worker_meta: Any


@attrs.frozen
class ModelRunnerOutput:
    kv_connector_output: KVConnectorOutput


# Configurations


@attrs.define
class KVTransferConfig:
    engine_id: str
    is_kv_producer: bool = True
    is_kv_consumer: bool = True


@attrs.define
class CacheConfig:
    enable_prefix_caching: bool = True


@attrs.define
class ParallelConfig:
    decode_context_parallel_size: int = 1
    data_parallel_index: int = 0


@attrs.frozen
class ModelConfig:
    enable_sleep_mode: bool = False

    def get_vocab_size(self) -> int:
        return 1000


@attrs.frozen
class AuxOutputConfig:
    enable_return_routed_experts: bool = False


@attrs.define
class VllmConfig:
    kv_transfer_config: Any = None
    cache_config: CacheConfig = attrs.field(factory=CacheConfig)
    num_prefill_lookahead_tokens: int = 0
    model_config: ModelConfig = attrs.field(factory=ModelConfig)
    parallel_config: ParallelConfig = attrs.field(factory=ParallelConfig)
    aux_output_config: AuxOutputConfig = attrs.field(factory=AuxOutputConfig)
