"""The bytes that a plan copies, from where to where, in tensors, heads, positions and blocks.

A request is bound to the plan, and the resulting descriptors are cut where a block or a cell of
either side ends. The coordinates of each end come from its own address and its own worker's views,
so they are a check of the plan: both ends of a copy have to agree. Without block tables the request
is an example: the first blocks of each group, local ids ascending and remote ids descending, so
that no two blocks are neighbours on both sides.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import attrs
import numpy as np

from kvplan._text import count, size, sizes
from kvplan.budget import Budget
from kvplan.describe.axes import segments
from kvplan.describe.blocks import Blocks, Range
from kvplan.describe.views import TOKEN, Group
from kvplan.describe.worker import Worker
from kvplan.display.blocks import TENSOR, DrawnLayer, Interval, boxes, folded, layers_of
from kvplan.plan.align import before, in_slots, in_tokens, period, position_of, reach, slots
from kvplan.plan.bind import range_of
from kvplan.plan.transfer import TransferPlan

POSITION: Final = "position"
"""The axis of a request's positions: the same on both sides, unlike that of tokens in a block."""

MAX_EXAMPLE_BLOCKS: Final = 4
"""At most this many local blocks are drawn for a period, after which both sides repeat."""

COPY_BYTES: Final = 20_000
"""What a copy that is drawn takes of a budget."""

RANGE_BYTES: Final = 200
"""What the range of a group takes of it, each time that another group is bound."""

PIECE_BYTES: Final = 1000
"""What contiguous bytes of a request's blocks take of it."""

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
    def region_offset(self) -> int:
        """The offset in the region, in bytes."""
        return self.layer.offset + self.block * self.layer.block_stride_bytes + self.start

    @property
    def tensor(self) -> str:
        """The name of the tensor."""
        return self.layer.names[self.view]

    @property
    def coordinates(self) -> str:
        """The tensor that the bytes belong to, with an interval on every axis."""
        view = self.layer.views[self.view]
        texts = []
        for axis, axis_size in view.sizes.items():
            if axis == TOKEN:
                held = self.intervals.get(POSITION) or positions_in(self.layer.group, self.ordinal)
                texts.append(f"position {held if held.has_gaps else _half_open(held)}")
                continue
            whole = segments([digit for digit in view.axes if digit.name == axis])
            held = self.intervals.get(axis) or Interval(axis, whole.start[0], whole.stop[-1])
            texts.append(f"{axis} {_half_open(held)} of {axis_size}")
        return f"{self.tensor}: {', '.join(texts)}"

    def __str__(self) -> str:
        is_token_group = self.layer.group.tokens_per_block is not None
        ordinal = f" block {self.ordinal}" if is_token_group else ""
        place = f"region {self.region} + {self.region_offset}"
        return f"{self.worker.label}{ordinal}, block id {self.block}, {place}"


def _half_open(held: Interval) -> str:
    return f"[{held.start}, {held.stop})"


def positions_in(group: Group, ordinal: int, low: int = 0, high: int | None = None) -> Interval:
    """Return the positions in slots ``[low, high)`` of a block, with gaps for other contexts."""
    first, stop = (
        ordinal * slots(group) + slot for slot in (low, slots(group) if high is None else high)
    )
    start, last = position_of(group, first), position_of(group, stop - 1)
    return Interval(POSITION, start, last + 1, has_gaps=last - start > stop - 1 - first)


