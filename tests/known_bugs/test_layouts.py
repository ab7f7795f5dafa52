"""Layouts: the order of heads, tokens, K and V in a page, on each side and in each layer."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvplan import Axis, Blocks, Group, MeshPlan, Region, Worker, plan_mesh, plan_reads, plan_writes, verify, view_of
from tests.edits import edited_specs
from tests.known_bugs.faults import asking, by_hand, grouped, moving
from tests.known_bugs.known_bug import Outcome, known_bug
from tests.known_bugs.mistakes import layers_of, taken_for, with_axis, with_views
from tests.small import DIM, HEAD_BYTES, axes, engine

REQUEST = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 5])}, (0, 8))
LONG = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 5])}, (0, 32))

Named = tuple[npt.NDArray[Any], str]
"""An array, and what its dimensions are."""


def arrays(name: str, *layers: Named) -> Worker:
    """A worker of the arrays that its layers are, each a region."""
    array, names = layers[0]
    tokens = array.shape[names.split().index("token")]
    regions = [
        Region(f"kv.{i}", array.__array_interface__["data"][0], array.nbytes) for i, (array, _) in enumerate(layers)
    ]
    views = [
        view_of(array, names, name=f"layers.{i}", group="attn", region=regions[i])
        for i, (array, names) in enumerate(layers)
    ]
    return Worker(name, 0, regions, [Group("attn", tokens)], views)


def zeros(*shape: int) -> npt.NDArray[np.float16]:
    """Memory for a cache."""
    return np.zeros(shape, np.float16)


@known_bug("B1", "NVIDIA/TensorRT-LLM#6507, NVIDIA/TensorRT-LLM#6917", "verify: VALUE")
def test_kernels_of_another_order() -> tuple[Outcome, Outcome]:
    """Kernels for HND caches split NHD caches for another TP size."""
    model = layers_of("qwen3-235b-a22b", 0)  # 4 heads of 128

    def mesh(layout: str) -> MeshPlan:
        sources, destinations = (
            model.engine(name, tp, layout=layout, kv="axis", num_blocks=10) for name, tp in (("prefill", 1), ("gen", 2))
        )
        return plan_mesh(destinations, sources)

    right = mesh("LBNHC")
    wrong = taken_for(right, mesh("LBHNC"), **LONG)
    return lambda: verify(wrong, **LONG), lambda: verify(right, **LONG)


@known_bug("B2", "vllm-project/vllm#35444, vllm-project/vllm#37703, vllm-project/vllm#37940", "verify: VALUE")
def test_an_order_that_was_asked_for() -> tuple[Outcome, Outcome]:
    """A connector requested HND, the backend allocated NHD, and slices of heads were slices of tokens."""
    memory = zeros(10, 4, 2, 2 * DIM)
    given: Named = memory.transpose(0, 2, 1, 3), "block head token dim"
    asked: Named = memory.reshape(10, 2, 4, 2 * DIM), "block head token dim"
    destination = arrays("decode", (zeros(10, 1, 4, 2 * DIM), "block head token dim"))
    second = with_axis(destination, "head", start=1, stop=2, size=2)
    right, wrong = (plan_reads(second, [arrays("prefill", layer)]) for layer in (given, asked))
    return lambda: verify(moving(right, wrong, **REQUEST), **REQUEST), lambda: verify(right, **REQUEST)


@known_bug("B3", "vllm-project/vllm#46204", "verify: VALUE")
def test_an_order_that_was_imposed() -> tuple[Outcome, Outcome]:
    """A connector declared HND for a kernel that writes NHD, and 8 ranks read mixed heads."""
    sources, destinations = engine("prefill", tokens=128, order="NH"), engine("decode", 8, tokens=128)
    right = plan_mesh(destinations, sources)
    wrong = plan_mesh(destinations, engine("prefill", tokens=128))
    request = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 5])}, (0, 200))
    return lambda: verify(taken_for(right, wrong, **request), **request), lambda: verify(right, **request)


@known_bug("B4", "vllm-project/vllm#32204", "verify: VALUE")
def test_a_group_that_was_not_converted() -> tuple[Outcome, Outcome]:
    """Pages were permuted after the transfer, but only those of the first group."""
    (source, received), groups = (grouped(name, full=4, window=4) for name in ("prefill", "decode")), ("full", "window")
    plan, first_only = (plan_reads(_tokens_outside(received, *kept), [source]) for kept in (groups, groups[:1]))
    local, remote = ({"full": Blocks(ids[:1]), "window": Blocks(ids[1:])} for ids in ([8, 1], [3, 5]))
    request = asking(local, remote, (0, 4))
    return lambda: verify(moving(plan, first_only, **request), **request), lambda: verify(plan, **request)


def _tokens_outside(worker: Worker, *groups: str) -> Worker:
    heads_inside = axes((0, 2, 2), 4, "NH")
    return with_views(
        worker, *(attrs.evolve(view, axes=heads_inside) if view.group in groups else view for view in worker.views)
    )


@known_bug("B5", "vllm-project/vllm#30448", "verify: VALUE")
def test_converted_in_a_copy() -> tuple[Outcome, Outcome]:
    """Blocks of 64, received in blocks of 16, were permuted in a copy, and the cache stayed as received."""
    (source,), (destination,) = engine("prefill", tokens=64), engine("decode", tokens=16, order="NH", blocks=20)
    plan = plan_reads(destination, [source])
    request = asking({"attn": Blocks([12, 7, 3, 15])}, {"attn": Blocks([5])}, (0, 64))
    (spec,) = plan.bind(**request)
    quarter = 4 * 16 * HEAD_BYTES
    pairs = [
        ((ours.address + block * quarter, quarter, 0), (theirs.address + (5 * 4 + i) * quarter, quarter, 0))
        for ours, theirs in zip(destination.regions, source.regions, strict=True)
        for i, block in enumerate((12, 7, 3, 15))
    ]
    as_received = by_hand(spec, *zip(*pairs, strict=True))
    return lambda: verify(edited_specs(plan, as_received), **request), lambda: verify(plan, **request)


@known_bug("B6", "LMCache/LMCache#4463, LMCache/LMCache#4467, ai-dynamo/dynamo#14416", "verify: VALUE")
def test_an_order_guessed_from_a_shape() -> tuple[Outcome, Outcome]:
    """With 2 heads, a cache with K and V side by side per head was taken for one with K first, then V."""
    cache = zeros(10, 16, 2, 256).transpose(0, 2, 1, 3)
    assert cache.shape == (10, 2, 16, 256)
    split = cache.reshape(10, 2, 16, 2, 128)
    assert np.shares_memory(cache, split)
    store = arrays("store", (zeros(2, 10, 16, 2, 128), "kv block token head dim"))
    right, wrong = (
        plan_writes(arrays("gpu", (split, names)), [store])
        for names in ("block head token kv dim", "block kv token head dim")
    )
    return lambda: verify(moving(right, wrong, **LONG), **LONG), lambda: verify(right, **LONG)


@known_bug("B9", "vLLM 0.33.0, base_worker.py", "verify: VALUE")
def test_scales_behind_all_heads() -> tuple[Outcome, Outcome]:
    """NVFP4 pages keep scales behind the values of all heads, so a slice of a page is no head: pairs were refused."""
    model = layers_of("qwen2.5-1.5b", 0).quantized(4, "float8_e4m3fn", 16)
    (source,), destinations = (
        model.engine(name, tp, num_blocks=10, scales="page") for name, tp in (("p", 1), ("d", 2))
    )
    right = plan_mesh(destinations, [source])
    wrong = []
    for plan in right.plans:
        half = plan.local.views[0].block_stride_bytes
        ours, theirs = plan.local.regions[0].address, source.regions[0].address + plan.local.rank * half
        pairs = [((ours + a * half, half, 0), (theirs + b * 2 * half, half, 0)) for a, b in ((8, 3), (1, 5))]
        (spec,) = plan.bind(**LONG)
        wrong.append(edited_specs(plan, by_hand(spec, *zip(*pairs, strict=True))))
    return lambda: verify(wrong, **LONG), lambda: verify(right, **LONG)


@known_bug(
    "B10", "vllm-project/vllm#45885, vllm-project/vllm#46039, vllm-project/vllm#46290", "verify: VALUE, COVER, OWN"
)
def test_one_layer_for_all() -> tuple[Outcome, Outcome]:
    """One layer's offsets were used for all, although some layers keep K and V and some K only."""
    source, destination = (
        arrays(
            name,
            (zeros(2, 10, 4, 2, DIM), "kv block token head dim"),
            (zeros(10, 2, 4, 2, DIM), "block kv token head dim"),
            (zeros(10, 4, DIM), "block token dim"),
        )
        for name in ("prefill", "decode")
    )
    right, wrong = plan_reads(destination, [source]), plan_reads(_as_the_first(destination), [_as_the_first(source)])
    request = asking({"attn": Blocks([2, 1])}, {"attn": Blocks([3, 4])}, (0, 8))
    return lambda: verify(moving(right, wrong, **request), **request), lambda: verify(right, **request)


