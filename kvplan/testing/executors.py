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
...         self.memory, self.lose = network.memory, network.lose
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
'test_a_lost_worker_fails_its_transfers_alone'

:class:`Transmission` moves any other request between two engines of a cluster, and checks every
byte.

What the tests can see of an executor is the memory of both sides, read by the cluster, between its
calls. So they find a byte that is missing when a transfer is DONE, one that changes outside of the
request, and one that moves within :data:`QUIET_S` of a transfer's end, however it has ended. They
cannot see a byte that moves later than that, or in the instant between the call that reports DONE
and the read that follows it.
"""

from __future__ import annotations

import time
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
from kvplan.executor import Executor, Status, Transfer
from kvplan.models import Model
from kvplan.plan import MeshPlan, ReadSpec, TransferPlan, plan_mesh, plan_reads
from kvplan.verification import FakeMemory, verify

__all__ = ["Bytes", "Cluster", "Contents", "ExecutorContract", "Transmission"]

Bytes = npt.NDArray[np.uint8]
Contents = Mapping[tuple[Key, str], Bytes]
"""All bytes of each region, by the worker's key and the region's name."""

Started = Sequence[tuple[Executor, Transfer]]

Operation = Literal["READ", "WRITE"]
OPERATIONS: Final[tuple[Operation, ...]] = ("READ", "WRITE")
NO_TOKENS: Final = MappingProxyType({"attn": (5, 5)})
"""A range that has no position."""

QUIET_S: Final = 0.2
"""Tests wait this long for bytes that must not come."""

PAUSE_S: Final = 50e-6
"""Tests wait this long between two polls, so that threads of an executor can run."""

POLL_S: Final = 0.1
"""A poll that takes this long has waited, unless the machine was busy: see
:meth:`ExecutorContract.test_poll_does_not_wait`."""


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

    def lose(self, worker: Worker) -> None:
        """End a worker as the end of its process does, such as by closing its executor."""


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
    slowest_poll_s: float = attrs.field(init=False, default=0.0)
    _lost: set[Key] = attrs.field(init=False, factory=set)

    @property
    def regions(self) -> list[tuple[Worker, Region]]:
        """Each region with its worker, unless that is lost."""
        workers = [worker for worker in self.cluster.workers if worker.key not in self._lost]
        return [(worker, region) for worker in workers for region in worker.regions]

    def lose(self, worker: Worker) -> None:
        """Lose a worker, and what it holds."""
        self.cluster.lose(worker)
        self._lost.add(worker.key)

    def plan(self, operation: Operation) -> MeshPlan:
        """Return the plans of all workers that read or write, prepared by their executors."""
        mesh = plan_mesh(self.destinations, self.sources, operation)
        for plan in mesh.plans:
            self.cluster.executors[plan.local.key].prepare(plan)
        return mesh

    def _arguments(self, plan: TransferPlan) -> dict[str, Any]:
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
        before = self._overwritten(turn=0)
        # the same bytes in fake memory, where the request is carried out
        with FakeMemory(self.cluster.workers) as memory:
            for worker, region in self.regions:
                values = before[worker.key, region.name]
                memory.write(worker, region.address, values, region.device_id)
            for spec in self._specs(plans):
                memory.execute(spec)
            return {
                (worker.key, region.name): memory.read(
                    worker, region.address, region.size_bytes, region.device_id
                )
                for worker, region in self.regions
            }

    def overwrite(self) -> Contents:
        """Put other bytes into all memory, as an engine that uses its blocks again, and return it.

        A copy of the request that still moves would change these, whether it has read its source
        before or reads it now.
        """
        return self._overwritten(turn=1)

    def _overwritten(self, turn: int) -> Contents:
        """Fill all memory with random bytes. No two of both turns and both sides share a value."""
        random = np.random.default_rng(1 + turn)
        sources = {worker.key for worker in self.sources}
        contents = {}
        for worker, region in self.regions:
            low = 64 * turn + (0 if worker.key in sources else 128)
            values = random.integers(low, low + 64, region.size_bytes, np.uint8)
            self.cluster.write(worker, region, values)
            contents[worker.key, region.name] = values
        return contents

    def start(self, plans: Iterable[TransferPlan], request: str = "request") -> Started:
        """Start all transfers of the request, each on its executor."""
        started = list[tuple[Executor, Transfer]]()
        for spec in self._specs(plans):
            executor = self.cluster.executors[spec.local]
            started.append((executor, executor.start(spec, request)))
        return started

    def poll(self, executor: Executor, transfer: Transfer) -> Status:
        """Poll a transfer, and take the time."""
        began = time.perf_counter()
        try:
            status = executor.poll(transfer)
        except KVPlanError as error:
            raise AssertionError(f"expected no exception of poll, got {error}") from error
        self.slowest_poll_s = max(self.slowest_poll_s, time.perf_counter() - began)
        return status

    def finish(self, started: Started, expected: Contents | None = None) -> set[Status]:
        """Poll transfers until all are settled, and return their statuses.

        A transfer that has failed whose bytes may still move is not waited for. With ``expected``,
        assert that the bytes of each transfer are in place as soon as it is DONE.
        """
        deadline = time.monotonic() + self.timeout_s
        running = list(started)
        while running:
            _expect(time.monotonic() < deadline, f"not settled after {self.timeout_s} s: {running}")
            for executor, transfer in running:
                if self.poll(executor, transfer) is Status.DONE and expected is not None:
                    self._check_arrived(transfer, expected)
            running = [
                (executor, transfer)
                for executor, transfer in running
                if not transfer.status.is_settled and transfer.error is None
            ]
            time.sleep(PAUSE_S)
        return {transfer.status for _, transfer in started}

    def contents(self) -> Contents:
        """Return a copy of all memory."""
        return {
            (worker.key, region.name): self.cluster.read(worker, region)
            for worker, region in self.regions
        }

    def check_memory(self, expected: Contents) -> None:
        """Assert that every byte of all regions is the expected one."""
        for (key, name), values in self.contents().items():
            num_wrong = np.count_nonzero(values != expected[key, name])
            where = f"{label_of(key)}, region {name!r}"
            _expect(not num_wrong, f"{num_wrong} wrong bytes in {where}")

    def check_quiet(self, started: Started, expected: Contents) -> None:
        """Assert that no byte of all regions changes for a while, in which transfers are polled."""
        deadline = time.monotonic() + QUIET_S
        is_over = False
        # polled at least once, however long the machine was busy meanwhile
        while not is_over:
            is_over = time.monotonic() >= deadline
            for executor, transfer in started:
                self.poll(executor, transfer)
            time.sleep(QUIET_S / 100)
        self.check_memory(expected)

    def _check_arrived(self, transfer: Transfer, expected: Contents) -> None:
        """Assert that the bytes of a transfer are in place."""
        spec = transfer.spec
        writes = spec.descriptors()[0 if spec.operation == "READ" else 1].tolist()
        key = spec.local if spec.operation == "READ" else spec.remote
        for worker, region in self.regions:
            if worker.key != key:
                continue
            inside = [
                slice(address - region.address, address - region.address + length)
                for address, length, device in writes
                if region.address <= address < region.end and device == region.device_id
            ]
            if inside:
                is_wrong = self.cluster.read(worker, region) != expected[key, region.name]
                num_wrong = sum(np.count_nonzero(is_wrong[each]) for each in inside)
                text = f"{num_wrong} bytes of {transfer} are not in place when it is done"
                _expect(not num_wrong, text)

    def move(self, operation: Operation, request: str = "request") -> None:
        """Move the request. Assert that memory is right, and release the transfers."""
        # the memory after the request is known before it starts
        mesh = self.plan(operation)
        expected = self.fill(mesh.plans)
        started = self.start(mesh.plans, request)
        statuses = self.finish(started, expected)
        _expect(statuses == {Status.DONE}, f"expected all DONE, got {started}")
        self.check_memory(expected)
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
    """Transfers may take this long."""

    def open_cluster(self, workers: Sequence[Worker]) -> AbstractContextManager[Cluster]:
        """Give workers memory and executors, and connect them. On exit, everything is closed."""
        raise NotImplementedError

    def check(self) -> list[str]:
        """Run all tests and return their names. Raises AssertionError at the first that fails."""
        # a subclass may add tests
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
        """All bytes of reads and writes arrive before they are DONE, and no other byte changes."""
        with self.transmission() as transmission:
            for number, operation in enumerate((*OPERATIONS, "READ")):
                transmission.move(operation, f"request {number}")
            transmission.tokens = NO_TOKENS
            for operation in OPERATIONS:
                transmission.move(operation, f"{operation} of nothing")

    def test_names_of_requests(self) -> None:
        """Names that no request can have are refused before any byte moves."""
        # a name is text of printable characters
        bad_names: list[Any] = [b"request", 7, None, "", "a\nb"]
        with self.transmission() as transmission:
            plan = transmission.plan("READ").plans[0]
            expected = transmission.contents()
            for request in bad_names:
                code = "NAME" if isinstance(request, str) else "TYPE"
                with expect_refusal(code, "name of a request"):
                    transmission.start([plan], request)
            transmission.check_memory(expected)

    def test_a_pair_that_exchanges_nothing(self) -> None:
        """A transfer between workers that share no head is DONE at once."""
        with self.transmission() as transmission:
            mesh = transmission.plan("READ")
            idle_source = transmission.sources[1].key
            # the other transfer of the same reader ends, so that its memory can be given back
            for executor, transfer in transmission.start(mesh.plans[:1]):
                if transfer.spec.remote == idle_source:
                    status = executor.poll(transfer)
                    _expect(status is Status.DONE, f"expected DONE, got {transfer}")
                else:
                    executor.cancel(transfer)
                    transmission.finish([(executor, transfer)])

    def test_start_refuses_a_plan_that_is_not_prepared(self) -> None:
        """A spec of a plan that was not prepared is refused."""
        with self.transmission() as transmission:
            plan = plan_reads(transmission.destinations[0], transmission.sources)
            with expect_refusal("TRANSFER", transmission.sources[0].label):
                transmission.start([plan])

    def test_prepare_refuses_other_workers(self) -> None:
        """A plan is refused unless the executor knows its workers as the plan describes them."""
        with self.transmission() as transmission:
            # a worker with one region more, engines that are not connected, and another layout
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
            transmission.finish(transmission.start([plan]), expected)
            transmission.check_memory(expected)

    def test_cancelled_transfers_settle(self) -> None:
        """A running transfer is not released.

        A cancelled one settles, and no byte moves afterwards.
        """
        with self.transmission() as transmission:
            mesh = transmission.plan("READ")
            expected = transmission.fill(mesh.plans)
            # a fast executor may be done with some before they are cancelled
            started = transmission.start(mesh.plans)
            for executor, transfer in started:
                if transfer.status.is_settled:
                    continue
                with expect_refusal("TRANSFER", transfer.request):
                    executor.release(transfer)
                executor.cancel(transfer)
            statuses = transmission.finish(started, expected)
            is_right = statuses <= {Status.CANCELLED, Status.DONE}
            _expect(is_right, f"expected CANCELLED or DONE, got {started}")
            transmission.check_quiet(started, transmission.overwrite())

    def test_a_settled_transfer_stays_settled(self) -> None:
        """To cancel a transfer that is DONE, or to release it twice, changes nothing."""
        with self.transmission() as transmission:
            mesh = transmission.plan("READ")
            started = transmission.start(mesh.plans)
            transmission.finish(started)
            expected = transmission.overwrite()
            # every transfer twice
            for executor, transfer in (*started, *started):
                executor.cancel(transfer)
                executor.release(transfer)
                status = executor.poll(transfer)
                _expect(status is Status.DONE, f"expected DONE, got {transfer}")
            transmission.check_quiet(started, expected)

    def test_poll_does_not_wait(self) -> None:
        """No poll takes :data:`POLL_S`, neither of a transfer that goes on nor of a cancelled one.

        A busy machine may delay any poll, so only an executor fails that is slow in each of three
        requests.
        """
        slowest = list[float]()
        for _ in range(3):
            with self.transmission() as transmission:
                mesh = transmission.plan("READ")
                transmission.finish(transmission.start(mesh.plans))
                started = transmission.start(mesh.plans)
                for executor, transfer in started:
                    executor.cancel(transfer)
                transmission.finish(started)
                slowest.append(transmission.slowest_poll_s)
        text = f"expected polls of less than {POLL_S} s, got one of {min(slowest):.3f} s each time"
        _expect(min(slowest) < POLL_S, text)

    def test_a_lost_worker_fails_its_transfers_alone(self) -> None:
        """A worker is lost before transfers with it start, or while they run.

        A transfer that is DONE all the same has its bytes. Any other one has an error, which no
        call raises: it is FAILED, and no byte of it moves, or still RUNNING, and holds its blocks.
        Transfers with other workers are DONE.
        """
        for is_under_way in (False, True):
            with self.transmission() as transmission:
                mesh = transmission.plan("READ")
                expected = transmission.fill(mesh.plans)
                lost = transmission.sources[0]
                if not is_under_way:
                    transmission.lose(lost)
                started = transmission.start(mesh.plans)
                if is_under_way:
                    transmission.lose(lost)
                transmission.finish(started, expected)
                for executor, transfer in started:
                    if transfer.spec.remote != lost.key:
                        _expect(transfer.status is Status.DONE, f"expected DONE, got {transfer}")
                    elif transfer.status is not Status.DONE:
                        _expect(transfer.error is not None, f"expected an error of {transfer}")
                    if transfer.status is Status.RUNNING:
                        with expect_refusal("TRANSFER", transfer.request):
                            executor.release(transfer)
                settled = [each for each in started if each[1].status.is_settled]
                if len(settled) == len(started):
                    transmission.check_quiet(settled, transmission.overwrite())
