"""vLLM's offloading connector: `derive_canonical_mappings`, by which any ranks share one page in CPU memory.

What one engine stores in such a page and another engine loads from it, taken together, is what kvplan plans from the
first to the second.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from benchmarks.peers.loading import RefusedError, module
from kvplan import Blocks
from kvplan._arrays import Ints
from kvplan.testing.conformance import DIM, EngineMemory, PairCase, Side, make, sides
from tests.second_opinion.copies import Copies
from tests.second_opinion.peers import NotRunError, Peer

MODULE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping"
ORDERS: Final = ("LBHNKD", "LBNHKD", "LBKHND", "LBKNHD", "LBND")
"""Heads or slots outside, K and V side by side or in halves of the page; and latents."""


def pairs() -> Iterator[PairCase]:
    """Engines of one order and model, context-parallel ones too; one in eight of all whose blocks span 8 positions."""
    sizes: dict[str, Any] = {"tp": (1, 2, 3, 4, 8), "dcp": (1, 2, 4), "pcp": (1, 2), "interleave": (1, 2, 4)}
    count = 0
    for order, heads in itertools.product(ORDERS, (1, 2, 4, 8, 12)):
        if "H" not in order and heads > 1:
            continue
        grown = sides(order=[order], heads=[heads], tokens=(2, 4, 8), **sizes)
        every = [
            side for side in grown if side.tokens * side.contexts == 8 and side.contexts >= min(2, side.interleave)
        ]
        for source, destination in itertools.product(every, every):
            count += 1
            if count % 8 == 1:
                # as many positions to each worker: runs go round once in interleave * contexts positions
                rounds = [side.interleave * side.contexts for side in (source, destination)]
                yield PairCase(source, destination, math.lcm(8, *rounds) * (2 if max(rounds) > 8 else 3))


def plan(pair: PairCase, source: EngineMemory, destination: EngineMemory) -> Copies:
    """Which byte of a source is stored where in the shared page, and which byte there is loaded to where."""
    if pair.start or pair.source.order != pair.destination.order:
        raise NotRunError("a store has whole prompts, in the layout that wrote them")
    stored, loaded = (_mappings(engine.side) for engine in (source, destination))
    if stored[0][0].canonical_page_size_bytes != loaded[0][0].canonical_page_size_bytes:
        raise RefusedError("canonical pages differ in size")
    parts, posted = [], 0
    for block, (source_id, destination_id) in enumerate(
        zip(source.table.ids.tolist(), destination.table.ids.tolist(), strict=True)
    ):
        for layer in range(2):
            size = stored[0][layer].canonical_page_size_bytes
            origin = np.zeros(size, np.int64)
            for rank, mapping in zip(source.ranks, stored, strict=True):
                if mapping[layer].is_writer(block):
                    page, local, canonical = _page(rank.caches[layer], source_id), *_bytes(mapping[layer].runs)
                    origin[canonical] = page + local
                    posted += _fragments(mapping[layer])
            for rank, mapping in zip(destination.ranks, loaded, strict=True):
                page = _page(rank.caches[layer], destination_id)
                local, canonical = _bytes(mapping[layer].runs)
                parts.append((origin[canonical], page + local, np.ones(len(local), np.int64)))
                posted += _fragments(mapping[layer])
    return Copies.of(parts, posted)


def _fragments(mapping: Any) -> int:
    return sum(run.num_fragments for run in mapping.runs)


def _page(cache: Any, block: int) -> int:
    return int(cache.address + block * cache.memory.strides[0])


def _bytes(runs: Any) -> tuple[Ints, Ints]:
    """Byte by byte, the offsets in a worker's page and in the shared one, by the rule that CopyRun states."""
    sides_of = []
    for offset, stride in (("local_offset", "local_stride"), ("canonical_offset", "canonical_stride")):
        starts = [getattr(run, offset) + np.arange(run.num_fragments) * getattr(run, stride) for run in runs]
        each = [
            (start[:, None] + np.arange(run.fragment_size)).ravel() for start, run in zip(starts, runs, strict=True)
        ]
        sides_of.append(np.concatenate(each))
    return sides_of[0], sides_of[1]


@functools.cache
def _mappings(side: Side) -> list[list[Any]]:
    """The mapping of each rank and layer. Refused where the peer falls back to a page that it does not understand."""
    mapping = module(MODULE)
    torch = module("torch")
    engine = make("offloaded", side, Blocks([]), 2)
    found = []
    for number, rank in enumerate(engine.ranks):
        caches = {f"layers.{layer}": _tensor(torch, cache) for layer, cache in enumerate(rank.caches)}
        spec = _spec(side, torch)
        blocks = len(rank.caches[0].memory)
        group = SimpleNamespace(layer_names=list(caches), kv_cache_spec=spec)
        config = _config(side, number)
        mappings = mapping.derive_canonical_mappings(
            config, SimpleNamespace(num_blocks=blocks, kv_cache_groups=[group]), caches
        )
        context = mapping._RankContext(side.tp, side.dcp, side.pcp, side.interleave, side.heads, number)
        for name in caches:
            if mapping._layer_mapping(spec, caches[name], blocks, context) is None:
                raise RefusedError("no certified mapping: falls back to an opaque page")
        found.append([mappings[name] for name in caches])
    return found


def _config(side: Side, rank: int) -> Any:
    parallel = SimpleNamespace(
        tensor_parallel_size=side.tp,
        prefill_context_parallel_size=side.pcp,
        decode_context_parallel_size=side.dcp,
        cp_kv_cache_interleave_size=side.interleave,
        world_size=side.tp * side.pcp,
        rank=rank,
    )
    model = SimpleNamespace(get_total_num_kv_heads=lambda: side.heads)
    return SimpleNamespace(parallel_config=parallel, model_config=model)


def _spec(side: Side, torch: Any) -> Any:
    interface = module("vllm.v1.kv_cache_interface")
    first, stop = side.held(0)
    kind = interface.FullAttentionSpec if side.has_heads else interface.MLAAttentionSpec
    return kind(block_size=side.tokens, num_kv_heads=stop - first, head_size=DIM, dtype=torch.uint8)


def _tensor(torch: Any, cache: Any) -> Any:
    """The cache as the peer is handed it: dimensions in the order of its shapes, strides as they are in memory."""
    tensor = torch.from_numpy(cache.memory)
    letters = cache.letters
    if "K" not in letters:
        return tensor[:, None]
    if letters[-2:] == "KD":
        order = [letters.index(letter) for letter in "BHNKD"]
        shaped = tensor.permute(order)
        return shaped.as_strided((*shaped.shape[:3], 2 * DIM), (*shaped.stride()[:3], 1))
    return tensor.permute([letters.index(letter) for letter in "BKNHD"])


PEER: Final = Peer("vLLM offloading", f"{MODULE}: derive_canonical_mappings", pairs, plan)
