"""Certificates: every plan has one, and a changed plan that still has one moves the right bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
from hypothesis import given

from kvplan import KVPlanError, certify, plan_mesh
from kvplan.plan import Pair, Table
from kvplan.plan.series import GroupPair, PeriodBlocks, RunSeries, TokenSeries
from kvplan.testing.strategies import Case, cases
from property_tests.mutants import judged, mutants
from property_tests.planted import Check, check_that_refused, checks, planted

COUNT, SEED = 6_000, 4
PER_FIELD: Final = 30
"""How many mutants of one field are tried without a check that refused them."""

SELDOM: Final = {"not_transferred", "ids.period", "of the writer"}
"""Changes in two places, or one of 50,000, are needed before these are missed: ``tests/verification`` makes them."""

Mutants = Mapping[Check, list[tuple[Any, ...]]]


@given(cases())
def test_every_plan_is_proved(case: Case) -> None:
    """Reads and writes of the same engines prove the same bytes, each worker's plan alone and all together."""
    reads, writes = (
        plan_mesh(case.destinations, case.sources, way, not_transferred=case.not_transferred)
        for way in ("READ", "WRITE")
    )
    proof = certify(reads)
    assert proof == certify(writes)
    assert proof.complete
    for plan in (*reads.plans, *writes.plans):
        proof = certify(plan)
        assert proof.complete == (plan.operation == "READ" or not plan.siblings)


@pytest.fixture(scope="module")
def refused() -> Mutants:
    """Mutants that some check refuses; all others are judged."""
    found: dict[Check, list[tuple[Any, ...]]] = {}
    fields = Counter[str]()
    times = Counter[tuple[Check, str]]()
    for number, (field, engines, plans) in enumerate(mutants(COUNT, SEED)):
        try:
            certify(plans)
        except KVPlanError as error:
            assert error.code in ("PROOF", "RANGE")
            fields[field.rpartition(".")[2]] += 1
            if check := check_that_refused(error):
                times[check, field] += 1
                if times[check, field] <= PER_FIELD:
                    found.setdefault(check, []).append((engines, plans, number))
        else:
            judged(engines, plans, number)
    kinds = (Pair, Table, GroupPair, RunSeries, TokenSeries, PeriodBlocks)
    assert {field.name for kind in kinds for field in attrs.fields(kind)} - {*fields} == set()
    return found


def test_a_changed_plan_is_refused_or_right(refused: Mutants) -> None:
    """Mutants end in a KVPlanError or move the right bytes; every field of tables and ids is among those refused."""
    assert refused


@pytest.mark.parametrize("check", checks(), ids=lambda check: f"{Path(check[0]).stem}-{check[1]}")
def test_a_certificate_without_a_check_is_found_out(
    check: Check, refused: Mutants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any one of its checks, the certificate proves a mutant that moves wrong bytes, or fails otherwise."""
    line = Path(check[0]).read_text().splitlines()[check[1] - 1]
    if any(word in line for word in SELDOM):
        return
    worse = planted(check, monkeypatch)
    for engines, plans, seed in refused.get(check, ()):
        try:
            judged(engines, plans, seed, worse)
        except Exception:
            return
    raise AssertionError(f"not missed: {line.strip()}")
