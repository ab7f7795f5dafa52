"""SGLang's senders: `send_kvcache` and `send_kvcache_slice` of its NIXL and Mooncake managers, as released.

A decode rank learns which prefill ranks send to it (`try_ensure_parallel_info`, with all that it refuses), and each of
them sends whole pages where sizes of TP are equal or the cache is of latents, and slices of heads otherwise: the same
choice as in their `transfer_worker`. Managers are made without their processes and sockets; an agent or an engine that
writes down what it is told stands in place of NIXL's and Mooncake's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from tests.second_opinion.agents import Agent, Wire
from tests.second_opinion.copies import Copies
from tests.second_opinion.engines import Engine, Side, sides
from tests.second_opinion.peers import Pair, Peer, RefusedError, module

PACKAGE: Final = "sglang.srt.disaggregation"
HEADS: Final = "KLBNHD"
"""K and V of every layer apart, slots outside heads: the order that SGLang's senders are made for."""

LATENTS: Final = "LBND"


def pairs() -> Iterator[Pair]:
    """Engines of one model of all TP sizes, pages of 1, 2 and 4, a few of unequal pages; latents, and their DCP."""
    for heads, tokens in itertools.product((1, 2, 3, 4, 5, 6, 8, 10, 12, 16), (1, 2, 4)):
        every = list(sides(order=[HEADS], heads=[heads], tp=[1, 2, 3, 4, 5, 6, 8, 10, 12, 16], tokens=[tokens]))
        yield from (Pair(*two, 6 * tokens) for two in itertools.product(every, every))
    for tokens in (1, 2, 4):
        every = list(sides(order=[LATENTS], tp=[1, 2, 3, 4, 6, 8], tokens=[tokens]))
        yield from (Pair(*two, 6 * tokens) for two in itertools.product(every, every))
    for heads, (here, there) in itertools.product((2, 8), ((1, 4), (4, 1), (2, 4))):
        unequal = [list(sides(order=[HEADS], heads=[heads], tp=[1, 2, 4], tokens=[size])) for size in (here, there)]
        yield from (Pair(*two, 8) for two in itertools.product(unequal[0], unequal[1]))


def dcp_pairs() -> Iterator[Pair]:
    """Latents whose positions spread over decode ranks one by one: what Mooncake's `send_kvcache_dcp` is for."""
    for tokens, tp, dcp in itertools.product((1, 2, 4), (1, 2, 4, 8), (2, 4, 8)):
        for source in sides(order=[LATENTS], tp=[1, 2, 4], tokens=[tokens]):
            for destination in sides(order=[LATENTS], tp=[tp], tokens=[tokens], dcp=[dcp]):
                if dcp <= tp:
                    yield Pair(source, destination, 3 * tokens * dcp)


def plan_mooncake(pair: Pair, source: Engine, destination: Engine) -> Copies:
    """What all prefill ranks write through Mooncake."""
    cls = module(f"{PACKAGE}.mooncake.conn").MooncakeKVManager
    wire = Wire()
    for manager, rank in _transfers(cls, pair, source, destination):
        manager.engine = wire
        give(manager, enable_custom_mem_pool=False, max_transfer_batch_indices=0, state_strides_validated=set())
        ends = [cache.address for cache in destination.ranks[rank].caches]
        size = destination.ranks[rank].caches[0].memory[0].nbytes
        ids = source.ids.astype(np.int32), destination.ids.astype(np.int32)
        tp = destination.side.tp
        if destination.side.dcp > 1:
            manager.requires_dcp_relayout(destination.side.dcp, destination.side.turn(rank))
            status = manager.send_kvcache_dcp(
                "peer", ids[0], ends, ids[1],
                dcp_token_item_lens=manager.prepare_dcp_token_item_lens([size] * len(ends), destination.side.dcp),
                dst_dcp_size=destination.side.dcp, dst_dcp_rank=destination.side.turn(rank), src_page_offset=0,
                decode_prefix_len=0, num_kv_tokens=pair.stop, executor=Now(), dst_layer_ids=[],
                dst_tp_rank=rank, dst_attn_tp_size=tp,
            )  # fmt: skip
        elif manager.is_mla_backend or manager.attn_tp_size == tp:
            status = manager.send_kvcache("peer", ids[0], ends, ids[1], Now(), dst_layer_ids=[])
        else:
            status = manager.send_kvcache_slice("peer", ids[0], ends, ids[1], rank, tp, size, Now(), [])
        if status:
            raise RefusedError(f"send_kvcache_slice returns {status}: slice size exceeds target token slot size")
    return Copies.of(wire.moved)


