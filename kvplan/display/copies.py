"""The bytes that a plan copies, from where to where, in tensors, heads, tokens and blocks.

A request is bound to the plan, and the resulting descriptors are cut where a block or a
:class:`Box` of either side ends. The coordinates of each end come from its own address and its own
worker's views, so they are a check of the plan: both ends of a copy have to agree. Without block
tables the request is an example: the first blocks of each group, local ids ascending and remote ids
descending, so that no two blocks are neighbours on both sides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, integers_in
from kvplan._text import count, size, sizes
from kvplan.budget import spend
from kvplan.describe.axes import segments
from kvplan.describe.blocks import Blocks, Range
from kvplan.describe.views import TOKEN, Group, View
from kvplan.describe.worker import Worker
from kvplan.display.blockmap import BlockMap, Box, Interval, Path, block_maps, folded
from kvplan.plan.align import before, in_slots, in_tokens, period, position_of, reach, slots
from kvplan.plan.bind import range_of
from kvplan.plan.transfer import TransferPlan

POSITION: Final = "position"
"""The axis of a request's positions: the same on both sides, unlike that of tokens in a block."""

MAX_EXAMPLE_BLOCKS: Final = 4
"""At most this many local blocks are drawn for a period, after which both sides repeat."""

COPY_BYTES: Final = 20_000
"""What a copy that is drawn takes of a budget."""

VIEW_BYTES: Final = 4000
"""What a view takes of a budget for each group that is drawn."""

MAX_POSITIONS: Final = 1024


@attrs.frozen
class CopyEnd:
    """One end of a copy: a box of block ``ordinal`` of the request, whose id is ``block``."""

    worker: Worker = attrs.field(repr=False)
    map: BlockMap = attrs.field(repr=False)
    ordinal: int
    block: int
    box: Box

    @property
    def region(self) -> str:
        """Return the name of the region."""
        return self.worker.regions[self.map.places[0][0]].name

    @property
    def region_offset(self) -> int:
        """Return the offset in the region, in bytes."""
        _, first_byte = self.map.places[0]
        return first_byte + self.block * self.map.block_stride_bytes + self.box.start

    @property
    def path(self) -> Path:
        """Return the path of the box, with positions in place of tokens."""
        path = []
        # Tokens in digits: the finest digit counts from where the coarser ones are.
        finest_tokens = [interval for interval in self.box.path if interval.axis == TOKEN][-1:]
        for interval in self.box.path:
            if interval.axis != TOKEN:
                path.append(interval)
            elif interval in finest_tokens:
                path.append(self._positions(interval))
        return tuple(path)

    @property
    def positions(self) -> Interval:
        """Return all positions in the block, of a token group."""
        return self._positions(Interval(TOKEN, 0, slots(self.map.group)))

    @property
    def coordinates(self) -> str:
        """Return the tensors that the bytes belong to, each with its interval on every axis."""
        tensors = []
        for view_index in self.box.views:
            intervals = self._intervals(self.map.views[view_index])
            tensors.append(f"{self.map.tensors[view_index]}: {intervals}")
        return "; ".join(tensors)

    def _intervals(self, view: View) -> str:
        """Return the interval on every axis of a view."""
        path = {interval.axis: interval for interval in self.path}
        texts = []
        for axis_name, axis_size in view.sizes.items():
            if axis_name == TOKEN:
                held = path.get(POSITION) or self.positions
                positions = f"{held}" if held.has_gaps else f"[{held.start}, {held.stop})"
                texts.append(f"position {positions}")
                continue
            whole = segments([axis for axis in view.axes if axis.name == axis_name])
            held = path.get(axis_name) or Interval(axis_name, whole.start[0], whole.stop[-1])
            texts.append(f"{axis_name} [{held.start}, {held.stop}) of {axis_size}")
        return ", ".join(texts)

    def _positions(self, tokens: Interval) -> Interval:
        """Return the positions of an interval of slots, with gaps where other contexts are."""
        group = self.map.group
        first_slot = self.ordinal * slots(group)
        low = position_of(group, first_slot + tokens.start)
        high = position_of(group, first_slot + tokens.stop - 1)
        has_gaps = high - low > tokens.stop - 1 - tokens.start
        return Interval(POSITION, low, high + 1, has_gaps=has_gaps)

    def __str__(self) -> str:
        is_token_group = self.map.group.tokens_per_block is not None
        ordinal = f" block {self.ordinal}" if is_token_group else ""
        block = f"block id {self.block}"
        return f"{self.worker.label}{ordinal}, {block}, region {self.region} + {self.region_offset}"


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
        """Return the number of bytes of this copy."""
        return self.local.box.stop - self.local.box.start


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
        """Return the names of the tensors, equal layers folded."""
        return folded(self.tensors)

    @property
    def facts(self) -> str:
        """Return in words how much is copied."""
        layers = f" of one of {self.num_layers} equal layers" if self.num_layers > 1 else ""
        lengths = [copy.num_bytes for copy in self.copies]
        copies = f"{count(len(lengths), 'copy')} of {sizes(min(lengths), max(lengths))}"
        return f"{self._positions()}{layers}: {size(sum(lengths))} in {copies}"

    def _positions(self) -> str:
        """Return in words the positions that are drawn, and those asked for if they are more."""
        if self.tokens is None:
            return "one state"
        drawn = f"positions [{self.tokens[0]}, {self.tokens[1]})"
        if self.tokens == self.asked:
            return drawn
        group = self.copies[0].local.map.group
        num_drawn = _num_blocks(group, self.tokens)
        blocks = "block" if num_drawn == 1 else count(num_drawn, "block")
        asked = f"[{self.asked[0]}, {self.asked[1]})"
        return f"{drawn} of {asked}, first {blocks} of {_num_blocks(group, self.asked)},"

    def with_layer(self, tensors: Iterable[str]) -> Panel:
        """Return the panel with one more equal layer, of these tensors."""
        together = tuple(dict.fromkeys([*self.tensors, *tensors]))
        return attrs.evolve(self, tensors=together, num_layers=self.num_layers + 1)

    def details(self, copy: BoxCopy) -> str:
        """Return one copy in four lines: its bytes, both ends, and the length of the descriptor."""
        source, destination = copy.local, copy.remote
        if self.operation == "READ":
            source, destination = destination, source
        moved = f"{count(copy.num_bytes, 'byte')} from {source}\nto {destination}"
        return f"{copy.local.coordinates}\n{moved}\ndescriptor of {count(copy.run_bytes, 'byte')}"


