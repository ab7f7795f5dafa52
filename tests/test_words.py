"""One word, one meaning: a glossary that ends, and public names."""

from __future__ import annotations

import re

import kvplan
from tests.pages import ROOT

RULES = (ROOT / "docs" / "rules.md").read_text()
GLOSSARY = re.findall(r"^\| ([a-z ]+) \| (.+) \|$", RULES.partition("## Glossary")[2], re.MULTILINE)[1:]

MAX_TERMS = 25
"""What a reader can learn in one sitting. A new term takes the place of another."""


def test_the_glossary_ends() -> None:
    """Each term has one line, and there are at most 25."""
    terms = [term for term, _ in GLOSSARY]
    assert 0 < len(terms) <= MAX_TERMS
    assert len({*terms}) == len(terms)


def test_no_public_name_has_two_meanings() -> None:
    """A name that two packages export is the same thing in both."""
    meanings: dict[str, set[int]] = {}
    for room in kvplan.ROOMS:
        module = getattr(kvplan, room)
        for name in module.__all__:
            meanings.setdefault(name, set()).add(id(getattr(module, name)))
    assert [name for name, values in meanings.items() if len(values) > 1] == []
