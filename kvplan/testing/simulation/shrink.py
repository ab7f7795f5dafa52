"""Shrink a scenario that breaks a rule: leave out what it does not need."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from kvplan.testing.simulation.fleet import Outcome, Simulation
from kvplan.testing.simulation.scenario import Arrival, Member, Scenario


def shrink(simulation: Simulation, outcome: Outcome) -> Outcome:
    """Return the outcome of a smaller scenario that breaks the same rule.

    Nothing can be left out of it without another end. An outcome whose rules all hold is returned
    as it is.
    """
    is_smaller = outcome.error is not None
    while is_smaller:
        is_smaller = False
        for scenario in _smaller(outcome.scenario):
            candidate = simulation.run(scenario)
            if candidate.rule == outcome.rule:
                outcome = candidate
                is_smaller = True
                break
    return outcome


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios that lack something, those that lack most first."""
    incidents = scenario.incidents
    size = len(incidents)
    while size:
        for start in range(0, len(incidents), size):
            rest = incidents[:start] + incidents[start + size :]
            yield attrs.evolve(scenario, incidents=rest)
        size //= 2
    for member in scenario.members:
        if not scenario.mentions(member.name):
            members = tuple(other for other in scenario.members if other is not member)
            yield attrs.evolve(scenario, members=members)
    for index, incident in enumerate(incidents):
        if isinstance(incident, Arrival):
            for arrival in _smaller_arrivals(incident):
                changed = (*incidents[:index], arrival, *incidents[index + 1 :])
                yield attrs.evolve(scenario, incidents=changed)
    for index, member in enumerate(scenario.members):
        plain = Member(member.name, num_blocks=member.num_blocks)
        for simpler in (plain, attrs.evolve(member, rate=1.0)):
            if simpler != member:
                members = (*scenario.members[:index], simpler, *scenario.members[index + 1 :])
                yield attrs.evolve(scenario, members=members)


def _smaller_arrivals(arrival: Arrival) -> Iterator[Arrival]:
    """Yield requests with fewer visits and tokens."""
    for index in range(len(arrival.visits)):
        visits = arrival.visits[:index] + arrival.visits[index + 1 :]
        yield attrs.evolve(arrival, visits=visits)
    if arrival.patience_s is not None:
        yield attrs.evolve(arrival, patience_s=None)
    if len(arrival.tokens) > 3:
        yield attrs.evolve(arrival, tokens=arrival.tokens[: len(arrival.tokens) // 2 + 1])
    if arrival.num_answer > 1:
        yield attrs.evolve(arrival, num_answer=1)
