"""The command ``doctor``. It imports no NIXL: ``python -m kvplan_nixl doctor`` does the work."""

from __future__ import annotations

import subprocess
import sys

import click


@click.command("doctor", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor_command(arguments: tuple[str, ...]) -> int:
    """Check what serving needs on this machine.

    Versions, plugins, NIXL's backends, the network, and a transfer between two processes.

    \b
    kvplan doctor
    """
    program = [sys.executable, "-m", "kvplan_nixl", "doctor", *arguments]
    return subprocess.run(program).returncode
