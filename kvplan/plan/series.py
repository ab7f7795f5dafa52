"""Series: ids of runs as sums, and where the runs occur in a request's blocks.

A series is all runs that begin at the same positions, and whose ids grow alike. An id of a series
is ``base + step * block id + slot term`` (rule plan.T3): ``base`` belongs to the run, the slot term
to the slot at which it begins, and only the block id depends on the request. Binding needs
nothing else of a plan.

``RunSeries`` are longer runs, inside one block pair each. ``TokenSeries`` are runs of one token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, integers_in
from kvplan.describe.blocks import Blocks, Range, check_listed, table_indices
from kvplan.describe.views import Group
from kvplan.plan.align import (
    blocks_and_slots,
    count_below,
    first_and_last,
    local_index,
    position_of,
    positions_between,
)

Ids = npt.NDArray[np.int32]


class SideTable(NamedTuple):
    """A request's block table of a group on one side, which messages call ``side``."""

    group: Group
    blocks: Blocks
    side: str


TablePair = tuple[SideTable, SideTable]
"""The block tables of both sides, destination first."""


class Occurrences(NamedTuple):
    """Where runs of a series occur: block ordinals, and what their slots add to ids, (n,) each.

    The destination's are first. Slot terms of ``None`` add nothing.
    """

    ordinals: tuple[Ints, Ints]
    slot_terms: tuple[Ints | None, Ints | None]

    def look_up(self, tables: TablePair) -> BothBlocks:
        """Return the block ids of both tables. Raises ``BLOCKS`` for a block that a table lacks."""
        indices = []
        for table, ordinals in zip(tables, self.ordinals, strict=True):
            indices.append(table_indices(table.group.name, table.blocks, ordinals, table.side))
        destination, source = tables
        return (
            OccurrenceBlocks(destination.blocks.ids[indices[0]], self.slot_terms[0]),
            OccurrenceBlocks(source.blocks.ids[indices[1]], self.slot_terms[1]),
        )


class OccurrenceBlocks(NamedTuple):
    """One side's block ids, one for each occurrence or one for all, and slot terms."""

    block_ids: Ids
    slot_terms: Ints | None


BothBlocks = tuple[OccurrenceBlocks, OccurrenceBlocks]


@attrs.frozen(eq=False)
class PeriodBlocks:
    """Block ordinals of one side within a period, (n,).

    The next period begins ``num_blocks`` later. ``step`` is the constant difference between
    consecutive ordinals, 0 if there is none. ``slot_terms`` (n,) is what the slots add to the ids,
    ``None`` if that is nothing.
    """

    ordinal: Ints
    num_blocks: int
    step: int
    slot_terms: Ints | None


@attrs.frozen(eq=False)
class Series:
    """Runs that begin at the same positions, for both sides, destination first.

    They begin at the positions ``starts``, ascending, modulo ``period``. Run ``j`` has the id
    ``base[j] + step * block id + slot term``. ``base`` is (2, runs, 1); it and all slot terms are
    int32 if all ids of both tables fit, else int64.
    """

    base: Ints
    step: tuple[int, int]
    starts: Ints
    period: int

    def num_starts(self, start: int, stop: int) -> int:
        """Return the number of positions in ``[start, stop)`` at which the runs begin."""
        below_stop = count_below(self.starts, self.period, stop)
        return below_stop - count_below(self.starts, self.period, start)


