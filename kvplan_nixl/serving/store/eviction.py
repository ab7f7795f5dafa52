"""Eviction: which pages leave a store, so that it stays within its limits.

- store.V1: Pages leave whole, those that were used longest ago first. A prefix is used from its end
  to its beginning, so its last pages leave before its first ones.
- store.V2: A pinned page stays, whatever the other limits are, as long as the pinned pages are
  within ``max_pinned_bytes``. Those that were pinned first are: a later pin takes nothing from an
  earlier one, and a page whose pin is beyond the limit leaves as if it had none.
- store.V3: A page that is read while it leaves is read whole, or is a miss. Several evictors do no
  harm: each deletes what it has seen, and the same pages first.
- store.V4: In the background a tenth of the bytes is kept free, for what engines write between two
  looks.
- store.V5: A file that cannot be deleted, or a folder that cannot be listed, is noted, and all
  others are dealt with.
- store.V6: A page whose last use is in the future was noted by a wrong clock. It counts as used
  now.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from logging import Logger
from typing import Final

import attrs

from kvplan import KVPlanError
from kvplan._checks import having, instance, seconds
from kvplan._text import brief_repr
from kvplan_nixl.serving.store.backends import Backend, FileEntry, is_pin, note
from kvplan_nixl.serving.store.files import UNFINISHED_S
from kvplan_nixl.serving.store.parallel import in_parallel

AHEAD_S: Final = 3600.0
"""Clocks of hosts may differ by so much, rule store.V6."""

LOOK_S: Final = 30.0
KEPT_SHARE: Final = 0.9
"""The share of the bytes of a limit that is used, rule store.V4."""

MAX_LOOKING_SHARE: Final = 0.05
"""The share of the time that looking at all files of a store may take."""


@attrs.frozen
class Limits:
    """What a store may hold: bytes in all, bytes of each model, and for how long it is not used.

    ``max_pinned_bytes`` are those of pages that stay because they are pinned.
    """

    max_bytes: int | None = None
    max_model_bytes: int | None = None
    max_age_s: float | None = None
    max_pinned_bytes: int | None = None

    __repr__ = brief_repr

    @property
    def are_none(self) -> bool:
        """Whether there is no limit at all."""
        return self == Limits()


@attrs.frozen
class Evicted:
    """What an eviction has deleted, what is left, and what could not be listed or deleted.

    ``left_bytes`` are those of pages, and ``unfinished_bytes`` of files that have no name yet.
    """

    num_pages: int
    num_bytes: int
    num_unfinished: int
    left_bytes: int
    unfinished_bytes: int = 0
    faults: tuple[str, ...] = ()

    __repr__ = brief_repr


@attrs.define
class _PageFiles:
    name: str
    files: list[FileEntry] = attrs.field(factory=list)

    @property
    def space(self) -> str:
        return self.name.partition("/")[0]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def used_s(self) -> float:
        return max(file.used_s for file in self.files)

    @property
    def pinned_s(self) -> float | None:
        """When the page was pinned first, ``None`` if it is not."""
        times = [file.used_s for file in self.files if is_pin(file.name.rpartition("/")[2])]
        return min(times, default=None)


def evict(
    backend: Backend, limits: Limits, now_s: float, *, unfinished_s: float = UNFINISHED_S
) -> Evicted:
    """Delete the pages that exceed the limits at a time, and what writers have left unfinished.

    An unfinished file has no writer, and was not written to for ``unfinished_s``. Raises
    ``BACKEND`` if the store cannot be listed at all.
    """
    having("entries", backend, "backend of a store", "a Backend")
    instance(Limits, limits, "limits of a store")
    faults: list[str] = []
    unfinished = backend.sweep(unfinished_s)
    pages: dict[str, _PageFiles] = {}
    for entry in backend.entries(faults):
        pages.setdefault(entry.page, _PageFiles(entry.page)).files.append(entry)
    # the bytes that are left of each model, while pages go
    of_model = Counter[str]()
    for page in pages.values():
        of_model[page.space] += page.num_bytes
    # from the newest on, so that their order stays
    ahead = sorted((page.used_s, page.name) for page in pages.values())[::-1]
    names = [name for used_s, name in ahead if used_s > now_s + AHEAD_S]
    try:
        backend.touch(names, now_s)
    except KVPlanError as error:
        note(faults, f"{error}")
    waiting = [*_oldest_first(pages.values(), limits)]
    num_pages = 0
    num_bytes = 0
    left_bytes = of_model.total()

    def is_beyond(page: _PageFiles) -> bool:
        return (
            (limits.max_age_s is not None and now_s - page.used_s > limits.max_age_s)
            or _exceeds(of_model[page.space], limits.max_model_bytes)
            or _exceeds(left_bytes + unfinished.left_bytes, limits.max_bytes)
        )

    # where some cannot be deleted, the next ones go
    while waiting:
        chosen: list[_PageFiles] = []
        staying: list[_PageFiles] = []
        for page in waiting:
            if not is_beyond(page):
                staying.append(page)
                continue
            chosen.append(page)
            of_model[page.space] -= page.num_bytes
            left_bytes -= page.num_bytes
        waiting = staying if chosen else []
        # files that came since the list was made stay
        outcomes = in_parallel(partial(_delete, backend), chosen, backend.at_once)
        for page, fault in zip(chosen, outcomes, strict=True):
            if fault is None:
                num_pages += 1
                num_bytes += page.num_bytes
            else:
                note(faults, f"{fault}")
                of_model[page.space] += page.num_bytes
                left_bytes += page.num_bytes
    return Evicted(
        num_pages,
        num_bytes,
        unfinished.num_deleted,
        left_bytes,
        unfinished.left_bytes,
        tuple(faults),
    )


def _delete(backend: Backend, page: _PageFiles) -> KVPlanError | None:
    """Delete the files of a page, as many as can be, and return the error of another one."""
    fault = None
    for file in page.files:
        try:
            backend.delete(file.name)
        except KVPlanError as error:
            fault = error
    return fault


EvictionReport = Callable[[Evicted | KVPlanError], None]
"""Takes what was evicted, or the error of a backend that has failed."""


class BackgroundEviction:
    """Keeps a store within limits from a thread of its own, rule store.V4, until it is closed.

    It looks at all files about every ``look_s``, less often if a look takes long. Any number of
    engines may do so for one store.

    >>> from kvplan_nixl.serving.store import MemoryBackend
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
            self._look()
            lasted_s = time.monotonic() - began_s
            pause_s = max(self._look_s, lasted_s / MAX_LOOKING_SHARE)

    def _look(self) -> None:
        """Evict once. Whatever goes wrong, the next look follows."""
        outcome: Evicted | KVPlanError
        try:
            outcome = evict(self._backend, self._limits, time.time())
        except KVPlanError as error:
            outcome = error
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            outcome = KVPlanError("BACKEND", "evict pages", expected="a look at all", got=got)
        with contextlib.suppress(Exception):
            self._report(outcome)

    def close(self) -> None:
        """Look no further. A look under way ends by itself."""
        self._is_closed.set()


