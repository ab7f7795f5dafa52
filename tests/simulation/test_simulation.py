"""Fleets of a fixed set of seeds keep all rules, runs repeat to the byte, and planted faults are found and shrunk."""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import attrs
import pytest

from kvplan.testing.simulation import (
    MODELS,
    Connector,
    Feature,
    LeaseConnector,
    Scenario,
    Simulation,
    Site,
    Stages,
    shrink,
)
from kvplan.testing.simulation.__main__ import main
from kvplan.testing.simulation.catalog import NO_STAGES, SHAPES
from tests.pages import ROOT
from tests.simulation.faults import (
    CHOICE_FAULTS,
    DIGEST_FAULTS,
    FAULTS,
    FEATURE_FAULTS,
    FEATURE_ROOM_FAULTS,
    FEATURE_SGLANG_FAULTS,
    FEATURE_VLLM_FAULTS,
    HYBRID_FAULTS,
    HYBRID_SGLANG_FAULTS,
    HYBRID_VLLM_FAULTS,
    LIMIT_FAULTS,
    LIMIT_LEASE_FAULTS,
    RESEND_S,
    RESTART_FAULT,
    SENT_AGAIN_FAULTS,
    SENT_AGAIN_ROOM_FAULTS,
    SENT_AGAIN_SGLANG_FAULTS,
    SGLANG_FAULTS,
    STAGE_FAULTS,
    STAGING_FAULTS,
    STORE_FAULTS,
    TWO_STAGES,
    VLLM_DIGEST_FAULTS,
    VLLM_FAULTS,
    VLLM_LATE_DIGEST_FAULTS,
    VLLM_ROOM_DIGEST_FAULTS,
    VLLM_ROOM_FAULTS,
    Fault,
)
from tests.simulation.limits import small_limits
from tests.simulation.sglang_connector import SGLANG_FEATURES, SGLANG_MODELS, sglang_fleets
from tests.simulation.staged_connector import StagedConnector, choosing_fleets
from tests.simulation.store_connector import StoreFleets
from tests.simulation.verified_connector import VerifiedConnector, vllm_verified_fleets
from tests.simulation.vllm_connector import VllmConnector, make_params, vllm_room_fleets

pytestmark = pytest.mark.usefixtures("quiet")

NUM_SEEDS = 50
NUM_HYBRID_SEEDS = 25
NUM_ROOM_SEEDS = 8
NUM_SGLANG_SEEDS = 25
NUM_STAGE_SEEDS = 8
NUM_STAGED_SEEDS = 20
NUM_SENT_AGAIN_SEEDS = 8
NUM_VERIFIED_SEEDS = 3
NUM_SWARM_SEEDS = 12
FOUND = [fault for fault in FAULTS if fault.rule]
SGLANG_FOUND = [fault for fault in (*SGLANG_FAULTS, *HYBRID_SGLANG_FAULTS, *STAGE_FAULTS) if fault.rule]
ROOM_FOUND = [fault for fault in VLLM_ROOM_FAULTS if fault.rule]
STAGING_FOUND = [fault for fault in STAGING_FAULTS if fault.rule]
STALE = next(fault for fault in FAULTS if fault.name == "an ended lease is valid")


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return Simulation(LeaseConnector)


@pytest.fixture(scope="module")
def vllm() -> Simulation:
    return Simulation(VllmConnector)


@pytest.fixture(scope="module")
def vllm_rooms() -> Simulation:
    return vllm_room_fleets()


@pytest.fixture(scope="module")
def sglang() -> Simulation:
    return sglang_fleets()


@functools.cache
def breaks_no_rule(simulation: Simulation, scenario: Scenario) -> bool:
    """Whether a fleet keeps all rules, asked once of each: many faults are shown by the same seed."""
    return simulation.run(scenario).rule == ""


