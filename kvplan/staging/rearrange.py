"""Rearrangement: from a mirror into a destination's blocks, or a source's into one, as a few strided copies.

- S11: positions go in runs of ``L``, the greatest length for which runs from multiples of ``L`` on lie within one block
  and digit on both sides, and are held as a whole or not at all. What a range cuts off of runs goes token by token.

So there are at most two copies, of runs and of single tokens, for boxes of one shape, whatever the request. No two
elements of a copy's destination share a byte, over all blocks: a strided tensor may be written from each origin on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, distinct, read_only
from kvplan._text import count, fold
from kvplan.describe.blocks import Blocks, places
from kvplan.describe.views import TOKEN, Geometry, Group, Region
from kvplan.plan.align import local_index, repeated, slots
from kvplan.plan.cells import Cell
from kvplan.plan.rows import Descriptors
from kvplan.staging.boxes import Box, Boxes, Origin, Pair, merged, nested, pieces
from kvplan.staging.mirrors import Groups

STANDS: Final = ("destination", "source")
"""What messages call the tables of both sides."""


@attrs.frozen(eq=False)
class Side:
    """One side of a copy: from each of ``origins`` on, a strided box for each entry of ``index``.

    Origins are regions and offsets in them. The box of an entry ``i`` begins ``sum of index[k][i] * strides_bytes[k]``
    behind an origin, the first for blocks, others for slots, outer digit first. ``shape`` has an end for each index.
    ``inner_bytes`` has the stride of each of the copy's extents.
    """

    origins: tuple[Origin, ...]
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    index: tuple[Ints, ...]
    inner_bytes: tuple[int, ...]

    @property
    def offsets(self) -> Ints:
        """How far behind an origin the box of each entry begins."""
        at = np.zeros(self.index[0].size, np.int64)
        for index, stride in zip(self.index, self.strides_bytes, strict=True):
            at += index * stride
        return at


@attrs.frozen(eq=False, repr=False)
class Copy:
    """Boxes of ``extents``, of runs of ``length_bytes``: from each origin of the source on to that of the destination.

    In words of torch, with the bytes from an origin on as elements: ``destination.as_strided(shape + extents +
    length)[index] = source.as_strided(...)[index]``. Only origins tell one layer from the next.
    """

    destination: Side
    source: Side
    extents: tuple[int, ...]
    length_bytes: int

    @property
    def num_origins(self) -> int:
        """How many strided tensors it takes on either side."""
        return len(self.destination.origins)

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        boxes = self.num_origins * self.destination.index[0].size
        return boxes * math.prod(self.extents) * self.length_bytes

    def ranges(self) -> tuple[Descriptors, Descriptors]:
        """What is written and what is read, run by run: (n, 3) uint64 of address, length, device."""
        written, read = (_ranges(side, self.extents, self.length_bytes) for side in (self.destination, self.source))
        return written, read

    def __repr__(self) -> str:
        box = " x ".join(map(str, (*self.extents, self.length_bytes)))
        ends = [fold([region.name for region, _ in side.origins]) for side in (self.destination, self.source)]
        boxes = count(self.destination.index[0].size, "box")
        times = f"{self.num_origins} times " if self.num_origins > 1 else ""
        return f"<Copy {' <- '.join(ends)}: {times}{boxes} of {box} bytes>"


def _ranges(side: Side, extents: Sequence[int], length: int) -> Descriptors:
    at = side.offsets
    for extent, stride in zip(extents, side.inner_bytes, strict=True):
        at = np.add.outer(at, np.arange(extent) * stride).reshape(-1)
    begin = np.array([[region.address + offset, region.device_id] for region, offset in side.origins], np.uint64)
    found = np.empty((len(begin), at.size, 3), np.uint64)
    found[:, :, 0] = np.add.outer(begin[:, 0], at.astype(np.uint64))
    found[:, :, 1], found[:, :, 2] = length, begin[:, 1:]
    return read_only(found.reshape(-1, 3))


def run(copies: Iterable[Copy], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Carry out copies in memory: for each region by name, one contiguous array with an element for each byte.

    Elements may be wider than bytes, where they stand for bytes. What is aligned is copied in words of up to 8 bytes.
    """
    for copy in copies:
        sides = copy.destination, copy.source
        even = math.gcd(
            copy.length_bytes, *(stride for side in sides for stride in side.strides_bytes + side.inner_bytes)
        )
        for (ours, at), (theirs, there) in zip(*(side.origins for side in sides), strict=True):
            into, out_of = arrays[ours.name], arrays[theirs.name]
            word = math.gcd(8, into.itemsize * math.gcd(even, at, there))
            written = _boxes(into, at, copy.destination, copy, word)
            written[copy.destination.index] = _boxes(out_of, there, copy.source, copy, word)[copy.source.index]


