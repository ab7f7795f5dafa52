"""The page on security: each line of its table of attacks has a test."""

from __future__ import annotations

import re

from tests.pages import ROOT

PAGE = (ROOT / "docs" / "SECURITY.md").read_text()
ROWS = [
    line for line in PAGE.partition("## What attackers can do")[2].partition("\n## ")[0].splitlines() if "|" in line
]


def test_each_attack_has_a_test() -> None:
    """The table names tests that exist, and no line is without one."""
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(ROWS) > 20
    for row in ROWS[2:]:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert {*named} <= tests, row
