"""Models: the figures that others publish for real models, their groups, blocks and dtypes."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Group, KVPlanError, Model, Worker
from kvplan.models.parallel import stages_of
from kvplan.models.tensors import FULL, SLIDING, STATE, Layer, Tensor, attention, mamba1, mamba2

KIB, MIB = 1 << 10, 1 << 20

GQA = Model("gqa", (attention(2, 8),) * 3)


def layer_bytes(model: Model, tp: int = 1, tokens_per_block: int = 16, *, rank: int = 0) -> tuple[int, ...]:
    """The bytes of one block in each layer, all its tensors together."""
    return tuple(sum(layer.values()) for layer in model.tensor_bytes(tp, tokens_per_block, rank=rank))


def layers_of(worker: Worker) -> list[int]:
    """The layer of each view."""
    return [int(view.name.split(".")[1]) for view in worker.views]


@pytest.mark.parametrize(
    ("model", "tp", "tokens_per_block", "part_bytes", "block_bytes"),
    [
        ("deepseek-r1-distill-qwen-32b", 2, 16, 16 * KIB, 2 * MIB),
        ("llama-3.1-8b", 1, 16, 32 * KIB, 2 * MIB),
        ("llama-3.2-1b", 1, 16, 16 * KIB, MIB // 2),
        ("llama-3.1-70b", 4, 16, 8 * KIB, 5 * MIB // 4),
        ("mistral-7b", 1, 16, 32 * KIB, 2 * MIB),
        ("mistral-small-24b", 1, 16, 32 * KIB, 5 * MIB // 2),
        ("qwen2.5-1.5b", 1, 16, 8 * KIB, 7 * MIB // 16),
        ("qwen2.5-3b", 1, 16, 8 * KIB, 9 * MIB // 16),
        ("qwen2.5-7b", 1, 16, 16 * KIB, 7 * MIB // 8),
        ("qwen3-0.6b", 1, 16, 32 * KIB, 7 * MIB // 4),
        ("qwen3-1.7b", 1, 16, 32 * KIB, 7 * MIB // 4),
        ("qwen3-4b", 1, 16, 32 * KIB, 9 * MIB // 4),
        ("qwen3-8b", 1, 16, 32 * KIB, 9 * MIB // 4),
        ("qwen3-32b", 2, 16, 16 * KIB, 2 * MIB),
    ],
)
def test_bytes_of_a_block(model: str, tp: int, tokens_per_block: int, part_bytes: int, block_bytes: int) -> None:
    """K or V of one layer, and a block of all layers, as published with vLLM pull request 30207.

    Its row for Qwen3-8B (28 KB, 1.97 MB) fits no model of 36 layers with 8 heads of 128; here it is Qwen3-4B's.
    """
    layers = layer_bytes(Model.shipped(model), tp, tokens_per_block)
    assert set(layers) == {2 * part_bytes}
    assert sum(layers) == block_bytes


def test_bytes_of_a_latent_block() -> None:
    """DeepSeek-V2-Lite has 72 KB a layer at block 64 and 1.9 MB in all, as published with that request."""
    layers = layer_bytes(Model.shipped("deepseek-v2-lite"), tokens_per_block=64)
    assert set(layers) == {72 * KIB}
    assert round(sum(layers) / MIB, 1) == 1.9


@pytest.mark.parametrize(
    ("model", "pages"),
    [
        ("llama-3.1-8b", {1: 65536, 2: 32768, 4: 16384, 8: 8192}),
        ("llama-3.1-70b", {4: 16384, 8: 8192, 16: 8192}),
        ("qwen3-235b-a22b", {1: 32768, 2: 16384, 4: 8192, 8: 8192}),
        ("gpt-oss-120b", {1: 32768, 2: 16384, 8: 4096}),
        ("gemma-3-27b", {2: 65536, 4: 32768}),
        ("deepseek-v3", {1: 18432, 8: 18432, 16: 18432}),
    ],
)
def test_page_bytes_by_tensor_parallel_size(model: str, pages: dict[int, int]) -> None:
    """A page, one layer's block of 16 tokens, shrinks with tp until each rank holds one head, or is a latent."""
    shipped = Model.shipped(model)
    assert {tp: set(layer_bytes(shipped, tp)) for tp in pages} == {tp: {page} for tp, page in pages.items()}


