"""HTTP between engines: one question and one answer, bounded in size and in time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from kvplan._checks import seconds
from kvplan.errors import KVPlanError

MAX_SENT_BYTES: Final = 1 << 24
MAX_ANSWER_BYTES: Final = 1 << 28
PART_BYTES: Final = 1 << 20

ANSWER_S: Final = 3.0
"""Seconds for which a reader waits for an answer about leases or digests."""

CONNECTION_S: Final = 10.0
"""Seconds for which a server waits for a byte of a connection."""

BACKLOG: Final = 128
"""Connections that wait until the server accepts them."""


class _Server(ThreadingHTTPServer):
    request_queue_size = BACKLOG
    daemon_threads = True


def start_server(
    host: str, port: int, *, get: Callable[[str], Any], post: Callable[[str, Any], Any]
) -> ThreadingHTTPServer:
    """Start a server on threads of its own. Raises ``PEER`` if it cannot listen.

    ``get`` takes a path and returns the answer, as JSON. ``post`` takes a path and what was sent
    there, as JSON, and returns the answer, or None where it refuses.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = CONNECTION_S

        def do_GET(self) -> None:
            self._reply(200, json.dumps(get(self.path)).encode())

        def do_POST(self) -> None:
            answer = None
            # Nonsense is refused, as what it raises when it is read.
            with suppress(ValueError, TypeError, RecursionError):
                size = int(self.headers["Content-Length"])
                if 0 <= size <= MAX_SENT_BYTES:
                    answer = post(self.path, json.loads(self.rfile.read(size)))
            if answer is None:
                self._reply(400, b"")
            else:
                self._reply(200, json.dumps(answer).encode())

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            # Whoever asked may be gone.
            with suppress(ConnectionError):
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    try:
        server = _Server((host, port), Handler)
    except OSError as error:
        expected = "an address of this machine, and a port that is free"
        raise KVPlanError(
            "PEER", f"listen on {host}:{port}", expected=expected, got=f"{error}"
        ) from None
    threading.Thread(target=server.serve_forever, name="kvplan http", daemon=True).start()
    return server


def exchange(
    peer: str, host: str, port: int | None, path: str, timeout_s: float, sent: Any = None
) -> bytes:
    """Return the answer of a peer to GET, or to POST if something is ``sent``. Raises ``PEER``.

    Without a ``port``, ``host`` has it.
    """
    stop = time.monotonic() + seconds(timeout_s, "timeout_s")
    action = f"reach {peer}"
    parts = []
    size = 0
    try:
        with closing(HTTPConnection(host, port, timeout=timeout_s)) as connection:
            if sent is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(sent).encode())
            with connection.getresponse() as response:
                # A peer that sends too much, or a byte now and then, is cut off: a part is left.
                part = response.read1(PART_BYTES)
                while part and size <= MAX_ANSWER_BYTES and time.monotonic() <= stop:
                    parts.append(part)
                    size += len(part)
                    part = response.read1(PART_BYTES)
    except (OSError, HTTPException, ValueError) as error:
        raise KVPlanError("PEER", action, expected="an answer", got=f"{error!r}") from None
    if part:
        expected = f"an answer of at most {MAX_ANSWER_BYTES} bytes within {timeout_s:g} s"
        raise KVPlanError("PEER", action, expected=expected, got=f"more than {size} bytes")
    if response.status != 200:
        raise KVPlanError("PEER", action, expected="status 200", got=f"{response.status}")
    return b"".join(parts)
