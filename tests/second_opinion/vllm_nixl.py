"""vLLM's NIXL connector: its pull worker, as released, with an agent that writes down what it is told.

Each rank's worker registers its caches (`register_kv_caches`). A destination takes the offers of the source ranks that
it asks (`handshake_target_ranks`, `add_remote_agent`, with all that they refuse), reads a request
(`_read_blocks_for_req`) and ends it (`get_transfer_results`). Where blocks differ in size that last step puts slots in
order; it runs on addresses in place of values, so that what counts is where bytes end up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from tests.second_opinion.agents import Agent
from tests.second_opinion.copies import Copies
from tests.second_opinion.engines import DIM, LAYERS, Engine, Side, sides
from tests.second_opinion.peers import Pair, Peer, RefusedError, module

PACKAGE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
ORDERS: Final = ("LBHNKD", "LBNHKD", "LHBNKD", "BLHNKD", "BLNHKD", "BHLNKD")
"""The six orders of KVCacheLayout; K and V stand side by side in the content."""

REQUEST: Final = "request"


def pairs() -> Iterator[Pair]:
    """Engines of one model: TP sizes and orders; sizes of blocks, with prefixes that are there; latents and DCP."""
    for heads in (1, 2, 4, 8, 12):
        every = list(sides(order=ORDERS, heads=[heads], tp=[1, 2, 3, 4, 6, 8, 16]))
        for source, destination in itertools.product(every, every):
            if source.order == destination.order or source.tp == destination.tp == 2:
                yield Pair(source, destination, 24)
    for order, heads, start in itertools.product(ORDERS[:2], (1, 2, 4, 8), (0, 24)):
        every = list(sides(order=[order], heads=[heads], tp=[1, 2, 4, 8], tokens=[2, 3, 4, 8]))
        yield from (Pair(*two, 48, start) for two in itertools.product(every, every) if two[0].tokens != two[1].tokens)
    for tokens, more, start in itertools.product((2, 4), (1, 2), (0, 1)):
        first, second = (_latents(size, tokens) for size in (tokens, tokens * more))
        for source, destination in itertools.product(first, second):
            span = np.lcm(source.tokens * source.dcp, destination.tokens * destination.dcp)
            yield Pair(source, destination, int(span) * 2, int(span) * start)


def _latents(tokens: int, other: int) -> list[Side]:
    """Every rank keeps latents whole, or positions of its own in runs of a block of its engine, or of the other's."""
    whole = [Side("LBND", 1, tp, tokens) for tp in (1, 2, 3, 4, 8)]
    runs = sorted({tokens, other})
    return whole + [Side("LBND", 1, tp, tokens, tp, interleave=run) for tp in (2, 3, 4) for run in runs]


def plan(pair: Pair, source: Engine, destination: Engine) -> Copies:
    """What all destination workers read."""
    torch = module("torch")
    offers = [worker_of(torch, source, rank).xfer_handshake_metadata for rank in source.side.ranks]
    workers = (worker_of(torch, destination, rank) for rank in destination.side.ranks)
    return Copies.join(_read(torch, worker, pair, (source, destination), offers) for worker in workers)


def _read(torch: Any, worker: Any, pair: Pair, engines: tuple[Engine, Engine], offers: list[Any]) -> Copies:
    """What one worker reads, after the handshakes that it asks for."""
    metadata = module(f"{PACKAGE}.metadata")
    msgspec = module("msgspec")
    source, destination = engines
    try:
        for rank in worker.transfer_topo.handshake_target_ranks(source.side.tp, source.side.dcp):
            offer = msgspec.msgpack.decode(offers[rank].agent_metadata_bytes, type=metadata.NixlAgentMetadata)
            worker._validate_remote_parallel_config(offer)
            name = worker.add_remote_agent(offer, rank, source.side.tp, offer.dcp_size)
            worker._remote_agents["source"][0, rank] = name
        request = metadata.ReqMeta(
            local_block_ids=(destination.ids.tolist(),),
            local_physical_block_ids=(destination.ids.tolist(),),
            tp_size=source.side.tp,
            dcp_size=source.side.dcp,
            local_num_computed_blocks=(destination.first,),
            remote=metadata.RemoteMeta((source.ids.tolist(),), "host", 1, "source", REQUEST, num_tokens=pair.stop),
            awaiting_kvs=True,
        )
        worker._engine_by_address["host", 1] = "source"
        worker._recving_metadata[REQUEST] = request
        worker._read_blocks_for_req(REQUEST, request)
        moved = Copies.of(worker.nixl_wrapper.moved)
        worker.device_kv_caches = _addresses(torch, worker.device_kv_caches)
        worker.get_transfer_results()
    except (AssertionError, RuntimeError, ValueError) as error:
        raise RefusedError(error) from error
    return _settled(moved, worker.device_kv_caches)


