"""The simulation's connector with a pipeline: each request goes through a staging region, whatever that costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from kvplan.budget import Budget
from kvplan.describe import Worker
from kvplan.protocol import Source
from kvplan.staging import StagedPlan, stage
from kvplan.testing.simulation import LeaseConnector, Simulation, Site
from kvplan.testing.simulation.catalog import STAGING


@cache
def staged_plan(local: Worker, remotes: tuple[Worker, ...]) -> StagedPlan:
    """The staged plan of a worker, made once."""
    return stage(local, remotes, staging=STAGING)


class StagedConnector(LeaseConnector):
    """Requests of the simulation are so small that copies take longer than they save."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, is_staged=True)
        for reads in self._reads:
            # choose the staged plan
            setattr(reads._peers, "_fastest_plan", partial(self._plan, reads.worker))  # noqa: B010

    def _plan(
        self, local: Worker, source: Source, remotes: Sequence[Worker], budget: Budget, until: float
    ) -> tuple[StagedPlan, str]:
        return staged_plan(local, tuple(remotes)), ""


def choosing_fleets() -> Simulation:
    """A simulation whose readers choose by themselves whether they stage what they read."""
    return Simulation(partial(LeaseConnector, is_staged=True))
