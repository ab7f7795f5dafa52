"""The connector's part in vLLM's scheduler.

It decides which requests are read, and whose blocks stay for a reader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from kvplan import Blocks, KVPlanError
from kvplan.connector import (
    Claims,
    EndedLeases,
    Handoff,
    Leases,
    Listener,
    Read,
    WholeBlocks,
    send_claims,
    whole_blocks,
)
from kvplan.connector.access import TOKEN_BYTES
from kvplan.connector.digest import joined
from kvplan.connector.rooms import Rooms
from kvplan.connector.system import SYSTEM, System
from kvplan.describe.blocks import POSITION_END, Range
from kvplan_nixl.vllm.description import (
    check_kinds,
    first_attended,
    frees_blocks,
    prompt_of,
)
from kvplan_nixl.vllm.metadata import KvplanMetadata, KvplanWorkerMetadata
from kvplan_nixl.vllm.metrics import KvplanStats
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


@attrs.define(eq=False)
class _Lent:
    """A request whose blocks stay for readers: its lease, and its block tables by group.

    ``num_tokens`` positions are computed, and others follow if it ``is_part``. Such a request may
    outlive its lease, which ``is_over`` then.
    """

    lease: str
    tables: dict[str, Blocks]
    num_tokens: int
    is_part: bool = False
    is_over: bool = False


@attrs.define(eq=False)
class _Publication:
    """A request that is published in a room while it is computed.

    It began with ``num_found`` positions of the prefix cache, which may still be computed for
    another request until it has computed more itself.
    """

    room: str
    request: Request
    num_found: int = POSITION_END


def _has_handoff(params: Mapping[str, Any]) -> bool:
    """Return whether the parameters of a request have a handoff."""
    return bool(params.get("remote_block_ids"))


def _begun(scheduled: SchedulerOutput) -> set[str]:
    """Return the requests whose first step this is, also of those that were preempted before."""
    resumed: set[str] = scheduled.scheduled_cached_reqs.resumed_req_ids
    return resumed.union(request.req_id for request in scheduled.scheduled_new_reqs)


def _given_up(request: str) -> KVPlanError:
    """Return the error of a request that is not read to its end."""
    action = f"read the rest of request {request!r}"
    return KVPlanError("TRANSFER", action, expected="one that goes on", got="one that was given up")


def _is_computed(request: Request) -> bool:
    """Return whether an engine is asked to compute a request for another one."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


