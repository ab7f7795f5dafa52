"""The group of all commands, and the end of each: an exit status.

An error is three lines on stderr, and one JSON document if that was asked for.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

import click

from kvplan._version import __version__
from kvplan.cli.advise import advise_command
from kvplan.cli.commands import COMMANDS
from kvplan.cli.console import echo_json, wrapped
from kvplan.cli.demo import demo_command
from kvplan.cli.models import models_command
from kvplan.cli.status import INTERRUPTED, PIPE_CLOSED
from kvplan.errors import KVPlanError

if importlib.util.find_spec("kvplan_nixl") is not None:
    from kvplan.cli.doctor import doctor_command
    from kvplan.cli.store import store_command
else:
    from kvplan.cli.without_nixl import doctor_command, store_command

__all__ = ["run"]

COMPLETION: Final = "_KVPLAN_COMPLETE"
"""The variable by which a shell asks for completions."""

HINTS: Final = MappingProxyType(
    {"the dtype": "kvplan converts no values: give both sides the same dtype="}
)
"""What to type where the sides of a pair differ in a field, if the error does not say it."""

EPILOG: Final = f"""\
\b
Exit status:
  0    done; where a command verifies, every byte is right
  1    bytes differ: verification failed; doctor: something is wrong
  2    refused: an error in the input, or in an offer
  {INTERRUPTED}  interrupted
  {PIPE_CLOSED}  output pipe closed (SIGPIPE)

'kvplan models' lists the models that come with kvplan, and what each caches.
"""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status, one of those in :data:`EPILOG`."""
    try:
        color = False if os.environ.get("NO_COLOR") else None
        return kvplan.main(list(arguments), "kvplan", standalone_mode=False, color=color) or 0
    except KVPlanError as error:
        return _refuse(error, arguments)
    except click.ClickException as error:
        return _refuse(_misread(error), arguments)
    except MemoryError:
        exhausted = KVPlanError(
            "MEMORY", "carry out the transfer", expected="enough free memory", got="none left"
        )
        return _refuse(exhausted, arguments)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit as ended:
        # click ends so with what a shell completes, and if its output pipe is closed
        return int(ended.code or 0) if COMPLETION in os.environ else PIPE_CLOSED


def _misread(error: click.ClickException) -> KVPlanError:
    """Return an error of click in kvplan's grammar; its suggestion becomes the hint."""
    # click writes sentences over several lines, with a suggestion at the end
    problem, _, suggestion = " ".join(error.format_message().split()).partition("Did you mean")
    got = re.sub("^(No such|Got) ", "", problem).strip(" .(")
    got = re.sub("^Missing ", "no ", got)
    got = got[:1].lower() + got[1:]
    # only an error of usage knows the command
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else "kvplan"
    expected = f"what '{command} --help' shows"
    hint = f"did you mean{suggestion.strip(').')}" if suggestion else ""
    return KVPlanError("NAME", "read the command line", expected=expected, got=got, hint=hint)


def _refuse(error: KVPlanError, arguments: Sequence[str]) -> int:
    """Print an error, and return the exit status."""
    if not error.hint:
        error = error.with_hint(HINTS.get(error.details.get("field", ""), ""))
    # only a terminal has a width that a line can be too long for
    lines = wrapped(error.lines) if sys.stderr.isatty() else error.lines
    click.echo("\n".join(lines), err=True)
    # the command line was perhaps not parsed, so its words are searched
    if "--json" in arguments:
        message = str(error).partition(": ")[2]
        echo_json({"code": error.code, "message": message, "details": dict(error.details)})
    return 2


@click.group(
    commands=[
        demo_command,
        *COMMANDS,
        advise_command,
        models_command,
        doctor_command,
        store_command,
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    epilog=EPILOG,
)
@click.version_option(__version__)
@click.pass_context
def kvplan(context: click.Context) -> int:
    """Plan how a request's KV cache moves between engines of any layout, and verify it byte for
    byte.
    """
    # kvplan alone prints its help, with exit status 0
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0
