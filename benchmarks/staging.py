"""Staging: requests whose layouts leave only short runs between them, in one leg and in two, between two processes.

    python -m benchmarks.staging                    # some minutes
    python -m benchmarks.staging --blocks 64 --case block

Each row is a way to move the same request to one worker of the destination, from blocks to blocks in no order, through
NIXL in main memory. This process is the destination that reads, or the source that writes; the other one is a process
of its own. All ways of one direction take turns, and every byte that any way leaves at the destination is compared with
what the first one leaves. A time goes from the request's tables to its last byte in its place; it is the median of as
many rounds as the time allows.

Below each table is how fast bytes are put in order by itself, beside one plain copy of as many bytes at a time.
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

from kvplan import (
    Blocks,
    Model,
    Pipeline,
    Region,
    StagedPlan,
    TransferPlan,
    Worker,
    plan_reads,
    plan_writes,
    stage,
    stage_writes,
)

STAGING: Final = "staging"
TIMEOUT_S: Final = 300.0


@attrs.frozen
class Case:
    """A pair of engines, by their sides; what one worker of the destination needs is moved."""

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
    Case("MLA, dcp 1 to one rank of 8", "deepseek-v3", {}, {"tp": 8, "dcp": 8}),
    Case(
        "block 16 to 64, head-major",
        "qwen3-0.6b",
        {"layout": "LBHNC"},
        {"layout": "LBHNC", "tokens_per_block": 64},
    ),
)


@attrs.frozen
class World:
    """A worker of this process that reads from one of another process, or writes to it, and one request."""

    operation: str
    local: Worker
    remote: Worker
    memory: dict[str, Any]
    executor: Any
    peer: Any
    request: dict[str, Any]

    @classmethod
    @contextmanager
    def of(cls, operation: str, case: Case, blocks: int, staging_bytes: int) -> Iterator[World]:
        """The world of a case. Sources have bytes of no pattern, the same in each world."""
        from kvplan_nixl import UCX, NixlExecutor
        from tests.nixl.peers import PeerProcess, pattern
        from tests.nixl.worlds import placed

        source, destination = case.workers(blocks)
        rng = np.random.default_rng(1)
        into, out_of = ({"attn": Blocks(rng.permutation(side.views[0].num_blocks))} for side in (destination, source))
        reads = operation == "READ"
        local, remote = (destination, source) if reads else (source, destination)
        tables = (into, out_of) if reads else (out_of, into)
        request = {"local": tables[0], "remote": tables[1], "tokens": (0, 16 * blocks)}
        there, memory = placed(attrs.evolve(local, regions=(*local.regions, Region(STAGING, 1 << 50, staging_bytes))))
        for region in () if reads else source.regions:
            memory[region.name].numpy()[:] = pattern(source, region.name)
        with PeerProcess(remote, UCX) as peer, NixlExecutor(there) as executor:
            yield cls(operation, there, executor.connect(peer.ask("envelope")), memory, executor, peer, request)

    def clear(self) -> None:
        """Zeros at the destination."""
        if self.operation == "WRITE":
            self.peer.ask("clear")
        for tensor in self._caches().values() if self.operation == "READ" else ():
            tensor.zero_()

    def found(self) -> dict[str, str]:
        """What tells the bytes at the destination from others, region by region."""
        from tests.nixl.peers import digests

        return digests(self._caches()) if self.operation == "READ" else dict(self.peer.ask("digests"))

    def _caches(self) -> dict[str, Any]:
        return {name: tensor for name, tensor in self.memory.items() if name != STAGING}


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

    plan = planned(world)
    world.executor.prepare(plan)

    def once() -> None:
        (spec,) = plan.bind(**world.request)
        transfer = world.executor.start(spec, "request")
        if not settle(world.executor, [transfer], TIMEOUT_S) or transfer.error is not None:
            raise transfer.error or TimeoutError(f"{transfer!r}")
        world.executor.release(transfer)

    (spec,) = plan.bind(**world.request)
    return Way(f"direct {world.operation.lower()}", spec.num_descriptors, spec.num_bytes, once)


def planned(world: World) -> TransferPlan:
    """The plan of one leg."""
    make = plan_reads if world.operation == "READ" else plan_writes
    return make(world.local, [world.remote])


def staged(world: World, whole: bool = False) -> Way:
    """Long runs, and bytes put in order in staging memory of this process: of the receiver, or of the sender."""
    from kvplan_nixl.rearrange import TorchCopier

    plan = planned_in_two(world, whole)
    pipeline = Pipeline(world.executor, plan, TorchCopier(world.memory))

    def once() -> None:
        transfer = pipeline.submit("request", **world.request)
        while not transfer.status.is_settled:
            pipeline.poll()
        if transfer.error is not None:
            raise transfer.error

    specs = [spec for chunk in plan.bind(**world.request) for spec in chunk.specs]
    name = f"receive-staged, {'whole' if whole else 'exact'}" if world.operation == "READ" else "send-staged"
    descriptors, num_bytes = (sum(getattr(spec, what) for spec in specs) for what in ("num_descriptors", "num_bytes"))
    return Way(name, descriptors, num_bytes, once)


def planned_in_two(world: World, whole: bool = False) -> StagedPlan:
    """The plan of two legs."""
    if world.operation == "READ":
        return stage(world.local, [world.remote], staging=STAGING, whole=whole)
    return stage_writes(world.local, [world.remote], staging=STAGING)


WAYS: Final[dict[str, tuple[Callable[[World], Way], ...]]] = {
    "READ": (direct, staged, partial(staged, whole=True)),
    "WRITE": (direct, staged),
}
"""The rows of each table, by operation. The first one's bytes are those that all have to leave."""


