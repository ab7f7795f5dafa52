"""Samples: a request as short as tells how the blocks of both sides of a plan meet.

A sample binds one group and nothing of the others, so that addresses tell blocks apart also where groups lie over each
other. Local blocks ascend and remote ones descend, so that no two of them continue each other on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from kvplan.describe.blocks import Blocks, Tokens
from kvplan.describe.views import Group
from kvplan.plan.align import before, period, reach, slots
from kvplan.plan.bind import range_of
from kvplan.plan.transfer import TransferPlan
from kvplan.show.pages import Page, pages

MAX_BLOCKS: Final = 4
"""So many local blocks are taken, if that is how long both sides take to repeat, and else as few as tell."""

MAX_POSITIONS: Final = 1024
"""A sample has at most so many positions."""

Request = tuple[Mapping[str, Blocks], Mapping[str, Blocks], Tokens]
"""Block tables of the local and of the remote side by group, and token ranges."""


def _remote_groups(plan: TransferPlan, group: Group) -> list[Group]:
    """The remote groups that have tensors of a local one."""
    tensors = {view.name for view in plan.local.views if view.group == group.name}
    found = []
    for worker in plan.remotes:
        names = {view.group for view in worker.views if view.name in tensors}
        found += [other for other in worker.groups if other.name in names]
    return found


def sample(plan: TransferPlan, group: Group, far: Sequence[Sequence[Page]]) -> Request:
    """A request of the first blocks of a group, those of the local side ascending and those of remotes descending."""
    others = _remote_groups(plan, group)
    local = {other.name: Blocks([]) for other in plan.local.groups}
    remote = {other.name: Blocks([]) for worker in plan.remotes for other in worker.groups}
    if group.tokens_per_block is None:
        one = Blocks([0])
        return local | {group.name: one}, remote | {other.name: one for other in others}, _only(plan, group, (0, 1))
    turn = period(group, *others) // (slots(group) * group.context.size)
    number = min(turn if turn <= MAX_BLOCKS else 2, _pool([pages(plan.local)], group))
    stop = min(number * slots(group) * group.context.size, MAX_POSITIONS)
    stop = min(
        [
            stop,
            reach(group, 0, _pool([pages(plan.local)], group))[1],
            *(reach(other, 0, _pool(far, other))[1] for other in others),
        ]
    )
    local[group.name] = Blocks(range(_blocks(group, stop)))
    for other in others:
        number = max(_blocks(other, stop), remote[other.name].ids.size)
        remote[other.name] = Blocks(range(number)[::-1])
    return local, remote, _only(plan, group, (0, stop))


def _pool(sides: Sequence[Sequence[Page]], group: Group) -> int:
    """The fewest blocks that a pool of the group has."""
    return min((page.num_blocks for kept in sides for page in kept if page.group == group.name), default=1)


def _blocks(group: Group, stop: int) -> int:
    """How many blocks hold a worker's positions below ``stop``."""
    return -(-before(group, stop) // slots(group))


def _only(plan: TransferPlan, group: Group, tokens: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return {other.name: tokens if other == group else (0, 0) for other in plan.local.groups}


def part(plan: TransferPlan, group: Group, request: Request) -> Request | None:
    """The first blocks of a group that a request moves, and nothing of other groups; none where it moves none."""
    local, remote, tokens = request
    plan.bind(local=local, remote=remote, tokens=tokens)  # so that what is wrong with it is said of all of it
    others = _remote_groups(plan, group)
    needy = [(group, local)] if plan.operation == "READ" else [(other, remote) for other in others]
    listed = [(other, tables[other.name]) for other, tables in needy if other.name in tables]
    if not listed:
        return None
    spans = [range_of(tokens, group), *(reach(other, table.first, table.stop - table.first) for other, table in listed)]
    start = max(span[0] for span in spans if span)
    stop = min(span[1] for span in spans if span)
    if group.tokens_per_block is None:
        stop = min(stop, start + 1)
    else:
        turn = min(math.ceil(period(group, *others) / slots(group) / group.context.size), MAX_BLOCKS)
        stop = min(stop, reach(group, before(group, start) // slots(group), turn)[1], start + MAX_POSITIONS)
    return (local, remote, _only(plan, group, (start, stop))) if start < stop else None
