"""The listener of an engine that others read from: HTTP by which they fetch its offers and say which reads are done.

``GET /`` returns the offers of all workers, with the time on the engine's clock; ``GET /clock`` the time alone. ``POST
/done`` takes a list of requests. The listener believes whoever reaches it, so let only your engines reach it.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterable, Sequence
from logging import Logger
from typing import Any, Final

import attrs

from kvplan._checks import instance, integer, members, name, seconds, settle, wrong_type
from kvplan.connector.handoff import PORT_END, Source
from kvplan.connector.http import exchange, serve
from kvplan.errors import KVPlanError

MAX_DONE: Final = 1 << 16
"""Requests that the listener keeps for :meth:`Listener.done`, the last ones that came."""

CLOCKS: Final = 3
"""How often a reader asks for the time, to know it better than a first answer that took long."""

DONE_S: Final = 3.0
"""Seconds for which a reader waits for the listener to take what is done."""


@attrs.frozen
class Offers:
    """The offers of all workers of an engine, each as bytes, and how far its clock is ahead of this one, at most."""

    engine_id: str
    start: str
    ahead_s: float
    workers: tuple[bytes, ...] = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        settle(self, "offers", name, "engine_id", "start")
        members(bytes, self.workers, "offers")
        if not isinstance(self.ahead_s, float) or not math.isfinite(self.ahead_s):
            raise wrong_type("ahead_s of offers", "a number of seconds", self.ahead_s)

    @classmethod
    def decode(cls, data: bytes, asked: float) -> Offers:
        """The offers in an answer to what was ``asked`` at a time of this clock. Raises ``MESSAGE``."""
        asked = seconds(asked, "time of a question")
        try:
            fields = json.loads(data)
            workers = tuple(b64decode(worker, validate=True) for worker in fields["workers"])
            ahead_s = float(fields["clock"]) - asked
            if not math.isfinite(ahead_s):
                raise ValueError(fields["clock"])
            return cls(str(fields["engine_id"]), str(fields["start"]), ahead_s, workers)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise KVPlanError("MESSAGE", "read offers", expected="offers as JSON", got=repr(error)) from None


class Listener:
    """Serves the offers of an engine's workers, and collects the requests that readers are done with.

    It listens on a port of ``host`` that is free, unless ``port`` is given. :attr:`source` is what readers need.

    >>> listener = Listener("prefill", "127.0.0.1", [b"offer of worker 0"])
    >>> fetch(listener.source, timeout_s=10).workers
    (b'offer of worker 0',)
    >>> send_done(listener.source, ["request 1"])
    >>> listener.done()
    ['request 1']
    >>> listener.close()
    """

    def __init__(self, engine_id: str, host: str, workers: Sequence[bytes], port: int = 0) -> None:
        self._done: deque[str] = deque(maxlen=MAX_DONE)
        done = self._done
        name(engine_id, "engine_id"), name(host, "host"), integer(port, "port", high=PORT_END)
        fields = {"engine_id": engine_id, "start": f"{time.time_ns():x}"}
        offers = [b64encode(worker).decode() for worker in members(bytes, workers, "offers of a listener")]

        def get(path: str) -> Any:
            return {**fields, "workers": [] if path == "/clock" else offers, "clock": time.monotonic()}

        def post(path: str, requests: Any) -> bool:
            if isinstance(requests, list):
                done.extend(map(str, requests))
            return isinstance(requests, list)

        self._server = serve(host, port, get=get, post=post)
        self.source: Source = Source(**fields, host=host, port=self._server.server_port)

    def done(self) -> list[str]:
        """The requests that readers are done with, since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def fetch(source: Source, timeout_s: float) -> Offers:
    """The offers of an engine's workers. Raises ``PEER`` where nobody answers, or another start of the engine."""
    offers = _ask(source, "/", timeout_s)
    clocks = [_ask(source, "/clock", timeout_s).ahead_s for _ in range(CLOCKS)]  # the quickest answer says most
    return attrs.evolve(offers, ahead_s=min(offers.ahead_s, *clocks))


def _ask(source: Source, path: str, timeout_s: float) -> Offers:
    asked = time.monotonic()
    answer = exchange(f"{instance(Source, source, 'source')}", source.host, source.port, path, timeout_s)
    offers = Offers.decode(answer, asked)
    if (offers.engine_id, offers.start) != (source.engine_id, source.start):
        raise KVPlanError(
            "PEER",
            f"shake hands with {source}",
            expected=f"engine {source.engine_id}, start {source.start}",
            got=f"engine {offers.engine_id}, start {offers.start}",
            hint="it has restarted since it computed the request",
        )
    return offers


def send_done(source: Source, requests: Iterable[str]) -> None:
    """Tell an engine that its requests are read, or will not be read. Raises ``PEER``."""
    sent = members(str, requests, "requests")
    exchange(f"{instance(Source, source, 'source')}", source.host, source.port, "/done", DONE_S, sent)


class Notifier:
    """Tells engines in the background which of their requests a reader is done with."""

    def __init__(self, logger: Logger) -> None:
        self._logger = instance(Logger, logger, "logger")
        self._items: queue.SimpleQueue[tuple[Source, str] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kvplan done", daemon=True).start()

    def put(self, source: Source, request: str) -> None:
        """Tell an engine of one request, soon."""
        self._items.put((instance(Source, source, "source"), name(request, "name of a request")))

    def close(self) -> None:
        """Send nothing more."""
        self._items.put(None)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            items: list[tuple[Source, str] | None] = [item]
            while not self._items.empty():
                items.append(self._items.get())
            by_source: dict[Source, list[str]] = {}
            for source, request in filter(None, items):
                by_source.setdefault(source, []).append(request)
            for source, requests in by_source.items():
                try:
                    send_done(source, requests)
                except KVPlanError as error:
                    self._logger.warning("%d requests stay until their leases end: %s", len(requests), error)
            if None in items:
                return
