"""A serving engine: a pool of blocks, a prefix cache by hash, a scheduler, and a connector.

It does what vLLM's scheduler does with a connector, and nothing more. Its tokens mean nothing: a
request is right if each byte that it attends to has the label of its own tokens.
"""

from __future__ import annotations

import enum
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import attrs
import numpy as np

from kvplan.describe import Worker
from kvplan.errors import KVPlanError
from kvplan.protocol import Connections, prompt_digest
from kvplan.protocol.peer_engines import HANDSHAKE_S
from kvplan.protocol.read import MAX_TRANSFER_IDS
from kvplan.protocol.read_jobs import ASK_S, SILENCE_S
from kvplan.protocol.system import ANSWER_S
from kvplan.testing.simulation.catalog import NULL_BLOCK, GroupShape
from kvplan.testing.simulation.fabric import Fabric, Port, VirtualCopier, VirtualExecutor
from kvplan.testing.simulation.features import Feature
from kvplan.testing.simulation.memory import (
    NUMBER_BITS,
    CellLabels,
    LabelledMemory,
    Numbers,
    prefix_labels,
)
from kvplan.testing.simulation.network import Host
from kvplan.testing.simulation.scenario import Call, CallKind, answer_to
from kvplan.testing.simulation.tasks import BlockedError, BrokenRuleError

TOKENS_PER_STEP: Final = 16
"""Positions of one request that an engine computes in a step, by default."""

STEP_S: Final = 0.004
"""Seconds from one step of an engine that computes to the next."""

MAX_PAUSE_S: Final = 0.003
"""Seconds for which other threads run at most while a scheduler is in a step, wherever it pauses.

A message comes in up to 2.2 ms, and a question is answered in twice as many."""

MAX_DRAFTS: Final = 2
"""Tokens of an answer that are drafted for a step, where a model drafts any."""

MAX_WAITING_STEPS: Final = 30
"""Steps in which a request may wait for blocks while an answer is kept that nobody asks for."""

LOST_S: Final = HANDSHAKE_S + SILENCE_S + ASK_S + 2 * ANSWER_S + 5.0
"""Seconds within which a request ends whose source is gone: it asks in vain, and may shake hands
again before that."""

ROOM_TIMEOUT_S: Final = 60.0
SHORT_WAIT_S: Final = 5.0
"""Seconds for which a request waits for each entry of its room, and in fleets of short waits."""

SLICE_IDS: Final = 5
"""Descriptor ids of a transfer where reads are cut into slices."""

Tables = dict[str, list[int]]
"""The blocks of a request by cache group, in the order of its positions."""


class Phase(enum.Enum):
    """What a request does in its engine."""

    WAITING = "waits"
    READING = "is read"
    RUNNING = "runs"
    ENDED = "has ended"


@attrs.define(eq=False)
class EngineRequest:
    """A request in one engine: its tokens, and how far it is.

    The first ``num_prompt`` of the ``tokens`` are the prompt. With ``is_for_another``, another
    engine goes on with it. ``params`` are those of a request that is computed elsewhere, or those
    that both engines get. ``facts`` are what decides the cache beside the tokens, each from a
    position on: a salt, an adapter, images. ``tell`` is called with the parameters for the next
    engine, if there are any, and the error. ``blocks`` has a table for each group of the cache,
    with the null block where the request needs none any more. Of the blocks of a group that
    ``num_partial`` counts, some were read in part: nobody finds them in the prefix cache. With
    ``reads_windows`` the request reads all that it needs of windows and states: of the prefix cache
    it gets positions before them. The last ``num_in_flight`` of the ``num_computed`` positions are
    those that steps under way compute, and the next step computes ``num_scheduled`` more. It came
    at ``came_at``, and the connector has said last at ``asked_at`` that nothing of it is published
    yet. To read it has taken ``read_s``, since ``began_at``; ``landed_at`` says when its last byte
    has landed in each worker. The prefix cache had ``num_found`` positions of it, and of each group
    the first ``found_blocks``, which may be fewer. If it ``is_behind``, drafts have cached nothing
    yet of the last position that is computed, since the next token comes with the next step. With
    ``is_saved`` its blocks stay when it has ended, until the connector releases them. Its
    ``hashes`` do not tell weights apart. An engine whose steps are asynchronous computes a position
    after the last token of an answer that ends by a stop token. With ``frees_at_once`` it does so
    after each answer, and blocks are free before, as with SGLang's overlap schedule.
    """

    name: str
    tokens: list[int]
    num_answer: int
    tell: Callable[[Mapping[str, Any] | None, KVPlanError | None], None]
    params: Mapping[str, Any] | None = None
    facts: tuple[tuple[int, str], ...] = ()
    is_for_another: bool = False
    reads_windows: bool = False
    num_prompt: int = attrs.field(init=False)
    labels: CellLabels = attrs.field(init=False)
    phase: Phase = Phase.WAITING
    blocks: dict[str, list[int]] = attrs.field(factory=dict)
    num_partial: dict[str, int] = attrs.field(factory=dict)
    num_computed: int = 0
    num_in_flight: int = 0
    num_scheduled: int = 0
    came_at: float = 0.0
    asked_at: float = 0.0
    began_at: float = 0.0
    read_s: float = 0.0
    landed_at: tuple[float, ...] = ()
    num_found: int = 0
    found_blocks: dict[str, int] = attrs.field(factory=dict)
    is_behind: bool = False
    num_read: int = 0
    was_preempted: bool = False
    is_aborted: bool = False
    is_saved: bool = False
    frees_at_once: bool = False

    def __attrs_post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        # the answer is known from the beginning: labels are made once
        answer = answer_to(self.tokens, self.num_answer)
        self._answer = answer
        # drafts go on after an answer
        self._labelled = (*self.tokens, *answer, *range(MAX_DRAFTS + 1))
        self.labels = self.hashes = prefix_labels(self._labelled, self.facts)

    hashes: CellLabels = attrs.field(init=False)
    _answer: list[int] = attrs.field(init=False)
    _labelled: tuple[int, ...] = attrs.field(init=False)
    _weights: tuple[tuple[int, str], ...] = attrs.field(init=False, default=())
    _is_mixed: bool = attrs.field(init=False, default=False)
    _contents: tuple[tuple[int, str], ...] = attrs.field(init=False, default=())

    def compute_with(self, version: str, start: int = 0) -> None:
        """Expect the bytes that weights of a version compute, which no digest tells apart.

        What is before the position ``start`` is of the weights before.
        """
        if version:
            before = [weights for weights in self._weights if weights[0] < start]
            self._weights = (*before, (start, f"weights {version}"))
            self._label()

    def load(self, content: str, start: int = 0) -> None:
        """Expect the bytes that the content of its adapter computes, from a position on."""
        if start and self._contents and self._contents[-1][1] == content:
            return
        before, earlier = self.labels[:start], [each for each in self._contents if each[0] < start]
        contents = (*earlier, (start, content))
        if contents != self._contents or self._is_mixed:
            self._contents = contents
            self._label()
            self.find(before)

    def _label(self) -> None:
        facts = (*self._weights, *self._contents, *self.facts)
        self.labels = prefix_labels(self._labelled, facts)
        self._is_mixed = False

    def go_on_with(self, version: str, start: int = 0) -> None:
        """Expect the bytes of a version from a position on, and those of before at the others.

        Of these positions the labels are those of a request that has the version alone.
        """
        weights = ((0, f"weights {version}"),) if version else ()
        if weights != self._weights or self._is_mixed:
            before, self._weights = self.labels, weights
            self._label()
            self.find(before[:start])

    @property
    def has_old_weights(self) -> bool:
        """Return whether its first positions are of other weights than the last ones."""
        return self._is_mixed or any(start for start, _ in self._weights)

    @property
    def adapter(self) -> str:
        """Return the name of its adapter, if it has one."""
        return next((fact for _, fact in self.facts if fact.startswith("adapter")), "")

    def find(self, labels: CellLabels) -> None:
        """Expect bytes of other weights at the first positions, which have these labels."""
        number = len(labels)
        if not np.array_equal(labels, self.labels[:number]):
            self.labels = np.concatenate([labels, self.labels[number:]])
            self._is_mixed = True

    def digest(self, num_tokens: int) -> str:
        """Digest the first tokens, and the facts that decide their cache too."""
        facts = [f"{fact} at {position}" for position, fact in self.facts if position < num_tokens]
        return prompt_digest(self.tokens[:num_tokens], facts)

    @property
    def is_complete(self) -> bool:
        """Return whether all tokens of the answer are there."""
        return len(self.tokens) == self.num_prompt + self.num_answer

    @property
    def ends_unforeseen(self) -> bool:
        """Return whether a stop token ends the answer: so does each second one of some tokens."""
        if self.frees_at_once:
            return True
        return self.num_answer > 1 and self._answer[self.num_answer - 1] % 2 == 0

    @property
    def num_settled(self) -> int:
        """Return the positions that are computed by steps that have ended.

        The ``num_found`` ones of the prefix cache are if one of its own steps has ended: another
        request may compute them.
        """
        num_settled = self.num_computed - self.num_in_flight
        return num_settled if num_settled > self.num_found else 0

    @property
    def first_answer(self) -> int:
        """Return the first token of the answer."""
        return self._answer[0]

    def stop_short(self) -> None:
        """Leave the last token of the prompt to the engine that goes on."""
        del self.tokens[-1]
        self.num_prompt -= 1
        self.num_answer = 1

    def add_token(self) -> None:
        """Generate the next token."""
        self.tokens.append(self._answer[len(self.tokens) - self.num_prompt])


