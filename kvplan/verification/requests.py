"""Requests to verify: what each destination worker needs of a request, and what is copied to it.

A request may come in parts, each bound to its own plans: chunk by chunk, or some positions from one engine and the rest
from another. For each destination worker, the parts become one block table for each group and one list of moves. A
*move* is what a plan copies from one source to one destination, or what other code copies in its place.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import instance, interval, members, wrong_type
from kvplan._text import count
from kvplan.describe.blocks import POSITION_END, Blocks, Range, Tokens
from kvplan.describe.views import Group, View
from kvplan.describe.worker import Key, Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.verification.labels import needed
from kvplan.verification.memory import ByteRanges, byte_ranges, expand

if TYPE_CHECKING:
    from kvplan.plan.mesh import MeshPlan
    from kvplan.plan.specs import ReadSpec
    from kvplan.plan.transfer import TransferPlan

KeyPair = tuple[Key, Key]
"""The keys of a local and a remote worker."""

RangePair = tuple[ByteRanges, ByteRanges]
"""Ranges of both workers, equally many: the nth of one side is copied to or from the nth of the other."""

NOTHING: Final[RangePair] = (np.empty((0, 3), np.uint64), np.empty((0, 3), np.uint64))


@attrs.frozen(eq=False)
class Move:
    """Copies from ``source``, where the request has these ``blocks``.

    ``way`` are the keys of the workers that are read and written, as the copies name them. ``fault`` is what is wrong
    with the descriptor ids, if anything is.
    """

    source: Worker
    blocks: Mapping[str, Blocks]
    way: KeyPair
    reads: ByteRanges
    writes: ByteRanges
    fault: str = ""


def copies_of(spec: ReadSpec) -> tuple[RangePair, str]:
    """What a spec copies, and what is wrong with its ids: nothing moves if they do not pair or are not in a table."""
    if len(spec.local_ids) != len(spec.remote_ids):
        ids = f"{count(len(spec.local_ids), 'local id')} and {count(len(spec.remote_ids), 'remote id')}"
        return NOTHING, f"{ids} do not pair"
    try:
        by_ids = expand(spec.local_table.rows, spec.local_ids), expand(spec.remote_table.rows, spec.remote_ids)
        sides = spec.descriptors()
    except KVPlanError as error:
        return NOTHING, str(error)
    if np.array_equal(_joined(*sides), _joined(*by_ids)):
        return sides, ""
    ids, descriptors = count(len(spec.local_ids), "id"), count(len(sides[0]), "descriptor")
    return sides, f"{ids} and {descriptors} name different bytes"


def _joined(local: ByteRanges, remote: ByteRanges) -> ByteRanges:
    """Paired ranges, (n, 6), by local device and address, joined where they continue each other on both sides."""
    # Rows: local address, length, device, then remote address, length, device.
    pairs = np.concatenate([local, remote], axis=1)[np.lexsort((local[:, 0], local[:, 2]))]
    ends = pairs[:, [0, 3]] + pairs[:, [1, 4]]
    continues = (pairs[1:, [0, 3]] == ends[:-1]).all(1) & (pairs[1:, [2, 5]] == pairs[:-1, [2, 5]]).all(1)
    first = np.flatnonzero(np.r_[np.ones(min(len(pairs), 1), bool), ~continues])
    joined = pairs[first]
    if first.size:
        joined[:, [1, 4]] = np.add.reduceat(pairs[:, [1, 4]], first)  # the length of each chain
    return joined


@attrs.frozen(eq=False)
class Need:
    """What one part of a request needs at a destination worker: its block tables and its range of positions.

    ``offered`` has the tensors that some source has. Where ranges are given by the groups of the source, as for a
    WRITE, it has the name of the tensor's group there.
    """

    blocks: Mapping[str, Blocks]
    tokens: Tokens
    offered: dict[str, str | None] = attrs.field(factory=dict)

    def positions(self, view: View, group: Group) -> Ints:
        """The positions of a view that this part of the request needs."""
        if view.name not in self.offered:
            return np.empty(0, np.int64)
        span = range_of(self.tokens, group, self.offered[view.name] or view.group)
        return needed(group, self.blocks.get(view.group), span)


def range_of(tokens: Tokens, group: Group, name: str) -> Range | None:
    """The range of a group: the one given under ``name``, or the one that is given for all token groups."""
    known = tokens if isinstance(tokens, Mapping) else {name: None if group.tokens_per_block is None else tokens}
    found = known.get(name)
    return None if found is None else interval(found, "a range of tokens", POSITION_END)


@attrs.define(eq=False)
class Job:
    """All that should reach one destination worker: what it needs, by part of the request, and what is copied there.

    ``has_ids`` is false if some copies do not come from a plan, and so have no descriptor ids. ``writers`` are all
    workers that may write to it, ``writers_given`` those whose plans are verified.
    """

    worker: Worker
    has_ids: bool = True
    needs: dict[int, Need] = attrs.field(factory=dict)
    moves: list[Move] = attrs.field(factory=list)
    writers: set[Key] = attrs.field(factory=set)
    writers_given: set[Key] = attrs.field(factory=set)

    @property
    def complete(self) -> bool:
        """Whether the plans of all workers that may write here are verified."""
        return self.writers <= self.writers_given

    def table(self, group: str) -> Blocks | None:
        """The blocks of all parts in one table. Raises ``BLOCKS`` if two parts differ in a block."""
        tables = [need.blocks[group] for need in self.needs.values() if group in need.blocks]
        if len(tables) < 2:
            return tables[0] if tables else None
        ids: dict[int, int] = {}
        for table in tables:
            for ordinal, block in zip(table.ordinals.tolist(), table.ids.tolist(), strict=True):
                if ids.setdefault(ordinal, block) != block:
                    what = f"verify requests of {self.worker.label} together"
                    expected = f"one block {ordinal} of the request in group {group!r}"
                    got = f"{ids[ordinal]} and {block}"
                    raise KVPlanError("BLOCKS", what, expected=expected, got=got, group=group, ordinal=ordinal)
        return Blocks(list(ids.values()), ordinals=list(ids))


def plans_of(plan: TransferPlan | MeshPlan | Iterable[TransferPlan]) -> tuple[TransferPlan, ...]:
    """The plans in an argument of verify or certify: a plan, a mesh, or several plans. Raises ``TYPE``."""
    given: Any = getattr(plan, "plans", [plan] if hasattr(plan, "bind") else plan)
    made: tuple[Any, ...] = members(object, given if np.iterable(given) else [given], "plans to check")
    for each in made:
        if isinstance(each, type) or not hasattr(each, "bind"):
            raise wrong_type("plans to check", "a plan, a mesh or plans", each)
    return made


def jobs(
    parts: Iterable[tuple[TransferPlan | MeshPlan | Iterable[TransferPlan], Mapping[str, Any]]],
) -> list[Job]:
    """Bind every part of a request, given as plans and the arguments of ``bind``, and collect jobs by destination."""
    made: dict[Key, Job] = {}
    for number, part in enumerate(members(tuple, parts, "parts of a request")):
        if len(part) != 2 or not isinstance(part[1], Mapping):
            raise wrong_type("a part of a request", "(plan, the arguments of bind)", part)
        _add_part(made, number, plans_of(part[0]), **part[1])
    return list(made.values())


def _add_part(
    made: dict[Key, Job],
    number: int,
    plans: Sequence[TransferPlan],
    *,
    local: Mapping[str, Blocks],
    remote: Mapping[str, Blocks],
    tokens: Tokens = None,
    copies: Any = None,
) -> None:
    """Bind one part of a request and add its needs and moves to the jobs; ``copies`` move in place of its plans."""
    for tables in (local, remote):
        instance(Mapping, tables, "block tables")
    given = None
    if copies is not None:
        given = read_copies(copies, [(plan.local.key, other.key) for plan in plans for other in plan.remotes])
    locals_known = _groups(plan.local for plan in plans)
    remotes_known = _groups(worker for plan in plans for worker in plan.remotes)
    for plan in plans:
        own, theirs = _groups([plan.local]), _groups(plan.remotes)
        specs = plan.bind(
            local=_only(local, own, locals_known),
            remote=_only(remote, theirs, remotes_known),
            tokens=_only(tokens, own, locals_known) if isinstance(tokens, Mapping) else tokens,
        )
        writes = plan.operation == "WRITE"
        for other, spec in zip(plan.remotes, specs, strict=True):
            destination, source = (other, plan.local) if writes else (plan.local, other)
            blocks, source_blocks = (remote, local) if writes else (local, remote)
            sources = (source, *plan.siblings)  # siblings only write
            job = _job(made, destination)
            if writes:
                job.writers.update(worker.key for worker in sources)
                job.writers_given.add(source.key)
            need = job.needs.setdefault(number, Need(blocks, tokens))
            for view in (view for worker in sources for view in worker.views):
                if view.name not in plan.not_transferred:
                    need.offered.setdefault(view.name, view.group if writes else None)
            pair, fault = (spec.local, spec.remote), ""
            if given is None:
                sides, fault = copies_of(spec)
            else:
                pair, job.has_ids = (plan.local.key, other.key), False
                sides = given.pop(pair, NOTHING)  # once, even if several plans have the pair
            step = 1 if spec.operation == "WRITE" else -1  # a WRITE copies from local to remote, a READ back
            (read, written), (from_ranges, to_ranges) = pair[::step], sides[::step]
            fault = fault and f"copy from {source.label}: {fault}"
            job.moves.append(Move(source, source_blocks, (read, written), from_ranges, to_ranges, fault))


def _groups(workers: Iterable[Worker]) -> set[str]:
    return {group.name for worker in workers for group in worker.groups}


def _only(given: Mapping[str, Any], own: set[str], known: set[str]) -> dict[str, Any]:
    """The entries for a plan's own groups. Names that no plan knows stay, so that bind refuses them."""
    return {name: value for name, value in given.items() if name in own or name not in known}


