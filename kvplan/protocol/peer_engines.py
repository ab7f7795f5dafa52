"""Peer engines: the engines that one worker reads from, and the plan by which it reads from each.

A peer engine is in one of three states. While a coroutine shakes hands with it, which is to fetch
its offers and to make a plan, it has neither a plan nor an error. Then it is ready, with a plan, or
it has failed, with an error. A failed one is forgotten at once, so that the next request to that
engine shakes hands again.

- peer.P1: An engine offers workers of its own name alone.
- peer.P2: Another start of an engine replaces an earlier one only if that one does not answer any
  more. It does not wait for the end of a handshake with the earlier one, which may hang for all its
  time: that handshake fails as soon as the other start is ready.
- peer.P3: At most :data:`MAX_HANDSHAKES` handshakes are under way. Other engines wait for one.
- peer.P4: What an engine offers is read and planned within a :class:`kvplan.Budget`, all its
  workers together, and one engine at a time. Where that comes to its turn too late, nothing is
  planned, or all engines that wait behind it would be late too.

Connections and prepared plans belong to the executor, so they are made on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs

from kvplan._checks import check_fields, having, instance, seconds
from kvplan._text import brief_repr
from kvplan.budget import MESSAGE_BYTES, Budget
from kvplan.describe.worker import Key, Worker
from kvplan.errors import KVPlanError
from kvplan.executor import Executor
from kvplan.plan import TransferPlan, plan_reads
from kvplan.protocol.handoff import Source
from kvplan.protocol.listener import fetch
from kvplan.protocol.read_jobs import RequestReads
from kvplan.protocol.retention import check_kept
from kvplan.protocol.system import ANSWER_S, Pending, System, pend
from kvplan.staging import Pipeline, StagedPlan
from kvplan.staging.choice import STRATEGIES, choice_of
from kvplan.staging.plan import DirectReads

if TYPE_CHECKING:
    from logging import Logger

HANDSHAKE_S: Final = 30.0
"""Seconds within which an engine must answer a handshake."""

MAX_AGE_S: Final = 3600.0
"""Seconds after which an engine is forgotten that nothing was read from."""

MAX_HANDSHAKES: Final = 64
"""Handshakes under way at a time. Each may keep an answer in memory, so there is a limit; it is
above the number of engines that are likely to hang at once, since these would hold up all others.
"""

USUAL_TOKENS: Final = 1024
"""Positions of the request for which a way to read from an engine is chosen."""


@attrs.frozen
class Handshakes:
    """How handshakes go: an engine has ``timeout_s`` to answer, and ``report`` hears how each ends.

    What the engine offers may cost ``budget_bytes`` of a :class:`kvplan.Budget`.
    """

    timeout_s: float = HANDSHAKE_S
    budget_bytes: int = Budget.DEFAULT_BYTES
    report: Callable[[HandshakeResult], object] = lambda result: None

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "handshakes", seconds, "timeout_s")
        Budget(self.budget_bytes)
        having("__call__", self.report, "report of handshakes", "a function")


@attrs.frozen(kw_only=True)
class Connections:
    """The functions by which an executor meets the workers of other engines.

    ``open_offer`` returns the worker in an offer. ``connect`` makes that worker known to the
    executor, or changes nothing where it is known; ``disconnect`` makes the executor forget it.
    ``plan`` plans how to read from all workers of an engine, within a ``budget``. ``open_offer``
    and ``plan`` may be called on another thread, the others where
    :class:`~kvplan.protocol.Reads` is polled.
    """

    open_offer: Callable[[bytes], Worker]
    connect: Callable[[bytes], object]
    disconnect: Callable[[Worker], None]
    plan: Callable[..., TransferPlan] = plan_reads
    handshakes: Handshakes = Handshakes()

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        instance(Handshakes, self.handshakes, "handshakes of connections")
        for field in attrs.fields(Connections):
            if field.name != "handshakes":
                function = getattr(self, field.name)
                having("__call__", function, f"{field.name} of connections", "a function")


@attrs.frozen(eq=False)
class PeerPlan:
    """The plan by which a worker reads from an engine: directly, or as ``staged`` says.

    ``remark`` is what an operator should know of it, if anything. ``offers`` has the offer of each
    of the engine's workers with which bytes are exchanged: with the keys to its memory they are
    long, and fleets are large. To open all and to plan took ``seconds``.
    """

    offers: Mapping[Key, bytes]
    direct: TransferPlan
    staged: StagedPlan | None = None
    remark: str = ""
    seconds: float = 0.0

    def __repr__(self) -> str:
        return repr(self.staged or self.direct)


@attrs.define(eq=False)
class PeerEngine:
    """An engine to read from, since the first request to it came; the last one at ``used_at``.

    Its ``handshake``, which began at ``began_at``, waits or is under way while it has neither a
    ``plan`` nor an ``error``. Requests are ``waiting`` for its end. The handshakes with ``earlier``
    starts of the engine had begun then.
    """

    source: Source
    used_at: float
    began_at: float = 0.0
    earlier: tuple[Source, ...] = ()
    handshake: Pending[PeerPlan] | None = None
    plan: PeerPlan | None = None
    error: KVPlanError | None = None
    waiting: list[RequestReads] = attrs.field(factory=list)


@attrs.frozen
class HandshakeResult:
    """The end of a handshake with ``source``, which took ``seconds``: with an error or without.

    Of these seconds, ``plan_seconds`` went into the plan.
    """

    source: Source
    error: KVPlanError | None
    seconds: float
    plan_seconds: float

    __repr__ = brief_repr


@attrs.frozen
class WorkerOffer:
    """A worker that is connected, and the offer by which it is."""

    worker: Worker
    offer: bytes


class PeerEngines:
    """The engines that ``worker`` reads from. Not for several threads at once."""

    def __init__(
        self,
        worker: Worker,
        executor: Executor,
        logger: Logger,
        connections: Connections,
        pipeline: Pipeline | None,
        system: System,
    ) -> None:
        self._system = system
        self._handshake = connections.handshakes
        self._worker = worker
        self._executor = executor
        self._logger = logger
        self._connections = connections
        self._pipeline = pipeline
        self._peers: dict[Source, PeerEngine] = {}
        self._connected: dict[Key, WorkerOffer] = {}
        self._handshakes: list[Pending[PeerPlan]] = []

    def use(self, source: Source) -> PeerEngine:
        """Return the peer engine of a request. A handshake begins where there is none."""
        now = self._system.monotonic()
        peer = self._peers.setdefault(source, PeerEngine(source, now))
        peer.used_at = now
        if peer.handshake is None:
            self._begin_handshake(peer)
        return peer

    def poll(self) -> Iterator[PeerEngine]:
        """Report and yield the engines that are ready now, or have failed.

        The caller starts the requests to an engine before the next one is connected, which may
        replace it.
        """
        for peer in [*self._peers.values()]:
            if peer.plan is None and self._advance(peer):
                taken_s = self._system.monotonic() - peer.began_at
                plan_s = 0.0 if peer.plan is None else peer.plan.seconds
                self._handshake.report(HandshakeResult(peer.source, peer.error, taken_s, plan_s))
                yield peer

    def discard(self, source: Source) -> None:
        """Forget an engine that is gone, unless a handshake with it is under way.

        It may have become ready again before the error came, by the connection that is lost.
        """
        peer = self._peers.get(source)
        if peer is not None and peer.plan is not None:
            del self._peers[source]

    def _begin_handshake(self, peer: PeerEngine) -> None:
        """Begin to fetch offers and to make a plan, unless too many handshakes are under way.

        That is rule peer.P3.
        """
        self._handshakes = [handshake for handshake in self._handshakes if not handshake.done]
        if len(self._handshakes) >= MAX_HANDSHAKES:
            return
        source = peer.source
        begun = [start for start in self._other_starts(peer) if start.handshake is not None]
        peer.earlier = tuple(start.source for start in begun)
        peer.began_at = self._system.monotonic()
        peer.handshake = handshake = Pending[PeerPlan]()
        self._handshakes.append(handshake)
        until = peer.began_at + self._handshake.timeout_s
        plan = partial(self._plan, source, peer.earlier, until)
        action = f"shake hands with {source}"
        self._system.start(
            f"kvplan handshake {source.engine_id}",
            lambda: pend(handshake, plan(), action, source=source),
        )

    def _other_starts(self, peer: PeerEngine) -> list[PeerEngine]:
        """Return the other starts of a peer's engine, or engines that have taken its name."""
        engine_id = peer.source.engine_id
        starts = [start for start in self._peers.values() if start.source.engine_id == engine_id]
        return [start for start in starts if start is not peer]

    async def _plan(self, source: Source, earlier: Sequence[Source], until: float) -> PeerPlan:
        """Fetch offers, and choose how to read from their workers, by rule read.R5.

        ``earlier`` are other starts of the engine, which must not answer any more. The handshake
        fails at ``until``.
        """
        timeout_s = self._handshake.timeout_s
        offers = (await fetch(source, timeout_s, system=self._system)).workers
        fetched_at = self._system.monotonic()
        budget = Budget(self._handshake.budget_bytes)
        workers = await self._system.work(partial(self._open, source, offers, budget, until))
        for start in earlier:
            # together they leave half of the time for the rest of the handshake
            await self._refuse_beside(source, start, min(ANSWER_S, timeout_s / 2 / len(earlier)))
        choose = partial(self._fastest_plan, source, workers, budget, until)
        plan, remark = await self._system.work(choose)
        staged = plan if isinstance(plan, StagedPlan) else None
        direct = plan.direct if isinstance(plan, StagedPlan) else plan
        check_kept(direct)
        moving = {pair.remote for pair in direct.pairs if pair.group_pairs}
        keys = [worker.key for worker in workers]
        by_key = {key: offer for key, offer in zip(keys, offers, strict=True) if key in moving}
        seconds = self._system.monotonic() - fetched_at
        return PeerPlan(by_key, direct, staged, remark, seconds)

    def _open(
        self, source: Source, offers: Sequence[bytes], budget: Budget, until: float
    ) -> list[Worker]:
        """Return the workers in offers."""
        self._check_time(source, until)
        num_bytes = sum(map(len, offers))
        budget.spend(num_bytes, "bytes of offers", MESSAGE_BYTES, f"open the offers of {source}")
        workers = [self._connections.open_offer(offer) for offer in offers]
        for worker in workers:
            _check_engine(source, worker)
        return workers

    async def _refuse_beside(self, source: Source, earlier: Source, timeout_s: float) -> None:
        """Refuse an engine if an earlier start under its name still answers, by rule peer.P2."""
        try:
            await fetch(earlier, timeout_s, system=self._system)
        except KVPlanError:
            return
        raise KVPlanError(
            "PEER",
            f"shake hands with {source}",
            expected="an engine with a name of its own",
            got=f"that of {earlier}, which still answers",
            hint="another start of an engine begins when the one before has ended",
        )

    def _check_time(self, source: Source, until: float) -> None:
        """Refuse to plan for a handshake that has failed by now, by rule peer.P4."""
        if self._system.monotonic() > until:
            raise self._late(source)

    def _late(self, source: Source) -> KVPlanError:
        return KVPlanError(
            "PEER",
            f"shake hands with {source}",
            expected=f"an answer within {self._handshake.timeout_s:g} s",
            got="none",
            hint="it is busy, stopped or not reachable; a later request tries again",
            source=source,
        )

    def _fastest_plan(
        self, source: Source, workers: list[Worker], budget: Budget, until: float
    ) -> tuple[TransferPlan | StagedPlan, str]:
        """Return the plan that takes the least time, within a budget, and a remark on it.

        The remark says why nothing can be staged, or how much more is read than is needed.
        """
        self._check_time(source, until)
        if self._pipeline is None:
            return self._connections.plan(self._worker, workers, budget=budget), ""
        shared = DirectReads.of(self._worker, workers, (), budget)
        staging = self._pipeline.staging
        try:
            choice = choice_of(shared, STRATEGIES, staging, USUAL_TOKENS, self._pipeline.rates)
        except KVPlanError as error:
            # There are more descriptors than can be counted.
            if error.code != "RANGE":
                raise
            return shared.direct, ""
        if len(choice.options) == 1 and choice.refused:
            refusals = "; ".join(dict.fromkeys(map(str, choice.refused.values())))
            cost = f"{choice.best} of {USUAL_TOKENS:,} tokens"
            return choice.best.plan, f"is not staged: {cost}; {refusals}"
        needed = min(option.num_bytes for option in choice.options)
        if choice.best.num_bytes > needed:
            amplification = f"{choice.best.num_bytes / needed:.3g} bytes for each byte needed"
            return choice.best.plan, f"is read in whole blocks, {amplification}"
        return choice.best.plan, ""

    def _advance(self, peer: PeerEngine) -> bool:
        """Continue a handshake, and return whether it has ended: the engine is ready or failed."""
        if peer.handshake is None:
            self._begin_handshake(peer)
            return False
        timeout_s = self._handshake.timeout_s
        is_late = self._system.monotonic() - peer.began_at > timeout_s
        if peer.error is None and not peer.handshake.done and not is_late:
            return False
        try:
            if peer.error is not None:
                raise peer.error
            if not peer.handshake.done:
                raise self._late(peer.source)
            plan = peer.handshake.result()
            # Connecting replaces the workers of earlier starts, also where it fails.
            self._forget_older(peer)
            self._disconnect_others(peer.source.engine_id, plan)
            peer.plan = self._connect(plan)
        except KVPlanError as error:
            del self._peers[peer.source]
            peer.error = error
            return True
        self._logger.info("%s: %r", peer.source, peer.plan)
        if plan.remark:
            self._logger.info("%s %s", peer.source, plan.remark)
        return True

    def _connect(self, plan: PeerPlan) -> PeerPlan:
        """Connect to the workers with which bytes are exchanged, and return the prepared plan.

        Nothing is staged where the executor maps the memory of all of them.
        """
        for pair, remote in zip(plan.direct.pairs, plan.direct.remotes, strict=True):
            if not pair.group_pairs:
                continue
            offer = plan.offers[remote.key]
            # A worker that was lost connects again by the same offer.
            self._connections.connect(offer)
            self._connected[remote.key] = WorkerOffer(remote, offer)
        maps = getattr(self._executor, "maps", None)
        moving = [worker for worker in plan.direct.remotes if worker.key in plan.offers]
        if maps is not None and all(maps(worker) for worker in moving):
            plan = attrs.evolve(plan, staged=None)
        if plan.staged is None:
            self._executor.prepare(plan.direct)
        elif self._pipeline is not None:
            self._pipeline.prepare(plan.staged)
        return plan

    def _forget_older(self, newest: PeerEngine) -> None:
        """Forget other starts of an engine, and engines that were not read from for long.

        Handshakes with earlier starts fail when they are looked at next.
        """
        others = self._other_starts(newest)
        for peer in [*self._peers.values()]:
            is_old = self._system.monotonic() - peer.used_at > MAX_AGE_S
            if peer.plan is not None and (is_old or peer in others):
                self._forget(peer, peer.plan)
            elif peer.source in newest.earlier:
                peer.error = KVPlanError(
                    "PEER",
                    f"shake hands with {peer.source}",
                    expected="an answer before another start of the engine is ready",
                    got="none",
                    hint="it has restarted since it computed the request",
                    source=peer.source,
                )

    def _forget(self, peer: PeerEngine, plan: PeerPlan) -> None:
        """Forget an engine, and disconnect those of its workers that no other start replaces."""
        del self._peers[peer.source]
        for key, offer in plan.offers.items():
            connected = self._connected.get(key)
            # A later start may have replaced the worker already.
            if connected is not None and connected.offer == offer:
                self._disconnect(key)

    def _disconnect_others(self, engine_id: str, plan: PeerPlan) -> None:
        """Disconnect the workers of an engine but those of a plan.

        Another offer is that of another start, or of other memory. A start that was lost has no
        peer any more, by which its workers were forgotten.
        """
        for key, connected in [*self._connected.items()]:
            if key[0] == engine_id and plan.offers.get(key) != connected.offer:
                self._disconnect(key)

    def _disconnect(self, key: Key) -> None:
        """Disconnect a worker, unless the executor keeps it: a transfer with it still runs."""
        try:
            self._connections.disconnect(self._connected[key].worker)
        except KVPlanError as error:
            if error.code == "TRANSFER":
                return
        del self._connected[key]


def _check_engine(source: Source, worker: Worker) -> None:
    """Refuse a worker that its source offers under another engine's name, by rule peer.P1."""
    if worker.engine_id != source.engine_id:
        raise KVPlanError(
            "PEER",
            f"shake hands with {source}",
            expected=f"workers of {source.engine_id}",
            got=f"worker {worker.label}",
        )
