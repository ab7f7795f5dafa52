"""Envelopes: the message by which one worker's executor connects to another's, over any channel of the engines.

An envelope holds a worker's offer and the metadata of its NIXL agent: the line ``kvplan_nixl 2``, an HMAC-SHA256 of all
that follows (32 bytes), three lengths (big endian, 4 bytes each), then the agent's name, its metadata, and the offer as
:func:`kvplan.encode` makes it.

An envelope is untrusted data, and a bad one raises :class:`kvplan.PeerError`. But NIXL parses the metadata, and some
bytes end its process. So the HMAC, with a key that the engines share, is checked before anything else. With an empty
key it finds accidents, and no forgery.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final

import attrs

from kvplan import KVPlanError, PeerError, Worker, decode, encode
from kvplan._checks import instance, name
from kvplan.handshake import Problem

MAGIC: Final = b"kvplan_nixl 2\n"
DIGEST: Final = "sha256"
DIGEST_BYTES: Final = 32
LENGTHS: Final = struct.Struct(">III")

MAX_NAME_BYTES: Final = 1 << 10
MAX_METADATA_BYTES: Final = 1 << 22
"""Metadata has a few hundred bytes for each registered region and backend."""


def agent_prefix(worker: Worker) -> str:
    """What the names of a worker's NIXL agents begin with. They are names of files where NIXL writes telemetry.

    >>> from kvplan import Worker
    >>> agent_prefix(Worker("prefill", 0, (), (), ()))
    'prefill.0.'
    """
    return f"{worker.label.replace('/', '.')}."


@attrs.frozen
class Envelope:
    """A worker, the name of its NIXL agent, and that agent's metadata."""

    worker: Worker
    agent: str
    metadata: bytes = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        instance(Worker, self.worker, "worker of an envelope")
        name(self.agent, "agent of an envelope")
        instance(bytes, self.metadata, "metadata of an envelope")

    def pack(self, key: bytes = b"") -> bytes:
        """The envelope as bytes, authenticated by a key.

        >>> from kvplan import Region, Worker
        >>> data = Envelope(Worker("prefill", 0, (Region("kv", 4096, 64),), (), ()), "prefill.0.a1", b"...").pack()
        >>> Envelope.unpack(data)
        Envelope(worker=<Worker prefill/0: 0 views of 0 tensors in 1 region, 0 groups>, agent='prefill.0.a1')
        """
        parts = (self.agent.encode(), self.metadata, encode(self.worker))
        content = b"".join((LENGTHS.pack(*map(len, parts)), *parts))
        return MAGIC + _digest(key, content) + content

    @classmethod
    def unpack(cls, data: bytes, key: bytes = b"") -> Envelope:
        """Read an envelope that was packed with a key.

        Raises a PeerError: ``MESSAGE``, or the code of :func:`kvplan.decode` for its offer.
        """
        instance(bytes, data, "an envelope")
        begin = len(MAGIC) + DIGEST_BYTES
        head = begin + LENGTHS.size
        if not data.startswith(MAGIC) or len(data) < head:
            raise _unusable(
                f"a message that starts with {MAGIC.decode().strip()!r}", f"{data[: len(MAGIC)]!r}"
            )
        if not hmac.compare_digest(data[len(MAGIC) : begin], _digest(key, data[begin:])):
            raise _unusable(
                "one that was made with the key of this engine, and not changed since",
                "another one",
            )
        name_bytes, metadata_bytes, offer_bytes = LENGTHS.unpack_from(data, begin)
        if name_bytes > MAX_NAME_BYTES or metadata_bytes > MAX_METADATA_BYTES:
            raise _unusable(
                f"at most {MAX_NAME_BYTES} bytes of name and {MAX_METADATA_BYTES} of metadata",
                f"{name_bytes} and {metadata_bytes}",
            )
        metadata, offer = head + name_bytes, head + name_bytes + metadata_bytes
        if offer + offer_bytes != len(data):
            raise _unusable(f"{offer + offer_bytes} bytes, by its own lengths", f"{len(data)}")
        agent = data[head:metadata].decode(errors="replace")
        worker = decode(data[offer:])
        if not (agent.startswith(agent_prefix(worker)) and agent.isprintable()):
            raise _unusable(f"the name of an agent of worker {worker.label}", repr(agent))
        return cls(worker, agent, data[metadata:offer])


def _digest(key: bytes, content: bytes) -> bytes:
    return hmac.digest(instance(bytes, key, "the key of envelopes"), content, DIGEST)


def _unusable(expected: str, got: str) -> PeerError:
    error = KVPlanError("MESSAGE", "open an envelope", expected=expected, got=got)
    return PeerError([Problem("", error.code, str(error))], error)
