"""Every public method of every public class, with one wrong value among right ones, and with nothing but wrong ones.

``tests.bad_values`` lists right calls of some methods, and its golden pages what these do with wrong values. All others
are found here by their signatures. Their right values stand below by the names of parameters, for each class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvplan import Budget, KVPlanError, Model, PeerError, Region, View, Workspace
from kvplan.bridges import ObservedModel
from kvplan.handshake import Problem
from kvplan.plan import Table
from kvplan.protocol import (
    CacheGroup,
    DigestRequest,
    Exporter,
    Handoff,
    Importer,
    Leases,
    Listener,
    Reads,
    Rooms,
    SharedKey,
    System,
)
from kvplan.protocol.page_shards import StoredShard, shards_of
from kvplan.protocol.system import Pending
from kvplan.staging import Rates
from kvplan.testing import FakeCopier
from kvplan.verification import FakeMemory
from kvplan_nixl.serving import Driver
from kvplan_nixl.serving.store import FileBackend, MemoryBackend, MemoryMover, StallGuard, StoreClient, StoreReader
from tests import bad_values
from tests.bad_values import OURS, PLAN, REQUEST, SOURCE
from tests.blocking import KEY
from tests.test_public_values import WRONG, classes

Example = tuple[Any, dict[str, Any]]
"""An instance of a class, and right values for the parameters of its methods, by name, or by method and name."""

INNER = {
    CacheGroup,
    DigestRequest,
    Exporter,
    Importer,
    Pending,
    Reads,
    Rooms,
    Listener,
    SharedKey,
    System,
    Table,
    Workspace,
}
"""Their methods are steps of plans, of the protocol and of a connector, which pass them values of their own."""

SOME: Mapping[str, Any] = {**WRONG, "1 << 40": 1 << 40, "[None]": [None], "[-1]": [-1], "{None: None}": {None: None}}


CACHED = attrs.evolve(OURS, model="m")
"""A worker whose cache a store has: it names its model."""

UNANSWERED = {"System.exchange": "PEER", "StoreClient.load": "PAGE"}
"""Right calls that end in an error, since nobody listens, and nothing was saved."""


def error(kind: type[KVPlanError]) -> Example:
    """An error of a kind."""
    plain = KVPlanError("TYPE", "read x", expected="a", got="b")
    error = plain if kind is KVPlanError else PeerError([Problem("x", "TYPE", "no integer")], plain)
    return error, {"path": "file", "hint": "try y"}


def files(backend: Any) -> Example:
    """A backend of a store with a file."""
    page = f"{'0' * 16}/{'0' * 64}"
    name = f"{page}/{'0' * 32}"
    backend.put(name, [b"page"])
    right: dict[str, Any] = {
        "page": page,
        "pages": [page],
        "name": name,
        "num_bytes": 2,
        "chunks": [b"page"],
        "used_s": 1.0,
        "unfinished_s": 1.0,
    }
    return backend, right


def store(kind: type[StoreReader]) -> Example:
    """The reader or the client of a store, and the prompt of a request in it."""
    reader = kind(MemoryBackend(), CACHED, tokens_per_page=8)
    right: dict[str, Any] = {"tokens": range(20), "facts": [(3, "image")], "chain": reader.chain(range(20))}
    right |= {"start": 0, "step": 8, "stop": 16, "group": CACHED.groups[0], "listings": {}, "page": 0}
    right |= {"owner": "a tenant", "names": ["0" * 32]}
    return reader, {
        **right,
        "tables": {"attn": REQUEST["local"]["attn"]},
        "positions": {"attn": (0, 7)},
        "pages.positions": (0, 7),
    }


def shard() -> Example:
    """The shard of a page of a store."""
    first, *_ = shards_of(CACHED, 8)
    return first, {
        "worker": CACHED,
        "key": ("d", 0),
        "region": Region("pages", 4096, first.num_bytes),
        "num_pages": 1,
        "descriptor": 3,
        "offset_bytes": 0,
    }


def examples() -> dict[type, Callable[[], Example]]:
    """A function for each class, since methods change what they are called on."""
    rates = Rates("here", 1e-5, 1e-7, 1e-10, 1e-6, 1e-10)
    return {
        Budget: lambda: (Budget(), {"number": 3, "unit": "rows", "bytes_each": 8, "action": "plan"}),
        KVPlanError: lambda: error(KVPlanError),
        PeerError: lambda: error(PeerError),
        Model: lambda: (bad_values.MODEL, {"number": 0}),
        ObservedModel: lambda: (ObservedModel("m", {"a": bad_values.MODEL.named_layer(0)}), {"key": "a"}),
        View: lambda: (OURS.views[0], {"view_name": "k", "region": OURS.regions[0], "offset_bytes": 0}),
        Leases: lambda: (Leases(Driver()), {"request": "r", "lease": "r 0"}),
        Handoff: lambda: (
            Handoff(SOURCE, "r", 7, "a1", REQUEST["remote"]),
            {"key": KEY, "group": "attn", "attended": 3},
        ),
        Rates: lambda: (rates, {"path": "rates.json"}),
        FileBackend: lambda: files(FileBackend(Path.cwd() / "store")),
        MemoryBackend: lambda: files(MemoryBackend()),
        MemoryMover: lambda: (MemoryMover(), {"plan": PLAN, "specs": []}),
        StallGuard: lambda: (StallGuard(lambda: store(StoreReader)[0]), {"use": lambda reader: reader.num_steps}),
        StoreReader: lambda: store(StoreReader),
        StoreClient: lambda: store(StoreClient),
        StoredShard: shard,
        FakeCopier: lambda: (FakeCopier(FakeMemory([OURS]), OURS.key), {"ticket": None}),
    }


EXAMPLES = examples()


def listed() -> set[tuple[type, str]]:
    """The methods that ``tests.bad_values`` calls, by the classes that define them."""
    found = set()
    for _, function, _ in bad_values.calls():
        for kind in type(getattr(function, "__self__", None)).__mro__:
            found.add((kind, getattr(function, "__name__", "")))
    return found


def methods_of(kind: type) -> Iterator[str]:
    """The methods of a class that have parameters, and those that it inherits from a class that is not public."""
    bases = classes() & {*kind.__mro__[1:]}
    inherited = {name for base in bases for name in dir(base)}
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if name in inherited and name not in vars(kind):
            continue
        if not name.startswith("_") and inspect.isfunction(method) and len(inspect.signature(method).parameters) > 1:
            yield name


def methods() -> Iterator[tuple[type, str]]:
    """The methods of all public classes that are neither listed elsewhere nor steps of planning."""
    known = listed()
    # tests.nixl has those of kvplan_nixl that need NIXL
    ours = [kind for kind in classes() if kind.__module__.startswith(("kvplan.", "kvplan_nixl.serving."))]
    for kind in sorted(ours, key=lambda kind: kind.__name__):
        for name in methods_of(kind):
            if kind not in INNER and (kind, name) not in known:
                yield kind, name


METHODS = {f"{kind.__name__}.{name}": (kind, name) for kind, name in methods()}


def usual(method: Callable[..., Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Right values for the parameters of a method that have one; a parameter that needs one has to."""
    found: dict[str, Any] = {}
    for parameter in inspect.signature(method).parameters.values():
        keys = [key for key in (f"{method.__name__}.{parameter.name}", parameter.name) if key in right]
        if keys:
            found[parameter.name] = right[keys[0]]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise AssertionError(f"no example of {parameter.name} of {method.__qualname__}")
    return found


