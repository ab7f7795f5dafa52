"""from_sglang on SGLang's own pools, written through their own methods and views."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import KVPlanError, Model, plan_mesh
from kvplan.bridges import RankInfo, from_sglang, sglang_model
from kvplan.bridges.sglang_model import TotalHeads, rank_state, state_layer
from kvplan.cli.inputs import EngineInput
from kvplan.cli.trials import PlacedRequest
from kvplan.models.engines import SGLANG, reasons
from kvplan.models.tensors import attention, convolution, delta, lightning, mamba1, mamba2
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
mamba_utils = pytest.importorskip("sglang.srt.configs.mamba_utils", reason="needs SGLang")

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


def described(model: Model, info: RankInfo, pool: Any, draft_pool: Any = None, **facts: Any) -> None:
    """What is read off the pools alone is what a configuration says of them."""
    observed = sglang_model(model.name, info, pool, draft_pool, **facts)
    assert from_sglang(observed, info, pool, draft_pool) == from_sglang(model, info, pool, draft_pool)


@pytest.mark.parametrize("name, tp", [("qwen3-0.6b", 1), ("qwen3-0.6b", 2), ("qwen3-0.6b", 16), ("gpt-oss-20b", 4)])
def test_heads_of_a_published_model(name: str, tp: int) -> None:
    """A rank with several heads says how many there are. One with a single head does not, so the engine's file does."""
    model = Model.shipped(name)
    sizes = dict(model.layers[0][0].axes)
    local = max(sizes["head"] // tp, 1)
    pool = memory_pool.MHATokenToKVPool(16, 8, torch.bfloat16, local, sizes["dim"], len(model.layers), "cpu", False)
    info = RankInfo("prefill", tp - 1, tp - 1, tp)
    # SGLang has one block table for layers with windows and without, unless the windows have a pool of their own
    layers = tuple(tuple(attrs.evolve(tensor, group="attn") for tensor in layer) for layer in model.layers)
    described(attrs.evolve(model, layers=layers), info, pool, kv_heads=TotalHeads(full=sizes["head"]))
    if local == 1:
        with pytest.raises(KVPlanError, match=r"^SIZE: .* 1 to 16 KV heads in all, .* number \(set KVPLAN_KV_HEADS\)$"):
            sglang_model(name, info, pool)
        with pytest.raises(KVPlanError, match=r"^SIZE: .* 1 to 16 KV heads in all, .*, got 32"):
            sglang_model(name, info, pool, kv_heads=TotalHeads(full=32))


def test_fp8_of_a_published_model() -> None:
    """SGLang keeps fp8 as bytes, and the pool says which fp8 that is."""
    model = Model.shipped("qwen3-0.6b").with_dtypes("float8_e5m2")
    pool = memory_pool.MHATokenToKVPool(16, 8, torch.float8_e5m2, 8, 128, 28, "cpu", False)
    assert pool.k_buffer[0].dtype == torch.uint8
    described(model, INFO, pool)


def test_k_and_v_of_other_sizes() -> None:
    """V has fewer elements than K."""
    pool = memory_pool.MHATokenToKVPool(16, 8, torch.bfloat16, 2, 24, 2, "cpu", False, v_head_dim=16)
    described(Model("wide", (attention(2, 24, value_dim=16),) * 2), INFO, pool)


def test_layers_that_share_the_cache_of_others() -> None:
    """They have buffers too, which nobody writes: Gemma-3n's last layers."""
    pool = memory_pool.MHATokenToKVPool(16, 8, torch.int32, HEADS, DIM, 3, "cpu", False)
    described(attrs.evolve(GQA, layers=(*GQA.layers[:2], ())), INFO, pool, written={0, 1})


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_latents_of_published_models(dtype: str | None) -> None:
    """DeepSeek-V3's latents, and V3.2's with an indexer: as packed fp8, or in the dtype of the model."""
    fixed = {"layer_num": 61, "device": "cpu", "enable_memory_saver": False}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    info = RankInfo("prefill", 3, 3, 8)
    plain = memory_pool.MLATokenToKVPool(64, 64, torch.bfloat16, **latent, **fixed)
    described(Model.shipped("deepseek-v3"), info, plain)
    kept = torch.float8_e4m3fn if dtype is None else torch.bfloat16
    sizes = {"kv_cache_dim": 656 if dtype is None else 576, "index_head_dim": 128, "index_buf_size": 64}
    pool = memory_pool.DSATokenToKVPool(64, 64, dtype=kept, **sizes, **fixed, **latent)
    described(Model.shipped("deepseek-v3.2").with_dtypes(dtype), info, pool)


def test_layers_that_share_an_index() -> None:
    """A layer that takes the choice of the one before has no index keys."""
    sizes = {"kv_cache_dim": 656, "index_head_dim": 128, "index_buf_size": 64, "skip_topk_layers": [False, True]}
    fixed = {"layer_num": 2, "device": "cpu", "enable_memory_saver": False}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": torch.float8_e4m3fn}
    pool = memory_pool.DSATokenToKVPool(64, 64, **sizes, **fixed, **latent)
    described(Model("sparse", (SPARSE.layers[0], SPARSE.layers[0][:1]), "uint8"), INFO, pool)


def test_a_draft_that_is_described() -> None:
    """The draft's own heads: a rank has one of two."""
    target = memory_pool.MLATokenToKVPool(16, 8, torch.int32, 6, 2, 3, "cpu", False)
    draft = memory_pool.MHATokenToKVPool(16, 8, torch.int32, 1, DIM, 1, "cpu", False)
    model = MLA.with_draft(Model("draft", (attention(2, DIM),), "int32"))
    described(model, RankInfo("prefill", 1, 1, 2), target, draft, kv_heads=TotalHeads(draft=2))


def test_windows_that_are_described() -> None:
    """Layers with windows may have other heads, as Gemma-4's and MiMo's do."""
    sizes = {"swa_head_num": 8, "swa_head_dim": 4, "swa_v_head_dim": 4}
    pool = swa_memory_pool.SWAKVPool(16, 16, 8, torch.int32, 1, DIM, [1, 3], [0, 2], "cpu", **sizes)
    layers = (attention(2, DIM), attention(16, 4, "swa", 8)) * 2
    described(
        Model("sliding", layers, "int32"), RankInfo("prefill", 1, 1, 2), pool, kv_heads=TotalHeads(full=2, sliding=16)
    )


def test_index_keys_that_are_described() -> None:
    """MiniMax-M3's, which may have a dtype of their own."""
    sizes = {"head_num": HEADS, "head_dim": DIM, "idx_head_dim": 6, "start_layer": 0, "end_layer": 2}
    layers = {"dense_layer_ids": [0], "sparse_layer_ids": [1], "disable_value_sparse_layer_ids": [1]}
    dtypes = {"dtype": torch.int32, "index_dtype": torch.int16}
    pool = memory_pool.MiniMaxSparseKVPool(16, 8, device="cpu", **dtypes, **sizes, **layers)
    dense, (values, keys) = INDEXED.layers
    described(Model("indexed", (dense, (values, attrs.evolve(keys, dtype="int16"))), "int32"), INFO, pool)


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2, a group on each rank": ("mamba", {"num_heads": 16, "head_dim": 8, "n_groups": 4, "state_size": 32}),
    "mamba2, one group": ("mamba", {"num_heads": 16, "head_dim": 8, "n_groups": 1, "state_size": 32}),
    "gdn": ("", {"num_heads": 16, "head_dim": 8, "n_groups": 8, "state_size": 4, "conv_shard_groups": [32, 32, 128]}),
    "gdn by its layers": ("delta", {"num_heads": 16, "head_dim": 8, "n_groups": 8, "state_size": 4}),
    "short convolution": ("", {"num_heads": 4, "head_dim": 64, "n_groups": 1, "state_size": 0}),
    "lightning": ("", {"num_heads": 16, "head_dim": 8, "n_groups": 0, "state_size": 8, "intermediate_size": 0}),
    "nobody knows": ("", {"num_heads": 16, "head_dim": 8, "n_groups": 4, "state_size": 32}),
}
LAYERS = {
    "mamba2, a group on each rank": mamba2(16, 8, 4, 32, 3, "bfloat16", "float32"),
    "mamba2, one group": mamba2(16, 8, 1, 32, 3, "bfloat16", "float32"),
    "gdn": delta(8, 4, 16, 8, 3, "bfloat16", "float32"),
    "gdn by its layers": delta(8, 4, 16, 8, 3, "bfloat16", "float32"),
    "short convolution": convolution(64, 3, "bfloat16"),
    "lightning": lightning(16, 8, "float32"),
}


