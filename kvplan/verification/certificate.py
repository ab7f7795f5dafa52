"""Certificates: proofs that every request of a plan moves the right bytes.

A proof uses what a plan gives to bind and to NIXL: the rows of both tables and pairs of ids. The
ids of a request are ``base + step * block id + slot term`` whatever its blocks are, and repeat
after a period of positions. So it is enough to follow every descriptor of one period, with block
ids left open. Nothing here knows how tables are made.

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
- verify.K5: A period fills every segment of the destination once, in each of its blocks.
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
"""The most descriptors and segments of a period that are followed, for each plan: 1.25 GB."""

SIDES: Final = (0, 1)
"""The destination and the source: indices into all that has one value for each side."""


@attrs.frozen
class Certificate:
    """A proof that every byte of a period of positions arrives where it belongs, once.

    The ``num_bytes`` bytes were checked in ``num_fragments`` contiguous ranges. ``complete`` is
    false if some writers of an engine are not among the plans, so that what they write is missing.
    """

    num_bytes: int
    num_fragments: int
    complete: bool

    __repr__ = brief_repr


def certify(plan: TransferPlan | MeshPlan | Iterable[TransferPlan]) -> Certificate:
    """Prove that every request of a plan, or of plans that belong together, moves the right bytes.

    It takes some time once, like planning, and none in ``bind``: time and memory grow with the
    least common multiple of both block sizes. The plan of one writer proves what it writes; the
    plans of all writers, or a mesh, also prove that no byte is missing.

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
        for moved in proof.moved_by_group(pairs.get(key, ())):
            num_bytes += int(moved.length.sum())
            num_fragments += moved.length.size
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


@attrs.frozen(eq=False)
class SlotSegments:
    """The segments that a worker has of some tensors in one group, in block 0, by ascending start.

    All are arrays of one length.

    ``start`` counts through the worker's regions, one behind another. ``tensor`` is an
    index; ``number`` is the number of the first byte (:mod:`kvplan.verification.labels`).
    """

    start: Ints
    length: Ints
    slot: Ints
    tensor: Ints
    number: Ints
    block_stride: Ints
    num_blocks: Ints

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
        range_of_fragment = np.repeat(np.arange(start.size), num_fragments)
        first_fragment = np.cumsum(num_fragments) - num_fragments
        segment = (
            low[range_of_fragment]
            + np.arange(range_of_fragment.size)
            - first_fragment[range_of_fragment]
        )
        fragment_start = np.maximum(start[range_of_fragment], self.start[segment])
        range_stop = (start + length)[range_of_fragment]
        segment_stop = (self.start + self.length)[segment]
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
    columns = [np.empty((7, 0), np.int64)]
    for (geometry_index, weights), view_indices in _views_alike(worker, group, tensors).items():
        geometry = worker.geometries[geometry_index]
        offset, number, length = segments_of_slot(geometry, weights)
        slot_offset = slots_of_block(geometry)
        region, view_offset = worker.region_offsets[view_indices].T
        view_start = starts[region] + view_offset
        tensor_index = np.array([tensors[worker.views[i].name].index for i in view_indices])
        # Each field of SlotSegments by view, slot and segment.
        fields = (
            view_start[:, None, None] + slot_offset[:, None] + offset,
            length,
            np.arange(slot_offset.size)[:, None],
            tensor_index[:, None, None],
            number,
            geometry.block_stride_bytes,
            geometry.num_blocks,
        )
        columns.append(np.stack(np.broadcast_arrays(*fields)).reshape(7, -1))
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

    ``period`` is that of the proof: a multiple of the period of the ids.
    """

    pair: PairTables
    ids: GroupPair
    segments: tuple[SlotSegments, SlotSegments]
    period: int


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
    side.
    """

    descriptor: Ints
    segment: tuple[Ints, Ints]
    start: tuple[Ints, Ints]
    length: Ints


@attrs.frozen(eq=False)
class WrittenRanges:
    """Bytes that are moved into segments of the destination, arrays of one length.

    ``ordinal`` is that of the block; ``start`` counts from the first byte of the segment.
    """

    segment: Ints
    ordinal: Ints
    start: Ints
    length: Ints

    @classmethod
    def of(cls, several: Iterable[WrittenRanges]) -> WrittenRanges:
        """Return all ranges in one."""
        columns = [ranges.columns() for ranges in several]
        return cls(*np.concatenate([np.empty((4, 0), np.int64), *columns], axis=1))

    def columns(self) -> Ints:
        """Return one column for each range, (4, ranges)."""
        return np.stack([self.segment, self.ordinal, self.start, self.length])


