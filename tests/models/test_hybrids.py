"""Hybrid pools, scales and drafts, verified byte for byte; wrong descriptions of them are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from kvplan import Axis, Blocks, KVPlanError, MeshPlan, Model, Worker, plan_mesh, plan_writes, verify
from kvplan.models.layouts import ORDERS
from kvplan.models.tensors import attention
from kvplan.verification import Report

HYBRID = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "mamba_n_heads": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 4,
}

ATTENTION = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 6}


def tables(workers: Sequence[Worker], stop: int) -> dict[str, Blocks]:
    """Blocks of all groups from one pool, in descending order: no two groups have a block in common."""
    used, made = 0, {}
    for group in workers[0].groups:
        slots = group.tokens_per_block
        count = 1 if slots is None else -(-stop // (slots * group.context.size)) + 1
        made[group.name] = Blocks(range(used, used + count)[::-1])
        used += count
    return made


def moved(destinations: Sequence[Worker], sources: Sequence[Worker], tokens: tuple[int, int]) -> Report:
    """The report on moving ``tokens`` from one engine to the other."""
    mesh = plan_mesh(destinations, sources)
    return verify(mesh, **request(destinations, sources, tokens))


def request(destinations: Sequence[Worker], sources: Sequence[Worker], tokens: tuple[int, int]) -> dict[str, Any]:
    paged = [group.name for group in destinations[0].groups if not group.is_state]
    return {
        "local": tables(destinations, tokens[1]),
        "remote": tables(sources, tokens[1]),
        "tokens": dict.fromkeys(paged, tokens),
    }


def test_nemotron_3_nano_30b_with_other_ratios_on_both_sides() -> None:
    """A block is 131 kernel blocks of 16 tokens at TP 4 and 261 at TP 1, and a state lies over the K of a block."""
    model = Model.shipped("nemotron-3-nano-30b-a3b")
    options: dict[str, Any] = {"tokens_per_block": None, "kv": "split", "shared": True}
    sources = model.engine("prefill", tp=4, num_blocks=5, **options)
    destinations = model.engine("decode", tp=1, num_blocks=4, **options)
    ratios = [[a.size for a in w.views[-1].axes if a.name == "token"] for w in (sources[0], destinations[0])]
    assert ratios == [[131, 16], [261, 16]]
    pages = [worker.views[0].block_stride_bytes for worker in (sources[0], destinations[0])]
    assert pages == [131 * 4096, 261 * 8192]
    report = moved(destinations, sources, (37, 4500))
    assert report.ok, str(report)


@pytest.mark.parametrize("kv", ["content", "axis", "split"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_attention_and_states_share_a_pool(order: str, kv: str) -> None:
    """Pages of unequal size are at one address, in blocks of the larger size."""
    model = Model.from_config(HYBRID)
    destinations = model.engine("decode", tp=2, layout=order, kv=kv, shared=True, num_blocks=9, conv_order="SD")
    sources = model.engine("prefill", tp=3, tokens_per_block=100, shared=True, num_blocks=4, pad=8)
    for worker in (destinations[0], sources[0]):
        first = {group: next(view for view in worker.views if view.group == group) for group in ("state", "attn")}
        assert len({(view.region, view.offset_bytes, view.block_stride_bytes) for view in first.values()}) == 1
    report = moved(destinations, sources, (5, 70))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "options",
    [{"layout": "LHBNC"}, {"layout": "BHLNC"}, {"layout": "BLHNC", "tokens_per_block": 64, "kernel_tokens": 16}],
)
def test_a_page_in_pieces_shares_no_pool(options: dict[str, Any]) -> None:
    """If heads or kernel blocks are outside the page of a layer, the page shares no memory with others."""
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .*in the same memory: expected heads inside layer and block"):
        Model.from_config(HYBRID).engine("e", shared=True, **options)


def test_one_group_has_nothing_to_share() -> None:
    """Latents and the keys of an indexer are pages of one block table, so they have memory of their own."""
    model = Model.shipped("deepseek-v3.2")
    assert model.engine("e", shared=True, num_blocks=2) == model.engine("e", num_blocks=2)


@pytest.mark.parametrize("order", ["LBHNC", "BLNHC"])
def test_several_pools_of_one_group_share_with_another(order: str) -> None:
    """Scales and draft layers take pages after those of their group, and states share the memory of all of them."""
    model = Model.from_config(HYBRID).quantized(8).with_draft(Model.from_config(ATTENTION))
    options: dict[str, Any] = {"scales": "region", "shared": True, "num_blocks": 12}
    destinations = model.engine("decode", tp=2, layout=order, **options)
    sources = model.engine("prefill", tp=3, pp=2, tokens_per_block=24, **options)
    used: dict[str, set[tuple[str, int]]] = {"state": set(), "attn": set()}
    for view in destinations[0].views:
        if view.name.endswith(("conv.x", "attn", "scale")):
            used[view.group].add((view.region, view.offset_bytes))
    assert len(used["attn"]) == 2 + 2 + 2, "2 layers of values, 2 of scales, 2 of the draft"
    assert used["state"] < used["attn"]
    report = moved(destinations, sources, (5, 70))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("model", "groups"),
    [("nemotron-3-nano-30b-a3b", {"state": 4, "attn": 1}), ("gemma-3-27b", {"swa": 6, "attn": 1})],
)
def test_layers_in_groups_of_equal_number_share_a_pool(model: str, groups: dict[str, int]) -> None:
    """Each of several groups of one kind has its own blocks; the other engine has one group and no stages."""
    whole = Model.shipped(model)
    made = whole.grouped()
    assert {kind: sum(name.split(".")[0] == kind for name in made.groups) for kind in groups} == groups
    destinations = made.engine("decode", tp=2, pp=2, shared=True, num_blocks=60)
    sources = whole.engine("prefill", tp=4, num_blocks=60)
    for worker in destinations:
        first = {view.group: (view.region, view.offset_bytes) for view in reversed(worker.views)}
        assert len(first) == len(made.groups)
        assert len(set(first.values())) == 1, "the first layers of all groups lie over each other"
    report = moved(destinations, sources, (5, 70))
    assert report.ok, str(report)


WINDOWS = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "hidden_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "sliding_window": 64,
    "layer_types": [*(["sliding_attention"] * 4), "full_attention", "sliding_attention", "full_attention"],
}


@pytest.mark.parametrize("order", ORDERS)
def test_groups_of_one_shape_share_a_pool_in_any_layout(order: str) -> None:
    """Layers with and without a window, as in Gemma-3 and gpt-oss, whatever is inside of what."""
    model = Model.from_config(WINDOWS)
    destinations = model.engine("decode", tp=2, layout=order, shared=True, num_blocks=24)
    sources = model.engine("prefill", tp=4, layout=order, tokens_per_block=24, shared=True, num_blocks=24, pad=8)
    report = moved(destinations, sources, (5, 70))
    assert report.ok, str(report)


def test_each_head_has_the_layers_of_its_group() -> None:
    """In vLLM's BHLNC groups lie over each other, and heads of a smaller group are nearer to each other."""
    (worker,) = Model.from_config(WINDOWS).engine("e", layout="BHLNC", shared=True, num_blocks=3)
    rows = 16 * 2 * 16 * 2
    found = {}
    for group, layers in (("swa", 5), ("attn", 2)):
        views = [view for view in worker.views if view.group == group]
        assert [view.offset_bytes for view in views] == [number * rows for number in range(layers)]
        found[group] = {(view.region, view.block_stride_bytes, view.axes[0].stride_bytes) for view in views}
    assert found == {"swa": {("pool", 4 * 5 * rows, 5 * rows)}, "attn": {("pool", 4 * 5 * rows, 2 * rows)}}


