"""Reads: the requests that one worker reads from other engines, from handshake to last byte.

- R1: Nothing waits. Offers are fetched and plans made on a thread per engine; :meth:`Reads.poll`, called once per step
  of the engine, does the rest. The executor is used on the caller's thread only.
- R2: A request is reported once, when none of its bytes can move any more, with an error or without. Until then its
  blocks must stay, also where :meth:`Reads.late` says before that it has failed.
- R3: What fails is one request, or those that wait for one engine. Another request to that engine tries again.
- R4: A request whose bytes did not all arrive before the source's deadline has failed, since the source may have given
  its blocks to another request. A peer's clock is read at the handshake, and never taken for earlier than it is.
- R5: With a pipeline, an engine is read from through its staging region where that takes less time for a request of
  :data:`TOKENS` positions. A request that waits while nothing has entered the region for :data:`STALL_S` is read
  directly: what has the region may hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from logging import Logger
from typing import Final

import attrs

from kvplan._checks import having, instance, name, seconds, settle
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
"""Seconds after which a handshake is repeated, because clocks drift, and an engine that is not read from forgotten."""

MARGIN_S: Final = 1.0
"""Seconds before the deadline at which a read must have ended, more than clocks drift in :data:`MAX_AGE_S`."""

TOKENS: Final = 1024
"""Positions of the request for which a way to read from an engine is chosen."""

STALL_S: Final = 2.0
"""Seconds without a new chunk in the staging region after which requests that wait for it are read directly."""


@attrs.frozen(kw_only=True)
class Read:
    """What a worker reads for one request: block tables of both sides and ranges of positions, by group.

    Groups that the worker or the source lacks are ignored. ``deadline`` is on the source's clock. With ``to_block_end``
    the positions after the last one, up to where a block of either side ends, may get whatever the source holds there:
    a block that moves whole takes far fewer descriptors.
    """

    request: str
    source: Source
    local: Mapping[str, Blocks]
    remote: Mapping[str, Blocks]
    tokens: Mapping[str, Range]
    deadline: float
    to_block_end: bool = False

    def __attrs_post_init__(self) -> None:
        instance(Source, self.source, "source of a read")
        instance(bool, self.to_block_end, "to_block_end of a read")
        for field in ("local", "remote", "tokens"):
            instance(Mapping, getattr(self, field), f"{field} of a read")
        settle(self, "a read", name, "request")
        settle(self, "a read", seconds, "deadline")


@attrs.frozen(eq=False)
class _Handshake:
    """The plan to read from an engine, its offers, and how far its clock is ahead of this one, at most."""

    plan: TransferPlan | StagedPlan
    offers: Mapping[Key, bytes]
    ahead_s: float

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
    """A request under way, and when its read must have ended on this worker's clock."""

    read: Read
    peer: _Peer
    direct: TransferPlan
    stop: float
    began: float
    transfers: list[Transfer | StagedTransfer] = attrs.field(factory=list)
    error: KVPlanError | None = None
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
    it known to the executor, or changes nothing where it is. Not for several threads at once.
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
        fetch_offers: Callable[[Source, float], Offers] = fetch,
        timeout_s: float = TIMEOUT_S,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.worker: Worker = instance(Worker, worker, "worker")
        self._executor: Executor = having("prepare", executor, "executor", "an Executor")
        self._logger: Logger = instance(Logger, logger, "logger")
        for function in (open_offer, connect, disconnect, fetch_offers):
            having("__call__", function, "a function of reads", "a function")
        self._open_offer = open_offer
        self._connect = connect
        self._disconnect = disconnect
        self._fetch = fetch_offers
        self._timeout_s = seconds(timeout_s, "timeout_s")
        self._pipeline = None if pipeline is None else instance(Pipeline, pipeline, "pipeline")
        self._num_chunks, self._moved = 0, 0.0  # of the pipeline, and when that was seen to change
        self._peers: dict[Source, _Peer] = {}
        self._connected: dict[Key, tuple[Worker, bytes]] = {}
        self._jobs: list[_Job] = []
        self._ended: list[ReadResult] = []

    def begin(self, read: Read) -> None:
        """Begin to read a request, which :meth:`poll` reports when it has ended."""
        peer, now = self._peers.get(instance(Read, read, "read").source), time.monotonic()
        if peer is None or (peer.ready and now - peer.began > MAX_AGE_S):
            peer = self._peers[read.source] = _Peer(read.source, now, self._shake_hands(read.source))
        peer.used = now
        if peer.ready is None:
            peer.waiting.append(read)
        else:
            self._start(read, peer, peer.ready)

    def fail(self, request: str, error: KVPlanError) -> None:
        """Report a request that can't be read."""
        self._end(ReadResult(name(request, "name of a request"), instance(KVPlanError, error, "error of a read")))

    def poll(self) -> list[ReadResult]:
        """The requests that have ended since the last call."""
        for peer in [peer for peer in self._peers.values() if peer.ready is None]:
            self._poll_handshake(peer)
        if self._pipeline is not None:
            self._poll_pipeline(self._pipeline)
        for job in [*self._jobs]:
            self._poll_transfers(job)
        ended, self._ended = self._ended, []
        return ended

    def late(self) -> dict[str, KVPlanError]:
        """The requests, with errors, that have failed since the last call as their time is over; bytes may still move.

        Their blocks must stay until :meth:`poll` reports them: when their source answers or dies.
        """
        late = {}
        for job in self._jobs:
            try:
                if not job.is_late:
                    self._check_time(job)
            except KVPlanError as error:
                job.is_late, job.error = True, job.error or error
                request = job.read.request
                late[request] = error
                self._logger.error("blocks of request %r stay until its source answers or dies: %s", request, error)
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
                future.set_exception(KVPlanError("PEER", action, expected="a plan", got=repr(error)))

        threading.Thread(target=run, name=f"kvplan handshake {source.engine_id}", daemon=True).start()
        return future

    def _handshake(self, source: Source) -> _Handshake:
        offers = self._fetch(source, self._timeout_s)
        workers = [self._open_offer(offer) for offer in offers.workers]
        by_key = {worker.key: offer for worker, offer in zip(workers, offers.workers, strict=True)}
        return _Handshake(self._plan(workers), by_key, offers.ahead_s)

    def _plan(self, workers: list[Worker]) -> TransferPlan | StagedPlan:
        """Rule R5."""
        if self._pipeline is not None:
            try:
                return choose(self.worker, workers, tokens=TOKENS, staging=self._pipeline.staging).best.plan
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
                raise KVPlanError("PEER", f"shake hands with {peer.source}", expected=expected, got="none")
            else:
                return
        except KVPlanError as error:
            self._drop(peer, error)
            return
        peer.ready = handshake
        for other in [other for other in self._peers.values() if other is not peer]:
            idle_s = time.monotonic() - other.used
            if other.ready and (other.source.engine_id == peer.source.engine_id or idle_s > MAX_AGE_S):
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
        job = _Job(read, peer, handshake.direct, read.deadline - handshake.ahead_s - MARGIN_S, now)
        self._jobs.append(job)
        try:
            self._check_time(job)
            if isinstance(handshake.plan, StagedPlan):
                assert self._pipeline is not None
                bound = _bound(job.direct, read)
                job.transfers.append(self._pipeline.submit(handshake.plan, read.request, **bound, notify=False))
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
                if isinstance(transfer, StagedTransfer) and not (transfer.num_bytes or transfer.status.is_settled):
                    pipeline.cancel(transfer)
                    job.transfers.remove(transfer)
                    try:
                        self._check_time(job)
                        self._executor.prepare(job.direct)
                        self._start_directly(job)
                    except KVPlanError as error:
                        job.error = error

    def _check_time(self, job: _Job) -> None:
        late = time.monotonic() - job.stop
        if late > 0:
            action = f"read request {job.read.request!r} from {job.read.source}"
            expected = "to end before the source may reuse its blocks"
            raise KVPlanError("TRANSFER", action, expected=expected, got=f"{late:.1f} s too late")

    def _poll_transfers(self, job: _Job) -> None:
        direct = [transfer for transfer in job.transfers if isinstance(transfer, Transfer)]
        for transfer in direct:
            self._executor.poll(transfer)
        if not all(transfer.status.is_settled for transfer in job.transfers):
            return
        self._jobs.remove(job)
        num_bytes = 0
        for each in job.transfers:
            num_bytes += each.num_bytes
            job.error = job.error or each.error
            if job.error is None and each.status is not Status.DONE:
                action = f"read request {job.read.request!r} from {job.read.source}"
                job.error = KVPlanError("TRANSFER", action, expected="all its bytes", got="a cancelled transfer")
            if each.error is not None and each.error.code == "PEER" and self._peers.get(job.peer.source) is job.peer:
                del self._peers[job.peer.source]
        for transfer in direct:
            self._executor.release(transfer)
        try:
            if job.error is None:
                self._check_time(job)
        except KVPlanError as error:
            job.error = error
        self._end(ReadResult(job.read.request, job.error, num_bytes, time.monotonic() - job.began))

    def _end(self, ended: ReadResult) -> None:
        if ended.error is not None:
            self._logger.error("request %r is not read: %s", ended.request, ended.error)
        else:
            seconds, num_bytes = ended.seconds, ended.num_bytes
            self._logger.debug("request %r is read: %d bytes in %.3f s", ended.request, num_bytes, seconds)
        self._ended.append(ended)


def _bound(plan: TransferPlan, read: Read) -> Request:
    """What a read is to :meth:`TransferPlan.bind`: block tables and ranges of the groups that both sides have."""
    ours = {group.name for group in plan.local.groups}
    theirs = {group.name for remote in plan.remotes for group in remote.groups}
    return {
        "local": {name: blocks for name, blocks in read.local.items() if name in ours},
        "remote": {name: blocks for name, blocks in read.remote.items() if name in theirs},
        "tokens": {
            name: _to_block_end(plan, name, *tokens) if read.to_block_end else tokens
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
