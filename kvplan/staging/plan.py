"""Staged plans: requests that move in two steps, for layouts that leave only short runs.

A destination reads long runs of a source into a staging buffer, and then copies the bytes into
place by strided local copies. An ordinary plan moves bytes between workers. Buffers lie in one
region, which the caller has set aside.

- staging.S12: both steps together write the bytes that a direct plan would, from the same sources,
  and otherwise only the staging region. Bytes that are read but not needed stay in the staging
  region.
- staging.S13: a request moves in *chunks*, one for each window of positions that has any. Chunk n
  also carries the n-th state of each local state group. Chunks alternate between two buffer slots:
  a slot is refilled only after its previous contents were copied out.
- staging.S14: the buffer slot of a chunk holds the blocks of the peer that have a position of the
  chunk, and no others.
- staging.S15: a wrong request is refused before there is any chunk.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import ID_END, having, instance, integer
from kvplan._text import count
from kvplan.budget import Budget
from kvplan.describe.blocks import POSITION_END, Blocks, Range, Tokens
from kvplan.describe.views import Group, Region
from kvplan.describe.worker import Worker, checked_names
from kvplan.errors import KVPlanError
from kvplan.plan.align import in_tokens, position_of, slots
from kvplan.plan.bind import range_of, wanted
from kvplan.plan.cells import Cell
from kvplan.plan.pairs import PairPlanner, Share, budget_of, plan_pairs, shares
from kvplan.plan.specs import READ, ReadSpec
from kvplan.plan.transfer import TransferPlan, checked_workers
from kvplan.staging.buffers import (
    Demand,
    Pool,
    StagedPeer,
    StagingBuffer,
    checked_staging,
    fit,
    pools,
    staging_buffer,
)
from kvplan.staging.copies import SOURCE, BothGroups, Copy, copy_templates, ordinals
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

    All specs fill ``buffer_slot``, 0 or 1; then all copies empty it. ``tokens`` has the chunk's
    ranges by local group: a direct plan moves the same for these ranges, where the destination has
    all their blocks.
    """

    tokens: GroupRanges
    specs: tuple[ReadSpec, ...]
    copies: tuple[Copy, ...]
    buffer_slot: int

    def __repr__(self) -> str:
        moved = sum(spec.num_bytes for spec in self.specs)
        copied = sum(copy.num_bytes for copy in self.copies)
        steps = f"{count(moved, 'byte')} read, {copied} copied into place"
        return f"<Chunk of {dict(self.tokens)}: {steps}, buffer slot {self.buffer_slot}>"


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

    def bind(
        self,
        *,
        local: BlockTables,
        remote: BlockTables,
        tokens: Tokens = None,
        buffer_slots: Iterator[int] | None = None,
    ) -> Iterator[Chunk]:
        """Return what one request moves, chunk by chunk.

        Takes and raises what :meth:`TransferPlan.bind` does.

        The second step of a chunk may begin when its first step is done: see :class:`Chunk`. A
        chunk may begin to fill a buffer slot when the chunk before it in that slot is done.
        ``buffer_slots`` gives each chunk its slot when the chunk is made; by default they
        alternate. Requests that share a staging region share one such iterator.
        """
        if buffer_slots is None:
            buffer_slots = itertools.cycle((0, 1))
        else:
            having("__next__", buffer_slots, "buffer_slots", "an iterator of slots")
        self.direct.check(local=local, remote=remote, tokens=tokens)
        wants = [self._wanted(peer, local, tokens) for peer in self.peers]
        ranges = list(chunk_ranges(wants, local, self.num_positions))
        if self._has_wide_ids:
            # making all chunks raises where an id that is needed does not fit
            deque(self._chunks(ranges, wants, local, remote, itertools.repeat(0)), maxlen=0)
        return self._chunks(ranges, wants, local, remote, buffer_slots)

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

    def _chunks(
        self,
        ranges: Iterable[GroupRanges],
        wants: Sequence[WantedRanges],
        local: BlockTables,
        remote: BlockTables,
        buffer_slots: Iterator[int],
    ) -> Iterator[Chunk]:
        """Yield the chunks of a request, one for each of ``ranges`` in which something moves."""
        slot: int | None = None
        for tokens in ranges:
            if slot is None:  # a range in which nothing moves leaves its slot to the next one
                slot = _next_slot(buffer_slots)
            specs = list[ReadSpec]()
            copies = list[Copy]()
            for peer, peer_wants in zip(self.peers, wants, strict=True):
                spec, peer_copies = _steps(peer, peer_wants, tokens, slot, local, remote)
                specs.append(spec)
                copies += peer_copies
            if copies:
                yield Chunk(self._in_tokens(tokens), tuple(specs), tuple(copies), slot)
                slot = None

    def _in_tokens(self, ranges: GroupRanges) -> GroupRanges:
        """Return the ranges of tokens of some positions by local group."""
        groups = {group.name: group for group in self.direct.local.groups}
        return {name: in_tokens(groups[name], positions) for name, positions in ranges.items()}

    def __repr__(self) -> str:
        peers = count(len(self.peers), "source")
        positions = count(self.num_positions, "position")
        return f"<StagedPlan {self.direct.local.label}: {peers}, {positions} at a time>"


