"""What changes while vLLM runs: weights, their versions, adapters, resets; and how kvplan hears of it, without vLLM."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvplan import KVPlanError, Model, encode
from kvplan_nixl.settings import StoreSettings
from tests.serving.test_fingerprint import MODEL, poke, write
from tests.simulation.stand_in import stand_in
from tests.simulation.test_vllm_rooms import Pair
from tests.simulation.test_vllm_scheduler import (
    ASKED,
    PROMPT,
    SAID,
    Engines,
    blocks_of,
    computed,
    engines,
    ids_of,
    observed,
    request_of,
    step_of,
)
from tests.simulation.vllm_connector import VALUES, cache_of, config_of
from tests.simulation.vllm_objects import (
    EngineCoreOutput,
    EngineCoreOutputs,
    KVConnectorOutput,
    LoRARequest,
    ModelRunnerOutput,
    scheduled,
)

HOOKS, STATE, STORE = stand_in("vllm", ("engine_hooks", "engine_state", "store_scheduler"), VALUES)

__all__ = ["engines"]


class Connector(NamedTuple):
    """A connector, which has the state of its engine."""

    state: Any


class Multi(NamedTuple):
    """vLLM's connector of several."""

    sub_connectors: tuple[Any, ...]


class Report(NamedTuple):
    """What workers say of adapters."""

    adapters: list[Any]


class Reports(NamedTuple):
    """The reports of several connectors."""

    metadata: tuple[Any, ...]


def state_of(*tokens: str) -> Any:
    """The state of an engine whose changes without a name have these versions."""
    remaining = iter(tokens or ("1", "2", "3"))
    return STATE.EngineState({"weights": "5f1a"}, lambda _: next(remaining))


def lora(adapter_id: int = 1, name: str = "sql", path: str = "/nowhere", **fields: Any) -> LoRARequest:
    return LoRARequest(name, adapter_id, path, **fields)


def loaded(content: str, adapter_id: int = 1, name: str = "sql") -> Any:
    return STATE.AdapterChanges((STATE.LoadedAdapter(adapter_id, name, content),))


def dropped(*ids: int) -> Any:
    return STATE.AdapterChanges(dropped=frozenset(ids))


# Versions of weights


def refusal_of(reader: Any, params: Any) -> Any:
    """The error of a request that is read, None if it is read."""
    step = step_of(reader, ("full",), SAID[:PROMPT], params)
    assert len(step.reads) + len(step.refused) == 1
    return next(iter(step.refused.values()), None)


def test_engines_of_other_versions_are_refused_with_both(engines: Engines) -> None:
    """Prefill's weights change, then decode's: a handoff is read by whom has the same version, and is named else."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    before = computed(prefill)
    assert refusal_of(decode, before) is None
    prefill._state.weights_changed()
    prefill._state.weights_named("step 7")
    after = computed(prefill)
    error = refusal_of(decode, after)
    assert (error.code, error.expected, error.got) == ("MODEL", "weights_version that of the start", "'step 7'")
    decode._state.weights_changed()
    # a change without a name is of one engine alone
    assert refusal_of(decode, after).code == "MODEL"
    decode._state.weights_named("step 7")
    assert refusal_of(decode, after) is None
    # what was offered before the change
    assert refusal_of(decode, before).got == "that of the start"


def test_a_handoff_of_other_weights_is_not_claimed(engines: Engines) -> None:
    """Prefill keeps no blocks for a reader that will not read."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    decode._state.weights_changed()
    decode.add(request_of(SAID[:PROMPT], computed(prefill)))
    assert "num_claims" not in observed(decode)


def test_a_room_of_other_weights_is_refused(engines: Engines) -> None:
    """Its lease is not claimed."""
    pair = Pair(engines, ("full",))
    pair.decode._state.weights_changed()
    pair.begin()
    pair.compute(40)
    record = pair.decode._importer._requests["r"]
    assert record.refusal.code == "MODEL"
    assert record.found is None
    assert pair.allocate().refused["r"].code == "MODEL"


