"""The judge of the second opinion, on plans with known faults."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from tests.second_opinion.coordinates import check, first_failure
from tests.second_opinion.copies import Copies, judge, same
from tests.second_opinion.engines import Side
from tests.second_opinion.peers import Pair, ours

PAIR = Pair(Side("LBNHKD", heads=4, tp=4, tokens=2), Side("BLHNKD", heads=4, tp=2, tokens=4), stop=8)


def test_a_right_plan_is_right() -> None:
    """kvplan's copies leave no byte of a request wrong, missing, repeated or foreign."""
    source, destination = PAIR.engines()
    right = ours(PAIR, source, destination)
    assert judge(right, source, destination).is_right
    assert check(PAIR, right, source, destination).ok


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
def test_a_faulty_plan_is_found_out(edit: object, text: str, code: str) -> None:
    """Each kind of fault is counted as what it is, and kvplan's own check finds it; no faulty plan is the same."""
    source, destination = PAIR.engines()
    right = ours(PAIR, source, destination)
    faulty = edit(right)  # type: ignore[operator]
    assert text in str(judge(faulty, source, destination))
    report = check(PAIR, faulty, source, destination)
    assert not report.promises[code]
    assert "0x" not in first_failure(report)
    assert not same(right, faulty)


def test_the_same_copies_in_other_descriptors_are_the_same() -> None:
    """How copies are cut into descriptors, and their order, does not matter."""
    source, destination = PAIR.engines()
    right = ours(PAIR, source, destination)
    writes, reads = right.by_byte
    assert same(right, Copies.of([(reads[::-1], writes[::-1], np.ones(len(reads), np.int64))]))
