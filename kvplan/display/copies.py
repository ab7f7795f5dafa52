"""Which bytes a plan copies from where to where, in tensors, heads, tokens and blocks.

A request is bound to the plan, and the resulting descriptors are cut where a block or a :class:`Box` of either side
ends. The coordinates of each end come from its own address and its own worker's views, so they are a check of the plan:
both ends of a copy have to agree. Without block tables the request is an example: the first blocks of each group, local
ids ascending and remote ids descending, so that no two blocks are neighbours on both sides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, listed
from kvplan._text import count, size, sizes
from kvplan.describe.axes import segments
from kvplan.describe.blocks import Blocks, Range
from kvplan.describe.views import TOKEN, Group, View
from kvplan.describe.worker import Worker
from kvplan.display.blockmap import BlockMap, Box, Interval, Path, block_maps, folded
from kvplan.plan.align import before, period, position_of, reach, slots
from kvplan.plan.bind import range_of
from kvplan.plan.transfer import TransferPlan

POSITION: Final = "position"
"""The axis of a request's positions, which is the same on both sides, unlike that of tokens in a block."""

MAX_BLOCKS: Final = 4
"""Blocks and contexts of both sides repeat after a period: this many local blocks are drawn for it at most."""

MAX_POSITIONS: Final = 1024


@attrs.frozen
class CopyEnd:
    """One end of a copy: a box of block ``ordinal`` of the request, whose block id is ``block``, on one worker."""

    worker: Worker = attrs.field(repr=False)
    map: BlockMap = attrs.field(repr=False)
    ordinal: int
    block: int
    box: Box

    @property
    def region(self) -> str:
        """The name of the region."""
        return self.worker.regions[self.map.places[0][0]].name

    @property
    def region_offset(self) -> int:
        """The offset in the region, in bytes."""
        return self.map.places[0][1] + self.block * self.map.block_stride_bytes + self.box.start

    @property
    def path(self) -> Path:
        """The path of the box, with positions in place of tokens."""
        tokens = [interval for interval in self.box.path if interval.axis == TOKEN][-1:]
        return tuple(
            self._positions(interval) if interval.axis == TOKEN else interval
            for interval in self.box.path
            if interval.axis != TOKEN or interval in tokens
        )

    @property
    def positions(self) -> Interval:
        """All positions in the block, of a token group."""
        return self._positions(Interval(TOKEN, 0, slots(self.map.group)))

    @property
    def coordinates(self) -> str:
        """The tensors that the bytes belong to, each with its interval on every axis."""
        return "; ".join(f"{self.map.tensors[i]}: {self._intervals(self.map.views[i])}" for i in self.box.views)

    def _intervals(self, view: View) -> str:
        path = {interval.axis: interval for interval in self.path}
        found = []
        for axis, whole in view.sizes.items():
            if axis == TOKEN:
                held = path.get(POSITION) or self.positions
                found.append(f"position {held if held.has_gaps else f'[{held.start}, {held.stop})'}")
                continue
            all_held = segments([one for one in view.axes if one.name == axis])
            held = path.get(axis) or Interval(axis, all_held.start[0], all_held.stop[-1])
            found.append(f"{axis} [{held.start}, {held.stop}) of {whole}")
        return ", ".join(found)

    def _positions(self, tokens: Interval) -> Interval:
        group, first = self.map.group, self.ordinal * slots(self.map.group)
        low, high = (position_of(group, first + slot) for slot in (tokens.start, tokens.stop - 1))
        has_gaps = high - low > tokens.stop - 1 - tokens.start
        return Interval(POSITION, low, high + 1, has_gaps=has_gaps)

    def __str__(self) -> str:
        which = f" block {self.ordinal}" if self.map.group.tokens_per_block is not None else ""
        return f"{self.worker.label}{which}, block id {self.block}, region {self.region} + {self.region_offset}"


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
        """Bytes of this copy."""
        return self.local.box.stop - self.local.box.start