@pytest.mark.parametrize("num_published", [0, 40])
def test_no_more_is_published_of_a_request_that_weights_have_changed_under(
    engines: Engines, num_published: int
) -> None:
    """Also where both engines have the new ones: its first blocks are of the old ones. It is not handed over."""
    pair = Pair(engines, ("full",))
    pair.prefill.count_tokens_to_read(pair.prompt, 0)
    pair.begin()
    if num_published:
        pair.compute(num_published)
        assert len(pair.allocate().parts) == 1
    for engine in (pair.prefill, pair.decode):
        engine._state.weights_changed()
        engine._state.weights_named("step 7")
    pair.compute(90)
    if num_published:
        assert pair.decode.take_step().parts == []
    else:
        assert pair.decode.count_tokens_to_read(pair.answer, 0) is None
    assert pair.finish() is None


def test_weights_that_change_after_a_claim_refuse_the_read(engines: Engines) -> None:
    """A request may wait for blocks while weights change."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    request = request_of(SAID[:PROMPT], computed(prefill))
    decode.add(request)
    num_tokens = decode.count_tokens_to_read(request, 0)
    decode._state.weights_changed()
    blocks = blocks_of(("full",), num_tokens)
    decode.begin_read(request, blocks, num_tokens)
    assert decode.take_step().refused["r"].code == "MODEL"


def test_a_request_that_weights_have_changed_under_is_not_handed_over(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first blocks are of the old weights, and its last ones of the new."""
    prefill = engines.start("full")
    request = request_of(SAID[:PROMPT], ASKED, [7])
    prefill.count_tokens_to_read(request, 0)
    prefill._state.weights_changed()
    assert prefill.hand_over(request, ids_of(("full",), PROMPT)) is None
    assert "KV is not exported: weights or its adapter have changed" in caplog.text
    # one that begins afterwards, without anything from the prefix cache
    prefill.count_tokens_to_read(request, 0)
    assert prefill.hand_over(request, ids_of(("full",), PROMPT)) is not None


@pytest.mark.parametrize("changes", [True, False])
def test_a_version_that_comes_back_does_not_make_requests_current(changes: bool) -> None:
    """Some of their blocks are of the version between."""
    state = state_of()
    state.weights_named("step 7")
    request = request_of(SAID[:PROMPT], ASKED, [7])
    state.note_origin(request, 0)
    for version in ("step 8", "step 7"):
        if changes:
            state.weights_changed()
        state.weights_named(version)
    assert not state.is_current(request)


def test_a_prefix_cache_of_old_weights_is_not_handed_over(engines: Engines) -> None:
    """Until it is reset: vLLM's own cache does not know of weights."""
    prefill = engines.start("full")

    def handed_over(num_cached: int) -> bool:
        request = request_of(SAID[:PROMPT], ASKED, [7])
        prefill.count_tokens_to_read(request, num_cached)
        prefill.publish(scheduled())
        return prefill.hand_over(request, ids_of(("full",), PROMPT)) is not None

    assert handed_over(16)
    prefill._state.weights_changed()
    assert (handed_over(0), handed_over(16)) == (True, False)
    prefill._state.prefix_cache_reset()
    assert handed_over(16)
    # nothing is cached when an engine is reset before its weights change, as it is while it pauses
    prefill._state.prefix_cache_reset()
    prefill._state.weights_changed()
    assert handed_over(16)


