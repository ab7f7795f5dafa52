"""vLLM's connector in a simulation: its scheduler's and its workers' parts, with stand-ins for vLLM's objects."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import attrs

from kvplan.describe import Blocks
from kvplan.describe.blocks import Request as Binding
from kvplan.errors import KVPlanError
from kvplan.protocol import PartialRead, Read, ReadResult, Reads
from kvplan.protocol.exporter import ExportState
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.leases import LEASE_S
from kvplan.protocol.rooms import Rooms
from kvplan.testing.simulation import BrokenRuleError, EngineRequest, Promises, Simulation, Site, StepReport
from kvplan.testing.simulation.catalog import NULL_BLOCK
from kvplan.testing.simulation.engine import Phase
from kvplan.testing.simulation.fabric import VirtualExecutor
from kvplan.testing.simulation.leases import MemoryDigest, check_count
from kvplan.testing.simulation.scenario import KEPT_S, Call, CallKind
from tests.bridges.vllm_objects import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from tests.simulation.stand_in import check_server, stand_in
from tests.simulation.vllm_objects import (
    BlockPool,
    CacheConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    KVCacheBlock,
    KVCacheBlocks,
    KVConnectorOutput,
    KVTransferConfig,
    LoRARequest,
    ModelRunnerOutput,
    MultiModalFeatureSpec,
    PlaceholderRange,
    RequestStatus,
    SingleTypeKVCacheManager,
    VllmConfig,
    scheduled,
)

LOGGER = logging.getLogger(__name__)


@attrs.frozen
class TransferResults:
    """The fields of vLLM's ``KVConnectorTransferResults``."""

    finished_sending: set[str] = attrs.field(factory=set)
    finished_recving: set[str] = attrs.field(factory=set)
    failed_recving: set[str] = attrs.field(factory=set)


@dataclasses.dataclass
class Stats:
    """The field of vLLM's ``KVConnectorStats``."""

    data: dict[str, Any] = dataclasses.field(default_factory=dict)


VALUES = {
    "KVCacheBlocks": KVCacheBlocks,
    "FullAttentionSpec": FullAttentionSpec,
    "SlidingWindowSpec": SlidingWindowSpec,
    "MambaSpec": MambaSpec,
    "RequestStatus": RequestStatus,
    "KVConnectorTransferResults": TransferResults,
    "KVConnectorStats": Stats,
    "EngineCoreOutput": EngineCoreOutput,
    "EngineCoreOutputs": EngineCoreOutputs,
    "init_logger": logging.getLogger,
    "gpu_sync_allowed": nullcontext,
}


SCHEDULER, WORKER, HOST_CACHE, DESCRIPTION, TABLES, ENGINE_STATE, ENGINE_HOOKS, *STORE = stand_in(
    "vllm",
    (
        *("scheduler", "worker", "host_cache", "description", "tables", "engine_state", "engine_hooks"),
        *("store_scheduler", "store_searches", "store_worker"),
    ),
    VALUES,
)
STORE_SCHEDULER, STORE_SEARCHES, STORE_WORKER = STORE
CONTENT = "content "
"""The beginning of a folder's content, which is the path of its adapter."""

READ_FOLDER = ENGINE_STATE.adapter_of
setattr(  # noqa: B010
    ENGINE_STATE, "adapter_of", lambda path: path if path.startswith(CONTENT) else READ_FOLDER(path)
)

SECRET = b"the key of all engines"
KEY = SharedKey.of(SECRET)
ROOM_TOKENS_PER_STEP = 2
"""Positions of a request in a step where requests have transfer ids, so few that many are read in parts."""

PORT = 5600
OTHER_SERVERS = (f"http://prefill-0:{PORT + 1}", f"http://prefill-9:{PORT}", f"http://elsewhere-prefill-0:{PORT}")
"""Servers of rooms that no operator has allowed."""

ASK_S = 0.02
"""Seconds between two questions about rooms, which are most of what happens while requests wait."""

setattr(SCHEDULER, "Rooms", partial(Rooms, ask_s=ASK_S))  # noqa: B010


def cache_of(kinds: Iterable[str], block_size: int, window: int = 0, *, is_zeroed: bool = False) -> Any:
    """Return vLLM's description of a cache with groups of these kinds."""
    specs = {
        "full": FullAttentionSpec(block_size, dcp_sharded=False),
        "window": SlidingWindowSpec(block_size, dcp_sharded=False, sliding_window=window),
        "state": MambaSpec(block_size, shapes=(), dtypes=()),
    }
    return KVCacheConfig([], [KVCacheGroupSpec([], specs[kind]) for kind in kinds], is_zeroed)


