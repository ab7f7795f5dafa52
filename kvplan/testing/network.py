"""A fake network: executors and a copier over fake memory, for tests without a transfer library.

They follow the rules of :mod:`kvplan.executor` and :mod:`kvplan.staging.pipeline`, as those that
serve do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from kvplan._checks import instance, members
from kvplan._text import brief_repr
from kvplan.describe.worker import Key, Worker, key_of
from kvplan.errors import KVPlanError
from kvplan.executor import (
    Status,
    Transfer,
    check_local,
    not_connected,
    not_planned_for,
    still_running,
    unprepared,
)
from kvplan.plan import ReadSpec, Table, TransferPlan
from kvplan.staging import Copy
from kvplan.verification import FakeMemory


class FakeNetwork:
    """Executors of several workers over one :class:`~kvplan.verification.FakeMemory`.

    A transfer moves its bytes when it is first polled. So one that is cancelled before moves none.

    >>> from kvplan import Blocks, Model, plan_reads
    >>> from kvplan.testing import FakeNetwork
    >>> model = Model.shipped("llama-3.2-1b")
    >>> (source,), (local,) = (model.engine(name, num_blocks=10) for name in ("prefill", "decode"))
    >>> plan = plan_reads(local, [source])
    >>> tables = {"local": {"attn": Blocks([7])}, "remote": {"attn": Blocks([3])}}
    >>> (spec,) = plan.bind(**tables, tokens=(0, 16))
    >>> network = FakeNetwork([source, local])
    >>> executor = network.executor(local)
    >>> executor.prepare(plan)
    >>> transfer = executor.start(spec, "request 1")
    >>> executor.poll(transfer)
    <Status.DONE: 'done'>
    """

    def __init__(self, workers: Iterable[Worker]) -> None:
        workers = members(Worker, workers, "workers of a network")
        self.memory: FakeMemory = FakeMemory(workers)
        self.workers: dict[Key, Worker] = {worker.key: worker for worker in workers}
        self.lost: set[Key] = set()

    def executor(self, worker: Worker) -> FakeExecutor:
        """Return the executor of one of the workers."""
        # a worker of that key with other regions is another one
        if self.workers.get(instance(Worker, worker, "worker").key) != worker:
            raise not_connected(worker.key)
        return FakeExecutor(self, worker)

    def lose(self, worker: Worker) -> None:
        """Lose a worker, as when its process ends: from now on, transfers with it fail."""
        self.lost.add(instance(Worker, worker, "worker").key)


class FakeExecutor:
    """The :class:`~kvplan.Executor` of one worker of a :class:`FakeNetwork`."""

    def __init__(self, network: FakeNetwork, worker: Worker) -> None:
        self.network = network
        self.worker = worker
        self._prepared: set[Table] = set()

    def prepare(self, plan: TransferPlan) -> None:
        """Check that the network has the workers of the plan."""
        check_local(plan, self.worker)
        for remote in plan.remotes:
            worker = self.network.workers.get(remote.key)
            if worker != remote:
                raise not_planned_for(remote, worker, "remote")
        # a spec has the tables of its plan, so they tell whether that was prepared
        self._prepared.update(pair.local_table for pair in plan.pairs)

    def start(self, spec: ReadSpec, request: str) -> Transfer:
        """Return a transfer that has moved no byte yet."""
        transfer = Transfer(spec, request)
        if spec.local_table not in self._prepared:
            raise unprepared(spec)
        return transfer

    def poll(self, transfer: Transfer) -> Status:
        """Move the bytes of a running transfer."""
        if instance(Transfer, transfer, "transfer").status is Status.RUNNING:
            spec = transfer.spec
            try:
                if spec.remote in self.network.lost:
                    raise not_connected(spec.remote)
                self.network.memory.execute(spec)
            except KVPlanError as error:
                transfer.status = Status.FAILED
                transfer.error = error
                return transfer.status
            transfer.status = Status.DONE
            transfer.num_descriptors = spec.num_descriptors
        return transfer.status

    def cancel(self, transfer: Transfer) -> None:
        """Cancel a transfer that was not polled yet. It moves no byte."""
        if instance(Transfer, transfer, "transfer").status is Status.RUNNING:
            transfer.status = Status.CANCELLED

    def release(self, transfer: Transfer) -> None:
        """Check that the transfer is settled. It holds nothing."""
        if not instance(Transfer, transfer, "transfer").status.is_settled:
            raise still_running(transfer.request, "release a transfer")


@attrs.frozen(eq=False)
class FakeCopier:
    """The :class:`~kvplan.staging.Copier` of a worker in fake memory.

    Copies are done as soon as they begin.
    """

    memory: FakeMemory
    key: Key

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        instance(FakeMemory, self.memory, "memory of a copier")
        key_of(self.key, "worker of a copier")

    def begin(self, copies: Sequence[Copy]) -> None:
        """Copy everything, range by range."""
        for copy in members(Copy, copies, "copies"):
            # source and destination are memory of the same worker
            writes, reads = copy.ranges()
            self.memory.move(self.key, self.key, reads, writes)

    def done(self, ticket: None) -> bool:
        """Return True: a copy is done as soon as it begins."""
        return True
