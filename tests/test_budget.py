"""Budgets: what offers may cost is counted before it is done, over everything that is done with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import pytest

from kvplan import (
    Axis,
    Budget,
    Context,
    Group,
    KVPlanError,
    Region,
    View,
    Worker,
    contacts,
    plan_mesh,
    plan_reads,
    plan_writes,
)
from kvplan.staging import choose, stage
from tests.counted import numbers_of
from tests.small import engine

MORE_REGION = Region("staging", 1 << 50, 1 << 20)
(LOCAL,) = engine("d")
LOCAL = attrs.evolve(LOCAL, regions=(*LOCAL.regions, MORE_REGION))
REMOTES = engine("p", tp=2, order="NH")

DOORS: dict[str, Callable[[Budget], object]] = {
    "plan_reads": lambda budget: plan_reads(LOCAL, REMOTES, budget=budget),
    "plan_writes": lambda budget: plan_writes(REMOTES[0], [LOCAL], REMOTES[1:], budget=budget),
    "plan_mesh": lambda budget: plan_mesh([LOCAL], REMOTES, budget=budget),
    "contacts": lambda budget: contacts([LOCAL], REMOTES, budget=budget),
    "stage": lambda budget: stage(LOCAL, REMOTES, staging="staging", budget=budget),
    "choose": lambda budget: choose(
        LOCAL, REMOTES, tokens=9, staging="staging", strategy="receive-staged", budget=budget
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_door_takes_what_it_needs_and_not_a_byte_less(door: str) -> None:
    """Each counts before it works: with as much as it takes it succeeds, with a byte less it is refused."""
    budget = Budget()
    DOORS[door](budget)
    assert 0 < budget.num_spent < budget.num_bytes
    DOORS[door](Budget(budget.num_spent))
    with pytest.raises(KVPlanError, match=r"^RANGE: .*got an estimate of .*pass a larger kvplan.Budget"):
        DOORS[door](Budget(budget.num_spent - 1))


def test_all_that_is_given_one_budget_counts_together() -> None:
    """Two plans take twice what one does, what is refused is not taken, and a plan without one has its own."""
    single = Budget()
    DOORS["plan_reads"](single)
    double = Budget(2 * single.num_spent)
    DOORS["plan_reads"](double)
    DOORS["plan_reads"](double)
    with pytest.raises(KVPlanError, match=r"^RANGE: "):
        DOORS["plan_reads"](double)
    assert double.num_spent == double.num_bytes
    assert plan_reads(LOCAL, REMOTES).pairs


def side(engine_id: str, slots: int, gap: int, heads: Iterable[int] = range(8), rank: int = 0) -> Worker:
    """A worker with some of eight heads of 32 layers, whose tokens are ``gap`` bytes apart."""
    first, last = min(heads), max(heads)
    step = 64 + gap
    axes = [
        Axis("head", first, last + 1, 8, step * slots),
        Axis("token", 0, slots, slots, step),
        Axis("dim", 0, 64, 64, 1),
    ]
    views, regions = [], []
    for layer in range(32):
        view = View(f"layers.{layer}", "attn", f"r.{layer}", "uint8", axes, 4, step * slots * (last + 1 - first))
        regions.append(Region(view.region, layer << 40, view.end_bytes))
        views.append(view)
    return Worker(engine_id, rank, regions, [Group("attn", slots)], views)


def test_slots_of_one_source_are_limited() -> None:
    """Blocks of 65,536 tokens in 256 pieces a token are refused, and planned by whoever trusts the peer."""
    local, remote = side("d", 16, 0), side("p", 1 << 16, 1)
    with pytest.raises(KVPlanError, match=r"^RANGE: cannot plan .* estimate of 2\.\d+ GiB with 1678"):
        plan_reads(local, [remote])
    numbers = numbers_of(lambda budget: plan_reads(local, [side("p", 64, 1)], budget=budget))
    assert numbers["slots of runs"] == 256 * (16 + 64)


def test_sources_count_together() -> None:
    """Four of eight workers fit into a budget for which one of eight heads each is small."""
    local = side("d", 16, 0)
    remotes = [side("p", 1 << 16, 1 + head, [head], head) for head in range(8)]
    with pytest.raises(KVPlanError, match=r"^RANGE: cannot plan"):
        plan_reads(local, remotes)
    assert plan_reads(side("d", 16, 0, [0]), remotes[:1])


def test_workers_of_an_answer_are_limited() -> None:
    """Many small workers cost as much as a large one, whether anything is read from them or not."""
    assert numbers_of(lambda budget: plan_reads(LOCAL, REMOTES, budget=budget))["workers"] == 3


def test_a_position_that_ranks_take_turns_in_is_counted() -> None:
    """Half a million turns of two ranks are counted before they are listed, for each view that has them."""
    (local,) = engine("d", layers=1, contexts=(1, 1))
    turns = Context(0, 1 << 19, 1)
    group = attrs.evolve(local.groups[0], context=turns)
    theirs = attrs.evolve(local, engine_id="p", groups=[group])
    halves = attrs.evolve(local, groups=[attrs.evolve(local.groups[0], context=Context(0, 2))])
    assert numbers_of(lambda budget: plan_reads(theirs, [halves], budget=budget))["intervals"] >= 1 << 18
