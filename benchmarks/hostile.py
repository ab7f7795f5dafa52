"""Hostile offers: small answers that ask for as much work as they can, and real ones.

    python -m benchmarks.hostile [CASE ...]

For each case this prints the bytes of the answer, and how many CPU seconds and how much memory a worker needs for all
that an engine does with it in one budget: decode, plan, count the cost and choose a strategy. Each case runs in a
process of its own. Errors are shown with their code; any other exception is a fault.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import Process

import attrs

from kvplan import (
    Axis,
    Budget,
    Group,
    KVPlanError,
    Model,
    Region,
    View,
    Worker,
    decode,
    encode,
    plan_reads,
)
from kvplan.budget import MESSAGE_BYTES
from kvplan.models.options import EngineOptions
from kvplan.plan import TransferPlan
from kvplan.staging import choose

MOST_BYTES = 12 << 30
"""The address space of a case: what needs more ends in a MemoryError."""

MOST_SECONDS = 60
"""The CPU time of a case: what needs more ends by a signal."""

Pair = tuple[Worker, Sequence[Worker]]
OneView = tuple[str, Group, Sequence[Axis], int, int]
"""A tensor's name and group, axes, number of blocks and block stride."""


def worker(engine: str, views: Iterable[OneView]) -> Worker:
    """A worker with each view in a region of its own."""
    groups: dict[str, Group] = {}
    regions = list[Region]()
    all_views = list[View]()
    address = 0
    for i, (tensor, group, axes, num_blocks, stride) in enumerate(views):
        groups[group.name] = group
        view = View(tensor, group, f"r.{i}", "uint8", axes, num_blocks, stride)
        regions.append(Region(view.region, address, view.end_bytes))
        all_views.append(view)
        address += view.end_bytes
    return Worker(engine, 0, regions, groups.values(), all_views)


def axis(name: str, size: int, stride: int) -> Axis:
    return Axis(name, 0, size, size, stride)


def token(slots: int, stride: int = 4) -> list[Axis]:
    """The axes of ``slots`` tokens of four bytes."""
    return [axis("token", slots, stride), axis("dim", 4, 1)]


def layers(
    engine: str, number: int, group: Group, axes: Callable[[int], Sequence[Axis]], stride: int = 1 << 30
) -> Worker:
    return worker(engine, ((f"layers.{i}", group, axes(i), 2, stride) for i in range(number)))


def many_groups() -> Pair:
    """250 groups, each with block sizes that have a long period."""

    def side(engine: str, slots: int) -> Worker:
        return worker(engine, ((f"t.{i}", Group(f"g{i}", slots + i), token(slots + i), 2, 1 << 30) for i in range(250)))

    return side("d", 1021), [side("s", 1500)]


def many_rows() -> Pair:
    """60 layers of 32 heads in different orders, blocks of 4096 and 4095 tokens."""

    def side(engine: str, slots: int, strides: tuple[int, int]) -> Worker:
        axes = [axis("token", slots, strides[0]), axis("head", 32, strides[1]), axis("dim", 64, 1)]
        return layers(engine, 60, Group("kv", slots), lambda _: axes)

    return side("d", 4096, (64, 64 * 4096)), [side("s", 4095, (64 * 32, 64))]


def transposed() -> Pair:
    """64 dimensions outside tokens on one side, in blocks of 16,384 tokens of eight layers."""
    slots = 1 << 14

    def side(engine: str, steps: tuple[int, int]) -> Worker:
        return layers(
            engine, 8, Group("kv", slots), lambda _: [axis("token", slots, steps[0]), axis("dim", 64, steps[1])]
        )

    return side("d", (64, 1)), [side("s", (1, slots))]


def coprime_blocks() -> Pair:
    """One layer, blocks of 2,097,151 and 2,097,152 tokens."""

    def side(engine: str, slots: int) -> Worker:
        return layers(engine, 1, Group("kv", slots), lambda _: token(slots))

    return side("d", (1 << 21) - 1), [side("s", 1 << 21)]


def many_spans() -> Pair:
    """1000 layers whose blocks of 1021 and 1019 tokens begin at different offsets in each layer."""

    def side(engine: str, slots: int, step: int) -> Worker:
        axes = [axis("token", slots, 8), axis("dim", 8, 1)]
        return worker(engine, ((f"l.{i}", Group("kv", slots), axes, 2, 9000 + step * i) for i in range(1000)))

    return side("d", 1021, 8), [side("s", 1019, 16)]


def answer(engine: str, workers: Iterable[Worker]) -> list[Worker]:
    """Workers as the ranks of one engine."""
    return [attrs.evolve(member, engine_id=engine, rank=rank) for rank, member in enumerate(workers)]


def scattered_heads(engine: str, slots: int, heads: range, number: int, gap: int) -> Worker:
    """A worker with some of eight heads of 32 layers, whose tokens are ``gap`` bytes apart."""
    size = 256 + gap
    axes = [
        Axis("head", heads.start, heads.stop, 8, size * slots),
        axis("token", slots, size),
        axis("content", 256, 1),
    ]
    views = ((f"layers.{i}", Group("attn", slots), axes, 4, size * slots * len(heads)) for i in range(number))
    return worker(engine, views)


