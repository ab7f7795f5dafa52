"""Blocks: each engine, group and worker has its own block sizes and pools, and kernels may have others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

from kvplan import Blocks, Group, Model, Region, Worker, plan_mesh, plan_reads, plan_writes, tails, verify, view_of
from kvplan.verification import FakeMemory, Report
from tests.known_bugs.faults import asking, grouped, moving
from tests.known_bugs.known_bug import VERIFIED, Outcome, accepted, known_bug
from tests.small import engine


def paged(name: str, tokens: int, blocks: int) -> Worker:
    """A worker whose pages are one token after another, so that kernel blocks are blocks of fewer tokens."""
    (worker,) = engine(name, heads=1, tokens=tokens, order="NH", layers=1, blocks=blocks)
    return worker


def expanded(ids: Iterable[int], step: int, count: int) -> list[int]:
    """Ids of kernel blocks: ``count`` of each block, where a block has ``step``."""
    return [step * block + kernel for block in ids for kernel in range(count)]


@known_bug("C1", "vllm-project/vllm#28661, vllm-project/vllm#28677", "verify: COVER, OWN")
def test_ids_of_blocks_for_kernel_blocks() -> tuple[Outcome, Outcome]:
    """Ids of blocks of 128 tokens were used as ids of kernel blocks of 64."""
    return _ids_of_blocks_for_kernel_blocks(128, 64)


@known_bug("C3", "vllm-project/vllm#46334", "verify: COVER, OWN")
def test_ids_of_blocks_for_tokens() -> tuple[Outcome, Outcome]:
    """Ids of blocks of 16 tokens indexed tensors that were registered per token, and read the null block 0."""
    return _ids_of_blocks_for_kernel_blocks(16, 1)


def _ids_of_blocks_for_kernel_blocks(block: int, kernel: int) -> tuple[Outcome, Outcome]:
    local, remote = {"attn": Blocks([8, 1, 5])}, {"attn": Blocks([3, 9, 4])}
    plan, as_kernels = (
        plan_reads(paged("decode", tokens, blocks), [paged("prefill", tokens, blocks)])
        for tokens, blocks in ((block, 10), (kernel, 10 * block // kernel))
    )
    request = asking(local, remote, (0, 3 * block))
    wrong = moving(plan, as_kernels, **asking(local, remote, (0, 3 * kernel)))
    return lambda: verify(wrong, **request), lambda: verify(plan, **request)


@known_bug("C12", "vLLM 0.33.0, mooncake_connector.py", "verify: VALUE, COVER")
def test_unequal_blocks_of_a_replicated_cache() -> tuple[Outcome, Outcome]:
    """Block lengths were not compared where ranks hold whole latents, so unequal blocks were paired from the tail."""
    (prefill,), (decode,) = (
        engine(name, heads=1, tokens=tokens, order="NH", layers=1, blocks=20)
        for name, tokens in (("prefill", 2), ("decode", 4))
    )
    # decode's blocks, each with the tokens of one of prefill's
    axes = [attrs.evolve(a, stop=2, size=2) if a.name == "token" else a for a in decode.views[0].axes]
    half = attrs.evolve(decode, groups=[Group("attn", 2)], views=[attrs.evolve(decode.views[0], axes=axes)])
    plan, as_equal = (plan_reads(local, [prefill]) for local in (decode, half))
    local, remote = [8, 1, 5], [3, 9, 4, 0, 7, 2]
    wrong = moving(plan, as_equal, **asking({"attn": Blocks(local)}, {"attn": Blocks(remote[-3:])}, (0, 6)))
    request = asking({"attn": Blocks(local)}, {"attn": Blocks(remote)}, (0, 12))
    return lambda: verify(wrong, **request), lambda: verify(plan, **request)


@accepted("C2", "vllm-project/vllm#28925, vllm-project/vllm#28890")
def test_blocks_that_both_kernels_split() -> Outcome:
    """Blocks of 128 tokens with 2 kernel blocks on both sides were taken for unequal, and the handshake failed."""
    keys = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    sources, destinations = (
        Model.from_config(keys).engine(name, tp=2, tokens_per_block=128, kernel_tokens=64, num_blocks=10)
        for name in ("prefill", "decode")
    )
    request = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 9])}, (0, 200))
    return lambda: verify(plan_mesh(destinations, sources), **request)


@known_bug("C4", "vllm-project/vllm#42097", "verify: VALUE")
def test_blocks_of_the_other_side() -> tuple[Outcome, Outcome]:
    """A source's blocks were taken to have 3 kernel blocks, as the destination's do, instead of 2."""
    ours, theirs = [8, 1], [3, 7, 4]
    plan = plan_reads(paged("decode", 12, 10), [paged("prefill", 8, 10)])
    as_kernels = plan_reads(paged("decode", 4, 30), [paged("prefill", 4, 20)])
    request = asking({"attn": Blocks(ours)}, {"attn": Blocks(theirs)}, (0, 24))
    kernels = expanded(ours, 3, 3)
    paired = Blocks(expanded(theirs, 2, 3)[-len(kernels) :])
    wrong = moving(plan, as_kernels, **asking({"attn": Blocks(kernels)}, {"attn": paired}, (0, 24)))
    return lambda: verify(wrong, **request), lambda: verify(plan, **request)


@known_bug("C5", "tests of vLLM 0.33.0, test_nixl_desc_geometry.py", "verify: COVER, OWN")
def test_blocks_of_another_request() -> tuple[Outcome, Outcome]:
    """A destination's blocks of 2 kernel blocks were addressed as if they had the source's 3, in neighbours."""
    ours, theirs = [4, 7, 2], [3, 9]
    plan = plan_reads(paged("decode", 8, 30), [paged("prefill", 12, 10)])
    as_kernels = plan_reads(paged("decode", 4, 60), [paged("prefill", 4, 30)])
    request = asking({"attn": Blocks(ours)}, {"attn": Blocks(theirs)}, (0, 24))
    local, remote = expanded(ours, 3, 2), expanded(theirs, 3, 3)
    wrong = moving(plan, as_kernels, **asking({"attn": Blocks(local)}, {"attn": Blocks(remote)}, (0, 24)))
    return lambda: verify(wrong, **request), lambda: verify(plan, **request)


@known_bug("C6", "tests of vLLM 0.33.0, test_nixl_desc_geometry.py", "tails")
def test_what_an_earlier_request_left() -> tuple[Outcome, Outcome]:
    """The unfilled end of a block kept an earlier request's bytes, and answers became garbage."""
    (source,), (destination,) = engine("prefill", tokens=4), engine("decode", tokens=8)
    plan = plan_reads(destination, [source])
    request = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 9, 4])}, (0, 9))

    def left(stop: int) -> list[list[int]]:
        """All that the request's blocks hold from position ``stop`` on: address, length, device."""
        ranges: list[list[int]] = np.concatenate([*tails(destination, request["local"], (0, stop)).values()]).tolist()
        return ranges

    def received(zeroed: list[list[int]]) -> str:
        with FakeMemory([source, destination]) as memory:
            for address, length, device in left(0):
                memory.write(destination, address, b"\xaa" * length, device)
            for spec in plan.bind(**request):
                memory.execute(spec)
            for address, length, device in zeroed:
                memory.write(destination, address, bytes(length), device)
            kept = any((memory.read(destination, *span) == 0xAA).any() for span in left(0))
        return "tails" if kept else VERIFIED

    return lambda: received([]), lambda: received(left(9))


