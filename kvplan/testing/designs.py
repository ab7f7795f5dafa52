"""Engine designs: how each engine stores its tensors, and the workers that follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from kvplan.describe import ITEMSIZE, Axis, Blocks, Context, Group, Region, View, Worker

INTERLEAVED = 2
POOL = 3
"""Packings in which views share blocks, by group or all of them.

In the others, 0 and 1, there is a region for each view, or one for each group.
"""

BOTH = 0
DESTINATION_ONLY = 1
SOURCE_ONLY = 2
EXCLUDED = 3
"""Both engines have a tensor, or one of them. The destination may exclude it from the transfer."""

UNKNOWN_STRIDE = 1 << 30
"""A block stride longer than any block, until all views of the block are known."""


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
    """A tensor as one engine stores it.

    ``group`` is the tensor's group on context-parallel rank 0. ``first_axis`` is listed first;
    ``order`` and ``pads`` choose the strides. A worker with several coordinates of the axis
    ``split`` has two views of them, and one with several of the axis ``narrowed`` lacks the first.
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

    ``digits`` makes two digits of an axis where possible. ``gap``, ``base`` and ``devices`` say
    where the regions are. With ``equal_pools``, and where all groups share blocks, every group of a
    worker has the same number of blocks.
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

    @property
    def shares_blocks(self) -> bool:
        """True if several views lie in one block of a pool."""
        return self.packing in (INTERLEAVED, POOL)


def on_ranks(group: Group) -> list[Group]:
    """Return a group on each context-parallel rank."""
    size = group.context.size
    contexts = [Context(rank, size, group.context.interleave_tokens) for rank in range(size)]
    return [attrs.evolve(group, context=context) for context in contexts]


