"""Megatron-LM's `plan_kv_reshard`, as in its repository: the layers and KV heads that each two ranks exchange.

Blocks, layouts and addresses are no part of its plans: here they are those of both arrays, which have equal blocks.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from benchmarks.peers.loading import RefusedError, module
from kvplan.testing.conformance import EngineMemory, PairCase
from tests.second_opinion.copies import Copies
from tests.second_opinion.peers import NotRunError, Peer
from tests.second_opinion.vllm_nixl import pairs

MODULE: Final = "megatron.core.inference.disaggregation.kv_reshard"


def plan(case: PairCase, source: EngineMemory, destination: EngineMemory) -> Copies:
    """What each source rank sends to each destination rank."""
    if case.start or source.side.tokens != destination.side.tokens or not source.side.has_heads:
        raise NotRunError("blocks, prefixes and latents are no part of its plans")
    if source.side.order != destination.side.order:
        raise NotRunError("layouts are no part of its plans")
    reshard = module(MODULE)
    try:
        sides = [_layouts(engine) for engine in (source, destination)]
    except ValueError as error:
        raise RefusedError(error) from error
    parts = []
    for transfer in reshard.plan_kv_reshard(*sides):
        here, there = sides[0][transfer.src_rank], sides[1][transfer.dst_rank]
        reads, writes = (
            _addresses(engine, rank, layers, heads)
            for engine, rank, layers, heads in (
                (source, transfer.src_rank, transfer.src_layer_slice(here), transfer.src_head_slice(here)),
                (destination, transfer.dst_rank, transfer.dst_layer_slice(there), transfer.dst_head_slice(there)),
            )
        )
        parts.append((reads, writes, np.ones(len(reads), np.int64)))
    return Copies.of(parts)


def _layouts(engine: EngineMemory) -> list[Any]:
    side = engine.side
    return [
        module(MODULE).KVShardLayout(engine.layers, side.heads, side.tp, rank, 1, 0, global_rank=rank)
        for rank in side.ranks
    ]


def _addresses(engine: EngineMemory, rank: int, layers: slice, heads: slice) -> Any:
    """The address of each byte of some layers and heads, by layer, block, K or V, head, token and dim."""
    found = []
    for cache in engine.ranks[rank].caches[layers]:
        strides = dict(zip(cache.letters, cache.memory.strides, strict=True))
        sizes = dict(zip(cache.letters, cache.memory.shape, strict=True))
        offsets = np.zeros((), np.int64)
        for letter in "BKHND":
            indices = np.array(engine.block_ids) if letter == "B" else np.arange(sizes[letter])
            offsets = np.add.outer(
                offsets, indices[heads] * strides[letter] if letter == "H" else indices * strides[letter]
            )
        found.append(cache.address + offsets.ravel())
    return np.concatenate(found)


PEER: Final = Peer("Megatron-LM", f"{MODULE}: plan_kv_reshard", pairs, plan, package="megatron")
