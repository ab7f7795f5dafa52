"""Prints the size and the shape of a package: `python -m benchmarks.structure [FOLDER]`, by default kvplan.

`--without ROOM...` leaves out some of its rooms. Lines of code hold more than a comment or a docstring. Arrows are
imports of one module by another, those for type checkers included. A floor is one step of the longest chain of imports:
between rooms, which are a package's folders and its modules at the top, and between modules.

Below come the words of each room: how many names in 1,000 lines of code are pronouns, how many assignments are packs
(`a, b = x, y`), how many comprehensions nest, and which percentage of the lines is wider than 100 columns or a comment.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs

PRONOUNS = """
    both each every found given known made mine more much one other others ours same some taken there theirs what which
"""
"""Words that say of a variable only that there is one."""

WIDTH = 100
"""Columns of a line of code."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


@attrs.frozen
class Words:
    """How some code reads: its lines of code, and how many things in it stop a reader."""

    lines: int
    pronouns: int
    packs: int
    nested: int
    wide: int
    comments: int

    @classmethod
    def of(cls, texts: Iterable[str]) -> Words:
        """Count in the texts of modules."""
        totals = Counter[str]()
        for text in texts:
            tree = ast.parse(text)
            lines = code_lines(text)
            totals["lines"] += len(lines)
            totals["comments"] += comments(text)
            totals["wide"] += sum(
                number in lines for number, line in enumerate(text.split("\n"), 1) if len(line) > WIDTH
            )
            for kind in (pronouns, packs, nested):
                totals[kind.__name__] += sum(1 for _ in kind(tree))
        return cls(**{field.name: totals[field.name] for field in attrs.fields(cls)})

    def rates(self) -> dict[str, float]:
        """Return pronouns, packs and nested comprehensions per 1,000 lines, and wide and comment lines per 100."""
        return {
            "pronouns": 1000 * self.pronouns / self.lines,
            "packs": 1000 * self.packs / self.lines,
            "nested": 1000 * self.nested / self.lines,
            "wide": 100 * self.wide / self.lines,
            "comments": 100 * self.comments / self.lines,
        }


def pronouns(tree: ast.Module) -> Iterator[str]:
    """Yield each use of a variable or an argument that a pronoun names."""
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
        if name in PRONOUNS.split():
            yield name


def packs(tree: ast.Module) -> Iterator[ast.Assign]:
    """Yield each assignment of several values to several names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and {type(node.value), type(node.targets[0])} == {ast.Tuple}:
            yield node


def nested(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield each comprehension with two loops, or with another comprehension inside."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            inside = sum(isinstance(part, COMPREHENSIONS) for part in ast.walk(node)) - 1
            if inside or len(node.generators) > 1:
                yield node


def comments(text: str) -> int:
    """Count the lines with a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines with code: with a token that is no comment, and is in no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def texts_of(folder: Path, without: Iterable[str] = ()) -> dict[str, str]:
    """Return the texts of a package's modules by their dotted names, less those of some rooms."""
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in sorted(folder.rglob("*.py"))
        if path.relative_to(folder).parts[0] not in without
    }


def room_of(module: str) -> str:
    """Return a folder of the package, or a module at its top; the package itself for its door."""
    return module.split(".")[1] if "." in module else module


def words_by_room(texts: Mapping[str, str]) -> dict[str, Words]:
    """Count the words of each room, given the texts of modules by their dotted names."""
    texts_by_room: dict[str, list[str]] = {}
    for module, text in texts.items():
        texts_by_room.setdefault(room_of(module), []).append(text)
    return {room: Words.of(texts_by_room[room]) for room in sorted(texts_by_room)}


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted name of everything that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_arrows(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return the modules of the package that each module imports."""
    arrows: dict[str, set[str]] = {}
    for module, tree in trees.items():
        names = set(imported(tree))
        # an import names a module, or something in one
        arrows[module] = (names | {name.rpartition(".")[0] for name in names - trees.keys()}) & trees.keys() - {module}
    return arrows


def room_arrows(arrows: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Return the rooms that each room imports."""
    between: dict[str, set[str]] = {room_of(module): set() for module in arrows}
    for module, below in arrows.items():
        between[room_of(module)].update(map(room_of, below))
    return {room: below - {room} for room, below in between.items()}


def floors(arrows: Mapping[str, Iterable[str]], door: str) -> str:
    """Return the number of modules in the longest chain of imports, or the modules of a circle."""
    inner = {module: set(below) - {door} for module, below in arrows.items() if module != door}
    height: dict[str, int] = {}
    try:
        for module in graphlib.TopologicalSorter(inner).static_order():
            height[module] = 1 + max((height[below] for below in inner.get(module, ())), default=0)
    except graphlib.CycleError as error:
        return f"circle: {' -> '.join(error.args[1])}"
    return f"{max(height.values())}"


def shape(texts: Mapping[str, str], door: str) -> dict[str, int | str]:
    """Measure a package, given the texts of its modules, by the name of each figure."""
    trees = {module: ast.parse(text) for module, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    lengths = [node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    public = [
        len(ast.literal_eval(node.value))
        for node in trees[door].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    arrows = module_arrows(trees)
    between = room_arrows(arrows)
    return {
        "modules": len(trees),
        "rooms": len({room_of(module) for module in trees if module.count(".") > 1}),
        "lines": sum(text.count("\n") for text in texts.values()),
        "lines of code": sum(len(code_lines(text)) for text in texts.values()),
        "comments": sum(map(comments, texts.values())),
        "functions": len(functions),
        "lines of a function, 90th percentile": round(statistics.quantiles(lengths, n=10)[-1]),
        "classes": len(classes),
        "classes of a name that another has": len(classes) - len({*classes}),
        "arrows between modules": sum(map(len, arrows.values())),
        "arrows between rooms": sum(map(len, between.values())),
        "floors of modules": floors(arrows, door),
        "floors of rooms": floors(between, door),
        "names at the door": sum(public),
    }


def main() -> None:
    """Measure one package, and print a line for each figure and each room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("kvplan"))
    parser.add_argument("--without", nargs="+", default=[], metavar="ROOM")
    arguments = parser.parse_args()
    texts = texts_of(arguments.folder, arguments.without)
    for title, figure in shape(texts, arguments.folder.name).items():
        print(f"{figure:>7}  {title}")
    print(f"\n{'room':16} {'lines':>6} {'pronouns':>8} {'packs':>6} {'nested':>6} {'wide':>6} {'comments':>8}")
    for room, words in words_by_room(texts).items():
        rates = words.rates()
        print(
            f"{room:16} {words.lines:6} {rates['pronouns']:8.0f} {rates['packs']:6.0f} {rates['nested']:6.1f}"
            f" {rates['wide']:5.1f}% {rates['comments']:7.1f}%"
        )


if __name__ == "__main__":
    main()
