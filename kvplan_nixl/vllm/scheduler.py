"""The connector's part in vLLM's scheduler.

It decides which requests are read, and whose blocks stay for a reader.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from kvplan_nixl.vllm.settings import ConnectorSettings
from kvplan_nixl.vllm.tables import BlockTables

logger = init_logger(f"vllm.{__name__}")


@attrs.define(eq=False)
class _Reading:
    """A request that is read: its handoff, or the error that it cannot be read for.

    Its prompt begins with the first ``num_shared`` positions of the handoff, and the engine has
    cached ``num_cached`` of them. Once ``is_begun``, it is not read again: its parameters cannot
    tell, which children of one request may share.
    """

    handoff: Handoff | None
    error: KVPlanError | None
    num_shared: int = POSITION_END
    num_cached: int = 0
    is_begun: bool = False


@attrs.frozen(eq=False)
class _Lent:
    """A request whose blocks stay for readers: its lease, and its block tables by group."""

    lease: str
    tables: dict[str, Blocks]


def _is_computed(request: Request) -> bool:
    """Return whether an engine is asked to compute a request for another one."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


class Scheduler:
    """Prefill and decode in one: a request's ``kv_transfer_params`` say which one it meets.

    A request with a handoff reads the positions that its prompt shares, and computes the others,
    at least the last one. If blocks would be freed that the last token attends to, or a state would
    have passed it, an engine that computes for decode stops one token short of the prompt. If
    drafts use the next token too, it must generate this one.
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
        self._stops_short = any(frees_blocks(group) for group in self._tables.groups.values())
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
        self._reading: dict[str, _Reading] = {}
        # those that others may read when they have finished
        self._lendable: dict[str, Request] = {}
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
        # The next turn of a conversation has the last one's handoff, and asks for another.
        is_next_turn = _is_computed(request) and params.get("remote_block_ids")
        if params.get("do_remote_prefill") or is_next_turn:
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

    def count_tokens_to_read(self, request: Request, num_cached: int) -> int:
        """Return the number of positions to read after the first ``num_cached`` of a request."""
        reading = self._reading.get(request.request_id)
        if reading is None or reading.is_begun:
            return 0
        reading.num_cached = num_cached
        first, stop = self._shared(request, reading)
        num_tokens = stop - first
        # An engine that computes for another one computes what a handoff lacks, or has little of.
        if reading.handoff is not None and _is_computed(request):
            is_little = num_tokens < self._settings.kv_recompute_threshold
            if is_little or self._gap(reading.handoff, (first, stop)) is not None:
                return 0
        return num_tokens

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
            read = self._read(request.request_id, reading, blocks, stop)
            self._step.reads.append(read)
        except KVPlanError as error:
            self._step.refused[request.request_id] = error

    def _read(self, request: str, reading: _Reading, blocks: KVCacheBlocks, stop: int) -> Read:
        """Return the read of the positions from the cached ones to ``stop``, into all groups.

        Raises the reason why the request cannot be read.
        """
        handoff = reading.handoff
        if handoff is None:
            assert reading.error is not None
            raise reading.error
        refusal = self._claims.refusal(handoff.source, handoff.lease, self._reader_name(request))
        if refusal is not None:
            raise refusal
        gap = self._gap(handoff, (reading.num_cached, stop))
        if gap is not None:
            raise gap
        local = self._tables.of_ids(blocks.get_block_ids())
        positions = dict[str, WholeBlocks]()
        for group in self._tables.indices.keys() - self._tables.states:
            # A group may have cached less than others.
            first = min(reading.num_cached, self._tables.first_uncached(group, blocks))
            listed = self._tables.first_listed(group, local[group])
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
            local=local,
            remote=handoff.blocks,
            tokens={group: (whole.start, whole.stop) for group, whole in positions.items()},
            to_block_end=self._to_block_end,
        )

    def _whole_blocks(
        self, group: str, tokens: Range, listed: int, handoff: Handoff
    ) -> WholeBlocks:
        """Return the positions of a group that are read, from ``listed`` on if they are kept."""
        cache = self._tables.groups[group]
        return whole_blocks(
            tokens,
            attended=first_attended(cache, tokens[1]),
            tokens_per_block=self._tables.block_sizes[group],
            listed=listed,
            kept=handoff.kept.get(group, 0),
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
        handoff = self._reading.pop(request).handoff
        if handoff is not None:
            self._claims.end(handoff.source, handoff.lease, self._reader_name(request))

    def end_reads(self, requests: set[str]) -> None:
        """End the claims of requests whose reads have ended in all workers."""
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
        read_from = self._read_from.pop(request.request_id, {})
        is_done = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        is_computed = _is_computed(request)
        is_wanted = self._is_lendable(request) and is_done and any(ids)
        if not is_wanted or self._listener is None:
            return None
        # A step under way writes the positions of tokens that may not be the request's.
        num_in_flight = request.num_in_flight_tokens
        num_tokens = min(request.num_computed_tokens - num_in_flight, request.num_tokens)
        # A state that has passed the last position is that of no prompt.
        if self._tables.states and num_tokens < request.num_computed_tokens:
            return None
        tables = self._tables.of_ids(ids)
        kept = dict[str, int]()
        for group in self._tables.indices.keys() - self._tables.states:
            first_listed = self._tables.first_listed(group, tables[group])
            kept[group] = max(first_listed, read_from.get(group, 0))
        # The next turn of a conversation comes when its user has read the answer.
        first_s = None if is_computed else self._settings.decoder_kv_blocks_ttl
        lease = self._leases.grant(request.request_id, first_s)
        self._lent[request.request_id] = _Lent(lease, tables)
        # The next prompt may have another text in place of the answer.
        num_prompt = request.num_prompt_tokens
        prefixes = {num_prompt: prompt_of(request, num_prompt)} if num_prompt < num_tokens else {}
        handoff = Handoff(
            source=self._listener.source,
            lease=lease,
            num_tokens=num_tokens,
            prompt=prompt_of(request, num_tokens),
            blocks=tables,
            kept=kept,
            prefixes=prefixes,
        )
        flags = {"do_remote_prefill": is_computed, "do_remote_decode": not is_computed}
        return {**flags, **handoff.params(self._access.key)}

    def save(self, scheduled: SchedulerOutput) -> None:
        """Have workers copy to main memory what a step computes of requests that may be lent.

        What was cached or read of a request is copied in its first step, and in that after it was
        preempted, since nobody has copied these blocks for it yet.
        """
        begun = {request.req_id for request in scheduled.scheduled_new_reqs}
        begun |= scheduled.scheduled_cached_reqs.resumed_req_ids
        for name in self._lendable.keys() & scheduled.num_scheduled_tokens.keys():
            request = self._lendable[name]
            stop = request.num_computed_tokens + scheduled.num_scheduled_tokens[name]
            # Where drafts of a step under way are refused, positions are computed once more.
            num_computed = request.num_computed_tokens - request.num_in_flight_tokens
            first = 0 if name in begun else max(0, num_computed)
            tables = KVCacheBlocks(tuple(manager.req_to_blocks[name] for manager in self._managers))
            for group, blocks in self._tables.of_ids(tables.get_block_ids()).items():
                ids = self._tables.within(group, blocks, (first, stop))
                self._step.saves.setdefault(group, set()).update(ids)

    def take_step(self) -> KvplanMetadata:
        """Return the work of the workers in this step."""
        ended = self._leases.take_ended()
        self._record_leases(ended)
        step = self._step
        self._step = KvplanMetadata()
        step.released.update(ended.done, ended.late)
        if self._listener is not None:
            for request in step.released:
                self._listener.digests.forget(self._lent.pop(request).lease)
            tables_by_lease = {lent.lease: lent.tables for lent in self._lent.values()}
            for digest_request in self._listener.digests.take():
                # Its lease may have ended meanwhile.
                if digest_request.lease in tables_by_lease:
                    step.digests[digest_request] = tables_by_lease[digest_request.lease]
        return step

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
