"""The bootstrap server of SGLang's plugin, and decode's questions to it."""

from __future__ import annotations

import json
import logging
import tracemalloc
from collections.abc import Iterator
from queue import Queue

import pytest

from kvplan import KVPlanError
from kvplan.protocol.rooms import Rooms
from kvplan_nixl.serving import Access, Driver
from kvplan_nixl.sglang import bootstrap
from kvplan_nixl.sglang.bootstrap import MAX_ENTRY_BYTES, BootstrapServer
from tests.blocking import KEY, ask, exchange, publish, unblocked, withdraw


class Watch(Driver):
    """This machine, with a clock that shows what its list holds."""

    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self.times = times

    def monotonic(self) -> float:
        return self.times[0]


DEAD = "127.0.0.1:1"  # nobody listens there
LOGGER = logging.getLogger("test")


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0, system=Driver())
    yield server
    server.close()


def wanted(rooms: Rooms, room: int, address: str) -> Queue[object]:
    """Where the entry of a room will be."""
    entries: Queue[object] = Queue()

    def take(entry: object) -> bool:
        entries.put_nowait(entry)
        return True

    rooms.subscribe(f"reader of {room}", f"{room}", address, take)
    return entries


def test_what_is_published_later_is_found(server: BootstrapServer) -> None:
    """Each rank that asks gets the entry, once."""
    queues = [wanted(Rooms(LOGGER, KEY, Driver()), 7, server.address) for _ in range(2)]
    assert all(entries.empty() for entries in queues)
    publish(server.address, 7, {"token": 1})
    assert [entries.get(timeout=10) for entries in queues] == [{"token": 1}] * 2
    assert all(entries.empty() for entries in queues)


def test_a_forgotten_room_is_not_found(server: BootstrapServer) -> None:
    """A request that was aborted leaves nothing behind."""
    rooms = Rooms(LOGGER, KEY, Driver())
    forgotten, other = wanted(rooms, 7, server.address), wanted(rooms, 8, server.address)
    rooms.unsubscribe("reader of 7")
    publish(server.address, 7, {})
    publish(server.address, 8, {"token": 2})
    assert other.get(timeout=10) == {"token": 2}
    assert forgotten.empty()


def test_a_server_that_does_not_answer(server: BootstrapServer) -> None:
    """Rooms of other servers are found meanwhile."""
    rooms = Rooms(LOGGER, KEY, Driver())
    dead, other = wanted(rooms, 6, DEAD), wanted(rooms, 7, server.address)
    publish(server.address, 7, {"token": 3})
    assert other.get(timeout=10) == {"token": 3}
    assert dead.empty()
    rooms.unsubscribe("reader of 6")
    with pytest.raises(KVPlanError, match="PEER"):
        ask(DEAD, [6])


