"""Executors: the interface through which a connector moves a plan's bytes, and one over fake memory for tests.

A plan says which bytes move, and an executor moves them. All executors follow these rules, which
:mod:`kvplan.testing.executors` tests:

- E1: The caller polls a transfer until it settles. :meth:`Executor.poll` never waits.
- E2: A settled transfer touches no byte. Only then may the caller reuse its local blocks.
- E3: When all bytes of a transfer have moved, its executor sends the remote worker one notice with the request's name,
  also where there was no byte to move. It sends none for a pair whose tables are empty, which nobody counts, and none
  for a transfer started with ``notify=False``: where a request takes several transfers with one worker, only the last
  one notifies, and the caller starts it when all others are done.
- E4: A failure under way becomes the transfer's ``error``. It raises nothing and affects no other transfer.
- E5: The remote workers of a plan must equal the workers that the executor knows. Its local worker needs the same key
  and the same regions, but its views may differ. So the worker that owns a staging buffer can also prepare plans whose
  local worker describes only that buffer.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import attrs

from kvplan.describe.worker import Key, Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.verification import FakeMemory

if TYPE_CHECKING:
    from kvplan.plan import ReadSpec, Table, TransferPlan


class Status(enum.Enum):
    """The state of a transfer.

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
    """The caller cancelled the transfer. Any number of bytes has moved, and no more will."""

    @property
    def is_settled(self) -> bool:
        """Whether the transfer touches no more bytes."""
        return self is not Status.RUNNING


@attrs.define(eq=False)
class Transfer:
    """One spec under way, for the request named ``request``.

    ``status`` is the result of the last poll. ``error`` is set where the status is FAILED. ``notifies`` says whether
    the remote worker gets a :class:`Notice` at the end.
    """

    spec: ReadSpec
    request: str
    status: Status = Status.RUNNING
    error: KVPlanError | None = None
    notifies: bool = True

    def __repr__(self) -> str:
        return f"<Transfer {self.request!r} {self.status.value}: {self.spec!r}>"


@attrs.frozen
class Notice:
    """What a worker receives when another worker has read all bytes of a request from it, or written them to it.

    ``engine_id`` and ``rank`` name the other worker.
    """

    engine_id: str
    rank: int
    request: str


class Executor(Protocol):
    """Carries out the specs of one local worker. Use an executor from one thread at a time."""

    def prepare(self, plan: TransferPlan) -> None:
        """Prepare for the specs of a plan, once. Raises ``PEER`` where a worker is not the one in the plan, rule E5."""

    def start(self, spec: ReadSpec, request: str, *, notify: bool = True) -> Transfer:
        """Start to move the bytes of a spec. With ``notify``, the remote worker gets a notice when all have moved.

        Raises ``TRANSFER`` where the spec's plan is not prepared.
        """

    def poll(self, transfer: Transfer) -> Status:
        """Update and return the status of a transfer."""

    def cancel(self, transfer: Transfer) -> None:
        """Ask a running transfer to stop. It becomes CANCELLED when it touches no byte any more."""

    def release(self, transfer: Transfer) -> None:
        """Free what a settled transfer holds. Raises ``TRANSFER`` for a running one."""

    def notices(self) -> tuple[Notice, ...]:
        """The notices that have arrived from other workers since the last call."""


def unprepared(spec: ReadSpec) -> KVPlanError:
    """The error of :meth:`Executor.start` for a spec whose tables the executor does not know."""
    return KVPlanError(
        "TRANSFER",
        f"start a transfer with {label_of(spec.remote)}",
        expected="a spec of a plan that is prepared for the present connection",
        got="a spec of another plan",
        hint="call prepare(plan) first, and again after a worker has reconnected",
        local=spec.local,
        remote=spec.remote,
    )


def still_running(request: str, action: str) -> KVPlanError:
    """The error for an action that has to wait until a transfer is settled."""
    return KVPlanError(
        "TRANSFER",
        action,
        expected=f"a settled transfer of request {request!r}",
        got="a running one, which may still move bytes",
        hint="cancel it, then poll it until it is settled",
        request=request,
    )


def not_planned_for(worker: Worker, known: Worker | None, whose: str) -> KVPlanError:
    """The error of :meth:`Executor.prepare` where the executor does not know a plan's worker, or knows another one."""
    got, hint = "no such worker", ""
    if known is not None and known.key == worker.key:
        got, hint = "another description of it", "plan again with the worker's present offer"
    elif known is not None:
        got = f"worker {known.label}"
    return KVPlanError(
        "PEER",
        f"prepare a plan with {whose} worker {worker.label}",
        expected=f"that worker with the same {'regions' if whose == 'local' else 'description'} as in the plan",
        got=got,
        hint=hint,
        worker=worker.label,
    )


def check_local(plan: TransferPlan, worker: Worker) -> None:
    """Check that an executor's ``worker`` can be the local worker of a plan, rule E5. Raises ``PEER``."""
    if (plan.local.key, plan.local.regions) != (worker.key, worker.regions):
        raise not_planned_for(plan.local, worker, "local")


class FakeNetwork:
    """Executors of several workers over one :class:`~kvplan.FakeMemory`, for tests without a network.

    A transfer moves its bytes when it is first polled. So one that is cancelled before moves none.

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

    def __init__(self, workers: Iterable[Worker]) -> None:
        workers = tuple(workers)
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
        self._prepared: set[Table] = set()

    def prepare(self, plan: TransferPlan) -> None:
        """Check that the network has the workers of the plan."""
        check_local(plan, self.worker)
        for remote in plan.remotes:
            known = self.network.workers.get(remote.key)
            if known != remote:
                raise not_planned_for(remote, known, "remote")
        self._prepared.update(pair.local_table for pair in plan.pairs)

    def start(self, spec: ReadSpec, request: str, *, notify: bool = True) -> Transfer:
        """Return a transfer that has moved no byte yet."""
        if spec.local_table not in self._prepared:
            raise unprepared(spec)
        return Transfer(spec, request, notifies=notify)

    def poll(self, transfer: Transfer) -> Status:
        """Move the bytes of a running transfer and notify the remote worker."""
        if transfer.status is Status.RUNNING:
            spec = transfer.spec
            try:
                self.network.memory.execute(spec)
            except KVPlanError as error:
                transfer.status, transfer.error = Status.FAILED, error
                return transfer.status
            transfer.status = Status.DONE
            if transfer.notifies and len(spec.local_table.rows):
                self.network.inbox[spec.remote].append(Notice(*spec.local, transfer.request))
        return transfer.status

    def cancel(self, transfer: Transfer) -> None:
        """Cancel a transfer that was not polled yet. It moves no byte."""
        if transfer.status is Status.RUNNING:
            transfer.status = Status.CANCELLED

    def release(self, transfer: Transfer) -> None:
        """Check that the transfer is settled. It holds nothing."""
        if not transfer.status.is_settled:
            raise still_running(transfer.request, "release a transfer")

    def notices(self) -> tuple[Notice, ...]:
        """The notices from other workers of the network since the last call."""
        inbox = self.network.inbox[self.worker.key]
        notices = tuple(inbox)
        inbox.clear()
        return notices
