"""Mirrors: what moves between a worker and a peer, kept in staging memory of the worker in the peer's own order.

Runs are long where both sides keep bytes in one order. So a destination whose order differs can read into a *mirror*
of a source first, and put the bytes in order afterwards, at home. And a source can put them in order first, in a
mirror of a destination, and write from there.

- S1: a mirror has a group for each two groups, of the destination and of the source, between which bytes move. It is
  paged and spread as the peer's is.
- S2: there it has each view of the peer that bytes move from or to: along an axis of one digit the interval that is
  needed, or with ``whole`` all that there is; along the token axis, and axes of several digits, always all.
- S3: views whose blocks lie within one step of the peer's pool are a *frame*. A mirror keeps its bytes in the peer's
  order: each stands behind as many as are needed before it in the block. So what is one run of a peer's block is one
  of the mirror's, across axes, layers, K and V, and scales.
- S4: where no strides say S3, and where blocks lie inside other axes, each view is packed by itself: its digits and its
  blocks by ascending stride of the peer.
- S5: frames are *pools* of their own and follow each other, as do the mirrors of several peers.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import INT64_END
from kvplan.describe.axes import Axis
from kvplan.describe.views import TOKEN, Group, View
from kvplan.describe.worker import Worker
from kvplan.plan.cells import Cell

Groups = tuple[Group, Group]
"""A group of the destination and one of the source."""

Numbered = tuple[int, View]
"""A view and its number among those of the peer."""

MAX_LISTED: Final = 1 << 18
"""At most so many runs of a frame are put in order; views of more are packed by themselves."""


@attrs.frozen(eq=False)
class Pool:
    """Views whose blocks lie together: each with its number among the peer's views, as it is in a pool of one block.

    A block has ``block_bytes``, of which ``inner_bytes`` lie together: blocks may lie inside the outermost axes.
    """

    views: tuple[Numbered, ...]
    block_bytes: int
    inner_bytes: int

    def placed(self, group: str, region: str, offset_bytes: int, num_blocks: int) -> Iterator[Numbered]:
        """The views in a pool of so many blocks that begins at some offset of a region."""
        for number, view in self.views:
            yield (
                number,
                attrs.evolve(
                    view,
                    group=group,
                    region=region,
                    axes=[self._among(axis, num_blocks) for axis in view.axes],
                    num_blocks=num_blocks,
                    block_stride_bytes=self.inner_bytes,
                    offset_bytes=offset_bytes + view.offset_bytes,
                ),
            )

    def _among(self, axis: Axis, num_blocks: int) -> Axis:
        if axis.stride_bytes < self.inner_bytes:
            return axis
        return attrs.evolve(axis, stride_bytes=axis.stride_bytes * num_blocks)


@attrs.frozen(eq=False)
class Mirror:
    """Staging memory as a worker, under the key of the peer that it mirrors.

    ``side`` is the peer's: 0 for a destination, 1 for a source. ``groups`` has the group of it for each two groups of
    destination and source. Of its blocks, those of one half are filled while those of the other are emptied;
    ``half_blocks`` says how many each has, by group. ``numbers`` has the index among its views for a group's name and
    the index of a view of the peer.
    """

    worker: Worker
    side: int
    groups: Mapping[Groups, Group]
    half_blocks: Mapping[str, int]
    numbers: Mapping[tuple[str, int], int]

    def under(self, worker: Worker) -> Worker:
        """The mirror as what a worker reads into, or writes from: under that worker's key."""
        return attrs.evolve(self.worker, engine_id=worker.engine_id, rank=worker.rank)


def view_numbers(cell: Cell) -> tuple[Ints, Ints]:
    """For every tensor of a cell, the indices of its views among those of destination and source."""
    ours, theirs = cell.match.views
    return ours[:, cell.destination], theirs[:, cell.match.holding.column[cell.source]]


def pools(peer: Worker, share: Iterable[Cell], side: int, whole: bool = False) -> dict[Groups, tuple[Pool, ...]]:
    """The pools that mirror a peer's side of these cells, rules S1 to S4."""
    needed: dict[Groups, dict[int, dict[str, tuple[int, int]]]] = {}
    for cell in share:
        ours, theirs = cell.sides
        views = needed.setdefault((ours.group, theirs.group), {})
        for number in view_numbers(cell)[side].tolist():
            spans = views.setdefault(number, {})
            for axis, part in cell.parts.items():
                (low, high), (start, stop) = part.span, spans.get(axis, part.span)
                spans[axis] = min(low, start), max(high, stop)
    return {
        groups: tuple(
            pool
            for frame in _frames(
                (number, peer.views[number] if whole else _trimmed(peer.views[number], spans))
                for number, spans in views.items()
            )
            for pool in _pools(frame)
        )
        for groups, views in needed.items()
    }


