"""Engines of any layout, built: how each keeps its tensors, and the workers that this makes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import attrs

from kvplan.describe.axes import Axis
from kvplan.describe.blocks import Blocks
from kvplan.describe.views import ITEMSIZE, Context, Group, Region, View
from kvplan.describe.worker import Worker

Span = tuple[int, int]
Part = tuple[str, int, int, int]
"""Name, start, stop and size of an axis."""

INTERLEAVED, POOL = 2, 3
"""Packings beside 0, a region for each view, and 1, one for each group: views share blocks, by group or all of them."""

BOTH, DESTINATION, SOURCE, STAYS = range(4)
"""Who keeps a tensor: both sides, one of them, or both although the destination does not want it moved."""


@attrs.frozen
class Logical:
    """A tensor by what all engines agree on: axes other than token, and whether it is paged by tokens.

    Engines may group tensors by ``lot``; ``kept_by`` says which of them have this one.
    """

    name: str
    paged: bool
    sizes: Mapping[str, int]
    dtype: str
    lot: int
    kept_by: int


@attrs.frozen
class Kept:
    """How one engine keeps one tensor.

    ``group`` is the tensor's group as context-parallel rank 0 has it. ``turn`` chooses which axis is listed first,
    ``order`` and ``pads`` choose strides. Where a worker has several coordinates of the axis ``split``, it keeps them
    in two views; of ``narrowed``, it keeps all but the first.
    """

    tensor: Logical
    group: Group
    stage: int
    turn: int
    order: int
    pads: int
    split: str
    narrowed: str


@attrs.frozen
class Side:
    """One engine: its parallel sizes, the tensors it keeps in the order it lists them, and its memory.

    ``digits`` makes two digits of an axis where it can; ``gap``, ``base`` and ``devices`` place the regions. With
    ``equal_pools``, and where all groups share blocks, every group of a worker has the same number of blocks.
    """

    engine_id: str
    tp: int
    cp: int
    pp: int
    kept: tuple[Kept, ...]
    packing: int
    digits: bool
    gap: int
    base: int
    devices: int
    extra_blocks: int
    equal_pools: bool = False

    @property
    def groups(self) -> dict[str, Group]:
        """The groups by name, those of early tensors first, as context-parallel rank 0 has them."""
        return {kept.group.name: kept.group for kept in self.kept}


def of_rank(group: Group, rank: int) -> Group:
    """The group as a context-parallel rank has it, which is the same on all ranks if it is not spread."""
    context = group.context
    spread = Context(rank, context.size, context.interleave_tokens) if context.size > 1 else context
    return Group(group.name, group.tokens_per_block, spread)


def held(group: Group, end: int) -> list[list[int]]:
    """The positions below ``end`` that each context-parallel rank holds."""
    ranks = (of_rank(group, rank) for rank in range(group.context.size))
    return [[position for position in range(end) if position in one.context] for one in ranks]


def reach(group: Group, blocks: Blocks) -> Span:
    """The positions between the first and the last that listed blocks hold on any rank."""
    slots, context = group.tokens_per_block or 1, group.context
    low, high = blocks.first * slots, (blocks.first + len(blocks.ids)) * slots
    every = held(group, (high + context.interleave_tokens) * context.size)
    reached = [position for positions in every for position in positions[low:high]]
    return (min(reached), max(reached) + 1) if reached else (0, 0)


def workers(side: Side, tables: Mapping[str, Blocks]) -> tuple[Worker, ...]:
    """All workers of an engine, with pools that have the blocks of ``tables`` and perhaps more."""
    stages = itertools.product(range(side.pp), range(side.cp), range(side.tp))
    return tuple(_worker(side, tables, number, *at) for number, at in enumerate(stages))


def _worker(side: Side, tables: Mapping[str, Blocks], number: int, stage: int, context: int, rank: int) -> Worker:
    """One worker: its parts of the tensors of its stage, each view in its own order, packed into regions."""
    ends: dict[tuple[str, str], int] = {}
    placed: list[tuple[Kept, str, list[Axis], int, int, int]] = []
    groups: dict[str, Group] = {}
    for index, kept in enumerate(side.kept):
        if kept.stage != stage:
            continue
        group = kept.group.name
        groups[group] = of_rank(kept.group, context)
        listed = tables.values() if side.equal_pools or side.packing == POOL else [tables[group]]
        blocks = max(int(table.ids.max(initial=0)) for table in listed) + 1 + side.extra_blocks * (1 + number % 2)
        for part, axes in enumerate(_parts(side, kept, rank)):
            made, step, length = _strides(side, kept, axes, blocks)
            region = (f"{group}.{index}.{part}", group, group, "pool")[side.packing]
            placed.append((kept, region, made, blocks, step, ends.get((region, group), 0)))
            ends[region, group] = ends.get((region, group), 0) + length + side.gap * 3
    views = []
    for kept, region, made, blocks, step, offset in placed:
        if side.packing in (INTERLEAVED, POOL):
            step = max(end for (name, _), end in ends.items() if name == region)
        tensor = kept.tensor
        views.append(View(tensor.name, kept.group.name, region, tensor.dtype, made, blocks, step, offset))
    sizes = {view.region: max(other.end_bytes for other in views if other.region == view.region) for view in views}
    return Worker(side.engine_id, number, _regions(side, sizes, number), groups.values(), views)


def _parts(side: Side, kept: Kept, rank: int) -> list[list[Part]]:
    """The box of a tensor that a rank keeps, in one view or split in two."""
    axes: list[Part] = []
    for name, size in kept.tensor.sizes.items():
        sharded = name == "head"
        start = rank * size // side.tp if sharded else 0
        stop = -(-(rank + 1) * size // side.tp) if sharded else size
        axes.append((name, start + (name == kept.narrowed and stop - start > 1), stop, size))
    for i, (name, start, stop, size) in enumerate(axes):
        if name == kept.split and stop - start > 1:
            cuts = [(start, start + 1), (start + 1, stop)]
            return [[*axes[:i], (name, *cut, size), *axes[i + 1 :]] for cut in cuts]
    return [axes]


def _strides(side: Side, kept: Kept, axes: Iterable[Part], blocks: int) -> tuple[list[Axis], int, int]:
    """Axes with strides nested in an order and with pads of choice, the block's stride, and the bytes of it all.

    Where views interleave within a block, the block's stride is yet to come, and the bytes are those of one block.
    """
    slots = kept.group.tokens_per_block
    listed = [*axes, ("token", 0, slots, slots)] if slots else [*axes]
    listed = listed[kept.turn :] + listed[: kept.turn]
    digits = [digit for axis in listed for digit in _split_digits(side, axis)]
    extents = [stop - start for _, start, stop, _ in digits] + ([] if side.packing in (INTERLEAVED, POOL) else [blocks])
    order = list(range(len(extents)))
    choice, pads, stride = kept.order, kept.pads, [0] * (len(digits) + 1)
    span = ITEMSIZE[kept.tensor.dtype]
    while order:
        choice, at = divmod(choice, len(order))
        pads, pad = divmod(pads, 3)
        dim = order.pop(at)
        if extents[dim] > 1:
            stride[dim] = span + pad
            span += (extents[dim] - 1) * stride[dim]
    return [Axis(*digit, step) for digit, step in zip(digits, stride, strict=False)], stride[-1], span


def _split_digits(side: Side, axis: Part) -> list[Part]:
    """A whole axis of even size as two digits, where the side has it so."""
    name, start, stop, size = axis
    if not side.digits or stop - start < size or size < 4 or size % 2:
        return [axis]
    return [(name, 0, size // 2, size // 2), (name, 0, 2, 2)]


def _regions(side: Side, used: Mapping[str, int], rank: int) -> list[Region]:
    """Regions of the bytes used, one after another: at the bottom of memory, around 2**63, or up to 2**64."""
    sizes = {name: size + side.gap * 5 for name, size in used.items()}
    total = sum(sizes.values())
    at = (4096, (1 << 44) + rank * 4096, (1 << 63) - total // 2, (1 << 64) - total)[side.base]
    regions = []
    for name, size in sizes.items():
        regions.append(Region(name, at, size, device_id=side.devices * (rank % 3)))
        at += size
    return regions
