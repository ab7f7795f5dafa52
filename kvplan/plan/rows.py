"""Tables (T): the strided rows that both sides register once, and the formula of the ids in them.

- plan.T1: A row is (address, length, device, stride, count): ``count`` descriptors of ``length``
  bytes, ``stride`` apart. Ids number the descriptors of a table, row after row.
- plan.T2: Runs of one length share a row if one step, at least as long as they are, divides the
  differences of their offsets and the block stride: four 16-token kernel blocks of a dense 64-token
  block, or the tokens of all heads of a page. If there is no such step, or most ids of the row
  would be unused, each offset gets a row with one descriptor for each block. A row ends at a gap
  between two layers of a region that is longer than a block.
- plan.T3: Therefore every id is ``base + step * block id + slot term``, where ``base`` belongs to a
  run and the slot term to the slot at which it begins. Both sides list the same runs and positions
  in the same order, so their ids pair up.
- plan.T4: A row counts the blocks of its own pool. Pools may differ by group, by worker and by
  side.

Rows hold offsets in regions first and addresses at the end, so plans of equal geometry differ in
that last step only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import attrs
import numpy as np

from kvplan._arrays import Arrays, Ints, distinct, heads, integers_in, numbered, order_of_rows
from kvplan._checks import ID_END
from kvplan.describe.views import Group
from kvplan.errors import KVPlanError
from kvplan.plan.align import blocks_and_slots
from kvplan.plan.runs import GroupRuns, Runs, TokenRuns
from kvplan.plan.series import GroupPair, PeriodBlocks, RunSeries, TokenSeries

NUMBERED_END: Final = 1 << 62
"""The rows of one side have fewer descriptors than this, so that no sum of ids wraps."""

MAX_IDS_PER_USED: Final = 16
"""A row with more ids than this for each usable one is split by offset, so that 31 bits last for
large pools."""

BOTH_SIDES: Final = (0, 1)
"""The destination and the source, as indices."""


class RowJob(NamedTuple):
    """Runs to assign to rows, with all offsets at which they begin in block 0.

    ``columns`` (5, n) has kind, region, block stride, number of blocks and length of each run,
    ``offsets`` is (n, m). Runs of different kinds share no row.
    """

    columns: Ints
    offsets: Ints

    @classmethod
    def of(cls, kind: int, runs: Runs, side: int, offsets: Ints) -> RowJob:
        """Return the job of one side of runs."""
        stride = runs.block_stride[side]
        kinds = np.full_like(stride, kind)
        columns = [kinds, runs.region[side], stride, runs.num_blocks[side], runs.length]
        return cls(np.stack(columns), offsets)


class RowIds(NamedTuple):
    """Ids of the offsets of a job, (n, m): in block 0, and their step from block to block."""

    first: Ints
    step: Ints


@attrs.frozen(eq=False)
class RowCandidates(Arrays):
    """Runs that may share a row, being equal in all but their offsets, (n,).

    ``block_step`` is the distance of two blocks in bytes, 0 where there is one block. ``step``
    divides it and all differences of offsets.
    """

    region: Ints
    num_blocks: Ints
    length: Ints
    block_step: Ints
    step: Ints

    @property
    def pool_bytes(self) -> Ints:
        """The distance from the first to the last block."""
        return (self.num_blocks - 1) * self.block_step


def assign_rows(jobs: Sequence[RowJob]) -> tuple[Ints, list[RowIds]]:
    """Assign runs to rows, by rule plan.T2.

    Returns the rows, (r, 5): region, offset, length, stride, count; and the ids of each job.

    >>> blocks = RowJob(np.array([[0], [0], [16384], [100], [4096]]), np.array([[0, 4096, 8192]]))
    >>> rows, (ids,) = assign_rows([blocks])
    >>> rows.tolist(), ids.first.tolist(), ids.step.tolist()
    ([[0, 0, 4096, 4096, 399]], [[0, 1, 2]], [[4, 4, 4]])
    """
    # Runs with equal columns are one candidate.
    columns = np.concatenate([job.columns for job in jobs], axis=1)
    run_order = np.lexsort(columns[::-1])
    ordered = columns[:, run_order]
    first = heads((ordered[:, 1:] == ordered[:, :-1]).all(0))
    candidate_of_run = np.empty(run_order.size, np.int64)
    candidate_of_run[run_order] = numbered(first, run_order.size)
    _, region, block_stride, num_blocks, length = ordered[:, first]

    # One element for each offset of every run, by candidate, ascending.
    num_offsets = np.concatenate([np.full(*job.offsets.shape) for job in jobs])
    candidate = np.repeat(candidate_of_run, num_offsets)
    offset = np.concatenate([job.offsets.reshape(-1) for job in jobs])
    order = np.lexsort((offset, candidate))
    candidate = candidate[order]
    offset = offset[order]
    same_candidate = candidate[1:] == candidate[:-1]
    same_offset = offset[1:] == offset[:-1]

    # The step of a candidate is the common divisor of its offsets' differences and block stride.
    first = heads(same_candidate)
    block_step = np.where(num_blocks > 1, block_stride, 0)
    distance = offset - offset[first][candidate]
    step = np.gcd(np.gcd.reduceat(distance, first), block_step)
    step = np.where(step == 0, length, step)
    candidates = RowCandidates(region, num_blocks, length, block_step, step)

    # A candidate is split where more ids than a block has would be between the last block at one
    # offset and the first at the next.
    unused_bytes = np.diff(offset) - candidates.pool_bytes[candidate[1:]]
    max_unused = np.maximum(block_step // step, MAX_IDS_PER_USED)
    goes_on = unused_bytes // step[candidate[1:]] <= max_unused[candidate[1:]]
    goes_on &= same_candidate
    first = heads(goes_on)
    candidates = candidates.take(candidate[first])
    candidate = numbered(first, order.size)

    # A candidate is one row if its ids are distinct bytes, of which not too many are unused.
    # `num_used` counts the distinct offsets, which are the ids in use for each block.
    num_used = np.bincount(candidate[heads(goes_on & same_offset)])
    span = np.maximum.reduceat(offset, first) - offset[first]
    num_ids = (candidates.pool_bytes + span) // candidates.step + 1
    is_one_row = candidates.step >= candidates.length
    is_one_row &= num_ids <= num_used * candidates.num_blocks * MAX_IDS_PER_USED
    apart = np.maximum(candidates.block_step, candidates.length)
    step = np.where(is_one_row, candidates.step, apart)
    ids_per_block = np.where(is_one_row, candidates.block_step // step, 1)

    # A row begins with each candidate, and with each new offset of a candidate that is not one row.
    first = heads(goes_on & (is_one_row[candidate[1:]] | same_offset))
    row = numbered(first, order.size)
    row_candidate = candidate[first]
    element = (offset - offset[first][row]) // step[candidate]
    last_element = np.maximum.reduceat(element, first)
    shape = candidates.take(row_candidate)
    count = (shape.num_blocks - 1) * ids_per_block[row_candidate] + last_element + 1
    rows = [shape.region, offset[first], shape.length, step[row_candidate], count]

    # Back in the order of the jobs.
    first_ids = np.empty(order.size, np.int64)
    first_ids[order] = (np.cumsum(count) - count)[row] + element
    id_steps = np.empty(order.size, np.int64)
    id_steps[order] = ids_per_block[candidate]
    ids_of_jobs = []
    start = 0
    for job in jobs:
        stop = start + job.offsets.size
        shape_of_job = job.offsets.shape
        first_of_job = first_ids[start:stop].reshape(shape_of_job)
        ids_of_jobs.append(RowIds(first_of_job, id_steps[start:stop].reshape(shape_of_job)))
        start = stop
    return np.stack(rows, axis=1), ids_of_jobs


BothIds = tuple[RowIds, RowIds]


def assign_ids(group_runs: Sequence[GroupRuns]) -> tuple[tuple[GroupPair, ...], tuple[Ints, Ints]]:
    """Return all ids of a pair of workers, and the rows of each side, (n, 5).

    The columns of rows are region, offset, length, stride and count.
    """
    rows = []
    ids = []
    for side in BOTH_SIDES:
        side_rows, side_ids = assign_rows(list(_row_jobs(group_runs, side)))
        rows.append(side_rows)
        ids.append(side_ids)
    dtype = _dtype_of_ids(rows)
    # Jobs are first the longer runs of each pair of groups, then the runs of one token of each.
    ids_of_jobs: list[BothIds] = list(zip(*ids, strict=True))
    ids_of_runs = ids_of_jobs[: len(group_runs)]
    ids_of_tokens = iter(ids_of_jobs[len(group_runs) :])
    pairs = []
    for groups, run_ids in zip(group_runs, ids_of_runs, strict=True):
        token_series: list[TokenSeries] = []
        for tokens in groups.tokens:
            token_series += _token_series(tokens, next(ids_of_tokens), dtype)
        pairs.append(_group_pair(groups, _run_series(groups, run_ids, dtype), token_series))
    return tuple(pairs), (rows[0], rows[1])


def _group_pair(
    groups: GroupRuns, runs: Iterable[RunSeries], tokens: Iterable[TokenSeries]
) -> GroupPair:
    smallest_pools = [token_runs.runs.num_blocks.min(axis=1) for token_runs in groups.tokens]
    at_destination, at_source = np.min(smallest_pools, axis=0).tolist()
    spans = tuple((start, stop) for start, stop in groups.spans.tolist())
    num_blocks = (at_destination, at_source)
    return GroupPair(groups.groups, num_blocks, groups.period, spans, tuple(runs), tuple(tokens))


def _row_jobs(group_runs: Iterable[GroupRuns], side: int) -> Iterator[RowJob]:
    """Yield one side's longer runs by pair of groups, then its runs of one token in every slot."""
    for groups in group_runs:
        yield RowJob.of(0, groups.runs, side, groups.runs.offset[side][:, None])
    for groups in group_runs:
        slot = np.arange(groups.groups[side].num_slots)
        for tokens in groups.tokens:
            slot_offsets = tokens.token_axes[side].at(slot)
            offsets = np.add.outer(tokens.runs.offset[side], slot_offsets)
            yield RowJob.of(1, tokens.runs, side, offsets)


