"""A deterministic simulation of a fleet: engines, their connectors, and all that can go wrong.

Many prefill and decode engines of unequal shapes run in one process, with the real code of
:mod:`kvplan.protocol`, over a virtual clock, a virtual network, and memory whose bytes carry
labels. A seed decides everything: the engines, the requests, what fails, and the order of all that
happens. :mod:`kvplan.testing.simulation.fleet` has the rules that must hold.

>>> import logging
>>> logging.disable(logging.CRITICAL)
>>> simulation = Simulation(LeaseConnector)
>>> print(simulation.run(Scenario.of(1)))
seed 1: all rules hold (586 steps; requests: 4 LEASE, 1 PROMPT, 25 right)
>>> logging.disable(logging.NOTSET)

``python -m kvplan.testing.simulation --seed 1`` prints what happens in that fleet.
"""

from kvplan.testing.simulation.catalog import MODELS, GroupShape, Shape, Stages
from kvplan.testing.simulation.engine import (
    Connector,
    EngineRequest,
    Site,
    StepReport,
)
from kvplan.testing.simulation.features import Feature
from kvplan.testing.simulation.fleet import FleetOutcome, Simulation
from kvplan.testing.simulation.leases import LeaseConnector, Promises
from kvplan.testing.simulation.scenario import Scenario
from kvplan.testing.simulation.shrink import shrink
from kvplan.testing.simulation.tasks import BrokenRuleError

__all__ = [
    "MODELS",
    "BrokenRuleError",
    "Connector",
    "EngineRequest",
    "Feature",
    "FleetOutcome",
    "GroupShape",
    "LeaseConnector",
    "Promises",
    "Scenario",
    "Shape",
    "Simulation",
    "Site",
    "Stages",
    "StepReport",
    "shrink",
]
