"""Backends: where the files of pages are. Each file is written once, under a name, and read whole.

A name is ``space/key/part``: the folder of a model, the key of a page, and one of its files. All
backends follow these rules:

- S1: A file appears whole or not at all, and is never written to. Where several write one name,
  which means the same cache, any of their files stays, and it is read from one of them.
- S2: Deleting what is not there is no error, nor is reading it: it is ``None``. A file that is
  being read stays readable while another process deletes it, or reads as ``None``.
- S3: A backend that fails raises ``BACKEND``, and leaves nothing of what it was writing.
- S4: What was written does not prove what is read. Readers check digests.
- S5: A page of a prefix counts as used before the page in front of it, so prefixes are evicted from
  their ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import attrs

from kvplan._checks import instance, integer, members, name, seconds, wrong_type
from kvplan._text import brief_repr, shown
from kvplan.errors import KVPlanError

FILE_NAME: Final = re.compile(r"[0-9a-f]{16}/[0-9a-f]{64}/[0-9a-z.]{1,64}")

SPACE_DIGITS: Final = 16

TEMPORARY: Final = "tmp"
"""The folder of files that are being written."""

BETWEEN_PAGES_S: Final = 1e-5
"""A page counts as used so long before the page in front of it."""

ATTEMPTS: Final = 5
"""A page's folder may vanish between its making and the renaming, with its last file."""

FileBytes = bytes | memoryview


@attrs.frozen
class FileEntry:
    """A file of a store: its name, its size, and when it was last used, in seconds of the epoch."""

    name: str
    num_bytes: int
    used_s: float

    __repr__ = brief_repr

    @property
    def page(self) -> str:
        """The page that the file belongs to, ``space/key``."""
        return self.name.rpartition("/")[0]


class Backend(Protocol):
    """Holds files by name, rules S1 to S5. Any number of threads and processes use it at once."""

    @property
    def at_once(self) -> int:
        """How many calls a client makes at once, where one does not wait for another."""

    def put(self, name: str, chunks: Sequence[FileBytes]) -> None:
        """Write a file. One that is there may stay."""

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Return the bytes ``[start, stop)`` of a file, ``None`` if there is no such file."""

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""

    def files(self, page: str) -> tuple[str, ...]:
        """Return what the names of the files of ``space/key`` end with, none if it has no files."""

    def touch(self, pages: Sequence[str], used_s: float, first_page: int = 0) -> None:
        """Note when pages of a prefix were used, in seconds of the epoch, rule S5.

        ``first_page`` is the place of the first of them in the prefix.
        """

    def entries(self) -> Iterator[FileEntry]:
        """Yield all files. Ones that come or go meanwhile may be among them."""

    def sweep(self, before_s: float) -> int:
        """Delete what was begun before a time and never finished; return how many."""


def checked_name(name: str) -> str:
    """Return the name of a file. Raises ``NAME`` for one that could leave its folder."""
    if not FILE_NAME.fullmatch(instance(str, name, "name of a file")) or "/." in name:
        expected = "space/key/part, in hexadecimal digits"
        raise KVPlanError("NAME", "name a file of a store", expected=expected, got=shown(name))
    return name


def checked_page(page: str) -> str:
    """Return the name of a page. Raises ``NAME`` for one that could leave its folder."""
    checked_name(f"{instance(str, page, 'name of a page')}/x")
    return page


def checked_uses(
    pages: Sequence[str], used_s: float, first_page: int = 0
) -> list[tuple[str, float]]:
    """Return when each page of a prefix counts as used, rule S5. Raises ``TYPE`` or ``RANGE``."""
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


def checked_span(start: int, stop: int | None) -> tuple[int, int | None]:
    """Return the part of a file that is read. Raises ``TYPE`` or ``RANGE``."""
    first = integer(start, "start in a file")
    return first, None if stop is None else integer(stop, "stop in a file")


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

    def put(self, name: str, chunks: Sequence[FileBytes]) -> None:
        """Keep a copy of the chunks."""
        page, _, part = checked_name(name).rpartition("/")
        data = b"".join(checked_chunks(chunks))
        with self._lock:
            if part in self._files.get(page, {}):
                return
            if self._max_bytes is not None and self._num_bytes + len(data) > self._max_bytes:
                raise failed("write", name, f"memory for {self._max_bytes} bytes", "none left")
            self._num_bytes += len(data)
            self._files.setdefault(page, {})[part] = _MemoryFile(data, time.time())

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Return a part of the bytes."""
        page, _, part = checked_name(name).rpartition("/")
        start, stop = checked_span(start, stop)
        file = self._files.get(page, {}).get(part)
        return None if file is None else file.data[start:stop]

    def delete(self, name: str) -> None:
        """Forget a file."""
        page, _, part = checked_name(name).rpartition("/")
        with self._lock:
            file = self._files.get(page, {}).pop(part, None)
            self._num_bytes -= 0 if file is None else len(file.data)
            if not self._files.get(page, True):
                del self._files[page]

    def files(self, page: str) -> tuple[str, ...]:
        """Return the ends of the names of a page's files."""
        return tuple(self._files.get(checked_page(page), ()))

    def touch(self, pages: Sequence[str], used_s: float, first_page: int = 0) -> None:
        """Set the times of files."""
        with self._lock:
            for page, page_used_s in checked_uses(pages, used_s, first_page):
                for file in self._files.get(page, {}).values():
                    file.used_s = page_used_s

    def entries(self) -> Iterator[FileEntry]:
        """Yield the files of one moment."""
        with self._lock:
            kept = {page: dict(files) for page, files in self._files.items()}
        for page, files in kept.items():
            for part, file in files.items():
                yield FileEntry(f"{page}/{part}", len(file.data), file.used_s)

    def sweep(self, before_s: float) -> int:
        """Return 0: nothing is ever half written."""
        check_moment(before_s, "before_s")
        return 0


