"""What mkdocs does with pages (``hooks`` in ``mkdocs.yml``): the first is the README, and guides are found first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text: that of the README for ``index.md``, with links from this folder.

    A search for words of a guide would otherwise find entries of the reference, whose short texts
    count more for each word.
    """
    name = page.file.src_uri
    if name.startswith("reference/") or name == "known-bugs.md":
        page.meta["search"] = {"boost": 0.2}
    return README.read_text(encoding="utf-8").replace("](docs/", "](") if name == "index.md" else markdown
