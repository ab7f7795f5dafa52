"""A mesh plan consists of the plans of its destinations, and counts completions from them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given

from kvplan import plan_mesh, verify
from kvplan.testing.strategies import Case, cases


@given(cases())
def test_a_mesh_is_the_plans_of_its_workers(case: Case) -> None:
    """Planned together or alone, each destination has the same plan. All are right, and sources await their notices."""
    mesh = plan_mesh(case.destinations, case.sources, not_transferred=case.not_transferred)
    report = verify(mesh, local=case.tables[0], remote=case.tables[1], tokens=case.tokens[0])
    assert report.ok, str(report)
    moving: Counter[tuple[str, int]] = Counter()
    for worker, plan in zip(case.destinations, mesh.plans, strict=True):
        together = plan.bind(**case.request(plan))
        apart = case.reads(worker).bind(**case.request(plan))
        for one, other in zip(together, apart, strict=True):
            assert np.array_equal(one.local_ids, other.local_ids)
            assert np.array_equal(one.remote_ids, other.remote_ids)
            assert np.array_equal(one.local_table.rows, other.local_table.rows)
            assert np.array_equal(one.remote_table.rows, other.remote_table.rows)
        moving.update(spec.remote for spec in together if spec.num_bytes)
    assert moving <= Counter({at: len(each.awaits) for at, each in mesh.completions.items()})
