"""Executors: the interface through which a connector moves a plan's bytes.

A plan says which bytes move, and an executor moves them. All executors follow these rules, which
:mod:`kvplan.testing.executors` tests; :class:`kvplan.testing.FakeNetwork` has executors over fake
memory:

- executor.E1: The caller polls a transfer until it settles. :meth:`Executor.poll` never waits.
- executor.E2: A settled transfer touches no byte. Only then may the caller reuse its local blocks.
- executor.E3: When a transfer is DONE, its executor sends the remote worker one notice with the
  request's name and attempt, also where there was no byte to move. A transfer that is FAILED or
  CANCELLED sends none: the caller may try again, or give the request up with
  :meth:`Executor.notify`. Nor does a pair whose tables are empty, which nobody awaits, nor a
  transfer started with ``notify=False``: where a request takes several transfers with one worker,
  only the last one notifies, and the caller starts it when all others are done.
- executor.E4: A failure under way becomes the transfer's ``error``. It raises nothing and affects
  no other transfer.
- executor.E5: The remote workers of a plan must equal the workers that the executor knows. Its
  local worker needs the same key and the same regions, but its views may differ. So the worker that
  owns a staging buffer can also prepare plans whose local worker describes only that buffer.
- executor.E6: A notice names the connected worker that it came from, whatever its sender claims.
  Notices of others are not delivered. :class:`PendingRequests` knows from whom a request still
  awaits one.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

from kvplan import _checks
from kvplan._text import brief_repr
from kvplan.describe.worker import Key, Worker, key_of, label_of
from kvplan.errors import KVPlanError
from kvplan.plan.specs import direction_of

if TYPE_CHECKING:
    from kvplan.plan import ReadSpec, TransferPlan

MAX_REQUEST: Final = 1024
"""Characters of the name of a request, which travels in a notice."""


def request_name(value: Any) -> str:
    """Return ``value`` as the name of a request, printable and not too long.

    Raises ``TYPE`` or ``NAME``.
    """
    request = _checks.name(value, "name of a request")
    if len(request) > MAX_REQUEST:
        raise KVPlanError(
            "NAME",
            "read name of a request",
            expected=f"at most {MAX_REQUEST} characters",
            got=f"{len(request)} characters",
        )
    return request


def attempt_number(value: Any) -> int:
    """Return ``value`` as the number of an attempt. Raises ``TYPE`` or ``RANGE``."""
    return _checks.integer(value, "attempt")


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


def _settled_status(value: Any) -> Status:
    if not (isinstance(value, Status) and value.is_settled):
        raise _checks.wrong_type("status of a notice", "a Status that is settled", value)
    return value


@attrs.define(eq=False)
class Transfer:
    """One spec under way, for the request named ``request``.

    ``status`` is the result of the last poll. ``error`` is set where the status is FAILED, and
    where a transfer has failed that is RUNNING, since its bytes may still move. ``notifies`` says
    whether the remote worker gets a :class:`Notice` at the end, with ``attempt``.
    ``num_descriptors`` has moved the bytes of a transfer that is DONE, if its executor counts them.
    Raises ``TYPE``, ``NAME`` or ``RANGE`` for what can name no request or attempt.
    """

    spec: ReadSpec
    request: str = attrs.field(converter=request_name)
    status: Status = attrs.field(default=Status.RUNNING, converter=_status)
    error: KVPlanError | None = None
    notifies: bool = True
    attempt: int = attrs.field(default=0, converter=attempt_number)
    num_descriptors: int = 0

    def __attrs_post_init__(self) -> None:
        _checks.having("local_table", self.spec, "spec of a transfer", "a ReadSpec")
        direction_of(self.spec.operation, f"transfer request {self.request!r}")
        _checks.instance(bool, self.notifies, "notify of a transfer")
        if self.error is not None:
            _checks.instance(KVPlanError, self.error, "error of a transfer")

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return self.spec.num_bytes

    def __repr__(self) -> str:
        return f"<Transfer {self.request!r} {self.status.value}: {self.spec!r}>"


@attrs.frozen
class Notice:
    """A message to a worker: another one has read all bytes of a request from it, or written them.

    ``engine_id`` and ``rank`` name the other worker. ``attempt`` is the number that it passed to
    :meth:`Executor.start`. Where ``status`` is FAILED or CANCELLED it has given the request up, and
    touches no byte of it any more.
    """

    engine_id: str
    rank: int
    request: str = attrs.field(converter=request_name)
    attempt: int = attrs.field(default=0, converter=attempt_number)
    status: Status = attrs.field(default=Status.DONE, converter=_settled_status)

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        key_of((self.engine_id, self.rank), "sender of a notice")


@attrs.define(eq=False)
class _PendingRequest:
    """The workers that have not notified a request's attempt, and what has been said of it."""

    attempt: int
    workers: set[Key]
    status: Status = Status.DONE

    def receive(self, worker: Key, status: Status) -> None:
        """Take what a worker has said, if it is awaited. The first status but DONE stays."""
        if worker in self.workers:
            self.workers.remove(worker)
            if self.status is Status.DONE:
                self.status = status


