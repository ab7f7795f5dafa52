"""Staging: requests whose layouts leave only short runs, moved directly and staged, between two processes.

    python -m benchmarks.staging                    # some minutes
    python -m benchmarks.staging --blocks 64 --case block
    python -m benchmarks.staging --device cuda:0    # all memory on a GPU

Each row is a strategy for the same request to one worker of the destination, between scattered blocks, through NIXL in
main memory or on a GPU. This process is the destination that reads, or the source that writes; the other one is a
process of its own. The strategies of a direction take turns, and every byte that one leaves at the destination is
compared with what the first one leaves. A time goes from the request's block tables to its last byte in place; it is
the median of as many rounds as fit into the time, at least three.

Before that, the rates of the machine are measured, as by ``python -m kvplan_nixl calibrate``. Below each table is the
strategy that ``choose`` takes by these rates, and the throughput of the local copies alone, beside one plain copy of as
many bytes. Torch has one thread, since two threads of NIXL are never idle.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import attrs
import numpy as np

from kvplan import Blocks, Model, Region, TransferPlan, Worker, region_of
from kvplan.staging import Option, Pipeline, Rates, StagedPlan, choose

STAGING: Final = "staging"
TIMEOUT_S: Final = 300.0


@attrs.frozen
class Case:
    """A pair of engines, by the arguments of both; the request moves what one worker of the destination needs."""

    name: str
    model: str
    source: dict[str, Any]
    destination: dict[str, Any]

    def workers(self, blocks: int) -> tuple[Worker, Worker]:
        """The source and the destination, with room for one request of ``blocks`` blocks of 16 tokens."""
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


Memory = dict[str, Any]
"""A tensor of bytes for each region, by name."""


def placed(worker: Worker, device: str, *, is_filled: bool) -> tuple[Worker, Memory]:
    """A worker with its regions in memory of a device: zeros, or bytes without a pattern that depend on names alone."""
    import torch

    memory, regions = {}, []
    for region in worker.regions:
        values = np.zeros(region.size_bytes, np.uint8)
        if is_filled:
            values = np.random.default_rng([*region.name.encode()]).integers(1, 256, region.size_bytes, np.uint8)
        memory[region.name] = tensor = torch.from_numpy(values).to(device)
        regions.append(region_of(tensor, region.name))
    synchronize(device)
    return attrs.evolve(worker, regions=regions), memory


def synchronize(device: str) -> None:
    """Wait until torch is done with what it has begun on a device."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)


def clear(memory: Memory, device: str) -> None:
    """Fill caches with zeros."""
    for name, tensor in memory.items():
        if name != STAGING:
            tensor.zero_()
    synchronize(device)


def digests(memory: Memory) -> dict[str, str]:
    """A digest of each region but the staging region."""
    return {
        name: hashlib.sha256(tensor.cpu().numpy()).hexdigest() for name, tensor in memory.items() if name != STAGING
    }


def serve(channel: Connection, worker: Worker, device: str, is_source: bool) -> None:
    """The other process: memory of a worker and an executor, until the channel is closed."""
    from kvplan_nixl import NixlExecutor

    logging.getLogger("nixl").setLevel(logging.WARNING)
    there, memory = placed(worker, device, is_filled=is_source)
    with NixlExecutor(there) as executor, suppress(EOFError):
        channel.send(executor.envelope())
        while True:
            if channel.recv() == "clear":
                clear(memory, device)
            channel.send(digests(memory))


@attrs.frozen
class World:
    """A worker of this process that reads from one of another process, or writes to it, and one request."""

    operation: str
    local: Worker
    remote: Worker
    memory: Memory
    executor: Any
    channel: Any
    request: dict[str, Any]
    device: str

    @classmethod
    @contextmanager
    def of(cls, operation: str, case: Case, blocks: int, staging_bytes: int, device: str) -> Iterator[World]:
        """The world of a case. Sources have the same bytes in each world."""
        from kvplan_nixl import NixlExecutor

        source, destination = case.workers(blocks)
        rng = np.random.default_rng(1)
        into, out_of = ({"attn": Blocks(rng.permutation(side.views[0].num_blocks))} for side in (destination, source))
        reads = operation == "READ"
        local, remote = (destination, source) if reads else (source, destination)
        tables = (into, out_of) if reads else (out_of, into)
        request = {"local": tables[0], "remote": tables[1], "tokens": (0, 16 * blocks)}
        staging = Region(STAGING, 1 << 50, staging_bytes)
        there, memory = placed(attrs.evolve(local, regions=(*local.regions, staging)), device, is_filled=not reads)
        context = multiprocessing.get_context("spawn")
        channel, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, remote, device, reads), daemon=True)
        process.start()
        theirs.close()  # so that receiving fails when the process ends
        with channel, NixlExecutor(there) as executor:
            far = executor.connect(channel.recv())
            yield cls(operation, there, far, memory, executor, channel, request, device)
        process.join(TIMEOUT_S)

    def clear(self) -> None:
        """Fill the destination with zeros."""
        if self.operation == "READ":
            clear(self.memory, self.device)
        else:
            self._ask("clear")

    def found(self) -> dict[str, str]:
        """A digest of each region of the destination."""
        return digests(self.memory) if self.operation == "READ" else self._ask("digests")

    def _ask(self, command: str) -> dict[str, str]:
        self.channel.send(command)
        return dict(self.channel.recv())


