"""Spacing: offsets as tables, and tables in strips."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan.staging.spacing import even, paired, strips, tables


@pytest.mark.parametrize(
    "at, shapes",
    [
        ([7], [(1, 1)]),
        ([3, 11, 19], [(1, 3)]),
        ([3, 11, 103, 111], [(2, 2)]),
        ([8, 100, 108, 200, 208, 300], [(3, 2)]),
        ([8, 16, 100, 108, 116, 200, 208, 216, 300, 308, 316], [(1, 2), (3, 3)]),
        ([0, 8, 16, 100, 108, 116, 200, 208], [(2, 3), (1, 2)]),
        ([0, 8, 100, 108, 200, 208, 999, 1, 5], [(3, 2), (1, 2), (1, 1)]),
        ([5, 3, 9, 1, 2, 0, 77], [(1, 2), (1, 5)]),
    ],
)
def test_offsets_are_tables_as_long_as_they_are_even(at: list[int], shapes: list[tuple[int, int]]) -> None:
    """Each entry is in one table, in order."""
    found = list(tables(np.array(at)))
    assert [table.shape for table in found] == shapes
    assert [entry for table in found for entry in table.reshape(-1).tolist()] == list(range(len(at)))


@pytest.mark.parametrize(
    ("at", "found"),
    [
        ([5], True),
        ([5, 7, 9], True),
        ([5, 5], True),
        ([0, 2, 5], False),
        ([4, 2], False),
    ],
)
def test_offsets_are_even_if_one_stride_says_them(at: list[int], found: bool) -> None:
    """One alone always; none goes back."""
    assert even(np.array(at)) is found


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((1, 7), [[0, 1, 2, 3, 4, 5, 6]]),
        ((2, 3), [[0, 1, 2], [3, 4, 5]]),
        ((3, 2), [[0, 2, 4], [1, 3, 5]]),
        ((4, 5), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]),
        ((5, 5), [[*range(25)]]),
    ],
)
def test_a_table_is_cut_along_its_longer_side(shape: tuple[int, int], found: list[list[int]]) -> None:
    """Into rows or columns, unless there are too many of both."""
    at = np.add.outer(np.arange(shape[0]) * 100, np.arange(shape[1]) * 8).reshape(-1)
    assert [part.tolist() for part in strips(at)] == found


@pytest.mark.parametrize("at", [[0, 8, 16, 200, 208, 216], [216, 0, 8, 200, 208, 16]])
def test_boxes_are_paired_in_few_parts(at: list[int]) -> None:
    """One part is enough where either side is evenly apart, whatever the other is."""
    lined, here_and_there = np.arange(6) * 8, np.array(at)
    for sides in ((here_and_there, lined), (lined, here_and_there)):
        (pair,) = paired(*sides)
        assert [found.index is None for found in pair] == [side is lined for side in sides]
        for found, side in zip(pair, sides, strict=True):
            which = np.arange(found.count) if found.index is None else found.index
            assert (found.offset_bytes + which * found.stride_bytes).tolist() == side.tolist()
