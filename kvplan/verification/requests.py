"""Requests to verify: what each destination worker needs of a request, and what is copied to it.

A request may come in parts, each bound to its own plans: chunk by chunk, or some positions from one
engine and the rest from another. For each destination worker, the parts become one block table for
each group and one list of moves. A *move* is what a plan copies from one source to one destination,
or what other code copies instead.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from kvplan._checks import instance, interval, members, wrong_type
from kvplan._text import count
from kvplan.describe.blocks import POSITION_END, Blocks, Range, Tokens
from kvplan.describe.views import Group, View
from kvplan.describe.worker import Key, Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.verification.labels import needed, positions_in
from kvplan.verification.memory import ByteRanges, byte_ranges, expand

if TYPE_CHECKING:
    from kvplan._arrays import Ints
    from kvplan.plan.mesh import MeshPlan
    from kvplan.plan.specs import ReadSpec
    from kvplan.plan.transfer import TransferPlan

KeyPair = tuple[Key, Key]
"""The keys of a local and a remote worker."""

RangePair = tuple[ByteRanges, ByteRanges]
"""Ranges of a local and a remote worker, equally many: the nth ranges of both are one copy."""

STAGED: Final = "its .direct moves the same bytes in one step, its .transfers those between workers"
"""What to check instead of a plan in two steps."""

NOTHING: Final[RangePair] = (np.empty((0, 3), np.uint64), np.empty((0, 3), np.uint64))


@attrs.frozen(eq=False)
class Move:
    """Copies from ``source``, where the request has these ``blocks``.

    ``way`` are the keys of the workers that are read and written, as the copies name them.
    ``fault`` says what is wrong with the descriptor ids, if anything is.
    """

    source: Worker
    blocks: Mapping[str, Blocks]
    way: KeyPair
    reads: ByteRanges
    writes: ByteRanges
    fault: str = ""


def copies_of(spec: ReadSpec) -> tuple[RangePair, str]:
    """Return the ranges that a spec copies, and what is wrong with its ids.

    Nothing moves if the ids do not pair or are not in a table.
    """
    if len(spec.local_ids) != len(spec.remote_ids):
        local_ids = count(len(spec.local_ids), "local id")
        remote_ids = count(len(spec.remote_ids), "remote id")
        return NOTHING, f"{local_ids} and {remote_ids} do not pair"
    try:
        local = expand(spec.local_table.rows, spec.local_ids)
        remote = expand(spec.remote_table.rows, spec.remote_ids)
        coalesced = spec.descriptors()
    except KVPlanError as error:
        return NOTHING, str(error)
    if np.array_equal(_joined(*coalesced), _joined(local, remote)):
        return coalesced, ""
    ids = count(len(spec.local_ids), "id")
    descriptors = count(len(coalesced[0]), "descriptor")
    return coalesced, f"{ids} and {descriptors} name different bytes"


def _joined(local: ByteRanges, remote: ByteRanges) -> ByteRanges:
    """Return paired ranges, (n, 6), joined where they continue each other on both sides."""
    # One row: local address, length, device, then remote address, length, device.
    pairs = np.concatenate([local, remote], axis=1)[np.lexsort((local[:, 0], local[:, 2]))]
    # A chain is a sequence of rows of which each begins where the row before it ends.
    ends = pairs[:, [0, 3]] + pairs[:, [1, 4]]
    is_next = (pairs[1:, [0, 3]] == ends[:-1]).all(1)
    is_on_same_devices = (pairs[1:, [2, 5]] == pairs[:-1, [2, 5]]).all(1)
    begins = np.ones(len(pairs), bool)
    begins[1:] = ~(is_next & is_on_same_devices)
    first = np.flatnonzero(begins)
    joined = pairs[first]
    if first.size:
        # The length of each chain.
        joined[:, [1, 4]] = np.add.reduceat(pairs[:, [1, 4]], first)
    return joined


@attrs.frozen(eq=False)
class Need:
    """The block tables and positions of one part of a request, at a destination worker.

    ``offered`` has the tensors that some source has. Where ranges are given by the groups of the
    source, as for a WRITE, it has the name of the tensor's group there.
    """

    blocks: Mapping[str, Blocks]
    tokens: Tokens
    offered: dict[str, str | None] = attrs.field(factory=dict)

    def positions(self, view: View, group: Group) -> Ints:
        """Return the positions of a view that this part of the request needs."""
        if view.name not in self.offered:
            return np.empty(0, np.int64)
        name = self.offered[view.name] or view.group
        tokens = range_of_group(self.tokens, group, name)
        return needed(group, self.blocks.get(view.group), tokens)


def range_of_group(tokens: Tokens, group: Group, name: str) -> Range | None:
    """Return the positions of a group: those under ``name``, or those of all token groups."""
    if isinstance(tokens, Mapping):
        tokens = tokens.get(name)
    elif group.is_state:
        return None
    if tokens is None:
        return None
    return positions_in(group, interval(tokens, "a range of tokens", POSITION_END))


@attrs.define(eq=False)
class DestinationJob:
    """All that should reach one destination worker: its needs, by part of the request, and moves.

    ``has_ids`` is false if some copies do not come from a plan, and so have no descriptor ids.
    ``writers`` are all workers that may write to it, ``planned_writers`` those whose plans are
    verified.
    """

    worker: Worker
    has_ids: bool = True
    needs: dict[int, Need] = attrs.field(factory=dict)
    moves: list[Move] = attrs.field(factory=list)
    writers: set[Key] = attrs.field(factory=set)
    planned_writers: set[Key] = attrs.field(factory=set)

    @property
    def complete(self) -> bool:
        """Whether the plans of all workers that may write here are verified."""
        return self.writers <= self.planned_writers

    def table(self, group: str) -> Blocks | None:
        """Return the blocks of all parts in one table.

        Raises ``BLOCKS`` if two parts differ in a block.
        """
        tables = [need.blocks[group] for need in self.needs.values() if group in need.blocks]
        if len(tables) < 2:
            return tables[0] if tables else None
        # The block id of each ordinal, as the first table has it.
        ids: dict[int, int] = {}
        for table in tables:
            for ordinal, block in zip(table.ordinals.tolist(), table.ids.tolist(), strict=True):
                if ids.setdefault(ordinal, block) != block:
                    raise KVPlanError(
                        "BLOCKS",
                        f"verify requests of {self.worker.label} together",
                        expected=f"one block {ordinal} of the request in group {group!r}",
                        got=f"{ids[ordinal]} and {block}",
                        group=group,
                        ordinal=ordinal,
                    )
        return Blocks(list(ids.values()), ordinals=list(ids))

    def add_sources(self, plan: TransferPlan, source: Worker, need: Need) -> None:
        """Add to a need the tensors that the sources of a plan have."""
        writes = plan.operation == "WRITE"
        sources = (source, *plan.siblings)  # a READ has no siblings
        if writes:
            self.writers.update(worker.key for worker in sources)
            self.planned_writers.add(source.key)
        for worker in sources:
            for view in worker.views:
                if view.name not in plan.not_transferred:
                    need.offered.setdefault(view.name, view.group if writes else None)


def plans_of(plan: TransferPlan | MeshPlan | Iterable[TransferPlan]) -> tuple[TransferPlan, ...]:
    """Return the plans in an argument of verify or certify: a plan, a mesh, or several plans.

    Raises ``TYPE``, also for a plan in two steps: what its copies move is not in any table.
    """
    values: Any = getattr(plan, "plans", [plan] if hasattr(plan, "bind") else plan)
    iterable = values if np.iterable(values) else [values]
    plans: tuple[Any, ...] = members(object, iterable, "plans to check")
    for checked in plans:
        if isinstance(checked, type) or not hasattr(checked, "pairs"):
            error = wrong_type("plans to check", "a plan, a mesh or plans", checked)
            is_staged = not isinstance(checked, type) and hasattr(checked, "direct")
            raise error.with_hint(STAGED if is_staged else "")
    return plans


def jobs(
    parts: Iterable[tuple[TransferPlan | MeshPlan | Iterable[TransferPlan], Mapping[str, Any]]],
) -> list[DestinationJob]:
    """Bind every part of a request, and return jobs by destination.

    A part is a plan, or several, and the arguments of ``bind``.
    """
    by_destination: dict[Key, DestinationJob] = {}
    for number, part in enumerate(members(tuple, parts, "parts of a request")):
        if len(part) != 2 or not isinstance(part[1], Mapping):
            raise wrong_type("a part of a request", "(plan, the arguments of bind)", part)
        _add_part(by_destination, number, plans_of(part[0]), **part[1])
    return list(by_destination.values())


def _add_part(
    by_destination: dict[Key, DestinationJob],
    number: int,
    plans: Sequence[TransferPlan],
    *,
    local: Mapping[str, Blocks],
    remote: Mapping[str, Blocks],
    tokens: Tokens = None,
    copies: Any = None,
) -> None:
    """Bind one part of a request and add its needs and moves; ``copies`` replace those of plans."""
    for tables in (local, remote):
        instance(Mapping, tables, "block tables")
    ranges_by_pair = None if copies is None else read_copies(copies, _worker_pairs(plans))
    for plan, specs in _bound(plans, local, remote, tokens):
        writes = plan.operation == "WRITE"
        for remote_worker, spec in zip(plan.remotes, specs, strict=True):
            # Sides of a READ; a WRITE has them the other way round.
            destination, source = plan.local, remote_worker
            blocks, source_blocks = local, remote
            if writes:
                destination, source = source, destination
                blocks, source_blocks = source_blocks, blocks
            job = _job(by_destination, destination)
            job.add_sources(plan, source, job.needs.setdefault(number, Need(blocks, tokens)))

            fault = ""
            if ranges_by_pair is None:
                pair = spec.local, spec.remote
                ranges, fault = copies_of(spec)
            else:
                pair = plan.local.key, remote_worker.key
                # Copies move once, even if several plans have the pair.
                ranges = ranges_by_pair.pop(pair, NOTHING)
                job.has_ids = False
            if fault:
                fault = f"copy from {source.label}: {fault}"
            # Moves go from the source to the destination: of a READ, that is from remote to local.
            if spec.operation != "WRITE":
                pair = pair[::-1]
                ranges = ranges[::-1]
            job.moves.append(Move(source, source_blocks, pair, *ranges, fault))


def _worker_pairs(plans: Iterable[TransferPlan]) -> list[KeyPair]:
    pairs = []
    for plan in plans:
        pairs += [(plan.local.key, worker.key) for worker in plan.remotes]
    return pairs


def _bound(
    plans: Sequence[TransferPlan],
    local: Mapping[str, Blocks],
    remote: Mapping[str, Blocks],
    tokens: Tokens,
) -> Iterator[tuple[TransferPlan, Sequence[ReadSpec]]]:
    """Yield each plan with its specs; every plan is bound to the entries of its own groups."""
    local_names = set[str]()
    remote_names = set[str]()
    for plan in plans:
        local_names |= _groups([plan.local])
        remote_names |= _groups(plan.remotes)
    for plan in plans:
        groups = _groups([plan.local])
        specs = plan.bind(
            local=_only(local, groups, local_names),
            remote=_only(remote, _groups(plan.remotes), remote_names),
            tokens=_only(tokens, groups, local_names) if isinstance(tokens, Mapping) else tokens,
        )
        if len(specs) != len(plan.remotes):
            remotes = ", ".join(worker.label for worker in plan.remotes)
            bound = ", ".join(label_of(spec.remote) for spec in specs)
            raise KVPlanError(
                "WORKER",
                f"verify the plan of {plan.local.label}",
                expected=f"one pair with each of {remotes or 'no worker'}",
                got=f"pairs with {bound or 'no worker'}",
            )
        yield plan, specs


def _groups(workers: Iterable[Worker]) -> set[str]:
    names = set[str]()
    for worker in workers:
        names.update(group.name for group in worker.groups)
    return names


def _only(entries: Mapping[str, Any], groups: set[str], all_groups: set[str]) -> dict[str, Any]:
    """Return the entries for a plan's groups, and for names of no group, which bind refuses."""
    excluded = all_groups - groups
    return {name: entry for name, entry in entries.items() if name not in excluded}


