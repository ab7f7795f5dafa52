"""Access by a key: both sides prove that they know it, and nothing that was recorded passes again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path

import attrs
import pytest

from kvplan import Blocks, KVPlanError
from kvplan.protocol import Handoff, Leases, Listener, Source
from kvplan.protocol.claims import ClaimMessage
from kvplan.protocol.digest_requests import DigestRequest
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.system import Route
from kvplan_nixl.serving import Access, Driver, tls_contexts
from kvplan_nixl.serving.access import MAX_NONCES, MAX_SERVERS, Challenges
from tests.blocking import (
    exchange,
    fetch,
    fetch_digests,
    reserved_port,
    send_claims,
    stop_listening,
    unblocked,
    wait_until,
)

SECRET = b"a secret of all engines"
KEY = SharedKey.of(SECRET)


@contextmanager
def listening(leases: Leases, access: Access | None = None, port: int = 0) -> Iterator[Source]:
    """The source of a listener, on a free port of this machine or at one that is reserved."""
    with closing(Listener("prefill", "127.0.0.1", [b"offer"], leases, port=port, system=Driver(access))) as listener:
        yield listener.source


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which one server listens after another."""
    with reserved_port() as port:
        yield port


def done(source: Source, lease: str) -> ClaimMessage:
    """A message that ends a lease."""
    return ClaimMessage(source.start, done=((lease, "decode"),))


Edit = Callable[[bytes], bytes]


class Relay:
    """Stands between a reader and a server: keeps what passes, and may change it."""

    def __init__(self, port: int, edit_answer: Edit = bytes, edit_question: Edit = bytes) -> None:
        self._port = port
        self._edit = edit_answer
        self._edit_question = edit_question
        self.questions: list[bytes] = []
        self.answers: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            # a reader may have gone
            with connection, suppress(OSError):
                self.questions.append(self._edit_question(question(connection)))
                self.answers.append(asked(self._port, self.questions[-1]))
                connection.sendall(self._edit(self.answers[-1]))

    def close(self) -> None:
        stop_listening(self._server)


def question(connection: socket.socket) -> bytes:
    """A whole question."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    (length,) = [int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
    while len(body) < length:
        body += received(connection)
    return head + b"\r\n\r\n" + body


def received(connection: socket.socket) -> bytes:
    """The next bytes, of which there have to be some: a loop that asks for more would never end."""
    data = connection.recv(1 << 16)
    assert data, "the connection is closed"
    return data


def asked(port: int, sent: bytes) -> bytes:
    """All that a server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def status(answer: bytes) -> int:
    return int(answer.split()[1])


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay is on the wire between two engines: whoever asks the server's address is connected to the relay."""
    for end in ("http", "client"):
        monkeypatch.setattr(f"kvplan_nixl.serving.{end}.numeric_address", lambda _: "192.0.2.1:5600")


ON_THE_WIRE = pytest.mark.usefixtures("wire")


@ON_THE_WIRE
def test_engines_with_one_key_meet() -> None:
    """Offers, claims and digests pass; only a reader's first question needs two exchanges."""
    leases, access = Leases(Driver()), Access(key=KEY)
    with listening(leases, Access(key=KEY)) as source, closing(Relay(source.port)) as relay:
        near = attrs.evolve(source, port=relay.port)
        assert fetch(near, 10, access).workers == (b"offer",)
        assert len(relay.questions) == 2
        lease = leases.grant("r")
        assert send_claims(near, ClaimMessage(source.start, asks=(lease,)), access).asks == (True,)
        assert send_claims(near, done(source, lease), access).done == (True,)
        assert len(relay.questions) == 4
        assert not any(SECRET in data for data in (*relay.questions, *relay.answers))


@pytest.mark.parametrize("key", [None, b"another key, of some other engines"], ids=["of this host", "another"])
def test_a_stranger_is_refused(key: bytes | None) -> None:
    """Without the key nobody gets offers or digests, or ends a lease, and a stranger's message is not even parsed."""
    leases = Leases(Driver())
    with listening(leases, Access(key=KEY)) as source:
        lease = leases.grant("r")
        stranger = Access(key=key)
        for attempt in (
            lambda: fetch(source, 10, stranger),
            lambda: send_claims(source, done(source, lease), stranger),
            lambda: fetch_digests(source, DigestRequest.of(lease, {}), 0.05, stranger),
        ):
            with pytest.raises(KVPlanError, match=r"PEER: .* expected an engine with the same key, got status 401"):
                attempt()
        assert leases.is_valid(lease)
        assert leases.take_ended().done == ()