@attrs.frozen
class Way:
    """A strategy, and a function that moves the request once."""

    option: Option
    once: Callable[[], None]


def direct(world: World, plan: TransferPlan) -> Callable[[], None]:
    """A function that moves the request directly."""
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
    """A function that moves the request through staging memory of this process: the reader, or the writer."""
    from kvplan_nixl.rearrange import TorchCopier

    pipeline = Pipeline(world.executor, plan, TorchCopier(world.memory))

    def once() -> None:
        transfer = pipeline.submit("request", **world.request)
        while not transfer.status.is_settled:
            pipeline.poll()
        if transfer.error is not None:
            raise transfer.error

    return once


def ways(world: World, tokens: int, rates: Rates) -> list[Way]:
    """All strategies, the chosen one first."""
    choice = choose(world.local, [world.remote], tokens=tokens, operation=world.operation, staging=STAGING, rates=rates)
    return [
        Way(
            option,
            staged(world, option.plan) if isinstance(option.plan, StagedPlan) else direct(world, option.plan),
        )
        for option in choice.options
    ]


def check(world: World, ways: Sequence[Way], expected: dict[str, str]) -> dict[str, str]:
    """Use each way once; return what all of them leave, which must be ``expected`` if that is known."""
    for way in ways:
        world.clear()
        way.once()
        found = world.found()
        expected = expected or found
        if found != expected:
            raise RuntimeError(f"{way.option.strategy} leaves other bytes than the first way")
    return expected


def measured(ways: Sequence[Way], seconds: float) -> list[list[float]]:
    """Seconds of each round of each way, in turns: at least three rounds, and then as many as fit into the time."""
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


def copying(world: World, plan: StagedPlan) -> str:
    """The throughput of local copies, chunk by chunk, beside plain copies of as many bytes."""
    import torch

    from kvplan_nixl.calibrate import copied
    from kvplan_nixl.rearrange import TorchCopier

    copier = TorchCopier(world.memory)
    rates: list[tuple[float, float]] = []
    for chunk in list(plan.bind(**world.request))[:8]:
        num_bytes = sum(copy.num_bytes for copy in chunk.copies)
        # not zeros, all of which would be one page
        into, out_of = (torch.ones(num_bytes, dtype=torch.uint8, device=world.device) for _ in range(2))
        times = []
        for once in (partial(copied, copier, chunk.copies), partial(into.copy_, out_of)):
            rounds = []
            for _ in range(4):
                synchronize(world.device)
                began = time.perf_counter()
                once()
                synchronize(world.device)
                rounds.append(time.perf_counter() - began)
            times.append(num_bytes / statistics.median(rounds[1:]) / 1e9)
        rates.append((times[0], times[1]))
    ours, plain = (statistics.median(side) for side in zip(*rates, strict=True))
    beside = f"plain copy {plain:.2f} GB/s, {plain / ours:.1f}x"
    origins = sum(copy.num_origins for copy in chunk.copies)
    return f"  {plan.direct.local.key[0]} copies {ours:.2f} GB/s, {origins} copies a chunk; {beside}"


def table(case: Case, given: argparse.Namespace, rates: Rates) -> Iterator[str]:
    """The lines of one case."""
    tokens = 16 * given.blocks
    yield f"\n{case.name}: {case.model}, {tokens} tokens, {given.staging} MiB of staging memory\n"
    yield "| way | descriptors | bytes each | MB moved | ms by rates | ms | GB/s of need | direct / this |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    expected: dict[str, str] = {}
    remarks = []
    for operation in ("READ", "WRITE"):
        # one world at a time: each has two threads that are never idle
        with World.of(operation, case, given.blocks, given.staging << 20, given.device) as world:
            made = ways(world, tokens, rates)
            expected = check(world, made, expected)
            took = [statistics.median(times) for times in measured(made, given.seconds / 2)]
            plans = [way.option.plan for way in made]
            copied = [copying(world, plan) for plan in plans if isinstance(plan, StagedPlan)]
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
        remarks += copied
    yield from ("", *remarks)


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    import torch

    from kvplan_nixl.calibrate import calibrate

    logging.getLogger("nixl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staging", description="requests moved directly and staged"
    )
    parser.add_argument("--blocks", type=int, default=512, metavar="N", help="blocks of 16 tokens in the request")
    parser.add_argument("--staging", type=int, default=64, metavar="MIB", help="size of the staging region")
    parser.add_argument("--device", default="cpu", help="device of all memory, as torch names it")
    parser.add_argument("--case", default="", metavar="WORDS", help="only cases with these words in their name")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="time of each case; at least three rounds of each strategy"
    )
    given = parser.parse_args(arguments)
    rates = calibrate(given.device)
    print(attrs.asdict(rates))
    for case in CASES:
        if given.case in case.name:
            for line in table(case, given, rates):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
