"""Staged plans: requests that move in two steps, for pairs of engines whose layouts leave only short runs.

A destination reads long runs of a source into a staging buffer, and then copies the bytes into place by strided local
copies. Or a source first copies what a destination needs into a staging buffer in the destination's order, and then
writes long runs from there. Either way an ordinary plan moves bytes between workers. Buffers lie in one region, which
the caller has set aside.

- S12: both steps together write the bytes that a direct plan would, from the same sources, and otherwise only the
  staging region. Bytes that are read but not needed stay in the staging region; bytes that are not needed are never
  written to a peer.
- S13: a request moves in *chunks*, one for each window of positions that has any. Chunk n also carries the n-th state
  of each local state group. Chunks alternate between two buffer slots: a slot is refilled only after its previous
  contents were copied out, or sent.
- S14: the buffer slot of a chunk holds the blocks of the peer that have a position of the chunk, and no others.
- S15: a wrong request is refused before there is any chunk.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import attrs
import numpy as np

from kvplan._checks import ID_END, having
from kvplan._text import count
from kvplan.describe.blocks import POSITION_END, Blocks, Range, Tokens
from kvplan.describe.views import Group, Region
from kvplan.describe.worker import Worker
from kvplan.plan.align import position_of, slots
from kvplan.plan.bind import range_of, wanted
from kvplan.plan.cells import Cell
from kvplan.plan.specs import Pair, ReadSpec, idle_pair
from kvplan.plan.transfer import (
    SIDES,
    Planned,
    TransferPlan,
    checked_names,
    checked_replicas,
    checked_workers,
    pair_of,
    shares,
)
from kvplan.staging.buffers import StagedPeer, checked_staging, fit, pools, staging_buffer
from kvplan.staging.copies import BothGroups, Copy, copy_templates, ordinals
from kvplan.staging.cost import StagedCost, staged_cost

GroupRanges = Mapping[str, Range]
"""A range of positions, or of states, by name of the local group."""

WantedRanges = Mapping[BothGroups, Range]
"""The positions, or states, of a request that a destination's group wants from a source's."""

BlockTables = Mapping[str, Blocks]
"""Block tables by group name."""


@attrs.frozen(eq=False, repr=False)
class Chunk:
    """A part of a request: ``specs``, one for each of the plan's transfers, and local ``copies``.

    A ``READ`` carries out all specs first, then all copies; a ``WRITE`` all copies first, then all specs. The first
    step fills ``buffer_slot``, 0 or 1, and the second one empties it. ``tokens`` has the chunk's ranges by local group:
    a direct plan moves the same for these ranges, where the destination has all their blocks.
    """

    tokens: GroupRanges
    specs: tuple[ReadSpec, ...]
    copies: tuple[Copy, ...]
    buffer_slot: int

    @property
    def operation(self) -> str:
        """``READ`` or ``WRITE``."""
        return self.specs[0].operation

    def __repr__(self) -> str:
        moved, copied = (sum(part.num_bytes for part in step) for step in (self.specs, self.copies))
        if self.operation == "READ":
            steps = f"{count(moved, 'byte')} read, {copied} copied into place"
        else:
            steps = f"{count(copied, 'byte')} rearranged, {moved} written"
        return f"<Chunk of {dict(self.tokens)}: {steps}, buffer slot {self.buffer_slot}>"


@attrs.frozen(eq=False, repr=False)
class StagedPlan:
    """What a worker moves in two steps, for any request.

    ``direct`` is the plan that moves the same in one step. ``peers`` has a staging buffer for each remote worker that
    bytes move from or to, and both steps through it. The buffers are in the local worker's region ``staging``. A chunk
    covers ``num_positions`` positions. A plan never changes: threads may share it and bind at once.
    """

    direct: TransferPlan
    peers: tuple[StagedPeer, ...]
    num_positions: int
    staging: str

    @property
    def operation(self) -> str:
        """``READ`` or ``WRITE``."""
        return self.direct.operation

    @property
    def transfers(self) -> tuple[TransferPlan, ...]:
        """The plan between each staging buffer and its peer; its local worker has all regions of the local worker."""
        return tuple(peer.transfer for peer in self.peers)

    @cached_property
    def closing(self) -> tuple[ReadSpec, ...]:
        """A spec of no bytes for each transfer: carried out after all chunks, it notifies the remote worker."""
        return tuple([spec for plan in self.transfers for spec in plan.idle.values()])

    def cost(self, tokens: int | None = None) -> StagedCost:
        """What a request of ``tokens`` positions takes, staged and directly, counted without block tables.

        ``None``: the fewest positions after which the direct plan repeats. Raises what :func:`kvplan.plan.cost.cost`
        does.
        """
        return staged_cost(self.direct.cost(tokens), self.peers, self.num_positions)

    def bind(
        self,
        *,
        local: BlockTables,
        remote: BlockTables,
        tokens: Tokens = None,
        buffer_slots: Iterator[int] | None = None,
    ) -> Iterator[Chunk]:
        """What one request moves, chunk by chunk. Takes and raises what :meth:`TransferPlan.bind` does.

        The second step of a chunk may begin when its first step is done: see :class:`Chunk`. A chunk may begin to fill
        a buffer slot when the chunk before it in that slot is done. ``buffer_slots`` gives each chunk its slot when the
        chunk is made; by default they alternate. Requests that share a staging region share one such iterator.
        """
        if buffer_slots is not None:
            having("__next__", buffer_slots, "buffer_slots", "an iterator of slots")
        self.direct.check(local=local, remote=remote, tokens=tokens)
        tables, near = ((local, remote), 0) if self.operation == "READ" else ((remote, local), 1)
        wants = [
            {
                groups: wanted(groups[0], tables[0][groups[0].name], range_of(tokens, groups[near]), SIDES[near])
                for groups in peer.buffer.groups
            }
            for peer in self.peers
        ]
        ranges = list(chunk_ranges(wants, tables[0], self.num_positions, near))
        pairs = [pair for plan in self.transfers for pair in plan.pairs]
        if any(table.num_ids > ID_END for pair in pairs for table in (pair.local_table, pair.remote_table)):
            # making all chunks raises where an id that is needed does not fit
            deque(self._chunks(ranges, wants, tables, itertools.repeat(0)), maxlen=0)
        return self._chunks(ranges, wants, tables, itertools.cycle((0, 1)) if buffer_slots is None else buffer_slots)

    def _chunks(
        self,
        ranges: Iterable[GroupRanges],
        wants: Sequence[WantedRanges],
        tables: tuple[BlockTables, BlockTables],
        buffer_slots: Iterator[int],
    ) -> Iterator[Chunk]:
        slot = None
        for part in ranges:
            # a range in which nothing moves leaves its slot to the next one
            slot = next(buffer_slots) if slot is None else slot
            steps = [self._steps(*each, part, slot, tables) for each in zip(self.peers, wants, strict=True)]
            copies = tuple([copy for _, found in steps for copy in found])
            if copies:
                yield Chunk(part, tuple([spec for spec, _ in steps]), copies, slot)
                slot = None

    def _steps(
        self,
        peer: StagedPeer,
        wants: WantedRanges,
        part: GroupRanges,
        slot: int,
        tables: tuple[BlockTables, BlockTables],
    ) -> tuple[ReadSpec, list[Copy]]:
        """Both steps of a part of a request with one peer, through a buffer slot."""
        near, far = 1 - peer.buffer.side, peer.buffer.side
        staged, spans, copies = dict[str, Blocks](), dict[str, Range](), list[Copy]()
        for groups, group in peer.buffer.groups.items():
            (start, stop), (low, high) = part[groups[near].name], wants[groups]
            low, high = max(low, start), min(high, stop)
            templates = [template for template in peer.templates if template.groups[far] == group]
            positions = [template.positions(tables[0][groups[0].name], low, high) for template in templates]
            # rule S14: the peer's blocks that have one of these positions, in blocks of the slot from its first one on
            blocks = ordinals(groups[far], positions)
            first = slot * peer.buffer.slot_blocks[group.name]
            ids, every = np.arange(first, first + blocks.size), (0, POSITION_END)  # all other blocks are gaps
            staged[group.name] = table = Blocks(ids, ordinals=blocks, listed=every)
            spans[group.name] = (low, high) if blocks.size else (0, 0)
            ends = [table if side == far else tables[side][groups[side].name] for side in (0, 1)]
            for template, position in zip(templates, positions, strict=True):
                copies += template.copies(position, low, high, (ends[0], ends[1]))
        remote = {groups[far].name: tables[far][groups[far].name] for groups in peer.buffer.groups}
        (spec,) = peer.transfer.bind(local=staged, remote=remote, tokens=spans)
        return spec, copies

    def __repr__(self) -> str:
        peers = count(len(self.peers), "source" if self.operation == "READ" else "destination")
        return f"<StagedPlan {self.direct.local.label}: {peers}, {count(self.num_positions, 'position')} at a time>"


def chunk_ranges(
    wants: Iterable[WantedRanges], tables: BlockTables, window: int, local_side: int
) -> Iterator[GroupRanges]:
    """The ranges of each chunk of a request, by local group: rule S13.

    ``wants`` has the ranges of each peer, ``tables`` the destination's blocks. ``local_side`` is 0 where the
    destination is local, 1 where the source is.

    >>> ours, theirs = Group("window", 16), Group("attn", 32)
    >>> list(chunk_ranges([{(ours, theirs): (40, 100)}], {"window": Blocks(range(8))}, 64, local_side=1))
    [{'attn': (40, 64)}, {'attn': (64, 100)}]
    """
    positions: dict[int, dict[str, Range]] = {}
    states: dict[str, set[int]] = {}
    empty, nothing = dict[str, Range](), dict[str, Range]()
    for groups, (low, high) in (item for ranges in wants for item in ranges.items()):
        key, group, table = groups[local_side].name, groups[0], tables[groups[0].name]
        empty[key] = 0, 0
        if group.tokens_per_block is None:
            inside = (low <= table.ordinals) & (table.ordinals < high)
            states.setdefault(key, set()).update(table.ordinals[inside].tolist())
            continue
        for number in _windows(group, table, low, high, window):
            start, stop = max(low, number * window), min(high, (number + 1) * window)
            first, last = positions.setdefault(number, {}).get(key, (start, stop))
            positions[number][key] = min(first, start), max(last, stop)
    with_tokens = [positions[number] for number in sorted(positions)]
    each = [[(key, (at, at + 1)) for at in sorted(found)] for key, found in states.items()]
    with_states = [dict(filter(None, some)) for some in itertools.zip_longest(*each)]
    for some, others in itertools.zip_longest(with_tokens, with_states, fillvalue=nothing):
        yield {**empty, **some, **others}


def _windows(group: Group, table: Blocks, low: int, high: int, window: int) -> Iterable[int]:
    """The numbers of the windows in which a destination has blocks for some of ``[low, high)``."""
    if low >= high:
        return ()
    if table.scattered is None:
        return range(low // window, (high - 1) // window + 1)
    # for each block the positions of its first and last slot, then the windows that these are in
    start = position_of(group, table.scattered * slots(group))
    last = position_of(group, (table.scattered + 1) * slots(group) - 1)
    begin, end = np.maximum(start, low) // window, np.minimum(last, high - 1) // window
    return {number for one, other in zip(begin.tolist(), end.tolist(), strict=True) for number in range(one, other + 1)}


@attrs.frozen(eq=False)
class Shares:
    """What a worker moves, planned once for all strategies: the ``direct`` plan, and each peer with its ``cells``."""

    direct: TransferPlan
    cells: tuple[tuple[Worker, Sequence[Cell]], ...]

    @classmethod
    def of(
        cls,
        operation: str,
        local: Worker,
        remotes: Iterable[Worker],
        siblings: Iterable[Worker],
        not_transferred: Iterable[str],
        replicas: int,
    ) -> Shares:
        """What a worker reads or, with its siblings, writes. Raises what :func:`plan_writes` does."""
        peers, others = checked_workers("remotes", remotes, local), checked_workers("siblings", siblings, local)
        skipped, sharing = checked_names(not_transferred), checked_replicas(replicas)
        reads, cells = operation == "READ", list[tuple[Worker, Sequence[Cell]]]()
        pairs, known = {worker.key: idle_pair(worker) for worker in peers}, Planned()
        destinations, sources = ((local,), peers) if reads else (peers, (local, *others))
        for destination, source, some in shares(destinations, sources, skipped, sharing):
            peer = source if reads else destination
            if reads or source is local:
                cells.append((peer, some))
                pairs[peer.key] = _pair(operation, local, peer, some, known)
        direct = TransferPlan(operation, local, peers, others, skipped, tuple(pairs.values()))
        return cls(direct, tuple(cells))

    def staged(self, region: Region, whole: bool = False) -> StagedPlan:
        """The plan in two steps, through a region of the local worker."""
        local, operation = self.direct.local, self.direct.operation
        side = 1 if operation == "READ" else 0
        needed = [pools(peer, cells, side, whole) for peer, cells in self.cells]
        demands = [(pair[side], pool.block_bytes) for each in needed for pair, some in each.items() for pool in some]
        fitted = fit(demands, region.size_bytes)
        places, known, peers = iter(fitted.places), Planned(), list[StagedPeer]()
        for (peer, cells), pools_of in zip(self.cells, needed, strict=True):
            buffer = staging_buffer(local, peer, side, region.name, pools_of, places)
            mine = attrs.evolve(buffer.worker, engine_id=local.engine_id, rank=local.rank)
            pair = _pair(operation, mine, peer, buffer.transfer_step(peer, cells), known)
            transfer = attrs.evolve(self.direct, local=mine, remotes=(peer,), pairs=(pair,))
            peers.append(StagedPeer(buffer, transfer, copy_templates(local.regions, buffer.local_step(cells))))
        return StagedPlan(self.direct, tuple(peers), fitted.num_positions, region.name)


def _pair(operation: str, local: Worker, peer: Worker, cells: Sequence[Cell], known: Planned) -> Pair:
    """The pair of a worker and a peer that move these cells; ``known`` has what equal pairs share."""
    sides, near = ((local, peer), 0) if operation == "READ" else ((peer, local), 1)
    return pair_of(cells, sides, near, known)


def stage(
    local: Worker,
    remotes: Iterable[Worker],
    *,
    staging: str,
    whole: bool = False,
    not_transferred: Iterable[str] = (),
    replicas: int = 1,
) -> StagedPlan:
    """The plan by which ``local`` reads from ``remotes`` into its region ``staging``, and copies bytes into place.

    No view of ``local`` may use that region. With ``whole``, everything that a source's views hold along an axis is
    read where any of it is needed: more bytes, in longer runs. Other arguments are those of :func:`plan_reads`.

    >>> from kvplan import Blocks, Model, Region
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (decode,), (prefill,) = (model.engine(name, num_blocks=99, layout=layout)
    ...                          for name, layout in (("decode", "LBHNC"), ("prefill", "LBNHC")))
    >>> local = attrs.evolve(decode, regions=(*decode.regions, Region("staging", 1 << 50, 8 << 20)))
    >>> staged = stage(local, [prefill], staging="staging")
    >>> staged
    <StagedPlan decode/0: 1 source, 144 positions at a time>
    >>> tables = {"local": {"attn": Blocks(range(20, 32))}, "remote": {"attn": Blocks(range(7, 19))}}
    >>> for chunk in staged.bind(**tables, tokens=(10, 190)):
    ...     print([spec.num_descriptors for spec in chunk.specs], chunk)
    [28] <Chunk of {'attn': (10, 144)}: 3842048 bytes read, 3842048 copied into place, buffer slot 0>
    [28] <Chunk of {'attn': (144, 190)}: 1318912 bytes read, 1318912 copied into place, buffer slot 1>
    >>> [spec.num_descriptors for spec in staged.direct.bind(**tables, tokens=(10, 190))]
    [9772]

    Raises what :func:`plan_reads` does; ``NAME`` for a region that ``local`` does not have, ``OVERLAP`` for one that
    its views use, and ``MEMORY`` for one without room for two blocks of each group.
    """
    region = checked_staging(local, staging)
    return Shares.of("READ", local, remotes, (), not_transferred, replicas).staged(region, whole)


def stage_writes(
    local: Worker,
    remotes: Iterable[Worker],
    siblings: Iterable[Worker] = (),
    *,
    staging: str,
    not_transferred: Iterable[str] = (),
    replicas: int = 1,
) -> StagedPlan:
    """The plan by which ``local`` copies bytes into its region ``staging``, and writes them to ``remotes`` from there.

    No view of ``local`` may use that region. Other arguments are those of :func:`plan_writes`. Each writer of an engine
    may stage or write directly: it writes the same bytes.

    >>> from kvplan import Blocks, Model, Region
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (prefill,), decode = (model.engine(name, tp=tp, num_blocks=99, layout=layout)
    ...                       for name, tp, layout in (("prefill", 1, "LBNHC"), ("decode", 2, "LBHNC")))
    >>> local = attrs.evolve(prefill, regions=(*prefill.regions, Region("staging", 1 << 50, 8 << 20)))
    >>> print(stage_writes(local, decode, staging="staging").cost(100))
    100 tokens directly: 2867200 bytes in 5600 descriptors of 512 bytes
    100 tokens staged: 2867200 bytes in 392 descriptors of 2048 bytes (56) and 8192 bytes (336)
      at most 112 local copies in 1 chunk, 8257536 bytes of staging memory

    Raises what :func:`plan_writes` does, and what :func:`stage` does for a staging region.
    """
    region = checked_staging(local, staging)
    return Shares.of("WRITE", local, remotes, siblings, not_transferred, replicas).staged(region)
