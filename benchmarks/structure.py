"""Prints the size and the shape of a package: `python -m benchmarks.structure [FOLDER]`, by default kvplan.

`--without ROOM...` leaves out some of its rooms. Lines of code hold more than a comment or a docstring. Arrows are
imports of one module by another, those for type checkers included. A floor is one step of the longest chain of imports:
between rooms, which are a package's folders and its modules at the top, and between modules.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import io
import statistics
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


def imported(tree: ast.Module) -> Iterator[str]:
    """The dotted name of everything that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def comments(text: str) -> int:
    """Lines with a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def code(text: str) -> int:
    """Lines with code: with a token that is no comment, and is in no docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            found.update(range(token.start[0], token.end[0] + 1) if token.string else ())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(found)


def floors(arrows: Mapping[str, Iterable[str]]) -> str:
    """The number of modules in the longest chain of imports, or the modules of a circle."""
    height: dict[str, int] = {}
    try:
        for module in graphlib.TopologicalSorter(arrows).static_order():
            height[module] = 1 + max((height[below] for below in arrows.get(module, ())), default=0)
    except graphlib.CycleError as error:
        return f"circle: {' -> '.join(error.args[1])}"
    return f"{max(height.values())}"


def main() -> None:
    """Measure one package and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("kvplan"))
    parser.add_argument("--without", nargs="+", default=[], metavar="ROOM")
    given = parser.parse_args()
    folder, without = given.folder, given.without
    texts = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in folder.rglob("*.py")
        if path.relative_to(folder).parts[0] not in without
    }
    trees = {name: ast.parse(text) for name, text in texts.items()}
    arrows: dict[str, set[str]] = {}
    for name, tree in trees.items():
        found = {next((m for m in (full, full.rpartition(".")[0]) if m in trees), name) for full in imported(tree)}
        arrows[name] = found - {name}
    rooms = {name: name.split(".")[1] if "." in name else name for name in trees}
    between: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, others in arrows.items():
        between[rooms[name]] |= {rooms[other] for other in others} - {rooms[name]}
    functions = [
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    ]
    classes = [node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    door = [
        len(ast.literal_eval(node.value))
        for node in trees[folder.name].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    inner = {name: others - {folder.name} for name, others in arrows.items() if name != folder.name}
    for what, value in {
        "modules": len(trees),
        "rooms": sum(path.parent.name not in without for path in folder.glob("*/__init__.py")),
        "lines": sum(text.count("\n") for text in texts.values()),
        "lines of code": sum(map(code, texts.values())),
        "comments": sum(map(comments, texts.values())),
        "functions": len(functions),
        "lines of a function, 90th percentile": round(statistics.quantiles(functions, n=10)[-1]),
        "classes": len(classes),
        "classes of a name that another has": len(classes) - len({*classes}),
        "arrows between modules": sum(map(len, arrows.values())),
        "arrows between rooms": sum(map(len, between.values())),
        "floors of modules": floors(inner),
        "floors of rooms": floors({room: others - {folder.name} for room, others in between.items()}),
        "names at the door": sum(door),
    }.items():
        print(f"{value:>7}  {what}")


if __name__ == "__main__":
    main()
