"""Cells (C): divides what a destination needs into boxes, and chooses one source for each.

- C1: Along each axis, the coordinates that the same source views hold form one *part*. The parts of the token axis are
  positions in one cycle of the contexts. Block sizes do not matter for who holds what.
- C2: A cell is a product of parts, one of each axis. Cells without a holder make one error; its details list all of
  them.
- C3: The sources that hold a cell are its *replica set*. Cells with equal replica sets get the same source, so the
  choice does not depend on layouts. The fewest sources are taken: first those that are the only holder of some cell;
  then, one by one, the source that holds the most bytes that have none yet.
- C4: Each replica set is read from its chosen holder with the fewest bytes assigned so far. States and tokens are
  counted apart, because the number of tokens to a state is unknown before a request. Ties, here and in C3, are broken
  by ``destination.rank % candidates``, so every worker computes the same choice without communication.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Bools, Ints
from kvplan._checks import at_most
from kvplan._text import FEW, few, split
from kvplan.describe.axes import MAX_SEGMENTS
from kvplan.describe.views import TOKEN, Geometry
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.align import cycle
from kvplan.plan.match import MAX_HELD, Match, Part

MAX_CELLS: Final = 1 << 14
"""The most cells of one destination."""


@attrs.frozen(eq=False)
class Cell:
    """The box that one source view sends to one destination view, for every tensor of a match.

    ``destination`` and ``source`` are indices of the match's views. ``parts`` has one part of every axis. The token
    axis comes last; its part has positions in ``[0, every)``, one cycle of all contexts.
    """

    match: Match
    destination: int
    source: int
    parts: Mapping[str, Part]
    every: int

    @property
    def sides(self) -> tuple[Geometry, Geometry]:
        """The geometries of the two views, the destination's first."""
        return self.match.destination[self.destination], self.match.sources.views[self.source][1]


def cells(matches: Sequence[Match]) -> tuple[Cell, ...]:
    """All cells of a destination, each with one source.

    Raises ``TENSOR`` for tensors that no source has, else ``COVER`` for parts that no source holds, listing them all.
    """
    if not matches:
        return ()
    destination, sources = matches[0].workers
    found: list[Cell] = []
    held: list[Bools] = []
    missing: list[str] = []
    compared = number = 0
    for one in matches:
        for i in range(len(one.destination)):
            axes, every = parts(one, i), _cycle(one, i)
            stretches = sum(len(part.intervals) for each in axes.values() for part in each)
            compared += stretches * len(one.sources.views)
            number += math.prod(len(each) for each in axes.values())
            at_most(
                MAX_HELD,
                compared,
                "stretches of views",
                f"divide the tensors of {destination.label}",
            )
            at_most(MAX_CELLS, number, "cells", f"plan for {destination.label}")
            for product in itertools.product(*axes.values()):
                holders = np.zeros(len(sources), bool)
                holders[one.sources.worker[_held(product)]] = True
                cell = Cell(one, i, -1, dict(zip(axes, product, strict=True)), every)
                found.append(cell)
                held.append(holders)
                if not holders.any():
                    missing.append(_describe(cell))
    if missing:
        unknown = [one.names[0] for one in matches if not one.sources.views]
        raise KVPlanError(
            "TENSOR" if unknown else "COVER",
            f"plan for {destination.label}",
            expected="every part of its tensors to be held by a source",
            got=few(missing, "; "),
            hint=_hint(unknown[0], sources) if unknown else "",
            missing=tuple(missing),
            sources=tuple(worker.label for worker in sources),
        )
    owners = _owners(found, np.array(held), destination.rank)
    return tuple(
        [
            attrs.evolve(cell, source=_view(cell, owner))
            for cell, owner in zip(found, owners, strict=True)
        ]
    )


def _hint(name: str, sources: Iterable[Worker]) -> str:
    """What to do about a missing tensor, with the nearest of the names that the sources have for its layer."""
    known = dict.fromkeys(name for worker in sources for name in worker.tensors)
    layer = [other for other in known if split(other)[1] == split(name)[1]]
    near = difflib.get_close_matches(name, layer[:FEW]) or layer[:3]
    theirs = (
        f"the sources have {', '.join(map(repr, near))}: compare shows both sides; " if near else ""
    )
    return f"{theirs}name tensors in not_transferred if they need not move"


