"""SGLang's objects where SGLang is not: of each class what the plugin reads, and no more.

``tests/engines/test_stand_ins.py`` holds them to SGLang's own classes.
"""

from __future__ import annotations

import enum
import importlib
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

IMAGE = 1_000_000
"""``MM_PAD_SHIFT_VALUE``: the first token of an image."""


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class KVTransferDestination(enum.Enum):
    DEVICE = "device"


class StateType(enum.Enum):
    SWA = "swa"
    DSA = "dsa"
    DSA_TAIL = "dsa_tail"


class DisaggregationMode(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class SpeculativeAlgorithm(enum.Enum):
    NONE = enum.auto()
    DFLASH = enum.auto()


@attrs.define
class Req:
    rid: str = "1"
    origin_input_ids: Sequence[int] = ()
    lora_id: str | None = None
    cache_salt: str | None = None
    input_embeds: Any = None
    token_type_ids: Any = None
    positional_embed_overrides: Any = None
    disagg_kv_sender: Any = None


@attrs.define
class DecodeRequest:
    req: Req
    kv_receiver: Any
    is_rebootstrap: bool = False


@attrs.define
class LoRARef:
    lora_id: str
    lora_path: str = ""


# A rank's memory


@attrs.define
class KVArgs:
    page_size: int
    aux_data_ptrs: list[int]
    aux_item_lens: list[int]
    state_types: list[StateType] = attrs.field(factory=list)
    system_dp_rank: int | None = None


class MetadataBuffers:
    def __init__(self, size: int) -> None:
        self.output_ids = torch.zeros(size, 16, dtype=torch.int32)
        self.bootstrap_room = torch.zeros(size, 8, dtype=torch.int64)


def kv_args(metadata: MetadataBuffers, page_size: int, state_types: Iterable[StateType] = ()) -> KVArgs:
    """What a manager is made of, with the addresses of these buffers."""
    buffers = [metadata.output_ids, metadata.bootstrap_room]
    addresses, sizes = [each.data_ptr() for each in buffers], [each[0].nbytes for each in buffers]
    return KVArgs(page_size, addresses, sizes, [*state_types])


# What the engine says of itself


@attrs.define
class GroupCoordinator:
    rank_in_group: int = 0
    world_size: int = 1
    cpu_group: Any = None


@attrs.define
class ParallelContext:
    world_group: GroupCoordinator = attrs.field(factory=GroupCoordinator)
    attn_tp_group: GroupCoordinator = attrs.field(factory=GroupCoordinator)
    pp_rank: int = 0
    pp_size: int = 1
    attn_dp_rank: int = 0
    attn_dp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    attn_dcp_size: int = 1
    enable_cp_tp_group_sharing: bool = False
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False


@attrs.define
class ServerArgs:
    load_format: str = "auto"
    json_model_override_args: str = "{}"
    quantization: str | None = None
    quantization_param_path: str | None = None
    model_loader_extra_config: str = "{}"
    speculative_draft_load_format: str | None = None
    speculative_draft_model_quantization: str | None = None
    speculative_draft_window_size: int | None = None
    speculative_draft_sink_size: int | None = None
    is_embedding: bool = False
    disaggregation_decode_allocation_policy: str = "early"
    disaggregation_decode_enable_radix_cache: bool = False
    disaggregation_ib_device: str | None = None
    enable_hisparse: bool = False


@attrs.define
class Serving:
    served_model_name: str = "tiny"
    weight_version: str = "default"
    host: str = "127.0.0.1"


@attrs.define
class Memory:
    hicache_host_memory_mode: str = "cache"


@attrs.define
class Disagg:
    disaggregation_decode_enable_offload_kvcache: bool = False


@attrs.define
class Model:
    kv_cache_dtype: str = "auto"


@attrs.define
class Spec:
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_draft_model_revision: str | None = None


@attrs.define
class Features:
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False


@attrs.define
class Exec:
    features: Features = attrs.field(factory=Features)


class HfConfig:
    """A configuration of transformers."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        vars(self).update(fields)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class ModelConfig:
    """A configuration that is in no folder here."""

    revision = None
    dtype = "torch.float32"
    context_len = 1024

    def __init__(self, fields: Mapping[str, Any], path: str = "tiny") -> None:
        self.model_path = path
        self.hf_config = self.hf_text_config = HfConfig(fields)
        kinds = fields.get("layer_types", ["full_attention"] * fields["num_hidden_layers"])
        self.swa_attention_layer_ids = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        self.full_attention_layer_ids = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        self._heads = fields["num_key_value_heads"]

    def get_total_num_kv_heads(self) -> Any:
        return self._heads

    def get_swa_num_kv_heads(self, tensor_parallel_size: int) -> Any:
        return self._heads


class RadixAttention(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, layer_id: int, sliding_window_size: int) -> None:
        super().__init__()
        self.layer_id, self.sliding_window_size = layer_id, sliding_window_size
        self.tp_k_head_num = 2


class ModelRunner:
    def __init__(self, model_config: ModelConfig, layers: Iterable[RadixAttention] = ()) -> None:
        self.model_config, self.model = model_config, torch.nn.ModuleList(layers)


class TpModelWorker:
    """The worker of a model, or of a draft."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        return [("draft", self.model_runner)]


@attrs.define
class Scheduler:
    tp_worker: TpModelWorker
    draft_worker: TpModelWorker
    sliding_window_size: int | None = None
    spec_algorithm: SpeculativeAlgorithm = SpeculativeAlgorithm.NONE
    forward_stream: Any = None


class DecodeTransferQueue:
    enable_deferred_kv_release = False
    deferred_kv_release_timeout = 0.0


@attrs.define
class Queue:
    """``PrefillBootstrapQueue`` or ``DecodePreallocQueue``."""

    token_to_kv_pool: Any
    draft_token_to_kv_pool: Any
    metadata_buffers: MetadataBuffers
    scheduler: Scheduler
    transfer_queue: DecodeTransferQueue = attrs.field(factory=DecodeTransferQueue)


@attrs.define
class Env:
    value: Any

    def get(self) -> Any:
        return self.value


@attrs.define
class Envs:
    SGLANG_DISAGGREGATION_WAITING_TIMEOUT: Env = attrs.field(factory=lambda: Env(10))
    SGLANG_DISAGG_STAGING_BUFFER: Env = attrs.field(factory=lambda: Env(False))


# A storage of HiCache


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        self.__dict__.setdefault("registered_pools", {})[host_pool_name] = host_pool


@attrs.define
class HiCacheStorageConfig:
    extra_config: dict[str, Any]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_size: int = 1
    dcp_size: int = 1


@attrs.define
class HiCacheStorageExtraInfo:
    prefix_keys: Any = None


class PoolName(enum.StrEnum):
    KV = "kv"
    SWA = "swa"


@attrs.define
class PoolTransfer:
    name: str
    host_indices: Any
    keys: list[str] | None = None


@attrs.frozen
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int]