class FileBackend:
    """Files of a folder, which any number of processes share, of one host or of several.

    A file is written under another name, synchronized, and renamed. ``synchronize=False`` leaves it
    to the system when bytes reach the disk: after a loss of power a file may lack some, which its
    digests tell.
    """

    at_once: int = 1

    def __init__(self, folder: Path | str, *, synchronize: bool = True) -> None:
        path = folder if isinstance(folder, Path) else name(folder, "folder of a store")
        self.folder: Path = Path(path)
        self._synchronize = instance(bool, synchronize, "synchronize")
        # from here on, a folder that is not there is a disk that is gone
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failed("open", str(folder), "a folder", _reason(error)) from error

    def path_of(self, name: str) -> Path:
        """Return where a file is: pages are spread over 4096 folders of a space."""
        page, _, part = checked_name(name).rpartition("/")
        return self._page_folder(page) / part

    def _page_folder(self, page: str) -> Path:
        space, key = checked_page(page).split("/")
        return self.folder / space / key[:3] / key

    def put(self, name: str, chunks: Sequence[FileBytes]) -> None:
        """Write a file under another name, then rename it."""
        path = self.path_of(name)
        chunks = checked_chunks(chunks)
        temporary = self.folder / TEMPORARY / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            if path.exists():
                return
            # a name of its own: another process may be writing the same page
            temporary.parent.mkdir(parents=True, exist_ok=True)
            self._write(temporary, chunks)
            self._publish(temporary, path)
        except OSError as error:
            raise failed("write", name, f"a file in {self.folder}", _reason(error)) from error
        finally:
            # a file that has its name is not there any more
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _write(self, path: Path, chunks: Sequence[FileBytes]) -> None:
        with open(path, "xb", buffering=0) as file:
            for chunk in chunks:
                rest = memoryview(chunk)
                # a write may take less than it is given, as one that fills a disk does
                while rest:
                    rest = rest[file.write(rest) :]
            if self._synchronize:
                os.fsync(file.fileno())

    def _publish(self, temporary: Path, path: Path) -> None:
        """Give a file its name."""
        for attempt in range(ATTEMPTS):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.rename(path)
                return
            except (FileNotFoundError, FileExistsError):
                # An evictor has removed the folder, which was empty: after it was made, or while
                # mkdir looked what there was in its place.
                if attempt + 1 == ATTEMPTS:
                    raise

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Read a part of a file."""
        start, stop = checked_span(start, stop)
        try:
            with open(self.path_of(name), "rb") as file:
                # no more memory than the file has bytes, whatever a caller asks for
                num_bytes = os.fstat(file.fileno()).st_size
                end = num_bytes if stop is None else min(stop, num_bytes)
                file.seek(start)
                return file.read(max(0, end - start))
        except FileNotFoundError:
            self._check_folder("read", name)
            return None
        except OSError as error:
            raise failed("read", name, "a file that can be read", _reason(error)) from error

    def _check_folder(self, verb: str, name: str) -> None:
        """Raise ``BACKEND`` if the whole folder is gone, as with a disk that is not mounted."""
        if not self.folder.is_dir():
            raise failed(verb, name, f"a folder {self.folder}", "none")

    def delete(self, name: str) -> None:
        """Delete a file, and the folder of its page if that is empty now."""
        path = self.path_of(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise failed("delete", name, "a file that can be deleted", _reason(error)) from error
        # a folder with other parts, or with a pin, is not empty and stays
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    def files(self, page: str) -> tuple[str, ...]:
        """List the folder of a page."""
        try:
            return tuple(sorted(os.listdir(self._page_folder(page))))
        except FileNotFoundError:
            self._check_folder("list", page)
            return ()
        except OSError as error:
            raise failed("list", page, "a folder that can be read", _reason(error)) from error

    def touch(self, pages: Sequence[str], used_s: float, first_page: int = 0) -> None:
        """Set the times of the last changes of files, which are those of their last use."""
        for page, page_used_s in checked_uses(pages, used_s, first_page):
            for part in self.files(page):
                with contextlib.suppress(OSError):
                    os.utime(self._page_folder(page) / part, (page_used_s, page_used_s))

    def entries(self) -> Iterator[FileEntry]:
        """Walk through all folders."""
        try:
            self._check_folder("list", "all")
            for space in _listed(self.folder):
                # the pages of a space are spread over folders
                for folder in _listed(space) if len(space.name) == SPACE_DIGITS else ():
                    for page in _listed(folder):
                        yield from _files_of(f"{space.name}/{page.name}", page)
        except OSError as error:
            raise failed("list", "all", "folders that can be read", _reason(error)) from error

    def sweep(self, before_s: float) -> int:
        """Delete what processes that were killed have left."""
        check_moment(before_s, "before_s")
        num_deleted = 0
        for path in (self.folder / TEMPORARY).glob("*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before_s:
                    path.unlink()
                    num_deleted += 1
        return num_deleted


def _listed(folder: os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Return what is in a folder: nothing if it is gone, since another evictor may be faster."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _files_of(page: str, folder: os.DirEntry[str]) -> Iterator[FileEntry]:
    """Yield the files in the folder of a page."""
    for file in _listed(folder):
        name = f"{page}/{file.name}"
        # a file may go too
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            if FILE_NAME.fullmatch(name):
                yield FileEntry(name, status.st_size, status.st_mtime)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def failed(verb: str, name: str, expected: str, got: str) -> KVPlanError:
    """Return the error of a backend that fails, rule S3."""
    return KVPlanError("BACKEND", f"{verb} {name} of a store", expected=expected, got=got)