def ends_of(
    simulation: Simulation,
    num_seeds: int,
    model: str = "attention",
    stages: Stages = NO_STAGES,
    decode_stages: Stages = NO_STAGES,
) -> Counter[str]:
    """How requests end in fleets that keep all rules."""
    ends = Counter[str]()
    for seed in range(num_seeds):
        outcome = simulation.run(Scenario.of(seed, MODELS[model], stages, decode_stages))
        assert outcome.rule == "", str(outcome)
        ends.update(outcome.ends)
    assert ends["right"] > ends.total() / 2
    return ends


@pytest.mark.parametrize("connector", [LeaseConnector, VllmConnector])
def test_all_rules_hold(connector: Callable[[Site], Connector]) -> None:
    """In each fleet; most requests are right, and others fail with the errors that their faults explain."""
    simulation = Simulation(connector)
    ends = ends_of(simulation, NUM_SEEDS)
    assert {"right", "LEASE", "PEER", "PROMPT"} <= ends.keys() <= {"right", "LEASE", "PEER", "PROMPT", "TRANSFER"}


@pytest.mark.parametrize("connector", [LeaseConnector, VllmConnector])
@pytest.mark.parametrize("model", ["windows", "states", "hybrid", "drafts"])
def test_all_rules_hold_with_windows_and_states(connector: Callable[[Site], Connector], model: str) -> None:
    """Of which each token needs the last positions alone, or what the last one has left; requests end alike."""
    simulation = Simulation(connector)
    ends = ends_of(simulation, NUM_HYBRID_SEEDS, model)
    assert {"right", "LEASE", "PEER", "PROMPT"} <= ends.keys() <= {"right", "LEASE", "PEER", "PROMPT", "TRANSFER"}


def _is_found_in_no_plain_fleet(simulation: Simulation, fault: Fault) -> None:
    test_a_planted_fault_is_found(simulation, fault)
    with fault.planted():
        assert simulation.run(Scenario.of(fault.seed)).rule == ""


@pytest.mark.parametrize("fault", HYBRID_FAULTS, ids=[fault.name for fault in HYBRID_FAULTS])
def test_a_fault_of_windows_or_states_is_found(simulation: Simulation, fault: Fault) -> None:
    """In fleets whose model has them, and in no other fleet of that seed."""
    _is_found_in_no_plain_fleet(simulation, fault)


@pytest.mark.parametrize("fault", HYBRID_VLLM_FAULTS, ids=[fault.name for fault in HYBRID_VLLM_FAULTS])
def test_a_fault_of_windows_or_states_in_vllm_s_connector_is_found(vllm: Simulation, fault: Fault) -> None:
    """As one in what it is made of."""
    test_a_fault_of_windows_or_states_is_found(vllm, fault)


@pytest.mark.parametrize("model", MODELS)
def test_all_rules_hold_where_vllm_s_requests_have_transfer_ids(vllm_rooms: Simulation, model: str) -> None:
    """They come to both engines at once, and many are read while they are computed."""
    ends = ends_of(vllm_rooms, NUM_ROOM_SEEDS, model)
    assert {"right", "PEER"} <= ends.keys() <= {"right", "LEASE", "PEER", "PROMPT", "TOKENS"}


def test_the_room_of_a_request_that_came_twice_may_be_another_one_s(vllm_rooms: Simulation) -> None:
    """Two requests come under one name, and the first is read late, when its room has another one's prompt."""
    outcome = vllm_rooms.run(Scenario.of(50, MODELS["windows"], features=Feature.of(50)))
    assert outcome.error is None, outcome


@pytest.mark.parametrize("fault", ROOM_FOUND, ids=[fault.name for fault in ROOM_FOUND])
def test_a_fault_of_vllm_s_rooms_is_found(vllm_rooms: Simulation, fault: Fault) -> None:
    """As one of requests that come to decode when prefill has answered."""
    test_a_planted_fault_is_found(vllm_rooms, fault)


