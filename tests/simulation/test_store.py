"""Fleets with a store: all rules hold, and faults of the store's machines are found that no fleet without one shows."""

from __future__ import annotations

from collections import Counter

import pytest

from kvplan import Model
from kvplan.protocol.page_reads import PageReads
from kvplan.testing.simulation import MODELS, Feature, Scenario, shrink
from kvplan_nixl.serving.store import MemoryBackend, StallGuard, StoreClient, StoreReader
from tests.blocking import wait_until
from tests.simulation.faults import RESEND_S, STORE_FAULTS, Fault
from tests.simulation.store_connector import STORE_MODELS, StoreFleets
from tests.simulation.test_coverage import count_calls, public_methods
from tests.simulation.test_simulation import breaks_no_rule
from tests.simulation.virtual_threads import WORLD
from tests.simulation.vllm_connector import (
    ROOM_TOKENS_PER_STEP,
    STORE_SCHEDULER,
    STORE_SEARCHES,
    STORE_WORKER,
    make_params,
)

pytestmark = pytest.mark.usefixtures("quiet")

WITH_STORE = Feature.SHARED_STORE | Feature.ROUGH_STORE | Feature.POPULAR_PROMPTS
"""The features that go with a store."""

NUM_SEEDS = 4
NUM_SWARM_SEEDS = 4
FAILING_SEEDS = (16, 25, 69)
"""Those of fleets in which a load misses a page, another one stalls, and an engine ends for good."""


@pytest.fixture(scope="module")
def fleets() -> StoreFleets:
    return StoreFleets()


CLASSES = (
    *(STORE_SCHEDULER.StoreScheduler, STORE_SEARCHES.StoreSearches, STORE_WORKER.StoreWorker),
    *(StoreClient, StoreReader, PageReads, StallGuard),
)
UNCALLED = {
    "connectors search for all workers at once": ("StoreReader.find", "StoreReader.abandon"),
    "the scheduler has keys and positions of its own": ("PageReads.chain", "PageReads.needs"),
}
"""Public methods of the store that no fleet calls, and why."""


@pytest.fixture(scope="module")
def calls() -> Counter[str]:
    """How often fleets that keep all rules have called the store, by method and the code of its error."""
    with pytest.MonkeyPatch.context() as patch:
        counter = count_calls(patch, CLASSES)
        fleets = StoreFleets()
        for model in STORE_MODELS.values():
            seeds = [*range(NUM_SEEDS), *FAILING_SEEDS * (model is MODELS["attention"])]
            for seed in seeds:
                outcome = fleets.run(Scenario.of(seed, model, features=Feature.STORE))
                assert outcome.rule == "", str(outcome)
    # the threads of dead engines, and idle ones, have ended
    assert not WORLD.threads
    return counter


def test_all_rules_hold_beside_a_store(calls: Counter[str]) -> None:
    """Of which pages leave before they are loaded, files are damaged, and calls fail or hang."""
    assert calls["StoreClient.save"] > 100
    assert calls["StoreClient.load"] > 20
    assert calls["StoreClient.load PAGE"]
    assert calls["StoreClient.load BACKEND"]
    assert calls["StallGuard.call BACKEND"]


def test_each_call_of_the_store_is_made(calls: Counter[str]) -> None:
    """Or cannot be, for a reason that is given."""
    methods = {f"{owner.__name__}.{name}" for owner in CLASSES for name, _ in public_methods(owner)}
    assert methods - calls.keys() == {name for names in UNCALLED.values() for name in names}


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError(), RuntimeError("no new thread")])
def test_a_search_that_fails_finds_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: it is raised in vLLM's scheduler, which would end."""
    (worker,) = Model.shipped("qwen3-0.6b").engine("d", num_blocks=9)
    backend = MemoryBackend()
    searches = STORE_SEARCHES.StoreSearches(backend, [worker], 16, {}, 30.0)
    chain = StoreReader(backend, worker, tokens_per_page=16).chain(range(40))

    def fail(*_: object) -> None:
        raise error

    if isinstance(error, RuntimeError):
        monkeypatch.setattr(searches._threads, "submit", fail)
    monkeypatch.setattr(backend, "files", fail)
    assert wait_until(lambda: searches.find("r", chain, 3)) == 3
    searches.close()


@pytest.mark.parametrize("model", STORE_MODELS)
def test_all_rules_hold_in_a_swarm_beside_a_store(model: str) -> None:
    """Also where requests come to both engines at once."""
    rooms = StoreFleets(make_params, tokens_per_step=ROOM_TOKENS_PER_STEP, resend_s=RESEND_S)
    for seed in range(NUM_SWARM_SEEDS):
        simulation = rooms if seed % 2 else StoreFleets()
        features = Feature.of(seed) | Feature.STORE | (Feature.SHARED_STORE if seed > 1 else Feature(0))
        features |= Feature.ROUGH_STORE if seed % 3 == 0 else Feature.POPULAR_PROMPTS
        outcome = simulation.run(Scenario.of(seed, MODELS[model], features=features))
        assert outcome.rule == "", str(outcome)


def test_a_request_of_a_malformed_handoff_may_be_loaded(fleets: StoreFleets) -> None:
    """From the store, which asks for no handoff."""
    outcome = fleets.run(Scenario.of(18, features=Feature.of(18) | Feature.STORE))
    assert outcome.rule == "", str(outcome)


def test_no_other_swarm_draws_a_store() -> None:
    assert not any((Feature.STORE | WITH_STORE) & Feature.of(seed) for seed in range(100))


@pytest.mark.parametrize("fault", STORE_FAULTS, ids=[fault.name for fault in STORE_FAULTS])
def test_a_fault_of_the_store_is_found(fleets: StoreFleets, fault: Fault) -> None:
    """The seed that shows it breaks the rule, but neither without the fault nor without the store, or its others."""
    shown_by = fault.features & WITH_STORE or Feature.STORE
    with fault.planted():
        assert fleets.run(fault.scenario).rule == fault.rule
        features = fault.features & ~shown_by
        assert fleets.run(Scenario.of(fault.seed, MODELS[fault.model], features=features)).rule == ""
    assert breaks_no_rule(fleets, fault.scenario)


def test_a_seed_is_one_run(fleets: StoreFleets) -> None:
    """Though threads search, save, load and evict."""
    scenario = Scenario.of(0, features=Feature.STORE)
    outcome = fleets.run(scenario)
    assert outcome.rule == "", str(outcome)
    assert fleets.run(scenario).trace == outcome.trace


def test_a_failure_of_a_store_is_shrunk(fleets: StoreFleets) -> None:
    (fault,) = (fault for fault in STORE_FAULTS if fault.name == "a key leaves out the last token of a page")
    with fault.planted():
        outcome = fleets.run(fault.scenario)
        shrunk = shrink(fleets, outcome)
        assert shrunk.rule == outcome.rule
        assert fleets.run(shrunk.scenario).trace == shrunk.trace
    assert len(shrunk.scenario.incidents) < len(outcome.scenario.incidents) / 2
    assert Feature.STORE in shrunk.scenario.features
    assert fleets.run(shrunk.scenario).rule == ""