def hybrid(shape: Any, rank: int, tp: int) -> Any:
    """SGLang's pool of a layer with a state and a layer with K and V."""
    params = mamba_utils.Mamba2CacheParams(shape=shape, layers=[0])
    pool = memory_pool.MambaPool(size=4, spec_state_size=0, cache_params=params, mamba_layer_ids=[0], device="cpu")
    return memory_pool.HybridLinearKVPool(16, torch.bfloat16, 8, 2, DIM, [1], "cpu", pool)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("tp", [1, 4])
def test_states_that_are_described(kind: str, tp: int) -> None:
    """SGLang's shape on a single rank declares the state of which a rank has a part."""
    rule, sizes = SHAPES[kind]
    sizes = {"intermediate_size": sizes["num_heads"] * sizes["head_dim"], "conv_kernel": 4, **sizes}
    if kind == "short convolution":
        sizes["intermediate_size"] = 64
    if kind == "lightning":
        sizes["conv_kernel"] = 1
    create = mamba_utils.Mamba2StateShape.create
    whole = create(tp_world_size=1, **sizes)
    layer = state_layer(whole, torch.bfloat16, torch.float32, rule)
    assert layer == LAYERS.get(kind)
    pool = hybrid(create(tp_world_size=tp, **sizes), 0, tp)
    for rank in range(tp):
        info = RankInfo("prefill", rank, rank, tp)
        if layer is None:
            observed = sglang_model("new", info, pool, state=rank_state(pool.mamba_pool, info))
            views = [view.name for view in from_sglang(observed, info, pool).views]
            part = "" if tp == 1 else f"tp{tp}.{rank}."
            assert views[-2:] == [f"layers.0.{part}state.{number}" for number in range(2)]
        else:
            model = Model("hybrid", (layer, attention(2 * tp, DIM)))
            described(model, info, pool, state=layer)


