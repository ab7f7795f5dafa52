"""from_vllm on caches that vLLM's CPU attention fills with its own op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Blocks, Model, Worker
from kvplan.bridges import RankInfo, from_vllm
from kvplan.models.tensors import attention
from kvplan.testing import Values, assert_memory
from tests.engine_memory import HEADS, TOKENS, check, meaning, names_of

torch = pytest.importorskip("torch")
ops = pytest.importorskip("vllm._custom_ops", reason="needs vLLM for CPUs")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")

BLOCK, NUM_BLOCKS, TABLE, LAYERS = 64, 4, [2], 2


@pytest.mark.parametrize("kernel", [64, 32])
@pytest.mark.parametrize(
    ("isa", "dtype", "dims"),
    [("", "float32", 64), ("vec", "float16", 64), ("vec16", "float32", 80), ("amx", "float16", 64)],
)
def test_what_cpu_attention_writes(isa: str, dtype: str, dims: int, kernel: int) -> None:
    """K and V that the op of each instruction set writes are where the worker says; without one, vLLM chooses it."""
    layers = engine(isa, dtype, dims, kernel)
    for layer in range(LAYERS):
        layers.store(layer, *(torch.from_numpy(value) for value in kv_of(layer, dims, dtype)))
    check(layers.model, [layers.worker()], {"attn": TABLE})


@pytest.mark.parametrize("kernel", [64, 32])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_wrong_description_of_what_cpu_attention_writes(dtype: str, kernel: int) -> None:
    """The probe accepts the worker, and names the fault of one whose layers are exchanged."""
    layers = engine("", dtype, 64, kernel)

    def write(values: Values) -> None:
        for layer in range(LAYERS):
            tensor = f"layers.{layer}.attn"
            kv = (torch.from_numpy(values(tensor, "token head dim", kv=kv)) for kv in range(2))
            layers.store(layer, *(stored.to(getattr(torch, dtype)) for stored in kv))

    request: Any = {"blocks": {"attn": Blocks(TABLE)}, "tokens": (0, TOKENS)}
    assert_memory([layers.worker()], write, **request)
    views = [attrs.evolve(view, name=f"layers.{int(view.name[7]) ^ 1}.attn") for view in layers.worker().views[::-1]]
    with pytest.raises(AssertionError, match=r"everywhere: layers\.0\.attn holds layers\.1\.attn"):
        assert_memory([attrs.evolve(layers.worker(), views=views)], write, **request)


@attrs.frozen
class CpuLayers:
    """Attention layers of vLLM for CPUs: their caches, and the op that stores keys and values."""

    model: Model
    isa: str
    spec: Any
    placed: Any
    caches: dict[str, Any]
    kernel: int

    def store(self, layer: int, key: Any, value: Any) -> None:
        cache = self.caches[[*self.caches][layer]]
        halves = cache.view(cache.shape[0], HEADS, 2 * self.kernel, self.spec.head_size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, *halves, torch.arange(TOKENS) + TABLE[0] * BLOCK, self.isa)

    def worker(self) -> Worker:
        names = [*self.caches]
        config = interface.KVCacheConfig(NUM_BLOCKS, [self.placed], [interface.KVCacheGroupSpec(names, self.spec)])
        attending = SimpleNamespace(get_attn_backend=lambda: cpu_attn.CPUAttentionBackend, isa=self.isa)
        return from_vllm(self.model, RankInfo("prefill"), config, self.caches, dict.fromkeys(names, attending))


def engine(isa: str, dtype: str, dims: int, kernel: int) -> CpuLayers:
    """Layers with empty caches."""
    names = names_of(range(LAYERS))
    spec = interface.FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=dims, dtype=getattr(torch, dtype)
    )
    page = spec.page_size_bytes
    raw = torch.zeros(LAYERS * NUM_BLOCKS * page, dtype=torch.int8)
    placed = interface.KVCacheTensor(raw.numel(), names, NUM_BLOCKS * page, page)
    views = interface.create_kv_cache_views(raw, spec, NUM_BLOCKS, interface.KVCacheLayout.LBHNC, placed, kernel)
    model = Model("cpu", (attention(HEADS, dims),) * LAYERS, dtype)
    isa = isa or cpu_attn._get_attn_isa(spec.dtype, BLOCK, dims)
    return CpuLayers(model, isa, spec, placed, dict(zip(names, views, strict=True)), kernel)


def kv_of(layer: int, dims: int, dtype: str) -> list[Any]:
    """K and V of a request, each [token, head, dim]."""
    token, head, dim = np.meshgrid(*map(np.arange, (TOKENS, HEADS, dims)), indexing="ij")
    return [meaning(f"layers.{layer}.attn", dtype, kv=half, head=head, token=token, dim=dim) for half in range(2)]
