"""Block tables: the blocks of a pool that a request owns, each with its ordinal in the request.

The two sides pair blocks by position, which follows from the ordinal; an index in a list has no
meaning. A table may have gaps: blocks that a sliding window has left, or positions at which no
state was kept. No bytes move to or from a gap.
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
from kvplan._text import MAX_REPR, count, shown
from kvplan.errors import KVPlanError

POSITION_END: Final = 1 << 48
"""Positions and block ordinals are below this."""

Range = tuple[int, int]
"""Positions ``[start, stop)``."""

Tokens = Range | Mapping[str, Range] | None
"""The positions that a request moves: of all token groups, or of each by name.

``None`` moves all that its blocks hold.
"""

INTEGERS: Final = "a flat sequence of integers"


def _integers(
    values: Any, noun: str, end: int, dtype: str
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return integers in ``[0, end)``, in their order and ascending, in new memory."""
    numbers = _array(values, dtype)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        got = f"{numbers.dtype} of shape {numbers.shape}"
        raise KVPlanError("TYPE", "read a block table", expected=INTEGERS, got=got)
    ascending = numbers.copy()
    ascending.sort()
    if ascending.size and (ascending[0] < 0 or ascending[-1] >= end):
        outside = int(next(number for number in numbers if not 0 <= number < end))
        raise _unreadable(f"{noun} in [0, {end})", f"{outside}", id=outside)
    # the bools of a list are 0 and 1 by now: look at what these were in the list
    if ascending.size and ascending[0] < 2 and isinstance(values, list | tuple):
        types = {type(values[i]) for i in np.flatnonzero(numbers < 2).tolist()}
        if types & {bool, np.bool_}:
            raise _not_integers(values)
    return numbers.astype(dtype), ascending


def _array(values: Any, dtype: str) -> npt.NDArray[Any]:
    """Return ``values`` as an array, of ``dtype`` if they are a list."""
    try:
        if isinstance(values, list | tuple):
            try:
                # an array.array takes two thirds of the time of np.asarray
                return np.frombuffer(array(dtype, values), dtype)
            except (TypeError, OverflowError):  # numpy can say what is wrong with them
                pass
        elif hasattr(values, "mask"):
            raise TypeError
        return np.asarray(values)
    except Exception:  # a tensor that is no array of numbers, in its framework's own words
        raise _not_integers(values) from None


def _not_integers(values: Any) -> KVPlanError:
    return wrong_type("a block table", f"{INTEGERS} in host memory", values)


def _unreadable(expected: str, got: str, **details: Any) -> KVPlanError:
    """Return the error for the arguments of a block table."""
    return KVPlanError("BLOCKS", "read a block table", expected=expected, got=got, **details)


