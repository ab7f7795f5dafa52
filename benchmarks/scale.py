"""Scale: how the times of planning and binding grow, and the times of many peers and of whole meshes.

    python -m benchmarks.scale

An exponent is the slope of a line through medians on logarithmic axes: 1 is proportional growth, 0 is no growth. The
model is Llama 3.1 70B's attention with more or fewer layers. Every round of planning decodes its workers from offers,
so that they have no cached results. The mesh is of a hybrid model with 128 layers, from TP 64 and PP 8 to TP 128 and
PP 4 in another layout.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

import kvplan
from kvplan import Blocks, Model, Worker, Workspace, plan_mesh, plan_reads

LAYERS = (10, 20, 40, 80, 160)
POOLS = (1 << 8, 1 << 12, 1 << 16, 1 << 20)
REQUESTS = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
DESCRIPTORS = 1_000_000
PEERS = 200
BLOCK_SIZES = ((16, 64), (48, 32), (528, 400), (1023, 1024), (16, 4095))
"""Of the source and of the destination."""


def attention(layers: int) -> Model:
    """The model with this many layers."""
    model = Model.shipped("llama-3.1-70b")
    return attrs.evolve(model, layers=(model.layers * 2)[:layers])


def median(run: Callable[..., object], setup: Callable[[], Sequence[Any]] = tuple, rounds: int = 15) -> float:
    """The median seconds of ``run`` with the arguments that ``setup`` makes for each round."""
    taken = []
    for _ in range(rounds):
        given = setup()
        start = time.perf_counter()
        run(*given)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of the logarithm of seconds over that of sizes."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def received(*workers: Worker) -> Callable[[], list[Worker]]:
    """Makes the workers anew, decoded from messages."""
    offers = [kvplan.encode(worker) for worker in workers]
    return lambda: [kvplan.decode(offer) for offer in offers]


def cold(model: Model, num_blocks: int = 4096, layout: str = "LBHNC") -> float:
    """Planning one of 4 destinations with 8 sources."""
    sources = model.engine("prefill", tp=8, layout=layout, num_blocks=num_blocks)
    local = model.engine("decode", tp=4, layout=layout, num_blocks=num_blocks)[1]
    return median(lambda mine, *others: plan_reads(mine, others), received(local, *sources))


def bound(blocks: int) -> tuple[Callable[[], Any], int]:
    """Binding a request of scattered blocks, one run for each block and layer, and its number of ids on each side."""
    model = attention(80)
    (source, *_), (local, *_) = (model.engine(name, tp=8, num_blocks=1 << 17) for name in ("prefill", "decode"))
    plan, workspace, random = plan_reads(local, [source]), Workspace(), np.random.default_rng(1)
    ours, theirs = ({"attn": Blocks(random.permutation(1 << 17)[:blocks])} for _ in "ab")
    return lambda: plan.bind(local=ours, remote=theirs, tokens=(0, 16 * blocks), workspace=workspace), 80 * blocks


def unequal(source: int, destination: int) -> tuple[float, float, int]:
    """Seconds of planning and of binding a request of 8000 tokens between unequal block sizes, and its ids."""
    model, tokens, random = attention(80), 8000, np.random.default_rng(1)
    sizes = {"prefill": source, "decode": destination}
    theirs, ours = (model.engine(name, tp=8, tokens_per_block=n, num_blocks=600)[0] for name, n in sizes.items())
    planning = median(lambda local, *remotes: plan_reads(local, remotes), received(ours, theirs), rounds=5)
    plan, workspace = plan_reads(ours, [theirs]), Workspace()
    far, near = ({"attn": Blocks(random.permutation(600)[: -(-tokens // n)])} for n in sizes.values())
    (spec,) = plan.bind(local=near, remote=far, tokens=(0, tokens))
    binding = median(lambda: plan.bind(local=near, remote=far, tokens=(0, tokens), workspace=workspace), rounds=31)
    return planning, binding, spec.local_ids.size


def descriptors() -> float:
    """All descriptors of a request of scattered blocks."""
    bind, _ = bound(DESCRIPTORS // 80)
    return median(lambda spec: spec.descriptors(), bind)


def peers() -> float:
    """One more peer with a planned geometry: a worker that was just decoded."""
    model = attention(80)
    local, first = model.engine("decode", tp=8, num_blocks=4096)[1], model.engine("first", tp=8, num_blocks=4096)[1]
    plan = plan_reads(local, [first])
    offers = iter([model.engine(f"peer-{i}", tp=8, num_blocks=4096)[1] for i in range(PEERS)])
    return median(lambda peer: plan.with_remotes([peer]), lambda: received(next(offers))(), PEERS)


def mesh() -> tuple[float, float]:
    """The seconds and MB of the plans of 512 destinations and 512 sources."""
    model = Model.shipped("nemotron-h-8b")
    model = attrs.evolve(model, layers=(model.layers * 3)[:128])
    sources = model.engine("prefill", tp=64, pp=8, num_blocks=64)
    destinations = model.engine("decode", tp=128, pp=4, num_blocks=64, layout="BLHNC")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    made = plan_mesh(destinations, sources)
    taken = time.perf_counter() - start
    assert len(made.plans) == len(sources) == 512
    return taken, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Print the figures, the mesh first, because its memory is the growth of the process."""
    seconds, megabytes = mesh()
    print(f"plan_mesh, 512 x 512 workers of 128 layers: {seconds:.2f} s, {megabytes:.0f} MB")
    for layout in ("LBHNC", "LBNHC"):
        print(f"plan, 80 layers, TP 8 -> 4, {layout}: {cold(attention(80), layout=layout) * 1e3:.2f} ms")
    by_layers = [cold(attention(layers)) for layers in LAYERS]
    print(f"plan, by layers {LAYERS}: exponent {exponent(LAYERS, by_layers):.2f}")
    by_pool = [cold(attention(80), blocks) for blocks in POOLS]
    print(f"plan, by blocks of the pools {POOLS}: exponent {exponent(POOLS, by_pool):.2f}")
    bindings = [bound(blocks) for blocks in REQUESTS]
    by_ids = [median(bind, rounds=31) for bind, _ in bindings]
    print(f"bind, by ids {tuple(ids for _, ids in bindings)}: exponent {exponent(REQUESTS, by_ids):.2f}")
    for source, destination in BLOCK_SIZES:
        planning, binding, ids = unequal(source, destination)
        figures = f"plan {planning * 1e3:.1f} ms, bind {binding * 1e6:.0f} us for {ids:,} ids"
        print(f"blocks of {source} to {destination} tokens, 80 layers: {figures}")
    print(f"descriptors(), {DESCRIPTORS:,} of scattered blocks: {descriptors() * 1e3:.0f} ms")
    print(f"with_remotes, a peer of 80 layers: {peers() * 1e6:.0f} us")


if __name__ == "__main__":
    main()
