"""What commands print and exit with: the sessions of the page beside this file, and refusals as JSON."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.pages import commands, differs

SESSIONS = list(commands(Path(__file__).with_name("sessions.md")))
REFUSED = [command for command, _, status in SESSIONS if status and not re.search("--json| show ", command)]
UNPRINTABLE = ["kvplan verify 'a\0b'", "kvplan verify 'a\nb'", "kvplan check-offer 'a\0b'"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command, output, status", SESSIONS)
def test_a_command_prints_what_the_page_says(cli: Cli, command: str, output: str, status: int) -> None:
    """Stdout and stderr are the lines on the page, and the exit status is 0 or the one that it names."""
    run = cli(*shlex.split(command)[1:])
    assert differs(output, run.out + run.err) == ""
    assert run.status == status
    assert not (run.out and run.err) or "--json" in command


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", [*REFUSED, *UNPRINTABLE])
def test_a_refusal_is_three_lines_or_one_object(cli: Cli, command: str) -> None:
    """A refusal says on stderr what, got and expected, and what to do; with --json, also one object on stdout."""
    run, with_json = cli(*shlex.split(command)[1:]), cli(*shlex.split(command)[1:], "--json")
    document = json.loads(with_json.out)
    assert with_json.status == run.status
    if run.err:
        assert re.fullmatch(r"[A-Z]+: cannot .+\n  got .+\n  .+\n", run.err)
        assert (with_json.err, set(document)) == (run.err, {"code", "message", "details"})
        assert f"{document['code']}: {document['message']}\n".startswith(f"{run.err.splitlines()[0]}: expected ")
