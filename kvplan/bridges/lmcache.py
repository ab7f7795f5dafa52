"""Workers whose blocks are the chunks of an LMCache.

As in LMCache 0.5.6: lmcache/v1/memory_management.py, lmcache/v1/memory_allocators/paged_tensor_memory_allocator.py
and ``get_shape`` of lmcache/v1/gpu_connector/gpu_connectors.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

from kvplan.bridges.assembly import Assembly, RankInfo, differ, everywhere, reads_engine, strided
from kvplan.describe.tensors import device_of, view_of
from kvplan.describe.views import ITEMSIZE, View
from kvplan.describe.worker import Worker
from kvplan.models.model import Model

PATTERNS: Final = MappingProxyType(
    {
        ("KV_2LTD", 4): "kv layer token content",
        ("KV_MLA_FMT", 4): "kv layer token content",
        ("KV_T2D", 3): "token kv content",
        ("KV_2TD", 3): "kv token content",
        ("KV_MLA_FMT", 2): "token content",
    }
)
"""Dimensions of chunks, by ``MemoryFormat`` and how many there are. Chunks without a layer dimension hold one layer."""


@reads_engine("LMCache 0.5.6")
def from_lmcache(
    model: Model, info: RankInfo, chunk: Any, layers: Sequence[Sequence[int]] | None = None
) -> Worker:
    """A worker whose blocks are the chunks of an LMCache, from one of its ``MemoryObj``.

    All chunks of one ``PagedTensorMemoryAllocator`` are a pool, and ``metadata.address`` of a chunk is its block id. A
    chunk of any other allocator is a pool of one block. A chunk with fewer tokens stores them closer together, so it
    needs a worker of its own, made from that chunk; its positions count from its first token. Formats are ``KV_2LTD``
    and ``KV_MLA_FMT``, and with one layer per chunk ``KV_T2D`` and ``KV_2TD``, where each layer has a block table of
    its own. ``layers`` are the model's layers in each shape of a chunk; None: the chunk has one shape, with all layers.
    Raises ``LAYOUT`` for other formats.

    >>> import numpy as np
    >>> from types import SimpleNamespace as Chunk
    >>> from kvplan import Model
    >>> from kvplan.bridges import RankInfo, from_lmcache
    >>> buffer = np.zeros(3 * 2 * 28 * 256 * 1024 * 2, np.uint8)  # 3 chunks of 256 tokens, 8 heads of 128
    >>> allocator = Chunk(buffer=buffer, align_bytes=buffer.size // 3, paged_buffers=np.split(buffer, 3))
    >>> meta = Chunk(fmt=Chunk(name="KV_2LTD"), address=2, shapes=[(2, 28, 256, 1024)], dtypes=["float16"])
    >>> chunk = Chunk(metadata=meta, raw_data=allocator.paged_buffers[2], parent_allocator=allocator)
    >>> worker = from_lmcache(Model.shipped("qwen3-0.6b").with_dtypes("float16"), RankInfo("cache"), chunk)
    >>> print(worker.views[1].num_blocks, *worker.views[1].axes[:3], sep="; ")
    3; kv [0, 2) of 2 stride 14680064; token [0, 256) of 256 stride 2048; head [0, 8) of 8 stride 256
    """
    assembly, meta = Assembly(model, info), chunk.metadata
    shapes = [tuple(shape) for shape in meta.shapes or [meta.shape]]
    dtypes = [str(dtype).removeprefix("torch.") for dtype in meta.dtypes or [meta.dtype]]
    parts = [range(len(model.layers))] if layers is None else layers
    address, step, blocks = _pool(assembly, chunk)
    if not len(shapes) == len(dtypes) == len(parts):
        raise differ(
            "SIZE",
            "read a chunk of LMCache",
            f"lists of layers for {len(shapes)} shapes",
            len(parts),
        )
    for shape, dtype, numbers in zip(shapes, dtypes, parts, strict=True):
        names = PATTERNS.get((meta.fmt.name, len(shape)), "").split()
        if not names:
            known = ", ".join(f"{name} of {n} dimensions" for name, n in PATTERNS)
            raise differ(
                "LAYOUT", "read a chunk of LMCache", known, f"{meta.fmt.name} of {len(shape)}"
            )
        strides = [ITEMSIZE.get(dtype, 0) * math.prod(shape[i + 1 :]) for i in range(len(shape))]
        dims = dict(zip(names, zip(shape, strides, strict=True), strict=True))
        count, layer_step = dims.pop("layer", (0, 0))
        if count not in (0, len(numbers)):
            raise differ("SIZE", "read a chunk of LMCache", f"{len(numbers)} layers", count)
        for i, layer in enumerate(numbers):
            if not (count and assembly.groups):
                assembly.begin_group(layer, dims["token"][0])
            lengths, steps = zip(*dims.values(), strict=True)
            array = strided(
                chunk.raw_data, dtype, address + i * layer_step, (blocks, *lengths), (step, *steps)
            )
            assembly.add(array, " ".join(["block", *dims]), assembly.attention(layer))
        address += shape[0] * strides[0]
    return assembly.finish()


def _pool(assembly: Assembly, chunk: Any) -> tuple[int, int, int]:
    """The address of a chunk's pool, the bytes between its chunks, and how many chunks there are."""
    raw = _flat(chunk.raw_data)
    allocator = chunk.parent_allocator
    if not hasattr(allocator, "paged_buffers"):
        return raw.offset_bytes, raw.end_bytes - raw.offset_bytes, 1
    buffer, step = _flat(allocator.buffer), allocator.align_bytes
    at = buffer.offset_bytes + chunk.metadata.address * step
    if raw.offset_bytes != at:
        raise differ(
            "BOUNDS",
            f"read chunk {chunk.metadata.address} of LMCache",
            f"{at:#x}",
            f"{raw.offset_bytes:#x}",
        )
    assembly.allocations.add((device_of(allocator.buffer), buffer.offset_bytes, buffer.end_bytes))
    return buffer.offset_bytes, step, len(allocator.paged_buffers)


def _flat(tensor: Any) -> View:
    """A tensor of one dimension, as a view in which each element is a block."""
    return view_of(tensor, "block", name="memory", group="memory", region=everywhere(tensor))
