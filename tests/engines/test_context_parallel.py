"""Caches over context-parallel ranks, filled and read by the slots that vLLM's own kernel gives to positions.

vLLM's CPU build has no context parallelism. Its own arithmetic divides ranks into groups, without processes for them,
and Triton's interpreter runs the kernel that GPUs run.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from kvplan import Blocks, Model, plan_reads
from kvplan.bridges import from_vllm
from kvplan.models.tensors import attention, latent
from tests.engine_memory import meaning, names_of
from tests.simulation import vllm_objects

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="needs vLLM")
interpreter = pytest.importorskip("triton.runtime.interpreter")
block_table = pytest.importorskip("vllm.v1.worker.block_table")
parallel_state = pytest.importorskip("vllm.distributed.parallel_state")
managers = pytest.importorskip("vllm.v1.core.single_type_kv_cache_manager")
vllm_config = pytest.importorskip("vllm.config")
description = pytest.importorskip("kvplan_nixl.vllm.description")

TOKENS, NUM_BLOCKS = 101, 20
TABLE = [7, 2, 5, 0, 6, 3, 1, 9, 12, 4, 18, 11, 8]
"""Blocks of a request in order; an engine with large blocks needs fewer of them."""

GROUPS = ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB")
"""vLLM's groups of ranks."""

LATENT = Model("latent", (latent(6, 2),) * 2, "int32")
HEADS = Model("heads", (attention(2, 4),) * 2, "int32")


class Ranks(NamedTuple):
    """Parallel sizes, and blocks, of an engine."""

    tp: int
    dcp: int
    interleave: int
    block: int
    pcp: int = 1

    @property
    def number(self) -> int:
        """The number of ranks."""
        return self.tp * self.pcp


@pytest.mark.parametrize(
    ("model", "source", "destination"),
    [
        (LATENT, Ranks(1, 1, 1, 16), Ranks(4, 4, 1, 8)),
        (LATENT, Ranks(4, 4, 1, 8), Ranks(2, 1, 1, 16)),
        (LATENT, Ranks(2, 2, 16, 16), Ranks(4, 4, 4, 8)),
        (LATENT, Ranks(8, 8, 8, 8), Ranks(2, 2, 1, 24)),
        (HEADS, Ranks(1, 1, 1, 8), Ranks(4, 2, 1, 16)),
        (HEADS, Ranks(4, 2, 4, 8), Ranks(8, 4, 8, 8)),
        (LATENT, Ranks(2, 1, 1, 8, pcp=2), Ranks(4, 4, 1, 16)),
        (LATENT, Ranks(1, 4, 4, 8, pcp=4), Ranks(2, 1, 1, 16)),
        (LATENT, Ranks(2, 2, 1, 8, pcp=2), Ranks(1, 2, 4, 16, pcp=2)),
        (LATENT, Ranks(2, 4, 4, 8, pcp=2), Ranks(2, 2, 1, 8)),
        (HEADS, Ranks(4, 1, 1, 16), Ranks(2, 2, 4, 8, pcp=2)),
    ],
    ids=str,
)
def test_each_position_arrives_in_its_slot(model: Model, source: Ranks, destination: Ranks) -> None:
    """What a source's ranks hold at their slots of a position, all ranks of a destination have at theirs."""
    sources = [make_rank(model, "prefill", source, rank) for rank in range(source.number)]
    for _, memory, slots, held in sources:
        for cache, value in zip(memory, values_of(model, held), strict=True):
            cache[slots[0] // source.block, :, slots[0] % source.block] = value[slots[1]]
    for rank in range(destination.number):
        worker, memory, slots, held = make_rank(model, "decode", destination, rank)
        request: dict[str, Any] = {
            "local": {"attn": Blocks(TABLE)},
            "remote": {"attn": Blocks(TABLE)},
            "tokens": (5, TOKENS),
        }
        for spec in plan_reads(worker, [other for other, *_ in sources]).bind(**request):
            copy(spec)
        is_read = slots[1] >= 5
        for cache, value in zip(memory, values_of(model, held), strict=True):
            found = cache[slots[0] // destination.block, :, slots[0] % destination.block]
            np.testing.assert_array_equal(found[is_read], value[slots[1][is_read]])
            assert not found[~is_read].any()


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_a_block_of_a_table_has_positions_of_all_ranks(dcp: int) -> None:
    """vLLM's manager of blocks counts as the connector's scheduler does; states are not divided."""
    config = vllm_objects.VllmConfig(parallel_config=vllm_objects.ParallelConfig(dcp))
    latents = interface.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    states = interface.MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float16,))
    for spec, kind in ((latents, managers.FullAttentionManager), (states, managers.MambaManager)):
        pool = SimpleNamespace(null_block=None)
        manager = kind(
            spec,
            block_pool=pool,
            enable_caching=False,
            kv_cache_group_id=0,
            scheduler_block_size=16,
            dcp_world_size=dcp,
        )
        group = interface.KVCacheGroupSpec(["layer"], spec)
        assert description.tokens_per_table_block(group, config) == manager.block_size


