"""Plans: who reads from whom, and what a plan says of itself."""

import re
from typing import Any

import attrs
import numpy as np
import pytest

import kvplan.plan
from kvplan import Blocks, KVPlanError, contacts, plan_reads, plan_writes
from kvplan.plan import bind, block_pairs
from tests.small import engine


def test_there_is_a_pair_for_every_remote_in_the_order_given() -> None:
    """Remotes that serve nothing keep their pair, with empty tables, so that pairs and specs line up with remotes."""
    (mine, _), sources = engine("decode", tp=2, heads=4), engine("prefill", tp=4, heads=4)[::-1]
    plan = plan_reads(mine, sources)
    assert [pair.remote for pair in plan.pairs] == [("prefill", rank) for rank in (3, 2, 1, 0)]
    assert [len(pair.local_table.rows) > 0 for pair in plan.pairs] == [False, False, True, True]
    specs = plan.bind(local={"attn": Blocks([1])}, remote={"attn": Blocks([2])})
    assert [spec.num_bytes > 0 for spec in specs] == [False, False, True, True]


def test_replicas_write_each_byte_once() -> None:
    """Every source plans alone, with its siblings in view; for each destination one replica writes."""
    destinations, sources = engine("decode", tp=3, heads=1), engine("prefill", tp=4, heads=1)
    writers = [
        [
            pair.remote[1]
            for pair in plan_writes(mine, destinations, sources[:i] + sources[i + 1 :]).pairs
            if pair.group_pairs
        ]
        for i, mine in enumerate(sources)
    ]
    assert sorted(np.concatenate(writers).tolist()) == [0, 1, 2]


@pytest.mark.parametrize("plan", [plan_reads, plan_writes])
def test_a_whole_engine_in_place_of_the_local_worker_is_pointed_to_plan_mesh(plan: Any) -> None:
    """``Model.engine`` returns a tuple of workers, which is no local worker; the error says what takes them."""
    with pytest.raises(KVPlanError) as refused:
        plan(engine("d", tp=2), engine("p"))
    assert str(refused.value) == (
        "TYPE: cannot read local: expected one Worker, got a tuple of 2 (plan_mesh takes all workers of an engine)"
    )


def test_a_plan_is_one_short_line() -> None:
    """Plans print as one line that says who, with whom and how much."""
    (mine,), sources = engine("decode", heads=4), engine("prefill", tp=2, heads=4)
    plan = plan_reads(mine, sources)
    assert repr(plan) == "<TransferPlan READ decode/0: 2 remotes, 8 local rows>"
    assert repr(plan.pairs[0]) == "<Pair with prefill/0: 4 local rows>"
    (spec, _) = plan.bind(local={"attn": Blocks([1])}, remote={"attn": Blocks([2])})
    assert repr(spec) == "<ReadSpec decode/0 <- prefill/0: 2 ids>"


def test_nothing_moves_in_an_empty_range() -> None:
    """Zero tokens are zero ids and zero bytes, whatever the tables list."""
    (mine,), sources = engine("decode"), engine("prefill")
    (spec,) = plan_reads(mine, sources).bind(local={"attn": Blocks([])}, remote={"attn": Blocks([])}, tokens=(5, 5))
    assert (spec.local_ids.size, spec.num_bytes, spec.num_descriptors) == (0, 0, 0)


def test_other_remotes_take_the_place_of_those_that_keep_the_same():
    """Only addresses and devices are new: ids, and where in its region each row is, stay as they are."""
    (ours,), (theirs,) = engine("decode", layers=1), engine("prefill", layers=1)
    plan = plan_reads(ours, [theirs])
    other = attrs.evolve(
        theirs, engine_id="another", regions=[attrs.evolve(theirs.regions[0], address=1 << 50, device_id=3)]
    )
    before, after = plan.pairs[0].remote_table, plan.with_remotes([other]).pairs[0].remote_table
    assert (after.rows[:, 0] - (1 << 50) == before.rows[:, 0] - before.regions[0].address).all()
    assert (after.rows[:, [1, 3, 4]] == before.rows[:, [1, 3, 4]]).all()
    assert (after.rows[:, 2] == 3).all()
    assert after.regions == other.regions
    assert (after.region.tolist(), after.first.tolist()) == (before.region.tolist(), before.first.tolist())


