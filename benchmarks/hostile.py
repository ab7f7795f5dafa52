"""Hostile offers: small messages that ask for as much planning as they can.

    python -m benchmarks.hostile

For each pair of offers this prints their size, and CPU seconds and peak memory of everything that a worker does with
them: decode, plan, certify, count the cost, and bind two blocks. Each pair runs in a process of its own. Errors are
shown with their code; any other exception stops the benchmark.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain

from kvplan import (
    Axis,
    Blocks,
    Context,
    Group,
    KVPlanError,
    Model,
    Region,
    View,
    Worker,
    certify,
    decode,
    encode,
    plan_reads,
)

Pair = tuple[Worker, Sequence[Worker]]
OneView = tuple[str, Group, Sequence[Axis], int, int]
"""A tensor's name and group, axes, number of blocks and block stride."""


def worker(engine: str, views: Iterable[OneView]) -> Worker:
    """Return a worker with each view in a region of its own."""
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
    """Return the axes of ``slots`` tokens of four bytes."""
    return [axis("token", slots, stride), axis("dim", 4, 1)]


def layers(
    engine: str, number: int, group: Group, axes: Callable[[int], Sequence[Axis]], stride: int = 1 << 30
) -> Worker:
    return worker(engine, ((f"layers.{i}", group, axes(i), 2, stride) for i in range(number)))


def large_blocks() -> Pair:
    """80 layers, blocks of 1,048,573 and 1,048,571 tokens, five block strides."""
    sides = []
    for engine, slots in (("d", 1048573), ("s", 1048571)):
        group = Group("kv", slots)
        views = ((f"layers.{i}", group, token(slots), 2, (1 << 30) + 4 * (i % 5)) for i in range(80))
        sides.append(worker(engine, views))
    return sides[0], sides[1:]


def states_in_boxes() -> Pair:
    """A state of three axes, in a thousand boxes along its diagonal."""
    size = 1 << 20
    edge = 997
    state = Group("state")
    whole = [axis(name, size, size**n) for name, n in (("a", 2), ("b", 1), ("c", 0))]
    boxes = list[OneView]()
    for start in range(0, 1000 * 1000, 1000):
        box = [Axis(name, start, start + edge, size, edge**n) for name, n in (("a", 2), ("b", 1), ("c", 0))]
        boxes.append(("t", state, box, 1, 0))
    return worker("d", [("t", state, whole, 1, 0)]), [worker("s", boxes)]


def long_cycle() -> Pair:
    """Contexts of 1024 ranks at an interleave of 1024."""
    group = Group("kv", 16, Context(0, 1024, 1024))
    return layers("d", 8, group, lambda i: token(16, 4 + 4 * i)), [
        layers("s", 8, group, lambda i: token(16, 4 + 4 * i))
    ]


def many_contexts() -> Pair:
    """250 ranks' positions of one tensor on one side, 256 on the other."""
    sides = []
    for engine, ranks in (("d", 250), ("s", 256)):
        groups = [Group(f"g{rank}", 16, Context(rank, ranks)) for rank in range(ranks)]
        sides.append(worker(engine, (("t", group, token(16), 4, 1 << 20) for group in groups)))
    return sides[0], sides[1:]


def missing_comb() -> Pair:
    """A source that has every other one of half a million coordinates."""
    state = Group("state")
    half = 1 << 18
    comb = [axis("a", half, 2), Axis("a", 0, 1, 2, 1)]
    return worker("d", [("t", state, [axis("a", 2 * half, 1)], 1, 0)]), [worker("s", [("t", state, comb, 1, 0)])]


def missing_halves() -> Pair:
    """A thousand tensors with long names and different sizes, of which the source has four bytes each."""
    state = Group("state")
    names = ["x" * 240 + f".{i}" for i in range(1000)]
    whole = worker("d", ((name, state, [axis("a", 8 + i, 1)], 1, 0) for i, name in enumerate(names)))
    return whole, [worker("s", ((name, state, [Axis("a", 0, 4, 8 + i, 1)], 1, 0) for i, name in enumerate(names)))]


