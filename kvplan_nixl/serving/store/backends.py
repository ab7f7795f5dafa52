"""Backends: where the files of pages are. Each file is written once, under a name, and read whole.

A name is ``space/key/shard``: the folder of a model, the key of a page, and one of its files. All
backends follow these rules:

- store.S1: A file appears whole or not at all, and is never written to. Where several write one
  name, which means the same cache, any of their files stays, and it is read from one of them.
- store.S2: Deleting what is not there is no error, nor is reading it: it is ``None``. A file that
  is being read stays readable while another process deletes it, or reads as ``None``.
- store.S3: A backend that fails raises ``BACKEND``, and leaves nothing of what it was writing.
- store.S4: What was written does not prove what is read. Readers check digests.
- store.S5: A page of a prefix counts as used before the page in front of it, so prefixes are
  evicted from their ends.
"""

from __future__ import annotations

import errno
import io
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import attrs

from kvplan import KVPlanError
from kvplan.support import brief_repr, instance, integer, members, seconds, shown, wrong_type

FILE_NAME: Final = re.compile(r"[0-9a-f]{16}/[0-9a-f]{64}/[0-9a-z][0-9a-z.]{0,63}")

PIN: Final = "pin"
"""The file of a page that keeps the page from being evicted, or the beginning of its name."""

MAX_FAULTS: Final = 100
"""The most entries that are named which cannot be listed."""

AHEAD_S: Final = 3600.0
"""Clocks of hosts may differ by so much: a time of use so long after now is of a wrong clock."""

BETWEEN_PAGES_S: Final = 1e-5
"""A page counts as used so long before the page in front of it."""

FileBytes = bytes | memoryview


@attrs.frozen
class FileEntry:
    """A file of a store: its name, the bytes that it takes, and when it was last used.

    Times are in seconds of the epoch.
    """

    name: str
    num_bytes: int
    used_s: float

    __repr__ = brief_repr

    @property
    def page(self) -> str:
        """The page that the file belongs to, ``space/key``."""
        return self.name.rpartition("/")[0]


@attrs.frozen
class Unfinished:
    """Files that are not whole: how many were deleted, since their writers have ended.

    ``left_bytes`` are those of the others, which may still be written.
    """

    num_deleted: int
    left_bytes: int

    __repr__ = brief_repr


class OpenFile(Protocol):
    """A file that is open, to be read from its beginning on, once, such as Python's own."""

    def readinto(self, memory: memoryview, /) -> int | None:
        """Read up to as many bytes as a memory has, and return how many; 0 at the file's end."""

    def close(self) -> None:
        """Close the file."""


class Backend(Protocol):
    """Holds files by name, rules store.S1 to store.S5. Any number of threads and processes use it
    at once.
    """

    @property
    def at_once(self) -> int:
        """How many calls a client makes at once, where one does not wait for another."""

    def put(self, name: str, chunks: Sequence[FileBytes]) -> bool:
        """Write a file. Return whether it was written: one that is there may stay."""

    def get(self, name: str, num_bytes: int | None = None) -> bytes | None:
        """Return the first bytes of a file, or all of them, ``None`` if there is no such file."""

    def open(self, name: str) -> tuple[OpenFile, int] | None:
        """Open a file to read all of it, and say its size; ``None`` if there is no such file."""

    def delete(self, name: str) -> bool:
        """Delete a file. Return whether it was there."""

    def files(self, page: str) -> tuple[str, ...]:
        """Return what the names of the files of ``space/key`` end with, none if it has no files."""

    def touch(self, pages: Sequence[str], used_s: float, first_page: int = 0) -> None:
        """Note when pages of a prefix were used, in seconds of the epoch, rule store.S5.

        ``first_page`` is the index of the first of them in the prefix. Pins keep their times.
        """

    def entries(self, faults: list[str] | None = None) -> Iterator[FileEntry]:
        """Yield all files. Ones that come or go meanwhile may be among them.

        What cannot be listed is left out, and noted in ``faults``.
        """

    def sweep(self, unfinished_s: float = 0.0) -> Unfinished:
        """Delete what was begun and will not be finished; it has not grown for ``unfinished_s``."""


def is_pin(file: str) -> bool:
    """Return whether a file of a page keeps the page from being evicted.

    >>> is_pin("pin"), is_pin("pin.6b86b273"), is_pin("5b86b273")
    (True, True, False)
    """
    return file.partition(".")[0] == PIN


def read_fully(name: str, file: OpenFile, memory: memoryview) -> int:
    """Fill a memory from a file, and return the bytes that it has got, fewer at the file's end."""
    num_read = 0
    try:
        while num_read < len(memory) and (num_bytes := file.readinto(memory[num_read:])):
            num_read += num_bytes
    except OSError as error:
        # as NFS says of a file that another host has deleted
        if error.errno != errno.ESTALE:
            raise failed("read", name, "bytes of a file", reason(error)) from error
    return num_read


def note(faults: list[str] | None, fault: str) -> None:
    """Note what cannot be listed, unless that was said often enough."""
    if faults is not None and len(faults) < MAX_FAULTS:
        faults.append(fault)


