"""SGLang's rows: `send_kvcache` and `send_kvcache_slice` of its NIXL and Mooncake managers, as released.

They run from arrays of page ids up to the call of NIXL or Mooncake, which is not timed. Where TP sizes are equal they
send whole pages, otherwise slices of heads, slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from benchmarks.peers.agents import Wire, ids_of
from benchmarks.peers.cases import RANK, Request, World
from benchmarks.peers.loading import RefusedError, module
from benchmarks.peers.rows import SENDERS, Refusal, Row
from benchmarks.peers.sglang_managers import PACKAGE, Now, give, manager_of, prepare, senders_of

ARRAYS: Final = "includes making arrays of the lists, which SGLang already has"
MADE: Final = {
    "nixl": f"int32 ids of both sides; no checks of tables; {ARRAYS}; {SENDERS}",
    "mooncake": f"addresses and lengths as lists of int, neighbours of one page array joined; {ARRAYS}; {SENDERS}",
}


def rows(world: World) -> Callable[[Request], Iterator[Row | Refusal]]:
    """The planners of a case, ready for its requests."""
    makers = [_ready("SGLang NIXL", world, _nixl), _ready("SGLang Mooncake", world, _mooncake)]
    return lambda request: (maker(request) for maker in makers)


def _ready(name: str, world: World, make: Callable[[World, str], Callable[[Request], Row]]) -> Any:
    try:
        return make(world, name)
    except (RefusedError, AssertionError) as error:
        refusal = Refusal(name, str(error))
        return lambda request: refusal


def _senders(world: World, cls: Any) -> list[Any]:
    """The managers of the prefill ranks that send to the decode worker."""
    ranks = senders_of(cls, world.source.side, world.destination, RANK)
    return [manager_of(cls, world.source, rank) for rank in ranks]


def _arrays(request: Request) -> tuple[Any, Any]:
    return np.array(request.source, np.int32), np.array(request.destination, np.int32)


def _nixl(world: World, name: str) -> Callable[[Request], Row]:
    """Managers with lists prepared for the decode worker."""
    conn = module(f"{PACKAGE}.nixl.conn")
    managers = _senders(world, conn.NixlKVManager)
    (peer, *_) = [prepare(manager, conn, world.destination, RANK) for manager in managers]
    slices = world.source.side.tp != world.destination.side.tp

    def row(request: Request) -> Row:
        def send() -> list[Any]:
            source, destination = _arrays(request)
            for manager in managers:
                manager.agent.transfers = []
                if slices:
                    manager.send_kvcache_slice("peer", source, destination)
                else:
                    manager.send_kvcache("peer", source, peer.dst_kv_ptrs, destination, 0)
            return [manager.agent.transfers for manager in managers]

        def moves(made: Any) -> Any:
            return [part for manager, given in zip(managers, made, strict=True) for part in manager.agent.copies(given)]

        function = "send_kvcache_slice" if slices else "send_kvcache"
        return Row(f"{name}, {function}", "ids", send, lambda made: sum(map(ids_of, made)), moves, MADE["nixl"])

    return row


def _mooncake(world: World, name: str) -> Callable[[Request], Row]:
    managers, wire = _senders(world, module(f"{PACKAGE}.mooncake.conn").MooncakeKVManager), Wire()
    for manager in managers:
        give(
            manager, engine=wire, enable_custom_mem_pool=False, max_transfer_batch_indices=0,
            state_strides_validated=set(),
        )  # fmt: skip
    caches, tp = world.destination.ranks[RANK].caches, world.destination.side.tp
    ends, size, now = [cache.address for cache in caches], caches[0].memory[0].nbytes, Now()
    slices = world.source.side.tp != tp

    def row(request: Request) -> Row:
        def send() -> int:
            source, destination = _arrays(request)
            wire.count = 0
            for manager in managers:
                if slices:
                    status = manager.send_kvcache_slice("peer", source, ends, destination, RANK, tp, size, now, [])
                else:
                    status = manager.send_kvcache("peer", source, ends, destination, now, dst_layer_ids=[])
                assert status == 0
            return wire.count

        function = "send_kvcache_slice" if slices else "send_kvcache"
        note = MADE["mooncake"]
        return Row(f"{name}, {function}", "ranges", send, int, lambda made: wire.copies(send), note)

    return row
