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
from collections.abc import Callable, Sequence
from functools import partial
from logging import Logger
from typing import Final

import attrs

from kvplan import KVPlanError
from kvplan.support import brief_repr, having, instance, seconds
from kvplan_nixl.serving.store.backends import AHEAD_S, Backend, FileEntry, is_pin, note
from kvplan_nixl.serving.store.files import UNFINISHED_S
from kvplan_nixl.serving.store.parallel import in_parallel

LOOK_S: Final = 30.0
KEPT_SHARE: Final = 0.9
"""The share of the bytes of a limit that is used, rule store.V4."""

MAX_LOOKING_SHARE: Final = 0.05
"""The share of the time that looking at all files of a store may take."""


@attrs.frozen
class Limits:
    """What a store may hold: bytes, bytes of each model, and pages unused for ``max_age_s``.

    ``max_pinned_bytes`` are those of pages that stay because they are pinned.
    """

    max_bytes: int | None = None
    max_model_bytes: int | None = None
    max_age_s: float | None = None
    max_pinned_bytes: int | None = None

    __repr__ = brief_repr

    def reduced(self) -> Limits:
        """Return limits of the share of bytes that is used, rule store.V4.

        >>> Limits(max_bytes=1000, max_age_s=60.0).reduced()
        Limits(max_bytes=900, max_model_bytes=None, max_age_s=60.0, max_pinned_bytes=None)
        """
        max_bytes, max_model_bytes = (
            None if total is None else int(total * KEPT_SHARE)
            for total in (self.max_bytes, self.max_model_bytes)
        )
        return attrs.evolve(self, max_bytes=max_bytes, max_model_bytes=max_model_bytes)


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


class _Page:
    """The files of a page, which leave together."""

    def __init__(self, name: str, files: Sequence[FileEntry]) -> None:
        self.name = name
        self.files = files
        self.space = name.partition("/")[0]
        self.num_bytes = sum(file.num_bytes for file in files)
        self.used_s = max(file.used_s for file in files)
        # when it was pinned first, if it is
        pins = (file.used_s for file in files if is_pin(file.name.rpartition("/")[2]))
        self.pinned_s = min(pins, default=None)


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
    files: dict[str, list[FileEntry]] = {}
    for entry in backend.entries(faults):
        files.setdefault(entry.page, []).append(entry)
    pages = [_Page(name, page_files) for name, page_files in files.items()]
    # from the newest on, so that their order stays
    ahead = sorted(((page.used_s, page.name) for page in pages), reverse=True)
    try:
        backend.touch([name for used_s, name in ahead if used_s > now_s + AHEAD_S], now_s)
    except KVPlanError as error:
        note(faults, f"{error}")
    # the bytes that are left of each model, while pages go
    of_model = Counter[str]()
    for page in pages:
        of_model[page.space] += page.num_bytes
    left_bytes = of_model.total()
    deleted: list[_Page] = []

    def is_beyond(page: _Page) -> bool:
        return (
            (limits.max_age_s is not None and now_s - page.used_s > limits.max_age_s)
            or _exceeds(of_model[page.space], limits.max_model_bytes)
            or _exceeds(left_bytes + unfinished.left_bytes, limits.max_bytes)
        )

    waiting = _oldest_first(pages, limits)
    while waiting:
        chosen: list[_Page] = []
        staying: list[_Page] = []
        for page in waiting:
            if not is_beyond(page):
                staying.append(page)
                continue
            chosen.append(page)
            of_model[page.space] -= page.num_bytes
            left_bytes -= page.num_bytes
        # files that came since the list was made stay
        outcomes = in_parallel(partial(_delete, backend), chosen, backend.at_once)
        for page, fault in zip(chosen, outcomes, strict=True):
            if fault is None:
                deleted.append(page)
                continue
            note(faults, f"{fault}")
            of_model[page.space] += page.num_bytes
            left_bytes += page.num_bytes
        # where some cannot be deleted, the next ones go
        waiting = staying if chosen else []
    return Evicted(
        len(deleted),
        sum(page.num_bytes for page in deleted),
        unfinished.num_deleted,
        left_bytes,
        unfinished.left_bytes,
        tuple(faults),
    )


def _oldest_first(pages: Sequence[_Page], limits: Limits) -> list[_Page]:
    """Sort the pages that no pin keeps, rule store.V2, by their last use."""
    kept: set[str] = set()
    pinned_bytes = 0
    pinned = [(page.pinned_s, page.name, page) for page in pages if page.pinned_s is not None]
    for _, name, page in sorted(pinned, key=lambda each: each[:2]):
        if not _exceeds(pinned_bytes + page.num_bytes, limits.max_pinned_bytes):
            kept.add(name)
            pinned_bytes += page.num_bytes
    return sorted((page for page in pages if page.name not in kept), key=lambda page: page.used_s)


def _exceeds(number: int, limit: int | None) -> bool:
    return limit is not None and number > limit


def _delete(backend: Backend, page: _Page) -> KVPlanError | None:
    """Delete the files of a page, as many as can be, and return the error of another one."""
    fault = None
    for file in page.files:
        try:
            backend.delete(file.name)
        except KVPlanError as error:
            fault = error
    return fault


class BackgroundEviction:
    """Keeps a store within limits from a thread of its own, rule store.V4, until it is closed.

    It looks at all files about every ``look_s``, less often if a look takes long, and hands what
    it has evicted, or the error of a backend that has failed, to ``report``. Any number of engines
    may do so for one store.

    >>> from kvplan_nixl.serving.store import MemoryBackend
    >>> eviction = BackgroundEviction(MemoryBackend(), Limits(max_bytes=1 << 40), print)
    >>> eviction.close()
    """

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        report: Callable[[Evicted | KVPlanError], None],
        *,
        look_s: float = LOOK_S,
    ) -> None:
        self._backend = having("entries", backend, "backend of a store", "a Backend")
        self._limits = instance(Limits, limits, "limits of a store").reduced()
        self._report = having("__call__", report, "report of an eviction", "a function")
        self._look_s = seconds(look_s, "look_s")
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="kvplan eviction", daemon=True).start()

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


def evict_beside(backend: Backend, limits: Limits, logger: Logger) -> BackgroundEviction | None:
    """Keep a store within limits while an engine runs, which logs what was evicted.

    Return ``None`` if there are no limits.
    """
    if limits == Limits():
        return None

    def report(evicted: Evicted | KVPlanError) -> None:
        if isinstance(evicted, KVPlanError):
            logger.warning("store eviction failed: %s", evicted)
        elif evicted.num_pages:
            logger.info("store eviction: %s", evicted)
        if isinstance(evicted, Evicted) and evicted.faults:
            faults, first = len(evicted.faults), evicted.faults[0]
            logger.warning("store eviction could not delete %d entries, such as: %s", faults, first)

    return BackgroundEviction(backend, limits, report)
