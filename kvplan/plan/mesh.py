"""Meshes: plans of whole engines, and the completions that their workers exchange.

The worker that moves bytes, a reader or a writer, notifies the other worker when a request is complete: one
*completion* for each pair of workers that its plan has rows for, also in a request that moves no byte between them. Who
notifies whom is read off the plans, so no second formula can disagree with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import attrs

from kvplan._checks import is_one_of, members
from kvplan._text import shown
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.plan.cost import Cost, cost
from kvplan.plan.specs import idle_pair
from kvplan.plan.transfer import (
    Planned,
    TransferPlan,
    checked_names,
    checked_workers,
    pair_of,
    shares,
)

OPERATIONS: Final = ("READ", "WRITE")


@attrs.frozen
class Completions:
    """The workers that one worker notifies of a completed request, and those it waits for: (engine id, rank) each.

    A worker that waits for nobody may free or use a request's blocks at once: a replica that serves no destination.
    """

    sends: tuple[Key, ...]
    awaits: tuple[Key, ...]


def completions(plans: Iterable[TransferPlan]) -> Mapping[Key, Completions]:
    """The completions of every worker in the plans, local and remote.

    Pass the plans of a whole mesh, reads or writes: a worker waits for all others that move its bytes.
    """
    sends: dict[Key, list[Key]] = {}
    awaits: dict[Key, list[Key]] = {}
    for plan in members(TransferPlan, plans, "plans"):
        local = plan.local.key
        sends.setdefault(local, [])
        for pair in plan.pairs:
            awaits.setdefault(pair.remote, [])
            if pair.group_pairs:
                sends[local].append(pair.remote)
                awaits[pair.remote].append(local)
    return {
        key: Completions(tuple(sends.get(key, ())), tuple(awaits.get(key, ())))
        for key in {**sends, **awaits}
    }


@attrs.frozen(eq=False, repr=False)
class MeshPlan:
    """The plans of all workers of one engine with all workers of another. Threads may share it."""

    plans: tuple[TransferPlan, ...]

    @property
    def completions(self) -> Mapping[Key, Completions]:
        """For each worker of both engines, whom it notifies of a completed request and for whom it waits."""
        return completions(self.plans)

    def cost(self, tokens: int | None = None) -> Cost:
        """The cost of a request in all plans together; see :meth:`kvplan.TransferPlan.cost`."""
        pairs = [(plan.local.key, pair) for plan in self.plans for pair in plan.pairs]
        return cost(self.plans[0].operation if self.plans else "READ", pairs, tokens)

    def __repr__(self) -> str:
        return f"<MeshPlan: {len(self.plans)} plans, {len(self.completions)} workers>"


def plan_mesh(
    destinations: Iterable[Worker],
    sources: Iterable[Worker],
    operation: Literal["READ", "WRITE"] = "READ",
    *,
    not_transferred: Iterable[str] = (),
) -> MeshPlan:
    """The plans of two whole engines: the reads of every destination worker, or the writes of every source worker.

    Raises what :func:`kvplan.plan_reads` does, and ``NAME`` for a name in ``not_transferred`` that no worker has.
    """
    if not is_one_of(operation, OPERATIONS):
        raise KVPlanError("NAME", "plan a mesh", expected="READ or WRITE", got=shown(operation))
    needy = checked_workers("destinations", destinations)
    holders = checked_workers("sources", sources, *needy)
    skipped = checked_names(not_transferred, *needy, *holders)
    reads, known = operation == "READ", Planned()
    near, far = (needy, holders) if reads else (holders, needy)
    idle = {worker.key: idle_pair(worker) for worker in far}
    pairs = {worker.key: dict(idle) for worker in near}
    for destination, source, share in shares(needy, holders, skipped):
        local, remote = (destination, source) if reads else (source, destination)
        pairs[local.key][remote.key] = pair_of(
            share, (destination, source), 0 if reads else 1, known
        )
    plans = []
    for i, worker in enumerate(near):
        siblings = () if reads else holders[:i] + holders[i + 1 :]
        plans.append(
            TransferPlan(
                operation, worker, far, siblings, skipped, tuple(pairs[worker.key].values())
            )
        )
    return MeshPlan(tuple(plans))


def contacts(
    destinations: Iterable[Worker],
    sources: Iterable[Worker],
    *,
    not_transferred: Iterable[str] = (),
) -> Mapping[Key, tuple[Key, ...]]:
    """For each worker of both engines, the workers of the other engine that it exchanges bytes with.

    The answer depends only on which parts each worker holds, not on layouts, block sizes, pools or addresses. A worker
    can therefore ask before any offer arrives, from the other engine's parallel sizes:

    >>> from kvplan import Model
    >>> model = Model.shipped("qwen3-235b-a22b")  # 4 KV heads
    >>> decode, prefill = (model.engine(name, tp=tp, num_blocks=1) for name, tp in (("decode", 2), ("prefill", 8)))
    >>> contacts(decode, prefill)["decode", 1]
    (('prefill', 5), ('prefill', 7))

    Raises what :func:`kvplan.plan_reads` does.
    """
    needy = checked_workers("destinations", destinations)
    holders, skipped = checked_workers("sources", sources, *needy), checked_names(not_transferred)
    found: dict[Key, list[Key]] = {worker.key: [] for worker in (*needy, *holders)}
    for destination, source, _ in shares(needy, holders, skipped):
        found[destination.key].append(source.key)
        found[source.key].append(destination.key)
    return {key: tuple(others) for key, others in found.items()}
