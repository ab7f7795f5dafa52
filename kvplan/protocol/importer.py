"""The importer: which requests an engine reads from others, from the claim to the last byte.

A request has a handoff when it arrives, or asks for it in a *room* in which prefill publishes it.
Its lease is claimed at once, since the engine may give it blocks much later. When it has blocks,
what is published is read, whole blocks alone, and then what is published next; with the whole
prompt come its windows and states. :data:`TRANSITIONS` is the whole life of an imported request:

    event       asking     claimed    reading    ending    refused
    PUBLISH     claimed    claimed    reading
    REFUSE      refused    refused    ending
    ALLOCATE               reading                         reading
    LAST                              ending
    END         ended      ended      ended      ended     ended

A request is *ending* when workers were told of its last read, or that none follows: its blocks stay
until they say that no byte of it can move, which is END. A request that is refused may get blocks
all the same, as engines that have promised its tokens do; then workers are told that it fails.

The importer has no thread and no socket: ``claims`` renews its claims, and ``rooms`` polls the
servers of its rooms. A connector tells it what the engine does and hands the partial reads that
:meth:`Importer.step` returns to a :class:`~kvplan.protocol.Reads` of each worker. Entries of rooms
are handled on the event loop's thread, since an engine that is paused polls nothing while leases
end. All other calls come from the engine's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import check_fields, instance, name
from kvplan._text import brief_repr
from kvplan.describe.blocks import POSITION_END, Blocks, Range
from kvplan.errors import KVPlanError
from kvplan.protocol.claims import Claims
from kvplan.protocol.groups import (
    CacheGroup,
    WholeBlocks,
    cache_groups,
    first_listed,
    whole_blocks,
    whole_groups,
)
from kvplan.protocol.handoff import Handoff
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.read import Read
from kvplan.protocol.room_contents import Published
from kvplan.protocol.rooms import Rooms
from kvplan.protocol.transitions import after

NONE: Final[Mapping[str, int]] = MappingProxyType({})

SHORT_PROMPT: Final = (
    "prefill has left the prompt's last token to decode, which does not compute it: "
    "with vLLM, set whole_prompt in the request's kv_transfer_params"
)
"""What to do about a prompt without its last position."""


class ImportState(enum.Enum):
    """What an imported request is."""

    ASKING = "asking"
    CLAIMED = "claimed"
    READING = "reading"
    ENDING = "ending"
    REFUSED = "refused"
    ENDED = "ended"


class ImportEvent(enum.Enum):
    """What happens to an imported request."""

    PUBLISH = enum.auto()
    REFUSE = enum.auto()
    ALLOCATE = enum.auto()
    LAST = enum.auto()
    END = enum.auto()


ASKING, CLAIMED, READING, ENDING, REFUSED, ENDED = ImportState

TRANSITIONS: Final[Mapping[tuple[ImportState, ImportEvent], ImportState]] = MappingProxyType(
    {
        (ASKING, ImportEvent.PUBLISH): CLAIMED,
        (ASKING, ImportEvent.REFUSE): REFUSED,
        (ASKING, ImportEvent.END): ENDED,
        (CLAIMED, ImportEvent.PUBLISH): CLAIMED,
        (CLAIMED, ImportEvent.REFUSE): REFUSED,
        (CLAIMED, ImportEvent.ALLOCATE): READING,
        (CLAIMED, ImportEvent.END): ENDED,
        (READING, ImportEvent.PUBLISH): READING,
        (READING, ImportEvent.REFUSE): ENDING,
        (READING, ImportEvent.LAST): ENDING,
        (READING, ImportEvent.END): ENDED,
        (ENDING, ImportEvent.END): ENDED,
        (REFUSED, ImportEvent.ALLOCATE): READING,
        (REFUSED, ImportEvent.END): ENDED,
    }
)
"""What a request becomes by what happens to it; nothing else may happen."""


@attrs.frozen
class PartialRead:
    """What workers do next for a request: read some of it, or report that it fails.

    It has a ``read`` of the request, or an ``error``. The one that ``is_last`` is the request's
    last. The first block of a group in ``partial`` lacks positions that the source has freed: no
    other request may find it. Raises ``TYPE`` for neither, ``NAME`` for another request's read.
    """

    request: str
    read: Read | None
    error: KVPlanError | None = None
    is_last: bool = True
    partial: Mapping[str, WholeBlocks] = attrs.field(factory=dict)

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "a partial read", name, "request")
        if self.error is not None:
            return
        # without a read the request would be right, and nothing would have been read
        instance(Read, self.read, "partial read without an error")
        if self.read is not None and self.read.request != self.request:
            raise KVPlanError(
                "NAME",
                f"read request {self.request!r}",
                expected="a read of the same request",
                got=f"one of {self.read.request!r}",
            )


@attrs.define(eq=False)
class _Import:
    """A request that is read.

    ``found`` and ``refusal`` are the latest that its room had, or its handoff; the engine's thread
    has ``seen`` some of it. Its prompt begins with the first ``num_shared`` positions of the
    handoff. The positions ``tokens`` are read into ``local`` blocks, of each group those from
    ``starts`` on.
    """

    prompt: Callable[[int], str]
    num_stale: int = 0
    min_tokens: int | None = None
    room: str = ""
    state: ImportState = ASKING
    found: Published | None = None
    refusal: KVPlanError | None = None
    seen: Published | None = None
    num_shared: int = POSITION_END
    local: Mapping[str, Blocks] = attrs.field(factory=dict)
    starts: dict[str, int] = attrs.field(factory=dict)
    tokens: Range = (0, 0)
    num_tokens: int = 0
    num_left: int = 0

    def move(self, event: ImportEvent) -> None:
        self.state = after(TRANSITIONS, self.state, event)


class Importer:
    """The requests of an engine that are read from others.

    ``groups`` are those of its cache. ``claims`` holds leases as ``reader``, a name of this start
    of the engine; without them another rank of the engine holds them. Handoffs are signed with
    ``key``. ``rooms`` asks for requests that prefill publishes in rooms. ``weights`` returns the
    version of the engine's weights. With ``to_block_end`` blocks move whole.

    :attr:`read_from` has by request and group the first position that was read, if its block was
    read in part. :attr:`siblings` are others that may store each block of the engine: where they
    are, no block is read in part. :attr:`num_claims` counts claims.
    """

    def __init__(
        self,
        groups: Mapping[str, CacheGroup],
        claims: Claims | None,
        reader: str,
        key: SharedKey,
        *,
        rooms: Rooms | None = None,
        weights: Callable[[], str] = str,
        to_block_end: bool = False,
    ) -> None:
        self._groups = cache_groups(groups)
        self._positioned = {
            group: value.tokens_per_block
            for group, value in groups.items()
            if value.tokens_per_block is not None
        }
        self._whole_groups = whole_groups(groups)
        self._claims = claims
        self._reader: str = name(reader, "reader")
        self._key = key
        self._rooms = rooms
        self._weights = weights
        self._to_block_end = to_block_end
        self._requests: dict[str, _Import] = {}
        # requests that are being read, and partial reads for the next step
        self._reading: dict[str, _Import] = {}
        self._partial_reads: list[PartialRead] = []
        self.read_from: dict[str, dict[str, int]] = {}
        self.siblings: set[str] = set()
        self.num_claims: int = 0

    # What arrives

    def claim(
        self,
        request: str,
        params: Mapping[str, Any],
        prompt: Callable[[int], str],
        *,
        num_stale: int = 0,
        min_tokens: int | None = None,
    ) -> None:
        """Import a request whose parameters have a handoff, and claim its lease.

        ``prompt`` digests its first tokens. The last ``num_stale`` positions that it shares with
        the handoff are not read. With ``min_tokens`` the engine may compute the request instead: it
        is read only if that saves computing as many positions, and if its source still has it when
        there are blocks for it.
        """
        record = _Import(prompt, num_stale, min_tokens)
        self._requests[name(request, "name of a request")] = record
        try:
            handoff = Handoff.of_params(params, self._key)
            handoff.check_weights(self._weights())
            record.num_shared = handoff.count_shared(prompt)
            self._hold(request, handoff)
            record.found = Published(handoff, (handoff.lease,), is_whole=True, entry={})
        except KVPlanError as error:
            record.refusal = error

    def ask(
        self,
        request: str,
        room: str,
        address: str,
        prompt: Callable[[int], str],
        num_tokens: int,
        num_left: int = 0,
    ) -> None:
        """Import a request of ``num_tokens`` that prefill publishes in a room.

        This engine computes the last ``num_left`` of them itself.
        """
        record = _Import(prompt, room=room, num_tokens=num_tokens, num_left=num_left)
        self._requests[name(request, "name of a request")] = record
        assert self._rooms is not None
        try:
            self._rooms.subscribe(
                self._name_of(request),
                room,
                address,
                lambda entry: self._take(request, record, entry),
            )
        except KVPlanError as error:
            record.refusal = error

    def refuse(self, request: str, error: KVPlanError) -> None:
        """Fail a request for a reason that the connector knows."""
        record = self._requests.setdefault(request, _Import(lambda _: ""))
        record.refusal = record.refusal or error

    def _take(self, request: str, record: _Import, entry: Any) -> bool:
        """Note an entry of the room, or why the request fails. Return whether it is the last.

        This runs on the event loop's thread, and raises nothing.
        """
        try:
            found = Published.of_entry(record.room, entry, self._key, record.found)
            self._check_entry(record, found)
            if record.found is None:
                self._hold(request, found.handoff)
        except KVPlanError as error:
            record.refusal = error
            return True
        except Exception as error:  # only this request fails
            expected = "an entry of this request"
            record.refusal = KVPlanError(
                "MESSAGE", f"read room {record.room}", expected=expected, got=f"{error!r}"
            )
            return True
        record.found = found
        return found.is_whole

    def _check_entry(self, record: _Import, found: Published) -> None:
        """Refuse an entry of another prompt, of other weights, or of too few or many tokens."""
        handoff = found.handoff
        handoff.check_weights(self._weights())
        num_shared, num_needed = handoff.num_tokens, record.num_tokens - record.num_left
        if found.is_whole:
            is_right = num_shared >= num_needed
            if is_right:
                num_shared = handoff.count_shared(record.prompt)
                is_right = num_shared >= num_needed
        else:
            is_right = num_shared < record.num_tokens
        if not is_right:
            quantity = (
                f"at least {num_needed}" if found.is_whole else f"less than {record.num_tokens}"
            )
            is_short = found.is_whole and not record.num_left and num_shared == num_needed - 1
            raise KVPlanError(
                "TOKENS",
                f"read request {record.room}",
                expected=f"{quantity} positions",
                got=f"{num_shared}",
                hint=SHORT_PROMPT if is_short else "",
            )
        if not found.is_whole:
            handoff.check_prompt(record.prompt(num_shared))

    def _name_of(self, request: str) -> str:
        """Return the name of a request as a reader: no other request of any engine has it."""
        return f"{self._reader} {request}"

    def _hold(self, request: str, handoff: Handoff) -> None:
        if self._claims is not None:
            self._claims.claim(handoff.source, handoff.lease, self._name_of(request))
        self.num_claims += 1

    # What the engine asks, and does

    def look(self, request: str) -> ImportState:
        """Return the state of a request, with what its room has by now."""
        record = self._requests.get(request)
        if record is None:
            return ENDED
        if record.state in (ASKING, CLAIMED):
            error = record.refusal or self._silence(request, record)
            if error is not None:
                record.refusal = error
                record.move(ImportEvent.REFUSE)
            elif record.found is not None:
                record.move(ImportEvent.PUBLISH)
        return record.state

    def error_of(self, request: str) -> KVPlanError | None:
        """Return the reason why a request is refused, if it is."""
        return self._requests[request].refusal

    def entry_of(self, request: str) -> Mapping[str, Any]:
        """Return the latest entry of a request's room."""
        found = self._requests[request].found
        return {} if found is None else found.entry

    def count(self, request: str, num_cached: int, num_tokens: int) -> int | None:
        """Return how many positions to read of a request that needs ``num_tokens``.

        They follow the first ``num_cached``, which the engine has cached. Returns None of a request
        of which prefill has published nothing yet: the engine asks again.
        """
        state = self.look(request)
        if state is ASKING:
            return None
        if state not in (CLAIMED, REFUSED):
            return 0
        record = self._requests[request]
        stop = max(num_cached, min(num_tokens, record.num_shared - record.num_stale))
        record.tokens = (num_cached, stop)
        if record.min_tokens is not None and record.found is not None:
            is_little = stop - num_cached < record.min_tokens
            if is_little or self._gap(record.found.handoff, record.tokens) is not None:
                return 0
        return stop - num_cached

    def skip(self, request: str) -> KVPlanError | None:
        """End a request of which nothing is read: all is cached, or the engine computes it.

        Returns what its handoff lacks, if that is the reason.
        """
        if self.look(request) not in (CLAIMED, REFUSED):
            return None
        record = self._requests[request]
        found = record.found
        gap = None if found is None else self._gap(found.handoff, record.tokens)
        self.end(request)
        return gap

    def read(
        self,
        request: str,
        local: Mapping[str, Blocks],
        num_tokens: int,
        starts: Mapping[str, int] = NONE,
        *,
        checks_prompt: bool = False,
    ) -> None:
        """Read ``num_tokens`` positions that were counted, into a request's blocks, once.

        A group of which less is cached than of others is read from ``starts`` on. With
        ``checks_prompt`` the prompt is compared again, since what its digest says of may have
        changed since the request was claimed.
        """
        if self.look(request) not in (CLAIMED, REFUSED):
            return
        record = self._requests[request]
        if checks_prompt and record.found is not None:
            try:
                record.found.handoff.count_shared(record.prompt)
            except KVPlanError as error:
                record.refusal = record.refusal or error
        record.move(ImportEvent.ALLOCATE)
        first, _ = record.tokens
        record.tokens, record.local = (first, first + num_tokens), local
        record.starts = {group: min(first, starts.get(group, first)) for group in self._positioned}
        self._reading[request] = record

    def give_up(self, request: str) -> None:
        """Read no more of a request. Workers report it when no byte of it can move any more."""
        if request in self._reading:
            action = f"read the rest of request {request!r}"
            got = "one that was given up"
            error = KVPlanError("TRANSFER", action, expected="one that goes on", got=got)
            self._partial_reads.append(self._last(request, error))

    def finish(self, request: str) -> Mapping[str, int]:
        """Stop reading a request that the engine is done with, and drop it if none of it is read.

        Returns what :attr:`read_from` has of it. A request whose bytes may move is dropped by
        :meth:`end`.
        """
        if self.look(request) in (READING, ENDING):
            self.give_up(request)
        else:
            self.end(request)
        return self.read_from.pop(request, NONE)

    def end(self, request: str) -> None:
        """End the claim of a request of which no byte can move any more, or which is not read."""
        record = self._requests.pop(request, None)
        if record is None:
            return
        self._reading.pop(request, None)
        record.move(ImportEvent.END)
        reader = self._name_of(request)
        if record.room and self._rooms is not None:
            # nothing is delivered afterwards
            self._rooms.unsubscribe(reader)
        if record.found is not None and self._claims is not None:
            self._claims.release(record.found.handoff.source, record.found.handoff.lease, reader)

    def step(self) -> list[PartialRead]:
        """Return what workers do next. Call it in each step of the engine."""
        self._do_without()
        for request, record in [*self._reading.items()]:
            try:
                self._check(request, record)
                partial_read = self._next(request, record)
            except KVPlanError as error:
                partial_read = self._last(request, error)
            if partial_read is not None:
                self._partial_reads.append(partial_read)
        partial_reads = self._partial_reads
        self._partial_reads = []
        return partial_reads

    def __len__(self) -> int:
        return len(self._requests)

    def _do_without(self) -> None:
        """End claims of requests that the engine can compute, and that have no blocks yet.

        These are the claims that are refused, or whose blocks are needed back, by rule claim.C4.
        """
        for request, record in [*self._requests.items()]:
            is_optional = record.min_tokens is not None and record.state in (ASKING, CLAIMED)
            if not is_optional or record.found is None or self._claims is None:
                continue
            handoff = record.found.handoff
            claim = (handoff.source, handoff.lease, self._name_of(request))
            if self._claims.refusal(*claim) is not None or self._claims.is_wanted(*claim):
                self.end(request)

    # What is read

    def _check(self, request: str, record: _Import) -> None:
        """Raise the reason why a request cannot be read, if there is one."""
        error = record.refusal or self._silence(request, record)
        if error is not None:
            raise error
        assert record.found is not None
        handoff = record.found.handoff
        # the weights may have changed since it was claimed
        handoff.check_weights(self._weights())
        if self._claims is not None:
            refusal = self._claims.refusal(handoff.source, handoff.lease, self._name_of(request))
            if refusal is not None:
                raise refusal

    def _silence(self, request: str, record: _Import) -> KVPlanError | None:
        """Return an error if prefill has not published more of a request in time."""
        is_whole = record.found is not None and record.found.is_whole
        if not record.room or is_whole or self._rooms is None:
            return None
        return self._rooms.silence(self._name_of(request))

    def _next(self, request: str, record: _Import) -> PartialRead | None:
        """Read what was published since the last time, None if that is nothing."""
        found = record.found
        if found is None or found is record.seen:
            return None
        record.seen = found
        if found.is_whole:
            last_read = self._read_whole(request, record, found.handoff)
            record.move(ImportEvent.LAST)
            del self._reading[request]
            return last_read
        record.move(ImportEvent.PUBLISH)
        return self._read_more(request, record, found.handoff)

    def _last(self, request: str, error: KVPlanError) -> PartialRead:
        """Return the last read, which tells workers that a request fails."""
        self._reading.pop(request).move(ImportEvent.REFUSE)
        return PartialRead(request, None, error)

    def _read_more(self, request: str, record: _Import, handoff: Handoff) -> PartialRead | None:
        """Read what was computed since the last read, of groups that keep all positions.

        A block that is not full comes with the next read. None if no block is full.
        """
        local = {group: Blocks([]) for group in record.local}
        tokens = dict[str, Range]()
        for group in self._whole_groups:
            size = self._positioned[group]
            first, stop = (
                record.starts[group],
                min(handoff.num_tokens // size * size, record.tokens[1]),
            )
            if stop > first:
                self._whole_blocks(group, (first, stop), first, handoff)
                local[group] = record.local[group]
                tokens[group] = (first, stop)
                record.starts[group] = stop
        if not tokens:
            return None
        return PartialRead(request, self._read(request, handoff, local, tokens), is_last=False)

    def _read_whole(self, request: str, record: _Import, handoff: Handoff) -> PartialRead:
        """Read all positions that were not read before, and all windows and states."""
        self._check_states(handoff, *record.tokens)
        positions, partial = dict[str, Range](), dict[str, WholeBlocks]()
        for group, first in record.starts.items():
            listed = first_listed(record.local[group], self._positioned[group])
            whole = self._whole_blocks(group, (first, record.tokens[1]), listed, handoff)
            positions[group] = (whole.start, whole.stop)
            # The source may lack the beginning of a group's first block here.
            if whole.start > max(first, listed):
                self._check_siblings(request, group, whole)
                partial[group] = whole
                self.read_from.setdefault(request, {})[group] = whole.start
        for group, value in self._groups.items():
            slots = value.slots_of(record.tokens[1])
            if slots is not None:
                positions[group] = slots
        read = self._read(
            request, handoff, record.local, positions, to_block_end=self._to_block_end
        )
        return PartialRead(request, read, partial=partial)

    def _read(
        self,
        request: str,
        handoff: Handoff,
        local: Mapping[str, Blocks],
        tokens: Mapping[str, Range],
        *,
        to_block_end: bool = False,
    ) -> Read:
        return Read(
            request=request,
            source=handoff.source,
            lease=handoff.lease,
            local=local,
            remote=handoff.blocks,
            tokens=tokens,
            to_block_end=to_block_end,
        )

    def _whole_blocks(
        self, group: str, tokens: Range, listed: int, handoff: Handoff
    ) -> WholeBlocks:
        """Return the positions of a group that are read, from ``listed`` on if they are kept."""
        attended = self._groups[group].attended(tokens[1])
        size = self._positioned[group]
        return whole_blocks(tokens, attended, size, listed, handoff.first_kept(group, attended))

    def _gap(self, handoff: Handoff, tokens: Range) -> KVPlanError | None:
        """Return what a handoff lacks to go on after ``tokens``, None if it lacks nothing."""
        first, stop = tokens
        try:
            self._check_states(handoff, first, stop)
            for group in self._positioned:
                self._whole_blocks(group, tokens, first, handoff)
        except KVPlanError as error:
            return error
        return None

    def _check_states(self, handoff: Handoff, first: int, stop: int) -> None:
        """Refuse a state of another position than the last one that is read."""
        has_states = len(self._positioned) < len(self._groups)
        if has_states and first < stop != handoff.num_tokens:
            raise KVPlanError(
                "TOKENS",
                f"read {handoff.lease!r} from {handoff.source}",
                expected=f"states after {stop} positions",
                got=f"those after {handoff.num_tokens}",
                hint="prefill and decode get the same prompt",
                stop=stop,
                num_tokens=handoff.num_tokens,
            )

    def _check_siblings(self, request: str, group: str, whole: WholeBlocks) -> None:
        """Refuse a block that is read in part where others may store it."""
        if self.siblings:
            raise KVPlanError(
                "BLOCKS",
                f"read request {request!r}",
                expected=f"whole blocks of {group}, from {whole.first_whole} on, "
                f"since {', '.join(sorted(self.siblings))} may store what is read",
                got=f"positions from {whole.start} on",
                hint="engines with equal block sizes, or decode without other connectors, "
                "can read it",
                group=group,
                siblings=tuple(sorted(self.siblings)),
            )
