"""Staged cost: what a request takes in two steps, beside what it takes directly, counted without block tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from kvplan._text import count
from kvplan.describe.views import Group
from kvplan.plan.align import before, period, position_of, repeated, slots
from kvplan.plan.cost import Cost, PairCost, cost, of_groups
from kvplan.staging.buffers import StagedPeer
from kvplan.staging.copies import CopyTemplate, ordinals


@attrs.frozen(repr=False)
class StagedCost:
    """What one request takes whose blocks are scattered, from position 0 on; states move once.

    ``direct`` is what a direct plan takes, ``transfers`` what moves between workers when staged. Staging also takes at
    most ``num_copies`` local copies, one for each origin, in at most ``num_chunks`` chunks, and ``staging_bytes`` of a
    staging region. Where chunks end inside blocks, more descriptors than these move between workers.
    See :func:`kvplan.staging.stage_writes`.
    """

    direct: Cost
    transfers: Cost
    num_copies: int
    num_chunks: int
    staging_bytes: int

    @property
    def read_amplification(self) -> float:
        """Bytes that move between workers for each byte that is needed: above 1 only where a destination reads."""
        return self.transfers.num_bytes / self.direct.num_bytes if self.direct.num_bytes else 1.0

    def __str__(self) -> str:
        copies, chunks = count(self.num_copies, "local copy"), count(self.num_chunks, "chunk")
        lines = [
            _line("directly", self.direct),
            _line("staged", self.transfers),
            f"  at most {copies} in {chunks}, {count(self.staging_bytes, 'byte')} of staging memory",
        ]
        if self.read_amplification > 1:
            lines.append(f"  read amplification: {self.read_amplification:.3g} bytes read for each byte needed")
        return "\n".join(lines)

    def __repr__(self) -> str:
        descriptors = count(self.transfers.num_descriptors, "descriptor")
        tokens = count(self.direct.tokens, "token")
        return f"<StagedCost of {tokens}: {descriptors}, {self.direct.num_descriptors} directly>"


def _line(how: str, found: Cost) -> str:
    tokens, moved = str(found).splitlines()[0].split(": ", 1)
    return f"{tokens} {how}: {moved}"


def staged_cost(direct: Cost, peers: Sequence[StagedPeer], num_positions: int) -> StagedCost:
    """The cost of the requests that cost ``direct`` in one step, in chunks of ``num_positions``.

    Raises what :func:`kvplan.plan.cost.cost` does.
    """
    chunks = max(-(-direct.tokens // num_positions), 1) if peers else 0
    copies = sum(_num_copies(each, direct.tokens, num_positions) for peer in peers for each in peer.templates)
    return StagedCost(
        direct=direct,
        transfers=_transfers(direct.operation, peers, direct.tokens),
        num_copies=chunks * copies,
        num_chunks=chunks,
        staging_bytes=max((view.end_bytes for peer in peers for view in peer.buffer.worker.views), default=0),
    )


def _num_copies(template: CopyTemplate, tokens: int, window: int) -> int:
    """The most copies of one chunk: those of runs, and where chunks or the request cut runs, those of single tokens."""
    run = template.run_tokens
    whole = template.groups[0].tokens_per_block is None or not (window % run or tokens % run)
    return sum(
        len(origins) for tokens in ((run,) if whole else (run, 1)) for origins in template.boxes[tokens].values()
    )


def _transfers(operation: str, peers: Sequence[StagedPeer], tokens: int) -> Cost:
    """What moves between workers: of reads, without the blocks of sources that nothing is needed of."""
    found = cost(operation, [(peer.transfer.local.key, pair) for peer in peers for pair in peer.transfer.pairs], tokens)
    if operation == "WRITE":
        return found
    pairs = [_needed_only(pair, peer, tokens) for pair, peer in zip(found.pairs, peers, strict=True)]
    return attrs.evolve(found, pairs=tuple(pairs))


def _needed_only(pair: PairCost, peer: StagedPeer, tokens: int) -> PairCost:
    """The cost of a transfer without the blocks that no copy takes anything of; full blocks all cost the same."""
    num_ids, lengths = 0, Counter[int]()
    (moved,) = peer.transfer.pairs
    for groups in moved.group_pairs:
        group, parts = groups.groups[0], [(1, tokens)]
        if group.tokens_per_block is not None:
            templates = [template for template in peer.templates if template.groups[1] == group]
            full, last = _blocks_needed(group, templates, tokens)
            parts = [(full, slots(group)), (1, last)]
        for times, held in parts:
            stop = position_of(group, held - 1) + 1 if held else 0
            ids, found = of_groups((moved.local_table, moved.remote_table), groups, stop)
            num_ids += times * ids
            lengths.update({length: times * number for length, number in found.items() if times})
    return attrs.evolve(pair, num_ids=num_ids, lengths=dict(sorted(lengths.items())))


def _blocks_needed(group: Group, templates: Iterable[CopyTemplate], tokens: int) -> tuple[int, int]:
    """Of a source's blocks with a position that moves: how many are full, and how many tokens the last one has."""
    templates = tuple(templates)
    every = math.lcm(period(group), *(template.period for template in templates))
    periods, rest = divmod(tokens, every)
    full = last = 0
    for times, stop in ((periods, every), (1, rest)):
        # ordinals of the blocks that copies take anything of, the last of which may not be full
        blocks = ordinals(group, [repeated(template.carried, template.period, 0, stop) for template in templates])
        end, held = divmod(before(group, stop), slots(group))
        full += times * int((blocks < end).sum())
        last = held if (blocks == end).any() else 0
    return full, last
