"""The search for patterns: runs of wrong bytes in memory, and the products that they join to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.describe.worker import Key
from kvplan.verification.labels import Labels, Window
from kvplan.verification.memory import Cells
from kvplan.verification.patterns import (
    MISSING,
    OTHER,
    OUTSIDE,
    POSITION,
    Pattern,
    PatternAxis,
    joined_patterns,
)
from kvplan.verification.product import (
    MAX_PRODUCTS,
    AxisRange,
    AxisRanges,
    Product,
    joined_products,
    ranges_of,
    unshifted,
)

if TYPE_CHECKING:
    from kvplan._arrays import Ints

MAX_RUNS: Final = 1 << 16
"""Runs of wrong bytes of one chunk that are looked at; bytes of the others are in no pattern."""

MAX_UNJOINED: Final = 1 << 15
"""Products of all chunks of a worker together: the search ends where runs join to no fewer."""

_NO_LABEL: Final = -1
_POISON: Final = -2
"""Instead of a label: in bytes that were never written, or copied from outside the request."""

_FAR: Final = -(1 << 62)
"""Added to these numbers, so that no label of bytes is as far beyond the one that belongs there."""


class PatternSearch:
    """The search for patterns among the wrong bytes of one worker."""

    def __init__(self, worker: Key, labels: Mapping[str, Labels], poison: int) -> None:
        self.worker = worker
        self.poison = poison
        self.tensors = list(labels.values())
        self.number_of = {name: number for number, name in enumerate(labels)}
        # Tensors whose bytes have the same coordinates, by name.
        self.alike: dict[str, npt.NDArray[np.bool_]] = {}
        for name, tensor in labels.items():
            is_alike = [have_equal_axes(tensor, candidate) for candidate in self.tensors]
            self.alike[name] = np.array(is_alike)
        # Labels of one tensor follow those of another.
        self.bases = np.array([labels.base for labels in self.tensors], np.int64)
        self.ends = np.array([labels.end for labels in self.tensors], np.int64)
        self.products: dict[str, list[Product]] = {}
        self.num_unjoined = 0

    def add(self, labels: Labels, expected: Cells, cells: Cells) -> None:
        """Add cells of a tensor, of which some are wrong, with the labels that belong there.

        Both are (positions, segments, bytes), as those of a :class:`Window`.
        """
        if self.num_unjoined > MAX_UNJOINED:
            return
        products = self._products(labels, expected, cells)
        self.num_unjoined += len(products)
        merged = joined_products([*self.products.get(labels.name, ()), *products])
        merged.sort(key=attrgetter("num_bytes"), reverse=True)
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
        cells = cells[:, order].reshape(len(cells), -1)
        held = cells.astype(np.int64)
        held[cells == 0] = _NO_LABEL
        held[cells == self.poison] = _POISON
        is_label = held >= 0
        # By how much each label is beyond the one that belongs there: (positions, bytes).
        shift = np.where(is_label, held - (first_label[:, np.newaxis] + number), held + _FAR)
        wrong = np.flatnonzero(shift.any(1))
        position, held, shift = position[wrong], held[wrong], shift[wrong]
        tensor = np.searchsorted(self.ends, np.maximum(held, self.bases[0]), side="right")
        # Positions with equal shifts in the same tensors, as nearly all have, are searched once.
        rows_by_content: dict[bytes, list[int]] = {}
        for row, shifts in enumerate(shift):
            content = shifts.tobytes() + tensor[row].tobytes()
            rows_by_content.setdefault(content, []).append(row)
        classes = list(rows_by_content.values())
        first_rows = [rows[0] for rows in classes]
        runs = self._runs(labels, number, held[first_rows], shift[first_rows], tensor[first_rows])
        ranges = [ranges_of(position[rows]) for rows in classes]
        return joined_products(
            self._product(labels, number_of_first, length, label, ranges[number_of_class])
            for number_of_class, number_of_first, length, label in runs[:MAX_RUNS].tolist()
        )

    def _runs(self, labels: Labels, number: Ints, held: Ints, shift: Ints, tensor: Ints) -> Ints:
        """Return runs of wrong bytes: class, number and length of each, and what its first holds.

        A run ends where the shift changes, or a coordinate along any axis but the finest, here or
        in what it holds. ``held``, ``shift`` and ``tensor`` are (classes, bytes).
        """
        num_row_bytes = row_bytes(labels)
        # A tensor with other axes has no rows that could be compared.
        has_rows = (held >= 0) & self.alike[labels.name][tensor]
        held_row = np.where(has_rows, (held - self.bases[tensor]) // num_row_bytes, -1)
        row = np.broadcast_to(number // num_row_bytes, held.shape)
        begins = np.ones(shift.shape, bool)
        begins[:, 1:] = np.diff(number) > 1
        for content in (shift, tensor, row, held_row):
            begins[:, 1:] |= content[:, 1:] != content[:, :-1]
        of_class, column = np.nonzero(begins)
        length = np.diff(np.flatnonzero(begins), append=shift.size)
        runs = np.stack([of_class, number[column], length, held[of_class, column]], axis=1)
        is_wrong = shift[of_class, column] != 0
        wrong: Ints = runs[is_wrong]
        return wrong

    def _product(
        self,
        labels: Labels,
        number: int,
        length: int,
        label: int,
        positions: AxisRanges,
    ) -> Product:
        """Return a run of bytes, the first of which holds a label, at some positions."""
        fault = {_NO_LABEL: MISSING, _POISON: OUTSIDE}.get(label, "")
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
            positions = tuple(axis_range._replace(shift=shift) for axis_range in positions)
        first_byte = number % row_bytes(labels)
        shift = held_number % row_bytes(labels) - first_byte
        axes: list[AxisRanges] = [(AxisRange(first_byte, first_byte + length, shift),)]
        for name, weight in labels.weights[1:]:
            coordinate = number // weight % labels.sizes[name]
            held_coordinate = held_number // weight % labels.sizes[name]
            shift = held_coordinate - coordinate
            axes.append((AxisRange(coordinate, coordinate + 1, shift),))
        return Product(fault, held.name, (*axes, positions))

    def patterns(self, windows: Iterable[Window]) -> list[Pattern]:
        """Return the patterns of all bytes that were added.

        ``windows`` are those of all views of the worker, which say what it needs.
        """
        numbers: dict[str, list[Ints]] = {}
        positions: dict[str, Ints] = {}
        for held in windows:
            if held.positions.size and held.number.size:
                segment = np.arange(held.cells.shape[1])
                number = np.add.outer(held.number, segment).reshape(-1)
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
                pattern_axes = {}
                for (axis, whole), ranges in zip(axes.items(), product.axes, strict=True):
                    is_whole = unshifted(ranges) == whole.ranges
                    pattern_axes[axis] = attrs.evolve(whole, ranges=ranges, whole=is_whole)
                tensors = {name: product.held}
                pattern = Pattern(
                    product.fault,
                    product.num_bytes,
                    (self.worker,),
                    tensors,
                    {*tensors} == {*needed},
                    pattern_axes,
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


def have_equal_axes(tensor: Labels, candidate: Labels) -> bool:
    """Return whether the bytes of two tensors have the same coordinates."""
    return (
        tensor.weights == candidate.weights
        and tensor.itemsize == candidate.itemsize
        and all(tensor.sizes[name] == candidate.sizes[name] for name, _ in tensor.weights)
    )


def _needed_axes(labels: Labels, number: Ints, positions: Ints) -> dict[str, PatternAxis]:
    """Return the coordinates along each axis of bytes by number, with the positions."""
    finest = labels.weights[0][0] if labels.weights else "byte"
    bytes_here = ranges_of(number % row_bytes(labels))
    axes = {finest: PatternAxis(bytes_here, True, row_bytes(labels), labels.itemsize)}
    for name, weight in labels.weights[1:]:
        size = labels.sizes[name]
        axes[name] = PatternAxis(ranges_of(number // weight % size), True, size)
    axes[POSITION] = PatternAxis(ranges_of(positions), True)
    return axes
