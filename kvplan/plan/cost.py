"""Costs: the descriptors, bytes and ids of a request, counted from a plan's tables alone.

The descriptors of a request depend on its block ids only where blocks are neighbours in a pool. If
none are, on either side, the descriptors and their lengths repeat after every period. So one period
is listed without block ids and counted as often as a request contains it; the rest of the request
is listed once more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import attrs
import numpy as np

from kvplan._arrays import Arrays, Ints
from kvplan._checks import instance, integer
from kvplan._text import brief_repr, count
from kvplan.budget import Budget
from kvplan.describe.blocks import POSITION_END
from kvplan.describe.worker import Key, label_of
from kvplan.plan.align import in_slots, in_tokens
from kvplan.plan.runs import find_chains
from kvplan.plan.series import GroupPair, Occurrences, Series
from kvplan.plan.specs import DIRECTIONS, Direction, Pair, ReadSpec
from kvplan.plan.tables import Table, bases

DESCRIPTOR_BYTES: Final = 100
"""The cost of a descriptor that is listed."""

MAX_LENGTHS_SHOWN: Final = 3
"""With more lengths than this, only the shortest and the longest are printed."""


@attrs.frozen
class PairCost:
    """The cost of one request between two workers, each named by (engine id, rank).

    ``local_rows`` and ``remote_rows`` are registered once; ``num_ids`` ids are bound on each side.
    ``lengths`` maps each length in bytes, ascending, to the number of coalesced descriptors of that
    length.
    """

    local: tuple[str, int]
    remote: tuple[str, int]
    local_rows: int
    remote_rows: int
    num_ids: int
    lengths: Mapping[int, int]

    __repr__ = brief_repr

    @classmethod
    def of(cls, spec: ReadSpec) -> PairCost:
        """Return the cost of one bound request."""
        instance(ReadSpec, spec, "spec")
        lengths = Counter(spec.descriptors()[0][:, 1].tolist())
        rows = len(spec.local_table.rows), len(spec.remote_table.rows)
        return cls(spec.local, spec.remote, *rows, int(spec.local_ids.size), _ascending(lengths))

    @property
    def num_descriptors(self) -> int:
        """Descriptors on each side."""
        return sum(self.lengths.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return sum(length * times for length, times in self.lengths.items())


@attrs.frozen(repr=False)
class Cost:
    """The cost of one request of ``tokens`` positions whose blocks are scattered in their pools.

    States move once. ``pairs`` has every pair of workers, in order, including pairs that exchange
    nothing. A request whose blocks are neighbours in the pools of both sides takes fewer
    descriptors.

    >>> from kvplan import Model, plan_mesh
    >>> model = Model.shipped("llama-3.2-1b")
    >>> prefill, decode = model.engine("prefill", tp=2), model.engine("decode", layout="LBNHC")
    >>> cost = plan_mesh(decode, prefill).cost()
    >>> cost
    <Cost of 16 tokens: 524288 bytes in 2048 descriptors>
    >>> print(cost)
    16 tokens: 524288 bytes in 2048 descriptors of 256 bytes
      decode/0 <- prefill/0: 262144 bytes in 1024 descriptors of 256 bytes; 16 and 16 rows
      decode/0 <- prefill/1: 262144 bytes in 1024 descriptors of 256 bytes; 16 and 16 rows
    >>> plan_mesh(model.engine("decode"), prefill).cost(tokens=1000).lengths
    {2048: 128, 16384: 1984}
    """

    operation: str
    tokens: int
    pairs: tuple[PairCost, ...]

    @property
    def lengths(self) -> Mapping[int, int]:
        """The number of descriptors of each length in bytes, ascending, over all pairs."""
        return _sum(pair.lengths for pair in self.pairs)

    @property
    def num_descriptors(self) -> int:
        """Descriptors on each side, over all pairs."""
        return sum(pair.num_descriptors for pair in self.pairs)

    @property
    def num_bytes(self) -> int:
        """Bytes that move, over all pairs."""
        return sum(pair.num_bytes for pair in self.pairs)

    @property
    def num_ids(self) -> int:
        """Ids bound on each side, over all pairs."""
        return sum(pair.num_ids for pair in self.pairs)

    @property
    def num_rows(self) -> int:
        """Rows registered on both sides, over all pairs."""
        return sum(pair.local_rows + pair.remote_rows for pair in self.pairs)

    def __str__(self) -> str:
        arrow = DIRECTIONS[self.operation].arrow
        lines = [f"{count(self.tokens, 'token')}: {_text(self.lengths)}"]
        for pair in self.pairs:
            if pair.lengths:
                workers = f"{label_of(pair.local)} {arrow} {label_of(pair.remote)}"
                rows = f"{pair.local_rows} and {pair.remote_rows} rows"
                lines.append(f"  {workers}: {_text(pair.lengths)}; {rows}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        moved = f"{count(self.num_bytes, 'byte')} in {count(self.num_descriptors, 'descriptor')}"
        return f"<Cost of {count(self.tokens, 'token')}: {moved}>"


def cost(
    direction: Direction, pairs: Iterable[tuple[Key, Pair]], tokens: int | None = None
) -> Cost:
    """Return the cost of pairs for a request of ``tokens`` positions.

    Each pair comes with the key of its local worker. ``None`` counts the fewest positions after
    which all pairs repeat.

    Raises ``TYPE`` or ``RANGE`` for a bad number of tokens, and ``RANGE`` for what is too large to
    list.
    """
    keys_and_pairs = list(pairs)
    if tokens is None:
        tokens = 1
        for _, pair in keys_and_pairs:
            for groups in pair.group_pairs:
                _, period_tokens = in_tokens(groups.groups[0], (0, groups.period))
                tokens = math.lcm(tokens, period_tokens)
    else:
        tokens = integer(tokens, "tokens of a request", high=POSITION_END)
    budget = Budget()
    for _, pair in keys_and_pairs:
        spend_on_listed(budget, pair, tokens)
    pair_costs = [_pair_cost(direction, *pair, tokens) for pair in keys_and_pairs]
    return Cost(direction.operation, tokens, tuple(pair_costs))


def _pair_cost(direction: Direction, local: Key, pair: Pair, tokens: int) -> PairCost:
    tables = direction.by_role(pair.local_table, pair.remote_table)
    num_ids = 0
    lengths = Counter[int]()
    for group_pair in pair.group_pairs:
        _, num_positions = in_slots(group_pair.groups[0], (0, tokens))
        group_cost = of_groups(tables, group_pair, num_positions)
        num_ids += group_cost.num_ids
        lengths.update(group_cost.lengths)
    num_rows = len(pair.local_table.rows), len(pair.remote_table.rows)
    return PairCost(local, pair.remote, *num_rows, num_ids, _ascending(lengths))


class GroupCost(NamedTuple):
    """The number of ids, and of descriptors by length, between two groups."""

    num_ids: int
    lengths: Mapping[int, int]


def of_groups(tables: tuple[Table, Table], pair: GroupPair, num_positions: int) -> GroupCost:
    """Return the cost of the first ``num_positions``, or of one state."""
    num_ids = 0
    lengths = Counter[int]()
    # Every period costs the same, so one is counted for all of them.
    for times, stop in _periods(pair, num_positions):
        listed = _count_listed(tables, pair, stop)
        num_ids += times * listed.num_ids
        for length, number in listed.lengths.items():
            lengths[length] += times * number
    return GroupCost(num_ids, lengths)


def _periods(pair: GroupPair, num_positions: int) -> list[tuple[int, int]]:
    """Return ``num_positions``, or one state, as whole periods and a rest.

    Each is how often it is counted, and how many positions it has.
    """
    num_units = 1 if pair.groups[0].is_state else num_positions
    num_periods, rest = divmod(num_units, pair.period)
    counted = [(num_periods, pair.period), (1, rest)]
    return [(times, stop) for times, stop in counted if times and stop]


def spend_on_listed(budget: Budget, pair: Pair, tokens: int) -> None:
    """Spend what the listed descriptors cost: a hostile peer's may be many."""
    num_listed = 0
    for group_pair in pair.group_pairs:
        _, num_positions = in_slots(group_pair.groups[0], (0, tokens))
        for _, stop in _periods(group_pair, num_positions):
            for series, (low, high) in group_pair.moves(0, stop):
                num_listed += series.base.shape[1] * series.num_starts(low, high)
    subject = f"count the descriptors with {label_of(pair.remote)}"
    budget.spend(num_listed, "descriptors", DESCRIPTOR_BYTES, subject)