def panels(plan: TransferPlan, request: Mapping[str, Any] | None = None) -> tuple[Panel, ...]:
    """Return what a plan copies for a request: a panel for each kind of layer.

    The request has the arguments of ``bind``.
    Layers are of one kind if their blocks have equal bytes, and equal copies. Raises what
    :meth:`TransferPlan.bind` does, and ``RANGE`` for a block of too many pieces.
    """
    local_maps = block_maps(plan.local)
    remote_maps = [block_maps(worker) for worker in plan.remotes]
    if request is not None:
        # Names what is wrong with the whole request, before it is reduced to one group.
        plan.bind(**request)
    remotes = [_single(maps) for maps in remote_maps]
    # each group is bound by itself, and looks at all views
    num_views = sum(len(worker.views) for worker in (plan.local, *plan.remotes))
    number = len(plan.local.groups) * num_views
    spend(number, "views", VIEW_BYTES, f"draw {plan.local.label}")
    drawn: dict[Any, Panel] = {}
    for group in plan.local.groups:
        part = excerpt(plan, group, [local_maps, *remote_maps], request)
        if part is None:
            continue
        bind_request, asked = part
        # A state has no positions to draw.
        is_token_group = group.tokens_per_block is not None
        tokens = bind_request["tokens"][group.name] if is_token_group else None
        local = _single([block_map for block_map in local_maps if block_map.group == group])
        for maps, rows in _rows_by_layer(plan, bind_request, local, remotes):
            shapes = tuple(_shape(block_map) for block_map in maps)
            kind = shapes, tokens, asked, rows[:, COMPARED].tobytes()
            names = itertools.chain(*(block_map.tensors for block_map in maps))
            if kind in drawn:
                drawn[kind] = drawn[kind].with_layer(names)
                continue
            drawn[kind] = Panel(
                tensors=tuple(dict.fromkeys(names)),
                num_layers=1,
                tokens=tokens,
                asked=asked,
                operation=plan.operation,
                is_example=request is None,
                copies=tuple(_copies(plan, rows, local, remotes)),
            )
    return tuple(drawn.values())


def _shape(block_map: BlockMap) -> tuple[Any, ...]:
    """Return what is equal in block maps of equal bytes."""
    sizes_and_stride = block_map.size_bytes, block_map.rest_bytes, block_map.block_stride_bytes
    return block_map.axes, *sizes_and_stride


