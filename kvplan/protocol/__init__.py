"""The protocol between engines: leases, claims, handoffs, handshakes, reads and digests.

It knows no engine and no NIXL, and does no input or output: what waits is a coroutine that reaches
the world through a :class:`System`, and the rest are plain objects that an engine calls in each
step. Prefill keeps the blocks of a computed request under a lease, and describes the request in a
:class:`Handoff`. Decode claims the lease while the request waits, reads the request, and says when
it is done:

    prefill                                    decode
    Listener: offers of all workers  <-- GET   Reads, in each worker: a handshake, then transfers
    Leases: request 1 is kept        <-- POST  Claims: I claim it, is its lease valid, I am done

The format of stored pages is here too: :class:`Chain` has the keys of a prompt's pages,
:func:`parts_of` what a worker writes of each, and :class:`PageHeader` what a file says of itself.
"""

from kvplan.protocol.claims import Claims
from kvplan.protocol.handoff import Handoff, Source, WholeBlocks, attended, whole_blocks
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.leases import EndedLeases, Leases
from kvplan.protocol.listener import Listener, Offers, fetch, send_claims
from kvplan.protocol.page_keys import PAGE_TOKENS, Chain, Fact
from kvplan.protocol.page_parts import StoredPart, parts_of
from kvplan.protocol.pages import PageHeader
from kvplan.protocol.peer_engines import Connections, HandshakeResult
from kvplan.protocol.prefix_search import Attended
from kvplan.protocol.prompt import prompt_digest
from kvplan.protocol.read import Read, ReadResult
from kvplan.protocol.reads import Reads
from kvplan.protocol.system import Pending, Route, System

__all__ = [
    "PAGE_TOKENS",
    "Attended",
    "Chain",
    "Claims",
    "Connections",
    "EndedLeases",
    "Fact",
    "Handoff",
    "HandshakeResult",
    "Leases",
    "Listener",
    "Offers",
    "PageHeader",
    "Pending",
    "Read",
    "ReadResult",
    "Reads",
    "Route",
    "SharedKey",
    "Source",
    "StoredPart",
    "System",
    "WholeBlocks",
    "attended",
    "fetch",
    "parts_of",
    "prompt_digest",
    "send_claims",
    "whole_blocks",
]
