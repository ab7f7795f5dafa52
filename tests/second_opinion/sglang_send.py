"""SGLang's senders: `send_kvcache` and `send_kvcache_slice` of its NIXL and Mooncake managers, as released.

A decode rank computes which prefill ranks send to it (`try_ensure_parallel_info`, with all its checks). Each of these
sends whole pages where TP sizes are equal or the cache is of latents, and slices of heads otherwise, which is the
choice of their `transfer_worker`. Managers have no processes and sockets, and agents that record in place of NIXL and
Mooncake.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from benchmarks.peers.agents import Wire
from benchmarks.peers.loading import RefusedError, module
from benchmarks.peers.sglang_managers import PACKAGE, Now, give, manager_of, prepare, senders_of
from kvplan.testing.conformance import EngineMemory, PairCase, sides
from tests.second_opinion.copies import Copies
from tests.second_opinion.peers import NotRunError, Peer

HEADS: Final = "KLBNHD"
"""K and V of each layer in arrays of their own, slots outside heads: the order of SGLang's caches."""

LATENTS: Final = "LBND"


def pairs() -> Iterator[PairCase]:
    """Engines of one model of all TP sizes, pages of 1, 2 and 4, a few of unequal pages; latents, and their DCP."""
    for heads, tokens in itertools.product((1, 2, 3, 4, 5, 6, 8, 10, 12, 16), (1, 2, 4)):
        every = list(sides(order=[HEADS], heads=[heads], tp=[1, 2, 3, 4, 5, 6, 8, 10, 12, 16], tokens=[tokens]))
        yield from (PairCase(*two, 6 * tokens) for two in itertools.product(every, every))
    for tokens in (1, 2, 4):
        every = list(sides(order=[LATENTS], tp=[1, 2, 3, 4, 6, 8], tokens=[tokens]))
        yield from (PairCase(*two, 6 * tokens) for two in itertools.product(every, every))
    for heads, (here, there) in itertools.product((2, 8), ((1, 4), (4, 1), (2, 4))):
        unequal = [list(sides(order=[HEADS], heads=[heads], tp=[1, 2, 4], tokens=[size])) for size in (here, there)]
        yield from (PairCase(*two, 8) for two in itertools.product(unequal[0], unequal[1]))


def dcp_pairs() -> Iterator[PairCase]:
    """Latents whose positions decode ranks share one by one, for Mooncake's `send_kvcache_dcp`."""
    for tokens, tp, dcp in itertools.product((1, 2, 4), (1, 2, 4, 8), (2, 4, 8)):
        for source in sides(order=[LATENTS], tp=[1, 2, 4], tokens=[tokens]):
            for destination in sides(order=[LATENTS], tp=[tp], tokens=[tokens], dcp=[dcp]):
                if dcp <= tp:
                    yield PairCase(source, destination, 3 * tokens * dcp)


def _check(case: PairCase) -> None:
    """Raise NotRunError for what these functions are not given."""
    if not {case.source.order, case.destination.order} <= {HEADS, LATENTS}:
        raise NotRunError("its pools have one layout here")
    if case.start:
        raise NotRunError("its scheduler decides which pages a cached prefix leaves")
    if case.source.contexts > 1 or (case.destination.contexts > 1 and case.destination.interleave > 1):
        raise NotRunError("contexts of prefill, or of more than a token in turn")


def plan_mooncake(pair: PairCase, source: EngineMemory, destination: EngineMemory) -> Copies:
    """What all prefill ranks write through Mooncake."""
    _check(pair)
    cls = module(f"{PACKAGE}.mooncake.conn").MooncakeKVManager
    wire = Wire()
    wire.kept = []
    for manager, rank in _transfers(cls, pair, source, destination):
        manager.engine = wire
        give(manager, enable_custom_mem_pool=False, max_transfer_batch_indices=0, state_strides_validated=set())
        ends = [cache.address for cache in destination.ranks[rank].caches]
        size = destination.ranks[rank].caches[0].memory[0].nbytes
        ids = source.table.ids.astype(np.int32), destination.table.ids.astype(np.int32)
        tp = destination.side.tp
        if destination.side.dcp > 1:
            manager.requires_dcp_relayout(destination.side.dcp, destination.side.context(rank))
            status = manager.send_kvcache_dcp(
                "peer", ids[0], ends, ids[1],
                dcp_token_item_lens=manager.prepare_dcp_token_item_lens([size] * len(ends), destination.side.dcp),
                dst_dcp_size=destination.side.dcp, dst_dcp_rank=destination.side.context(rank), src_page_offset=0,
                decode_prefix_len=0, num_kv_tokens=pair.stop, executor=Now(), dst_layer_ids=[],
                dst_tp_rank=rank, dst_attn_tp_size=tp,
            )  # fmt: skip
        elif manager.is_mla_backend or manager.attn_tp_size == tp:
            status = manager.send_kvcache("peer", ids[0], ends, ids[1], Now(), dst_layer_ids=[])
        else:
            status = manager.send_kvcache_slice("peer", ids[0], ends, ids[1], rank, tp, size, Now(), [])
        if status:
            raise RefusedError(f"send_kvcache_slice returns {status}: slice size exceeds target token slot size")
    return Copies.of(wire.kept)


def plan_nixl(pair: PairCase, source: EngineMemory, destination: EngineMemory) -> Copies:
    """What all prefill ranks write through NIXL."""
    _check(pair)
    if pair.destination.contexts > 1:
        raise NotRunError("contexts of decode")
    conn = module(f"{PACKAGE}.nixl.conn")
    copies: list[Any] = []
    for manager, rank in _transfers(conn.NixlKVManager, pair, source, destination):
        ids = source.table.ids.astype(np.int32), destination.table.ids.astype(np.int32)
        try:
            peer = prepare(manager, conn, destination, rank)
            if manager.is_mla_backend or manager.attn_tp_size == destination.side.tp:
                manager.send_kvcache("peer", ids[0], peer.dst_kv_ptrs, ids[1], 0)
            else:
                manager.send_kvcache_slice("peer", *ids)
        except AssertionError as error:
            raise RefusedError(
                f"_init_hetero_tp_prep_handle: {str(error) or 'tokens and head groups do not tile a slot'}"
            ) from error
        copies += manager.agent.copies()
    return Copies.of(copies)


def _transfers(cls: Any, pair: PairCase, source: EngineMemory, destination: EngineMemory) -> Iterator[tuple[Any, int]]:
    """A manager of each prefill rank that sends to a decode rank, and the decode rank."""
    for rank in destination.side.ranks:
        for sender in senders_of(cls, source.side, destination, rank):
            if sender not in source.side.ranks:
                raise RefusedError(f"decode rank {rank} asks for prefill rank {sender} of {source.side.tp}")
            yield manager_of(cls, source, sender), rank


def _all_pairs() -> Iterator[PairCase]:
    yield from pairs()
    yield from dcp_pairs()


MOONCAKE: Final = Peer(
    "SGLang Mooncake", f"{PACKAGE}.mooncake.conn: MooncakeKVManager", _all_pairs, plan_mooncake, HEADS, "sglang"
)
NIXL: Final = Peer("SGLang NIXL", f"{PACKAGE}.nixl.conn: NixlKVManager", pairs, plan_nixl, HEADS, "sglang")
