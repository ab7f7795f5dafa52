"""Staging buffers: memory for what a worker exchanges with a peer, in the peer's own byte order.

Runs are long where both sides store bytes in the same order. A destination of another order
therefore reads long runs into a staging buffer, and then copies the bytes into place locally.

- staging.S1: a staging buffer has a group for each pair of groups, of the destination and of the
  source, between which bytes move. It has the block size and the context of the peer's group.
- staging.S2: the group has each view of the peer that takes part: along an axis of one digit the
  interval that is needed, or with ``whole`` all that the peer holds; along the token axis, and axes
  of several digits, always all.
- staging.S3: views whose blocks lie within one block stride of the peer's pool form a *frame*. The
  buffer drops the bytes of a frame that are not needed, and stores the others in the peer's order.
  So one run of a peer's block is one run of the buffer's, across axes, layers, K and V, and scales.
- staging.S4: each view is packed by itself where strides cannot express rule staging.S3, and where
  blocks lie inside other axes: its digits and blocks are ordered by the strides that they have at
  the peer.
- staging.S5: each frame has a *pool* of its own. The pools of all peers follow each other in the
  staging region.
- staging.S6: a chunk covers a window of ``W`` positions; the kth begins at ``k * W``. ``W`` is a
  multiple of the period after which the blocks and contexts of all groups repeat, so that few
  blocks are cut. If no such window fits, ``W`` is a multiple of the longest period of a single
  group that fits, then of what divides all periods, then any number.
- staging.S7: every staging buffer has room for two whole chunks, so that one is filled while the
  other is emptied: for each group twice the most blocks that a window touches. Smaller chunks take
  fewer of these blocks, so that more of them fit. Each has a state of its own, so there are twice
  as many states as a window has requests of :data:`STATE_POSITIONS`, two at least.
- staging.S8: ``W`` is the greatest that fits.

>>> attention, state = fit([(Group("attn", 16), 4096), (Group("state"), 1000)], 1 << 20).extents
>>> attention
PoolExtent(offset_bytes=0, num_blocks=254)
>>> state
PoolExtent(offset_bytes=1040384, num_blocks=2)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

import attrs
import numpy as np

from kvplan._arrays import Ints, distinct
from kvplan._checks import INT64_END, instance, name
from kvplan._text import fold, meant
from kvplan.budget import Budget
from kvplan.describe.axes import Axis, contiguous, offsets_along
from kvplan.describe.views import TOKEN, Group, Region, View
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.align import cycle, period
from kvplan.plan.cells import Cell
from kvplan.plan.pairs import assignments
from kvplan.plan.specs import Pair
from kvplan.plan.transfer import TransferPlan
from kvplan.staging.copies import SOURCE, BothGroups, CopyTemplate

MAX_RUNS: Final = 1 << 18
"""The most runs of a frame that rule staging.S3 is applied to; larger frames are packed view by
view.
"""

VIEW_BYTES: Final = 50_000
"""Estimated cost of a view that is packed."""

RUN_BYTES: Final = 100
"""Estimated cost of a run of a frame."""

Demand = tuple[Group, int]
"""A group, and the bytes of one block of a pool."""

Spans = dict[str, tuple[int, int]]
"""An interval of coordinates for each axis."""

ALIGNMENT: Final = 64
"""Pools begin at multiples of this many bytes, so that copies can use wide words."""

STATE_POSITIONS: Final = 1024
"""The positions of a usual request, which has one state."""

MAX_WINDOW: Final = 1 << 30
"""The most positions of a chunk, so that block ids fit."""


class PeerView(NamedTuple):
    """A view of a peer, or the buffer's copy of it, and its number among the peer's views."""

    number: int
    view: View


@attrs.frozen(eq=False)
class Pool:
    """Views that share blocks of ``block_bytes``, placed as in a pool of one block.

    ``inner_bytes`` of a block are contiguous; fewer than all where blocks lie inside the outermost
    axes.
    """

    views: tuple[PeerView, ...]
    block_bytes: int
    inner_bytes: int

    def placed(
        self,
        group: str,
        region: str,
        offset_bytes: int,
        num_blocks: int,
    ) -> Iterator[PeerView]:
        """Yield the views in a pool of ``num_blocks`` blocks that begins at an offset."""
        for number, view in self.views:
            placed = View(
                view.name,
                group,
                region,
                view.dtype,
                [self._spread(axis, num_blocks) for axis in view.axes],
                num_blocks,
                self.inner_bytes,
                offset_bytes + view.offset_bytes,
            )
            yield PeerView(number, placed)

    def _spread(self, axis: Axis, num_blocks: int) -> Axis:
        """Return an axis that steps over all blocks, if blocks lie inside it."""
        if axis.stride_bytes < self.inner_bytes:
            return axis
        return attrs.evolve(axis, stride_bytes=axis.stride_bytes * num_blocks)


@attrs.frozen(eq=False)
class StagingBuffer:
    """Staging memory for one peer, described as a worker under the peer's key.

    ``groups`` has the buffer's group for each pair of groups. ``extents`` has those of each group's
    pools, by its name. ``view_indices`` has the index of a view, by the name of its group and the
    number of the peer's view.
    """

    worker: Worker
    groups: Mapping[BothGroups, Group]
    extents: Mapping[str, tuple[PlacedPool, ...]]
    view_indices: Mapping[tuple[str, int], int]

    def transfer_step(self, peer: Worker, budget: Budget) -> list[Cell]:
        """Return the cells between the buffer and the peer: all that both hold, in long runs."""
        transferred = list[Cell]()
        for (_, source_group), group in self.groups.items():
            destination = _only(self.worker, group)
            source = _only(peer, source_group)
            for assignment in assignments([destination], [source], (), budget):
                transferred += assignment.cells
        return transferred

    def local_step(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return the cells between the buffer and its worker, given those of peer and worker.

        The buffer's views replace the peer's, one cell for each geometry that they have.
        Coordinates and positions stay, so that no other byte moves.
        """
        replaced = list[Cell]()
        geometry_of = np.array(self.worker.geometry_of, np.int64)
        for cell in cells:
            # one element for each tensor: the buffer's view of it, and the index of its geometry
            name = self.groups[_groups(cell)].name
            numbers = source_views(cell).tolist()
            views = np.array([self.view_indices[name, number] for number in numbers], np.int64)
            geometry_indices = geometry_of[views]
            for index in distinct(geometry_indices).tolist():
                has_geometry = geometry_indices == index
                match = cell.match.of_tensors(has_geometry)
                geometry = self.worker.geometries[index]
                match = match.with_source(self.worker, geometry, views[has_geometry])
                replaced.append(attrs.evolve(cell, match=match, source=0))
        return replaced


