"""Connections between engines that are kept for the next question: they save connecting, and open nothing."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from kvplan import KVPlanError
from kvplan.protocol import Leases, Listener
from kvplan.protocol.system import Route
from kvplan_nixl.serving import Access, Driver, driver
from kvplan_nixl.serving.client import Client
from kvplan_nixl.serving.http import Server
from tests.blocking import exchange, fetch, reserved_port, stop_listening, wait_until
from tests.serving.test_access import KEY, encrypted, question, status
from tests.serving.test_access import certificates as certificates
from tests.serving.test_doors import CLAIMS, drip_until_it_ends, server_of, signed_post


class Doubling:
    """A server that doubles what it is sent, how many connections it has had, and which are open."""

    def __init__(self, access: Access, port: int = 0) -> None:
        routes = {"POST /twice": Route(lambda body: 2 * body, max_bytes=8), "POST /refused": Route(refuse)}
        self._server = cast(Server, Driver(access).serve("127.0.0.1", port, routes))
        self.port = self._server.port
        self.num_accepted = 0
        self._meet: Callable[..., Coroutine[Any, Any, None]] = self._server._meet
        self._server._meet = self.meet  # type: ignore[method-assign, assignment]

    def meet(self, *connection: Any) -> Coroutine[Any, Any, None]:
        self.num_accepted += 1
        return self._meet(*connection)

    @property
    def num_open(self) -> int:
        return len(self._server._connections)

    def ask(self, access: Access, path: str = "/twice") -> bytes:
        return exchange("a server", f"127.0.0.1:{self.port}", path, 10, access, b"ab"[: 2 * (path == "/twice")])

    def close(self) -> None:
        self._server.close()


def refuse(_: bytes) -> bytes:
    raise KVPlanError("RANGE", "answer", expected="a place", got="none")


@pytest.fixture
def access() -> Access:
    return Access(key=KEY)


@pytest.fixture
def listener(access: Access) -> Iterator[Listener]:
    with closing(Listener("prefill", "127.0.0.1", [b"offer"], Leases(Driver()), system=Driver(access))) as listener:
        yield listener


class Mixing(Server):
    """A server that mixes its answers: another one first, two of them, one in pieces, half of one, or none."""

    answers: list[bytes]
    rng: random.Random

    async def _converse(self, reader: Any, writer: Any, address: str, state: Any) -> bool:
        status, answer = await self._answer(reader, address, state)
        self.answers.append(answer)
        another = self.rng.choice(self.answers[-20:])
        half = answer[: self.rng.randrange(len(answer))]
        sent = self.rng.choice([answer] * 6 + [another, answer + another, another + answer, half, answer + b"x"])
        # who has half of an answer waits for the rest, or for the end of the connection
        goes_on = status == 200 and sent is not half and self.rng.random() < 0.8
        while sent:
            size = self.rng.choice([30, 1 << 20])
            writer.write(sent[:size])
            sent = sent[size:]
            await writer.drain()
            await asyncio.sleep(0)
        return goes_on


def test_no_question_gets_the_answer_to_another(access: Access) -> None:
    """Whatever a server sends on connections that are kept: its own answer, or an error. None is kept for good."""
    loop = asyncio.new_event_loop()
    client = Client()
    server = Mixing("127.0.0.1", 0, {"POST /echo": Route(lambda body: body[::-1], max_bytes=99)}, access, loop)
    server.answers, server.rng = [], random.Random(1)
    outcomes = Counter[str]()

    async def ask(number: int) -> None:
        body = f"question {number}".encode()
        try:
            answer = await client.exchange("it", f"127.0.0.1:{server.port}", "/echo", 30, access, body)
            outcomes["right" if answer == body[::-1] else "wrong"] += 1
        except KVPlanError as error:
            outcomes[error.code] += 1

    async def ask_all() -> None:
        for start in range(0, 400, 4):
            await asyncio.gather(*map(ask, range(start, start + 4)))
        await server._close()
        async with asyncio.timeout(30):
            while client._num_kept:
                await asyncio.sleep(0.001)

    with closing(loop):
        loop.run_until_complete(ask_all())
    assert outcomes.keys() == {"right", "PEER"}
    assert min(outcomes.values()) > 50
    assert (client._num_kept, client._kept) == (0, {})


def test_questions_share_a_connection(access: Access) -> None:
    """The first question takes two connections, since the reader has no challenge yet, and the others none."""
    with closing(Doubling(access)) as server:
        for _ in range(20):
            assert server.ask(access) == b"abab"
        assert server.num_accepted == 2
        wait_until(lambda: server.num_open == 1)


def test_tls_shakes_hands_once(certificates: Path) -> None:
    """An encrypted connection is kept too, which saves its handshake."""
    ours = encrypted(certificates, "engine", "engine")
    with closing(Doubling(ours)) as server:
        for _ in range(5):
            assert server.ask(ours) == b"abab"
        assert server.num_accepted == 2


def test_readers_share_no_connection(access: Access) -> None:
    """One with another key, or without, gets its own connection, on which it is refused."""
    with closing(Doubling(access)) as server:
        assert server.ask(access) == b"abab"
        with pytest.raises(KVPlanError, match="got status 401"):
            server.ask(Access(key=b"another key, of some other engines"))
        assert server.num_accepted == 4


def test_questions_at_a_time_have_connections_of_their_own(access: Access) -> None:
    """A connection has one question at a time: those at once take several, all of which are kept."""
    driver = Driver(access)
    gate = threading.Event()

    async def wait(_: bytes) -> bytes:
        while not gate.is_set():
            await driver.sleep(0.005)
        return b"answer"

    routes = {"GET /wait": Route(wait), "GET /now": Route(bytes)}
    with closing(cast(Server, driver.serve("127.0.0.1", 0, routes))) as server:
        address = f"127.0.0.1:{server.port}"
        assert exchange("a server", address, "/now", 10, access) == b""
        answers: list[bytes] = []
        ask = lambda: answers.append(exchange("a server", address, "/wait", 10, access))  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(server._connections) == 3)
        gate.set()
        for thread in threads:
            thread.join()
        assert answers == [b"answer"] * 3
        assert exchange("a server", address, "/now", 10, access) == b""
        assert len(server._connections) == 3


def test_a_server_that_has_restarted_is_asked_over_a_new_connection(access: Access) -> None:
    """Its kept connections have ended, which costs another one, and no error."""
    with reserved_port() as port:
        server = Doubling(access, port)
        assert server.ask(access) == b"abab"
        server.close()
        with closing(Doubling(access, port)) as again:
            assert again.ask(access) == b"abab"


def test_a_question_that_meets_the_end_of_its_connection_is_asked_again(access: Access) -> None:
    """A server may end a connection while a question is on its way, and has answered nothing then."""
    with closing(Doubling(access)) as server, closing(Cutting(server.port)) as cutting:
        address = f"127.0.0.1:{cutting.port}"
        # the server is reached by way of another address, as the wire's relay is
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvplan_nixl.serving.client.numeric_address", lambda _: f"127.0.0.1:{server.port}")
            for _ in range(5):
                assert exchange("a server", address, "/twice", 10, access, b"ab") == b"abab"
    # after the first two, each connection has an answer, and a question that nobody answers
    assert cutting.num_questions == [1, 2, 2, 2, 2, 1]


class Cutting:
    """Passes a question of each connection on to a server, and ends the connection at its second one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.num_questions: list[int] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.num_questions.append(1)
            threading.Thread(target=self._meet, args=(connection, len(self.num_questions) - 1), daemon=True).start()

    def _meet(self, connection: socket.socket, number: int) -> None:
        with connection, suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 10) as server:
            server.sendall(question(connection))
            connection.sendall(server.recv(1 << 16))
            with suppress(ValueError):
                if connection.recv(1):
                    self.num_questions[number] += 1

    def close(self) -> None:
        stop_listening(self._server)


