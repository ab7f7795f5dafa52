"""Helpers for sorted integer arrays: their types, and chains of elements that continue each other."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Array = TypeVar("Array", bound=npt.NDArray[Any])


def heads(goes_on: npt.NDArray[np.bool_]) -> Ints:
    """The index of the first element of each chain; ``goes_on[i]``: whether element i + 1 continues element i.

    >>> heads(np.array([True, False, True]))
    array([0, 2])
    """
    begins = np.ones(goes_on.size + 1, bool)
    np.logical_not(goes_on, out=begins[1:])
    return np.flatnonzero(begins)


def distinct(values: Ints) -> Ints:
    """The distinct values of an array, ascending; the array must not be empty.

    This replaces ``np.unique``, whose first call imports ``numpy.ma`` and takes longer than a plan.

    >>> distinct(np.array([[3, 1], [1, 2]]))
    array([1, 2, 3])
    """
    ordered = np.sort(values, axis=None)
    return ordered[heads(ordered[1:] == ordered[:-1])]


def listed(intervals: Ints) -> Ints:
    """All integers in intervals ``[start, stop)``, (n, 2), interval by interval.

    >>> listed(np.array([[2, 4], [7, 8]]))
    array([2, 3, 7])
    """
    start, stop = intervals.T
    length = stop - start
    # `before` is how many integers the earlier intervals have.
    before = np.cumsum(length) - length
    found: Ints = np.arange(length.sum()) + np.repeat(start - before, length)
    return found


def numbered(first: Ints, size: int) -> Ints:
    """The index of the chain that each of ``size`` elements belongs to; ``first`` is what :func:`heads` returns.

    >>> numbered(np.array([0, 2]), 4)
    array([0, 0, 1, 1])
    """
    number = np.zeros(size, np.int64)
    number[first[1:]] = 1
    return np.cumsum(number, out=number)


def read_only(array: Array) -> Array:
    """The same array, no longer writable."""
    array.setflags(write=False)
    return array
