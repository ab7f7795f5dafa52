"""vLLM's rows: the NIXL connector's pull worker and the Mooncake connector's sender, as released.

Everything that is timed runs as released. Of the NIXL connector that is `_read_blocks_for_req`, from a request's
metadata up to `make_prepped_xfer`, which is not timed, and of that `_compute_desc_ids` alone, with the arguments of
those calls. Of the Mooncake connector it is `_build_transfer_params`, which calls `group_concurrent_contiguous` for
each region and makes addresses and lengths in a loop.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.peers import loading, stand_ins
from benchmarks.peers.agents import ids_of
from benchmarks.peers.cases import RANK, Request, World
from benchmarks.peers.environment import SOURCES
from benchmarks.peers.loading import module
from benchmarks.peers.rows import SENDERS, Refusal, Row
from benchmarks.peers.vllm_workers import connect, request_of, worker_of

MOONCAKE: Final = f"{loading.CONNECTOR}.v1.mooncake.mooncake_connector"
IDS: Final = "vLLM NIXL, _compute_desc_ids"
READ: Final = "vLLM NIXL, _read_blocks_for_req"
BUILD: Final = "vLLM Mooncake, _build_transfer_params"


def load() -> None:
    """Load the peers' modules, and the Mooncake connector."""
    stand_ins.only("vllm", SOURCES, (*loading.VLLM, MOONCAKE), ("huggingface_hub", "mooncake"))
    mooncake: Any = importlib.import_module(MOONCAKE)
    mooncake.logger = loading.Log("peer")
    mooncake.extract_layer_index = lambda name: int(name.split(".")[2])
    loading.load()


def rows(world: World) -> Callable[[Request], Iterator[Row | Refusal]]:
    """The planners of a case, ready for its requests."""
    sources = {rank: worker_of(world.source, rank) for rank in world.source.side.ranks}
    destination = worker_of(world.destination, RANK)
    made = [_nixl(world, sources, destination), _mooncake(world, sources, destination)]
    return lambda request: (row for of in made for row in of(request))


def _nixl(world: World, sources: Any, worker: Any) -> Callable[[Request], Iterator[Row | Refusal]]:
    """The connector's worker of the destination, after its handshakes."""
    try:
        connect(worker, world.source.side, sources, "prefill")
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error)
        return lambda request: iter([Refusal("vLLM NIXL", reason)])
    return lambda request: _nixl_rows(world, worker, request)


def _nixl_rows(world: World, worker: Any, request: Request) -> Iterator[Row]:
    agent = worker.nixl_wrapper
    asked = request_of(world.source.side, request.source, request.destination, request.stop, "prefill")

    def read() -> Any:
        worker._recving_transfers.clear()
        return agent.during(lambda: worker._read_blocks_for_req("request", asked))

    calls: list[dict[str, Any]] = []
    compute = worker._compute_desc_ids

    def record(**given: Any) -> Any:
        calls.append(given)
        return compute(**given)

    worker._compute_desc_ids = record
    transfers = read()
    del worker._compute_desc_ids  # restores the method

    def copies(ids: Any) -> Any:
        """The same transfers with these ids. The connector computes remote ids before local ones."""
        pairs = zip(transfers, ids[1::2], ids[::2], strict=True)
        return agent.copies((what, near, local, far, remote) for (what, near, _, far, _), local, remote in pairs)

    yield Row(
        IDS,
        "ids",
        lambda: [compute(**given) for given in calls],
        lambda ids: sum(len(found) for found in ids) // 2,
        copies,
        "int64 ids of both sides; no checks of tables; where blocks differ in size, block ids are mapped before",
    )
    yield Row(
        READ,
        "ids",
        read,
        ids_of,
        agent.copies,
        "everything before NIXL is called: those ids, trimming lists to new blocks, bookkeeping",
    )


def _mooncake(world: World, sources: Any, destination: Any) -> Callable[[Request], Iterator[Row | Refusal]]:
    """The senders of all source ranks that send to the destination."""
    connector = module(MOONCAKE)
    end = _mooncake_worker(connector, destination, RANK, world.destination.side.tp)
    pull = SimpleNamespace(transfer_id="request", local_block_ids=[[]])
    meta = end._build_pull_metadata({"request": pull}, include_layout=True)
    senders = []
    for rank, source in sources.items():
        if RANK not in source.transfer_topo.handshake_target_ranks(world.destination.side.tp):
            continue
        worker = _mooncake_worker(connector, source, rank, world.source.side.tp)
        local, remote, error = worker._prepare_transfer_regions(meta)
        error = error or connector._validate_asymmetric_region_lengths(
            local_regions=local,
            remote_regions=remote,
            local_tp_size=worker.tp_size,
            remote_tp_size=meta.remote_tp_size,
            producer_cache_replicated=worker._producer_cache_is_replicated(),
            total_num_kv_heads=worker.transfer_topo.total_num_kv_heads,
        )
        if error is not None:
            reason = error
            return lambda request: iter([Refusal("vLLM Mooncake", reason)])
        senders.append((worker, local, remote))
    return lambda request: iter([_mooncake_row(connector, meta, senders, request)])


def _mooncake_row(connector: Any, meta: Any, senders: Any, request: Request) -> Row:
    sent = connector.SendBlockMeta("request", "request", [request.source], None)

    def build() -> list[Any]:
        meta.req_blocks = {"request": ("request", [request.destination])}
        made = []
        for worker, local, remote in senders:
            try:
                worker._build_transfer_params([("request", sent)], meta, local, remote).send(None)
            except StopIteration as end:  # a coroutine that awaits nothing
                made.append(end.value)
        return made

    def moves(made: Any) -> Any:
        assert not any(part[3] for part in made), made
        return [part[:3] for part in made]

    note = f"addresses and lengths as lists of int, neighbours of one region joined; {SENDERS}"
    return Row(BUILD, "ranges", build, lambda made: sum(len(part[0]) for part in made), moves, note)


def _mooncake_worker(connector: Any, of: Any, rank: int, tp: int) -> Any:
    """A worker of the Mooncake connector with registered caches. ``of`` is the NIXL connector's worker of the rank."""
    worker = object.__new__(connector.MooncakeConnectorWorker)
    given = {
        "kv_cache_config": of.kv_cache_config, "transfer_topo": of.transfer_topo, "tp_rank": rank, "tp_size": tp,
        "pp_size": 1, "use_mla": False, "is_kv_consumer": True, "hostname": f"host{rank}", "rpc_port": 1,
        "_physical_blocks_per_logical_kv_block": 1, "_prepared_transfer_regions": {},
        "_layout_by_peer": OrderedDict(), "_acked_layout_peers": set(), "shutdown": lambda: None,
        "_layer_specs": dict.fromkeys(of.device_kv_caches, of.kv_cache_config.kv_cache_groups[0].kv_cache_spec),
        "engine": SimpleNamespace(batch_register_memory=lambda addresses, sizes: 0),
    }  # fmt: skip
    for name, value in given.items():
        setattr(worker, name, value)
    worker.register_kv_caches(of.device_kv_caches)
    return worker
