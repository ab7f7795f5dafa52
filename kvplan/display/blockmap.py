"""What each byte of a KV cache block holds: which tensor, head, token and layer, found from a worker's strides.

A :class:`BlockMap` describes the bytes that one layer has of a block, as axes nested from the slowest to the fastest.
Layers with equal maps share one. A :class:`Box` is the way back: contiguous bytes, and their interval on each axis.

>>> from kvplan import Model
>>> model = Model.shipped("llama-3.1-8b")
>>> (found,) = block_maps(model.engine("decode", tp=4, layout="BLHNC")[1])
>>> axis, chain = found.all_layers[0], []
>>> while axis.inside:
...     chain, axis = [*chain, str(axis)], axis.inside[0]
>>> print(found.title, chain)
layers.0-31.attn ['layer 32 x 16384', 'head 2 x 8192', 'token 16 x 512', 'kv 2 x 256']
>>> for box in found.boxes(7680, 9728):
...     print(box.start, box.stop, *(f"{interval.axis} {interval}" for interval in box.path))
7680 8192 head 2 token 15
8192 9728 head 3 token 0-2
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints, heads
from kvplan._text import count, fold, intervals, split
from kvplan.describe.views import Geometry, Group, View
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError

TENSOR: Final = "tensor"
"""The axis along the tensors that share a block."""

MAX_PIECES: Final = 1 << 16
"""Contiguous pieces of a block at most."""


@attrs.frozen
class Interval:
    """Coordinates ``[start, stop)`` on an axis; with ``has_gaps``, only some from the first to the last of them.

    ``name`` replaces the numbers; ``more`` is printed where there is room.

    >>> print(Interval("head", 4, 6), Interval("head", 4, 5), Interval("kv", 1, 2), Interval(TENSOR, 0, 1, "conv.x"))
    4-5 4 V conv.x
    >>> print(Interval("position", 3, 10, has_gaps=True))
    3..9
    """

    axis: str
    start: int
    stop: int
    name: str = ""
    more: str = ""
    has_gaps: bool = False

    def __str__(self) -> str:
        if self.name:
            return self.name
        if self.has_gaps:
            return f"{self.start}..{self.stop - 1}"
        if self.axis == "kv" and self.stop <= 2:
            return "KV"[self.start : self.stop]
        return str(self.start) if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"


Path = tuple[Interval, ...]
"""The intervals that lead to some bytes, the slowest axis first. An axis that is not named is there whole."""


def extend(path: Path, interval: Interval) -> Path:
    """The path with one more interval. A finer digit of an axis counts from where the coarser digit is."""
    coarser = [one.start for one in path if one.axis == interval.axis][-1:]
    for at in coarser:
        interval = attrs.evolve(interval, start=interval.start + at, stop=interval.stop + at)
    return *path, interval


@attrs.frozen
class StridedAxis:
    """One axis of a block: a part of ``size`` bytes for each coordinate, every ``step`` bytes, the first at ``offset``.

    ``inside`` are the faster axes of each part, by ascending offset; empty where a part is one element. An axis of
    several digits, such as tokens in kernel blocks, is one StridedAxis per digit: a part of an outer digit holds
    ``width`` coordinates, with gaps if ``gaps`` has the axis. ``gaps`` are the axes, this one or slower, on which a
    part has not all coordinates from its first to its last. ``tensor`` names the tensors that have the bytes, and
    ``views`` has the indices of their views.
    """

    tensor: str
    views: tuple[int, ...]
    axis: str
    coordinates: range | tuple[int, ...]
    width: int
    offset: int
    step: int
    size: int
    inside: tuple[StridedAxis, ...] = ()
    gaps: frozenset[str] = frozenset()

    @property
    def stop(self) -> int:
        """Where the last part ends."""
        return self.offset + (len(self.coordinates) - 1) * self.step + self.size

    @property
    def joins(self) -> bool:
        """Whether consecutive parts are contiguous bytes, and their coordinates one interval."""
        same = isinstance(self.coordinates, range) and self.coordinates.step == self.width
        return same and self.size == self.step and not self.gaps

    def interval(self, first: int, last: int) -> Interval:
        """The coordinates of the parts from the ``first`` to the ``last``."""
        start, stop = self.coordinates[first], self.coordinates[last] + self.width
        return Interval(self.axis, start, stop, has_gaps=self.axis in self.gaps)

    def __str__(self) -> str:
        return f"{self.axis} {len(self.coordinates)} x {self.step}"


@attrs.frozen
class Box:
    """Contiguous bytes ``[start, stop)`` of a block map, the path to them, and the indices of the views they are of."""

    start: int
    stop: int
    path: Path
    views: tuple[int, ...] = ()


@attrs.frozen
class BlockMap:
    """The bytes that each block of a group has for one layer in one region, and which layers have equal bytes.

    ``tensors`` are the names in all of these layers; ``places`` the index of each layer's region, and the offset in it
    of block 0. ``size_bytes`` counts from the first byte to the last; up to what the group has next in memory there are
    ``rest_bytes`` more, padding or bytes of other groups. ``axes`` are those of one layer. ``all_layers`` includes the
    layers as an axis, where they are at one step in a region; elsewhere it equals ``axes``.
    """

    group: Group
    tensors: tuple[str, ...]
    views: tuple[View, ...] = attrs.field(repr=False)
    places: tuple[tuple[int, int], ...] = attrs.field(repr=False)
    num_blocks: int
    block_stride_bytes: int
    size_bytes: int
    rest_bytes: int
    axes: tuple[StridedAxis, ...] = attrs.field(repr=False)
    all_layers: tuple[StridedAxis, ...] = attrs.field(repr=False)

    @property
    def title(self) -> str:
        """The names of the tensors, equal layers folded."""
        return folded(self.tensors)

    @property
    def facts(self) -> str:
        """How many equal layers, bytes and blocks there are."""
        layers = f"one of {len(self.places)} equal layers, " if len(self.places) > 1 else ""
        blocks = f"each of {count(self.num_blocks, 'block')} of group {self.group.name}"
        held = count(sum(view.block_bytes for view in self.views), "byte")
        return f"{layers}{held} in {blocks}, stride {self.block_stride_bytes}"

    @property
    def layer(self) -> tuple[str, int | None]:
        """The first layer, as the part of a tensor's name up to its first number, and the number."""
        return split(self.tensors[0])[:2]

    def layers(self) -> Iterator[BlockMap]:
        """The map of each layer by itself."""
        each = len(self.views)
        for i in range(len(self.places)):
            names = self.tensors[i * each : (i + 1) * each]
            yield attrs.evolve(self, tensors=names, places=self.places[i : i + 1])

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """The bytes ``[start, stop)`` of a piece as boxes, as large as they can be."""
        return _boxes(self.axes, start, stop, 0, ())

    @cached_property
    def pieces(self) -> Ints:
        """The contiguous bytes, (n, 2): start and stop. Raises ``RANGE`` for more than :data:`MAX_PIECES`."""
        return _pieces(self.axes, self.title)


