"""The Worker of a vLLM rank, from its ``KVCacheConfig`` and the tensors that a connector registers.

As in vLLM 0.33: ``KVCacheTensor``, ``create_kv_cache_views`` (vllm/v1/kv_cache_interface.py), ``allocate_kv_cache``
(vllm/v1/worker/utils.py), ``extract_layer_index`` (vllm/model_executor/models/utils.py), ``bind_kv_cache``
(vllm/model_executor/layers/mamba/abstract.py), and for K and V vllm/v1/attention/backends/flash_attn.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplan.bridges.assembly import Assembly, RankInfo, conv_order, differ
from kvplan.describe.worker import Worker
from kvplan.models.model import Model
from kvplan.models.tensors import STATE


def from_vllm(model: Model, info: RankInfo, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> Worker:
    """The worker of a vLLM rank, from its ``KVCacheConfig`` and its caches by layer name.

    ``kv_caches`` is the argument of a connector's ``register_kv_caches``. Each cache is
    ``[block, head, slot, content]`` with the strides of one of the six layouts. Its blocks may be kernel blocks.
    Content is K, then V. The cache of a state layer is the bytes of its states; that of an indexer is its keys, then
    their scales, as on CUDA. Groups without KV transfer are left out, and so are layers that use another's cache.

    Raises ``NAME`` for a layer that has no cache, or not exactly one number in its name; ``SIZE`` for kernel blocks
    that make up no whole number of blocks; ``BOUNDS`` if the caches do not lie in one allocation as the config says.

    >>> import numpy as np
    >>> from types import SimpleNamespace as Config
    >>> from kvplan import Model
    >>> from kvplan.bridges import RankInfo, from_vllm
    >>> names = [f"model.layers.{i}.self_attn.attn" for i in range(28)]
    >>> memory = np.zeros((28, 100, 16, 4, 256), np.float16)  # layer, block, slot, 4 of 8 heads, K and V
    >>> placed = Config(size=memory.nbytes, layers=names, offset=0, layer_stride=3276800, block_stride=32768)
    >>> group = Config(layer_names=names, kv_cache_spec=Config(block_size=16))
    >>> config = Config(kv_cache_tensors=[placed], kv_cache_groups=[group])
    >>> caches = dict(zip(names, memory.transpose(0, 1, 3, 2, 4)))
    >>> model = Model.shipped("qwen3-0.6b").with_dtypes("float16")
    >>> worker = from_vllm(model, RankInfo("prefill", rank=1, tp_rank=1, tp=2), config, caches)
    >>> print(worker.views[27].name, *worker.views[27].axes[:2], sep="; ")
    layers.27.attn; head [4, 8) of 8 stride 512; token [0, 16) of 16 stride 2048
    """
    assembly = Assembly(model, info)
    placed = {name: (tensor, i) for tensor in kv_cache_config.kv_cache_tensors for i, name in enumerate(tensor.layers)}
    for group in kv_cache_config.kv_cache_groups:
        names = [name for name in group.layer_names if name in placed]
        if not names or not getattr(group, "enable_kv_transfer", True):
            continue
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        spec = specs.get(names[0], group.kv_cache_spec)
        tokens = None if hasattr(spec, "shapes") else spec.block_size
        assembly.begin_group(_number(names[0]), tokens, spread=getattr(spec, "dcp_sharded", True))
        for name in names:
            if name not in kv_caches:
                raise differ("NAME", "place a layer of vLLM", "a cache for each", f"none for {name!r}")
            _add_layer(assembly, name, kv_caches[name], specs.get(name, group.kv_cache_spec), *placed[name])
    return assembly.finish()


def _add_layer(assembly: Assembly, name: str, cache: Any, spec: Any, tensor: Any, index: int) -> None:
    """Adds the views of one layer, whose cache is number ``index`` of a ``KVCacheTensor``."""
    layer, first = _number(name), len(assembly.views)
    if hasattr(spec, "shapes"):
        page = assembly.pages(layer)[STATE]
        assembly.add_page(cache, page, conv_order(page.sections, spec.shapes, spec.dtypes))
    elif getattr(getattr(spec, "cache_role", None), "value", "") == "indexer":
        assembly.add_page(cache, assembly.index(layer))
    else:
        join, rest = divmod(spec.block_size, cache.shape[2])
        if rest:
            got = f"{cache.shape[2]} in a kernel block"
            raise differ("SIZE", f"join the kernel blocks of {name!r}", f"a divisor of {spec.block_size} tokens", got)
        assembly.add(cache, "block head token content", assembly.attention(layer, "index"), join=join)
    (device, view), what = assembly.views[first], f"place the cache of {name!r}"
    if view.block_stride_bytes != tensor.block_stride:
        raise differ("STRIDE", what, f"blocks {tensor.block_stride} bytes apart", view.block_stride_bytes)
    start = view.offset_bytes - tensor.offset - index * tensor.layer_stride
    assembly.allocations.add((device, start, start + tensor.size))
    known = sorted(allocation for allocation in assembly.allocations if allocation[0] == device)
    if len(known) > 1:
        places = [f"{start:#x} to {stop:#x}" for _, start, stop in known]
        raise differ("BOUNDS", what, f"one allocation, {places[0]}", f"another, {places[1]}")
    end = max(view.end_bytes for _, view in assembly.views[first:])
    if end > start + tensor.size:
        raise differ("BOUNDS", what, f"bytes below {start + tensor.size:#x}", f"{end:#x}")


def _number(name: str) -> int:
    """The one number in vLLM's name of a layer."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise differ("NAME", f"read the layer name {name!r}", "one number", f"{len(numbers)}")
    return numbers[0]