@pytest.mark.parametrize("key", [None, b"another key, of some other engines"], ids=["of this host", "another"])
def test_a_stranger_is_not_believed(key: bytes | None) -> None:
    """A reader with a key takes no offers and no answers of a server without it."""
    leases = Leases(Driver())
    with listening(leases, Access(key=key)) as source:
        with pytest.raises(KVPlanError, match=r"PEER: .*set one key on all engines"):
            fetch(source, 10, Access(key=KEY))
        with pytest.raises(KVPlanError, match=r"PEER: .*set one key on all engines"):
            send_claims(source, ClaimMessage(source.start, asks=("lease",)), Access(key=KEY))


@ON_THE_WIRE
def test_a_recorded_question_is_refused(port: int) -> None:
    """A question is taken once, by one start of a server, whoever sends it again."""
    leases, access = Leases(Driver()), Access(key=KEY)
    with listening(leases, access, port) as source, closing(Relay(source.port)) as relay:
        near = attrs.evolve(source, port=relay.port)
        lease = leases.grant("r")
        claim = ClaimMessage(source.start, claims=((lease, "decode"),))
        assert send_claims(near, claim, access).claims == (True,)
        recorded = relay.questions[-1]
        assert status(asked(source.port, recorded)) == 401
        assert send_claims(near, claim, access).claims == (True,)
    with listening(leases, access, port):
        assert status(asked(port, recorded)) == 401


@ON_THE_WIRE
@pytest.mark.parametrize(
    "old, new",
    [
        (b"POST /claims", b"POST /digests"),
        (b"POST /claims", b"GET /claims"),
        (b"decode", b"Decode"),
        (b"decode", b"decode "),
        (b"Host: 127.0.0.1", b"Host: 127.0.0.2"),
        (b"Kvplan 192.0.2.1", b"Kvplan 192.0.2.2"),
        (b"Kvplan ", b"kvplan "),
    ],
)
def test_a_changed_question_is_refused(old: bytes, new: bytes) -> None:
    """Method, path and body are those that were signed: what is changed on its way claims nothing."""
    leases, access = Leases(Driver()), Access(key=KEY)
    changed: list[bytes] = []

    def change(data: bytes) -> bytes:
        changed.append(data.replace(old, new))
        return changed[-1]

    with listening(leases, access) as source, closing(Relay(source.port, edit_question=change)) as relay:
        # with the server's challenge, so that nothing but the change is wrong
        fetch(source, 10, access)
        near = attrs.evolve(source, port=relay.port)
        access.remember(near.address, access.challenge_of(source.address))
        lease = leases.grant("r")
        with pytest.raises(KVPlanError, match=r"PEER: .* got (status 401|400|404)|with the key"):
            send_claims(near, ClaimMessage(source.start, claims=((lease, "decode"),)), access)
        assert new in changed[0]
        assert status(relay.answers[0]) in (400, 401, 404)
        assert not leases._leases[lease].claims_end_at


@ON_THE_WIRE
@pytest.mark.parametrize(
    "edit",
    [
        lambda answer: answer.replace(b"b2ZmZXI=", b"Zm9yZ2Vk"),
        lambda answer: answer.replace(b" 200 ", b" 404 "),
        lambda answer: answer.replace(b"authentication-info", b"authentication-nope"),
    ],
)
def test_a_changed_answer_is_refused(edit: Edit) -> None:
    """Neither another body nor another status passes for the answer."""
    access = Access(key=KEY)
    with listening(Leases(Driver()), Access(key=KEY)) as source, closing(Relay(source.port, edit)) as relay:
        fetch(source, 10, access)
        near = attrs.evolve(source, port=relay.port)
        with pytest.raises(KVPlanError, match=r"PEER: .*set one key on all engines"):
            fetch(near, 10, access)


@ON_THE_WIRE
def test_a_recorded_answer_is_refused() -> None:
    """An answer, and the envelopes in it, are of one question: recorded ones are not offered again by anybody."""
    access = Access(key=KEY)
    with listening(Leases(Driver()), Access(key=KEY)) as source, closing(Relay(source.port)) as relay:
        near = attrs.evolve(source, port=relay.port)
        fetch(near, 10, access)
        refused = pytest.raises(KVPlanError, match=r"PEER: .*set one key on all engines")
        with closing(Relay(source.port, lambda _: relay.answers[1])) as stranger, refused:
            fetch(attrs.evolve(source, port=stranger.port), 10, access)


