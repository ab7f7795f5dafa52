"""The Worker of a vLLM rank, from its ``KVCacheConfig`` and the tensors that a connector registers.

As in vLLM 0.32 and 0.33: ``KVCacheTensor``, ``create_kv_cache_views`` (vllm/v1/kv_cache_interface.py),
``allocate_kv_cache`` (vllm/v1/worker/utils.py), ``extract_layer_index`` (vllm/model_executor/models/utils.py),
``bind_kv_cache`` (vllm/model_executor/layers/mamba/abstract.py). For K and V, ``forward`` of the backends in
vllm/v1/attention/backends, and ``reshape_and_cache`` of csrc/cpu/cpu_attn_vec.hpp and cpu_attn_amx.hpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

from kvplan._checks import instance, is_one_of
from kvplan.bridges.assembly import (
    CONTENT,
    Assembly,
    RankInfo,
    conv_order,
    differ,
    everywhere,
    reads_engine,
    strided,
)
from kvplan.describe.tensors import view_of
from kvplan.describe.views import TOKEN
from kvplan.describe.worker import Worker
from kvplan.models.layouts import HEAD, KV, LAYER, LocalTensor
from kvplan.models.model import Model
from kvplan.models.pools import k_or_v
from kvplan.models.tensors import STATE

PATTERN: Final = "block head token content"
"""Dimensions of an attention cache, from 0.32 on."""

LATENTS: Final = (PATTERN, "block token content")
HEADS: Final = (PATTERN, "kv block token head content", "block kv token head content")
"""Dimensions of a cache of latents, and of K and V, also in older releases."""

ALL_LAYERS: Final = (
    "block layer token content",
    "block layer kv token head content",
    "block head layer kv token content",
    "block kv head layer token content",
)
"""Dimensions of one cache of all layers, in older releases: those of ``get_kv_cache_stride_order``."""

KV_LAYOUTS: Final = MappingProxyType(
    {
        "content": None,
        "vec": ("dim token", "token dim"),
        "amx": ("token dim token:16 dim:2", "dim token dim:16 token:2"),
    }
)
"""How a head of a block stores K and V. None: side by side in the content of each slot. Otherwise all of K comes before
all of V, and these are the dimensions of K and of V: slots and elements, where a size is that of an inner digit."""

BACKENDS: Final = MappingProxyType(
    {
        "FLASH_ATTN": "content",
        "FLASHINFER": "content",
        "TRITON_ATTN": "content",
        "FLEX_ATTENTION": "content",
        "HPC_ATTN": "content",
        "ROCM_AITER_UNIFIED_ATTN": "content",
        "CPU_ATTN vec": "vec",
        "CPU_ATTN vec16": "vec",
        "CPU_ATTN amx": "amx",
    }
)
"""The layout of K and V by the name of an attention backend, and its instruction set if the layer has one."""


@reads_engine("vLLM 0.33")
def from_vllm(
    model: Model,
    info: RankInfo,
    kv_cache_config: Any,
    kv_caches: Any,
    layers: Mapping[str, Any] = MappingProxyType({}),
    *,
    kv_layout: str | None = None,
    attending: Sequence[int] | None = None,
) -> Worker:
    """The worker of a vLLM rank, from its ``KVCacheConfig`` and its caches by layer name.

    ``kv_caches`` is the argument of a connector's ``register_kv_caches``. Each cache is
    ``[block, head, slot, content]`` with the strides of one of the six layouts. Its blocks may be kernel blocks. The
    cache of a state layer is the bytes of its states; that of an indexer is its keys, then their scales, as on CUDA.
    Groups without KV transfer are left out, and so are layers that use another's cache.

    ``layers`` is ``vllm_config.compilation_config.static_forward_context``. Shape and strides do not say how a head of
    a block stores K and V, but the attention backend of a layer does, and on a CPU its instruction set. If the backend
    is not a known one, state the ``kv_layout``: ``content``, K and V side by side in each slot; ``vec``, K as
    ``[dim, slot]``, then V as ``[slot, dim]``; or ``amx``, the tiles of cpu_attn_amx.hpp for bfloat16 and fp8.

    Where layers have K and V and a state too, vLLM numbers all attention first and all states after it, in the order of
    layers. ``attending`` are the layers in the order in which vLLM numbers their attention, if that is another one.

    Older releases have caches ``[2, block, slot, head, dim]`` or ``[block, 2, slot, head, dim]`` and latents
    ``[block, slot, dim]``, all of layout ``content``. The argument of ``register_cross_layers_kv_cache``, one tensor of
    all layers, takes the place of ``kv_caches``.

    Raises ``NAME`` for a layer that has no cache, or not exactly one number in its name; ``LAYOUT`` for a backend or a
    shape that is not known; ``SIZE`` for kernel blocks that make up no whole number of blocks; ``BOUNDS`` if the caches
    do not lie in one allocation as the config says.

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
    >>> info = RankInfo("prefill", rank=1, tp_rank=1, tp=2)
    >>> worker = from_vllm(model, info, config, caches, kv_layout="content")
    >>> print(worker.views[27].name, *worker.views[27].axes[:2], sep="; ")
    layers.27.attn; head [4, 8) of 8 stride 512; token [0, 16) of 16 stride 2048
    """
    if kv_layout is not None and not is_one_of(kv_layout, KV_LAYOUTS):
        raise differ("LAYOUT", "read kv_layout", f"one of {', '.join(KV_LAYOUTS)}", repr(kv_layout))
    assembly, layers = Assembly(model, info), instance(Mapping, layers, "layers")
    numbered_apart = _numbered_apart(model, attending)
    tensors = kv_cache_config.kv_cache_tensors
    placed = {name: (tensor, i) for tensor in tensors for i, name in enumerate(_names(tensor))}
    if not isinstance(kv_caches, Mapping):
        kv_caches = _by_layer(kv_caches, tensors)
    for group in kv_cache_config.kv_cache_groups:
        names = [name for name in group.layer_names if name in placed]
        if not names or not getattr(group, "enable_kv_transfer", True):
            continue
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        spec = specs.get(names[0], group.kv_cache_spec)
        tokens = None if hasattr(spec, "shapes") else spec.block_size
        first_layer = _layer_of(names[0], spec, numbered_apart)
        assembly.begin_group(first_layer, tokens, spread=getattr(spec, "dcp_sharded", True))
        for name in names:
            if name not in kv_caches:
                raise differ(
                    "NAME", "place a layer of vLLM", "a cache for each", f"none for {name!r}"
                )
            first = len(assembly.views)
            layer_spec = specs.get(name, group.kv_cache_spec)
            number = _layer_of(name, layer_spec, numbered_apart)
            _add_layer(assembly, name, number, kv_caches[name], layer_spec, layers, kv_layout)
            if hasattr(placed[name][0], "layers"):
                _check_place(assembly, name, first, *placed[name])
    return assembly.finish()


def _names(tensor: Any) -> Sequence[str]:
    """The layers of a ``KVCacheTensor``. In older releases they share its bytes."""
    names: Sequence[str] = tensor.layers if hasattr(tensor, "layers") else tensor.shared_by
    return names


def _pattern(cache: Any, known: Sequence[str], num_layers: int = 0) -> list[str]:
    """The dimensions of a cache: those of the one known pattern that fits its shape."""
    shape, lengths = tuple(cache.shape), {KV: 2, LAYER: num_layers}
    fits = [
        names
        for names in map(str.split, known)
        if len(names) == len(shape)
        and all(lengths.get(name, n) == n for name, n in zip(names, shape, strict=True))
    ]
    if len(fits) != 1:
        raise differ(
            "LAYOUT",
            "read a cache of vLLM",
            f"the shape of one of {', '.join(map(repr, known))}",
            shape,
        )
    return fits[0]


def _by_layer(cache: Any, tensors: Sequence[Any]) -> dict[str, Any]:
    """One cache of all layers as a cache for each, whose dimensions are among those of :data:`LATENTS` or HEADS."""
    names = _pattern(cache, ALL_LAYERS, len(tensors))
    raw = view_of(cache, " ".join(names), name="layers", group="layers", region=everywhere(cache))
    axes = {axis.name: axis for axis in raw.axes}
    inner = [axes[name] for name in (KV, TOKEN, HEAD, CONTENT) if name in axes]
    shape = raw.num_blocks, *(axis.extent for axis in inner)
    strides = raw.block_stride_bytes, *(axis.stride_bytes for axis in inner)
    return {
        name: strided(
            cache, raw.dtype, raw.offset_bytes + i * axes[LAYER].stride_bytes, shape, strides
        )
        for i, tensor in enumerate(tensors)
        for name in _names(tensor)
    }


def _add_layer(
    assembly: Assembly,
    name: str,
    number: int,
    cache: Any,
    spec: Any,
    layers: Mapping[str, Any],
    kv_layout: str | None,
) -> None:
    """Adds the views of one layer."""
    if hasattr(spec, "shapes"):
        page = assembly.pages(number)[STATE]
        assembly.add_page(cache, page, conv_order(page.sections, spec.shapes, spec.dtypes))
        return
    if getattr(getattr(spec, "cache_role", None), "value", "") == "indexer":
        assembly.add_page(cache, assembly.index(number))
        return
    tensor = assembly.attention(number, "index")
    has_kv = any(axis.name == KV for axis in tensor.axes)
    names = _pattern(cache, HEADS if has_kv else LATENTS)
    slots = cache.shape[names.index(TOKEN)]
    join, rest = divmod(spec.block_size, slots)
    if rest:
        expected, got = f"a divisor of {spec.block_size} tokens", f"{slots} in a kernel block"
        raise differ("SIZE", f"join the kernel blocks of {name!r}", expected, got)
    halves = KV_LAYOUTS[kv_layout or _kv_layout(name, layers.get(name))] if has_kv else None
    if halves is None:
        assembly.add(cache, " ".join(names), tensor, join=join)
        return
    for half, dims in enumerate(halves):
        memory, pattern = _half(cache, half, dims, tensor)
        assembly.add(memory, pattern, k_or_v(tensor, half), join=join)


def _kv_layout(name: str, layer: Any) -> str:
    """How the attention backend of a layer stores K and V."""
    backend = "no layer" if layer is None else layer.get_attn_backend().get_name()
    isa = getattr(layer, "isa", None)
    backend = f"{backend} {isa}" if isa else backend
    if backend not in BACKENDS:
        known = f"kv_layout, or a layer whose backend is one of {', '.join(BACKENDS)}"
        raise differ("LAYOUT", f"read K and V of {name!r}", known, backend)
    return BACKENDS[backend]


def _half(cache: Any, half: int, dims: str, tensor: LocalTensor) -> tuple[Any, str]:
    """K (0) or V (1) of a cache in which each head of a block has all of K before all of V; and its dimensions."""
    raw = view_of(cache, PATTERN, name=tensor.name, group=tensor.group, region=everywhere(cache))
    (head, token, content), size = raw.axes, raw.itemsize
    if content.extent % 2:
        raise differ(
            "SIZE",
            f"read tensor {tensor.name!r}",
            "K and V of equal length",
            f"{content.extent} elements",
        )
    if (token.stride_bytes, content.stride_bytes) != (content.extent * size, size):
        got = f"slots {token.stride_bytes} bytes apart, elements {content.stride_bytes}"
        raise differ(
            "STRIDE", f"read tensor {tensor.name!r}", "dense slots in each head of a block", got
        )
    left = {TOKEN: token.extent, "dim": content.extent // 2}
    elements = math.prod(left.values())
    digits = [
        (name, int(inner or 0)) for name, _, inner in (part.partition(":") for part in dims.split())
    ]
    for name, inner in digits:
        if inner and left[name] % inner:
            raise differ(
                "SIZE",
                f"read axis {name!r} of tensor {tensor.name!r}",
                f"a multiple of {inner}",
                left[name],
            )
        left[name] //= inner or 1
    shape = [inner or left[name] for name, inner in digits]
    strides = [size * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    memory = strided(
        cache,
        raw.dtype,
        raw.offset_bytes + half * elements * size,
        (raw.num_blocks, head.extent, *shape),
        (raw.block_stride_bytes, head.stride_bytes, *strides),
    )
    return memory, " ".join(["block", HEAD, *(name for name, _ in digits)])


def _check_place(assembly: Assembly, name: str, first: int, tensor: Any, index: int) -> None:
    """Checks that the views from ``first`` on lie where a ``KVCacheTensor`` places its layer number ``index``."""
    (device, view), what = assembly.views[first], f"place the cache of {name!r}"
    if view.block_stride_bytes != tensor.block_stride:
        raise differ(
            "STRIDE", what, f"blocks {tensor.block_stride} bytes apart", view.block_stride_bytes
        )
    start = view.offset_bytes - tensor.offset - index * tensor.layer_stride
    assembly.allocations.add((device, start, start + tensor.size))
    known = sorted(allocation for allocation in assembly.allocations if allocation[0] == device)
    if len(known) > 1:
        places = [f"{start:#x} to {stop:#x}" for _, start, stop in known]
        raise differ("BOUNDS", what, f"one allocation, {places[0]}", f"another, {places[1]}")
    end = max(view.end_bytes for _, view in assembly.views[first:])
    if end > start + tensor.size:
        raise differ("BOUNDS", what, f"bytes below {start + tensor.size:#x}", f"{end:#x}")


def _numbered_apart(model: Model, attending: Sequence[int] | None) -> Sequence[int]:
    """The layers of a model in the order of their attention's numbers, if its states have numbers of their own.

    In vLLM no two caches have the same number. So where a layer has two, all states are numbered after all attention
    (``ssm_layer_idx`` of falcon_h1.py, ``layer2block_map`` of zamba2.py, in vllm/model_executor/models).
    """
    kinds = [{tensor.paged for tensor in layer} for layer in model.layers]
    in_order = [layer for layer, paged in enumerate(kinds) if True in paged]
    if attending is not None and sorted(attending) != in_order:
        raise differ("NAME", "number the attention of vLLM", f"layers {in_order}", [*attending])
    has_both = any(len(paged) == 2 for paged in kinds)
    return (attending or in_order) if has_both else ()


def _layer_of(name: str, spec: Any, numbered_apart: Sequence[int]) -> int:
    """The layer of the model to which vLLM's layer belongs."""
    number = _number(name)
    num_attending = len(numbered_apart)
    if not num_attending:
        return number
    is_state = hasattr(spec, "shapes")
    if is_state == (number < num_attending):
        expected = f"a number from {num_attending} on" if is_state else f"below {num_attending}"
        raise differ("NAME", f"read the layer name {name!r}", expected, number)
    return number - num_attending if is_state else numbered_apart[number]


def shared_attention(layers: Sequence[int], num_blocks: int) -> list[int]:
    """The ``attending`` of Zamba2: ``layers`` take turns in attention blocks, and vLLM numbers block by block.

    >>> shared_attention([5, 11, 17, 23, 29], num_blocks=2)
    [5, 17, 29, 11, 23]
    """
    turns = [layers[block::num_blocks] for block in range(num_blocks)]
    return list(chain.from_iterable(turns))


def _number(name: str) -> int:
    """The one number in vLLM's name of a layer."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise differ("NAME", f"read the layer name {name!r}", "one number", f"{len(numbers)}")
    return numbers[0]
