"""What the package may import, and in which order: the rules that hold its shape, read from its folders."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvplan
from tests.pages import ROOT
from tests.sources import DOORS, MODULES, PACKAGE, imports, modules_of_ours, room, tree

ABOVE = PACKAGE.parent / "kvplan_nixl"
EFFECTS = {
    ".".join(path.relative_to(ABOVE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ABOVE.rglob("*.py"))
}
"""The modules of kvplan_nixl."""

DEPENDENCIES = {"numpy", "attr", "attrs"}

# Rooms, each with the others that it may import. A module at the top of the package is a room of its own.
LEAVES = {"errors", "_text", "_checks", "_arrays", "budget", "_version"}
CORE = {*LEAVES, "describe"}
LIBRARY = {*CORE, "plan", "verification", "executor", "handshake", "models", "bridges"}
MAY_IMPORT = {
    "errors": set(),
    "_text": set(),
    "_checks": {"errors", "_text"},
    "_arrays": set(),
    "_version": set(),
    "budget": {"errors", "_text", "_checks"},
    "support": {"_text", "_checks", "_arrays"},
    "describe": LEAVES,
    "plan": CORE,
    "verification": {*CORE, "plan"},
    "executor": {*CORE, "plan"},
    "handshake": CORE,
    "models": CORE,
    "bridges": {*CORE, "models"},
    "staging": {*CORE, "plan", "executor"},
    "protocol": {*CORE, "plan", "executor", "handshake", "staging"},
    "testing": {*LIBRARY, "staging", "protocol"},
    "display": {*LIBRARY, "staging"},
    "cli": {*LIBRARY, "protocol", "display"},
    "__init__": {*LIBRARY, "display"},
    "__main__": {"cli"},
}
LATE = {"cli"}
"""Commands are imported by a function, which says so where their extra is missing."""

OTHER_PACKAGES = {"cli": {"click", "kvplan_nixl"}, "testing": {"hypothesis"}}


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


def test_import_loads_what_plans_need() -> None:
    """``import kvplan`` loads descriptions and plans; every other room when one of its names is first asked for."""
    code = "import sys, kvplan; print(*{name.split('.')[1] for name in sys.modules if name.startswith('kvplan.')})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*run.stdout.split()} & {room(module) for module in MODULES} == {*CORE, "plan"}


def test_a_connector_loads_no_oracle() -> None:
    """A process that serves loads neither what checks plans nor the fakes that tests move bytes with."""
    code = "import sys, kvplan.protocol; print(*{name.split('.')[1] for name in sys.modules if name[:7] == 'kvplan.'})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {*run.stdout.split()} & {room(module) for module in MODULES}
    assert rooms == {*CORE, "plan", "executor", "staging", "protocol"}


@pytest.mark.parametrize(
    ("module", "needed"),
    [("serving.store", set()), ("vllm.proxy", {"aiohttp", "click"}), ("sglang.proxy", {"aiohttp", "click"})],
)
def test_a_store_on_files_and_proxies_load_no_engine_and_no_nixl(module: str, needed: set[str]) -> None:
    """Whoever uses a store in a folder needs numpy and attrs alone, and a proxy runs where no engine does."""
    code = f"import sys, kvplan_nixl.{module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"nixl", "torch", "obstore", "aiohttp", "click", "vllm", "sglang"}
    assert {*run.stdout.split()} & heavy <= needed


def test_every_public_name_can_be_had() -> None:
    """Whichever room a name is in, the door has it, and lists it."""
    assert [name for name in kvplan.__all__ if getattr(kvplan, name) is None or name not in dir(kvplan)] == []


@pytest.mark.parametrize(
    "name, where",
    [("Seat", ""), ("_seat", ""), ("from_vllm", "; kvplan.bridges has it"), ("settle", "; kvplan_nixl has it")],
)
def test_other_names_are_no_names(name: str, where: str) -> None:
    """A name that the door lacks is an AttributeError, as of any module, which says what else has it."""
    with pytest.raises(AttributeError, match=f"^module 'kvplan' has no attribute '{name}'{where}$") as caught:
        getattr(kvplan, name)
    assert (caught.value.name, caught.value.obj) == (name, kvplan)  # Python's own "Did you mean" needs both


def test_the_door_lists_what_a_user_may_want() -> None:
    """Names, rooms and what each module has, but not what the door imports for itself."""
    shown = [name for name in dir(kvplan) if not name.startswith("__")]
    assert shown == sorted([*kvplan.__all__, *kvplan.PACKAGES])


def test_the_version_is_that_of_the_package() -> None:
    """It stands once, where the build reads it too."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "kvplan/_version.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvplan.__version__)