def bytes_apart() -> Pair:
    """80 layers whose tokens are 65,536 bytes, next to each other on one side and two apart on the other."""
    size = 1 << 16
    group = Group("kv", 16)

    def side(engine: str, step: int) -> Worker:
        return layers(engine, 80, group, lambda _: [axis("token", 16, size * step), axis("dim", size, step)])

    return side("d", 1), [side("s", 2)]


def many_lengths() -> Pair:
    """500 layers with tokens of 1 to 500 bytes, in blocks of 1021 and 1031 tokens."""

    def side(engine: str, slots: int) -> Worker:
        return layers(engine, 500, Group("kv", slots), lambda i: [axis("token", slots, i + 1), axis("dim", i + 1, 1)])

    return side("d", 1021), [side("s", 1031)]


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


def many_segments() -> Pair:
    """A hundred tensors of 131,072 segments, each with another stride."""
    state = Group("state")
    views = list[OneView]()
    for i in range(100):
        views.append((f"t.{i}", state, [axis("a", 1 << 17, 8 + i), axis("a", 2, 2)], 1, 0))
    return worker("d", views), [worker("s", views)]


def many_holders() -> Pair:
    """A tensor whose bytes a thousand views share in turns."""
    state = Group("state")
    turns = 1 << 10
    views = (("t", state, [axis("a", turns, 1), Axis("a", i, i + 1, 4096, 1)], 1, 0) for i in range(1000))
    return worker("d", [("t", state, [axis("a", turns * 4096, 1)], 1, 0)]), [worker("s", views)]


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


def shared_pool() -> Pair:
    """250 groups, each of which shares bytes with each other one."""

    def side(engine: str) -> Worker:
        groups = [Group(f"g{i}", 16) for i in range(250)]
        views = [View(f"t.{i}", group, "pool", "uint8", token(16), 4, 64) for i, group in enumerate(groups)]
        return Worker(engine, 0, [Region("pool", 0, 4 * 64)], groups, views)

    return side("d"), [side("s")]


def long_interleave() -> Pair:
    """Contexts of 7 and 5 ranks in turns of 4093 and 4091 tokens, in blocks of 4096 and 4095."""

    def side(engine: str, slots: int, context: Context) -> Worker:
        return layers(engine, 80, Group("kv", slots, context), lambda _: token(slots))

    return side("d", 4096, Context(0, 7, 4093)), [side("s", 4095, Context(0, 5, 4091))]


