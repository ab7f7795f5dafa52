"""Reads: the requests that one worker reads from other engines, from handshake to last byte.

- R1: Nothing waits. Offers are fetched and plans made on a thread per engine; :meth:`Reads.poll`, called once per step
  of the engine, does the rest. The executor is used on the caller's thread only.
- R2: A request is reported once, when none of its bytes can move any more, with an error or without. Until then its
  blocks must stay, also where :meth:`Reads.late` says before that it has failed.
- R3: What fails is one request, or those that wait for one engine. Another request to that engine tries again.
- R4: A request is right only if its source says, after the last byte, that the lease stands: until then it has given
  the blocks to no other request. No clock is compared. While bytes move, the source is asked every :data:`ASK_S`; a
  request fails where the lease is over, or no answer came for :data:`SILENCE_S`.
- R5: With a pipeline, an engine is read from through its staging region where that takes less time for a request of
  :data:`TOKENS` positions. A request that waits while nothing has entered the region for :data:`STALL_S` is read
  directly: what has the region may hang.
- R6: With ``digest``, what has arrived is compared with what the source has, by logical coordinate, before a request is
  right. The source computes its digests while the bytes move. Where it can't digest the same elements, as of heads that
  are divided unevenly, the log says that the request was not verified.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from logging import Logger
from typing import Any, Final

import attrs

from kvplan._checks import having, instance, name, seconds, settle
from kvplan.connector.claims import RETRY_S, Claims
from kvplan.connector.digest import mismatch
from kvplan.connector.digest_requests import DigestRequest, fetch_digests
from kvplan.connector.handoff import Source
from kvplan.connector.listener import Offers, fetch
from kvplan.describe.blocks import Blocks, Range, Request
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.executor import Executor, Status, Transfer
from kvplan.plan import TransferPlan, plan_reads
from kvplan.staging import Pipeline, StagedPlan, StagedTransfer, choose

TIMEOUT_S: Final = 30.0
"""Seconds within which an engine must answer a handshake."""

MAX_AGE_S: Final = 3600.0
"""Seconds after which an engine is forgotten that nothing was read from."""

ASK_S: Final = 5.0
"""Seconds after which a source is asked about a lease whose bytes still move."""

SILENCE_S: Final = 30.0
"""Seconds without an answer after which a source is taken for gone."""

TOKENS: Final = 1024
"""Positions of the request for which a way to read from an engine is chosen."""

MAX_FETCHES: Final = 8
"""Requests whose digests are fetched at a time."""

STALL_S: Final = 2.0
"""Seconds without a new chunk in the staging region after which requests that wait for it are read directly."""


@attrs.frozen(kw_only=True)
class Read:
    """What a worker reads for one request: block tables of both sides and ranges of positions, by group.

    Groups that the worker or the source lacks are ignored. The source keeps its blocks under ``lease``. With
    ``to_block_end`` the positions after the last one, up to where a block of either side ends, may get whatever the
    source holds there: a block that moves whole takes far fewer descriptors.
    """

    request: str
    source: Source
    lease: str
    local: Mapping[str, Blocks]
    remote: Mapping[str, Blocks]
    tokens: Mapping[str, Range]
    to_block_end: bool = False

    def __attrs_post_init__(self) -> None:
        instance(Source, self.source, "source of a read")
        instance(bool, self.to_block_end, "to_block_end of a read")
        for field in ("local", "remote", "tokens"):
            instance(Mapping, getattr(self, field), f"{field} of a read")
        settle(self, "a read", name, "request", "lease")


@attrs.frozen(eq=False)
class _Handshake:
    """The plan to read from an engine, and its offers."""

    plan: TransferPlan | StagedPlan
    offers: Mapping[Key, bytes]

    @property
    def direct(self) -> TransferPlan:
        """The plan, or what it stages."""
        return self.plan.direct if isinstance(self.plan, StagedPlan) else self.plan


@attrs.define(eq=False)
class _Peer:
    """An engine to read from, when the handshake began, the reads that wait for it, and when the last one came."""

    source: Source
    began: float
    future: Future[_Handshake]
    waiting: list[Read] = attrs.field(factory=list)
    ready: _Handshake | None = None
    used: float = 0.0


@attrs.define(eq=False)
class _Job:
    """A request under way: its transfers, and what its source has said of the lease.

    ``asked`` is when the source was last asked, ``confirmed`` when it was asked and said yes.
    """

    read: Read
    peer: _Peer
    direct: TransferPlan
    began: float
    asked: float
    confirmed: float
    answer: Future[None] | None = None
    transfers: list[Transfer | StagedTransfer] = attrs.field(factory=list)
    expected: Future[list[Mapping[str, Any]]] | None = None  # the digests of the source's workers
    error: KVPlanError | None = None
    is_settled: bool = False  # no byte can move any more
    is_right: bool = False  # the lease stood when the last byte had come
    is_lost: bool = False  # the lease is over, or the source silent, and bytes may still move
    is_late: bool = False


@attrs.frozen
class ReadResult:
    """A request whose read has ended: with an error, or after ``num_bytes`` have moved in ``seconds``."""

    request: str
    error: KVPlanError | None = None
    num_bytes: int = 0
    seconds: float = 0.0


class Reads:
    """The requests that ``worker`` reads through ``executor``, and through its ``pipeline`` where that is faster.

    An engine's offers are fetched by ``fetch_offers``; ``open_offer`` is the worker in an offer, and ``connect`` makes
    it known to the executor, or changes nothing where it is. ``claims`` asks sources whether leases stand.
    ``digest`` computes the digests of what has arrived. Not for several threads at once.
    """

    def __init__(
        self,
        worker: Worker,
        executor: Executor,
        logger: Logger,
        *,
        open_offer: Callable[[bytes], Worker],
        connect: Callable[[bytes], object],
        disconnect: Callable[[Worker], None],
        claims: Claims,
        fetch_offers: Callable[[Source, float], Offers] = fetch,
        timeout_s: float = TIMEOUT_S,
        pipeline: Pipeline | None = None,
        digest: Callable[[Request], Mapping[str, Any]] | None = None,
    ) -> None:
        self.worker: Worker = instance(Worker, worker, "worker")
        self._executor: Executor = having("prepare", executor, "executor", "an Executor")
        self._logger: Logger = instance(Logger, logger, "logger")
        for function in (open_offer, connect, disconnect, fetch_offers):
            having("__call__", function, "a function of reads", "a function")
        self._open_offer = open_offer
        self._connect = connect
        self._disconnect = disconnect
        self._claims: Claims = having("ask", claims, "claims", "Claims")
        self._fetch = fetch_offers
        self._timeout_s = seconds(timeout_s, "timeout_s")
        self._pipeline = None if pipeline is None else instance(Pipeline, pipeline, "pipeline")
        self._digest = (
            None if digest is None else having("__call__", digest, "digest", "a function")
        )
        self._threads = ThreadPoolExecutor(MAX_FETCHES, "kvplan digests")
        self._num_chunks, self._moved = 0, 0.0  # of the pipeline, and when that was seen to change
        self._peers: dict[Source, _Peer] = {}
        self._connected: dict[Key, tuple[Worker, bytes]] = {}
        self._jobs: list[_Job] = []
        self._ended: list[ReadResult] = []

    def begin(self, read: Read) -> None:
        """Begin to read a request, which :meth:`poll` reports when it has ended."""
        peer, now = self._peers.get(instance(Read, read, "read").source), time.monotonic()
        if peer is None:
            peer = self._peers[read.source] = _Peer(
                read.source, now, self._shake_hands(read.source)
            )
        peer.used = now
        if peer.ready is None:
            peer.waiting.append(read)
        else:
            self._start(read, peer, peer.ready)

    def fail(self, request: str, error: KVPlanError) -> None:
        """Report a request that can't be read."""
        self._end(
            ReadResult(
                name(request, "name of a request"), instance(KVPlanError, error, "error of a read")
            )
        )

    def poll(self) -> list[ReadResult]:
        """The requests that have ended since the last call."""
        for peer in [peer for peer in self._peers.values() if peer.ready is None]:
            self._poll_handshake(peer)
        if self._pipeline is not None:
            self._poll_pipeline(self._pipeline)
        for job in [*self._jobs]:
            self._poll_job(job)
        ended, self._ended = self._ended, []
        return ended

    def late(self) -> dict[str, KVPlanError]:
        """The requests, with errors, that have lost their lease since the last call while bytes may still move.

        Their blocks must stay until :meth:`poll` reports them: when their source answers or dies.
        """
        late = {}
        for job in self._jobs:
            if job.is_lost and not job.is_late:
                assert job.error is not None
                job.is_late = True
                request = job.read.request
                late[request] = job.error
                self._logger.error(
                    "blocks of request %r stay until its source answers or dies: %s",
                    request,
                    job.error,
                )
        return late

    def _shake_hands(self, source: Source) -> Future[_Handshake]:
        """Fetch the offers of an engine and plan with it, on a thread."""
        future: Future[_Handshake] = Future()

        def run() -> None:
            try:
                future.set_result(self._handshake(source))
            except KVPlanError as error:
                future.set_exception(error)
            except Exception as error:  # whatever it is, the requests that wait for this engine fail, and no others
                action = f"shake hands with {source}"
                future.set_exception(
                    KVPlanError("PEER", action, expected="a plan", got=repr(error))
                )

        threading.Thread(
            target=run, name=f"kvplan handshake {source.engine_id}", daemon=True
        ).start()
        return future

    def _handshake(self, source: Source) -> _Handshake:
        offers = self._fetch(source, self._timeout_s)
        workers = [self._open_offer(offer) for offer in offers.workers]
        by_key = {worker.key: offer for worker, offer in zip(workers, offers.workers, strict=True)}
        return _Handshake(self._plan(workers), by_key)

    def _plan(self, workers: list[Worker]) -> TransferPlan | StagedPlan:
        """Rule R5."""
        if self._pipeline is not None:
            try:
                return choose(
                    self.worker, workers, tokens=TOKENS, staging=self._pipeline.staging
                ).best.plan
            except KVPlanError as error:
                if error.code != "RANGE":  # more descriptors than can be counted
                    raise
        return plan_reads(self.worker, workers)

    def _poll_handshake(self, peer: _Peer) -> None:
        try:
            if peer.future.done():
                handshake = peer.future.result()
                self._join(handshake)
            elif time.monotonic() - peer.began > self._timeout_s:
                expected = f"an answer within {self._timeout_s:g} s"
                raise KVPlanError(
                    "PEER", f"shake hands with {peer.source}", expected=expected, got="none"
                )
            else:
                return
        except KVPlanError as error:
            self._drop(peer, error)
            return
        peer.ready = handshake
        for other in [other for other in self._peers.values() if other is not peer]:
            idle_s = time.monotonic() - other.used
            if other.ready and (
                other.source.engine_id == peer.source.engine_id or idle_s > MAX_AGE_S
            ):
                self._forget(other.source, other.ready)
        self._logger.info("%s: %r", peer.source, handshake.plan)
        waiting, peer.waiting = peer.waiting, []
        for read in waiting:
            self._start(read, peer, handshake)

    def _join(self, handshake: _Handshake) -> None:
        """Connect to the workers with which bytes are exchanged, and prepare the plan."""
        for pair, remote in zip(handshake.direct.pairs, handshake.direct.remotes, strict=True):
            offer, known = handshake.offers[remote.key], self._connected.get(remote.key)
            if not pair.group_pairs:
                continue
            if known is not None and known[1] != offer:
                self._disconnect(known[0])
            self._connected.pop(remote.key, None)
            self._connect(offer)
            self._connected[remote.key] = remote, offer
        if isinstance(handshake.plan, StagedPlan):
            assert self._pipeline is not None
            self._pipeline.prepare(handshake.plan)
        else:
            self._executor.prepare(handshake.plan)

    def _forget(self, source: Source, handshake: _Handshake) -> None:
        """Forget an engine that has restarted, or was not read from for long."""
        del self._peers[source]
        for key, offer in handshake.offers.items():
            known = self._connected.get(key)
            if known is not None and known[1] == offer:
                del self._connected[key]
                with suppress(KVPlanError):  # a transfer with it still runs: the executor keeps it
                    self._disconnect(known[0])

    def _drop(self, peer: _Peer, error: KVPlanError) -> None:
        """Forget an engine; the requests that wait for it fail."""
        del self._peers[peer.source]
        for read in peer.waiting:
            self._end(ReadResult(read.request, error))

    def _start(self, read: Read, peer: _Peer, handshake: _Handshake) -> None:
        now = time.monotonic()
        job = _Job(read, peer, handshake.direct, began=now, asked=now, confirmed=now)
        self._jobs.append(job)
        if self._digest is not None:
            request = DigestRequest.of(read.lease, read.tokens)
            job.expected = self._threads.submit(fetch_digests, read.source, request, SILENCE_S)
        try:
            if isinstance(handshake.plan, StagedPlan):
                assert self._pipeline is not None
                bound = _bound(job.direct, read)
                job.transfers.append(
                    self._pipeline.submit(handshake.plan, read.request, **bound, notify=False)
                )
            else:
                self._start_directly(job)
        except KVPlanError as error:
            job.error = error

    def _start_directly(self, job: _Job) -> None:
        for spec in job.direct.bind(**_bound(job.direct, job.read)):
            if spec.local_ids.size:
                job.transfers.append(self._executor.start(spec, job.read.request, notify=False))

    def _poll_pipeline(self, pipeline: Pipeline) -> None:
        """Go on with what is staged, and read directly what waits for it in vain, by rule R5."""
        pipeline.poll()
        now = time.monotonic()
        if pipeline.num_chunks != self._num_chunks:
            self._num_chunks, self._moved = pipeline.num_chunks, now
        if now - self._moved < STALL_S:
            return
        for job in self._jobs:
            for transfer in [*job.transfers]:
                if isinstance(transfer, StagedTransfer) and not (
                    transfer.num_bytes or transfer.status.is_settled
                ):
                    pipeline.cancel(transfer)
                    job.transfers.remove(transfer)
                    if job.error is not None:
                        continue
                    try:
                        self._executor.prepare(job.direct)
                        self._start_directly(job)
                    except KVPlanError as error:
                        job.error = error

    def _poll_lease(self, job: _Job) -> None:
        """Ask the source whether the lease stands, now and then while bytes move, and once they all have come."""
        now = time.monotonic()
        if job.answer is not None and job.answer.done():
            error = job.answer.exception()
            job.answer = None
            if error is None:
                job.confirmed = job.asked
                job.is_right = job.is_settled
            elif not isinstance(error, KVPlanError):
                raise error
            elif error.code == "LEASE" or now - job.confirmed > SILENCE_S:
                job.error = error
                job.is_lost = True
            else:
                self._logger.warning("request %r is not confirmed yet: %s", job.read.request, error)
        interval_s = RETRY_S if job.is_settled else ASK_S
        if (
            job.answer is None
            and not (job.is_right or job.is_lost)
            and now - job.asked >= interval_s
        ):
            job.asked = now
            job.answer = self._claims.ask(job.read.source, job.read.lease)

    def _poll_job(self, job: _Job) -> None:
        """Go on with a request; report it when no byte of it can move and its lease is known."""
        for transfer in job.transfers:
            if isinstance(transfer, Transfer) and not job.is_settled:
                self._executor.poll(transfer)
        if not job.is_settled and all(transfer.status.is_settled for transfer in job.transfers):
            self._settle(job)
        if job.error is None:
            self._poll_lease(job)
        if job.error is None and job.is_right and job.expected is not None:
            if not job.expected.done():
                return
            job.error = self._mismatch(job, job.expected)
        if job.is_settled and (job.error is not None or job.is_right):
            self._jobs.remove(job)
            num_bytes = sum(transfer.num_bytes for transfer in job.transfers)
            self._end(
                ReadResult(job.read.request, job.error, num_bytes, time.monotonic() - job.began)
            )

    def _mismatch(self, job: _Job, expected: Future[list[Mapping[str, Any]]]) -> KVPlanError | None:
        """Compare what has arrived with what the source has."""
        assert self._digest is not None
        try:
            error = mismatch(
                expected.result(), [self._digest(_bound(job.direct, job.read, to_block_end=False))]
            )
        except KVPlanError as failure:
            return failure
        if error is not None and error.code == "COVER":  # digests of other elements say nothing
            self._logger.warning("request %r is not verified: %s", job.read.request, error)
            return None
        return error

    def _settle(self, job: _Job) -> None:
        """Take the errors of transfers, none of which moves any more, and release them. What was asked is too old."""
        job.is_settled = True
        job.asked = -math.inf
        job.answer = None
        for transfer in job.transfers:
            job.error = job.error or transfer.error
            if job.error is None and transfer.status is not Status.DONE:
                action = f"read request {job.read.request!r} from {job.read.source}"
                job.error = KVPlanError(
                    "TRANSFER", action, expected="all its bytes", got="a cancelled transfer"
                )
            is_gone = transfer.error is not None and transfer.error.code == "PEER"
            if is_gone and self._peers.get(job.peer.source) is job.peer:
                del self._peers[job.peer.source]
            if isinstance(transfer, Transfer):
                self._executor.release(transfer)

    def _end(self, ended: ReadResult) -> None:
        if ended.error is not None:
            self._logger.error("request %r is not read: %s", ended.request, ended.error)
        else:
            seconds, num_bytes = ended.seconds, ended.num_bytes
            self._logger.debug(
                "request %r is read: %d bytes in %.3f s", ended.request, num_bytes, seconds
            )
        self._ended.append(ended)


def _bound(plan: TransferPlan, read: Read, *, to_block_end: bool = True) -> Request:
    """What a read is to :meth:`TransferPlan.bind`: block tables and ranges of the groups that both sides have.

    Ranges end with a block where the read may, unless ``to_block_end`` is false.
    """
    ours = {group.name for group in plan.local.groups}
    theirs = {group.name for remote in plan.remotes for group in remote.groups}
    return {
        "local": {name: blocks for name, blocks in read.local.items() if name in ours},
        "remote": {name: blocks for name, blocks in read.remote.items() if name in theirs},
        "tokens": {
            name: _to_block_end(plan, name, *tokens)
            if read.to_block_end and to_block_end
            else tokens
            for name, tokens in read.tokens.items()
            if name in ours
        },
    }


def _to_block_end(plan: TransferPlan, name: str, start: int, stop: int) -> Range:
    """The positions of a local group up to where a block of either side ends, whichever ends first."""
    if start == stop:
        return start, stop
    sizes = {
        group.tokens_per_block
        for pair in plan.pairs
        for each in pair.group_pairs
        if each.groups[0].name == name
        for group in each.groups
    }
    return start, min((-(-stop // size) * size for size in sizes if size), default=stop)
