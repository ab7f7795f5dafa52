"""vLLM's connector in a simulation: its scheduler's and its workers' parts, with stand-ins for vLLM's objects."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs

from kvplan.connector import Read, ReadResult, Reads
from kvplan.errors import KVPlanError
from kvplan.testing.simulation import EngineRequest, Promises, Site, StepReport
from kvplan.testing.simulation.catalog import NULL_BLOCK
from tests.simulation.stand_in import stand_in

LOGGER = logging.getLogger(__name__)


class RequestStatus(enum.Enum):
    """The statuses of vLLM's requests that the connector knows, and one more."""

    RUNNING = 0
    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3


@attrs.frozen
class TransferResults:
    """The fields of vLLM's ``KVConnectorTransferResults``."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


@dataclasses.dataclass
class Stats:
    """The field of vLLM's ``KVConnectorStats``."""

    data: dict[str, Any] = dataclasses.field(default_factory=dict)


VALUES = {
    "RequestStatus": RequestStatus,
    "KVConnectorTransferResults": TransferResults,
    "KVConnectorStats": Stats,
    "init_logger": logging.getLogger,
}


SCHEDULER, WORKER, DESCRIPTION = stand_in("vllm", ("scheduler", "worker", "description"), VALUES)
SPEC_NAMES = {"full": "FullAttentionSpec", "window": "SlidingWindowSpec", "state": "MambaSpec"}
"""vLLM's names for the kinds of a cache group."""

KEY = b"the key of all engines"


def cache_of(kinds: Iterable[str], block_size: int, window: int = 0, *, is_zeroed: bool = False) -> Any:
    """Return vLLM's description of a cache with groups of these kinds."""
    groups = []
    for kind in kinds:
        spec = getattr(DESCRIPTION, SPEC_NAMES[kind])()
        spec.block_size = block_size
        spec.dcp_sharded = False
        spec.tokens_per_state = 1
        spec.sliding_window = window
        groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=[]))
    return SimpleNamespace(
        kv_cache_groups=groups,
        transfer_group_ids=(*range(len(groups)),),
        transfer_groups=groups,
        needs_kv_cache_zeroing=is_zeroed,
    )


def config_of(engine_id: str, *, is_producer: bool = True, caches_prefixes: bool = True, num_drafts: int = 0) -> Any:
    """Return the part of vLLM's configuration that a connector reads."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_producer=is_producer, engine_id=engine_id),
        cache_config=SimpleNamespace(enable_prefix_caching=caches_prefixes),
        num_prefill_lookahead_tokens=num_drafts,
        model_config=SimpleNamespace(get_vocab_size=lambda: 1000),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


class NamedReads(Reads):
    """Reads of workers whose groups have the names of a model's, which keep the errors of requests."""

    errors: dict[str, KVPlanError]

    def begin(self, read: Read) -> None:
        names = {f"group{index}": group.name for index, group in enumerate(self.worker.groups)}
        local = {names[key]: table for key, table in read.local.items()}
        remote = {names[key]: table for key, table in read.remote.items()}
        tokens = {names[key]: positions for key, positions in read.tokens.items()}
        super().begin(attrs.evolve(read, local=local, remote=remote, tokens=tokens))

    def poll(self) -> list[ReadResult]:
        results = super().poll()
        self.errors = {result.request: result.error for result in results if result.error is not None}
        return results

    def late(self) -> dict[str, KVPlanError]:
        late = super().late()
        self.errors |= late
        return late


