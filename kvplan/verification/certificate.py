"""Certificates: a proof, from what a plan gives to bind and to NIXL, that every request moves the right bytes.

NIXL is given the rows of both tables and pairs of ids. The ids of a request are ``base + step * block id + sub``
whatever its blocks are, and repeat after a period of positions. So it is enough to follow every descriptor of one
period, with block ids left open. Nothing here knows how tables are made.

- K1: A plan has the form that bind relies on: one pair for each remote worker, under its name; tables that number the
  elements of rows in the regions of its workers; series that repeat within the period of their groups, in ascending
  order, with the blocks of these positions; cuts that ascend.
- K2: The ids of all blocks of the pool stay in their row, and advance from block to block by the stride of the blocks.
- K3: A descriptor is split at the pieces of both sides (:mod:`kvplan.verification.labels`). Every part lies in one
  piece on each side, of the same tensor, position and number.
- K4: A run stays inside one cut, and a token is one position. What runs move, the tokens at the ends of a range move in
  their place.
- K5: A period fills every piece of the destination once, in each of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints, heads, listed
from kvplan._checks import ID_END
from kvplan.describe.views import TOKEN, Geometry, Group, View
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.verification.labels import Weights, local_slots, numbering, pieces_of_slot, positions_of, slots_of_block
from kvplan.verification.requests import plans_of
from kvplan.verification.tables import (
    BYTES_END,
    PairTables,
    pairs_of,
    period_of,
    refusal,
    region_starts,
    slots_of,
)

if TYPE_CHECKING:
    from kvplan.plan.mesh import MeshPlan
    from kvplan.plan.rows import GroupPair, PeriodBlocks, RunIds
    from kvplan.plan.transfer import TransferPlan

MAX_PARTS: Final = 1 << 25
"""A certificate follows at most this many descriptors and parts of them for each destination."""


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

    Raises ``PROOF`` if a plan moves wrong bytes, and ``RANGE`` if it is too large to follow. ``details`` of a wrong
    byte have the ``tensor``, and the ``region`` and ``row`` of its descriptor on both sides.
    """
    given = plans_of(plan)
    writers = {plan.local.key for plan in given if plan.operation == "WRITE"}
    destinations: dict[Key, tuple[str, ...]] = {}
    pairs: dict[Key, list[PairTables]] = {}
    workers: dict[Key, Worker] = {}
    for plan in given:
        reads = plan.operation == "READ"
        for worker in (plan.local, *plan.remotes):
            # A writer may describe its staging buffer differently for each peer: in the same regions.
            known, writes = workers.setdefault(worker.key, worker), worker is plan.local and not reads
            if known.regions != worker.regions or (known != worker and not writes):
                raise refusal(f"plans with {worker.label}", "one description of the worker", "two")
        for worker in (plan.local,) if reads else plan.remotes:
            skipped = destinations.setdefault(worker.key, plan.not_transferred)
            if {*skipped} != {*plan.not_transferred}:
                raise refusal(f"plans for {worker.label}", f"not_transferred {skipped}", f"{plan.not_transferred}")
        for pair in pairs_of(plan):
            pairs.setdefault(pair.sides[0].worker.key, []).append(pair)
    complete = all(plan.operation == "READ" or {other.key for other in plan.siblings} <= writers for plan in given)
    num_bytes = num_parts = 0
    for key, skipped in destinations.items():
        for proved in _Proof(workers[key], skipped, complete).of(pairs.get(key, ())):
            num_bytes += proved[0]
            num_parts += proved[1]
    return Certificate(num_bytes, num_parts, complete)


