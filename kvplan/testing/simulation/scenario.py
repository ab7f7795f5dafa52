"""Scenarios, drawn from seeds: the engines of a fleet, the requests, and what goes wrong."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from kvplan.models import Model
from kvplan.protocol.claims import RENEW_S
from kvplan.protocol.leases import LEASE_S
from kvplan.protocol.system import ANSWER_S, RETRY_S
from kvplan.testing.simulation.catalog import MODELS, NO_STAGES, SHAPES, Shape, Stages
from kvplan.testing.simulation.fabric import Trouble
from kvplan.testing.simulation.features import NO_FEATURES, Feature
from kvplan.testing.simulation.network import Disturbance

HEALED_S: Final = 60.0
"""Seconds after which nothing goes wrong any more."""

MAX_TOKENS: Final = 40
"""Tokens of a prompt."""

MAX_ANSWER: Final = 8
"""Tokens of an answer."""

VOCABULARY: Final = 1000
"""Tokens to choose from."""

LATE_S: Final = 90.0
"""Seconds by which bytes are late in fleets that lose engines: longer than a reader waits."""

KEPT_S: Final = 100.0
"""Seconds for which decode keeps an answer that no request has read."""

MAX_TURN: Final = 4
"""Tokens of a next turn, and those of its answer."""

MAX_CROWDS: Final = 3
"""Requests of a fleet that have many readers, or that lose entries."""

SETTLE_S: Final = 5.0
"""Seconds of the slowest clock after a fault, from which on it excuses no failure."""

RUNNING_S: Final = 2.0
"""Seconds for which an update waits until an engine computes."""

PAGE_STOPS: Final = (4, 12, 20, 24)
"""Ends of a store's pages, whatever their size, where a prompt may go on as another one."""

BRIEF_S: Final = 4.0
"""Seconds for which the network may be disturbed without the end of a lease that is claimed."""

BREAKS: Final = "transfers that break"
REFUSES: Final = "transfers that cannot be posted"
SPOILS: Final = "transfers that bring wrong bytes"
SLOW: Final = "slow transfers"
FIRST_WEIGHTS: Final = "default"
"""The name that engines give to the weights with which they start."""

IN_PART: Final = ", in part"
"""The end of the name of weights of which a part is loaded."""

CONTENT: Final = ", content "
"""What follows the name of weights where others have the same name."""

WEIGHTS: Final = "other weights"
RESET: Final = "a reset of caches"
GARBLING: Final = "malformed answers"


def answer_to(tokens: Sequence[int], number: int) -> list[int]:
    """Return the first tokens of the answer to a prompt."""
    return [(7 * tokens[-1] + each) % 50_000 for each in range(number)]


@attrs.frozen
class Member:
    """An engine of a fleet: its shape, the blocks that it uses, and how fast its clock runs.

    With ``takes_newest`` it gives away first what was freed last. Its prefix cache is of no use
    for later requests if it ``forgets``.
    """

    name: str
    shape: Shape = SHAPES[0]
    num_blocks: int = 40
    rate: float = 1.0
    takes_newest: bool = False
    forgets: bool = False


@attrs.frozen
class Visit:
    """A computed request at an engine that reads it, ``delay_s`` after prefill has answered.

    Its client aborts it ``patience_s`` after that. A proxy may take it for a request of other
    ``tokens``, or of other ``facts``.
    """

    engine: str
    delay_s: float = 0.01
    patience_s: float | None = None
    tokens: tuple[int, ...] | None = None
    facts: tuple[tuple[int, str], ...] | None = None


@attrs.frozen
class Turn:
    """The next turn of a conversation, ``delay_s`` after its answer, with ``tokens`` after that.

    With ``is_rewritten`` the client has put another answer in place of the one that decode gave.
    """

    delay_s: float
    prefill: str
    tokens: tuple[int, ...]
    num_answer: int
    visit: Visit
    is_rewritten: bool = False


@attrs.frozen
class Arrival:
    """A request that comes to a prefill engine, and then to those that read it.

    Prefill generates ``num_generated`` tokens, and its client aborts it after ``patience_s``. Its
    ``turns`` follow each answer that is kept.
    A second ``attempt`` is another request of the same name, which comes when the engine has freed
    the blocks of the first one. A child comes with the parameters of the request ``child_of``.
    """

    at: float
    name: str
    tokens: tuple[int, ...]
    num_answer: int
    prefill: str
    visits: tuple[Visit, ...]
    patience_s: float | None = None
    facts: tuple[tuple[int, str], ...] = ()
    turns: tuple[Turn, ...] = ()
    attempt: int = 0
    child_of: str = ""
    num_generated: int = 1

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the engines that the request comes to."""
        later = [name for turn in self.turns for name in (turn.prefill, turn.visit.engine)]
        return (self.prefill, *(visit.engine for visit in self.visits), *later)

    def next_turn(self, now: float, answered: Sequence[int], number: int) -> Arrival:
        """Return the request of the first of the turns, after the tokens up to an answer."""
        turn, *turns = self.turns
        said = [*answered]
        if turn.is_rewritten:
            # one that was taken for another prompt may be shorter
            first = min(len(self.tokens), len(said) - 1)
            said[first] = (said[first] + 1) % VOCABULARY
        return attrs.evolve(
            self,
            at=now + turn.delay_s,
            name=f"{self.name}/{number}+",
            tokens=(*said, *turn.tokens),
            num_answer=turn.num_answer,
            prefill=turn.prefill,
            visits=(turn.visit,),
            patience_s=None,
            turns=tuple(turns),
            attempt=0,
            child_of="",
        )

    def excused(self, *, comes_to_both: bool) -> tuple[str, ...]:
        """Return the codes of errors with which the request may fail where nothing goes wrong.

        There is none if it is read once, soon, as what it is, and to its end. One that
        ``comes_to_both`` engines at once is read from a room.
        """
        is_other = any(visit.tokens is not None or visit.facts is not None for visit in self.visits)
        is_late = any(visit.delay_s > 1 or visit.patience_s is not None for visit in self.visits)
        codes = list[str]()
        # others may have another length
        if is_other:
            codes += ["PROMPT", "TOKENS"]
        if is_late or len(self.visits) > 1 or self.patience_s is not None:
            # the lease ends with the first reader, or before a late one comes
            codes.append("LEASE")
            # and a room has one reader, and nothing where a request is aborted
            codes += ["NAME", "PEER"] * comes_to_both
        return (*codes,)


@attrs.frozen
class EngineFault:
    """Something that goes wrong with one engine, from the time ``at``."""

    at: float
    engine: str

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the engine."""
        return (self.engine,)


@attrs.frozen
class Death(EngineFault):
    """An engine dies with its memory; another start of it begins, if at all, after a while."""

    restarts_at: float | None


@attrs.frozen
class Freeze(EngineFault):
    """A host does nothing between two times. Its memory can be read."""

    ends_at: float


@attrs.frozen
class Rival(EngineFault):
    """Somebody starts an engine again under its name, elsewhere, while it lives; later one ends.

    Meanwhile requests to the engine come to either of them.
    """

    ends_at: float


class CallKind(enum.Enum):
    """What an operator calls in a running engine."""

    CHANGE = "loads weights"
    FAILED_CHANGE = "loads weights, and fails when some workers have them"
    NAME = "names its weights"
    RESET = "resets its prefix cache, unless blocks are in use"
    FORCED_RESET = "resets its prefix cache, and aborts what uses it"


@attrs.frozen
class Call:
    """A call of an operator, so long after the first one of an update: with weights, or a name."""

    delay_s: float
    kind: CallKind
    text: str = ""

    def renamed(self, old: str, new: str) -> Call:
        """Return the call with another name of the weights."""
        return attrs.evolve(self, text=self.text.replace(old, new))


