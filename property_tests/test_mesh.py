"""A mesh is the plans of all its destinations, and counts completions from them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given

from kvplan import plan_mesh, plan_reads
from kvplan.verify import verify
from property_tests.strategies import Case, cases, only, ranges_of


@given(cases())
def test_a_mesh_is_right_and_equals_the_plans_of_its_workers(case: Case) -> None:
    """Planned together or apart, every destination worker gets the same ids, and all are right."""
    mesh = plan_mesh(case.destinations, case.sources)
    report = verify(mesh, local=case.local, remote=case.remote, tokens=case.tokens(0))
    assert report.ok, str(report)
    for worker, plan in zip(case.destinations, mesh.plans, strict=True):
        request = {
            "local": only(case.local, [worker]),
            "remote": only(case.remote, case.sources),
            "tokens": ranges_of(case.tokens(0), worker),
        }
        together, apart = plan.bind(**request), plan_reads(worker, case.sources).bind(**request)  # type: ignore[arg-type]
        for one, other in zip(together, apart, strict=True):
            assert np.array_equal(one.local_ids, other.local_ids)
            assert np.array_equal(one.remote_ids, other.remote_ids)


@given(cases())
def test_a_source_awaits_no_fewer_completions_than_readers_have_bytes_from_it(case: Case) -> None:
    """Every destination that moves bytes from a source is among the completions that the source awaits."""
    mesh = plan_mesh(case.destinations, case.sources)
    moving: Counter[tuple[str, int]] = Counter()
    for plan, worker in zip(mesh.plans, case.destinations, strict=True):
        specs = plan.bind(
            local=only(case.local, [worker]),
            remote=only(case.remote, case.sources),
            tokens=ranges_of(case.tokens(0), worker),
        )
        moving.update(spec.remote for spec in specs if spec.num_bytes)
    assert moving <= Counter(mesh.completions)
