"""Certificates: proofs that every request of a plan moves the right bytes.

A proof uses what a plan gives to bind and to NIXL: the rows of both tables and pairs of ids. The
ids of a request are ``base + step * block id + slot term`` whatever its blocks are, and repeat
after a period of positions. So it is enough to prove one period, with block ids left open. Nothing
here knows how tables are made.

Blocks of 255 and 256 tokens repeat after 65,280 positions. Not all of them have to be followed:

- Where a single token goes depends on its slot in a block of the destination, and repeats after 255
  positions; where it comes from repeats after 256. Two sequences with the periods s and t that
  agree in s + t - gcd(s, t) places agree everywhere (Fine and Wilf, 1965): 510 positions prove all.
- 510 runs begin in a period. Where both sides repeat themselves from token to token, and by the
  same number of bytes, a run is right if its first token is.
- What is written are rectangles: some bytes of a slot, in consecutive slots.

- verify.K1: A plan has the form that bind relies on: one pair for each remote worker, under
  its name; tables that number the elements of rows in the regions of its workers; series that
  repeat within the period of their groups, in ascending order, with the blocks of these positions;
  spans that ascend.
- verify.K2: The ids of all blocks of the pool stay in their row, and advance from block to
  block by the stride of the blocks. The pool is the smallest one of the views that bytes move
  between, so that bind refuses no block that all of them have. All ids fit 31 bits.
- verify.K3: A descriptor is split at the segments of both sides
  (:mod:`kvplan.verification.labels`). Every *fragment* lies in one segment on each side, of the
  same tensor, position and number.
- verify.K4: A run stays inside one span, and a token is one position. At the ends of a range,
  single tokens move exactly the bytes that the runs there would.
- verify.K5: A period fills every byte of each slot of the destination once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import attrs
import numpy as np

from kvplan._checks import ID_END, at_most
from kvplan._text import brief_repr
from kvplan.describe.views import TOKEN, Geometry, Group, View
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.verification.labels import (
    Weights,
    interleave_of,
    local_slots,
    num_segments_of_slot,
    numbering,
    positions_of,
    segments_of_slot,
    slots_of,
    slots_of_block,
)
from kvplan.verification.requests import KeyPair, plans_of
from kvplan.verification.tables import (
    PairTables,
    pairs_of,
    period_of,
    refusal,
    region_starts,
)

if TYPE_CHECKING:
    from kvplan._arrays import Ints
    from kvplan.plan.mesh import MeshPlan
    from kvplan.plan.series import GroupPair, RunSeries, TokenSeries
    from kvplan.plan.transfer import TransferPlan

MAX_FOLLOWED: Final = 1 << 22
"""The most descriptors and segments of a period that are followed, for each plan: about 0.8 GB."""

SIDES: Final = (0, 1)
"""The destination and the source: indices into all that has one value for each side."""


@attrs.frozen
class Certificate:
    """A proof that every byte of a request arrives where it belongs, once.

    ``num_bytes`` are written before the slots of the destination repeat. ``num_fragments`` are the
    contiguous ranges in which they were checked. ``complete`` is false if some writers of an engine
    are not among the plans, so that what they write is missing.
    """

    num_bytes: int
    num_fragments: int
    complete: bool

    __repr__ = brief_repr


def certify(plan: TransferPlan | MeshPlan | Iterable[TransferPlan]) -> Certificate:
    """Prove that every request of a plan, or of plans that belong together, moves the right bytes.

    It takes some time once, like planning, and none in ``bind``: time and memory grow with the sum
    of both block sizes, and with context parallelism with the positions after which the blocks of a
    rank repeat. The plan of one writer proves what it writes; the plans of all writers, or a mesh,
    also prove that no byte is missing.

    >>> from kvplan import Model, certify, plan_reads
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> decode, prefill = (model.engine(name, tp=2, num_blocks=9) for name in "dp")
    >>> certify(plan_reads(decode[0], prefill))
    Certificate(num_bytes=229376, num_fragments=448, complete=True)

    Raises ``PROOF`` if a plan moves wrong bytes or refuses blocks that it should move, ``INT`` if
    its ids do not fit 31 bits for all blocks, and ``RANGE`` if it is too large to follow.
    ``details`` of a wrong byte have the ``tensor``, and the ``region`` and ``row`` of its
    descriptor on both sides.
    """
    plans = plans_of(plan)
    workers: dict[Key, Worker] = {}
    writers: dict[KeyPair, Worker] = {}  # by their own key and that of a destination
    skipped: dict[Key, tuple[str, ...]] = {}  # the tensors that are not transferred, by destination
    pairs: dict[Key, list[PairTables]] = {}  # by destination
    for checked in plans:
        _add_workers(workers, checked)
        _add_writer(writers, checked)
        _add_skipped(skipped, checked)
        for pair in pairs_of(checked):
            pairs.setdefault(pair.sides[0].worker.key, []).append(pair)
    complete = _have_all_writers(plans)
    proofs = {key: _Proof(workers[key], names, complete) for key, names in skipped.items()}
    num_followed = sum(proof.num_followed(pairs.get(key, ())) for key, proof in proofs.items())
    limit = MAX_FOLLOWED * max(len(plans), 1)
    at_most(limit, num_followed, "descriptors and segments of a period", "certify a plan")
    num_bytes = 0
    num_fragments = 0
    for key, proof in proofs.items():
        for group in proof.worker.groups:
            written, followed = proof.follow_group(pairs.get(key, ()), group)
            num_bytes += written
            num_fragments += followed
    return Certificate(num_bytes, num_fragments, complete)


def _add_workers(workers: dict[Key, Worker], plan: TransferPlan) -> None:
    """Add the workers of a plan. Raises ``PROOF`` if another plan describes one differently."""
    for worker in (plan.local, *plan.remotes):
        described = workers.setdefault(worker.key, worker)
        # A writer may describe its staging buffer differently for each peer: in the same regions.
        writes = worker is plan.local and plan.operation != "READ"
        if described.regions != worker.regions or (described != worker and not writes):
            raise refusal(f"plans with {worker.label}", "one description of the worker", "two")


def _add_writer(writers: dict[KeyPair, Worker], plan: TransferPlan) -> None:
    """Add the writer of a plan, for each peer. Raises ``PROOF`` if it is two writers for one."""
    if plan.operation == "READ":
        return
    for worker in plan.remotes:
        described = writers.setdefault((plan.local.key, worker.key), plan.local)
        if described != plan.local:
            subject = f"plans of {plan.local.label} for {worker.label}"
            raise refusal(subject, "one description of the writer", "two")


def _add_skipped(skipped: dict[Key, tuple[str, ...]], plan: TransferPlan) -> None:
    """Add the destinations of a plan. Raises ``PROOF`` if another plan skips other tensors."""
    for worker in (plan.local,) if plan.operation == "READ" else plan.remotes:
        names = skipped.setdefault(worker.key, plan.not_transferred)
        if {*names} != {*plan.not_transferred}:
            got = f"{plan.not_transferred}"
            raise refusal(f"plans for {worker.label}", f"not_transferred {names}", got)


def _have_all_writers(plans: Iterable[TransferPlan]) -> bool:
    """Return whether every writer that a plan names as a sibling has a plan too."""
    writing = [plan for plan in plans if plan.operation == "WRITE"]
    writers = {plan.local.key for plan in writing}
    return all(worker.key in writers for plan in writing for worker in plan.siblings)


class Fragments(NamedTuple):
    """Ranges that are split at segments: the indices of range and segment, start and length."""

    range: Ints
    segment: Ints
    start: Ints
    length: Ints


def _integers_of(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Return all integers in the ranges ``[low, high)``, after the index of the range of each."""
    size = high - low
    range_of_integer = np.repeat(np.arange(size.size), size)
    first_of_range = low - (np.cumsum(size) - size)
    return range_of_integer, np.arange(range_of_integer.size) + first_of_range[range_of_integer]


