"""Parallel sizes: which layers, heads and positions each rank of an engine holds, and where its regions are."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from kvplan import Context, KVPlanError, Model, Worker
from kvplan.models.layouts import KV_FORMS, ORDERS
from kvplan.models.parallel import Parallel, stages_of
from kvplan.models.pools import ALIGNMENT_BYTES
from kvplan.models.tensors import attention, latent

TINY: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 3, "head_dim": 8, "num_attention_heads": 24}


def tiny(heads: int, layers: int = 3) -> Model:
    return Model.from_config({**TINY, "num_key_value_heads": heads, "num_hidden_layers": layers}, "tiny")


def tiny_latent() -> Model:
    keys = {"model_type": "deepseek_v3", "num_hidden_layers": 3, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
    return Model.from_config(keys, "tiny-mla")


def heads_of(worker: Worker) -> tuple[int, int, int]:
    """The heads of the first view: start, stop and size."""
    (head,) = (axis for axis in worker.views[0].axes if axis.name == "head")
    return head.start, head.stop, head.size


def layers_of(worker: Worker) -> list[int]:
    """The layer of each view."""
    return [int(view.name.split(".")[1]) for view in worker.views]


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


def test_every_rank_holds_the_whole_tiny_latent() -> None:
    """MLA has no heads to divide: tensor parallelism replicates it."""
    for worker in tiny_latent().engine("e", tp=4, num_blocks=2):
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
    """Stages are contiguous; a remainder goes to the stages before the last, one layer each, the latest first."""
    ranges = stages_of(layers, pp)
    assert [len(stage) for stage in ranges] == sizes
    assert [layer for stage in ranges for layer in stage] == [*range(layers)]


def test_ranks_count_tensor_then_prefill_context_then_pipeline() -> None:
    """World rank (pp_rank * pcp + pcp_rank) * tp + tp_rank, and workers come in that order."""
    workers = tiny(2, layers=4).engine("e", tp=2, pp=2, pcp=2, num_blocks=2)
    held = [(w.rank, layers_of(w)[0], heads_of(w)[0]) for w in workers]
    assert held == [(r, r // 4 * 2, r % 2) for r in range(8)]


def test_more_stages_than_layers_is_refused() -> None:
    """Each stage has at least one layer."""
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .*pp <= 3, the number of layers, got 4"):
        tiny(2).engine("e", pp=4)


def test_stages_may_be_given() -> None:
    """layers_per_stage has the number of layers of each stage, and so the number of stages."""
    workers = tiny(2, layers=5).engine("e", layers_per_stage=(1, 3, 1), num_blocks=2)
    assert [layers_of(worker) for worker in workers] == [[0], [1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("pp", "given", "code"),
    [(1, (2, 2), "LAYOUT"), (2, (1, 1, 1), "LAYOUT"), (1, (3, 0), "RANGE"), (1, (), "RANGE")],
)
def test_given_stages_hold_every_layer(pp: int, given: tuple[int, ...], code: str) -> None:
    """Stages that leave layers out, hold none, or contradict pp are refused."""
    with pytest.raises(KVPlanError, match=f"^{code}: "):
        tiny(2).engine("e", pp=pp, layers_per_stage=given)


def test_a_draft_is_on_the_last_stage() -> None:
    """Draft layers have names, heads and pools of their own, and no stage but the last holds them."""
    workers = tiny_latent().with_draft(tiny(2, layers=2)).engine("e", pp=3, tp=2, num_blocks=2)
    drafts = [[view.name for view in worker.views if view.name.startswith("draft.")] for worker in workers]
    assert drafts == [[], [], [], [], *[["draft.0.attn", "draft.1.attn"]] * 2]
    assert [axis.size for axis in workers[5].views[-1].axes if axis.name == "head"] == [2]


def contexts(sizes: Parallel) -> list[int]:
    """The context rank of each worker of a stage, in order of world rank."""
    return [sizes.context(pcp, tp).rank for pcp in range(sizes.pcp) for tp in range(sizes.tp)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param(Parallel(tp=4, dcp=2), [0, 1, 0, 1], id="tensor-ranks-alone"),
        pytest.param(Parallel(tp=2, pcp=2), [0, 0, 0, 0], id="pcp-alone-replicates"),
        pytest.param(Parallel(tp=2, pcp=2, dcp=2), [0, 0, 1, 1], id="dcp-spans-pcp"),
        pytest.param(Parallel(tp=2, pcp=2, dcp=4), [0, 2, 1, 3], id="dcp-spans-pcp-then-tp"),
    ],
)
def test_context_ranks_by_world_rank(sizes: Parallel, expected: list[int]) -> None:
    """Context ranks count PCP ranks first, as vLLM's groups do."""
    assert contexts(sizes) == expected


