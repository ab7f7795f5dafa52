"""Axes: one dimension of a view, and the byte offset of every coordinate along it.

An axis names the range ``[start, stop)`` of a global size that a worker holds, and the bytes
between neighbouring coordinates. A name may appear twice in a view, outer digit first: ``token`` as
33 kernel blocks of 16 slots is ``Axis("token", 0, 33, 33, outer)`` and
``Axis("token", 0, 16, 16, inner)``, together 528 slots.

:func:`segments` turns the digits of one name into the form that the planner uses: intervals of the
global coordinate on which the byte offset grows by a constant stride.

>>> kernel = (Axis("token", 0, 3, 3, 8192), Axis("token", 0, 16, 16, 256))
>>> print(segments(kernel))
[0, 16) at 0 stride 256, [16, 32) at 8192 stride 256, [32, 48) at 16384 stride 256
>>> dense = (Axis("token", 0, 3, 3, 4096), Axis("token", 0, 16, 16, 256))
>>> print(segments(dense))
[0, 48) at 0 stride 256
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from kvplan._arrays import Ints, heads
from kvplan._checks import at_most, check_fields, integer, name
from kvplan._text import brief_repr
from kvplan.errors import KVPlanError

MAX_SEGMENTS: Final = 1 << 20
"""The most segments that the axes of a worker's views may have in all.

The limit keeps a small offer from claiming much memory.
"""


@attrs.frozen
class Axis:
    """One dimension of a view: the range ``[start, stop)`` of ``size``.

    Neighbours are ``stride_bytes`` apart. All are integers in ``[0, 2**63)`` with
    ``start < stop <= size``. An axis that holds a single coordinate has no meaningful stride; it is
    stored as 0.

    >>> print(Axis("head", 4, 8, 8, 4096))
    head [4, 8) of 8 stride 4096
    """

    name: str
    start: int
    stop: int
    size: int
    stride_bytes: int

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "an axis", name, "name")
        check_fields(self, "an axis", integer, "start", "stop", "size", "stride_bytes")
        if not self.start < self.stop <= self.size:
            raise KVPlanError(
                "RANGE",
                f"describe axis {self.name!r}",
                expected="0 <= start < stop <= size",
                got=f"[{self.start}, {self.stop}) of {self.size}",
                start=self.start,
                stop=self.stop,
                size=self.size,
            )
        if self.extent == 1:
            object.__setattr__(self, "stride_bytes", 0)

    @property
    def extent(self) -> int:
        """Coordinates held: ``stop - start``."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.name} [{self.start}, {self.stop}) of {self.size} stride {self.stride_bytes}"


@attrs.frozen(eq=False)
class Segments:
    """Intervals of one coordinate: four int64 arrays of shape (n,), ascending by ``start``.

    ``offset`` is the byte offset of an interval's first coordinate, ``stride`` the bytes between
    its coordinates.
    """

    start: Ints
    length: Ints
    offset: Ints
    stride: Ints

    @cached_property
    def stop(self) -> Ints:
        """The end of each interval, (n,)."""
        return self.start + self.length

    @cached_property
    def covered(self) -> tuple[tuple[int, int], ...]:
        """The intervals as pairs of integers; intervals that touch are joined."""
        joined: list[tuple[int, int]] = []
        for start, stop in zip(self.start.tolist(), self.stop.tolist(), strict=True):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return tuple(joined)

    def seen(self, start: int, stop: int) -> tuple[int, tuple[int, ...]]:
        """Return the byte offset of coordinate ``start``, and the layout of ``[start, stop)``.

        The layout is relative to that offset: for each segment, first coordinate, length, offset
        and stride. Two ranges with equal layouts differ only in where they begin.

        >>> head = segments((Axis("head", 4, 8, 8, 4096),))
        >>> head.seen(5, 7), head.seen(6, 8), head.seen(4, 5)
        ((4096, (0, 2, 0, 4096)), (8192, (0, 2, 0, 4096)), (0, (0, 1, 0, 0)))
        """
        # segments that end before the range or begin behind it say nothing of it
        overlapping = slice(self.stop.searchsorted(start, "right"), self.start.searchsorted(stop))
        fields = (self.start, self.stop, self.offset, self.stride)
        columns = [field[overlapping].tolist() for field in fields]
        origin = 0
        layout: list[int] = []
        for low, high, offset, stride in zip(*columns, strict=True):
            # what of the segment lies in the range
            first = max(low, start)
            length = min(high, stop) - first
            first_offset = offset + (first - low) * stride
            if not layout:
                origin = first_offset
            # a single coordinate has no stride, so equal layouts have 0 there
            layout += first - start, length, first_offset - origin, stride if length > 1 else 0
        return origin, tuple(layout)

    def steps(self, start: int, stop: int, step: int) -> bool:
        """Return whether neighbours in ``[start, stop)`` are ``step`` bytes apart.

        A single coordinate always qualifies.
        """
        if stop - start == 1:
            return True
        # the segment that `start` lies in; neighbours in another one may be anywhere
        segment = int(np.searchsorted(self.start, start, "right")) - 1
        return bool(stop <= self.stop[segment] and self.stride[segment] == step)

    def at(self, coordinate: Ints) -> Ints:
        """Return the byte offset of each coordinate, all of which must lie in an interval."""
        # one element for each coordinate: the last segment that begins at or before it
        segment = np.searchsorted(self.start, coordinate, "right") - 1
        distance = coordinate - self.start[segment]
        offset: Ints = self.offset[segment] + distance * self.stride[segment]
        return offset

    def __str__(self) -> str:
        rows = zip(self.start, self.stop, self.offset, self.stride, strict=True)
        return ", ".join(f"[{a}, {b}) at {offset} stride {stride}" for a, b, offset, stride in rows)