def folded(names: Iterable[str]) -> str:
    """Names of tensors, equal layers folded.

    >>> folded(["layers.0.conv.x", "layers.0.ssm", "layers.1.conv.x", "layers.1.ssm"])
    'layers.0-1.{conv.x, ssm}'
    """
    names = tuple(names)
    parts = [split(name) for name in names]
    after = tuple(dict.fromkeys(after for _, _, after in parts))
    numbers = [number for _, number, _ in parts if number is not None]
    if len(after) == 1 or len(numbers) < len(parts) or len({before for before, _, _ in parts}) > 1:
        return fold(names)
    dot = "." * all(name.startswith(".") for name in after)
    return f"{parts[0][0]}{intervals(numbers)}{dot}{{{', '.join(name.removeprefix(dot) for name in after)}}}"


def block_maps(worker: Worker) -> tuple[BlockMap, ...]:
    """What one block of each group holds: a map for each layer and region, equal ones folded.

    The first number in a tensor's name is its layer.
    """
    layers: dict[Any, list[tuple[View, Geometry]]] = {}
    for view, geometry in zip(worker.views, worker.geometry_of, strict=True):
        key = view.region, view.group, view.block_stride_bytes, *split(view.name)[:2]
        layers.setdefault(key, []).append((view, worker.geometries[geometry]))
    equal: dict[Any, list[list[tuple[View, Geometry]]]] = {}
    starts: dict[tuple[str, str], list[int]] = {}
    for (region, group, _, before, _), members in layers.items():
        members.sort(key=lambda member: member[0].offset_bytes)
        start = members[0][0].offset_bytes
        starts.setdefault((region, group), []).append(start)
        shape = tuple((split(view.name)[2], id(geometry), view.offset_bytes - start) for view, geometry in members)
        equal.setdefault((group, before, shape), []).append(members)
    return tuple(_block_map(worker, layers, starts) for layers in equal.values())