def _in_order(numbers: Ints) -> Ints:
    """Return the distinct numbers in ascending order.

    ``np.unique`` makes a hash table first, which takes longer for a million.
    """
    ascending = np.sort(numbers)
    each: Ints = ascending[np.append(True, ascending[1:] != ascending[:-1])[: ascending.size]]
    return each


@attrs.frozen(eq=False)
class SlotSegments:
    """The segments that a worker has of some tensors in one group, in block 0, by ascending start.

    All are arrays of one length.

    ``start`` counts through the worker's regions, one behind another; the same segment of the next
    slot begins ``step`` bytes later, and the last slot has ``step`` 0. ``tensor`` is an index;
    ``number`` is the number of the first byte (:mod:`kvplan.verification.labels`); ``column``
    numbers all bytes that the worker has of a slot. ``num_changes`` counts how often ``step``
    changes up to each segment.
    """

    start: Ints
    length: Ints
    slot: Ints
    step: Ints
    tensor: Ints
    number: Ints
    column: Ints
    block_stride: Ints
    num_blocks: Ints
    num_changes: Ints = attrs.field(init=False)

    @num_changes.default
    def _count_changes(self) -> Ints:
        return np.append(0, np.cumsum(self.step[1:] != self.step[:-1]))

    def stepping_within(self, num_slots: int) -> SlotSegments:
        """Return the segments with step 0 in the last of each ``num_slots`` slots.

        All series of two groups share them: counting changes takes as long as there are segments.
        """
        step = np.where((self.slot + 1) % num_slots, self.step, 0)
        return attrs.evolve(self, step=step)

    def repeats_after(self, start: Ints, length: Ints) -> Ints:
        """Return after how many bytes each range repeats itself in the next slot.

        It is the length of a range that does not repeat itself, a whole number of times, while
        segments step alike.
        """
        if not self.start.size:
            return length
        low = np.searchsorted(self.start, start, "right") - 1
        after = self.step[low]
        # All segments but those of the last slot have to go on alike.
        high = np.searchsorted(self.start, start + length - after, "left") - 1
        is_alike = self.num_changes[low] == self.num_changes[high]
        repeats = (after > 0) & (after < length) & is_alike
        repeats &= length % np.maximum(after, 1) == 0
        return np.where(repeats, after, length)

    def cut(self, start: Ints, length: Ints) -> Fragments | None:
        """Split ranges at the segments. Return ``None`` if some byte of a range is in no segment.

        Raises ``RANGE`` for too many fragments.
        """
        # Range i overlaps the segments [low[i], high[i]); they follow each other in the arrays.
        low = np.searchsorted(self.start, start, "right") - 1
        high = np.searchsorted(self.start, start + length, "left")
        if (low < 0).any():
            return None
        num_fragments = high - low
        action = "certify a plan"  # a wrong one may have the same bytes in many descriptors
        at_most(MAX_FOLLOWED, int(num_fragments.sum()), "fragments of descriptors", action)
        # A fragment is what a range and a segment have in common.
        range_of_fragment, segment = _integers_of(low, high)
        fragment_start = np.maximum(start[range_of_fragment], self.start[segment])
        range_stop = (start + length)[range_of_fragment]
        segment_stop = self.start[segment] + self.length[segment]
        fragment_length = np.minimum(range_stop, segment_stop) - fragment_start
        if (fragment_length <= 0).any() or fragment_length.sum() != length.sum():
            return None
        return Fragments(range_of_fragment, segment, fragment_start, fragment_length)