@attrs.frozen
class Update:
    """An operator resets the caches of all engines, the next one ``gap_s`` after the last.

    With a ``version`` they get weights of that name. What they compute is aborted then, and what
    others may read of it stays; a reset alone ends that. With ``keeps_running`` an update waits up
    to :data:`RUNNING_S` until an engine computes something, which goes on with the new weights.
    With ``calls`` it consists of these, and waits as long until a request is there; requests go on.
    """

    at: float
    gap_s: float
    version: str = ""
    keeps_running: bool = False
    calls: tuple[Call, ...] = ()

    @property
    def engines(self) -> tuple[str, ...]:
        """Return no engine: one may be left out."""
        return ()

    def with_own_name(self) -> Update:
        """Return the update with a version that no other one has."""
        own = f" of {self.at:.4f}"
        if self.version.endswith(own):
            return self
        version = f"{self.version}{own}"
        calls = tuple(call.renamed(self.version, version) for call in self.calls)
        return attrs.evolve(self, version=version, calls=calls)


@attrs.frozen
class Overwrite:
    """Somebody writes other content into the folder of an adapter, under its name.

    With ``reloads`` engines that have loaded the adapter load it again at once.
    """

    at: float
    adapter: str
    reloads: bool = False

    @property
    def engines(self) -> tuple[str, ...]:
        """Return no engine: one may be left out."""
        return ()


@attrs.frozen
class StoreTrouble:
    """What calls of a store suffer between two times: they take up to ``delay_s`` longer.

    They fail, and moves between pages and blocks do, with the probability ``fails``, and files are
    written damaged with ``damages``. Moves take up to ``move_s`` longer, where the engine is busy.
    """

    begins_at: float
    ends_at: float
    delay_s: float = 0.0
    fails: float = 0.0
    damages: float = 0.0
    move_s: float = 0.0

    @property
    def engines(self) -> tuple[str, ...]:
        """Return no engine: one may be left out."""
        return ()


_LOSSES: Final = (Death, Freeze, Rival, Disturbance, GARBLING)

EXCUSES: Final[Mapping[str, tuple[type | str, ...]]] = MappingProxyType(
    {
        # engines are lost, or their messages
        "LEASE": (*_LOSSES, WEIGHTS, RESET),
        # what readers wait for is aborted, and the digests of an ended lease are refused
        "PEER": (*_LOSSES, BREAKS, WEIGHTS, RESET),
        # another start takes the connection
        "TRANSFER": (Death, Rival, BREAKS, REFUSES, SPOILS),
        "MODEL": (WEIGHTS,),
        # engines have loaded an adapter before and after
        "PROMPT": (Overwrite,),
        # a server that has started again has lost what it had
        "MESSAGE": (Death, GARBLING),
        # an answer may lack the offer of a worker
        "COVER": (GARBLING,),
        "TENSOR": (GARBLING,),
        # nor have its digests the form that they should have
        **dict.fromkeys(("KEY", "RANGE", "SIZE", "TYPE"), (GARBLING,)),
    }
)
"""What may be why a request fails with a code: incidents of a class, or of one kind of a class.

Nothing explains a code that is missing, such as what is wrong with block tables. Slow transfers and
a store explain nothing."""

Incident = (
    Arrival | Death | Freeze | Rival | Update | Overwrite | Disturbance | Trouble | StoreTrouble
)
"""Something that a scenario may do without: a failure is shrunk by leaving incidents out."""


@attrs.frozen
class Scenario:
    """The engines of a fleet and all that happens to them, in an order that the seed decides."""

    seed: int
    members: tuple[Member, ...]
    incidents: tuple[Incident, ...]
    features: Feature = NO_FEATURES

    def may_fail(self, code: str, since: float = 0.0, now: float = math.inf) -> bool:
        """Return whether what goes wrong excuses that a request fails with the code of an error.

        It came at ``since`` and fails ``now``: a fault that comes later or has long ended is no
        excuse. A network that is disturbed for a moment excuses no lease that ends, unless clocks
        are so far apart that renewals are too few. :data:`EXCUSES` has the others.
        """
        settle_s = SETTLE_S / min((member.rate for member in self.members), default=1.0)
        return any(
            began_at <= now and ended_at + settle_s >= since
            for incident in self.incidents
            if self._explains(incident, code)
            for began_at, ended_at in [self._span(incident)]
        )

    def _explains(self, incident: Incident, code: str) -> bool:
        """Return whether what goes wrong may be why a request fails with a code."""
        kind: type | str = type(incident)
        if isinstance(incident, Trouble):
            kind = BREAKS if incident.breaks else REFUSES if incident.refuses else SLOW
            kind = SPOILS if incident.spoils else kind
        elif isinstance(incident, Update):
            kind = WEIGHTS if incident.version else RESET
        elif isinstance(incident, Disturbance):
            is_brief = incident.ends_at - incident.begins_at <= BRIEF_S
            if code == "LEASE" and is_brief and self._are_renewals_enough:
                return False
            # what prefill has not told itself it tells again
            if is_brief and incident.source == incident.target != "*":
                return False
            kind = GARBLING if incident.garbling else Disturbance
        return kind in EXCUSES.get(code, ())

    def _span(self, incident: Incident) -> tuple[float, float]:
        """Return when an incident begins, and when the last that it does has come."""
        if isinstance(incident, Death):
            return incident.at, math.inf if incident.restarts_at is None else incident.restarts_at
        if isinstance(incident, Overwrite):
            return incident.at, math.inf
        if isinstance(incident, Update):
            wait_s = RUNNING_S * (incident.keeps_running or bool(incident.calls))
            wait_s += max((call.delay_s for call in incident.calls), default=0.0)
            return incident.at, incident.at + incident.gap_s * len(self.members) + wait_s
        if isinstance(incident, Freeze | Rival):
            return incident.at, incident.ends_at
        if isinstance(incident, Disturbance | Trouble):
            # what begins in that time comes so much later
            return incident.begins_at, incident.ends_at + incident.delay_s
        return _begin_of(incident), _begin_of(incident)

    @property
    def _are_renewals_enough(self) -> bool:
        """Return whether a claim is renewed in time though one renewal is lost for a moment."""
        rates = [member.rate for member in self.members] or [1.0]
        # by the fastest clock: the slowest one renews, waits for an answer, and tries again
        longest_s = (RENEW_S + ANSWER_S + RETRY_S) / min(rates) * max(rates)
        return longest_s + BRIEF_S * max(rates) < LEASE_S

    def is_disturbed(self, begins_at: float, ends_at: float) -> bool:
        """Return whether messages may be lost or late between two times."""
        return any(
            start <= ends_at and stop > begins_at
            for incident in self.incidents
            if isinstance(incident, Disturbance)
            for start, stop in [self._span(incident)]
        )

    def is_quiet(self, begins_at: float, ends_at: float) -> bool:
        """Return whether nothing goes wrong between two times, but that transfers are slow."""
        return not any(
            start <= ends_at and stop > begins_at
            for incident in self.incidents
            for start, stop in _disturbed(incident)
        )

    def is_slow(self, engine: str, begins_at: float, ends_at: float) -> bool:
        """Return whether transfers from an engine may be slow that begin between two times."""
        return any(
            item.begins_at <= ends_at and item.ends_at > begins_at
            for item in self.incidents
            if isinstance(item, Trouble) and item.source in ("*", engine)
        )

    def has_rivals_alone(self, until_s: float) -> bool:
        """Return whether nothing has gone wrong until a time but engines started twice."""
        return not any(
            start <= until_s
            for incident in self.incidents
            if not isinstance(incident, Rival)
            for start, _ in _disturbed(incident)
        )

    def mentions(self, engine: str) -> bool:
        """Return whether an incident is of an engine."""
        return any(engine in incident.engines for incident in self.incidents)

    @classmethod
    def of(
        cls,
        seed: int,
        model: Model = MODELS["attention"],
        stages: Stages = NO_STAGES,
        decode_stages: Stages = NO_STAGES,
        features: Feature = NO_FEATURES,
    ) -> Scenario:
        """Draw a scenario, whose engines run a model, those of prefill in pipeline ``stages``."""
        scenario = _Draw(seed, model, stages, decode_stages).scenario()
        return _with_features(scenario, features)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.features}", *map(str, self.members)]
        lines += map(str, sorted(self.incidents, key=_begin_of))
        return "\n".join(lines)


