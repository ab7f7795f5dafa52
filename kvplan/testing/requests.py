"""Requests for two given engines: random ranges of positions, in blocks scattered over their pools."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict

from hypothesis import strategies as st

from kvplan.describe import Blocks, Group, Worker
from kvplan.describe.blocks import Tokens
from kvplan.testing.engines import ordinals_of, positions_of


class Request(TypedDict):
    """The arguments of ``bind``."""

    local: dict[str, Blocks]
    remote: dict[str, Blocks]
    tokens: Tokens


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


def _ordinals(pools: GroupPools, span: tuple[int, int], states: tuple[int, int]) -> dict[str, range]:
    """The blocks of each group that hold positions of a span, or states."""
    return {name: ordinals_of(ranks, *(span if _is_paged(ranks) else states)) for name, (ranks, _) in pools.items()}


def _fits(pools: GroupPools, ordinals: Mapping[str, range]) -> bool:
    """Whether no group lists more than its part of its pool, as if all groups shared one pool."""
    return all(len(ordinals[name]) <= blocks // len(pools) for name, (_, blocks) in pools.items())


def _tables(pools: GroupPools, ordinals: Mapping[str, range], seed: int) -> dict[str, Blocks]:
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
) -> Request:
    """A request that both engines have blocks for: the arguments of ``bind``, ``verify`` and ``assert_copies``.

    It is a range of at most ``max_tokens`` positions, or everything in the blocks that such a range takes at the
    destination, and up to three states in each state group. Local tables are those of the destinations, and for a
    ``WRITE`` those of the sources.

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
    start, length = draw(st.integers(0, max_tokens)), draw(st.integers(0, max_tokens))
    first, count = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    whole, *seeds = draw(st.tuples(st.booleans(), *2 * [st.integers(0, 255)]))
    while True:
        span, states = (start, start + length), (first, first + count)
        into = _ordinals(ours, span, states)
        if whole:
            paged = {name: ranks for name, (ranks, _) in ours.items() if _is_paged(ranks)}
            held = [at for name, ranks in paged.items() for at in positions_of(ranks, into[name])]
            span = (min(held), max(held) + 1) if held else (0, 0)
        out_of = _ordinals(theirs, span, states)
        if _fits(ours, into) and _fits(theirs, out_of):
            break
        length, count = length // 2, count // 2
    tables = _tables(ours, into, seeds[0]), _tables(theirs, out_of, seeds[1])
    local, remote = tables if operation == "READ" else tables[::-1]
    return {"local": local, "remote": remote, "tokens": None if whole else span}
