"""Staged plans: requests that move in two steps, for layouts that leave only short runs.

A destination reads long runs of a source into a staging buffer, and then copies the bytes into
place by strided local copies. An ordinary plan moves bytes between workers. Buffers lie in one
region, which the caller has set aside.

- staging.S12: both steps together write the bytes that a direct plan would, from the same sources,
  and otherwise only the staging region. Bytes that are read but not needed stay in the staging
  region.
- staging.S13: a request moves in *chunks*, one for each window of positions that has any. Chunk n
  also carries the n-th state of each local state group. A chunk takes staging blocks that are free,
  the lowest ones, and has them until its bytes were copied out.
- staging.S14: a chunk takes as many staging blocks as the peer has blocks with a position of the
  chunk.
- staging.S15: a wrong request is refused before there is any chunk.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import ID_END, instance
from kvplan._text import count
from kvplan.budget import Budget
from kvplan.describe.blocks import POSITION_END, Blocks, Range, Tokens
from kvplan.describe.views import Group, Region
from kvplan.describe.worker import Worker, checked_names
from kvplan.errors import KVPlanError
from kvplan.plan.align import in_tokens, position_of
from kvplan.plan.bind import range_of, wanted
from kvplan.plan.cells import Cell
from kvplan.plan.pairs import Assignment, PairPlanner, assignments, budget_of, plan_pairs
from kvplan.plan.specs import READ, ReadSpec
from kvplan.plan.transfer import TransferPlan, checked_workers
from kvplan.staging.buffers import (
    Demand,
    PlacedPool,
    Pool,
    StagedPeer,
    checked_staging,
    fit,
    pools,
    staging_buffer,
)
from kvplan.staging.copies import (
    DESTINATION,
    SOURCE,
    BothGroups,
    BothTables,
    Copy,
    CopyTemplate,
    copy_templates,
    ordinals,
)
from kvplan.staging.cost import StagedCost, staged_cost

GroupRanges = Mapping[str, Range]
"""A range of positions, or of states, by name of the local group."""

WantedRanges = Mapping[BothGroups, Range]
"""The positions, or states, of a request that a destination's group wants from a source's."""

BlockTables = Mapping[str, Blocks]
"""Block tables by group name."""


@attrs.frozen(eq=False, repr=False)
class Chunk:
    """What moves together: ``specs``, one for each of the plan's transfers, and local ``copies``.

    All specs fill staging blocks; then all copies empty them. ``blocks`` has their ids, for each
    group of each staging buffer. ``tokens`` has the chunk's ranges by local group: a direct plan
    moves the same for these ranges, where the destination has all their blocks.
    """

    tokens: GroupRanges
    specs: tuple[ReadSpec, ...]
    copies: tuple[Copy, ...]
    blocks: tuple[Ints, ...]

    def __repr__(self) -> str:
        moved = sum(spec.num_bytes for spec in self.specs)
        copied = sum(copy.num_bytes for copy in self.copies)
        steps = f"{count(moved, 'byte')} read, {copied} copied into place"
        blocks = count(sum(ids.size for ids in self.blocks), "staging block")
        return f"<Chunk of {dict(self.tokens)}: {steps}, {blocks}>"


StagingLayout = tuple[tuple[PlacedPool, ...], ...]
"""The pools of each group of each staging buffer of a plan."""


class FreeBlocks:
    """The staging blocks of a layout that no chunk has.

    >>> from kvplan.staging.buffers import PoolExtent
    >>> pool = PlacedPool(PoolExtent(0, num_blocks=4), block_bytes=64, inner_bytes=64)
    >>> free = FreeBlocks(((pool,),))
    >>> first, second = free.take([3]), free.take([2])
    >>> first, second
    ((array([0, 1, 2]),), None)
    >>> free.give_back(first)
    >>> free.take([2])
    (array([0, 1]),)
    """

    def __init__(self, layout: StagingLayout) -> None:
        self.layout = layout
        # all pools of a group have as many blocks
        self._is_free = [np.ones(pools[0].extent.num_blocks, bool) for pools in layout]

    def take(self, numbers: Iterable[int]) -> tuple[Ints, ...] | None:
        """Take some blocks of each group, or none where a group has too few."""
        taken = list[Ints]()
        for is_free, number in zip(self._is_free, numbers, strict=True):
            ids = np.flatnonzero(is_free)[:number]
            if ids.size < number:
                return None
            taken.append(ids)
        for is_free, ids in zip(self._is_free, taken, strict=True):
            is_free[ids] = False
        return tuple(taken)

    def give_back(self, blocks: Iterable[Ints]) -> None:
        """Give blocks back that were taken."""
        for is_free, ids in zip(self._is_free, blocks, strict=True):
            is_free[ids] = True


@attrs.frozen(eq=False, repr=False)
class StagedPlan:
    """What a worker reads in two steps, for any request.

    ``direct`` is the plan that reads the same in one step. ``peers`` has a staging buffer for each
    remote worker that bytes move from, and both steps through it. The buffers are in the
    local worker's region ``staging``. A chunk covers ``num_positions`` positions. A plan never
    changes: threads may share it and bind at once.
    """

    direct: TransferPlan
    peers: tuple[StagedPeer, ...]
    num_positions: int
    staging: str

    @property
    def transfers(self) -> tuple[TransferPlan, ...]:
        """The plan between each staging buffer and its peer.

        Its local worker has all regions of the local worker.
        """
        return tuple(peer.transfer for peer in self.peers)

    def cost(self, tokens: int | None = None) -> StagedCost:
        """Return what a request of ``tokens`` positions takes, counted without block tables.

        ``None``: the fewest positions after which the direct plan repeats. Raises what
        :func:`kvplan.plan.cost.cost` does.
        """
        return staged_cost(self.direct.cost(tokens), self.peers, self.num_positions)

    @cached_property
    def layout(self) -> StagingLayout:
        """Where staging blocks are: chunks of plans that are equal in it may share a region."""
        buffers = [peer.buffer for peer in self.peers]
        return tuple([pools for buffer in buffers for pools in buffer.extents.values()])

    def bind(
        self, *, local: BlockTables, remote: BlockTables, tokens: Tokens = None
    ) -> Iterator[Chunk]:
        """Return what one request moves, chunk by chunk.

        Takes and raises what :meth:`TransferPlan.bind` does.

        The second step of a chunk may begin when its first step is done: see :class:`Chunk`. A
        chunk may begin when all chunks before the last one are done, whose blocks it may have.
        """
        return self.requested(local=local, remote=remote, tokens=tokens).alone()

    def requested(
        self, *, local: BlockTables, remote: BlockTables, tokens: Tokens = None
    ) -> StagedRequest:
        """Return a request, of which chunks are made where blocks are free.

        Takes and raises what :meth:`TransferPlan.bind` does.
        """
        self.direct.check(local=local, remote=remote, tokens=tokens)
        wants = [self._wanted(peer, local, tokens) for peer in self.peers]
        ranges = deque(chunk_ranges(wants, local, self.num_positions))
        request = StagedRequest(self, local, remote, wants, ranges)
        if self._has_wide_ids:
            # making all chunks raises where an id that is needed does not fit
            deque(attrs.evolve(request, ranges=ranges.copy()).alone(), maxlen=0)
        return request

    @cached_property
    def _has_wide_ids(self) -> bool:
        """Some id of a transfer may not fit."""
        tables = [peer.pair.local_table for peer in self.peers]
        tables += [peer.pair.remote_table for peer in self.peers]
        return any(table.num_ids > ID_END for table in tables)

    def _wanted(self, peer: StagedPeer, tables: BlockTables, tokens: Tokens) -> WantedRanges:
        """Return the ranges that a peer serves, given the local block tables."""
        ranges = {}
        for groups in peer.buffer.groups:
            local, _ = groups
            ranges[groups] = wanted(local, tables[local.name], range_of(tokens, local), "local")
        return ranges

    def _in_tokens(self, ranges: GroupRanges) -> GroupRanges:
        groups = {group.name: group for group in self.direct.local.groups}
        return {name: in_tokens(groups[name], positions) for name, positions in ranges.items()}

    def __repr__(self) -> str:
        peers = count(len(self.peers), "source")
        positions = count(self.num_positions, "position")
        return f"<StagedPlan {self.direct.local.label}: {peers}, {positions} at a time>"


@attrs.define(eq=False)
class StagedRequest:
    """A request of a plan: its tables, what each peer serves, and ``ranges`` still to be moved."""

    plan: StagedPlan
    local: BlockTables
    remote: BlockTables
    wants: Sequence[WantedRanges]
    ranges: deque[GroupRanges]
    _next: list[_GroupMoves] = attrs.field(factory=list, init=False)

    def next_chunk(self, free: FreeBlocks) -> Chunk | None:
        """Make the next chunk. Return None where too few blocks are free, or nothing is left."""
        while self.ranges:
            tokens = self.ranges[0]
            moves = self._next or list(self._moves(tokens))
            if any(move.num_copied for move in moves):
                blocks = free.take([move.ordinals.size for move in moves])
                if blocks is None:
                    self._next = moves
                    return None
                self._next = []
                self.ranges.popleft()
                try:
                    return self._chunk(tokens, moves, blocks)
                except KVPlanError:
                    free.give_back(blocks)
                    raise
            # a range in which nothing moves
            self.ranges.popleft()
        return None

    def alone(self) -> Iterator[Chunk]:
        """Yield all chunks, where no other request uses staging blocks."""
        free = FreeBlocks(self.plan.layout)
        held = deque[Chunk]()
        while self.ranges:
            chunk = self.next_chunk(free)
            if chunk is not None:
                held.append(chunk)
                yield chunk
            elif self.ranges:
                free.give_back(held.popleft().blocks)

    def _moves(self, tokens: GroupRanges) -> Iterator[_GroupMoves]:
        """Yield what a chunk moves, for each group of each peer's buffer."""
        for peer, wants in zip(self.plan.peers, self.wants, strict=True):
            for groups, buffer_group in peer.buffer.groups.items():
                start, stop = tokens[groups[DESTINATION].name]
                low, high = wants[groups]
                # what this peer serves of the chunk
                span = max(low, start), min(high, stop)
                table = self.local[groups[DESTINATION].name]
                templates = peer.templates_of(buffer_group)
                # one array for each template: the positions of the chunk that it copies
                positions = [template.positions(table, *span) for template in templates]
                yield _GroupMoves(groups, buffer_group, span, templates, positions)

    def _chunk(
        self, tokens: GroupRanges, moves: Iterable[_GroupMoves], blocks: tuple[Ints, ...]
    ) -> Chunk:
        """Return the chunk in staging blocks."""
        placed = iter(zip(moves, blocks, strict=True))
        specs = list[ReadSpec]()
        copies = list[Copy]()
        for peer in self.plan.peers:
            staged_tables = dict[str, Blocks]()
            staged_ranges = dict[str, Range]()
            for move, ids in islice(placed, len(peer.buffer.groups)):
                name = move.buffer_group.name
                # all blocks of the peer without a position of the chunk are gaps
                table = Blocks(ids, ordinals=move.ordinals, listed=(0, POSITION_END))
                staged_tables[name] = table
                positions_moved = move.span if ids.size else (0, 0)
                staged_ranges[name] = in_tokens(move.buffer_group, positions_moved)
                copies += move.copies((self.local[move.groups[DESTINATION].name], table))
            sources = [source.name for _, source in peer.buffer.groups]
            remote = {name: self.remote[name] for name in sources}
            specs += peer.transfer.bind(local=staged_tables, remote=remote, tokens=staged_ranges)
        return Chunk(self.plan._in_tokens(tokens), tuple(specs), tuple(copies), blocks)


