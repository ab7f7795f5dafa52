"""The exporter: which requests an engine pins for readers, and what it publishes of them.

An engine that computes a request for other engines keeps its blocks until they are read. While it
is computed, what is ready of it may be *published* for a reader that waits. When all of it is
computed, its blocks are *pinned* until its lease has ended. :data:`TRANSITIONS` is the whole life
of an exported request:

    event        computing    published    lost      pinned
    PUBLISH      published    published    lost
    REVOKE       computing    computing    lost
    LOSE                      lost         lost
    FINISH       pinned       pinned
    ABORT        free         free         free      free
    LEASE_ENDED               lost                   free

The blocks of a preempted request are overwritten, so its lease is revoked first. If no reader has
claimed that lease (REVOKE), the request may be published again, under a new lease. If a reader has
(LOSE), its request fails, and this one is *lost*: it is computed to its end, and no engine reads
it. So is one whose lease ends while it is computed. ABORT is of a request that will not be computed
to its end.

The exporter has no thread and no socket. A connector tells it what happens to requests, publishes
the handoffs that it returns, and frees the blocks of requests that :meth:`Exporter.step` returns.
Readers' claims reach its :class:`~kvplan.protocol.Leases` directly. All calls come from the
engine's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from kvplan._checks import having, instance, integer, name
from kvplan._text import brief_repr
from kvplan.describe.blocks import Blocks
from kvplan.errors import KVPlanError
from kvplan.protocol.groups import CacheGroup, cache_groups, first_listed, whole_groups
from kvplan.protocol.handoff import Handoff, Source
from kvplan.protocol.leases import Leases
from kvplan.protocol.transitions import after

NONE: Final[Mapping[str, int]] = MappingProxyType({})


class ExportState(enum.Enum):
    """What an exported request is."""

    COMPUTING = "computing"
    PUBLISHED = "published"
    LOST = "lost"
    PINNED = "pinned"
    FREE = "free"


class ExportEvent(enum.Enum):
    """What happens to an exported request."""

    PUBLISH = enum.auto()
    REVOKE = enum.auto()
    LOSE = enum.auto()
    FINISH = enum.auto()
    ABORT = enum.auto()
    LEASE_ENDED = enum.auto()


COMPUTING, PUBLISHED, LOST, PINNED, FREE = ExportState

TRANSITIONS: Final[Mapping[tuple[ExportState, ExportEvent], ExportState]] = MappingProxyType(
    {
        (COMPUTING, ExportEvent.PUBLISH): PUBLISHED,
        (COMPUTING, ExportEvent.REVOKE): COMPUTING,
        (COMPUTING, ExportEvent.FINISH): PINNED,
        (COMPUTING, ExportEvent.ABORT): FREE,
        (PUBLISHED, ExportEvent.PUBLISH): PUBLISHED,
        (PUBLISHED, ExportEvent.REVOKE): COMPUTING,
        (PUBLISHED, ExportEvent.LOSE): LOST,
        (PUBLISHED, ExportEvent.FINISH): PINNED,
        (PUBLISHED, ExportEvent.ABORT): FREE,
        (PUBLISHED, ExportEvent.LEASE_ENDED): LOST,
        (LOST, ExportEvent.PUBLISH): LOST,
        (LOST, ExportEvent.REVOKE): LOST,
        (LOST, ExportEvent.LOSE): LOST,
        (LOST, ExportEvent.ABORT): FREE,
        (PINNED, ExportEvent.ABORT): FREE,
        (PINNED, ExportEvent.LEASE_ENDED): FREE,
    }
)
"""What a request becomes by what happens to it; nothing else may happen."""


@attrs.define(eq=False)
class _Export:
    """A request that others may read: what is published of it, and under which lease.

    It began with ``num_found`` positions of the prefix cache, which another request may still
    compute until this one has computed more itself. One that ``gives_way`` is kept for a request
    that no client has sent yet.
    """

    room: str = ""
    state: ExportState = COMPUTING
    num_found: int = 0
    num_tokens: int = 0
    lease: str = ""
    blocks: Mapping[str, Blocks] = attrs.field(factory=dict)
    gives_way: bool = False


@attrs.frozen
class EndedExports:
    """The leases that have ended since the last step.

    The blocks of ``released`` requests are free. The leases of those in ``late`` expired, or lasted
    longer than any may: their errors say which. ``num_stale`` claims came for leases that were
    over: their requests fail.
    """

    released: tuple[str, ...]
    late: Mapping[str, KVPlanError]
    num_stale: int

    __repr__ = brief_repr


class Exporter:
    """The requests of an engine that others read, from ``source``, under ``leases``.

    ``groups`` are those of the cache. Less than ``early_tokens`` positions more are not published
    alone. Readers find the positions of windows and states when all is computed; before, those of
    groups that keep all. ``withdraw`` gets the room and the lease of what readers may not read any
    more: with a listener, it is :meth:`Listener.withdraw <kvplan.protocol.Listener.withdraw>`.

    >>> from kvplan_nixl.serving import Driver
    >>> source = Source("prefill", "a1", "10.0.0.1", 5600)
    >>> exporter = Exporter(source, Leases(Driver()), {"attn": CacheGroup(16)}, early_tokens=32)
    >>> exporter.open("request 1")
    >>> blocks = {"attn": Blocks([4, 2, 9])}
    >>> exporter.publish("request 1", 16, lambda: blocks, str) is None
    True
    >>> exporter.publish("request 1", 32, lambda: blocks, str).num_tokens
    32
    >>> handoff = exporter.finish("request 1", 40, blocks, str)
    >>> exporter.leases.release(handoff.lease, "decode"), exporter.step().released
    (True, ('request 1',))
    """

    def __init__(
        self,
        source: Source,
        leases: Leases,
        groups: Mapping[str, CacheGroup],
        *,
        early_tokens: int = 1,
        withdraw: Callable[[str, str], object] = lambda room, lease: None,
    ) -> None:
        self.source: Source = instance(Source, source, "source")
        self.leases: Leases = instance(Leases, leases, "leases")
        self._groups = cache_groups(groups)
        self._whole_groups = whole_groups(groups)
        self._early_tokens: int = integer(early_tokens, "early_tokens", low=1)
        self._withdraw = having("__call__", withdraw, "withdraw", "a function")
        self._requests: dict[str, _Export] = {}
        self._rooms: set[str] = set()
        self.num_blocks: int = 0
        self._num_refused = 0

    def open(self, request: str, room: str = "") -> None:
        """Export a request, in a room if readers may find it there before it is computed.

        An open request of the same name is aborted. Raises ``NAME`` if another request has the
        room, as children of one request would.
        """
        self.abort(request)
        if room in self._rooms:
            raise KVPlanError(
                "NAME",
                f"open room {room}",
                expected="a room of its own for each request",
                got="one in use",
                hint="ask for n = 1",
            )
        self._requests[name(request, "name of a request")] = _Export(room)
        self._rooms |= {room} - {""}

    def is_open(self, request: str) -> bool:
        """Return whether others may read a request, now or when it is computed."""
        return request in self._requests

    def note_found(self, request: str, num_found: int) -> None:
        """Note how many positions of a request the prefix cache had when its computation began."""
        self._requests[request].num_found = num_found

    def publish(
        self,
        request: str,
        num_tokens: int,
        blocks: Callable[[], Mapping[str, Blocks]],
        prompt: Callable[[int], str],
        *,
        read_from: Mapping[str, int] = NONE,
        weights_version: str = "",
    ) -> Handoff | None:
        """Publish the positions that are computed of a request, None if these are too few more.

        ``blocks`` returns its tables by group, and ``prompt`` digests its first tokens.
        ``read_from`` has the first position of groups whose first block lacks earlier ones, because
        this engine read it itself.
        """
        export = self._requests[request]
        is_more = num_tokens - export.num_tokens >= self._early_tokens
        if export.state is LOST or num_tokens <= export.num_found or not is_more:
            return None
        if not self._whole_groups:
            return None
        if export.state is COMPUTING:
            export.lease = self.leases.grant_early(request)
        early = {
            group: table if group in self._whole_groups else Blocks([])
            for group, table in blocks().items()
        }
        self._move(export, ExportEvent.PUBLISH)
        self._keep(export, num_tokens, early)
        return self._handoff(export, self._whole_groups, prompt, read_from, {}, weights_version)

    def revoke(self, request: str) -> None:
        """Withdraw what was published, since its blocks will be overwritten.

        The request is preempted, or computed on with other weights. Do this before the step that
        writes.
        """
        export = self._requests.get(request)
        if export is None or export.state is not PUBLISHED:
            return
        is_claimed = self.leases.revoke(export.lease)
        self._withdraw(export.room, export.lease)
        self._move(export, ExportEvent.LOSE if is_claimed else ExportEvent.REVOKE)
        self._keep(export, 0, {})

    def finish(
        self,
        request: str,
        num_tokens: int,
        blocks: Mapping[str, Blocks],
        prompt: Callable[[int], str],
        *,
        first_s: float | None = None,
        read_from: Mapping[str, int] = NONE,
        prefixes: Mapping[int, str] = MappingProxyType({}),
        weights_version: str = "",
    ) -> Handoff | None:
        """Pin a request that is computed, and return its handoff.

        Returns None if its readers are done with what was published of it, or were told that they
        get no more: :meth:`abort` it then.

        Its first lease is of ``first_s``, by default of the lease's usual length. With ``first_s``
        it is kept for a reader that may come, and :meth:`give_way` ends it. ``prefixes`` are
        digests of fewer tokens, by their number.
        """
        if request not in self._requests or self._requests[request].state is PINNED:
            self.open(request)
        export = self._requests[request]
        is_over = export.state is PUBLISHED and not self.leases.begin_first(export.lease)
        if export.state is LOST or is_over:
            return None
        self._move(export, ExportEvent.FINISH)
        if not export.lease:
            export.lease = self.leases.grant(request, first_s)
        export.gives_way = first_s is not None
        self._keep(export, num_tokens, blocks)
        groups = [group for group in blocks if self._groups[group].tokens_per_block is not None]
        return self._handoff(export, groups, prompt, read_from, prefixes, weights_version)

    def abort(self, request: str) -> None:
        """Stop exporting a request. Its readers fail."""
        export = self._requests.get(request)
        if export is None:
            return
        if export.lease:
            self.leases.revoke(export.lease)
            self._withdraw(export.room, export.lease)
        self._move(export, ExportEvent.ABORT)
        self._forget(request)

    def step(self) -> EndedExports:
        """Return what has ended since the last step. Call it in each step of the engine."""
        ended = self.leases.take_ended()
        released = []
        late = dict[str, KVPlanError]()
        for request in (*ended.done, *ended.late):
            export = self._requests.get(request)
            # aborted meanwhile
            if export is None or export.state not in (PUBLISHED, PINNED):
                continue
            self._withdraw(export.room, export.lease)
            if self._move(export, ExportEvent.LEASE_ENDED) is FREE:
                self._forget(request)
                released.append(request)
            else:
                self._keep(export, 0, {})
            if request in ended.late:
                expected = f"a reader that claims it within {self.leases.lease_s:g} s"
                if request in ended.old:
                    max_s = self.leases.max_lease_s
                    expected = f"a reader that is done within {max_s:g} s, which is max_lease_s"
                late[request] = KVPlanError(
                    "LEASE", f"export {request!r}", expected=expected, got="none"
                )
        num_stale = self.leases.num_refused - self._num_refused
        self._num_refused += num_stale
        return EndedExports((*released,), late, num_stale)

    def give_way(self, num_blocks: int) -> tuple[str, ...]:
        """End the oldest requests that are kept for a reader that may come, and return them.

        Their blocks, at least ``num_blocks`` if so many are kept, are free after the next step: the
        engine's own requests wait for them. One that a reader has claimed stays, but where the
        others are too few, its reader is asked to end the claim if it has not begun to read, by
        rule claim.C4. Call this in each step: with 0, no reader is asked any more.
        """
        ended, claimed = list[str](), dict[str, int]()
        for request, export in self._requests.items():
            if num_blocks <= 0:
                break
            if not export.gives_way:
                continue
            size = sum(each.ids.size for each in export.blocks.values())
            if self.leases.end_unclaimed(export.lease):
                ended.append(request)
                num_blocks -= size
            else:
                claimed[export.lease] = size
        wanted = set[str]()
        for lease, size in claimed.items():
            if num_blocks > 0:
                wanted.add(lease)
                num_blocks -= size
        self.leases.wanted = frozenset(wanted)
        return (*ended,)

    def reset(self) -> None:
        """End all leases: the next step releases what is pinned, and readers fail."""
        self.leases.end_all()

    def blocks_of(self, lease: str) -> Mapping[str, Blocks] | None:
        """Return the blocks that readers of a lease read, None if it has ended."""
        export = self._requests.get(lease.rpartition(" ")[0])
        return export.blocks if export is not None and export.lease == lease else None

    def __len__(self) -> int:
        return len(self._requests)

    def _move(self, export: _Export, event: ExportEvent) -> ExportState:
        export.state = after(TRANSITIONS, export.state, event)
        if export.state in (COMPUTING, LOST):
            export.lease = ""
        return export.state

    def _keep(self, export: _Export, num_tokens: int, blocks: Mapping[str, Blocks]) -> None:
        """Note which blocks readers may read, and count those of all requests."""
        self.num_blocks += sum(each.ids.size for each in blocks.values())
        self.num_blocks -= sum(each.ids.size for each in export.blocks.values())
        export.num_tokens, export.blocks = num_tokens, blocks

    def _forget(self, request: str) -> None:
        export = self._requests.pop(request)
        self._keep(export, 0, {})
        self._rooms.discard(export.room)

    def _handoff(
        self,
        export: _Export,
        groups: list[str],
        prompt: Callable[[int], str],
        read_from: Mapping[str, int],
        prefixes: Mapping[int, str],
        weights_version: str,
    ) -> Handoff:
        """Return the handoff of a request, with the first positions that ``groups`` have whole."""
        kept = dict[str, int]()
        for group in groups:
            size = self._groups[group].tokens_per_block
            assert size is not None
            kept[group] = max(first_listed(export.blocks[group], size), read_from.get(group, 0))
        return Handoff(
            source=self.source,
            lease=export.lease,
            num_tokens=export.num_tokens,
            prompt=prompt(export.num_tokens),
            blocks=export.blocks,
            kept=kept,
            prefixes=prefixes,
            weights_version=weights_version,
        )
