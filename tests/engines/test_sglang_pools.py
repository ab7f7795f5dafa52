"""from_sglang on SGLang's own pools, written through their own methods and views."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan.bridges import RankInfo, from_sglang
from tests.engine_memory import (
    BLOCKS,
    DIM,
    GQA,
    HEADS,
    MAMBA2,
    MLA,
    SLIDING,
    TABLES,
    check,
    heads,
    latents_of,
    slots,
    states_of,
    values_of,
)

sys.path.append(str(Path(__file__).with_name("standins")))

torch = pytest.importorskip("torch")
memory_pool = pytest.importorskip("sglang.srt.mem_cache.memory_pool", reason="needs SGLang")
swa_memory_pool = pytest.importorskip("sglang.srt.mem_cache.swa_memory_pool", reason="needs SGLang")

INFO = RankInfo("prefill")
SIZE = BLOCKS * 8


def write(
    pool: Any, layers: Sequence[int], held: range, page: int, table: Sequence[int], sliding: bool = False
) -> None:
    """Write K and V of the request into the pages of a table, by the method that attention calls."""
    written = torch.tensor([block * page + slot for _, block, slot in slots(page, table)])
    places = memory_pool.KVWriteLoc(written, written if sliding else None)
    for layer in layers:
        both = np.zeros((2, SIZE + page, len(held), DIM), np.int32)
        for _, half, head, block, slot, value in values_of([layer], held, page, table):
            both[half, block * page + slot, head] = value
        k, v = torch.from_numpy(both)
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), places, k[written], v[written])


@pytest.mark.parametrize("page, table", [(1, list(range(40, 11, -1))), (8, TABLES["attn"])])
def test_k_and_v(page: int, table: list[int]) -> None:
    """Two ranks, each with its heads, in pages of 1 and of 8."""
    pools = [memory_pool.MHATokenToKVPool(SIZE, page, torch.int32, HEADS // 2, DIM, 3, "cpu", False) for _ in range(2)]
    for rank, pool in enumerate(pools):
        write(pool, range(3), heads(rank, 2), page, table)
    workers = [from_sglang(GQA, RankInfo("prefill", rank, rank, 2), pool) for rank, pool in enumerate(pools)]
    check(GQA, workers, {"attn": table}, tp=4)


def test_latents() -> None:
    """Latents of 6 with 2 rotated dimensions."""
    pool = memory_pool.MLATokenToKVPool(SIZE, 8, torch.int32, 6, 2, 3, "cpu", False)
    for layer, block, slot, value in latents_of(range(3), TABLES["attn"]):
        pool.get_key_buffer(layer)[block * 8 + slot, 0] = torch.from_numpy(value)
    check(MLA, [from_sglang(MLA, INFO, pool)])


def test_sliding_layers() -> None:
    """Full and sliding layers in pools of their own, with block tables of their own."""
    pool = swa_memory_pool.SWAKVPool(SIZE, SIZE, 8, torch.int32, HEADS, DIM, [1, 3], [0, 2], "cpu")
    write(pool, [0, 2], range(HEADS), 8, TABLES["attn"])
    write(pool, [1, 3], range(HEADS), 8, TABLES["attn.1"], sliding=True)
    check(SLIDING, [from_sglang(SLIDING, INFO, pool)], {"attn": TABLES["attn"], "swa": TABLES["attn.1"]})


def test_states() -> None:
    """A layer of Mamba2 before one of attention."""
    conv, ssm = states_of(MAMBA2, "DS")
    shape = SimpleNamespace(conv=[conv.shape], temporal=ssm.shape)
    dtype = SimpleNamespace(conv=torch.int16, temporal=torch.int32)
    params = SimpleNamespace(shape=shape, dtype=dtype, is_kda=False)
    states = memory_pool.MambaPool(size=4, spec_state_size=0, cache_params=params, mamba_layer_ids=[0], device="cpu")
    pool = memory_pool.HybridLinearKVPool(SIZE, torch.int32, 8, HEADS, DIM, [1], "cpu", states)
    write(pool, [1], range(HEADS), 8, TABLES["attn"])
    kept = states.mamba2_layer_cache(0)
    kept.conv[0][3], kept.temporal[3] = torch.from_numpy(conv), torch.from_numpy(ssm)
    check(MAMBA2, [from_sglang(MAMBA2, INFO, pool)], {"state": [3], "attn": TABLES["attn"]})
