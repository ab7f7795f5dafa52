"""Offers are served and claims answered over HTTP; whoever sends nonsense, or nothing, changes nothing."""

from __future__ import annotations

import json
import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator
from typing import cast

import attrs
import pytest

from kvplan import KVPlanError
from kvplan.protocol import Claims, DigestRequest, Leases, Listener, Source
from kvplan.protocol.claims import ClaimMessage
from kvplan.protocol.listener import MAX_PARTS, Offers
from kvplan.protocol.system import Route
from kvplan_nixl.serving import Driver
from kvplan_nixl.serving.access import Access, Asked, Proof
from kvplan_nixl.serving.http import Server
from tests.blocking import exchange, fetch, reserved_port, send_claims, unblocked, waited

LOGGER = logging.getLogger("test")


@pytest.fixture
def leases() -> Leases:
    """The leases of the listener."""
    return Leases(Driver())


@pytest.fixture
def listener(leases: Leases) -> Iterator[Listener]:
    """A listener on a free port of this machine."""
    made = Listener("prefill", "127.0.0.1", [b"offer 0", bytes(range(256))], leases, system=Driver())
    yield made
    made.close()


def test_offers_come_as_they_are(listener: Listener) -> None:
    """The offers are the workers' bytes."""
    assert fetch(listener.source, timeout_s=10).workers == (b"offer 0", bytes(range(256)))


def test_an_address_is_translated(leases: Leases) -> None:
    """A listener announces one address and listens on another."""
    listener = Listener("prefill", "prefill.example", [b"offer"], leases, bind="127.0.0.1", system=Driver())
    assert listener.source.host == "prefill.example"
    reachable = attrs.evolve(listener.source, host="127.0.0.1")
    assert fetch(reachable, timeout_s=10).workers == (b"offer",)
    listener.close()


def test_a_listener_that_is_closed_answers_nobody(leases: Leases) -> None:
    """The port is free again."""
    with reserved_port() as port:
        listener = Listener("prefill", "127.0.0.1", [], leases, port=port, system=Driver())
        listener.close()
        with pytest.raises(KVPlanError, match="PEER"):
            fetch(listener.source, timeout_s=1)
        again = Listener("prefill", "127.0.0.1", [], leases, port=port, system=Driver())
        assert fetch(again.source, timeout_s=10).workers == ()
        again.close()


def test_a_listener_that_is_not_reached_is_told(leases: Leases) -> None:
    """Offers are asked for at the address that readers get."""
    with reserved_port() as port:
        listener = Listener("prefill", "127.0.0.1", [], leases, port=port, system=Driver())
        Driver().run(listener.check(10))
        listener.close()
        with pytest.raises(KVPlanError, match="PEER: cannot reach prefill"):
            Driver().run(listener.check(1))


def test_what_is_withdrawn_is_gone(listener: Listener, leases: Leases) -> None:
    """The entry of its room and the digests of its lease; those of others stay, and not all have a room."""
    requests = {name: DigestRequest.of(leases.grant(name), {"attn": (0, 8)}) for name in ("r", "s", "t")}
    for name, request in requests.items():
        listener.digests.ask(request)
        listener.digests.put(request, [{"of": name}])
    for room in ("7", "8"):
        listener.rooms.put(room, {"error": "of a test"})
    listener.withdraw("7", requests["r"].lease)
    listener.withdraw("", requests["s"].lease)
    found = [listener.digests.ask(request) for request in requests.values()]
    assert found == [None, None, [{"of": "t"}]]
    answer = json.loads(Driver().run(listener.rooms.polls.answer(b'{"7": "", "8": ""}')))
    assert answer["rooms"].keys() == {"8"}


def test_an_answer_has_as_many_parts_as_may_be() -> None:
    """Brackets and commas are counted, each worker's comma among them."""
    num_workers = MAX_PARTS - 3
    data = json.dumps({"engine_id": "p", "start": "a", "workers": [""] * num_workers}).encode()
    assert len(Offers.decode(data).workers) == num_workers