def make_rank(model: Model, engine: str, ranks: Ranks, rank: int) -> Any:
    """A worker with empty caches, these as arrays, block-table slots with their positions, and the heads it holds."""
    has_heads = model is HEADS
    content = {"num_kv_heads": 1, "head_size": 4 if has_heads else 8, "dtype": torch.int32}
    kind = interface.FullAttentionSpec if has_heads else interface.MLAAttentionSpec
    num_held = 2 // min(ranks.tp, 2) if has_heads else 1
    spec = kind(block_size=ranks.block, **{**content, "num_kv_heads": num_held})
    names, page = names_of(range(2)), spec.page_size_bytes
    raw = torch.zeros(2 * NUM_BLOCKS * page, dtype=torch.int8)
    placed = interface.KVCacheTensor(raw.numel(), names, NUM_BLOCKS * page, page)
    caches = interface.create_kv_cache_views(raw, spec, NUM_BLOCKS, interface.KVCacheLayout.LBHNC, placed, ranks.block)
    config = interface.KVCacheConfig(NUM_BLOCKS, [placed], [interface.KVCacheGroupSpec(names, spec)])
    parallel = vllm_config.ParallelConfig(
        tensor_parallel_size=ranks.tp,
        prefill_context_parallel_size=ranks.pcp,
        decode_context_parallel_size=ranks.dcp,
        cp_kv_cache_interleave_size=ranks.interleave,
    )
    transfer = vllm_config.KVTransferConfig(engine_id=engine)
    engine_config = vllm_objects.VllmConfig(transfer, parallel_config=parallel)
    with as_rank(ranks, rank):
        info = description.rank_info(engine_config)
        slots = slots_of(ranks)
    assert info.rank == rank
    worker = from_vllm(model, info, config, dict(zip(names, caches, strict=True)), kv_layout="content")
    first = info.tp_rank * 2 // ranks.tp if has_heads else 0
    return worker, [cache.numpy() for cache in caches], slots, range(first, first + num_held)


@contextmanager
def as_rank(ranks: Ranks, rank: int) -> Iterator[None]:
    """Let vLLM divide the ranks of an engine into its groups, as ``rank`` sees them."""

    def group_of(group_ranks: Any, *_: Any, **__: Any) -> Any:
        (own,) = (group for group in group_ranks if rank in group)
        return SimpleNamespace(rank_in_group=own.index(rank), world_size=len(own))

    parallel = SimpleNamespace(data_parallel_size=1, enable_elastic_ep=False)
    model = SimpleNamespace(architecture="", is_moe=False)
    config = SimpleNamespace(parallel_config=parallel, engram_config=None, model_config=model)
    world = {"is_initialized": True, "get_world_size": ranks.number, "get_rank": rank}
    with ExitStack() as patches:
        for name in GROUPS:
            patches.enter_context(patch.object(parallel_state, name, None))
        patches.enter_context(patch.object(parallel_state, "_WORLD", SimpleNamespace(local_rank=rank)))
        patches.enter_context(patch.object(parallel_state, "init_model_parallel_group", group_of))
        patches.enter_context(patch("vllm.config.get_current_vllm_config", return_value=config))
        for name, value in world.items():
            patches.enter_context(patch.object(torch.distributed, name, return_value=value))
        sizes = {"prefill_context_model_parallel_size": ranks.pcp, "decode_context_model_parallel_size": ranks.dcp}
        parallel_state.initialize_model_parallel(ranks.tp, **sizes, backend="gloo")
        yield


def slots_of(ranks: Ranks) -> Any:
    """The slots of this rank that vLLM's kernel gives to positions of the request, and these positions."""
    kernel = block_table.ComputeSlotMappingKernel.kernel
    triton = pytest.importorskip("triton")
    own_names = {**kernel.__globals__, "triton": triton, "tl": triton.language}
    interpreted = types.FunctionType(kernel.__code__, own_names, kernel.__name__)
    interpreted.__annotations__ = dict.fromkeys(kernel.__annotations__, triton.language.constexpr)
    slots = torch.empty(TOKENS, dtype=torch.int64)
    starts = torch.tensor([0, TOKENS], dtype=torch.int32)
    table = torch.tensor([TABLE], dtype=torch.int32)
    group = parallel_state.get_dcp_group()
    sizes = (ranks.block, group.world_size, group.rank_in_group, ranks.interleave, -1, 128)
    positions = torch.arange(TOKENS)
    interpreter.InterpretedFunction(interpreted)[(2,)](
        TOKENS, TOKENS, starts, positions, table, len(TABLE), slots, *sizes
    )
    own = (slots >= 0).numpy()
    return slots.numpy()[own], positions.numpy()[own]


def values_of(model: Model, held: range) -> list[Any]:
    """The values of each layer: [token, head, content], where latents have one head."""
    layers = []
    for layer in range(2):
        token, head, dim = np.meshgrid(np.arange(TOKENS), [*held], np.arange(8), indexing="ij")
        layers.append(meaning(f"layers.{layer}.attn", np.int32, head=head, token=token, dim=dim))
    return layers


def copy(spec: Any) -> None:
    """Moves the bytes of a read from one part of this process's memory to another."""
    for (local, length, _), (remote, *_) in zip(*(rows.tolist() for rows in spec.descriptors()), strict=True):
        ctypes.memmove(local, remote, length)
