"""vLLM's MoRI-IO connector, whose prefill ranks write: its arithmetic as released, without the `mori` package.

A prefill rank maps its heads to decode ranks (`_write_tp_mapping`) and computes offsets as `_prepare_transfer_plan`
does, with the worker's own checks of blocks and layouts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from benchmarks.peers.loading import CONNECTOR, RefusedError, module
from benchmarks.peers.vllm_workers import cache_config_of
from kvplan.testing.conformance import EngineMemory, PairCase
from tests.second_opinion.copies import Copies
from tests.second_opinion.peers import NotRunError, Peer
from tests.second_opinion.vllm_nixl import pairs

PACKAGE: Final = f"{CONNECTOR}.v1.moriio"


def plan(case: PairCase, source: EngineMemory, destination: EngineMemory) -> Copies:
    """What all prefill ranks write."""
    if case.start:
        raise NotRunError("its scheduler decides which blocks a cached prefix leaves")
    try:
        readers = [_worker(destination, rank) for rank in destination.side.ranks]
        senders = [_worker(source, rank) for rank in source.side.ranks]
        return Copies.of([part for sender in senders for part in _written(sender, readers, source, destination)])
    except (AssertionError, ValueError, module(f"{PACKAGE}.moriio_common").MoRIIOError) as error:
        raise RefusedError(error) from error


def _written(sender: Any, readers: list[Any], source: EngineMemory, destination: EngineMemory) -> list[Any]:
    engine_cls = module(f"{PACKAGE}.moriio_engine").MoRIIOWriter
    mapping = sender._write_tp_mapping(destination.side.tp)
    found = []
    for target in mapping.targets:
        reader = readers[target.tp_rank]
        meta = SimpleNamespace(
            num_blocks=next(iter(reader.kv_caches.values())).shape[0],
            attention_block_sizes=reader.attention_block_sizes,
            kv_head_layouts={name: layout.to_wire() for name, layout in reader.kv_head_layouts.items()},
        )
        for name, cache in sender.kv_caches.items():
            task = SimpleNamespace(
                layer_name=name, dst_engine_id="peer", local_block_ids=[source.block_ids], tp_mapping=mapping,
                request_id="request", transfer_id="request",
            )  # fmt: skip
            info = SimpleNamespace(transfer_offsets={}, block_ids=[destination.block_ids])
            plan = engine_cls._prepare_transfer_plan(
                SimpleNamespace(worker=sender), task, info, meta, remote_engine_id="peer", target=target
            )
            reads, writes = plan.transfer_local_offsets, plan.transfer_remote_offsets
            here, there = cache.data_ptr(), reader.kv_caches[name].data_ptr()
            found.append(([here + at for at in reads], [there + at for at in writes], plan.transfer_sizes))
    return found


def _worker(engine: EngineMemory, rank: int) -> Any:
    """The connector's worker of a rank, with the layouts of its caches."""
    connector, layouts = module(f"{PACKAGE}.moriio_connector"), module(f"{PACKAGE}.moriio_layout")
    side = engine.side
    if side.contexts > 1:
        raise NotRunError("contexts")
    _, caches, spec = cache_config_of(engine, rank)
    specs = dict.fromkeys(caches, spec)
    worker = object.__new__(connector.MoRIIOConnectorWorker)
    worker.__dict__.update(
        tp_rank=rank, world_size=side.tp, use_mla=not side.has_heads, _has_mamba=False, kv_caches=caches,
        layer_to_spec=specs, layer_to_group=dict.fromkeys(caches, 0), kv_layer_mr_offset={},
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: side.heads), kv_head_layouts={},
        attention_block_sizes={
            name: layouts.get_layer_transfer_geometry(name, cache, specs).block_size for name, cache in caches.items()
        },
        _region_session_indices=lambda name: [0],
    )  # fmt: skip
    for name, cache in caches.items():
        if side.has_heads:
            worker.kv_head_layouts[name] = layouts.get_layer_head_layout(name, cache, specs)
    return worker


PEER: Final = Peer("vLLM MoRI-IO (write)", f"{PACKAGE}.moriio_connector: MoRIIOConnectorWorker", pairs, plan)
