"""Engine designs: how each engine stores its tensors, and the workers that follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import attrs

from kvplan.describe import ITEMSIZE, Axis, Blocks, Context, Group, Region, View, Worker

INTERLEAVED, POOL = 2, 3
"""Packings besides 0, a region for each view, and 1, one for each group. Here views share blocks, by group or all."""

BOTH, DESTINATION, SOURCE, EXCLUDED = range(4)
"""Which engines have a tensor: both, one of them, or both although the destination excludes it from the transfer."""


@attrs.frozen
class LogicalTensor:
    """A tensor as both engines know it: axes other than token, and whether it is paged by tokens.

    Engines may group tensors by ``kind``. ``engines`` says which of them have this one.
    """

    name: str
    paged: bool
    sizes: Mapping[str, int]
    dtype: str
    kind: int
    engines: int


@attrs.frozen
class StoredTensor:
    """How one engine stores one tensor.

    ``group`` is the tensor's group on context-parallel rank 0. ``first_axis`` is listed first; ``order`` and ``pads``
    choose the strides. A worker with several coordinates of the axis ``split`` has two views of them, and one with
    several of the axis ``narrowed`` lacks the first.
    """

    tensor: LogicalTensor
    group: Group
    stage: int
    first_axis: int
    order: int
    pads: int
    split: str
    narrowed: str


@attrs.frozen
class EngineDesign:
    """One engine: its parallel sizes, its tensors in the order of its lists, and its memory.

    ``digits`` makes two digits of an axis where possible. ``gap``, ``base`` and ``devices`` place the regions. With
    ``equal_pools``, and where all groups share blocks, every group of a worker has the same number of blocks.
    """

    engine_id: str
    tp: int
    cp: int
    pp: int
    tensors: tuple[StoredTensor, ...]
    packing: int
    digits: bool
    gap: int
    base: int
    devices: int
    extra_blocks: int
    equal_pools: bool = False

    @property
    def groups(self) -> dict[str, Group]:
        """The groups of context-parallel rank 0 by name, in the order of the tensors."""
        return {stored.group.name: stored.group for stored in self.tensors}


def on_ranks(group: Group) -> list[Group]:
    """A group on each context-parallel rank."""
    size, run = group.context.size, group.context.interleave_tokens
    return [
        Group(group.name, group.tokens_per_block, Context(rank, size, run)) for rank in range(size)
    ]


def ordinals_of(ranks: Sequence[Group], start: int, stop: int) -> range:
    """The blocks from the first to the last in which any rank has a position in ``[start, stop)``."""
    slots = ranks[0].tokens_per_block or 1
    held = ([at for at in range(stop) if at in group.context] for group in ranks)
    return _hull(i // slots for positions in held for i, at in enumerate(positions) if at >= start)


def positions_of(ranks: Sequence[Group], ordinals: range) -> range:
    """The positions from the first to the last that any rank has in some blocks."""
    slots, context = ranks[0].tokens_per_block or 1, ranks[0].context
    end = (ordinals.stop * slots + context.interleave_tokens) * context.size
    held = ([at for at in range(end) if at in group.context] for group in ranks)
    return _hull(
        at for positions in held for at in positions[ordinals.start * slots : ordinals.stop * slots]
    )


def _hull(numbers: Iterable[int]) -> range:
    found = set(numbers)
    return range(min(found), max(found) + 1) if found else range(0)


def workers(design: EngineDesign, tables: Mapping[str, Blocks]) -> tuple[Worker, ...]:
    """All workers of an engine, with pools that have at least the blocks of ``tables``."""
    stages = itertools.product(range(design.pp), range(design.cp), range(design.tp))
    return tuple(_worker(design, tables, number, *at) for number, at in enumerate(stages))


def _worker(
    design: EngineDesign,
    tables: Mapping[str, Blocks],
    number: int,
    stage: int,
    context: int,
    rank: int,
) -> Worker:
    """One worker: its parts of the tensors of its stage, packed into regions."""
    ends: dict[tuple[str, str], int] = {}
    views, groups = list[View](), dict[str, Group]()
    for index, stored in enumerate(design.tensors):
        if stored.stage != stage:
            continue
        group = stored.group.name
        groups[group] = (
            stored.group if stored.group.context.size == 1 else on_ranks(stored.group)[context]
        )
        listed = (
            tables.values() if design.equal_pools or design.packing == POOL else [tables[group]]
        )
        blocks = (
            max(int(table.ids.max(initial=0)) for table in listed)
            + 1
            + design.extra_blocks * (1 + number % 2)
        )
        for part, axes in enumerate(_parts(design, stored, rank)):
            axes, step, length = _strides(design, stored, axes, blocks)
            region = (f"{group}.{index}.{part}", group, group, "pool")[design.packing]
            offset = ends.get((region, group), 0)
            ends[region, group] = offset + length + design.gap * 3
            if design.packing in (INTERLEAVED, POOL):
                step = 1 << 30  # more than any block, until all views are known
            views.append(
                View(
                    stored.tensor.name,
                    group,
                    region,
                    stored.tensor.dtype,
                    axes,
                    blocks,
                    step,
                    offset,
                )
            )
    if design.packing in (INTERLEAVED, POOL):
        steps = {
            view.region: max(end for (name, _), end in ends.items() if name == view.region)
            for view in views
        }
        views = [attrs.evolve(view, block_stride_bytes=steps[view.region]) for view in views]
    sizes = {
        view.region: max(other.end_bytes for other in views if other.region == view.region)
        for view in views
    }
    return Worker(design.engine_id, number, _regions(design, sizes, number), groups.values(), views)


def _parts(design: EngineDesign, stored: StoredTensor, rank: int) -> list[list[Axis]]:
    """The box of a tensor on a rank, in one view or split in two. Strides are 0."""
    axes = []
    for name, size in stored.tensor.sizes.items():
        sharded = name == "head"
        start = rank * size // design.tp if sharded else 0
        stop = -(-(rank + 1) * size // design.tp) if sharded else size
        axes.append(
            Axis(name, start + (name == stored.narrowed and stop - start > 1), stop, size, 0)
        )
    for i, axis in enumerate(axes):
        if axis.name == stored.split and axis.extent > 1:
            halves = (
                attrs.evolve(axis, stop=axis.start + 1),
                attrs.evolve(axis, start=axis.start + 1),
            )
            return [[*axes[:i], half, *axes[i + 1 :]] for half in halves]
    return [axes]


def _strides(
    design: EngineDesign, stored: StoredTensor, axes: Sequence[Axis], blocks: int
) -> tuple[list[Axis], int, int]:
    """Axes with strides, the block's stride, and the bytes of all blocks.

    Where views interleave within a block, the block's stride is 0, and the bytes are those of one block.
    """
    slots = stored.group.tokens_per_block
    listed = [*axes, Axis("token", 0, slots, slots, 0)] if slots else [*axes]
    listed = listed[stored.first_axis :] + listed[: stored.first_axis]
    digits = [digit for axis in listed for digit in _digits(design, axis)]
    extents = [axis.extent for axis in digits] + (
        [] if design.packing in (INTERLEAVED, POOL) else [blocks]
    )
    order = list(range(len(extents)))
    choice, pads, stride = stored.order, stored.pads, [0] * (len(digits) + 1)
    span = ITEMSIZE[stored.tensor.dtype]
    while order:
        choice, at = divmod(choice, len(order))
        pads, pad = divmod(pads, 3)
        dim = order.pop(at)
        if extents[dim] > 1:
            stride[dim] = span + pad
            span += (extents[dim] - 1) * stride[dim]
    return (
        [attrs.evolve(axis, stride_bytes=stride[i]) for i, axis in enumerate(digits)],
        stride[-1],
        span,
    )


def _digits(design: EngineDesign, axis: Axis) -> list[Axis]:
    """A whole axis of even size as two digits, in a design with digits."""
    if not design.digits or axis.extent < axis.size or axis.size < 4 or axis.size % 2:
        return [axis]
    return [Axis(axis.name, 0, axis.size // 2, axis.size // 2, 0), Axis(axis.name, 0, 2, 2, 0)]


def _regions(design: EngineDesign, used: Mapping[str, int], rank: int) -> list[Region]:
    """Regions for the bytes used, one after another: at low addresses, across 2**63, or up to 2**64."""
    sizes = {name: size + design.gap * 5 for name, size in used.items()}
    total = sum(sizes.values())
    at = (4096, (1 << 44) + rank * 4096, (1 << 63) - total // 2, (1 << 64) - total)[design.base]
    starts = itertools.accumulate(sizes.values(), initial=at)
    device = design.devices * (rank % 3)
    placed = zip(sizes.items(), starts, strict=False)
    return [Region(name, start, size, device_id=device) for (name, size), start in placed]
