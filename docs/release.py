"""What a release knows of itself: where the project is, and a README whose links work anywhere.

The build runs this (``pyproject.toml``). ``KVPLAN_URL`` says where the repository of the release is. Links of the
README are relative in a checkout, and lead to that repository in a release. Without it, a release has no addresses, and
the texts of links alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = r"(!\[[^\]]*\]\()(?=[^):#]+\))"
LINK = r"(?<!!)(\[[^\]]*\]\()(?=[^):#]+[)#])"


def absolute(readme: str, repository: str) -> str:
    """Return a page whose relative links and images are in a repository."""
    readme = re.sub(IMAGE, rf"\1{repository}/raw/HEAD/", readme)
    return re.sub(LINK, rf"\1{repository}/blob/HEAD/", readme)


def without_links(readme: str) -> str:
    """Return a page without relative links and images."""
    readme = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)", "", readme)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", readme)


class Release(MetadataHookInterface):
    """Adds the README and the project's addresses to the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them."""
        repository = os.environ.get("KVPLAN_URL", "").rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = absolute(text, repository) if repository else without_links(text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if not repository:
            return
        metadata["urls"] = {
            "Repository": repository,
            "Documentation": f"{repository}/blob/HEAD/README.md",
            "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
