"""What :class:`~kvplan.protocol.Reads` knows of a request: its reads, and the one under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvplan.describe.blocks import Request
from kvplan.errors import KVPlanError
from kvplan.executor import Transfer
from kvplan.plan import ReadSpec, TransferPlan
from kvplan.protocol.lease_check import LeaseCheck
from kvplan.protocol.read import Read, ReadResult, error_of
from kvplan.protocol.system import Pending
from kvplan.staging import StagedTransfer

Digest = Callable[[Request], Mapping[str, Any]]
"""Computes the digests of a request's local blocks, for the comparison of rule read.R6."""


@attrs.define(eq=False)
class RequestReads:
    """The partial reads of a request, done one after the other; most requests have one.

    ``waiting`` have not started, and ``results`` are of those that have ended. No more come once
    ``has_last``. ``error`` is the first reason to fail. A read ``is_under_way`` until it has a
    result, and ``is_moving`` if its bytes may move.
    """

    waiting: deque[Read] = attrs.field(factory=deque)
    results: list[ReadResult] = attrs.field(factory=list)
    is_under_way: bool = False
    is_moving: bool = False
    has_last: bool = False
    error: KVPlanError | None = None
    is_reported_late: bool = False

    def result(self, request: str) -> ReadResult:
        """Return the result of all reads together."""
        return ReadResult(
            request=request,
            error=self.error,
            num_bytes=sum(result.num_bytes for result in self.results),
            seconds=sum(result.seconds for result in self.results),
            post_seconds=sum(result.post_seconds for result in self.results),
            transfer_seconds=sum(result.transfer_seconds for result in self.results),
            num_descriptors=sum(result.num_descriptors for result in self.results),
            is_staged=any(result.is_staged for result in self.results),
        )


@attrs.frozen(eq=False)
class PendingRead:
    """A read that came at a time, and waits for a handshake."""

    read: Read
    came_at: float


@attrs.frozen(eq=False)
class DigestCheck:
    """The comparison of rule read.R6: ``expected`` are digests of the source's workers."""

    digest: Digest
    request: Request
    expected: Pending[list[Mapping[str, Any]]]


@attrs.define(eq=False)
class Job:
    """A read under way, and its transfers.

    ``unposted`` are transfers to be handed over, none of a read that has failed. ``num_changes``
    counts what was seen to happen to the others. ``error`` is the first reason to fail. Once
    ``is_settled``, no byte can move any more. If its engine ``was_connected`` when it began, the
    connection may have been lost since; it ``is_lost`` once that has shown.
    """

    read: Read
    plan: TransferPlan
    lease_check: LeaseCheck
    began_at: float
    was_connected: bool
    is_lost: bool = False
    digest_check: DigestCheck | None = None
    transfers: list[Transfer | StagedTransfer] = attrs.field(factory=list)
    unposted: deque[ReadSpec] = attrs.field(factory=deque)
    num_changes: int = -1
    error: KVPlanError | None = None
    is_settled: bool = False
    is_reported_late: bool = False
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
        """Whether an old connection was lost, the lease was not, and no failure was reported."""
        has_lease = self.lease_check.error is None
        return self.was_connected and self.is_lost and has_lease and not self.is_reported_late

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