def test_half_an_answer_is_not_asked_for_again(access: Access) -> None:
    """Where a part of the answer came before the connection ended, the question failed, as over a new connection."""
    with closing(Doubling(access)) as server, socket.create_server(("127.0.0.1", 0)) as relay:
        port = relay.getsockname()[1]
        questions: list[bytes] = []

        def run() -> None:
            # the first question has no challenge, and is answered with a 401, after which the connection ends
            for is_last in (False, True):
                connection, _ = relay.accept()
                with connection, socket.create_connection(("127.0.0.1", server.port), 10) as near:
                    near.sendall(question(connection))
                    connection.sendall(near.recv(1 << 16))
                    if is_last:
                        questions.append(question(connection))
                        near.sendall(questions[0])
                        connection.sendall(near.recv(1 << 16)[:20])

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        address = f"127.0.0.1:{port}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvplan_nixl.serving.client.numeric_address", lambda _: f"127.0.0.1:{server.port}")
            assert exchange("a server", address, "/twice", 10, access, b"ab") == b"abab"
            with pytest.raises(KVPlanError, match=r"PEER: cannot reach a server: .* got 'the connection has ended'"):
                exchange("a server", address, "/twice", 10, access, b"ab")
        thread.join(30)
        assert len(questions) == 1


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("extra", [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"x"])
def test_an_answer_to_no_question_ends_the_connection(access: Access, extra: bytes, is_late: bool) -> None:
    """What a server sends beside an answer, or between questions, does not pass for the next question's answer."""
    with closing(Doubling(access)) as server, socket.create_server(("127.0.0.1", 0)) as relay:
        has_answer = threading.Event()
        after: list[bytes] = []

        def run() -> None:
            # the first question has no challenge, and is answered with a 401
            for more in (b"", extra):
                connection, _ = relay.accept()
                with connection, socket.create_connection(("127.0.0.1", server.port), 10) as near:
                    near.sendall(question(connection))
                    connection.sendall(near.recv(1 << 16) + (b"" if is_late else more))
                    if more and is_late:
                        has_answer.wait(10)
                        connection.sendall(more)
                        after.append(connection.recv(1))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        refused = pytest.raises(KVPlanError, match="longer than it says")
        with pytest.MonkeyPatch.context() as patch, nullcontext() if is_late else refused:
            patch.setattr("kvplan_nixl.serving.client.numeric_address", lambda _: f"127.0.0.1:{server.port}")
            address = f"127.0.0.1:{relay.getsockname()[1]}"
            assert exchange("a server", address, "/twice", 10, access, b"ab") == b"abab"
        has_answer.set()
        thread.join(30)
        assert not thread.is_alive()
        assert after == [b""] * is_late