def _as_the_first(worker: Worker) -> Worker:
    first = worker.views[0]
    steps = {axis.name: axis.stride_bytes for axis in first.axes}
    views = [
        attrs.evolve(
            view,
            axes=[attrs.evolve(axis, stride_bytes=steps[axis.name]) for axis in view.axes],
            block_stride_bytes=first.block_stride_bytes,
        )
        for view in worker.views
    ]
    regions = [attrs.evolve(region, size_bytes=worker.regions[0].size_bytes) for region in worker.regions]
    made: Worker = attrs.evolve(worker, regions=regions, views=views)
    return made


@known_bug("B14", "vllm-project/vllm#38935, vllm-project/vllm#47871", "verify: VALUE")
def test_an_order_that_had_changed() -> tuple[Outcome, Outcome]:
    """The packed layout of a CPU cache changed, and pages were still converted to the old one."""
    (source,), (destination,) = engine("prefill", tokens=8), engine("decode", tokens=8)
    plain = {"kv": 8 * 2 * DIM, "head": 16 * 2 * DIM, "token": 2 * DIM, "dim": 2}
    plan, before = (
        plan_reads(with_views(destination, *(attrs.evolve(view, axes=made) for view in destination.views)), [source])
        for made in (
            [  # tiles of 4 tokens and 2 elements, one after another
                Axis("kv", 0, 2, 2, plain["kv"]),
                Axis("head", 0, 4, 4, plain["head"]),
                Axis("token", 0, 2, 2, 4 * 2 * DIM),
                Axis("dim", 0, 2, 2, 4 * 2 * 2),
                Axis("token", 0, 4, 4, 2 * 2),
                Axis("dim", 0, 2, 2, 2),
            ],
            [attrs.evolve(axis, stride_bytes=plain[axis.name]) for axis in destination.views[0].axes],
        )
    )
    request = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 5])}, (0, 16))
    return lambda: verify(moving(plan, before, **request), **request), lambda: verify(plan, **request)


@known_bug("B16", "ai-dynamo/dynamo#2989", "refused: BOUNDS")
def test_sizes_of_another_layout() -> tuple[Outcome, Outcome]:
    """Block sizes were cached once per process, and a second layout was copied with the sizes of the first."""
    target, drafts = ([engine(name, heads=heads)[0] for name in ("prefill", "decode")] for heads in (4, 2))

    def as_kept() -> str:
        return str([with_views(worker, *of_target.views) for worker, of_target in zip(drafts, target, strict=True)])

    plans = [plan_reads(destination, [source]) for source, destination in (target, drafts)]
    return as_kept, lambda: tuple(verify(plan, **REQUEST) for plan in plans)
