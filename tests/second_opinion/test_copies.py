"""The judge of the second opinion, on plans with known faults."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from tests.second_opinion.copies import Copies, judge, same
from tests.second_opinion.engines import Side
from tests.second_opinion.peers import Pair, ours

PAIR = Pair(Side("LBNHKD", heads=4, tp=4, tokens=2), Side("BLHNKD", heads=4, tp=2, tokens=4), stop=8)


def test_a_right_plan_is_right() -> None:
    """kvplan's copies leave no byte of a request wrong, missing, repeated or foreign."""
    source, destination = PAIR.engines()
    assert judge(ours(PAIR, source, destination), source, destination).is_right


@pytest.mark.parametrize(
    "edit, text",
    [
        (lambda c: attrs.evolve(c, reads=np.roll(c.reads, 1)), "wrong"),
        (lambda c: attrs.evolve(c, lengths=np.append(c.lengths[:-1], 0)), "not written"),
        (lambda c: attrs.evolve(c, writes=c.writes - (1 << 40)), "beyond the request"),
        (lambda c: Copies.join([c, c]), "written again"),
    ],
    ids=["wrong", "missing", "foreign", "repeated"],
)
def test_a_faulty_plan_is_found_out(edit: object, text: str) -> None:
    """Each kind of fault is counted as what it is, and no faulty plan is the same as the right one."""
    source, destination = PAIR.engines()
    right = ours(PAIR, source, destination)
    faulty = edit(right)  # type: ignore[operator]
    assert text in str(judge(faulty, source, destination))
    assert not same(right, faulty)


def test_the_same_copies_in_other_descriptors_are_the_same() -> None:
    """How copies are cut into descriptors, and their order, does not matter."""
    source, destination = PAIR.engines()
    right = ours(PAIR, source, destination)
    writes, reads = right.by_byte
    assert same(right, Copies.of([(reads[::-1], writes[::-1], np.ones(len(reads), np.int64))]))
