"""from_vllm on caches that vLLM's CPU attention fills with its own op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan import Model
from kvplan.bridges import RankInfo, from_vllm
from kvplan.models.tensors import attention
from tests.engine_memory import HEADS, TOKENS, check, meaning, names_of

torch = pytest.importorskip("torch")
ops = pytest.importorskip("vllm._custom_ops", reason="needs vLLM for CPUs")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")

BLOCK, NUM_BLOCKS, TABLE = 64, 4, [2]


@pytest.mark.parametrize("kernel", [64, 32])
@pytest.mark.parametrize(
    ("isa", "dtype", "dims"),
    [("", "float32", 64), ("vec", "float16", 64), ("vec16", "float32", 80), ("amx", "float16", 64)],
)
def test_what_cpu_attention_writes(isa: str, dtype: str, dims: int, kernel: int) -> None:
    """K and V that the op of each instruction set writes are where the worker says; without one, vLLM chooses it."""
    model, names = Model("cpu", (attention(HEADS, dims),) * 2, dtype), names_of(range(2))
    spec = interface.FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=dims, dtype=getattr(torch, dtype)
    )
    page = spec.page_size_bytes
    raw = torch.zeros(2 * NUM_BLOCKS * page, dtype=torch.int8)
    placed = interface.KVCacheTensor(raw.numel(), names, NUM_BLOCKS * page, page)
    views = interface.create_kv_cache_views(raw, spec, NUM_BLOCKS, interface.KVCacheLayout.LBHNC, placed, kernel)
    isa = isa or cpu_attn._get_attn_isa(spec.dtype, BLOCK, dims)
    for layer, cache in enumerate(views):
        written = [torch.from_numpy(value) for value in kv_of(layer, dims, dtype)]
        halves = cache.view(cache.shape[0], HEADS, 2 * kernel, dims).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(*written, *halves, torch.arange(TOKENS) + TABLE[0] * BLOCK, isa)
    config = interface.KVCacheConfig(NUM_BLOCKS, [placed], [interface.KVCacheGroupSpec(names, spec)])
    attending = SimpleNamespace(get_attn_backend=lambda: cpu_attn.CPUAttentionBackend, isa=isa)
    caches = dict(zip(names, views, strict=True))
    check(
        model, [from_vllm(model, RankInfo("prefill"), config, caches, dict.fromkeys(names, attending))], {"attn": TABLE}
    )


def kv_of(layer: int, dims: int, dtype: str) -> list[Any]:
    """K and V of a request, each [token, head, dim]."""
    token, head, dim = np.meshgrid(*map(np.arange, (TOKENS, HEADS, dims)), indexing="ij")
    return [meaning(f"layers.{layer}.attn", dtype, kv=half, head=head, token=token, dim=dim) for half in range(2)]
