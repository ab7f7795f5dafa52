"""The bytes that a plan copies, from where to where, in tensors, heads, positions and blocks.

An example of a request, the first blocks of a group, is bound to the plan, and the resulting
descriptors are cut where a block or a cell of either side ends. The coordinates of each end come
from its own address and its own worker's views, so they are a check of the plan: both ends of a
copy have to agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, integers_in
from kvplan._text import count, size, sizes
from kvplan.budget import Budget
from kvplan.describe.blocks import Blocks, Range
from kvplan.describe.views import TOKEN, Group
from kvplan.describe.worker import Worker
from kvplan.display.blocks import TENSOR, DrawnLayer, Interval, boxes, folded, layers_of
from kvplan.plan.align import before, in_tokens, period, position_of, reach
from kvplan.plan.tables import Descriptors
from kvplan.plan.transfer import TransferPlan

POSITION: Final = "position"
"""The axis of a request's positions: the same on both sides, unlike that of tokens in a block."""

MAX_EXAMPLE_BLOCKS: Final = 4
"""At most this many local blocks are drawn for a period, after which both sides repeat."""

COPY_BYTES: Final = 20_000
"""Estimated cost of a copy that is drawn."""

RANGE_BYTES: Final = 200
"""Estimated cost of the range of a group, each time that another group is bound."""

RUN_BYTES: Final = 1000
"""Estimated cost of contiguous bytes of a request's blocks."""

MAX_POSITIONS: Final = 1024


@attrs.frozen
class CopyEnd:
    """One end of a copy: bytes ``[start, stop)`` of block ``ordinal``, whose id is ``block``.

    ``intervals`` are those of all axes of the tensor, with positions in place of tokens.
    """

    worker: Worker = attrs.field(repr=False)
    layer: DrawnLayer = attrs.field(repr=False)
    ordinal: int
    block: int
    start: int
    stop: int
    view: int
    intervals: Mapping[str, Interval]

    @property
    def region(self) -> str:
        """The name of the region."""
        return self.worker.regions[self.layer.region].name

    @property
    def tensor(self) -> str:
        """The name of the tensor."""
        return self.layer.names[self.view]


def positions_in(group: Group, ordinal: int, low: int = 0, high: int | None = None) -> Interval:
    """Return the positions in slots ``[low, high)`` of a block, with gaps for other contexts."""
    first, stop = (
        ordinal * group.num_slots + slot
        for slot in (low, group.num_slots if high is None else high)
    )
    start, last = position_of(group, first), position_of(group, stop - 1)
    return Interval(POSITION, start, last + 1, has_gaps=last - start > stop - 1 - first)


