"""Strided local copies: between a staging buffer and a worker's own blocks, in one process.

- staging.S9: the segments of both sides and the intervals of a cell cut each axis into intervals of
  constant stride. A *box* is a product of such intervals, for one token of one tensor.
- staging.S10: boxes of equal shape in the same regions, whose offsets grow by one step on either
  side, become one box with one more extent: layers, K and V, the digits of an axis. Boxes of equal
  shape that remain are *origins* of one copy, such as layers in regions of their own. So one copy
  serves all layers.
- staging.S11: positions are copied in runs of ``L``: the greatest length for which the runs that
  begin at multiples of ``L`` lie within one block and one digit on both sides, and move completely
  or not at all. Runs that a request's range cuts are copied token by token.

So a request takes at most two copies for each shape of box, one of runs and one of single tokens. A
copy never writes a byte twice.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import attrs
import numpy as np

from kvplan._arrays import Ints, distinct, integers_in, read_only
from kvplan._text import brief_repr, count, fold
from kvplan.budget import Budget
from kvplan.describe.blocks import Blocks, table_indices
from kvplan.describe.views import TOKEN, Geometry, Group, Region
from kvplan.plan.align import local_index, positions_between
from kvplan.plan.cells import Cell
from kvplan.plan.runs import token_strides
from kvplan.plan.tables import Descriptors

Origin = tuple[Region, int]
"""A region and an offset in it, in bytes."""

BothGroups = tuple[Group, Group]
"""A group of the destination, and one of the source."""

BothTables = tuple[Blocks, Blocks]
"""The block tables of both."""

Dim = tuple[int, ...]
"""An extent and, for each side, the stride in bytes."""

BoxShape = tuple[int, tuple[Dim, ...]]
"""The bytes of a box's runs, and the dims along which these lie, the destination's finest first."""

Boxes = dict[BoxShape, list[tuple[Origin, Origin]]]
"""Boxes by shape: where each begins on both sides, the destination's first."""

BOX_BYTES: Final = 2000
"""Estimated cost of a box of a tensor that is copied."""

SEGMENT_BYTES: Final = 40
"""Estimated cost of a segment of an axis, each time that it is looked at."""

POSITION_BYTES: Final = 64
"""Estimated cost of a position of a cycle."""

DESTINATION: Final = 0
SOURCE: Final = 1
"""The indices of both sides, wherever a pair has one thing for each."""

ROLES: Final = ("destination", "source")
"""The names that errors give to the block tables of both sides."""


@attrs.frozen(eq=False)
class CopySide:
    """One side of a copy: a box at each of ``offsets`` behind each of ``origins``, in bytes.

    ``strides_bytes`` has the stride of each of the copy's extents.
    """

    origins: tuple[Origin, ...]
    offsets: Ints
    strides_bytes: tuple[int, ...]

    __repr__ = brief_repr

    @property
    def region_names(self) -> str:
        """The regions of the origins, folded."""
        return fold([region.name for region, _ in self.origins])


