"""Bands: bytes of one axis, so many equal parts at a constant step, each with finer bands inside.

A page of 16 tokens of 2 heads is two bands, however many elements it has, and the order in which they nest is the order
of the axes in memory. A box is found again from its bytes, by dividing offsets by steps from the slowest axis on.

>>> heads = Band("k", "head", range(4, 6), 0, 4096, 4096, (Band("k", "token", range(16), 0, 256, 256),))
>>> for box in boxes([heads], 3840, 4608):
...     print(box.start, box.stop, *(f"{step.axis} {step}" for step in box.steps))
3840 4096 head 4 token 15
4096 4608 head 5 token 0-1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import attrs
import numpy as np

from kvplan._arrays import Ints, heads
from kvplan._text import count
from kvplan.errors import KVPlanError

TENSOR: Final = "tensor"
"""What a step along different tensors of one page is called."""

MAX_SPANS: Final = 1 << 18
"""A page has at most so many contiguous pieces."""


Digit = Literal["only", "more", "last"]
"""Parts that are intervals of their axis; or of a digit whose parts are not, with more digits inside, or the last."""


@attrs.frozen
class Step:
    """One step on the way from a page to some of its bytes: coordinates ``[start, stop)`` of an axis, or a ``name``.

    ``more`` is what else there is to say where there is room.

    >>> print(Step("head", 4, 6), Step("head", 4, 5), Step("kv", 1, 2), Step("tensor", 0, 1, "conv.x"))
    4-5 4 V conv.x
    """

    axis: str
    start: int
    stop: int
    name: str = ""
    more: str = ""

    def __str__(self) -> str:
        if self.name:
            return self.name
        if self.axis == "kv" and self.stop <= 2:
            return "KV"[self.start : self.stop]
        return str(self.start) if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"


@attrs.frozen
class Band:
    """Bytes of one axis: for each of ``coordinates``, ``size_bytes`` from first to last byte, ``step_bytes`` apart.

    The first stands ``offset_bytes`` into what holds the band. ``inside`` are the finer bands of each part, by
    ascending offset, and empty where the part is one element. A coordinate of an outer digit is that of its first
    element; each part then has as many as ``coordinates`` step, unless ``digit`` says that parts are no intervals.
    ``tensor`` names what all the bytes are of, and ``views`` numbers the views that they are of.
    """

    tensor: str
    axis: str
    coordinates: range | tuple[int, ...]
    offset_bytes: int
    step_bytes: int
    size_bytes: int
    inside: tuple[Band, ...] = ()
    digit: Digit = "only"
    views: tuple[int, ...] = (0,)

    @property
    def stop_bytes(self) -> int:
        """Where the last part ends, in what holds the band."""
        return self.offset_bytes + (len(self.coordinates) - 1) * self.step_bytes + self.size_bytes

    def step(self, first: int, last: int) -> Step:
        """The step to the parts from the ``first`` to the ``last``."""
        each = self.coordinates.step if isinstance(self.coordinates, range) and self.digit == "only" else 1
        return Step(self.axis, self.coordinates[first], self.coordinates[last] + each)

    def __str__(self) -> str:
        return f"{self.axis} {len(self.coordinates)} x {self.step_bytes}"


@attrs.frozen
class Box:
    """Contiguous bytes ``[start, stop)`` of a page, and the steps that lead to them, from the slowest axis on.

    An axis that no step names is there whole. ``views`` are the numbers of the views that the bytes are of.
    """

    start: int
    stop: int
    steps: tuple[Step, ...]
    views: tuple[int, ...] = ()


def boxes(bands: Sequence[Band], start: int, stop: int) -> Iterator[Box]:
    """The bytes ``[start, stop)`` of some bands as boxes, by ascending address; what lies between bands is left out."""
    return _boxes(bands, start, stop, 0, ())


def _boxes(bands: Sequence[Band], start: int, stop: int, base: int, steps: tuple[Step, ...]) -> Iterator[Box]:
    several = len({band.tensor for band in bands}) > 1
    for band in bands:
        low, high = max(start - base - band.offset_bytes, 0), min(stop - base, band.stop_bytes) - band.offset_bytes
        if low < high:
            named = (Step(TENSOR, 0, 1, band.tensor),) if several else ()
            yield from _parts(band, low, high, base + band.offset_bytes, (*steps, *named))


def _parts(band: Band, low: int, high: int, base: int, steps: tuple[Step, ...]) -> Iterator[Box]:
    """The boxes of bytes ``[low, high)`` of a band: parts that are there whole together, if they are contiguous."""
    i, dense = low // band.step_bytes, band.size_bytes == band.step_bytes
    last = min((high - 1) // band.step_bytes, len(band.coordinates) - 1)
    while i <= last:
        at = i * band.step_bytes
        whole = (high - at) // band.step_bytes if dense else int(at + band.size_bytes <= high)
        if low <= at and whole and band.digit != "more":
            taken = i + min(whole if band.digit == "only" else 1, last - i + 1) - 1
            step = within(steps, band.step(i, taken))
            end = base + taken * band.step_bytes + band.size_bytes
            yield Box(base + at, end, (*steps, step), band.views)
            i = taken + 1
        else:
            inner, end = (*steps, within(steps, band.step(i, i))), min(high, at + band.size_bytes)
            yield from _boxes(band.inside, base + max(low, at), base + end, base + at, inner)
            i += 1


def within(steps: Sequence[Step], step: Step) -> Step:
    """A step in coordinates of the whole axis: a finer digit counts from where the coarser one stands."""
    coarser = [one.start for one in steps if one.axis == step.axis][-1:]
    return attrs.evolve(step, start=step.start + coarser[0], stop=step.stop + coarser[0]) if coarser else step


def spans(bands: Sequence[Band], title: str) -> Ints:
    """The contiguous pieces of some bands, (n, 2) int64: start and stop. Raises ``RANGE`` for too many of ``title``."""
    found = [np.zeros((0, 2), np.int64)]
    for band in bands:
        inner = spans(band.inside, title) if band.inside else np.array([[0, band.size_bytes]], np.int64)
        if len(inner) == 1 and inner[0, 1] - inner[0, 0] == band.step_bytes:
            inner[0, 1] += (len(band.coordinates) - 1) * band.step_bytes
            found.append(inner + band.offset_bytes)
            continue
        number = len(band.coordinates) * len(inner)
        if number > MAX_SPANS:
            got, expected = count(number, "piece"), f"at most {MAX_SPANS} contiguous pieces of a page"
            raise KVPlanError("RANGE", f"draw {title}", expected=expected, got=got, value=number)
        at = band.offset_bytes + np.arange(len(band.coordinates), dtype=np.int64) * band.step_bytes
        found.append((at[:, None, None] + inner).reshape(-1, 2))
    every = np.concatenate(found)
    every = every[np.argsort(every[:, 0])]
    first = heads(every[1:, 0] == every[:-1, 1])[: len(every)]
    return np.stack([every[first, 0], every[np.append(first[1:], len(every)) - 1, 1]], axis=1)
