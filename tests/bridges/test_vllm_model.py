"""vllm_model: what a rank caches by vLLM's own specs, compared with what a configuration says of the same layers."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import KVPlanError, Model, plan_reads
from kvplan.bridges import ObservedModel, RankInfo, from_vllm, vllm_model
from kvplan.models.tensors import (
    Layer,
    attention,
    convolution,
    delta,
    latent,
    lightning,
    mamba1,
    mamba2,
    sparse_latent,
)
from tests.bridges.vllm_objects import (
    Attention,
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaAttentionBackendEnum,
    MambaMixer2,
    MambaSpec,
    MLAAttentionSpec,
    Norm,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    config_of,
    placed,
)
from tests.engine_memory import GQA, HEADS, TABLES, check, fill_vllm, heads, names_of

NAMES = names_of(range(3))


LATENT: dict[str, Any] = {"num_kv_heads": 1, "head_size_v": 0, "max_tp_shards": 1}
"""The fields of a latent, which all ranks have whole."""


def state_spec(kind: str, *shapes: Sequence[int], dtypes: Sequence[str] = (), **fields: Any) -> MambaSpec:
    """A spec of states, in vLLM's words."""
    words = dtypes or ["torch.bfloat16", "torch.float32"][: len(shapes)]
    return MambaSpec(512, shapes=shapes, dtypes=words, mamba_type=MambaAttentionBackendEnum[kind], **fields)


def observed(spec: Any, tp: int = 1, rank: int = 0, module: Any = None, **options: Any) -> ObservedModel:
    """What a rank with one layer caches."""
    info = RankInfo("prefill", rank, rank, tp)
    layers = {} if module is None else {NAMES[0]: module}
    return vllm_model("any", info, config_of({NAMES[0]: spec}), layers, **options)


def tensors_of(spec: Any, tp: int = 1, **options: Any) -> Layer:
    """The tensors of a layer in the group that a configuration would name."""
    return observed(spec, tp, **options).layers[NAMES[0]].tensors


def same(found: Layer, expected: Layer, group: str = "group0") -> None:
    """Tensors are equal but for the name of their group, and the window that only a scheduler needs."""
    assert found == tuple(
        attrs.evolve(tensor, group=group, window=None, chunked=False, dtype=tensor.dtype or "int32")
        for tensor in expected
    )


@pytest.mark.parametrize(
    ("fields", "tp", "total", "expected"),
    [
        ({}, 1, None, attention(2, 8)),
        ({}, 4, None, attention(8, 8)),
        ({"num_kv_heads": 1}, 4, 4, attention(4, 8)),
        ({"num_kv_heads": 1}, 4, 2, attention(2, 8)),
        ({"num_kv_heads": 1}, 4, 1, attention(1, 8)),
        ({"head_size_v": 4}, 2, None, attention(4, 8, value_dim=4)),
        (LATENT, 4, None, latent(6, 2)),
    ],
)
def test_values_of_tokens(fields: dict[str, Any], tp: int, total: int | None, expected: Layer) -> None:
    """Heads of all ranks follow from those of one, but for one head, which is one of as many as vLLM says."""
    same(tensors_of(AttentionSpec(**fields), tp, kv_heads=lambda *_: total), expected)
    same(tensors_of(SlidingWindowSpec(**fields), tp, kv_heads=lambda *_: total), expected)


def test_rows_of_bytes() -> None:
    """What a kernel packs into a slot is a row: of a latent on every rank, of a head on its own."""
    row = tensors_of(MLAAttentionSpec(state_content_bytes=656, dtype="torch.uint8"), 8)
    same(row, (attrs.evolve(sparse_latent(512, 64, 128)[0], plain_axes=None),))
    mode = KVQuantMode.INT8_PER_TOKEN_HEAD
    (packed,) = tensors_of(AttentionSpec(state_content_bytes=24, dtype="torch.int8", kv_quant_mode=mode), 2)
    assert (packed.axes, packed.shards, packed.dtype) == ((("head", 4), ("byte", 24)), 4, "uint8")