def _rows_by_layer(
    plan: TransferPlan,
    request: Mapping[str, Any],
    local: _Maps,
    remotes: Sequence[_Maps],
) -> Iterator[tuple[list[BlockMap], Ints]]:
    """Yield the block maps of each local layer that a request copies, and its rows."""
    layers = dict.fromkeys(block_map.layer for block_map, _ in local)
    number_of_layer = {layer: i for i, layer in enumerate(layers)}
    rows = _moved(plan, request, local, remotes, number_of_layer)
    # Rows ascend by layer: layer i has the rows [bounds[i], bounds[i + 1]).
    bounds = np.searchsorted(rows[:, LAYER], np.arange(len(layers) + 1)).tolist()
    for layer, (first, stop) in zip(layers, itertools.pairwise(bounds), strict=True):
        if first < stop:
            maps = [block_map for block_map, _ in local if block_map.layer == layer]
            yield maps, rows[first:stop]


def excerpt(
    plan: TransferPlan,
    group: Group,
    maps: Sequence[Sequence[BlockMap]],
    request: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], Range] | None:
    """Return the part of a request that is drawn: the first blocks of one local group.

    The part has the arguments of ``bind``. It is one period of both sides at most. Other groups
    copy nothing, so that each address is in one group. The range is what the whole request copies
    of the group; ``None`` if that is nothing.
    """
    remote_groups = _remote_groups(plan, group, maps[1:])
    # The local blocks after which both sides repeat.
    turn = math.ceil(period(group, *remote_groups) / slots(group) / group.context.size)
    if request is None:
        request = _example(plan, group, remote_groups, maps, turn)
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


