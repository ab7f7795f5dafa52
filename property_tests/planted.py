"""Faults planted in the certificate: each of its checks left out in turn, for the mutants to find."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from kvplan.verification import certificate, tables

MODULES: Final = (tables, certificate)
Fault = tuple[ModuleType, int]
"""The module and the line of a check."""


def is_check(node: ast.AST) -> bool:
    """Whether a statement refuses a plan: it raises, or names a malformed field."""
    if isinstance(node, ast.Raise):
        return "RANGE" not in ast.unparse(node)
    named = isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield) and node.value.value
    return isinstance(named, ast.Tuple) and isinstance(named.elts[0], ast.Constant)


def faults() -> Iterator[Fault]:
    """Every check of the certificate."""
    for module in MODULES:
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if is_check(node):
                yield module, getattr(node, "lineno", 0)


def planted(fault: Fault, patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``certify`` without a check."""
    made: dict[str, Any] = {}
    for module in MODULES:
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for node in ast.walk(tree):
            for field in ("body", "orelse"):
                block = getattr(node, field, None)
                for i, statement in enumerate(block if isinstance(block, list) else ()):
                    if (module, statement.lineno) == fault and is_check(statement):
                        block[i] = ast.copy_location(ast.Pass(), statement)
        new = ModuleType(module.__name__)
        patch.setitem(sys.modules, module.__name__, new)
        exec(compile(tree, str(module.__file__), "exec"), new.__dict__)
        made[module.__name__] = new
    certify: Callable[..., Any] = made[certificate.__name__].certify
    return certify