def _reduced(limits: Limits) -> Limits:
    """Return limits of the share of bytes that is used, rule store.V4.

    >>> _reduced(Limits(max_bytes=1000, max_age_s=60.0))
    Limits(max_bytes=900, max_model_bytes=None, max_age_s=60.0, max_pinned_bytes=None)
    """
    max_bytes = None if limits.max_bytes is None else int(limits.max_bytes * KEPT_SHARE)
    max_model_bytes = limits.max_model_bytes
    if max_model_bytes is not None:
        max_model_bytes = int(max_model_bytes * KEPT_SHARE)
    return attrs.evolve(limits, max_bytes=max_bytes, max_model_bytes=max_model_bytes)


def _oldest_first(pages: Iterable[_PageFiles], limits: Limits) -> Iterator[_PageFiles]:
    """Yield the pages that no pin keeps, rule store.V2, by their last use."""
    kept: set[str] = set()
    pinned_bytes = 0
    pinned = [(page.pinned_s, page.name, page) for page in pages if page.pinned_s is not None]
    for _, name, page in sorted(pinned):
        if not _exceeds(pinned_bytes + page.num_bytes, limits.max_pinned_bytes):
            kept.add(name)
            pinned_bytes += page.num_bytes
    by_use = sorted(pages, key=lambda page: page.used_s)
    return (page for page in by_use if page.name not in kept)


def _exceeds(number: int, limit: int | None) -> bool:
    return limit is not None and number > limit


def evict_beside(backend: Backend, limits: Limits, logger: Logger) -> BackgroundEviction | None:
    """Keep a store within limits beside an engine, which logs what was evicted.

    Return ``None`` if there are no limits.
    """
    if limits.are_none:
        return None

    def report(evicted: Evicted | KVPlanError) -> None:
        if isinstance(evicted, KVPlanError):
            logger.warning("the store is not kept within its limits: %s", evicted)
        elif evicted.num_pages:
            logger.info("the store is kept within its limits: %s", evicted)
        if isinstance(evicted, Evicted) and evicted.faults:
            faults, first = len(evicted.faults), evicted.faults[0]
            logger.warning("%d entries of the store stay, such as: %s", faults, first)

    return BackgroundEviction(backend, limits, report)
