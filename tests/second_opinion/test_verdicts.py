"""The table of verdicts: it has the kit's cases, and none of its cells says that kvplan is wrong."""

from __future__ import annotations

import re

from kvplan.testing.conformance import cases
from tests.pages import ROOT

ROWS = [
    [cell.strip("* ") for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "verdicts.md").read_text().splitlines()
    if line.startswith("|")
]


def test_the_table_has_the_cases_of_the_kit() -> None:
    head, _, *rows = ROWS
    assert [row[0] for row in rows] == [*cases("LBHNKD")]
    assert len(head) == 9
    assert {row[head.index("kvplan")] for row in rows} == {"right"}
    assert {word for row in rows for word in row[1:]} == {"right", "wrong", "repeated", "refused", "not run"}


def test_each_wrong_cell_has_a_command() -> None:
    head, _, *rows = ROWS
    wrong = {
        (re.sub(r" [\w.]+$", "", peer), row[0])
        for row in rows
        for peer, word in zip(head[1:], row[1:], strict=True)
        if word in {"wrong", "repeated"}
    }
    page = (ROOT / "docs" / "verdicts.md").read_text()
    assert {*re.findall(r"--peer '(.*)' --case '(.*)'`", page)} == wrong
