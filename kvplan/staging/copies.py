"""Strided local copies: between a staging buffer and a worker's own blocks, in one process.

- S9: the segments of both sides and the intervals of a cell cut each axis into intervals of constant stride. A *box* is
  a product of such intervals, for one token of one tensor.
- S10: boxes of equal shape in the same regions, whose offsets grow by one step on either side, become one box with one
  more extent: layers, K and V, the digits of an axis. Boxes of equal shape that remain are *origins* of one copy, such
  as layers in regions of their own. So one copy serves all layers.
- S11: positions are copied in runs of ``L``: the greatest length for which the runs that begin at multiples of ``L``
  lie within one block and one digit on both sides, and move completely or not at all. Runs that a request's range cuts
  are copied token by token.

So a request takes at most two copies for each shape of box, one of runs and one of single tokens. A copy never writes
a byte twice.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints, distinct, listed, read_only
from kvplan._text import count, fold
from kvplan.describe.axes import Segments
from kvplan.describe.blocks import Blocks, places
from kvplan.describe.views import TOKEN, Geometry, Group, Region
from kvplan.plan.align import local_index, repeated, slots
from kvplan.plan.cells import Cell
from kvplan.plan.match import Part
from kvplan.plan.rows import Descriptors

Origin = tuple[Region, int]
"""A region and an offset in it, in bytes."""

BothGroups = tuple[Group, Group]
"""A group of the destination, and one of the source."""

Strides = tuple[int, ...]
"""An extent and, for each side, the stride in bytes."""

BoxShape = tuple[int, tuple[Strides, ...]]
"""The bytes of a box's runs, and the dims along which they lie: finest first, as the destination steps."""

Boxes = dict[BoxShape, list[tuple[Origin, Origin]]]
"""Boxes by shape: where each begins on both sides, the destination's first."""

ROLES: Final = ("destination", "source")
"""The names that errors give to the block tables of both sides."""


@attrs.frozen(eq=False)
class CopySide:
    """One side of a copy: from each of ``origins`` on, a box at each of ``offsets``, in bytes behind the origin.

    ``strides_bytes`` has the stride of each of the copy's extents.
    """

    origins: tuple[Origin, ...]
    offsets: Ints
    strides_bytes: tuple[int, ...]


@attrs.frozen(eq=False, repr=False)
class Copy:
    """Boxes of ``extents`` runs of ``length_bytes``, copied within one worker.

    The nth box of the nth origin of the source goes to the nth box of the nth origin of the destination.
    """

    destination: CopySide
    source: CopySide
    extents: tuple[int, ...]
    length_bytes: int

    @property
    def num_origins(self) -> int:
        """Origins of each side: strided tensors that it takes to carry the copy out."""
        return len(self.destination.origins)

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return self.num_origins * self.destination.offsets.size * math.prod(self.extents) * self.length_bytes

    def ranges(self) -> tuple[Descriptors, Descriptors]:
        """What is written and what is read, run by run: (n, 3) uint64 of address, length, device."""
        return self._ranges(self.destination), self._ranges(self.source)

    def _ranges(self, side: CopySide) -> Descriptors:
        # how far each run is behind an origin: one row for each box, one column for each combination of extents
        at = side.offsets
        for extent, stride in zip(self.extents, side.strides_bytes, strict=True):
            at = np.add.outer(at, np.arange(extent) * stride).reshape(-1)
        begin = np.array([[region.address + offset, region.device_id] for region, offset in side.origins], np.uint64)
        found = np.empty((len(begin), at.size, 3), np.uint64)
        found[:, :, 0] = np.add.outer(begin[:, 0], at.astype(np.uint64))
        found[:, :, 1], found[:, :, 2] = self.length_bytes, begin[:, 1:]
        return read_only(found.reshape(-1, 3))

    def __repr__(self) -> str:
        box = " x ".join(map(str, (*self.extents, self.length_bytes)))
        ends = [fold([region.name for region, _ in side.origins]) for side in (self.destination, self.source)]
        times = f"{self.num_origins} times " if self.num_origins > 1 else ""
        return f"<Copy {' <- '.join(ends)}: {times}{count(self.destination.offsets.size, 'box')} of {box} bytes>"


