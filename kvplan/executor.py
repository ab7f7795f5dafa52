"""Executors: what carries read specs out, and one that does so in fake memory.

A plan says what moves; an executor moves it. Its rules, which every implementation's tests hold it to:

- E1: a transfer is polled until it is settled. :meth:`Executor.poll` never waits.
- E2: a settled transfer touches no byte any more. Only then may the blocks of its local side be used again.
- E3: a transfer whose bytes have all moved tells its remote worker so, once, under the request's name; also where
  there was no byte to move. Pairs whose tables are empty tell nobody: nobody counts them. Nor does a transfer that was
  started with ``tell=False``: of a request's transfers with one worker only the last tells, begun when all others are
  done.
- E4: what goes wrong under way is the transfer's ``error``, never an exception, and concerns no other transfer.
- E5: a plan is prepared with remote workers exactly as it describes them. Of its local worker the regions alone have to
  be those of the executor's: where bytes are read into, views have no part. So plans whose local worker is a buffer
  (:mod:`kvplan.staging.buffers`) are prepared by the executor of the worker that has the buffer.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import attrs

from kvplan.describe.worker import Key, Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.verification.memory import FakeMemory

if TYPE_CHECKING:
    from kvplan.plan.specs import ReadSpec
    from kvplan.plan.transfer import TransferPlan


class Status(enum.Enum):
    """Where a transfer stands.

    >>> [status.name for status in Status if status.is_settled]
    ['DONE', 'FAILED', 'CANCELLED']
    """

    RUNNING = "running"
    """Bytes may be moving."""

    DONE = "done"
    """All bytes have moved."""

    FAILED = "failed"
    """Some bytes may have moved, and no more will. The transfer's ``error`` says why."""

    CANCELLED = "cancelled"
    """As the caller asked: any number of bytes has moved, and no more will."""

    @property
    def is_settled(self) -> bool:
        """Whether the transfer touches no byte any more."""
        return self is not Status.RUNNING


@attrs.define(eq=False)
class Transfer:
    """One spec that an executor carries out, for the request of that name.

    ``status`` is what the last poll found; ``error`` is set where that is FAILED. ``tells`` says whether the remote
    worker is told of it.
    """

    spec: ReadSpec
    request: str
    status: Status = Status.RUNNING
    error: KVPlanError | None = None
    tells: bool = True

    def __repr__(self) -> str:
        return f"<Transfer {self.request!r} {self.status.value}: {self.spec!r}>"


@attrs.frozen
class Notice:
    """What a worker is told when another has moved all bytes of a request from it, or to it."""

    engine_id: str
    rank: int
    request: str


class Executor(Protocol):
    """Carries out the specs of one local worker. Not for several threads at once."""

    def prepare(self, plan: TransferPlan) -> None:
        """Make ready for a plan's specs, once. Raises ``PEER`` where a worker is not the one that was planned for."""

    def start(self, spec: ReadSpec, request: str, *, tell: bool = True) -> Transfer:
        """Begin to move a spec's bytes, and ``tell`` the remote worker when all have moved.

        Raises ``TRANSFER`` where its plan was not prepared.
        """

    def poll(self, transfer: Transfer) -> Status:
        """Where a transfer stands now."""

    def cancel(self, transfer: Transfer) -> None:
        """Ask a running transfer to stop: it is CANCELLED once it touches no byte any more, however long that takes."""

    def release(self, transfer: Transfer) -> None:
        """Give back what a settled transfer holds. Raises ``TRANSFER`` for one that runs."""

    def notices(self) -> tuple[Notice, ...]:
        """What other workers have completed with the local one since the last call."""


def unprepared(spec: ReadSpec) -> KVPlanError:
    """The error of :meth:`Executor.start` for a spec whose tables it does not know."""
    return KVPlanError(
        "TRANSFER",
        f"start a transfer with {label_of(spec.remote)}",
        expected="a spec of a plan that was prepared, with that worker as it is connected now",
        got="another",
        hint="prepare(plan) again after a worker has gone and come back",
        local=spec.local,
        remote=spec.remote,
    )


def still_running(request: str, action: str) -> KVPlanError:
    """The error for what may not be done before a transfer is settled."""
    return KVPlanError(
        "TRANSFER",
        action,
        expected=f"the transfer of request {request!r} to be settled",
        got="one that may still move bytes",
        hint="cancel it, then poll it until it is settled",
        request=request,
    )


