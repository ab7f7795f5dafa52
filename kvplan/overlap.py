"""Which views of one region share bytes, decided without walking over blocks.

A view's bytes are a set of *strides of intervals*: ``length`` bytes at ``start + k * step`` for ``k < count``,
one for each contiguous run of its block. Two of them can only meet where their spans overlap and where they
overlap modulo the greatest common divisor of their steps; the few pairs left are decided exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from kvplan.axes import MAX_SEGMENTS, Ints
from kvplan.errors import KVPlanError
from kvplan.views import View


@attrs.frozen
class _Stride:
    view: int
    start: int
    length: int
    step: int
    count: int


def overlaps(views: Sequence[View]) -> Iterator[tuple[View, View]]:
    """Each pair of views (of one region and one group) that share a byte, in order of address.

    >>> from kvplan import Axis, View
    >>> def view(name, offset):
    ...     return View(name, "attn", "kv", "uint8", (Axis("dim", 0, 8, 8, 1),), 4, 24, offset)
    >>> [(a.name, b.name) for a, b in overlaps([view("k", 0), view("v", 8), view("x", 44)])]
    [('k', 'x')]
    """
    if len(views) < 2:
        return
    strides = sorted((s for i, view in enumerate(views) for s in _strides(i, view)), key=lambda s: s.start)
    start = np.array([s.start for s in strides])
    length = np.array([s.length for s in strides])
    step = np.array([s.step for s in strides])
    ends = np.maximum.accumulate(np.array([s.start + (s.count - 1) * s.step + s.length for s in strides]))
    first_of_span = np.flatnonzero(np.r_[True, start[1:] >= ends[:-1]])
    for low, high in zip(first_of_span, [*first_of_span[1:], len(strides)], strict=True):
        for i, j in _meet(start[low:high], length[low:high], int(np.gcd.reduce(step[low:high]))):
            a, b = strides[low + i], strides[low + j]
            if a.view != b.view and _share(a, b):
                yield views[a.view], views[b.view]


def _strides(index: int, view: View) -> Iterator[_Stride]:
    length, offsets = view.itemsize, np.zeros(1, np.int64)
    for axis in sorted(view.axes, key=lambda axis: axis.stride_bytes):
        if axis.stride_bytes == length and offsets.size == 1:
            length *= axis.extent
        elif axis.extent > 1:
            if offsets.size * axis.extent > MAX_SEGMENTS:
                raise KVPlanError(
                    "RANGE",
                    f"place view {view.name!r}",
                    expected=f"at most {MAX_SEGMENTS} runs in a block",
                    got=f"{offsets.size * axis.extent}",
                    value=offsets.size * axis.extent,
                )
            offsets = np.add.outer(np.arange(axis.extent) * axis.stride_bytes, offsets).reshape(-1)
    step = view.block_stride_bytes if view.num_blocks > 1 else 0
    for offset in offsets.tolist():
        yield _Stride(index, view.offset_bytes + offset, length, step, view.num_blocks)


def _meet(start: Ints, length: Ints, modulus: int) -> Iterator[tuple[int, int]]:
    """Pairs of intervals that overlap modulo ``modulus`` (0: as they stand)."""
    residue = start % modulus if modulus else start
    order = np.argsort(residue, kind="stable")
    owner = np.r_[order, order] if modulus else order
    low = np.r_[residue[order], residue[order] + modulus] if modulus else residue[order]
    follower = np.searchsorted(low, low + length[owner])
    for i in np.flatnonzero(follower[: len(order)] > np.arange(len(order)) + 1).tolist():
        for j in owner[i + 1 : follower[i]].tolist():
            yield (min(owner[i], j), max(owner[i], j))


def _share(a: _Stride, b: _Stride) -> bool:
    """Whether two strides of intervals have a byte in common, exactly.

    Interval ``i`` of a meets interval ``j`` of b where ``-a.length < start_a(i) - start_b(j) < b.length``. With
    one step for both only ``i - j`` matters; otherwise try each interval of the shorter one.
    """
    if a.count > b.count:
        a, b = b, a
    same = a.step == b.step
    if not same and a.count > MAX_SEGMENTS:
        return True
    apart = a.start - b.start + a.step * np.arange(1 if same else a.count)
    step = max(b.step, 1)
    lowest = np.maximum((-a.length - apart) // step + 1, 1 - b.count)
    highest = np.minimum(-((apart - b.length) // step) - 1, a.count - 1 if same else 0)
    return bool(np.any(lowest <= highest))
