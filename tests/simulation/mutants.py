"""Changes of the connectors' code that the simulation or a unit test must notice.

``python -m tests.simulation.mutants --count 200 --seed 1`` draws changes: a comparison, a condition, a sum, a constant,
two arguments that change places, a statement that is left out. Each is made in a process of its own, which first runs
fleets of a fixed set of seeds and then, if all rules hold, the unit tests of the code. It prints what survives, and the
score. With ``--fleets 60`` there are no unit tests, and each mutant gets 60 seconds of fleets: what only fleets notice.
Of those of the first seeds it gets the fleets that run the changed statement, which one pass without changes has found,
by turns of each simulation and model: those that run it most often for their time, and others.

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
import itertools
import logging
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from operator import or_
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pytest

if TYPE_CHECKING:
    from kvplan.testing.simulation import Feature, FleetOutcome, Simulation

T = TypeVar("T")

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
STORE_TESTS = tuple(f"tests/store/test_{name}.py" for name in ("client", "search", "stalls"))
VLLM_STORE_TESTS = ("tests/simulation/test_vllm_identity.py", *STORE_TESTS)
TESTS = {
    **{
        f"kvplan.protocol.{name}": CONNECTOR_TESTS
        for name in (
            "claims",
            "digest_requests",
            "handoff",
            "leases",
            "listener",
            "peer_engines",
            "read",
            "read_jobs",
            "reads",
            "room_contents",
            "rooms",
        )
    },
    **{f"kvplan.protocol.{name}": PROTOCOL_TESTS for name in ("exporter", "groups", "importer")},
    **{f"kvplan_nixl.vllm.{name}": VLLM_TESTS for name in ("scheduler", "tables")},
    **{f"kvplan_nixl.sglang.{name}": SGLANG_TESTS for name in ("bootstrap", "decode", "prefill", "rank")},
    **{f"kvplan.protocol.{name}": STORE_TESTS for name in ("page_keys", "page_reads", "prefix_search")},
    **{f"kvplan_nixl.vllm.store_{name}": VLLM_STORE_TESTS for name in ("scheduler", "searches", "worker")},
    **{
        f"kvplan_nixl.serving.store.{name}": STORE_TESTS
        for name in ("client", "eviction", "page_files", "readers", "stalls")
    },
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
UNHEARD = ("KVPlanError", "logger", "_logger", "wrong_type", "damaged")
"""Names in what is said alone."""

TEXTS = ("__repr__", "__str__")
"""Functions that return what is said alone."""

EQUIVALENT = {
    "strict": "lengths agree: a check of the code itself, as assertions are",
    "system.sleep(RETRY_S)": "a server is asked more often, and answers the same",
    "self._system.sleep(RETRY_S)": "a server is asked more often, and answers the same",
    "self._seen = published": "what was read before is looked at again, and nothing of it is read",
    "self._polled_at = now": "ended requests are looked for more often",
    "self._result is None and self._is_sent": "a request that has ended is looked for among those that have",
}
"""Arguments and code whose change changes no answer, and why."""

ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
TIMES = re.compile(r"_at\b|\bnow\b|monotonic|timeout_s")
"""What a clock says: whether a time has passed or is now is another question at one moment alone."""

SYMMETRIC = ("min", "max")
"""Functions whose arguments may change places."""

OPTIONS = ("-q", "-x", "--no-header", "-p", "no:cacheprovider")
VLLM_FLEETS = (
    "vllm",
    "vllm rooms again",
    "vllm rooms",
    "vllm verified",
    "vllm rooms verified",
    "vllm rooms late verified",
)
SGLANG_FLEETS = ("sglang", "sglang stages", "sglang with small limits")
STORE_FLEETS = ("store",) * 4
OTHER_FLEETS = ("leases", "leases with small limits", "staged", "choosing", "verified", "vllm rooms with small limits")
FLEETS = {
    "kvplan.protocol.(page|prefix)_": STORE_FLEETS,
    "kvplan_nixl.*store": STORE_FLEETS,
    "kvplan_nixl.vllm.(engine_state|tables)": (*VLLM_FLEETS, "store"),
    "kvplan_nixl.vllm": VLLM_FLEETS,
    "kvplan_nixl.sglang": SGLANG_FLEETS,
    "kvplan.protocol": (*OTHER_FLEETS, *VLLM_FLEETS, *SGLANG_FLEETS),
}
"""The fleets of modules, by regular expressions of which the first one counts. One may have more seeds than others."""

NUM_SEEDS = 60
NUM_REACHED_SEEDS = 360
LIMIT_S = 150
PROCESSOR_S = 50
"""Seconds by the clock, and of a processor, after which a mutant has hung."""

REACHED_S = 600
"""The same of the fleets without changes."""

Statement = tuple[str, int]
"""A statement of a function: its module, and the line at which it begins."""

Fleet = tuple[str, int]
"""The name of a simulation, and a seed."""

RUN: Counter[Statement] = Counter()
"""How often statements have run, in modules whose sources are marked."""


@attrs.frozen
class Mutant:
    """A change of a module, in the statement that begins at a line, and the module's new text."""

    module: str
    line: int
    old: str
    new: str
    source: str
    statement: int

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
    is_timed = isinstance(node, ast.Compare) and isinstance(node.ops[0], ORDERS) and TIMES.search(ast.unparse(node))
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS and not is_timed:
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
    is_symmetric = isinstance(node, ast.Call) and ast.unparse(node.func) in SYMMETRIC
    if (
        isinstance(node, ast.Call)
        and len(node.args) > 1
        and not is_symmetric
        and ast.dump(node.args[0]) != ast.dump(node.args[1])
    ):
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
    # inner statements come later
    statements = {
        id(part): each.lineno for each in ast.walk(tree) if isinstance(each, ast.stmt) for part in ast.walk(each)
    }
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
            mutants.append(Mutant(module, fields["lineno"], old, new, source, statements[id(node)]))
    return mutants