def test_a_refusal_is_signed() -> None:
    """The reason of a refusal is passed on, from who knows the key."""

    def refuse(_: bytes) -> bytes:
        raise KVPlanError("RANGE", "answer", expected="a place", got="none")

    refused = pytest.raises(KVPlanError, match=r"PEER: .* got 400: 'RANGE: cannot answer: expected a place")
    with closing(Driver(Access(key=KEY)).serve("127.0.0.1", 0, {"POST /x": Route(refuse)})) as server, refused:
        exchange("a server", f"127.0.0.1:{server.port}", "/x", 10, Access(key=KEY), b"")


def test_nonces_do_not_fill_memory() -> None:
    """Those of an earlier challenge grew without a bound: a challenge has its number, and a new one begins at none."""
    challenges = Challenges()
    first = challenges.latest
    tracemalloc.start()
    try:
        for number in range(MAX_NONCES):
            assert challenges.take(first, f"{number:032x}")
        second = challenges.latest
        for number in range(MAX_NONCES, 2 * MAX_NONCES):
            assert not challenges.take(first, f"{number:032x}")
        num_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 1 << 20
    assert peak_bytes < 10 << 20
    assert second != first
    assert challenges.take(second, "0" * 32)
    assert not challenges.take(second, "0" * 32)


@pytest.mark.parametrize("nonce", ["", "0", "0" * 33, "x" * 32, "0" * 1_000_000])
def test_a_nonce_has_its_length(nonce: str) -> None:
    """What is kept of a question does not depend on what a peer calls it."""
    challenges = Challenges()
    assert not challenges.take(challenges.latest, nonce)


def test_a_question_during_a_new_challenge_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose challenge has had its questions refuses the next one, and the reader asks it once more."""
    monkeypatch.setattr("kvplan_nixl.serving.access.MAX_NONCES", 3)
    access = Access(key=KEY)
    with listening(Leases(Driver()), access) as source:
        for _ in range(10):
            assert fetch(source, 10, access).workers == (b"offer",)


def test_a_question_is_for_one_server() -> None:
    """A server that a client names passes a reader's question on to another one, and gets no answer to pass back.

    Questions were signed without the server that they are for, so it got all that the reader asked for.
    """
    leases, access = Leases(Driver()), Access(key=KEY)
    with listening(leases, Access(key=KEY)) as source, closing(Relay(source.port)) as relay:
        lease = leases.grant("r")
        message = ClaimMessage(source.start, done=((lease, "decode"),))
        refused = r"PEER: .* got 421: 'the question was for 127.0.0.1:\d+, not 127.0.0.1:\d+' \(set host of that engine"
        with pytest.raises(KVPlanError, match=refused):
            send_claims(attrs.evolve(source, port=relay.port), message, access)
        with pytest.raises(KVPlanError, match=refused):
            fetch(attrs.evolve(source, port=relay.port), 10, access)
        assert {status(answer) for answer in relay.answers} == {401, 421}
        assert not any(b"b2ZmZXI=" in answer for answer in relay.answers)
        assert leases.is_valid(lease)


def test_a_server_behind_another_address_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where connections come by way of a gateway, a server answers those who were told its own name."""
    access = Access(key=KEY)
    monkeypatch.setattr(
        "kvplan_nixl.serving.client.addresses_of",
        unblocked(lambda _, port, __: [(socket.AF_INET, ("127.0.0.1", port))]),
    )
    monkeypatch.setattr("kvplan_nixl.serving.client.numeric_address", lambda _: "192.0.2.1:5600")
    monkeypatch.setattr("kvplan_nixl.serving.http.numeric_address", lambda _: "10.0.0.1:1")
    with closing(
        Listener("prefill", "prefill.example", [b"offer"], Leases(Driver()), bind="127.0.0.1", system=Driver(access))
    ) as listener:
        assert fetch(listener.source, 10, access).workers == (b"offer",)
        with pytest.raises(KVPlanError, match=r"PEER: .* got '?421"):
            fetch(attrs.evolve(listener.source, host="another.example"), 10, access)


@pytest.mark.parametrize("line", ["Origin: http://page.example", "Origin: null", "Sec-Fetch-Site: cross-site"])
def test_a_page_in_a_browser_is_refused(line: str) -> None:
    """A browser of this host reaches loopback too, for any page: it is refused, whatever else it sends."""
    with listening(Leases(Driver())) as source:
        head = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{source.port}\r\n"
        assert status(asked(source.port, f"{head}{line}\r\n\r\n".encode())) == 403
        assert status(asked(source.port, f"{head}\r\n".encode())) == 401
        rebound = f"GET / HTTP/1.1\r\nHost: page.example:{source.port}\r\n\r\n"
        assert status(asked(source.port, rebound.encode())) == 401


