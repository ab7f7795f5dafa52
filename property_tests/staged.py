"""Staged requests carried out by code that knows no plan: it reads descriptors and copies alone.

Every byte of the sources has a label. The first step of a chunk always precedes the second step of the chunk before, so
that neighbouring chunks must not share staging blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import attrs
import numpy as np
import numpy.typing as npt

from kvplan import certify
from kvplan.describe.worker import Key
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
from tests.staged import ADDRESS, NAME, in_least_memory

GARBAGE = -2

Labels = npt.NDArray[np.int32]
Ranges = tuple[Words, Key]
"""Ranges of a worker's memory."""


@attrs.frozen(eq=False)
class Memory:
    """The labels of an engine's memory, and behind them those of a staging region of one of its workers."""

    engine: Engine
    cells: Labels

    @classmethod
    def of(cls, engine: Engine, labels: Labels, staging_bytes: int = 0) -> Memory:
        """Copy the labels of an engine; nothing is staged yet."""
        return cls(engine, np.append(labels, np.full(staging_bytes, GARBAGE, np.int32)))

    def each(self, ranges: Ranges) -> Ints:
        """Return the index of every byte of ranges in ``cells``."""
        words, (_, rank) = ranges
        size = np.uint64(self.engine.label.size)
        is_staged = (words[:, 0] >= ADDRESS) & (words[:, 0] < ADDRESS + self.cells.size - size)
        staged = words[is_staged]
        begin = np.empty(len(words), np.int64)
        begin[is_staged] = staged[:, 0] - np.uint64(ADDRESS) + size
        if not ((begin[is_staged] + staged[:, 1] <= self.cells.size) & (staged[:, 2] == rank)).all():
            raise FaultError("a range leaves the staging region")
        begin[~is_staged] = self.engine.places(words[~is_staged], np.full(len(words) - len(staged), rank))
        return each_byte(begin, words)

    def compare(self, request: Request, total: int, which: slice = slice(None)) -> None:
        """Raise FaultError unless workers have what they want of a request, and nothing else."""
        wanted = (self.engine.position >= request.start) & (self.engine.position < request.stop)
        expected = np.where(wanted, self.engine.label, UNTOUCHED)[which]
        wrong = np.flatnonzero(self.cells[: wanted.size][which] != expected)
        if wrong.size or total != np.count_nonzero(wanted[which]):
            raise FaultError(f"{wrong.size} bytes wrong, {total} moved, {np.count_nonzero(wanted[which])} wanted")


def move(destination: Memory, source: Memory, pairs: Sequence[tuple[Ranges, Ranges]]) -> int:
    """Copy the bytes of pairs of ranges, the destination's first; return their number."""
    total = 0
    for writes, reads in pairs:
        into, out_of = destination.each(writes), source.each(reads)
        if into.size != out_of.size:
            raise FaultError("pairs of different lengths")
        destination.cells[into] = source.cells[out_of]
        total += into.size
    return total


def carry_out(staged: StagedPlan, chunks: Iterable[Chunk], near: Memory, far: Memory) -> int:
    """Carry out a request in the memory of the local worker's engine and of its peers'; return the bytes that arrive.

    The first step of each chunk precedes the second step of the one before.
    """
    local, total = staged.direct.local.key, 0
    waiting: list[list[tuple[Ranges, Ranges]]] = []
    for chunk in chunks:
        copies = [((writes, local), (reads, local)) for copy in chunk.copies for writes, reads in [copy.ranges()]]
        sides = [(spec.descriptors(), spec.remote) for spec in chunk.specs]
        move(near, far, [((into, local), (out_of, remote)) for (into, out_of), remote in sides])
        waiting.append(copies)
        if len(waiting) > 1:
            total += move(near, near, waiting.pop(0))
    return total + sum(move(near, near, copies) for copies in waiting)


def counted(chunks: Iterable[Chunk], tally: Tally) -> Iterator[Chunk]:
    """The chunks, whose descriptors between workers are counted."""
    for chunk in chunks:
        tally.descriptors += sum(spec.num_descriptors for spec in chunk.specs)
        yield chunk


def check(whole: bool, world: World, requests: Iterable[Request], more: int, tally: Tally) -> None:
    """Stage for every destination worker, in regions of ``more`` bytes more than are needed. Raises FaultError."""
    ours = engine(DESTINATION, world.heads, world.destination, world.positions)
    theirs = engine(SOURCE, world.heads, world.source, world.positions)
    staged = partial(stage, remotes=theirs.workers, staging=NAME, whole=whole)
    plans = [in_least_memory(worker, rank, more, staged) for rank, worker in enumerate(ours.workers)]
    tally.worlds += 1
    tally.plans += len(plans)
    tally.certificates += len([certify(transfer) for plan in plans for transfer in plan.transfers])
    for request in requests:
        local, remote = ours.tables(request.start), theirs.tables(request.start)
        for rank, plan in enumerate(plans):
            chunks = counted(plan.bind(local=local, remote=remote, tokens=(request.start, request.stop)), tally)
            size = plan.direct.local.regions[-1].size_bytes
            near = Memory.of(ours, np.full(ours.label.size, UNTOUCHED, np.int32), size)
            moved = carry_out(plan, chunks, near, Memory.of(theirs, theirs.label))
            near.compare(request, moved, slice(int(ours.begin[rank]), int(ours.begin[rank + 1])))
            tally.num_bytes += moved
        tally.requests += len(plans)


CHECKS: Mapping[str, Callable[[World, Iterable[Request], int, Tally], None]] = {
    "receive-staged": partial(check, False),
    "receive-staged-whole": partial(check, True),
}
"""The checks of worlds by strategy; they take the bytes that staging regions have beyond those they must have."""
