"""The page `docs/museum.md`, from the exhibits: `python -m tests.museum.page` writes it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvplan.errors import CODES
from kvplan.verification import PROMISES
from tests.museum.exhibit import Exhibit
from tests.museum.outside import OUTSIDE, Outside

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parent.parent / "docs" / "museum.md"
THREAD: Final = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")

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

TOP: Final = """# The museum

Known faults of KV cache transfers, from public threads and released code. Each exhibit is a test in `tests/museum`: it
rebuilds the fault, shows what catches it, and verifies kvplan's own plan. "Caught by" says how:
"""

WAYS: Final = {
    "verify": "kvplan executes the wrong plan in fake memory, and reports these promises as broken",
    "refused": "kvplan, or its fake memory, raises a KVPlanError with this code and moves no wrong bytes",
    "completions": "the notices of a request's end differ from those that the plans list",
    "tails": "bytes in the request's blocks that nothing writes are not zeroed, though `kvplan.tails` lists them",
    "cost": "right bytes in more descriptors than needed, in the same layout or in a better one",
    "accepted": "a valid pair or request was refused or failed; kvplan plans it, verified",
}
"""The words of the last column."""


def exhibits() -> list[Exhibit]:
    """All exhibits, in the order of the page."""
    modules = [path.stem for path in HERE.glob("test_*.py")]
    members = [value for name in modules for value in vars(importlib.import_module(f"tests.museum.{name}")).values()]
    return sorted((value.exhibit for value in members if hasattr(value, "exhibit")), key=_place)


def _place(item: Exhibit | Outside) -> tuple[str, int]:
    return item.number[0], int(item.number[1:])


def page() -> str:
    """The text of the page."""
    shown = exhibits()
    parts = [TOP, *_legend(shown)]
    for letter, title in FAMILIES.items():
        rows = [one for one in shown if one.number[0] == letter]
        if rows:
            parts += ["", f"## {title}", "", *_table("caught by", ((one, f"`{one.caught_by}`") for one in rows))]
    parts += ["", "## Outside", "", "Faults that no plan can prevent. Others have to prevent them.", ""]
    parts += _table("who takes care", ((one, one.keeper) for one in sorted(OUTSIDE, key=_place)))
    return "\n".join(parts) + "\n"


def _legend(shown: Iterable[Exhibit]) -> list[str]:
    """The ways in which exhibits are caught, each with the codes that it has there."""
    found: dict[str, set[str]] = {}
    for one in shown:
        way, _, codes = one.caught_by.partition(": ")
        found.setdefault(way, set()).update(filter(None, codes.split(", ")))
    meanings = {"verify": PROMISES, "refused": CODES}
    lines = []
    for way, text in WAYS.items():
        if way in found:
            lines.append(f"- `{way}`: {text}" + ("." if way not in meanings else ":"))
            lines += [f"    - `{code}`: {text}" for code, text in meanings.get(way, {}).items() if code in found[way]]
    return lines


def _table(last: str, rows: Iterable[tuple[Exhibit | Outside, str]]) -> list[str]:
    lines = [f"| | fault | known from | {last} |", "|---|---|---|---|"]
    return lines + [f"| {one.number} | {one.bug} | {links(one.reference)} | {text} |" for one, text in rows]


def links(reference: str) -> str:
    """A reference with its GitHub threads as links.

    >>> links("ai-dynamo/nixl#252, released")
    '[ai-dynamo/nixl#252](https://github.com/ai-dynamo/nixl/issues/252), released'
    """
    return THREAD.sub(r"[\1#\2](https://github.com/\1/issues/\2)", reference)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
