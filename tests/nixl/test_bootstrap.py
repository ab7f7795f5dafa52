"""The bootstrap server of SGLang's plugin, and decode's questions to it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from queue import Queue

import pytest

from kvplan import KVPlanError
from kvplan_nixl.sglang import bootstrap
from kvplan_nixl.sglang.bootstrap import BootstrapServer, Rooms, ask, publish

DEAD = "127.0.0.1:1"  # nobody listens there
LOGGER = logging.getLogger("test")


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0)
    yield server
    server.close()


def wanted(rooms: Rooms, room: int, address: str) -> Queue[object]:
    """Where the entry of a room will be."""
    entries: Queue[object] = Queue()
    rooms.want(room, address, entries.put_nowait)
    return entries


def test_what_is_published_later_is_found(server: BootstrapServer) -> None:
    """Each rank that asks gets the entry, once."""
    queues = [wanted(Rooms(LOGGER), 7, server.address) for _ in range(2)]
    assert all(entries.empty() for entries in queues)
    publish(server.address, 7, {"token": 1})
    assert [entries.get(timeout=10) for entries in queues] == [{"token": 1}] * 2
    while any(thread.name == "kvplan rooms" for thread in threading.enumerate()):  # which end when nothing is wanted
        time.sleep(0.001)
    assert all(entries.empty() for entries in queues)


def test_a_forgotten_room_is_not_found(server: BootstrapServer) -> None:
    """A request that was aborted leaves nothing behind."""
    rooms = Rooms(LOGGER)
    forgotten, other = wanted(rooms, 7, server.address), wanted(rooms, 8, server.address)
    rooms.forget(7)
    publish(server.address, 7, {})
    publish(server.address, 8, {"token": 2})
    assert other.get(timeout=10) == {"token": 2}
    assert forgotten.empty()


def test_a_server_that_does_not_answer(server: BootstrapServer) -> None:
    """Rooms of other servers are found meanwhile."""
    rooms = Rooms(LOGGER)
    dead, other = wanted(rooms, 6, DEAD), wanted(rooms, 7, server.address)
    publish(server.address, 7, {"token": 3})
    assert other.get(timeout=10) == {"token": 3}
    assert dead.empty()
    rooms.forget(6)
    with pytest.raises(KVPlanError, match="PEER"):
        ask(DEAD, [6])


def test_the_newest_entries_stay(server: BootstrapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody asks for any more does not fill the memory."""
    monkeypatch.setattr(bootstrap, "MAX_ROOMS", 2)
    for room in (1, 2, 3, 2):
        publish(server.address, room, {"token": room})
    assert ask(server.address, [1, 2, 3]) == {2: {"token": 2}, 3: {"token": 3}}


@pytest.mark.parametrize("address", [DEAD, "127.0.0.1:x", "127.0.0.1:-1", "[::1"])
def test_no_server(address: str) -> None:
    """A port where nobody listens, and what is no address, are refused as a peer."""
    with pytest.raises(KVPlanError, match="PEER: cannot reach the bootstrap server at"):
        ask(address, [5])


def test_a_port_that_is_busy(server: BootstrapServer) -> None:
    """The error names the port."""
    host, port = server.address.split(":")
    with pytest.raises(KVPlanError, match=rf"PEER: cannot listen on {server.address}: expected .*, got .*in use"):
        BootstrapServer(host, int(port))


def test_an_answer_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep a question going."""
    monkeypatch.setattr(bootstrap, "TIMEOUT_S", 0.2)
    ends = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n{")
            while not ends.wait(0.01):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=[listening])
        thread.start()
        with pytest.raises(KVPlanError, match=r"PEER: .* within 0.2 s, got more than \d+ bytes"):
            ask(f"127.0.0.1:{listening.getsockname()[1]}", [5])
        ends.set()
        thread.join()


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"nan"])
def test_no_entry(server: BootstrapServer, body: bytes) -> None:
    """What is not a JSON object is refused, and nothing is stored."""
    connection = HTTPConnection(server.address)
    connection.request("POST", "/5", body)
    assert connection.getresponse().status == 400
    connection.close()
    assert ask(server.address, [5]) == {}