@attrs.frozen
class BoxCopy:
    """Bytes that one descriptor copies between two boxes. The whole descriptor has ``run_bytes``.

    ``remote_index`` is the index of the remote worker in the plan.
    """

    local: CopyEnd
    remote: CopyEnd
    remote_index: int
    run_bytes: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes of this copy."""
        return self.local.stop - self.local.start


@attrs.frozen
class Panel:
    """The copies of one layer, of which ``num_layers`` are equal.

    ``tensors`` are those of all layers, ``tokens`` the positions, the first of those ``asked`` for;
    ``None`` for a state. ``is_example`` says that no block tables were given, so that block ids
    mean nothing.
    """

    tensors: tuple[str, ...]
    num_layers: int
    tokens: Range | None
    asked: Range
    operation: str
    is_example: bool
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
        return f"{self._positions()}{layers}: {size(sum(lengths))} in {copies}"

    def _positions(self) -> str:
        if self.tokens is None:
            return "one state"
        drawn = f"positions [{self.tokens[0]}, {self.tokens[1]})"
        if self.tokens == self.asked:
            return drawn
        group = self.copies[0].local.layer.group
        num_drawn, num_asked = (_num_blocks(group, tokens) for tokens in (self.tokens, self.asked))
        blocks = "block" if num_drawn == 1 else count(num_drawn, "block")
        return f"{drawn} of [{self.asked[0]}, {self.asked[1]}), first {blocks} of {num_asked},"

    def details(self, copy: BoxCopy) -> str:
        """Return one copy in four lines: its bytes, both ends, and the length of the descriptor."""
        source, destination = copy.local, copy.remote
        if self.operation == "READ":
            source, destination = destination, source
        moved = f"{count(copy.num_bytes, 'byte')} from {source}\nto {destination}"
        return f"{copy.local.coordinates}\n{moved}\ndescriptor of {count(copy.run_bytes, 'byte')}"


def panels(plan: TransferPlan, request: Mapping[str, Any] | None = None) -> tuple[Panel, ...]:
    """Return what a plan copies for a request: a panel for each kind of layer.

    The request has the arguments of ``bind``. Layers are of one kind if their blocks have equal
    bytes, and equal copies. Raises what :meth:`TransferPlan.bind` does, and ``RANGE`` for a block
    of too many cells.
    """
    if request is not None:
        # Names what is wrong with the whole request, before it is reduced to one group.
        plan.bind(**request)
    remotes = [layers_of(worker) for worker in plan.remotes]
    layers = layers_of(plan.local)
    budget = Budget()
    # each group of a peer is bound by itself, with ranges for all groups
    number = len(plan.local.groups) ** 2 * sum(len(worker.groups) for worker in plan.remotes)
    budget.take(number, "ranges of groups", RANGE_BYTES, f"draw {plan.local.label}")
    drawn: dict[Any, Panel] = {}
    for group in plan.local.groups:
        part = excerpt(plan, group, request)
        if part is None:
            continue
        bind_request, asked = part
        # A state has no positions to draw.
        is_token_group = group.tokens_per_block is not None
        tokens = bind_request["tokens"][group.name] if is_token_group else None
        held = [layer for layer in layers if layer.group == group]
        for rows in _rows_by_layer(plan, bind_request, held, remotes, budget):
            places = tuple(
                (row.local[1], row.local[3], row.remote_index, row.length) for row in rows
            )
            ends = tuple((row.remote[1], row.remote[3]) for row in rows)
            held_by = {id(row.local[0]): row.local[0] for row in rows}.values()
            cells = tuple((layer.cells.content, layer.rest_bytes) for layer in held_by)
            kind = cells, tokens, asked, places, ends
            names = [name for row in rows for name in row.local[0].names]
            if kind in drawn:
                panel = drawn[kind]
                drawn[kind] = attrs.evolve(
                    panel,
                    tensors=tuple(dict.fromkeys([*panel.tensors, *names])),
                    num_layers=panel.num_layers + 1,
                )
                continue
            drawn[kind] = Panel(
                tensors=tuple(dict.fromkeys(names)),
                num_layers=1,
                tokens=tokens,
                asked=asked,
                operation=plan.operation,
                is_example=request is None,
                copies=tuple(_copies(plan, rows, budget)),
            )
    return tuple(drawn.values())


def excerpt(
    plan: TransferPlan, group: Group, request: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Range] | None:
    """Return the part of a request that is drawn: the first blocks of one local group.

    The part has the arguments of ``bind``. It is one period of both sides at most. Other groups
    copy nothing, so that each address is in one group. The range is what the whole request copies
    of the group; ``None`` if that is nothing.
    """
    remote_groups = _remote_groups(plan, group)
    # The local blocks after which both sides repeat.
    turn = math.ceil(period(group, *remote_groups) / slots(group) / group.context.size)
    if request is None:
        request = _example(plan, group, remote_groups, turn)
        asked = in_slots(group, request["tokens"])
        start, stop = asked
    else:
        covered = _asked(plan, group, remote_groups, request)
        if covered is None:
            return None
        # A picture shows the request's first blocks, up to where both sides repeat.
        asked = covered
        start, stop = asked
        if group.tokens_per_block is None:
            stop = min(stop, start + 1)
        else:
            first_block = before(group, start) // slots(group)
            _, end = reach(group, first_block, min(turn, MAX_EXAMPLE_BLOCKS))
            stop = min(stop, end, start + MAX_POSITIONS)
    if start >= stop:
        return None
    # An empty range for all other groups: they copy nothing.
    tokens = {local_group.name: (0, 0) for local_group in plan.local.groups}
    tokens[group.name] = in_tokens(group, (start, stop))
    return {**request, "tokens": tokens}, in_tokens(group, asked)


def _remote_groups(plan: TransferPlan, group: Group) -> list[Group]:
    """Return the group of every remote worker that has a tensor of the local group."""
    tensors = {view.name for view in plan.local.views if view.group == group.name}
    groups = []
    for worker in plan.remotes:
        names = {view.group for view in worker.views if view.name in tensors}
        groups += [remote_group for remote_group in worker.groups if remote_group.name in names]
    return groups


def _asked(
    plan: TransferPlan,
    group: Group,
    remote_groups: Sequence[Group],
    request: Mapping[str, Any],
) -> Range | None:
    """Return the positions of a group that a request copies; ``None`` without a block table."""
    groups: Sequence[Group] = [group]
    tables = request["local"]
    if plan.operation == "WRITE":
        groups = remote_groups
        tables = request["remote"]
    ranges = []
    for destination_group in groups:
        if destination_group.name in tables:
            table = tables[destination_group.name]
            ranges.append(reach(destination_group, table.first, table.stop - table.first))
    if not ranges:
        return None
    # Positions without a block of the destination do not move, whatever the range says.
    requested = range_of(request["tokens"], group)
    if requested:
        ranges.append(requested)
    return max(low for low, _ in ranges), min(high for _, high in ranges)


def _num_blocks(group: Group, tokens: Range) -> int:
    """Return how many blocks hold some of the tokens, or of the states."""
    start, stop = in_slots(group, tokens)
    return -(-before(group, stop) // slots(group)) - before(group, start) // slots(group)


def _example(
    plan: TransferPlan, group: Group, remote_groups: Sequence[Group], turn: int
) -> dict[str, Any]:
    """Return a request of ``turn`` blocks, or of the first two, as far as the pools go."""
    stop = 1
    if group.tokens_per_block is not None:
        pool = _pool([plan.local], group)
        # Where the last block of each side's smallest pool ends.
        ends = [reach(group, 0, pool)[1]]
        ends += [
            reach(far_group, 0, _pool(plan.remotes, far_group))[1] for far_group in remote_groups
        ]
        num_blocks = min(turn if turn <= MAX_EXAMPLE_BLOCKS else 2, pool)
        stop = min(num_blocks * slots(group) * group.context.size, MAX_POSITIONS, *ends)
    # Local ids ascend and remote ids descend: no two blocks are neighbours on both sides.
    local = {local_group.name: Blocks([]) for local_group in plan.local.groups}
    local[group.name] = Blocks(range(-(-before(group, stop) // slots(group))))
    remote = {far_group.name: Blocks([]) for worker in plan.remotes for far_group in worker.groups}
    for remote_group in remote_groups:
        # Several workers may have a group of that name: the table serves the longest of them.
        num_blocks = -(-before(remote_group, stop) // slots(remote_group))
        num_blocks = max(num_blocks, remote[remote_group.name].ids.size)
        remote[remote_group.name] = Blocks(range(num_blocks)[::-1])
    return {"local": local, "remote": remote, "tokens": in_tokens(group, (0, stop))}


def _pool(workers: Sequence[Worker], group: Group) -> int:
    """Return the fewest blocks that a pool of the group has."""
    geometries = itertools.chain.from_iterable(worker.geometries for worker in workers)
    sizes_of = (each.num_blocks for each in geometries if each.group.name == group.name)
    return min(sizes_of, default=1)


_Place = tuple[DrawnLayer, int, int, int]
"""A layer, the ordinal and the id of a block, and an offset in the layer's bytes there."""


