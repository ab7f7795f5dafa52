"""Attacks on a listener's door from the same host: each one worked on an earlier version of this code."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any, cast

import pytest

from kvplan import KVPlanError
from kvplan.protocol import Claims, Leases, Listener, Source
from kvplan.protocol.claims import (
    MAX_MESSAGE_BYTES,
    MAX_NAME_BYTES,
    ClaimAnswer,
    ClaimMessage,
    SourceClaims,
)
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.system import MAX_ANSWER_BYTES, Route
from kvplan_nixl.serving import Access, Driver
from kvplan_nixl.serving.access import Asked, Proof
from kvplan_nixl.serving.addresses import Addresses, addresses_of
from kvplan_nixl.serving.http import MAX_HEAD_BYTES, Server
from tests.blocking import (
    Answered,
    exchange,
    fetch,
    no_more_threads,
    reserved_port,
    send_claims,
    stop_listening,
    wait_until,
    waited,
)
from tests.serving.test_access import KEY, asked, status

LOGGER = logging.getLogger("test")


CLAIMS = json.dumps(ClaimMessage("a").fields()).encode()


@pytest.fixture
def leases() -> Leases:
    return Leases(Driver())


@pytest.fixture
def listener(leases: Leases) -> Iterator[Listener]:
    """A listener on a free port of this machine."""
    with closing(Listener("prefill", "127.0.0.1", [b"offer"], leases, system=Driver(Access(key=KEY)))) as listener:
        yield listener


def post(length: int, *lines: str, path: str = "/claims") -> bytes:
    """The head of a question."""
    return "\r\n".join((f"POST {path} HTTP/1.1", f"Content-Length: {length}", *lines, "", "")).encode()


def signed_post(listener: Listener, body: bytes) -> bytes:
    """A question about claims, from an engine with the key."""
    port = listener.source.port
    address = f"127.0.0.1:{port}"
    asked = Asked("POST", "/claims", address, address)
    proof = Proof.of(SharedKey.of(KEY), server_of(listener)._challenges.latest, asked, body)
    return post(len(body), f"Host: {address}", f"Authorization: Kvplan {proof}") + body


def server_of(listener: Listener) -> Server:
    return cast(Server, listener._server)


def is_well(listener: Listener) -> bool:
    """Whether the listener answers an engine."""
    return fetch(listener.source, 10, Access(key=KEY)).workers == (b"offer",)


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, 16 << 20, 10**12 - 1])
def test_a_bomb_is_refused_before_it_is_read(listener: Listener, length: int) -> None:
    """16 MiB of ``[]`` stopped an engine for 2.5 s; a body above the limit of its path is not even received."""
    assert status(asked(listener.source.port, post(length))) == 401
    signed = signed_post(listener, b"").replace(b"Content-Length: 0", b"Content-Length: %d" % length)
    assert status(asked(listener.source.port, signed)) == 413
    assert is_well(listener)


@pytest.mark.parametrize(
    "question",
    [
        post(2, "Content-Length: 2") + b"{}",
        post(2, "content-length: 13") + b"{}",
        post(2, "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n",
        post(2, "X: y", " folded") + b"{}",
        post(2, "X : y") + b"{}",
        post(2, "X: \x00") + b"{}",
        post(2, "no colon") + b"{}",
        b"POST /claims HTTP/1.1\r\nContent-Length: +2\r\n\r\n{}",
        b"POST /claims HTTP/1.1\r\nContent-Length: 2_0\r\n\r\n{}",
        b"POST /claims HTTP/1.1\r\nContent-Length: -2\r\n\r\n{}",
        b"POST /claims HTTP/1.1\r\nContent-Length: 9999999999999\r\n\r\n{}",
        b"POST /claims\r\n\r\n",
        b"\xff / HTTP/1.1\r\n\r\n",
        b"GET nowhere HTTP/1.1\r\n\r\n",
        post(0, "X: " + "x" * (1 << 20)),
        post(0, *(f"X{number}: y" for number in range(10_000))),
    ],
)
def test_a_head_that_could_be_read_in_two_ways_is_refused(listener: Listener, question: bytes) -> None:
    """Two lengths, chunks, folded lines and the like; and heads that are longer than any engine's."""
    assert status(asked(listener.source.port, question)) in (400, 401)
    assert is_well(listener)


