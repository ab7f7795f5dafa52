"""COST: the fewest descriptors, ids of the same bytes, and costs that are known before a request."""

from __future__ import annotations

import random
from typing import Literal

import attrs
from hypothesis import assume, event, given
from hypothesis import strategies as st

from kvplan import Blocks, plan_mesh
from kvplan.plan import PairCost
from kvplan.testing.designs import POOL, EngineDesign, on_ranks, ordinals_of, workers
from kvplan.testing.strategies import Case, cases
from property_tests.oracle import copies_by_id, copies_of, fewest_descriptors

MOST = 2000
"""The longest request, in positions."""


@given(cases())
def test_descriptors_are_the_fewest_and_name_the_bytes_of_the_ids(case: Case) -> None:
    """Coalesced descriptors copy the bytes of the ids, in as many runs as brute force finds."""
    sources = {source.key: source for source in case.sources}
    for worker in case.destinations:
        plan = case.reads(worker)
        for spec in plan.bind(**case.request(plan)):
            copies = copies_of(spec)
            assert sorted(copies) == sorted(copies_by_id(spec))
            assert spec.num_bytes == len(copies)
            assert spec.num_descriptors == len(spec.descriptors()[0])
            assert spec.num_descriptors == fewest_descriptors(worker, sources[spec.remote], copies)


def scattered(design: EngineDesign, tokens: int, seed: int) -> dict[str, Blocks]:
    """Blocks for ``tokens`` positions: no two neighbours, and neither the first nor the last of a pool."""
    tables, low = {}, 1
    for name, group in design.groups.items():
        count = len(ordinals_of(on_ranks(group), 0, tokens)) if group.tokens_per_block else 1
        ids = [low + 2 * i for i in range(count)]
        random.Random(seed).shuffle(ids)
        tables[name] = Blocks(ids)
        low = low + 2 * count if design.packing == POOL else 1
    return tables


@given(cases(), st.none() | st.integers(0, 100), st.sampled_from(["READ", "WRITE"]), st.integers(0, 99))
def test_a_cost_is_that_of_scattered_blocks(
    case: Case, tokens: int | None, operation: Literal["READ", "WRITE"], seed: int
) -> None:
    """The cost from the tables equals, for each pair, the cost of binding scattered blocks and coalescing."""
    skipped = case.not_transferred
    needed = plan_mesh(case.destinations, case.sources, not_transferred=skipped).cost(tokens).tokens
    assume(needed <= MOST)
    tables = [scattered(design, needed, seed + i) for i, design in enumerate(case.designs)]
    roomy = [attrs.evolve(design, extra_blocks=design.extra_blocks + 1) for design in case.designs]
    destinations, sources = (workers(design, table) for design, table in zip(roomy, tables, strict=True))
    mesh = plan_mesh(destinations, sources, operation, not_transferred=skipped)
    found = mesh.cost(tokens)
    assert found.tokens == needed
    local, remote = tables if operation == "READ" else tables[::-1]
    bound: list[PairCost] = []
    for plan in mesh.plans:
        own = {group.name: group for group in plan.local.groups}
        theirs = {group.name for worker in plan.remotes for group in worker.groups}
        specs = plan.bind(
            local={name: blocks for name, blocks in local.items() if name in own},
            remote={name: blocks for name, blocks in remote.items() if name in theirs},
            tokens={name: (0, needed) for name, group in own.items() if group.tokens_per_block},
        )
        bound += map(PairCost.of, specs)
    assert found.pairs == tuple(bound)
    event(f"{operation}: {'coalesced' if found.num_descriptors < found.num_ids else 'as many descriptors as ids'}")
