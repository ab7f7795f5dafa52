"""Fingerprints of a model's weights, for engines that name it by a folder or a hub's repository."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final

from kvplan import KVPlanError
from kvplan_nixl.serving import fingerprint

MAX_ADAPTERS: Final = 1024
"""Adapters whose fingerprints are kept."""


def weights_of(model: str, revision: str | None = None) -> str:
    """Return a fingerprint of a model's files, in a folder or in the hub's local cache.

    Where there are none, return the revision, or ``unknown``.
    """
    return fingerprint(folder_of(model, revision) or model) or revision or "unknown"


def folder_of(model: str, revision: str | None = None, file: str = "config.json") -> Path | None:
    """Return a model's folder, or that of its snapshot in the hub's local cache; None without.

    A snapshot has the ``file``.
    """
    folder = Path(model)
    return folder if folder.is_dir() else _snapshot(model, revision, file)


def _snapshot(repository: str, revision: str | None, file: str) -> Path | None:
    """Return the folder of a repository in the hub's local cache, None where it is not there."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(repository, file, revision=revision)
    except HFValidationError:  # it is no name of a repository
        return None
    return Path(found).parent if isinstance(found, str) else None


def adapter_of(path: str) -> str:
    """Return a fingerprint of an adapter's files, or its path if it has none that can be read.

    A folder is read once, and again when one of its files has changed. The time of a file's last
    change is the system's own: a tool that replaces a file may set its other times.
    """
    try:
        states = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    except OSError:  # it is in a hub
        return path
    files = [(name, state.st_ino, state.st_size, state.st_ctime_ns) for name, state in states]
    return _adapter(path, tuple(sorted(files)))


@functools.lru_cache(maxsize=MAX_ADAPTERS)
def _adapter(path: str, files: tuple[tuple[str, int, int, int], ...]) -> str:
    """Return what :func:`adapter_of` does, for files by name, number, size and last change."""
    try:
        return fingerprint(path) or path
    except KVPlanError:  # of broken files
        return path