@attrs.frozen(eq=False)
class _GroupMoves:
    """What a chunk moves of a pair of groups: ``positions`` of each template, within ``span``."""

    groups: BothGroups
    buffer_group: Group
    span: Range
    templates: Sequence[CopyTemplate]
    positions: Sequence[Ints]
    ordinals: Ints = attrs.field(init=False)
    """Those of the peer's blocks with such a position, rule staging.S14."""

    @ordinals.default
    def _ordinals(self) -> Ints:
        return ordinals(self.groups[SOURCE], self.positions)

    @property
    def num_copied(self) -> int:
        """Positions that move, once for each template."""
        return sum(positions.size for positions in self.positions)

    def copies(self, tables: BothTables) -> Iterator[Copy]:
        """Yield the local copies, given the block tables of both sides."""
        for template, positions in zip(self.templates, self.positions, strict=True):
            yield from template.copies(positions, *self.span, tables)


def chunk_ranges(
    wants: Iterable[WantedRanges], tables: BlockTables, window: int
) -> Iterator[GroupRanges]:
    """Yield the ranges of each chunk of a request, by local group: rule staging.S13.

    ``wants`` has the ranges of each peer, ``tables`` the local blocks.

    >>> destination, source = Group("window", 16), Group("attn", 32)
    >>> wants = [{(destination, source): (40, 100)}]
    >>> list(chunk_ranges(wants, {"window": Blocks(range(8))}, 64))
    [{'window': (40, 64)}, {'window': (64, 100)}]
    """
    no_ranges = dict[str, Range]()
    tokens_by_window: dict[int, dict[str, Range]] = {}
    states_by_group: dict[str, set[int]] = {}
    for ranges in wants:
        for (local, _), (low, high) in ranges.items():
            table = tables[local.name]
            no_ranges[local.name] = (0, 0)
            if local.is_state:
                # a state is a block, so its ordinal is the block's
                states = table.ordinals[(low <= table.ordinals) & (table.ordinals < high)]
                states_by_group.setdefault(local.name, set()).update(states.tolist())
                continue
            for number in _windows(local, table, low, high, window):
                # several peers may serve a window: the range that covers what all of them serve
                start = max(low, number * window)
                stop = min(high, (number + 1) * window)
                token_ranges = tokens_by_window.setdefault(number, {})
                first, last = token_ranges.get(local.name, (start, stop))
                token_ranges[local.name] = min(first, start), max(last, stop)
    token_chunks = [tokens_by_window[number] for number in sorted(tokens_by_window)]
    # chunk n has the n-th window with positions, and the n-th state of each group
    state_chunks = _state_chunks(states_by_group)
    nothing_more = dict[str, Range]()
    chunks = itertools.zip_longest(token_chunks, state_chunks, fillvalue=nothing_more)
    for token_ranges, state_ranges in chunks:
        yield {**no_ranges, **token_ranges, **state_ranges}


