"""Recipes, against the engines' own indexing of what they allocate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Blocks, Context, KVPlanError, Model
from kvplan.bridges import Seat, from_lmcache, from_sglang, from_tensorrt_llm, from_vllm
from kvplan.models.layouts import ORDERS
from kvplan.models.tensors import sparse_latent
from tests.recipes_of import (
    DELTA,
    DIM,
    GQA,
    HEADS,
    MAMBA1,
    MAMBA2,
    MLA,
    SLIDING,
    TABLES,
    TOKENS,
    check,
    fill_vllm,
    heads,
    kv,
    latent_of,
    meaning,
    names_of,
    slots,
    states_of,
)

BLOCKS = 8


@attrs.frozen
class AttentionSpec:
    """vLLM's spec of attention layers, or of an indexer."""

    block_size: int
    dcp_sharded: bool = True
    cache_role: Any = None


@attrs.frozen
class MambaSpec:
    """vLLM's spec of state layers."""

    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    dcp_sharded: bool = False


@attrs.frozen
class UniformTypeKVCacheSpecs:
    """vLLM's spec of a group whose layers have specs of their own."""

    block_size: int
    kv_cache_specs: Mapping[str, AttentionSpec]


@attrs.frozen
class KVCacheGroupSpec:
    """Layers of vLLM that share a block table."""

    layer_names: Sequence[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool = True


@attrs.frozen
class KVCacheTensor:
    """Where vLLM places some layers in its allocation."""

    size: int
    layers: Sequence[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@attrs.frozen
class KVCacheConfig:
    """vLLM's groups and placements."""

    kv_cache_tensors: Sequence[KVCacheTensor]
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    num_blocks: int = BLOCKS


@pytest.fixture
def zeros() -> Any:
    """Makes memory that lives as long as its test, which reads it by address."""
    kept: list[Any] = []

    def make(*shape: int, dtype: Any = np.int32) -> Any:
        kept.append(np.zeros(shape, dtype))
        return kept[-1]

    return make


def laid_out(zeros: Any, order: str, **sizes: int) -> Any:
    """Memory in an order of letters, with its dimensions in the order L, B, H, N, C."""
    return zeros(*[sizes[letter] for letter in order]).transpose([order.index(letter) for letter in "LBHNC"])


def vllm(caches: Any, names: Sequence[str], spec: Any) -> tuple[KVCacheConfig, dict[str, Any]]:
    """The config and caches of layers in one tensor of dimensions L, B, H, N, C."""
    placed = KVCacheTensor(caches.nbytes, names, caches.strides[0], caches.strides[1])
    config = KVCacheConfig([placed], [KVCacheGroupSpec(names, spec)])
    return config, dict(zip(names, caches, strict=True))


@pytest.mark.parametrize("order", ORDERS)
def test_vllm_attention_in_each_layout(zeros: Any, order: str) -> None:
    """Caches of two ranks in each of vLLM's six layouts arrive as they were indexed, from one region a rank."""
    workers = []
    for rank in range(2):
        caches = laid_out(zeros, order, L=3, B=BLOCKS, H=2, N=8, C=2 * DIM)
        for layer in range(3):
            fill_vllm(caches[layer], layer, heads(rank, 2), 8, TABLES["attn"])
        config, by_name = vllm(caches, names_of(range(3)), AttentionSpec(8))
        workers.append(from_vllm(GQA, Seat("prefill", rank, rank, 2), config, by_name))
        assert [region.size_bytes for region in workers[-1].regions] == [caches.nbytes]
    check(GQA, workers, {"attn": Blocks(TABLES["attn"])}, tp=3)


def test_vllm_kernel_blocks(zeros: Any) -> None:
    """Caches of kernel blocks are blocks of two digits of slots."""
    caches = laid_out(zeros, "LBNHC", L=3, B=2 * BLOCKS, H=HEADS, N=4, C=2 * DIM)
    kernel_blocks = [2 * block + half for block in TABLES["attn"] for half in range(2)]
    for layer in range(3):
        fill_vllm(caches[layer], layer, range(HEADS), 4, kernel_blocks)
    config, by_name = vllm(caches, names_of(range(3)), AttentionSpec(8))
    config = attrs.evolve(
        config, kv_cache_tensors=[attrs.evolve(config.kv_cache_tensors[0], block_stride=2 * caches.strides[1])]
    )
    worker = from_vllm(GQA, Seat("prefill"), config, by_name)
    assert (worker.groups[0].tokens_per_block, worker.views[0].num_blocks) == (8, BLOCKS)
    check(GQA, [worker], {"attn": Blocks(TABLES["attn"])})


def test_vllm_latents(zeros: Any) -> None:
    """A latent is a head of its own in vLLM, and no head in the model."""
    caches = laid_out(zeros, "BLHNC", L=3, B=BLOCKS, H=1, N=8, C=8)
    for layer in range(3):
        for position, block, slot in slots(8, TABLES["attn"]):
            caches[layer][block, 0, slot] = latent_of(layer, position)
    worker = from_vllm(MLA, Seat("prefill"), *vllm(caches, names_of(range(3)), AttentionSpec(8)))
    check(MLA, [worker], {"attn": Blocks(TABLES["attn"])})


def test_vllm_groups_over_each_other(zeros: Any) -> None:
    """Groups with tables of their own lie over each other in one allocation, and keep the engine's order."""
    caches = laid_out(zeros, "LBHNC", L=2, B=3 * BLOCKS, H=HEADS, N=8, C=2 * DIM)
    names = [names_of([1, 3]), names_of([0, 2])]
    tables = [TABLES["attn"], [block + BLOCKS for block in TABLES["attn.1"]]]
    for layer in range(4):
        fill_vllm(caches[layer // 2], layer, range(HEADS), 8, tables[(layer + 1) % 2])
    placed = [KVCacheTensor(caches.nbytes, part, caches.strides[0], caches.strides[1]) for part in names]
    config = KVCacheConfig(placed, [KVCacheGroupSpec(part, AttentionSpec(8)) for part in names])
    by_name = {name: caches[i] for part in names for i, name in enumerate(part)}
    worker = from_vllm(SLIDING, Seat("prefill"), config, by_name)
    assert ([group.name for group in worker.groups], len(worker.regions)) == (["swa", "attn"], 1)
    check(SLIDING, [worker], {"swa": Blocks(tables[0]), "attn": Blocks(tables[1])})


def test_vllm_two_tables_of_one_kind(zeros: Any) -> None:
    """A second table of one kind has a number behind its name."""
    caches = laid_out(zeros, "LBHNC", L=4, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    names = names_of(range(4))
    config, by_name = vllm(caches, names, None)
    groups = [KVCacheGroupSpec(part, AttentionSpec(8)) for part in ([names[0]], [names[2]], [names[1]], [names[3]])]
    worker = from_vllm(SLIDING, Seat("prefill"), attrs.evolve(config, kv_cache_groups=groups), by_name)
    assert [group.name for group in worker.groups] == ["attn", "attn.1", "swa", "swa.1"]
    assert {view.name: view.group for view in worker.views}["layers.3.attn"] == "swa.1"


@pytest.mark.parametrize("order", ["DS", "SD"])
@pytest.mark.parametrize("model", [MAMBA1, MAMBA2, DELTA], ids=str)
def test_vllm_states_over_attention(zeros: Any, model: Model, order: str) -> None:
    """States of either order of the convolution share an allocation with attention, whose page is the larger."""
    page = HEADS * 8 * 2 * DIM * 4
    raw = zeros(2, BLOCKS, page, dtype=np.int8)
    fill_vllm(raw[0].view(np.int32).reshape(BLOCKS, HEADS, 8, 2 * DIM), 1, range(HEADS), 8, TABLES["attn"])
    conv, ssm = states_of(model, order)
    raw[0, 1, : conv.nbytes] = conv.reshape(-1).view(np.int8)
    raw[0, 1, conv.nbytes : conv.nbytes + ssm.nbytes] = ssm.reshape(-1).view(np.int8)
    size = conv.nbytes + ssm.nbytes
    spec = MambaSpec(512, (conv.shape, ssm.shape), (f"torch.{conv.dtype}", f"torch.{ssm.dtype}"))
    names = ["backbone.layers.0.mixer", "backbone.layers.1.attn"]
    placed = [KVCacheTensor(raw.nbytes, [name], 0, page) for name in names]
    groups = [KVCacheGroupSpec([names[0]], spec), KVCacheGroupSpec([names[1]], AttentionSpec(8))]
    caches = {names[0]: raw[0][:, None, None, :size], names[1]: attention_of(raw[0])}
    worker = from_vllm(model, Seat("prefill"), KVCacheConfig(placed, groups), caches)
    assert blocks_at(worker) == {"state": None, "attn": 8}
    check(model, [worker], {"state": Blocks([1]), "attn": Blocks(TABLES["attn"])})


def attention_of(raw: Any) -> Any:
    """Pages of bytes as an attention cache [block, head, slot, content]."""
    return raw.view(np.int32).reshape(BLOCKS, HEADS, 8, 2 * DIM)


def blocks_at(worker: Any) -> dict[str, int | None]:
    return {group.name: group.tokens_per_block for group in worker.groups}


@attrs.frozen
class Pool:
    """SGLang's pool of K and V."""

    k_buffer: Any
    v_buffer: Any
    page_size: int
    kv_cache_layout: str = "nhd"
    layer_num: int = 3
    start_layer: int = 0
    k_scale_buffer: Any = None


@attrs.frozen
class MLATokenToKVPool:
    """SGLang's pool of latents."""

    kv_buffer: Any
    page_size: int
    start_layer: int = 0
    layer_num: int = 3
    kv_scale_buffer: Any = None
    index_k_with_scale_buffer: Any = None


@attrs.frozen
class SWAKVPool:
    """SGLang's pools of full and of sliding layers."""

    full_kv_pool: Any
    swa_kv_pool: Any
    layers_mapping: Mapping[int, tuple[int, bool]]
    page_size: int
    swa_req_ring_size: int | None = None


@attrs.frozen
class State:
    """SGLang's states: of the convolution in a list, of the rest."""

    conv: Sequence[Any]
    temporal: Any


@attrs.frozen
class MambaPool:
    """SGLang's pool of states."""

    mamba_layer_ids: Sequence[int]
    mamba_cache: State


@attrs.frozen
class HybridLinearKVPool:
    """SGLang's pools of attention and of states."""

    full_kv_pool: Any
    full_attention_layer_id_mapping: Mapping[int, int]
    mamba_pool: MambaPool
    start_layer: int = 0


def sglang_nhd(zeros: Any, layers: Sequence[int], held: range, page: int, table: Sequence[int]) -> Pool:
    """K and V buffers [slot, head, dim], filled by slot."""
    both = zeros(2, len(layers), BLOCKS * 8 + page, len(held), DIM)
    for i, layer in enumerate(layers):
        for position, block, offset in slots(page, table):
            for half in range(2):
                for h, head in enumerate(held):
                    both[half, i, block * page + offset, h] = kv(layer, half, head, position)
    return Pool(both[0], both[1], page, "nhd", len(layers))


@pytest.mark.parametrize("page, table", [(1, list(range(40, 11, -1))), (8, TABLES["attn"])])
def test_sglang_slots(zeros: Any, page: int, table: list[int]) -> None:
    """Buffers of slots are pages of any size, of slots of all heads; two ranks."""
    workers = [
        from_sglang(GQA, Seat("prefill", rank, rank, 2), sglang_nhd(zeros, range(3), heads(rank, 2), page, table))
        for rank in range(2)
    ]
    check(GQA, workers, {"attn": Blocks(table)}, tp=4)


def test_sglang_heads_outside_slots(zeros: Any) -> None:
    """Buffers in the layout hnd are pages of heads."""
    both = zeros(2, 3, BLOCKS, HEADS, 8, DIM)
    for layer in range(3):
        for position, block, slot in slots(8, TABLES["attn"]):
            for half in range(2):
                for head in range(HEADS):
                    both[half, layer, block, head, slot] = kv(layer, half, head, position)
    check(GQA, [from_sglang(GQA, Seat("prefill"), Pool(both[0], both[1], 8, "hnd"))], {"attn": Blocks(TABLES["attn"])})


def test_sglang_vectors(zeros: Any) -> None:
    """In the layout vectorized_5d K has vectors of dims, and V vectors of slots."""
    k, v = zeros(3, BLOCKS, HEADS, DIM // 4, 8, 4), zeros(3, BLOCKS, HEADS, 8 // 4, DIM, 4)
    for layer in range(3):
        for position, block, slot in slots(8, TABLES["attn"]):
            for head in range(HEADS):
                for dim in range(DIM):
                    k[layer, block, head, dim // 4, slot, dim % 4] = kv(layer, 0, head, position)[dim]
                    v[layer, block, head, slot // 4, dim, slot % 4] = kv(layer, 1, head, position)[dim]
    pool = Pool(k, v, 8, "vectorized_5d")
    check(GQA, [from_sglang(GQA, Seat("prefill"), pool)], {"attn": Blocks(TABLES["attn"])})


def test_sglang_pipeline_stages(zeros: Any) -> None:
    """Each stage's pool begins with its own first layer."""
    stages = [sglang_nhd(zeros, [0], range(HEADS), 8, TABLES["attn"])]
    stages.append(attrs.evolve(sglang_nhd(zeros, [1, 2], range(HEADS), 8, TABLES["attn"]), start_layer=1))
    workers = [from_sglang(GQA, Seat("prefill", rank), pool) for rank, pool in enumerate(stages)]
    check(GQA, workers, {"attn": Blocks(TABLES["attn"])})


def test_sglang_latents(zeros: Any) -> None:
    """Latents are slots of one head."""
    buffers = zeros(3, 9 * 8, 1, 8)
    for layer in range(3):
        for position, block, slot in slots(8, TABLES["attn"]):
            buffers[layer, block * 8 + slot, 0] = latent_of(layer, position)
    check(MLA, [from_sglang(MLA, Seat("prefill"), MLATokenToKVPool(buffers, 8))], {"attn": Blocks(TABLES["attn"])})


def test_sglang_sliding_layers(zeros: Any) -> None:
    """Full and sliding layers have pools and tables of their own, and places in them."""
    full = sglang_nhd(zeros, [0, 2], range(HEADS), 8, TABLES["attn"])
    sliding = sglang_nhd(zeros, [1, 3], range(HEADS), 8, TABLES["attn.1"])
    pool = SWAKVPool(full, sliding, {0: (0, False), 1: (0, True), 2: (1, False), 3: (1, True)}, 8)
    tables = {"attn": Blocks(TABLES["attn"]), "swa": Blocks(TABLES["attn.1"])}
    check(SLIDING, [from_sglang(SLIDING, Seat("prefill"), pool)], tables)


@pytest.mark.parametrize("order", ["DS", "SD"])
@pytest.mark.parametrize("model", [MAMBA1, MAMBA2, DELTA], ids=str)
def test_sglang_states(zeros: Any, model: Model, order: str) -> None:
    """States lie in buffers of layers and slots, convolution and the rest apart."""
    kept = []
    for state in states_of(model, order):
        kept.append(zeros(1, 5, *state.shape, dtype=state.dtype))
        kept[-1][0, 3] = state
    attention = sglang_nhd(zeros, [1], range(HEADS), 8, TABLES["attn"])
    pool = HybridLinearKVPool(attention, {1: 0}, MambaPool([0], State([kept[0]], kept[1])))
    worker = from_sglang(model, Seat("prefill"), pool)
    check(model, [worker], {"state": Blocks([3]), "attn": Blocks(TABLES["attn"])})


def test_sglang_state_layers_share_a_table(zeros: Any) -> None:
    """All layers with states are in one group, each at its place in the buffers."""
    model = Model("two", (MAMBA2.layers[0], *MAMBA2.layers), "int32")
    states = State([zeros(2, 5, 28, 3, dtype=np.int16)], zeros(2, 5, 4, 2, 5))
    attention = sglang_nhd(zeros, [2], range(HEADS), 8, TABLES["attn"])
    worker = from_sglang(model, Seat("prefill"), HybridLinearKVPool(attention, {2: 0}, MambaPool([0, 1], states)))
    assert blocks_at(worker) == {"attn": 8, "state": None}
    regions = {region.name: region.address for region in worker.regions}
    places = {view.name: regions[view.region] + view.offset_bytes for view in worker.views if view.group == "state"}
    assert places["layers.1.ssm"] - places["layers.0.ssm"] == 5 * 4 * 2 * 5 * 4


@attrs.frozen
class KVCacheManager:
    """TensorRT-LLM's manager, with one pool for each window."""

    pools: Sequence[Any]
    shape: tuple[int, ...]
    layer_offsets: Mapping[int, int]
    max_attention_window_vec: Sequence[int]
    tokens_per_block: int = 8

    def get_buffers(self, layer_idx: int, kv_layout: str = "NHD") -> Any:
        """The layer's part of its pool, its values in the shape of the layout."""
        offset, windows = self.layer_offsets[layer_idx], len(self.pools)
        part = self.pools[offset % windows][:, offset // windows]
        heads, dim = self.shape
        inner = (8, heads, dim) if kv_layout == "NHD" else (heads, 8, dim)
        return part.reshape(*part.shape[:2], *inner)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_tensorrt_llm_attention(zeros: Any, kv_layout: str) -> None:
    """Layers of one pool, in which K and V of a block are in either order; one region."""
    workers = []
    for rank in range(2):
        manager = KVCacheManager([zeros(BLOCKS, 3, 2, 2 * 8 * DIM)], (2, DIM), {0: 0, 1: 1, 2: 2}, [4096])
        for layer in range(3):
            fill_tensorrt_llm(manager.get_buffers(layer, kv_layout), kv_layout, layer, heads(rank, 2), TABLES["attn"])
        workers.append(from_tensorrt_llm(GQA, Seat("prefill", rank, rank, 2), manager, kv_layout))
        assert len(workers[-1].regions) == 1
    check(GQA, workers, {"attn": Blocks(TABLES["attn"])}, tp=1)


def fill_tensorrt_llm(buffer: Any, kv_layout: str, layer: int, held: range, table: Sequence[int]) -> None:
    for position, block, slot in slots(8, table):
        for half in range(2):
            for i, head in enumerate(held):
                at = (slot, i) if kv_layout == "NHD" else (i, slot)
                buffer[(block, half, *at)] = kv(layer, half, head, position)


def test_tensorrt_llm_windows_and_stages(zeros: Any) -> None:
    """Layers of one window share a table; offsets count a stage's own layers."""
    workers = []
    for rank, layers in enumerate(([0, 1], [2, 3])):
        pools = [zeros(BLOCKS, 1, 2, HEADS * 8 * DIM), zeros(BLOCKS, 1, 2, HEADS * 8 * DIM)]
        manager = KVCacheManager(pools, (HEADS, DIM), {layer: i for i, layer in enumerate(layers)}, [4096, 8])
        for layer in layers:
            table = TABLES["attn.1" if layer % 2 else "attn"]
            fill_tensorrt_llm(manager.get_buffers(layer, "HND"), "HND", layer, range(HEADS), table)
        workers.append(from_tensorrt_llm(SLIDING, Seat("prefill", rank), manager, "HND"))
    check(SLIDING, workers, {"attn": Blocks(TABLES["attn"]), "swa": Blocks(TABLES["attn.1"])})


def test_tensorrt_llm_latents(zeros: Any) -> None:
    """A latent has one head, and K alone."""
    manager = KVCacheManager([zeros(BLOCKS, 3, 1, 8 * 8)], (1, 8), {0: 0, 1: 1, 2: 2}, [4096])
    for layer in range(3):
        for position, block, slot in slots(8, TABLES["attn"]):
            manager.get_buffers(layer, "NHD")[block, 0, slot, 0] = latent_of(layer, position)
    check(MLA, [from_tensorrt_llm(MLA, Seat("prefill"), manager, "NHD")], {"attn": Blocks(TABLES["attn"])})


def test_tensorrt_llm_buffers_that_overlap(zeros: Any) -> None:
    """Dense buffers of several layers over one pool, as the second manager gives them, are refused."""

    class KVCacheManagerV2(KVCacheManager):
        def get_buffers(self, layer_idx: int, kv_layout: str = "NHD") -> Any:
            (pool,) = self.pools
            return pool[layer_idx : layer_idx + 3 * BLOCKS - 2]

    manager = KVCacheManagerV2([zeros(3 * BLOCKS, 2, 8, HEADS, DIM)], (HEADS, DIM), {0: 0, 1: 1, 2: 2}, [4096])
    with pytest.raises(KVPlanError, match=r"^OVERLAP: cannot place view 'layers\.1\.attn'"):
        from_tensorrt_llm(GQA, Seat("prefill"), manager, "NHD")


@attrs.frozen
class MemoryFormat:
    """A member of LMCache's enumeration."""

    name: str


@attrs.frozen
class MemoryObjMetadata:
    """What LMCache knows of a chunk."""

    fmt: MemoryFormat
    address: int
    shapes: Sequence[tuple[int, ...]] | None
    dtypes: Sequence[str] | None
    shape: tuple[int, ...] = ()
    dtype: str = "torch.int32"


@attrs.frozen
class PagedTensorMemoryAllocator:
    """LMCache's allocator of equal chunks."""

    buffer: Any
    align_bytes: int
    paged_buffers: Sequence[Any]


@attrs.frozen
class TensorMemoryObj:
    """LMCache's chunk."""

    metadata: MemoryObjMetadata
    raw_data: Any
    parent_allocator: Any = None

    @property
    def tensor(self) -> Any:
        """The chunk in its (first) shape."""
        shape = self.metadata.shapes[0] if self.metadata.shapes else self.metadata.shape
        return self.raw_data[: math.prod(shape) * 4].view(np.int32).reshape(shape)


def lmcache(zeros: Any, fmt: str, *shapes: tuple[int, ...], blocks: int = BLOCKS) -> list[TensorMemoryObj]:
    """All chunks of a paged allocator."""
    size = sum(map(math.prod, shapes)) * 4
    buffer = zeros(blocks * size, dtype=np.uint8)
    allocator = PagedTensorMemoryAllocator(buffer, size, np.split(buffer, blocks))
    metas = [MemoryObjMetadata(MemoryFormat(fmt), i, shapes, ["torch.int32"] * len(shapes)) for i in range(blocks)]
    return [TensorMemoryObj(m, raw, allocator) for m, raw in zip(metas, allocator.paged_buffers, strict=True)]


def rows(layer: int, half: int, position: int) -> Any:
    """All heads of a token, as LMCache keeps them."""
    return np.concatenate([kv(layer, half, head, position) for head in range(HEADS)])


def test_lmcache_chunks_of_all_layers(zeros: Any) -> None:
    """KV_2LTD: K or V, layer, token, all heads."""
    chunks = lmcache(zeros, "KV_2LTD", (2, 3, 8, HEADS * DIM))
    for layer in range(3):
        for position, block, slot in slots(8, TABLES["attn"]):
            for half in range(2):
                chunks[block].tensor[half, layer, slot] = rows(layer, half, position)
    worker = from_lmcache(GQA, Seat("cache"), chunks[3])
    assert [region.size_bytes for region in worker.regions] == [chunks[0].parent_allocator.buffer.nbytes]
    check(GQA, [worker], {"attn": Blocks(TABLES["attn"])})


def test_lmcache_groups_of_layers(zeros: Any) -> None:
    """A chunk of two shapes has the layers of the second behind those of the first."""
    chunks = lmcache(zeros, "KV_2LTD", (2, 2, 8, HEADS * DIM), (2, 1, 8, HEADS * DIM))
    order = [0, 2, 1]
    for layer in range(3):
        for position, block, slot in slots(8, TABLES["attn"]):
            raw = chunks[block].raw_data.view(np.int32)
            first, second = raw[: 4 * 8 * 32].reshape(2, 2, 8, 32), raw[4 * 8 * 32 :].reshape(2, 1, 8, 32)
            for half in range(2):
                at = order.index(layer)
                (first if at < 2 else second)[half, at % 2, slot] = rows(layer, half, position)
    worker = from_lmcache(GQA, Seat("cache"), chunks[0], layers=[order[:2], order[2:]])
    check(GQA, [worker], {"attn": Blocks(TABLES["attn"])})


@pytest.mark.parametrize("fmt", ["KV_T2D", "KV_2TD"])
def test_lmcache_chunks_of_one_layer(zeros: Any, fmt: str) -> None:
    """A layer a chunk: each layer has a table of its own in the one pool."""
    shape = (8, 2, HEADS * DIM) if fmt == "KV_T2D" else (2, 8, HEADS * DIM)
    chunks = lmcache(zeros, fmt, shape, blocks=12)
    tables = {f"attn.{layer}" if layer else "attn": [11 - layer - 3 * i for i in range(4)] for layer in range(3)}
    for layer, table in enumerate(tables.values()):
        for position, block, slot in slots(8, table):
            for half in range(2):
                at = (slot, half) if fmt == "KV_T2D" else (half, slot)
                chunks[block].tensor[at] = rows(layer, half, position)
    worker = from_lmcache(GQA, Seat("cache"), chunks[0])
    check(GQA, [worker], {group: Blocks(table) for group, table in tables.items()})


def test_lmcache_latents(zeros: Any) -> None:
    """KV_MLA_FMT: one, layer, token, latent."""
    chunks = lmcache(zeros, "KV_MLA_FMT", (1, 3, 8, 8))
    for layer in range(3):
        for position, block, slot in slots(8, TABLES["attn"]):
            chunks[block].tensor[0, layer, slot] = latent_of(layer, position)
    check(MLA, [from_lmcache(MLA, Seat("cache"), chunks[0])], {"attn": Blocks(TABLES["attn"])})


def test_lmcache_chunk_of_fewer_tokens(zeros: Any) -> None:
    """A chunk that is not full keeps its tokens more closely, and is a worker of its own over the same pool."""
    chunks = lmcache(zeros, "KV_2LTD", (2, 3, 64, HEADS * DIM))
    meta = attrs.evolve(chunks[5].metadata, shapes=[(2, 3, TOKENS, HEADS * DIM)])
    size = 2 * 3 * TOKENS * HEADS * DIM * 4
    chunk = attrs.evolve(chunks[5], metadata=meta, raw_data=chunks[5].raw_data[:size])
    for layer in range(3):
        for half in range(2):
            for position in range(TOKENS):
                chunk.tensor[half, layer, position] = rows(layer, half, position)
    worker = from_lmcache(GQA, Seat("cache"), chunk)
    assert (worker.groups[0].tokens_per_block, worker.views[0].num_blocks) == (TOKENS, BLOCKS)
    assert [region.size_bytes for region in worker.regions] == [chunk.parent_allocator.buffer.nbytes]
    check(GQA, [worker], {"attn": Blocks([5])})


def test_lmcache_chunk_of_another_allocator(zeros: Any) -> None:
    """A chunk whose allocator has no pages is a pool of one block; it may say its shape without a list."""
    raw = zeros(2 * 3 * TOKENS * HEADS * DIM * 4, dtype=np.uint8)
    meta = MemoryObjMetadata(MemoryFormat("KV_2LTD"), 12288, None, None, (2, 3, TOKENS, HEADS * DIM))
    chunk = TensorMemoryObj(meta, raw)
    for layer in range(3):
        for half in range(2):
            for position in range(TOKENS):
                chunk.tensor[half, layer, position] = rows(layer, half, position)
    check(GQA, [from_lmcache(GQA, Seat("cache"), chunk)], {"attn": Blocks([0])})


def test_lmcache_latents_of_one_layer(zeros: Any) -> None:
    """KV_MLA_FMT with a layer a chunk: token, latent."""
    chunks = lmcache(zeros, "KV_MLA_FMT", (8, 8), blocks=12)
    tables = {f"attn.{layer}" if layer else "attn": [layer + 3 * i for i in range(4)] for layer in range(3)}
    for layer, table in enumerate(tables.values()):
        for position, block, slot in slots(8, table):
            chunks[block].tensor[slot] = latent_of(layer, position)
    worker = from_lmcache(MLA, Seat("cache"), chunks[0])
    check(MLA, [worker], {group: Blocks(table) for group, table in tables.items()})


SPARSE = Model("sparse", (sparse_latent(512, 64, 128),), "uint8")


@attrs.frozen
class Role:
    """A member of vLLM's SparseCacheRole."""

    value: str


def fill_index(pages: Any, table: Sequence[int]) -> None:
    """An indexer's pages, of bytes: keys of all slots, then their scales."""
    for position, block, slot in slots(8, table):
        for kind, start, size in (("index", slot * 128, 128), ("index.scale", 8 * 128 + slot * 4, 4)):
            pages[block, start : start + size] = meaning(f"layers.0.{kind}", "u1", token=position, byte=np.arange(size))


def row(position: int) -> Any:
    return meaning("layers.0.attn", "u1", token=position, byte=np.arange(656))


def test_vllm_indexers(zeros: Any) -> None:
    """A sparse latent and an indexer's cache are two caches of one layer in one group, with specs of their own."""
    raw = zeros(BLOCKS * 8 * (656 + 132), dtype=np.uint8)
    rows_of = raw[: BLOCKS * 8 * 656].reshape(BLOCKS, 1, 8, 656)
    keys = raw[rows_of.nbytes :].reshape(BLOCKS, 1, 8, 132)
    for position, block, slot in slots(8, TABLES["attn"]):
        rows_of[block, 0, slot] = row(position)
    fill_index(keys.reshape(BLOCKS, -1), TABLES["attn"])
    names = ["model.layers.0.self_attn.attn", "model.layers.0.self_attn.indexer.k_cache"]
    specs = {
        names[0]: AttentionSpec(8, cache_role=Role("sparse")),
        names[1]: AttentionSpec(8, cache_role=Role("indexer")),
    }
    placed = [KVCacheTensor(raw.nbytes, [names[0]], 0, 8 * 656)]
    placed.append(KVCacheTensor(raw.nbytes, [names[1]], 0, 8 * 132, rows_of.nbytes))
    config = KVCacheConfig(placed, [KVCacheGroupSpec(names, UniformTypeKVCacheSpecs(8, specs))])
    worker = from_vllm(SPARSE, Seat("prefill"), config, dict(zip(names, (rows_of, keys), strict=True)))
    check(SPARSE, [worker], {"attn": Blocks(TABLES["attn"])})


def test_sglang_indexers(zeros: Any) -> None:
    """A sparse pool has pages of index keys and scales beside its latents."""
    latents, keys = zeros(1, 9 * 8, 1, 656, dtype=np.uint8), zeros(1, 9, 8 * 132, dtype=np.uint8)
    for position, block, slot in slots(8, TABLES["attn"]):
        latents[0, block * 8 + slot, 0] = row(position)
    fill_index(keys[0], TABLES["attn"])
    pool = MLATokenToKVPool(latents, 8, layer_num=1, index_k_with_scale_buffer=keys)
    check(SPARSE, [from_sglang(SPARSE, Seat("prefill"), pool)], {"attn": Blocks(TABLES["attn"])})


def test_sglang_layers_without_index_keys(zeros: Any) -> None:
    """A layer that uses what the one before has picked keeps no keys."""
    pool = MLATokenToKVPool(zeros(1, 9 * 8, 1, 656, dtype=np.uint8), 8, layer_num=1)
    pool = attrs.evolve(pool, index_k_with_scale_buffer=zeros(1, 0, 8 * 132, dtype=np.uint8))
    assert [view.name for view in from_sglang(SPARSE, Seat("prefill"), pool).views] == ["layers.0.attn"]


def test_bytes_take_the_dtype_of_the_model(zeros: Any) -> None:
    """What an engine keeps as bytes is fp8 where the model says so."""
    pool = Pool(zeros(3, 72, HEADS, DIM, dtype=np.uint8), zeros(3, 72, HEADS, DIM, dtype=np.uint8), 8)
    worker = from_sglang(GQA.with_dtypes("float8_e4m3fn"), Seat("prefill"), pool)
    assert {view.dtype for view in worker.views} == {"float8_e4m3fn"}


def test_positions_of_a_context(zeros: Any) -> None:
    """Token groups have the seat's context; states have none, and neither do groups that vLLM does not spread."""
    context = Context(1, 2, 4)
    seat, caches = Seat("prefill", context=context), laid_out(zeros, "LBHNC", L=3, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    for spread in (True, False):
        config, by_name = vllm(caches, names_of(range(3)), AttentionSpec(8, dcp_sharded=spread))
        (group,) = from_vllm(GQA, seat, config, by_name).groups
        assert group.context == (context if spread else Context())


def test_groups_and_layers_that_do_not_move(zeros: Any) -> None:
    """A group that takes no part in transfers, and a layer that lies in another's cache, are left out."""
    caches = laid_out(zeros, "LBHNC", L=3, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    config, by_name = vllm(caches, names_of(range(3)), None)
    sharing = ["model.layers.0.self_attn.attn", "model.layers.2.self_attn.attn"]
    (placed,) = config.kv_cache_tensors
    groups = [KVCacheGroupSpec(sharing, AttentionSpec(8)), KVCacheGroupSpec(names_of([1]), AttentionSpec(8), False)]
    config = KVCacheConfig([attrs.evolve(placed, layers=placed.layers[:2])], groups)
    assert [view.name for view in from_vllm(GQA, Seat("prefill"), config, by_name).views] == ["layers.0.attn"]


def test_draft_layers_stand_behind_the_models(zeros: Any) -> None:
    """Layers with numbers behind the model's own are its draft layers."""
    model = Model("gqa", GQA.layers[:2], "int32").with_draft(Model("draft", GQA.layers[:1], "int32"))
    caches = laid_out(zeros, "LBHNC", L=3, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    worker = from_vllm(model, Seat("prefill"), *vllm(caches, names_of(range(3)), AttentionSpec(8)))
    assert [view.name for view in worker.views] == ["layers.0.attn", "layers.1.attn", "draft.0.attn"]


@attrs.frozen
class Cuda:
    """A tensor of PyTorch on a GPU, with nothing behind it."""

    shape: tuple[int, ...]
    device: str = "cuda:3"
    dtype: str = "torch.int32"

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def data_ptr(self) -> int:
        return 1 << 40


def test_regions_have_the_device_of_their_tensors() -> None:
    """A tensor on a GPU makes a region in its memory; strides are PyTorch's."""
    cache = Cuda((BLOCKS, HEADS, 8, 2 * DIM))
    placed = KVCacheTensor(1 << 20, names_of([0]), 0, HEADS * 8 * 2 * DIM * 4, offset=4096)
    config = KVCacheConfig([placed], [KVCacheGroupSpec(names_of([0]), AttentionSpec(8))])
    (region,) = from_vllm(GQA, Seat("prefill"), config, {names_of([0])[0]: cache}).regions
    assert (region.memory, region.device_id) == ("VRAM", 3)
    assert (region.address, region.size_bytes) == ((1 << 40) - 4096, 1 << 20)


def test_an_allocation_for_each_device() -> None:
    """Caches at one address of two devices lie in two allocations, and two regions."""
    names, block = names_of(range(2)), HEADS * 8 * 2 * DIM * 4
    placed = [KVCacheTensor(BLOCKS * block, [name], 0, block) for name in names]
    config = KVCacheConfig(placed, [KVCacheGroupSpec(names, AttentionSpec(8))])
    caches = {name: Cuda((BLOCKS, HEADS, 8, 2 * DIM), f"cuda:{i}") for i, name in enumerate(names)}
    worker = from_vllm(GQA, Seat("prefill"), config, caches)
    assert [(region.address, region.device_id) for region in worker.regions] == [(1 << 40, 0), (1 << 40, 1)]
    assert [view.region for view in worker.views] == [region.name for region in worker.regions]


def test_tensors_that_touch_are_regions_of_their_own(zeros: Any) -> None:
    """Where the objects know no allocation, tensors that lie side by side may be of two."""
    worker = from_sglang(MLA, Seat("prefill"), MLATokenToKVPool(zeros(3, 9 * 8, 1, 8), 8))
    first, second, _ = worker.regions
    assert first.address + first.size_bytes == second.address


def test_tensors_of_torch(zeros: Any) -> None:
    """Buffers that are tensors of PyTorch make the worker that arrays in the same memory make."""
    torch = pytest.importorskip("torch")
    pool = sglang_nhd(zeros, range(3), range(HEADS), 8, TABLES["attn"])
    same = attrs.evolve(pool, k_buffer=torch.from_numpy(pool.k_buffer), v_buffer=torch.from_numpy(pool.v_buffer))
    assert from_sglang(GQA, Seat("prefill"), same) == from_sglang(GQA, Seat("prefill"), pool)


def refused_vllm(zeros: Any, model: Model = GQA, seat: Seat | None = None, **changes: Any) -> KVPlanError:
    """The error where some facts of a good pair of config and caches are changed."""
    caches = laid_out(zeros, "LBHNC", L=3, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    spec = changes.pop("spec", AttentionSpec(8))
    config, by_name = vllm(changes.pop("caches", caches), changes.pop("names", names_of(range(3))), spec)
    (placed,) = config.kv_cache_tensors
    by_name = changes.pop("by_name", by_name)
    config = attrs.evolve(config, kv_cache_tensors=[attrs.evolve(placed, **changes)])
    with pytest.raises(KVPlanError) as caught:
        from_vllm(model, seat or Seat("prefill"), config, by_name)
    return caught.value


@pytest.mark.parametrize(
    "changes, text",
    [
        (
            {"seat": Seat("e", tp=2)},
            "SIZE: cannot read axis 'head' of tensor 'layers.0.attn': expected 2 coordinates, got 4",
        ),
        (
            {"spec": AttentionSpec(12)},
            "SIZE: cannot read axis 'token' of tensor 'layers.0.attn': expected 12 coordinates, got 8",
        ),
        ({"model": MLA}, "SIZE: cannot read axis 'dim' of tensor 'layers.0.attn': expected 8 coordinates, got 16"),
        (
            {"model": GQA.with_dtypes("float32")},
            "DTYPE: cannot read tensor 'layers.0.attn': expected float32, got int32",
        ),
        (
            {"names": ["a.0.b.1", "a.1", "a.2"]},
            "NAME: cannot read the layer name 'a.0.b.1': expected one number, got 2",
        ),
        (
            {"names": ["a.9", "a.1", "a.2"]},
            "NAME: cannot place a layer: expected one of 3 layers and 0 draft layers of gqa",
        ),
        (
            {"by_name": {}},
            "NAME: cannot place a layer of vLLM: expected a cache for each, got none for 'model.layers.0",
        ),
        (
            {"block_stride": 64},
            "STRIDE: cannot place the cache of 'model.layers.0.self_attn.attn': expected blocks 64 bytes",
        ),
        (
            {"layer_stride": 64},
            "BOUNDS: cannot place the cache of 'model.layers.1.self_attn.attn': expected one allocation",
        ),
        ({"size": 4096}, "BOUNDS: cannot place the cache of 'model.layers.0.self_attn.attn': expected bytes below"),
        (
            {"spec": MambaSpec(8, (), ())},
            "GROUP: cannot place layers.0.* of gqa: expected a layer that keeps states, got attn",
        ),
        (
            {"spec": AttentionSpec(8, cache_role=Role("indexer"))},
            "LAYOUT: cannot read the cache of layer 0: expected no indexer",
        ),
        (
            {"model": GQA.quantized()},
            "LAYOUT: cannot place layers.0.attn.scale: expected a cache with no tensors of scales",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:40],
)
def test_vllm_contradictions(zeros: Any, changes: dict[str, Any], text: str) -> None:
    """Objects that contradict the model, the seat or each other are refused with both values."""
    assert str(refused_vllm(zeros, **changes)).startswith(text)


def sglang_pool(zeros: Any, **changes: Any) -> Pool:
    return attrs.evolve(Pool(zeros(3, 72, HEADS, DIM), zeros(3, 72, HEADS, DIM), 8), **changes)


def refused_keys(zeros: Any, size: int) -> MLATokenToKVPool:
    pool = MLATokenToKVPool(zeros(1, 72, 1, 656, dtype=np.uint8), 8, layer_num=1)
    return attrs.evolve(pool, index_k_with_scale_buffer=zeros(1, 9, size, dtype=np.uint8))


def refused_states(zeros: Any, *shape: int, dtype: Any = np.int16) -> HybridLinearKVPool:
    states = State([zeros(1, 5, *shape, dtype=dtype)], zeros(1, 5, 4, 2, 5))
    return HybridLinearKVPool(sglang_pool(zeros), {1: 0}, MambaPool([0], states))


@pytest.mark.parametrize(
    "make, model, text",
    [
        (
            lambda z: sglang_pool(z, kv_cache_layout="page_major"),
            GQA,
            "LAYOUT: cannot read a pool of SGLang: expected one of nhd, hnd, vectorized_5d, got 'page_major'",
        ),
        (
            lambda z: sglang_pool(z, k_scale_buffer=z(1)),
            GQA,
            "LAYOUT: cannot read a pool of SGLang: expected no buffers of scales, got k_scale_buffer",
        ),
        (
            lambda z: sglang_pool(z, layer_num=4),
            GQA,
            "NAME: cannot place a layer: expected one of 3 layers and 0 draft layers of gqa, got layer 3",
        ),
        (
            lambda z: SWAKVPool(None, None, {}, 8, 128),
            SLIDING,
            "LAYOUT: cannot read a pool of SGLang: expected pages of tokens, got a ring of 128 for each request",
        ),
        (
            lambda z: refused_states(z, 27, 3),
            MAMBA2,
            "SIZE: cannot read the state of 'layers.0.conv.x': expected shape (28, 3), got (27, 3)",
        ),
        (
            sglang_pool,
            MAMBA1,
            "GROUP: cannot place layers.0.* of mamba1: expected a layer that keeps tokens, got conv.x, ssm",
        ),
        (
            lambda z: HybridLinearKVPool(sglang_pool(z), {1: 0}, MambaPool([0], State([], z(1, 5, 4, 2, 5)))),
            MAMBA2,
            "SIZE: cannot read the states of 'layers.0.conv.x': expected 2 states, got 1",
        ),
        (
            lambda z: refused_states(z, 28, 3, dtype=np.int32),
            MAMBA2,
            "DTYPE: cannot read tensor 'layers.0.conv.x': expected int16, got int32",
        ),
        (
            lambda z: Pool(z(3, 72, HEADS, DIM, dtype=np.uint8), z(1), 8),
            GQA,
            "DTYPE: cannot read tensor 'layers.0.attn': expected int32, got uint8",
        ),
        (
            lambda z: refused_keys(z, 8 * 140),
            SPARSE,
            "SIZE: cannot read page 'layers.0.index': expected blocks of 1056 bytes, got 1120 bytes",
        ),
        (
            lambda z: sglang_pool(z, kv_cache_layout="hnd"),
            GQA,
            "AXES: cannot read a tensor as view 'layers.0.attn': expected one name for each of its 3 dimensions",
        ),
    ],
    ids=["layout", "scales", "layers", "ring", "shape", "kind", "states", "dtype", "bytes", "keys", "rows"],
)
def test_sglang_contradictions(zeros: Any, make: Any, model: Model, text: str) -> None:
    """Pools that contradict the model, or are of a kind that is not read, are refused with both values."""
    with pytest.raises(KVPlanError) as caught:
        from_sglang(model, Seat("prefill"), make(zeros))
    assert str(caught.value).startswith(text)


def test_states_with_gaps(zeros: Any) -> None:
    """A state whose bytes do not follow each other is refused."""
    conv, ssm = zeros(1, 5, 28, 6, dtype=np.int16)[..., ::2], zeros(1, 5, 4, 2, 5)
    pool = HybridLinearKVPool(sglang_pool(zeros), {1: 0}, MambaPool([0], State([conv], ssm)))
    with pytest.raises(KVPlanError, match=r"^STRIDE: cannot read page 'layers.0.conv.x': expected blocks of 168 bytes"):
        from_sglang(MAMBA2, Seat("prefill"), pool)


def test_tensorrt_llm_contradictions(zeros: Any) -> None:
    """A layout that is not one, and heads that the seat does not hold, are refused with both values."""
    manager = KVCacheManager([zeros(BLOCKS, 3, 2, HEADS * 8 * DIM)], (HEADS, DIM), {0: 0, 1: 1, 2: 2}, [4096])
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .* expected one of NHD, HND, got 'NDH'"):
        from_tensorrt_llm(GQA, Seat("prefill"), manager, "NDH")
    with pytest.raises(KVPlanError, match=r"^SIZE: cannot read axis 'head' .* expected 2 coordinates, got 4"):
        from_tensorrt_llm(GQA, Seat("prefill", tp=2), manager, "NHD")
    with pytest.raises(KVPlanError, match=r"^LAYOUT: cannot read the cache of layer 0: expected K and V, .* got index"):
        from_tensorrt_llm(SPARSE, Seat("prefill"), manager, "NHD")


def test_lmcache_contradictions(zeros: Any) -> None:
    """A format that is not read, a wrong number of layers, and a chunk elsewhere are refused with both values."""
    (chunk, *_) = lmcache(zeros, "KV_2LTD", (2, 3, 8, HEADS * DIM))
    binary = attrs.evolve(chunk, metadata=attrs.evolve(chunk.metadata, fmt=MemoryFormat("BINARY")))
    moved = attrs.evolve(chunk, metadata=attrs.evolve(chunk.metadata, address=1))
    for wrong, layers, text in (
        (binary, None, "LAYOUT: cannot read a chunk of LMCache: expected KV_2LTD of 4 dimensions"),
        (chunk, [[0, 1], [2]], "SIZE: cannot read a chunk of LMCache: expected the layers of 1 shapes, got of 2"),
        (chunk, [[0, 1]], "SIZE: cannot read a chunk of LMCache: expected 2 layers, got 3"),
        (moved, None, "BOUNDS: cannot read chunk 1 of LMCache: expected 0x"),
    ):
        with pytest.raises(KVPlanError) as caught:
            from_lmcache(GQA, Seat("cache"), wrong, layers)
        assert str(caught.value).startswith(text)


@pytest.mark.parametrize("tp_rank, tp", [(2, 2), (-1, 1), (0, 0)])
def test_a_seat_is_one_of_its_ranks(tp_rank: int, tp: int) -> None:
    """A tensor-parallel rank is below the number of ranks."""
    with pytest.raises(KVPlanError, match=r"^RANGE"):
        Seat("prefill", 0, tp_rank, tp)
