"""Bind (B): a request's block tables become descriptor ids.

- B1: blocks pair by position. A block's ordinal in the request, never its place in a list, says which positions it
  holds.
- B2: exactly the positions of the range move. Runs between the outermost cuts inside the range move as they are,
  what is left at its two ends token by token.
- B3: an id is ``base + step * block id + sub``, one broadcast add for all strands of a family. Inside a strand ids
  follow positions, so neighbouring blocks are neighbouring ids.
- B4: whatever is wrong with the tables or the range is an error before any id is made.
- B5: pairs that differ in where their rows begin alone have the same ids, made once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, read_only
from kvplan._checks import ID_END, integer, wrong_type
from kvplan._text import shown
from kvplan.describe.blocks import POSITION_END, Blocks, Range, Tokens, check_listed, places
from kvplan.describe.views import Group
from kvplan.errors import KVPlanError
from kvplan.plan.align import before, ends, local_index, position_of, reach, repeated, slots, stand
from kvplan.plan.rows import Family, Layout

Ids = npt.NDArray[np.int32]
Sides = tuple[str, str]


class Workspace:
    """Memory for the ids of one request after another, for loops that bind many.

    Fresh memory costs more than the ids in it: every page of it is mapped anew. Specs that were bound with a workspace
    are good until the next ``bind`` with it.

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
        """Makes all memory free again, as much of it as was ever taken at once."""
        if self._used > self._ids.size:
            self._ids = np.empty(self._used, np.int32)
        self._used = 0

    def take(self, number: int) -> Ids:
        """Memory for a number of ids on each side, (2, number); fresh where the workspace has too little as yet."""
        start, self._used = self._used, self._used + 2 * number
        if self._used > self._ids.size:
            return np.empty((2, number), np.int32)
        return self._ids[start : self._used].reshape(2, number)


Terms = tuple[Ids | Ints, Ids | Ints]
"""Ids of both sides as sums, destination first: strands, (2, n, 1), and what each run or token of the request adds to
them, (2, 1, m)."""

Shapes = tuple[tuple[int, int], ...]

Taken = tuple[Ids, Ints | None]
"""Block ids of one side, one for each run or token, and what their slots add, if anything."""


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
    """The range that a request names for a local group, checked."""
    if isinstance(tokens, Mapping):
        given = tokens.get(group.name)
    else:
        given = None if group.tokens_per_block is None else tokens
    if given is None:
        return None
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise wrong_type("a range of tokens", "(start, stop)", given)
    start, stop = (integer(value, "a token range", high=POSITION_END) for value in given)
    if start > stop:
        raise KVPlanError(
            "TOKENS", "bind tokens", expected="start <= stop", got=f"[{start}, {stop})", tokens=(start, stop)
        )
    return start, stop