class Scheduler:
    """Prefill and decode in one: a request's ``kv_transfer_params`` say which one it meets.

    A request with a handoff reads the positions that its prompt shares, and computes the others,
    at least the last one. One with a transfer id asks prefill for handoffs, and reads the prompt
    part by part. Windows and states come with the last part. If blocks would be freed that the last
    token attends to, or a state would have passed it, an engine that computes for decode stops one
    token short of the prompt. If drafts use the next token too, it must generate this one.
    """

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        settings: ConnectorSettings,
        system: System = SYSTEM,
    ) -> None:
        assert config.kv_transfer_config is not None
        check_kinds(cache)
        self._transfer = config.kv_transfer_config
        self._settings = settings
        self._system = system
        self._access = settings.access()
        self._caches_prefixes = bool(config.cache_config.enable_prefix_caching)
        self._tables = BlockTables(config, cache)
        # the groups that keep all positions, which may be read before all are computed
        self._whole_groups: list[str] = [
            name for name, group in self._tables.groups.items() if not frees_blocks(group)
        ]
        self._stops_short = len(self._whole_groups) < len(self._tables.groups)
        self._drafts_know_next = config.num_prefill_lookahead_tokens > 0
        self._vocabulary = range(config.model_config.get_vocab_size())
        # the slots after the last position must stay zero if the engine needs them so
        self._to_block_end = not cache.needs_kv_cache_zeroing
        self._managers: Sequence[SingleTypeKVCacheManager] = ()
        self._siblings: set[str] = set()
        self._listener: Listener | None = None
        self._leases = Leases(settings.lease_s, system.monotonic, system.token_hex)
        self._lent: dict[str, _Lent] = {}
        send = partial(send_claims, access=self._access, system=system)
        self._claims = Claims(logger, send, system, settings.max_peers)
        self._reader = system.token_hex(TOKEN_BYTES)  # of this start
        self._rooms = Rooms(logger, self._access, settings.max_peers, system)
        self._reading: dict[str, _Reading] = {}
        # those that are read in parts, of which others may follow
        self._in_parts: dict[str, _Reading] = {}
        # those that others may read when they have finished
        self._lendable: dict[str, Request] = {}
        self._publications: dict[str, _Publication] = {}
        # by request and group: the first position that was read, if its block was read in part
        self._read_from: dict[str, dict[str, int]] = {}
        self._step = KvplanMetadata()
        self.stats = KvplanStats()

    def set_managers(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        """Take the managers of all cache groups, which register blocks in the prefix cache."""
        self._managers = managers

    def set_siblings(self, siblings: set[str]) -> None:
        """Take the names of the engine's other connectors, which may store the blocks it fills.

        vLLM's OffloadingConnector stores a block by its hash, also one that has no place in the
        prefix cache.
        """
        self._siblings = siblings

    def serve_offers(self, envelopes: Sequence[bytes]) -> None:
        """Serve the envelopes of all workers to other engines, if they may read from this one.

        Raises ``WORKER`` where another connector's took their place: vLLM's MultiConnector passes
        on what the first of its connectors has.
        """
        if not (self._transfer.is_kv_producer or self._settings.bidirectional_kv_xfer):
            return
        if not envelopes:
            raise KVPlanError(
                "WORKER",
                "serve the offers of an engine",
                expected="one of each worker",
                got="none",
                hint="name KvplanConnector before other connectors that shake hands",
            )
        settings = self._settings
        assert self._transfer.engine_id is not None
        self._listener = Listener(
            self._transfer.engine_id,
            settings.host,
            envelopes,
            self._leases,
            port=settings.port,
            bind=settings.bind or settings.host,
            access=self._access,
            system=self._system,
        )
        logger.info("%s serves the offers of %d workers", self._listener.source, len(envelopes))

    def close(self) -> None:
        """Stop serving."""
        self._claims.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def add(self, request: Request) -> None:
        """Take a request that has arrived: claim its lease, or shorten its prompt for decode."""
        params = request.kv_transfer_params or {}
        if self._is_lendable(request):
            self._lendable[request.request_id] = request
            self._open_room(request)
        # The next turn of a conversation has the last one's handoff, and asks for another.
        is_next_turn = _is_computed(request) and _has_handoff(params)
        if params.get("do_remote_prefill") and params.get(ROOM) and not _has_handoff(params):
            self._reading[request.request_id] = self._ask(request)
        elif params.get("do_remote_prefill") or is_next_turn:
            self._reading[request.request_id] = self._claim(request)
        if self._stops_short and _is_computed(request) and request.num_prompt_tokens > 1:
            self._stop_short(request)

    def _is_lendable(self, request: Request) -> bool:
        """Return whether others may read a request when it has finished."""
        params = request.kv_transfer_params or {}
        is_answered = params.get("do_remote_prefill") and self._settings.bidirectional_kv_xfer
        return self._listener is not None and bool(_is_computed(request) or is_answered)

    def _claim(self, request: Request) -> _Reading:
        try:
            handoff = Handoff.of_params(request.kv_transfer_params or {}, self._access.key)
            num_shared = handoff.count_shared(partial(prompt_of, request))
            # before the request waits for blocks, since the first lease is short
            self._claims.begin(handoff.source, handoff.lease, self._reader_name(request.request_id))
        except KVPlanError as error:
            return _Reading(None, error)
        self.stats.count("num_claims")
        return _Reading(handoff, None, num_shared)

    def _ask(self, request: Request) -> _Reading:
        """Ask prefill for what it computes of a request."""
        params = request.kv_transfer_params or {}
        try:
            reader = self._reader_name(request.request_id)
            room = RoomRequest(
                room_of(params),
                request,
                reader,
                self._claims,
                self._access.key,
                self._system,
                self._settings.prefill_timeout_s,
            )
            self._rooms.want(reader, room.room, address_of(params), room.take)
        except KVPlanError as error:
            return _Reading(None, error)
        return _Reading(None, None, room=room)

    def _open_room(self, request: Request) -> None:
        """Publish a request while it is computed, if a router gave it a transfer id of its own."""
        params = request.kv_transfer_params or {}
        if not _is_computed(request) or not params.get(ROOM):
            return
        try:
            room = room_of(params)
            if any(publication.room == room for publication in self._publications.values()):
                expected = "one of each request"
                raise KVPlanError("NAME", f"open room {room}", expected=expected, got="one in use")
        except KVPlanError as error:
            # its handoff comes with the answer
            logger.warning("request %r is not published: %s", request.request_id, error)
        else:
            self._publications[request.request_id] = _Publication(room, request)

    def _reader_name(self, request: str) -> str:
        """Return the name of a request as a reader: no other request of any engine has it."""
        return f"{self._reader} {request}"

    def _stop_short(self, request: Request) -> None:
        """Shorten a prompt by the token that decode computes itself."""
        if request.prompt_token_ids is not None:
            last_token = request.prompt_token_ids.pop()
            # a grammar would end the request at a token that it does not know
            is_free = request.sampling_params is not None and not request.use_structured_output
            if self._drafts_know_next and is_free and last_token in self._vocabulary:
                request.sampling_params.allowed_token_ids = [last_token]
        if request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-1]
        del request._all_token_ids[-1]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1

    def count_tokens_to_read(self, request: Request, num_cached: int) -> int | None:
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
        if reading.handoff is not None and _is_computed(request):
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
        if self._drafts_know_next and _is_computed(request):
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
            for group in self._tables.indices.keys() - self._tables.states:
                self._whole_blocks(group, tokens, first, handoff)
        except KVPlanError as error:
            return error
        return None

    def begin_read(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
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
            reading.destination = self._destination(reading, blocks, stop)
            if reading.room is None:
                self._step.reads.append(self._read_whole(request.request_id, reading))
            else:
                self._in_parts[request.request_id] = reading
                self.stats.count("num_claims")
        except KVPlanError as error:
            self._step.refused[request.request_id] = error

    def _check_claim(self, request: str, reading: _Reading) -> None:
        """Raise the reason why a request cannot be read, if there is one."""
        if reading.error is not None:
            raise reading.error
        handoff = reading.handoff
        assert handoff is not None
        refusal = self._claims.refusal(handoff.source, handoff.lease, self._reader_name(request))
        if refusal is not None:
            raise refusal

    def _destination(self, reading: _Reading, blocks: KVCacheBlocks, stop: int) -> _Destination:
        """Return where the positions from the cached ones to ``stop`` are read to."""
        local = self._tables.of_ids(blocks.get_block_ids())
        starts = dict[str, int]()
        listed = dict[str, int]()
        for group in self._tables.indices.keys() - self._tables.states:
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
                self._read_from.setdefault(request, {})[group] = whole.start
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
        for group in self._whole_groups:
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
        if self._siblings:
            raise KVPlanError(
                "BLOCKS",
                f"read request {request!r}",
                expected=f"whole blocks of {group}, from {whole.first_whole} on, "
                f"since {', '.join(sorted(self._siblings))} may store what is read",
                got=f"positions from {whole.start} on",
                hint="engines with equal block sizes, or decode without other connectors, "
                "can read it",
                group=group,
                siblings=tuple(sorted(self._siblings)),
            )
        if not self._caches_prefixes:
            return
        manager = self._managers[self._tables.indices[group]]
        # vLLM caches a request's blocks from this ordinal on, and takes earlier ones for cached.
        num_blocks = whole.first_whole // manager.block_size
        num_cached = manager.num_cached_block.get(request, 0)
        manager.num_cached_block[request] = max(num_cached, num_blocks)

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

    def end_reads(self, requests: set[str], failed: Collection[str] = ()) -> None:
        """End the claims of requests whose reads have ended in all workers.

        No more is read of those that have ``failed``.
        """
        for request in self._in_parts.keys() & failed:
            self._read_no_more(request, _given_up(request))
        # The claims of some may have ended before.
        for request in requests & self._reading.keys():
            self._end_claim(request)

    def hand_over(self, request: Request, ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Return the parameters with which others read a finished request, whose blocks stay.

        Returns None if nobody reads it; then its blocks are free.
        """
        self._lendable.pop(request.request_id, None)
        reading = self._reading.get(request.request_id)
        # A request may be aborted before it was read.
        if reading is not None and not reading.is_begun:
            self._end_claim(request.request_id)
        self._read_no_more(request.request_id, _given_up(request.request_id))
        read_from = self._read_from.pop(request.request_id, {})
        is_done = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        handoff = None
        if self._is_lendable(request) and is_done and any(ids):
            handoff = self._lend(request, ids, read_from)
        if handoff is None:
            self._revoke(request.request_id)
            self._publications.pop(request.request_id, None)
            return None
        params = handoff.params(self._access.key)
        publication = self._publications.get(request.request_id)
        if publication is not None and self._listener is not None:
            self._listener.rooms.put(publication.room, {"handoff": params, "is_whole": True})
        is_computed = _is_computed(request)
        flags = {"do_remote_prefill": is_computed, "do_remote_decode": not is_computed}
        return {**flags, **params}

    def _lend(
        self, request: Request, ids: Sequence[Sequence[int]], read_from: Mapping[str, int]
    ) -> Handoff | None:
        """Lend the whole of a finished request, None if nobody can read it."""
        # A step under way writes the positions of tokens that may not be the request's.
        num_in_flight = request.num_in_flight_tokens
        num_tokens = min(request.num_computed_tokens - num_in_flight, request.num_tokens)
        # A state that has passed the last position is that of no prompt.
        if self._tables.states and num_tokens < request.num_computed_tokens:
            return None
        tables = self._tables.of_ids(ids)
        part = self._lent.get(request.request_id)
        if part is None:
            # The next turn of a conversation comes when its user has read the answer.
            ttl_s = self._settings.decoder_kv_blocks_ttl
            first_s = None if _is_computed(request) else ttl_s
            lease = self._leases.grant(request.request_id, first_s)
        elif self._leases.begin_first(part.lease):
            lease = part.lease
        else:
            return None
        self._lent[request.request_id] = _Lent(lease, tables, num_tokens)
        # The next prompt may have another text in place of the answer.
        num_prompt = request.num_prompt_tokens
        prefixes = {num_prompt: prompt_of(request, num_prompt)} if num_prompt < num_tokens else {}
        groups = self._tables.indices.keys() - self._tables.states
        return self._handoff(request, self._lent[request.request_id], groups, read_from, prefixes)

    def _handoff(
        self,
        request: Request,
        lent: _Lent,
        groups: Collection[str],
        read_from: Mapping[str, int],
        prefixes: Mapping[int, str],
    ) -> Handoff:
        """Return the handoff of a request that is lent, with the positions of ``groups``."""
        assert self._listener is not None
        kept = dict[str, int]()
        for group in groups:
            first_listed = self._tables.first_listed(group, lent.tables[group])
            kept[group] = max(first_listed, read_from.get(group, 0))
        return Handoff(
            source=self._listener.source,
            lease=lent.lease,
            num_tokens=lent.num_tokens,
            prompt=prompt_of(request, lent.num_tokens),
            blocks=lent.tables,
            kept=kept,
            prefixes=prefixes,
        )

    def publish(self, scheduled: SchedulerOutput) -> None:
        """Publish what is computed of requests that decode waits for, before a step.

        The lease of one that was preempted is revoked, since this step may write into its blocks.
        """
        if not self._publications:
            return
        for name in self._publications.keys() & (scheduled.preempted_req_ids or ()):
            self._revoke(name)
        begun = _begun(scheduled)
        for name, publication in self._publications.items():
            request = publication.request
            if name in begun:
                publication.num_found = request.num_computed_tokens
            elif request.status == RequestStatus.RUNNING and self._whole_groups:
                self._publish_part(publication)

    def _publish_part(self, publication: _Publication) -> None:
        """Publish a request as far as steps that have ended have computed it, if that is enough."""
        request = publication.request
        name = request.request_id
        num_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if num_tokens <= publication.num_found or num_tokens >= request.num_prompt_tokens:
            return
        # What drafts cache at the last position is of the next token.
        num_tokens -= self._drafts_know_next
        part = self._lent.get(name)
        num_published = 0 if part is None else part.num_tokens
        if num_tokens - num_published < self._settings.early_tokens:
            return
        if part is None:
            lease = self._leases.grant_early(name)
        elif part.is_over:
            return
        else:
            lease = part.lease
        tables = self._tables.of_ids(self._block_ids(name))
        early_tables = {group: Blocks([]) for group in tables}
        for group in self._whole_groups:
            early_tables[group] = tables[group]
        lent = _Lent(lease, early_tables, num_tokens, is_part=True)
        self._lent[name] = lent
        read_from = self._read_from.get(name, {})
        handoff = self._handoff(request, lent, self._whole_groups, read_from, {})
        assert self._listener is not None
        self._listener.rooms.put(publication.room, {"handoff": handoff.params(self._access.key)})

    def _block_ids(self, request: str) -> tuple[list[int], ...]:
        """Return the ids of a request's blocks, of all cache groups."""
        tables = KVCacheBlocks(tuple(manager.req_to_blocks[request] for manager in self._managers))
        ids: tuple[list[int], ...] = tables.get_block_ids()
        return ids

    def _revoke(self, request: str) -> None:
        """Revoke the lease of a request that is not computed to its end, if it has one."""
        lent = self._lent.pop(request, None)
        if lent is not None:
            self._leases.revoke(lent.lease)
            self._withdraw(request, lent)

    def _withdraw(self, request: str, lent: _Lent) -> None:
        """Forget what readers may ask of a request whose lease is over."""
        if self._listener is None:
            return
        self._listener.digests.forget(lent.lease)
        publication = self._publications.get(request)
        if publication is not None:
            self._listener.rooms.withdraw(publication.room)

    def save(self, scheduled: SchedulerOutput) -> None:
        """Have workers copy to main memory what a step computes of requests that may be lent.

        What was cached or read of a request is copied in its first step, and in that after it was
        preempted, since nobody has copied these blocks for it yet.
        """
        begun = _begun(scheduled)
        for name in self._lendable.keys() & scheduled.num_scheduled_tokens.keys():
            request = self._lendable[name]
            stop = request.num_computed_tokens + scheduled.num_scheduled_tokens[name]
            # Where drafts of a step under way are refused, positions are computed once more.
            num_computed = request.num_computed_tokens - request.num_in_flight_tokens
            first = 0 if name in begun else max(0, num_computed)
            for group, blocks in self._tables.of_ids(self._block_ids(name)).items():
                ids = self._tables.within(group, blocks, (first, stop))
                self._step.saves.setdefault(group, set()).update(ids)

    def take_step(self) -> KvplanMetadata:
        """Return the work of the workers in this step."""
        ended = self._leases.take_ended()
        self._record_leases(ended)
        for request, reading in [*self._in_parts.items()]:
            self._read_on(request, reading)
        step = self._step
        self._step = KvplanMetadata()
        for request in (*ended.done, *ended.late):
            self._release(request, step)
        if self._listener is not None:
            tables_by_lease = {lent.lease: lent.tables for lent in self._lent.values()}
            for digest_request in self._listener.digests.take():
                # Its lease may have ended meanwhile.
                if digest_request.lease in tables_by_lease:
                    step.digests[digest_request] = tables_by_lease[digest_request.lease]
        return step

    def _release(self, request: str, step: KvplanMetadata) -> None:
        """Free the blocks of a request whose lease has ended, unless it is still computed."""
        lent = self._lent.get(request)
        # one that was given up has no lease any more
        if lent is None:
            return
        self._withdraw(request, lent)
        if lent.is_part:
            # its readers are done, or were told so: nobody reads the rest
            lent.is_over = True
        else:
            del self._lent[request]
            self._publications.pop(request, None)
            step.released.add(request)

    def reset(self) -> None:
        """Free the blocks of all requests that were handed over: their readers fail."""
        self._leases.end_all()

    def _record_leases(self, ended: EndedLeases) -> None:
        """Count and log the leases that nobody has claimed, and the claims that came too late."""
        self.stats.count_total("num_failed_notifications", self._claims.num_unanswered)
        self.stats.count_total("num_refused_claims", self._claims.num_refused)
        self.stats.count("num_kv_expired_reqs", len(ended.late))
        if ended.late:
            message = "no reader has claimed these requests in time: %s"
            logger.warning(message, ", ".join(ended.late))
        num_refused = self._leases.num_refused
        num_stale = self.stats.count_total("num_notifications_after_expiry", num_refused)
        if num_stale:
            logger.error("%d claims came for leases that are over: their requests fail", num_stale)

    def take_digests(self, metadata: KvplanWorkerMetadata) -> None:
        """Take the digests that all workers have computed, those of replicas once."""
        if self._listener is not None:
            for digest_request, digests in metadata.digests.items():
                self._listener.digests.put(digest_request, [joined(digests)])
