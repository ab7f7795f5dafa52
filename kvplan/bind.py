"""Bind (B): a request's block tables become descriptor ids.

- B1: blocks pair by position. A block's ordinal in the request, never its place in a list, says which positions it
  holds.
- B2: exactly the positions of the range move. Runs between the outermost cuts inside the range move as they are,
  what is left at its two ends token by token.
- B3: an id is ``base + step * block id + sub``, one broadcast add for all strands of a family. Inside a strand ids
  follow positions, so neighbouring blocks are neighbouring ids.
- B4: whatever is wrong with the tables or the range is an error before any id is made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.align import ends, local_index, repeated, slots, stand
from kvplan.axes import Ints
from kvplan.errors import KVPlanError
from kvplan.reading import integer, shown, wrong_type
from kvplan.tables import ID_END, Family, Layout, read_only
from kvplan.views import Group

Ids = npt.NDArray[np.int32]
Range = tuple[int, int]
POSITION_END: Final = 1 << 48


def _block_ids(values: Any) -> Ints:
    try:
        array = np.asarray(values)
    except ValueError:
        raise wrong_type("a block table", "a flat sequence of integers", values) from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        got = f"{array.dtype} of shape {array.shape}"
        raise KVPlanError("TYPE", "read a block table", expected="a flat sequence of integers", got=got)
    owned = read_only(array.astype(np.int64))
    if array.size and owned.view(np.uint64).max() >= ID_END:
        wrong = int(next(id_ for id_ in array if not 0 <= id_ < ID_END))
        raise KVPlanError("BLOCKS", "read a block table", expected=f"ids in [0, {ID_END})", got=f"{wrong}", id=wrong)
    return owned


def _first(value: Any) -> int:
    return integer(value, "first of Blocks", high=POSITION_END)


@attrs.frozen(eq=False)
class Blocks:
    """The ids of consecutive blocks of a request in one group; ``first`` is the first one's ordinal.

    >>> Blocks([7, 3, 9], first=2)
    Blocks([7, 3, 9], first=2)
    """

    ids: Ints = attrs.field(converter=_block_ids)
    first: int = attrs.field(default=0, converter=_first)

    @cached_property
    def highest(self) -> int:
        """The highest id, -1 where there is none."""
        return int(self.ids.max()) if self.ids.size else -1

    @cached_property
    def twice(self) -> int | None:
        """An id that stands more than once, if there is one."""
        ordered = np.sort(self.ids)
        same = ordered[1:] == ordered[:-1]
        return int(ordered[same.argmax()]) if same.any() else None

    def __repr__(self) -> str:
        return f"Blocks({self.ids.tolist()}, first={self.first})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, (self.ids.tolist(), self.first)


def check_blocks(key: str, blocks: object, num_blocks: int, is_destination: bool) -> None:
    """One group's block table against the smallest pool that it indexes. A destination block may stand once."""
    if blocks is None:
        raise KVPlanError("BLOCKS", f"bind group {key!r}", expected="a block table", got="none", group=key)
    if not isinstance(blocks, Blocks):
        raise KVPlanError("TYPE", f"bind group {key!r}", expected="Blocks", got=shown(blocks), group=key)
    if blocks.highest >= num_blocks:
        raise KVPlanError(
            "BLOCKS",
            f"bind group {key!r}",
            expected=f"block ids below {num_blocks}, the pool's size",
            got=f"{blocks.highest}",
            group=key,
            num_blocks=num_blocks,
            id=blocks.highest,
        )
    if is_destination and blocks.twice is not None:
        raise KVPlanError(
            "BLOCKS",
            f"bind group {key!r}",
            expected="each destination block once",
            got=f"block {blocks.twice} twice",
            group=key,
            id=blocks.twice,
        )


Terms = tuple[Ints, Ints]
"""Ids as sums: a column of strands, and a row of what each run or token of the request adds to them."""


def terms(layout: Layout, blocks: Sequence[Blocks], tokens: Range) -> Iterator[tuple[Terms, Terms]]:
    """The ids of one section, destination first: one pair of terms for each family and range that has any."""
    start, stop = tokens
    low, high = _whole(layout, start, stop)
    ranges = {"runs": ((low, high),), "ends": ((start, low), (high, stop)), "all": ((start, stop),)}
    for family in layout.families:
        for begin, end in ranges[family.share]:
            if begin < end and (reach := ends(family.starts, family.every, begin, end)) is not None:
                ours, theirs = _rows(layout.groups, family, blocks, *reach)
                yield (family.base[0], ours), (family.base[1], theirs)


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


def _rows(groups: Sequence[Group], family: Family, blocks: Sequence[Blocks], first: int, last: int) -> list[Ints]:
    """``step * block id + sub`` of each position of a family from ``first`` to ``last``, each side.

    A family that always begins in the same slot takes every nth block: a slice of the table, no arithmetic on slots.
    """
    spans = [_listed(group, table, first, last) for group, table in zip(groups, blocks, strict=True)]
    if family.advance:
        taken = zip(blocks, spans, family.advance, strict=True)
        rows = [table.ids[low : high + 1 : n] for table, (low, high), n in taken]
        return [ids if step == 1 else ids * step for ids, step in zip(rows, family.step, strict=True)]
    block, slot = stand(groups, repeated(family.starts, family.every, first, last + 1))
    return [
        table.ids[at - table.first] * step + sub[where]
        for table, at, step, sub, where in zip(blocks, block, family.step, family.sub, slot, strict=True)
    ]


def _listed(group: Group, table: Blocks, first: int, last: int) -> Range:
    """Where a block table lists the blocks of two positions, which it must."""
    low, high = (local_index(group, position) // slots(group) for position in (first, last))
    if low < table.first or high >= table.first + table.ids.size:
        raise KVPlanError(
            "BLOCKS",
            f"bind group {group.name!r}",
            expected=f"blocks [{low}, {high + 1}) of the request to be listed",
            got=f"[{table.first}, {table.first + table.ids.size})",
            group=group.name,
            needed=(low, high + 1),
            listed=(table.first, table.first + table.ids.size),
        )
    return low - table.first, high - table.first


def add(parts: Sequence[Terms]) -> Ids:
    """All ids of one side, one broadcast add for each of the terms. Raises ``INT`` if an id does not fit 31 bits."""
    if len(parts) == 1:
        return read_only(_sum(*parts[0]).reshape(-1))
    sizes = [strand.size * row.size for strand, row in parts]
    ids, done = np.empty(sum(sizes), np.int32), 0
    for (strand, row), size in zip(parts, sizes, strict=True):
        _sum(strand, row, ids[done : done + size].reshape(strand.size, row.size))
        done += size
    return read_only(ids)


def _sum(strand: Ints, row: Ints, out: Ids | None = None) -> Ids:
    narrow: Ids = strand.astype(np.int32, copy=False)
    if narrow is not strand and (last := int(strand.max()) + int(row.max())) >= ID_END:
        raise KVPlanError(
            "INT",
            "number the descriptors of a request",
            expected=f"ids below {ID_END}",
            got=f"{last}",
            hint="a smaller pool, or fewer tensors per plan, has fewer ids",
            id=last,
        )
    ids: Ids = np.add(narrow, row.astype(np.int32), out)
    return ids
