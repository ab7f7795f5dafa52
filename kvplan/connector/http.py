"""HTTP between engines: one question and one answer, bounded in size and in time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from kvplan._checks import seconds
from kvplan.errors import KVPlanError

MAX_SENT_BYTES: Final = 1 << 24
MAX_ANSWER_BYTES: Final = 1 << 28

CONNECTION_S: Final = 10.0
"""Seconds for which a server waits for a byte of a connection."""


def serve(host: str, port: int, *, get: Callable[[str], Any], post: Callable[[str, Any], bool]) -> ThreadingHTTPServer:
    """A server on threads of its own. Raises ``PEER`` where it can't listen.

    ``get`` is given a path and returns what is answered, as JSON; ``post`` is given a path and what was sent there as
    JSON, and returns whether it takes it.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = CONNECTION_S

        def do_GET(self) -> None:
            self._reply(200, json.dumps(get(self.path)).encode())

        def do_POST(self) -> None:
            try:
                size = int(self.headers["Content-Length"])
                is_taken = 0 <= size <= MAX_SENT_BYTES and post(self.path, json.loads(self.rfile.read(size)))
            except (ValueError, TypeError, RecursionError):
                is_taken = False
            self._reply(200 if is_taken else 400, b"")

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            with suppress(ConnectionError):  # who asked has gone
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        expected = "an address of this machine, and a port that is free"
        raise KVPlanError("PEER", f"listen on {host}:{port}", expected=expected, got=f"{error}") from None
    threading.Thread(target=server.serve_forever, name="kvplan http", daemon=True).start()
    return server


def exchange(peer: str, host: str, port: int | None, path: str, timeout_s: float, sent: Any = None) -> bytes:
    """What a peer answers to GET, or to POST where something is ``sent``. Raises ``PEER``.

    Without a port it is in ``host``.
    """
    stop, action = time.monotonic() + seconds(timeout_s, "timeout_s"), f"reach {peer}"
    try:
        connection = HTTPConnection(host, port, timeout=timeout_s)
        try:
            if sent is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(sent).encode())
            response = connection.getresponse()
            parts, size = [], 0
            while (part := response.read1(1 << 20)) and size <= MAX_ANSWER_BYTES and time.monotonic() <= stop:
                parts.append(part)
                size += len(part)
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError) as error:
        raise KVPlanError("PEER", action, expected="an answer", got=f"{error!r}") from None
    if part:
        expected = f"an answer of at most {MAX_ANSWER_BYTES} bytes within {timeout_s:g} s"
        raise KVPlanError("PEER", action, expected=expected, got=f"more than {size} bytes")
    if response.status != 200:
        raise KVPlanError("PEER", action, expected="status 200", got=f"{response.status}")
    return b"".join(parts)
