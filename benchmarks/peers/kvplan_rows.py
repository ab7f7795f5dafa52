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
        """Return the term for the ids that a plan gives to the first ``blocks`` blocks of a pool."""
        # one row for each run, one column for each block, and the ids of that block
        by_run = ids.reshape(num_runs, blocks, -1).astype(np.int64)
        sub = by_run[0, 0] - by_run[0, 0, 0]
        step = int(by_run[0, 1, 0] - by_run[0, 0, 0])
        return cls(by_run[:, 0, :1].astype(np.int32), step, sub.astype(np.int32))

    def row(self, ids: Ids) -> Ids:
        """Return the ids of the blocks within one run."""
        if self.step == 1 and self.sub.size == 1:
            return ids
        run_ids: Ids = np.add.outer(ids * np.int32(self.step), self.sub).reshape(-1)
        return run_ids


Tables = tuple[dict[str, Blocks], dict[str, Blocks]]


def tables(request: Request) -> Tables:
    """Return the block tables of both sides, local and remote."""
    return {"attn": Blocks(request.destination)}, {"attn": Blocks(request.source)}


def bound(
    plan: TransferPlan,
    request: Request,
    workspace: Workspace | None = None,
    block_tables: Tables | None = None,
) -> tuple[ReadSpec, ...]:
    """Bind the request, from lists unless there are block tables."""
    local, remote = block_tables or tables(request)
    return plan.bind(local=local, remote=remote, tokens=(0, request.stop), workspace=workspace)


def terms(world: World) -> dict[Any, tuple[Term, Term]]:
    """Return the terms of each pair, local and remote. Pairs with equal layouts share them."""
    local_tokens = world.case.destination.tokens
    remote_tokens = world.case.source.tokens
    # a request of the first blocks of both pools, two of the larger size
    stop = 2 * max(local_tokens, remote_tokens)
    num_local = stop // local_tokens
    num_remote = stop // remote_tokens
    specs = bound(world.plan, Request(list(range(num_remote)), list(range(num_local)), stop))
    runs = world.case.runs
    terms_of_pairs = {}
    for pair, spec in zip(world.plan.pairs, specs, strict=True):
        local = Term.of(spec.local_ids, runs, num_local)
        terms_of_pairs[pair.group_pairs] = local, Term.of(spec.remote_ids, runs, num_remote)
    return terms_of_pairs


class Floor:
    """The floor of a request."""

    def __init__(self, world: World, request: Request) -> None:
        self._terms = terms(world)
        self._request = request
        self._pairs = [pair.group_pairs for pair in world.plan.pairs]
        local_blocks, remote_blocks = self._arrays()
        self._ids = {
            pair: (np.add(local.runs, local.row(local_blocks)), np.add(remote.runs, remote.row(remote_blocks)))
            for pair, (local, remote) in self._terms.items()
        }

    def _arrays(self) -> tuple[Ids, Ids]:
        """Return the block ids of both sides, local and remote."""
        return np.array(self._request.destination, np.int32), np.array(self._request.source, np.int32)

    def reused(self) -> Sides:
        """Return local and remote ids of each pair, in reused arrays."""
        local_blocks, remote_blocks = self._arrays()
        for pair, (local, remote) in self._terms.items():
            local_ids, remote_ids = self._ids[pair]
            np.add(local.runs, local.row(local_blocks), out=local_ids)
            np.add(remote.runs, remote.row(remote_blocks), out=remote_ids)
        return [self._ids[pair] for pair in self._pairs]


def rows(world: World, request: Request) -> Iterator[Row]:
    """Yield the rows of the floor and of kvplan."""
    floor = Floor(world, request)
    plan = world.plan
    workspace = Workspace()
    made_tables = tables(request)
    yield Row(FLOOR, "ids", floor.reused, _count, lambda ids: floor_copies(plan, request, ids), NOTES["floor"])
    yield Row(BIND, "ids", lambda: bound(plan, request, workspace), _count_ids, copies, note=NOTES["bind"])
    yield Row(
        OF_BLOCKS, "ids", lambda: bound(plan, request, workspace, made_tables), _count_ids, copies, NOTES["blocks"]
    )
    yield Row("kvplan bind", "ids", lambda: bound(plan, request), _count_ids, copies, NOTES["fresh"])
    yield Row(
        DESCRIPTORS,
        "ranges",
        lambda: [(spec, spec.descriptors()) for spec in bound(plan, request, workspace)],
        lambda ranges: sum(len(local) for _, (local, _) in ranges),
        lambda ranges: copies([spec for spec, _ in ranges]),
        NOTES["descriptors"],
    )


NOTES = {
    "floor": "two additions of numpy, with its usual buffers, and no checks",
    "bind": "int32 ids of both sides, in reused memory; checks tables and range, exact to the position",
    "blocks": "the same, of block tables that were made before, which is when their ids are checked",
    "fresh": "the same in new arrays, as peers make them",
    "descriptors": "addresses and lengths as arrays, as few as possible, in order of address",
}


def copies(specs: Any) -> list[Any]:
    """Return addresses read, addresses written and lengths."""
    parts = [spec.descriptors() for spec in specs]
    return [(remote[:, 0], local[:, 0], local[:, 1]) for local, remote in parts]


def floor_copies(plan: TransferPlan, request: Request, ids: Sides) -> list[Any]:
    """Return the same, with the floor's ids in place of the plan's."""
    floor_specs = list[ReadSpec]()
    for spec, (local, remote) in zip(bound(plan, request), ids, strict=True):
        floor_specs.append(attrs.evolve(spec, local_ids=local.reshape(-1), remote_ids=remote.reshape(-1)))
    return copies(floor_specs)


def _count(ids: Sides) -> int:
    return sum(local.size for local, _ in ids)


def _count_ids(specs: Any) -> int:
    return sum(spec.local_ids.size for spec in specs)