def test_a_connection_is_kept_for_seconds(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a question it ends, so that engines that talk no more hold no descriptors."""
    monkeypatch.setattr("kvplan_nixl.serving.client.KEEP_S", 0.05)
    with closing(Doubling(access)) as server:
        server.ask(access)
        wait_until(lambda: server.num_open == 0)
        assert server.ask(access) == b"abab"


def test_few_connections_are_kept(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of very many engines keeps some connections, and asks the others over new ones."""
    monkeypatch.setattr("kvplan_nixl.serving.client.MAX_KEPT", 2)
    monkeypatch.setattr("kvplan_nixl.serving.client.KEEP_S", 100)
    monkeypatch.setattr(driver._process(), "client", Client())  # other tests' keeps their connections
    with ExitStack() as stack:
        servers = [stack.enter_context(closing(Doubling(access))) for _ in range(5)]
        for _ in range(2):
            for server in servers:
                assert server.ask(access) == b"abab"
        wait_until(lambda: sum(server.num_open for server in servers) == 2)


def test_a_refusal_ends_the_connection(access: Access) -> None:
    """Only an answer keeps a connection."""
    with closing(Doubling(access)) as server:
        server.ask(access)
        for path in ("/refused", "/nowhere"):
            with pytest.raises(KVPlanError, match="PEER: cannot reach a server: expected status 200"):
                server.ask(access, path)
            wait_until(lambda: server.num_open == 0)


def test_each_question_is_signed(listener: Listener) -> None:
    """One signed question opens a connection for no other: the next one is refused without a signature of its own."""
    signed = signed_post(listener, CLAIMS)
    unsigned = [b"GET / HTTP/1.1\r\n\r\n", b"POST /claims HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"]
    # the signed one is new once, and a recorded one from then on
    for second in (signed, *unsigned):
        with socket.create_connection(("127.0.0.1", listener.source.port), 10) as connection:
            connection.sendall(signed if second is signed else signed_post(listener, CLAIMS))
            assert status(connection.recv(1 << 16)) == 200
            connection.sendall(second)
            assert status(connection.recv(1 << 16)) == 401
            # and that ends the connection
            connection.sendall(signed_post(listener, CLAIMS))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""


def test_connections_without_a_question_give_way(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that hold all connections of a server, and ask nothing, keep no other engine out."""
    monkeypatch.setattr("kvplan_nixl.serving.http.MAX_CONNECTIONS", 4)
    with ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", listener.source.port), 10))
            connection.sendall(signed_post(listener, CLAIMS))
            assert status(connection.recv(1 << 16)) == 200
        for _ in range(3):
            assert fetch(listener.source, 10, Access(key=KEY)).workers == (b"offer",)
        assert len(server_of(listener)._connections) <= 4


def shorten_after(num_questions: int, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a connection 0.2 s for the question after some others, which a busy machine may take longer to ask."""
    server = server_of(listener)
    converse, answered = server._converse, list[bool]()

    async def noted(*connection: Any) -> bool:
        answered.append(await converse(*connection))
        if len(answered) == num_questions:
            monkeypatch.setattr("kvplan_nixl.serving.http.CONNECTION_S", 0.2)
        return answered[-1]

    monkeypatch.setattr(server, "_converse", noted)


def test_a_server_ends_a_connection_without_a_question(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that holds one open for ever has some seconds for each question."""
    shorten_after(2, listener, monkeypatch)
    with socket.create_connection(("127.0.0.1", listener.source.port), 10) as connection:
        for _ in range(2):
            connection.sendall(signed_post(listener, CLAIMS))
            assert status(connection.recv(1 << 16)) == 200
        assert connection.recv(1) == b""


def test_a_second_question_that_never_ends(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then has the seconds of a question, also after one that was answered."""
    shorten_after(1, listener, monkeypatch)
    with socket.create_connection(("127.0.0.1", listener.source.port), 10) as connection, suppress(ConnectionError):
        connection.sendall(signed_post(listener, CLAIMS))
        assert status(connection.recv(1 << 16)) == 200
        drip_until_it_ends(connection)


def test_a_closed_server_ends_kept_connections(access: Access) -> None:
    """Whoever closes a server has no connection of it left."""
    server = Doubling(access)
    server.ask(access)
    wait_until(lambda: server.num_open == 1)
    server.close()
    assert server.num_open == 0