class _Row(NamedTuple):
    """Bytes of one descriptor that are contiguous in a block on both sides."""

    local: _Place
    remote: _Place
    remote_index: int
    length: int
    run_bytes: int


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
    local_layers: Sequence[DrawnLayer],
    remotes: Sequence[Sequence[DrawnLayer]],
    budget: Budget,
) -> Iterator[list[_Row]]:
    """Yield what descriptors move of each local layer, in order of the local side."""
    local = _Index(plan.local, local_layers, request["local"], budget)
    found: dict[Any, list[_Row]] = {layer.key: [] for layer in local_layers}
    for name, group_plan in by_remote_group(plan):
        for number, spec in enumerate(group_plan.bind(**request)):
            if not spec.num_bytes:
                continue
            by_key: dict[Any, list[DrawnLayer]] = {}
            for layer in remotes[number]:
                if layer.group.name == name:
                    by_key.setdefault(layer.key, []).append(layer)
            indices: dict[Any, _Index] = {}
            for here, there in zip(*(side.tolist() for side in spec.descriptors()), strict=True):
                for skip, part, (layer, ordinal, block, offset) in local.cut(*here):
                    key = layer.key
                    if key not in indices:
                        tables = request["remote"]
                        indices[key] = _Index(plan.remotes[number], by_key[key], tables, budget)
                    remote_parts = indices[key].cut(there[0] + skip, part, there[2])
                    for more, num_bytes, far in remote_parts:
                        place = layer, ordinal, block, offset + more
                        found[key].append(_Row(place, far, number, num_bytes, here[1]))
    order = {id(layer): number for number, layer in enumerate(local_layers)}

    def place_of(row: _Row) -> tuple[int, ...]:
        layer, ordinal, _, offset = row.local
        return order[id(layer)], ordinal, row.remote_index, offset

    yield from (sorted(rows, key=place_of) for rows in found.values() if rows)


