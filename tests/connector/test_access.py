"""Access by a key: both sides prove that they know it, and nothing that was recorded passes again."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import attrs
import pytest

from kvplan import Blocks, KVPlanError
from kvplan.connector import Access, Handoff, Leases, Listener, Source, fetch, send_claims, tls_contexts
from kvplan.connector.access import MAX_SERVERS, Challenges
from kvplan.connector.claims import ClaimMessage
from kvplan.connector.digest_requests import DigestRequest, fetch_digests
from kvplan.connector.http import Route, Server, exchange

KEY = b"a secret of all engines"


@contextmanager
def listening(leases: Leases, access: Access | None = None) -> Iterator[Source]:
    """The source of a listener, on a free port of this machine."""
    with closing(Listener("prefill", "127.0.0.1", [b"offer"], leases, access=access)) as listener:
        yield listener.source


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
            with connection:
                self.questions.append(self._edit_question(question(connection)))
                self.answers.append(asked(self._port, self.questions[-1]))
                connection.sendall(self._edit(self.answers[-1]))

    def close(self) -> None:
        self._server.close()


def question(connection: socket.socket) -> bytes:
    """A whole question."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    (length,) = [int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


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


def test_engines_with_one_key_meet() -> None:
    """Offers, claims and digests pass; only a reader's first question needs two exchanges."""
    leases, access = Leases(), Access(key=KEY)
    with listening(leases, Access(key=KEY)) as source, closing(Relay(source.port)) as relay:
        near = attrs.evolve(source, port=relay.port)
        assert fetch(near, 10, access).workers == (b"offer",)
        assert len(relay.questions) == 2
        lease = leases.grant("r")
        assert send_claims(near, ClaimMessage(source.start, asks=(lease,)), access).asks == (True,)
        assert send_claims(near, done(source, lease), access).done == (True,)
        assert len(relay.questions) == 4
        assert not any(KEY in data for data in (*relay.questions, *relay.answers))


@pytest.mark.parametrize("key", [b"", b"another key, of some other engines"])
def test_a_stranger_is_refused(key: bytes) -> None:
    """Without the key nobody gets offers or digests, or ends a lease, and a stranger's message is not even parsed."""
    leases = Leases()
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
        assert leases.stands(lease)
        assert leases.take_ended().done == ()


@pytest.mark.parametrize("key", [b"", b"another key, of some other engines"])
def test_a_stranger_is_not_believed(key: bytes) -> None:
    """A reader with a key takes no offers and no answers of a server without it."""
    leases = Leases()
    with listening(leases, Access(key=key)) as source:
        with pytest.raises(KVPlanError, match=r"PEER: .*all engines need one key"):
            fetch(source, 10, Access(key=KEY))
        with pytest.raises(KVPlanError, match=r"PEER: .*all engines need one key"):
            send_claims(source, ClaimMessage(source.start, asks=("lease",)), Access(key=KEY))


def test_a_recorded_question_is_refused() -> None:
    """A question is taken once, by one start of a server, whoever sends it again."""
    leases, access = Leases(), Access(key=KEY)
    with listening(leases, access) as source, closing(Relay(source.port)) as relay:
        near = attrs.evolve(source, port=relay.port)
        lease = leases.grant("r")
        claim = ClaimMessage(source.start, claims=((lease, "decode"),))
        assert send_claims(near, claim, access).claims == (True,)
        recorded = relay.questions[-1]
        assert status(asked(source.port, recorded)) == 401
        assert send_claims(near, claim, access).claims == (True,)
        port = source.port
    with closing(Listener("prefill", "127.0.0.1", [b"offer"], leases, port=port, access=access)):
        assert status(asked(port, recorded)) == 401


@pytest.mark.parametrize(
    "old, new",
    [
        (b"POST /claims", b"POST /digests"),
        (b"POST /claims", b"GET /claims"),
        (b"decode", b"Decode"),
        (b"decode", b"decode "),
        (b"Kvplan ", b"kvplan "),
    ],
)
def test_a_changed_question_is_refused(old: bytes, new: bytes) -> None:
    """Method, path and body are those that were signed: what is changed on its way claims nothing."""
    leases, access = Leases(), Access(key=KEY)
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
    with listening(Leases(), Access(key=KEY)) as source, closing(Relay(source.port, edit)) as relay:
        fetch(source, 10, access)
        near = attrs.evolve(source, port=relay.port)
        with pytest.raises(KVPlanError, match=r"PEER: .*all engines need one key"):
            fetch(near, 10, access)