def _remote_groups(
    plan: TransferPlan,
    group: Group,
    maps: Sequence[Sequence[BlockMap]],
) -> list[Group]:
    """Return the group of every remote block map that has a tensor of the local group."""
    tensors = {view.name for view in plan.local.views if view.group == group.name}
    groups = []
    for worker_maps in maps:
        holding = [maps for maps in worker_maps if tensors.intersection(maps.tensors)]
        groups += [block_map.group for block_map in holding]
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
    plan: TransferPlan,
    group: Group,
    remote_groups: Sequence[Group],
    maps: Sequence[Sequence[BlockMap]],
    turn: int,
) -> dict[str, Any]:
    """Return a request of ``turn`` blocks, or of the first two, as far as the pools go."""
    stop = 1
    if group.tokens_per_block is not None:
        pool = _pool(maps[:1], group)
        # Where the last block of each side's smallest pool ends.
        ends = [reach(group, 0, pool)[1]]
        ends += [reach(far_group, 0, _pool(maps[1:], far_group))[1] for far_group in remote_groups]
        num_blocks = min(turn if turn <= MAX_EXAMPLE_BLOCKS else 2, pool)
        stop = min(num_blocks * slots(group) * group.context.size, MAX_POSITIONS, *ends)
    # Local ids ascend and remote ids descend: no two blocks are neighbours on both sides.
    local = {local_group.name: Blocks([]) for local_group in plan.local.groups}
    local[group.name] = Blocks(range(-(-before(group, stop) // slots(group))))
    remote: dict[str, Blocks] = {}
    for worker in plan.remotes:
        remote |= {remote_group.name: Blocks([]) for remote_group in worker.groups}
    for remote_group in remote_groups:
        # Several workers may have a group of that name: the table serves the longest of them.
        num_blocks = -(-before(remote_group, stop) // slots(remote_group))
        num_blocks = max(num_blocks, remote[remote_group.name].ids.size)
        remote[remote_group.name] = Blocks(range(num_blocks)[::-1])
    return {"local": local, "remote": remote, "tokens": in_tokens(group, (0, stop))}


def _pool(sides: Sequence[Sequence[BlockMap]], group: Group) -> int:
    """Return the fewest blocks that a pool of the group has."""
    maps = itertools.chain(*sides)
    return min((member.num_blocks for member in maps if member.group.name == group.name), default=1)


LAYER, MAP, ORDINAL, REMOTE, OFFSET, ID = range(6)
FAR_MAP, FAR_ORDINAL, FAR_OFFSET, FAR_ID, LENGTH, RUN = range(6, 12)
"""Columns of :func:`_moved`. Of each end: the block map, ordinal and id of the block, offset in it.

``FAR`` is the remote end. ``REMOTE`` is the index of the worker.
"""

COMPARED: Final = (ORDINAL, REMOTE, OFFSET, FAR_ORDINAL, FAR_OFFSET, LENGTH)
"""Columns that are equal in layers of one kind."""

_Maps = Sequence[tuple[BlockMap, Ints]]
"""The block maps of single layers, each with its contiguous pieces."""


def _single(maps: Sequence[BlockMap]) -> _Maps:
    """Return the maps of single layers; equal layers have equal pieces."""
    single = []
    for block_map in maps:
        single += [(layer, block_map.pieces) for layer in block_map.layers()]
    return single


def _moved(
    plan: TransferPlan,
    request: Mapping[str, Any],
    local_maps: _Maps,
    remote_maps: Sequence[_Maps],
    number_of_layer: Mapping[Any, int],
) -> Ints:
    """Return the bytes that descriptors move, cut where a piece ends on either side.

    They are in order of the local side, (n, 12), with a column for each name above.
    """
    tables = request["local"]
    local_pieces = _BlockPieces.of(plan.local, local_maps, tables, number_of_layer, by_layer=False)
    moved = [np.empty((0, 12), np.int64)]
    for group_plan in by_remote_group(plan):
        for index, spec in enumerate(group_plan.bind(**request)):
            local, remote = spec.descriptors()
            if not len(local):
                continue
            remote_pieces = _BlockPieces.of(
                plan.remotes[index],
                remote_maps[index],
                request["remote"],
                number_of_layer,
                by_layer=True,
            )
            moved.append(_moved_of_worker(local_pieces, remote_pieces, local, remote, index))
    # By layer, map, block, worker and offset: in the order of the local memory.
    rows = np.concatenate(moved)
    return rows[np.lexsort(rows[:, [OFFSET, REMOTE, ORDINAL, MAP, LAYER]].T)]


def _moved_of_worker(
    local_pieces: _BlockPieces,
    remote_pieces: _BlockPieces,
    local: npt.NDArray[np.uint64],
    remote: npt.NDArray[np.uint64],
    index: int,
) -> Ints:
    """Return the rows of descriptors between the local worker and the remote one of this index."""
    run_bytes = local[:, 1].astype(np.int64)
    # First by the pieces of the local side, which tell the layer.
    all_layers = 0 * run_bytes
    cut = local_pieces.cut(all_layers, local[:, 0], run_bytes, local[:, 2])
    descriptor, skip, length, local_rows = cut
    # Then each part by the pieces of the remote side; `part` is the index of a part of the first
    # cut.
    address = remote[descriptor, 0] + skip.astype(np.uint64)
    device = remote[descriptor, 2]
    part, skip, length, remote_rows = remote_pieces.cut(local_rows[:, 0], address, length, device)
    # Columns of both ends; the layer is that of the local side.
    layer, number, ordinal, block, offset = local_rows[part].T
    _, remote_number, remote_ordinal, remote_block, remote_offset = remote_rows.T
    columns = [
        layer,
        number,
        ordinal,
        0 * layer + index,
        offset + skip,
        block,
        remote_number,
        remote_ordinal,
        remote_offset,
        remote_block,
        length,
        run_bytes[descriptor][part],
    ]
    return np.stack(columns, axis=1)


def by_remote_group(plan: TransferPlan) -> Iterator[TransferPlan]:
    """Yield the plan with each group of the remote workers alone.

    Groups may share a pool, and an example's blocks.
    """
    remote = plan.direction.remote
    names: dict[str, None] = {}
    for pair in plan.pairs:
        names |= {group_pair.groups[remote].name: None for group_pair in pair.group_pairs}
    for name in names:
        pairs = []
        for pair in plan.pairs:
            kept = [ids for ids in pair.group_pairs if ids.groups[remote].name == name]
            pairs.append(attrs.evolve(pair, group_pairs=tuple(kept)))
        yield attrs.evolve(plan, pairs=tuple(pairs))


@attrs.frozen(eq=False)
class _BlockPieces:
    """The contiguous pieces of a request's blocks on one worker, by ``key`` and first address.

    ``key`` is made of layer and device, or of the device alone. ``rows`` (n, 5) has the number of
    the layer and of the map, the ordinal and id of the block, and the offset in it.
    """

    key: Ints
    start: npt.NDArray[np.uint64]
    rows: Ints
    devices: npt.NDArray[np.uint64]
    by_layer: bool

    @classmethod
    def of(
        cls,
        worker: Worker,
        maps: _Maps,
        tables: Mapping[str, Blocks],
        number_of_layer: Mapping[Any, int],
        by_layer: bool,
    ) -> _BlockPieces:
        """Return the pieces of the blocks in ``tables``, of the layers that have a number."""
        devices = np.array(sorted({region.device_id for region in worker.regions}), np.uint64)
        keys = [np.empty(0, np.int64)]
        starts = [np.empty(0, np.uint64)]
        rows = [np.empty((0, 5), np.int64)]
        for number, (block_map, pieces) in enumerate(maps):
            table = tables.get(block_map.group.name)
            layer = number_of_layer.get(block_map.layer)
            if table is None or layer is None:
                continue
            region_index, first_byte = block_map.places[0]
            region = worker.regions[region_index]
            ids, first = np.unique(table.ids, return_index=True)  # a source may have a block twice
            # One row for each piece of each block.
            block = np.repeat(ids.astype(np.int64), len(pieces))
            ordinal = np.repeat(table.ordinals[first], len(pieces))
            offset = np.tile(pieces[:, 0], ids.size)
            columns = [0 * block + layer, 0 * block + number, ordinal, block, offset]
            rows.append(np.stack(columns, axis=1))
            region_offset = first_byte + block * block_map.block_stride_bytes + offset
            starts.append(np.uint64(region.address) + region_offset.astype(np.uint64))
            device = np.searchsorted(devices, np.uint64(region.device_id))
            keys.append(0 * block + layer * by_layer * devices.size + device)
        key = np.concatenate(keys)
        start = np.concatenate(starts)
        # Pieces in the order in which _find looks for them.
        order = np.lexsort((start, key))
        return cls(key[order], start[order], np.concatenate(rows)[order], devices, by_layer)

    def cut(
        self,
        layer: Ints,
        address: npt.NDArray[np.uint64],
        length: Ints,
        device: npt.NDArray[np.uint64],
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Cut ranges of bytes where a piece ends.

        Return of each part: the index of its range, the bytes before it in that range, its length,
        and the row of its piece with the offset of its first byte.
        """
        # A range lies in the pieces [first[i], last[i]] of its key.
        key = layer * self.by_layer * self.devices.size + np.searchsorted(self.devices, device)
        first = self._find(key, address)
        last = self._find(key, address + (length - 1).astype(np.uint64))
        num_parts = last - first + 1
        range_of_part = np.repeat(np.arange(num_parts.size), num_parts)
        piece = integers_in(np.stack([first, last + 1], axis=1))
        # A part begins with its piece or with its range, and ends where the next part begins.
        begin = np.maximum(address[range_of_part], self.start[piece])
        skip = (begin - address[range_of_part]).astype(np.int64)
        is_last = np.append(range_of_part[1:] != range_of_part[:-1], True)
        stop = np.where(is_last, length[range_of_part], np.append(skip[1:], 0))
        rows = self.rows[piece]
        rows[:, -1] += (begin - self.start[piece]).astype(np.int64)
        return range_of_part, skip, stop - skip, rows

    def _find(self, key: Ints, address: npt.NDArray[np.uint64]) -> Ints:
        """Return the piece of each address: the last of its key that starts there or before."""
        # Ranks in place of addresses: key and rank fit one number.
        starts = np.unique(self.start)
        rank_of_piece = np.searchsorted(starts, self.start, "right")
        rank = np.searchsorted(starts, address, "right")
        scale = starts.size + 1
        return np.searchsorted(self.key * scale + rank_of_piece, key * scale + rank, "right") - 1


def _copies(
    plan: TransferPlan,
    rows: Ints,
    local_maps: _Maps,
    remote_maps: Sequence[_Maps],
) -> Iterator[BoxCopy]:
    """Yield the copies of one layer, cut into boxes of both sides."""
    spend(len(rows), "copies", COPY_BYTES, f"draw {plan.local.label}")
    for row in rows.tolist():
        index = row[REMOTE]
        local_map, _ = local_maps[row[MAP]]
        remote_map, _ = remote_maps[index][row[FAR_MAP]]
        sides = [(local_map, row[OFFSET]), (remote_map, row[FAR_OFFSET])]
        for local_box, remote_box in _paired(sides, row[LENGTH]):
            local = CopyEnd(plan.local, local_map, row[ORDINAL], row[ID], local_box)
            remote_worker = plan.remotes[index]
            block = row[FAR_ORDINAL], row[FAR_ID]
            remote = CopyEnd(remote_worker, remote_map, *block, remote_box)
            yield BoxCopy(local, remote, index, row[RUN])


def _paired(sides: Sequence[tuple[BlockMap, int]], length: int) -> Iterator[tuple[Box, Box]]:
    """Return bytes from an offset in each of two maps, cut until every part is one box on both."""
    # A box of one side may end inside a box of the other: cut there, and look again.
    cuts = {0, length}
    cuts_before = set[int]()
    while cuts != cuts_before:
        cuts_before = set(cuts)
        boxes_of_sides = []
        for block_map, offset in sides:
            boxes: list[Box] = []
            for low, high in itertools.pairwise(sorted(cuts_before)):
                boxes += block_map.boxes(offset + low, offset + high)
            boxes_of_sides.append(boxes)
            for box in boxes:
                cuts |= {box.start - offset, box.stop - offset}
    return zip(*boxes_of_sides, strict=True)