def _steps(
    peer: StagedPeer,
    wants: WantedRanges,
    tokens: GroupRanges,
    slot: int,
    local: BlockTables,
    remote: BlockTables,
) -> tuple[ReadSpec, list[Copy]]:
    """Return both steps of a part of a request with one peer, through a buffer slot."""
    staged_tables = dict[str, Blocks]()
    staged_ranges = dict[str, Range]()
    copies = list[Copy]()
    for groups, buffer_group in peer.buffer.groups.items():
        destination, _ = groups
        local_table = local[destination.name]
        start, stop = tokens[destination.name]
        low, high = wants[groups]
        # the part of the chunk that this peer serves
        low = max(low, start)
        high = min(high, stop)
        # one array for each template of the group: the positions of the chunk that it copies
        templates = peer.templates_of(buffer_group)
        positions = [template.positions(local_table, low, high) for template in templates]
        slot_table = _slot_table(peer.buffer, groups, slot, positions)
        staged_tables[buffer_group.name] = slot_table
        positions_in_slot = (low, high) if slot_table.ids.size else (0, 0)
        staged_ranges[buffer_group.name] = in_tokens(buffer_group, positions_in_slot)
        for template, copied_positions in zip(templates, positions, strict=True):
            copies += template.copies(copied_positions, low, high, (local_table, slot_table))
    remote_tables = {source.name: remote[source.name] for _, source in peer.buffer.groups}
    (spec,) = peer.transfer.bind(local=staged_tables, remote=remote_tables, tokens=staged_ranges)
    return spec, copies


def _next_slot(buffer_slots: Iterator[int]) -> int:
    """Return the buffer slot of a chunk. Raises ``RANGE`` or ``TYPE`` for what is none."""
    slot = next(buffer_slots, None)
    if slot is None:
        raise KVPlanError(
            "RANGE",
            "make a chunk",
            expected="a buffer slot for each chunk",
            got="an iterator that has ended",
            hint="itertools.cycle((0, 1)) never ends",
        )
    return integer(slot, "a buffer slot", high=2)


def _slot_table(
    buffer: StagingBuffer,
    groups: BothGroups,
    slot: int,
    positions: Iterable[Ints],
) -> Blocks:
    """Return the block table of a buffer slot for the peer's blocks of some positions, rule
    staging.S14.

    They fill the slot from its first block on. All other blocks are gaps.
    """
    block_ordinals = ordinals(groups[SOURCE], positions)
    # ids of the second slot's blocks follow those of the first one's
    first_block = slot * buffer.slot_blocks[buffer.groups[groups].name]
    block_ids = np.arange(first_block, first_block + block_ordinals.size)
    return Blocks(block_ids, ordinals=block_ordinals, listed=(0, POSITION_END))


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
            if local.tokens_per_block is None:
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
    first_slots = table.scattered * slots(group)
    first_positions = position_of(group, first_slots)
    last_positions = position_of(group, first_slots + slots(group) - 1)
    first_windows = np.maximum(first_positions, low) // window
    last_windows = np.minimum(last_positions, high - 1) // window
    numbers = set[int]()
    for first, last in zip(first_windows.tolist(), last_windows.tolist(), strict=True):
        numbers.update(range(first, last + 1))
    return numbers


@attrs.frozen(eq=False)
class Shares:
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
    ) -> Shares:
        """Return what a worker reads. Raises what :func:`plan_reads` does."""
        peers = checked_workers("remotes", remotes, local)
        skipped = checked_names(not_transferred, local, *peers)
        budget = budget_of(budget)
        local_shares = list(shares([local], peers, skipped, budget))
        pairs = plan_pairs(READ, [local], peers, local_shares, budget)[local.key]
        direct = TransferPlan("READ", local, peers, (), skipped, pairs)
        return cls(direct, tuple((share.source, share.cells) for share in local_shares), budget)

    def staged(self, region: Region, whole: bool = False) -> StagedPlan:
        """Return the plan in two steps, through a region of the local worker."""
        local = self.direct.local
        pools_of_peers = [pools(peer, cells, self.budget, whole) for peer, cells in self.cells]
        fitted = fit(_demands(pools_of_peers), region.size_bytes)
        # pools lie one after the other in the region, peer by peer
        places = iter(fitted.places)
        planner = PairPlanner(READ, self.budget)
        peers = list[StagedPeer]()
        for (peer, cells), pools_of in zip(self.cells, pools_of_peers, strict=True):
            buffer = staging_buffer(local, peer, region.name, pools_of, places)
            # the buffer under the key of its worker
            worker = attrs.evolve(buffer.worker, engine_id=local.engine_id, rank=local.rank)
            pair = planner.pair(Share(worker, peer, buffer.transfer_step(peer, self.budget)))
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
    <Chunk of {'attn': (10, 144)}: 3842048 bytes read, 3842048 copied into place, buffer slot 0>
    [28]
    <Chunk of {'attn': (144, 190)}: 1318912 bytes read, 1318912 copied into place, buffer slot 1>
    [28]
    >>> [spec.num_descriptors for spec in staged.direct.bind(**tables, tokens=(10, 190))]
    [9772]

    Raises what :func:`plan_reads` does; ``NAME`` for a region that ``local`` does not have,
    ``OVERLAP`` for one that its views use, and ``MEMORY`` for one without room for two blocks of
    each group.
    """
    region = checked_staging(local, staging)
    instance(bool, whole, "whole")
    return Shares.of(local, remotes, not_transferred, budget).staged(region, whole)
