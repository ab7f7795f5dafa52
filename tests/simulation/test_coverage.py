"""What the swarms reach of the protocol: each transition and each call, but for those in a table, with reasons."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvplan.protocol import Claims, Leases, Reads, exporter, importer
from kvplan.protocol.claims import SourceClaims
from kvplan.protocol.exporter import Exporter
from kvplan.protocol.importer import Importer
from kvplan.protocol.peer_engines import PeerEngines
from kvplan.protocol.read_jobs import LeaseCheck
from kvplan.protocol.rooms import Rooms
from kvplan.testing.simulation import Feature, LeaseConnector, Scenario, Simulation
from tests.simulation.faults import RESEND_S
from tests.simulation.sglang_connector import DECODE, PREFILL, SGLANG_FEATURES, sglang_fleets
from tests.simulation.verified_connector import VerifiedConnector, vllm_verified_fleets
from tests.simulation.vllm_connector import HOST_CACHE, SCHEDULER, WORKER, VllmConnector, vllm_room_fleets

SEEDS = range(10)
LEASE_SEEDS = (*SEEDS, 27, 86)
"""In the last ones requests wait for a kept answer to give way, and for blocks to read one into."""
LATE_SEEDS = (132,)
LATE_FEATURES = ~(Feature.UPDATES | Feature.RIVALS | Feature.CROWDS | Feature.LOST_ENTRIES)
"""Decode has no block for a request whose lease ends after its first part, unless weights change or all is calm."""

UNREACHED_TRANSITIONS = {
    "ExportState COMPUTING REVOKE": "Exporter.revoke returns at once for a request that is not published",
    "ExportState LOST PUBLISH": "Exporter.publish returns at once for a request that is lost",
    "ExportState LOST REVOKE": "Exporter.revoke returns at once for a request that is not published",
    "ExportState LOST LOSE": "Exporter.revoke returns at once for a request that is not published",
    "ExportState PINNED ABORT": "no request comes again under the name of one that prefill has computed",
    "ImportState READING END": "workers report a request when they were told of its last part",
}
"""Transitions that no fleet reaches, and why."""

WHY_UNCALLED = {
    "it closes an engine, which dies in a fleet": ("Claims.close", "Scheduler.close", "Worker.close"),
    "a stand-in makes the worker's reads, and has no tensors": ("Worker.envelope", "Worker.register"),
    "SGLang's stand-in has no use for it": (
        *("Exporter.is_open", "PrefillRank.is_written", "Receiver.ensure_abort_notified"),
        *("Receiver.refuse_rebootstrap", "Sender.get_transfer_metric", "Sender.poll_pp_consensus"),
        *("Sender.should_send_kv_chunk",),
    ),
}
UNCALLED = {call: why for why, calls in WHY_UNCALLED.items() for call in calls}
"""Public methods that no fleet calls, and why."""

CLASSES = (
    *(Exporter, Importer, Leases, Claims, SourceClaims, Reads, LeaseCheck, Rooms, PeerEngines),
    *(SCHEDULER.Scheduler, WORKER.Worker, HOST_CACHE.HostCache),
    *(PREFILL.Sender, PREFILL.PrefillRank, DECODE.Receiver, DECODE.DecodeRank),
)


@pytest.fixture(scope="module")
def reached(quiet: None) -> set[str]:
    """The transitions and the public methods of classes that fleets have reached, by name."""
    transitions = set[str]()

    def transition(after: Callable[..., Any]) -> Callable[..., Any]:
        def noted(table: Any, state: Any, event: Any) -> Any:
            transitions.add(f"{type(state).__name__} {state.name} {event.name}")
            return after(table, state, event)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for module in (exporter, importer):
            patch.setattr(module, "after", transition(getattr(module, "after")))  # noqa: B009
        calls = count_calls(patch, CLASSES)
        fleets = (
            (Simulation(LeaseConnector), LEASE_SEEDS, ~Feature(0)),
            (Simulation(VllmConnector), SEEDS, ~Feature(0)),
            (vllm_room_fleets(RESEND_S), SEEDS, ~Feature(0)),
            (vllm_room_fleets(RESEND_S), LATE_SEEDS, LATE_FEATURES),
            (sglang_fleets(RESEND_S), SEEDS, SGLANG_FEATURES),
            (Simulation(VerifiedConnector), (1,), ~Feature(0)),
            (vllm_verified_fleets(), (1,), ~Feature(0)),
        )
        for simulation, seeds, features in fleets:
            for seed in seeds:
                outcome = simulation.run(Scenario.of(seed, features=Feature.of(seed) & features))
                assert outcome.rule == "", str(outcome)
    # a call that has raised an error is counted with its code
    return transitions | {name.split()[0] for name in calls}


def count_calls(patch: pytest.MonkeyPatch, classes: Iterable[type]) -> Counter[str]:
    """Count the calls of public methods from now on, by name, and by the code of the error that one has raised."""
    counter = Counter[str]()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counting(*arguments: Any, **named: Any) -> Any:
            try:
                returned = call(*arguments, **named)
            except Exception as error:
                counter[f"{name} {getattr(error, 'code', type(error).__name__)}"] += 1
                raise
            counter[name] += 1
            return returned

        return counting

    for owner in classes:
        for name, method in public_methods(owner):
            patch.setattr(owner, name, counted(f"{owner.__name__}.{name}", method))
    return counter


def public_methods(owner: type) -> list[tuple[str, Any]]:
    """The public methods of a class, its own ones, but no properties."""
    return [(name, value) for name, value in vars(owner).items() if inspect.isfunction(value) and name[0] != "_"]


def test_each_transition_is_reached(reached: set[str]) -> None:
    """Or cannot be, for a reason that is given; one that is given and reached fails too."""
    transitions = {
        f"{type(state).__name__} {state.name} {event.name}"
        for module in (exporter, importer)
        for state, event in module.TRANSITIONS
    }
    assert transitions - reached == UNREACHED_TRANSITIONS.keys()


def test_each_call_is_made(reached: set[str]) -> None:
    """Of the protocol's classes, and of those of connectors that engines call."""
    calls = {f"{owner.__name__}.{name}" for owner in CLASSES for name, _ in public_methods(owner)}
    assert calls - reached == UNCALLED.keys()
