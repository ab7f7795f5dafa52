"""Plans of one worker: all that it reads from, or writes to, its remote workers.

The stages of planning know a destination and its sources; here they become local and remote. A
worker that reads is the destination. A worker that writes is one of the sources: it plans together
with its siblings, the other workers of its engine, so that all of them agree without communication
who writes what several of them hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import attrs
import numpy as np

from kvplan._arrays import read_only
from kvplan._checks import instance, members, wrong_type
from kvplan.budget import Budget
from kvplan.describe.blocks import Blocks, Range, Tokens, check_apart, check_blocks
from kvplan.describe.worker import Key, Worker, checked_names
from kvplan.errors import KVPlanError
from kvplan.plan.bind import (
    Terms,
    Workspace,
    add_terms,
    check_names,
    check_same_request,
    range_of,
    terms,
    wanted,
)
from kvplan.plan.cost import Cost, cost
from kvplan.plan.pairs import assignments, budget_of, plan_pairs
from kvplan.plan.series import GroupPair, SideTable, TablePair
from kvplan.plan.specs import READ, WRITE, Direction, Pair, ReadSpec, direction_of

SIDE_NAMES: Final = ("local", "remote")
NO_RANGE: Final = "no token range given: every position in the destination's blocks is transferred"


class Requested(NamedTuple):
    """What a request moves between a pair of groups: block tables, and a range of positions.

    ``has_range`` says whether the request gave the range, or the destination's blocks imply it.
    """

    pair: GroupPair
    tables: TablePair
    positions: Range
    has_range: bool


@attrs.frozen(eq=False, repr=False)
class TransferPlan:
    """All that a local worker reads from, or writes to, its remote workers, for any request.

    ``operation`` is ``READ`` or ``WRITE``. A plan never changes: threads may share it and bind at
    once.
    """

    operation: str
    local: Worker
    remotes: tuple[Worker, ...]
    siblings: tuple[Worker, ...]
    not_transferred: tuple[str, ...]
    pairs: tuple[Pair, ...]

    @cached_property
    def direction(self) -> Direction:
        """Which side is local: the destination of reads, the source of writes."""
        return direction_of(self.operation, f"use the plan of {self.local.label}")

    def bind(
        self,
        *,
        local: Mapping[str, Blocks],
        remote: Mapping[str, Blocks],
        tokens: Tokens = None,
        workspace: Workspace | None = None,
    ) -> tuple[ReadSpec, ...]:
        """Return what one request moves: one spec for each pair, in order, even if nothing moves.

        ``local`` and ``remote`` are block tables by group name. ``tokens`` is one range of
        positions for all token groups, or a range for each local group by name; the range of a
        state group counts states. With a range, tables may list more blocks than it needs: engines
        allocate ahead, and a prompt moves in chunks. A group without a range moves every position
        in the destination's blocks, and its source lists no more blocks than they need: more would
        mean that one side counts blocks of another size. A ``workspace`` provides the memory for
        the ids; each thread needs its own.

        Raises ``NAME``, ``TYPE``, ``BLOCKS``, ``TOKENS`` or ``INT``, or ``RANGE`` for over 2**28
        ids with one worker.
        """
        terms_by_pairs = self._terms(local, remote, tokens)
        if workspace is not None:
            instance(Workspace, workspace, "workspace").clear()
        direction = self.direction
        # Pairs of workers with the same group pairs share their ids.
        bound = {}
        for group_pairs, all_terms in terms_by_pairs.items():
            ids, shapes = add_terms(all_terms, workspace)
            bound[group_pairs] = ids[direction.local], ids[direction.remote], shapes
        specs = dict(self.idle)
        key = self.local.key
        for pair in self._moving:
            ends = (key, pair.remote, pair.local_table, pair.remote_table)
            specs[pair.remote] = ReadSpec(self.operation, *ends, *bound[pair.group_pairs])
        return tuple(specs.values())

    def check(
        self, *, local: Mapping[str, Blocks], remote: Mapping[str, Blocks], tokens: Tokens = None
    ) -> None:
        """Raise what :meth:`bind` would, but ``INT`` and ``RANGE``, without computing ids."""
        self._terms(local, remote, tokens)

    def requested(
        self, *, local: Mapping[str, Blocks], remote: Mapping[str, Blocks], tokens: Tokens = None
    ) -> dict[tuple[GroupPair, ...], list[Requested]]:
        """Return what a request moves of each distinct ``group_pairs``, without computing ids.

        For each pair of groups, in order: the block tables of both sides and the range of positions
        that moves. Raises what :meth:`bind` does for its arguments, but for blocks that a series
        looks up and a table lacks.
        """
        self._check_request(local, remote, tokens)
        direction = self.direction
        destination_side, source_side = direction.by_role(*SIDE_NAMES)
        destination_tables, source_tables = direction.by_role(local, remote)
        ranges = {group.name: range_of(tokens, group) for group in self.local.groups}
        requested: dict[tuple[GroupPair, ...], list[Requested]] = {}
        for worker_pair in self._moving:
            requested[worker_pair.group_pairs] = []
        for group_pairs, of_pairs in requested.items():
            for pair in group_pairs:
                destination, source = pair.groups
                blocks = destination_tables[destination.name]
                tables = (
                    SideTable(destination, blocks, destination_side),
                    SideTable(source, source_tables[source.name], source_side),
                )
                token_range = ranges[pair.groups[direction.local].name]
                if token_range is None:
                    check_same_request(*tables)
                try:
                    positions = wanted(destination, blocks, token_range, destination_side)
                except KVPlanError as error:
                    if token_range is not None:
                        raise
                    raise error.with_hint(NO_RANGE) from None
                of_pairs.append(Requested(pair, tables, positions, token_range is not None))
        return requested

    def _terms(
        self, local: Mapping[str, Blocks], remote: Mapping[str, Blocks], tokens: Tokens
    ) -> dict[tuple[GroupPair, ...], list[Terms]]:
        """Return the terms of a request's ids for each distinct ``group_pairs``.

        Several pairs may share them, rule plan.B5.
        """
        terms_by_pairs: dict[tuple[GroupPair, ...], list[Terms]] = {}
        requested = self.requested(local=local, remote=remote, tokens=tokens)
        for group_pairs, of_pairs in requested.items():
            all_terms: list[Terms] = []
            for pair, tables, positions, has_range in of_pairs:
                try:
                    all_terms += terms(pair, tables, positions)
                except KVPlanError as error:
                    if has_range:
                        raise
                    raise error.with_hint(NO_RANGE) from None
            terms_by_pairs[group_pairs] = all_terms
        return terms_by_pairs

    def with_remotes(self, remotes: Iterable[Worker]) -> TransferPlan:
        """Return this plan for other remote workers of the same geometries.

        Use it for the many equal engines of a deployment: only addresses are computed, and the
        result is what planning anew would give.

        >>> from kvplan import Model, plan_reads
        >>> model = Model.shipped("qwen2.5-1.5b")
        >>> decode, *peers = (model.engine(name, tp=2, num_blocks=9) for name in ("d", "p1", "p2"))
        >>> plan = plan_reads(decode[0], peers[0])
        >>> plan.with_remotes(peers[1]).pairs
        (<Pair with p2/0: 56 local rows>, <Pair with p2/1: 0 local rows>)

        Raises ``WORKER`` for a remote whose rank or geometry differs from those of the worker that
        it replaces.
        """
        workers = checked_workers("remotes", remotes, self.local)
        ranks = [worker.rank for worker in self.remotes]
        new_ranks = [worker.rank for worker in workers]
        if ranks != new_ranks or _order_of_keys(self.remotes) != _order_of_keys(workers):
            raise KVPlanError(
                "WORKER",
                "replace the remotes of a plan",
                expected=f"workers in the same order, of ranks {ranks}",
                got=f"ranks {new_ranks} of {', '.join(worker.label for worker in workers)}",
            )
        # Ids stay. Only the addresses of remote rows change.
        pairs = []
        for pair, replaced, worker in zip(self.pairs, self.remotes, workers, strict=True):
            if worker.outline != replaced.outline:
                raise KVPlanError(
                    "WORKER",
                    f"replace {replaced.label}",
                    expected="a worker with the same views, in other regions",
                    got=f"{worker.label}, which differs",
                    hint="compare says where; plan anew",
                )
            table = pair.remote_table
            if pair.group_pairs:
                table = table.in_regions(worker.regions)
            pairs.append(attrs.evolve(pair, remote=worker.key, remote_table=table))
        return attrs.evolve(self, remotes=workers, pairs=tuple(pairs))

    def cost(self, tokens: int | None = None) -> Cost:
        """Return descriptors, bytes and ids of a request of ``tokens`` positions.

        Its blocks are scattered in their pools. ``None`` counts the fewest positions after which
        everything repeats. Raises ``TYPE`` or ``RANGE``.
        """
        return cost(self.direction, [(self.local.key, pair) for pair in self.pairs], tokens)

    @cached_property
    def _pools(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The blocks of the smallest pool of each group that moves, local and remote."""
        pools: tuple[dict[str, int], dict[str, int]] = ({}, {})
        pools_by_role = self.direction.by_role(*pools)
        for pair in self._moving:
            for group_pair in pair.group_pairs:
                sides = zip(pools_by_role, group_pair.groups, group_pair.num_blocks, strict=True)
                for pool, group, num_blocks in sides:
                    pool[group.name] = min(num_blocks, pool.get(group.name, num_blocks))
        return pools

    @cached_property
    def _overlaid(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """The pairs of groups that move and share bytes of their blocks, local and remote."""
        overlaid = []
        for pools, workers in zip(self._pools, ((self.local,), self.remotes), strict=True):
            names: dict[tuple[str, str], None] = {}
            for worker in workers:
                names |= dict.fromkeys(worker.overlaid)
            overlaid.append(tuple(pair for pair in names if {*pair} <= {*pools}))
        return tuple(overlaid)

    @cached_property
    def _moving(self) -> tuple[Pair, ...]:
        """The pairs that exchange bytes."""
        return tuple(pair for pair in self.pairs if pair.group_pairs)

    @cached_property
    def idle(self) -> Mapping[Key, ReadSpec]:
        """The specs of a request that moves nothing: one for each pair, by its remote worker."""
        no_ids = read_only(np.zeros(0, np.int32))
        specs = {}
        for pair in self.pairs:
            ends = (self.local.key, pair.remote, pair.local_table, pair.remote_table)
            specs[pair.remote] = ReadSpec(self.operation, *ends, no_ids, no_ids)
        return specs

    @cached_property
    def _group_names(self) -> tuple[frozenset[str], frozenset[str]]:
        """All groups of the local worker, and of the remotes."""
        local, remote = (
            frozenset(group.name for worker in workers for group in worker.groups)
            for workers in ((self.local,), self.remotes)
        )
        return local, remote

    def _check_request(
        self, local: Mapping[str, Blocks], remote: Mapping[str, Blocks], tokens: Tokens
    ) -> None:
        """Raise ``TYPE``, ``NAME`` or ``BLOCKS`` for tables or a range that no request may have."""
        # by index in SIDE_NAMES
        is_destination = self.direction.by_role(True, False)
        for side, tables in enumerate((local, remote)):
            if not isinstance(tables, (dict, Mapping)):  # a dict is known sooner
                raise wrong_type("block tables", "a mapping of groups to Blocks", tables)
            check_names(self._group_names[side], tables, "block table")
            for name, num_blocks in self._pools[side].items():
                blocks = tables.get(name)
                check_blocks(name, blocks, num_blocks, is_destination[side], SIDE_NAMES[side])
            for pair in self._overlaid[side]:
                check_apart(pair, tables, SIDE_NAMES[side])
        if not isinstance(tokens, tuple) and isinstance(tokens, Mapping):
            check_names(self._group_names[0], tokens, "token range")

    def __repr__(self) -> str:
        num_rows = sum(len(pair.local_table.rows) for pair in self.pairs)
        counts = f"{len(self.pairs)} remotes, {num_rows} local rows"
        return f"<TransferPlan {self.operation} {self.local.label}: {counts}>"


def _order_of_keys(workers: Sequence[Worker]) -> list[int]:
    """Return the indices of workers, sorted by their keys."""
    return sorted(range(len(workers)), key=lambda i: workers[i].key)


def checked_workers(
    subject: str, values: Iterable[Worker], *planned_with: Worker
) -> tuple[Worker, ...]:
    """Return ``values`` as a tuple of workers. They and ``planned_with`` must all differ."""
    workers = members(Worker, values, subject)
    for worker in planned_with:
        if not isinstance(worker, Worker):
            raise wrong_type("local", "one Worker", worker).with_hint(
                "plan_mesh takes all workers of an engine"
            )
    times = Counter(worker.label for worker in (*planned_with, *workers))
    label, count = max(times.items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        got = f"{label} {count} times"
        raise KVPlanError(
            "WORKER", f"plan with {subject}", expected="each worker once", got=got, worker=label
        )
    return workers


def plan_reads(
    local: Worker,
    remotes: Iterable[Worker],
    *,
    not_transferred: Iterable[str] = (),
    budget: Budget | None = None,
) -> TransferPlan:
    """Return the plan by which ``local``, the destination, reads what it needs from ``remotes``.

    ``not_transferred`` names tensors of ``local`` that need no source. If several remotes hold the
    same bytes, one of them is chosen, so that remotes are few and descriptors long; both sides
    compute the same choice. ``budget`` limits what planning may cost, by default to 1.25 GiB.

    >>> from kvplan import Model, plan_reads
    >>> model = Model.shipped("deepseek-v2-lite")  # 27 latents, which every rank has
    >>> decode = model.engine("decode", tp=2, num_blocks=9)
    >>> prefill = model.engine("prefill", tp=4, num_blocks=9)
    >>> [pair.num_bytes for pair in plan_reads(decode[1], prefill).cost().pairs]
    [0, 497664, 0, 0]

    Raises ``TENSOR`` or ``COVER`` for what no remote holds, ``GROUP``, ``DTYPE``, ``AXES`` or
    ``SIZE`` where a tensor differs between the sides, ``WORKER`` for a worker given twice,
    ``RANGE`` for what is too large to list.
    """
    sources = checked_workers("remotes", remotes, local)
    skipped = checked_names(not_transferred, local, *sources)
    return _plan(READ, local, sources, (), skipped, budget_of(budget))


def plan_writes(
    local: Worker,
    remotes: Iterable[Worker],
    siblings: Iterable[Worker] = (),
    *,
    not_transferred: Iterable[str] = (),
    budget: Budget | None = None,
) -> TransferPlan:
    """Return the plan by which ``local``, a source, writes what ``remotes`` need of it.

    ``siblings`` are the other workers of the local engine: together with ``local`` they hold all
    that the remotes need. Raises what :func:`plan_reads` raises.
    """
    destinations = checked_workers("remotes", remotes, local)
    writers = checked_workers("siblings", siblings, local)
    skipped = checked_names(not_transferred, local, *writers, *destinations)
    return _plan(WRITE, local, destinations, writers, skipped, budget_of(budget))


def _plan(
    direction: Direction,
    local: Worker,
    remotes: tuple[Worker, ...],
    siblings: tuple[Worker, ...],
    skipped: tuple[str, ...],
    budget: Budget,
) -> TransferPlan:
    """Return the plan of one worker. A writer plans with its siblings."""
    destinations, sources = direction.by_role((local, *siblings), remotes)
    assigned = assignments(destinations, sources, skipped, budget)
    pairs = plan_pairs(direction, [local], remotes, assigned, budget)
    return TransferPlan(direction.operation, local, remotes, siblings, skipped, pairs[local.key])