def test_mamba1_that_is_described() -> None:
    """SGLang keeps its channels as heads of one channel."""
    create = mamba_utils.Mamba2StateShape.create_full_rank
    sizes = {"intermediate_size": 64, "state_size": 16, "conv_kernel": 4}
    layer = state_layer(create(tp_world_size=1, **sizes), torch.bfloat16, torch.float32, "mamba")
    assert layer == mamba1(64, 16, 3, "bfloat16", "float32")
    pool = hybrid(create(tp_world_size=2, **sizes), 1, 2)
    described(Model("hybrid", (layer, attention(4, DIM))), RankInfo("prefill", 1, 1, 2), pool, state=layer)


def test_kimi_delta_that_is_described() -> None:
    """Its convolution has steps outside of channels."""
    create = mamba_utils.KimiLinearStateShape.create
    layer = state_layer(create(tp_world_size=1, num_heads=8, head_dim=16), torch.bfloat16, torch.float32)
    assert layer == delta(8, 16, 8, 16, 3, "bfloat16", "float32")
    pool = hybrid(create(tp_world_size=2, num_heads=8, head_dim=16), 0, 2)
    described(Model("hybrid", (layer, attention(4, DIM))), RankInfo("prefill", 0, 0, 2), pool, state=layer)


def test_a_state_of_a_kind_that_nobody_has_seen_has_no_parts() -> None:
    """Several convolutions, as ZAYA's."""
    shape = SimpleNamespace(conv=[(8, 3), (16, 1)])
    assert state_layer(shape, torch.bfloat16, torch.float32, "mamba") is None


