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

from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.align import repeated, stand
from kvplan.axes import Ints, integer
from kvplan.errors import KVPlanError
from kvplan.tables import Family, Layout, read_only

Ids = npt.NDArray[np.int32]
Range = tuple[int, int]
ID_END: Final = 1 << 31
POSITION_END: Final = 1 << 48


def _block_ids(values: Any) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise KVPlanError(
            "TYPE", "read a block table", expected="a flat sequence of integers", got=f"{array.dtype} of {array.shape}"
        )
    for wrong in (array.min(initial=0), array.max(initial=0)):
        if not 0 <= wrong < ID_END:
            raise KVPlanError(
                "BLOCKS", "read a block table", expected=f"ids in [0, {ID_END})", got=f"{wrong}", id=int(wrong)
            )
    owned: Ints = read_only(np.array(array, np.int64))
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

    def __repr__(self) -> str:
        return f"Blocks({self.ids.tolist()}, first={self.first})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, (self.ids.tolist(), self.first)


def check_blocks(key: str, blocks: object, num_blocks: int, is_destination: bool) -> None:
    """One group's block table against the smallest pool that it indexes. A destination block may stand once."""
    if blocks is None:
        raise KVPlanError("BLOCKS", f"bind group {key!r}", expected="a block table", got="none", group=key)
    if not isinstance(blocks, Blocks):
        raise KVPlanError("TYPE", f"bind group {key!r}", expected="Blocks", got=f"{blocks!r}", group=key)
    highest = int(blocks.ids.max(initial=-1))
    if highest >= num_blocks:
        raise KVPlanError(
            "BLOCKS",
            f"bind group {key!r}",
            expected=f"block ids below {num_blocks}, the pool's size",
            got=f"{highest}",
            group=key,
            num_blocks=num_blocks,
            id=highest,
        )
    ordered = np.sort(blocks.ids)
    if is_destination and (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise KVPlanError(
            "BLOCKS",
            f"bind group {key!r}",
            expected="each destination block once",
            got=f"block {twice[0]} twice",
            group=key,
            id=int(twice[0]),
        )


Terms = tuple[Ints, Ints]
"""Ids as sums: a term for each strand, and one for each position of the request."""


def terms(layout: Layout, blocks: Sequence[Blocks], tokens: Range) -> Iterator[tuple[Terms, Terms]]:
    """The ids of one section, destination first, family by family."""
    start, stop = tokens
    low, high = _whole(layout, start, stop)
    ranges = {"runs": [(low, high)], "ends": [(start, low), (high, stop)], "all": [(start, stop)]}
    for family in layout.families:
        position = [repeated(family.starts, family.every, *one) for one in ranges[family.share]]
        ours, theirs = _by_position(layout, family, blocks, np.concatenate(position))
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
    i = int(np.searchsorted(layout.cuts[:, 0], rest)) - 1
    if i < 0 or layout.cuts[i, 1] <= rest:
        return None
    begin, end = layout.cuts[i].tolist()
    return turn * layout.period + begin, turn * layout.period + end


def _by_position(layout: Layout, family: Family, blocks: Sequence[Blocks], position: Ints) -> list[Ints]:
    """``step * block id + sub`` of each position, each side."""
    found = []
    ordinals, slots = stand(layout.groups, position)
    for side, (group, table) in enumerate(zip(layout.groups, blocks, strict=True)):
        index = ordinals[side] - table.first
        if index.size and (index[0] < 0 or index[-1] >= table.ids.size):
            needed = (int(ordinals[side][0]), int(ordinals[side][-1]) + 1)
            listed = (table.first, table.first + table.ids.size)
            raise KVPlanError(
                "BLOCKS",
                f"bind group {group.name!r}",
                expected=f"blocks [{needed[0]}, {needed[1]}) of the request to be listed",
                got=f"[{listed[0]}, {listed[1]})",
                group=group.name,
                needed=needed,
                listed=listed,
            )
        found.append(table.ids[index] * family.step[side] + family.sub[side][slots[side]])
    return found


def add(parts: Sequence[Terms]) -> Ids:
    """All ids of one side, one broadcast add per family. Raises ``INT`` where an id does not fit 31 bits."""
    ids = np.empty(sum(strand.size * variable.size for strand, variable in parts), np.int32)
    done = 0
    for strand, variable in parts:
        size = strand.size * variable.size
        last = int(strand.max()) + int(variable.max(initial=0))
        if last >= ID_END and size:
            raise KVPlanError(
                "INT",
                "number the descriptors of a request",
                expected=f"ids below {ID_END}",
                got=f"{last}",
                hint="a smaller pool, or fewer tensors per plan, has fewer ids",
                id=last,
            )
        out = ids[done : done + size].reshape(strand.size, variable.size)
        np.add.outer(strand.astype(np.int32), variable.astype(np.int32), out=out)
        done += size
    made: Ids = read_only(ids)
    return made