_Layer = Sequence[tuple[View, Geometry]]
"""The views of one layer in one region, by ascending offset."""


def _block_map(worker: Worker, layers: Sequence[_Layer], starts: Mapping[tuple[str, str], Sequence[int]]) -> BlockMap:
    """The map of equal layers. ``starts`` has where layers begin, by region and group."""
    members, firsts = layers[0], [layer[0][0] for layer in layers]
    regions = {region.name: i for i, region in enumerate(worker.regions)}
    places = tuple((regions[view.region], view.offset_bytes) for view in firsts)
    view, geometry = members[0]
    axes, begins = _nested(members), starts[view.region, view.group]
    size, after = max(axis.stop for axis in axes), [start for start in begins if start > view.offset_bytes]
    end = min(after, default=min(begins) + view.block_stride_bytes) - view.offset_bytes
    return BlockMap(
        group=geometry.group,
        tensors=tuple(view.name for layer in layers for view, _ in layer),
        views=tuple(view for view, _ in members),
        places=places,
        num_blocks=min(view.num_blocks for view, _ in members),
        block_stride_bytes=view.block_stride_bytes,
        size_bytes=size,
        rest_bytes=max(end - size, 0) if view.num_blocks > 1 or after else 0,
        axes=axes,
        all_layers=_nested(members, _layer_axis(places, [split(view.name)[1] for view in firsts])),
    )


_Strides = list[tuple[str, range | tuple[int, ...], int]]
"""Name, coordinates and stride in bytes of axes or of their digits."""


def _layer_axis(places: Sequence[tuple[int, int]], numbers: Sequence[int | None]) -> _Strides:
    """The axis of layers that are in one region at one step; nothing for others."""
    steps = {after[1] - before[1] for before, after in itertools.pairwise(places)}
    known = tuple(number for number in numbers if number is not None)
    if len({region for region, _ in places}) > 1 or len(steps) != 1 or min(steps) <= 0 or len(known) < len(places):
        return []
    return [("layer", known, steps.pop())]


def _nested(members: _Layer, layers: Sequence[Any] = ()) -> tuple[StridedAxis, ...]:
    """The axes of the views of one layer: each view is a chain of axes, and chains that alternate are merged."""
    base = members[0][0].offset_bytes
    chains = []
    for i, (view, geometry) in enumerate(members):
        _, number, after = split(view.name)
        name = after.lstrip("._") if number is not None and after.strip("._") else view.name
        chain = StridedAxis(name, (i,), "element", range(1), 1, 0, view.itemsize, view.itemsize)
        inside: tuple[StridedAxis, ...] = ()
        widths: dict[str, int] = {}
        gaps: set[str] = set()
        slowest_first = sorted([*_strides(geometry), *layers], key=lambda s: (len(s[1]) > 1, -s[2]))
        for depth, (axis, coordinates, stride) in reversed([*enumerate(slowest_first)]):
            size, width = chain.stop, widths.get(axis, 1)
            step = stride if len(coordinates) > 1 else size
            here = frozenset(other for other, _, _ in slowest_first[: depth + 1] if other in gaps)
            chain = StridedAxis(name, (i,), axis, coordinates, width, 0, step, size, inside, here)
            if not isinstance(coordinates, range) or (coordinates.start, coordinates.step) != (0, width):
                gaps.add(axis)
            widths[axis], inside = coordinates[-1] + width, (chain,)
        chains.append(attrs.evolve(chain, offset=view.offset_bytes - base))
    return _merged(chains)


def _strides(geometry: Geometry) -> _Strides:
    """The axes of a view; those whose digits do not continue each other in memory, digit by digit."""
    found: _Strides = []
    for name, size in geometry.sizes.items():
        whole = geometry.segments[name]
        if size > 1 and whole.start.size == 1:
            found.append((name, range(int(whole.start[0]), int(whole.stop[0])), int(whole.stride[0])))
        elif size > 1:
            each = size
            for digit in [axis for axis in geometry.axes if axis.name == name and axis.size > 1]:
                each //= digit.size
                found.append((name, range(digit.start * each, digit.stop * each, each), digit.stride_bytes))
    return found