def _disturbed(incident: Incident) -> Iterator[tuple[float, float]]:
    """Yield the time in which an incident may keep engines from what they do, if it does."""
    if isinstance(incident, Death):
        yield incident.at, max(incident.at, incident.restarts_at or 0.0)
    elif isinstance(incident, Freeze | Rival):
        yield incident.at, incident.ends_at
    elif isinstance(incident, Update):
        yield incident.at, HEALED_S
    elif isinstance(incident, Disturbance | StoreTrouble) or (
        isinstance(incident, Trouble) and (incident.breaks or incident.refuses or incident.spoils)
    ):
        yield incident.begins_at, incident.ends_at


def _begin_of(incident: Incident) -> float:
    if isinstance(incident, Disturbance | Trouble | StoreTrouble):
        return incident.begins_at
    return incident.at


def _with_features(scenario: Scenario, features: Feature) -> Scenario:
    """Change the requests of a scenario as its features say, and add what goes wrong."""
    scenario = attrs.evolve(scenario, features=features)
    for feature, change in _CHANGES.items():
        if feature in features:
            scenario = change(scenario, random.Random(f"{scenario.seed} {feature.name}"))
    return scenario


def _arrivals(
    change: Callable[[list[Arrival], random.Random], list[Arrival]],
) -> Callable[[Scenario, random.Random], Scenario]:
    """Return what changes the requests of a scenario."""

    def change_all(scenario: Scenario, draw: random.Random) -> Scenario:
        arrivals = [item for item in scenario.incidents if isinstance(item, Arrival)]
        others = [item for item in scenario.incidents if not isinstance(item, Arrival)]
        return attrs.evolve(scenario, incidents=(*change(arrivals, draw), *others))

    return change_all


def _in_bursts(arrivals: list[Arrival], draw: random.Random) -> list[Arrival]:
    """Let most requests come when another one has just come to their engine, which may be new."""
    times = list[tuple[float, str]]()
    for arrival in arrivals:
        if not times or draw.random() < 0.25:
            times.append((arrival.at, arrival.prefill))
    bursts = []
    for arrival in arrivals:
        at, prefill = draw.choice(times)
        at += draw.choice((0.0, 0.05, 0.05, 1.0)) * draw.random()
        bursts.append(attrs.evolve(arrival, at=min(at, HEALED_S - 1), prefill=prefill))
    return bursts


def _near(arrivals: list[Arrival], draw: random.Random) -> list[Arrival]:
    """Let prompts differ in one token from others, and from those that proxies take them for."""
    near = list[Arrival]()
    for arrival in arrivals:
        tokens = arrival.tokens
        if near and draw.random() < 0.5:
            tokens = _with_another_token(draw.choice(near).tokens, draw)
        visits = [
            attrs.evolve(visit, tokens=_with_another_token(tokens, draw))
            if draw.random() < 0.25
            else visit
            for visit in arrival.visits
        ]
        near.append(attrs.evolve(arrival, tokens=tokens, visits=tuple(visits)))
    return near


def _with_another_token(tokens: tuple[int, ...], draw: random.Random) -> tuple[int, ...]:
    """Return tokens of which one is another one, or of which the first one alone is the same."""
    if draw.random() < 0.2:
        return (tokens[0], *(draw.randrange(VOCABULARY) for _ in tokens[1:]))
    index = draw.choice((0, len(tokens) - 1, draw.randrange(len(tokens))))
    return (*tokens[:index], (tokens[index] + 1) % VOCABULARY, *tokens[index + 1 :])


def _with_facts(arrivals: list[Arrival], draw: random.Random) -> list[Arrival]:
    """Give requests a few facts, and take some for requests that lack one, or have another one."""
    changed = []
    for arrival in arrivals:
        facts = _facts(len(arrival.tokens), draw)
        visits = []
        for visit in arrival.visits:
            if draw.random() < 0.3:
                others = _facts(len(arrival.tokens), draw)
                if facts and draw.random() < 0.7:
                    others = _with_another_fact(facts, draw)
                visit = attrs.evolve(visit, facts=others)
            visits.append(visit)
        changed.append(attrs.evolve(arrival, facts=facts, visits=tuple(visits)))
    return changed


def _with_another_fact(
    facts: Sequence[tuple[int, str]], draw: random.Random
) -> tuple[tuple[int, str], ...]:
    """Return the facts without one of them, or with another one in its place."""
    index = draw.randrange(len(facts))
    at, fact = facts[index]
    moved = at + 1 if fact.startswith("image") else at
    changes = draw.choice(((), ((at, f"{fact}, changed"),), ((moved, fact),)))
    return (*facts[:index], *changes, *facts[index + 1 :])


def _facts(num_tokens: int, draw: random.Random) -> tuple[tuple[int, str], ...]:
    facts = [(0, f"{kind} {draw.choice('ab')}") for kind in ("salt", "adapter")]
    facts.append((draw.randrange(num_tokens), f"image {draw.choice('ab')}"))
    return tuple(fact for fact in facts if draw.random() < 0.5)


def _with_adapters(scenario: Scenario, draw: random.Random) -> Scenario:
    """Give most requests an adapter, and overwrite some when requests are there that have it."""
    incidents = [*scenario.incidents]
    overwrites = list[Overwrite]()
    for index, incident in enumerate(scenario.incidents):
        if not isinstance(incident, Arrival) or draw.random() < 0.2:
            continue
        adapter = f"adapter {draw.choice('ab')}"
        others = tuple(fact for fact in incident.facts if not fact[1].startswith("adapter"))
        visits = [attrs.evolve(visit, facts=None) for visit in incident.visits]
        facts = ((0, adapter), *others)
        incidents[index] = attrs.evolve(incident, facts=facts, visits=tuple(visits))
        if draw.random() < 0.4:
            at = incident.at + draw.choice((0.02, 0.2, 2.0)) * draw.random()
            overwrites.append(Overwrite(min(at, HEALED_S - 1), adapter, draw.random() < 0.3))
    return attrs.evolve(scenario, incidents=(*incidents, *overwrites))


def _with_broken_transfers(scenario: Scenario, draw: random.Random) -> Scenario:
    begins_at = HEALED_S / 2 * draw.random()
    ends_at = begins_at + 20.0
    trouble = Trouble(begins_at, ends_at, "*", chance=0.5, delay_s=20.0, breaks=True)
    return attrs.evolve(scenario, incidents=(*scenario.incidents, trouble))


def _with_refused_slices(scenario: Scenario, draw: random.Random) -> Scenario:
    begins_at = HEALED_S / 2 * draw.random()
    trouble = Trouble(begins_at, begins_at + 20.0, "*", chance=0.0, refuses=0.05)
    return attrs.evolve(scenario, incidents=(*scenario.incidents, trouble))


def _with_wrong_bytes(scenario: Scenario, draw: random.Random) -> Scenario:
    begins_at = HEALED_S / 2 * draw.random()
    trouble = Trouble(begins_at, begins_at + 20.0, "*", chance=0.0, spoils=0.3)
    return attrs.evolve(scenario, incidents=(*scenario.incidents, trouble))


def _with_garbled_answers(scenario: Scenario, draw: random.Random) -> Scenario:
    begins_at = HEALED_S / 2 * draw.random()
    garbling = Disturbance(begins_at, begins_at + 10.0, "*", "*", garbling=0.3)
    return attrs.evolve(scenario, incidents=(*scenario.incidents, garbling))


def _with_lost_engines(scenario: Scenario, draw: random.Random) -> Scenario:
    """Add engines up to two of each, let requests come to all, and let one of each die."""
    members = [*scenario.members]
    deaths = []
    names = dict[str, list[str]]()
    for role in ("prefill", "decode"):
        ours = [member for member in members if member.name.startswith(role)]
        if len(ours) == 1:
            twin = attrs.evolve(ours[0], name=f"{role}-1")
            members.append(twin)
            ours.append(twin)
        names[role] = [member.name for member in ours]
        deaths.append(Death(HEALED_S / 2 * draw.random(), draw.choice(names[role]), None))
    incidents = list[Incident]()
    for incident in scenario.incidents:
        if isinstance(incident, Arrival):
            visits = [
                attrs.evolve(visit, engine=draw.choice(names["decode"]))
                for visit in incident.visits
            ]
            prefill = draw.choice(names["prefill"])
            incidents.append(attrs.evolve(incident, prefill=prefill, visits=tuple(visits)))
        else:
            incidents.append(incident)
    # bytes of an engine that is gone may land late
    slowness = Trouble(0.0, HEALED_S, "*", chance=0.5, delay_s=LATE_S)
    changed: tuple[Incident, ...] = (*incidents, *deaths, slowness)
    # in half the fleets, answers about the leases of reads under way are late or lost
    if draw.random() < 0.5:
        begins_at = HEALED_S / 2 * draw.random()
        changed += (Disturbance(begins_at, HEALED_S, "*", "*", loss=0.2, delay_s=3.0),)
    return attrs.evolve(scenario, members=tuple(members), incidents=changed)


