"""The modules of the package as texts: which rooms there are, and what each module imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kvplan

PACKAGE = Path(kvplan.__file__).parent
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


def doors() -> Iterator[tuple[str, list[str]]]:
    """The public modules of both packages, each with the names that it lists. Nothing is imported."""
    for package in (PACKAGE, PACKAGE.parent / "kvplan_nixl"):
        for path in sorted(package.rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
                    yield module.removesuffix(".__init__"), ast.literal_eval(node.value)


DOORS = dict(doors())


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def room(module: str) -> str:
    return module.partition(".")[0]


def imports(node: ast.AST, late: bool = False, typed: bool = False) -> Iterator[tuple[str, bool, bool]]:
    """The dotted name of each thing imported, whether a function imports it, and whether type checkers alone do."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, late, typed) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((f"{child.module}.{alias.name}", late, typed) for alias in child.names)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            checked = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from imports(child, late or function, typed or checked)


@cache
def modules_of_ours(module: str, typed: bool = True) -> frozenset[str]:
    """Which modules of kvplan a module imports; ``from kvplan import x`` counts as ``__init__`` unless x is one."""
    found = set()
    for name, _, for_types_only in imports(tree(module)):
        package, _, rest = name.partition(".")
        if package == "kvplan" and (typed or not for_types_only):
            while rest and rest not in MODULES:
                rest = rest.rpartition(".")[0]
            found.add(rest or "__init__")
    return frozenset(found - {module})
