"""Finds views that share bytes, and one byte that they share, without visiting every block.

The bytes of a view are a set of *strided runs*, one for each contiguous piece of a block:
``length`` bytes at ``start + k * step`` for ``k < count``. Two strided runs can share a byte only
if their spans overlap, and if they overlap modulo the greatest common divisor of their steps. The
few pairs that remain are decided exactly, in closed form. Descriptions also come from peers, so the
number of runs and of pairs is limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, heads
from kvplan.describe.views import View
from kvplan.errors import KVPlanError

Unsigned = npt.NDArray[np.uint64]

MAX_STRIDED_RUNS: Final = 1 << 18
"""The most strided runs that the views of shared regions may have in all."""

MAX_PAIRS: Final = 1 << 13
"""The most pairs of strided runs that are decided one by one."""

NOT_APART: Final[Mapping[str, int]] = MappingProxyType({})


@attrs.frozen
class _ViewRuns:
    """The contiguous runs of a view in one block.

    ``steps`` has the stride and extent of each axis along which the runs lie.
    """

    length: int
    number: int
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, view: View) -> _ViewRuns:
        """Return the runs of a view: axes are merged while they continue each other."""
        length = view.itemsize
        number = 1
        steps = list[tuple[int, int]]()
        for axis in sorted(view.axes, key=lambda axis: axis.stride_bytes):
            if axis.stride_bytes == length and not steps:
                length *= axis.extent
            elif axis.extent > 1:
                number *= axis.extent
                steps.append((axis.stride_bytes, axis.extent))
        return cls(length, number, tuple(steps))

    def starts(self, offset: int) -> Unsigned:
        """Return the start of each run, (number,), of which the first one is at ``offset``."""
        starts = np.array([offset], np.uint64)
        for stride, extent in self.steps:
            distances = np.arange(extent, dtype=np.uint64) * np.uint64(stride)
            starts = np.add.outer(distances, starts).reshape(-1)
        return starts


@attrs.frozen
class _StridedRun:
    """``length`` bytes at ``start + k * step`` for each ``k < count``."""

    start: int
    length: int
    step: int
    count: int


@attrs.frozen(eq=False)
class _PoolRuns:
    """The strided runs of a pool, by ascending start: arrays of shape (runs,).

    ``view_indices`` has the index of a run's view in the pool. ``lasts`` has the last byte of a
    run, not its end, since 2**64 is no uint64.
    """

    view_indices: Ints
    starts: Unsigned
    lengths: Unsigned
    steps: Unsigned
    lasts: Unsigned

    @classmethod
    def of(cls, views: Sequence[View], apart: Mapping[str, int]) -> _PoolRuns:
        """Return the runs of the views of a pool."""
        runs_of = list(map(_ViewRuns.of, views))
        starts = np.concatenate(
            [
                runs.starts(view.offset_bytes + apart.get(view.region, 0))
                for view, runs in zip(views, runs_of, strict=True)
            ]
        )
        order = np.argsort(starts, kind="stable")
        view_indices = np.repeat(np.arange(len(views)), [runs.number for runs in runs_of])[order]
        # one element for each view, then the same for each run
        lengths = np.array([runs.length for runs in runs_of], np.uint64)
        reaches = np.array([(view.num_blocks - 1) * _step(view) for view in views], np.uint64)
        steps = np.array(list(map(_step, views)), np.uint64)
        lasts = starts[order] + (reaches + lengths - np.uint64(1))[view_indices]
        return cls(view_indices, starts[order], lengths[view_indices], steps[view_indices], lasts)

    def run(self, index: int, views: Sequence[View]) -> _StridedRun:
        """Return a run of the pool of ``views``."""
        return _StridedRun(
            int(self.starts[index]),
            int(self.lengths[index]),
            int(self.steps[index]),
            views[self.view_indices[index]].num_blocks,
        )

    def near_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs of runs that may share a byte.

        Their spans form one chain, and they overlap modulo the chain's common step.
        """
        # a chain ends where a run starts behind the last byte of all runs before it
        furthest = np.maximum.accumulate(self.lasts)
        chain_starts = heads(self.starts[1:] <= furthest[:-1])
        chain_stops = np.append(chain_starts[1:], self.starts.size)
        has_pairs = chain_stops - chain_starts > 1
        chains = np.stack([chain_starts, chain_stops], axis=1)[has_pairs]
        for start, stop in chains.tolist():
            modulus = int(np.gcd.reduce(self.steps[start:stop]))
            starts = self.starts[start:stop]
            for first, second in _overlapping(starts, self.lengths[start:stop], modulus):
                yield start + first, start + second