def _addresses(torch: Any, caches: dict[str, Any]) -> dict[str, Any]:
    """For each cache one of its shape, with the address of each byte in the byte's place."""
    found = {}
    for name, cache in caches.items():
        index = np.indices(cache.shape)
        found[name] = torch.from_numpy(cache.data_ptr() + np.tensordot(cache.stride(), index, 1))
        found[name].before = found[name].clone()
    return found


def _settled(moved: Copies, caches: dict[str, Any]) -> Copies:
    """What was moved, to where it is after the worker's last step."""
    before = np.concatenate([cache.before.numpy().ravel() for cache in caches.values()])
    after = np.concatenate([cache.numpy().ravel() for cache in caches.values()])
    if np.array_equal(before, after):
        return moved
    writes, reads = moved.by_byte
    at = np.minimum(np.searchsorted(writes, after), len(writes) - 1)
    kept = writes[at] == after
    return Copies.of([(reads[at[kept]], before[kept], np.ones(kept.sum(), np.int64))], moved.posted)


def worker_of(torch: Any, engine: Engine, rank: int) -> Any:
    """The connector's worker of a rank, after it has registered its caches."""
    base = module(f"{PACKAGE}.base_worker")
    interface = module("vllm.v1.kv_cache_interface")
    side = engine.side
    base.NixlWrapper = Agent
    base.get_tensor_model_parallel_rank = lambda: rank
    base.get_tensor_model_parallel_world_size = lambda: side.tp
    caches = {f"model.layers.{layer}.attn": _tensor(torch, engine, rank, layer) for layer in range(LAYERS)}
    kind = interface.FullAttentionSpec if side.has_heads else interface.MLAAttentionSpec
    first, stop = side.held(rank)
    spec = kind(block_size=side.tokens, num_kv_heads=stop - first, head_size=DIM, dtype=torch.uint8)
    group = interface.KVCacheGroupSpec(layer_names=list(caches), kv_cache_spec=spec)
    blocks = next(iter(caches.values())).shape[0]
    config = interface.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
    worker = module(f"{PACKAGE}.pull_worker").NixlPullConnectorWorker(
        _config(side, interface), engine.ranks[rank].worker.engine_id, config
    )
    worker._log_failure = _raise
    worker.register_kv_caches(caches)
    return worker


def _raise(failure_type: str, error: Exception | None = None, **given: Any) -> None:
    raise RefusedError(error or failure_type)


def _config(side: Side, interface: Any) -> Any:
    layout = interface.KVCacheLayout["LBHNC" if side.order == "LBND" else side.order.replace("KD", "C")]
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            get_from_extra_config=lambda key, default: default,
            kv_buffer_device="cpu",
            kv_role="kv_both",
            enable_permute_local_kv=False,
        ),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout, enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=side.tp,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=side.dcp,
        ),
        model_config=SimpleNamespace(
            enable_sleep_mode=False, use_mla=not side.has_heads, get_total_num_kv_heads=lambda: side.heads
        ),
        speculative_config=None,
    )


def _tensor(torch: Any, engine: Engine, rank: int, layer: int) -> Any:
    """One layer as the worker is handed it: block, head, slot and content, with the strides of its order."""
    caches = engine.ranks[rank].caches
    cache = caches[0] if "L" in caches[0].letters else caches[layer]
    letters = cache.letters
    storage = torch.from_numpy(cache.memory)
    tensor = storage if "L" not in letters else storage.select(letters.index("L"), layer)
    letters = letters.replace("L", "")
    if "H" not in letters:
        return tensor[:, None]
    tensor = tensor.permute([letters.index(letter) for letter in "BHNKD"])
    return tensor.as_strided((*tensor.shape[:3], 2 * DIM), (*tensor.stride()[:3], 1))


PEER: Final = Peer("vLLM NIXL (pull)", f"{PACKAGE}: NixlPullConnectorWorker", pairs, plan)
