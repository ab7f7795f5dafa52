"""How fast fleets are simulated, on one core: ``python -m benchmarks.simulation``."""

from __future__ import annotations

import logging
import sys
import time

from kvplan.testing.simulation import LeaseConnector, Scenario, Simulation

WARM = 50
"""Seeds that are run before, for the plans of all pairs of shapes."""


def main(num_seeds: int = 500) -> None:
    """Print fleets per hour and steps per minute, by the clock and by the time of the processor."""
    logging.disable(logging.CRITICAL)
    simulation = Simulation(LeaseConnector)
    for seed in range(WARM):
        simulation.run(Scenario.of(seed))
    began, cpu_began = time.perf_counter(), time.process_time()
    num_steps = sum(simulation.run(Scenario.of(WARM + seed)).num_steps for seed in range(num_seeds))
    for name, seconds in (("clock", time.perf_counter() - began), ("processor", time.process_time() - cpu_began)):
        fleets = num_seeds / seconds * 3600
        print(f"{name}: {fleets:,.0f} fleets an hour, {num_steps / seconds * 60:,.0f} steps a minute")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