def test_index_keys() -> None:
    """An indexer's bytes are fp8 values and a scale for each 128 of them; values of another dtype have none."""
    role = SparseCacheRole.INDEXER
    keys = tensors_of(MLAAttentionSpec(head_size=132, dtype="torch.uint8", cache_role=role))
    same(keys, sparse_latent(512, 64, 128)[1:])
    (plain,) = tensors_of(MLAAttentionSpec(head_size=128, dtype="torch.bfloat16", cache_role=role))
    assert (plain.kind, plain.axes, plain.dtype) == ("index", (("dim", 128),), "bfloat16")


@pytest.mark.parametrize("word", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("in_spec", [False, True])
def test_fp8_is_what_the_layer_says(word: str, in_spec: bool) -> None:
    """Layers of one model may differ: those that vLLM skips keep the dtype of the model."""
    fields: dict[str, Any] = {"dtype": "torch.uint8", "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    spec = MLAAttentionSpec(**fields, cache_dtype_str=word) if in_spec else AttentionSpec(**fields)
    (tensor,) = tensors_of(spec, module=None if in_spec else Attention(kv_cache_dtype=word))
    assert tensor.dtype == ("float8_e5m2" if word == "fp8_e5m2" else "float8_e4m3fn")
    with pytest.raises(KVPlanError, match=r"^DTYPE: cannot read the cache of .model.layers.0.self_attn.attn.: "):
        tensors_of(AttentionSpec(**fields))


@pytest.mark.parametrize(
    ("spec", "tp", "module", "expected"),
    [
        (state_spec("MAMBA1", (96, 3), (96, 16)), 2, None, mamba1(192, 16, 3, "bfloat16", "float32")),
        (state_spec("MAMBA2", (64, 3), (4, 8, 4)), 2, None, mamba2(8, 8, 8, 4, 3, "bfloat16", "float32")),
        (state_spec("MAMBA2", (40, 3), (4, 8, 4)), 1, None, mamba2(4, 8, 1, 4, 3, "bfloat16", "float32")),
        (state_spec("MAMBA2", (40, 3), (4, 8, 4)), 2, 1, mamba2(8, 8, 1, 4, 3, "bfloat16", "float32")),
        (state_spec("MAMBA2", (40, 3), (4, 8, 4)), 2, 2, mamba2(8, 8, 2, 4, 3, "bfloat16", "float32")),
        (state_spec("GDN_ATTN", (28, 3), (4, 4, 3)), 2, None, delta(4, 3, 8, 4, 3, "bfloat16", "float32")),
        (state_spec("LINEAR", (4, 8, 8), dtypes=["torch.float32"]), 2, None, lightning(8, 8, "float32")),
        (state_spec("SHORT_CONV", (32, 2)), 2, None, convolution(64, 2, "bfloat16")),
        (
            state_spec("MAMBA1", (96, 3), (96, 16), dtypes=["torch.float32", "torch.float16"]),
            1,
            None,
            mamba1(96, 16, 3, "float32", "float16"),
        ),
    ],
)
@pytest.mark.parametrize("conv", ["DS", "SD"])
def test_states(spec: Any, tp: int, module: int | None, expected: Layer, conv: str) -> None:
    """Each state has its own dtype. One group of B and C on each rank is all ranks' if the layer's norm has one."""
    if conv == "SD" and len(spec.shapes[0]) == 2:
        spec = attrs.evolve(spec, shapes=[spec.shapes[0][::-1], *spec.shapes[1:]])
    same(tensors_of(spec, tp, module=MambaMixer2(Norm(module)), conv=conv), expected)


def test_a_state_that_all_ranks_have() -> None:
    """It is not divided: each rank has all of its channels."""
    (tensor,) = tensors_of(state_spec("SHORT_CONV", (32, 2), tp_replicated=True), 4)
    assert (tensor.axes[0], tensor.sharded, tensor.shards) == (("channel", 32), None, 1)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ((1, 0), ["layers.0.state.0", "layers.0.state.1"]),
        ((2, 1), ["layers.0.tp2.1.state.0", "layers.0.tp2.1.state.1"]),
    ],
)
def test_a_state_of_an_unknown_kind(ranks: tuple[int, int], names: list[str]) -> None:
    """How ranks divide it is not known, so it moves between equal ranks alone: others lack its tensors."""
    tp, rank = ranks
    layer = observed(state_spec("CUSTOM", (3, 5), (2,)), tp, rank).layers[NAMES[0]]
    assert [layer.prefix + tensor.kind for tensor in layer.tensors] == names
    assert [tensor.axes for tensor in layer.tensors] == [(("dim0", 3), ("dim1", 5)), (("dim0", 2),)]