@pytest.mark.parametrize("num_stages", [(2, 1), (1, 2), (2, 2)], ids=["of prefill", "of decode", "of both"])
@pytest.mark.parametrize("connector", [LeaseConnector, VllmConnector])
@pytest.mark.parametrize("model", MODELS)
def test_all_rules_hold_where_there_are_pipeline_stages(
    connector: Callable[[Site], Connector], model: str, num_stages: tuple[int, int]
) -> None:
    """Each has its layers in block tables that all have: every stage of decode reads from all that have its layers."""
    simulation = Simulation(connector)
    ends = ends_of(simulation, NUM_STAGE_SEEDS, model, *map(Stages, num_stages))
    assert {"right", "LEASE", "PEER"} <= ends.keys() <= {"right", "LEASE", "PEER", "PROMPT", "TRANSFER"}


@pytest.mark.parametrize("stages", [NO_STAGES, TWO_STAGES], ids=["", "stages"])
@pytest.mark.parametrize("model", ["attention", "windows", "states", "hybrid"])
def test_all_rules_hold_in_sglang_s_fleets(sglang: Simulation, model: str, stages: Stages) -> None:
    """Where requests come to both engines at once, and some in a room that another one has or had.

    Each pipeline stage has block tables of its own, and publishes them when it comes to them.
    """
    ends = ends_of(sglang, NUM_SGLANG_SEEDS, model, stages)
    assert {"right", "PEER", "NAME", "TOKENS"} <= ends.keys() <= {"right", "LEASE", "NAME", "PEER", "PROMPT", "TOKENS"}


@pytest.mark.parametrize("fault", FOUND, ids=[fault.name for fault in FOUND])
def test_a_planted_fault_is_found(simulation: Simulation, fault: Fault) -> None:
    """The seed that shows it breaks the rule, and breaks none without the fault."""
    with fault.planted():
        assert simulation.run(fault.scenario).rule == fault.rule
    assert breaks_no_rule(simulation, fault.scenario)


@pytest.mark.parametrize("fault", VLLM_FAULTS, ids=[fault.name for fault in VLLM_FAULTS])
def test_a_fault_in_vllm_s_connector_is_found(vllm: Simulation, fault: Fault) -> None:
    """As one in what it is made of."""
    test_a_planted_fault_is_found(vllm, fault)


@pytest.mark.parametrize("fault", SGLANG_FOUND, ids=[fault.name for fault in SGLANG_FOUND])
def test_a_fault_in_sglang_s_plugin_is_found(sglang: Simulation, fault: Fault) -> None:
    """As one in vLLM's connector."""
    test_a_planted_fault_is_found(sglang, fault)


SENT_AGAIN = {
    "leases": (lambda: Simulation(LeaseConnector, resend_s=RESEND_S), SENT_AGAIN_FAULTS),
    "vLLM's rooms": (lambda: vllm_room_fleets(RESEND_S), SENT_AGAIN_ROOM_FAULTS),
    "SGLang's": (lambda: sglang_fleets(RESEND_S), SENT_AGAIN_SGLANG_FAULTS),
}


@pytest.mark.parametrize("fleets", SENT_AGAIN)
def test_requests_that_prefill_did_not_compute_may_come_again(fleets: str) -> None:
    """All rules hold, and faults are found that no fleet shows where they come once."""
    make_simulation, faults = SENT_AGAIN[fleets]
    simulation = make_simulation()
    ends_of(simulation, NUM_SENT_AGAIN_SEEDS)
    for fault in faults:
        test_a_planted_fault_is_found(simulation, fault)


SWARMS = {
    "leases": lambda: Simulation(LeaseConnector),
    "vLLM's": lambda: Simulation(VllmConnector),
    "vLLM's rooms": lambda: vllm_room_fleets(RESEND_S),
    "SGLang's": sglang_fleets,
}


SWARM_MODELS = [(fleets, model) for fleets in SWARMS for model in (SGLANG_MODELS if fleets == "SGLang's" else MODELS)]


@pytest.mark.parametrize(("fleets", "model"), SWARM_MODELS)
def test_all_rules_hold_in_a_swarm(fleets: str, model: str) -> None:
    """Each fleet has a few features, of which SGLang's engines lack some."""
    simulation = SWARMS[fleets]()
    ends = Counter[str]()
    for seed in range(NUM_SWARM_SEEDS):
        features = Feature.of(seed) & (SGLANG_FEATURES if fleets == "SGLang's" else ~Feature(0))
        outcome = simulation.run(Scenario.of(seed, MODELS[model], features=features))
        assert outcome.rule == "", str(outcome)
        # a lost prefill is asked in vain by every request that a router sends to it again
        if Feature.LOST_ENGINES not in features:
            ends.update(outcome.ends)
    assert ends["right"] > ends.total() / 2


