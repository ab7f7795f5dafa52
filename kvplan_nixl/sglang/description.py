"""The description of an SGLang rank, from the engine's own objects.

Most of it is read off the rank's pools (:mod:`kvplan.bridges.sglang_model`). They lack three facts:
which layers write a cache of their own, how many KV heads there are in all where each rank has one,
and the parts of a state. The first is taken from the model that SGLang has built, the others from
``ModelConfig``, which has all overrides.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import attrs
from sglang.srt.runtime_context import get_parallel

from kvplan import KVPlanError, Worker
from kvplan.bridges import RankInfo, TotalHeads, from_sglang, sglang_model, sglang_state
from kvplan.models import Layer
from kvplan_nixl.identity import Facts
from kvplan_nixl.settings import ModelSettings

MODEL: Final = "SGLang's model"
"""What messages call the model before its facts are known."""

DELTA, MAMBA = "delta", "mamba"
"""Kinds of states, by the names of :func:`kvplan.bridges.sglang_state`."""

GROUPS: Final = ("tp", "attn_tp", "attn_cp", "moe_ep")
"""SGLang's groups of ranks whose sizes are checked against those of its configuration."""

SINGLE_RANK: Final = MappingProxyType(
    {
        **{f"{name}_size": 1 for name in (*GROUPS, "attn_dp", "moe_dp", "moe_tp")},
        **{f"{name}_rank": 0 for name in (*GROUPS, "attn_dp")},
        **{f"{name}_group": SimpleNamespace(world_size=1) for name in GROUPS},
    }
)
"""SGLang's parallel context of an engine with a single rank."""


def worker_of(
    facts: Facts,
    info: RankInfo,
    pool: Any,
    draft_pool: Any,
    runner: Any,
    draft_config: Any,
    names: ModelSettings,
) -> Worker:
    """Return the worker of a rank, whose ``runner`` is its ``ModelRunner``."""
    config = runner.model_config
    model = sglang_model(
        MODEL,
        info,
        pool,
        draft_pool,
        kv_heads=kv_heads_of(config, draft_config, names),
        written=written_layers(runner.model),
        state=state_of(config, runner.model, pool, info),
    )
    return attrs.evolve(from_sglang(model, info, pool, draft_pool), model=facts)


def kv_heads_of(config: Any, draft_config: Any, names: ModelSettings) -> TotalHeads:
    """Return how many KV heads there are in all, by ``ModelConfig``, or as the operator says."""
    if names.kv_heads:
        return TotalHeads(full=names.kv_heads, sliding=names.kv_heads, draft=names.kv_heads)
    draft = None if draft_config is None else draft_config.get_total_num_kv_heads()
    return TotalHeads(
        full=config.get_total_num_kv_heads(),
        # those of a single rank
        sliding=config.get_swa_num_kv_heads(1),
        draft=draft,
    )


def written_layers(model: Any) -> set[int] | None:
    """Return the layers whose caches attention writes, None where the model does not say.

    A layer of attention has the number of the cache that it writes, which may be another layer's
    (``RadixAttention`` of sglang/srt/layers/radix_attention.py).
    """
    return {layer.layer_id for layer in _attention_layers(model)} or None


def attended_window(model: Any) -> int | None:
    """Return the positions before a token to which layers with a window attend, None without any.

    SGLang's scheduler has one window for the pool, which may be larger: where a model does not say
    (``get_attention_sliding_window_size``), it is that of ``config.json``, which counts the token.
    """
    sizes = [getattr(layer, "sliding_window_size", -1) for layer in _attention_layers(model)]
    return max((size for size in sizes if size > 0), default=None)


def _attention_layers(model: Any) -> Iterator[Any]:
    """Yield a model's layers of attention, ``RadixAttention``."""
    for module in model.modules():
        if hasattr(module, "layer_id") and hasattr(module, "tp_k_head_num"):
            yield module


def state_of(config: Any, model: Any, pool: Any, info: RankInfo) -> Layer:
    """Return the tensors of the states in a pool: none of a pool without any.

    The whole state is what SGLang would give a single rank. The part of one rank is not enough:
    with one group of Mamba-2 on each rank, the group may be the same on all.
    """
    if not hasattr(pool, "mamba_pool"):
        return ()
    from sglang.srt.configs.hybrid_arch import mambaish_config

    with get_parallel().override(**SINGLE_RANK):
        shape = mambaish_config(config).mamba2_cache_params.shape
    cache = pool.mamba_pool.mamba_cache
    dtypes = (cache.conv[0].dtype, cache.temporal.dtype)
    return sglang_state(pool.mamba_pool, shape, *dtypes, info, _rule_of(model))


def _rule_of(model: Any) -> str:
    """Return the kind of a model's states that its layers declare."""
    for module in model.modules():
        if hasattr(module, "head_k_dim") and hasattr(module, "num_v_heads"):
            return DELTA
        if hasattr(module, "ssm_state_size"):
            return MAMBA
    return ""


def dtype_name(dtype: Any) -> str | None:
    """Return the name of a dtype of torch, None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def require(field: str, expected: Any, got: Any) -> None:
    """Refuse an engine whose ``field`` has another value than the plugin serves."""
    if got != expected:
        raise KVPlanError(
            "LAYOUT",
            "serve this SGLang by kvplan",
            expected=f"{field} = {expected}",
            got=f"{got}",
            **{field: got},
        )
