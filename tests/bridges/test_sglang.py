"""from_sglang, compared with SGLang's own indexing of its pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Context, KVPlanError, Model
from kvplan.bridges import RankInfo, from_sglang
from tests.bridges.sglang_pools import (
    DeepSeekV4TokenToKVPool,
    DSATokenToKVPool,
    HybridLinearKVPool,
    IndexKeyPool,
    MambaPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolHost,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    State,
    SWAKVPool,
)
from tests.engine_memory import (
    BLOCKS,
    DELTA,
    DIM,
    GQA,
    HEADS,
    INDEXED,
    MAMBA1,
    MAMBA2,
    MLA,
    SLIDING,
    SPARSE,
    TABLES,
    blocks_of,
    check,
    fill_index,
    heads,
    index_of,
    latents_of,
    slots,
    sparse_row,
    states_of,
    values_of,
)


def sglang_nhd(
    zeros: Any, layers: Sequence[int | str], held: range, page: int, table: Sequence[int]
) -> MHATokenToKVPool:
    """K and V buffers [slot, head, dim], filled by slot."""
    both = zeros(2, len(layers), BLOCKS * 8 + page, len(held), DIM)
    for layer, half, head, block, offset, value in values_of(layers, held, page, table):
        both[half, layers.index(layer), block * page + offset, head] = value
    return MHATokenToKVPool(both[0], both[1], page, len(layers))


@pytest.mark.parametrize("page, table", [(1, list(range(40, 11, -1))), (8, TABLES["attn"])])
def test_slots(zeros: Any, page: int, table: list[int]) -> None:
    """Buffers of slots are pages of any size; each slot has all heads of its rank."""
    workers = [
        from_sglang(GQA, RankInfo("prefill", rank, rank, 2), sglang_nhd(zeros, range(3), heads(rank, 2), page, table))
        for rank in range(2)
    ]
    check(GQA, workers, {"attn": table}, tp=4)


def test_heads_outside_slots(zeros: Any) -> None:
    """Buffers in the layout hnd are pages of heads."""
    both = zeros(2, 3, BLOCKS, HEADS, 8, DIM)
    for layer, half, head, block, slot, value in values_of(range(3), range(HEADS), 8, TABLES["attn"]):
        both[half, layer, block, head, slot] = value
    check(GQA, [from_sglang(GQA, RankInfo("prefill"), MHATokenToKVPool(both[0], both[1], 8, kv_cache_layout="hnd"))])


def test_vectors(zeros: Any) -> None:
    """In the layout vectorized_5d K has vectors of dims, and V vectors of slots."""
    k, v = zeros(3, BLOCKS, HEADS, DIM // 4, 8, 4), zeros(3, BLOCKS, HEADS, 8 // 4, DIM, 4)
    for layer, half, head, block, slot, value in values_of(range(3), range(HEADS), 8, TABLES["attn"]):
        if half:
            v[layer, block, head, slot // 4, :, slot % 4] = value
        else:
            k[layer, block, head, :, slot] = value.reshape(-1, 4)
    pool = MHATokenToKVPool(k, v, 8, kv_cache_layout="vectorized_5d")
    check(GQA, [from_sglang(GQA, RankInfo("prefill"), pool)])


def test_pipeline_stages(zeros: Any) -> None:
    """Each stage's pool begins with its own first layer."""
    stages = [sglang_nhd(zeros, [0], range(HEADS), 8, TABLES["attn"])]
    stages.append(attrs.evolve(sglang_nhd(zeros, [1, 2], range(HEADS), 8, TABLES["attn"]), start_layer=1))
    workers = [from_sglang(GQA, RankInfo("prefill", rank), pool) for rank, pool in enumerate(stages)]
    check(GQA, workers)


