"""Faults planted in the certificate: each of its checks left out in turn, for the mutants to find."""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from kvplan import KVPlanError
from kvplan.verification import certificate, tables

MODULES: Final = {str(module.__file__): module for module in (tables, certificate)}

Check = tuple[str, int]
"""The file and the line of a statement that refuses a plan."""


class _WithoutCheck(ast.NodeTransformer):
    """Puts ``pass`` in the place of one check; lists the checks that it sees."""

    def __init__(self, file: str, without: Check | None = None) -> None:
        self.file, self.without, self.seen = file, without, list[Check]()

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        if any(f"'{code}'" in ast.unparse(node) for code in ("RANGE", "INT")):
            return node
        self.seen.append((self.file, node.lineno))
        return ast.copy_location(ast.Pass(), node) if self.seen[-1] == self.without else node


def checks() -> list[Check]:
    """Every check of the certificate."""
    found = []
    for file in MODULES:
        walk = _WithoutCheck(file)
        walk.visit(ast.parse(Path(file).read_text()))
        found += walk.seen
    return found


def check_that_refused(error: KVPlanError) -> Check | None:
    """The check that raised an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in MODULES]
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else None


def planted(check: Check, patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``certify`` without a check."""
    for file, module in MODULES.items():
        tree = _WithoutCheck(file, check).visit(ast.parse(Path(file).read_text()))
        new = ModuleType(module.__name__)
        patch.setitem(sys.modules, module.__name__, new)  # certificate imports tables
        exec(compile(tree, file, "exec"), new.__dict__)
    made: Callable[..., Any] = sys.modules[certificate.__name__].certify
    return made
