"""The Worker of a vLLM rank, from its ``KVCacheConfig`` and the tensors that a connector registers.

As in vLLM 0.32 and 0.33: ``KVCacheTensor``, ``create_kv_cache_views``
(vllm/v1/kv_cache_interface.py), ``allocate_kv_cache`` (vllm/v1/worker/utils.py),
``extract_layer_index`` (vllm/model_executor/models/utils.py), ``bind_kv_cache``
(vllm/model_executor/layers/mamba/abstract.py). For K and V, ``forward`` of the backends in
vllm/v1/attention/backends, and ``reshape_and_cache`` of csrc/cpu/cpu_attn_vec.hpp and
cpu_attn_amx.hpp.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final

from kvplan._checks import instance, is_one_of
from kvplan.bridges.assembly import (
    Assembly,
    MemoryInterval,
    ObservedModel,
    RankInfo,
    blocks_at_addresses,
    contradiction,
    conv_order,
    dense_strides,
    reads_engine,
    strided_memory,
    view_at_addresses,
)
from kvplan.bridges.vllm_model import (
    CachedLayer,
    cached_layers,
    holds_state,
    is_in_draft_module,
    is_indexer,
    is_ring,
    numbers_in,
    unit_of,
)
from kvplan.bridges.vllm_rows import PAGE
from kvplan.describe.views import TOKEN
from kvplan.describe.worker import Worker
from kvplan.models.layouts import HEAD, KV, LocalTensor, Page
from kvplan.models.model import Model
from kvplan.models.pools import k_or_v
from kvplan.models.tensors import STATE

PATTERN: Final = "block head token content"
"""Dimensions of an attention cache."""

RING: Final = "block slot position byte"
"""Dimensions of a ring, in bytes. Where ranks divide it, its slot is a head."""

KV_LAYOUTS: Final = MappingProxyType(
    {
        "content": None,
        "vec": ("dim token", "token dim"),
        "amx": ("token dim token:16 dim:2", "dim token dim:16 token:2"),
    }
)
"""The order of K and V in a head of a block.

