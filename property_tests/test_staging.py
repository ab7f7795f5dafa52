"""STAGE: both steps of a staged request move every byte to its place, and no other byte anywhere."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from hypothesis import event, given
from hypothesis import strategies as st

from kvplan import Request, Worker
from kvplan.describe.worker import Key
from kvplan.staging import Chunk, stage
from kvplan.testing.strategies import Case, cases
from property_tests import fewer
from property_tests.exhaustive import all_worlds
from property_tests.labelled import Tally
from property_tests.oracle import Copy, Place, by_byte, contents, copies_of, problems
from property_tests.staged import CHECKS
from property_tests.test_tails import requests_with_gaps
from tests.staged import NAME, in_least_memory

DEVICE = 1 << 20
"""The device of staging regions, which no other region is on."""

SIZES = st.sampled_from([0, 1, 100, 1000, 10_000])
"""Bytes of a staging region beyond those that it must have."""


@fewer(4)
@given(st.integers(0, len(all_worlds()) - 1), st.sampled_from([*CHECKS]), SIZES)
def test_small_worlds_are_right_when_staged(number: int, strategy: str, more: int) -> None:
    """Whatever the layouts, heads, blocks and contexts, and however few positions are staged at a time."""
    tally = Tally()
    CHECKS[strategy](all_worlds()[number], all_worlds().requests(number)[:3], more, tally)
    assert tally.num_bytes


def composed(chunk: Chunk, local: Worker) -> list[Copy]:
    """What both steps copy together, byte by byte, from sources to the destination."""
    staged: dict[Place, tuple[Key, Place]] = {}
    for spec in chunk.specs:
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


def moved(case: Case, worker: Worker, request: Request, whole: bool, more: int) -> list[Copy]:
    """What a staged plan of reads of a case copies for a request."""
    skipped = [name for name in case.not_transferred if name in worker.tensors]
    plan = partial(stage, remotes=case.sources, staging=NAME, whole=whole, not_transferred=skipped)
    chunks = list(in_least_memory(worker, DEVICE, more, plan).bind(**request))
    event(f"{min(len(chunks), 3)} chunks")
    for one, other in pairwise(chunks):
        for ours, theirs in zip(one.blocks, other.blocks, strict=True):
            assert not {*ours.tolist()} & {*theirs.tolist()}
    return [copied for chunk in chunks for copied in composed(chunk, worker)]


@fewer(4)
@given(cases(), st.booleans(), SIZES)
def test_any_engines_are_right_when_staged(case: Case, whole: bool, more: int) -> None:
    """Also states, several groups, pipeline stages, digits, gaps between bytes, shared pools and replicas."""
    held = {source.key: contents(source, case.tables[1], dict.fromkeys(case.spans[0])) for source in case.sources}
    for plan in map(case.reads, case.destinations):
        needed = contents(plan.local, case.tables[0], case.spans[0])
        copies = moved(case, plan.local, case.request(plan), whole, more)
        assert problems(needed, held, copies) == []


@fewer(4)
@given(cases(), st.booleans(), SIZES, st.integers(0, 999))
def test_gaps_in_block_tables_are_left_alone(case: Case, whole: bool, more: int, seed: int) -> None:
    """The blocks of a destination with gaps get their bytes, also from a source without the others."""
    for plan, request, needed, held in requests_with_gaps(case, seed):
        assert problems(needed, held, moved(case, plan.local, request, whole, more)) == []