def config_of(engine_id: str, *, is_producer: bool = True, caches_prefixes: bool = True, num_drafts: int = 0) -> Any:
    """Return the part of vLLM's configuration that a connector reads."""
    return VllmConfig(KVTransferConfig(engine_id, is_producer), CacheConfig(caches_prefixes), num_drafts)


class NamedReads(Reads):
    """Reads of workers whose groups have the names of a model's, which keep the errors of requests."""

    errors: dict[str, KVPlanError]

    def submit(self, partial_read: PartialRead) -> None:
        read = partial_read.read
        if read is not None:
            partial_read = attrs.evolve(partial_read, read=self.named(read))
        super().submit(partial_read)

    def named(self, read: Read) -> Read:
        names = {f"group{index}": group.name for index, group in enumerate(self.worker.groups)}
        local = {names[key]: table for key, table in read.local.items()}
        remote = {names[key]: table for key, table in read.remote.items()}
        tokens = {names[key]: positions for key, positions in read.tokens.items()}
        return attrs.evolve(read, local=local, remote=remote, tokens=tokens)

    def poll(self) -> list[ReadResult]:
        results = super().poll()
        self.errors = {result.request: result.error for result in results if result.error is not None}
        return results

    def late(self) -> dict[str, KVPlanError]:
        late = super().late()
        self.errors |= late
        return late


@attrs.frozen
class NamedDigests:
    """Digests of a worker's memory, whose groups have the names of a model's."""

    reads: NamedReads
    digest: Callable[[Binding], Mapping[str, Any]]

    def of(self, blocks: Mapping[str, Blocks], tokens: Mapping[str, tuple[int, int]]) -> Mapping[str, Any]:
        """The digests of some blocks."""
        return self.digest({"local": blocks, "remote": {}, "tokens": tokens})


MAIN_MEMORY, DEVICE = "main memory", "the device"


class LabelledHostCache(HOST_CACHE.HostCache):  # type: ignore[misc, name-defined]
    """A worker's cache in main memory, which has the groups of its model as layers."""

    def __init__(self, reads: NamedReads) -> None:
        names = [group.name for group in reads.worker.groups]
        self._named = reads.named
        self._device_tensors, self.tensors = dict.fromkeys(names, DEVICE), dict.fromkeys(names, MAIN_MEMORY)
        self._layers = {name: {1: [name]} for name in names}
        self._copy_blocks: Callable[..., None] | None = None
        self._filled: dict[str, Any] = {}

    def begin_read(self, read: Read, groups: Iterable[Any]) -> None:
        super().begin_read(self._named(read), groups)


def platform_copies(site: Site, executor: VirtualExecutor) -> Callable[..., None]:
    """The operation by which a platform of vLLM copies blocks, which copies their labels."""

    def copy_blocks(
        sources: Mapping[str, str],
        destinations: Mapping[str, str],
        source_ids: list[int],
        destination_ids: list[int],
        direction: str,
    ) -> None:
        assert sources.keys() == destinations.keys()
        assert source_ids == destination_ids
        ends = [MAIN_MEMORY, DEVICE] if direction == "h2d" else [DEVICE, MAIN_MEMORY]
        for group in sources:
            assert [sources[group], destinations[group]] == ends
            site.copy_blocks(executor, group, source_ids, to_device=direction == "h2d")

    return copy_blocks


