"""Pools: the places, lengths and strides of tensors that share memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from kvplan import Axis, Blocks, Group, View, Worker, plan_mesh, plan_reads, plan_writes, tails, verify
from kvplan.verification import FakeMemory
from tests.edits import edited_specs
from tests.known_bugs.faults import asking, by_hand, moving, worker_of
from tests.known_bugs.known_bug import VERIFIED, Outcome, accepted, known_bug
from tests.known_bugs.mistakes import layers_of, with_views

REQUEST = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 5])}, (0, 8))


def rows(name: str, stride: int, **tensors: tuple[int, int]) -> Worker:
    """A worker with one region of 10 blocks of 4 tokens; its tensors are offsets, and bytes for each token."""
    views = [
        View(
            key, "attn", "pool", "uint8", (Axis("token", 0, 4, 4, size), Axis("byte", 0, size, size, 1)), 10, stride, at
        )
        for key, (at, size) in tensors.items()
    ]
    return worker_of(name, [Group("attn", 4)], views)


@known_bug("B7", "LMCache/LMCache#4247, LMCache/LMCache#4253", "verify: COVER")
def test_the_first_of_25_pages() -> tuple[Outcome, Outcome]:
    """Of blocks with 25 kernel blocks, in an unknown layout, only the first was stored and restored."""
    model = layers_of("qwen3-next-80b", 3)
    (gpu,), (store,) = (
        model.engine(name, tokens_per_block=tokens, kernel_tokens=kernel, num_blocks=10)
        for name, tokens, kernel in (("gpu", 400, 16), ("store", 400, None))
    )
    plan = plan_writes(gpu, [store])
    request = asking({"attn": Blocks([8])}, {"attn": Blocks([3])}, (0, 400))
    first = moving(plan, **{**request, "tokens": (0, 16)})
    return lambda: verify(first, **request), lambda: verify(plan, **request)


@known_bug("B8", "vllm-project/vllm#48412, vllm-project/vllm#49226", "refused: OVERLAP")
def test_scales_of_all_layers_in_one_place() -> tuple[Outcome, Outcome]:
    """Scales were placed as if each layer had its own memory; layers share it, and overwrote each other."""
    model = layers_of("qwen2.5-1.5b", 0, 2).quantized(8)
    (source,), (destination,) = (model.engine(name, layout="BLHNC", num_blocks=10) for name in ("gpu", "cpu"))
    first, *_ = (view for view in destination.views if view.name.endswith("scale"))
    alone = first.block_stride_bytes // 2

    def layer_by_layer() -> str:
        views = [
            attrs.evolve(view, offset_bytes=first.offset_bytes, block_stride_bytes=alone)
            if view.name.endswith("scale")
            else view
            for view in destination.views
        ]
        return str(with_views(destination, *views))

    request = {**REQUEST, "tokens": (0, 32)}
    return layer_by_layer, lambda: verify(plan_reads(destination, [source]), **request)


@known_bug("B11", "vllm-project/vllm#50208", "verify: DISJOINT, OWN")
def test_one_number_for_length_and_stride() -> tuple[Outcome, Outcome]:
    """The block stride was used as the length, so each tensor moved whole blocks."""
    source, destination = (rows(name, 128, a=(0, 12), b=(48, 12)) for name in ("gpu", "store"))
    plan = plan_reads(destination, [source])
    (spec,) = plan.bind(**REQUEST)
    pairs = [
        ((destination.regions[0].address + ours * 128, 128, 0), (source.regions[0].address + theirs * 128, 128, 0))
        for _ in destination.views
        for ours, theirs in ((8, 3), (1, 5))
    ]
    whole = by_hand(spec, *zip(*pairs, strict=True))
    return lambda: verify(edited_specs(plan, whole), **REQUEST), lambda: verify(plan, **REQUEST)


@known_bug("B12", "vllm-project/vllm#50276, 1CatAI/1Cat-vLLM#280", "refused: BOUNDS")
def test_zeros_by_the_stride() -> tuple[Outcome, Outcome]:
    """New blocks were zeroed for a whole stride from each layer's start, into neighbours and past the end."""
    page, step, stride = 37_376, 37_440, 149_760
    worker = rows("decode", stride, **{f"layers.{i}": (i * step, page // 4) for i in range(4)})
    (region,) = worker.regions
    exact = np.concatenate(list(tails(worker, {"attn": Blocks([9])}, (0, 0)).values()))
    expected = np.ones(region.size_bytes, bool)
    for view in worker.views:
        expected[9 * stride + view.offset_bytes :][:page] = False

    def zeroed(ranges: Iterable[tuple[int, int]]) -> str:
        with FakeMemory([worker]) as memory:
            memory.write(worker, region.address, np.full(region.size_bytes, 7))
            for address, length in ranges:
                memory.write(worker, address, np.zeros(length, np.uint8))
            left = memory.read(worker, region.address, region.size_bytes) != 0
        return VERIFIED if np.array_equal(left, expected) else "other bytes are zero"

    by_stride = [(region.address + view.offset_bytes + 9 * stride, stride) for view in worker.views]
    return lambda: zeroed(by_stride), lambda: zeroed([(address, length) for address, length, _ in exact.tolist()])


@known_bug("B13", "vllm-project/vllm#57661, vllm-project/vllm#57662", "verify: COVER, OWN")
def test_tensors_of_one_address() -> tuple[Outcome, Outcome]:
    """Two tensors at one address were registered with the size of the first: 13,760 bytes of each block were lost."""
    window, state = 19_008, 32_768

    def shared(name: str, state: int) -> Worker:
        swa = (Axis("token", 0, 32, 32, 594), Axis("byte", 0, 594, 594, 1))
        views = [
            View("swa", "swa", "pool", "uint8", swa, 10, window),
            View("compressor", "state", "pool", "uint8", (Axis("byte", 0, state, state, 1),), 10, state),
        ]
        return worker_of(name, [Group("swa", 32), Group("state")], views)

    right, wrong = (plan_reads(shared("decode", n), [shared("prefill", n)]) for n in (state, window))
    assert state - window == 13_760
    local, remote = ({"swa": Blocks([swa]), "state": Blocks([block])} for swa, block in ((0, 5), (2, 6)))
    request = asking(local, remote)
    return lambda: verify(moving(right, wrong, **request), **request), lambda: verify(right, **request)


@known_bug("B15", "vllm-project/vllm#40826", "verify: COVER")
def test_lengths_of_other_regions() -> tuple[Outcome, Outcome]:
    """One side had two regions per layer, and the length of V was looked up by layer in a list of regions."""
    kinds = {"layers.0": 8, "layers.1": 16}  # bytes of K for each token, and as many of V

    def view(name: str, region: str, part: tuple[int, int], offset: int = 0, block: int = 1) -> View:
        size = kinds[name]
        dims = (Axis("kv", *part, 2, 4 * size), Axis("token", 0, 4, 4, size), Axis("dim", 0, size, size, 1))
        return View(name, "attn", region, "uint8", dims, 10, block * 4 * size, offset)

    joint = worker_of("prefill", [Group("attn", 4)], [view(name, name, (0, 2), block=2) for name in kinds])
    halves = [(name, half) for name in kinds for half in (0, 1)]
    views = [view(name, f"{name}.{half}", (half, half + 1)) for name, half in halves]
    split = worker_of("decode", [Group("attn", 4)], views)
    plan = plan_reads(split, [joint])
    (spec,) = plan.bind(**REQUEST)
    local, remote = (np.array(side) for side in spec.descriptors())
    by_region = [4 * kinds[name] for name, _ in halves]
    for layer in (0, 1):
        v = split.regions[2 * layer + 1]
        mine = (local[:, 0] >= v.address) & (local[:, 0] < v.address + v.size_bytes)
        local[mine, 1] = remote[mine, 1] = by_region[layer]
    return lambda: verify(edited_specs(plan, by_hand(spec, local, remote)), **REQUEST), lambda: verify(plan, **REQUEST)


@known_bug("B17", "sgl-project/sglang#35718", "verify: COVER")
def test_geometry_by_the_length_of_a_list() -> tuple[Outcome, Outcome]:
    """V was taken to begin at half of the list of buffers; appended scales moved that, and V was lost."""
    sizes = {"k.0": 24, "k.1": 24, "v.0": 24, "v.1": 24, "scales.0": 4, "scales.1": 4}  # bytes for each token
    slots = {key: (i * 96, size) for i, (key, size) in enumerate(sizes.items())}
    source, destination = (rows(name, 6 * 96, **slots) for name in ("prefill", "decode"))
    names, half = list(sizes), len(sizes) // 2
    found = {names[begin + layer] for begin in (0, half) for layer in (0, 1)}
    right = plan_reads(destination, [source])
    wrong = plan_reads(destination, [source], not_transferred=[name for name in names if name not in found])
    return lambda: verify(moving(right, wrong, **REQUEST), **REQUEST), lambda: verify(right, **REQUEST)


@accepted("B18", "NVIDIA/TensorRT-LLM#16505, NVIDIA/TensorRT-LLM#16812")
def test_attention_and_states_of_two_types() -> Outcome:
    """An FP8 attention cache with half-precision states was sent in the dtype of its first pool, and never arrived."""
    model = layers_of("qwen3-next-80b", 2, 2).with_dtypes("float8_e4m3fn", "float16")
    sources, destinations = (model.engine(name, tp, num_blocks=10) for name, tp in (("ctx", 2), ("gen", 4)))
    assert {view.dtype for view in destinations[0].views} == {"float8_e4m3fn", "bfloat16", "float16"}
    local, remote = ({"attn": Blocks([block]), "state": Blocks([block])} for block in (8, 3))
    request = asking(local, remote, {"attn": (0, 10)})
    return lambda: verify(plan_mesh(destinations, sources), **request)


@known_bug("B19", "NVIDIA/TensorRT-LLM#16237", "verify: VALUE")
def test_pools_by_the_size_of_buffers() -> tuple[Outcome, Outcome]:
    """Pools of equal buffers were paired by slot number, although one side also had index keys in them."""
    apart = ["k.0", "v.0", "k.1", "v.1", "index.0", "index.1"]
    among = ["k.0", "v.0", "index.0", "k.1", "v.1", "index.1"]

    def slots(name: str, order: Sequence[str]) -> Worker:
        return rows(name, 6 * 32, **{key: (slot * 32, 8) for slot, key in enumerate(order)})

    source, destination = slots("prefill", apart), slots("decode", among)
    plan, by_slot = plan_reads(destination, [source]), plan_reads(slots("decode", apart), [source])
    return lambda: verify(moving(plan, by_slot, **REQUEST), **REQUEST), lambda: verify(plan, **REQUEST)