def check(world: World, ways: Sequence[Way], expected: dict[str, str]) -> dict[str, str]:
    """What all ways leave, each once by itself. Make sure that it is the same, and as ``expected`` if that is known."""
    for way in ways:
        world.clear()
        way.once()
        found = world.found()
        expected = expected or found
        if found != expected:
            raise RuntimeError(f"{way.name} leaves other bytes than the first way")
    return expected


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


def in_order(world: World) -> str:
    """Copies by themselves, chunk by chunk, and as many bytes in one piece."""
    import torch

    from kvplan_nixl.rearrange import TorchCopier

    copier = TorchCopier(world.memory)
    rates: list[tuple[float, float]] = []
    for chunk in list(planned_in_two(world).bind(**world.request))[:8]:
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
    when = "what was read" if world.operation == "READ" else "what is to be written"
    beside = f"plain copy {plain:.2f} GB/s, {plain / ours:.1f}x"
    return f"{when}, put in order: {ours:.2f} GB/s, {len(chunk.copies)} copies a chunk; {beside}"


def table(case: Case, given: argparse.Namespace) -> Iterator[str]:
    """The lines of one case."""
    yield f"\n{case.name}: {case.model}, {16 * given.blocks} tokens, {given.staging} MiB of staging memory\n"
    yield "| way | descriptors | bytes each | MB moved | ms | rounds | GB/s of need | direct / this |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    expected: dict[str, str] = {}
    remarks = []
    for operation, makers in WAYS.items():
        # one world at a time: each has two threads that are never idle
        with World.of(operation, case, given.blocks, given.staging << 20) as world:
            ways = [make(world) for make in makers]
            expected = check(world, ways, expected)
            took = measured(ways, given.seconds / len(WAYS))
            remarks.append(in_order(world))
        first = statistics.median(took[0])
        for way, times in zip(ways, took, strict=True):
            median, each = statistics.median(times), way.num_bytes // way.descriptors
            yield (
                f"| {way.name} | {way.descriptors:,} | {each:,} | {way.num_bytes / 1e6:.0f} "
                f"| {median * 1e3:.0f} | {len(times)} | {ways[0].num_bytes / median / 1e9:.2f} | {first / median:.2f} |"
            )
    yield from ("", *remarks)


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
