"""Labels: a number for each byte of each element of each position that a destination worker needs.

What a view keeps where follows here from the formula of a view and from these rules alone, so that plans can be
checked by something that knows nothing of how they are made:

- Q1: a destination worker needs the elements of its views whose tensor some source has, at the positions of the
  range that its context holds; in a state group, at the block ordinals of the range. Where its block table says that
  there is no block, it needs nothing.
- Q2: position ``p`` of context (rank ``r``, size ``n``, interleave ``i``) is held where ``p // i % n == r``, as local
  slot ``p // (n * i) * i + p % i``; that divided by tokens_per_block is block ordinal and slot in the block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.describe.views import TOKEN, Group, Region, View
from kvplan.describe.worker import Worker
from kvplan.verification.arenas import Cells
from kvplan.verification.memory import FakeMemory

Ints = npt.NDArray[np.int64]
Span = tuple[int, int]

CHUNK_CELLS: Final = 1 << 22
"""Labels are made for at most this many cells at a time, or for one position."""


def table_of(blocks: Any) -> tuple[Ints, Ints]:
    """The ids of a block table and their ordinals; a group without one lists nothing."""
    none = np.empty(0, np.int64)
    return (none, none) if blocks is None else (blocks.ids, blocks.ordinals)


def listed_slots(group: Group, blocks: Any) -> Ints:
    """The slots of the request that a block table has, ascending: ``tokens_per_block`` of each block."""
    slots = group.tokens_per_block or 1
    return np.add.outer(table_of(blocks)[1] * slots, np.arange(slots)).reshape(-1)


def needed(group: Group, blocks: Any, span: Span | None) -> Ints:
    """The positions of ``span`` that the group's context holds, or all that ``blocks`` hold (rule Q1), ascending.

    Where ``blocks`` says that there are none in some places, nothing is needed there.

    >>> from kvplan import Blocks, Context
    >>> group = Group("attn", 4, Context(rank=1, size=2, interleave_tokens=2))
    >>> needed(group, Blocks([7, 8]), (3, 9)).tolist()
    [3, 6, 7]
    >>> needed(group, Blocks([7, 8]), None).tolist()
    [2, 3, 6, 7, 10, 11, 14, 15]
    >>> needed(group, Blocks([0, 8], null=0), (3, 13)).tolist()
    [10, 11]
    """
    run, size, rank = group.context.interleave_tokens, group.context.size, group.context.rank
    if span is not None:
        positions = np.arange(*span, dtype=np.int64)
        held = positions // run % size == rank
        if blocks is not None and blocks.has_gaps:
            held &= np.isin(local_slots(group, positions), listed_slots(group, blocks))
        return np.asarray(positions[held])
    return _positions(group, listed_slots(group, blocks))


def _positions(group: Group, local: Ints) -> Ints:
    """The positions of slots of the request (rule Q2, the other way round)."""
    run, size, rank = group.context.interleave_tokens, group.context.size, group.context.rank
    return local // run * (size * run) + rank * run + local % run


def local_slots(group: Group, positions: Ints) -> Ints:
    """Where the group's context keeps positions that it holds, counted in slots of the request (rule Q2)."""
    run, size = group.context.interleave_tokens, group.context.size
    return positions // (size * run) * run + positions % run


@attrs.frozen(eq=False)
class Tensor:
    """The labels of one tensor: consecutive numbers by position, then axis after axis, then by byte."""

    name: str
    base: int
    positions: Ints
    sizes: tuple[tuple[str, int], ...]
    itemsize: int

    @property
    def bytes_per_position(self) -> int:
        """Labels between neighbouring positions."""
        return self.itemsize * math.prod(size for _, size in self.sizes)

    @property
    def end(self) -> int:
        """The label after the last one."""
        spread = int(self.positions[-1] - self.positions[0]) + 1 if self.positions.size else 0
        return self.base + spread * self.bytes_per_position

    def starts(self, positions: Ints) -> Ints:
        """The first label of each position."""
        return np.asarray(self.base + (positions - self.positions[0]) * self.bytes_per_position)

    def weights(self, view: View) -> list[int]:
        """By how much a label grows along each axis of ``view``; 0 along the token axis."""
        weight, known = self.itemsize, {TOKEN: 0}
        for name, size in reversed(self.sizes):
            known[name] = weight
            weight *= size
        weights = []
        for axis in reversed(view.axes):
            weights.append(known[axis.name])
            known[axis.name] *= axis.size
        return weights[::-1]

    def describe(self, label: int) -> str:
        """The byte that a label of this tensor stands for, by coordinates."""
        position, rest = divmod(label - self.base, self.bytes_per_position)
        element, byte = divmod(rest, self.itemsize)
        words = [f"byte {byte}"]
        for name, size in reversed(self.sizes):
            element, coordinate = divmod(element, size)
            words.append(f"{name} {coordinate}")
        return f"{self.name} {' '.join(words[::-1])} of position {position + int(self.positions[0])}"


