"""The executor contract: the tests that every :class:`kvplan.Executor` passes.

Subclass :class:`ExecutorContract` for the executor of your transfer library, and give workers
memory and executors in ``open_cluster``. pytest collects a subclass whose name begins with
``Test``; :meth:`ExecutorContract.check` runs all tests without a test runner. Here are the
executors of a :class:`kvplan.testing.FakeNetwork`:

>>> from contextlib import contextmanager
>>> from kvplan.testing import FakeNetwork
>>> class FakeCluster:
...     def __init__(self, workers, network):
...         self.workers = workers  # yours have regions at the addresses of your memory
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

:class:`Transmission` moves any other request between two engines of a cluster, and checks every
byte and notice.
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
NO_TOKENS: Final = MappingProxyType({"attn": (5, 5)})
"""A range that has no position."""

QUIET_S: Final = 0.2
"""Tests wait this long for bytes and notices that must not come."""


class Cluster(Protocol):
    """Workers with memory and executors, where those of different engines are connected."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers in their order, with their regions at the addresses of their memory."""

    @property
    def executors(self) -> Mapping[Key, Executor]:
        """The executor of each worker, by ``worker.key``."""

    def read(self, worker: Worker, region: Region) -> Bytes:
        """Return a copy of all bytes of a region."""

    def write(self, worker: Worker, region: Region, values: Bytes) -> None:
        """Set all bytes of a region."""