@attrs.frozen(init=False, eq=False, repr=False)
class Blocks:
    """The block table of a request in one group.

    ``ids`` are the ids of consecutive blocks, and ``first`` is the ordinal of the first one.
    Entries equal to ``null`` are gaps: vLLM puts its ``null_block``, id 0, where a sliding window
    has passed. Instead of ``first`` and ``null``, ``ordinals`` may give the ordinal of each block,
    such as the positions at which states were kept. All other ordinals of ``listed``, by default
    those before the last block, are gaps then.

    A destination receives nothing in its gaps. A request that needs a block in a gap of the source
    is refused, and a range that goes beyond ``listed`` too. Threads may share a table: it never
    changes.

    Raises ``TYPE``, ``RANGE`` or ``BLOCKS``.

    >>> Blocks([7, 3, 9], first=2)
    Blocks([7, 3, 9], first=2)
    >>> window = Blocks([0, 0, 7, 3], null=0)
    >>> window.ids.tolist(), window.first
    ([7, 3], 2)
    >>> Blocks([9, 5], ordinals=[2048, 1024])
    Blocks([5, 9], ordinals=[1024, 2048])
    >>> # blocks 4, 5 and 6 of the request are gaps, like 0 and 1
    >>> Blocks([9, 5], ordinals=[2, 3], listed=(0, 7))
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
        block_ids, ascending_ids = _integers(ids, "ids", ID_END, "i")
        stop = start + block_ids.size
        covered = (start, stop)
        # the ordinal of each id, unless they are consecutive
        block_ordinals: Ints | None = None
        if ordinals is not None:
            if start or null is not None:
                raise _unreadable("first and null, or ordinals", "both")
            block_ids, block_ordinals = _by_ordinal(block_ids, ordinals)
            covered = _covered(block_ordinals, listed)
        elif listed is not None:
            raise _unreadable("listed together with ordinals only", shown(listed))
        elif null is not None:
            null = integer(null, "null of Blocks", high=ID_END)
            # entries that are null are gaps: only the others are blocks, each at its own ordinal
            entries = np.flatnonzero(block_ids != null)
            block_ids = block_ids[entries]
            block_ordinals = read_only(start + entries)
            ascending_ids = ascending_ids[ascending_ids != null]
        if block_ordinals is not None:
            stop = start
            if block_ordinals.size:
                start = int(block_ordinals[0])
                stop = int(block_ordinals[-1]) + 1
            # what is left may be consecutive again, as where a window has passed the first blocks
            if stop - start == block_ordinals.size:
                block_ordinals = None
        highest = int(ascending_ids[-1]) if ascending_ids.size else -1
        # an id that appears twice is next to itself where they ascend
        is_repeated = ascending_ids[1:] == ascending_ids[:-1]
        twice = int(ascending_ids[is_repeated.argmax()]) if np.count_nonzero(is_repeated) else None
        self.__attrs_init__(
            read_only(block_ids), start, stop, covered, block_ordinals, null, highest, twice
        )

    @property
    def ordinals(self) -> Ints:
        """The ordinal of each of ``ids``, int64."""
        return np.arange(self.first, self.stop) if self.scattered is None else self.scattered

    @property
    def has_gaps(self) -> bool:
        """Some of the ordinals in ``listed`` have no block."""
        return self.scattered is not None or self.listed != (self.first, self.stop)

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that construct an equal table."""
        ids = self.ids.tolist()
        if self.null is None and self.has_gaps:
            arguments = {"ids": ids, "ordinals": self.ordinals.tolist()}
            if self.listed != _covered(self.ordinals, None):
                arguments["listed"] = self.listed
            return arguments
        start, stop = self.listed
        first = {"first": start} if start else {}
        if self.null is None:
            return {"ids": ids, **first}
        entries = np.full(stop - start, self.null)
        entries[self.ordinals - start] = self.ids
        return {"ids": entries.tolist(), **first, "null": self.null}

    def __repr__(self) -> str:
        start, stop = self.listed
        num_entries = self.ids.size if self.null is None else stop - start
        if num_entries <= MAX_REPR and len(text := self._call()) <= MAX_REPR:
            return text
        ids = list(map(str, self.ids[:3]))
        if self.ids.size > len(ids):
            ids += ["...", str(self.ids[-1])]
        number = f"{self.ids.size} of ordinals [{start}, {stop})"
        return f"<Blocks {', '.join(ids)}: {number}>"

    def _call(self) -> str:
        """Return the call that makes this table."""
        arguments = self._arguments()
        ids = arguments.pop("ids")
        keywords = [f"{name}={value}" for name, value in arguments.items()]
        return f"Blocks({', '.join([str(ids), *keywords])})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis, whose printers print calls, repeats an example by its own; others are prompts.
        printer.text(self._call() if hasattr(printer, "repr_call") else repr(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._arguments(),)


class Request(TypedDict):
    """The blocks and tokens that a request moves: arguments of ``bind``, ``verify`` and others.

    An annotation for mappings that are passed as ``plan.bind(**request)``: type checkers then know
    each argument.

    >>> tables = {"local": {"attn": Blocks([7, 3])}, "remote": {"attn": Blocks([5])}}
    >>> request: Request = {**tables, "tokens": (0, 16)}
    """

    local: Mapping[str, Blocks]
    remote: Mapping[str, Blocks]
    tokens: NotRequired[Tokens]


def _rebuild(arguments: dict[str, Any]) -> Blocks:
    return Blocks(**arguments)


def _covered(ordinals: Ints, listed: Any) -> Range:
    """Return the ordinals that a table covers: ``listed``, or all up to the last block.

    ``ordinals`` are those of its blocks, ascending.
    """
    low = int(ordinals[0]) if ordinals.size else 0
    high = int(ordinals[-1]) + 1 if ordinals.size else 0
    if listed is None:
        return 0, high
    start, stop = interval(listed, "listed of Blocks", POSITION_END + 1)
    if start > stop or (ordinals.size and (low < start or stop < high)):
        got = f"[{start}, {stop}) for ordinals in [{low}, {high})"
        raise _unreadable("listed to cover all ordinals", got)
    return start, stop


def _by_ordinal(ids: Ints, values: Any) -> tuple[Ints, Ints]:
    """Return ids and their ordinals, both by ascending ordinal."""
    ordinals, ascending = _integers(values, "ordinals", POSITION_END, "q")
    expected = "a different ordinal for each id"
    repeated = ascending[1:][ascending[1:] == ascending[:-1]]
    if repeated.size:
        raise _unreadable(expected, f"ordinal {repeated[0]} twice")
    if ordinals.size != ids.size:
        got = f"{count(ordinals.size, 'ordinal')} for {count(ids.size, 'id')}"
        raise _unreadable(expected, got)
    order = np.argsort(ordinals)
    return ids[order], read_only(ordinals[order])


def _unbound(
    code: str, side: str, group: str, expected: str, got: str, hint: str = "", /, **details: Any
) -> KVPlanError:
    """Return the error for a table of one group that a request cannot be bound with."""
    action = f"bind {side} group {group!r}" if side else f"bind group {group!r}"
    details = {"group": group, "side": side, **details}
    return KVPlanError(code, action, expected=expected, got=got, hint=hint, **details)


def check_blocks(
    group: str, blocks: object, num_blocks: int, is_destination: bool, side: str = ""
) -> None:
    """Check the block table of one group against the smallest pool that it indexes.

    In a destination's table each block may appear once only.
    """
    if blocks is None:
        raise _unbound("BLOCKS", side, group, "a block table", "none")
    if not isinstance(blocks, Blocks):
        raise _unbound("TYPE", side, group, "Blocks", shown(blocks))
    if blocks.highest >= num_blocks:
        expected = f"block ids below {num_blocks}, the pool's size"
        details = {"num_blocks": num_blocks, "id": blocks.highest}
        raise _unbound("BLOCKS", side, group, expected, f"{blocks.highest}", **details)
    if is_destination and blocks.twice is not None:
        raise _unbound(
            "BLOCKS",
            side,
            group,
            "each destination block once",
            f"block {blocks.twice} twice",
            "bind the ranges on either side of a ring buffer's wrap one by one",
            id=blocks.twice,
        )


def check_apart(groups: tuple[str, str], tables: Mapping[str, Blocks], side: str) -> None:
    """Check that two groups whose views share bytes own no block together."""
    group, overlaid_group = groups
    ids = tables[group].ids
    shared_ids = ids[np.isin(ids, tables[overlaid_group].ids)]
    if shared_ids.size:
        shared_id = int(shared_ids[0])
        raise _unbound(
            "BLOCKS",
            side,
            group,
            f"no block of group {overlaid_group!r}, whose views share its bytes",
            f"block {shared_id} in both",
            "null says which entries of a table are no blocks",
            group=groups,
            id=shared_id,
        )


def check_listed(group: str, start: int, stop: int, low: int, high: int, side: str) -> None:
    """Check that a table has the ordinals that a request needs.

    The table lists ``[low, high)``, and the request needs ``[start, stop)``.
    """
    if start < low or stop > high:
        expected = f"blocks [{start}, {stop}) of the request to be listed"
        details = {"needed": (start, stop), "listed": (low, high)}
        raise _unbound("BLOCKS", side, group, expected, f"[{low}, {high})", **details)


def table_indices(group: str, table: Blocks, ordinals: Ints, side: str) -> Ints:
    """Return the index in ``table.ids`` of each ordinal.

    ``ordinals`` must be ascending and all in the table.
    """
    if table.scattered is None:
        first = int(ordinals[0])
        last = int(ordinals[-1])
        check_listed(group, first, last + 1, table.first, table.stop, side)
        return ordinals - table.first
    # the first block at or behind each ordinal, or the last block of all
    indices = np.minimum(np.searchsorted(table.scattered, ordinals), table.ids.size - 1)
    missing = ordinals[table.scattered[indices] != ordinals]
    if missing.size:
        expected = "every block that the other side has"
        got = f"none for block {missing[0]} of the request"
        raise _unbound("BLOCKS", side, group, expected, got, ordinal=int(missing[0]))
    return indices
