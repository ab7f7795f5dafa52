"""Pages: what one block of a worker looks like, byte by byte, from its views' strides.

A *page* is what one block keeps of one layer in one region, told in bands (:mod:`kvplan.show.bands`). Layers whose
pages are equal are one page.

>>> from kvplan import Model
>>> def chain(bands):
...     return [str(bands[0]), *chain(bands[0].inside)] if bands else []
>>> model = Model.shipped("llama-3.1-8b")
>>> for layout in ("LBHNC", "LBNHC", "BLHNC"):
...     (page,) = pages(model.engine("decode", tp=4, layout=layout)[1])
...     print(layout, page.title, "bands", ", ".join(chain(page.whole)))
LBHNC layers.0-31.attn bands head 2 x 8192, token 16 x 512, kv 2 x 256, dim 128 x 2
LBNHC layers.0-31.attn bands token 16 x 1024, head 2 x 512, kv 2 x 256, dim 128 x 2
BLHNC layers.0-31.attn bands layer 32 x 16384, head 2 x 8192, token 16 x 512, kv 2 x 256, dim 128 x 2
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import attrs

from kvplan._arrays import Ints
from kvplan._text import fold, intervals, split
from kvplan.describe.axes import Axis
from kvplan.describe.views import View
from kvplan.describe.worker import Worker
from kvplan.show.bands import Band, Box, Digit, boxes, spans

LAYER: Final = "layer"
"""The axis of equal layers that share a region, and so a block."""


@attrs.frozen
class Page:
    """What each block of a group keeps of equal layers, each in one region.

    ``tensors`` are the names in all layers, and ``places`` the index of each layer's region, and the page's offset
    there in block 0. ``size_bytes`` counts from the first to the last byte. ``rest_bytes`` lie between it and
    what comes next of the group in memory: padding, or what other groups have there. ``bands`` are those of one layer.
    Where the layers of a block stand at one step, ``layers`` is their band.
    """

    group: str
    tensors: tuple[str, ...]
    views: tuple[View, ...] = attrs.field(repr=False)
    places: tuple[tuple[int, int], ...] = attrs.field(repr=False)
    num_blocks: int
    block_stride_bytes: int
    size_bytes: int
    rest_bytes: int
    bands: tuple[Band, ...] = attrs.field(repr=False)
    whole: tuple[Band, ...] = attrs.field(repr=False)

    @property
    def title(self) -> str:
        """The names of the tensors, told by :func:`titled`."""
        return titled(self.tensors)

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """The bytes ``[start, stop)`` of a page as boxes, gaps between bands left out.

        They ascend, but where tensors of one page take turns in it: these come one after another.

        >>> from kvplan import Model
        >>> (page,) = pages(Model.shipped("llama-3.1-8b").engine("decode", tp=4)[1])
        >>> for box in page.boxes(7680, 9728):
        ...     print(box.start, box.stop, *(f"{step.axis} {step}" for step in box.steps))
        7680 8192 head 2 token 15
        8192 9728 head 3 token 0-2
        """
        return boxes(self.bands, start, stop)

    @cached_property
    def spans(self) -> Ints:
        """The contiguous pieces of a page, (n, 2) int64: start and stop. Raises ``RANGE`` if there are too many."""
        return spans(self.bands, self.title)


def titled(names: Sequence[str]) -> str:
    """Names of tensors, those of equal layers as one.

    >>> titled(["layers.0.conv.x", "layers.0.ssm", "layers.1.conv.x", "layers.1.ssm"])
    'layers.0-1.{conv.x, ssm}'
    """
    parts = [split(name) for name in names]
    after = tuple(dict.fromkeys(after for _, _, after in parts))
    numbers = [number for _, number, _ in parts if number is not None]
    if len(after) == 1 or len(numbers) < len(parts) or len({before for before, _, _ in parts}) > 1:
        return fold(names)
    dot = "." * all(name.startswith(".") for name in after)
    return f"{parts[0][0]}{intervals(numbers)}{dot}{{{', '.join(name.removeprefix(dot) for name in after)}}}"


def label(name: str) -> str:
    """What a tensor is called inside the page of its layer: what follows the number of the layer, if anything does.

    >>> label("layers.7.conv.x"), label("draft")
    ('conv.x', 'draft')
    """
    _, number, after = split(name)
    return after.lstrip("._") if number is not None and after.strip("._") else name


def pages(worker: Worker) -> tuple[Page, ...]:
    """What one block of each group keeps, by the worker's views: a page for each layer and region, equal ones folded.

    Layers are told apart by the first number in a tensor's name.
    """
    geometry_of = dict(zip(map(id, worker.views), worker.geometry_of, strict=True))
    regions = {region.name: i for i, region in enumerate(worker.regions)}
    kept: dict[Any, list[View]] = {}
    for view in worker.views:
        before, number, _ = split(view.name)
        kept.setdefault((view.region, view.group, view.block_stride_bytes, before, number), []).append(view)
    alike: dict[Any, list[list[View]]] = {}
    starts: dict[tuple[str, str], list[int]] = {}
    for (region, group, _, before, _), views in kept.items():
        views.sort(key=lambda view: view.offset_bytes)
        start = views[0].offset_bytes
        starts.setdefault((region, group), []).append(start)
        shapes = tuple((split(v.name)[2], geometry_of[id(v)], v.offset_bytes - start) for v in views)
        alike.setdefault((group, before, shapes), []).append(views)
    return tuple(_page(layers, regions, starts) for layers in alike.values())


def _page(layers: Sequence[list[View]], regions: dict[str, int], starts: dict[tuple[str, str], list[int]]) -> Page:
    views = layers[0]
    base, first = views[0].offset_bytes, views[0]
    bands = _nest([_Dims.of(i, view, base) for i, view in enumerate(views)])
    size = max(band.stop_bytes for band in bands)
    after = [start for start in starts[first.region, first.group] if start > base]
    ends = min(after, default=min(starts[first.region, first.group]) + first.block_stride_bytes)
    places = tuple((regions[layer[0].region], layer[0].offset_bytes) for layer in layers)
    return Page(
        group=first.group,
        tensors=tuple(view.name for layer in layers for view in layer),
        views=tuple(views),
        places=places,
        num_blocks=min(view.num_blocks for view in views),
        block_stride_bytes=first.block_stride_bytes,
        size_bytes=size,
        rest_bytes=max(ends - base - size, 0) if first.num_blocks > 1 or after else 0,
        bands=bands,
        whole=_with_layers(views, places, [split(layer[0].name)[1] for layer in layers]) or bands,
    )


def _with_layers(
    views: Sequence[View], places: Sequence[tuple[int, int]], numbers: Sequence[int | None]
) -> tuple[Band, ...]:
    """The bands of all layers, where they stand in one region at one step; else none."""
    offsets = [offset for _, offset in places]
    steps = {after - before for before, after in itertools.pairwise(offsets)}
    if len({region for region, _ in places}) > 1 or len(steps) != 1 or min(steps) <= 0 or None in numbers:
        return ()
    layer: _Dim = (LAYER, tuple(number for number in numbers if number is not None), steps.pop(), "only")
    members = [_Dims.of(i, view, views[0].offset_bytes) for i, view in enumerate(views)]
    return _nest([attrs.evolve(one, dims=_ordered((*one.dims, layer))) for one in members])


_Dim = tuple[str, range | tuple[int, ...], int, Digit]
"""An axis with its coordinates, its stride in bytes, and what it is of its name."""


@attrs.frozen
class _Dims:
    """A view's axes from the slowest to the fastest, the first element ``offset`` bytes into what holds it."""

    number: int
    tensor: str
    offset: int
    itemsize: int
    dims: tuple[_Dim, ...]

    @classmethod
    def of(cls, number: int, view: View, base: int) -> _Dims:
        return cls(number, label(view.name), view.offset_bytes - base, view.itemsize, _dims(view.axes))

    @property
    def size(self) -> int:
        return self.itemsize + sum((len(coordinates) - 1) * stride for _, coordinates, stride, _ in self.dims)

    def inner(self, offset: int) -> _Dims:
        """What is inside the first axis, with ``offset`` bytes less before it."""
        return attrs.evolve(self, offset=self.offset - offset, dims=self.dims[1:])


