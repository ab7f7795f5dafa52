"""A backend of pages in a folder of a file system, which engines of several hosts may share.

A file is written in the folder ``tmp`` and renamed when it is whole. The rest of this module is
about what else may be in a store's folder, since anybody with write access can put it there, and
NFS and killed writers do:

- store.F1: Each folder below the store's own is opened relative to the one that holds it, without
  following links, and files are opened, renamed, dated and deleted relative to their folder. So no
  link leads out of the store. The store's own folder may be a link.
- store.F2: Only regular files with a shard's name are files of a store. What has another kind or
  another name is neither read nor deleted; if it is where a file has to be, it is renamed.
- store.F3: Files belong to the user of this process, to the owner of the store's folder, or to the
  user as whom a file system has noted this process. Files of others are not read, listed or
  deleted. If the store's folder can be written by its group, and not by everybody, files of all
  owners count, and new ones can be written by the group.
- store.F4: A writer holds a lock on its unfinished file, which ends with its process. So a second
  writer of the same file can leave it to the first one, and an unfinished file without a lock has
  no writer. Where locks are not shared by hosts, its age says so too, by the file system's clock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvplan import KVPlanError
from kvplan.support import instance, integer, name, seconds
from kvplan_nixl.serving.store.backends import (
    FILE_NAME,
    FileBytes,
    FileEntry,
    OpenFile,
    Unfinished,
    checked_chunks,
    checked_name,
    checked_page,
    checked_uses,
    failed,
    is_pin,
    note,
    read_fully,
    reason,
)

TEMPORARY: Final = "tmp"
"""The folder of files that are being written."""

FANOUT_DIGITS: Final = 3
"""Pages of a space are spread over 4096 folders, by the first digits of their keys."""

ATTEMPTS: Final = 5
"""A page's folder may vanish between its making and the renaming, with its last file."""

UNFINISHED_S: Final = 60.0
"""A file without a lock that has not grown for so long is of a process that ended."""

