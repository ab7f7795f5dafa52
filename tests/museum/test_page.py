"""The page shows what the exhibits say."""

from __future__ import annotations

import re

from tests.museum.exhibit import Exhibit
from tests.museum.outside import OUTSIDE, Outside
from tests.museum.page import FAMILIES, PAGE, exhibits, page


def rows() -> list[Exhibit | Outside]:
    """All rows of the page."""
    return [*exhibits(), *OUTSIDE]


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.museum.page` would change nothing."""
    assert PAGE.read_text() == page()


def test_each_number_stands_once() -> None:
    """A number is a family's letter and a number of its own."""
    numbers = [one.number for one in rows()]
    assert [number for number in numbers if not re.fullmatch(f"[{''.join(FAMILIES)}][1-9][0-9]*", number)] == []
    assert sorted(set(numbers)) == sorted(numbers)


def test_each_fault_is_told_in_one_sentence() -> None:
    """A sentence with a reference, in a row of a table."""
    for one in rows():
        assert re.fullmatch(r"[^.|]([^|.]|\.(?=\S))*\.", one.bug), one
        assert one.reference, one