def long_blocks() -> Pair:
    """A usual rank against one worker with blocks of 16,384 tokens."""
    return scattered_heads("d", 16, range(8), 32, 0), [scattered_heads("s", 1 << 14, range(8), 32, 1)]


def long_blocks_of_sixteen() -> Pair:
    """The same, with 16 workers in the answer, which share nothing."""
    sources = [scattered_heads("s", 1 << 15, range(i // 2, i // 2 + 1), 32, 1 + i) for i in range(0, 16, 2)]
    return scattered_heads("d", 16, range(8), 32, 0), answer("s", [*sources, *sources])


def long_period() -> Pair:
    """Twenty layers with blocks of 1,021 and 1,019 tokens, whose period is a million positions."""

    def side(engine: str, slots: int) -> Worker:
        return layers(engine, 20, Group("kv", slots), lambda _: token(slots))

    return side("d", 1021), [side("s", 1019)]


def replicas() -> Pair:
    """Ten thousand workers, each with the whole of one tensor."""
    state = Group("state")
    whole = worker("d", [("t", state, [axis("a", 8, 1)], 1, 0)])
    return whole, answer("s", [whole] * 10_000)


def rings() -> Pair:
    """Two thousand parts of a tensor, each on two of two thousand workers."""
    state = Group("state")
    number = 2000
    whole = worker("d", [("t", state, [axis("a", number, 1)], 1, 0)])
    sources = [worker("s", [("t", state, [Axis("a", i, i + 2, number, 1)], 1, 0)]) for i in range(number - 1)]
    return whole, answer("s", sources)


def real_pair(name: str, source: str, destination: str) -> Pair:
    model = Model.shipped(name)
    sides = [EngineOptions.parse(text, "a side").engine(model, text, 1000) for text in (source, destination)]
    return sides[1][0], sides[0]


REAL = {
    f"{name}, {source} to {destination}": partial(real_pair, name, source, destination)
    for name, source, destination in (
        ("llama-3.1-8b", "tp=2", "tp=1"),
        ("llama-3.1-70b", "tp=8", "block=64,layout=BLHNC"),
        ("llama-3.1-70b", "block=256,layout=LBNHC", "block=256,layout=LBHNC"),
        ("deepseek-v3", "tp=8,dcp=8", "tp=8"),
        ("qwen3-235b-a22b", "tp=16", "tp=4"),
        ("gemma-3-27b", "tp=1", "tp=4,block=32"),
        ("gpt-oss-120b", "pp=4", "tp=2"),
        ("nemotron-h-8b", "tp=2", "conv=SD"),
        ("falcon-mamba-7b", "tp=2", "conv=SD"),
    )
}
"""Pairs of engines as they are deployed, for comparison."""

HOSTILE = (
    many_groups,
    many_rows,
    transposed,
    coprime_blocks,
    many_spans,
    long_blocks,
    long_blocks_of_sixteen,
    long_period,
    replicas,
    rings,
)


def staged_region(local: Worker) -> Worker:
    """A worker with a region for staging, behind all others."""
    end = max((region.end for region in local.regions), default=0)
    return attrs.evolve(local, regions=(*local.regions, Region("staging", end + 4096, 256 << 20)))


def outcome(action: Callable[[], object]) -> str:
    """What an action ends in: ``ok``, or a code."""
    try:
        action()
    except KVPlanError as error:
        return error.code
    except (MemoryError, ArithmeticError, LookupError) as error:
        return type(error).__name__
    return "ok"


def steps(pair: Pair, budget: Budget) -> Iterator[str]:
    """Do all that may be done with the answer of a pair, and yield what each step ends in."""
    local, sources = pair
    offers = [encode(member) for member in sources]
    del sources
    yield f"{sum(map(len, offers)):8} bytes"
    budget.spend(sum(map(len, offers)), "bytes of offers", MESSAGE_BYTES, "open offers")
    remotes = list[Worker]()
    yield outcome(lambda: remotes.extend(map(decode, offers)))
    plans = list[TransferPlan]()
    if remotes:
        yield outcome(lambda: plans.append(plan_reads(local, remotes, budget=budget)))
    for plan in plans:
        yield outcome(plan.cost)
        yield outcome(lambda: choose(staged_region(local), remotes, tokens=1024, staging="staging", budget=budget))


def measure(case: str) -> None:
    """Print one line: the size of an answer, and what each step ends in, its CPU seconds and the peak of memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    try:
        pair = CASES[case]()
    except KVPlanError as error:
        print(f"{case}: {error.code} when it is described")
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    print(f"{case}:", end="")
    budget = Budget()
    for end in steps(pair, budget):
        now = time.process_time()
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (1 << 10)
        print(f" {end} {now - start:.2f}s {peak:.0f}M", end=",", flush=True)
        start = now
    print(f" {budget.num_spent / (1 << 20):.0f}M spent")


CASES = {case.__name__: case for case in HOSTILE} | REAL


def main() -> None:
    for case in sys.argv[1:] or CASES:
        process = Process(target=measure, args=(case,))
        process.start()
        process.join()
        if process.exitcode:
            print(f" ended by signal {-process.exitcode}")


if __name__ == "__main__":
    main()
