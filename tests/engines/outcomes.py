"""The outcomes of real engines, and their tables in docs/engines.md: ``python -m tests.engines.outcomes`` writes them.

``outcomes.json`` has a table for each marker of the page. A row has the text of each cell and all runs that gave it,
each by its commit, or the first and the last of several, and its date. The page shows the last one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

OUTCOMES: Final = Path(__file__).with_name("outcomes.json")
PAGE: Final = Path(__file__).parents[2] / "docs" / "engines.md"
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
    columns = [column for column in rows[0] if column not in ("row", "runs")]
    lasts = [row["runs"][-1] for row in rows]
    heads = [table["first column"], *columns]
    cells = [[row["row"], *(row[column] for column in columns)] for row in rows]
    run = lasts[0]
    if len({*lasts}) > 1:
        run = "as each row says"
        heads.append("last run")
        cells = [[*row, last] for row, last in zip(cells, lasts, strict=True)]
    runs = "; ".join(f"{column} {when}" for column, when in {"kvplan": run, **table.get("other columns", {})}.items())
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)]
    return "\n".join(["", *lines, "", f"Runs: {runs}. Versions: {table['versions']}.", "", ""])


if __name__ == "__main__":
    PAGE.write_text(written())
