"""Staging buffers: memory in which a worker stores what it exchanges with a peer, in the peer's own byte order.

Runs are long where both sides store bytes in the same order. A destination of another order therefore reads long runs
into a staging buffer, and then copies the bytes into place locally. A source copies bytes into a staging buffer in the
destination's order, and then writes long runs from there.

- S1: a staging buffer has a group for each pair of groups, of the destination and of the source, between which bytes
  move. It has the block size and the context of the peer's group.
- S2: the group has each view of the peer that takes part: along an axis of one digit the interval that is needed, or
  with ``whole`` all that the peer holds; along the token axis, and axes of several digits, always all.
- S3: views whose blocks lie within one block stride of the peer's pool form a *frame*. The buffer drops the bytes of a
  frame that are not needed, and stores the others in the peer's order. So one run of a peer's block is one run of the
  buffer's, across axes, layers, K and V, and scales.
- S4: each view is packed by itself where strides cannot express rule S3, and where blocks lie inside other axes: its
  digits and blocks are ordered by the strides that they have at the peer.
- S5: each frame has a *pool* of its own. The pools of all peers follow each other in the staging region.
- S6: a chunk covers a window of ``W`` positions; the kth begins at ``k * W``. ``W`` is a multiple of the period after
  which the blocks and contexts of all groups repeat, so that few blocks are cut. If no such window fits, ``W`` is a
  multiple of the longest period of a single group that fits, then of what divides all periods, then any number.
- S7: every staging buffer has room for two chunks, so that one is filled while the other is emptied: for each group
  twice the most blocks that a window touches, and twice one state.
- S8: ``W`` is the greatest that fits.

>>> fit([(Group("attn", 16), 4096), (Group("state"), 1000)], 1 << 20)
Fit(num_positions=2032, places=((0, 127), (1040384, 1)))
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import numpy as np

from kvplan._arrays import Ints, distinct
from kvplan._checks import INT64_END, instance, name
from kvplan.describe.views import TOKEN, Group, Region, View
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.align import cycle, period, slots
from kvplan.plan.cells import Cell
from kvplan.plan.transfer import TransferPlan, shares
from kvplan.staging.copies import SOURCE, BothGroups, CopyTemplate, joined_dims

NumberedView = tuple[int, View]
"""A view, and its index among the views of the peer."""

MAX_RUNS: Final = 1 << 18
"""The most runs of a frame that rule S3 is applied to. The views of a larger frame are packed by themselves."""

Demand = tuple[Group, int]
"""A group, and the bytes of one block of a pool."""

ALIGNMENT: Final = 64
"""Pools begin at multiples of this many bytes, so that copies can use wide words."""

MAX_WINDOW: Final = 1 << 30
"""The most positions of a chunk, so that block ids fit."""


@attrs.frozen(eq=False)
class Pool:
    """Views that share blocks of ``block_bytes``, placed as in a pool of one block.

    ``inner_bytes`` of a block are contiguous; fewer than all where blocks lie inside the outermost axes.
    """

    views: tuple[NumberedView, ...]
    block_bytes: int
    inner_bytes: int

    def placed(self, group: str, region: str, offset_bytes: int, num_blocks: int) -> Iterator[NumberedView]:
        """The views in a pool of ``num_blocks`` blocks that begins at an offset of a region."""
        for number, view in self.views:
            times = [1 if axis.stride_bytes < self.inner_bytes else num_blocks for axis in view.axes]
            axes = [attrs.evolve(a, stride_bytes=a.stride_bytes * n) for a, n in zip(view.axes, times, strict=True)]
            at = offset_bytes + view.offset_bytes
            yield number, View(view.name, group, region, view.dtype, axes, num_blocks, self.inner_bytes, at)


@attrs.frozen(eq=False)
class StagingBuffer:
    """Staging memory for one peer, described as a worker under the peer's key.

    ``side`` is the peer's: 0 for a destination, 1 for a source. ``groups`` has the buffer's group for each pair of
    groups. The blocks of a group form two buffer slots of ``slot_blocks`` each, by group name. ``numbers`` has the
    index of a view, by the name of its group and the index of the peer's view.
    """

    worker: Worker
    side: int
    groups: Mapping[BothGroups, Group]
    slot_blocks: Mapping[str, int]
    numbers: Mapping[tuple[str, int], int]

    def local_step(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells between the buffer and its worker, given those between the peer and the worker."""
        return self._replacing(self.side, cells)

    def transfer_step(self, peer: Worker, cells: Iterable[Cell]) -> list[Cell]:
        """The cells between the buffer and the peer, given those between the worker and the peer.

        A worker writes just what is needed, and reads all that the buffer has room for: then runs are long.
        """
        if self.side == 0:
            return self._replacing(1, cells)
        made = []
        for (_, theirs), group in self.groups.items():
            ours, source = _only(self.worker, group), _only(peer, theirs)
            made += [cell for *_, found in shares([ours], [source], (), 1) for cell in found]
        return made

    def _replacing(self, side: int, cells: Iterable[Cell]) -> list[Cell]:
        """Cells with the buffer's views on one side, one for each geometry that these have.

        Coordinates and positions stay, so that no other byte moves.
        """
        replaced = []
        geometry_of = np.array(self.worker.geometry_of, np.int64)
        for cell in cells:
            # one element for each tensor of the cell: the buffer's view of it, and that view's geometry
            views = self._views(cell)
            geometries = geometry_of[views]
            for number in distinct(geometries).tolist():
                has_geometry = geometries == number
                with_buffer = (self.worker, self.worker.geometries[number], views[has_geometry])
                match = cell.match.of_tensors(has_geometry)
                if side == SOURCE:
                    replaced.append(attrs.evolve(cell, match=match.with_source(*with_buffer), source=0))
                else:
                    replaced.append(attrs.evolve(cell, match=match.with_destination(*with_buffer), destination=0))
        return replaced

    def _views(self, cell: Cell) -> Ints:
        """Return the index of the buffer's view of each tensor of a cell."""
        group_name = self.groups[_groups(cell)].name
        peer_views = view_numbers(cell)[self.side].tolist()
        return np.array([self.numbers[group_name, peer_view] for peer_view in peer_views], np.int64)


