"""Small engines for tests: one tensor for each layer, K and V side by side, with numbers to check by hand."""

from __future__ import annotations

import attrs

from kvplan import Axis, Context, Group, Region, View, Worker

DIM = 4  # elements of one head of K or of V; bfloat16, so one head of one token is 16 bytes
HEAD_BYTES = 2 * 2 * DIM


def axes(heads: tuple[int, int, int], tokens: int, order: str = "HN") -> tuple[Axis, ...]:
    """The kv, head, token and dim axes of a dense page. ``order`` is HN (heads outside tokens) or NH."""
    held = heads[1] - heads[0]
    head, token = (tokens * HEAD_BYTES, HEAD_BYTES) if order == "HN" else (HEAD_BYTES, held * HEAD_BYTES)
    return (
        Axis("kv", 0, 2, 2, 2 * DIM),
        Axis("head", *heads, head),
        Axis("token", 0, tokens, tokens, token),
        Axis("dim", 0, DIM, DIM, 2),
    )


def engine(
    name: str = "prefill",
    tp: int = 1,
    heads: int = 4,
    tokens: int = 4,
    order: str = "HN",
    layers: int = 2,
    blocks: int = 10,
    contexts: tuple[int, int] = (1, 1),
) -> tuple[Worker, ...]:
    """One worker for each tensor-parallel and context rank. ``contexts`` is (size, interleave_tokens)."""
    return tuple(
        worker(
            name, rank * contexts[0] + turn, rank, tp, heads, tokens, order, layers, blocks, Context(turn, *contexts)
        )
        for rank in range(tp)
        for turn in range(contexts[0])
    )


def worker(
    name: str,
    rank: int,
    shard: int,
    tp: int,
    heads: int,
    tokens: int,
    order: str,
    layers: int,
    blocks: int,
    context: Context,
) -> Worker:
    """One worker of :func:`engine`, with a region and a view for each layer."""
    start, stop = shard * heads // tp, -(-(shard + 1) * heads // tp)
    page = (stop - start) * tokens * HEAD_BYTES
    return Worker(
        name,
        rank,
        [Region(f"kv.{i}", (rank + 1 << 40) + (i << 30), page * blocks) for i in range(layers)],
        [Group("attn", tokens, context)],
        [
            View(f"layers.{i}", "attn", f"kv.{i}", "bfloat16", axes((start, stop, heads), tokens, order), blocks, page)
            for i in range(layers)
        ],
    )


def padded(source: Worker) -> Worker:
    """A worker with padding in each block of each layer, where the second layer has scales."""
    page = source.views[0].block_stride_bytes
    views = [attrs.evolve(view, block_stride_bytes=2 * page) for view in source.views]
    axes = [Axis("token", 0, 4, 4, 2), Axis("dim", 0, 2, 2, 1)]
    views.append(View("scales", "attn", source.views[1].region, "uint8", axes, 10, 2 * page, page))
    regions = [attrs.evolve(region, size_bytes=2 * region.size_bytes) for region in source.regions]
    return attrs.evolve(source, regions=regions, views=views)