@attrs.frozen(eq=False)
class _PromptChunk:
    """Positions of a request that a step computes, maybe the last ones, and its blocks then.

    The last ``num_wrong`` of them, and ``num_right`` before those, are of drafted tokens. What the
    request ``was_behind`` with is computed too.
    """

    request: EngineRequest
    labels: CellLabels
    start: int
    stop: int
    blocks: Tables
    firsts: Mapping[str, int]
    is_last: bool
    num_right: int = 0
    num_wrong: int = 0
    was_behind: bool = False


@attrs.frozen
class StepReport:
    """What a connector says of a step.

    Of ``received`` requests no byte can move any more, ``failed`` have errors, and nobody reads the
    blocks of those that are ``released``. The blocks in ``saves`` are copied to main memory, by
    group, when the step has computed; without it others read the blocks themselves. Of requests to
    be ``recomputed`` no byte can move any more, and the engine uses none of those that have come.
    """

    received: Sequence[str] = ()
    failed: Mapping[str, KVPlanError] = attrs.field(factory=dict)
    released: Sequence[str] = ()
    saves: Mapping[str, Collection[int]] | None = None
    recomputed: Sequence[str] = ()


class Connector(Protocol):
    """A connector, as an engine sees it. A simulation makes one for each start of an engine.

    One may have a method ``close`` too: an engine that ends for good stops its steps and calls it,
    with a function to call when all has ended. One with a method ``load_adapters`` gets the
    contents of adapters that workers have loaded, by name, and the names of those dropped; it
    returns the requests that fail for that.

    One with a true attribute ``reads_lagging_groups`` reads of each group what its prefix cache
    lacks. Where a model has states, vLLM gives it all that is cached of full attention then, and of
    other groups maybe less.

    Where others read copies, one with a true attribute ``reads_into_copies`` reads into the copies,
    and copies blocks itself, by :meth:`Site.copy_blocks`: of a read that has ended to the device,
    and from there when its method ``save`` gets the saves of a step that has computed.

    One with a true attribute ``resets_when_idle`` is of an engine that resets its prefix cache only
    when it has no request and keeps no block, as SGLang does: a forced reset aborts all requests,
    and succeeds when the last block is free. Operators give each update a name of its own there,
    and a start that has the weights of an update from the beginning gets none of its calls.

    One with a true attribute ``loads_when_unused`` is of an engine that loads an adapter before a
    request with it comes to its scheduler, and again when no other one has it, as SGLang does. With
    a true attribute ``renames_adapters`` its prefix cache tells the contents of an adapter apart.

    One with a method ``abort_lent`` hears that a request is aborted that has ended, and whose
    blocks are kept for readers. One with a method ``has_sent`` says whether all pipeline stages
    have sent a request that is computed.
    """

    def add(self, request: EngineRequest) -> None:
        """Take a request that has arrived."""

    def count_readable(self, request: EngineRequest, num_cached: int) -> int | None:
        """Return how many positions to read after those that are cached, None if it must wait."""

    def begin_read(self, request: EngineRequest, num_tokens: int) -> None:
        """Take the blocks of a request, of which so many positions are to be read."""

    def step(self) -> StepReport:
        """Continue, without waiting."""

    def finish(self, request: EngineRequest) -> Mapping[str, Any] | None:
        """Return the parameters for the engine that reads a request, whose blocks then stay."""

    def is_promised(self, request: str) -> bool:
        """Return whether a reader was told that the blocks of a request stay."""

    def reset(self) -> None:
        """End all exports: an operator resets the cache."""


@attrs.frozen(eq=False)
class StepsEvent:
    """An event of the steps that an engine has begun, as one of the stream in which they run."""

    _is_over: Callable[[], bool]

    def query(self) -> bool:
        """Return whether all of these steps have ended."""
        return self._is_over()

    def synchronize(self) -> None:
        """Wait until they have, in what :meth:`Host.work` calls."""
        if not self.query():
            raise BlockedError


