"""from_sglang on SGLang's own pools, written through their own methods and views."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan import Model
from kvplan.bridges import RankInfo, from_sglang
from tests.engine_memory import (
    BLOCKS,
    DIM,
    GQA,
    HEADS,
    INDEXED,
    MAMBA2,
    MLA,
    SLIDING,
    SPARSE,
    TABLES,
    check,
    heads,
    index_of,
    latents_of,
    meaning,
    slots,
    sparse_row,
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
    pool: Any,
    layers: Sequence[int],
    held: range,
    page: int,
    table: Sequence[int],
    sliding: bool = False,
    prefix: str = "layers",
) -> None:
    """Write K and V of the request into the pages of a table, by the method that attention calls."""
    written = torch.tensor([block * page + slot for _, block, slot in slots(page, table)])
    places = memory_pool.KVWriteLoc(written, written if sliding else None)
    for layer in layers:
        both = np.zeros((2, SIZE + page, len(held), DIM), np.int32)
        for _, half, head, block, slot, value in values_of([f"{prefix}.{layer}"], held, page, table):
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


def latent_pool() -> Any:
    """Latents of 6 with 2 rotated dimensions."""
    pool = memory_pool.MLATokenToKVPool(SIZE, 8, torch.int32, 6, 2, 3, "cpu", False)
    for layer, block, slot, value in latents_of(range(3), TABLES["attn"]):
        pool.get_key_buffer(layer)[block * 8 + slot, 0] = torch.from_numpy(value)
    return pool


def test_latents() -> None:
    """A pool of latents alone."""
    pool = latent_pool()
    check(MLA, [from_sglang(MLA, INFO, pool)])


def test_a_draft() -> None:
    """Two ranks with latents, and a draft with heads, of which each rank has its own. Both have one block table."""
    pools, workers = [], []
    model = MLA.with_draft(Model("draft", GQA.layers[:1], "int32"))
    for rank in range(2):
        draft_pool = memory_pool.MHATokenToKVPool(SIZE, 8, torch.int32, HEADS // 2, DIM, 1, "cpu", False)
        write(draft_pool, [0], heads(rank, 2), 8, TABLES["attn"], prefix="draft")
        pools.append((latent_pool(), draft_pool))
        workers.append(from_sglang(model, RankInfo("prefill", rank, rank, 2), *pools[rank]))
    check(model, workers, {"attn": TABLES["attn"]}, tp=4)


def test_index_keys() -> None:
    """Index keys and scales, which SGLang's own method puts into their places in pages of 64."""
    sizes = {"kv_cache_dim": 656, "index_head_dim": 128, "index_buf_size": 256}
    fixed = {"enable_memory_saver": False, "layer_num": 1, "device": "cpu"}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": torch.float8_e4m3fn}
    pool = memory_pool.DSATokenToKVPool(256, 64, **sizes, **fixed, **latent)
    first_page = pool.index_key_cache.buffer[0][0]
    for position, block, slot in slots(64, [2]):
        pool.kv_buffer[0][block * 64 + slot, 0] = torch.from_numpy(sparse_row(position))
        # slot 0 of page 0, from which they are moved
        for kind, start, size in (("index", 0, 128), ("index.scale", 64 * 128, 4)):
            value = meaning(f"layers.0.{kind}", "u1", token=position, byte=np.arange(size))
            first_page[start : start + size] = torch.from_numpy(value)
        pool.index_key_cache.move(torch.tensor([block * 64 + slot]), torch.tensor([0]))
    check(SPARSE, [from_sglang(SPARSE, INFO, pool)], {"attn": [2]})


def test_index_keys_beside_k_and_v() -> None:
    """MiniMax-M3's pool, of which layer 1 has index keys."""
    sizes = {"head_num": HEADS, "head_dim": DIM, "idx_head_dim": 6, "start_layer": 0, "end_layer": 2}
    layers = {"dense_layer_ids": [0], "sparse_layer_ids": [1], "disable_value_sparse_layer_ids": [1]}
    pool = memory_pool.MiniMaxSparseKVPool(SIZE, 8, torch.int32, device="cpu", **sizes, **layers)
    write(pool.main_pool, range(2), range(HEADS), 8, TABLES["attn"])
    for position, block, slot in slots(8, TABLES["attn"]):
        pool.get_index_k_buffer(1)[block * 8 + slot, 0] = torch.from_numpy(index_of(1, position))
    check(INDEXED, [from_sglang(INDEXED, INFO, pool)], {"attn": TABLES["attn"]})


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
