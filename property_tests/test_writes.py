"""Writes by all sources together do what reads by all destinations do."""

from __future__ import annotations

from hypothesis import given

from kvplan import plan_reads, plan_writes
from kvplan.verify import verify
from property_tests.oracle import contents, copies_of, problems
from property_tests.strategies import Case, cases, key, only, ranges_of


@given(cases())
def test_writes_of_all_sources_are_the_reads_of_all_destinations(case: Case) -> None:
    """Whichever side plans, the same source serves the same byte; so all writes together are right."""
    reads = {
        key(worker): {
            copy
            for spec in plan_reads(worker, case.sources).bind(
                local=only(case.local, [worker]),
                remote=only(case.remote, case.sources),
                tokens=ranges_of(case.tokens(0), worker),
            )
            for copy in copies_of(spec)
        }
        for worker in case.destinations
    }
    held = {key(source): contents(source, case.remote, dict.fromkeys(case.tensors)) for source in case.sources}
    writes: dict[tuple[str, int], list[object]] = {destination: [] for destination in reads}
    for source in case.sources:
        plan = plan_writes(source, case.destinations, [other for other in case.sources if other is not source])
        specs = plan.bind(
            local=only(case.remote, [source]),
            remote=only(case.local, case.destinations),
            tokens=ranges_of(case.tokens(1), source),
        )
        for spec in specs:
            assert spec.operation == "WRITE"
            writes[spec.remote] += copies_of(spec)
    for worker in case.destinations:
        assert problems(contents(worker, case.local, case.by_tensor), held, writes[key(worker)]) == []
        assert set(writes[key(worker)]) == reads[key(worker)]


@given(cases())
def test_verify_agrees_that_writes_are_right(case: Case) -> None:
    """Verified together, the write plans of all sources leave nothing out and nothing wrong."""
    plans = [
        plan_writes(source, case.destinations, [other for other in case.sources if other is not source])
        for source in case.sources
    ]
    report = verify(plans, local=case.remote, remote=case.local, tokens=case.tokens(1))
    assert report.ok, str(report)
    assert "COVER" in report.checked


@given(cases())
def test_one_source_alone_writes_nothing_wrong(case: Case) -> None:
    """A single write plan of an engine is right in what it writes, whatever its siblings do."""
    source, *siblings = case.sources
    plan = plan_writes(source, case.destinations, siblings)
    report = verify(
        plan,
        local=only(case.remote, [source]),
        remote=case.local,
        tokens=ranges_of(case.tokens(1), source),
    )
    assert report.ok, str(report)
    assert ("COVER" in report.checked) == (not siblings)
