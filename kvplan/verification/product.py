"""Products: what wrong bytes of one tensor have in common.

A byte has coordinates: its tensor, its position, and one along each axis. So has what it holds. A
*product* is a set of coordinates along each axis, with those that they hold: head 0 holds head 1,
whatever the position. Products that are equal along all axes but one join along that one, which
keeps a product true of each of its bytes:

    heads 0 and 1 hold 1 and 0, in K  +  the same in V  =  the same in K and V
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from kvplan._arrays import Ints


MAX_PRODUCTS: Final = 32
"""Products of one tensor that are kept, the largest ones."""


class AxisRange(NamedTuple):
    """Coordinates ``[start, stop)`` along an axis, which hold those ``shift`` further on."""

    start: int
    stop: int
    shift: int


AxisRanges = tuple[AxisRange, ...]


def joined_ranges(ranges: Iterable[AxisRange]) -> AxisRanges | None:
    """Return ranges in order, neighbours as one; ``None`` if a coordinate would hold two.

    >>> joined_ranges([AxisRange(2, 4, 1), AxisRange(0, 2, 1), AxisRange(6, 7, 0)])
    (AxisRange(start=0, stop=4, shift=1), AxisRange(start=6, stop=7, shift=0))
    >>> joined_ranges([AxisRange(0, 4, 1), AxisRange(2, 6, 0)]) is None
    True
    """
    ascending: list[AxisRange] = []
    for axis_range in sorted(ranges, key=_bounds):
        last = ascending[-1] if ascending else None
        if last is None or axis_range.start > last.stop:
            ascending.append(axis_range)
        elif axis_range.shift == last.shift:
            ascending[-1] = last._replace(stop=max(last.stop, axis_range.stop))
        elif axis_range.start == last.stop:
            ascending.append(axis_range)
        else:
            return None
    return tuple(ascending)


def _bounds(axis_range: AxisRange) -> tuple[int, int]:
    return axis_range.start, axis_range.stop


def num_coordinates(ranges: AxisRanges) -> int:
    """Return the number of coordinates of all ranges."""
    return sum(axis_range.stop - axis_range.start for axis_range in ranges)


def unshifted(ranges: AxisRanges) -> AxisRanges:
    """Return the coordinates as ranges that hold themselves."""
    return joined_ranges([axis_range._replace(shift=0) for axis_range in ranges]) or ()


def ranges_of(coordinates: Ints) -> AxisRanges:
    """Return ascending ranges of coordinates that hold themselves."""
    ascending = np.unique(coordinates)
    gaps = np.flatnonzero(np.diff(ascending) > 1) + 1
    found = [held for held in np.split(ascending, gaps) if held.size]
    return tuple(AxisRange(int(held[0]), int(held[-1]) + 1, 0) for held in found)


class Product(NamedTuple):
    """Bytes of a tensor that are wrong in the same way: a product of coordinates along its axes.

    ``held`` is the tensor whose labels they hold. If they hold none of their own axes, ``fault``
    says what they hold, and no coordinate moves. The first axis, the finest, counts in bytes; the
    last one has the positions.
    """

    fault: str
    held: str
    axes: tuple[AxisRanges, ...]

    @property
    def num_bytes(self) -> int:
        """The number of bytes."""
        return math.prod(map(num_coordinates, self.axes))

    def along(self, axis: int, ranges: AxisRanges) -> Product:
        """Return the product with other coordinates along one axis."""
        axes = (*self.axes[:axis], ranges, *self.axes[axis + 1 :])
        return Product(self.fault, self.held, axes)


def joined_products(products: Iterable[Product]) -> list[Product]:
    """Return products of one tensor, joined along each axis where they are equal along all others.

    >>> head_0 = Product("", "attn", ((AxisRange(0, 1, 0),), (AxisRange(5, 6, 1),)))
    >>> head_1 = head_0.along(0, (AxisRange(1, 2, 0),))
    >>> [product.axes[0] for product in joined_products([head_0, head_1])]
    [(AxisRange(start=0, stop=2, shift=0),)]
    """
    merged = list(products)
    num_axes = len(merged[0].axes) if merged else 0
    for axis in range(num_axes):
        # The ranges along this axis of the products that are equal without it.
        by_rest: dict[Product, list[AxisRange]] = {}
        for product in merged:
            by_rest.setdefault(product.along(axis, ()), []).extend(product.axes[axis])
        merged = []
        for rest, ranges in by_rest.items():
            along_axis = joined_ranges(ranges)
            if along_axis is not None:
                merged.append(rest.along(axis, along_axis))
            else:
                # A coordinate that two views have holds two: its tensor has no pattern.
                merged += [rest.along(axis, (axis_range,)) for axis_range in ranges]
    return merged
