"""Offers are served and requests let go over HTTP; whoever sends nonsense, or nothing, changes nothing."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from queue import SimpleQueue

import attrs
import pytest

from kvplan import KVPlanError
from kvplan.connector import Listener, Notifier, Offers, Source, fetch, send_done
from kvplan.connector.http import serve

LOGGER = logging.getLogger("test")


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A listener on a free port of this machine."""
    made = Listener("prefill", "127.0.0.1", [b"offer 0", bytes(range(256))])
    yield made
    made.close()


def test_offers_come_as_they_are(listener: Listener) -> None:
    """The offers are the workers' bytes. The clock of the same machine is not behind this one."""
    offers = fetch(listener.source, timeout_s=10)
    assert offers.workers == (b"offer 0", bytes(range(256)))
    assert offers.ahead_s >= 0


def test_the_quickest_answer_tells_the_time(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake that takes long does not make the other clock seem far ahead: the time is asked again."""
    decode, delays = Offers.decode, iter([5.0, 3.0, 2.0, 4.0])

    def slow(data: bytes, asked: float) -> Offers:
        return decode(data, asked - next(delays))

    monkeypatch.setattr(Offers, "decode", slow)
    assert 2 <= fetch(listener.source, timeout_s=10).ahead_s < 3


def test_another_start_is_not_taken_for_this_one(listener: Listener) -> None:
    """An engine that has restarted lost the blocks that a handoff names."""
    earlier = attrs.evolve(listener.source, start="earlier")
    with pytest.raises(
        KVPlanError, match=r"PEER: cannot shake hands with prefill at .* start earlier, got .*restarted"
    ):
        fetch(earlier, timeout_s=10)


def test_done_requests_come_once(listener: Listener) -> None:
    """What readers are done with is told once, in order."""
    send_done(listener.source, ["a", "b"])
    send_done(listener.source, ["c"])
    assert listener.done() == ["a", "b", "c"]
    assert listener.done() == []


@pytest.mark.parametrize("body", [b"{}", b"null", b"[", b"\xff", b"[" * 100_000])
def test_nonsense_is_refused(listener: Listener, body: bytes) -> None:
    """A body that is no list of requests gets status 400 and is forgotten."""
    connection = HTTPConnection(listener.source.host, listener.source.port, timeout=10)
    connection.request("POST", "/done", body)
    assert connection.getresponse().status == 400
    connection.close()
    assert listener.done() == []


def test_an_answer_that_is_no_offer_is_refused() -> None:
    """What is not the offers of an engine is an error with a code."""
    odd = [
        b'{"engine_id": "p", "start": "s", "workers": [], "clock": %s}' % clock for clock in (b'"x"', b"NaN", b"1e999")
    ]
    for data in (b"", b"[]", b"{}", *odd, b"[" * 100_000):
        with pytest.raises(KVPlanError, match="MESSAGE: cannot read offers"):
            Offers.decode(data, asked=0.0)


def unused() -> Source:
    """A source at a port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Source("prefill", "a", "127.0.0.1", probe.getsockname()[1])


def test_nobody_there() -> None:
    """An address where nobody listens is refused as a peer."""
    with pytest.raises(KVPlanError, match=r"PEER: cannot reach prefill at 127\.0\.0\.1"):
        fetch(unused(), timeout_s=10)


def test_somebody_who_never_answers() -> None:
    """A connection that is accepted and never answered ends after the time that is given."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = Source("prefill", "a", "127.0.0.1", server.getsockname()[1])
        with pytest.raises(KVPlanError, match="PEER: cannot reach prefill"):
            fetch(source, timeout_s=0.2)


def wait_for(listener: Listener, count: int) -> list[str]:
    """What readers are done with, when there are ``count`` of them."""
    found: list[str] = []
    while len(found) < count:
        found += listener.done()
        time.sleep(0.005)
    return found


def test_a_reader_that_has_gone(capfd: pytest.CaptureFixture[str]) -> None:
    """A reader that did not wait for an answer leaves no traceback behind."""
    has_gone = threading.Event()
    answering: SimpleQueue[threading.Thread] = SimpleQueue()

    def get(path: str) -> str:
        answering.put(threading.current_thread())
        has_gone.wait(10)
        return "offers" * (1 << 20)

    server = serve("127.0.0.1", 0, get=get, post=lambda *_: False)
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
        thread = answering.get(timeout=10)
    has_gone.set()
    thread.join(10)
    server.shutdown()
    server.server_close()
    assert capfd.readouterr().err == ""


def test_a_notifier_tells_all_engines(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that is gone costs a line in the log, and the others are told."""
    notifier = Notifier(LOGGER)
    notifier.put(unused(), "lost")
    notifier.put(listener.source, "a")
    notifier.put(listener.source, "b")
    assert wait_for(listener, 2) == ["a", "b"]
    assert "1 requests stay until their leases end: PEER: cannot reach prefill" in caplog.text
    notifier.close()