class PendingRequests:
    """The requests whose blocks must stay as they are until other workers have notified this one.

    These are requests that others read from this worker, or write to it. A notice counts once for
    each worker. One that comes twice, from a worker that is not awaited, of another attempt or of a
    request that is not pending changes nothing, and nothing of it is kept. Not for several threads
    at once.

    >>> pending = PendingRequests()
    >>> pending.add("request 1", [("decode", 0), ("decode", 1)])
    >>> pending.receive([Notice("decode", 0, "request 1"), Notice("decode", 0, "request 1")])
    {}
    >>> pending.receive([Notice("decode", 1, "request 1")])
    {'request 1': <Status.DONE: 'done'>}
    """

    def __init__(self) -> None:
        self._awaited: dict[str, _PendingRequest] = {}

    def add(self, request: str, workers: Iterable[Key], *, attempt: int = 0) -> None:
        """Await a notice from each worker, before they can send one.

        :class:`kvplan.plan.Completions` lists the workers.

        Replaces an earlier attempt. Tell the workers the attempt together with the blocks: blocks
        that are used again under the same name need another number. Raises ``TYPE``, ``NAME`` or
        ``RANGE``.
        """
        keys = _checks.members(tuple, workers, "workers to await")
        awaited = {key_of(key, "worker to await") for key in keys}
        self._awaited[request_name(request)] = _PendingRequest(attempt_number(attempt), awaited)

    def discard(self, request: str) -> None:
        """Await nothing more of a request, if it is pending.

        Its blocks are safe only if no worker can touch them.
        """
        self._awaited.pop(request_name(request), None)

    def receive(self, notices: Iterable[Notice]) -> dict[str, Status]:
        """Take notices, and return the requests whose blocks may be used again: they await none.

        A request is DONE if all workers have said so, otherwise as the first other one has said.
        """
        for notice in _checks.members(Notice, notices, "notices"):
            pending = self._awaited.get(notice.request)
            # a notice of an earlier attempt may come late
            if pending is not None and pending.attempt == notice.attempt:
                pending.receive((notice.engine_id, notice.rank), notice.status)
        settled = dict[str, Status]()
        # a copy, because settled requests leave the table meanwhile
        for request, pending in [*self._awaited.items()]:
            if not pending.workers:
                settled[request] = pending.status
                del self._awaited[request]
        return settled

    def __len__(self) -> int:
        return len(self._awaited)

    def __repr__(self) -> str:
        return f"<PendingRequests: {len(self)}>"


class Executor(Protocol):
    """Carries out the specs of one local worker. Use an executor from one thread at a time."""

    def prepare(self, plan: TransferPlan) -> None:
        """Prepare for the specs of a plan, once.

        Raises ``PEER`` where a worker is not the one in the plan, rule executor.E5.
        """

    def start(
        self,
        spec: ReadSpec,
        request: str,
        *,
        attempt: int = 0,
        notify: bool = True,
    ) -> Transfer:
        """Start to move the bytes of a spec.

        With ``notify``, the remote worker gets a notice when all have moved.

        Raises ``TRANSFER`` where the spec's plan is not prepared; ``TYPE``, ``NAME`` or ``RANGE``
        for what can name no request or attempt.
        """

    def poll(self, transfer: Transfer) -> Status:
        """Update and return the status of a transfer."""

    def cancel(self, transfer: Transfer) -> None:
        """Ask a running transfer to stop. It becomes CANCELLED when it touches no byte any more."""

    def release(self, transfer: Transfer) -> None:
        """Free what a settled transfer holds. Raises ``TRANSFER`` for a running one."""

    def notify(self, worker: Key, request: str, status: Status, *, attempt: int = 0) -> None:
        """Send a worker a notice that this one gives a request up, FAILED or CANCELLED.

        Do so when all transfers of the request with that worker are settled. Raises ``PEER`` for a
        worker that is not connected; ``TYPE``, ``NAME`` or ``RANGE`` as :meth:`start` does.
        """

    def notices(self) -> tuple[Notice, ...]:
        """Return the notices that have arrived from other workers since the last call."""


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

    ``present`` is the worker that the executor knows in its place, if any.
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
    equal_part = "regions" if side == "local" else "description"
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
    # its views may differ: a plan of a staging buffer has only those of the buffer
    if (plan.local.key, plan.local.regions) != (worker.key, worker.regions):
        raise not_planned_for(plan.local, worker, "local")


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a fake from its home, so that a process which serves loads no oracle."""
        if name in ("FakeExecutor", "FakeNetwork"):
            return getattr(importlib.import_module("kvplan.testing"), name)
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
