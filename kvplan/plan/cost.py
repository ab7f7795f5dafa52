"""Costs: the descriptors, bytes and ids of a request, counted from a plan's tables alone.

The descriptors of a request depend on its block ids only where blocks are neighbours in a pool. If none are, on either
side, the descriptors and their lengths repeat after every period. So one period is listed without block ids and
counted as often as a request contains it; the rest of the request is listed once more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import at_most, integer
from kvplan._text import count
from kvplan.describe.blocks import POSITION_END
from kvplan.describe.worker import Key, label_of
from kvplan.plan.align import blocks_and_slots, repeated
from kvplan.plan.bind import split
from kvplan.plan.rows import GroupPair, Table, bases
from kvplan.plan.runs import join
from kvplan.plan.specs import Pair, ReadSpec

MAX_LISTED: Final = 1 << 24
"""The most descriptors of one pair of groups and one period that are listed."""

SHOWN: Final = 3
"""With more lengths than this, only the shortest and the longest are printed."""


@attrs.frozen
class PairCost:
    """The cost of one request between two workers, each named by (engine id, rank).

    ``local_rows`` and ``remote_rows`` are registered once; ``num_ids`` ids are bound on each side. ``lengths`` maps
    each length in bytes, ascending, to the number of coalesced descriptors of that length.
    """

    local: tuple[str, int]
    remote: tuple[str, int]
    local_rows: int
    remote_rows: int
    num_ids: int
    lengths: Mapping[int, int]

    @classmethod
    def of(cls, spec: ReadSpec) -> PairCost:
        """The cost of one bound request."""
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
    """The cost of one request of ``tokens`` positions whose blocks are scattered in their pools. States move once.

    ``pairs`` has every pair of workers, in order, including pairs that exchange nothing. A request whose blocks are
    neighbours in the pools of both sides takes fewer descriptors.

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
        arrow = "<-" if self.operation == "READ" else "->"
        lines = [f"{count(self.tokens, 'token')}: {_text(self.lengths)}"]
        for pair in self.pairs:
            if pair.lengths:
                ends = f"{label_of(pair.local)} {arrow} {label_of(pair.remote)}"
                lines.append(
                    f"  {ends}: {_text(pair.lengths)}; {pair.local_rows} and {pair.remote_rows} rows"
                )
        return "\n".join(lines)

    def __repr__(self) -> str:
        moved = f"{count(self.num_bytes, 'byte')} in {count(self.num_descriptors, 'descriptor')}"
        return f"<Cost of {count(self.tokens, 'token')}: {moved}>"


def cost(operation: str, pairs: Iterable[tuple[Key, Pair]], tokens: int | None = None) -> Cost:
    """The cost of pairs, each with the key of its local worker, for a request of ``tokens`` positions.

    ``None`` counts the fewest positions after which all pairs repeat.

    Raises ``TYPE`` or ``RANGE`` for a bad number of tokens, and ``RANGE`` for what is too large to list.
    """
    every = list(pairs)
    if tokens is None:
        tokens = math.lcm(*(groups.period for _, pair in every for groups in pair.group_pairs))
    else:
        tokens = integer(tokens, "tokens of a request", high=POSITION_END)
    found = []
    for local, pair in every:
        tables = pair.local_table, pair.remote_table
        sides = tables if operation == "READ" else tables[::-1]
        listed = sum(
            _num_listed(each, stop)
            for each in pair.group_pairs
            for _, stop in _periods(each, tokens)
        )
        at_most(
            MAX_LISTED, listed, "to list", f"count the descriptors with {label_of(pair.remote)}"
        )
        known = [of_groups(sides, groups, tokens) for groups in pair.group_pairs]
        rows = len(tables[0].rows), len(tables[1].rows)
        num_ids, lengths = sum(ids for ids, _ in known), _sum(lengths for _, lengths in known)
        found.append(PairCost(local, pair.remote, *rows, num_ids, lengths))
    return Cost(operation, tokens, tuple(found))


def of_groups(
    tables: tuple[Table, Table], pair: GroupPair, tokens: int
) -> tuple[int, Mapping[int, int]]:
    """The number of ids, and of descriptors by length, of the first ``tokens`` positions, or of one state."""
    num_ids, lengths = 0, Counter[int]()
    for times, stop in _periods(pair, tokens):
        ids, found = _listed(tables, pair, stop)
        num_ids += times * ids
        lengths.update({length: times * number for length, number in found.items()})
    return num_ids, lengths


