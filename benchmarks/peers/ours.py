"""kvplan's rows, and the floor: two additions of numpy for the same ids.

The floor knows everything but the block ids. It makes an array of each list, repeats each id for the runs of its block,
and adds the result to a column of first ids: one broadcast int32 addition for each side, once for pairs with equal ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from benchmarks.peers.cases import Request, World
from benchmarks.peers.rows import BIND, DESCRIPTORS, FLOOR, OF_BLOCKS, Row
from kvplan import Blocks, ReadSpec, TransferPlan, Workspace

Ids = npt.NDArray[np.int32]
Sides = list[tuple[Ids, Ids]]


@attrs.frozen(eq=False)
class Term:
    """Ids of one side of a pair: a first id for each run, and for each block ``step`` times its id, plus ``sub``."""

    runs: Ids
    step: int
    sub: Ids

    @classmethod
    def of(cls, ids: Ids, num_runs: int, blocks: int) -> Term:
        """From the ids that a plan gives to the first ``blocks`` blocks of a pool."""
        by_run = ids.reshape(num_runs, blocks, -1).astype(np.int64)
        sub = by_run[0, 0] - by_run[0, 0, 0]
        step = int(by_run[0, 1, 0] - by_run[0, 0, 0])
        return cls(by_run[:, 0, :1].astype(np.int32), step, sub.astype(np.int32))

    def row(self, ids: Ids) -> Ids:
        """The ids of the blocks within one run."""
        if self.step == 1 and self.sub.size == 1:
            return ids
        made: Ids = np.add.outer(ids * np.int32(self.step), self.sub).reshape(-1)
        return made


Tables = tuple[dict[str, Blocks], dict[str, Blocks]]


def tables(request: Request) -> Tables:
    """The block tables of both sides, local and remote."""
    return {"attn": Blocks(request.destination)}, {"attn": Blocks(request.source)}


def bound(
    plan: TransferPlan, request: Request, workspace: Workspace | None = None, given: Tables | None = None
) -> tuple[ReadSpec, ...]:
    """Bind the request, from lists unless its tables are given."""
    local, remote = given or tables(request)
    return plan.bind(local=local, remote=remote, tokens=(0, request.stop), workspace=workspace)


def terms(world: World) -> dict[Any, tuple[Term, Term]]:
    """The terms of each pair, local and remote. Pairs with equal layouts share them."""
    sizes = world.case.destination.tokens, world.case.source.tokens
    span = 2 * max(sizes)
    counts = [span // size for size in sizes]
    probe = Request(list(range(counts[1])), list(range(counts[0])), span)
    runs = world.case.runs
    return {
        pair.group_pairs: (Term.of(spec.local_ids, runs, counts[0]), Term.of(spec.remote_ids, runs, counts[1]))
        for pair, spec in zip(world.plan.pairs, bound(world.plan, probe), strict=True)
    }


class Floor:
    """The floor of a request."""

    def __init__(self, world: World, request: Request) -> None:
        self._terms, self._request = terms(world), request
        self._pairs = [pair.group_pairs for pair in world.plan.pairs]
        self._made = self._new()

    def arrays(self) -> tuple[Ids, Ids]:
        """The block ids of both sides, local and remote."""
        return np.array(self._request.destination, np.int32), np.array(self._request.source, np.int32)

    def fresh(self) -> Sides:
        """Local and remote ids of each pair, in new arrays."""
        made = self._new()
        return [made[pair] for pair in self._pairs]

    def _new(self) -> dict[Any, tuple[Ids, Ids]]:
        ours, theirs = self.arrays()
        return {
            pair: (np.add(near.runs, near.row(ours)), np.add(far.runs, far.row(theirs)))
            for pair, (near, far) in self._terms.items()
        }

    def reused(self) -> Sides:
        """The same, in reused arrays."""
        ours, theirs = self.arrays()
        for pair, (near, far) in self._terms.items():
            local, remote = self._made[pair]
            np.add(near.runs, near.row(ours), out=local)
            np.add(far.runs, far.row(theirs), out=remote)
        return [self._made[pair] for pair in self._pairs]


def rows(world: World, request: Request) -> Iterator[Row]:
    """The floor and kvplan."""
    floor, plan, workspace, given = Floor(world, request), world.plan, Workspace(), tables(request)
    yield Row("the lists as arrays", "arrays", floor.arrays, lambda made: made[1].size, note=NOTES["lists"])
    yield Row(FLOOR, "ids", floor.reused, _count, lambda made: floor_copies(plan, request, made), NOTES["floor"])
    yield Row("two additions, into new arrays", "ids", floor.fresh, _count)
    yield Row(BIND, "ids", lambda: bound(plan, request, workspace), _count_ids, copies, note=NOTES["bind"])
    yield Row(OF_BLOCKS, "ids", lambda: bound(plan, request, workspace, given), _count_ids, copies, NOTES["blocks"])
    yield Row("kvplan bind", "ids", lambda: bound(plan, request), _count_ids, copies, NOTES["fresh"])
    yield Row(
        DESCRIPTORS,
        "ranges",
        lambda: [(spec, spec.descriptors()) for spec in bound(plan, request, workspace)],
        lambda made: sum(len(local) for _, (local, _) in made),
        lambda made: copies([spec for spec, _ in made]),
        NOTES["descriptors"],
    )


NOTES = {
    "lists": "np.array(list, np.int32) of both sides, which every function does at least once",
    "floor": "two additions of numpy, with its usual buffers, and no checks",
    "bind": "int32 ids of both sides, in reused memory; checks tables and range, exact to the position",
    "blocks": "the same, of block tables that were made before, which is when their ids are checked",
    "fresh": "the same in new arrays, as peers make them",
    "descriptors": "addresses and lengths as arrays, as few as possible, in order of address",
}


def copies(specs: Any) -> list[Any]:
    """Addresses read, addresses written and lengths."""
    parts = [spec.descriptors() for spec in specs]
    return [(remote[:, 0], local[:, 0], local[:, 1]) for local, remote in parts]


def floor_copies(plan: TransferPlan, request: Request, made: Sides) -> list[Any]:
    """The same, with the floor's ids in place of the plan's."""
    pairs = zip(bound(plan, request), made, strict=True)
    return copies(
        attrs.evolve(spec, local_ids=local.reshape(-1), remote_ids=remote.reshape(-1))
        for spec, (local, remote) in pairs
    )


def _count(made: Sides) -> int:
    return sum(local.size for local, _ in made)


def _count_ids(specs: Any) -> int:
    return sum(spec.local_ids.size for spec in specs)
