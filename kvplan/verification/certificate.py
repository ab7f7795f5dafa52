"""Certificates: a proof, from a plan's descriptor tables alone, that every request it binds moves the right bytes.

The ids of a request are ``base + step * block id + sub`` whatever its blocks are, and repeat after a period of
positions. So it is enough to follow every descriptor of one period, with block ids left open. Nothing here knows how
tables are made.

- K1: a descriptor is split at the pieces of both sides (:mod:`kvplan.verification.labels`). Every part lies in one
  piece on each side, of the same tensor, position and number.
- K2: the parts of a period fill every piece of the destination once, in each of its blocks: once with the runs, and
  once with what moves token by token in their place at the ends of a range.
- K3: a run stays inside one cut, and bind moves only runs whose cut lies inside the range; a token is one position.
- K4: from block to block, an id advances by the stride of the blocks; the ids of all blocks stay in their row, and rows
  in their region.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan.describe.views import Group
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.verification.labels import Weights, local_slots, numbering, pieces_of_slot, positions_of, slots_of_block
from kvplan.verification.requests import plans_of

if TYPE_CHECKING:
    from kvplan.plan.mesh import MeshPlan
    from kvplan.plan.rows import GroupPair, RunIds, Table, TokenIds
    from kvplan.plan.transfer import TransferPlan

TermsOf = Callable[[int, Ints, Ints], "Ints | None"]
"""What the positions of a series add to its ids, by side, block ordinals and slots; ``None`` if it cannot be right."""

MAX_PARTS: Final = 1 << 25
"""A certificate follows at most this many descriptors of one series of ids and period."""


@attrs.frozen
class Certificate:
    """What was proved: each of the ``num_bytes`` bytes of a period of positions arrives where it belongs, once.

    They were checked in ``num_parts`` parts. ``complete`` is false if some writers of an engine are not among the
    plans, so that what they write is missing.
    """

    num_bytes: int
    num_parts: int
    complete: bool


def certify(plan: TransferPlan | MeshPlan | Iterable[TransferPlan]) -> Certificate:
    """The proof that every request bound to a plan, or to plans that belong together, moves the right bytes.

    It takes some time once, like planning, and none in ``bind``. The plan of one writer proves what it writes; the
    plans of all writers, or a mesh, also prove that no byte is missing.

    >>> from kvplan import Model, certify, plan_reads
    >>> decode, prefill = (Model.shipped("qwen2.5-1.5b").engine(name, tp=2, num_blocks=9) for name in "dp")
    >>> certify(plan_reads(decode[0], prefill))
    Certificate(num_bytes=229376, num_parts=448, complete=True)

    Raises ``PROOF`` if a plan moves wrong bytes, and ``RANGE`` if it is too large to follow.
    """
    given = plans_of(plan)
    writers = {plan.local.key for plan in given}
    destinations: dict[Key, tuple[Worker, TransferPlan]] = {}
    pairs: dict[Key, list[PairTables]] = {}
    for plan in given:
        reads = plan.operation == "READ"
        for worker in (plan.local,) if reads else plan.remotes:
            destinations[worker.key] = worker, plan
        for remote, pair in zip(plan.remotes, plan.pairs, strict=True):
            sides = WorkerTable(plan.local, pair.local_table), WorkerTable(remote, pair.remote_table)
            found = PairTables(sides if reads else sides[::-1], pair.group_pairs)
            pairs.setdefault(found.sides[0].worker.key, []).append(found)
    complete = all(plan.operation == "READ" or {other.key for other in plan.siblings} <= writers for plan in given)
    num_bytes = num_parts = 0
    for key, (worker, plan) in destinations.items():
        for proved in _Proof(worker, plan.not_transferred, complete).of(pairs.get(key, ())):
            num_bytes += proved[0]
            num_parts += proved[1]
    return Certificate(num_bytes, num_parts, complete)


def _block_and_slot(group: Group, positions: Ints) -> tuple[Ints, Ints]:
    """The block ordinal and the slot of positions that the group's context holds."""
    ordinal, slot = np.divmod(local_slots(group, positions), group.tokens_per_block or 1)
    return ordinal, slot


def _positions(group: Group, ordinal: Ints, slot: Ints) -> Ints:
    """The position in each slot of blocks."""
    return positions_of(group, ordinal * (group.tokens_per_block or 1) + slot)


