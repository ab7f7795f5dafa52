"""Claims: how a reader holds the leases of other engines while its requests wait and are read.

- C1: A reader claims a lease when the request arrives, renews the claim every :data:`RENEW_S`, and ends it when no byte
  of the request can move any more.
- C2: No answer is no refusal: a claim that could not be sent is sent again. A refused one stays refused.
- C3: Nothing waits. Each engine has a thread of its own, so one that hangs delays no other engine's claims.

The threads are :class:`Claims`. What they send and when is :class:`SourceClaims`, without thread, clock or network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from logging import Logger
from typing import Any, Final

import attrs

from kvplan._checks import having, instance, members, name, wrong_type
from kvplan.connector.handoff import Source
from kvplan.connector.leases import LEASE_S, Leases
from kvplan.errors import KVPlanError

RENEW_S: Final = LEASE_S / 6
"""Seconds after which a claim is renewed."""

RETRY_S: Final = 1.0
"""Seconds after which a claim is sent again that got no answer."""

IDLE_S: Final = 10.0
"""Seconds after which the thread of an engine ends that has nothing to send."""

Claim = tuple[str, str]
"""A lease and the reader that claims it."""


@attrs.frozen
class ClaimMessage:
    """Claims to take or renew, claims to end, and leases that are asked about; of one start of an engine."""

    start: str
    claims: tuple[Claim, ...] = ()
    done: tuple[Claim, ...] = ()
    asks: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.claims or self.done or self.asks)

    def fields(self) -> dict[str, Any]:
        """Return the message as plain values, for JSON."""
        return attrs.asdict(self)

    @classmethod
    def of_fields(cls, fields: Any) -> ClaimMessage:
        """Read a message that a stranger may have written. Raises ``TYPE`` or ``NAME``."""
        parts = instance(Mapping, fields, "a message of claims")
        return cls(
            name(parts.get("start"), "start of a message"),
            _claims(parts.get("claims", ())),
            _claims(parts.get("done", ())),
            members(str, parts.get("asks", ()), "leases"),
        )


def _claims(values: Any) -> tuple[Claim, ...]:
    claims = []
    for value in members(object, values, "claims"):
        strings = members(str, value, "a claim")
        if len(strings) != 2:
            raise wrong_type("a claim", "[lease, reader]", value)
        claims.append(_claim(*strings))
    return tuple(claims)


def _claim(lease: str, reader: str) -> Claim:
    return name(lease, "lease"), name(reader, "reader")


@attrs.frozen
class ClaimAnswer:
    """Whether the lease of each claim stands, of each claim that ended stood till now, and of each that was asked."""

    claims: tuple[bool, ...]
    done: tuple[bool, ...]
    asks: tuple[bool, ...]

    @classmethod
    def of_fields(cls, message: ClaimMessage, fields: Any) -> ClaimAnswer:
        """Read the answer to a message. Raises ``MESSAGE``."""
        try:
            answer = cls(
                *(members(bool, fields[kind], kind) for kind in ("claims", "done", "asks"))
            )
            numbers = [len(answer.claims), len(answer.done), len(answer.asks)]
            if numbers != [len(message.claims), len(message.done), len(message.asks)]:
                raise ValueError(f"{numbers} answers")
        except (ValueError, TypeError, KeyError) as error:
            expected = "an answer to each claim"
            raise KVPlanError(
                "MESSAGE", "read answers", expected=expected, got=f"{error!r}"
            ) from None
        return answer


def answer_claims(leases: Leases, start: str, message: ClaimMessage) -> ClaimAnswer:
    """Apply a reader's message to the leases of this start of the engine; those of an earlier one are over.

    >>> leases = Leases()
    >>> lease = leases.grant("request 1")
    >>> answer_claims(leases, "a1", ClaimMessage("a1", claims=((lease, "decode 1"),), asks=("of nobody",)))
    ClaimAnswer(claims=(True,), done=(), asks=(False,))
    """
    if message.start != start:
        leases.num_refused += len(message.claims) + len(message.asks)
        return ClaimAnswer(
            *((False,) * len(part) for part in (message.claims, message.done, message.asks))
        )
    return ClaimAnswer(
        tuple(leases.claim(lease, reader) for lease, reader in message.claims),
        tuple(leases.end(lease, reader) for lease, reader in message.done),
        tuple(leases.stands(lease) for lease in message.asks),
    )


class SourceClaims:
    """What one engine has to be told and asked, and what it has answered. Times are of one clock, in seconds."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.refusals: dict[Claim, KVPlanError] = {}
        self._renewals: dict[Claim, float] = {}  # when each claim has to be sent
        self._done: dict[Claim, None] = {}
        self._asks: dict[str, list[Future[None]]] = {}
        self._asked: dict[str, list[Future[None]]] = {}

    def begin(self, claim: Claim, now: float) -> None:
        """Claim a lease, and go on claiming it."""
        self._renewals[claim] = now

    def end(self, claim: Claim) -> None:
        """End a claim, also one that was refused or never sent."""
        self._renewals.pop(claim, None)
        if self.refusals.pop(claim, None) is None:
            self._done[claim] = None

    def ask(self, lease: str) -> Future[None]:
        """Ask once whether a lease stands; the future has an error where it does not, or nobody answers."""
        answer: Future[None] = Future()
        self._asks.setdefault(lease, []).append(answer)
        return answer

    def due(self, now: float) -> float | None:
        """Return when there is something to send, None where nothing is ever."""
        if self._done or self._asks:
            return now
        return min(self._renewals.values(), default=None)

    def message(self, now: float) -> ClaimMessage:
        """Take what has to be sent now."""
        claims = tuple(claim for claim, due in self._renewals.items() if due <= now)
        done = tuple(self._done)
        asks = tuple(self._asks)
        self._done.clear()
        self._asked.update(self._asks)
        self._asks.clear()
        return ClaimMessage(self.source.start, claims, done, asks)

    def answered(self, message: ClaimMessage, answer: ClaimAnswer, now: float) -> list[KVPlanError]:
        """Take the answer to a message that was taken at ``now``; returns what was refused."""
        refused = []
        for claim, stands in zip(message.claims, answer.claims, strict=True):
            if claim not in self._renewals:  # it has ended meanwhile
                continue
            if stands:
                self._renewals[claim] = now + RENEW_S
            else:
                del self._renewals[claim]
                self.refusals[claim] = self._over(claim[0])
                refused.append(self.refusals[claim])
        for lease, stands in zip(message.asks, answer.asks, strict=True):
            self._settle(lease, None if stands else self._over(lease))
        return refused

    def failed(self, message: ClaimMessage, error: KVPlanError, now: float) -> None:
        """Send the claims of a message again, which got no answer. Whoever asked is told."""
        for claim in message.claims:
            if claim in self._renewals:
                self._renewals[claim] = now + RETRY_S
        for lease in message.asks:
            self._settle(lease, error)

    def _settle(self, lease: str, error: KVPlanError | None) -> None:
        for answer in self._asked.pop(lease):
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

    def _over(self, lease: str) -> KVPlanError:
        return KVPlanError(
            "LEASE",
            f"read {lease!r} from {self.source}",
            expected="a lease that stands",
            got="one that is over: it was read already, nobody claimed it in time, or the engine has restarted",
        )


