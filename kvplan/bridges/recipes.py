"""Recipes: Workers from what engines have allocated.

An engine's own objects know addresses, shapes and strides, and which layers share a block table. The model knows which
tensors a layer keeps, a :class:`kvplan.bridges.assembly.Seat` which part of them is this worker's. Recipes read the
objects by their attributes and import no engine, so one that has the same attributes will do. Objects that contradict
the model, or each other, are refused with both values.

The worker has a group for each block table of the engine, in the engine's order, named after the group that the model
gives its first layer: ``attn``, ``swa``, ``state``, and ``swa.1`` for a second of one kind. Its regions are the
engine's allocations where the objects know them, else what its tensors span. What an engine keeps as plain bytes, as
vLLM and SGLang keep fp8, has the dtype of the model. Layers numbered behind the model's own are its draft layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan.bridges.assembly import Assembly, Seat, conv_order, differ
from kvplan.describe.worker import Worker
from kvplan.models.layouts import KV, Page
from kvplan.models.model import Model
from kvplan.models.tensors import STATE

SGLANG: Final = MappingProxyType(
    {
        "nhd": ("block head content",) * 2,
        "hnd": ("block head token content",) * 2,
        "vectorized_5d": ("block head dim token dim", "block head token dim token"),
    }
)
"""Dimensions of SGLang's K and V buffers, by ``kv_cache_layout``."""

TENSORRT_LLM: Final = MappingProxyType({"NHD": "block kv token head content", "HND": "block kv head token content"})
"""Dimensions of TensorRT-LLM's buffers, by the ``kv_layout`` of its attention backend."""


