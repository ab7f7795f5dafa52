"""The executor of fake memory passes the executor contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import pytest

from kvplan import (
    Blocks,
    Executor,
    KVPlanError,
    ReadSpec,
    Region,
    Status,
    Worker,
    plan_reads,
)
from kvplan.testing import FakeNetwork
from kvplan.testing.executors import Bytes, ExecutorContract
from tests.small import engine


class FakeCluster:
    """A network of fake memory as a cluster."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.network = FakeNetwork(workers)
        self.executors: dict[tuple[str, int], Executor] = {
            worker.key: self.network.executor(worker) for worker in workers
        }

    def read(self, worker: Worker, region: Region) -> Bytes:
        """A copy of all bytes of a region."""
        return self.network.memory.read(worker, region.address, region.size_bytes, region.device_id)

    def write(self, worker: Worker, region: Region, values: Bytes) -> None:
        """Set all bytes of a region."""
        self.network.memory.write(worker, region.address, values, region.device_id)

    def lose(self, worker: Worker) -> None:
        """Transfers with a worker fail from now on."""
        self.network.lose(worker)


class TestFakeExecutor(ExecutorContract):
    """Fake memory under the contract."""

    @contextmanager
    def open_cluster(self, workers: Sequence[Worker]) -> Iterator[FakeCluster]:
        """Workers stay at their addresses."""
        cluster = FakeCluster(workers)
        with cluster.network.memory:
            yield cluster


def one_transfer() -> tuple[FakeNetwork, Executor, ReadSpec]:
    """A network of two workers, the executor of one, and a prepared spec with the other."""
    (source,), (local,) = engine("prefill"), engine("decode")
    network = FakeNetwork([source, local])
    executor = network.executor(local)
    plan = plan_reads(local, [source])
    executor.prepare(plan)
    (spec,) = plan.bind(local={"attn": Blocks([1])}, remote={"attn": Blocks([2])}, tokens=(0, 4))
    return network, executor, spec


def test_a_cancelled_transfer_moves_no_byte() -> None:
    """A transfer that is cancelled before its first poll leaves memory as it is."""
    network, executor, spec = one_transfer()
    transfer = executor.start(spec, "request")
    executor.cancel(transfer)
    assert executor.poll(transfer) is Status.CANCELLED
    assert not len(network.memory.writes(("decode", 0)))


def test_a_transfer_is_one_short_line() -> None:
    """A transfer prints its request, its status and its spec."""
    _, executor, spec = one_transfer()
    transfer = executor.start(spec, "request 7")
    assert repr(transfer) == f"<Transfer 'request 7' running: {spec!r}>"
    executor.poll(transfer)
    assert repr(transfer) == f"<Transfer 'request 7' done: {spec!r}>"


def test_a_failed_copy_fails_its_transfer_alone() -> None:
    """Where memory is gone, the transfer is FAILED with the error, and nothing is raised."""
    network, executor, spec = one_transfer()
    transfer = executor.start(spec, "request")
    network.memory.close()
    assert executor.poll(transfer) is Status.FAILED
    assert transfer.error is not None
    assert transfer.error.code == "MEMORY"


@pytest.mark.parametrize("operation", ["COPY", "read", "", None])
def test_a_spec_of_an_unknown_operation_is_no_transfer(operation: str) -> None:
    """NAME, whichever executor starts it, and before anything moves."""
    network, executor, spec = one_transfer()
    unknown = attrs.evolve(spec, operation=operation)
    with pytest.raises(
        KVPlanError, match=r"^NAME: cannot transfer request 'r': expected operation READ or WRITE, got "
    ):
        executor.start(unknown, "r")
    with network.memory, pytest.raises(KVPlanError, match=r"^NAME: cannot execute: expected operation READ or WRITE"):
        network.memory.execute(unknown)
    assert repr(unknown).startswith("<ReadSpec decode/0 ")
