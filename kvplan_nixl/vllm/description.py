"""Descriptions of a vLLM engine, from its configuration and its caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import (
    get_dcp_group,
    get_pcp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvplan import Context, KVPlanError, Model, Worker
from kvplan.bridges import RankInfo, from_vllm
from kvplan.bridges.assembly import FP8_DTYPES
from kvplan.bridges.vllm import shared_attention
from kvplan.describe.blocks import POSITION_END
from kvplan_nixl.vllm.drafts import with_drafts
from kvplan_nixl.vllm.settings import ModelSettings
from kvplan_nixl.weights import weights_of


def specs_of(group: Any) -> list[Any]:
    """Return the specs of a cache group: one, unless its layers differ."""
    spec = group.kv_cache_spec
    return [*getattr(spec, "kv_cache_specs", {}).values()] or [spec]


def is_state(group: Any) -> bool:
    """Return whether a cache group has recurrent states."""
    return isinstance(specs_of(group)[0], MambaSpec)


SPEC_KINDS: Final = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
)
"""Specs of caches whose blocks hold positions, or states, in the order of a request.

vLLM's other specs derive from these, and keep something else in some blocks."""


def check_kinds(cache: KVCacheConfig) -> None:
    """Refuse caches whose blocks are used in another way than those of :data:`SPEC_KINDS`.

    Raises ``LAYOUT``.
    """
    for group in cache.transfer_groups:
        for spec in specs_of(group):
            got = type(spec).__name__
            if type(spec) not in SPEC_KINDS:
                expected = " or ".join(kind.__name__ for kind in SPEC_KINDS)
                raise KVPlanError("LAYOUT", "transfer a cache of vLLM", expected=expected, got=got)
            if not isinstance(spec, MambaSpec) and spec.tokens_per_state != 1:
                expected = "one value for each token"
                got = f"one for {spec.tokens_per_state} tokens in {got}"
                raise KVPlanError("LAYOUT", "transfer a cache of vLLM", expected=expected, got=got)


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


def frees_blocks(group: Any) -> bool:
    """Return whether vLLM frees blocks of a running request.

    They are those that no later token attends to, and old states.
    """
    return is_state(group) or first_attended(group, POSITION_END) > 0


def tokens_per_table_block(group: Any, config: VllmConfig) -> int:
    """Return the positions that a block of a request's table has in all ranks together.

    Under decode context parallelism a rank has as many of them as its own blocks have slots.
    """
    spec = group.kv_cache_spec
    num_ranks = config.parallel_config.decode_context_parallel_size if spec.dcp_sharded else 1
    return int(spec.block_size) * num_ranks


def groups_of(config: KVCacheConfig) -> dict[str, int]:
    """Return the indices of the cache groups that are transferred, by name.

    A group has the same name in all workers.
    """
    return {f"group{index}": index for index in config.transfer_group_ids}


def model_of(config: VllmConfig, cache: KVCacheConfig, settings: ModelSettings) -> Model:
    """Return the model as both engines must name it: with its weights, and the cache's dtypes."""
    name = settings.model or config.model_config.model
    weights = settings.weights or weights_of(
        config.model_config.model, config.model_config.revision
    )
    model = Model.from_config(config.model_config.hf_config.to_dict(), f"{name}, weights {weights}")
    model = with_drafts(model, config, settings)
    attention_dtypes = set()
    state_dtypes = set()
    for group in cache.transfer_groups:
        for spec in specs_of(group):
            if hasattr(spec, "dtype"):
                attention_dtypes.add(_dtype_name(spec.dtype))
            if isinstance(spec, MambaSpec):
                state_dtypes.add(_dtype_name(spec.dtypes[-1]))
    # vLLM stores fp8 as bytes, of which its configuration has the dtype.
    attention_dtypes.discard("uint8")
    cache_dtype = config.cache_config.cache_dtype
    if not attention_dtypes and cache_dtype in FP8_DTYPES:
        attention_dtypes.add(FP8_DTYPES[cache_dtype])
    return model.with_dtypes(_only(attention_dtypes), _only(state_dtypes))


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _only(dtypes: set[str]) -> str | None:
    """Return the one dtype of a set, None if there is no such one."""
    return next(iter(dtypes)) if len(dtypes) == 1 else None


def rank_info(config: VllmConfig) -> RankInfo:
    """Return the place of this process in its engine, of vLLM's ranks in their order.

    Ranks of prefill context parallelism hold equal caches, unless decode context parallelism
    divides the positions among them: ``initialize_model_parallel`` in
    vllm/distributed/parallel_state.py.
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
    """Return the worker of this process. Its groups have the names of :func:`groups_of`."""
    layers = config.compilation_config.static_forward_context
    hf_config = config.model_config.hf_config
    # Zamba2's attending layers take turns in a few blocks of weights.
    num_shared = getattr(hf_config, "num_mem_blocks", None)
    attending = num_shared and shared_attention(hf_config.hybrid_layer_ids, num_shared)
    model = model_of(config, cache, settings)
    info = rank_info(config)
    worker = from_vllm(model, info, cache, kv_caches, layers, attending=attending)
    new_names = dict(zip((group.name for group in worker.groups), _held(cache), strict=True))
    groups = [attrs.evolve(group, name=new_names[group.name]) for group in worker.groups]
    views = [attrs.evolve(view, group=new_names[view.group]) for view in worker.views]
    return attrs.evolve(worker, groups=groups, views=views)


def _held(cache: KVCacheConfig) -> list[str]:
    """Return the names of the groups of which a rank has layers: a pipeline stage lacks some."""
    layers_held = set()
    for tensor in cache.kv_cache_tensors:
        layers_held.update(tensor.layers)
    held = []
    for name, index in groups_of(cache).items():
        if not layers_held.isdisjoint(cache.kv_cache_groups[index].layer_names):
            held.append(name)
    return held
