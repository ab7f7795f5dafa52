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


class Stretch(NamedTuple):
    """Coordinates ``[start, stop)`` along an axis, which hold those ``shift`` further on."""

    start: int
    stop: int
    shift: int


Stretches = tuple[Stretch, ...]


def joined_stretches(stretches: Iterable[Stretch]) -> Stretches | None:
    """Return stretches in order, neighbours as one; ``None`` if a coordinate would hold two.

    >>> joined_stretches([Stretch(2, 4, 1), Stretch(0, 2, 1), Stretch(6, 7, 0)])
    (Stretch(start=0, stop=4, shift=1), Stretch(start=6, stop=7, shift=0))
    >>> joined_stretches([Stretch(0, 4, 1), Stretch(2, 6, 0)]) is None
    True
    """
    ascending: list[Stretch] = []
    for stretch in sorted(stretches, key=_bounds):
        last = ascending[-1] if ascending else None
        if last is None or stretch.start > last.stop:
            ascending.append(stretch)
        elif stretch.shift == last.shift:
            ascending[-1] = last._replace(stop=max(last.stop, stretch.stop))
        elif stretch.start == last.stop:
            ascending.append(stretch)
        else:
            return None
    return tuple(ascending)


def _bounds(stretch: Stretch) -> tuple[int, int]:
    return stretch.start, stretch.stop


def num_coordinates(stretches: Stretches) -> int:
    """Return the number of coordinates of all stretches."""
    return sum(stretch.stop - stretch.start for stretch in stretches)


def unshifted(stretches: Stretches) -> Stretches:
    """Return the coordinates alone, as stretches whose bytes are at their own place."""
    return joined_stretches([stretch._replace(shift=0) for stretch in stretches]) or ()


def stretches_of(coordinates: Ints) -> Stretches:
    """Return coordinates as stretches whose bytes are at their own place."""
    ascending = np.unique(coordinates)
    gaps = np.flatnonzero(np.diff(ascending) > 1) + 1
    parts = [part for part in np.split(ascending, gaps) if part.size]
    return tuple(Stretch(int(part[0]), int(part[-1]) + 1, 0) for part in parts)


class Product(NamedTuple):
    """Bytes of a tensor that are wrong in the same way: a product of coordinates along its axes.

    ``held`` is the tensor whose labels they hold. If they hold none of their own axes, ``fault``
    says what they hold, and no coordinate moves. The first axis, the finest, counts in bytes; the
    last one has the positions.
    """

    fault: str
    held: str
    axes: tuple[Stretches, ...]

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes."""
        return math.prod(map(num_coordinates, self.axes))

    def along(self, axis: int, stretches: Stretches) -> Product:
        """Return the product with other coordinates along one axis."""
        axes = (*self.axes[:axis], stretches, *self.axes[axis + 1 :])
        return Product(self.fault, self.held, axes)


def joined_products(products: Iterable[Product]) -> list[Product]:
    """Return products of one tensor, joined along each axis where they are equal along all others.

    >>> head_0 = Product("", "attn", ((Stretch(0, 1, 0),), (Stretch(5, 6, 1),)))
    >>> head_1 = head_0.along(0, (Stretch(1, 2, 0),))
    >>> [product.axes[0] for product in joined_products([head_0, head_1])]
    [(Stretch(start=0, stop=2, shift=0),)]
    """
    merged = list(products)
    num_axes = len(merged[0].axes) if merged else 0
    for axis in range(num_axes):
        # The stretches along this axis of the products that are equal without it.
        by_rest: dict[Product, list[Stretch]] = {}
        for product in merged:
            by_rest.setdefault(product.along(axis, ()), []).extend(product.axes[axis])
        merged = []
        for rest, stretches in by_rest.items():
            along_axis = joined_stretches(stretches)
            if along_axis is not None:
                merged.append(rest.along(axis, along_axis))
            else:
                # A coordinate that two views have holds two: its tensor has no pattern.
                merged += [rest.along(axis, (stretch,)) for stretch in stretches]
    return merged
