"""The listener of an engine that others read from: HTTP by which they fetch its offers and claim its leases.

``GET /`` returns the offers of all workers. ``POST /claims`` takes a
:class:`~kvplan.connector.claims.ClaimMessage` and returns the answer to each claim. ``POST /digests`` takes a
:class:`~kvplan.connector.digest_requests.DigestRequest` and returns digests, when workers have computed them. The
listener believes whoever reaches it, so let only your engines reach it.
"""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, Final

import attrs

from kvplan._checks import instance, integer, members, name, settle
from kvplan.connector.claims import ClaimAnswer, ClaimMessage, answer_claims
from kvplan.connector.digest_requests import DigestRequests, answer_digests
from kvplan.connector.handoff import PORT_END, Source
from kvplan.connector.http import exchange, serve
from kvplan.connector.leases import Leases
from kvplan.errors import KVPlanError

ANSWER_S: Final = 3.0
"""Seconds for which a reader waits for the answer to its claims."""


@attrs.frozen
class Offers:
    """The offers of all workers of an engine, each as bytes."""

    engine_id: str
    start: str
    workers: tuple[bytes, ...] = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        settle(self, "offers", name, "engine_id", "start")
        members(bytes, self.workers, "offers")

    @classmethod
    def decode(cls, data: bytes) -> Offers:
        """Read the offers in an answer. Raises ``MESSAGE``."""
        try:
            fields = json.loads(data)
            workers = tuple(b64decode(worker, validate=True) for worker in fields["workers"])
            return cls(str(fields["engine_id"]), str(fields["start"]), workers)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise KVPlanError(
                "MESSAGE", "read offers", expected="offers as JSON", got=repr(error)
            ) from None


class Listener:
    """Serves the offers of an engine's workers, and answers claims from its ``leases``.

    It announces ``host``, and listens on ``bind``, by default ``host``, at ``port``, by default one that is
    free. :attr:`source` is what readers need, and :attr:`digests` what they want to
    check. Raises ``PEER``.

    >>> leases = Leases()
    >>> listener = Listener("prefill", "127.0.0.1", [b"offer of worker 0"], leases)
    >>> fetch(listener.source, timeout_s=10).workers
    (b'offer of worker 0',)
    >>> lease = leases.grant("request 1")
    >>> send_claims(listener.source, ClaimMessage(listener.source.start, claims=((lease, "decode 1"),))).claims
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
        fields = {"engine_id": name(engine_id, "engine_id"), "start": f"{time.time_ns():x}"}
        offers = [
            b64encode(worker).decode() for worker in members(bytes, workers, "offers of a listener")
        ]
        instance(Leases, leases, "leases of a listener")

        def get(path: str) -> Any:
            return {**fields, "workers": offers}

        self.digests: DigestRequests = DigestRequests(leases)

        def post(path: str, body: Any) -> Any:
            if path == "/claims":
                return attrs.asdict(
                    answer_claims(leases, fields["start"], ClaimMessage.of_fields(body))
                )
            if path == "/digests":
                return answer_digests(self.digests, fields["start"], body)
            return None

        address = name(host, "host") if bind is None else name(bind, "bind")
        self._server = serve(address, integer(port, "port", high=PORT_END), get=get, post=post)
        self.source: Source = Source(**fields, host=host, port=self._server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def fetch(source: Source, timeout_s: float) -> Offers:
    """Fetch the offers of an engine's workers. Raises ``MESSAGE``, and ``PEER``, also where it has restarted."""
    answer = exchange(
        f"{instance(Source, source, 'source')}", source.host, source.port, "/", timeout_s
    )
    offers = Offers.decode(answer)
    if (offers.engine_id, offers.start) != (source.engine_id, source.start):
        raise KVPlanError(
            "PEER",
            f"shake hands with {source}",
            expected=f"engine {source.engine_id}, start {source.start}",
            got=f"engine {offers.engine_id}, start {offers.start}",
            hint="it has restarted since it computed the request",
        )
    return offers


def send_claims(source: Source, message: ClaimMessage) -> ClaimAnswer:
    """Send claims to an engine's listener. Raises ``PEER`` and ``MESSAGE``."""
    sent = instance(ClaimMessage, message, "a message of claims").fields()
    answer = exchange(
        f"{instance(Source, source, 'source')}", source.host, source.port, "/claims", ANSWER_S, sent
    )
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise KVPlanError(
            "MESSAGE", "read answers", expected="answers as JSON", got=f"{error!r}"
        ) from None
    return ClaimAnswer.of_fields(message, fields)
