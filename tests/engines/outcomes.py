"""The outcomes of real engines, and their tables in docs/engines.md: ``python -m tests.engines.outcomes`` writes them.

``outcomes.json`` has a table for each marker of the page. A row has the text of each cell and the recorded runs
that gave it, each by its date, most with a commit, or the first and the last of several. The page shows the dates of
the last ones, and the control's outcome once per table. It leaves out ``before``: what kvplan did before a row's
problem was solved.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

OUTCOMES: Final = Path(__file__).with_name("outcomes.json")
PAGE: Final = Path(__file__).parents[2] / "docs" / "engines.md"
VERSIONS: Final = ("vLLM 0.32.0, nixl 1.5.1, torch 2.13.0", "SGLang 0.5.23, vLLM 0.32.0, nixl 1.5.1, torch 2.13.0")
"""What the page says once of all tables, with and without SGLang."""

NOT_RUN: Final = "\N{EN DASH}"
COMMIT: Final = re.compile(r"^[0-9a-f]{7} ")
MARKED: Final = re.compile(r"(?<=<!-- outcomes: )(.*?)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def tables() -> dict[str, Any]:
    """All tables by name."""
    found: dict[str, Any] = json.loads(OUTCOMES.read_text())
    return found


def written() -> str:
    """The page with the tables as the file has them."""
    found = tables()
    return MARKED.sub(lambda marker: f"{marker[1]}{marker[2]}{_text(found[marker[1]])}", PAGE.read_text())


def _text(table: dict[str, Any]) -> str:
    rows = table["rows"]
    columns = [column for column in rows[0] if column not in ("row", "runs", "before", "nothing")]
    dates = sorted(row["runs"][-1].split()[-1] for row in rows)
    run = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    others = {name: COMMIT.sub("", when) for name, when in table.get("other columns", {}).items() if name != "before"}
    runs = "; ".join(f"{column} {when}" for column, when in {"kvplan": run, **others}.items())
    lines = _lines(table["first column"], columns, rows)
    versions = "" if table["versions"] in VERSIONS else f" Versions: {table['versions']}."
    return "\n".join(["", *lines, "", f"{_control(rows)}Runs: {runs}.{versions}", "", ""])


def _lines(first: str, columns: list[str], rows: list[dict[str, Any]]) -> list[str]:
    """A table, or a list of the rows where kvplan's outcome is all that they say, and always the same."""
    outcomes = {row["kvplan"] for row in rows} if columns == ["kvplan"] else set()
    if len(outcomes) == 1:
        names = ", ".join(f"`{row['row']}`" for row in rows)
        return [f"kvplan: *{outcomes.pop()}* in each of {len(rows)} rows: {names}."]
    cells = [[first, *columns], ["---"] * (len(columns) + 1)]
    cells += [[row["row"], *(row[column] for column in columns)] for row in rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def _control(rows: list[dict[str, Any]]) -> str:
    """What decode generates where nothing is transferred, of a table that has this control."""
    found = {row["row"]: row["nothing"] for row in rows if "nothing" in row}
    outcomes = {*found.values()} - {NOT_RUN}
    if len(outcomes) != 1:
        return ""
    missing = [name for name, outcome in found.items() if outcome == NOT_RUN]
    text = f"Control: {outcomes.pop()}"
    return f"{text}; not run for *{'*, *'.join(missing)}*. " if missing else f"{text} in every row. "


if __name__ == "__main__":
    PAGE.write_text(written())