def _dtype_of_ids(rows: Iterable[Ints]) -> type:
    """Return int32 if the ids of all rows of each side fit, else int64. Raises ``INT``."""
    # exact enough: sums of int64 may wrap
    most = max(float(side_rows[:, 4].sum(dtype=float)) for side_rows in rows)
    if most >= NUMBERED_END:
        raise KVPlanError(
            "INT",
            "number the descriptors of a pair of workers",
            expected=f"fewer than {NUMBERED_END} in all rows",
            got=f"about {most:.3g}",
            hint="a smaller pool, or fewer tensors per plan, has fewer ids",
        )
    return np.int32 if most <= ID_END else np.int64


def _period_blocks(
    group: Group, ordinal: Ints, num_positions: int, slot_terms: Ints
) -> PeriodBlocks:
    """Return the blocks of one side in a period of ``num_positions``."""
    num_blocks = num_positions // (group.context.size * group.num_slots)
    steps = np.diff(ordinal, append=ordinal[0] + num_blocks)
    step = int(steps[0]) if (steps == steps[0]).all() else 0
    return PeriodBlocks(ordinal, num_blocks, step, slot_terms if slot_terms.any() else None)


def _run_series(groups: GroupRuns, ids: BothIds, dtype: type) -> Iterator[RunSeries]:
    """Yield the series of longer runs.

    Positions whose runs have equal steps and equal differences of ids form one series: their ids
    differ by one slot term for each side, however long the runs are.
    """
    # (2, n): the id of each run in block 0, and its step from block to block, on each side.
    base = np.stack([side.first[:, 0] for side in ids])
    step = np.stack([side.step[:, 0] for side in ids])
    for steps in sorted(set(zip(*step.tolist(), strict=True))):
        # Runs by position, then by local id. `first` has the index of each position's first run.
        runs = np.flatnonzero((step[0] == steps[0]) & (step[1] == steps[1]))
        runs = runs[np.lexsort((base[0, runs], groups.position[runs]))]
        position = groups.position[runs]
        first = heads(position[1:] == position[:-1])
        for num_runs, alike in _positions_alike(base[:, runs], first):
            begin = first[alike]
            starts = position[begin]
            slot_terms = base[:, runs[begin]] - base[:, runs[begin[:1]]]
            series_base = base[:, runs[begin[0] : begin[0] + num_runs], None]
            blocks = []
            ordinals, _ = blocks_and_slots(groups.groups, starts)
            for side in BOTH_SIDES:
                group = groups.groups[side]
                side_terms = slot_terms[side].astype(dtype)
                blocks.append(_period_blocks(group, ordinals[side], groups.period, side_terms))
            yield RunSeries(
                base=series_base.astype(dtype, order="C"),
                step=steps,
                starts=starts,
                period=groups.period,
                blocks=(blocks[0], blocks[1]),
            )


