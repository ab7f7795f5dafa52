"""Events: the result of each transfer and the duration of its stages, as records of a log.

A transfer has one event, at the time it settles. Its executor logs one line to the logger
``kvplan_nixl``, with the event as the record's ``event``: WARNING for a failed transfer, DEBUG for
any other. A handler of that logger gets the events of all executors, those of connectors too. The
log level is looked at when a transfer starts: above DEBUG nothing is measured, and a failed
transfer is logged without an event. What a handler raises is printed, and affects no transfer.
"""

from __future__ import annotations

import logging
import traceback
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, Final

import attrs

from kvplan import KVPlanError, Status, Transfer, Worker
from kvplan.describe import Key
from kvplan.support import brief_repr

__all__ = ["Peer", "TransferEvent"]

LOGGER: Final = logging.getLogger("kvplan_nixl")


@attrs.frozen
class Peer:
    """A remote worker of an executor. ``error`` says why its connection is lost, if it is.

    >>> print(Peer(Worker("prefill", 3, (), (), ())))
    prefill/3 connected
    """

    worker: Worker
    error: KVPlanError | None = None

    __repr__ = brief_repr

    @property
    def is_connected(self) -> bool:
        """Whether it is connected, and not lost."""
        return self.error is None

    def __str__(self) -> str:
        return f"{self.worker.label} {f'lost: {self.error}' if self.error else 'connected'}"


@attrs.frozen(kw_only=True)
class TransferEvent:
    """The event of a settled transfer.

    ``local`` and ``remote`` are (engine id, rank), ``operation`` is ``READ`` or ``WRITE``. The spec
    has ``num_bytes`` in ``num_ids`` pairs of descriptors; where ``status`` is DONE, all have moved.
    ``code`` is the code of the transfer's error, or empty.

    The three stages are in microseconds, 0 for a stage that was not reached: NIXL makes the
    transfer, NIXL posts it, and bytes move until the poll that finds the transfer settled. On one
    host UCX moves the bytes while it posts.

    >>> event = TransferEvent(
    ...     request="request 1", operation="READ", local=("decode", 0), remote=("prefill", 3),
    ...     num_bytes=51200, num_ids=14, make_us=8.5, post_us=90.0, transfer_us=1200.0,
    ...     status=Status.DONE,
    ... )
    >>> print(event)
    request 1: READ decode/0 <- prefill/3 done, 51200 bytes by 14 ids,
    made in 8 us, posted in 90, moved in 1200
    >>> event.total_us
    1298.5
    """

    request: str
    operation: str
    local: Key
    remote: Key
    num_bytes: int
    num_ids: int
    make_us: float
    post_us: float
    transfer_us: float
    status: Status
    code: str = ""

    __repr__ = brief_repr

    @property
    def total_us(self) -> float:
        """Microseconds from start to end."""
        return self.make_us + self.post_us + self.transfer_us

    def __str__(self) -> str:
        arrow = "<-" if self.operation == "READ" else "->"
        workers = "{}/{} {} {}/{}".format(*self.local, arrow, *self.remote)
        code = f" with {self.code}" if self.code else ""
        return (
            f"{self.request}: {self.operation} {workers} {self.status.value}{code}, "
            f"{self.num_bytes} bytes by {self.num_ids} ids, made in {self.make_us:.0f} us, "
            f"posted in {self.post_us:.0f}, moved in {self.transfer_us:.0f}"
        )


def _log(level: int, message: str, *values: object, **options: Any) -> None:
    """Log a line. An exception of a handler is printed, as Python's own handlers print theirs."""
    try:
        LOGGER.log(level, message, *values, **options)
    except Exception:
        # the caller of start or poll has other transfers, whose bytes may move
        traceback.print_exc()


class Watch:
    """Logs one transfer when it settles, and from its start measures it if the log is at DEBUG."""

    def __init__(self) -> None:
        self._is_measured = LOGGER.isEnabledFor(logging.DEBUG)
        self._num_bytes: int | None = None
        # the times at which stages begin and end, as far as the transfer has come
        self._marks = list[int]()
        self._mark()

    def _mark(self) -> None:
        if self._is_measured:
            self._marks.append(perf_counter_ns())

    def made(self) -> None:
        """NIXL has made the transfer: the first stage ends."""
        self._mark()

    def posted(self, transfer: Transfer) -> None:
        """NIXL has posted the transfer, which runs: the second stage ends."""
        self._mark()
        if self._is_measured:
            # counted now: later a workspace may hold the ids of another request
            self._num_bytes = transfer.spec.num_bytes

    def settled(self, transfer: Transfer) -> None:
        """The transfer has settled: log the event, or a failure alone."""
        self._mark()
        is_failed = transfer.status is Status.FAILED
        if self._is_measured:
            event = self._event(transfer)
            level = logging.WARNING if is_failed else logging.DEBUG
            _log(level, "%s", event, extra={"event": event})
        elif is_failed:
            # as text: log records are kept, transfers are not
            _log(logging.WARNING, "%s: %s", repr(transfer), str(transfer.error))

    def _event(self, transfer: Transfer) -> TransferEvent:
        spec = transfer.spec
        stages_us = [(stop - start) / 1000 for start, stop in pairwise(self._marks)]
        # a transfer that has failed, or moved no byte, may have reached one stage only
        make_us, post_us, transfer_us = [*stages_us, 0.0, 0.0][:3]
        return TransferEvent(
            request=transfer.request,
            operation=spec.operation,
            local=spec.local,
            remote=spec.remote,
            num_bytes=spec.num_bytes if self._num_bytes is None else self._num_bytes,
            num_ids=spec.num_ids,
            make_us=make_us,
            post_us=post_us,
            transfer_us=transfer_us,
            status=transfer.status,
            code="" if transfer.error is None else transfer.error.code,
        )
