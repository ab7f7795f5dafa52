"""What :class:`~kvplan.protocol.Reads` knows of a request: its reads, and the one under way."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplan.describe.blocks import Request
from kvplan.errors import KVPlanError
from kvplan.executor import Transfer
from kvplan.plan import ReadSpec, TransferPlan
from kvplan.protocol.claims import Claims
from kvplan.protocol.read import Read, ReadResult, error_of
from kvplan.protocol.system import RETRY_S, Pending, System
from kvplan.staging import StagedTransfer

if TYPE_CHECKING:
    from logging import Logger

ASK_S: Final = 5.0
"""Seconds after which a source is asked about a lease whose bytes still move."""

SILENCE_S: Final = 30.0
"""Seconds without an answer after which a source counts as gone."""

Digest = Callable[[Request], Mapping[str, Any]]
"""Computes the digests of a request's local blocks, for the comparison of rule read.R6."""


@attrs.define(eq=False)
class RequestReads:
    """The partial reads of a request, done one after the other; most requests have one.

    ``queue`` has the reads that have no result yet. The first one ``is_moving``: it waits for a
    handshake since ``came_at``, or its bytes may move. ``results`` are of those that have ended. No
    more come once ``has_last``. ``error`` is the first reason to fail.
    """

    request: str
    queue: deque[Read] = attrs.field(factory=deque)
    is_moving: bool = False
    came_at: float = 0.0
    results: list[ReadResult] = attrs.field(factory=list)
    has_last: bool = False
    error: KVPlanError | None = None
    is_reported_late: bool = False

    def result(self) -> ReadResult:
        """Return the result of all reads together."""
        return ReadResult(
            request=self.request,
            error=self.error,
            num_bytes=sum(result.num_bytes for result in self.results),
            seconds=sum(result.seconds for result in self.results),
            post_seconds=sum(result.post_seconds for result in self.results),
            transfer_seconds=sum(result.transfer_seconds for result in self.results),
            num_descriptors=sum(result.num_descriptors for result in self.results),
            is_staged=any(result.is_staged for result in self.results),
        )


@attrs.define(eq=False)
class LeaseCheck:
    """The questions to a source about the lease of one read, by rule read.R4.

    ``asked_at`` is when the source was last asked. ``confirmed_at`` is when it was asked the last
    question that it answered with yes. ``error`` says that the lease has ended, or that the source
    is silent.
    """

    read: Read
    claims: Claims
    logger: Logger
    system: System
    asked_at: float
    confirmed_at: float
    answer: Pending[None] | None = None
    has_last_byte: bool = False
    is_confirmed: bool = False  # the lease was valid when the last byte had come
    error: KVPlanError | None = None

    def begin_last(self) -> None:
        """Ask once more, since the last byte has come. Earlier questions say nothing about it."""
        self.has_last_byte = True
        self.asked_at = -math.inf
        self.answer = None

    def is_due(self, now: float) -> bool:
        """Return whether an answer has come, or it is time to ask."""
        if self.answer is not None:
            return self.answer.done
        return now - self.asked_at >= (RETRY_S if self.has_last_byte else ASK_S)

    def poll(self) -> None:
        """Take the answer that has come, and ask again when it is time."""
        now = self.system.monotonic()
        if self.answer is not None and self.answer.done:
            error = self.answer.error
            self.answer = None
            self._take(error, now)
        is_over = self.is_confirmed or self.error is not None
        if self.answer is None and not is_over and self.is_due(now):
            self.asked_at = now
            self.answer = self.claims.ask(self.read.source, self.read.lease)

    def _take(self, error: KVPlanError | None, now: float) -> None:
        if error is None:
            self.confirmed_at = self.asked_at
            self.is_confirmed = self.has_last_byte
        elif error.code == "LEASE" or now - self.confirmed_at > SILENCE_S:
            self.error = error
        else:
            request = self.read.request
            self.logger.warning(
                "request %r: waiting for the lease to be confirmed: %s", request, error
            )


@attrs.define(eq=False)
class Job:
    """A read under way, and its transfers.

    ``unposted`` are transfers to be handed over, none of a read that has failed. ``num_changes``
    counts what was seen to happen to the others. ``error`` is the first reason to fail. Once
    ``is_settled``, no byte can move any more. If its engine ``was_connected`` when it began, the
    connection may have been lost since; it ``is_lost`` once that has shown. ``digests`` are those
    of the source's workers, for rule read.R6.
    """

    reads: RequestReads
    read: Read
    plan: TransferPlan
    lease_check: LeaseCheck
    began_at: float
    was_connected: bool
    is_lost: bool = False
    digests: Pending[list[Mapping[str, Any]]] | None = None
    transfers: list[Transfer | StagedTransfer] = attrs.field(factory=list)
    unposted: deque[ReadSpec] = attrs.field(factory=deque)
    num_changes: int = -1
    error: KVPlanError | None = None
    is_settled: bool = False
    post_seconds: float = 0.0
    transfer_seconds: float = 0.0

    @property
    def held_error(self) -> KVPlanError | None:
        """The error of a transfer that has failed although its bytes may still move, if any."""
        for transfer in self.transfers:
            if transfer.error is not None and not transfer.status.is_settled:
                return transfer.error
        return None

    @property
    def may_repeat(self) -> bool:
        """Whether an old connection was lost, the lease was not, and no failure is known yet."""
        is_new = self.reads.error is None and self.lease_check.error is None
        return self.was_connected and self.is_lost and is_new

    def result(self, now: float) -> ReadResult:
        """Return the result of a read that has ended at ``now``."""
        return ReadResult(
            request=self.read.request,
            error=self.error and error_of(self.read, self.error),
            num_bytes=sum(transfer.num_bytes for transfer in self.transfers),
            seconds=now - self.began_at,
            post_seconds=self.post_seconds,
            transfer_seconds=self.transfer_seconds,
            num_descriptors=sum(transfer.num_descriptors for transfer in self.transfers),
            is_staged=any(isinstance(transfer, StagedTransfer) for transfer in self.transfers),
        )
