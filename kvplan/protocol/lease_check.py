"""Lease checks: a source is asked whether the lease of a read is valid, rule read.R4 of reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import attrs

from kvplan.errors import KVPlanError
from kvplan.protocol.claims import Claims
from kvplan.protocol.read import Read
from kvplan.protocol.system import RETRY_S, Pending, System

if TYPE_CHECKING:
    from logging import Logger

ASK_S: Final = 5.0
"""Seconds after which a source is asked about a lease whose bytes still move."""

SILENCE_S: Final = 30.0
"""Seconds without an answer after which a source counts as gone."""


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