def test_a_key_is_changed_while_engines_run() -> None:
    """In three rounds: the new secret is accepted everywhere, then it signs everywhere, then the old one goes."""
    old, new = b"a secret of all engines", b"the next secret of all"
    rounds = [old, old + b"\n" + new, new + b"\n" + old, new]
    for earlier, later in pairwise(rounds):
        for server_key, reader_key in ((earlier, later), (later, earlier)):
            server, reader = Access(key=server_key), Access(key=reader_key)
            with listening(Leases(Driver()), server) as source:
                assert fetch(source, 10, reader).workers == (b"offer",)
            assert Handoff.of_params(HANDOFF.params(server.key), reader.key).params(KEY) == HANDOFF.params(KEY)
    with listening(Leases(Driver()), Access(key=new)) as source, pytest.raises(KVPlanError, match="got status 401"):
        fetch(source, 10, Access(key=old))
    with pytest.raises(KVPlanError, match=r"RANGE: .* at most 2 lines of a key"):
        Access(key=b"\n".join((old, new, b"a third secret of engines")))


def test_a_reader_of_an_earlier_challenge_asks_again(port: int) -> None:
    """A server that has restarted, or has a new challenge, costs one more exchange, and no error."""
    access = Access(key=KEY)
    leases = Leases(Driver())
    with listening(leases, access, port) as source:
        fetch(source, 10, access)
    with listening(leases, access, port) as again:
        assert fetch(again, 10, access).workers == (b"offer",)
    for number in range(MAX_SERVERS + 1):
        access.remember(f"{number}", "0" * 32)
    access.remember("a long one", "0" * 33)
    assert len(access._challenges) <= MAX_SERVERS
    assert access.challenge_of("a long one") == "-"


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_without_a_key_other_hosts_reach_nothing(host: str) -> None:
    """A listener with the key of its host is on loopback alone."""
    host = host or "0.0.0.0"
    refused = r"PEER: cannot listen on .* with the key of this host: .* \(set one key on all engines"
    with pytest.raises(KVPlanError, match=refused):
        Listener("prefill", "10.0.0.1", [], Leases(Driver()), bind=host, system=Driver())
    Listener("prefill", "10.0.0.1", [], Leases(Driver()), bind=host, system=Driver(Access(key=KEY))).close()


@pytest.mark.parametrize("key", [b"", b"short", b" " * 16, b"a" * 100, b"ab" * 50, SECRET + b"\nshort"])
def test_a_key_is_strong_and_not_shown(key: bytes) -> None:
    """A key that can be guessed is refused, and no text of an access has one."""
    with pytest.raises(KVPlanError, match="RANGE: cannot use a key: expected at least 16 bytes"):
        Access(key=key)
    with pytest.raises(KVPlanError, match="TYPE: cannot read a key"):
        Access(key="a secret of all engines")  # type: ignore[arg-type]
    assert "secret" not in f"{Access(key=KEY)!r} {Access(key=KEY)} {Access(key=KEY).key!r}"


@pytest.mark.parametrize(
    "servers, address, is_allowed",
    [
        ((), "127.0.0.1:1", True),
        ((), "localhost:1", True),
        ((), "[::1]:1", True),
        ((), "127.0.0.2:1", False),
        ((), "0.0.0.0:1", False),
        ((), "2130706433:1", False),
        ((), "[::ffff:127.0.0.1]:1", False),
        (("10.0.0.1",), "10.0.0.1:1", True),
        (("10.0.0.1:2",), "10.0.0.1:1", False),
        (("10.0.0.0/16",), "10.0.255.1:1", True),
        (("10.0.0.0/16",), "10.0.1.page.example:1", False),
        (("10.0.0.0/16:1",), "10.0.1.1:2", False),
        (("[fd00::]/8",), "[fd00::7]:1", True),
        (("fd00::/8",), "[fe80::7]:1", False),
        (("[fd00::7]:1",), "[fd00::7]:1", True),
        (("[fd00::7]:1",), "[fd00::7]:2", False),
        (("Prefill.Example",), "prefill.example:1", True),
        (("prefill.example",), "a.prefill.example:1", False),
        (("*.prefill.example:1",), "a.prefill.example:1", True),
        (("*.prefill.example",), "prefill.example:1", False),
        (("*.prefill.example",), "prefill.example.org:1", False),
        (("prefill",), "", False),
        (("",), "", False),
    ],
)
def test_a_request_names_few_servers(servers: tuple[str, ...], address: str, is_allowed: bool) -> None:
    """Those of this machine, and what an operator lists; a name is not looked up to see."""
    access = Access(key=KEY, servers=servers)
    with nullcontext() if is_allowed else pytest.raises(KVPlanError, match="NAME: cannot ask"):
        access.check_server(address)


