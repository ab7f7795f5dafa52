"""Names: their numbers, and layers told as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan._text import fold, intervals, join, size, sizes, split


@given(st.text() | st.from_regex(r"[a-z.]*[0-9]{0,20}[a-z.]*[0-9]*", fullmatch=True))
def test_a_name_is_what_its_parts_make(name: str) -> None:
    """Splitting and joining gives every name back, with leading zeros, other scripts and numbers of any length."""
    assert join(*split(name)) == name


@pytest.mark.parametrize(
    "name, parts",
    [
        ("layers.7.attn.k2", ("layers.", 7, ".attn.k2")),
        ("0", ("", 0, "")),
        ("layers.007", ("layers.007", None, "")),
        (f"x{10**18 - 1}", ("x", 10**18 - 1, "")),
        (f"x{10**18}", (f"x{10**18}", None, "")),
    ],
)
def test_the_first_number_splits_a_name(name: str, parts: tuple[str, int | None, str]) -> None:
    """The first number counts where it is written plainly and fits 18 digits."""
    assert split(name) == parts


def test_names_fold_by_their_first_number() -> None:
    """Names that differ in their first number fold; others stand alone, in order of appearance."""
    assert fold(["a.2.k", "b", "a.0.k", "a.1.k", "a.1.v"]) == "a.0-2.k, b, a.1.v"


def test_leading_zeros_are_kept() -> None:
    """A number that is not written plainly is part of the name."""
    assert fold(["layer.07", "layer.08"]) == "layer.07, layer.08"


def test_names_of_other_scripts_do_not_fold() -> None:
    """Digits of other scripts are letters of a name."""
    assert fold(["layer.٣", "layer.²"]) == "layer.٣, layer.²"


def test_intervals_are_in_order() -> None:
    """Numbers are sorted, and repeats told once."""
    assert intervals([5, 1, 0, 1]) == "0-1,5"


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (10239, "10239 bytes"),
        (10240, "10 KiB"),
        (1 << 20, "1 MiB"),
        ((1 << 30) * 3 // 2, "1.5 GiB"),
        (1 << 62, "4096 PiB"),
    ],
)
def test_sizes_are_exact_or_in_binary_units(number: int, text: str) -> None:
    """Small sizes are told to the byte, large ones in the unit that suits."""
    assert size(number) == text


def test_a_range_of_one_size_is_that_size() -> None:
    """Two equal ends are told once."""
    assert sizes(5, 5) == "5 bytes"
    assert sizes(5, 6) == "5 bytes to 6 bytes"
