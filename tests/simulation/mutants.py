"""Changes of the connectors' code that the simulation or a unit test must notice.

``python -m tests.simulation.mutants --count 200 --seed 1`` draws changes: a comparison, a condition, a sum, a constant,
two arguments that change places, a statement that is left out. Each is made in a process of its own, which first runs
fleets of a fixed set of seeds and then, if all rules hold, the unit tests of the code. It prints what survives, and the
score. With ``--fleets 60`` there are no unit tests, and each mutant gets 60 seconds of fleets: what only fleets notice.

What only messages and logs say does not change, nor do :data:`EQUIVALENT` statements.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

CONNECTOR_TESTS = (
    "tests/test_bad_values.py",
    "tests/protocol/test_claims.py",
    "tests/protocol/test_digest_requests.py",
    "tests/protocol/test_handoff.py",
    "tests/protocol/test_leases.py",
    "tests/protocol/test_listener.py",
    "tests/protocol/test_reads.py",
    "tests/protocol/test_rooms.py",
    "tests/nixl/test_bootstrap.py",
)
PROTOCOL_TESTS = tuple(f"tests/protocol/test_{name}.py" for name in ("exporter", "importer", "read_parts"))
VLLM_TESTS = tuple(f"tests/simulation/test_vllm_{name}.py" for name in ("rooms", "saves", "scheduler"))
SGLANG_TESTS = ("tests/nixl/test_bootstrap.py", "tests/nixl/test_sglang.py")
TESTS = {
    **{
        f"kvplan.protocol.{name}": CONNECTOR_TESTS
        for name in (
            "background",
            "claims",
            "digest_requests",
            "handoff",
            "lease_check",
            "leases",
            "listener",
            "peer_engines",
            "read",
            "reads",
            "room_contents",
            "rooms",
        )
    },
    **{f"kvplan.protocol.{name}": PROTOCOL_TESTS for name in ("exporter", "groups", "importer", "read_jobs")},
    **{f"kvplan_nixl.vllm.{name}": VLLM_TESTS for name in ("scheduler", "tables")},
    **{f"kvplan_nixl.sglang.{name}": SGLANG_TESTS for name in ("bootstrap", "decode", "prefill", "rank")},
}
"""The unit tests of each module."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}
STATEMENTS = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)
UNHEARD = ("KVPlanError", "logger", "_logger")
"""Names in what is said alone."""

TEXTS = ("__repr__", "__str__")
"""Functions that return what is said alone."""

EQUIVALENT = {
    "strict": "lengths agree: a check of the code itself, as assertions are",
    "self._system.monotonic() - peer.used_at > MAX_AGE_S": "at one moment of an hour",
    "system.sleep(RETRY_S)": "a server is asked more often, and answers the same",
    "self._system.sleep(RETRY_S)": "a server is asked more often, and answers the same",
    "self._seen = published": "what was read before is looked at again, and nothing of it is read",
    "self._polled_at = now": "ended requests are looked for more often",
    "self._result is None and self._is_sent": "a request that has ended is looked for among those that have",
}
"""Arguments and code whose change changes no answer, and why."""

OPTIONS = ("-q", "-x", "--no-header", "-p", "no:cacheprovider")
NUM_SEEDS = 8
LIMIT_S = 150
PROCESSOR_S = 50
"""Seconds by the clock, and of a processor, after which a mutant has hung."""


@attrs.frozen
class Mutant:
    """A change of a module: the node of its syntax tree by its number, and its new text."""

    module: str
    line: int
    old: str
    new: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.old} -> {self.new}"


def is_heard(node: ast.AST) -> bool:
    """Whether a node is more than a message, an annotation or a check of types, and is not equivalent."""
    if (isinstance(node, ast.keyword) and node.arg in EQUIVALENT) or (
        isinstance(node, ast.expr | ast.stmt) and ast.unparse(node) in EQUIVALENT
    ):
        return False
    if isinstance(node, ast.Call):
        names = [part.id for part in ast.walk(node.func) if isinstance(part, ast.Name)]
        names += [part.attr for part in ast.walk(node.func) if isinstance(part, ast.Attribute)]
        return not {*names} & {*UNHEARD}
    return not isinstance(node, ast.Assert | ast.JoinedStr)


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside a node that are heard."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and is_heard(child):
                yield child
                yield from parts(child)


def changes(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    """What a node may become; each change gets a copy of it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield lambda twin: _with(twin, ops=[SWAPS[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPS:
        yield lambda twin: _with(twin, op=SWAPS[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda twin: node.operand
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
        yield lambda twin: _with(twin, test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        new = not node.value if isinstance(node.value, bool) else node.value + 1
        yield lambda twin: ast.Constant(new)
    if isinstance(node, ast.Call) and len(node.args) > 1 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
        yield lambda twin: _with(twin, args=[node.args[1], node.args[0], *node.args[2:]])
    is_local = isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) for target in node.targets)
    is_text = isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or not is_heard(node.value))
    if isinstance(node, STATEMENTS) and not is_local and not is_text:
        yield lambda twin: ast.Pass()


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    for field, value in fields.items():
        setattr(node, field, value)
    return node


def source_of(module: str) -> str:
    """The source of a module."""
    return Path(*module.split(".")).with_suffix(".py").read_text()


def mutants_of(module: str) -> list[Mutant]:
    """All mutants of a module's functions."""
    tree = ast.parse(source_of(module))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name not in TEXTS]
    nodes = [part for function in functions for part in parts(function)]
    mutants = []
    for node in {id(node): node for node in nodes}.values():
        for change in changes(node):
            twin = change(copy.deepcopy(node))
            fields = vars(node).copy()
            kind = node.__class__
            old = ast.unparse(node).partition("\n")[0]
            new = ast.unparse(twin).partition("\n")[0]
            # for a moment the node is its twin, so that the tree can be written
            node.__class__ = twin.__class__
            vars(node).clear()
            vars(node).update(vars(twin))
            vars(node).setdefault("lineno", fields.get("lineno"))
            source = ast.unparse(tree)
            node.__class__ = kind
            vars(node).clear()
            vars(node).update(fields)
            mutants.append(Mutant(module, fields["lineno"], old, new, source))
    return mutants


