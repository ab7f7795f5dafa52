"""Costs: what a request of scattered blocks takes, by hand and by its plans."""

from __future__ import annotations

import pytest

from kvplan import Axis, Blocks, Group, KVPlanError, Model, Region, View, Worker, explain, plan_mesh, plan_reads
from kvplan.plan import Cost
from kvplan.plan.cost import PairCost, spend_on_listed
from tests.counted import CountingBudget
from tests.small import HEAD_BYTES, engine

PREFILL = engine("prefill", tp=2, heads=4, tokens=4, layers=2)
(DECODE,) = engine("decode", tp=1, heads=4, tokens=6, layers=2)


def test_blocks_that_do_not_divide_are_counted_over_their_period() -> None:
    """Blocks of 4 and of 6 tokens repeat after 12, and meet in runs of 4, 2, 2 and 4 of each head and layer."""
    cost = plan_reads(DECODE, PREFILL).cost()
    assert cost.tokens == 12
    assert cost.lengths == {2 * HEAD_BYTES: 2 * 4 * 2, 4 * HEAD_BYTES: 2 * 4 * 2}
    assert cost.num_ids == 4 * 4 * 2
    assert cost.num_bytes == 12 * 4 * 2 * HEAD_BYTES
    assert [pair.remote for pair in cost.pairs] == [("prefill", 0), ("prefill", 1)]


@pytest.mark.parametrize(
    "tokens, lengths",
    [(0, {}), (1, {1: 8}), (3, {3: 8}), (5, {1: 8, 4: 8}), (12, {2: 16, 4: 16}), (25, {1: 8, 2: 32, 4: 32})],
)
def test_any_number_of_positions_has_a_cost(tokens: int, lengths: dict[int, int]) -> None:
    """Whole periods are counted as often as there are any, and what is left of a request like a request."""
    cost = plan_reads(DECODE, PREFILL).cost(tokens)
    assert cost.lengths == {times * HEAD_BYTES: number for times, number in lengths.items()}


def test_a_source_without_any_of_the_positions_costs_nothing() -> None:
    """Of one token, the worker that keeps every second position has none."""
    (local,), sources = engine("decode"), engine("prefill", contexts=(2, 1))
    pairs = plan_reads(local, sources).cost(1).pairs
    assert [pair.num_descriptors > 0 for pair in pairs] == [True, False]
    assert (pairs[1].num_ids, pairs[1].lengths) == (0, {})


def test_a_state_moves_once_however_many_tokens() -> None:
    """Of a hybrid model, more tokens take more descriptors of its attention alone."""
    model = Model.shipped("granite-4.0-h-tiny")
    mesh = plan_mesh(model.engine("decode", num_blocks=9), model.engine("prefill", num_blocks=9))
    none, one, two = (mesh.cost(tokens) for tokens in (0, 16, 32))
    assert none.num_bytes > 0
    assert two.num_bytes - one.num_bytes == one.num_bytes - none.num_bytes == 16 * 4 * 4 * 2 * 128 * 2


def test_a_mesh_repeats_when_all_its_plans_do() -> None:
    """A mesh's tokens are the common period, its totals the sums of its pairs, and none is left out."""
    destinations = [*engine("decode", tokens=6), *engine("other", tokens=10)]
    cost = plan_mesh(destinations, PREFILL).cost()
    assert cost.tokens == 60
    assert len(cost.pairs) == 4
    for total in ("num_bytes", "num_descriptors", "num_ids"):
        assert getattr(cost, total) == sum(getattr(pair, total) for pair in cost.pairs)
    assert cost.num_rows == sum(pair.local_rows + pair.remote_rows for pair in cost.pairs)


def test_a_run_and_a_token_that_meet_are_one_descriptor() -> None:
    """The 16-byte tokens of one tensor end where the 4-byte tokens of another, which has gaps, begin."""
    views = [
        View(name, "attn", "kv", "uint8", (Axis("token", 0, 4, 4, 16), Axis("dim", 0, dim, dim, 1)), 9, 128, offset)
        for name, dim, offset in (("dense", 16, 0), ("gaps", 4, 64))
    ]
    local, remote = (Worker(name, 0, [Region("kv", 4096, 9 * 128)], [Group("attn", 4)], views) for name in "dp")
    plan, blocks = plan_reads(local, [remote]), {"attn": Blocks([7])}
    assert plan.cost().lengths == {4: 3, 68: 1}
    assert plan.cost().pairs == (PairCost.of(*plan.bind(local=blocks, remote=blocks)),)


