"""Writes by all sources together do what reads by all destinations do."""

from __future__ import annotations

from hypothesis import given

from kvplan import TransferPlan, Worker, plan_reads, plan_writes
from kvplan.verify import verify
from property_tests.oracle import Copy, contents, copies_of, problems
from property_tests.strategies import Case, cases, key


def writes_of(case: Case, source: Worker) -> TransferPlan:
    """The plan by which one source writes its share."""
    return plan_writes(source, case.destinations, [other for other in case.sources if other is not source])


@given(cases())
def test_writes_of_all_sources_are_the_reads_of_all_destinations(case: Case) -> None:
    """Whichever side plans, the same source serves the same byte, in the eyes of both oracles."""
    held = {key(source): contents(source, case.remote, dict.fromkeys(case.tensors)) for source in case.sources}
    plans = [writes_of(case, source) for source in case.sources]
    written: dict[tuple[str, int], list[Copy]] = {key(worker): [] for worker in case.destinations}
    for plan in plans:
        for spec in plan.bind(**case.request(plan)):
            assert spec.operation == "WRITE"
            written[spec.remote] += copies_of(spec)
    for worker in case.destinations:
        reads = plan_reads(worker, case.sources)
        copies = [copy for spec in reads.bind(**case.request(reads)) for copy in copies_of(spec)]
        assert problems(contents(worker, case.local, case.by_tensor), held, written[key(worker)]) == []
        assert sorted(written[key(worker)]) == sorted(copies)
    report = verify(plans, local=case.remote, remote=case.local, tokens=case.tokens(1))
    assert report.ok, str(report)
    assert "COVER" in report.checked


@given(cases())
def test_one_source_alone_writes_nothing_wrong(case: Case) -> None:
    """A single write plan of an engine is right in what it writes, whatever its siblings do."""
    plan = writes_of(case, case.sources[0])
    request = case.request(plan)
    report = verify(plan, local=request["local"], remote=request["remote"], tokens=request["tokens"])
    assert report.ok, str(report)
    assert ("COVER" in report.checked) == (len(case.sources) == 1)