@attrs.frozen(eq=False)
class Pieces:
    """The pieces that a worker has of some tensors in one group, in block 0, by ascending start: arrays of one length.

    ``start`` counts through the worker's regions, placed one behind another. ``tensor`` is an index; ``number`` is
    the number of the first byte (:mod:`kvplan.verification.labels`).
    """

    start: Ints
    length: Ints
    slot: Ints
    tensor: Ints
    number: Ints
    block_stride: Ints
    num_blocks: Ints

    def cut(self, start: Ints, length: Ints) -> tuple[Ints, Ints, Ints, Ints] | None:
        """Split ranges at the pieces. For each part: the index of its range and of its piece, its start, its length.

        ``None`` if some byte of a range is in no piece.
        """
        # Range i overlaps the pieces [low[i], high[i]); they follow each other in the arrays.
        low = np.searchsorted(self.start, start, "right") - 1
        high = np.searchsorted(self.start, start + length, "left")
        if (low < 0).any():
            return None
        number = high - low
        of = np.repeat(np.arange(start.size), number)
        piece = np.arange(of.size) - np.repeat(np.cumsum(number) - number - low, number)
        begin = np.maximum(start[of], self.start[piece])
        size = np.minimum((start + length)[of], (self.start + self.length)[piece]) - begin
        if (size <= 0).any() or size.sum() != length.sum():
            return None
        return of, piece, begin, size


def _region_starts(worker: Worker) -> Ints:
    """Where each region starts if all are placed one behind another."""
    total = sum(region.size_bytes for region in worker.regions)
    if total >= 1 << 62:
        what, expected = f"certify the regions of {worker.label}", f"fewer than {1 << 62} bytes in all"
        raise KVPlanError("RANGE", what, expected=expected, got=f"{total}", size_bytes=total)
    return np.cumsum([0, *(region.size_bytes for region in worker.regions)])


def _pieces(worker: Worker, group: Group, tensors: Mapping[str, tuple[int, Weights]]) -> Pieces:
    """The pieces that a worker has of ``tensors``, each given with its index and its weights, in a group."""
    # Views of one geometry and one numbering have the same pieces at different offsets.
    equal: dict[tuple[int, Weights], list[int]] = {}
    for view, geometry in enumerate(worker.geometry_of):
        found = tensors.get(worker.views[view].name)
        if found and worker.geometries[geometry].group == group:
            equal.setdefault((geometry, found[1]), []).append(view)
    base, columns = _region_starts(worker), [np.empty((7, 0), np.int64)]
    for (geometry, weights), views in equal.items():
        of, slots = worker.geometries[geometry], slots_of_block(worker.geometries[geometry])
        offset, number, length = pieces_of_slot(of, weights)
        region, place = worker.places[views].T
        tensor = np.array([tensors[worker.views[view].name][0] for view in views])
        # Every column by view, slot and piece.
        fields = (
            (base[region] + place)[:, None, None] + slots[:, None] + offset,
            length,
            np.arange(slots.size)[:, None],
            tensor[:, None, None],
            number,
            of.block_stride_bytes,
            of.num_blocks,
        )
        columns.append(np.stack(np.broadcast_arrays(*fields)).reshape(7, -1))
    found_all = np.concatenate(columns, axis=1)
    return Pieces(*found_all[:, np.argsort(found_all[0])])


@attrs.frozen(eq=False)
class BlockRanges:
    """One side of some descriptors: block ordinals by position; by run and position the range in block 0.

    ``start`` advances by ``step`` from block to block.
    """

    ordinal: Ints
    start: Ints
    length: Ints
    step: Ints


