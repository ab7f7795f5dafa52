"""from_lmcache, compared with LMCache's own indexing of its chunks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import KVPlanError
from kvplan.bridges import RankInfo, from_lmcache
from tests.engine_memory import (
    BLOCKS,
    DIM,
    GQA,
    HEADS,
    MLA,
    TABLES,
    TOKENS,
    check,
    latents_of,
    values_of,
)

# LMCache's own objects, with the attributes that from_lmcache reads.
MemoryFormat = attrs.make_class("MemoryFormat", ["name"])
PagedTensorMemoryAllocator = attrs.make_class("PagedTensorMemoryAllocator", ["buffer", "align_bytes", "paged_buffers"])


@attrs.frozen
class MemoryObjMetadata:
    """What LMCache knows of a chunk."""

    fmt: Any
    address: int
    shapes: Sequence[tuple[int, ...]] | None
    dtypes: Sequence[str] | None
    shape: tuple[int, ...] = ()
    dtype: str = "torch.int32"


@attrs.frozen
class TensorMemoryObj:
    """LMCache's chunk."""

    metadata: MemoryObjMetadata
    raw_data: Any
    parent_allocator: Any = None

    @property
    def tensor(self) -> Any:
        """The chunk in its (first) shape."""
        shape = self.metadata.shapes[0] if self.metadata.shapes else self.metadata.shape
        return self.raw_data[: math.prod(shape) * 4].view(np.int32).reshape(shape)

    @property
    def heads(self) -> Any:
        """The chunk with a dimension of heads."""
        return self.tensor.reshape(*self.tensor.shape[:-1], HEADS, DIM)


def lmcache(zeros: Any, fmt: str, *shapes: tuple[int, ...], blocks: int = BLOCKS) -> list[TensorMemoryObj]:
    """All chunks of a paged allocator."""
    size = sum(map(math.prod, shapes)) * 4
    buffer = zeros(blocks * size, dtype=np.uint8)
    allocator = PagedTensorMemoryAllocator(buffer, size, np.split(buffer, blocks))
    metas = [MemoryObjMetadata(MemoryFormat(fmt), i, shapes, ["torch.int32"] * len(shapes)) for i in range(blocks)]
    return [TensorMemoryObj(m, raw, allocator) for m, raw in zip(metas, allocator.paged_buffers, strict=True)]


def test_chunks_of_all_layers(zeros: Any) -> None:
    """KV_2LTD: K or V, layer, token, all heads."""
    chunks = lmcache(zeros, "KV_2LTD", (2, 3, 8, HEADS * DIM))
    for layer, half, head, block, slot, value in values_of(range(3), range(HEADS), 8, TABLES["attn"]):
        chunks[block].heads[half, layer, slot, head] = value
    worker = from_lmcache(GQA, RankInfo("cache"), chunks[3])
    assert [region.size_bytes for region in worker.regions] == [chunks[0].parent_allocator.buffer.nbytes]
    check(GQA, [worker])


def test_a_worker_keeps_the_memory_of_its_engine(zeros: Any) -> None:
    """A cache that its engine drops stays where the worker says that it is."""
    chunks = lmcache(zeros, "KV_2LTD", (2, 3, 8, HEADS * DIM))
    is_alive = weakref.ref(chunks[0].parent_allocator.buffer)
    worker = from_lmcache(GQA, RankInfo("cache"), chunks[3])
    del chunks
    assert is_alive() is not None
    del worker
    assert is_alive() is None


def test_groups_of_layers(zeros: Any) -> None:
    """In a chunk of two shapes, the layers of the second follow those of the first."""
    chunks = lmcache(zeros, "KV_2LTD", (2, 2, 8, HEADS * DIM), (2, 1, 8, HEADS * DIM))
    order = [0, 2, 1]
    for layer, half, head, block, slot, value in values_of(range(3), range(HEADS), 8, TABLES["attn"]):
        raw, at = chunks[block].raw_data.view(np.int32), order.index(layer)
        part = raw[: 4 * 8 * 32].reshape(2, 2, 8, 4, 8) if at < 2 else raw[4 * 8 * 32 :].reshape(2, 1, 8, 4, 8)
        part[half, at % 2, slot, head] = value
    worker = from_lmcache(GQA, RankInfo("cache"), chunks[0], layers=[order[:2], order[2:]])
    check(GQA, [worker])


