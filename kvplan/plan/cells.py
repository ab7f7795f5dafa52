"""Cells (C): which source serves which part of a destination.

- C1: along each axis, coordinates that the same source views hold form one *part* (:mod:`kvplan.plan.sources`). For the
  token axis these are the positions of a cycle of the contexts; block sizes play no role in who holds what.
- C2: a cell is a product of parts. What no source holds is one error that lists every missing interval.
- C3: cells that the same sources hold are one *lot*, so that who serves whom does not depend on layouts. Fewest peers
  first: sources that alone hold some lot are needed anyway; to them are added, one by one, the source that holds the
  most bytes still without one.
- C4: a lot goes to the needed holder with the fewest bytes so far. States and tokens are lots of their own, and their
  bytes are counted apart: how many tokens there are to a state is known only when a request comes. Ties, here and in
  C3, are broken by turns: the destination's rank says whose turn it is, so every worker comes to the same answer alone.
- C5: where ``replicas`` may take a share each of what they all hold, tensors are divided into as many shares, those of
  one shape and the same holders evenly. Sources of a share are chosen as if it were a destination of its own, whose
  turn comes after that of the share before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Bools, Ints
from kvplan.describe.axes import MAX_SEGMENTS
from kvplan.describe.views import TOKEN, Geometry
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.align import cycle
from kvplan.plan.match import Match
from kvplan.plan.sources import Part


@attrs.frozen(eq=False)
class Cell:
    """What one source view sends to one destination view, for every tensor of a match.

    ``destination`` and ``source`` index the match's views; ``parts`` has every axis, the token axis last and in
    positions of a cycle of all contexts, ``every`` positions long.
    """

    match: Match
    destination: int
    source: int
    parts: Mapping[str, Part]
    every: int

    @property
    def sides(self) -> tuple[Geometry, Geometry]:
        """The geometries of both views, the destination's first."""
        return self.match.destination[self.destination], self.match.holding.sources[self.source][1]


def cells(matches: Sequence[Match], replicas: int = 1) -> tuple[Cell, ...]:
    """Every cell of a destination, each with exactly one source. Raises ``TENSOR`` or ``COVER`` with what lacks one."""
    if not matches:
        return ()
    destination, sources = matches[0].workers
    found: list[Cell] = []
    held: list[Bools] = []
    missing: list[str] = []
    for one in matches:
        for i in range(len(one.destination)):
            axes, every = parts(one, i), _cycle(one, i)
            for product in itertools.product(*axes.values()):
                holders = np.zeros(len(sources), bool)
                holders[one.holding.worker[_held(product)]] = True
                cell = Cell(one, i, -1, dict(zip(axes, product, strict=True)), every)
                found.append(cell)
                held.append(holders)
                if not holders.any():
                    missing.append(_describe(cell))
    if missing:
        unknown = [one.names[0] for one in matches if not one.holding.sources]
        raise KVPlanError(
            "TENSOR" if unknown else "COVER",
            f"plan for {destination.label}",
            expected="every part of its tensors to be held by a source",
            got="; ".join(missing),
            hint="name tensors in not_transferred if they need not move" if unknown else "",
            missing=tuple(missing),
            sources=tuple(worker.label for worker in sources),
        )
    lots, made = np.array(held), list[Cell]()
    for turn, (which, share) in enumerate(_shares(found, _divide(matches, destination, replicas), replicas)):
        owners = _owners(share, lots[which], destination.rank * replicas + turn)
        made += [attrs.evolve(cell, source=_view(cell, owner)) for cell, owner in zip(share, owners, strict=True)]
    return tuple(made)