class RadixKey:
    def __init__(self, token_ids: array[int], extra_key: str | None = None, cache_salt: str | None = None) -> None:
        self.token_ids, self.extra_key, self.cache_salt = token_ids, extra_key, cache_salt

    def __len__(self) -> int:
        return len(self.token_ids)

    def page_aligned(self, page_size: int) -> RadixKey:
        return RadixKey(self.token_ids[: len(self) // page_size * page_size], self.extra_key, self.cache_salt)


def get_storage_hash_str(key: RadixKey, prior_hash: str | None = None, page_size: int = 1) -> list[str]:
    """A chain of digests of pages, which are not SGLang's."""
    digest = prior_hash or f"{key.extra_key} {key.cache_salt}"
    found = []
    for start in range(0, len(key), page_size):
        page = array("q", key.token_ids[start : start + page_size]).tobytes()
        digest = sha256(digest.encode() + page).hexdigest()
        found.append(digest)
    return found


@attrs.define
class StorageBackupSpec:
    token_ids: array[int]
    host_value: Any
    comp_xfers: dict[str, list[PoolTransfer]] = attrs.field(factory=dict)


class HookType(enum.Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    """Hooks nothing, and keeps the names of what it would."""

    targets: list[str]

    def __init__(self) -> None:
        self.targets = []

    def register(self, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        self.targets.append(target)

    def apply_hooks(self) -> None: ...


# The modules that the plugin imports


@attrs.define
class Runtime:
    """An engine: what ``sglang.srt.runtime_context`` says of it, and its environment."""

    config: Mapping[str, Any]
    parallel: ParallelContext = attrs.field(factory=ParallelContext)
    server_args: ServerArgs = attrs.field(factory=ServerArgs)
    serving: Serving = attrs.field(factory=Serving)
    memory: Memory = attrs.field(factory=Memory)
    disagg: Disagg = attrs.field(factory=Disagg)
    model: Model = attrs.field(factory=Model)
    spec: Spec = attrs.field(factory=Spec)
    exec: Exec = attrs.field(factory=Exec)
    envs: Envs = attrs.field(factory=Envs)
    draft: ModelConfig | None = None
    hooks: HookRegistry = attrs.field(factory=HookRegistry)

    def plugin(self, monkeypatch: pytest.MonkeyPatch, modules: Sequence[str]) -> ModuleType:
        """``kvplan_nixl.sglang`` with some of its modules, which import this engine."""
        bags = ("parallel", "server_args", "serving", "memory", "disagg", "model", "spec", "exec")
        names: dict[str, dict[str, Any]] = {
            "runtime_context": {
                **{f"get_{bag}": lambda bag=bag: getattr(self, bag) for bag in bags},
                "process_model_config": lambda: ModelConfig(self.config),
            },
            "environ": {"envs": self.envs},
            "utils.network": {"get_local_ip_auto": lambda: "0.0.0.0"},
            "arg_groups.arg_utils": {"record_fields": attrs.fields},
            "configs.model_config": {"ModelConfig": self},
            "disaggregation.base": {
                "KVPoll": KVPoll,
                **{f"BaseKV{name}": type(name, (), {}) for name in ("Manager", "Sender", "Receiver")},
            },
            "disaggregation.base.conn": {
                "KVTransferMetric": object,
                "KVTransferDestination": KVTransferDestination,
            },
            "managers.schedule_batch": {"MM_PAD_SHIFT_VALUE": IMAGE},
            "mem_cache.hicache_storage": {
                "HiCacheStorage": HiCacheStorage,
                "PoolName": PoolName,
                "PoolTransferResult": PoolTransferResult,
            },
            "mem_cache.radix_cache": {"RadixKey": RadixKey},
            "mem_cache.utils": {"get_storage_hash_str": get_storage_hash_str},
            "plugins.hook_registry": {"HookType": HookType, "HookRegistry": self.hooks},
        }
        for name, contents in names.items():
            parts = ["sglang", "srt", *name.split(".")]
            for i in range(1, len(parts) + 1):
                module = ".".join(parts[:i])
                if module not in sys.modules:
                    monkeypatch.setitem(sys.modules, module, ModuleType(module))
            vars(sys.modules[module]).update(contents)
        imported = [f"kvplan_nixl.sglang.{each}" for each in modules]
        for module in imported:
            monkeypatch.delitem(sys.modules, module, raising=False)
        for module in imported:
            importlib.import_module(module)
        return importlib.import_module("kvplan_nixl.sglang")

    def from_server_args(self, *_: Any, **__: Any) -> ModelConfig:
        """The draft's ``ModelConfig``."""
        assert self.draft is not None
        return self.draft