def test_a_draft_of_one_shape_shares_no_pool_where_heads_are_outside_layers() -> None:
    """It is a second pool of its group, and the heads of its layers would lie over those of the others."""
    draft = Model.from_config({**ATTENTION, "num_attention_heads": 4, "head_dim": 16})
    model = Model.from_config(WINDOWS).with_draft(draft)
    assert model.engine("e", layout="BLHNC", shared=True)
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .*expected heads inside layer and block, or groups of one shape"):
        model.engine("e", layout="BHLNC", shared=True)


def test_groups_of_unequal_windows_share_a_pool() -> None:
    """Layers with other heads and other blocks share memory, as in Gemma-4."""
    model = Model.shipped("gemma-4-31b")
    small = attrs.evolve(model, layers=model.layers[3:7])
    destinations, sources = (
        small.engine(f"e{tp}", tp=tp, shared=True, num_blocks=12, layout=layout)
        for tp, layout in ((8, "LBHNC"), (4, "LBNHC"))
    )
    assert [group.tokens_per_block for group in sources[0].groups] == [16, 32]
    report = moved(destinations, sources, (3, 75))
    assert report.ok, str(report)


@pytest.mark.parametrize("scales", ["inline", "page", "region"])
@pytest.mark.parametrize("order", ORDERS)
def test_scales_move_with_their_heads(order: str, scales: str) -> None:
    """Scales of 4-bit values reach the ranks of their heads from an engine that stores them apart.

    The other engine has another number of ranks, another block and another order.
    """
    model = Model.from_config(ATTENTION).quantized(4, "float8_e4m3fn", 8)
    destinations = model.engine("decode", tp=3, layout=order, scales=scales, num_blocks=12, kv="axis")
    sources = model.engine("prefill", tp=2, scales="region", tokens_per_block=12, num_blocks=12)
    report = moved(destinations, sources, (5, 70))
    assert report.ok, str(report)
    assert report.num_bytes == 65 * 2 * 2 * 6 * (8 + 2)


