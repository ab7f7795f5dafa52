"""The judge of the second opinion, on plans with known faults."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import pytest

from kvplan.testing.conformance import PairCase, Side
from tests.second_opinion.copies import Copies, first_failure, judge, same, verified
from tests.second_opinion.peers import ours

PAIR = PairCase(Side("LBNHKD", heads=4, tp=4, tokens=2), Side("BLHNKD", heads=4, tp=2, tokens=4), stop=8)
SPAN = (0, 8)


def test_a_right_plan_is_right() -> None:
    """kvplan's copies leave no byte of a request wrong, missing, repeated or foreign."""
    engines = PAIR.engines()
    right = ours(PAIR, *engines)
    assert judge(right, *engines, SPAN).is_right
    assert verified(right, *engines, SPAN).ok


@pytest.mark.parametrize(
    "edit, text, code",
    [
        (lambda c: attrs.evolve(c, reads=np.roll(c.reads, 1)), "wrong", "VALUE"),
        (lambda c: attrs.evolve(c, lengths=np.append(c.lengths[:-1], 1)), "not written", "COVER"),
        (lambda c: attrs.evolve(c, writes=c.writes - (1 << 40)), "beyond the request", "BOUNDS"),
        (lambda c: Copies.join([c, c]), "written again", "DISJOINT"),
    ],
    ids=["wrong", "missing", "foreign", "repeated"],
)
def test_a_faulty_plan_is_found(edit: Callable[[Copies], Copies], text: str, code: str) -> None:
    """The judge counts each kind of fault as what it is, kvplan.verify finds it, and no faulty plan is the same."""
    engines = PAIR.engines()
    right = ours(PAIR, *engines)
    faulty = edit(right)
    assert text in str(judge(faulty, *engines, SPAN))
    report = verified(faulty, *engines, SPAN)
    assert not report.promises[code]
    assert "0x" not in first_failure(report)
    assert not same(right, faulty)


def test_the_same_copies_in_other_descriptors_are_the_same() -> None:
    """The cuts between descriptors and their order do not matter."""
    right = ours(PAIR, *PAIR.engines())
    writes, reads = right.by_byte
    assert same(right, Copies.of([(reads[::-1], writes[::-1], np.ones(len(reads), np.int64))]))