@pytest.mark.parametrize("fleets", ["leases", "vLLM's", "vLLM's rooms"])
def test_all_rules_hold_where_messages_come_within_steps(fleets: str) -> None:
    """As where a connector's threads run beside the engine's."""
    simulation = SWARMS[fleets]()
    for seed in range(NUM_SWARM_SEEDS):
        features = Feature.of(seed) | Feature.INTERLEAVED
        outcome = simulation.run(Scenario.of(seed, features=features))
        assert outcome.rule == "", str(outcome)
        assert outcome == simulation.run(Scenario.of(seed, features=features))


@pytest.mark.parametrize("fleets", ["leases", "vLLM's", "vLLM's rooms"])
def test_all_rules_hold_where_messages_are_late(fleets: str) -> None:
    """As where hosts are busy."""
    simulation = SWARMS[fleets]()
    for seed in range(NUM_ROOM_SEEDS):
        outcome = simulation.run(Scenario.of(seed, features=Feature.of(seed) | Feature.LATE_MESSAGES))
        assert outcome.rule == "", str(outcome)


def test_all_rules_hold_where_readers_wait_for_less_than_a_prompt_takes(vllm_rooms: Simulation) -> None:
    """Each entry gives prefill as much time again."""
    ends = Counter[str]()
    for seed in range(NUM_ROOM_SEEDS):
        outcome = vllm_rooms.run(Scenario.of(seed, features=Feature.of(seed) | Feature.SHORT_WAITS))
        assert outcome.rule == "", str(outcome)
        ends.update(outcome.ends)
    assert min(ends["right"], ends["PEER"]) > 10


def test_prefill_preempts_requests_only_with_that_feature(vllm_rooms: Simulation) -> None:
    """Also requests of which decode reads parts."""

    def num_preempted(features: Feature) -> int:
        outcomes = [vllm_rooms.run(Scenario.of(seed, features=features)) for seed in range(5)]
        lines = [line for outcome in outcomes for line in outcome.trace]
        return sum("prefill" in line and "is preempted" in line for line in lines)

    assert num_preempted(Feature.BURSTS) == 0
    assert num_preempted(Feature.BURSTS | Feature.PREEMPTION) > 5


def test_a_claim_may_come_when_prefill_has_preempted_its_request(vllm_rooms: Simulation) -> None:
    """Messages are late by 0.1 s: prefill overwrites what it has published before it hears that decode claims it."""
    outcome = vllm_rooms.run(Scenario.of(33, features=Feature.BURSTS | Feature.PREEMPTION | Feature.HANGUPS))
    assert outcome.rule == "", str(outcome)
    assert outcome.ends["LEASE"]


def test_children_of_a_request_may_read_the_blocks_of_each_other() -> None:
    """One lease of two is claimed by both readers of a room, of which one reads on for half a minute."""
    some = Feature.NEAR_PROMPTS | Feature.GARBLED_MESSAGES | Feature.HOST_COPIES | Feature.SINKS
    features = some | Feature.CHILDREN | Feature.ADAPTERS
    outcome = vllm_room_fleets(RESEND_S).run(Scenario.of(51053, features=features))
    assert outcome.rule == "", str(outcome)


def test_a_request_does_not_come_back_in_the_step_that_preempts_it() -> None:
    """As in vLLM, whose connector would not see that it was preempted: decode would read other blocks."""
    outcome = vllm_room_fleets(RESEND_S).run(Scenario.of(198, features=Feature.PREEMPTION))
    assert outcome.rule == "", str(outcome)
    # at the time of a step, a name is preempted or runs
    lines = [line.split()[:3] for line in outcome.trace if " is preempted" in line or " runs: " in line]
    steps = Counter((time, host, name) for time, host, name in lines)
    assert max(steps.values()) == 1