@attrs.frozen
class Shared:
    """A byte that a view shares with another view: its block, and its offset in the region."""

    view: View
    block: int
    byte: int


def overlaps(
    *pools: Sequence[View], apart: Mapping[str, int] = NOT_APART
) -> Iterator[tuple[Shared, Shared]]:
    """Yield all pairs of views in a pool that share bytes, with a byte that they share.

    A pair may come more than once. A pool is the views of one group in one region, or in a chain of
    regions that overlap; ``apart`` gives the distance of each region from the first one of its
    chain, in bytes. Raises ``RANGE`` if the answer needs more than :data:`MAX_STRIDED_RUNS` strided
    runs or :data:`MAX_PAIRS` pairs.

    >>> from kvplan import Axis, View
    >>> def view(name, offset):
    ...     return View(name, "attn", "kv", "uint8", (Axis("dim", 0, 8, 8, 1),), 4, 24, offset)
    >>> for pair in overlaps([view("k", 0), view("v", 8), view("x", 44)]):
    ...     print(describe_overlap(*pair))
    byte 48 of region 'kv': block 0 of 'x' and block 2 of 'k'
    """
    pools_of_several = [views for views in pools if len(views) > 1]
    _check_number_of_runs(pools_of_several)
    num_pairs = 0
    for views in pools_of_several:
        runs = _PoolRuns.of(views, apart)
        for first, second in runs.near_pairs():
            num_pairs += 1
            first_view = int(runs.view_indices[first])
            second_view = int(runs.view_indices[second])
            if num_pairs > MAX_PAIRS:
                unit = "pairs of runs to compare"
                raise _too_many(views[second_view], unit, MAX_PAIRS, num_pairs)
            if first_view == second_view:
                continue
            overlap = _first_overlap(runs.run(first, views), runs.run(second, views))
            if overlap is not None:
                yield (
                    _shared(views[first_view], overlap.first_block, overlap.byte, apart),
                    _shared(views[second_view], overlap.second_block, overlap.byte, apart),
                )


def groups_sharing(views: Sequence[View], apart: Mapping[str, int]) -> set[tuple[str, str]]:
    """Return the pairs of groups with views that share bytes of block 0, names in order.

    The views are of one pool but for their groups. Raises ``RANGE`` for too many strided runs.
    """
    _check_number_of_runs([views])
    runs = _PoolRuns.of(views, apart)
    names = sorted({view.group for view in views})
    group_of_view = np.array([names.index(view.group) for view in views])
    has_begun = np.zeros(len(names), bool)
    furthest = np.zeros(len(names), np.uint64)
    shares = np.zeros((len(names), len(names)), bool)
    # By ascending start, a run shares its first byte with each group that reaches as far.
    lasts = runs.starts + (runs.lengths - np.uint64(1))
    for group, start, last in zip(
        group_of_view[runs.view_indices], runs.starts, lasts, strict=True
    ):
        shares[group] |= has_begun & (furthest >= start)
        has_begun[group] = True
        furthest[group] = max(furthest[group], last)
    pairs = np.argwhere(np.triu(shares | shares.T, 1)).tolist()
    return {(names[first], names[second]) for first, second in pairs}


def _check_number_of_runs(pools: Sequence[Sequence[View]]) -> None:
    """Check that the views of all pools have few runs in all, before any of them is listed."""
    num_runs = 0
    for views in pools:
        for view in views:
            num_runs += _ViewRuns.of(view).number
            if num_runs > MAX_STRIDED_RUNS:
                unit = "runs in the blocks of views that share regions"
                raise _too_many(view, unit, MAX_STRIDED_RUNS, num_runs)


def _shared(view: View, block: int, byte: int, apart: Mapping[str, int]) -> Shared:
    return Shared(view, block, byte - apart.get(view.region, 0))