def checked_name(name: str) -> str:
    """Return the name of a file. Raises ``NAME`` for one that could leave its folder."""
    if not FILE_NAME.fullmatch(instance(str, name, "name of a file")) or "/." in name:
        expected = "space/key/shard, in hexadecimal digits"
        raise KVPlanError("NAME", "name a file of a store", expected=expected, got=shown(name))
    return name


def checked_page(page: str) -> str:
    """Return the name of a page. Raises ``NAME`` for one that could leave its folder."""
    checked_name(f"{instance(str, page, 'name of a page')}/x")
    return page


def checked_uses(
    pages: Sequence[str], used_s: float, first_page: int = 0
) -> list[tuple[str, float]]:
    """Return when each page of a prefix counts as used, rule store.S5. Raises ``TYPE`` or
    ``RANGE``.
    """
    check_moment(used_s, "used_s")
    integer(first_page, "first_page")
    return [
        (checked_page(page), used_s - number * BETWEEN_PAGES_S)
        for number, page in enumerate(members(str, pages, "pages"), start=first_page)
    ]


def checked_chunks(chunks: Sequence[FileBytes]) -> tuple[FileBytes, ...]:
    """Return the chunks of a file. Raises ``TYPE`` for anything but bytes."""
    checked = members(object, chunks, "chunks of a file")
    for chunk in checked:
        if not isinstance(chunk, bytes | memoryview):
            raise wrong_type("chunks of a file", "bytes", chunk)
    return tuple(chunks)


def check_moment(moment_s: float, subject: str) -> None:
    """Refuse what is no number of seconds before or after the epoch. Raises ``TYPE``, ``RANGE``."""
    # the sign alone tells before from after; nan is no number, and stays one
    is_number = isinstance(moment_s, int | float) and not isinstance(moment_s, bool)
    seconds(abs(moment_s) if is_number else moment_s, subject)


@attrs.define
class _MemoryFile:
    data: bytes
    used_s: float


class MemoryBackend:
    """Files in the memory of this process, for tests and for a single engine.

    ``max_bytes`` is when it is full. A folder of a file system in memory, such as ``/dev/shm``,
    serves all engines of a host: :class:`FileBackend`.
    """

    at_once: int = 1

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: dict[str, dict[str, _MemoryFile]] = {}
        self._num_bytes = 0

    def put(self, name: str, chunks: Sequence[FileBytes]) -> bool:
        page, _, shard = checked_name(name).rpartition("/")
        data = b"".join(checked_chunks(chunks))
        with self._lock:
            if shard in self._files.get(page, {}):
                return False
            if self._max_bytes is not None and self._num_bytes + len(data) > self._max_bytes:
                raise failed("write", name, f"memory for {self._max_bytes} bytes", "none left")
            self._num_bytes += len(data)
            self._files.setdefault(page, {})[shard] = _MemoryFile(data, time.time())
            return True

    def get(self, name: str, num_bytes: int | None = None) -> bytes | None:
        page, _, shard = checked_name(name).rpartition("/")
        stop = None if num_bytes is None else integer(num_bytes, "num_bytes")
        file = self._files.get(page, {}).get(shard)
        return None if file is None else file.data[:stop]

    def open(self, name: str) -> tuple[OpenFile, int] | None:
        data = self.get(name)
        return None if data is None else (io.BytesIO(data), len(data))

    def delete(self, name: str) -> bool:
        page, _, shard = checked_name(name).rpartition("/")
        with self._lock:
            file = self._files.get(page, {}).pop(shard, None)
            self._num_bytes -= 0 if file is None else len(file.data)
            if not self._files.get(page, True):
                del self._files[page]
        return file is not None

    def files(self, page: str) -> tuple[str, ...]:
        return tuple(self._files.get(checked_page(page), ()))

    def touch(self, pages: Sequence[str], used_s: float, first_page: int = 0) -> None:
        with self._lock:
            for page, page_used_s in checked_uses(pages, used_s, first_page):
                for shard, file in self._files.get(page, {}).items():
                    if not is_pin(shard):
                        file.used_s = page_used_s

    def entries(self, faults: list[str] | None = None) -> Iterator[FileEntry]:
        with self._lock:
            kept = {page: dict(files) for page, files in self._files.items()}
        for page, files in kept.items():
            for shard, file in files.items():
                yield FileEntry(f"{page}/{shard}", len(file.data), file.used_s)

    def sweep(self, unfinished_s: float = 0.0) -> Unfinished:
        """Delete nothing: nothing is ever half written."""
        seconds(unfinished_s, "unfinished_s")
        return Unfinished(0, 0)


def failed(verb: str, name: str, expected: str, got: str) -> KVPlanError:
    """Return the error of a backend that fails, rule store.S3."""
    return KVPlanError("BACKEND", f"{verb} {name} of a store", expected=expected, got=got)


def reason(error: OSError) -> str:
    """Return what the system says of an error."""
    return error.strerror or f"{error}"
