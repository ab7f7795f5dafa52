"""docs/handshake.md names every key and limit that the code has. Its Python is run by tests/test_docs.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplan.describe import _overlap as overlap
from kvplan.handshake import messages, schema
from kvplan.handshake.schema import Columns, ListOf, Node, Record

TEXT = (Path(__file__).parents[2] / "docs" / "handshake.md").read_text()
LIMITS = re.findall(r"^\| (\d+) \| ", TEXT, re.MULTILINE)


def keys(node: Node) -> Iterator[str]:
    """Every key that a message may have, outer keys first."""
    if isinstance(node, ListOf):
        yield from keys(node.item)
    elif isinstance(node, Record | Columns):
        yield from node.fields
        for each in node.fields.values():
            yield from keys(each)


def test_every_key_is_explained() -> None:
    """The table of the message has each key of the schema, the version and the extensions, and no other."""
    (table,) = re.findall(r"^\| key \| value \|\n\|---\|---\|\n(.*?)\n\n", TEXT, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", table)) == {"kvplan", "extensions", *keys(schema.OFFER)}


@pytest.mark.parametrize("module", [messages, schema, overlap])
def test_every_limit_is_documented(module: Any) -> None:
    """The table of limits has the number of every limit."""
    limits = {name: getattr(module, name) for name in dir(module) if name.startswith("MAX_")}
    assert {str(number) for number in limits.values()} <= set(LIMITS)


def test_no_other_limit_is_documented() -> None:
    """The table of limits has no other numbers."""
    modules = (messages, schema, overlap)
    known = {str(getattr(module, name)) for module in modules for name in dir(module) if name.startswith("MAX_")}
    assert len(LIMITS) == 15
    assert set(LIMITS) <= known
