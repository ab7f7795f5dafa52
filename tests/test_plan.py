"""Plans: who reads from whom, and what a plan says of itself."""

from typing import Any

import numpy as np

from kvplan import Blocks, plan_reads, plan_writes
from tests.small import engine


def test_there_is_a_pair_for_every_remote_in_the_order_given() -> None:
    """Remotes that serve nothing keep their pair, with empty tables, so that pairs and specs line up with remotes."""
    (mine, _), sources = engine("decode", tp=2, heads=4), engine("prefill", tp=4, heads=4)[::-1]
    plan = plan_reads(mine, sources)
    assert [pair.remote for pair in plan.pairs] == [("prefill", rank) for rank in (3, 2, 1, 0)]
    assert [len(pair.local_table.rows) > 0 for pair in plan.pairs] == [False, False, True, True]
    specs = plan.bind(local={"attn": Blocks([1])}, remote={"attn": Blocks([2])})
    assert [spec.num_bytes > 0 for spec in specs] == [False, False, True, True]


def test_the_order_of_remotes_changes_nothing_else() -> None:
    """Sources are weighed in order of their labels, whatever order they come in."""
    (mine,), sources = engine("decode", heads=1), engine("prefill", tp=4, heads=1)
    chosen = [
        {pair.remote[1] for pair in plan_reads(mine, order).pairs if pair.layouts} for order in (sources, sources[::-1])
    ]
    assert chosen[0] == chosen[1]


def test_replicas_write_each_byte_once() -> None:
    """Every source plans alone, with its siblings in view; for each destination one replica writes."""
    destinations, sources = engine("decode", tp=3, heads=1), engine("prefill", tp=4, heads=1)
    writers = [
        [
            pair.remote[1]
            for pair in plan_writes(mine, destinations, sources[:i] + sources[i + 1 :]).pairs
            if pair.layouts
        ]
        for i, mine in enumerate(sources)
    ]
    assert sorted(np.concatenate(writers).tolist()) == [0, 1, 2]


def test_a_plan_is_one_short_line() -> None:
    """Plans print as one line that says who, with whom and how much."""
    (mine,), sources = engine("decode", heads=4), engine("prefill", tp=2, heads=4)
    plan = plan_reads(mine, sources)
    assert repr(plan) == "<TransferPlan READ decode/0: 2 remotes, 8 local rows>"
    assert repr(plan.pairs[0]) == "<Pair with prefill/0: 4 local rows>"
    (spec, _) = plan.bind(local={"attn": Blocks([1])}, remote={"attn": Blocks([2])})
    assert repr(spec) == "<ReadSpec decode/0 <- prefill/0: 2 ids>"


def test_a_range_for_each_group_is_taken_by_the_local_groups_name() -> None:
    """Ranges by group, ranges for all and no range mean the same where they name the same positions."""
    (mine,), sources = engine("decode"), engine("prefill")
    plan = plan_reads(mine, sources)
    tables: dict[str, Any] = {"local": {"attn": Blocks([1, 5])}, "remote": {"attn": Blocks([2, 3])}}
    ids = [plan.bind(**tables, tokens=tokens)[0].local_ids.tolist() for tokens in ({"attn": (0, 8)}, (0, 8), None, {})]
    assert ids[0] == ids[1] == ids[2] == ids[3]


def test_nothing_moves_in_an_empty_range() -> None:
    """Zero tokens are zero ids and zero bytes, whatever the tables list."""
    (mine,), sources = engine("decode"), engine("prefill")
    (spec,) = plan_reads(mine, sources).bind(local={"attn": Blocks([])}, remote={"attn": Blocks([])}, tokens=(5, 5))
    assert (spec.local_ids.size, spec.num_bytes, spec.num_descriptors) == (0, 0, 0)
