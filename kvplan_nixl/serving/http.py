"""HTTP between engines: questions and answers, one after the other, bounded in size and in time.

This is the part of HTTP/1.1 that engines need, and no more: a head of a few lines, one
``Content-Length``, and a body. Python's own server reads heads of megabytes, keeps a thread for
each connection, and has no limit for the time of a whole question. A parser such as h11 knows more
of HTTP than engines say to each other, bounds neither connections nor time, and would replace
forty lines. Everything here runs on the event loop of :mod:`kvplan_nixl.serving.driver`.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan import KVPlanError
from kvplan.protocol.system import PORT_END, Route
from kvplan.support import instance, integer, name
from kvplan_nixl.serving.access import Access, Challenges, Proof, numeric_address

MAX_HEAD_BYTES: Final = 1 << 12
"""The length of a question's or answer's head, of which the signature takes most."""

MAX_CONNECTIONS: Final = 1024
"""Connections to a server. When full, one is closed for the next, by :class:`_Connection`."""

MAX_UNREAD_BYTES: Final = 1 << 26
"""The bodies that a server reads at a time."""

MAX_REASON_BYTES: Final = 300
"""The length of a refusal's reason that is passed on."""

CHUNK_BYTES: Final = 1 << 18

CONNECTION_S: Final = 30.0
"""Seconds that a connection has for a question to come and to be answered: offers, slowly."""

PAUSE_S: Final = 1.0
"""Seconds for which a server accepts nothing that could accept no more."""

BACKLOG: Final = 512
"""Connections that wait until the server accepts them."""

HEAD_END: Final = b"\r\n\r\n"

SCHEME: Final = "Kvplan"
PROOF: Final = "authorization"
SIGNATURE: Final = "authentication-info"

OF_BROWSERS: Final = frozenset({"origin", "sec-fetch-site"})
"""Lines that browsers send, and engines do not: a page in a browser must not reach an engine."""

LINE: Final = re.compile(r"([A-Za-z0-9-]+):[ \t]*([\x20-\x7e]*)")
"""A line of a head, without control characters and continuations."""

STATUSES: Final = MappingProxyType(
    {
        200: "OK",
        400: "Bad Request",
        401: "Unauthorized",
        403: "Forbidden",
        404: "Not Found",
        413: "Content Too Large",
        421: "Misdirected Request",
        503: "Service Unavailable",
    }
)


@attrs.frozen
class Head:
    """The first line of a question or an answer, and its other lines, by name in small letters."""

    first: tuple[str, ...]
    lines: Mapping[str, str]

    @classmethod
    def read(cls, data: bytes) -> Head:
        """Read a head. Raises ValueError for one that could be read in two ways."""
        first, *rest = data.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
        lines = dict[str, str]()
        for text in rest:
            line = LINE.fullmatch(text)
            if line is None or line[1].lower() in lines:
                raise ValueError("a malformed or repeated line")
            lines[line[1].lower()] = line[2].strip()
        words = tuple(first.split(" ", 2))
        if len(words) != 3 or "transfer-encoding" in lines:
            raise ValueError("another kind of HTTP")
        return cls(words, lines)

    @property
    def num_bytes(self) -> int:
        """The length of the body. Raises ValueError for what is no length."""
        text = self.lines.get("content-length", "0")
        if not (text.isdigit() and len(text) <= 12):
            raise ValueError("a malformed length")
        return int(text)

    def quoted(self, line: str) -> str:
        """Return the credentials in a line, empty if they are of another scheme."""
        scheme, _, text = self.lines.get(line, "").partition(" ")
        return text if scheme == SCHEME else ""


def message(first: str, body: bytes, lines: Mapping[str, str]) -> bytes:
    """Return a question or an answer as bytes."""
    texts = [first, f"Content-Length: {len(body)}"]
    texts += [f"{label}: {text}" for label, text in lines.items()]
    return "\r\n".join((*texts, "", "")).encode("ascii") + body