def _boxes(array: npt.NDArray[Any], offset: int, side: Side, copy: Copy, word: int) -> npt.NDArray[Any]:
    """All boxes that there are from an origin on, as an array of words."""
    size = array.itemsize
    return np.ndarray(
        (*side.shape, *copy.extents, copy.length_bytes * size // word),
        np.dtype(f"u{word}"),
        array,
        offset * size,
        (*(stride * size for stride in (*side.strides_bytes, *side.inner_bytes)), word),
    )


@attrs.frozen
class Paging:
    """Where one side's blocks and slots are: digits of the token axis, extent and stride, outer first, dense ones one.

    >>> Paging(9, 4096, ((2, 2048), (8, 256))).found(np.array([5, 5]), np.array([3, 12]), 1)
    (array([5, 5]), array([0, 1]), array([3, 4]))
    """

    num_blocks: int
    block_stride_bytes: int
    digits: tuple[Pair, ...]

    @classmethod
    def of(cls, geometry: Geometry) -> Paging:
        """The paging of a view."""
        digits: list[Pair] = []
        for axis in reversed([axis for axis in geometry.axes if axis.name == TOKEN and axis.extent > 1]):
            if digits and axis.stride_bytes == digits[-1][0] * digits[-1][1]:
                digits[-1] = digits[-1][0] * axis.extent, digits[-1][1]
            else:
                digits.append((axis.extent, axis.stride_bytes))
        return cls(geometry.num_blocks, geometry.block_stride_bytes, tuple(digits[::-1]))

    @property
    def step(self) -> Pair:
        """How many slots follow each other by one stride, and the stride."""
        return self.digits[-1] if self.digits else (1, 0)

    def found(self, block: Ints, slot: Ints, tokens: int) -> tuple[Ints, ...]:
        """Indices of blocks and digits where runs of so many tokens begin."""
        indices: list[Ints] = []
        for extent, _ in reversed(self.digits):
            slot, digit = np.divmod(slot, extent)
            indices.append(digit if indices else digit // tokens)
        return block, *reversed(indices)

    def steps(self, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of each index its end and its stride."""
        extents, strides = [extent for extent, _ in self.digits], [stride for _, stride in self.digits]
        if self.digits:
            extents[-1], strides[-1] = extents[-1] // tokens, strides[-1] * tokens
        return (self.num_blocks, *extents), (self.block_stride_bytes, *strides)


@attrs.frozen(eq=False)
class Lane:
    """Boxes of tokens that both sides page alike: of a run of ``run`` tokens, and of a single one.

    ``groups`` are those of the copies' destination and source, of which one is a mirror's; ``carried`` the positions,
    of every ``every``.
    """

    groups: Groups
    carried: Ints
    every: int
    paging: tuple[Paging, Paging]
    run: int
    boxes: Mapping[int, tuple[Boxes, ...]]

    def positions(self, table: Blocks, low: int, high: int) -> Ints:
        """The positions in ``[low, high)`` that move, given the destination's blocks."""
        position = repeated(self.carried, self.every, low, high)
        if table.scattered is None or not position.size:
            return position
        return position[np.isin(local_index(self.groups[0], position) // slots(self.groups[0]), table.scattered)]

    def copies(self, position: Ints, low: int, high: int, tables: tuple[Blocks, Blocks]) -> Iterator[Copy]:
        """The copies of those positions, rule S11."""
        start = position // self.run * self.run
        inside = (start >= low) & (start + self.run <= high)
        for tokens, which in ((self.run, inside & (start == position)), (1, ~inside)):
            if not which.any():
                continue
            index = [
                paging.found(*_stand(group, table, position[which], side), tokens)
                for paging, group, table, side in zip(self.paging, self.groups, tables, STANDS, strict=True)
            ]
            for boxes in self.boxes[tokens]:
                ours, theirs = (
                    Side(
                        boxes.origins[i],
                        *self.paging[i].steps(tokens),
                        index[i],
                        tuple([dim[1 + i] for dim in boxes.dims]),
                    )
                    for i in (0, 1)
                )
                yield Copy(ours, theirs, tuple([dim[0] for dim in boxes.dims]), boxes.length)


def _stand(group: Group, table: Blocks, position: Ints, side: str) -> tuple[Ints, Ints]:
    """The block id and the slot of each position."""
    ordinal, slot = np.divmod(local_index(group, position), slots(group))
    return table.ids[places(group.name, table, ordinal, side)].astype(np.int64), slot


def ordinals(group: Group, positions: Iterable[Ints]) -> Ints:
    """The blocks of a group that hold any of some positions."""
    every = np.concatenate([*positions, np.zeros(0, np.int64)])
    return distinct(local_index(group, every) // slots(group)) if every.size else every


def lanes(regions: Sequence[Region], share: Iterable[Cell]) -> tuple[Lane, ...]:
    """How what cells move inside the regions of one worker is put in order."""
    alike: dict[Any, list[Cell]] = {}
    for cell in share:
        ours, theirs = cell.sides
        paging, carried = (Paging.of(ours), Paging.of(theirs)), cell.parts[TOKEN].intervals[:, 0]
        alike.setdefault(((ours.group, theirs.group), paging, cell.every, carried.tobytes()), []).append(cell)
    made = []
    for (groups, paging, every, _), members in alike.items():
        carried = members[0].parts[TOKEN].intervals[:, 0]
        length = _run(groups, paging, carried, every)
        boxes = {tokens: _boxes_of(regions, paging, members, tokens) for tokens in {length, 1}}
        made.append(Lane(groups, carried, every, paging, length, boxes))
    return tuple(made)


def _run(groups: Groups, paging: tuple[Paging, Paging], carried: Ints, every: int) -> int:
    """The ``L`` of rule S11."""
    numbers = [every if carried.size < every else 0]
    for group, side in zip(groups, paging, strict=True):
        numbers += side.step[0], group.context.interleave_tokens if group.context.size > 1 else 0
    ends = np.flatnonzero(np.diff(carried) > 1)
    cuts = [carried[0], *carried[ends + 1], *(carried[ends] + 1), carried[-1] + 1]
    return math.gcd(*numbers, *(map(int, cuts) if carried.size < every else ()))


def _boxes_of(
    regions: Sequence[Region], paging: tuple[Paging, Paging], members: Iterable[Cell], tokens: int
) -> tuple[Boxes, ...]:
    """The boxes of a lane for runs of so many tokens."""
    boxes = []
    along = (tokens, paging[0].step[1], paging[1].step[1])
    for cell in members:
        shapes = [(at, nested(cell.sides[0].itemsize, [along, *dims])) for at, dims in pieces(cell)]
        for (at, offset), (other, there) in zip(
            *cell.match.places(cell.destination, cell.source).tolist(), strict=True
        ):
            both = regions[at], regions[other]
            boxes += [Box(both, (offset + more, there + much), *shape) for (more, much), shape in shapes]
    return merged(boxes)
