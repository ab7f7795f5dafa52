"""Staged requests carried out by code that knows no plan: it reads descriptors and copies alone.

Every byte of the sources has a label. The first step of a chunk always precedes the second step of the chunk before,
so that buffer slots must not overlap; and each byte of the staging region records the chunk that has filled it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from kvplan import Worker, certify
from kvplan.staging import Chunk, StagedPlan, stage, stage_writes
from property_tests.labelled import (
    DESTINATION,
    SOURCE,
    UNTOUCHED,
    Engine,
    FaultError,
    Ints,
    Tally,
    Words,
    each_byte,
    engine,
)
from property_tests.worlds import Request, World
from tests.staged import ADDRESS, NAME, in_least_memory, run

Labels = npt.NDArray[np.int32]

GARBAGE = -2


class Staging:
    """A staging region, as labels."""

    def __init__(self, local: Worker) -> None:
        self.region = next(region for region in local.regions if region.name == NAME)
        self.cells = np.full(self.region.size_bytes, GARBAGE, np.int32)
        self.chunk = np.full(self.region.size_bytes, -1, np.int32)

    def places(self, ranges: Words) -> Ints:
        """The offset of every byte of ranges, all of which must lie in the region."""
        offset = ranges[:, 0] - np.uint64(ADDRESS)
        if not ((offset + ranges[:, 1] <= self.region.size_bytes) & (ranges[:, 2] == self.region.device_id)).all():
            raise FaultError("staged outside the staging region")
        return each_byte(offset.astype(np.int64), ranges)

    def fill(self, number: int, ranges: Words, labels: Labels) -> None:
        """The first step of a chunk: write labels to ranges."""
        into = self.places(ranges)
        if into.size != labels.size:
            raise FaultError("pairs of different lengths")
        if np.unique(into).size != into.size or (self.chunk[into] == number).any():
            raise FaultError("staged twice")
        self.cells[into], self.chunk[into] = labels, number

    def empty(self, number: int, ranges: Words) -> Labels:
        """The second step of a chunk: the labels of ranges."""
        out_of = self.places(ranges)
        if (self.chunk[out_of] != number).any():
            raise FaultError("read what this chunk has not staged")
        return self.cells[out_of]


class Memory:
    """The memory of one engine's workers, as labels."""

    def __init__(self, destinations: Engine) -> None:
        self.engine = destinations
        self.cells = np.full(destinations.label.size, UNTOUCHED, np.int32)

    def write(self, ranges: Words, rank: int, labels: Labels) -> int:
        """Write labels to ranges of a worker; return their number."""
        into = each_byte(self.engine.places(ranges, np.full(len(ranges), rank)), ranges)
        if into.size != labels.size:
            raise FaultError("pairs of different lengths")
        if np.unique(into).size != into.size or (self.cells[into] != UNTOUCHED).any():
            raise FaultError("written twice")
        self.cells[into] = labels
        return into.size

    def compare(self, request: Request, total: int, which: slice = slice(None)) -> None:
        """Raise FaultError unless workers have what they want of a request, and nothing else."""
        ours = self.engine
        wanted = (ours.position >= request.start) & (ours.position < request.stop)
        wrong = np.flatnonzero(self.cells[which] != np.where(wanted, ours.label, UNTOUCHED)[which])
        if wrong.size or total != np.count_nonzero(wanted[which]):
            raise FaultError(f"{wrong.size} bytes wrong, {total} moved, {np.count_nonzero(wanted[which])} wanted")


def labels_of(engine: Engine, ranges: Words, rank: int) -> Labels:
    """The labels of ranges of a worker."""
    found: Labels = engine.label[each_byte(engine.places(ranges, np.full(len(ranges), rank)), ranges)]
    return found


def own(engine: Engine, rank: int) -> slice:
    """The labels of a worker among those of its engine."""
    return slice(int(engine.begin[rank]), int(engine.begin[rank + 1]))


def arrays(worker: Worker, cells: Labels, staging: Labels) -> dict[str, Labels]:
    """The regions of a worker by name: those that follow each other in ``cells``, and the staging region."""
    made, at = {NAME: staging}, 0
    for region in worker.regions[:-1]:
        made[region.name] = cells[at : at + region.size_bytes]
        at += region.size_bytes
    return made


def in_turn(chunks: Iterable[Chunk], first: Callable[[int, Chunk], object], second: Callable[[int, Chunk], int]) -> int:
    """Both steps of all chunks, each first step as early as it may be; the number of bytes of second steps."""
    total, last = 0, None
    for number, chunk in enumerate(chunks):
        first(number, chunk)
        if last is not None:
            total += second(number - 1, last)
        last = chunk
    return total + (second(number, last) if last is not None else 0)