def test_the_door_has_the_rooms_with_names() -> None:
    """``kvplan.bridges.from_vllm`` needs no further import: the door has each room that has an ``__all__``."""
    assert {*kvplan.PACKAGES} == {*LIBRARY, "staging", "protocol", "testing", "display"} - {*LEAVES, "executor"}
    code = "import kvplan; print(*(getattr(kvplan, name).__all__[0] for name in kvplan.PACKAGES))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(run.stdout.split()) == len(kvplan.PACKAGES)
    assert {*kvplan.PACKAGES} <= {*dir(kvplan)}


def unlisted(code: str) -> list[str]:
    """The names that code imports from kvplan and kvplan_nixl, but that no public module lists."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("kvplan", "kvplan_nixl"):
            listed = {*DOORS.get(node.module or "", ())}
            # a module may be imported from its package too
            listed |= {door.removeprefix(f"{node.module}.") for door in DOORS}
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in listed]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("kvplan") and alias.name not in DOORS]
    return found


def test_what_has_effects_is_written_on_the_public_api() -> None:
    """What kvplan's own connectors need, a connector of another engine can have too."""
    found = {path.stem: unlisted(path.read_text()) for path in (PACKAGE.parent / "kvplan_nixl").rglob("*.py")}
    assert [f"{stem}: {name}" for stem in found for name in found[stem] if name.startswith("kvplan.")] == []


def test_an_unlisted_name_would_be_found() -> None:
    """The check above sees helpers, private names, and modules that are imported whole."""
    lines = "from kvplan._checks import integer\nfrom kvplan.protocol.leases import _Lease\nimport kvplan.plan.bind"
    found = ["kvplan._checks.integer", "kvplan.protocol.leases._Lease", "kvplan.plan.bind"]
    assert unlisted(f"{lines}\nfrom kvplan import Worker, protocol\n") == found


def test_private_modules_list_nothing() -> None:
    """A name that has an underscore before it, or in the name of its module, is not public."""
    names = [f"{door}.{name}" for door, listed in DOORS.items() for name in listed]
    assert [name for name in names if any(part.startswith("_") for part in name.split("."))] == []


def test_the_doors_are_as_wide_as_their_use() -> None:
    """A user of plans finds few names, and so does the author of a connector."""
    assert len(kvplan.__all__) <= 40
    assert len(kvplan.protocol.__all__) <= 25


LATE_PROGRAM = """
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
    run = subprocess.run([sys.executable, "-c", LATE_PROGRAM], capture_output=True, text=True, check=True)
    num_bytes, *loaded = run.stdout.split()
    assert int(num_bytes) > 0
    assert loaded == []


def test_every_room_has_a_place_in_the_order() -> None:
    """The rooms named above are those that there are."""
    assert {room(module) for module in MODULES} == MAY_IMPORT.keys()


def test_a_module_imports_only_rooms_below() -> None:
    """Modules import their own room and those that it may import, also where it is for types alone."""
    allowed = {module: {room(module), *MAY_IMPORT[room(module)]} for module in MODULES}
    found = [(module, other) for module in MODULES for other in modules_of_ours(module)]
    assert [f"{module} imports {other}" for module, other in found if room(other) not in allowed[module]] == []


def test_there_are_no_circles() -> None:
    """No module imports itself through others, for types neither; what a room's door exports comes from its modules."""
    graph = {module: {other for other in modules_of_ours(module) if other != module} for module in MODULES}
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) == len(MODULES)


