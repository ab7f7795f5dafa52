"""Bind (B): turns the block tables of a request into descriptor ids.

- B1: Blocks pair by position. The ordinal of a block in the request determines its positions, not its index in a list.
- B2: Exactly the positions of the range move. Runs inside the range move whole; what the range cuts off at its two ends
  moves token by token.
- B3: An id is ``base + step * block id + sub``: one broadcast addition for all runs of a series. The ids of one run
  follow the positions, so neighbouring blocks get neighbouring ids.
- B4: Everything wrong with the tables or the range is an error before any id is computed.
- B5: Pairs whose rows differ only in where they begin share their ids, computed once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, listed, read_only
from kvplan._checks import ID_END, at_most, interval
from kvplan._text import shown
from kvplan.describe.blocks import POSITION_END, Blocks, Range, Tokens, check_listed, places
from kvplan.describe.views import Group
from kvplan.errors import KVPlanError
from kvplan.plan.align import (
    before,
    blocks_and_slots,
    ends,
    local_index,
    position_of,
    reach,
    repeated,
    slots,
)
from kvplan.plan.rows import GroupPair, RunIds, TokenIds

MAX_IDS: Final = 1 << 28
"""The most ids of one request with one remote worker: 2 GiB for both sides."""

UNBUFFERED: Final = 256
"""Occurrences from which additions are faster without numpy's buffers: by 1.2 at 256, by 3 at 2,000. Numpy copies
broadcast rows into buffers of 8,192 elements, unless three of them exceed one."""

Ids = npt.NDArray[np.int32]
Sides = tuple[str, str]


class Workspace:
    """Reusable memory for ids, for loops that bind many requests.

    Fresh memory costs more than computing the ids, because the system maps every page anew. Specs that were bound with
    a workspace are valid until the next ``bind`` with it. Threads must not share one: each has its own.

    >>> from kvplan import Blocks, Model, Workspace, plan_reads
    >>> (decode,), (prefill,) = (Model.shipped("qwen2.5-1.5b").engine(name, num_blocks=9) for name in "dp")
    >>> plan, workspace = plan_reads(decode, [prefill]), Workspace()
    >>> for block in (3, 4):
    ...     tables = {"attn": Blocks([block])}
    ...     (spec,) = plan.bind(local=tables, remote=tables, workspace=workspace)
    ...     print(spec.local_ids[:3])
    [ 3 12 21]
    [ 4 13 22]
    """

    def __init__(self) -> None:
        self._ids = np.empty(0, np.int32)
        self._used = 0

    def clear(self) -> None:
        """Free all memory for the next request, and grow it to the most that one request has needed."""
        if self._used > self._ids.size:
            self._ids = np.empty(self._used, np.int32)
        self._used = 0

    def take(self, number: int) -> Ids:
        """Memory for the ids of both sides, (2, number) int32; newly allocated if the workspace is too small."""
        start, self._used = self._used, self._used + 2 * number
        if self._used > self._ids.size:
            return np.empty((2, number), np.int32)
        return self._ids[start : self._used].reshape(2, number)


Terms = tuple[Ids | Ints, Ids | Ints]
"""Ids of both sides as sums, destination first: the ids of the runs in block 0, (2, n, 1), and what each occurrence of
the runs in the request adds to them, (2, 1, m)."""

Shapes = tuple[tuple[int, int], ...]

Occurrences = tuple[Ids, Ints | None]
"""The block ids of one side, one for each occurrence, and what their slots add to the ids, or ``None``."""


def check_names(known: Collection[str], given: Iterable[str], what: str) -> None:
    for name in given:
        if name not in known:
            raise KVPlanError(
                "NAME",
                f"bind a {what}",
                expected=f"a group of {', '.join(map(repr, sorted(known))) or 'none'}",
                got=shown(name),
                group=name,
            )


def range_of(tokens: Tokens, group: Group) -> Range | None:
    """The checked range of a local group; ``None`` if the request gives it none."""
    if isinstance(tokens, Mapping):
        given = tokens.get(group.name)
    else:
        given = None if group.tokens_per_block is None else tokens
    if given is None:
        return None
    start, stop = interval(given, "a range of tokens", POSITION_END)
    if start > stop:
        raise KVPlanError(
            "TOKENS",
            "bind tokens",
            expected="start <= stop",
            got=f"[{start}, {stop})",
            tokens=(start, stop),
        )
    return start, stop


def wanted(group: Group, table: Blocks, given: Range | None, side: str) -> Range:
    """The positions to move: the given range, reduced to the destination's blocks if it has gaps or gives no range."""
    if given is not None and not table.has_gaps:
        return given
    low, high = reach(group, table.first, table.stop - table.first)
    if given is None:
        return low, high
    start, stop = (before(group, position) for position in given)
    if start < stop:
        check_listed(
            group.name, start // slots(group), -(-stop // slots(group)), *table.listed, side
        )
    return max(low, given[0]), min(high, given[1])


