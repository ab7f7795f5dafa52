"""from_tensorrt_llm, compared with TensorRT-LLM's own indexing of its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from kvplan import KVPlanError, Model
from kvplan.bridges import RankInfo, from_tensorrt_llm
from kvplan.models.tensors import attention
from tests.engine_memory import (
    BLOCKS,
    DIM,
    GQA,
    HEADS,
    MLA,
    SPARSE,
    TABLES,
    check,
    heads,
    latents_of,
    values_of,
)


@attrs.frozen
class KVCacheManager:
    """TensorRT-LLM's manager, with one pool for each window."""

    pools: Sequence[Any]
    shape: tuple[int, ...]
    layer_offsets: Mapping[int, int]
    max_attention_window_vec: Sequence[int]
    tokens_per_block: int = 8

    def get_buffers(self, layer_idx: int, kv_layout: str = "NHD") -> Any:
        """The layer's part of its pool, in the shape of the layout."""
        offset, windows = self.layer_offsets[layer_idx], len(self.pools)
        part = self.pools[offset % windows][:, offset // windows]
        heads, dim = self.shape
        inner = (8, heads, dim) if kv_layout == "NHD" else (heads, 8, dim)
        return part.reshape(*part.shape[:2], *inner)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_attention(zeros: Any, kv_layout: str) -> None:
    """All layers are in one pool and one region; the values of K and of V are in either order."""
    workers = []
    for rank in range(2):
        manager = KVCacheManager([zeros(BLOCKS, 3, 2, 2 * 8 * DIM)], (2, DIM), {0: 0, 1: 1, 2: 2}, [4096])
        for layer in range(3):
            fill_tensorrt_llm(manager.get_buffers(layer, kv_layout), kv_layout, layer, heads(rank, 2), TABLES["attn"])
        workers.append(from_tensorrt_llm(GQA, RankInfo("prefill", rank, rank, 2), manager, kv_layout))
        assert len(workers[-1].regions) == 1
    check(GQA, workers, tp=1)


def fill_tensorrt_llm(buffer: Any, kv_layout: str, layer: int, held: range, table: Sequence[int]) -> None:
    for _, half, head, block, slot, value in values_of([layer], held, 8, table):
        buffer[(block, half, slot, head) if kv_layout == "NHD" else (block, half, head, slot)] = value


def test_windows_and_stages(zeros: Any) -> None:
    """Layers of one window share a block table. The offsets into the windows count a stage's own layers."""
    full, sliding = attention(HEADS, DIM), attention(HEADS, DIM, "swa", 8)
    model, workers = Model("model", (full, sliding, sliding, full), "int32"), []
    for rank, (layers, windows) in enumerate((([0], [4096]), ([1, 2, 3], [8, 8, 4096]))):
        pools = [zeros(BLOCKS, 1, 2, HEADS * 8 * DIM) for _ in windows]
        manager = KVCacheManager(pools, (HEADS, DIM), {layer: i for i, layer in enumerate(layers)}, windows)
        for layer in layers:
            table = TABLES["attn.1" if layer in (1, 2) else "attn"]
            fill_tensorrt_llm(manager.get_buffers(layer, "HND"), "HND", layer, range(HEADS), table)
        workers.append(from_tensorrt_llm(model, RankInfo("prefill", rank), manager, "HND"))
    check(model, workers, {"attn": TABLES["attn"], "swa": TABLES["attn.1"]})


def test_latents(zeros: Any) -> None:
    """A latent has one head, and K only."""
    manager = KVCacheManager([zeros(BLOCKS, 3, 1, 8 * 8)], (1, 8), {0: 0, 1: 1, 2: 2}, [4096])
    for layer, block, slot, value in latents_of(range(3), TABLES["attn"]):
        manager.get_buffers(layer, "NHD")[block, 0, slot, 0] = value
    check(MLA, [from_tensorrt_llm(MLA, RankInfo("prefill"), manager, "NHD")])


def test_buffers_that_overlap(zeros: Any) -> None:
    """Overlapping buffers of several layers, as KVCacheManagerV2 returns them, are refused."""

    class KVCacheManagerV2(KVCacheManager):
        def get_buffers(self, layer_idx: int, kv_layout: str = "NHD") -> Any:
            (pool,) = self.pools
            return pool[layer_idx : layer_idx + 3 * BLOCKS - 2]

    manager = KVCacheManagerV2([zeros(3 * BLOCKS, 2, 8, HEADS, DIM)], (HEADS, DIM), {0: 0, 1: 1, 2: 2}, [4096])
    with pytest.raises(KVPlanError, match=r"^OVERLAP: cannot place view 'layers\.1\.attn'"):
        from_tensorrt_llm(GQA, RankInfo("prefill"), manager, "NHD")


def test_contradictions(zeros: Any) -> None:
    """An unknown layout, and heads that the rank does not hold, are refused with both values."""
    manager = KVCacheManager([zeros(BLOCKS, 3, 2, HEADS * 8 * DIM)], (HEADS, DIM), {0: 0, 1: 1, 2: 2}, [4096])
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .* expected one of NHD, HND, got 'NDH'"):
        from_tensorrt_llm(GQA, RankInfo("prefill"), manager, "NDH")
    with pytest.raises(KVPlanError, match=r"^SIZE: cannot read axis 'head' .* expected 2 coordinates, got 4"):
        from_tensorrt_llm(GQA, RankInfo("prefill", tp=2), manager, "NHD")
    with pytest.raises(KVPlanError, match=r"^LAYOUT: cannot read the cache of layer 0: expected K and V, .* got index"):
        from_tensorrt_llm(SPARSE, RankInfo("prefill"), manager, "NHD")