def _dims(axes: Sequence[Axis]) -> tuple[_Dim, ...]:
    """The axes of a view, dense digits as one. Where one coordinate of several is held, that is said first."""
    found: list[tuple[str, range, int]] = []
    width: dict[str, int] = {}
    for axis in reversed(axes):
        each = width.get(axis.name, 1)
        width[axis.name] = each * axis.size
        coordinates = range(axis.start * each, axis.stop * each, each)
        i = next((i for i, (name, _, _) in enumerate(found) if name == axis.name), None)
        if i is not None and _goes_on(found[i], axis, each):
            fine = found[i][1].step
            found[i] = axis.name, range(coordinates.start, coordinates.stop, fine), found[i][2]
        elif axis.size > 1:
            found.insert(0, (axis.name, coordinates, axis.stride_bytes))
    ordered = _ordered([(*dim, "only") for dim in found])
    return tuple((*dim[:3], _digit(ordered, i)) for i, dim in enumerate(ordered))


def _digit(dims: Sequence[_Dim], i: int) -> Digit:
    """Whether each part of a digit is an interval of its axis, and if not, whether finer digits follow."""
    same = [dim for dim in dims if dim[0] == dims[i][0]]
    if all(fine[1] == range(0, _each(coarse), _each(fine)) for coarse, fine in itertools.pairwise(same)):
        return "only"
    return "last" if same[-1] is dims[i] else "more"


