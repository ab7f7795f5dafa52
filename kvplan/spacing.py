"""Spacing: lists of offsets as tables of rows and columns that are evenly apart, which strides alone can say.

Blocks of a staging region mostly follow each other, and a request's runs in them too. What strides can say needs no
list of indices to be copied by.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from kvplan.axes import Ints


@attrs.frozen
class Grid:
    """Offsets of rows and columns: how many of each, how far apart, and where the first one is."""

    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    offset_bytes: int


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


def grid(at: Ints) -> Grid | None:
    """A table of offsets as evenly spaced rows and columns, none of them going back, if it is that.

    >>> grid(np.array([[3, 11], [103, 111]]))
    Grid(shape=(2, 2), strides_bytes=(100, 8), offset_bytes=3)
    >>> grid(np.array([[3, 11], [103, 112]]))
    """
    first, spans = int(at[0, 0]), (int(at[-1, 0] - at[0, 0]), int(at[0, -1] - at[0, 0]))
    steps = tuple([span // max(extent - 1, 1) for span, extent in zip(spans, at.shape, strict=True)])
    made = first + np.add.outer(*(np.arange(extent) * step for extent, step in zip(at.shape, steps, strict=True)))
    return Grid(at.shape, steps, first) if min(steps) >= 0 and np.array_equal(at, made) else None
