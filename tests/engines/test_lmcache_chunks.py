"""from_lmcache on chunks of LMCache's own allocator, written through LMCache's own views."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvplan.bridges import RankInfo, from_lmcache
from tests.engine_memory import BLOCKS, DIM, GQA, HEADS, MLA, TABLES, TOKENS, check, latents_of, values_of

torch = pytest.importorskip("torch")
management = pytest.importorskip("lmcache.v1.memory_management", reason="needs LMCache")
paged = pytest.importorskip("lmcache.v1.memory_allocators.paged_tensor_memory_allocator", reason="needs LMCache")

INFO = RankInfo("cache")


def allocator_of(fmt: str, *shapes: tuple[int, ...], blocks: int = BLOCKS) -> Any:
    """A paged allocator of chunks of these shapes."""
    buffer = torch.zeros(blocks * sum(map(math.prod, shapes)), dtype=torch.int32)
    sizes = [torch.Size(shape) for shape in shapes]
    return paged.PagedTensorMemoryAllocator(buffer, sizes, [torch.int32] * len(sizes), management.MemoryFormat[fmt])


def chunks_of(fmt: str, *shapes: tuple[int, ...], blocks: int = BLOCKS) -> list[Any]:
    """All chunks of a paged allocator, by address."""
    allocator = allocator_of(fmt, *shapes, blocks=blocks)
    sizes = [torch.Size(shape) for shape in shapes]
    chunks = allocator.batched_allocate(sizes, allocator.dtypes, blocks, management.MemoryFormat[fmt])
    return sorted(chunks, key=lambda chunk: chunk.metadata.address)


def heads_of(tensor: Any) -> Any:
    """A chunk's view with a dimension of heads."""
    return tensor.view(*tensor.shape[:-1], HEADS, DIM)


def test_chunks_of_all_layers() -> None:
    """KV_2LTD: K or V, layer, token, all heads."""
    chunks = chunks_of("KV_2LTD", (2, 3, 8, HEADS * DIM))
    for layer, half, head, block, slot, value in values_of(range(3), range(HEADS), 8, TABLES["attn"]):
        heads_of(chunks[block].tensor)[half, layer, slot, head] = torch.from_numpy(value)
    check(GQA, [from_lmcache(GQA, INFO, chunks[3])])


def test_groups_of_layers() -> None:
    """In a chunk of two shapes, the layers of the second follow those of the first."""
    chunks = chunks_of("KV_2LTD", (2, 2, 8, HEADS * DIM), (2, 1, 8, HEADS * DIM))
    order = [0, 2, 1]
    for layer, half, head, block, slot, value in values_of(range(3), range(HEADS), 8, TABLES["attn"]):
        group, index = divmod(order.index(layer), 2)
        heads_of(chunks[block].get_tensor(group))[half, index, slot, head] = torch.from_numpy(value)
    check(GQA, [from_lmcache(GQA, INFO, chunks[0], layers=[order[:2], order[2:]])])


@pytest.mark.parametrize("fmt", ["KV_T2D", "KV_2TD"])
def test_chunks_of_one_layer(fmt: str) -> None:
    """One layer per chunk: each layer has a block table of its own in the one pool."""
    chunks = chunks_of(fmt, (8, 2, HEADS * DIM) if fmt == "KV_T2D" else (2, 8, HEADS * DIM), blocks=12)
    tables = {f"attn.{layer}" if layer else "attn": [11 - layer - 3 * i for i in range(4)] for layer in range(3)}
    for layer, table in enumerate(tables.values()):
        for _, half, head, block, slot, value in values_of([layer], range(HEADS), 8, table):
            at = (slot, half, head) if fmt == "KV_T2D" else (half, slot, head)
            heads_of(chunks[block].tensor)[at] = torch.from_numpy(value)
    check(GQA, [from_lmcache(GQA, INFO, chunks[0])], tables)


def test_latents() -> None:
    """KV_MLA_FMT: one, layer, token, latent."""
    chunks = chunks_of("KV_MLA_FMT", (1, 3, 8, 8))
    for layer, block, slot, value in latents_of(range(3), TABLES["attn"]):
        chunks[block].tensor[0, layer, slot] = torch.from_numpy(value)
    check(MLA, [from_lmcache(MLA, INFO, chunks[0])])


def test_chunk_of_fewer_tokens() -> None:
    """A chunk that is allocated for fewer tokens stores them closer together, and needs a worker of its own."""
    allocator, shape = allocator_of("KV_2LTD", (2, 3, 64, HEADS * DIM)), torch.Size((2, 3, TOKENS, HEADS * DIM))
    chunks = [allocator.allocate(shape, torch.int32) for _ in range(6)]
    for layer, half, head, _, position, value in values_of(range(3), range(HEADS), TOKENS, [0]):
        heads_of(chunks[5].tensor)[half, layer, position, head] = torch.from_numpy(value)
    check(GQA, [from_lmcache(GQA, INFO, chunks[5])], {"attn": [chunks[5].metadata.address]})
