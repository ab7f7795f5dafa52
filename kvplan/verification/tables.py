"""Tables and series of a plan, checked for the form that bind and NIXL rely on.

This is rule verify.K1 of certificates. No plan is followed before it has this form, so that a
wrong plan ends in a ``PROOF`` error and in nothing else.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from kvplan._checks import ID_END
from kvplan.describe.views import Group, Region
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.verification.labels import interleave_of, slots_of

if TYPE_CHECKING:
    from kvplan._arrays import Ints
    from kvplan.plan.series import GroupPair
    from kvplan.plan.tables import Table
    from kvplan.plan.transfer import TransferPlan

BYTES_END: Final = 1 << 62
"""The regions of a worker have fewer bytes in all, so that sums of a few offsets fit 64 bits."""


@attrs.frozen(eq=False)
class WorkerTable:
    """A worker and the rows of its table, arrays of one length.

    ``start`` counts through the worker's regions, one behind another.
    """

    worker: Worker
    region: Ints
    first: Ints
    start: Ints
    length: Ints
    stride: Ints
    count: Ints

    @classmethod
    def of(cls, worker: Worker, table: Table) -> WorkerTable:
        """Return the rows of a table.

        Raises ``PROOF`` unless they number elements inside the worker's regions.
        """
        regions = table.regions if len(table.rows) else ()
        if regions and regions != worker.regions:
            expected = f"the regions of {worker.label}"
            raise refusal(_name_of_table(worker), expected, ", ".join(map(str, regions)))
        _check_ids(worker, table)
        offset = _offsets_in_regions(worker, table, regions)
        # Addresses as offsets through all regions, so that 64 bits with a sign suffice.
        start = region_starts(worker)[table.region] + offset
        length, stride, count = table.rows[:, [1, 3, 4]].T.astype(np.int64)
        return cls(worker, table.region, table.first, start, length, stride, count)


def _name_of_table(worker: Worker) -> str:
    return f"the table of {worker.label}"


def _check_ids(worker: Worker, table: Table) -> None:
    """Raise ``PROOF`` unless each row begins with the id after those of the rows before it."""
    rows = table.rows
    is_indexed = _is_ints(table.region, len(rows)) and _is_ints(table.first, len(rows))
    if not is_indexed or rows.dtype != np.uint64 or rows.shape[1:] != (5,):
        expected = "rows of 5 numbers, each with a region and a first id"
        raise refusal(_name_of_table(worker), expected, f"shape {rows.shape}")
    # Python's integers are exact, however large.
    ids = list(itertools.accumulate(rows[:, 4].tolist(), initial=0))
    first_ids = table.first.tolist()
    if first_ids != ids[:-1]:
        row = next(i for i in range(len(rows)) if first_ids[i] != ids[i])
        expected = f"row {row} to begin with id {ids[row]}"
        details: dict[str, Any] = {"row": row, "first": (ids[row], first_ids[row])}
        raise refusal(_name_of_table(worker), expected, f"{first_ids[row]}", **details)


def _offsets_in_regions(worker: Worker, table: Table, regions: Sequence[Region]) -> Ints:
    """Return the offset of each row in its region. Raises ``PROOF`` if one leaves its region."""
    address, length, device, stride, count = table.rows.T
    base = np.zeros(len(table.rows), np.uint64)
    wrong = (table.region < 0) | (table.region >= len(regions))
    if not wrong.any():
        # The region of each row: its address, its size and its device.
        fields = [(region.address, region.size_bytes, region.device_id) for region in regions]
        columns = np.array(fields, np.uint64).reshape(-1, 3).T
        base, size, region_device = columns[:, table.region]
        room = size - np.minimum(address - base, size)
        wrong = (address < base) | (device != region_device) | (length > room) | (length == 0)
        # The last element fits if count - 1 strides fit behind the first: divided, since a product
        # could wrap.
        num_strides = (room - np.minimum(length, room)) // np.maximum(stride, np.uint64(1))
        wrong |= count - np.uint64(1) > num_strides
    if wrong.any():
        row = int(wrong.argmax())
        got = f"{table.rows[row].tolist()} in row {row}"
        raise refusal(_name_of_table(worker), "every row to lie in its region", got, row=row)
    return np.asarray((address - base).astype(np.int64))


@attrs.frozen(eq=False)
class PairTables:
    """The tables of a destination, first, and of one source, with the ids of their groups."""

    sides: tuple[WorkerTable, WorkerTable]
    group_pairs: tuple[GroupPair, ...]

    def __str__(self) -> str:
        return f"the plan for {self.sides[0].worker.label} from {self.sides[1].worker.label}"


def pairs_of(plan: TransferPlan) -> Iterator[PairTables]:
    """Yield the checked pairs of a plan: one for each remote worker, in order, under its name."""
    plan_name = f"the plan for {plan.local.label}"
    if plan.operation not in ("READ", "WRITE"):
        raise refusal(plan_name, "operation READ or WRITE", plan.operation)
    remotes = [worker.key for worker in plan.remotes]
    named = [pair.remote for pair in plan.pairs]
    if named != remotes or len({plan.local.key, *remotes}) <= len(remotes):
        raise refusal(plan_name, f"one pair with each of {remotes}", f"{named}")
    for worker, pair in zip(plan.remotes, plan.pairs, strict=True):
        local = WorkerTable.of(plan.local, pair.local_table)
        remote = WorkerTable.of(worker, pair.remote_table)
        sides = (local, remote) if plan.operation == "READ" else (remote, local)
        tables = PairTables(sides, pair.group_pairs)
        for ids in pair.group_pairs:
            _check_form(tables, ids)
        yield tables


def _check_form(pair: PairTables, ids: Any) -> None:
    """Raise ``PROOF`` for a field of a GroupPair without the form that bind relies on.

    Each check assumes those before it.
    """
    _check_groups(pair, ids)
    _check_spans(pair, ids)
    if not _are_counts(ids.num_blocks, 1):
        raise _malformed(pair, "num_blocks", ids.num_blocks)
    # A pair of groups that moves nothing would make bind ask for its block tables.
    if not ids.tokens:
        raise _malformed(pair, "tokens", ids.tokens)
    for runs in ids.runs:
        _check_series(pair, ids, runs, runs.starts)
    for tokens in ids.tokens:
        _check_series(pair, ids, tokens, tokens.starts)
    for runs in ids.runs:
        _check_blocks(pair, runs)
    for tokens in ids.tokens:
        terms = tokens.slot_terms
        if len(terms) != 2 or not all(map(_is_ints, terms, map(slots_of, ids.groups))):
            raise _malformed(pair, "slot_terms", terms)


def _check_groups(pair: PairTables, ids: Any) -> None:
    """Raise ``PROOF`` unless the groups are of the two workers, with a period common to both."""
    sides = zip(pair.sides, ids.groups, strict=False)
    is_known = all(group in table.worker.groups for table, group in sides)
    if len(ids.groups) != 2 or not is_known:
        raise _malformed(pair, "groups", ids.groups)
    if not all(table.first.size for table in pair.sides):
        raise _malformed(pair, "rows", 0)
    if not _is_count(ids.period, 1) or any(ids.period % period_of(group) for group in ids.groups):
        raise _malformed(pair, "period", ids.period)


def _check_spans(pair: PairTables, ids: Any) -> None:
    """Raise ``PROOF`` unless the spans are intervals that ascend within the period."""
    for span in ids.spans:
        if type(span) is not tuple or not _are_counts(span, 0) or span[0] >= span[1]:
            raise _malformed(pair, "spans", ids.spans)
    # All bounds in order: spans may touch, but not overlap.
    bounds = [0, *itertools.chain(*ids.spans), ids.period]
    if bounds != sorted(bounds):
        raise _malformed(pair, "spans", ids.spans)


def _check_series(pair: PairTables, ids: Any, series: Any, starts: Any) -> None:
    """Raise ``PROOF`` unless a series repeats within the period, with ascending ``starts``."""
    if not _is_count(series.period, 1) or ids.period % series.period:
        raise _malformed(pair, "period", series.period)
    if not starts.size or not _is_ints(starts, starts.size):
        raise _malformed(pair, "starts", starts)
    if (np.diff([-1, *starts.tolist(), series.period]) < 1).any():
        raise _malformed(pair, "starts", starts)
    if not series.base.size or not _is_ints(series.base, 2, series.base.size // 2, 1):
        raise _malformed(pair, "base", series.base)
    if not _are_counts(series.step, 0, ID_END):
        raise _malformed(pair, "step", series.step)


def _check_blocks(pair: PairTables, runs: Any) -> None:
    """Raise ``PROOF`` unless a series of runs lists the blocks of its starts on both sides."""
    if len(runs.blocks) != 2:
        raise _malformed(pair, "blocks", runs.blocks)
    num_starts = runs.starts.size
    for blocks in runs.blocks:
        # A series of one start has no slot terms: bind would take them for those of one occurrence.
        has_terms = num_starts > 1 and _is_ints(blocks.slot_terms, num_starts)
        are_terms = blocks.slot_terms is None or has_terms
        is_ordinal = _is_ints(blocks.ordinal, num_starts)
        if not are_terms or not is_ordinal or not _is_count(blocks.num_blocks, 1):
            raise _malformed(pair, "blocks", blocks)


def _malformed(pair: PairTables, field: str, got: object) -> KVPlanError:
    expected = f"{field} in the form that bind relies on"
    return refusal(pair, expected, reprlib.repr(got), field=field)


def _is_count(value: object, low: int, end: int = BYTES_END) -> bool:
    return type(value) is int and low <= value < end


def _are_counts(values: tuple[object, ...], low: int, end: int = BYTES_END) -> bool:
    return len(values) == 2 and all(_is_count(value, low, end) for value in values)


def _is_ints(value: object, *shape: int) -> bool:
    """Return whether a value is an array of integers of this shape.

    They are small enough that sums of a few fit 64 bits.
    """
    if not isinstance(value, np.ndarray) or value.dtype not in (np.int32, np.int64):
        return False
    if value.shape != shape:
        return False
    return not value.size or bool(-BYTES_END < value.min() <= value.max() < BYTES_END)


def period_of(group: Group) -> int:
    """Return the number of positions after which the blocks and slots of a group repeat."""
    return group.context.size * math.lcm(slots_of(group), interleave_of(group))


def region_starts(worker: Worker) -> Ints:
    """Return where each region starts if all are one behind another."""
    total = sum(region.size_bytes for region in worker.regions)
    if total >= BYTES_END:
        regions = f"the regions of {worker.label}"
        expected = f"fewer than {BYTES_END} bytes in all"
        raise refusal(regions, expected, f"{total}", "RANGE", size_bytes=total)
    return np.cumsum([0, *(region.size_bytes for region in worker.regions)])


def refusal(
    subject: object,
    expected: str,
    got: str,
    code: str = "PROOF",
    **details: Any,
) -> KVPlanError:
    """Return the error that refuses a certificate."""
    return KVPlanError(code, f"certify {subject}", expected=expected, got=got, **details)