def _positions_alike(base: Ints, first: Ints) -> list[tuple[int, list[int]]]:
    """Return positions whose runs' ids differ equally.

    Each entry is the number of runs at a position, and the positions as indices in ``first``.
    ``base`` (2, n) has the ids of runs by position; ``first`` where each position begins.
    """
    num_runs = np.diff(first, append=base.shape[1])
    alike: dict[tuple[int, bytes], list[int]] = {}
    for size in distinct(num_runs).tolist():
        positions = np.flatnonzero(num_runs == size)
        # (positions, 2, size): how far each run's id is from that of the position's first run.
        ids = base[:, np.add.outer(first[positions], np.arange(size))]
        distances = np.ascontiguousarray(np.moveaxis(ids - ids[..., :1], 1, 0))
        for position, distance in zip(positions.tolist(), distances, strict=True):
            alike.setdefault((size, distance.tobytes()), []).append(position)
    return [(size, positions) for (size, _), positions in alike.items()]


def _token_series(tokens: TokenRuns, ids: BothIds, dtype: type) -> Iterator[TokenSeries]:
    """Yield the series of runs that move token by token; ids are (runs, slots) on each side.

    Runs with the same steps, and to which all slots add the same, form one series.
    """
    starts = integers_in(tokens.intervals)
    base = np.stack([side.first[:, 0] for side in ids])
    slot_terms = [side.first - side.first[:, :1] for side in ids]
    steps = [side.step[:, :1] for side in ids]
    # One row for each run: its steps, and what each slot adds, on both sides. Equal rows become
    # neighbours, and so one series.
    rows = np.concatenate([*steps, *slot_terms], axis=1)
    order = order_of_rows(rows)
    first = heads((rows[order[1:]] == rows[order[:-1]]).all(1))
    series_of_run = np.empty(order.size, np.int64)
    series_of_run[order] = numbered(first, order.size)
    for number in range(first.size):
        runs = np.flatnonzero(series_of_run == number)
        destination_step, source_step = rows[runs[0], :2].tolist()
        destination_terms, source_terms = (side[runs[0]].astype(dtype) for side in slot_terms)
        yield TokenSeries(
            base=base[:, runs, None].astype(dtype, order="C"),
            step=(destination_step, source_step),
            starts=starts,
            period=tokens.cycle,
            slot_terms=(destination_terms, source_terms),
            only_at_cuts=tokens.only_at_cuts,
        )
