"""Chunks: Workers from what LMCache keeps, by the rules of :mod:`kvplan.bridges.recipes`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan.bridges.assembly import Assembly, Seat, differ, everywhere
from kvplan.describe.tensors import device_of, view_of
from kvplan.describe.views import ITEMSIZE, View
from kvplan.describe.worker import Worker
from kvplan.models.model import Model

LMCACHE: Final = MappingProxyType(
    {
        ("KV_2LTD", 4): "kv layer token content",
        ("KV_MLA_FMT", 4): "kv layer token content",
        ("KV_T2D", 3): "token kv content",
        ("KV_2TD", 3): "kv token content",
        ("KV_MLA_FMT", 2): "token content",
    }
)
"""Dimensions of LMCache's chunks, by ``MemoryFormat`` and how many there are. Those without layers hold one."""


@attrs.frozen
class _Part:
    """Some of the dimensions of memory that has more, as numpy would describe it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    address: int
    device: Any

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False)}


def from_lmcache(model: Model, seat: Seat, chunk: Any, layers: Sequence[Sequence[int]] | None = None) -> Worker:
    """A worker whose blocks are the chunks of an LMCache, from one of its ``MemoryObj``.

    All chunks of one ``PagedTensorMemoryAllocator`` are a pool, and ``metadata.address`` of a chunk is its block id. A
    chunk of any other allocator is a pool of one block. A chunk of fewer tokens keeps them more closely, so it is
    another worker, made from it; its positions count from its first token. Formats are ``KV_2LTD``, ``KV_MLA_FMT``,
    and, a layer a chunk, ``KV_T2D`` and ``KV_2TD``: with those each layer has a block table of its own. ``layers`` are
    those of the model in each shape of a chunk; left out, all are in the one. Raises ``LAYOUT`` for other formats.

    As in LMCache 0.5.6: lmcache/v1/memory_management.py, lmcache/v1/memory_allocators/paged_tensor_memory_allocator.py
    and ``get_shape`` of lmcache/v1/gpu_connector/gpu_connectors.py.

    >>> import numpy as np
    >>> from types import SimpleNamespace as Chunk
    >>> from kvplan import Model
    >>> from kvplan.bridges import Seat, from_lmcache
    >>> buffer = np.zeros(3 * 2 * 28 * 256 * 1024 * 2, np.uint8)  # 3 chunks of 256 tokens, 8 heads of 128
    >>> allocator = Chunk(buffer=buffer, align_bytes=buffer.size // 3, paged_buffers=np.split(buffer, 3))
    >>> meta = Chunk(fmt=Chunk(name="KV_2LTD"), address=2, shapes=[(2, 28, 256, 1024)], dtypes=["float16"])
    >>> chunk = Chunk(metadata=meta, raw_data=allocator.paged_buffers[2], parent_allocator=allocator)
    >>> worker = from_lmcache(Model.shipped("qwen3-0.6b").with_dtypes("float16"), Seat("cache"), chunk)
    >>> print(worker.views[1].num_blocks, *worker.views[1].axes[:3], sep="; ")
    3; kv [0, 2) of 2 step 14680064; token [0, 256) of 256 step 2048; head [0, 8) of 8 step 256
    """
    made, meta = Assembly(model, seat), chunk.metadata
    shapes = [tuple(shape) for shape in meta.shapes or [meta.shape]]
    dtypes = [str(dtype).removeprefix("torch.") for dtype in meta.dtypes or [meta.dtype]]
    parts = [range(len(model.layers))] if layers is None else layers
    address, step, blocks = _lmcache_pool(made, chunk)
    if not len(shapes) == len(dtypes) == len(parts):
        raise differ("SIZE", "read a chunk of LMCache", f"the layers of {len(shapes)} shapes", f"of {len(parts)}")
    for shape, dtype, numbers in zip(shapes, dtypes, parts, strict=True):
        names = LMCACHE.get((meta.fmt.name, len(shape)), "").split()
        if not names:
            known = ", ".join(f"{name} of {n} dimensions" for name, n in LMCACHE)
            raise differ("LAYOUT", "read a chunk of LMCache", known, f"{meta.fmt.name} of {len(shape)}")
        strides = [ITEMSIZE.get(dtype, 0) * math.prod(shape[i + 1 :]) for i in range(len(shape))]
        dims = dict(zip(names, zip(shape, strides, strict=True), strict=True))
        count, layer_step = dims.pop("layer", (0, 0))
        if count and count != len(numbers):
            raise differ("SIZE", "read a chunk of LMCache", f"{len(numbers)} layers", count)
        for i, layer in enumerate(numbers):
            if not (count and made.groups):
                made.table(layer, dims["token"][0])
            lengths, steps = zip(*dims.values(), strict=True)
            at = address + i * layer_step
            part = _Part((blocks, *lengths), (step, *steps), dtype, at, getattr(chunk.raw_data, "device", "cpu"))
            made.put(part, " ".join(["block", *dims]), made.attention(layer))
        address += shape[0] * strides[0]
    return made.finish()


def _lmcache_pool(made: Assembly, chunk: Any) -> tuple[int, int, int]:
    """Where the pool of a chunk begins, how many bytes lie between chunks, and how many chunks there are."""
    raw = _flat(chunk.raw_data)
    allocator = chunk.parent_allocator
    if not hasattr(allocator, "paged_buffers"):
        return raw.offset_bytes, raw.end_bytes - raw.offset_bytes, 1
    buffer, step = _flat(allocator.buffer), allocator.align_bytes
    at = buffer.offset_bytes + chunk.metadata.address * step
    if raw.offset_bytes != at:
        raise differ("BOUNDS", f"read chunk {chunk.metadata.address} of LMCache", f"{at:#x}", f"{raw.offset_bytes:#x}")
    made.allocations.add((device_of(allocator.buffer), buffer.offset_bytes, buffer.end_bytes))
    return buffer.offset_bytes, step, len(allocator.paged_buffers)


def _flat(tensor: Any) -> View:
    """A tensor of one dimension, as a view of which each element is a block."""
    return view_of(tensor, "block", name="memory", group="memory", region=everywhere(tensor))
