"""The Worker of a TensorRT-LLM rank, from its ``KVCacheManager``.

As in TensorRT-LLM: ``get_buffers`` and ``get_batch_cache_indices``
(tensorrt_llm/_torch/pyexecutor/resource_manager.py at commit 001541b),
``swapMemoryPoolBlockOffset`` (cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp at commit 002ba6a).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from kvplan._checks import is_one_of
from kvplan.bridges.assembly import Assembly, RankInfo, contradiction, reads_engine
from kvplan.describe.worker import Worker
from kvplan.models.model import Model

PATTERNS: Final = MappingProxyType(
    {"NHD": "block kv token head content", "HND": "block kv head token content"}
)
"""Dimensions of the buffers, by the ``kv_layout`` of the attention backend."""


@reads_engine("TensorRT-LLM")
def from_tensorrt_llm(
    model: Model, info: RankInfo, kv_cache_manager: Any, kv_layout: str
) -> Worker:
    """Return the worker of a TensorRT-LLM rank, from the ``KVCacheManager`` of its PyTorch backend.

    Its pools are ``[block, layer, kv, values of a block]``. The attention backend decides how the
    values of K and of V are arranged, and ``kv_layout`` names it: ``HND``, heads outside slots, or
    ``NHD``. Each attention window has a block table. Ids are those of ``get_batch_cache_indices``,
    as long as no block has been moved to the host's pool and back; after that, a block's id may not
    be its index in the pool.

    Raises ``LAYOUT`` for any other ``kv_layout``, and for layers that cache more than K and V or a
    latent. It refuses the overlapping buffers that ``KVCacheManagerV2`` returns for several layers
    of one pool.

    >>> import numpy as np
    >>> from kvplan import Model
    >>> from kvplan.bridges import RankInfo, from_tensorrt_llm
    >>> class Manager:
    ...     tokens_per_block = 32
    ...     layer_offsets = {layer: layer for layer in range(28)}
    ...     max_attention_window_vec = [4096]
    ...     pool = np.zeros((50, 28, 2, 4 * 32 * 128), np.float16)
    ...     def get_buffers(self, layer_idx, kv_layout):
    ...         return self.pool[:, self.layer_offsets[layer_idx]].reshape(50, 2, 4, 32, 128)
    >>> model = Model.shipped("qwen3-0.6b").with_dtypes("float16")
    >>> info = RankInfo("prefill", tp_rank=1, tp=2)
    >>> worker = from_tensorrt_llm(model, info, Manager(), "HND")
    >>> print(worker, worker.views[0].axes[1], sep="; ")
    prefill/0: 28 views of 28 tensors in 1 region, 1 group; head [4, 8) of 8 stride 8192
    """
    if not is_one_of(kv_layout, PATTERNS):
        expected = f"one of {', '.join(PATTERNS)}"
        raise contradiction("LAYOUT", "read a pool of TensorRT-LLM", expected, repr(kv_layout))
    assembly = Assembly(model, info)
    # The windows repeat over the layers; the layers of one window share a block table.
    windows = kv_cache_manager.max_attention_window_vec
    layers_by_window: dict[int, list[int]] = {}
    for layer, offset in kv_cache_manager.layer_offsets.items():
        layers_by_window.setdefault(windows[offset % len(windows)], []).append(layer)
    for layers in layers_by_window.values():
        assembly.begin_group(layers[0], kv_cache_manager.tokens_per_block)
        for layer in layers:
            buffer = kv_cache_manager.get_buffers(layer, kv_layout)
            assembly.add(buffer, PATTERNS[kv_layout], assembly.attention(layer))
    return assembly.finish()
