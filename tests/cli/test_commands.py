"""What all commands have in common: examples in their help, one JSON document, exit statuses."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvplan import encode
from kvplan.cli import demo, matrix
from kvplan.cli.commands import kvplan
from kvplan.cli.sides import Side
from tests.conftest import Cli
from tests.small import engine

ARGUMENTS = {
    "advise": ("qwen3-0.6b", "--tokens", "20"),
    "check-offer": ("offer.json",),
    "demo": (),
    "explain": ("qwen3-0.6b",),
    "matrix": ("qwen3-0.6b",),
    "show": ("qwen3-0.6b",),
    "verify": ("qwen3-0.6b", "--tokens", "20"),
}


def examples(name: str) -> list[list[str]]:
    """The arguments of each example in a command's help."""
    help_text = kvplan.commands[name].get_help(click.Context(kvplan.commands[name], info_name=name))
    lines = [line.strip() for line in help_text.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith(f"kvplan {name}")]


@pytest.mark.parametrize("name", kvplan.commands)
def test_every_help_has_an_example(name: str) -> None:
    """Each command's help shows a line to type, which the command can read."""
    assert examples(name)
    for arguments in examples(name):
        context = kvplan.commands[name].make_context(name, arguments)
        for side in ("src", "dst"):
            Side.parse(context.params.get(side, ""), side)


@pytest.mark.parametrize("name", kvplan.commands)
def test_every_command_prints_one_json_document(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With --json each command writes one JSON object to stdout, nothing else and nothing to stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "CASES", demo.CASES[4:5])
    monkeypatch.setattr(matrix, "CASES", matrix.CASES[:2])
    Path("offer.json").write_bytes(encode(engine()[0]))
    run = cli(name, *ARGUMENTS[name], "--json")
    assert (run.status, run.err) == (0, "")
    assert isinstance(json.loads(run.out), dict)


@pytest.mark.parametrize("name", kvplan.commands)
def test_every_command_refuses_in_json(cli: Cli, name: str) -> None:
    """With --json a refusal is one JSON object too, whatever the command."""
    run = cli(name, "--json", "--frob")
    assert run.status == 2
    assert json.loads(run.out)["code"] == "NAME"


def test_the_help_tells_exit_statuses(cli: Cli) -> None:
    """Behind the commands stand all exit statuses, and what they mean."""
    _, _, told = cli("--help").out.partition("Exit status:\n")
    assert [int(line.split()[0]) for line in told.partition("\n\n")[0].splitlines()] == [0, 1, 2, 130, 141]


@pytest.mark.parametrize(
    "arguments", [("explain", "qwen3-0.6b", "--detail", "rows"), ("show", "qwen3-0.6b"), ("matrix", "--help")]
)
def test_a_closed_pipe_is_no_error(arguments: tuple[str, ...]) -> None:
    """Where nobody reads stdout, a command ends with a status of its own, and says nothing."""
    command = [sys.executable, "-m", "kvplan", *arguments]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.close()
    assert run.stderr is not None
    with run.stderr as errors:
        assert errors.read() == b""
    assert run.wait() == 141


def test_an_exit_of_a_library_is_a_closed_pipe(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What click and rich exit with where a pipe is closed is not taken for bytes that differ."""

    def closed(*args: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(demo, "trials", closed)
    assert cli("demo").status == 141