class WrittenTokenRanges(NamedTuple):
    """What single tokens move, and the smallest pool that they move between on each side, (2,)."""

    ranges: WrittenRanges
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
        """Return the number of descriptors and segments of a period, before any is listed."""
        number = 0
        for group in self.worker.groups:
            ids_by_pair = list(_ids_of_group(pairs, group))
            period = math.lcm(period_of(group), *(ids.period for _, ids in ids_by_pair))
            num_blocks = period // (group.context.size * slots_of(group))
            number += num_blocks * _num_segments(self.worker, group, self.tensors)
            for pair, ids in ids_by_pair:
                number += _num_segments(pair.sides[1].worker, ids.groups[1], self.tensors)
                for series in (*ids.runs, *ids.tokens):
                    num_starts = period // series.period * series.starts.size
                    number += num_starts * series.base.shape[1]
        return number

    def moved_by_group(self, pairs: Sequence[PairTables]) -> Iterator[WrittenRanges]:
        """Yield what all pairs move into each group in a period, when it is proved."""
        for group in self.worker.groups:
            segments = _segments(self.worker, group, self.tensors)
            ids_by_pair = list(_ids_of_group(pairs, group))
            period = math.lcm(period_of(group), *(ids.period for _, ids in ids_by_pair))
            moved = []
            for pair, ids in ids_by_pair:
                source_segments = _segments(pair.sides[1].worker, ids.groups[1], self.tensors)
                moved += self.follow(GroupTables(pair, ids, (segments, source_segments), period))
            together = WrittenRanges.of(moved)
            filled = self.filled(group, segments, together)
            num_blocks = period // (group.context.size * slots_of(group))
            self.check_whole(group, segments, filled, num_blocks)
            yield together

    def follow(self, tables: GroupTables) -> list[WrittenRanges]:
        """Return what the tokens of a pair of groups move.

        Raises ``PROOF`` if its runs move other bytes (verify.K4).
        """
        by_runs = [self.follow_runs(tables, runs) for runs in tables.ids.runs]
        followed = [self.follow_tokens(tables, tokens) for tokens in tables.ids.tokens]
        num_blocks = tuple(np.min([tokens.num_blocks for tokens in followed], axis=0).tolist())
        if tables.ids.num_blocks != num_blocks:
            expected_pools = f"the smallest pools that bytes move between, of {num_blocks} blocks"
            raise refusal(tables.pair, expected_pools, f"{tables.ids.num_blocks}")
        by_tokens = [tokens.ranges for tokens in followed]
        instead_of_runs = []
        for tokens, moved in zip(tables.ids.tokens, by_tokens, strict=True):
            if tokens.only_at_cuts:
                instead_of_runs.append(moved)
        group = tables.ids.groups[0]
        segments = tables.segments[0]
        expected = self.filled(group, segments, WrittenRanges.of(by_runs))
        filled = self.filled(group, segments, WrittenRanges.of(instead_of_runs))
        if not np.array_equal(expected.columns(), filled.columns()):
            rule = "tokens that move what runs move, at the ends of a range"
            raise refusal(tables.pair, rule, "other bytes")
        return by_tokens

    def follow_runs(self, tables: GroupTables, runs: RunSeries) -> WrittenRanges:
        """Return what a series of joined runs moves in a period."""
        positions = self.positions(tables, runs, runs.starts)
        sides = []
        for side in SIDES:
            group = tables.ids.groups[side]
            ordinal = local_slots(group, positions) // slots_of(group)
            terms = _terms_of_blocks(tables, side, runs, ordinal)
            sides.append(_ranges(tables, side, runs, ordinal, terms))
        fragments = self.split(tables, sides[0], sides[1])
        byte_positions = self.check_bytes(tables, sides[0], sides[1], fragments)
        start = positions[fragments.descriptor % positions.size]
        _check_in_spans(tables, start, byte_positions)
        return _written(tables, sides[0], fragments)

    def follow_tokens(self, tables: GroupTables, tokens: TokenSeries) -> WrittenTokenRanges:
        """Return what a series of single tokens moves in a period. Each is one position
        (verify.K4).
        """
        positions = self.positions(tables, tokens, tokens.starts)
        sides = []
        for side in SIDES:
            group = tables.ids.groups[side]
            ordinal, slot = np.divmod(local_slots(group, positions), slots_of(group))
            sides.append(_ranges(tables, side, tokens, ordinal, tokens.slot_terms[side][slot]))
        fragments = self.split(tables, sides[0], sides[1])
        byte_positions = self.check_bytes(tables, sides[0], sides[1], fragments)
        if (positions[fragments.descriptor % positions.size] != byte_positions).any():
            raise refusal(tables.pair, "a token to be one position", "several")
        pools = zip(tables.segments, fragments.segment, strict=True)
        num_blocks = np.array([segments.num_blocks[segment].min() for segments, segment in pools])
        return WrittenTokenRanges(_written(tables, sides[0], fragments), num_blocks)

    def positions(self, tables: GroupTables, ids: RunSeries | TokenSeries, starts: Ints) -> Ints:
        """Return where the descriptors of a series begin in a period."""
        # By period of the series, then by start.
        return np.add.outer(np.arange(0, tables.period, ids.period), starts).reshape(-1)

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
        # Split at the segments of the destination, then the same bytes at those of the source.
        coarse = tables.segments[0].cut(destination.start, destination.length)
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
        return DescriptorFragments(
            descriptor, (segment, fine.segment), (start, fine.start), fine.length
        )

    def check_bytes(
        self,
        tables: GroupTables,
        destination: BlockRanges,
        source: BlockRanges,
        fragments: DescriptorFragments,
    ) -> Ints:
        """Return the position of each fragment.

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

    def filled(self, group: Group, segments: SlotSegments, moved: WrittenRanges) -> WrittenRanges:
        """Return the ranges in order, joined where they continue each other.

        Raises ``PROOF`` if two overlap (verify.K5).
        """
        if not moved.segment.size:
            return moved
        # By segment, block ordinal and first byte: ranges that overlap are neighbours.
        order = np.lexsort((moved.start, moved.ordinal, moved.segment))
        segment = moved.segment[order]
        ordinal = moved.ordinal[order]
        start = moved.start[order]
        length = moved.length[order]
        stop = start + length
        same_segment = (segment[1:] == segment[:-1]) & (ordinal[1:] == ordinal[:-1])
        overlapping = np.flatnonzero(same_segment & (start[1:] < stop[:-1]))
        if overlapping.size:
            later = overlapping[0] + 1
            got = "bytes moved twice"
            raise self.wrong(group, segments, int(segment[later]), int(ordinal[later]), got)
        goes_on = same_segment & (start[1:] == stop[:-1])
        first = np.flatnonzero(np.append(True, ~goes_on))
        joined_length = np.add.reduceat(length, first)
        return WrittenRanges(segment[first], ordinal[first], start[first], joined_length)

    def check_whole(
        self,
        group: Group,
        segments: SlotSegments,
        filled: WrittenRanges,
        num_blocks: int,
    ) -> None:
        """Raise ``PROOF`` unless every segment of a period's blocks is filled (verify.K5).

        Without the plans of all writers, bytes may be missing.
        """
        is_whole = filled.length == segments.length[filled.segment]
        # Segments of all blocks, numbered by segment and block ordinal.
        whole = (filled.segment * num_blocks + filled.ordinal)[is_whole]
        if self.complete and whole.size < segments.start.size * num_blocks:
            # Whole segments ascend: the first missing one is where they are no longer 0, 1, 2, ...
            missing = int(np.append(whole != np.arange(whole.size), True).argmax())
            raise self.wrong(group, segments, *divmod(missing, num_blocks), "bytes not moved")

    def wrong(
        self,
        group: Group,
        segments: SlotSegments,
        segment: int,
        ordinal: int,
        got: str,
    ) -> KVPlanError:
        """Return the error for a segment of a block that is not filled once."""
        name = self.names[segments.tensor[segment]]
        position = int(_positions(group, np.array(ordinal), segments.slot[segment]))
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


def _positions(group: Group, ordinal: Ints, slot: Ints) -> Ints:
    return positions_of(group, ordinal * slots_of(group) + slot)


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
    ordinal = _ordinals(ranges, fragments)
    return {
        "tensor": segments.tensor[segment],
        "position": _positions(tables.ids.groups[side], ordinal, segments.slot[segment]),
        "byte": segments.number[segment] + fragments.start[side] - segments.start[segment],
    }


def _ordinals(ranges: BlockRanges, fragments: DescriptorFragments) -> Ints:
    # Descriptors are listed by run and position: positions repeat with every run.
    return ranges.ordinal[fragments.descriptor % ranges.ordinal.size]


def _written(
    tables: GroupTables, ranges: BlockRanges, fragments: DescriptorFragments
) -> WrittenRanges:
    """Return where fragments are written, by the ``ranges`` of the destination."""
    segment = fragments.segment[0]
    start = fragments.start[0] - tables.segments[0].start[segment]
    return WrittenRanges(segment, _ordinals(ranges, fragments), start, fragments.length)


def _check_in_spans(tables: GroupTables, start: Ints, position: Ints) -> None:
    """Raise ``PROOF`` if a fragment of a run lies outside the span in which the run begins
    (verify.K4).

    ``start`` is the position at which the run of each fragment begins, ``position`` that of the
    fragment.
    """
    period = tables.ids.period
    low, high = np.array([(-1, -1), *tables.ids.spans], np.int64).T
    # Of each run: where its period begins, and the last span that begins at or before it.
    period_start = start - start % period
    span = np.searchsorted(low, start - period_start, "right") - 1
    span_start = period_start + low[span]
    span_stop = period_start + high[span]
    inside = (start < span_stop) & (span_start <= position) & (position < span_stop)
    if not inside.all():
        raise refusal(tables.pair, "every run to stay inside a span", "a run that does not")


def _row_details(pair: PairTables, *rows: int) -> dict[str, Any]:
    """Return details of an error: the row of a descriptor on both sides, and its region."""
    regions = []
    for table, row in zip(pair.sides, rows, strict=True):
        regions.append(table.worker.regions[table.region[row]].name)
    return {"row": tuple(map(int, rows)), "region": tuple(regions)}