def _divide(matches: Sequence[Match], destination: Worker, replicas: int) -> dict[str, int]:
    """The share of each tensor, in ``[0, replicas)``, by rule C5: neighbours stay together, which keeps runs long."""
    alike: dict[Any, list[str]] = {}
    for one in matches:
        sizes = sorted((axis, size) for axis, size in one.destination[0].sizes.items() if axis != TOKEN)
        key = (one.destination[0].dtype, *sizes, frozenset(one.holding.worker.tolist()))
        alike.setdefault(key, []).extend(one.names)
    order = {name: i for i, name in enumerate(destination.tensors)}
    return {
        name: (at * replicas // len(names) + turn) % replicas
        for turn, names in enumerate(alike.values())
        for at, name in enumerate(sorted(names, key=order.__getitem__))
    }


def _shares(found: Sequence[Cell], share: Mapping[str, int], replicas: int) -> Iterator[tuple[Ints, list[Cell]]]:
    """For each share its cells, and which of all cells they are part of."""
    for turn in range(replicas):
        mine = [_take(cell, [share[name] == turn for name in cell.match.names]) for cell in found]
        which = np.flatnonzero([len(cell.match.names) for cell in mine])
        yield which, [mine[i] for i in which.tolist()]


def _take(cell: Cell, which: Sequence[bool]) -> Cell:
    """A cell of some of its match's tensors."""
    if all(which):
        return cell
    names, rows = tuple(itertools.compress(cell.match.names, which)), np.flatnonzero(which)
    ours, theirs = cell.match.views
    return attrs.evolve(cell, match=attrs.evolve(cell.match, names=names, views=(ours[rows], theirs[rows])))


def _owners(share: Sequence[Cell], held: Bools, turn: int) -> Ints:
    """The source of each cell of a share, by the lots that they form."""
    states = [cell.match.destination[cell.destination].group.tokens_per_block is None for cell in share]
    keys = [(state, holders.tobytes()) for state, holders in zip(states, held, strict=True)]
    lots = {key: i for i, key in enumerate(sorted(set(keys)))}
    alike = np.array([lots[key] for key in keys], np.int64)
    weight = np.bincount(alike, [_bytes(cell) for cell in share]).astype(np.float64)
    apart = np.array([np.frombuffer(holders, bool) for _, holders in lots], bool).reshape(-1, held.shape[1])
    owners: Ints = choose(apart, weight, np.array([state for state, _ in lots], bool), turn)[alike]
    return owners


def parts(found: Match, destination: int) -> dict[str, tuple[Part, ...]]:
    """The parts of each axis of one destination view, the token axis last."""
    ours, theirs = found.destination[destination], found.holding
    every = _cycle(found, destination)
    result = {axis: theirs.cover(axis).parts(ours.segments[axis].covered) for axis in ours.sizes if axis != TOKEN}
    result[TOKEN] = theirs.positions(ours.group, every)
    return result


def _cycle(found: Match, destination: int) -> int:
    """After how many positions it is the same workers' turn again, of all that a match concerns."""
    every = cycle(found.destination[destination].group, *found.holding.groups[0])
    if every > MAX_SEGMENTS:
        raise KVPlanError(
            "RANGE",
            f"align the contexts of tensor {found.names[0]!r}",
            expected=f"a common cycle of at most {MAX_SEGMENTS} positions",
            got=f"{every}",
            cycle=every,
        )
    return every


def choose(held: Bools, weight: npt.NDArray[np.float64], states: Bools, turn: int) -> Ints:
    """The source of each lot by rules C3 and C4. ``held`` is (lots, sources), ``weight`` the lots' bytes.

    ``states`` says which lots are states and not tokens.

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
    for lot in np.lexsort((-weight, (held & needed).sum(1))).tolist():
        holders, load = np.flatnonzero(held[lot] & needed), loads[int(states[lot])]
        owner[lot] = _by_turn(holders[load[holders] == load[holders].min()], turn)
        load[owner[lot]] += weight[lot]
    return owner


def _by_turn(candidates: Ints, turn: int) -> int:
    return int(candidates[turn % len(candidates)])


def _bytes(cell: Cell) -> int:
    size = math.prod(part.size for part in cell.parts.values())
    return len(cell.match.names) * cell.match.destination[cell.destination].itemsize * size


def _view(cell: Cell, owner: int) -> int:
    """The first of the owner's views that holds a cell."""
    return int(np.flatnonzero(_held(cell.parts.values()) & (cell.match.holding.worker == owner))[0])


def _held(parts: Iterable[Part]) -> Bools:
    """Which source views hold all of some parts."""
    held: Bools = np.logical_and.reduce([part.held for part in parts])
    return held


def _describe(cell: Cell) -> str:
    """What a cell is, without the axes that it has whole."""
    ours, names = cell.match.destination[cell.destination], cell.match.names
    sizes = {**ours.sizes, TOKEN: cell.every}
    shown = [
        f"positions {part} of every {cell.every}" if axis == TOKEN else f"{axis} {part} of {sizes[axis]}"
        for axis, part in cell.parts.items()
        if part.size < sizes[axis]
    ]
    alike = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it"
    return f"{alike}: {', '.join(shown) or 'all of it'}"
