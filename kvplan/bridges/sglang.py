"""The Worker of an SGLang rank, from its pool of KV cache.

As in SGLang 0.5.23: sglang/srt/mem_cache/memory_pool.py, swa_memory_pool.py, index_key_cache.py,
and pool_host/mha.py and mla.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan.bridges.assembly import (
    INDEX,
    Assembly,
    ObservedModel,
    RankInfo,
    contradiction,
    conv_order,
    reads_engine,
)
from kvplan.bridges.sglang_model import (
    READ_POOL,
    PoolPart,
    draft_key,
    draft_part,
    pool_parts,
    state_buffers,
)
from kvplan.describe.views import TOKEN
from kvplan.describe.worker import Worker
from kvplan.models.layouts import KV, LocalTensor, Page
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

LAYER: Final = "layer"
"""The dimension of a pool in host memory that has a layer's index."""

HOST_PATTERNS: Final = MappingProxyType(
    {
        "layer_first": "layer block head content",
        "page_first": "block layer head content",
        "page_first_direct": "block layer token head content",
        "page_head": "block head token layer content",
    }
)
"""Dimensions of pools in host memory, by ``layout``. Blocks without tokens are slots."""


@reads_engine("SGLang 0.5.23")
def from_sglang(
    model: Model | ObservedModel, info: RankInfo, pool: Any, draft_pool: Any = None
) -> Worker:
    """Return the worker of an SGLang rank, from its ``token_to_kv_pool``.

    The pool is an ``MHATokenToKVPool`` (in the layout ``nhd``, ``hnd`` or ``vectorized_5d``), an
    ``MLATokenToKVPool`` or a ``DSATokenToKVPool``; a ``SWAKVPool`` of two of them; a
    ``HybridLinearKVPool`` of one and a ``MambaPool``; or a ``MiniMaxSparseKVPool``. Blocks are
    pages: ``slot // page_size`` for the slot of a token. A sliding pool has slots of its own. The
    first page, and slot 0 of states, hold no data of any request. Index keys come before their
    scales, as on CUDA.

    It may also be a pool of HiCache in host memory, an ``MHATokenToKVPoolHost`` or an
    ``MLATokenToKVPoolHost``, in any layout but ``page_unified`` and ``page_first_kv_split``.

    ``draft_pool`` is the ``draft_token_to_kv_pool``, of the draft layers of the model
    (:meth:`~kvplan.Model.with_draft`). It has the block table of the first layers.

    ``model`` is what the pools hold: :func:`sglang_model` reads it off them, whatever the model's
    type. From a configuration it is a :class:`~kvplan.Model`.

    Raises ``LAYOUT`` for other layouts, for scales in buffers of their own, and for a window stored
    as a ring for each request.

    >>> import numpy as np
    >>> from types import SimpleNamespace as Pool
    >>> from kvplan import Model
    >>> from kvplan.bridges import RankInfo, from_sglang
    >>> k, v = np.zeros((2, 28, 640 + 16, 4, 128), np.float16)  # one page of slots is padding
    >>> pool = Pool(page_size=16, start_layer=0, layer_num=28, kv_cache_layout="nhd",
    ...             k_buffer=k, v_buffer=v)
    >>> model = Model.shipped("qwen3-0.6b").with_dtypes("float16")
    >>> worker = from_sglang(model, RankInfo("decode", tp_rank=1, tp=2), pool)
    >>> print(worker)
    decode/0: 56 views of 28 tensors in 56 regions, 1 group
    >>> print(*worker.views[1].axes, sep="; ")
    token [0, 16) of 16 stride 1024; head [4, 8) of 8 stride 256; kv [1, 2) of 2 stride 0;
    dim [0, 128) of 128 stride 2
    """
    assembly = Assembly(model, info)
    full_part, *other_parts = [_written(model, part) for part in pool_parts(pool)]
    full_parts = [full_part]
    if draft_pool is not None:
        full_parts.append(_numbered(model, draft_part(draft_pool)))
    for parts in (full_parts, *([part] for part in other_parts)):
        _add_block_table(assembly, parts)
    if hasattr(pool, "mamba_pool"):
        _add_states(assembly, pool.mamba_pool)
    return assembly.finish()


def _written(model: Model | ObservedModel, part: PoolPart) -> PoolPart:
    """Return a pool without the layers that cache nothing: their buffers are never written."""

    def is_written(layer: int) -> bool:
        if isinstance(model, ObservedModel):
            return layer in model.layers
        return bool(model.named_layer(layer).tensors)

    layers = {layer: index for layer, index in part.layers.items() if is_written(layer)}
    return part._replace(layers=layers)


def _numbered(model: Model | ObservedModel, part: PoolPart) -> PoolPart:
    """Return a draft's pool with the keys of the draft's layers in a model, in their order."""
    numbers = range(len(part.layers))
    keys: list[Any] = [draft_key(number) for number in numbers]
    if isinstance(model, Model):
        if len(model.drafts) != len(part.layers):
            expected = f"the {len(model.drafts)} draft layers of {model.name}"
            got = f"{len(part.layers)} layers"
            raise contradiction("SIZE", "read a draft pool of SGLang", expected, got)
        keys = [len(model.layers) + number for number in numbers]
    return part._replace(layers=dict(zip(keys, part.layers.values(), strict=True)))


