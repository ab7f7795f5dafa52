"""``python -m kvplan_nixl``, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.pages import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m kvplan_nixl``."""
    environment = {**os.environ, "NIXL_LOG_LEVEL": "WARN"}
    command = [sys.executable, "-m", "kvplan_nixl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment, check=False)


def test_usage() -> None:
    """Any other command is a usage error."""
    ran = run("dance")
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: python -m kvplan_nixl [-h] {calibrate,doctor} ...\n")


def test_without_nixl() -> None:
    """Where NIXL is missing, one line says how to install it."""
    code = "import sys; sys.modules['nixl'] = None; from kvplan_nixl.__main__ import main; sys.exit(main(sys.argv[1:]))"
    ran = subprocess.run(
        [sys.executable, "-c", code, "calibrate"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "loading torch and NIXL\n")
    assert ran.stderr.startswith("kvplan_nixl needs NIXL: pip install 'nixl>=1.5.1,<2'")
    assert ran.stderr.count("\n") == 1
