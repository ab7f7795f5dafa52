"""Eviction: which pages leave a store, so that it stays within its limits.

- V1: Pages leave whole, those that were used longest ago first. A prefix is used from its end to
  its beginning, so its last pages leave before its first ones.
- V2: A pinned page stays, whatever the limits are.
- V3: A page that is read while it leaves is read whole, or is a miss. Several evictors do no harm:
  each deletes what it has seen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import attrs

from kvplan._checks import having, instance
from kvplan._text import brief_repr
from kvplan.store.backends import Backend, FileEntry
from kvplan.store.parallel import in_parallel
from kvplan.store.readers import PIN

UNFINISHED_S = 3600.0
"""A file that was begun so long ago is of a process that ended."""


@attrs.frozen
class Limits:
    """What a store may hold: bytes in all, bytes of each model, and for how long it is not used."""

    max_bytes: int | None = None
    max_model_bytes: int | None = None
    max_age_s: float | None = None

    __repr__ = brief_repr


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


def _oldest_first(pages: dict[str, _PageFiles]) -> Iterator[tuple[str, _PageFiles]]:
    """Yield the pages that are not pinned, by their last use."""
    order = sorted(pages, key=lambda name: pages[name].used_s)
    return ((name, pages[name]) for name in order if not pages[name].is_pinned)


def _exceeds(number: int, limit: int | None) -> bool:
    return limit is not None and number > limit
