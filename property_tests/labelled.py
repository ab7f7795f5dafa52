"""Small worlds, executed: every byte of every worker has a label, and a request must move exactly the right ones.

A label is the meaning of a byte as one number, of tensor, position, head, K or V, and coordinate of dim. The oracle's
elements say where labels are. Reads copy them, and then all memory of the destination is compared. Nothing here knows
how plans are made, only what workers, rows, ids and descriptors mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt

from kvplan import Blocks, ReadSpec, Worker, certify, plan_mesh
from kvplan.verification.memory import expand
from property_tests.oracle import elements, positions_of
from property_tests.worlds import DIM, WITHIN, Heads, Request, Side, World, needed_blocks, pools, workers

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

DESTINATION, SOURCE = ("decode", (1 << 63) - 40), ("prefill", 1 << 44)
"""Names and addresses of the engines. The destination's memory is on both sides of 2**63."""

UNTOUCHED, UNLABELLED = -1, 0
MAX_HEADS = 4
WEIGHT = {"head": 2 * DIM, "kv": DIM, "dim": 1}
"""The increase of a label for a step along an axis."""

PER_POSITION = MAX_HEADS * 2 * DIM


class FaultError(Exception):
    """A fault of a plan."""


@attrs.define
class Tally:
    """Counts of a run."""

    worlds: int = 0
    plans: int = 0
    certificates: int = 0
    requests: int = 0
    descriptors: int = 0
    num_bytes: int = 0

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name, count in attrs.asdict(other).items():
            setattr(self, name, getattr(self, name) + count)


