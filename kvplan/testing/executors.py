"""The executor contract: the tests that every :class:`kvplan.Executor` passes, the one of your transfer library too.

Subclass :class:`ExecutorContract` and say in ``open_cluster`` how workers get memory and executors. pytest collects a
subclass whose name begins with ``Test``; :meth:`ExecutorContract.check` runs all tests without a test runner. Here are
the executors of :mod:`kvplan.executor`, over fake memory:

>>> from contextlib import contextmanager
>>> from kvplan.executor import FakeNetwork
>>> class FakeCluster:
...     def __init__(self, workers, network):
...         self.workers = workers  # yours: with regions at the addresses that your memory has
...         self.executors = {worker.key: network.executor(worker) for worker in workers}
...         self.memory = network.memory
...     def read(self, worker, region):
...         return self.memory.read(worker, region.address, region.size_bytes, region.device_id)
...     def write(self, worker, region, values):
...         self.memory.write(worker, region.address, values, region.device_id)
>>> class TestFakeExecutor(ExecutorContract):
...     @contextmanager
...     def open_cluster(self, workers):
...         network = FakeNetwork(workers)
...         with network.memory:
...             yield FakeCluster(workers, network)
>>> len(TestFakeExecutor().check())
10

An executor that breaks a rule of :mod:`kvplan.executor` fails, here E3:

>>> class TestSilentExecutor(TestFakeExecutor):
...     @contextmanager
...     def open_cluster(self, workers):
...         with super().open_cluster(workers) as cluster:
...             for executor in cluster.executors.values():
...                 executor.notices = lambda: ()
...             yield cluster
...     timeout_s = 0.1
>>> TestSilentExecutor().test_a_request_moves()
Traceback (most recent call last):
...
AssertionError: notices at prefill/0: expected [Notice(engine_id='decode', rank=0, request='request 0'),
Notice(engine_id='decode', rank=1, request='request 0')], got []

:class:`Transmission` moves any other request between two engines of a cluster, and checks every byte.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvplan.describe import Blocks, Region, Worker
from kvplan.describe.worker import Key, label_of
from kvplan.errors import KVPlanError
from kvplan.executor import Executor, Notice, Status, Transfer
from kvplan.models import Model
from kvplan.plan import MeshPlan, ReadSpec, TransferPlan, plan_mesh, plan_reads
from kvplan.verification import FakeMemory, verify

Bytes = npt.NDArray[np.uint8]
Contents = Mapping[tuple[Key, str], Bytes]
"""All bytes of each region, by the worker's key and the region's name."""

Started = Sequence[tuple[Executor, Transfer]]

Operation = Literal["READ", "WRITE"]
OPERATIONS: Final[tuple[Operation, ...]] = ("READ", "WRITE")
NOTHING: Final = MappingProxyType({"attn": (5, 5)})
"""A range that has no position."""

QUIET_S: Final = 0.2
"""How long a test waits for bytes and notices that must not come."""


class Cluster(Protocol):
    """Workers with memory and an executor for each. Executors of different engines are connected."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers in the given order, with their regions at the addresses of their memory."""

    @property
    def executors(self) -> Mapping[Key, Executor]:
        """The executor of each worker, by ``worker.key``."""

    def read(self, worker: Worker, region: Region) -> Bytes:
        """A copy of all bytes of a region."""

    def write(self, worker: Worker, region: Region, values: Bytes) -> None:
        """Set all bytes of a region."""