def describe_overlap(first: Shared, second: Shared) -> str:
    """Return the shared byte in words that tell the two views apart."""
    first_block = f"block {first.block} of {first.view.name!r}"
    second_block = f"block {second.block} of {second.view.name!r}"
    byte = f"byte {second.byte} of region {second.view.region!r}"
    if first.view.region != second.view.region:
        first_byte = f"byte {first.byte} of region {first.view.region!r}"
        return f"{byte}, {second_block}, which is {first_byte}, {first_block}"
    if first.view.name == second.view.name:
        first_block += f" from offset {first.view.offset_bytes}"
        second_block += f" from offset {second.view.offset_bytes}"
    return f"{byte}: {second_block} and {first_block}"


def _too_many(view: View, unit: str, limit: int, number: int) -> KVPlanError:
    return KVPlanError(
        "RANGE",
        f"place view {view.name!r}",
        expected=f"at most {limit} {unit}",
        got=f"{number}",
        value=number,
    )


def _step(view: View) -> int:
    """Return the bytes from block to block, 0 if there is one block only."""
    return view.block_stride_bytes if view.num_blocks > 1 else 0


def _overlapping(starts: Unsigned, lengths: Unsigned, modulus: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of intervals that overlap modulo ``modulus``; 0 means without a modulus."""
    # blocks of both runs repeat at the modulus, so only the rest by it says whether they can meet
    residues = starts % np.uint64(modulus) if modulus else starts
    # one element for each interval, by ascending residue
    indices = np.argsort(residues, kind="stable")
    lows = residues[indices]
    lasts = lows + (lengths[indices] - np.uint64(1))
    if modulus:
        # a second time behind all, so that intervals that wrap past the modulus meet the first ones
        indices = np.append(indices, indices)
        lows = np.append(lows, lows + np.uint64(modulus))
    # the first interval that begins after an interval ends
    followers = np.searchsorted(lows, lasts, "right")
    for nth in np.flatnonzero(followers > np.arange(lasts.size) + 1):
        index = indices[nth]
        for next_index in indices[nth + 1 : followers[nth]]:
            yield int(min(index, next_index)), int(max(index, next_index))


@attrs.frozen
class _Overlap:
    """A block of each of two strided runs, and a byte that both blocks have."""

    first_block: int
    second_block: int
    byte: int


def _first_overlap(first: _StridedRun, second: _StridedRun) -> _Overlap | None:
    """Return the first overlap of two strided runs; ``None`` if they share no byte.

    The *reach* of block i of the first run is the distance from the start of the second run to the
    block's last byte: ``first.start + i * first.step + first.length - 1 - second.start``. The block
    shares a byte with block j of the second run if ``0 <= reach - j * second.step < span``, where
    ``span`` is the most bytes that two blocks span which share a byte.
    """
    # all in Python's integers: products of strides and counts may exceed 64 bits
    span = first.length + second.length - 1
    reach = first.start + first.length - 1 - second.start
    end = (second.count - 1) * second.step + span
    # the blocks [low, high) of the first run whose reach lies within the whole second run
    if first.step == 0:
        low = 0
        high = int(0 <= reach < end)
    else:
        low = max(0, -(reach // first.step))
        high = min(first.count, -((reach - end) // first.step))
    if low >= high:
        return None
    first_block = low
    second_block = 0
    if second.step:
        # the first of them whose reach is in a block of the second run, not between two blocks
        distance = -(reach + low * first.step) % second.step
        skipped: int | None = 0
        if distance + span <= second.step:
            skipped = _first_multiple(first.step, second.step, distance, distance + span - 1)
        if skipped is None or skipped >= high - low:
            return None
        first_block += skipped
        reach += first_block * first.step
        second_block = max(0, -((span - 1 - reach) // second.step))
    byte = max(first.start + first_block * first.step, second.start + second_block * second.step)
    return _Overlap(first_block, second_block, byte)


def _first_multiple(step: int, modulus: int, low: int, high: int) -> int | None:
    """Return the least ``i`` for which ``low <= i * step % modulus <= high``, if there is one.

    >>> _first_multiple(3, 7, 4, 5)  # remainders 0 3 6 2 5
    4
    """
    step %= modulus
    if low == 0:
        return 0
    if step == 0:
        return None
    number = -(-low // step)
    if number * step <= high:
        return number
    # Between two multiples of the step, only multiples that wrap j times can lie: the least such j
    # is the same question modulo the step, as in Euclid's algorithm.
    wraps = _first_multiple(modulus, step, -high % step, -low % step)
    return None if wraps is None else -(-(low + wraps * modulus) // step)
