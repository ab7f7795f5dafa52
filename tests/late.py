"""An executor and a copier that end what they have begun when a test says so, and leave garbage until then.

A transfer writes garbage when it starts and its bytes when it ends; so do copies. So what is taken from a half too
early, or put into it too early, shows in the bytes at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvplan import KVPlanError, ReadSpec, TransferPlan
from kvplan.describe.worker import Key
from kvplan.executor import FakeExecutor, Notice, Status, Transfer, still_running
from kvplan.staging.rearrange import Copy
from kvplan.verification.memory import FakeMemory

GARBAGE = 0xEE


def broken(what: str) -> KVPlanError:
    """What goes wrong in a test."""
    return KVPlanError("TRANSFER", what, expected="success", got="a fault")


def spoil(memory: FakeMemory, key: Key, ranges: np.ndarray) -> None:
    """Garbage in ranges of a worker."""
    for address, length, device in ranges.tolist():
        memory.write(key, address, np.full(length, GARBAGE, np.uint8), device)


class LateExecutor:
    """An executor of fake memory, whose transfers :meth:`end` ends. A cancelled one moves its bytes all the same."""

    def __init__(self, inner: FakeExecutor) -> None:
        self.inner = inner
        self.running: list[Transfer] = []
        self.ended: list[Transfer] = []
        self.asked: list[Transfer] = []
        self.released: list[Transfer] = []
        self.refuses: KVPlanError | None = None
        self.gone: Key | None = None
        self.keeps: KVPlanError | None = None

    def prepare(self, plan: TransferPlan) -> None:
        """As fake memory's."""
        self.inner.prepare(plan)

    def start(self, spec: ReadSpec, request: str, *, notify: bool = True) -> Transfer:
        """A transfer that runs until it is ended; none where it refuses, be it all workers or the one that is gone."""
        if self.refuses is not None and self.gone in (None, spec.remote):
            raise self.refuses
        transfer = self.inner.start(spec, request, notify=notify)
        side = 0 if spec.operation == "READ" else 1
        spoil(self.inner.network.memory, (spec.local, spec.remote)[side], spec.descriptors()[side])
        self.running.append(transfer)
        return transfer

    def end(self, transfer: Transfer, error: KVPlanError | None = None) -> None:
        """All bytes move, or none; and the transfer is settled."""
        self.running.remove(transfer)
        self.ended.append(transfer)
        if error is not None:
            transfer.status, transfer.error = Status.FAILED, error
        elif transfer in self.asked:
            self.inner.network.memory.execute(transfer.spec)
            transfer.status = Status.CANCELLED
        else:
            others = [other for other in self.running if other.request == transfer.request]
            assert not (transfer.notifies and any(other.spec.local_ids.size for other in others)), "told too early"
            self.inner.poll(transfer)

    def poll(self, transfer: Transfer) -> Status:
        """Where it stands."""
        return transfer.status

    def cancel(self, transfer: Transfer) -> None:
        """Take note of it."""
        self.asked.append(transfer)

    def release(self, transfer: Transfer) -> None:
        """Take note of it, once, of what is settled."""
        if not transfer.status.is_settled:
            raise still_running(transfer.request, "release a transfer")
        assert transfer not in self.released
        self.released.append(transfer)
        if self.keeps is not None:
            raise self.keeps

    def notices(self) -> tuple[Notice, ...]:
        """As fake memory's."""
        return self.inner.notices()


@attrs.define(eq=False)
class Ticket:
    """Copies that have begun."""

    copies: tuple[Copy, ...]
    is_done: bool = False
    error: KVPlanError | None = None


class LateCopier:
    """A copier of fake memory, whose copies :meth:`end` ends."""

    def __init__(self, memory: FakeMemory, key: Key) -> None:
        self.memory, self.key = memory, key
        self.running: list[Ticket] = []
        self.ended: list[Ticket] = []
        self.refuses: KVPlanError | None = None

    def begin(self, copies: Sequence[Copy]) -> Ticket:
        """Copies that are not done until they are ended."""
        if self.refuses is not None:
            raise self.refuses
        for copy in copies:
            spoil(self.memory, self.key, copy.ranges()[0])
        self.running.append(Ticket(tuple(copies)))
        return self.running[-1]

    def end(self, ticket: Ticket, error: KVPlanError | None = None) -> None:
        """All bytes are in order, or copies have failed."""
        self.running.remove(ticket)
        self.ended.append(ticket)
        ticket.is_done, ticket.error = True, error
        for copy in ticket.copies if error is None else ():
            writes, reads = copy.ranges()
            self.memory.move(self.key, self.key, reads, writes)

    def done(self, ticket: Ticket) -> bool:
        """Whether they were ended."""
        if ticket.error is not None:
            raise ticket.error
        return ticket.is_done
