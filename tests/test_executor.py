"""The executor of fake memory under the contract of all executors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from kvplan import Blocks, KVPlanError, ReadSpec, Worker, plan_reads
from kvplan.describe.worker import Key
from kvplan.executor import Executor, FakeNetwork, Status
from tests.contents import Bytes
from tests.contract import Contract, OpenWorld
from tests.small import engine


class FakeWorld:
    """A network of fake memory, seen as a world."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.network = FakeNetwork(tuple(workers))
        self.executors: dict[Key, Executor] = {worker.key: self.network.executor(worker) for worker in workers}

    def read(self, worker: Worker, region: str) -> Bytes:
        """All bytes of a region."""
        (held,) = (held for held in worker.regions if held.name == region)
        return self.network.memory.read(worker, held.address, held.size_bytes, held.device_id)

    def write(self, worker: Worker, region: str, values: Bytes) -> None:
        """Set all bytes of a region."""
        (held,) = (held for held in worker.regions if held.name == region)
        self.network.memory.write(worker, held.address, values, held.device_id)


class TestFakeExecutor(Contract):
    """Fake memory under the contract."""

    @pytest.fixture
    def open_world(self) -> OpenWorld:
        """Workers stay where they are."""

        @contextmanager
        def opened(workers: Sequence[Worker]) -> Iterator[FakeWorld]:
            world = FakeWorld(workers)
            with world.network.memory:
                yield world

        def open_it(workers: Sequence[Worker]) -> AbstractContextManager[FakeWorld]:
            return opened(workers)

        return open_it


def one_transfer() -> tuple[FakeNetwork, Executor, ReadSpec]:
    """A network of two workers, the executor of one, and a spec with the other, prepared."""
    (source,), (local,) = engine("prefill"), engine("decode")
    network = FakeNetwork([source, local])
    executor = network.executor(local)
    plan = plan_reads(local, [source])
    executor.prepare(plan)
    (spec,) = plan.bind(local={"attn": Blocks([1])}, remote={"attn": Blocks([2])}, tokens=(0, 4))
    return network, executor, spec


def test_a_running_transfer_is_not_released() -> None:
    """What may still move bytes is not given back."""
    _, executor, spec = one_transfer()
    transfer = executor.start(spec, "request")
    with pytest.raises(KVPlanError, match="TRANSFER: cannot release a transfer"):
        executor.release(transfer)


def test_a_cancelled_transfer_moves_nothing_and_tells_nobody() -> None:
    """A transfer that is cancelled before its first poll leaves memory alone."""
    network, executor, spec = one_transfer()
    transfer = executor.start(spec, "request")
    executor.cancel(transfer)
    assert executor.poll(transfer) is Status.CANCELLED
    assert not len(network.memory.writes(("decode", 0)))
    assert network.inbox["prefill", 0] == []


def test_a_transfer_is_one_short_line() -> None:
    """A transfer prints as its request, where it stands, and what it moves."""
    _, executor, spec = one_transfer()
    transfer = executor.start(spec, "request 7")
    assert repr(transfer) == f"<Transfer 'request 7' running: {spec!r}>"
    executor.poll(transfer)
    assert repr(transfer) == f"<Transfer 'request 7' done: {spec!r}>"


def test_a_failed_copy_fails_its_transfer_alone() -> None:
    """Where memory cannot be had, the transfer is FAILED and has the error; nothing is raised."""
    network, executor, spec = one_transfer()
    transfer = executor.start(spec, "request")
    network.memory.close()
    assert executor.poll(transfer) is Status.FAILED
    assert transfer.error is not None
    assert transfer.error.code == "MEMORY"