@attrs.frozen(eq=False, repr=False)
class Copy:
    """Boxes of ``extents`` runs of ``length_bytes``, copied within one worker.

    The nth box of the nth origin of the source goes to the nth box of the nth origin of the
    destination.
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
        num_boxes = self.num_origins * self.destination.offsets.size
        return num_boxes * math.prod(self.extents) * self.length_bytes

    def ranges(self) -> tuple[Descriptors, Descriptors]:
        """Return what is written and what is read: (n, 3) uint64 of address, length, device."""
        return self._ranges(self.destination), self._ranges(self.source)

    def _ranges(self, side: CopySide) -> Descriptors:
        # one element for each run of each box: how far the run is behind an origin
        run_offsets = side.offsets
        for extent, stride in zip(self.extents, side.strides_bytes, strict=True):
            run_offsets = np.add.outer(run_offsets, np.arange(extent) * stride).reshape(-1)
        # one row for each origin: its address and its device
        addresses = [(region.address + offset, region.device_id) for region, offset in side.origins]
        origins = np.array(addresses, np.uint64)
        # one row for each origin, one column for each run: address, length, device
        descriptors = np.empty((len(origins), run_offsets.size, 3), np.uint64)
        descriptors[:, :, 0] = np.add.outer(origins[:, 0], run_offsets.astype(np.uint64))
        descriptors[:, :, 1] = self.length_bytes
        descriptors[:, :, 2] = origins[:, 1:]
        return read_only(descriptors.reshape(-1, 3))

    def __repr__(self) -> str:
        box = " x ".join(map(str, (*self.extents, self.length_bytes)))
        boxes = f"{count(self.destination.offsets.size, 'box')} of {box} bytes"
        times = f"{self.num_origins} times " if self.num_origins > 1 else ""
        regions = f"{self.destination.region_names} <- {self.source.region_names}"
        return f"<Copy {regions}: {times}{boxes}>"


@attrs.frozen(eq=False)
class CopyTemplate:
    """The copies between two groups, for any block tables: of runs, and of single tokens.

    ``sides`` are the geometries of a view of the destination and of one of the source, of which one
    is a staging buffer's. Of every ``period`` positions, those in ``carried`` move. ``boxes`` has
    the boxes of runs by the tokens of a run.
    """

    carried: Ints
    period: int
    sides: tuple[Geometry, Geometry]
    run_tokens: int
    boxes: Mapping[int, Boxes]

    def positions(self, table: Blocks, low: int, high: int) -> Ints:
        """Return the positions in ``[low, high)`` that move to the blocks of a destination."""
        positions = positions_between(self.carried, self.period, low, high)
        if table.scattered is None or not positions.size:
            return positions
        # the table has gaps: only the positions whose blocks it has
        group = self.sides[DESTINATION].group
        block_ordinals = local_index(group, positions) // group.num_slots
        return positions[np.isin(block_ordinals, table.scattered)]

    def copies(self, positions: Ints, low: int, high: int, tables: BothTables) -> Iterator[Copy]:
        """Yield the copies of some positions in ``[low, high)``, by rule staging.S11."""
        # one element for each position: where its run starts, and whether the range has all of it
        run_starts = positions // self.run_tokens * self.run_tokens
        is_whole = (run_starts >= low) & (run_starts + self.run_tokens <= high)
        # a whole run is copied from its first position on, what the range cuts token by token
        whole_runs = positions[is_whole & (run_starts == positions)]
        yield from self._copies_of(whole_runs, self.run_tokens, tables)
        yield from self._copies_of(positions[~is_whole], 1, tables)

    def _copies_of(self, starts: Ints, num_tokens: int, tables: BothTables) -> Iterator[Copy]:
        """Yield the copies of the runs of ``num_tokens`` tokens that begin at some positions."""
        if not starts.size:
            return
        offsets = [self._offsets(side, starts, tables[side]) for side in (DESTINATION, SOURCE)]
        for (length_bytes, dims), origins in self.boxes[num_tokens].items():
            destination = _copy_side(DESTINATION, origins, offsets[DESTINATION], dims)
            source = _copy_side(SOURCE, origins, offsets[SOURCE], dims)
            extents = tuple([dim[0] for dim in dims])
            yield Copy(destination, source, extents, length_bytes)

    def _offsets(self, side: int, positions: Ints, table: Blocks) -> Ints:
        """Return how far behind an origin, the first slot of block 0, each position is."""
        geometry = self.sides[side]
        group = geometry.group
        block_ordinals, slot = np.divmod(local_index(group, positions), group.num_slots)
        indices = table_indices(group.name, table, block_ordinals, ROLES[side])
        block_ids = table.ids[indices].astype(np.int64)
        return block_ids * geometry.block_stride_bytes + geometry.segments[TOKEN].at(slot)


def _copy_side(
    side: int,
    origins: Iterable[tuple[Origin, Origin]],
    offsets: Ints,
    dims: Iterable[Dim],
) -> CopySide:
    """Return one side of a copy of boxes that begin at ``offsets`` behind their origins."""
    side_origins = [both_origins[side] for both_origins in origins]
    return CopySide(tuple(side_origins), offsets, tuple([dim[1 + side] for dim in dims]))


def copy_templates(
    regions: Sequence[Region], cells: Iterable[Cell], budget: Budget
) -> tuple[CopyTemplate, ...]:
    """Return the templates of the copies of cells within one worker.

    There is one for all cells of the same groups, strides and positions.
    """
    # such cells move the same slots of the same blocks, so all their boxes form one template
    by_paging: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        groups = [side.group for side in cell.sides]
        action = f"stage {cell.match.names[0]!r}"
        budget.spend(cell.slices[TOKEN].size, "positions of a cycle", POSITION_BYTES, action)
        by_paging.setdefault((*groups, *token_strides(cell)), []).append(cell)
    templates = []
    for paged_alike in by_paging.values():
        first_cell = paged_alike[0]
        run_tokens = _run_tokens(first_cell)
        templates.append(
            CopyTemplate(
                carried=integers_in(first_cell.slices[TOKEN].intervals),
                period=first_cell.cycle,
                sides=first_cell.sides,
                run_tokens=run_tokens,
                boxes={n: _boxes(regions, paged_alike, n, budget) for n in {run_tokens, 1}},
            )
        )
    return tuple(templates)


def ordinals(group: Group, positions: Iterable[Ints]) -> Ints:
    """Return the ordinals of the blocks of a group that hold any of some positions."""
    no_positions = np.zeros(0, np.int64)  # concatenate wants at least one array
    all_positions = np.concatenate([*positions, no_positions])
    if not all_positions.size:
        return all_positions
    return distinct(local_index(group, all_positions) // group.num_slots)


def _run_tokens(cell: Cell) -> int:
    """Return the ``L`` of rule staging.S11.

    It divides the first digit and the context's interleave of both sides, and all positions at
    which a run is cut.
    """
    multiples = list[int]()
    for side in cell.sides:
        multiples.append(int(side.segments[TOKEN].length[0]))
        if side.group.context.size > 1:
            multiples.append(side.group.interleave_slots)
    token_slice = cell.slices[TOKEN]
    if token_slice.size < cell.cycle:
        # only some positions move: runs begin and end where these do
        multiples.append(cell.cycle)
        multiples += token_slice.intervals.reshape(-1).tolist()
    return math.gcd(*multiples)


def _boxes(
    regions: Sequence[Region], cells: Iterable[Cell], num_tokens: int, budget: Budget
) -> Boxes:
    """Return the boxes of runs of ``num_tokens`` tokens of cells of equal paging, by staging.S9 and
    staging.S10.
    """
    boxes: Boxes = {}
    for cell in cells:
        itemsize = cell.sides[0].itemsize
        run_dim = (num_tokens, *(int(side.segments[TOKEN].stride[0]) for side in cell.sides))
        token_boxes = list(_token_boxes(cell, budget))
        shapes = [joined_dims(itemsize, [run_dim, *token_box.dims]) for token_box in token_boxes]
        # for each tensor of the cell, the region and the offset of its view on both sides
        destinations, sources = cell.match.region_offsets(cell.destination, cell.source).tolist()
        for destination, source in zip(destinations, sources, strict=True):
            for token_box, shape in zip(token_boxes, shapes, strict=True):
                to_origin = regions[destination[0]], destination[1] + token_box.offsets[0]
                from_origin = regions[source[0]], source[1] + token_box.offsets[1]
                boxes.setdefault(shape, []).append((to_origin, from_origin))
    return merged(boxes)


class _TokenBox(NamedTuple):
    """A box of one token of one tensor: its offset in the block on both sides, and its dims.

    There is a dim for each axis that the box is of.
    """

    offsets: tuple[int, int]
    dims: tuple[Dim, ...]


def _token_boxes(cell: Cell, budget: Budget) -> Iterator[_TokenBox]:
    """Yield the boxes of one token of one tensor, by rule staging.S9."""
    axes = [axis for axis in cell.slices if axis != TOKEN]
    intervals_by_axis = [_intervals(cell, axis, budget) for axis in axes]
    number = math.prod(map(len, intervals_by_axis)) * len(cell.match.names)
    budget.spend(number, "boxes to copy", BOX_BYTES, f"stage {cell.match.names[0]!r}")
    for intervals in itertools.product(*intervals_by_axis):
        destination_offset = sum(interval.offsets[0] for interval in intervals)
        source_offset = sum(interval.offsets[1] for interval in intervals)
        dims = tuple(interval.dims[0] for interval in intervals)
        yield _TokenBox((destination_offset, source_offset), dims)


def _intervals(cell: Cell, axis: str, budget: Budget) -> list[_TokenBox]:
    """Return the intervals of one axis, as boxes of this axis alone, by rule staging.S9."""
    sides = [side.segments[axis] for side in cell.sides]
    # each interval looks at all segments
    num_segments = sum(segments.start.size for segments in sides)
    number = num_segments * (len(cell.slices[axis].intervals) + num_segments)
    action = f"stage {cell.match.names[0]!r}"
    budget.spend(number, "segments of an axis", SEGMENT_BYTES, action)
    intervals = []
    for low, high in cell.slices[axis].intervals.tolist():
        # both sides step evenly between neighbouring bounds
        bounds = {low, high}
        for segments in sides:
            ends = [*segments.start.tolist(), *segments.stop.tolist()]
            bounds.update(end for end in ends if low < end < high)
        for start, stop in itertools.pairwise(sorted(bounds)):
            # in one segment of each side, so that a layout ends with the one stride
            (to_offset, (*_, to_stride)), (from_offset, (*_, from_stride)) = (
                segments.seen(start, stop) for segments in sides
            )
            dim = stop - start, to_stride, from_stride
            intervals.append(_TokenBox((to_offset, from_offset), (dim,)))
    return intervals


def joined_dims(length: int, dims: Iterable[Dim]) -> BoxShape:
    """Return dims by ascending stride, each joined to the one before where it continues that one.

    It continues on all sides or not at all.

    >>> joined_dims(2, [(4, 256, 64), (32, 2, 2), (8, 1024, 256), (2, 64, 4096)])
    (64, ((2, 64, 4096), (32, 256, 64)))
    """
    joined: list[Dim] = []
    longer_dims = [dim for dim in dims if dim[0] > 1]
    for extent, *strides in sorted(longer_dims, key=lambda dim: dim[1:]):
        # what follows a run directly, on all sides, makes it longer
        if not joined and set(strides) == {length}:
            length *= extent
        elif joined and strides == _spans(joined[-1]):
            last_extent, *last_strides = joined[-1]
            joined[-1] = (last_extent * extent, *last_strides)
        else:
            joined.append((extent, *strides))
    return length, tuple(joined)


def _spans(dim: Dim) -> list[int]:
    """Return the bytes from the beginning to the end of a dim, for each side."""
    extent, *strides = dim
    return [extent * stride for stride in strides]


def merged(boxes: Boxes) -> Boxes:
    """Return the boxes that rule staging.S10 leaves: joined along the most frequent step,
    repeatedly.
    """
    while num_boxes(fewer_boxes := _joined(boxes)) < num_boxes(boxes):
        boxes = fewer_boxes
    return boxes


def num_boxes(boxes: Boxes) -> int:
    """Return the number of boxes of all shapes."""
    return sum(map(len, boxes.values()))


def _joined(boxes: Boxes) -> Boxes:
    """Return boxes with one more extent, where those of one shape and region are one step apart."""
    joined: Boxes = {}
    for (length_bytes, dims), origins in boxes.items():
        offsets_by_regions: dict[tuple[Region, Region], list[tuple[int, int]]] = {}
        # where boxes of one shape begin, for each pair of regions
        for (to_region, to_offset), (from_region, from_offset) in origins:
            regions = to_region, from_region
            offsets_by_regions.setdefault(regions, []).append((to_offset, from_offset))
        for (to_region, from_region), offsets in offsets_by_regions.items():
            for (to_offset, from_offset), dim in _chains(sorted(offsets)):
                shape = joined_dims(length_bytes, [*dims, dim])
                both_origins = (to_region, to_offset), (from_region, from_offset)
                joined.setdefault(shape, []).append(both_origins)
    return joined


def _chains(offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Dim]]:
    """Yield chains of offsets that are one step apart, the most frequent step between neighbours.

    A chain is its first offsets, its extent and its step.

    >>> list(_chains([(0, 0), (10, 8), (110, 24), (210, 40), (310, 56)]))
    [((0, 0), (1, 100, 16)), ((10, 8), (4, 100, 16))]
    """
    neighbours = itertools.pairwise(offsets)
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in neighbours]
    # strides are not negative, so a step back begins another chain
    steps_forward = Counter(step for step in steps if min(step) >= 0)
    usual_step = steps_forward.most_common(1)[0][0] if steps_forward else (0, 0)
    first = 0
    for last in range(len(offsets)):
        # a chain ends at an offset that the usual step does not follow
        if last == len(steps) or steps[last] != usual_step:
            yield offsets[first], (last - first + 1, *usual_step)
            first = last + 1
