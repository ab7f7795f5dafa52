"""One word, one meaning: in the glossary, and in names of classes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import kvplan
from tests.pages import ROOT

PACKAGE = Path(kvplan.__file__).parent
MODULES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
RULES = (ROOT / "docs" / "rules.md").read_text()
GLOSSARY = re.findall(r"^\| ([a-z ]+) \| (.+) \|$", RULES.partition("## Glossary")[2], re.MULTILINE)[1:]


def classes(tree: ast.Module) -> list[str]:
    """The classes and type aliases of a module; an alias is a name in capitals and small letters."""
    found = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            found += [name] if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name) else []
    return found


def test_a_term_of_the_glossary_has_one_line() -> None:
    """Two lines for one word would be two meanings."""
    terms = [term for term, _ in GLOSSARY]
    assert 0 < len({*terms}) == len(terms)


def test_no_name_is_defined_twice() -> None:
    """One class or type alias has a name in the whole package, private ones included."""
    times = Counter(name for tree in MODULES.values() for name in classes(tree))
    assert [name for name, number in times.items() if number > 1] == []


def test_a_name_defined_twice_would_be_found() -> None:
    """Classes and aliases are found, constants are not."""
    assert classes(ast.parse("Ints = 1\nMAX_ROWS = 2\nclass Row: pass\n_Key = 3")) == ["Row", "Ints", "_Key"]