@attrs.frozen(eq=False)
class StagedPeer:
    """Both steps between a worker and one peer: ``transfer`` is the plan between ``buffer`` and the peer.

    The plan's local worker is the buffer's, under the key of the worker. ``templates`` make the local copies.
    """

    buffer: StagingBuffer
    transfer: TransferPlan
    templates: tuple[CopyTemplate, ...]


def view_numbers(cell: Cell) -> tuple[Ints, Ints]:
    """For each tensor of a cell, the index of its view among the destination's, and among the source's."""
    ours, theirs = cell.match.views
    return ours[:, cell.destination], theirs[:, cell.match.sources.column[cell.source]]


def pools(peer: Worker, cells: Iterable[Cell], side: int, whole: bool = False) -> dict[BothGroups, tuple[Pool, ...]]:
    """The pools for a peer's side of these cells, by rules S1 to S4."""
    needed: dict[BothGroups, dict[int, dict[str, tuple[int, int]]]] = {}
    for cell in cells:
        views = needed.setdefault(_groups(cell), {})
        for number in view_numbers(cell)[side].tolist():
            spans = views.setdefault(number, {})
            for axis, part in cell.parts.items():
                (low, high), (start, stop) = part.span, spans.get(axis, part.span)
                spans[axis] = min(low, start), max(high, stop)
    found = {}
    for groups, views in needed.items():
        numbered = [
            (number, peer.views[number] if whole else _trimmed(peer.views[number], spans))
            for number, spans in views.items()
        ]
        found[groups] = tuple(pool for frame in _frames(numbered) for pool in _pools(frame))
    return found


@attrs.frozen
class Fit:
    """The positions of a window and, for each pool, its offset in the region and the blocks of one buffer slot."""

    num_positions: int
    places: tuple[tuple[int, int], ...]


def fit(demands: Sequence[Demand], size_bytes: int) -> Fit:
    """The longest window for which the pools of ``demands`` fit into a region. Raises ``MEMORY`` if none does."""
    periods = {period(group) for group, _ in demands if group.tokens_per_block is not None} or {MAX_WINDOW}
    for grain in sorted({math.lcm(*periods), *periods, math.gcd(*periods), 1}, reverse=True):
        windows = range(grain, MAX_WINDOW + 1, grain)
        fitting = bisect_right(windows, size_bytes, key=lambda window: _laid_out(demands, window, grain)[1])
        if fitting:
            return Fit(fitting * grain, _laid_out(demands, fitting * grain, grain)[0])
    needed = _laid_out(demands, 1, 1)[1]
    expected, got = f"a staging region of at least {needed} bytes, two blocks of each group", f"{size_bytes}"
    raise KVPlanError(
        "MEMORY", "stage a request", expected=expected, got=got, needed_bytes=needed, size_bytes=size_bytes
    )


