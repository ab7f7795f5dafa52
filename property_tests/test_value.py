"""VALUE, COVER, DISJOINT, BOUNDS, OWN: reads put every byte where it belongs, and no other byte anywhere."""

from __future__ import annotations

from hypothesis import event, given

from kvplan import verify
from kvplan.testing.strategies import Case, cases
from property_tests.oracle import contents, copies_of, problems


@given(cases())
def test_both_oracles_find_reads_right(case: Case) -> None:
    """The independent oracle and kvplan.verify both find every byte of the reads right."""
    held = {source.key: contents(source, case.tables[1], dict.fromkeys(case.spans[0])) for source in case.sources}
    plans = [case.reads(worker) for worker in case.destinations]
    total = 0
    for plan in plans:
        specs = plan.bind(**case.request(plan))
        needed = contents(plan.local, case.tables[0], case.spans[0])
        assert problems(needed, held, [copy for spec in specs for copy in copies_of(spec)]) == []
        total += len(needed)
    event("moves bytes" if total else "moves nothing")
    report = verify(plans, local=case.tables[0], remote=case.tables[1], tokens=case.tokens[0])
    assert report.ok, str(report)
    assert report.num_bytes == total
