"""Tables and series of a plan, checked for the form that bind and NIXL rely on: rule K1 of certificates.

No plan is followed before it has this form, so that a wrong plan ends in a ``PROOF`` error and in nothing else.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import ID_END
from kvplan.describe.views import Group
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError

if TYPE_CHECKING:
    from kvplan.plan.rows import GroupPair, Table
    from kvplan.plan.transfer import TransferPlan

BYTES_END: Final = 1 << 62
"""The regions of a worker have fewer bytes than this in all, so that sums of a few offsets fit 64 bits."""


@attrs.frozen(eq=False)
class WorkerTable:
    """A worker and the rows of its table, arrays of one length. ``start`` counts through the worker's regions."""

    worker: Worker
    region: Ints
    first: Ints
    start: Ints
    length: Ints
    stride: Ints
    count: Ints

    @classmethod
    def of(cls, worker: Worker, table: Table) -> WorkerTable:
        """The rows of a table. Raises ``PROOF`` unless they number elements inside the worker's regions."""
        what, rows, regions = f"the table of {worker.label}", table.rows, table.regions if len(table.rows) else ()
        if regions and regions != worker.regions:
            raise refusal(what, f"the regions of {worker.label}", ", ".join(map(str, regions)))
        arrays = all(_is_ints(each, len(rows)) for each in (table.region, table.first))
        if not arrays or rows.dtype != np.uint64 or rows.shape[1:] != (5,):
            raise refusal(what, "rows of 5 numbers, each with a region and a first id", f"shape {rows.shape}")
        ids = list(itertools.accumulate(rows[:, 4].tolist(), initial=0))  # exact, however large
        if (first := table.first.tolist()) != ids[:-1]:
            row = next(i for i in range(len(rows)) if first[i] != ids[i])
            got = f"{first[row]}"
            raise refusal(what, f"row {row} to begin with id {ids[row]}", got, row=row, first=(ids[row], first[row]))
        address, length, device, stride, count = rows.T
        wrong = (table.region < 0) | (table.region >= len(regions))
        if not wrong.any():
            fields = [(region.address, region.size_bytes, region.device_id) for region in regions]
            base, size, on = np.array(fields, np.uint64).reshape(-1, 3).T[:, table.region]
            room = size - np.minimum(address - base, size)
            wrong = (address < base) | (device != on) | (length > room) | (length == 0)
            # The last element fits if count - 1 strides fit behind the first: divided, since a product could wrap.
            wrong |= count - np.uint64(1) > (room - np.minimum(length, room)) // np.maximum(stride, np.uint64(1))
        if wrong.any():
            row = int(wrong.argmax())
            raise refusal(what, "every row to lie in its region", f"{rows[row].tolist()} in row {row}", row=row)
        start = region_starts(worker)[table.region] + (address - base).astype(np.int64)
        return cls(worker, table.region, table.first, start, *rows[:, [1, 3, 4]].T.astype(np.int64))


@attrs.frozen(eq=False)
class PairTables:
    """The tables of a destination, first, and of one source, with the pairs of groups that say which ids there are."""

    sides: tuple[WorkerTable, WorkerTable]
    group_pairs: tuple[GroupPair, ...]

    def __str__(self) -> str:
        return f"the plan for {self.sides[0].worker.label} from {self.sides[1].worker.label}"


def pairs_of(plan: TransferPlan) -> Iterator[PairTables]:
    """The checked pairs of a plan: one for each remote worker, in order and under its name."""
    what, reads = f"the plan for {plan.local.label}", plan.operation == "READ"
    if not reads and plan.operation != "WRITE":
        raise refusal(what, "operation READ or WRITE", plan.operation)
    remotes, named = [worker.key for worker in plan.remotes], [pair.remote for pair in plan.pairs]
    if named != remotes or len({plan.local.key, *remotes}) <= len(remotes):
        raise refusal(what, f"one pair with each of {remotes}", f"{named}")
    for remote, pair in zip(plan.remotes, plan.pairs, strict=True):
        sides = WorkerTable.of(plan.local, pair.local_table), WorkerTable.of(remote, pair.remote_table)
        found = PairTables(sides if reads else sides[::-1], pair.group_pairs)
        for groups in pair.group_pairs:
            _check_form(found, groups)
        yield found