def blocks_touched(group: Group, window: int, grain: int) -> int:
    """The most blocks of a group that one window touches; windows begin at multiples of ``grain``.

    >>> [blocks_touched(Group("attn", 16), *window) for window in ((64, 64), (64, 8), (64, 1), (8, 8))]
    [4, 5, 5, 1]
    """
    if group.tokens_per_block is None:
        return 1
    every, run = cycle(group), group.context.interleave_tokens
    if grain % every:
        held, step = window // every * run + min(window % every, run), 1
    else:
        held, step = window // group.context.size, math.gcd(grain // group.context.size, slots(group))
    # the worker holds at most `held` positions of a window, which begins at most `slots - step` slots into a block
    return (slots(group) - step + held - 1) // slots(group) + 1


def _laid_out(demands: Sequence[Demand], window: int, grain: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """The places of the pools, and where the last one ends."""
    places, end = [], 0
    touched = {group: blocks_touched(group, window, grain) for group in {group for group, _ in demands}}
    for group, block_bytes in demands:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        places.append((offset, touched[group]))
        end = offset + 2 * touched[group] * block_bytes
    return tuple(places), end


def staging_buffer(
    local: Worker,
    peer: Worker,
    side: int,
    region: str,
    pools_of: Mapping[BothGroups, Sequence[Pool]],
    places: Iterator[tuple[int, int]],
) -> StagingBuffer:
    """The buffer for a peer in a region of ``local``; ``places`` has each pool's offset and the blocks of a slot."""
    groups: dict[BothGroups, Group] = {}
    slot_blocks: dict[str, int] = {}
    views: list[View] = []
    numbers: dict[tuple[str, int], int] = {}
    for pair, frames in pools_of.items():
        group = groups[pair] = attrs.evolve(pair[side], name="<-".join(each.name for each in pair))
        for pool in frames:
            offset, slot_blocks[group.name] = next(places)
            for number, view in pool.placed(group.name, region, offset, 2 * slot_blocks[group.name]):
                numbers[group.name, number] = len(views)
                views.append(view)
    worker = Worker(peer.engine_id, peer.rank, local.regions, groups.values(), views)
    return StagingBuffer(worker, side, groups, slot_blocks, numbers)


def _groups(cell: Cell) -> BothGroups:
    ours, theirs = cell.sides
    return ours.group, theirs.group


def _only(worker: Worker, group: Group) -> Worker:
    """A worker with the views of one group: another group may hold some of the same, in other blocks."""
    views = [view for view in worker.views if view.group == group.name]
    return worker if len(views) == len(worker.views) else attrs.evolve(worker, views=views)


def _trimmed(view: View, spans: Mapping[str, tuple[int, int]]) -> View:
    """The part of a view that is needed, by rule S2."""
    digits = Counter(axis.name for axis in view.axes)
    axes, offset = [], view.offset_bytes
    for axis in view.axes:
        start, stop = axis.start, axis.stop
        if digits[axis.name] == 1 and axis.name != TOKEN:
            start, stop = spans.get(axis.name, (start, stop))  # cells leave out axes of size 1
        offset += (start - axis.start) * axis.stride_bytes
        axes.append(attrs.evolve(axis, start=start, stop=stop))
    return attrs.evolve(view, axes=axes, offset_bytes=offset)


def _step(view: View) -> int:
    """Bytes from block to block; of a view of one block, as if the next one were far away."""
    return view.block_stride_bytes if view.num_blocks > 1 else INT64_END


def _span(view: View) -> int:
    """Bytes from the first to the last byte of a block, both included."""
    return sum((axis.extent - 1) * axis.stride_bytes for axis in view.axes) + view.itemsize


def _frames(views: Iterable[NumberedView]) -> Iterator[list[NumberedView]]:
    """The frames of rule S3. A view that spans more than one block stride is alone."""
    by_step: dict[tuple[str, int], list[NumberedView]] = {}
    for number, view in sorted(views, key=operator.itemgetter(0)):
        if _span(view) > _step(view):
            yield [(number, view)]
        else:
            by_step.setdefault((view.region, _step(view)), []).append((number, view))
    for (_, step), pool in by_step.items():
        frame: list[NumberedView] = []
        for number, view in sorted(pool, key=lambda item: item[1].offset_bytes):
            if frame and view.offset_bytes + _span(view) > frame[0][1].offset_bytes + step:
                yield frame
                frame = []
            frame.append((number, view))
        yield frame


def _pools(frame: Sequence[NumberedView]) -> Iterator[Pool]:
    """The pool of a frame by rule S3, or of each of its views by rule S4."""
    if len(frame) > 1 and (pool := _packed_together(frame)):
        yield pool
    else:
        for number, view in frame:
            yield _packed_alone(number, view)


def _packed_alone(number: int, view: View) -> Pool:
    """The pool of one view."""
    axes, length, inner = list(view.axes), view.itemsize, 0
    for i in sorted(range(len(axes)), key=lambda i: view.axes[i].stride_bytes):
        if not inner and axes[i].stride_bytes > _step(view):
            inner = length
        axes[i] = attrs.evolve(axes[i], stride_bytes=length)
        length *= axes[i].extent
    return Pool(((number, attrs.evolve(view, axes=axes, num_blocks=1, offset_bytes=0)),), length, inner or length)


def _packed_together(frame: Sequence[NumberedView]) -> Pool | None:
    """The pool of a frame without the bytes between its runs; none where strides cannot express it."""
    # the bytes of a view's runs, and their number
    lengths = [joined_dims(view.itemsize, [(a.extent, a.stride_bytes) for a in view.axes])[0] for _, view in frame]
    counts = [view.block_bytes // length for (_, view), length in zip(frame, lengths, strict=True)]
    if sum(counts) > MAX_RUNS:
        return None
    starts = [_run_starts(view, length) for (_, view), length in zip(frame, lengths, strict=True)]
    # one entry for each run of block 0 of all views, by offset; packed, it begins where the runs before it end
    length = np.repeat(lengths, counts)
    order = np.argsort(start := np.concatenate(starts))
    start, end = start[order], np.cumsum(length[order])

    def packed(offset: int | Ints) -> Ints:
        at = np.searchsorted(start, offset)
        begin: Ints = end[at] - length[order[at]]
        return begin

    views = []
    for (number, view), run, before in zip(frame, lengths, starts, strict=True):
        first, axes = int(packed(view.offset_bytes)), list(view.axes)
        for i, axis in enumerate(axes):
            if axis.stride_bytes >= run:
                step = int(packed(view.offset_bytes + axis.stride_bytes)) - first
                axes[i] = attrs.evolve(axis, stride_bytes=step)
        made = attrs.evolve(view, axes=axes, num_blocks=1, offset_bytes=first)
        if not np.array_equal(packed(before), _run_starts(made, run)):
            return None
        views.append((number, made))
    return Pool(tuple(views), int(end[-1]), int(end[-1]))


def _run_starts(view: View, run: int) -> Ints:
    """The offset of each run of block 0. Axes of smaller strides than ``run`` lie inside runs."""
    start = np.array(view.offset_bytes, np.int64)
    for axis in view.axes:
        if axis.stride_bytes >= run:
            start = np.add.outer(start, np.arange(axis.extent) * axis.stride_bytes)
    return start.reshape(-1)


def checked_staging(local: Worker, value: str) -> Region:
    """The region that a worker has set aside for staging; it must exist, and no view may use its bytes."""
    key = name(value, "staging")
    regions = {region.name: region for region in instance(Worker, local, "local").regions}
    if key not in regions:
        action, expected = f"stage in a region of {local.label}", f"one of {', '.join(map(repr, regions)) or 'none'}"
        raise KVPlanError("NAME", action, expected=expected, got=f"{key!r}", name=key)
    region = regions[key]
    for view in local.views:
        other = regions[view.region]
        start, stop = max(other.address, region.address), min(other.end, region.end)
        if start < stop and (other.memory, other.device_id) == (region.memory, region.device_id):
            action, got = f"stage in region {key!r} of {local.label}", f"view {view.name!r} in region {other.name!r}"
            expected = "memory that no view has"
            raise KVPlanError("OVERLAP", action, expected=expected, got=got, region=key, view=view.name)
    return region
