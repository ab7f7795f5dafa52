"""The page of model types shows the families, and what the judge has found of each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvplan.models import FAMILIES
from tests.models import page
from tests.pages import ROOT

GUIDE = (ROOT / "docs" / "how-to" / "models.md").read_text()


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.models.page` would change nothing."""
    assert page.PAGE.read_text() == page.page()


def test_each_family_has_a_verdict() -> None:
    """The judge has looked at each type once at TP 1, and at 2 and 3 where that is equal; none is wrong."""
    verdicts = page.verdicts()
    assert {*verdicts} == {*FAMILIES, "bailing_hybrid/BailingMoeV2_5ForCausalLM"}
    for results in verdicts.values():
        assert len(results) == (3 if results[0][0] == "equal" else 1)
        assert {result for result, _ in results} <= {"equal", "not loaded", "not compared"}


def test_the_guide_counts_the_verdicts() -> None:
    """It says how many models the judge knows, and how many are equal at each size of TP."""
    verdicts = page.verdicts()
    equal: Counter[int] = Counter()
    for results in verdicts.values():
        equal.update(ranks for ranks, (result, _) in enumerate(results, 1) if result == "equal")
    counts = (
        f"Of {len(verdicts)}, {equal[1]} are equal at TP 1, {equal[2]} at TP 2 and {equal[3]} at TP 3; none is wrong"
    )
    assert counts in " ".join(GUIDE.split())


def test_what_the_judge_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of verdicts is as the judge writes it."""
    before, verdicts = page.VERDICTS.read_text(), page.verdicts()
    monkeypatch.setattr(page, "VERDICTS", tmp_path / "verdicts.json")
    page.write_verdicts(verdicts)
    assert page.VERDICTS.read_text() == before
