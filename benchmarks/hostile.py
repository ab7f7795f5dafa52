"""Hostile offers: small answers that ask for as much work as they can, beside real ones.

    python -m benchmarks.hostile [CASE ...]

For each case this prints the bytes of the answer, and how many CPU seconds and how much memory a worker needs for all
that it may do with it in one budget: decode, plan, count the cost, certify, choose a strategy, explain and show. Each
case runs in a process of its own. Errors are shown with their code; any other exception is a fault.
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
    explain,
    plan_reads,
    show,
)
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


def answer(engine: str, workers: Iterable[Worker]) -> list[Worker]:
    """Return workers as the ranks of one engine."""
    return [attrs.evolve(member, engine_id=engine, rank=rank) for rank, member in enumerate(workers)]


def scattered_heads(engine: str, slots: int, heads: range, number: int, gap: int) -> Worker:
    """Return a worker with some of eight heads of 32 layers, whose tokens are ``gap`` bytes apart."""
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


def half_on_both_sides() -> Pair:
    """Both sides have half of the slots that one may have."""
    return scattered_heads("d", 1 << 14, range(8), 32, 2), [scattered_heads("s", 1 << 14, range(8), 32, 1)]


def many_states() -> Pair:
    """A state of 1,048,576 runs of one byte, which step differently on the two sides."""
    state = Group("state")

    def side(engine: str, step: int) -> Worker:
        axes = [axis("a", 1 << 10, step << 10), axis("b", 1 << 10, step)]
        return worker(engine, ((f"t.{i}", state, axes, 2, 1 << 24) for i in range(2)))

    return side("d", 2), [side("s", 3)]


def long_period() -> Pair:
    """Twenty layers with blocks of 1,021 and 1,019 tokens, whose period is a million positions."""

    def side(engine: str, slots: int) -> Worker:
        return layers(engine, 20, Group("kv", slots), lambda _: token(slots))

    return side("d", 1021), [side("s", 1019)]


def long_period_of_groups() -> Pair:
    """64 groups with a period of 300,000 positions each."""

    def side(engine: str, slots: int) -> Worker:
        views = ((f"t.{i}", Group(f"g{i}", slots + i), token(slots + i), 2, 1 << 30) for i in range(64))
        return worker(engine, views)

    return side("d", 509), [side("s", 613)]


def replicas() -> Pair:
    """Ten thousand workers, each with the whole of one tensor."""
    state = Group("state")
    whole = worker("d", [("t", state, [axis("a", 8, 1)], 1, 0)])
    return whole, answer("s", [whole] * 10_000)


def strangers() -> Pair:
    """Ten thousand workers with tensors of their own, which nobody needs."""
    state = Group("state")
    whole = worker("d", [("t", state, [axis("a", 8, 1)], 1, 0)])
    others = [worker("s", [(f"t.{i}", state, [axis("a", 8, 1)], 1, 0)]) for i in range(10_000)]
    return whole, answer("s", [whole, *others])


def unlike_replicas() -> Pair:
    """Three thousand workers that hold one tensor, each in another geometry and beside another one."""
    state = Group("state")
    whole = worker("d", [("t", state, [axis("a", 2, 1)], 1, 0)])
    others = []
    for i in range(3000):
        views = [("t", state, [axis("a", 2, 1 + i)], 1, 0), (f"other.{i}", state, [axis("a", 2, 1)], 1, 0)]
        others.append(worker("s", views))
    return whole, answer("s", others)


def rings() -> Pair:
    """Two thousand parts of a tensor, each on two of two thousand workers."""
    state = Group("state")
    number = 2000
    whole = worker("d", [("t", state, [axis("a", number, 1)], 1, 0)])
    sources = [worker("s", [("t", state, [Axis("a", i, i + 2, number, 1)], 1, 0)]) for i in range(number - 1)]
    return whole, answer("s", sources)


def two_ways_of_parts() -> Pair:
    """A tensor of two axes, cut into 120 times 120 cells by a worker for each row and each column."""
    state = Group("state")
    number = 120
    whole = worker("d", [("t", state, [axis("a", number, number), axis("b", number, 1)], 1, 0)])
    sources = []
    for i in range(number):
        row = [Axis("a", i, i + 1, number, number), axis("b", number, 1)]
        column = [axis("a", number, number), Axis("b", i, i + 1, number, 1)]
        sources += [worker("s", [("t", state, axes, 1, 0)]) for axes in (row, column)]
    return whole, answer("s", sources)


def overlaid_groups() -> Pair:
    """250 groups of sixteen views, which share all bytes."""

    def side(engine: str) -> Worker:
        groups = [Group(f"g{i}", 16) for i in range(250)]
        views = []
        for i, group in enumerate(groups):
            views += [View(f"t.{i}.{j}", group, "pool", "uint8", token(16), 4, 1024, 64 * j) for j in range(16)]
        return Worker(engine, 0, [Region("pool", 0, 4 * 1024)], groups, views)

    return side("d"), [side("s")]


def steps_of_fibonacci() -> Pair:
    """Two views between whose blocks the search for a shared byte takes longest."""
    fibonacci = [1, 1]
    while fibonacci[-1] < 1 << 60:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    group = Group("kv", 4)
    views = []
    for i, stride in enumerate(fibonacci[58:60]):
        views.append(
            View(f"v{i}", group, "r", "uint8", [axis("token", 4, 1), axis("x", 32, 12)], 1 << 20, stride, 4 * i)
        )
    return worker("d", []), [Worker("s", 0, [Region("r", 0, 1 << 62)], [group], views)]


def many_positions() -> Pair:
    """Contexts of 1,021 and 1,019 ranks, of which every pair shares few positions."""

    def side(engine: str, size: int) -> Worker:
        return layers(engine, 8, Group("kv", 16, Context(0, size)), lambda _: token(16))

    return side("d", 1021), [side("s", 1019)]


def many_cells_missing() -> Pair:
    """16,000 cells of a tensor, none of which has a holder but one."""
    state = Group("state")
    number = 126
    whole = worker("d", [("t", state, [axis("a", number, number), axis("b", number, 1)], 1, 0)])
    sources = []
    for i in range(number):
        box = [Axis("a", i, i + 1, number, number), Axis("b", i, i + 1, number, 1)]
        sources.append(worker("s", [("t", state, box, 1, 0)]))
    return whole, answer("s", sources)


def many_digits() -> Pair:
    """An axis of twenty digits, each of two coordinates with a gap."""
    state = Group("state")

    def side(engine: str, order: Iterable[int]) -> Worker:
        return worker(engine, [("t", state, [axis("a", 2, 2 << i) for i in order], 1, 0)])

    return side("d", range(15)), [side("s", reversed(range(15)))]


def real_pair(
    model: Model | str, decode_sizes: dict[str, object], prefill_sizes: dict[str, object], rank: int = 0
) -> Pair:
    known = Model.shipped(model) if isinstance(model, str) else model
    decoder = known.engine("decode", num_blocks=1000, **decode_sizes)[rank]  # type: ignore[arg-type]
    return decoder, known.engine("prefill", num_blocks=1000, **prefill_sizes)  # type: ignore[arg-type]


DEEP_HYBRID = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": 4 * "M-M-M-M*M-M-M-M*",
    "num_hidden_layers": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}

REAL: dict[str, Callable[[], Pair]] = {
    "Llama 3.1 8B, TP 2 to 1": partial(real_pair, "llama-3.1-8b", {}, {"tp": 2}),
    "Llama 3.1 70B, TP 8 to 1, BLHNC, 16 to 64 tokens": partial(
        real_pair, "llama-3.1-70b", {"tokens_per_block": 64, "layout": "BLHNC"}, {"tp": 8}
    ),
    "Llama 3.1 70B, heads and tokens swapped, 256 tokens": partial(
        real_pair,
        "llama-3.1-70b",
        {"layout": "LBHNC", "tokens_per_block": 256},
        {"layout": "LBNHC", "tokens_per_block": 256},
    ),
    "DeepSeek V3, DCP 8 to 1": partial(real_pair, "deepseek-v3", {"tp": 8}, {"tp": 8, "dcp": 8}),
    "Qwen3 235B A22B, TP 16 to 4": partial(real_pair, "qwen3-235b-a22b", {"tp": 4}, {"tp": 16}),
    "Gemma 3 27B, TP 1 to 4, 16 to 32 tokens": partial(real_pair, "gemma-3-27b", {"tp": 4, "tokens_per_block": 32}, {}),
    "GPT-OSS 120B, PP 4 to TP 2": partial(real_pair, "gpt-oss-120b", {"tp": 2}, {"pp": 4}),
    "Nemotron-H 8B, TP 2 to 1, convolutions reordered": partial(
        real_pair, "nemotron-h-8b", {"conv_order": "SD"}, {"tp": 2}
    ),
    "Falcon-Mamba 7B, convolutions reordered": partial(real_pair, "falcon-mamba-7b", {"conv_order": "SD"}, {"tp": 2}),
    "64 layers of a hybrid, 512 to 400 tokens, convolutions reordered": partial(
        real_pair,
        Model.from_config(DEEP_HYBRID),
        {"tokens_per_block": 400, "conv_order": "SD"},
        {"tokens_per_block": 512},
    ),
}
"""Pairs of engines as they are deployed, for comparison."""

HOSTILE = (
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
    long_blocks,
    long_blocks_of_sixteen,
    half_on_both_sides,
    many_states,
    long_period,
    long_period_of_groups,
    replicas,
    strangers,
    unlike_replicas,
    rings,
    two_ways_of_parts,
    overlaid_groups,
    steps_of_fibonacci,
    many_positions,
    many_cells_missing,
    many_digits,
)


def staged_region(local: Worker) -> Worker:
    """Return a worker with a region for staging, behind all others."""
    end = max((region.end for region in local.regions), default=0)
    return attrs.evolve(local, regions=(*local.regions, Region("staging", end + 4096, 256 << 20)))


def uses(local: Worker, remotes: Sequence[Worker], plan: TransferPlan) -> dict[str, Callable[[], object]]:
    """Return what may be done with a plan, by name."""
    return {
        "cost": plan.cost,
        "certify": lambda: certify(plan),
        "choose": lambda: choose(staged_region(local), remotes, tokens=1024, staging="staging"),
        "explain": lambda: explain(plan, detail="rows"),
        "show": lambda: show(plan),
    }


def outcome(action: Callable[[], object]) -> str:
    """Return what an action ends in: ``ok``, or a code."""
    try:
        action()
    except KVPlanError as error:
        return error.code
    except (MemoryError, ArithmeticError, LookupError) as error:
        return type(error).__name__
    return "ok"


def steps(pair: Pair) -> Iterator[str]:
    """Do all that may be done with the answer of a pair, and yield what each step ends in."""
    local, sources = pair
    offers = [encode(member) for member in sources]
    del sources
    yield f"{sum(map(len, offers)):8} bytes"
    remotes = list[Worker]()
    yield outcome(lambda: remotes.extend(map(decode, offers)))
    plans = list[TransferPlan]()
    if remotes:
        yield outcome(lambda: plans.append(plan_reads(local, remotes)))
    for plan in plans:
        for use in uses(local, remotes, plan).values():
            yield outcome(use)


def measure(case: str) -> None:
    """Print one line: the size of an answer, and what each step ends in, its CPU seconds and the peak of memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    try:
        pair = CASES[case]()
    except KVPlanError as error:
        print(f"{case}: {error.code} for whoever describes it")
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    print(f"{case}:", end="")
    with Budget() as budget:
        for end in steps(pair):
            now = time.process_time()
            peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (1 << 10)
            print(f" {end} {now - start:.2f}s {peak:.0f}M", end=",", flush=True)
            start = now
    print(f" {budget.num_taken / (1 << 20):.0f}M taken")


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
