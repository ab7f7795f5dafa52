"""A store keeps caches at rest: what any engine has saved, any other engine of the model loads.

A prompt's cache is cut into pages of 64 tokens, each under a key that digests all tokens up to its
end. A page describes itself, so a reader of any parallel sizes, blocks and layout plans its reads
from the description. The page "The format of a store" specifies keys and files.

    StoreClient.save    cache --plan_writes--> pages in memory --digest--> Backend.put
    StoreClient.find    keys --Backend.files--> parts --plan_reads--> the longest prefix
    StoreClient.load    Backend.get --digests checked--> pages in memory --plan_reads--> cache
"""

from kvplan.store.backends import Backend, FileEntry, MemoryBackend, OpenFile, Unfinished
from kvplan.store.chain import PAGE_TOKENS, Chain, Fact
from kvplan.store.client import StoreClient, read_file
from kvplan.store.eviction import BackgroundEviction, Evicted, Limits, evict
from kvplan.store.files import FileBackend
from kvplan.store.locations import open_backend
from kvplan.store.mover import MemoryMover, Mover
from kvplan.store.pages import PageHeader
from kvplan.store.parts import StoredPart, parts_of
from kvplan.store.readers import Attended, StoreReader, find
from kvplan.store.stalls import StallGuard

__all__ = [
    "PAGE_TOKENS",
    "Attended",
    "Backend",
    "BackgroundEviction",
    "Chain",
    "Evicted",
    "Fact",
    "FileBackend",
    "FileEntry",
    "Limits",
    "MemoryBackend",
    "MemoryMover",
    "Mover",
    "OpenFile",
    "PageHeader",
    "StallGuard",
    "StoreClient",
    "StoreReader",
    "StoredPart",
    "Unfinished",
    "evict",
    "find",
    "open_backend",
    "parts_of",
    "read_file",
]