def test_latents(zeros: Any) -> None:
    """Latents are slots of one head."""
    check(MLA, [from_sglang(MLA, RankInfo("prefill"), latent_pool(zeros))])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_host_memory(zeros: Any, layout: str) -> None:
    """Each layout of HiCache, with the indices of its own get_data_page."""
    shapes = {
        "layer_first": (3, BLOCKS * 8, 2, DIM),
        "page_first": (BLOCKS * 8, 3, 2, DIM),
        "page_first_direct": (BLOCKS, 3, 8, 2, DIM),
        "page_head": (BLOCKS, 2, 8, 3, DIM),
    }
    workers = []
    for rank in range(2):
        both = zeros(2, *shapes[layout])
        for layer, half, head, block, slot, value in values_of(range(3), heads(rank, 2), 8, TABLES["attn"]):
            index = {
                "layer_first": (layer, block * 8 + slot, head),
                "page_first": (block * 8 + slot, layer, head),
                "page_first_direct": (block, layer, slot, head),
                "page_head": (block, head, slot, layer),
            }[layout]
            both[(half, *index)] = value
        workers.append(from_sglang(GQA, RankInfo("prefill", rank, rank, 2), MHATokenToKVPoolHost(both, layout)))
    check(GQA, workers, tp=4)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_latents_in_host_memory(zeros: Any, layout: str) -> None:
    """Latents of HiCache are slots of one head."""
    shapes = {
        "layer_first": (3, BLOCKS * 8, 1, 8),
        "page_first": (BLOCKS * 8, 3, 1, 8),
        "page_first_direct": (BLOCKS, 3, 8, 1, 8),
    }
    memory = zeros(*shapes[layout])
    for layer, block, slot, value in latents_of(range(3), TABLES["attn"]):
        index = {
            "layer_first": (layer, block * 8 + slot),
            "page_first": (block * 8 + slot, layer),
            "page_first_direct": (block, layer, slot),
        }[layout]
        memory[(*index, 0)] = value
    check(MLA, [from_sglang(MLA, RankInfo("prefill"), MLATokenToKVPoolHost(memory, layout))])


def test_an_unknown_layout_of_host_memory(zeros: Any) -> None:
    """A layout in which K and V take turns is refused."""
    with pytest.raises(KVPlanError, match=r"LAYOUT: cannot read a pool of HiCache: .* got 'page_unified'"):
        from_sglang(GQA, RankInfo("prefill"), MHATokenToKVPoolHost(zeros(2, 3, 64, 4, DIM), "page_unified"))


DRAFT = MLA.with_draft(Model("draft", GQA.layers[:1], "int32"))


def latent_pool(zeros: Any) -> MLATokenToKVPool:
    """A pool that has the latents of the request."""
    buffers = zeros(3, 9 * 8, 1, 8)
    for layer, block, slot, value in latents_of(range(3), TABLES["attn"]):
        buffers[layer, block * 8 + slot, 0] = value
    return MLATokenToKVPool(buffers, 8)


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_a_draft_has_the_block_table_of_its_target(zeros: Any, is_hybrid: bool) -> None:
    """Its pool has layers of another kind, which each rank has heads of; it may be inside another pool."""
    workers = []
    for rank in range(2):
        draft_pool = sglang_nhd(zeros, ["draft.0"], heads(rank, 2), 8, TABLES["attn"])
        wrapped = HybridLinearKVPool(draft_pool, {48: 0}, None)
        info = RankInfo("prefill", rank, rank, 2)
        workers.append(from_sglang(DRAFT, info, latent_pool(zeros), wrapped if is_hybrid else draft_pool))
    check(DRAFT, workers, {"attn": TABLES["attn"]}, tp=4)