@pytest.mark.parametrize(
    ("spec", "options", "text"),
    [
        (
            AttentionSpec(num_kv_heads=1),
            {},
            "SIZE: cannot count the KV heads of 'model.layers.0.self_attn.attn': expected 1 to 2 KV heads in all, "
            "of which each rank has one, got an unknown number (set kv_heads of the connector)",
        ),
        (AttentionSpec(num_kv_heads=1), {"kv_heads": lambda *_: 16}, "SIZE: cannot count the KV heads of"),
        (
            KVCacheSpec(),
            {},
            "LAYOUT: cannot read the cache of 'model.layers.0.self_attn.attn': expected a spec of heads, or of states, "
            "got KVCacheSpec without head_size",
        ),
        (
            AttentionSpec(num_head_slots=4, state_content_bytes=9),
            {},
            "LAYOUT: cannot read the cache of 'model.layers.0.self_attn.attn': expected values of each head side by "
            "side, got NONE in 4 slots of 9 bytes",
        ),
        (
            AttentionSpec(kv_quant_mode=KVQuantMode.NVFP4),
            {},
            "LAYOUT: cannot read the cache of 'model.layers.0.self_attn.attn': expected values of each head side by "
            "side, got NVFP4 in None slots of None bytes",
        ),
        (
            AttentionSpec(tokens_per_state=Fraction(1, 4)),
            {},
            "LAYOUT: cannot read a cache of vLLM: expected tokens_per_state",
        ),
        (
            state_spec("MAMBA2", (40, 3), (4, 8, 4)),
            {},
            "SIZE: cannot count the groups of a Mamba-2 layer: expected 1 or 2 in its norm, got None",
        ),
        (
            state_spec("MAMBA2", (43, 3), (4, 8, 4)),
            {},
            "SIZE: cannot read the convolution of a Mamba-2 layer: expected 32 channels of x, and B and C of 4 a group",
        ),
        (
            state_spec("GDN_ATTN", (29, 3), (4, 4, 3)),
            {},
            "SIZE: cannot read the convolution of a delta layer: expected 16 channels of v, and q and k of 3 a head",
        ),
    ],
)
def test_what_has_no_description(spec: Any, options: dict[str, Any], text: str) -> None:
    """The one fact that is missing, or not known, is named."""
    with pytest.raises(KVPlanError) as caught:
        tensors_of(spec, 2, **options)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("names", "prefixes"),
    [
        (["model.layers.3.self_attn.attn", "model.7.mixer"], ["layers.3.", "layers.7."]),
        (["model.layers.4.attn", "model.layers.5.attn"], ["draft.0.", "draft.1."]),
        (
            ["model.layers.3.attn", "mtp.layers.0.attn", "draft_model.layers.1.attn"],
            ["layers.3.", "draft.0.", "draft.1."],
        ),
        (["model.layers.3.attn.0", "attn"], ["model.layers.3.attn.0.", "attn."]),
        (["model.layers.3.attn", "model.layers.3.attn.swa"], ["layers.3.attn.", "layers.3.attn.swa."]),
    ],
)
def test_names_of_layers(names: list[str], prefixes: list[str]) -> None:
    """A number names a layer as a configuration would, and where it cannot, vLLM's name does."""
    specs = {name: state_spec("LINEAR", (4, 8, 8)) if "mixer" in name else AttentionSpec() for name in names}
    num_layers = None if "model.7.mixer" in names else 4
    model = vllm_model("any", RankInfo("prefill"), config_of(specs), {}, num_layers=num_layers)
    assert [model.layers[name].prefix for name in names] == prefixes


def test_layers_that_do_not_move() -> None:
    """Groups without transfer, and layers that use another's cache, have no tensors."""
    config = config_of({name: AttentionSpec() for name in NAMES})
    config.kv_cache_groups[1].enable_kv_transfer = False
    config.kv_cache_tensors = config.kv_cache_tensors[:2]
    assert [*vllm_model("any", RankInfo("prefill"), config, {}).layers] == NAMES[:1]


