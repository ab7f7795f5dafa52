"""The executor contract: the tests that every :class:`kvplan.Executor` passes, the one of your transfer library too.

Subclass :class:`ExecutorContract` and say in ``open_cluster`` how workers get memory and executors. pytest collects a
subclass whose name begins with ``Test``; :meth:`ExecutorContract.check` runs all tests without a test runner. Here are
the executors of a :class:`kvplan.testing.FakeNetwork`:

>>> from contextlib import contextmanager
>>> from kvplan.testing import FakeNetwork
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
>>> TestFakeExecutor().check()[0]
'test_a_pair_that_exchanges_nothing'

:class:`Transmission` moves any other request between two engines of a cluster, and checks every byte and notice.
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
from kvplan.executor import Executor, Notice, PendingRequests, Status, Transfer
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

    ``local``, ``remote`` and ``tokens`` are arguments of ``bind`` for a ``READ``, with a range for each token group.
    """

    cluster: Cluster
    sources: Sequence[Worker]
    destinations: Sequence[Worker]
    local: Mapping[str, Blocks]
    remote: Mapping[str, Blocks]
    tokens: Mapping[str, tuple[int, int]]
    timeout_s: float = 30.0
    _notices: dict[Key, list[Notice]] = attrs.field(init=False, factory=dict)

    @property
    def regions(self) -> list[tuple[Worker, Region]]:
        """Each region with its worker."""
        return [(worker, region) for worker in self.cluster.workers for region in worker.regions]

    def plan(self, operation: Operation) -> MeshPlan:
        """The plans of all workers that read or write, each prepared by its executor."""
        mesh = plan_mesh(self.destinations, self.sources, operation)
        for plan in mesh.plans:
            self.cluster.executors[plan.local.key].prepare(plan)
        return mesh

    def _arguments(self, plan: TransferPlan) -> dict[str, Any]:
        tables = (
            (self.local, self.remote) if plan.operation == "READ" else (self.remote, self.local)
        )
        return {"local": tables[0], "remote": tables[1], "tokens": self.tokens}

    def _specs(self, plans: Iterable[TransferPlan]) -> list[ReadSpec]:
        return [spec for plan in plans for spec in plan.bind(**self._arguments(plan))]

    def fill(self, plans: Sequence[TransferPlan]) -> Contents:
        """Fill all memory with random bytes, and return what it must hold after the request.

        ``verify`` checks the plans themselves.
        """
        report = verify(plans, **self._arguments(plans[0]))
        _expect(report.ok, str(report))
        random = np.random.default_rng(1)
        with FakeMemory(self.cluster.workers) as memory:
            for worker, region in self.regions:
                values = random.integers(0, 256, region.size_bytes, np.uint8)
                self.cluster.write(worker, region, values)
                memory.write(worker, region.address, values, region.device_id)
            for spec in self._specs(plans):
                memory.execute(spec)
            return {
                (worker.key, region.name): memory.read(
                    worker, region.address, region.size_bytes, region.device_id
                )
                for worker, region in self.regions
            }

    def start(
        self, plans: Iterable[TransferPlan], request: str, *, attempt: int = 0, notify: bool = True
    ) -> Started:
        """Start all transfers of the request, each on its executor."""
        executors = self.cluster.executors
        return [
            (
                executors[spec.local],
                executors[spec.local].start(spec, request, attempt=attempt, notify=notify),
            )
            for spec in self._specs(plans)
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

    def contents(self) -> Contents:
        """A copy of all memory."""
        return {
            (worker.key, region.name): self.cluster.read(worker, region)
            for worker, region in self.regions
        }

    def check_memory(self, expected: Contents) -> None:
        """Assert that every byte of all regions is the expected one."""
        for worker, region in self.regions:
            wrong = np.count_nonzero(
                self.cluster.read(worker, region) != expected[worker.key, region.name]
            )
            _expect(not wrong, f"{wrong} wrong bytes in {worker.label} {region.name}")

    def notified(self, pending: PendingRequests, worker: Key, count: int) -> dict[str, Status]:
        """Pass on the notices of a worker, at least ``count``, and return the requests that are pending no longer."""
        deadline = time.monotonic() + self.timeout_s
        while len(self._notices.get(worker, ())) < count:
            _expect(time.monotonic() < deadline, f"expected {count} notices at {label_of(worker)}")
            self._receive()
        received, self._notices = self._notices, {}
        return pending.receive(received[worker])

    def check_notices(self, mesh: MeshPlan, request: str, *, sent: bool = True) -> None:
        """Assert that each worker receives the notices that it awaits by a mesh plan, or none if none were sent."""
        awaited = {key: one.awaits if sent else () for key, one in mesh.completions.items()}
        expected = {
            key: Counter(Notice(*sender, request) for sender in keys)
            for key, keys in awaited.items()
        }
        deadline = time.monotonic() + (self.timeout_s if sent else QUIET_S)
        while time.monotonic() < deadline:
            self._receive()
            if sent and all(len(self._notices[key]) >= len(keys) for key, keys in awaited.items()):
                break
        received, self._notices = self._notices, {}
        for key, notices in received.items():
            found = f"notices at {label_of(key)}: expected {[*expected[key]]}, got {notices}"
            _expect(Counter(notices) == expected[key], found)

    def move(self, operation: Operation, request: str = "request") -> None:
        """Move the request. Assert that memory and notices are right, and release the transfers."""
        mesh = self.plan(operation)
        expected = self.fill(mesh.plans)
        started = self.start(mesh.plans, request)
        _expect(self.finish(started) == {Status.DONE}, f"expected all DONE, got {started}")
        self.check_memory(expected)
        self.check_notices(mesh, request)
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
        _expect(
            error.code == code and name in str(error), f"expected {code} with {name!r}, got {error}"
        )
    else:
        raise AssertionError(f"expected a KVPlanError with code {code}, got none")


def engine(name: str, **options: Any) -> tuple[Worker, ...]:
    """Workers of a model with 2 layers and 12 heads."""
    keys = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 12,
    }
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
            workers, number = cluster.workers, len(sources)
            tokens = {"attn": (3, 17)}
            yield Transmission(
                cluster, workers[:number], workers[number:], local, remote, tokens, self.timeout_s
            )

    def test_a_request_moves(self) -> None:
        """All bytes of reads and writes arrive, no other byte changes, and all notices come, also for no bytes."""
        with self.transmission() as one:
            for number, operation in enumerate((*OPERATIONS, "READ")):
                one.move(operation, f"request {number}")
            one.tokens = NOTHING
            for operation in OPERATIONS:
                one.move(operation, f"{operation} of nothing")

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
                one.check_notices(mesh, "request", sent=False)
                one.finish(one.start(mesh.plans, "request"))
                one.check_notices(mesh, "request")

    def test_a_retry_is_not_another_reader(self) -> None:
        """Notices name their sender and attempt: a request is no longer pending when each reader has sent one."""
        with self.transmission() as one:
            mesh = one.plan("READ")
            source = one.sources[0].key
            awaits = mesh.completions[source].awaits
            first, *others = [
                next(plan for plan in mesh.plans if plan.local.key == key) for key in awaits
            ]
            pending = PendingRequests()
            pending.add("request", awaits, attempt=2)
            for attempt, plans in ((1, mesh.plans), (2, [first]), (2, [first]), (2, others)):
                _expect(len(pending) == 1, f"expected a pending request before attempt {attempt}")
                one.finish(one.start(plans, "request", attempt=attempt))
                one.notified(pending, source, len(awaits) if plans is mesh.plans else len(plans))
            _expect(len(pending) == 0, "expected no pending request after notices of all readers")

    def test_a_request_is_given_up(self) -> None:
        """A notice without a transfer says how the request ended. Other workers than those that are known get none."""
        with self.transmission() as one:
            reader, source = one.destinations[0].key, one.sources[0].key
            executor, pending = one.cluster.executors[reader], PendingRequests()
            for status in (Status.FAILED, Status.CANCELLED):
                pending.add("request", [reader], attempt=3)
                executor.notify(source, "request", status, attempt=3)
                found = one.notified(pending, source, 1)
                _expect(found == {"request": status}, f"expected that it was {status}, got {found}")
            with refused("PEER", "nobody/7"):
                executor.notify(("nobody", 7), "request", Status.FAILED)
            with refused("TYPE", "status"):
                executor.notify(source, "request", Status.RUNNING)

    def test_names_of_requests(self) -> None:
        """What can name no request or attempt is refused before any byte moves."""
        bad: list[Any] = [b"request", 7, None, "", "r" * 1025, "a\nb"]
        with self.transmission() as one:
            plan = one.plan("READ").plans[0]
            expected = one.contents()
            executor = one.cluster.executors[plan.local.key]
            for request in bad:
                code = "NAME" if isinstance(request, str) else "TYPE"
                with refused(code, "name of a request"):
                    one.start([plan], request)
                with refused(code, "name of a request"):
                    executor.notify(one.sources[0].key, request, Status.FAILED)
            attempts: list[tuple[Any, str]] = [(-1, "RANGE"), ("1", "TYPE"), (True, "TYPE")]
            for attempt, code in attempts:
                with refused(code, "attempt"):
                    one.start([plan], "request", attempt=attempt)
            one.check_memory(expected)

    def test_a_pair_that_exchanges_nothing(self) -> None:
        """A transfer between workers that share no head is DONE at once, and sends no notice."""
        with self.transmission() as one:
            mesh = one.plan("READ")
            for executor, transfer in one.start(mesh.plans[:1], "request"):
                if transfer.spec.remote == one.sources[1].key:
                    _expect(
                        executor.poll(transfer) is Status.DONE, f"expected DONE, got {transfer}"
                    )
                else:
                    executor.cancel(transfer)
                    one.finish([(executor, transfer)])
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

    def test_cancelled_transfers_settle(self) -> None:
        """A running transfer is not released. A cancelled one settles, and no byte moves afterwards."""
        with self.transmission() as one:
            mesh = one.plan("READ")
            zeros = {place: np.zeros_like(values) for place, values in one.fill(mesh.plans).items()}
            started = one.start(mesh.plans, "request")
            running = [
                (executor, transfer)
                for executor, transfer in started
                if not transfer.status.is_settled
            ]
            for executor, transfer in running:
                with refused("TRANSFER", transfer.request):
                    executor.release(transfer)
                executor.cancel(transfer)
            statuses = one.finish(started)
            _expect(
                statuses <= {Status.CANCELLED, Status.DONE},
                f"expected CANCELLED or DONE, got {started}",
            )
            for worker, region in one.regions:
                one.cluster.write(worker, region, zeros[worker.key, region.name])
            time.sleep(QUIET_S)
            one.check_memory(zeros)

    def test_a_settled_transfer_stays_settled(self) -> None:
        """To cancel a transfer that is DONE, or to release it twice, changes nothing."""
        with self.transmission() as one:
            started = one.start(one.plan("READ").plans, "request")
            one.finish(started)
            for executor, transfer in (*started, *started):
                executor.cancel(transfer)
                executor.release(transfer)
                _expect(executor.poll(transfer) is Status.DONE, f"expected DONE, got {transfer}")
