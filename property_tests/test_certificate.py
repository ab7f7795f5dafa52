"""Certificates: every plan has one, and a changed plan that still has one moves the right bytes."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from kvplan import KVPlanError, TransferPlan, certify, plan_mesh
from kvplan.testing.strategies import Case, cases
from kvplan.verification.verifier import verify


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


@given(cases(), st.randoms(use_true_random=False))
def test_what_is_proved_is_right(case: Case, random: Any) -> None:
    """A plan with a changed number in its tables is refused, or still moves the right bytes."""
    plan = case.reads(case.destinations[random.randrange(len(case.destinations))])
    worse = damaged(plan, random)
    if worse is None:
        return
    try:
        certify(worse)
    except KVPlanError as error:
        event(error.code)
        return
    event("still proved")
    request = case.request(plan)
    report = verify(worse, **request)
    assert report.ok, str(report)


def damaged(plan: TransferPlan, random: Any) -> TransferPlan | None:
    """The plan with one number of a series of ids or of a row changed; ``None`` if it moves nothing."""
    which = [i for i, pair in enumerate(plan.pairs) if pair.group_pairs]
    if not which:
        return None
    at = random.choice(which)
    pair = plan.pairs[at]
    if random.randrange(3):
        number = random.randrange(len(pair.group_pairs))
        layout = pair.group_pairs[number]
        kind = random.choice([kind for kind in ("runs", "tokens") if getattr(layout, kind)])
        series = list(getattr(layout, kind))
        one = random.randrange(len(series))
        series[one] = _series(series[one], random)
        layouts = list(pair.group_pairs)
        layouts[number] = attrs.evolve(layout, **{kind: tuple(series)})
        pair = attrs.evolve(pair, group_pairs=tuple(layouts))
    else:
        name = random.choice(("local_table", "remote_table"))
        table = getattr(pair, name)
        rows = table.rows.copy()
        rows.view(np.int64)[random.randrange(len(rows)), random.randrange(4)] += random.choice((-1, 1, 2, 8))
        pair = attrs.evolve(pair, **{name: attrs.evolve(table, rows=rows)})
    return attrs.evolve(plan, pairs=(*plan.pairs[:at], pair, *plan.pairs[at + 1 :]))


def _series(ids: Any, random: Any) -> Any:
    """A series of ids with one number changed."""
    field = random.choice(("base", "step", "sub" if hasattr(ids, "sub") else "blocks"))
    side, by = random.randrange(2), random.choice((-1, 1, 2))
    pair = list(getattr(ids, field))
    if field == "step":
        pair[side] = max(0, pair[side] + by)
    elif field == "blocks":
        sub = pair[side].sub
        sub = np.zeros(pair[side].ordinal.size, np.int32) if sub is None else sub.copy()
        sub[random.randrange(sub.size)] += by
        pair[side] = attrs.evolve(pair[side], sub=sub)
    else:
        pair[side] = pair[side].copy()
        pair[side].reshape(-1)[random.randrange(pair[side].size)] += by
    return attrs.evolve(ids, **{field: np.stack(pair) if field == "base" else tuple(pair)})
