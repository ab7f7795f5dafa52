"""Staging: requests whose layouts leave only short runs between them, in one leg and in two, between two processes.

    python -m benchmarks.staging                    # some minutes
    python -m benchmarks.staging --blocks 64 --case block
    python -m benchmarks.staging --device cuda:0    # all memory on a GPU

Each row is a way to move the same request to one worker of the destination, from blocks to blocks in no order, through
NIXL in main memory, or on a GPU. This process is the destination that reads, or the source that writes; the other one
is a process of its own. All ways of one direction take turns, and every byte that any way leaves at the destination is
compared with what the first one leaves. A time goes from the request's tables to its last byte in its place; it is the
median of as many rounds as the time allows, three at least.

Before all that, the machine's rates of reads and of writes are measured, as ``python -m kvplan_nixl calibrate`` does.
Below each table is what ``choose`` takes by them, and how fast bytes are put in order by itself, beside one plain copy
of as many at a time. Torch has one thread, since two of NIXL's are never idle.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import attrs
import numpy as np

from kvplan import Blocks, Model, Region, TransferPlan, Worker
from kvplan.staging import Pipeline, Rates, StagedPlan, choose
from kvplan.staging.choice import Option

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
    pipeline: Pipeline
    peer: Any
    request: dict[str, Any]

    @classmethod
    @contextmanager
    def of(cls, operation: str, case: Case, blocks: int, staging_bytes: int, device: str) -> Iterator[World]:
        """The world of a case. Sources have bytes of no pattern, the same in each world."""
        from benchmarks.real_memory import PeerProcess, fill, placed
        from kvplan_nixl import UCX, NixlExecutor
        from kvplan_nixl.rearrange import TorchCopier

        source, destination = case.workers(blocks)
        rng = np.random.default_rng(1)
        into, out_of = ({"attn": Blocks(rng.permutation(side.views[0].num_blocks))} for side in (destination, source))
        reads = operation == "READ"
        local, remote = (destination, source) if reads else (source, destination)
        tables = (into, out_of) if reads else (out_of, into)
        request = {"local": tables[0], "remote": tables[1], "tokens": (0, 16 * blocks)}
        staging = Region(STAGING, 1 << 50, staging_bytes)
        there, memory = placed(attrs.evolve(local, regions=(*local.regions, staging)), device)
        if not reads:
            fill(there, memory, device)
        with PeerProcess(remote, UCX, device=device) as peer, NixlExecutor(there) as executor:
            pipeline = Pipeline(executor, STAGING, TorchCopier(memory))
            theirs = executor.connect(peer.ask("envelope"))
            yield cls(operation, there, theirs, memory, executor, pipeline, peer, request)

    def clear(self) -> None:
        """Zeros at the destination."""
        if self.operation == "WRITE":
            self.peer.ask("clear")
        for tensor in self._caches().values() if self.operation == "READ" else ():
            tensor.zero_()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until what torch has begun is done."""
        from benchmarks.real_memory import synchronized

        synchronized(str(self.memory[STAGING].device))

    def found(self) -> dict[str, str]:
        """What tells the bytes at the destination from others, region by region."""
        from benchmarks.real_memory import digests

        return digests(self._caches()) if self.operation == "READ" else dict(self.peer.ask("digests"))

    def _caches(self) -> dict[str, Any]:
        return {name: tensor for name, tensor in self.memory.items() if name != STAGING}


@attrs.frozen
class Way:
    """A way to move the request, and the whole of it, done once."""

    option: Option
    once: Callable[[], None]


def direct(world: World, plan: TransferPlan) -> Callable[[], None]:
    """One leg."""
    from kvplan_nixl import settle

    world.executor.prepare(plan)

    def once() -> None:
        (spec,) = plan.bind(**world.request)
        transfer = world.executor.start(spec, "request")
        if not settle(world.executor, [transfer], TIMEOUT_S) or transfer.error is not None:
            raise transfer.error or TimeoutError(f"{transfer!r}")
        world.executor.release(transfer)

    return once


def staged(world: World, plan: StagedPlan) -> Callable[[], None]:
    """Long runs, and bytes put in order in staging memory of this process: of the receiver, or of the sender."""
    world.pipeline.prepare(plan)

    def once() -> None:
        transfer = world.pipeline.submit(plan, "request", **world.request)
        while not transfer.status.is_settled:
            world.pipeline.poll()
        if transfer.error is not None:
            raise transfer.error

    return once


