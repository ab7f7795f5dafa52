"""Meshes: the plans of all workers of two engines, and which workers exchange bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import attrs

from kvplan.budget import Budget
from kvplan.describe.worker import Key, Worker, checked_names
from kvplan.plan.cost import Cost, cost
from kvplan.plan.pairs import assignments, budget_of, plan_pairs
from kvplan.plan.specs import READ, direction_of
from kvplan.plan.transfer import TransferPlan, checked_workers


@attrs.frozen(eq=False, repr=False)
class MeshPlan:
    """The plans of all workers of one engine with all workers of another. Threads may share it."""

    plans: tuple[TransferPlan, ...]

    @property
    def num_workers(self) -> int:
        """Workers of both engines."""
        locals_ = {plan.local.key for plan in self.plans}
        return len(locals_.union(*({pair.remote for pair in plan.pairs} for plan in self.plans)))

    def cost(self, tokens: int | None = None) -> Cost:
        """Return what a request costs in all plans; see :meth:`kvplan.TransferPlan.cost`."""
        pairs = []
        for plan in self.plans:
            pairs += [(plan.local.key, pair) for pair in plan.pairs]
        direction = self.plans[0].direction if self.plans else READ
        return cost(direction, pairs, tokens)

    def __repr__(self) -> str:
        return f"<MeshPlan: {len(self.plans)} plans, {self.num_workers} workers>"


def plan_mesh(
    destinations: Iterable[Worker],
    sources: Iterable[Worker],
    operation: Literal["READ", "WRITE"] = "READ",
    *,
    not_transferred: Iterable[str] = (),
    budget: Budget | None = None,
) -> MeshPlan:
    """Return the plans of two whole engines: every destination's reads, or every source's writes.

    Raises what :func:`kvplan.plan_reads` does, and ``NAME`` for a name in ``not_transferred`` that
    no worker has.
    """
    direction = direction_of(operation, "plan a mesh")
    receivers = checked_workers("destinations", destinations)
    senders = checked_workers("sources", sources, *receivers)
    skipped = checked_names(not_transferred, *receivers, *senders)
    local_workers, remotes = direction.by_role(receivers, senders)
    budget = budget_of(budget, len(receivers))
    assigned = assignments(receivers, senders, skipped, budget)
    pairs = plan_pairs(direction, local_workers, remotes, assigned, budget)
    plans = []
    for i, local in enumerate(local_workers):
        # a writer plans with its siblings
        siblings = () if direction is READ else local_workers[:i] + local_workers[i + 1 :]
        plan = TransferPlan(operation, local, remotes, siblings, skipped, pairs[local.key])
        plans.append(plan)
    return MeshPlan(tuple(plans))


def contacts(
    destinations: Iterable[Worker],
    sources: Iterable[Worker],
    *,
    not_transferred: Iterable[str] = (),
    budget: Budget | None = None,
) -> Mapping[Key, tuple[Key, ...]]:
    """Return, for each worker of both engines, the workers that it exchanges bytes with.

    They depend only on which shards each worker holds, not on layouts, block sizes, pools or
    addresses. A worker can therefore ask before any offer arrives, from the other engine's parallel
    sizes:

    >>> from kvplan import Model
    >>> model = Model.shipped("qwen3-235b-a22b")  # 4 KV heads
    >>> decode = model.engine("decode", tp=2, num_blocks=1)
    >>> contacts(decode, model.engine("prefill", tp=8, num_blocks=1))["decode", 1]
    (('prefill', 5), ('prefill', 7))

    Raises what :func:`kvplan.plan_reads` does.
    """
    receivers = checked_workers("destinations", destinations)
    senders = checked_workers("sources", sources, *receivers)
    skipped = checked_names(not_transferred, *receivers, *senders)
    contacts_of: dict[Key, list[Key]] = {worker.key: [] for worker in (*receivers, *senders)}
    for assignment in assignments(receivers, senders, skipped, budget_of(budget, len(receivers))):
        contacts_of[assignment.destination.key].append(assignment.source.key)
        contacts_of[assignment.source.key].append(assignment.destination.key)
    return {key: tuple(keys) for key, keys in contacts_of.items()}
