"""The demo, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan_nixl import demo

ROOT = Path(demo.__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m kvplan_nixl``."""
    environment = {**os.environ, "NIXL_LOG_LEVEL": "WARN"}
    command = [sys.executable, "-m", "kvplan_nixl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment, check=False)


def test_the_demo_moves_requests_between_two_processes() -> None:
    """It says how far it is; every request arrives as it was computed, and its line has its size."""
    ran = run("demo")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    first = ["loading torch and NIXL", "starting a prefill process", "2 prefill and 3 decode workers are connected"]
    assert lines[:3] == first
    for line, tokens in zip(lines[3:], demo.REQUESTS, strict=True):
        num_bytes = tokens * demo.LAYERS * demo.HEADS * demo.DIM * 2 * 2
        assert f": {tokens} tokens, {num_bytes / 1e6:.1f} MB in " in line
        assert line.endswith("every value right")


def test_the_demo_is_short() -> None:
    """It is one file of at most 250 lines of 100 columns, to copy from."""
    assert len(Path(demo.__file__).read_text().splitlines()) <= 250


def test_usage() -> None:
    """Any other command is a usage error."""
    ran = run("dance")
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: python -m kvplan_nixl [-h] {demo,calibrate,doctor} ...\n")


@pytest.mark.parametrize("command", ["demo", "calibrate"])
def test_without_nixl(command: str) -> None:
    """Where NIXL is missing, one line says how to install it, after the one that both commands begin with."""
    code = "import sys; sys.modules['nixl'] = None; from kvplan_nixl.__main__ import main; sys.exit(main(sys.argv[1:]))"
    ran = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ran.returncode, ran.stdout) == (2, "loading torch and NIXL\n")
    assert ran.stderr.startswith("kvplan_nixl needs NIXL: pip install 'nixl>=1.5.1,<2'")
    assert ran.stderr.count("\n") == 1