def unrelated_combs() -> Pair:
    """A state of which the destination has every second coordinate and the source every third one."""
    state = Group("state")
    size = 3 << 18

    def side(engine: str, step: int) -> Worker:
        axes = [axis("a", size // step, 1), Axis("a", 0, 1, step, 1)]
        return worker(engine, [("t", state, axes, 1, 0)])

    return side("d", 2), [side("s", 3)]


def endless_pools() -> Pair:
    """A thousand layers with pools of 2**30 blocks of one byte."""
    state = Group("state")
    views = [(f"t.{i}", state, [axis("a", 1, 0)], 1 << 30, 1) for i in range(1000)]
    return worker("d", views), [worker("s", views)]


def reversed_axes() -> Pair:
    """A state of 16 axes of two coordinates each in a thousand tensors, in opposite order on the two sides."""
    state = Group("state")
    names = [f"a{i}" for i in range(16)]

    def side(engine: str, order: Sequence[str]) -> Worker:
        axes = [axis(name, 2, 1 << i) for i, name in enumerate(order)]
        return worker(engine, ((f"t.{i}", state, axes, 2, 1 << 20) for i in range(1000)))

    return side("d", names), [side("s", names[::-1])]


def many_geometries() -> Pair:
    """A thousand tensors of sizes of their own, each in two halves at a thousand strides."""
    state = Group("state")

    def side(engine: str, gap: int) -> Worker:
        views = ((f"t.{i}", state, [axis("b", 2, 5000 + gap), axis("a", 8 + i, 1)], 4, 20000) for i in range(1000))
        return worker(engine, views)

    return side("d", 0), [side("s", 1)]


def many_ranks() -> Pair:
    """300 source workers that hold 300 heads, each worker all of them but one."""
    state = Group("state")
    number = 300
    whole = worker("d", [("t", state, [axis("head", number, 1)], 1, 0)])
    ranks = list[Worker]()
    for rank in range(number):
        parts = [part for part in ((0, rank), (rank + 1, number)) if part[0] < part[1]]
        source = worker("s", (("t", state, [Axis("head", *part, number, 1)], 1, 0) for part in parts))
        ranks.append(Worker("s", rank, source.regions, source.groups, source.views))
    return whole, ranks


def scattered_tokens() -> Pair:
    """Token axes of 15 digits of two, in opposite order on the two sides."""

    def side(engine: str, order: Sequence[int]) -> Worker:
        axes = [axis("token", 2, 4 << i) for i in order]
        return layers(engine, 1, Group("kv", 1 << 15), lambda _: [*axes, axis("dim", 4, 1)])

    return side("d", range(15)), [side("s", range(15)[::-1])]


def many_spans() -> Pair:
    """1000 layers whose blocks of 1021 and 1019 tokens begin at different offsets in each layer."""

    def side(engine: str, slots: int, step: int) -> Worker:
        axes = [axis("token", slots, 8), axis("dim", 8, 1)]
        return worker(engine, ((f"l.{i}", Group("kv", slots), axes, 2, 9000 + step * i) for i in range(1000)))

    return side("d", 1021, 8), [side("s", 1019, 16)]


def all_names() -> Pair:
    """4000 tensors that the source lacks, with names of 240 characters."""
    state = Group("state")

    def side(engine: str, name: str) -> Worker:
        views = ((name * 240 + f".{i}", state, [axis("a", 8, 1)], 1, 0) for i in range(4000))
        return worker(engine, views)

    return side("d", "x"), [side("s", "y")]


def real() -> Pair:
    """For comparison: Nemotron-H 8B from TP 2 to TP 1, convolution states in the other order of their axes."""
    model = Model.shipped("nemotron-h-8b")
    (decoder,) = model.engine("decode", num_blocks=100, conv_order="SD")
    return decoder, model.engine("prefill", tp=2, num_blocks=100)


PAIRS = (
    real,
    large_blocks,
    states_in_boxes,
    long_cycle,
    many_contexts,
    missing_comb,
    missing_halves,
    bytes_apart,
    many_lengths,
    many_groups,
    many_rows,
    many_segments,
    many_holders,
    transposed,
    coprime_blocks,
    shared_pool,
    long_interleave,
    unrelated_combs,
    endless_pools,
    reversed_axes,
    many_geometries,
    many_ranks,
    scattered_tokens,
    many_spans,
    all_names,
)


def measured(pair: Callable[[], Pair]) -> str:
    """Return one line: what happened to a pair, its cost, and what it is."""
    outcomes = list[str]()
    sent_bytes = 0
    start = time.process_time()
    try:
        destination, sources = pair()
        offers = [encode(member) for member in (destination, *sources)]
        sent_bytes = sum(map(len, offers[1:]))
        destination, *sources = map(decode, offers)
        plan = plan_reads(destination, sources)
        outcomes.append("planned")
        local = two_blocks([destination])
        remote = two_blocks(sources)
        for step in (lambda: certify(plan), plan.cost, lambda: plan.bind(local=local, remote=remote)):
            try:
                step()
            except KVPlanError as error:
                outcomes.append(error.code)
    except KVPlanError as error:
        outcomes.append(f"{error.code}, {len(str(error))} characters")
    seconds = time.process_time() - start
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    return f"{sent_bytes:7} bytes {seconds:6.2f} s {peak_gib:5.2f} GiB  {' '.join(outcomes):22} {pair.__doc__}"


def two_blocks(workers: Iterable[Worker]) -> dict[str, Blocks]:
    """Return tables of two blocks for all groups of some workers."""
    groups = chain.from_iterable(member.groups for member in workers)
    return {group.name: Blocks([0, 1]) for group in groups}


def main() -> None:
    with ProcessPoolExecutor(max_workers=1, max_tasks_per_child=1) as pool:
        for line in pool.map(measured, PAIRS):
            print(line, flush=True)


if __name__ == "__main__":
    main()
