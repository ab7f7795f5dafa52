"""Staging: requests whose layouts leave only short runs between them, in one leg and in two, between two processes.

    python -m benchmarks.staging                    # some minutes
    python -m benchmarks.staging --blocks 64 --case block
    python -m benchmarks.staging --device cuda:0    # all memory on a GPU

Each row is a way to move the same request to one worker of the destination, from blocks to blocks in no order, through
NIXL in main memory, or on a GPU. This process is the destination; the source is a process of its own. All ways take
turns, and every byte that any way leaves at the destination is compared with what the first one leaves. A time goes
from the request's tables to its last byte in its place; it is the median of as many rounds as the time allows, three at
least.

Before all that, the machine's rates are measured, as ``python -m kvplan_nixl calibrate`` does.
Below each table is what ``choose`` takes by them. Torch has one thread, since two of NIXL's are never idle.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        """Return the source and the destination.

        They have as many blocks as a request of ``blocks`` blocks of 16 tokens has.
        """
        model = Model.shipped(self.model)
        tokens = 16 * blocks
        # one block of the destination's rank has some positions of as many
        positions = self.destination.get("tokens_per_block", 16) * self.destination.get("dcp", 1)
        (source,) = model.engine("prefill", num_blocks=blocks, **self.source)
        local, *_ = model.engine("decode", num_blocks=-(-tokens // positions), **self.destination)
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
    """A worker of this process that reads from one of another process, and one request."""

    local: Worker
    remote: Worker
    memory: dict[str, Any]
    executor: Any
    pipeline: Pipeline
    request: dict[str, Any]

    @classmethod
    @contextmanager
    def of(cls, case: Case, blocks: int, staging_bytes: int, device: str) -> Iterator[World]:
        """Yield the world of a case. Sources have bytes of no pattern, the same in each world."""
        from benchmarks.real_memory import PeerProcess, placed
        from kvplan_nixl import UCX, NixlExecutor
        from kvplan_nixl.kernel import copier_of

        source, destination = case.workers(blocks)
        rng = np.random.default_rng(1)
        destination_blocks = {"attn": Blocks(rng.permutation(destination.views[0].num_blocks))}
        source_blocks = {"attn": Blocks(rng.permutation(source.views[0].num_blocks))}
        request = {"tokens": (0, 16 * blocks), "local": destination_blocks, "remote": source_blocks}
        staging = Region(STAGING, 1 << 50, staging_bytes)
        placed_local, memory = placed(attrs.evolve(destination, regions=(*destination.regions, staging)), device)
        with PeerProcess(source, UCX, device=device) as peer, NixlExecutor(placed_local) as executor:
            pipeline = Pipeline(executor, STAGING, copier_of(memory))
            connected = executor.connect(peer.ask("envelope"))
            yield cls(placed_local, connected, memory, executor, pipeline, request)

    def clear(self) -> None:
        """Set the destination to zeros."""
        for tensor in self._caches().values():
            tensor.zero_()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until what torch has begun is done."""
        from benchmarks.real_memory import synchronized

        synchronized(str(self.memory[STAGING].device))

    def digests(self) -> dict[str, str]:
        """Return a digest of the bytes at the destination, region by region."""
        from benchmarks.real_memory import digests

        return digests(self._caches())

    def _caches(self) -> dict[str, Any]:
        return {name: tensor for name, tensor in self.memory.items() if name != STAGING}


@attrs.frozen
class Way:
    """A way to move the request, and the whole of it, done once."""

    option: Option
    once: Callable[[], None]


def direct(world: World, plan: TransferPlan) -> Callable[[], None]:
    """Return a function that moves the request in one leg."""
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
    """Return a function that moves the request in long runs.

    It puts bytes in order in staging memory of this process.
    """
    world.pipeline.prepare(plan)

    def once() -> None:
        transfer = world.pipeline.submit(plan, "request", **world.request)
        while not transfer.status.is_settled:
            world.pipeline.poll()
        if transfer.error is not None:
            raise transfer.error

    return once


def ways(world: World, tokens: int, rates: Rates) -> list[Way]:
    """Return all ways, the one first that is chosen."""
    choice = choose(world.local, [world.remote], tokens=tokens, staging=STAGING, rates=rates)
    all_ways = list[Way]()
    for option in choice.options:
        plan = option.plan
        once = staged(world, plan) if isinstance(plan, StagedPlan) else direct(world, plan)
        all_ways.append(Way(option, once))
    return all_ways


def check(world: World, ways: Sequence[Way]) -> None:
    """Make sure that all ways, each once by itself, leave the same bytes. Raises RuntimeError."""
    expected: dict[str, str] = {}
    for way in ways:
        world.clear()
        way.once()
        digests = world.digests()
        expected = expected or digests
        if digests != expected:
            raise RuntimeError(f"{way.option.strategy} leaves other bytes than the first way")


def measured(ways: Sequence[Way], seconds: float) -> list[list[float]]:
    """Return the seconds of each round of each way, in turns: three rounds, and those that go into the time."""
    way_seconds: list[list[float]] = [[] for _ in ways]
    share = seconds / len(ways)
    for _ in range(100):
        unfinished = [i for i, rounds in enumerate(way_seconds) if len(rounds) < 3 or sum(rounds) < share]
        for i in unfinished:
            began = time.perf_counter()
            ways[i].once()
            way_seconds[i].append(time.perf_counter() - began)
        if not unfinished:
            break
    return way_seconds


def table(case: Case, options: argparse.Namespace, rates: Rates) -> Iterator[str]:
    """Yield the lines of one case."""
    tokens = 16 * options.blocks
    yield f"\n{case.name}: {case.model}, {tokens} tokens, {options.staging} MiB of staging memory\n"
    yield "| way | descriptors | bytes each | MB moved | ms by rates | ms | GB/s of need | direct / this |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    # each world has two threads that are never idle, so there is one at a time
    with World.of(case, options.blocks, options.staging << 20, options.device) as world:
        all_ways = ways(world, tokens, rates)
        check(world, all_ways)
        medians_s = [statistics.median(rounds) for rounds in measured(all_ways, options.seconds)]
    strategies = [way.option.strategy for way in all_ways]
    direct_index = strategies.index("direct")
    direct_s = medians_s[direct_index]
    needed_bytes = all_ways[direct_index].option.num_bytes
    for way, median_s in zip(all_ways, medians_s, strict=True):
        option = way.option
        yield (
            f"| {option.strategy} | {option.num_descriptors:,} "
            f"| {option.num_bytes // option.num_descriptors:,} | {option.num_bytes / 1e6:.0f} "
            f"| {option.seconds * 1e3:.0f} | {median_s * 1e3:.0f} "
            f"| {needed_bytes / median_s / 1e9:.2f} | {direct_s / median_s:.2f} |"
        )
    slower = 100 * (medians_s[0] / min(medians_s) - 1)
    yield from ("", f"auto takes {strategies[0]}, {slower:.0f} % above the fastest")


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
    options = parser.parse_args(arguments)
    rates = calibrate(options.device)
    print(attrs.asdict(rates))
    for case in CASES:
        if options.case in case.name:
            for line in table(case, options, rates):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