class Engine:
    """The workers of a side, a request's block tables, and the memory of all workers, one after another."""

    def __init__(self, role: tuple[str, int], heads: Heads, side: Side, positions: int) -> None:
        self.side, self.address = side, role[1]
        self.workers = workers(*role, heads, side, positions)
        self.ids = block_ids(side, positions, turn=len(role[0]))
        sizes = [sum(region.size_bytes for region in worker.regions) for worker in self.workers]
        self.size = np.array(sizes, np.uint64)
        self.begin = np.cumsum([0, *sizes])
        self.label, self.position, self.region = (
            np.full(sum(sizes), value, np.int32) for value in (UNLABELLED, -1, -1)
        )
        for number, worker in enumerate(self.workers):
            self._fill(worker, int(self.begin[number]), positions)
        self._tables: dict[int, dict[str, Blocks]] = {}

    def _fill(self, worker: Worker, begin: int, positions: int) -> None:
        regions = {}
        for region in worker.regions:
            regions[region.name] = at = begin + region.address - self.address
            self.region[at : at + region.size_bytes] = len(regions)
        groups = {group.name: (group, ids) for group, ids in zip(worker.groups, self.ids, strict=True)}
        for view in worker.views:
            group, ids = groups[view.group]
            held = np.array(positions_of(group, positions), np.int64)
            tokens = group.tokens_per_block or 1
            by_slot = [(slot, offset, _code(coordinates)) for slot, offset, coordinates in elements(view)]
            # one row for each element of a block; one column for each block that holds some of the positions
            slot, offset, code = (np.array(column, np.int64)[:, None] for column in zip(*by_slot, strict=True))
            blocks = np.arange(-(-held.size // tokens))
            number = blocks * tokens + slot
            inside = number < held.size
            position = held[np.where(inside, number, 0)]
            where = (regions[view.region] + offset + ids[blocks] * view.block_stride_bytes)[inside]
            if (self.label[where] != UNLABELLED).any():
                raise FaultError(f"two bytes in one place of {worker}")
            label = 1 + (int(view.name[1:]) * positions + position) * PER_POSITION + code
            self.label[where], self.position[where] = label[inside], position[inside]

    def tables(self, start: int) -> dict[str, Blocks]:
        """The block tables of a request, from the first block that holds position ``start`` or later ones."""
        if start not in self._tables:
            size, run = self.side.spread
            firsts = [start // (size * run) * run // tokens for tokens in self.side.tokens]
            self._tables[start] = {
                f"g{i}": Blocks(ids[first:], first) for i, (ids, first) in enumerate(zip(self.ids, firsts, strict=True))
            }
        return self._tables[start]

    def places(self, ranges: Words, ranks: Ints) -> Ints:
        """Where ranges start in the memory of all workers. Checks that each is inside one region of its worker."""
        address, length, device = ranges.T
        offset = address - np.uint64(self.address)
        if not np.array_equal(device, ranks):
            raise FaultError(f"devices {device} for workers {ranks}")
        if not ((length > 0) & (length <= self.size[ranks]) & (offset <= self.size[ranks] - length)).all():
            raise FaultError("a range leaves the memory of its worker")
        at: Ints = self.begin[ranks] + offset.astype(np.int64)
        if (self.region[at] != self.region[at + length.astype(np.int64) - 1]).any():
            raise FaultError("a range leaves its region")
        return at


def each_byte(begin: Ints, ranges: Words) -> Ints:
    """The places of all bytes of ranges, which start at the places ``begin``."""
    # each range repeated for its bytes, less the bytes before it, plus the number of each byte
    length = ranges[:, 1].astype(np.int64)
    return np.repeat(begin - np.cumsum(length) + length, length) + np.arange(length.sum())


def _code(coordinates: Iterable[tuple[str, int]]) -> int:
    return sum(WEIGHT[name] * coordinate for name, coordinate in coordinates)


def block_ids(side: Side, positions: int, turn: int) -> list[Ints]:
    """A request's block ids in each group: pairs of neighbours at scattered places."""
    ids = []
    taken = 0
    for needed, pool in zip(needed_blocks(side, positions), pools(side, positions), strict=True):
        scattered = sorted(range(pool), key=lambda block: (block // 2 + turn) * 7919 % 1009)
        ids.append(np.array(scattered[taken : taken + needed], np.int64))
        taken += needed if side.packing == WITHIN else 0
    return ids


@lru_cache(maxsize=4096)
def engine(role: tuple[str, int], heads: Heads, side: Side, positions: int) -> Engine:
    """An engine, cached for other worlds."""
    return Engine(role, heads, side, positions)


def check(world: World, requests: Iterable[Request], proved: bool, tally: Tally) -> None:
    """Plan for every destination worker, and execute the requests. Raises :class:`FaultError`."""
    ours, theirs = (
        engine(role, world.heads, side, world.positions)
        for role, side in ((DESTINATION, world.destination), (SOURCE, world.source))
    )
    tally.worlds += 1
    step = "plan"
    try:
        mesh = plan_mesh(ours.workers, theirs.workers)
        if proved:
            step = "certificate"
            if not certify(mesh).complete:
                raise FaultError("a certificate of reads that is not complete")
            tally.certificates += 1
        for number, plan in enumerate(mesh.plans):
            tally.plans += 1
            for request in requests:
                step = f"{plan.local.label}, {request}"
                near, far = ours.tables(request.start), theirs.tables(request.start)
                specs = plan.bind(local=near, remote=far, tokens=(request.start, request.stop))
                _move(specs, ours, theirs, number, request, tally)
    except Exception as error:
        raise FaultError(f"{step}: {type(error).__name__}: {error}") from error


def _move(specs: Sequence[ReadSpec], ours: Engine, theirs: Engine, number: int, request: Request, tally: Tally) -> None:
    """Execute the reads of one destination worker, and compare all its memory with what is expected."""
    named = [(spec.operation, spec.local, spec.remote) for spec in specs]
    if named != [("READ", (DESTINATION[0], number), (SOURCE[0], rank)) for rank in range(len(theirs.workers))]:
        raise FaultError(f"specs of {named}")
    sides = [_by_ids(spec) if request.by_ids else spec.descriptors() for spec in specs]
    writes, reads = (np.concatenate(ranges) for ranges in zip(*sides, strict=True))
    if not np.array_equal(writes[:, 1], reads[:, 1]):
        raise FaultError("pairs of different lengths")
    into = ours.places(writes, np.full(len(writes), number))
    source = theirs.places(reads, np.repeat(np.arange(len(specs)), [len(local) for local, _ in sides]))
    mine = slice(int(ours.begin[number]), int(ours.begin[number + 1]))
    memory = np.full(ours.label.size, UNTOUCHED, np.int32)
    memory[each_byte(into, writes)] = theirs.label[each_byte(source, reads)]
    total = int(writes[:, 1].sum())
    wanted = (ours.position[mine] >= request.start) & (ours.position[mine] < request.stop)
    expected = np.where(wanted, ours.label[mine], UNTOUCHED)
    wrong = np.flatnonzero(memory[mine] != expected)
    if wrong.size:
        at = wrong[0]
        raise FaultError(f"{wrong.size} bytes, the first at {at}: label {memory[mine][at]}, not {expected[at]}")
    if total != np.count_nonzero(wanted):
        raise FaultError(f"{total} bytes are moved where {np.count_nonzero(wanted)} are wanted")
    tally.requests += 1
    tally.descriptors += len(writes)
    tally.num_bytes += total


def _by_ids(spec: ReadSpec) -> tuple[Words, Words]:
    """The ranges of a spec's ids, local and remote."""
    return expand(spec.local_table.rows, spec.local_ids), expand(spec.remote_table.rows, spec.remote_ids)