@attrs.define
class Transmission:
    """One request between two engines of a cluster.

    ``local``, ``remote`` and ``tokens`` are arguments of ``bind`` for a ``READ``, with a range for
    each token group.
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
        regions = list[tuple[Worker, Region]]()
        for worker in self.cluster.workers:
            regions += ((worker, region) for region in worker.regions)
        return regions

    def plan(self, operation: Operation) -> MeshPlan:
        """Return the plans of all workers that read or write, prepared by their executors."""
        mesh = plan_mesh(self.destinations, self.sources, operation)
        for plan in mesh.plans:
            self.cluster.executors[plan.local.key].prepare(plan)
        return mesh

    def _arguments(self, plan: TransferPlan) -> dict[str, Any]:
        """Return the arguments of ``plan.bind``."""
        if plan.operation == "READ":
            return {"local": self.local, "remote": self.remote, "tokens": self.tokens}
        return {"local": self.remote, "remote": self.local, "tokens": self.tokens}

    def _specs(self, plans: Iterable[TransferPlan]) -> list[ReadSpec]:
        specs = list[ReadSpec]()
        for plan in plans:
            specs += plan.bind(**self._arguments(plan))
        return specs

    def fill(self, plans: Sequence[TransferPlan]) -> Contents:
        """Fill all memory with random bytes, and return its contents after the request.

        ``verify`` checks the plans themselves.
        """
        # a wrong plan is no fault of the executor
        report = verify(plans, **self._arguments(plans[0]))
        _expect(report.ok, str(report))
        # the same bytes in the cluster and in fake memory, where the request is carried out
        random = np.random.default_rng(1)
        with FakeMemory(self.cluster.workers) as memory:
            for worker, region in self.regions:
                values = random.integers(0, 256, region.size_bytes, np.uint8)
                self.cluster.write(worker, region, values)
                memory.write(worker, region.address, values, region.device_id)
            for spec in self._specs(plans):
                memory.execute(spec)
            contents = {}
            for worker, region in self.regions:
                address = region.address
                values = memory.read(worker, address, region.size_bytes, region.device_id)
                contents[worker.key, region.name] = values
            return contents

    def start(
        self,
        plans: Iterable[TransferPlan],
        request: str,
        *,
        attempt: int = 0,
        notify: bool = True,
    ) -> Started:
        """Start all transfers of the request, each on its executor."""
        started = list[tuple[Executor, Transfer]]()
        for spec in self._specs(plans):
            executor = self.cluster.executors[spec.local]
            transfer = executor.start(spec, request, attempt=attempt, notify=notify)
            started.append((executor, transfer))
        return started

    def finish(self, started: Started) -> set[Status]:
        """Poll transfers until all are settled, and return their statuses."""
        deadline = time.monotonic() + self.timeout_s
        while False in {executor.poll(transfer).is_settled for executor, transfer in started}:
            _expect(time.monotonic() < deadline, f"not settled after {self.timeout_s} s: {started}")
            self._receive()
        return {transfer.status for _, transfer in started}

    def _receive(self) -> None:
        """Read the notices of all workers.

        Executors without a thread of their own serve their peers meanwhile.
        """
        for key, executor in self.cluster.executors.items():
            self._notices.setdefault(key, []).extend(executor.notices())

    def _take_notices(self) -> dict[Key, list[Notice]]:
        """Return the notices that each worker received since the last call."""
        received = self._notices
        self._notices = {}
        return received

    def contents(self) -> Contents:
        """Return a copy of all memory."""
        contents = {}
        for worker, region in self.regions:
            contents[worker.key, region.name] = self.cluster.read(worker, region)
        return contents

    def check_memory(self, expected: Contents) -> None:
        """Assert that every byte of all regions is the expected one."""
        for worker, region in self.regions:
            values = self.cluster.read(worker, region)
            wrong = np.count_nonzero(values != expected[worker.key, region.name])
            _expect(not wrong, f"{wrong} wrong bytes in {worker.label} {region.name}")

    def notified(self, pending: PendingRequests, worker: Key, count: int) -> dict[str, Status]:
        """Pass on the notices of a worker, and return the requests that are pending no longer.

        It waits for at least ``count`` notices.
        """
        deadline = time.monotonic() + self.timeout_s
        while len(self._notices.get(worker, ())) < count:
            _expect(time.monotonic() < deadline, f"expected {count} notices at {label_of(worker)}")
            self._receive()
        return pending.receive(self._take_notices()[worker])

    def check_notices(self, mesh: MeshPlan, request: str, *, sent: bool = True) -> None:
        """Assert that each worker receives the notices that it awaits by a mesh plan.

        If none were sent, it receives none.
        """
        # a counter per worker: no notice may come twice
        expected = dict[Key, Counter[Notice]]()
        for key, completions in mesh.completions.items():
            senders = completions.awaits if sent else ()
            expected[key] = Counter(Notice(*sender, request) for sender in senders)
        # wait until all have come, or for a while whether any comes
        deadline = time.monotonic() + (self.timeout_s if sent else QUIET_S)
        while time.monotonic() < deadline:
            self._receive()
            if sent and all(len(self._notices[key]) >= expected[key].total() for key in expected):
                break
        # notices of all workers are looked at, also those that must not have come
        for key, notices in self._take_notices().items():
            text = f"notices at {label_of(key)}: expected {[*expected[key]]}, got {notices}"
            _expect(Counter(notices) == expected[key], text)

    def move(self, operation: Operation, request: str = "request") -> None:
        """Move the request. Assert that memory and notices are right, and release the transfers."""
        # the memory after the request is known before it starts
        mesh = self.plan(operation)
        expected = self.fill(mesh.plans)
        started = self.start(mesh.plans, request)
        _expect(self.finish(started) == {Status.DONE}, f"expected all DONE, got {started}")
        self.check_memory(expected)
        self.check_notices(mesh, request)
        for executor, transfer in started:
            executor.release(transfer)


def _expect(condition: bool, otherwise: str) -> None:
    """Assert a condition, with a message that reads the same under every test runner."""
    if not condition:
        raise AssertionError(otherwise)


@contextmanager
def expect_refusal(code: str, name: str) -> Iterator[None]:
    """Assert that the block raises a KVPlanError with a code, and a ``name`` in its message."""
    try:
        yield
    except KVPlanError as error:
        # the message must name what is wrong, so that an operator finds it
        is_right = error.code == code and name in str(error)
        _expect(is_right, f"expected {code} with {name!r}, got {error}")
    else:
        raise AssertionError(f"expected a KVPlanError with code {code}, got none")


def engine(name: str, **options: Any) -> tuple[Worker, ...]:
    """Return the workers of a model with 2 layers and 12 heads."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 12,
    }
    return Model.from_config(config).engine(name, **{"num_blocks": 10, **options})