None: side by side in the content of each slot. Otherwise all of K comes before all of V, and these
are the dimensions of K and of V: slots and elements, where a size is that of an inner digit.
"""

BACKENDS: Final = MappingProxyType(
    {
        "FLASH_ATTN": "content",
        "FLASHINFER": "content",
        "TRITON_ATTN": "content",
        "FLEX_ATTENTION": "content",
        "HPC_ATTN": "content",
        "QWEN4_EXP_QSA_TRITON": "content",
        "STEP5_DSA": "content",
        "ROCM_AITER_UNIFIED_ATTN": "content",
        "CPU_ATTN vec": "vec",
        "CPU_ATTN vec16": "vec",
        "CPU_ATTN amx": "amx",
    }
)
"""The layout of K and V by the name of an attention backend, with its instruction set if any."""


@reads_engine("vLLM 0.33")
def from_vllm(
    model: Model | ObservedModel,
    info: RankInfo,
    kv_cache_config: Any,
    kv_caches: Any,
    layers: Mapping[str, Any] = MappingProxyType({}),
    *,
    kv_layout: str | None = None,
) -> Worker:
    """Return the worker of a vLLM rank, from its ``KVCacheConfig`` and its caches by layer name.

    ``kv_caches`` is the argument of a connector's ``register_kv_caches``. Each cache is
    ``[block, head, slot, content]`` with the strides of one of the six layouts. Its blocks may be
    kernel blocks. The cache of a state layer is the bytes of its states, or a list of its states;
    that of an indexer is its keys, then their scales, as on CUDA. Groups without KV transfer are
    left out, and so are layers that use another's cache.

    ``layers`` is ``vllm_config.compilation_config.static_forward_context``. Shape and strides do
    not say how a head of a block stores K and V, but the attention backend of a layer does, and on
    a CPU its instruction set. If the backend is not a known one, state the ``kv_layout``:
    ``content``, K and V side by side in each slot; ``vec``, K as ``[dim, slot]``, then V as
    ``[slot, dim]``; or ``amx``, the tiles of cpu_attn_amx.hpp for bfloat16 and fp8.

    ``model`` is what the engine caches: :func:`vllm_model` reads it off the same objects, whatever
    the model's type. From a configuration it is a :class:`~kvplan.Model`, whose layers are those
    that vLLM's names number; draft layers follow the last one, or are numbered from 0 in a module
    of ``DRAFT_MODULES``. A Model cannot describe layers of which vLLM numbers the states apart
    from the attention, as Falcon-H1 and Zamba2 do.

    Raises ``NAME`` for a layer that has no cache, or not exactly one number in its name; ``LAYOUT``
    for a backend or a shape that is not known; ``SIZE`` for kernel blocks that make up no whole
    number of blocks; ``BOUNDS`` if the caches do not lie in one allocation as the config says.

    >>> import numpy as np
    >>> from types import SimpleNamespace as Config
    >>> from kvplan import Model
    >>> from kvplan.bridges import RankInfo, from_vllm
    >>> names = [f"model.layers.{i}.self_attn.attn" for i in range(28)]
    >>> shape = (28, 100, 16, 4, 256)  # layer, block, slot, 4 of 8 heads, K and V
    >>> memory = np.zeros(shape, np.float16)
    >>> placed = Config(size=memory.nbytes, layers=names, offset=0,
    ...                 layer_stride=3276800, block_stride=32768)
    >>> group = Config(layer_names=names, kv_cache_spec=Config(block_size=16))
    >>> config = Config(kv_cache_tensors=[placed], kv_cache_groups=[group])
    >>> caches = dict(zip(names, memory.transpose(0, 1, 3, 2, 4)))
    >>> model = Model.shipped("qwen3-0.6b").with_dtypes("float16")
    >>> info = RankInfo("prefill", rank=1, tp_rank=1, tp=2)
    >>> worker = from_vllm(model, info, config, caches, kv_layout="content")
    >>> print(worker.views[27].name, *worker.views[27].axes[:2], sep="; ")
    layers.27.attn; head [4, 8) of 8 stride 512; token [0, 16) of 16 stride 2048
    """
    if kv_layout is not None and not is_one_of(kv_layout, KV_LAYOUTS):
        expected = f"one of {', '.join(KV_LAYOUTS)}"
        raise contradiction("LAYOUT", "read kv_layout", expected, repr(kv_layout))
    assembly = Assembly(model, info)
    layers = instance(Mapping, layers, "layers")
    # The KVCacheTensor of each layer by its name, and the layer's number in it.
    allocated = {
        name: (tensor, number)
        for tensor in kv_cache_config.kv_cache_tensors
        for number, name in enumerate(tensor.layers)
    }
    kv_caches = instance(Mapping, kv_caches, "kv_caches")
    tables = groupby(cached_layers(kv_cache_config), lambda layer: layer.group)
    for _, cached in tables:
        # A block table has a group for the values of single tokens, one for those of four, ...
        by_unit: dict[int, list[CachedLayer]] = {}
        for layer in cached:
            by_unit.setdefault(_unit_of(layer, model), []).append(layer)
        for unit, members in by_unit.items():
            first = members[0]
            assembly.begin_group(
                _key_of(first, model),
                None if holds_state(first.spec) else first.spec.block_size,
                spread=getattr(first.spec, "dcp_sharded", True),
                tokens_per_slot=unit or first.spec.block_size,
            )
            for layer in members:
                name = layer.name
                if name not in kv_caches:
                    action = "place a layer of vLLM"
                    raise contradiction("NAME", action, "a cache for each", f"none for {name!r}")
                first_view = len(assembly.views)
                _add_layer(assembly, layer, _key_of(layer, model), kv_caches, layers, kv_layout)
                _check_addresses(assembly, name, first_view, *allocated[name])
    return assembly.finish()


def _add_layer(
    assembly: Assembly,
    layer: CachedLayer,
    key: Hashable,
    kv_caches: Mapping[str, Any],
    layers: Mapping[str, Any],
    kv_layout: str | None,
) -> None:
    """Add the views of one layer, which has a key in the model."""
    name, spec, _ = layer
    cache = kv_caches[name]
    if is_ring(spec):
        ((ring,),) = assembly.pages(key)["ring"].sections
        assembly.add(_bytes_of(cache), RING.replace("slot", ring.axes[0].name), ring)
        return
    if holds_state(spec):
        page = assembly.pages(key)[STATE]
        order = conv_order(page.sections, spec.shapes, spec.dtypes)
        if not isinstance(cache, list | tuple):
            assembly.add_page(cache, page, order)
            return
        for section, state in zip(page.sections, cache, strict=True):
            assembly.add_page(state, Page.of(*section), order)
        return
    if isinstance(assembly.model, ObservedModel):
        (page,) = assembly.pages(key).values()
        if len(page.sections) > 1 or _is_whole_block(page):
            _add_packed(assembly, layer, key, cache)
            return
    if is_indexer(spec):
        assembly.add_page(cache, assembly.index(key))
        return
    tensor = assembly.attention(key, "index")
    has_kv = tensor.has(KV)
    if len(cache.shape) != len(PATTERN.split()):
        got = tuple(cache.shape)
        raise contradiction("LAYOUT", "read a cache of vLLM", f"dimensions {PATTERN!r}", got)
    kernel_blocks = _kernel_blocks(layer, assembly.groups[-1].num_slots, cache.shape[2])
    # A backend may keep K and V of a head apart, but not inside of a row of bytes.
    halves = KV_LAYOUTS[kv_layout or _kv_layout(name, layers.get(name))] if has_kv else None
    if halves is None:
        assembly.add(cache, PATTERN, tensor, kernel_blocks=kernel_blocks)
        return
    # K and V are views of their own.
    for half, dims in enumerate(halves):
        memory, pattern = _half(cache, half, dims, tensor)
        assembly.add(memory, pattern, k_or_v(tensor, half), kernel_blocks=kernel_blocks)


def _kernel_blocks(layer: CachedLayer, num_slots: int, kernel_slots: int) -> int:
    """Return how many blocks of a cache are one of the engine's block tables."""
    kernel_blocks, num_left = divmod(num_slots, kernel_slots)
    if num_left:
        action = f"join the kernel blocks of {layer.name!r}"
        slots = "tokens" if layer.spec.block_size == num_slots else "rows"
        expected = f"a divisor of {num_slots} {slots}"
        raise contradiction("SIZE", action, expected, f"{kernel_slots} in a kernel block")
    return kernel_blocks