def plan_nixl(pair: Pair, source: Engine, destination: Engine) -> Copies:
    """What all prefill ranks write through NIXL."""
    conn = module(f"{PACKAGE}.nixl.conn")
    agents = []
    for manager, rank in _transfers(conn.NixlKVManager, pair, source, destination):
        agents.append(Agent())
        kinds = ["DRAM"] * len(manager.kv_args.kv_data_ptrs)
        slots = conn.num_kv_slots(manager.kv_args.kv_data_lens, manager.kv_args.kv_item_lens)
        give(manager, agent=agents[-1], src_mem_kind="VRAM", prep_handles={}, prep_handle_slice_src=None)
        give(manager, prep_handles_slice_dst={}, _num_slots_src=slots)
        caches = destination.ranks[rank].caches
        sizes = [cache.memory[0].nbytes for cache in caches]
        peer = conn.KVArgsRegisterInfo(
            room="0", endpoint="", dst_port=0, agent_name="peer", agent_metadata=b"",
            dst_kv_ptrs=[cache.address for cache in caches], dst_kv_mem_kinds=["VRAM"] * len(kinds), dst_aux_ptrs=[],
            dst_state_data_ptrs=[], gpu_id=0, decode_tp_size=destination.side.tp, decode_tp_rank=rank,
            dst_kv_item_len=sizes[0], dst_kv_item_lens=sizes, dst_num_slots=len(caches[0].memory),
        )  # fmt: skip
        give(manager, decode_kv_args_table={"peer": peer})
        ids = source.ids.astype(np.int32), destination.ids.astype(np.int32)
        try:
            manager._prepare_payload_xfer(peer)
            if manager.is_mla_backend or manager.attn_tp_size == destination.side.tp:
                manager.send_kvcache("peer", ids[0], peer.dst_kv_ptrs, ids[1], 0)
            else:
                manager.send_kvcache_slice("peer", *ids)
        except AssertionError as error:
            raise RefusedError(
                f"_init_hetero_tp_prep_handle: {str(error) or 'tokens and head groups do not tile a slot'}"
            ) from error
    return Copies.of(part for agent in agents for part in agent.moved)


def _transfers(cls: Any, pair: Pair, source: Engine, destination: Engine) -> Iterator[tuple[Any, int]]:
    """A manager of each prefill rank that sends to a decode rank, and the decode rank."""
    for rank in destination.side.ranks:
        for sender in senders_of(cls, source.side, destination, rank):
            if sender not in source.side.ranks:
                raise RefusedError(f"decode rank {rank} asks for prefill rank {sender} of {source.side.tp}")
            yield manager_of(cls, source, sender), rank


def senders_of(cls: Any, side: Side, destination: Engine, rank: int) -> list[int]:
    """The prefill ranks from which a decode rank awaits bytes, as it works them out."""
    common = module(f"{PACKAGE}.common.conn")
    manager = manager_of(cls, destination, rank)
    info = {
        "attn_tp_size": side.tp, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": side.tokens,
        "kv_cache_dtype": None, "follow_bootstrap_room": False,
    }  # fmt: skip
    answer = SimpleNamespace(status_code=200, json=lambda: info)
    common.requests = SimpleNamespace(get=lambda url, timeout: answer)
    try:
        if not manager.try_ensure_parallel_info("prefill"):
            raise RefusedError("try_ensure_parallel_info finds no prefill server")
    except (RuntimeError, AssertionError) as error:
        raise RefusedError(error) from error
    found = manager.prefill_info_table["prefill"]
    return [found.target_tp_rank] if manager.is_mla_backend else list(found.target_tp_ranks)


def manager_of(cls: Any, engine: Engine, rank: int) -> Any:
    """A rank's manager, knowing what its engine would have told it."""
    side, caches = engine.side, engine.ranks[rank].caches
    first, stop = side.held(rank)
    manager = object.__new__(cls)
    arguments = SimpleNamespace(
        kv_data_ptrs=[cache.address for cache in caches],
        kv_data_lens=[cache.memory.nbytes for cache in caches],
        kv_item_lens=[cache.memory[0].nbytes for cache in caches],
        kv_data_mem_kinds=["VRAM"] * len(caches),
        kv_layer_ids=[],
        kv_head_num=stop - first,
        total_kv_head_num=side.heads,
        page_size=side.tokens,
        engine_rank=rank,
        gpu_id=0,
        prefill_start_layer=0,
        num_draft_entries=0,
        mla_compression_ratios=None,
        state_types=[],
    )
    give(
        manager, kv_args=arguments, is_mla_backend=not side.has_heads, is_hybrid_mla_backend=False, pp_size=1,
        pp_rank=0, attn_tp_size=side.tp, attn_tp_rank=rank, attn_cp_size=1, attn_cp_rank=0, dcp_size=side.dcp,
        dcp_rank=0, prefill_info_table={}, kv_cache_dtype_str=None, kv_layout=None, dsv41_spec_layout=None,
        enable_all_cp_ranks_for_transfer=False,
    )  # fmt: skip
    return manager


def give(manager: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(manager, name, value)


class Now(Executor):
    """An executor that runs what it is given at once."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


def _all_pairs() -> Iterator[Pair]:
    yield from pairs()
    yield from dcp_pairs()


MOONCAKE: Final = Peer("SGLang Mooncake", f"{PACKAGE}.mooncake.conn: MooncakeKVManager", _all_pairs, plan_mooncake)
NIXL: Final = Peer("SGLang NIXL", f"{PACKAGE}.nixl.conn: NixlKVManager", pairs, plan_nixl)
