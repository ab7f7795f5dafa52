"""Requests in parts, and contacts: both agree with the whole plans."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from kvplan import Group, contacts, plan_mesh, verify_together
from kvplan.describe.blocks import Tokens
from kvplan.testing.strategies import Case, cases
from property_tests import fewer
from property_tests.oracle import copies_of

Operation = Literal["READ", "WRITE"]
OPERATIONS: tuple[Operation, ...] = ("READ", "WRITE")
HALF_AS_MANY = fewer(2)
TWENTIETHS = 20
"""Cuts are at twentieths of a range."""


def parts(tokens: Tokens, groups: Mapping[str, Group], cuts: Sequence[int]) -> list[dict[str, tuple[int, int]]]:
    """Ranges by group that together are ``tokens``. A group without a range is entirely in the first part."""
    if not isinstance(tokens, Mapping):
        tokens = {name: tokens for name, group in groups.items() if tokens and group.tokens_per_block}
    edges = [0, *sorted(cuts), TWENTIETHS]
    found: list[dict[str, tuple[int, int]]] = []
    for low, high in itertools.pairwise(edges):
        part = {
            name: (start + (stop - start) * low // TWENTIETHS, start + (stop - start) * high // TWENTIETHS)
            for name, (start, stop) in tokens.items()
        }
        found.append({**dict.fromkeys(groups, (0, 0)), **part} if found else part)
    return found


@HALF_AS_MANY
@given(cases(), st.sampled_from(OPERATIONS), st.lists(st.integers(0, TWENTIETHS), min_size=1, max_size=3))
def test_the_parts_of_a_request_are_the_request(case: Case, operation: Operation, cuts: list[int]) -> None:
    """Parts cut anywhere, also inside blocks, copy each byte of the whole once, from the same place."""
    side = OPERATIONS.index(operation)
    plans = plan_mesh(case.destinations, case.sources, operation, not_transferred=case.not_transferred).plans
    groups = {group.name: group for plan in plans for group in plan.local.groups}
    tokens = parts(case.tokens[side], groups, cuts)
    num_bytes = 0
    for plan in plans:
        request, own = case.request(plan), {group.name for group in plan.local.groups}
        whole = [Counter(copies_of(spec)) for spec in plan.bind(**request)]
        summed = [Counter[object]() for _ in whole]
        for part in tokens:
            request["tokens"] = {name: span for name, span in part.items() if name in own}
            for counter, spec in zip(summed, plan.bind(**request), strict=True):
                counter.update(copies_of(spec))
        assert summed == whole
        num_bytes += sum(counter.total() for counter in whole)
    tables = {"local": case.tables[side], "remote": case.tables[1 - side]}
    together = verify_together(
        [(plans, {**tables, "tokens": part}) for part in tokens], tokens=None if side else case.tokens[0]
    )
    assert together.ok, str(together)
    assert together.num_bytes == num_bytes


@HALF_AS_MANY
@given(cases(), st.sampled_from(OPERATIONS))
def test_contacts_are_the_pairs_that_plans_have_bytes_for(case: Case, operation: Operation) -> None:
    """A worker has rows for exactly its contacts, and exchanges bytes with no others."""
    found = contacts(case.destinations, case.sources, not_transferred=case.not_transferred)
    mesh = plan_mesh(case.destinations, case.sources, operation, not_transferred=case.not_transferred)
    for plan in mesh.plans:
        local = plan.local.key
        for pair, spec in zip(plan.pairs, plan.bind(**case.request(plan)), strict=True):
            remote = pair.remote
            met = remote in found[local]
            assert met == (local in found[remote]) == bool(len(pair.local_table.rows))
            assert met or not spec.num_bytes
