"""Patterns: what wrong bytes have in common, as one line of a report.

A byte has coordinates: its tensor, its position, and one along each axis. So has what it holds. A
*product* is a set of coordinates along each axis, with those that they hold: head 0 holds head 1,
whatever the position. Products that are equal along all axes but one join along that one, which
keeps a product true of each of its bytes:

    heads 0 and 1 hold 1 and 0, in K  +  the same in V  =  the same in K and V

A *pattern* is a product that names an axis only where it has not all that the worker needs, or
holds other coordinates. So patterns of several tensors join, and then those of several workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._text import count, few, fold, intervals, split
from kvplan.describe.worker import Key
from kvplan.verification.labels import Labels, Window
from kvplan.verification.memory import Cells

POSITION: Final = "position"
"""The name of the axis of positions; an axis of a view may not have it."""

MISSING: Final = "never written"
OUTSIDE: Final = "bytes outside the request"
OTHER: Final = "bytes of a tensor with other axes"

MAX_RUNS: Final = 1 << 16
"""Runs of wrong bytes of one chunk that are looked at; bytes of the others are in no pattern."""

MAX_UNJOINED: Final = 1 << 15
"""Products of all chunks of a worker together: the search ends where runs join to no fewer."""

MAX_PRODUCTS: Final = 32
"""Products of one tensor that are kept, the largest ones."""

MAX_PATTERNS: Final = 6
"""Patterns that a failure lists, those of the most bytes."""

FEWEST_OF: Final = 64
"""A pattern of fewer than one in so many of the wrong bytes is not listed."""

MAX_STRETCHES: Final = 4
"""Stretches of an axis that are written out."""

MAX_LISTED: Final = 1 << 20
"""Coordinates that are compared one by one with a relation."""

CHUNK_CELLS: Final = 1 << 19
"""Cells that are searched for runs at a time."""

_MISSING_SHIFT: Final = np.iinfo(np.int64).min
_OUTSIDE_SHIFT: Final = _MISSING_SHIFT + 1


class Stretch(NamedTuple):
    """Coordinates ``[start, stop)`` along an axis, which hold those ``shift`` further on."""

    start: int
    stop: int
    shift: int


Stretches = tuple[Stretch, ...]


def joined(stretches: Iterable[Stretch]) -> Stretches | None:
    """Return stretches in order, neighbours as one; ``None`` if a coordinate would hold two.

    >>> joined([Stretch(2, 4, 1), Stretch(0, 2, 1), Stretch(6, 7, 0)])
    (Stretch(start=0, stop=4, shift=1), Stretch(start=6, stop=7, shift=0))
    >>> joined([Stretch(0, 4, 1), Stretch(2, 6, 0)]) is None
    True
    """
    ascending: list[Stretch] = []
    for stretch in sorted(stretches, key=_bounds):
        last = ascending[-1] if ascending else None
        if last is None or stretch.start > last.stop:
            ascending.append(stretch)
        elif stretch.shift == last.shift:
            ascending[-1] = last._replace(stop=max(last.stop, stretch.stop))
        elif stretch.start == last.stop:
            ascending.append(stretch)
        else:
            return None
    return tuple(ascending)


def _bounds(stretch: Stretch) -> tuple[int, int]:
    return stretch.start, stretch.stop


def _length(stretches: Stretches) -> int:
    return sum(stretch.stop - stretch.start for stretch in stretches)


def _where(stretches: Stretches) -> Stretches:
    """Return the coordinates alone, as stretches that hold what is theirs."""
    return joined([stretch._replace(shift=0) for stretch in stretches]) or ()


def _stretches_of(coordinates: Ints) -> Stretches:
    """Return coordinates as stretches that hold what is theirs."""
    ascending = np.unique(coordinates)
    gaps = np.flatnonzero(np.diff(ascending) > 1) + 1
    parts = [part for part in np.split(ascending, gaps) if part.size]
    return tuple(Stretch(int(part[0]), int(part[-1]) + 1, 0) for part in parts)


class Product(NamedTuple):
    """Bytes of a tensor that are wrong in the same way: a product of coordinates along its axes.

    ``held`` is the tensor whose labels they hold. If they hold none of their own axes, ``fault``
    says what they hold, and no coordinate moves. The first axis, the finest, counts in bytes; the
    last one has the positions.
    """

    fault: str
    held: str
    axes: tuple[Stretches, ...]

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes."""
        return math.prod(map(_length, self.axes))

    def along(self, axis: int, stretches: Stretches) -> Product:
        """Return the product with other coordinates along one axis."""
        axes = (*self.axes[:axis], stretches, *self.axes[axis + 1 :])
        return Product(self.fault, self.held, axes)