def _state_chunks(states_by_group: Mapping[str, set[int]]) -> list[dict[str, Range]]:
    """Return the ranges of states of each chunk: the n-th one has the n-th state of each group."""
    num_chunks = max(map(len, states_by_group.values()), default=0)
    chunks = [dict[str, Range]() for _ in range(num_chunks)]
    for group_name, states in states_by_group.items():
        for nth, state in enumerate(sorted(states)):
            chunks[nth][group_name] = (state, state + 1)
    return chunks


def _windows(group: Group, table: Blocks, low: int, high: int, window: int) -> Iterable[int]:
    """Return the numbers of the windows in which a group has blocks for ``[low, high)``."""
    if low >= high:
        return ()
    if table.scattered is None:
        return range(low // window, (high - 1) // window + 1)
    # one element for each block: the windows of its first and of its last position in the range
    first_slots = table.scattered * group.num_slots
    first_positions = position_of(group, first_slots)
    last_positions = position_of(group, first_slots + group.num_slots - 1)
    first_windows = np.maximum(first_positions, low) // window
    last_windows = np.minimum(last_positions, high - 1) // window
    numbers = set[int]()
    for first, last in zip(first_windows.tolist(), last_windows.tolist(), strict=True):
        numbers.update(range(first, last + 1))
    return numbers


@attrs.frozen(eq=False)
class DirectReads:
    """The ``direct`` plan of a worker, and the ``cells`` that it reads from each peer.

    They are planned once for all strategies, within one ``budget``.
    """

    direct: TransferPlan
    cells: tuple[tuple[Worker, Sequence[Cell]], ...]
    budget: Budget

    @classmethod
    def of(
        cls,
        local: Worker,
        remotes: Iterable[Worker],
        not_transferred: Iterable[str],
        budget: Budget | None = None,
    ) -> DirectReads:
        """Return what a worker reads. Raises what :func:`plan_reads` does."""
        peers = checked_workers("remotes", remotes, local)
        skipped = checked_names(not_transferred, local, *peers)
        budget = budget_of(budget)
        local_assignments = list(assignments([local], peers, skipped, budget))
        pairs = plan_pairs(READ, [local], peers, local_assignments, budget)[local.key]
        direct = TransferPlan("READ", local, peers, (), skipped, pairs)
        return cls(
            direct,
            tuple((each.source, each.cells) for each in local_assignments),
            budget,
        )

    def staged(self, region: Region, whole: bool = False) -> StagedPlan:
        """Return the plan in two steps, through a region of the local worker."""
        local = self.direct.local
        pools_of_peers = [pools(peer, cells, self.budget, whole) for peer, cells in self.cells]
        fitted = fit(_demands(pools_of_peers), region.size_bytes)
        # pools lie one after the other in the region, peer by peer
        extents = iter(fitted.extents)
        planner = PairPlanner(READ, self.budget)
        peers = list[StagedPeer]()
        for (peer, cells), pools_of in zip(self.cells, pools_of_peers, strict=True):
            buffer = staging_buffer(local, peer, region.name, pools_of, extents)
            # the buffer under the key of its worker
            worker = attrs.evolve(buffer.worker, engine_id=local.engine_id, rank=local.rank)
            pair = planner.pair(Assignment(worker, peer, buffer.transfer_step(peer, self.budget)))
            transfer = attrs.evolve(self.direct, local=worker, remotes=(peer,), pairs=(pair,))
            templates = copy_templates(local.regions, buffer.local_step(cells), self.budget)
            peers.append(StagedPeer(buffer, transfer, templates))
        return StagedPlan(self.direct, tuple(peers), fitted.num_positions, region.name)


def _demands(
    pools_of_peers: Iterable[Mapping[BothGroups, Iterable[Pool]]],
) -> list[Demand]:
    """Return the demands of all pools, in the order in which they lie in the staging region."""
    demands = list[Demand]()
    for pools_of in pools_of_peers:
        for (_, source), group_pools in pools_of.items():
            demands += [(source, pool.block_bytes) for pool in group_pools]
    return demands


def stage(
    local: Worker,
    remotes: Iterable[Worker],
    *,
    staging: str,
    whole: bool = False,
    not_transferred: Iterable[str] = (),
    budget: Budget | None = None,
) -> StagedPlan:
    """Return the plan by which ``local`` reads into its region ``staging``, and copies from there.

    No view of ``local`` may use that region. With ``whole``, everything that a source's views hold
    along an axis is read where any of it is needed: more bytes, in longer runs. Other arguments are
    those of :func:`plan_reads`.

    >>> from kvplan import Blocks, Model, Region
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (decode,), (prefill,) = (model.engine(name, num_blocks=99, layout=layout)
    ...                          for name, layout in (("decode", "LBHNC"), ("prefill", "LBNHC")))
    >>> local = attrs.evolve(decode, regions=(*decode.regions, Region("staging", 1 << 50, 8 << 20)))
    >>> staged = stage(local, [prefill], staging="staging")
    >>> staged
    <StagedPlan decode/0: 1 source, 144 positions at a time>
    >>> local_table, remote_table = Blocks(range(20, 32)), Blocks(range(7, 19))
    >>> tables = {"local": {"attn": local_table}, "remote": {"attn": remote_table}}
    >>> for chunk in staged.bind(**tables, tokens=(10, 190)):
    ...     print(chunk)
    ...     print([spec.num_descriptors for spec in chunk.specs])
    <Chunk of {'attn': (10, 144)}: 3842048 bytes read, 3842048 copied into place, 9 staging blocks>
    [28]
    <Chunk of {'attn': (144, 190)}: 1318912 bytes read, 1318912 copied into place, 3 staging blocks>
    [28]
    >>> [spec.num_descriptors for spec in staged.direct.bind(**tables, tokens=(10, 190))]
    [9772]

    Raises what :func:`plan_reads` does; ``NAME`` for a region that ``local`` does not have,
    ``OVERLAP`` for one that its views use, and ``MEMORY`` for one without room for two blocks of
    each group.
    """
    region = checked_staging(local, staging)
    instance(bool, whole, "whole")
    return DirectReads.of(local, remotes, not_transferred, budget).staged(region, whole)