def _periods(pair: GroupPair, tokens: int) -> list[tuple[int, int]]:
    """``tokens`` positions, or one state, as whole periods and a part of one: how often, and how many positions."""
    turns, rest = divmod(1 if pair.groups[0].tokens_per_block is None else tokens, pair.period)
    return [(times, stop) for times, stop in ((turns, pair.period), (1, rest)) if times and stop]


def _num_listed(pair: GroupPair, stop: int) -> int:
    """How many descriptors :func:`_occurrences` lists of the positions ``[0, stop)``."""
    (low, high), ends = split(pair, 0, stop)
    number: int = sum(
        runs.base.shape[1] * (runs.before(high) - runs.before(low)) for runs in pair.runs
    )
    for one in pair.tokens:
        turns = sum(
            -(-(end - begin) // one.every) for begin, end in (ends if one.joined else ((0, stop),))
        )
        number += turns * one.carried.size * one.base.shape[1]
    return number


def _listed(
    tables: tuple[Table, Table], pair: GroupPair, stop: int
) -> tuple[int, Mapping[int, int]]:
    """The number of ids, and of descriptors by length, of the positions ``[0, stop)``, at most one period."""
    parts = [_descriptors(tables, *each) for each in _occurrences(pair, stop)]
    if not parts:
        return 0, {}
    ordinal, region, offset, length = (
        np.concatenate(column, axis=-1) for column in zip(*parts, strict=True)
    )
    order, first = join([*ordinal, *region], offset, length[0])
    return length[0].size, Counter(np.add.reduceat(length[0][order], first).tolist())


def _occurrences(
    pair: GroupPair, stop: int
) -> Iterator[tuple[Ints, Sequence[Ints], Sequence[Ints]]]:
    """For each series of ids with positions in ``[0, stop)``: its ids in block 0, and each occurrence's block and term.

    The ids are (2, runs, 1); the block ordinals and the terms are (occurrences,) for each side.
    """
    (low, high), ends = split(pair, 0, stop)
    for runs in pair.runs:
        which = np.flatnonzero((low <= runs.starts) & (runs.starts < high))
        if which.size:
            terms = [0 * which if side.sub is None else side.sub[which] for side in runs.blocks]
            yield runs.base, [side.ordinal[which] for side in runs.blocks], terms
    for one in pair.tokens:
        for begin, end in ends if one.joined else ((0, stop),):
            position = repeated(one.carried, one.every, begin, end)
            if position.size:
                ordinal, slot = blocks_and_slots(pair.groups, position)
                yield (
                    one.base,
                    [*ordinal],
                    [sub[where] for sub, where in zip(one.sub, slot, strict=True)],
                )


def _descriptors(
    tables: tuple[Table, Table], base: Ints, ordinal: Sequence[Ints], term: Sequence[Ints]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Block ordinal, region, offset in the region, and length of every descriptor of a series, each (2, n).

    Offsets are those in block 0, so two descriptors are neighbours only if they are in one block.
    """
    columns = []
    for table, first, at, more in zip(tables, base, ordinal, term, strict=True):
        ids = first.astype(np.int64) + more
        row = table.row_of(ids)
        region, address = table.region[row], table.rows[row, 0]
        length, stride = (table.rows[row, column].astype(np.int64) for column in (1, 3))
        offset = (address - bases(table.regions)[0][region]).astype(np.int64) + (
            ids - table.first[row]
        ) * stride
        columns.append([np.broadcast_to(at, ids.shape), region, offset, length])
    ordinals, regions, offsets, lengths = (
        np.stack(column).reshape(2, -1) for column in zip(*columns, strict=True)
    )
    return ordinals, regions, offsets, lengths


def _ascending(lengths: Mapping[int, int]) -> Mapping[int, int]:
    return dict(sorted(lengths.items()))


def _sum(several: Iterable[Mapping[int, int]]) -> Mapping[int, int]:
    total = Counter[int]()
    for lengths in several:
        total.update(lengths)
    return _ascending(total)


def _text(lengths: Mapping[int, int]) -> str:
    """The number of bytes and of descriptors, with their lengths, as text."""
    if not lengths:
        return "no bytes"
    sizes = [count(length, "byte") for length in lengths]
    if len(lengths) == 1:
        of = sizes[0]
    elif len(lengths) <= SHOWN:
        of = " and ".join(
            f"{size} ({times})" for size, times in zip(sizes, lengths.values(), strict=True)
        )
    else:
        of = f"{sizes[0]} to {sizes[-1]}"
    total = sum(length * times for length, times in lengths.items())
    return f"{count(total, 'byte')} in {count(sum(lengths.values()), 'descriptor')} of {of}"
