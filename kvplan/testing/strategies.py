"""Hypothesis strategies of engines and requests; the extra ``testing`` brings Hypothesis.

:func:`requests` draws ranges of positions for two given engines, in blocks scattered over their
pools. :func:`cases` draws the engines too: any two that can serve each other. Its choices are small
integers of which 0 is always the plainest, so that a failure shrinks to plain layouts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import attrs

from kvplan._text import brief_repr
from kvplan.describe import Blocks, Context, Group, Request, Worker
from kvplan.describe.blocks import Range, Tokens
from kvplan.plan import TransferPlan, plan_reads, plan_writes
from kvplan.testing import designs
from kvplan.testing.designs import (
    BOTH,
    DESTINATION_ONLY,
    EXCLUDED,
    POOL,
    SOURCE_ONLY,
    EngineDesign,
    LogicalTensor,
    StoredTensor,
)

if find_spec("hypothesis") is None:
    raise ImportError("kvplan.testing.strategies needs hypothesis: pip install hypothesis")

from hypothesis import strategies as st

__all__ = ["Case", "cases", "requests"]


@attrs.define
class GroupPool:
    """A group as the workers of an engine have it, and the blocks of its smallest pool."""

    ranks: list[Group]
    num_blocks: int

    def ordinals(self, span: Range, states: Range) -> range:
        """Return the blocks that hold positions of a span, or states in a state group."""
        return designs.ordinals_of(self.ranks, *(states if self.ranks[0].is_state else span))


def _group_pools(workers: Iterable[Worker]) -> dict[str, GroupPool]:
    pools = dict[str, GroupPool]()
    for worker in workers:
        groups = {group.name: group for group in worker.groups}
        for view in worker.views:
            group = groups[view.group]
            pool = pools.setdefault(group.name, GroupPool([], view.num_blocks))
            # a block id must be valid on every worker
            pool.num_blocks = min(pool.num_blocks, view.num_blocks)
            if group not in pool.ranks:
                pool.ranks.append(group)
    return pools


def _ordinals(pools: Mapping[str, GroupPool], span: Range, states: Range) -> dict[str, range]:
    return {name: pool.ordinals(span, states) for name, pool in pools.items()}


def _has_room(pools: Mapping[str, GroupPool], ordinals: Mapping[str, range]) -> bool:
    """Return whether each group fits into its range of its pool, as if all groups shared one."""
    num_pools = len(pools)
    return all(len(ordinals[name]) <= pool.num_blocks // num_pools for name, pool in pools.items())


def _scatter(
    pools: Mapping[str, GroupPool],
    ordinals: Mapping[str, range],
    seed: int,
) -> dict[str, Blocks]:
    """Return a block table for each group, with no block in two of them.

    They are in random order, or with seed 0 in order.
    """
    used = set[int]()
    tables = {}
    # small pools choose first: large ones find other blocks
    for name, pool in sorted(pools.items(), key=lambda item: item[1].num_blocks):
        num_blocks = len(ordinals[name])
        # other groups may use as many of the drawn blocks as they have
        num_drawn = num_blocks + len(used)
        drawn: Iterable[int] = range(num_drawn)
        if seed:
            drawn = random.Random(seed).sample(range(pool.num_blocks), num_drawn)
        ids = [block for block in drawn if block not in used][:num_blocks]
        used.update(ids)
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
    first: bool = True,
) -> Request:
    """Draw a request that both engines have blocks for.

    It has the arguments of ``bind``, ``verify`` and ``assert_copies``: a range of ``min_tokens`` to
    ``max_tokens`` positions, or fewer where a pool has too few blocks, and up to three states in
    each state group. With ``min_tokens=0`` some ranges are empty. Requests may begin behind blocks
    that both engines have already, so that ``Blocks.first`` is not 0: with ``first=False`` all
    begin at position 0, for connectors that move whole prompts. Local tables are those of the
    destinations, and for a ``WRITE`` those of the sources.

    >>> from hypothesis import given, settings
    >>> from kvplan import Model, plan_mesh, verify
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> decode = model.engine("decode", tokens_per_block=24)
    >>> prefill = model.engine("prefill", tp=2, layout="BHLNC")
    >>> plans = plan_mesh(decode, prefill)
    >>> @settings(max_examples=3, deadline=None)
    ... @given(requests(decode, prefill))
    ... def test(request):
    ...     assert verify(plans, **request)
    >>> test()
    """
    destination_pools = _group_pools(destinations)
    source_pools = _group_pools(sources)
    start = draw(st.integers(0, max_tokens if first else 0))
    length = draw(st.integers(min_tokens, max_tokens))
    first_state = draw(st.integers(0, 2 if first else 0))
    num_states = draw(st.integers(0, 3))
    destination_seed, source_seed = draw(st.tuples(*2 * [st.integers(0, 255)]))
    # halve the request until both pools have room for it
    while True:
        span = (start, start + length)
        states = (first_state, first_state + num_states)
        destination_ordinals = _ordinals(destination_pools, span, states)
        source_ordinals = _ordinals(source_pools, span, states)
        fits = _has_room(destination_pools, destination_ordinals)
        if fits and _has_room(source_pools, source_ordinals):
            break
        length //= 2
        num_states //= 2
    local = _scatter(destination_pools, destination_ordinals, destination_seed)
    remote = _scatter(source_pools, source_ordinals, source_seed)
    if operation == "WRITE":
        local, remote = remote, local
    return {"local": local, "remote": remote, "tokens": span}


SHAPES = (
    *((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (1, 3, 1), (1, 1, 3)),
    *((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (3, 2, 1), (2, 3, 1)),
)
"""Tensor, context and pipeline parallel sizes."""

DTYPES = ("uint8", "bfloat16", "uint8", "float32")
ALONG = ("", "kv", "head", "dim")
NUM_CHOICES = 4 * 6 + 4 + 2 * (6 + 6 + 3 * 3 + 4 * 6 + 4) + 1 + 5 * 3 + 2 * 5 * 4
"""The number of choices of a case.

