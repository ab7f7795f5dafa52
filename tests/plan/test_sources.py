"""Sources: parts of an axis, and who holds them."""

import numpy as np
import pytest

from kvplan.plan.sources import Cover, Part


def part(*intervals):
    return Part(intervals=np.array(intervals, np.int64), held=np.ones(1, bool))


@pytest.mark.parametrize(
    ("intervals", "words"),
    [
        ([(0, 1)], "[0, 1)"),
        ([(0, 1), (1, 2), (2, 3), (5, 6)], "[0, 3) [5, 6)"),
        ([(2, 4), (6, 7), (7, 9)], "[2, 4) [6, 9)"),
    ],
)
def test_a_part_is_told_by_its_intervals(intervals, words):
    """Those that touch are one."""
    assert str(part(*intervals)) == words


def test_a_part_knows_its_size_and_its_span():
    """Coordinates that are in it, from the first to past the last; its shape is the same wherever it begins."""
    one, other = part((2, 4), (6, 9)), part((12, 14), (16, 19))
    assert (one.size, one.span, other.span) == (5, (2, 9), (12, 19))
    assert one.shape == other.shape != part((2, 4), (7, 10)).shape


def cover(*sets):
    """A cover by views that each hold some intervals."""
    intervals = np.array([interval for each in sets for interval in each], np.int64).reshape(-1, 2)
    return Cover(intervals, np.repeat(np.arange(len(sets)), [len(each) for each in sets]), np.arange(len(sets)))


def test_parts_end_where_a_view_begins_or_ends():
    """Each part is held by the same views throughout; what nobody holds is a part too."""
    found = cover([(0, 4)], [(2, 6), (8, 9)], [(20, 30)]).parts(((1, 5), (7, 10)))
    assert [(str(each), each.held.tolist()) for each in found] == [
        ("[1, 2)", [True, False, False]),
        ("[2, 4)", [True, True, False]),
        ("[4, 5) [8, 9)", [False, True, False]),
        ("[7, 8) [9, 10)", [False, False, False]),
    ]


def test_views_that_hold_the_same_share_a_set():
    """``which`` says whose a set is: of any number of views."""
    both = Cover(np.array([[0, 2], [2, 4]]), np.array([0, 1]), np.array([1, 0, 1]))
    found = both.parts(((0, 4),))
    assert [(str(each), each.held.tolist()) for each in found] == [
        ("[0, 2)", [False, True, False]),
        ("[2, 4)", [True, False, True]),
    ]


def test_parts_are_looked_for_once():
    """The same intervals have the same parts, not only equal ones."""
    one = cover([(0, 4)])
    assert one.parts(((0, 2),)) is one.parts(((0, 2),))