class Planter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads modules from other sources than their own."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._sources:
            return None
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["run_statement"] = run_statement
        exec(compile(self._sources[module.__name__], f"<{module.__name__}>", "exec"), module.__dict__)


def run_statement(statement: Statement) -> None:
    """Note that a statement runs."""
    RUN[statement] += 1


def marked_source(module: str) -> str:
    """The source of a module that notes in :data:`RUN` which statements of its functions run."""
    tree = ast.parse(source_of(module))
    for node in [*ast.walk(tree)]:
        if isinstance(node, ast.Module | ast.ClassDef):
            continue
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                marks = [ast.parse(f"run_statement(({module!r}, {each.lineno}))").body[0] for each in block]
                setattr(node, field, [part for pair in zip(marks, block, strict=True) for part in pair])
    return ast.unparse(tree)


def make_fleets() -> dict[str, Simulation]:
    """The simulations by name."""
    from kvplan.testing.simulation import LeaseConnector, Simulation
    from tests.simulation.faults import RESEND_S
    from tests.simulation.sglang_connector import sglang_fleets
    from tests.simulation.staged_connector import StagedConnector, choosing_fleets
    from tests.simulation.store_connector import StoreFleets
    from tests.simulation.verified_connector import VerifiedConnector, vllm_verified_fleets
    from tests.simulation.vllm_connector import VllmConnector, make_params, vllm_room_fleets

    return {
        "leases": Simulation(LeaseConnector),
        "leases with small limits": Simulation(LeaseConnector),
        "vllm": Simulation(VllmConnector),
        "vllm rooms again": vllm_room_fleets(RESEND_S),
        "sglang": sglang_fleets(RESEND_S),
        "staged": Simulation(StagedConnector),
        "choosing": choosing_fleets(),
        # where requests do not come again to the next start of an engine, others wait for them
        "vllm rooms": vllm_room_fleets(),
        "vllm rooms with small limits": vllm_room_fleets(),
        "sglang stages": sglang_fleets(RESEND_S),
        "sglang with small limits": sglang_fleets(RESEND_S),
        "verified": Simulation(VerifiedConnector),
        "vllm verified": vllm_verified_fleets(),
        "vllm rooms verified": vllm_verified_fleets(make_params),
        "vllm rooms late verified": vllm_verified_fleets(make_params, hears_late=True),
        "store": StoreFleets(),
    }