def _merged(axes: Sequence[StridedAxis]) -> tuple[StridedAxis, ...]:
    """Axes by ascending offset. Those whose bytes alternate become one, if they are equal; else they stay apart."""
    clusters: list[list[StridedAxis]] = []
    end = -1
    for axis in sorted(axes, key=lambda axis: axis.offset):
        if axis.offset >= end:
            clusters.append([])
        clusters[-1].append(axis)
        end = max(end, axis.stop)
    return tuple(axis for cluster in clusters for axis in (_one(cluster) or cluster))


def _one(axes: Sequence[StridedAxis]) -> list[StridedAxis]:
    """Equal axes of different tensors as one axis with all tensors inside; nothing if they are not equal."""
    first = axes[0]
    several = len(first.coordinates) > 1
    if len(axes) == 1 or len({(axis.axis, axis.coordinates, axis.width, axis.step * several) for axis in axes}) > 1:
        return []
    parts = [
        (axis, one)
        for axis in axes
        for one in axis.inside or (attrs.evolve(axis, axis="element", coordinates=range(1), offset=0, step=axis.size),)
    ]
    inside = _merged([attrs.evolve(one, offset=one.offset + axis.offset - first.offset) for axis, one in parts])
    size = max(axis.stop for axis in inside)
    if several and size > first.step:
        return []
    tensors = " + ".join(dict.fromkeys(axis.tensor for axis in axes))
    views = tuple(view for axis in axes for view in axis.views)
    step = first.step if several else size
    gaps = frozenset().union(*(axis.gaps for axis in axes))
    return [attrs.evolve(first, tensor=tensors, views=views, step=step, size=size, inside=inside, gaps=gaps)]


def named(axes: Sequence[StridedAxis], path: Path) -> Iterator[tuple[StridedAxis, Path]]:
    """Axes beside each other, each with the path into it: it names the tensor where there are several."""
    several = len({axis.tensor for axis in axes}) > 1
    for axis in axes:
        yield axis, (*path, Interval(TENSOR, 0, 1, axis.tensor)) if several else path


def _boxes(axes: Sequence[StridedAxis], start: int, stop: int, base: int, path: Path) -> Iterator[Box]:
    """The boxes of bytes ``[start, stop)``; ``axes`` are inside a part that begins at ``base``."""
    for axis, here in named(axes, path):
        begin = base + axis.offset
        low, high = max(start, begin), min(stop, base + axis.stop)
        i = (low - begin) // axis.step
        while (at := begin + i * axis.step) < high:
            parts = 1
            if axis.joins and low <= at:
                parts = max(min((high - at) // axis.step, len(axis.coordinates) - i), 1)
            end = at + (parts - 1) * axis.step + axis.size
            if low <= at and end <= high and not axis.gaps:
                yield Box(at, end, extend(here, axis.interval(i, i + parts - 1)), axis.views)
            else:
                inner = extend(here, axis.interval(i, i))
                yield from _boxes(axis.inside, max(low, at), min(high, end), at, inner)
            i += parts


def _pieces(axes: Sequence[StridedAxis], title: str) -> Ints:
    """The contiguous bytes of some axes, by ascending start."""
    found = []
    for axis in axes:
        inner, parts = _pieces(axis.inside, title) if axis.inside else np.array([[0, axis.size]]), len(axis.coordinates)
        if len(inner) == 1 and inner[0, 1] - inner[0, 0] == axis.step:
            inner, parts = np.array([[inner[0, 0], inner[0, 1] + (parts - 1) * axis.step]]), 1
        if parts * len(inner) > MAX_PIECES:
            expected, got = f"at most {MAX_PIECES} contiguous pieces of a block", f"{parts * len(inner)}"
            raise KVPlanError("RANGE", f"draw {title}", expected=expected, got=got)
        at = axis.offset + np.arange(parts) * axis.step
        found.append((at[:, None, None] + inner).reshape(-1, 2))
    start, stop = np.concatenate(found).T
    order = np.argsort(start)
    first = heads(start[order[1:]] == stop[order[:-1]])  # pieces that begin where the one before ends are one
    return np.stack([start[order[first]], stop[order[np.append(first[1:], order.size) - 1]]], axis=1)
