"""Staging: requests whose layouts leave only short runs between them, in one leg and in two, between two processes.

    python -m benchmarks.staging                    # some minutes
    python -m benchmarks.staging --blocks 64 --case block

Each row is a way to move the same request to one worker of the destination, from blocks to blocks in no order, through
NIXL in main memory. All ways take turns, and every byte of each is compared with what the first one leaves. A time
goes from the request's tables to its last byte in its place; it is the median of as many rounds as the time allows.

Below each table is how fast leg 2 is by itself: bytes put in order, beside one plain copy of as many bytes at a time.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import attrs
import numpy as np

from kvplan import Blocks, Model, Pipeline, Region, StagedPlan, Worker, plan_reads, stage

STAGING: Final = "staging"
TIMEOUT_S: Final = 300.0


@attrs.frozen
class Case:
    """A pair of engines, by their sides; the first worker of the destination reads."""

    name: str
    model: str
    source: dict[str, Any]
    destination: dict[str, Any]

    def workers(self, blocks: int) -> tuple[Worker, Worker]:
        """The source and the destination, with as many blocks as a request of ``blocks`` blocks of 16 tokens has."""
        model = Model.shipped(self.model)
        tokens = 16 * blocks
        over = self.destination.get("tokens_per_block", 16) * self.destination.get("dcp", 1)
        (source,) = model.engine("prefill", num_blocks=blocks, **self.source)
        local, *_ = model.engine("decode", num_blocks=-(-tokens // over), **self.destination)
        return source, local


CASES: Final = (
    Case("token-major to head-major, tp 1 to 2", "qwen3-0.6b", {"layout": "LBNHC"}, {"layout": "LBHNC", "tp": 2}),
    Case("MLA, dcp 1 to 8", "deepseek-v3", {}, {"tp": 8, "dcp": 8}),
    Case(
        "block 16 to 64, head-major",
        "qwen3-0.6b",
        {"layout": "LBHNC"},
        {"layout": "LBHNC", "tokens_per_block": 64},
    ),
)


@attrs.frozen
class World:
    """A worker that reads from another process, its memory, and one request."""

    source: Worker
    local: Worker
    memory: dict[str, Any]
    executor: Any
    request: dict[str, Any]

    @classmethod
    @contextmanager
    def of(cls, case: Case, blocks: int, staging_bytes: int) -> Iterator[World]:
        """The world of a case."""
        from kvplan_nixl import UCX, NixlExecutor
        from tests.nixl.peers import PeerProcess
        from tests.nixl.worlds import placed

        source, local = case.workers(blocks)
        rng = np.random.default_rng(1)
        near, far = (Blocks(rng.permutation(worker.views[0].num_blocks)) for worker in (local, source))
        request = {"local": {"attn": near}, "remote": {"attn": far}, "tokens": (0, 16 * blocks)}
        there, memory = placed(attrs.evolve(local, regions=(*local.regions, Region(STAGING, 1 << 50, staging_bytes))))
        with PeerProcess(source, UCX) as peer, NixlExecutor(there) as executor:
            yield cls(executor.connect(peer.ask("envelope")), there, memory, executor, request)

    def caches(self) -> list[Any]:
        """The destination's tensors but for the staging one."""
        return [tensor for name, tensor in self.memory.items() if name != STAGING]


@attrs.frozen
class Way:
    """A way to move the request: how many descriptors of how many bytes travel, and the whole of it, done once."""

    name: str
    descriptors: int
    num_bytes: int
    once: Callable[[], None]


def direct(world: World) -> Way:
    """One plan, one leg."""
    from kvplan_nixl import settle

    plan = plan_reads(world.local, [world.source])
    world.executor.prepare(plan)

    def once() -> None:
        (spec,) = plan.bind(**world.request)
        transfer = world.executor.start(spec, "request")
        if not settle(world.executor, [transfer], TIMEOUT_S) or transfer.error is not None:
            raise transfer.error or TimeoutError(f"{transfer!r}")
        world.executor.release(transfer)

    (spec,) = plan.bind(**world.request)
    return Way("direct", spec.num_descriptors, spec.num_bytes, once)