@pytest.mark.parametrize(
    ("model", "states"),
    [
        ("nemotron-h-8b", {1: (61440, 4194304), 8: (7680, 524288), 16: (4608, 262144)}),
        ("nemotron-3-nano-30b-a3b", {1: (36864, 2097152), 4: (9216, 524288), 8: (4608, 262144)}),
        ("qwen3-next-80b", {1: (49152, 2097152), 8: (6144, 262144)}),
        ("granite-4.0-h-tiny", {1: (19968, 1572864), 2: (10752, 786432)}),
        ("jamba-v0.1", {1: (49152, 524288), 2: (24576, 262144)}),
        ("falcon-mamba-7b", {1: (49152, 524288), 2: (24576, 262144)}),
    ],
)
def test_bytes_of_a_state(model: str, states: dict[int, tuple[int, int]]) -> None:
    """Convolution (three steps of bfloat16) and SSM (fp32) of each state layer and rank, by tensor-parallel size."""
    shipped = Model.shipped(model)
    for tp, sizes in states.items():
        for rank in range(tp):
            layers = [layer for layer in shipped.tensor_bytes(tp, rank=rank) if "ssm" in layer]
            found = {
                (sum(n for kind, n in layer.items() if kind.startswith("conv.")), layer["ssm"]) for layer in layers
            }
            assert found == {sizes}


@pytest.mark.parametrize(
    ("model", "attending", "stateful"),
    [
        ("nemotron-h-8b", 4, 24),
        ("nemotron-3-nano-30b-a3b", 6, 23),
        ("qwen3-next-80b", 12, 36),
        ("granite-4.0-h-tiny", 4, 36),
        ("jamba-v0.1", 4, 28),
        ("falcon-mamba-7b", 0, 64),
    ],
)
def test_layers_of_hybrids(model: str, attending: int, stateful: int) -> None:
    """How many layers attend, and how many have a state."""
    kinds = [kind for layer in Model.shipped(model).layers for kind in {tensor.pool for tensor in layer}]
    assert (kinds.count("attn"), kinds.count("state")) == (attending, stateful)


@pytest.mark.parametrize(("tp", "full"), [(1, 32), (2, 32), (4, 32), (8, 16)])
def test_pages_of_gemma_4_31b_are_made_equal(tp: int, full: int) -> None:
    """50 layers of 16 heads of 256 and 10 of 4 heads of 512 have equal pages when full blocks are longer."""
    model = Model.shipped("gemma-4-31b")
    assert model.blocks(tp) == {"swa": 16, "attn": full}
    assert len(set(layer_bytes(model, tp))) == 1
    assert [tensor.group for (tensor,) in model.layers].count("swa") == 50
    (worker, *_) = model.engine("e", tp=tp, num_blocks=2)
    assert {group.name: group.tokens_per_block for group in worker.groups} == {"swa": 16, "attn": full}


def test_blocks_by_group_are_taken_as_they_are() -> None:
    """A mapping names each token group and no other, and its blocks are not made equal."""
    model = Model.shipped("gemma-4-31b")
    assert model.blocks(4, {"attn": 16, "swa": 48}) == {"swa": 48, "attn": 16}
    for given_blocks, got in (
        ({"swa": 16}, "swa"),
        ({}, "none"),
        ({"swa": 1, "attn": 1, "state": 1}, "swa, attn, state"),
    ):
        with pytest.raises(KVPlanError, match=f"^NAME: .*page gemma-4-31b: .* of swa, attn, got {got}$"):
            model.blocks(4, given_blocks)


def test_blocks_are_made_equal_by_the_largest_rank() -> None:
    """Of 5 heads, the second of 3 ranks holds three. At tp 1 no page divides the other, so no block grows."""
    model = Model("m", (attention(5, 8, "swa"), attention(3, 8)))
    assert model.blocks(3) == {"swa": 16, "attn": 48}
    assert model.blocks(1) == {"swa": 16, "attn": 16}
    model = Model("m", (attention(3, 8, "swa"), attention(2, 8)))
    assert model.blocks(2) == {"swa": 16, "attn": 32}
    assert model.blocks(1) == {"swa": 16, "attn": 16}