def test_idle_connections_hold_nothing(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """400 idle connections had 400 threads; now they have none, and the oldest make place for new ones."""
    monkeypatch.setattr("kvplan_nixl.serving.http.MAX_CONNECTIONS", 32)
    with ExitStack() as stack, no_more_threads():
        for _ in range(100):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", listener.source.port), 10))
            connection.sendall(b"GET / ")
        assert is_well(listener)
        assert len(server_of(listener)._connections) <= 32
        assert caplog.text == ""


def test_idle_connections_close_no_others(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 connections of a stranger closed the oldest of anybody: they close each other, and not one that is signed."""
    monkeypatch.setattr("kvplan_nixl.serving.http.MAX_CONNECTIONS", 8)
    port = listener.source.port
    question = signed_post(listener, CLAIMS)
    with ExitStack() as stack:
        signed = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        signed.sendall(question[:-1])
        other_host = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10, ("127.0.0.2", 0)))
        other_host.sendall(b"GET / ")
        wait_until(lambda: server_of(listener)._unread_bytes)
        for _ in range(30):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        assert is_well(listener)
        assert len(server_of(listener)._connections) <= 8
        signed.sendall(question[-1:])
        assert status(signed.recv(1 << 16)) == 200
        other_host.sendall(b"HTTP/1.1\r\n\r\n")
        assert status(other_host.recv(1 << 16)) == 401


def test_too_many_signed_connections_refuse_more(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where engines hold all connections, one more is closed, and none of theirs."""
    monkeypatch.setattr("kvplan_nixl.serving.http.MAX_CONNECTIONS", 2)
    with ExitStack() as stack:
        question = signed_post(listener, CLAIMS)
        signed = stack.enter_context(socket.create_connection(("127.0.0.1", listener.source.port), 10))
        signed.sendall(question[:-1])
        others = [signed_post(listener, bytes(99))[:-1]]
        stack.enter_context(socket.create_connection(("127.0.0.1", listener.source.port), 10)).sendall(others[0])
        wait_until(lambda: server_of(listener)._unread_bytes >= 99 + len(CLAIMS))
        with socket.create_connection(("127.0.0.1", listener.source.port), 10) as more:
            assert more.recv(1) == b""
        signed.sendall(question[-1:])
        assert status(signed.recv(1 << 16)) == 200


def test_many_ranks_connect_at_once(listener: Listener) -> None:
    """With a backlog of 5 the seventh of 64 ranks waited for a second; now all are let in while the server is busy."""
    is_busy, may_go_on = threading.Event(), threading.Event()

    def be_busy() -> None:
        is_busy.set()
        may_go_on.wait(10)

    server_of(listener)._loop.call_soon_threadsafe(be_busy)
    assert is_busy.wait(10)
    with ExitStack() as stack:
        for _ in range(64):
            # the system asks again after a second, where a server has no place for a connection
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.source.port), 0.9))
        may_go_on.set()
        assert is_well(listener)


def drip_until_it_ends(connection: socket.socket) -> None:
    """Send a byte now and then, until the server ends the connection."""
    connection.settimeout(0.01)
    deadline = time.monotonic() + 30
    ended = False
    while not ended:
        connection.sendall(b"x")
        with suppress(TimeoutError):
            ended = connection.recv(1) == b""
        assert time.monotonic() < deadline