class _Index:
    """The contiguous bytes of a request's blocks on one worker, by device and address."""

    def __init__(
        self,
        worker: Worker,
        layers: Sequence[DrawnLayer],
        tables: Mapping[str, Blocks],
        budget: Budget,
    ) -> None:
        pieces: list[tuple[tuple[int, int], int, _Place]] = []
        for layer in layers:
            region = worker.regions[layer.region]
            table = tables.get(layer.group.name, Blocks([]))
            ids, first = np.unique(table.ids, return_index=True)  # a source may have a block twice
            spans = [*layer.cells.pieces]
            number = len(spans) * ids.size
            budget.take(number, "pieces of blocks", PIECE_BYTES, f"draw {worker.label}")
            for block, ordinal in zip(ids.tolist(), table.ordinals[first].tolist(), strict=True):
                base = region.address + layer.offset + block * layer.block_stride_bytes
                for start, stop in spans:
                    place = layer, ordinal, block, start
                    pieces.append(((region.device_id, base + start), base + stop, place))
        self._pieces = sorted(pieces, key=lambda piece: piece[0])
        self._starts = [start for start, _, _ in self._pieces]

    def cut(self, address: int, length: int, device: int) -> Iterator[tuple[int, int, _Place]]:
        """Yield the parts of a range of bytes: bytes before each, its length, its place."""
        at = bisect.bisect_right(self._starts, (device, address)) - 1
        skip = 0
        while skip < length:
            (_, start), stop, (layer, ordinal, block, offset) = self._pieces[at]
            begin = address + skip
            part = min(stop - begin, length - skip)
            yield skip, part, (layer, ordinal, block, offset + begin - start)
            skip += part
            at += 1


def _copies(plan: TransferPlan, rows: Sequence[_Row], budget: Budget) -> Iterator[BoxCopy]:
    """Yield the copies of one layer, as large as boxes of both sides can be."""
    budget.take(len(rows), "copies", COPY_BYTES, f"draw {plan.local.label}")
    for row in rows:
        ends = [(place[0].cells, place[3]) for place in (row.local, row.remote)]
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
            sides = [(low[first:stop], high[first:stop]) for _, low, high in found]
            itemsize = int(ends[0][0].itemsize[views[first]])
            for box in boxes(sides, np.diff(start)[first:stop], itemsize):
                part = slice(first + box.start, first + box.stop)
                span = int(start[part.start]), int(start[part.stop])
                local = _end(plan.local, row.local, span, found[0], part)
                remote_worker = plan.remotes[row.remote_index]
                remote = _end(remote_worker, row.remote, span, found[1], part)
                yield BoxCopy(local, remote, row.remote_index, row.run_bytes)


def _end(worker: Worker, place: _Place, span: Range, found: Sequence[Any], part: slice) -> CopyEnd:
    layer, ordinal, block, offset = place
    cell, low, high = (column[part] for column in found)
    intervals = {}
    for axis, start, stop in zip(
        layer.cells.axes, low.min(axis=0).tolist(), high.max(axis=0).tolist(), strict=True
    ):
        if axis == TOKEN and layer.group.tokens_per_block is not None:
            intervals[POSITION] = positions_in(layer.group, ordinal, start, stop)
        elif axis != TENSOR:
            intervals[axis] = Interval(axis, start, stop)
    view = int(layer.cells.view[cell[0]])
    return CopyEnd(
        worker, layer, ordinal, block, span[0] + offset, span[1] + offset, view, intervals
    )