class Planter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a mutant in the place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.source, f"<{self._mutant}>", "exec"), module.__dict__)


def verdict(mutant: Mutant, fleets_s: float | None) -> str:
    """What notices a mutant: the rule that a fleet breaks, or the unit tests; nothing if it survives."""
    sys.meta_path.insert(0, Planter(mutant))
    logging.disable(logging.CRITICAL)
    try:
        from kvplan.testing.simulation import MODELS, Feature, LeaseConnector, Scenario, Simulation
        from tests.simulation.faults import RESEND_S
        from tests.simulation.sglang_connector import SGLANG_FEATURES, sglang_fleets
        from tests.simulation.staged_connector import StagedConnector, choosing_fleets
        from tests.simulation.verified_connector import VerifiedConnector, vllm_verified_fleets
        from tests.simulation.vllm_connector import VllmConnector, vllm_room_fleets
    except Exception as error:
        return f"import: {error!r}"
    sglang = sglang_fleets(RESEND_S)
    vllm = [Simulation(VllmConnector), vllm_room_fleets(RESEND_S)]
    staged, verified = Simulation(StagedConnector), Simulation(VerifiedConnector)
    vllm_verified = vllm_verified_fleets()
    everywhere = [Simulation(LeaseConnector), *vllm, sglang, staged, choosing_fleets()]
    simulations = {"kvplan.": everywhere, "kvplan_nixl.vllm.": vllm, "kvplan_nixl.sglang.": [sglang]}
    (chosen,) = (chosen for prefix, chosen in simulations.items() if mutant.module.startswith(prefix))
    if fleets_s is not None and chosen is everywhere:
        chosen = [*chosen, verified]
    if fleets_s is not None and chosen[0] is not sglang:
        # where requests do not come again to the next start of an engine, others wait for them
        chosen = [*chosen, vllm_room_fleets(), vllm_verified]
    for seed in range(NUM_SEEDS if fleets_s is None else 100_000):
        for simulation in chosen:
            # digests cost as much as 15 other fleets
            if simulation in (verified, vllm_verified) and seed % 8:
                continue
            if fleets_s is not None and time.process_time() > fleets_s:
                return ""
            features = Feature.of(seed) & (SGLANG_FEATURES if simulation is sglang else ~Feature(0))
            is_plain = fleets_s is None or simulation in (staged, verified)
            model = "attention" if is_plain else [*MODELS][seed % len(MODELS)]
            outcome = simulation.run(Scenario.of(seed, MODELS[model], features=features))
            if outcome.error is not None:
                return f"{outcome.rule} {seed}"
    logging.disable(logging.NOTSET)
    return "unit tests" if pytest.main([*OPTIONS, *TESTS[mutant.module]]) != 0 else ""


def judge(mutant: Mutant, fleets_s: float | None = None) -> str:
    """The verdict on a mutant, from a process of its own; one that hangs is noticed."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()
        limit_s = round(PROCESSOR_S + (fleets_s or 0.0))
        signal.alarm(LIMIT_S if fleets_s is None else 4 * limit_s)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        os.close(reading)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.write(writing, (verdict(mutant, fleets_s) or "survives").encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(process, 0)
    return text or "ends the process, or hangs"


def main() -> None:
    """Judge a sample of mutants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the sample")
    parser.add_argument("--part", default="", help="a regular expression for the modules' names")
    parser.add_argument("--fleets", type=float, help="seconds of fleets for each, and no unit tests")
    options = parser.parse_args()
    modules = [module for module in TESTS if re.search(options.part, module)]
    for tests in {TESTS[module] for module in modules if options.fleets is None}:
        # tests that fail in any case would notice everything
        subprocess.run([sys.executable, "-m", "pytest", *OPTIONS, *tests], check=True)
    if options.fleets is not None:
        # and so would fleets that break a rule in any case
        for module in {module.rpartition(".")[0]: module for module in modules}.values():
            text = judge(Mutant(module, 0, "", "", source_of(module)), options.fleets)
            if text != "survives":
                sys.exit(f"{text}: {module}, without a change")
    mutants = [mutant for module in modules for mutant in mutants_of(module)]
    print(f"{len(mutants)} mutants", flush=True)
    sample = random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    verdicts = Counter[str]()
    for number, mutant in enumerate(sample):
        began = time.perf_counter()
        text = judge(mutant, options.fleets)
        verdicts[text.partition(":")[0].partition(" ")[0]] += 1
        print(f"{number} {text}: {mutant} ({time.perf_counter() - began:.0f} s)", flush=True)
    num_noticed = verdicts.total() - verdicts["survives"]
    print(dict(verdicts.most_common()), f"score {num_noticed / verdicts.total():.1%}", flush=True)


if __name__ == "__main__":
    main()