class SeenRequest:
    """A request as vLLM shows it, at any time."""

    prompt_token_ids = None
    prompt_embeds = None

    def __init__(
        self, request: EngineRequest, params: Mapping[str, Any] | None, find_adapter: Callable[[str], LoRARequest]
    ) -> None:
        self._request = request
        self.request_id = request.name
        self.kv_transfer_params = params
        self._all_token_ids = request.tokens
        facts = {text.partition(" ")[0]: text for _, text in request.facts}
        self.cache_salt = facts.get("salt")
        self._adapter = facts.get("adapter")
        self._find_adapter = find_adapter
        # an image of one position
        self.mm_features = [
            MultiModalFeatureSpec(text, PlaceholderRange(position))
            for position, text in request.facts
            if text.startswith("image")
        ]

    @property
    def lora_request(self) -> Any:
        """The adapter, whose path is the content of its folder now."""
        return None if self._adapter is None else self._find_adapter(self._adapter)

    @property
    def num_output_tokens(self) -> int:
        """The tokens that are generated."""
        return len(self._request.tokens) - self._request.num_prompt

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt, which the connector may shorten."""
        return self._request.num_prompt

    @num_prompt_tokens.setter
    def num_prompt_tokens(self, number: int) -> None:
        self._request.num_prompt = number

    @property
    def max_tokens(self) -> int:
        """The length of the answer, which the connector may shorten too."""
        return self._request.num_answer

    @max_tokens.setter
    def max_tokens(self, number: int) -> None:
        self._request.num_answer = number

    @property
    def num_tokens(self) -> int:
        """The tokens that are known."""
        return len(self._request.tokens)

    @property
    def num_computed_tokens(self) -> int:
        """The positions that are computed or read."""
        return self._request.num_computed

    @property
    def num_in_flight_tokens(self) -> int:
        """Those of them that steps under way compute."""
        return self._request.num_in_flight

    @property
    def status(self) -> RequestStatus:
        """The status in vLLM's words."""
        request = self._request
        if request.phase is not Phase.ENDED:
            return RequestStatus.RUNNING if request.phase is Phase.RUNNING else RequestStatus.WAITING
        if not request.is_complete or request.is_aborted:
            return RequestStatus.FINISHED_ABORTED
        is_stopped = request.ends_unforeseen
        return RequestStatus.FINISHED_STOPPED if is_stopped else RequestStatus.FINISHED_LENGTH_CAPPED


def make_params(host: str, draw: random.Random) -> dict[str, Any]:
    """The parameters that a router gives to both engines: a transfer id of few, so that some are used again."""
    return {"transfer_id": f"request-of-{host} {draw.randrange(60)}", "remote_bootstrap_addr": f"http://{host}:{PORT}"}


