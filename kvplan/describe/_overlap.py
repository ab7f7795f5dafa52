"""Which views of one region share bytes, and where, decided without walking over blocks.

A view's bytes are a set of *runs*: ``length`` bytes at ``start + k * step`` for ``k < count``, one for each
contiguous piece of its block. Two runs can only meet where their spans overlap and where they overlap modulo the
greatest common divisor of their steps; the few pairs left are decided one by one, exactly.
Descriptions come from peers too, so there is a limit to how many runs and pairs a worker may need.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.describe.views import View
from kvplan.errors import KVPlanError

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

MAX_RUNS: Final = 1 << 18
"""How many runs the views that share regions may have, in all: they take 100 bytes of memory each."""

MAX_PAIRS: Final = 1 << 13
"""How many pairs of runs may come so near each other that they have to be compared: they take 50 µs of time each."""


Split = tuple[int, int, list[tuple[int, int]]]
"""How many runs a block has, of how many bytes each, and (stride, extent) of each axis that they step along."""

NOWHERE: Final[Mapping[str, int]] = MappingProxyType({})


@attrs.frozen
class _Run:
    """``length`` bytes at ``start + k * step`` for each ``k < count``."""

    start: int
    length: int
    step: int
    count: int

    @classmethod
    def of(cls, view: View, start: int, length: int) -> _Run:
        return cls(start, length, _step(view), view.num_blocks)


@attrs.frozen
class Shared:
    """A byte of a view that it shares with another one: the block that has it, and which byte of its region it is."""

    view: View
    block: int
    byte: int


def overlaps(*pools: Sequence[View], apart: Mapping[str, int] = NOWHERE) -> Iterator[tuple[Shared, Shared]]:
    """The pairs of views of one pool that share a byte, by address: each at least once, with a byte that they share.

    A pool is the views of one group in one region, or in regions that overlap: ``apart`` says how many bytes after
    the first of them each region starts. Raises ``RANGE`` where telling would take more than
    :data:`MAX_RUNS` runs or :data:`MAX_PAIRS` pairs.

    >>> from kvplan import Axis, View
    >>> def view(name, offset):
    ...     return View(name, "attn", "kv", "uint8", (Axis("dim", 0, 8, 8, 1),), 4, 24, offset)
    >>> for pair in overlaps([view("k", 0), view("v", 8), view("x", 44)]):
    ...     print(told(*pair))
    byte 48 of region 'kv': block 0 of 'x' and block 2 of 'k'
    """
    number = pairs = 0
    shared = [views for views in pools if len(views) > 1]
    for view in (view for views in shared for view in views):
        number += _split(view)[0]
        if number > MAX_RUNS:
            raise _too_many(view, "runs in the blocks of views that share regions", MAX_RUNS, number)
    for views in shared:
        splits = [_split(view) for view in views]
        lengths = [length for _, length, _ in splits]
        start, owner = _starts([view.offset_bytes + apart.get(view.region, 0) for view in views], splits)
        for i, j in _near(views, lengths, start, owner):
            pairs += 1
            a, b = int(owner[i]), int(owner[j])
            if pairs > MAX_PAIRS:
                raise _too_many(views[b], "pairs of runs to compare", MAX_PAIRS, pairs)
            runs = [_Run.of(views[n], int(start[at]), lengths[n]) for n, at in ((a, i), (b, j))]
            if a != b and (met := _meeting(*runs)):
                pair = zip((views[a], views[b]), met[:2], strict=True)
                one, other = (Shared(view, block, met[2] - apart.get(view.region, 0)) for view, block in pair)
                yield one, other


def told(first: Shared, second: Shared) -> str:
    """Where two views meet, in words: never the same ones for both."""
    one, other = (f"block {each.block} of {each.view.name!r}" for each in (second, first))
    at = f"byte {second.byte} of region {second.view.region!r}"
    if first.view.region != second.view.region:
        return f"{at}, {one}, which is byte {first.byte} of region {first.view.region!r}, {other}"
    if first.view.name != second.view.name:
        return f"{at}: {one} and {other}"
    return f"{at}: {one} from offset {second.view.offset_bytes} and {other} from offset {first.view.offset_bytes}"


def _too_many(view: View, what: str, limit: int, number: int) -> KVPlanError:
    return KVPlanError(
        "RANGE", f"place view {view.name!r}", expected=f"at most {limit} {what}", got=f"{number}", value=number
    )


def _step(view: View) -> int:
    return view.block_stride_bytes if view.num_blocks > 1 else 0


def _split(view: View) -> Split:
    """The runs of a view's block."""
    runs, length = 1, view.itemsize
    steps: list[tuple[int, int]] = []
    for axis in sorted(view.axes, key=lambda axis: axis.stride_bytes):
        if axis.stride_bytes == length and not steps:
            length *= axis.extent
        elif axis.extent > 1:
            runs *= axis.extent
            steps.append((axis.stride_bytes, axis.extent))
    return runs, length, steps


