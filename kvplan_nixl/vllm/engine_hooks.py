"""What vLLM does not tell: changed weights, resets, adapters, released memory, and failed reads.

The engine core changes weights by calls to its workers (``collective_rpc``), and is told a version
(``set_weight_version``). Connectors hear of neither, and of a reset only if the caller asks for it.
Workers load an adapter when a request first needs it, or again after it was evicted, and the
request may end in the same step. With ``enable_cumem_allocator`` the engine core can also release
the physical memory of the KV cache, which peers read by addresses that NIXL has registered.

Where an engine has several workers, its scheduler hears that one of them could not read a request
only when all have received it, so a client would wait as long as prefill hangs.

So functions of vLLM are wrapped here, once in each process. They do what they did, and tell the
connectors of their own engine; those that release memory fail instead. Where a release lacks one of
them, the option of vLLM that needs it is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from kvplan import KVPlanError
from kvplan_nixl.vllm.engine_state import (
    OUTDATED,
    AdapterChanges,
    EngineState,
    LoadedAdapter,
    changes_of,
)
from kvplan_nixl.vllm.metadata import KvplanWorkerMetadata
from kvplan_nixl.weights import adapter_of

logger = init_logger(f"vllm.{__name__}")

HARMLESS_CALLS: Final = MappingProxyType(
    {
        "check_health": "it asks",
        "checkpoint_prepare": "weights are the same after a checkpoint",
        "checkpoint_restore": "weights are the same after a checkpoint",
        "compute_weight_checksums": "it asks",
        "execute_dummy_batch": "it computes nothing that is kept",
        "get_kv_connector_handshake_metadata": "it asks",
        "get_model_inspection": "it asks",
        "init_weight_transfer_engine": "weights come later",
        "profile": "it measures",
        "save_sharded_state": "it writes files",
        "save_tensorized_model": "it writes files",
        "shutdown_weight_transfer_engine": "weights came before",
        "start_draft_weight_update": "weights come later",
        "start_weight_update": "weights come later",
        "synchronize_device": "it waits",
        "update_max_model_len": "the longest request",
    }
)
"""Calls to workers that change no weights, and why. Any other call may change them."""

RELEASING_CALLS: Final = ("discard", "sleep")
"""Calls to workers that release memory."""

Watch = Callable[..., AbstractContextManager[list[Any]]]
"""A context around the calls of a method, with their arguments; the result is put in its list."""


def watch_engine(config: VllmConfig) -> None:
    """Wrap what the engine core and the scheduler of this process do. Raises ``SETTING``."""
    from vllm.v1.engine.core import EngineCore

    weights = {
        "collective_rpc": _with_calls,
        "set_weight_version": _with_versions,
        "reset_prefix_cache": _with_resets,
    }
    adapters = {"add_lora": _with_added_adapters, "remove_lora": _with_removed_adapters}
    memory = {"sleep": _with_sleep, "release_kv_cache_memory": _with_release}
    has_allocator = getattr(config.model_config, "enable_cumem_allocator", False)
    has_adapters = config.lora_config is not None
    scheduler = _definer(config.scheduler_config.get_scheduler_cls(), "update_from_output")
    _watch(EngineCore, weights, "weight_transfer_config", config.weight_transfer_config)
    _watch(EngineCore, adapters, "enable_lora", has_adapters)
    _watch(EngineCore, memory, "enable_cumem_allocator", has_allocator)
    _watch(scheduler, {"update_from_output": _with_reports}, "enable_lora", has_adapters)


def watch_adapters(config: VllmConfig) -> None:
    """Wrap how workers of this process load adapters. Raises ``SETTING``."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    has_adapters = config.lora_config is not None
    _watch(WorkerLoRAManager, {"_load_adapter": _with_loads}, "enable_lora", has_adapters)


def _watch(owner: type[Any], watches: Mapping[str, Watch], option: str, given: Any) -> None:
    """Wrap methods of a class. Raises ``SETTING`` if some are missing and their option is set."""
    missing = [name for name, watch in watches.items() if not _wrap(owner, name, watch)]
    if missing and given:
        methods = ", ".join(f"{owner.__name__}.{name}" for name in missing)
        hint = f"this release of vLLM has no {methods}, by which kvplan learns of changes"
        action = f"set {option}"
        raise KVPlanError("SETTING", action, expected="the default", got=f"{given}", hint=hint)


def _definer(kind: type[Any], name: str) -> type[Any]:
    return next((base for base in kind.__mro__ if name in vars(base)), kind)


def _wrap(owner: type[Any], name: str, watch: Watch) -> bool:
    """Wrap a method once. Returns whether the class defines it."""
    method = vars(owner).get(name)
    if method is None:
        return False
    if not hasattr(method, "is_watched_by_kvplan"):

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with watch(*args, **kwargs) as results:
                results.append(method(*args, **kwargs))
            return results[0]

        vars(watched)["is_watched_by_kvplan"] = True
        setattr(owner, name, watched)
    return True


def _states(scheduler: Any) -> Iterator[EngineState]:
    for connector in _connectors(getattr(scheduler, "connector", None)):
        state = getattr(connector, "state", None)
        if isinstance(state, EngineState):
            yield state


def _connectors(connector: Any) -> Iterator[Any]:
    """Yield a connector, or those of a MultiConnector."""
    children = getattr(connector, "sub_connectors", None)
    if children is None:
        yield connector
    else:
        for child in children:
            yield from _connectors(child)


@contextmanager
def _with_calls(core: Any, call: Any, *_: Any, **__: Any) -> Iterator[list[Any]]:
    if isinstance(call, str) and call in RELEASING_CALLS:
        _check_kept(core, call)
    try:
        yield []
    finally:
        # a call that failed may have changed some of them
        if not (isinstance(call, str) and call in HARMLESS_CALLS):
            for state in _states(getattr(core, "scheduler", None)):
                state.weights_changed()