def _with_turns(scenario: Scenario, draw: random.Random) -> Scenario:
    """Give most requests a next turn or two, for all of which an engine has room."""
    names = {
        role: [member.name for member in scenario.members if member.name.startswith(role)]
        for role in ("prefill", "decode")
    }

    def turn() -> Turn:
        delay_s = draw.choice((0.01, 1.0, 20.0, KEPT_S)) * draw.random()
        tokens = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, MAX_TURN))]
        visit = Visit(draw.choice(names["decode"]))
        num_answer = draw.randint(1, MAX_TURN)
        is_rewritten = draw.random() < 0.25
        prefill = draw.choice(names["prefill"])
        return Turn(delay_s, prefill, tuple(tokens), num_answer, visit, is_rewritten)

    incidents = list[Incident]()
    for incident in scenario.incidents:
        if isinstance(incident, Arrival) and draw.random() < 0.7:
            num_turns = draw.choice((1, 1, 2))
            num_tokens = MAX_TOKENS - MAX_ANSWER - 2 * MAX_TURN * num_turns
            visits = [attrs.evolve(visit, tokens=None) for visit in incident.visits]
            incident = attrs.evolve(
                incident,
                tokens=incident.tokens[:num_tokens],
                visits=tuple(visits),
                turns=tuple(turn() for _ in range(num_turns)),
            )
        incidents.append(incident)
    return attrs.evolve(scenario, incidents=tuple(incidents))


def _with_repeats(arrivals: list[Arrival], draw: random.Random) -> list[Arrival]:
    """Let other requests come under the names of some, and let some read late what came first."""
    repeated = list[Arrival]()
    for arrival in arrivals:
        repeated.append(arrival)
        if arrival.visits and draw.random() < 0.5:
            # soon after the first lease has ended, while readers of it may come
            late = attrs.evolve(arrival.visits[0], delay_s=35 + 10 * draw.random(), tokens=None)
            repeated[-1] = attrs.evolve(arrival, visits=(*arrival.visits, late))
            tokens = tuple(draw.randrange(VOCABULARY) for _ in arrival.tokens)
            at = min(arrival.at + 1 + draw.random(), HEALED_S - 1)
            again = attrs.evolve(arrival, at=at, tokens=tokens, turns=(), attempt=1)
            repeated.append(again)
    return repeated


def _with_children(arrivals: list[Arrival], draw: random.Random) -> list[Arrival]:
    """Give some requests one or two children, of which each wants an answer of its own."""
    families = list[Arrival]()
    for arrival in arrivals:
        families.append(arrival)
        if arrival.attempt or draw.random() < 0.5:
            continue
        for number in range(draw.choice((1, 2))):
            at = min(arrival.at + draw.choice((0.0, 0.0, 0.05)) * draw.random(), HEALED_S - 1)
            name = f"{arrival.name}-{number}"
            num_answer = draw.randint(1, arrival.num_answer)
            child = attrs.evolve(
                arrival, at=at, name=name, num_answer=num_answer, turns=(), child_of=arrival.name
            )
            families.append(child)
    return families


def _with_long_prefills(arrivals: list[Arrival], draw: random.Random) -> list[Arrival]:
    """Let prefill generate more than one token for most requests."""
    return [
        attrs.evolve(arrival, num_generated=draw.choice((1, 2, MAX_ANSWER))) for arrival in arrivals
    ]


def _with_hangups(arrivals: list[Arrival], draw: random.Random) -> list[Arrival]:
    """Let half of all requests be aborted, almost at once in prefill and where they are read."""
    changed = list[Arrival]()
    for arrival in arrivals:
        if draw.random() < 0.5:
            patience_s = draw.choice((0.02, 0.1, 1.0)) * draw.random()
            visits = [
                attrs.evolve(visit, delay_s=0.0, patience_s=patience_s) for visit in arrival.visits
            ]
            patience_s += draw.choice((0.005, 0.1)) * draw.random()
            arrival = attrs.evolve(arrival, visits=tuple(visits), patience_s=patience_s)
        changed.append(arrival)
    return changed


def _with_rivals(scenario: Scenario, draw: random.Random) -> Scenario:
    """Start prefill engines twice when a request comes, in place of all that goes wrong."""
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival)]
    rivals = []
    for name in sorted({arrival.prefill for arrival in arrivals}):
        first = min(arrival.at for arrival in arrivals if arrival.prefill == name)
        at = max(0.0, first - draw.random())
        rivals.append(Rival(at, name, at + (HEALED_S - at) * draw.random()))
    return attrs.evolve(scenario, incidents=(*arrivals, *rivals))


def _with_updates(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let two or three updates begin when requests are there, and end before all faults do.

    None begins before another one has ended: engines would end with different weights.
    """
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival)]
    updates = []
    times = list[tuple[float, float]]()
    for number in range(draw.choice((2, 3)) if arrivals else 0):
        at = draw.choice(arrivals).at + draw.choice((0.02, 1.0, 10.0)) * draw.random()
        gap_s = draw.choice((0.01, 1.0)) * draw.random()
        version = draw.choice(("", f"version {number}"))
        ends_at = at + gap_s * len(scenario.members)
        is_alone = all(ends_at < begins or at > ends for begins, ends in times)
        if ends_at < HEALED_S and is_alone:
            updates.append(Update(at, gap_s, version))
            times.append((at, ends_at))
    return attrs.evolve(scenario, incidents=(*scenario.incidents, *updates))


def _with_live_updates(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let weights change under requests, one update after the other."""
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival)]
    updates = list[Update]()
    times = [scenario._span(item) for item in scenario.incidents if isinstance(item, Update)]
    groups = [group for member in scenario.members for group in member.shape.groups]
    # what drafts cache is also of the token that comes next, maybe by other weights
    has_drafts = any(group.num_ahead for group in groups)
    for number in range(draw.choice((2, 3, 4)) if arrivals and not has_drafts else 0):
        # others, and back again
        versions = [f"live version {number}", *(update.version for update in updates[-1:])]
        version = draw.choice(versions)
        at = draw.choice(arrivals).at + draw.choice((0.0, 0.0, 1.0)) * draw.random()
        gap_s = draw.choice((0.0, 0.01, 2.0)) * draw.random()
        update = Update(at, gap_s, version, calls=_calls(version, draw))
        begins, ends = scenario._span(update)
        is_alone = all(ends < start or begins > stop for start, stop in times)
        if ends < HEALED_S and is_alone:
            updates.append(update)
            times.append((begins, ends))
    prompts = list[Arrival]()
    for number, update in enumerate(updates):
        arrival = draw.choice([each for each in arrivals if each.visits] or arrivals)
        # of old weights in prefill's cache alone, and again with other ones
        tokens = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(20, MAX_TOKENS - 2)))
        first = attrs.evolve(
            arrival, at=update.at, name=f"request-l{number}", tokens=tokens, turns=(), child_of=""
        )
        prompts.append(attrs.evolve(first, visits=()))
        names = [call for call in update.calls if call.kind is CallKind.NAME]
        for later in range(draw.choice((2, 3))):
            # while the weights have one of their names, in prefill alone or in decode too
            at = update.at + draw.choice(names).delay_s + draw.choice((0.1, 1.0)) * draw.random()
            visits = tuple(
                attrs.evolve(
                    visit,
                    tokens=None,
                    delay_s=draw.choice((0.0, 1.0, 4.0)) * draw.random(),
                    patience_s=None,
                )
                for visit in arrival.visits[:1]
            )
            again = attrs.evolve(first, at=at, name=f"{first.name}-{later}", visits=visits)
            prompts.append(again)
    return attrs.evolve(scenario, incidents=(*scenario.incidents, *prompts, *updates))


