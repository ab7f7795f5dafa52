"""Prints a table of what the model checker finds: ``python -m tests.protocol``, with ``--reads 2`` for hours."""

from __future__ import annotations

import argparse
import time

from tests.protocol.model import FAULTS, check

parser = argparse.ArgumentParser(prog="python -m tests.protocol", description=__doc__)
parser.add_argument("--reads", type=int, default=1, help="reads of each decode engine, by default 1")
options = parser.parse_args()
print("| fault | states | seconds | result |\n|---|---:|---:|---|")
for name, fault in FAULTS.items():
    began = time.monotonic()
    verdict = check(fault, READS=options.reads)
    result = "found" if verdict.is_violated else "no state is wrong"
    print(f"| {name} | {verdict.num_states:,} | {time.monotonic() - began:.1f} | {result} |", flush=True)
