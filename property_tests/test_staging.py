"""STAGE: both legs of a staged request put every byte where it belongs, and no other byte anywhere."""

from __future__ import annotations

from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from kvplan import Worker
from kvplan.staging import Chunk, stage
from kvplan.testing.strategies import Case, Request, cases
from property_tests import fewer
from property_tests.exhaustive import all_worlds
from property_tests.labelled import Tally
from property_tests.oracle import Copy, Place, by_byte, contents, copies_of, problems
from property_tests.staged import STAGING, check, least, with_staging
from property_tests.test_tails import requests_with_gaps

DEVICE = 1 << 20
"""The device of staging regions, which no other region is on."""

SIZES = st.sampled_from([0, 1, 100, 1000, 10_000])
"""How many bytes more than are needed a staging region has."""


@fewer(2)
@given(st.integers(0, len(all_worlds()) - 1), st.booleans(), SIZES)
def test_small_worlds_are_right_in_two_legs(number: int, whole: bool, more: int) -> None:
    """Whatever the layouts, heads, blocks and contexts, and however few positions are staged at a time."""
    tally = Tally()
    check(all_worlds()[number], all_worlds().requests(number)[:3], whole, more, tally)
    assert tally.num_bytes


def composed(chunk: Chunk, local: Worker) -> list[Copy]:
    """What both legs copy, byte by byte, from the sources to the destination."""
    staged: dict[Place, tuple[tuple[str, int], Place]] = {}
    for spec in chunk.specs:
        assert spec.operation == "READ"
        for source, read, write in copies_of(spec):
            assert write not in staged, "staged twice"
            staged[write] = source, read
    assert {device for device, _ in staged} <= {DEVICE}
    return [
        (*staged[read], write)
        for copy in chunk.copies
        for writes, reads in [copy.ranges()]
        for _, read, write in by_byte(local.key, reads, writes)
    ]


def moved(case: Case, worker: Worker, request: Request, whole: bool, more: int, **others: int) -> list[Copy]:
    """What a staged plan of a case copies for a request."""
    skipped: dict[str, Any] = {"not_transferred": case.not_transferred, **others}
    local = with_staging(worker, least(worker, case.sources, whole, **skipped) + more, DEVICE)
    staged = stage(local, case.sources, staging=STAGING, whole=whole, **skipped)
    chunks = list(staged.bind(**request))
    event(f"{min(len(chunks), 3)} chunks")
    assert [chunk.half for chunk in chunks] == [i % 2 for i in range(len(chunks))]
    return [copy for chunk in chunks for copy in composed(chunk, local)]


@fewer(4)
@given(cases(), st.booleans(), SIZES, st.integers(1, 3))
def test_any_engines_are_right_in_two_legs(case: Case, whole: bool, more: int, replicas: int) -> None:
    """Also states, several groups, pipeline stages, digits, gaps between bytes, shared pools and replicas."""
    held = {source.key: contents(source, case.tables[1], dict.fromkeys(case.spans[0])) for source in case.sources}
    for plan in map(case.reads, case.destinations):
        needed = contents(plan.local, case.tables[0], case.spans[0])
        copies = moved(case, plan.local, case.request(plan), whole, more, replicas=replicas)
        assert problems(needed, held, copies) == []


@fewer(4)
@given(cases(), st.booleans(), SIZES, st.integers(0, 999))
def test_gaps_in_block_tables_are_left_alone(case: Case, whole: bool, more: int, seed: int) -> None:
    """Of a destination with gaps the blocks that there are get their bytes, also from a source without the others."""
    for plan, request, needed, held in requests_with_gaps(case, seed):
        assert problems(needed, held, moved(case, plan.local, request, whole, more)) == []
