"""What the package may import, in which order, and what it may keep: the rules that hold its shape."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvplan

PACKAGE = Path(kvplan.__file__).parent

DESCRIPTIONS = ("errors", "reading", "axes", "views", "overlap", "workers", "tensors", "blocks")
HANDSHAKES = ("names", "findings", "schema", "messages", "offers", "peers", "compare")
PROOF = ("pieces", "certificate")
STAGED = ("mirrors", "legs", "windows", "boxes", "rearrange", "spacing", "excess", "outlay", "staging")
DIRECT = (
    "align",
    "sources",
    "match",
    "cells",
    "runs",
    "tables",
    "bind",
    "specs",
    "tails",
    "cost",
    "arguments",
    "plan",
    "mesh",
)
PIPELINE = (*DIRECT, *STAGED)
ORACLE = ("arenas", "memory", "executor", "labels", "moves", "jobs", "report", "progress", "verify")
READERS = ("caches", "states", "keys", "kinds", "layers", "families", "configs", "shipped")
MODELS = (
    "layouts",
    "pools",
    *READERS,
    "engines",
    "groups",
    "parallel",
    "shares",
    "models",
    "assembly",
    "recipes",
    "chunks",
)
PICTURES = ("bands", "pages", "samples", "copies", "panels", "grids", "spreads", "drawing", "sheets", "svg", "pictures")
COMMANDS = ("checking", "demonstrating", "explaining", "showing", "commands", "cli")
COMMAND_LINE = ("sides", "trials", "demo", "matrix", "advice", "options", "bars", *COMMANDS)
STRATEGIES = ("testing.engines", "testing.requests", "testing.cases", "testing.strategies")
TESTING = ("testing.asserts", "testing", *STRATEGIES)
EXPLAINED = ("lines", "rows", "explain")
BESIDES = ("pipeline", "units", "rates", "strategies", *PICTURES, *MODELS, *EXPLAINED, *COMMAND_LINE, *TESTING)
ORDER = (*DESCRIPTIONS, *HANDSHAKES, *PROOF, *PIPELINE, *ORACLE, *BESIDES)
DEPENDENCIES = {"numpy", "attr", "attrs"}

FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def for_types_only(parent: ast.AST) -> bool:
    return isinstance(parent, ast.If) and ast.unparse(parent.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """The dotted name of each thing imported at run time, and whether a function imports it."""
    for child in ast.iter_child_nodes(node):
        if for_types_only(child):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((f"{child.module}.{alias.name}", inside) for alias in child.names)
        else:
            yield from imports(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def modules_of_ours(module: str) -> set[str]:
    """Which modules of kvplan a module imports; ``from kvplan import x`` counts as ``__init__`` unless x is one."""
    found = set()
    for name, _ in imports(tree(module)):
        package, _, rest = name.partition(".")
        if package == "kvplan":
            while rest and rest not in MODULES:
                rest = rest.rpartition(".")[0]
            found.add(rest or "__init__")
    return found


def test_import_loads_only_numpy_and_attrs() -> None:
    """Importing kvplan loads modules of the standard library, numpy and attrs, and no others."""
    code = (
        "import sys; before = set(sys.modules); import kvplan; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "kvplan" in loaded
    assert loaded - sys.stdlib_module_names - DEPENDENCIES == {"kvplan"}


LATE = """
import sys
from kvplan import Blocks, Model, plan_reads
model = Model.shipped("granite-4.0-h-tiny")
sources, (local, *_) = model.engine("p", tp=2, num_blocks=50), model.engine("d", tp=3, num_blocks=50)
before = set(sys.modules)
tables = {"attn": Blocks([4, 0, 7], null=0), "state": Blocks([5, 6], ordinals=[100, 107])}
specs = plan_reads(local, sources).bind(local=tables, remote=tables, tokens=(0, 40))
print(sum(spec.num_bytes for spec in specs), *set(sys.modules) - before)
"""


def test_a_first_request_loads_nothing_more() -> None:
    """Parts of numpy that it loads when they are first used would make the first plan take ten times as long."""
    run = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    num_bytes, *loaded = run.stdout.split()
    assert int(num_bytes) > 0
    assert loaded == []


def test_every_module_has_a_place_in_the_order() -> None:
    """The order names every module of the package once, and no module that is not there."""
    assert len(ORDER) == len(set(ORDER))
    assert set(ORDER) == MODULES.keys() - {"__init__", "__main__"}


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_earlier_ones(module: str) -> None:
    """Modules of kvplan have one total order, and each imports only those before it."""
    assert modules_of_ours(module) <= set(ORDER[: ORDER.index(module)])


@pytest.mark.parametrize("module", [name for name in ORDER if name != "cli"])
def test_no_function_imports(module: str) -> None:
    """Imports stand at the top of a module; only the command line's door imports late."""
    assert [name for name, inside in imports(tree(module)) if inside] == []


@pytest.mark.parametrize("module", [name for name in ORDER if name not in (*COMMAND_LINE, *STRATEGIES)])
def test_the_core_imports_no_other_package(module: str) -> None:
    """Outside the command line and strategies, a module imports the standard library, numpy, attrs and kvplan."""
    tops = {name.partition(".")[0] for name, _ in imports(tree(module))}
    assert tops - sys.stdlib_module_names - DEPENDENCIES <= {"kvplan"}


@pytest.mark.parametrize("module", PIPELINE)
def test_the_pipeline_knows_no_memory_and_no_oracle(module: str) -> None:
    """Planning never reads memory, and never asks the code that checks it."""
    assert modules_of_ours(module) & set(ORACLE) == set()


@pytest.mark.parametrize("module", [*PROOF, *ORACLE])
def test_the_oracle_shares_no_code_with_the_planner(module: str) -> None:
    """Certificates, memory and verification import no stage of the pipeline that they check."""
    assert modules_of_ours(module) & set(PIPELINE) == set()


MUTABLE = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MUTABLE_CALLS = {"dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}


def mutable_state(module: ast.Module) -> list[str]:
    """The names to which a module assigns, at its top level, something that can change."""
    found = []
    for statement in module.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        value = statement.value
        made_by = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        if isinstance(value, MUTABLE) or made_by in MUTABLE_CALLS:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found += [ast.unparse(target) for target in targets]
    return [name for name in found if name != "__all__"]


@pytest.mark.parametrize("module", ORDER)
def test_a_module_keeps_no_state(module: str) -> None:
    """No module assigns a dict, list or set at its top level: what it keeps is frozen."""
    assert mutable_state(tree(module)) == []


@pytest.mark.parametrize("line", ["a = {}", "a: list[int] = []", "a = {1}", "a = dict(b=1)", "a = collections.deque()"])
def test_state_would_be_found(line: str) -> None:
    """The check above sees the ways in which a module could keep state."""
    assert mutable_state(ast.parse(line)) == ["a"]


@pytest.mark.parametrize("line", ["def f():\n    import json", "x = lambda: __import__\ndef g():\n    from a import b"])
def test_late_imports_would_be_found(line: str) -> None:
    """The check above sees an import inside a function."""
    assert any(inside for _, inside in imports(ast.parse(line)))