def outcome_of(fleets: Mapping[str, Simulation], name: str, seed: int) -> FleetOutcome:
    """Run a fleet with the features of its seed, and one of the models."""
    from kvplan.testing.simulation import MODELS, Feature, Scenario
    from kvplan.testing.simulation.catalog import NO_STAGES
    from tests.simulation.faults import TWO_STAGES
    from tests.simulation.limits import small_limits
    from tests.simulation.sglang_connector import SGLANG_FEATURES

    features = thinned(Feature.of(seed), seed) & (SGLANG_FEATURES if name.startswith("sglang") else ~Feature(0))
    if name == "store":
        features = with_store(features, seed)
    features |= Feature.WRONG_BYTES if name.endswith("verified") else Feature(0)
    features |= Feature.ADAPTERS if name.startswith(("vllm", "sglang")) and seed % 4 == 1 else Feature(0)
    # either one
    is_live = name.startswith(("vllm", "store", "sglang")) and Feature.ADAPTERS not in features
    if is_live and random.Random(f"{seed} live").random() < 1 / 3:
        features |= Feature.LIVE_UPDATES
    has_names = name.startswith("sglang") or (name.startswith("vllm") and Feature.ADAPTERS in features)
    is_named = has_names and random.Random(f"{seed} names").random() < 1 / 2
    features |= Feature.NAMED_AGAIN if is_named else Feature(0)
    # as where the threads of a connector run beside the engine's
    is_threaded = name.startswith(("vllm", "leases")) and seed % 6 in (2, 5)
    features |= Feature.INTERLEAVED if is_threaded else Feature(0)
    # answers that give way, meanwhile
    gives_way = is_threaded and random.Random(f"{seed} turns").random() < 1 / 2
    features |= Feature.TURNS if gives_way else Feature(0)
    # as where hosts are busy
    is_late = name.startswith(("vllm", "leases")) and seed % 6 == 3
    features |= Feature.LATE_MESSAGES if is_late else Feature(0)
    # as where an operator sets a short prefill_timeout_s
    is_short = name.startswith(("vllm rooms", "sglang")) and seed % 6 == 4
    features |= Feature.SHORT_WAITS if is_short else Feature(0)
    # one stage has what another one has lost
    loses_entries = name.endswith("stages") and seed % 3 == 0
    features |= Feature.LOST_ENTRIES if loses_entries else Feature(0)
    model = model_of(name, seed)
    stages = TWO_STAGES if name.endswith("stages") else NO_STAGES
    scenario = Scenario.of(seed, MODELS[model], stages, features=features)
    with small_limits() if name.endswith("limits") else nullcontext():
        return fleets[name].run(scenario)


def model_of(name: str, seed: int) -> str:
    """The model of a fleet."""
    from kvplan.testing.simulation import MODELS
    from tests.simulation.sglang_connector import SGLANG_MODELS
    from tests.simulation.store_connector import STORE_MODELS

    models = ["attention"] if name in ("staged", "verified") else [*MODELS]
    if name == "store":
        models = [*STORE_MODELS]
    elif name.startswith("sglang"):
        models = [*SGLANG_MODELS]
    return random.Random(f"{seed} model").choice(models)


def thinned(features: Feature, seed: int) -> Feature:
    """Leave out most features in half of all fleets: many of them together hide what one shows."""
    from kvplan.testing.simulation import Feature

    draw = random.Random(f"{seed} few features")
    chance = draw.choice((1 / 4, 1))
    return reduce(or_, (each for each in features if draw.random() < chance), Feature(0))


def with_store(features: Feature, seed: int) -> Feature:
    """Add a store to the features of a seed, and draw what goes with it. Most others change nothing of a store."""
    from kvplan.testing.simulation import Feature
    from tests.simulation.store_connector import STORE_FEATURES

    draw = random.Random(f"{seed} features of a store")
    features = (features if draw.random() < 1 / 4 else features & STORE_FEATURES) | Feature.STORE
    for feature, chance in (
        (Feature.POPULAR_PROMPTS, 1 / 2),
        (Feature.SHARED_STORE, 1 / 3),
        (Feature.ROUGH_STORE, 1 / 3),
        (Feature.ASYNC_STEPS, 1 / 3),
        (Feature.FACTS, 1 / 3),
    ):
        features |= feature if draw.random() < chance else Feature(0)
    return features


def fleets_of(modules: Iterable[str], num_seeds: int) -> list[Fleet]:
    """The fleets of some modules: each seed in one of the simulations, so that a few show many features."""
    found = [next(names for each, names in FLEETS.items() if re.match(each, module)) for module in modules]
    names = [*reduce(or_, map(Counter, found)).elements()]
    return [(names[seed % len(names)], seed) for seed in range(num_seeds)]


def reached(modules: Sequence[str]) -> dict[Statement, list[Fleet]]:
    """The fleets that run each statement, without those that break a rule without any change.

    By turns they are those that run it most often in a second, those that do so with its blocks, and others as they
    come: what is slow, or waits, may show more. So are all simulations and models.
    """
    sys.meta_path.insert(0, Planter({module: marked_source(module) for module in modules}))
    logging.disable(logging.CRITICAL)
    fleets = make_fleets()
    reached: dict[Statement, list[tuple[float, Fleet]]] = {}
    blocks = reduce(or_, map(blocks_of, modules))
    for name, seed in fleets_of(modules, NUM_REACHED_SEEDS):
        RUN.clear()
        began = time.process_time()
        outcome = outcome_of(fleets, name, seed)
        taken_s = time.process_time() - began
        if outcome.error is not None:
            print(f"without a change: {name}: {outcome}", file=sys.stderr, flush=True)
            continue
        for statement, number in RUN.items():
            reached.setdefault(statement, []).append((number / taken_s, (name, seed)))
    chosen = {}
    for statement, found in reached.items():
        # those that go into a block show more of what decides that
        inner = [reached.get((statement[0], line), []) for line in blocks.get(statement, ())]
        orders = [*(sorted(each, key=lambda each: -each[0]) for each in (found, *inner)), found]
        turns = (each for turn in itertools.zip_longest(*orders) for each in turn if each is not None)
        chosen[statement] = in_turn([*dict.fromkeys(fleet for _, fleet in turns)])
    return chosen


