"""Requests whose blocks stay for readers: their leases, and what other engines may ask of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kvplan import Blocks, KVPlanError
from kvplan.describe.blocks import POSITION_END
from kvplan.protocol import EndedLeases, Handoff, Leases, Listener
from kvplan.protocol.digest import joined
from kvplan.protocol.system import System
from kvplan_nixl.vllm.engine_state import OUTDATED, EngineState
from kvplan_nixl.vllm.metadata import KvplanMetadata, KvplanWorkerMetadata
from kvplan_nixl.vllm.metrics import KvplanStats
from kvplan_nixl.vllm.requests import is_computed, is_computed_whole, params_of
from kvplan_nixl.vllm.rooms import ROOM, room_of
from kvplan_nixl.vllm.settings import ConnectorSettings
from kvplan_nixl.vllm.tables import BlockTables

logger = init_logger(f"vllm.{__name__}")


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
    another request until it has computed more itself. Nobody reads it once it ``is_lost``.
    """

    room: str
    request: Request
    num_found: int = POSITION_END
    is_lost: bool = False


def _begun(scheduled: SchedulerOutput) -> set[str]:
    """Return the requests whose first step this is, also of those that were preempted before."""
    resumed: set[str] = scheduled.scheduled_cached_reqs.resumed_req_ids
    return resumed.union(request.req_id for request in scheduled.scheduled_new_reqs)