@attrs.define
class Transmission:
    """One request between two engines of a cluster.

    The first ``num_sources`` workers are the source engine. ``local``, ``remote`` and ``tokens`` are the arguments of
    ``bind`` for a ``READ``, with a range for each token group.
    """

    cluster: Cluster
    num_sources: int
    local: Mapping[str, Blocks]
    remote: Mapping[str, Blocks]
    tokens: Mapping[str, tuple[int, int]]
    timeout_s: float = 30.0
    _notices: dict[Key, list[Notice]] = attrs.field(init=False, factory=dict)

    @property
    def sources(self) -> Sequence[Worker]:
        """The workers that bytes come from."""
        return self.cluster.workers[: self.num_sources]

    @property
    def destinations(self) -> Sequence[Worker]:
        """The workers that bytes go to."""
        return self.cluster.workers[self.num_sources :]

    def plan(self, operation: Operation) -> MeshPlan:
        """The plans of all workers that read or write, each prepared by its executor."""
        mesh = plan_mesh(self.destinations, self.sources, operation)
        for plan in mesh.plans:
            self.cluster.executors[plan.local.key].prepare(plan)
        return mesh

    def arguments(self, plan: TransferPlan) -> dict[str, Any]:
        """The request as ``plan.bind`` takes it."""
        tables = (self.local, self.remote) if plan.operation == "READ" else (self.remote, self.local)
        return {"local": tables[0], "remote": tables[1], "tokens": self.tokens}

    def specs(self, plans: Iterable[TransferPlan]) -> list[ReadSpec]:
        """The specs of the request."""
        return [spec for plan in plans for spec in plan.bind(**self.arguments(plan))]

    def fill(self, plans: Sequence[TransferPlan]) -> Contents:
        """Fill all memory with random bytes, and return what it must hold after the request.

        ``verify`` checks the plans themselves.
        """
        report = verify(plans, **self.arguments(plans[0]))
        _expect(report.ok, str(report))
        random = np.random.default_rng(1)
        with FakeMemory(self.cluster.workers) as memory:
            for worker, region in self.regions:
                values = random.integers(0, 256, region.size_bytes, np.uint8)
                self.cluster.write(worker, region, values)
                memory.write(worker, region.address, values, region.device_id)
            for spec in self.specs(plans):
                memory.execute(spec)
            return {
                (worker.key, region.name): memory.read(worker, region.address, region.size_bytes, region.device_id)
                for worker, region in self.regions
            }

    @property
    def regions(self) -> list[tuple[Worker, Region]]:
        """Each region with its worker."""
        return [(worker, region) for worker in self.cluster.workers for region in worker.regions]

    def start(self, plans: Iterable[TransferPlan], request: str, *, notify: bool = True) -> Started:
        """Start all transfers of the request, each on its executor."""
        executors = self.cluster.executors
        return [
            (executors[spec.local], executors[spec.local].start(spec, request, notify=notify))
            for spec in self.specs(plans)
        ]

    def finish(self, started: Started) -> set[Status]:
        """Poll transfers until all are settled, and return their statuses."""
        deadline = time.monotonic() + self.timeout_s
        while False in {executor.poll(transfer).is_settled for executor, transfer in started}:
            _expect(time.monotonic() < deadline, f"not settled after {self.timeout_s} s: {started}")
            self._receive()
        return {transfer.status for _, transfer in started}

    def _receive(self) -> None:
        """Read the notices of all workers. Executors without a thread of their own serve their peers meanwhile."""
        for key, executor in self.cluster.executors.items():
            self._notices.setdefault(key, []).extend(executor.notices())

    def check_memory(self, expected: Contents) -> None:
        """Assert that every byte of all regions is the expected one."""
        for worker, region in self.regions:
            wrong = np.count_nonzero(self.cluster.read(worker, region) != expected[worker.key, region.name])
            _expect(not wrong, f"{wrong} wrong bytes in {worker.label} {region.name}")

    def check_notices(self, senders: Mapping[Key, Iterable[Key]], request: str) -> None:
        """Assert that each worker receives one notice of the request from each of its ``senders``, and no other."""
        deadline = time.monotonic() + self.timeout_s
        expected = {key: Counter(Notice(*sender, request) for sender in keys) for key, keys in senders.items()}
        self._receive()
        while time.monotonic() < deadline and any(len(self._notices[key]) < expected[key].total() for key in expected):
            self._receive()
        received, self._notices = self._notices, {}
        for key, notices in received.items():
            awaited = expected.get(key, Counter())
            _expect(Counter(notices) == awaited, f"notices at {label_of(key)}: expected {[*awaited]}, got {notices}")

    def move(self, operation: Operation, request: str = "request") -> None:
        """Move the request. Assert that memory and notices are right, and release the transfers."""
        mesh = self.plan(operation)
        expected = self.fill(mesh.plans)
        started = self.start(mesh.plans, request)
        _expect(self.finish(started) == {Status.DONE}, f"expected all DONE, got {started}")
        self.check_memory(expected)
        self.check_notices({key: counts.awaits for key, counts in mesh.completions.items()}, request)
        for executor, transfer in started:
            executor.release(transfer)


