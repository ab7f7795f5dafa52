"""Connectors: what every engine's connector needs beside plans and an executor. It knows no engine and no NIXL.

Prefill keeps the blocks of a computed request under a lease, and describes the request in a :class:`Handoff`. Decode
reads it, and says when it is done:

    prefill                                        decode
    Listener: offers of all workers     <-- GET    Reads, in each worker: handshake in the background, then transfers
    Leases: request 1 until t           <-- POST   Notifier: request 1 is done, after all workers have ended
"""

from kvplan.connector.handoff import Handoff, Source, attended
from kvplan.connector.leases import Leases
from kvplan.connector.listener import Listener, Notifier, Offers, fetch, send_done
from kvplan.connector.reads import Read, ReadResult, Reads

__all__ = [
    "Handoff",
    "Leases",
    "Listener",
    "Notifier",
    "Offers",
    "Read",
    "ReadResult",
    "Reads",
    "Source",
    "attended",
    "fetch",
    "send_done",
]