class VllmConnector:
    """``kvplan_nixl.vllm``'s Scheduler and Workers as a connector of the simulation."""

    def __init__(self, site: Site) -> None:
        host = site.host
        self._groups = site.groups
        self._block_size = site.groups[0].tokens_per_block
        kinds = ["state" if group.is_state else "window" if group.window else "full" for group in site.groups]
        window = max((group.window or 0 for group in site.groups if not group.is_state), default=0)
        cache = cache_of(kinds, self._block_size, window)
        config = config_of(site.workers[0].engine_id)
        settings = SCHEDULER.ConnectorSettings(host=host.name, port=5600, key=KEY)
        self._scheduler = SCHEDULER.Scheduler(config, cache, settings, host)
        self._managers = [SimpleNamespace(block_size=self._block_size, num_cached_block={}) for _ in kinds]
        self._scheduler.set_managers(self._managers)
        self._scheduler.serve_offers(site.offers)
        self._workers = [WORKER.Worker(config, cache, settings, host) for _ in site.workers]
        for worker, described, executor in zip(self._workers, site.workers, site.executors, strict=True):
            worker._reads = NamedReads(
                described,
                executor,
                LOGGER,
                connections=site.connections(executor),
                claims=worker._claims,
                system=host,
            )
        self._promises = Promises(host)
        self._num_reports: dict[str, int] = {}

    def _seen(self, request: EngineRequest) -> Any:
        """Return a request as vLLM shows it."""
        is_done = request.is_complete and not request.is_aborted
        params = {"do_remote_decode": True} if request.is_for_another else request.params
        return SimpleNamespace(
            request_id=request.name,
            kv_transfer_params=params,
            num_prompt_tokens=request.num_prompt,
            num_tokens=len(request.tokens),
            _all_token_ids=request.tokens,
            num_computed_tokens=request.num_computed,
            num_in_flight_tokens=0,
            status=RequestStatus.FINISHED_STOPPED if is_done else RequestStatus.FINISHED_ABORTED,
            cache_salt=None,
            lora_request=None,
            mm_features=(),
            prompt_token_ids=None,
            prompt_embeds=None,
        )

    def add(self, request: EngineRequest) -> None:
        seen = self._seen(request)
        self._scheduler.add(seen)
        # it may have shortened the prompt, of the same list
        request.num_prompt = seen.num_prompt_tokens

    def count_readable(self, request: EngineRequest, num_cached: int) -> int:
        number: int = self._scheduler.count_tokens_to_read(self._seen(request), num_cached)
        return number

    def begin_read(self, request: EngineRequest, num_tokens: int) -> None:
        num_cached = (request.num_computed - num_tokens) // self._block_size
        tables = [
            [
                SimpleNamespace(
                    is_null=block == NULL_BLOCK,
                    block_hash=ordinal if ordinal < num_cached and block != NULL_BLOCK else None,
                )
                for ordinal, block in enumerate(request.blocks[group.name])
            ]
            for group in self._groups
        ]
        table = SimpleNamespace(blocks=tables, get_block_ids=lambda: self._ids(request))
        self._scheduler.begin_read(self._seen(request), table, num_tokens)
        for group, manager in zip(self._groups, self._managers, strict=True):
            request.num_partial[group.name] = manager.num_cached_block.pop(request.name, 0)

    def _ids(self, request: EngineRequest) -> tuple[list[int], ...]:
        """Return the ids of a request's blocks, by group."""
        return tuple([*request.blocks.get(group.name, [])] for group in self._groups)

    def step(self) -> StepReport:
        metadata = self._scheduler.take_step()
        received, failed = list[str](), dict[str, KVPlanError]()
        for worker in self._workers:
            worker.begin(metadata)
            results = worker.results()
            assert results.finished_sending == metadata.released
            for name in sorted(results.failed_recving):
                failed.setdefault(name, worker._reads.errors[name])
            # vLLM waits for the reports of all workers
            for name in sorted(results.finished_recving):
                self._num_reports[name] = self._num_reports.get(name, 0) + 1
                if self._num_reports[name] == len(self._workers):
                    del self._num_reports[name]
                    received.append(name)
            worker._reads.errors.clear()
        self._scheduler.end_reads({*received})
        return StepReport(received, failed, sorted(metadata.released))

    def finish(self, request: EngineRequest) -> Mapping[str, Any] | None:
        params = self._scheduler.hand_over(self._seen(request), self._ids(request))
        if params is None:
            return None
        self._promises.grant(params["remote_lease"], request.name)
        read: Mapping[str, Any] = json.loads(json.dumps(params))
        return read

    def is_promised(self, request: str) -> bool:
        return self._promises.take(request)
