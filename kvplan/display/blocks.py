"""What the bytes of a block hold: for each layer of a worker, its cells in the order of memory.

A cell is the longest contiguous bytes of a block that differ along one axis at most. Consecutive
cells that are a box, an interval of each axis, can be drawn as one.

>>> from kvplan import Model
>>> worker = Model.shipped("llama-3.1-8b").engine("decode", tp=4, layout="LBNHC")[1]
>>> layer, *_ = layers_of(worker)
>>> layer.cells.axes, layer.cells.start[:4].tolist()
(('tensor', 'token', 'head', 'kv', 'dim'), [0, 256, 512, 768])
>>> layer.cells.low[3].tolist(), layer.cells.high[3].tolist()
([0, 0, 3, 1, 0], [1, 1, 4, 2, 128])
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import at_most
from kvplan._text import count, fold, intervals, split
from kvplan.describe.views import Group, View
from kvplan.describe.worker import Worker

TENSOR: Final = "tensor"
"""The axis along the tensors that share a block."""

MAX_CELLS: Final = 1 << 16
"""Cells of a block at most."""


@attrs.frozen
class Interval:
    """Coordinates ``[start, stop)`` of an axis; with ``has_gaps``, only some of them.

    >>> print(Interval("head", 4, 6), Interval("head", 4, 5), Interval("kv", 1, 2))
    4-5 4 V
    >>> print(Interval("position", 3, 10, has_gaps=True))
    3..9
    """

    axis: str
    start: int
    stop: int
    has_gaps: bool = False

    def __str__(self) -> str:
        if self.has_gaps:
            return f"{self.start}..{self.stop - 1}"
        if self.axis == "kv" and self.stop <= 2:
            return "KV"[self.start : self.stop]
        return str(self.start) if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"


@attrs.frozen(eq=False)
class BlockCells:
    """The cells of a block by ascending offset, and the axes from the slowest to the fastest.

    Cell ``i`` has the bytes ``[start[i], stop[i])`` of the view number ``view[i]``, whose elements
    have ``itemsize[i]`` bytes, and the coordinates ``[low[i, a], high[i, a])`` of axis ``a``. Of
    an axis that its view lacks it has ``[0, 1)``. ``fast[i]`` is the one axis along which it has
    several, or -1. ``sizes`` are global, ``names`` those of the tensors within a layer.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    start: Ints
    stop: Ints
    view: Ints
    itemsize: Ints
    fast: Ints
    low: Ints
    high: Ints

    @classmethod
    def of(cls, views: Sequence[View], title: str) -> BlockCells:
        """Return the cells of the views of one layer. Raises ``RANGE`` for too many."""
        base = views[0].offset_bytes
        sizes: dict[str, int] = {}
        for view in views:
            sizes |= {axis: size for axis, size in view.sizes.items() if size > 1}
        axes = [TENSOR, *sizes]
        names = tuple(dict.fromkeys(map(name_in_layer, views)))
        columns: list[tuple[Ints, ...]] = []
        for number, view in enumerate(views):
            start, stop, fast, low, high = _cells_of(view, axes, title)
            low[:, 0] = names.index(name_in_layer(view))
            high[:, 0] = low[:, 0] + 1
            same = np.zeros_like(start)
            offset = view.offset_bytes - base
            itemsize = same + view.itemsize
            columns.append(
                (start + offset, stop + offset, same + number, itemsize, fast, low, high)
            )
        joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        start, stop, view_of, itemsize, fast, low, high = (column[order] for column in joined)
        # The slowest axis changes least from cell to cell; the one within cells is the fastest.
        changes = np.count_nonzero(low[1:] != low[:-1], axis=0)
        is_fast = (high - low).max(axis=0) > 1
        ranks = sorted(range(len(axes)), key=lambda axis: (bool(is_fast[axis]), int(changes[axis])))
        rank_of = np.append(np.argsort(ranks), -1)
        return cls(
            axes=tuple(axes[rank] for rank in ranks),
            sizes=tuple([len(names), *sizes.values()][rank] for rank in ranks),
            names=names,
            start=start,
            stop=stop,
            view=view_of,
            itemsize=itemsize,
            fast=rank_of[fast],
            low=low[:, ranks],
            high=high[:, ranks],
        )

    @cached_property
    def content(self) -> tuple[Any, ...]:
        """What equal cells of several groups share."""
        columns = (self.start, self.stop, self.itemsize, self.low, self.high)
        return self.axes, self.sizes, self.names, *(column.tobytes() for column in columns)

    @property
    def runs(self) -> Iterator[tuple[int, int]]:
        """Start and stop of each contiguous run of bytes."""
        heads = np.flatnonzero(np.append(True, self.start[1:] != self.stop[:-1]))
        lasts = np.append(heads[1:], self.start.size) - 1
        return zip(self.start[heads].tolist(), self.stop[lasts].tolist(), strict=True)

    def at(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the cell of ranges of bytes, and their coordinates: each is within one cell."""
        cell = np.searchsorted(self.start, start, "right") - 1
        low, high = self.low[cell], self.high[cell]
        rows = np.flatnonzero(self.fast[cell] >= 0)
        columns = self.fast[cell][rows]
        itemsize = self.itemsize[cell][rows]
        low[rows, columns] += (start - self.start[cell])[rows] // itemsize
        high[rows, columns] = low[rows, columns] + (stop - start)[rows] // itemsize
        return cell, low, high


def name_in_layer(view: View) -> str:
    """Return what distinguishes a tensor's name from those of the same layer."""
    _, number, suffix = split(view.name)
    return suffix.lstrip("._") if number is not None and suffix.strip("._") else view.name


def _cells_of(view: View, axes: Sequence[str], title: str) -> tuple[Ints, ...]:
    """Return start, stop, fast axis and coordinates of a view's cells, from byte 0 on."""
    weights, inner = [1] * len(view.axes), dict[str, int]()
    for number, digit in reversed([*enumerate(view.axes)]):
        weights[number] = inner.get(digit.name, 1)
        inner[digit.name] = weights[number] * digit.size
    several = [number for number, digit in enumerate(view.axes) if digit.extent > 1]
    fast = [
        number
        for number in several
        if view.axes[number].stride_bytes == view.itemsize and weights[number] == 1
    ][:1]
    outer = [number for number in several if number not in fast]
    shape = [view.axes[number].extent for number in outer]
    num_cells = int(np.prod(shape, dtype=object)) if shape else 1
    at_most(MAX_CELLS, num_cells, "cells of a block", f"draw {title}")
    index = np.indices(shape).reshape(len(shape), num_cells)
    start = np.zeros(num_cells, np.int64)
    low = np.zeros((num_cells, len(axes)), np.int64)
    for number, digit in enumerate(view.axes):
        if digit.name not in axes:
            continue
        step = index[outer.index(number)] if number in outer else 0
        start += step * digit.stride_bytes
        low[:, axes.index(digit.name)] += (digit.start + step) * weights[number]
    high = low + 1
    length = view.itemsize
    column = np.full(num_cells, -1)
    for number in fast:
        column[:] = axes.index(view.axes[number].name)
        high[:, column[0]] += view.axes[number].extent - 1
        length *= view.axes[number].extent
    return start, start + length, column, low, high


def boxes(sides: Sequence[tuple[Ints, Ints]], lengths: Ints, itemsize: int) -> Iterator[slice]:
    """Yield consecutive cells of one tensor that are a box on each of ``sides``, as many as can be.

    A side has the coordinates ``low`` and ``high`` of the cells, whose ``lengths`` are in bytes.
    """
    first = 0
    while first < lengths.size:
        is_box = np.ones(lengths.size - first, bool)
        for low, high in sides:
            extent = np.maximum.accumulate(high[first:]) - np.minimum.accumulate(low[first:])
            is_box &= extent.prod(axis=1) * itemsize == np.cumsum(lengths[first:])
        stop = first + int(np.flatnonzero(is_box)[-1]) + 1
        yield slice(first, stop)
        first = stop


@attrs.frozen(eq=False)
class DrawnLayer:
    """What one layer has in each block of a group, in one region.

    ``names`` are its tensors, one for each view. Equal layers share their ``cells``. The block of
    id 0 begins at byte ``offset`` of region number ``region``. Up to what the group has next in
    memory there are ``rest_bytes``, padding or bytes of other groups. ``key`` is the first tensor's
    name up to its first number, and the number.
    """

    key: tuple[str, int | None]
    names: tuple[str, ...]
    views: tuple[View, ...]
    group: Group
    region: int
    offset: int
    num_blocks: int
    block_stride_bytes: int
    rest_bytes: int
    cells: BlockCells

    @property
    def size_bytes(self) -> int:
        """The bytes from the first to the last one."""
        return int(self.cells.stop.max())


def layers_of(worker: Worker) -> tuple[DrawnLayer, ...]:
    """Return what one block of each group holds, layer by layer and region by region.

    The first number in a tensor's name is its layer.
    """
    views_by_layer: dict[Any, list[tuple[View, int]]] = {}
    starts: dict[Any, list[int]] = {}
    for view, geometry in zip(worker.views, worker.geometry_of, strict=True):
        before, number, _ = split(view.name)
        key = view.region, view.group, view.block_stride_bytes, before, number
        views_by_layer.setdefault(key, []).append((view, geometry))
    for (region, group, *_), members in views_by_layer.items():
        members.sort(key=lambda member: member[0].offset_bytes)
        starts.setdefault((region, group), []).append(members[0][0].offset_bytes)
    regions = {region.name: number for number, region in enumerate(worker.regions)}
    groups = {group.name: group for group in worker.groups}
    # Layers are equal if their views have the same geometries at the same distances.
    cells: dict[Any, BlockCells] = {}
    layers = []
    for (region, group, stride, before, number), members in views_by_layer.items():
        views = tuple(view for view, _ in members)
        first = views[0].offset_bytes
        shape = [
            (split(view.name)[2], geometry, view.offset_bytes - first) for view, geometry in members
        ]
        kind = group, before, tuple(shape)
        if kind not in cells:
            cells[kind] = BlockCells.of(views, views[0].name)
        size = int(cells[kind].stop.max())
        # Up to the next layer, or to where the first layer begins in the next block.
        later = [start for start in starts[region, group] if start > first]
        end = min(later, default=min(starts[region, group]) + stride) - first
        layers.append(
            DrawnLayer(
                key=(before, number),
                names=tuple(view.name for view in views),
                views=views,
                group=groups[group],
                region=regions[region],
                offset=first,
                num_blocks=min(view.num_blocks for view in views),
                block_stride_bytes=stride,
                rest_bytes=max(end - size, 0) if views[0].num_blocks > 1 or later else 0,
                cells=cells[kind],
            )
        )
    return tuple(layers)


def folded(names: Iterable[str]) -> str:
    """Return names of tensors, equal layers folded.

    >>> folded(["layers.0.conv.x", "layers.0.ssm", "layers.1.conv.x", "layers.1.ssm"])
    'layers.0-1.{conv.x, ssm}'
    """
    names = tuple(dict.fromkeys(names))
    parts = [split(name) for name in names]
    prefixes = {before for before, _, _ in parts}
    # Layers fold if all names differ in their number alone, or in what follows it.
    suffixes = tuple(dict.fromkeys(after for _, _, after in parts))
    numbers = [number for _, number, _ in parts if number is not None]
    if len(suffixes) == 1 or len(numbers) < len(parts) or len(prefixes) > 1:
        return fold(names)
    dot = "." if all(suffix.startswith(".") for suffix in suffixes) else ""
    kinds = ", ".join(suffix.removeprefix(dot) for suffix in suffixes)
    return f"{parts[0][0]}{intervals(numbers)}{dot}{{{kinds}}}"


def facts(layers: Sequence[DrawnLayer]) -> str:
    """Return in words how many equal layers, bytes and blocks there are."""
    layer = layers[0]
    held = count(int((layer.cells.stop - layer.cells.start).sum()), "byte")
    steps = {(other.region, other.offset - one.offset) for one, other in itertools.pairwise(layers)}
    step = next(iter(steps))[1] if len(steps) == 1 else 0
    apart = f" {step} bytes apart" if step > 0 else ""
    one_of = f"one of {len(layers)} equal layers{apart}, " if len(layers) > 1 else ""
    blocks = f"each of {count(layer.num_blocks, 'block')} of group {layer.group.name}"
    return f"{one_of}{held} in {blocks}, stride {layer.block_stride_bytes}"
