"""Axes, and the canonical form of their digits, against enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvplan import Axis, KVPlanError
from kvplan._arrays import heads
from kvplan._checks import integer
from kvplan.describe.axes import MAX_SEGMENTS, Segments, global_sizes, segments


@st.composite
def digits_of_a_name(draw: st.DrawFn) -> tuple[Axis, ...]:
    """One to three digits, often whole and often stepping just past the finer ones, so that they join."""
    digits: list[Axis] = []
    span = 1
    for _ in range(draw(st.integers(1, 3))):
        extent, start, rest = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 0, 1, 2])), draw(st.integers(0, 1))
        stride = draw(st.one_of(st.just(span), st.integers(0, 12)))
        digits.insert(0, Axis("token", start, start + extent, start + extent + rest, stride))
        span = draw(st.sampled_from([stride * extent, span + (extent - 1) * stride, stride * extent + span]))
    return tuple(digits)


def enumerated(digits: tuple[Axis, ...]) -> dict[int, int]:
    """The byte offset of each coordinate, digit by digit: mixed radix."""
    offsets = {}
    for values in itertools.product(*(range(digit.start, digit.stop) for digit in digits)):
        coordinate = 0
        for digit, value in zip(digits, values, strict=True):
            coordinate = coordinate * digit.size + value
        steps = zip(digits, values, strict=True)
        offsets[coordinate] = sum((value - digit.start) * digit.stride_bytes for digit, value in steps)
    return offsets


def offsets_of(found: Segments) -> dict[int, int]:
    """The byte offset of each coordinate that the segments cover."""
    rows = zip(*(array.tolist() for array in (found.start, found.length, found.offset, found.stride)), strict=True)
    pairs = [(start + i, offset + i * stride) for start, length, offset, stride in rows for i in range(length)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def fewest(offsets: dict[int, int]) -> int:
    """How many evenly stepping intervals cover the coordinates at least: each taken as long as it can be."""
    count, step, before = 0, None, None
    for coordinate, offset in sorted(offsets.items()):
        if before is None or coordinate != before[0] + 1 or step not in (None, offset - before[1]):
            count, step = count + 1, None
        else:
            step = offset - before[1]
        before = coordinate, offset
    return count


@given(digits_of_a_name())
def test_segments_are_the_digits(digits: tuple[Axis, ...]) -> None:
    """Segments give every coordinate the offset that its digits give it, and cover no other coordinate."""
    assert offsets_of(segments(digits)) == enumerated(digits)


@given(digits_of_a_name())
@example((Axis("x", 0, 2, 2, 7), Axis("x", 0, 2, 2, 5), Axis("x", 0, 2, 2, 1)))  # bytes 0 1, 5 to 8, 12 13
def test_segments_are_as_few_as_can_be(digits: tuple[Axis, ...]) -> None:
    """No cover of the same coordinates by evenly stepping intervals has fewer intervals."""
    assert segments(digits).start.size == fewest(enumerated(digits))


@given(digits_of_a_name())
def test_segments_ascend(digits: tuple[Axis, ...]) -> None:
    """Each segment begins at or after the end of the one before."""
    found = segments(digits)
    assert (found.start[1:] >= found.stop[:-1]).all()
    assert (found.length >= 1).all()


@given(digits_of_a_name())
def test_covered_joins_what_touches(digits: tuple[Axis, ...]) -> None:
    """``covered`` has exactly the coordinates of the segments, in intervals that do not touch."""
    found = segments(digits).covered
    assert [c for start, stop in found for c in range(start, stop)] == sorted(enumerated(digits))
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(found))


@given(digits_of_a_name())
def test_at_gives_the_offset_of_a_coordinate(digits: tuple[Axis, ...]) -> None:
    """``at`` finds the offsets of any covered coordinates, in any order."""
    offsets = enumerated(digits)
    coordinates = sorted(offsets, reverse=True)
    assert segments(digits).at(np.array(coordinates)).tolist() == [offsets[c] for c in coordinates]


def test_kernel_blocks_of_one_stride_are_one_segment() -> None:
    """Kernel blocks without a gap between them are one interval of slots."""
    assert str(segments((Axis("token", 0, 33, 33, 4096), Axis("token", 0, 16, 16, 256)))) == "[0, 528) at 0 stride 256"


def test_no_digits_are_one_slot() -> None:
    """A name without an axis has one coordinate: the token axis of a state."""
    assert offsets_of(segments(())) == {0: 0}


def test_too_many_segments_are_refused_before_they_are_made() -> None:
    """A description of few bytes cannot make a large array: one segment more than the limit is refused."""
    inner = Axis("x", 0, 2, 2, 1)
    assert segments((Axis("x", 0, 1 << 10, 1 << 10, 3), inner)).start.size == 1 << 10
    with pytest.raises(KVPlanError, match=r"^RANGE"):
        segments((Axis("x", 0, MAX_SEGMENTS + 1, MAX_SEGMENTS + 1, 3), inner))
    with pytest.raises(KVPlanError, match=r"^RANGE"):
        segments((Axis("x", 0, 1 << 62, 1 << 62, 3), inner))


@given(digits_of_a_name())
def test_a_global_size_is_the_product_of_its_digits(digits: tuple[Axis, ...]) -> None:
    """``global_sizes`` multiplies the digits of each name and keeps the order in which names appear."""
    axes = (Axis("dim", 0, 2, 6, 1), *digits, Axis("head", 0, 1, 5, 1))
    expected = {"dim": 6, "token": math.prod(digit.size for digit in digits), "head": 5}
    assert list(global_sizes(axes).items()) == list(expected.items())


def test_a_single_coordinate_has_no_stride() -> None:
    """Axes of one coordinate are equal whatever stride they were given."""
    assert Axis("head", 3, 4, 8, 4096) == Axis("head", 3, 4, 8, 17)
    assert Axis("head", 3, 4, 8, 4096).stride_bytes == 0
    assert Axis("head", 3, 5, 8, 4096) != Axis("head", 3, 5, 8, 17)


def test_numbers_of_any_integer_type_are_stored_as_int() -> None:
    """Integers of numpy, and strings of numpy, become the language's own, so that equal axes are equal and hash so."""
    given = Axis(np.str_("head"), *np.array([4, 8, 8, 4096]))
    assert given == Axis("head", 4, 8, 8, 4096)
    assert [type(value) for value in (given.name, given.start, given.stop, given.size, given.stride_bytes)] == [
        str,
        *[int] * 4,
    ]


def test_the_ends_of_the_range_are_exact() -> None:
    """The largest integer that fits is taken as it is, the next is refused."""
    top = (1 << 63) - 1
    assert Axis("x", top - 2, top, top, top).stride_bytes == top
    assert integer(top, "x") == top
    with pytest.raises(KVPlanError, match=r"^RANGE"):
        integer(top + 1, "x")


@pytest.mark.parametrize("goes_on", list(itertools.product([False, True], repeat=4)))
def test_heads_are_where_chains_begin(goes_on: tuple[bool, ...]) -> None:
    """The first element, and each that does not go on."""
    expected = [0, *(i + 1 for i, on in enumerate(goes_on) if not on)]
    assert heads(np.array(goes_on)).tolist() == expected