def test_a_circle_would_be_found() -> None:
    """The check above sees a circle of two."""
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


def test_no_function_imports() -> None:
    """Imports stand at the top of a module; only the command line's door imports late."""
    found = [(module, name) for module in MODULES for name, late, _ in imports(tree(module)) if late]
    assert [f"{module} imports {name}" for module, name in found if module not in LATE] == []


def test_a_module_imports_no_other_package() -> None:
    """A module imports the standard library, numpy, attrs, kvplan, and what the extra of its room brings."""
    usual = {"kvplan", *sys.stdlib_module_names, *DEPENDENCIES}
    tops = [(module, name.partition(".")[0]) for module in MODULES for name, _, _ in imports(tree(module))]
    others = [(module, top) for module, top in tops if top not in usual | OTHER_PACKAGES.get(room(module), set())]
    assert others == []


def test_the_oracle_shares_no_code_with_the_planner() -> None:
    """What checks plans runs descriptions, errors, checks of arguments and texts, and nothing that computes a plan."""
    shared = {"verification", "describe", "errors", "_checks", "_text", "budget"}
    modules = [module for module in MODULES if room(module) == "verification"]
    found = [(module, other) for module in modules for other in modules_of_ours(module, typed=False)]
    assert modules
    assert [f"{module} imports {other}" for module, other in found if room(other) not in shared] == []


def test_the_stages_of_a_plan_know_no_budget() -> None:
    """What runs the stages counts what the next one lists, and so does the cost of a plan, for a hostile peer's."""
    knowing = {module for module in MODULES if room(module) == "plan" and "budget" in modules_of_ours(module)}
    assert knowing == {f"plan.{name}" for name in ("cost", "estimate", "mesh", "pairs", "transfer")}


@pytest.mark.parametrize("line", ["def f():\n    import json", "x = lambda: __import__\ndef g():\n    from a import b"])
def test_late_imports_would_be_found(line: str) -> None:
    """The check above sees an import inside a function."""
    assert any(late for _, late, _ in imports(ast.parse(line)))


# Of kvplan_nixl: which rooms the modules of a room may import beside their own, and which packages.
ROOMS_ABOVE: dict[str, tuple[set[str], set[str]]] = {
    "serving": (set(), {"attrs"}),
    "serving.store": (set(), {"attrs", "numpy", "obstore"}),
    "": ({"serving", "serving.store"}, {"attrs", "numpy"}),
    "vllm": ({"", "serving", "serving.store"}, {"attrs", "numpy", "torch", "vllm"}),
    "sglang": ({"", "serving", "serving.store"}, {"attrs", "numpy", "sglang", "torch"}),
}
PROXY = {"aiohttp", "click", "yarl"}
TENSORS = {"torch", "triton"}
MORE: dict[str, set[str]] = {
    "agent": {"nixl"},
    "weights": {"huggingface_hub"},
    "rearrange": {"torch"},
    "calibrate": {"torch"},
    "digest": {"torch"},
    "digest_kernel": TENSORS,
    "kernel": TENSORS,
    "proxy": PROXY,
    "vllm.proxy": PROXY,
    "sglang.proxy": PROXY,
}
"""What some modules import beyond what their room may, each for a reason of its own."""


def room_above(module: str) -> str:
    """The longest name of a room that a module of kvplan_nixl is in."""
    rooms = [name for name in ROOMS_ABOVE if f"{module}.".startswith(f"{name}.") or not name]
    return max(rooms, key=len)