@pytest.mark.parametrize(
    "data, message",
    [
        (b'{"workers": [' + b"[]," * 5000 + b"0]}", "expected at most 4096 brackets and commas, got 10002"),
        (b"\xff", "expected JSON, got 1 byte of something else"),
        (b"9" * 5000, "expected JSON, got 5000 bytes of something else"),
        (b"[]", "expected a list of workers, got a list of 0"),
        (b'{"workers": 7}', "expected a list of workers, got a dict of 1"),
        (b'{"workers": [7]}', "expected str values only, got 7"),
        (b'{"workers": ["?"], "engine_id": "p", "start": "a"}', "expected workers as base64, got other characters"),
        (b'{"workers": [], "engine_id": 7, "start": "a"}', "expected a string, got 7"),
        (b'{"workers": [], "engine_id": "p"}', "expected a non-empty string of printable characters, got ''"),
    ],
)
def test_an_answer_of_many_parts_is_refused(data: bytes, message: str) -> None:
    """What is no answer is refused in words of its own, and before many values are made of it."""
    with pytest.raises(KVPlanError, match=f"^MESSAGE: cannot read offers: {re.escape(message)}$"):
        Offers.decode(data)


def test_another_start_is_not_taken_for_this_one(listener: Listener) -> None:
    """An engine that has restarted lost the blocks that a handoff names."""
    earlier = attrs.evolve(listener.source, start="earlier")
    with pytest.raises(
        KVPlanError, match=r"PEER: cannot shake hands with prefill at .* start earlier, got .*restarted"
    ):
        fetch(earlier, timeout_s=10)


def test_claims_are_answered_in_order(listener: Listener, leases: Leases) -> None:
    """Each claim, each end and each question has its answer, from the leases as they are."""
    lease, other = leases.grant("a"), leases.grant("b")
    start = listener.source.start
    message = ClaimMessage(start, claims=((lease, "x"), ("none", "x")), done=((other, "x"),), asks=(other, lease))
    answer = send_claims(listener.source, message)
    assert (answer.claims, answer.done, answer.asks) == ((True, False), (True,), (False, True))
    assert leases.take_ended().done == ("b",)


def test_claims_of_an_earlier_start_are_refused(listener: Listener, leases: Leases) -> None:
    """A lease of an engine that has restarted is over, also where this start has one of the same name."""
    lease = leases.grant("a")
    message = ClaimMessage("earlier", claims=((lease, "x"),), done=((lease, "x"),), asks=(lease,))
    answer = send_claims(listener.source, message)
    assert (answer.claims, answer.done, answer.asks) == ((False,), (False,), (False,))
    assert leases.is_valid(lease)
    assert leases.take_ended().done == ()
    assert leases.num_refused == 2


NONSENSE = [
    b"{}",
    b"null",
    b"[",
    b"\xff",
    b"[" * 100_000,
    b'{"start": "a", "claims": [["lease"]]}',
    b'{"start": "a", "claims": 7}',
    b'{"start": "a", "done": [["lease", 7]]}',
    b'{"start": "a", "asks": [null]}',
    b'{"start": 7}',
]


@pytest.mark.parametrize("body", NONSENSE)
def test_nonsense_is_refused(listener: Listener, leases: Leases, body: bytes) -> None:
    """A body that is no message of claims gets status 400, and changes no lease."""
    lease = leases.grant("a")
    with pytest.raises(KVPlanError, match=r"PEER: .* got '?400"):
        exchange("prefill", listener.source.address, "/claims", 10, Access(), body)
    assert leases.is_valid(lease)


def test_other_paths_are_refused(listener: Listener) -> None:
    """What is sent to another path is refused, and so is another method."""
    for sent, path in ((b"", "/done"), (b"", "/"), (None, "/claims"), (None, "/claims/1")):
        with pytest.raises(KVPlanError, match=r"PEER: .* got '?404"):
            exchange("prefill", listener.source.address, path, 10, Access(), sent)


