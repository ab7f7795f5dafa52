"""Thousands of requests leave no handle and no memory behind. LEAK_REQUESTS sets how many."""

from __future__ import annotations

import gc
import itertools
import os
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import attrs
import numpy as np
import pytest

from benchmarks.held import running_threads
from benchmarks.real_memory import NixlCluster
from kvplan import Blocks, Status, TransferPlan, plan_reads
from kvplan_nixl import settle
from tests.blocking import wait_until
from tests.small import engine

REQUESTS, WARM_UP, ROUNDS = int(os.environ.get("LEAK_REQUESTS", "2000")), 500, 3
TIMEOUT_S = 30.0
SLACK_BYTES = 350 << 10
"""How much a process that leaks nothing may grow in a round, because its allocators round up."""


@attrs.frozen
class Held:
    """What this process holds now."""

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
            threads=len(running_threads()),
        )


@pytest.fixture
def cluster() -> Iterator[NixlCluster]:
    """Two workers of 64 blocks each."""
    (source,), (local,) = engine("prefill", blocks=64), engine("decode", tokens=6, blocks=64)
    with NixlCluster([source, local]) as opened:
        yield opened


def test_messages_of_other_agents_do_not_fill_memory(cluster: NixlCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL keeps them until somebody asks for them, and nobody did: 20,000 of 4 KB were 122 MiB."""
    source, reader = cluster.nixl["prefill", 0]._agent, cluster.nixl["decode", 0]._agent
    for _ in range(100):
        reader._agent.send_notif(source.name, b"a message")
    discarded: list[bytes] = []
    take = source._agent.get_new_notifs

    def counted() -> dict[str, list[bytes]]:
        taken: dict[str, list[bytes]] = take()
        discarded.extend(taken.get(reader.name, []))
        return taken

    monkeypatch.setattr(source._agent, "get_new_notifs", counted)

    def are_discarded() -> bool:
        cluster.nixl["prefill", 0].discard_messages()
        return len(discarded) >= 100

    wait_until(are_discarded, TIMEOUT_S)
    assert discarded == [b"a message"] * 100
    assert take() == {}


def request(cluster: NixlCluster, plan: TransferPlan, number: int, rng: np.random.Generator) -> None:
    """Run one request, every tenth of them cancelled."""
    executor = cluster.nixl["decode", 0]
    near, far = (Blocks(rng.permutation(64)[:32]) for _ in range(2))
    (spec,) = plan.bind(local={"attn": near}, remote={"attn": far}, tokens=(1, 101))
    transfer = executor.start(spec, f"request {number}")
    if number % 10 == 0:
        executor.cancel(transfer)
    assert settle(executor, [transfer], TIMEOUT_S)
    assert transfer.status is not Status.FAILED
    executor.release(transfer)


def test_requests_leave_nothing_behind(cluster: NixlCluster) -> None:
    """After the first requests memory and handles stay the same, also for cancelled ones."""
    source, local = cluster.workers
    plan = plan_reads(local, [source])
    cluster.nixl["decode", 0].prepare(plan)
    rng = np.random.default_rng(1)
    numbers = itertools.count()
    for _ in range(WARM_UP):
        request(cluster, plan, next(numbers), rng)
    Held.now()  # to look takes memory, once
    found = [Held.now()]
    for _ in range(ROUNDS):
        for _ in range((REQUESTS - WARM_UP) // ROUNDS):
            request(cluster, plan, next(numbers), rng)
        found.append(Held.now())
    print(f"after {WARM_UP} requests, and in {ROUNDS} steps after {REQUESTS}: {found}")
    before, after = found[0], found[-1]
    # of this process, in which what earlier tests have left may end
    assert after.nixl_handles <= before.nixl_handles
    assert after.files <= before.files
    assert after.threads <= before.threads
    # a heap grows now and then, and what leaks grows in each round
    grown_bytes = [later.resident_bytes - earlier.resident_bytes for earlier, later in pairwise(found)]
    assert min(grown_bytes) < SLACK_BYTES, grown_bytes


def test_plans_leave_nothing_behind(cluster: NixlCluster) -> None:
    """A plan's rows are freed with the plan, and equal local rows are prepared once."""
    source, local = cluster.workers
    ours = cluster.nixl["decode", 0]
    before = Held.now().nixl_handles
    for _ in range(50):
        ours.prepare(plan_reads(local, [source]))
    assert Held.now().nixl_handles == before
    kept = [plan_reads(local, [source]) for _ in range(3)]
    for plan in kept:
        ours.prepare(plan)
        ours.prepare(plan)
    assert Held.now().nixl_handles == before + 1 + len(kept)


def test_clusters_leave_nothing_behind() -> None:
    """Closed executors leave no threads and no files."""
    workers = [*engine("prefill"), *engine("decode")]
    with NixlCluster(workers):
        pass
    before = Held.now()
    for _ in range(10):
        with NixlCluster(workers):
            pass
    after = Held.now()
    assert after.files <= before.files
    assert after.threads <= before.threads