@attrs.frozen(eq=False)
class StagedPeer:
    """Both steps between a worker and one peer.

    ``transfer`` is the plan between ``buffer`` and the peer; its local worker is the buffer's,
    under the key of the worker. ``templates`` make the local copies.
    """

    buffer: StagingBuffer
    transfer: TransferPlan
    templates: tuple[CopyTemplate, ...]

    @property
    def pair(self) -> Pair:
        """The only pair of the transfer."""
        (pair,) = self.transfer.pairs
        return pair

    def templates_of(self, group: Group) -> list[CopyTemplate]:
        """Return the templates of the copies from or to a group of the buffer."""
        return [template for template in self.templates if template.sides[SOURCE].group == group]


def source_views(cell: Cell) -> Ints:
    """Return the number of each tensor's view among the source's."""
    _, views = cell.match.views
    return views[:, cell.match.sources.column[cell.source]]


def pools(
    peer: Worker,
    cells: Iterable[Cell],
    budget: Budget,
    whole: bool = False,
) -> dict[BothGroups, tuple[Pool, ...]]:
    """Return the pools for the source's side of these cells, by rules staging.S1 to staging.S4."""
    pools_of = {}
    for groups, spans_by_view in _needed_spans(cells).items():
        views = []
        for number, spans in spans_by_view.items():
            view = peer.views[number]
            views.append(PeerView(number, view if whole else _trimmed(view, spans)))
        pools_of[groups] = tuple(
            chain.from_iterable(_pools(frame, budget) for frame in _frames(views))
        )
    return pools_of


def _needed_spans(cells: Iterable[Cell]) -> dict[BothGroups, dict[int, Spans]]:
    """Return the spans that cells need, by pair of groups and by number of the peer's view."""
    needed: dict[BothGroups, dict[int, Spans]] = {}
    for cell in cells:
        spans_by_view = needed.setdefault(_groups(cell), {})
        for number in source_views(cell).tolist():
            spans = spans_by_view.setdefault(number, {})
            for axis, axis_slice in cell.slices.items():
                # several cells may need slices of one view: the span of all of them
                start, stop = axis_slice.span
                low, high = spans.get(axis, axis_slice.span)
                spans[axis] = min(start, low), max(stop, high)
    return needed


