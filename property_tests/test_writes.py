"""The writes of all sources together move what the reads of all destinations move."""

from __future__ import annotations

from hypothesis import given

from kvplan import verify
from kvplan.testing.strategies import Case, cases
from property_tests.oracle import Copy, contents, copies_of, problems


@given(cases())
def test_writes_of_all_sources_are_the_reads_of_all_destinations(case: Case) -> None:
    """Reads and writes copy each byte from the same source, and both oracles find them right.

    Ranges are by the groups of the local side, so the ranges of writes may contain more than those of reads.
    """
    held = {source.key: contents(source, case.tables[1], dict.fromkeys(case.spans[1])) for source in case.sources}
    plans = [case.writes(source) for source in case.sources]
    written: dict[tuple[str, int], list[Copy]] = {worker.key: [] for worker in case.destinations}
    for plan in plans:
        for spec in plan.bind(**case.request(plan)):
            assert spec.operation == "WRITE"
            written[spec.remote] += copies_of(spec)
    for worker in case.destinations:
        reads = case.reads(worker)
        copies = [copy for spec in reads.bind(**case.request(reads)) for copy in copies_of(spec)]
        assert problems(contents(worker, case.tables[0], case.spans[1]), held, written[worker.key]) == []
        assert set(copies) <= set(written[worker.key])
        assert case.spans[0] != case.spans[1] or len(copies) == len(written[worker.key])
    report = verify(plans, local=case.tables[1], remote=case.tables[0], tokens=case.tokens[1])
    assert report.ok, str(report)
    assert "COVER" in report.checked


@given(cases())
def test_one_source_alone_writes_nothing_wrong(case: Case) -> None:
    """A single write plan of an engine writes only right bytes, whatever its siblings do."""
    plan = case.writes(case.sources[0])
    request = case.request(plan)
    report = verify(plan, local=request["local"], remote=request["remote"], tokens=request["tokens"])
    assert report.ok, str(report)
    assert ("COVER" in report.checked) == (len(case.sources) == 1)
