"""Eviction: which pages leave a store, so that it stays within its limits.

- V1: Pages leave whole, those that were used longest ago first. A prefix is used from its end to
  its beginning, so its last pages leave before its first ones.
- V2: A pinned page stays, whatever the limits are.
- V3: A page that is read while it leaves is read whole, or is a miss. Several evictors do no harm:
  each deletes what it has seen, and the same pages first.
- V4: In the background a tenth of the bytes is kept free, for what engines write between two looks.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Final

import attrs

from kvplan._checks import having, instance, seconds
from kvplan._text import brief_repr
from kvplan.errors import KVPlanError
from kvplan.store.backends import Backend, FileEntry
from kvplan.store.parallel import in_parallel
from kvplan.store.readers import PIN

UNFINISHED_S: Final = 3600.0
"""A file that was begun so long ago is of a process that ended."""

LOOK_S: Final = 30.0
KEPT_SHARE: Final = 0.9
"""The share of the bytes of a limit that is used, rule V4."""

MAX_LOOKING_SHARE: Final = 0.05
"""The share of the time that looking at all files of a store may take."""


@attrs.frozen
class Limits:
    """What a store may hold: bytes in all, bytes of each model, and for how long it is not used."""

    max_bytes: int | None = None
    max_model_bytes: int | None = None
    max_age_s: float | None = None

    __repr__ = brief_repr

    @property
    def are_none(self) -> bool:
        """Whether there is no limit at all."""
        return self == Limits()


@attrs.frozen
class Evicted:
    """What an eviction has deleted, and what is left."""

    num_pages: int
    num_bytes: int
    num_unfinished: int
    left_bytes: int

    __repr__ = brief_repr


@attrs.define
class _PageFiles:
    files: list[FileEntry] = attrs.field(factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def used_s(self) -> float:
        return max(file.used_s for file in self.files)

    @property
    def is_pinned(self) -> bool:
        return any(file.name.endswith(f"/{PIN}") for file in self.files)


def evict(backend: Backend, limits: Limits, now_s: float) -> Evicted:
    """Delete the pages that exceed the limits at a time. Raises ``BACKEND``."""
    having("entries", backend, "backend of a store", "a Backend")
    instance(Limits, limits, "limits of a store")
    pages: defaultdict[str, _PageFiles] = defaultdict(_PageFiles)
    for entry in backend.entries():
        pages[entry.page].files.append(entry)
    # the bytes that are left of each model, while pages go
    of_model = Counter[str]()
    for name, page in pages.items():
        of_model[name.partition("/")[0]] += page.num_bytes
    names: list[str] = []
    num_pages = 0
    num_bytes = 0
    for name, page in _oldest_first(pages):
        space = name.partition("/")[0]
        is_old = limits.max_age_s is not None and now_s - page.used_s > limits.max_age_s
        if not (
            is_old
            or _exceeds(of_model[space], limits.max_model_bytes)
            or _exceeds(of_model.total(), limits.max_bytes)
        ):
            continue
        names.extend(file.name for file in page.files)
        of_model[space] -= page.num_bytes
        num_pages += 1
        num_bytes += page.num_bytes
    # files that came since the list was made stay
    in_parallel(backend.delete, names, backend.at_once)
    num_unfinished = backend.sweep(now_s - UNFINISHED_S)
    return Evicted(num_pages, num_bytes, num_unfinished, of_model.total())


EvictionReport = Callable[[Evicted | KVPlanError], None]
"""Takes what was evicted, or the error of a backend that has failed."""


class BackgroundEviction:
    """Keeps a store within limits from a thread of its own, rule V4, until it is closed.

    It looks at all files about every ``look_s``, less often if a look takes long. Any number of
    engines may do so for one store.

    >>> from kvplan.store import MemoryBackend
    >>> eviction = BackgroundEviction(MemoryBackend(), Limits(max_bytes=1 << 40), print)
    >>> eviction.close()
    """

    def __init__(
        self, backend: Backend, limits: Limits, report: EvictionReport, *, look_s: float = LOOK_S
    ) -> None:
        self._backend = having("entries", backend, "backend of a store", "a Backend")
        self._limits = _reduced(instance(Limits, limits, "limits of a store"))
        self._report = having("__call__", report, "report of an eviction", "a function")
        self._look_s = seconds(look_s, "look_s")
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvplan eviction", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause_s = self._look_s
        # engines that have started together do not look together
        while not self._is_closed.wait(pause_s * random.uniform(0.5, 1.0)):
            began_s = time.monotonic()
            try:
                self._report(evict(self._backend, self._limits, time.time()))
            except KVPlanError as error:
                self._report(error)
            lasted_s = time.monotonic() - began_s
            pause_s = max(self._look_s, lasted_s / MAX_LOOKING_SHARE)

    def close(self) -> None:
        """Look no further. A look under way ends by itself."""
        self._is_closed.set()


def _reduced(limits: Limits) -> Limits:
    """Return limits of the share of bytes that is used, rule V4.

    >>> _reduced(Limits(max_bytes=1000, max_age_s=60.0))
    Limits(max_bytes=900, max_model_bytes=None, max_age_s=60.0)
    """
    max_bytes = None if limits.max_bytes is None else int(limits.max_bytes * KEPT_SHARE)
    max_model_bytes = limits.max_model_bytes
    if max_model_bytes is not None:
        max_model_bytes = int(max_model_bytes * KEPT_SHARE)
    return Limits(max_bytes, max_model_bytes, limits.max_age_s)


def _oldest_first(pages: dict[str, _PageFiles]) -> Iterator[tuple[str, _PageFiles]]:
    """Yield the pages that are not pinned, by their last use."""
    order = sorted(pages, key=lambda name: pages[name].used_s)
    return ((name, pages[name]) for name in order if not pages[name].is_pinned)


def _exceeds(number: int, limit: int | None) -> bool:
    return limit is not None and number > limit
