"""Models: the figures that others publish for real models, and which rank holds what."""

from itertools import combinations
from typing import Any

import pytest

from kvplan import Context, KVPlanError, Worker
from kvplan.models.layouts import KV_FORMS, ORDERS
from kvplan.models.model import Model
from kvplan.models.placement import ALIGNMENT_BYTES, stages
from kvplan.models.tensors import Tensor

KIB, MIB = 1 << 10, 1 << 20

TINY: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 3, "head_dim": 8, "num_attention_heads": 24}


def tiny(heads: int, layers: int = 3) -> Model:
    return Model.from_config({**TINY, "num_key_value_heads": heads, "num_hidden_layers": layers}, "tiny")


def latent() -> Model:
    keys = {"model_type": "deepseek_v3", "num_hidden_layers": 3, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
    return Model.from_config(keys, "tiny-mla")


def heads_of(worker: Worker) -> tuple[int, int, int]:
    (head,) = (axis for axis in worker.views[0].axes if axis.name == "head")
    return head.start, head.stop, head.size


def layers_of(worker: Worker) -> list[int]:
    return [int(view.name.split(".")[1]) for view in worker.views]


@pytest.mark.parametrize(
    ("model", "tp", "tokens_per_block", "part_bytes", "block_bytes"),
    [
        pytest.param("deepseek-r1-distill-qwen-32b", 2, 16, 16 * KIB, 2 * MIB, id="deepseek-r1-distill-qwen-32b"),
        pytest.param("llama-3.1-8b", 1, 16, 32 * KIB, 2 * MIB, id="llama-3.1-8b"),
        pytest.param("llama-3.2-1b", 1, 16, 16 * KIB, MIB // 2, id="llama-3.2-1b"),
        pytest.param("llama-3.1-70b", 4, 16, 8 * KIB, 5 * MIB // 4, id="llama-3.1-70b"),
        pytest.param("mistral-7b", 1, 16, 32 * KIB, 2 * MIB, id="mistral-7b"),
        pytest.param("mistral-small-24b", 1, 16, 32 * KIB, 5 * MIB // 2, id="mistral-small-24b"),
        pytest.param("qwen2.5-1.5b", 1, 16, 8 * KIB, 7 * MIB // 16, id="qwen2.5-1.5b"),
        pytest.param("qwen2.5-3b", 1, 16, 8 * KIB, 9 * MIB // 16, id="qwen2.5-3b"),
        pytest.param("qwen2.5-7b", 1, 16, 16 * KIB, 7 * MIB // 8, id="qwen2.5-7b"),
        pytest.param("qwen3-0.6b", 1, 16, 32 * KIB, 7 * MIB // 4, id="qwen3-0.6b"),
        pytest.param("qwen3-1.7b", 1, 16, 32 * KIB, 7 * MIB // 4, id="qwen3-1.7b"),
        pytest.param("qwen3-4b", 1, 16, 32 * KIB, 9 * MIB // 4, id="qwen3-4b"),
        pytest.param("qwen3-8b", 1, 16, 32 * KIB, 9 * MIB // 4, id="qwen3-8b"),
        pytest.param("qwen3-32b", 2, 16, 16 * KIB, 2 * MIB, id="qwen3-32b"),
    ],
)
def test_bytes_of_a_block(model: str, tp: int, tokens_per_block: int, part_bytes: int, block_bytes: int) -> None:
    """K or V of one layer, and a block of all layers, as published with vLLM pull request 30207.

    Its row for Qwen3-8B (28 KB, 1.97 MB) fits no model of 36 layers with 8 heads of 128; here it is Qwen3-4B's.
    """
    layers = Model.shipped(model).block_bytes(tp, tokens_per_block)
    assert set(layers) == {2 * part_bytes}
    assert sum(layers) == block_bytes


def test_bytes_of_a_latent_block() -> None:
    """DeepSeek-V2-Lite at block 64 keeps 72 KB a layer and 1.9 MB in all, as published with that request."""
    layers = Model.shipped("deepseek-v2-lite").block_bytes(tokens_per_block=64)
    assert set(layers) == {72 * KIB}
    assert round(sum(layers) / MIB, 1) == 1.9


@pytest.mark.parametrize(
    ("model", "pages"),
    [
        pytest.param("llama-3.1-8b", {1: 65536, 2: 32768, 4: 16384, 8: 8192}, id="llama-3.1-8b"),
        pytest.param("llama-3.1-70b", {4: 16384, 8: 8192, 16: 8192}, id="llama-3.1-70b"),
        pytest.param("qwen3-235b-a22b", {1: 32768, 2: 16384, 4: 8192, 8: 8192}, id="qwen3-235b-a22b"),
        pytest.param("gpt-oss-120b", {1: 32768, 2: 16384, 8: 4096}, id="gpt-oss-120b"),
        pytest.param("gemma-3-27b", {2: 65536, 4: 32768}, id="gemma-3-27b"),
        pytest.param("deepseek-v3", {1: 18432, 8: 18432, 16: 18432}, id="deepseek-v3"),
    ],
)
def test_page_bytes_by_tensor_parallel_size(model: str, pages: dict[int, int]) -> None:
    """A page, one layer's block of 16 tokens, shrinks with tp until each rank holds one head, or is a latent."""
    shipped = Model.shipped(model)
    assert {tp: set(shipped.block_bytes(tp)) for tp in pages} == {tp: {page} for tp, page in pages.items()}


def test_page_bytes_of_deepseek_v3_at_block_64() -> None:
    """61 layers, each 1152 bytes a token, so 73728 a page at block 64."""
    assert Model.shipped("deepseek-v3").block_bytes(8, 64) == (73728,) * 61


@pytest.mark.parametrize(
    ("model", "states"),
    [
        pytest.param("nemotron-h-8b", {1: (61440, 4194304), 8: (7680, 524288), 16: (4608, 262144)}, id="nemotron-h-8b"),
        pytest.param(
            "nemotron-3-nano-30b-a3b",
            {1: (36864, 2097152), 4: (9216, 524288), 8: (4608, 262144)},
            id="nemotron-3-nano-30b-a3b",
        ),
        pytest.param("qwen3-next-80b", {1: (49152, 2097152), 8: (6144, 262144)}, id="qwen3-next-80b"),
        pytest.param("granite-4.0-h-tiny", {1: (19968, 1572864), 2: (10752, 786432)}, id="granite-4.0-h-tiny"),
        pytest.param("jamba-v0.1", {1: (49152, 524288), 2: (24576, 262144)}, id="jamba-v0.1"),
        pytest.param("falcon-mamba-7b", {1: (49152, 524288), 2: (24576, 262144)}, id="falcon-mamba-7b"),
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
        pytest.param("nemotron-h-8b", 4, 24, id="nemotron-h-8b"),
        pytest.param("nemotron-3-nano-30b-a3b", 6, 23, id="nemotron-3-nano-30b-a3b"),
        pytest.param("qwen3-next-80b", 12, 36, id="qwen3-next-80b"),
        pytest.param("granite-4.0-h-tiny", 4, 36, id="granite-4.0-h-tiny"),
        pytest.param("jamba-v0.1", 4, 28, id="jamba-v0.1"),
        pytest.param("falcon-mamba-7b", 0, 64, id="falcon-mamba-7b"),
    ],
)
def test_layers_of_hybrids(model: str, attending: int, stateful: int) -> None:
    """How many layers attend, and how many keep a state."""
    kinds = [kind for layer in Model.shipped(model).layers for kind in {tensor.pool for tensor in layer}]
    assert (kinds.count("attn"), kinds.count("state")) == (attending, stateful)


@pytest.mark.parametrize(("tp", "full"), [(1, 32), (2, 32), (4, 32), (8, 16)])
def test_pages_of_gemma_4_31b_are_made_equal(tp: int, full: int) -> None:
    """50 layers of 16 heads of 256 and 10 of 4 heads of 512 have equal pages when full blocks are longer."""
    model = Model.shipped("gemma-4-31b")
    assert model.blocks(tp) == {"swa": 16, "attn": full}
    assert len(set(model.block_bytes(tp))) == 1
    assert [tensor.group for (tensor,) in model.layers].count("swa") == 50
    (worker, *_) = model.engine("e", tp=tp, num_blocks=2)
    assert {group.name: group.tokens_per_block for group in worker.groups} == {"swa": 16, "attn": full}


def test_blocks_by_group_are_taken_as_they_are() -> None:
    """A mapping names every token group, and its blocks are not made equal."""
    model = Model.shipped("gemma-4-31b")
    assert model.blocks(4, {"swa": 48, "attn": 16}) == {"swa": 48, "attn": 16}
    with pytest.raises(KVPlanError, match="tokens_per_block of swa, attn, got swa") as caught:
        model.blocks(4, {"swa": 16})
    assert caught.value.code == "NAME"


@pytest.mark.parametrize("model", Model.names())
def test_windows_and_tokens_name_the_groups_of_engines(model: str) -> None:
    """Every token group that an engine has, in any grouping, has a window and a range of tokens, and no other."""
    for shipped in (Model.shipped(model), Model.shipped(model).grouped()):
        (worker, *_) = shipped.engine("e", num_blocks=2)
        paged = {group.name for group in worker.groups if group.tokens_per_block is not None}
        assert {*shipped.windows} == {*shipped.tokens(0, 5000)} == paged


def test_a_sliding_group_moves_what_is_still_seen() -> None:
    """Of 5000 positions, the next token attends to the last 1023 in sliding layers and to all in full ones."""
    model = Model.shipped("gemma-4-31b")
    assert model.windows == {"swa": 1024, "attn": None}
    assert model.tokens(100, 5000) == {"swa": (3977, 5000), "attn": (100, 5000)}


def test_bytes_of_sparse_latents() -> None:
    """DeepSeek-V3.2 keeps 656 bytes a token and 132 of its indexer, whose pages hold all keys before the scales."""
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
    """Where there is no state to cover, or nothing to cover it with, a block is one kernel block."""
    assert [Model.shipped(name).kernel_blocks() for name in ("llama-3.1-8b", "falcon-mamba-7b")] == [1, 1]


@pytest.mark.parametrize(
    ("model", "layers", "heads", "head_dim"),
    [
        pytest.param("qwen3-0.6b", 28, 8, 128, id="qwen3-0.6b"),
        pytest.param("qwen3-32b", 64, 8, 128, id="qwen3-32b"),
        pytest.param("qwen3-235b-a22b", 94, 4, 128, id="qwen3-235b-a22b"),
        pytest.param("gpt-oss-20b", 24, 8, 64, id="gpt-oss-20b"),
        pytest.param("gpt-oss-120b", 36, 8, 64, id="gpt-oss-120b"),
        pytest.param("gemma-3-27b", 62, 16, 128, id="gemma-3-27b"),
        pytest.param("mistral-small-24b", 40, 8, 128, id="mistral-small-24b"),
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
    [pytest.param("gemma-3-27b", 52, 10, id="gemma-3-27b"), pytest.param("gpt-oss-120b", 18, 18, id="gpt-oss-120b")],
)
def test_sliding_and_full_layers_have_tables_of_their_own(model: str, sliding: int, full: int) -> None:
    """Each worker has both groups, and a view's group is that of its layer."""
    (worker,) = Model.shipped(model).engine("e", num_blocks=2)
    assert [group.name for group in worker.groups] == ["swa", "attn"]
    assert [sum(view.group == group for view in worker.views) for group in ("swa", "attn")] == [sliding, full]


def test_groups_that_share_an_order_do_not_share_a_pool() -> None:
    """With all layers in a block, each group's layers make rows of their own."""
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
        {i for i in expected if i in stage} for stage in stages(len(shipped.layers), 2)
    ]


def test_a_shipped_model_that_is_none_is_told_with_those_like_it() -> None:
    """A name that no shipped model has is refused with up to three that are like it."""
    with pytest.raises(KVPlanError) as caught:
        Model.shipped("Qwen3-0.5B")
    assert str(caught.value) == (
        "NAME: cannot load a shipped model: expected one of Model.names(), got 'Qwen3-0.5B' "
        "(did you mean 'qwen3-0.6b', 'qwen3-1.7b' or 'qwen3-8b'?)"
    )
    assert caught.value.details == {"name": "Qwen3-0.5B"}


@pytest.mark.parametrize(
    ("heads", "tp", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 8, [(0, 1)] * 4 + [(1, 2)] * 4),
        (12, 8, [(0, 2), (1, 3), (3, 5), (4, 6), (6, 8), (7, 9), (9, 11), (10, 12)]),
        (2, 3, [(0, 1), (0, 2), (1, 2)]),
    ],
)
def test_heads_by_rank(heads: int, tp: int, expected: list[tuple[int, int]]) -> None:
    """Equal shares, replicas in contiguous runs of ranks, or intervals that overlap by a head."""
    workers = tiny(heads).engine("e", tp=tp, num_blocks=2)
    assert [heads_of(worker) for worker in workers] == [(start, stop, heads) for start, stop in expected]


def test_every_rank_holds_the_whole_latent() -> None:
    """MLA has no heads to divide: tensor parallelism replicates it."""
    for worker in latent().engine("e", tp=4, num_blocks=2):
        assert {view.sizes["dim"] for view in worker.views} == {16}
        assert all(axis.extent == axis.size for view in worker.views for axis in view.axes)


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [
        (32, 4, [8, 8, 8, 8]),
        (61, 4, [15, 15, 16, 15]),
        (94, 4, [23, 24, 24, 23]),
        (5, 2, [3, 2]),
        (7, 4, [2, 2, 2, 1]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_stages_leave_the_last_one_short(layers: int, pp: int, sizes: list[int]) -> None:
    """Contiguous stages; a remainder goes one each to the stages before the last, the latest first."""
    ranges = list(stages(layers, pp))
    assert [len(stage) for stage in ranges] == sizes
    assert [layer for stage in ranges for layer in stage] == list(range(layers))


def test_ranks_count_tensor_then_prefill_context_then_pipeline() -> None:
    """World rank (pp_rank * pcp + pcp_rank) * tp + tp_rank, and workers come in that order."""
    workers = tiny(2, layers=4).engine("e", tp=2, pp=2, pcp=2, num_blocks=2)
    held = [(w.rank, layers_of(w)[0], heads_of(w)[0]) for w in workers]
    assert held == [(r, r // 4 * 2, r % 2) for r in range(8)]


def test_more_stages_than_layers_is_refused() -> None:
    """A stage without layers has nothing to keep."""
    with pytest.raises(KVPlanError, match="pp <= 3, the number of layers, got 4") as caught:
        tiny(2).engine("e", pp=4)
    assert caught.value.code == "LAYOUT"


def test_stages_may_be_given() -> None:
    """layers_per_stage says how many layers each stage has, and so how many stages there are."""
    workers = tiny(2, layers=5).engine("e", layers_per_stage=(1, 3, 1), num_blocks=2)
    assert [layers_of(worker) for worker in workers] == [[0], [1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("pp", "given", "code"),
    [(1, (2, 2), "LAYOUT"), (2, (1, 1, 1), "LAYOUT"), (1, (3, 0), "RANGE"), (1, (), "RANGE")],
)
def test_given_stages_hold_every_layer(pp: int, given: tuple[int, ...], code: str) -> None:
    """Stages that leave layers out, hold none, or contradict pp are refused."""
    with pytest.raises(KVPlanError) as caught:
        tiny(2).engine("e", pp=pp, layers_per_stage=given)
    assert caught.value.code == code


def test_a_draft_stands_on_the_last_stage() -> None:
    """Draft layers have names, heads and pools of their own, and no stage but the last holds them."""
    workers = latent().with_draft(tiny(2, layers=2)).engine("e", pp=3, tp=2, num_blocks=2)
    drafts = [[view.name for view in worker.views if view.name.startswith("draft.")] for worker in workers]
    assert drafts == [[], [], [], [], *[["draft.0.attn", "draft.1.attn"]] * 2]
    assert [axis.size for axis in workers[5].views[-1].axes if axis.name == "head"] == [2]


def test_draft_layers_of_a_file_are_off_unless_asked_for() -> None:
    """num_nextn_predict_layers counts only with with_draft_layers."""
    keys = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
    config = {**keys, "num_nextn_predict_layers": 1}
    assert Model.from_config(config).drafts == ()
    assert Model.from_config(config, with_draft_layers=True).drafts == Model.from_config(config).layers[:1]


def test_context_ranks_reuse_tensor_ranks() -> None:
    """Of tp 4 and dcp 2 the context ranks are 0, 1, 0, 1, with the interleave given."""
    contexts = [worker.groups[0].context for worker in latent().engine("e", tp=4, dcp=2, interleave=8, num_blocks=2)]
    assert [(c.rank, c.size, c.interleave_tokens) for c in contexts] == [(0, 2, 8), (1, 2, 8), (0, 2, 8), (1, 2, 8)]


def test_prefill_context_ranks_keep_the_same_positions() -> None:
    """pcp alone is more workers with the same cache."""
    workers = latent().engine("e", pcp=3, num_blocks=2)
    assert [worker.groups[0].context for worker in workers] == [Context()] * 3


def test_interleave_and_pcp_spreads_reach_the_context() -> None:
    """pcp 2 and dcp 2 on tp 2 are two context ranks, or four with pcp_spreads."""
    for spreads, size in ((False, 2), (True, 4)):
        workers = latent().engine("e", tp=2, dcp=2, pcp=2, interleave=8, pcp_spreads=spreads, num_blocks=2)
        contexts = [worker.groups[0].context for worker in workers]
        assert [(c.size, c.interleave_tokens) for c in contexts] == [(size, 8)] * 4


@pytest.mark.parametrize(("heads", "tp", "dcp"), [(2, 8, 4), (2, 8, 2), (1, 4, 4), (2, 12, 4)])
def test_context_ranks_of_each_head_keep_every_position(heads: int, tp: int, dcp: int) -> None:
    """Where heads are replicated enough, each position of each head is held somewhere."""
    workers = tiny(heads).engine("e", tp=tp, dcp=dcp, num_blocks=2)
    held = {
        (head, position)
        for worker in workers
        for head in range(*heads_of(worker)[:2])
        for position in range(24)
        if position in worker.groups[0].context
    }
    assert held == {(head, position) for head in range(heads) for position in range(24)}


@pytest.mark.parametrize(("heads", "tp", "dcp"), [(8, 8, 2), (2, 8, 8), (4, 2, 2), (12, 8, 2)])
def test_context_parallelism_needs_replicated_heads(heads: int, tp: int, dcp: int) -> None:
    """Positions of a head can't spread over ranks that don't hold the head."""
    with pytest.raises(KVPlanError, match=f"of {tp} ranks hold each of {heads} heads, got {dcp}") as caught:
        tiny(heads).engine("e", tp=tp, dcp=dcp)
    assert caught.value.code == "LAYOUT"
    assert dict(caught.value.details) == {"tp": tp, "dcp": dcp, "heads": heads}


def test_decode_context_divides_tensor_parallelism() -> None:
    """dcp 3 can't reuse the ranks of tp 4."""
    with pytest.raises(KVPlanError, match="dcp that divides tp 4, whose ranks it reuses, got 3") as caught:
        latent().engine("e", tp=4, dcp=3)
    assert caught.value.code == "LAYOUT"


@pytest.mark.parametrize("kv", KV_FORMS)
@pytest.mark.parametrize("layout", ORDERS)
def test_regions_lie_apart_and_aligned(layout: str, kv: str) -> None:
    """Regions of all workers of one engine start at multiples of 2 MiB and lie as far apart."""
    workers = tiny(2).engine("e", tp=2, pp=2, layout=layout, kv=kv, num_blocks=300, pad=64)
    spans = [(r.address, r.address + r.size_bytes) for worker in workers for r in worker.regions]
    assert all(start % ALIGNMENT_BYTES == 0 and stop < 1 << 63 for start, stop in spans)
    gap = ALIGNMENT_BYTES
    assert all(a_stop + gap <= b or b_stop + gap <= a for (a, a_stop), (b, b_stop) in combinations(spans, 2))


def test_engines_have_addresses_of_their_own() -> None:
    """Two engine ids differ in every address, and the same id has the same ones again."""
    prefill, decode = (tiny(2).engine(engine, tp=2, num_blocks=2) for engine in ("prefill", "decode"))
    assert not {r.address for w in prefill for r in w.regions} & {r.address for w in decode for r in w.regions}
    assert prefill == tiny(2).engine("prefill", tp=2, num_blocks=2)


def test_an_engine_larger_than_its_address_space_is_refused() -> None:
    """Pools of more than 64 TiB would run into the next engine's addresses."""
    with pytest.raises(KVPlanError, match=f"at most {1 << 46} bytes") as caught:
        tiny(2).engine("e", num_blocks=1 << 36)
    assert caught.value.code == "RANGE"


def test_each_worker_has_a_device_of_its_own_in_vram() -> None:
    """VRAM regions are on the device of the worker's rank, DRAM regions on 0."""
    for memory, devices in (("VRAM", [0, 1]), ("DRAM", [0, 0])):
        workers = tiny(2).engine("e", tp=2, memory=memory, num_blocks=2)
        assert [{(r.memory, r.device_id) for r in worker.regions} for worker in workers] == [
            {(memory, device)} for device in devices
        ]


def test_the_cache_may_have_a_dtype_of_its_own() -> None:
    """An fp8 cache of a bf16 model takes half the bytes, in pools and in block_bytes."""
    whole = tiny(2)
    half = whole.with_dtypes("float8_e4m3fn")
    (large,), (small,) = (model.engine("e", num_blocks=2) for model in (whole, half))
    assert [2 * r.size_bytes for r in small.regions] == [r.size_bytes for r in large.regions]
    assert {view.dtype for view in small.views} == {"float8_e4m3fn"}
    assert [2 * layer for layer in half.block_bytes()] == list(whole.block_bytes())


def test_states_may_have_a_dtype_of_their_own() -> None:
    """SSM states in bf16 take half the bytes of fp32, the convolution and attention what they took."""
    model = Model.shipped("jamba-v0.1")
    for before, after in zip(model.tensor_bytes(), model.with_dtypes(ssm_dtype="bfloat16").tensor_bytes(), strict=True):
        assert after == {kind: size // 2 if kind == "ssm" else size for kind, size in before.items()}
    assert model.with_dtypes() == model


@pytest.mark.parametrize(("dtype", "size"), [(None, 656), ("bfloat16", 1152), ("float8_e4m3fn", 576)])
def test_a_sparse_latent_is_a_row_with_scales_or_plain(dtype: str | None, size: int) -> None:
    """DeepSeek-V3.2 keeps 656 bytes a token, or 576 elements of a dtype; its indexer keeps 132 either way."""
    (layer, *_) = Model.shipped("deepseek-v3.2").with_dtypes(dtype).tensor_bytes(8, 64)
    assert layer == {"attn": 64 * size, "index": 8192, "index.scale": 256}


@pytest.mark.parametrize("given", [{"dtype": "int4"}, {"ssm_dtype": "fp32"}])
def test_an_unknown_dtype_is_refused(given: dict[str, str]) -> None:
    """A dtype without a size is refused before there is a view of it."""
    with pytest.raises(KVPlanError, match="keep a cache: expected a dtype of") as caught:
        tiny(2).with_dtypes(**given)
    assert caught.value.code == "DTYPE"


def test_block_bytes_are_those_of_the_views() -> None:
    """The figures are what a worker's views of a layer hold, whichever rank."""
    model = tiny(12)
    for worker in model.engine("e", tp=8, tokens_per_block=32, num_blocks=2, kv="split"):
        held = [0] * len(model.layers)
        for layer, view in zip(layers_of(worker), worker.views, strict=True):
            held[layer] += view.block_bytes
        assert tuple(held) == model.block_bytes(8, 32, rank=worker.rank)


def test_options_reach_the_layout() -> None:
    """layout, kv, pad, kernel_tokens, tokens_per_block and num_blocks all show in the views."""
    (worker,) = tiny(2).engine(
        "e", layout="LBNHC", kv="axis", pad=10, kernel_tokens=4, tokens_per_block=12, num_blocks=5
    )
    view = worker.views[0]
    assert [(axis.name, axis.extent, axis.stride_bytes) for axis in view.axes] == [
        ("token", 3, 256),
        ("kv", 2, 128),
        ("token", 4, 32),
        ("head", 2, 16),
        ("dim", 8, 2),
    ]
    assert (view.num_blocks, view.block_stride_bytes) == (5, 3 * 256 + 10)


@pytest.mark.parametrize("option", ["tp", "pp", "dcp", "pcp", "interleave", "tokens_per_block", "num_blocks"])
@pytest.mark.parametrize(("value", "code"), [(0, "RANGE"), (-1, "RANGE"), (True, "TYPE"), (2.0, "TYPE"), ("2", "TYPE")])
def test_sizes_are_positive_integers(option: str, value: object, code: str) -> None:
    """Every size is checked, and the message names it."""
    options: dict[str, Any] = {option: value}
    with pytest.raises(KVPlanError, match=option) as caught:
        latent().engine("e", **options)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"layout": "NHD"}, "LAYOUT"),
        ({"kv": "both"}, "LAYOUT"),
        ({"pad": -1}, "RANGE"),
        ({"kernel_tokens": 0}, "RANGE"),
        ({"kernel_tokens": 5}, "LAYOUT"),
        ({"shared": 1}, "TYPE"),
        ({"pcp_spreads": None}, "TYPE"),
        ({"scales": "outside"}, "LAYOUT"),
        ({"memory": "HBM"}, "NAME"),
        ({"tp": 1 << 10, "pcp": 1 << 10}, "RANGE"),
    ],
)
def test_options_are_checked(options: dict[str, Any], code: str) -> None:
    """Unknown words and impossible numbers are refused with the code of their kind."""
    with pytest.raises(KVPlanError) as caught:
        latent().engine("e", **options)
    assert caught.value.code == code


def test_an_engine_id_is_a_name() -> None:
    """An empty engine id is refused before it seeds any address."""
    with pytest.raises(KVPlanError, match="engine_id") as caught:
        tiny(2).engine("")
    assert caught.value.code == "NAME"


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
    assert str(first.views[0].axes[0]) == "channel [4, 8) of 16 step 16"
