"""Objects: a backend of pages in an object store, such as S3, through the package obstore.

- store.O1: An object is put in one request, so it appears whole. Putting it again replaces it by
  another one of the same cache.
- store.O2: An object has no time of its last use, so a page has one in the name of an empty file,
  its mark: ``used.`` and seconds of the epoch. It is rounded down, so that a page which is used
  often is marked once in a while.
- store.O3: After a request that failed, others fail without one for a while: requests of engines go
  on without a store that is gone, and do not wait for it one after another.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import BaseError, GenericError
from obstore.store import ObjectStore, from_url

from kvplan.support import integer, seconds
from kvplan.support import name as checked_text
from kvplan_nixl.serving.store.backends import (
    AHEAD_S,
    FILE_NAME,
    FileBytes,
    FileEntry,
    OpenFile,
    Unfinished,
    check_moment,
    checked_chunks,
    checked_name,
    checked_page,
    checked_uses,
    failed,
    is_pin,
)
from kvplan_nixl.serving.store.parallel import Returned, in_parallel
from kvplan_nixl.serving.store.stalls import PAUSE_S

if TYPE_CHECKING:
    from obstore import GetResult, PutResult

MARK: Final = re.compile(r"used\.(\d{1,12}\.\d{5})")
"""The name of a mark, rule store.O2."""

MARK_STEP_S: Final = 600.0
"""The times of marks are multiples of this, less what rule store.S5 takes off."""

STREAM_BYTES: Final = 1 << 20
"""The bytes of an object that come at once, at least."""

TIMEOUT_S: Final = 5.0
AT_ONCE: Final = 32
MAX_RETRIES: Final = 2

MAX_REASON: Final = 160
"""The characters of a server's answer that an error has."""


