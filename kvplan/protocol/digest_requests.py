"""Requests for digests: readers send them, and an engine's workers compute the digests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs

from kvplan._checks import instance, interval, members, name, seconds
from kvplan._text import brief_repr
from kvplan.describe.blocks import POSITION_END, Range
from kvplan.errors import KVPlanError
from kvplan.protocol.handoff import Source
from kvplan.protocol.leases import Leases
from kvplan.protocol.system import ANSWER_S, RETRY_S, LongPolls, System

MAX_REQUESTS: Final = 1 << 12
"""Requests that an engine keeps at a time, of which each has tens of kilobytes of digests."""

MAX_REQUEST_BYTES: Final = 1 << 16
"""The length of a request: hundreds of groups."""

ASK_AGAIN_S: Final = 0.005
"""Seconds after which a reader asks again for digests that are not computed yet."""

WAIT_S: Final = 1.0
"""Seconds for which an engine holds a request whose digests are not computed yet."""

MAX_WAITING: Final = 1 << 8
"""Requests that an engine holds at a time, each on a connection. One more is answered at once."""


@attrs.frozen
class DigestRequest:
    """Ranges of positions by token group, whose digests a reader of ``lease`` asks for.

    Of states, the last one counts.
    """

    lease: str
    tokens: tuple[tuple[str, Range], ...]

    __repr__ = brief_repr

    @classmethod
    def of(cls, lease: str, tokens: Mapping[str, Any]) -> DigestRequest:
        """Make a request of untrusted values.

        Raises ``TYPE``, ``RANGE`` or ``NAME``.
        """
        ranges = []
        for group in sorted(instance(Mapping, tokens, "tokens of digests")):
            span = interval(tokens[group], f"tokens of group {group!r}", POSITION_END)
            ranges.append((name(group, "a group"), span))
        return cls(name(lease, "lease"), tuple(ranges))

    @classmethod
    def of_fields(cls, start: str, body: Any) -> DigestRequest:
        """Read an untrusted request to this start of the engine. Raises ``LEASE`` for another."""
        fields = instance(Mapping, body, "a request for digests")
        asked = instance(str, fields.get("start", ""), "start of a request")
        request = cls.of(fields.get("lease", ""), fields.get("tokens", {}))
        if asked != start:
            raise KVPlanError(
                "LEASE", "compute digests", expected=f"start {start}", got="another start"
            )
        return request

    def fields(self, start: str) -> dict[str, Any]:
        """Return the request to one start of an engine as plain values, for JSON."""
        return {"start": start, "lease": self.lease, "tokens": dict(self.tokens)}


class DigestRequests:
    """The requests for digests of valid ``leases``, and the answers. Safe for several threads.

    >>> from kvplan_nixl.serving import Driver
    >>> leases = Leases(Driver())
    >>> requests = DigestRequests(leases, Driver())
    >>> request = DigestRequest.of(leases.grant("r"), {"attn": (0, 40)})
    >>> requests.ask(request)
    >>> requests.take() == [request], requests.take()
    (True, [])
    >>> requests.put(request, [{"of worker": 0}])
    >>> requests.ask(request)
    [{'of worker': 0}]
    """

    def __init__(self, leases: Leases, system: System) -> None:
        self._leases: Leases = instance(Leases, leases, "leases of digests")
        self._lock = system.lock()
        self._answers: dict[DigestRequest, list[Mapping[str, Any]] | None] = {}
        self._new: list[DigestRequest] = []
        self._polls = LongPolls(system)

    def ask(self, request: DigestRequest) -> list[Mapping[str, Any]] | None:
        """Return the digests of all workers, None while they are not computed.

        Raises ``LEASE`` if the lease has ended, ``RANGE`` if there are too many requests.
        """
        with self._lock:
            # a lease that ends from here on is dropped after this
            if not self._leases.is_valid(request.lease):
                action = f"digest {request.lease!r}"
                expected = "a valid lease"
                raise KVPlanError("LEASE", action, expected=expected, got="one that has ended")
            # All ranks of a reader ask the same; the workers compute it once.
            if request not in self._answers:
                if len(self._answers) >= MAX_REQUESTS:
                    expected = f"at most {MAX_REQUESTS} requests"
                    raise KVPlanError("RANGE", "compute digests", expected=expected, got="one more")
                self._answers[request] = None
                self._new.append(request)
            return self._answers[request]

    async def answer(self, request: DigestRequest) -> list[Mapping[str, Any]] | None:
        """Return the digests when they are computed, None if they are not within ``WAIT_S``."""
        return await self._polls.hold([request], partial(self.ask, request), WAIT_S, MAX_WAITING)

    def take(self) -> list[DigestRequest]:
        """Return the requests that have come since the last call."""
        with self._lock:
            requests = self._new
            self._new = []
        return requests

    def put(self, request: DigestRequest, digests: Sequence[dict[str, Any]]) -> None:
        """Answer a request, with the digests of each worker."""
        with self._lock:
            # A lease may have ended while its digests were computed.
            if request in self._answers:
                self._answers[request] = [*members(dict, digests, "digests")]
                self._polls.wake(request)

    def drop(self, lease: str) -> None:
        """Drop the requests of a lease that has ended."""
        with self._lock:
            for request in [*self._answers]:
                if request.lease == lease:
                    del self._answers[request]
                    self._polls.wake(request)


async def fetch_digests(
    source: Source, request: DigestRequest, timeout_s: float, *, system: System
) -> list[Mapping[str, Any]]:
    """Fetch the digests of all workers of an engine, when they have computed them.

    An engine that is too busy to answer is asked again. Raises ``PEER``, ``MESSAGE``, and ``LEASE``
    if the lease has ended.
    """
    instance(Source, source, "source")
    instance(DigestRequest, request, "a request for digests")
    stop = system.monotonic() + seconds(timeout_s, "timeout_s")
    sent = json.dumps(request.fields(source.start)).encode()
    # the reason of the last attempt, if it got no answer
    silence: KVPlanError | None = None
    while system.monotonic() < stop:
        try:
            answer = await system.exchange(str(source), source.address, "/digests", ANSWER_S, sent)
        except KVPlanError as error:
            if error.code != "PEER":
                raise
            silence = error
            await system.sleep(RETRY_S)
            continue
        silence = None
        try:
            fields = json.loads(answer)
            digests, has_ended = fields["digests"], fields.get("has_ended")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise KVPlanError(
                "MESSAGE", "read digests", expected="digests as JSON", got=repr(error)
            ) from None
        if has_ended:
            action = f"check {request.lease!r} from {source}"
            got = "one that has ended"
            raise KVPlanError("LEASE", action, expected="a valid lease", got=got)
        if digests is not None:
            return [*members(dict, digests, "digests")]
        await system.sleep(ASK_AGAIN_S)
    expected = f"digests within {timeout_s:g} s"
    raise silence or KVPlanError(
        "PEER", f"check {request.lease!r} from {source}", expected=expected, got="none"
    )