def test_a_recorded_answer_is_refused() -> None:
    """An answer, and the envelopes in it, are of one question: recorded ones are not offered again by anybody."""
    access = Access(key=KEY)
    with listening(Leases(), Access(key=KEY)) as source, closing(Relay(source.port)) as relay:
        near = attrs.evolve(source, port=relay.port)
        fetch(near, 10, access)
        refused = pytest.raises(KVPlanError, match=r"PEER: .*all engines need one key")
        with closing(Relay(source.port, lambda _: relay.answers[1])) as stranger, refused:
            fetch(attrs.evolve(source, port=stranger.port), 10, access)


def test_a_refusal_is_signed() -> None:
    """The reason of a refusal is passed on, from who knows the key."""

    def refuse(_: bytes) -> bytes:
        raise KVPlanError("RANGE", "answer", expected="a place", got="none")

    refused = pytest.raises(KVPlanError, match=r"PEER: .* got 400: 'RANGE: cannot answer: expected a place")
    with closing(Server("127.0.0.1", 0, {"POST /x": Route(refuse)}, Access(key=KEY))) as server, refused:
        exchange("a server", f"127.0.0.1:{server.port}", "/x", 10, Access(key=KEY), b"")


def test_nonces_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has a new challenge after a number of questions; those that were under way pass, older ones do not."""
    monkeypatch.setattr("kvplan.connector.access.MAX_NONCES", 3)
    challenges = Challenges()
    first = challenges.latest
    assert [challenges.take(first, f"{number}") for number in range(3)] == [True] * 3
    second = challenges.latest
    assert second != first
    assert challenges.take(first, "late")
    assert not challenges.take(first, "0")
    assert [challenges.take(second, f"{number}") for number in range(3)] == [True] * 3
    assert not challenges.take(first, "too late")
    assert len(challenges._nonces) == 2


def test_a_reader_of_an_earlier_challenge_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has restarted, or has a new challenge, costs one more exchange, and no error."""
    access = Access(key=KEY)
    leases = Leases()
    with listening(leases, access) as source:
        fetch(source, 10, access)
        port = source.port
    with closing(Listener("prefill", "127.0.0.1", [b"offer"], leases, port=port, access=access)) as again:
        assert fetch(again.source, 10, access).workers == (b"offer",)
    for number in range(MAX_SERVERS + 1):
        access.remember(f"{number}", "0" * 32)
    access.remember("a long one", "0" * 33)
    assert len(access._challenges) <= MAX_SERVERS
    assert access.challenge_of("a long one") == "-"


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_without_a_key_strangers_reach_nothing(host: str) -> None:
    """A listener without a key is on loopback alone, unless the operator says that the network is trusted."""
    host = host or "0.0.0.0"
    with pytest.raises(KVPlanError, match=r"PEER: cannot listen on .* without a key: .* \(set a key .*trust_network"):
        Listener("prefill", "10.0.0.1", [], Leases(), bind=host)
    for access in (Access(key=KEY), Access(trusts_network=True)):
        Listener("prefill", "10.0.0.1", [], Leases(), bind=host, access=access).close()


def test_a_key_is_long_and_not_shown() -> None:
    """A key that can be guessed is refused, and no text of an access has one."""
    with pytest.raises(KVPlanError, match="RANGE: cannot use a key: expected at least 16 bytes"):
        Access(key=b"short")
    with pytest.raises(KVPlanError, match="TYPE: cannot read key of an access"):
        Access(key="a secret of all engines")  # type: ignore[arg-type]
    assert "secret" not in f"{Access(key=KEY)!r} {Access(key=KEY)}"


HANDOFF = Handoff(Source("prefill", "a1", "10.0.0.1", 5600), "lease", 40, "8f2c", {"attn": Blocks([1, 2, 3])})


def test_a_handoff_is_signed() -> None:
    """Proxies may pass it on as they like: as JSON, in another order, with keys of their own."""
    params = HANDOFF.params(KEY)
    passed_on = {"do_remote_prefill": True, **json.loads(json.dumps(dict(reversed(params.items()))))}
    assert Handoff.of_params(passed_on, KEY).params() == HANDOFF.params()
    assert Handoff.of_params(passed_on).params() == HANDOFF.params()


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
    with pytest.raises(KVPlanError, match="MESSAGE: cannot read a handoff: expected one that was signed"):
        Handoff.of_params(forged, KEY)
    with pytest.raises(KVPlanError, match="MESSAGE: cannot read a handoff: expected one that was signed"):
        Handoff.of_params(HANDOFF.params(), KEY)


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
    leases = Leases()
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
