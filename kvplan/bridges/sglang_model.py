"""What an SGLang rank caches, read off its pools: no model type is needed.

A pool (sglang/srt/mem_cache, 0.5.23) declares the numbers of its layers and what a slot of each
holds *on this rank*. A plan also needs the whole tensor:

=================================  ===============================================================
a pool declares                    the tensor
=================================  ===============================================================
``kv_lora_rank``                   a latent, which every rank has whole
``dsa_kv_cache_store_fp8``         a latent as packed bytes; its indexer's keys are bytes too
several heads in ``head_num``      that many on each of ``tp`` ranks
one head in ``head_num``           1 to ``tp`` heads, each on several ranks: ``kv_heads`` says how
                                   many, since the pool does not
``mamba_layer_ids``                a state: its parts by SGLang's shape of it on a single rank
                                   (:func:`state_layer`), or the rank's part as it is, which moves
                                   between engines with equally many ranks (:func:`rank_state`)
=================================  ===============================================================

Tensors are named by the numbers of their layers in the model, ``layers.3.attn``, and those of a
draft by their order, ``draft.0.attn``, as :class:`~kvplan.Model` names them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import attrs

from kvplan._checks import instance, integer, members
from kvplan._text import brief_repr
from kvplan.bridges.assembly import (
    ObservedModel,
    RankInfo,
    contradiction,
    rank_prefix,
    reads_engine,
    total_heads,
    unknown_states,
)
from kvplan.describe.views import dtype_name
from kvplan.models.model import NamedLayer
from kvplan.models.tensors import (
    FULL,
    SLIDING,
    Layer,
    Tensor,
    attention,
    convolution,
    delta,
    latent,
    lightning,
    mamba1,
    mamba2,
    sparse_latent,
    with_index_keys,
)

READ_POOL: Final = "read a pool of SGLang"


@attrs.frozen(kw_only=True)
class TotalHeads:
    """How many KV heads the layers of each pool have on all ranks together, where that is known."""

    full: int | None = None
    sliding: int | None = None
    draft: int | None = None

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        for count in (self.full, self.sliding, self.draft):
            if count is not None:
                integer(count, "a number of KV heads")


class PoolPart(NamedTuple):
    """A pool, maybe inside another, and the model's layers with their indices in its buffers.

    ``slides`` says that its layers attend to a window, and have a block table of their own.
    ``index_keys`` has the buffers outside the pool in which layers keep index keys of
    ``index_dtype``.
    """

    pool: Any
    layers: Mapping[Any, int]
    slides: bool = False
    index_keys: Mapping[Any, Any] = MappingProxyType({})
    index_dtype: Any = None


OTHER_SCORES: Final = (
    "vLLM's compressors keep scores with the bias of a position added, SGLang's without it"
)
"""Why DeepSeek-V4 would not move between the two engines even if rings were described."""


def pool_parts(pool: Any) -> Iterator[PoolPart]:
    """Yield the pools inside one, each with a block table of its own. Raises ``LAYOUT``."""
    if hasattr(pool, "compression_ratios"):
        expected = "rows whose positions the pages of a request say"
        got = "rows of compressors in rings, by position % size (DeepSeek-V4)"
        raise contradiction("LAYOUT", READ_POOL, expected, got).with_hint(OTHER_SCORES)
    if hasattr(pool, "swa_kv_pool"):
        ring = getattr(pool, "swa_req_ring_size", None)
        if ring is not None:
            got = f"a ring of {ring} for each request"
            raise contradiction("LAYOUT", READ_POOL, "pages of tokens", got)
        # The mapping has the index of each layer, and whether it is one of the sliding pool.
        full_layers: dict[int, int] = {}
        sliding_layers: dict[int, int] = {}
        for layer, (index, slides) in pool.layers_mapping.items():
            layers = sliding_layers if slides else full_layers
            layers[layer] = index
        yield PoolPart(pool.full_kv_pool, full_layers)
        yield PoolPart(pool.swa_kv_pool, sliding_layers, slides=True)
    elif hasattr(pool, "main_pool"):
        # All layers have K and V in one pool; some have index keys in another.
        if pool.index_kv_pool is not None:
            got = "index keys and values"
            raise contradiction("LAYOUT", READ_POOL, "index keys alone", got)
        buffers = {}
        for layer, index in pool.index_k_layer_id_mapping.items():
            buffers[layer] = pool.index_k_pool.k_buffer[index]
        index_dtype = getattr(pool.index_k_pool, "dtype", None)
        layers_in_order = _layers_in_order(pool.main_pool)
        yield PoolPart(pool.main_pool, layers_in_order, False, buffers, index_dtype)
    elif hasattr(pool, "full_kv_pool"):
        yield PoolPart(pool.full_kv_pool, dict(pool.full_attention_layer_id_mapping))
    else:
        yield PoolPart(pool, _layers_in_order(pool))


def _layers_in_order(pool: Any) -> dict[int, int]:
    return {pool.start_layer + index: index for index in range(pool.layer_num)}


def draft_part(draft_pool: Any) -> PoolPart:
    """Return the one pool of a draft, whose layers are numbered from zero or from any number."""
    parts = [part for part in pool_parts(draft_pool) if part.layers]
    if len(parts) != 1:
        got = f"{len(parts)} block tables"
        raise contradiction("LAYOUT", "read a draft pool of SGLang", "one block table", got)
    return parts[0]


def draft_key(number: int) -> str:
    """Return the key of a draft's layer in the model that :func:`sglang_model` returns."""
    return f"draft.{number}"