def test_kernel_blocks_of_a_layer_that_attends_and_has_a_state() -> None:
    """A block of its attention is made as large as its own state."""
    both = (*attention(2, 8), *mamba2(4, 8, 1, 4, 3, "bfloat16", "float32"))
    state = 3 * 2 * (4 * 8 + 2 * 4) + 4 * 4 * 8 * 4
    assert Model("m", (both,)).kernel_blocks(kernel_tokens=2) == -(-state // (2 * 2 * 2 * 8 * 2))


@pytest.mark.parametrize("model", Model.names())
def test_windows_and_tokens_name_the_groups_of_engines(model: str) -> None:
    """Every token group that an engine has, in any grouping, has a window and a range of tokens, and no other."""
    for shipped in (Model.shipped(model), Model.shipped(model).grouped()):
        (worker, *_) = shipped.engine("e", num_blocks=2)
        paged = {group.name for group in worker.groups if not group.is_state}
        assert {*shipped.windows} == {*shipped.tokens(0, 5000, worker)} == paged


def test_a_sliding_group_moves_what_is_still_seen() -> None:
    """Of 5000 positions, the last token attends to the last 1024 in sliding layers and to all in full ones."""
    model = Model.shipped("gemma-4-31b")
    assert model.windows == {"swa": 1024, "attn": None}
    (worker,) = model.engine("e", num_blocks=2)
    assert model.tokens(100, 5000, worker) == {"swa": (3976, 5000), "attn": (100, 5000)}


def test_ranges_are_those_of_the_groups_that_a_worker_has() -> None:
    """Names of groups mean nothing: a group has the largest window of the layers that this worker stores in it."""
    near, far, full = (attention(2, 8, "g", window) for window in (32, 64, None))
    model = Model("m", (near, far, full), drafts=(near,))
    (worker,) = model.engine("e", num_blocks=2)
    tables = {"layers.0.attn": "swa", "layers.1.attn": "swa.1", "layers.2.attn": "attn", "draft.0.attn": "swa.1"}
    groups = [*(Group(name, 16) for name in ("swa", "swa.1", "attn", "of another stage")), Group("state")]
    worker = attrs.evolve(
        worker, groups=groups, views=[attrs.evolve(view, group=tables[view.name]) for view in worker.views]
    )
    assert model.tokens(0, 100, worker) == {"swa": (68, 100), "swa.1": (36, 100), "attn": (0, 100)}
    together = [attrs.evolve(view, group="swa") for view in worker.views]
    assert model.tokens(0, 100, attrs.evolve(worker, views=together)) == {"swa": (0, 100)}


def test_a_tensor_of_another_model_has_no_window() -> None:
    """Nothing is guessed of a tensor that the model lacks."""
    (worker,) = Model("long", GQA.layers * 2).engine("e", num_blocks=2)
    with pytest.raises(KVPlanError, match=r"^NAME: cannot find the window of 'layers\.3\.attn'"):
        GQA.tokens(0, 100, worker)


def test_bytes_of_sparse_latents() -> None:
    """DeepSeek-V3.2 has 656 bytes a token and 132 of its indexer, whose pages hold all keys before the scales."""
    layers = Model.shipped("deepseek-v3.2").tensor_bytes(8, 64)
    assert layers == ({"attn": 41984, "index": 8192, "index.scale": 256},) * 61
    (worker, *_) = Model.shipped("deepseek-v3.2").engine("e", tp=8, tokens_per_block=64, num_blocks=2)
    assert [(v.offset_bytes, v.block_stride_bytes) for v in worker.views[:61:60]] == [(0, 41984)] * 2
    keys, scales = (next(v for v in worker.views if v.name == f"layers.0.{kind}") for kind in ("index", "index.scale"))
    assert (keys.region, keys.offset_bytes, keys.block_stride_bytes) == ("layers.0.index", 0, 8448)
    assert (scales.region, scales.offset_bytes, scales.block_stride_bytes) == ("layers.0.index", 8192, 8448)


@pytest.mark.parametrize(("tp", "ratio"), [(1, 261), (2, 261), (4, 131)])
def test_kernel_blocks_of_nemotron_3_nano_30b(tp: int, ratio: int) -> None:
    """How many 16-token blocks of K cover a state, as vLLM's tests of its NIXL connector have it."""
    assert Model.shipped("nemotron-3-nano-30b-a3b").kernel_blocks(tp, kv="split") == ratio


def test_kernel_blocks_need_both_kinds() -> None:
    """If a model lacks states or attention, a block is one kernel block."""
    assert [Model.shipped(name).kernel_blocks() for name in ("llama-3.1-8b", "falcon-mamba-7b")] == [1, 1]


@pytest.mark.parametrize(
    ("model", "layers", "heads", "head_dim"),
    [
        ("qwen3-0.6b", 28, 8, 128),
        ("qwen3-32b", 64, 8, 128),
        ("qwen3-235b-a22b", 94, 4, 128),
        ("gpt-oss-20b", 24, 8, 64),
        ("gpt-oss-120b", 36, 8, 64),
        ("gemma-3-27b", 62, 16, 128),
        ("mistral-small-24b", 40, 8, 128),
    ],
)
def test_geometry(model: str, layers: int, heads: int, head_dim: int) -> None:
    """Layers, KV heads and head_dim of models whose head_dim is not hidden_size // num_attention_heads, and others."""
    shipped = Model.shipped(model)
    assert len(shipped.layers) == layers
    assert {tensor.axes for layer in shipped.layers for tensor in layer} == {
        (("kv", 2), ("head", heads), ("dim", head_dim))
    }


@pytest.mark.parametrize(
    ("model", "sliding", "full"),
    [("gemma-3-27b", 52, 10), ("gpt-oss-120b", 18, 18)],
)
def test_sliding_and_full_layers_have_tables_of_their_own(model: str, sliding: int, full: int) -> None:
    """Each worker has both groups, and a view's group is that of its layer."""
    (worker,) = Model.shipped(model).engine("e", num_blocks=2)
    assert [group.name for group in worker.groups] == ["swa", "attn"]
    assert [sum(view.group == group for view in worker.views) for group in ("swa", "attn")] == [sliding, full]


def test_groups_that_share_an_order_do_not_share_a_pool() -> None:
    """If all layers are in one block, the layers of each group have a pool of their own."""
    (worker,) = Model.shipped("gpt-oss-20b").engine("e", layout="BLHNC", num_blocks=2)
    assert [region.name for region in worker.regions] == ["swa.attn", "attn.attn"]
    assert {(view.group, view.region) for view in worker.views} == {("swa", "swa.attn"), ("attn", "attn.attn")}


@pytest.mark.parametrize("model", Model.names())
def test_every_shipped_model_makes_an_engine(model: str) -> None:
    """Each shipped configuration is readable, and its workers are valid at tp 2 and pp 2."""
    shipped = Model.shipped(model)
    workers = shipped.engine("e", tp=2, pp=2, num_blocks=2)
    expected = {i for i, layer in enumerate(shipped.layers) if layer}
    assert [*map(set, (layers_of(workers[0]), layers_of(workers[2])))] == [
        {i for i in expected if i in stage} for stage in stages_of(len(shipped.layers), 2)
    ]


def test_an_unknown_shipped_model_is_refused_with_similar_names() -> None:
    """The error suggests up to three names."""
    with pytest.raises(KVPlanError) as caught:
        Model.shipped("Qwen3-0.5B")
    assert str(caught.value) == (
        "NAME: cannot load a shipped model: expected one that 'kvplan models' lists, got 'Qwen3-0.5B' "
        "(did you mean 'qwen3-0.6b', 'qwen3-1.7b' or 'qwen3-8b'?)"
    )
    assert caught.value.details == {"name": "Qwen3-0.5B"}


def test_the_cache_may_have_a_dtype_of_its_own() -> None:
    """An fp8 cache of a bf16 model takes half the bytes, in pools and in block_bytes."""
    whole, half = GQA, GQA.with_dtypes("float8_e4m3fn")
    (large,), (small,) = (model.engine("e", num_blocks=2) for model in (whole, half))
    assert [2 * r.size_bytes for r in small.regions] == [r.size_bytes for r in large.regions]
    assert {view.dtype for view in small.views} == {"float8_e4m3fn"}
    assert [2 * layer for layer in layer_bytes(half)] == list(layer_bytes(whole))


def test_states_may_have_a_dtype_of_their_own() -> None:
    """SSM states in bf16 take half the bytes of fp32; the convolution and attention do not change."""
    model = Model.shipped("jamba-v0.1")
    for before, after in zip(model.tensor_bytes(), model.with_dtypes(ssm_dtype="bfloat16").tensor_bytes(), strict=True):
        assert after == {kind: size // 2 if kind == "ssm" else size for kind, size in before.items()}
    assert model.with_dtypes() == model


@pytest.mark.parametrize(("dtype", "size"), [(None, 656), ("bfloat16", 1152), ("float8_e4m3fn", 576)])
def test_a_sparse_latent_is_a_row_with_scales_or_plain(dtype: str | None, size: int) -> None:
    """DeepSeek-V3.2 has 656 bytes a token, or 576 elements of a dtype; its indexer has 132 in either case."""
    (layer, *_) = Model.shipped("deepseek-v3.2").with_dtypes(dtype).tensor_bytes(8, 64)
    assert layer == {"attn": 64 * size, "index": 8192, "index.scale": 256}


@pytest.mark.parametrize("given", [{"dtype": "int4"}, {"ssm_dtype": "fp32"}])
def test_an_unknown_dtype_is_refused(given: dict[str, str]) -> None:
    """A dtype without a known size is refused at once."""
    with pytest.raises(KVPlanError, match=r"^DTYPE: .*store a cache: expected a dtype of"):
        GQA.with_dtypes(**given)


def test_block_bytes_are_those_of_the_views() -> None:
    """The figures are what a worker's views of a layer hold, whichever rank."""
    model = Model("m", (attention(12, 8),) * 3)
    for worker in model.engine("e", tp=8, tokens_per_block=32, num_blocks=2, kv="split"):
        held = [0] * len(model.layers)
        for layer, view in zip(layers_of(worker), worker.views, strict=True):
            held[layer] += view.block_bytes
        assert tuple(held) == layer_bytes(model, 8, 32, rank=worker.rank)


def test_options_reach_the_layout() -> None:
    """layout, kv, pad, kernel_tokens, tokens_per_block and num_blocks all show in the views."""
    (worker,) = GQA.engine("e", layout="LBNHC", kv="axis", pad=10, kernel_tokens=4, tokens_per_block=12, num_blocks=5)
    view = worker.views[0]
    assert [(axis.name, axis.extent, axis.stride_bytes) for axis in view.axes] == [
        ("token", 3, 256),
        ("kv", 2, 128),
        ("token", 4, 32),
        ("head", 2, 16),
        ("dim", 8, 2),
    ]
    assert (view.num_blocks, view.block_stride_bytes) == (5, 3 * 256 + 10)


def test_states_and_attention_live_side_by_side() -> None:
    """A model built by hand may mix a paged cache with states that have no tokens, a dtype of their own, and shards."""
    attention = Tensor("attn", "attn", (("kv", 2), ("head", 2), ("dim", 8)), sharded="head", shards=2)
    state = Tensor(
        "ssm", "mamba", (("channel", 16), ("state", 4)), paged=False, sharded="channel", shards=4, dtype="float32"
    )
    workers = Model("hybrid", ((state,), (attention,), (state,)), "float16").engine("e", tp=4, num_blocks=2)
    first = workers[1]
    assert [(g.name, g.tokens_per_block) for g in first.groups] == [("mamba", None), ("attn", 16)]
    assert [view.name for view in first.views] == ["layers.0.ssm", "layers.2.ssm", "layers.1.attn"]
    assert {view.dtype for view in first.views} == {"float32", "float16"}
    assert str(first.views[0].axes[0]) == "channel [4, 8) of 16 stride 16"


OF_KIND: dict[str, Layer] = {
    SLIDING: attention(2, 8, SLIDING, 64),
    FULL: attention(2, 8),
    STATE: mamba1(8, 4, 3, "bfloat16", "float32"),
    "both": (*attention(2, 8), *mamba1(8, 4, 3, "bfloat16", "float32")),
}


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gemma-3-27b", {"swa": [9, 9, 9, 9, 8, 8], "attn": [10]}),
        ("gemma-4-31b", {"swa": [10] * 5, "attn": [10]}),
        ("gpt-oss-120b", {"swa": [18], "attn": [18]}),
        ("nemotron-h-8b", {"state": [4] * 6, "attn": [4]}),
        ("nemotron-3-nano-30b-a3b", {"state": [6, 6, 6, 5], "attn": [6]}),
        ("qwen3-next-80b", {"state": [12] * 3, "attn": [12]}),
        ("granite-4.0-h-tiny", {"state": [4] * 9, "attn": [4]}),
        ("jamba-v0.1", {"state": [4] * 7, "attn": [4]}),
        ("llama-3.1-8b", {"attn": [32]}),
    ],
)
def test_groups_have_as_many_layers_as_the_smallest(model: str, sizes: dict[str, list[int]]) -> None:
    """Layers of each group of a real model, as vLLM divides them."""
    found: dict[str, dict[str, int]] = {}
    for layer in Model.shipped(model).grouped().layers:
        for group in {tensor.group for tensor in layer}:
            of_kind = found.setdefault(group.partition(".")[0], {})
            of_kind[group] = of_kind.get(group, 0) + 1
    assert {kind: sorted(counts.values(), reverse=True) for kind, counts in found.items()} == sizes