Every case makes all of them, so that each has a fixed offset in the drawn bytes.
"""

NAMES = ("full", "window", "chunk", "ssm", "conv")
"""Names of three token groups and two state groups, which an engine may permute."""

Groups = Mapping[str, Group]
"""An engine's group of each tensor, by the tensor's name."""


@attrs.frozen
class Case:
    """Two engines and a request. Of two values for both engines, the destination's is first.

    ``tables`` are block tables by group, ``designs`` the designs of the engines. ``spans`` has for
    each tensor that moves its range of positions or states, None for all that the destination
    lists; ``tokens`` has the ranges by the groups of that engine, for plans where it is local.
    """

    destinations: tuple[Worker, ...]
    sources: tuple[Worker, ...]
    tables: tuple[Mapping[str, Blocks], Mapping[str, Blocks]]
    spans: tuple[Mapping[str, Range | None], Mapping[str, Range | None]]
    tokens: tuple[Tokens, Tokens]
    not_transferred: tuple[str, ...]
    designs: tuple[EngineDesign, EngineDesign]

    __repr__ = brief_repr

    def reads(self, worker: Worker) -> TransferPlan:
        """Return the plan by which one destination reads."""
        # another rank may have what is left out
        skipped = [name for name in self.not_transferred if name in worker.tensors]
        return plan_reads(worker, self.sources, not_transferred=skipped)

    def writes(self, source: Worker) -> TransferPlan:
        """Return the plan by which one source writes."""
        # sources that hold the same heads share their writes
        siblings = [worker for worker in self.sources if worker is not source]
        skipped = self.not_transferred
        return plan_writes(source, self.destinations, siblings, not_transferred=skipped)

    def arguments(self, operation: Literal["READ", "WRITE"] = "READ") -> dict[str, Any]:
        """Return the arguments of :func:`~kvplan.testing.assert_copies` for this case.

        Engines and copies are not among them.
        """
        local = 0 if operation == "READ" else 1
        return {
            "local": self.tables[local],
            "remote": self.tables[1 - local],
            "tokens": self.tokens[local],
            "operation": operation,
            "not_transferred": self.not_transferred,
        }

    def request(self, plan: TransferPlan) -> Request:
        """Return the arguments of ``plan.bind``.

        Block tables and ranges are those of the groups that the plan's workers have.
        """
        local = 0 if plan.operation == "READ" else 1
        local_groups = _group_names([plan.local])
        tokens = self.tokens[local]
        # bind refuses names of groups that its workers lack
        if isinstance(tokens, Mapping):
            tokens = _select(tokens, local_groups)
        return {
            "local": _select(self.tables[local], local_groups),
            "remote": _select(self.tables[1 - local], _group_names(plan.remotes)),
            "tokens": tokens,
        }


Drawn = TypeVar("Drawn")


def _select(by_group: Mapping[str, Drawn], names: set[str]) -> dict[str, Drawn]:
    return {name: value for name, value in by_group.items() if name in names}


def _group_names(workers: Iterable[Worker]) -> set[str]:
    names = set[str]()
    for worker in workers:
        names.update(group.name for group in worker.groups)
    return names


class Choices:
    """Choices, each of which takes one drawn byte."""

    def __init__(self, drawn: bytes) -> None:
        self._bytes = iter(drawn)

    def below(self, *radices: int) -> list[int]:
        """Return a number below each radix, which is at most 256."""
        return [next(self._bytes) * radix // 256 for radix in radices]

    def several_below(self, number: int, *radices: int) -> list[list[int]]:
        """Return a list below all radices, ``number`` times."""
        return [self.below(*radices) for _ in range(number)]

    @property
    def are_used_up(self) -> bool:
        """True if no byte is left."""
        return next(self._bytes, None) is None


def cases() -> st.SearchStrategy[Case]:
    """Draw any two engines that can serve each other, and any request.

    They are for code that takes any :class:`kvplan.Worker`.

    Engines have up to four tensors in token groups or state groups, with axes in any order, gaps
    and digits; tensor, context and pipeline parallel sizes up to 4, so that several ranks may hold
    a head; blocks of 1 to 6 tokens; regions and pools that are separate or shared, anywhere in
    memory; tensors that one engine lacks. Requests have scattered blocks and any ranges.

    >>> from hypothesis import given, settings
    >>> from kvplan.testing import assert_copies
    >>> @settings(max_examples=3, deadline=None)
    ... @given(cases())
    ... def test(case):
    ...     copies = {}
    ...     for plan in map(case.reads, case.destinations):  # instead of this, your own planner
    ...         for spec in plan.bind(**case.request(plan)):
    ...             copies[spec.local, spec.remote] = spec.descriptors()
    ...     assert_copies(case.destinations, case.sources, copies, **case.arguments())
    >>> test()

    All choices are drawn as one string of bytes: Hypothesis draws small integers far more often
    than others.
    """
    return st.binary(min_size=NUM_CHOICES, max_size=NUM_CHOICES).map(case_of)


def case_of(drawn: bytes) -> Case:
    """Return the case that a string of bytes chooses."""
    choices = Choices(drawn)
    tensors = _tensors(choices)
    destination = _design("decode", tensors, SOURCE_ONLY, choices)
    source = _design("prefill", tensors, DESTINATION_ONLY, choices)
    moved = {tensor.name for tensor in tensors if tensor.engines == BOTH}
    destination_groups = _groups_of_tensors(destination, moved)
    source_groups = _groups_of_tensors(source, moved)

    # the ranges of the destination's groups, then of tensors, as either engine groups them
    has_one_range = choices.below(3) == [0]
    asked = _group_requests(destination.groups, has_one_range, choices)
    destination_spans = dict[str, Range | None]()
    for name, group in destination_groups.items():
        request = asked[group.name]
        destination_spans[name] = None if request.everything else request.span
    source_spans = _spans_of_groups(destination_spans, source_groups)
    tokens: tuple[Tokens, Tokens] = (
        _spans_by_group(destination_spans, destination_groups),
        _spans_by_group(source_spans, source_groups),
    )
    if has_one_range:
        paged = [name for name, group in destination_groups.items() if not group.is_state]
        span = destination_spans[paged[0]] if paged else None
        tokens = (span, span)

    # blocks: the destination has those of its ranges, and of all that the source moves
    wanted = {name: [request.span] for name, request in asked.items()}
    for name, span in source_spans.items():
        if span is not None:
            wanted[destination_groups[name].name].append(span)
    local = _tables(destination, wanted, choices)
    wanted = {name: [] for name in source.groups}
    for name, span in source_spans.items():
        group = destination_groups[name]
        moved_span = span or _held_positions(group, local[group.name])
        wanted[source_groups[name].name].append(moved_span)
    remote = _tables(source, wanted, choices)
    assert choices.are_used_up
    for name, span in destination_spans.items():
        group = destination_groups[name]
        if span is None or source_spans[name] is None:
            _, end = _held_positions(group, local[group.name])
            ranks = designs.on_ranks(source_groups[name])
            if remote[source_groups[name].name].stop > designs.ordinals_of(ranks, 0, end).stop:
                local[group.name] = _listing_more(local[group.name])

    skipped = [tensor.name for tensor in tensors if tensor.engines in (DESTINATION_ONLY, EXCLUDED)]
    return Case(
        destinations=designs.workers(destination, local),
        sources=designs.workers(source, remote),
        tables=(local, remote),
        spans=(destination_spans, source_spans),
        tokens=tokens,
        not_transferred=tuple(skipped),
        designs=(destination, source),
    )


def _groups_of_tensors(design: EngineDesign, names: set[str]) -> dict[str, Group]:
    groups = {stored.tensor.name: stored.group for stored in design.tensors}
    return {name: group for name, group in groups.items() if name in names}


def _held_positions(group: Group, blocks: Blocks) -> Range:
    """Return the positions between the first and the last that a block table has on any rank."""
    ordinals = range(blocks.first, blocks.first + len(blocks.ids))
    positions = designs.positions_of(designs.on_ranks(group), ordinals)
    return positions.start, positions.stop


def _listing_more(blocks: Blocks) -> Blocks:
    """Return a table of the same blocks that also lists a gap behind the last one.

    Without a range, only a table with gaps may have fewer blocks than the source's.
    """
    return Blocks(blocks.ids, ordinals=blocks.ordinals, listed=(0, blocks.stop + 1))


def _hull(spans: Sequence[Range]) -> Range:
    return min(start for start, _ in spans), max(stop for _, stop in spans)


def _spans_of_groups(
    spans: Mapping[str, Range | None],
    groups: Groups,
) -> dict[str, Range | None]:
    """Return for each tensor the span around those of all tensors of its group.

    It is None where one of them is None.
    """
    spans_of_group: dict[Group, list[Range | None]] = {}
    for name, group in groups.items():
        spans_of_group.setdefault(group, []).append(spans[name])
    hulls: dict[Group, Range | None] = {}
    for group, group_spans in spans_of_group.items():
        bounded = [span for span in group_spans if span is not None]
        hulls[group] = _hull(bounded) if len(bounded) == len(group_spans) else None
    return {name: hulls[group] for name, group in groups.items()}


def _spans_by_group(spans: Mapping[str, Range | None], groups: Groups) -> dict[str, Range]:
    return {groups[name].name: span for name, span in spans.items() if span is not None}


def _logical_tensor(index: int, choices: Choices) -> LogicalTensor:
    dim, heads, kv, dtype, kind, holders = choices.below(5, 8, 2, 4, 8, 16)
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
        engines=(*13 * [BOTH], DESTINATION_ONLY, SOURCE_ONLY, EXCLUDED)[holders],
    )


def _tensors(choices: Choices) -> list[LogicalTensor]:
    """Return up to four tensors, often of one shape, as layers have."""
    tensors = [_logical_tensor(index, choices) for index in range(4)]
    # layers of a model mostly have one shape
    number, *has_own_shape = choices.below(7, 2, 2, 2)
    first = tensors[0]
    for index, own_shape in enumerate(has_own_shape, 1):
        if not own_shape:
            tensors[index] = attrs.evolve(tensors[index], sizes=first.sizes, dtype=first.dtype)
    return tensors[: (1, 2, 3, 3, 4, 4, 4)[number]]


def _design(
    engine_id: str,
    tensors: Sequence[LogicalTensor],
    lacking: int,
    choices: Choices,
) -> EngineDesign:
    """Return an engine that has all tensors but those with ``engines=lacking``.

    It lists them from any of them on.
    """
    # choices of the engine, then of each index in its list of tensors
    shape, regroup, renamed, turn, unlike, pools = choices.below(len(SHAPES), 5, 6, 4, 5, 2)
    packing, digits, gap, base, devices, extra_blocks = choices.below(4, 2, 2, 4, 2, 4)
    tp, cp, pp = SHAPES[shape]
    groups = _groups(engine_id, cp, renamed, unlike in (0, 1), choices)
    memory_choices = choices.several_below(4, 4, 24, 30, 81, 4, 8)
    stages = choices.below(*4 * [pp])
    stored = list[StoredTensor]()
    for index, stage in enumerate(stages):
        number = (index + turn) % 4
        if number >= len(tensors) or tensors[number].engines == lacking:
            continue
        tensor = tensors[number]
        # engines may group tensors by kind, all together, each alone, or in another way
        kind = (tensor.kind, 0, index, tensor.kind + index, tensor.kind)[regroup]
        choice = memory_choices[0 if unlike in (0, 2) else index]
        first_axis, low, high, pads, split, narrowed = choice
        is_narrowed = narrowed > 4 and lacking == SOURCE_ONLY
        stored.append(
            StoredTensor(
                tensor=tensor,
                group=groups[kind % 3 if tensor.paged else 3 + kind % 2],
                stage=stage,
                first_axis=first_axis,
                order=low + 24 * high,
                pads=pads,
                split=ALONG[split],
                narrowed=ALONG[narrowed % 4] if is_narrowed else "",
            )
        )
    return EngineDesign(
        engine_id=engine_id,
        tp=tp,
        cp=cp,
        pp=pp,
        tensors=tuple(stored),
        packing=packing,
        digits=bool(digits),
        gap=gap,
        base=base,
        devices=devices,
        extra_blocks=extra_blocks,
        equal_pools=not pools,
    )


def _groups(
    engine_id: str,
    cp: int,
    renamed: int,
    are_equal: bool,
    choices: Choices,
) -> list[Group]:
    """Return three token groups, and two state groups.

    A token group is on all context-parallel ranks or, sometimes, without contexts.
    """
    # names of the engine's own, or those of both engines in a turned order
    names = [f"{engine_id}.{name}" for name in NAMES]
    if renamed < 5:
        names = [NAMES[(index + renamed) % 5] for index in range(5)]
    drawn = choices.several_below(3, 6, 3, 4)
    groups = list[Group]()
    for name, group_choices in zip(names[:3], drawn, strict=True):
        slots, interleave, alone = drawn[0] if are_equal else group_choices
        context = Context(0, cp, interleave + 1) if alone < 3 else Context()
        groups.append(Group(name, slots + 1, context))
    return [*groups, *map(Group, names[3:])]


@attrs.frozen
class GroupRequest:
    """The range that a request asks of a group; with ``everything``, all that its table lists."""

    span: Range
    everything: bool


def _group_requests(
    groups: Mapping[str, Group],
    has_one_range: bool,
    choices: Choices,
) -> dict[str, GroupRequest]:
    """Return what is asked of each group. With one range, all token groups have it."""
    drawn = choices.several_below(5, 8, 10, 4)
    requests = {}
    for (name, group), group_choices in zip(groups.items(), drawn, strict=False):
        if not group.is_state:
            start, length, everything = drawn[0] if has_one_range else group_choices
            requests[name] = GroupRequest((start, start + length), everything == 3)
        else:
            start, length, everything = group_choices
            span = (start % 2, start % 2 + length % 3)
            requests[name] = GroupRequest(span, everything == 3 or has_one_range)
    return requests


def _tables(
    design: EngineDesign,
    wanted: Mapping[str, Sequence[Range]],
    choices: Choices,
) -> dict[str, Blocks]:
    """Return a block table for each group that covers its ranges.

    In a pool of all groups, no block is listed twice.
    """
    tables = {}
    first_id = 0
    drawn = choices.several_below(5, 2, 2, 3, 256)
    for (name, group), group_choices in zip(design.groups.items(), drawn, strict=False):
        before, after, low, seed = group_choices
        ordinals = designs.ordinals_of(designs.on_ranks(group), *_hull(wanted[name] or [(0, 3)]))
        first = max(0, (ordinals.start if ordinals else low) - before)
        num_blocks = (ordinals.stop if ordinals else first) - first + after
        pool = range(first_id, first_id + num_blocks + design.extra_blocks)
        ids = random.Random(seed).sample(pool, num_blocks) if seed else list(pool)[:num_blocks]
        tables[name] = Blocks(ids, first)
        if design.packing == POOL:
            first_id = max(first_id, tables[name].highest + 1)
    return tables