@attrs.frozen(eq=False)
class Site:
    """What a connector gets of its engine: the host, and its workers with what belongs to each.

    The ``groups`` are those of the cache, in each worker. The ``copiers`` are for a region of each
    worker, the one that is called ``staging``. Reads are cut into transfers of at most
    ``max_transfer_ids``. With ``keeps_answers`` the blocks of an answer are handed over too, for
    the next turn of its conversation. With ``has_copies`` others read copies of blocks, which are
    those that each :class:`StepReport` says. The engine computes with ``weights`` of a version. The
    ``folder`` of an adapter returns its content. Its ``siblings`` are other connectors, which store
    each full block of a request that is read. ``record_event`` returns an event of the steps that
    have begun or are chosen. A request waits ``room_timeout_s`` for each entry of its room.
    """

    host: Host
    workers: Sequence[Worker]
    groups: Sequence[GroupShape]
    executors: Sequence[VirtualExecutor]
    copiers: Sequence[VirtualCopier]
    offers: Sequence[bytes]
    fabric: Fabric
    max_transfer_ids: int = MAX_TRANSFER_IDS
    keeps_answers: bool = False
    has_copies: bool = False
    weights: Callable[[], str] = str
    siblings: frozenset[str] = frozenset()
    record_event: Callable[[], StepsEvent] = lambda: StepsEvent(lambda: True)
    folder: Callable[[str], str] = str
    room_timeout_s: float = ROOM_TIMEOUT_S

    def connections(self, executor: VirtualExecutor) -> Connections:
        """Return how workers of other engines become known to an executor of this one."""
        return Connections(
            open_offer=self.fabric.open_offer,
            connect=executor.connect,
            disconnect=executor.disconnect,
            plan=self.fabric.catalog.plan,
        )

    def copy_blocks(
        self, executor: VirtualExecutor, group: str, blocks: Iterable[int], *, to_device: bool
    ) -> None:
        """Copy blocks of a group between a worker's device and its copies in main memory.

        Refuses to copy a block while bytes may land in it, and to write bytes on the device that
        were neither read nor copied from there.
        """
        memory = executor.port.memory
        for block in blocks:
            place = f"block {block} of {self.host.name}"
            if memory.is_landing(group, block):
                message = f"{place} is copied while bytes may land in it"
                raise BrokenRuleError("GIVEN", message)
            if to_device and memory.is_mixed(group, block):
                message = f"{place} is copied to the device with bytes that were not read"
                raise BrokenRuleError("OWN", message)
            memory.copy_block(group, block, to_device=to_device)