def _each(dim: _Dim) -> int:
    return dim[1].step if isinstance(dim[1], range) else 1


def _goes_on(finer: tuple[str, range, int], axis: Axis, each: int) -> bool:
    """Whether an outer digit steps just over the bytes of the digits inside it, which are whole."""
    _, coordinates, stride = finer
    return coordinates == range(0, each, coordinates.step) and len(coordinates) * stride == axis.stride_bytes


def _ordered(dims: Sequence[_Dim]) -> tuple[_Dim, ...]:
    return tuple(sorted(dims, key=lambda dim: (len(dim[1]) > 1, -dim[2])))


def _nest(members: Sequence[_Dims]) -> tuple[Band, ...]:
    """The bands of some views: apart where their bytes are, one inside the other's axis where they alternate."""
    clusters: list[list[_Dims]] = []
    end = -1
    for one in sorted(members, key=lambda one: one.offset):
        if one.offset >= end:
            clusters.append([])
        clusters[-1].append(one)
        end = max(end, one.offset + one.size)
    return tuple(band for cluster in clusters for band in _cluster(cluster))


def _cluster(members: Sequence[_Dims]) -> Iterator[Band]:
    first = members[0]
    name, coordinates, stride, digit = first.dims[0] if first.dims else ("element", range(1), first.itemsize, "only")
    inner = [one.inner(first.offset) for one in members]
    size = max(one.offset + one.size for one in inner)
    if any(one.dims[:1] != first.dims[:1] for one in members) or (len(coordinates) > 1 and size > stride):
        for one in members:
            yield from _cluster([one])
    else:
        tensors = " + ".join(dict.fromkeys(one.tensor for one in members))
        step = stride if len(coordinates) > 1 else size
        inside = _nest(inner) if any(one.dims for one in inner) or len(inner) > 1 else ()
        yield Band(
            tensors, name, coordinates, first.offset, step, size, inside, digit, tuple(one.number for one in members)
        )