def test_a_kind_that_is_little_larger_stays_one_group() -> None:
    """12 sliding and 13 full layers are one group each; 12 and 18 are three."""
    for full, groups in ((13, 2), (17, 2), (18, 3)):
        model = Model("m", (OF_KIND[SLIDING],) * 12 + (OF_KIND[FULL],) * full)
        assert len(model.grouped().groups) == groups


@given(st.lists(st.sampled_from(sorted(OF_KIND)), max_size=40), st.lists(st.sampled_from(sorted(OF_KIND)), max_size=9))
def test_only_the_names_of_groups_change(kinds: list[str], drafts: list[str]) -> None:
    """Each layer keeps its tensors, groups of one kind differ by a layer at most, and each begins with its kind."""
    model = Model("m", tuple(OF_KIND[kind] for kind in kinds), drafts=tuple(OF_KIND[kind] for kind in drafts))
    made = model.grouped()
    counts: dict[str, dict[str, int]] = {}
    for part, new in ((model.layers, made.layers), (model.drafts, made.drafts)):
        for layer, divided in zip(part, new, strict=True):
            assert [(t.kind, t.axes) for t in layer] == [(t.kind, t.axes) for t in divided]
            for before, after in {(a.group, b.group) for a, b in zip(layer, divided, strict=True)}:
                assert after.partition(".")[0] == before
                of_kind = counts.setdefault(before, {})
                of_kind[after] = of_kind.get(after, 0) + 1
    assert all(max(c.values()) - min(c.values()) <= 1 for c in counts.values())