def test_junk_pushes_nothing_out(server: BootstrapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rooms as a server keeps pushed a real one out; now a new one waits until there is a place."""
    monkeypatch.setattr(bootstrap, "MAX_ROOMS", 2)
    owner = publish(server.address, 1, {"token": 1})
    publish(server.address, 2, {})
    for room in range(3, 9):
        with pytest.raises(KVPlanError, match=r"PEER: .* got 400: 'RANGE: cannot publish: expected at most 2 rooms"):
            publish(server.address, room, {"token": 666})
    assert ask(server.address, [1]) == {1: {"token": 1}}
    withdraw(server.address, 1, owner)
    publish(server.address, 3, {"token": 3})
    assert ask(server.address, [1, 3]) == {3: {"token": 3}}


def test_an_entry_is_not_overwritten(server: BootstrapServer) -> None:
    """``token: 666`` replaced a real entry; now a room is its owner's, for other attempts too."""
    owner = publish(server.address, 7, {"token": 1})
    for attempt in ({"token": 666}, {"token": 666, "attempt": "another"}, {"token": 1}):
        with pytest.raises(KVPlanError, match=r"PEER: .* got 400: 'NAME: cannot use room 7: expected the owner"):
            publish(server.address, 7, attempt)
    with pytest.raises(KVPlanError, match=r"PEER: .* got 400: 'NAME"):
        withdraw(server.address, 7, "f" * 32)
    assert ask(server.address, [7]) == {7: {"token": 1}}
    publish(server.address, 7, {"token": 2}, owner=owner)
    assert ask(server.address, [7]) == {7: {"token": 2}}


def test_entries_have_their_time_and_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 long prompts held 5.2 GB, for good; now entries are text, bounded in all, and go after a while."""
    now = [0.0]
    server = BootstrapServer("127.0.0.1", 0, keep_s=60, system=Watch(now))
    monkeypatch.setattr(bootstrap, "MAX_KEPT_BYTES", 7700)
    long = {"token": "x" * 2000}
    owners = [publish(server.address, room, long) for room in (1, 2)]
    for room, stages in ((3, 1), (4, 2)):
        with pytest.raises(KVPlanError, match="expected at most 7700 bytes of all rooms"):
            publish(server.address, room, long, 0, stages)
    publish(server.address, 1, {"token": 1}, owner=owners[0])
    now[0] = 59.0
    publish(server.address, 3, {"token": "x" * 500})
    assert ask(server.address, [1, 2, 3]).keys() == {1, 2, 3}
    now[0] = 60.0
    assert ask(server.address, [1, 2, 3]).keys() == {3}
    assert server._num_bytes == sum(room.num_bytes for room in server._rooms.values()) < 3000
    withdraw(server.address, 3, server._rooms[3].owner)
    assert (server._num_bytes, server._rooms) == (0, {})
    server.close()


def test_an_entry_is_not_parsed(server: BootstrapServer) -> None:
    """The server keeps text: what is no entry fails the request that asks for it, and no other."""
    publish(server.address, 7, {"token": 1})
    names = f"{'a' * 32}/{'b' * 32}"
    for room, body in ((8, b"[" * 100_000), (9, b"nan"), (10, b""), (11, b'"]}')):
        exchange("a server", server.address, f"/publish/{room}/0/1/{names}", 10, Access(), body)
    entries = ask(server.address, [7, 8, 9, 10, 11])
    assert entries.pop(7) == {"token": 1}
    assert [entry.keys() for entry in entries.values()] == [{"error"}] * 4
    for path, body in (
        (f"/publish/7/0/1/{names}", b"\xff"),
        (f"/publish/12/0/1/{names}", "\U0001f600".encode()),
        (f"/publish/12/0/1/{'a' * 1000}/{'b' * 32}", b"{}"),
        (f"/publish/12/0/1/{'a' * 32}/{'b' * 1000}", b"{}"),
        (f"/withdraw/12/0/1/{'a' * 32}/c", b""),
    ):
        with pytest.raises(KVPlanError, match=r"PEER: .* got '?400"):
            exchange("a server", server.address, path, 10, Access(), body)
    assert 12 not in server._rooms
    with pytest.raises(KVPlanError, match=r"PEER: .* got '?413"):
        exchange("a server", server.address, f"/publish/7/0/1/{names}", 10, Access(), bytes(MAX_ENTRY_BYTES + 1))


def digest(number: int) -> str:
    return f"{number:032x}"


SHAPES = {
    "rooms": [(room, 0, 1, 0) for room in range(1 << 60, (1 << 60) + 500)],
    "stages": [(room, stage, 255, 0) for room in range(2) for stage in range(255)],
    "attempts": [(room, 0, 1, 9 * room + attempt) for room in range(1 << 60, (1 << 60) + 125) for attempt in range(4)],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("body", [b"", b"x" * 3000, b'"\\ud83d\\ude00"' * 100])
def test_bytes_are_those_of_memory(server: BootstrapServer, shape: str, body: bytes) -> None:
    """1 GiB in all was one of characters: 4 GiB with one emoji in each entry, 8 GiB with long names."""
    tracemalloc.start()
    began, _ = tracemalloc.get_traced_memory()
    for room, stage, stages, attempt in SHAPES[shape]:
        names = (digest(attempt), digest(room))
        server._publish(bytes(bytearray(body)), f"{room}", f"{stage}", f"{stages}", *names)
    num_bytes = tracemalloc.get_traced_memory()[0] - began
    tracemalloc.stop()
    assert num_bytes <= server._num_bytes


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"x": ""}', b"[", b"7", b"[7]", b'{"7.0": ""}', b'{"7": [8]}', b'{"7": 5}']
)
def test_no_rooms(server: BootstrapServer, body: bytes) -> None:
    """A question that names no rooms, or versions that are no text, is refused."""
    with pytest.raises(KVPlanError, match=r"PEER: .* got 400"):
        exchange("a server", server.address, "/ask/0/", 10, Access(), body)


@pytest.mark.parametrize("body", [b'{"7": ""}', b'{"07": ""}', b'{" 7": "8"}', b'{"6": "", "+7": "5"}'])
def test_a_room_is_asked_for_by_its_number(server: BootstrapServer, body: bytes) -> None:
    """However a stranger writes the number, and whatever version they have seen."""
    publish(server.address, 7, {"token": 1})
    answer = exchange("a server", server.address, "/ask/0/", 10, Access(), body)
    assert json.loads(answer)["rooms"].popitem()[1][1] == ['{"token": 1}']


def test_many_rooms_are_asked_for_in_parts(server: BootstrapServer) -> None:
    """4,000 waiting requests made a line of more than 64 KiB, and none was found ever after."""
    rooms = Rooms(LOGGER, KEY, Driver())
    queues = {room: wanted(rooms, room, server.address) for room in range(1 << 63, (1 << 63) + 4000)}
    for room in [*queues][::80]:
        publish(server.address, room, {"token": room})
    for room in [*queues][::80]:
        assert queues[room].get(timeout=10) == {"token": room}
    for room in queues:
        rooms.unsubscribe(f"reader of {room}")


def test_long_entries_come_one_after_the_other(server: BootstrapServer) -> None:
    """An answer has a limit; what does not fit comes with the next one."""
    rooms = Rooms(LOGGER, KEY, Driver())
    for room in range(4):
        publish(server.address, room, {"token": '"' * (MAX_ENTRY_BYTES * 2 // 5)})
    assert len(ask(server.address, range(4))) < 4
    for entries in [wanted(rooms, room, server.address) for room in range(4)]:
        assert entries.get(timeout=10)


def test_few_servers_are_asked(server: BootstrapServer) -> None:
    """A request names its bootstrap server, and each has a thread: there are not more than some."""
    rooms = Rooms(LOGGER, KEY, Driver(), max_servers=1)
    wanted(rooms, 7, server.address)
    with pytest.raises(KVPlanError, match=r"RANGE: cannot ask 127.0.0.1:1: expected at most 1 servers of rooms"):
        wanted(rooms, 8, DEAD)
    rooms.unsubscribe("reader of 7")


@pytest.mark.parametrize("address", [DEAD, "127.0.0.1:x", "127.0.0.1:-1", "[::1"])
def test_no_server(address: str) -> None:
    """A port where nobody listens, and what is no address, are refused as a peer."""
    with pytest.raises(KVPlanError, match="PEER: cannot reach the server of rooms at"):
        ask(address, [5])


def test_a_port_that_is_busy(server: BootstrapServer) -> None:
    """The error names the port."""
    host, port = server.address.split(":")
    with pytest.raises(KVPlanError, match=rf"PEER: cannot listen on {server.address}: expected .*, got .*in use"):
        BootstrapServer(host, int(port), system=Driver())


@pytest.mark.parametrize("access", [None, Access(key=b"another secret of others")], ids=["no key", "another key"])
def test_a_stranger_gets_no_room(access: Access | None) -> None:
    """With a key, nobody without it asks for a room, publishes or withdraws."""
    ours = Access(key=b"a secret of all engines")
    server = BootstrapServer("127.0.0.1", 0, system=Driver(ours))
    owner = publish(server.address, 7, {"token": 1}, access=ours)
    for attempt in (
        lambda: ask(server.address, [7], access),
        lambda: publish(server.address, 8, {"token": 666}, access=access),
        lambda: withdraw(server.address, 7, owner, access=access),
    ):
        with pytest.raises(KVPlanError, match=r"PEER: .* expected an engine with the same key, got status 401"):
            attempt()
    assert ask(server.address, [7, 8], ours) == {7: {"token": 1}}
    server.close()


def test_an_answer_of_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers at the server's address may be no bootstrap server."""
    for answer in (b"<html>", b"7", b'{"room": []}', b'{"7": 7}'):
        monkeypatch.setattr(Driver, "exchange", unblocked(lambda *_, answer=answer: answer))
        with pytest.raises(KVPlanError, match="MESSAGE: cannot ask"):
            ask(DEAD, [7])
