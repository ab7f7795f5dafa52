"""Bars: on stderr, only on a terminal, and gone when all is done."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from kvplan.cli import demo
from kvplan.cli.bars import bar
from tests.conftest import Cli

COLOUR = re.compile(r"\x1b\[[\d;]*3[0-8]")
ERASED = "\x1b[2K"
QUICK = {
    "verify": ("verify", "qwen3-0.6b", "--tokens", "20"),
    "advise": ("advise", "qwen3-0.6b", "--tokens", "20"),
    "matrix": ("matrix", "qwen3-0.6b"),
    "demo": ("demo",),
}


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in place of stderr, in an environment that says nothing about colour.

    No fixture: between a test and what is set up for it, pytest puts a stderr of its own there.
    """
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_a_bar_is_drawn_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the bar shows what is done, in colour, and its line is erased in the end."""
    terminal = terminal_of(monkeypatch)
    with bar("verify") as progress:
        progress(0.5)
    text = terminal.getvalue()
    assert "verify" in text
    assert COLOUR.search(text)
    assert text.rpartition(ERASED)[2].strip("\r\n") == ""


def test_a_bar_is_erased_where_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error or an interrupt leaves no bar behind."""
    terminal = terminal_of(monkeypatch)
    with pytest.raises(KeyboardInterrupt), bar("verify"):
        raise KeyboardInterrupt
    assert terminal.getvalue().rpartition(ERASED)[2].strip("\r\n") == ""


def test_a_bar_respects_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR the bar has no colour."""
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    with bar("verify") as progress:
        progress(0.5)
    assert "verify" in terminal.getvalue()
    assert not COLOUR.search(terminal.getvalue())


@pytest.mark.parametrize("forced", [None, "1"])
def test_a_pipe_gets_no_bar(monkeypatch: pytest.MonkeyPatch, forced: str | None) -> None:
    """Where stderr is no terminal nothing is written, also where colour is forced."""
    if forced:
        monkeypatch.setenv("FORCE_COLOR", forced)
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with bar("verify") as progress:
        progress(0.5)
    assert pipe.getvalue() == ""


@pytest.mark.parametrize("name", QUICK)
def test_long_commands_have_a_bar(cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each command that may take long draws its bar on stderr, and stdout has the document alone."""
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(demo, "CASES", demo.CASES[4:5])
    run = cli(*QUICK[name], "--json")
    assert run.status == 0
    assert json.loads(run.out)
    assert name in terminal.getvalue()


def test_the_demo_has_one_bar_or_a_growing_table(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stdout is no terminal the demo has a bar; where it is, the table is what grows."""
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(demo, "CASES", demo.CASES[4:5])
    cli("demo")
    assert "demo" in terminal.getvalue()
    terminal.truncate(0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    cli("demo")
    assert terminal.getvalue() == ""


def all_of(leader: int) -> str:
    """All that is written to a pseudo-terminal, until nobody has it open."""
    found = b""
    with contextlib.suppress(OSError):  # what Linux makes of the end
        while more := os.read(leader, 1 << 12):
            found += more
    os.close(leader)
    return found.decode()


@pytest.mark.parametrize("no_color", [False, True])
def test_a_real_terminal_gets_the_bar(no_color: bool) -> None:
    """With stderr on a pseudo-terminal and stdout in a pipe, each gets its own."""
    leader, follower = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment = {**kept, "TERM": "xterm", "COLUMNS": "80", **({"NO_COLOR": "1"} if no_color else {})}
    command = [sys.executable, "-m", "kvplan", *QUICK["verify"], "--json"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=follower) as run:
        os.close(follower)
        text = all_of(leader)
        assert run.stdout is not None
        assert json.load(run.stdout)["verified"] is True
    assert "verify" in text
    assert bool(COLOUR.search(text)) is not no_color
    assert text.rpartition(ERASED)[2].strip("\r\n") == ""