@pytest.mark.parametrize(
    "make, text",
    [
        (
            lambda z: sglang_pool(z),
            "SIZE: cannot read a draft pool of SGLang: expected the 1 draft layers of mla, got 3 layers",
        ),
        (
            lambda z: sglang_nhd(z, ["draft.0"], range(HEADS), 4, range(9)),
            "LAYOUT: cannot read pools of SGLang: expected pages of one size, got [4, 8]",
        ),
        (
            lambda z: SWAKVPool(sglang_pool(z), sglang_pool(z), {0: (0, False), 1: (0, True)}),
            "LAYOUT: cannot read a draft pool of SGLang: expected one block table, got 2 block tables",
        ),
    ],
    ids=["layers", "pages", "tables"],
)
def test_drafts_that_are_refused(zeros: Any, make: Any, text: str) -> None:
    """Pools that contradict the model's draft layers."""
    with pytest.raises(KVPlanError) as caught:
        from_sglang(DRAFT, RankInfo("prefill"), latent_pool(zeros), make(zeros))
    assert str(caught.value).startswith(text)


def test_sliding_layers(zeros: Any) -> None:
    """Full and sliding layers have their own pools and block tables, and their own indices in them."""
    full = sglang_nhd(zeros, [0, 2], range(HEADS), 8, TABLES["attn"])
    sliding = sglang_nhd(zeros, [1, 3], range(HEADS), 8, TABLES["attn.1"])
    pool = SWAKVPool(full, sliding, {0: (0, False), 1: (0, True), 2: (1, False), 3: (1, True)})
    tables = {"attn": TABLES["attn"], "swa": TABLES["attn.1"]}
    check(SLIDING, [from_sglang(SLIDING, RankInfo("prefill"), pool)], tables)


def test_a_stage_without_sliding_layers(zeros: Any) -> None:
    """A pool without layers has no group."""
    full = sglang_nhd(zeros, [0], range(HEADS), 8, TABLES["attn"])
    worker = from_sglang(SLIDING, RankInfo("prefill"), SWAKVPool(full, None, {0: (0, False)}))
    assert blocks_of(worker) == {"attn": 8}


@pytest.mark.parametrize("order", ["DS", "SD"])
@pytest.mark.parametrize("model", [MAMBA1, MAMBA2, DELTA], ids=str)
def test_states(zeros: Any, model: Model, order: str) -> None:
    """Convolutions and SSM states are in separate buffers of layers and slots."""
    kept = []
    for state in states_of(model, order):
        kept.append(zeros(1, 5, *state.shape, dtype=state.dtype))
        kept[-1][0, 3] = state
    attention = sglang_nhd(zeros, [1], range(HEADS), 8, TABLES["attn"])
    pool = HybridLinearKVPool(attention, {1: 0}, MambaPool([0], State([kept[0]], kept[1])))
    worker = from_sglang(model, RankInfo("prefill"), pool)
    check(model, [worker], {"state": [3], "attn": TABLES["attn"]})


def test_state_layers_share_a_table(zeros: Any) -> None:
    """All layers with states are in one group, each at its own index in the buffers, and have no context."""
    model = Model("two", (MAMBA2.layers[0], *MAMBA2.layers), "int32")
    states = State([zeros(2, 5, 28, 3, dtype=np.int16)], zeros(2, 5, 4, 2, 5))
    attention = sglang_nhd(zeros, [2], range(HEADS), 8, TABLES["attn"])
    worker = from_sglang(
        model,
        RankInfo("prefill", context=Context(1, 2)),
        HybridLinearKVPool(attention, {2: 0}, MambaPool([0, 1], states)),
    )
    assert blocks_of(worker) == {"attn": 8, "state": None}
    assert [group.context for group in worker.groups] == [Context(1, 2), Context()]
    regions = {region.name: region.address for region in worker.regions}
    places = {view.name: regions[view.region] + view.offset_bytes for view in worker.views if view.group == "state"}
    assert places["layers.1.ssm"] - places["layers.0.ssm"] == 5 * 4 * 2 * 5 * 4


