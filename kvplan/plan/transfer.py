"""Plans of one worker: all that it reads from, or writes to, its remote workers.

The stages of planning know a destination and its sources; here they become local and remote. A worker that reads is the
destination. A worker that writes is one of the sources: it plans together with its siblings, the other workers of its
engine, so that all of them agree without communication who writes what several of them hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints, read_only
from kvplan._checks import instance, members, wrong_type
from kvplan._text import shown
from kvplan.describe.blocks import Blocks, Tokens, check_apart, check_blocks
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.plan.bind import Terms, Workspace, add, check_names, range_of, terms, wanted
from kvplan.plan.cells import Cell, cells
from kvplan.plan.cost import Cost, cost
from kvplan.plan.match import Sources, match
from kvplan.plan.rows import GroupPair, Table, bases, number
from kvplan.plan.runs import geometry_key, group_runs
from kvplan.plan.specs import Pair, ReadSpec, idle_pair

Planned = dict[tuple[Any, ...], tuple[tuple[GroupPair, ...], tuple[Ints, Ints], Ints]]
"""Ids, rows and base offsets of pairs that are planned already, by the key of their geometry, for reuse."""

SIDES: Final = ("local", "remote")
NO_RANGE: Final = "no token range given: every position in the destination's blocks is transferred"


@attrs.frozen(eq=False, repr=False)
class TransferPlan:
    """All that a local worker reads from (``READ``) or writes to (``WRITE``) its remote workers, for any request.

    A plan never changes: threads may share it and bind at once.
    """

    operation: str
    local: Worker
    remotes: tuple[Worker, ...]
    siblings: tuple[Worker, ...]
    not_transferred: tuple[str, ...]
    pairs: tuple[Pair, ...]

    def bind(
        self,
        *,
        local: Mapping[str, Blocks],
        remote: Mapping[str, Blocks],
        tokens: Tokens = None,
        workspace: Workspace | None = None,
    ) -> tuple[ReadSpec, ...]:
        """What one request moves: one spec for each pair, in order, including pairs that move nothing.

        ``local`` and ``remote`` are block tables by group name. ``tokens`` is one range of positions for all token
        groups, or a range for each local group by name; the range of a state group counts states. A group without a
        range moves every position in the destination's blocks. A ``workspace`` provides the memory for the ids; each
        thread needs its own.

        Raises ``NAME``, ``TYPE``, ``BLOCKS``, ``TOKENS`` or ``INT``, or ``RANGE`` for over 2**28 ids with one worker.
        """
        parts = self._terms(local, remote, tokens)
        if workspace is not None:
            instance(Workspace, workspace, "workspace").clear()
        near, made = 0 if self.operation == "READ" else 1, {}
        for each, sums in parts.items():
            ids, shapes = add(sums, workspace)
            made[each] = ids[near], ids[1 - near], shapes
        key, specs = self.local.key, dict(self.idle)
        for pair in self._moving:
            ends = key, pair.remote, pair.local_table, pair.remote_table
            specs[pair.remote] = ReadSpec(self.operation, *ends, *made[pair.group_pairs])
        return tuple(specs.values())

    def check(
        self, *, local: Mapping[str, Blocks], remote: Mapping[str, Blocks], tokens: Tokens = None
    ) -> None:
        """Raise what :meth:`bind` would raise, except ``INT`` and ``RANGE``, without computing ids."""
        self._terms(local, remote, tokens)

    def _terms(
        self, local: Mapping[str, Blocks], remote: Mapping[str, Blocks], tokens: Tokens
    ) -> dict[tuple[GroupPair, ...], list[Terms]]:
        """The terms of a request's ids for each distinct ``group_pairs``, which several pairs may share (rule B5)."""
        self._check_request(local, remote, tokens)
        ranges = {group.name: range_of(tokens, group) for group in self.local.groups}
        tables = (
            (local, remote, 0, SIDES)
            if self.operation == "READ"
            else (remote, local, 1, SIDES[::-1])
        )
        destination, source, near, sides = tables
        found: dict[tuple[GroupPair, ...], list[Terms]] = {
            pair.group_pairs: [] for pair in self._moving
        }
        for each, parts in found.items():
            for groups in each:
                ours, theirs = groups.groups
                blocks, given = (
                    (destination[ours.name], source[theirs.name]),
                    ranges[groups.groups[near].name],
                )
                try:
                    parts += terms(groups, blocks, wanted(ours, blocks[0], given, sides[0]), sides)
                except KVPlanError as error:
                    raise error if given is not None else error.with_hint(NO_RANGE) from None
        return found

    def with_remotes(self, remotes: Iterable[Worker]) -> TransferPlan:
        """This plan for other remote workers, each of the same geometry as the one that it replaces.

        Use it for the many equal engines of a deployment: only addresses are computed, and the result is what planning
        anew would give.

        >>> from kvplan import Model, plan_reads
        >>> model = Model.shipped("qwen2.5-1.5b")
        >>> decode, *peers = (model.engine(name, tp=2, num_blocks=9) for name in ("decode", "p1", "p2"))
        >>> plan = plan_reads(decode[0], peers[0])
        >>> plan.with_remotes(peers[1]).pairs
        (<Pair with p2/0: 56 local rows>, <Pair with p2/1: 0 local rows>)

        Raises ``WORKER`` for a remote whose rank or geometry differs from those of the worker that it replaces.
        """
        workers = checked_workers("remotes", remotes, self.local)
        ranks = [[worker.rank for worker in side] for side in (self.remotes, workers)]
        orders = [
            sorted(range(len(side)), key=lambda i: side[i].key) for side in (self.remotes, workers)
        ]
        if ranks[0] != ranks[1] or orders[0] != orders[1]:
            raise KVPlanError(
                "WORKER",
                "take the place of the remotes of a plan",
                expected=f"workers in the same order, of ranks {ranks[0]}",
                got=f"ranks {ranks[1]} of {', '.join(worker.label for worker in workers)}",
            )
        pairs = []
        for pair, before, worker in zip(self.pairs, self.remotes, workers, strict=True):
            if worker.outline != before.outline:
                raise KVPlanError(
                    "WORKER",
                    f"take the place of {before.label}",
                    expected="a worker that keeps the same in regions of its own",
                    got=f"{worker.label}, which differs",
                    hint="compare says where; plan anew",
                )
            table = (
                pair.remote_table.in_regions(worker.regions)
                if pair.group_pairs
                else pair.remote_table
            )
            pairs.append(attrs.evolve(pair, remote=worker.key, remote_table=table))
        return attrs.evolve(self, remotes=workers, pairs=tuple(pairs))

    def cost(self, tokens: int | None = None) -> Cost:
        """Descriptors, bytes and ids of a request of ``tokens`` positions whose blocks are scattered in their pools.

        ``None`` counts the fewest positions after which everything repeats. Raises ``TYPE`` or ``RANGE``.
        """
        return cost(self.operation, [(self.local.key, pair) for pair in self.pairs], tokens)

    @cached_property
    def _pools(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The groups that take part, local and remote, each with the size of its smallest pool in blocks."""
        pools: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for groups in (groups for pair in self.pairs for groups in pair.group_pairs):
            for i, group in enumerate(groups.groups):
                side = pools[i if self.operation == "READ" else 1 - i]
                side[group.name] = min(
                    groups.num_blocks[i], side.get(group.name, groups.num_blocks[i])
                )
        return pools

    @cached_property
    def _overlaid(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """The pairs of groups that take part and whose views share bytes of their blocks, local and remote."""
        found = []
        for pools, workers in zip(self._pools, ((self.local,), self.remotes), strict=True):
            pairs = dict.fromkeys(pair for worker in workers for pair in worker.overlaid)
            found.append(tuple(pair for pair in pairs if {*pair} <= {*pools}))
        return tuple(found)

    @cached_property
    def _moving(self) -> tuple[Pair, ...]:
        """The pairs that exchange bytes."""
        return tuple(pair for pair in self.pairs if pair.group_pairs)

    @cached_property
    def idle(self) -> Mapping[Key, ReadSpec]:
        """What a request that moves nothing is bound to: a spec for each pair, by its remote worker."""
        none = read_only(np.zeros(0, np.int32))
        return {
            pair.remote: ReadSpec(
                self.operation,
                self.local.key,
                pair.remote,
                pair.local_table,
                pair.remote_table,
                none,
                none,
            )
            for pair in self.pairs
        }

    @cached_property
    def _group_names(self) -> tuple[frozenset[str], frozenset[str]]:
        """All groups of the local worker, and of the remotes."""
        sides = ((self.local,), self.remotes)
        ours, theirs = (
            frozenset(group.name for worker in side for group in worker.groups) for side in sides
        )
        return ours, theirs

    def _check_request(
        self, local: Mapping[str, Blocks], remote: Mapping[str, Blocks], tokens: Tokens
    ) -> None:
        for side, tables in enumerate((local, remote)):
            if not isinstance(tables, Mapping):
                raise wrong_type("block tables", "a mapping of groups to Blocks", tables)
            check_names(self._group_names[side], tables, "block table")
            is_destination = side == (self.operation == "WRITE")
            for name, pool in self._pools[side].items():
                check_blocks(name, tables.get(name), pool, is_destination, SIDES[side])
            for pair in self._overlaid[side]:
                check_apart(pair, tables, SIDES[side])
        if isinstance(tokens, Mapping):
            check_names(self._group_names[0], tokens, "token range")

    def __repr__(self) -> str:
        rows = sum(len(pair.local_table.rows) for pair in self.pairs)
        return f"<TransferPlan {self.operation} {self.local.label}: {len(self.pairs)} remotes, {rows} local rows>"


def checked_workers(what: str, values: Iterable[Worker], *others: Worker) -> tuple[Worker, ...]:
    """``values`` as a tuple of workers. They and ``others`` must all differ."""
    workers = members(Worker, values, what)
    for other in others:
        if not isinstance(other, Worker):
            raise wrong_type("local", "one Worker", other).with_hint(
                "plan_mesh takes all workers of an engine"
            )
    times = Counter(worker.label for worker in (*others, *workers))
    label, count = max(times.items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise KVPlanError(
            "WORKER",
            f"plan with {what}",
            expected="each worker once",
            got=f"{label} {count} times",
            worker=label,
        )
    return workers


def checked_names(values: Iterable[str], *workers: Worker) -> tuple[str, ...]:
    """The names of tensors that are not transferred; each must be known to some of ``workers``, if any are given."""
    names = members(str, values, "not_transferred")
    for name in names if workers else ():
        if not any(name in worker.tensors for worker in workers):
            raise KVPlanError(
                "NAME",
                "leave out a tensor",
                expected="the name of a tensor of some worker in not_transferred",
                got=shown(name),
                name=name,
            )
    return names


def plan_reads(
    local: Worker,
    remotes: Iterable[Worker],
    *,
    not_transferred: Iterable[str] = (),
) -> TransferPlan:
    """The plan by which ``local``, the destination, reads all that it needs from ``remotes``, the sources.

    ``not_transferred`` names tensors of ``local`` that need no source. If several remotes hold the same bytes, one of
    them is chosen, so that remotes are few and descriptors long; both sides compute the same choice.

    >>> from kvplan import Model, plan_reads
    >>> model = Model.shipped("deepseek-v2-lite")  # 27 latents, which every rank has
    >>> decode, prefill = model.engine("decode", tp=2, num_blocks=9), model.engine("prefill", tp=4, num_blocks=9)
    >>> [pair.num_bytes for pair in plan_reads(decode[1], prefill).cost().pairs]
    [0, 497664, 0, 0]

    Raises ``TENSOR`` or ``COVER`` for what no remote holds, ``GROUP``, ``DTYPE``, ``AXES`` or ``SIZE`` where a tensor
    differs between the sides, ``WORKER`` for a worker given twice, ``RANGE`` for what is too large to list.
    """
    sources = checked_workers("remotes", remotes, local)
    skipped = checked_names(not_transferred)
    pairs, known = {worker.key: idle_pair(worker) for worker in sources}, Planned()
    for _, source, share in shares([local], sources, skipped):
        pairs[source.key] = pair_of(share, (local, source), 0, known)
    return TransferPlan("READ", local, sources, (), skipped, tuple(pairs.values()))


def plan_writes(
    local: Worker,
    remotes: Iterable[Worker],
    siblings: Iterable[Worker] = (),
    *,
    not_transferred: Iterable[str] = (),
) -> TransferPlan:
    """The plan by which ``local``, a source, writes its part of what ``remotes``, the destinations, need.

    ``siblings`` are the other workers of the local engine: together with ``local`` they hold all that the remotes need.
    Raises what :func:`plan_reads` raises.
    """
    destinations = checked_workers("remotes", remotes, local)
    others = checked_workers("siblings", siblings, local)
    skipped = checked_names(not_transferred)
    pairs, known = {worker.key: idle_pair(worker) for worker in destinations}, Planned()
    for destination, source, share in shares(destinations, (local, *others), skipped):
        if source is local:
            pairs[destination.key] = pair_of(share, (destination, local), 1, known)
    return TransferPlan("WRITE", local, destinations, others, skipped, tuple(pairs.values()))


def shares(
    destinations: Iterable[Worker], sources: Iterable[Worker], skipped: Collection[str]
) -> Iterator[tuple[Worker, Worker, list[Cell]]]:
    """Every destination and source that exchange bytes, with their cells.

    Sources are sorted by their keys, so that every worker computes the same choice.
    """
    offered = Sources(sorted(sources, key=lambda worker: worker.key))
    for destination in destinations:
        served: dict[int, list[Cell]] = {}
        for cell in cells(match(destination, offered, skipped)):
            served.setdefault(int(cell.match.sources.worker[cell.source]), []).append(cell)
        for source, share in sorted(served.items()):
            yield destination, offered.workers[source], share


def pair_of(
    share: Sequence[Cell], sides: tuple[Worker, Worker], local: int, known: Planned
) -> Pair:
    """The pair of a destination and a source; ``local`` is the index of the local one in ``sides``.

    Pairs of equal geometry share ids and rows through ``known``.
    """
    key, begin = geometry_key(share)
    if key not in known:
        known[key] = (*number(group_runs(share)), begin)
    made, rows, before = known[key]
    tables = [_table(*side) for side in zip(sides, rows, begin - before, strict=True)]
    remote = sides[1 - local]
    return Pair(remote.key, tables[local], tables[1 - local], made)


def _table(worker: Worker, rows: Ints, shift: np.int64) -> Table:
    """The table of rows with offsets, (n, 5), shifted and placed at the worker's addresses."""
    region, offset, length, stride, count = rows.T
    base, device = bases(worker.regions)
    made = np.empty(rows.shape, np.uint64)
    made[:, 0] = base[region] + (offset + shift).astype(np.uint64)
    made[:, 1], made[:, 2], made[:, 3], made[:, 4] = length, device[region], stride, count
    return Table(
        worker.regions, read_only(region), read_only(made), read_only(np.cumsum(count) - count)
    )
