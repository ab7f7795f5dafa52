"""The soak of two engines finds nothing, and finds each fault that is planted. KVPLAN_SOAK_SECONDS sets how long."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.pages import ROOT

SECONDS = os.environ.get("KVPLAN_SOAK_SECONDS", "15")


def soak(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit status and the output of a soak."""
    command = [sys.executable, "-m", "benchmarks.soak", *arguments]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, timeout=float(SECONDS) + 600
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.parametrize("environment", [{"UCX_TLS": "tcp"}, {}], ids=["tcp", "default"])
def test_engines_whose_workers_die_and_hang(environment: dict[str, str]) -> None:
    """Every byte of every request that is done is right, nothing lands late, and nothing is left behind."""
    status, output = soak("--seconds", SECONDS, **environment)
    print(output)
    assert status == 0, output
    assert "requests done" in output
    assert "event" in output


@pytest.mark.parametrize(
    ("plant", "seconds", "expected"),
    [
        ("early", "120", "wrong bytes in"),
        ("count", "120", "wrong bytes in"),
        ("byte", "120", "wrong bytes in"),
        ("late", "120", "late write to|wrong bytes in"),
        ("leak", "20", "transfers in the end"),
    ],
)
def test_a_planted_fault_is_found(plant: str, seconds: str, expected: str) -> None:
    """Blocks that are freed too early, wrong and late bytes end a soak at once; what is not released, in the end."""
    status, output = soak("--seconds", seconds, "--seed", "2", "--plant", plant, UCX_TLS="tcp")
    assert status == 1, output
    assert re.search(expected, output), output