def test_indexers(zeros: Any) -> None:
    """A sparse pool has pages of index keys and scales beside its latents."""
    latents, keys = zeros(1, 9 * 8, 1, 656, dtype=np.uint8), zeros(1, 9, 8 * 132, dtype=np.uint8)
    for position, block, slot in slots(8, TABLES["attn"]):
        latents[0, block * 8 + slot, 0] = sparse_row(position)
    fill_index(keys[0], TABLES["attn"])
    pool = DSATokenToKVPool(latents, 8, 1, index_k_with_scale_buffer=keys)
    check(SPARSE, [from_sglang(SPARSE, RankInfo("prefill"), pool)])


def test_index_keys_beside_k_and_v(zeros: Any) -> None:
    """Some layers have them, in a pool of their own with the slots of the others; all ranks have the same."""
    pools = []
    for rank in range(2):
        keys = zeros(1, 9 * 8, 1, 6)
        for position, block, slot in slots(8, TABLES["attn"]):
            keys[0, block * 8 + slot, 0] = index_of(1, position)
        main_pool = sglang_nhd(zeros, [0, 1], heads(rank, 2), 8, TABLES["attn"])
        pools.append(MiniMaxSparseKVPool(main_pool, IndexKeyPool(keys), {1: 0}))
    workers = [from_sglang(INDEXED, RankInfo("prefill", rank, rank, 2), pools[rank]) for rank in range(2)]
    check(INDEXED, workers, {"attn": TABLES["attn"]}, tp=4)


@pytest.mark.parametrize(
    "make, text",
    [
        (
            lambda main, keys: MiniMaxSparseKVPool(main, None, {}, IndexKeyPool(keys)),
            "LAYOUT: cannot read a pool of SGLang: expected index keys alone, got index keys and values",
        ),
        (
            lambda main, keys: MiniMaxSparseKVPool(main, None, {}),
            "LAYOUT: cannot read the cache of layer 1: expected K and V, or a latent, got index",
        ),
        (
            lambda main, keys: MiniMaxSparseKVPool(main, IndexKeyPool(keys), {0: 0, 1: 0}),
            "LAYOUT: cannot read the cache of layer 0: expected no indexer in indexed, got one",
        ),
    ],
    ids=["values", "none", "more"],
)
def test_index_keys_that_are_refused(zeros: Any, make: Any, text: str) -> None:
    """Pools with other index keys than those of the model."""
    main_pool = sglang_nhd(zeros, [0, 1], range(HEADS), 8, TABLES["attn"])
    with pytest.raises(KVPlanError) as caught:
        from_sglang(INDEXED, RankInfo("prefill"), make(main_pool, zeros(1, 72, 1, 6)))
    assert str(caught.value).startswith(text)


def test_layers_without_index_keys(zeros: Any) -> None:
    """A layer that reuses the choice of the layer before has no keys."""
    latents, keys = zeros(1, 9 * 8, 1, 656, dtype=np.uint8), zeros(1, 0, 8 * 132, dtype=np.uint8)
    pool = DSATokenToKVPool(latents, 8, 1, index_k_with_scale_buffer=keys)
    assert [view.name for view in from_sglang(SPARSE, RankInfo("prefill"), pool).views] == ["layers.0.attn"]


def test_bytes_take_the_dtype_of_the_model(zeros: Any) -> None:
    """Plain bytes of an engine have the dtype of the model, here fp8."""
    pool = MHATokenToKVPool(zeros(3, 72, HEADS, DIM, dtype=np.uint8), zeros(3, 72, HEADS, DIM, dtype=np.uint8), 8)
    worker = from_sglang(GQA.with_dtypes("float8_e4m3fn"), RankInfo("prefill"), pool)
    assert {view.dtype for view in worker.views} == {"float8_e4m3fn"}


def test_tensors_that_touch_are_regions_of_their_own(zeros: Any) -> None:
    """If the objects do not know their allocations, adjacent tensors are separate regions."""
    worker = from_sglang(MLA, RankInfo("prefill"), MLATokenToKVPool(zeros(3, 9 * 8, 1, 8), 8))
    first, second, _ = worker.regions
    assert first.address + first.size_bytes == second.address