class PoolExtent(NamedTuple):
    """An offset in the staging region, and the number of blocks from there on."""

    offset_bytes: int
    num_blocks: int


class PlacedPool(NamedTuple):
    """A pool's extent and its blocks' sizes: buffers that are equal in these share blocks."""

    extent: PoolExtent
    block_bytes: int
    inner_bytes: int


@attrs.frozen
class Fit:
    """The positions of a window and the extent of each pool."""

    num_positions: int
    extents: tuple[PoolExtent, ...]


def fit(demands: Sequence[Demand], size_bytes: int) -> Fit:
    """Return the longest window for which the pools of ``demands`` fit into a region.

    Raises ``MEMORY`` if none does.
    """
    token_groups = [group for group, _ in demands if not group.is_state]
    periods = {period(group) for group in token_groups} or {MAX_WINDOW}
    # rule staging.S6: windows are multiples of a grain, and the coarsest grain that fits is the
    # best
    for grain in sorted({math.lcm(*periods), *periods, math.gcd(*periods), 1}, reverse=True):
        windows = range(grain, MAX_WINDOW + 1, grain)
        layouts = partial(_laid_out, demands, grain)
        num_fitting = bisect_right(windows, size_bytes, key=lambda window: layouts(window)[1])
        if num_fitting:
            longest = windows[num_fitting - 1]
            extents, _ = layouts(longest)
            # states alone are not divided among windows
            return Fit(longest if token_groups else MAX_WINDOW, extents)
    _, needed_bytes = _laid_out(demands, 1, 1)
    raise KVPlanError(
        "MEMORY",
        "stage a request",
        expected=f"a staging region of at least {needed_bytes} bytes, two blocks of each group",
        got=f"{size_bytes}",
        needed_bytes=needed_bytes,
        size_bytes=size_bytes,
    )


