"""SGLang's pools where SGLang is not: of each class what the bridges read, and no more.

``tests/engines/test_stand_ins.py`` holds them to SGLang's own classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs


@attrs.frozen
class MHATokenToKVPool:
    """K and V, of two heads of 8 on this rank unless it says others."""

    k_buffer: Any
    v_buffer: Any
    page_size: int
    layer_num: int = 3
    start_layer: int = 0
    kv_cache_layout: str = "nhd"
    dtype: Any = "torch.float32"
    head_num: int = 2
    head_dim: int = 8
    v_head_dim: int = 8


@attrs.frozen
class MHATokenToKVPoolFP4(MHATokenToKVPool):
    k_scale_buffer: Any = None


@attrs.frozen
class MLATokenToKVPool:
    """Latents."""

    kv_buffer: Any
    page_size: int
    layer_num: int = 3
    start_layer: int = 0
    dtype: Any = "torch.float32"
    kv_lora_rank: int = 16
    qk_rope_head_dim: int = 8


@attrs.frozen
class DSATokenToKVPool(MLATokenToKVPool):
    """Latents, and index keys with their scales."""

    index_k_with_scale_buffer: Any = None
    index_head_dim: int = 128


@attrs.frozen
class IndexKeyPool:
    """``MHATokenToKOnlyPool``: keys alone."""

    k_buffer: Any


@attrs.frozen
class MiniMaxSparseKVPool:
    """K and V, and the index keys of some layers."""

    main_pool: Any
    index_k_pool: Any
    index_k_layer_id_mapping: Mapping[int, int]
    index_kv_pool: Any = None


@attrs.frozen
class SWAKVPool:
    """Pools of full and of sliding layers."""

    full_kv_pool: Any
    swa_kv_pool: Any
    layers_mapping: Mapping[int, tuple[int, bool]]
    swa_req_ring_size: int | None = None
    dtype: Any = "torch.float32"


@attrs.frozen
class DeepSeekV4TokenToKVPool:
    swa_kv_pool: Any
    compression_ratios: Sequence[int]


@attrs.frozen
class State:
    """``MambaPool.State``."""

    conv: Sequence[Any]
    temporal: Any


@attrs.frozen
class MambaPool:
    mamba_layer_ids: Sequence[int]
    mamba_cache: State


@attrs.frozen
class HybridLinearKVPool:
    full_kv_pool: Any
    full_attention_layer_id_mapping: Mapping[int, int]
    mamba_pool: MambaPool | None


# HiCache's, in host memory


@attrs.frozen
class MHATokenToKVPoolHost:
    kv_buffer: Any
    layout: str = "layer_first"
    page_size: int = 8
    layer_num: int = 3
    start_layer: int = 0
    dtype: Any = "torch.float32"
    head_num: int = 2
    head_dim: int = 8
    v_head_dim: int = 8

    @property
    def k_buffer(self) -> Any:
        return self.kv_buffer[0]

    @property
    def v_buffer(self) -> Any:
        return self.kv_buffer[1]


@attrs.frozen
class MLATokenToKVPoolHost:
    kv_buffer: Any
    layout: str
    page_size: int = 8
    layer_num: int = 3
    start_layer: int = 0
    kv_cache_dim: int = 8