@attrs.frozen
class Panel:
    """The copies of one layer, of which ``num_layers`` are equal.

    ``tensors`` are those of all layers, ``tokens`` the positions, the first of those ``asked`` for; ``None`` for a
    state. ``is_example`` says that no block tables were given, so that block ids mean nothing.
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
        """How much is copied."""
        lengths = [copy.num_bytes for copy in self.copies]
        moved = f"{size(sum(lengths))} in {count(len(lengths), 'copy')} of {sizes(min(lengths), max(lengths))}"
        where = f"positions [{self.tokens[0]}, {self.tokens[1]})" if self.tokens else "one state"
        if self.tokens and self.tokens != self.asked:
            drawn, every = (_blocks_of(self.copies[0].local.map.group, each) for each in (self.tokens, self.asked))
            first = "block" if drawn == 1 else count(drawn, "block")
            where += f" of [{self.asked[0]}, {self.asked[1]}), first {first} of {every},"
        layers = f" of one of {self.num_layers} equal layers" if self.num_layers > 1 else ""
        return f"{where}{layers}: {moved}"

    def details(self, copy: BoxCopy) -> str:
        """One copy in four lines: what the bytes are, both ends, and the length of the descriptor."""
        ends = (copy.remote, copy.local) if self.operation == "READ" else (copy.local, copy.remote)
        moved = f"{count(copy.num_bytes, 'byte')} from {ends[0]}\nto {ends[1]}"
        return f"{copy.local.coordinates}\n{moved}\ndescriptor of {count(copy.run_bytes, 'byte')}"


def panels(plan: TransferPlan, request: Mapping[str, Any] | None = None) -> tuple[Panel, ...]:
    """What a plan copies for a request, the arguments of ``bind``: a panel for each kind of layer that it copies.

    Layers are of one kind if their blocks have equal bytes, and equal copies. Raises what :meth:`TransferPlan.bind`
    does, and ``RANGE`` for a block of too many pieces.
    """
    ours, theirs = block_maps(plan.local), [block_maps(worker) for worker in plan.remotes]
    if request is not None:
        plan.bind(**request)  # names what is wrong with the whole request, before it is reduced to one group
    far = [_single(maps) for maps in theirs]
    kinds: dict[Any, tuple[tuple[BoxCopy, ...], list[tuple[str, ...]]]] = {}
    for group in plan.local.groups:
        found = excerpt(plan, group, [ours, *theirs], request)
        if found is None:
            continue
        part, asked = found
        near = _single([one for one in ours if one.group == group])
        numbers = {layer: i for i, layer in enumerate(dict.fromkeys(one.layer for one, _ in near))}
        rows = _moved(plan, part, near, far, numbers)
        starts = np.searchsorted(rows[:, LAYER], np.arange(len(numbers) + 1)).tolist()
        for layer, (first, stop) in zip(numbers, itertools.pairwise(starts), strict=True):
            maps = [one for one, _ in near if one.layer == layer]
            shapes = tuple((one.axes, one.size_bytes, one.rest_bytes, one.block_stride_bytes) for one in maps)
            tokens = None if group.tokens_per_block is None else part["tokens"][group.name]
            kind = shapes, tokens, asked, rows[first:stop, COMPARED].tobytes()
            if first < stop and kind not in kinds:
                kinds[kind] = tuple(_copies(plan, rows[first:stop], near, far)), []
            if first < stop:
                kinds[kind][1].append(tuple(name for one in maps for name in one.tensors))
    return tuple(
        Panel(
            tensors=tuple(dict.fromkeys(itertools.chain(*names))),
            num_layers=len(names),
            tokens=tokens,
            asked=asked,
            operation=plan.operation,
            is_example=request is None,
            copies=copies,
        )
        for (_, tokens, asked, _), (copies, names) in kinds.items()
    )


def excerpt(
    plan: TransferPlan, group: Group, maps: Sequence[Sequence[BlockMap]], request: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Range] | None:
    """The part of a request that is drawn, as the arguments of ``bind``: the first blocks of one local group.

    It is one period of both sides at most. Other groups copy nothing, so that each address is in one group. The range
    is what the whole request copies of the group; ``None`` if that is nothing.
    """
    tensors = {view.name for view in plan.local.views if view.group == group.name}
    others = [found.group for side in maps[1:] for found in side if tensors.intersection(found.tensors)]
    turn = math.ceil(period(group, *others) / slots(group) / group.context.size)
    if request is None:
        request = _example(plan, group, others, maps, turn)
        start, stop = asked = request["tokens"]
    else:
        needed = [(group, request["local"])]
        if plan.operation == "WRITE":
            needed = [(other, request["remote"]) for other in others]
        listed = [(one, tables[one.name]) for one, tables in needed if one.name in tables]
        if not listed:
            return None
        ranges = [reach(one, table.first, table.stop - table.first) for one, table in listed]
        ranges += filter(None, [range_of(request["tokens"], group)])
        start, stop = asked = max(low for low, _ in ranges), min(high for _, high in ranges)
        if group.tokens_per_block is None:
            stop = min(stop, start + 1)
        else:
            end = reach(group, before(group, start) // slots(group), min(turn, MAX_BLOCKS))[1]
            stop = min(stop, end, start + MAX_POSITIONS)
    tokens = {other.name: (start, stop) if other == group else (0, 0) for other in plan.local.groups}
    return ({**request, "tokens": tokens}, asked) if start < stop else None


def _blocks_of(group: Group, positions: Range) -> int:
    """How many blocks hold some of the positions."""
    first, stop = (before(group, position) for position in positions)
    return -(-stop // slots(group)) - first // slots(group)


def _example(
    plan: TransferPlan, group: Group, others: Sequence[Group], maps: Sequence[Sequence[BlockMap]], turn: int
) -> dict[str, Any]:
    """A request of ``turn`` blocks, or of the first two, as far as the pools of both sides go."""
    stop = 1
    if group.tokens_per_block is not None:
        pool = _pool(maps[:1], group)
        ends = [reach(group, 0, pool)[1], *(reach(other, 0, _pool(maps[1:], other))[1] for other in others)]
        blocks = min(turn if turn <= MAX_BLOCKS else 2, pool)
        stop = min(blocks * slots(group) * group.context.size, MAX_POSITIONS, *ends)
    local = {other.name: Blocks([]) for other in plan.local.groups}
    local[group.name] = Blocks(range(-(-before(group, stop) // slots(group))))
    remote = {other.name: Blocks([]) for worker in plan.remotes for other in worker.groups}
    for other in others:
        number = max(-(-before(other, stop) // slots(other)), remote[other.name].ids.size)
        remote[other.name] = Blocks(range(number)[::-1])
    return {"local": local, "remote": remote, "tokens": (0, stop)}


def _pool(sides: Sequence[Sequence[BlockMap]], group: Group) -> int:
    """The fewest blocks that a pool of the group has."""
    return min((found.num_blocks for side in sides for found in side if found.group.name == group.name), default=1)


LAYER, MAP, ORDINAL, REMOTE, OFFSET, ID, FAR_MAP, FAR_ORDINAL, FAR_OFFSET, FAR_ID, LENGTH, RUN = range(12)
"""Columns of :func:`_moved`. Of each end: the block map, the ordinal and id of the block and the offset in it."""

COMPARED: Final = (ORDINAL, REMOTE, OFFSET, FAR_ORDINAL, FAR_OFFSET, LENGTH)
"""Columns that are equal in layers of one kind."""

_Maps = Sequence[tuple[BlockMap, Ints]]
"""The block maps of single layers, each with its contiguous pieces."""


def _single(maps: Sequence[BlockMap]) -> _Maps:
    return [(one, found.pieces) for found in maps for one in found.layers()]


def _moved(
    plan: TransferPlan, part: Mapping[str, Any], ours: _Maps, theirs: Sequence[_Maps], numbers: Mapping[Any, int]
) -> Ints:
    """The bytes that descriptors move, cut where a piece ends on either side, (n, 12), in order of the local side.

    ``numbers`` has the number of each layer.
    """
    near = _BlockPieces.of(plan.local, ours, part["local"], numbers, by_layer=False)
    found = [np.empty((0, 12), np.int64)]
    specs = [each for one in by_remote_group(plan) for each in enumerate(one.bind(**part))]
    for index, spec in specs:
        maps = theirs[index]
        local, remote = spec.descriptors()
        if not len(local):
            continue
        far = _BlockPieces.of(plan.remotes[index], maps, part["remote"], numbers, by_layer=True)
        run = local[:, 1].astype(np.int64)
        # first by the pieces of the local side, which tell the layer; then each result by those of the remote side
        of, skip, length, mine = near.cut(0 * run, local[:, 0], run, local[:, 2])
        address = remote[of, 0] + skip.astype(np.uint64)
        again, skip, length, other = far.cut(mine[:, 0], address, length, remote[of, 2])
        layer, number, ordinal, block, offset = mine[again].T
        _, far_number, far_ordinal, far_block, far_offset = other.T
        ends = [layer, number, ordinal, 0 * layer + index, offset + skip, block]
        ends += [far_number, far_ordinal, far_offset, far_block]
        found.append(np.stack([*ends, length, run[of][again]], axis=1))
    rows = np.concatenate(found)
    return rows[np.lexsort(rows[:, [OFFSET, REMOTE, ORDINAL, MAP, LAYER]].T)]


def by_remote_group(plan: TransferPlan) -> Iterator[TransferPlan]:
    """The plan with each group of the remote workers alone: groups may share a pool, and an example's blocks."""
    far = 1 if plan.operation == "READ" else 0
    for name in dict.fromkeys(groups.groups[far].name for pair in plan.pairs for groups in pair.group_pairs):
        kept = [tuple(g for g in pair.group_pairs if g.groups[far].name == name) for pair in plan.pairs]
        pairs = zip(plan.pairs, kept, strict=True)
        yield attrs.evolve(plan, pairs=tuple(attrs.evolve(pair, group_pairs=groups) for pair, groups in pairs))


