"""Connectors: the parts that every engine's connector needs beside plans and an executor.

They know no engine and no NIXL. Prefill keeps the blocks of a computed request under a lease, and
describes the request in a :class:`Handoff`. Decode claims the lease while the request waits, reads
the request, and says when it is done:

    prefill                                    decode
    Listener: offers of all workers  <-- GET   Reads, in each worker: a handshake, then transfers
    Leases: request 1 is kept        <-- POST  Claims: I claim it, does its lease stand, I am done
"""

from kvplan.connector.access import Access, tls_contexts
from kvplan.connector.claims import Claims
from kvplan.connector.fingerprint import fingerprint
from kvplan.connector.handoff import Handoff, Source, WholeBlocks, attended, whole_blocks
from kvplan.connector.leases import EndedLeases, Leases
from kvplan.connector.listener import Listener, Offers, fetch, send_claims
from kvplan.connector.peer_engines import Connections, HandshakeResult
from kvplan.connector.prompt import prompt_digest
from kvplan.connector.read import Read, ReadResult
from kvplan.connector.reads import Reads
from kvplan.connector.system import System

__all__ = [
    "Access",
    "Claims",
    "Connections",
    "EndedLeases",
    "Handoff",
    "HandshakeResult",
    "Leases",
    "Listener",
    "Offers",
    "Read",
    "ReadResult",
    "Reads",
    "Source",
    "System",
    "WholeBlocks",
    "attended",
    "fetch",
    "fingerprint",
    "prompt_digest",
    "send_claims",
    "tls_contexts",
    "whole_blocks",
]