def test_an_answer_to_something_else_is_refused(monkeypatch: pytest.MonkeyPatch, listener: Listener) -> None:
    """An answer that lacks one to each claim is an error with a code."""
    for answer in (b"[", b"[]", b"{}", b'{"claims": [], "done": [], "asks": []}', b'{"claims": [1], "done": []}'):
        monkeypatch.setattr(Driver, "exchange", unblocked(lambda *_, answer=answer: answer))
        with pytest.raises(KVPlanError, match="MESSAGE: cannot read answers"):
            send_claims(listener.source, ClaimMessage("a", claims=(("lease", "x"),)))


def test_an_answer_that_is_no_json_is_refused(monkeypatch: pytest.MonkeyPatch, listener: Listener) -> None:
    """As what it is: not as one that lacks something."""
    monkeypatch.setattr(Driver, "exchange", unblocked(lambda *_: b"["))
    with pytest.raises(KVPlanError, match="MESSAGE: cannot read answers: expected answers as JSON"):
        send_claims(listener.source, ClaimMessage("a", claims=(("lease", "x"),)))


def test_an_answer_that_is_no_offer_is_refused() -> None:
    """What is not the offers of an engine is an error with a code."""
    for data in (b"", b"[]", b"{}", b'{"engine_id": "p", "start": "s", "workers": ["\xff"]}', b"[" * 100_000):
        with pytest.raises(KVPlanError, match="MESSAGE: cannot read offers"):
            Offers.decode(data)


@pytest.fixture
def unused() -> Iterator[Source]:
    """A source at a port where nobody listens."""
    with reserved_port() as port:
        yield Source("prefill", "a", "127.0.0.1", port)


def test_nobody_there(unused: Source) -> None:
    """An address where nobody listens is refused as a peer."""
    with pytest.raises(KVPlanError, match=r"PEER: cannot reach prefill at 127\.0\.0\.1"):
        fetch(unused, timeout_s=10)


def test_somebody_who_never_answers() -> None:
    """A connection that is accepted and never answered ends after the time that is given."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = Source("prefill", "a", "127.0.0.1", server.getsockname()[1])
        with pytest.raises(KVPlanError, match="PEER: cannot reach prefill"):
            fetch(source, timeout_s=0.2)


def test_a_reader_that_has_gone(capfd: pytest.CaptureFixture[str]) -> None:
    """A reader that did not wait for an answer leaves no traceback behind, and others are answered."""
    has_gone = threading.Event()

    def answer(_: bytes) -> bytes:
        has_gone.wait(10)
        return b"offers" * (1 << 18)

    server = Driver().serve("127.0.0.1", 0, {"GET /": Route(answer)})
    address = f"127.0.0.1:{server.port}"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        access = Access()
        proof = Proof.of(access.key, cast(Server, server)._challenges.latest, Asked("GET", "/", address, address), b"")
        connection.sendall(f"GET / HTTP/1.1\r\nHost: {address}\r\nAuthorization: Kvplan {proof}\r\n\r\n".encode())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
    has_gone.set()
    assert len(exchange("a server", address, "/", 10, Access())) == 6 << 18
    server.close()
    server.close()
    assert capfd.readouterr().err == ""


def test_claims_reach_their_engines(
    listener: Listener, leases: Leases, unused: Source, caplog: pytest.LogCaptureFixture
) -> None:
    """A claim is taken, confirmed and ended over HTTP; an engine that is gone costs a line in the log."""
    claims = Claims(LOGGER, Driver())
    claims.claim(unused, "lost", "x")
    lease = leases.grant("a")
    claims.claim(listener.source, lease, "x")
    waited(claims.ask(listener.source, lease))
    with pytest.raises(KVPlanError, match="PEER"):
        waited(claims.ask(unused, "lost"))
    claims.release(listener.source, lease, "x")
    with pytest.raises(KVPlanError, match="LEASE"):
        waited(claims.ask(listener.source, lease))
    assert leases.take_ended().done == ("a",)
    assert "leases may expire: prefill does not answer: PEER: cannot reach prefill" in caplog.text
    claims.close()
