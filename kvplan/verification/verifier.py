"""verify: carry out plans in fake memory, check every byte by its coordinates, and report, promise by promise.

The sources are filled with labels (:mod:`kvplan.verification.labels`) where their views hold the positions of the
request, the plans' copies are carried out, and each destination view is compared with the labels that it needs. Nothing
here knows how plans are made.

- O1: if the copies write as many different bytes as are needed, and every needed byte is written, no byte outside the
  request is written.
- O2: if some writers of an engine are not among the plans, bytes may be missing, but none may be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints
from kvplan._text import count
from kvplan.describe.blocks import Blocks, Tokens
from kvplan.describe.views import View
from kvplan.errors import KVPlanError
from kvplan.verification.labels import (
    Place,
    Window,
    label_tensors,
    listed_slots,
    local_slots,
    locate,
    needed,
    position_at,
    window,
)
from kvplan.verification.memory import ByteRanges, FakeMemory
from kvplan.verification.requests import Job, KeyPair, Move, jobs, range_of_group

if TYPE_CHECKING:
    from kvplan.plan.mesh import MeshPlan
    from kvplan.plan.transfer import TransferPlan

PROMISES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "VALUE": "every byte that is written has the value that the destination's view needs there",
        "COVER": "every byte that the request needs is written",
        "DISJOINT": "no byte is written twice",
        "BOUNDS": "every range lies inside one region of its worker",
        "OWN": "no byte outside the request is written",
        "IDS": "descriptor ids name the same bytes as the coalesced descriptors",
    }
)
"""The promises that :func:`verify` checks, by code."""


@attrs.frozen
class Tail:
    """Unused slots: local slots ``[start, stop)`` of a group that are in a request's blocks but were not written.

    Local slot ``s`` is slot ``s % tokens_per_block`` of block ordinal ``s // tokens_per_block``. In a state group, a
    slot is a block ordinal.

    >>> print(Tail("decode/0", "attn", 1000, 1008))
    decode/0 attn [1000, 1008)
    """

    worker: str
    group: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.worker} {self.group} [{self.start}, {self.stop})"


@attrs.frozen
class Report:
    """What :func:`verify` found. A report is true if every promise that was checked holds.

    ``failures`` are pairs of code and text. ``checked`` has the codes of :data:`PROMISES` that were checked: without
    ``COVER`` if the plans of some writers were not given, without ``IDS`` if the copies were. ``tails`` are the unused
    slots.
    """

    num_bytes: int
    num_descriptors: int
    num_workers: int
    checked: tuple[str, ...]
    failures: tuple[tuple[str, str], ...] = attrs.field(default=())
    tails: tuple[Tail, ...] = attrs.field(default=(), repr=False)

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Report:
        """The reports of several destination workers in one. A promise counts as checked if it was for all of them.

        >>> print(Report.of([Report(4, 1, 1, ("VALUE",)), Report(8, 2, 1, ("VALUE", "OWN"))]))
        verified: 12 bytes in 3 descriptors to 2 workers, 0 unused slots; VALUE hold
        """
        every = tuple(reports)
        return cls(
            num_bytes=sum(report.num_bytes for report in every),
            num_descriptors=sum(report.num_descriptors for report in every),
            num_workers=sum(report.num_workers for report in every),
            checked=tuple(code for code in PROMISES if all(code in report.checked for report in every)),
            failures=tuple(failure for report in every for failure in report.failures),
            tails=tuple(tail for report in every for tail in report.tails),
        )

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def promises(self) -> dict[str, bool]:
        """Each promise that was checked, and whether it holds."""
        broken = {code for code, _ in self.failures}
        return {code: code not in broken for code in self.checked}

    @property
    def num_tail_slots(self) -> int:
        """The number of unused slots in the destinations' blocks, over all workers."""
        return sum(tail.stop - tail.start for tail in self.tails)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        moved = f"{count(self.num_bytes, 'byte')} in {count(self.num_descriptors, 'descriptor')}"
        moved += f" to {count(self.num_workers, 'worker')}"
        if not self.ok:
            return "\n".join([f"not verified: {moved}", *(f"{code}: {text}" for code, text in self.failures)])
        unused = count(self.num_tail_slots, "unused slot")
        return f"verified: {moved}, {unused}; {', '.join(self.checked)} hold"