def _add_block_table(assembly: Assembly, parts: Sequence[PoolPart]) -> None:
    """Add the layers of pools that have a block table in common."""
    page_sizes = {part.pool.page_size for part in parts if part.layers}
    if len(page_sizes) > 1:
        expected = "pages of one size"
        raise contradiction("LAYOUT", "read pools of SGLang", expected, sorted(page_sizes))
    # A stage may have no layer of the pools; then it has no such block table.
    first_layer = next(chain.from_iterable(part.layers for part in parts), None)
    if first_layer is not None:
        assembly.begin_group(first_layer, page_sizes.pop())
    for part in parts:
        for layer, index in part.layers.items():
            _add_layer(assembly, part, layer, index)


def _add_layer(assembly: Assembly, part: PoolPart, layer: Hashable, index: int) -> None:
    """Add the views of one layer, which has an index in the buffers of a pool."""
    pool = part.pool
    for name in ("k_scale_buffer", "kv_scale_buffer"):
        if getattr(pool, name, None) is not None:
            raise contradiction("LAYOUT", READ_POOL, "no buffers of scales", name)
    if hasattr(pool, "layout"):
        _add_host_layer(assembly, pool, layer, index)
        return
    page_size = pool.page_size
    if hasattr(pool, "kv_buffer"):
        latent = assembly.attention(layer, INDEX)
        pattern = "block head content"
        assembly.add(pool.kv_buffer[index], pattern, latent, kernel_blocks=page_size)
        index_keys = getattr(pool, "index_k_with_scale_buffer", None)
        # A layer that reuses the choice of the one before has no keys.
        if index_keys is not None and index_keys[index].shape[0]:
            assembly.add_page(index_keys[index], assembly.index(layer))
        return
    layout = pool.kv_cache_layout
    if layout not in PATTERNS:
        expected = f"one of {', '.join(PATTERNS)}"
        raise contradiction("LAYOUT", READ_POOL, expected, repr(layout))
    has_index_keys = layer in part.index_keys
    tensor = assembly.attention(layer, *([INDEX] if has_index_keys else []))
    # Slots are the first dimension of nhd, pages that of the other layouts.
    kernel_blocks = page_size if layout == "nhd" else 1
    for half, buffers in enumerate((pool.k_buffer, pool.v_buffer)):
        pattern = PATTERNS[layout][half]
        half_tensor = _half(pool, tensor, half)
        assembly.add(buffers[index], pattern, half_tensor, kernel_blocks=kernel_blocks)
    # Index keys have the slots of K and V, and one head.
    if has_index_keys:
        ((keys_tensor,),) = assembly.index(layer).sections
        keys = part.index_keys[layer]
        assembly.add(keys, "block head content", keys_tensor, kernel_blocks=page_size)


def _half(pool: Any, tensor: LocalTensor, half: int) -> LocalTensor:
    """Return K (0) or V (1) of a tensor, whose elements follow each other where they differ."""
    if tensor.has(KV):
        return k_or_v(tensor, half)
    axes = []
    for axis in tensor.axes:
        start, stop = (0, pool.head_dim) if half == 0 else (pool.head_dim, axis.size)
        axes.append(attrs.evolve(axis, start=start, stop=stop) if axis.name == "dim" else axis)
    return attrs.evolve(tensor, axes=tuple(axes))


def _add_host_layer(assembly: Assembly, pool: Any, layer: Hashable, index: int) -> None:
    """Add the views of one layer of a pool in host memory."""
    if pool.layout not in HOST_PATTERNS:
        expected = f"one of {', '.join(HOST_PATTERNS)}"
        action = "read a pool of HiCache"
        raise contradiction("LAYOUT", action, expected, repr(pool.layout))
    names = HOST_PATTERNS[pool.layout].split()
    layer_dim = names.index(LAYER)
    pattern = " ".join(name for name in names if name != LAYER)
    # slots are the blocks of some layouts, pages those of others
    kernel_blocks = 1 if TOKEN in names else pool.page_size
    tensor = assembly.attention(layer)
    # pools of latents know how wide a slot is
    buffers = [(tensor, pool.kv_buffer)]
    if not hasattr(pool, "kv_cache_dim"):
        halves = (pool.k_buffer, pool.v_buffer)
        buffers = [(_half(pool, tensor, half), buffer) for half, buffer in enumerate(halves)]
    for local_tensor, buffer in buffers:
        memory = buffer[(slice(None),) * layer_dim + (index,)]
        assembly.add(memory, pattern, local_tensor, kernel_blocks=kernel_blocks)


def _add_states(assembly: Assembly, pool: Any) -> None:
    """Add the states of a ``MambaPool``: convolutions and SSM states are in separate buffers."""
    buffers = state_buffers(pool)
    dtypes = [buffer.dtype for buffer in buffers]
    for index, layer in enumerate(pool.mamba_layer_ids):
        if index == 0:
            assembly.begin_group(layer, None)
        sections = assembly.pages(layer)[STATE].sections
        # The first two dimensions of a buffer are layers and blocks.
        shapes = [tuple(buffer.shape[2:]) for buffer in buffers]
        if sections[-1][0].axes[0].name == "channel" and len(shapes[-1]) == 3:
            # SGLang keeps Mamba 1's channels as heads of one channel.
            heads, _, size = shapes[-1]
            shapes[-1] = (heads, size)
        order = conv_order(sections, shapes, dtypes)
        for section, buffer in zip(sections, buffers, strict=True):
            assembly.add_page(buffer[index], Page.of(*section), order)