def _job(made: dict[Key, Job], worker: Worker) -> Job:
    job = made.setdefault(worker.key, Job(worker))
    if job.worker is not worker and job.worker != worker:
        expected, got = "one description of each destination worker", f"two of {worker.label}"
        raise KVPlanError("WORKER", "verify plans together", expected=expected, got=got, worker=worker.label)
    return job


def read_copies(copies: Any, pairs: Collection[KeyPair]) -> dict[KeyPair, RangePair]:
    """The ranges that other code copies between each pair of workers, in its order.

    Raises ``NAME`` for a pair that is not one of ``pairs``, ``SIZE`` for sides that differ in number or lengths,
    ``TYPE`` or ``RANGE`` for anything that is not a range.

    >>> pair = (("decode", 0), ("prefill", 0))
    >>> local, remote = read_copies({pair: ([(4096, 64, 0)], [(8192, 64, 1)])}, [pair])[pair]
    >>> local.tolist(), remote.tolist()
    ([[4096, 64, 0]], [[8192, 64, 1]])
    """
    if not isinstance(copies, Mapping):
        raise wrong_type("copies", "a mapping of pairs of workers to descriptors", copies)
    for pair in copies:
        if pair not in pairs:
            expected = f"the keys of a local and a remote worker, such as {next(iter(pairs), None)}"
            hint = "destinations are the local workers of a READ, sources those of a WRITE"
            raise KVPlanError("NAME", "read copies", expected=expected, got=reprlib.repr(pair), hint=hint)
    return {
        pair: _sides(f"copies between {label_of(pair[0])} and {label_of(pair[1])}", copies[pair]) for pair in copies
    }


def _sides(what: str, sides: Any) -> RangePair:
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise wrong_type(what, "(local descriptors, remote descriptors)", sides)
    local = byte_ranges(sides[0], f"local descriptors of {what}", shortest=1)
    remote = byte_ranges(sides[1], f"remote descriptors of {what}", shortest=1)
    expected, got = "", ""
    if len(local) != len(remote):
        expected, got = "as many local descriptors as remote ones", f"{len(local)} and {len(remote)}"
    elif (differ := np.flatnonzero(local[:, 1] != remote[:, 1])).size:
        expected = "paired descriptors of equal lengths"
        got = f"{local[differ[0], 1]} and {remote[differ[0], 1]} bytes in number {differ[0]}"
    if expected:
        raise KVPlanError("SIZE", f"read {what}", expected=expected, got=got)
    return local, remote
