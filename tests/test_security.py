"""The page on security: each line of its table of attacks has a test."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from kvplan import Budget
from kvplan.protocol import leases, rooms, system
from kvplan_nixl import proxy
from kvplan_nixl.serving import access, addresses, http
from kvplan_nixl.sglang import bootstrap
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


def text_of(value: float) -> str:
    """A number as the page writes it, in GiB or MiB where it is a round one of bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:,.0f}"


def constant(path: str, name: str) -> Any:
    """A number of a module that needs an engine to be imported."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value:
            return ast.literal_eval(node.value)
    raise AssertionError(name)


LIMITS = {
    "`RANGE` above {} by the estimate": Budget.DEFAULT_BYTES,
    "have {} addresses asked at a time": rooms.MAX_SERVERS,
    "at {} servers at most": constant("kvplan_nixl/sglang/prefill.py", "MAX_PUBLISHERS"),
    "a lease has {} readers": leases.MAX_READERS,
    "it keeps {}, in 10 MiB": access.MAX_NONCES,
    "push a real room out by {} others": bootstrap.MAX_ROOMS,
    "it keeps {} of memory in all, for twice a lease": bootstrap.MAX_KEPT_BYTES,
    "{} connections wait": http.BACKLOG,
    "with it, {} in all": http.MAX_UNREAD_BYTES,
    "a question has {} s |": http.CONNECTION_S,
    "refused by its head above {}": system.MAX_ANSWER_BYTES,
    "lookups have {} threads at most": addresses.MAX_LOOKUPS,
    "{} of them stay, for a minute": proxy.MAX_IDLE,
    "status 413 above {}": proxy.MAX_BODY_BYTES,
    "503 above {} of all bodies": proxy.MAX_HELD_BYTES,
    "status 400 above {}, or": proxy.MAX_PROMPTS,
}


@pytest.mark.parametrize("sentence", LIMITS)
def test_the_table_has_the_limits_of_the_code(sentence: str) -> None:
    """As they are, in the column of what holds now or in that of what an attacker would do."""
    assert sentence.format(text_of(LIMITS[sentence])) in "\n".join(ROWS)


def test_times_and_parts_are_those_of_the_code() -> None:
    """Which the table has in words."""
    assert (leases.MAX_LEASE_S, proxy.IDLE_S, proxy.MAX_PARTS) == (3600, 60, 1 << 20)
    for words in ("`max_lease_s`, an hour", "for a minute", "a million brackets and commas"):
        assert words in "\n".join(ROWS)
