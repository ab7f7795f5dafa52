"""Reads: the requests that one worker reads from other engines, from handshake to last byte.

- read.R1: Nothing waits. Offers are fetched and plans made off the engine's thread;
  :meth:`Reads.poll`, called once per step of the engine, does the rest. The executor is used on the
  caller's thread only.
- read.R2: A request is reported once, when none of its bytes can move any more, with an error or
  without. Until then its blocks must stay, also where :meth:`Reads.late` says before that it has
  failed. While prefill computes the rest, a request comes as partial reads. They run one after the
  other, and the request is reported after the last.
- read.R3: What fails is one request, or those that wait for one engine. Another request to that
  engine tries again. A request that came :data:`~kvplan.protocol.system.RETRY_S` after a handshake
  began does not fail with it, since the network may have healed meanwhile: it shakes hands again.
  So does one whose connection is lost, unless it has waited for that connection, or its bytes may
  still move: a connection that broke while nothing was read shows it only when bytes are to move.
- read.R4: A request is right only if its source says, after the last byte, that the lease is valid:
  until then it has given the blocks to no other request. No clock is compared. While bytes move,
  the source is asked every :data:`~kvplan.protocol.read_jobs.ASK_S`; a request fails if the lease
  has ended, or if no answer came for :data:`~kvplan.protocol.read_jobs.SILENCE_S`.
- read.R5: With a pipeline, an engine is read from through its staging region if that takes less
  time for a request of :data:`~kvplan.protocol.peer_engines.USUAL_TOKENS` positions. A request that
  waits while no chunk has begun for :data:`STALL_S` is read directly: the transfers that hold the
  staging blocks may never end.
- read.R6: With ``digest``, the bytes that have arrived are compared with those of the source, by
  logical coordinate, before a request is right. The source computes its digests while the bytes
  move. If it cannot digest the same elements, such as heads that are divided unevenly, the log says
  that the request was not verified.
- read.R7: A step posts transfers for about :data:`POST_S`, since the engine's other requests
  wait meanwhile. So a large read is cut into transfers of
  :data:`~kvplan.protocol.read.MAX_TRANSFER_IDS` ids and
  :data:`~kvplan.protocol.read.MAX_TRANSFER_BYTES`, and each :meth:`Reads.poll` posts some,
  until the read has failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import attrs

from kvplan._checks import having, instance, integer
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.executor import Executor, Status, Transfer
from kvplan.protocol.claims import Claims
from kvplan.protocol.digest import mismatch
from kvplan.protocol.digest_requests import DigestRequest, fetch_digests
from kvplan.protocol.handoff import Source
from kvplan.protocol.importer import PartialRead
from kvplan.protocol.peer_engines import (
    Connections,
    PeerEngines,
    PeerPlan,
)
from kvplan.protocol.read import (
    MAX_TRANSFER_IDS,
    Read,
    ReadResult,
    cut,
    error_of,
    request_of,
)
from kvplan.protocol.read_jobs import SILENCE_S, Digest, Job, LeaseCheck, RequestReads
from kvplan.protocol.system import RETRY_S, Background, Pending, System
from kvplan.staging import Pipeline, StagedTransfer

if TYPE_CHECKING:
    from logging import Logger

MAX_FETCHES: Final = 8
"""Requests whose digests are fetched from one engine at a time."""

STALL_S: Final = 2.0
"""Seconds without a new chunk in the staging region, after which waiting requests leave it."""

POST_S: Final = 0.02
"""Seconds of an engine's step in which transfers are handed over."""


