"""The commands ``doctor`` and ``store`` where kvplan_nixl, which does them, is not installed."""

from __future__ import annotations

from typing import Any, Final

import click

from kvplan.errors import KVPlanError


def _refusing(name: str) -> click.Command:
    """Return a command that says what to install, whatever it is asked."""

    @click.command(
        name,
        help="Needs kvplan_nixl: pip install kvplan-nixl",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> int:
        raise KVPlanError(
            "BACKEND",
            f"run kvplan {name}",
            expected="the package kvplan_nixl",
            got="none",
            hint="pip install kvplan-nixl; in a checkout, pip install . ./kvplan_nixl",
        )

    return command


doctor_command: Final[Any] = _refusing("doctor")
store_command: Final[Any] = _refusing("store")