def test_a_read_that_has_failed_in_part_does_not_wait_for_an_engine_that_is_gone(simulation: Simulation) -> None:
    """One slice has failed, and another hangs: the source is asked all the same, and its silence ends the request."""
    features = Feature.LOST_ENGINES | Feature.SLICES | Feature.HELD_TRANSFERS | Feature.RESTARTS
    outcome = simulation.run(Scenario.of(123, features=features))
    assert outcome.rule == "", str(outcome)


def test_features_that_a_failure_does_not_need_are_left_out(vllm_rooms: Simulation) -> None:
    """A scenario without features is the same as if there were none."""
    (fault,) = (fault for fault in FEATURE_ROOM_FAULTS if fault.name == "what a step under way writes is published")
    assert Scenario.of(fault.seed, features=Feature(0)) == Scenario.of(fault.seed)
    with fault.planted():
        outcome = vllm_rooms.run(Scenario.of(fault.seed, features=fault.features | Feature.HELD_TRANSFERS))
        assert shrink(vllm_rooms, outcome).scenario.features == fault.features


@pytest.mark.parametrize("fault", FEATURE_FAULTS, ids=[fault.name for fault in FEATURE_FAULTS])
def test_a_fault_of_a_feature_is_found(simulation: Simulation, fault: Fault) -> None:
    """And not in the same fleet without it."""
    _is_found_in_no_plain_fleet(simulation, fault)


@pytest.mark.parametrize("fault", FEATURE_ROOM_FAULTS, ids=[fault.name for fault in FEATURE_ROOM_FAULTS])
def test_a_fault_of_a_feature_is_found_in_vllm_s_rooms(vllm_rooms: Simulation, fault: Fault) -> None:
    """As one of leases alone."""
    test_a_fault_of_a_feature_is_found(vllm_rooms, fault)


@pytest.mark.parametrize("fault", FEATURE_VLLM_FAULTS, ids=[fault.name for fault in FEATURE_VLLM_FAULTS])
def test_a_fault_of_a_feature_is_found_in_vllm_s_connector(vllm: Simulation, fault: Fault) -> None:
    """As one of leases alone."""
    test_a_fault_of_a_feature_is_found(vllm, fault)


@pytest.mark.parametrize("fault", FEATURE_SGLANG_FAULTS, ids=[fault.name for fault in FEATURE_SGLANG_FAULTS])
def test_a_fault_of_a_feature_is_found_in_sglang_s_plugin(sglang: Simulation, fault: Fault) -> None:
    """As one of leases alone."""
    test_a_fault_of_a_feature_is_found(sglang, fault)


@pytest.mark.parametrize("fault", LIMIT_FAULTS, ids=[fault.name for fault in LIMIT_FAULTS])
def test_a_fault_at_a_limit_is_found(vllm_rooms: Simulation, fault: Fault) -> None:
    """Where lists, questions and handshakes have room for one or two, and not where they have room for all."""
    with small_limits():
        test_a_planted_fault_is_found(vllm_rooms, fault)
    with fault.planted():
        assert vllm_rooms.run(fault.scenario).rule == ""


@pytest.mark.parametrize("fault", LIMIT_LEASE_FAULTS, ids=[fault.name for fault in LIMIT_LEASE_FAULTS])
def test_a_fault_at_a_limit_of_leases_is_found(simulation: Simulation, fault: Fault) -> None:
    """As one in vLLM's rooms."""
    test_a_fault_at_a_limit_is_found(simulation, fault)


def test_a_request_with_a_malformed_address_does_not_wait_for_the_server_of_its_room(vllm_rooms: Simulation) -> None:
    """That server may restart; the request waits for another one, which does not answer."""
    outcome = vllm_rooms.run(Scenario.of(1005, features=Feature.RESTARTS | Feature.BAD_FIELDS))
    assert outcome.rule == "", str(outcome)


