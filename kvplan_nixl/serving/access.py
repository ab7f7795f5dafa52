"""Access: who may talk to an engine over the network, by a key that all engines share.

- access.D1: Every question and every answer is signed with a key, by :mod:`kvplan.protocol.keys`. A
  server with the key of its host alone listens on loopback: no other host could ask it anything.
- access.D2: A question is signed with its method, target and body, and with the server that is
  asked: the address that the reader was told, and the IP address and port to which it is connected.
  An answer is signed with its question, status and body. So neither passes for another one, and a
  server that passes a question on to another server gets no answer.
- access.D3: A question quotes the *challenge* of the server, which is random, and has a nonce that
  no question has used with this challenge. So a recorded question is refused, also by the next
  start of the server, and no clock is compared. The server tells its challenge in each answer, also
  where it refuses a question for want of it.
- access.D4: The head of a question is checked before its body is read, and the body before it is
  parsed.

A key hides nothing: for that, both sides have TLS contexts.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from ipaddress import ip_address, ip_network
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import attrs

from kvplan import KVPlanError
from kvplan.protocol import SharedKey
from kvplan.protocol.keys import HINT
from kvplan.protocol.system import TOKEN_BYTES
from kvplan.support import brief_repr, instance, members, shown
from kvplan_nixl.serving.host_key import key_of

MAX_NONCES: Final = 1 << 16
"""Questions with one challenge, after which a server has a new one: its memory is bounded."""

MAX_SERVERS: Final = 1 << 10
"""Servers whose challenges a reader remembers. Another one costs a further exchange."""

THIS_MACHINE: Final = ("127.0.0.1", "::1", "localhost")


@attrs.frozen
class Asked:
    """What a question asks of which server, besides its body.

    ``host`` is the server's address as the reader was told it, ``server`` the IP address and port
    that the connection has led to, as :func:`numeric_address` writes them.
    """

    method: str
    target: str
    host: str
    server: str


@attrs.frozen
class Proof:
    """The proof that a question comes from a holder of the key, by rule access.D2."""

    server: str
    challenge: str
    nonce: str
    body_digest: str
    signature: str

    @classmethod
    def of(cls, key: SharedKey, challenge: str, asked: Asked, body: bytes) -> Proof:
        """Return the proof of a new question."""
        body_digest = hashlib.sha256(body).hexdigest()
        unsigned = cls(asked.server, challenge, token_hex(TOKEN_BYTES), body_digest, "")
        signature = key.sign("question", *unsigned._parts(asked))
        return attrs.evolve(unsigned, signature=signature)

    @classmethod
    def read(cls, text: str) -> Proof | None:
        """Read what :meth:`__str__` writes, None if it is something else."""
        fields = text.split(" ")
        return cls(*fields) if len(fields) == len(attrs.fields(cls)) else None

    def __str__(self) -> str:
        return " ".join(attrs.astuple(self, recurse=False))

    def is_of(self, key: SharedKey, method: str, target: str, host: str) -> bool:
        """Return whether the question was signed with this key."""
        asked = Asked(method, target, host, self.server)
        return key.has_signed(self.signature, "question", *self._parts(asked))

    def has_body(self, body: bytes) -> bool:
        """Return whether a body is that of the question."""
        return hmac.compare_digest(
            self.body_digest.encode(), hashlib.sha256(body).hexdigest().encode()
        )

    def sign_answer(self, key: SharedKey, status: int, challenge: str, body: bytes) -> str:
        """Return the signature of the answer to this question."""
        return key.sign("answer", self._head(status, challenge), body)

    def has_answer(
        self, key: SharedKey, signature: str, status: int, challenge: str, body: bytes
    ) -> bool:
        """Return whether an answer was signed as that to this question."""
        return key.has_signed(signature, "answer", self._head(status, challenge), body)

    def _parts(self, asked: Asked) -> tuple[bytes, ...]:
        texts = (*attrs.astuple(asked, recurse=False), self.challenge, self.nonce, self.body_digest)
        return tuple(text.encode() for text in texts)

    def _head(self, status: int, challenge: str) -> bytes:
        return f"{self.signature} {status} {challenge}".encode()


class Challenges:
    """The challenge of a server, and the questions that have quoted it. Not for several threads.

    >>> challenges = Challenges()
    >>> challenge, nonce = challenges.latest, 32 * "a"
    >>> challenges.take(challenge, nonce), challenges.take(challenge, nonce)
    (True, False)
    >>> challenges.take("of another server", nonce)
    False
    """

    def __init__(self) -> None:
        self.latest: str = token_hex(TOKEN_BYTES)
        self._nonces = set[bytes]()

    def take(self, challenge: str, nonce: str) -> bool:
        """Take a question that was signed, and return whether it is a new one.

        The last one of a challenge brings a new challenge. Questions under way that quote the one
        before are refused, and asked once more by :class:`kvplan_nixl.serving.client.Client`.
        """
        if challenge != self.latest or len(nonce) != 2 * TOKEN_BYTES:
            return False
        try:
            value = bytes.fromhex(nonce)
        except ValueError:
            return False
        if value in self._nonces:
            return False
        self._nonces.add(value)
        if len(self._nonces) >= MAX_NONCES:
            self.latest = token_hex(TOKEN_BYTES)
            self._nonces.clear()
        return True


@attrs.define(eq=False, kw_only=True)
class Access:
    """The key of an engine, and how it uses the network, as a server and as a reader.

    ``key`` has a secret in each of at most two lines. None is the key that the engines of this host
    and user share. Connections are encrypted where both sides have TLS contexts. A request may name
    a server of this machine, or one of ``servers``, each a ``HOST`` or ``HOST:PORT``, where the
    host is a name, ``*.`` and a domain, an IP address, or a network such as ``10.0.0.0/16``.

    >>> Access(key=b"a secret of all engines").key.is_of_host
    False
    """

    key: SharedKey = attrs.field(default=None, converter=key_of)
    servers: tuple[str, ...] = ()
    server_tls: ssl.SSLContext | None = attrs.field(default=None, repr=False)
    client_tls: ssl.SSLContext | None = attrs.field(default=None, repr=False)
    # the latest challenges of servers, by address
    _challenges: dict[str, str] = attrs.field(factory=dict, init=False, repr=False)

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        members(str, self.servers, "servers of an access")
        for context in (self.server_tls, self.client_tls):
            if context is not None:
                instance(ssl.SSLContext, context, "a TLS context of an access")

    def check_address(self, address: str) -> None:
        """Refuse to listen where no engine could ask, by rule access.D1. Raises ``PEER``.

        >>> Access().check_address("127.0.0.1")
        >>> Access().check_address("10.0.0.1")
        Traceback (most recent call last):
        kvplan.errors.KVPlanError: PEER: cannot listen on 10.0.0.1 with the key of this host:
        expected a loopback address, got one for other hosts, which do not have that key
        (set one key on all engines: the setting key or key_file, or KVPLAN_KEY)
        """
        if is_loopback(instance(str, address, "address of a server")) or not self.key.is_of_host:
            return
        raise KVPlanError(
            "PEER",
            f"listen on {address} with the key of this host",
            expected="a loopback address",
            got="one for other hosts, which do not have that key",
            hint=HINT,
        )

    def check_server(self, address: str) -> None:
        """Refuse an address that a request names, but no operator. Raises ``NAME``.

        >>> Access(servers=["10.0.0.0/16:8998"]).check_server("10.0.3.7:8998")
        >>> Access().check_server("10.0.3.7:8998")
        Traceback (most recent call last):
        kvplan.errors.KVPlanError: NAME: cannot ask '10.0.3.7:8998':
        expected a server of this machine, or one that the setting bootstrap_servers has,
        got another one (a request has named it: add it to bootstrap_servers if it is of a prefill
        engine)
        """
        host, _, port = instance(str, address, "address of a server").rpartition(":")
        host = host.removeprefix("[").removesuffix("]").lower()
        patterns = (*THIS_MACHINE, *self.servers)
        if not any(_is_server(pattern.lower(), host, port) for pattern in patterns):
            raise KVPlanError(
                "NAME",
                f"ask {shown(address)}",
                expected="a server of this machine, or one that the setting bootstrap_servers has",
                got="another one",
                hint="a request has named it: "
                "add it to bootstrap_servers if it is of a prefill engine",
            )

    def challenge_of(self, server: str) -> str:
        """Return the latest challenge of a server, ``-`` of one that has told none."""
        return self._challenges.get(instance(str, server, "address of a server"), "-")

    def remember(self, server: str, challenge: str) -> None:
        """Remember the challenge of a server for the next question."""
        instance(str, server, "address of a server")
        if len(instance(str, challenge, "challenge of a server")) != 2 * TOKEN_BYTES:
            return
        if len(self._challenges) >= MAX_SERVERS:
            self._challenges.clear()
        self._challenges[server] = challenge


def _is_server(pattern: str, host: str, port: str) -> bool:
    """Return whether a pattern of :class:`Access` has a host and port."""
    name, _, last = pattern.rpartition(":")
    # an IPv6 address with a port is in brackets
    if last.isdigit() and (":" not in name or name.endswith("]")):
        if port != last:
            return False
        pattern = name
    pattern = pattern.replace("[", "").replace("]", "")
    try:
        return ip_address(host) in ip_network(pattern, strict=False)
    except ValueError:
        domain = pattern.removeprefix("*")
        return host != "" and (host == pattern or (domain != pattern and host.endswith(domain)))


def numeric_address(address: Any) -> str:
    """Return the IP address and port of an end of a TCP connection as a text.

    >>> numeric_address(("::ffff:127.0.0.1", 5600, 0, 0))
    '127.0.0.1:5600'
    """
    host, port, *_ = address
    # without the interface of a link-local address, which differs at the two ends
    ip = ip_address(f"{host}".partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return f"{mapped or ip}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_contexts(
    certificate: Path, private_key: Path, authority: Path
) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of a server and of a client, from files in PEM.

    Each side shows its certificate, and wants one of the other that the ``authority`` has signed;
    a server's must name the host that readers connect to. Raises ``PEER`` for files that cannot be
    used.
    """
    for file in (certificate, private_key, authority):
        instance(Path, file, "a file of TLS")
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.verify_mode = ssl.CERT_REQUIRED
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, client):
            context.load_cert_chain(certificate, private_key)
            context.load_verify_locations(authority)
    except OSError as error:
        files = f"{certificate}, {private_key} and {authority}"
        expected = "a certificate, its private key and an authority"
        raise KVPlanError(
            "PEER", f"use TLS with {files}", expected=expected, got=f"{error!r}"
        ) from None
    return server, client
