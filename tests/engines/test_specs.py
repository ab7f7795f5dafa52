"""Caches of vLLM's sparse and hybrid models, planned, allocated and kept by vLLM's own code, and moved by plans.

Specs are those of :mod:`tests.engines.specs`. vLLM's planning makes groups of them, its allocation the views that a
connector gets, and its managers give blocks to a request and take them back as it is computed. Rows are written and
read at the addresses of vLLM's kernels, without kvplan. No model type is named to kvplan.

For another release than the one installed, have its Python files first on ``PYTHONPATH``, or their folder in
``KVPLAN_VLLM_FILES``: then :func:`test_of_another_release` runs this file with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Blocks, Worker, plan_reads
from kvplan.bridges import RankInfo, from_vllm, vllm_model
from kvplan.connector import whole_blocks
from tests.engines import specs
from tests.engines.specs import Cached, Caches, allocated, engine_config, label, places, planned, row_bytes, spec_of

block_pool = pytest.importorskip("vllm.v1.core.block_pool")
managers = pytest.importorskip("vllm.v1.core.single_type_kv_cache_manager")
description = pytest.importorskip("kvplan_nixl.vllm.description")
tables = pytest.importorskip("kvplan_nixl.vllm.tables")

NUM_BLOCKS = 160
STEP = 192
"""Tokens that prefill computes in a step."""


@attrs.frozen(eq=False)
class Engine:
    """An engine's model, and one request of it: its blocks in each group, and which of them are null."""

    name: str
    make: Callable[[int], Caches]
    tp: int = 1
    layout: str = "BLHNC"

    @property
    def caches(self) -> Caches:
        """The caches of a rank."""
        return self.make(self.tp)

    @property
    def cache(self) -> Any:
        """The ``KVCacheConfig`` of each rank."""
        return planned(self.caches, self.layout, NUM_BLOCKS)


def managers_of(cache: Any, blocks_used: int) -> list[Any]:
    """vLLM's managers of a cache's groups, over one pool of blocks, of which some are another request's."""
    pool = block_pool.BlockPool(cache.num_blocks, enable_caching=False, hash_block_size=4)
    pool.get_new_blocks(blocks_used)
    return [
        managers.get_manager_for_kv_cache_spec(
            next(iter(getattr(group.kv_cache_spec, "kv_cache_specs", {0: group.kv_cache_spec}).values())),
            max_in_flight_tokens=STEP,
            max_model_len=1 << 16,
            block_pool=pool,
            enable_caching=False,
            kv_cache_group_id=index,
            scheduler_block_size=256,
        )
        for index, group in enumerate(cache.kv_cache_groups)
    ]


def computed(cache: Any, num_tokens: int) -> list[list[int]]:
    """The blocks of a request that vLLM has computed, in steps."""
    kept = managers_of(cache, 3)
    for stop in [*range(STEP, num_tokens, STEP), num_tokens]:
        for manager in kept:
            manager.remove_skipped_blocks("request", max(0, stop - STEP))
            manager.allocate_new_blocks("request", stop, stop)
    return [[block.block_id for block in manager.req_to_blocks["request"]] for manager in kept]


def loaded(cache: Any, num_tokens: int) -> list[list[int]]:
    """The blocks that vLLM gives to a request whose first tokens a connector loads."""
    kept = managers_of(cache, 7)
    for manager in kept:
        manager.add_local_computed_blocks("request", [], 0, num_tokens)
    for manager in kept:
        manager.allocate_external_computed_blocks("request", 0, num_tokens)
    return [[block.block_id for block in manager.req_to_blocks["request"]] for manager in kept]


def described(engine: Engine, cache: Any, views: Mapping[str, Any], rank: int) -> Worker:
    """The worker of a rank, by vLLM's objects alone."""
    layers = {
        name: SimpleNamespace(get_attn_backend=lambda backend=cached.backend: SimpleNamespace(get_name=lambda: backend))
        for name, cached in engine.caches.items()
    }
    heads = {name.split(".")[2]: cached.heads for name, cached in engine.caches.items() if cached.heads}
    model = vllm_model(
        "a model",
        RankInfo(engine.name, rank, rank, engine.tp),
        cache,
        layers,
        kv_heads=lambda number, _: heads.get(str(number), 1),
    )
    return from_vllm(model, RankInfo(engine.name, rank, rank, engine.tp), cache, views, layers)