class Reads:
    """The requests that ``worker`` reads by ``executor``, or by its ``pipeline`` if that is faster.

    ``connections`` are the functions by which other engines' workers become known, and ``claims``
    asks sources whether leases are valid. ``digest`` computes the digests of what has arrived. A
    transfer has at most ``max_transfer_ids``. Not for several threads at once.
    """

    def __init__(
        self,
        worker: Worker,
        executor: Executor,
        logger: Logger,
        *,
        connections: Connections,
        claims: Claims,
        system: System,
        pipeline: Pipeline | None = None,
        digest: Digest | None = None,
        max_transfer_ids: int = MAX_TRANSFER_IDS,
    ) -> None:
        self._max_transfer_ids = integer(max_transfer_ids, "max_transfer_ids", low=1)
        self.worker: Worker = instance(Worker, worker, "worker")
        self._executor: Executor = having("prepare", executor, "executor", "an Executor")
        self._logger: Logger = having("warning", logger, "logger", "a logger")
        self._claims: Claims = having("ask", claims, "claims", "Claims")
        self._pipeline = None if pipeline is None else instance(Pipeline, pipeline, "pipeline")
        if digest is not None:
            having("__call__", digest, "digest", "a function")
        self._digest = digest
        instance(Connections, connections, "connections")
        self._system = instance(System, system, "system")
        self._peers = PeerEngines(worker, executor, logger, connections, self._pipeline, system)
        # by engine, so that one that does not answer holds up no other; an idle one is dropped
        self._fetches: WeakValueDictionary[Source, Background] = WeakValueDictionary()
        # the chunks of the pipeline that have begun, and when that number was seen to change
        self._num_chunks = 0
        self._last_chunk_at = 0.0
        self._posted_s = 0.0  # in this step, which begins with poll
        self._requests: dict[str, RequestReads] = {}
        self._jobs: dict[Job, None] = {}

    def submit(self, partial_read: PartialRead) -> None:
        """Read some of a request, or report that it fails, as an importer has returned it.

        Partial reads of a request run one after the other, and :meth:`poll` reports the request
        after the one that ``is_last``. One with an error is reported when what is under way has
        ended, and later ones are not read.
        """
        request = instance(PartialRead, partial_read, "partial read").request
        reads = self._requests.setdefault(request, RequestReads(request))
        reads.has_last = partial_read.is_last
        if partial_read.read is not None and partial_read.error is None:
            reads.queue.append(partial_read.read)
            if not reads.is_moving:
                self._begin(reads)
        elif partial_read.error is not None and reads.error is None:
            reads.error = partial_read.error.with_details(request=request)
            if not reads.is_moving:
                self._log_failure(request, reads.error)

    def is_moving(self, request: str) -> bool:
        """Return whether bytes of a request may move now, also if it has failed."""
        return request in self._requests and self._requests[request].is_moving

    def _begin(self, reads: RequestReads) -> None:
        """Begin the next read of a request, or the same one again, unless one has failed."""
        if reads.error is not None:
            reads.queue.clear()
        reads.is_moving = bool(reads.queue)
        if not reads.is_moving:
            return
        peer = self._peers.use(reads.queue[0].source)
        if peer.plan is not None:
            self._start(reads, peer.plan, was_connected=True)
        else:
            reads.came_at = self._system.monotonic()
            peer.waiting.append(reads)

    def _end(self, reads: RequestReads, result: ReadResult) -> None:
        """Note the result of a read, and begin the next one of its request."""
        reads.queue.popleft()
        reads.results.append(result)
        reads.error = reads.error or result.error
        if result.error is None:
            message = "request %r is read: %d bytes in %.3f s"
            self._logger.debug(message, result.request, result.num_bytes, result.seconds)
        else:
            self._log_failure(result.request, result.error)
        self._begin(reads)

    def _log_failure(self, request: str, error: KVPlanError) -> None:
        source = error.details.get("read_from", "another engine")
        self._logger.error("request %r: KV read from %s failed: %s", request, source, error)

    def poll(self) -> list[ReadResult]:
        """Continue without waiting, and return the requests that have ended since the last call."""
        self._posted_s = 0.0
        # handshakes first, since a request that waited begins to move in this step
        for peer in self._peers.poll():
            waiting, peer.waiting = peer.waiting, []
            for reads in waiting:
                is_later = reads.came_at - peer.began_at > RETRY_S
                if reads.error is not None or (peer.plan is None and is_later):
                    self._begin(reads)
                elif peer.plan is not None:
                    self._start(reads, peer.plan, was_connected=False)
                else:
                    assert peer.error is not None
                    read = reads.queue[0]
                    self._end(reads, ReadResult(read.request, error_of(read, peer.error)))
        if self._pipeline is not None:
            self._poll_pipeline(self._pipeline)
        now = self._system.monotonic()
        changed = [
            job for job in self._jobs if self._has_changed(job) or job.lease_check.is_due(now)
        ]
        for job in changed:
            self._poll_job(job)
        ended = []
        for request, reads in [*self._requests.items()]:
            if reads.has_last and not reads.is_moving:
                del self._requests[request]
                ended.append(reads.result())
        return ended

    def late(self) -> dict[str, KVPlanError]:
        """Return the requests that have failed while bytes may still move, with errors.

        They have lost their lease, or their connection, or more of them may come. Each is returned
        once. Its blocks must stay until :meth:`poll` reports it: when its source answers or dies.
        """
        late = dict[str, KVPlanError]()
        for request, reads in self._requests.items():
            if reads.error is not None and not reads.is_reported_late:
                reads.is_reported_late = True
                late[request] = reads.error
        return late

    @property
    def num_held(self) -> int:
        """The number of failed requests whose blocks stay until their source answers or dies."""
        return sum(reads.is_reported_late and reads.is_moving for reads in self._requests.values())

    def _start(self, reads: RequestReads, plan: PeerPlan, *, was_connected: bool) -> None:
        """Start the transfers of a read. From now on it has a job, whatever fails."""
        read = reads.queue[0]
        now = self._system.monotonic()
        lease_check = LeaseCheck(
            read, self._claims, self._logger, self._system, asked_at=now, confirmed_at=now
        )
        job = Job(reads, read, plan.direct, lease_check, began_at=now, was_connected=was_connected)
        self._jobs[job] = None
        try:
            if self._digest is not None:
                job.digests = self._fetch_digests(read)
            if plan.staged is None or self._pipeline is None:
                self._bind(job)
            else:
                request = request_of(read, plan.direct, to_block_end=read.to_block_end)
                job.transfers.append(self._pipeline.submit(plan.staged, read.request, **request))
                job.post_seconds = self._system.monotonic() - now
        except KVPlanError as error:
            self._fail(job, error)
        self._post(job)

    def _fetch_digests(self, read: Read) -> Pending[list[Mapping[str, Any]]]:
        """Let the source compute its digests while the bytes move."""
        fetch = partial(
            fetch_digests,
            read.source,
            DigestRequest.of(read.lease, read.tokens),
            SILENCE_S,
            system=self._system,
        )
        fetches = Background("fetch digests", MAX_FETCHES, self._system)
        return self._fetches.setdefault(read.source, fetches).submit(fetch)

    def _bind(self, job: Job) -> None:
        """Cut the request into transfers with each worker that has some of the bytes."""
        request = request_of(job.read, job.plan, to_block_end=job.read.to_block_end)
        # an executor that needs no ids binds by itself
        bind = getattr(self._executor, "bind", None)
        specs = job.plan.bind(**request) if bind is None else bind(job.plan, **request)
        for spec in specs:
            job.unposted.extend(cut(spec, self._max_transfer_ids))

    def _post(self, job: Job) -> None:
        """Hand over transfers of a read while this step has time for it, rule read.R7."""
        settled = [transfer for transfer in job.transfers if transfer.status.is_settled]
        if job.error is not None or any(transfer.status is not Status.DONE for transfer in settled):
            job.unposted.clear()
        try:
            # one by one: those that have started are the job's, also if the next one fails
            while job.unposted and self._posted_s < POST_S:
                spec = job.unposted.popleft()
                began_at = self._system.monotonic()
                job.transfers.append(self._executor.start(spec, job.read.request))
                posted_at = self._system.monotonic()
                self._posted_s += posted_at - began_at
                job.post_seconds = posted_at - job.began_at
        except KVPlanError as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: KVPlanError) -> None:
        """Note the first reason for which a read fails."""
        job.error = error
        self._discard_lost(job, error)

    def _poll_pipeline(self, pipeline: Pipeline) -> None:
        """Continue staged transfers; read directly what waits for a region that stalls."""
        pipeline.poll()
        now = self._system.monotonic()
        if pipeline.num_chunks != self._num_chunks:
            self._num_chunks = pipeline.num_chunks
            self._last_chunk_at = now
        if now - self._last_chunk_at < STALL_S:
            return
        for job in self._jobs:
            for transfer in [*job.transfers]:
                if not isinstance(transfer, StagedTransfer):
                    continue
                # A chunk that has begun may still write into the request's blocks.
                has_begun = transfer.num_bytes > 0 or transfer.status.is_settled
                if not has_begun:
                    pipeline.cancel(transfer)
                    job.transfers.remove(transfer)
                    job.num_changes = -1
                    self._read_directly(job)

    def _read_directly(self, job: Job) -> None:
        """Read by the direct plan what was to be staged, unless the read has failed meanwhile."""
        if job.error is not None:
            return
        try:
            self._executor.prepare(job.plan)
            self._bind(job)
        except KVPlanError as error:
            self._fail(job, error)
        self._post(job)

    def _has_changed(self, job: Job) -> bool:
        """Look at the transfers of a read, and return whether there is something to do for it.

        Most reads of a step are those of which nothing has happened, so this does little else.
        """
        if job.is_settled:
            return job.lease_check.is_confirmed
        num_changes = 0
        for transfer in job.transfers:
            if isinstance(transfer, Transfer):
                self._executor.poll(transfer)
            if transfer.error is not None:
                num_changes += 1
            if transfer.status is not Status.RUNNING:
                num_changes += 1
        if num_changes == job.num_changes and not job.unposted:
            return False
        job.num_changes = num_changes
        return True

    def _poll_job(self, job: Job) -> None:
        """Continue a read; report it when no byte of it can move, and it is right or has failed."""
        if not job.is_settled:
            if job.error is None and (held_error := job.held_error) is not None:
                self._fail(job, held_error)
            if job.unposted:
                self._post(job)
            is_posted = not job.unposted
            if is_posted and all(transfer.status.is_settled for transfer in job.transfers):
                self._settle_transfers(job)
        # Also of a read that has failed while bytes may move: its source may be gone.
        if job.error is None or not job.is_settled:
            job.lease_check.poll()
            job.error = job.error or job.lease_check.error
        if job.error is not None:
            self._stop_staging(job)
        is_right = job.lease_check.is_confirmed
        # Digests matter only if the blocks were the request's until the last byte.
        if job.error is None and is_right and job.digests is not None:
            if not job.digests.done:
                return
            job.error = self._mismatch(job, job.digests)
        # Before it is settled, a read that has failed keeps its blocks, by rule read.R2.
        if job.is_settled and (job.error is not None or is_right):
            del self._jobs[job]
            if job.may_repeat:
                self._begin(job.reads)
            else:
                self._end(job.reads, job.result(self._system.monotonic()))
        elif job.reads.error is None and (job.held_error or job.lease_check.error) is not None:
            assert job.error is not None
            job.reads.error = error_of(job.read, job.error)
            message = "blocks of request %r stay until its source answers or dies: %s"
            self._logger.error(message, job.read.request, job.error)

    def _stop_staging(self, job: Job) -> None:
        """Begin no further chunk of a read that has failed."""
        for transfer in job.transfers:
            if isinstance(transfer, StagedTransfer) and self._pipeline is not None:
                self._pipeline.cancel(transfer)

    def _mismatch(self, job: Job, expected: Pending[list[Mapping[str, Any]]]) -> KVPlanError | None:
        """Return the difference between what has arrived and what the source has, if any.

        Digests that cannot be computed or fetched count as different.
        """
        assert self._digest is not None
        # windows and states come with the last partial read
        local = {group: blocks for group, blocks in job.read.local.items() if blocks.ids.size}
        tokens = {group: span for group, span in job.read.tokens.items() if group in local}
        read = attrs.evolve(job.read, local=local, tokens=tokens)
        try:
            arrived = self._digest(request_of(read, job.plan, to_block_end=False))
            error = mismatch(expected.result(), [arrived])
        except KVPlanError as failure:
            return failure
        # Digests of different elements say nothing.
        if error is not None and error.code == "COVER":
            request = job.read.request
            self._logger.warning("request %r: digests are not compared: %s", request, error)
            return None
        return error

    def _settle_transfers(self, job: Job) -> None:
        """Take the errors of transfers that have all ended, and release them."""
        job.is_settled = True
        job.transfer_seconds = self._system.monotonic() - job.began_at
        job.lease_check.begin_last()
        for transfer in job.transfers:
            error = transfer.error
            # A transfer without an error may lack bytes too.
            if error is None and transfer.status is not Status.DONE:
                action = f"read request {job.read.request!r} from {job.read.source}"
                got = f"a {transfer.status.value} transfer"
                error = KVPlanError("TRANSFER", action, expected="all its bytes", got=got)
            job.error = job.error or error
            if error is not None and (transfer.error or transfer.status is Status.FAILED):
                self._discard_lost(job, error)
            if isinstance(transfer, Transfer):
                self._executor.release(transfer)

    def _discard_lost(self, job: Job, error: KVPlanError) -> None:
        """Forget an engine that is gone, or whose plan is not prepared any more.

        The next request to it shakes hands again.
        """
        if error.code in ("PEER", "TRANSFER"):
            job.is_lost = True
            self._peers.discard(job.read.source)