class ObjectBackend:
    """Files of a store as objects of obstore's ``ObjectStore``, rules store.O1 to store.O3.

    ``location`` is what errors call it. A request that fails is not tried again for ``pause_s``,
    and up to ``at_once`` requests are under way.

    >>> from obstore.store import MemoryStore
    >>> backend = ObjectBackend(MemoryStore(), "memory")
    >>> backend.files(f"{'0' * 16}/{'0' * 64}")
    ()
    """

    def __init__(
        self, store: ObjectStore, location: str, *, at_once: int = AT_ONCE, pause_s: float = PAUSE_S
    ) -> None:
        self._store = store
        self.location: str = checked_text(location, "location of a store")
        self.at_once: int = integer(at_once, "at_once", low=1)
        self._pause_s = seconds(pause_s, "pause_s")
        self._paused_until_s = 0.0
        self._lock = threading.Lock()
        self._marked: tuple[float, set[str]] = (0.0, set())

    @classmethod
    def of_url(
        cls, url: str, *, timeout_s: float = TIMEOUT_S, pause_s: float = PAUSE_S
    ) -> ObjectBackend:
        """Return the store at ``s3://bucket/prefix``, as AWS's variables of the environment say.

        Raises ``BACKEND`` for a URL that obstore does not read.
        """
        limit = timedelta(seconds=seconds(timeout_s, "timeout_s"))
        try:
            store = from_url(
                url,
                # an endpoint of the environment may have either scheme, as its operator likes
                client_options={"allow_http": True, "timeout": limit, "connect_timeout": limit},
                retry_config={"max_retries": MAX_RETRIES, "retry_timeout": limit},
            )
        except (BaseError, ValueError) as error:
            raise failed("open", url, "the URL of a bucket", _reason(error)) from error
        return cls(store, url, pause_s=pause_s)

    def _ask(self, verb: str, name: str, request: Callable[[], Returned]) -> Returned | None:
        """Return the answer to a request, ``None`` if it is that nothing is there."""
        if time.monotonic() < self._paused_until_s:
            raise failed(verb, name, f"an answer of {self.location}", "none a moment ago")
        try:
            return request()
        except FileNotFoundError:
            return None
        except (BaseError, OSError, ValueError) as error:
            self._paused_until_s = time.monotonic() + self._pause_s
            raise failed(verb, name, f"an answer of {self.location}", _reason(error)) from error

    def put(self, name: str, chunks: Sequence[FileBytes]) -> bool:
        """Put an object in one request, rule store.O1."""
        checked_name(name)
        data = b"".join(checked_chunks(chunks))
        if self._ask("write", name, lambda: self._put(name, data)) is None:
            raise failed("write", name, f"a bucket at {self.location}", "none")
        return True

    def _put(self, name: str, data: bytes) -> PutResult:
        return obstore.put(self._store, name, data, use_multipart=False)

    def get(self, name: str, num_bytes: int | None = None) -> bytes | None:
        checked_name(name)
        stop = None if num_bytes is None else integer(num_bytes, "num_bytes")
        return self._ask("read", name, lambda: self._read(name, stop))

    def _read(self, name: str, stop: int | None) -> bytes:
        if stop is None:
            return obstore.get(self._store, name).bytes().to_bytes()
        try:
            if stop:
                return obstore.get_range(self._store, name, start=0, end=stop).to_bytes()
        except GenericError:
            # a range of an object of no bytes has none, for which stores have an error
            if obstore.head(self._store, name)["size"]:
                raise
        obstore.head(self._store, name)
        return b""

    def open(self, name: str) -> tuple[OpenFile, int] | None:
        """Ask for an object in one request, whose bytes come while they are read."""
        checked_name(name)
        answer = self._ask("read", name, lambda: obstore.get(self._store, name))
        return None if answer is None else (OpenedObject(self, name, answer), answer.meta["size"])

    def delete(self, name: str) -> bool:
        """Delete an object. S3 does not say whether it was there."""
        checked_name(name)
        self._ask("delete", name, lambda: obstore.delete(self._store, name))
        return True

    def files(self, page: str) -> tuple[str, ...]:
        """List the objects of a page in one request."""
        checked_page(page)
        return self._ask("list", page, lambda: tuple(self._names(page))) or ()

    def _names(self, page: str) -> Iterator[str]:
        for objects in obstore.list(self._store, prefix=page):
            for entry in objects:
                yield entry["path"].rpartition("/")[2]

    def touch(self, pages: Sequence[str], used_s: float, first_page: int = 0) -> None:
        """Mark pages that have no mark of that time, rule store.O2. Those that are not there get
        none.
        """
        check_moment(used_s, "used_s")
        marked_s = used_s // MARK_STEP_S * MARK_STEP_S
        uses = checked_uses(pages, marked_s, first_page)
        # what this process has marked with that time needs no further request
        with self._lock:
            if self._marked[0] != marked_s:
                self._marked = (marked_s, set())
            marked = self._marked[1]
        new_uses = [(page, page_used_s) for page, page_used_s in uses if page not in marked]
        in_parallel(self._mark, new_uses, self.at_once)
        marked.update(page for page, _ in new_uses)

    def _mark(self, use: tuple[str, float]) -> None:
        page, used_s = use
        names = self.files(page)
        times = {name: float(mark[1]) for name in names if (mark := MARK.fullmatch(name))}
        new_mark = f"used.{max(used_s, 0.0):.5f}"
        # what was evicted meanwhile, or is marked already, gets no mark
        has_shard = any(name not in times and not is_pin(name) for name in names)
        known = [time_s for time_s in times.values() if time_s < used_s + AHEAD_S]
        if not has_shard or max(known, default=-1.0) >= used_s:
            return
        # the new one first, so that the page never has none
        self.put(f"{page}/{new_mark}", [])
        for old_mark in times:
            self.delete(f"{page}/{old_mark}")

    def entries(self, faults: list[str] | None = None) -> Iterator[FileEntry]:
        """List all objects, in one request for each 1000 of them."""
        # objects of a page follow each other
        for _, files in groupby(self._all(), key=lambda file: file.page):
            yield from _with_marks(list(files))

    def _all(self) -> Iterator[FileEntry]:
        lists = self._ask("list", "all", lambda: iter(obstore.list(self._store)))
        while lists and (objects := self._ask("list", "all", lambda: next(lists, None))):
            for entry in objects:
                if FILE_NAME.fullmatch(entry["path"]):
                    used_s = entry["last_modified"].timestamp()
                    yield FileEntry(entry["path"], entry["size"], used_s)

    def sweep(self, unfinished_s: float = 0.0) -> Unfinished:
        """Delete nothing: no object is ever half put."""
        seconds(unfinished_s, "unfinished_s")
        return Unfinished(0, 0)


class OpenedObject:
    """An object whose bytes come while they are read."""

    def __init__(self, backend: ObjectBackend, name: str, answer: GetResult) -> None:
        self._ask = partial(backend._ask, "read", name)
        self._chunks: Iterator[bytes] = iter(answer.stream(min_chunk_size=STREAM_BYTES))
        self._rest = memoryview(b"")

    def readinto(self, memory: memoryview, /) -> int:
        """Copy bytes that have come, or wait for some."""
        if not self._rest:
            # none if it was deleted meanwhile
            self._rest = memoryview(self._ask(lambda: next(self._chunks, b"")) or b"")
        num_bytes = min(len(memory), len(self._rest))
        memory[:num_bytes] = self._rest[:num_bytes]
        self._rest = self._rest[num_bytes:]
        return num_bytes

    def close(self) -> None:
        """Ask for no further bytes."""
        self._chunks = iter(())


def _with_marks(files: Sequence[FileEntry]) -> Iterable[FileEntry]:
    """Return the files of a page with the time of its mark, if it has one."""
    matches = [MARK.fullmatch(file.name.rpartition("/")[2]) for file in files]
    times = [float(mark[1]) for mark in matches if mark]
    if not times:
        return files
    return [
        # the time of a pin says who came first
        file
        if is_pin(file.name.rpartition("/")[2])
        else FileEntry(file.name, file.num_bytes, max(times))
        for file in files
    ]


def _reason(error: Exception) -> str:
    """Return what a server has said, without the request and the body of its answer."""
    line = f"{error}".partition("\n")[0]
    answer = line.partition(" - ")[2] or line
    return answer.partition(": <")[0][:MAX_REASON]