class BlockPool:
    """The blocks of an engine, of which the free ones stay in the prefix cache until they are used.

    ``check`` is called before a block is given away. With ``takes_newest``, blocks that were freed
    last are used first, instead of those that were free the longest. The blocks of a pipeline
    ``stage`` begin in another order than those of other stages. No request finds a block if the
    pool ``forgets``.
    """

    def __init__(
        self,
        num_blocks: int,
        check: Callable[[int], None],
        stage: int,
        *,
        takes_newest: bool,
        forgets: bool = False,
    ) -> None:
        self._check = check
        self._takes_newest = takes_newest
        self._forgets = forgets
        first = NULL_BLOCK + 1
        order = [*range(first + stage, num_blocks), *range(first, first + stage)]
        self._free: dict[int, None] = dict.fromkeys(order)
        self._num_users = [0] * num_blocks
        self._hash_of: dict[int, int] = {}
        self._by_hash: dict[int, int] = {}
        self.num_blocks = num_blocks - 1

    @property
    def num_free(self) -> int:
        """Return the number of blocks that nobody uses."""
        return len(self._free)

    def take(self, number: int) -> list[int]:
        """Return free blocks, of which there are as many."""
        blocks = []
        # as vLLM does, or the other way round
        for _ in range(number):
            block = next(reversed(self._free) if self._takes_newest else iter(self._free))
            self._check(block)
            del self._free[block]
            # who has the block's hash finds it no more
            old_hash = self._hash_of.pop(block, None)
            if old_hash is not None and self._by_hash.get(old_hash) == block:
                del self._by_hash[old_hash]
            self._num_users[block] = 1
            blocks.append(block)
        return blocks

    def cached(self, hashes: Sequence[int]) -> list[int] | None:
        """Return the blocks with some hashes, None unless all are cached."""
        blocks = [self._by_hash.get(block_hash, NULL_BLOCK) for block_hash in hashes]
        return None if NULL_BLOCK in blocks else blocks

    def use(self, blocks: Sequence[int]) -> None:
        """Use cached blocks once more."""
        for block in blocks:
            self._free.pop(block, None)
            self._num_users[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Use blocks no more, the last ones first, so that prefixes stay longest."""
        # a block is free when nobody uses it any more
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                self._free[block] = None

    def reset(self) -> None:
        """Let nobody find a block that has been registered until now."""
        self._hash_of.clear()
        self._by_hash.clear()

    def register(self, block: int, block_hash: int) -> None:
        """Let others find a block by the hash of the prefix that it ends."""
        # two requests may have computed the same prefix: the first one's block is found
        if block_hash not in self._by_hash and not self._forgets:
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash


class Engine:
    """One start of an engine, which steps while its host lives."""

    def __init__(
        self,
        host: Host,
        workers: Sequence[Worker],
        groups: Sequence[GroupShape],
        pool: Callable[[Callable[[int], None], int], BlockPool],
        fabric: Fabric,
        numbers: Numbers,
        make_connector: Callable[[Site], Connector],
        trace: Callable[[str, str], None],
        name_of: Callable[[int], str],
        tokens_per_step: int,
        step_s: float,
        features: Feature,
        version: str = "",
        folder: Callable[[str], str] = str,
    ) -> None:
        self._folder = folder
        self._has_adapters = Feature.ADAPTERS in features
        # the contents that workers have loaded, by adapter
        self._adapters: dict[str, str] = {}
        self._name_of = name_of
        self._version = version
        self._updates: list[tuple[str, bool]] = []
        # those of an operator, and the labels of all that the prefix cache has, by group and block
        self._calls: list[Call] = []
        self._is_updated_live = Feature.LIVE_UPDATES in features
        # the prefix cache has blocks of old weights, or of an adapter's old content, under hashes
        # that do not tell them from new ones; what drafts cache would be of two contents
        has_drafts = any(group.num_ahead for group in groups)
        self._has_old_blocks = self._is_updated_live or (self._has_adapters and not has_drafts)
        self._labels: dict[tuple[str, int], CellLabels] = {}
        self._is_async = Feature.ASYNC_STEPS in features
        self._is_preempted = Feature.PREEMPTION in features
        self._has_copies = Feature.HOST_COPIES in features
        self._keeps_sinks = Feature.SINKS in features
        self._stores_blocks = Feature.SIBLINGS in features
        self._is_stored = Feature.STORE in features
        self._is_ahead = self._is_async or self._is_preempted or self._has_copies
        # what is scheduled, the steps under way, and blocks that are free when one of them ends
        self._chunks: list[_PromptChunk] = []
        self._under_way: deque[list[_PromptChunk]] = deque()
        self._saves: deque[Mapping[str, Collection[int]] | None] = deque()
        self._deferred: deque[list[Tables]] = deque()
        self._tokens_per_step = tokens_per_step
        self._step_s = step_s
        self.host = host
        self.requests: dict[str, EngineRequest] = {}
        self.preempted = set[str]()
        self._trace = trace
        self._memories = [
            LabelledMemory(worker, groups, numbers, has_copies=self._has_copies)
            for worker in workers
        ]
        ports = [
            Port(host, worker, memory)
            for worker, memory in zip(workers, self._memories, strict=True)
        ]
        self._groups = groups
        self._num_drafts = MAX_DRAFTS if has_drafts and not self._is_async else 0
        self._tokens_per_block = groups[0].tokens_per_block
        self.pools: dict[str, BlockPool] = {
            group.name: pool(partial(self._check_block, group.name), group.stage)
            for group in groups
        }
        self._lent: dict[str, Tables] = {}
        # answers of which no next turn was sent, and the steps in which they kept a request waiting
        self._kept: dict[str, int] = {}
        # those that the connector has to release in this step, since the cache was reset
        self._reset: set[str] = set()
        # requests that have ended while bytes may still land
        self._landing: dict[str, Tables] = {}
        executors = [VirtualExecutor(fabric, port) for port in ports]
        copiers = [VirtualCopier(fabric, port) for port in ports]
        offers = [fabric.register(port) for port in ports]
        self._executors = executors
        max_ids = SLICE_IDS if Feature.SLICES in features else MAX_TRANSFER_IDS
        keeps_answers = Feature.TURNS in features
        # a garbled handoff may have an answer computed for another engine: it does not give way
        self._may_be_garbled = Feature.GARBLED_MESSAGES in features
        self.connector = make_connector(
            Site(
                host,
                workers,
                groups,
                executors,
                copiers,
                offers,
                fabric,
                max_ids,
                keeps_answers,
                self._has_copies,
                lambda: self._version,
                frozenset({"store"} if self._stores_blocks else ()),
                self._record_event,
                folder,
                SHORT_WAIT_S if Feature.SHORT_WAITS in features else ROOM_TIMEOUT_S,
            )
        )
        self._copies_itself = self._has_copies and getattr(
            self.connector, "reads_into_copies", False
        )
        if self._copies_itself:
            for memory in self._memories:
                memory.read_into_copies()
        self._abort_lent = getattr(self.connector, "abort_lent", None)
        self._has_sent: Callable[[str], bool] | None = getattr(self.connector, "has_sent", None)
        self.resets_when_idle = getattr(self.connector, "resets_when_idle", False)
        self._loads_when_unused = getattr(self.connector, "loads_when_unused", False)
        if self._has_adapters and getattr(self.connector, "renames_adapters", False):
            self._has_old_blocks = self._is_updated_live
        # the adapters of requests that have come, and those to load again when they are unused
        self._adapter_of: dict[str, str] = {}
        self._reloaded: set[str] = set()
        self._loads = random.Random(f"{host.name} {host.offset_s} adapters")
        # a reset that operators repeat until the engine is idle, and when the last one succeeded
        self._forced: Call | None = None
        self._reset_at = -math.inf
        has_states = any(group.is_state for group in groups)
        can_lag = has_states and not self._has_old_blocks
        self._may_lag = can_lag and getattr(self.connector, "reads_lagging_groups", False)
        self._num_begun = 0
        self._interval_s = 0.0
        self._is_stepping = False
        # the lengths of pauses within steps, where there are any
        self._pauses: random.Random | None = None
        if Feature.INTERLEAVED in features:
            # of this seed and start, as the offset of the clock is
            self._pauses = random.Random(f"{host.name} {host.offset_s} pauses")
        self.is_paused = False
        self.is_stopped = False
        self._arrived: list[EngineRequest] = []
        self._aborted: list[str] = []

    @property
    def is_idle(self) -> bool:
        """Return whether the engine has no request, keeps no block, and no step is under way."""
        return not (self.requests or self._lent or self._landing or self._under_way)

    @property
    def _keeps_blocks(self) -> bool:
        """Return whether blocks are kept for readers, or bytes or steps may come into them."""
        return bool(self._lent or self._landing or any(self._under_way))

    @property
    def reset_at(self) -> float:
        """Return when an operator's last reset has succeeded: infinity while it is awaited."""
        return self._reset_at if self._forced is None or self.host.is_dead else math.inf

    @property
    def num_unreleased(self) -> int:
        """Return the transfers that workers have started, and not released."""
        return sum(len(executor.unreleased) for executor in self._executors)

    def older_connections(self) -> list[str]:
        """Return the workers to which one is connected beside those of a later start."""
        return [label for executor in self._executors for label in executor.older_connections()]

    @property
    def num_workers(self) -> int:
        """Return the number of workers, each of which reads and asks for itself."""
        return len(self._memories)

    def holds(self, name: str) -> bool:
        """Return whether a request is in the engine, or blocks of it are."""
        return name in self.requests or name in self._lent or name in self._landing

    def is_lent(self, name: str) -> bool:
        """Return whether the blocks of a request are kept for a reader."""
        return name in self._lent

    def has_sent(self, name: str) -> bool:
        """Return whether all pipeline stages have sent a request that is computed."""
        return self._has_sent is None or self._has_sent(name)

    def may_land(self, name: str) -> bool:
        """Return whether a request has not ended, or its blocks are kept for its last bytes."""
        return name in self.requests or name in self._landing

    def note_turn(self, name: str) -> None:
        """Note that a request for a kept answer was sent."""
        self._kept.pop(name, None)

    def update(self, version: str, *, keeps_running: bool = False) -> None:
        """Load weights of a version, or none and reset the cache alone.

        With ``keeps_running`` what runs goes on with the new weights, after positions of the old.
        """
        self._updates.append((version, keeps_running))
        self._wake()

    def computes_with(self, adapter: str) -> bool:
        """Return whether it has computed a part of some prompt with an adapter."""
        return any(
            request.adapter == adapter
            and request.phase is Phase.RUNNING
            and 0 < request.num_computed < request.num_prompt
            for request in self.requests.values()
        )

    def reload(self, adapter: str) -> None:
        """Load an adapter again that is loaded: under requests that run, or when it is unused."""
        if self._loads_when_unused:
            self._reloaded.add(adapter)
        elif adapter in self._adapters:
            self._load_adapter(adapter, [])

    def _content_of(self, adapter: str) -> str:
        """Return the content of an adapter: as it is loaded, or what its folder has."""
        return self._adapters.get(adapter) or self._folder(adapter)

    def _load_unused(self, request: EngineRequest) -> None:
        """Load the adapter of a request that has come, maybe again, if no other one has it.

        As SGLang does when an operator has unloaded it, or ``--max-loaded-loras`` was reached:
        ``_resolve_lora_path`` in sglang/srt/managers/tokenizer_manager.py.
        """
        name = request.adapter
        self._adapter_of = {key: each for key, each in self._adapter_of.items() if self.holds(key)}
        self._adapter_of.pop(request.name, None)
        is_unused = name not in self._adapter_of.values()
        is_dropped = name in self._reloaded or self._loads.random() < 0.3
        if name not in self._adapters or (is_unused and is_dropped):
            self._reloaded.discard(name)
            self._load_adapter(name, ())
        self._adapter_of[request.name] = name

    def _use_adapter(self, request: EngineRequest) -> None:
        """Load the adapter of a request that a step computes, in place of those that none needs."""
        name = request.adapter
        if not self._has_adapters or not name or request.phase is not Phase.RUNNING:
            return
        if name not in self._adapters:
            running = [each for each in self.requests.values() if each.phase is Phase.RUNNING]
            used = {each.adapter for each in running}
            self._load_adapter(name, [each for each in self._adapters if each not in used])

    def _load_adapter(self, name: str, dropped: Sequence[str]) -> None:
        """Load an adapter: what was read for a request of another content must not be used."""
        self._adapters = {key: value for key, value in self._adapters.items() if key not in dropped}
        self._adapters[name] = self._folder(name)
        self._trace(self.host.name, f"loads {self._adapters[name]}")
        for request in self.requests.values():
            if request.adapter == name and request.phase is Phase.RUNNING:
                # vLLM goes on with what it has computed or found itself
                is_first = request.num_read and len(request.tokens) == request.num_prompt
                request.load(self._adapters[name], 0 if is_first else request.num_computed)
        load: Any = getattr(self.connector, "load_adapters")  # noqa: B009
        for request_name in load({name: self._adapters[name]}, dropped):
            action = f"compute {request_name}"
            error = KVPlanError("PROMPT", action, expected="its adapter", got="another content")
            self._end(self.requests[request_name], error, is_wanted=False)

    def call(self, call: Call) -> None:
        """Take a call of an operator."""
        self._calls.append(call)
        self._wake()

    def has(self, phase: Phase) -> bool:
        """Return whether a request is in a phase."""
        return any(request.phase is phase for request in self.requests.values())

    @property
    def is_running(self) -> bool:
        """Return whether it has computed a part of some request."""
        return any(
            request.phase is Phase.RUNNING and request.num_computed
            for request in self.requests.values()
        )

    def add(self, request: EngineRequest) -> None:
        """Take a request."""
        request.came_at = self.host.loop.now
        self.requests[request.name] = request
        self._arrived.append(request)
        self._wake()

    def abort(self, name: str) -> None:
        """End a request that its client does not want any more."""
        if name in self.requests or (name in self._lent and self._abort_lent):
            self._aborted.append(name)
            self._wake()

    def _record_event(self) -> StepsEvent:
        """Return an event of the steps that are under way, and of the one that is chosen."""
        last = self._num_begun + bool(self._chunks)
        return StepsEvent(lambda: self._num_begun - len(self._under_way) >= last)

    def _wake(self) -> None:
        self._interval_s = 0.0
        if not self._is_stepping:
            self._is_stepping = True
            self.host.loop.at(self.host.loop.now + 0.001, self._step)

    def _step(self) -> None:
        """Begin a step."""
        self._go_on(self._steps())

    def _go_on(self, steps: Iterator[None]) -> None:
        """Go on with a step to its end, or to its next pause where other threads run meanwhile.

        What comes from outside in a pause waits for the next step. A frozen engine goes on when it
        thaws, and one that has ended never.
        """
        if self.host.is_dead or self.is_stopped:
            self._is_stepping = False
            return
        if self.host.thaws_at > self.host.loop.now:
            self._is_stepping = True
            self.host.loop.at(self.host.thaws_at, partial(self._go_on, steps))
            return
        self._is_stepping = self.is_paused = False
        for _ in steps:
            if self._pauses is not None:
                self._is_stepping = self.is_paused = True
                pause_s = MAX_PAUSE_S * self._pauses.random()
                self.host.loop.at(self.host.loop.now + pause_s, partial(self._go_on, steps))
                return

    def _steps(self) -> Iterator[None]:
        """Schedule, let the connector continue, compute; then plan the next step.

        Yields where messages may come before it goes on.
        """
        # one step is under way while the next one is scheduled
        if len(self._under_way) > 1 or (self._under_way and not self._under_way[-1]):
            self._end_chunks()
        self._take_messages()
        # as vLLM does: preempted requests are known before their blocks are written
        has_preempted = self._is_ahead and self._schedule()
        # as in vLLM, what was preempted does not come back in the same step
        has_admitted = not has_preempted and (yield from self._admit())
        yield
        report = self.connector.step()
        has_news = self._take(report)
        self._check_reset()
        self._check_held()
        has_computed = self._begin_chunks(report.saves) if self._is_ahead else self._compute()
        if self._forced is not None and not (self.requests or self._keeps_blocks):
            self._answer(self._forced)
        # an engine that waits looks less and less often
        is_busy = has_admitted or has_news or has_computed
        draw = self.host.random.random()
        self._interval_s = self._step_s if is_busy else min(1.0, 1.7 * self._interval_s + 0.004)
        if self._updates or self._calls or not self.is_idle:
            self._is_stepping = True
            self.host.loop.at(self.host.loop.now + self._interval_s * (0.5 + draw), self._step)

    def _take_messages(self) -> None:
        """Take the requests that have arrived, and end those that nobody wants any more."""
        for version, keeps_running in self._updates:
            self._update(version, keeps_running=keeps_running)
        self._updates.clear()
        for call in self._calls:
            self._answer(call)
        self._calls.clear()
        for request in self._arrived:
            request.compute_with(self._version)
            if self._has_adapters and request.adapter:
                if self._loads_when_unused:
                    self._load_unused(request)
                request.load(self._content_of(request.adapter))
            self.connector.add(request)
        for name in self._aborted:
            if name in self.requests:
                self._end(self.requests[name], None, is_wanted=False)
            elif name in self._lent and self._abort_lent:
                self._abort_lent(name)
        self._arrived.clear()
        self._aborted.clear()

    def _update(self, version: str, *, keeps_running: bool) -> None:
        """Forget what is cached. New weights end what is computed; a reset, what is exported."""
        self._trace(self.host.name, f"has weights {version}" if version else "resets its cache")
        for pool in self.pools.values():
            pool.reset()
        if not version:
            self.connector.reset()
            self._reset = set() if self._is_stored else {*self._lent}
            return
        self._version = version
        for request in [*self.requests.values()]:
            if request.phase is Phase.WAITING:
                request.compute_with(version)
            elif request.phase is Phase.RUNNING and keeps_running:
                request.compute_with(version, request.num_computed)
            else:
                self._end(request, None, is_wanted=False)

    def _answer(self, call: Call) -> None:
        """Do what an operator calls for, and tell the connector, also that a call has failed."""
        self._trace(self.host.name, f"{call.kind.value} {call.text}")
        users = [
            request
            for request in self.requests.values()
            if request.phase in (Phase.RUNNING, Phase.READING)
        ]
        is_done = call.kind is not CallKind.FAILED_CHANGE
        if call.kind in (CallKind.CHANGE, CallKind.FAILED_CHANGE):
            self._version = call.text
            for request in users:
                request.go_on_with(call.text, request.num_computed)
        elif call.kind is CallKind.RESET:
            is_done = not (users or self._keeps_blocks)
        elif call.kind is CallKind.FORCED_RESET:
            if self.resets_when_idle:
                users = [each for each in self.requests.values() if each not in self._arrived]
            for request in users:
                self._end(request, None, is_wanted=False)
        if self.resets_when_idle and call.kind in (CallKind.RESET, CallKind.FORCED_RESET):
            is_done = not (self.requests or self._keeps_blocks)
            if call.kind is CallKind.FORCED_RESET:
                self._forced = None if is_done else call
                self._reset_at = self.host.loop.now
        if is_done and call.kind in (CallKind.RESET, CallKind.FORCED_RESET):
            for pool in self.pools.values():
                pool.reset()
        hear: Any = getattr(self.connector, "hear")  # noqa: B009
        hear(call, is_done)

    def _admit(self) -> Generator[None, None, bool]:
        """Give blocks to the requests that wait, in their order, as far as there are any.

        Yields before a request gets its blocks. Return whether one has got some.
        """
        has_admitted = False
        for request in [*self.requests.values()]:
            if request.phase is not Phase.WAITING:
                continue
            if self._has_adapters and request.adapter:
                request.load(self._content_of(request.adapter))
            if self._is_updated_live:
                request.go_on_with(self._version)
            num_cached, cached = self._cached_prefix(request)
            num_agreed = num_cached
            if self._may_lag:
                num_cached, cached = self._longest_prefix(request, num_cached, cached)
            num_read = self.connector.count_readable(request, num_cached)
            if num_read is None:
                request.asked_at = self.host.loop.now
                continue
            # what only some groups have is of no use without the rest
            if not num_read and num_cached != num_agreed:
                num_cached, cached = self._cached_prefix(request)
            yield
            # others wait behind it, as in vLLM
            if not self._give_blocks(request, num_cached, cached, num_read):
                self._check_kept(request)
                break
            has_admitted = True
            if self._is_ahead and not num_read:
                self._schedule_one(request)
        return has_admitted

    def _check_kept(self, request: EngineRequest) -> None:
        """Refuse to let a request wait for blocks of an answer that nobody has asked for."""
        for name in self._kept:
            self._kept[name] += 1
            if self._kept[name] > MAX_WAITING_STEPS:
                raise BrokenRuleError("END", f"{request.name} waits for the kept answer {name}")

    def _cached_prefix(self, request: EngineRequest) -> tuple[int, Tables]:
        """Return the length of the longest prefix that all groups have, and its blocks.

        They have what the next position needs. The last token is computed again.
        """
        size = self._tokens_per_block
        for num_blocks in range((len(request.tokens) - 1) // size, 0, -1):
            tables: Tables = {}
            for group in self._groups:
                first = group.first_needed(num_blocks * size) // size
                if request.reads_windows and group.window is not None:
                    first_read = group.first_needed(request.num_prompt) // size
                    if first_read < num_blocks:
                        break
                    first = num_blocks
                blocks = self._cached_blocks(request, group, first, num_blocks)
                if blocks is None:
                    break
                tables[group.name] = [NULL_BLOCK] * first + blocks
            else:
                if not self._has_old_blocks or self._find(request, tables):
                    return num_blocks * size, tables
        return 0, {group.name: [] for group in self._groups}

    def _longest_prefix(
        self, request: EngineRequest, num_cached: int, cached: Tables
    ) -> tuple[int, Tables]:
        """Return the longest prefix of groups that keep all, and what others have of it.

        It is what all groups have if one of the others has more, as in vLLM:
        ``get_computed_blocks_for_connector`` in vllm/v1/core/kv_cache_manager.py.
        """
        size = self._tokens_per_block
        tables: Tables = {}
        for group in self._groups:
            tables[group.name] = []
            for num_blocks in range((len(request.tokens) - 1) // size, 0, -1):
                first = group.first_needed(num_blocks * size) // size
                blocks = self._cached_blocks(request, group, first, num_blocks)
                if blocks is not None:
                    tables[group.name] = [NULL_BLOCK] * first + blocks
                    break
        num_whole = min(len(tables[each.name]) for each in self._groups if each.window is None)
        if any(len(table) > num_whole for table in tables.values()):
            return num_cached, cached
        return num_whole * size, tables

    def _cached_blocks(
        self, request: EngineRequest, group: GroupShape, first: int, stop: int
    ) -> list[int] | None:
        """Return some blocks of a request by their ordinals, None unless all are cached."""
        return self.pools[group.name].cached(self._hashes_of(request, group, first, stop))

    def _hashes_of(
        self, request: EngineRequest, group: GroupShape, first: int, stop: int
    ) -> list[int]:
        """Return the hashes of blocks by their ordinals: of all tokens that decide what one has."""
        known = request.hashes if self._has_old_blocks else request.labels
        size, num_ahead = self._tokens_per_block, group.num_ahead
        hashes: list[int] = known[
            (first + 1) * size - 1 + num_ahead : stop * size + num_ahead : size
        ].tolist()
        return hashes

    def _find(self, request: EngineRequest, tables: Tables) -> bool:
        """Expect the bytes that cached blocks have, and return whether those of groups agree."""
        size = self._tokens_per_block
        found: dict[str, CellLabels] = {
            name: np.concatenate(
                [
                    self._labels[name, block][ordinal * size : (ordinal + 1) * size]
                    if block != NULL_BLOCK
                    else np.zeros(size, np.uint64)
                    for ordinal, block in enumerate(table)
                ]
            )
            for name, table in tables.items()
        }
        whole, *others = [found[group.name] for group in self._groups if group.window is None]
        others += [found[group.name] for group in self._groups if group.window is not None]
        if any((labels[labels != 0] != whole[labels != 0]).any() for labels in others):
            return False
        request.find(whole)
        return True

    def _give_blocks(
        self, request: EngineRequest, num_cached: int, cached: Tables, num_read: int
    ) -> bool:
        """Give a request blocks for what is read, or else for all that is computed here.

        What a window or a state passes gets blocks when it is computed.
        """
        num_tokens = num_cached + num_read if num_read else len(request.tokens)
        # one that was preempted waits until there are blocks for all of it
        if self._is_preempted and not num_read and not request.was_preempted:
            num_tokens = min(num_tokens, num_cached + self._tokens_per_step)
        firsts = {
            group.name: group.first_needed(num_tokens)
            for group in self._groups
            if num_read or group.window is None
        }
        found_blocks = {name: len(table) for name, table in cached.items()}
        # cached blocks first, so that they are not given away for the others
        for name, table in cached.items():
            self.pools[name].use([block for block in table if block != NULL_BLOCK])
        if not self._extend(cached, firsts, num_tokens):
            self._free(cached)
            return False
        request.blocks = cached
        request.num_partial = {}
        request.found_blocks = found_blocks
        request.is_behind = False
        request.num_read = num_read
        request.num_computed = num_cached
        request.num_found = num_cached if self._is_ahead else 0
        if num_read:
            request.phase = Phase.READING
            request.began_at = self.host.loop.now
            request.reads_windows = False
            # as vLLM does, they count as computed when they are received
            request.num_computed += num_read
        else:
            request.phase = Phase.RUNNING
        message = f"{request.name} {request.phase.value}: {num_cached} cached, {num_read} to read"
        self._trace(self.host.name, f"{message}, blocks {_words(request.blocks)}")
        self.connector.begin_read(request, num_read)
        return True

    def _extend(self, tables: Tables, firsts: Mapping[str, int], num_tokens: int) -> bool:
        """Give tables blocks from the first position by group on. Return whether all have them."""
        num_blocks = -(-num_tokens // self._tokens_per_block)
        # the ordinal of the first new block
        ordinals = {}
        for name, first in firsts.items():
            ordinals[name] = max(first // self._tokens_per_block, len(tables[name]))
            if self.pools[name].num_free < num_blocks - ordinals[name]:
                return False
        for name, ordinal in ordinals.items():
            table = tables[name]
            table += [NULL_BLOCK] * (min(ordinal, num_blocks) - len(table))
            table += self.pools[name].take(num_blocks - ordinal)
        return True

    def _free(self, tables: Tables) -> None:
        """Use the blocks of tables no more."""
        for name, table in tables.items():
            self.pools[name].free([block for block in table if block != NULL_BLOCK])

    def _take(self, report: StepReport) -> bool:
        """Take what the connector says of the step."""
        for name, error in report.failed.items():
            request = self.requests.get(name)
            if request is not None and request.phase in (Phase.READING, Phase.WAITING):
                self._end(request, error, is_wanted=False)
        for name in (*report.received, *report.recomputed):
            # its request has ended before
            if name in self._landing:
                self._free(self._landing.pop(name))
                continue
            request = self.requests.get(name)
            if request is None or request.phase is not Phase.READING:
                raise BrokenRuleError("REPORT", f"{name} is received, which is not read")
            if name in report.recomputed:
                self._trace(self.host.name, f"{name} is to be computed")
                self._take_blocks(request)
                continue
            request.phase = Phase.RUNNING
            request.read_s = self.host.loop.now - request.began_at
            landed_at = [executor.landed_at.get(name) for executor in self._executors]
            request.landed_at = tuple(time for time in landed_at if time is not None)
            self._trace(self.host.name, f"{name} is received")
            self._check_shared(request)
            self._register(request, 0, request.num_computed)
        for name in report.released:
            if name not in self._lent:
                raise BrokenRuleError("REPORT", f"{name} is released, which is not exported")
            if self.connector.is_promised(name):
                raise BrokenRuleError("CLAIM", f"{name} is released, which a reader claims")
            self._trace(self.host.name, f"{name} is released: blocks {_words(self._lent[name])}")
            self._kept.pop(name, None)
            self._free_computed(self._lent.pop(name))
        return bool(report.failed or report.received or report.released or report.recomputed)

    def _check_shared(self, request: EngineRequest) -> None:
        """Refuse to share a full block of which some positions were not read.

        The prefix cache shares the blocks that it can find, which leaves out those read in part. An
        engine beside a connector that stores blocks shares all.
        """
        size = self._tokens_per_block
        for group, memory in itertools.product(self._groups, self._memories):
            # what was found may be written by a step under way
            first = min(request.num_found // size, request.found_blocks[group.name])
            if not self._stores_blocks:
                first = max(first, request.num_partial.get(group.name, 0))
            table = request.blocks[group.name]
            for ordinal in range(first, request.num_computed // size):
                if table[ordinal] == NULL_BLOCK:
                    continue
                # a state is shared as it is, after its last position
                stop = (ordinal + 1) * size
                start = stop - 1 if group.is_state else ordinal * size
                wrong = memory.wrong_position(group.name, table, request.labels, start, stop)
                if wrong is not None:
                    raise self._wrong(f"{request.name} shares", table, *wrong)

    def _compute(self) -> bool:
        """Compute the next positions of all requests that run."""
        has_computed = False
        for request in [*self.requests.values()]:
            # one may have been preempted for another
            if request.phase is Phase.RUNNING:
                self._compute_one(request)
                has_computed = True
        return has_computed

    def _compute_one(self, request: EngineRequest) -> None:
        num_known = len(request.tokens)
        chunk = self._chunk_of(request, num_known)
        if chunk is None:
            return
        self._write(chunk)
        request.num_computed = chunk.stop
        self._register(request, chunk.start, min(chunk.stop, num_known))
        self._end_chunk(chunk)

    def _schedule(self) -> bool:
        """Choose what this step computes of each request that runs, and give it blocks.

        Return whether one of them was preempted.
        """
        running = [each for each in self.requests.values() if each.phase is Phase.RUNNING]
        for request in running:
            if request.phase is Phase.RUNNING:
                self._schedule_one(request)
        return any(request.phase is not Phase.RUNNING for request in running)

    def _schedule_one(self, request: EngineRequest) -> None:
        # as in vLLM: where the step under way may not bring the last token, the next one follows
        num_known = len(request.tokens)
        is_known_last = num_known + 1 == request.num_prompt + request.num_answer
        under_way = itertools.chain.from_iterable(self._under_way)
        is_next = any(each.request is request and each.is_last for each in under_way)
        if is_next and is_known_last and not request.ends_unforeseen:
            return
        chunk = self._chunk_of(request, num_known + is_next)
        if chunk is not None:
            self._chunks.append(chunk)
            request.num_scheduled = chunk.stop - chunk.start
            # as in vLLM: whoever comes in this step computes after it
            self._register(request, chunk.start, min(chunk.stop, num_known))

    def _begin_chunks(self, saves: Mapping[str, Collection[int]] | None) -> bool:
        """Begin a step with what was scheduled, and end it unless steps are asynchronous."""
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            chunk.request.num_computed = chunk.stop
            chunk.request.num_in_flight += chunk.stop - chunk.start
            chunk.request.num_scheduled = 0
        self._num_begun += 1
        self._under_way.append(chunks)
        self._saves.append(saves)
        self._deferred.append([])
        if not self._is_async:
            self._end_chunks()
        return bool(chunks)

    def _end_chunks(self) -> None:
        """End the oldest step under way."""
        chunks = self._under_way.popleft()
        for chunk in chunks:
            self._write(chunk)
            chunk.request.num_in_flight -= chunk.stop - chunk.start
        self._save(self._saves.popleft())
        for tables in self._deferred.popleft():
            self._free(tables)
        for chunk in chunks:
            # one that was preempted or aborted meanwhile has other blocks, or none
            if chunk.request.phase is Phase.RUNNING and chunk.request.blocks is chunk.blocks:
                self._end_chunk(chunk)

    def _save(self, saves: Mapping[str, Collection[int]] | None) -> None:
        """Copy to main memory what a step has computed, or let the connector do so."""
        if self._copies_itself:
            save: Any = getattr(self.connector, "save")  # noqa: B009
            save(saves)
            return
        for memory in self._memories:
            memory.copy(saves)

    def _chunk_of(self, request: EngineRequest, num_tokens: int) -> _PromptChunk | None:
        """Give a request blocks for its next positions, or preempt requests, maybe this one.

        They are of the first ``num_tokens`` ones: of those that are known, and maybe of the next.
        After a token of an answer they are of drafted tokens too, the first of which are right.
        """
        self._use_adapter(request)
        if request.phase is not Phase.RUNNING:
            return None
        start = request.num_computed
        stop = min(num_tokens, start + self._tokens_per_step)
        num_right = num_wrong = 0
        if self._num_drafts and request.num_prompt <= start == num_tokens - 1:
            num_right = request.tokens[-1] % (self._num_drafts + 1)
            num_wrong = self._num_drafts - num_right
            stop += self._num_drafts
        # the answer needs further blocks
        firsts = {group.name: group.first_written(start, stop) for group in self._groups}
        while not self._extend(request.blocks, firsts, stop):
            # blocks are free when the step under way has ended
            if any(self._deferred) or self._preempt(request) is request:
                return None
        is_last = stop >= len(request.tokens)
        was_behind, request.is_behind = request.is_behind, not is_last
        return _PromptChunk(
            request,
            request.labels,
            start,
            stop,
            request.blocks,
            firsts,
            is_last,
            num_right,
            num_wrong,
            was_behind,
        )

    def _write(self, chunk: _PromptChunk) -> None:
        """Compute positions, and check what they attend to."""
        request, start, stop, blocks = chunk.request, chunk.start, chunk.stop, chunk.blocks
        labels = chunk.labels
        if request.phase is Phase.ENDED and request.frees_at_once:
            self._check_written(chunk)
        # all that the next position needs is attended to, in each worker
        for memory in self._memories:
            for group in self._groups:
                table = blocks[group.name]
                first = group.first_needed(start)
                num_known = start - group.num_ahead * chunk.was_behind
                wrong = memory.wrong_position(group.name, table, labels, first, num_known)
                if wrong is not None:
                    raise self._wrong(f"{request.name} attends to", table, *wrong)
                first = chunk.firsts[group.name] - group.num_ahead * chunk.was_behind
                stop_right = stop - chunk.num_wrong - group.num_ahead * (not chunk.is_last)
                memory.write(group.name, table, labels, first, stop_right)
                if chunk.num_wrong:
                    wrong_labels = labels ^ np.uint64(1 << NUMBER_BITS)
                    memory.write(group.name, table, wrong_labels, stop_right, stop)

    def _check_written(self, chunk: _PromptChunk) -> None:
        """Refuse to write a position where bytes of another request land, in any order."""
        for group, memory in itertools.product(self._groups, self._memories):
            block = chunk.blocks[group.name][(chunk.stop - 1) // self._tokens_per_block]
            if memory.is_landing(group.name, block):
                message = f"{chunk.request.name} is written into block {block} of {self.host.name}"
                raise BrokenRuleError("GIVEN", f"{message} while bytes may land in it")

    def _wrong(
        self, action: str, table: Sequence[int], position: int, label: int
    ) -> BrokenRuleError:
        """Return what is wrong with the use of a position that has the label of other tokens."""
        block = table[position // self._tokens_per_block]
        place = f"position {position} in block {block} of {self.host.name}"
        return BrokenRuleError("OWN", f"{action} {place}, which has {self._name_of(label)}")

    def _end_chunk(self, chunk: _PromptChunk) -> None:
        """Free what a request has passed, and generate its next token or end it."""
        request = chunk.request
        request.num_computed -= chunk.num_wrong
        for _ in range(chunk.is_last + chunk.num_right):
            if not request.is_complete:
                request.add_token()
        # its last tokens were not known before
        if chunk.is_last and (self._is_async or self._num_drafts):
            stop = min(chunk.stop - chunk.num_wrong, len(request.tokens))
            self._register(request, chunk.start, stop)
        self._free_passed(request)
        if request.is_complete:
            self._end(request, None, is_wanted=True)

    def _register(self, request: EngineRequest, start: int, stop: int) -> None:
        """Let others find the full blocks of a request."""
        size = self._tokens_per_block
        for group in self._groups:
            # what drafts cache of a position comes later
            first = max(0, group.first_written(start, stop) - group.num_ahead) // size
            first = max(first, request.num_partial.get(group.name, 0))
            last = max(first, max(0, stop - group.num_ahead) // size)
            hashes = self._hashes_of(request, group, first, last)
            blocks = request.blocks[group.name][first:last]
            for block, block_hash in zip(blocks, hashes, strict=True):
                if block != NULL_BLOCK:
                    self.pools[group.name].register(block, block_hash)
                    if self._has_old_blocks:
                        self._labels[group.name, block] = request.labels

    def _free_passed(self, request: EngineRequest) -> None:
        """Free the blocks that windows and states have passed."""
        for group in self._groups:
            table = request.blocks[group.name]
            num_passed = group.first_needed(request.num_settled) // self._tokens_per_block
            first = 1 if self._keeps_sinks and not group.is_state else 0
            self._free({group.name: table[first:num_passed]})
            table[first:num_passed] = [NULL_BLOCK] * len(table[first:num_passed])

    def _preempt(self, needy: EngineRequest) -> EngineRequest:
        """Take the blocks of the request that runs and came last, which begins again.

        That is the one that needs blocks if all others that run are in this step.
        """
        scheduled = {chunk.request.name for chunk in self._chunks}
        running = [
            request
            for request in self.requests.values()
            if request.phase is Phase.RUNNING and request.name not in scheduled
        ]
        request = running[-1] if running else needy
        self._trace(self.host.name, f"{request.name} is preempted")
        request.was_preempted = True
        self.preempted.add(request.name)
        self._take_blocks(request)
        return request

    def _take_blocks(self, request: EngineRequest) -> None:
        """Take the blocks of a request, which begins again."""
        self._free_computed(request.blocks)
        request.blocks = {group.name: [] for group in self._groups}
        request.num_computed = 0
        request.compute_with(self._version)
        request.phase = Phase.WAITING

    def _free_computed(self, tables: Tables) -> None:
        """Free the blocks of a request, as soon as no step under way writes into them."""
        under_way = itertools.chain.from_iterable(self._under_way)
        if any(chunk.blocks is tables for chunk in under_way):
            self._deferred[-1].append(tables)
        else:
            self._free(tables)

    def _end(self, request: EngineRequest, error: KVPlanError | None, *, is_wanted: bool) -> None:
        """End a request: its blocks stay while somebody reads them, or bytes may land in them."""
        is_landing = request.phase is Phase.READING
        request.is_aborted = not is_wanted
        request.phase = Phase.ENDED
        params = self.connector.finish(request)
        ending = "is right" if is_wanted else f"fails: {error.code}" if error else "is aborted"
        self._trace(self.host.name, f"{request.name} {ending}")
        del self.requests[request.name]
        # the connector says when no byte can land any more
        if is_landing:
            self._landing[request.name] = request.blocks
            self._check_landing(request.name, request.blocks)
        elif params is not None or request.is_saved:
            self._lent[request.name] = request.blocks
            if not (request.is_for_another or request.is_saved or self._may_be_garbled):
                self._kept[request.name] = 0
        elif request.frees_at_once:
            self._free(request.blocks)
        else:
            self._free_computed(request.blocks)
        request.tell(params, error)

    def _check_landing(self, name: str, blocks: Tables, since: float | None = None) -> None:
        """Refuse to keep blocks long after the last byte has landed, ``since`` when none may."""
        loop = self.host.loop
        is_over = self._landing.get(name) is not blocks
        if self.host.is_dead or is_over or self.host.thaws_at > (since or loop.now):
            return
        # some of it may come through a staging region
        is_moving = any(memory.landing.any() for memory in self._memories)
        last_at = max(memory.last_landing_at for memory in self._memories)
        if since is not None and not is_moving and last_at <= since:
            raise BrokenRuleError("LINGER", f"{name} keeps its blocks in {self.host.name}")
        since = None if is_moving else loop.now
        wait_s = 5.0 if is_moving else LOST_S / self.host.rate
        loop.at(loop.now + wait_s, partial(self._check_landing, name, blocks, since))

    def _check_reset(self) -> None:
        """Refuse to keep blocks for readers after the step that follows a reset."""
        for name in self._reset & self._lent.keys():
            message = f"{name} keeps its blocks in {self.host.name}, whose cache was reset"
            raise BrokenRuleError("LINGER", message)
        self._reset.clear()

    def _check_held(self) -> None:
        """Refuse to wait for a request of which a transfer has failed, though bytes may land."""
        for executor in self._executors:
            for name in executor.held():
                request = self.requests.get(name)
                if request is not None and request.phase is Phase.READING:
                    message = f"{name} waits, of which a transfer has failed in {self.host.name}"
                    raise BrokenRuleError("END", message)

    def _check_block(self, group: str, block: int) -> None:
        """Refuse to give a block away while a byte may land in it."""
        if any(memory.is_landing(group, block) for memory in self._memories):
            message = f"block {block} of {self.host.name} is given away while bytes may land in it"
            raise BrokenRuleError("GIVEN", message)


def _words(tables: Tables) -> str:
    """Return the tables of all groups as text."""
    return " ".join(map(str, tables.values()))