def _calls(version: str, draw: random.Random) -> tuple[Call, ...]:
    """Draw the calls of an update: parts of weights, then names and resets, the right name last."""
    first = draw.choice((None, CallKind.CHANGE, CallKind.FAILED_CHANGE))
    changes = [(first, f"{version}{IN_PART}")] if first else []
    changes.append((CallKind.CHANGE, version))
    names = [(CallKind.NAME, FIRST_WEIGHTS), (CallKind.NAME, version)]
    calls = [*changes, *names[draw.choice((0, 1)) :]]
    for _ in range(draw.choice((0, 1, 1, 2))):
        calls.insert(draw.randint(1, len(calls) - 1), (CallKind.RESET, ""))
    at, drawn = 0.0, list[Call]()
    for kind, text in (*calls, (CallKind.FORCED_RESET, "")):
        drawn.append(Call(at, kind, text))
        at += draw.choice((0.0, 0.01, 0.01, 2.0)) * draw.random()
        # requests come meanwhile
        at += 2.0 * draw.random() if kind is CallKind.NAME else 0.0
    *_, last_name, forced = drawn
    # one that is refused, after which requests find old blocks with weights of the right name
    late = random.Random(f"{version} {forced.delay_s}")
    if late.random() < 0.5:
        wait_s = 0.5 * late.random() * (forced.delay_s - last_name.delay_s)
        drawn.insert(-1, Call(last_name.delay_s + wait_s, CallKind.RESET))
    return tuple(drawn)


def _with_names_again(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let weights have names, and adapters ids, that others had before."""
    if Feature.LIVE_UPDATES in scenario.features:
        scenario = _with_renamed_weights(scenario, draw)
    if Feature.ADAPTERS in scenario.features:
        scenario = _with_renewed_adapters(scenario, draw)
    return scenario


def _with_renewed_adapters(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let prompts come again when their adapter was overwritten, and is loaded again if unused."""
    prefills, decodes = _names_of(scenario.members)
    incidents = list[Incident]()
    for number in range(draw.choice((1, 2, 3))):
        adapter = f"adapter of {number}"
        at = 2.0 + (HEALED_S - 12.0) * draw.random()
        incidents.append(Overwrite(at, adapter, reloads=True))
        tokens = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(20, MAX_TOKENS - 2)))
        prefill = draw.choice(prefills)
        times = [at - 2.0 * draw.random(), *(at + 2.5 + 5.0 * draw.random() for _ in range(2))]
        for which, comes_at in enumerate(times):
            visits = (Visit(draw.choice(decodes), 0.1 * draw.random()),)
            name = f"request-a{number}-{which}"
            facts = ((0, adapter),)
            incidents.append(Arrival(comes_at, name, tokens, 1, prefill, visits, facts=facts))
    return attrs.evolve(scenario, incidents=(*scenario.incidents, *incidents))


def _names_of(members: Sequence[Member]) -> tuple[list[str], list[str]]:
    """Return the names of prefill and of decode engines."""
    names = [member.name for member in members]
    prefills = [name for name in names if name.startswith("prefill")]
    return prefills, [name for name in names if name not in prefills]


def _with_renamed_weights(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let an update first load other weights, twice under one name or under that of the start.

    Engines have them some seconds after each other, and requests come meanwhile. It comes before
    others, in most fleets when engines are idle, which can reset their caches then.
    """
    at = draw.choice((0.1, 0.1, 10.0)) * draw.random()
    version = f"renamed version of {at:.4f}"
    early = f"early {version}"
    gap_s = 0.5 + draw.choice((0.5, 1.5)) * draw.random()
    names, lasts_s = draw.choice(
        (
            *[((early, early), gap_s * len(scenario.members))] * 3,
            # while others have the first weights
            ((early, FIRST_WEIGHTS), 0.2),
            ((FIRST_WEIGHTS,), gap_s),
        )
    )
    calls, delay_s = list[Call](), 0.0
    for number, name in enumerate(names):
        others = [(CallKind.NAME, name), (draw.choice((CallKind.RESET, CallKind.FORCED_RESET)), "")]
        draw.shuffle(others)
        for kind, text in ((CallKind.CHANGE, f"{name}{CONTENT}{number} of {at:.4f}"), *others):
            calls.append(Call(delay_s, kind, text))
            delay_s += draw.choice((0.0, 0.0, 0.5)) * draw.random()
        delay_s += lasts_s
    # the last ones in all engines
    delay_s = max(delay_s, calls[-1].delay_s + gap_s)
    prompts = _prompts_after(calls, at, gap_s, scenario.members, draw)
    calls += [attrs.evolve(call, delay_s=call.delay_s + delay_s) for call in _calls(version, draw)]
    update = Update(at, gap_s, version, calls=tuple(calls))
    begins, ends = scenario._span(update)
    incidents = list[Incident]()
    for item in scenario.incidents:
        if isinstance(item, Arrival):
            until = at + delay_s
            item = attrs.evolve(item, at=until + item.at * (1.0 - until / HEALED_S))
        if isinstance(item, Update) and _overlap((begins, ends), scenario._span(item)):
            continue
        incidents.append(item)
    return attrs.evolve(scenario, incidents=(*incidents, *prompts, update))


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _prompts_after(
    calls: Sequence[Call],
    since: float,
    gap_s: float,
    members: Sequence[Member],
    draw: random.Random,
) -> list[Arrival]:
    """Return requests that come after the last of some calls, ``gap_s`` after it at most.

    Prefill engines are called ``gap_s`` after each other, and those that read them later.
    """
    names = [member.name for member in members]
    prefills, decodes = _names_of(members)
    tokens = [draw.randrange(VOCABULARY) for _ in range(MAX_TOKENS)]
    prompts = []
    for number in range(draw.choice((4, 6, 8))):
        prefill = draw.choice(prefills)
        call, late_s = calls[-1], gap_s
        if draw.random() < 0.1:
            # it is computed when the first call comes
            call, late_s = calls[0], -0.1
        at = since + names.index(prefill) * gap_s + call.delay_s + late_s * draw.random()
        at = max(0.0, at)
        if draw.random() < 0.5:
            tokens = [draw.randrange(VOCABULARY) for _ in tokens]
        stop = draw.randint(20, MAX_TOKENS - 2)
        visit = Visit(draw.choice(decodes), 0.1 * draw.random())
        name = f"request-n{number}"
        prompts.append(Arrival(at, name, (*tokens[:stop],), 1, prefill, (visit,)))
    return prompts


def _with_restarts(scenario: Scenario, draw: random.Random) -> Scenario:
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival)]
    deaths = []
    for _ in range(3 if arrivals else 0):
        arrival = draw.choice(arrivals)
        at = arrival.at + draw.choice((0.01, 0.05, 0.2)) * draw.random()
        if at < HEALED_S - 1:
            deaths.append(Death(at, draw.choice(arrival.engines), at + 0.05 * draw.random()))
    # and again, when requests have waited for long that the first death has lost
    for death in deaths[:2]:
        at = death.at + 12 + 8 * draw.random()
        if at < HEALED_S - 1:
            deaths.append(Death(at, death.engine, at + 0.05 * draw.random()))
    return attrs.evolve(scenario, incidents=(*scenario.incidents, *deaths))


def _in_prefill_alone(arrival: Arrival) -> Arrival:
    """Return the request as one that nobody reads or aborts."""
    return attrs.evolve(arrival, visits=(), patience_s=None, turns=(), child_of="")


def _with_popular_prompts(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let most requests begin as one of two prompts, in engines that forget all others.

    Many come to prefill alone, and most have a page's end or one more token: there states are kept.
    """
    members = tuple(attrs.evolve(member, forgets=True) for member in scenario.members)
    names = [member.name for member in members if member.name.startswith("prefill")]
    has_facts = Feature.FACTS in scenario.features
    prompts = []
    for _ in range(2):
        tokens = [draw.randrange(VOCABULARY) for _ in range(MAX_TOKENS)]
        prompts.append((tokens, _facts(min(PAGE_STOPS), draw) if has_facts else ()))

    def popular(arrival: Arrival) -> Arrival:
        tokens, facts = draw.choice(prompts)
        stop = draw.choice((*PAGE_STOPS, draw.randint(min(PAGE_STOPS), MAX_TOKENS - 2)))
        ending = [draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 1, 1, 2)))]
        return attrs.evolve(arrival, tokens=(*tokens[:stop], *ending), facts=facts, turns=())

    incidents = list[Incident]()
    for incident in scenario.incidents:
        if isinstance(incident, Arrival) and not incident.child_of and draw.random() < 0.7:
            incident = popular(incident)
        incidents.append(incident)
    arrivals = [item for item in incidents if isinstance(item, Arrival)]
    for number in range(20 if arrivals else 0):
        later = attrs.evolve(
            _in_prefill_alone(popular(draw.choice(arrivals))),
            at=HEALED_S / 2 * draw.random(),
            name=f"request-f{number}",
            prefill=draw.choice(names),
        )
        incidents.append(later)
    return attrs.evolve(scenario, members=members, incidents=tuple(incidents))


