"""Finds views that share bytes, and one byte that they share, without visiting every block.

The bytes of a view are a set of *strided runs*, one for each contiguous piece of a block: ``length`` bytes at
``start + k * step`` for ``k < count``. Two strided runs can share a byte only if their spans overlap, and if they
overlap modulo the greatest common divisor of their steps. The few pairs that remain are decided exactly, in closed
form. Descriptions also come from peers, so the number of runs and of pairs is limited.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints
from kvplan.describe.views import View
from kvplan.errors import KVPlanError

Unsigned = npt.NDArray[np.uint64]

MAX_RUNS: Final = 1 << 18
"""The most strided runs that the views of shared regions may have in all. Each takes about 100 bytes of memory."""

MAX_PAIRS: Final = 1 << 13
"""The most pairs of strided runs that are decided one by one. Each takes about 50 µs."""


Split = tuple[int, int, list[tuple[int, int]]]
"""The contiguous runs of a block: how many, bytes of each, and (stride, extent) of each axis that lists them."""

NOWHERE: Final[Mapping[str, int]] = MappingProxyType({})


@attrs.frozen
class _StridedRun:
    """``length`` bytes at ``start + k * step`` for each ``k < count``."""

    start: int
    length: int
    step: int
    count: int

    @classmethod
    def of(cls, view: View, start: int, length: int) -> _StridedRun:
        return cls(start, length, _step(view), view.num_blocks)


@attrs.frozen
class Shared:
    """A byte that a view shares with another view: its block, and its offset in the region."""

    view: View
    block: int
    byte: int


def overlaps(
    *pools: Sequence[View], apart: Mapping[str, int] = NOWHERE
) -> Iterator[tuple[Shared, Shared]]:
    """Every pair of views in a pool that share bytes, at least once, with one byte that they share.

    A pool is the views of one group in one region, or in a chain of regions that overlap; ``apart`` gives the
    distance of each region from the first one of its chain, in bytes. Raises ``RANGE`` if the answer needs more than
    :data:`MAX_RUNS` strided runs or :data:`MAX_PAIRS` pairs.

    >>> from kvplan import Axis, View
    >>> def view(name, offset):
    ...     return View(name, "attn", "kv", "uint8", (Axis("dim", 0, 8, 8, 1),), 4, 24, offset)
    >>> for pair in overlaps([view("k", 0), view("v", 8), view("x", 44)]):
    ...     print(where(*pair))
    byte 48 of region 'kv': block 0 of 'x' and block 2 of 'k'
    """
    number = pairs = 0
    shared = [views for views in pools if len(views) > 1]
    for view in (view for views in shared for view in views):
        number += _split(view)[0]
        if number > MAX_RUNS:
            raise _too_many(
                view, "runs in the blocks of views that share regions", MAX_RUNS, number
            )
    for views in shared:
        splits = [_split(view) for view in views]
        lengths = [length for _, length, _ in splits]
        start, owner = _starts(
            [view.offset_bytes + apart.get(view.region, 0) for view in views], splits
        )
        for i, j in _near(views, lengths, start, owner):
            pairs += 1
            a, b = int(owner[i]), int(owner[j])
            if pairs > MAX_PAIRS:
                raise _too_many(views[b], "pairs of runs to compare", MAX_PAIRS, pairs)
            runs = [
                _StridedRun.of(views[n], int(start[at]), lengths[n]) for n, at in ((a, i), (b, j))
            ]
            if a != b and (met := _meeting(*runs)):
                pair = zip((views[a], views[b]), met[:2], strict=True)
                one, other = (
                    Shared(view, block, met[2] - apart.get(view.region, 0)) for view, block in pair
                )
                yield one, other


def where(first: Shared, second: Shared) -> str:
    """The shared byte in words that tell the two views apart."""
    one, other = (f"block {each.block} of {each.view.name!r}" for each in (second, first))
    at = f"byte {second.byte} of region {second.view.region!r}"
    if first.view.region != second.view.region:
        return f"{at}, {one}, which is byte {first.byte} of region {first.view.region!r}, {other}"
    if first.view.name != second.view.name:
        return f"{at}: {one} and {other}"
    return f"{at}: {one} from offset {second.view.offset_bytes} and {other} from offset {first.view.offset_bytes}"


def _too_many(view: View, what: str, limit: int, number: int) -> KVPlanError:
    return KVPlanError(
        "RANGE",
        f"place view {view.name!r}",
        expected=f"at most {limit} {what}",
        got=f"{number}",
        value=number,
    )


def _step(view: View) -> int:
    return view.block_stride_bytes if view.num_blocks > 1 else 0


def _split(view: View) -> Split:
    """The contiguous runs of one block: axes by ascending stride, merged while they continue each other."""
    runs, length = 1, view.itemsize
    steps: list[tuple[int, int]] = []
    for axis in sorted(view.axes, key=lambda axis: axis.stride_bytes):
        if axis.stride_bytes == length and not steps:
            length *= axis.extent
        elif axis.extent > 1:
            runs *= axis.extent
            steps.append((axis.stride_bytes, axis.extent))
    return runs, length, steps


def _starts(offsets: Sequence[int], splits: Sequence[Split]) -> tuple[Unsigned, Ints]:
    """The start of each run in block 0, ascending, and the index of its view: two arrays of shape (runs,)."""
    parts = []
    for offset, (_, _, steps) in zip(offsets, splits, strict=True):
        part = np.array([offset], np.uint64)
        for stride, extent in steps:
            part = np.add.outer(
                np.arange(extent, dtype=np.uint64) * np.uint64(stride), part
            ).reshape(-1)
        parts.append(part)
    start = np.concatenate(parts)
    order = np.argsort(start, kind="stable")
    return start[order], np.repeat(np.arange(len(parts)), [part.size for part in parts])[order]


def _near(
    views: Sequence[View], lengths: Sequence[int], start: Unsigned, owner: Ints
) -> Iterator[tuple[int, int]]:
    """Pairs of runs that may share a byte: their spans form one chain, and they overlap modulo its common step."""
    # Arrays of shape (runs,), by ascending start. A chain ends where a start lies beyond every byte seen so far.
    length = np.array(lengths, np.uint64)[owner]
    reach = [
        (view.num_blocks - 1) * _step(view) + length - 1
        for view, length in zip(views, lengths, strict=True)
    ]
    step = np.array([_step(view) for view in views], np.uint64)[owner]
    last = np.maximum.accumulate(
        start + np.array(reach, np.uint64)[owner]
    )  # the last byte, not its end: 2**64 is no uint64
    first = np.flatnonzero(np.r_[True, start[1:] > last[:-1]])
    several = np.flatnonzero(np.diff(np.r_[first, start.size]) > 1)
    for low, high in zip(
        first[several].tolist(), np.r_[first, start.size][several + 1].tolist(), strict=True
    ):
        modulus = int(np.gcd.reduce(step[low:high]))
        for i, j in _meet(start[low:high], length[low:high], modulus):
            yield low + i, low + j


def _meet(start: Unsigned, length: Unsigned, modulus: int) -> Iterator[tuple[int, int]]:
    """Pairs of intervals that overlap modulo ``modulus``; 0 means without a modulus."""
    # Intervals by ascending residue, listed twice so that those that wrap past the modulus meet the first ones.
    # `follower[i]` is the index of the first interval that begins after interval i ends.
    residue = start % np.uint64(modulus) if modulus else start
    order = np.argsort(residue, kind="stable")
    owner = np.r_[order, order] if modulus else order
    low = np.r_[residue[order], residue[order] + np.uint64(modulus)] if modulus else residue[order]
    follower = np.searchsorted(low, residue[order] + (length[order] - np.uint64(1)), "right")
    for i in np.flatnonzero(follower > np.arange(len(order)) + 1):
        for j in owner[i + 1 : follower[i]]:
            yield int(min(owner[i], j)), int(max(owner[i], j))


def _meeting(a: _StridedRun, b: _StridedRun) -> tuple[int, int, int] | None:
    """The block of each run in which they first share a byte, and that byte; ``None`` if they share none.

    Let ``reach = a.start + i * a.step + a.length - 1 - b.start`` be the distance from the start of b to the last byte
    of block i of a. That block shares a byte with b if ``reach`` lies between the first and the last block of b, and
    is less than ``near`` modulo ``b.step``.
    """
    near = a.length + b.length - 1
    reach = a.start + a.length - 1 - b.start
    end = (b.count - 1) * b.step + near
    if a.step == 0:
        low, high = 0, int(0 <= reach < end)
    else:
        low, high = max(0, -(reach // a.step)), min(a.count, -((reach - end) // a.step))
    if low >= high or (
        b.step and not _hits(high - low, a.step, reach + low * a.step, b.step, near)
    ):
        return None
    first = reach + low * a.step
    i = low + (_first_hit(high - low, a.step, first, b.step, near) if b.step else 0)
    j = max(0, -((near - 1 - reach - i * a.step) // b.step)) if b.step else 0
    return i, j, max(a.start + i * a.step, b.start + j * b.step)


def _first_hit(count: int, step: int, start: int, modulus: int, near: int) -> int:
    """The first ``i`` that :func:`_hits` counts. There must be one.

    >>> _first_hit(5, 3, 2, 7, 2)  # remainders 2 5 1 4 0
    2
    """
    return bisect.bisect_left(
        range(1, count), 1, key=lambda i: _hits(i, step, start, modulus, near)
    )


def _hits(count: int, step: int, start: int, modulus: int, near: int) -> int:
    """The number of ``i < count`` for which ``(start + i * step) % modulus < near``.

    >>> _hits(5, 3, 2, 7, 2)  # remainders 2 5 1 4 0
    2
    """
    if near >= modulus:
        return count
    above = modulus + start
    return _floors(count, modulus, step, above) - _floors(count, modulus, step, above - near)


def _floors(count: int, modulus: int, step: int, start: int) -> int:
    """The sum of ``(start + i * step) // modulus`` over ``i < count``, in as many steps as Euclid's algorithm.

    All arguments are non-negative. The sum counts lattice points under a line. A line that rises by less than 1 in
    each step is seen from its other axis instead, which makes the modulus smaller.
    """
    total = 0
    while True:
        total += count * (count - 1) // 2 * (step // modulus) + count * (start // modulus)
        step, start = step % modulus, start % modulus
        top = step * count + start
        if top < modulus:
            return total
        count, start = divmod(top, modulus)
        modulus, step = step, modulus
