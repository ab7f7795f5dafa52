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


def test_the_comparison_has_the_numbers_of_the_second_opinion() -> None:
    """What it calls measured is on the page that a run writes."""
    comparison, page = (
        " ".join((ROOT / "docs" / name).read_text().split()) for name in ("comparison.md", "second-opinion.md")
    )
    reasons = re.findall(r"- ([\d,]+): ((?:(?! - [\d,]+: ).)*)", page)
    wrong = dict(re.findall(r"\*\*([^*]*), (\d+) pairs: theirs, wrong bytes", page))

    def refused(reason: str) -> int:
        return sum(int(number.replace(",", "")) for number, text in reasons if text.startswith(reason))

    (offloading,) = re.findall(r"vLLM offloading \| ([\d,]+) \| ([\d,]+) \| 0 \| ([\d,]+) ", page)
    again = {*re.findall(r"(\d+) pairs: theirs, right bytes more often", page)}
    tp = refused("Remote tensor parallel size") + refused("Local tensor parallel size")
    for text in (
        f"`TransferTopology.tp_ratio`, 0.33.0). Measured: {tp} pairs refused",
        f"`block_size_ratio`, 0.33.0). Measured: {refused('Local block size'):,} pairs refused",
        f"Measured: {wrong['vLLM NIXL (pull)']} accepted pairs",
        f"of {offloading[0]} pairs it mapped {offloading[2]}",
        f"stores the other {offloading[1]}",
        f"equal on both sides. Measured: {refused('Page size mismatch')} pairs refused",
        f"Measured: {wrong['SGLang NIXL']} such pairs with each engine",
        f"Measured: {again.pop()} pairs with each engine",
    ):
        assert text in comparison
    assert wrong["SGLang NIXL"] == wrong["SGLang Mooncake"]
    assert not again
