"""Fleets that a test makes by hand: what seeds seldom draw."""

from __future__ import annotations

import attrs
import pytest

from kvplan.protocol.system import Background
from kvplan.testing.simulation import (
    BrokenRuleError,
    EngineRequest,
    Feature,
    FleetOutcome,
    LeaseConnector,
    Scenario,
    Simulation,
    Site,
    shrink,
)
from kvplan.testing.simulation.features import NO_FEATURES
from kvplan.testing.simulation.fleet import QUICK_S, MakeConnector
from kvplan.testing.simulation.network import Disturbance
from kvplan.testing.simulation.scenario import Arrival, Death, Freeze, Incident, Member, Visit

pytestmark = pytest.mark.usefixtures("quiet")

MEMBERS = (Member("prefill-0"), Member("decode-0"))
ARRIVAL = Arrival(1.0, "request-0", (*range(11),), 3, "prefill-0", (Visit("decode-0"),))


def outcome_of(
    *incidents: Incident, connector: MakeConnector = LeaseConnector, features: Feature = NO_FEATURES
) -> FleetOutcome:
    """How a fleet of two engines ends."""
    return Simulation(connector).run(Scenario(0, MEMBERS, incidents, features=features))


def test_an_engine_that_dies_takes_its_requests_with_it() -> None:
    """The request had arrived, and its step comes too late; a second death changes nothing."""
    # at both engines; so is that which a fleet asks for when faults are over
    assert outcome_of(ARRIVAL).ends == {"right": 4}
    deaths = Death(1.0005, "prefill-0", 2.0), Death(1.0006, "prefill-0", None)
    outcome = outcome_of(ARRIVAL, *deaths)
    assert outcome.rule == ""
    assert outcome.ends == {"PEER": 1, "right": 2}
    trace = "\n".join(outcome.trace)
    assert trace.count("prefill-0  dies") == 1
    assert trace.count("prefill-0  start 2") == 1
    assert "request-0 " not in trace


@pytest.mark.parametrize("kind", ["death", "freeze", "abort"])
def test_a_step_that_messages_interrupt_may_never_end(kind: str) -> None:
    """Its engine dies or is frozen in it, or a request is aborted, which the next step hears."""
    reading = "decode-0   request-0/0 is read: "
    (line,) = (line for line in outcome_of(ARRIVAL, features=Feature.INTERLEAVED).trace if reading in line)
    are_read = set()
    # from before it gets blocks to after its read has begun
    for number in range(1, 50):
        time = float(line.split()[0]) + 0.0002 * (number - 10)
        arrival, incidents = ARRIVAL, list[Incident]()
        if kind == "death":
            incidents.append(Death(time, "decode-0", time + 1.0))
        elif kind == "freeze":
            incidents.append(Freeze(time, "decode-0", time + 3.0))
        else:
            arrival = attrs.evolve(ARRIVAL, visits=(Visit("decode-0", patience_s=0.0002 * number),))
        outcome = outcome_of(arrival, *incidents, features=Feature.INTERLEAVED)
        assert outcome.rule == "", str(outcome)
        are_read.add(any(reading in line for line in outcome.trace))
    assert True in are_read


def test_a_restarted_engine_is_read_when_the_network_has_healed() -> None:
    """The handshake with its earlier start, whose question was lost, has 30 s and does not hold it up."""
    cut = Disturbance(1.0, 20.0, "decode-0", "prefill-0", loss=1.0)
    later = attrs.evolve(ARRIVAL, at=21.0, name="request-1")
    outcome = outcome_of(ARRIVAL, cut, Death(5.0, "prefill-0", 6.0), later)
    assert outcome.rule == ""
    (ended,) = (line for line in outcome.trace if "request-1/0 is right" in line)
    assert float(ended.split()[0]) < later.at + QUICK_S


def test_an_image_at_another_position_makes_another_prompt() -> None:
    """Decode refuses the handoff, since the cache is another one from that position on."""
    facts = ((0, "salt b"), (4, "image a"))
    visits = (Visit("decode-0", facts=((0, "salt b"), (5, "image a"))),)
    outcome = outcome_of(attrs.evolve(ARRIVAL, facts=facts, visits=visits))
    assert outcome.rule == ""
    assert outcome.ends["PROMPT"] == 1


def test_deaths_that_seeds_draw_come_while_an_engine_is_used() -> None:
    """At other times nothing is lost."""
    scenarios = [Scenario.of(seed) for seed in range(300)]
    deaths = [(scenario, death) for scenario in scenarios for death in scenario.incidents if isinstance(death, Death)]
    is_soon = [
        any(
            isinstance(arrival, Arrival) and death.engine in arrival.engines and 0 <= death.at - arrival.at < 0.1
            for arrival in scenario.incidents
        )
        for scenario, death in deaths
    ]
    assert len(deaths) / 3 < sum(is_soon) < len(deaths)


def test_a_coroutine_of_a_connector_that_ends_with_an_error_is_found() -> None:
    """Nobody awaits it, and no request notices."""

    class Brittle(LeaseConnector):
        def __init__(self, site: Site) -> None:
            super().__init__(site)
            site.host.start("brittle", self.run)

        async def run(self) -> None:
            raise ZeroDivisionError

    outcome = outcome_of(connector=Brittle)
    assert outcome.rule == "CRASH"
    assert "ZeroDivisionError() in test_fleet.py, run" in str(outcome)


@pytest.mark.parametrize("error", [ZeroDivisionError(), BrokenRuleError("OWN", "a byte is another one's")])
def test_what_goes_wrong_in_the_background_is_found(error: BaseException) -> None:
    """The protocol fails what waits for it, here nothing, and goes on."""

    class Brittle(LeaseConnector):
        def __init__(self, site: Site) -> None:
            super().__init__(site)
            Background("brittle", 1, site.host).submit(self.run)

        async def run(self) -> None:
            raise error

    outcome = outcome_of(connector=Brittle)
    assert outcome.rule == getattr(error, "rule", "CRASH")
    assert str(error) in str(outcome)


def test_what_a_failure_needs_is_made_plain() -> None:
    """A death stays as it is; a request loses its readers, its patience and all but a few tokens."""
    num_starts: dict[str, int] = {}

    class Forgetful(LeaseConnector):
        """Crashes at a request of another start of its engine."""

        def __init__(self, site: Site) -> None:
            super().__init__(site)
            name = site.host.name
            # the virtual clock of a scenario begins anew
            num_starts[name] = num_starts.get(name, 0) + 1 if site.host.loop.now else 1
            self._is_first = num_starts[name] == 1

        def add(self, request: EngineRequest) -> None:
            super().add(request)
            assert self._is_first or request.name != ARRIVAL.name

    death = Death(0.5, "prefill-0", 0.75)
    arrival = attrs.evolve(ARRIVAL, patience_s=20.0)
    simulation = Simulation(Forgetful)
    members = (attrs.evolve(MEMBERS[0], rate=2.0, takes_newest=True), *MEMBERS[1:])
    outcome = simulation.run(Scenario(0, members, (arrival, death)))
    assert outcome.rule == "CRASH"
    shrunk = shrink(simulation, outcome)
    assert shrunk.rule == "CRASH"
    assert shrunk.scenario.members == MEMBERS[:1]
    plain = attrs.evolve(ARRIVAL, tokens=ARRIVAL.tokens[:3], num_answer=1, visits=())
    assert shrunk.scenario.incidents == (plain, death)
