"""A fleet in a simulation: it gets a scenario's requests, suffers what goes wrong, and must be right.

These rules hold in every step, or the simulation ends with an error that names the rule:

- OWN: a request attends to no byte that is not of its own tokens, also where a prefix was cached.
- GIVEN: a block is not given to a request while a byte of another one may land in it.
- CLAIM: blocks are not freed while a reader was told that they stay.
- END: each request ends within :data:`END_S`, right or with an error of kvplan.
- AGAIN: :data:`SETTLE_S` after the last fault, a request between any two engines is right.
- FREE: when all requests have ended and all leases are over, all blocks are free.
- GROW: then no connector remembers a request, and no thread runs.
- THREAD: no thread ends with an error, and no step of an engine waits.
"""

from __future__ import annotations

import logging
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import attrs

from kvplan.errors import KVPlanError
from kvplan.testing.simulation.engine import BrokenRuleError, Connector, Engine, Request, Site
from kvplan.testing.simulation.fabric import Fabric, Trouble
from kvplan.testing.simulation.memory import Numbers
from kvplan.testing.simulation.network import Disturbance, Host, Network
from kvplan.testing.simulation.scenario import (
    HEALED_S,
    Arrival,
    Death,
    Freeze,
    Incident,
    Scenario,
    Shape,
    Visit,
)
from kvplan.testing.simulation.tasks import TaskLoop

END_S: Final = 200.0
"""Seconds within which a request ends, beside those for which its engine is frozen."""

SETTLE_S: Final = 40.0
"""Seconds after the last fault, from which on all requests are right."""

QUIET_S: Final = 200.0
"""Seconds after the last requests, within which all blocks are free and all threads have ended."""

MakeConnector = Callable[[Site], Connector]


@attrs.frozen
class Outcome:
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


def simulate(
    scenario: Scenario, make_connector: MakeConnector, loop: TaskLoop | None = None
) -> Outcome:
    """Run a scenario to its end, or until a rule is broken."""
    fleet = Fleet(scenario, make_connector)
    try:
        error = fleet.run()
    finally:
        fleet.loop.close()
    return Outcome(
        scenario, error, tuple(fleet.lines), fleet.loop.num_events, dict(sorted(fleet.ends.items()))
    )