@attrs.frozen
class ProofTensor:
    """A tensor of the destination: its index, a view of it, and how its bytes are numbered."""

    index: int
    view: View
    weights: Weights


def _elements(view: View | Geometry) -> tuple[object, ...]:
    """Return what all views of a tensor share: dtype, and axes of more than one element."""
    sizes = sorted((name, size) for name, size in view.sizes.items() if size > 1 and name != TOKEN)
    return view.dtype, sizes


def _views_alike(
    worker: Worker, group: Group, tensors: Mapping[str, ProofTensor]
) -> dict[tuple[int, Weights], list[int]]:
    """Return views of one geometry and one numbering: they have the same segments elsewhere."""
    alike: dict[tuple[int, Weights], list[int]] = {}
    for view_index, geometry_index in enumerate(worker.geometry_of):
        tensor = tensors.get(worker.views[view_index].name)
        if tensor and worker.geometries[geometry_index].group == group:
            alike.setdefault((geometry_index, tensor.weights), []).append(view_index)
    return alike


def _num_segments(worker: Worker, group: Group, tensors: Mapping[str, ProofTensor]) -> int:
    number = 0
    for (geometry_index, weights), views in _views_alike(worker, group, tensors).items():
        _check_elements(worker, worker.geometries[geometry_index], views, tensors)
        number += len(views) * num_segments_of_slot(worker.geometries[geometry_index], weights)
    return number * slots_of(group)


def _segments(worker: Worker, group: Group, tensors: Mapping[str, ProofTensor]) -> SlotSegments:
    starts = region_starts(worker)
    columns = [np.empty((9, 0), np.int64)]
    bytes_of_slot = 0
    for (geometry_index, weights), view_indices in _views_alike(worker, group, tensors).items():
        geometry = worker.geometries[geometry_index]
        offset, number, length = segments_of_slot(geometry, weights)
        slot_offset = slots_of_block(geometry)
        region, view_offset = worker.region_offsets[view_indices].T
        view_start = starts[region] + view_offset
        tensor_index = np.array([tensors[worker.views[i].name].index for i in view_indices])
        column = bytes_of_slot + length * np.arange(len(view_indices) * offset.size)
        bytes_of_slot += length * column.size
        # Each field of SlotSegments by view, slot and segment.
        fields = (
            view_start[:, None, None] + slot_offset[:, None] + offset,
            length,
            np.arange(slot_offset.size)[:, None],
            np.append(np.diff(slot_offset), 0)[:, None],
            tensor_index[:, None, None],
            number,
            column.reshape(-1, 1, offset.size),
            geometry.block_stride_bytes,
            geometry.num_blocks,
        )
        columns.append(np.stack(np.broadcast_arrays(*fields)).reshape(9, -1))
    segments = np.concatenate(columns, axis=1)
    return SlotSegments(*segments[:, np.argsort(segments[0])])


