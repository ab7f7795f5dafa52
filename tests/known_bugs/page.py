"""Generates `docs/known-bugs.md` from the tests: `python -m tests.known_bugs.page` writes it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import attrs

from tests.known_bugs.known_bug import KnownBug

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parent.parent / "docs" / "known-bugs.md"
THREAD: Final = re.compile(r"([\w.-]+)/([\w.-]+)#(\d+)")


@attrs.frozen
class Outside:
    """A bug that no test here reproduces. ``keeper`` has to prevent it."""

    number: str
    bug: str
    reference: str
    keeper: str


FAULTS = (HERE / "outside.txt").read_text().split("\n\n")[1:]
OUTSIDE: Final = tuple(Outside(*fault.splitlines()) for fault in FAULTS)

FAMILIES: Final = {
    "A": "Heads",
    "B": "Layouts",
    "C": "Block sizes and pools",
    "D": "Positions",
    "E": "States",
    "F": "Layers",
    "G": "Context parallel",
    "H": "Completions",
    "I": "Integers",
    "J": "Descriptors",
    "K": "Trust",
}

TOP: Final = """# Known bugs

Bugs of KV cache transfers, from public threads and released code. Each row is a test in `tests/known_bugs`: it
reproduces the bug, asserts what catches it, and verifies the plan that kvplan makes instead. The last column says what
catches it:
"""

WAYS: Final = {
    "verify": "[`verify`](how-to/debugging.md), which executes the wrong plan in fake memory, reports these checks",
    "refused": "kvplan, or its fake memory, raises a KVPlanError with this [code](reference/errors.md)",
    "completions": "the workers that plans have rows for differ from those that the faulty code notifies",
    "tails": "`kvplan.tails` lists bytes of the request's blocks that the faulty code did not zero",
    "cost": "the plan's cost shows that fewer descriptors move the right bytes, in the same layout or in a better one",
    "accepted": "no bytes were wrong: a valid pair or request was refused or failed; kvplan plans and verifies it",
}
"""The words of the last column."""


def known_bugs() -> list[KnownBug]:
    """All known bugs, in the order of the page."""
    modules = [importlib.import_module(f"tests.known_bugs.{path.stem}") for path in HERE.glob("test_*.py")]
    members = [value for module in modules for value in vars(module).values()]
    return sorted((value.known_bug for value in members if hasattr(value, "known_bug")), key=_place)


def _place(item: KnownBug | Outside) -> tuple[str, int]:
    return item.number[0], int(item.number[1:])


def page() -> str:
    """The text of the page."""
    shown = known_bugs()
    parts = [TOP, *_legend(shown)]
    for letter, title in FAMILIES.items():
        rows = [one for one in shown if one.number[0] == letter]
        if rows:
            parts += ["", f"## {title}", "", *_table("caught by", ((one, f"`{one.caught_by}`") for one in rows))]
    parts += ["", "## Outside", "", "No plan can prevent these bugs.", ""]
    parts += _table("who must prevent it", ((one, one.keeper) for one in sorted(OUTSIDE, key=_place)))
    return "\n".join(parts) + "\n"


def _legend(shown: Iterable[KnownBug]) -> list[str]:
    """The ways in which bugs are caught."""
    found = {one.caught_by.partition(": ")[0] for one in shown}
    return [f"- `{way}`: {text}" for way, text in WAYS.items() if way in found]


def _table(last: str, rows: Iterable[tuple[KnownBug | Outside, str]]) -> list[str]:
    lines = [f"| | bug | known from | {last} |", "|---|---|---|---|"]
    return lines + [f"| {one.number} | {one.bug} | {links(one.reference)} | {text} |" for one, text in rows]


def links(reference: str) -> str:
    """Turn the GitHub threads in a reference into links.

    >>> links("ai-dynamo/nixl#252, released")
    '[nixl#252](https://github.com/ai-dynamo/nixl/issues/252), released'
    """
    return THREAD.sub(r"[\2#\3](https://github.com/\1/\2/issues/\3)", reference)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
