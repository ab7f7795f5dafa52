"""The executor contract fails for executors with one fault each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import KVPlanError, Notice, ReadSpec, Status, Transfer, TransferPlan, Worker
from kvplan.describe.worker import Key
from kvplan.testing import FakeExecutor
from kvplan.testing.executors import ExecutorContract, expect_refusal
from tests.test_executor import FakeCluster


class Silent(FakeExecutor):
    """Receives no notices."""

    def notices(self) -> tuple[Notice, ...]:
        return ()


class Loud(FakeExecutor):
    """Notifies although the caller asks it not to."""

    def start(self, spec: ReadSpec, request: str, *, attempt: int = 0, notify: bool = True) -> Transfer:
        return super().start(spec, request)


class LoudToAll(FakeExecutor):
    """Notifies the remote workers of all pairs, also of those that exchange nothing."""

    def poll(self, transfer: Transfer) -> Status:
        if not transfer.status.is_settled and not len(transfer.spec.local_table.rows):
            self.network.inbox[transfer.spec.remote].append(Notice(*transfer.spec.local, transfer.request))
        return super().poll(transfer)


class Idle(FakeExecutor):
    """Never moves a byte, and never settles."""

    def poll(self, transfer: Transfer) -> Status:
        return transfer.status


class Wrong(FakeExecutor):
    """Writes one wrong byte to its own memory after each transfer."""

    def poll(self, transfer: Transfer) -> Status:
        status = super().poll(transfer)
        at = self.worker.regions[0].address
        self.network.memory.write(self.worker, at, self.network.memory.read(self.worker, at, 1) + np.uint8(1))
        return status


class Failing(FakeExecutor):
    """Fails every transfer."""

    def poll(self, transfer: Transfer) -> Status:
        transfer.status = Status.FAILED
        return transfer.status


class Forgetful(FakeExecutor):
    """Cancels what is done."""

    def cancel(self, transfer: Transfer) -> None:
        transfer.status = Status.CANCELLED


class Generous(FakeExecutor):
    """Releases what runs."""

    def release(self, transfer: Transfer) -> None:
        pass


class Careless(FakeExecutor):
    """Prepares any plan, and starts any spec."""

    def prepare(self, plan: TransferPlan) -> None:
        pass

    def start(self, spec: ReadSpec, request: str, *, attempt: int = 0, notify: bool = True) -> Transfer:
        return Transfer(spec, request, notifies=notify, attempt=attempt)


class Nameless(FakeExecutor):
    """Sends notices of any attempt as those of the first."""

    def notify(self, worker: Key, request: str, status: Status, *, attempt: int = 0) -> None:
        super().notify(worker, request, status)


class Stranger(FakeExecutor):
    """Sends notices in the name of another worker."""

    def notify(self, worker: Key, request: str, status: Status, *, attempt: int = 0) -> None:
        super().notify(worker, request, status, attempt=attempt)
        self.network.inbox[worker][-1] = attrs.evolve(self.network.inbox[worker][-1], rank=0)


class Optimist(FakeExecutor):
    """Sends the notice that all is done, also for a request that is given up, and to anybody."""

    def notify(self, worker: Key, request: str, status: Status, *, attempt: int = 0) -> None:
        if worker in self.network.inbox:
            super().notify(worker, request, Status.DONE, attempt=attempt)


class Impatient(ExecutorContract):
    """The contract for one of these executors, which does not wait long."""

    timeout_s = 0.05

    def __init__(self, executor: type[FakeExecutor]) -> None:
        self.executor = executor

    @contextmanager
    def open_cluster(self, workers: Sequence[Worker]) -> Iterator[FakeCluster]:
        cluster = FakeCluster(workers)
        cluster.executors = {worker.key: self.executor(cluster.network, worker) for worker in workers}
        with cluster.network.memory:
            yield cluster


@pytest.mark.parametrize(
    "executor, test, text",
    [
        (Silent, "a_request_moves", r"notices at prefill/0: expected \[Notice\(.*\)\], got \[\]"),
        (Loud, "only_the_last_transfer_notifies", "notices at prefill/0: expected"),
        (LoudToAll, "a_pair_that_exchanges_nothing", r"expected no notices, got \(Notice"),
        (Idle, "a_request_moves", "not settled after 0.05 s"),
        (Wrong, "a_request_moves", "1 wrong bytes in decode/0"),
        (Failing, "a_request_moves", "expected all DONE, got"),
        (Failing, "cancelled_transfers_settle", "expected CANCELLED or DONE, got"),
        (Failing, "a_pair_that_exchanges_nothing", "expected DONE, got <Transfer"),
        (Forgetful, "a_settled_transfer_stays_settled", "expected DONE, got <Transfer"),
        (Generous, "cancelled_transfers_settle", "expected a KVPlanError with code TRANSFER"),
        (Careless, "start_refuses_a_plan_that_is_not_prepared", "expected a KVPlanError with code TRANSFER"),
        (Careless, "prepare_refuses_other_workers", "expected a KVPlanError with code PEER"),
        (Nameless, "a_retry_is_not_another_reader", "expected no pending request"),
        (Stranger, "a_retry_is_not_another_reader", "expected no pending request"),
        (Optimist, "a_request_is_given_up", "expected that it was Status.FAILED, got {'request': <Status.DONE"),
        (Silent, "a_request_is_given_up", "expected 1 notices at prefill/0"),
    ],
)
def test_a_fault_is_found(executor: type[FakeExecutor], test: str, text: str) -> None:
    """Each fault fails a test of the contract with a message that says what is wrong."""
    run: Callable[[], Any] = getattr(Impatient(executor), f"test_{test}")
    with pytest.raises(AssertionError, match=text):
        run()


def test_check_runs_all_tests() -> None:
    """``check`` runs everything, and returns the names."""
    names = Impatient(FakeExecutor).check()
    assert names == [name for name in dir(ExecutorContract) if name.startswith("test_")]
    with pytest.raises(AssertionError):
        Impatient(Silent).check()


def test_a_subclass_must_open_a_cluster() -> None:
    """The contract itself has no executors."""
    with pytest.raises(NotImplementedError):
        ExecutorContract().check()


def test_another_error_is_not_a_refusal() -> None:
    """A refusal must have the expected code and name."""
    blocks: AbstractContextManager[None] = expect_refusal("PEER", "decode/0")
    with pytest.raises(AssertionError, match="expected PEER with 'decode/0', got TRANSFER"), blocks:
        raise KVPlanError("TRANSFER", "start", expected="a", got="b")