def ordinals_of(ranks: Sequence[Group], start: int, stop: int) -> range:
    """Return the blocks from the first to the last in which a rank has one of the positions.

    Positions are those in ``[start, stop)``.
    """
    slots = ranks[0].tokens_per_block or 1
    # the nth position that a rank holds is in its nth slot
    ordinals = set[int]()
    for group in ranks:
        for slot, position in enumerate(_positions_below(group, stop)):
            if position >= start:
                ordinals.add(slot // slots)
    return _range_around(ordinals)


def positions_of(ranks: Sequence[Group], ordinals: range) -> range:
    """Return the positions from the first to the last that any rank has in some blocks."""
    slots = ranks[0].tokens_per_block or 1
    context = ranks[0].context
    # every rank holds the positions of all these blocks below this end
    end = (ordinals.stop * slots + context.interleave_tokens) * context.size
    positions = set[int]()
    for group in ranks:
        held = list(_positions_below(group, end))
        positions.update(held[ordinals.start * slots : ordinals.stop * slots])
    return _range_around(positions)


def _positions_below(group: Group, stop: int) -> Iterator[int]:
    """Yield the positions that a rank holds; the nth is in its local slot n."""
    return (position for position in range(stop) if position in group.context)


def _range_around(numbers: Iterable[int]) -> range:
    numbers = set(numbers)
    return range(min(numbers), max(numbers) + 1) if numbers else range(0)


def workers(design: EngineDesign, tables: Mapping[str, Blocks]) -> tuple[Worker, ...]:
    """Return all workers of an engine, with pools that have at least the blocks of ``tables``."""
    coordinates = itertools.product(range(design.pp), range(design.cp), range(design.tp))
    return tuple(_worker(design, tables, number, *at) for number, at in enumerate(coordinates))


def _worker(
    design: EngineDesign,
    tables: Mapping[str, Blocks],
    number: int,
    stage: int,
    context: int,
    rank: int,
) -> Worker:
    """Return one worker: its shards of the tensors of its stage, packed into regions."""
    groups = dict[str, Group]()
    views = list[View]()
    # by region and group, the bytes used so far: of a block where views share blocks
    used: dict[tuple[str, str], int] = {}
    for index, stored in enumerate(design.tensors):
        if stored.stage != stage:
            continue
        ranks = on_ranks(stored.group)
        group = ranks[context] if len(ranks) > 1 else stored.group
        groups[group.name] = group
        num_blocks = _num_blocks(design, tables, group.name, number)
        for nth, axes in enumerate(_shards(design, stored, rank)):
            strided = _with_strides(design, stored, axes, num_blocks)
            regions = (f"{group.name}.{index}.{nth}", group.name, group.name, "pool")
            region = regions[design.packing]
            offset = used.get((region, group.name), 0)
            used[region, group.name] = offset + strided.num_bytes + design.gap * 3
            view = View(
                stored.tensor.name,
                group.name,
                region,
                stored.tensor.dtype,
                strided.axes,
                num_blocks,
                strided.block_stride,
                offset,
            )
            views.append(view)
    # blocks of a region are as long as the group that uses most of one
    if design.shares_blocks:
        block_bytes: dict[str, int] = {}
        for (region, _), end in used.items():
            block_bytes[region] = max(block_bytes.get(region, 0), end)
        views = [attrs.evolve(view, block_stride_bytes=block_bytes[view.region]) for view in views]
    # a region ends with its last view
    sizes: dict[str, int] = {}
    for view in views:
        sizes[view.region] = max(sizes.get(view.region, 0), view.end_bytes)
    return Worker(design.engine_id, number, _regions(design, sizes, number), groups.values(), views)


def _num_blocks(
    design: EngineDesign,
    tables: Mapping[str, Blocks],
    group_name: str,
    number: int,
) -> int:
    """Return the blocks of a group's pool: those that tables list, and a few that none does."""
    shared = design.equal_pools or design.packing == POOL
    # groups that share blocks have pools of one size
    listed = tables.values() if shared else [tables[group_name]]
    highest = max(int(table.ids.max(initial=0)) for table in listed)
    return highest + 1 + design.extra_blocks * (1 + number % 2)


def _shards(design: EngineDesign, stored: StoredTensor, rank: int) -> list[list[Axis]]:
    """Return the box of a tensor on a rank, in one view or split in two. Strides are 0."""
    axes = list[Axis]()
    for name, size in stored.tensor.sizes.items():
        start = 0
        stop = size
        if name == "head":
            start = rank * size // design.tp
            stop = -(-(rank + 1) * size // design.tp)
        if name == stored.narrowed and stop - start > 1:
            start += 1
        axes.append(Axis(name, start, stop, size, 0))
    for index, axis in enumerate(axes):
        if axis.name == stored.split and axis.extent > 1:
            first = attrs.evolve(axis, stop=axis.start + 1)
            rest = attrs.evolve(axis, start=axis.start + 1)
            return [[*axes[:index], half, *axes[index + 1 :]] for half in (first, rest)]
    return [axes]


@attrs.frozen
class _StridedAxes:
    """Axes with strides, the stride of blocks, and the bytes of all blocks.

    Where views share blocks, the bytes are those of one block.
    """

    axes: list[Axis]
    block_stride: int
    num_bytes: int


def _with_strides(
    design: EngineDesign,
    stored: StoredTensor,
    axes: Sequence[Axis],
    num_blocks: int,
) -> _StridedAxes:
    """Give axes strides, in the order and with the pads that a tensor's numbers choose."""
    slots = stored.group.tokens_per_block
    listed = [*axes]
    if slots:
        listed.append(Axis("token", 0, slots, slots, 0))
    listed = listed[stored.first_axis :] + listed[: stored.first_axis]
    digits = list[Axis]()
    for axis in listed:
        digits += _digits(design, axis)
    # the dimensions are the digits, and then blocks, unless other views lie between blocks
    extents = [axis.extent for axis in digits]
    if not design.shares_blocks:
        extents.append(num_blocks)
    strides = [0] * len(extents)
    remaining = list(range(len(extents)))
    order = stored.order
    pads = stored.pads
    span = ITEMSIZE[stored.tensor.dtype]
    # each step chooses the next coarser dimension: `order` and `pads` are numbers of mixed radix
    while remaining:
        order, choice = divmod(order, len(remaining))
        pads, pad = divmod(pads, 3)
        dim = remaining.pop(choice)
        if extents[dim] > 1:
            strides[dim] = span + pad
            span += (extents[dim] - 1) * strides[dim]
    block_stride = UNKNOWN_STRIDE if design.shares_blocks else strides.pop()
    strided = zip(digits, strides, strict=True)
    return _StridedAxes(
        [attrs.evolve(axis, stride_bytes=stride) for axis, stride in strided], block_stride, span
    )


def _digits(design: EngineDesign, axis: Axis) -> list[Axis]:
    """Return a whole axis of even size as two digits, in a design with digits."""
    if not design.digits or axis.extent < axis.size or axis.size < 4 or axis.size % 2:
        return [axis]
    return [Axis(axis.name, 0, axis.size // 2, axis.size // 2, 0), Axis(axis.name, 0, 2, 2, 0)]


def _regions(design: EngineDesign, used: Mapping[str, int], rank: int) -> list[Region]:
    """Return regions for the bytes used, one after another.

    They begin at a low address, or at a high one, lie across 2**63, or end at 2**64.
    """
    sizes = {name: num_bytes + design.gap * 5 for name, num_bytes in used.items()}
    total = sum(sizes.values())
    bases = (4096, (1 << 44) + rank * 4096, (1 << 63) - total // 2, (1 << 64) - total)
    address = bases[design.base]
    device_id = design.devices * (rank % 3)
    regions = list[Region]()
    for name, size in sizes.items():
        regions.append(Region(name, address, size, device_id=device_id))
        address += size
    return regions
