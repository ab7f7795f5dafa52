"""Helpers for sorted arrays of integers, for chains of elements that continue each other, and for
classes of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Array = TypeVar("Array", bound=npt.NDArray[Any])


@attrs.frozen(eq=False)
class Arrays:
    """The base of classes whose fields are arrays with one element for each of n things, along the
    last dimension.
    """

    def take(self, indices: Ints | Bools, **changes: Ints) -> Self:
        """Return the elements at these indices, with some arrays replaced."""
        for field in attrs.fields(type(self)):
            if field.name not in changes:
                changes[field.name] = getattr(self, field.name)[..., indices]
        return type(self)(**changes)

    @classmethod
    def concatenate(cls, several: Sequence[Self]) -> Self:
        """Return all elements, in this order."""
        arrays = {}
        for field in attrs.fields(cls):
            columns = [getattr(each, field.name) for each in several]
            arrays[field.name] = np.concatenate(columns, axis=-1)
        return cls(**arrays)


def heads(goes_on: npt.NDArray[np.bool_]) -> Ints:
    """Return the index of the first element of each chain, ascending.

    ``goes_on[i]`` says whether element i + 1 continues element i.

    >>> heads(np.array([True, False, True]))
    array([0, 2])
    """
    # one element for each of a chain: whether it begins the chain, as the very first one does
    begins = np.ones(goes_on.size + 1, bool)
    np.logical_not(goes_on, out=begins[1:])
    return np.flatnonzero(begins)


def distinct(values: Ints) -> Ints:
    """Return the distinct values of an array, ascending; the array must not be empty.

    This replaces ``np.unique``, whose first call imports ``numpy.ma`` and takes longer than a plan.

    >>> distinct(np.array([[3, 1], [1, 2]]))
    array([1, 2, 3])
    """
    ordered = np.sort(values, axis=None)
    return ordered[heads(ordered[1:] == ordered[:-1])]


def integers_in(intervals: Ints) -> Ints:
    """Return all integers in intervals ``[start, stop)``, (n, 2), interval by interval.

    >>> integers_in(np.array([[2, 4], [7, 8]]))
    array([2, 3, 7])
    """
    starts, stops = intervals.T
    lengths = stops - starts
    # an integer is its index in the result, plus what its interval's start is ahead of that index
    first_indices = np.cumsum(lengths) - lengths
    integers: Ints = np.arange(lengths.sum()) + np.repeat(starts - first_indices, lengths)
    return integers


def numbered(first: Ints, size: int) -> Ints:
    """Return the index of the chain to which each of ``size`` elements belongs.

    ``first`` has the first element of each chain, as :func:`heads` returns them.

    >>> numbered(np.array([0, 2]), 4)
    array([0, 0, 1, 1])
    """
    # the index grows by one wherever a chain begins
    chain_indices = np.zeros(size, np.int64)
    chain_indices[first[1:]] = 1
    return np.cumsum(chain_indices, out=chain_indices)


def order_of_rows(rows: Ints) -> Ints:
    """Return the order in which rows, (n, m), ascend, compared from the first column on.

    It is that of ``np.lexsort``, which takes kilobytes for each column.

    >>> order_of_rows(np.array([[2, 0], [-1, 5], [2, -3]]))
    array([1, 2, 0])
    """
    # With the sign bit turned, big-endian words ascend as their bytes do, so a row is one key.
    words = (rows.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8")
    keys = words.view(f"V{words.shape[1] * words.itemsize}")[:, 0]
    return np.argsort(keys, kind="stable")


def read_only(array: Array) -> Array:
    """Return the same array, no longer writable."""
    array.setflags(write=False)
    return array