def _add_packed(assembly: Assembly, layer: CachedLayer, key: Hashable, cache: Any) -> None:
    """Add the views of rows whose scales are behind all rows of a block, or of whole blocks."""
    shape = tuple(cache.shape)
    (page,) = assembly.pages(key).values()
    is_whole = _is_whole_block(page)
    num_slots = int(layer.spec.num_states) if is_whole else assembly.groups[-1].num_slots
    # An older cache has no dimension of rows.
    kernel_blocks = _kernel_blocks(layer, num_slots, shape[-2] if len(shape) > 2 else num_slots)
    if is_whole:
        assembly.add_page(_joined_blocks(cache, kernel_blocks), page)
        return
    (kernel_page,) = assembly.pages(key, kernel_blocks).values()
    assembly.add_page(cache, kernel_page, kernel_blocks=kernel_blocks)


def _is_whole_block(page: Page) -> bool:
    """Return whether a block is one value, since the order of its bytes is not known."""
    return any(tensor.name.endswith(f".{PAGE}") for tensor in page.tensors)


def _joined_blocks(cache: Any, kernel_blocks: int) -> Any:
    """Return a cache as bytes, with each so many of its blocks as one."""
    raw = blocks_at_addresses(cache, "pages", "pages")
    if kernel_blocks > 1 and raw.block_stride_bytes != raw.block_bytes:
        expected = f"blocks {raw.block_bytes} bytes apart"
        got = f"{raw.block_stride_bytes} bytes"
        raise contradiction("STRIDE", f"join {kernel_blocks} kernel blocks", expected, got)
    shape = (raw.num_blocks // kernel_blocks, kernel_blocks * raw.block_bytes)
    strides = (kernel_blocks * raw.block_stride_bytes, 1)
    return strided_memory(cache, "uint8", raw.offset_bytes, shape, strides)


def _bytes_of(cache: Any) -> Any:
    """Return a cache whose last dimension is bytes."""
    raw = blocks_at_addresses(cache, "bytes", "bytes")
    *outer, last = raw.axes
    if last.stride_bytes != raw.itemsize:
        got = f"{last.stride_bytes} bytes apart"
        raise contradiction("STRIDE", "read a ring of vLLM", "dense elements", got)
    shape = (raw.num_blocks, *(axis.extent for axis in outer), last.extent * raw.itemsize)
    strides = (raw.block_stride_bytes, *(axis.stride_bytes for axis in outer), 1)
    return strided_memory(cache, "uint8", raw.offset_bytes, shape, strides)


def _kv_layout(name: str, layer: Any) -> str:
    """Return how the attention backend of a layer stores K and V."""
    # On a CPU, an attention backend has several layouts, by instruction set.
    backend = "no layer" if layer is None else layer.get_attn_backend().get_name()
    isa = getattr(layer, "isa", None)
    backend = f"{backend} {isa}" if isa else backend
    if backend not in BACKENDS:
        expected = f"kv_layout, or a layer whose backend is one of {', '.join(BACKENDS)}"
        raise contradiction("LAYOUT", f"read K and V of {name!r}", expected, backend)
    return BACKENDS[backend]


def _half(cache: Any, half: int, dims: str, tensor: LocalTensor) -> tuple[Any, str]:
    """Return K (0) or V (1) of a cache in which each head of a block has all of K before all of V.

    The second value is the pattern of its dimensions.
    """
    raw = view_at_addresses(cache, PATTERN, tensor.name, tensor.group)
    head, token, content = raw.axes
    itemsize = raw.itemsize
    action = f"read tensor {tensor.name!r}"
    if content.extent % 2:
        got = f"{content.extent} elements"
        raise contradiction("SIZE", action, "K and V of equal length", got)
    if (token.stride_bytes, content.stride_bytes) != (content.extent * itemsize, itemsize):
        got = f"slots {token.stride_bytes} bytes apart, elements {content.stride_bytes}"
        raise contradiction("STRIDE", action, "dense slots in each head of a block", got)
    lengths = {TOKEN: token.extent, "dim": content.extent // 2}
    half_bytes = math.prod(lengths.values()) * itemsize
    # A word of `dims` is the name of a dimension, with its size if it is an inner digit. Outer
    # digits have the lengths that inner ones leave.
    names = []
    inner_sizes = []
    for word in dims.split():
        name, _, inner_size = word.partition(":")
        names.append(name)
        inner_sizes.append(int(inner_size or 0))
    for name, size in zip(names, inner_sizes, strict=True):
        if size and lengths[name] % size:
            action = f"read axis {name!r} of tensor {tensor.name!r}"
            raise contradiction("SIZE", action, f"a multiple of {size}", lengths[name])
        lengths[name] //= size or 1
    shape = [size or lengths[name] for name, size in zip(names, inner_sizes, strict=True)]
    memory = strided_memory(
        cache,
        raw.dtype,
        raw.offset_bytes + half * half_bytes,
        (raw.num_blocks, head.extent, *shape),
        (raw.block_stride_bytes, head.stride_bytes, *dense_strides(shape, itemsize)),
    )
    return memory, " ".join(["block", HEAD, *names])


def _check_addresses(
    assembly: Assembly, name: str, first_view: int, tensor: Any, number: int
) -> None:
    """Raise ``STRIDE`` or ``BOUNDS`` if a layer's views lie elsewhere than its tensor says.

    They are the views from ``first_view`` on. The layer has a number in its ``KVCacheTensor``.
    """
    device, view, _ = assembly.views[first_view]
    action = f"place the cache of {name!r}"
    if view.block_stride_bytes != tensor.block_stride:
        expected = f"blocks {tensor.block_stride} bytes apart"
        raise contradiction("STRIDE", action, expected, view.block_stride_bytes)
    # All tensors lie in one allocation, which begins before the offset of each.
    start = view.offset_bytes - tensor.offset - number * tensor.layer_stride
    stop = start + tensor.size
    assembly.allocations.add(MemoryInterval(device, start, stop))
    allocations = sorted(interval for interval in assembly.allocations if interval.device == device)
    if len(allocations) > 1:
        ranges = [f"{interval.start:#x} to {interval.stop:#x}" for interval in allocations]
        raise contradiction(
            "BOUNDS", action, f"one allocation, {ranges[0]}", f"another, {ranges[1]}"
        )
    # The layer lies inside that allocation.
    end = max(placed.view.end_bytes for placed in assembly.views[first_view:])
    if end > stop:
        raise contradiction("BOUNDS", action, f"bytes below {stop:#x}", f"{end:#x}")


def _unit_of(layer: CachedLayer, model: Model | ObservedModel) -> int:
    """Return of how many tokens a value of a layer is."""
    tensors = model.named_layer(layer.name).tensors if isinstance(model, ObservedModel) else ()
    return unit_of(layer.spec, tensors)


def _key_of(layer: CachedLayer, model: Model | ObservedModel) -> Hashable:
    """Return the key of vLLM's layer in a model: its name, or the number in it."""
    if isinstance(model, ObservedModel):
        return layer.name
    numbers = numbers_in(layer.name)
    if len(numbers) != 1:
        action = f"read the layer name {layer.name!r}"
        raise contradiction("NAME", action, "one number", f"{len(numbers)}")
    return numbers[0] + (len(model.layers) if is_in_draft_module(layer.name) else 0)