@attrs.frozen(eq=False)
class RunSeries(Series):
    """A series of longer runs. ``blocks`` has the block of each of ``starts``, on each side."""

    blocks: tuple[PeriodBlocks, PeriodBlocks]

    def occurrences(self, groups: tuple[Group, Group], start: int, stop: int) -> Occurrences:
        """Return all occurrences that begin in ``[start, stop)``."""
        first = count_below(self.starts, self.period, start)
        end = count_below(self.starts, self.period, stop)
        return self._numbered(np.arange(first, end))

    def _numbered(self, numbers: Ints) -> Occurrences:
        """Return the occurrences with these numbers, counted from position 0 on."""
        num_periods, start = np.divmod(numbers, self.starts.size)
        destination, source = self.blocks
        return Occurrences(
            (
                num_periods * destination.num_blocks + destination.ordinal[start],
                num_periods * source.num_blocks + source.ordinal[start],
            ),
            (
                None if destination.slot_terms is None else destination.slot_terms[start],
                None if source.slot_terms is None else source.slot_terms[start],
            ),
        )

    def look_up(self, tables: TablePair, start: int, stop: int) -> BothBlocks | None:
        """Return the blocks of the runs that begin in ``[start, stop)``, ``None`` if none does."""
        first = count_below(self.starts, self.period, start)
        end = count_below(self.starts, self.period, stop)
        if first >= end:
            return None
        # Tables without gaps are sliced; others are searched for each block.
        destination, source = tables
        if destination.blocks.scattered is not None or source.blocks.scattered is not None:
            return self._look_up_with_gaps(tables, first, end)
        return (
            self._slice(destination, self.blocks[0], first, end),
            self._slice(source, self.blocks[1], first, end),
        )

    def _slice(
        self, table: SideTable, blocks: PeriodBlocks, first: int, end: int
    ) -> OccurrenceBlocks:
        """Return the blocks of runs ``[first, end)``: a slice where they step evenly."""
        num_starts = self.starts.size
        first_period, first_start = divmod(first, num_starts)
        last_period, last_start = divmod(end - 1, num_starts)
        first_block = first_period * blocks.num_blocks + blocks.ordinal.item(first_start)
        end_block = last_period * blocks.num_blocks + blocks.ordinal.item(last_start) + 1
        table_first = table.blocks.first
        check_listed(
            table.group.name, first_block, end_block, table_first, table.blocks.stop, table.side
        )
        # Of all occurrences in the periods from the first one's to the last one's.
        occurring = slice(first_start, first_start + end - first)
        # Blocks that step evenly are a slice of the table, without a list of indices.
        if blocks.step:
            in_table = slice(first_block - table_first, end_block - table_first, blocks.step)
            block_ids = table.blocks.ids[in_table]
        else:
            period_first = first_period * blocks.num_blocks - table_first
            period_starts = np.arange(period_first, end_block - table_first, blocks.num_blocks)
            indices = np.add.outer(period_starts, blocks.ordinal).reshape(-1)
            block_ids = table.blocks.ids[indices[occurring]]
        # Slot terms repeat from period to period.
        slot_terms = blocks.slot_terms
        if slot_terms is not None and num_starts > 1:
            num_periods = last_period - first_period + 1
            slot_terms = slot_terms[None].repeat(num_periods, axis=0).reshape(-1)[occurring]
        return OccurrenceBlocks(block_ids, slot_terms)

    def _look_up_with_gaps(self, tables: TablePair, first: int, end: int) -> BothBlocks | None:
        """Return the blocks of those of runs ``[first, end)`` that the destination has."""
        num_starts = self.starts.size
        blocks = self.blocks[0]
        (low, high), _ = self._numbered(np.array([first, end - 1])).ordinals
        ordinals = tables[0].blocks.ordinals
        ordinals = ordinals[(low <= ordinals) & (ordinals <= high)]
        # For each of the destination's blocks, the period it is in, and the numbers of the runs
        # that begin in it.
        num_periods, ordinal = np.divmod(ordinals, blocks.num_blocks)
        start_bounds = np.searchsorted(blocks.ordinal, [ordinal, ordinal + 1])
        number_bounds = num_periods * num_starts + start_bounds
        numbers = integers_in(number_bounds.T)
        numbers = numbers[(first <= numbers) & (numbers < end)]
        return self._numbered(numbers).look_up(tables) if numbers.size else None


