"""Staged requests carried out by code that knows no plan: what goes where is read off descriptors and copies alone.

Every byte of the sources has a label. The next chunk is always read before the one before is put in order, so that
halves have to be apart; and of each byte of the staging region it is known which chunk has written it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from kvplan import KVPlanError, Region, Worker
from kvplan.rearrange import run
from kvplan.staging import Chunk, StagedPlan, stage
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

STAGING, STAGING_ADDRESS = "staging", 1 << 52
GARBAGE = -2


def with_staging(worker: Worker, size: int, device_id: int) -> Worker:
    """A worker that has set memory aside."""
    region = Region(STAGING, STAGING_ADDRESS, size, device_id=device_id)
    return attrs.evolve(worker, regions=(*worker.regions, region))


def least(worker: Worker, sources: Iterable[Worker], whole: bool, **others: object) -> int:
    """The bytes that a staging region must have."""
    try:
        stage(with_staging(worker, 1, 0), sources, staging=STAGING, whole=whole, **others)  # type: ignore[arg-type]
    except KVPlanError as error:
        assert error.code == "MEMORY", error
        return int(error.details["needed_bytes"])
    return 1


class Memory:
    """The memory of one destination worker and its staging region, as labels."""

    def __init__(self, local: Worker, size: int) -> None:
        self.cells = np.full(size, UNTOUCHED, np.int32)
        self.region = next(region for region in local.regions if region.name == STAGING)
        self.staging = np.full(self.region.size_bytes, GARBAGE, np.int32)
        self.chunk = np.full(self.region.size_bytes, -1, np.int32)
        self.arrays, at = {STAGING: self.staging}, 0
        self.first = np.uint64(local.regions[0].address)
        for region in local.regions[:-1]:
            self.arrays[region.name] = self.cells[at : at + region.size_bytes]
            at += region.size_bytes

    def staged(self, ranges: Words) -> Ints:
        """The places in the staging region of all bytes of ranges, after making sure that they lie in it."""
        offset = ranges[:, 0] - np.uint64(STAGING_ADDRESS)
        if not ((offset + ranges[:, 1] <= self.region.size_bytes) & (ranges[:, 2] == self.region.device_id)).all():
            raise FaultError("staged outside the staging region")
        return each_byte(offset.astype(np.int64), ranges)

    def read(self, number: int, chunk: Chunk, sources: Engine, ranks: Sequence[int]) -> None:
        """Leg 1: the labels of the sources go where the specs say."""
        for spec, rank in zip(chunk.specs, ranks, strict=True):
            writes, reads = spec.descriptors()
            if not np.array_equal(writes[:, 1], reads[:, 1]):
                raise FaultError("pairs of different lengths")
            into = self.staged(writes)
            if np.unique(into).size != into.size or (self.chunk[into] == number).any():
                raise FaultError("staged twice")
            self.staging[into] = sources.label[each_byte(sources.places(reads, np.full(len(reads), rank)), reads)]
            self.chunk[into] = number

    def put(self, number: int, chunk: Chunk) -> int:
        """Leg 2, twice: range by range, and by strided copies; the number of bytes."""
        expected, total = self.cells.copy(), 0
        for copy in chunk.copies:
            writes, reads = copy.ranges()
            out_of, into = self.staged(reads), each_byte((writes[:, 0] - self.first).astype(np.int64), writes)
            if (self.chunk[out_of] != number).any():
                raise FaultError("put in order what this chunk has not read")
            if np.unique(into).size != into.size or (expected[into] != UNTOUCHED).any():
                raise FaultError("written twice")
            if out_of.size != copy.num_bytes:
                raise FaultError(f"{copy.num_bytes} bytes for {out_of.size}")
            expected[into] = self.staging[out_of]
            total += into.size
        before = self.staging.copy()
        run(chunk.copies, self.arrays)
        if not np.array_equal(self.cells, expected) or not np.array_equal(self.staging, before):
            raise FaultError("copies do not do what their ranges say")
        return total


def carry_out(staged: StagedPlan, memory: Memory, chunks: Iterable[Chunk], sources: Engine) -> int:
    """All chunks of a request; the number of bytes put in order."""
    ranks = [plan.remotes[0].rank for plan in staged.reads]
    total, last = 0, None
    for number, chunk in enumerate(chunks):
        memory.read(number, chunk, sources, ranks)
        if last is not None:
            total += memory.put(number - 1, last)
        last = chunk
    return total + (memory.put(number, last) if last is not None else 0)


def check(world: World, requests: Iterable[Request], whole: bool, more: int, tally: Tally) -> None:
    """Stage for every destination worker, in a region of ``more`` bytes more than are needed. Raises FaultError."""
    ours, theirs = (
        engine(role, world.heads, side, world.positions)
        for role, side in ((DESTINATION, world.destination), (SOURCE, world.source))
    )
    tally.worlds += 1
    for number, worker in enumerate(ours.workers):
        local = with_staging(worker, least(worker, theirs.workers, whole) + more, number)
        staged = stage(local, theirs.workers, staging=STAGING, whole=whole)
        tally.plans += 1
        mine = slice(int(ours.begin[number]), int(ours.begin[number + 1]))
        for request in requests:
            near, far = ours.tables(request.start), theirs.tables(request.start)
            memory = Memory(local, mine.stop - mine.start)
            chunks = staged.bind(local=near, remote=far, tokens=(request.start, request.stop))
            total = carry_out(staged, memory, chunks, theirs)
            wanted = (ours.position[mine] >= request.start) & (ours.position[mine] < request.stop)
            wrong = np.flatnonzero(memory.cells != np.where(wanted, ours.label[mine], UNTOUCHED))
            if wrong.size or total != np.count_nonzero(wanted):
                raise FaultError(f"{wrong.size} bytes wrong, {total} moved, {np.count_nonzero(wanted)} wanted")
            tally.requests += 1
            tally.num_bytes += total