def reads(staged: StagedPlan, chunks: Iterable[Chunk], memory: Memory, theirs: Engine) -> int:
    """A destination reads, and copies into place; the number of bytes."""
    local, staging = staged.direct.local, Staging(staged.direct.local)
    ranks = [plan.remotes[0].rank for plan in staged.transfers]
    mine = own(memory.engine, local.rank)

    def read(number: int, chunk: Chunk) -> None:
        for spec, rank in zip(chunk.specs, ranks, strict=True):
            writes, out_of = spec.descriptors()
            staging.fill(number, writes, labels_of(theirs, out_of, rank))

    def put(number: int, chunk: Chunk) -> int:
        before, buffered = memory.cells.copy(), staging.cells.copy()
        total = 0
        for copy in chunk.copies:
            writes, out_of = copy.ranges()
            total += memory.write(writes, local.rank, staging.empty(number, out_of))
        run(chunk.copies, arrays(local, before[mine], staging.cells))
        if not np.array_equal(before, memory.cells) or not np.array_equal(staging.cells, buffered):
            raise FaultError("copies do not do what their ranges say")
        return total

    return in_turn(chunks, read, put)


def writes(staged: StagedPlan, chunks: Iterable[Chunk], memory: Memory, theirs: Engine) -> int:
    """A source rearranges, and writes; the number of bytes."""
    local, staging = staged.direct.local, Staging(staged.direct.local)
    ranks = [plan.remotes[0].rank for plan in staged.transfers]
    mine = theirs.label[own(theirs, local.rank)].copy()

    def put(number: int, chunk: Chunk) -> None:
        before = staging.cells.copy()
        for copy in chunk.copies:
            into, out_of = copy.ranges()
            staging.fill(number, into, labels_of(theirs, out_of, local.rank))
        run(chunk.copies, arrays(local, mine, before))
        if not np.array_equal(before, staging.cells) or not np.array_equal(mine, theirs.label[own(theirs, local.rank)]):
            raise FaultError("copies do not do what their ranges say")

    def write(number: int, chunk: Chunk) -> int:
        total = 0
        for spec, rank in zip(chunk.specs, ranks, strict=True):
            out_of, into = spec.descriptors()
            total += memory.write(into, rank, staging.empty(number, out_of))
        return total

    return in_turn(chunks, put, write)


def engines(world: World) -> tuple[Engine, Engine]:
    """The engines of a world, the destination first."""
    sides = (DESTINATION, world.destination), (SOURCE, world.source)
    ours, theirs = (engine(role, world.heads, side, world.positions) for role, side in sides)
    return ours, theirs


def counted(chunks: Iterable[Chunk], tally: Tally) -> Iterator[Chunk]:
    """The chunks, whose descriptors between workers are counted."""
    for chunk in chunks:
        tally.descriptors += sum(spec.num_descriptors for spec in chunk.specs)
        yield chunk


def check(whole: bool, world: World, requests: Iterable[Request], more: int, tally: Tally) -> None:
    """Stage for every destination worker, in a region of ``more`` bytes more than are needed. Raises FaultError."""
    ours, theirs = engines(world)
    tally.worlds += 1
    for number, worker in enumerate(ours.workers):
        staged = in_least_memory(
            worker, number, more, partial(stage, remotes=theirs.workers, staging=NAME, whole=whole)
        )
        tally.plans += 1
        tally.certificates += len([certify(transfer) for transfer in staged.transfers])
        for request in requests:
            near, far, memory = ours.tables(request.start), theirs.tables(request.start), Memory(ours)
            chunks = counted(staged.bind(local=near, remote=far, tokens=(request.start, request.stop)), tally)
            total = reads(staged, chunks, memory, theirs)
            memory.compare(request, total, own(ours, number))
            tally.requests += 1
            tally.num_bytes += total


def check_writes(world: World, requests: Iterable[Request], more: int, tally: Tally) -> None:
    """Stage for every source worker, each in a region of ``more`` bytes more than are needed. Raises FaultError."""
    ours, theirs = engines(world)
    tally.worlds += 1
    plans = []
    for number, worker in enumerate(theirs.workers):
        others = [other for other in theirs.workers if other is not worker]
        plan = partial(stage_writes, remotes=ours.workers, siblings=others, staging=NAME)
        plans.append(in_least_memory(worker, number, more, plan))
        tally.plans += 1
    moving = [staged.transfers or [staged.direct] for staged in plans]  # the direct plan of a source without a share
    if not certify(itertools.chain(*moving)).complete:
        raise FaultError("a certificate of writes that is not complete")
    tally.certificates += 1
    for request in requests:
        near, far, memory, total = theirs.tables(request.start), ours.tables(request.start), Memory(ours), 0
        for staged in plans:
            chunks = counted(staged.bind(local=near, remote=far, tokens=(request.start, request.stop)), tally)
            total += writes(staged, chunks, memory, theirs)
        memory.compare(request, total)
        tally.requests += 1
        tally.num_bytes += total


Check = Callable[[World, Iterable[Request], int, Tally], None]

CHECKS: Mapping[str, Check] = {
    "receive-staged": partial(check, False),
    "receive-staged-whole": partial(check, True),
    "send-staged": check_writes,
}
"""The checks of worlds by strategy; they take the bytes that staging regions have beyond those they must have."""