class LentRequests:
    """The requests of an engine that others may read, while they are computed and afterwards.

    If blocks would be freed that the last token attends to, or a state would have passed it, an
    engine that computes for decode stops one token short of the prompt, unless decode asks for the
    whole. If drafts use the next token too, it must generate this one.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: ConnectorSettings,
        tables: BlockTables,
        stats: KvplanStats,
        system: System,
        state: EngineState,
    ) -> None:
        assert config.kv_transfer_config is not None
        self._transfer = config.kv_transfer_config
        self._settings = settings
        self._system = system
        self._state = state
        self._key = settings.access().key
        self._tables = tables
        self._stats = stats
        self._stops_short = len(tables.whole_groups) < len(tables.groups)
        self._drafts_know_next = config.num_prefill_lookahead_tokens > 0
        self._vocabulary = range(config.model_config.get_vocab_size())
        self._listener: Listener | None = None
        self._leases = Leases(system, lease_s=settings.lease_s, max_lease_s=settings.max_lease_s)
        # those whose blocks stay until their leases end
        self._requests: dict[str, _Lent] = {}
        # those that others may read when they have finished
        self._lendable: dict[str, Request] = {}
        self._publications: dict[str, _Publication] = {}
        # by group: the blocks that workers have not been told of yet
        self._saves: dict[str, set[int]] = {}

    def close(self) -> None:
        """Stop serving."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def add(self, request: Request) -> None:
        """Take a request that has arrived, and shorten its prompt if it is computed for decode."""
        if self._is_lendable(request):
            self._lendable[request.request_id] = request
            self._open_room(request)
        is_short = is_computed(request) and not is_computed_whole(request)
        if self._stops_short and is_short and request.num_prompt_tokens > 1:
            self._stop_short(request)

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
            system=self._system,
        )
        logger.info("%s serves the offers of %d workers", self._listener.source, len(envelopes))

    def _is_lendable(self, request: Request) -> bool:
        """Return whether others may read a request when it has finished."""
        params = params_of(request)
        is_answered = params.get("do_remote_prefill") and self._settings.bidirectional_kv_xfer
        return self._listener is not None and bool(is_computed(request) or is_answered)

    def _open_room(self, request: Request) -> None:
        """Publish a request while it is computed, if a router gave it a transfer id of its own."""
        params = params_of(request)
        if not is_computed(request) or not params.get(ROOM):
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

    def hand_over(
        self, request: Request, ids: Sequence[Sequence[int]], read_from: Mapping[str, int]
    ) -> dict[str, Any] | None:
        """Return the parameters with which others read a finished request, whose blocks stay.

        Returns None if nobody reads it; then its blocks are free.
        """
        self._lendable.pop(request.request_id, None)
        is_done = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        publication = self._publications.get(request.request_id)
        is_lost = publication is not None and publication.is_lost
        handoff = None
        if self._is_lendable(request) and is_done and any(ids) and not is_lost:
            if self._state.is_current(request):
                handoff = self._lend(request, ids, read_from)
            else:
                logger.warning("request %r is not handed over: %s", request.request_id, OUTDATED)
        if handoff is None:
            self._revoke(request.request_id)
            self._publications.pop(request.request_id, None)
            return None
        params = handoff.params(self._key)
        if publication is not None and self._listener is not None:
            self._listener.rooms.put(publication.room, {"handoff": params, "is_whole": True})
        is_for_another = is_computed(request)
        flags = {"do_remote_prefill": is_for_another, "do_remote_decode": not is_for_another}
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
        part = self._requests.get(request.request_id)
        if part is None:
            # The next turn of a conversation comes when its user has read the answer.
            ttl_s = self._settings.decoder_kv_blocks_ttl
            first_s = None if is_computed(request) else ttl_s
            lease = self._leases.grant(request.request_id, first_s)
        elif self._leases.begin_first(part.lease):
            lease = part.lease
        else:
            return None
        self._requests[request.request_id] = _Lent(lease, tables, num_tokens)
        # The next prompt may have another text in place of the answer.
        num_prompt = request.num_prompt_tokens
        prefixes = {}
        if num_prompt < num_tokens:
            prefixes[num_prompt] = self._state.prompt_of(request, num_prompt)
        groups = self._tables.positioned
        return self._handoff(
            request, self._requests[request.request_id], groups, read_from, prefixes
        )

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
            prompt=self._state.prompt_of(request, lent.num_tokens),
            blocks=lent.tables,
            kept=kept,
            prefixes=prefixes,
            weights_version=self._state.identity.version,
        )

    def publish(
        self, scheduled: SchedulerOutput, read_from: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Publish what is computed of requests that decode waits for, before a step.

        The lease of one that was preempted is revoked, since this step may write into its blocks.
        If a part of it was read, that reader fails, and nothing more is published or handed over.
        """
        if not self._publications:
            return
        for name in self._publications.keys() & (scheduled.preempted_req_ids or ()):
            self._publications[name].is_lost |= self._revoke(name)
        begun = _begun(scheduled)
        for name, publication in self._publications.items():
            request = publication.request
            if name in begun:
                publication.num_found = request.num_computed_tokens
            elif request.status == RequestStatus.RUNNING and self._tables.whole_groups:
                self._publish_part(publication, read_from.get(name, {}))

    def _publish_part(self, publication: _Publication, read_from: Mapping[str, int]) -> None:
        """Publish a request as far as steps that have ended have computed it, if that is enough."""
        request = publication.request
        name = request.request_id
        num_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if num_tokens <= publication.num_found or num_tokens >= request.num_prompt_tokens:
            return
        # decode has heard that its lease is over, and reads nothing more
        if publication.is_lost:
            return
        if not self._state.is_current(request):
            publication.is_lost |= self._revoke(name)
            return
        # What drafts cache at the last position is of the next token.
        num_tokens -= self._drafts_know_next
        part = self._requests.get(name)
        num_published = 0 if part is None else part.num_tokens
        if num_tokens - num_published < self._settings.early_tokens:
            return
        if part is None:
            lease = self._leases.grant_early(name)
        elif part.is_over:
            return
        else:
            lease = part.lease
        tables = self._tables.of_request(name)
        # windows and states come with the whole
        early_tables = {group: Blocks([]) for group in tables}
        for group in self._tables.whole_groups:
            early_tables[group] = tables[group]
        lent = _Lent(lease, early_tables, num_tokens, is_part=True)
        self._requests[name] = lent
        handoff = self._handoff(request, lent, self._tables.whole_groups, read_from, {})
        assert self._listener is not None
        self._listener.rooms.put(publication.room, {"handoff": handoff.params(self._key)})

    def _revoke(self, request: str) -> bool:
        """Revoke the lease of a request that is not computed to its end, if it has one.

        Returns whether a reader has claimed it.
        """
        lent = self._requests.pop(request, None)
        if lent is None:
            return False
        self._withdraw(request, lent)
        return self._leases.revoke(lent.lease)

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
            for group, blocks in self._tables.of_request(name).items():
                ids = self._tables.within(group, blocks, (first, stop))
                self._saves.setdefault(group, set()).update(ids)

    def add_to(self, step: KvplanMetadata) -> None:
        """Add to the work of a step what is saved, released and digested of these requests."""
        step.saves = self._saves
        self._saves = {}
        ended = self._leases.take_ended()
        self._record_leases(ended)
        for request in (*ended.done, *ended.late):
            self._release(request, step)
        tables = [lent.tables for lent in self._requests.values()]
        num_blocks = sum(blocks.ids.size for each in tables for blocks in each.values())
        self._stats.set("num_lent_blocks", num_blocks)
        # in steps of seconds, so that a step of an engine with nothing new has nothing to tell
        self._stats.set("oldest_lease", math.floor(self._leases.oldest_s()))
        if self._listener is not None:
            tables_by_lease = {lent.lease: lent.tables for lent in self._requests.values()}
            for digest_request in self._listener.digests.take():
                # Its lease may have ended meanwhile.
                if digest_request.lease in tables_by_lease:
                    step.digests[digest_request] = tables_by_lease[digest_request.lease]

    def _release(self, request: str, step: KvplanMetadata) -> None:
        """Free the blocks of a request whose lease has ended, unless it is still computed."""
        lent = self._requests.get(request)
        # one that was given up has no lease any more
        if lent is None:
            return
        self._withdraw(request, lent)
        if lent.is_part:
            # its readers are done, or were told so: nobody reads the rest
            lent.is_over = True
        else:
            del self._requests[request]
            self._publications.pop(request, None)
            step.released.add(request)

    def reset(self) -> None:
        """Free the blocks of all requests that were handed over: their readers fail."""
        self._leases.end_all()

    def _record_leases(self, ended: EndedLeases) -> None:
        """Count and log the leases that nobody has claimed, and the claims that came too late."""
        self._stats.count("num_kv_expired_reqs", len(ended.late))
        unclaimed = [request for request in ended.late if request not in ended.old]
        if unclaimed:
            message = "no reader has claimed these requests in time: %s"
            logger.warning(message, ", ".join(unclaimed))
        if ended.old:
            message = "readers had these requests for %g s, which is max_lease_s: %s"
            logger.error(message, self._settings.max_lease_s, ", ".join(ended.old))
        num_refused = self._leases.num_refused
        num_stale = self._stats.count_total("num_notifications_after_expiry", num_refused)
        if num_stale:
            logger.error("%d claims came for leases that are over: their requests fail", num_stale)

    def take_digests(self, metadata: KvplanWorkerMetadata) -> None:
        """Take the digests that all workers have computed, those of replicas once."""
        if self._listener is not None:
            for digest_request, digests in metadata.digests.items():
                self._listener.digests.put(digest_request, [joined(digests)])