def _with_store(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let prompts come again, with other ends and to other engines, and the store have troubles."""
    kinds = ({"delay_s": 1.0}, {"delay_s": 30.0}, {"fails": 0.2}, {"damages": 0.5})
    troubles = []
    for _ in range(draw.choice((0, 1, 2, 3))):
        begins_at = HEALED_S / 2 * draw.random()
        ends_at = begins_at + 15 * draw.random()
        troubles.append(StoreTrouble(begins_at, ends_at, **draw.choice(kinds)))
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival)]
    names = [member.name for member in scenario.members if member.name.startswith("prefill")]
    again = []
    for number in range(draw.randint(4, 12) if arrivals else 0):
        first = draw.choice(arrivals)
        num_shared = draw.randint(len(first.tokens) // 2, len(first.tokens))
        ending = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 8))]
        at = first.at + draw.choice((0.1, 2.0, 20.0)) * draw.random()
        if troubles and draw.random() < 0.5:
            trouble = draw.choice(troubles)
            at = trouble.begins_at + (trouble.ends_at - trouble.begins_at) * draw.random()
        later = attrs.evolve(
            first,
            at=min(at, HEALED_S - 1),
            name=f"request-s{number}",
            tokens=(*first.tokens[:num_shared], *ending)[:MAX_TOKENS],
            prefill=draw.choice(names),
            visits=tuple(attrs.evolve(visit, tokens=None) for visit in first.visits),
            turns=(),
            child_of="",
        )
        again.append(later)
    changed = attrs.evolve(scenario, incidents=(*scenario.incidents, *again, *troubles))
    changed = _with_store_hazards(changed, random.Random(f"{scenario.seed} store hazards"))
    changed = _with_next_prompts(changed, random.Random(f"{scenario.seed} next prompts"))
    changed = _with_whole_pages(changed, random.Random(f"{scenario.seed} whole pages"))
    return _with_other_facts(changed, random.Random(f"{scenario.seed} other facts"))


def _with_other_facts(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let prompts come again with another image, adapter or salt, or without one of them.

    They come to engines that have forgotten the first ones, whose pages the store has.
    """
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival) and item.facts]
    prefills = [each for each in scenario.members if each.name.startswith("prefill")]
    names = [each.name for each in prefills if each.forgets] or [prefills[0].name]
    prompts = list[Arrival]()
    for number, arrival in enumerate(draw.sample(arrivals, min(6, len(arrivals)))):
        later = attrs.evolve(
            _in_prefill_alone(arrival),
            at=min(arrival.at + draw.choice((2.0, 10.0)) * (0.5 + draw.random()), HEALED_S - 1),
            name=f"request-o{number}",
            # the image, if there is one
            facts=(*arrival.facts[:-1], *_with_another_fact(arrival.facts[-1:], draw)),
            prefill=draw.choice(names),
        )
        prompts.append(later)
    return attrs.evolve(scenario, incidents=(*scenario.incidents, *prompts))


def _with_next_prompts(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let prompts go on where an answer has ended, at engines that have forgotten what was before.

    What prefill or decode has computed then often ends with a page, or one position before or
    after its end.
    """
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival)]
    members = [
        attrs.evolve(member, forgets=draw.random() < 0.5 or member.forgets)
        for member in scenario.members
    ]
    others = [member.name for member in members if member.forgets] or [members[0].name]
    prompts = list[Arrival]()
    for number in range(draw.choice((2, 3, 4)) if arrivals else 0):
        arrival = draw.choice(arrivals)
        num_answer = draw.randint(1, MAX_TURN)
        stop = draw.choice(PAGE_STOPS) + draw.choice((0, 1, -num_answer, 1 - num_answer))
        tokens = [*arrival.tokens, *(draw.randrange(VOCABULARY) for _ in range(stop))][:stop]
        at = draw.choice((arrival.at, HEALED_S / 2 * draw.random()))
        first = attrs.evolve(
            arrival,
            at=at,
            name=f"request-n{number}",
            tokens=tuple(tokens) if stop > 1 else arrival.tokens,
            num_answer=num_answer,
            visits=tuple(
                attrs.evolve(visit, tokens=None, patience_s=None) for visit in arrival.visits[:1]
            ),
            patience_s=None,
            turns=(),
            child_of="",
        )
        prompts.append(first)
        answer = answer_to(first.tokens, num_answer)[: draw.choice((1, num_answer))]
        for again in range(draw.choice((1, 2))):
            ending = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, MAX_TURN))]
            later = attrs.evolve(
                first,
                at=min(at + draw.choice((0.5, 2.0, 10.0)) * (0.1 + draw.random()), HEALED_S - 1),
                name=f"{first.name}-{again}",
                tokens=(*first.tokens, *answer, *ending)[:MAX_TOKENS],
                prefill=draw.choice(others),
                visits=(),
            )
            prompts.append(later)
    incidents = (*scenario.incidents, *prompts)
    return attrs.evolve(scenario, members=tuple(members), incidents=incidents)


def _with_whole_pages(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let prompts come again that end with a page, and others where an answer has ended with one.

    Prefill leaves the token after the page to decode. Where steps are asynchronous, one under way
    has passed the end of the answer: a stop token ends it. What comes later loads what was saved.
    """
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival) and item.visits]
    prefills = [each for each in scenario.members if each.name.startswith("prefill")]
    others = [each.name for each in prefills if each.forgets]
    prompts = list[Arrival]()
    for number in range(4 if arrivals and others else 0):
        arrival = draw.choice(arrivals)
        has_answer = number % 2 == 1
        num_answer = draw.randint(2, MAX_TURN)
        size = draw.choice(PAGE_STOPS[1:]) + (1 - num_answer if has_answer else 1)
        tokens = [draw.randrange(VOCABULARY) for _ in range(size)]
        # the last token says whether the end is foreseen
        while has_answer and answer_to(tokens, num_answer)[-1] % 2:
            tokens[-1] = draw.randrange(VOCABULARY)
        visit = attrs.evolve(arrival.visits[0], tokens=None, patience_s=None)
        first = attrs.evolve(
            arrival,
            at=HEALED_S / 2 * draw.random(),
            name=f"request-p{number}",
            tokens=tuple(tokens),
            num_answer=num_answer,
            visits=(visit,),
            patience_s=None,
            turns=(),
            child_of="",
        )
        ending = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, MAX_TURN))]
        again = [*tokens, *answer_to(tokens, num_answer), *ending] if has_answer else tokens
        later = attrs.evolve(
            first,
            at=first.at + draw.choice((2.0, 10.0)) * (0.5 + draw.random()),
            name=f"{first.name}-later",
            tokens=tuple(again),
            prefill=draw.choice(others),
            visits=(),
        )
        prompts += first, later
    return attrs.evolve(scenario, incidents=(*scenario.incidents, *prompts))