@pytest.mark.parametrize("groups", [1, 4])
def test_the_state_of_all_ranks_is_that_of_a_single_one(groups: int) -> None:
    """What a rank of four has does not tell one group of Mamba-2 from four: SGLang's own function does."""
    description = pytest.importorskip("kvplan_nixl.sglang.description")
    runtime_context = pytest.importorskip("sglang.srt.runtime_context")
    configs = pytest.importorskip("sglang.srt.configs")
    sizes = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "conv_kernel": 4}
    config = configs.NemotronHConfig(hybrid_override_pattern="M*", n_groups=groups, **sizes)
    model_config = SimpleNamespace(hf_config=config, is_draft_model=False)
    model = SimpleNamespace(modules=lambda: iter([SimpleNamespace(ssm_state_size=32)]))
    ranks = {"tp": (4, 3), "attn_tp": (4, 3), "attn_dp": (1, 0), "attn_cp": (1, 0), "moe_ep": (2, 1)}
    values: dict[str, Any] = {"moe_dp_size": 1, "moe_tp_size": 2, "enable_cp_tp_group_sharing": False}
    for name, (size, rank) in ranks.items():
        values |= {f"{name}_size": size, f"{name}_rank": rank}
        if name != "attn_dp":
            values[f"{name}_group"] = SimpleNamespace(world_size=size)
    parallel = runtime_context.get_parallel()
    parallel.override_permanently(**values)
    try:
        pool = hybrid(config.mamba2_cache_params.shape, 3, 4)
        info = RankInfo("prefill", 3, 3, 4)
        state = description.state_of(model_config, model, pool, info)
        assert parallel.attn_tp_size == 4
    finally:
        parallel.clear_stamp()
    assert state == mamba2(8, 16, groups, 32, 3, "bfloat16", "float32")
    described(Model("hybrid", (state, attention(8, DIM))), info, pool, state=state)


def test_layers_that_attention_writes() -> None:
    """By SGLang's own layers of attention, which have the number of the cache that they use."""
    description = pytest.importorskip("kvplan_nixl.sglang.description")
    radix = pytest.importorskip("sglang.srt.layers.radix_attention")
    layers = [radix.RadixAttention(4, 8, 1.0, 2, layer_id) for layer_id in (0, 1, 0)]
    assert description.written_layers(torch.nn.ModuleList([*layers, torch.nn.Linear(1, 1)])) == {0, 1}
    assert description.written_layers(torch.nn.Linear(1, 1)) is None


def published_pool(name: str) -> Any:
    """The pool that SGLang makes for a rank of a deployment: 960 tokens in pages of 64, and a page of padding."""
    if name == "qwen3-8b":  # 8 heads on 2 ranks
        return memory_pool.MHATokenToKVPool(960, 64, torch.bfloat16, 4, 128, 36, "cpu", False)
    return memory_pool.MLATokenToKVPool(960, 64, torch.bfloat16, 512, 64, 61, "cpu", False)


@pytest.mark.parametrize("name, ranks", [("qwen3-8b", 2), ("deepseek-v3", 8)])
def test_a_rank_of_a_deployment_reads_the_bytes_that_its_pool_has(name: str, ranks: int) -> None:
    """What ``kvplan verify`` says of an SGLang command line is the size that SGLang's own pool reports."""
    sizes = published_pool(name).get_kv_size_bytes()
    num_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes
    command = f"python -m sglang.launch_server --model-path {name} --tp-size {ranks} --page-size 64"
    model = Model.shipped(name)
    options = EngineInput.parse(command, "--src").options(model)
    request = PlacedRequest.of(model, options, options, (0, 960))
    plan = plan_mesh(request.destinations, request.sources).plans[-1]
    specs = plan.bind(local=request.local, remote=request.remote, tokens=request.tokens)
    assert sum(spec.num_bytes for spec in specs) == num_bytes // 1024 * 960


@pytest.mark.parametrize("name, ranks", [("qwen3-8b", 2), ("deepseek-v3", 8)])
def test_a_layout_is_supported_if_the_pool_tells_disaggregation_its_buffers(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots inside heads are asked for by a variable of the environment; a pool of latents does not read it."""
    command = f"python -m sglang.launch_server --model-path {name} --tp-size {ranks} --page-size 64"
    for words, in_heads in ((command, False), (f"SGLANG_USE_HND_KVCACHE=1 {command}", True)):
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", f"{in_heads}")
        refusal = None
        try:
            published_pool(name).get_contiguous_buf_infos()
        except AssertionError as error:
            refusal = f"{error}"
        model = Model.shipped(name)
        found = reasons(model, EngineInput.parse(words, "--src").options(model))[SGLANG]
        assert bool(found) == (refusal is not None) == (in_heads and name == "qwen3-8b"), (found, refusal)
        assert refusal is None or "is not supported with disagg" in refusal
