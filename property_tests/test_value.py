"""VALUE, COVER, DISJOINT, BOUNDS, OWN: reads put every byte where it belongs, and no other byte anywhere."""

from __future__ import annotations

from hypothesis import event, given

from kvplan import plan_reads
from kvplan.verify import verify
from property_tests.oracle import contents, copies_of, problems
from property_tests.strategies import Case, cases, key, only, ranges_of


@given(cases())
def test_reads_satisfy_the_outside_oracle(case: Case) -> None:
    """What any destination worker reads is right, byte by byte, in the eyes of an oracle in plain Python."""
    everything = dict.fromkeys(case.tensors)
    held = {key(source): contents(source, case.remote, everything) for source in case.sources}
    for worker in case.destinations:
        plan = plan_reads(worker, case.sources)
        specs = plan.bind(
            local=only(case.local, [worker]),
            remote=only(case.remote, case.sources),
            tokens=ranges_of(case.tokens(0), worker),
        )
        copies = [copy for spec in specs for copy in copies_of(spec)]
        event("moves nothing" if not copies else "moves bytes")
        needed = contents(worker, case.local, case.by_tensor)
        assert problems(needed, held, copies) == []
        assert sum(spec.num_bytes for spec in specs) == len(needed)


@given(cases())
def test_verify_agrees_that_reads_are_right(case: Case) -> None:
    """The verification that users call finds nothing wrong with any plan."""
    plans = [plan_reads(worker, case.sources) for worker in case.destinations]
    report = verify(plans, local=case.local, remote=case.remote, tokens=case.tokens(0))
    assert report.ok, str(report)
    assert report.num_bytes == sum(len(contents(w, case.local, case.by_tensor)) for w in case.destinations)
