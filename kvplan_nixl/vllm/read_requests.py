"""Requests that are read from other engines: their handoffs, their claims, and their blocks."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import attrs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvplan import Blocks, KVPlanError
from kvplan.describe.blocks import POSITION_END, Range
from kvplan.protocol import Claims, Handoff, Read, WholeBlocks, send_claims, whole_blocks
from kvplan.protocol.rooms import Rooms
from kvplan.protocol.system import TOKEN_BYTES, System
from kvplan_nixl.vllm.description import first_attended
from kvplan_nixl.vllm.engine_state import EngineState
from kvplan_nixl.vllm.metadata import KvplanMetadata
from kvplan_nixl.vllm.metrics import KvplanStats
from kvplan_nixl.vllm.requests import has_handoff, is_computed, params_of
from kvplan_nixl.vllm.rooms import ROOM, RoomRequest, address_of, room_of
from kvplan_nixl.vllm.settings import ConnectorSettings
from kvplan_nixl.vllm.tables import BlockTables

logger = init_logger(f"vllm.{__name__}")


@attrs.define(eq=False)
class _Destination:
    """The blocks into which a request is read, up to the position ``stop``.

    Of each group with positions, ``starts`` has the first one that is not read yet, and ``listed``
    the first one of its blocks.
    """

    local: dict[str, Blocks]
    starts: dict[str, int]
    listed: dict[str, int]
    stop: int


@attrs.define(eq=False)
class _Reading:
    """A request that is read: its handoff, or the error that it cannot be read for.

    Its prompt begins with the first ``num_shared`` positions of the handoff, and the engine has
    cached ``num_cached`` of them. Once ``is_begun``, it is not read again: its parameters cannot
    tell, which children of one request may share. One with a ``room`` has a handoff when prefill
    has published a part of it, which is the latest one.
    """

    handoff: Handoff | None
    error: KVPlanError | None
    num_shared: int = POSITION_END
    num_cached: int = 0
    is_begun: bool = False
    room: RoomRequest | None = None
    destination: _Destination | None = None


def _given_up(request: str) -> KVPlanError:
    """Return the error of a request that is not read to its end."""
    action = f"read the rest of request {request!r}"
    return KVPlanError("TRANSFER", action, expected="one that goes on", got="one that was given up")


class ReadRequests:
    """The requests of an engine that have a handoff, or ask prefill for one.

    A request is read from what its engine has cached up to what its prompt shares with the handoff,
    at once or in parts. ``read_from`` has by request and group the first position that was read, if
    its block was read in part.
    """

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        settings: ConnectorSettings,
        tables: BlockTables,
        stats: KvplanStats,
        system: System,
        state: EngineState,
    ) -> None:
        self.siblings: set[str] = set()
        self.read_from: dict[str, dict[str, int]] = {}
        self._settings = settings
        self._system = system
        self._state = state
        self._key = settings.access().key
        self._tables = tables
        self._stats = stats
        self._caches_prefixes = bool(config.cache_config.enable_prefix_caching)
        self._drafts_know_next = config.num_prefill_lookahead_tokens > 0
        # the slots after the last position must stay zero if the engine needs them so
        self._to_block_end = not cache.needs_kv_cache_zeroing
        send = partial(send_claims, system=system)
        self._claims = Claims(logger, send, system, settings.max_peers)
        self._reader = system.token_hex(TOKEN_BYTES)  # of this start
        self._rooms = Rooms(logger, self._key, system, max_servers=settings.max_peers)
        # by request, until its claim ends
        self._reading: dict[str, _Reading] = {}
        # those that are read in parts, of which others may follow
        self._in_parts: dict[str, _Reading] = {}
        # what workers have not been told yet
        self._step = KvplanMetadata()

    def close(self) -> None:
        """Send no more claims."""
        self._claims.close()

    def add(self, request: Request) -> None:
        """Claim the lease of a request that has arrived, or ask prefill for its handoffs."""
        params = params_of(request)
        is_read = bool(params.get("do_remote_prefill"))
        # The next turn of a conversation has the last one's handoff, and asks for another.
        is_next_turn = is_computed(request) and has_handoff(request)
        if is_read and params.get(ROOM) and not has_handoff(request):
            self._reading[request.request_id] = self._ask(request)
        elif is_read or is_next_turn:
            self._reading[request.request_id] = self._claim(request)

    def _claim(self, request: Request) -> _Reading:
        try:
            handoff = Handoff.of_params(params_of(request), self._key)
            handoff.check_weights(self._state.identity.version)
            num_shared = handoff.count_shared(partial(self._state.prompt_of, request))
            # before the request waits for blocks, since the first lease is short
            self._claims.begin(handoff.source, handoff.lease, self._reader_name(request.request_id))
        except KVPlanError as error:
            return _Reading(None, error)
        self._stats.count("num_claims")
        return _Reading(handoff, None, num_shared)

    def _ask(self, request: Request) -> _Reading:
        """Ask prefill for what it computes of a request."""
        params = params_of(request)
        try:
            reader = self._reader_name(request.request_id)
            room = RoomRequest(
                room_of(params),
                request,
                self._state,
                reader,
                self._claims,
                self._key,
                self._system,
                self._settings.prefill_timeout_s,
            )
            self._rooms.want(reader, room.room, address_of(params), room.take)
        except KVPlanError as error:
            return _Reading(None, error)
        return _Reading(None, None, room=room)

    def _reader_name(self, request: str) -> str:
        """Return the name of a request as a reader: no other request of any engine has it."""
        return f"{self._reader} {request}"

    def count_tokens(self, request: Request, num_cached: int) -> int | None:
        """Return the number of positions to read after the first ``num_cached`` of a request.

        Returns None of a request of which prefill has published nothing yet.
        """
        reading = self._reading.get(request.request_id)
        if reading is None or reading.is_begun:
            return 0
        if reading.room is not None and not self._has_begun(reading, reading.room):
            return None
        reading.num_cached = num_cached
        first, stop = self._shared(request, reading)
        num_tokens = stop - first
        # An engine that computes for another one computes what a handoff lacks, or has little of.
        if reading.handoff is not None and is_computed(request):
            is_little = num_tokens < self._settings.kv_recompute_threshold
            if is_little or self._gap(reading.handoff, (first, stop)) is not None:
                return 0
        return num_tokens

    def _has_begun(self, reading: _Reading, room: RoomRequest) -> bool:
        """Return whether prefill has published something of a request, or never will."""
        reading.handoff = room.handoff
        try:
            room.check()
        except KVPlanError as error:
            reading.error = error
        return reading.handoff is not None or reading.error is not None

    def _shared(self, request: Request, reading: _Reading) -> Range:
        """Return the positions that a request shares with its handoff, and has not cached.

        An engine computes the last token of a prompt itself.
        """
        num_shared = reading.num_shared
        # What drafts cache at the last position is of the token that came next then.
        if self._drafts_know_next and is_computed(request):
            num_shared -= 1
        stop = min(int(request.num_prompt_tokens) - 1, num_shared)
        return reading.num_cached, max(reading.num_cached, stop)

    def _gap(self, handoff: Handoff, tokens: Range) -> KVPlanError | None:
        """Return why a handoff lacks what positions after ``tokens`` need, None if it does not."""
        first, stop = tokens
        if self._tables.states and first < stop != handoff.num_tokens:
            return KVPlanError(
                "TOKENS",
                f"read {handoff.lease!r} from {handoff.source}",
                expected=f"states after {stop} positions",
                got=f"those after {handoff.num_tokens}",
                hint="prefill and decode get the same prompt",
                stop=stop,
                num_tokens=handoff.num_tokens,
            )
        try:
            for group in self._tables.positioned:
                self._whole_blocks(group, tokens, first, handoff)
        except KVPlanError as error:
            return error
        return None

    def begin(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Read ``num_tokens`` positions of a request into its blocks. A request is read once."""
        reading = self._reading.get(request.request_id)
        if reading is None or reading.is_begun:
            return
        reading.is_begun = True
        stop = reading.num_cached + num_tokens
        # All that could be read is cached, or this engine computes it.
        if num_tokens == 0:
            gap = reading.handoff and self._gap(reading.handoff, self._shared(request, reading))
            if gap is not None:
                logger.warning("request %r is computed: %s", request.request_id, gap)
            self._end_claim(request.request_id)
            return
        try:
            self._check_claim(request.request_id, reading)
            if request.lora_request is not None and reading.handoff is not None:
                # its folder may have been overwritten since it was claimed
                reading.handoff.count_shared(partial(self._state.prompt_of, request))
            reading.destination = self._destination(reading, blocks, stop)
            if reading.room is None:
                self._step.reads.append(self._read_whole(request.request_id, reading))
            else:
                self._in_parts[request.request_id] = reading
                self._stats.count("num_claims")
        except KVPlanError as error:
            self._step.refused[request.request_id] = error

    def _check_claim(self, request: str, reading: _Reading) -> None:
        """Raise the reason why a request cannot be read, if there is one."""
        if reading.error is not None:
            raise reading.error
        handoff = reading.handoff
        assert handoff is not None
        # the weights may have changed since it was claimed
        handoff.check_weights(self._state.identity.version)
        refusal = self._claims.refusal(handoff.source, handoff.lease, self._reader_name(request))
        if refusal is not None:
            raise refusal

    def _destination(self, reading: _Reading, blocks: KVCacheBlocks, stop: int) -> _Destination:
        """Return where the positions from the cached ones to ``stop`` are read to."""
        local = self._tables.of_ids(blocks.get_block_ids())
        starts = dict[str, int]()
        listed = dict[str, int]()
        for group in self._tables.positioned:
            # A group may have cached less than others.
            starts[group] = min(reading.num_cached, self._tables.first_uncached(group, blocks))
            listed[group] = self._tables.first_listed(group, local[group])
        return _Destination(local, starts, listed, stop)

    def _read_whole(self, request: str, reading: _Reading) -> Read:
        """Return the read of all positions that are not read yet, into all groups.

        Raises the reason why the request cannot be read.
        """
        handoff = reading.handoff
        destination = reading.destination
        assert handoff is not None
        assert destination is not None
        stop = destination.stop
        gap = self._gap(handoff, (reading.num_cached, stop))
        if gap is not None:
            raise gap
        positions = dict[str, WholeBlocks]()
        for group, first in destination.starts.items():
            listed = destination.listed[group]
            whole = self._whole_blocks(group, (first, stop), listed, handoff)
            positions[group] = whole
            # The source may lack the beginning of a group's first block here.
            if whole.start > max(first, listed):
                self._leave_uncached(request, group, whole)
                self.read_from.setdefault(request, {})[group] = whole.start
        return Read(
            request=request,
            source=handoff.source,
            lease=handoff.lease,
            local=destination.local,
            remote=handoff.blocks,
            tokens={group: (whole.start, whole.stop) for group, whole in positions.items()},
            to_block_end=self._to_block_end,
        )

    def _read_part(self, request: str, reading: _Reading) -> Read | None:
        """Return the read of what is computed since the last part, without windows and states.

        Returns None if no block of it is full: that comes with the next part. Raises the reason why
        the request cannot be read.
        """
        handoff = reading.handoff
        destination = reading.destination
        assert handoff is not None
        assert destination is not None
        local = {group: Blocks([]) for group in destination.local}
        tokens = dict[str, Range]()
        for group in self._tables.whole_groups:
            size = self._tables.block_sizes[group]
            stop = min(handoff.num_tokens // size * size, destination.stop)
            first = destination.starts[group]
            if stop > first:
                self._whole_blocks(group, (first, stop), first, handoff)
                local[group] = destination.local[group]
                tokens[group] = (first, stop)
                destination.starts[group] = stop
        if not tokens:
            return None
        return Read(
            request=request,
            source=handoff.source,
            lease=handoff.lease,
            local=local,
            remote=handoff.blocks,
            tokens=tokens,
        )

    def _read_on(self, request: str, reading: _Reading) -> None:
        """Read what prefill has published of a request since the last step, if that is anything."""
        assert reading.room is not None
        try:
            self._check_claim(request, reading)
            published = reading.room.take_new()
            if published is None:
                return
            reading.handoff = published.handoff
            if published.is_whole:
                self._step.reads.append(self._read_whole(request, reading))
                del self._in_parts[request]
            else:
                part = self._read_part(request, reading)
                self._step.parts += [] if part is None else [part]
        except KVPlanError as error:
            self._read_no_more(request, error)

    def _read_no_more(self, request: str, error: KVPlanError) -> None:
        """Have workers report a request of which no further part is read, if there may be one."""
        if self._in_parts.pop(request, None) is not None:
            self._step.refused[request] = error

    def _whole_blocks(
        self, group: str, tokens: Range, listed: int, handoff: Handoff
    ) -> WholeBlocks:
        """Return the positions of a group that are read, from ``listed`` on if they are kept."""
        attended = first_attended(self._tables.groups[group], tokens[1])
        return whole_blocks(
            tokens,
            attended=attended,
            tokens_per_block=self._tables.block_sizes[group],
            listed=listed,
            kept=handoff.first_kept(group, attended),
        )

    def _leave_uncached(self, request: str, group: str, whole: WholeBlocks) -> None:
        """Keep a block that is read in part out of the prefix cache.

        Raises ``BLOCKS`` where another connector may store it, which nothing keeps from it.
        """
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
        if self._caches_prefixes:
            self._tables.leave_uncached(request, group, whole.first_whole)

    def _end_claim(self, request: str) -> None:
        """End the claim of a request that is read, or will not be."""
        reading = self._reading.pop(request)
        handoff = reading.handoff
        reader = self._reader_name(request)
        if reading.room is not None:
            self._rooms.forget(reader)
            # a part may have been taken just now
            handoff = reading.room.handoff
        if handoff is not None:
            self._claims.end(handoff.source, handoff.lease, reader)

    def end(self, requests: set[str], failed: Collection[str] = ()) -> None:
        """End the claims of requests whose reads have ended in all workers.

        No more is read of those that have ``failed``.
        """
        for request in self._in_parts.keys() & failed:
            self._read_no_more(request, _given_up(request))
        # The claims of some may have ended before.
        for request in requests & self._reading.keys():
            self._end_claim(request)

    def finish(self, request: str) -> dict[str, int]:
        """Read no more of a request that has finished, and forget it.

        Returns what ``read_from`` has of it.
        """
        reading = self._reading.get(request)
        # A request may be aborted before it was read.
        if reading is not None and not reading.is_begun:
            self._end_claim(request)
        self._read_no_more(request, _given_up(request))
        return self.read_from.pop(request, {})

    def take_step(self) -> KvplanMetadata:
        """Return what workers read in this step."""
        self._stats.count_total("num_failed_notifications", self._claims.num_unanswered)
        self._stats.count_total("num_refused_claims", self._claims.num_refused)
        for request, reading in [*self._in_parts.items()]:
            self._read_on(request, reading)
        step = self._step
        self._step = KvplanMetadata()
        return step
