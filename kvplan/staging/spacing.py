"""Spacing: lists of offsets in strips that are evenly apart, which a stride can say without a list of indices.

Blocks of a staging region mostly follow each other, and a request's runs in them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs
import numpy as np

from kvplan._arrays import Ints

MAX_STRIPS: Final = 4
"""A table is one list of indices rather than more strips than these: each is a launch."""


@attrs.frozen(eq=False)
class Rows:
    """Boxes, one for each stride: those that ``index`` says, or all in a row where it is ``None``."""

    count: int
    stride_bytes: int
    offset_bytes: int
    index: Ints | None


def rows(at: Ints) -> Rows:
    """Boxes that begin at these offsets, in this order.

    >>> rows(np.array([32, 8, 24]))
    Rows(count=4, stride_bytes=8, offset_bytes=8, index=array([3, 0, 2]))
    """
    first = int(at.min())
    stride = int(np.gcd.reduce(at - first))
    if even(at):
        return Rows(at.size, stride, first, None)
    index = (at - first) // stride
    return Rows(int(index.max()) + 1, stride, first, index)


def paired(into: Ints, out_of: Ints) -> list[tuple[Rows, Rows]]:
    """Where boxes go and where they come from, in as few parts as have no index on at least one side.

    >>> [(there.index, here.index) for there, here in paired(np.array([32, 8, 24]), np.array([0, 4, 8]))]
    [(array([3, 0, 2]), None)]
    """
    parts = min(
        (list(strips(at)) for at in (into, out_of)),
        key=lambda parts: (sum(not (even(into[part]) or even(out_of[part])) for part in parts), len(parts)),
    )
    return [(rows(into[part]), rows(out_of[part])) for part in parts]


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
