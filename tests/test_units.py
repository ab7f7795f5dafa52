"""Units: sizes as people read them."""

from __future__ import annotations

import pytest

from kvplan._units import size, sizes


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