def _count_listed(tables: tuple[Table, Table], pair: GroupPair, stop: int) -> GroupCost:
    """Return the cost of the positions ``[0, stop)``, at most one period."""
    listed = []
    for series, (low, high) in pair.moves(0, stop):
        occurrences = series.occurrences(pair.groups, low, high)
        if occurrences.ordinals[0].size:
            listed.append(_descriptors(tables, series, occurrences))
    if not listed:
        return GroupCost(0, {})
    every = BlockDescriptors.concatenate(listed)
    # Descriptors of one block on each side that continue each other are one.
    order, first = find_chains([*every.ordinal, *every.region], every.offset, every.length)
    joined = np.add.reduceat(every.length[order], first)
    return GroupCost(every.length.size, Counter(joined.tolist()))


@attrs.frozen(eq=False)
class BlockDescriptors(Arrays):
    """Descriptors of a series, (2, n) but for ``length``, (n,).

    ``ordinal`` is that of the block in the request, ``offset`` that in block 0 within the region:
    two descriptors are neighbours only if they are in one block.
    """

    ordinal: Ints
    region: Ints
    offset: Ints
    length: Ints


def _descriptors(
    tables: tuple[Table, Table], series: Series, occurrences: Occurrences
) -> BlockDescriptors:
    ordinals = []
    regions = []
    offsets = []
    lengths = []
    for side, table in enumerate(tables):
        # (runs, occurrences): the id of every run in block 0, and its row.
        ordinal = occurrences.ordinals[side]
        slot_terms = occurrences.slot_terms[side]
        ids = np.broadcast_to(series.base[side], (len(series.base[side]), ordinal.size))
        ids = ids.astype(np.int64) + (0 if slot_terms is None else slot_terms)
        row = table.row_of(ids)
        region = table.region[row]
        row_offset = (table.rows[row, 0] - bases(table.regions)[0][region]).astype(np.int64)
        stride = table.rows[row, 3].astype(np.int64)
        offsets.append((row_offset + (ids - table.first[row]) * stride).reshape(-1))
        ordinals.append(np.broadcast_to(ordinal, ids.shape).reshape(-1))
        regions.append(region.reshape(-1))
        lengths.append(table.rows[row, 1].astype(np.int64).reshape(-1))
    # both sides of a descriptor are equally long
    return BlockDescriptors(np.stack(ordinals), np.stack(regions), np.stack(offsets), lengths[0])


def _ascending(lengths: Mapping[int, int]) -> Mapping[int, int]:
    return dict(sorted(lengths.items()))


def _sum(lengths_of_pairs: Iterable[Mapping[int, int]]) -> Mapping[int, int]:
    total = Counter[int]()
    for lengths in lengths_of_pairs:
        total.update(lengths)
    return _ascending(total)


def _text(lengths: Mapping[int, int]) -> str:
    """Return the number of bytes and of descriptors, with their lengths, as text."""
    if not lengths:
        return "no bytes"
    sizes = [count(length, "byte") for length in lengths]
    if len(lengths) == 1:
        lengths_text = sizes[0]
    elif len(lengths) <= MAX_LENGTHS_SHOWN:
        times = zip(sizes, lengths.values(), strict=True)
        lengths_text = " and ".join(f"{size} ({number})" for size, number in times)
    else:
        lengths_text = f"{sizes[0]} to {sizes[-1]}"
    num_bytes = sum(length * number for length, number in lengths.items())
    descriptors = count(sum(lengths.values()), "descriptor")
    return f"{count(num_bytes, 'byte')} in {descriptors} of {lengths_text}"
