"""What numpy arrays of integers have in common everywhere: their types, and chains of neighbours in sorted ones."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Array = TypeVar("Array", bound=npt.NDArray[Any])


def heads(goes_on: npt.NDArray[np.bool_]) -> Ints:
    """Where chains begin, given for each element but the first whether it goes on from the one before.

    >>> heads(np.array([True, False, True]))
    array([0, 2])
    """
    begins = np.ones(goes_on.size + 1, bool)
    np.logical_not(goes_on, out=begins[1:])
    return np.flatnonzero(begins)


def distinct(values: Ints) -> Ints:
    """The different values of an array that has any, ascending.

    ``np.unique`` loads ``numpy.ma`` when first called, which would take longer than a plan.

    >>> distinct(np.array([[3, 1], [1, 2]]))
    array([1, 2, 3])
    """
    ordered = np.sort(values, axis=None)
    return ordered[heads(ordered[1:] == ordered[:-1])]


def numbered(first: Ints, size: int) -> Ints:
    """Which chain each of ``size`` elements belongs to, given where the chains begin.

    >>> numbered(np.array([0, 2]), 4)
    array([0, 0, 1, 1])
    """
    number = np.zeros(size, np.int64)
    number[first[1:]] = 1
    return np.cumsum(number, out=number)


def read_only(array: Array) -> Array:
    """The array, which nobody can write to from now on."""
    array.setflags(write=False)
    return array