def test_all_ranks_hear_of_a_restart_at_once() -> None:
    """A rank that asks a server of another start does not wait for news, which other ranks have had by then."""
    scenario = Scenario.of(RESTART_FAULT.seed, features=Feature.BURSTS | Feature.RESTARTS | Feature.TURNS)
    fleets = sglang_fleets(RESEND_S)
    with small_limits():
        outcome = fleets.run(scenario)
        assert outcome.rule == "", str(outcome)
        with RESTART_FAULT.planted():
            assert fleets.run(scenario).rule == RESTART_FAULT.rule


def test_a_stage_publishes_nothing_of_a_request_that_has_failed() -> None:
    """Its lease has ended for want of a reader, when a later stage has still to send most of it."""
    outcome = sglang_fleets(RESEND_S).run(Scenario.of(214, MODELS["states"], TWO_STAGES, features=Feature.SHORT_WAITS))
    assert outcome.rule == "", str(outcome)


def test_a_refused_read_waits_for_a_handshake_that_has_begun_before() -> None:
    """The handshake began in a network that was cut, and goes on in vain when that is whole again."""
    some = Feature.BURSTS | Feature.NEAR_PROMPTS | Feature.RESTARTS
    features = some | Feature.LONG_PREFILLS | Feature.RESHAPES | Feature.CROWDS
    outcome = choosing_fleets().run(Scenario.of(51881, MODELS["hybrid"], features=features))
    assert outcome.rule == "", str(outcome)


def test_a_rank_that_hears_of_a_later_start_alone_waits_on() -> None:
    """The server of a room restarts when three of four ranks have their answers."""
    lost = Feature.RESTARTS | Feature.RIVALS | Feature.LOST_ENTRIES
    named = Feature.ADAPTERS | Feature.NAMED_AGAIN
    features = lost | named | Feature.BURSTS | Feature.TURNS | Feature.SINKS | Feature.CROWDS
    outcome = sglang_fleets(RESEND_S).run(Scenario.of(5103, MODELS["windows"], features=features))
    assert outcome.rule == "", str(outcome)


def test_a_next_turn_is_read_from_the_answer_of_decode(vllm: Simulation, simulation: Simulation) -> None:
    """Prefill reads, and an answer gives way or is read; a request comes again under the name of another one."""
    for fleets in (vllm, simulation):
        outcomes = [fleets.run(Scenario.of(seed, features=Feature.TURNS)) for seed in range(6)]
        lines = [line for outcome in outcomes for line in outcome.trace]
        assert sum(" prefill-" in line and "+ is received" in line for line in lines) > 10
        assert sum(" decode-" in line and " is released" in line for line in lines) > 10
    lines = [*simulation.run(Scenario.of(0, features=Feature.REPEATS)).trace]
    names = Counter(line.split()[2] for line in lines if " prefill-" in line and " is right" in line)
    assert max(names.values()) == 2


@pytest.fixture(scope="module")
def staged() -> Simulation:
    return Simulation(StagedConnector)


def test_all_rules_hold_where_requests_are_staged(staged: Simulation) -> None:
    """Chunk by chunk through a region of each worker, by copies that take a while."""
    assert ends_of(staged, NUM_STAGED_SEEDS).keys() <= {"right", "LEASE", "PEER", "PROMPT", "TRANSFER"}


@pytest.mark.parametrize("fault", STAGING_FOUND, ids=[fault.name for fault in STAGING_FOUND])
def test_a_fault_of_staging_is_found(simulation: Simulation, staged: Simulation, fault: Fault) -> None:
    """And in no fleet that does not stage."""
    test_a_planted_fault_is_found(staged, fault)
    with fault.planted():
        assert simulation.run(Scenario.of(fault.seed)).rule == ""


@pytest.fixture(scope="module")
def verified() -> Simulation:
    return Simulation(VerifiedConnector)


def test_all_rules_hold_where_digests_are_compared(verified: Simulation) -> None:
    """No request that is right has other digests than its source."""
    assert ends_of(verified, NUM_VERIFIED_SEEDS).keys() <= {"right", "LEASE", "PEER", "PROMPT"}


