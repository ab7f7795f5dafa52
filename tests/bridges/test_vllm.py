"""from_vllm, compared with vLLM's own indexing of the caches that it allocates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Context, KVPlanError, Model
from kvplan.bridges import RankInfo, from_vllm
from kvplan.models.layouts import ORDERS
from kvplan.models.tensors import attention
from tests.bridges.vllm_objects import (
    Attention,
    AttentionSpec,
    CPUAttention,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from tests.engine_memory import (
    BLOCKS,
    DELTA,
    DIM,
    GQA,
    HEADS,
    MAMBA1,
    MAMBA2,
    MLA,
    SLIDING,
    SPARSE,
    TABLES,
    TOKENS,
    blocks_of,
    check,
    fill_index,
    fill_vllm,
    heads,
    latents_of,
    meaning,
    names_of,
    slots,
    sparse_row,
    states_of,
)
from tests.stand_in import StandIn

in_content = partial(from_vllm, kv_layout="content")
"""from_vllm for caches with K and V side by side in each slot."""


def laid_out(zeros: Any, order: str, **sizes: int) -> Any:
    """Memory in the order of the letters, as an array with the dimensions L, B, H, N, C."""
    return zeros(*[sizes[letter] for letter in order]).transpose([order.index(letter) for letter in "LBHNC"])


def vllm(caches: Any, names: Sequence[str], spec: Any) -> tuple[Any, dict[str, Any]]:
    """The config and caches of layers in one tensor of dimensions L, B, H, N, C."""
    placed = KVCacheTensor(caches.nbytes, names, caches.strides[0], caches.strides[1])
    config = KVCacheConfig([placed], [KVCacheGroupSpec(names, spec)])
    return config, dict(zip(names, caches, strict=True))


@pytest.mark.parametrize("order", ORDERS)
def test_attention_in_each_layout(zeros: Any, order: str) -> None:
    """The values of two ranks arrive from each of vLLM's six layouts. Each rank has one region."""
    workers = []
    for rank in range(2):
        caches = laid_out(zeros, order, L=3, B=BLOCKS, H=2, N=8, C=2 * DIM)
        for layer in range(3):
            fill_vllm(caches[layer], layer, heads(rank, 2), 8, TABLES["attn"])
        config, by_name = vllm(caches, names_of(range(3)), AttentionSpec(8))
        workers.append(in_content(GQA, RankInfo("prefill", rank, rank, 2), config, by_name))
        assert [region.size_bytes for region in workers[-1].regions] == [caches.nbytes]
    check(GQA, workers, tp=3)


def test_kernel_blocks(zeros: Any) -> None:
    """A block of several kernel blocks has two token axes."""
    caches = laid_out(zeros, "LBNHC", L=3, B=2 * BLOCKS, H=HEADS, N=4, C=2 * DIM)
    kernel_blocks = [2 * block + half for block in TABLES["attn"] for half in range(2)]
    for layer in range(3):
        fill_vllm(caches[layer], layer, range(HEADS), 4, kernel_blocks)
    config, by_name = vllm(caches, names_of(range(3)), AttentionSpec(8))
    config = attrs.evolve(
        config, kv_cache_tensors=[attrs.evolve(config.kv_cache_tensors[0], block_stride=2 * caches.strides[1])]
    )
    worker = in_content(GQA, RankInfo("prefill"), config, by_name)
    assert (worker.groups[0].tokens_per_block, worker.views[0].num_blocks) == (8, BLOCKS)
    check(GQA, [worker])


