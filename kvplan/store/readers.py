"""Readers: which pages of a store a worker can read, and the plans by which it reads them.

- R1: A worker needs of a page the tensors of those of its groups that need the page's positions. A
  page serves it if the parts that the page has hold all of them, whoever wrote them.
- R2: A part whose model, dtypes or sizes differ from the worker's is no part for it.
- R3: A prefix can be read up to a position if every page from the first one that a group attends to
  serves it, and, for states, if the states after exactly that position are stored.
- R4: A page that is missing, evicted or damaged ends the prefix; it is never an error of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import having, instance, integer, interval, members
from kvplan._text import few, shown
from kvplan.describe.blocks import POSITION_END, Range
from kvplan.describe.views import ADDRESS_END, Group, Region
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan import TransferPlan, plan_reads
from kvplan.store.backends import Backend
from kvplan.store.chain import PAGE_TOKENS, Chain
from kvplan.store.pages import check_name, read_header
from kvplan.store.parallel import in_parallel
from kvplan.store.parts import NAME_DIGITS, StoredPart

Listings = dict[str, frozenset[str]]
"""The names of the parts of each page, by its key, as one search has found them."""

Attended = Callable[[int], int]
"""Returns the first position to which the token at a position, or a later one, attends."""

NO_WINDOWS: Final[Mapping[str, Attended]] = MappingProxyType({})

PIN: Final = "pin"
"""The file of a page that keeps the page from being evicted."""

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
    """Finds the pages of a store that one worker can read. Use it from one thread at a time.

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

    def limit(self, chain: Chain, start: int, stop: int, listings: Listings) -> int:
        """Return ``stop`` if a prefix can be read up to there, rule R3, else a bound of others."""
        self._check_prefix(chain, stop)
        for group in self.groups:
            is_state = group.tokens_per_block is None
            if is_state and stop % self.tokens_per_page:
                return stop - stop % self.tokens_per_page
            for page in self.pages(group, self.needs(start, stop)[group.name]):
                if self.plan_of(chain, page, group, listings) is None:
                    # a window may have passed the page, and states are elsewhere too
                    is_needed_later = not is_state and group.name not in self._attended
                    return page * self.tokens_per_page if is_needed_later else stop - 1
        return stop

    def plan_of(self, chain: Chain, page: int, group: Group, listings: Listings) -> PagePlan | None:
        """Return the plan of the reads of a group from a page, ``None`` if that lacks something."""
        num_pages = len(instance(Chain, chain, "chain").keys)
        key = chain.keys[integer(page, "page of a chain", high=num_pages)]
        instance(Group, group, "group")
        if key not in instance(dict, listings, "listings"):
            self._list(chain, page, listings)
        self.num_steps += 1
        # pages of one writer have the same parts, and so the same plan
        names = frozenset(name for name in listings[key] if self._part(chain, key, name))
        question = (group.name, names)
        if question not in self._plans:
            self._plans[question] = self._plan(group, names)
        return self._plans[question]

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
            listings[key] = frozenset(parts)

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
        """Return the part of a name if this worker may read it, rule R2. Equal names are equal."""
        if name not in self._parts and len(name) == NAME_DIGITS:
            file = f"{chain.space}/{key}/{name}"
            try:
                header = read_header(file, lambda *span: self.backend.get(file, *span) or b"")
                check_name(file, header, key, name)
            except KVPlanError as error:
                if error.code == "BACKEND":
                    raise
                # another page may have a whole file of the part
                return None
            part = header.part
            fits = part.tokens_per_page in (None, self.tokens_per_page)
            self._parts[name] = part if fits and not part.misfit(self.worker) else None
        return self._parts.get(name)

    def _plan(self, group: Group, names: Collection[str]) -> PagePlan | None:
        """Plan the reads of a group from some parts, ``None`` if they lack something, rule R1."""
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


def find(
    readers: Iterable[StoreReader],
    chain: Chain,
    *,
    start: int = 0,
    stop: int | None = None,
    step: int | None = None,
) -> int:
    """Return the longest prefix that all workers of an engine can read, up to ``stop`` if given.

    It is a multiple of ``step``, of whole pages unless one is given, and above ``start``, the
    positions that are there already; ``start`` itself if nothing more is stored. Raises
    ``BACKEND``.
    """
    searchers = members(StoreReader, readers, "readers of a store")
    instance(Chain, chain, "chain")
    first = integer(start, "start of a search", high=POSITION_END)
    size = chain.tokens_per_page if step is None else step
    stride = integer(size, "step of a search", low=1, high=POSITION_END)
    listings: Listings = {}
    most = chain.num_tokens if stop is None else integer(stop, "stop of a search")
    end = min(most, chain.num_tokens) // stride * stride
    while end > first:
        bound = end
        # what one worker cannot read, the others need not look at
        for reader in searchers:
            bound = min(bound, reader.limit(chain, first, bound, listings))
        if bound == end:
            return end
        end = bound // stride * stride
    return first
