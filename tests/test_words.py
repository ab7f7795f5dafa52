"""One word, one meaning: a glossary that ends, names of plain English or of the field, and no name defined twice."""

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

MAX_TERMS = 25
"""What a reader can learn in one sitting. A new term takes the place of another."""

PLAIN = """
    access addresses advice advise align answer app arrays arrival assembly backend backends background bind blockmap
    box bridges broken budget cache caches call candidates case catalog certificate chain chains challenges check checks
    choice choices chunk claim claims cli client cluster column columns command commands comparison completion
    completions condition config connections connector console content contents contract copier copies copy cost death
    decoder defaults demo describe design diagram difference digest digests direction display disturbance doctor draw
    drawing end ended entry error errors event evicted eviction exchange executor executors explanation fabric facts
    failure fake families family fault file files findings fingerprint fit fleet flight freeze guard handoff handshake
    head header held host http info integer interval job key keys killed kinds kv labelled labels layout layouts lease
    leases limits link list listener listening llm lmcache local locations logical long loop map match matrix member
    memory mesh message messages mismatch model models move mover names need network notebook notice numbers object
    objects occurrence occurrences of option options outcome overlap owner page pages panel parallel part parts pattern
    patterns peer pending phase picture pictures pieces pipeline place placed plan planned planner pool pools port
    problem product promises prompt proof published ranges rank rates reader readers record refused registry report
    request requests result rival room rooms route rule scenario schema search segments server sglang shape share shared
    shares shrink side simulation site source sources staged stages stall stalls status step store stored strategies
    stretch strided suggestion sum svg system table tables tail tails task tasks template tensorrt terms testing text
    texts thread token trace traced transfer transmission trial trials trouble values verification verifier version
    virtual visit vllm wanted whole window work workspace
"""
"""Words of names beside those of the glossary: plain English, and the field's own."""


def words_of(name: str) -> list[str]:
    """The words of a class or a module, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def forms(word: str) -> set[str]:
    """A word and its plural."""
    return {word, f"{word}s", f"{word[:-1]}ies"}


def classes(tree: ast.Module) -> list[str]:
    """The classes and type aliases of a module; an alias is a name in capitals and small letters."""
    found = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            found += [name] if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name) else []
    return found


def names() -> list[str]:
    """The names of all classes, modules and folders."""
    found = [node.name for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return found + [part for path in MODULES for part in path.with_suffix("").parts if not part.startswith("__")]


def test_the_glossary_ends() -> None:
    """Each term has one line, and there are at most 25."""
    terms = [term for term, _ in GLOSSARY]
    assert 0 < len(terms) <= MAX_TERMS
    assert len({*terms}) == len(terms)


def test_names_are_plain_words() -> None:
    """Every word of a class or a module is in the glossary, or in the list of plain words above."""
    known = {*PLAIN.split(), "axes"}.union(*(forms(word) for term, _ in GLOSSARY for word in term.split()))
    assert {word for name in names() for word in words_of(name)} - known == set()


def test_the_list_of_plain_words_has_no_more_than_are_used() -> None:
    """A word that no name has any more leaves the list."""
    assert {*PLAIN.split()} - {word for name in names() for word in words_of(name)} == set()


def test_no_name_is_defined_twice() -> None:
    """One class or type alias has a name in the whole package, private ones included."""
    times = Counter(name for tree in MODULES.values() for name in classes(tree))
    assert [name for name, number in times.items() if number > 1] == []


def test_a_name_defined_twice_would_be_found() -> None:
    """Classes and aliases are found, constants are not."""
    assert classes(ast.parse("Ints = 1\nMAX_ROWS = 2\nclass Row: pass\n_Key = 3")) == ["Row", "Ints", "_Key"]
