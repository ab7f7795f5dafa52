"""Rows of the comparison: functions that are timed, how to see what they made, and their figures."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np

TURN_S: Final = 2e-3
"""A function's turn in a round is as many calls as fit into this, but one at least."""

ROUNDS: Final = (5, 400)
"""The fewest rounds, and the most."""

LONG_S: Final = 0.04
"""A function that takes longer has a turn in the fewest rounds only, so that the others have more of them."""

FLOOR: Final = "floor, into reused arrays"
BIND: Final = "kvplan bind, workspace"
DESCRIPTORS: Final = "kvplan bind and descriptors"
SENDERS: Final = "senders of several ranks one after the other, which an engine runs side by side"
BASES: Final = {"ids": BIND, "ranges": DESCRIPTORS}
"""What functions are compared with, by what they make."""


@attrs.frozen(eq=False)
class Row:
    """A function from a request's lists of block ids to ``output``: arrays, ids, or ranges (addresses and lengths).

    ``count`` is how many of them one side got, ``moves`` what they copy: parts of addresses read, addresses written and
    lengths. ``note`` says what else the function does, or leaves out.
    """

    name: str
    output: str
    call: Callable[[], Any]
    count: Callable[[Any], int]
    moves: Callable[[Any], Any] | None = None
    note: str = ""


@attrs.frozen
class Refusal:
    """A function that does not plan a case, and the reason that it gives."""

    name: str
    reason: str


@attrs.frozen
class Figure:
    """What was measured of a function: the seconds a call took in each round that it had a turn in."""

    name: str
    output: str
    count: int
    times: Sequence[float]
    note: str = ""

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The median stands between the two others."""
        low, median, high = (float(value) for value in np.percentile(self.times, [25, 50, 75]))
        return low, median, high

    def over(self, other: Figure) -> float:
        """The median ratio to another function's times in the same rounds: what slows both down counts for neither."""
        return float(np.median([ours / theirs for ours, theirs in zip(self.times, other.times, strict=False)]))


@attrs.frozen
class Section:
    """One case at one size: what moves, in how few descriptors, and the figures of all functions that plan it."""

    case: str
    peers: str
    blocks: int
    num_bytes: int
    num_descriptors: int
    figures: tuple[Figure, ...]
    refusals: tuple[Refusal, ...] = ()

    def __getitem__(self, name: str) -> Figure:
        return next(figure for figure in self.figures if figure.name == name)


def measure(rows: Sequence[Row], seconds: float) -> list[tuple[float, ...]]:
    """The seconds that a call of each takes, by round; in each round all have a turn, in another order.

    After the fewest rounds go on, for so many ``seconds``, those that don't take long. A turn of several calls begins
    with one that is not timed, so that what the function before it left in the caches does not count. What a call made
    is there until the next call of the same function has made its own. There is no collection of garbage meanwhile.
    """
    times: list[list[float]] = [[] for _ in rows]
    kept: list[Any] = [None] * len(rows)
    once = [_second(row.call) for row in rows]
    calls = [max(1, min(50, int(TURN_S / value))) for value in once]
    taking, end = list(range(len(rows))), 0.0
    rng = np.random.default_rng(1)
    gc.collect()
    gc.disable()
    try:
        for number in range(ROUNDS[1]):
            if number == ROUNDS[0]:
                taking, end = [i for i in taking if once[i] < LONG_S], time.perf_counter() + seconds
            if number >= ROUNDS[0] and time.perf_counter() > end:
                break
            for i in rng.permutation(taking):
                times[i].append(_turn(rows[i].call, calls[i], kept, i))
    finally:
        gc.enable()
    return [tuple(found) for found in times]


def _second(call: Callable[[], Any]) -> float:
    """The seconds that the second of two calls takes."""
    call()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _turn(call: Callable[[], Any], calls: int, kept: list[Any], i: int) -> float:
    if calls > 1:
        kept[i] = call()
    began = time.perf_counter()
    for _ in range(calls):
        kept[i] = call()
    return (time.perf_counter() - began) / calls