def from_vllm(model: Model, seat: Seat, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> Worker:
    """The worker of a vLLM rank, from its ``KVCacheConfig`` and its caches by layer name.

    ``kv_caches`` is what ``register_kv_caches`` of a connector is given. Each cache is ``[block, head, slot, content]``
    with the strides of one of the six layouts, so that nothing else need say which; its blocks may be kernel blocks.
    Content is K, then V. The cache of a state layer is the bytes of its states, that of an indexer its keys and then
    their scales, as CUDA has them. Groups that take no part in transfers are left out, and so are layers that use the
    cache of another. Raises ``NAME`` for a layer that has no cache, or no single number in its name, and ``BOUNDS``
    where caches do not lie in one allocation as the config says.

    As in vLLM 0.33: ``KVCacheTensor``, ``create_kv_cache_views`` (vllm/v1/kv_cache_interface.py), ``allocate_kv_cache``
    (vllm/v1/worker/utils.py), ``extract_layer_index`` (vllm/model_executor/models/utils.py), ``bind_kv_cache``
    (vllm/model_executor/layers/mamba/abstract.py), and for K and V vllm/v1/attention/backends/flash_attn.py.

    >>> import numpy as np
    >>> from types import SimpleNamespace as Config
    >>> from kvplan import Model
    >>> from kvplan.bridges import Seat, from_vllm
    >>> names = [f"model.layers.{i}.self_attn.attn" for i in range(28)]
    >>> memory = np.zeros((28, 100, 16, 4, 256), np.float16)  # in LBNHC, heads inside slots: 4 of 8, with K and V
    >>> placed = Config(size=memory.nbytes, layers=names, offset=0, layer_stride=3276800, block_stride=32768)
    >>> group = Config(layer_names=names, kv_cache_spec=Config(block_size=16))
    >>> config = Config(kv_cache_tensors=[placed], kv_cache_groups=[group])
    >>> caches = dict(zip(names, memory.transpose(0, 1, 3, 2, 4)))
    >>> model = Model.shipped("qwen3-0.6b").with_dtypes("float16")
    >>> worker = from_vllm(model, Seat("prefill", rank=1, tp_rank=1, tp=2), config, caches)
    >>> print(worker.views[27].name, *worker.views[27].axes[:2], sep="; ")
    layers.27.attn; head [4, 8) of 8 step 512; token [0, 16) of 16 step 2048
    """
    made = Assembly(model, seat)
    placed = {name: (tensor, i) for tensor in kv_cache_config.kv_cache_tensors for i, name in enumerate(tensor.layers)}
    for group in kv_cache_config.kv_cache_groups:
        names = [name for name in group.layer_names if name in placed]
        if not names or not getattr(group, "enable_kv_transfer", True):
            continue
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        spec = specs.get(names[0], group.kv_cache_spec)
        tokens = None if hasattr(spec, "shapes") else spec.block_size
        made.table(_number(names[0]), tokens, spread=getattr(spec, "dcp_sharded", True))
        for name in names:
            if name not in kv_caches:
                raise differ("NAME", "place a layer of vLLM", "a cache for each", f"none for {name!r}")
            _vllm_layer(made, name, kv_caches[name], specs.get(name, group.kv_cache_spec), *placed[name])
    return made.finish()


def _vllm_layer(made: Assembly, name: str, cache: Any, spec: Any, tensor: Any, index: int) -> None:
    """One layer, whose cache lies at ``index`` of a ``KVCacheTensor``."""
    layer, first = _number(name), len(made.views)
    if hasattr(spec, "shapes"):
        page = made.pages(layer)[STATE]
        made.put_page(cache, page, conv_order(page.strips, spec.shapes, spec.dtypes))
    elif getattr(getattr(spec, "cache_role", None), "value", "") == "indexer":
        made.put_page(cache, made.index(layer))
    else:
        join = max(1, spec.block_size // cache.shape[2])
        made.put(cache, "block head token content", made.attention(layer, "index"), join=join)
    (device, view), what = made.views[first], f"place the cache of {name!r}"
    if view.block_stride_bytes != tensor.block_stride:
        raise differ("STRIDE", what, f"blocks {tensor.block_stride} bytes apart", view.block_stride_bytes)
    start = view.offset_bytes - tensor.offset - index * tensor.layer_stride
    allocation = device, start, start + tensor.size
    made.allocations.add(allocation)
    known = sorted(one for one in made.allocations if one[0] == device)
    if len(known) > 1:
        places = [f"{start:#x} to {stop:#x}" for _, start, stop in known]
        raise differ("BOUNDS", what, f"one allocation, {places[0]}", f"another, {places[1]}")
    end = max(view.end_bytes for _, view in made.views[first:])
    if end > start + tensor.size:
        raise differ("BOUNDS", what, f"bytes below {start + tensor.size:#x}", f"{end:#x}")


def _number(name: str) -> int:
    """The one number in the name of a layer of vLLM."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise differ("NAME", f"read the layer name {name!r}", "one number", f"{len(numbers)}")
    return numbers[0]


def from_sglang(model: Model, seat: Seat, pool: Any) -> Worker:
    """The worker of an SGLang rank, from its ``token_to_kv_pool``.

    That is an ``MHATokenToKVPool`` (in the layout ``nhd``, ``hnd`` or ``vectorized_5d``), ``MLATokenToKVPool`` or
    ``DSATokenToKVPool``; a ``SWAKVPool`` of two of them; or a ``HybridLinearKVPool`` of one and a ``MambaPool``. Blocks
    are pages: ``slot // page_size`` for the slot of a token, which in a sliding pool is another. The first page, and
    slot 0 of states, hold no request's data. Index keys are as CUDA has them, before their scales. Raises ``LAYOUT``
    for other layouts, for scales in buffers of their own, and for a window kept as a ring for each request.

    As in SGLang 0.5.23: sglang/srt/mem_cache/memory_pool.py, swa_memory_pool.py and index_key_cache.py.

    >>> import numpy as np
    >>> from types import SimpleNamespace as Pool
    >>> from kvplan import Model
    >>> from kvplan.bridges import Seat, from_sglang
    >>> k, v = np.zeros((2, 28, 640 + 16, 4, 128), np.float16)  # slots, of which one page is padding; 4 heads of 8
    >>> pool = Pool(page_size=16, start_layer=0, layer_num=28, kv_cache_layout="nhd", k_buffer=k, v_buffer=v)
    >>> model = Model.shipped("qwen3-0.6b").with_dtypes("float16")
    >>> worker = from_sglang(model, Seat("decode", tp_rank=1, tp=2), pool)
    >>> print(worker)
    decode/0: 56 views of 28 tensors in 56 regions, 1 group
    >>> print(*worker.views[1].axes, sep="; ")
    token [0, 16) of 16 step 1024; head [4, 8) of 8 step 256; kv [1, 2) of 2 step 0; dim [0, 128) of 128 step 2
    """
    made = Assembly(model, seat)
    for part, layers in _sglang_parts(pool):
        for number, (layer, index) in enumerate(layers.items()):
            if not number:
                made.table(layer, part.page_size)
            _sglang_layer(made, part, layer, index)
    if hasattr(pool, "mamba_pool"):
        _sglang_states(made, pool.mamba_pool)
    return made.finish()


def _sglang_parts(pool: Any) -> Iterator[tuple[Any, dict[int, int]]]:
    """The pools that one consists of, with the place in its buffers of each layer of the model."""
    if hasattr(pool, "swa_kv_pool"):
        ring = getattr(pool, "swa_req_ring_size", None)
        if ring is not None:
            raise differ("LAYOUT", "read a pool of SGLang", "pages of tokens", f"a ring of {ring} for each request")
        for part, sliding in ((pool.full_kv_pool, False), (pool.swa_kv_pool, True)):
            yield part, {layer: at for layer, (at, is_swa) in pool.layers_mapping.items() if is_swa == sliding}
    elif hasattr(pool, "full_kv_pool"):
        yield pool.full_kv_pool, dict(pool.full_attention_layer_id_mapping)
    else:
        yield pool, {pool.start_layer + i: i for i in range(pool.layer_num)}


def _sglang_layer(made: Assembly, pool: Any, layer: int, index: int) -> None:
    for name in ("k_scale_buffer", "kv_scale_buffer"):
        if getattr(pool, name, None) is not None:
            raise differ("LAYOUT", "read a pool of SGLang", "no buffers of scales", name)
    if hasattr(pool, "kv_buffer"):
        made.put(pool.kv_buffer[index], "block head content", made.attention(layer, "index"), join=pool.page_size)
        keys = getattr(pool, "index_k_with_scale_buffer", None)
        if keys is not None and keys[index].shape[0]:  # none where a layer uses what the one before has picked
            made.put_page(keys[index], made.index(layer))
        return
    if pool.kv_cache_layout not in SGLANG:
        raise differ("LAYOUT", "read a pool of SGLang", f"one of {', '.join(SGLANG)}", repr(pool.kv_cache_layout))
    held, join = made.attention(layer), pool.page_size if pool.kv_cache_layout == "nhd" else 1
    for half, buffers in enumerate((pool.k_buffer, pool.v_buffer)):
        axes = (attrs.evolve(axis, start=half, stop=half + 1) if axis.name == KV else axis for axis in held.axes)
        made.put(buffers[index], SGLANG[pool.kv_cache_layout][half], attrs.evolve(held, axes=tuple(axes)), join=join)


def _sglang_states(made: Assembly, pool: Any) -> None:
    """The states of a ``MambaPool``, of which a convolution's and an SSM's lie apart."""
    for index, layer in enumerate(pool.mamba_layer_ids):
        if not index:
            made.table(layer, None)
        strips, states = made.pages(layer)[STATE].strips, [*pool.mamba_cache.conv, pool.mamba_cache.temporal]
        order = conv_order(strips, [state.shape[2:] for state in states], [state.dtype for state in states])
        for strip, state in zip(strips, states, strict=True):
            made.put_page(state[index], Page(strip[0].name, (strip,)), order)


def from_tensorrt_llm(model: Model, seat: Seat, kv_cache_manager: Any, kv_layout: str) -> Worker:
    """The worker of a TensorRT-LLM rank, from the ``KVCacheManager`` of its PyTorch backend.

    Its pools are ``[block, layer, kv, values of a block]``; what the values of K and of V are is up to the attention
    backend, which ``kv_layout`` says: ``HND``, heads outside slots, or ``NHD``. There is a block table for each
    attention window. Ids are those of ``get_batch_cache_indices``, as long as no block has been to the host's pool and
    back, after which an id and a place in the pool may differ. Raises ``LAYOUT`` for any other ``kv_layout`` and for
    layers that keep more than K and V or a latent. The buffers that ``KVCacheManagerV2`` gives for several layers of
    one pool overlap, and are refused.

    As in TensorRT-LLM: ``get_buffers`` and ``get_batch_cache_indices`` (tensorrt_llm/_torch/pyexecutor/\
resource_manager.py at commit 001541b), ``swapMemoryPoolBlockOffset`` (cpp/tensorrt_llm/batch_manager/\
kvCacheManager.cpp at commit 002ba6a).

    >>> import numpy as np
    >>> from kvplan import Model
    >>> from kvplan.bridges import Seat, from_tensorrt_llm
    >>> class Manager:
    ...     tokens_per_block, layer_offsets, max_attention_window_vec = 32, {i: i for i in range(28)}, [4096]
    ...     pool = np.zeros((50, 28, 2, 4 * 32 * 128), np.float16)
    ...     def get_buffers(self, layer_idx, kv_layout):
    ...         return self.pool[:, self.layer_offsets[layer_idx]].reshape(50, 2, 4, 32, 128)
    >>> model = Model.shipped("qwen3-0.6b").with_dtypes("float16")
    >>> worker = from_tensorrt_llm(model, Seat("prefill", tp_rank=1, tp=2), Manager(), "HND")
    >>> print(worker, worker.views[0].axes[1], sep="; ")
    prefill/0: 28 views of 28 tensors in 1 region, 1 group; head [4, 8) of 8 step 8192
    """
    if kv_layout not in TENSORRT_LLM:
        raise differ("LAYOUT", "read a pool of TensorRT-LLM", f"one of {', '.join(TENSORRT_LLM)}", repr(kv_layout))
    made = Assembly(model, seat)
    windows = kv_cache_manager.max_attention_window_vec
    tables: dict[int, list[int]] = {}
    for layer, offset in kv_cache_manager.layer_offsets.items():
        tables.setdefault(windows[offset % len(windows)], []).append(layer)
    for layers in tables.values():
        made.table(layers[0], kv_cache_manager.tokens_per_block)
        for layer in layers:
            buffer = kv_cache_manager.get_buffers(layer, kv_layout)
            made.put(buffer, TENSORRT_LLM[kv_layout], made.attention(layer))
    return made.finish()