UNLOCKED_S: Final = 3600.0
"""The same, on a file system without locks."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# a named pipe opens at once, and is told by its status
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_NONE: Final = (
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR),
    errno.ESTALE,  # another host has deleted it, as NFS says
)
"""Errors of opening what is not there, or is a link, a socket, or in what is no folder."""

_SPACE: Final = re.compile(r"[0-9a-f]{16}")
_OUTER: Final = re.compile(r"[0-9a-f]{3}")
_KEY: Final = re.compile(r"[0-9a-f]{64}")


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
        self._users = {os.geteuid()}
        # from here on, a folder that is not there is a disk that is gone
        with _failing("open", str(folder), "a folder"):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)

    def path_of(self, name: str) -> Path:
        """Return where a file is: pages are spread over 4096 folders of a space."""
        page, _, shard = checked_name(name).rpartition("/")
        return self.folder.joinpath(*_folders(page), shard)

    def put(self, name: str, chunks: Sequence[FileBytes]) -> bool:
        page, _, shard = checked_name(name).rpartition("/")
        chunks = checked_chunks(chunks)
        with _failing("write", name, f"a file in {self.folder}"), self._root() as root:
            if root.has(page, shard):
                return False
            with root.folder(TEMPORARY, make=True) as temporary:
                return self._write(root, temporary, page, shard, chunks)

    def _write(
        self, root: _Root, temporary: int, page: str, shard: str, chunks: Sequence[FileBytes]
    ) -> bool:
        """Write a file unless another writer is at it."""
        label = f"{page.replace('/', '-')}-{shard}"
        claimed = root.claim(temporary, label)
        if claimed is None:
            return False
        label, descriptor = claimed
        try:
            # files of this process may have another owner, such as on a server that maps root
            self._users.add(os.fstat(descriptor).st_uid)
            for chunk in chunks:
                rest = memoryview(chunk)
                # a write may take less than it is given, as one that fills a disk does
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            if self._synchronize:
                os.fsync(descriptor)
            # one that was idle for so long that it was swept has no file to rename
            if not _is_same(descriptor, temporary, label):
                raise FileNotFoundError(errno.ENOENT, "the unfinished file was deleted")
            root.publish(temporary, label, page, shard)
        finally:
            # a file that has its name is not there any more
            with contextlib.suppress(OSError):
                if _is_same(descriptor, temporary, label):
                    os.unlink(label, dir_fd=temporary)
            os.close(descriptor)
        return True

    def get(self, name: str, num_bytes: int | None = None) -> bytes | None:
        most = None if num_bytes is None else integer(num_bytes, "num_bytes")
        opened = self.open(name)
        if opened is None:
            return None
        file, size = opened
        with contextlib.closing(file):
            # no more memory than the file has bytes, whatever a caller asks for
            data = memoryview(bytearray(size if most is None else min(most, size)))
            return bytes(data[: read_fully(name, file, data)])

    def open(self, name: str) -> tuple[OpenFile, int] | None:
        """Open a file, rules store.F1 to store.F3."""
        page, _, shard = checked_name(name).rpartition("/")
        with _failing("read", name, "a file that can be read", or_none=True):
            with self._root() as root, root.folder(*_folders(page)) as folder:
                descriptor = os.open(shard, os.O_RDONLY | _FILE, dir_fd=folder)
            status = os.fstat(descriptor)
            if root.is_file(status):
                return os.fdopen(descriptor, "rb", buffering=0), status.st_size
            os.close(descriptor)
        return None

    def delete(self, name: str) -> bool:
        """Delete a file, and the folder of its page if that is empty now."""
        page, _, shard = checked_name(name).rpartition("/")
        *outer_folders, key = _folders(page)
        is_there = False
        with (
            _failing("delete", name, "a file that can be deleted", or_none=True),
            self._root() as root,
            root.folder(*outer_folders) as outer,
        ):
            with root.folder(key, within=outer) as folder:
                is_there = root.is_file(_status(folder, shard))
                if is_there:
                    os.unlink(shard, dir_fd=folder)
            # a folder with other shards, or with a pin, is not empty and stays
            with contextlib.suppress(OSError):
                os.rmdir(key, dir_fd=outer)
        return is_there

    def files(self, page: str) -> tuple[str, ...]:
        checked_page(page)
        names: list[str] = []
        with (
            _failing("list", page, "a folder that can be read", or_none=True),
            self._root() as root,
            root.folder(*_folders(page)) as folder,
        ):
            names += sorted(shard for shard, _ in root.files_in(folder, page))
        return tuple(names)

    def touch(self, pages: Sequence[str], used_s: float, first_page: int = 0) -> None:
        """Set the times of the last changes of files, which are those of their last use."""
        fault: KVPlanError | None = None
        uses = checked_uses(pages, used_s, first_page)
        with self._root() as root:
            for page, page_used_s in uses:
                try:
                    with (
                        _failing("use", "pages", "files whose times can be set", or_none=True),
                        root.folder(*_folders(page)) as folder,
                    ):
                        for shard, _ in root.files_in(folder, page):
                            # the time of a pin says who came first
                            if not is_pin(shard):
                                times = (page_used_s, page_used_s)
                                os.utime(shard, times, dir_fd=folder, follow_symlinks=False)
                except KVPlanError as error:
                    fault = error
        if fault is not None:
            raise fault

    def entries(self, faults: list[str] | None = None) -> Iterator[FileEntry]:
        """Walk through all folders. What cannot be listed is noted in ``faults``."""
        with self._root() as root:
            for space in root.names((), _SPACE, faults):
                for outer in root.names((space,), _OUTER, faults):
                    for key in root.names((space, outer), _KEY, faults):
                        yield from root.entries_of(space, outer, key, faults)

    def sweep(self, unfinished_s: float = UNFINISHED_S) -> Unfinished:
        """Delete what processes that were killed have left, rule store.F4."""
        seconds(unfinished_s, "unfinished_s")
        num_deleted = left_bytes = 0
        with (
            _failing("sweep", "all", f"a folder {TEMPORARY} that can be listed", or_none=True),
            self._root() as root,
            root.folder(TEMPORARY) as temporary,
        ):
            now_s = _file_system_s(temporary)
            for label in os.listdir(temporary):
                with contextlib.suppress(OSError):
                    num_bytes = root.swept(temporary, label, now_s, unfinished_s)
                    num_deleted += num_bytes is None
                    left_bytes += num_bytes or 0
        return Unfinished(num_deleted, left_bytes)

    @contextlib.contextmanager
    def _root(self) -> Iterator[_Root]:
        """Open the folder of the store. Raises ``BACKEND`` if it is not there."""
        with _failing("open", "the folder", f"a folder {self.folder}"):
            # this folder alone may be a link, which an operator has made
            descriptor = os.open(self.folder, _FOLDER & ~os.O_NOFOLLOW)
        try:
            yield _Root(descriptor, os.fstat(descriptor), self._users)
        finally:
            os.close(descriptor)


class _Root:
    """The folder of a store while one call uses it, with the owners of its files, rule store.F3."""

    def __init__(self, descriptor: int, status: os.stat_result, users: set[int]) -> None:
        self.descriptor = descriptor
        self._owners = {*users, status.st_uid}
        # who may write to all folders of a group may write its files
        self._is_of_group = (
            bool(status.st_mode & stat.S_IWGRP) and not status.st_mode & stat.S_IWOTH
        )

    def is_own(self, status: os.stat_result) -> bool:
        """Return whether a file or a folder belongs to a user of the store."""
        return self._is_of_group or status.st_uid in self._owners

    def is_file(self, status: os.stat_result) -> bool:
        """Return whether something is a file of the store, rules store.F2 and store.F3."""
        return stat.S_ISREG(status.st_mode) and self.is_own(status)

    @contextlib.contextmanager
    def folder(self, *labels: str, within: int | None = None, make: bool = False) -> Iterator[int]:
        """Open a folder below the store's, or below another one. Raises OSError."""
        descriptor = os.dup(self.descriptor if within is None else within)
        try:
            for label in labels:
                inner = self._opened(descriptor, label, make)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def _opened(self, outer: int, label: str, make: bool) -> int:
        try:
            descriptor = os.open(label, _FOLDER, dir_fd=outer)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(label, 0o700, dir_fd=outer)
            descriptor = os.open(label, _FOLDER, dir_fd=outer)
            if self._is_of_group:
                with contextlib.suppress(OSError):
                    os.fchmod(descriptor, 0o2770)
        if self.is_own(os.fstat(descriptor)):
            return descriptor
        os.close(descriptor)
        raise NotADirectoryError(errno.ENOTDIR, f"folder {label} belongs to another user")

    def has(self, page: str, shard: str) -> bool:
        try:
            with self.folder(*_folders(page)) as folder:
                return self.is_file(_status(folder, shard))
        except OSError as error:
            if error.errno in _NONE:
                return False
            raise

    def files_in(self, folder: int, page: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files of a page, with their status."""
        for shard in os.listdir(folder):
            if FILE_NAME.fullmatch(f"{page}/{shard}"):
                # a file may go meanwhile, and one that has no status is none
                with contextlib.suppress(OSError):
                    status = _status(folder, shard)
                    if self.is_file(status):
                        yield shard, status

    def names(
        self, labels: Sequence[str], pattern: re.Pattern[str], faults: list[str] | None
    ) -> list[str]:
        """Return the names in a folder that folders of a store may have."""
        names: list[str] = []
        with _noting(faults, "/".join(labels) or "the store"), self.folder(*labels) as folder:
            names += [label for label in os.listdir(folder) if pattern.fullmatch(label)]
        return names

    def entries_of(
        self, space: str, outer: str, key: str, faults: list[str] | None
    ) -> list[FileEntry]:
        page = f"{space}/{key}"
        entries: list[FileEntry] = []
        with _noting(faults, page), self.folder(space, outer, key) as folder:
            for shard, status in self.files_in(folder, page):
                entry = FileEntry(f"{page}/{shard}", _disk_bytes(status), status.st_mtime)
                entries.append(entry)
        return entries

    def claim(self, temporary: int, label: str) -> tuple[str, int] | None:
        """Create and lock a file to write. Return ``None`` if another writer is at it, rule
        store.F4.
        """
        while True:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
                descriptor = os.open(label, flags, 0o600, dir_fd=temporary)
            except FileExistsError:
                if _lock_of(temporary, label) is True:
                    return None
                # its writer was killed, or has no lock: another name does no harm
                label = f"{label}-{uuid.uuid4().hex}"
                continue
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_of_group:
                os.fchmod(descriptor, 0o660)
            return label, descriptor

    def publish(self, temporary: int, label: str, page: str, shard: str) -> None:
        """Give a file its name."""
        *outer_folders, key = _folders(page)
        with self.folder(*outer_folders, make=True) as outer:
            for attempt in range(ATTEMPTS):
                try:
                    with self.folder(key, within=outer, make=True) as folder:
                        _set_aside(folder, shard, is_folder=True)
                        os.rename(label, shard, src_dir_fd=temporary, dst_dir_fd=folder)
                    return
                except (FileNotFoundError, NotADirectoryError):
                    # An evictor has removed the folder, which was empty, or there is no folder.
                    if attempt + 1 == ATTEMPTS:
                        raise
                    _set_aside(outer, key, is_folder=False)

    def swept(self, temporary: int, label: str, now_s: float, unfinished_s: float) -> int | None:
        """Delete a file that has no writer. Return its bytes if it stays, ``None`` otherwise."""
        status = _status(temporary, label)
        if not self.is_file(status):
            return 0
        is_locked = _lock_of(temporary, label)
        # the clock may have been set back since
        age_s = abs(now_s - status.st_mtime)
        if is_locked or age_s < (unfinished_s if is_locked is False else UNLOCKED_S):
            return _disk_bytes(status)
        os.unlink(label, dir_fd=temporary)
        return None


def _folders(page: str) -> tuple[str, str, str]:
    """Return the folders of a page below the store's, from the outermost to its own."""
    space, key = checked_page(page).split("/")
    return space, key[:FANOUT_DIGITS], key


def _status(folder: int, label: str) -> os.stat_result:
    return os.stat(label, dir_fd=folder, follow_symlinks=False)


def _is_same(descriptor: int, folder: int, label: str) -> bool:
    """Return whether an open file has a name in a folder."""
    try:
        return os.path.samestat(os.fstat(descriptor), _status(folder, label))
    except FileNotFoundError:
        return False


def _disk_bytes(status: os.stat_result) -> int:
    """Return the bytes that a file takes: one with holes takes fewer than it has."""
    return min(status.st_size, 512 * status.st_blocks)


def _set_aside(folder: int, label: str, *, is_folder: bool) -> None:
    """Rename what is not of the store but has the name of something of it, rule store.F2.

    That is a folder in place of a file, or anything else in place of a folder. A rename replaces
    nothing of the other kind, so it does not take what another writer has put there meanwhile.
    """
    other = f"{label}-{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(_status(folder, label).st_mode) is not is_folder:
            return
        if is_folder:
            os.mkdir(other, 0o700, dir_fd=folder)
        else:
            os.close(os.open(other, os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder))
        try:
            os.rename(label, other, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                (os.rmdir if is_folder else os.unlink)(other, dir_fd=folder)


def _lock_of(temporary: int, label: str) -> bool | None:
    """Return whether a writer has locked a file, ``None`` if that cannot be told."""
    try:
        descriptor = os.open(label, os.O_RDWR | _FILE, dir_fd=temporary)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _file_system_s(folder: int) -> float:
    """Return the time of the clock that dates files, this host's if none can be made."""
    label = f"clock-{uuid.uuid4().hex}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        os.close(os.open(label, flags, 0o600, dir_fd=folder))
        return _status(folder, label).st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(label, dir_fd=folder)


@contextlib.contextmanager
def _failing(verb: str, name: str, expected: str, *, or_none: bool = False) -> Iterator[None]:
    """Turn errors of the system into ``BACKEND``, except, if asked, that nothing is there."""
    try:
        yield
    except OSError as error:
        if not (or_none and error.errno in _NONE):
            raise failed(verb, name, expected, reason(error)) from error


@contextlib.contextmanager
def _noting(faults: list[str] | None, what: str) -> Iterator[None]:
    """Note what cannot be listed, unless it is gone: another evictor may be faster."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            note(faults, f"cannot list {what}: {reason(error)}")