def test_a_reset_alone_does_not_separate_engines(engines: Engines) -> None:
    """What was handed over is gone, and what is computed afterwards is read."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    prefill._state.prefix_cache_reset()
    prefill.reset()
    decode.reset()
    assert refusal_of(decode, computed(prefill)) is None


def test_the_first_version_is_that_of_the_start() -> None:
    """Naming it changes nothing, unless weights have changed."""
    state = state_of()
    state.weights_named("default")
    assert state.version == ""
    state.weights_changed()
    state.weights_named("default")
    assert state.version == "unnamed 1"


# Keys of a store


def keys_of(state: Any, **fields: Any) -> list[Any]:
    return [*state.store_facts_of(request_of(SAID, **fields))]


def test_keys_of_a_store_have_the_version() -> None:
    """What was stored under other weights is not found, by this engine or by others; equal names are found."""
    state, other = state_of(), state_of()
    assert keys_of(state) == keys_of(other) == []
    state.weights_changed()
    assert keys_of(state) == [(0, "weights version unnamed 1")]
    state.weights_changed()
    assert keys_of(state) == [(0, "weights version unnamed 2")]
    for each in (state, other):
        each.weights_named("step 7")
    assert keys_of(state) == keys_of(other) == [(0, "weights version step 7")]


def test_a_reset_of_a_store_forgets_what_was_stored() -> None:
    """Unless a change that vLLM has told of explains it: its version stays, which others may have too."""
    state = state_of()
    state.store_reset()
    assert state.version == "unnamed 1"
    state.weights_changed()
    state.weights_named("step 7")
    state.store_reset()
    assert state.version == "step 7"
    state.store_reset()
    assert state.version == "unnamed 3"
    state.weights_named("step 8")
    assert state.version == "step 8"


def test_a_reset_of_a_store_is_undone_by_the_first_name() -> None:
    state = state_of()
    state.store_reset()
    state.weights_named("default")
    assert state.version == ""


@pytest.mark.parametrize("loads", [False, True])
def test_a_request_that_weights_have_changed_under_is_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loads: bool
) -> None:
    """A current one is, under keys of its version: another version finds nothing of it."""
    config = config_of("prefill")
    config.kv_transfer_config.is_kv_consumer = loads
    settings = StoreSettings.read({"folder": str(tmp_path), "tokens_per_page": 16}, "settings")
    state = state_of()
    store = STORE.StoreScheduler(config, cache_of(["full"], 16), settings, state)
    (worker,) = Model.shipped("qwen3-0.6b").engine("p", num_blocks=9)
    store.set_offers([encode(worker)])
    request = request_of(SAID[:PROMPT], None, [7], status=STORE.RequestStatus.FINISHED_STOPPED)
    chains = []
    for _ in range(2):
        assert store.count_tokens_to_load(request, 0) in (0, None)
        assert store.begin_save(request, ids_of(("full",), PROMPT))
        chains += [job.chain.keys for job in store.take_step().saves]
        state.weights_changed()
    assert not {*chains[0]} & {*chains[1]}
    assert not store.begin_save(request, ids_of(("full",), PROMPT))
    assert "KV is not stored: weights or its adapter have changed" in caplog.text
    store.close()


def test_a_window_that_was_read_in_part_is_stored_from_there(tmp_path: Path) -> None:
    """Another connector has read it from there, in a block of which its source lacks the beginning."""
    settings = StoreSettings.read({"folder": str(tmp_path), "tokens_per_page": 16}, "settings")
    store = STORE.StoreScheduler(config_of("prefill"), cache_of(["window"], 16, 44), settings, state_of())
    store.set_offers([encode(worker) for worker in Model.shipped("qwen3-0.6b").engine("p", num_blocks=9)])
    request = request_of(SAID[:PROMPT], None, [7], status=STORE.RequestStatus.FINISHED_STOPPED)
    spans = []
    for start in (57, None, 13):
        if start is not None:
            store.leave_out("r", "group0", start)
        assert store.begin_save(request, ids_of(("window",), PROMPT))
        (job,) = store.take_step().saves
        spans.append(job.positions["group0"])
    # without it from the first block on that the request still has, also if less was left out
    assert spans == [(57, 96), (48, 96), (48, 96)]
    store.close()


# Adapters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter's folder."""
    path = tmp_path / "adapter"
    path.mkdir()
    write(path / "adapter_model.safetensors", MODEL.items())
    return path


def test_an_adapter_that_comes_back_does_not_make_requests_current() -> None:
    """Some of their blocks are of the content between."""
    state = state_of()
    state.adapters_changed([loaded("content 1")])
    request, other = (request_of(SAID, request_id=name, lora_request=lora(name=name)) for name in ("sql", "other"))
    for each in (request, other):
        state.note_origin(each, 0)
    for content in ("content 2", "content 1"):
        state.adapters_changed([loaded(content)])
    assert not state.is_current(request)
    assert state.is_current(other)


def replace(folder: Path) -> None:
    """Write other values in place, with the times of the old ones."""
    file = folder / "adapter_model.safetensors"
    other = folder.parent / "other.safetensors"
    shutil.copy2(file, other)
    poke(other, other.stat().st_size - 1)
    shutil.copystat(file, other)
    other.replace(file)


