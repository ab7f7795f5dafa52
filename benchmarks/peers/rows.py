"""Rows of the comparison: functions to time, how to read their results, and their figures."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np

TURN_S: Final = 2e-3
"""The time of a function's turn in a round, which has at least one call."""

ROUNDS: Final = (5, 400)
"""The fewest rounds, and the most."""

LONG_S: Final = 0.04
"""A function that takes longer has only the fewest rounds, so that the others have more."""

FLOOR: Final = "two additions, into reused arrays"
BIND: Final = "kvplan bind, workspace"
OF_BLOCKS: Final = "kvplan bind of Blocks, workspace"
DESCRIPTORS: Final = "kvplan bind and descriptors"
SENDERS: Final = "runs the senders of several ranks one after the other; engines run them in parallel"
BASES: Final = {"ids": BIND, "ranges": DESCRIPTORS}
"""kvplan's function to compare with, by what a function makes."""


@attrs.frozen(eq=False)
class Row:
    """A function from a request's lists of block ids to ``output``: ids, or ranges (addresses and lengths).

    ``count`` gives how many of them one side has, ``moves`` what they copy: parts of addresses read, addresses written
    and lengths. ``note`` says what else the function does or omits.
    """

    name: str
    output: str
    call: Callable[[], Any]
    count: Callable[[Any], int]
    moves: Callable[[Any], Any] | None = None
    note: str = ""


@attrs.frozen
class Refusal:
    """A function that refuses a case, with its reason."""

    name: str
    reason: str


@attrs.frozen
class Figure:
    """The measurement of a function: the seconds of a call, by round.

    ``first`` has the seconds of the first call after the turns of other functions, when caches are cold.
    """

    name: str
    output: str
    count: int
    times: Sequence[float]
    first: Sequence[float]
    note: str = ""

    @property
    def cold(self) -> float:
        """The median of first calls."""
        return float(np.median(self.first))

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The lower quartile, the median and the upper quartile."""
        low, median, high = (float(value) for value in np.percentile(self.times, [25, 50, 75]))
        return low, median, high

    def over(self, base: Figure) -> float:
        """Return the median ratio to another function's times in the same rounds.

        So common slowdowns cancel. Rounds that only one function had do not count.
        """
        num_rounds = min(len(self.times), len(base.times))
        ratios = np.divide(self.times[:num_rounds], base.times[:num_rounds])
        return float(np.median(ratios))


@attrs.frozen
class Section:
    """One case at one size: its bytes, its fewest descriptors, and the figures of all functions."""

    case: str
    peers: str
    blocks: int
    num_bytes: int
    num_descriptors: int
    figures: tuple[Figure, ...]
    refusals: tuple[Refusal, ...] = ()

    def __getitem__(self, name: str) -> Figure:
        return next(figure for figure in self.figures if figure.name == name)


def measure(rows: Sequence[Row], seconds: float) -> list[tuple[list[float], list[float]]]:
    """Return the seconds of a call of each function, by round: of calls in a row, and of the first one.

    In each round all functions have a turn, in random order. After the fewest rounds the fast functions continue for
    ``seconds``. A turn of several calls starts with one that is timed apart, because the previous function has filled
    the caches. The result of a call lives until the next call of the same function. Garbage collection is off.
    """
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in rows]
    kept: list[Any] = [None] * len(rows)
    call_s = [_second(row.call) for row in rows]
    calls = [max(1, min(50, int(TURN_S / seconds_of_call))) for seconds_of_call in call_s]
    taking_part = list(range(len(rows)))
    end = 0.0
    rng = np.random.default_rng(1)
    gc.collect()
    gc.disable()
    try:
        for number in range(ROUNDS[1]):
            if number == ROUNDS[0]:
                taking_part = [i for i in taking_part if call_s[i] < LONG_S]
                end = time.perf_counter() + seconds
            if number >= ROUNDS[0] and time.perf_counter() > end:
                break
            for i in rng.permutation(taking_part):
                warm, first = _turn(rows[i].call, calls[i], kept, i)
                times[i][0].append(warm)
                times[i][1].append(first)
    finally:
        gc.enable()
    return times


def _second(call: Callable[[], Any]) -> float:
    """Return the seconds of the second of two calls."""
    call()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _turn(call: Callable[[], Any], calls: int, kept: list[Any], i: int) -> tuple[float, float]:
    """Return the seconds of one of ``calls`` calls, and of a first one before them.

    Both are those of the only call, if there is but one.
    """
    began = time.perf_counter()
    kept[i] = call()
    first = time.perf_counter() - began
    if calls == 1:
        return first, first
    began = time.perf_counter()
    for _ in range(calls):
        kept[i] = call()
    return (time.perf_counter() - began) / calls, first
