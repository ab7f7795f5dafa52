"""The key that all engines share, which signs every message between them.

A key may consist of two *secrets*, one a line: the first one signs, and both are accepted. That is
how a key is changed while engines run: give all of them the new secret as the second line, then as
the first, then take the old one away.
"""

from __future__ import annotations

import hashlib
import hmac
from itertools import chain
from typing import Final

import attrs

from kvplan._checks import at_most, instance, members
from kvplan.errors import KVPlanError

__all__ = [
    "HINT",
    "SharedKey",
]

MIN_KEY_BYTES: Final = 16
"""The length of a secret. A shorter one can be guessed from what it has signed."""

MIN_KEY_VALUES: Final = 4
"""The number of different bytes in a secret: sixteen spaces are no secret."""

MAX_SECRETS: Final = 2

HINT: Final = "set one key on all engines: the setting key or key_file, or KVPLAN_KEY"


@attrs.frozen
class SharedKey:
    """The secrets of which the first signs, and any is accepted. Raises ``RANGE`` for weak ones.

    ``is_of_host`` says that no operator has set it, so that no other host has it.

    >>> old = SharedKey.of(b"a secret of 2026")
    >>> both = SharedKey.of(b"a secret of 2027\\na secret of 2026")
    >>> both.has_signed(old.sign("greeting", b"hello"), "greeting", b"hello")
    True
    >>> old.has_signed(both.sign("greeting", b"hello"), "greeting", b"hello")
    False
    """

    secrets: tuple[bytes, ...] = attrs.field(repr=False)
    is_of_host: bool = False

    def __attrs_post_init__(self) -> None:
        action = "use a key"
        at_most(MAX_SECRETS, len(members(bytes, self.secrets, "secrets")), "lines of a key", action)
        expected = f"at least {MIN_KEY_BYTES} bytes, not all alike, in each of its lines"
        sizes = [len(secret) for secret in self.secrets]
        weak = [secret for secret in self.secrets if len(set(secret)) < MIN_KEY_VALUES]
        if not sizes or min(sizes) < MIN_KEY_BYTES or weak:
            got = f"{sizes[0] if sizes else 0} bytes, or few different ones"
            raise KVPlanError("RANGE", action, expected=expected, got=got)

    @classmethod
    def of(cls, key: SharedKey | bytes) -> SharedKey:
        """Return a key that is given as bytes, with a secret in each line."""
        if isinstance(key, SharedKey):
            return key
        lines = (line.strip() for line in instance(bytes, key, "a key").splitlines())
        return cls(tuple(line for line in lines if line))

    def sign(self, purpose: str, *parts: bytes) -> str:
        """Return the HMAC-SHA256 of parts, in hexadecimal. Each purpose has its own signatures."""
        return _signature(self.secrets[0], purpose, parts)

    def has_signed(self, signature: str, purpose: str, *parts: bytes) -> bool:
        """Return whether a signature is one of these parts, by any of the secrets."""
        given = signature.encode()
        return any(
            hmac.compare_digest(given, _signature(secret, purpose, parts).encode())
            for secret in self.secrets
        )


def _signature(secret: bytes, purpose: str, parts: tuple[bytes, ...]) -> str:
    # The length comes first, so that the same bytes divided otherwise have another signature.
    sized = ((len(part).to_bytes(8, "big"), part) for part in (purpose.encode(), *parts))
    return hmac.digest(secret, b"".join(chain.from_iterable(sized)), hashlib.sha256).hex()
