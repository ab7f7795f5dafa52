"""The listener of an engine: others fetch its offers and claim its leases.

``GET /`` returns the offers of all workers. ``POST /claims`` takes a
:class:`~kvplan.protocol.claims.ClaimMessage` and returns the answer to each claim. ``POST
/digests`` takes a :class:`~kvplan.protocol.digest_requests.DigestRequest` and returns digests,
when workers have computed them. ``POST /ask`` returns what rooms have of requests that the engine
computes. Who may ask is decided by the :class:`~kvplan.protocol.system.System` that serves.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, Final

import attrs

from kvplan._checks import check_fields, instance, members, name
from kvplan._text import brief_repr, count, shown
from kvplan.errors import KVPlanError
from kvplan.protocol.claims import MAX_MESSAGE_BYTES, ClaimMessage, answer_claims
from kvplan.protocol.digest_requests import MAX_REQUEST_BYTES, DigestRequest, DigestRequests
from kvplan.protocol.handoff import Source
from kvplan.protocol.leases import Leases
from kvplan.protocol.room_contents import MAX_QUESTION_BYTES, RoomStore
from kvplan.protocol.system import TOKEN_BYTES, Route, System

MAX_PARTS: Final = 1 << 12
"""The brackets and commas in an answer: thousands of workers."""


@attrs.frozen
class Offers:
    """The offers of all workers of an engine, each as bytes."""

    engine_id: str
    start: str
    workers: tuple[bytes, ...] = attrs.field(repr=False)

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "offers", name, "engine_id", "start")
        members(bytes, self.workers, "offers")

    def encode(self) -> bytes:
        """Return the offers as JSON, which :meth:`decode` reads."""
        texts = [b64encode(offer).decode() for offer in self.workers]
        fields = {"engine_id": self.engine_id, "start": self.start, "workers": texts}
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Offers:
        """Read the offers in an answer. Raises ``TYPE`` for no bytes, ``MESSAGE`` for others."""
        instance(bytes, data, "offers")
        # nothing is parsed that could become more parts than an answer has
        num_parts = sum(map(data.count, (b"[", b"{", b",")))
        if num_parts > MAX_PARTS:
            raise _no_offers(f"at most {MAX_PARTS} brackets and commas", f"{num_parts}")
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            raise _no_offers("JSON", f"{count(len(data), 'byte')} of something else") from None
        if not isinstance(fields, dict) or not isinstance(fields.get("workers"), list):
            raise _no_offers("a list of workers", shown(fields))
        try:
            texts = members(str, fields["workers"], "offers")
            workers = tuple(b64decode(text, validate=True) for text in texts)
            return cls(fields.get("engine_id", ""), fields.get("start", ""), workers)
        except KVPlanError as error:
            raise _no_offers(error.expected, error.got) from None
        except ValueError:
            raise _no_offers("workers as base64", "other characters") from None


def _no_offers(expected: str, got: str) -> KVPlanError:
    return KVPlanError("MESSAGE", "read offers", expected=expected, got=got)


class Listener:
    """Serves the offers of an engine's workers, and answers claims from its ``leases``.

    It announces ``host``, and listens on ``bind``, by default ``host``, at ``port``, by default one
    that is free. Readers find it by its :attr:`source`. :attr:`digests` are those that they ask
    for, and :attr:`rooms` has entries of rooms. Raises ``PEER`` if it cannot listen.

    >>> from kvplan_nixl.serving import Driver
    >>> system = Driver()
    >>> leases = Leases(system)
    >>> listener = Listener("prefill", "127.0.0.1", [b"offer of worker 0"], leases, system=system)
    >>> system.run(listener.check(10))
    >>> listener.close()
    """

    def __init__(
        self,
        engine_id: str,
        host: str,
        workers: Sequence[bytes],
        leases: Leases,
        *,
        port: int = 0,
        bind: str | None = None,
        system: System,
    ) -> None:
        instance(System, system, "system")
        # Another start of this engine has other leases, and other memory.
        start = system.token_hex(TOKEN_BYTES)
        offers = members(bytes, workers, "offers of a listener")
        encoded_offers = Offers(name(engine_id, "engine_id"), start, offers).encode()
        instance(Leases, leases, "leases of a listener")
        digests = DigestRequests(leases, system)
        rooms = RoomStore(system)

        def give_offers(_: bytes) -> bytes:
            return encoded_offers

        def take_claims(body: bytes) -> bytes:
            message = ClaimMessage.of_fields(json.loads(body))
            answer = answer_claims(leases, start, message)
            return json.dumps(answer.fields()).encode()

        async def give_digests(body: bytes) -> bytes:
            try:
                request = DigestRequest.of_fields(start, json.loads(body))
                fields: dict[str, Any] = {"digests": await digests.answer(request)}
            except KVPlanError as error:
                if error.code != "LEASE":
                    raise
                fields = {"digests": None, "has_ended": True}
            return json.dumps(fields).encode()

        routes = {
            "GET /": Route(give_offers),
            "POST /claims": Route(take_claims, MAX_MESSAGE_BYTES),
            "POST /digests": Route(give_digests, MAX_REQUEST_BYTES),
            "POST /ask": Route(rooms.polls.answer, MAX_QUESTION_BYTES, num_segments=2),
        }
        address = name(host, "host") if bind is None else name(bind, "bind")
        self._system = system
        self._server = system.serve(address, port, routes, host)
        self.digests: DigestRequests = digests
        self.rooms: RoomStore = rooms
        self.source: Source = Source(engine_id, start, host, self._server.port)

    def withdraw(self, room: str, lease: str) -> None:
        """Withdraw the entry of a room, if there is one, and the digests of a lease that ends."""
        self.digests.drop(name(lease, "lease"))
        if instance(str, room, "room"):
            self.rooms.withdraw(room)

    async def check(self, timeout_s: float) -> None:
        """Fetch the offers as readers do. Raises ``PEER`` where :attr:`source` is not reached."""
        await fetch(self.source, timeout_s, system=self._system)

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


async def fetch(source: Source, timeout_s: float, *, system: System) -> Offers:
    """Fetch the offers of an engine's workers.

    Raises ``MESSAGE``, and ``PEER`` if the engine does not answer or has restarted.
    """
    peer = str(instance(Source, source, "source"))
    answer = await system.exchange(peer, source.address, "/", timeout_s)
    offers = Offers.decode(answer)
    # The address may have gone over to another engine, or to another start of it.
    if (offers.engine_id, offers.start) != (source.engine_id, source.start):
        raise KVPlanError(
            "PEER",
            f"shake hands with {source}",
            expected=f"engine {source.engine_id}, start {source.start}",
            got=f"engine {offers.engine_id}, start {offers.start}",
            hint="it has restarted since it computed the request",
            source=source,
            start=offers.start,
        )
    return offers