@pytest.mark.parametrize("fault", DIGEST_FAULTS, ids=[fault.name for fault in DIGEST_FAULTS])
def test_a_fault_of_digests_is_found(simulation: Simulation, verified: Simulation, fault: Fault) -> None:
    """And in no fleet that compares none."""
    test_a_fault_of_staging_is_found(simulation, verified, fault)


def test_all_rules_hold_where_readers_choose_to_stage_or_vllm_s_compare_digests() -> None:
    """And their faults are found, of which the same fleets without them show none."""
    for simulation, plain, num_seeds, faults in (
        (choosing_fleets(), Simulation(LeaseConnector), NUM_STAGED_SEEDS, CHOICE_FAULTS),
        (vllm_verified_fleets(), Simulation(VllmConnector), NUM_VERIFIED_SEEDS, VLLM_DIGEST_FAULTS),
        (vllm_verified_fleets(make_params), vllm_room_fleets(), NUM_VERIFIED_SEEDS, VLLM_ROOM_DIGEST_FAULTS),
    ):
        assert ends_of(simulation, num_seeds).keys() <= {"right", "LEASE", "PEER", "PROMPT", "TRANSFER"}
        for fault in faults:
            test_a_fault_of_staging_is_found(plain, simulation, fault)


def test_digests_that_come_when_their_lease_has_ended_are_dropped() -> None:
    """As they do where vLLM's scheduler hears of a step when it has scheduled the next one."""
    late, at_once = vllm_verified_fleets(make_params, hears_late=True), vllm_verified_fleets(make_params)
    (fault,) = VLLM_LATE_DIGEST_FAULTS
    with fault.planted():
        assert late.run(fault.scenario).rule == fault.rule
        assert at_once.run(fault.scenario).rule == ""
    assert breaks_no_rule(late, fault.scenario)


def test_a_seed_of_sglang_s_is_one_run(sglang: Simulation) -> None:
    """Each random name comes from the seed; a failure is shrunk and replayed as others are."""
    (fault,) = (fault for fault in SGLANG_FAULTS if fault.name == "decode claims no lease")
    with fault.planted():
        outcome = shrink(sglang, sglang.run(Scenario.of(fault.seed)))
        assert outcome.rule == fault.rule
        assert sglang.run(outcome.scenario).trace == outcome.trace
    assert sglang.run(outcome.scenario).rule == ""


def test_a_seed_is_one_run(simulation: Simulation) -> None:
    """Again in the same process, and in others, where strings have other hashes."""
    scenario = Scenario.of(3, features=Feature.of(3))
    trace = "\n".join(simulation.run(scenario).trace)
    assert "\n".join(simulation.run(scenario).trace) == trace
    command = [sys.executable, "-m", "kvplan.testing.simulation", "--seed", "3"]
    for hash_seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert trace in run.stdout


@pytest.mark.parametrize("fleet", ["rooms", "store"])
def test_a_seed_is_one_run_in_all_processes(fleet: str) -> None:
    """Many requests wait for one answer in a room, and a page of a store has many files."""
    program = f"from tests.simulation.test_simulation import print_run; print_run({fleet!r})"
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in "05"
    ]
    assert runs[0] == runs[1]
    assert "all rules hold" in runs[0]


def print_run(fleet: str) -> None:
    """Print what happens in a fleet, and how it ends."""
    logging.disable(logging.CRITICAL)
    if fleet == "rooms":
        outcome = vllm_room_fleets().run(Scenario.of(1, features=Feature.of(1)))
    else:
        outcome = StoreFleets().run(Scenario.of(6, features=Feature.STORE))
    print(*outcome.trace, outcome, sep="\n")


def test_a_failure_is_shrunk(simulation: Simulation) -> None:
    """To a scenario that breaks the same rule, of which no incident can be left out."""
    with STALE.planted():
        outcome = simulation.run(Scenario.of(STALE.seed))
        shrunk = shrink(simulation, outcome)
        assert shrunk.rule == outcome.rule == STALE.rule
        incidents = shrunk.scenario.incidents
        assert len(incidents) < len(outcome.scenario.incidents) / 2
        for incident in incidents:
            rest = tuple(other for other in incidents if other is not incident)
            assert simulation.run(attrs.evolve(shrunk.scenario, incidents=rest)).rule != STALE.rule
        assert simulation.run(shrunk.scenario).trace == shrunk.trace
    right = simulation.run(shrunk.scenario)
    assert right.rule == ""
    assert shrink(simulation, right) is right


