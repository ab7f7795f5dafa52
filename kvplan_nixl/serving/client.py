"""Questions to other engines' servers, over connections that are kept for the next questions.

An engine asks few servers, and each of them often: it renews its claims every few seconds, and asks
about each request that it has read. To connect costs as much as to ask, and with TLS far more. So a
connection whose question was answered stays open for :data:`KEEP_S`, unless the server ends it or
:data:`MAX_KEPT` others are open. Nothing rests on it: each question is signed by itself, and names
the server to which its connection leads.

The client is an asyncio protocol, since a kept connection closes at once when its server ends it,
or sends what nothing asked for. A stream would show that to the next question, and ``http.client``
blocks a thread and has no limit for the time of a whole answer.

A server may end a kept connection while a question is on its way to it. That question is asked once
more, over a new connection. The server may have answered it already, so all questions between
engines may be asked twice: a lost answer to a claim makes its reader ask again, too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from functools import partial
from typing import Final

import attrs

from kvplan import KVPlanError
from kvplan.protocol.keys import HINT
from kvplan.protocol.system import MAX_ANSWER_BYTES, PORT_END
from kvplan.support import instance, integer, seconds, shown
from kvplan_nixl.serving.access import Access, Asked, Proof, numeric_address
from kvplan_nixl.serving.addresses import addresses_of
from kvplan_nixl.serving.http import (
    HEAD_END,
    MAX_HEAD_BYTES,
    MAX_REASON_BYTES,
    PROOF,
    SCHEME,
    SIGNATURE,
    Head,
    message,
)

KEEP_S: Final = 10.0
"""Seconds for which a connection is kept that has no question. A server waits for longer."""

MAX_KEPT: Final = 256
"""Connections that a process keeps without a question."""

SILENT_S: Final = 1.0
"""Seconds after which the next address of a host is tried."""

MISDIRECTED: Final = "set host of that engine to the address at which others reach it"


@attrs.frozen
class _Answer:
    """An answer, and whether it is signed as that to the question."""

    status: int
    body: bytes
    is_signed: bool


class _Connection(asyncio.Protocol):
    """A connection to a server, which has one question at a time, or none while it is kept.

    ``server`` is the IP address and port to which it leads, by rule access.D2. ``on_end`` is called
    when it has ended.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self.on_end = _nothing
        self.is_open = False
        # whether a byte of an answer to the latest question has come
        self.is_answering = False
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._head: Head | None = None
        self._num_bytes = 0
        self._answer: asyncio.Future[tuple[Head, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self.is_answering = True
        self._data += data
        try:
            self._read()
        except ValueError as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or EOFError("the connection has ended"))

    async def ask(self, question: bytes) -> tuple[Head, bytes]:
        """The answer to a question. Raises OSError or EOFError, or ValueError for none."""
        assert self._transport is not None
        self.is_answering = False
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(question)
        return await self._answer

    def close(self) -> None:
        self._end(EOFError("closed"))

    def _read(self) -> None:
        """Read what has come of an answer. Raises ValueError for what is no answer."""
        if self._answer is None or self._answer.done():
            raise ValueError("bytes that answer no question")
        if self._head is None:
            end = self._data.find(HEAD_END, 0, MAX_HEAD_BYTES)
            if end < 0 and len(self._data) >= MAX_HEAD_BYTES:
                raise ValueError(f"a head of more than {MAX_HEAD_BYTES} bytes")
            if end < 0:
                return
            end += len(HEAD_END)
            self._head = Head.read(bytes(self._data[:end]))
            self._num_bytes = self._head.num_bytes
            if self._num_bytes > MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {self._num_bytes} bytes, above {MAX_ANSWER_BYTES}")
            del self._data[:end]
        if len(self._data) > self._num_bytes:
            raise ValueError("an answer that is longer than it says")
        if len(self._data) == self._num_bytes:
            answer = self._head, bytes(self._data)
            self._head = None
            self._data.clear()
            self._answer.set_result(answer)

    def _end(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        if self.is_open:
            assert self._transport is not None
            self.is_open = False
            self._transport.abort()
            self.on_end()


def _nothing() -> None:
    """Do nothing: the connection is not kept."""


class Client:
    """Asks servers on one event loop, and keeps connections to them for the next questions."""

    def __init__(self) -> None:
        # by an access and an address, with the timer of each connection; the latest one last
        self._kept: defaultdict[tuple[Access, str], dict[_Connection, asyncio.TimerHandle]] = (
            defaultdict(dict)
        )
        self._num_kept = 0

    async def exchange(
        self,
        peer: str,
        address: str,
        path: str,
        timeout_s: float,
        access: Access,
        sent: bytes | None = None,
    ) -> bytes:
        """Return the answer of a peer to GET, or to POST if something is ``sent``. Raises ``PEER``.

        ``address`` is ``host:port``. The answer comes within ``timeout_s`` seconds, all of it.
        """
        for subject, text in (("peer", peer), ("address", address), ("path", path)):
            instance(str, text, f"{subject} of a question")
        if sent is not None:
            instance(bytes, sent, "body of a question")
        limit_s = seconds(timeout_s, "timeout_s")
        action = f"reach {peer}"
        method = "GET" if sent is None else "POST"
        body = sent or b""
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._ask(address, method, path, body, access, limit_s)
                # The server has told its challenge, or another one.
                if answer.status == 401:
                    answer = await self._ask(address, method, path, body, access, limit_s)
        except (OSError, EOFError, ValueError) as error:
            is_late = isinstance(error, TimeoutError)
            expected = f"an answer within {limit_s:g} s" if is_late else "an answer"
            raise KVPlanError("PEER", action, expected=expected, got=_failure(error)) from None
        if answer.status == 401:
            expected = "an engine with the same key"
            raise KVPlanError("PEER", action, expected=expected, got="status 401", hint=HINT)
        if not answer.is_signed:
            expected = "an answer that is signed with the key"
            raise KVPlanError("PEER", action, expected=expected, got="another one", hint=HINT)
        if answer.status != 200:
            reason = shown(answer.body[:MAX_REASON_BYTES].decode(errors="replace"))
            got = f"{answer.status}: {reason}"
            hint = MISDIRECTED if answer.status == 421 else ""
            raise KVPlanError("PEER", action, expected="status 200", got=got, hint=hint)
        return answer.body

    async def _ask(
        self, address: str, method: str, target: str, body: bytes, access: Access, timeout_s: float
    ) -> _Answer:
        """Ask a server once. Raises OSError or EOFError, or ValueError for what is no answer."""
        kept = self._take(access, address)
        if kept is not None:
            try:
                return await self._ask_by(kept, address, method, target, body, access)
            except (OSError, EOFError):
                # one that the server has ended before it answered
                if kept.is_answering:
                    raise
        connection = await _connected(address, access, timeout_s)
        return await self._ask_by(connection, address, method, target, body, access)

    async def _ask_by(
        self,
        connection: _Connection,
        address: str,
        method: str,
        target: str,
        body: bytes,
        access: Access,
    ) -> _Answer:
        """Ask over a connection, which is kept if the question is answered, and ends otherwise."""
        is_kept = False
        try:
            asked = Asked(method, target, address, connection.server)
            proof = Proof.of(access.key, access.challenge_of(address), asked, body)
            lines = {"Host": address, PROOF: f"{SCHEME} {proof}"}
            head, answer = await connection.ask(message(f"{method} {target} HTTP/1.1", body, lines))
            status = int(head.first[1])
            challenge, _, signature = head.quoted(SIGNATURE).partition(" ")
            is_signed = proof.has_answer(access.key, signature, status, challenge, answer)
            # A challenge without a signature may be another server's, and costs one more question.
            if is_signed or status == 401:
                access.remember(address, challenge)
            is_kept = is_signed and status == 200
            return _Answer(status, answer, is_signed)
        finally:
            if is_kept:
                self._keep(connection, access, address)
            else:
                connection.close()

    def _take(self, access: Access, address: str) -> _Connection | None:
        """Take the connection to a server that was used last, if one is kept."""
        kept = self._kept.get((access, address))
        if not kept:
            return None
        connection = next(reversed(kept))
        self._forget(connection, access, address)
        return connection

    def _keep(self, connection: _Connection, access: Access, address: str) -> None:
        if self._num_kept >= MAX_KEPT or not connection.is_open:
            connection.close()
            return
        timer = asyncio.get_running_loop().call_later(KEEP_S, connection.close)
        self._kept[access, address][connection] = timer
        self._num_kept += 1
        connection.on_end = partial(self._forget, connection, access, address)

    def _forget(self, connection: _Connection, access: Access, address: str) -> None:
        """Drop a kept connection, which is used now or has ended."""
        kept = self._kept[access, address]
        kept.pop(connection).cancel()
        self._num_kept -= 1
        connection.on_end = _nothing
        if not kept:
            del self._kept[access, address]


def _failure(error: Exception) -> str:
    """Return why no answer came, for example ``connection refused``."""
    # errno of a name that has no address is negative, and its text says so
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0).lower()
    if str(error):
        return shown(str(error))
    return "none" if isinstance(error, TimeoutError) else type(error).__name__


async def _connected(address: str, access: Access, timeout_s: float) -> _Connection:
    """Return a connection to a server, encrypted if the access has TLS. Raises OSError."""
    host, _, port_text = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    port = integer(int(port_text), "port", high=PORT_END)
    plain = await _plainly_connected(host, port, timeout_s)
    try:
        # the server to which the connection has led, by rule access.D2
        server = numeric_address(plain.getpeername())
        _, connection = await asyncio.get_running_loop().create_connection(
            partial(_Connection, server),
            sock=plain,
            ssl=access.client_tls,
            server_hostname=host if access.client_tls else None,
        )
    except BaseException:
        plain.close()
        raise
    return connection


async def _plainly_connected(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection to the first address of a host that accepts one. Raises OSError."""
    failure = OSError(f"{host} has no address")
    loop = asyncio.get_running_loop()
    # a name server that takes most of the time is what was too slow
    addresses = await addresses_of(host, port, 0.9 * timeout_s)
    for number, (family, address) in enumerate(addresses):
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            # all addresses but the last one, any of which may be silent
            patience_s = SILENT_S if number + 1 < len(addresses) else None
            async with asyncio.timeout(patience_s):
                await loop.sock_connect(connection, address)
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure
