"""The tensor, head, token and layer of each byte of a KV cache block, by a worker's strides.

A :class:`BlockMap` describes the bytes that one layer has of a block, as axes nested from the
slowest to the fastest. Layers with equal maps share one. A :class:`Box` is the way back: contiguous
bytes, and their interval on each axis.

>>> from kvplan import Model
>>> model = Model.shipped("llama-3.1-8b")
>>> (block_map,) = block_maps(model.engine("decode", tp=4, layout="BLHNC")[1])
>>> axis = block_map.all_layers[0]
>>> chain = []
>>> while axis.inside:
...     chain.append(str(axis))
...     axis = axis.inside[0]
>>> print(block_map.title, chain)
layers.0-31.attn ['layer 32 x 16384', 'head 2 x 8192', 'token 16 x 512', 'kv 2 x 256']
>>> for box in block_map.boxes(7680, 9728):
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
from kvplan.budget import spend
from kvplan.describe.views import Geometry, Group, View
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError

TENSOR: Final = "tensor"
"""The axis along the tensors that share a block."""

PIECE_BYTES: Final = 500
"""What a piece of a block takes of a budget."""

MAX_PIECES: Final = 1 << 16
"""Contiguous pieces of a block at most."""


@attrs.frozen
class Interval:
    """Coordinates ``[start, stop)`` on an axis; with ``has_gaps``, only some from the first to the
    last of them.

    ``name`` replaces the numbers; ``more`` is printed where there is room.

    >>> print(Interval("head", 4, 6), Interval("head", 4, 5), Interval("kv", 1, 2))
    4-5 4 V
    >>> print(Interval(TENSOR, 0, 1, "conv.x"))
    conv.x
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
"""The intervals that lead to some bytes, the slowest axis first. Other axes are there whole."""


def extend(path: Path, interval: Interval) -> Path:
    """Return the path with one more interval.

    A finer digit of an axis counts from where the coarser digit is.
    """
    coarser = [before.start for before in path if before.axis == interval.axis]
    if coarser:
        start = interval.start + coarser[-1]
        stop = interval.stop + coarser[-1]
        interval = attrs.evolve(interval, start=start, stop=stop)
    return *path, interval