def blocks_of(module: str) -> dict[Statement, list[int]]:
    """The lines at which the blocks of each condition and loop begin, by statement."""
    blocks: dict[Statement, list[int]] = {}
    for node in ast.walk(ast.parse(source_of(module))):
        if isinstance(node, ast.If | ast.For | ast.While):
            blocks[module, node.lineno] = [block[0].lineno for block in (node.body, node.orelse) if block]
    return blocks


def in_turn(fleets: Sequence[Fleet]) -> list[Fleet]:
    """Order fleets so that one of each simulation and model follows another."""
    rounds = Counter[tuple[str, str]]()
    places = list[int]()
    for name, seed in fleets:
        kind = name, model_of(name, seed)
        places.append(rounds[kind])
        rounds[kind] += 1
    return [fleet for _, fleet in sorted(zip(places, fleets, strict=True), key=lambda each: each[0])]


def verdict(mutant: Mutant, fleets_s: float | None, chosen: Sequence[Fleet]) -> str:
    """What notices a mutant: the rule that a fleet breaks, or the unit tests, if it does not survive."""
    sys.meta_path.insert(0, Planter({mutant.module: mutant.source}))
    logging.disable(logging.CRITICAL)
    try:
        fleets = make_fleets()
    except Exception as error:
        return f"import: {error!r}"
    began = time.process_time()
    for name, seed in chosen:
        if fleets_s is not None and time.process_time() - began > fleets_s:
            return "survives"
        outcome = outcome_of(fleets, name, seed)
        if outcome.error is not None:
            return f"{outcome.rule} {seed} {name}"
    if fleets_s is not None:
        return "survives"
    logging.disable(logging.NOTSET)
    return "unit tests" if pytest.main([*OPTIONS, *TESTS[mutant.module]]) != 0 else "survives"


def in_a_process(limit_s: int, clock_s: int, call: Callable[[], T]) -> T | str:
    """What a call returns in a process of its own, nothing from one that ends or hangs."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()
        signal.alarm(clock_s)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        os.close(reading)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        with os.fdopen(writing, "wb") as answer:
            pickle.dump(call(), answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        data = answer.read()
    os.waitpid(process, 0)
    return pickle.loads(data) if data else ""


def main() -> None:
    """Judge a sample of mutants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=[1], nargs="+", help="the seed of each sample")
    parser.add_argument("--part", default="", help="a regular expression for the modules' names")
    parser.add_argument("--fleets", type=float, help="seconds of fleets for each, and no unit tests")
    options = parser.parse_args()
    modules = [module for module in TESTS if re.search(options.part, module)]
    by_statement: Any = {}
    if options.fleets is None:
        for tests in {TESTS[module] for module in modules}:
            # tests that fail in any case would notice everything
            subprocess.run([sys.executable, "-m", "pytest", *OPTIONS, *tests], check=True)
    else:
        by_statement = in_a_process(REACHED_S, 4 * REACHED_S, partial(reached, modules)) or sys.exit("no answer")
    mutants = [mutant for module in modules for mutant in mutants_of(module)]
    print(f"{len(mutants)} mutants", flush=True)
    limit_s = round(PROCESSOR_S + (options.fleets or 0.0))
    clock_s = LIMIT_S if options.fleets is None else 4 * limit_s
    for seed in options.seed:
        verdicts = Counter[str]()
        sample = random.Random(seed).sample(mutants, min(options.count, len(mutants)))
        for number, mutant in enumerate(sample):
            if options.fleets is None:
                chosen = fleets_of([mutant.module], NUM_SEEDS)
            else:
                chosen = by_statement.get((mutant.module, mutant.statement), [])
            began = time.perf_counter()
            text = in_a_process(limit_s, clock_s, partial(verdict, mutant, options.fleets, chosen))
            text = (text or "ends the process, or hangs").strip()
            verdicts[text.partition(":")[0].partition(" ")[0]] += 1
            seconds = time.perf_counter() - began
            print(f"{number} {text}, of {len(chosen)} fleets: {mutant} ({seconds:.0f} s)", flush=True)
        num_noticed = verdicts.total() - verdicts["survives"]
        print(f"seed {seed}:", dict(verdicts.most_common()), f"score {num_noticed / verdicts.total():.1%}", flush=True)


if __name__ == "__main__":
    main()
