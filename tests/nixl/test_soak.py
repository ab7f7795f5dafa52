"""The soak of two engines finds nothing, and finds each fault that is planted. SOAK_SECONDS sets how long."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.soak import Process, Request, Soak
from benchmarks.soak_worker import Key
from tests.pages import ROOT

KEY = ("decode", 0)
SECONDS = os.environ.get("SOAK_SECONDS", "15")
SEED = [] if "SOAK_SECONDS" in os.environ else ["--seed", "1"]
"""A long soak draws another one each time."""


def soak(*arguments: str) -> tuple[int, str]:
    """The exit status and the output of a soak."""
    command = [sys.executable, "-m", "benchmarks.soak", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=float(SECONDS) + 600)
    return run.returncode, run.stdout + run.stderr


class Script:
    """A stand-in for random choices."""

    def __init__(self, *choices: object) -> None:
        self.choices = [*choices]

    def choice(self, _: object) -> object:
        return self.choices.pop(0)

    def random(self) -> float:
        return 0.5


def stood_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *keys: Key) -> tuple[Soak, list[Process]]:
    """A scheduler of workers that are no processes."""
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr(Soak, "spawn", lambda self, key: None)
    soak, made = Soak(1, 3, 0, "", tmp_path), []
    for serial, key in enumerate(keys):
        stand_in: Any = SimpleNamespace(
            pid=1, exitcode=-signal.SIGABRT, join=lambda: None, close=lambda: None, send=print
        )
        (tmp_path / f"{serial}.err").touch()
        worker = soak.templates[key[0]][key[1]]
        made.append(Process(serial, key, stand_in, stand_in, tmp_path / f"{serial}", worker, [], b"envelope"))
        soak.present[key] = made[-1]
    soak.spared.clear()
    return soak, made


@pytest.mark.parametrize("what", ["kill", "close", "replace", "suspend and kill", "suspend"])
def test_an_abort_is_explained_by_a_worker_that_was_to_end(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX may abort a worker before the end of another one is seen, so it counts from when that was decided."""
    soak, (target, aborted) = stood_in(tmp_path, monkeypatch, KEY, ("prefill", 0))
    soak.random = Script(what, target, 2)  # type: ignore[assignment]
    soak.event()
    soak.bury(aborted)
    assert soak.counts["workers aborted by UCX"] == (what != "suspend")
    assert len(soak.defects) == (what == "suspend")


@pytest.mark.parametrize("is_explained", [True, False])
def test_a_failure_is_explained_within_time_from_its_end(
    is_explained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the request took, the death of a worker may be seen after the failure."""
    soak, (process,) = stood_in(tmp_path, monkeypatch, KEY)
    now = time.monotonic()
    given: dict[str, Any] = {
        "name": "request",
        "attempt": 0,
        "is_staged": True,
        "tokens": (0, 9),
        "before": 0,
        "tables": {"prefill": [], "decode": []},
        "content": np.zeros(0, np.uint16),
        "processes": {KEY: process},
        "active": set(),
        "began": now - 100,
        "deadline": now + 9,
    }
    request = Request(**given, codes=["PEER"])
    soak.requests["request"] = request
    soak.close(request)
    soak.time_out(now + 1)
    assert not soak.defects
    if is_explained:
        process.disturbed_at = now
    soak.time_out(now + 100)
    assert len(soak.defects) == (not is_explained)


def test_engines_whose_workers_die_and_hang() -> None:
    """Every byte of every request that is done is right, nothing lands late, and nothing is left behind."""
    status, output = soak("--seconds", SECONDS, *SEED)
    print(output)
    assert status == 0, output
    assert "requests done" in output
    assert "event" in output


@pytest.mark.parametrize(
    ("plant", "seconds", "expected"),
    [
        ("early", "120", "wrong bytes in"),
        ("byte", "120", "wrong bytes in"),
        ("late", "120", "late write to|wrong bytes in"),
        ("leak", "5", "transfers in the end"),
    ],
)
def test_a_planted_fault_is_found(plant: str, seconds: str, expected: str) -> None:
    """Blocks that are freed too early, wrong and late bytes end a soak at once; what is not released, in the end."""
    status, output = soak("--seconds", seconds, "--seed", "2", "--plant", plant)
    assert status == 1, output
    assert re.search(expected, output), output
