"""Readers: which pages of a store a worker can read.

- store.R4: A page that is missing, evicted or damaged ends the prefix; it is no error of a search.
  A search reads the headers of shards that it has not seen, and deletes damaged ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from kvplan import Group, KVPlanError, Worker
from kvplan.describe import POSITION_END
from kvplan.protocol.page_keys import PAGE_TOKENS, Chain
from kvplan.protocol.page_reads import FIRST_ADDRESS, NO_WINDOWS, PagePlan, PageReads
from kvplan.protocol.page_shards import NAME_DIGITS, StoredShard
from kvplan.protocol.prefix_search import Attended, PageNeeds, longest_prefix
from kvplan.support import instance, integer, members, seconds
from kvplan_nixl.serving.store.backends import Backend
from kvplan_nixl.serving.store.page_files import read_header
from kvplan_nixl.serving.store.parallel import in_parallel

Listings = dict[str, frozenset[str]]
"""The names of the shards of each page, by its key, as one search has found them."""


class StoreReader(PageReads):
    """Finds the pages of a store that one worker can read. Any number of threads may use it.

    ``attended`` has a function for each group that does not attend to all positions before a
    token. Pages are read into a buffer of ``buffer_bytes`` at ``address``; a search needs
    none. ``num_steps`` grows while pages are found, read, written, moved, or noted as used.

    >>> from kvplan import Model
    >>> from kvplan_nixl.serving.store import MemoryBackend
    >>> (worker,) = Model.shipped("qwen3-0.6b").engine("d", num_blocks=9)
    >>> reader = StoreReader(MemoryBackend(), worker)
    >>> reader.find(reader.chain(range(1000)))
    0
    """

    def __init__(
        self,
        backend: Backend,
        worker: Worker,
        *,
        tokens_per_page: int = PAGE_TOKENS,
        attended: Mapping[str, Attended] = NO_WINDOWS,
        address: int = FIRST_ADDRESS,
        buffer_bytes: int = 1 << 40,
    ) -> None:
        super().__init__(
            worker,
            tokens_per_page=tokens_per_page,
            attended=attended,
            address=address,
            buffer_bytes=buffer_bytes,
        )
        self.backend: Backend = backend
        self.num_steps: int = 0
        self._shards: dict[str, StoredShard | None] = {}
        self._plans: dict[tuple[str, frozenset[str], int], PagePlan | None] = {}

    def abandon(self) -> None:
        """Do nothing: a search moves nothing."""

    def find(
        self, chain: Chain, *, start: int = 0, stop: int | None = None, step: int | None = None
    ) -> int:
        """Return the longest prefix that can be read, as :func:`find` does for all workers."""
        return find([self], chain, start=start, stop=stop, step=step)

    def plan_of(
        self,
        chain: Chain,
        page: int,
        group: Group,
        listings: Listings,
        num_last: int = POSITION_END,
    ) -> PagePlan | None:
        """Return the plan of the reads of a group from a page, ``None`` if that lacks something.

        Of the page its last ``num_last`` positions are needed.
        """
        instance(Group, group, "group")
        size = self.tokens_per_page
        num_last = min(integer(num_last, "num_last", high=POSITION_END + 1), size)
        names_there = self.names_of(chain, page, listings)
        key = chain.keys[page]
        self.num_steps += 1
        # pages of one writer have the same shards, and so the same plan; files are read in an
        # order that does not change from run to run
        names = frozenset(name for name in sorted(names_there) if self._shard(chain, key, name))
        # a plan for whole pages serves their ends too
        for needed in {size: None, num_last: None}:
            question = (group.name, names, needed)
            if question not in self._plans:
                shards = [
                    shard for name in sorted(names) if (shard := self._shards[name]) is not None
                ]
                self._plans[question] = self._plan(group, shards, needed)
            plan = self._plans[question]
            if plan is not None:
                return plan
        return None

    def names_of(self, chain: Chain, page: int, listings: Listings) -> frozenset[str]:
        """Return the names of the shards of a page, which ``listings`` has from then on."""
        num_pages = len(instance(Chain, chain, "chain").keys)
        key = chain.keys[integer(page, "page of a chain", high=num_pages)]
        if key not in instance(dict, listings, "listings"):
            self._list(chain, page, listings)
        return listings[key]

    def _list(self, chain: Chain, page: int, listings: Listings) -> None:
        """List the shards of a page, and of as many beside it as can be asked for at once.

        Most searches find nothing, so the first page is asked for alone.
        """
        at_once = self.backend.at_once
        first = page - page % at_once
        pages = range(first, first + at_once) if page else range(1)
        keys = [key for key in chain.keys[pages.start : pages.stop] if key not in listings]
        names = [f"{chain.space}/{key}" for key in keys]
        for key, shards in zip(keys, in_parallel(self.backend.files, names, at_once), strict=True):
            listings[key] = frozenset(shard for shard in shards if len(shard) == NAME_DIGITS)

    def _shard(self, chain: Chain, key: str, name: str) -> StoredShard | None:
        """Return the shard of a name if this worker may read it, rule store.R2."""
        if name not in self._shards and len(name) == NAME_DIGITS:
            file = f"{chain.space}/{key}/{name}"
            try:
                header = read_header(self.backend, file)
            except KVPlanError as error:
                if error.code == "BACKEND":
                    raise
                # another page may have a whole file of the shard, and this one can be saved again
                with contextlib.suppress(KVPlanError):
                    self.backend.delete(file)
                return None
            try:
                shard = header.shard
                self._shards[name] = shard if self._can_read(shard) else None
            except KVPlanError:
                # whatever has this name describes nothing that can be read
                self._shards[name] = None
        return self._shards.get(name)

    def knows(self, names: Iterable[str]) -> bool:
        """Return whether what this worker reads of shards depends on their names alone."""
        return all(name in self._shards for name in members(str, names, "names of shards"))


class _EngineSearch:
    """One search for all workers of an engine.

    What a page serves depends on the names of its shards. Pages of one writer have equal names, so
    the workers are asked once for each set of names, and not for each page.
    """

    def __init__(
        self,
        readers: Sequence[StoreReader],
        chain: Chain,
        until_s: float | None,
        *,
        ends_with_page: bool,
    ) -> None:
        self._readers = readers
        self._chain = chain
        self._until_s = until_s
        self._ends_with_page = ends_with_page
        self._groups: dict[tuple[bool, Attended | None], list[tuple[StoreReader, Group]]] = {}
        for reader in readers:
            for group in reader.groups:
                # a state is at the end of a prefix, whatever the group attends to
                kind = group.is_state, None if group.is_state else reader.attended_of(group)
                self._groups.setdefault(kind, []).append((reader, group))
        self.needs = [
            PageNeeds(*kind, partial(self._serves, number))
            for number, kind in enumerate(self._groups)
        ]
        self._listings: Listings = {}
        self._of_names: dict[tuple[frozenset[str], tuple[int, ...]], tuple[bool, ...]] = {}
        self._of_page: dict[int, tuple[bool, ...]] = {}

    def _serves(self, number: int, page: int) -> bool:
        """Return whether a page has what the groups of a kind read of it."""
        if page not in self._of_page:
            self._of_page[page] = self._served(page)
        return self._of_page[page][number]

    def _served(self, page: int) -> tuple[bool, ...]:
        if self._until_s is not None and time.monotonic() > self._until_s:
            action = "search a store"
            raise KVPlanError("BACKEND", action, expected="an answer in time", got="none")
        first = self._readers[0]
        names = first.names_of(self._chain, page, self._listings)
        first.num_steps += 1
        needed = tuple(self._last_needed(groups, page) for groups in self._groups.values())
        served = self._of_names.get((names, needed))
        if served is None:
            served = tuple(
                all(
                    reader.plan_of(self._chain, page, group, self._listings, num_last) is not None
                    for reader, group in groups
                )
                for groups, num_last in zip(self._groups.values(), needed, strict=True)
            )
            # a damaged file is of this page alone
            if all(reader.knows(names) for reader in self._readers):
                self._of_names[names, needed] = served
        return served

    def _last_needed(self, groups: Sequence[tuple[StoreReader, Group]], page: int) -> int:
        """Return how many positions at the end of a page groups of a kind need."""
        if not self._ends_with_page:
            return self._chain.tokens_per_page
        return max(reader.last_needed(group, page) for reader, group in groups)


def find(
    readers: Iterable[StoreReader],
    chain: Chain,
    *,
    start: int = 0,
    stop: int | None = None,
    step: int | None = None,
    until_s: float | None = None,
) -> int:
    """Return the longest prefix that all workers of an engine can read, up to ``stop`` if given.

    It is a multiple of ``step``, of whole pages unless one is given, and above ``start``, the
    positions that are there already; ``start`` itself if nothing more is stored. Raises
    ``BACKEND``, also if it is not done at ``until_s`` of the monotonic clock.
    """
    searchers = members(StoreReader, readers, "readers of a store")
    size = instance(Chain, chain, "chain").tokens_per_page
    for searcher in searchers:
        integer(searcher.tokens_per_page, "tokens_per_page of a reader", low=size, high=size + 1)
    first = integer(start, "start of a search", high=POSITION_END)
    stride = integer(size if step is None else step, "step of a search", low=1, high=POSITION_END)
    most = chain.num_tokens if stop is None else integer(stop, "stop of a search")
    end = min(most, chain.num_tokens) // stride * stride
    if until_s is not None:
        seconds(until_s, "until_s")
    if end <= first or not searchers:
        return max(end, first)
    ends_with_page = stride % size == 0
    search = _EngineSearch(searchers, chain, until_s, ends_with_page=ends_with_page)
    return longest_prefix(search.needs, size, first, end, stride)
