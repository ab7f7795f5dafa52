"""SGLang's NIXL and Mooncake managers as released: built without processes and sockets, and with agents that record."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.peers.agents import Agent
from benchmarks.peers.loading import DISAGGREGATION, RefusedError, module
from kvplan.testing.conformance import EngineMemory, Side

PACKAGE: Final = DISAGGREGATION


def senders_of(cls: Any, side: Side, destination: EngineMemory, rank: int) -> list[int]:
    """The prefill ranks from which a decode rank expects bytes, as it computes them."""
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


def manager_of(cls: Any, engine: EngineMemory, rank: int) -> Any:
    """A rank's manager, with the attributes that its engine would set."""
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
    """Set attributes of a manager."""
    for name, value in attributes.items():
        setattr(manager, name, value)


def prepare(manager: Any, conn: Any, destination: EngineMemory, rank: int) -> Any:
    """Give a NIXL manager an agent and the registration of a decode rank, which is returned."""
    caches = destination.ranks[rank].caches
    sizes = [cache.memory[0].nbytes for cache in caches]
    peer = conn.KVArgsRegisterInfo(
        room="0", endpoint="", dst_port=0, agent_name="peer", agent_metadata=b"",
        dst_kv_ptrs=[cache.address for cache in caches], dst_kv_mem_kinds=["VRAM"] * len(caches), dst_aux_ptrs=[],
        dst_state_data_ptrs=[], gpu_id=0, decode_tp_size=destination.side.tp, decode_tp_rank=rank,
        dst_kv_item_len=sizes[0], dst_kv_item_lens=sizes, dst_num_slots=len(caches[0].memory),
    )  # fmt: skip
    slots = conn.num_kv_slots(manager.kv_args.kv_data_lens, manager.kv_args.kv_item_lens)
    give(
        manager, agent=Agent(), src_mem_kind="VRAM", prep_handles={}, prep_handle_slice_src=None,
        prep_handles_slice_dst={}, _num_slots_src=slots, decode_kv_args_table={"peer": peer},
    )  # fmt: skip
    manager._prepare_payload_xfer(peer)
    return peer


class Now(Executor):
    """An executor that runs everything at once."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done