def test_a_failure_of_stages_is_shrunk(sglang: Simulation) -> None:
    """To engines whose prefill has them still, on shapes as plain as may be."""
    (fault,) = (fault for fault in STAGE_FAULTS if fault.name == "the first stage has the pages of all")
    with fault.planted():
        shrunk = shrink(sglang, sglang.run(fault.scenario))
        assert shrunk.rule == fault.rule
        assert sglang.run(shrunk.scenario).trace == shrunk.trace
    shapes = {member.name.partition("-")[0]: member.shape for member in shrunk.scenario.members}
    assert shapes["prefill"] == attrs.evolve(SHAPES[0], stages=TWO_STAGES)
    assert sglang.run(shrunk.scenario).rule == ""


def test_a_failure_with_states_is_shrunk(simulation: Simulation) -> None:
    """To engines that run the same model, on shapes as plain as may be."""
    (fault,) = (fault for fault in HYBRID_FAULTS if fault.name == "a state is read from another request's slot")
    with fault.planted():
        shrunk = shrink(simulation, simulation.run(fault.scenario))
    assert shrunk.rule == fault.rule
    assert len(shrunk.scenario.incidents) <= 1
    assert {member.shape.model for member in shrunk.scenario.members} == {MODELS["states"]}
    assert {member.shape.tp for member in shrunk.scenario.members} == {1}


def test_the_command_runs_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    """One with its trace, or several; one that breaks a rule is shrunk, and the status is 1."""
    assert main(["--seed", "1"]) == 0
    assert "seed 1: all rules hold" in capsys.readouterr().out
    assert main(["--plain", "--seeds", "2", "--model", "windows", "--stages", "2", "--decode-stages", "2"]) == 0
    assert capsys.readouterr().out == "2 seeds: all rules hold\n"
    with STALE.planted():
        assert main(["--seed", f"{STALE.seed}", "--seeds", "5", "--plain"]) == 1
    printed = capsys.readouterr().out
    assert "shrunk:" in printed
    assert printed.count(f"{STALE.rule}: a reader of request-") == 3
    assert "Arrival(" in printed


def test_the_page_counts_the_faults_that_are_found() -> None:
    """By where they are planted; that each is found by its seed is tested above."""
    kinds = (
        FAULTS,
        [*HYBRID_FAULTS, *HYBRID_VLLM_FAULTS, *HYBRID_SGLANG_FAULTS],
        [*VLLM_FAULTS, *VLLM_ROOM_FAULTS],
        [*SGLANG_FAULTS, *STAGE_FAULTS],
        [
            *(*STAGING_FAULTS, *CHOICE_FAULTS, *DIGEST_FAULTS),
            *(*VLLM_DIGEST_FAULTS, *VLLM_ROOM_DIGEST_FAULTS, *VLLM_LATE_DIGEST_FAULTS),
        ],
        [*FEATURE_FAULTS, *FEATURE_VLLM_FAULTS, *FEATURE_SGLANG_FAULTS, *FEATURE_ROOM_FAULTS],
        [*LIMIT_FAULTS, *LIMIT_LEASE_FAULTS],
        [*SENT_AGAIN_FAULTS, *SENT_AGAIN_ROOM_FAULTS, *SENT_AGAIN_SGLANG_FAULTS],
        STORE_FAULTS,
    )
    page = (ROOT / "docs" / "how-to" / "simulation.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (\d+) of (\d+) \| [^|]+ \|$", page, re.MULTILINE)
    assert [(int(found), int(planted)) for found, planted in rows] == [
        (sum(bool(fault.rule) for fault in faults), len(faults)) for faults in kinds
    ]
    num_unfound = sum(not fault.rule for faults in kinds for fault in faults)
    assert f"Of the {num_unfound} that are not found" in page