def test_the_farthest_window_of_a_group_counts() -> None:
    """The window of a group is the largest of any layer, drafts included, or None if a layer attends to all."""
    near, far, full = (attention(2, 8, "g", window) for window in (32, 64, None))
    assert Model("m", (far, near)).windows == Model("m", (near,), drafts=(far,)).windows == {"g": 64}
    assert Model("m", (far, full)).windows == Model("m", (full, far)).windows == {"g": None}


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 50))
def test_what_is_left_out_is_never_seen_again(start: int, length: int, window: int) -> None:
    """A position moves exactly if the last token, which decode may compute again, or a later one attends to it."""
    stop, model = start + length, Model("m", (attention(2, 8, "g", window),))
    (low, high) = model.tokens(start, stop, *model.engine("e", num_blocks=2))["g"]
    seen = [p for p in range(start, stop) if any(p > token - window for token in range(stop - 1, stop + 60))]
    assert list(range(low, high)) == seen


@pytest.mark.parametrize(("start", "stop", "code"), [(5, 4, "RANGE"), (-1, 4, "RANGE"), (0, 4.0, "TYPE")])
def test_a_range_that_is_none_is_refused(start: int, stop: int, code: str) -> None:
    """Ranges are of integers, from start to stop."""
    with pytest.raises(KVPlanError, match=f"^{code}: .*of a token range"):
        GQA.tokens(start, stop, *GQA.engine("e", num_blocks=2))


@pytest.mark.parametrize(
    "stop, first",
    [(10_000, 8192), (8193, 8192), (8192, 0), (1, 0), (0, 0), (16_385, 16_384)],
)
def test_a_layer_of_chunks_moves_the_chunk_of_the_last_token(stop: int, first: int) -> None:
    """Llama 4: the token at 9999 attends to 8192 and behind; a sliding window would reach back to 1808."""
    model = Model.from_config(
        {
            "model_type": "llama4_text",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_chunk_size": 8192,
        }
    )
    (worker,) = model.engine("decode", num_blocks=4)
    assert model.tokens(0, stop, worker) == {"swa": (first, stop), "attn": (0, stop)}