@attrs.frozen
class StridedAxis:
    """One axis of a block: a part of ``size`` bytes for each coordinate, every ``step`` bytes.

    The first part is at ``offset``. ``inside`` are the faster axes of each part, by ascending
    offset; empty where a part is one element. An axis of several digits, such as tokens in kernel
    blocks, is one StridedAxis per digit: a part of an outer digit holds ``width`` coordinates, with
    gaps if ``gaps`` has the axis. ``gaps`` are the axes, this one or slower, on which a part has
    not all coordinates from its first to its last. ``tensor`` names the tensors that have the
    bytes, and ``views`` has the indices of their views.
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
        """Return where the last part ends."""
        return self.offset + (len(self.coordinates) - 1) * self.step + self.size

    @property
    def joins(self) -> bool:
        """Return whether consecutive parts are contiguous, with coordinates in one interval."""
        is_interval = isinstance(self.coordinates, range) and self.coordinates.step == self.width
        return is_interval and self.size == self.step and not self.gaps

    def interval(self, first: int, last: int) -> Interval:
        """Return the coordinates of the parts from the ``first`` to the ``last``."""
        start = self.coordinates[first]
        stop = self.coordinates[last] + self.width
        return Interval(self.axis, start, stop, has_gaps=self.axis in self.gaps)

    def __str__(self) -> str:
        return f"{self.axis} {len(self.coordinates)} x {self.step}"


@attrs.frozen
class Box:
    """Contiguous bytes ``[start, stop)`` of a block map, the path to them, and indices of views."""

    start: int
    stop: int
    path: Path
    views: tuple[int, ...] = ()


@attrs.frozen
class BlockMap:
    """The bytes that each block of a group has for one layer in one region, and for equal layers.

    ``tensors`` are the names in all of these layers; ``places`` the index of each layer's region,
    and the offset in it of block 0. ``size_bytes`` counts from the first byte to the last; up to
    what the group has next in memory there are ``rest_bytes`` more, padding or bytes of other
    groups. ``axes`` are those of one layer. ``all_layers`` includes the layers as an axis, where
    they are at one step in a region; elsewhere it equals ``axes``.
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
        """Return the names of the tensors, equal layers folded."""
        return folded(self.tensors)

    @property
    def facts(self) -> str:
        """Return in words how many equal layers, bytes and blocks there are."""
        layers = f"one of {len(self.places)} equal layers, " if len(self.places) > 1 else ""
        blocks = f"each of {count(self.num_blocks, 'block')} of group {self.group.name}"
        held = count(sum(view.block_bytes for view in self.views), "byte")
        return f"{layers}{held} in {blocks}, stride {self.block_stride_bytes}"

    @property
    def layer(self) -> tuple[str, int | None]:
        """Return the first layer: a tensor's name up to its first number, and the number."""
        return split(self.tensors[0])[:2]

    def layers(self) -> Iterator[BlockMap]:
        """Yield the map of each layer by itself."""
        num_views = len(self.views)
        for i, place in enumerate(self.places):
            names = self.tensors[i * num_views : (i + 1) * num_views]
            yield attrs.evolve(self, tensors=names, places=(place,))

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Return the bytes ``[start, stop)`` of a piece as boxes, as large as they can be."""
        return _boxes(self.axes, start, stop, 0, ())

    @cached_property
    def pieces(self) -> Ints:
        """Return the contiguous bytes, (n, 2): start and stop.

        Raises ``RANGE`` for more than :data:`MAX_PIECES`.
        """
        return _pieces(self.axes, self.title)


def folded(names: Iterable[str]) -> str:
    """Return names of tensors, equal layers folded.

    >>> folded(["layers.0.conv.x", "layers.0.ssm", "layers.1.conv.x", "layers.1.ssm"])
    'layers.0-1.{conv.x, ssm}'
    """
    names = tuple(names)
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


_Layer = Sequence[tuple[View, Geometry]]
"""The views of one layer in one region, by ascending offset."""


def block_maps(worker: Worker) -> tuple[BlockMap, ...]:
    """Return what one block of each group holds: a map for each layer and region.

    Equal maps are folded. The first number in a tensor's name is its layer.
    """
    views_by_layer: dict[Any, list[tuple[View, Geometry]]] = {}
    for view, geometry in zip(worker.views, worker.geometry_of, strict=True):
        before, number, _ = split(view.name)
        key = view.region, view.group, view.block_stride_bytes, before, number
        views_by_layer.setdefault(key, []).append((view, worker.geometries[geometry]))
    # Layers are equal if their views have the same geometries at the same distances.
    equal_layers: dict[Any, list[_Layer]] = {}
    starts: dict[tuple[str, str], list[int]] = {}
    for (region, group, _, before, _), layer in views_by_layer.items():
        layer.sort(key=_offset_of_view)
        starts.setdefault((region, group), []).append(_offset_of_view(layer[0]))
        equal_layers.setdefault((group, before, _shape(layer)), []).append(layer)
    return tuple(_block_map(worker, layers, starts) for layers in equal_layers.values())


def _offset_of_view(member: tuple[View, Geometry]) -> int:
    view, _ = member
    return view.offset_bytes


def _shape(layer: _Layer) -> tuple[Any, ...]:
    """Return what equal layers share: the kind, geometry and place of each view."""
    start = _offset_of_view(layer[0])
    shape = []
    for view, geometry in layer:
        _, _, suffix = split(view.name)
        shape.append((suffix, id(geometry), view.offset_bytes - start))
    return tuple(shape)


def _block_map(
    worker: Worker,
    layers: Sequence[_Layer],
    starts: Mapping[tuple[str, str], Sequence[int]],
) -> BlockMap:
    """Return the map of equal layers. ``starts`` has where layers begin, by region and group."""
    layer = layers[0]
    view, geometry = layer[0]
    first_views = [first for (first, _), *_ in layers]
    region_index = {region.name: i for i, region in enumerate(worker.regions)}
    places = tuple((region_index[first.region], first.offset_bytes) for first in first_views)
    numbers = [split(first.name)[1] for first in first_views]
    axes = _nested(layer)
    size = max(axis.stop for axis in axes)
    # Up to the next layer, or to where the first layer begins in the next block.
    group_starts = starts[view.region, view.group]
    later = [start for start in group_starts if start > view.offset_bytes]
    end = min(later, default=min(group_starts) + view.block_stride_bytes) - view.offset_bytes
    names: list[str] = []
    for members in layers:
        names += [member.name for member, _ in members]
    return BlockMap(
        group=geometry.group,
        tensors=tuple(names),
        views=tuple(member for member, _ in layer),
        places=places,
        num_blocks=min(member.num_blocks for member, _ in layer),
        block_stride_bytes=view.block_stride_bytes,
        size_bytes=size,
        rest_bytes=max(end - size, 0) if view.num_blocks > 1 or later else 0,
        axes=axes,
        all_layers=_nested(layer, _layer_axis(places, numbers)),
    )


_Strides = list[tuple[str, range | tuple[int, ...], int]]
"""Name, coordinates and stride in bytes of axes or of their digits."""


def _layer_axis(places: Sequence[tuple[int, int]], numbers: Sequence[int | None]) -> _Strides:
    """Return the axis of layers that are in one region at one step; nothing for others."""
    steps = {after - before for (_, before), (_, after) in itertools.pairwise(places)}
    coordinates = tuple(number for number in numbers if number is not None)
    # Layers in several regions, or at unequal steps, are no axis.
    is_one_region = len({region for region, _ in places}) == 1
    is_one_step = len(steps) == 1 and min(steps) > 0
    if not is_one_region or not is_one_step or len(coordinates) < len(places):
        return []
    return [("layer", coordinates, steps.pop())]


def _nested(layer: _Layer, layer_axes: Sequence[Any] = ()) -> tuple[StridedAxis, ...]:
    """Return the axes of the views of one layer.

    Each view is a chain of axes, and chains that alternate are merged.
    """
    base = _offset_of_view(layer[0])
    chains = []
    for i, (view, geometry) in enumerate(layer):
        chain = _chain(i, view, [*_strides(geometry), *layer_axes])
        chains.append(attrs.evolve(chain, offset=view.offset_bytes - base))
    return _merged(chains)


def _chain(view_index: int, view: View, strides: _Strides) -> StridedAxis:
    """Return the slowest axis of a view, with the faster ones inside it."""
    _, number, suffix = split(view.name)
    name = suffix.lstrip("._") if number is not None and suffix.strip("._") else view.name
    views = (view_index,)
    # From the fastest axis to the slowest, each around the one before.
    chain = StridedAxis(name, views, "element", range(1), 1, 0, view.itemsize, view.itemsize)
    inside: tuple[StridedAxis, ...] = ()
    widths: dict[str, int] = {}
    gaps: set[str] = set()
    # Axes of one coordinate have no meaningful stride: they are outside.
    slowest_first = sorted(strides, key=lambda s: (len(s[1]) > 1, -s[2]))
    for depth, (axis, coordinates, stride) in reversed([*enumerate(slowest_first)]):
        size = chain.stop
        width = widths.get(axis, 1)
        step = stride if len(coordinates) > 1 else size
        slower = {slower_axis for slower_axis, _, _ in slowest_first[: depth + 1]}
        part_gaps = frozenset(gaps & slower)
        chain = StridedAxis(name, views, axis, coordinates, width, 0, step, size, inside, part_gaps)
        if not _begins_at_zero(coordinates, width):
            gaps.add(axis)
        widths[axis] = coordinates[-1] + width
        inside = (chain,)
    return chain


def _begins_at_zero(coordinates: range | tuple[int, ...], width: int) -> bool:
    """Return whether coordinates are multiples of ``width`` from 0 on."""
    if not isinstance(coordinates, range):
        return False
    return coordinates.start == 0 and coordinates.step == width


def _strides(geometry: Geometry) -> _Strides:
    """Return the axes of a view; those whose digits do not continue each other, digit by digit."""
    strides: _Strides = []
    for name, size in geometry.sizes.items():
        if size == 1:
            continue
        whole = geometry.segments[name]
        if whole.start.size == 1:
            coordinates = range(int(whole.start[0]), int(whole.stop[0]))
            strides.append((name, coordinates, int(whole.stride[0])))
            continue
        width = size
        for digit in [axis for axis in geometry.axes if axis.name == name and axis.size > 1]:
            width //= digit.size
            coordinates = range(digit.start * width, digit.stop * width, width)
            strides.append((name, coordinates, digit.stride_bytes))
    return strides


def _merged(axes: Sequence[StridedAxis]) -> tuple[StridedAxis, ...]:
    """Return axes by ascending offset.

    Those whose bytes alternate become one, if they are equal; else they stay apart.
    """
    # A cluster has axes whose bytes overlap, from the first byte to the last.
    clusters: list[list[StridedAxis]] = []
    end = -1
    for axis in sorted(axes, key=lambda axis: axis.offset):
        if axis.offset >= end:
            clusters.append([])
        clusters[-1].append(axis)
        end = max(end, axis.stop)
    return tuple(itertools.chain(*(_united(cluster) or cluster for cluster in clusters)))


def _united(axes: Sequence[StridedAxis]) -> list[StridedAxis]:
    """Return equal axes of different tensors as one axis with all tensors inside; else nothing."""
    first = axes[0]
    has_step = len(first.coordinates) > 1
    # A step means nothing where there is one coordinate.
    kinds = {(axis.axis, axis.coordinates, axis.width, axis.step * has_step) for axis in axes}
    if len(axes) == 1 or len(kinds) > 1:
        return []
    # What is inside each axis, at offsets from the first byte of the first axis.
    parts = []
    views: list[int] = []
    for axis in axes:
        views += axis.views
        for inner in axis.inside or (_element(axis),):
            offset = inner.offset + axis.offset - first.offset
            parts.append(attrs.evolve(inner, offset=offset))
    inside = _merged(parts)
    size = max(axis.stop for axis in inside)
    if has_step and size > first.step:
        return []
    united = attrs.evolve(
        first,
        tensor=" + ".join(dict.fromkeys(axis.tensor for axis in axes)),
        views=tuple(views),
        step=first.step if has_step else size,
        size=size,
        inside=inside,
        gaps=frozenset().union(*(axis.gaps for axis in axes)),
    )
    return [united]


def _element(axis: StridedAxis) -> StridedAxis:
    """Return the element that one part of the fastest axis is."""
    return attrs.evolve(axis, axis="element", coordinates=range(1), offset=0, step=axis.size)


def named(axes: Sequence[StridedAxis], path: Path) -> Iterator[tuple[StridedAxis, Path]]:
    """Yield axes beside each other, each with the path into it.

    The path names the tensor where there are several.
    """
    has_several = len({axis.tensor for axis in axes}) > 1
    for axis in axes:
        yield axis, (*path, Interval(TENSOR, 0, 1, axis.tensor)) if has_several else path


def _boxes(
    axes: Sequence[StridedAxis],
    start: int,
    stop: int,
    base: int,
    path: Path,
) -> Iterator[Box]:
    """Yield the boxes of bytes ``[start, stop)``; ``axes`` are in a part from ``base`` on."""
    for axis, axis_path in named(axes, path):
        axis_start = base + axis.offset
        low = max(start, axis_start)
        high = min(stop, base + axis.stop)
        part = (low - axis_start) // axis.step
        while (part_start := axis_start + part * axis.step) < high:
            # As many parts as one box can have.
            num_parts = 1
            if axis.joins and low <= part_start:
                num_whole = (high - part_start) // axis.step
                num_parts = max(min(num_whole, len(axis.coordinates) - part), 1)
            end = part_start + (num_parts - 1) * axis.step + axis.size
            if low <= part_start and end <= high and not axis.gaps:
                # Whole parts are one box; else look for boxes inside the part.
                interval = axis.interval(part, part + num_parts - 1)
                yield Box(part_start, end, extend(axis_path, interval), axis.views)
            else:
                part_path = extend(axis_path, axis.interval(part, part))
                part_low = max(low, part_start)
                yield from _boxes(axis.inside, part_low, min(high, end), part_start, part_path)
            part += num_parts


def _pieces(axes: Sequence[StridedAxis], title: str) -> Ints:
    """Return the contiguous bytes of some axes, by ascending start."""
    pieces = []
    for axis in axes:
        num_parts = len(axis.coordinates)
        # The pieces of one part; one piece of all parts if they continue each other.
        inner = _pieces(axis.inside, title) if axis.inside else np.array([[0, axis.size]])
        first, last = inner[0]
        if len(inner) == 1 and last - first == axis.step:
            inner = np.array([[first, last + (num_parts - 1) * axis.step]])
            num_parts = 1
        num_pieces = num_parts * len(inner)
        if num_pieces > MAX_PIECES:
            expected = f"at most {MAX_PIECES} contiguous pieces of a block"
            raise KVPlanError("RANGE", f"draw {title}", expected=expected, got=f"{num_pieces}")
        spend(num_pieces, "pieces of a block", PIECE_BYTES, f"draw {title}")
        # One row for each piece of each part.
        part_start = axis.offset + np.arange(num_parts) * axis.step
        pieces.append((part_start[:, None, None] + inner).reshape(-1, 2))
    start, stop = np.concatenate(pieces).T
    # Pieces that begin where the one before ends are one.
    order = np.argsort(start)
    first_of_chain = heads(start[order[1:]] == stop[order[:-1]])
    last_of_chain = np.append(first_of_chain[1:], order.size) - 1
    return np.stack([start[order[first_of_chain]], stop[order[last_of_chain]]], axis=1)