def verify(
    plan: TransferPlan | MeshPlan | Iterable[TransferPlan],
    *,
    local: Mapping[str, Blocks],
    remote: Mapping[str, Blocks],
    tokens: Tokens = None,
    copies: Mapping[KeyPair, tuple[Any, Any]] | None = None,
) -> Report:
    """Carry out ``plan``, or several plans together, in fake memory, and check every byte of every destination.

    ``local``, ``remote`` and ``tokens`` are the arguments of ``bind``. Pass the write plans of all sources of an engine
    together: from a single one, nobody can know whether its siblings write the rest. It takes about twenty bytes of
    memory for each byte that one destination worker needs, and frees them before the next worker.

    ``copies`` replace what the plans would move, to check other code. They map pairs of keys, of a local and a remote
    worker, to local and remote descriptors: two lists of the same number of rows (address, length, device), of equal
    lengths in order. How copies are cut and ordered does not matter. A pair that is left out moves nothing.

    A request that bind refuses raises the error that bind raises. Raises ``WORKER`` for two different destinations of
    one name, ``MEMORY`` for a region that is too large to map, and ``NAME``, ``SIZE``, ``TYPE`` or ``RANGE`` for
    malformed copies. Everything else is in the report.
    """
    return verify_together([(plan, {"local": local, "remote": remote, "tokens": tokens, "copies": copies})])


def verify_together(
    parts: Iterable[tuple[TransferPlan | MeshPlan | Iterable[TransferPlan], Mapping[str, Any]]],
    tokens: Tokens = None,
) -> Report:
    """:func:`verify` one request that moves in parts: each part is a plan, or several, with its arguments of ``bind``.

    Parts may be chunks of one plan, or plans with different engines; a part with ``copies`` moves those. ``tokens`` is
    the range that the parts must cover together, by groups of the destination. Without it, only what the parts
    themselves ask for is needed.

    >>> from kvplan import Blocks, Model, plan_mesh
    >>> decode, old, new = (Model.shipped("qwen2.5-1.5b").engine(name, num_blocks=9) for name in ("d", "p0", "p1"))
    >>> parts = [
    ...     (plan_mesh(decode, source), {"local": {"attn": Blocks([7, 3])}, "remote": {"attn": table}, "tokens": span})
    ...     for source, table, span in ((old, Blocks([8]), (0, 10)), (new, Blocks([5, 6]), (10, 20)))
    ... ]
    >>> report = verify_together(parts, tokens=(0, 20))
    >>> report.ok, report.num_bytes
    (True, 573440)
    """
    return Report.of([_Check(job, tokens).run() for job in jobs(parts)])


