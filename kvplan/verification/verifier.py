"""verify: carry plans out in fake memory and check every byte by coordinates.

Sources are filled with the labels of :mod:`kvplan.verification.labels` where their views hold the positions of the
request, the plans' copies are carried out, and each destination view is compared with the labels that it calls for.
Nothing here knows how a plan is made.

- O1: bytes written apart from each other, as many as are needed, and all needed ones right, leave none elsewhere.
- O2: where some writers of an engine are not among the plans, bytes may be missing, but none may be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvplan._checks import INT64_END
from kvplan._text import count
from kvplan.describe.blocks import Tokens
from kvplan.describe.views import View
from kvplan.errors import KVPlanError
from kvplan.verification.arenas import Words
from kvplan.verification.jobs import Job, jobs, plans_of, span_of
from kvplan.verification.labels import (
    Ints,
    Span,
    Window,
    listed_slots,
    local_slots,
    locate,
    needed,
    number,
    position_at,
    window,
)
from kvplan.verification.memory import FakeMemory
from kvplan.verification.moves import Move, Pair
from kvplan.verification.progress import Progress, part, told, untold
from kvplan.verification.report import PROMISES, Report, Tail

if TYPE_CHECKING:
    from kvplan.describe.blocks import Blocks
    from kvplan.plan.mesh import MeshPlan
    from kvplan.plan.transfer import TransferPlan

__all__ = ["PROMISES", "Report", "Tail", "verify", "verify_together"]


def verify(
    plan: TransferPlan | MeshPlan | Iterable[TransferPlan],
    *,
    local: Mapping[str, Blocks],
    remote: Mapping[str, Blocks],
    tokens: Tokens = None,
    copies: Mapping[Pair, tuple[Any, Any]] | None = None,
    progress: Progress = untold,
) -> Report:
    """Carry out ``plan``, or several plans together, in fake memory, and check every byte of every destination.

    ``local``, ``remote`` and ``tokens`` are those of ``bind``. Give the write plans of all sources of an engine
    together: a single one cannot tell whether its siblings write the rest. It takes some twenty bytes of memory for
    each byte that one destination worker needs, and gives them back before the next worker.

    ``copies`` are what other code would move in place of the plans. For each pair of local and remote worker, named by
    their keys, they have local and remote descriptors: equally many rows of address, length and device, of equal
    lengths, cut and ordered in any way. A pair that is not there moves nothing.

    ``progress`` is called now and then with the share of the work that is done, from 0 to 1.

    A request that bind refuses raises as bind does; ``WORKER`` is raised where two destinations differ under one
    name, and ``MEMORY`` where a region is too large to map; ``NAME``, ``SIZE``, ``TYPE`` or ``RANGE`` for copies that
    are none. Everything else is in the report.
    """
    request = {"local": local, "remote": remote, "tokens": tokens, "copies": copies}
    return verify_together([(plan, request)], progress=progress)


def verify_together(
    parts: Iterable[tuple[TransferPlan | MeshPlan | Iterable[TransferPlan], Mapping[str, Any]]],
    tokens: Tokens = None,
    progress: Progress = untold,
) -> Report:
    """:func:`verify` of one request that is moved in parts: each a plan, or several, with its arguments of ``bind``.

    The parts may be chunks of one plan, or plans with different engines; one with ``copies`` moves those. ``tokens``
    is the range, by groups of the destination, that they are to cover together; where it is not given, what they cover
    is all that is needed.

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
    every = jobs((plans_of(plan), request) for plan, request in parts)
    return Report.of([_Check(job, tokens).run(part(progress, i, len(every))) for i, job in enumerate(every)])


