"""Thousands of requests leave no handle and no memory behind; KVPLAN_REQUESTS says how many."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvplan import Blocks, TransferPlan, plan_reads
from kvplan.executor import Status
from tests.nixl.worlds import NixlWorld
from tests.small import engine

REQUESTS, WARM_UP = int(os.environ.get("KVPLAN_REQUESTS", "2000")), 500
TIMEOUT_S = 30.0
SLACK_BYTES = 1 << 20
"""How much a process may have grown that leaks nothing: its allocators round up."""


@attrs.frozen
class Held:
    """What this process holds."""

    resident_bytes: int
    nixl_handles: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        """Counted by the system, and by Python's garbage collector."""
        gc.collect()
        names = [type(found).__name__ for found in gc.get_objects()]
        return cls(
            resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
            nixl_handles=names.count("nixl_xfer_handle") + names.count("nixl_prepped_dlist_handle"),
            files=len(list(Path("/proc/self/fd").iterdir())),
            threads=len(list(Path("/proc/self/task").iterdir())),
        )


@pytest.fixture
def world() -> Iterator[NixlWorld]:
    """Two workers of 64 blocks each."""
    (source,), (local,) = engine("prefill", blocks=64), engine("decode", tokens=6, blocks=64)
    with NixlWorld([source, local]) as opened:
        yield opened


def request(world: NixlWorld, plan: TransferPlan, number: int, rng: np.random.Generator) -> int:
    """One request from its block tables to its release, every tenth cancelled; how many notices came meanwhile."""
    ours, theirs, told = world.nixl["decode", 0], world.nixl["prefill", 0], 0
    near, far = (Blocks(rng.permutation(64)[:32]) for _ in range(2))
    (spec,) = plan.bind(local={"attn": near}, remote={"attn": far}, tokens=(1, 101))
    transfer = ours.start(spec, f"request {number}")
    if number % 10 == 0:
        ours.cancel(transfer)
    deadline = time.monotonic() + TIMEOUT_S
    while not ours.poll(transfer).is_settled:
        assert time.monotonic() < deadline
        told += len(theirs.notices())
    assert transfer.status is not Status.FAILED
    ours.release(transfer)
    return told


def test_requests_leave_nothing_behind(world: NixlWorld) -> None:
    """Memory and handles stay where they are after the first requests, cancelled ones included."""
    source, local = world.workers
    plan = plan_reads(local, [source])
    world.nixl["decode", 0].prepare(plan)
    rng = np.random.default_rng(1)
    told = sum(request(world, plan, i, rng) for i in range(WARM_UP))
    before = Held.now()
    told += sum(request(world, plan, i, rng) for i in range(WARM_UP, REQUESTS))
    after = Held.now()
    print(f"after {WARM_UP} requests: {before}, after {REQUESTS}: {after}")
    deadline = time.monotonic() + TIMEOUT_S
    while told < REQUESTS and time.monotonic() < deadline:
        told += len(world.nixl["prefill", 0].notices())
    assert told == REQUESTS
    assert attrs.evolve(after, resident_bytes=0) == attrs.evolve(before, resident_bytes=0)
    assert after.resident_bytes - before.resident_bytes < SLACK_BYTES


def test_plans_leave_nothing_behind(world: NixlWorld) -> None:
    """A plan's rows are given back with the plan, and equal local rows are prepared once."""
    source, local = world.workers
    ours = world.nixl["decode", 0]
    before = Held.now().nixl_handles
    for _ in range(50):
        ours.prepare(plan_reads(local, [source]))
    assert Held.now().nixl_handles == before
    kept = [plan_reads(local, [source]) for _ in range(3)]
    for plan in kept:
        ours.prepare(plan)
        ours.prepare(plan)
    assert Held.now().nixl_handles == before + 1 + len(kept)


def test_worlds_leave_nothing_behind() -> None:
    """Executors that are closed give back their threads and files."""
    workers = [*engine("prefill"), *engine("decode")]
    with NixlWorld(workers):
        pass
    before = Held.now()
    for _ in range(10):
        with NixlWorld(workers):
            pass
    after = Held.now()
    assert (after.files, after.threads) == (before.files, before.threads)
