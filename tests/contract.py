"""What every executor has to do, as tests: subclass :class:`Contract` and give it a world of memory and executors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
import numpy as np
import pytest

from kvplan import Blocks, KVPlanError, MeshPlan, Region, Worker, plan_mesh, plan_reads
from kvplan.describe.worker import Key
from kvplan.executor import Executor, Notice, Status, Transfer
from tests.contents import Bytes, Contents, contents
from tests.small import engine

TIMEOUT_S = 30.0


class World(Protocol):
    """Workers with memory, and an executor for each, all of them connected."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    @property
    def executors(self) -> Mapping[Key, Executor]: ...

    def read(self, worker: Worker, region: str) -> Bytes: ...

    def write(self, worker: Worker, region: str, values: Bytes) -> None: ...


OpenWorld = Callable[[Sequence[Worker]], AbstractContextManager[World]]
"""Workers, wherever they are, to a world in which they are at addresses of its own."""


class Engines:
    """Both engines of a request in a world, its blocks, and what memory has to hold before and after it."""

    def __init__(
        self,
        world: World,
        num_sources: int,
        local: Mapping[str, Blocks],
        remote: Mapping[str, Blocks],
        tokens: Mapping[str, tuple[int, int]],
    ) -> None:
        self.world = world
        self.sources, self.destinations = world.workers[:num_sources], world.workers[num_sources:]
        self.local, self.remote, self.tokens = local, remote, tokens
        self._contents: tuple[Contents, Contents] | None = None
        self.told: dict[Key, list[Notice]] = {key: [] for key in world.executors}

    def listen(self) -> None:
        """Gather what workers are told, which also lets executors without a thread of their own serve their peers."""
        for key, executor in self.world.executors.items():
            self.told[key] += executor.notices()

    def finish(self, started: Sequence[tuple[Executor, Transfer]]) -> list[Status]:
        """Poll until all are settled; fail where that takes too long."""
        deadline = time.monotonic() + TIMEOUT_S
        while not {executor.poll(transfer).is_settled for executor, transfer in started} <= {True}:
            assert time.monotonic() < deadline, started
            self.listen()
        return [transfer.status for _, transfer in started]

    def fill(self) -> Contents:
        """Write what memory holds before the request; return what it has to hold after it."""
        if self._contents is None:
            self._contents = contents(self.sources, self.destinations, self.local, self.remote, self.tokens)
        before, after = self._contents
        for worker in self.world.workers:
            for region in worker.regions:
                self.world.write(worker, region.name, before[worker.key, region.name])
        return after

    def mesh(self, operation: Any) -> MeshPlan:
        """The plans of one direction, prepared."""
        mesh = plan_mesh(self.destinations, self.sources, operation)
        for plan in mesh.plans:
            self.world.executors[plan.local.key].prepare(plan)
        return mesh

    def start(
        self, mesh: MeshPlan, operation: str, request: str, *, tell: bool = True
    ) -> list[tuple[Executor, Transfer]]:
        """All transfers of the request, begun."""
        reads = operation == "READ"
        # a write plan's local worker is the source, and its groups are the ones that ranges are given by
        local, remote = (self.local, self.remote) if reads else (self.remote, self.local)
        return [
            (executor, executor.start(spec, request, tell=tell))
            for plan in mesh.plans
            for executor in [self.world.executors[plan.local.key]]
            for spec in plan.bind(local=local, remote=remote, tokens=self.tokens)
        ]

    def wrong(self, after: Contents) -> list[str]:
        """Where memory differs from what it has to hold."""
        return [
            f"{np.count_nonzero(found != expected)} bytes of {worker.label} {region.name}"
            for worker in self.world.workers
            for region in worker.regions
            for found, expected in [(self.world.read(worker, region.name), after[worker.key, region.name])]
            if not np.array_equal(found, expected)
        ]

    def notices(self, expected: dict[Key, int]) -> dict[Key, list[Notice]]:
        """What each worker has been told, waiting until it is as much as expected."""
        deadline = time.monotonic() + TIMEOUT_S
        self.listen()
        while time.monotonic() < deadline and any(len(self.told[key]) < count for key, count in expected.items()):
            self.listen()
        told, self.told = self.told, {key: [] for key in self.told}
        return told


