"""The executor contract fails for executors with one fault each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest

from kvplan import KVPlanError, ReadSpec, Status, Transfer, TransferPlan, Worker
from kvplan.testing import FakeExecutor
from kvplan.testing.executors import POLL_S, ExecutorContract, expect_refusal
from tests.test_executor import FakeCluster


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
        transfer.error = KVPlanError("TRANSFER", "move bytes", expected="a working executor", got="this one")
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

    def start(self, spec: ReadSpec, request: str) -> Transfer:
        return Transfer(spec, request)


class Hasty(FakeExecutor):
    """Reports DONE before the bytes have moved, which they do at the next poll of the executor."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.late: list[ReadSpec] = []

    def start(self, spec: ReadSpec, request: str) -> Transfer:
        transfer = super().start(spec, request)
        transfer.status = Status.DONE
        self.late.append(spec)
        return transfer

    def poll(self, transfer: Transfer) -> Status:
        if transfer.spec not in self.late:
            while self.late:
                self.network.memory.execute(self.late.pop())
        return transfer.status


class Restless(FakeExecutor):
    """Moves the bytes of a transfer once more at each poll of one that has ended so."""

    ended = Status.DONE

    def poll(self, transfer: Transfer) -> Status:
        if super().poll(transfer) is self.ended:
            self.network.memory.execute(transfer.spec)
        return transfer.status


class Unstoppable(Restless):
    """Still copies after a cancel, although the transfer is CANCELLED."""

    ended = Status.CANCELLED


class Premature(Restless):
    """Reports FAILED while bytes still move underneath."""

    ended = Status.FAILED


class Haunted(FakeExecutor):
    """Moves the bytes of a transfer that is released."""

    def release(self, transfer: Transfer) -> None:
        super().release(transfer)
        self.network.memory.execute(transfer.spec)


class Greedy(FakeExecutor):
    """Moves one byte more than its last descriptor has."""

    def poll(self, transfer: Transfer) -> Status:
        status = super().poll(transfer)
        spec, memory = transfer.spec, self.network.memory
        if transfer.num_bytes:
            (into, reads_into, _), (out_of, reads_out_of, _) = (each[-1].tolist() for each in spec.descriptors())
            memory.write(spec.local, into + reads_into, memory.read(spec.remote, out_of + reads_out_of, 1))
        return status


class Sleepy(FakeExecutor):
    """Waits in each poll of a transfer that runs."""

    def poll(self, transfer: Transfer) -> Status:
        if not transfer.status.is_settled:
            time.sleep(3 * POLL_S)
        return super().poll(transfer)


class Optimist(FakeExecutor):
    """Swallows errors: what has failed is DONE."""

    def poll(self, transfer: Transfer) -> Status:
        if super().poll(transfer) is Status.FAILED:
            transfer.status, transfer.error = Status.DONE, None
        return transfer.status


class Mute(FakeExecutor):
    """Fails without an error."""

    def poll(self, transfer: Transfer) -> Status:
        super().poll(transfer)
        transfer.error = None
        return transfer.status


class Loud(FakeExecutor):
    """Raises the error of a transfer."""

    def poll(self, transfer: Transfer) -> Status:
        status = super().poll(transfer)
        if transfer.error is not None:
            raise transfer.error
        return status


class Contagious(FakeExecutor):
    """Fails all transfers where one has failed."""

    def poll(self, transfer: Transfer) -> Status:
        status = super().poll(transfer)
        if self.network.lost and transfer.error is None:
            transfer.status = Status.FAILED
            transfer.error = KVPlanError("PEER", "move bytes", expected="no error", got="one of another transfer")
        return status


class Holding(FakeExecutor):
    """Holds the blocks of a transfer that has failed, which is right: its bytes may still move."""

    def poll(self, transfer: Transfer) -> Status:
        if super().poll(transfer) is Status.FAILED:
            transfer.status = Status.RUNNING
        return transfer.status


class Releasing(Holding):
    """Releases them all the same."""

    def release(self, transfer: Transfer) -> None:
        pass


