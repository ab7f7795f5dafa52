"""README: its Python runs, and its commands print and exit as it says."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from kvplan.models.model import Model
from tests.conftest import Cli
from tests.engines import outcomes
from tests.pages import ROOT, commands, fences, wrong_command, wrong_prints

PAGE = ROOT / "README.md"
README = PAGE.read_text()
COMMANDS = list(commands(PAGE))


def test_the_python_prints_what_the_readme_says() -> None:
    """The Python blocks run in order, as one program, and each prints the text block that follows it."""
    assert [kind for kind, _ in fences(README)].count("python") > 1
    assert wrong_prints(PAGE) == []


@pytest.mark.parametrize("command, output, status", COMMANDS)
def test_a_command_does_what_the_readme_says(cli: Cli, command: str, output: str, status: int) -> None:
    """Each command of a console block exits with its status and prints its lines, where the README lies."""
    assert wrong_command(cli, command, output, status) == ""


def test_the_readme_has_commands_of_both_kinds() -> None:
    """The console blocks show a success and a refusal, so that the test above has both to check."""
    assert {status for _, _, status in COMMANDS} >= {0, 2}


def test_the_readme_tells_exit_statuses_as_the_help_does(cli: Cli) -> None:
    """Each status that the README names is one that ``kvplan --help`` tells, in the same word."""
    told = " ".join(cli("--help").out.partition("Exit status:")[2].split())
    (named,) = re.findall(r"^Exit statuses: (.*?)\.", README, re.MULTILINE)
    assert len(named.split(", ")) == 5
    for status in named.split(", "):
        assert status in told


def test_the_readme_names_every_shipped_model() -> None:
    """The list of shipped models is the one that the package has, in its order."""
    (listed,) = re.findall(r"^Shipped models: (.*?)\.$", README, re.DOTALL | re.MULTILINE)
    assert tuple(re.split(r",\s+", listed)) == Model.names()


def test_the_readme_counts_the_verdicts_of_real_engines() -> None:
    """README, which is the site's first page too, has the numbers of the table of vLLM's pairs."""
    rows = [row for name in ("pairs", "whose bytes") for row in outcomes.tables()[name]["rows"]]
    columns = "kvplan", "nixl", "nothing"
    ours, theirs, control = ([row[column].partition(":")[0].split()[0] for row in rows] for column in columns)
    number, run = Counter(theirs), [verdict for verdict in theirs if verdict.isalpha()]
    assert ({*ours}, {*control}) == ({"same"}, {"different"})
    unfinished = number["failed"] + number["crashed"] + number["void"]
    table = [
        ("tested", len(rows), len(run), len(rows)),
        ("right tokens in all requests", len(rows), number["same"], 0),
        ("silently wrong tokens", 0, number["different"], len(rows)),
        ("failed, crashed or void", 0, unfinished, 0),
    ]
    for row in table:
        assert f"| {' | '.join(map(str, row))} |" in README