def move(engines: Engines, operation: str, request: str = "request") -> None:
    """Move the whole request; check every byte of both engines' memory, and who was told."""
    after = engines.fill()
    mesh = engines.mesh(operation)
    started = engines.start(mesh, operation, request)
    assert set(engines.finish(started)) == {Status.DONE}
    assert engines.wrong(after) == []
    assert_told(engines, mesh, request)
    for executor, transfer in started:
        executor.release(transfer)


def assert_told(engines: Engines, mesh: MeshPlan, request: str) -> None:
    """Check that all workers which the plans name have been told of the request once, and no others."""
    awaited = {key: completions.awaits for key, completions in mesh.completions.items()}
    told = engines.notices({key: len(keys) for key, keys in awaited.items()})
    assert {key: sorted(map(_sender, notices)) for key, notices in told.items()} == {
        key: sorted(keys) for key, keys in awaited.items()
    }
    assert {notice.request for notices in told.values() for notice in notices} == {request}


def _sender(notice: Notice) -> Key:
    return notice.engine_id, notice.rank


class Contract:
    """The tests. The fixture ``open_world`` is the implementation's."""

    @pytest.fixture
    def engines(self, open_world: OpenWorld) -> Iterator[Engines]:
        """12 heads on 2 workers in blocks of 4 tokens, and on 3 workers in blocks of 6 that keep heads apart."""
        sources = engine("prefill", tp=2, heads=12, tokens=4, order="NH")
        destinations = engine("decode", tp=3, heads=12, tokens=6)
        with open_world([*sources, *destinations]) as world:
            yield Engines(
                world, 2, {"attn": Blocks([7, 2, 5])}, {"attn": Blocks([3, 8, 1, 6, 0])}, tokens={"attn": (3, 17)}
            )

    @pytest.mark.parametrize("operation", ["READ", "WRITE"])
    def test_a_request_moves(self, engines: Engines, operation: str) -> None:
        """Every byte of a request arrives, no other byte changes, and the workers that the plans name are told."""
        move(engines, operation)

    def test_both_directions_from_one_world(self, engines: Engines) -> None:
        """Requests one after the other, reads and writes, are told apart by name."""
        for i, operation in enumerate(["READ", "WRITE", "READ"]):
            move(engines, operation, f"request {i}")

    @pytest.mark.parametrize("operation", ["READ", "WRITE"])
    def test_a_request_of_no_bytes(self, engines: Engines, operation: str) -> None:
        """A request that needs no byte is done, and told of, as any other is."""
        engines.tokens = {"attn": (5, 5)}
        move(engines, operation)

    @pytest.mark.parametrize("operation", ["READ", "WRITE"])
    def test_only_the_last_of_several_transfers_tells(self, engines: Engines, operation: str) -> None:
        """A request whose bytes move without telling is told of by transfers of no bytes that follow."""
        after, mesh = engines.fill(), engines.mesh(operation)
        tokens, nothing = engines.tokens, {"attn": (5, 5)}
        for engines.tokens in (tokens, nothing):
            assert set(engines.finish(engines.start(mesh, operation, "request", tell=False))) == {Status.DONE}
        assert engines.wrong(after) == []
        time.sleep(0.05)
        assert not any(engines.notices({}).values())
        assert set(engines.finish(engines.start(mesh, operation, "request"))) == {Status.DONE}
        assert_told(engines, mesh, "request")

    def test_a_pair_that_never_moves(self, engines: Engines) -> None:
        """Between workers that share no head, a transfer is done at once, and nobody is told."""
        mesh = engines.mesh("READ")
        (executor, transfer), *_ = [
            (executor, transfer)
            for executor, transfer in engines.start(mesh, "READ", "request")
            if (transfer.spec.local, transfer.spec.remote) == (("decode", 0), ("prefill", 1))
        ]
        assert executor.poll(transfer) is Status.DONE
        assert engines.notices({})["prefill", 1] == []

    def test_a_plan_is_prepared_first(self, engines: Engines) -> None:
        """A spec of a plan that was not prepared is refused."""
        plan = plan_reads(engines.destinations[0], engines.sources)
        spec, _ = plan.bind(local=engines.local, remote=engines.remote, tokens=engines.tokens)
        with pytest.raises(KVPlanError, match="TRANSFER: cannot start a transfer with prefill/0"):
            engines.world.executors["decode", 0].start(spec, "request")

    def test_a_plan_of_another_worker(self, engines: Engines) -> None:
        """A plan of another local worker is refused."""
        plan = plan_reads(engines.destinations[0], engines.sources)
        with pytest.raises(KVPlanError, match="PEER: cannot prepare a plan with local worker decode/0"):
            engines.world.executors["decode", 1].prepare(plan)

    def test_a_plan_of_other_views_of_the_local_worker(self, engines: Engines) -> None:
        """A plan is prepared whose local worker has the same regions: views of them are the plan's own affair."""
        (local, *_), (_, *layers) = engines.destinations, engines.destinations[0].views
        plan = plan_reads(attrs.evolve(local, views=layers), engines.sources)
        after = engines.fill()
        executor = engines.world.executors["decode", 0]
        executor.prepare(plan)
        specs = plan.bind(local=engines.local, remote=engines.remote, tokens=engines.tokens)
        engines.finish([(executor, executor.start(spec, "request")) for spec in specs])
        for region in local.regions:
            right = np.array_equal(engines.world.read(local, region.name), after[local.key, region.name])
            assert right == (region.name in {view.region for view in layers})

    def test_a_plan_of_other_regions_of_the_local_worker(self, engines: Engines) -> None:
        """A plan is refused whose local worker has the same name and views, and a region more."""
        local = engines.destinations[0]
        more = attrs.evolve(local, regions=[*local.regions, Region("more", 1 << 50, 64)])
        with pytest.raises(
            KVPlanError,
            match="cannot prepare a plan with local worker decode/0: expected that worker, with the regions",
        ):
            engines.world.executors["decode", 0].prepare(plan_reads(more, engines.sources))

    def test_a_plan_with_an_unknown_worker(self, engines: Engines) -> None:
        """A plan with a worker that the executor knows nothing of is refused."""
        strangers = engine("strange", tp=2, heads=12, tokens=4)
        plan = plan_reads(engines.destinations[0], strangers)
        with pytest.raises(KVPlanError, match="PEER: cannot prepare a plan with remote worker strange/0"):
            engines.world.executors["decode", 0].prepare(plan)

    def test_a_plan_with_a_worker_that_has_changed(self, engines: Engines) -> None:
        """A plan with another description of a known worker, one with other block lengths, is refused."""
        changed = engine("prefill", tp=2, heads=12, tokens=2, order="NH")
        plan = plan_reads(engines.destinations[0], changed)
        with pytest.raises(KVPlanError, match="another description"):
            engines.world.executors["decode", 0].prepare(plan)

    def test_cancelled_transfers_settle(self, engines: Engines) -> None:
        """A cancelled transfer settles, and no byte moves afterwards."""
        engines.fill()
        started = engines.start(engines.mesh("READ"), "READ", "request")
        for executor, transfer in started:
            executor.cancel(transfer)
        assert set(engines.finish(started)) <= {Status.CANCELLED, Status.DONE}
        for worker in engines.destinations:
            for region in worker.regions:
                engines.world.write(worker, region.name, np.zeros(region.size_bytes, np.uint8))
        time.sleep(0.2)
        assert not any(
            engines.world.read(worker, region.name).any()
            for worker in engines.destinations
            for region in worker.regions
        )

    def test_a_settled_transfer_stays_settled(self, engines: Engines) -> None:
        """To cancel a transfer that is done changes nothing: all its bytes have moved."""
        started = engines.start(engines.mesh("READ"), "READ", "request")
        engines.finish(started)
        for executor, transfer in started:
            executor.cancel(transfer)
            assert executor.poll(transfer) is Status.DONE

    def test_release_twice(self, engines: Engines) -> None:
        """To release a transfer again does nothing."""
        started = engines.start(engines.mesh("READ"), "READ", "request")
        engines.finish(started)
        for executor, transfer in (*started, *started):
            executor.release(transfer)
            assert executor.poll(transfer) is Status.DONE