def ways(world: World, tokens: int, rates: Rates) -> list[Way]:
    """All that there are, the one first that is chosen."""
    choice = choose(world.local, [world.remote], tokens=tokens, operation=world.operation, staging=STAGING, rates=rates)
    return [
        Way(
            option,
            staged(world, option.plan) if isinstance(option.plan, StagedPlan) else direct(world, option.plan),
        )
        for option in choice.options
    ]


def check(world: World, ways: Sequence[Way], expected: dict[str, str]) -> dict[str, str]:
    """What all ways leave, each once by itself. Make sure that it is the same, and as ``expected`` if that is known."""
    for way in ways:
        world.clear()
        way.once()
        found = world.found()
        expected = expected or found
        if found != expected:
            raise RuntimeError(f"{way.option.strategy} leaves other bytes than the first way")
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


def in_order(world: World, plan: StagedPlan) -> str:
    """Copies by themselves, chunk by chunk, and as many bytes in one piece."""
    import torch

    from kvplan_nixl.calibrate import copy_and_wait
    from kvplan_nixl.rearrange import TorchCopier

    copier, device = TorchCopier(world.memory), world.memory[STAGING].device
    rates: list[tuple[float, float]] = []
    for chunk in list(plan.bind(**world.request))[:8]:
        num_bytes = sum(copy.num_bytes for copy in chunk.copies)
        into, out_of = (
            torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        )  # zeros would be one page
        times = []
        for once in (partial(copy_and_wait, copier, chunk.copies), partial(into.copy_, out_of)):
            rounds = []
            for _ in range(4):
                world.synchronize()
                began = time.perf_counter()
                once()
                world.synchronize()
                rounds.append(time.perf_counter() - began)
            times.append(num_bytes / statistics.median(rounds[1:]) / 1e9)
        rates.append((times[0], times[1]))
    ours, plain = (statistics.median(side) for side in zip(*rates, strict=True))
    beside = f"plain copy {plain:.2f} GB/s, {plain / ours:.1f}x"
    origins = sum(copy.num_origins for copy in chunk.copies)
    return f"  {plan.direct.local.key[0]} puts in order {ours:.2f} GB/s, {origins} copies a chunk; {beside}"


def table(case: Case, given: argparse.Namespace, rates: Mapping[str, Rates]) -> Iterator[str]:
    """The lines of one case."""
    tokens = 16 * given.blocks
    yield f"\n{case.name}: {case.model}, {tokens} tokens, {given.staging} MiB of staging memory\n"
    yield "| way | descriptors | bytes each | MB moved | ms by rates | ms | GB/s of need | direct / this |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    expected: dict[str, str] = {}
    remarks = []
    for operation in rates:
        # one world at a time: each has two threads that are never idle
        with World.of(operation, case, given.blocks, given.staging << 20, given.device) as world:
            made = ways(world, tokens, rates[operation])
            expected = check(world, made, expected)
            took = [statistics.median(times) for times in measured(made, given.seconds / 2)]
            plans = [way.option.plan for way in made]
            rearranged = [in_order(world, plan) for plan in plans if isinstance(plan, StagedPlan)]
        strategies = [way.option.strategy for way in made]
        direct_s, need = (each[strategies.index("direct")] for each in (took, [way.option.num_bytes for way in made]))
        for way, median in zip(made, took, strict=True):
            option = way.option
            yield (
                f"| {operation.lower()}, {option.strategy} | {option.num_descriptors:,} "
                f"| {option.num_bytes // option.num_descriptors:,} | {option.num_bytes / 1e6:.0f} "
                f"| {option.seconds * 1e3:.0f} | {median * 1e3:.0f} "
                f"| {need / median / 1e9:.2f} | {direct_s / median:.2f} |"
            )
        slower = 100 * (took[0] / min(took) - 1)
        remarks.append(f"{operation.lower()}: auto takes {strategies[0]}, {slower:.0f} % above the fastest")
        remarks += rearranged
    yield from ("", *remarks)


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    import torch

    from kvplan_nixl.calibrate import calibrate

    logging.getLogger("nixl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staging", description="requests in one leg and in two")
    parser.add_argument("--blocks", type=int, default=512, metavar="N", help="of 16 tokens, in the request")
    parser.add_argument("--staging", type=int, default=64, metavar="MIB", help="memory that is set aside")
    parser.add_argument("--device", default="cpu", help="where all memory is, as torch names it")
    parser.add_argument("--case", default="", metavar="WORDS", help="cases with these words in their name")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case; three rounds of each way at least")
    given = parser.parse_args(arguments)
    rates = {operation: calibrate(given.device, operation=operation) for operation in ("READ", "WRITE")}
    for each in rates.values():
        print(attrs.asdict(each))
    for case in CASES:
        if given.case in case.name:
            for line in table(case, given, rates):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
