"""Requests for two engines that somebody built: random ranges of positions, in blocks scattered over their pools."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict

import attrs
import numpy as np
from hypothesis import strategies as st

from kvplan._arrays import Ints
from kvplan.describe.blocks import Blocks, Tokens
from kvplan.describe.views import Group
from kvplan.describe.worker import Worker
from kvplan.verification.labels import local_slots, needed

Span = tuple[int, int]


class Request(TypedDict):
    """The arguments of bind."""

    local: dict[str, Blocks]
    remote: dict[str, Blocks]
    tokens: Tokens


@attrs.frozen
class Room:
    """What the workers of an engine have of one group: the group as each has it, and the smallest pool."""

    ranks: tuple[Group, ...]
    num_blocks: int

    def ordinals(self, span: Span, states: range) -> range:
        """The blocks in which any worker keeps positions of a span; of a state group, those of the states."""
        if self.ranks[0].tokens_per_block is None:
            return states
        slots = np.concatenate([local_slots(group, needed(group, None, span)) for group in self.ranks])
        return _hull(slots // self.ranks[0].tokens_per_block)

    def positions(self, ordinals: range) -> range:
        """The positions between the first and the last that any worker keeps in some blocks; no states."""
        table = Blocks(range(len(ordinals)), first=ordinals.start)
        paged = [group for group in self.ranks if group.tokens_per_block]
        return _hull(np.concatenate([np.empty(0, np.int64), *(needed(group, table, None) for group in paged)]))


def _hull(numbers: Ints) -> range:
    return range(int(numbers.min()), int(numbers.max()) + 1) if numbers.size else range(0)


def _rooms(workers: Iterable[Worker]) -> dict[str, Room]:
    ranks: dict[str, list[Group]] = {}
    blocks: dict[str, int] = {}
    for worker in workers:
        for group in worker.groups:
            ranks.setdefault(group.name, []).append(group)
        for view in worker.views:
            blocks[view.group] = min(view.num_blocks, blocks.get(view.group, view.num_blocks))
    return {name: Room(tuple(groups), blocks[name]) for name, groups in ranks.items() if name in blocks}


def _fits(rooms: Mapping[str, Room], ordinals: Mapping[str, range]) -> bool:
    """Whether no group lists more than its part of its pool, as if all groups shared one."""
    return all(len(ordinals[name]) <= room.num_blocks // len(rooms) for name, room in rooms.items())


def _tables(rooms: Mapping[str, Room], ordinals: Mapping[str, range], seed: int) -> dict[str, Blocks]:
    """A block table for each group, none with a block of another; blocks in no order, or of seed 0 in order."""
    taken: set[int] = set()
    tables = {}
    for name, room in sorted(rooms.items(), key=lambda item: item[1].num_blocks):
        count = len(ordinals[name]) + len(taken)
        drawn = random.Random(seed).sample(range(room.num_blocks), count) if seed else range(count)
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

    It has at most ``max_tokens`` positions, from any position on, or all of the blocks that these take at the
    destination; and up to three states in groups of states. Local tables are those of the destinations, for a
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
    rooms = _rooms(destinations), _rooms(sources)
    start, length = draw(st.integers(0, max_tokens)), draw(st.integers(0, max_tokens))
    first, count = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    whole, *seeds = draw(st.tuples(st.booleans(), *2 * [st.integers(0, 255)]))
    while True:
        span, states = (start, start + length), range(first, first + count)
        ours = {name: room.ordinals(span, states) for name, room in rooms[0].items()}
        if whole:
            held = [at for name, room in rooms[0].items() for at in room.positions(ours[name])]
            span = (min(held), max(held) + 1) if held else (0, 0)
        theirs = {name: room.ordinals(span, states) for name, room in rooms[1].items()}
        if _fits(rooms[0], ours) and _fits(rooms[1], theirs):
            break
        length, count = length // 2, count // 2
    sides = [_tables(*side) for side in zip(rooms, (ours, theirs), seeds, strict=True)]
    local, remote = sides if operation == "READ" else sides[::-1]
    return {"local": local, "remote": remote, "tokens": None if whole else span}