def _merged(products: Iterable[Product]) -> list[Product]:
    """Return products of one tensor, joined along each axis where they are equal along all others.

    >>> head_0 = Product("", "attn", ((Stretch(0, 1, 0),), (Stretch(5, 6, 1),)))
    >>> head_1 = head_0.along(0, (Stretch(1, 2, 0),))
    >>> [product.axes[0] for product in _merged([head_0, head_1])]
    [(Stretch(start=0, stop=2, shift=0),)]
    """
    merged = list(products)
    num_axes = len(merged[0].axes) if merged else 0
    for axis in range(num_axes):
        # The stretches along this axis of the products that are equal without it.
        by_rest: dict[Product, list[Stretch]] = {}
        for product in merged:
            by_rest.setdefault(product.along(axis, ()), []).extend(product.axes[axis])
        merged = []
        for rest, stretches in by_rest.items():
            along_axis = joined(stretches)
            if along_axis is not None:
                merged.append(rest.along(axis, along_axis))
            else:
                # A coordinate that two views have holds two: its tensor has no pattern.
                merged += [rest.along(axis, (stretch,)) for stretch in stretches]
    return merged


@attrs.frozen
class PatternPart:
    """The coordinates of a pattern along one axis; ``whole`` if the worker needs no others.

    ``size`` is that of the axis, 0 if it has none. Coordinates count ``unit`` to an element: along
    the finest axis of a tensor they are bytes.
    """

    stretches: Stretches
    whole: bool
    size: int = 0
    unit: int = 1

    @property
    def moved(self) -> bool:
        """Return whether a coordinate holds another one."""
        return any(stretch.shift != 0 for stretch in self.stretches)

    @property
    def in_elements(self) -> PatternPart:
        """Return this part with coordinates in elements, or in bytes where one is cut."""
        if any(number % self.unit for number in itertools.chain.from_iterable(self.stretches)):
            return self
        stretches = [
            Stretch(start // self.unit, stop // self.unit, shift // self.unit)
            for start, stop, shift in self.stretches
        ]
        return PatternPart(tuple(stretches), self.whole, self.size // self.unit)

    def relation(self, variable: str) -> str:
        """Return what coordinate ``variable`` holds, as a formula; empty if none is known.

        >>> swapped = tuple(Stretch(head, head + 1, 1 - 2 * (head % 2)) for head in range(4))
        >>> PatternPart(swapped, True, 4).relation("h")
        'h^1'
        >>> PatternPart((Stretch(0, 3, 1), Stretch(3, 4, -3)), True, 4).relation("h")
        '(h+1)%4'
        >>> PatternPart((Stretch(7, 9, -2),), True).relation("p")
        'p-2'
        """
        shifts = {stretch.shift for stretch in self.stretches}
        if len(shifts) == 1:
            return f"{variable}{shifts.pop():+d}"
        if _length(self.stretches) > MAX_LISTED:
            return ""
        ranges = [np.arange(*_bounds(stretch)) for stretch in self.stretches]
        lengths = [numbers.size for numbers in ranges]
        here = np.concatenate(ranges)
        held = here + np.repeat([stretch.shift for stretch in self.stretches], lengths)
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
    parts: Mapping[str, PatternPart]

    def likeness(self) -> Hashable:
        """Return what patterns have in common that may join: where they are, and what moves."""
        parts = {
            (name, None if part.whole else _where(part.stretches), part.moved, part.size, part.unit)
            for name, part in self.parts.items()
            if part.moved or not part.whole
        }
        moved = any(name != held for name, held in self.tensors.items())
        return self.fault, moved, frozenset(parts)

    def join(self, other: Pattern) -> Pattern | None:
        """Return the pattern of the bytes of both; ``None`` if a coordinate would hold two."""
        if any(other.tensors.get(name, held) != held for name, held in self.tensors.items()):
            return None
        parts = dict(self.parts)
        for name, part in other.parts.items():
            before = parts.get(name, part)
            stretches = joined([*before.stretches, *part.stretches])
            if stretches is None:
                return None
            parts[name] = attrs.evolve(part, stretches=stretches)
        return Pattern(
            self.fault,
            self.num_bytes + other.num_bytes,
            tuple(dict.fromkeys([*self.workers, *other.workers])),
            {**self.tensors, **other.tensors},
            self.all_tensors and other.all_tensors,
            parts,
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
        for name in sorted(self.parts, key=_position_first):
            part = self.parts[name].in_elements
            axis = name if part.unit == 1 else f"byte of {name}"
            move = _move(axis, part)
            # The move of a single coordinate says where it is.
            if not part.whole and not (move and _length(part.stretches) == 1):
                where.append(_coordinates(axis, part.size, _where(part.stretches)))
            held += [move] if move else []
        place = ", ".join(where) or "everywhere"
        return ": ".join([place, *filter(None, [", ".join(held)])])


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


def _coordinates(axis: str, size: int, stretches: Stretches) -> str:
    """Return coordinates with the name of their axis.

    >>> _coordinates("head", 8, (Stretch(0, 4, 0), Stretch(6, 7, 0)))
    'heads 0-3,6'
    >>> _coordinates("kv", 2, (Stretch(1, 2, 0),))
    'V'
    """
    if axis == "kv" and size == 2:
        return " and ".join("KV"[stretch.start : stretch.stop] for stretch in stretches)
    spans = [str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high, _ in stretches]
    text = few(spans, ",")
    noun, of, finest = axis.partition(" of ")
    plural = "" if _length(stretches) == 1 else "s"
    return f"{noun}{plural} {text}{of}{finest}"


def _move(axis: str, part: PatternPart) -> str:
    """Return what the coordinates of a part hold in words; empty if it is themselves.

    >>> _move("head", PatternPart((Stretch(4, 6, -4),), False, 8))
    'head h holds head h-4'
    >>> _move("kv", PatternPart((Stretch(0, 1, 1),), False, 2))
    'K holds V'
    """
    moving = [stretch for stretch in part.stretches if stretch.shift]
    if not moving:
        return ""
    relation = part.relation(axis[0])
    single = _length(part.stretches) == 1
    if relation and not single and not (axis == "kv" and part.size == 2):
        noun, of, finest = axis.partition(" of ")
        subject = f"every {noun}" if relation.isdigit() else f"{noun} {axis[0]}{of}{finest}"
        return f"{subject} holds {noun} {relation}"
    texts = []
    for stretch in part.stretches:
        start, stop, shift = stretch
        held = Stretch(start + shift, stop + shift, 0)
        verb = "holds" if stop == start + 1 else "hold"
        pair = [_coordinates(axis, part.size, (side,)) for side in (stretch, held)]
        texts.append(f" {verb} ".join(pair))
    return few(texts, ", ", MAX_STRETCHES)


def _moves_of_tensors(tensors: Mapping[str, str]) -> list[str]:
    """Return which tensors hold which in words, those whose numbers differ by as much as one.

    >>> _moves_of_tensors({"layers.0.attn": "layers.1.attn", "layers.4.attn": "layers.5.attn"})
    ['layers.n.attn holds layers.n+1.attn']
    >>> _moves_of_tensors({"layers.3.k": "layers.3.v"}), _moves_of_tensors({"draft": "draft"})
    (['layers.3.k holds layers.3.v'], [])
    """
    by_relation: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, held in tensors.items():
        if name != held:
            before, number, after = split(name)
            held_before, held_number, held_after = split(held)
            numbers = ("", "")
            if number is not None and held_number is not None:
                step = held_number - number
                numbers = ("n", f"n{step:+d}" if step else "n")
            sides = f"{before}{numbers[0]}{after}", f"{held_before}{numbers[1]}{held_after}"
            by_relation.setdefault(sides, []).append((name, held))
    texts = []
    for sides, pairs in by_relation.items():
        texts.append(" holds ".join(pairs[0] if len(pairs) == 1 else sides))
    return [few(texts, ", ", MAX_STRETCHES)] if texts else []


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
            both = candidate.join(pattern)
            if both is not None:
                patterns_alike[number] = both
                break
        else:
            patterns_alike.append(pattern)
    return [pattern for patterns_alike in alike.values() for pattern in patterns_alike]


def lines_of(patterns: Iterable[Pattern], num_wrong: int, workers: Collection[Key]) -> list[str]:
    """Return a line for each pattern of many of the wrong bytes, and one for all other bytes.

    There is none if no pattern has many.
    """
    most_first = sorted(patterns, key=_num_bytes, reverse=True)
    listed = [p for p in most_first[:MAX_PATTERNS] if p.num_bytes * FEWEST_OF >= num_wrong]
    if [pattern.num_bytes for pattern in listed] == [num_wrong]:
        return [listed[0].text(workers)]
    lines = [f"{count(pattern.num_bytes, 'byte')}: {pattern.text(workers)}" for pattern in listed]
    num_others = num_wrong - sum(map(_num_bytes, listed))
    others = f"{count(num_others, 'byte')} in none of these patterns"
    return [*lines, others] if lines and num_others else lines


def _num_bytes(part: Pattern | Product) -> int:
    return part.num_bytes


class PatternSearch:
    """The search for patterns among the wrong bytes of one worker."""

    def __init__(self, worker: Key, labels: Mapping[str, Labels], poison: int) -> None:
        self.worker = worker
        self.poison = poison
        self.tensors = list(labels.values())
        self.number_of = {name: number for number, name in enumerate(labels)}
        # Labels of one tensor follow those of another.
        # Tensors whose bytes have the same coordinates, by name.
        self.alike = {
            name: np.array([have_equal_axes(tensor, other) for other in self.tensors])
            for name, tensor in labels.items()
        }
        self.bases = np.array([labels.base for labels in self.tensors], np.int64)
        self.ends = np.array([labels.end for labels in self.tensors], np.int64)
        self.products: dict[str, list[Product]] = {}
        self.num_unjoined = 0

    def add(self, labels: Labels, expected: Cells, cells: Cells) -> None:
        """Add cells of a tensor, of which some are wrong, with the labels that belong there.

        Both are (positions, pieces, bytes), as those of a :class:`Window`.
        """
        positions_per_chunk = max(1, CHUNK_CELLS // max(cells[:1].size, 1))
        for low in range(0, len(cells), positions_per_chunk):
            if self.num_unjoined > MAX_UNJOINED:
                break
            chunk = slice(low, low + positions_per_chunk)
            products = self._products(labels, expected[chunk], cells[chunk])
            self.num_unjoined += len(products)
            merged = _merged([*self.products.get(labels.name, ()), *products])
            merged.sort(key=_num_bytes, reverse=True)
            self.products[labels.name] = merged[:MAX_PRODUCTS]

    def _products(self, labels: Labels, expected: Cells, cells: Cells) -> list[Product]:
        """Return the wrong bytes of a tensor at some positions."""
        first = expected[:, 0, 0].astype(np.int64) - labels.base
        position = first // labels.bytes_per_position + labels.positions[0]
        first_label = labels.first(position)
        # All bytes of a position in the order of their numbers, which is the same for all.
        number = expected[0].astype(np.int64) - first_label[0]
        order = np.argsort(number[:, 0])
        number = number[order].reshape(-1)
        held = cells[:, order].reshape(len(cells), -1)
        # By how much each label is beyond the one that belongs there: (positions, bytes).
        shift = held.astype(np.int64) - (first_label[:, np.newaxis] + number)
        shift[held == 0] = _MISSING_SHIFT
        shift[held == self.poison] = _OUTSIDE_SHIFT
        # Positions with equal shifts, as nearly all have, are searched once.
        rows_by_shifts: dict[bytes, list[int]] = {}
        for row in np.flatnonzero(shift.any(1)).tolist():
            rows_by_shifts.setdefault(shift[row].tobytes(), []).append(row)
        classes = list(rows_by_shifts.values())
        runs = self._runs(labels, number, first_label, shift, classes)
        if runs is None:
            # Some positions hold labels behind a tensor's last: each is searched by itself.
            classes = [[row] for rows in classes for row in rows]
            runs = self._runs(labels, number, first_label, shift, classes)
            assert runs is not None
        stretches = [_stretches_of(position[rows]) for rows in classes]
        return _merged(
            self._product(labels, number_of_first, length, label, stretches[number_of_class])
            for number_of_class, number_of_first, length, label in runs[:MAX_RUNS].tolist()
        )

    def _runs(
        self,
        labels: Labels,
        number: Ints,
        first_label: Ints,
        shift: Ints,
        classes: Sequence[Sequence[int]],
    ) -> Ints | None:
        """Return runs of wrong bytes: class, number and length of each, and what its first holds.

        A run ends where the shift changes, or a coordinate along any axis but the finest, here or
        in what it holds. Returns ``None`` if positions of one class hold different tensors.
        """
        rows = [rows[0] for rows in classes]
        last_rows = [rows[-1] for rows in classes]
        shifts = shift[rows]
        begins = np.ones(shifts.shape, bool)
        begins[:, 1:] = shifts[:, 1:] != shifts[:, :-1]
        begins[:, 1:] |= np.diff(number) > 1
        begins[:, 1:] |= np.diff(number // row_bytes(labels)) > 0
        of_class, column = np.nonzero(begins)
        length = np.diff(np.flatnonzero(begins), append=shifts.size)
        label = shifts[of_class, column]
        is_label = label > _OUTSIDE_SHIFT
        label[is_label] += (first_label[rows][of_class] + number[column])[is_label]
        is_wrong = shifts[of_class, column] != 0
        runs = np.stack([of_class, number[column], length, label], axis=1)[is_wrong]
        # Where what is held goes on in another row, or tensor, a run is cut in two.
        while (is_cut := (left := self._left(labels, runs[:, 3])) < runs[:, 2]).any():
            rest = runs[is_cut]
            rest[:, 1] += left[is_cut]
            rest[:, 2] -= left[is_cut]
            rest[:, 3] += left[is_cut]
            runs[is_cut, 2] = left[is_cut]
            runs = np.concatenate([runs, rest])
        # The labels that the last position of each class holds.
        is_label = runs[:, 3] > _OUTSIDE_SHIFT
        begin = runs[is_label, 3]
        end = begin + (first_label[last_rows] - first_label[rows])[runs[is_label, 0]]
        return runs if np.array_equal(self._tensor(begin), self._tensor(end)) else None

    def _tensor(self, label: Ints) -> Ints:
        return np.searchsorted(self.ends, label, side="right")

    def _left(self, labels: Labels, label: Ints) -> Ints:
        """Return how many labels go on from each in one row of its tensor, or in its tensor."""
        left = np.full(label.shape, np.iinfo(np.int64).max)
        is_label = label > _OUTSIDE_SHIFT
        tensor = self._tensor(label[is_label])
        number = label[is_label] - self.bases[tensor]
        in_row = row_bytes(labels) - number % row_bytes(labels)
        in_tensor = self.ends[tensor] - label[is_label]
        left[is_label] = np.where(self.alike[labels.name][tensor], in_row, in_tensor)
        return left

    def _product(
        self,
        labels: Labels,
        number: int,
        length: int,
        label: int,
        positions: Stretches,
    ) -> Product:
        """Return a run of bytes, the first of which holds a label, at some positions."""
        fault = {_MISSING_SHIFT: MISSING, _OUTSIDE_SHIFT: OUTSIDE}.get(label, "")
        held = labels
        held_number = number
        if not fault:
            tensor = int(self.ends.searchsorted(label, side="right"))
            if self.alike[labels.name][tensor]:
                held = self.tensors[tensor]
            else:
                fault = OTHER
        if not fault:
            ordinal, held_number = divmod(label - held.base, held.bytes_per_position)
            shift = ordinal + int(held.positions[0]) - positions[0].start
            positions = tuple(stretch._replace(shift=shift) for stretch in positions)
        here = number % row_bytes(labels)
        axes = [Stretch(here, here + length, held_number % row_bytes(labels) - here)]
        for name, weight in labels.weights[1:]:
            here = number // weight % labels.sizes[name]
            there = held_number // weight % labels.sizes[name]
            axes.append(Stretch(here, here + 1, there - here))
        return Product(fault, held.name, (*((stretch,) for stretch in axes), positions))

    def patterns(self, windows: Iterable[Window]) -> list[Pattern]:
        """Return the patterns of all bytes that were added.

        ``windows`` are those of all views of the worker, which say what it needs.
        """
        numbers: dict[str, list[Ints]] = {}
        positions: dict[str, Ints] = {}
        for held in windows:
            if held.positions.size and held.number.size:
                piece = np.arange(held.cells.shape[1])
                number = np.add.outer(held.number, piece).reshape(-1)
                numbers.setdefault(held.labels.name, []).append(number)
                before = positions.get(held.labels.name, held.positions)
                positions[held.labels.name] = np.union1d(before, held.positions)
        needed = {name: np.concatenate(parts) for name, parts in numbers.items()}
        patterns = []
        for name, products in self.products.items():
            if np.unique(needed[name]).size < needed[name].size:
                continue  # a byte that two views have would be named as one
            labels = self.tensors[self.number_of[name]]
            axes = _needed_axes(labels, needed[name], positions[name])
            for product in products:
                parts = {}
                for (axis, whole), stretches in zip(axes.items(), product.axes, strict=True):
                    is_whole = _where(stretches) == whole.stretches
                    parts[axis] = attrs.evolve(whole, stretches=stretches, whole=is_whole)
                tensors = {name: product.held}
                pattern = Pattern(
                    product.fault,
                    product.num_bytes,
                    (self.worker,),
                    tensors,
                    {*tensors} == {*needed},
                    parts,
                )
                patterns.append(pattern)
        of_tensors = joined_patterns(patterns, by_worker=False)
        return [
            attrs.evolve(pattern, all_tensors={*pattern.tensors} == {*needed})
            for pattern in of_tensors
        ]


def row_bytes(labels: Labels) -> int:
    """Return the bytes of a tensor along its finest axis."""
    return labels.itemsize * (labels.sizes[labels.weights[0][0]] if labels.weights else 1)


def have_equal_axes(labels: Labels, other: Labels) -> bool:
    """Return whether the bytes of two tensors have the same coordinates."""
    names = [name for name, _ in labels.weights]
    sizes = [labels.sizes[name] for name in names]
    return (
        labels.weights == other.weights
        and labels.itemsize == other.itemsize
        and sizes == [other.sizes[name] for name in names]
    )


def _needed_axes(labels: Labels, number: Ints, positions: Ints) -> dict[str, PatternPart]:
    """Return the coordinates along each axis of bytes by number, with the positions."""
    finest = labels.weights[0][0] if labels.weights else "byte"
    bytes_here = _stretches_of(number % row_bytes(labels))
    axes = {finest: PatternPart(bytes_here, True, row_bytes(labels), labels.itemsize)}
    for name, weight in labels.weights[1:]:
        size = labels.sizes[name]
        axes[name] = PatternPart(_stretches_of(number // weight % size), True, size)
    axes[POSITION] = PatternPart(_stretches_of(positions), True)
    return axes