def _check_elements(
    worker: Worker,
    geometry: Geometry,
    view_indices: Iterable[int],
    tensors: Mapping[str, ProofTensor],
) -> None:
    """Raise ``PROOF`` unless these views have the elements that the destination has."""
    for name in dict.fromkeys(worker.views[view_index].name for view_index in view_indices):
        expected = _elements(tensors[name].view)
        if _elements(geometry) != expected:
            raise refusal(f"{name} of {worker.label}", f"{expected}", f"{_elements(geometry)}")


@attrs.frozen(eq=False)
class GroupTables:
    """One group of the destination and one of a source: ids, tables, and segments of both sides.

    Segments step within as many slots of each side as follow each other as positions do.
    """

    pair: PairTables
    ids: GroupPair
    segments: tuple[SlotSegments, SlotSegments]

    @classmethod
    def of(cls, pair: PairTables, ids: GroupPair, *segments: SlotSegments) -> GroupTables:
        """Return two groups with their segments: those of the destination, and of the source."""
        # With equal contexts all slots follow each other: a token has the same on both sides.
        contexts = {
            (group.context.rank, group.context.size, interleave_of(group)) for group in ids.groups
        }
        destination, source = (
            each.stepping_within(
                slots_of(group)
                if len(contexts) == 1 or group.context.size == 1
                else math.gcd(slots_of(group), interleave_of(group))
            )
            for each, group in zip(segments, ids.groups, strict=True)
        )
        return cls(pair, ids, (destination, source))


@attrs.frozen(eq=False)
class BlockRanges:
    """One side of some descriptors, in block 0.

    Block ordinals are by position, everything else by run and position.
    ``start`` advances by ``step`` from block to block.
    """

    ordinal: Ints
    row: Ints
    start: Ints
    length: Ints
    step: Ints


@attrs.frozen(eq=False)
class DescriptorFragments:
    """The fragments of descriptors that are split at the segments of both sides, arrays of one
    length.

    ``descriptor`` is the index of the descriptor; ``segment`` and ``start`` have one array for each
    side. Both sides repeat the fragment in the next slots, ``num_slots`` with its own.
    """

    descriptor: Ints
    segment: tuple[Ints, Ints]
    start: tuple[Ints, Ints]
    length: Ints
    num_slots: Ints


@attrs.frozen(eq=False)
class Written:
    """Bytes of the destination that are written.

    The columns of ``rectangles`` (4, n) are start, stop, low and high: of each slot in
    ``[low, high)``, the columns ``[start, stop)``. Slots count through the blocks of the worker;
    after ``num_slots`` the rectangles repeat.
    """

    rectangles: Ints
    num_slots: int

    @classmethod
    def of(cls, several: Iterable[Written], num_slots: int) -> Written:
        """Return all rectangles in one, repeated up to ``num_slots``."""
        parts = [np.empty((4, 0), np.int64)]
        for written in several:
            parts += written.repeated(num_slots)
        return cls(np.concatenate(parts, axis=1), num_slots)

    def repeated(self, num_slots: int) -> tuple[Ints, Ints]:
        """Return the rectangles up to ``num_slots``: those in all slots, and all others, (4, n)."""
        _, _, low, high = self.rectangles
        is_whole = (low == 0) & (high == self.num_slots)
        whole = self.rectangles[:, is_whole]
        whole[3] = num_slots
        others = self.rectangles[:, ~is_whole]
        num_periods = num_slots // self.num_slots if others.size else 0
        num_others = num_periods * others.shape[1]
        at_most(MAX_FOLLOWED, num_others, "ranges of a period", "certify a plan")
        by_period = np.repeat(others[:, None], num_periods, axis=1)
        by_period[2:] += self.num_slots * np.arange(num_periods)[:, None]
        return whole, by_period.reshape(4, -1)

    @property
    def bounds(self) -> Ints:
        """The columns at which rectangles start and stop, in any order."""
        return self.rectangles[:2].reshape(-1)

    @property
    def num_bytes(self) -> int:
        """The number of bytes in all rectangles."""
        start, stop, low, high = self.rectangles
        return int(((stop - start) * (high - low)).sum())


class FollowedTokens(NamedTuple):
    """What single tokens move, and the smallest pool that they move between on each side, (2,)."""

    written: Written
    num_fragments: int
    num_blocks: Ints


