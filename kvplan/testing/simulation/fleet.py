"""A fleet: it gets the requests of a scenario, suffers what goes wrong, and must be right.

These rules hold in every step, or the simulation ends with an error that names the rule:

- OWN: a request attends to no byte that is not of its own tokens, also where a prefix was cached.
  What was not read of a block stays on the device when its copy is copied there.
- GIVEN: a block is not given to a request while a byte of another one may land in it, and it is not
  copied then.
- CLAIM: blocks are not freed while a reader was told that they stay, and none is told that a lease
  is valid whose request is gone.
- END: each request ends, right or with an error of kvplan, within :data:`END_S` and a lease for
  each request of the fleet: so long may blocks stay that others wait for. One of which a transfer
  has failed ends in the step that sees it, also if bytes may still land, or is read again, three
  times in a row at most (``MAX_ROUNDS`` in ``fabric.py``). One that is read from an engine that
  dies ends within :data:`LOST_S` of its own engine's clock. One that is read when
  its engine hears that it holds no lease ends within :data:`REFUSED_S`, where all else is quiet,
  and was for as long as a handshake may take. One that waits in a room waits for
  :data:`LOST_ROOM_S` at most when its engine has heard that the server of rooms has restarted; of
  several workers, if all have heard of the start before, and no message is lost or late.
- RIGHT: no request fails without an excuse, which is a fault that explains its error by
  :data:`~kvplan.testing.simulation.scenario.EXCUSES`, at that time, or how it was sent: late, twice
  or as another one. What waits in a room may claim blocks that prefill has just taken back to
  preempt it. None fails for silence of a source that has answered the same reader within
  :data:`HEARD_S`, nor of a room that has had an entry within the time for which its reader waits.
  One that prefill has computed for others is handed over.
- AGAIN: :data:`SETTLE_S` after the last fault, a request between any two engines is right. Where
  nothing has gone wrong for a lease, a request is read within :data:`QUICK_S`, also if transfers
  from other engines are slow, and one that waits in a room hears within :data:`NEWS_S` that its
  prompt is computed, and that all pipeline stages have sent it.
- LINGER: a request that was read, and whose readers have all ended, keeps no block for more than
  :data:`LINGER_S` if nothing goes wrong meanwhile. Nor does one that has failed or was aborted, for
  more than :data:`LOST_S` after the last byte has landed. The step after a reset of the cache frees
  what readers had leases for.
- FREE: when all requests have ended and all leases are over, all blocks are free.
- GROW: then no connector remembers a request, no coroutine runs, all transfers are released, and no
  worker is connected to those of two starts of an engine.
- START: a reader reads from another start of an engine only when the one before has ended, where
  nothing else has gone wrong.
- REFUSE: a server refuses messages that break their format and answers others; a request whose
  handoff breaks it is not read, and none waits for a server that no operator has allowed.
- ASK: a read asks every :data:`~kvplan.protocol.read_jobs.ASK_S` whether its lease is valid, and
  when its last byte has come. A claim that was refused is not sent again, nor is one of a request
  without blocks for :data:`WANTED_S` after it has heard that the source needs the blocks back.
- REPORT: a connector reports nothing of a request that is neither read nor exported, and exporters
  count the blocks that are exported.
- CRASH: no coroutine and no step of an engine ends with an error.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from logging import Logger
from types import FunctionType, MethodType
from typing import Any, Final

import attrs
import numpy as np

from kvplan._checks import integer
from kvplan.describe import Worker
from kvplan.errors import KVPlanError
from kvplan.plan import TransferPlan
from kvplan.protocol.claims import RENEW_S
from kvplan.protocol.leases import LEASE_S
from kvplan.protocol.peer_engines import HANDSHAKE_S
from kvplan.protocol.read_jobs import ASK_S, SILENCE_S
from kvplan.protocol.room_contents import WAIT_S
from kvplan.protocol.system import ANSWER_S, RETRY_S
from kvplan.testing.simulation.catalog import Catalog
from kvplan.testing.simulation.engine import (
    LOST_S,
    STEP_S,
    TOKENS_PER_STEP,
    BlockPool,
    Connector,
    Engine,
    EngineRequest,
    Phase,
    Site,
)
from kvplan.testing.simulation.fabric import Fabric, Trouble, VirtualCopier, VirtualExecutor
from kvplan.testing.simulation.features import Feature
from kvplan.testing.simulation.leases import KEY
from kvplan.testing.simulation.malformed import bad_handoff
from kvplan.testing.simulation.memory import NUMBER_BITS, Numbers
from kvplan.testing.simulation.network import MALFORMED, Disturbance, Host, Network
from kvplan.testing.simulation.scenario import (
    HEALED_S,
    KEPT_S,
    RUNNING_S,
    SETTLE_S,
    Arrival,
    Call,
    Death,
    Freeze,
    Incident,
    Member,
    Overwrite,
    Rival,
    Scenario,
    Update,
    Visit,
)
from kvplan.testing.simulation.tasks import BrokenRuleError, TaskLoop

END_S: Final = 150.0
"""Seconds within which a request ends, beside freezes and a lease for each request."""

QUICK_S: Final = 4.5
"""Seconds of the slowest clock within which a request is read where nothing goes wrong."""

NEWS_S: Final = 4.0
"""Seconds of the slowest clock, and four steps of prefill, within which a room's reader hears."""

REFUSED_S: Final = ASK_S + 2 * ANSWER_S
"""Seconds of the slowest clock within which a request ends whose claim was refused."""

HEARD_S: Final = SILENCE_S - ASK_S - 2 * ANSWER_S
"""Seconds of a reader's clock after an answer, within which a read does not fail for silence."""

MAX_LAST_QUESTIONS: Final = 4
"""Questions of one read about its lease, beside one every :data:`~kvplan.protocol.read_jobs.ASK_S`.

The last one is asked when the last byte has come, and a read may begin again."""

WANTED_S: Final = RENEW_S / 2
"""Seconds of a reader's clock after which it claims nothing whose blocks are needed back."""

LOST_ROOM_S: Final = 2.0
"""Seconds of the slowest clock within which a request ends whose room was lost by a restart."""

LINGER_S: Final = 5.0
"""Seconds of the slowest clock for which blocks stay after the last reader, if nothing is wrong."""

AGAIN_S: Final = 0.5
"""Seconds after which a request is sent again whose name another one still has."""

QUIET_S: Final = 200.0
"""Seconds after the last requests, within which all blocks are free and no coroutine runs."""

ASYNC_STEPS_S: Final = (STEP_S, 0.05, 0.3)
"""Seconds that a step of prefill takes where the next one is scheduled meanwhile."""

LONG_STEPS_S: Final = (0.3, 0.9)
CHUNK_TOKENS: Final = 2
"""Seconds that a step of prefill takes where readers wait for less than a long prompt takes, and
the positions of a request that it computes."""

TP_SIZES: Final = (1, 2, 4)
"""Tensor parallel sizes of engines that start again."""

