"""Readers: which pages of a store a worker can read, and the plans by which it reads them.

- store.R1: A worker needs of a page the tensors of those of its groups that need the page's
  positions. A page serves it if the parts that the page has hold all of them, whoever wrote them.
- store.R2: A part whose model, dtypes or sizes differ from the worker's is no part for it.
- store.R3: A prefix can be read up to a position if every page from the first one that a group
  attends to serves it, and, for states, if the states after exactly that position are stored.
- store.R4: A page that is missing, evicted or damaged ends the prefix; it is no error of a search.
  A search reads the headers of parts that it has not seen, and deletes damaged ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import having, instance, integer, interval, members, seconds
from kvplan._text import few, shown
from kvplan.describe.blocks import POSITION_END, Range
from kvplan.describe.views import ADDRESS_END, Group, Region
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan import TransferPlan, plan_reads
from kvplan.store.backends import Backend
from kvplan.store.chain import PAGE_TOKENS, Chain
from kvplan.store.pages import PageHeader, check_name, read_header
from kvplan.store.parallel import in_parallel
from kvplan.store.parts import NAME_DIGITS, StoredPart

Listings = dict[str, frozenset[str]]
"""The names of the parts of each page, by its key, as one search has found them."""

Attended = Callable[[int], int]
"""Returns the first position to which the token at a position, or a later one, attends."""

NO_WINDOWS: Final[Mapping[str, Attended]] = MappingProxyType({})

FIRST_ADDRESS: Final = 1 << 12


@attrs.frozen(eq=False)
class PagePlan:
    """The reads of one group from pages that have the same parts, and the parts that they need.

    The pages are ``num_pages`` blocks of each part, one part after another, ``offsets`` bytes after
    the start of a buffer.
    """

    plan: TransferPlan
    parts: tuple[StoredPart, ...]
    offsets: tuple[int, ...]
    num_pages: int


def place(
    parts: Sequence[StoredPart], engine_id: str, address: int, num_bytes: int
) -> tuple[list[Worker], tuple[int, ...], int]:
    """Place as many pages as a buffer takes: their workers, offsets, and the number of pages.

    Raises ``MEMORY`` for a buffer of less than a page.
    """
    page_bytes = sum(part.num_bytes for part in parts)
    num_pages = num_bytes // page_bytes
    if not num_pages:
        raise KVPlanError(
            "MEMORY",
            "place pages of a store",
            expected=f"a buffer of at least {page_bytes} bytes, those of a page",
            got=f"{num_bytes}",
        )
    # all pages of the first part, then all of the second, and so on
    workers = []
    offsets = []
    offset = 0
    for rank, part in enumerate(parts):
        region = Region("pages", address + offset, part.num_bytes * num_pages)
        workers.append(part.placed((engine_id, rank), region, num_pages))
        offsets.append(offset)
        offset += part.num_bytes * num_pages
    return workers, tuple(offsets), num_pages


def of_group(worker: Worker, group: Group) -> Worker:
    """Return a worker with the views of one of its groups alone."""
    views = [view for view in worker.views if view.group == group.name]
    return attrs.evolve(worker, groups=[group], views=views)


class StoreReader:
    """Finds the pages of a store that one worker can read. Any number of threads may use it.

    ``attended`` has a function for each group that does not attend to all positions before a
    token. Pages are read into a buffer of ``buffer_bytes`` at ``address``; who only searches needs
    none. ``num_steps`` grows while pages are found, read, written, moved, or noted as used.

    >>> from kvplan import Model
    >>> from kvplan.store import MemoryBackend
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
        self.backend: Backend = backend
        self.worker: Worker = instance(Worker, worker, "worker of a store")
        self.tokens_per_page: int = integer(tokens_per_page, "tokens_per_page", low=1)
        self._attended = dict(self._of_groups(attended, "attended"))
        for function in self._attended.values():
            having("__call__", function, "attended of a group", "a function")
        self._address = integer(address, "address of a buffer", high=ADDRESS_END)
        self._buffer_bytes = integer(buffer_bytes, "buffer_bytes")
        # a pipeline stage may have a group without a layer in it
        held = {view.group for view in worker.views}
        self.groups: tuple[Group, ...] = tuple(
            group for group in worker.groups if group.name in held
        )
        self.num_steps: int = 0
        self._parts: dict[str, StoredPart | None] = {}
        self._plans: dict[tuple[str, frozenset[str]], PagePlan | None] = {}

    def abandon(self) -> None:
        """Do nothing: a search moves nothing."""

    def chain(self, tokens: Sequence[int], facts: Iterable[tuple[int, str]] = ()) -> Chain:
        """Return the keys of the pages of a prompt of this worker's model."""
        return Chain.of(self.worker.model, tokens, facts, tokens_per_page=self.tokens_per_page)

    def needs(self, start: int, stop: int) -> dict[str, Range]:
        """Return the positions of each group that a prefix of ``stop`` tokens needs.

        ``start`` of them are there already. States are those after ``stop``.
        """
        start, stop = interval((start, stop), "a prefix", POSITION_END)
        ranges = {}
        for group in self.groups:
            first = self._attended[group.name](stop) if group.name in self._attended else 0
            is_state = group.tokens_per_block is None
            ranges[group.name] = (stop if is_state else min(max(start, first), stop), stop)
        return ranges

    def pages(self, group: Group, positions: Range) -> range:
        """Return the pages that a group needs of a range; of states, the page that ends there."""
        start, stop = interval(positions, "positions", POSITION_END)
        size = self.tokens_per_page
        if instance(Group, group, "group").tokens_per_block is None:
            # there is none before the first position
            return range(max(stop // size - 1, 0), stop // size)
        return range(start // size, -(-stop // size)) if start < stop else range(0)

    def find(
        self, chain: Chain, *, start: int = 0, stop: int | None = None, step: int | None = None
    ) -> int:
        """Return the longest prefix that can be read, as :func:`find` does for all workers."""
        return find([self], chain, start=start, stop=stop, step=step)

    def plan_of(self, chain: Chain, page: int, group: Group, listings: Listings) -> PagePlan | None:
        """Return the plan of the reads of a group from a page, ``None`` if that lacks something."""
        instance(Group, group, "group")
        names_there = self.names_of(chain, page, listings)
        key = chain.keys[page]
        self.num_steps += 1
        # pages of one writer have the same parts, and so the same plan
        names = frozenset(name for name in names_there if self._part(chain, key, name))
        question = (group.name, names)
        if question not in self._plans:
            self._plans[question] = self._plan(group, names)
        return self._plans[question]

    def names_of(self, chain: Chain, page: int, listings: Listings) -> frozenset[str]:
        """Return the names of the parts of a page, which ``listings`` has from then on."""
        num_pages = len(instance(Chain, chain, "chain").keys)
        key = chain.keys[integer(page, "page of a chain", high=num_pages)]
        if key not in instance(dict, listings, "listings"):
            self._list(chain, page, listings)
        return listings[key]

    def _list(self, chain: Chain, page: int, listings: Listings) -> None:
        """List the parts of a page, and of as many beside it as can be asked for at once.

        Most searches find nothing, so the first page is asked for alone.
        """
        at_once = self.backend.at_once
        first = page - page % at_once
        pages = range(first, first + at_once) if page else range(1)
        keys = [key for key in chain.keys[pages.start : pages.stop] if key not in listings]
        names = [f"{chain.space}/{key}" for key in keys]
        for key, parts in zip(keys, in_parallel(self.backend.files, names, at_once), strict=True):
            listings[key] = frozenset(part for part in parts if len(part) == NAME_DIGITS)

    def _of_groups(self, values: Any, subject: str) -> Mapping[str, Any]:
        """Return values by group. Raises ``TYPE``, and ``NAME`` for a name that no group has."""
        names = [group.name for group in self.worker.groups]
        checked: Mapping[str, Any] = instance(Mapping, values, subject)
        for label in checked:
            if label not in names:
                expected = f"a group of {few(names, ', ')}"
                got = shown(label)
                raise KVPlanError("NAME", f"read {subject}", expected=expected, got=got)
        return checked

    def _check_prefix(self, chain: Chain, stop: int) -> None:
        """Refuse what is no chain, or a prefix of it that has more pages. Raises ``RANGE``."""
        num_tokens = instance(Chain, chain, "chain").num_tokens
        integer(stop, "stop of a prefix", high=num_tokens + chain.tokens_per_page)

    def _part(self, chain: Chain, key: str, name: str) -> StoredPart | None:
        """Return the part of a name if this worker may read it, rule store.R2. Equal names are
        equal.
        """
        if name not in self._parts and len(name) == NAME_DIGITS:
            file = f"{chain.space}/{key}/{name}"
            try:
                header = read_header(file, lambda *span: self.backend.get(file, *span) or b"")
                check_name(file, header, key, name)
            except KVPlanError as error:
                if error.code == "BACKEND":
                    raise
                # another page may have a whole file of the part, and this one can be saved again
                with contextlib.suppress(KVPlanError):
                    self.backend.delete(file)
                return None
            self._parts[name] = self._readable(header)
        return self._parts.get(name)

    def _readable(self, header: PageHeader) -> StoredPart | None:
        try:
            part = header.part
            fits = part.tokens_per_page in (None, self.tokens_per_page)
            return part if fits and not part.misfit(self.worker) else None
        except KVPlanError:
            # whatever has this name describes nothing that can be read
            return None

    def knows(self, names: Iterable[str]) -> bool:
        """Return whether what this worker reads of parts depends on their names alone."""
        return all(name in self._parts for name in members(str, names, "names of parts"))

    def attended_of(self, group: Group) -> Attended | None:
        """Return the function of a group that does not attend to all positions."""
        return self._attended.get(instance(Group, group, "group").name)

    def _plan(self, group: Group, names: Collection[str]) -> PagePlan | None:
        """Plan the reads of a group from some parts, ``None`` if they lack something, rule
        store.R1.
        """
        parts = [part for name in sorted(names) if (part := self._parts[name]) is not None]
        # a group reads tokens or states; the page may have parts of both
        own = of_group(self.worker, group)
        is_state = group.tokens_per_block is None
        candidates = [part for part in parts if (part.tokens_per_page is None) is is_state]
        try:
            first = self._placed(own, candidates)
            # what the planner takes nothing from need not be read
            chosen = [
                part
                for part, pair in zip(candidates, first.plan.pairs, strict=True)
                if pair.group_pairs
            ]
            return first if chosen == candidates else self._placed(own, chosen)
        except KVPlanError:
            # they lack something, or whoever described them has described too much
            return None

    def _placed(self, own: Worker, parts: Sequence[StoredPart]) -> PagePlan:
        if not parts:
            # plan_reads says what is missing
            return PagePlan(plan_reads(own, ()), (), (), 0)
        engine_id = f"store {own.groups[0].name} {len(self._plans)}"
        workers, offsets, num_pages = place(parts, engine_id, self._address, self._buffer_bytes)
        return PagePlan(plan_reads(own, workers), tuple(parts), offsets, num_pages)


@attrs.frozen(eq=False)
class _EqualNeeds:
    """Groups of some workers that need the same pages of every prefix, so one answer is for all."""

    is_state: bool
    attended: Attended | None
    tokens_per_page: int
    groups: list[tuple[StoreReader, Group]] = attrs.field(factory=list)


class _EngineSearch:
    """One search for all workers of an engine.

    What a page serves depends on the names of its parts. Pages of one writer have equal names, so
    the workers are asked once for each set of names, and not for each page.
    """

    def __init__(
        self, readers: Sequence[StoreReader], chain: Chain, is_over: Callable[[], bool]
    ) -> None:
        self._readers = readers
        self._chain = chain
        self._is_over = is_over
        needs: dict[tuple[bool, int, int], _EqualNeeds] = {}
        for reader in readers:
            for group in reader.groups:
                attended = reader.attended_of(group)
                is_state = group.tokens_per_block is None
                # a state is at the end of a prefix, whatever the group attends to
                key = (is_state, 0 if is_state else id(attended), reader.tokens_per_page)
                equal = _EqualNeeds(is_state, attended, reader.tokens_per_page)
                needs.setdefault(key, equal).groups.append((reader, group))
        self._needs = [*needs.values()]
        self._listings: Listings = {}
        self._of_names: dict[frozenset[str], tuple[bool, ...]] = {}
        self._of_page: dict[int, tuple[bool, ...]] = {}

    def find(self, start: int, stop: int, step: int) -> int:
        """Return the longest prefix up to ``stop``, a multiple of ``step``, or ``start``."""
        ends = [
            self._end_of_all(index, start, stop)
            for index, needs in enumerate(self._needs)
            if not needs.is_state and needs.attended is None
        ]
        end = min([stop, *ends]) // step * step
        windows = [
            _Windows(needs, partial(self._serves, index), start)
            for index, needs in enumerate(self._needs)
            if not needs.is_state and needs.attended is not None
        ]
        states = [
            (needs.tokens_per_page, index)
            for index, needs in enumerate(self._needs)
            if needs.is_state
        ]
        while end > start:
            # a state is that after the last position of a page
            sizes = [size for size, _ in states if end % size]
            if sizes:
                end = (end - end % sizes[0]) // step * step
                continue
            if all(self._serves(index, end // size - 1) for size, index in states) and all(
                window.are_there(end) for window in windows
            ):
                return end
            end -= step
        return start

    def _end_of_all(self, index: int, start: int, stop: int) -> int:
        """Return where the pages end that groups need which attend to all positions."""
        size = self._needs[index].tokens_per_page
        for page in range(start // size, -(-stop // size)):
            if not self._serves(index, page):
                return page * size
        return stop

    def _serves(self, index: int, page: int) -> bool:
        """Return whether a page has what the groups with some needs read of it."""
        served = self._of_page.get(page)
        if served is None:
            served = self._of_page[page] = self._served(page)
        return served[index]

    def _served(self, page: int) -> tuple[bool, ...]:
        if self._is_over():
            action = "search a store"
            raise KVPlanError("BACKEND", action, expected="an answer in time", got="none")
        first = self._readers[0]
        names = first.names_of(self._chain, page, self._listings)
        first.num_steps += 1
        served = self._of_names.get(names)
        if served is None:
            served = tuple(
                all(
                    reader.plan_of(self._chain, page, group, self._listings) is not None
                    for reader, group in needs.groups
                )
                for needs in self._needs
            )
            # a damaged file is of this page alone
            if all(reader.knows(names) for reader in self._readers):
                self._of_names[names] = served
        return served


class _Windows:
    """The windows of some groups before the ends of prefixes, from the longest prefix on.

    No page is asked for twice: ``_whole`` are pages that serve the groups, from the lowest one that
    was asked for on, and ``_missing`` is the last page that did not.
    """

    def __init__(self, needs: _EqualNeeds, serves: Callable[[int], bool], start: int) -> None:
        assert needs.attended is not None
        self._attended = needs.attended
        self._size = needs.tokens_per_page
        self._serves = serves
        self._start = start
        self._whole = range(0)
        self._missing = -1

    def are_there(self, end: int) -> bool:
        """Return whether all pages of the windows before an end are there."""
        low = min(max(self._start, self._attended(end)), end)
        if low == end:
            return True
        first, stop = low // self._size, -(-end // self._size)
        if first <= self._missing < stop:
            return False
        if stop - 1 not in self._whole:
            self._whole = range(stop, stop)
        while self._whole.start > first:
            page = self._whole.start - 1
            if not self._serves(page):
                self._missing = page
                return False
            self._whole = range(page, self._whole.stop)
        return True


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
    instance(Chain, chain, "chain")
    first = integer(start, "start of a search", high=POSITION_END)
    size = chain.tokens_per_page if step is None else step
    stride = integer(size, "step of a search", low=1, high=POSITION_END)
    most = chain.num_tokens if stop is None else integer(stop, "stop of a search")
    end = min(most, chain.num_tokens) // stride * stride
    if until_s is not None:
        seconds(until_s, "until_s")
    if end <= first or not searchers:
        return max(end, first)

    def is_over() -> bool:
        return until_s is not None and time.monotonic() > until_s

    return _EngineSearch(searchers, chain, is_over).find(first, end, stride)
