"""Claims: a reader holds the leases of other engines while its requests wait and are read.

- claim.C1: A reader claims a lease when the request arrives, renews the claim every
  :data:`RENEW_S`, and ends it when no byte of the request can move any more.
- claim.C2: A claim that got no answer is sent again. A claim that was refused stays refused.
- claim.C3: Claims on each engine are sent by a separate coroutine, so an engine that hangs delays
  only its own.
- claim.C4: A reader that can compute its request, and has no blocks for it yet, ends the claim when
  its engine is told that the claimed blocks are needed. Else requests of two engines could wait for
  each other's blocks.

:class:`SourceClaims` decides what is sent to one engine and when; :class:`Claims` sends it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplan._checks import at_most, having, instance, integer, members, name, wrong_type
from kvplan.errors import KVPlanError
from kvplan.protocol.handoff import Source
from kvplan.protocol.leases import LEASE_S, Leases
from kvplan.protocol.system import ANSWER_S, RETRY_S, Pending, Signal, System

if TYPE_CHECKING:
    from logging import Logger

RENEW_S: Final = LEASE_S / 6
"""Seconds after which a claim is renewed."""

IDLE_S: Final = 10.0
"""Seconds after which the coroutine of an engine ends that has nothing to send."""

MAX_MESSAGE_BYTES: Final = 1 << 18
"""The length of a message."""

MAX_LIST_BYTES: Final = MAX_MESSAGE_BYTES // 4
"""The length of each of a message's three lists. The rest comes with the next message."""

MAX_NAME_BYTES: Final = 1 << 10
"""The length of a lease's or a reader's name, in UTF-8."""

MAX_SOURCES: Final = 1 << 10
"""Engines on whose leases a reader has claims at a time, unless it says otherwise.

Twice as many prefill engines as the largest deployments have."""

Claim = tuple[str, str]
"""A lease and the reader that claims it."""


def _checked_claim(lease: str, reader: str) -> Claim:
    """Return a claim. Raises ``TYPE``, ``NAME``, or ``RANGE`` for a name that is too long."""
    for subject, text in (("lease", lease), ("reader", reader)):
        num_bytes = len(name(text, subject).encode(errors="surrogatepass"))
        at_most(MAX_NAME_BYTES, num_bytes, f"bytes of a {subject}", "claim a lease")
    return lease, reader


def _read_claims(values: Any) -> tuple[Claim, ...]:
    """Read untrusted claims."""
    claims = []
    for value in members(object, values, "claims"):
        strings = members(str, value, "a claim")
        if len(strings) != 2:
            raise wrong_type("a claim", "[lease, reader]", value)
        claims.append(_checked_claim(*strings))
    return tuple(claims)


@attrs.frozen
class ClaimMessage:
    """Claims to make, renew or end, and leases to ask about, of one start of an engine."""

    start: str
    claims: tuple[Claim, ...] = ()
    done: tuple[Claim, ...] = ()
    asks: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return the message as plain values, for JSON."""
        return attrs.asdict(self, recurse=False)

    @classmethod
    def of_fields(cls, fields: Any) -> ClaimMessage:
        """Read an untrusted message. Raises ``TYPE``, ``NAME`` or ``RANGE``."""
        message = instance(Mapping, fields, "a message of claims")
        return cls(
            start=name(message.get("start"), "start of a message"),
            claims=_read_claims(message.get("claims", ())),
            done=_read_claims(message.get("done", ())),
            asks=members(str, message.get("asks", ()), "leases"),
        )


def _fitting(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the first values, as many as one list of a message may have."""
    fitting = []
    num_bytes = 0
    for value in values:
        num_bytes += len(json.dumps(value)) + len(", ")
        if num_bytes > MAX_LIST_BYTES:
            break
        fitting.append(value)
    return tuple(fitting)


