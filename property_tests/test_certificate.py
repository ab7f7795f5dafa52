"""Certificates: every plan has one, and a changed plan that still has one moves the right bytes."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import attrs
import pytest
from hypothesis import given

from kvplan import KVPlanError, certify, plan_mesh
from kvplan.plan import Pair, Table
from kvplan.plan.rows import GroupPair, PeriodBlocks, RunIds, TokenIds
from kvplan.testing.strategies import Case, cases
from kvplan.verification import certificate, tables
from property_tests.mutants import hunt

SEED = 21


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


def test_a_changed_plan_is_refused_or_right() -> None:
    """2,000 mutants end in a KVPlanError, or move the right bytes; every field of tables and ids is among them."""
    outcomes = hunt(2_000, SEED)
    assert {code for _, code in outcomes} <= {"PROOF", "RANGE", "harmless"}
    changed = Counter[str]()
    for (field, code), number in outcomes.items():
        changed[field.rpartition(".")[2]] += number if code == "PROOF" else 0
    known = {
        field.name for kind in (Pair, Table, GroupPair, RunIds, TokenIds, PeriodBlocks) for field in attrs.fields(kind)
    }
    assert known - {*changed} == set()
