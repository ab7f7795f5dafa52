"""Cells (C): divides what a destination needs into boxes, and chooses one source for each.

Here the destination holds 6 of 12 heads (D TP 2), and each source 4 (P TP 3). The destination's
axis is cut where a source begins or ends:

    head           0    1    2    3    4    5    6    7
    destination  |           rank 0            |
    sources      |      rank 0       |      rank 1       |
    slices       |      [0, 4)       | [4, 6)  |

A product of such slices, one of each axis, is a cell: what one source sends to one destination, for
all layers of a match. Where ranks replicate heads (more ranks than KV heads, or the latents of
MLA), a cell has several holders, and one of them is chosen.

- plan.C1: Along each axis, the coordinates that the same source views hold form one *slice*. The
  slices of the token axis are positions in one cycle of the contexts. Block sizes do not matter for
  who holds what.
- plan.C2: A cell is a product of slices, one of each axis. Cells without a holder make one error;
  its details list all of them.
- plan.C3: The sources that hold a cell are its *replica set*. Cells with equal replica sets get the
  same source, so the choice does not depend on layouts. The fewest sources are taken: first those
  that are the only holder of some cell; then, one by one, the source that holds the most bytes that
  have none yet.
- plan.C4: Each replica set is read from its chosen holder with the fewest bytes assigned so far.
  States and tokens are counted apart, because the number of tokens to a state is unknown before a
  request. Ties, here and in plan.C3, are broken by ``destination.rank % candidates``, so every
  worker computes the same choice without communication.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
from kvplan.plan.match import AxisSlice, Match


@attrs.frozen(eq=False)
class Cell:
    """The box that one source view sends to one destination view, for every tensor of a match.

    ``destination`` and ``source`` are indices of the match's views; before a source is chosen,
    ``source`` is -1. ``slices`` has one slice of every axis. The token axis comes last; its slice
    has positions in ``[0, cycle)``, one cycle of all contexts.
    """

    match: Match
    destination: int
    source: int
    slices: Mapping[str, AxisSlice]
    cycle: int

    @property
    def sides(self) -> tuple[Geometry, Geometry]:
        """The geometries of the two views, the destination's first."""
        return self.match.destination[self.destination], self.match.sources.views[self.source][1]

    @property
    def source_worker(self) -> int:
        """The index of the source among the workers of the match."""
        return int(self.match.sources.worker[self.source])

    @property
    def is_state(self) -> bool:
        """Whether the cell is of a state, not of tokens."""
        return self.match.destination[self.destination].group.is_state

    @property
    def num_bytes(self) -> int:
        """The bytes of the cell, for every tensor and all positions of a cycle."""
        num_elements = math.prod(each.size for each in self.slices.values())
        itemsize = self.match.destination[self.destination].itemsize
        return len(self.match.names) * itemsize * num_elements

    def holding_views(self) -> Bools:
        """Return whether each source view holds all of the cell, (views,)."""
        held: Bools = np.logical_and.reduce([each.held for each in self.slices.values()])
        return held

    def from_worker(self, worker: int) -> Cell:
        """Return the cell with the worker's first view that holds it as source."""
        views = self.holding_views() & (self.match.sources.worker == worker)
        return attrs.evolve(self, source=int(np.flatnonzero(views)[0]))

    def __str__(self) -> str:
        """Name the tensors, and the slices of axes that are not whole."""
        names = self.match.names
        sizes = {**self.match.destination[self.destination].sizes, TOKEN: self.cycle}
        slices = []
        for axis, axis_slice in self.slices.items():
            if axis_slice.size < sizes[axis]:
                is_token = axis == TOKEN
                span = f"{axis} {axis_slice} of {sizes[axis]}"
                slices.append(f"positions {axis_slice} of every {self.cycle}" if is_token else span)
        tensors = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it"
        return f"{tensors}: {', '.join(slices) or 'all of it'}"


def cells(matches: Sequence[Match]) -> tuple[Cell, ...]:
    """Return all cells of a destination, each with one source.

    Raises ``TENSOR`` for tensors that no source has, else ``COVER`` for what no source holds,
    listing them all.
    """
    if not matches:
        return ()
    destination, sources = matches[0].workers
    candidates = list(_all_cells(matches))
    # One row for each cell: whether each source holds it.
    held = np.zeros((len(candidates), len(sources)), bool)
    for cell, holders in zip(candidates, held, strict=True):
        holders[cell.match.sources.worker[cell.holding_views()]] = True
    _refuse_missing(matches, candidates, held)
    owners = _assign_sources(candidates, held, destination.rank)
    return tuple([cell.from_worker(owner) for cell, owner in zip(candidates, owners, strict=True)])


def _all_cells(matches: Iterable[Match]) -> Iterator[Cell]:
    """Yield the products of the slices of all views, not yet with a source, by rules plan.C1 and
    plan.C2.
    """
    for match in matches:
        for view in range(len(match.destination)):
            axes = axis_slices(match, view)
            num_positions = cycle_of(match, view)
            for product in itertools.product(*axes.values()):
                box = dict(zip(axes, product, strict=True))
                yield Cell(match, view, -1, box, num_positions)