@attrs.frozen(eq=False)
class WorkerTable:
    """A worker and the table of its descriptors."""

    worker: Worker
    table: Table

    def rows(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Start, length, stride and count of each row. Raises ``PROOF`` for a row that leaves its region (rule K4)."""
        address, length, device, stride, count = self.table.rows.T
        fields = [(region.address, region.size_bytes, region.device_id) for region in self.worker.regions]
        base, size, on = np.array(fields, np.uint64).T[:, self.table.region]
        room = size - np.minimum(address - base, size)
        wrong = (address < base) | (device != on) | (length > room)
        # The last element fits if count - 1 strides fit behind the first: divided, since a product could wrap.
        wrong |= count - np.uint64(1) > (room - np.minimum(length, room)) // np.maximum(stride, np.uint64(1))
        if wrong.any():
            raise _error(f"the tables of {self.worker.label}", "every row to lie in its region", "a row that does not")
        start = _region_starts(self.worker)[self.table.region] + (address - base).astype(np.int64)
        return start, length.astype(np.int64), stride.astype(np.int64), count.astype(np.int64)

    def ranges(self, base: Ints, step: int, last: int, ordinal: Ints, terms: Ints) -> BlockRanges | None:
        """The descriptors with ids ``base + step * block id + terms``, for each position's block ordinal and term.

        ``None`` if an id of a block up to ``last`` is not in the row of block 0's.
        """
        ids = (base.astype(np.int64) + terms).reshape(-1)
        # The row of each id is the last that starts at or before it; `within` is the element of the row.
        row = np.searchsorted(self.table.first, ids, "right") - 1
        start, length, stride, count = (column[row] for column in self.rows())
        within = ids - self.table.first[row]
        if (row < 0).any() or (within + step * last >= count).any():
            return None
        return BlockRanges(ordinal, start + within * stride, length, step * stride)


@attrs.frozen(eq=False)
class PairTables:
    """The tables of a destination, first, and of one source, with the pairs of groups that say which ids there are."""

    sides: tuple[WorkerTable, WorkerTable]
    group_pairs: tuple[GroupPair, ...]

    def __str__(self) -> str:
        return f"the plan for {self.sides[0].worker.label} from {self.sides[1].worker.label}"


class _Proof:
    """The proof for one destination worker."""

    def __init__(self, worker: Worker, skipped: Sequence[str], complete: bool) -> None:
        self.worker, self.complete = worker, complete
        self.names = [name for name in worker.tensors if name not in skipped]
        views = [worker.views[worker.tensors[name][0]] for name in self.names]
        self.tensors = {view.name: (i, numbering(view)) for i, view in enumerate(views)}

    def of(self, pairs: Sequence[PairTables]) -> Iterator[tuple[int, int]]:
        """The bytes proved, and their parts, by group."""
        for group in self.worker.groups:
            ours = _pieces(self.worker, group, self.tensors)
            given = [(pair, groups) for pair in pairs for groups in pair.group_pairs if groups.groups[0] == group]
            slots, context = group.tokens_per_block or 1, group.context
            own = context.size * math.lcm(slots, context.interleave_tokens)
            period = math.lcm(own, *(groups.period for _, groups in given))
            moved: dict[str, list[Ints]] = {"runs": [], "ends": [], "all": []}
            for pair, groups in given:
                theirs = _pieces(pair.sides[1].worker, groups.groups[1], self.tensors)
                follow = partial(self.follow, pair, groups, sides=(ours, theirs), period=period)
                for runs in groups.runs:
                    moved["runs"].append(follow("runs", runs, runs.starts, partial(_of_listed_blocks, groups, runs)))
                for one in groups.tokens:
                    kind = "ends" if one.joined else "all"
                    moved[kind].append(follow(kind, one, one.carried, partial(_of_slots, one)))
            for kind in ("runs", "ends"):
                parts = np.concatenate([np.empty((4, 0), np.int64), *moved[kind], *moved["all"]], axis=1)
                self.check_filled(group, ours, parts, period // (context.size * slots))
            yield int(parts[3].sum()), parts.shape[1]

    def follow(
        self,
        pair: PairTables,
        groups: GroupPair,
        kind: str,
        ids: RunIds | TokenIds,
        starts: Ints,
        terms: TermsOf,
        sides: tuple[Pieces, Pieces],
        period: int,
    ) -> Ints:
        """What a series of ids moves in a period, (4, parts): piece, block ordinal, first byte, length. Checks rule K1.

        It moves bytes at the positions ``starts`` of every ``ids.every``.
        """
        bounds = np.array([-1, *starts, ids.every])
        if (bounds[1:] <= bounds[:-1]).any() or groups.period % ids.every:
            raise _error(pair, "ascending positions in a divisor of the period", "other positions")
        position = np.add.outer(np.arange(0, period, ids.every), starts).reshape(-1)
        if position.size * len(ids.base[0]) > MAX_PARTS:
            raise _error(pair, f"at most {MAX_PARTS} descriptors in {period} positions", "more", "RANGE")
        found = []
        for i, (side, group) in enumerate(zip(pair.sides, groups.groups, strict=True)):
            ordinal, slot = _block_and_slot(group, position)
            more = terms(i, ordinal, slot)
            last = groups.num_blocks[i] - 1
            ranges = None if more is None else side.ranges(ids.base[i], ids.step[i], last, ordinal, more)
            if ranges is None:
                raise _error(pair, "ids that stay in a row and follow the blocks", "ids that do not")
            found.append(ranges)
        ours, theirs = found
        if not np.array_equal(ours.length, theirs.length):
            raise _error(pair, "descriptors of equal lengths on both sides", "different lengths")
        # Split the destination's ranges at its pieces, then the same bytes at the pieces of the source.
        cut = sides[0].cut(ours.start, ours.length)
        again = cut and sides[1].cut(theirs.start[cut[0]] + cut[2] - ours.start[cut[0]], cut[3])
        if not cut or not again:
            where = "source" if cut else "destination"
            raise _error(pair, "descriptors of bytes that views hold", f"other bytes at the {where}")
        part, other, other_begin, size = again
        # By part: `of` is its descriptor, and `at` the position of that in the period.
        of, piece = cut[0][part], cut[1][part]
        begin, at = other_begin - theirs.start[of] + ours.start[of], of % position.size
        held_by = []
        for i, ranges, which, first in ((0, ours, piece, begin), (1, theirs, other, other_begin)):
            pieces, stride = sides[i], sides[i].block_stride[which]
            single, num_blocks = pieces.num_blocks[which] == 1, pieces.num_blocks[which].min()
            if not (single | (stride == ranges.step[of])).all() or groups.num_blocks[i] > num_blocks:
                raise _error(pair, "ids that follow the blocks of every view", "other ids")
            held = _positions(groups.groups[i], ranges.ordinal[at], pieces.slot[which])
            held_by.append((pieces.tensor[which], held, pieces.number[which] + first - pieces.start[which]))
        for what, mine, its in zip(("tensor", "position", "byte"), *held_by, strict=True):
            if (wrong := np.flatnonzero(mine != its)).size:
                name = self.names[held_by[0][0][wrong[0]]]
                raise _error(pair, f"{what} {mine[wrong[0]]} of {name}", f"{its[wrong[0]]}")
        _check_cuts(pair, groups, kind == "runs", position[at], held_by[0][1])
        return np.stack([piece, ours.ordinal[at], begin - sides[0].start[piece], size])

    def check_filled(self, group: Group, ours: Pieces, parts: Ints, blocks: int) -> None:
        """Raise ``PROOF`` unless the parts of a period fill every piece of its blocks once (rule K2)."""
        # By piece and block, then by first byte: a part that begins before the one before it ends overlaps it.
        piece, ordinal, begin, size = parts[:, np.lexsort(parts[2::-1])]
        target = piece * blocks + ordinal
        twice = target[1:][(target[1:] == target[:-1]) & (begin[:-1] + size[:-1] > begin[1:])]
        filled = np.bincount(target, size, ours.start.size * blocks)  # bytes by piece and block
        missing = np.flatnonzero(filled < np.repeat(ours.length, blocks)) if self.complete else twice[:0]
        for wrong, got in ((twice, "bytes moved twice"), (missing, "bytes not moved")):
            if wrong.size:
                at, block = divmod(int(wrong[0]), blocks)
                position = int(_positions(group, np.array(block), ours.slot[at]))
                what = f"every byte of {self.names[ours.tensor[at]]}, position {position}, once"
                raise _error(f"the plan for {self.worker.label}", what, got)


def _of_slots(one: TokenIds, side: int, ordinal: Ints, slot: Ints) -> Ints:
    """What the slots of positions add to ids."""
    return one.sub[side][slot]


def _of_listed_blocks(groups: GroupPair, runs: RunIds, side: int, ordinal: Ints, slot: Ints) -> Ints | None:
    """What listed blocks add to ids, for every period; ``None`` if they are not the blocks of the positions.

    ``ordinal`` has the true block ordinals of all starts, period after period.
    """
    group, listed = groups.groups[side], runs.blocks[side]
    size = runs.starts.size
    periods = ordinal.size // size
    after, _ = _block_and_slot(group, runs.starts + periods * runs.every)
    true = np.concatenate([ordinal, after])
    if (true.reshape(-1, size) != np.add.outer(np.arange(periods + 1) * listed.num_blocks, listed.ordinal)).any():
        return None
    if listed.step and (np.diff(true) != listed.step).any():
        return None
    return np.zeros(ordinal.size, np.int64) if listed.sub is None else np.tile(listed.sub, periods)


def _check_cuts(pair: PairTables, groups: GroupPair, joined: bool, start: Ints, position: Ints) -> None:
    """Rule K3, for descriptors that begin at positions ``start`` and have bytes of ``position``."""
    if not joined:
        if (start != position).any():
            raise _error(pair, "a token to be one position", "several")
        return
    low, high = np.array([(-1, -1), *groups.cuts], np.int64).T
    if (low >= high)[1:].any() or (high[:-1] > low[1:]).any() or high[-1] > groups.period:
        raise _error(pair, "cuts of one period that ascend and do not overlap", "other cuts")
    # `turn` is where the period of each descriptor begins; `cut` is the last cut that begins at or before it.
    turn = start - start % groups.period
    cut = np.searchsorted(low, start - turn, "right") - 1
    inside = (start < turn + high[cut]) & (turn + low[cut] <= position) & (position < turn + high[cut])
    if not inside.all():
        raise _error(pair, "every run to stay inside a cut", "a run that does not")


def _error(what: object, expected: str, got: str, code: str = "PROOF") -> KVPlanError:
    return KVPlanError(code, f"certify {what}", expected=expected, got=got)