def _expect(condition: bool, otherwise: str) -> None:
    """An assertion that reads the same under every test runner."""
    if not condition:
        raise AssertionError(otherwise)


@contextmanager
def refused(code: str, name: str) -> Iterator[None]:
    """Assert that the block raises a :class:`kvplan.KVPlanError` with this code and a ``name`` in its message."""
    try:
        yield
    except KVPlanError as error:
        _expect(error.code == code and name in str(error), f"expected {code} with {name!r}, got {error}")
    else:
        raise AssertionError(f"expected a KVPlanError with code {code}, got none")


def engine(name: str, **options: Any) -> tuple[Worker, ...]:
    """Workers of a model with 2 layers and 12 heads."""
    keys = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 12}
    return Model.from_config(keys).engine(name, **{"num_blocks": 10, **options})


class ExecutorContract:
    """The tests. Subclass it, and define :meth:`open_cluster`."""

    timeout_s = 30.0
    """How long transfers and notices may take."""

    def open_cluster(self, workers: Sequence[Worker]) -> AbstractContextManager[Cluster]:
        """Give workers memory and executors, and connect them. On exit, everything is closed."""
        raise NotImplementedError

    def check(self) -> list[str]:
        """Run all tests and return their names. Raises an AssertionError at the first that fails."""
        names = [name for name in dir(self) if name.startswith("test_")]
        for name in names:
            getattr(self, name)()
        return names

    @contextmanager
    def transmission(self) -> Iterator[Transmission]:
        """14 tokens from 2 workers with blocks of 4 tokens to 3 workers with blocks of 6, in another order of axes."""
        sources = engine("prefill", tp=2, tokens_per_block=4, layout="LBNHC")
        destinations = engine("decode", tp=3, tokens_per_block=6)
        local, remote = {"attn": Blocks([7, 2, 5])}, {"attn": Blocks([3, 8, 1, 6, 0])}
        with self.open_cluster([*sources, *destinations]) as cluster:
            yield Transmission(cluster, len(sources), local, remote, {"attn": (3, 17)}, self.timeout_s)

    def test_a_request_moves(self) -> None:
        """All bytes of reads and writes arrive, no other byte changes, and the awaited notices come."""
        with self.transmission() as one:
            for number, operation in enumerate((*OPERATIONS, "READ")):
                one.move(operation, f"request {number}")

    def test_a_request_without_bytes(self) -> None:
        """A request that moves no byte is DONE, and its notices come."""
        with self.transmission() as one:
            one.tokens = NOTHING
            one.move("READ")
            one.move("WRITE")

    def test_only_the_last_transfer_notifies(self) -> None:
        """Transfers without ``notify`` move their bytes silently. A transfer of no bytes notifies afterwards."""
        for operation in OPERATIONS:
            with self.transmission() as one:
                mesh = one.plan(operation)
                expected = one.fill(mesh.plans)
                one.finish(one.start(mesh.plans, "request", notify=False))
                one.check_memory(expected)
                one.tokens = NOTHING
                one.finish(one.start(mesh.plans, "request", notify=False))
                time.sleep(QUIET_S)
                one.check_notices({}, "request")
                one.finish(one.start(mesh.plans, "request"))
                one.check_notices({key: counts.awaits for key, counts in mesh.completions.items()}, "request")

    def test_a_pair_that_exchanges_nothing(self) -> None:
        """A transfer between workers that share no head is DONE at once, and sends no notice."""
        with self.transmission() as one:
            ((executor, transfer),) = (
                (executor, transfer)
                for executor, transfer in one.start(one.plan("READ").plans[:1], "request")
                if transfer.spec.remote == one.sources[1].key
            )
            _expect(executor.poll(transfer) is Status.DONE, f"expected DONE, got {transfer}")
            time.sleep(QUIET_S)
            notices = one.cluster.executors[one.sources[1].key].notices()
            _expect(not notices, f"expected no notices, got {notices}")

    def test_start_refuses_a_plan_that_is_not_prepared(self) -> None:
        """A spec of a plan that was not prepared is refused."""
        with self.transmission() as one, refused("TRANSFER", one.sources[0].label):
            one.start([plan_reads(one.destinations[0], one.sources)], "request")

    def test_prepare_refuses_other_workers(self) -> None:
        """A plan is refused unless the executor knows its workers as the plan describes them."""
        with self.transmission() as one:
            local, other, *_ = one.destinations
            more = attrs.evolve(local, regions=[*local.regions, Region("more", 1 << 50, 64)])
            unknown, changed = engine("unknown", tp=2), engine("prefill", tp=2, tokens_per_block=2)
            plans = (
                (other, plan_reads(local, one.sources), local),
                (local, plan_reads(more, one.sources), local),
                (local, plan_reads(local, unknown), unknown[0]),
                (local, plan_reads(local, changed), changed[0]),
            )
            for worker, plan, wrong in plans:
                with refused("PEER", wrong.label):
                    one.cluster.executors[worker.key].prepare(plan)

    def test_prepare_takes_other_views_of_the_local_worker(self) -> None:
        """A plan of some layers is prepared and moves those, because its local worker has the same regions."""
        with self.transmission() as one:
            local = one.destinations[0]
            plan = plan_reads(attrs.evolve(local, views=local.views[1:]), one.sources)
            expected = one.fill([plan])
            one.cluster.executors[local.key].prepare(plan)
            one.finish(one.start([plan], "request"))
            one.check_memory(expected)

    def test_a_running_transfer_is_not_released(self) -> None:
        """A transfer that still runs is not released."""
        with self.transmission() as one:
            started = one.start(one.plan("READ").plans, "request")
            for executor, transfer in started:
                if not transfer.status.is_settled:
                    with refused("TRANSFER", transfer.request):
                        executor.release(transfer)
            one.finish(started)

    def test_cancelled_transfers_settle(self) -> None:
        """A cancelled transfer settles, and no byte moves afterwards."""
        with self.transmission() as one:
            mesh = one.plan("READ")
            expected = {place: np.zeros_like(values) for place, values in one.fill(mesh.plans).items()}
            started = one.start(mesh.plans, "request")
            for executor, transfer in started:
                executor.cancel(transfer)
            statuses = one.finish(started)
            _expect(statuses <= {Status.CANCELLED, Status.DONE}, f"expected CANCELLED or DONE, got {started}")
            for worker, region in one.regions:
                one.cluster.write(worker, region, expected[worker.key, region.name])
            time.sleep(QUIET_S)
            one.check_memory(expected)

    def test_a_settled_transfer_stays_settled(self) -> None:
        """To cancel a transfer that is DONE, or to release it twice, changes nothing."""
        with self.transmission() as one:
            started = one.start(one.plan("READ").plans, "request")
            one.finish(started)
            for executor, transfer in (*started, *started):
                executor.cancel(transfer)
                executor.release(transfer)
                _expect(executor.poll(transfer) is Status.DONE, f"expected DONE, got {transfer}")