class _Proof:
    """The proof for one destination worker."""

    def __init__(self, worker: Worker, skipped: Sequence[str], complete: bool) -> None:
        self.worker = worker
        self.complete = complete
        self.names = [name for name in worker.tensors if name not in skipped]
        views = [worker.views[worker.tensors[name][0]] for name in self.names]
        self.tensors: dict[str, ProofTensor] = {}
        for index, view in enumerate(views):
            self.tensors[view.name] = ProofTensor(index, view, numbering(view))

    def num_followed(self, pairs: Sequence[PairTables]) -> int:
        """Return the number of descriptors and segments to follow, before any is listed."""
        number = 0
        for group in self.worker.groups:
            number += _num_segments(self.worker, group, self.tensors)
            for pair, ids in _ids_of_group(pairs, group):
                number += _num_segments(pair.sides[1].worker, ids.groups[1], self.tensors)
                for runs in ids.runs:
                    number += ids.period // runs.period * runs.base[0].size * runs.starts.size
                for tokens in ids.tokens:
                    num_periods = -(-_num_positions(ids, tokens) // tokens.period)
                    number += num_periods * tokens.base[0].size * tokens.starts.size
        return number

    def follow_group(self, pairs: Sequence[PairTables], group: Group) -> tuple[int, int]:
        """Prove what all pairs write to a group. Return its bytes and how many fragments of them
        were followed.
        """
        segments = _segments(self.worker, group, self.tensors)
        followed: list[FollowedTokens] = []
        for pair, ids in _ids_of_group(pairs, group):
            source_segments = _segments(pair.sides[1].worker, ids.groups[1], self.tensors)
            followed += self.follow(GroupTables.of(pair, ids, segments, source_segments))
        periods = [period_of(group) // group.context.size]
        periods += [tokens.written.num_slots for tokens in followed]
        written = Written.of((tokens.written for tokens in followed), math.lcm(*periods))
        num_columns = int((segments.column + segments.length).max(initial=0))
        bounds = _in_order(np.append(written.bounds, [0, num_columns]))
        filled = self.filled(group, segments, written, bounds)
        if self.complete:
            self.check_whole(group, segments, filled, bounds)
        return written.num_bytes, sum(tokens.num_fragments for tokens in followed)

    def follow(self, tables: GroupTables) -> list[FollowedTokens]:
        """Return what the tokens of a pair of groups move.

        Raises ``PROOF`` if its runs move other bytes (verify.K4).
        """
        by_runs = [self.follow_runs(tables, runs) for runs in tables.ids.runs]
        by_tokens = [self.follow_tokens(tables, tokens) for tokens in tables.ids.tokens]
        num_blocks = tuple(np.min([tokens.num_blocks for tokens in by_tokens], axis=0).tolist())
        if tables.ids.num_blocks != num_blocks:
            expected_pools = f"the smallest pools that bytes move between, of {num_blocks} blocks"
            raise refusal(tables.pair, expected_pools, f"{tables.ids.num_blocks}")
        instead_of_runs = []
        for tokens, followed in zip(tables.ids.tokens, by_tokens, strict=True):
            if tokens.only_at_cuts:
                instead_of_runs.append(followed.written)
        group = tables.ids.groups[0]
        num_slots = tables.ids.period // group.context.size
        expected = Written.of(by_runs, num_slots)
        written = Written.of(instead_of_runs, num_slots)
        bounds = _in_order(np.append(expected.bounds, written.bounds))
        segments = tables.segments[0]
        expected, written = (
            self.filled(group, segments, each, bounds) for each in (expected, written)
        )
        if not np.array_equal(expected.rectangles, written.rectangles):
            rule = "tokens that move what runs move, at the ends of a range"
            raise refusal(tables.pair, rule, "other bytes")
        return by_tokens

    def follow_runs(self, tables: GroupTables, runs: RunSeries) -> Written:
        """Return what a series of joined runs moves in a period of the pair."""
        positions = _positions_of_series(runs, tables.ids.period)
        sides = []
        for side in SIDES:
            group = tables.ids.groups[side]
            ordinal = local_slots(group, positions) // slots_of(group)
            terms = _terms_of_blocks(tables, side, runs, ordinal)
            sides.append(_ranges(tables, side, runs, ordinal, terms))
        fragments = self.split(tables, sides[0], sides[1])
        first = self.check_bytes(tables, sides[0], sides[1], fragments)
        last_slot = _slots(tables, 0, sides[0], fragments) + fragments.num_slots - 1
        last = positions_of(tables.ids.groups[0], last_slot)
        _check_in_spans(tables, positions[fragments.descriptor % positions.size], first, last)
        return _written(tables, sides[0], fragments, tables.ids.period)

    def follow_tokens(self, tables: GroupTables, tokens: TokenSeries) -> FollowedTokens:
        """Return what a series of single tokens moves before the slots of the destination repeat.

        Raises ``PROOF`` unless each is one position (verify.K4).
        """
        positions = _positions_of_series(tokens, _num_positions(tables.ids, tokens))
        sides = []
        for side in SIDES:
            group = tables.ids.groups[side]
            ordinal, slot = np.divmod(local_slots(group, positions), slots_of(group))
            sides.append(_ranges(tables, side, tokens, ordinal, tokens.slot_terms[side][slot]))
        fragments = self.split(tables, sides[0], sides[1])
        byte_positions = self.check_bytes(tables, sides[0], sides[1], fragments)
        is_other = positions[fragments.descriptor % positions.size] != byte_positions
        if (is_other | (fragments.num_slots > 1)).any():
            raise refusal(tables.pair, "a token to be one position", "several")
        pools = zip(tables.segments, fragments.segment, strict=True)
        num_blocks = np.array([segments.num_blocks[segment].min() for segments, segment in pools])
        period = math.lcm(tokens.period, period_of(tables.ids.groups[0]))
        written = _written(tables, sides[0], fragments, period)
        written = self.filled(
            tables.ids.groups[0], tables.segments[0], written, _in_order(written.bounds)
        )
        return FollowedTokens(written, fragments.length.size, num_blocks)

    def split(
        self,
        tables: GroupTables,
        destination: BlockRanges,
        source: BlockRanges,
    ) -> DescriptorFragments:
        """Split descriptors at the segments of both sides (verify.K3).

        Raises ``PROOF`` for bytes that no segment has.
        """
        unequal = np.flatnonzero(destination.length != source.length)
        if unequal.size:
            first = unequal[0]
            details = _row_details(tables.pair, destination.row[first], source.row[first])
            expected = f"descriptors of equal lengths, {destination.length[first]} bytes"
            got = f"{source.length[first]} at the source"
            raise refusal(tables.pair, expected, got, **details)
        # Of a range that repeats itself on both sides, what it repeats is enough.
        length = destination.length
        after, source_after = (
            segments.repeats_after(ranges.start, length)
            for segments, ranges in zip(tables.segments, (destination, source), strict=True)
        )
        followed = np.where(after == source_after, after, length)
        # Split at the segments of the destination, then the same bytes at those of the source.
        coarse = tables.segments[0].cut(destination.start, followed)
        fine = None
        if coarse is not None:
            moved_by = source.start[coarse.range] - destination.start[coarse.range]
            fine = tables.segments[1].cut(coarse.start + moved_by, coarse.length)
        if coarse is None or fine is None:
            where = "destination" if coarse is None else "source"
            expected = "descriptors of bytes that views hold"
            raise refusal(tables.pair, expected, f"other bytes at the {where}")
        # `fine.range` is the coarse fragment that each fine one belongs to.
        descriptor = coarse.range[fine.range]
        start = fine.start - source.start[descriptor] + destination.start[descriptor]
        segment = coarse.segment[fine.range]
        num_slots = (length // followed)[descriptor]
        return DescriptorFragments(
            descriptor, (segment, fine.segment), (start, fine.start), fine.length, num_slots
        )

    def check_bytes(
        self,
        tables: GroupTables,
        destination: BlockRanges,
        source: BlockRanges,
        fragments: DescriptorFragments,
    ) -> Ints:
        """Return the first position of each fragment.

        Raises ``PROOF`` if the two sides of a fragment hold different bytes (verify.K3).
        """
        expected = _held(tables, 0, destination, fragments)
        held = _held(tables, 1, source, fragments)
        for field in expected:
            wrong = np.flatnonzero(expected[field] != held[field])
            if wrong.size:
                fragment = wrong[0]
                descriptor = fragments.descriptor[fragment]
                name = self.names[expected["tensor"][fragment]]
                values: list[Any] = [int(expected[field][fragment]), int(held[field][fragment])]
                if field == "tensor":
                    values = [self.names[index] for index in values]
                details = _row_details(
                    tables.pair, destination.row[descriptor], source.row[descriptor]
                )
                details |= {"tensor": name, field: tuple(values)}
                expected_byte = f"{field} {values[0]} of {name}"
                raise refusal(tables.pair, expected_byte, f"{values[1]}", **details)
        return expected["position"]

    def filled(
        self, group: Group, segments: SlotSegments, written: Written, bounds: Ints
    ) -> Written:
        """Return what is written, split at all ``bounds`` of columns, and in order.

        Slots that follow each other are joined. Raises ``PROOF`` if two overlap (verify.K5).
        """
        first, end = np.searchsorted(bounds, written.rectangles[:2])
        at_most(MAX_FOLLOWED, int((end - first).sum()), "ranges of a period", "certify a plan")
        rectangle, interval = _integers_of(first, end)
        low, high = written.rectangles[2:, rectangle]
        # Rectangles that overlap in an interval are neighbours.
        order = np.lexsort((low, interval))
        interval = interval[order]
        low = low[order]
        high = high[order]
        same_interval = interval[1:] == interval[:-1]
        overlapping = np.flatnonzero(same_interval & (low[1:] < high[:-1]))
        if overlapping.size:
            later = overlapping[0] + 1
            column = int(bounds[interval[later]])
            raise self.wrong(group, segments, column, int(low[later]), "bytes moved twice")
        goes_on = same_interval & (low[1:] == high[:-1])
        first_joined = np.append(True, ~goes_on)[: low.size]
        last_joined = np.append(~goes_on, True)[: low.size]
        interval = interval[first_joined]
        sides = bounds[interval], bounds[interval + 1], low[first_joined], high[last_joined]
        return Written(np.stack(sides), written.num_slots)

    def check_whole(
        self, group: Group, segments: SlotSegments, filled: Written, bounds: Ints
    ) -> None:
        """Raise ``PROOF`` unless each slot is written, from the first bound to the last."""
        start, _, low, high = filled.rectangles
        interval = np.searchsorted(bounds, start)
        num_slots = np.bincount(interval, high - low, bounds.size - 1)
        lacking = np.flatnonzero(num_slots < filled.num_slots)
        if lacking.size:
            # The slots from 0 on may be there.
            slot = int(high[(interval == lacking[0]) & (low == 0)].sum())
            raise self.wrong(group, segments, int(bounds[lacking[0]]), slot, "bytes not moved")

    def wrong(
        self, group: Group, segments: SlotSegments, column: int, slot: int, got: str
    ) -> KVPlanError:
        """Return the error for a byte of a slot that is not written once."""
        has_column = (segments.column <= column) & (column < segments.column + segments.length)
        segment = int(has_column.argmax())
        name = self.names[segments.tensor[segment]]
        position = int(positions_of(group, np.array(slot)))
        starts = region_starts(self.worker)
        region_index = np.searchsorted(starts, segments.start[segment], "right") - 1
        details: dict[str, Any] = {
            "tensor": name,
            "position": position,
            "region": self.worker.regions[region_index].name,
        }
        expected = f"every byte of {name}, position {position}, once"
        return refusal(f"the plan for {self.worker.label}", expected, got, **details)


def _ids_of_group(
    pairs: Iterable[PairTables],
    group: Group,
) -> Iterator[tuple[PairTables, GroupPair]]:
    """Yield the ids that move bytes into a group, each with its pair of workers."""
    for pair in pairs:
        for ids in pair.group_pairs:
            if ids.groups[0] == group:
                yield pair, ids


def _num_positions(ids: GroupPair, tokens: TokenSeries) -> int:
    """Return how many positions prove a series of single tokens, by Fine and Wilf."""
    destination, source = (math.lcm(tokens.period, period_of(group)) for group in ids.groups)
    return destination + source - math.gcd(destination, source)


def _positions_of_series(series: RunSeries | TokenSeries, num_positions: int) -> Ints:
    """Return where the descriptors of a series begin, below ``num_positions``."""
    # By period of the series, then by start.
    first_of_period = np.arange(0, num_positions, series.period)
    positions = np.add.outer(first_of_period, series.starts).reshape(-1)
    return positions[positions < num_positions]


def _ranges(
    tables: GroupTables,
    side: int,
    ids: RunSeries | TokenSeries,
    ordinal: Ints,
    terms: Ints,
) -> BlockRanges:
    """Return one side of the descriptors of a series.

    ``terms`` are what the block or the slot of each position adds to the ids. Raises ``PROOF`` for
    an id outside the row of its series (verify.K2).
    """
    table = tables.pair.sides[side]
    last_block = tables.ids.num_blocks[side] - 1
    step = ids.step[side]
    # The id of each descriptor in block 0, by run and position.
    number = (ids.base[side].astype(np.int64) + terms).reshape(-1)
    # The row of each id is the last that begins at or before it; `element` is the element of the
    # row.
    row = np.searchsorted(table.first, number, "right") - 1
    element = number - table.first[row]
    wrong = (row < 0) | (step * last_block >= table.count[row] - element)
    if wrong.any():
        first = wrong.argmax()
        where = f"row {row[first]} of {table.worker.label}"
        expected = f"ids of {last_block + 1} blocks that stay in {where}"
        details: dict[str, Any] = {"row": int(row[first]), "id": int(number[first]), "step": step}
        got = f"{number[first]} and every {step} from there"
        raise refusal(tables.pair, expected, got, **details)
    last_id = int(number.max()) + step * last_block
    if last_id >= ID_END:
        expected = f"ids of {last_block + 1} blocks below {ID_END}"
        raise refusal(tables.pair, expected, f"{last_id}", "INT", id=last_id)
    start = table.start[row] + element * table.stride[row]
    return BlockRanges(ordinal, row, start, table.length[row], step * table.stride[row])


def _terms_of_blocks(tables: GroupTables, side: int, runs: RunSeries, ordinal: Ints) -> Ints:
    """Return what the listed blocks add to ids, for every period.

    Raises ``PROOF`` unless they are the blocks of the positions (verify.K1). ``ordinal`` has
    the true block ordinals of all starts, period after period.
    """
    group = tables.ids.groups[side]
    blocks = runs.blocks[side]
    num_starts = runs.starts.size
    num_periods = ordinal.size // num_starts
    # One period more than is followed, for the step from the last block to the next.
    next_slots = local_slots(group, runs.starts + num_periods * runs.period)
    true = np.concatenate([ordinal, next_slots // slots_of(group)])
    first_of_period = np.arange(num_periods + 1) * blocks.num_blocks
    expected = np.add.outer(first_of_period, blocks.ordinal).reshape(-1)
    if (true != expected).any() or (blocks.step and (np.diff(true) != blocks.step).any()):
        expected_blocks = f"blocks {true[:num_starts].tolist()} of group {group.name!r}"
        raise refusal(tables.pair, expected_blocks, f"{blocks.ordinal.tolist()}")
    if blocks.slot_terms is None:
        return np.zeros(ordinal.size, np.int64)
    return np.tile(blocks.slot_terms, num_periods)


def _held(
    tables: GroupTables,
    side: int,
    ranges: BlockRanges,
    fragments: DescriptorFragments,
) -> dict[str, Ints]:
    """Return the tensor, the position and the first byte's number of one side of each fragment.

    Raises ``PROOF`` for ids that do not follow the blocks of a view (verify.K2).
    """
    segments = tables.segments[side]
    segment = fragments.segment[side]
    # Only block 0 has these ids if the pool has one block.
    num_blocks = tables.ids.num_blocks[side]
    behind = (segments.block_stride[segment] != ranges.step[fragments.descriptor]) & (
        num_blocks > 1
    )
    if behind.any() or num_blocks > segments.num_blocks[segment].min():
        raise refusal(tables.pair, "ids that follow the blocks of every view", "other ids")
    return {
        "tensor": segments.tensor[segment],
        "position": positions_of(tables.ids.groups[side], _slots(tables, side, ranges, fragments)),
        "byte": segments.number[segment] + fragments.start[side] - segments.start[segment],
    }


def _slots(
    tables: GroupTables, side: int, ranges: BlockRanges, fragments: DescriptorFragments
) -> Ints:
    """Return the slot of each fragment, counted through the blocks of the worker."""
    # Descriptors are listed by run and position: positions repeat with every run.
    ordinal = ranges.ordinal[fragments.descriptor % ranges.ordinal.size]
    slot = tables.segments[side].slot[fragments.segment[side]]
    return ordinal * slots_of(tables.ids.groups[side]) + slot


def _written(
    tables: GroupTables, ranges: BlockRanges, fragments: DescriptorFragments, period: int
) -> Written:
    """Return where fragments are written, by the ``ranges`` of the destination, in one period."""
    segments = tables.segments[0]
    segment = fragments.segment[0]
    start = segments.column[segment] + fragments.start[0] - segments.start[segment]
    low = _slots(tables, 0, ranges, fragments)
    rectangles = np.stack([start, start + fragments.length, low, low + fragments.num_slots])
    num_slots = period // tables.ids.groups[0].context.size
    return Written(rectangles[:, low < num_slots], num_slots)


def _check_in_spans(tables: GroupTables, start: Ints, first: Ints, last: Ints) -> None:
    """Raise ``PROOF`` if a fragment of a run lies outside the span in which the run begins
    (verify.K4).

    ``start`` is the position at which the run of each fragment begins, ``first`` and ``last`` are
    those of the fragment.
    """
    period = tables.ids.period
    low, high = np.array([(-1, -1), *tables.ids.spans], np.int64).T
    # Of each run: where its period begins, and the last span that begins at or before it.
    period_start = start - start % period
    span = np.searchsorted(low, start - period_start, "right") - 1
    span_start = period_start + low[span]
    span_stop = period_start + high[span]
    inside = (start < span_stop) & (span_start <= first) & (last < span_stop)
    if not inside.all():
        raise refusal(tables.pair, "every run to stay inside a span", "a run that does not")


def _row_details(pair: PairTables, *rows: int) -> dict[str, Any]:
    """Return details of an error: the row of a descriptor on both sides, and its region."""
    regions = []
    for table, row in zip(pair.sides, rows, strict=True):
        regions.append(table.worker.regions[table.region[row]].name)
    return {"row": tuple(map(int, rows)), "region": tuple(regions)}