@pytest.mark.parametrize("heads", [None, 1, 2, 3, 4])
def test_sizes_that_pass_keep_each_position_of_each_head(heads: int | None) -> None:
    """The check passes exactly the sizes at which every head is held at every context rank."""
    (tensor,) = latent(12, 4) if heads is None else attention(heads, 8)
    passed = 0
    for tp in range(1, 9):
        for pcp in range(1, 4):
            for dcp in range(1, 13):
                sizes = Parallel(tp=tp, dcp=dcp, pcp=pcp)
                held = {
                    (unit, sizes.context(p, t).rank)
                    for p in range(pcp)
                    for t in range(tp)
                    for unit in tensor.shards_of(t, tp)
                }
                every = {(unit, rank) for unit in range(tensor.shards) for rank in range(sizes.context(0, 0).size)}
                even = tp * pcp % dcp == 0
                if held == every and even:
                    sizes.check("tiny", [tensor])
                    passed += 1
                else:
                    with pytest.raises(KVPlanError, match="cannot spread positions of tiny"):
                        sizes.check("tiny", [tensor])
    assert passed > 24


def test_an_engine_spreads_positions() -> None:
    """The context of each worker is that of its parallel sizes, with the interleave given; pcp alone replicates."""
    every: list[tuple[dict[str, Any], Parallel]] = [
        ({"tp": 4, "dcp": 2, "interleave": 8}, Parallel(tp=4, dcp=2, interleave=8)),
        ({"tp": 2, "pcp": 2, "dcp": 2}, Parallel(tp=2, pcp=2, dcp=2)),
        ({"pcp": 3}, Parallel(pcp=3)),
    ]
    for options, sizes in every:
        workers = tiny_latent().engine("e", num_blocks=2, **options)
        expected = [sizes.context(pcp, tp) for pcp in range(sizes.pcp) for tp in range(sizes.tp)]
        assert [worker.groups[0].context for worker in workers] == expected
    assert expected == [Context()] * 3


@pytest.mark.parametrize(
    ("heads", "sizes", "text"),
    [
        (
            8,
            {"tp": 8, "dcp": 2},
            r"dcp <= 1, got dcp=2 \(8 ranks / 8 KV heads = 1 rank per head; dcp=2 needs tp=16\)",
        ),
        (
            2,
            {"tp": 8, "dcp": 8},
            r"dcp <= 4, got dcp=8 \(8 ranks / 2 KV heads = 4 ranks per head; dcp=8 needs tp=16\)",
        ),
        (
            12,
            {"tp": 8, "dcp": 2},
            r"dcp <= 1, got dcp=2 \(8 ranks / 12 KV heads = 1 rank per head; dcp=2 needs tp=24\)",
        ),
        (
            2,
            {"tp": 4, "pcp": 2, "dcp": 8},
            r"dcp <= 4, got dcp=8 \(8 ranks / 2 KV heads = 4 ranks per head; dcp=8 needs tp=8\)",
        ),
        (1, {"tp": 4, "dcp": 3}, "dcp that divides tp 4, whose ranks it reuses, got dcp=3"),
        (1, {"tp": 4, "pcp": 2, "dcp": 3}, r"dcp that divides tp \* pcp 8, whose ranks it reuses, got dcp=3"),
    ],
)
def test_positions_of_a_head_are_on_ranks_that_hold_it(heads: int, sizes: dict[str, Any], text: str) -> None:
    """A dcp that leaves positions of a head without a rank is refused with the number of ranks."""
    with pytest.raises(KVPlanError, match=f"cannot spread positions of tiny: expected {text}") as caught:
        tiny(heads).engine("e", **sizes)
    assert caught.value.code == "LAYOUT"
    assert caught.value.details.items() >= {"tp": sizes["tp"], "dcp": sizes["dcp"]}.items()


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
    with pytest.raises(KVPlanError, match=f"^RANGE: .*at most {1 << 46} bytes"):
        tiny(2).engine("e", num_blocks=1 << 36)


def test_each_worker_has_a_device_of_its_own_in_vram() -> None:
    """VRAM regions are on the device of the worker's rank, DRAM regions on 0."""
    for memory, devices in (("VRAM", [0, 1]), ("DRAM", [0, 0])):
        workers = tiny(2).engine("e", tp=2, memory=memory, num_blocks=2)
        assert [{(r.memory, r.device_id) for r in worker.regions} for worker in workers] == [
            {(memory, device)} for device in devices
        ]


@pytest.mark.parametrize("option", ["tp", "pp", "dcp", "pcp", "interleave", "tokens_per_block", "num_blocks"])
@pytest.mark.parametrize(("value", "code"), [(0, "RANGE"), (-1, "RANGE"), (True, "TYPE"), (2.0, "TYPE"), ("2", "TYPE")])
def test_sizes_are_positive_integers(option: str, value: object, code: str) -> None:
    """Every size is checked, and the message names it."""
    options: dict[str, Any] = {option: value}
    with pytest.raises(KVPlanError, match=option) as caught:
        tiny_latent().engine("e", **options)
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
        ({"scales": "outside"}, "LAYOUT"),
        ({"memory": "HBM"}, "NAME"),
        ({"tp": 1 << 10, "pcp": 1 << 10}, "RANGE"),
    ],
)
def test_options_are_checked(options: dict[str, Any], code: str) -> None:
    """Unknown words and impossible numbers are refused with the code of their kind."""
    with pytest.raises(KVPlanError, match=f"^{code}: "):
        tiny_latent().engine("e", **options)


def test_an_engine_id_is_a_name() -> None:
    """An empty engine id is refused before it seeds any address."""
    with pytest.raises(KVPlanError, match=r"^NAME: .*engine_id"):
        tiny(2).engine("")
