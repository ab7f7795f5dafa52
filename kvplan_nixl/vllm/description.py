"""What kvplan has to know of a vLLM engine, from its configuration and its caches."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, SlidingWindowSpec

from kvplan import Model, Worker
from kvplan.bridges import RankInfo, from_vllm

BYTES: Final = MappingProxyType({"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"})
"""What the bytes of a cache without a dtype are, by vLLM's name of its dtype."""


def specs_of(group: Any) -> list[Any]:
    """The specs of a cache group, one unless its layers differ."""
    spec = group.kv_cache_spec
    return [*getattr(spec, "kv_cache_specs", {}).values()] or [spec]


def is_state(group: Any) -> bool:
    """Whether a cache group has recurrent states."""
    return isinstance(specs_of(group)[0], MambaSpec)


def window_of(group: Any) -> int | None:
    """How many tokens back the layers of a cache group attend where vLLM frees the blocks before; None: all stay."""
    specs = specs_of(group)
    if not all(isinstance(spec, SlidingWindowSpec) for spec in specs):
        return None
    return max(int(spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)) for spec in specs)


def groups_of(config: KVCacheConfig) -> dict[str, int]:
    """The cache groups that are transferred: the index of each by its name, which is equal in all workers."""
    return {f"group{i}": i for i in config.transfer_group_ids}


def model_of(config: VllmConfig, cache: KVCacheConfig) -> Model:
    """The model under the name that both engines must have for it, with the dtypes that the engine caches it in."""
    assert config.kv_transfer_config is not None
    named = config.model_config
    name = named.model if named.revision is None else f"{named.model}@{named.revision}"
    name = config.kv_transfer_config.get_from_extra_config("model", name)
    model = Model.from_config(named.hf_config.to_dict(), name)
    specs = [spec for group in cache.transfer_groups for spec in specs_of(group)]
    attention = {str(spec.dtype).removeprefix("torch.") for spec in specs if hasattr(spec, "dtype")} - {"uint8"}
    if not attention:
        attention = {dtype for name, dtype in BYTES.items() if name == config.cache_config.cache_dtype}
    states = {str(spec.dtypes[-1]).removeprefix("torch.") for spec in specs if isinstance(spec, MambaSpec)}
    return model.with_dtypes(*(each.pop() if len(each) == 1 else None for each in (attention, states)))


def worker_of(
    config: VllmConfig, cache: KVCacheConfig, info: RankInfo, kv_caches: Mapping[str, torch.Tensor]
) -> Worker:
    """The worker of a rank. Its groups have the names of :func:`groups_of`."""
    layers = config.compilation_config.static_forward_context
    worker = from_vllm(model_of(config, cache), info, cache, kv_caches, layers)
    placed = {layer for tensor in cache.kv_cache_tensors for layer in tensor.layers}
    there = [name for name, i in groups_of(cache).items() if placed.intersection(cache.kv_cache_groups[i].layer_names)]
    renamed = dict(zip((group.name for group in worker.groups), there, strict=True))
    return attrs.evolve(
        worker,
        groups=[attrs.evolve(group, name=renamed[group.name]) for group in worker.groups],
        views=[attrs.evolve(view, group=renamed[view.group]) for view in worker.views],
    )