def test_the_name_of_an_adapter_is_no_fact(folder: Path) -> None:
    """Its content is, wherever it is: the same files under two names are one adapter."""
    shutil.copytree(folder, folder.parent / "copy")
    state = state_of()
    first, second, other = (
        state.facts_of(request_of(SAID, lora_request=lora(1, name, str(path))))
        for name, path in (("a", folder), ("b", folder.parent / "copy"), ("a", "/elsewhere"))
    )
    assert first == second != other


def test_an_adapter_is_as_it_was_loaded(folder: Path) -> None:
    """Overwritten after it was loaded, it is the old one; unloaded and loaded again, the new one."""
    state, request = state_of(), request_of(SAID, lora_request=lora(path=str(folder)))
    (old,) = state.facts_of(request)
    state.adapters_changed([loaded(old[1].removeprefix("adapter "))])
    replace(folder)
    assert state.facts_of(request) == [old]
    # evicted, it would be loaded from its folder
    state.adapters_changed([dropped(1)])
    (new,) = state.facts_of(request)
    assert new != old


def test_an_adapter_that_is_reloaded_under_a_request_is_not_stored(folder: Path) -> None:
    state, request = state_of(), request_of(SAID, lora_request=lora())
    state.adapters_changed([loaded("old")])
    state.note_origin(request, 0)
    assert state.is_current(request)
    state.adapters_changed([loaded("new")])
    assert not state.is_current(request)
    state.note_origin(request, 0)
    assert state.is_current(request)


def test_blocks_of_an_adapters_name_are_not_those_of_its_new_content() -> None:
    """vLLM's prefix cache finds them by name, also under another id: until a reset they are not handed over."""
    state = state_of()
    for adapter_id, content in ((1, "old"), (2, "new")):
        state.adapters_changed([loaded(content, adapter_id)])
    request, other = (request_of(SAID, request_id=name, lora_request=lora(2, name)) for name in ("sql", "other"))
    for each, num_cached, is_current in ((request, 16, False), (request, 0, True), (other, 16, True)):
        state.note_origin(each, num_cached)
        assert state.is_current(each) == is_current
    state.prefix_cache_reset()
    state.note_origin(request, 16)
    assert state.is_current(request)


def test_ranks_that_load_unequal_files_match_no_other_engine() -> None:
    """A folder was written while they read it."""
    state = state_of()
    state.adapters_changed([loaded("old"), loaded("new")])
    content = state.adapter_of(request_of(SAID, lora_request=lora()))
    assert content not in ("old", "new")
    assert "old" in content
    assert "new" in content