class _Check:
    """The check of one destination worker."""

    def __init__(self, job: Job, tokens: Tokens) -> None:
        self.job, self.worker = job, job.worker
        self.workers = {worker.key: worker for worker in (job.worker, *(move.source for move in job.moves))}
        self.groups = {group.name: group for group in job.worker.groups}
        self.tables = {name: job.table(name) for name in self.groups}
        self.failures: list[tuple[str, str]] = []
        self.done: list[Move] = []
        self.num_needed = 0
        self.num_wrong = Counter[str]()
        self.first_wrong: dict[str, str] = {}
        offered = {name for need in job.needs.values() for name in need.offered}
        self.views = [view for view in job.worker.views if view.name in offered]
        self.positions = [self.wanted(view, tokens) for view in self.views]
        self.labels = label_tensors(zip(self.views, self.positions, strict=True))
        end = max((labels.end for labels in self.labels.values()), default=1)
        label_bytes = 4 if end < 1 << 32 else 8
        self.memory = FakeMemory(self.workers.values(), label_bytes=label_bytes, poison=(1 << 8 * label_bytes) - 1)

    def wanted(self, view: View, tokens: Tokens) -> Ints:
        """The positions of a view that the request needs: those of ``tokens``, or what its parts need."""
        group = self.groups[view.group]
        span = range_of_group(tokens, group, view.group)
        if span is None:
            return np.unique(np.concatenate([need.positions(view, group) for need in self.job.needs.values()]))
        positions = needed(group, None, span)
        lost = positions[~np.isin(local_slots(group, positions), listed_slots(group, self.tables[view.group]))]
        if lost.size:
            self.fail("COVER", f"{count(lost.size, 'position')} of {view.name} without a block, first: {lost[0]}")
        return positions

    def run(self) -> Report:
        """Fill the sources, copy, compare."""
        with self.memory:
            self.fill()
            for move in self.job.moves:
                self.copy(move)
            for view in self.views:
                self.compare(view)
            self.settle_bytes()
            self.settle_writes()
        unchecked = {"COVER": not self.job.complete, "IDS": not self.job.has_ids}
        return Report(
            num_bytes=sum(int(move.reads[:, 1].sum()) for move in self.job.moves),
            num_descriptors=sum(len(move.reads) for move in self.job.moves),
            num_workers=1,
            checked=tuple(code for code in PROMISES if not unchecked.get(code)),
            failures=tuple(self.failures),
            tails=tuple(self.tails()),
        )

    def fill(self) -> None:
        """Label the bytes of the sources that the destination needs."""
        sources = {(move.source.key, id(move.blocks)): move for move in self.job.moves if len(move.reads)}
        for move in sources.values():
            for view in move.source.views:
                if view.name in self.labels:
                    blocks = move.blocks.get(view.group)
                    held = window(self.memory, move.source, view, self.labels[view.name], blocks)
                    for index, labels in held.chunks():
                        held.cells[index] = labels

    def copy(self, move: Move) -> None:
        """Carry out the copies from one worker."""
        if move.fault:
            self.fail("IDS", move.fault)
        try:
            self.memory.move(*move.way, move.reads, move.writes)
        except KVPlanError as error:
            if error.code == "MEMORY":
                raise
            self.fail("BOUNDS", f"{str(error).partition(': ')[2]}{self.elsewhere(**error.details)}")
        else:
            self.done.append(move)

    def elsewhere(self, address: int = -1, device: int = 0, **_: Any) -> str:
        """Which other worker has an address, if one does."""
        places = (locate(worker, address, device) for worker in self.workers.values())
        return next((f", which is {place}" for place in places if place.region), "")

    def held(self, view: View) -> Window:
        """The bytes of a destination view that the request needs."""
        return window(self.memory, self.worker, view, self.labels[view.name], self.tables[view.group])

    def compare(self, view: View) -> None:
        """Compare the cells of a view with the labels that belong there."""
        held = self.held(view)
        for index, labels in held.chunks():
            found = held.cells[index]
            self.num_needed += found.size
            if np.array_equal(found, labels):
                continue
            missing = found == 0
            for code, mask in (("COVER", missing), ("VALUE", (found != labels) & ~missing)):
                self.num_wrong[code] += int(mask.sum())
                if code not in self.first_wrong and mask.any():
                    row, piece, byte = np.unravel_index(int(np.argmax(mask)), mask.shape)
                    place = self.place(view, int(index[row, piece] + byte))
                    label, got = int(labels[row, piece, byte]), int(found[row, piece, byte])
                    self.first_wrong[code] = f"{held.labels.describe(label)} ({place}) {self.explain(place, got)}"

    def place(self, view: View, offset: int) -> Place:
        """The place of a byte in a view's region."""
        region = next(region for region in self.worker.regions if region.name == view.region)
        return locate(self.worker, region.address + offset, region.device_id)

    def explain(self, place: Place, found: int) -> str:
        """What is in a byte's cell instead of its label, and where it was copied from."""
        if not found:
            return "was never written"
        assert place.region
        address, device = place.address, place.region.device_id
        move, last = next(
            (move, hit[-1]) for move in reversed(self.done) if (hit := _holding(move.writes, address, device)).size
        )
        first, _, device = move.reads[last].tolist()
        source = locate(move.source, first + address - int(move.writes[last, 0]), device)
        position, known = position_at(source, move.blocks), self.labels.values()
        beyond = position is not None and not any(position in labels.positions for labels in known)
        got = f"{f'position {position}' if beyond else 'bytes'} outside the request"
        for labels in known:
            got = labels.describe(found) if labels.base <= found < labels.end else got
        return f"holds {got}, copied from {source}"

    def settle_bytes(self) -> None:
        """Report needed bytes that are wrong or missing; rule O2 allows missing ones."""
        for code, wrong in (("VALUE", "wrong"), ("COVER", "missing")):
            if self.num_wrong[code] and (self.job.complete or code != "COVER"):
                self.fail(code, f"{count(self.num_wrong[code], 'byte')} {wrong}, first: {self.first_wrong[code]}")

    def settle_writes(self) -> None:
        """Report bytes that are written twice, and by rule O1 bytes that are written outside the request."""
        writes = self.memory.writes(self.worker)
        writes = writes[np.lexsort((writes[:, 0], writes[:, 2]))]  # by device, then by address
        again = _again(writes)
        if again.any():
            address, _, device = writes[np.flatnonzero(again)[0]].tolist()
            self.fail("DISJOINT", f"{_bytes(again.sum())} written again, first: {locate(self.worker, address, device)}")
        foreign = int(writes[:, 1].sum()) - int(again.sum()) - (self.num_needed - self.num_wrong["COVER"])
        if foreign < 0:
            self.fail("DISJOINT", f"{_bytes(-foreign)} needed by two groups, whose blocks share memory")
        elif foreign:
            self.fail("OWN", f"{_bytes(foreign)} written outside the request, first: {self.stray(writes)}")

    def stray(self, writes: ByteRanges) -> Place:
        """The first byte written that the destination does not need."""
        for view in self.views:
            held = self.held(view)
            for index, _ in held.chunks():
                held.cells[index] = 0
        return next(
            locate(self.worker, address + int(there[0]), device)
            for address, length, device in writes.tolist()
            if (there := np.flatnonzero(self.memory.read(self.worker, address, length, device))).size
        )

    def tails(self) -> Iterator[Tail]:
        """The slots of the request's blocks that no view needs, as intervals."""
        for group in self.worker.groups:
            used = [at for view, at in zip(self.views, self.positions, strict=True) if view.group == group.name]
            if used and (blocks := self.tables[group.name]) is not None:
                slots = listed_slots(group, blocks)
                free = slots[~np.isin(slots, local_slots(group, np.concatenate(used)))]
                # The slots ascend; an interval ends where the next slot is not the neighbour.
                for span in np.split(free, np.flatnonzero(np.diff(free) > 1) + 1):
                    if span.size:
                        yield Tail(self.worker.label, group.name, int(span[0]), int(span[-1]) + 1)

    def fail(self, code: str, text: str) -> None:
        self.failures.append((code, f"at {self.worker.label}: {text}"))


def _bytes(number: int) -> str:
    return count(int(number), "byte")


def _holding(ranges: ByteRanges, address: int, device_id: int) -> Ints:
    """The indices of the ranges that contain a byte."""
    start, length, device = ranges.T
    return np.flatnonzero((device == device_id) & (start <= address) & (address <= start + (length - 1)))


def _again(writes: ByteRanges) -> npt.NDArray[np.uint64]:
    """For each range, sorted by device and address, how many of its bytes an earlier one has."""
    again = np.zeros(len(writes), np.uint64)
    for device in np.unique(writes[:, 2]):
        here = np.flatnonzero(writes[:, 2] == device)
        start, last = writes[here, 0], writes[here, 0] + (writes[here, 1] - np.uint64(1))
        # The furthest last byte of all ranges before each: what a range has up to there was written before.
        reach = np.maximum.accumulate(last)[:-1]
        over = start[1:] <= reach
        again[here[1:][over]] = (np.minimum(last[1:], reach) - start[1:])[over] + np.uint64(1)
    return again
