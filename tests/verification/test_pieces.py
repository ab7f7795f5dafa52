"""Pieces: ranges cut at them, against a walk over every byte."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvplan.verification.pieces import Pieces

Range = tuple[int, int]
"""First byte and length."""


def made(ranges: list[Range]) -> Pieces:
    """Pieces that start and are as long as these ranges."""
    start, length = np.array(ranges, np.int64).T
    return Pieces(start, length, *[np.zeros_like(start)] * 5)


def walked(pieces: list[Range], ranges: list[Range]) -> list[tuple[int, int, int]] | None:
    """The range, the piece and the address of every byte; ``None`` where one is in no piece."""
    holder = {start + i: piece for piece, (start, length) in enumerate(pieces) for i in range(length)}
    every = [(i, start + at) for i, (start, length) in enumerate(ranges) for at in range(length)]
    return [(i, holder[at], at) for i, at in every] if all(at in holder for _, at in every) else None


@st.composite
def pieces_of_a_block(draw: st.DrawFn) -> list[Range]:
    """A few pieces that ascend, some with gaps before them."""
    start, found = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=5)):
        found.append((start + gap, length))
        start += gap + length
    return found


@given(pieces_of_a_block(), st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=4))
@example([(2, 2), (4, 2)], [(0, 6)])  # as many bytes before the pieces as the last one has
@example([(2, 2)], [(0, 1)])
@example([(0, 2)], [(1, 2)])
def test_ranges_are_cut_where_a_walk_changes_pieces(pieces: list[Range], ranges: list[Range]) -> None:
    """The parts are those bytes, each with its range and its piece, or there are none if a byte has no piece."""
    start, length = np.array(ranges, np.int64).T
    cut = made(pieces).cut(start, length)
    expected = walked(pieces, ranges)
    if expected is None:
        assert cut is None
    else:
        assert cut is not None
        parts = zip(*(column.tolist() for column in cut), strict=True)
        assert [(of, piece, begin + i) for of, piece, begin, size in parts for i in range(size)] == expected