HANDOFF = Handoff(Source("prefill", "a1", "10.0.0.1", 5600), "lease", 40, "8f2c", {"attn": Blocks([1, 2, 3])})


def test_a_handoff_is_signed() -> None:
    """Proxies may pass it on as they like: as JSON, in another order, with keys of their own."""
    params = HANDOFF.params(KEY)
    passed_on = {"do_remote_prefill": True, **json.loads(json.dumps(dict(reversed(params.items()))))}
    assert Handoff.of_params(passed_on, KEY).params(KEY) == params


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_host": "10.6.6.6"},
        {"remote_port": 22},
        {"remote_engine_id": "another"},
        {"remote_start": "another"},
        {"remote_lease": "another"},
        {"remote_num_tokens": 41},
        {"remote_prompt": "8f2d"},
        {"remote_block_ids": {"attn": [0, [1, 2, 4]]}},
        {"remote_kept": {"attn": 1}},
        {"remote_signature": ""},
        {"remote_signature": None},
        {"remote_signature": "\ud800"},
        {"remote_port": {1}},
        {"remote_kept": [[[]]] * 2},
    ],
)
def test_a_forged_handoff_is_refused(changes: dict[str, object]) -> None:
    """No client chooses which address, lease or blocks a decode engine reads."""
    forged = {**HANDOFF.params(KEY), **changes}
    with pytest.raises(KVPlanError, match="MESSAGE: cannot read a handoff: expected the signature"):
        Handoff.of_params(forged, KEY)
    with pytest.raises(KVPlanError, match="MESSAGE: cannot read a handoff: expected the signature"):
        Handoff.of_params({key: value for key, value in HANDOFF.params(KEY).items() if "sign" not in key}, KEY)
    with pytest.raises(KVPlanError, match="MESSAGE: cannot read a handoff: expected the signature"):
        Handoff.of_params(HANDOFF.params(SharedKey.of(b"a secret of other engines")), KEY)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificates of an engine and of a stranger, each signed by itself."""
    folder = tmp_path_factory.mktemp("certificates")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    for name in ("engine", "stranger"):
        files = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"]
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*command, *files, *names], check=True, capture_output=True)
    return folder


def encrypted(folder: Path, name: str, authority: str) -> Access:
    contexts = tls_contexts(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{authority}.pem")
    return Access(key=KEY, server_tls=contexts[0], client_tls=contexts[1])


def test_tls_encrypts_and_knows_its_own(certificates: Path) -> None:
    """Both sides show certificates of one authority; one with another certificate, or without TLS, is refused."""
    ours = encrypted(certificates, "engine", "engine")
    leases = Leases(Driver())
    with listening(leases, ours) as source, closing(Relay(source.port)) as relay:
        assert fetch(source, 10, ours).workers == (b"offer",)
        for access in (
            encrypted(certificates, "stranger", "engine"),
            encrypted(certificates, "stranger", "stranger"),
            Access(key=KEY),
        ):
            with pytest.raises(KVPlanError, match="PEER: cannot reach prefill"):
                fetch(source, 10, access)
        assert relay.questions == []
    with pytest.raises(KVPlanError, match=r"PEER: cannot use TLS with .*expected a certificate, its private key"):
        tls_contexts(certificates / "none.pem", certificates / "engine.key", certificates / "engine.pem")


def test_engines_are_served_beside_handshakes_that_never_end(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow, dropped and silent handshakes, garbage and strangers hold up no engine, and leave no connection behind."""
    monkeypatch.setattr("kvplan_nixl.serving.client.KEEP_S", 0.0)
    ours, stranger = (encrypted(certificates, name, "engine") for name in ("engine", "stranger"))
    beginning = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64))
    with listening(Leases(Driver()), ours) as source:
        fetch(source, 30, ours)
        before = num_files()
        with ExitStack() as held:
            for number in range(60):
                connection = held.enter_context(socket.create_connection(("127.0.0.1", source.port), 30))
                kind = ("silent", "begun", "dropped", "garbage", "strange")[number % 5]
                connection.sendall({"silent": b"", "garbage": b"GET / HTTP/1.1\r\n\r\n"}.get(kind, beginning))
                if kind == "dropped":
                    connection.close()
                elif kind == "garbage":
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 12):
                        pass
                elif kind == "strange":
                    with pytest.raises(KVPlanError, match="PEER: cannot reach prefill"):
                        fetch(source, 30, stranger)
                # another access shares no connection with those before it
                assert fetch(source, 30, attrs.evolve(ours)).workers == (b"offer",)
        wait_until(lambda: num_files() <= before)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))
