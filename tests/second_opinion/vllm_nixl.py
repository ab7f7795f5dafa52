"""vLLM's NIXL connector: its pull worker as released, with an agent that records transfers.

Each rank's worker registers its caches (`register_kv_caches`). A destination takes the offers of the source ranks that
it asks for (`handshake_target_ranks`, `add_remote_agent`, with all their checks), reads a request
(`_read_blocks_for_req`) and ends it (`get_transfer_results`). Where blocks differ in size the last step reorders slots.
It runs here on addresses in place of values, so that the comparison is of where bytes end up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from benchmarks.peers.loading import RefusedError, module
from benchmarks.peers.vllm_workers import PACKAGE, connect, request_of, worker_of
from kvplan.testing.conformance import EngineMemory, PairCase, Side, sides
from tests.second_opinion.copies import Copies
from tests.second_opinion.peers import NotRunError, Peer

ORDERS: Final = ("LBHNKD", "LBNHKD", "LHBNKD", "BLHNKD", "BLNHKD", "BHLNKD")
"""The six orders of KVCacheLayout; K and V are side by side in the content."""


def pairs() -> Iterator[PairCase]:
    """Engines of one model: TP sizes and orders; block sizes, with and without a prefix; latents and DCP."""
    for heads in (1, 2, 4, 8, 12):
        every = list(sides(order=ORDERS, heads=[heads], tp=[1, 2, 3, 4, 6, 8, 16]))
        for source, destination in itertools.product(every, every):
            if source.order == destination.order or source.tp == destination.tp == 2:
                yield PairCase(source, destination, 24)
    for order, heads, start in itertools.product(ORDERS[:2], (1, 2, 4, 8), (0, 24)):
        every = list(sides(order=[order], heads=[heads], tp=[1, 2, 4, 8], tokens=[2, 3, 4, 8]))
        yield from (
            PairCase(*two, 48, start) for two in itertools.product(every, every) if two[0].tokens != two[1].tokens
        )
    for tokens, more, start in itertools.product((2, 4), (1, 2), (0, 1)):
        first, second = (_latents(size, tokens) for size in (tokens, tokens * more))
        for source, destination in itertools.product(first, second):
            span = np.lcm(source.tokens * source.dcp, destination.tokens * destination.dcp)
            yield PairCase(source, destination, int(span) * 2, int(span) * start)


def _latents(tokens: int, other: int) -> list[Side]:
    """Latents whole on every rank, or positions interleaved by a block of this engine or of the other."""
    whole = [Side("LBND", 1, tp, tokens) for tp in (1, 2, 3, 4, 8)]
    runs = sorted({tokens, other})
    return whole + [Side("LBND", 1, tp, tokens, tp, interleave=run) for tp in (2, 3, 4) for run in runs]


def plan(pair: PairCase, source: EngineMemory, destination: EngineMemory) -> Copies:
    """What all destination workers read."""
    if any(side.contexts > 1 and side.interleave == 1 for side in (pair.source, pair.destination)):
        raise NotRunError("vLLM sets the interleave to a block")
    sources = {rank: worker_of(source, rank) for rank in source.side.ranks}
    workers = (worker_of(destination, rank) for rank in destination.side.ranks)
    return Copies.join(_read(worker, pair, source, destination, sources) for worker in workers)


def _read(
    worker: Any, pair: PairCase, source: EngineMemory, destination: EngineMemory, sources: dict[int, Any]
) -> Copies:
    """What one worker reads, after the handshakes that it asks for."""
    source_ids, destination_ids = (engine.table.ids.tolist() for engine in (source, destination))
    try:
        connect(worker, source.side, sources, "source")
        request = request_of(source.side, source_ids, destination_ids, pair.stop, "source", destination.table.first)
        worker._engine_by_address["host", 1] = "source"
        worker._recving_metadata["request"] = request
        worker._read_blocks_for_req("request", request)
        moved = Copies.of(worker.nixl_wrapper.copies())
        worker.device_kv_caches = _addresses(worker.device_kv_caches)
        worker.get_transfer_results()
    except (AssertionError, RuntimeError, ValueError) as error:
        raise RefusedError(error) from error
    return _settled(moved, worker.device_kv_caches)


def _addresses(caches: dict[str, Any]) -> dict[str, Any]:
    """Tensors of the shapes of caches that hold the address of each byte in place of the byte."""
    torch = module("torch")
    found = {}
    for name, cache in caches.items():
        index = np.indices(cache.shape)
        found[name] = torch.from_numpy(cache.data_ptr() + np.tensordot(cache.stride(), index, 1))
        found[name].before = found[name].clone()
    return found


def _settled(moved: Copies, caches: dict[str, Any]) -> Copies:
    """The copies, with writes where the bytes are after the worker's last step."""
    before = np.concatenate([cache.before.numpy().ravel() for cache in caches.values()])
    after = np.concatenate([cache.numpy().ravel() for cache in caches.values()])
    if np.array_equal(before, after):
        return moved
    # one row for each byte, in order of the address written: after[i] came to before[i]
    writes, reads = moved.by_byte
    at = np.minimum(np.searchsorted(writes, after), len(writes) - 1)
    kept = writes[at] == after
    return Copies.of([(reads[at[kept]], before[kept], np.ones(kept.sum(), np.int64))], moved.posted)


PEER: Final = Peer("vLLM NIXL (pull)", f"{PACKAGE}: NixlPullConnectorWorker", pairs, plan)