ELSEWHERE: Final = "-elsewhere"
"""Ends the name of a host that has an engine of another host's name."""

MakeConnector = Callable[[Site], Connector]

MakeParams = Callable[[str, random.Random], Mapping[str, Any]]
"""Makes the parameters of a request that comes to both engines, of the name of prefill's host."""

BreakParams = Callable[[Mapping[str, Any], random.Random], Mapping[str, Any]]
"""Breaks the format of one of a proxy's parameters."""

CheckServer = Callable[[str], object]
"""Refuses the address of a server that a request names, but no operator. Raises ``NAME``."""

SOON_S: Final = 10.0
"""Seconds within which prefill computes a request whose failure needs an excuse."""


@attrs.define(eq=False)
class _Readers:
    """The readers of a request that have not ended, and whether one of them was right."""

    arrival: Arrival
    prefill: Engine
    came_at: float
    num_left: int
    has_right: bool = False


@attrs.frozen
class FleetOutcome:
    """The end of a run: the rule that was broken, if any, what happened, and how requests ended."""

    scenario: Scenario
    error: BrokenRuleError | None
    trace: tuple[str, ...]
    num_steps: int
    ends: Mapping[str, int]

    @property
    def rule(self) -> str:
        """Return the rule that was broken, nothing if all held."""
        return "" if self.error is None else self.error.rule

    def __str__(self) -> str:
        ending = "all rules hold" if self.error is None else str(self.error)
        ends = ", ".join(f"{number} {end}" for end, number in sorted(self.ends.items()))
        return f"seed {self.scenario.seed}: {ending} ({self.num_steps} steps; requests: {ends})"


class Simulation:
    """Runs scenarios with the connectors that ``make_connector`` makes, one for each start.

    A request comes to the engines that read it when prefill has answered, with the parameters of
    that answer. With ``make_params`` it comes to both at once, with the parameters that a proxy
    makes of the name of prefill's host. An engine computes ``tokens_per_step`` positions of a
    request in a step: the fewer these are, the longer may others read a part of them. A step of
    each prefill engine takes one of ``prefill_steps_s``. A request that prefill has died with, or
    that was aborted there, comes to it again after ``resend_s``: under its name, and with its
    parameters. With ``break_params`` proxies err too, where fleets have :attr:`Feature.BAD_FIELDS`.
    Servers that requests name pass ``check_server`` in each engine.
    """

    def __init__(
        self,
        make_connector: MakeConnector,
        make_params: MakeParams | None = None,
        *,
        tokens_per_step: int = TOKENS_PER_STEP,
        prefill_steps_s: Sequence[float] = (STEP_S,),
        resend_s: float = math.inf,
        break_params: BreakParams | None = None,
        check_server: CheckServer = lambda _: None,
    ) -> None:
        self._make_connector = make_connector
        self._make_params = make_params
        self._break_params = break_params
        self._check_server = check_server
        self._prefill_steps_s = tuple(prefill_steps_s)
        self._tokens_per_step = integer(tokens_per_step, "tokens_per_step", low=1)
        self._resend_s = resend_s
        self._catalog = Catalog()

    def run(self, scenario: Scenario) -> FleetOutcome:
        """Run a scenario to its end, or until a rule is broken."""
        loop = TaskLoop()
        fleet = Fleet(
            scenario,
            self._make_connector,
            self._catalog,
            loop,
            self._make_params,
            self._tokens_per_step,
            self._prefill_steps_s,
            self._resend_s,
            self._break_params,
            self._check_server,
        )
        try:
            error = fleet.run()
        finally:
            fleet.loop.close()
        ends = dict(sorted(fleet.ends.items()))
        return FleetOutcome(scenario, error, tuple(fleet.lines), fleet.loop.num_events, ends)


