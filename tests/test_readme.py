"""README: its Python runs, and its commands print and exit as it says."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvplan.models import Model
from tests.conftest import Cli

README = (Path(__file__).parent.parent / "README.md").read_text()
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
MATRICES = re.findall(r"^<!-- kvplan matrix (\S+) -->\n\n(.*?)\n<!-- end -->$", README, re.DOTALL | re.MULTILINE)
CONSOLES = [text for kind, text in FENCES if kind == "console"]


def differs(expected: str, got: str) -> str:
    """What differs, ``...`` standing for anything; empty where nothing does."""
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS
    if checker.check_output(expected, got, flags):
        return ""
    return checker.output_difference(doctest.Example("", expected), got, flags)


def test_the_python_prints_what_the_readme_says() -> None:
    """The Python blocks run in order, as one program, and each prints the text block that follows it.

    Where NIXL is not installed, the blocks that need it are left out.
    """
    namespace: dict[str, Any] = {}
    programs = [i for i, (kind, _) in enumerate(FENCES) if kind == "python"]
    assert programs
    for i in programs:
        if "kvplan_nixl" in FENCES[i][1] and find_spec("nixl") is None:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(FENCES[i][1], "README.md", "exec"), namespace)
        assert FENCES[i + 1][0] == "text"
        assert differs(FENCES[i + 1][1], printed.getvalue()) == ""


def commands(console: str) -> list[tuple[str, str, int]]:
    """Each command of a console block, what it prints and its exit status: 0, or what ``echo $?`` after it says."""
    found: list[tuple[str, str, int]] = []
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        if line == "echo $?":
            found[-1] = (*found[-1][:2], int(output))
        else:
            found.append((line, output, 0))
    return found


@pytest.mark.parametrize("command, output, status", [run for console in CONSOLES for run in commands(console)])
def test_a_command_does_what_the_readme_says(cli: Cli, command: str, output: str, status: int) -> None:
    """Each command of a console block exits with its status and prints its lines."""
    program, *arguments = shlex.split(command)
    assert program == "kvplan"
    run = cli(*arguments)
    assert run.status == status
    assert differs(output, run.out + run.err) == ""


def test_the_readme_has_commands_of_both_kinds() -> None:
    """The console blocks show a success and a refusal, so that the test above has both to check."""
    assert {status for console in CONSOLES for _, _, status in commands(console)} >= {0, 2}


@pytest.mark.parametrize("model, printed", MATRICES)
def test_a_table_is_what_the_matrix_prints(cli: Cli, model: str, printed: str) -> None:
    """Each generated table of the README is what ``kvplan matrix`` prints today, character by character."""
    run = cli("matrix", model)
    assert (run.status, run.err) == (0, "")
    assert printed == run.out


def test_the_readme_has_tables_of_both_kinds() -> None:
    """One generated table is of attention alone, and one of a model with states."""
    assert {"state" in Model.shipped(model).groups for model, _ in MATRICES} == {True, False}


def test_the_readme_names_every_shipped_model() -> None:
    """The list of shipped models is the one that the package has, in its order."""
    (listed,) = re.findall(r"^Shipped models: (.*?)\.$", README, re.DOTALL | re.MULTILINE)
    assert tuple(re.split(r",\s+", listed)) == Model.names()