def _starts(offsets: Sequence[int], splits: Sequence[Split]) -> tuple[Words, Ints]:
    """Where each run starts, ascending, and the index of its view."""
    parts = []
    for offset, (_, _, steps) in zip(offsets, splits, strict=True):
        part = np.array([offset], np.uint64)
        for stride, extent in steps:
            part = np.add.outer(np.arange(extent, dtype=np.uint64) * np.uint64(stride), part).reshape(-1)
        parts.append(part)
    start = np.concatenate(parts)
    order = np.argsort(start, kind="stable")
    return start[order], np.repeat(np.arange(len(parts)), [part.size for part in parts])[order]


def _near(views: Sequence[View], lengths: Sequence[int], start: Words, owner: Ints) -> Iterator[tuple[int, int]]:
    """Pairs of runs whose spans are joined by overlaps, and that overlap modulo the steps of all that are."""
    length = np.array(lengths, np.uint64)[owner]
    reach = [(view.num_blocks - 1) * _step(view) + length - 1 for view, length in zip(views, lengths, strict=True)]
    step = np.array([_step(view) for view in views], np.uint64)[owner]
    last = np.maximum.accumulate(start + np.array(reach, np.uint64)[owner])  # the last byte, since 2**64 is no uint64
    first = np.flatnonzero(np.r_[True, start[1:] > last[:-1]])
    several = np.flatnonzero(np.diff(np.r_[first, start.size]) > 1)
    for low, high in zip(first[several].tolist(), np.r_[first, start.size][several + 1].tolist(), strict=True):
        modulus = int(np.gcd.reduce(step[low:high]))
        for i, j in _meet(start[low:high], length[low:high], modulus):
            yield low + i, low + j


def _meet(start: Words, length: Words, modulus: int) -> Iterator[tuple[int, int]]:
    """Pairs of intervals that overlap modulo ``modulus`` (0: as they stand)."""
    residue = start % np.uint64(modulus) if modulus else start
    order = np.argsort(residue, kind="stable")
    owner = np.r_[order, order] if modulus else order
    low = np.r_[residue[order], residue[order] + np.uint64(modulus)] if modulus else residue[order]
    follower = np.searchsorted(low, residue[order] + (length[order] - np.uint64(1)), "right")
    for i in np.flatnonzero(follower > np.arange(len(order)) + 1):
        for j in owner[i + 1 : follower[i]]:
            yield int(min(owner[i], j)), int(max(owner[i], j))


def _meeting(a: _Run, b: _Run) -> tuple[int, int, int] | None:
    """The first interval of each of two runs that have a byte in common, and that byte; none where they are apart.

    Interval ``i`` of a meets some interval of b where ``reach = a.start + i * a.step + a.length - 1 - b.start``, how
    far its last byte lies behind the start of b, is neither before b's first interval nor past its last, and is
    less than ``near`` modulo ``b.step``.
    """
    near = a.length + b.length - 1
    reach = a.start + a.length - 1 - b.start
    end = (b.count - 1) * b.step + near
    if a.step == 0:
        low, high = 0, int(0 <= reach < end)
    else:
        low, high = max(0, -(reach // a.step)), min(a.count, -((reach - end) // a.step))
    if low >= high or (b.step and not _hits(high - low, a.step, reach + low * a.step, b.step, near)):
        return None
    first = reach + low * a.step
    i = low + (_first_hit(high - low, a.step, first, b.step, near) if b.step else 0)
    j = max(0, -((near - 1 - reach - i * a.step) // b.step)) if b.step else 0
    return i, j, max(a.start + i * a.step, b.start + j * b.step)


def _first_hit(count: int, step: int, start: int, modulus: int, near: int) -> int:
    """The first ``i`` that :func:`_hits` counts; there must be one.

    >>> _first_hit(5, 3, 2, 7, 2)  # remainders 2 5 1 4 0
    2
    """
    return bisect.bisect_left(range(1, count), 1, key=lambda i: _hits(i, step, start, modulus, near))


def _hits(count: int, step: int, start: int, modulus: int, near: int) -> int:
    """For how many ``i < count`` the remainder of ``start + i * step`` by ``modulus`` is less than ``near``.

    >>> _hits(5, 3, 2, 7, 2)  # remainders 2 5 1 4 0
    2
    """
    if near >= modulus:
        return count
    above = modulus + start
    return _floors(count, modulus, step, above) - _floors(count, modulus, step, above - near)


def _floors(count: int, modulus: int, step: int, start: int) -> int:
    """The sum of ``(start + i * step) // modulus`` over ``i < count``, none negative, as fast as Euclid's algorithm.

    The sum counts the lattice points under a line; where the line rises by less than 1 a step, it is the same line
    looked at from its other axis, with a smaller modulus.
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
