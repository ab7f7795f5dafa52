"""What a worker reads of the pages of a store: which pages a prefix needs, and the plan for each.

- store.R1: A worker needs of a page the tensors of those of its groups that need the page's
  positions. A page serves it if the page's shards together hold all of them.
- store.R2: A worker reads no shard whose model, dtypes or sizes differ from its own, and none of a
  page's last positions where it needs more of them.
- store.R3: A prefix can be read up to a position if every page from the first one that a group
  attends to serves it, and, for states, if the states after exactly that position are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import having, instance, integer, interval
from kvplan._text import few, shown
from kvplan.describe.blocks import POSITION_END, Range
from kvplan.describe.views import ADDRESS_END, Group, Region
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan import TransferPlan, plan_reads, plan_writes
from kvplan.protocol.page_keys import PAGE_TOKENS, Chain
from kvplan.protocol.page_shards import StoredShard, shards_of
from kvplan.protocol.prefix_search import Attended
from kvplan.protocol.retention import windows_kept

__all__ = [
    "FIRST_ADDRESS",
    "NO_WINDOWS",
    "PagePlan",
    "PageReads",
]

NO_WINDOWS: Final[Mapping[str, Attended]] = MappingProxyType({})

FIRST_ADDRESS: Final = 1 << 12


@attrs.frozen(eq=False)
class PagePlan:
    """The reads of one group from pages that have the same shards, and the shards that they need.

    The pages are ``num_pages`` blocks of each shard, one shard after another, at ``offsets`` of a
    buffer. Shards have the last ``num_tokens`` positions of a page, None of states.
    """

    plan: TransferPlan
    shards: tuple[StoredShard, ...]
    offsets: tuple[int, ...]
    num_pages: int
    num_tokens: int | None


def lay_out(
    shards: Sequence[StoredShard],
    engine_id: str,
    address: int,
    num_bytes: int,
    most_pages: int = POSITION_END,
) -> tuple[list[Worker], tuple[int, ...], int]:
    """Lay out as many pages as a buffer takes: their workers, offsets, and the number of pages.

    There are at most ``most_pages``. Raises ``MEMORY`` for a buffer of less than a page.
    """
    page_bytes = sum(shard.num_bytes for shard in shards)
    num_pages = min(num_bytes // page_bytes, most_pages)
    if not num_pages:
        raise KVPlanError(
            "MEMORY",
            "place pages of a store",
            expected=f"a buffer of at least {page_bytes} bytes, those of a page",
            got=f"{num_bytes}",
        )
    # all pages of the first shard, then all of the second, and so on
    workers = []
    offsets = []
    offset = 0
    for rank, shard in enumerate(shards):
        region = Region("pages", address + offset, shard.num_bytes * num_pages)
        workers.append(shard.placed((engine_id, rank), region, num_pages))
        offsets.append(offset)
        offset += shard.num_bytes * num_pages
    return workers, tuple(offsets), num_pages


def of_group(worker: Worker, group: Group) -> Worker:
    """Return a worker with the views of one of its groups alone."""
    views = [view for view in worker.views if view.group == group.name]
    return attrs.evolve(worker, groups=[group], views=views)


class PageReads:
    """Plans the reads of one worker from pages of a store.

    ``attended`` has a function for each group that does not attend to all positions before a
    token. Pages are read into a buffer of ``buffer_bytes`` at ``address``; a search needs
    none.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        tokens_per_page: int = PAGE_TOKENS,
        attended: Mapping[str, Attended] = NO_WINDOWS,
        address: int = FIRST_ADDRESS,
        buffer_bytes: int = 1 << 40,
    ) -> None:
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
        self._windows = windows_kept(self.worker)
        self._num_plans = 0

    def chain(self, tokens: Sequence[int], facts: Iterable[tuple[int, str]] = ()) -> Chain:
        """Return the keys of the pages of a prompt of this worker's model."""
        return Chain.of(self.worker.model, tokens, facts, tokens_per_page=self.tokens_per_page)

    def attended_of(self, group: Group) -> Attended | None:
        """Return the function of a group that does not attend to all positions."""
        return self._attended.get(instance(Group, group, "group").name)

    def needs(self, start: int, stop: int) -> dict[str, Range]:
        """Return the positions of each group that a prefix of ``stop`` tokens needs.

        ``start`` of them are there already. States are those after ``stop``.
        """
        start, stop = interval((start, stop), "a prefix", POSITION_END)
        ranges = {}
        for group in self.groups:
            first = self._attended[group.name](stop) if group.name in self._attended else 0
            ranges[group.name] = (stop if group.is_state else min(max(start, first), stop), stop)
        return ranges

    def pages(self, group: Group, positions: Range) -> range:
        """Return the pages that a group needs of a range; of states, the page that ends there."""
        start, stop = interval(positions, "positions", POSITION_END)
        size = self.tokens_per_page
        if instance(Group, group, "group").is_state:
            # there is none before the first position
            return range(max(stop // size - 1, 0), stop // size)
        return range(start // size, -(-stop // size)) if start < stop else range(0)

    def last_needed(self, group: Group, page: int) -> int:
        """Return how many positions at the end of a page a prefix that ends there needs of it."""
        size = self.tokens_per_page
        attended = self.attended_of(group)
        if attended is None:
            return min(self._windows.get(group.name) or size, size)
        stop = (integer(page, "page", high=POSITION_END // size) + 1) * size
        return min(max(stop - attended(stop), 0), size)

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

    def _can_read(self, shard: StoredShard) -> bool:
        """Return whether this worker may read a shard, rule store.R2."""
        size = self.tokens_per_page
        fits = shard.tokens_per_page in (None, size) and not size % (shard.num_tokens or size)
        return fits and not shard.misfit(self.worker)

    def _plan(self, group: Group, shards: Sequence[StoredShard], num_last: int) -> PagePlan | None:
        """Plan the reads of a group from shards, ``None`` if they lack something, rule store.R1.

        The group needs the last ``num_last`` positions of a page.
        """
        # a group reads tokens or states; the page may have shards of both
        own = of_group(self.worker, group)
        by_size: dict[int | None, list[StoredShard]] = {}
        for shard in shards:
            size = shard.num_tokens
            if group.is_state is (size is None) and (size is None or size >= num_last):
                by_size.setdefault(size, []).append(shard)
        # shards of whole pages first: of those, many pages are read at once
        for size in sorted(by_size, key=lambda size: -(size or 0)):
            candidates = by_size[size]
            try:
                first = self._placed(own, candidates)
                # what the planner takes nothing from need not be read
                chosen = [
                    shard
                    for shard, pair in zip(candidates, first.plan.pairs, strict=True)
                    if pair.group_pairs
                ]
                return first if chosen == candidates else self._placed(own, chosen)
            except KVPlanError:
                # they lack something, or their descriptions cannot be planned
                continue
        return None

    def _placed(self, own: Worker, shards: Sequence[StoredShard]) -> PagePlan:
        self._num_plans += 1
        engine_id = f"store {own.groups[0].name} {self._num_plans}"
        workers, offsets, num_pages = self._lay_out(shards, engine_id)
        plan = plan_reads(own, workers)
        return PagePlan(plan, tuple(shards), offsets, num_pages, shards[0].num_tokens)

    def _plan_saves(self, group: Group) -> PagePlan:
        """Plan the writes of a group to its shards of pages. Raises as :func:`shards_of` does."""
        own = of_group(self.worker, group)
        shards = shards_of(own, self.tokens_per_page)
        workers, offsets, num_pages = self._lay_out(shards, f"store {group.name} pages")
        plan = plan_writes(own, workers)
        return PagePlan(plan, shards, offsets, num_pages, shards[0].num_tokens)

    def _lay_out(
        self, shards: Sequence[StoredShard], engine_id: str
    ) -> tuple[list[Worker], tuple[int, ...], int]:
        """Lay out shards of equally many positions in the buffer, as :func:`lay_out` does."""
        # the ends of pages are no positions in a row
        is_end = shards[0].num_tokens not in (None, self.tokens_per_page)
        most_pages = 1 if is_end else POSITION_END
        return lay_out(shards, engine_id, self._address, self._buffer_bytes, most_pages)