def receive_staged(world: World, whole: bool) -> Way:
    """Long runs into staging memory, put in order there."""
    from kvplan_nixl.rearrange import TorchCopier

    plan = stage(world.local, [world.source], staging=STAGING, whole=whole)
    pipeline = Pipeline(world.executor, plan, TorchCopier(world.memory))

    def once() -> None:
        transfer = pipeline.submit("request", **world.request)
        while not transfer.status.is_settled:
            pipeline.poll()
        if transfer.error is not None:
            raise transfer.error

    specs = [spec for chunk in plan.bind(**world.request) for spec in chunk.specs]
    name = f"receive-staged, {'whole' if whole else 'exact'}"
    return Way(name, *(sum(getattr(spec, what) for spec in specs) for what in ("num_descriptors", "num_bytes")), once)


WAYS: Final[tuple[Callable[[World], Way], ...]] = (
    direct,
    partial(receive_staged, whole=False),
    partial(receive_staged, whole=True),
)
"""The rows of each table. The first one's bytes are those that all have to leave."""


def check(world: World, ways: Sequence[Way]) -> None:
    """Make sure that all ways leave the same bytes, each once by itself."""
    expected: list[np.ndarray] = []
    for way in ways:
        for cache in world.caches():
            cache.zero_()
        way.once()
        found = [cache.numpy() for cache in world.caches()]
        if not expected:
            expected = [values.copy() for values in found]
        if not all(map(np.array_equal, found, expected)):
            raise RuntimeError(f"{way.name} leaves other bytes than {ways[0].name}")


def measured(ways: Sequence[Way], seconds: float) -> list[list[float]]:
    """Seconds of each round of each way, in turns: three rounds at least, and then those that go into the time."""
    took: list[list[float]] = [[] for _ in ways]
    share = seconds / len(ways)
    for _ in range(100):
        going = [i for i, times in enumerate(took) if len(times) < 3 or sum(times) < share]
        for i in going:
            began = time.perf_counter()
            ways[i].once()
            took[i].append(time.perf_counter() - began)
        if not going:
            break
    return took


def in_order(world: World, plan: StagedPlan) -> str:
    """Leg 2 by itself, chunk by chunk, and as many bytes in one piece."""
    import torch

    from kvplan_nixl.rearrange import TorchCopier

    copier = TorchCopier(world.memory)
    rates: list[tuple[float, float]] = []
    for chunk in list(plan.bind(**world.request))[:8]:
        num_bytes = sum(copy.num_bytes for copy in chunk.copies)
        into, out_of = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        times = []
        for once in (partial(copier.begin, chunk.copies), partial(into.copy_, out_of)):
            rounds = []
            for _ in range(4):
                began = time.perf_counter()
                once()
                rounds.append(time.perf_counter() - began)
            times.append(num_bytes / statistics.median(rounds[1:]) / 1e9)
        rates.append((times[0], times[1]))
    ours, plain = (statistics.median(side) for side in zip(*rates, strict=True))
    beside = f"plain copy {plain:.2f} GB/s, {plain / ours:.1f}x"
    return f"put in order: {ours:.2f} GB/s, {len(chunk.copies)} copies a chunk; {beside}"


def table(case: Case, given: argparse.Namespace) -> Iterator[str]:
    """The lines of one case."""
    with World.of(case, given.blocks, given.staging << 20) as world:
        ways = [make(world) for make in WAYS]
        check(world, ways)
        took = measured(ways, given.seconds)
        yield f"\n{case.name}: {case.model}, {16 * given.blocks} tokens, {given.staging} MiB of staging memory\n"
        yield "| way | descriptors | bytes each | MB read | ms | rounds | GB/s of need | direct / this |"
        yield "|---|---:|---:|---:|---:|---:|---:|---:|"
        first = statistics.median(took[0])
        for way, times in zip(ways, took, strict=True):
            median, each = statistics.median(times), way.num_bytes // way.descriptors
            yield (
                f"| {way.name} | {way.descriptors:,} | {each:,} | {way.num_bytes / 1e6:.0f} "
                f"| {median * 1e3:.0f} | {len(times)} | {ways[0].num_bytes / median / 1e9:.2f} | {first / median:.2f} |"
            )
    yield "\n" + in_order(world, stage(world.local, [world.source], staging=STAGING))


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    import torch

    logging.getLogger("nixl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staging", description="requests in one leg and in two")
    parser.add_argument("--blocks", type=int, default=512, metavar="N", help="of 16 tokens, in the request")
    parser.add_argument("--staging", type=int, default=64, metavar="MIB", help="memory that is set aside")
    parser.add_argument("--case", default="", metavar="WORDS", help="cases with these words in their name")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case; three rounds of each way at least")
    given = parser.parse_args(arguments)
    for case in CASES:
        if given.case in case.name:
            for line in table(case, given):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