def test_tensors_of_torch(zeros: Any) -> None:
    """Tensors of PyTorch give the same worker as arrays in the same memory."""
    torch = pytest.importorskip("torch")
    pool = sglang_nhd(zeros, range(3), range(HEADS), 8, TABLES["attn"])
    same = attrs.evolve(pool, k_buffer=torch.from_numpy(pool.k_buffer), v_buffer=torch.from_numpy(pool.v_buffer))
    assert from_sglang(GQA, RankInfo("prefill"), same) == from_sglang(GQA, RankInfo("prefill"), pool)


def sglang_pool(zeros: Any, **changes: Any) -> MHATokenToKVPool:
    return MHATokenToKVPool(zeros(3, 72, HEADS, DIM), zeros(3, 72, HEADS, DIM), 8, **changes)


def refused_keys(zeros: Any, size: int) -> DSATokenToKVPool:
    keys = zeros(1, 9, size, dtype=np.uint8)
    return DSATokenToKVPool(zeros(1, 72, 1, 656, dtype=np.uint8), 8, 1, index_k_with_scale_buffer=keys)


def refused_states(zeros: Any, *shape: int, dtype: Any = np.int16) -> Any:
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
            lambda z: MHATokenToKVPoolFP4(z(3, 72, HEADS, DIM), z(3, 72, HEADS, DIM), 8, k_scale_buffer=z(1)),
            GQA,
            "LAYOUT: cannot read a pool of SGLang: expected no buffers of scales, got k_scale_buffer",
        ),
        (
            lambda z: sglang_pool(z, layer_num=4),
            GQA,
            "NAME: cannot place a layer: expected one of 3 layers and 0 draft layers of gqa, got layer 3",
        ),
        (
            lambda z: SWAKVPool(None, None, {}, 128),
            SLIDING,
            "LAYOUT: cannot read a pool of SGLang: expected pages of tokens, got a ring of 128 for each request",
        ),
        (
            lambda z: DeepSeekV4TokenToKVPool(None, [0, 4, 128]),
            GQA,
            "LAYOUT: cannot read a pool of SGLang: expected rows whose positions the pages of a request say, "
            "got rows of compressors in rings, by position % size (DeepSeek-V4) (vLLM's compressors keep scores with "
            "the bias of a position added, SGLang's without it)",
        ),
        (
            lambda z: refused_states(z, 27, 3),
            MAMBA2,
            "SIZE: cannot read the state of 'layers.0.conv.x': expected shape (28, 3), got (27, 3)",
        ),
        (
            lambda z: sglang_pool(z, layer_num=1),
            MAMBA1,
            "GROUP: cannot place layers.0.* of mamba1: expected a layer that caches tokens, got conv.x, ssm",
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
            lambda z: MHATokenToKVPool(z(3, 72, HEADS, DIM, dtype=np.uint8), z(1), 8),
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
    ids=["layout", "scales", "layers", "ring", "rings", "shape", "kind", "states", "dtype", "bytes", "keys", "rows"],
)
def test_contradictions(zeros: Any, make: Any, model: Model, text: str) -> None:
    """Pools that contradict the model, or of an unknown kind, are refused with both values."""
    with pytest.raises(KVPlanError) as caught:
        from_sglang(model, RankInfo("prefill"), make(zeros))
    assert str(caught.value).startswith(text)


def test_states_with_gaps(zeros: Any) -> None:
    """A state with gaps between its bytes is refused."""
    conv, ssm = zeros(1, 5, 28, 6, dtype=np.int16)[..., ::2], zeros(1, 5, 4, 2, 5)
    pool = HybridLinearKVPool(sglang_pool(zeros), {1: 0}, MambaPool([0], State([conv], ssm)))
    with pytest.raises(KVPlanError, match=r"^STRIDE: cannot read page 'layers.0.conv.x': expected blocks of 168 bytes"):
        from_sglang(MAMBA2, RankInfo("prefill"), pool)
