"""Bands: bytes found again as coordinates, and contiguous pieces."""

from __future__ import annotations

import pytest

from kvplan import KVPlanError
from kvplan.show import bands as module
from kvplan.show.bands import Band, Box, Step, boxes, spans

TOKENS = Band("k", "token", range(4), 0, 8, 8)
HEADS = Band("k", "head", range(4, 6), 0, 32, 32, (TOKENS,))


def told(box: Box) -> str:
    return " ".join([f"{box.start}-{box.stop}", *(f"{step.axis} {step}" for step in box.steps)])


@pytest.mark.parametrize(
    "start, stop, expected",
    [
        (0, 64, ["0-64 head 4-5"]),
        (32, 64, ["32-64 head 5"]),
        (8, 24, ["8-24 head 4 token 1-2"]),
        (24, 40, ["24-32 head 4 token 3", "32-40 head 5 token 0"]),
        (24, 64, ["24-32 head 4 token 3", "32-64 head 5"]),
        (64, 99, []),
    ],
)
def test_bytes_are_boxes(start: int, stop: int, expected: list[str]) -> None:
    """Bytes are told by the coarsest axis that has them whole, and by all before it."""
    assert [told(box) for box in boxes([HEADS], start, stop)] == expected


def test_gaps_are_no_boxes() -> None:
    """What lies between the parts of a band is left out."""
    padded = Band("k", "head", range(2), 4, 40, 32, (TOKENS,))
    assert [told(box) for box in boxes([padded], 0, 99)] == ["4-36 head 0", "44-76 head 1"]


def test_digits_count_on() -> None:
    """A finer digit of an axis is told in coordinates of the whole axis."""
    outer = Band("k", "token", range(0, 32, 16), 0, 256, 128, (Band("k", "token", range(16), 0, 8, 8),))
    assert [told(box) for box in boxes([outer], 256, 280)] == ["256-280 token 16-31 token 16-18"]


def test_digits_that_do_not_nest_are_told_one_by_one() -> None:
    """Where a finer digit is outside a coarser one, contiguous bytes are no interval, and each is a box."""
    inner = Band("k", "token", range(0, 4, 2), 0, 1, 1, (), "last")
    outer = Band("k", "token", range(2), 0, 2, 2, (inner,), "more")
    found = [box.steps[-1] for box in boxes([outer], 0, 4)]
    assert found == [Step("token", n, n + 1) for n in (0, 2, 1, 3)]


def test_tensors_side_by_side_are_named() -> None:
    """Where a part holds several tensors, a step says which."""
    both = (Band("x", "dim", range(4), 0, 2, 2), Band("y", "dim", range(2), 8, 2, 2))
    assert [told(box) for box in boxes(both, 6, 10)] == ["6-8 tensor x dim 3", "8-10 tensor y dim 0"]


def test_spans_are_as_long_as_they_can_be() -> None:
    """Dense bands are one piece; a gap divides."""
    assert spans([HEADS], "k").tolist() == [[0, 64]]
    padded = Band("k", "head", range(3), 4, 40, 32, (TOKENS,))
    assert spans([padded], "k").tolist() == [[4, 36], [44, 76], [84, 116]]
    filled = Band("s", "head", range(3), 36, 40, 8)
    assert spans([padded, filled], "k").tolist() == [[4, 124]]


def test_too_many_spans_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of more pieces than can be listed is refused by name."""
    monkeypatch.setattr(module, "MAX_SPANS", 8)
    with pytest.raises(KVPlanError, match=r"RANGE: cannot draw layers\.0: expected at most 8 contiguous pieces"):
        spans([Band("k", "head", range(9), 0, 40, 32)], "layers.0")
