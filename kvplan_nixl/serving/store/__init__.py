"""A store keeps caches at rest: what any engine has saved, any other engine of the model loads.

A prompt's cache is cut into pages of 64 tokens, each under a key that digests all tokens up to its
end. A page describes itself, so a reader of any parallel sizes, blocks and layout plans its reads
from the description. The page "The format of a store" specifies keys and files.

    StoreClient.save    cache --plan_writes--> pages in memory --digest--> Backend.put
    StoreClient.find    keys --Backend.files--> shards --plan_reads--> the longest prefix
    StoreClient.load    Backend.get --digests checked--> pages in memory --plan_reads--> cache
"""

from kvplan_nixl.serving.store.backends import (
    Backend,
    FileEntry,
    MemoryBackend,
    OpenFile,
    Unfinished,
)
from kvplan_nixl.serving.store.client import StoreClient
from kvplan_nixl.serving.store.eviction import BackgroundEviction, Evicted, Limits, evict
from kvplan_nixl.serving.store.files import FileBackend
from kvplan_nixl.serving.store.locations import open_backend
from kvplan_nixl.serving.store.mover import MemoryMover, Mover
from kvplan_nixl.serving.store.page_files import read_file
from kvplan_nixl.serving.store.readers import StoreReader, find
from kvplan_nixl.serving.store.stalls import StallGuard

__all__ = [
    "Backend",
    "BackgroundEviction",
    "Evicted",
    "FileBackend",
    "FileEntry",
    "Limits",
    "MemoryBackend",
    "MemoryMover",
    "Mover",
    "OpenFile",
    "StallGuard",
    "StoreClient",
    "StoreReader",
    "Unfinished",
    "evict",
    "find",
    "open_backend",
    "read_file",
]