def segments(digits: Sequence[Axis]) -> Segments:
    """Return the fewest segments for the digits of one name, outer digit first.

    Raises ``RANGE`` where there would be more than :data:`MAX_SEGMENTS`.
    """
    if len(digits) == 1:
        (digit,) = digits
        fields = [[digit.start], [digit.extent], [0], [digit.stride_bytes]]
        return Segments(*np.array(fields, np.int64))
    # one element for each segment of the digits so far, from the inner digit outwards; all segments
    # have the same `length` and `stride`, and `width` is the size of these digits
    starts = np.zeros(1, np.int64)
    offsets = np.zeros(1, np.int64)
    length = 1
    stride = 0
    width = 1
    for digit in reversed(digits):
        is_whole = starts.size == 1 and length == width
        goes_on = width == 1 or digit.stride_bytes == length * stride
        if digit.extent > 1 and is_whole and goes_on:
            # the only segment continues through this digit without a gap
            starts = starts + digit.start * width
            if width == 1:
                stride = digit.stride_bytes
            length *= digit.extent
        else:
            # the segments repeat for every coordinate of this digit
            number = digit.extent * starts.size
            at_most(MAX_SEGMENTS, number, "segments", f"describe axis {digit.name!r}")
            steps = np.arange(digit.extent, dtype=np.int64)[:, None]
            starts = ((digit.start + steps) * width + starts).reshape(-1)
            offsets = (steps * digit.stride_bytes + offsets).reshape(-1)
        width *= digit.size
    return _merged(starts, offsets, length, stride)


def _merged(starts: Ints, offsets: Ints, length: int, stride: int) -> Segments:
    """Return segments of one length and stride as the fewest, each as long as it can be."""
    # neighbours are one segment if they continue each other in coordinate and in offset
    continues_coordinate = starts[1:] == starts[:-1] + length
    continues_offset = offsets[1:] == offsets[:-1] + length * stride
    first = heads(continues_coordinate & continues_offset)
    num_merged = np.append(first[1:], starts.size) - first
    return Segments(
        start=starts[first],
        length=length * num_merged,
        offset=offsets[first],
        stride=np.full(first.size, stride, np.int64),
    )


def most_segments(axes: Sequence[Axis]) -> int:
    """Return a bound of the number of segments that the axes of a view have in all.

    All coordinates count but those of the innermost digits.

    >>> kernel_blocks = Axis("token", 0, 33, 33, 8192)
    >>> most_segments((kernel_blocks, Axis("token", 0, 16, 16, 256), Axis("dim", 0, 128, 128, 2)))
    34
    """
    most_of: dict[str, int] = {}
    for axis in reversed(axes):
        most_of[axis.name] = most_of[axis.name] * axis.extent if axis.name in most_of else 1
    return sum(most_of.values())


def contiguous(axes: Iterable[Axis], itemsize: int) -> tuple[int, list[Axis]]:
    """Return the bytes of each contiguous run of elements, and the axes along which runs lie.

    Runs are as long as they can be. Axes are by ascending stride; no two elements share a byte, so
    none behind a gap has the stride of a run.

    >>> head, token = Axis("head", 0, 8, 8, 4096), Axis("token", 0, 16, 16, 256)
    >>> length, outer = contiguous((head, token, Axis("dim", 0, 64, 64, 2)), 2)
    >>> length, [axis.name for axis in outer]
    (128, ['token', 'head'])
    """
    length = itemsize
    outer: list[Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.stride_bytes):
        if axis.stride_bytes == length:
            length *= axis.extent
        elif axis.extent > 1:
            outer.append(axis)
    return length, outer


def offsets_along(axes: Iterable[Axis]) -> Ints:
    """Return the byte offset of every coordinate of a product of axes, the last one fastest.

    >>> offsets_along((Axis("head", 0, 2, 2, 4096), Axis("token", 0, 3, 3, 256))).tolist()
    [0, 256, 512, 4096, 4352, 4608]
    """
    offsets = np.zeros(1, np.int64)
    for axis in axes:
        offsets = np.add.outer(offsets, np.arange(axis.extent) * axis.stride_bytes).reshape(-1)
    return offsets


def global_sizes(axes: Sequence[Axis]) -> dict[str, int]:
    """Return the global size of each axis name, in order of appearance.

    It is the product of the sizes of the name's digits.

    >>> kernel_blocks = Axis("token", 0, 33, 33, 8192)
    >>> global_sizes((kernel_blocks, Axis("token", 0, 16, 16, 256), Axis("dim", 0, 128, 128, 2)))
    {'token': 528, 'dim': 128}
    """
    sizes: dict[str, int] = {}
    for axis in axes:
        sizes[axis.name] = sizes.get(axis.name, 1) * axis.size
    return sizes