def test_a_question_that_never_ends(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then held a connection for ever; now all of a question has some seconds."""
    with monkeypatch.context() as short:
        short.setattr("kvplan_nixl.serving.http.CONNECTION_S", 0.2)
        with socket.create_connection(("127.0.0.1", listener.source.port), 10) as connection, suppress(ConnectionError):
            drip_until_it_ends(connection)
    assert is_well(listener)


def test_unfinished_bodies_are_few(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight unfinished bodies held 160 MB: all that are received at a time have one limit."""
    monkeypatch.setattr("kvplan_nixl.serving.http.MAX_UNREAD_BYTES", 2000)
    with ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", listener.source.port), 10))
            connection.sendall(signed_post(listener, bytes(1000))[:-1])
        wait_until(lambda: server_of(listener)._unread_bytes >= 2000)
        assert status(asked(listener.source.port, signed_post(listener, b"x"))) == 503
        assert is_well(listener)


def test_a_strangers_body_is_not_received(leases: Leases) -> None:
    """The head is checked first."""
    with closing(Listener("prefill", "127.0.0.1", [b"offer"], leases, system=Driver(Access(key=KEY)))) as listener:
        for lines in ([], ["Authorization: Kvplan a b c d e"], ["Authorization: Basic eDp5"]):
            # the body never comes
            with socket.create_connection(("127.0.0.1", listener.source.port), 10) as connection:
                connection.sendall(post(1000, *lines))
                assert status(connection.recv(1 << 16)) == 401


class Answering:
    """A server that answers anything with these parts, one after the other, until it is closed."""

    def __init__(self, *parts: bytes, pause_s: float = 0.0) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._is_closed = threading.Event()
        port = int(self._server.getsockname()[1])
        self.source = Source("prefill", "a", "127.0.0.1", port)
        threading.Thread(target=self._run, args=(parts, pause_s), daemon=True).start()

    def _run(self, parts: tuple[bytes, ...], pause_s: float) -> None:
        # it may be closed before somebody has come
        with suppress(OSError):
            connection, _ = self._server.accept()
            with connection:
                for part in parts:
                    connection.sendall(part)
                    self._is_closed.wait(pause_s)

    def close(self) -> None:
        self._is_closed.set()
        stop_listening(self._server)


DRIP = [b"x"] * 10_000


@pytest.mark.parametrize(
    "parts", [[b"HTTP/1.1 200 OK\r\nX: ", *DRIP], [b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", *DRIP], DRIP]
)
def test_an_answer_that_never_ends(parts: list[bytes]) -> None:
    """A byte of a head or a body now and then held an exchange for ever: an answer has its time, all of it."""
    refused = pytest.raises(KVPlanError, match=r"PEER: cannot reach prefill at .*expected an answer within 0\.1 s")
    with closing(Answering(*parts, pause_s=0.02)) as server, refused:
        fetch(server.source, 0.1)


def test_an_answer_that_is_too_long() -> None:
    """An answer of 64 MiB took 14 s and 2 GB: it is refused by its head, before a byte of it is received."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_ANSWER_BYTES + 1)
    refused = pytest.raises(KVPlanError, match=r"PEER: cannot reach prefill .*an answer of 16777217 bytes, above")
    with closing(Answering(head)) as server, refused:
        fetch(server.source, 10)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\noffers",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 x OK\r\n\r\n",
        b"X" * MAX_HEAD_BYTES + b"Y",
        b"",
    ],
)
def test_an_answer_that_is_none(head: bytes) -> None:
    """Another kind of answer is refused as a peer."""
    with closing(Answering(head)) as server, pytest.raises(KVPlanError, match="PEER: cannot reach prefill"):
        fetch(server.source, 10)


def test_no_answer_is_too_long_to_be_read(leases: Leases) -> None:
    """Offers of many workers pass."""
    offers = [bytes([number]) * 100_000 for number in range(30)]
    with closing(Listener("prefill", "127.0.0.1", offers, leases, system=Driver(Access(key=KEY)))) as listener:
        assert fetch(listener.source, 10, Access(key=KEY)).workers == tuple(offers)


def test_a_late_end_is_of_the_first_attempt(listener: Listener, leases: Leases) -> None:
    """It ends the first attempt's lease, and not that of the second, of the same request."""
    access = Access(key=KEY)
    first = leases.grant("request 1")
    send_claims(listener.source, ClaimMessage(listener.source.start, done=((first, "decode"),)), access)
    assert leases.take_ended().done == ("request 1",)
    second = leases.grant("request 1")
    late = send_claims(listener.source, ClaimMessage(listener.source.start, done=((first, "decode"),)), access)
    assert late.done == (False,)
    assert leases.is_valid(second)
    assert leases.take_ended().done == ()


def test_leases_cannot_be_guessed() -> None:
    """Lease n of one request tells nobody the name of lease n + 1, or of the next start's."""
    assert len({Leases(Driver()).grant("r") for _ in range(100)}) == 100


@pytest.mark.parametrize("field", ["lease", "reader"])
def test_names_are_short(leases: Leases, field: str) -> None:
    """A name of 16 MiB stayed in memory: names have a limit, for readers and in messages of strangers."""
    names = {"lease": "r", "reader": "d", field: "\U0001f600" * (MAX_NAME_BYTES // 4) + "x"}
    claim = (names["lease"], names["reader"])
    with pytest.raises(KVPlanError, match="RANGE: cannot claim a lease"):
        ClaimMessage.of_fields(ClaimMessage("a", claims=(claim,)).fields())
    claims = Claims(LOGGER, Driver())
    with pytest.raises(KVPlanError, match="RANGE: cannot claim a lease"):
        claims.claim(Source("prefill", "a", "127.0.0.1", 1), *claim)


def test_many_claims_are_sent_in_parts() -> None:
    """However many requests wait, each message is below the limit of its path, and all are sent."""
    claims = SourceClaims(Source("prefill", "a", "127.0.0.1", 1))
    names = [f"{number} \U0001f600" * 40 for number in range(400)]
    for name in names:
        claims.claim((name, "d"), 0.0)
        claims.release(("done", name))
        claims.ask(name)
    seen: dict[str, list[Any]] = {"claims": [], "done": [], "asks": []}
    while (due := claims.next_due(1.0)) is not None and due <= 1.0:
        message = claims.take_message(1.0)
        fields = message.fields()
        assert len(partial(str.encode)(f"{fields!a}")) < MAX_MESSAGE_BYTES
        for kind, values in seen.items():
            values += fields[kind]
        claimed, done, asked = ((True,) * len(fields[kind]) for kind in seen)
        answer = ClaimAnswer(claimed, done, asked)
        claims.take_answer(message, answer, 1.0)
    assert seen == {
        "claims": [(name, "d") for name in names],
        "done": [("done", name) for name in names],
        "asks": names,
    }


def test_forged_handoffs_have_few_threads() -> None:
    """Each source had a thread: there are not more than some, and claims on others are refused."""
    held = threading.Event()

    def send(address: str, message: ClaimMessage) -> ClaimAnswer:
        held.wait(10)
        raise KVPlanError("PEER", "reach", expected="an answer", got="none")

    claims = Claims(LOGGER, Answered(send), max_sources=3)
    sources = [Source(f"prefill-{number}", "a", "127.0.0.1", 1) for number in range(4)]
    for source in sources[:3]:
        claims.claim(source, "lease", "d")
    with pytest.raises(KVPlanError, match="RANGE: cannot claim leases of prefill-3"):
        claims.claim(sources[3], "lease", "d")
    with pytest.raises(KVPlanError, match="RANGE: cannot claim leases of prefill-3"):
        waited(claims.ask(sources[3], "lease"))
    claims.release(sources[3], "lease", "d")
    held.set()
    claims.close()


def test_a_large_fleet_is_not_refused() -> None:
    """A decode engine may claim leases of 512 prefill engines at once, and of as many again."""
    answered = threading.Semaphore(0)

    def send(address: str, message: ClaimMessage) -> ClaimAnswer:
        answered.release()
        return ClaimAnswer((True,) * len(message.claims), (), (True,) * len(message.asks))

    claims = Claims(LOGGER, Answered(send))
    for number in range(1024):
        claims.claim(Source(f"prefill-{number}", "a", "127.0.0.1", 1), "lease", "d")
    assert all(answered.acquire(timeout=30) for _ in range(1024))
    claims.close()


def test_a_name_server_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system waits for a name server as long as that likes: a question has its time, and one thread for a host."""
    held = threading.Event()
    asked: list[str] = []
    getaddrinfo = socket.getaddrinfo
    before = {*lookups()}

    def silent(host: str, port: int, **options: Any) -> Any:
        if options.get("flags"):  # an address is none of a name server's business
            return getaddrinfo(host, port, **options)
        asked.append(host)
        held.wait(60)
        return getaddrinfo("127.0.0.1", port, **options)

    async def soon(host: str, port: int, timeout_s: float) -> Addresses:
        """The addresses within 0.1 s: a busy machine may wake both limits of a question at the same time."""
        assert timeout_s == 0.9 * 30
        return await addresses_of(host, port, 0.1)

    monkeypatch.setattr("socket.getaddrinfo", silent)
    monkeypatch.setattr("kvplan_nixl.serving.client.addresses_of", soon)
    try:
        for _ in range(3):
            with pytest.raises(KVPlanError, match=r"PEER: .*within 30 s, got 'no address of prefill.example in time'"):
                exchange("prefill", "prefill.example:9", "/", 30, Access())
        assert asked == ["prefill.example"]
    finally:
        held.set()
        # later tests count the names that are looked up
        for thread in {*lookups()} - before:
            thread.join(30)


def lookups() -> list[threading.Thread]:
    """The threads that look up names."""
    return [thread for thread in threading.enumerate() if thread.name == "kvplan addresses"]


def test_silent_name_servers_hold_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host has one, whatever its ports; when there are too many, another name is refused at once."""
    held = threading.Event()
    getaddrinfo = socket.getaddrinfo

    def silent(host: str, port: int | None, **options: Any) -> Any:
        if not options.get("flags"):
            held.wait(60)
            host = "127.0.0.1"
        return getaddrinfo(host, port, **options)

    for earlier in lookups():  # of other tests, which count too
        earlier.join(30)
    before = {*lookups()}
    monkeypatch.setattr("socket.getaddrinfo", silent)
    monkeypatch.setattr("kvplan_nixl.serving.addresses.MAX_LOOKUPS", 2)
    try:
        for host, port in (("a.example", 9), ("a.example", 10), ("b.example", 9)):
            with pytest.raises(TimeoutError, match="no address of"):
                asyncio.run(addresses_of(host, port, 0.01))
        for host in ("c.example", "d.example"):
            with pytest.raises(OSError, match="is not looked up: 2 other names are"):
                asyncio.run(addresses_of(host, 9, 60.0))
        assert len({*lookups()} - before) == 2
    finally:
        held.set()
        for thread in {*lookups()} - before:
            thread.join(30)
    # what was looked up goes, and the port is the one that is asked for
    assert asyncio.run(addresses_of("c.example", 7, 10.0)) == [(socket.AF_INET, ("127.0.0.1", 7))]


def test_an_address_that_is_none() -> None:
    """What is no host and port is refused as a peer."""
    for address in (
        "",
        "127.0.0.1",
        "127.0.0.1:x",
        "127.0.0.1:-1",
        "127.0.0.1:99999",
        "[::1",
        "\udc80:1",
        "a" * 99 + ":1",
    ):
        with pytest.raises(KVPlanError, match="PEER: cannot reach somebody"):
            exchange("somebody", address, "/", 1, Access())


def test_a_refused_connection_says_so() -> None:
    """A port on which nothing listens read as "expected an answer within 30 s", after 0.3 s."""
    refused = pytest.raises(
        KVPlanError, match=r"PEER: cannot reach prefill .*expected an answer, got connection refused"
    )
    with reserved_port() as port, refused:
        fetch(Source("prefill", "a", "127.0.0.1", port), 30)


def test_an_answer_that_is_awaited_ends_its_connection_well(caplog: pytest.LogCaptureFixture) -> None:
    """Each ended with "read() called while another coroutine is already waiting", when the answer was sent or not."""

    async def answer(body: bytes) -> bytes:
        return 2 * body

    driver = Driver()
    with closing(driver.serve("127.0.0.1", 0, {"POST /twice": Route(answer, 1 << 20)})) as server:
        question = bytes(1 << 19)
        for _ in range(3):
            answered = driver.run(driver.exchange("a server", f"127.0.0.1:{server.port}", "/twice", 10, question))
            assert answered == 2 * question
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
