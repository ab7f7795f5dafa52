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
from kvplan import Blocks, Model, Worker, Workspace, certify, plan_mesh, plan_reads

LAYERS = (10, 20, 40, 80, 160)
POOLS = (1 << 8, 1 << 12, 1 << 16, 1 << 20)
REQUESTS = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
DESCRIPTORS = 1_000_000
PEERS = 200
NEIGHBOURS = (16, 32, 64, 128, 255, 1023)
BLOCK_SIZES = ((16, 64), (48, 32), (528, 400), (1023, 1024), (16, 4095))
"""Of the source and of the destination."""


@attrs.frozen
class Binding:
    """A function that binds a request, and the number of ids that it makes for each side."""

    run: Callable[[], Any]
    num_ids: int


def attention(layers: int) -> Model:
    """Return the model with this many layers."""
    model = Model.shipped("llama-3.1-70b")
    return attrs.evolve(model, layers=(model.layers * 2)[:layers])


def median(run: Callable[..., object], setup: Callable[[], Sequence[Any]] = tuple, rounds: int = 15) -> float:
    """Return the median seconds of ``run`` with the arguments that ``setup`` makes for each round."""
    seconds = list[float]()
    for _ in range(rounds):
        arguments = setup()
        start = time.perf_counter()
        run(*arguments)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of the logarithm of seconds over that of sizes."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def received(*workers: Worker) -> Callable[[], list[Worker]]:
    """Return a function that makes the workers anew, decoded from messages."""
    offers = [kvplan.encode(worker) for worker in workers]
    return lambda: [kvplan.decode(offer) for offer in offers]


def described(layout: str) -> float:
    """Time the construction of nine workers, with all checks, which every handshake needs before it plans."""
    sources = attention(80).engine("prefill", tp=8, layout=layout, num_blocks=4096)
    local = attention(80).engine("decode", tp=4, layout=layout, num_blocks=4096)[1]
    fields = [(w.engine_id, w.rank, w.regions, w.groups, w.views) for w in (local, *sources)]
    return median(lambda: [Worker(*each) for each in fields])


def cold(model: Model, num_blocks: int = 4096, layout: str = "LBHNC") -> float:
    """Time planning of one of 4 destinations with 8 sources."""
    sources = model.engine("prefill", tp=8, layout=layout, num_blocks=num_blocks)
    local = model.engine("decode", tp=4, layout=layout, num_blocks=num_blocks)[1]
    return median(lambda destination, *remotes: plan_reads(destination, remotes), received(local, *sources))


def binding(blocks: int) -> Binding:
    """Bind a request of scattered blocks, of one run for each block and layer."""
    model = attention(80)
    num_blocks = 1 << 17
    source = model.engine("prefill", tp=8, num_blocks=num_blocks)[0]
    local = model.engine("decode", tp=8, num_blocks=num_blocks)[0]
    plan = plan_reads(local, [source])
    workspace = Workspace()
    random = np.random.default_rng(1)
    local_blocks = {"attn": Blocks(random.permutation(num_blocks)[:blocks])}
    remote_blocks = {"attn": Blocks(random.permutation(num_blocks)[:blocks])}

    def bind() -> Any:
        return plan.bind(local=local_blocks, remote=remote_blocks, tokens=(0, 16 * blocks), workspace=workspace)

    return Binding(bind, 80 * blocks)