@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        (9, 4, "SIZE: cannot join the kernel blocks of .*: expected a multiple of 2, got 9 kernel blocks"),
        (8, 3, "SIZE: cannot join the kernel blocks of .*: expected a divisor of 8 tokens, got 3 in a kernel block"),
        (8, 16, "SIZE: cannot join the kernel blocks of .*: expected a divisor of 8 tokens, got 16 in a kernel block"),
    ],
)
def test_kernel_blocks_that_do_not_divide(zeros: Any, blocks: int, slots: int, message: str) -> None:
    """Nothing is dropped: kernel blocks that make up no whole number of blocks are refused."""
    caches = laid_out(zeros, "LBNHC", L=3, B=blocks, H=HEADS, N=slots, C=2 * DIM)
    config, by_name = vllm(caches, names_of(range(3)), AttentionSpec(8))
    placed = attrs.evolve(config.kv_cache_tensors[0], block_stride=8 // slots * caches.strides[1])
    with pytest.raises(KVPlanError, match=message):
        in_content(GQA, RankInfo("prefill"), attrs.evolve(config, kv_cache_tensors=[placed]), by_name)


def vec(half: int, slot: int, dim: Any, slots: int, dims: int) -> Any:
    """The index in a head's K (0) or V (1), as in ``reshape_and_cache`` of csrc/cpu/cpu_attn_vec.hpp."""
    return slot * dims + dim if half else dim * slots + slot


def amx(half: int, slot: int, dim: Any, slots: int, dims: int) -> Any:
    """The index in a head's K (0) or V (1), as in ``reshape_and_cache`` of csrc/cpu/cpu_attn_amx.hpp."""
    if half:
        return dim // 16 * slots * 16 + slot // 2 * 32 + dim % 16 * 2 + slot % 2
    return slot // 16 * 16 * dims + dim // 2 * 32 + slot % 16 * 2 + dim % 2


@pytest.mark.parametrize("kernel", [32, 16])
@pytest.mark.parametrize(("isa", "index"), [("vec", vec), ("vec16", vec), ("amx", amx)])
def test_attention_on_a_cpu(zeros: Any, isa: str, index: Any, kernel: int) -> None:
    """A CPU keeps all of K before all of V in each head of a block or kernel block, which its shape does not say."""
    model, dims = Model("cpu", (attention(HEADS, 48),) * 2, "int32"), np.arange(48)
    caches = zeros(2, 64 // kernel, HEADS, kernel, 2 * 48)
    for layer, half, head, position in np.ndindex(2, 2, HEADS, TOKENS):
        block, slot = (1 * 32 + position) // kernel, position % kernel  # block 1 of 32 slots, or kernel blocks 2 and 3
        value = meaning(f"layers.{layer}.attn", np.int32, kv=half, head=head, token=position, dim=dims)
        flat = caches[layer, block, head].reshape(2, -1)
        flat[half, index(half, slot, dims, kernel, 48)] = value
    names = names_of(range(2))
    config, by_name = vllm(caches, names, AttentionSpec(32))
    placed = attrs.evolve(config.kv_cache_tensors[0], block_stride=32 // kernel * caches.strides[1])
    config, layers = (
        attrs.evolve(config, kv_cache_tensors=[placed]),
        dict.fromkeys(names, CPUAttention("CPU_ATTN", isa=isa)),
    )
    check(model, [from_vllm(model, RankInfo("prefill"), config, by_name, layers)], {"attn": [1]})
    stated = from_vllm(model, RankInfo("prefill"), config, by_name, kv_layout=isa.removesuffix("16"))
    assert stated == from_vllm(model, RankInfo("prefill"), config, by_name, layers)


@pytest.mark.parametrize(
    "layer", [CPUAttention("CPU_ATTN"), CPUAttention("CPU_ATTN", isa="neon"), Attention("CUSTOM"), None]
)
def test_an_attention_backend_that_is_not_known(zeros: Any, layer: Attention | None) -> None:
    """Nobody guesses how a head keeps K and V; a latent has but one way."""
    caches = laid_out(zeros, "LBHNC", L=3, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    config, by_name = vllm(caches, names_of(range(3)), AttentionSpec(8))
    layers = dict.fromkeys(by_name, layer)
    with pytest.raises(KVPlanError, match=r"K and V of .*: expected kv_layout, or a layer whose backend is") as caught:
        from_vllm(GQA, RankInfo("prefill"), config, by_name, layers)
    found = f"{layer.backend} {getattr(layer, 'isa', '')}".strip() if layer else "no layer"
    assert (caught.value.code, caught.value.got) == ("LAYOUT", found)
    with pytest.raises(KVPlanError, match=r"^LAYOUT: cannot read kv_layout: expected one of content, vec, amx, got"):
        from_vllm(GQA, RankInfo("prefill"), config, by_name, kv_layout="NHD")


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"N": 12}, "SIZE: cannot read axis 'token' of tensor 'layers.0.attn': expected a multiple of 16, got 12"),
        ({"C": 15}, "SIZE: cannot read tensor 'layers.0.attn': expected K and V of equal length, got 15 elements"),
        ({"C": 32}, "SIZE: cannot read axis 'dim' of tensor 'layers.0.attn': expected 8 coordinates, got 16"),
        ({}, "STRIDE: cannot read tensor 'layers.0.attn': expected dense slots in each head of a block, got slots 256"),
    ],
)
def test_caches_that_no_cpu_backend_fills(zeros: Any, shape: dict[str, int], text: str) -> None:
    """K and V of a head are tiles of one piece of memory."""
    sizes = {"L": 1, "B": BLOCKS, "H": HEADS, "N": 16, "C": 2 * DIM, **shape}
    caches = laid_out(zeros, "LBHNC" if shape else "LBNHC", **sizes)
    config, by_name = vllm(caches, names_of([0]), AttentionSpec(sizes["N"]))
    with pytest.raises(KVPlanError) as caught:
        from_vllm(GQA, RankInfo("prefill"), config, by_name, kv_layout="amx")
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("shape", [(2, BLOCKS, 8, HEADS, DIM), (BLOCKS, 8, 8)])
def test_a_cache_of_another_shape(zeros: Any, shape: tuple[int, ...]) -> None:
    """Older releases have K and V outside of blocks, and no heads in latents."""
    caches = laid_out(zeros, "LBHNC", L=1, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    config, _ = vllm(caches, names_of([0]), AttentionSpec(8))
    with pytest.raises(KVPlanError, match=r"LAYOUT: cannot read a cache of vLLM: expected dimensions 'block head"):
        in_content(GQA, RankInfo("prefill"), config, dict.fromkeys(names_of([0]), zeros(*shape)))


def test_latents(zeros: Any) -> None:
    """vLLM stores a latent as one head; the model has no head for it."""
    caches = laid_out(zeros, "BLHNC", L=3, B=BLOCKS, H=1, N=8, C=8)
    for layer, block, slot, value in latents_of(range(3), TABLES["attn"]):
        caches[layer][block, 0, slot] = value
    worker = from_vllm(MLA, RankInfo("prefill"), *vllm(caches, names_of(range(3)), AttentionSpec(8)))
    check(MLA, [worker])


def test_groups_share_an_allocation(zeros: Any) -> None:
    """Groups with their own block tables share one allocation. They are in the engine's order."""
    caches = laid_out(zeros, "LBHNC", L=2, B=3 * BLOCKS, H=HEADS, N=8, C=2 * DIM)
    names = [names_of([1, 3]), names_of([0, 2])]
    tables = [TABLES["attn"], [block + BLOCKS for block in TABLES["attn.1"]]]
    for layer in range(4):
        fill_vllm(caches[layer // 2], layer, range(HEADS), 8, tables[(layer + 1) % 2])
    placed = [KVCacheTensor(caches.nbytes, part, caches.strides[0], caches.strides[1]) for part in names]
    config = KVCacheConfig(placed, [KVCacheGroupSpec(part, AttentionSpec(8)) for part in names])
    by_name = {name: caches[i] for part in names for i, name in enumerate(part)}
    worker = in_content(SLIDING, RankInfo("prefill"), config, by_name)
    assert ([group.name for group in worker.groups], len(worker.regions)) == (["swa", "attn"], 1)
    check(SLIDING, [worker], {"swa": tables[0], "attn": tables[1]})


def test_two_tables_of_one_kind(zeros: Any) -> None:
    """A second block table of one kind appends a number to its name."""
    caches = laid_out(zeros, "LBHNC", L=4, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    names = names_of(range(4))
    config, by_name = vllm(caches, names, None)
    groups = [KVCacheGroupSpec(part, AttentionSpec(8)) for part in ([names[0]], [names[2]], [names[1]], [names[3]])]
    worker = in_content(SLIDING, RankInfo("prefill"), attrs.evolve(config, kv_cache_groups=groups), by_name)
    assert [group.name for group in worker.groups] == ["attn", "attn.1", "swa", "swa.1"]
    assert {view.name: view.group for view in worker.views}["layers.3.attn"] == "swa.1"


@pytest.mark.parametrize("order", ["DS", "SD"])
@pytest.mark.parametrize("model", [MAMBA1, MAMBA2, DELTA], ids=str)
@pytest.mark.parametrize("are_apart", [False, True])
def test_states_over_attention(zeros: Any, model: Model, order: str, are_apart: bool) -> None:
    """States of either order of the convolution share an allocation with attention, whose page is the larger.

    Their cache is the bytes of both, or each state apart.
    """
    page = HEADS * 8 * 2 * DIM * 4
    raw = zeros(2, BLOCKS, page, dtype=np.int8)
    fill_vllm(raw[0].view(np.int32).reshape(BLOCKS, HEADS, 8, 2 * DIM), 1, range(HEADS), 8, TABLES["attn"])
    conv, ssm = states_of(model, order)
    raw[0, 1, : conv.nbytes] = conv.reshape(-1).view(np.int8)
    raw[0, 1, conv.nbytes : conv.nbytes + ssm.nbytes] = ssm.reshape(-1).view(np.int8)
    size = conv.nbytes + ssm.nbytes
    spec = MambaSpec(512, shapes=(conv.shape, ssm.shape), dtypes=(f"torch.{conv.dtype}", f"torch.{ssm.dtype}"))
    names = ["backbone.layers.0.mixer", "backbone.layers.1.attn"]
    placed = [KVCacheTensor(raw.nbytes, [name], 0, page) for name in names]
    groups = [KVCacheGroupSpec([names[0]], spec), KVCacheGroupSpec([names[1]], AttentionSpec(8))]
    caches = {
        names[0]: raw[0][:, None, None, :size],
        names[1]: raw[0].view(np.int32).reshape(BLOCKS, HEADS, 8, 2 * DIM),
    }
    if are_apart:
        starts = zip((0, conv.nbytes), (conv, ssm), strict=True)
        parts = [(raw[0][:, start : start + state.nbytes], state) for start, state in starts]
        caches[names[0]] = [part.view(state.dtype).reshape(BLOCKS, *state.shape) for part, state in parts]
    worker = in_content(model, RankInfo("prefill"), KVCacheConfig(placed, groups), caches)
    assert blocks_of(worker) == {"state": None, "attn": 8}
    check(model, [worker], {"state": [1], "attn": TABLES["attn"]})


def test_indexers(zeros: Any) -> None:
    """A sparse latent and an indexer's cache are two caches of one layer in one group, with specs of their own."""
    raw = zeros(BLOCKS * 8 * (656 + 132), dtype=np.uint8)
    rows_of = raw[: BLOCKS * 8 * 656].reshape(BLOCKS, 1, 8, 656)
    keys = raw[rows_of.nbytes :].reshape(BLOCKS, 1, 8, 132)
    for position, block, slot in slots(8, TABLES["attn"]):
        rows_of[block, 0, slot] = sparse_row(position)
    fill_index(keys.reshape(BLOCKS, -1), TABLES["attn"])
    names = ["model.layers.0.self_attn.attn", "model.layers.0.self_attn.indexer.k_cache"]
    specs = {
        names[0]: MLAAttentionSpec(8),
        names[1]: MLAAttentionSpec(8, cache_role=SparseCacheRole.INDEXER),
    }
    placed = [KVCacheTensor(raw.nbytes, [names[0]], 0, 8 * 656)]
    placed.append(KVCacheTensor(raw.nbytes, [names[1]], 0, 8 * 132, rows_of.nbytes))
    config = KVCacheConfig(placed, [KVCacheGroupSpec(names, UniformTypeKVCacheSpecs(8, kv_cache_specs=specs))])
    worker = in_content(SPARSE, RankInfo("prefill"), config, dict(zip(names, (rows_of, keys), strict=True)))
    check(SPARSE, [worker])


def test_positions_of_a_context(zeros: Any) -> None:
    """Token groups have the rank's context; states have none, and neither do groups that vLLM does not spread."""
    context = Context(1, 2, 4)
    info, caches = (
        RankInfo("prefill", context=context),
        laid_out(zeros, "LBHNC", L=3, B=BLOCKS, H=HEADS, N=8, C=2 * DIM),
    )
    for spread in (True, False):
        config, by_name = vllm(caches, names_of(range(3)), AttentionSpec(8, dcp_sharded=spread))
        (group,) = in_content(GQA, info, config, by_name).groups
        assert group.context == (context if spread else Context())


def test_groups_and_layers_that_do_not_move(zeros: Any) -> None:
    """Groups without KV transfer, and layers that use the cache of another, are left out."""
    caches = laid_out(zeros, "LBHNC", L=3, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    config, by_name = vllm(caches, names_of(range(3)), None)
    sharing = ["model.layers.0.self_attn.attn", "model.layers.2.self_attn.attn"]
    (placed,) = config.kv_cache_tensors
    groups = [KVCacheGroupSpec(sharing, AttentionSpec(8)), KVCacheGroupSpec(names_of([1]), AttentionSpec(8), False)]
    config = KVCacheConfig([attrs.evolve(placed, layers=placed.layers[:2])], groups)
    assert [view.name for view in in_content(GQA, RankInfo("prefill"), config, by_name).views] == ["layers.0.attn"]


@pytest.mark.parametrize(
    "draft", ["model.layers.2", "draft_model.model.layers.0", "mtp.layers.0", "model.mtp.layers.0"]
)
def test_draft_layers_follow_the_models(zeros: Any, draft: str) -> None:
    """Layers numbered after the last layer of the model are its draft layers, as those of some modules by name."""
    model = Model("gqa", GQA.layers[:2], "int32").with_draft(Model("draft", GQA.layers[:1], "int32"))
    caches = laid_out(zeros, "LBHNC", L=3, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    names = [*names_of(range(2)), f"{draft}.self_attn.attn"]
    worker = in_content(model, RankInfo("prefill"), *vllm(caches, names, AttentionSpec(8)))
    assert [view.name for view in worker.views] == ["layers.0.attn", "layers.1.attn", "draft.0.attn"]


def test_regions_have_the_device_of_their_tensors() -> None:
    """A tensor on a GPU gives a region of VRAM; its strides count elements."""
    cache = StandIn((BLOCKS, HEADS, 8, 2 * DIM), dtype="torch.int32", address=1 << 40, device="cuda:3")
    placed = KVCacheTensor(1 << 20, names_of([0]), 0, HEADS * 8 * 2 * DIM * 4, offset=4096)
    config = KVCacheConfig([placed], [KVCacheGroupSpec(names_of([0]), AttentionSpec(8))])
    (region,) = in_content(GQA, RankInfo("prefill"), config, {names_of([0])[0]: cache}).regions
    assert (region.memory, region.device_id) == ("VRAM", 3)
    assert (region.address, region.size_bytes) == ((1 << 40) - 4096, 1 << 20)


def test_an_allocation_for_each_device() -> None:
    """Caches at the same address of two devices are in two allocations and two regions."""
    names, block = names_of(range(2)), HEADS * 8 * 2 * DIM * 4
    placed = [KVCacheTensor(BLOCKS * block, [name], 0, block) for name in names]
    config = KVCacheConfig(placed, [KVCacheGroupSpec(names, AttentionSpec(8))])
    caches = {
        name: StandIn((BLOCKS, HEADS, 8, 2 * DIM), dtype="torch.int32", address=1 << 40, device=f"cuda:{i}")
        for i, name in enumerate(names)
    }
    worker = in_content(GQA, RankInfo("prefill"), config, caches)
    assert [(region.address, region.device_id) for region in worker.regions] == [(1 << 40, 0), (1 << 40, 1)]
    assert [view.region for view in worker.views] == [region.name for region in worker.regions]


def vllm_error(zeros: Any, model: Model = GQA, info: RankInfo | None = None, **changes: Any) -> KVPlanError:
    """The error for a valid config and caches with some facts changed."""
    caches = laid_out(zeros, "LBHNC", L=3, B=BLOCKS, H=HEADS, N=8, C=2 * DIM)
    spec = changes.pop("spec", AttentionSpec(8))
    config, by_name = vllm(changes.pop("caches", caches), changes.pop("names", names_of(range(3))), spec)
    (placed,) = config.kv_cache_tensors
    by_name = changes.pop("by_name", by_name)
    config = attrs.evolve(config, kv_cache_tensors=[attrs.evolve(placed, **changes)])
    with pytest.raises(KVPlanError) as caught:
        in_content(model, info or RankInfo("prefill"), config, by_name)
    return caught.value


@pytest.mark.parametrize(
    "changes, text",
    [
        (
            {"info": RankInfo("e", tp=2)},
            "SIZE: cannot read axis 'head' of tensor 'layers.0.attn': expected 2 coordinates, got 4",
        ),
        (
            {"spec": AttentionSpec(12)},
            "SIZE: cannot join the kernel blocks of 'model.layers.0.self_attn.attn': expected a divisor of 12",
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
            {"spec": MambaSpec(shapes=(), dtypes=())},
            "GROUP: cannot place layers.0.* of gqa: expected a layer that caches states, got attn",
        ),
        (
            {"spec": MLAAttentionSpec(8, cache_role=SparseCacheRole.INDEXER)},
            "LAYOUT: cannot read the cache of layer 0: expected no indexer",
        ),
        (
            {"model": GQA.quantized()},
            "LAYOUT: cannot place layers.0.attn.scale: expected a cache without scales",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:40],
)
def test_contradictions(zeros: Any, changes: dict[str, Any], text: str) -> None:
    """Objects that contradict the model, the rank or each other are refused with both values."""
    assert str(vllm_error(zeros, **changes)).startswith(text)


@pytest.mark.parametrize("tp_rank, tp", [(2, 2), (-1, 1), (0, 0)])
def test_a_tensor_parallel_rank_is_below_the_number_of_ranks(tp_rank: int, tp: int) -> None:
    """A tensor-parallel rank is below the number of ranks."""
    with pytest.raises(KVPlanError, match=r"^RANGE"):
        RankInfo("prefill", 0, tp_rank, tp)