def mirror(
    local: Worker,
    peer: Worker,
    side: int,
    region: str,
    staged: Mapping[Groups, Sequence[Pool]],
    places: Iterator[tuple[int, int]],
) -> Mirror:
    """The mirror of a peer in a region of ``local``; ``places`` has the offset and half the blocks of each pool."""
    groups: dict[Groups, Group] = {}
    half_blocks: dict[str, int] = {}
    views: list[View] = []
    numbers: dict[tuple[str, int], int] = {}
    for both, frames in staged.items():
        group = groups[both] = attrs.evolve(both[side], name="<-".join(each.name for each in both))
        for pool in frames:
            offset, half_blocks[group.name] = next(places)
            for number, view in pool.placed(group.name, region, offset, 2 * half_blocks[group.name]):
                numbers[group.name, number] = len(views)
                views.append(view)
    worker = Worker(peer.engine_id, peer.rank, local.regions, groups.values(), views)
    return Mirror(worker, side, groups, half_blocks, numbers)


def _trimmed(view: View, spans: Mapping[str, tuple[int, int]]) -> View:
    """The part of a view that is needed, rule S2."""
    digits = Counter(axis.name for axis in view.axes)
    axes, offset = [], view.offset_bytes
    for axis in view.axes:
        start, stop = axis.start, axis.stop
        if digits[axis.name] == 1 and axis.name != TOKEN:
            start, stop = spans[axis.name]
        offset += (start - axis.start) * axis.stride_bytes
        axes.append(attrs.evolve(axis, start=start, stop=stop))
    return attrs.evolve(view, axes=axes, offset_bytes=offset)


def _step(view: View) -> int:
    """From block to block; where there is one block, as if the next were far away."""
    return view.block_stride_bytes if view.num_blocks > 1 else INT64_END


def _span(view: View) -> int:
    """From the first byte of a block to past the last."""
    return sum((axis.extent - 1) * axis.stride_bytes for axis in view.axes) + view.itemsize


def _frames(views: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    """Views by the step of their pool that their blocks 0 lie in, rule S3; by itself one that lies in several."""
    alike: dict[tuple[str, int], list[Numbered]] = {}
    for number, view in sorted(views, key=operator.itemgetter(0)):
        if _span(view) > _step(view):
            yield [(number, view)]
        else:
            alike.setdefault((view.region, _step(view)), []).append((number, view))
    for (_, step), pool in alike.items():
        frame: list[Numbered] = []
        for number, view in sorted(pool, key=lambda item: item[1].offset_bytes):
            if frame and view.offset_bytes + _span(view) > frame[0][1].offset_bytes + step:
                yield frame
                frame = []
            frame.append((number, view))
        yield frame


def _pools(frame: Sequence[Numbered]) -> Iterator[Pool]:
    """The pool of a frame, or of each of its views, rule S4."""
    if len(frame) > 1 and (pool := _in_order(frame)):
        yield pool
    else:
        yield from map(_alone, frame)


def _by_stride(view: View) -> list[int]:
    """The indices of the axes that have several coordinates, by ascending stride."""
    several = [i for i, axis in enumerate(view.axes) if axis.extent > 1]
    return sorted(several, key=lambda i: view.axes[i].stride_bytes)


def _alone(only: Numbered) -> Pool:
    """The pool of one view."""
    number, view = only
    axes, length, inner = list(view.axes), view.itemsize, 0
    for i in _by_stride(view):
        if not inner and axes[i].stride_bytes > _step(view):
            inner = length
        axes[i] = attrs.evolve(axes[i], stride_bytes=length)
        length *= axes[i].extent
    return Pool(((number, attrs.evolve(view, axes=axes, num_blocks=1, offset_bytes=0)),), length, inner or length)


def _in_order(frame: Sequence[Numbered]) -> Pool | None:
    """The pool of a frame in which each byte stands behind as many as are needed before it, if strides can say so."""
    runs = [_runs(view) for _, view in frame]
    sizes = [start.size for start, _, _ in runs]
    if sum(sizes) > MAX_LISTED:
        return None
    start, length = np.concatenate([start.reshape(-1) for start, _, _ in runs]), [length for _, length, _ in runs]
    order, lengths = np.argsort(start), np.repeat(np.array(length, np.int64), sizes)
    behind = np.empty_like(start)
    behind[order] = np.cumsum(lengths[order]) - lengths[order]
    views = []
    for (number, view), (shaped, _, listed), part in zip(
        frame, runs, np.split(behind, np.cumsum(sizes)[:-1]), strict=True
    ):
        at, axes = part.reshape(shaped.shape), list(view.axes)
        said = np.array(part[0])
        for place, i in enumerate(listed):
            step = int(np.moveaxis(at, place, 0)[1].flat[0] - part[0])
            axes[i] = attrs.evolve(axes[i], stride_bytes=step)
            said = np.add.outer(said, np.arange(axes[i].extent) * step)
        if not np.array_equal(at, said):
            return None
        views.append((number, attrs.evolve(view, axes=axes, num_blocks=1, offset_bytes=int(part[0]))))
    total = int(lengths.sum())
    return Pool(tuple(views), total, total)


def _runs(view: View) -> tuple[Ints, int, list[int]]:
    """Where the runs of block 0 begin, along each axis that they step along; their length; and those axes."""
    length, listed = view.itemsize, list[int]()
    start = np.array(view.offset_bytes, np.int64)
    for i in _by_stride(view):
        axis = view.axes[i]
        if not listed and axis.stride_bytes == length:
            length *= axis.extent
        else:
            listed.append(i)
            start = np.add.outer(start, np.arange(axis.extent) * axis.stride_bytes)
    return start, length, listed
