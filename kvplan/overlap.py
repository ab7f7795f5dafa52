"""Which views of one region share bytes, decided without walking over blocks.

A view's bytes are a set of *strides of intervals*: ``length`` bytes at ``start + k * step`` for ``k < count``,
one for each contiguous run of its block. Two of them can only meet where their spans overlap and where they
overlap modulo the greatest common divisor of their steps; the few pairs left are decided one by one.
Descriptions come from peers too, so there is a limit to how many runs and pairs are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import numpy as np

from kvplan.axes import MAX_SEGMENTS, Ints
from kvplan.errors import KVPlanError
from kvplan.views import View

MAX_PAIRS: Final = 1 << 18
"""How many pairs of runs may come so near each other that they have to be compared block by block."""

MAX_UNLIKE_BLOCKS: Final = 1 << 12
"""Two runs that step unevenly, in pools that both have more blocks than this, are taken to meet if they can."""


@attrs.frozen
class _Stride:
    view: int
    start: int
    length: int
    step: int
    count: int


def overlaps(views: Sequence[View]) -> Iterator[tuple[View, View]]:
    """The pairs of views (of one region and one group) that share a byte: each at least once, by address.

    Raises ``RANGE`` where telling would take more than :data:`MAX_SEGMENTS` runs or :data:`MAX_PAIRS` pairs.

    >>> from kvplan import Axis, View
    >>> def view(name, offset):
    ...     return View(name, "attn", "kv", "uint8", (Axis("dim", 0, 8, 8, 1),), 4, 24, offset)
    >>> [(a.name, b.name) for a, b in overlaps([view("k", 0), view("v", 8), view("x", 44)])]
    [('k', 'x')]
    """
    if len(views) < 2:
        return
    strides: list[_Stride] = []
    for i, view in enumerate(views):
        strides += _strides(i, view, len(strides))
    strides.sort(key=lambda s: s.start)
    start = np.array([s.start for s in strides])
    length = np.array([s.length for s in strides])
    step = np.array([s.step for s in strides])
    ends = np.maximum.accumulate(np.array([s.start + (s.count - 1) * s.step + s.length for s in strides]))
    first_of_span = np.flatnonzero(np.r_[True, start[1:] >= ends[:-1]])
    compared = 0
    for low, high in zip(first_of_span, [*first_of_span[1:], len(strides)], strict=True):
        for i, j in _meet(start[low:high], length[low:high], int(np.gcd.reduce(step[low:high]))):
            a, b = strides[low + i], strides[low + j]
            compared += 1
            if compared > MAX_PAIRS:
                raise _too_many(views[b.view], "pairs of runs to compare", MAX_PAIRS, compared)
            if a.view != b.view and _share(a, b):
                yield views[a.view], views[b.view]


def _too_many(view: View, what: str, limit: int, number: int) -> KVPlanError:
    return KVPlanError(
        "RANGE",
        f"place view {view.name!r}",
        expected=f"at most {limit} {what} in region {view.region!r}",
        got=f"{number}",
        value=number,
    )


def _strides(index: int, view: View, before: int) -> Iterator[_Stride]:
    length, offsets = view.itemsize, np.zeros(1, np.int64)
    for axis in sorted(view.axes, key=lambda axis: axis.stride_bytes):
        if axis.stride_bytes == length and offsets.size == 1:
            length *= axis.extent
        elif axis.extent > 1:
            number = before + offsets.size * axis.extent
            if number > MAX_SEGMENTS:
                raise _too_many(view, "runs in a block", MAX_SEGMENTS, number)
            offsets = np.add.outer(np.arange(axis.extent) * axis.stride_bytes, offsets).reshape(-1)
    step = view.block_stride_bytes if view.num_blocks > 1 else 0
    for offset in offsets.tolist():
        yield _Stride(index, view.offset_bytes + offset, length, step, view.num_blocks)


def _meet(start: Ints, length: Ints, modulus: int) -> Iterator[tuple[int, int]]:
    """Pairs of intervals that overlap modulo ``modulus`` (0: as they stand)."""
    residue = (start % modulus if modulus else start).astype(np.uint64)  # twice a residue is more than int64 holds
    order = np.argsort(residue, kind="stable")
    owner = np.r_[order, order] if modulus else order
    low = np.r_[residue[order], residue[order] + np.uint64(modulus)] if modulus else residue[order]
    follower = np.searchsorted(low, residue[order] + length[order].astype(np.uint64))
    for i in np.flatnonzero(follower > np.arange(len(order)) + 1).tolist():
        for j in owner[i + 1 : follower[i]].tolist():
            yield (min(owner[i], j), max(owner[i], j))


def _share(a: _Stride, b: _Stride) -> bool:
    """Whether two strides of intervals have a byte in common: exactly, up to :data:`MAX_UNLIKE_BLOCKS`.

    Interval ``i`` of a meets interval ``j`` of b where ``-a.length < start_a(i) - start_b(j) < b.length``. With
    one step for both only ``i - j`` matters; otherwise try each interval of the shorter one.
    """
    if a.count > b.count:
        a, b = b, a
    same = a.step == b.step
    if not same and a.count > MAX_UNLIKE_BLOCKS:
        return True
    apart = a.start - b.start + a.step * np.arange(1 if same else a.count)
    step = max(b.step, 1)
    lowest = np.maximum((-a.length - apart) // step + 1, 1 - b.count)
    highest = np.minimum(-((apart - b.length) // step) - 1, a.count - 1 if same else 0)
    return bool(np.any(lowest <= highest))
