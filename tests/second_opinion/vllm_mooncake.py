"""vLLM's Mooncake connector: its worker as released, without its engine, sockets and threads.

Each rank's worker registers its caches (`register_kv_caches`). A decode rank asks the prefill ranks that it would
connect to (`handshake_target_ranks`), which check its layout and compute what they write (`_prepare_transfer_regions`,
`_validate_asymmetric_region_lengths`, `_build_transfer_params`).
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.peers.loading import CONNECTOR, RefusedError, module
from benchmarks.peers.vllm_workers import cache_config_of
from kvplan.testing.conformance import EngineMemory, PairCase
from tests.second_opinion.copies import Copies
from tests.second_opinion.peers import NotRunError, Peer
from tests.second_opinion.vllm_nixl import pairs

PACKAGE: Final = f"{CONNECTOR}.v1.mooncake.mooncake_connector"


def plan(case: PairCase, source: EngineMemory, destination: EngineMemory) -> Copies:
    """What all prefill ranks write."""
    if case.source.order != case.destination.order:
        raise NotRunError("it requires one layout")
    try:
        senders = [_worker(source, rank) for rank in source.side.ranks]
        readers = [_worker(destination, rank) for rank in destination.side.ranks]
        return Copies.of([part for reader in readers for part in _pulled(reader, senders, source, destination)])
    except (AssertionError, RuntimeError, ValueError) as error:
        raise RefusedError(error) from error


def _pulled(reader: Any, senders: list[Any], source: EngineMemory, destination: EngineMemory) -> list[Any]:
    connector = module(PACKAGE)
    request = SimpleNamespace(transfer_id="request", local_block_ids=[destination.block_ids])
    meta = reader._build_pull_metadata({"request": request}, include_layout=True)
    found = []
    for rank in reader.transfer_topo.handshake_target_ranks(source.side.tp):
        sender = senders[rank]
        if reader.tp_rank not in sender.transfer_topo.handshake_target_ranks(reader.tp_size):
            raise RefusedError("This D tp_rank is not paired with P tp_rank")
        local, remote, error = sender._prepare_transfer_regions(meta)
        error = error or connector._validate_asymmetric_region_lengths(
            local_regions=local,
            remote_regions=remote,
            local_tp_size=sender.tp_size,
            remote_tp_size=reader.tp_size,
            producer_cache_replicated=sender._producer_cache_is_replicated(),
            total_num_kv_heads=None if sender.use_mla else sender.transfer_topo.total_num_kv_heads,
        )
        if error:
            raise RefusedError(error)
        sent = connector.SendBlockMeta("request", "request", [source.block_ids], asyncio.Event())
        *columns, _, error = asyncio.run(sender._build_transfer_params([("request", sent)], meta, local, remote))
        if error:
            raise RefusedError(error)
        found.append(tuple(columns))
    return found


def _worker(engine: EngineMemory, rank: int) -> Any:
    """The connector's worker of a rank, with its caches registered."""
    connector = module(PACKAGE)
    if engine.side.contexts > 1:
        raise NotRunError("contexts")
    config, caches, spec = cache_config_of(engine, rank)
    worker = object.__new__(connector.MooncakeConnectorWorker)
    fields = {
        "hostname": "host", "rpc_port": rank, "tp_rank": rank, "tp_size": engine.side.tp, "pp_size": 1,
        "is_kv_consumer": True, "use_mla": not engine.side.has_heads, "kv_cache_config": config,
        "_layer_specs": dict.fromkeys(caches, spec), "_physical_blocks_per_logical_kv_block": 1,
        "_prepared_transfer_regions": {}, "_layout_by_peer": module("collections").OrderedDict(),
        "_acked_layout_peers": set(),
        "engine": SimpleNamespace(batch_register_memory=lambda *given: 0),
        "transfer_topo": module(f"{CONNECTOR}.utils").TransferTopology(
            tp_rank=rank, tp_size=engine.side.tp, block_size=engine.side.tokens, engine_id=str(id(engine)),
            is_mla=not engine.side.has_heads, is_mamba=False, total_num_kv_heads=engine.side.heads, attn_backends=[],
        ),
    }  # fmt: skip
    worker.__dict__.update(fields)
    worker.shutdown = lambda: None
    worker.register_kv_caches(caches)
    return worker


PEER: Final = Peer("vLLM Mooncake", f"{PACKAGE}: MooncakeConnectorWorker", pairs, plan)