@contextmanager
def _with_sleep(core: Any, level: int = 1, *_: Any, **__: Any) -> Iterator[list[Any]]:
    # level 0 pauses the scheduler alone
    if level:
        _check_kept(core, "sleep")
    yield []


@contextmanager
def _with_release(core: Any) -> Iterator[list[Any]]:
    _check_kept(core, "release_kv_cache_memory")
    yield []


def _check_kept(core: Any, call: str) -> None:
    """Refuse to release memory that a connector has registered. Raises ``SETTING``."""
    if any(_states(getattr(core, "scheduler", None))):
        raise KVPlanError(
            "SETTING",
            "release the memory of the KV cache",
            expected="memory that stays while a connector of kvplan has registered it",
            got=f"a call of {call}",
            hint="start the engine again instead",
        )


@contextmanager
def _with_versions(core: Any, weight_version: str, *_: Any, **__: Any) -> Iterator[list[Any]]:
    yield []
    for state in _states(core.scheduler):
        state.weights_named(str(weight_version))


@contextmanager
def _with_resets(core: Any, *_: Any, **__: Any) -> Iterator[list[Any]]:
    results = list[Any]()
    yield results
    if results[0]:
        for state in _states(core.scheduler):
            state.prefix_cache_reset()


@contextmanager
def _with_added_adapters(
    core: Any, lora_request: LoRARequest, *_: Any, **__: Any
) -> Iterator[list[Any]]:
    before = adapter_of(lora_request.lora_path)
    yield []
    # the workers say more exactly what they have loaded, but not before the next step
    loaded = _loaded(lora_request, before)
    for state in _states(core.scheduler):
        state.adapter_added(loaded, is_replaced=lora_request.load_inplace)


@contextmanager
def _with_removed_adapters(core: Any, lora_id: int, *_: Any, **__: Any) -> Iterator[list[Any]]:
    yield []
    for state in _states(core.scheduler):
        state.adapters_changed([AdapterChanges(dropped=frozenset({lora_id}))])


@contextmanager
def _with_reports(scheduler: Any, _: Any, output: Any) -> Iterator[list[Any]]:
    # before requests of this step end, which connectors are told of first
    reports = getattr(output, "kv_connector_output", None)
    metadata = getattr(reports, "kv_connector_worker_meta", None)
    connectors = [*_connectors(getattr(scheduler, "connector", None))]
    parts = getattr(metadata, "metadata", None) or (metadata,) * len(connectors)
    failed = list[Any]()
    for part in parts:
        if reports and isinstance(part, KvplanWorkerMetadata) and part.failed:
            reports.failed_recving = {*reports.failed_recving, *part.failed}
        if changes := changes_of(part):
            for state in _states(scheduler):
                state.adapters_changed(changes)
            failed += _fail_outdated(scheduler)
    results = list[Any]()
    yield results
    for request in failed:
        answers = results[0].setdefault(request.client_index, EngineCoreOutputs())
        answers.outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )


def _fail_outdated(scheduler: Any) -> list[Any]:
    """End requests whose adapter was overwritten after their cache was read, and return them.

    They may still be read, while the first step of another one loads the adapter.
    """
    states = [*_states(scheduler)]
    names = {
        name
        for name, request in scheduler.requests.items()
        if any(state.is_loaded_wrongly(request) for state in states)
    }
    if not names:
        return []
    logger.error("requests %s fail: %s", ", ".join(sorted(names)), OUTDATED)
    return [*scheduler.finish_requests(names, RequestStatus.FINISHED_ERROR)]


@contextmanager
def _with_loads(manager: Any, lora_request: LoRARequest) -> Iterator[list[Any]]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    path = _local(lora_request.lora_path)
    before = adapter_of(path)
    yield []
    loaded = _loaded(lora_request, before, path)
    for connector in _connectors(get_kv_transfer_group() if has_kv_transfer_group() else None):
        watched = getattr(connector, "adapters", None)
        if isinstance(watched, WorkerAdapters):
            watched.load(manager, loaded)


def _local(path: str) -> str:
    from vllm.lora.utils import get_adapter_absolute_path

    try:
        return str(get_adapter_absolute_path(path))
    except Exception:  # loading it says what is wrong
        return path


def _loaded(lora_request: LoRARequest, before: str, path: str = "") -> LoadedAdapter:
    """Return an adapter that was loaded since its content was ``before``."""
    after = adapter_of(path or lora_request.lora_path)
    content = after if after == before else f"{before} or {after}"
    return LoadedAdapter(lora_request.lora_int_id, lora_request.lora_name, content)


class WorkerAdapters:
    """The adapters that a worker holds, and the changes since the last report."""

    def __init__(self) -> None:
        self._manager: Callable[[], Any] = lambda: None
        self._held: set[int] = set()
        self._loaded: list[LoadedAdapter] = []

    def load(self, manager: Any, adapter: LoadedAdapter) -> None:
        """Note an adapter that a manager of adapters loads."""
        self._manager = weakref.ref(manager)
        self._held.add(adapter.adapter_id)
        self._loaded.append(adapter)

    def take(self) -> AdapterChanges:
        """Return what has changed since the last call."""
        manager = self._manager()
        held = set() if manager is None else manager.list_adapters() & self._held
        # of several loads of one id, the last one
        loaded = {adapter.adapter_id: adapter for adapter in self._loaded}
        changes = AdapterChanges(
            tuple(adapter for adapter in loaded.values() if adapter.adapter_id in held),
            frozenset(self._held - held),
        )
        self._held = held
        self._loaded = []
        return changes
