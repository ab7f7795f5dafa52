"""Patterns: wrong bytes of some workers that a sentence of a report describes.

A *pattern* is a product (:mod:`kvplan.verification.product`) that names an axis only where it has
not all that the worker needs, or holds other coordinates. So patterns of several tensors join, and
then those of several workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping
from operator import attrgetter
from typing import Final

import attrs
import numpy as np

from kvplan._text import count, few, fold, intervals, split
from kvplan.describe.worker import Key
from kvplan.verification.product import (
    MAX_PRODUCTS,
    AxisRange,
    AxisRanges,
    joined_ranges,
    num_coordinates,
    unshifted,
)

POSITION: Final = "position"
"""The name of the axis of positions; an axis of a view may not have it."""

MISSING: Final = "never written"
OUTSIDE: Final = "bytes outside the request"
OTHER: Final = "bytes of a tensor with other axes"

MAX_PATTERNS: Final = 6
"""Patterns that a failure lists, those of the most bytes."""

FEWEST_OF: Final = 64
"""A pattern of fewer than one in so many of the wrong bytes is not listed."""

MAX_RANGES: Final = 4
"""Ranges of an axis that are written out."""

MAX_LISTED: Final = 1 << 20
"""Coordinates that are compared one by one with a relation."""


@attrs.frozen
class PatternAxis:
    """The coordinates of a pattern along one axis; ``whole`` if the worker needs no others.

    ``size`` is that of the axis, 0 if it has none. Coordinates count ``unit`` to an element: along
    the finest axis of a tensor they are bytes.
    """

    ranges: AxisRanges
    whole: bool
    size: int = 0
    unit: int = 1

    @property
    def moved(self) -> bool:
        """Whether a coordinate holds another one."""
        return any(axis_range.shift != 0 for axis_range in self.ranges)

    @property
    def in_elements(self) -> PatternAxis:
        """The same with coordinates in elements, or in bytes where one is cut."""
        if any(number % self.unit for number in itertools.chain.from_iterable(self.ranges)):
            return self
        ranges = [
            AxisRange(start // self.unit, stop // self.unit, shift // self.unit)
            for start, stop, shift in self.ranges
        ]
        return PatternAxis(tuple(ranges), self.whole, self.size // self.unit)

    def relation(self, variable: str) -> str:
        """Return what coordinate ``variable`` holds, as a formula; empty if none is known.

        >>> swapped = tuple(AxisRange(head, head + 1, 1 - 2 * (head % 2)) for head in range(4))
        >>> PatternAxis(swapped, True, 4).relation("h")
        'h^1'
        >>> PatternAxis((AxisRange(0, 3, 1), AxisRange(3, 4, -3)), True, 4).relation("h")
        '(h+1)%4'
        >>> PatternAxis((AxisRange(7, 9, -2),), True).relation("p")
        'p-2'
        """
        shifts = {axis_range.shift for axis_range in self.ranges}
        if len(shifts) == 1:
            return f"{variable}{shifts.pop():+d}"
        if num_coordinates(self.ranges) > MAX_LISTED:
            return ""
        ranges = [np.arange(axis_range.start, axis_range.stop) for axis_range in self.ranges]
        lengths = [numbers.size for numbers in ranges]
        here = np.concatenate(ranges)
        held = here + np.repeat([axis_range.shift for axis_range in self.ranges], lengths)
        flipped = here ^ held
        if (held == held[0]).all():
            return str(held[0])
        if (flipped == flipped[0]).all():
            return f"{variable}^{flipped[0]}"
        turn = max(shifts)
        if self.size and ((here + turn) % self.size == held).all():
            return f"({variable}+{turn})%{self.size}"
        return ""


@attrs.frozen(eq=False)
class Pattern:
    """Wrong bytes of some workers that a sentence describes.

    ``tensors`` are those of the bytes, each with the one that it holds. A tensor that has no axis
    of a name has no coordinate there, and counts as whole.
    """

    fault: str
    num_bytes: int
    workers: tuple[Key, ...]
    tensors: Mapping[str, str]
    all_tensors: bool
    axes: Mapping[str, PatternAxis]

    def likeness(self) -> Hashable:
        """Return what patterns have in common that may join: where they are, and what moves."""
        moved_axes = {
            (
                name,
                None if along.whole else unshifted(along.ranges),
                along.moved,
                along.size,
                along.unit,
            )
            for name, along in self.axes.items()
            if along.moved or not along.whole
        }
        moved = any(name != held for name, held in self.tensors.items())
        return self.fault, moved, frozenset(moved_axes)

    def join(self, other: Pattern) -> Pattern | None:
        """Return the pattern of the bytes of both; ``None`` if a coordinate would hold two."""
        if any(other.tensors.get(name, held) != held for name, held in self.tensors.items()):
            return None
        axes = dict(self.axes)
        for name, along in other.axes.items():
            before = axes.get(name, along)
            ranges = joined_ranges([*before.ranges, *along.ranges])
            if ranges is None:
                return None
            axes[name] = attrs.evolve(along, ranges=ranges)
        return Pattern(
            self.fault,
            self.num_bytes + other.num_bytes,
            tuple(dict.fromkeys([*self.workers, *other.workers])),
            {**self.tensors, **other.tensors},
            self.all_tensors and other.all_tensors,
            axes,
        )

    def text(self, workers: Collection[Key]) -> str:
        """Return where the bytes are, and what they hold, in words.

        What all bytes have in common that are wrong or needed is left out: all ``workers``, all
        tensors, all coordinates along an axis.
        """
        where = list[str]()
        if {*self.workers} != {*workers}:
            where.append(f"at {names_of(self.workers)}")
        held = list[str]()
        if self.fault and self.fault != MISSING:
            held.append(self.fault)
        moves = _moves_of_tensors(self.tensors)
        held += moves
        if not self.all_tensors and (len(self.tensors) > 1 or not moves):
            where.append(fold(self.tensors))
        for name in sorted(self.axes, key=_position_first):
            along = self.axes[name].in_elements
            axis = name if along.unit == 1 else f"byte of {name}"
            move = _move(axis, along)
            # The move of a single coordinate says where it is.
            if not along.whole and not (move and num_coordinates(along.ranges) == 1):
                where.append(_coordinates(axis, along.size, unshifted(along.ranges)))
            held += [move] if move else []
        where_text = ", ".join(where) or "everywhere"
        return ": ".join([where_text, *filter(None, [", ".join(held)])])


def _position_first(name: str) -> tuple[bool, bool, str]:
    return name != POSITION, name != "kv", name


def names_of(workers: Iterable[Key]) -> str:
    """Return the labels of workers, the ranks of each engine as intervals.

    >>> names_of([("decode", 0), ("decode", 1), ("decode", 3)])
    'decode/0-1,3'
    """
    ranks_of: dict[str, list[int]] = {}
    for engine, rank in workers:
        ranks_of.setdefault(engine, []).append(rank)
    return ", ".join(f"{engine}/{intervals(ranks)}" for engine, ranks in ranks_of.items())


def _coordinates(axis: str, size: int, ranges: AxisRanges) -> str:
    """Return coordinates with the name of their axis.

    >>> _coordinates("head", 8, (AxisRange(0, 4, 0), AxisRange(6, 7, 0)))
    'heads 0-3,6'
    >>> _coordinates("kv", 2, (AxisRange(1, 2, 0),))
    'V'
    """
    if axis == "kv" and size == 2:
        return " and ".join("KV"[axis_range.start : axis_range.stop] for axis_range in ranges)
    spans = [str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high, _ in ranges]
    text = few(spans, ",")
    noun, of, finest = axis.partition(" of ")
    plural = "" if num_coordinates(ranges) == 1 else "s"
    return f"{noun}{plural} {text}{of}{finest}"


def _move(axis: str, along: PatternAxis) -> str:
    """Return what the coordinates along an axis hold in words; empty if it is themselves.

    >>> _move("head", PatternAxis((AxisRange(4, 6, -4),), False, 8))
    'head h holds head h-4'
    >>> _move("kv", PatternAxis((AxisRange(0, 1, 1),), False, 2))
    'K holds V'
    """
    moving = [axis_range for axis_range in along.ranges if axis_range.shift]
    if not moving:
        return ""
    relation = along.relation(axis[0])
    single = num_coordinates(along.ranges) == 1
    if relation and not single and not (axis == "kv" and along.size == 2):
        noun, of, finest = axis.partition(" of ")
        subject = f"every {noun}" if relation.isdigit() else f"{noun} {axis[0]}{of}{finest}"
        return f"{subject} holds {noun} {relation}"
    texts = []
    for axis_range in along.ranges:
        start, stop, shift = axis_range
        held = AxisRange(start + shift, stop + shift, 0)
        verb = "holds" if stop == start + 1 else "hold"
        pair = [_coordinates(axis, along.size, (side,)) for side in (axis_range, held)]
        texts.append(f" {verb} ".join(pair))
    return few(texts, ", ", MAX_RANGES)


def _moves_of_tensors(tensors: Mapping[str, str]) -> list[str]:
    """Return which tensors hold which in words, those of one relation between numbers as one.

    >>> _moves_of_tensors({"layers.0.attn": "layers.1.attn", "layers.4.attn": "layers.5.attn"})
    ['layers.n.attn holds layers.n+1.attn']
    >>> _moves_of_tensors({"layers.0": "layers.3", "layers.1": "layers.2", "layers.2": "layers.1"})
    ['layers.n holds layers.3-n']
    >>> _moves_of_tensors({"layers.3.k": "layers.3.v"}), _moves_of_tensors({"draft": "draft"})
    (['layers.3.k holds layers.3.v'], [])
    """
    by_words: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    texts = []
    for name, held in tensors.items():
        if name != held:
            before, number, after = split(name)
            held_before, held_number, held_after = split(held)
            if number is None or held_number is None:
                texts.append(f"{name} holds {held}")
            else:
                words = before, after, held_before, held_after
                by_words.setdefault(words, []).append((number, held_number))
    for (before, after, held_before, held_after), pairs in by_words.items():
        sums = {number + held_number for number, held_number in pairs}
        by_relation: dict[str, list[tuple[int, int]]] = {}
        for pair in pairs:
            step = pair[1] - pair[0]
            relation = f"n{step:+d}" if step else "n"
            if len(pairs) > 2 and len(sums) == 1:
                relation = f"{sum(pair)}-n"
            by_relation.setdefault(relation, []).append(pair)
        for relation, pairs_alike in by_relation.items():
            n, held_n = pairs_alike[0] if len(pairs_alike) == 1 else ("n", relation)
            texts.append(f"{before}{n}{after} holds {held_before}{held_n}{held_after}")
    return [few(texts, ", ", MAX_RANGES)] if texts else []


def joined_patterns(patterns: Iterable[Pattern], *, by_worker: bool) -> list[Pattern]:
    """Return patterns with those joined that differ in their tensors, or in their workers.

    Those of different workers join if they are in the same tensors, or in all.
    """
    alike: dict[Hashable, list[Pattern]] = {}
    for pattern in patterns:
        owners: Hashable = pattern.workers
        if by_worker:
            owners = None if pattern.all_tensors else frozenset(pattern.tensors)
        patterns_alike = alike.setdefault((owners, pattern.likeness()), [])
        for number, candidate in enumerate(patterns_alike[:MAX_PRODUCTS]):
            joined = candidate.join(pattern)
            if joined is not None:
                patterns_alike[number] = joined
                break
        else:
            patterns_alike.append(pattern)
    return list(itertools.chain.from_iterable(alike.values()))


def lines_of(patterns: Iterable[Pattern], num_wrong: int, workers: Collection[Key]) -> list[str]:
    """Return a line for each pattern of many of the wrong bytes, and one for all other bytes.

    There is none if no pattern has many.
    """
    most_first = sorted(patterns, key=attrgetter("num_bytes"), reverse=True)
    listed = [p for p in most_first[:MAX_PATTERNS] if p.num_bytes * FEWEST_OF >= num_wrong]
    if [pattern.num_bytes for pattern in listed] == [num_wrong]:
        return [listed[0].text(workers)]
    lines = [f"{count(pattern.num_bytes, 'byte')}: {pattern.text(workers)}" for pattern in listed]
    num_others = num_wrong - sum(pattern.num_bytes for pattern in listed)
    last_line = f"{count(num_others, 'byte')} in none of these patterns"
    return [*lines, last_line] if lines and num_others else lines