@pytest.mark.parametrize("fmt", ["KV_T2D", "KV_2TD"])
def test_chunks_of_one_layer(zeros: Any, fmt: str) -> None:
    """One layer per chunk: each layer has a block table of its own in the one pool."""
    shape = (8, 2, HEADS * DIM) if fmt == "KV_T2D" else (2, 8, HEADS * DIM)
    chunks = lmcache(zeros, fmt, shape, blocks=12)
    tables = {f"attn.{layer}" if layer else "attn": [11 - layer - 3 * i for i in range(4)] for layer in range(3)}
    for layer, table in enumerate(tables.values()):
        for _, half, head, block, slot, value in values_of([layer], range(HEADS), 8, table):
            chunks[block].heads[(slot, half, head) if fmt == "KV_T2D" else (half, slot, head)] = value
    worker = from_lmcache(GQA, RankInfo("cache"), chunks[0])
    check(GQA, [worker], tables)


def test_latents(zeros: Any) -> None:
    """KV_MLA_FMT: one, layer, token, latent."""
    chunks = lmcache(zeros, "KV_MLA_FMT", (1, 3, 8, 8))
    for layer, block, slot, value in latents_of(range(3), TABLES["attn"]):
        chunks[block].tensor[0, layer, slot] = value
    check(MLA, [from_lmcache(MLA, RankInfo("cache"), chunks[0])])


def test_latents_of_one_layer(zeros: Any) -> None:
    """KV_MLA_FMT with one layer per chunk: token, latent."""
    chunks = lmcache(zeros, "KV_MLA_FMT", (8, 8), blocks=12)
    tables = {f"attn.{layer}" if layer else "attn": [layer + 3 * i for i in range(4)] for layer in range(3)}
    for layer, table in enumerate(tables.values()):
        for _, block, slot, value in latents_of([layer], table):
            chunks[block].tensor[slot] = value
    worker = from_lmcache(MLA, RankInfo("cache"), chunks[0])
    check(MLA, [worker], tables)


def test_chunk_of_fewer_tokens(zeros: Any) -> None:
    """A chunk that is not full stores its tokens closer together, and needs a worker of its own over the same pool."""
    chunks = lmcache(zeros, "KV_2LTD", (2, 3, 64, HEADS * DIM))
    meta = attrs.evolve(chunks[5].metadata, shapes=[(2, 3, TOKENS, HEADS * DIM)])
    size = 2 * 3 * TOKENS * HEADS * DIM * 4
    chunk = attrs.evolve(chunks[5], metadata=meta, raw_data=chunks[5].raw_data[:size])
    for layer, half, head, _, position, value in values_of(range(3), range(HEADS), TOKENS, [0]):
        chunk.heads[half, layer, position, head] = value
    worker = from_lmcache(GQA, RankInfo("cache"), chunk)
    assert (worker.groups[0].tokens_per_block, worker.views[0].num_blocks) == (TOKENS, BLOCKS)
    assert [region.size_bytes for region in worker.regions] == [chunk.parent_allocator.buffer.nbytes]
    check(GQA, [worker], {"attn": [5]})


def test_chunk_of_another_allocator(zeros: Any) -> None:
    """A chunk whose allocator has no pages is a pool of one block; it may have a single shape without a list."""
    raw = zeros(2 * 3 * TOKENS * HEADS * DIM * 4, dtype=np.uint8)
    meta = MemoryObjMetadata(MemoryFormat("KV_2LTD"), 12288, None, None, (2, 3, TOKENS, HEADS * DIM))
    chunk = TensorMemoryObj(meta, raw)
    for layer, half, head, _, position, value in values_of(range(3), range(HEADS), TOKENS, [0]):
        chunk.heads[half, layer, position, head] = value
    check(GQA, [from_lmcache(GQA, RankInfo("cache"), chunk)], {"attn": [0]})


def test_contradictions(zeros: Any) -> None:
    """An unknown format, a wrong number of layers and a chunk at another address are refused with both values."""
    (chunk, *_) = lmcache(zeros, "KV_2LTD", (2, 3, 8, HEADS * DIM))
    binary = attrs.evolve(chunk, metadata=attrs.evolve(chunk.metadata, fmt=MemoryFormat("BINARY")))
    moved = attrs.evolve(chunk, metadata=attrs.evolve(chunk.metadata, address=1))
    for wrong, layers, text in (
        (binary, None, "LAYOUT: cannot read a chunk of LMCache: expected KV_2LTD of 4 dimensions"),
        (chunk, [[0, 1], [2]], "SIZE: cannot read a chunk of LMCache: expected lists of layers for 1 shapes, got 2"),
        (chunk, [[0, 1]], "SIZE: cannot read a chunk of LMCache: expected 2 layers, got 3"),
        (moved, None, "BOUNDS: cannot read chunk 1 of LMCache: expected 0x"),
    ):
        with pytest.raises(KVPlanError) as caught:
            from_lmcache(GQA, RankInfo("cache"), wrong, layers)
        assert str(caught.value).startswith(text)
