"""VALUE, COVER, DISJOINT, BOUNDS, OWN: reads put every byte where it belongs, and no other byte anywhere."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import event, given

from kvplan import plan_mesh, verify
from kvplan.testing.strategies import Case, cases
from property_tests.oracle import contents, copies_of, problems


@given(cases())
def test_both_oracles_find_reads_right(case: Case) -> None:
    """The independent oracle and kvplan.verify both find every byte of the reads right.

    Planned together or alone, each destination has the same plan; sources await its notices.
    """
    held = {source.key: contents(source, case.tables[1], dict.fromkeys(case.spans[0])) for source in case.sources}
    mesh = plan_mesh(case.destinations, case.sources, not_transferred=case.not_transferred)
    total = 0
    moving: Counter[tuple[str, int]] = Counter()
    for worker, plan in zip(case.destinations, mesh.plans, strict=True):
        specs = plan.bind(**case.request(plan))
        for spec, alone in zip(specs, case.reads(worker).bind(**case.request(plan)), strict=True):
            assert np.array_equal(spec.local_ids, alone.local_ids)
            assert np.array_equal(spec.remote_ids, alone.remote_ids)
            assert np.array_equal(spec.local_table.rows, alone.local_table.rows)
            assert np.array_equal(spec.remote_table.rows, alone.remote_table.rows)
        needed = contents(worker, case.tables[0], case.spans[0])
        assert problems(needed, held, [copy for spec in specs for copy in copies_of(spec)]) == []
        total += len(needed)
        moving.update(spec.remote for spec in specs if spec.num_bytes)
    event("moves bytes" if total else "moves nothing")
    assert moving <= Counter({key: len(completions.awaits) for key, completions in mesh.completions.items()})
    report = verify(mesh, local=case.tables[0], remote=case.tables[1], tokens=case.tokens[0])
    assert report.ok, str(report)
    assert report.num_bytes == total