@attrs.frozen(eq=False)
class _BlockPieces:
    """The contiguous pieces of a request's blocks on one worker, ascending by ``key`` and by their first address.

    ``key`` is made of layer and device, or of the device alone. ``rows`` (n, 5) has the number of the layer and of the
    map, the ordinal and id of the block, and the offset in it.
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
        numbers: Mapping[Any, int],
        by_layer: bool,
    ) -> _BlockPieces:
        devices = np.array(sorted({region.device_id for region in worker.regions}), np.uint64)
        keys, starts, rows = [np.empty(0, np.int64)], [np.empty(0, np.uint64)], [np.empty((0, 5), np.int64)]
        for number, (one, pieces) in enumerate(maps):
            (region, first_byte), table, layer = one.places[0], tables.get(one.group.name), numbers.get(one.layer)
            if table is None or layer is None:
                continue
            ids, first = np.unique(table.ids, return_index=True)  # a source may have a block twice
            # one row for each piece of each block
            block, ordinal = (np.repeat(each.astype(np.int64), len(pieces)) for each in (ids, table.ordinals[first]))
            offset = np.tile(pieces[:, 0], ids.size)
            rows.append(np.stack([0 * block + layer, 0 * block + number, ordinal, block, offset], axis=1))
            at = first_byte + block * one.block_stride_bytes + offset
            starts.append(np.uint64(worker.regions[region].address) + at.astype(np.uint64))
            device = np.searchsorted(devices, np.uint64(worker.regions[region].device_id))
            keys.append(0 * block + layer * by_layer * devices.size + device)
        key, start = np.concatenate(keys), np.concatenate(starts)
        order = np.lexsort((start, key))
        return cls(key[order], start[order], np.concatenate(rows)[order], devices, by_layer)

    def cut(
        self, layer: Ints, address: npt.NDArray[np.uint64], length: Ints, device: npt.NDArray[np.uint64]
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Ranges of bytes, cut where a piece ends. Of each result: the index of its range, the bytes before it in
        that range, its length, and the row of its piece with the offset of its first byte."""
        key = layer * self.by_layer * self.devices.size + np.searchsorted(self.devices, device)
        first, last = self._find(key, address), self._find(key, address + (length - 1).astype(np.uint64))
        number = last - first + 1
        of = np.repeat(np.arange(number.size), number)
        piece = listed(np.stack([first, last + 1], axis=1))
        begin = np.maximum(address[of], self.start[piece])
        skip = (begin - address[of]).astype(np.int64)
        is_last = np.append(of[1:] != of[:-1], True)
        stop = np.where(is_last, length[of], np.append(skip[1:], 0))
        rows = self.rows[piece]
        rows[:, -1] += (begin - self.start[piece]).astype(np.int64)
        return of, skip, stop - skip, rows

    def _find(self, key: Ints, address: npt.NDArray[np.uint64]) -> Ints:
        """The index of the piece that has each address: the last of its key that starts there or before."""
        starts = np.unique(self.start)
        mine, asked = (np.searchsorted(starts, each, "right") for each in (self.start, address))
        scale = starts.size + 1
        return np.searchsorted(self.key * scale + mine, key * scale + asked, "right") - 1


