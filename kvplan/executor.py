"""Executors: the interface through which a connector moves a plan's bytes.

A plan says which bytes move, and an executor moves them. All executors follow these rules, which
:mod:`kvplan.testing.executors` tests; :class:`kvplan.testing.FakeNetwork` has executors over fake
memory:

- executor.E1: The caller polls a transfer until it settles. :meth:`Executor.poll` never waits.
- executor.E2: A settled transfer touches no byte on either side. Only then may the caller reuse its
  local blocks, and tell the remote worker that its blocks are no longer read.
- executor.E3: A transfer is DONE when all bytes of its spec are in place, and no other byte has
  changed.
- executor.E4: A failure under way becomes the transfer's ``error``. It raises nothing and affects
  no other transfer. The transfer is FAILED once its bytes have stopped; until then it stays
  RUNNING, with the error, and holds its blocks.
- executor.E5: The remote workers of a plan must equal the workers that the executor knows. Its
  local worker needs the same key and the same regions, but its views may differ. So the worker that
  owns a staging buffer can also prepare plans whose local worker describes only that buffer.

An executor tells the remote worker nothing: an engine learns when its pinned blocks are free from
their lease, :class:`kvplan.protocol.Leases`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from kvplan import _checks
from kvplan.describe.worker import Key, Worker, key_of, label_of
from kvplan.errors import KVPlanError
from kvplan.plan.specs import direction_of

if TYPE_CHECKING:
    from kvplan.plan import ReadSpec, TransferPlan

__all__ = [
    "Executor",
    "Status",
    "Transfer",
    "check_local",
    "not_connected",
    "not_planned_for",
    "still_running",
    "unprepared",
]


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
        """The transfer touches no more bytes."""
        return self is not Status.RUNNING


def _status(value: Any) -> Status:
    status: Status = _checks.instance(Status, value, "status of a transfer")
    return status


@attrs.define(eq=False)
class Transfer:
    """One spec under way, for the request named ``request``.

    ``status`` is the result of the last poll. ``error`` is set where the status is FAILED, and
    where a transfer has failed that is RUNNING, since its bytes may still move.
    ``num_descriptors`` has moved the bytes of a transfer that is DONE, if its executor counts them.
    Raises ``TYPE`` or ``NAME`` for what can name no request.
    """

    spec: ReadSpec
    request: str
    status: Status = attrs.field(default=Status.RUNNING, converter=_status)
    error: KVPlanError | None = None
    num_descriptors: int = 0

    def __attrs_post_init__(self) -> None:
        _checks.having("local_table", self.spec, "spec of a transfer", "a ReadSpec")
        _checks.name(self.request, "name of a request")
        direction_of(self.spec.operation, f"transfer request {self.request!r}")
        if self.error is not None:
            _checks.instance(KVPlanError, self.error, "error of a transfer")

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return self.spec.num_bytes

    def __repr__(self) -> str:
        return f"<Transfer {self.request!r} {self.status.value}: {self.spec!r}>"


class Executor(Protocol):
    """Carries out the specs of one local worker. Use an executor from one thread at a time."""

    def prepare(self, plan: TransferPlan) -> None:
        """Prepare for the specs of a plan, once.

        Raises ``PEER`` where a worker is not the one in the plan, rule executor.E5.
        """

    def start(self, spec: ReadSpec, request: str) -> Transfer:
        """Start to move the bytes of a spec for a request, whose name is for logs and errors.

        Raises ``TRANSFER`` where the spec's plan is not prepared; ``TYPE`` or ``NAME`` for what can
        name no request.
        """

    def poll(self, transfer: Transfer) -> Status:
        """Update and return the status of a transfer."""

    def cancel(self, transfer: Transfer) -> None:
        """Ask a running transfer to stop. It becomes CANCELLED when it touches no byte any more."""

    def release(self, transfer: Transfer) -> None:
        """Free what a settled transfer holds. Raises ``TRANSFER`` for a running one."""


def not_connected(key: Key) -> KVPlanError:
    """Return the error for a worker that the executor does not know."""
    action = f"find worker {label_of(key_of(key, 'worker'))}"
    return KVPlanError("PEER", action, expected="a connected worker", got="none of that name")


def unprepared(spec: ReadSpec) -> KVPlanError:
    """Return the error of :meth:`Executor.start` for a spec whose tables the executor lacks."""
    _checks.having("local_table", spec, "spec", "a ReadSpec")
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
    """Return the error for an action that has to wait until a transfer is settled."""
    return KVPlanError(
        "TRANSFER",
        action,
        expected=f"a settled transfer of request {request!r}",
        got="a running one, which may still move bytes",
        hint="cancel it, then poll it until it is settled",
        request=request,
    )


def not_planned_for(worker: Worker, present: Worker | None, side: str) -> KVPlanError:
    """Return the error of :meth:`Executor.prepare` for a plan's ``local`` or ``remote`` worker.

    ``present`` is the worker of that key that the executor knows, if any.
    """
    _checks.instance(Worker, worker, "worker")
    hint = ""
    if present is None:
        got = "no such worker"
    elif _checks.instance(Worker, present, "present worker").key == worker.key:
        got = "another description of it"
        hint = "plan again with the worker's present offer"
    else:
        got = f"worker {present.label}"
    equal_part = "regions" if _checks.name(side, "side") == "local" else "description"
    return KVPlanError(
        "PEER",
        f"prepare a plan with {side} worker {worker.label}",
        expected=f"that worker with the same {equal_part} as in the plan",
        got=got,
        hint=hint,
        worker=worker.label,
    )


def check_local(plan: TransferPlan, worker: Worker) -> None:
    """Check that an executor's ``worker`` can be a plan's local one, rule executor.E5. Raises
    ``PEER``.
    """
    _checks.having("pairs", plan, "plan", "a TransferPlan")
    _checks.instance(Worker, worker, "worker")
    # its views may differ: a plan of a staging buffer has only those of the buffer
    if (plan.local.key, plan.local.regions) != (worker.key, worker.regions):
        raise not_planned_for(plan.local, worker, "local")
