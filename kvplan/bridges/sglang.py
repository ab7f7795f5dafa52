"""The Worker of an SGLang rank, from its pool of KV cache.

As in SGLang 0.5.23: sglang/srt/mem_cache/memory_pool.py, swa_memory_pool.py and index_key_cache.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Final

from kvplan.bridges.assembly import Assembly, RankInfo, conv_order, differ, reads_engine
from kvplan.describe.worker import Worker
from kvplan.models.layouts import Page
from kvplan.models.model import Model
from kvplan.models.pools import k_or_v
from kvplan.models.tensors import STATE

PATTERNS: Final = MappingProxyType(
    {
        "nhd": ("block head content",) * 2,
        "hnd": ("block head token content",) * 2,
        "vectorized_5d": ("block head dim token dim", "block head token dim token"),
    }
)
"""Dimensions of the K and V buffers, by ``kv_cache_layout``."""


@reads_engine("SGLang 0.5.23")
def from_sglang(model: Model, info: RankInfo, pool: Any) -> Worker:
    """The worker of an SGLang rank, from its ``token_to_kv_pool``.

    The pool is an ``MHATokenToKVPool`` (in the layout ``nhd``, ``hnd`` or ``vectorized_5d``), an ``MLATokenToKVPool``
    or a ``DSATokenToKVPool``; a ``SWAKVPool`` of two of them; or a ``HybridLinearKVPool`` of one and a ``MambaPool``.
    Blocks are pages: ``slot // page_size`` for the slot of a token. A sliding pool has slots of its own. The first
    page, and slot 0 of states, hold no data of any request. Index keys come before their scales, as on CUDA.

    Raises ``LAYOUT`` for other layouts, for scales in buffers of their own, and for a window stored as a ring for each
    request.

    >>> import numpy as np
    >>> from types import SimpleNamespace as Pool
    >>> from kvplan import Model
    >>> from kvplan.bridges import RankInfo, from_sglang
    >>> k, v = np.zeros((2, 28, 640 + 16, 4, 128), np.float16)  # slots, of which one page is padding; 4 heads of 8
    >>> pool = Pool(page_size=16, start_layer=0, layer_num=28, kv_cache_layout="nhd", k_buffer=k, v_buffer=v)
    >>> model = Model.shipped("qwen3-0.6b").with_dtypes("float16")
    >>> worker = from_sglang(model, RankInfo("decode", tp_rank=1, tp=2), pool)
    >>> print(worker)
    decode/0: 56 views of 28 tensors in 56 regions, 1 group
    >>> print(*worker.views[1].axes, sep="; ")
    token [0, 16) of 16 stride 1024; head [4, 8) of 8 stride 256; kv [1, 2) of 2 stride 0; dim [0, 128) of 128 stride 2
    """
    assembly = Assembly(model, info)
    for part, layers in _parts(pool):
        if layers:
            assembly.begin_group(next(iter(layers)), part.page_size)
        for layer, index in layers.items():
            _add_layer(assembly, part, layer, index)
    if hasattr(pool, "mamba_pool"):
        _add_states(assembly, pool.mamba_pool)
    return assembly.finish()


def _parts(pool: Any) -> Iterator[tuple[Any, dict[int, int]]]:
    """The pools inside one, each with the model's layers and their indices in its buffers."""
    if hasattr(pool, "swa_kv_pool"):
        ring = getattr(pool, "swa_req_ring_size", None)
        if ring is not None:
            raise differ(
                "LAYOUT",
                "read a pool of SGLang",
                "pages of tokens",
                f"a ring of {ring} for each request",
            )
        for part, sliding in ((pool.full_kv_pool, False), (pool.swa_kv_pool, True)):
            yield (
                part,
                {
                    layer: at
                    for layer, (at, is_swa) in pool.layers_mapping.items()
                    if is_swa == sliding
                },
            )
    elif hasattr(pool, "full_kv_pool"):
        yield pool.full_kv_pool, dict(pool.full_attention_layer_id_mapping)
    else:
        yield pool, {pool.start_layer + i: i for i in range(pool.layer_num)}


def _add_layer(assembly: Assembly, pool: Any, layer: int, index: int) -> None:
    for name in ("k_scale_buffer", "kv_scale_buffer"):
        if getattr(pool, name, None) is not None:
            raise differ("LAYOUT", "read a pool of SGLang", "no buffers of scales", name)
    if hasattr(pool, "kv_buffer"):
        latent = assembly.attention(layer, "index")
        assembly.add(pool.kv_buffer[index], "block head content", latent, join=pool.page_size)
        keys = getattr(pool, "index_k_with_scale_buffer", None)
        if (
            keys is not None and keys[index].shape[0]
        ):  # a layer that reuses the choice of the one before has no keys
            assembly.add_page(keys[index], assembly.index(layer))
        return
    if pool.kv_cache_layout not in PATTERNS:
        raise differ(
            "LAYOUT",
            "read a pool of SGLang",
            f"one of {', '.join(PATTERNS)}",
            repr(pool.kv_cache_layout),
        )
    both, join = assembly.attention(layer), pool.page_size if pool.kv_cache_layout == "nhd" else 1
    for i, buffers in enumerate((pool.k_buffer, pool.v_buffer)):
        assembly.add(buffers[index], PATTERNS[pool.kv_cache_layout][i], k_or_v(both, i), join=join)


def _add_states(assembly: Assembly, pool: Any) -> None:
    """Adds the states of a ``MambaPool``, which stores convolutions and SSM states in separate buffers."""
    for index, layer in enumerate(pool.mamba_layer_ids):
        if not index:
            assembly.begin_group(layer, None)
        sections, states = (
            assembly.pages(layer)[STATE].sections,
            [*pool.mamba_cache.conv, pool.mamba_cache.temporal],
        )
        order = conv_order(
            sections, [state.shape[2:] for state in states], [state.dtype for state in states]
        )
        for section, state in zip(sections, states, strict=True):
            assembly.add_page(state[index], Page.of(*section), order)
