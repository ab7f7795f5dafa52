"""Block tables: the blocks of a pool that a request owns, each with its ordinal in the request.

The two sides pair blocks by position, which follows from the ordinal; an index in a list has no meaning. A table may
have gaps: blocks that a sliding window has left, or positions at which no state was kept. No bytes move to or from a
gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Final, NotRequired, TypedDict

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, read_only
from kvplan._checks import ID_END, integer, interval, wrong_type
from kvplan._text import shown
from kvplan.errors import KVPlanError

POSITION_END: Final = 1 << 48
"""Positions and block ordinals are below this."""

Range = tuple[int, int]
"""Positions ``[start, stop)``."""

Tokens = Range | Mapping[str, Range] | None
"""What a request moves: one range for all token groups, one for each group by name, or all that its blocks hold."""


_EXPECTED: Final = "a flat sequence of integers in host memory"


def _integers(
    values: Any, what: str, end: int, dtype: str
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """``values``, integers in ``[0, end)``, twice in memory of their own: in their order, and ascending."""
    found = _array(values, dtype)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        got = f"{found.dtype} of shape {found.shape}"
        raise KVPlanError(
            "TYPE", "read a block table", expected="a flat sequence of integers", got=got
        )
    ordered = found.copy()
    ordered.sort()
    if ordered.size and (ordered[0] < 0 or ordered[-1] >= end):
        wrong = int(next(value for value in found if not 0 <= value < end))
        raise KVPlanError(
            "BLOCKS",
            "read a block table",
            expected=f"{what} in [0, {end})",
            got=f"{wrong}",
            id=wrong,
        )
    # the bools of a list are 0 and 1 by now
    if ordered.size and ordered[0] < 2 and isinstance(values, list | tuple):
        types = {type(values[i]) for i in np.flatnonzero(found < 2).tolist()}
        if types & {bool, np.bool_}:
            raise wrong_type("a block table", _EXPECTED, values)
    return found.astype(dtype), ordered


def _array(values: Any, dtype: str) -> npt.NDArray[Any]:
    """``values`` as an array, of ``dtype`` if they are a list."""
    try:
        if isinstance(values, list | tuple):
            try:
                return np.frombuffer(
                    array(dtype, values), dtype
                )  # two thirds of the time of np.asarray
            except (TypeError, OverflowError):  # numpy can say what is wrong with them
                pass
        elif hasattr(values, "mask"):
            raise TypeError
        return np.asarray(values)
    except Exception:  # a tensor that is no array of numbers, in its framework's own words
        raise wrong_type("a block table", _EXPECTED, values) from None


@attrs.frozen(init=False, eq=False, repr=False)
class Blocks:
    """The block table of a request in one group.

    ``ids`` are the ids of consecutive blocks, and ``first`` is the ordinal of the first one. Entries equal to ``null``
    are gaps: vLLM puts its ``null_block``, id 0, where a sliding window has passed. Instead of ``first`` and ``null``,
    ``ordinals`` may give the ordinal of each block, such as the positions at which states were kept. All other ordinals
    of ``listed``, by default those before the last block, are gaps then.

    A destination receives nothing in its gaps. A request that needs a block in a gap of the source is refused, and a
    range that goes beyond ``listed`` too. Threads may share a table: it never changes.

    Raises ``TYPE``, ``RANGE`` or ``BLOCKS``.

    >>> Blocks([7, 3, 9], first=2)
    Blocks([7, 3, 9], first=2)
    >>> window = Blocks([0, 0, 7, 3], null=0)
    >>> window.ids.tolist(), window.first
    ([7, 3], 2)
    >>> Blocks([9, 5], ordinals=[2048, 1024])
    Blocks([5, 9], ordinals=[1024, 2048])
    >>> Blocks([9, 5], ordinals=[2, 3], listed=(0, 7))  # blocks 4, 5 and 6 of the request are gaps, like 0 and 1
    Blocks([9, 5], ordinals=[2, 3], listed=(0, 7))
    """

    ids: npt.NDArray[np.int32]
    """The block ids, without gaps, by ascending ordinal."""

    first: int
    """The ordinal of the first block."""

    stop: int
    """One more than the ordinal of the last block."""

    listed: tuple[int, int]
    """The ordinals ``[start, stop)`` that the table covers, gaps included."""

    scattered: Ints | None
    """The ordinal of each of ``ids``; ``None`` where they are consecutive."""

    null: int | None

    highest: int
    """The highest of ``ids``; -1 in an empty table."""

    twice: int | None
    """An id that appears more than once, or ``None``."""

    def __init__(
        self, ids: Any, first: Any = 0, null: Any = None, ordinals: Any = None, listed: Any = None
    ) -> None:
        start = integer(first, "first of Blocks", high=POSITION_END)
        owned, ordered = _integers(ids, "ids", ID_END, "i")
        stop = start + owned.size
        covered, at = (start, stop), None
        if ordinals is not None:
            if start or null is not None:
                raise KVPlanError(
                    "BLOCKS",
                    "read a block table",
                    expected="first and null, or ordinals",
                    got="both",
                )
            owned, at = _ordered(owned, _integers(ordinals, "ordinals", POSITION_END, "q")[0])
            covered = _covered(at, listed)
        elif listed is not None:
            raise KVPlanError(
                "BLOCKS",
                "read a block table",
                expected="listed beside ordinals only",
                got=shown(listed),
            )
        elif null is not None:
            null = integer(null, "null of Blocks", high=ID_END)
            there = np.flatnonzero(owned != null)
            owned, at = owned[there], read_only(start + there)
            ordered = ordered[ordered != null]
        if at is not None:
            start, stop = (int(at[0]), int(at[-1]) + 1) if at.size else (start, start)
            at = at if stop - start > at.size else None
        highest = int(ordered[-1]) if ordered.size else -1
        same = ordered[1:] == ordered[:-1]
        twice = int(ordered[same.argmax()]) if np.count_nonzero(same) else None
        self.__attrs_init__(read_only(owned), start, stop, covered, at, null, highest, twice)

    @property
    def ordinals(self) -> Ints:
        """The ordinal of each of ``ids``, int64."""
        return np.arange(self.first, self.stop) if self.scattered is None else self.scattered

    @property
    def has_gaps(self) -> bool:
        """Whether some of the ordinals in ``listed`` have no block."""
        return self.scattered is not None or self.listed != (self.first, self.stop)

    def _arguments(self) -> dict[str, Any]:
        """The arguments that construct an equal table."""
        start, stop = self.listed
        first = {"first": start} if start else {}
        if self.null is None and not self.has_gaps:
            return {"ids": self.ids.tolist(), **first}
        if self.null is None:
            made = {"ids": self.ids.tolist(), "ordinals": self.ordinals.tolist()}
            return (
                made
                if self.listed == _covered(self.ordinals, None)
                else {**made, "listed": self.listed}
            )
        entries = np.full(stop - start, self.null)
        entries[self.ordinals - start] = self.ids
        return {"ids": entries.tolist(), **first, "null": self.null}

    def __repr__(self) -> str:
        ids, *others = self._arguments().items()
        return f"Blocks({', '.join([str(ids[1]), *(f'{name}={value}' for name, value in others)])})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would print every field

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._arguments(),)


class Request(TypedDict):
    """What one request moves: the arguments of ``bind``, ``verify`` and others.

    An annotation for mappings that are passed as ``plan.bind(**request)``: type checkers then know each argument.

    >>> request: Request = {"local": {"attn": Blocks([7, 3])}, "remote": {"attn": Blocks([5])}, "tokens": (0, 16)}
    """

    local: Mapping[str, Blocks]
    remote: Mapping[str, Blocks]
    tokens: NotRequired[Tokens]


def _rebuild(arguments: dict[str, Any]) -> Blocks:
    return Blocks(**arguments)


def _covered(ordinals: Ints, given: Any) -> tuple[int, int]:
    """The ordinals that a table of these ``ordinals``, ascending, covers: those given, or all up to the last one."""
    low, high = (int(ordinals[0]), int(ordinals[-1]) + 1) if ordinals.size else (0, 0)
    if given is None:
        return 0, high
    start, stop = interval(given, "listed of Blocks", POSITION_END + 1)
    if start > stop or (ordinals.size and (low < start or stop < high)):
        got = f"[{start}, {stop}) around [{low}, {high})"
        raise KVPlanError(
            "BLOCKS", "read a block table", expected="listed around all ordinals", got=got
        )
    return start, stop


def _ordered(ids: Ints, ordinals: Ints) -> tuple[Ints, Ints]:
    """Ids and ordinals, sorted by ordinal."""
    order = np.argsort(ordinals)
    ordinals = ordinals[order]
    again = np.flatnonzero(ordinals[1:] == ordinals[:-1])
    if ordinals.size != ids.size or again.size:
        got = (
            f"ordinal {ordinals[again[0]]} twice"
            if again.size
            else f"{ordinals.size} of {ids.size} ids"
        )
        raise KVPlanError(
            "BLOCKS", "read a block table", expected="an ordinal of its own for each id", got=got
        )
    return ids[order], read_only(ordinals)


def _bind(side: str, key: str) -> str:
    return " ".join(filter(None, ("bind", side, f"group {key!r}")))


def check_blocks(
    key: str, blocks: object, num_blocks: int, is_destination: bool, side: str = ""
) -> None:
    """Check the block table of one group against the smallest pool that it indexes.

    In a destination's table each block may appear once only.
    """
    if blocks is None:
        raise KVPlanError(
            "BLOCKS", _bind(side, key), expected="a block table", got="none", group=key, side=side
        )
    if not isinstance(blocks, Blocks):
        raise KVPlanError(
            "TYPE", _bind(side, key), expected="Blocks", got=shown(blocks), group=key, side=side
        )
    if blocks.highest >= num_blocks:
        raise KVPlanError(
            "BLOCKS",
            _bind(side, key),
            expected=f"block ids below {num_blocks}, the pool's size",
            got=f"{blocks.highest}",
            group=key,
            side=side,
            num_blocks=num_blocks,
            id=blocks.highest,
        )
    if is_destination and blocks.twice is not None:
        raise KVPlanError(
            "BLOCKS",
            _bind(side, key),
            expected="each destination block once",
            got=f"block {blocks.twice} twice",
            hint="bind the ranges on either side of a ring buffer's wrap one by one",
            group=key,
            side=side,
            id=blocks.twice,
        )


def check_apart(keys: tuple[str, str], tables: Mapping[str, Blocks], side: str) -> None:
    """Check that two groups whose views share bytes own no block together."""
    one, other = (tables[key].ids for key in keys)
    if (both := one[np.isin(one, other)]).size:
        raise KVPlanError(
            "BLOCKS",
            _bind(side, keys[0]),
            expected=f"no block of group {keys[1]!r}, whose views share its bytes",
            got=f"block {both[0]} in both",
            hint="null says which entries of a table are no blocks",
            group=keys,
            side=side,
            id=int(both[0]),
        )


def check_listed(key: str, start: int, stop: int, low: int, high: int, side: str) -> None:
    """Check that the ordinals ``[start, stop)``, which a request needs, lie in ``[low, high)``, which its table has."""
    if start < low or stop > high:
        raise KVPlanError(
            "BLOCKS",
            _bind(side, key),
            expected=f"blocks [{start}, {stop}) of the request to be listed",
            got=f"[{low}, {high})",
            group=key,
            side=side,
            needed=(start, stop),
            listed=(low, high),
        )


def places(key: str, table: Blocks, ordinals: Ints, side: str) -> Ints:
    """The index in ``table.ids`` of each ordinal; ``ordinals`` must be ascending and all in the table."""
    if table.scattered is None:
        check_listed(key, int(ordinals[0]), int(ordinals[-1]) + 1, table.first, table.stop, side)
        return ordinals - table.first
    found = np.minimum(np.searchsorted(table.scattered, ordinals), table.ids.size - 1)
    missing = ordinals[table.scattered[found] != ordinals]
    if missing.size:
        got = f"no block {missing[0]} of the request"
        raise KVPlanError(
            "BLOCKS",
            _bind(side, key),
            expected="a block for each that the other side has",
            got=got,
            group=key,
            side=side,
            ordinal=int(missing[0]),
        )
    return found