@attrs.frozen(eq=False)
class CopyTemplate:
    """The copies between two groups, for any block tables: boxes of ``run_tokens`` tokens, and of a single token.

    ``groups`` are those of the copies' destination and source, of which one is a staging buffer's; ``sides`` the
    geometry of a view of each. The positions ``carried`` of every ``every`` move.
    """

    groups: BothGroups
    carried: Ints
    every: int
    sides: tuple[Geometry, Geometry]
    run_tokens: int
    boxes: Mapping[int, Boxes]

    def positions(self, table: Blocks, low: int, high: int) -> Ints:
        """The positions in ``[low, high)`` that move to the blocks of a destination."""
        position = repeated(self.carried, self.every, low, high)
        # where the table has gaps: only the positions whose blocks it has
        if table.scattered is None or not position.size:
            return position
        return position[np.isin(local_index(self.groups[0], position) // slots(self.groups[0]), table.scattered)]

    def copies(self, position: Ints, low: int, high: int, tables: tuple[Blocks, Blocks]) -> Iterator[Copy]:
        """The copies of some positions in ``[low, high)``, by rule S11."""
        # for each position the start of its run, and whether the range has the whole run; a run goes with its first
        # position, those of other runs one by one
        start = position // self.run_tokens * self.run_tokens
        inside = (start >= low) & (start + self.run_tokens <= high)
        for tokens, which in ((self.run_tokens, inside & (start == position)), (1, ~inside)):
            if which.any():
                offsets = [self._offsets(side, position[which], tables[side]) for side in (0, 1)]
                for (length, dims), origins in self.boxes[tokens].items():
                    sides = [
                        CopySide(tuple([pair[side] for pair in origins]), at, tuple([dim[1 + side] for dim in dims]))
                        for side, at in enumerate(offsets)
                    ]
                    yield Copy(sides[0], sides[1], tuple([dim[0] for dim in dims]), length)

    def _offsets(self, side: int, position: Ints, table: Blocks) -> Ints:
        """How far behind an origin, the first slot of block 0, each position is."""
        group, geometry = self.groups[side], self.sides[side]
        ordinal, slot = np.divmod(local_index(group, position), slots(group))
        block = table.ids[places(group.name, table, ordinal, ROLES[side])].astype(np.int64)
        return block * geometry.block_stride_bytes + geometry.segments[TOKEN].at(slot)


def copy_templates(regions: Sequence[Region], cells: Iterable[Cell]) -> tuple[CopyTemplate, ...]:
    """The templates of all copies that carry out cells within one worker: one for each way to page tokens."""
    by_paging: dict[Any, list[Cell]] = {}
    for cell in cells:
        paging = [(side.group, side.block_stride_bytes, _token_steps(side)) for side in cell.sides]
        by_paging.setdefault((*paging, cell.every, _carried(cell).tobytes()), []).append(cell)
    made = []
    for members in by_paging.values():
        first, *_ = members
        groups, run = (first.sides[0].group, first.sides[1].group), _run_tokens(first)
        boxes = {tokens: _boxes(regions, members, tokens) for tokens in {run, 1}}
        made.append(CopyTemplate(groups, _carried(first), first.every, first.sides, run, boxes))
    return tuple(made)


def ordinals(group: Group, positions: Iterable[Ints]) -> Ints:
    """The ordinals of the blocks of a group that hold any of some positions."""
    every = np.concatenate([*positions, np.zeros(0, np.int64)])  # the last one for no positions at all
    return distinct(local_index(group, every) // slots(group)) if every.size else every


def _carried(cell: Cell) -> Ints:
    return listed(cell.parts[TOKEN].intervals)


def _token_steps(side: Geometry) -> tuple[int, ...]:
    """How the slots of a block follow each other."""
    return side.segments[TOKEN].seen(0, slots(side.group))[1]


def _run_tokens(cell: Cell) -> int:
    """The ``L`` of rule S11: what divides the first digit and the context's interleave of both sides, and all cuts."""
    carried, divided = cell.parts[TOKEN].intervals, list[int]()
    for side in cell.sides:
        context = side.group.context
        divided += int(side.segments[TOKEN].length[0]), context.interleave_tokens if context.size > 1 else 0
    if cell.parts[TOKEN].size < cell.every:
        divided += cell.every, *carried.reshape(-1).tolist()  # where the positions that move begin and end
    return math.gcd(*divided)


def _boxes(regions: Sequence[Region], cells: Iterable[Cell], tokens: int) -> Boxes:
    """The boxes of cells of equal paging, for runs of ``tokens`` tokens, by rules S9 and S10."""
    boxes: Boxes = {}
    for cell in cells:
        along = (tokens, *(int(side.segments[TOKEN].stride[0]) for side in cell.sides))
        shapes = [(at, joined_dims(cell.sides[0].itemsize, [along, *dims])) for at, dims in _pieces(cell)]
        for ends in zip(*cell.match.places(cell.destination, cell.source).tolist(), strict=True):
            for more, shape in shapes:
                ours, theirs = ((regions[at], offset + far) for (at, offset), far in zip(ends, more, strict=True))
                boxes.setdefault(shape, []).append((ours, theirs))
    return merged(boxes)


def _pieces(cell: Cell) -> Iterator[tuple[list[int], tuple[Strides, ...]]]:
    """The boxes of one token of one tensor, by rule S9: the offset on both sides, and dims."""
    (ours, theirs), axes = cell.sides, [axis for axis in cell.parts if axis != TOKEN]
    every = [_intervals(cell.parts[axis], (ours.segments[axis], theirs.segments[axis])) for axis in axes]
    for product in itertools.product(*every):
        yield [sum(at[side] for at, _ in product) for side in (0, 1)], tuple(dim for _, dim in product)


def _intervals(part: Part, sides: tuple[Segments, Segments]) -> list[tuple[list[int], Strides]]:
    """The intervals of one axis along which both sides have a constant stride: offsets, extent and strides."""
    found = []
    for low, high in part.intervals.tolist():
        inner = {int(at) for side in sides for at in (*side.start, *side.stop) if low < at < high}
        for start, stop in itertools.pairwise(sorted({low, high, *inner})):
            strides = [int(side.stride[np.searchsorted(side.start, start, "right") - 1]) for side in sides]
            offsets = [int(side.at(np.array([start]))[0]) for side in sides]
            found.append((offsets, (stop - start, *strides)))
    return found


def joined_dims(length: int, dims: Iterable[Strides]) -> BoxShape:
    """Dims by ascending stride, each joined to the one before where it continues it on all sides.

    >>> joined_dims(2, [(4, 256, 64), (32, 2, 2), (8, 1024, 256), (2, 64, 4096)])
    (64, ((2, 64, 4096), (32, 256, 64)))
    """
    made: list[Strides] = []
    for extent, *strides in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1:]):
        if not made and set(strides) == {length}:
            length *= extent
        elif made and strides == [made[-1][0] * stride for stride in made[-1][1:]]:
            made[-1] = made[-1][0] * extent, *made[-1][1:]
        else:
            made.append((extent, *strides))
    return length, tuple(made)


def merged(boxes: Boxes) -> Boxes:
    """As few boxes as rule S10 makes of them: joined along the most frequent step, again and again."""
    while _number(fewer := _joined(boxes)) < _number(boxes):
        boxes = fewer
    return boxes


def _number(boxes: Boxes) -> int:
    return sum(map(len, boxes.values()))


def _joined(boxes: Boxes) -> Boxes:
    """Boxes of equal shape in the same regions, with one more extent where they follow each other by one step."""
    made: Boxes = {}
    for (length, dims), origins in boxes.items():
        by_regions: dict[tuple[Region, Region], list[tuple[int, int]]] = {}
        for (ours, here), (theirs, there) in origins:
            by_regions.setdefault((ours, theirs), []).append((here, there))
        for (ours, theirs), offsets in by_regions.items():
            for (here, there), extent in _chains(sorted(offsets)):
                made.setdefault(joined_dims(length, [*dims, extent]), []).append(((ours, here), (theirs, there)))
    return made


def _chains(offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Strides]]:
    """Offsets as chains by the step that is most frequent between neighbours: the first of each, its extent and step.

    >>> list(_chains([(0, 0), (10, 8), (110, 24), (210, 40), (310, 56)]))
    [((0, 0), (1, 100, 16)), ((10, 8), (4, 100, 16))]
    """
    steps = [(there[0] - here[0], there[1] - here[1]) for here, there in itertools.pairwise(offsets)]
    usual = Counter(step for step in steps if min(step) >= 0).most_common(1)
    step, first = usual[0][0] if usual else (0, 0), 0
    for last in range(len(offsets)):
        if last == len(steps) or steps[last] != step:
            yield offsets[first], (last - first + 1, *step)
            first = last + 1
