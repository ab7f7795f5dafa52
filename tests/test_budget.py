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
    certify,
    contacts,
    decode,
    encode,
    explain,
    plan_mesh,
    plan_reads,
    plan_writes,
    problems,
    show,
)
from kvplan.staging import choose, stage
from tests.counted import numbers_of
from tests.small import engine

MORE_REGION = Region("staging", 1 << 50, 1 << 20)
(LOCAL,) = engine("d")
LOCAL = attrs.evolve(LOCAL, regions=(*LOCAL.regions, MORE_REGION))
REMOTES = engine("p", tp=2, order="NH")
PLAN = plan_reads(LOCAL, REMOTES)
OFFER = encode(LOCAL)

DOORS: dict[str, Callable[[], object]] = {
    "decode": lambda: decode(OFFER),
    "problems": lambda: problems(OFFER),
    "plan_reads": lambda: plan_reads(LOCAL, REMOTES),
    "plan_writes": lambda: plan_writes(REMOTES[0], [LOCAL], REMOTES[1:]),
    "plan_mesh": lambda: plan_mesh([LOCAL], REMOTES),
    "contacts": lambda: contacts([LOCAL], REMOTES),
    "cost": PLAN.cost,
    "certify": lambda: certify(PLAN),
    "stage": lambda: stage(LOCAL, REMOTES, staging="staging"),
    "staged cost": stage(LOCAL, REMOTES, staging="staging").cost,
    "choose": lambda: choose(LOCAL, REMOTES, tokens=9, staging="staging", strategy="receive-staged"),
    "explain": lambda: explain(PLAN, detail="rows"),
    "show": lambda: show(PLAN),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_door_takes_what_it_needs_and_not_a_byte_less(door: str) -> None:
    """Each counts before it works: with as much as it takes it succeeds, with a byte less it is refused."""
    with Budget() as budget:
        DOORS[door]()
    assert 0 < budget.num_taken < budget.num_bytes
    with Budget(budget.num_taken):
        DOORS[door]()
    with Budget(budget.num_taken - 1), pytest.raises(KVPlanError, match=r"^RANGE: .*in a larger kvplan.Budget"):
        DOORS[door]()


def test_all_that_is_done_in_a_block_counts_together() -> None:
    """Two plans take twice what one does, and outside of the block each has a budget of its own."""
    with Budget() as single:
        DOORS["plan_reads"]()
    with Budget(2 * single.num_taken) as double:
        DOORS["plan_reads"]()
        DOORS["plan_reads"]()
        with pytest.raises(KVPlanError, match=r"^RANGE: "):
            DOORS["plan_reads"]()
    assert double.num_taken == double.num_bytes
    DOORS["plan_reads"]()


def test_the_innermost_budget_counts() -> None:
    """A caller who trusts a peer gives more than the code around allows; what is refused is not taken."""
    with Budget(1) as outer:
        with Budget() as inner:
            DOORS["plan_reads"]()
        with pytest.raises(KVPlanError, match=r"^RANGE: "):
            DOORS["plan_reads"]()
    assert inner.num_taken > 0
    assert outer.num_taken == 0


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
    with pytest.raises(KVPlanError, match=r"^RANGE: cannot number .* got 2\.\d+ GiB with 1678"):
        plan_reads(local, [remote])
    assert numbers_of(lambda: plan_reads(side("d", 16, 0), [side("p", 64, 1)]))["slots of runs"] == 256 * (16 + 64)


def test_sources_count_together() -> None:
    """Four of eight workers fit into a budget for which one of eight heads each is small."""
    local = side("d", 16, 0)
    remotes = [side("p", 1 << 16, 1 + head, [head], head) for head in range(8)]
    with pytest.raises(KVPlanError, match=r"^RANGE: cannot number"):
        plan_reads(local, remotes)
    assert plan_reads(side("d", 16, 0, [0]), remotes[:1])


def test_workers_of_an_answer_are_limited() -> None:
    """Many small workers cost as much as a large one, whether anything is read from them or not."""
    numbers = numbers_of(lambda: plan_reads(LOCAL, REMOTES))
    assert numbers["workers"] == 3
    with Budget(10 * len(OFFER) * 200):
        for _ in range(10):
            decode(OFFER)
        with pytest.raises(KVPlanError, match=r"with .* bytes of a message"):
            decode(OFFER)


def test_a_position_that_ranks_take_turns_in_is_counted() -> None:
    """Half a million turns of two ranks are counted before they are listed, for each view that has them."""
    (local,) = engine("d", layers=1, contexts=(1, 1))
    turns = Context(0, 1 << 19, 1)
    group = attrs.evolve(local.groups[0], context=turns)
    theirs = attrs.evolve(local, engine_id="p", groups=[group])
    halves = attrs.evolve(local, groups=[attrs.evolve(local.groups[0], context=Context(0, 2))])
    assert numbers_of(lambda: plan_reads(theirs, [halves]))["intervals"] >= 1 << 18


def test_groups_that_may_share_bytes_are_counted() -> None:
    """Each group is compared with each other one of its region, view by view, when a plan is made."""
    axes = [Axis("token", 0, 4, 4, 4), Axis("dim", 0, 4, 4, 1)]
    groups = [Group(f"g{i}", 4) for i in range(9)]
    views = [View(f"t.{i}", group, "pool", "uint8", axes, 4, 16) for i, group in enumerate(groups)]
    workers = [Worker(name, 0, [Region("pool", 0, 64)], groups, views) for name in "dp"]
    assert numbers_of(lambda: plan_reads(workers[0], workers[1:]))["views"] == 2 * 9 * 8