def terms(
    pair: GroupPair, blocks: Sequence[Blocks], tokens: Range, sides: Sides
) -> Iterator[Terms]:
    """The ids of one pair of groups: terms for each series and each range in which it has positions.

    ``blocks`` and ``sides``, the names of the tables in messages, have the destination's first.
    """
    inside, ends = split(pair, *tokens)
    for runs in pair.runs:
        if (taken := _of_runs(pair.groups, runs, blocks, inside, sides)) is not None:
            yield runs.base, _sums(runs, taken)
    for one in pair.tokens:
        for given in ends if one.joined else (tokens,):
            if (taken := _of_tokens(pair.groups, one, blocks, given, sides)) is not None:
                yield one.base, _sums(one, taken)


def split(pair: GroupPair, start: int, stop: int) -> tuple[Range, tuple[Range, ...]]:
    """The part of ``[start, stop)`` that moves by joined runs, and the parts that move token by token, by rule B2."""
    low, high = _whole(pair, start, stop)
    return (low, high), tuple(
        given for given in ((start, low), (high, stop)) if given[0] < given[1]
    )


def _whole(pair: GroupPair, start: int, stop: int) -> Range:
    """The part of ``[start, stop)`` between runs that a range cuts, rule B2."""
    low, high = start, stop
    if (span := _span(pair, start)) is not None:
        low = span[1]
    if (span := _span(pair, stop)) is not None:
        high = span[0]
    return (low, high) if low < high else (stop, stop)


def _span(pair: GroupPair, position: int) -> Range | None:
    """The span in the cuts that has ``position`` strictly inside, or ``None``."""
    turn, rest = divmod(position, pair.period)
    i = bisect_left(pair.cuts, (rest, 0)) - 1
    if i < 0 or pair.cuts[i][1] <= rest:
        return None
    begin, end = pair.cuts[i]
    return turn * pair.period + begin, turn * pair.period + end


def _sums(ids: RunIds | TokenIds, taken: Sequence[Occurrences]) -> Ids | Ints:
    """``step * block id + sub`` of every occurrence, (2, 1, occurrences)."""
    blocks, sub = taken[0]
    rows = np.empty((2, 1, blocks.size if sub is None else sub.size), ids.base.dtype)
    for i, (blocks, sub) in enumerate(taken):
        rows[i] = blocks  # one block for each occurrence, or one for all of them
        if ids.step[i] != 1:
            rows[i] *= ids.step[i]
        if sub is not None:
            rows[i] += sub
    return rows


def _of_runs(
    groups: Sequence[Group], runs: RunIds, blocks: Sequence[Blocks], tokens: Range, sides: Sides
) -> list[Occurrences] | None:
    """Block ids and slot terms of the runs that begin in ``tokens``: slices of the tables where blocks step evenly."""
    low, high = runs.before(tokens[0]), runs.before(tokens[1])
    if low >= high:
        return None
    if blocks[0].scattered is not None or blocks[1].scattered is not None:
        return _of_runs_with_gaps(groups, runs, blocks, (low, high), sides)
    size = runs.starts.size
    (first, start), (last, stop) = divmod(low, size), divmod(high - 1, size)
    found: list[Occurrences] = []
    for group, side, table, name in zip(groups, runs.blocks, blocks, sides, strict=True):
        # The run numbered `low` begins in block `at`, the last one in block `to - 1`.
        skipped = first * side.num_blocks
        at = skipped + side.ordinal.item(start)
        to = last * side.num_blocks + side.ordinal.item(stop) + 1
        check_listed(group.name, at, to, table.first, table.stop, name)
        if side.step:
            ids = table.ids[at - table.first : to - table.first : side.step]
        else:
            begins = np.arange(skipped - table.first, to - table.first, side.num_blocks)
            ids = table.ids[
                np.add.outer(begins, side.ordinal).reshape(-1)[start : start + high - low]
            ]
        sub = side.sub
        if sub is not None and size > 1:
            sub = sub[None].repeat(last - first + 1, axis=0).reshape(-1)[start : start + high - low]
        found.append((ids, sub))
    return found