@attrs.frozen
class _RefusedError(Exception):
    """A question that gets another status than 200, with its reason."""

    status: int
    reason: str = ""


@attrs.define(eq=False)
class _Connection:
    """A connection to a server, from an IP address.

    ``is_proven`` says that a question has come, signed with the key, and is not answered yet. Where
    a server has too many connections, it closes the oldest unproven one of the address that has
    most of those. So a host with many and without the key closes its own, or those between
    questions, whose readers connect again.
    """

    host: str
    is_proven: bool = False


class Server:
    """Answers questions by ``routes``, on ``loop``: each route has a method and a path.

    It listens at ``port`` of ``host``, or at a free port if that is 0. Questions are for the
    address that their connection has led to, or for the host ``announced``, where that leads here
    by way of another address. Raises ``PEER`` if it cannot listen, or if
    :class:`~kvplan_nixl.serving.access.Access` forbids it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        access: Access,
        loop: asyncio.AbstractEventLoop,
        announced: str = "",
    ) -> None:
        self._routes = instance(Mapping, routes, "routes of a server")
        self._access = instance(Access, access, "access of a server")
        self._challenges = Challenges()
        # the oldest first
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._unread_bytes = 0
        self._socket = _listening(name(host, "host"), integer(port, "port", high=PORT_END), access)
        self.port: int = self._socket.getsockname()[1]
        self._announced = f"{announced}:{self.port}"
        self._loop = loop
        self._is_closed = False
        loop.call_soon_threadsafe(self._listen)

    def close(self) -> None:
        """Stop listening, and end all connections. Not to be called on the loop."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    async def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket)
        self._socket.close()
        # Tasks that were made just now begin, so that each closes its connection.
        await asyncio.sleep(0)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accept a connection, and close another one if there are too many."""
        try:
            connection, (host, *_) = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            # The process has too many files open.
            self._loop.remove_reader(self._socket)
            self._loop.call_later(PAUSE_S, self._listen)
            return
        if len(self._connections) >= MAX_CONNECTIONS and not self._close_one():
            connection.close()
            return
        state = _Connection(host)
        task = self._loop.create_task(self._meet(connection, state))
        self._connections[task] = state
        task.add_done_callback(lambda _: self._connections.pop(task, None))

    def _close_one(self) -> bool:
        """Close the connection whose turn it is, and return whether there is one."""
        unproven = {
            task: each.host for task, each in self._connections.items() if not each.is_proven
        }
        if not unproven:
            return False
        (busiest, _), *_ = Counter(unproven.values()).most_common(1)
        oldest = next(task for task, host in unproven.items() if host == busiest)
        oldest.cancel()
        del self._connections[oldest]
        return True

    async def _meet(self, connection: socket.socket, state: _Connection) -> None:
        """Answer the questions of a connection, each in its time."""
        reader = asyncio.StreamReader(MAX_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        connection.setblocking(False)
        # A peer may be gone, or too slow.
        with connection, suppress(OSError, EOFError):
            async with asyncio.timeout(CONNECTION_S) as limit:
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol, connection, ssl=self._access.server_tls
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                try:
                    address = numeric_address(writer.get_extra_info("sockname"))
                    while await self._converse(reader, writer, address, state):
                        limit.reschedule(self._loop.time() + CONNECTION_S)
                finally:
                    transport.abort()
                    # for the transport, which ends in the next step of the loop
                    await asyncio.sleep(0)

    async def _converse(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        address: str,
        state: _Connection,
    ) -> bool:
        """Answer a question, and return whether the connection may have another one."""
        status, answer = await self._answer(reader, address, state)
        writer.write(answer)
        await writer.drain()
        if status == 200:
            state.is_proven = False
            return True
        if writer.can_write_eof():
            writer.write_eof()
        # A peer whose question was refused reads the answer when it has sent the rest.
        while await reader.read(CHUNK_BYTES):
            continue
        return False

    async def _answer(
        self, reader: asyncio.StreamReader, address: str, state: _Connection
    ) -> tuple[int, bytes]:
        """Return the answer to a question, and its status.

        Nothing is parsed but the head, and the proof in it.
        """
        proof = None
        try:
            head = Head.read(await reader.readuntil(HEAD_END))
            method, target, _ = head.first
            if not OF_BROWSERS.isdisjoint(head.lines):
                raise _RefusedError(403)
            proof = self._proof(head, method, target)
            state.is_proven = True
            # a question to another server, which has passed it on
            if proof.server != address and head.lines.get("host") != self._announced:
                raise _RefusedError(421, f"the question was for {proof.server}, not {address}")
            _, label, *segments = target.split("/")
            route = self._routes.get(f"{method} /{label}")
            if route is None or len(segments) != route.num_segments:
                raise _RefusedError(404)
            if head.num_bytes > route.max_bytes:
                raise _RefusedError(413)
            body = await self._body(reader, head.num_bytes)
            if not proof.has_body(body):
                raise _RefusedError(400, "another body")
            answer = route.answer(body, *segments)
            if not isinstance(answer, bytes):
                answer = await self._while_connected(reader, answer)
            status = 200
        except _RefusedError as refused:
            status = refused.status
            answer = refused.reason.encode()
        except (ValueError, TypeError, RecursionError, asyncio.LimitOverrunError) as error:
            # Malformed questions are rejected; the error says what could not be read.
            status = 400
            answer = str(error).encode()[:MAX_REASON_BYTES]
        return status, self._signed(proof, status, answer)

    async def _while_connected(
        self, reader: asyncio.StreamReader, answer: Coroutine[Any, Any, bytes]
    ) -> bytes:
        """Await an answer. A peer that hangs up meanwhile ends the connection."""
        answering = self._loop.create_task(answer)
        # after its question a peer sends nothing
        ending = self._loop.create_task(reader.read(1))
        try:
            await asyncio.wait((answering, ending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            ending.cancel()
            # until both have ended, since one task reads at a time
            await asyncio.gather(answering, ending, return_exceptions=True)
        if not ending.cancelled():
            raise EOFError
        return answering.result()

    def _proof(self, head: Head, method: str, target: str) -> Proof:
        """Return the proof of a question, which is new. Raises _RefusedError."""
        proof = Proof.read(head.quoted(PROOF))
        if (
            proof is None
            or not proof.is_of(self._access.key, method, target, head.lines.get("host", ""))
            or not self._challenges.take(proof.challenge, proof.nonce)
        ):
            raise _RefusedError(401)
        return proof

    async def _body(self, reader: asyncio.StreamReader, num_bytes: int) -> bytes:
        if self._unread_bytes + num_bytes > MAX_UNREAD_BYTES:
            raise _RefusedError(503)
        self._unread_bytes += num_bytes
        try:
            return await reader.readexactly(num_bytes)
        finally:
            self._unread_bytes -= num_bytes

    def _signed(self, proof: Proof | None, status: int, body: bytes) -> bytes:
        """Return an answer as bytes, signed if its question was."""
        challenge = self._challenges.latest
        signature = "-"
        if proof is not None:
            signature = proof.sign_answer(self._access.key, status, challenge, body)
        lines = {SIGNATURE: f"{SCHEME} {challenge} {signature}"}
        if status != 200:
            lines["Connection"] = "close"
        return message(f"HTTP/1.1 {status} {STATUSES[status]}", body, lines)


def _listening(host: str, port: int, access: Access) -> socket.socket:
    """Return a socket that is bound to one address of a host. Raises ``PEER``."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        access.check_address(str(address[0]))
        listening = socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        expected = "an address of this machine, and a port that is free"
        raise KVPlanError(
            "PEER", f"listen on {host}:{port}", expected=expected, got=f"{error}"
        ) from None
    listening.setblocking(False)
    return listening
