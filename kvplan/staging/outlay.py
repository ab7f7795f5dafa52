"""Outlays: what a request takes in two legs, beside what it takes in one, counted without block tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from kvplan._text import count
from kvplan.describe.views import Group
from kvplan.plan.align import before, period, position_of, repeated, slots
from kvplan.plan.cost import Cost, PairCost, cost, of_layout
from kvplan.staging.rearrange import Lane, ordinals

if TYPE_CHECKING:
    from kvplan.plan.transfer import TransferPlan
    from kvplan.staging.plan import StagedPlan


@attrs.frozen(repr=False)
class Outlay:
    """What one request takes whose blocks are scattered, from position 0 on; states move once.

    ``direct`` is what it takes in one leg; ``transfers`` what goes between workers in two. Besides there are at most
    ``num_copies`` copies at home, one for each origin, in at most ``num_chunks`` chunks, in ``staging_bytes`` of a
    staging region. Where chunks end inside blocks, more descriptors than these go between workers. See
    :func:`kvplan.staging.plan.stage_writes`.
    """

    direct: Cost
    transfers: Cost
    num_copies: int
    num_chunks: int
    staging_bytes: int

    @property
    def excess(self) -> float:
        """How many bytes go between workers beyond the need for each that is needed."""
        return self.transfers.num_bytes / self.direct.num_bytes - 1 if self.direct.num_bytes else 0.0

    def __str__(self) -> str:
        copies = count(self.num_copies, "copy")
        chunks, staging = count(self.num_chunks, "chunk"), count(self.staging_bytes, "byte")
        lines = [
            _told("in one leg", self.direct),
            _told("in two legs", self.transfers),
            f"  at home: at most {copies} in {chunks}, in {staging} of staging memory",
        ]
        if self.excess:
            lines.append(f"  excess: {self.excess:.3g} bytes read for each that is needed")
        return "\n".join(lines)

    def __repr__(self) -> str:
        legs = f"{count(self.transfers.num_descriptors, 'descriptor')} for {self.direct.num_descriptors}"
        return f"<Outlay of {count(self.direct.tokens, 'token')}: {legs}>"


def _told(legs: str, found: Cost) -> str:
    tokens, told = str(found).splitlines()[0].split(": ", 1)
    return f"{tokens} {legs}: {told}"


def outlay(plan: StagedPlan, tokens: int | None = None) -> Outlay:
    """The outlay of a staged plan for so many positions; ``None``: after which the direct plan repeats.

    Raises what :func:`kvplan.plan.cost.cost` does.
    """
    direct = plan.direct.cost(tokens)
    chunks = max(-(-direct.tokens // plan.num_positions), 1) if plan.transfers else 0
    return Outlay(
        direct=direct,
        transfers=_transfers(plan, direct.tokens),
        num_copies=chunks
        * sum(_num_copies(lane, direct.tokens, plan.num_positions) for each in plan.lanes for lane in each),
        num_chunks=chunks,
        staging_bytes=_staging_bytes(plan),
    )


def _num_copies(lane: Lane, tokens: int, window: int) -> int:
    """The most copies that a lane makes of one window: of runs, and of what windows and the request cut off of runs."""
    whole = lane.groups[0].tokens_per_block is None or not (window % lane.run or tokens % lane.run)
    lengths = (lane.run,) if whole else (lane.run, 1)
    return sum(len(boxes.origins[0]) for length in lengths for boxes in lane.boxes[length])


def _staging_bytes(plan: StagedPlan) -> int:
    """How far into the staging region the mirrors go."""
    return max((view.end_bytes for staged in plan.mirrors for view in staged.worker.views), default=0)


def _transfers(plan: StagedPlan, tokens: int) -> Cost:
    """What goes between workers: of reads, without those blocks of sources that nothing is needed of."""
    found = cost(
        plan.direct.operation, [(each.local.key, pair) for each in plan.transfers for pair in each.pairs], tokens
    )
    if plan.operation == "WRITE":
        return found
    pairs = [
        _without(pair, transfer, lanes, tokens)
        for pair, transfer, lanes in zip(found.pairs, plan.transfers, plan.lanes, strict=True)
    ]
    return attrs.evolve(found, pairs=tuple(pairs))


def _without(pair: PairCost, transfer: TransferPlan, lanes: Iterable[Lane], tokens: int) -> PairCost:
    """The cost of a transfer of reads without the blocks that no lane takes anything of: all blocks are alike."""
    num_ids, lengths = 0, Counter[int]()
    for layout in transfer.pairs[0].layouts:
        group, parts = layout.groups[0], [(1, tokens)]
        if group.tokens_per_block is not None:
            mine = [lane for lane in lanes if lane.groups[1] == group]
            full, last = _needed(group, mine, tokens)
            parts = [(full, slots(group)), (1, last)]
        for times, held in parts:
            stop = position_of(group, held - 1) + 1 if held else 0
            ids, found = of_layout((transfer.pairs[0].local_table, transfer.pairs[0].remote_table), layout, stop)
            num_ids += times * ids
            lengths.update({length: times * number for length, number in found.items() if times})
    return attrs.evolve(pair, num_ids=num_ids, lengths=dict(sorted(lengths.items())))


def _needed(group: Group, lanes: Iterable[Lane], tokens: int) -> tuple[int, int]:
    """Of the blocks of a source that hold a position that moves: how many are full, and the tokens of the last."""
    lanes = tuple(lanes)
    every = math.lcm(period(group), *(lane.every for lane in lanes))
    turns, rest = divmod(tokens, every)
    full = last = 0
    for times, stop in ((turns, every), (1, rest)):
        blocks = ordinals(group, [repeated(lane.carried, lane.every, 0, stop) for lane in lanes])
        end, held = divmod(before(group, stop), slots(group))
        full += times * int((blocks < end).sum())
        last = held if (blocks == end).any() else 0
    return full, last