class Fleet:
    """The engines of a scenario, and their clients."""

    def __init__(
        self,
        scenario: Scenario,
        make_connector: MakeConnector,
        catalog: Catalog,
        loop: TaskLoop,
        make_params: MakeParams | None = None,
        tokens_per_step: int = TOKENS_PER_STEP,
        prefill_steps_s: Sequence[float] = (STEP_S,),
        resend_s: float = math.inf,
        break_params: BreakParams | None = None,
        check_server: CheckServer = lambda _: None,
    ) -> None:
        self._break_params = break_params
        self._check_server = check_server
        self._prefill_steps_s = prefill_steps_s
        self._resend_s = resend_s
        self.scenario = scenario
        self.loop = loop
        self.lines: list[str] = []
        self._random = random.Random(f"{scenario.seed} fleet")
        self.ends: Counter[str] = Counter()
        self._make_connector = make_connector
        self._make_params = make_params
        is_short = Feature.SHORT_WAITS in scenario.features
        self._tokens_per_step = min(tokens_per_step, CHUNK_TOKENS) if is_short else tokens_per_step
        # all parameters that proxies have made, each with the name of its request
        self._params: list[tuple[str, Mapping[str, Any]]] = []
        self._family_hosts: dict[str, str] = {}
        self._family_params: dict[str, Mapping[str, Any]] = {}
        self._forgery = random.Random(f"{scenario.seed} forgery")
        self._handoffs: list[Mapping[str, Any]] = []
        # by reader and engine: the start that a request was read from last
        self._starts_read: dict[tuple[Engine, str], Engine] = {}
        self._breach_random = random.Random(f"{scenario.seed} bad handoffs")
        # the requests with the parameters of an earlier one, those with any other one's, and when
        # prefill has computed each
        self._repeated: set[str] = set()
        self._shared: set[str] = set()
        self._computed_at: dict[tuple[str, int], float] = {}
        # next turns of conversations, and how often a request has come under each name
        self._turns: set[str] = set()
        self._attempts: dict[str, int] = {}
        incidents = scenario.incidents
        disturbances = tuple(item for item in incidents if isinstance(item, Disturbance))
        troubles = tuple(item for item in incidents if isinstance(item, Trouble))
        self._network = Network(self.loop, scenario.seed, disturbances, scenario.features)
        self._catalog = catalog
        self._fabric = Fabric(scenario.seed, troubles, catalog, scenario.features)
        self._workers = {
            member.name: catalog.workers(member.name, member.shape) for member in scenario.members
        }
        self._numbers = Numbers.of(itertools.chain.from_iterable(self._workers.values()))
        self._members = {member.name: member for member in scenario.members}
        self._num_starts: Counter[str] = Counter()
        self._versions: dict[str, str] = {}
        # by adapter
        self._num_overwrites: Counter[str] = Counter()
        self._engines: dict[str, Engine] = {}
        self._slowest = min((member.rate for member in scenario.members), default=1.0)
        frozen_s = sum(item.ends_at - item.at for item in incidents if isinstance(item, Freeze))
        # each request that nobody reads keeps its blocks for a lease, and others wait behind it
        num_requests = sum(isinstance(item, Arrival) for item in incidents)
        self._end_s = END_S + frozen_s + num_requests * LEASE_S / self._slowest
        # the start of the server that a request has waited for
        self._room_starts = dict[EngineRequest, str]()
        # the answers that it has had of each start
        self._num_room_answers = Counter[tuple[EngineRequest, str]]()
        # by reader and lease: when the reader has asked, and heard that the lease is valid
        self._confirmed_at = dict[tuple[Engine, str], list[float]]()
        # when messages about claims were answered, and those that said that a lease is valid
        self._answered_at = dict[bytes, float]()
        self._valid_at = dict[tuple[Engine, str], list[float]]()
        # entries of rooms that an engine has heard of, by version
        self._heard = set[tuple[Engine, str]]()
        # by reader of a room: when it has come, or heard the last entry, and its longest wait, both
        # by its engine's clock
        self._waits = dict[EngineRequest, tuple[float, float]]()
        # when a request without blocks has heard first that those of its lease are needed back
        self._wanted = dict[tuple[EngineRequest, str], float]()
        # claims that an engine has heard to be refused, by lease and reader
        self._refused = set[tuple[Engine, str, str]]()
        # requests that have not ended, by name, and until when they must
        self._open: dict[str, float] = {}
        self._requests: list[EngineRequest] = []

    def run(self) -> BrokenRuleError | None:
        """Let everything happen. Return the rule that was broken, if any."""
        try:
            for member in self.scenario.members:
                self._start(member)
            for incident in self.scenario.incidents:
                self._plan(incident)
            self._advance(HEALED_S + SETTLE_S / self._slowest)
            while self._reset_at == math.inf and self.loop.now < self._end_s:
                self._advance(self.loop.now + 1.0)
            # faults are over, and their consequences too
            probes = self._probe()
            while self._open:
                self._advance(self.loop.now + 1.0)
            for name, error in probes.items():
                if error is not None:
                    raise BrokenRuleError("AGAIN", f"{name} fails after all faults: {error}")
            kept_s = KEPT_S / self._slowest if Feature.TURNS in self.scenario.features else 0.0
            self._advance(self.loop.now + QUIET_S + kept_s)
            self._check_end()
        except BrokenRuleError as error:
            self._trace("", str(error))
            return error
        return None

    def _name_of(self, label: int) -> str:
        """Return the request and the position that a label is of."""
        # the label of the position's first byte
        prefix = label >> NUMBER_BITS << NUMBER_BITS
        for request in self._requests:
            (positions,) = np.nonzero(request.labels == prefix)
            if positions.size:
                return f"that of position {positions[0]} of {request.name}"
        return "bytes that nobody wrote"

    def _trace(self, host_name: str, message: str) -> None:
        self.lines.append(f"{self.loop.now:10.4f} {host_name:10} {message}")

    def _advance(self, until_s: float) -> None:
        """Let all events happen up to a time."""
        try:
            while self.loop.advance(until_s):
                for error in self.loop.errors:
                    raise error
        except BrokenRuleError:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rpartition('/')[2]}, {where.name}"
            raise BrokenRuleError("CRASH", f"{error!r} in {place}") from error
        self.loop.now = until_s
        for name, ends_at in self._open.items():
            if ends_at < self.loop.now:
                raise BrokenRuleError("END", f"{name} has not ended in time")

    def _start(self, member: Member, place: str = "") -> None:
        """Start an engine, at the host of its name or elsewhere."""
        self._num_starts[member.name] += 1
        number = self._num_starts[member.name]
        draw = random.Random(f"{self.scenario.seed} {member.name} {number}")
        host = Host(
            member.name + place,
            self._network,
            draw,
            member.rate,
            1000 * draw.random(),
            check=self._check_server,
        )
        workers = self._workers[member.name]
        if Feature.RESHAPES in self.scenario.features and number > 1 and not place:
            sizes = [tp for tp in TP_SIZES if tp != member.shape.tp]
            shape = attrs.evolve(member.shape, tp=draw.choice(sizes))
            workers = self._catalog.workers(member.name, shape)
        self._engines[host.name] = Engine(
            host,
            workers,
            member.shape.groups,
            partial(
                BlockPool,
                member.num_blocks,
                takes_newest=member.takes_newest,
                forgets=member.forgets,
            ),
            self._fabric,
            self._numbers,
            self._make_connector,
            self._trace,
            self._name_of,
            self._tokens_per_step,
            self._step_s_of(member),
            self.scenario.features,
            self._versions.get(member.name, ""),
            lambda adapter: f"content {self._num_overwrites[adapter]} of {adapter}",
        )
        host.witnesses.append(self._note_answer)
        host.hearers.append(partial(self._hear, self._engines[host.name]))
        host.hearers.append(partial(self._hear_rooms, self._engines[host.name]))
        self._trace(host.name, f"start {number}")

    def _note_answer(self, path: str, sent: bytes, answer: bytes) -> None:
        """Note when a source has answered a message about claims."""
        if path == "/claims":
            self._answered_at[sent] = self.loop.now

    def _hear(self, engine: Engine, path: str, sent: bytes, answer: bytes) -> None:
        """Expect the end of requests of which an engine hears that their claims are refused."""
        if path != "/claims":
            return
        try:
            question, reply = json.loads(sent), json.loads(answer)
            claims = [*zip(question["claims"], reply["claims"], strict=True)]
            asks = [*zip(question["asks"], reply["asks"], strict=True)]
            wanted = [*reply["wanted"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            # somebody has garbled it
            return
        for lease, is_valid in asks:
            if is_valid is True:
                self._confirmed_at.setdefault((engine, lease), []).append(self.loop.now)
                answered_at = self._answered_at.get(sent, self.loop.now)
                self._valid_at.setdefault((engine, lease), []).append(answered_at)
        for (lease, reader), is_valid in claims:
            if (engine, lease, reader) in self._refused:
                message = f"{reader} claims {lease} again, which was refused"
                raise BrokenRuleError("ASK", message)
            # an answer that somebody has garbled may not be read
            if is_valid is False and Feature.GARBLED_MESSAGES not in self.scenario.features:
                self._refused.add((engine, lease, reader))
            request = engine.requests.get(reader.rpartition(" ")[2])
            is_wanted = is_valid is True and lease in wanted
            if request is not None:
                self._check_wanted(engine, request, lease, is_wanted=is_wanted)
            if is_valid is False and request is not None and request.phase is Phase.READING:
                check = partial(self._check_refusal, engine, request, lease, self.loop.now)
                self.loop.at(self.loop.now + REFUSED_S / self._slowest, check)

    def _check_wanted(
        self, engine: Engine, request: EngineRequest, lease: str, *, is_wanted: bool
    ) -> None:
        """Refuse to renew a claim whose blocks are needed back, where nothing is read yet."""
        if request.phase is not Phase.WAITING or not is_wanted:
            self._wanted.pop((request, lease), None)
            return
        since = self._wanted.setdefault((request, lease), self.loop.now)
        is_late = self.loop.now - since > WANTED_S / engine.host.rate
        is_garbled = Feature.GARBLED_MESSAGES in self.scenario.features
        if is_late and engine.host.thaws_at <= since and not is_garbled:
            message = f"{request.name} claims {lease} again, whose blocks are needed back"
            raise BrokenRuleError("ASK", message)

    def _hear_rooms(self, engine: Engine, path: str, sent: bytes, answer: bytes) -> None:
        """Expect the end of requests whose rooms were lost: their server has another start now."""
        if not path.startswith("/ask/") or Feature.GARBLED_MESSAGES in self.scenario.features:
            return
        self._hear_entries(engine, json.loads(answer)["rooms"])
        start, rooms = json.loads(answer)["start"], json.loads(sent)
        for request in engine.requests.values():
            is_asking = request.phase is Phase.WAITING and request.asked_at
            names = map(str, (request.params or {}).values())
            # one with a malformed address waits for another server
            is_made = any(request.params == params for _, params in self._params)
            is_here = is_made and not rooms.keys().isdisjoint(names)
            if not (is_asking and is_here):
                continue
            known = self._room_starts.setdefault(request, start)
            self._num_room_answers[request, start] += 1
            # a worker that hears of the later start alone cannot know that there was another
            if known != start and self._num_room_answers[request, known] >= engine.num_workers:
                check = partial(self._check_lost_room, engine, request, self.loop.now)
                self.loop.at(self.loop.now + 2 * LOST_ROOM_S / self._slowest, check)

    def _hear_entries(
        self, engine: Engine, entries: Mapping[str, tuple[str, Sequence[str]]]
    ) -> None:
        """Note when the readers of rooms have heard of an entry, and how long they have waited."""
        now = engine.host.monotonic()
        for room, (version, _) in entries.items():
            if (engine, version) in self._heard:
                continue
            self._heard.add((engine, version))
            for request in engine.requests.values():
                if request in self._waits and room in map(str, (request.params or {}).values()):
                    since, longest_s = self._waits[request]
                    self._waits[request] = now, max(longest_s, now - since)

    def _check_wait(
        self, engine: Engine, request: EngineRequest, error: KVPlanError | None
    ) -> None:
        """Refuse to give a room up in which entries came in time.

        Of several workers each may hear of its own entries.
        """
        timeout_s = None if error is None else error.details.get("timeout_s")
        is_known = engine.num_workers == 1 and request in self._waits
        if timeout_s is None or not is_known:
            return
        if Feature.GARBLED_MESSAGES in self.scenario.features:
            return
        since, longest_s = self._waits[request]
        waited_s = max(longest_s, engine.host.monotonic() - since)
        if waited_s < timeout_s:
            message = f"{request.name} has waited for {waited_s:.1f} s: {error}"
            raise BrokenRuleError("RIGHT", message)

    def _check_lost_room(self, engine: Engine, request: EngineRequest, since: float) -> None:
        """Refuse to wait on for what a server had that has restarted.

        Of several workers one may know of the start before alone, and its question may be lost.
        """
        asked_since = since - (WAIT_S + ANSWER_S) / self._slowest
        if engine.num_workers > 1 and self.scenario.is_disturbed(asked_since, self.loop.now):
            return
        is_late = request.asked_at > since + LOST_ROOM_S / self._slowest
        if request.phase is Phase.WAITING and is_late and not engine.host.is_dead:
            message = f"{request.name} waits, whose room was lost when its server restarted"
            raise BrokenRuleError("END", message)

    def _check_refusal(
        self, engine: Engine, request: EngineRequest, lease: str, since: float
    ) -> None:
        """Refuse to read on long after the reader has heard that it holds no lease.

        One that has too many readers may be read while these hold it. A read waits for a handshake
        that has begun before.
        """
        is_quiet = self.scenario.is_quiet(since - HANDSHAKE_S / self._slowest, self.loop.now)
        if any(at >= since for at in self._valid_at.get((engine, lease), ())):
            return
        if request.phase is Phase.READING and is_quiet and not engine.host.is_dead:
            message = f"{request.name} waits, whose claim was refused in {engine.host.name}"
            raise BrokenRuleError("END", message)

    def _step_s_of(self, member: Member) -> float:
        """Return how long a step of an engine takes that computes."""
        if not member.name.startswith("prefill"):
            return STEP_S
        draw = random.Random(f"{self.scenario.seed} {member.name} step")
        if Feature.SHORT_WAITS in self.scenario.features:
            return draw.choice(LONG_STEPS_S)
        is_async = Feature.ASYNC_STEPS in self.scenario.features
        # so slow that what a step writes can be asked for before
        return draw.choice(ASYNC_STEPS_S if is_async else self._prefill_steps_s)

    def _plan(self, incident: Incident) -> None:
        if isinstance(incident, Arrival):
            self.loop.at(incident.at, partial(self._arrive, incident, self._finish_of(incident)))
        elif isinstance(incident, Death):
            end = partial(self._die, incident.engine, incident.restarts_at)
            if incident.restarts_at is None:
                end = partial(self._stop, incident.engine)
            self.loop.at(incident.at, end)
        elif isinstance(incident, Freeze):
            self.loop.at(incident.at, partial(self._freeze, incident))
        elif isinstance(incident, Rival):
            self.loop.at(incident.at, partial(self._rival, incident))
        elif isinstance(incident, Overwrite):
            self.loop.at(incident.at, partial(self._overwrite, incident))
        elif isinstance(incident, Update):
            for number, name in enumerate(self._members):
                at = incident.at + number * incident.gap_s
                self.loop.at(at, partial(self._update, name, incident))

    def _update(self, name: str, update: Update) -> None:
        """Update an engine, and its twin. A start that comes later has the weights too.

        One that keeps what runs waits for it.
        """
        if update.calls:
            self._call_when_used(name, update)
            return
        is_idle = not any(
            engine.is_running
            for engine in (self._engines.get(name), self._engines.get(name + ELSEWHERE))
            if engine is not None
        )
        if update.keeps_running and is_idle and self.loop.now < update.at + RUNNING_S:
            self.loop.at(self.loop.now + STEP_S / 2, partial(self._update, name, update))
            return
        self._versions[name] = update.version or self._versions.get(name, "")
        for place in ("", ELSEWHERE):
            engine = self._engines.get(name + place)
            if engine is not None and not engine.host.is_dead:
                engine.update(update.version, keeps_running=update.keeps_running)

    def _overwrite(self, overwrite: Overwrite) -> None:
        """Let the folder of an adapter have other content, for all engines."""
        self._trace("", f"{overwrite.adapter} is overwritten")
        self._num_overwrites[overwrite.adapter] += 1
        for engine in [*self._engines.values()]:
            if overwrite.reloads:
                self._reload(engine, overwrite)

    def _reload(self, engine: Engine, overwrite: Overwrite) -> None:
        """Load an adapter again, where a request is computed with it, or after a while."""
        is_waiting = self.loop.now < overwrite.at + RUNNING_S
        is_early = is_waiting and not engine.computes_with(overwrite.adapter)
        # workers load adapters between steps
        if is_early or engine.is_paused:
            self.loop.at(self.loop.now + STEP_S / 2, partial(self._reload, engine, overwrite))
        elif not engine.host.is_dead:
            engine.reload(overwrite.adapter)

    def _call_when_used(self, name: str, update: Update) -> None:
        """Make an update's calls, in most engines when a request is in a phase."""
        draw = random.Random(f"{self.scenario.seed} {name} {update.at}")
        phases = (Phase.RUNNING,) if name.startswith("prefill") else (Phase.READING, Phase.WAITING)
        phase = draw.choice((*phases, *phases, None))
        engine = self._engines.get(name)
        is_early = phase is not None and not (engine and engine.has(phase))
        if is_early and self.loop.now < update.at + RUNNING_S / 4:
            self.loop.at(self.loop.now + STEP_S / 2, partial(self._call_when_used, name, update))
            return
        starts = [self._engines.get(name + place) for place in ("", ELSEWHERE)]
        if any(start is not None and start.resets_when_idle for start in starts):
            update = update.with_own_name()
        self._versions[name] = update.version
        for call in update.calls:
            self.loop.at(self.loop.now + call.delay_s, partial(self._call, name, call, starts))

    def _call(self, name: str, call: Call, starts: Sequence[Engine | None]) -> None:
        """Call an engine; a start later than ``starts`` has the weights, and may get no call."""
        for place in ("", ELSEWHERE):
            engine = self._engines.get(name + place)
            if engine is None or engine.host.is_dead:
                continue
            if engine in starts or not engine.resets_when_idle:
                engine.call(call)

    @property
    def _reset_at(self) -> float:
        """Return when the last reset that was called for has succeeded, infinity if one has not."""
        return max((engine.reset_at for engine in self._engines.values()), default=-math.inf)

    def _finish_of(self, arrival: Arrival) -> Callable[[KVPlanError | None], None]:
        """Return what checks the end of a request."""

        def finish(error: KVPlanError | None) -> None:
            if error is not None and not self._is_excused(arrival, error):
                raise BrokenRuleError("RIGHT", f"{arrival.name} fails: {error}")

        return finish

    def _is_excused(self, arrival: Arrival, error: KVPlanError) -> bool:
        """Return whether a request may fail: as it was sent, or by what has gone wrong."""
        if error.code in arrival.excused(comes_to_both=self._make_params is not None):
            return True
        # an answer is kept for a while only, and gives way
        is_gone = arrival.name in self._turns and error.code == "LEASE"
        is_repeated = is_gone or arrival.name in self._repeated | self._shared
        if self._is_unstorable(error):
            return True
        if is_repeated or self._is_slow(arrival) or self._has_short_wait(error):
            return True
        # a claim was on its way when what was published of a preempted request was overwritten
        is_preempted = any(arrival.name in engine.preempted for engine in self._engines.values())
        if error.code == "LEASE" and is_preempted and self._make_params is not None:
            return True
        # weights of which the prefix cache has old blocks are no other engine's
        settled_at = self._reset_at + SETTLE_S / self._slowest
        if error.code == "MODEL" and arrival.at <= settled_at:
            return True
        # what a next turn reads may have been computed long ago
        since = 0.0 if arrival.name in self._turns else arrival.at
        return self.scenario.may_fail(error.code, since, self.loop.now)

    def _is_unstorable(self, error: KVPlanError) -> bool:
        """Return whether a request fails since a block of it would be stored that lacks bytes.

        Where all blocks are of one size, none lacks bytes.
        """
        sizes = {member.shape.tokens_per_block for member in self.scenario.members}
        has_siblings = Feature.SIBLINGS in self.scenario.features
        return has_siblings and len(sizes) > 1 and "siblings" in error.details

    def _is_slow(self, arrival: Arrival) -> bool:
        """Return whether the readers of a request have waited long for prefill."""
        computed_at = self._computed_at.get((arrival.name, arrival.attempt), math.inf)
        return self._make_params is not None and computed_at > arrival.at + SOON_S

    def _has_short_wait(self, error: KVPlanError) -> bool:
        """Return whether prefill may have needed more time than its readers wait."""
        return Feature.SHORT_WAITS in self.scenario.features and "timeout_s" in error.details

    def _rival(self, rival: Rival) -> None:
        """Start an engine again elsewhere. In the end the first one lives, or a new start of it."""
        self._start(self._members[rival.engine], ELSEWHERE)
        self.loop.at(rival.ends_at, partial(self._die, rival.engine + ELSEWHERE))

    def _stop(self, name: str) -> None:
        """End an engine for good, when its connector has closed if it can."""
        engine = self._engines[name]
        close = getattr(engine.connector, "close", None)
        if close is None or engine.host.is_dead:
            self._die(name)
        elif engine.is_paused:
            # as an engine that shuts down, it ends its step first
            self.loop.at(self.loop.now + STEP_S, partial(self._stop, name))
        else:
            self._trace(name, "closes")
            engine.is_stopped = True
            close(partial(self._die, name))

    def _die(self, name: str, restarts_at: float | None = None) -> None:
        engine = self._engines[name]
        if engine.host.is_dead:
            return
        self._trace(name, "dies")
        engine.host.die()
        self._expect_ends(name)
        error = KVPlanError("PEER", "serve", expected="an engine that lives", got="a dead one")
        for request in [*engine.requests.values()]:
            request.tell(None, error)
        if restarts_at is not None:
            self.loop.at(restarts_at, partial(self._start, self._members[name]))

    def _expect_ends(self, source: str) -> None:
        """Check later that the requests have ended that are read now from a host that has died."""
        for engine in self._engines.values():
            read = [
                request
                for request in engine.requests.values()
                if request.phase is Phase.READING
                and (request.params or {}).get("remote_host") == source
            ]
            check = partial(self._check_ended, engine, read, source, self.loop.now)
            if read:
                self.loop.at(self.loop.now + LOST_S / engine.host.rate, check)

    def _check_ended(
        self, engine: Engine, requests: Sequence[EngineRequest], source: str, since: float
    ) -> None:
        """Refuse to wait on, unless the reader's engine has died or was frozen meanwhile."""
        if engine.host.is_dead or engine.host.thaws_at > since:
            return
        for request in requests:
            if request.phase is Phase.READING:
                message = f"{request.name} still waits for {source}, which has died"
                raise BrokenRuleError("END", message)

    def _freeze(self, freeze: Freeze) -> None:
        self._trace(freeze.engine, f"freezes until {freeze.ends_at:.4f}")
        self._engines[freeze.engine].host.freeze(freeze.ends_at)

    def _arrive(
        self,
        arrival: Arrival,
        finish: Callable[[KVPlanError | None], None],
        earlier: Mapping[str, Any] | None = None,
    ) -> None:
        """Let prefill compute a request, and others read it. ``finish`` gets each end.

        A next turn comes with the parameters of the ``earlier`` answer.
        """
        # children come to the start of their parent
        host = self._family_hosts.get(arrival.child_of)
        prefill = self._engine_of(arrival.prefill) if host is None else self._engines[host]
        self._family_hosts[arrival.name] = prefill.host.name
        if arrival.attempt and self._is_busy(arrival.name, prefill):
            again = partial(self._arrive, arrival, finish, earlier)
            if self.loop.now + AGAIN_S < HEALED_S:
                self.loop.at(self.loop.now + AGAIN_S, again)
            return
        self._attempts[arrival.name] = arrival.attempt
        params = self._params_of(arrival, prefill)
        if params is not None:
            self._visit_all(arrival, prefill, params, finish)
        sent = params
        if earlier is not None:
            sent = {**self._as_it_comes(arrival, earlier), **(params or {})}
        name = prefill.host.name
        self._compute(arrival, name, params, finish, sent, arrival.patience_s)

    def _is_busy(self, name: str, prefill: Engine) -> bool:
        """Return whether a request of a name has not ended, or the engine has blocks of it."""
        return name in self._open or prefill.holds(name)

    def _compute(
        self,
        arrival: Arrival,
        prefill: str,
        params: Mapping[str, Any] | None,
        finish: Callable[[KVPlanError | None], None],
        sent: Mapping[str, Any] | None,
        patience_s: float | None = None,
    ) -> None:
        """Send a request to the host ``prefill``, and again if it is not computed there.

        It comes with ``sent``, of which ``params`` are those that decode gets too.
        """
        engine = self._engines[prefill]

        def computed(answer: Mapping[str, Any] | None, error: KVPlanError | None) -> None:
            if answer is not None:
                self._computed_at[arrival.name, arrival.attempt] = self.loop.now
                self._expect_news(arrival, engine, params)
                # they have come already, if a proxy has made their parameters
                if params is None:
                    self._visit_all(arrival, engine, answer, finish)
                return
            self._check_handed_over(request, error)
            is_lost = error is None or error.code == "PEER"
            again_at = self.loop.now + self._resend_s
            if is_lost and again_at < HEALED_S:
                self.loop.at(again_at, again)
            elif error is not None:
                finish(error)

        def again() -> None:
            if not self._is_busy(arrival.name, self._engines[prefill]):
                self._compute(arrival, prefill, params, finish, sent)

        num_tokens = arrival.num_generated
        request = self._request(arrival.name, arrival.tokens, num_tokens, computed, arrival.facts)
        request.params = sent
        request.is_for_another = True
        self._submit(engine, request, patience_s)

    def _expect_news(
        self, arrival: Arrival, prefill: Engine, params: Mapping[str, Any] | None
    ) -> None:
        """Check later that those hear of a request that wait in its room, which no other one has.

        A pipeline stage may be many steps behind the first one.
        """
        member = self._members[arrival.prefill]
        if params is None or arrival.name in self._shared:
            return
        if not (prefill.host.is_dead or prefill.has_sent(arrival.name)):
            again = partial(self._expect_news, arrival, prefill, params)
            self.loop.at(self.loop.now + STEP_S, again)
            return
        wait_s = NEWS_S / self._slowest + 4 * self._step_s_of(member)
        check = partial(self._check_news, arrival.name, prefill, params, self.loop.now)
        self.loop.at(self.loop.now + wait_s, check)

    def _check_news(
        self, name: str, prefill: Engine, params: Mapping[str, Any], since: float
    ) -> None:
        """Refuse to wait in a room for what it has ``since`` long ago, where all is quiet."""
        calm_since = since - (WAIT_S + ANSWER_S + RETRY_S) / self._slowest
        is_calm = self.scenario.is_quiet(calm_since, self.loop.now)
        if not is_calm or name in self._shared or not prefill.is_lent(name):
            return
        until = (since + self.loop.now) / 2
        for engine in self._engines.values():
            for request in engine.requests.values():
                is_reader = request.params == params and not request.is_for_another
                is_waiting = request.phase is Phase.WAITING and request.asked_at > until
                if is_reader and is_waiting and request.came_at < since:
                    message = f"{request.name} waits in a room for what is there since {since:.4f}"
                    raise BrokenRuleError("AGAIN", message)

    def _check_handed_over(self, request: EngineRequest, error: KVPlanError | None) -> None:
        """Refuse to compute a request for another engine and to hand nothing over.

        Where both engines have the request from the beginning, its reader may be gone by then.
        """
        is_computed = error is None and request.is_complete and not request.is_aborted
        changes = Feature.UPDATES | Feature.ADAPTERS | Feature.LIVE_UPDATES
        has_cause = self._make_params is not None or bool(changes & self.scenario.features)
        if is_computed and not has_cause:
            raise BrokenRuleError("RIGHT", f"{request.name} is computed, and not handed over")

    def _params_of(self, arrival: Arrival, prefill: Engine) -> Mapping[str, Any] | None:
        """Return the parameters that a proxy makes for both engines, None if prefill makes them."""
        if self._make_params is None:
            return None
        if arrival.child_of in self._family_params:
            self._repeated.add(arrival.name)
            self._shared |= {arrival.name, arrival.child_of}
            return self._family_params[arrival.child_of]
        params = self._make_params(prefill.host.name, self._random)
        # when faults are over, nobody makes the same parameters twice
        made = [others for _, others in self._params]
        while params in made and self.loop.now >= HEALED_S:
            params = self._make_params(prefill.host.name, self._random)
        names = {name for name, others in self._params if others == params}
        if names:
            self._repeated.add(arrival.name)
            self._shared |= {arrival.name, *names}
        self._params.append((arrival.name, params))
        self._family_params[arrival.name] = params
        return params

    def _visit_all(
        self,
        arrival: Arrival,
        prefill: Engine,
        params: Mapping[str, Any],
        finish: Callable[[KVPlanError | None], None],
    ) -> None:
        """Send a request to the engines that read it, each after a delay."""
        readers = _Readers(arrival, prefill, self.loop.now, len(arrival.visits))
        for number, visit in enumerate(arrival.visits):
            name = f"{arrival.name}/{number}" + "/again" * arrival.attempt
            read = partial(self._visit, readers, visit, name, params, finish)
            self.loop.at(self.loop.now + visit.delay_s, read)

    def _visit(
        self,
        readers: _Readers,
        visit: Visit,
        name: str,
        params: Mapping[str, Any],
        finish: Callable[[KVPlanError | None], None],
    ) -> None:
        arrival = readers.arrival
        engine = self._engine_of(visit.engine)

        def ended(answer: Mapping[str, Any] | None, error: KVPlanError | None) -> None:
            readers.num_left -= 1
            # one that was taken for another request has claimed nothing, and so has one of a room
            # that found all of its prompt cached before it was computed
            is_same = visit.tokens is None and visit.facts is None
            is_same &= bool(request.num_read) or self._make_params is None
            is_read = error is None and request.is_complete
            readers.has_right |= is_read and is_same and arrival.name not in self._repeated
            if not readers.num_left and readers.has_right:
                self.loop.at(self._linger_at, partial(self._check_released, readers))
            self._check_quick(readers, request)
            self._check_wait(engine, request, error)
            self._check_questions(readers, engine, request, error)
            if is_read and request.read_s:
                self._check_confirmed(engine, request)
                self._check_start(engine, readers.prefill, request)
            if answer is not None and arrival.turns:
                self._plan_turn(arrival, engine, request, answer)
            finish(error)

        tokens = visit.tokens or arrival.tokens
        facts = arrival.facts if visit.facts is None else visit.facts
        request = self._request(name, tokens, arrival.num_answer, ended, facts)
        request.params = self._as_it_comes(arrival, params)
        self._send_malformed(engine, request, params)
        self._submit(engine, request, visit.patience_s)

    def _check_start(self, reader: Engine, start: Engine, request: EngineRequest) -> None:
        """Refuse to read from one start of an engine while an earlier one that was read lives."""
        key = (reader, start.host.name.removesuffix(ELSEWHERE))
        before = self._starts_read.get(key, start)
        self._starts_read[key] = start
        is_beside = before is not start and not before.host.is_dead
        # what was read may have been loaded, which asks no engine
        is_beside = is_beside and Feature.STORE not in self.scenario.features
        if is_beside and self.scenario.has_rivals_alone(self.loop.now):
            message = f"{request.name} is read from {start.host.name}, and {before.host.name} lives"
            raise BrokenRuleError("START", message)

    def _check_confirmed(self, engine: Engine, request: EngineRequest) -> None:
        """Refuse to use what was read, unless each worker has asked after its last byte.

        What is read in rooms may have another lease.
        """
        lease = str((request.params or {}).get("remote_lease"))
        valid_at = self._valid_at.get((engine, lease), [])
        if self._make_params is not None:
            return
        # who asked is not known: the last worker, the last two, and so on
        for number, landed_at in enumerate(sorted(request.landed_at, reverse=True), start=1):
            if sum(at >= landed_at for at in valid_at) < number:
                message = f"{request.name} is used, whose lease was valid before its last bytes"
                raise BrokenRuleError("ASK", message)

    def _check_questions(
        self, readers: _Readers, engine: Engine, request: EngineRequest, error: KVPlanError | None
    ) -> None:
        """Refuse to ask too often about a lease, or to fail for silence soon after an answer.

        Each worker asks for each of its reads, so what one of them hears says nothing of others.
        """
        # a request that comes to both engines may be read in many parts
        lease = (request.params or {}).get("remote_lease")
        confirmed_at = self._confirmed_at.get((engine, str(lease)), [])
        if not confirmed_at or self._make_params is not None:
            return
        name = engine.host.name.removesuffix(ELSEWHERE)
        num_visits = sum(visit.engine == name for visit in readers.arrival.visits)
        num_readers = engine.num_workers * num_visits
        passed_s = (self.loop.now - readers.came_at) * engine.host.rate
        most = num_readers * (MAX_LAST_QUESTIONS + passed_s / ASK_S)
        if len(confirmed_at) > most:
            message = f"{request.name} has asked {len(confirmed_at)} times in {passed_s:.1f} s"
            raise BrokenRuleError("ASK", message)
        silent_s = (self.loop.now - confirmed_at[-1]) * engine.host.rate
        is_silence = error is not None and error.details.get("unanswered") == "/claims"
        if is_silence and num_readers == 1 and silent_s < HEARD_S:
            message = f"{request.name} fails {silent_s:.1f} s after an answer: {error}"
            raise BrokenRuleError("RIGHT", message)

    def _check_quick(self, readers: _Readers, request: EngineRequest) -> None:
        """Refuse to read for long where nothing is wrong, unless in many parts or slices.

        Other engines may be slow, and have transfers under way.
        """
        calm_since = request.began_at - LEASE_S / self._slowest - SETTLE_S
        is_short = self._make_params is None and Feature.SLICES not in self.scenario.features
        is_late = request.read_s * self._slowest > QUICK_S
        span = (calm_since, self.loop.now)
        is_excused = self.scenario.is_slow(readers.prefill.host.name, *span)
        if is_late and is_short and not is_excused and self.scenario.is_quiet(*span):
            raise BrokenRuleError("AGAIN", f"{request.name} is read in {request.read_s:.1f} s")

    @property
    def _linger_at(self) -> float:
        return self.loop.now + LINGER_S / self._slowest

    def _check_released(self, readers: _Readers, *, is_second: bool = False) -> None:
        """Refuse to keep the blocks of a request whose readers have all ended.

        Of several readers one may have been aborted, and its last byte may have landed just now.
        """
        name, engine = readers.arrival.name, readers.prefill
        began_at = readers.came_at - SETTLE_S / self._slowest
        is_other = self._attempts[name] != readers.arrival.attempt
        if engine.host.is_dead or is_other or not self.scenario.is_quiet(began_at, self.loop.now):
            return
        # readers of one room may claim the lease of any request in it
        names = sorted(self._shared) if name in self._shared else [name]
        numbers = range(len(readers.arrival.visits))
        readings = [f"{each}/{number}" for each in names for number in numbers]
        readings += [f"{each}/again" for each in readings]
        if any(other.may_land(each) for other in self._engines.values() for each in readings):
            self.loop.at(self._linger_at, partial(self._check_released, readers))
        elif engine.is_lent(name) and len(readings) > 2 and not is_second:
            check = partial(self._check_released, readers, is_second=True)
            self.loop.at(self._linger_at, check)
        elif engine.is_lent(name):
            message = f"{name} keeps its blocks in {engine.host.name}, and nobody reads it"
            raise BrokenRuleError("LINGER", message)

    def _plan_turn(
        self, arrival: Arrival, engine: Engine, request: EngineRequest, answer: Mapping[str, Any]
    ) -> None:
        """Send the next turn of a conversation, which has the handoff of the last answer."""
        number = request.name.rpartition("/")[2]
        visit = arrival.visits[int(number)]
        turn = arrival.next_turn(self.loop.now, request.tokens, int(number))
        if turn.at >= HEALED_S:
            return

        # what another one was taken for is no prefix of its next turn
        if visit.tokens is not None or visit.facts is not None or arrival.name in self._repeated:
            self._repeated.add(turn.name)

        def arrive() -> None:
            engine.note_turn(request.name)
            self._turns.add(turn.name)
            self._arrive(turn, self._finish_of(turn), answer)

        self.loop.at(turn.at, arrive)

    def _as_it_comes(self, arrival: Arrival, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters of a request, or forged ones: one is of another request, or bad.

        What a proxy has made itself is not signed, and is not forged.
        """
        is_signed = self._make_params is None and Feature.GARBLED_MESSAGES in self.scenario.features
        if not is_signed or self.loop.now >= HEALED_S:
            return params
        self._handoffs.append(params)
        if self._forgery.random() > 0.2:
            return params
        draw = self._forgery
        # block tables rather than names
        tables = [key for key, value in sorted(params.items()) if isinstance(value, Mapping)]
        key = draw.choice(draw.choice((sorted(params), tables or sorted(params))))
        others = [other[key] for other in self._handoffs if key in other]
        values = draw.choice((MALFORMED, others))
        # a failure is no wonder
        self._repeated.add(arrival.name)
        return {**params, key: draw.choice(values)}

    def _send_malformed(
        self, engine: Engine, request: EngineRequest, params: Mapping[str, Any]
    ) -> None:
        """Send a few requests like one before it, whose parameters break their format."""
        draw = self._breach_random
        if "remote_signature" in params and params.get("remote_block_ids"):
            break_params: BreakParams = partial(bad_handoff, sign=KEY.sign)
        elif self._break_params is not None:
            break_params = self._break_params
        else:
            return
        if Feature.BAD_FIELDS not in self.scenario.features:
            return
        for number in range(draw.choice((1, 2, 4)) if self.loop.now < HEALED_S else 0):
            name = f"{request.name}/malformed-{number}"
            self._send_refused(engine, name, request, break_params(params, draw))

    def _send_refused(
        self, engine: Engine, name: str, like: EngineRequest, params: Mapping[str, Any]
    ) -> None:
        """Send a request that must be refused."""

        def ended(answer: Mapping[str, Any] | None, error: KVPlanError | None) -> None:
            self._check_refused(engine, refused)

        refused = self._request(name, (*like.tokens,), 1, ended, like.facts)
        refused.params = params
        self._submit(engine, refused, None)

    def _check_refused(self, engine: Engine, request: EngineRequest) -> None:
        """Refuse to read, or to wait long for, a request whose handoff breaks its format."""
        # what began may be a load, which needs no handoff
        if Feature.STORE in self.scenario.features:
            return
        waited_s = (request.asked_at - request.came_at) * self._slowest
        if waited_s > QUICK_S and engine.host.thaws_at <= request.came_at:
            message = f"{request.name} waits in a room that is refused: {request.params}"
            raise BrokenRuleError("REFUSE", message)
        if not request.began_at or engine.host.thaws_at > request.began_at:
            return
        is_quick = (self.loop.now - request.began_at) * self._slowest <= QUICK_S
        if request.is_complete or not is_quick:
            message = f"{request.name} is read, whose handoff breaks its format: {request.params}"
            raise BrokenRuleError("REFUSE", message)

    def _engine_of(self, name: str) -> Engine:
        """Return the engine that a request comes to: half of them to a rival, while it lives."""
        engine = self._engines[name]
        rival = self._engines.get(name + ELSEWHERE, engine)
        if not rival.host.is_dead and self._random.random() < 0.5:
            engine = rival
        return engine

    def _request(
        self,
        name: str,
        tokens: tuple[int, ...],
        num_answer: int,
        tell: Callable[[Mapping[str, Any] | None, KVPlanError | None], None],
        facts: tuple[tuple[int, str], ...] = (),
    ) -> EngineRequest:
        """Return a request that tells its end, and is open until then."""

        def ended(answer: Mapping[str, Any] | None, error: KVPlanError | None) -> None:
            del self._open[name]
            self.ends["right" if error is None else error.code] += 1
            tell(answer, error)

        self._open[name] = self.loop.now + self._end_s
        return EngineRequest(name, [*tokens], num_answer, tell=ended, facts=facts)

    def _submit(self, engine: Engine, request: EngineRequest, patience_s: float | None) -> None:
        """Send a request to an engine."""
        if engine.host.is_dead:
            error = KVPlanError("PEER", "serve", expected="an engine that lives", got="a dead one")
            request.tell(None, error)
            return
        self._requests.append(request)
        # one that comes again under its name claims again
        self._refused = {
            (other, lease, reader)
            for other, lease, reader in self._refused
            if other is not engine or reader.rpartition(" ")[2] != request.name
        }
        if self._make_params is not None and not request.is_for_another:
            self._waits[request] = engine.host.monotonic(), 0.0
        engine.add(request)
        if patience_s is not None:
            self.loop.at(self.loop.now + patience_s, partial(engine.abort, request.name))

    def _probe(self) -> dict[str, KVPlanError | None]:
        """Send a request between any two engines. Return the errors, when they have ended."""
        errors = dict[str, KVPlanError | None]()

        def note(arrival: Arrival, error: KVPlanError | None) -> None:
            is_excused = self._is_slow(arrival) or (
                error and (self._is_unstorable(error) or self._has_short_wait(error))
            )
            errors[arrival.name] = None if is_excused else error

        living = [
            name
            for name, engine in self._engines.items()
            if not (engine.host.is_dead or engine.is_stopped)
        ]
        for prefill in living:
            for decode in living:
                if prefill.startswith("prefill") and decode.startswith("decode"):
                    name = f"request-{prefill}-{decode}"
                    number = 100 * (len(errors) + 1)
                    tokens = tuple(range(number, number + 11))
                    visits = (Visit(decode),)
                    arrival = Arrival(self.loop.now, name, tokens, 2, prefill, visits)
                    self._arrive(arrival, partial(note, arrival))
        return errors

    def _check_end(self) -> None:
        """Check what must hold when nothing is left to do."""
        for name, engine in self._engines.items():
            # its memory is gone
            if engine.host.is_dead:
                continue
            for pool in engine.pools.values():
                if pool.num_free < pool.num_blocks:
                    message = f"{name} has {pool.num_free} of {pool.num_blocks} blocks"
                    raise BrokenRuleError("FREE", message)
            if engine.num_unreleased:
                message = f"{name} has not released {engine.num_unreleased} transfers"
                raise BrokenRuleError("GROW", message)
            for older in engine.older_connections():
                message = f"{name} is connected to {older} of an earlier start"
                raise BrokenRuleError("GROW", message)
            for place in places_of("request-", engine.connector):
                raise BrokenRuleError("GROW", f"{name} remembers {place}")
        if self.loop.num_tasks:
            raise BrokenRuleError("GROW", f"{self.loop.num_tasks} coroutines still run")


_NOT_OF_A_CONNECTOR: Final = (
    Fabric,
    FunctionType,
    Host,
    Logger,
    MethodType,
    TransferPlan,
    VirtualCopier,
    VirtualExecutor,
    Worker,
    type,
)
"""What connectors refer to and do not own, or what has no parts."""


def places_of(text: str, root: object) -> Iterator[str]:
    """Yield what holds a string with some text, in all that can be reached from a connector."""
    seen = set[int]()
    ahead = [(type(root).__name__, root)]
    while ahead:
        place, value = ahead.pop()
        if isinstance(value, str):
            if text in value:
                yield f"{place}: {value}"
            continue
        # values may refer to each other in circles
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            for key, item in value.items():
                ahead += [(place, key), (place, item)]
        elif isinstance(value, list | tuple | set | frozenset):
            ahead += [(place, item) for item in value]
        elif isinstance(value, partial):
            ahead += [(place, item) for item in value.args]
        elif not isinstance(value, _NOT_OF_A_CONNECTOR):
            names = [*getattr(value, "__dict__", ())]
            for part in type(value).__mro__:
                names += getattr(part, "__slots__", ())
            ahead += [
                (f"{place}.{name}", getattr(value, name)) for name in names if hasattr(value, name)
            ]
