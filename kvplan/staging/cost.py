"""Staged cost: what a request takes in two steps, and directly, counted without block tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs

from kvplan._text import count
from kvplan.describe.views import Group
from kvplan.plan.align import before, in_slots, period, position_of, positions_between
from kvplan.plan.cost import Cost, PairCost, cost, of_groups
from kvplan.plan.specs import READ
from kvplan.staging.buffers import StagedPeer
from kvplan.staging.copies import DESTINATION, CopyTemplate, num_boxes, ordinals


@attrs.frozen(repr=False)
class StagedCost:
    """What one request takes whose blocks are scattered, from position 0 on; states move once.

    ``direct`` is what a direct plan takes, ``transfers`` what moves between workers when staged.
    Staging also takes at most ``num_copies`` local copies, one for each origin, in at most
    ``num_chunks`` chunks, and ``staging_bytes`` of a staging region. Where chunks end inside
    blocks, more descriptors than these move between workers. See
    :func:`kvplan.staging.stage`.
    """

    direct: Cost
    transfers: Cost
    num_copies: int
    num_chunks: int
    staging_bytes: int

    @property
    def read_amplification(self) -> float:
        """Bytes that move between workers for each byte needed."""
        if not self.direct.num_bytes:
            return 1.0
        return self.transfers.num_bytes / self.direct.num_bytes

    def __str__(self) -> str:
        copies = count(self.num_copies, "local copy")
        chunks = count(self.num_chunks, "chunk")
        staging_bytes = count(self.staging_bytes, "byte")
        lines = [
            _line("directly", self.direct),
            _line("staged", self.transfers),
            f"  at most {copies} in {chunks}, {staging_bytes} of staging memory",
        ]
        if self.read_amplification > 1:
            amplification = f"{self.read_amplification:.3g} bytes read for each byte needed"
            lines.append(f"  read amplification: {amplification}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        descriptors = count(self.transfers.num_descriptors, "descriptor")
        tokens = count(self.direct.tokens, "token")
        return f"<StagedCost of {tokens}: {descriptors}, {self.direct.num_descriptors} directly>"


def _line(how: str, cost: Cost) -> str:
    """Return the first line of a cost, with how it moves after the tokens."""
    tokens, moved = str(cost).splitlines()[0].split(": ", 1)
    return f"{tokens} {how}: {moved}"


def staged_cost(direct: Cost, peers: Sequence[StagedPeer], num_positions: int) -> StagedCost:
    """Return the cost in chunks of ``num_positions`` of requests that cost ``direct`` in one step.

    Raises what :func:`kvplan.plan.cost.cost` does.
    """
    # states alone still take a chunk
    num_chunks = max(-(-direct.tokens // num_positions), 1) if peers else 0
    num_copies = 0
    staging_bytes = 0
    for peer in peers:
        for template in peer.templates:
            num_copies += _num_copies(template, direct.tokens, num_positions)
        for view in peer.buffer.worker.views:
            staging_bytes = max(staging_bytes, view.end_bytes)
    return StagedCost(
        direct=direct,
        transfers=_transfers(peers, direct.tokens),
        num_copies=num_chunks * num_copies,
        num_chunks=num_chunks,
        staging_bytes=staging_bytes,
    )


def _num_copies(template: CopyTemplate, tokens: int, window: int) -> int:
    """Return the most copies of one chunk: of runs and, where runs are cut, of single tokens."""
    run_tokens = template.run_tokens
    num_copies = num_boxes(template.boxes[run_tokens])
    group = template.sides[DESTINATION].group
    _, num_positions = in_slots(group, (0, tokens))
    if group.is_state or not (window % run_tokens or num_positions % run_tokens):
        return num_copies
    # chunks, or the end of the request, cut runs
    return num_copies + num_boxes(template.boxes[1])


def _transfers(peers: Sequence[StagedPeer], tokens: int) -> Cost:
    """Return what moves between workers: not the blocks from which nothing is needed."""
    pairs = [(peer.transfer.local.key, peer.pair) for peer in peers]
    # as if every block of the peers were needed
    all_blocks = cost(READ, pairs, tokens)
    pair_costs = zip(all_blocks.pairs, peers, strict=True)
    needed = [_needed_only(pair_cost, peer, tokens) for pair_cost, peer in pair_costs]
    return attrs.evolve(all_blocks, pairs=tuple(needed))


def _needed_only(pair_cost: PairCost, peer: StagedPeer, tokens: int) -> PairCost:
    """Return the cost of a transfer without the blocks from which no copy takes anything."""
    tables = peer.pair.local_table, peer.pair.remote_table
    num_ids = 0
    lengths = Counter[int]()
    for group_pair in peer.pair.group_pairs:
        group = group_pair.groups[DESTINATION]
        for needed in _needed_blocks(group, peer.templates_of(group), tokens):
            # blocks are alike, so the request's first one stands for each of them
            stop = position_of(group, needed.num_slots - 1) + 1 if needed.num_slots else 0
            block = of_groups(tables, group_pair, stop)
            num_ids += needed.num_blocks * block.num_ids
            if needed.num_blocks:
                for length, number in block.lengths.items():
                    lengths[length] += needed.num_blocks * number
    return attrs.evolve(pair_cost, num_ids=num_ids, lengths=dict(sorted(lengths.items())))


class _SourceBlocks(NamedTuple):
    """Blocks of a source from which copies take something, and the slots that each has filled."""

    num_blocks: int
    num_slots: int


def _needed_blocks(
    group: Group,
    templates: Iterable[CopyTemplate],
    tokens: int,
) -> Iterator[_SourceBlocks]:
    """Yield the blocks that a request needs: the full ones, which cost alike, and the last one."""
    if group.is_state:
        yield _SourceBlocks(1, tokens)
        return
    carried = [(template.carried, template.period) for template in templates]
    common_period = math.lcm(period(group), *(template_period for _, template_period in carried))
    _, num_positions = in_slots(group, (0, tokens))
    num_periods, rest = divmod(num_positions, common_period)
    num_full = 0
    last_slots = 0
    # whole periods repeat; the rest of the request is counted once
    for times, stop in ((num_periods, common_period), (1, rest)):
        # ordinals of the blocks that copies take anything of, the last of which may not be full
        block_ordinals = ordinals(
            group, [positions_between(*starts, 0, stop) for starts in carried]
        )
        last_ordinal, num_slots = divmod(before(group, stop), group.num_slots)
        num_full += times * int((block_ordinals < last_ordinal).sum())
        last_slots = num_slots if (block_ordinals == last_ordinal).any() else 0
    yield _SourceBlocks(num_full, group.num_slots)
    yield _SourceBlocks(1, last_slots)