def _positions(group: Group, ordinal: Ints, slot: Ints) -> Ints:
    """The position in each slot of blocks."""
    return positions_of(group, ordinal * slots_of(group) + slot)


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

        ``None`` if some byte of a range is in no piece. Raises ``RANGE`` for too many parts.
        """
        # Range i overlaps the pieces [low[i], high[i]); they follow each other in the arrays.
        low = np.searchsorted(self.start, start, "right") - 1
        high = np.searchsorted(self.start, start + length, "left")
        if (low < 0).any():
            return None
        number = high - low
        _check_limit("parts of descriptors", int(number.sum()))
        of = np.repeat(np.arange(start.size), number)
        piece = listed(np.stack([low, high], axis=1))
        begin = np.maximum(start[of], self.start[piece])
        size = np.minimum((start + length)[of], (self.start + self.length)[piece]) - begin
        if (size <= 0).any() or size.sum() != length.sum():
            return None
        return of, piece, begin, size


def _elements(view: View | Geometry) -> tuple[object, ...]:
    """What all views of a tensor have in common: the dtype, and the axes but for the token axis and those of size 1."""
    return view.dtype, sorted((name, size) for name, size in view.sizes.items() if size > 1 and name != TOKEN)


def _pieces(worker: Worker, group: Group, tensors: Mapping[str, tuple[int, View, Weights]]) -> Pieces:
    """The pieces that a worker has of ``tensors``, each given with its index, one view and its weights, in a group."""
    # Views of one geometry and one numbering have the same pieces at different offsets.
    equal: dict[tuple[int, Weights], list[int]] = {}
    for view, geometry in enumerate(worker.geometry_of):
        found = tensors.get(worker.views[view].name)
        if found and worker.geometries[geometry].group == group:
            equal.setdefault((geometry, found[2]), []).append(view)
    base, columns = region_starts(worker), [np.empty((7, 0), np.int64)]
    for (geometry, weights), views in equal.items():
        of = worker.geometries[geometry]
        for name in dict.fromkeys(worker.views[view].name for view in views):
            if _elements(of) != _elements(tensors[name][1]):
                raise refusal(f"{name} of {worker.label}", f"{_elements(tensors[name][1])}", f"{_elements(of)}")
        offset, number, length = pieces_of_slot(of, weights)
        _check_limit(f"pieces of {worker.label}", slots_of(group) * offset.size * len(views))
        slots = slots_of_block(of)
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
    """One side of some descriptors: block ordinals by position; by run and position the row, and the range in block 0.

    ``start`` advances by ``step`` from block to block.
    """

    ordinal: Ints
    row: Ints
    start: Ints
    length: Ints
    step: Ints


class _Proof:
    """The proof for one destination worker."""

    def __init__(self, worker: Worker, skipped: Sequence[str], complete: bool) -> None:
        self.worker, self.complete = worker, complete
        self.names = [name for name in worker.tensors if name not in skipped]
        views = [worker.views[worker.tensors[name][0]] for name in self.names]
        self.tensors = {view.name: (i, view, numbering(view)) for i, view in enumerate(views)}
        self.number = 0  # of descriptors followed so far, and of their parts

    def of(self, pairs: Sequence[PairTables]) -> Iterator[tuple[int, int]]:
        """The bytes proved, and their parts, by group."""
        for group in self.worker.groups:
            ours = _pieces(self.worker, group, self.tensors)
            given = [(pair, groups) for pair in pairs for groups in pair.group_pairs if groups.groups[0] == group]
            period = math.lcm(period_of(group), *(groups.period for _, groups in given))
            moved = [np.empty((4, 0), np.int64)]
            for pair, groups in given:
                theirs = _pieces(pair.sides[1].worker, groups.groups[1], self.tensors)
                follow = partial(self.follow, pair, groups, (ours, theirs), period)
                runs = [follow(one, one.starts) for one in groups.runs]
                tokens = [follow(one, one.carried) for one in groups.tokens]
                instead = [parts for one, parts in zip(groups.tokens, tokens, strict=True) if one.joined]
                if not np.array_equal(self.filled(group, ours, runs), self.filled(group, ours, instead)):
                    raise refusal(pair, "tokens that move what runs move, at the ends of a range", "other bytes")
                moved += tokens
            self.check_whole(
                group, ours, self.filled(group, ours, moved), period // (group.context.size * slots_of(group))
            )
            yield sum(int(parts[3].sum()) for parts in moved), sum(parts.shape[1] for parts in moved)

    def follow(
        self, pair: PairTables, groups: GroupPair, pieces: tuple[Pieces, Pieces], period: int, ids: Any, starts: Ints
    ) -> Ints:
        """What a series of ids moves in a period, (4, parts): piece, block ordinal, first byte, length (K3)."""
        self.count(f"{pair}, {period} positions", period // ids.every * starts.size * ids.base.shape[1])
        position = np.add.outer(np.arange(0, period, ids.every), starts).reshape(-1)
        ours, theirs = (_ranges(pair, groups, ids, i, position) for i in (0, 1))
        if (unequal := np.flatnonzero(ours.length != theirs.length)).size:
            at = unequal[0]
            details = _places(pair, ours.row[at], theirs.row[at])
            got = f"{theirs.length[at]} at the source"
            raise refusal(pair, f"descriptors of equal lengths, {ours.length[at]} bytes", got, **details)
        # Split the destination's ranges at its pieces, then the same bytes at the pieces of the source.
        cut = pieces[0].cut(ours.start, ours.length)
        again = cut and pieces[1].cut(theirs.start[cut[0]] + cut[2] - ours.start[cut[0]], cut[3])
        if not cut or not again:
            where = "source" if cut else "destination"
            raise refusal(pair, "descriptors of bytes that views hold", f"other bytes at the {where}")
        part, other, other_begin, size = again
        self.count("parts of descriptors", size.size)
        # By part: `of` is its descriptor, and `at` the position of that in the period.
        of, piece = cut[0][part], cut[1][part]
        begin, at = other_begin - theirs.start[of] + ours.start[of], of % position.size
        held_by = []
        for i, ranges, which, first in ((0, ours, piece, begin), (1, theirs, other, other_begin)):
            side, step = pieces[i], ranges.step[of]
            # Only block 0 has these ids if the pool has one block.
            behind = (side.block_stride[which] != step) & (groups.num_blocks[i] > 1)
            if behind.any() or groups.num_blocks[i] > side.num_blocks[which].min():
                raise refusal(pair, "ids that follow the blocks of every view", "other ids")
            held = _positions(groups.groups[i], ranges.ordinal[at], side.slot[which])
            held_by.append((side.tensor[which], held, side.number[which] + first - side.start[which]))
        for what, mine, its in zip(("tensor", "position", "byte"), *held_by, strict=True):
            if (wrong := np.flatnonzero(mine != its)).size:
                n = wrong[0]
                name, values = self.names[held_by[0][0][n]], (int(mine[n]), int(its[n]))
                named = [self.names[value] for value in values] if what == "tensor" else values
                details = _places(pair, ours.row[of[n]], theirs.row[of[n]]) | {"tensor": name, what: tuple(named)}
                raise refusal(pair, f"{what} {named[0]} of {name}", f"{named[1]}", **details)
        _check_spans(pair, groups, hasattr(ids, "blocks"), position[at], held_by[0][1])
        return np.stack([piece, ours.ordinal[at], begin - pieces[0].start[piece], size])

    def count(self, what: str, number: int) -> None:
        """Add to what was followed so far; its sum has a limit too."""
        self.number += number
        _check_limit(what, self.number)

    def filled(self, group: Group, ours: Pieces, parts: Sequence[Ints]) -> Ints:
        """The parts by piece, block ordinal and first byte, joined where they continue each other; none twice (K5)."""
        every = np.concatenate([np.empty((4, 0), np.int64), *parts], axis=1)
        if not every.size:
            return every
        every = every[:, np.lexsort(every[2::-1])]
        end = every[2] + every[3]
        same = (every[:2, 1:] == every[:2, :-1]).all(0)
        if (again := np.flatnonzero(same & (every[2, 1:] < end[:-1]))).size:
            piece, ordinal = every[:2, again[0] + 1].tolist()
            raise self.wrong(group, ours, piece, ordinal, "bytes moved twice")
        first = heads(same & (every[2, 1:] == end[:-1]))
        joined = every[:, first]
        joined[3] = np.add.reduceat(every[3], first)
        return joined

    def check_whole(self, group: Group, ours: Pieces, filled: Ints, blocks: int) -> None:
        """Raise ``PROOF`` unless every piece of the blocks of a period is filled (K5), if all writers are known."""
        piece, ordinal, _, size = filled
        whole = (piece * blocks + ordinal)[size == ours.length[piece]]
        if self.complete and whole.size < ours.start.size * blocks:
            # Whole pieces ascend: the first that is missing is where they are no longer 0, 1, 2, ...
            missing = int(np.append(whole != np.arange(whole.size), True).argmax())
            raise self.wrong(group, ours, *divmod(missing, blocks), "bytes not moved")

    def wrong(self, group: Group, ours: Pieces, piece: int, ordinal: int, got: str) -> KVPlanError:
        """The error for a piece of a block that is not filled once."""
        name = self.names[ours.tensor[piece]]
        position = int(_positions(group, np.array(ordinal), ours.slot[piece]))
        region = self.worker.regions[np.searchsorted(region_starts(self.worker), ours.start[piece], "right") - 1].name
        details: dict[str, Any] = {"tensor": name, "position": position, "region": region}
        what = f"the plan for {self.worker.label}"
        return refusal(what, f"every byte of {name}, position {position}, once", got, **details)


def _ranges(pair: PairTables, groups: GroupPair, ids: Any, i: int, position: Ints) -> BlockRanges:
    """The descriptors of one side at each position. Raises ``PROOF`` for an id outside the row of its series (K2)."""
    side, group, last, step = pair.sides[i], groups.groups[i], groups.num_blocks[i] - 1, ids.step[i]
    ordinal, slot = np.divmod(local_slots(group, position), slots_of(group))
    more = _terms_of_blocks(pair, group, ids, ids.blocks[i], ordinal) if hasattr(ids, "blocks") else ids.sub[i][slot]
    number = (ids.base[i].astype(np.int64) + more).reshape(-1)
    # The row of each id is the last that begins at or before it; `within` is the element of the row.
    row = np.searchsorted(side.first, number, "right") - 1
    within = number - side.first[row]
    end = min(int(side.count.sum()), ID_END if ids.base.dtype == np.int32 else BYTES_END)
    wrong = (row < 0) | (step * last >= np.minimum(side.count[row], end - side.first[row]) - within)
    if wrong.any():
        at = wrong.argmax()
        expected = f"ids of {last + 1} blocks that stay in row {row[at]} of {side.worker.label}"
        details: dict[str, Any] = {"row": int(row[at]), "id": int(number[at]), "step": step}
        raise refusal(pair, expected, f"{number[at]} and every {step} from there", **details)
    return BlockRanges(
        ordinal, row, side.start[row] + within * side.stride[row], side.length[row], step * side.stride[row]
    )


def _terms_of_blocks(pair: PairTables, group: Group, runs: RunIds, listed: PeriodBlocks, ordinal: Ints) -> Ints:
    """What the listed blocks add to ids, for every period; they must be those of the positions (K1).

    ``ordinal`` has the true block ordinals of all starts, period after period.
    """
    size = runs.starts.size
    periods = ordinal.size // size
    after = local_slots(group, runs.starts + periods * runs.every) // slots_of(group)
    true = np.concatenate([ordinal, after])
    expected = np.add.outer(np.arange(periods + 1) * listed.num_blocks, listed.ordinal).reshape(-1)
    if (true != expected).any() or (listed.step and (np.diff(true) != listed.step).any()):
        raise refusal(pair, f"blocks {true[:size].tolist()} of group {group.name!r}", f"{listed.ordinal.tolist()}")
    return np.zeros(ordinal.size, np.int64) if listed.sub is None else np.tile(listed.sub, periods)


def _check_spans(pair: PairTables, groups: GroupPair, joined: bool, start: Ints, position: Ints) -> None:
    """Rule K4, for descriptors that begin at positions ``start`` and have bytes of ``position``."""
    if not joined:
        if (start != position).any():
            raise refusal(pair, "a token to be one position", "several")
        return
    low, high = np.array([(-1, -1), *groups.cuts], np.int64).T
    # `turn` is where the period of each descriptor begins; `cut` is the last cut that begins at or before it.
    turn = start - start % groups.period
    cut = np.searchsorted(low, start - turn, "right") - 1
    inside = (start < turn + high[cut]) & (turn + low[cut] <= position) & (position < turn + high[cut])
    if not inside.all():
        raise refusal(pair, "every run to stay inside a cut", "a run that does not")


def _places(pair: PairTables, *rows: int, **details: Any) -> dict[str, Any]:
    """Details of an error: beside others, the row of a descriptor on both sides, and its region."""
    names = [side.worker.regions[side.region[row]].name for side, row in zip(pair.sides, rows, strict=True)]
    return {"row": tuple(map(int, rows)), "region": tuple(names), **details}


def _check_limit(what: str, number: int) -> None:
    if number > MAX_PARTS:
        raise refusal(what, f"at most {MAX_PARTS} parts to follow", f"{number}", "RANGE", number=number)