@reads_engine("SGLang 0.5.23")
def sglang_model(
    model_name: Mapping[str, Any] | str,
    info: RankInfo,
    pool: Any,
    draft_pool: Any = None,
    *,
    kv_heads: TotalHeads = TotalHeads(),
    written: Collection[int] | None = None,
    state: Layer = (),
    dtype: str | None = None,
) -> ObservedModel:
    """Return what an SGLang rank caches, for :func:`~kvplan.bridges.from_sglang`.

    The pools are those that it takes. ``written`` are the layers that attention writes to, since
    layers that share another's cache have buffers too; None: all of the pool. ``state`` has the
    tensors of each layer in the pool of states. ``dtype`` is that of K and V, or of latents, in
    host memory, which does not say how bytes are read; None: the pool says.

    Raises ``LAYOUT`` for a cache that has no description, ``SIZE`` where the number of KV heads is
    not known or contradicts the pool.
    """
    instance(RankInfo, info, "info")
    instance(TotalHeads, kv_heads, "kv_heads")
    state = members(Tensor, state, "state")
    if written is not None:
        written = members(int, written, "written")
    if dtype is not None:
        instance(str, dtype, "dtype")
    layers: dict[Hashable, Layer] = {}
    for part in pool_parts(pool):
        total = kv_heads.sliding if part.slides else kv_heads.full
        for layer, index in part.layers.items():
            if written is None or layer in written:
                layers[layer] = _cached(part, layer, index, info.tp, total, dtype)
    if hasattr(pool, "mamba_pool"):
        for layer in pool.mamba_pool.mamba_layer_ids:
            layers[layer] = (*layers.get(layer, ()), *state)
    named = {layer: NamedLayer(f"layers.{layer}.", tensors) for layer, tensors in layers.items()}
    if draft_pool is not None:
        part = draft_part(draft_pool)
        for number, (layer, index) in enumerate(part.layers.items()):
            tensors = _cached(part, layer, index, info.tp, kv_heads.draft, dtype)
            named[draft_key(number)] = NamedLayer(f"draft.{number}.", tensors)
    return ObservedModel(model_name, MappingProxyType(named))


def _cached(
    part: PoolPart, layer: int, index: int, tp: int, total: int | None, dtype: str | None
) -> Layer:
    """Return what one layer keeps in a pool, which has an index in its buffers."""
    pool = part.pool
    group = SLIDING if part.slides else FULL
    if hasattr(pool, "kv_lora_rank"):
        tensors = _latent(pool, index, group)
    else:
        action = f"read layer {layer} of a pool of SGLang"
        heads = total_heads(action, pool.head_num, tp, total, "set KVPLAN_KV_HEADS")
        tensors = attention(heads, pool.head_dim, group, value_dim=pool.v_head_dim)
    values_dtype = dtype or dtype_name(pool.dtype)
    if layer in part.index_keys:
        keys_dtype = dtype_name(part.index_dtype)
        keys = with_index_keys((), part.index_keys[layer].shape[-1])
        tensors += tuple(attrs.evolve(tensor, dtype=keys_dtype) for tensor in keys)
    return tuple(attrs.evolve(tensor, dtype=tensor.dtype or values_dtype) for tensor in tensors)


