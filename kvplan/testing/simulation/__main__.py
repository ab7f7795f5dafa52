"""Run fleets by their seeds: ``python -m kvplan.testing.simulation --help`` says how."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from kvplan.testing.simulation import MODELS, Feature, Scenario, Simulation, Stages, shrink
from kvplan.testing.simulation.features import NO_FEATURES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one seed with its trace, or many; return 1 if a rule was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m kvplan.testing.simulation",
        description="Simulate fleets of engines. A seed that breaks a rule is shrunk and replayed.",
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run")
    parser.add_argument("--model", choices=MODELS, default="attention", help="what engines run")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages of prefill, 1 or 2")
    parser.add_argument("--decode-stages", type=int, default=1, help="those of decode")
    parser.add_argument("--plain", action="store_true", help="fleets without features")
    parser.add_argument(
        "--connector",
        default="kvplan.testing.simulation:LeaseConnector",
        help="module:name of what makes a connector of a Site",
    )
    parser.add_argument("--log", action="store_true", help="show what the connectors log")
    options = parser.parse_args(arguments)
    if not options.log:
        logging.disable(logging.CRITICAL)
    module, _, name = options.connector.partition(":")
    simulation = Simulation(getattr(importlib.import_module(module), name))
    for seed in range(options.seed, options.seed + options.seeds):
        stages = Stages(options.stages), Stages(options.decode_stages)
        features = NO_FEATURES if options.plain else Feature.of(seed)
        scenario = Scenario.of(seed, MODELS[options.model], *stages, features)
        outcome = simulation.run(scenario)
        if outcome.error is not None:
            print(outcome, "\n\nshrunk:")
            outcome = shrink(simulation, outcome)
        if outcome.error is not None or options.seeds == 1:
            print(outcome.scenario)
            print(*outcome.trace, outcome, sep="\n")
        if outcome.error is not None:
            return 1
    if options.seeds > 1:
        print(f"{options.seeds} seeds: all rules hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