@pytest.mark.parametrize(
    ("remotes", "message"),
    [
        (engine("another", tp=2)[:1], r"workers in the same order, of ranks \[0, 1\], got ranks \[0\]"),
        (engine("another", tp=2)[::-1], r"workers in the same order, of ranks \[0, 1\], got ranks \[1, 0\]"),
        (
            [attrs.evolve(worker, rank=worker.rank + 2) for worker in engine("another", tp=2)],
            r"workers in the same order, of ranks \[0, 1\], got ranks \[2, 3\]",
        ),
        (engine("another", tp=2, tokens=8), "expected a worker with the same views.* got another/0, which differs"),
        (engine("another", tp=2, layers=3), "expected a worker with the same views.* got another/0, which differs"),
    ],
)
def test_remotes_that_keep_something_else_are_refused(remotes, message):
    """Another rank, order, geometry or tensor calls for a plan of its own."""
    (ours,) = engine("decode")
    plan = plan_reads(ours, engine("prefill", tp=2))
    with pytest.raises(KVPlanError, match=message) as error:
        plan.with_remotes(remotes)
    assert error.value.code == "WORKER"


def test_remotes_of_two_engines_are_replaced_in_the_order_of_their_names():
    """Sources are weighed in order of engine and rank, so that engines in another order could mean another choice."""
    (ours,) = engine("decode", heads=1)
    plan = plan_reads(ours, [*engine("a", heads=1), *engine("b", heads=1)])
    others = [*engine("x", heads=1), *engine("y", heads=1)]
    assert [pair.remote for pair in plan.with_remotes(others).pairs] == [("x", 0), ("y", 0)]
    with pytest.raises(
        KVPlanError, match=r"workers in the same order, of ranks \[0, 0\], got ranks \[0, 0\] of y/0, x/0"
    ):
        plan.with_remotes(others[::-1])


def test_a_request_is_checked_without_making_ids() -> None:
    """``check`` takes what bind takes, and raises what bind raises."""
    (mine,), sources = engine("decode"), engine("prefill")
    plan = plan_reads(mine, sources)
    tables: dict[str, Any] = {"local": {"attn": Blocks([1, 2])}, "remote": {"attn": Blocks([3, 4, 5])}}
    plan.check(**tables, tokens=(0, 8))
    for tokens in ((0, 9), (3, 2)):
        errors = []
        for take in (plan.check, plan.bind):
            with pytest.raises(KVPlanError) as refused:
                take(**tables, tokens=tokens)
            errors.append(str(refused.value))
        assert errors[0] == errors[1]


def test_the_limits_are_those_that_are_listed() -> None:
    """The bounds in the plan room's documentation are those of the code."""
    _, _, bounds = str(kvplan.plan.__doc__).partition("Bounds\n")
    limits = [block_pairs.MAX_JOINED, bind.MAX_IDS]
    assert [1 << int(n) for n in re.findall(r" 2\*\*(\d+)\b", bounds)] == limits


@pytest.mark.parametrize("names", [["layers.7"], ["layers.0", "layer.1"]])
def test_a_name_that_nobody_has_is_refused(names: list[str]) -> None:
    """A misspelt name in not_transferred would leave out nothing, without a word."""
    (local,), (remote,) = engine("d"), engine("p")
    plans = (
        lambda: plan_reads(local, [remote], not_transferred=names),
        lambda: plan_writes(remote, [local], not_transferred=names),
        lambda: contacts([local], [remote], not_transferred=names),
    )
    for plan in plans:
        with pytest.raises(KVPlanError, match=rf"^NAME: .* in not_transferred, got '{names[-1]}'"):
            plan()
    assert plan_reads(local, [remote], not_transferred=["layers.1"])