@attrs.frozen
class BoxCopy:
    """Bytes that one descriptor copies between two boxes.

    ``remote_index`` is the index of the remote worker in the plan.
    """

    local: CopyEnd
    remote: CopyEnd
    remote_index: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes of this copy."""
        return self.local.stop - self.local.start


@attrs.frozen
class Panel:
    """The copies of one layer, of which ``num_layers`` are equal.

    ``tensors`` are those of all layers, ``tokens`` the positions, ``None`` for a state.
    """

    tensors: tuple[str, ...]
    num_layers: int
    tokens: Range | None
    operation: str
    copies: tuple[BoxCopy, ...] = attrs.field(repr=False)

    @property
    def title(self) -> str:
        """The names of the tensors, equal layers folded."""
        return folded(self.tensors)

    @property
    def facts(self) -> str:
        """How much is copied, in words."""
        layers = f" of one of {self.num_layers} equal layers" if self.num_layers > 1 else ""
        lengths = [copy.num_bytes for copy in self.copies]
        copies = f"{count(len(lengths), 'copy')} of {sizes(min(lengths), max(lengths))}"
        moved = "one state"
        if self.tokens is not None:
            moved = f"positions [{self.tokens[0]}, {self.tokens[1]})"
        return f"{moved}{layers}: {size(sum(lengths))} in {copies}"


def panels(plan: TransferPlan) -> tuple[Panel, ...]:
    """Return what a plan copies of the first blocks of a request: a panel for each kind of layer.

    Layers are of one kind if their blocks have equal bytes, and equal copies. Raises ``RANGE`` for
    a block of too many cells.
    """
    remotes = [layers_of(worker) for worker in plan.remotes]
    layers = layers_of(plan.local)
    budget = Budget()
    # each group of a peer is bound by itself, with ranges for all groups
    number = len(plan.local.groups) ** 2 * sum(len(worker.groups) for worker in plan.remotes)
    budget.spend(number, "ranges of groups", RANGE_BYTES, f"draw {plan.local.label}")
    drawn: dict[Any, Panel] = {}
    for group in plan.local.groups:
        # a pipeline stage has all groups, perhaps without a layer
        if not any(layer.group == group for layer in layers):
            continue
        request = example(plan, group)
        # A state has no positions to draw.
        tokens = None if group.is_state else request["tokens"][group.name]
        for rows in _rows_by_layer(plan, request, group, layers, remotes, budget):
            held = [layers[number] for number in dict.fromkeys(rows[:, 0].tolist())]
            cells = tuple((layer.cells.content, layer.rest_bytes) for layer in held)
            # ordinal and offset on both sides, remote worker and length
            kind = cells, tokens, rows[:, [1, 3, 5, 7, 8, 9]].tobytes()
            names = dict.fromkeys(name for layer in held for name in layer.names)
            if kind in drawn:
                panel = drawn[kind]
                drawn[kind] = attrs.evolve(
                    panel,
                    tensors=tuple(dict.fromkeys([*panel.tensors, *names])),
                    num_layers=panel.num_layers + 1,
                )
                continue
            copied = [
                _Row(_LayerOffset(*row[:4]), _LayerOffset(*row[4:8]), *row[8:])
                for row in rows.tolist()
            ]
            drawn[kind] = Panel(
                tensors=tuple(names),
                num_layers=1,
                tokens=tokens,
                operation=plan.operation,
                copies=tuple(_copies(plan, copied, layers, remotes, budget)),
            )
    return tuple(drawn.values())


def example(plan: TransferPlan, group: Group) -> dict[str, Any]:
    """Return a request of the first blocks of one local group, as arguments of ``bind``.

    It ends where both sides repeat, or after two local blocks if that takes long, or where a pool
    ends. Local ids ascend and remote ids descend, so that no two blocks are neighbours on both
    sides. Other groups copy nothing, so that each address is in one group.
    """
    tensors = {view.name for view in plan.local.views if view.group == group.name}
    far_groups = list[Group]()
    for worker in plan.remotes:
        names = {view.group for view in worker.views if view.name in tensors}
        far_groups += [far_group for far_group in worker.groups if far_group.name in names]
    stop = 1
    if not group.is_state:
        # The local blocks after which both sides repeat.
        turn = math.ceil(period(group, *far_groups) / group.num_slots / group.context.size)
        pool = _pool([plan.local], group)
        # Where the last block of each side's smallest pool ends.
        ends = [reach(group, 0, pool)[1]]
        ends += [reach(far_group, 0, _pool(plan.remotes, far_group))[1] for far_group in far_groups]
        num_blocks = min(turn if turn <= MAX_EXAMPLE_BLOCKS else 2, pool)
        stop = min(num_blocks * group.num_slots * group.context.size, MAX_POSITIONS, *ends)
    local = {local_group.name: Blocks([]) for local_group in plan.local.groups}
    local[group.name] = Blocks(range(_num_blocks(group, stop)))
    remote = {far_group.name: Blocks([]) for worker in plan.remotes for far_group in worker.groups}
    for far_group in far_groups:
        # Several workers may have a group of that name: the table serves the longest of them.
        number = max(_num_blocks(far_group, stop), remote[far_group.name].ids.size)
        remote[far_group.name] = Blocks(range(number)[::-1])
    tokens = {local_group.name: (0, 0) for local_group in plan.local.groups}
    tokens[group.name] = in_tokens(group, (0, stop))
    return {"local": local, "remote": remote, "tokens": tokens}


def _num_blocks(group: Group, stop: int) -> int:
    return -(-before(group, stop) // group.num_slots)


def _pool(workers: Sequence[Worker], group: Group) -> int:
    """Return the fewest blocks that a pool of the group has."""
    geometries = itertools.chain.from_iterable(worker.geometries for worker in workers)
    sizes_of = (each.num_blocks for each in geometries if each.group.name == group.name)
    return min(sizes_of, default=1)


class _LayerOffset(NamedTuple):
    """A layer, by its number, and an offset in what it has in one block."""

    layer: int
    ordinal: int
    block: int
    offset: int


class _Row(NamedTuple):
    """Bytes of one descriptor that are contiguous in a block on both sides."""

    local: _LayerOffset
    remote: _LayerOffset
    remote_index: int
    length: int


def by_remote_group(plan: TransferPlan) -> Iterator[tuple[str, TransferPlan]]:
    """Yield the plan with each group of the remote workers alone, and the group's name.

    Groups may share a pool, and an example's blocks.
    """
    remote = plan.direction.remote
    groups = [ids.groups[remote].name for pair in plan.pairs for ids in pair.group_pairs]
    for name in dict.fromkeys(groups):
        pairs = []
        for pair in plan.pairs:
            kept = [ids for ids in pair.group_pairs if ids.groups[remote].name == name]
            pairs.append(attrs.evolve(pair, group_pairs=tuple(kept)))
        yield name, attrs.evolve(plan, pairs=tuple(pairs))


def _rows_by_layer(
    plan: TransferPlan,
    request: Mapping[str, Any],
    group: Group,
    layers: Sequence[DrawnLayer],
    remotes: Sequence[Sequence[DrawnLayer]],
    budget: Budget,
) -> Iterator[Ints]:
    """Yield the rows of each local layer of a group, in order of the local side.

    A row is an array of what :class:`_Row` has: thousands of rows of equal layers are compared, and
    only those of the first one become copies.
    """
    number_of_key: dict[Any, int] = {}
    for layer in layers:
        if layer.group == group:
            number_of_key.setdefault(layer.key, len(number_of_key))
    keys = [number_of_key.get(layer.key, -1) if layer.group == group else -1 for layer in layers]
    local = _BlockRuns.of(
        plan.local, layers, [0 if key >= 0 else -1 for key in keys], request["local"], budget
    )
    found = []
    for name, group_plan in by_remote_group(plan):
        for number, spec in enumerate(group_plan.bind(**request)):
            if not spec.num_bytes:
                continue
            # equal addresses may be in blocks of several layers, of which the row's own counts
            held = remotes[number]
            keys_of_remote = [
                number_of_key.get(layer.key, -1) if layer.group.name == name else -1
                for layer in held
            ]
            remote = _BlockRuns.of(
                plan.remotes[number], held, keys_of_remote, request["remote"], budget
            )
            here, there = spec.descriptors()
            row, skip, length, near = local.cut(np.zeros(len(here), np.int64), here)
            ranges = there[row]
            ranges[:, 0] += skip.astype(np.uint64)
            ranges[:, 1] = length
            part, more, length, far = remote.cut(np.array(keys)[near[:, 0]], ranges)
            near = near[part]
            near[:, 3] += more
            found.append(np.column_stack([near, far, np.full(len(part), number), length]))
    rows = np.concatenate(found or [np.zeros((0, 10), np.int64)])
    key = np.array(keys)[rows[:, 0]]
    layer, ordinal, _, offset = rows.T[:4]
    order = np.lexsort((offset, rows[:, 8], ordinal, layer, key))
    yield from np.split(rows[order], np.flatnonzero(np.diff(key[order])) + 1) if len(rows) else ()


@attrs.frozen(eq=False)
class _BlockRuns:
    """The contiguous bytes of a request's blocks on one worker.

    ``starts`` has the key, the device and the first address of each, in ascending order.
    """

    starts: npt.NDArray[np.uint64]
    lengths: Ints
    offsets: Ints

    @classmethod
    def of(
        cls,
        worker: Worker,
        layers: Sequence[DrawnLayer],
        keys: Sequence[int],
        tables: Mapping[str, Blocks],
        budget: Budget,
    ) -> _BlockRuns:
        """Return those of layers with a key; others have a negative one."""
        starts, others = [], []
        for number, (layer, key) in enumerate(zip(layers, keys, strict=True)):
            if key < 0:
                continue
            region = worker.regions[layer.region]
            table = tables.get(layer.group.name, Blocks([]))
            ids, first = np.unique(table.ids, return_index=True)  # a source may have a block twice
            spans = np.array([*layer.cells.runs], np.int64)
            num_runs = len(spans) * ids.size
            budget.spend(num_runs, "runs of blocks", RUN_BYTES, f"draw {worker.label}")
            block = np.repeat(ids.astype(np.int64), len(spans))
            start, stop = np.tile(spans, (ids.size, 1)).T
            offset = layer.offset + block * layer.block_stride_bytes + start
            address = np.uint64(region.address) + offset.astype(np.uint64)
            device = np.full(num_runs, region.device_id, np.uint64)
            starts.append(np.column_stack([np.full_like(device, key), device, address]))
            ordinal = np.repeat(table.ordinals[first], len(spans))
            layer_of = np.full(num_runs, number)
            others.append(np.column_stack([stop - start, layer_of, ordinal, block, start]))
        joined = np.concatenate(starts)
        order = np.lexsort(joined.T[::-1])
        rest = np.concatenate(others)[order]
        return cls(joined[order], rest[:, 0], rest[:, 1:])

    def cut(self, keys: Ints, ranges: Descriptors) -> tuple[Ints, Ints, Ints, Ints]:
        """Split ranges at the runs.

        Of each run in a range: the range's index, the bytes before the run, its length, and where
        it is, as a :class:`_LayerOffset`.
        """
        address, length, device = ranges.T
        key = keys.astype(np.uint64)
        first = self._at(np.column_stack([key, device, address]))
        last = self._at(np.column_stack([key, device, address + length - np.uint64(1)]))
        run = integers_in(np.column_stack([first, last + 1]))
        row = np.repeat(np.arange(len(ranges)), last + 1 - first)
        start = self.starts[run, 2]
        begin = np.maximum(address[row], start)
        skip = (begin - address[row]).astype(np.int64)
        place = self.offsets[run]
        place[:, 3] += (into := (begin - start).astype(np.int64))
        num_bytes = np.minimum(length[row].astype(np.int64) - skip, self.lengths[run] - into)
        return row, skip, num_bytes, place

    def _at(self, bytes_: npt.NDArray[np.uint64]) -> Ints:
        """Return the run that has each byte: the last one that begins at it or before."""
        joint = np.concatenate([self.starts, bytes_])
        order = np.lexsort(joint.T[::-1])
        number = np.empty(len(joint), np.int64)
        number[order] = np.cumsum(order < len(self.starts)) - 1
        return number[len(self.starts) :]


def _copies(
    plan: TransferPlan,
    rows: Sequence[_Row],
    layers: Sequence[DrawnLayer],
    remotes: Sequence[Sequence[DrawnLayer]],
    budget: Budget,
) -> Iterator[BoxCopy]:
    """Yield the copies of one layer, as large as boxes of both sides can be."""
    budget.spend(len(rows), "copies", COPY_BYTES, f"draw {plan.local.label}")
    for row in rows:
        sides = layers[row.local.layer], remotes[row.remote_index][row.remote.layer]
        ends = [
            (layer.cells, place.offset)
            for layer, place in zip(sides, (row.local, row.remote), strict=True)
        ]
        # Both sides cut where a cell of either begins.
        edges = {0, row.length}
        for cells, offset in ends:
            low, high = np.searchsorted(cells.start, [offset, offset + row.length])
            edges |= {int(start) - offset for start in cells.start[low:high]}
        start = np.array(sorted(edges))
        found = [cells.at(start[:-1] + offset, start[1:] + offset) for cells, offset in ends]
        views = found[0][0]
        tensors = found[0][1][:, ends[0][0].axes.index(TENSOR)]
        bounds = [0, *(np.flatnonzero(np.diff(tensors)) + 1).tolist(), len(views)]
        for first, stop in itertools.pairwise(bounds):
            both = [(low[first:stop], high[first:stop]) for _, low, high in found]
            itemsize = int(ends[0][0].itemsize[views[first]])
            for box in boxes(both, np.diff(start)[first:stop], itemsize):
                part = slice(first + box.start, first + box.stop)
                span = int(start[part.start]), int(start[part.stop])
                local = _end(plan.local, sides[0], row.local, span, found[0], part)
                remote_worker = plan.remotes[row.remote_index]
                remote = _end(remote_worker, sides[1], row.remote, span, found[1], part)
                yield BoxCopy(local, remote, row.remote_index)


def _end(
    worker: Worker,
    layer: DrawnLayer,
    place: _LayerOffset,
    span: Range,
    found: Sequence[Any],
    part: slice,
) -> CopyEnd:
    _, ordinal, block, offset = place
    cell, low, high = (column[part] for column in found)
    intervals = {}
    for axis, start, stop in zip(
        layer.cells.axes, low.min(axis=0).tolist(), high.max(axis=0).tolist(), strict=True
    ):
        if axis == TOKEN and not layer.group.is_state:
            intervals[POSITION] = positions_in(layer.group, ordinal, start, stop)
        elif axis != TENSOR:
            intervals[axis] = Interval(axis, start, stop)
    view = int(layer.cells.view[cell[0]])
    return CopyEnd(
        worker, layer, ordinal, block, span[0] + offset, span[1] + offset, view, intervals
    )
