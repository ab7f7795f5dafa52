"""Clients: save a worker's cache as pages of a store, and load it again.

A page is in memory between the cache and a file: its digest has to be checked before any of its
bytes is used, and two short copies are cheaper than many short writes to a file.

- store.L1: What is loaded was read whole and has its digest, before any byte of it moves.
- store.L2: A damaged page is deleted, and loading it raises ``PAGE``: the caller computes its
  positions, and saves them again.
- store.L3: A page is saved if the worker could not read it back: what is stored is not stored
  twice, however it is divided into shards.
- store.L4: A save that fails loses pages, nothing else. It never waits for another writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs
import numpy as np

from kvplan import Blocks, Group, KVPlanError, TransferPlan, Worker
from kvplan.describe import POSITION_END, Range
from kvplan.protocol.page_keys import PAGE_TOKENS, Chain
from kvplan.protocol.page_reads import NO_WINDOWS, PagePlan
from kvplan.protocol.page_shards import NAME_DIGITS, StoredShard
from kvplan.protocol.pages import PageHeader, check_size, check_stop, pack
from kvplan.protocol.prefix_search import Attended
from kvplan.support import instance, integer, interval
from kvplan_nixl.serving.store.backends import PIN, Backend, is_pin
from kvplan_nixl.serving.store.mover import MemoryMover, Mover
from kvplan_nixl.serving.store.page_files import read_whole
from kvplan_nixl.serving.store.parallel import FILES_AT_ONCE, in_parallel
from kvplan_nixl.serving.store.readers import Listings, StoreReader

BUFFER_BYTES: Final = 64 << 20

RUN_BYTES: Final = 8 << 20
"""The bytes of a backend at hand that are read, then moved, at a time: threads that work in short
bursts wait less for processors that others use.
"""

MAX_PINS: Final = 64
"""The most owners that have pinned a page."""

PAGES_AT_ONCE: Final = 32
"""The most pages that are noted as used in one step."""


@attrs.frozen(eq=False)
class _FileMemory:
    """A file of a page, and where its data is in the buffer."""

    name: str
    key: str
    stop: int
    shard: StoredShard
    memory: memoryview


class StoreClient(StoreReader):
    """Saves the cache of one worker in a store, and loads it. Use it from one thread at a time.

    The mover copies between the cache and ``buffer_bytes`` of host memory. ``faults`` counts
    by code what has gone wrong without an error.
    """

    def __init__(
        self,
        backend: Backend,
        worker: Worker,
        *,
        mover: Mover | None = None,
        tokens_per_page: int = PAGE_TOKENS,
        attended: Mapping[str, Attended] = NO_WINDOWS,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._buffer = np.empty(integer(buffer_bytes, "buffer_bytes", high=1 << 48), np.uint8)
        super().__init__(
            backend,
            worker,
            tokens_per_page=tokens_per_page,
            attended=attended,
            address=self._buffer.ctypes.data,
            buffer_bytes=buffer_bytes,
        )
        self._mover: Mover = MemoryMover() if mover is None else mover
        self._prepared: set[TransferPlan] = set()
        # a move excludes that the client is abandoned meanwhile
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._writes = {group.name: self._plan_saves(group) for group in self.groups}
        self.faults: Counter[str] = Counter()

    def save(
        self, chain: Chain, tables: Mapping[str, Blocks], positions: Mapping[str, Range]
    ) -> int:
        """Save the pages that lie wholly in a range of each group, and return how many are new.

        A range of a state group ends where its state is, the one block of its table. A group that
        is not named saves nothing. A failing backend is counted in ``faults``.
        """
        num_saved = 0
        instance(Chain, chain, "chain")
        for group, table, span in self._ranges(tables, positions):
            pages = self._whole_pages(group, span)
            try:
                num_saved += self._save(chain, group, table, pages)
            except KVPlanError as error:
                if error.code != "BACKEND":
                    raise
                self.faults[error.code] += 1
        return num_saved

    def _ranges(
        self, tables: Mapping[str, Blocks], positions: Mapping[str, Range]
    ) -> Iterator[tuple[Group, Blocks, Range]]:
        """Yield the groups that have a range, each with its table and the range."""
        tables_of = self._of_groups(tables, "tables")
        ranges_of = self._of_groups(positions, "positions")
        for group in self.groups:
            if group.name in ranges_of:
                table: Any = tables_of.get(group.name)
                instance(Blocks, table, f"table of {group.name!r}")
                span = interval(ranges_of[group.name], f"range of {group.name!r}", POSITION_END)
                yield group, table, span

    def _whole_pages(self, group: Group, positions: Range) -> range:
        # neither a state inside a page nor positions up to there have a key
        start, stop = positions
        size, num_last = self.tokens_per_page, self._writes[group.name].num_tokens
        if num_last is None:
            return self.pages(group, positions) if stop and stop % size == 0 else range(0)
        return range(-(-(start + num_last) // size) - 1, stop // size)

    def _save(self, chain: Chain, group: Group, table: Blocks, pages: range) -> int:
        page_plan = self._writes[group.name]
        listings: Listings = {}
        num_saved = 0
        num_last = page_plan.num_tokens or 0
        missing = [
            page for page in pages if self.plan_of(chain, page, group, listings, num_last) is None
        ]
        for run in _rows(missing, self._pages_at_once(page_plan)):
            size = self.tokens_per_page
            span = ((run.start + 1) * size - num_last, run.stop * size)
            self._move(page_plan, group, table, run, span)
            files = self._files(chain, page_plan, run)
            outcomes = in_parallel(self._write_file, files, self._files_at_once)
            of_page: defaultdict[int, set[bool | None]] = defaultdict(set)
            for file, outcome in zip(files, outcomes, strict=True):
                of_page[file.stop].add(outcome)
            # what another writer has written, or is writing, is not new
            num_saved += sum(
                True in written and None not in written for written in of_page.values()
            )
            if None in outcomes:
                self.faults["BACKEND"] += 1
                break
        return num_saved

    def _files(self, chain: Chain, page_plan: PagePlan, pages: range) -> list[_FileMemory]:
        """Return the files of pages in the buffer: each shard of each page is one."""
        files = []
        for slot, page in enumerate(pages):
            key, page_stop = chain.keys[page], (page + 1) * self.tokens_per_page
            for shard, offset in zip(page_plan.shards, page_plan.offsets, strict=True):
                start = offset + slot * shard.num_bytes
                memory = self._buffer.data[start : start + shard.num_bytes]
                name = f"{chain.space}/{key}/{shard.name}"
                files.append(_FileMemory(name, key, page_stop, shard, memory))
        return files

    def _pages_at_once(self, page_plan: PagePlan) -> int:
        """Return how many pages are read or written, and moved, at a time: they fit the buffer."""
        if self.backend.at_once > 1:
            return page_plan.num_pages
        page_bytes = sum(shard.num_bytes for shard in page_plan.shards)
        return min(max(RUN_BYTES // page_bytes, 1), page_plan.num_pages)

    @property
    def _files_at_once(self) -> int:
        return max(self.backend.at_once, FILES_AT_ONCE)

    def _write_file(self, file: _FileMemory) -> bool | None:
        """Write a file. Return whether it was, ``None`` if the backend has failed."""
        try:
            chunks = pack(file.key, file.stop, file.shard, file.memory)
            return self.backend.put(file.name, chunks)
        except KVPlanError as error:
            if error.code != "BACKEND":
                raise
            return None
        finally:
            self.num_steps += 1

    def _move(
        self, page_plan: PagePlan, group: Group, table: Blocks, pages: range, positions: Range
    ) -> None:
        """Move positions, or a state, between blocks and the first pages of the buffer."""
        plan = page_plan.plan
        if plan not in self._prepared:
            self._mover.prepare(plan)
            self._prepared.add(plan)
        name = page_plan.shards[0].group.name
        if page_plan.num_tokens is None:
            # a state has the ordinal that the table gives it
            first = table.first
            span = (first, first + 1)
        else:
            # shards are blocks of their positions, of which the last one of each page is there
            first = (pages.start + 1) * self.tokens_per_page // page_plan.num_tokens - 1
            span = positions
        slots = Blocks(range(len(pages)), first)
        specs = plan.bind(
            local={group.name: table}, remote={name: slots}, tokens={group.name: span}
        )
        with self._lock:
            if self._is_abandoned:
                action = f"move pages of {self.worker.label}"
                raise KVPlanError("BACKEND", action, expected="a caller", got="one that gave up")
            self._mover.move(specs)
        self.num_steps += 1

    def abandon(self) -> None:
        """Move nothing any more. A move that is under way ends first."""
        with self._lock:
            self._is_abandoned = True

    def load(
        self, chain: Chain, tables: Mapping[str, Blocks], positions: Mapping[str, Range]
    ) -> None:
        """Load a range of each group, as :meth:`needs` returns them for a prefix that was found.

        The table of a state group has one block, for the state after the range. Raises ``PAGE`` if
        a page is damaged or not there any more, ``BACKEND`` if the backend fails: then any bytes of
        the blocks may have been written, and the positions are to be computed.
        """
        instance(Chain, chain, "chain")
        for group, table, span in self._ranges(tables, positions):
            for page_plan, pages, shard_span in self._runs(chain, group, span):
                files = self._files(chain, page_plan, pages)
                try:
                    in_parallel(self._read_file, files, self._files_at_once)
                except KVPlanError as error:
                    self.faults[error.code] += 1
                    raise
                self._move(page_plan, group, table, pages, shard_span)

    def _runs(
        self, chain: Chain, group: Group, positions: Range
    ) -> Iterator[tuple[PagePlan, range, Range]]:
        """Yield the pages of a range in runs of equal shards, as many as are read at a time."""
        listings: Listings = {}
        size = self.tokens_per_page
        pages = self.pages(group, positions)
        plans = [
            self.plan_of(chain, page, group, listings, self._num_last(page, positions))
            for page in pages
        ]
        start = 0
        while start < len(pages):
            page_plan = plans[start]
            if page_plan is None:
                key = chain.keys[pages[start]]
                raise KVPlanError(
                    "PAGE",
                    f"load page {chain.space}/{key}",
                    expected=f"all that group {group.name!r} of {self.worker.label} needs",
                    got="less",
                    hint="find says what is stored",
                )
            # as many pages as have the same shards and are read at a time
            stop = start + 1
            most = start + self._pages_at_once(page_plan)
            while stop < min(len(pages), most) and plans[stop] is page_plan:
                stop += 1
            run = pages[start:stop]
            low = max(positions[0], run.start * size)
            high = min(positions[1], run.stop * size)
            yield page_plan, run, (low, high)
            start = stop

    def _num_last(self, page: int, positions: Range) -> int:
        """Return how many positions at the end of a page contain those of a range in it."""
        size = self.tokens_per_page
        start, stop = positions
        page_stop = (page + 1) * size
        return size if stop < page_stop else min(page_stop - start, size)

    def _read_file(self, file: _FileMemory) -> None:
        """Read a file into the buffer, rules store.L1 and store.L2."""

        def memory_of(header: PageHeader) -> memoryview:
            check_size(file.name, header, file.shard)
            check_stop(file.name, header, file.stop)
            return file.memory

        try:
            read_whole(self.backend, file.name, memory_of)
        except KVPlanError as error:
            # the page is a miss from now on, also for others
            if error.code != "BACKEND":
                with contextlib.suppress(KVPlanError):
                    self.backend.delete(file.name)
            raise
        self.num_steps += 1

    def use(self, chain: Chain, stop: int) -> None:
        """Note that the pages of a prefix were used: the last ones are evicted first.

        A failing backend is counted in ``faults``.
        """
        pages = self._page_names(chain, stop)
        used_s = time.time()
        has_failed = False
        for first_page in range(0, len(pages), PAGES_AT_ONCE):
            try:
                used_pages = pages[first_page : first_page + PAGES_AT_ONCE]
                self.backend.touch(used_pages, used_s, first_page)
            except KVPlanError as error:
                if error.code != "BACKEND":
                    raise
                has_failed = True
            self.num_steps += 1
        if has_failed:
            self.faults["BACKEND"] += 1

    def _page_names(self, chain: Chain, stop: int) -> list[str]:
        num_tokens = instance(Chain, chain, "chain").num_tokens
        integer(stop, "stop of a prefix", high=num_tokens + chain.tokens_per_page)
        return [f"{chain.space}/{key}" for key in chain.keys[: stop // self.tokens_per_page]]

    def pin(self, chain: Chain, stop: int, owner: str = "") -> None:
        """Keep the pages of a prefix from being evicted, for an owner. Raises ``BACKEND``.

        A page stays pinned until all of its owners, at most :data:`MAX_PINS`, have unpinned it. The
        store has a digest of the owner's name, so a secret name protects the pins from
        being removed by others.
        """
        pin = pin_name(owner)
        for page in self._page_names(chain, stop):
            # the page stays in any case, and files are not without end
            if sum(map(is_pin, self.backend.files(page))) < MAX_PINS:
                self.backend.put(f"{page}/{pin}", [b""])
            self.num_steps += 1

    def unpin(self, chain: Chain, stop: int, owner: str = "") -> None:
        """Take an owner's pins from the pages of a prefix.

        Raises ``BACKEND`` if one cannot be deleted, after the others.
        """
        pin = pin_name(owner)
        fault = None
        for page in self._page_names(chain, stop):
            try:
                self.backend.delete(f"{page}/{pin}")
            except KVPlanError as error:
                fault = error
            self.num_steps += 1
        if fault is not None:
            raise fault


def pin_name(owner: str) -> str:
    """Return the file by which an owner pins a page; the one without a name is the operator.

    >>> pin_name(""), pin_name("tenant 7")
    ('pin', 'pin.cfce5f7876e2993fb5876747f2cb945f')
    """
    if not instance(str, owner, "owner of a pin"):
        return PIN
    digest = hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{PIN}.{digest[:NAME_DIGITS]}"


def _rows(pages: Iterable[int], most: int) -> list[range]:
    """Return ascending pages as ranges of at most ``most`` pages in a row.

    >>> _rows([0, 1, 2, 5, 6], 2)
    [range(0, 2), range(2, 3), range(5, 7)]
    """
    rows: list[range] = []
    for page in pages:
        if rows and rows[-1].stop == page and len(rows[-1]) < most:
            rows[-1] = range(rows[-1].start, page + 1)
        else:
            rows.append(range(page, page + 1))
    return rows
