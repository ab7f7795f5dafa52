"""The command line as a fixture: it runs in this process."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from kvplan.cli import main


@attrs.frozen
class Outcome:
    """The exit status of one run of the command line, and what it wrote to stdout and stderr."""

    status: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line as a function of its arguments, in 120 columns whatever the terminal of the tests has."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        status = main(arguments)
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    return run
