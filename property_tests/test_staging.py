"""STAGE: both steps of a staged request move every byte to its place, and no other byte anywhere."""

from __future__ import annotations

import random
from functools import partial

from hypothesis import event, given
from hypothesis import strategies as st

from kvplan import Request, Worker, plan_writes
from kvplan.describe.worker import Key
from kvplan.staging import Chunk, StagedPlan, stage, stage_writes
from kvplan.testing.strategies import Case, cases
from property_tests import fewer
from property_tests.exhaustive import all_worlds
from property_tests.labelled import Tally
from property_tests.oracle import Copy, Place, by_byte, contents, copies_of, problems
from property_tests.staged import CHECKS
from property_tests.test_tails import Block, by_block, gapped, joined, requests_with_gaps, serving, some
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


def composed(chunk: Chunk, local: Worker) -> list[tuple[Key, Copy]]:
    """What both steps copy together, byte by byte, from sources to destinations, with each destination."""
    each = [(spec.remote, copies_of(spec)) for spec in chunk.specs]
    local_step = [
        copied
        for copy in chunk.copies
        for writes, reads in [copy.ranges()]
        for copied in by_byte(local.key, reads, writes)
    ]
    if chunk.operation == "READ":
        first, second = (
            [copied for _, copies in each for copied in copies],
            [(local.key, copied) for copied in local_step],
        )
    else:
        first, second = local_step, [(remote, copied) for remote, copies in each for copied in copies]
    staged: dict[Place, tuple[Key, Place]] = {}
    for source, read, write in first:
        assert write not in staged, "staged twice"
        staged[write] = source, read
    assert {device for device, _ in staged} <= {DEVICE}
    return [(at, (*staged[read], write)) for at, (_, read, write) in second]


def carried(staged: StagedPlan, request: Request) -> dict[Key, list[Copy]]:
    """What a staged plan copies for a request, by destination."""
    chunks = list(staged.bind(**request))
    event(f"{min(len(chunks), 3)} chunks")
    assert [chunk.buffer_slot for chunk in chunks] == [i % 2 for i in range(len(chunks))]
    found: dict[Key, list[Copy]] = {}
    for chunk in chunks:
        for at, copied in composed(chunk, staged.direct.local):
            found.setdefault(at, []).append(copied)
    return found


def moved(case: Case, worker: Worker, request: Request, whole: bool, more: int) -> list[Copy]:
    """What a staged plan of reads of a case copies for a request."""
    skipped = [name for name in case.not_transferred if name in worker.tensors]
    plan = partial(stage, remotes=case.sources, staging=NAME, whole=whole, not_transferred=skipped)
    return carried(in_least_memory(worker, DEVICE, more, plan), request).get(worker.key, [])


def written(case: Case, worker: Worker, request: Request, more: int) -> dict[Key, list[Copy]]:
    """What a staged plan of writes of a case copies for a request, by destination."""
    skipped = case.not_transferred
    siblings = [other for other in case.sources if other is not worker]
    plan = partial(stage_writes, remotes=case.destinations, siblings=siblings, staging=NAME, not_transferred=skipped)
    return carried(in_least_memory(worker, DEVICE, more, plan), request)


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


@fewer(4)
@given(cases(), SIZES)
def test_any_engines_write_the_same_staged_and_directly(case: Case, more: int) -> None:
    """All sources together write every byte once, and each the bytes that it would write directly."""
    held = {source.key: contents(source, case.tables[1], dict.fromkeys(case.spans[1])) for source in case.sources}
    every: dict[Key, list[Copy]] = {worker.key: [] for worker in case.destinations}
    for source in case.sources:
        siblings = [other for other in case.sources if other is not source]
        direct = plan_writes(source, case.destinations, siblings, not_transferred=case.not_transferred)
        request = case.request(direct)
        found = written(case, source, request, more)
        for spec in direct.bind(**request):
            assert sorted(found.get(spec.remote, [])) == sorted(copies_of(spec))
        for at, copies in found.items():
            every[at] += copies
    for worker in case.destinations:
        assert problems(contents(worker, case.tables[0], case.spans[1]), held, every[worker.key]) == []


@fewer(4)
@given(cases(), SIZES, st.integers(0, 999))
def test_writers_leave_gaps_in_block_tables_alone(case: Case, more: int, seed: int) -> None:
    """The blocks of destinations with gaps get their bytes, also from sources without the others."""
    choice, anywhere = random.Random(seed), dict.fromkeys(case.spans[1])
    offered = {source.key: by_block(source, case.tables[1], anywhere) for source in case.sources}
    kept, left = some(case.tables[0], choice), some(case.tables[1], choice)
    needed = {worker.key: joined(by_block(worker, case.tables[0], case.spans[1]), kept) for worker in case.destinations}
    left |= set[Block]().union(*(serving(offered.values(), each) for each in needed.values()))
    held = {source: joined(parts, left) for source, parts in offered.items()}
    every: dict[Key, list[Copy]] = {worker.key: [] for worker in case.destinations}
    for source in case.sources:
        request = case.request(case.writes(source))
        request["local"], request["remote"] = (
            {name: gapped(name, table, blocks, choice) for name, table in tables.items()}
            for tables, blocks in ((request["local"], left), (request["remote"], kept))
        )
        for at, copies in written(case, source, request, more).items():
            every[at] += copies
    for at, copies in every.items():
        assert problems(needed[at], held, copies) == []