def imported_above(code: str) -> tuple[set[str], set[str]]:
    """The modules of kvplan_nixl that code imports, also in functions, and the packages of others."""
    modules, packages = set(), set()
    for name, _, _ in imports(ast.parse(code)):
        package, _, rest = name.partition(".")
        if package == "kvplan_nixl":
            while rest and rest not in EFFECTS:
                rest = rest.rpartition(".")[0]
            modules.add(rest or "__init__")
        elif package not in sys.stdlib_module_names | {"kvplan"}:
            packages.add(package)
    return modules, packages


def unordered(module: str, code: str) -> set[str]:
    """What a module of kvplan_nixl imports that it may not: rooms above its own, or beside it, and packages."""
    rooms, packages = ROOMS_ABOVE[room_above(module)]
    modules, others = imported_above(code)
    wrong = {each for each in modules if room_above(each) not in {*rooms, room_above(module)}}
    return (wrong | others - packages) - MORE.get(module, set())


def test_a_module_with_effects_imports_only_rooms_below() -> None:
    """Serving needs no NIXL, one module imports it, and the connectors of two engines do not know each other."""
    found = [(module, name) for module, path in EFFECTS.items() for name in unordered(module, path.read_text())]
    assert [f"{module} imports {name}" for module, name in found] == []


def test_the_package_names_each_module_of_its_folder() -> None:
    """Its opening sorts them by what they do: a reader finds more than twenty files there."""
    opening = ast.get_docstring(ast.parse(EFFECTS["__init__"].read_text())) or ""
    named = re.findall(r"\w+", " ".join(re.findall(r"^    .{27}(.*)", opening, re.MULTILINE)))
    here = [module for module in EFFECTS if not re.search(r"\.|__", module) and module not in ROOMS_ABOVE]
    assert sorted(named) == sorted(here)


def test_what_modules_may_import_beyond_their_room_is_imported() -> None:
    """An exception that is needed no more is none."""
    for module, names in MORE.items():
        assert names <= set().union(*imported_above(EFFECTS[module].read_text()))


def test_there_are_no_circles_above() -> None:
    """Neither with what functions import, nor with what is for types alone."""
    graph = {module: imported_above(path.read_text())[0] - {module} for module, path in EFFECTS.items()}
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) == len(EFFECTS)


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("serving.driver", "from kvplan_nixl.executor import NixlExecutor", "executor"),
        ("serving.driver", "def f():\n    import torch", "torch"),
        ("serving.store.files", "from kvplan_nixl.serving import Driver", "serving"),
        ("executor", "import nixl", "nixl"),
        ("settings", "from kvplan_nixl.vllm import settings", "vllm.settings"),
        ("vllm.worker", "from kvplan_nixl.sglang.rank import Rank", "sglang.rank"),
    ],
)
def test_an_arrow_up_would_be_found(module: str, line: str, found: str) -> None:
    """The check above sees imports of rooms above, of the other engine, and of packages."""
    assert unordered(module, line) == {found}


def drawn() -> list[list[str]]:
    """The rooms of the picture in development.md by line, from the top: folders and modules of both packages."""
    picture = (ROOT / "docs" / "development.md").read_text().partition("```text\n")[2].partition("```")[0]
    lines = [re.sub(r"\(root\)", "root.py", line[14:33]) for line in picture.splitlines()]
    return [names for names in (re.findall(r"(\w+)(?:/|\.py)", line) for line in lines) if names]


def test_the_picture_has_every_room_above_those_that_it_imports() -> None:
    """A maintainer reads the order off the page: what a room may import is on a line further down."""
    floors = {name: number for number, names in enumerate(drawn()) for name in names}
    allowed = {f"{name or 'root'}": rooms for name, (rooms, _) in ROOMS_ABOVE.items() if "." not in name}
    allowed |= {name: rooms for name, rooms in MAY_IMPORT.items() if not name.startswith("_")}
    assert floors.keys() == allowed.keys()
    for name, rooms in allowed.items():
        below = {other or "root" for other in rooms if not other.startswith("_") and "." not in other}
        assert {other for other in below if floors[other] <= floors[name]} == set(), name
