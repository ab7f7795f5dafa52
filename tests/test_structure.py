"""How rooms read: few pronouns, packs and nested comprehensions, no wide lines, and comments where work is dense."""

from __future__ import annotations

import pytest

from benchmarks.structure import Words, texts_of, words_by_room
from tests.pages import ROOT

DONE = "bridges cli connector describe display handshake models plan staging store testing verification kvplan_nixl"
"""The rooms that read well, which stay so; ``kvplan_nixl`` would be the whole package of that name."""

MOST = {"pronouns": 40, "packs": 5, "nested": 2, "wide": 1}
"""Names, assignments and comprehensions in 1,000 lines of code, and lines of over 100 columns in 100."""

FEWEST_COMMENTS = 4
"""Comment lines, in 100 lines of code."""

ROOMS = words_by_room(texts_of(ROOT / "kvplan")) | {"kvplan_nixl": Words.of(texts_of(ROOT / "kvplan_nixl").values())}


@pytest.mark.parametrize("figure", MOST)
@pytest.mark.parametrize("room", DONE.split())
def test_a_room_that_is_done_reads_well(room: str, figure: str) -> None:
    """``python -m benchmarks.structure`` prints the figures of all rooms."""
    assert ROOMS[room].rates()[figure] <= MOST[figure]


@pytest.mark.parametrize("room", DONE.split())
def test_a_room_that_is_done_has_comments(room: str) -> None:
    """Work that is dense says what it does."""
    assert ROOMS[room].rates()["comments"] >= FEWEST_COMMENTS


@pytest.mark.parametrize(
    "text, figure, times",
    [
        ("made = 1\nsize = made", "pronouns", 2),
        ("def f(ours, *, local): return ours.given", "pronouns", 2),
        ("def f(one=1): ...\nlambda every: every", "pronouns", 3),
        ("made_of = 1\nfoundation = self.each", "pronouns", 0),
        ("a, b = 1, 2", "packs", 1),
        ("a, b = pair\nc = 1, 2", "packs", 0),
        ("[a for b in c for a in b]", "nested", 1),
        ("{a: [b for b in a] for a in c}", "nested", 1),
        ("set(a for a in sorted(b for b in c))", "nested", 1),
        ("[a for a in c if a]\n[b for b in c]", "nested", 0),
        (f"a = {'1' * 97}", "wide", 1),
        (f"a = {'1' * 96}\n# {'1' * 97}\n'''{'1' * 97}'''", "wide", 0),
        ("# sorted by rank\na = 1  # bytes\n'# no'", "comments", 2),
        ("'''A docstring\nof two lines.'''\n\na = f(\n    1,\n)  # one\n# two", "lines", 3),
    ],
)
def test_what_stops_a_reader_is_counted(text: str, figure: str, times: int) -> None:
    """Each figure sees what it is named after, and not what looks like it."""
    assert getattr(Words.of([text]), figure) == times


def test_rates_are_of_lines_of_code() -> None:
    """A page of prose makes no code read better."""
    text = f"'''{'Prose.' * 99}\n'''\nmade, size = 1, 2  # bytes\n"
    assert Words.of([text, "\n\n"]).rates() == {
        "pronouns": 1000,
        "packs": 1000,
        "nested": 0,
        "wide": 0,
        "comments": 100,
    }