class ContractOf(ExecutorContract):
    """The contract for one of these executors. Only the one that never settles is not waited for."""

    def __init__(self, executor: type[FakeExecutor]) -> None:
        self.executor = executor
        if executor is Idle:
            self.timeout_s = 0.05

    @contextmanager
    def open_cluster(self, workers: Sequence[Worker]) -> Iterator[FakeCluster]:
        cluster = FakeCluster(workers)
        cluster.executors = {worker.key: self.executor(cluster.network, worker) for worker in workers}
        with cluster.network.memory:
            yield cluster


@pytest.mark.parametrize(
    "executor, test, text",
    [
        (Idle, "a_request_moves", "not settled after 0.05 s"),
        (Wrong, "a_request_moves", "1 wrong bytes in decode/0"),
        (Greedy, "a_request_moves", "wrong bytes in decode/"),
        (Hasty, "a_request_moves", "bytes of <Transfer .* are not in place when it is done"),
        (Restless, "a_settled_transfer_stays_settled", "wrong bytes in decode/"),
        (Failing, "a_request_moves", "expected all DONE, got"),
        (Failing, "cancelled_transfers_settle", "expected CANCELLED or DONE, got"),
        (Failing, "a_pair_that_exchanges_nothing", "expected DONE, got <Transfer"),
        (Forgetful, "a_settled_transfer_stays_settled", "expected DONE, got <Transfer"),
        (Haunted, "a_settled_transfer_stays_settled", "wrong bytes in decode/"),
        (Generous, "cancelled_transfers_settle", "expected a KVPlanError with code TRANSFER"),
        (Unstoppable, "cancelled_transfers_settle", "wrong bytes in decode/"),
        (Careless, "start_refuses_a_plan_that_is_not_prepared", "expected a KVPlanError with code TRANSFER"),
        (Careless, "prepare_refuses_other_workers", "expected a KVPlanError with code PEER"),
        (Sleepy, "poll_does_not_wait", r"expected polls of less than 0.1 s, got one of \d+\.\d{3} s each time"),
        (Optimist, "a_lost_worker_fails_its_transfers_alone", "bytes of <Transfer .* are not in place when it is done"),
        (Mute, "a_lost_worker_fails_its_transfers_alone", "expected an error of <Transfer"),
        (Loud, "a_lost_worker_fails_its_transfers_alone", "expected no exception of poll, got PEER"),
        (Contagious, "a_lost_worker_fails_its_transfers_alone", "expected DONE, got <Transfer"),
        (Premature, "a_lost_worker_fails_its_transfers_alone", "wrong bytes in decode/"),
        (Releasing, "a_lost_worker_fails_its_transfers_alone", "expected a KVPlanError with code TRANSFER"),
    ],
)
def test_a_fault_is_found(executor: type[FakeExecutor], test: str, text: str) -> None:
    """Each fault fails a test of the contract with a message that says what is wrong."""
    run: Callable[[], Any] = getattr(ContractOf(executor), f"test_{test}")
    with pytest.raises(AssertionError, match=text):
        run()


def test_check_runs_all_tests() -> None:
    """``check`` runs everything, and returns the names."""
    names = ContractOf(FakeExecutor).check()
    assert names == [name for name in dir(ExecutorContract) if name.startswith("test_")]
    with pytest.raises(AssertionError):
        ContractOf(Idle).check()


def test_a_failed_transfer_may_hold_its_blocks() -> None:
    """It is RUNNING, with its error, for as long as its bytes may move."""
    ContractOf(Holding).test_a_lost_worker_fails_its_transfers_alone()


def test_a_subclass_must_open_a_cluster() -> None:
    """The contract itself has no executors."""
    with pytest.raises(NotImplementedError):
        ExecutorContract().check()


def test_another_error_is_not_a_refusal() -> None:
    """A refusal must have the expected code and name."""
    blocks: AbstractContextManager[None] = expect_refusal("PEER", "decode/0")
    with pytest.raises(AssertionError, match="expected PEER with 'decode/0', got TRANSFER"), blocks:
        raise KVPlanError("TRANSFER", "start", expected="a", got="b")
