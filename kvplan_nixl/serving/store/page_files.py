"""Reads of the files of pages: their sizes before their bytes, and their digests before any use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from kvplan import KVPlanError
from kvplan.protocol.page_shards import StoredShard
from kvplan.protocol.pages import (
    ALIGNMENT,
    ROW_BYTES,
    DataDigest,
    PageHeader,
    check_size,
    check_space,
    check_stop,
    damaged,
    data_offset,
    parse_header,
)
from kvplan.support import having
from kvplan.support import name as checked_name
from kvplan_nixl.serving.store.backends import Backend, OpenFile, read_fully

CHUNK_BYTES: Final = 64 * ROW_BYTES
"""The bytes that are read, and digested, at a time."""

MAX_DATA_BYTES: Final = 1 << 30
"""The most data of a file that is read into memory of its own."""

MemoryOf = Callable[[PageHeader], memoryview | None]
"""Returns the memory for the data of a file, of ``num_bytes``."""


def read_header(backend: Backend, name: str) -> PageHeader:
    """Read the header of the file ``name``. Raises ``PAGE`` for anything but what was written.

    ``VERSION`` is raised for a file of another version.
    """
    head = backend.get(name, ALIGNMENT) or b""
    offset = data_offset(name, head)
    if offset > ALIGNMENT:
        head = backend.get(name, offset) or b""
    return parse_header(name, head)


def read_page(name: str, file: OpenFile, file_bytes: int, memory_of: MemoryOf) -> PageHeader:
    """Read a file from its beginning to its end, and check all of its digests and sizes.

    Its data goes to the memory that ``memory_of`` returns for its header, or nowhere if that is
    ``None``, and is digested as it comes. The file's size and the numbers of the header are checked
    before the bytes for which they ask are read. Raises as :func:`read_header` does.
    """

    def read(num_bytes: int) -> bytes:
        memory = memoryview(bytearray(num_bytes))
        return bytes(memory[: read_fully(name, file, memory)])

    head = read(min(ALIGNMENT, file_bytes))
    rest_bytes = min(data_offset(name, head), file_bytes) - len(head)
    header = parse_header(name, head + read(rest_bytes))
    num_bytes = header.data_offset + header.num_bytes
    if file_bytes != num_bytes:
        raise damaged(name, f"a file of {num_bytes} bytes", f"{file_bytes}")
    memory = memory_of(header)
    scratch = memoryview(b"" if memory is not None else bytearray(CHUNK_BYTES))
    digest = DataDigest()
    for start in range(0, header.num_bytes, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, header.num_bytes)
        chunk = scratch[: stop - start] if memory is None else memory[start:stop]
        if read_fully(name, file, chunk) < stop - start:
            raise damaged(name, f"{header.num_bytes} bytes of data", "fewer")
        # a chunk is still in the processor's cache
        digest.update(chunk)
    if digest.hexdigest() != header.digest:
        raise damaged(name, "data with its digest", "other bytes")
    return header


def read_file(
    backend: Backend, name: str, shard: StoredShard | None = None
) -> tuple[PageHeader, memoryview]:
    """Read a whole file and check all its digests; ``shard`` is the one of its name, if known.

    Raises ``PAGE``, ``VERSION`` or ``BACKEND``, or what an unreadable description raises; ``PAGE``
    too for a file with more data than :data:`MAX_DATA_BYTES`.
    """
    having("open", backend, "backend of a store", "a Backend")
    data = memoryview(b"")

    def memory_of(header: PageHeader) -> memoryview:
        nonlocal data
        check_size(name, header, shard or header.shard)
        at_most = min(header.num_bytes, MAX_DATA_BYTES)
        if at_most < header.num_bytes:
            expected = f"at most {MAX_DATA_BYTES} bytes of data"
            got = f"{header.num_bytes}"
            raise KVPlanError("PAGE", f"read page {name}", expected=expected, got=got)
        data = memoryview(bytearray(header.num_bytes))
        return data

    header = read_whole(backend, checked_name(name, "name of a page"), memory_of)
    return header, data


def check_file(backend: Backend, name: str) -> PageHeader:
    """Check a whole file, of which little is in memory. Raises as :func:`read_file` does."""
    having("open", backend, "backend of a store", "a Backend")

    def no_memory(header: PageHeader) -> None:
        shard = header.shard
        check_size(name, header, shard)
        size = shard.tokens_per_page
        if size is not None and (header.stop % size or not header.stop):
            check_stop(name, header, max(header.stop // size, 1) * size)
        if size is not None:
            check_space(name, shard.worker.model, size)

    return read_whole(backend, checked_name(name, "name of a page"), no_memory)


def read_whole(backend: Backend, name: str, memory_of: MemoryOf) -> PageHeader:
    opened = backend.open(name)
    if opened is None:
        action = f"read page {name}"
        raise KVPlanError("PAGE", action, expected="a file", got="none, or an evicted one")
    file, file_bytes = opened
    with contextlib.closing(file):
        return read_page(name, file, file_bytes, memory_of)