class _Check:
    """One destination worker: what it needs, what was written, and what failed."""

    def __init__(self, job: Job, tokens: Tokens) -> None:
        self.job, self.worker = job, job.worker
        self.groups = {group.name: group for group in job.worker.groups}
        self.tables = {name: job.table(name) for name in self.groups}
        self.failures: list[tuple[str, str]] = []
        self.done: list[Move] = []
        self.num_bytes = self.num_descriptors = self.num_needed = 0
        self.num_wrong = Counter[str]()
        self.first_wrong: dict[str, str] = {}
        offered = {name for part in job.parts.values() for name in part.offered}
        self.views = [view for view in job.worker.views if view.name in offered]
        self.positions = [self.wanted(view, tokens) for view in self.views]
        self.tensors = number(zip(self.views, self.positions, strict=True))
        end = max((tensor.end for tensor in self.tensors.values()), default=1)
        self.label_bytes = 4 if end < 1 << 32 else 8
        self.poison = (1 << 8 * self.label_bytes) - 1

    def wanted(self, view: View, tokens: Tokens) -> Ints:
        """The positions of a view that the request needs: of the range to be covered, or what its parts want."""
        group = self.groups[view.group]
        span = span_of(tokens, group, view.group)
        if span is None:
            return np.unique(np.concatenate([part.wants(view, group) for part in self.job.parts.values()]))
        positions = needed(group, None, span)
        lost = positions[~np.isin(local_slots(group, positions), listed_slots(group, self.tables[view.group]))]
        if lost.size:
            self.fail("COVER", f"{count(lost.size, 'position')} of {view.name} without a block, first: {lost[0]}")
        return positions

    def run(self, progress: Progress) -> Report:
        """Fill, copy, compare: each about a third of the work."""
        filled, copied, compared = (part(progress, i, 3) for i in range(3))
        workers = {worker.key: worker for worker in (self.worker, *(move.source for move in self.job.moves))}
        with FakeMemory(workers.values(), label_bytes=self.label_bytes, poison=self.poison) as memory:
            self.fill(memory, filled)
            for move in told(self.job.moves, copied):
                self.copy(memory, move)
            for view in told(self.views, compared):
                self.compare(memory, view)
            self.settle_bytes()
            self.settle_writes(memory)
        unchecked = {"COVER": not self.job.complete, "IDS": not self.job.has_ids}
        return Report(
            num_bytes=self.num_bytes,
            num_descriptors=self.num_descriptors,
            num_workers=1,
            checked=tuple(code for code in PROMISES if not unchecked.get(code)),
            failures=tuple(self.failures),
            tails=tuple(self.tails()),
        )

    def fill(self, memory: FakeMemory, filled: Progress) -> None:
        """Label what the sources hold of the coordinates that the destination needs."""
        only = _spans(self.views)
        sources = {(move.source.key, id(move.blocks)): move for move in self.job.moves if len(move.reads)}
        for move in told(list(sources.values()), filled):
            for view in move.source.views:
                if view.name in self.tensors:
                    blocks = move.blocks.get(view.group)
                    held = window(memory, move.source, view, self.tensors[view.name], blocks, only[view.name])
                    for index, labels in held.chunks():
                        held.cells[index] = labels

    def copy(self, memory: FakeMemory, move: Move) -> None:
        """Carry out one worker's copies."""
        self.num_bytes += int(move.reads[:, 1].sum())
        self.num_descriptors += len(move.reads)
        if move.fault:
            self.fail("IDS", move.fault)
        try:
            memory.move(*move.way, move.reads, move.writes)
        except KVPlanError as error:
            if error.code == "MEMORY":
                raise
            self.fail("BOUNDS", f"{str(error).partition(': ')[2]}{self.elsewhere(**error.details)}")
        else:
            self.done.append(move)

    def elsewhere(self, address: int = -1, device: int = 0, **_: Any) -> str:
        """Which of the workers has an address, if one has."""
        workers = {worker.key: worker for worker in (self.worker, *(move.source for move in self.job.moves))}
        places = (locate(worker, address, device) for worker in workers.values())
        return "".join([f", which is {place}" for place in places if not place.startswith("no region")][:1])

    def compare(self, memory: FakeMemory, view: View) -> None:
        """Hold one view's cells against the labels that they should have."""
        held = window(memory, self.worker, view, self.tensors[view.name], self.tables[view.group])
        for index, labels in held.chunks():
            found = held.cells[index]
            self.num_needed += found.size
            if np.array_equal(found, labels):
                continue
            missing = found == 0
            for code, mask in (("COVER", missing), ("VALUE", (found != labels) & ~missing)):
                self.num_wrong[code] += int(mask.sum())
                if code not in self.first_wrong and mask.any():
                    row, *rest = (int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))
                    where = (*(int(digit[row]) for digit in index), *rest)
                    label, got = int(labels[row, *rest]), int(found[row, *rest])
                    self.first_wrong[code] = self.explain(view, held, where, label, got)

    def explain(self, view: View, held: Window, where: Sequence[int], label: int, found: int) -> str:
        """One byte by coordinates: what it should be, where it is, what is there and where that came from."""
        region = next(region for region in self.worker.regions if region.name == view.region)
        address = region.address + view.offset_bytes + held.offset_bytes(where)
        place = f"{held.tensor.describe(label)} ({locate(self.worker, address, region.device_id)})"
        if not found:
            return f"{place} was never written"
        move, source, device = self.origin(address, region.device_id)
        position, known = position_at(move.source, source, device, move.blocks), self.tensors.values()
        beyond = position is not None and not any(position in tensor.positions for tensor in known)
        got = f"{f'position {position},' if beyond else 'what is'} no part of the request"
        for tensor in self.tensors.values():
            got = tensor.describe(found) if tensor.base <= found < tensor.end else got
        return f"{place} holds {got}, copied from {locate(move.source, source, device)}"

    def origin(self, address: int, device_id: int) -> tuple[Move, int, int]:
        """Whose byte was copied last to a destination address, and from which address and device."""
        hits = (
            (move, hit[-1]) for move in reversed(self.done) if (hit := _holding(move.writes, address, device_id)).size
        )
        move, last = next(hits)
        first, _, device = move.reads[last].tolist()
        return move, first + address - int(move.writes[last, 0]), device

    def settle_bytes(self) -> None:
        """Report needed bytes that are wrong; missing ones unless a writer was left out (rule O2)."""
        for code, wrong in (("VALUE", "wrong"), ("COVER", "missing")):
            if self.num_wrong[code] and (self.job.complete or code != "COVER"):
                self.fail(code, f"{count(self.num_wrong[code], 'byte')} {wrong}, first: {self.first_wrong[code]}")

    def settle_writes(self, memory: FakeMemory) -> None:
        """Report what was written twice, and by rule O1 what was written outside the request."""
        writes = memory.writes(self.worker)
        writes = writes[np.lexsort((writes[:, 0], writes[:, 2]))]
        again = _again(writes)
        if again.any():
            first = int(np.flatnonzero(again)[0])
            where = locate(self.worker, int(writes[first, 0]), int(writes[first, 2]))
            self.fail("DISJOINT", f"{count(int(again.sum()), 'byte')} written again, first: {where}")
        foreign = int(writes[:, 1].sum()) - int(again.sum()) - (self.num_needed - self.num_wrong["COVER"])
        if foreign < 0:
            self.fail("DISJOINT", f"{count(-foreign, 'byte')} called for by two groups, whose blocks share memory")
        elif foreign:
            stray = self.stray(memory, writes)
            self.fail("OWN", f"{count(foreign, 'byte')} written outside the request, first: {stray}")

    def stray(self, memory: FakeMemory, writes: Words) -> str:
        """The first byte written that the destination does not need."""
        for view in self.views:
            held = window(memory, self.worker, view, self.tensors[view.name], self.tables[view.group])
            for index, _ in held.chunks():
                held.cells[index] = 0
        left = (
            locate(self.worker, address + int(there[0]), device)
            for address, length, device in writes.tolist()
            if (there := np.flatnonzero(memory.read(self.worker, address, length, device))).size
        )
        return next(left)

    def tails(self) -> Iterator[Tail]:
        """The slots of the request's blocks that no view needs, in spans."""
        for group in self.worker.groups:
            used = [at for view, at in zip(self.views, self.positions, strict=True) if view.group == group.name]
            if used and (blocks := self.tables[group.name]) is not None:
                slots = listed_slots(group, blocks)
                kept = np.unique(np.concatenate([local_slots(group, positions) for positions in used]))
                free = slots[~np.isin(slots, kept)]
                for span in np.split(free, np.flatnonzero(np.diff(free) > 1) + 1):
                    if span.size:
                        yield Tail(self.worker.label, group.name, int(span[0]), int(span[-1]) + 1)

    def fail(self, code: str, text: str) -> None:
        self.failures.append((code, f"at {self.worker.label}: {text}"))