def wanted(group: Group, table: Blocks, given: Range | None, side: str) -> Range:
    """The positions of a range that a destination wants: those of its blocks, where there is no range, or a gap."""
    if given is not None and not table.has_gaps:
        return given
    low, high = reach(group, table.first, table.stop - table.first)
    if given is None:
        return low, high
    start, stop = (before(group, position) for position in given)
    if start < stop:
        check_listed(group.name, start // slots(group), -(-stop // slots(group)), *table.listed, side)
    return max(low, given[0]), min(high, given[1])


def terms(layout: Layout, blocks: Sequence[Blocks], tokens: Range, sides: Sides) -> Iterator[Terms]:
    """The ids of one section: one pair of terms for each family and range that has any.

    ``sides`` are what messages call the destination's tables and the source's.
    """
    ranges = shared(layout, *tokens)
    for family in layout.families:
        for begin, end in ranges[family.share]:
            if begin < end and (rows := _rows(layout.groups, family, blocks, begin, end, sides)) is not None:
                yield family.base, rows


def shared(layout: Layout, start: int, stop: int) -> Mapping[str, tuple[Range, ...]]:
    """The positions of ``[start, stop)`` that families take, by their share, rule B2."""
    low, high = _whole(layout, start, stop)
    return {"runs": ((low, high),), "ends": ((start, low), (high, stop)), "all": ((start, stop),)}


def _whole(layout: Layout, start: int, stop: int) -> Range:
    """The part of ``[start, stop)`` that no run sticks out of, rule B2."""
    low, high = start, stop
    if (span := _span(layout, start)) is not None:
        low = span[1]
    if (span := _span(layout, stop)) is not None:
        high = span[0]
    return (low, high) if low < high else (stop, stop)


def _span(layout: Layout, position: int) -> Range | None:
    """The span of the cuts, if any, that has a position inside it."""
    turn, rest = divmod(position, layout.period)
    i = bisect_left(layout.cuts, (rest, 0)) - 1
    if i < 0 or layout.cuts[i][1] <= rest:
        return None
    begin, end = layout.cuts[i]
    return turn * layout.period + begin, turn * layout.period + end


def _rows(
    groups: Sequence[Group], family: Family, blocks: Sequence[Blocks], begin: int, end: int, sides: Sides
) -> Ids | Ints | None:
    """``step * block id + sub`` of each position of a family in ``[begin, end)``, if there are any."""
    gaps = blocks[0].scattered is not None or blocks[1].scattered is not None
    found = (_by_position if gaps or family.turns is None else _by_turn)(groups, family, blocks, begin, end, sides)
    if not found:
        return None
    rows = np.empty((2, 1, found[0][0].size), family.base.dtype)
    for i, (ids, sub) in enumerate(found):
        rows[i] = ids
        if family.step[i] != 1:
            rows[i] *= family.step[i]
        if sub is not None:
            rows[i] += sub
    return rows


def _by_turn(
    groups: Sequence[Group], family: Family, blocks: Sequence[Blocks], begin: int, end: int, sides: Sides
) -> list[Taken]:
    """What a family takes of tables without gaps, with no arithmetic on positions: slices, where they can be."""
    low, high, per_turn = family.before(begin), family.before(end), family.starts.size
    if low == high:
        return []
    (first, start), (last, stop) = divmod(low, per_turn), divmod(high - 1, per_turn)
    found: list[Taken] = []
    for i, turn in enumerate(family.turns or ()):
        table, skipped = blocks[i], first * turn.num_blocks
        at = skipped + turn.ordinal.item(start)
        to = last * turn.num_blocks + turn.ordinal.item(stop) + 1
        check_listed(groups[i].name, at, to, table.first, table.stop, sides[i])
        if turn.step:
            ids = table.ids[at - table.first : to - table.first : turn.step]
        else:
            begins = np.arange(skipped - table.first, to - table.first, turn.num_blocks)
            ids = table.ids[np.add.outer(begins, turn.ordinal).reshape(-1)[start : start + high - low]]
        sub = turn.sub
        if sub is not None:
            sub = sub[None].repeat(last - first + 1, axis=0).reshape(-1)[start : start + high - low]
        found.append((ids, sub))
    return found


def _by_position(
    groups: Sequence[Group], family: Family, blocks: Sequence[Blocks], begin: int, end: int, sides: Sides
) -> list[Taken]:
    """What a family takes of any tables: position by position, its blocks' ordinals and its slots."""
    found = ends(family.starts, family.every, begin, end)
    if found is None or not (position := _positions(groups[0], family, blocks[0], *found)).size:
        return []
    ordinals, slot = stand(groups, position)
    each = zip(groups, blocks, ordinals, sides, strict=True)
    at = [places(group.name, table, which, side) for group, table, which, side in each]
    return [(table.ids[at[i]], family.sub[i][slot[i]]) for i, table in enumerate(blocks)]


def _positions(group: Group, family: Family, table: Blocks, first: int, last: int) -> Ints:
    """The positions of a family from ``first`` to ``last`` that a destination has blocks for."""
    if table.scattered is None:
        return repeated(family.starts, family.every, first, last + 1)
    size = slots(group)
    low, high = np.searchsorted(table.scattered, [local_index(group, at) // size for at in (first, last)])
    position = position_of(group, np.add.outer(table.scattered[low : high + 1] * size, np.arange(size)).reshape(-1))
    position = position[(first <= position) & (position <= last)]
    return position[np.isin(position % family.every, family.starts)]


def add(parts: Sequence[Terms], workspace: Workspace | None) -> tuple[Ids, Shapes]:
    """All ids, (2, n), one broadcast add for each of the terms, and of each its strands and its runs or tokens.

    Raises ``INT`` if an id does not fit 31 bits.
    """
    shapes = tuple([(base.shape[1], rows.shape[2]) for base, rows in parts])
    number, start = sum([strands * each for strands, each in shapes]), 0
    ids = np.empty((2, number), np.int32) if workspace is None else workspace.take(number)
    for (base, rows), (strands, each) in zip(parts, shapes, strict=True):
        if base.itemsize > ids.itemsize:
            base, rows = _narrow(base, rows)
        stop = start + strands * each
        np.add(base, rows, ids[:, start:stop].reshape(2, strands, each))
        start = stop
    return read_only(ids), shapes


def _narrow(base: Ids | Ints, rows: Ids | Ints) -> Terms:
    """Terms of tables that have more ids than fit, as int32, if these do."""
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
