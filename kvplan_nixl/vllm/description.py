"""Descriptions of a vLLM engine, from its configuration and its caches."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import (
    get_dcp_group,
    get_pcp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
)

from kvplan import Context, KVPlanError, Worker
from kvplan.bridges import (
    KvHeads,
    RankInfo,
    from_vllm,
    holds_state,
    vllm_group_names,
    vllm_model,
)
from kvplan.describe import POSITION_END
from kvplan.protocol import keeping
from kvplan_nixl.settings import ModelSettings


def specs_of(group: Any) -> list[Any]:
    """Return the specs of a cache group: one, unless its layers differ."""
    spec = group.kv_cache_spec
    return [*getattr(spec, "kv_cache_specs", {}).values()] or [spec]


def is_state(group: Any) -> bool:
    """Return whether a block of a cache group is a state of one request: recurrent, or a ring."""
    return holds_state(specs_of(group)[0])


POSITIONED: Final = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Specs of caches whose blocks hold a request's positions in order, and all derived from them.

vLLM chooses by these classes which blocks a request keeps. Derived specs fit: blocks of a sink
belong to no request, since each layer fills them from its weights, and R-SWA frees blocks of
decoded tokens, never of a prompt. Cross attention does not: its positions are an encoder's."""


def check_kinds(cache: KVCacheConfig) -> None:
    """Refuse caches whose blocks hold neither positions of a request nor its state.

    Raises ``LAYOUT``.
    """
    action = "transfer a cache of vLLM"
    for group in cache.transfer_groups:
        for spec in specs_of(group):
            if not (is_state(group) or isinstance(spec, POSITIONED)):
                kinds = " or ".join(kind.__name__ for kind in (*POSITIONED, MambaSpec))
                expected = f"{kinds}, or one derived from them, or a ring"
                got = type(spec).__name__
                raise KVPlanError("LAYOUT", action, expected=expected, got=got)
        if getattr(group, "host_resident", False):
            expected = "blocks on the device"
            got = "a group whose blocks are on the host (HiSparse)"
            hint = "kvplan does not know which ids of that pool are blocks of a request"
            raise KVPlanError("LAYOUT", action, expected=expected, got=got, hint=hint)


def first_attended(group: Any, position: int) -> int:
    """Return the first position that the token at ``position`` or a later one attends to.

    It is that of a cache group. vLLM frees the blocks before it: ``get_num_skipped_tokens`` in
    vllm/v1/core/single_type_kv_cache_manager.py.
    """
    return min(_first_attended(spec, position) for spec in specs_of(group))


def _first_attended(spec: Any, position: int) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - int(spec.sliding_window) + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position - position % int(spec.attention_chunk_size)
    return 0


def windows_of(cache: KVCacheConfig) -> dict[str, int]:
    """Return how many positions a group keeps at least before the next one, if it frees others."""
    windows = {}
    for name, index in groups_of(cache).items():
        group = cache.kv_cache_groups[index]
        if not is_state(group) and frees_blocks(group):
            windows[name] = max(_fewest_kept(spec) for spec in specs_of(group))
    return windows


def _fewest_kept(spec: Any) -> int:
    # where a chunk ends, the next token attends to none before it
    is_chunked = isinstance(spec, ChunkedLocalAttentionSpec)
    return 0 if is_chunked else POSITION_END - _first_attended(spec, POSITION_END)


def frees_blocks(group: Any) -> bool:
    """Return whether vLLM frees blocks of a running request: old states, or a window's past."""
    return is_state(group) or first_attended(group, POSITION_END) > 0


def tokens_per_table_block(group: Any, config: VllmConfig) -> int:
    """Return the positions that a block of a request's table has in all ranks together.

    Under decode context parallelism each rank has an equal part of them.
    """
    spec = group.kv_cache_spec
    num_ranks = config.parallel_config.decode_context_parallel_size if spec.dcp_sharded else 1
    return int(spec.block_size) * num_ranks


def groups_of(config: KVCacheConfig) -> dict[str, int]:
    """Return the indices of the cache groups that are transferred, by kvplan's names of them.

    Names are the same in all workers. A group whose layers have values for several numbers of
    tokens has a name for each number.
    """
    groups = {}
    for index in config.transfer_group_ids:
        for spec in specs_of(config.kv_cache_groups[index]):
            groups.update(dict.fromkeys(vllm_group_names(index, spec), index))
    return groups


