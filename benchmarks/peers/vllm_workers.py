"""Workers of vLLM's NIXL connector as released: built, with their caches registered and connected to other workers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.peers.agents import Agent
from benchmarks.peers.loading import CONNECTOR, RefusedError, module
from kvplan.testing.conformance import EngineMemory, Side

PACKAGE: Final = f"{CONNECTOR}.v1.nixl"


def connect(worker: Any, source: Side, sources: Mapping[int, Any], engine_id: str) -> None:
    """Let a worker take the offers of the source ranks that it asks for. Raises what its checks raise."""
    metadata = module(f"{PACKAGE}.metadata")
    for rank in worker.transfer_topo.handshake_target_ranks(source.tp, source.dcp):
        data = sources[rank].xfer_handshake_metadata.agent_metadata_bytes
        offer = module("msgspec").msgpack.decode(data, type=metadata.NixlAgentMetadata)
        worker._validate_remote_parallel_config(offer)
        name = worker.add_remote_agent(offer, rank, source.tp, offer.dcp_size)
        worker._remote_agents[engine_id][0, rank] = name


def request_of(
    source: Side, source_ids: list[int], destination_ids: list[int], stop: int, engine_id: str, first: int = 0
) -> Any:
    """The connector's metadata of a request of ``stop`` positions, whose first ``first`` local blocks are there."""
    metadata = module(f"{PACKAGE}.metadata")
    return metadata.ReqMeta(
        local_block_ids=(destination_ids,),
        local_physical_block_ids=(destination_ids,),
        tp_size=source.tp,
        dcp_size=source.dcp,
        local_num_computed_blocks=(first,),
        remote=metadata.RemoteMeta((source_ids,), "host", 1, engine_id, "request", num_tokens=stop),
        awaiting_kvs=True,
    )


def cache_config_of(engine: EngineMemory, rank: int) -> tuple[Any, dict[str, Any], Any]:
    """vLLM's configuration of a rank's caches, the caches as it registers them by layer, and their spec."""
    torch = module("torch")
    interface = module("vllm.v1.kv_cache_interface")
    side = engine.side
    caches = {f"model.layers.{layer}.attn": _tensor(torch, engine, rank, layer) for layer in range(engine.layers)}
    kind = interface.FullAttentionSpec if side.has_heads else interface.MLAAttentionSpec
    first, stop = side.held(rank)
    spec = kind(block_size=side.tokens, num_kv_heads=stop - first, head_size=engine.dim, dtype=torch.uint8)
    group = interface.KVCacheGroupSpec(layer_names=list(caches), kv_cache_spec=spec)
    blocks = next(iter(caches.values())).shape[0]
    config = interface.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
    return config, caches, spec


def worker_of(engine: EngineMemory, rank: int) -> Any:
    """The connector's worker of a rank, with its caches registered."""
    base = module(f"{PACKAGE}.base_worker")
    interface = module("vllm.v1.kv_cache_interface")
    side = engine.side
    base.NixlWrapper = Agent
    base.get_tensor_model_parallel_rank = lambda: rank
    base.get_tensor_model_parallel_world_size = lambda: side.tp
    config, caches, _ = cache_config_of(engine, rank)
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


def _tensor(torch: Any, engine: EngineMemory, rank: int, layer: int) -> Any:
    """One layer as the worker takes it: block, head, slot and content, with the strides of its order."""
    caches = engine.ranks[rank].caches
    cache = caches[0] if "L" in caches[0].letters else caches[layer]
    letters = cache.letters
    storage = torch.from_numpy(cache.memory)
    tensor = storage if "L" not in letters else storage.select(letters.index("L"), layer)
    letters = letters.replace("L", "")
    if "H" not in letters:
        return tensor[:, None]
    tensor = tensor.permute([letters.index(letter) for letter in "BHNKD"])
    return tensor.as_strided((*tensor.shape[:3], 2 * engine.dim), (*tensor.stride()[:3], 1))
