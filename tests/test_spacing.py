"""Spacing: offsets as tables, and tables as strides."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan.spacing import Grid, grid, tables


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
        ([[5]], Grid((1, 1), (0, 0), 5)),
        ([[5, 7, 9]], Grid((1, 3), (0, 2), 5)),
        ([[5], [5]], Grid((2, 1), (0, 0), 5)),
        ([[0, 2], [8, 10]], Grid((2, 2), (8, 2), 0)),
        ([[0, 2], [8, 11]], None),
        ([[0, 2, 5]], None),
        ([[4, 2]], None),
        ([[4], [2]], None),
    ],
)
def test_a_table_is_strides_if_all_of_it_is_evenly_apart(at: list[list[int]], found: Grid | None) -> None:
    """Rows and columns; one of either is no distance at all; none goes back."""
    assert grid(np.array(at)) == found