def _holding(ranges: Words, address: int, device_id: int) -> Ints:
    """Which ranges have a byte."""
    start, length, device = ranges.T
    return np.flatnonzero((device == device_id) & (start <= address) & (address <= start + (length - 1)))


def _again(writes: Words) -> npt.NDArray[np.uint64]:
    """How many bytes of each range, in order of device and address, an earlier one has."""
    again = np.zeros(len(writes), np.uint64)
    for device in np.unique(writes[:, 2]):
        here = np.flatnonzero(writes[:, 2] == device)
        start, last = writes[here, 0], writes[here, 0] + (writes[here, 1] - np.uint64(1))
        reach = np.maximum.accumulate(last)[:-1]
        over = start[1:] <= reach
        again[here[1:][over]] = (np.minimum(last[1:], reach) - start[1:])[over] + np.uint64(1)
    return again


def _spans(views: Iterable[View]) -> dict[str, dict[str, Span]]:
    """By tensor and axis, the coordinates that views hold; an axis made of digits counts as whole."""
    found: dict[str, dict[str, Span]] = {}
    for view in views:
        known = found.setdefault(view.name, {})
        names = [axis.name for axis in view.axes]
        for axis in view.axes:
            low, high = known.get(axis.name, (axis.start, axis.stop))
            digits = names.count(axis.name) > 1
            known[axis.name] = (0, INT64_END) if digits else (min(low, axis.start), max(high, axis.stop))
    return found
