"""Envelopes: the message by which one worker's executor connects to another's.

The engines send it over any channel. An envelope holds a worker's offer and the metadata of its
NIXL agent: the line ``kvplan_nixl 3``, an HMAC-SHA256 of all that follows (32 bytes), four lengths
(big endian, 4 bytes each), then the agent's name, its metadata, the handles by which processes of
its host map its memory, and the offer as :func:`kvplan.encode` makes it.

An envelope is untrusted, and a bad one raises :class:`kvplan.PeerError`. But NIXL parses the
metadata, and some bytes crash its process. So the HMAC, with the key that the engines share, is
checked before anything else.
"""

from __future__ import annotations

import struct
from typing import Final

import attrs

from kvplan import KVPlanError, PeerError, Worker, decode, encode
from kvplan.handshake import Problem
from kvplan.support import brief_repr, instance, name
from kvplan_nixl.serving.host_key import AnyKey, key_of

MAGIC: Final = b"kvplan_nixl 3\n"
PURPOSE: Final = "envelope"
HMAC_BYTES: Final = 32
LENGTHS: Final = struct.Struct(">IIII")
"""The lengths of the agent's name, its metadata, the handles of its memory, and the offer."""

MAX_NAME_BYTES: Final = 1 << 10
MAX_METADATA_BYTES: Final = 1 << 22
"""Metadata has a few hundred bytes for each registered region and backend."""

MAX_HANDLES_BYTES: Final = 1 << 20
"""Handles have a few hundred bytes for each region."""


def agent_prefix(worker: Worker) -> str:
    """Return the beginning of the names of a worker's NIXL agents.

    NIXL writes telemetry to files of these names.

    >>> from kvplan import Worker
    >>> agent_prefix(Worker("prefill", 0, (), (), ()))
    'prefill.0.'
    """
    return f"{worker.label.replace('/', '.')}."


@attrs.frozen
class Envelope:
    """A worker, the name of its NIXL agent, and that agent's metadata.

    ``handles`` lets processes of the same host map its memory, as
    :class:`kvplan_nixl.mapped.MappedExecutor` writes them; empty where none can be.
    """

    worker: Worker
    agent: str
    metadata: bytes = attrs.field(repr=False)
    handles: bytes = attrs.field(default=b"", repr=False)

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        instance(Worker, self.worker, "worker of an envelope")
        name(self.agent, "agent of an envelope")
        instance(bytes, self.metadata, "metadata of an envelope")
        instance(bytes, self.handles, "handles of an envelope")

    def pack(self, key: AnyKey = None) -> bytes:
        """Return the envelope as bytes, authenticated by a key.

        >>> from kvplan import Region, Worker
        >>> worker = Worker("prefill", 0, (Region("kv", 4096, 64),), (), ())
        >>> Envelope.unpack(Envelope(worker, "prefill.0.a1", b"...").pack())
        Envelope(worker=<Worker prefill/0: 0 views of 0 tensors in 1 region, 0 groups>,
                 agent='prefill.0.a1')
        """
        fields = (self.agent.encode(), self.metadata, self.handles, encode(self.worker))
        content = b"".join((LENGTHS.pack(*map(len, fields)), *fields))
        signature = key_of(key).sign(PURPOSE, content)
        return MAGIC + bytes.fromhex(signature) + content

    @classmethod
    def unpack(cls, data: bytes, key: AnyKey = None) -> Envelope:
        """Read an envelope that was packed with a key.

        Raises a PeerError: ``MESSAGE``, or the code of :func:`kvplan.decode` for its offer.
        """
        instance(bytes, data, "an envelope")
        # magic, signature, the lengths of four fields, the fields
        signature_start = len(MAGIC)
        content_start = signature_start + HMAC_BYTES
        agent_start = content_start + LENGTHS.size
        if not data.startswith(MAGIC) or len(data) < agent_start:
            raise _unusable(
                f"a message that starts with {MAGIC.decode().strip()!r}",
                f"{data[:signature_start]!r}",
            )
        # nothing is parsed before the signature has been checked
        signature = data[signature_start:content_start].hex()
        if not key_of(key).has_signed(signature, PURPOSE, data[content_start:]):
            raise _unusable(
                "a signature by this engine's key",
                "a bad signature: the keys differ, or the envelope was modified",
            )
        lengths = LENGTHS.unpack_from(data, content_start)
        agent_bytes, metadata_bytes, handles_bytes, offer_bytes = lengths
        limits = (MAX_NAME_BYTES, MAX_METADATA_BYTES, MAX_HANDLES_BYTES)
        if any(length > limit for length, limit in zip(lengths, limits, strict=False)):
            raise _unusable(
                "at most {} bytes of name, {} of metadata and {} of handles".format(*limits),
                f"{agent_bytes}, {metadata_bytes} and {handles_bytes}",
            )
        metadata_start = agent_start + agent_bytes
        handles_start = metadata_start + metadata_bytes
        offer_start = handles_start + handles_bytes
        end = offer_start + offer_bytes
        if end != len(data):
            raise _unusable(f"{end} bytes, by its own lengths", f"{len(data)}")
        agent = data[agent_start:metadata_start].decode(errors="replace")
        worker = decode(data[offer_start:])
        if not (agent.startswith(agent_prefix(worker)) and agent.isprintable()):
            raise _unusable(f"the name of an agent of worker {worker.label}", repr(agent))
        handles = data[handles_start:offer_start]
        return cls(worker, agent, data[metadata_start:handles_start], handles)


def _unusable(expected: str, got: str) -> PeerError:
    error = KVPlanError("MESSAGE", "open an envelope", expected=expected, got=got)
    return PeerError([Problem("", error.code, str(error))], error)