def _refuse_missing(matches: Iterable[Match], candidates: Iterable[Cell], held: Bools) -> None:
    """Raise ``TENSOR`` or ``COVER`` if a cell has no holder, no true value in ``held``."""
    missing = [
        str(cell) for cell, holders in zip(candidates, held, strict=True) if not holders.any()
    ]
    if not missing:
        return
    destination, sources = next(iter(matches)).workers
    unknown = [match.names[0] for match in matches if not match.sources.views]
    raise KVPlanError(
        "TENSOR" if unknown else "COVER",
        f"plan for {destination.label}",
        expected="a source for every slice of its tensors",
        got=few(missing, "; "),
        hint=_hint(unknown[0], sources) if unknown else "",
        missing=tuple(missing),
        sources=tuple(worker.label for worker in sources),
    )


def _hint(name: str, sources: Iterable[Worker]) -> str:
    """Say what to do about a missing tensor, with the nearest names that the sources have."""
    # A tensor of the same layer with a similar name is the likeliest mistake.
    layer = split(name)[1]
    names = dict.fromkeys(itertools.chain.from_iterable(worker.tensors for worker in sources))
    of_layer = [candidate for candidate in names if split(candidate)[1] == layer]
    near = difflib.get_close_matches(name, of_layer[:FEW]) or of_layer[:3]
    advice = "name tensors in not_transferred if they need not move"
    if not near:
        return advice
    return f"the sources have {', '.join(map(repr, near))}: compare shows both sides; {advice}"


def _assign_sources(candidates: Sequence[Cell], held: Bools, rank: int) -> list[int]:
    """Return the index of the source of each cell, by rules plan.C3 and plan.C4.

    ``held`` is (cells, sources), one replica set in each row; ``rank`` is the destination's.
    """
    keys = []
    for cell, holders in zip(candidates, held, strict=True):
        keys.append((cell.is_state, holders.tobytes()))
    # The distinct replica sets, states and tokens apart; sorted, so that the order of the cells
    # does not matter.
    set_of_key = {key: i for i, key in enumerate(sorted(set(keys)))}
    set_of_cell = np.array([set_of_key[key] for key in keys], np.int64)
    set_bytes = np.bincount(set_of_cell, [cell.num_bytes for cell in candidates])
    set_holders = [np.frombuffer(holders, bool) for _, holders in set_of_key]
    owners = choose_sources(
        np.array(set_holders, bool).reshape(-1, held.shape[1]),
        set_bytes.astype(np.float64),
        np.array([is_state for is_state, _ in set_of_key], bool),
        rank,
    )
    sources: list[int] = owners[set_of_cell].tolist()
    return sources


def axis_slices(match: Match, view: int) -> dict[str, tuple[AxisSlice, ...]]:
    """Return the slices of each axis of one destination view, the token axis last."""
    geometry = match.destination[view]
    axes = [axis for axis in geometry.sizes if axis != TOKEN]
    num_positions = cycle_of(match, view)
    return {axis: match.sources.slices(geometry, axis, num_positions) for axis in (*axes, TOKEN)}


def cycle_of(match: Match, view: int) -> int:
    """Return the cycle of the contexts of a destination view and all sources, in positions."""
    num_positions = cycle(match.destination[view].group, *match.sources.groups)
    subject = f"align the contexts of tensor {match.names[0]!r}"
    at_most(MAX_SEGMENTS, num_positions, "positions in a common cycle", subject)
    return num_positions


def choose_sources(
    held: Bools, set_bytes: npt.NDArray[np.float64], is_state: Bools, rank: int
) -> Ints:
    """Return the source of each replica set by rules plan.C3 and plan.C4, (sets,) int64.

    ``held`` is (sets, sources) bool; ``set_bytes`` (sets,) has the bytes that each set holds;
    ``is_state`` (sets,) is true for the sets of state groups; ``rank`` is the destination's.

    >>> replicas = np.ones((1, 4), bool)
    >>> for rank in range(5):
    ...     print(choose_sources(replicas, np.ones(1), np.zeros(1, bool), rank))
    [0]
    [1]
    [2]
    [3]
    [0]
    """
    # plan.C3: sources that are the only holder of a set, then greedily until every set has one.
    chosen = held[held.sum(1) == 1].any(0)
    while not (served := (held & chosen).any(1)).all():
        new_bytes = set_bytes[~served] @ held[~served]
        chosen[_break_tie(np.flatnonzero(new_bytes == new_bytes.max()), rank)] = True
    # plan.C4: bytes assigned so far to each source, one row for tokens and one for states.
    loads = np.zeros((2, held.shape[1]))
    owners = np.zeros(len(held), np.int64)
    # Sets with the fewest candidates first, among them those with the most bytes: they leave the
    # least choice.
    for i in np.lexsort((-set_bytes, (held & chosen).sum(1))).tolist():
        load = loads[int(is_state[i])]
        holders = np.flatnonzero(held[i] & chosen)
        owners[i] = _break_tie(holders[load[holders] == load[holders].min()], rank)
        load[owners[i]] += set_bytes[i]
    return owners


def _break_tie(candidates: Ints, rank: int) -> int:
    """Return the candidate of a destination's rank: other ranks take other ones."""
    return int(candidates[rank % len(candidates)])