def _job(by_destination: dict[Key, DestinationJob], worker: Worker) -> DestinationJob:
    """Return the job of a worker, a new one for a new worker. Raises ``WORKER``."""
    job = by_destination.setdefault(worker.key, DestinationJob(worker))
    if job.worker is not worker and job.worker != worker:
        expected = "one description of each destination worker"
        got = f"two of {worker.label}"
        action = "verify plans together"
        raise KVPlanError("WORKER", action, expected=expected, got=got, worker=worker.label)
    return job


def read_copies(copies: Any, pairs: Collection[KeyPair]) -> dict[KeyPair, RangePair]:
    """Return the ranges that other code copies between each pair of workers, in its order.

    Raises ``NAME`` for a pair that is not one of ``pairs``, ``SIZE`` for sides that differ in
    number or lengths, ``TYPE`` or ``RANGE`` for anything that is not a range.

    >>> pair = (("decode", 0), ("prefill", 0))
    >>> local, remote = read_copies({pair: ([(4096, 64, 0)], [(8192, 64, 1)])}, [pair])[pair]
    >>> local.tolist(), remote.tolist()
    ([[4096, 64, 0]], [[8192, 64, 1]])
    """
    if not isinstance(copies, Mapping):
        raise wrong_type("copies", "a mapping of pairs of workers to descriptors", copies)
    ranges: dict[KeyPair, RangePair] = {}
    for pair in copies:
        if pair not in pairs:
            example = next(iter(pairs), None)
            raise KVPlanError(
                "NAME",
                "read copies",
                expected=f"the keys of a local and a remote worker, such as {example}",
                got=reprlib.repr(pair),
                hint="destinations are the local workers of a READ, sources those of a WRITE",
            )
    for pair, sides in copies.items():
        workers = f"{label_of(pair[0])} and {label_of(pair[1])}"
        ranges[pair] = _paired(f"copies between {workers}", sides)
    return ranges


def _paired(name: str, sides: Any) -> RangePair:
    """Return the ranges of both sides, local ones first, which must pair."""
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise wrong_type(name, "(local descriptors, remote descriptors)", sides)
    local = byte_ranges(sides[0], f"local descriptors of {name}", shortest=1)
    remote = byte_ranges(sides[1], f"remote descriptors of {name}", shortest=1)
    if len(local) != len(remote):
        expected = "as many local descriptors as remote ones"
        got = f"{len(local)} and {len(remote)}"
        raise KVPlanError("SIZE", f"read {name}", expected=expected, got=got)
    # Column 1 is the length.
    unequal = np.flatnonzero(local[:, 1] != remote[:, 1])
    if unequal.size:
        first = unequal[0]
        expected = "paired descriptors of equal lengths"
        got = f"{local[first, 1]} and {remote[first, 1]} bytes in number {first}"
        raise KVPlanError("SIZE", f"read {name}", expected=expected, got=got)
    return local, remote