def not_planned_for(worker: Worker, known: Worker | None, whose: str) -> KVPlanError:
    """The error of :meth:`Executor.prepare` for a worker of the plan that is unknown, or known differently."""
    return KVPlanError(
        "PEER",
        f"prepare a plan with {whose} worker {worker.label}",
        expected=f"that worker, with {'the regions' if whose == 'local' else 'all'} that the plan knows of it",
        got="no such worker" if known is None else "another description of it",
        hint="" if known is None else "plan again with the worker's present offer",
        worker=worker.label,
    )


def check_local(plan: TransferPlan, worker: Worker) -> None:
    """Make sure that a plan is one of a worker's, rule E5. Raises ``PEER``."""
    if (plan.local.key, plan.local.regions) != (worker.key, worker.regions):
        raise not_planned_for(plan.local, worker, "local")


class FakeNetwork:
    """Executors of workers that share one :class:`~kvplan.verification.memory.FakeMemory`.

    Bytes move when a transfer is polled for the first time, so one that is cancelled before moves none.

    >>> from kvplan import Blocks, Model, plan_reads
    >>> model = Model.shipped("llama-3.2-1b")
    >>> (source,), (local,) = (model.engine(name, num_blocks=10) for name in ("prefill", "decode"))
    >>> plan = plan_reads(local, [source])
    >>> (spec,) = plan.bind(local={"attn": Blocks([7])}, remote={"attn": Blocks([3])}, tokens=(0, 16))
    >>> network = FakeNetwork([source, local])
    >>> executor = network.executor(local)
    >>> executor.prepare(plan)
    >>> transfer = executor.start(spec, "request 1")
    >>> executor.poll(transfer)
    <Status.DONE: 'done'>
    >>> network.executor(source).notices()
    (Notice(engine_id='decode', rank=0, request='request 1'),)
    """

    def __init__(self, workers: list[Worker] | tuple[Worker, ...]) -> None:
        self.memory: FakeMemory = FakeMemory(workers)
        self.workers: dict[Key, Worker] = {worker.key: worker for worker in workers}
        self.inbox: dict[Key, list[Notice]] = {key: [] for key in self.workers}

    def executor(self, worker: Worker) -> FakeExecutor:
        """The executor of one of the workers."""
        return FakeExecutor(self, worker)


class FakeExecutor:
    """The :class:`Executor` of one worker of a :class:`FakeNetwork`."""

    def __init__(self, network: FakeNetwork, worker: Worker) -> None:
        self.network = network
        self.worker = worker
        self._prepared: set[object] = set()

    def prepare(self, plan: TransferPlan) -> None:
        """Hold the plan's workers against those of the network."""
        check_local(plan, self.worker)
        for remote in plan.remotes:
            known = self.network.workers.get(remote.key)
            if known != remote:
                raise not_planned_for(remote, known, "remote")
        self._prepared.update(pair.local_table for pair in plan.pairs)

    def start(self, spec: ReadSpec, request: str, *, tell: bool = True) -> Transfer:
        """A transfer of which nothing has moved yet."""
        if spec.local_table not in self._prepared:
            raise unprepared(spec)
        return Transfer(spec, request, tells=tell)

    def poll(self, transfer: Transfer) -> Status:
        """Move the bytes, if they have not moved, and tell the remote worker."""
        if transfer.status is Status.RUNNING:
            spec = transfer.spec
            try:
                self.network.memory.execute(spec)
            except KVPlanError as error:
                transfer.status, transfer.error = Status.FAILED, error
                return transfer.status
            transfer.status = Status.DONE
            if transfer.tells and len(spec.local_table.rows):
                self.network.inbox[spec.remote].append(Notice(*spec.local, transfer.request))
        return transfer.status

    def cancel(self, transfer: Transfer) -> None:
        """Leave the bytes of a transfer that was not polled yet where they are."""
        if transfer.status is Status.RUNNING:
            transfer.status = Status.CANCELLED

    def release(self, transfer: Transfer) -> None:
        """Check that the transfer is settled: there is nothing to give back."""
        if not transfer.status.is_settled:
            raise still_running(transfer.request, "release a transfer")

    def notices(self) -> tuple[Notice, ...]:
        """What other workers of the network have completed with this one."""
        inbox = self.network.inbox[self.worker.key]
        told = tuple(inbox)
        inbox.clear()
        return told