def _latent(pool: Any, index: int, group: str) -> Layer:
    """Return the latent of a layer, and its indexer's keys, if it has any."""
    rank, rope = pool.kv_lora_rank, pool.qk_rope_head_dim
    plain = latent(rank, rope, group)
    index_keys = getattr(pool, "index_k_with_scale_buffer", None)
    is_packed = getattr(pool, "dsa_kv_cache_store_fp8", False)
    if index_keys is None and not is_packed:
        return plain
    if getattr(pool, "index_kpool", 1) != 1:
        got = f"one for {pool.index_kpool} tokens"
        raise contradiction("LAYOUT", READ_POOL, "an index key of each token", got)
    packed, *keys = sparse_latent(rank, rope, pool.index_head_dim)
    # A layer that reuses the choice of the one before has no keys.
    has_keys = index_keys is not None and index_keys[index].shape[0] > 0
    tensors = (packed.in_group(group),) if is_packed else plain
    return (*tensors, *keys) if has_keys else tensors


@reads_engine("SGLang 0.5.23")
def sglang_state(
    pool: Any, shape: Any, conv_dtype: Any, ssm_dtype: Any, info: RankInfo, rule: str = ""
) -> Layer:
    """Return the tensors of each layer in a pool of states, for :func:`sglang_model`.

    ``pool`` is a ``MambaPool``, and ``shape`` that of a state on a single rank. Where the shape
    does not say how ranks divide a state (:func:`state_layer`), each rank's part has tensors of its
    own, which move between engines with equally many ranks (:func:`rank_state`).
    """
    instance(RankInfo, info, "info")
    layer = state_layer(shape, conv_dtype, ssm_dtype, rule)
    return rank_state(pool, info) if layer is None else layer


def state_layer(shape: Any, conv_dtype: Any, ssm_dtype: Any, rule: str = "") -> Layer | None:
    """Return the tensors of a state, from the shape that SGLang gives it on a single rank.

    It is a ``Mamba2StateShape`` or ``KimiLinearStateShape`` of sglang/srt/configs/mamba_utils.py.
    Its numbers declare the kind, except one: a convolution may have the x, B and C of Mamba
    (``rule`` "mamba"), or the q, k and v of a delta rule ("delta"), which has them too where the
    shape says how ranks divide it. None: its parts are not known.
    """
    if len(shape.conv) != 1:
        return None
    steps = shape.conv_kernel - 1
    dtypes = (dtype_name(conv_dtype), dtype_name(ssm_dtype))
    heads, dim = shape.num_heads, shape.head_dim
    layer: Layer | None = None
    if hasattr(shape, "num_k_heads"):
        channels = max(shape.conv[0])
        layer = delta(shape.num_k_heads, shape.head_k_dim, heads, dim, steps, *dtypes)
    else:
        channels, size, width = shape.conv_dim, shape.state_size, shape.intermediate_size
        groups = (channels - width) // (2 * size) if size else 0
        if channels == 0:
            return lightning(heads, dim, dtypes[1])
        if size == 0:
            return convolution(channels, steps, dtypes[0])
        if groups == 0:
            layer = mamba1(channels, size, steps, *dtypes) if dim == 1 else None
        elif shape.conv_shard_groups is not None or rule == "delta":
            layer = delta(groups, size, heads, dim, steps, *dtypes)
        elif rule == "mamba":
            layer = mamba2(heads, dim, groups, size, steps, *dtypes)
    if layer is None:
        return None
    widths = [dict(tensor.axes)["channel"] for tensor in layer if tensor.section == "conv"]
    is_right = sum(widths) == channels and shape.conv_shard_groups in (None, widths)
    return layer if is_right else None


def rank_state(pool: Any, info: RankInfo) -> Layer:
    """Return a state that ranks divide in an unknown way.

    ``pool`` is a ``MambaPool``. Each of its buffers is a tensor named after this rank, so it moves
    between equal ranks of equally large engines.
    """
    buffers = state_buffers(pool)
    shapes = [buffer.shape[2:] for buffer in buffers]
    return unknown_states(rank_prefix(info), shapes, [buffer.dtype for buffer in buffers])


def state_buffers(pool: Any) -> list[Any]:
    """Return the buffers of a ``MambaPool``, of layers and blocks: convolutions, then the state.

    A layer without a convolution, or without a state, has a buffer of no bytes.
    """
    buffers = (*pool.mamba_cache.conv, pool.mamba_cache.temporal)
    return [buffer for buffer in buffers if 0 not in buffer.shape[2:]]
