"""Pools of SGLang's ranks of context parallelism on prefill, filled by its own division of a prompt.

SGLang's attention under context parallelism runs on GPUs alone. What it does there with keys and values runs here: each
rank has those of its own positions, gathers the others' and writes all of them into its pool.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan import Worker
from kvplan.bridges import RankInfo, from_sglang
from tests.engine_memory import DIM, GQA, HEADS, MLA, TABLES, TOKENS, check, heads, kv, latent_of

sys.path.append(str(Path(__file__).with_name("standins")))

torch = pytest.importorskip("torch")
memory_pool = pytest.importorskip("sglang.srt.mem_cache.memory_pool", reason="needs SGLang")
base = pytest.importorskip("sglang.srt.layers.cp.base")
zigzag = pytest.importorskip("sglang.srt.layers.cp.zigzag")
interleave = pytest.importorskip("sglang.srt.layers.cp.interleave")
dp_attention = pytest.importorskip("sglang.srt.layers.dp_attention")

PAGE = 8
SIZE = 8 * PAGE
CHUNKS = (0, 12, TOKENS)
"""Positions at which chunks of the prompt begin and end, in the middle of a page."""


class Group:
    """Ranks of context parallelism, on threads."""

    def __init__(self, size: int) -> None:
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)
        self.here = threading.local()

    def all_gather_into_tensor(self, gathered: Any, local: Any) -> None:
        """Give each rank what all have, in their order."""
        self._said[self.here.parallel.attn_cp_rank] = local
        self._barrier.wait()
        gathered.copy_(torch.cat(self._said))
        self._barrier.wait()


def filled(
    monkeypatch: pytest.MonkeyPatch, size: int, make_pool: Callable[[], Any], fill: Callable[[Any, range], None]
) -> list[Any]:
    """The pools of all ranks, each filled by its rank, chunk by chunk."""
    group = Group(size)
    for module in (base, zigzag, interleave, dp_attention):
        monkeypatch.setattr(module, "get_parallel", lambda: group.here.parallel)
    monkeypatch.setattr(zigzag, "get_token_to_kv_pool", lambda: group.here.pool)

    def run(rank: int) -> Any:
        group.here.parallel = SimpleNamespace(attn_cp_rank=rank, attn_cp_size=size, attn_cp_group=group)
        group.here.pool = make_pool()
        for start, stop in pairwise(CHUNKS):
            fill(group.here.pool, range(start, stop))
        return group.here.pool

    with ThreadPoolExecutor(size) as ranks:
        return [*ranks.map(run, range(size))]


def batch(strategy: Any, positions: range) -> SimpleNamespace:
    """SGLang's batch of a chunk of the request, and how a strategy divides it."""
    slots = [TABLES["attn"][position // PAGE] * PAGE + position % PAGE for position in positions]
    metadata = strategy.build_metadata(len(positions), [positions.stop], [len(positions)])
    places = {"out_cache_loc": torch.tensor(slots), "out_cache_loc_is_physical": True}
    return SimpleNamespace(attn_cp_metadata=metadata, **places)


def mine(strategy: Any, chunk: SimpleNamespace, values: Any) -> Any:
    """The values of the positions that the strategy gives to this rank, which are not all."""
    local = strategy.shard_hidden_states(values, chunk)
    assert len(local) < len(values)
    return local


@pytest.mark.parametrize("size", [2, 3])
def test_k_and_v(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Two ranks of TP, each with its heads, and with several ranks of context parallelism: all have all positions."""
    workers: list[Worker] = []
    for tp_rank in range(2):
        held = heads(tp_rank, 2)

        def fill(pool: Any, positions: range, held: range = held) -> None:
            strategy = zigzag.ZigzagCPStrategy(size)
            chunk = batch(strategy, positions)
            for layer in range(3):
                both = [
                    np.stack([[kv(layer, half, head, position) for head in held] for position in positions])
                    for half in range(2)
                ]
                k, v = (mine(strategy, chunk, torch.from_numpy(values)) for values in both)
                facts = {"layer_id": layer, "is_cross_attention": False, "k_scale": None, "v_scale": None}
                strategy.materialize_full_kv(chunk, SimpleNamespace(**facts), k, v)

        def make_pool() -> Any:
            return memory_pool.MHATokenToKVPool(SIZE, PAGE, torch.int32, HEADS // 2, DIM, 3, "cpu", False)

        for pool in filled(monkeypatch, size, make_pool, fill):
            workers.append(from_sglang(GQA, RankInfo("prefill", len(workers), tp_rank, 2), pool))
    # each rank of context parallelism on its own, then all together, where readers choose among them
    for cp_rank in range(size):
        check(GQA, [workers[cp_rank], workers[size + cp_rank]], tp=4)
    check(GQA, workers, tp=4)


@pytest.mark.parametrize("kind", [zigzag.ZigzagCPStrategy, interleave.InterleaveCPStrategy])
def test_latents(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Latents of both strategies, as they gather them; SGLang's kernel that writes them needs a GPU."""

    def fill(pool: Any, positions: range) -> None:
        strategy = kind(2)
        chunk = batch(strategy, positions)
        for layer in range(3):
            values = torch.from_numpy(np.stack([latent_of(layer, position) for position in positions]))
            gathered = strategy.gather_kv_cache(mine(strategy, chunk, values), chunk)
            pool.get_key_buffer(layer)[chunk.out_cache_loc, 0] = gathered

    def make_pool() -> Any:
        return memory_pool.MLATokenToKVPool(SIZE, PAGE, torch.int32, 6, 2, 3, "cpu", False)

    pools = filled(monkeypatch, 2, make_pool, fill)
    workers = [from_sglang(MLA, RankInfo("prefill", rank), pool) for rank, pool in enumerate(pools)]
    for worker in workers:
        check(MLA, [worker])
    check(MLA, workers)
