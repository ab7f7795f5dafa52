"""Costs: right bytes in more descriptors than needed, in the same layouts or in better ones.

The fault is a number alone. The copies are verified, and their descriptors are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan import Blocks, MeshPlan, Model, TransferPlan, plan_mesh, plan_reads, verify
from kvplan.cli.trials import DESTINATION_SPREAD, SOURCE_SPREAD, scattered
from tests.known_bugs.faults import asking, cost
from tests.known_bugs.known_bug import VERIFIED, Outcome, check, known_bug, seen
from tests.known_bugs.mistakes import in_pieces, layers_of
from tests.small import HEAD_BYTES, engine

Options = Mapping[str, Any]
"""Arguments of ``Model.engine``."""

AS_IT_IS: Final[Options] = MappingProxyType({})


def apart(blocks: int, pool: int) -> dict[str, Any]:
    """A request of so many whole blocks of a pool, none beside another on either side."""
    local, remote = (Blocks(scattered(blocks, pool, spread)) for spread in (DESTINATION_SPREAD, SOURCE_SPREAD))
    return asking({"attn": local}, {"attn": remote})


def counted(plan: TransferPlan | MeshPlan, request: Mapping[str, Any], **numbers: int) -> Outcome:
    """The :func:`cost` of what moves the right bytes."""

    def outcome() -> str:
        report = verify(plan, **request)
        result = seen(lambda: report)
        return cost(report.num_descriptors, **numbers) if result == VERIFIED else result

    return outcome


def compared(
    model: Model,
    blocks: int,
    *layouts: Options,
    src: Options = AS_IT_IS,
    dst: Options = AS_IT_IS,
    **numbers: int,
) -> tuple[Outcome, Outcome]:
    """So many blocks, moved between engines in a bad layout and in a good one; ``src`` and ``dst`` go before either."""

    def read(layout: Options) -> Outcome:
        sources, destinations = (
            model.engine(name, **{"num_blocks": 10, **layout, **side})
            for name, side in (("prefill", src), ("decode", dst))
        )
        return counted(plan_mesh(destinations, sources), apart(blocks, 10), **numbers)

    bad, good = layouts
    return read(bad), read(good)


@known_bug("J1", "vllm-project/vllm#48209, vllm-project/vllm#55157, ai-dynamo/nixl#1978", "cost")
def test_a_tuple_for_each_block_of_the_pool() -> tuple[Outcome, Outcome]:
    """The handshake made a tuple for each block of each tensor: 6.5 million for a 32B model, in seconds."""
    blocks = 50_782
    (source,), (destination,) = (Model.shipped("qwen3-32b").engine(n, kv="split", num_blocks=blocks) for n in "pd")
    plan = plan_reads(destination, [source])
    tensors = len(destination.views)  # K and V of 64 layers: rows for whole blocks of each, and for slots of one
    numbers = {"too_many": tensors * blocks, "enough": 2 * tensors}

    def rows() -> str:
        check(lambda: verify(plan, **apart(1, blocks)), VERIFIED)
        return cost(len(plan.pairs[0].local_table.rows), **numbers)

    return lambda: cost(sum(view.num_blocks for view in destination.views), **numbers), rows


@known_bug("J2", "ai-dynamo/nixl#135, ai-dynamo/nixl#156, ai-dynamo/nixl#176", "cost")
def test_a_descriptor_for_each_token() -> tuple[Outcome, Outcome]:
    """A request in pages of one token was 15,000 descriptors and a message of 20 MB, with neighbours not joined."""
    (source,), (destination,) = (engine(name, tokens=1, layers=60, blocks=300) for name in ("prefill", "decode"))
    plan = plan_reads(destination, [source])
    request = asking({"attn": Blocks(range(20, 270))}, {"attn": Blocks(range(250))})
    numbers = {"too_many": 15_000, "enough": 60}
    pieces = in_pieces(plan, 4 * HEAD_BYTES, **request)
    return counted(pieces, request, **numbers), counted(plan, request, **numbers)


@known_bug("J3", "vllm-project/vllm#53237, vllm-project/vllm#53825, vllm-project/vllm#57952", "cost")
def test_a_descriptor_for_each_layer_of_a_page() -> tuple[Outcome, Outcome]:
    """43 layers of a block, contiguous in memory, had a descriptor each: 9 GB/s of 50."""
    model = layers_of("deepseek-v3", 0, 43)
    (source,), (destination,) = (model.engine(n, layout="BLHNC", tokens_per_block=4, num_blocks=24) for n in "pd")
    plan, request = plan_reads(destination, [source]), apart(8, 24)
    numbers = {"too_many": 8 * 43, "enough": 8}
    pieces = in_pieces(plan, 4 * 1152, **request)
    return counted(pieces, request, **numbers), counted(plan, request, **numbers)


@known_bug("J4", "vllm-project/vllm#55434, vllm-project/vllm#55431", "cost")
def test_tensors_of_uneven_width() -> tuple[Outcome, Outcome]:
    """Latents and index keys, 576 and 128 wide, could not be packed by block: 112,000 descriptors a request."""
    model = layers_of("deepseek-v3.2", 0).with_dtypes("bfloat16")
    (both,) = model.layers
    model = attrs.evolve(model, layers=(both,) * 23 + (both[:1],) * 55)  # 101 tensors
    return compared(model, 2, {"layout": "LBHNC"}, {"layout": "BLHNC"}, too_many=2 * 101, enough=2 * 2)


@known_bug("J5", "sgl-project/sglang#15674, sgl-project/sglang#19890, sgl-project/sglang#22536", "cost")
def test_tokens_outside_heads_gathered() -> tuple[Outcome, Outcome]:
    """NHD slices of heads for fewer ranks were a descriptor per token, 30,000 a request, and ranks failed."""
    model, heads_inside, heads_outside = layers_of("qwen3-32b", 0, 8), {"layout": "LBNHC"}, {"layout": "LBHNC"}
    of_layers = 2 * 8 * 2  # K and V of 8 layers, from each of 2 ranks
    numbers = {"too_many": 2 * 16 * of_layers, "enough": 2 * of_layers}
    return compared(model, 2, heads_inside, heads_outside, src={"tp": 2, "kv": "axis"}, dst={"kv": "axis"}, **numbers)


@known_bug("J6", "ai-dynamo/dynamo#12750", "cost")
def test_layers_apart_on_one_side() -> tuple[Outcome, Outcome]:
    """Blocks contiguous on disk were read in 96 ranges of 16 KB, because K and V of layers were apart."""
    model = layers_of("qwen3-235b-a22b", 0, 48)  # 4 heads of 128
    one_piece = {"layout": "BLHNC", "kv": "axis"}
    disk, gpu = {**one_piece, "memory": "FILE"}, {"memory": "VRAM"}
    return compared(model, 1, {"layout": "LBHNC", "kv": "split"}, one_piece, src=disk, dst=gpu, too_many=96, enough=1)


@known_bug("J7", "vllm-project/vllm#50913, vllm-project/vllm#51919", "cost")
def test_blocks_of_few_tokens() -> tuple[Outcome, Outcome]:
    """5000 tokens in blocks of 16 were tens of thousands of descriptors, four times as many as in blocks of 64."""

    def read(tokens: int) -> Outcome:
        blocks = -(-5000 // tokens)
        (source,), (destination,) = (engine(n, heads=1, tokens=tokens, layers=64, blocks=3 * blocks) for n in "pd")
        request = {**apart(blocks, 3 * blocks), "tokens": (0, 5000)}
        return counted(plan_reads(destination, [source]), request, too_many=20_032, enough=5_056)

    return read(16), read(64)


@known_bug("J8", "vllm-project/vllm#30207, vllm-project/vllm#33339", "cost")
def test_layers_apart() -> tuple[Outcome, Outcome]:
    """Each block of a model with 28 layers was 56 descriptors instead of one."""
    separate, together = {"layout": "LBHNC", "kv": "split"}, {"layout": "BLHNC"}
    return compared(Model.shipped("qwen3-0.6b"), 1, separate, together, too_many=56, enough=1)


@known_bug("J9", "vllm-project/vllm#18833", "cost")
def test_tokens_outside_heads() -> tuple[Outcome, Outcome]:
    """With NHD, a rank's heads were a descriptor per token of a block instead of one per block."""
    model, heads_inside, heads_outside = layers_of("llama-3.1-8b", 0), {"layout": "LBNHC"}, {"layout": "LBHNC"}
    return compared(model, 1, heads_inside, heads_outside, dst={"tp": 2}, too_many=16 * 2, enough=2)
