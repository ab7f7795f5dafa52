"""The site's first page, which is the README: mkdocs runs this (``hooks`` in ``mkdocs.yml``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text: that of the README for ``index.md``, with links from this folder."""
    return README.read_text(encoding="utf-8").replace("](docs/", "](") if page.file.src_uri == "index.md" else markdown
