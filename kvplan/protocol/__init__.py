"""The protocol between engines: leases, claims, handoffs, handshakes, reads and digests.

It knows no engine and no NIXL, and does no input or output: an engine calls plain objects in each
step, and what has to wait is a coroutine that reaches the network and the clock through a
:class:`System`. Prefill's :class:`Exporter` keeps the blocks of a computed request under a lease,
and describes the request in a :class:`Handoff`. Decode's :class:`Importer` claims the lease while
the request waits, says what to read, and ends the claim when it is read:

    prefill                                    decode
    Exporter: request 1 is pinned              Importer: request 1 is claimed, and read
    Listener: offers of all workers  <-- GET   Reads, in each worker: a handshake, transfers
    Leases: request 1 is kept        <-- POST  Claims: I claim it, is its lease valid, I am done

These names are for authors of connectors, and provisional: they may change in any release. Modules
of the package have others, as provisional, for what few connectors need: ``digest`` for digests on
a device, ``groups`` for block tables, ``system`` for another event loop,
``keys`` and ``room_contents`` for another server, and ``page_keys``, ``page_shards``,
``page_reads``, ``pages`` and ``prefix_search`` for the format of a store.
"""

from kvplan.protocol.claims import Claims
from kvplan.protocol.digest_requests import DigestRequest
from kvplan.protocol.exporter import EndedExports, Exporter
from kvplan.protocol.groups import CacheGroup
from kvplan.protocol.handoff import Handoff, Source, prompt_digest
from kvplan.protocol.importer import Importer, ImportState, PartialRead
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.leases import Leases
from kvplan.protocol.listener import Listener
from kvplan.protocol.peer_engines import Connections, HandshakeResult, Handshakes
from kvplan.protocol.read import Read, ReadResult
from kvplan.protocol.reads import Reads
from kvplan.protocol.retention import keeping
from kvplan.protocol.rooms import Rooms
from kvplan.protocol.system import System

__all__ = [
    "CacheGroup",
    "Claims",
    "Connections",
    "DigestRequest",
    "EndedExports",
    "Exporter",
    "Handoff",
    "HandshakeResult",
    "Handshakes",
    "ImportState",
    "Importer",
    "Leases",
    "Listener",
    "PartialRead",
    "Read",
    "ReadResult",
    "Reads",
    "Rooms",
    "SharedKey",
    "Source",
    "System",
    "keeping",
    "prompt_digest",
]
