"""Workers whose blocks are the chunks of an LMCache.

As in LMCache 0.5.6: lmcache/v1/memory_management.py,
lmcache/v1/memory_allocators/paged_tensor_memory_allocator.py and ``get_shape`` of
lmcache/v1/gpu_connector/gpu_connectors.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kvplan.bridges.assembly import (
    Assembly,
    MemoryInterval,
    RankInfo,
    contradiction,
    dense_strides,
    reads_engine,
    strided_memory,
    view_at_addresses,
)
from kvplan.describe.tensors import device_of
from kvplan.describe.views import ITEMSIZE, View, dtype_name
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
"""Dimensions of chunks, by ``MemoryFormat`` and how many there are.

Chunks without a layer dimension hold one layer.
"""


@reads_engine("LMCache 0.5.6")
def from_lmcache(
    model: Model, info: RankInfo, chunk: Any, layers: Sequence[Sequence[int]] | None = None
) -> Worker:
    """Return a worker whose blocks are the chunks of an LMCache, from one of its ``MemoryObj``.

    All chunks of one ``PagedTensorMemoryAllocator`` are a pool, and ``metadata.address`` of a chunk
    is its block id. A chunk of any other allocator is a pool of one block. A chunk with fewer
    tokens stores them closer together, so it needs a worker of its own, made from that chunk; its
    positions count from its first token. Formats are ``KV_2LTD`` and ``KV_MLA_FMT``, and with one
    layer per chunk ``KV_T2D`` and ``KV_2TD``, where each layer has a block table of its own.
    ``layers`` are the model's layers in each shape of a chunk; None: the chunk has one shape, with
    all layers. Raises ``LAYOUT`` for other formats.

    >>> import numpy as np
    >>> from types import SimpleNamespace as Chunk
    >>> from kvplan import Model
    >>> from kvplan.bridges import RankInfo, from_lmcache
    >>> size_bytes = 2 * 28 * 256 * 1024 * 2  # K and V, layers, tokens, 8 heads of 128, float16
    >>> buffer = np.zeros(3 * size_bytes, np.uint8)
    >>> allocator = Chunk(buffer=buffer, align_bytes=size_bytes, paged_buffers=np.split(buffer, 3))
    >>> metadata = Chunk(fmt=Chunk(name="KV_2LTD"), address=2,
    ...                  shapes=[(2, 28, 256, 1024)], dtypes=["float16"])
    >>> chunk = Chunk(metadata=metadata, raw_data=allocator.paged_buffers[2],
    ...               parent_allocator=allocator)
    >>> model = Model.shipped("qwen3-0.6b").with_dtypes("float16")
    >>> worker = from_lmcache(model, RankInfo("cache"), chunk)
    >>> worker.views[1].num_blocks
    3
    >>> print(*worker.views[1].axes[:3], sep="; ")
    kv [0, 2) of 2 stride 14680064; token [0, 256) of 256 stride 2048; head [0, 8) of 8 stride 256
    """
    assembly = Assembly(model, info)
    metadata = chunk.metadata
    shapes = [tuple(shape) for shape in metadata.shapes or [metadata.shape]]
    dtypes = [dtype_name(dtype) for dtype in metadata.dtypes or [metadata.dtype]]
    layer_lists = [range(len(model.layers))] if layers is None else layers
    pool = _pool(assembly, chunk)
    action = "read a chunk of LMCache"
    if not len(shapes) == len(dtypes) == len(layer_lists):
        expected = f"lists of layers for {len(shapes)} shapes"
        raise contradiction("SIZE", action, expected, len(layer_lists))
    # The parts of a chunk follow each other, each with a shape and a dtype.
    address = pool.address
    for shape, dtype, numbers in zip(shapes, dtypes, layer_lists, strict=True):
        format_name = metadata.fmt.name
        names = PATTERNS.get((format_name, len(shape)), "").split()
        if not names:
            expected = ", ".join(f"{name} of {num_dims} dimensions" for name, num_dims in PATTERNS)
            raise contradiction("LAYOUT", action, expected, f"{format_name} of {len(shape)}")
        # Of each dimension but blocks: its length and the bytes between its elements.
        strides = dense_strides(shape, ITEMSIZE.get(dtype, 0))
        dims = dict(zip(names, zip(shape, strides, strict=True), strict=True))
        num_tokens, _ = dims["token"]
        num_layers, layer_stride = dims.pop("layer", (0, 0))
        if num_layers not in (0, len(numbers)):
            raise contradiction("SIZE", action, f"{len(numbers)} layers", num_layers)
        pattern = " ".join(["block", *dims])
        lengths, steps = zip(*dims.values(), strict=True)
        for index, layer in enumerate(numbers):
            # Layers that a chunk has together share a block table.
            if not num_layers or not assembly.groups:
                assembly.begin_group(layer, num_tokens)
            memory = strided_memory(
                chunk.raw_data,
                dtype,
                address + index * layer_stride,
                (pool.num_chunks, *lengths),
                (pool.chunk_stride, *steps),
            )
            assembly.add(memory, pattern, assembly.attention(layer))
        address += shape[0] * strides[0]
    return assembly.finish()


class ChunkPool(NamedTuple):
    """The pool of a chunk: its address, the bytes between its chunks, and their number."""

    address: int
    chunk_stride: int
    num_chunks: int


def _pool(assembly: Assembly, chunk: Any) -> ChunkPool:
    """Return the pool of a chunk, and add its memory to the allocations.

    Raises ``BOUNDS`` if the chunk lies elsewhere.
    """
    raw = _flat(chunk.raw_data)
    allocator = chunk.parent_allocator
    if not hasattr(allocator, "paged_buffers"):
        return ChunkPool(raw.offset_bytes, raw.end_bytes - raw.offset_bytes, 1)
    # All chunks of the pool lie in its buffer, one after the other.
    buffer = _flat(allocator.buffer)
    address = buffer.offset_bytes + chunk.metadata.address * allocator.align_bytes
    if raw.offset_bytes != address:
        action = f"read chunk {chunk.metadata.address} of LMCache"
        raise contradiction("BOUNDS", action, f"{address:#x}", f"{raw.offset_bytes:#x}")
    device = device_of(allocator.buffer)
    assembly.allocations.add(MemoryInterval(device, buffer.offset_bytes, buffer.end_bytes))
    return ChunkPool(buffer.offset_bytes, allocator.align_bytes, len(allocator.paged_buffers))


def _flat(tensor: Any) -> View:
    """Return a tensor of one dimension as a view in which each element is a block."""
    return view_at_addresses(tensor, "block", "memory", "memory")
