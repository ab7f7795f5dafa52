"""Shrink a scenario that breaks a rule: leave out what it does not need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from kvplan.testing.simulation.catalog import SHAPES
from kvplan.testing.simulation.fleet import FleetOutcome, Simulation
from kvplan.testing.simulation.scenario import Arrival, Member


def shrink(simulation: Simulation, outcome: FleetOutcome) -> FleetOutcome:
    """Return the outcome of a smaller scenario that breaks the same rule.

    No single thing can be left out of it. An outcome without an error is returned as it is.
    """
    if outcome.error is None:
        return outcome
    scenario = None
    while scenario is not outcome.scenario:
        scenario = outcome.scenario
        outcome = _without_features(simulation, outcome)
        outcome = _without_incidents(simulation, outcome)
        outcome = _simplified(simulation, outcome)
    return outcome


def _without_features(simulation: Simulation, outcome: FleetOutcome) -> FleetOutcome:
    """Switch off features, one by one. The requests that they have changed stay."""
    for feature in outcome.scenario.features:
        features = outcome.scenario.features & ~feature
        outcome = _if_same_rule(simulation, outcome, features=features)
    return outcome


def _without_incidents(simulation: Simulation, outcome: FleetOutcome) -> FleetOutcome:
    """Leave out incidents: at first many at a time, then one by one."""
    size = len(outcome.scenario.incidents)
    while size:
        start = 0
        while start < len(outcome.scenario.incidents):
            incidents = outcome.scenario.incidents
            rest = incidents[:start] + incidents[start + size :]
            smaller = _if_same_rule(simulation, outcome, incidents=rest)
            # what follows has moved to the place of what is gone
            if smaller is outcome:
                start += size
            outcome = smaller
        size //= 2
    return outcome


def _simplified(simulation: Simulation, outcome: FleetOutcome) -> FleetOutcome:
    """Leave out engines that nothing happens to, and make engines and requests plain."""
    for member in outcome.scenario.members:
        members = outcome.scenario.members
        index = members.index(member)
        plain_shape = attrs.evolve(SHAPES[0], model=member.shape.model)
        simpler = (
            Member(member.name, plain_shape),
            Member(member.name, attrs.evolve(plain_shape, stages=member.shape.stages)),
            attrs.evolve(member, rate=1.0),
            attrs.evolve(member, takes_newest=False),
        )
        for replacement in ((), *((plain,) for plain in simpler)):
            is_needed = not replacement and outcome.scenario.mentions(member.name)
            if is_needed or replacement == (member,):
                continue
            changed = (*members[:index], *replacement, *members[index + 1 :])
            smaller = _if_same_rule(simulation, outcome, members=changed)
            if smaller is not outcome:
                outcome = smaller
                break
    for index, incident in enumerate(outcome.scenario.incidents):
        if not isinstance(incident, Arrival):
            continue
        for arrival in _simpler_arrivals(incident):
            incidents = outcome.scenario.incidents
            changed_incidents = (*incidents[:index], arrival, *incidents[index + 1 :])
            smaller = _if_same_rule(simulation, outcome, incidents=changed_incidents)
            if smaller is not outcome:
                outcome = smaller
                break
    return outcome


def _simpler_arrivals(arrival: Arrival) -> Iterator[Arrival]:
    """Yield requests with fewer visits, shorter tokens, or more patience."""
    for index in range(len(arrival.visits)):
        visits = arrival.visits[:index] + arrival.visits[index + 1 :]
        yield attrs.evolve(arrival, visits=visits)
    if len(arrival.tokens) > 3:
        yield attrs.evolve(arrival, tokens=arrival.tokens[: len(arrival.tokens) // 2 + 1])
    if arrival.num_answer > 1:
        yield attrs.evolve(arrival, num_answer=1)
    if arrival.patience_s is not None:
        yield attrs.evolve(arrival, patience_s=None)


def _if_same_rule(simulation: Simulation, outcome: FleetOutcome, **changes: Any) -> FleetOutcome:
    """Return the outcome of a changed scenario if it breaks the same rule, else the one before."""
    changed = simulation.run(attrs.evolve(outcome.scenario, **changes))
    return changed if changed.rule == outcome.rule else outcome