def _with_updates_while_running(
    scenario: Scenario, arrivals: Sequence[Arrival], draw: random.Random
) -> list[Incident]:
    """Return incidents in which most updates of weights come while requests run, and go on.

    None begins before another one has ended.
    """
    spans = {item: scenario._span(item) for item in scenario.incidents if isinstance(item, Update)}
    for update in [*spans]:
        if not update.version or draw.random() < 0.25:
            continue
        at = draw.choice(arrivals).at
        moved = attrs.evolve(update, at=at, gap_s=0.01 * draw.random(), keeps_running=True)
        begins, ends = scenario._span(moved)
        times = [span for item, span in spans.items() if item is not update]
        if ends < HEALED_S and all(ends < start or begins > stop for start, stop in times):
            del spans[update]
            spans[moved] = begins, ends
    return [*(item for item in scenario.incidents if not isinstance(item, Update)), *spans]


def _with_store_hazards(scenario: Scenario, draw: random.Random) -> Scenario:
    """Change weights while requests run, let moves be slow, and pages equal after other prefixes.

    A prompt that has the beginning of one and the rest of another one comes after both.
    """
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival)]
    incidents = _with_updates_while_running(scenario, arrivals, draw)
    long = [item for item in arrivals if len(item.tokens) > min(PAGE_STOPS)]
    for number in range(draw.choice((0, 2, 3)) if len(long) > 1 else 0):
        first, second = draw.sample(long, 2)
        stop = draw.choice([stop for stop in PAGE_STOPS if stop < len(second.tokens)])
        at = max(first.at, second.at) + draw.choice((0.1, 2.0, 20.0)) * draw.random()
        crossed = attrs.evolve(
            first,
            at=min(at, HEALED_S - 1),
            name=f"request-c{number}",
            tokens=(*first.tokens[:stop], *second.tokens[stop:]),
            visits=tuple(attrs.evolve(visit, tokens=None) for visit in first.visits),
            turns=(),
            child_of="",
        )
        incidents.append(crossed)
    if arrivals and draw.random() < 0.4:
        begins_at = draw.choice(arrivals).at
        incidents.append(StoreTrouble(begins_at, begins_at + 10 * draw.random(), move_s=10.0))
    return attrs.evolve(scenario, incidents=tuple(incidents))