def print_unequal(source_tokens: int, destination_tokens: int) -> None:
    """Time a request of 8000 tokens between unequal block sizes."""
    model = attention(80)
    tokens = 8000
    random = np.random.default_rng(1)
    source = model.engine("prefill", tp=8, tokens_per_block=source_tokens, num_blocks=600)[0]
    local = model.engine("decode", tp=8, tokens_per_block=destination_tokens, num_blocks=600)[0]
    plan_s = median(lambda worker, *remotes: plan_reads(worker, remotes), received(local, source), rounds=5)
    plan = plan_reads(local, [source])
    workspace = Workspace()
    remote_blocks = {"attn": Blocks(random.permutation(600)[: -(-tokens // source_tokens)])}
    local_blocks = {"attn": Blocks(random.permutation(600)[: -(-tokens // destination_tokens)])}
    (spec,) = plan.bind(local=local_blocks, remote=remote_blocks, tokens=(0, tokens))

    def bind() -> Any:
        return plan.bind(local=local_blocks, remote=remote_blocks, tokens=(0, tokens), workspace=workspace)

    bind_s = median(bind, rounds=31)
    figures = f"plan {plan_s * 1e3:.1f} ms, bind {bind_s * 1e6:.0f} us for {spec.local_ids.size:,} ids"
    print(f"blocks of {source_tokens} to {destination_tokens} tokens, 80 layers: {figures}")


def certified(tokens: int) -> float:
    """Time the proof of a plan between blocks that have no common divisor: one is a token larger."""
    model = Model.shipped("qwen2.5-1.5b")
    (local,) = model.engine("decode", tokens_per_block=tokens, num_blocks=9)
    plan = plan_reads(local, model.engine("prefill", tokens_per_block=tokens + 1, num_blocks=9))
    return median(lambda: certify(plan), rounds=5)


def descriptors() -> float:
    """Time all descriptors of a request of scattered blocks."""
    return median(lambda spec: spec.descriptors(), binding(DESCRIPTORS // 80).run)


def peers() -> float:
    """Time one more peer with a planned geometry: a worker that was just decoded."""
    model = attention(80)
    local = model.engine("decode", tp=8, num_blocks=4096)[1]
    first = model.engine("first", tp=8, num_blocks=4096)[1]
    plan = plan_reads(local, [first])
    workers = iter([model.engine(f"peer-{i}", tp=8, num_blocks=4096)[1] for i in range(PEERS)])
    return median(lambda peer: plan.with_remotes([peer]), lambda: received(next(workers))(), PEERS)


def print_mesh() -> None:
    """Plan 512 destinations with 512 sources."""
    model = Model.shipped("nemotron-h-8b")
    model = attrs.evolve(model, layers=(model.layers * 3)[:128])
    sources = model.engine("prefill", tp=64, pp=8, num_blocks=64)
    destinations = model.engine("decode", tp=128, pp=4, num_blocks=64, layout="BLHNC")
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    mesh_plan = plan_mesh(destinations, sources)
    plan_s = time.perf_counter() - start
    assert len(mesh_plan.plans) == len(sources) == 512
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    megabytes = (after_kib - before_kib) / 1024
    print(f"plan_mesh, 512 x 512 workers of 128 layers: {plan_s:.2f} s, {megabytes:.0f} MB")


def main() -> None:
    """Print the figures, the mesh first, because its memory is the growth of the process."""
    print_mesh()
    for layout in ("LBHNC", "LBNHC"):
        figures = f"{cold(attention(80), layout=layout) * 1e3:.2f} ms, describe {described(layout) * 1e3:.2f} ms"
        print(f"plan, 80 layers, TP 8 -> 4, {layout}: {figures}")
    by_layers = [cold(attention(layers)) for layers in LAYERS]
    print(f"plan, by layers {LAYERS}: exponent {exponent(LAYERS, by_layers):.2f}")
    by_pool = [cold(attention(80), blocks) for blocks in POOLS]
    print(f"plan, by blocks of the pools {POOLS}: exponent {exponent(POOLS, by_pool):.2f}")
    bindings = [binding(blocks) for blocks in REQUESTS]
    by_ids = [median(request.run, rounds=31) for request in bindings]
    num_ids = tuple(request.num_ids for request in bindings)
    print(f"bind, by ids {num_ids}: exponent {exponent(REQUESTS, by_ids):.2f}")
    for source, destination in BLOCK_SIZES:
        print_unequal(source, destination)
    by_tokens = [certified(tokens) for tokens in NEIGHBOURS]
    proofs = ", ".join(f"{tokens}/{tokens + 1} {s:.3f} s" for tokens, s in zip(NEIGHBOURS, by_tokens, strict=True))
    print(f"certify, by tokens of a block: {proofs}, exponent {exponent(NEIGHBOURS, by_tokens):.2f}")
    print(f"descriptors(), {DESCRIPTORS:,} of scattered blocks: {descriptors() * 1e3:.0f} ms")
    print(f"with_remotes, a peer of 80 layers: {peers() * 1e6:.0f} us")


if __name__ == "__main__":
    main()
