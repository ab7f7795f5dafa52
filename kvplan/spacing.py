"""Spacing: lists of offsets in strips that are evenly apart, which a stride can say without a list of indices.

Blocks of a staging region mostly follow each other, and a request's runs in them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from kvplan.axes import Ints

MAX_STRIPS: Final = 4
"""A table is one list of indices rather than more strips than these: each is a launch."""


def even(at: Ints) -> bool:
    """Whether offsets are evenly apart, and none is before the one before it.

    >>> even(np.array([3, 11, 19])), even(np.array([3, 11, 20])), even(np.array([19, 11, 3]))
    (True, False, False)
    """
    steps = np.diff(at)
    return not steps.size or bool(steps[0] >= 0 and (steps == steps[0]).all())


def strips(at: Ints) -> Iterator[Ints]:
    """The indices of a list of offsets: in strips that are evenly apart, where few of them do; as they come, elsewhere.

    >>> [part.tolist() for part in strips(np.array([103, 111, 119, 203, 211, 219, 303]))]
    [[0, 1, 2], [3, 4, 5], [6]]
    """
    for table in tables(at):
        fewer = min(table, table.T, key=len)
        yield from fewer if len(fewer) <= MAX_STRIPS else [table.reshape(-1)]


def tables(at: Ints) -> Iterator[Ints]:
    """The indices of a list of offsets, as tables whose rows and columns are evenly apart, as long as there are any.

    A few may come before the first row, as where a request begins within a block; what is not even comes last.

    >>> [part.tolist() for part in tables(np.array([103, 111, 203, 211, 303]))]
    [[[0, 1], [2, 3]], [[4]]]
    """
    numbers, start = np.arange(at.size), 0
    while start < at.size:
        rest = at[start:]
        turns = np.flatnonzero(np.diff(rest, 2))
        columns = int(turns[0]) + 2 if turns.size else rest.size
        rows = _even_rows(rest[: rest.size // columns * columns].reshape(-1, columns))
        if 2 * rows * columns < rest.size:
            rows, columns = 1, rest.size if start else columns
        stop = start + rows * columns
        yield numbers[start:stop].reshape(rows, columns)
        start = stop


def _even_rows(table: Ints) -> int:
    """How many rows, from the first on, are each as far from the one before."""
    step = table[min(1, len(table) - 1), 0] - table[0, 0]
    uneven = np.flatnonzero((table != np.add.outer(np.arange(len(table)) * step, table[0])).any(axis=1))
    return int(uneven[0]) if uneven.size else len(table)
