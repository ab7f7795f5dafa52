"""The page shows what the tests say."""

from __future__ import annotations

import re

from tests.known_bugs.known_bug import KnownBug
from tests.known_bugs.page import FAMILIES, OUTSIDE, PAGE, Outside, known_bugs, page


def rows() -> list[KnownBug | Outside]:
    """All rows of the page."""
    return [*known_bugs(), *OUTSIDE]


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.known_bugs.page` would change nothing."""
    assert PAGE.read_text() == page()


def test_numbers_of_a_family_have_no_gap() -> None:
    """A number is a family's letter and one from 1 on, first of its tests and then of those outside."""
    for letter in FAMILIES:
        shown, outside = (
            sorted(int(one.number[1:]) for one in those if one.number[0] == letter) for those in (known_bugs(), OUTSIDE)
        )
        assert [*shown, *outside] == [*range(1, len(shown) + len(outside) + 1)], letter
    assert {one.number[0] for one in rows()} == {*FAMILIES}


def test_each_fault_is_one_sentence() -> None:
    """A sentence with a reference, in a row of a table."""
    for one in rows():
        assert re.fullmatch(r"[^.|]([^|.]|\.(?=\S))*\.", one.bug), one
        assert one.reference, one