def break_params(params: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
    """The same parameters, of which one is no name, or the address is missing, or that of another server."""
    if draw.random() < 0.2:
        return {"transfer_id": params["transfer_id"]}
    if draw.random() < 0.2:
        return {**params, "remote_bootstrap_addr": draw.choice(OTHER_SERVERS)}
    return {**params, draw.choice(sorted(params)): draw.choice(("two\nlines", 7, ["a name"], "x" * 5000))}


def vllm_room_fleets(resend_s: float = math.inf) -> Simulation:
    """A simulation of vLLM's fleets whose requests have transfer ids, many of which are read in parts."""
    return Simulation(
        VllmConnector,
        make_params,
        tokens_per_step=ROOM_TOKENS_PER_STEP,
        resend_s=resend_s,
        break_params=break_params,
        check_server=partial(check_server, port=PORT),
    )


@attrs.define(slots=False)
class AdapterManager:
    """The manager of a worker's adapters: the ids of those that it has."""

    held: set[int] = attrs.field(factory=set)

    def list_adapters(self) -> set[int]:
        """The ids."""
        return self.held


@attrs.frozen
class _OwnConnector:
    state: Any


class StandInScheduler:
    """vLLM's scheduler as the hooks of the engine know it: it notes the requests that fail."""

    def __init__(self, state: Any, requests: dict[str, Any], failed: set[str]) -> None:
        self.connector = _OwnConnector(state)
        self.requests, self._failed = requests, failed

    def finish_requests(self, names: set[str], status: RequestStatus) -> list[Any]:
        """End requests."""
        self._failed |= names
        return []


class VllmConnector:
    """``kvplan_nixl.vllm``'s Scheduler and Workers as a connector of the simulation.

    With ``digest`` readers compare what has arrived, and vLLM's workers report digests of what they lend. The scheduler
    hears of them when it has scheduled the next step if it ``hears_late``, as vLLM's asynchronous one does.
    """

    reads_lagging_groups = True
    reads_into_copies = True

    def __init__(self, site: Site, digest: MemoryDigest | None = None, *, hears_late: bool = False) -> None:
        host = site.host
        self._hears_late = hears_late
        self._late_report: Any = None
        self._groups = site.groups
        self._block_size = site.groups[0].tokens_per_block
        kinds = ["state" if group.is_state else "window" if group.window else "full" for group in site.groups]
        window = max((group.window or 0 for group in site.groups if not group.is_state), default=0)
        cache = cache_of(kinds, self._block_size, window)
        num_drafts = max(group.num_ahead for group in site.groups)
        config = config_of(site.workers[0].engine_id, num_drafts=num_drafts)
        self._config, self._cache = config, cache
        settings = SCHEDULER.ConnectorSettings(
            host=host.name,
            port=PORT,
            key=SECRET,
            bootstrap_servers=("*",),
            early_tokens=1,
            prefill_timeout_s=site.room_timeout_s,
            bidirectional_kv_xfer=site.keeps_answers,
            decoder_kv_blocks_ttl=KEPT_S,
            kv_recompute_threshold=0,
        )
        self._scheduler = SCHEDULER.Scheduler(config, cache, settings, host)
        self._folder = site.folder
        # as if none were free, so that enough answers give way
        pool = BlockPool(0)
        self._loaded: dict[str, str] = {}
        self._adapter_ids: dict[str, int] = {}
        self._manager = AdapterManager()
        self._managers = [SingleTypeKVCacheManager(self._block_size, pool) for _ in kinds]
        self._scheduler.set_managers(self._managers)
        self._scheduler.set_siblings({*site.siblings})
        self._scheduler.serve_offers(site.offers)
        self._weights, self._version = site.weights, ""
        self._workers = [WORKER.Worker(config, cache, settings, host) for _ in site.workers]
        for worker, described, executor in zip(self._workers, site.workers, site.executors, strict=True):
            worker._reads = NamedReads(
                described,
                executor,
                LOGGER,
                connections=site.connections(executor),
                claims=worker._claims,
                digest=None if digest is None else partial(digest, executor),
                system=host,
                max_transfer_ids=site.max_transfer_ids,
            )
            if site.has_copies:
                worker._host_cache = LabelledHostCache(worker._reads)
                worker.set_copies(platform_copies(site, executor))
            if digest is not None:
                worker._digester = NamedDigests(worker._reads, partial(digest, executor))
        self._has_copies = site.has_copies
        self._promises = Promises(host, self._scheduler._listener.source.start)
        self._executors = site.executors
        # the leases of requests that run, and how many positions are published
        self._published: dict[str, tuple[str, int]] = {}
        self._num_reports: dict[str, int] = {}
        self._requests: dict[str, EngineRequest] = {}
        # those that have begun to compute, and the leases of those that are published
        self._begun: set[str] = set()
        self._leases: dict[str, str] = {}

    def _params(self, request: EngineRequest) -> Mapping[str, Any] | None:
        """What the proxy has given to the engine: for both of them in a room, or in a handoff."""
        role = {"do_remote_decode": True} if request.is_for_another else {"do_remote_prefill": True}
        if request.is_for_another or (request.params is not None and "transfer_id" in request.params):
            return {**(request.params or {}), **role}
        return request.params

    def _seen(self, request: EngineRequest) -> Any:
        """Return a request as vLLM shows it."""
        return SeenRequest(request, self._params(request), self._adapter)

    def _adapter(self, name: str) -> LoRARequest:
        """Return an adapter, whose path says the content of its folder, with an id of its name or a later one."""
        return LoRARequest(name, self._adapter_ids.get(name, crc32(name.encode())), self._folder(name))

    def load_adapters(self, loaded: Mapping[str, str], dropped: Collection[str]) -> set[str]:
        """Let the workers load and drop adapters in a step, and return the requests that fail for it."""
        before = self._loaded
        self._loaded = {name: content for name, content in before.items() if name not in dropped} | dict(loaded)
        for name, content in loaded.items():
            used = any(request.adapter == name for request in self._requests.values())
            if before.get(name, content) != content and not used and crc32(content.encode()) % 2:
                self._unload(name, content)
        held = {self._adapter(name).lora_int_id for name in self._loaded}
        reports = []
        for worker in self._workers:
            for name, content in loaded.items():
                adapter = ENGINE_STATE.LoadedAdapter(self._adapter(name).lora_int_id, name, content)
                worker.adapters.load(self._manager, adapter)
            self._manager.held = held
            reports.append(worker.take_report())
        merged, *others = reports
        for other in others:
            merged.aggregate(other)
        failed = set[str]()
        scheduler = StandInScheduler(self._scheduler._state, {}, failed)
        scheduler.requests.update({name: self._seen(request) for name, request in self._requests.items()})
        output = ModelRunnerOutput(KVConnectorOutput(merged))
        with ENGINE_HOOKS._with_reports(scheduler, None, output) as results:
            results.append({})
        return failed

    def _unload(self, name: str, content: str) -> None:
        """Let an operator unload an adapter that no request uses: it is loaded again under another id."""
        with ENGINE_HOOKS._with_removed_adapters(self._core(), self._adapter(name).lora_int_id):
            self._adapter_ids[name] = crc32(content.encode())

    def _core(self) -> Any:
        """vLLM's engine core, as the hooks see it."""
        connectors = [SimpleNamespace(state=state) for state in self._states()]
        return SimpleNamespace(scheduler=SimpleNamespace(connector=SimpleNamespace(sub_connectors=connectors)))

    def _name_weights(self) -> None:
        """Tell the scheduler of other weights, with which an operator resets vLLM's prefix cache."""
        if self._weights() != self._version:
            self._version = self._weights()
            self._scheduler._state.weights_named(self._version)
            self._scheduler._state.prefix_cache_reset()

    def hear(self, call: Call, is_done: bool) -> None:
        """Let the hooks of the engine core hear a call of an operator, and whether it has succeeded."""
        core = self._core()
        if call.kind in (CallKind.CHANGE, CallKind.FAILED_CHANGE):
            watch = ENGINE_HOOKS._with_calls(core, "update_weights")
            # nobody has named them
            self._version = call.text
        elif call.kind is CallKind.NAME:
            watch = ENGINE_HOOKS._with_versions(core, call.text)
        else:
            watch = ENGINE_HOOKS._with_resets(core)
        with suppress(TimeoutError), watch as results:
            if call.kind is CallKind.FAILED_CHANGE:
                raise TimeoutError
            results.append(is_done)

    def _states(self) -> list[Any]:
        return [self._scheduler._state]

    def reset(self) -> None:
        self._scheduler._state.prefix_cache_reset()
        self._scheduler.reset()
        self._promises.reset()

    def add(self, request: EngineRequest) -> None:
        self._name_weights()
        self._requests[request.name] = request
        self._scheduler.add(self._seen(request))

    def count_readable(self, request: EngineRequest, num_cached: int) -> int | None:
        number: int | None = self._scheduler.count_tokens_to_read(self._seen(request), num_cached)
        return number

    def begin_read(self, request: EngineRequest, num_tokens: int) -> None:
        self._scheduler.begin_read(self._seen(request), self._table(request), num_tokens)

    def _table(self, request: EngineRequest) -> Any:
        """Return the blocks of a request as vLLM shows them, those of its prefix cache with a hash."""
        num_found = request.found_blocks
        tables = [
            [
                KVCacheBlock(
                    block,
                    is_null=block == NULL_BLOCK,
                    block_hash=ordinal if ordinal < num_found[group.name] and block != NULL_BLOCK else None,
                )
                for ordinal, block in enumerate(request.blocks[group.name])
            ]
            for group in self._groups
        ]
        return KVCacheBlocks(tables)

    def _ids(self, request: EngineRequest) -> tuple[list[int], ...]:
        """Return the ids of a request's blocks, by group."""
        return tuple([*request.blocks.get(group.name, [])] for group in self._groups)

    def step(self) -> StepReport:
        self._name_weights()
        scheduled = self._publish()
        check_count(self._scheduler._exporter)
        if self._has_copies:
            self._scheduler.save(scheduled)
        for manager in self._managers:
            manager.req_to_blocks.clear()
        metadata = self._scheduler.take_step()
        names = {f"group{index}": group.name for index, group in enumerate(self._groups)}
        metadata.digests = {
            asked: {names[key]: table for key, table in blocks.items()} for asked, blocks in metadata.digests.items()
        }
        reports = []
        # blocks that are read in part, which vLLM leaves out when it caches the request's
        for group, manager in zip(self._groups, self._managers, strict=True):
            for name, num_blocks in manager.num_cached_block.items():
                self._requests[name].num_partial[group.name] = num_blocks
            manager.num_cached_block.clear()
        received, errors = list[str](), dict[str, KVPlanError]()
        for worker in self._workers:
            worker.start_step(metadata)
            results = worker.results()
            assert results.finished_sending == metadata.released
            # the scheduler hears of failures by the worker's report too
            report = worker.take_report()
            assert results.failed_recving == (set() if report is None else report.failed)
            reports += [] if report is None else [report]
            for name in sorted(results.failed_recving):
                errors.setdefault(name, worker._reads.errors[name])
            # vLLM waits for the reports of all workers
            for name in sorted(results.finished_recving):
                self._num_reports[name] = self._num_reports.get(name, 0) + 1
                if self._num_reports[name] == len(self._workers):
                    del self._num_reports[name]
                    received.append(name)
            worker._reads.errors.clear()
        # as vLLM does with those of all workers
        merged, *others = reports or [None]
        for other in others:
            merged.aggregate(other)
        failed = {name: error for name, error in errors.items() if name in merged.failed}
        if self._hears_late:
            digests = {} if merged is None else merged.digests
            merged, self._late_report = self._late_report, type(merged)(digests, [], set()) if digests else None
        if merged is not None:
            self._scheduler.take_digests(merged)
        self._scheduler.end_reads({*received}, {*failed})
        self._scheduler.end_exports(metadata.released)
        saves = {self._groups[int(group.removeprefix("group"))].name: ids for group, ids in metadata.saves.items()}
        return StepReport(received, failed, sorted(metadata.released), saves if self._has_copies else None)

    def save(self, saves: Mapping[str, Collection[int]]) -> None:
        """Let the workers copy to main memory what a step has computed."""
        for worker in self._workers:
            worker.save(SCHEDULER.KvplanMetadata(saves=saves))

    def _publish(self) -> Any:
        """Say what is computed, as vLLM does before a step, and return what is scheduled."""
        running = {name for name, request in self._requests.items() if request.phase is Phase.RUNNING}
        # one for which a step has no blocks begins later, as vLLM says it
        late = {name for name in running - self._begun if self._has_copies and not self._requests[name].num_scheduled}
        new, preempted = running - self._begun - late, self._begun - running
        for group, manager in zip(self._groups, self._managers, strict=True):
            manager.req_to_blocks = {
                name: [KVCacheBlock(block) for block in self._requests[name].blocks[group.name]] for name in running
            }
        num_scheduled = {name: self._requests[name].num_scheduled for name in running}
        num_scheduled = {name: number for name, number in num_scheduled.items() if number}
        resumed = {name for name in new if self._requests[name].was_preempted}
        output = scheduled(new - resumed, resumed, preempted, num_scheduled)
        self._begun = running - late
        self._scheduler.publish(output)
        exports = self._scheduler._exporter._requests
        for name, export in exports.items():
            if export.state is ExportState.PUBLISHED:
                if name in preempted:
                    raise BrokenRuleError("CLAIM", f"{name} is preempted, and its lease stands")
                if self._leases.get(name) != export.lease:
                    self._leases[name] = export.lease
                    # as long as it is computed
                    self._promises.grant(export.lease, name, math.inf)
                self._check_published(self._requests[name], export)
        for name in self._leases.keys() - {name for name, export in exports.items() if export.lease}:
            self._give_up(name)
        return output

    def _check_published(self, request: EngineRequest, export: Any) -> None:
        """Refuse to publish positions that are not computed yet, each once."""
        name = request.name
        lease, first = self._published.get(name, ("", 0))
        first = first if lease == export.lease else 0
        self._published[name] = export.lease, export.num_tokens
        for group, executor in product(self._groups, self._executors):
            table = request.blocks[group.name]
            # the others come when all is computed
            if group.window is not None or group.is_state or first == export.num_tokens:
                continue
            memory = executor.port.memory
            wrong = memory.wrong_position(group.name, table, request.labels, first, export.num_tokens)
            if wrong is not None:
                message = f"{name} is published up to {export.num_tokens}, of which {wrong[0]} is not computed"
                raise BrokenRuleError("OWN", message)

    def _give_up(self, name: str) -> None:
        """Promise nothing more of a request that was published in part."""
        if self._leases.pop(name, None) is not None:
            self._promises.take(name)

    def finish(self, request: EngineRequest) -> Mapping[str, Any] | None:
        del self._requests[request.name]
        self._begun.discard(request.name)
        params = self._scheduler.hand_over(self._seen(request), self._ids(request))
        if params is not None:
            self._check_published(request, self._scheduler._exporter._requests[request.name])
        self._published.pop(request.name, None)
        if params is None:
            self._give_up(request.name)
            return None
        self._leases.pop(request.name, None)
        # an answer may give way
        self._promises.grant(params["remote_lease"], request.name, LEASE_S if request.is_for_another else 0.0)
        read: Mapping[str, Any] = json.loads(json.dumps(params))
        return read

    def is_promised(self, request: str) -> bool:
        return self._promises.take(request)
