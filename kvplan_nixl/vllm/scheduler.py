"""The connector in vLLM's scheduler: prefill and decode in one.

It translates vLLM's hooks for an :class:`~kvplan.protocol.exporter.Exporter`, which decides what is
pinned and published for others, and an :class:`~kvplan.protocol.importer.Importer`, which decides
what is read. A request's ``kv_transfer_params`` say which of them it meets: what an engine computes
for another one is exported, and what it has read may be exported to a third.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from kvplan import KVPlanError
from kvplan.protocol import (
    Claims,
    Exporter,
    Handoff,
    Importer,
    Leases,
    Listener,
    Rooms,
    System,
)
from kvplan.protocol.digest import joined
from kvplan.protocol.system import TOKEN_BYTES
from kvplan_nixl.vllm.description import check_kinds
from kvplan_nixl.vllm.engine_state import OUTDATED, EngineState
from kvplan_nixl.vllm.metadata import KvplanMetadata, KvplanWorkerMetadata
from kvplan_nixl.vllm.metrics import KvplanStats
from kvplan_nixl.vllm.requests import (
    ROOM,
    address_of,
    has_handoff,
    is_computed,
    is_computed_whole,
    params_of,
    room_of,
)
from kvplan_nixl.vllm.settings import ConnectorSettings
from kvplan_nixl.vllm.store_scheduler import StoreScheduler
from kvplan_nixl.vllm.tables import BlockTables

logger = init_logger(f"vllm.{__name__}")


def _begun(scheduled: SchedulerOutput) -> set[str]:
    """Return the requests whose first step this is, also of those that were preempted before."""
    resumed: set[str] = scheduled.scheduled_cached_reqs.resumed_req_ids
    return resumed.union(request.req_id for request in scheduled.scheduled_new_reqs)


class Scheduler:
    """Translates the hooks of vLLM's scheduler.

    If blocks would be freed that the last token attends to, or a state would have passed it, an
    engine that computes for decode stops one token short of the prompt, unless decode asks for the
    whole. If drafts use the next token too, it must generate this one.
    """

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        settings: ConnectorSettings,
        system: System,
        state: EngineState | None = None,
    ) -> None:
        check_kinds(cache)
        assert config.kv_transfer_config is not None
        self._transfer = config.kv_transfer_config
        self._settings = settings
        self._system = system
        self._state = state or EngineState({}, system.token_hex)
        self.stats = KvplanStats()
        self._key = settings.access().key
        self._tables = BlockTables(config, cache)
        self._caches_prefixes = bool(config.cache_config.enable_prefix_caching)
        self._drafts_know_next = config.num_prefill_lookahead_tokens > 0
        self._vocabulary = range(config.model_config.get_vocab_size())
        self._listener: Listener | None = None
        self._exporter: Exporter | None = None
        # the engine's stores, which hear what is read in part before they save it
        self.stores: list[StoreScheduler] = []
        # those that others may read when they have finished, and the rooms of some of them
        self._exportable: dict[str, Request] = {}
        self._rooms: dict[str, str] = {}
        # by group: the blocks that workers have not been told of yet
        self._saves: dict[str, set[int]] = {}
        # the positions to compute or read of requests that vLLM has no blocks for in this step
        self._waiting: dict[str, int] = {}
        # kept answers that gave way, until their blocks are free
        self._giving_way = set[str]()
        self._claims = Claims(logger, system, settings.max_peers)
        self._importer = Importer(
            self._tables.cache_groups,
            self._claims,
            system.token_hex(TOKEN_BYTES),
            self._key,
            rooms=Rooms(
                logger,
                self._key,
                system,
                timeout_s=settings.prefill_timeout_s,
                max_servers=settings.max_peers,
            ),
            weights=lambda: self._state.version,
            # the slots after the last position must stay zero if the engine needs them so
            to_block_end=not cache.needs_kv_cache_zeroing,
        )

    def set_managers(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        """Take the managers of all cache groups, which register blocks in the prefix cache."""
        self._tables.set_managers(managers)

    def set_siblings(self, siblings: set[str]) -> None:
        """Take the names of the engine's other connectors, which may store the blocks it fills.

        vLLM's OffloadingConnector stores a block by its hash, also one that is kept out of the
        prefix cache.
        """
        self._importer.siblings = siblings

    def serve_offers(self, envelopes: Sequence[bytes]) -> None:
        """Serve the envelopes of all workers to other engines, if they may read from this one.

        Raises ``WORKER`` if there are none: vLLM's MultiConnector passes on the metadata of the
        first of its connectors that has any.
        """
        settings = self._settings
        if not (self._transfer.is_kv_producer or settings.bidirectional_kv_xfer):
            return
        if not envelopes:
            raise KVPlanError(
                "WORKER",
                "serve the offers of an engine",
                expected="one of each worker",
                got="none",
                hint="name KvplanConnector before other connectors that shake hands",
            )
        assert self._transfer.engine_id is not None
        system = self._system
        leases = Leases(system, lease_s=settings.lease_s, max_lease_s=settings.max_lease_s)
        self._listener = Listener(
            self._transfer.engine_id,
            settings.host,
            envelopes,
            leases,
            port=settings.port,
            bind=settings.bind or settings.host,
            system=system,
        )
        self._exporter = Exporter(
            self._listener.source,
            leases,
            self._tables.cache_groups,
            early_tokens=settings.early_tokens,
            withdraw=self._listener.withdraw,
        )
        logger.info("serving metadata of %d workers at %s", len(envelopes), self._listener.source)

    def close(self) -> None:
        """Stop serving."""
        self._claims.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = self._exporter = None

    def add(self, request: Request) -> None:
        """Import a request that has arrived, or export it and shorten its prompt."""
        self._import(request)
        if self._exporter is not None and self._is_exportable(request):
            self._exportable[request.request_id] = request
            self._open(self._exporter, request)
        is_short = is_computed(request) and not is_computed_whole(request)
        keeps_all = all(group.keeps_all for group in self._tables.cache_groups.values())
        if is_short and not keeps_all and request.num_prompt_tokens > 1:
            self._stop_short(request)

    # Imports

    def _import(self, request: Request) -> None:
        """Have a request read that has a handoff, or asks prefill for one."""
        params, name = params_of(request), request.request_id
        is_read = bool(params.get("do_remote_prefill"))
        prompt = partial(self._state.prompt_of, request)
        if is_read and params.get(ROOM) and not has_handoff(request):
            try:
                room, address = room_of(params), address_of(params)
            except KVPlanError as error:
                self._importer.refuse(name, error)
                return
            self._importer.ask(name, room, address, prompt, request.num_prompt_tokens, num_left=1)
        # The next turn of a conversation has the last one's handoff, and asks for another.
        elif is_read or (is_computed(request) and has_handoff(request)):
            is_optional = is_computed(request)
            # What drafts cache at the last position is of the token that came next then.
            num_stale = int(self._drafts_know_next and is_optional)
            min_tokens = self._settings.kv_recompute_threshold if is_optional else None
            self._importer.claim(name, params, prompt, num_stale=num_stale, min_tokens=min_tokens)

    def count_tokens_to_read(self, request: Request, num_cached: int) -> int | None:
        """Return the number of positions to read after the first ``num_cached`` of a request.

        Returns None of a request of which prefill has published nothing yet. An engine computes the
        last token of a prompt itself.
        """
        self._state.note_origin(request, num_cached)
        num_tokens = self._importer.count(
            request.request_id, num_cached, int(request.num_prompt_tokens) - 1
        )
        if num_tokens is not None and self._exporter is not None:
            self._waiting[request.request_id] = request.num_tokens - num_cached
        return num_tokens

    def begin_read(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Read ``num_tokens`` positions of a request into its blocks. A request is read once."""
        name = request.request_id
        self._waiting.pop(name, None)
        if not num_tokens:
            gap = self._importer.skip(name)
            if gap is not None:
                logger.warning(
                    "request %r: the prompt is recomputed, since its KV cannot be loaded: %s",
                    name,
                    gap,
                )
            return
        self._state.load(name)
        self._importer.read(
            name,
            self._tables.of_ids(blocks.get_block_ids()),
            num_tokens,
            {
                group: self._tables.first_uncached(group, blocks)
                for group in self._tables.positioned
            },
            # an adapter's folder may have been overwritten since the request was claimed
            checks_prompt=request.lora_request is not None,
        )

    def end_reads(self, requests: Collection[str], failed: Collection[str] = ()) -> None:
        """End the claims of requests that all workers have read, and give up failed ones."""
        for name in failed:
            self._importer.give_up(name)
        for name in requests:
            self._importer.end(name)

    # Exports

    def _is_exportable(self, request: Request) -> bool:
        """Return whether others may read a request when it has finished."""
        is_read = params_of(request).get("do_remote_prefill")
        return is_computed(request) or bool(is_read and self._settings.bidirectional_kv_xfer)

    def _open(self, exporter: Exporter, request: Request) -> None:
        """Open a request, and its room if a router gave it a transfer id of its own."""
        params, name = params_of(request), request.request_id
        try:
            room = room_of(params) if is_computed(request) and params.get(ROOM) else ""
            exporter.open(name, room)
        except KVPlanError as error:
            # its handoff comes with the answer
            logger.warning("request %r: KV is not published while it is computed: %s", name, error)
            exporter.open(name)
        else:
            if room:
                self._rooms[name] = room

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

    def publish(self, scheduled: SchedulerOutput) -> None:
        """Publish what is computed of requests that decode waits for, before a step.

        What was published of one that was preempted is taken back, since this step may write into
        its blocks.
        """
        self._state.step_begun()
        if self._exporter is None:
            return
        # in the next step they may get their first blocks, and then too few again
        self._waiting.update(dict.fromkeys(scheduled.preempted_req_ids or (), 1))
        for name in self._rooms.keys() & (scheduled.preempted_req_ids or ()):
            self._exporter.revoke(name)
        begun = _begun(scheduled)
        for name in self._rooms:
            request = self._exportable[name]
            if name in begun:
                self._exporter.note_found(name, request.num_computed_tokens)
            elif request.status == RequestStatus.RUNNING:
                self._publish_early(self._exporter, request)

    def _publish_early(self, exporter: Exporter, request: Request) -> None:
        """Publish what steps that have ended have computed of a request, unless that is all."""
        name = request.request_id
        num_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if num_tokens >= request.num_prompt_tokens:
            return
        if not self._state.is_current(request):
            exporter.revoke(name)
            return
        handoff = exporter.publish(
            name,
            # What drafts cache at the last position is of the next token.
            num_tokens - self._drafts_know_next,
            partial(self._tables.of_request, name),
            partial(self._state.prompt_of, request),
            read_from=self._importer.read_from.get(name, {}),
            weights_version=self._state.version,
        )
        if handoff is not None and self._listener is not None:
            entry = {"handoff": handoff.params(self._key)}
            self._listener.rooms.put(self._rooms[name], entry)

    def hand_over(self, request: Request, ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Return the parameters with which others read a finished request, whose blocks stay.

        Returns None if no engine reads it; then its blocks are free.
        """
        name = request.request_id
        handoff = self._finish(request, ids)
        self._state.forget(name)
        self._exportable.pop(name, None)
        room = self._rooms.pop(name, "")
        if handoff is None:
            if self._exporter is not None:
                self._exporter.abort(name)
            return None
        params = handoff.params(self._key)
        if room and self._listener is not None:
            self._listener.rooms.put(room, {"handoff": params, "is_whole": True})
        is_for_another = is_computed(request)
        flags = {"do_remote_prefill": is_for_another, "do_remote_decode": not is_for_another}
        return {**flags, **params}

    def _finish(self, request: Request, ids: Sequence[Sequence[int]]) -> Handoff | None:
        """Export the whole of a finished request, None if no engine can read it."""
        name = request.request_id
        read_from = self._importer.finish(name)
        is_done = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        exporter = self._exporter
        if exporter is None or not (is_done and any(ids) and self._is_exportable(request)):
            return None
        if not self._state.is_current(request):
            logger.warning("request %r: KV is not exported: %s", name, OUTDATED)
            return None
        # A step under way writes the positions of tokens that may not be the request's.
        num_in_flight = request.num_in_flight_tokens
        num_tokens = min(request.num_computed_tokens - num_in_flight, request.num_tokens)
        # A state that has passed the last position is that of no prompt.
        if self._tables.states and num_tokens < request.num_computed_tokens:
            return None
        # The next turn of a conversation comes when its user has read the answer, and may have
        # edited it.
        ttl_s = self._settings.decoder_kv_blocks_ttl
        num_prompt = request.num_prompt_tokens
        prefixes = {}
        if num_prompt < num_tokens:
            prefixes[num_prompt] = self._state.prompt_of(request, num_prompt)
        return exporter.finish(
            name,
            num_tokens,
            self._tables.of_ids(ids),
            partial(self._state.prompt_of, request),
            first_s=None if is_computed(request) else ttl_s,
            read_from=read_from,
            prefixes=prefixes,
            weights_version=self._state.version,
        )

    def save(self, scheduled: SchedulerOutput) -> None:
        """Have workers copy to main memory what a step computes of requests that may be exported.

        What was cached or read of a request is copied in its first step, and in that after it was
        preempted, since these blocks were not copied for it yet.
        """
        begun = _begun(scheduled)
        for name in self._exportable.keys() & scheduled.num_scheduled_tokens.keys():
            request = self._exportable[name]
            stop = request.num_computed_tokens + scheduled.num_scheduled_tokens[name]
            # Where drafts of a step under way are refused, positions are computed once more, and
            # what drafts cache at the last position comes with the next token.
            num_computed = request.num_computed_tokens - request.num_in_flight_tokens
            first = 0 if name in begun else max(0, num_computed - self._drafts_know_next)
            for group, blocks in self._tables.of_request(name).items():
                ids = self._tables.within(group, blocks, (first, stop))
                self._saves.setdefault(group, set()).update(ids)

    def reset(self) -> None:
        """Free the blocks of all requests that were handed over: their readers fail.

        A reset alone does not separate decode from prefill: their weights are the same as before,
        unless vLLM has said that they changed.
        """
        if self._exporter is not None:
            self._exporter.reset()

    # Steps

    def take_step(self) -> KvplanMetadata:
        """Return the work of the workers in this step."""
        step = KvplanMetadata(self._importer.step(), self._saves)
        self._saves = {}
        for partial_read in step.partial_reads:
            for group, whole in partial_read.partial.items():
                if self._caches_prefixes:
                    self._tables.leave_uncached(partial_read.request, group, whole.first_whole)
                for store in self.stores:
                    store.leave_out(partial_read.request, group, whole.start)
        self.stats.count_total("num_claims", self._importer.num_claims)
        self.stats.count_total("num_failed_notifications", self._claims.num_unanswered)
        self.stats.count_total("num_refused_claims", self._claims.num_refused)
        if self._exporter is not None and self._listener is not None:
            self._give_way(self._exporter)
            self._end_exports(self._exporter, step)
            for asked in self._listener.digests.take():
                blocks = self._exporter.blocks_of(asked.lease)
                # Its lease may have ended meanwhile.
                if blocks is not None:
                    step.digests[asked] = blocks
        return step

    def _give_way(self, exporter: Exporter) -> None:
        """End answers that are kept for next turns, where a request got no blocks in this step.

        vLLM counts their blocks as those of running requests, so requests would wait until the
        leases of answers expire. Once some give way, no others do until their blocks are free:
        workers report that some steps later.
        """
        waiting, self._waiting = self._waiting, {}
        num_blocks = 0
        if waiting and not self._giving_way:
            # a request also waits for blocks that vLLM reserves
            num_blocks = max(1, self._tables.num_missing(sum(waiting.values())))
        given = exporter.give_way(num_blocks)
        self._giving_way.update(given)
        if given:
            message = "%d kept answers give way to %d requests that wait for blocks"
            logger.info(message, len(given), len(waiting))

    def end_exports(self, requests: Collection[str]) -> None:
        """Note that all workers have released the blocks of requests."""
        self._giving_way.difference_update(requests)

    def _end_exports(self, exporter: Exporter, step: KvplanMetadata) -> None:
        """Have the blocks freed of which leases have ended, and count what operators watch."""
        ended = exporter.step()
        step.released.update(ended.released)
        for error in ended.late.values():
            logger.warning("%s", error)
        stats = self.stats
        stats.count("num_kv_expired_reqs", len(ended.late))
        stats.count("num_notifications_after_expiry", ended.num_stale)
        if ended.num_stale:
            message = "%d renewals came after their lease expired; the requests fail"
            logger.error(message, ended.num_stale)
        stats.set("num_pinned_blocks", exporter.num_blocks)
        # in steps of seconds, so that a step of an engine with nothing new has nothing to tell
        stats.set("oldest_lease", math.floor(exporter.leases.oldest_s()))

    def take_digests(self, metadata: KvplanWorkerMetadata) -> None:
        """Take the digests that all workers have computed, those of replicas once."""
        if self._listener is not None:
            for digest_request, digests in metadata.digests.items():
                self._listener.digests.put(digest_request, [joined(digests)])