@attrs.frozen
class ClaimAnswer:
    """Says of each lease in a message whether it is valid; of a claim that ended, whether it was.

    Each of the first fields answers the one of the same name in the :class:`ClaimMessage`. Of the
    leases that are claimed, those in ``wanted`` have blocks that the engine needs back.
    """

    claims: tuple[bool, ...]
    done: tuple[bool, ...]
    asks: tuple[bool, ...]
    wanted: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return the answer as plain values, for JSON."""
        return attrs.asdict(self, recurse=False)

    @classmethod
    def of_fields(cls, message: ClaimMessage, fields: Any) -> ClaimAnswer:
        """Read the answer to a message. Raises ``MESSAGE``."""
        try:
            fields = instance(Mapping, fields, "answers")
            answer = cls(
                claims=members(bool, fields["claims"], "claims"),
                done=members(bool, fields["done"], "done"),
                asks=members(bool, fields["asks"], "asks"),
                wanted=members(str, fields.get("wanted", ()), "leases"),
            )
            numbers = [len(answer.claims), len(answer.done), len(answer.asks)]
            if numbers != [len(message.claims), len(message.done), len(message.asks)]:
                raise ValueError(f"{numbers} answers")
        except (ValueError, TypeError, KeyError) as error:
            action = "read answers"
            expected = "an answer to each claim"
            raise KVPlanError("MESSAGE", action, expected=expected, got=f"{error!r}") from None
        return answer


def answer_claims(leases: Leases, start: str, message: ClaimMessage) -> ClaimAnswer:
    """Apply a reader's message to the leases of this start of the engine.

    Leases of an earlier start are over.

    >>> from kvplan_nixl.serving import Driver
    >>> leases = Leases(Driver())
    >>> lease = leases.grant("request 1")
    >>> message = ClaimMessage("a1", claims=((lease, "decode 1"),), asks=("unknown",))
    >>> answer_claims(leases, "a1", message)
    ClaimAnswer(claims=(True,), done=(), asks=(False,), wanted=())
    """
    if message.start != start:
        leases.num_refused += len(message.claims) + len(message.asks)
        return ClaimAnswer(
            claims=(False,) * len(message.claims),
            done=(False,) * len(message.done),
            asks=(False,) * len(message.asks),
        )
    return ClaimAnswer(
        claims=tuple(leases.claim(lease, reader) for lease, reader in message.claims),
        done=tuple(leases.release(lease, reader) for lease, reader in message.done),
        asks=tuple(leases.is_valid(lease) for lease in message.asks),
        wanted=tuple(sorted(leases.wanted.intersection(lease for lease, _ in message.claims))),
    )


async def send_claims(source: Source, message: ClaimMessage, *, system: System) -> ClaimAnswer:
    """Send claims to an engine's listener. Raises ``PEER`` and ``MESSAGE``."""
    fields = instance(ClaimMessage, message, "a message of claims").fields()
    peer = str(instance(Source, source, "source"))
    sent = json.dumps(fields).encode()
    answer = await system.exchange(peer, source.address, "/claims", ANSWER_S, sent)
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError) as error:
        expected = "answers as JSON"
        raise KVPlanError("MESSAGE", "read answers", expected=expected, got=repr(error)) from None
    return ClaimAnswer.of_fields(message, fields)


