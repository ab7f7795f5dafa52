"""Axes: one dimension of a view, and the byte offset of every coordinate along it.

An axis names the part ``[start, stop)`` of a global size that a worker holds, and the bytes between neighbouring
coordinates. A name may appear twice in a view, outer digit first: ``token`` as 33 kernel blocks of 16 slots is
``Axis("token", 0, 33, 33, outer)`` and ``Axis("token", 0, 16, 16, inner)``, together 528 slots.

:func:`segments` turns the digits of one name into the form that the planner uses: intervals of the global
coordinate on which the byte offset grows by a constant stride.

>>> kernel = (Axis("token", 0, 3, 3, 8192), Axis("token", 0, 16, 16, 256))
>>> print(segments(kernel))
[0, 16) at 0 stride 256, [16, 32) at 8192 stride 256, [32, 48) at 16384 stride 256
>>> dense = (Axis("token", 0, 3, 3, 4096), Axis("token", 0, 16, 16, 256))
>>> print(segments(dense))
[0, 48) at 0 stride 256
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from kvplan._arrays import Ints, heads
from kvplan._checks import at_most, integer, name, settle
from kvplan.errors import KVPlanError

MAX_SEGMENTS: Final = 1 << 20
"""The axes of a worker's views may have at most this many segments, so that a small offer cannot claim much memory."""


@attrs.frozen
class Axis:
    """One dimension of a view: the part ``[start, stop)`` of ``size``, ``stride_bytes`` between neighbours.

    All are integers in ``[0, 2**63)`` with ``start < stop <= size``. An axis that holds a single coordinate has no
    meaningful stride; it is stored as 0.

    >>> print(Axis("head", 4, 8, 8, 4096))
    head [4, 8) of 8 stride 4096
    """

    name: str
    start: int
    stop: int
    size: int
    stride_bytes: int

    def __attrs_post_init__(self) -> None:
        settle(self, "an axis", name, "name")
        settle(self, "an axis", integer, "start", "stop", "size", "stride_bytes")
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

    ``offset`` is the byte offset of an interval's first coordinate, ``stride`` the bytes between its coordinates.
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
        """The byte offset of coordinate ``start``, and the layout of ``[start, stop)`` relative to it.

        The layout is, for each segment, first coordinate, length, offset and stride. Two ranges with equal layouts
        differ only in where they begin.

        >>> head = segments((Axis("head", 4, 8, 8, 4096),))
        >>> head.seen(5, 7), head.seen(6, 8), head.seen(4, 5)
        ((4096, (0, 2, 0, 4096)), (8192, (0, 2, 0, 4096)), (0, (0, 1, 0, 0)))
        """
        found: list[int] = []
        origin, which = (
            0,
            slice(self.stop.searchsorted(start, "right"), self.start.searchsorted(stop)),
        )
        columns = [
            side[which].tolist() for side in (self.start, self.stop, self.offset, self.stride)
        ]
        for low, high, offset, stride in zip(*columns, strict=True):
            first, length = max(low, start), min(high, stop) - max(low, start)
            begin = offset + (first - low) * stride
            origin = origin if found else begin
            found += first - start, length, begin - origin, stride if length > 1 else 0
        return origin, tuple(found)

    def steps(self, start: int, stop: int, step: int) -> bool:
        """Whether neighbours in ``[start, stop)`` are ``step`` bytes apart; a single coordinate always qualifies."""
        i = int(np.searchsorted(self.start, start, "right")) - 1
        return stop - start == 1 or (stop <= self.stop[i] and self.stride[i] == step)

    def at(self, coordinate: Ints) -> Ints:
        """The byte offset of each coordinate, all of which must lie in an interval."""
        i = np.searchsorted(self.start, coordinate, "right") - 1
        offset: Ints = self.offset[i] + (coordinate - self.start[i]) * self.stride[i]
        return offset

    def __str__(self) -> str:
        rows = zip(self.start, self.stop, self.offset, self.stride, strict=True)
        return ", ".join(f"[{a}, {b}) at {offset} stride {stride}" for a, b, offset, stride in rows)


def segments(digits: Sequence[Axis]) -> Segments:
    """The fewest segments for the digits of one name, outer digit first.

    Raises ``RANGE`` where there would be more than :data:`MAX_SEGMENTS`.
    """
    if len(digits) == 1:
        (one,) = digits
        return Segments(*np.array([[one.start], [one.extent], [0], [one.stride_bytes]], np.int64))
    width, start, offset = 1, np.zeros(1, np.int64), np.zeros(1, np.int64)
    length, stride = 1, 0
    # From the inner digit outwards. `start` and `offset` list the segments so far, `width` is the size of all digits
    # seen, and every segment has the same `length` and `stride`.
    for digit in reversed(digits):
        whole = start.size == 1 and length == width
        if digit.extent == 1 or not whole or (width > 1 and digit.stride_bytes != length * stride):
            at_most(
                MAX_SEGMENTS, digit.extent * start.size, "segments", f"describe axis {digit.name!r}"
            )
            # The segments repeat for every coordinate of this digit.
            steps = np.arange(digit.extent, dtype=np.int64)[:, None]
            start = ((digit.start + steps) * width + start).reshape(-1)
            offset = (steps * digit.stride_bytes + offset).reshape(-1)
        else:  # one segment that this digit continues without a gap
            start = start + digit.start * width
            stride = digit.stride_bytes if width == 1 else stride
            length *= digit.extent
        width *= digit.size
    # Neighbouring segments that continue each other in coordinate and in offset become one.
    first = heads(
        (start[1:] == start[:-1] + length) & (offset[1:] == offset[:-1] + length * stride)
    )
    pieces = np.append(first[1:], start.size) - first
    return Segments(
        start=start[first], length=length * pieces, offset=offset[first], stride=0 * first + stride
    )


def most_segments(axes: Sequence[Axis]) -> int:
    """At most how many segments the axes of a view have in all: all coordinates but those of the innermost digits.

    >>> most_segments((Axis("token", 0, 33, 33, 8192), Axis("token", 0, 16, 16, 256), Axis("dim", 0, 128, 128, 2)))
    34
    """
    number: dict[str, int] = {}
    for axis in reversed(axes):
        number[axis.name] = number[axis.name] * axis.extent if axis.name in number else 1
    return sum(number.values())


def global_sizes(axes: Sequence[Axis]) -> dict[str, int]:
    """The global size of each axis name, in order of appearance: the product of the sizes of its digits.

    >>> global_sizes((Axis("token", 0, 33, 33, 8192), Axis("token", 0, 16, 16, 256), Axis("dim", 0, 128, 128, 2)))
    {'token': 528, 'dim': 128}
    """
    sizes: dict[str, int] = {}
    for axis in axes:
        sizes[axis.name] = sizes.get(axis.name, 1) * axis.size
    return sizes