def _with_shared_store(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let prompts begin alike that one engine after another loads from the store, and saves.

    In half of the fleets the weights get a name, and caches are reset twice after that, as a
    trainer may do that starts an episode anew. Then prompts come before and after each reset.
    """
    members = tuple(
        attrs.evolve(member, forgets=True) if member.name.startswith("prefill") else member
        for member in scenario.members
    )
    names = [member.name for member in members if member.forgets]
    times = [scenario._span(item) for item in scenario.incidents if isinstance(item, Update)]
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival)]
    at = HEALED_S / 4 * draw.random()
    updates = list[Update]()
    for version in ("shared version", "", "") if draw.random() < 0.5 else ():
        update = Update(at, 0.01 * draw.random(), version)
        begins, ends = scenario._span(update)
        if all(ends < start or begins > stop for start, stop in times):
            updates.append(update)
        at = ends + draw.choice((3.0, 6.0)) * (0.5 + draw.random())
    at = min((update.at for update in updates), default=HEALED_S / 2 * draw.random())
    prompts = list[Arrival]()
    for number in range(2 if arrivals else 0):
        arrival = draw.choice(arrivals)
        shared = [draw.randrange(VOCABULARY) for _ in range(MAX_TOKENS)]
        came_at = at
        for again in range(draw.choice((3, 5))):
            came_at += draw.choice((0.5, 3.0)) * (0.5 + draw.random())
            stop = draw.randint(min(PAGE_STOPS), MAX_TOKENS - 2)
            ending = [draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 1, 2)))]
            prompt = attrs.evolve(
                _in_prefill_alone(arrival),
                at=came_at,
                name=f"request-h{number}-{again}",
                tokens=(*shared[:stop], *ending),
                prefill=draw.choice(names),
            )
            prompts.append(prompt)
    incidents = (*scenario.incidents, *prompts, *updates)
    return attrs.evolve(scenario, members=members, incidents=incidents)


def _with_crowds(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let the first requests have many readers, in two decode engines or more, and no others come.

    One of the engines is silent for longer than a lease, and for a while messages are late.
    """
    members = [*scenario.members]
    decodes = [member for member in members if member.name.startswith("decode")]
    if len(decodes) == 1:
        members.append(attrs.evolve(decodes[0], name="decode-1"))
    names = [member.name for member in members if member.name.startswith("decode")]
    incidents = list[Incident]()
    times = list[float]()
    for incident in scenario.incidents:
        if isinstance(incident, Arrival) and len(times) == MAX_CROWDS:
            continue
        if isinstance(incident, Arrival) and incident.visits and draw.random() < 0.7:
            times.append(incident.at)
            visits = []
            for _ in range(draw.randint(1, 4)):
                delay_s = draw.choice((0.01, 0.01, 0.5, 5.0)) * draw.random()
                patience_s = draw.choice((None, None, None, 1.0, 20.0))
                patience_s = patience_s and patience_s * draw.random()
                visits.append(Visit(draw.choice(names), delay_s, patience_s))
            # when claims of a silent engine have ended, and others may not have
            visits.append(Visit(draw.choice(names), LEASE_S + 10.0 * draw.random()))
            incident = attrs.evolve(incident, visits=tuple(visits), patience_s=None)
        incidents.append(incident)
    incidents.append(Trouble(0.0, HEALED_S, "*", chance=0.7, delay_s=60.0))
    silent, late = (draw.choice(times or [0.0]) + draw.random() for _ in range(2))
    if draw.random() < 0.7:
        ends_at = min(silent + 40.0, HEALED_S)
        incidents.append(Disturbance(silent, ends_at, draw.choice(names), "*", loss=1.0))
    if draw.random() < 0.5:
        ends_at = min(late + 40.0, HEALED_S)
        incidents.append(Disturbance(late, ends_at, "*", "*", delay_s=2.0))
    return attrs.evolve(scenario, members=tuple(members), incidents=tuple(incidents))


def _with_lost_entries(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let prefill lose messages to itself when some requests come, or are aborted there alone.

    Readers wait for these, each request's one reader from the beginning.
    """
    arrivals = [item for item in scenario.incidents if isinstance(item, Arrival) and item.visits]
    chosen = {item.name for item in draw.sample(arrivals, min(MAX_CROWDS, len(arrivals)))}
    incidents = list[Incident]()
    for incident in scenario.incidents:
        if isinstance(incident, Arrival) and incident.name in chosen:
            patience_s = draw.choice((None, 0.05, 0.5, 3.0))
            patience_s = patience_s and patience_s * draw.random()
            visits = (Visit(incident.visits[0].engine, 0.01 * draw.random()),)
            incident = attrs.evolve(incident, visits=visits, patience_s=patience_s)
            begins_at = incident.at + (patience_s or 0.0) - 0.001
            ends_at = begins_at + draw.choice((0.1, 1.0, BRIEF_S)) * draw.random()
            link = (incident.prefill, incident.prefill)
            if ends_at < HEALED_S:
                incidents.append(Disturbance(begins_at, ends_at, *link, loss=0.5))
        incidents.append(incident)
    return attrs.evolve(scenario, incidents=tuple(incidents))


def _with_late_messages(scenario: Scenario, draw: random.Random) -> Scenario:
    """Let all messages be late, and most transfers slow, in a fleet that has as many requests."""
    late = Disturbance(0.0, HEALED_S, "*", "*", delay_s=draw.choice((1.0, 2.5)))
    slow = Trouble(0.0, HEALED_S, "*", chance=0.7, delay_s=20.0)
    return attrs.evolve(scenario, incidents=(*scenario.incidents, late, slow))


_CHANGES: Final = MappingProxyType(
    {
        Feature.RIVALS: _with_rivals,
        Feature.LOST_ENGINES: _with_lost_engines,
        Feature.BURSTS: _arrivals(_in_bursts),
        Feature.NEAR_PROMPTS: _arrivals(_near),
        Feature.FACTS: _arrivals(_with_facts),
        Feature.HELD_TRANSFERS: _with_broken_transfers,
        Feature.SLICES: _with_refused_slices,
        Feature.GARBLED_MESSAGES: _with_garbled_answers,
        Feature.RESTARTS: _with_restarts,
        Feature.TURNS: _with_turns,
        Feature.REPEATS: _arrivals(_with_repeats),
        Feature.CHILDREN: _arrivals(_with_children),
        Feature.UPDATES: _with_updates,
        Feature.LIVE_UPDATES: _with_live_updates,
        Feature.LONG_PREFILLS: _arrivals(_with_long_prefills),
        Feature.HANGUPS: _arrivals(_with_hangups),
        Feature.POPULAR_PROMPTS: _with_popular_prompts,
        Feature.STORE: _with_store,
        Feature.SHARED_STORE: _with_shared_store,
        Feature.WRONG_BYTES: _with_wrong_bytes,
        Feature.ADAPTERS: _with_adapters,
        Feature.NAMED_AGAIN: _with_names_again,
        Feature.CROWDS: _with_crowds,
        Feature.LOST_ENTRIES: _with_lost_entries,
        Feature.LATE_MESSAGES: _with_late_messages,
    }
)


class _Draw:
    """Draws the parts of a scenario."""

    def __init__(self, seed: int, model: Model, stages: Stages, decode_stages: Stages) -> None:
        self._seed = seed
        self._model = model
        self._stages = {"prefill": stages, "decode": decode_stages}
        self._random = random.Random(f"{seed} scenario")
        self._arrivals: list[Arrival] = []

    def scenario(self) -> Scenario:
        """Draw engines, requests and incidents."""
        draw = self._random
        prefills = [self._member("prefill", number) for number in range(draw.choice((1, 1, 2)))]
        decodes = [self._member("decode", number) for number in range(draw.choice((1, 1, 2, 3)))]
        members = (*prefills, *decodes)
        incidents = list[Incident]()
        # prompts that begin alike share blocks of prefix caches
        families = [self._tokens(MAX_TOKENS) for _ in range(3)]
        for number in range(draw.randint(3, 12)):
            self._arrivals.append(self._arrival(number, families, prefills, decodes))
        incidents += self._arrivals
        names = [member.name for member in members]
        # some fleets are only slow, or disturbed for a moment: there, requests must not fail
        kinds = draw.choice(
            (
                (self._slowness,),
                (self._slowness, self._moment, self._moment),
                (self._siege,),
                (self._death, self._freeze, self._disturbance, self._trouble, self._rival),
                (self._death, self._freeze, self._disturbance, self._trouble, self._rival),
                (self._death, self._freeze, self._disturbance, self._trouble, self._rival),
            )
        )
        for _ in range(draw.choice((0, 1, 2, 3, 4, 6))):
            incidents.append(draw.choice(kinds)(names))
        # in a siege, what is read slowly outlives its lease
        if kinds == (self._siege,):
            incidents.append(Trouble(0.0, HEALED_S, "*", chance=1.0, delay_s=60.0))
        return Scenario(self._seed, members, tuple(incidents))

    def _member(self, role: str, number: int) -> Member:
        draw = self._random
        shape = attrs.evolve(draw.choice(SHAPES), model=self._model, stages=self._stages[role])
        # at least one request has room, and seldom many
        num_tokens = (
            MAX_TOKENS + MAX_ANSWER + shape.tokens_per_block + draw.choice((0, 0, 20, 60, 190))
        )
        return Member(
            f"{role}-{number}",
            shape,
            num_blocks=min(1 + -(-num_tokens // shape.tokens_per_block), shape.num_blocks),
            rate=draw.choice((1.0, 1.0, 0.97, 1.03, 0.5, 2.0)),
            takes_newest=draw.random() < 0.5,
        )

    def _tokens(self, number: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(VOCABULARY) for _ in range(number))

    def _time(self) -> float:
        """Draw a time at which something happens, often soon."""
        return (HEALED_S - 1) * self._random.random() ** 2

    def _arrival(
        self,
        number: int,
        families: list[tuple[int, ...]],
        prefills: list[Member],
        decodes: list[Member],
    ) -> Arrival:
        draw = self._random
        family = draw.choice(families)
        shared = family[: draw.randint(0, len(family))]
        # at least two tokens: the last one is computed by the engine that answers
        num_own = draw.randint(2 if len(shared) < 2 else 0, MAX_TOKENS - len(shared))
        visits = []
        for _ in range(draw.choice((0, 1, 1, 1, 1, 1, 2, 3))):
            delay_s = draw.choice((0.01, 0.01, 0.01, 0.5, 29.9, 40.0)) * draw.random()
            patience_s = draw.choice((None, None, None, 0.05, 2.0, 20.0))
            patience_s = patience_s and patience_s * draw.random()
            tokens = self._tokens(MAX_TOKENS) if draw.random() < 0.05 else None
            visits.append(Visit(draw.choice(decodes).name, delay_s, patience_s, tokens))
        return Arrival(
            self._time(),
            f"request-{number}",
            (*shared, *self._tokens(num_own)),
            draw.randint(1, MAX_ANSWER),
            draw.choice(prefills).name,
            tuple(visits),
            draw.choice((None, None, None, None, 0.01)),
        )

    def _death(self, names: list[str]) -> Death:
        draw = self._random
        engine = draw.choice(names)
        at = self._time()
        # requests are brief, so that most deaths would come between them
        arrivals = [arrival for arrival in self._arrivals if engine in arrival.engines]
        if arrivals and draw.random() < 0.75:
            delay_s = draw.choice((0.005, 0.05, 0.05, 5.0)) * draw.random()
            at = min(draw.choice(arrivals).at + delay_s, HEALED_S - 1)
        restarts_at = draw.choice((None, at + 0.1, at + 20 * draw.random()))
        # a start is an incident too
        if restarts_at is not None and restarts_at >= HEALED_S:
            restarts_at = None
        return Death(at, engine, restarts_at)

    def _freeze(self, names: list[str]) -> Freeze:
        at = self._time()
        return Freeze(at, self._random.choice(names), self._end_after(at))

    def _end_after(self, begins_at: float) -> float:
        """Draw an end: after a moment, a while, or long."""
        scale_s = self._random.choice((1.0, 10.0, 60.0))
        return min(begins_at + scale_s * self._random.random(), HEALED_S)

    def _disturbance(self, names: list[str]) -> Disturbance:
        draw = self._random
        begins_at = self._time()
        ends_at = self._end_after(begins_at)
        source = draw.choice((*names, "*", "*"))
        target = draw.choice((*names, "*", "*"))
        kinds = ("loss", "cut", "cut", "duplication", "reset", "delay")
        kind = draw.choice(kinds)
        return Disturbance(
            begins_at,
            ends_at,
            source,
            target,
            loss=1.0 if kind == "cut" else 0.3 * (kind == "loss"),
            duplication=0.5 * (kind == "duplication"),
            reset=0.3 * (kind == "reset"),
            delay_s=draw.choice((0.1, 2.0, 40.0)) if kind in ("delay", "duplication") else 0.0,
        )

    def _rival(self, names: list[str]) -> Rival:
        at = self._time()
        return Rival(at, self._random.choice(names), self._end_after(at))

    def _siege(self, names: list[str]) -> Disturbance:
        """Draw a long silence: nobody hears an engine, but its memory can be read."""
        begins_at = 12 * self._random.random()
        return Disturbance(begins_at, HEALED_S, "*", names[0], loss=1.0)

    def _moment(self, names: list[str]) -> Disturbance:
        disturbance = self._disturbance(names)
        ends_at = min(disturbance.ends_at, disturbance.begins_at + BRIEF_S)
        return attrs.evolve(disturbance, ends_at=ends_at)

    def _slowness(self, names: list[str]) -> Trouble:
        delay_s = self._random.choice((1.0, 60.0, 60.0))
        return attrs.evolve(
            self._trouble(names), ends_at=HEALED_S, chance=0.7, delay_s=delay_s, breaks=False
        )

    def _trouble(self, names: list[str]) -> Trouble:
        draw = self._random
        begins_at = self._time()
        return Trouble(
            begins_at,
            self._end_after(begins_at),
            draw.choice((*names, "*")),
            chance=draw.choice((0.4, 1.0)),
            delay_s=draw.choice((0.0, 2.0, 20.0, 60.0, 60.0)),
            breaks=draw.random() < 0.4,
        )