class Claims:
    """The claims of a reader on the leases of other engines, kept up in the background.

    ``send`` exchanges a message with an engine, and raises ``PEER`` or ``MESSAGE``.
    """

    def __init__(self, logger: Logger, send: Callable[[Source, ClaimMessage], ClaimAnswer]) -> None:
        self._logger = instance(Logger, logger, "logger")
        self._send = having("__call__", send, "send of claims", "a function")
        self._by_source: dict[Source, SourceClaims] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def begin(self, source: Source, lease: str, reader: str) -> None:
        """Claim a lease until :meth:`end`."""
        claim = _claim(lease, reader)
        with self._changed:
            self._claims_on(source).begin(claim, time.monotonic())

    def end(self, source: Source, lease: str, reader: str) -> None:
        """End a claim: the reader is done, or will not read."""
        claim = _claim(lease, reader)
        with self._changed:
            self._claims_on(source).end(claim)

    def ask(self, source: Source, lease: str) -> Future[None]:
        """Ask once whether a lease stands. The future has ``LEASE`` where it does not, ``PEER`` without an answer."""
        name(lease, "lease")
        with self._changed:
            return self._claims_on(source).ask(lease)

    def refusal(self, source: Source, lease: str, reader: str) -> KVPlanError | None:
        """Return why a claim was refused, None where it was not."""
        claim = _claim(lease, reader)
        with self._changed:
            source_claims = self._by_source.get(instance(Source, source, "source"))
            return None if source_claims is None else source_claims.refusals.get(claim)

    def close(self) -> None:
        """Send what has ended, and nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _claims_on(self, source: Source) -> SourceClaims:
        """Return the claims on an engine, whose thread looks at them when the caller lets go of the lock."""
        if instance(Source, source, "source") not in self._by_source:
            source_claims = SourceClaims(source)
            self._by_source[source] = source_claims
            thread_name = f"kvplan claims {source.engine_id}"
            threading.Thread(
                target=self._run, args=(source_claims,), name=thread_name, daemon=True
            ).start()
        self._changed.notify_all()
        return self._by_source[source]

    def _run(self, source_claims: SourceClaims) -> None:
        is_silent = False
        while (message := self._next(source_claims)) is not None:
            began = time.monotonic()
            try:
                answer = self._send(source_claims.source, message)
            except KVPlanError as error:
                if not is_silent:
                    self._logger.warning("leases may end, since claims get no answer: %s", error)
                is_silent = True
                with self._changed:
                    source_claims.failed(message, error, time.monotonic())
                continue
            is_silent = False
            with self._changed:
                refused = source_claims.answered(message, answer, began)
            for refusal in refused:
                self._logger.error("%s", refusal)

    def _next(self, source_claims: SourceClaims) -> ClaimMessage | None:
        """Wait until there is something to send; returns None where the thread has to end."""
        with self._changed:
            idle_until = time.monotonic() + IDLE_S
            while True:
                now = time.monotonic()
                due = source_claims.due(now)
                if due is not None and due <= now:
                    return source_claims.message(now)
                if self._is_closed or (
                    due is None and now >= idle_until and not source_claims.refusals
                ):
                    del self._by_source[source_claims.source]
                    return None
                self._changed.wait(max(0.0, (idle_until if due is None else due) - now) or None)