def _copies(plan: TransferPlan, rows: Ints, ours: _Maps, theirs: Sequence[_Maps]) -> Iterator[BoxCopy]:
    """The copies of one layer, cut into boxes of both sides."""
    for row in rows.tolist():
        index, near = row[REMOTE], ours[row[MAP]][0]
        far = theirs[index][row[FAR_MAP]][0]
        for mine, other in _paired([(near, row[OFFSET]), (far, row[FAR_OFFSET])], row[LENGTH]):
            local = CopyEnd(plan.local, near, row[ORDINAL], row[ID], mine)
            remote = CopyEnd(plan.remotes[index], far, row[FAR_ORDINAL], row[FAR_ID], other)
            yield BoxCopy(local, remote, index, row[RUN])


def _paired(sides: Sequence[tuple[BlockMap, int]], length: int) -> Iterator[tuple[Box, Box]]:
    """``length`` bytes from an offset in each of two maps, cut until every part is one box on both sides."""
    cuts, found = {0, length}, set[int]()
    while cuts != found:
        found = set(cuts)
        boxes = [
            [box for low, high in itertools.pairwise(sorted(found)) for box in one.boxes(at + low, at + high)]
            for one, at in sides
        ]
        cuts |= {
            edge - at for (_, at), side in zip(sides, boxes, strict=True) for b in side for edge in (b.start, b.stop)
        }
    return zip(*boxes, strict=True)
