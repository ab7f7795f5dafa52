"""verify: carry out plans in fake memory, check every byte, and report, promise by promise.

The sources are filled with labels (:mod:`kvplan.verification.labels`) where their views hold the
positions of the request, the plans' copies are carried out, and each destination view is compared
with the labels that it needs. Nothing here knows how plans are made.

- verify.O1: if the copies write as many different bytes as are needed, and every needed byte
  is written, no byte outside the request is written.
- verify.O2: if some writers of an engine are not among the plans, bytes may be missing, but
  none may be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._text import count, few, shown
from kvplan.describe.blocks import Blocks, Tokens
from kvplan.describe.views import View
from kvplan.describe.worker import Key
from kvplan.errors import KVPlanError
from kvplan.verification.labels import (
    Location,
    Window,
    label_tensors,
    listed_slots,
    local_slots,
    locate,
    needed,
    window,
)
from kvplan.verification.memory import ByteRanges, FakeMemory
from kvplan.verification.pattern_search import PatternSearch
from kvplan.verification.patterns import MISSING, OUTSIDE, Pattern
from kvplan.verification.report import PROMISES, Failure, Report, Tail, failures_in_words
from kvplan.verification.requests import DestinationJob, KeyPair, Move, jobs, range_of_group

if TYPE_CHECKING:
    from kvplan._arrays import Ints
    from kvplan.plan.mesh import MeshPlan
    from kvplan.plan.transfer import TransferPlan


def verify(
    plan: TransferPlan | MeshPlan | Iterable[TransferPlan],
    *,
    local: Mapping[str, Blocks],
    remote: Mapping[str, Blocks],
    tokens: Tokens = None,
    copies: Mapping[KeyPair, tuple[Any, Any]] | None = None,
) -> Report:
    """Carry out one or more plans in fake memory, and check every byte of every destination.

    ``local``, ``remote`` and ``tokens`` are the arguments of ``bind``. Pass the write plans of all
    sources of an engine together: a single one does not say whether its siblings write the
    rest. It takes about twenty bytes of memory for each byte that one destination worker needs, and
    frees them before the next worker.

    ``copies`` replace what the plans would move, to check other code. They map pairs of keys, of a
    local and a remote worker, to local and remote descriptors: two lists of the same number of rows
    (address, length, device), of equal lengths in order. How copies are cut and ordered does not
    matter. A pair that is left out moves nothing.

    A request that bind refuses raises the error that bind raises. Raises ``WORKER`` for two
    different destinations of one name, ``MEMORY`` for a region that is too large to map, and
    ``NAME``, ``SIZE``, ``TYPE`` or ``RANGE`` for malformed copies. Everything else is in the
    report.
    """
    request = {"local": local, "remote": remote, "tokens": tokens, "copies": copies}
    return verify_together([(plan, request)])


def verify_together(
    parts: Iterable[tuple[TransferPlan | MeshPlan | Iterable[TransferPlan], Mapping[str, Any]]],
    tokens: Tokens = None,
) -> Report:
    """:func:`verify` one request that moves in parts.

    Each part is a plan, or several, with its arguments of ``bind``. Parts may be chunks of one
    plan, or plans with different engines; a part with ``copies`` moves those. ``tokens`` is the
    range that the parts must cover together, by groups of the destination. Without it, only what
    the parts themselves ask for is needed.

    >>> from kvplan import Blocks, Model, plan_mesh
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> decode, old, new = (model.engine(name, num_blocks=9) for name in ("d", "p0", "p1"))
    >>> local = {"attn": Blocks([7, 3])}
    >>> first = {"local": local, "remote": {"attn": Blocks([8])}, "tokens": (0, 10)}
    >>> second = {"local": local, "remote": {"attn": Blocks([5, 6])}, "tokens": (10, 20)}
    >>> parts = [(plan_mesh(decode, old), first), (plan_mesh(decode, new), second)]
    >>> report = verify_together(parts, tokens=(0, 20))
    >>> report.ok, report.num_bytes
    (True, 573440)
    """
    reports = list[Report]()
    failures = list[Failure]()
    jobs_by_destination = jobs(parts)
    _check_groups(tokens, jobs_by_destination)
    for job in jobs_by_destination:
        check = _Check(job, tokens)
        report = check.run()
        if any(pattern.fault == OUTSIDE for pattern in check.patterns):
            # Once more, to say what it is that the request does not need.
            check = _Check(job, tokens, label_all=True)
            report = check.run()
        reports.append(report)
        failures += check.failures
    return attrs.evolve(Report.of(reports), failures=failures_in_words(failures))


def _check_groups(tokens: Tokens, jobs: Iterable[DestinationJob]) -> None:
    """Refuse a range of a group that no destination has. Raises ``NAME``."""
    if not isinstance(tokens, Mapping):
        return
    group_names = dict.fromkeys(group.name for job in jobs for group in job.worker.groups)
    for label in tokens:
        if label not in group_names:
            expected = f"a group of {few([repr(name) for name in group_names], ', ') or 'none'}"
            raise KVPlanError("NAME", "verify a token range", expected=expected, got=shown(label))


class _Check:
    """The check of one destination worker."""

    def __init__(self, job: DestinationJob, tokens: Tokens, *, label_all: bool = False) -> None:
        self.job = job
        self.worker = job.worker
        self.workers = {job.worker.key: job.worker}
        for move in job.moves:
            self.workers[move.source.key] = move.source
        self.groups = {group.name: group for group in job.worker.groups}
        self.tables = {name: job.table(name) for name in self.groups}
        self.failures: list[Failure] = []
        self.carried_out: list[Move] = []
        self.num_needed = 0
        self.num_wrong = Counter[str]()
        self.first_wrong: dict[str, str] = {}
        offered: set[str] = set()
        for need in job.needs.values():
            offered.update(need.offered)
        self.views = [view for view in job.worker.views if view.name in offered]
        self.positions = [self.needed_positions(view, tokens) for view in self.views]
        self.labels = label_tensors(
            self.needs(),
            self.positions_of_sources() if label_all else None,
        )
        self.memory = self.memory_for_labels()
        self.search = PatternSearch(job.worker.key, self.labels, self.memory.poison)
        self.patterns: list[Pattern] = []

    def needed_positions(self, view: View, tokens: Tokens) -> Ints:
        """Return the positions of a view that the request needs.

        These are the positions of ``tokens``, or without them what the parts need.
        """
        group = self.groups[view.group]
        tokens = range_of_group(tokens, group, view.group)
        if tokens is None:
            # Parts may overlap: each position counts once.
            by_part = [need.positions(view, group) for need in self.job.needs.values()]
            return np.unique(np.concatenate(by_part))
        positions = needed(group, None, tokens)
        in_blocks = listed_slots(group, self.tables[view.group])
        # Positions whose slot is in no block of the table.
        lost = positions[~np.isin(local_slots(group, positions), in_blocks)]
        if lost.size:
            num_lost = count(lost.size, "position")
            self.fail("COVER", f"{num_lost} of {view.name} without a block, first: {lost[0]}")
        return positions

    def positions_of_sources(self) -> dict[str, Ints]:
        """Return the positions that sources have in the request's blocks, by tensor."""
        positions = {view.name: np.empty(0, np.int64) for view in self.views}
        for move in self.job.moves:
            groups = {group.name: group for group in move.source.groups}
            for view in move.source.views:
                if view.name in positions:
                    in_blocks = needed(groups[view.group], move.blocks.get(view.group), None)
                    positions[view.name] = np.union1d(positions[view.name], in_blocks)
        return positions

    def memory_for_labels(self) -> FakeMemory:
        """Return memory whose cells are wide enough for all labels and the poison."""
        # The poison is the highest number that a cell holds: no label may reach it.
        end = max((labels.end for labels in self.labels.values()), default=1)
        label_bytes = 4 if end < 1 << 32 else 8
        poison = (1 << 8 * label_bytes) - 1
        return FakeMemory(self.workers.values(), label_bytes=label_bytes, poison=poison)

    def run(self) -> Report:
        """Fill the sources, copy, compare."""
        with self.memory:
            self.fill()
            for move in self.job.moves:
                self.copy(move)
            for view, positions in self.needs():
                self.compare(view, positions)
            self.settle_bytes()
            self.settle_writes()
        unchecked = {"COVER": not self.job.complete, "IDS": not self.job.has_ids}
        return Report(
            num_bytes=sum(int(move.reads[:, 1].sum()) for move in self.job.moves),
            num_descriptors=sum(len(move.reads) for move in self.job.moves),
            num_workers=1,
            checked=tuple(code for code in PROMISES if not unchecked.get(code)),
            tails=tuple(self.tails()),
        )

    def fill(self) -> None:
        """Label the bytes of the sources that the destination needs."""
        # A source is filled once for each of its block tables, however many plans move from it.
        moves: dict[tuple[Key, int], Move] = {}
        for move in self.job.moves:
            if len(move.reads):
                moves[move.source.key, id(move.blocks)] = move
        for move in moves.values():
            for view in move.source.views:
                if view.name in self.labels:
                    blocks = move.blocks.get(view.group)
                    tensor_labels = self.labels[view.name]
                    held = window(self.memory, move.source, view, tensor_labels, blocks)
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
            fault = str(error).partition(": ")[2]
            self.fail("BOUNDS", f"{fault}{self.holder_of(**error.details)}")
        else:
            self.carried_out.append(move)

    def holder_of(self, address: int = -1, device: int = 0, **_: Any) -> str:
        """Return in words which worker has an address that was not found, if one does."""
        for worker in self.workers.values():
            location = locate(worker, address, device)
            if location.region:
                return f", which is {location}"
        return ""

    def needs(self) -> Iterable[tuple[View, Ints]]:
        return zip(self.views, self.positions, strict=True)

    def held(self, view: View, positions: Ints) -> Window:
        """Return the bytes of a destination view that the request needs."""
        blocks = self.tables[view.group]
        return window(self.memory, self.worker, view, self.labels[view.name], blocks, positions)

    def compare(self, view: View, positions: Ints) -> None:
        """Compare the cells of a view with the labels that belong there."""
        held = self.held(view, positions)
        for index, labels in held.chunks():
            # (positions, segments, bytes), as the labels are.
            cells = held.cells[index]
            self.num_needed += cells.size
            if np.array_equal(cells, labels):
                continue
            self.search.add(held.labels, labels, cells)
            missing = cells == 0
            wrong = (cells != labels) & ~missing
            for code, mask in (("COVER", missing), ("VALUE", wrong)):
                self.num_wrong[code] += int(mask.sum())
                if code not in self.first_wrong and mask.any():
                    # By position, segment and byte of the segment.
                    row, segment, byte = np.unravel_index(int(np.argmax(mask)), mask.shape)
                    location = self.location(view, int(index[row, segment] + byte))
                    label = held.labels.describe(int(labels[row, segment, byte]))
                    fault = self.explain(location, int(cells[row, segment, byte]))
                    self.first_wrong[code] = f"{label} ({location}) {fault}"

    def location(self, view: View, offset: int) -> Location:
        region = next(region for region in self.worker.regions if region.name == view.region)
        return locate(self.worker, region.address + offset, region.device_id)

    def explain(self, location: Location, cell: int) -> str:
        """Return what is in a byte's cell instead of its label, and where it was copied from."""
        if not cell:
            return "was never written"
        content = OUTSIDE
        for labels in self.labels.values():
            if labels.base <= cell < labels.end:
                content = labels.describe(cell)
        return f"holds {content}, copied from {self.source_of(location)}"

    def source_of(self, location: Location) -> Location:
        """Return where the byte at a location was last copied from."""
        assert location.region
        device = location.region.device_id
        last_first = reversed(self.carried_out)
        move = next(m for m in last_first if _holding(m.writes, location.address, device).size)
        # Of several copies to the byte, the last one left its value there.
        copy = _holding(move.writes, location.address, device)[-1]
        first_read, _, source_device = move.reads[copy].tolist()
        address = first_read + location.address - int(move.writes[copy, 0])
        return locate(move.source, address, source_device)

    def settle_bytes(self) -> None:
        """Report needed bytes that are wrong or missing; rule verify.O2 allows missing ones."""
        if self.first_wrong:
            self.patterns = self.search.patterns(self.held(*need) for need in self.needs())
        missing = [pattern for pattern in self.patterns if pattern.fault == MISSING]
        wrong = [pattern for pattern in self.patterns if pattern.fault != MISSING]
        if self.num_wrong["VALUE"]:
            self.fail("VALUE", "wrong", self.num_wrong["VALUE"], self.first_wrong["VALUE"], wrong)
        if self.num_wrong["COVER"] and self.job.complete:
            num_missing = self.num_wrong["COVER"]
            self.fail("COVER", "missing", num_missing, self.first_wrong["COVER"], missing)

    def settle_writes(self) -> None:
        """Report bytes that are written twice, and by rule verify.O1 bytes outside the
        request.
        """
        writes = self.memory.writes(self.worker)
        writes = writes[np.lexsort((writes[:, 0], writes[:, 2]))]  # by device, then by address
        num_repeated = _repeated_bytes(writes)
        if num_repeated.any():
            address, _, device = writes[np.flatnonzero(num_repeated)[0]].tolist()
            location = locate(self.worker, address, device)
            self.fail("DISJOINT", "written again", int(num_repeated.sum()), str(location))
        # Each written byte once, less the needed bytes that were written: by rule verify.O1,
        # foreign ones.
        num_distinct = int(writes[:, 1].sum()) - int(num_repeated.sum())
        num_foreign = num_distinct - (self.num_needed - self.num_wrong["COVER"])
        if num_foreign < 0:
            shared = "needed by two groups, whose blocks share memory"
            self.fail("DISJOINT", shared, -num_foreign)
        elif num_foreign:
            first = self.first_foreign(writes)
            self.fail("OWN", "written outside the request", num_foreign, str(first))

    def first_foreign(self, writes: ByteRanges) -> Location:
        """Return the first byte written that the destination does not need."""
        # Erase what is needed: only foreign bytes are left.
        for view, positions in self.needs():
            held = self.held(view, positions)
            for index, _ in held.chunks():
                held.cells[index] = 0
        locations = (self.first_written(*byte_range) for byte_range in writes.tolist())
        return next(location for location in locations if location is not None)

    def first_written(self, address: int, length: int, device: int) -> Location | None:
        """Return the first byte of a range that is not 0, if there is one."""
        offsets = np.flatnonzero(self.memory.read(self.worker, address, length, device))
        return locate(self.worker, address + int(offsets[0]), device) if offsets.size else None

    def tails(self) -> Iterator[Tail]:
        """Yield the slots of the request's blocks that no view needs, as intervals."""
        for group in self.worker.groups:
            # Positions of all views of the group.
            used = []
            for view, positions in self.needs():
                if view.group == group.name:
                    used.append(positions)
            blocks = self.tables[group.name]
            if not used or blocks is None:
                continue
            slots = listed_slots(group, blocks)
            unused = slots[~np.isin(slots, local_slots(group, np.concatenate(used)))]
            # The slots ascend; an interval ends where the next slot is not the neighbour.
            for span in np.split(unused, np.flatnonzero(np.diff(unused) > 1) + 1):
                if span.size:
                    yield Tail(self.worker.label, group.name, int(span[0]), int(span[-1]) + 1)

    def fail(
        self,
        code: str,
        text: str,
        num_bytes: int = 0,
        first: str = "",
        patterns: Sequence[Pattern] = (),
    ) -> None:
        """Add a failure, of so many bytes where these are counted."""
        failure = Failure(code, text, (self.worker.key,), num_bytes, first, tuple(patterns))
        self.failures.append(failure)


def _holding(ranges: ByteRanges, address: int, device_id: int) -> Ints:
    """Return the indices of the ranges that contain a byte."""
    start, length, device = ranges.T
    # Compared with the last byte: start + length may be 2**64, which wraps.
    is_holding = (start <= address) & (address <= start + (length - 1))
    return np.flatnonzero((device == device_id) & is_holding)


def _repeated_bytes(writes: ByteRanges) -> npt.NDArray[np.uint64]:
    """Return for each range, by device and address, how many of its bytes an earlier one has."""
    num_repeated = np.zeros(len(writes), np.uint64)
    for device in np.unique(writes[:, 2]):
        on_device = np.flatnonzero(writes[:, 2] == device)
        start = writes[on_device, 0]
        last = start + (writes[on_device, 1] - np.uint64(1))
        # The furthest last byte of all ranges before each: what a range has up to there was written
        # before.
        reach = np.maximum.accumulate(last)[:-1]
        # Ranges that begin before an earlier one has ended.
        is_over = start[1:] <= reach
        overlap = np.minimum(last[1:], reach) - start[1:] + np.uint64(1)
        num_repeated[on_device[1:][is_over]] = overlap[is_over]
    return num_repeated
