"""All small worlds, numbered, so that they can be gone through, in any order and by many processes.

Worlds come in *grids*: every destination that some choices make, with every source that others make. All choices at
once would be more than 10**11 worlds; in the grids here any two choices, of any two kinds, on one side or on both,
meet. Nothing is drawn: a number is a world.

No two numbers are the same world. Axes of one coordinate may stand anywhere in an order, so sides that differ by that
alone are one; and what an earlier grid has is left out of later ones.

>>> Worlds()[234567]  # doctest: +NORMALIZE_WHITESPACE
World(heads=(4,), destination=Side(tp=2, tokens=(4,), order='hkbtd'), source=Side(tp=2, tokens=(1,), order='bhkdt'),
positions=25)
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from property_tests.worlds import APART, BEHIND, WITHIN, Heads, Request, Side, World

Choices = Mapping[str, Sequence[Any]]
"""Values for some fields of a :class:`Side`."""


@attrs.frozen(eq=False)
class Grid:
    """The worlds in which tensors have any of some head counts, and each side makes any of its choices.

    ``every_start`` is for requests that begin at each position in turn, not only at one that the world's number picks.
    """

    name: str
    heads: Sequence[Heads]
    destination: Choices
    source: Choices
    positions: int
    every_start: bool = False


UP_TO_4: Final = (1, 2, 3, 4)
ONE_TENSOR: Final = tuple((count,) for count in UP_TO_4)
TWO_TENSORS: Final = tuple(itertools.product(UP_TO_4, UP_TO_4))
BLOCKS: Final = tuple((count,) for count in UP_TO_4)
SPREADS: Final = ((1, 1), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3))
ORDERS: Final = tuple("".join(letters) for letters in itertools.permutations("bhtkd"))
APART_KV: Final = tuple("".join(letters) + "d" for letters in itertools.permutations("bht"))
LAYOUTS: Final = (*(order for order in ORDERS if order[4] == "d"), *APART_KV)
PACKINGS: Final = (APART, BEHIND, WITHIN)

SHORT: Final = 25
"""Positions of a request without contexts: two periods of 12, and one more."""

LONG: Final = 77
"""Positions of a request with contexts: a period is at most 72."""


def _choices(tp: Sequence[int] = (1,), **others: Sequence[Any]) -> Choices:
    return {"tp": tp, **others}


_SHARDS = _choices(UP_TO_4, tokens=BLOCKS, order=LAYOUTS)
_PACKED = _choices(packing=PACKINGS, order=LAYOUTS)
_PACKED_CONTEXTS = _choices(packing=PACKINGS, spread=SPREADS, order=["bthkd"], tokens=[*BLOCKS, (2, 3)])
_PAIRS = _choices(UP_TO_4, tokens=[*BLOCKS, (2, 3), (4, 1)], packing=PACKINGS, order=["bhtkd"])
_PAGED = _choices(tokens=BLOCKS, spread=SPREADS, order=["bthkd", "bhtkd", "tbhkd", "bhtd"])

GRIDS: Final = (
    Grid(
        "paging, from every start",
        [(2,)],
        _choices(tokens=BLOCKS, spread=SPREADS, order=["bhtkd"]),
        _choices(tokens=BLOCKS, spread=SPREADS, order=["bthkd"]),
        LONG,
        every_start=True,
    ),
    Grid("sharding, blocks and layouts", ONE_TENSOR, _SHARDS, _SHARDS, SHORT),
    Grid(
        "any strides",
        [(2,), (3,), (4,)],
        _choices(tokens=BLOCKS, order=ORDERS),
        _choices((1, 2), tokens=BLOCKS, order=ORDERS),
        SHORT,
    ),
    Grid("blocks and contexts", [(2,)], _PAGED, _PAGED, LONG),
    Grid(
        "layouts and contexts",
        [(2,)],
        _choices(tokens=[(2,)], spread=SPREADS, order=LAYOUTS),
        _choices(tokens=[(3,)], spread=SPREADS, order=LAYOUTS),
        LONG,
    ),
    Grid(
        "sharding and contexts",
        ONE_TENSOR,
        _choices(UP_TO_4, tokens=[(2,), (3,)], spread=SPREADS, order=["bthkd"]),
        _choices(UP_TO_4, tokens=[(3,)], spread=SPREADS, order=["bhtkd"]),
        LONG,
    ),
    Grid("two tensors, sharded", TWO_TENSORS, _PAIRS, _PAIRS, SHORT),
    Grid(
        "two tensors, layouts",
        [(2, 3)],
        {**_PACKED, "tokens": [(2,), (3, 2)]},
        {**_PACKED, "tokens": [(3,), (2, 3)], "first": (0, 1)},
        SHORT,
    ),
    Grid("two tensors, contexts", [(1, 2)], _PACKED_CONTEXTS, {**_PACKED_CONTEXTS, "first": (0, 1)}, LONG),
)


def sides(heads: Heads, choices: Choices) -> tuple[Side, ...]:
    """The different sides that choices make."""
    made = (Side(**dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values()))
    return tuple(dict.fromkeys(side.settled(heads) for side in made if side.possible(heads)))


class Sheet:
    """The worlds of a grid with the same tensors: a row for each destination, less what earlier sheets have."""

    def __init__(self, grid: Grid, heads: Heads, earlier: Sequence[Sheet]) -> None:
        self.grid, self.heads = grid, heads
        self.destinations, self.sources = (sides(heads, choices) for choices in (grid.destination, grid.source))
        self.held = frozenset(self.destinations), frozenset(self.sources)
        rows: dict[tuple[bool, ...], tuple[Side, ...]] = {}
        self.rows = []
        for destination in self.destinations:
            known = tuple(destination in sheet.held[0] for sheet in earlier)
            if known not in rows:
                had = frozenset().union(*(sheet.held[1] for sheet in itertools.compress(earlier, known)))
                rows[known] = tuple(source for source in self.sources if source not in had)
            self.rows.append(rows[known])
        self.first = list(itertools.accumulate(map(len, self.rows), initial=0))

    def __len__(self) -> int:
        return self.first[-1]

    def __getitem__(self, number: int) -> World:
        row = bisect_right(self.first, number) - 1
        source = self.rows[row][number - self.first[row]]
        return World(self.heads, self.destinations[row], source, self.grid.positions)


class Worlds:
    """All worlds of some grids, by number."""

    def __init__(self, grids: Sequence[Grid] = GRIDS) -> None:
        by_heads: dict[Heads, list[Sheet]] = {}
        self.sheets: list[Sheet] = []
        for grid, heads in ((each, heads) for each in grids for heads in each.heads):
            earlier = by_heads.setdefault(heads, [])
            self.sheets.append(Sheet(grid, heads, earlier))
            earlier.append(self.sheets[-1])
        self.first = list(itertools.accumulate(map(len, self.sheets), initial=0))

    def __len__(self) -> int:
        return self.first[-1]

    def __getitem__(self, number: int) -> World:
        sheet, at = self._place(number)
        return sheet[at]

    def _place(self, number: int) -> tuple[Sheet, int]:
        """The sheet that has a world, and the world's number there."""
        if not 0 <= number < len(self):
            raise IndexError(f"world {number} of {len(self)}")
        at = bisect_right(self.first, number) - 1
        return self.sheets[at], number - self.first[at]

    def grid_of(self, number: int) -> Grid:
        """The grid that has a world."""
        return self._place(number)[0].grid

    def requests(self, number: int) -> list[Request]:
        """What a world is asked to move: everything, and a range from one start, or from each."""
        grid = self.grid_of(number)
        starts = range(grid.positions + 1) if grid.every_start else [_mixed(number, 0) % (grid.positions + 1)]
        made = [Request(0, grid.positions, by_ids=number % 2 == 0)]
        for start in starts:
            stop = start + _mixed(number, start + 1) % (grid.positions - start + 1)
            made.append(Request(start, stop, by_ids=len(made) % 2 == number % 2))
        return made


def _mixed(number: int, turn: int) -> int:
    """A number that looks like any other, but is always the same."""
    return ((number * 2654435761 + turn * 40503 + 12345) * 2246822519 >> 16) % (1 << 32)