def _owners(share: Sequence[Cell], held: Bools, turn: int) -> Ints:
    """The index of the source of each cell, (cells,); ``held`` is (cells, sources), one replica set in each row."""
    states = [
        cell.match.destination[cell.destination].group.tokens_per_block is None for cell in share
    ]
    keys = [(state, holders.tobytes()) for state, holders in zip(states, held, strict=True)]
    # The distinct replica sets, states and tokens apart; sorted, so that the order of the cells does not matter.
    numbers = {key: i for i, key in enumerate(sorted(set(keys)))}
    number = np.array([numbers[key] for key in keys], np.int64)
    weight = np.bincount(number, [_bytes(cell) for cell in share]).astype(np.float64)
    distinct = np.array([np.frombuffer(holders, bool) for _, holders in numbers], bool).reshape(
        -1, held.shape[1]
    )
    owners: Ints = choose(distinct, weight, np.array([state for state, _ in numbers], bool), turn)[
        number
    ]
    return owners


def parts(found: Match, destination: int) -> dict[str, tuple[Part, ...]]:
    """The parts of each axis of one destination view, the token axis last."""
    ours, every = found.destination[destination], _cycle(found, destination)
    axes = [axis for axis in ours.sizes if axis != TOKEN]
    return {axis: found.sources.parts(ours, axis, every) for axis in (*axes, TOKEN)}


def _cycle(found: Match, destination: int) -> int:
    """The cycle of the contexts of a destination view and all sources of a match, in positions."""
    every = cycle(found.destination[destination].group, *found.sources.groups)
    at_most(
        MAX_SEGMENTS,
        every,
        "positions in a common cycle",
        f"align the contexts of tensor {found.names[0]!r}",
    )
    return every


def choose(held: Bools, weight: npt.NDArray[np.float64], states: Bools, turn: int) -> Ints:
    """The source of each replica set by rules C3 and C4, (sets,) int64.

    ``held`` is (sets, sources) bool; ``weight`` (sets,) has the bytes that each set holds; ``states`` (sets,) is true
    for the sets of state groups.

    >>> replicas = np.ones((1, 4), bool)
    >>> [int(choose(replicas, np.ones(1), np.zeros(1, bool), rank)[0]) for rank in range(5)]
    [0, 1, 2, 3, 0]
    """
    needed = held[held.sum(1) == 1].any(0)
    while not (served := (held & needed).any(1)).all():
        gain = weight[~served] @ held[~served]
        needed[_by_turn(np.flatnonzero(gain == gain.max()), turn)] = True
    loads = np.zeros((2, held.shape[1]))
    owner = np.zeros(len(held), np.int64)
    # Sets with the fewest candidates first, among them those with the most bytes: they leave the least choice.
    for i in np.lexsort((-weight, (held & needed).sum(1))).tolist():
        holders, load = np.flatnonzero(held[i] & needed), loads[int(states[i])]
        owner[i] = _by_turn(holders[load[holders] == load[holders].min()], turn)
        load[owner[i]] += weight[i]
    return owner


def _by_turn(candidates: Ints, turn: int) -> int:
    return int(candidates[turn % len(candidates)])


def _bytes(cell: Cell) -> int:
    size = math.prod(part.size for part in cell.parts.values())
    return len(cell.match.names) * cell.match.destination[cell.destination].itemsize * size


def _view(cell: Cell, owner: int) -> int:
    """The index of the owner's first view that holds a cell."""
    return int(np.flatnonzero(_held(cell.parts.values()) & (cell.match.sources.worker == owner))[0])


def _held(parts: Iterable[Part]) -> Bools:
    """Whether each source view holds all of these parts, (views,) bool."""
    held: Bools = np.logical_and.reduce([part.held for part in parts])
    return held


def _describe(cell: Cell) -> str:
    """A cell in words; axes of which it has every coordinate are left out."""
    ours, names = cell.match.destination[cell.destination], cell.match.names
    sizes = {**ours.sizes, TOKEN: cell.every}
    shown = [
        f"positions {part} of every {cell.every}"
        if axis == TOKEN
        else f"{axis} {part} of {sizes[axis]}"
        for axis, part in cell.parts.items()
        if part.size < sizes[axis]
    ]
    tensors = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it"
    return f"{tensors}: {', '.join(shown) or 'all of it'}"
