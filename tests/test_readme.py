"""README: its Python runs, and its commands print and exit as it says."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import pytest

from kvplan.models.layouts import ORDERS
from kvplan.models.model import Model
from tests.conftest import Cli
from tests.engines import outcomes
from tests.pages import ROOT, commands, fences, wrong_command, wrong_prints

PAGE = ROOT / "README.md"
README = PAGE.read_text()
COMMANDS = list(commands(PAGE))

DIFFERENCES = {
    "tensor parallelism": [
        ("llama-3.1-8b", "tp=2", "tp=3"),
        ("llama-3.1-8b", "tp=16", "tp=4"),
        ("granite-4.0-h-tiny", "tp=4", "tp=2"),
    ],
    "pipeline parallelism": [("llama-3.1-8b", "pp=2", "pp=3"), ("granite-4.0-h-tiny", "stages=1+3", "pp=2,tp=2")],
    "context parallelism": [
        ("llama-3.1-8b", "pcp=2,dcp=2,interleave=16", "pcp=3,dcp=3"),
        ("llama-3.1-8b", "tp=16,dcp=2", "tp=2"),
    ],
    "block size": [("llama-3.1-8b", "block=48", "block=32"), ("granite-4.0-h-tiny", "block=16", "block=64")],
    "axis order": [("llama-3.1-8b", f"layout={a}", f"layout={b}") for a, b in pairwise(ORDERS)],
    "K and V": [("llama-3.1-8b", "kv=content", "kv=split"), ("granite-4.0-h-tiny", "kv=axis", "kv=content")],
    "layers": [
        ("llama-3.1-8b", "layout=LBHNC", "layout=BLHNC"),
        ("granite-4.0-h-tiny", "layout=BHLNC", "layout=LHBNC"),
    ],
    "pools": [
        ("granite-4.0-h-tiny", "shared=1", "shared=0"),
        ("granite-4.0-h-tiny", "shared=1,tp=2", "shared=1,tp=4,layout=BLHNC"),
    ],
    "padding, kernel blocks": [
        ("llama-3.1-8b", "pad=0", "pad=4096"),
        ("llama-3.1-8b", "block=64,kernel=16", "block=64"),
    ],
    "scales": [
        ("llama-3.1-8b", "scales=inline", "scales=page"),
        ("granite-4.0-h-tiny", "scales=page", "scales=region,tp=2"),
    ],
    "caches": [("deepseek-v3.2", "tp=4", "tp=2,block=64"), ("granite-4.0-h-tiny", "tp=1", "tp=2")],
    "convolution states": [("granite-4.0-h-tiny", "conv=SD", "conv=DS")],
}
"""Engines of each row of README's table that differ in this; ``direction`` is the Python block's and the tutorial's."""


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


def test_each_difference_of_the_readme_has_engines() -> None:
    """The table has the rows that the next test verifies, and that of the direction."""
    table = README.partition("| | source and destination may differ in |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (\w.*?) \|", table, re.MULTILINE) == [*DIFFERENCES, "direction"]
    assert (len(ORDERS), "the six orders of a `layout`" in table) == (6, True)


@pytest.mark.parametrize("model, source, destination", [pair for pairs in DIFFERENCES.values() for pair in pairs])
def test_engines_may_differ_as_the_readme_says(cli: Cli, model: str, source: str, destination: str) -> None:
    """A request moves between them, and every byte is right."""
    run = cli("verify", model, "--layers", "4", "--src", source, "--dst", destination)
    assert (run.status, run.err) == (0, "")


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