def test_a_plan_of_nothing_costs_nothing() -> None:
    """Where no tensor moves, a cost has its pairs and no descriptor, and one position is enough to repeat."""
    names = DECODE.tensors
    cost = plan_reads(DECODE, PREFILL, not_transferred=names).cost()
    assert (cost.tokens, cost.num_descriptors, cost.num_bytes, len(cost.pairs)) == (1, 0, 0, 2)
    assert str(cost) == "1 token: no bytes"


def test_a_cost_in_words() -> None:
    """A cost is one line in a list, and a line for each pair that moves anything when explained."""
    cost = plan_mesh([DECODE], PREFILL, "WRITE").cost()
    assert repr(cost) == "<Cost of 12 tokens: 1536 bytes in 32 descriptors>"
    assert explain(cost) == str(cost)
    assert str(cost).splitlines() == [
        "12 tokens: 1536 bytes in 32 descriptors of 32 bytes (16) and 64 bytes (16)",
        "  prefill/0 -> decode/0: 768 bytes in 16 descriptors of 32 bytes (8) and 64 bytes (8); 6 and 12 rows",
        "  prefill/1 -> decode/0: 768 bytes in 16 descriptors of 32 bytes (8) and 64 bytes (8); 6 and 12 rows",
    ]
    (local,), sources = engine("d", tokens=4), engine("p", tokens=4)
    assert str(plan_reads(local, sources).cost()).splitlines() == [
        "4 tokens: 512 bytes in 2 descriptors of 256 bytes",
        "  d/0 <- p/0: 512 bytes in 2 descriptors of 256 bytes; 4 and 4 rows",
    ]
    three, four = (
        Cost("READ", 1, (PairCost(("d", 0), ("p", 0), 1, 1, n, {8 * i: 1 for i in range(1, n + 1)}),)) for n in (3, 4)
    )
    assert str(three).startswith(
        "1 token: 48 bytes in 3 descriptors of 8 bytes (1) and 16 bytes (1) and 24 bytes (1)\n"
    )
    assert str(four).startswith("1 token: 80 bytes in 4 descriptors of 8 bytes to 32 bytes\n")


@pytest.mark.parametrize("tokens, code", [(-1, "RANGE"), (True, "TYPE"), (1.5, "TYPE"), (1 << 48, "RANGE")])
def test_a_bad_number_of_tokens_is_refused(tokens: int, code: str) -> None:
    """Tokens are a number of positions, or none given."""
    with pytest.raises(KVPlanError, match=f"^{code}: "):
        plan_reads(DECODE, PREFILL).cost(tokens)


def test_a_period_too_long_to_list_is_refused() -> None:
    """Blocks of many tokens without a common divisor repeat too late; so many tokens as can be listed are counted."""
    (local,) = engine("decode", tokens=8191, blocks=1, order="NH")
    (remote,) = engine("prefill", tokens=8209, blocks=1)
    plan = plan_reads(local, [remote])
    with pytest.raises(KVPlanError, match=r"RANGE: cannot count .* with prefill/0: .* with 5[0-9]* descriptors"):
        plan.cost()
    assert plan.cost(100).num_bytes == 100 * 4 * 2 * HEAD_BYTES


@pytest.mark.parametrize(
    ("contexts", "tokens", "order"), [((1, 1), None, "HN"), ((1, 1), 1, "HN"), ((1, 1), 5, "HN"), ((2, 3), None, "NH")]
)
def test_descriptors_are_counted_before_they_are_listed(
    contexts: tuple[int, int], tokens: int | None, order: str
) -> None:
    """The ids of one period, of runs and of single tokens, are as many as are listed."""
    plan = plan_reads(DECODE, engine("prefill", tp=2, contexts=contexts, order=order))
    number = sum(pair.num_ids for pair in plan.cost(tokens).pairs)
    budget = CountingBudget()
    for pair in plan.pairs:
        spend_on_listed(budget, pair, plan.cost(tokens).tokens)
    assert budget.numbers["descriptors"] == number