def kv_heads_of(config: VllmConfig, settings: ModelSettings) -> KvHeads:
    """Return how many KV heads layers have on all ranks together.

    A spec has the heads of its rank; where that is one, several ranks may have the same head. There
    are three sources, in this order: the setting ``kv_heads``; the projection of K and V in the
    module around the layer, which knows all heads (``QKVParallelLinear`` of
    vllm/model_executor/layers/linear.py); vLLM's effective configuration
    (vllm/config/model_arch.py), which for some models has one number although layers differ.
    """
    layers = config.compilation_config.static_forward_context
    speculative: Any = config.speculative_config
    projected = _projected_heads(layers) if config.parallel_config.tensor_parallel_size > 1 else {}

    def kv_heads(name: str, number: int | None, is_draft: bool) -> int | None:
        if settings.kv_heads or name in projected:
            return int(settings.kv_heads) or projected[name]
        model = speculative.draft_model_config if is_draft else config.model_config
        architecture = model.model_arch_config
        if number is not None and number < architecture.total_num_hidden_layers:
            architecture = architecture[number]
        return int(architecture.total_num_kv_heads)

    return kv_heads


def _projected_heads(layers: Mapping[str, Any]) -> dict[str, int]:
    """Return the KV heads of layers by the projection in the module around each.

    vLLM does not give connectors its model, so its modules are found among all objects.
    """
    names = {id(layer): name for name, layer in layers.items()}
    heads = {}
    for module in gc.get_objects():
        # isinstance would ask proxies for a class, which may run their code
        if not issubclass(type(module), torch.nn.Module):
            continue
        children = [*module.__dict__.get("_modules", {}).values()]
        held = [names[id(child)] for child in children if id(child) in names]
        totals = {
            part.total_num_kv_heads
            for child in (children if held else ())
            if child is not None
            for part in child.modules()
            if isinstance(part, QKVParallelLinear)
        }
        if len(totals) == 1:
            heads.update(dict.fromkeys(held, totals.pop()))
    return heads


def rank_info(config: VllmConfig) -> RankInfo:
    """Return which rank of its engine this process is, and which positions it has.

    Ranks of prefill context parallelism hold equal caches, unless decode context parallelism
    divides the positions among them (``initialize_model_parallel`` in
    vllm/distributed/parallel_state.py).
    """
    transfer = config.kv_transfer_config
    assert transfer is not None
    assert transfer.engine_id is not None
    parallel = config.parallel_config
    tp = parallel.tensor_parallel_size
    tp_rank = get_tensor_model_parallel_rank()
    pcp = parallel.prefill_context_parallel_size
    tp_group = get_pp_group().rank_in_group * pcp + get_pcp_group().rank_in_group
    rank = tp_group * tp + tp_rank
    # The ranks of a group take turns, as in vLLM's slot mapping (vllm/v1/worker/block_table.py).
    context = Context(
        get_dcp_group().rank_in_group,
        parallel.decode_context_parallel_size,
        parallel.cp_kv_cache_interleave_size,
    )
    return RankInfo(transfer.engine_id, rank, tp_rank, tp, context)


def worker_of(
    config: VllmConfig,
    cache: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    settings: ModelSettings,
) -> Worker:
    """Return the worker of this process, with the groups of :func:`groups_of`.

    Connectors replace its model by the identity of their engine (:mod:`kvplan_nixl.vllm.identity`).
    """
    layers = config.compilation_config.static_forward_context
    info = rank_info(config)
    model = vllm_model(
        config.model_config.model,
        info,
        cache,
        layers,
        kv_heads=kv_heads_of(config, settings),
        num_layers=_num_layers(config),
        conv=get_conv_state_layout(),
        tiled_keys=current_platform.is_rocm(),
    )
    worker = from_vllm(model, info, cache, kv_caches, layers)
    return keeping(worker, windows_of(cache))


def _num_layers(config: VllmConfig) -> int | None:
    """Return the number of the first layer of a draft, None without drafts."""
    if config.speculative_config is None:
        return None
    return int(config.model_config.get_total_num_hidden_layers())
