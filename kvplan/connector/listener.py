"""The listener of an engine: by HTTP, others fetch its offers and claim its leases.

``GET /`` returns the offers of all workers. ``POST /claims`` takes a
:class:`~kvplan.connector.claims.ClaimMessage` and returns the answer to each claim. ``POST
/digests`` takes a :class:`~kvplan.connector.digest_requests.DigestRequest` and returns digests,
when workers have computed them. The listener believes whoever reaches it, so let only your engines
reach it.
"""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import attrs

from kvplan._checks import check_fields, instance, integer, members, name
from kvplan.connector.claims import ClaimAnswer, ClaimMessage, answer_claims
from kvplan.connector.digest_requests import DigestRequests, answer_digests
from kvplan.connector.handoff import PORT_END, Source
from kvplan.connector.http import ANSWER_S, exchange, start_server
from kvplan.connector.leases import Leases
from kvplan.errors import KVPlanError


@attrs.frozen
class Offers:
    """The offers of all workers of an engine, each as bytes."""

    engine_id: str
    start: str
    workers: tuple[bytes, ...] = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        check_fields(self, "offers", name, "engine_id", "start")
        members(bytes, self.workers, "offers")

    @classmethod
    def decode(cls, data: bytes) -> Offers:
        """Read the offers in an answer. Raises ``MESSAGE``."""
        try:
            fields = json.loads(data)
            workers = tuple(b64decode(worker, validate=True) for worker in fields["workers"])
            return cls(str(fields["engine_id"]), str(fields["start"]), workers)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            expected = "offers as JSON"
            raise KVPlanError(
                "MESSAGE", "read offers", expected=expected, got=repr(error)
            ) from None


class Listener:
    """Serves the offers of an engine's workers, and answers claims from its ``leases``.

    It announces ``host``, and listens on ``bind``, by default ``host``, at ``port``, by default one
    that is free. Readers find it by its :attr:`source`. :attr:`digests` are those that they ask
    for. Raises ``PEER`` if it cannot listen.

    >>> leases = Leases()
    >>> listener = Listener("prefill", "127.0.0.1", [b"offer of worker 0"], leases)
    >>> fetch(listener.source, timeout_s=10).workers
    (b'offer of worker 0',)
    >>> lease = leases.grant("request 1")
    >>> message = ClaimMessage(listener.source.start, claims=((lease, "decode 1"),))
    >>> send_claims(listener.source, message).claims
    (True,)
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
    ) -> None:
        # Another start of this engine has other leases, maybe under the same names.
        start = f"{time.time_ns():x}"
        engine_id = name(engine_id, "engine_id")
        offers = members(bytes, workers, "offers of a listener")
        texts = [b64encode(offer).decode() for offer in offers]
        instance(Leases, leases, "leases of a listener")
        self.digests: DigestRequests = DigestRequests(leases)

        def get(path: str) -> Any:
            return {"engine_id": engine_id, "start": start, "workers": texts}

        def post(path: str, body: Any) -> Any:
            if path == "/claims":
                return attrs.asdict(answer_claims(leases, start, ClaimMessage.of_fields(body)))
            if path == "/digests":
                return answer_digests(self.digests, start, body)
            return None

        address = name(host, "host") if bind is None else name(bind, "bind")
        port = integer(port, "port", high=PORT_END)
        self._server = start_server(address, port, get=get, post=post)
        self.source: Source = Source(engine_id, start, host, self._server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def fetch(source: Source, timeout_s: float) -> Offers:
    """Fetch the offers of an engine's workers.

    Raises ``MESSAGE``, and ``PEER`` if the engine does not answer or has restarted.
    """
    peer = str(instance(Source, source, "source"))
    offers = Offers.decode(exchange(peer, source.host, source.port, "/", timeout_s))
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


def send_claims(source: Source, message: ClaimMessage) -> ClaimAnswer:
    """Send claims to an engine's listener. Raises ``PEER`` and ``MESSAGE``."""
    sent = instance(ClaimMessage, message, "a message of claims").fields()
    peer = str(instance(Source, source, "source"))
    answer = exchange(peer, source.host, source.port, "/claims", ANSWER_S, sent)
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError) as error:
        expected = "answers as JSON"
        raise KVPlanError("MESSAGE", "read answers", expected=expected, got=repr(error)) from None
    return ClaimAnswer.of_fields(message, fields)