@attrs.frozen(eq=False)
class TokenSeries(Series):
    """A series of runs of one token: at each of ``starts`` one token of each run.

    ``slot_terms`` has what each slot of a block adds to the ids, on each side. ``only_at_cuts``
    says that longer runs move these tokens, except at the ends of a range.
    """

    slot_terms: tuple[Ints, Ints]
    only_at_cuts: bool

    def occurrences(self, groups: tuple[Group, Group], start: int, stop: int) -> Occurrences:
        """Return all occurrences in ``[start, stop)``."""
        positions = positions_between(self.starts, self.period, start, stop)
        return self._at(groups, positions)

    def _at(self, groups: tuple[Group, Group], positions: Ints) -> Occurrences:
        ordinals, slots_of_positions = blocks_and_slots(groups, positions)
        terms = self.slot_terms
        return Occurrences(
            (ordinals[0], ordinals[1]),
            (terms[0][slots_of_positions[0]], terms[1][slots_of_positions[1]]),
        )

    def look_up(self, tables: TablePair, start: int, stop: int) -> BothBlocks | None:
        """Return the blocks of the tokens in ``[start, stop)``, ``None`` if there is none.

        Tokens for which the destination has no block are left out.
        """
        if start >= stop:
            return None
        # What a range cuts off is most often inside one block of each side.
        destination, source = tables
        if self.period == 1:
            of_destination = _slice_of_block(destination, self.slot_terms[0], start, stop)
            if of_destination is not None:
                of_source = _slice_of_block(source, self.slot_terms[1], start, stop)
                if of_source is not None:
                    return of_destination, of_source
        bounds = first_and_last(self.starts, self.period, start, stop)
        if bounds is None:
            return None
        positions = self._positions(destination, *bounds)
        if not positions.size:
            return None
        return self._at((destination.group, source.group), positions).look_up(tables)

    def _positions(self, destination: SideTable, first: int, last: int) -> Ints:
        """Return the positions from ``first`` to ``last`` for which the destination has blocks."""
        scattered = destination.blocks.scattered
        if scattered is None:
            return positions_between(self.starts, self.period, first, last + 1)
        group = destination.group
        num_slots = group.num_slots
        block_bounds = [
            local_index(group, first) // num_slots,
            local_index(group, last) // num_slots,
        ]
        low, high = np.searchsorted(scattered, block_bounds)
        # Every slot of the blocks in the table, of which only those in the range move.
        block_starts = scattered[low : high + 1] * num_slots
        local_indices = np.add.outer(block_starts, np.arange(num_slots)).reshape(-1)
        positions = position_of(group, local_indices)
        positions = positions[(first <= positions) & (positions <= last)]
        return positions[np.isin(positions % self.period, self.starts)]


def _slice_of_block(
    table: SideTable, slot_terms: Ints, start: int, stop: int
) -> OccurrenceBlocks | None:
    """Return the block of ``[start, stop)``, if it is one and the table has no gaps."""
    num_slots = table.group.num_slots
    ordinal, slot = divmod(start, num_slots)
    end_slot = slot + stop - start
    blocks = table.blocks
    if end_slot > num_slots or blocks.scattered is not None:
        return None
    check_listed(table.group.name, ordinal, ordinal + 1, blocks.first, blocks.stop, table.side)
    index = ordinal - blocks.first
    return OccurrenceBlocks(blocks.ids[index : index + 1], slot_terms[slot:end_slot])


@attrs.frozen(eq=False)
class GroupPair:
    """All ids of one group of the destination and one of a source: all that bind needs.

    ``num_blocks`` has the size of each side's smallest pool. ``spans`` are the positions in a
    period, of ``period`` positions, that longer runs cover, ascending.
    """

    groups: tuple[Group, Group]
    num_blocks: tuple[int, int]
    period: int
    spans: tuple[Range, ...]
    runs: tuple[RunSeries, ...]
    tokens: tuple[TokenSeries, ...]

    def moves(self, start: int, stop: int) -> Iterator[tuple[RunSeries | TokenSeries, Range]]:
        """Yield each series with the ranges in which it moves positions of ``[start, stop)``.

        Longer runs move what is between the spans that the range cuts; what the range has of these
        moves token by token, rule plan.B2.
        """
        low, high = self._between_cuts(start, stop)
        for runs in self.runs:
            yield runs, (low, high)
        for tokens in self.tokens:
            if not tokens.only_at_cuts:
                yield tokens, (start, stop)
                continue
            if start < low:
                yield tokens, (start, low)
            if high < stop:
                yield tokens, (high, stop)

    def _between_cuts(self, start: int, stop: int) -> Range:
        """Return ``[start, stop)`` without the spans that it cuts."""
        first_span = self._span(start)
        last_span = self._span(stop)
        low = start if first_span is None else first_span[1]
        high = stop if last_span is None else last_span[0]
        return (low, high) if low < high else (stop, stop)

    def _span(self, position: int) -> Range | None:
        """Return the span that has ``position`` strictly inside, if there is one."""
        # The last span that begins before the position, if it ends after it.
        num_periods, offset = divmod(position, self.period)
        i = bisect_left(self.spans, (offset, 0)) - 1
        if i < 0 or self.spans[i][1] <= offset:
            return None
        start, stop = self.spans[i]
        first_of_period = num_periods * self.period
        return first_of_period + start, first_of_period + stop