def _of_runs_with_gaps(
    groups: Sequence[Group], runs: RunIds, blocks: Sequence[Blocks], which: Range, sides: Sides
) -> list[Occurrences] | None:
    """Block ids and slot terms of the runs with numbers in ``which`` whose blocks the destination has."""
    ours, size = runs.blocks[0], runs.starts.size
    at, to = (
        number // size * ours.num_blocks + ours.ordinal[number % size]
        for number in (which[0], which[1] - 1)
    )
    ordinals = blocks[0].ordinals
    ordinals = ordinals[(at <= ordinals) & (ordinals <= to)]
    # For each of the destination's blocks, the period it is in, and which runs of a period begin in it.
    turn, rest = np.divmod(ordinals, ours.num_blocks)
    begin, end = np.searchsorted(ours.ordinal, [rest, rest + 1])
    run = listed(np.stack([turn * size + begin, turn * size + end], axis=1))
    run = run[(which[0] <= run) & (run < which[1])]
    if not run.size:
        return None
    turn, start = np.divmod(run, size)
    found: list[Occurrences] = []
    for group, side, table, name in zip(groups, runs.blocks, blocks, sides, strict=True):
        at = places(group.name, table, turn * side.num_blocks + side.ordinal[start], name)
        found.append((table.ids[at], None if side.sub is None else side.sub[start]))
    return found


def _of_tokens(
    groups: Sequence[Group], one: TokenIds, blocks: Sequence[Blocks], tokens: Range, sides: Sides
) -> list[Occurrences] | None:
    """Block ids and slot terms of every position in ``tokens`` for which the destination has a block."""
    if tokens[0] >= tokens[1]:
        return None
    if (
        one.every == 1
        and (taken := _of_one_block_pair(groups, one, blocks, *tokens, sides)) is not None
    ):
        return taken
    ends_of = ends(one.carried, one.every, *tokens)
    if ends_of is None or not (position := _positions(groups[0], one, blocks[0], *ends_of)).size:
        return None
    ordinals, slot = blocks_and_slots(groups, position)
    each = zip(groups, blocks, ordinals, sides, strict=True)
    at = [places(group.name, table, which, side) for group, table, which, side in each]
    return [(table.ids[at[i]], one.sub[i][slot[i]]) for i, table in enumerate(blocks)]


def _of_one_block_pair(
    groups: Sequence[Group],
    one: TokenIds,
    blocks: Sequence[Blocks],
    start: int,
    stop: int,
    sides: Sides,
) -> list[Occurrences] | None:
    """What :func:`_of_tokens` returns, by slices, if all positions are in one block of each side; else ``None``."""
    found: list[Occurrences] = []
    for group, sub, table, name in zip(groups, one.sub, blocks, sides, strict=True):
        ordinal, slot = divmod(start, slots(group))
        if slot + stop - start > slots(group) or table.scattered is not None:
            return None
        check_listed(group.name, ordinal, ordinal + 1, table.first, table.stop, name)
        at = ordinal - table.first
        found.append((table.ids[at : at + 1], sub[slot : slot + stop - start]))
    return found


def _positions(group: Group, one: TokenIds, table: Blocks, first: int, last: int) -> Ints:
    """The positions from ``first`` to ``last`` that move token by token and for which the destination has blocks."""
    if table.scattered is None:
        return repeated(one.carried, one.every, first, last + 1)
    size = slots(group)
    low, high = np.searchsorted(
        table.scattered, [local_index(group, at) // size for at in (first, last)]
    )
    position = position_of(
        group, np.add.outer(table.scattered[low : high + 1] * size, np.arange(size)).reshape(-1)
    )
    position = position[(first <= position) & (position <= last)]
    return position[np.isin(position % one.every, one.carried)]


def add(parts: Sequence[Terms], workspace: Workspace | None) -> tuple[Ids, Shapes]:
    """All ids, (2, n) int32, by one broadcast addition for each of the terms; and the shape of each addition.

    Raises ``INT`` if an id does not fit 31 bits.
    """
    shapes = tuple([(base.shape[1], rows.shape[2]) for base, rows in parts])
    number, start = sum([runs * each for runs, each in shapes]), 0
    at_most(MAX_IDS, number, "ids with one worker", "bind a request")
    ids = np.empty((2, number), np.int32) if workspace is None else workspace.take(number)
    usual = np.setbufsize(16) if any(each >= UNBUFFERED for _, each in shapes) else None
    try:
        for (base, rows), (runs, each) in zip(parts, shapes, strict=True):
            if base.itemsize > ids.itemsize:
                base, rows = _narrow(base, rows)
            stop = start + runs * each
            np.add(base, rows, ids[:, start:stop].reshape(2, runs, each))
            start = stop
    finally:
        if usual is not None:
            np.setbufsize(usual)
    return read_only(ids), shapes


def _narrow(base: Ids | Ints, rows: Ids | Ints) -> Terms:
    """The terms as int32, from tables with more ids than fit; the ids of these terms must fit."""
    last = int((base.max(axis=1) + rows.max(axis=2)).max())
    if last >= ID_END:
        raise KVPlanError(
            "INT",
            "number the descriptors of a request",
            expected=f"ids below {ID_END}",
            got=f"{last}",
            hint="a smaller pool, or fewer tensors per plan, has fewer ids",
            id=last,
        )
    return base.astype(np.int32), rows.astype(np.int32)
