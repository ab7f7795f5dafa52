"""Where an engine finds its key: in a file that an operator names, or in that of its host.

Engines of several hosts are given a key. Those of one host that are given none share one all the
same: the first to start makes it in ``~/.cache/kvplan/key``, which only its user can read. So every
message between engines is signed, and there is no mode without a key.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

from kvplan import KVPlanError
from kvplan.protocol import SharedKey
from kvplan.protocol.keys import HINT
from kvplan.support import instance

MAX_FILE_BYTES: Final = 1 << 12

MADE_BYTES: Final = 32
"""The random bytes of a key that an engine makes."""

OTHERS: Final = stat.S_IROTH | stat.S_IWOTH | stat.S_IXOTH


AnyKey = SharedKey | bytes | None
"""A key, or the bytes of one. None is the key of this host's engines."""


def key_of(key: AnyKey) -> SharedKey:
    """Return a key; of None, that of this host's engines."""
    return host_key() if key is None else SharedKey.of(key)


def key_in_file(path: Path) -> SharedKey:
    """Return the key in a file that an operator names. Raises ``SETTING`` and ``RANGE``.

    The file belongs to this user or to root, and others can neither read nor write it.
    """
    action = f"read key_file {instance(Path, path, 'key_file')}"
    try:
        # not waiting for the writer of a FIFO
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return SharedKey.of(_read_private(file, action, OTHERS, {os.geteuid(), 0}))
        finally:
            os.close(file)
    except OSError as error:
        raise KVPlanError("SETTING", action, expected="a file", got=f"{error}") from None


def host_key() -> SharedKey:
    """Return the key of the engines of this host and user, which the first of them makes.

    Raises ``SETTING`` where it cannot be made, or where others could have read or replaced it.
    """
    cache_folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache_folder) / "kvplan"
    action = f"use the key of this host in {folder}"
    if not folder.is_absolute():
        expected = "a path from the root"
        raise KVPlanError("SETTING", action, expected=expected, got=cache_folder, hint=HINT)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check_private(os.fstat(directory), action, stat.S_IWGRP | stat.S_IWOTH, {os.geteuid()})
            # An engine that starts at the same time may make it first.
            if "key" not in os.listdir(directory):
                _make_key(directory)
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            file = os.open("key", flags, dir_fd=directory)
            try:
                secret = _read_private(file, action, stat.S_IRWXG | stat.S_IRWXO, {os.geteuid()})
            finally:
                os.close(file)
        finally:
            os.close(directory)
    except OSError as error:
        expected = "a folder of this user's"
        got = f"{error}"
        raise KVPlanError("SETTING", action, expected=expected, got=got, hint=HINT) from None
    return SharedKey((secret.strip(),), is_of_host=True)


def _make_key(directory: int) -> None:
    """Make the file ``key`` in a directory, whole or not at all, unless it has been made."""
    draft = f"key.{token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    file = os.open(draft, flags, 0o600, dir_fd=directory)
    try:
        os.write(file, token_hex(MADE_BYTES).encode())
        os.fsync(file)
        with suppress(FileExistsError):
            os.link(draft, "key", src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.close(file)
        os.unlink(draft, dir_fd=directory)


def _read_private(file: int, action: str, forbidden: int, owners: set[int]) -> bytes:
    """Return what a small, regular, private file has. Raises ``SETTING``."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
        expected = f"a regular file of at most {MAX_FILE_BYTES} bytes"
        raise KVPlanError("SETTING", action, expected=expected, got="another one", hint=HINT)
    _check_private(status, action, forbidden, owners)
    return os.read(file, MAX_FILE_BYTES)


def _check_private(status: os.stat_result, action: str, forbidden: int, owners: set[int]) -> None:
    """Refuse a file or a folder of another owner, or with permissions for others."""
    mode = stat.S_IMODE(status.st_mode)
    if mode & forbidden or status.st_uid not in owners:
        expected = f"user {os.geteuid()} as its owner, and none of the permissions {forbidden:03o}"
        got = f"user {status.st_uid} and mode {mode:03o}"
        raise KVPlanError("SETTING", action, expected=expected, got=got, hint=HINT)
