"""Finds views that share bytes, and one byte that they share, without visiting every block.

The bytes of a view are a set of *strided runs*, one for each contiguous byte range of a block:
``length`` bytes at ``start + k * step`` for ``k < count``. Two strided runs can share a byte only
if their spans overlap, and if they overlap modulo the greatest common divisor of their steps. Of
the few pairs that remain, those of one step are decided exactly, and others are refused: no engine
has views of different strides between each other's blocks. Descriptions also come from peers, so
the number of runs and of pairs is limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, heads
from kvplan.describe.axes import contiguous, offsets_along
from kvplan.describe.views import View
from kvplan.errors import KVPlanError

Unsigned = npt.NDArray[np.uint64]

MAX_STRIDED_RUNS: Final = 1 << 18
"""The most strided runs that the views of shared regions may have in all."""

MAX_PAIRS: Final = 1 << 13
"""The most pairs of strided runs that are decided one by one."""

NOT_APART: Final[Mapping[str, int]] = MappingProxyType({})


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
        starts_of_views = list[Unsigned]()
        lengths_of_views = list[int]()
        for view in views:
            length, axes = contiguous(view.axes, view.itemsize)
            first = np.uint64(view.offset_bytes + apart.get(view.region, 0))
            starts_of_views.append(first + offsets_along(axes).astype(np.uint64))
            lengths_of_views.append(length)
        starts = np.concatenate(starts_of_views)
        order = np.argsort(starts, kind="stable")
        view_indices = np.repeat(np.arange(len(views)), list(map(len, starts_of_views)))[order]
        # one element for each view, then the same for each run
        lengths = np.array(lengths_of_views, np.uint64)
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

        Their spans overlap, and so do they modulo the common step of a chain of such runs.
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
                if self.lasts[start + first] >= starts[second]:
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
    chain, in bytes. Raises ``OVERLAP`` for views of different strides between each other's blocks,
    and ``RANGE`` if the answer needs more than :data:`MAX_STRIDED_RUNS` strided runs or
    :data:`MAX_PAIRS` pairs.

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
            steps = {_step(views[first_view]), _step(views[second_view])} - {0}
            if len(steps) > 1:
                raise _unlike(views[first_view], views[second_view])
            both = runs.run(first, views), runs.run(second, views)
            overlap = _first_overlap(*both, max(steps, default=1))
            if overlap is not None:
                first_block, second_block, byte = overlap
                yield (
                    _shared(views[first_view], first_block, byte, apart),
                    _shared(views[second_view], second_block, byte, apart),
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
            num_runs += view.block_bytes // contiguous(view.axes, view.itemsize)[0]
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


def _unlike(first: View, second: View) -> KVPlanError:
    """Return the error for views whose blocks may meet, but are not equally far apart."""
    return KVPlanError(
        "OVERLAP",
        f"place view {second.name!r}",
        expected=f"the block stride of view {first.name!r}, whose blocks lie between its own, "
        f"{first.block_stride_bytes}",
        got=f"{second.block_stride_bytes}",
        first=first.name,
        second=second.name,
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


def _first_overlap(
    first: _StridedRun, second: _StridedRun, step: int
) -> tuple[int, int, int] | None:
    """Return the block of each of two strided runs, and a byte that both blocks have, or ``None``.

    Both advance by ``step``, or have one block.
    """
    # Block i of the first meets block j of the second for any i - j from ``low`` to ``high``.
    distance = second.start - first.start
    low = max((distance - first.length) // step + 1, 1 - second.count)
    high = min((distance + second.length - 1) // step, first.count - 1)
    if low > high:
        return None
    first_block, second_block = max(low, 0), max(-low, 0)
    byte = max(first.start + first_block * step, second.start + second_block * step)
    return first_block, second_block, byte