def _check_form(pair: PairTables, groups: Any) -> None:
    """Raise ``PROOF`` for a field without the form that bind relies on. Each check assumes those before it."""
    both, (ours, theirs) = groups.groups, (side.worker.groups for side in pair.sides)
    if len(both) != 2 or both[0] not in ours or both[1] not in theirs:
        raise _malformed(pair, "groups", both)
    if not all(side.first.size for side in pair.sides):
        raise _malformed(pair, "rows", 0)
    if not _is_count(groups.period, 1) or any(groups.period % period_of(group) for group in both):
        raise _malformed(pair, "period", groups.period)
    if not all(type(cut) is tuple and _are_counts(cut, 0) and cut[0] < cut[1] for cut in groups.cuts):
        raise _malformed(pair, "cuts", groups.cuts)
    bounds = [0, *itertools.chain(*groups.cuts), groups.period]
    if bounds != sorted(bounds):
        raise _malformed(pair, "cuts", groups.cuts)
    if not _are_counts(groups.num_blocks, 1):
        raise _malformed(pair, "num_blocks", groups.num_blocks)
    for one in (*groups.runs, *groups.tokens):
        starts = one.carried if hasattr(one, "carried") else one.starts
        if not _is_count(one.every, 1) or groups.period % one.every:
            raise _malformed(pair, "every", one.every)
        if not starts.size or not _is_ints(starts, starts.size):
            raise _malformed(pair, "starts", starts)
        if (np.diff([-1, *starts.tolist(), one.every]) < 1).any():
            raise _malformed(pair, "starts", starts)
        if not one.base.size or not _is_ints(one.base, 2, one.base.size // 2, 1):
            raise _malformed(pair, "base", one.base)
        if not _are_counts(one.step, 0, ID_END):
            raise _malformed(pair, "step", one.step)
    for runs in groups.runs:
        if len(runs.blocks) != 2:
            raise _malformed(pair, "blocks", runs.blocks)
        for listed in runs.blocks:
            # A series of one start has no sub: bind would take it for that of one occurrence.
            size = runs.starts.size
            sub = listed.sub is None or (size > 1 and _is_ints(listed.sub, size))
            if not sub or not _is_ints(listed.ordinal, size) or not _is_count(listed.num_blocks, 1):
                raise _malformed(pair, "blocks", listed)
    for one in groups.tokens:
        if len(one.sub) != 2 or not all(map(_is_ints, one.sub, map(slots_of, both))):
            raise _malformed(pair, "sub", one.sub)


def _malformed(pair: PairTables, field: str, got: object) -> KVPlanError:
    return refusal(pair, f"{field} in the form that bind relies on", reprlib.repr(got), field=field)


def _is_count(value: object, low: int, end: int = BYTES_END) -> bool:
    return type(value) is int and low <= value < end


def _are_counts(values: tuple[object, ...], low: int, end: int = BYTES_END) -> bool:
    """Whether there are two counts."""
    return len(values) == 2 and all(_is_count(value, low, end) for value in values)


def _is_ints(value: object, *shape: int) -> bool:
    """Whether a value is an array of integers of this shape, small enough that sums of a few fit 64 bits."""
    if not isinstance(value, np.ndarray) or value.dtype not in (np.int32, np.int64) or value.shape != shape:
        return False
    return not value.size or bool(-BYTES_END < value.min() <= value.max() < BYTES_END)


def slots_of(group: Group) -> int:
    """Slots in a block; a state is one."""
    return group.tokens_per_block or 1


def period_of(group: Group) -> int:
    """The positions after which the blocks and slots of a group repeat."""
    return group.context.size * math.lcm(slots_of(group), group.context.interleave_tokens)


def region_starts(worker: Worker) -> Ints:
    """Where each region starts if all are placed one behind another."""
    total = sum(region.size_bytes for region in worker.regions)
    if total >= BYTES_END:
        what, expected = f"the regions of {worker.label}", f"fewer than {BYTES_END} bytes in all"
        raise refusal(what, expected, f"{total}", "RANGE", size_bytes=total)
    return np.cumsum([0, *(region.size_bytes for region in worker.regions)])


def refusal(what: object, expected: str, got: str, code: str = "PROOF", **details: Any) -> KVPlanError:
    """The error that refuses a certificate."""
    return KVPlanError(code, f"certify {what}", expected=expected, got=got, **details)