def test_an_adapter_that_is_overwritten_after_a_claim_refuses_the_read(engines: Engines, folder: Path) -> None:
    """Before decode has loaded it: it would load other values than prefill had."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    adapter: dict[str, Any] = {"lora_request": lora(path=str(folder))}
    request = request_of(SAID[:PROMPT], computed(prefill, **adapter), **adapter)
    for is_replaced in (False, True):
        decode.add(request)
        if is_replaced:
            replace(folder)
        num_tokens = decode.count_tokens_to_read(request, 0)
        blocks = blocks_of(("full",), num_tokens)
        decode.begin_read(request, blocks, num_tokens)
        refused = decode.take_step().refused
        assert [error.code for error in refused.values()] == ["PROMPT"] * is_replaced
        decode.end_reads({"r"})


class Running:
    """A scheduler of vLLM with requests that a step has computed, or that are read, as far as it is wrapped."""

    def __init__(self, state: Any, *requests: Any) -> None:
        self.connector = Connector(state)
        self.requests = {request.request_id: request for request in requests}

    def finish_requests(self, names: set[str], status: str) -> list[Any]:
        assert status is STORE.RequestStatus.FINISHED_ERROR
        return [self.requests.pop(name) for name in names]

    def update_from_output(self, scheduled: Any, output: Any) -> dict[int, Any]:
        answers = [EngineCoreOutput(name, [7]) for name in self.requests]
        return {0: EngineCoreOutputs(answers)} if answers else {}


HOOKS._wrap(Running, "update_from_output", HOOKS._with_reports)


@pytest.mark.parametrize("content", ["old", "new"])
def test_a_request_whose_adapter_was_loaded_too_late_fails(folder: Path, content: str) -> None:
    """Its cache is of the adapter that was in the folder; no token of the one that was loaded reaches a client."""
    state = state_of()
    old = state.adapter_of(request_of(SAID, lora_request=lora(path=str(folder))))
    requests = [
        request_of(SAID, request_id=name, lora_request=lora(path=str(folder)))
        for name in ("read", "computed", "answered")
    ]
    requests[2].num_output_tokens = 1
    for request in requests:
        state.note_origin(request, 0)
        if request.request_id != "computed":
            state.load(request.request_id)
    changes = loaded(old if content == "old" else "another")
    output = ModelRunnerOutput(KVConnectorOutput(Report([changes])))
    outputs = Running(state, *requests).update_from_output(None, output)[0].outputs
    tokens = {answer.request_id: answer.new_token_ids for answer in outputs}
    assert tokens == {"read": [7] if content == "old" else [], "computed": [7], "answered": [7]}


# How vLLM tells of it


class Core:
    """An engine core, as far as it is wrapped."""

    def __init__(self, *connectors: Any) -> None:
        self.calls: list[Any] = []
        self.load: Callable[[], Any] = lambda: None
        self.connector = Multi(connectors) if len(connectors) > 1 else connectors[0]
        self.scheduler: Any = self

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> str:
        self.calls.append(method)
        if method == "fails":
            raise RuntimeError("half-way")
        return "result"

    def set_weight_version(self, weight_version: str) -> None:
        self.calls.append(weight_version)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return reset_running_requests

    def add_lora(self, lora_request: Any) -> bool:
        self.load()
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> str:
        return f"asleep {level} {mode}"

    def release_kv_cache_memory(self) -> str:
        return "released"


WRAPPED = {
    "collective_rpc": HOOKS._with_calls,
    "set_weight_version": HOOKS._with_versions,
    "reset_prefix_cache": HOOKS._with_resets,
    "add_lora": HOOKS._with_added_adapters,
    "remove_lora": HOOKS._with_removed_adapters,
    "sleep": HOOKS._with_sleep,
    "release_kv_cache_memory": HOOKS._with_release,
}


@pytest.fixture
def core_class() -> type[Core]:
    """A class of engine cores of its own, wrapped twice as by two connectors."""
    wrapped = type("Wrapped", (Core,), {name: vars(Core)[name] for name in WRAPPED})
    for _ in range(2):
        assert all(HOOKS._wrap(wrapped, name, wrapper) for name, wrapper in WRAPPED.items())
    return wrapped


def connectors(*states: Any) -> list[Any]:
    return [Connector(state) for state in states]


@pytest.mark.parametrize("number", [1, 2])
def test_calls_that_may_change_weights_are_told(core_class: type[Core], number: int) -> None:
    """To each connector of the engine, once; the call is made as it was. What only asks is not told."""
    states = [state_of(), state_of()][:number]
    core, other = core_class(*connectors(*states)), state_of()
    core_class(*connectors(other))
    assert core.collective_rpc("check_health") == "result"
    assert [state.version for state in states] == [""] * number
    assert core.collective_rpc("update_weights", kwargs={"update_info": {}}) == "result"
    assert [state.version for state in states] == ["unnamed 1"] * number
    with pytest.raises(RuntimeError):
        core.collective_rpc("fails")
    # nobody knows what a function does
    core.collective_rpc(print)
    assert [state.version for state in states] == ["unnamed 3"] * number
    core.set_weight_version("step 7")
    assert [state.version for state in states] == ["step 7"] * number
    assert core.calls == ["check_health", "update_weights", "fails", print, "step 7"]
    assert other.version == ""


def test_a_call_before_there_is_a_scheduler_tells_nobody(core_class: type[Core]) -> None:
    core = core_class(None)
    del core.scheduler
    assert core.collective_rpc("update_weights") == "result"


def test_memory_that_peers_read_is_not_released(core_class: type[Core]) -> None:
    """Of an engine with a connector, by any way; a pause releases none, and other engines may."""
    core, other = core_class(*connectors(state_of())), core_class(*connectors(None))
    assert core.sleep(0, mode="keep") == "asleep 0 keep"
    for release in (core.sleep, lambda: core.sleep(level=2), core.release_kv_cache_memory):
        with pytest.raises(KVPlanError, match=r"^SETTING: cannot release the memory of the KV cache: expected "):
            release()
    assert (other.sleep(1), other.release_kv_cache_memory()) == ("asleep 1 abort", "released")
    for call in ("sleep", "discard"):
        with pytest.raises(KVPlanError, match=r"^SETTING"):
            core.collective_rpc(call)
        assert other.collective_rpc(call) == "result"
    assert core.calls == []


def test_a_reset_that_failed_is_none(core_class: type[Core]) -> None:
    state = state_of()
    state.step_begun()
    state.weights_changed()
    core, request = core_class(*connectors(state)), request_of(SAID)
    for is_reset in (False, True):
        assert core.reset_prefix_cache(is_reset) == is_reset
        state.note_origin(request, 16)
        assert state.is_current(request) == is_reset


def test_an_added_adapter_is_known_at_once(core_class: type[Core], folder: Path) -> None:
    """Before a step says what workers have loaded. One that is overwritten meanwhile matches no other."""
    state = state_of()
    core, request = core_class(*connectors(state)), request_of(SAID, lora_request=lora(path=str(folder)))
    core.add_lora(lora(path=str(folder)))
    old = state.adapter_of(request)
    replace(folder)
    core.add_lora(lora(path=str(folder)))  # it is loaded already
    assert state.adapter_of(request) == old
    core.remove_lora(1)  # it would be loaded anew
    assert state.adapter_of(request) != old
    core.add_lora(lora(path=str(folder), load_inplace=True))
    new = state.adapter_of(request)
    assert new != old
    core.load = partial(replace, folder)
    core.add_lora(lora(path=str(folder), load_inplace=True))
    assert state.adapter_of(request) not in (old, new)


def test_what_workers_have_loaded_is_known_before_requests_end() -> None:
    """In a step that begins and ends a request, its adapter is loaded too. Each connector reports it."""
    state = state_of()
    seen = []

    class Scheduler:
        connector, requests = Connector(state), dict[str, Any]()

        def update_from_output(self, scheduled: Any, output: Any) -> str:
            seen.append(state.adapter_of(request_of(SAID, lora_request=lora())))
            return "result"

    HOOKS._wrap(Scheduler, "update_from_output", HOOKS._with_reports)
    for metadata in (
        None,
        Report([loaded("first")]),
        Reports((None, Report([loaded("second")]))),
    ):
        output = ModelRunnerOutput(KVConnectorOutput(metadata))
        assert Scheduler().update_from_output(None, output) == "result"
    assert seen == ["/nowhere", "first", "second"]


def test_a_worker_reports_what_it_loads_and_drops() -> None:
    """Evictions too: vLLM loads again what it needs again, from what is in the folder then."""

    class Manager:
        held: set[int] = set()  # noqa: RUF012

        def list_adapters(self) -> set[int]:
            return {*self.held}

    manager, adapters = Manager(), HOOKS.WorkerAdapters()
    assert not adapters.take()
    for adapter_id in (1, 2):
        adapters.load(manager, STATE.LoadedAdapter(adapter_id, f"{adapter_id}", "old"))
    manager.held = {1, 2, 9}  # one was loaded before anybody watched
    assert [adapter.adapter_id for adapter in adapters.take().loaded] == [1, 2]
    assert not adapters.take()
    manager.held = {2}
    changes = adapters.take()
    assert (changes.loaded, changes.dropped) == ((), {1})
    adapters.load(manager, STATE.LoadedAdapter(2, "2", "old"))
    adapters.load(manager, STATE.LoadedAdapter(2, "2", "new"))
    assert [adapter.content for adapter in adapters.take().loaded] == ["new"]


def test_an_engine_that_cannot_tell_is_refused() -> None:
    """A class without a method is not wrapped, which matters if the option is set."""
    wrappers = {"collective_rpc": HOOKS._with_calls}
    HOOKS._watch(Connector, wrappers, "weight_transfer_config", None)
    text = "SETTING: cannot set weight_transfer_config: expected the default, got nccl (this release of vLLM has no "
    with pytest.raises(KVPlanError, match=re.escape(f"{text}Connector.collective_rpc")):
        HOOKS._watch(Connector, wrappers, "weight_transfer_config", "nccl")