class SourceClaims:
    """The claims on one engine and the questions to it, with its answers.

    Times are of one clock, in seconds.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.refusals: dict[Claim, KVPlanError] = {}
        self.wanted: set[Claim] = set()
        # when each claim has to be sent next
        self._due_at: dict[Claim, float] = {}
        self._done: dict[Claim, None] = {}
        # answers to come, by lease: of questions to send, and of those in the message under way
        self._unsent: dict[str, list[Pending[None]]] = {}
        self._sent: dict[str, list[Pending[None]]] = {}

    def claim(self, claim: Claim, now: float) -> None:
        """Claim a lease, and renew the claim until it ends."""
        self._due_at[claim] = now

    def release(self, claim: Claim) -> None:
        """End a claim, also one that was refused or never sent."""
        self._due_at.pop(claim, None)
        self.wanted.discard(claim)
        # The engine has nothing to end of a claim that it refused.
        if self.refusals.pop(claim, None) is None:
            self._done[claim] = None

    def ask(self, lease: str) -> Pending[None]:
        """Ask once whether a lease is valid. Fails if not, or without an answer."""
        answer = Pending[None]()
        self._unsent.setdefault(lease, []).append(answer)
        return answer

    def next_due(self, now: float) -> float | None:
        """Return when there is something to send, None if there is nothing at all."""
        if self._done or self._unsent:
            return now
        return min(self._due_at.values(), default=None)

    def take_message(self, now: float) -> ClaimMessage:
        """Return what has to be sent now, for one answer or failure, as much as a message takes."""
        claims = _fitting(claim for claim, due_at in self._due_at.items() if due_at <= now)
        message = ClaimMessage(
            self.source.start, claims, _fitting(self._done), _fitting(self._unsent)
        )
        # An end is sent once: if it is lost, the claim expires, since it is not renewed.
        for claim in message.done:
            del self._done[claim]
        for lease in message.asks:
            self._sent[lease] = self._unsent.pop(lease)
        return message

    def take_answer(
        self, message: ClaimMessage, answer: ClaimAnswer, now: float
    ) -> list[KVPlanError]:
        """Apply the answer to a message that was sent at ``now``, and return the refusals."""
        refusals = []
        for claim, is_valid in zip(message.claims, answer.claims, strict=True):
            # A claim may have ended meanwhile.
            if claim not in self._due_at:
                continue
            lease, _ = claim
            self.wanted.discard(claim)
            if is_valid:
                self._due_at[claim] = now + RENEW_S
                if lease in answer.wanted:
                    self.wanted.add(claim)
            else:
                del self._due_at[claim]
                self.refusals[claim] = self._lease_error(lease)
                refusals.append(self.refusals[claim])
        for lease, is_valid in zip(message.asks, answer.asks, strict=True):
            self._resolve(lease, None if is_valid else self._lease_error(lease))
        return refusals

    def take_failure(self, message: ClaimMessage, error: KVPlanError, now: float) -> None:
        """Send the claims of a message again, which got no answer. Questions get the error."""
        for claim in message.claims:
            if claim in self._due_at:
                self._due_at[claim] = now + RETRY_S
        for lease in message.asks:
            self._resolve(lease, error)

    def _resolve(self, lease: str, error: KVPlanError | None) -> None:
        """Answer all questions about a lease in the message under way."""
        for answer in self._sent.pop(lease):
            if error is None:
                answer.resolve(None)
            else:
                answer.fail(error)

    def _lease_error(self, lease: str) -> KVPlanError:
        reasons = "it was read already, no reader claimed it in time, or the engine has restarted"
        return KVPlanError(
            "LEASE",
            f"read {lease!r} from {self.source}",
            expected="a valid lease",
            got=f"one that has ended: {reasons}; or one that has too many readers",
            hint="compute the prompt again, or see in the source's log how the lease ended",
            lease=lease,
            source=self.source,
        )


class Claims:
    """The claims of a reader on the leases of other engines, kept up in the background.

    Claims are on the leases of at most ``max_sources`` engines at a time.
    :attr:`num_refused` counts claims that came too late, :attr:`num_unanswered` messages without an
    answer.
    """

    MAX_SOURCES: Final = MAX_SOURCES

    def __init__(
        self,
        logger: Logger,
        system: System,
        max_sources: int = MAX_SOURCES,
    ) -> None:
        self._logger: Logger = having("warning", logger, "logger", "a logger")
        self._max_sources = integer(max_sources, "max_sources", low=1)
        # One lock guards the claims on all engines.
        self._by_source: dict[Source, SourceClaims] = {}
        self._changes: dict[Source, Signal] = {}
        self._system = instance(System, system, "system")
        self._lock = system.lock()
        self._is_closed = False
        self.num_refused: int = 0
        self.num_unanswered: int = 0

    def claim(self, source: Source, lease: str, reader: str) -> None:
        """Claim a lease until :meth:`release`. Raises ``RANGE`` for claims on too many engines."""
        claim = _checked_claim(lease, reader)
        with self._lock:
            self._claims_on(source).claim(claim, self._system.monotonic())

    def release(self, source: Source, lease: str, reader: str) -> None:
        """End a claim, since the reader is done or will not read."""
        claim = _checked_claim(lease, reader)
        instance(Source, source, "source")
        # Where nothing can be sent, the lease expires unless another reader renews it.
        with self._lock, suppress(KVPlanError):
            self._claims_on(source).release(claim)

    def ask(self, source: Source, lease: str) -> Pending[None]:
        """Ask once whether a lease is valid.

        Fails with ``LEASE`` if it is not, and with ``PEER`` if no answer comes.
        """
        name(lease, "lease")
        instance(Source, source, "source")
        with self._lock:
            try:
                return self._claims_on(source).ask(lease)
            except KVPlanError as error:
                refused = Pending[None]()
                refused.fail(error)
                return refused

    def refusal(self, source: Source, lease: str, reader: str) -> KVPlanError | None:
        """Return the error of a claim that was refused, None of any other."""
        claim = _checked_claim(lease, reader)
        with self._lock:
            source_claims = self._by_source.get(instance(Source, source, "source"))
            return None if source_claims is None else source_claims.refusals.get(claim)

    def is_wanted(self, source: Source, lease: str, reader: str) -> bool:
        """Return whether the engine needs the claimed blocks back, by rule claim.C4."""
        claim = _checked_claim(lease, reader)
        with self._lock:
            source_claims = self._by_source.get(instance(Source, source, "source"))
            return source_claims is not None and claim in source_claims.wanted

    def close(self) -> None:
        """Send the claims that have ended, and nothing more."""
        with self._lock:
            self._is_closed = True
            for changed in self._changes.values():
                changed.set()

    def _claims_on(self, source: Source) -> SourceClaims:
        """The claims on an engine, at which its coroutine looks soon. The caller holds the lock.

        Raises ``RANGE`` for too many engines.
        """
        if instance(Source, source, "source") not in self._by_source:
            action = f"claim leases of {source}"
            at_most(self._max_sources, len(self._by_source) + 1, "engines at a time", action)
            source_claims = SourceClaims(source)
            self._by_source[source] = source_claims
            self._changes[source] = self._system.signal()
            name = f"kvplan claims {source.engine_id}"
            self._system.start(name, partial(self._run, source_claims, self._changes[source]))
        self._changes[source].set()
        return self._by_source[source]

    async def _run(self, source_claims: SourceClaims, changed: Signal) -> None:
        """Send messages to one engine, as long as there are any."""
        is_silent = False
        while (message := await self._next_message(source_claims, changed)) is not None:
            sent_at = self._system.monotonic()
            try:
                answer = await send_claims(source_claims.source, message, system=self._system)
            except KVPlanError as error:
                # Silence is logged once, when it starts.
                if not is_silent:
                    self._logger.warning("leases may expire: prefill does not answer: %s", error)
                is_silent = True
                with self._lock:
                    self.num_unanswered += 1
                    source_claims.take_failure(message, error, self._system.monotonic())
                continue
            is_silent = False
            with self._lock:
                # The lease is renewed from when the message was sent, or later.
                refusals = source_claims.take_answer(message, answer, sent_at)
                self.num_refused += len(refusals)
            for refusal in refusals:
                self._logger.error("%s", refusal)

    async def _next_message(
        self, source_claims: SourceClaims, changed: Signal
    ) -> ClaimMessage | None:
        """Wait until there is something to send. None when the coroutine has to end."""
        idle_until = self._system.monotonic() + IDLE_S
        while True:
            with self._lock:
                now = self._system.monotonic()
                due = source_claims.next_due(now)
                if due is not None and due <= now:
                    return source_claims.take_message(now)
                # A refusal is kept until its claim ends, and so is the coroutine that has it.
                is_idle = due is None and now >= idle_until and not source_claims.refusals
                if self._is_closed or is_idle:
                    del self._by_source[source_claims.source]
                    del self._changes[source_claims.source]
                    return None
            wait_s = (idle_until if due is None else due) - now
            # Only with refusals can it be past the idle time: then only a change matters.
            await changed.wait(wait_s if wait_s > 0 else None)