@accepted("C7", "vllm-project/vllm#50714, vllm-project/vllm#50717")
def test_blocks_of_4_and_of_256_tokens() -> Outcome:
    """The smallest block size of all groups, 4, was used for a group of 256, and no kernel supports it."""
    source, destination = (grouped(name, compressor=4, attn=256) for name in ("prefill", "decode"))
    request = asking(
        local={"compressor": Blocks([8, 1], first=73), "attn": Blocks([5, 2])},
        remote={"compressor": Blocks([3, 9], first=73), "attn": Blocks([4, 7])},
        tokens={"compressor": (292, 300), "attn": (0, 300)},
    )
    return lambda: verify(plan_reads(destination, [source]), **request)


@accepted("C8", "vllm-project/vllm#53721")
def test_pages_of_16_and_of_32_tokens() -> Outcome:
    """Gemma 4, with blocks of 16 and of 32 tokens, was refused by a connector with one block size for all layers."""
    model = Model.shipped("gemma-4-31b")
    two_layers = attrs.evolve(model, layers=model.layers[4:6])
    assert two_layers.blocks() == {"swa": 16, "attn": 32}
    sources, destinations = (two_layers.engine(name, num_blocks=10) for name in ("prefill", "decode"))
    local, remote = ({"swa": Blocks(ids), "attn": Blocks(ids[:2])} for ids in ([8, 1, 5], [3, 9, 4]))
    return lambda: verify(plan_mesh(destinations, sources), **asking(local, remote, (0, 40)))


@accepted("C9", "vllm-project/vllm#42945")
def test_a_window_that_begins_inside_a_stored_block() -> Outcome:
    """Blocks of a store were 16 GPU blocks; those that had left a window were counted but not listed."""
    gpu, cpu = grouped("gpu", window=4), grouped("cpu", window=64)
    plan = plan_writes(gpu, [cpu])

    def stored(left: int) -> Report:
        ids = [0] * left + [*range(50 + left, 82)]
        return verify(plan, **asking({"window": Blocks(ids, null=0)}, {"window": Blocks([4, 7])}, (4 * left, 128)))

    return lambda: tuple(stored(left) for left in range(16))


@accepted("C10", "vllm-project/vllm#19338, vllm-project/vllm#19341, vllm-project/vllm#19532")
def test_a_rank_with_more_blocks() -> Outcome:
    """Rank 0 of 8 had 111680 blocks, the others 111488, and the handshake asserts one number."""

    def ranks(blocks: int) -> tuple[Worker, ...]:
        return engine("prefill", 8, heads=8, layers=1, blocks=blocks)

    sources = [ranks(111680)[0], *ranks(111488)[1:]]
    request = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 111487])}, (0, 8))
    return lambda: verify(plan_mesh(engine("decode", 2, heads=8, layers=1), sources), **request)


@accepted("C11", "ovg-project/kvcached#311, ovg-project/kvcached#312")
def test_room_for_more_blocks() -> Outcome:
    """A tensor with room to grow failed an assertion that it has exactly the planned number of blocks."""
    caches = [np.zeros((blocks, 4, 2, 8), np.float16) for blocks in (185344, 1000)]
    regions = [Region(f"{i}", cache.__array_interface__["data"][0], cache.nbytes) for i, cache in enumerate(caches)]
    axes: dict[str, Any] = {"pattern": "block token head dim", "group": "attn"}
    views = [
        view_of(cache, name=f"layers.{region.name}", region=region, **axes)
        for cache, region in zip(caches, regions, strict=True)
    ]
    elastic = Worker("prefill", 0, regions, [Group("attn", 4)], views)
    fixed = attrs.evolve(elastic, engine_id="decode", views=[attrs.evolve(view, num_blocks=1000) for view in views])
    request = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 999])}, (0, 8))
    return lambda: verify(plan_reads(fixed, [elastic]), **request)
