"""COST: as few descriptors as the bytes allow, and ids that stand for the same bytes."""

from __future__ import annotations

from hypothesis import given

from property_tests.oracle import copies_by_id, copies_of, fewest_descriptors
from property_tests.strategies import Case, cases, key


@given(cases())
def test_descriptors_are_the_fewest_and_name_the_bytes_of_the_ids(case: Case) -> None:
    """Coalesced descriptors copy what the ids copy, in as many runs as brute force finds in the bytes."""
    sources = {key(source): source for source in case.sources}
    for worker in case.destinations:
        plan = case.reads(worker)
        for spec in plan.bind(**case.request(plan)):
            copies = copies_of(spec)
            assert sorted(copies) == sorted(copies_by_id(spec))
            assert spec.num_bytes == len(copies)
            assert spec.num_descriptors == len(spec.descriptors()[0])
            assert spec.num_descriptors == fewest_descriptors(worker, sources[spec.remote], copies)
