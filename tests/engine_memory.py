"""Caches that engines fill, for tests of bridges: a value is known by its coordinates, and looked up after a move."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvplan import Blocks, Model, View, Worker, plan_reads
from kvplan.models.tensors import attention, delta, latent, mamba1, mamba2, sparse_latent, with_index_keys
from kvplan.verification import FakeMemory

HEADS, DIM, TOKENS, BLOCKS = 4, 8, 29, 8
"""Heads of K and V, their size, the tokens of a request, and the blocks of a pool."""

GQA = Model("gqa", (attention(HEADS, DIM),) * 3, "int32")
SLIDING = Model("sliding", (attention(HEADS, DIM), attention(HEADS, DIM, "swa", 8)) * 2, "int32")
MLA = Model("mla", (latent(6, 2),) * 3, "int32")
MAMBA1 = Model("mamba1", (mamba1(12, 2, 3, "int16", "int32"), attention(HEADS, DIM)), "int32")
MAMBA2 = Model("mamba2", (mamba2(4, 2, 2, 5, 3, "int16", "int32"), attention(HEADS, DIM)), "int32")
DELTA = Model("delta", (delta(2, 3, 4, 2, 3, "int32", "int16"), attention(HEADS, DIM)), "int32")
INDEXED = Model("indexed", (attention(HEADS, DIM), with_index_keys(attention(HEADS, DIM), 6)), "int32")
SPARSE = Model("sparse", (sparse_latent(512, 64, 128),), "uint8")

TABLES = {"attn": [7, 2, 5, 0, 6, 3], "attn.1": [1, 4, 3, 7, 0, 2], "attn.2": [2, 0, 1, 5, 4, 6]}
"""Blocks of the request, in order of position."""

PRIMES = (1000003, 10007, 101, 7919, 31)


def meaning(name: str, dtype: Any, **coordinates: Any) -> Any:
    """What the element of a tensor at these coordinates holds: another value for nearly every other."""
    found: Any = zlib.crc32(name.encode())
    for key, prime in zip(sorted(coordinates), PRIMES, strict=False):
        found = found + np.asarray(coordinates[key], np.int64) * prime
    return (found % 32749).astype(np.dtype(dtype)) + np.dtype(dtype).type(1)


def heads(rank: int, tp: int) -> range:
    """Heads of a rank, of a size of TP that divides them or is divided by them."""
    return range(rank * HEADS // tp, -(-(rank + 1) * HEADS // tp))


def slots(tokens_per_block: int, table: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Each position of the request, with its block and slot."""
    for position in range(TOKENS):
        yield position, table[position // tokens_per_block], position % tokens_per_block


def kv(layer: int | str, half: int, head: int, position: int) -> Any:
    """K (0) or V (1) of a head at a position, in a layer or in one that has a name, as drafts have."""
    name = layer if isinstance(layer, str) else f"layers.{layer}"
    return meaning(f"{name}.attn", np.int32, kv=half, head=head, token=position, dim=np.arange(DIM))


def latent_of(layer: int, position: int) -> Any:
    """The latent of a layer at a position."""
    return meaning(f"layers.{layer}.attn", np.int32, token=position, dim=np.arange(8))


def values_of(
    layers: Iterable[int | str], held: range, tokens_per_block: int, table: Sequence[int]
) -> Iterator[tuple[Any, int, int, int, int, Any]]:
    """Layer, K (0) or V (1), the head's place among those held, block, slot and value of all K and V of the request."""
    for layer in layers:
        for position, block, slot in slots(tokens_per_block, table):
            for half in range(2):
                for i, head in enumerate(held):
                    yield layer, half, i, block, slot, kv(layer, half, head, position)


def latents_of(layers: Iterable[int], table: Sequence[int]) -> Iterator[tuple[int, int, int, Any]]:
    """Layer, block of 8 slots, slot and value of all latents of the request."""
    for layer in layers:
        for position, block, slot in slots(8, table):
            yield layer, block, slot, latent_of(layer, position)


def index_of(layer: int, position: int) -> Any:
    """The index key of INDEXED's layer at a position."""
    return meaning(f"layers.{layer}.index", np.int32, token=position, dim=np.arange(6))


def names_of(layers: Sequence[int], ending: str = "self_attn.attn") -> list[str]:
    """vLLM's names of layers."""
    return [f"model.layers.{layer}.{ending}" for layer in layers]


def fill_vllm(cache: Any, layer: int, held: range, tokens: int, table: Sequence[int]) -> None:
    """K and V of a request, as vLLM indexes a cache [block, head, slot, content]."""
    for _, half, i, block, slot, value in values_of([layer], held, tokens, table):
        cache[block, i, slot, half * DIM : (half + 1) * DIM] = value


def states_of(model: Model, order: str) -> tuple[Any, Any]:
    """The two states of a model's first layer, as an engine with one rank keeps them."""
    *convs, ssm = model.layers[0]
    rows = []
    for tensor in convs:
        channels, steps = (np.arange(n) for _, n in tensor.axes)
        at = np.meshgrid(channels, steps, indexing="ij")
        rows.append(meaning(f"layers.0.{tensor.kind}", tensor.dtype, channel=at[0], step=at[1]))
    conv = np.concatenate(rows)
    grid = np.meshgrid(*[np.arange(n) for _, n in ssm.axes], indexing="ij")
    state = meaning("layers.0.ssm", ssm.dtype, **dict(zip((name for name, _ in ssm.axes), grid, strict=True)))
    return np.ascontiguousarray(conv.T if order == "SD" else conv), state


def check(model: Model, sources: Sequence[Worker], remote: Mapping[str, Any] | None = None, tp: int = 2) -> None:
    """Moves the request from ``sources`` to engines of the model, and looks up each of its values.

    ``remote`` are its block tables in the sources; left out, it is in the blocks of ``TABLES["attn"]``.
    """
    remote = {group: Blocks(ids) for group, ids in (remote or {"attn": TABLES["attn"]}).items()}
    destinations = model.engine("decode", tp=tp, layout="BLHNC", tokens_per_block=5, num_blocks=9, conv_order="DS")
    ids = {group: [8, 1, 6, 3, 0, 4] if tokens else [5] for group, tokens in blocks_of(destinations[0]).items()}
    local = {group: Blocks(table) for group, table in ids.items()}
    tokens = {group: (0, TOKENS) for group, size in blocks_of(destinations[0]).items() if size}
    with FakeMemory([*sources, *destinations]) as memory:
        for worker in sources:
            for region in worker.regions:
                assert region.owners, f"{region}: nothing keeps its memory"
                memory.write(worker, region.address, ctypes.string_at(region.address, region.size_bytes))
        for worker in destinations:
            for spec in plan_reads(worker, sources).bind(local=local, remote=remote, tokens=tokens):
                memory.execute(spec)
            assert {view.name for view in worker.views} == set(worker.tensors)
            for view in worker.views:
                look_up(memory.array(worker, view), view, ids[view.group])


def blocks_of(worker: Worker) -> dict[str, int | None]:
    """Tokens in a block of each group."""
    return {group.name: group.tokens_per_block for group in worker.groups}


def look_up(cells: Any, view: View, table: Sequence[int]) -> None:
    """Every value of the request that a view holds is what its coordinates mean."""
    names = [axis.name for axis in view.axes]
    grid = np.meshgrid(*[np.arange(axis.start, axis.stop) for axis in view.axes], indexing="ij")
    for ordinal, block in enumerate(table):
        found = cells[block].copy().view(view.dtype)[..., 0]
        at = dict(zip(names, grid, strict=True))
        wanted = np.ones(found.shape, bool)
        if "token" in at:
            at["token"] = at["token"] + ordinal * view.sizes["token"]
            wanted = at["token"] < TOKENS
        np.testing.assert_array_equal(found[wanted], meaning(view.name, view.dtype, **at)[wanted], view.name)


def fill_index(pages: Any, table: Sequence[int]) -> None:
    """An indexer's pages, of bytes: keys of all slots, then their scales."""
    for position, block, slot in slots(8, table):
        for kind, start, size in (("index", slot * 128, 128), ("index.scale", 8 * 128 + slot * 4, 4)):
            pages[block, start : start + size] = meaning(f"layers.0.{kind}", "u1", token=position, byte=np.arange(size))


def sparse_row(position: int) -> Any:
    """The latent of SPARSE at a position, in bytes."""
    return meaning("layers.0.attn", "u1", token=position, byte=np.arange(656))