def arguments_of(right: Mapping[str, Any], value: Any) -> Iterator[dict[str, Any]]:
    """The value for each parameter alone, the others right, and for all of them."""
    for parameter in right:
        yield {**right, parameter: value}
    if len(right) > 1:
        yield dict.fromkeys(right, value)


def close(result: Any) -> None:
    """Close what a call has opened, which may stand beside its size."""
    for each in result if isinstance(result, tuple) else (result,):
        if hasattr(each, "close"):
            each.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", METHODS)
def test_wrong_values_end_in_typed_errors(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is passed, no error of Python's own comes out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda _: None)
    kind, name = METHODS[label]
    example, values = EXAMPLES[kind]()
    right, faults = usual(getattr(example, name), values), list[str]()
    for shown, value in SOME.items():
        for arguments in arguments_of(right, value):
            instance, _ = EXAMPLES[kind]()
            try:
                close(getattr(instance, name)(**arguments))
            except KVPlanError:
                pass
            except Exception as error:
                places = [parameter for parameter in arguments if arguments[parameter] is value]
                faults.append(f"{', '.join(places)}={shown}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("label", METHODS)
def test_right_values_are_right(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are good: without a wrong value nothing is refused but for want of a server."""
    monkeypatch.chdir(tmp_path)
    kind, name = METHODS[label]
    instance, right = EXAMPLES[kind]()
    method = getattr(instance, name)
    with pytest.raises(KVPlanError, match=UNANSWERED[label]) if label in UNANSWERED else nullcontext():
        close(method(**usual(method, right)))


def test_methods_are_found() -> None:
    """Methods of classes and of those that they inherit from, where nobody has listed them."""
    assert {"StoreClient.save", "StoreReader.find", "PeerError.with_hint"} <= {*METHODS}
    assert not {"TransferPlan.bind", "FakeMemory.execute", "StoreClient.find"} & {*METHODS}