def blocks_touched(group: Group, window: int, grain: int) -> int:
    """Return the most blocks of a group that one window touches.

    Windows begin at multiples of ``grain``.

    >>> [blocks_touched(Group("attn", 16), 64, grain) for grain in (64, 8, 1)]
    [4, 5, 5]
    >>> blocks_touched(Group("attn", 16), 8, 8)
    1
    >>> blocks_touched(Group("state"), 4096, 16)
    4
    """
    if group.is_state:
        return max(1, window // STATE_POSITIONS)
    num_slots = group.num_slots
    interleave = group.interleave_slots
    num_turns, rest = divmod(window, cycle(group))
    if grain % cycle(group):
        # a window begins anywhere in a cycle of the context, so anywhere in a block
        most_held = num_turns * interleave + min(rest, interleave)
        slot_step = 1
    else:
        # a window begins where a cycle does, so it begins only at some slots of a block
        most_held = window // group.context.size
        slot_step = math.gcd(grain // group.context.size, num_slots)
    # the worker holds at most `most_held` positions of a window, the first one at most
    # `num_slots - slot_step` slots into a block
    return (num_slots - slot_step + most_held - 1) // num_slots + 1


def _laid_out(
    demands: Sequence[Demand], grain: int, window: int
) -> tuple[tuple[PoolExtent, ...], int]:
    """Return the extents of pools for windows of some length, one after another, and their end."""
    groups = {group for group, _ in demands}
    touched = {group: blocks_touched(group, window, grain) for group in groups}
    extents = []
    end = 0
    for group, block_bytes in demands:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        # two whole chunks, rule staging.S7
        extents.append(PoolExtent(offset, 2 * touched[group]))
        end = offset + extents[-1].num_blocks * block_bytes
    return tuple(extents), end


def staging_buffer(
    local: Worker,
    peer: Worker,
    region: str,
    pools_of: Mapping[BothGroups, Sequence[Pool]],
    extents: Iterator[PoolExtent],
) -> StagingBuffer:
    """Return the buffer for a peer in a region of ``local``; ``extents`` has that of each pool."""
    groups: dict[BothGroups, Group] = {}
    placed: dict[str, tuple[PlacedPool, ...]] = {}
    views: list[View] = []
    view_indices: dict[tuple[str, int], int] = {}
    for both_groups, group_pools in pools_of.items():
        group_name = "<-".join(group.name for group in both_groups)
        groups[both_groups] = attrs.evolve(both_groups[SOURCE], name=group_name)
        for pool in group_pools:
            extent = next(extents)
            like = PlacedPool(extent, pool.block_bytes, pool.inner_bytes)
            placed[group_name] = (*placed.get(group_name, ()), like)
            for number, view in pool.placed(group_name, region, *extent):
                view_indices[group_name, number] = len(views)
                views.append(view)
    worker = Worker(peer.engine_id, peer.rank, local.regions, groups.values(), views)
    return StagingBuffer(worker, groups, placed, view_indices)


def _groups(cell: Cell) -> BothGroups:
    destination, source = cell.sides
    return destination.group, source.group


def _only(worker: Worker, group: Group) -> Worker:
    """Return a worker with the views of one group: another may have the same in other blocks."""
    views = [view for view in worker.views if view.group == group.name]
    return worker if len(views) == len(worker.views) else attrs.evolve(worker, views=views)


def _trimmed(view: View, spans: Mapping[str, tuple[int, int]]) -> View:
    """Return the slice of a view that is needed, by rule staging.S2."""
    # an axis of several digits stays whole: one interval of it is no interval of each digit
    num_digits = Counter(axis.name for axis in view.axes)
    axes = []
    offset_bytes = view.offset_bytes
    for axis in view.axes:
        start, stop = axis.start, axis.stop
        if num_digits[axis.name] == 1 and axis.name != TOKEN:
            start, stop = spans.get(axis.name, (start, stop))  # cells leave out axes of size 1
        offset_bytes += (start - axis.start) * axis.stride_bytes
        axes.append(attrs.evolve(axis, start=start, stop=stop))
    return attrs.evolve(view, axes=axes, offset_bytes=offset_bytes)


def _block_step(view: View) -> int:
    """Return the bytes from block to block; the block after the only one is far away."""
    return view.block_stride_bytes if view.num_blocks > 1 else INT64_END


def _span_bytes(view: View) -> int:
    """Return the bytes from the first to the last byte of a block, both included."""
    return sum((axis.extent - 1) * axis.stride_bytes for axis in view.axes) + view.itemsize


def _frames(views: Iterable[PeerView]) -> Iterator[list[PeerView]]:
    """Yield the frames (staging.S3). A view that spans more than one block stride is alone."""
    by_step: dict[tuple[str, int], list[PeerView]] = {}
    for peer_view in sorted(views, key=lambda peer_view: peer_view.number):
        view = peer_view.view
        if _span_bytes(view) > _block_step(view):
            yield [peer_view]
        else:
            by_step.setdefault((view.region, _block_step(view)), []).append(peer_view)
    # views of one region and one block stride may share a block, those of others cannot
    for (_, step), same_step in by_step.items():
        frame: list[PeerView] = []
        for peer_view in sorted(same_step, key=lambda peer_view: peer_view.view.offset_bytes):
            # a view that ends behind the start of the frame's next block begins another frame
            end = peer_view.view.offset_bytes + _span_bytes(peer_view.view)
            if frame and end > frame[0].view.offset_bytes + step:
                yield frame
                frame = []
            frame.append(peer_view)
        yield frame


def _pools(frame: Sequence[PeerView], budget: Budget) -> Iterator[Pool]:
    """Yield the pool of a frame by rule staging.S3, or of each of its views by rule staging.S4."""
    budget.spend(len(frame), "views to pack", VIEW_BYTES, f"stage {frame[0].view.name!r}")
    if len(frame) > 1 and (pool := _packed_together(frame, budget)):
        yield pool
    else:
        for peer_view in frame:
            yield _packed_alone(peer_view)


def _packed_alone(peer_view: PeerView) -> Pool:
    """Return the pool of one view."""
    number, view = peer_view
    axes = list(view.axes)
    length_bytes = view.itemsize
    inner_bytes = 0
    # from the finest axis on, each steps over all that the finer ones hold
    for digit in sorted(range(len(axes)), key=lambda digit: view.axes[digit].stride_bytes):
        if not inner_bytes and axes[digit].stride_bytes > _block_step(view):
            inner_bytes = length_bytes  # the peer's blocks lie inside this axis
        axes[digit] = attrs.evolve(axes[digit], stride_bytes=length_bytes)
        length_bytes *= axes[digit].extent
    packed = attrs.evolve(view, axes=axes, num_blocks=1, offset_bytes=0)
    return Pool((PeerView(number, packed),), length_bytes, inner_bytes or length_bytes)


@attrs.frozen(eq=False)
class _RunMap:
    """The runs of block 0 of a frame, ascending: where each starts, at the peer and when packed."""

    starts: Ints
    packed_starts: Ints
    num_bytes: int

    @classmethod
    def of(cls, starts: Ints, run_bytes: Ints) -> _RunMap:
        """Return the map of runs in any order: each begins where the runs before it end."""
        order = np.argsort(starts)
        ends = np.cumsum(run_bytes[order])
        return cls(starts[order], ends - run_bytes[order], int(ends[-1]))

    def offsets(self, starts: int | Ints) -> Ints:
        """Return the packed offset of the runs that start at these offsets."""
        packed: Ints = self.packed_starts[np.searchsorted(self.starts, starts)]
        return packed

    def view(self, view: View, run_bytes: int) -> View:
        """Return a view whose offset and strides lead to the packed offsets of its first runs."""
        offset_bytes = int(self.offsets(view.offset_bytes))
        axes = list(view.axes)
        for digit, axis in enumerate(axes):
            # the step from the first run to the next one along the axis; inside runs, steps stay
            if axis.stride_bytes >= run_bytes:
                next_offset = int(self.offsets(view.offset_bytes + axis.stride_bytes))
                axes[digit] = attrs.evolve(axis, stride_bytes=next_offset - offset_bytes)
        return attrs.evolve(view, axes=axes, num_blocks=1, offset_bytes=offset_bytes)


def _packed_together(frame: Sequence[PeerView], budget: Budget) -> Pool | None:
    """Return the pool of a frame without the bytes between its runs.

    Return None where strides cannot express it.
    """
    # one element for each view: the bytes of its runs, and their number
    views = [view for _, view in frame]
    run_bytes = [contiguous(view.axes, view.itemsize)[0] for view in views]
    num_runs = [view.block_bytes // length for view, length in zip(views, run_bytes, strict=True)]
    if sum(num_runs) > MAX_RUNS:
        return None
    budget.spend(sum(num_runs), "runs of a frame", RUN_BYTES, f"stage {views[0].name!r}")
    run_starts = list(map(_run_starts, views, run_bytes))
    run_map = _RunMap.of(np.concatenate(run_starts), np.repeat(run_bytes, num_runs))
    packed_views = []
    for (number, view), length, starts in zip(frame, run_bytes, run_starts, strict=True):
        packed = run_map.view(view, length)
        # the strides of its first runs must lead to all its runs
        if not np.array_equal(run_map.offsets(starts), _run_starts(packed, length)):
            return None
        packed_views.append(PeerView(number, packed))
    return Pool(tuple(packed_views), run_map.num_bytes, run_map.num_bytes)


def _run_starts(view: View, run_bytes: int) -> Ints:
    """Return the offset of each run of block 0."""
    # axes of smaller strides than the bytes of a run lie inside runs
    outer_axes = [axis for axis in view.axes if axis.stride_bytes >= run_bytes]
    return view.offset_bytes + offsets_along(outer_axes)


def checked_staging(local: Worker, value: str) -> Region:
    """Return the region that a worker has set aside for staging.

    Raises ``NAME`` where it does not exist, and ``OVERLAP`` where a view uses its bytes.
    """
    region_name = name(value, "staging")
    regions = {region.name: region for region in instance(Worker, local, "local").regions}
    if region_name not in regions:
        raise KVPlanError(
            "NAME",
            f"stage in a region of {local.label}",
            expected=f"one of the regions {fold(regions) or 'of none'}",
            got=f"{region_name!r}",
            hint=meant(region_name, regions),
            name=region_name,
        )
    region = regions[region_name]
    for view in local.views:
        view_region = regions[view.region]
        if _overlap(view_region, region):
            raise KVPlanError(
                "OVERLAP",
                f"stage in region {region_name!r} of {local.label}",
                expected="memory that no view has",
                got=f"view {view.name!r} in region {view_region.name!r}",
                region=region_name,
                view=view.name,
            )
    return region


def _overlap(region: Region, other_region: Region) -> bool:
    """Return whether two regions share a byte."""
    if (region.memory, region.device_id) != (other_region.memory, other_region.device_id):
        return False
    return max(region.address, other_region.address) < min(region.end, other_region.end)
