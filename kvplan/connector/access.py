"""Access: who may talk to an engine over the network, by a key that all engines share.

- D1: Without a key, a server listens on loopback alone, unless the operator trusts the network.
- D2: With a key, both sides of an exchange prove that they know it. A question is signed with its
  method, target and body, and an answer with its question, status and body: neither passes for
  another one.
- D3: A question quotes the *challenge* of the server, which is random, and has a nonce that nobody
  has used with this challenge. So a recorded question is refused, also by the next start of the
  server, and no clock is compared. The server tells its challenge in each answer, also where it
  refuses a question for want of it.
- D4: The head of a question is checked before its body is read, and the body before it is parsed.

A key hides nothing: for that, both sides have TLS contexts.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from ipaddress import ip_address
from pathlib import Path
from secrets import token_hex
from typing import Final

import attrs

from kvplan._checks import instance
from kvplan._text import brief_repr
from kvplan.errors import KVPlanError

MIN_KEY_BYTES: Final = 16
"""The length of a key, below which it may be guessed from what it has signed."""

TOKEN_BYTES: Final = 16
"""The length of challenges and nonces, too long for two random ones to be equal."""

MAX_NONCES: Final = 1 << 16
"""Questions with one challenge, after which a server has a new one: its memory is bounded."""

MAX_SERVERS: Final = 1 << 10
"""Servers whose challenges a reader remembers. Another one costs a further exchange."""


def sign(key: bytes, purpose: str, *parts: bytes) -> str:
    """Return the HMAC-SHA256 of parts, in hexadecimal. Other purposes have other signatures."""
    signature = hmac.new(key, digestmod=hashlib.sha256)
    for part in (purpose.encode(), *parts):
        # with lengths, since parts that are divided in another way are others
        signature.update(len(part).to_bytes(8, "big"))
        signature.update(part)
    return signature.hexdigest()


@attrs.frozen
class Proof:
    """The proof that a question comes from somebody who knows the key, by rules D2 and D3."""

    challenge: str
    nonce: str
    body_digest: str
    signature: str

    @classmethod
    def of(cls, key: bytes, challenge: str, method: str, target: str, body: bytes) -> Proof:
        """Return the proof of a new question."""
        unsigned = cls(challenge, token_hex(TOKEN_BYTES), hashlib.sha256(body).hexdigest(), "")
        return attrs.evolve(unsigned, signature=unsigned.sign(key, method, target))

    @classmethod
    def read(cls, text: str) -> Proof | None:
        """Read what :meth:`__str__` writes, None if it is something else."""
        fields = text.split(" ")
        return cls(*fields) if len(fields) == len(attrs.fields(cls)) else None

    def __str__(self) -> str:
        return " ".join(attrs.astuple(self))

    def sign(self, key: bytes, method: str, target: str) -> str:
        """Return the signature of a question with this challenge, nonce and body."""
        texts = (method, target, self.challenge, self.nonce, self.body_digest)
        return sign(key, "question", *(text.encode() for text in texts))

    def is_of(self, key: bytes, method: str, target: str) -> bool:
        """Return whether the question was signed with this key."""
        return is_equal(self.signature, self.sign(key, method, target))

    def has_body(self, body: bytes) -> bool:
        """Return whether a body is that of the question."""
        return is_equal(self.body_digest, hashlib.sha256(body).hexdigest())

    def sign_answer(self, key: bytes, status: int, challenge: str, body: bytes) -> str:
        """Return the signature of the answer to this question."""
        head = f"{self.signature} {status} {challenge}"
        return sign(key, "answer", head.encode(), body)


def is_equal(signature: str, expected: str) -> bool:
    """Return whether two signatures are equal, in a time that does not depend on them."""
    return hmac.compare_digest(signature.encode(), expected.encode())


class Challenges:
    """The challenges of a server: its latest one, and the one before. Not for several threads.

    >>> challenges = Challenges()
    >>> challenge = challenges.latest
    >>> challenges.take(challenge, "nonce"), challenges.take(challenge, "nonce")
    (True, False)
    >>> challenges.take("of another server", "nonce")
    False
    """

    def __init__(self) -> None:
        # nonces by challenge, the latest last
        self._nonces: dict[str, set[str]] = {token_hex(TOKEN_BYTES): set()}

    @property
    def latest(self) -> str:
        """Return the challenge for the next question."""
        return next(reversed(self._nonces))

    def take(self, challenge: str, nonce: str) -> bool:
        """Take a question that was signed, and return whether it is a new one."""
        nonces = self._nonces.get(challenge)
        if nonces is None or nonce in nonces:
            return False
        nonces.add(nonce)
        if len(self._nonces[self.latest]) >= MAX_NONCES:
            self._nonces[token_hex(TOKEN_BYTES)] = set()
            # Questions that were under way have the challenge before.
            if len(self._nonces) > 2:
                del self._nonces[next(iter(self._nonces))]
        return True


@attrs.define(eq=False, kw_only=True)
class Access:
    """The key of an engine, and how it uses the network, as a server and as a reader.

    Without a ``key`` servers listen on loopback only, unless ``trusts_network``: then whoever
    reaches them is believed. Connections are encrypted where both sides have TLS contexts.

    >>> Access(key=b"a secret of all engines")
    Access(trusts_network=False)
    """

    key: bytes = attrs.field(default=b"", repr=False)
    trusts_network: bool = False
    server_tls: ssl.SSLContext | None = attrs.field(default=None, repr=False)
    client_tls: ssl.SSLContext | None = attrs.field(default=None, repr=False)
    # the latest challenges of servers, by address
    _challenges: dict[str, str] = attrs.field(factory=dict, init=False, repr=False)

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        size = len(instance(bytes, self.key, "key of an access"))
        if 0 < size < MIN_KEY_BYTES:
            expected = f"at least {MIN_KEY_BYTES} bytes, or none"
            raise KVPlanError("RANGE", "use a key", expected=expected, got=f"{size}")
        instance(bool, self.trusts_network, "trusts_network of an access")
        for context in (self.server_tls, self.client_tls):
            if context is not None:
                instance(ssl.SSLContext, context, "a TLS context of an access")

    def check_address(self, address: str) -> None:
        """Refuse to listen at an IP address that strangers may reach, by rule D1. Raises ``PEER``.

        >>> Access().check_address("127.0.0.1")
        >>> Access().check_address("10.0.0.1")
        Traceback (most recent call last):
        kvplan.errors.KVPlanError: PEER: cannot listen on 10.0.0.1 without a key:
        expected a loopback address, got one that strangers may reach
        (set a key that all engines share, or trust_network if only engines reach this address)
        """
        if is_loopback(instance(str, address, "address of a server")):
            return
        if self.key or self.trusts_network:
            return
        raise KVPlanError(
            "PEER",
            f"listen on {address} without a key",
            expected="a loopback address",
            got="one that strangers may reach",
            hint="set a key that all engines share, "
            "or trust_network if only engines reach this address",
        )

    def challenge_of(self, server: str) -> str:
        """Return the latest challenge of a server, ``-`` of one that has told none."""
        return self._challenges.get(instance(str, server, "address of a server"), "-")

    def remember(self, server: str, challenge: str) -> None:
        """Remember the challenge of a server for the next question. Safe for several threads."""
        instance(str, server, "address of a server")
        if len(instance(str, challenge, "challenge of a server")) != 2 * TOKEN_BYTES:
            return
        if len(self._challenges) >= MAX_SERVERS:
            self._challenges.clear()
        self._challenges[server] = challenge


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def access_or_none(access: Access | None) -> Access:
    """Return an access, one without a key in place of None."""
    return Access() if access is None else instance(Access, access, "access")


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