class Fleet:
    """The engines of a scenario, and their clients."""

    def __init__(self, scenario: Scenario, make_connector: MakeConnector) -> None:
        self.scenario = scenario
        self.loop = TaskLoop()
        self.lines: list[str] = []
        self.ends: Counter[str] = Counter()
        self._make_connector = make_connector
        incidents = scenario.incidents
        disturbances = tuple(item for item in incidents if isinstance(item, Disturbance))
        troubles = tuple(item for item in incidents if isinstance(item, Trouble))
        self._network = Network(self.loop, scenario.seed, disturbances)
        self._fabric = Fabric(scenario.seed, troubles)
        self._workers = {shape.name: shape.workers() for shape in scenario.shapes}
        all_workers = [worker for workers in self._workers.values() for worker in workers]
        self._numbers = Numbers.of(all_workers)
        self._shapes = {shape.name: shape for shape in scenario.shapes}
        self._num_starts: Counter[str] = Counter()
        self._engines: dict[str, Engine] = {}
        self._frozen_s = sum(
            item.ends_at - item.at for item in incidents if isinstance(item, Freeze)
        )
        # requests that have not ended, by name, and until when they must
        self._open: dict[str, float] = {}

    def run(self) -> BrokenRuleError | None:
        """Let everything happen. Return the rule that was broken, if any."""
        try:
            for shape in self.scenario.shapes:
                self._start(shape)
            for incident in self.scenario.incidents:
                self._plan(incident)
            self._advance(HEALED_S + SETTLE_S)
            probes = self._probe()
            while self._open:
                self._advance(self.loop.now + 1.0)
            for name, error in probes.items():
                if error is not None:
                    raise BrokenRuleError("AGAIN", f"{name} fails after all faults: {error}")
            self._advance(self.loop.now + QUIET_S)
            self._check_end()
        except BrokenRuleError as error:
            self._trace("", str(error))
            return error
        return None

    def _trace(self, who: str, what: str) -> None:
        self.lines.append(f"{self.loop.now:10.4f} {who:10} {what}")

    def _advance(self, until_s: float) -> None:
        """Let all events happen up to a time."""
        while self.loop.advance(until_s):
            if self.loop.errors:
                error = self.loop.errors[0]
                where = traceback.extract_tb(error.__traceback__)[-1]
                raise BrokenRuleError("THREAD", f"{error!r} at {where.name}:{where.lineno}")
        self.loop.now = until_s
        for name, ends_at in self._open.items():
            if ends_at < self.loop.now:
                raise BrokenRuleError("END", f"{name} has not ended in time")

    def _start(self, shape: Shape) -> None:
        self._num_starts[shape.name] += 1
        number = self._num_starts[shape.name]
        draw = random.Random(f"{self.scenario.seed} {shape.name} {number}")
        host = Host(shape.name, self._network, draw, shape.rate, 1000 * draw.random())
        self._engines[shape.name] = Engine(
            host,
            self._workers[shape.name],
            self._fabric,
            self._numbers,
            self._make_connector,
            self._trace,
        )
        self._trace(shape.name, f"start {number}")

    def _plan(self, incident: Incident) -> None:
        if isinstance(incident, Arrival):
            self.loop.at(incident.at, partial(self._arrive, incident, lambda error: None))
        elif isinstance(incident, Death):
            self.loop.at(incident.at, partial(self._die, incident))
        elif isinstance(incident, Freeze):
            self.loop.at(incident.at, partial(self._freeze, incident))

    def _die(self, death: Death) -> None:
        engine = self._engines[death.engine]
        if engine.host.is_dead:
            return
        self._trace(death.engine, "dies")
        engine.host.die()
        error = KVPlanError("PEER", "serve", expected="an engine that lives", got="a dead one")
        for request in [*engine.requests.values()]:
            request.tell(None, error)
        if death.restarts_at is not None:
            self.loop.at(death.restarts_at, partial(self._start, self._shapes[death.engine]))

    def _freeze(self, freeze: Freeze) -> None:
        self._trace(freeze.engine, f"freezes until {freeze.ends_at:.4f}")
        self._engines[freeze.engine].host.freeze(freeze.ends_at)

    def _arrive(self, arrival: Arrival, finish: Callable[[KVPlanError | None], None]) -> None:
        """Let prefill compute a request, and then others read it. ``finish`` gets the first error."""

        def computed(params: Mapping[str, Any] | None, error: KVPlanError | None) -> None:
            for number, visit in enumerate(arrival.visits if params is not None else ()):
                name = f"{arrival.name}/{number}"
                read = partial(self._visit, arrival, visit, name, params, finish)
                self.loop.at(self.loop.now + visit.delay_s, read)
            if error is not None:
                finish(error)

        self._submit(
            arrival.prefill, arrival.name, arrival.tokens, 1, None, computed, arrival.patience_s
        )

    def _visit(
        self,
        arrival: Arrival,
        visit: Visit,
        name: str,
        params: Mapping[str, Any],
        finish: Callable[[KVPlanError | None], None],
    ) -> None:
        def ended(_: Mapping[str, Any] | None, error: KVPlanError | None) -> None:
            finish(error)

        self._submit(
            visit.engine,
            name,
            arrival.tokens,
            arrival.num_answer,
            params,
            ended,
            visit.patience_s,
        )

    def _submit(
        self,
        engine_name: str,
        name: str,
        tokens: tuple[int, ...],
        num_answer: int,
        params: Mapping[str, Any] | None,
        tell: Callable[[Mapping[str, Any] | None, KVPlanError | None], None],
        patience_s: float | None,
    ) -> None:
        """Send a request to an engine."""
        engine = self._engines[engine_name]

        def ended(answer: Mapping[str, Any] | None, error: KVPlanError | None) -> None:
            del self._open[name]
            self.ends["right" if error is None else error.code] += 1
            tell(answer, error)

        self._open[name] = self.loop.now + END_S + self._frozen_s
        if engine.host.is_dead:
            error = KVPlanError("PEER", "serve", expected="an engine that lives", got="a dead one")
            ended(None, error)
            return
        engine.add(Request(name, [*tokens], num_answer, params is None, params, ended))
        if patience_s is not None:
            self.loop.at(self.loop.now + patience_s, partial(engine.abort, name))

    def _probe(self) -> dict[str, KVPlanError | None]:
        """Send a request between any two engines that live. Return the errors, when they have ended."""
        errors = dict[str, KVPlanError | None]()
        living = [name for name, engine in self._engines.items() if not engine.host.is_dead]
        for prefill in living:
            for decode in living:
                if prefill.startswith("prefill") and decode.startswith("decode"):
                    name = f"request-{prefill}-{decode}"
                    number = 100 * (len(errors) + 1)
                    tokens = tuple(range(number, number + 11))
                    visits = (Visit(decode),)
                    arrival = Arrival(self.loop.now, name, tokens, 2, prefill, visits)
                    self._arrive(arrival, partial(errors.__setitem__, name))
        return errors

    def _check_end(self) -> None:
        """Check what must hold when nothing is left to do."""
        for name, engine in self._engines.items():
            if engine.host.is_dead:
                continue
            if engine.pool.num_free < engine.pool.num_blocks:
                message = f"{name} has {engine.pool.num_free} of {engine.pool.num_blocks} blocks"
                raise BrokenRuleError("FREE", message)
            for place in places_of("request-", engine.connector):
                raise BrokenRuleError("GROW", f"{name} remembers {place}")
        if self.loop.num_tasks:
            raise BrokenRuleError("GROW", f"{self.loop.num_tasks} threads still run")


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
        elif type(value).__module__.startswith("kvplan.") and not isinstance(value, Host):
            names = [*getattr(value, "__dict__", ())]
            for part in type(value).__mro__:
                names += getattr(part, "__slots__", ())
            ahead += [
                (f"{place}.{name}", getattr(value, name)) for name in names if hasattr(value, name)
            ]