def number(views: Iterable[tuple[View, Ints]]) -> dict[str, Tensor]:
    """Labels from 1 on, by tensor, for the positions that are given with each view.

    >>> from kvplan import Axis
    >>> view = View("layers.0", "attn", "kv", "float16", (Axis("token", 0, 4, 4, 4), Axis("dim", 0, 2, 2, 2)), 9, 16)
    >>> tensor = number([(view, np.arange(100, 104))])["layers.0"]
    >>> tensor.base, tensor.end, tensor.describe(7)
    (1, 17, 'layers.0 dim 1 byte 0 of position 101')
    """
    tensors: dict[str, Tensor] = {}
    for view, wanted in views:
        if view.name in tensors:
            wanted = np.union1d(tensors[view.name].positions, wanted)
        sizes = tuple((name, size) for name, size in sorted(view.sizes.items()) if name != TOKEN)
        tensors[view.name] = Tensor(view.name, 0, wanted, sizes, view.itemsize)
    base = 1
    for name, tensor in tensors.items():
        tensors[name] = attrs.evolve(tensor, base=base)
        base = tensors[name].end
    return tensors


@attrs.frozen(eq=False)
class Window:
    """A view's cells for some positions: ``cells[index]`` has a row for each, of the shape of ``inner``."""

    tensor: Tensor
    cells: Cells
    index: tuple[Ints, ...]
    positions: Ints
    inner: Ints
    """The label of each cell of a row, less the first label of its position."""

    def chunks(self) -> Iterator[tuple[tuple[Ints, ...], Cells]]:
        """Index and labels, some positions at a time."""
        step = max(1, CHUNK_CELLS // max(self.inner.size, 1))
        inner = self.inner.astype(self.cells.dtype)
        for low in range(0, self.positions.size, step):
            starts = self.tensor.starts(self.positions[low : low + step]).astype(self.cells.dtype)
            yield tuple(digit[low : low + step] for digit in self.index), np.add.outer(starts, inner)

    def offset_bytes(self, where: Iterable[int]) -> int:
        """How far the cell ``where``, an index of ``cells``, lies from their first one."""
        return sum(i * stride for i, stride in zip(where, self.cells.strides, strict=True)) // self.cells.itemsize


def window(
    memory: FakeMemory, worker: Worker, view: View, tensor: Tensor, blocks: Any, only: Mapping[str, Span] | None = None
) -> Window:
    """The cells of a view for all positions of its tensor that the worker holds in its blocks.

    ``only`` narrows axes, where they are not made of digits, to a span of coordinates.
    """
    group = next(group for group in worker.groups if group.name == view.group)
    slots, (ids, ordinals) = group.tokens_per_block or 1, table_of(blocks)
    held = np.isin(tensor.positions, needed(group, blocks, None), assume_unique=True)
    local = local_slots(group, tensor.positions[held])
    slot, digits = local % slots, []
    for axis in reversed([axis for axis in view.axes if axis.name == TOKEN]):
        slot, digit = np.divmod(slot, axis.size)
        digits.append(digit)
    names = [axis.name for axis in view.axes]
    spans: list[Any] = [...]
    inner: Ints = np.zeros((), np.int64)
    for axis, weight in zip(view.axes, tensor.weights(view), strict=True):
        if axis.name != TOKEN:
            low, high = axis.start, axis.stop
            if only and axis.name in only and names.count(axis.name) == 1:
                low, high = max(low, only[axis.name][0]), min(high, only[axis.name][1])
            spans.append(slice(low - axis.start, max(high, low) - axis.start))
            inner = np.add.outer(inner, np.arange(low, high) * weight)
    tokens = [i for i, name in enumerate(names, 1) if name == TOKEN]
    rest = [i for i, name in enumerate(names, 1) if name != TOKEN]
    cells = memory.array(worker, view).transpose([0, *tokens, *rest, len(names) + 1])
    return Window(
        tensor=tensor,
        cells=cells[(*spans, slice(None))],
        index=(ids[np.searchsorted(ordinals, local // slots)], *reversed(digits)),
        positions=tensor.positions[held],
        inner=np.add.outer(inner, np.arange(view.itemsize)),
    )


@attrs.frozen
class Place:
    """A byte of a view's block: the block, the slot if it has slots, the other coordinates, and which byte of these."""

    view: View
    block: int
    slot: int | None
    coordinates: Mapping[str, int]
    byte: int

    def __str__(self) -> str:
        words = "".join(f" {name} {value}" for name, value in sorted(self.coordinates.items()))
        slot = "" if self.slot is None else f" slot {self.slot}"
        return f"{self.view.name}{words} byte {self.byte} in group {self.view.group} block {self.block}{slot}"


def locate(worker: Worker, address: int, device_id: int) -> str:
    """What a worker keeps at an address, by block, slot and coordinates: the views' formula, inverted.

    >>> from kvplan import Axis, Region
    >>> view = View("mla", "attn", "kv", "uint8", (Axis("token", 0, 4, 4, 8), Axis("dim", 0, 6, 6, 1)), 10, 32)
    >>> worker = Worker("decode", 0, (Region("kv", 4096, 320),), (Group("attn", 4),), (view,))
    >>> print(locate(worker, 4096 + 3 * 32 + 2 * 8 + 5, 0))
    mla dim 5 byte 0 in group attn block 3 slot 2, address 0x1075 of decode/0
    >>> print(locate(worker, 4096 + 7, 0))
    padding of region kv, address 0x1007 of decode/0
    """
    region, place = _place(worker, address, device_id)
    padding = "no region" if region is None else f"padding of region {region.name}"
    return f"{place or padding}, address {address:#x} of {worker.label}"


def position_at(worker: Worker, address: int, device_id: int, tables: Mapping[str, Any]) -> int | None:
    """The position that a request's block tables give to what a worker keeps at an address, if they have its block."""
    _, place = _place(worker, address, device_id)
    if place is None:
        return None
    group = next(group for group in worker.groups if group.name == place.view.group)
    ids, ordinals = table_of(tables.get(group.name))
    local = ordinals[ids == place.block] * (group.tokens_per_block or 1) + (place.slot or 0)
    return int(_positions(group, local)[0]) if local.size else None


def _place(worker: Worker, address: int, device_id: int) -> tuple[Region | None, Place | None]:
    """A region that has an address, and the first view's byte that stands there."""
    inside = None
    for region in worker.regions:
        offset = address - region.address
        if region.device_id == device_id and 0 <= offset < region.size_bytes:
            inside = region
            for view in worker.views:
                if view.region == region.name and (place := _invert(view, offset - view.offset_bytes)):
                    return region, place
    return inside, None


def _invert(view: View, offset: int) -> Place | None:
    """The byte of a view at an offset from its first one, if there is one there."""
    dims = [(view.block_stride_bytes if view.num_blocks > 1 else 0, view.num_blocks, -1)]
    dims += [(axis.stride_bytes, axis.extent, i) for i, axis in enumerate(view.axes)]
    at = {}
    for stride, extent, i in sorted(dims, reverse=True):
        at[i] = min(max(offset, 0) // stride, extent - 1) if extent > 1 else 0
        offset -= at[i] * stride
    if not 0 <= offset < view.itemsize:
        return None
    coordinates: dict[str, int] = {}
    for i, axis in enumerate(view.axes):
        coordinates[axis.name] = coordinates.get(axis.name, 0) * axis.size + axis.start + at[i]
    return Place(view, at[-1], coordinates.pop(TOKEN, None), coordinates, offset)
