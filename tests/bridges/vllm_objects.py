"""vLLM's descriptions of caches where vLLM is not: of each class what bridges and the connector read, and no more.

``tests/engines/test_stand_ins.py`` holds them to vLLM's own classes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs


class KVQuantMode(enum.IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    NVFP4 = 5


class SparseCacheRole(enum.Enum):
    SPARSE = "sparse"
    INDEXER = "indexer"


class MambaAttentionBackendEnum(enum.Enum):
    MAMBA1, MAMBA2, GDN_ATTN, LINEAR, SHORT_CONV, CUSTOM = range(6)


SIZES = {"torch.int8": 1, "torch.uint8": 1, "torch.bfloat16": 2, "torch.int32": 4, "torch.float32": 4}


@attrs.define
class KVCacheSpec:
    block_size: int = 8
    dcp_sharded: bool = attrs.field(default=False, kw_only=True)

    @property
    def uses_slot_mapping(self) -> bool:
        return True

    @property
    def has_layer_views(self) -> bool:
        return True


@attrs.define
class AttentionSpec(KVCacheSpec):
    """Layers of two heads of 8 on this rank, unless it says others."""

    dcp_sharded: bool = attrs.field(default=True, kw_only=True)
    num_kv_heads: int = attrs.field(default=2, kw_only=True)
    head_size: int = attrs.field(default=8, kw_only=True)
    head_size_v: int = attrs.field(default=8, kw_only=True)
    dtype: str = attrs.field(default="torch.int32", kw_only=True)
    kv_quant_mode: KVQuantMode = attrs.field(default=KVQuantMode.NONE, kw_only=True)
    num_head_slots: int | None = attrs.field(default=None, kw_only=True)
    state_content_bytes: int | None = attrs.field(default=None, kw_only=True)
    max_tp_shards: int | None = attrs.field(default=None, kw_only=True)
    tokens_per_state: int | Fraction = attrs.field(default=1, kw_only=True)

    @property
    def num_heads(self) -> int:
        return self.num_head_slots or self.num_kv_heads

    @property
    def num_states(self) -> int:
        return int(self.block_size // self.tokens_per_state)

    @property
    def state_content_size_bytes(self) -> int:
        return self.state_content_bytes or (self.head_size + self.head_size_v) * SIZES[self.dtype]


@attrs.define
class FullAttentionSpec(AttentionSpec): ...


@attrs.define
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = attrs.field(default=32, kw_only=True)


@attrs.define
class MLAAttentionSpec(AttentionSpec):
    """Rows that every rank has whole."""

    num_kv_heads: int = attrs.field(default=1, kw_only=True)
    head_size_v: int = attrs.field(default=0, kw_only=True)
    cache_dtype_str: str | None = attrs.field(default=None, kw_only=True)
    cache_role: SparseCacheRole = attrs.field(default=SparseCacheRole.SPARSE, kw_only=True)
    model_version: str | None = attrs.field(default=None, kw_only=True)


@attrs.define
class CircularBufferSpec(AttentionSpec):
    @property
    def uses_slot_mapping(self) -> bool:
        return False


@attrs.define
class MambaSpec(KVCacheSpec):
    shapes: Sequence[Sequence[int]] = attrs.field(kw_only=True)
    dtypes: Sequence[str] = attrs.field(kw_only=True)
    mamba_type: MambaAttentionBackendEnum = attrs.field(default=MambaAttentionBackendEnum.MAMBA2, kw_only=True)
    tp_replicated: bool = attrs.field(default=False, kw_only=True)


@attrs.define
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """A spec for each layer of a group."""

    kv_cache_specs: Mapping[str, KVCacheSpec] = attrs.field(kw_only=True)


@attrs.define
class KVCacheGroupSpec:
    """Layers that share a block table."""

    layer_names: Sequence[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool = True


@attrs.define
class KVCacheTensor:
    """Where some layers are in an allocation."""

    size: int
    layers: Sequence[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@attrs.define
class KVCacheConfig:
    kv_cache_tensors: Sequence[KVCacheTensor]
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    needs_kv_cache_zeroing: bool = False

    @property
    def transfer_group_ids(self) -> tuple[int, ...]:
        return tuple(n for n, group in enumerate(self.kv_cache_groups) if group.enable_kv_transfer)

    @property
    def transfer_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        return tuple(self.kv_cache_groups[n] for n in self.transfer_group_ids)


def config_of(specs: Mapping[str, Any], caches: Mapping[str, Any] | None = None) -> KVCacheConfig:
    """A group for each layer. Its tensor is where its cache is, in memory that all caches share."""
    tensors = [KVCacheTensor(0, [name], 0, 0) for name in specs] if caches is None else placed(specs, caches)
    return KVCacheConfig(tensors, [KVCacheGroupSpec([name], spec) for name, spec in specs.items()])


def placed(specs: Mapping[str, Any], caches: Mapping[str, Any]) -> list[KVCacheTensor]:
    """Tensors of arrays whose first dimension is blocks, or kernel blocks, or of lists of one such array."""
    arrays = {name: each[0] if isinstance(each, list) else each for name, each in caches.items()}
    starts = {name: array.__array_interface__["data"][0] for name, array in arrays.items()}
    start = min(starts.values())
    size = max(starts[name] + len(array) * array.strides[0] for name, array in arrays.items()) - start
    tensors = []
    for name, array in arrays.items():
        kernel_blocks = getattr(specs[name], "num_states", array.shape[2]) // array.shape[2]
        tensors.append(KVCacheTensor(size, [name], 0, kernel_blocks * array.strides[0], starts[name] - start))
    return tensors


# Layers of a model


@attrs.frozen
class Attention:
    """A layer with the name of its backend, and with its dtype."""

    backend: str = ""
    kv_cache_dtype: str = "auto"

    def get_attn_backend(self) -> Attention:
        """The backend, here the layer itself."""
        return self

    def get_name(self) -> str:
        return self.backend


@attrs.frozen
class CPUAttention(Attention):
    """A layer on a CPU, with its instruction set."""

    isa: str = ""


@attrs.frozen
class Indexer(Attention):
    """A cache of keys, which may lie in tiles."""

    uses_shuffled_layout: bool = False


@attrs.frozen
class Norm:
    n_groups: int | None


@attrs.frozen
class MambaMixer2:
    norm: Norm