class ExecutorContract:
    """The tests. Subclass it, and define :meth:`open_cluster`."""

    timeout_s = 30.0
    """Transfers and notices may take this long."""

    def open_cluster(self, workers: Sequence[Worker]) -> AbstractContextManager[Cluster]:
        """Give workers memory and executors, and connect them. On exit, everything is closed."""
        raise NotImplementedError

    def check(self) -> list[str]:
        """Run all tests and return their names. Raises AssertionError at the first that fails."""
        # a subclass may add tests of its own
        names = [name for name in dir(self) if name.startswith("test_")]
        for name in names:
            getattr(self, name)()
        return names

    @contextmanager
    def transmission(self) -> Iterator[Transmission]:
        """Yield 14 tokens from 2 workers to 3 workers.

        The former have blocks of 4 tokens, the latter blocks of 6, with axes in another order.
        """
        # 12 heads: a destination reads 4 of them from the 6 of one source or of both
        sources = engine("prefill", tp=2, tokens_per_block=4, layout="LBNHC")
        destinations = engine("decode", tp=3, tokens_per_block=6)
        with self.open_cluster([*sources, *destinations]) as cluster:
            yield Transmission(
                cluster,
                sources=cluster.workers[: len(sources)],
                destinations=cluster.workers[len(sources) :],
                local={"attn": Blocks([7, 2, 5])},
                remote={"attn": Blocks([3, 8, 1, 6, 0])},
                tokens={"attn": (3, 17)},
                timeout_s=self.timeout_s,
            )

    def test_a_request_moves(self) -> None:
        """All bytes of reads and writes arrive, and no other byte changes.

        All notices come, also those of a request without bytes.
        """
        with self.transmission() as transmission:
            # the last one reads again what is in place, with the notices of a new request
            for number, operation in enumerate((*OPERATIONS, "READ")):
                transmission.move(operation, f"request {number}")
            transmission.tokens = NO_TOKENS
            for operation in OPERATIONS:
                transmission.move(operation, f"{operation} of nothing")

    def test_only_the_last_transfer_notifies(self) -> None:
        """Transfers without ``notify`` move their bytes silently.

        A transfer of no bytes notifies afterwards.
        """
        for operation in OPERATIONS:
            with self.transmission() as transmission:
                mesh = transmission.plan(operation)
                expected = transmission.fill(mesh.plans)
                transmission.finish(transmission.start(mesh.plans, "request", notify=False))
                transmission.check_memory(expected)
                # the last part of the request has no bytes, and one of its transfers notifies
                transmission.tokens = NO_TOKENS
                transmission.finish(transmission.start(mesh.plans, "request", notify=False))
                transmission.check_notices(mesh, "request", sent=False)
                transmission.finish(transmission.start(mesh.plans, "request"))
                transmission.check_notices(mesh, "request")

    def test_a_retry_is_not_another_reader(self) -> None:
        """Notices name their sender and attempt.

        A request is no longer pending when each reader has sent a notice.
        """
        with self.transmission() as transmission:
            mesh = transmission.plan("READ")
            source = transmission.sources[0].key
            awaits = mesh.completions[source].awaits
            plan_of_worker = {plan.local.key: plan for plan in mesh.plans}
            first, *rest = [plan_of_worker[key] for key in awaits]
            pending = PendingRequests()
            pending.add("request", awaits, attempt=2)
            # all of an earlier attempt, and the first reader twice, leave the request pending
            for attempt, plans in ((1, mesh.plans), (2, [first]), (2, [first]), (2, rest)):
                _expect(len(pending) == 1, f"expected a pending request before attempt {attempt}")
                transmission.finish(transmission.start(plans, "request", attempt=attempt))
                num_notices = len(awaits) if plans is mesh.plans else len(plans)
                transmission.notified(pending, source, num_notices)
            _expect(len(pending) == 0, "expected no pending request after notices of all readers")

    def test_a_request_is_given_up(self) -> None:
        """A notice without a transfer says how the request ended.

        Workers that the executor does not know get none.
        """
        with self.transmission() as transmission:
            reader = transmission.destinations[0].key
            source = transmission.sources[0].key
            executor = transmission.cluster.executors[reader]
            pending = PendingRequests()
            for status in (Status.FAILED, Status.CANCELLED):
                pending.add("request", [reader], attempt=3)
                executor.notify(source, "request", status, attempt=3)
                ended = transmission.notified(pending, source, 1)
                _expect(ended == {"request": status}, f"expected that it was {status}, got {ended}")
            with expect_refusal("PEER", "nobody/7"):
                executor.notify(("nobody", 7), "request", Status.FAILED)
            with expect_refusal("TYPE", "status"):
                executor.notify(source, "request", Status.RUNNING)

    def test_names_of_requests(self) -> None:
        """Names and attempts that no request can have are refused before any byte moves."""
        # a name is text of 1 to 1024 printable characters, an attempt an integer from 0 on
        bad_names: list[Any] = [b"request", 7, None, "", "r" * 1025, "a\nb"]
        bad_attempts: list[tuple[Any, str]] = [(-1, "RANGE"), ("1", "TYPE"), (True, "TYPE")]
        with self.transmission() as transmission:
            plan = transmission.plan("READ").plans[0]
            expected = transmission.contents()
            executor = transmission.cluster.executors[plan.local.key]
            source = transmission.sources[0].key
            for request in bad_names:
                code = "NAME" if isinstance(request, str) else "TYPE"
                with expect_refusal(code, "name of a request"):
                    transmission.start([plan], request)
                with expect_refusal(code, "name of a request"):
                    executor.notify(source, request, Status.FAILED)
            for attempt, code in bad_attempts:
                with expect_refusal(code, "attempt"):
                    transmission.start([plan], "request", attempt=attempt)
            transmission.check_memory(expected)

    def test_a_pair_that_exchanges_nothing(self) -> None:
        """A transfer between workers that share no head is DONE at once, and sends no notice."""
        with self.transmission() as transmission:
            mesh = transmission.plan("READ")
            idle_source = transmission.sources[1].key
            # the other transfer of the same reader ends, so that its memory can be given back
            for executor, transfer in transmission.start(mesh.plans[:1], "request"):
                if transfer.spec.remote == idle_source:
                    status = executor.poll(transfer)
                    _expect(status is Status.DONE, f"expected DONE, got {transfer}")
                else:
                    executor.cancel(transfer)
                    transmission.finish([(executor, transfer)])
            time.sleep(QUIET_S)
            notices = transmission.cluster.executors[idle_source].notices()
            _expect(not notices, f"expected no notices, got {notices}")

    def test_start_refuses_a_plan_that_is_not_prepared(self) -> None:
        """A spec of a plan that was not prepared is refused."""
        with self.transmission() as transmission:
            plan = plan_reads(transmission.destinations[0], transmission.sources)
            with expect_refusal("TRANSFER", transmission.sources[0].label):
                transmission.start([plan], "request")

    def test_prepare_refuses_other_workers(self) -> None:
        """A plan is refused unless the executor knows its workers as the plan describes them."""
        with self.transmission() as transmission:
            # a worker with one region more, engines that nobody is connected to, and another layout
            local, sibling, *_ = transmission.destinations
            sources = transmission.sources
            larger = attrs.evolve(local, regions=[*local.regions, Region("more", 1 << 50, 64)])
            unknown = engine("unknown", tp=2)
            changed = engine("prefill", tp=2, tokens_per_block=2)
            # an executor, a plan, and the worker of it that the executor does not know
            plans = (
                (sibling, plan_reads(local, sources), local),
                (local, plan_reads(larger, sources), local),
                (local, plan_reads(local, unknown), unknown[0]),
                (local, plan_reads(local, changed), changed[0]),
            )
            for worker, plan, wrong in plans:
                with expect_refusal("PEER", wrong.label):
                    transmission.cluster.executors[worker.key].prepare(plan)

    def test_prepare_takes_other_views_of_the_local_worker(self) -> None:
        """A plan of some layers is prepared and moves those.

        Its local worker has the same regions.
        """
        with self.transmission() as transmission:
            local = transmission.destinations[0]
            # the plan is of the memory that the executor knows, but of fewer of its tensors
            some_layers = attrs.evolve(local, views=local.views[1:])
            plan = plan_reads(some_layers, transmission.sources)
            expected = transmission.fill([plan])
            transmission.cluster.executors[local.key].prepare(plan)
            transmission.finish(transmission.start([plan], "request"))
            transmission.check_memory(expected)

    def test_cancelled_transfers_settle(self) -> None:
        """A running transfer is not released.

        A cancelled one settles, and no byte moves afterwards.
        """
        with self.transmission() as transmission:
            mesh = transmission.plan("READ")
            expected = transmission.fill(mesh.plans)
            # a fast executor may be done with some before they are cancelled
            started = transmission.start(mesh.plans, "request")
            for executor, transfer in started:
                if transfer.status.is_settled:
                    continue
                with expect_refusal("TRANSFER", transfer.request):
                    executor.release(transfer)
                executor.cancel(transfer)
            statuses = transmission.finish(started)
            is_right = statuses <= {Status.CANCELLED, Status.DONE}
            _expect(is_right, f"expected CANCELLED or DONE, got {started}")
            # what is still in flight would overwrite zeros
            zeros = {place: np.zeros_like(values) for place, values in expected.items()}
            for worker, region in transmission.regions:
                transmission.cluster.write(worker, region, zeros[worker.key, region.name])
            time.sleep(QUIET_S)
            transmission.check_memory(zeros)

    def test_a_settled_transfer_stays_settled(self) -> None:
        """To cancel a transfer that is DONE, or to release it twice, changes nothing."""
        with self.transmission() as transmission:
            started = transmission.start(transmission.plan("READ").plans, "request")
            transmission.finish(started)
            # every transfer twice
            for executor, transfer in (*started, *started):
                executor.cancel(transfer)
                executor.release(transfer)
                status = executor.poll(transfer)
                _expect(status is Status.DONE, f"expected DONE, got {transfer}")