def rank_of(zeros: Any, rank: int, tp: int, layers: int = 3) -> Any:
    """A worker of GQA's layers, whose values are filled in, described without GQA."""
    held = heads(rank, tp)
    caches = zeros(layers, 8, len(held), 8, 16)
    for layer in range(layers):
        fill_vllm(caches[layer], layer, held, 8, TABLES["attn"])
    spec, names = AttentionSpec(num_kv_heads=len(held)), names_of(range(layers))
    tensor = KVCacheTensor(caches.nbytes, names, caches.strides[0], caches.strides[1])
    config = KVCacheConfig([tensor], [KVCacheGroupSpec(names, spec)])
    info = RankInfo("prefill", rank, rank, tp)
    model = vllm_model("gqa", info, config, {}, kv_heads=lambda *_: HEADS)
    return from_vllm(model, info, config, dict(zip(names, caches, strict=True)), kv_layout="content")


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_each_value_moves_to_an_engine_of_a_configuration(zeros: Any, tp: int) -> None:
    """Ranks that were described by specs are read by engines that a Model describes."""
    check(GQA, [rank_of(zeros, rank, tp) for rank in range(tp)], {"group0": TABLES["attn"]}, tp=2)


def test_heads_that_differ_by_layer(zeros: Any) -> None:
    """Gemma-4 at TP 8: two heads a rank in layers with a window, one of four in the others."""
    specs = {NAMES[0]: AttentionSpec(), NAMES[1]: AttentionSpec(num_kv_heads=1, head_size=16, head_size_v=16)}
    totals = {0: 16, 1: 4}
    info = RankInfo("prefill", 5, 5, 8)
    model = vllm_model("any", info, config_of(specs), {}, kv_heads=lambda _, number, __: totals[number or 0])
    sliding, full = (model.layers[name].tensors[0] for name in NAMES[:2])
    assert (sliding.shards_of(5, 8), full.shards_of(5, 8)) == (range(10, 12), range(2, 3))


def test_values_of_several_tokens_have_a_group_of_their_own(zeros: Any) -> None:
    """Rows for 4 tokens and for 1 share vLLM's block table, and are two groups of the worker, with equal blocks."""
    specs = {NAMES[0]: MLAAttentionSpec(16), NAMES[1]: MLAAttentionSpec(16, tokens_per_state=4)}
    caches = {NAMES[0]: zeros(5, 1, 16, 8), NAMES[1]: zeros(5, 1, 4, 8)}
    group = KVCacheGroupSpec(NAMES[:2], UniformTypeKVCacheSpecs(16, kv_cache_specs=specs))
    config = KVCacheConfig(placed(specs, caches), [group])
    info = RankInfo("prefill")
    worker = from_vllm(vllm_model("any", info, config, {}), info, config, caches)
    units = [(group.name, group.tokens_per_block, group.tokens_per_slot) for group in worker.groups]
    assert units == [("group0", 16, 1), ("group0.4", 16, 4)]
    assert [view.group for view in worker.views] == ["group0", "group0.4"]


def test_layers_with_attention_and_a_state_of_other_numbers(zeros: Any) -> None:
    """Falcon-H1 and Zamba2 number states after all attention: both engines do, so their numbers pair."""
    names = ["model.layers.0.attn", "model.1.mixer"]
    specs = {names[0]: AttentionSpec(), names[1]: state_spec("LINEAR", (4, 8, 8), dtypes=["torch.float32"])}
    caches = {names[0]: zeros(4, 2, 8, 16), names[1]: [zeros(4, 4, 8, 8, dtype=np.float32)]}
    config = config_of(specs, caches)
    info = RankInfo("prefill")
    worker = from_vllm(vllm_model("any", info, config, {}), info, config, caches, kv_layout="content")
    assert sorted(worker.tensors) == ["layers.0.attn", "layers.1.ssm"]
    assert plan_reads(attrs.evolve(worker, engine_id="decode"), [worker]).pairs


def test_a_key_that_is_no_layer() -> None:
    """An observed model has the layers of its engine and no others."""
    with pytest.raises(KVPlanError, match=r"^NAME: cannot place a layer: expected a layer of the engine, got 'other'"):
        observed(AttentionSpec()).named_layer("other")
    with pytest.raises(KVPlanError, match=r"^NAME: cannot place a layer: expected one of 3 layers and 0 draft layers"):
        Model("any", GQA.layers).named_layer(3)