def rows_of(
    engine: Engine, cache: Any, ids: list[list[int]], rank: int, num_tokens: int, first: Mapping[int, int]
) -> Iterator[tuple[str, int, int, list[tuple[int, int]]]]:
    """What a rank has of a request: each row's layer, number and head, and its bytes.

    ``first`` is the first position that is looked at, by group.
    """
    placed = places(cache)
    for index, group in enumerate(cache.kv_cache_groups):
        for name in group.layer_names:
            cached, spec = engine.caches[name], spec_of(group, name)
            local = int(spec.num_heads)
            begin = 0 if cached.heads is None else rank * cached.heads // engine.tp
            for row, block, slot in _slots(cached, spec, ids[index], num_tokens, first.get(index, 0)):
                for head in range(local):
                    ranges = row_bytes(cached, spec, placed[name], block, slot, head, engine.layout[-3:-1])
                    yield name, row, begin + head, [*ranges]


def _slots(cached: Cached, spec: Any, ids: list[int], num_tokens: int, first: int) -> Iterator[tuple[int, int, int]]:
    """Each row of a request with its block and its slot in it."""
    if cached.ring:
        (block,) = ids
        for position in range(max(0, num_tokens - cached.ring), num_tokens):
            yield position, block, position % cached.ring
        return
    tokens = cached.tokens
    for row in range(first // tokens, -(-num_tokens // tokens)):
        block = ids[row * tokens // spec.block_size]
        if block:
            yield row, block, row * tokens % spec.block_size // tokens


def fill(memory: Any, rows: Iterator[tuple[str, int, int, list[tuple[int, int]]]]) -> None:
    """Write the label of each row."""
    for name, row, head, ranges in rows:
        content = label(name, row, head, sum(length for _, length in ranges))
        for offset, length in ranges:
            memory[offset : offset + length], content = content[:length], content[length:]


def ranges_read(
    source: Any, destination: Any, remote: Mapping[str, Blocks], local: Mapping[str, Blocks], num_tokens: int
) -> dict[str, tuple[int, int]]:
    """The positions of each group that a connector reads."""
    ranges = {}
    for name in destination.positioned:
        attended = description.first_attended(destination.groups[name], num_tokens)
        whole = whole_blocks(
            (0, num_tokens),
            attended=attended,
            tokens_per_block=destination.block_sizes[name],
            listed=destination.first_listed(name, local[name]),
            kept=source.first_listed(name, remote[name]),
        )
        ranges[name] = whole.start, whole.stop
    return ranges


def moved(source: Engine, destination: Engine, num_tokens: int) -> int:
    """Move a request from a source to all ranks of a destination, and return how many bytes were compared.

    Each row that the destination attends to must be there, and no other byte may change.
    """
    source_cache, cache = source.cache, destination.cache
    description.check_kinds(source_cache)
    ids, local_ids = computed(source_cache, num_tokens), loaded(cache, num_tokens)
    senders = []
    memories = []
    for rank in range(source.tp):
        memory, views = allocated(source_cache, source.layout, rank)
        fill(memory, rows_of(source, source_cache, ids, rank, num_tokens, {}))
        memories.append(memory)
        senders.append(described(source, source_cache, views, rank))
    sent = tables.BlockTables(engine_config(), source_cache)
    received = tables.BlockTables(engine_config(), cache)
    remote, local = sent.of_ids(ids), received.of_ids(local_ids)
    tokens = ranges_read(sent, received, remote, local, num_tokens)
    num_compared = 0
    for rank in range(destination.tp):
        memory, views = allocated(cache, destination.layout, 100 + rank)
        expected = memory.copy()
        worker = described(destination, cache, views, rank)
        held = {group.name for group in worker.groups}
        request: dict[str, Any] = {
            "local": {name: blocks for name, blocks in local.items() if name in held},
            "remote": {name: blocks for name, blocks in remote.items() if name in held},
            "tokens": {name: extent for name, extent in tokens.items() if name in held},
        }
        for read in plan_reads(worker, senders).bind(**request):
            copy(read)
        first = {received.indices[name]: begin for name, (begin, _) in tokens.items()}
        fill(expected, rows_of(destination, cache, local_ids, rank, num_tokens, first))
        wrong = np.flatnonzero(memory != expected)
        assert not wrong.size, f"{wrong.size} bytes of rank {rank}, from {wrong[0]} on"
        num_compared += memory.size
    return num_compared


def copy(read: Any) -> None:
    """Moves the bytes of a read from one part of this process's memory to another."""
    for (local, length, _), (remote, *_) in zip(*(rows.tolist() for rows in read.descriptors()), strict=True):
        ctypes.memmove(local, remote, length)


@pytest.mark.parametrize("num_tokens", [1, 129, 700, 1024])
@pytest.mark.parametrize(("tp", "other_tp"), [(1, 1), (1, 2), (2, 1), (4, 8)])
def test_deepseek_v4(tp: int, other_tp: int, num_tokens: int) -> None:
    """Rows of 4 and of 128 tokens, windows of 584 bytes a token, keys, and what compressors still need."""
    assert moved(Engine("prefill", specs.deepseek_v4, tp), Engine("decode", specs.deepseek_v4, other_tp), num_tokens)
