"""Hypothesis strategies of engines and requests, for which the extra ``testing`` brings Hypothesis.

:func:`requests` draws ranges of positions for two given engines, in blocks scattered over their pools. :func:`cases`
draws the engines too: any two that can serve each other. Its choices are small integers of which 0 is always the
plainest, so that a failure shrinks to plain layouts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import attrs

from kvplan.describe import Blocks, Context, Group, Request, Worker
from kvplan.describe.blocks import Range, Tokens
from kvplan.plan import TransferPlan, plan_reads, plan_writes
from kvplan.testing import engines
from kvplan.testing.engines import (
    BOTH,
    DESTINATION,
    EXCLUDED,
    POOL,
    SOURCE,
    EngineDesign,
    LogicalTensor,
    StoredTensor,
)

if find_spec("hypothesis") is None:
    raise ImportError("kvplan.testing.strategies needs hypothesis: pip install hypothesis")

from hypothesis import strategies as st

__all__ = ["Case", "cases", "requests"]


GroupPools = Mapping[str, tuple[list[Group], int]]
"""By group: the group as the workers of an engine have it, and the number of blocks of the smallest pool."""


def _pools(workers: Iterable[Worker]) -> GroupPools:
    found: dict[str, list[tuple[Group, int]]] = {}
    for worker in workers:
        groups = {group.name: group for group in worker.groups}
        for view in worker.views:
            found.setdefault(view.group, []).append((groups[view.group], view.num_blocks))
    return {
        name: (list(dict.fromkeys(group for group, _ in each)), min(blocks for _, blocks in each))
        for name, each in found.items()
    }


def _is_paged(ranks: Sequence[Group]) -> bool:
    return ranks[0].tokens_per_block is not None


def _ordinals(
    pools: GroupPools, span: tuple[int, int], states: tuple[int, int]
) -> dict[str, range]:
    """The blocks of each group that hold positions of a span, or states."""
    return {
        name: engines.ordinals_of(ranks, *(span if _is_paged(ranks) else states))
        for name, (ranks, _) in pools.items()
    }


def _fits(pools: GroupPools, ordinals: Mapping[str, range]) -> bool:
    """Whether no group lists more than its part of its pool, as if all groups shared one pool."""
    return all(len(ordinals[name]) <= blocks // len(pools) for name, (_, blocks) in pools.items())


def _scattered(pools: GroupPools, ordinals: Mapping[str, range], seed: int) -> dict[str, Blocks]:
    """A block table for each group, with blocks of its own, in random order, or with seed 0 in order."""
    taken: set[int] = set()
    tables = {}
    for name, (_, blocks) in sorted(pools.items(), key=lambda item: item[1][1]):
        count = len(ordinals[name]) + len(taken)
        drawn = random.Random(seed).sample(range(blocks), count) if seed else range(count)
        ids = [block for block in drawn if block not in taken][: len(ordinals[name])]
        taken.update(ids)
        tables[name] = Blocks(ids, first=ordinals[name].start)
    return tables


@st.composite
def requests(
    draw: st.DrawFn,
    destinations: Sequence[Worker],
    sources: Sequence[Worker],
    operation: Literal["READ", "WRITE"] = "READ",
    max_tokens: int = 100,
    min_tokens: int = 1,
) -> Request:
    """A request that both engines have blocks for: the arguments of ``bind``, ``verify`` and ``assert_copies``.

    It is a range of ``min_tokens`` to ``max_tokens`` positions, or fewer where a pool has too few blocks, and up to
    three states in each state group. With ``min_tokens=0`` some ranges are empty. Local tables are those of the
    destinations, and for a ``WRITE`` those of the sources.

    >>> from hypothesis import given, settings
    >>> from kvplan import Model, plan_mesh, verify
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> decode, prefill = model.engine("decode", tokens_per_block=24), model.engine("prefill", tp=2, layout="BHLNC")
    >>> plans = plan_mesh(decode, prefill)
    >>> @settings(max_examples=3, deadline=None)
    ... @given(requests(decode, prefill))
    ... def test(request):
    ...     assert verify(plans, **request)
    >>> test()
    """
    ours, theirs = _pools(destinations), _pools(sources)
    start, length = draw(st.integers(0, max_tokens)), draw(st.integers(min_tokens, max_tokens))
    first, count = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    seeds = draw(st.tuples(*2 * [st.integers(0, 255)]))
    while True:
        span, states = (start, start + length), (first, first + count)
        into = _ordinals(ours, span, states)
        out_of = _ordinals(theirs, span, states)
        if _fits(ours, into) and _fits(theirs, out_of):
            break
        length, count = length // 2, count // 2
    tables = _scattered(ours, into, seeds[0]), _scattered(theirs, out_of, seeds[1])
    local, remote = tables if operation == "READ" else tables[::-1]
    return {"local": local, "remote": remote, "tokens": span}


SHAPES = (
    *((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (1, 3, 1), (1, 1, 3)),
    *((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (3, 2, 1), (2, 3, 1)),
)
"""Tensor, context and pipeline parallel sizes."""

DTYPES = ("uint8", "bfloat16", "uint8", "float32")
ALONG = ("", "kv", "head", "dim")
NUM_CHOICES = 4 * 6 + 4 + 2 * (6 + 6 + 3 * 3 + 4 * 6 + 4) + 1 + 5 * 3 + 2 * 5 * 4
"""How many choices make a case. Every case makes all of them, so that each has a fixed place among the drawn bytes."""

NAMES = ("full", "window", "chunk", "ssm", "conv")
"""Names of three token groups and two state groups, which an engine may permute."""


@attrs.frozen
class Case:
    """Two engines and a request. Of two values for both engines, the destination's is first.

    ``tables`` are block tables by group, ``designs`` the designs of the engines. ``spans`` has for each tensor that
    moves its range of positions or states, None for all that the destination lists; ``tokens`` has the ranges by the
    groups of that engine, for plans where it is local.
    """

    destinations: tuple[Worker, ...]
    sources: tuple[Worker, ...]
    tables: tuple[Mapping[str, Blocks], Mapping[str, Blocks]]
    spans: tuple[Mapping[str, Range | None], Mapping[str, Range | None]]
    tokens: tuple[Tokens, Tokens]
    not_transferred: tuple[str, ...]
    designs: tuple[EngineDesign, EngineDesign]

    def reads(self, worker: Worker) -> TransferPlan:
        """The plan by which one destination reads."""
        return plan_reads(worker, self.sources, not_transferred=self.not_transferred)

    def writes(self, source: Worker) -> TransferPlan:
        """The plan by which one source writes its part."""
        siblings = [other for other in self.sources if other is not source]
        return plan_writes(
            source, self.destinations, siblings, not_transferred=self.not_transferred
        )

    def arguments(self, operation: Literal["READ", "WRITE"] = "READ") -> dict[str, Any]:
        """The arguments of :func:`~kvplan.testing.assert_copies` besides engines and copies."""
        near = 0 if operation == "READ" else 1
        tables = {
            "local": self.tables[near],
            "remote": self.tables[1 - near],
            "tokens": self.tokens[near],
        }
        return {**tables, "operation": operation, "not_transferred": self.not_transferred}

    def request(self, plan: TransferPlan) -> Request:
        """The arguments of ``plan.bind``: the block tables and ranges of the groups that its workers have."""
        side = 0 if plan.operation == "READ" else 1
        tokens, own, theirs = self.tokens[side], _groups([plan.local]), _groups(plan.remotes)
        if isinstance(tokens, Mapping):
            tokens = {name: span for name, span in tokens.items() if name in own}
        return {
            "local": {name: blocks for name, blocks in self.tables[side].items() if name in own},
            "remote": {
                name: blocks for name, blocks in self.tables[1 - side].items() if name in theirs
            },
            "tokens": tokens,
        }


def _groups(workers: Iterable[Worker]) -> set[str]:
    return {group.name for worker in workers for group in worker.groups}


class Choices:
    """Choices, each made by one drawn byte."""

    def __init__(self, drawn: bytes) -> None:
        self._bytes = iter(drawn)

    def below(self, *radices: int) -> list[int]:
        """A number below each radix, which is at most 256."""
        return [next(self._bytes) * radix // 256 for radix in radices]

    @property
    def all_made(self) -> bool:
        """Whether no byte is left."""
        return next(self._bytes, None) is None


def cases() -> st.SearchStrategy[Case]:
    """Any two engines that can serve each other, and any request: for code that takes any :class:`kvplan.Worker`.

    Engines have up to four tensors in token groups or state groups, with axes in any order, gaps and digits; tensor,
    context and pipeline parallel sizes up to 4, so that several ranks may hold a head; blocks of 1 to 6 tokens; regions
    and pools that are separate or shared, anywhere in memory; tensors that one engine lacks. Requests have scattered
    blocks and any ranges.

    >>> from hypothesis import given, settings
    >>> from kvplan.testing import assert_copies
    >>> @settings(max_examples=3, deadline=None)
    ... @given(cases())
    ... def test(case):
    ...     copies = {}
    ...     for plan in map(case.reads, case.destinations):  # in place of this, your own planner
    ...         for spec in plan.bind(**case.request(plan)):
    ...             copies[spec.local, spec.remote] = spec.descriptors()
    ...     assert_copies(case.destinations, case.sources, copies, **case.arguments())
    >>> test()

    All choices are drawn as one string of bytes, because Hypothesis draws small integers far more often than others.
    """
    return st.binary(min_size=NUM_CHOICES, max_size=NUM_CHOICES).map(case_of)


def case_of(drawn: bytes) -> Case:
    """The case that a string of bytes chooses."""
    choices = Choices(drawn)
    tensors = _tensors(choices)
    decode, prefill = (
        _design("decode", tensors, SOURCE, choices),
        _design("prefill", tensors, DESTINATION, choices),
    )
    moved = {tensor.name for tensor in tensors if tensor.engines == BOTH}
    ours, theirs = (
        {
            stored.tensor.name: stored.group
            for stored in design.tensors
            if stored.tensor.name in moved
        }
        for design in (decode, prefill)
    )
    as_one, asked = _ranges(decode.groups, choices)
    near = {
        name: None if asked[group.name][1] else asked[group.name][0] for name, group in ours.items()
    }
    far = {
        name: _joined([near[other] for other in theirs if theirs[other] == group])
        for name, group in theirs.items()
    }
    one = next((near[name] for name, group in ours.items() if group.tokens_per_block), None)
    tokens = [one if as_one else _by_group(*side) for side in ((near, ours), (far, theirs))]

    wanted: dict[str, list[Range]] = {name: [span] for name, (span, _) in asked.items()}
    for tensor, span in far.items():
        wanted[ours[tensor].name] += [span] if span else []
    local = _tables(decode, wanted, choices)
    wanted = {name: [] for name in prefill.groups}
    for tensor, span in far.items():
        wanted[theirs[tensor].name].append(span or _held(ours[tensor], local[ours[tensor].name]))
    remote = _tables(prefill, wanted, choices)
    assert choices.all_made
    return Case(
        destinations=engines.workers(decode, local),
        sources=engines.workers(prefill, remote),
        tables=(local, remote),
        spans=(near, far),
        tokens=(tokens[0], tokens[1]),
        not_transferred=tuple(
            tensor.name for tensor in tensors if tensor.engines in (DESTINATION, EXCLUDED)
        ),
        designs=(decode, prefill),
    )


def _held(group: Group, blocks: Blocks) -> Range:
    """The positions between the first and the last that a block table holds on any rank."""
    held = engines.positions_of(
        engines.on_ranks(group), range(blocks.first, blocks.first + len(blocks.ids))
    )
    return held.start, held.stop


def _hull(spans: Sequence[Range]) -> Range:
    return min(start for start, _ in spans), max(stop for _, stop in spans)


def _joined(spans: Sequence[Range | None]) -> Range | None:
    """One range around several, or None where one of them is None."""
    known = [span for span in spans if span is not None]
    return _hull(known) if len(known) == len(spans) else None


def _by_group(spans: Mapping[str, Range | None], groups: Mapping[str, Group]) -> dict[str, Range]:
    """The ranges of tensors, by group."""
    return {groups[name].name: span for name, span in spans.items() if span is not None}


def _logical(index: int, choices: Choices) -> LogicalTensor:
    dim, heads, kv, dtype, kind, held_by = choices.below(5, 8, 2, 4, 8, 16)
    sizes = {} if dim == 4 else {"dim": (1, 2, 4, 3)[dim]}
    if heads:
        sizes["head"] = max(heads - 1, 1)
    if kv:
        sizes["kv"] = 2
    return LogicalTensor(
        name=f"layers.{index}",
        paged=kind < 6,
        sizes=sizes,
        dtype=DTYPES[dtype] if "dim" in sizes else "float32",
        kind=kind % 3,
        engines=(*13 * [BOTH], DESTINATION, SOURCE, EXCLUDED)[held_by],
    )


def _tensors(choices: Choices) -> list[LogicalTensor]:
    """Up to four tensors, often of one shape, as layers have."""
    drawn = [_logical(index, choices) for index in range(4)]
    count, *unlike = choices.below(7, 2, 2, 2)
    for index, own in enumerate(unlike, 1):
        if not own:
            drawn[index] = attrs.evolve(drawn[index], sizes=drawn[0].sizes, dtype=drawn[0].dtype)
    return drawn[: (1, 2, 3, 3, 4, 4, 4)[count]]


def _design(
    engine_id: str, tensors: Sequence[LogicalTensor], lacking: int, choices: Choices
) -> EngineDesign:
    """An engine that has all tensors but those of ``lacking`` engines alone, from any of them on."""
    shape, regroup, renamed, turn, unlike, pools = choices.below(len(SHAPES), 5, 6, 4, 5, 2)
    packing, digits, gap, base, devices, extra_blocks = choices.below(4, 2, 2, 4, 2, 4)
    tp, cp, pp = SHAPES[shape]
    groups = _groups_of(engine_id, cp, renamed, unlike in (0, 1), choices)
    ways = [choices.below(4, 24, 30, 81, 4, 8) for _ in range(4)]
    stages = choices.below(*4 * [pp])
    stored = []
    for index, stage in enumerate(stages):
        at = (index + turn) % 4
        if at >= len(tensors) or tensors[at].engines == lacking:
            continue
        kind = (tensors[at].kind, 0, index, tensors[at].kind + index, tensors[at].kind)[regroup]
        first, low, high, pads, split, narrowed = ways[0 if unlike in (0, 2) else index]
        one = StoredTensor(
            tensor=tensors[at],
            group=groups[kind % 3 if tensors[at].paged else 3 + kind % 2],
            stage=stage,
            first_axis=first,
            order=low + 24 * high,
            pads=pads,
            split=ALONG[split],
            narrowed=ALONG[narrowed % 4] if narrowed > 4 and lacking == SOURCE else "",
        )
        stored.append(one)
    memory = packing, bool(digits), gap, base, devices, extra_blocks, not pools
    return EngineDesign(engine_id, tp, cp, pp, tuple(stored), *memory)


def _groups_of(engine_id: str, cp: int, renamed: int, equal: bool, choices: Choices) -> list[Group]:
    """Three token groups, each on all context-parallel ranks or, sometimes, without contexts, and two state groups."""
    names = [
        NAMES[(i + renamed) % 5] if renamed < 5 else f"{engine_id}.{NAMES[i]}" for i in range(5)
    ]
    drawn = [choices.below(6, 3, 4) for _ in range(3)]
    paged = []
    for name, own in zip(names[:3], drawn, strict=True):
        slots, interleave, alone = drawn[0] if equal else own
        paged.append(
            Group(name, slots + 1, Context(0, cp, interleave + 1) if alone < 3 else Context())
        )
    return [*paged, *map(Group, names[3:])]


def _ranges(
    groups: Mapping[str, Group], choices: Choices
) -> tuple[bool, dict[str, tuple[Range, bool]]]:
    """Whether all token groups have one range; and for each group its range, and whether everything moves instead."""
    (as_one,) = choices.below(3)
    drawn = [choices.below(8, 10, 4) for _ in range(5)]
    asked, one = {}, drawn[0]
    for (name, group), own in zip(groups.items(), drawn, strict=False):
        start, count, everything = one if as_one == 0 and group.tokens_per_block else own
        if not group.tokens_per_block:
            start, count = start % 2, count % 3
        states_of_one = as_one == 0 and not group.tokens_per_block
        asked[name] = ((start, start + count), everything == 3 or states_of_one)
    return as_one == 0, asked


def _tables(
    design: EngineDesign, wanted: Mapping[str, Sequence[Range]], choices: Choices
) -> dict[str, Blocks]:
    """A block table for each group that covers its ranges. In a pool of all groups, no block is listed twice."""
    tables, beyond = {}, 0
    drawn = [choices.below(2, 2, 3, 256) for _ in range(5)]
    for (name, group), (before, after, low, seed) in zip(
        design.groups.items(), drawn, strict=False
    ):
        ordinals = engines.ordinals_of(engines.on_ranks(group), *_hull(wanted[name] or [(0, 3)]))
        first = max(0, (ordinals.start if ordinals else low) - before)
        count = (ordinals.stop if ordinals else first) - first + after
        pool = range(beyond, beyond + count + design.extra_blocks)
        tables[name] = Blocks(
            random.Random(seed).sample(pool, count) if seed else list(pool)[:count], first
        )
        if design.packing == POOL:
            beyond = max(beyond, tables[name].highest + 1)
    return tables