def test_where_scales_stand() -> None:
    """Beside each head's values, behind the values of all heads, or in a region of their own."""
    model = Model.from_config(ATTENTION).quantized(8)
    found = {}
    for scales in ("inline", "page", "region"):
        (worker,) = model.engine("e", scales=scales, num_blocks=2)
        values, scale = worker.views[:2] if scales != "region" else worker.views[::2]
        found[scales] = (scale.region == values.region, scale.offset_bytes, values.block_stride_bytes)
    data = 16 * 6 * 2 * 16
    assert found == {
        "inline": (True, 32, data * 5 // 4),
        "page": (True, data, data * 5 // 4),
        "region": (False, 0, data),
    }


def test_k_and_v_apart_have_scales_apart() -> None:
    """If K and V each fill half a page, each half has the values of all heads, then the scales of all heads."""
    (worker,) = Model.from_config(ATTENTION).quantized(8).engine("e", kv="axis", scales="page", num_blocks=2)
    values, scale = worker.views[:2]
    data = 16 * 6 * 16
    assert [axis.stride_bytes for view in (values, scale) for axis in view.axes if axis.name == "kv"] == [
        data * 5 // 4
    ] * 2
    assert (values.offset_bytes, scale.offset_bytes, values.block_stride_bytes) == (0, data, data * 5 // 2)


def test_a_draft_of_other_heads_moves_with_its_target() -> None:
    """The draft of a model with latents has KV heads of its own, at other tensor-parallel sizes."""
    keys = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
    model = Model.from_config(keys).with_draft(Model.from_config(ATTENTION))
    report = moved(model.engine("d", tp=4, num_blocks=9), model.engine("p", tp=3, pp=2, num_blocks=9), (5, 70))
    assert report.ok, str(report)


def test_a_draft_on_one_side_is_not_transferred() -> None:
    """An engine with a draft reads the rest from one without if the draft is listed in not_transferred."""
    target = Model.from_config({**ATTENTION, "num_hidden_layers": 3})
    destinations = target.with_draft(Model.from_config(ATTENTION)).engine("d", tp=2, num_blocks=9)
    sources = target.engine("p", num_blocks=9)
    with pytest.raises(KVPlanError, match=r"^TENSOR: .*draft\.0\.attn"):
        plan_mesh(destinations, sources)
    mesh = plan_mesh(destinations, sources, not_transferred=["draft.0.attn", "draft.1.attn"])
    report = verify(mesh, **request(destinations, sources, (5, 70)))
    assert report.ok, str(report)


def misdescribed(workers: Sequence[Worker], described: Sequence[Worker]) -> list[Worker]:
    """Workers that describe their own regions with the groups and views of others."""
    return [
        attrs.evolve(worker, groups=other.groups, views=other.views)
        for worker, other in zip(workers, described, strict=True)
    ]


def report_on(described: Sequence[Worker], destinations: Sequence[Worker], sources: Sequence[Worker]) -> Report:
    """What verification finds when a plan for ``described`` is carried out on the workers as they are."""
    mesh = plan_mesh(described, sources)
    true = [attrs.evolve(plan, local=worker) for plan, worker in zip(mesh.plans, destinations, strict=True)]
    return verify(MeshPlan(tuple(true)), **request(destinations, sources, (5, 70)))


def codes(report: Report) -> set[str]:
    return {code for code, _ in report.failures}


def test_b_and_c_without_replicas_are_found() -> None:
    """Two ranks both hold one group; a description that divides it leaves half of it unwritten."""
    model = Model.shipped("granite-4.0-h-tiny")
    destinations, sources = (model.engine(f"e{tp}", tp=tp, num_blocks=9) for tp in (2, 1))

    def divided(worker: Worker) -> Worker:
        def cut(axis: Axis) -> Axis:
            return attrs.evolve(axis, start=64 * worker.rank, stop=64 * (worker.rank + 1)) if axis.size == 128 else axis

        views = [
            attrs.evolve(v, axes=tuple(map(cut, v.axes))) if v.name.endswith(("conv.B", "conv.C")) else v
            for v in worker.views
        ]
        return attrs.evolve(worker, views=views)

    assert report_on(destinations, destinations, sources).ok
    assert "COVER" in codes(report_on([*map(divided, destinations)], destinations, sources))


def test_heads_of_another_group_are_found() -> None:
    """Full layers described with the 16 heads of sliding layers lack the replicas that their 4 heads have at TP 8."""
    model = Model.shipped("gemma-4-31b")
    wrong = attrs.evolve(
        model, layers=tuple(attention(16, 128) if layer[0].group == "attn" else layer for layer in model.layers)
    )

    def engines(some: Model) -> tuple[tuple[Worker, ...], tuple[Worker, ...]]:
        blocks: list[Mapping[str, int]] = [{"swa": 16, "attn": 16}, {"swa": 16, "attn": 32}]
        decode = some.engine("decode", tp=8, tokens_per_block=blocks[0], num_blocks=12)
        return decode, some.engine("prefill", tp=4, tokens_per_block=blocks[1], num_blocks=12)

    (destinations, sources), (others, other_sources) = engines(model), engines(wrong)
    assert report_on(destinations, destinations, sources).ok
    mesh = plan_mesh(misdescribed(destinations, others), misdescribed(sources, other_sources))
    true = [attrs.evolve(p, local=w, remotes=sources) for p, w in zip(mesh.plans, destinations, strict=True)]
    assert not verify(MeshPlan(tuple(true)), **request(destinations, sources, (5, 70))).ok


def test_another_interleave_is_found() -> None:
    """An interleave of 4 puts positions on other context ranks than an interleave of 1."""
    keys = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
    model = Model.from_config(keys)
    destinations, others = (model.engine("decode", tp=2, dcp=2, interleave=i, num_blocks=9) for i in (4, 1))
    sources = model.engine("prefill", num_blocks=9)
    assert report_on(destinations, destinations, sources).ok
    assert "VALUE" in codes(report_on(others, destinations, sources))


def test_a_missing_second_token_digit_is_found() -> None:
    """If a description leaves out kernel blocks, slots are at other places in the block."""
    model = Model.from_config(ATTENTION)
    options: dict[str, Any] = {"tp": 2, "tokens_per_block": 48, "num_blocks": 9}
    destinations = model.engine("decode", kernel_tokens=16, **options)
    others = model.engine("decode", **options)
    sources = model.engine("prefill", num_blocks=9)
    assert report_on(destinations, destinations, sources).ok
    assert "VALUE" in codes(report_on(others, destinations, sources))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"tp": 3, "layers_per_stage": (1, 3)}, {"tp": 2, "layers_per_stage": (2, 1, 1)}),
        ({"tp": 4, "conv_order": "SD", "shared": True}, {"tp": 12, "dcp": 4, "interleave": 3}),
        ({"pcp": 2}, {"tp": 5, "tokens_per_block": {"attn": 24}}),
    ],
)
def test_hybrids_move_in_pieces_from_either_side(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """Uneven stages, context ranks and any ratio of ranks, read by the destinations or written by the sources."""
    model = Model.from_config(HYBRID)
    sources, destinations = model.engine("p", num_blocks=20, **prefill), model.engine("d", num_blocks=20, **decode)
    asked = request(destinations, sources, (5, 70))
    reads = verify(plan_mesh(destinations, sources), **asked)
    plans = [plan_writes(one, destinations, [other for other in sources if other is not one]) for one in sources]
    writes = verify(plans, local=asked["remote"], remote=asked["local"], tokens=asked["tokens"])
    assert reads.ok, str(reads)
    assert writes.ok, str(writes)
    assert reads.num_bytes == writes.num_bytes


SIZES = {"num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 6}
HEADS = {**SIZES, "num_key_value_heads": 3}
MAMBA2 = {"mamba_n_heads": 12, "mamba_n_groups": 4, "mamba_d_state": 4, "mamba_d_conv": 3}
GDN = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 4, "linear_value_head_dim": 8}
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "mamba", **SIZES, "state_size": 4},
    {"model_type": "falcon_mamba", **SIZES, "intermediate_size": 36, "state_size": 4},
    {"model_type": "mamba2", **SIZES, "num_heads": 6, "head_dim": 8, "n_groups": 2, "state_size": 4},
    {"model_type": "jamba", **HEADS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    {
        "model_type": "nemotron_h",
        **HEADS,
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 6,
        "mamba_head_dim": 4,
        "n_groups": 1,
        "ssm_state_size": 8,
    },
    {"model_type": "falcon_h1", **HEADS, **MAMBA2, "mamba_d_ssm": 60, "head_dim": 8},
    {"model_type": "qwen3_next", **HEADS, **GDN, "full_attention_interval": 2, "head_dim": 8},
    {
        "model_type": "kimi_linear",
        **HEADS,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "linear_attn_config": {
            "num_heads": 6,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
        },
    },
]


@pytest.mark.parametrize("conv_order", ["DS", "SD"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config["model_type"])
def test_states_of_every_family_move(config: dict[str, Any], shared: bool, conv_order: str) -> None:
    """3 ranks read from 2 with the other order of the convolution, and pools of another kind."""
    model = Model.from_config(config)
    sources = model.engine("prefill", tp=2, shared=shared, conv_order=conv_order, num_blocks=12)
    destinations = model.grouped().engine("decode", tp=3, shared=not shared, tokens_per_block=24, num_blocks=12)
    report = moved(destinations, sources, (5, 70))
    assert report.ok, str(report)
    assert any(view.name.endswith("ssm") for view in destinations[2].views)
