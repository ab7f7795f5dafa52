"""Certificates: a proof, from a plan's tables alone, that every request it can bind moves the right bytes.

A request's ids are ``base + step * block id + sub``, whatever its blocks are, and repeat after a period of positions.
So it is enough to follow every descriptor of one period, block ids left open. Nothing here knows how tables are made.

- K1: a descriptor is cut at the pieces of both sides (:mod:`kvplan.verification.pieces`). Every part lies in a piece on
  both sides, of the same tensor, position and number.
- K2: the parts of a period fill every piece of the destination in each of its blocks, once: with the runs, and once
  more with what moves token by token in their place at the ends of a range.
- K3: a run stays inside one of the cuts, which bind keeps away from the ends of a range; a token is one position.
- K4: from block to block an id moves by the block's stride; the ids of all blocks stay in their row, and rows in their
  region.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from kvplan.describe.views import Group
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.verification.jobs import plans_of
from kvplan.verification.pieces import Ints, Pieces, numbering, pieces, regions_in_a_row

if TYPE_CHECKING:
    from kvplan.plan.mesh import MeshPlan
    from kvplan.plan.rows import GroupPair, RunIds, Table, TokenIds
    from kvplan.plan.transfer import TransferPlan

MAX_PARTS: Final = 1 << 25
"""A certificate follows no more descriptors of one family and period than this."""


@attrs.frozen
class Certificate:
    """What was proved: of ``num_bytes`` bytes, all of a period of positions, every one arrives where it belongs, once.

    ``num_parts`` is in how many parts they were checked. Where ``complete`` is false, some writers of an engine are
    not among the plans, and what they write is missing.
    """

    num_bytes: int
    num_parts: int
    complete: bool


def certify(plan: TransferPlan | MeshPlan | Iterable[TransferPlan]) -> Certificate:
    """The proof that every request bound to a plan, or to plans that belong together, moves the right bytes.

    It takes some time, like planning itself, and none at all in ``bind``. One writer's plan proves its own share; those
    of all writers, or a mesh, also that no byte is left out.

    >>> from kvplan import Model, certify, plan_reads
    >>> decode, prefill = (Model.shipped("qwen2.5-1.5b").engine(name, tp=2, num_blocks=9) for name in "dp")
    >>> certify(plan_reads(decode[0], prefill))
    Certificate(num_bytes=229376, num_parts=448, complete=True)

    Raises ``PROOF`` where a plan moves wrong bytes, and ``RANGE`` where it is too large to follow.
    """
    given = plans_of(plan)
    writers = {plan.local.key for plan in given}
    destinations: dict[Key, tuple[Worker, TransferPlan]] = {}
    shares: dict[Key, list[Share]] = {}
    for plan in given:
        reads = plan.operation == "READ"
        for worker in (plan.local,) if reads else plan.remotes:
            destinations[worker.key] = worker, plan
        for remote, pair in zip(plan.remotes, plan.pairs, strict=True):
            near, far = Side(plan.local, pair.local_table), Side(remote, pair.remote_table)
            share = Share((near, far) if reads else (far, near), pair.layouts)
            shares.setdefault(share.sides[0].worker.key, []).append(share)
    complete = all(plan.operation == "READ" or {other.key for other in plan.siblings} <= writers for plan in given)
    num_bytes = num_parts = 0
    for at, (worker, plan) in destinations.items():
        for found in _Proof(worker, plan.not_transferred, complete).of(shares.get(at, ())):
            num_bytes += found[0]
            num_parts += found[1]
    return Certificate(num_bytes, num_parts, complete)


def _slots(group: Group) -> int:
    return group.tokens_per_block or 1


def _stand(group: Group, position: Ints) -> tuple[Ints, Ints]:
    """The ordinal of the block, and the slot, of positions that the group's context holds."""
    run, turn = group.context.interleave_tokens, group.context.size * group.context.interleave_tokens
    ordinal, slot = np.divmod(position // turn * run + position % run, _slots(group))
    return ordinal, slot


def _position(group: Group, ordinal: Ints, slot: Ints) -> Ints:
    """The position that stands in a slot of a block."""
    run, local = group.context.interleave_tokens, ordinal * _slots(group) + slot
    return (local // run * group.context.size + group.context.rank) * run + local % run


@attrs.frozen(eq=False)
class Ends:
    """One side of some descriptors: the ordinals of their blocks by position, and by strand and position the rest.

    ``start`` is that of the descriptor in block 0; ``step`` is by how much it grows from block to block.
    """

    ordinal: Ints
    start: Ints
    length: Ints
    step: Ints


@attrs.frozen(eq=False)
class Side:
    """A worker and its table."""

    worker: Worker
    table: Table

    def rows(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Start, length, stride and count of each row, after making sure that it lies in its region (rule K4)."""
        address, length, device, stride, count = self.table.rows.T
        fields = [(region.address, region.size_bytes, region.device_id) for region in self.worker.regions]
        base, size, on = np.array(fields, np.uint64).T[:, self.table.region]
        room = size - np.minimum(address - base, size)
        wrong = (address < base) | (device != on) | (length > room)
        # Whether the last element fits is asked without a product, which could wrap.
        wrong |= count - np.uint64(1) > (room - np.minimum(length, room)) // np.maximum(stride, np.uint64(1))
        if wrong.any():
            raise _error(f"the tables of {self.worker.label}", "every row to lie in its region", "others")
        start = regions_in_a_row(self.worker)[self.table.region] + (address - base).astype(np.int64)
        return start, length.astype(np.int64), stride.astype(np.int64), count.astype(np.int64)

    def ends(self, pair: GroupPair, ids: RunIds | TokenIds, side: int, position: Ints) -> Ends | None:
        """The descriptors of a series at some positions; ``None`` where ids leave their row or do not follow blocks."""
        group, step, last = pair.groups[side], ids.step[side], pair.num_blocks[side] - 1
        ordinal, slot = _stand(group, position)
        runs = getattr(ids, "blocks", None)
        if runs is None:
            more = ids.sub[side][slot]
        else:
            # What is listed of a period must be what the positions say, in every period and in the next one.
            listed, periods = runs[side], np.arange(position.size // len(ids.starts) + 1)
            block, _ = _stand(group, np.add.outer(periods * ids.every, ids.starts))
            if (block != np.add.outer(periods * listed.num_blocks, listed.ordinal)).any() or (
                listed.step and (np.diff(block.reshape(-1)) != listed.step).any()
            ):
                return None
            more = 0 if listed.sub is None else np.tile(listed.sub, len(periods) - 1)
        found = (ids.base[side].astype(np.int64) + more + 0 * ordinal).reshape(-1)
        row = np.searchsorted(self.table.first, found, "right") - 1
        start, length, stride, count = (column[row] for column in self.rows())
        within = found - self.table.first[row]
        if (row < 0).any() or (within + step * last >= count).any():
            return None
        return Ends(ordinal, start + within * stride, length, step * stride)


@attrs.frozen(eq=False)
class Share:
    """What one source brings to a destination, whose side is the first, and how ids are found."""

    sides: tuple[Side, Side]
    layouts: tuple[GroupPair, ...]

    def __str__(self) -> str:
        return f"the plan for {self.sides[0].worker.label} from {self.sides[1].worker.label}"


class _Proof:
    """The proof for one destination worker."""

    def __init__(self, worker: Worker, skipped: Sequence[str], complete: bool) -> None:
        self.worker, self.complete = worker, complete
        self.names = [name for name in worker.tensors if name not in skipped]
        first = [worker.geometries[worker.geometry_of[worker.tensors[name][0]]] for name in self.names]
        self.tensors = {name: (i, numbering(first[i])) for i, name in enumerate(self.names)}

    def of(self, shares: Sequence[Share]) -> Iterable[tuple[int, int]]:
        """For each group, how many bytes were proved, in how many parts."""
        for group in self.worker.groups:
            ours = pieces(self.worker, group, self.tensors)
            given = [(share, layout) for share in shares for layout in share.layouts if layout.groups[0] == group]
            own = group.context.size * math.lcm(_slots(group), group.context.interleave_tokens)
            period = math.lcm(own, *(layout.period for _, layout in given))
            blocks = period // (group.context.size * _slots(group))
            moved: dict[str, list[Ints]] = {"runs": [], "ends": [], "all": []}
            for share, layout in given:
                theirs = pieces(share.sides[1].worker, layout.groups[1], self.tensors)
                for ids in (*layout.runs, *layout.tokens):
                    kind = "runs" if hasattr(ids, "blocks") else "ends" if ids.joined else "all"
                    moved[kind].append(self.follow(share, layout, ids, (ours, theirs), period))
            for kind in ("runs", "ends"):
                parts = np.concatenate([np.empty((4, 0), np.int64), *moved[kind], *moved["all"]], axis=1)
                self.fill(group, ours, parts, blocks)
            yield int(parts[3].sum()), parts.shape[1]

    def follow(
        self, share: Share, layout: GroupPair, ids: RunIds | TokenIds, sides: tuple[Pieces, Pieces], period: int
    ) -> Ints:
        """All that a family moves in a period, (4, parts): the piece, its block's ordinal, where in it, how long."""
        first = ids.starts if hasattr(ids, "blocks") else ids.carried
        starts = np.array([-1, *first, ids.every])
        if (starts[1:] <= starts[:-1]).any() or layout.period % ids.every:
            raise _error(share, "ascending positions of a period's divisor", f"{starts[1:-1]} of {ids.every}")
        position = np.add.outer(np.arange(0, period, ids.every), first).reshape(-1)
        if position.size * len(ids.base[0]) > MAX_PARTS:
            raise _error(share, f"at most {MAX_PARTS} descriptors in {period} positions", "more", "RANGE")
        ours, theirs = (side.ends(layout, ids, i, position) for i, side in enumerate(share.sides))
        if ours is None or theirs is None:
            raise _error(share, "ids that stay in a row and follow the blocks", "others")
        if not np.array_equal(ours.length, theirs.length):
            raise _error(share, "descriptors of equal lengths on both sides", "others")
        cut = sides[0].cut(ours.start, ours.length)
        again = cut and sides[1].cut(theirs.start[cut[0]] + cut[2] - ours.start[cut[0]], cut[3])
        if not cut or not again:
            raise _error(share, "descriptors of what views hold", f"others at the {'source' if cut else 'destination'}")
        part, other, other_begin, size = again
        of, piece = cut[0][part], cut[1][part]
        begin = other_begin - theirs.start[of] + ours.start[of]
        turn = of % position.size
        there = []
        for i, (side, at, low, end) in enumerate(
            ((sides[0], piece, begin, ours), (sides[1], other, other_begin, theirs))
        ):
            where = _position(layout.groups[i], end.ordinal[turn], side.slot[at])
            there.append((side.tensor[at], where, side.number[at] + low - side.start[at]))
            alone = side.num_blocks[at] == 1
            if (
                not (alone | (side.block_stride[at] == end.step[of])).all()
                or layout.num_blocks[i] > side.num_blocks[at].min()
            ):
                raise _error(share, "ids that follow the blocks of every view", "others")
        for what, mine, its in zip(("tensor", "position", "byte"), *there, strict=True):
            if (wrong := np.flatnonzero(mine != its)).size:
                name = self.names[there[0][0][wrong[0]]]
                raise _error(share, f"{what} {mine[wrong[0]]} of {name}", f"{its[wrong[0]]}")
        _check_cuts(share, layout, hasattr(ids, "blocks"), position[turn], there[0][1])
        return np.stack([piece, ours.ordinal[turn], begin - sides[0].start[piece], size])

    def fill(self, group: Group, ours: Pieces, parts: Ints, blocks: int) -> None:
        """Rule K2 for the parts of a period."""
        piece, ordinal, begin, size = parts[:, np.lexsort(parts[2::-1])]
        cell = piece * blocks + ordinal
        over = cell[1:][(cell[1:] == cell[:-1]) & (begin[:-1] + size[:-1] > begin[1:])]
        filled = np.bincount(cell, size, ours.start.size * blocks)
        short = np.flatnonzero(filled < np.repeat(ours.length, blocks)) if self.complete else over[:0]
        for wrong, got in ((over, "some twice"), (short, "not all")):
            if wrong.size:
                at, where = divmod(int(wrong[0]), blocks)
                name = self.names[ours.tensor[at]]
                position = int(_position(group, np.array(where), ours.slot[at]))
                raise _error(
                    f"the plan for {self.worker.label}", f"every byte of {name}, position {position}, once", got
                )


def _check_cuts(share: Share, layout: GroupPair, joined: bool, start: Ints, position: Ints) -> None:
    """Rule K3, for what begins at positions ``start`` and has bytes of ``position``."""
    if not joined:
        if (start != position).any():
            raise _error(share, "a token to be one position", "several")
        return
    low, high = np.array([(-1, -1), *layout.cuts], np.int64).T
    if (low >= high)[1:].any() or (high[:-1] > low[1:]).any() or high[-1] > layout.period:
        raise _error(share, "a cut after the other, in one period", "others")
    turn = start - start % layout.period
    cut = np.searchsorted(low, start - turn, "right") - 1
    inside = (start < turn + high[cut]) & (turn + low[cut] <= position) & (position < turn + high[cut])
    if not inside.all():
        raise _error(share, "every run to stay inside a cut", "others")


def _error(what: object, expected: str, got: str, code: str = "PROOF") -> KVPlanError:
    return KVPlanError(code, f"certify {what}", expected=expected, got=got)
