"""The siege finds nothing wrong, finds what is planted, and tells memory that grows from memory that does not."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from benchmarks.held import growth
from tests.pages import ROOT

SECONDS = np.arange(0, 3600, 5)
NOISE = np.random.default_rng(1).normal(0, 2, SECONDS.size)


def siege(*arguments: str) -> tuple[int, str]:
    """The exit status and the output of a siege of some seconds."""
    command = [sys.executable, "-m", "benchmarks.siege", "--seconds", "6", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    return run.returncode, run.stdout + run.stderr


def test_honest_clients_are_served_under_attack() -> None:
    """Of the listener and the proxy, and all that they get is right."""
    status, output = siege()
    assert status == 0, output
    assert output.count("'served'") == 3


def test_a_planted_answer_to_another_prompt_is_found() -> None:
    status, output = siege("--plant")
    assert status == 1, output
    assert "proxy: wrong: ['prompt " in output


@pytest.mark.parametrize("per_hour, grows", [(0, False), (3, False), (8, True), (-8, False)])
def test_growth_has_an_error(per_hour: float, grows: bool) -> None:
    """What varies by 2 MiB and grows by 8 an hour grows by more than 4; what it does at its start is left out."""
    found = growth(SECONDS, 50 + NOISE + per_hour * SECONDS / 3600 - 40 * (SECONDS < 300))
    assert abs(found.per_hour - per_hour) < 3 * found.error
    assert 0.1 < found.error < 1
    assert found.exceeds(4) == grows
