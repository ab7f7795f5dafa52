"""The store's connector in vLLM's scheduler: what is loaded, and what is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Final

import attrs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from kvplan import Blocks, decode
from kvplan.describe import Range
from kvplan.protocol.groups import first_listed
from kvplan.protocol.page_keys import Chain
from kvplan.protocol.prefix_search import Attended
from kvplan_nixl.serving.store import open_backend
from kvplan_nixl.serving.store.eviction import evict_beside
from kvplan_nixl.settings import StoreSettings
from kvplan_nixl.vllm.description import frees_blocks
from kvplan_nixl.vllm.engine_state import OUTDATED, AdapterChanges, EngineState
from kvplan_nixl.vllm.requests import params_of
from kvplan_nixl.vllm.store_searches import StoreSearches
from kvplan_nixl.vllm.tables import BlockTables

logger = init_logger(f"vllm.{__name__}")

PIN: Final = "kvplan_pin"
"""The ``kv_transfer_params`` of a request say with it that its prompt stays in the store.

Its value is a secret of the client, without which nobody can take the pin away.
"""

UNPIN: Final = "kvplan_unpin"
"""The ``kv_transfer_params`` of a request take away with it what a pin of that value keeps."""


@attrs.frozen
class StoreJob:
    """What all workers do for one request: load, or save, positions of its blocks, by group.

    The positions end at ``stop``, or before it. Pages of the first ``pin_stop`` positions are
    pinned for ``pin_owner``, or no longer, if ``is_pinned`` says so.
    """

    request: str
    chain: Chain
    tables: dict[str, Blocks]
    positions: dict[str, Range]
    stop: int
    is_pinned: bool | None = None
    pin_owner: str = ""
    pin_stop: int = 0


@dataclass
class KvplanStoreMetadata(KVConnectorMetadata):
    """The work of all workers in one step."""

    loads: list[StoreJob] = field(default_factory=list)
    saves: list[StoreJob] = field(default_factory=list)


@dataclass
class KvplanStoreWorkerMetadata(KVConnectorWorkerMetadata):
    """What workers say of a step: their offers and models, in the first one; changes of adapters.

    Offers tell the scheduler what the workers can load. A handshake would tell it before, but other
    connectors of a MultiConnector have that.
    """

    offers: list[bytes] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    adapters: list[AdapterChanges] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvplanStoreWorkerMetadata:
        assert isinstance(other, KvplanStoreWorkerMetadata)
        self.offers.extend(other.offers)
        self.models.extend(other.models)
        self.adapters.extend(other.adapters)
        return self


class StoreScheduler:
    """Finds the longest prefix of each request that all workers can load.

    A finished request is saved with its answer. Its blocks stay until all workers have done so. Of
    a window it still has the last blocks, and of states the last one.
    """

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        settings: StoreSettings,
        state: EngineState | None = None,
    ) -> None:
        self._state = state or EngineState({}, token_hex)
        assert config.kv_transfer_config is not None
        self._settings = settings
        self._saves = config.kv_transfer_config.is_kv_producer
        self._loads = config.kv_transfer_config.is_kv_consumer
        self._tables = BlockTables(config, cache)
        groups = self._tables.groups
        self._attended: dict[str, Attended] = self._tables.first_loaded
        self._frees_blocks = any(frees_blocks(group) for group in groups.values())
        self._backend = open_backend(settings.folder)
        # one process of an engine does so, and any number of engines
        self._eviction = evict_beside(self._backend, settings.limits, logger)
        self._model = ""
        self._searches: StoreSearches | None = None
        self._num_cached: dict[str, int] = {}
        self._begun: set[str] = set()
        # by request and group: the first position that another connector has read
        self._read_from: dict[str, dict[str, int]] = {}
        self._step = KvplanStoreMetadata()

    def set_offers(self, offers: Sequence[bytes]) -> None:
        """Take the offers of all workers."""
        workers = [decode(offer) for offer in offers]
        # a worker is sent once, so these are all that there are
        self._model = workers[0].model
        self._searches = StoreSearches(
            self._backend,
            workers,
            self._settings.tokens_per_page,
            self._attended,
            self._settings.search_timeout_s,
        )

    def close(self) -> None:
        """Start no further search, and no eviction."""
        if self._eviction is not None:
            self._eviction.close()
        if self._searches is not None:
            self._searches.close()

    def _chain(self, request: Request, num_tokens: int) -> Chain | None:
        """Return the keys of a request's first positions, ``None`` if tokens do not say them."""
        if request.prompt_embeds is not None or self._searches is None:
            return None
        return Chain.of(
            self._model,
            request._all_token_ids[:num_tokens],
            self._state.store_facts_of(request),
            tokens_per_page=self._settings.tokens_per_page,
        )

    def count_tokens_to_load(self, request: Request, num_cached: int) -> int | None:
        """Return the number of positions to load after the first ``num_cached`` of a request.

        A request is loaded once. Nothing is if the store fails, and the request is computed. It is
        ``None``, and vLLM asks again, until the workers have said what they can load, and while the
        store is searched.
        """
        # also of one that is not loaded, but may be saved
        self._state.note_origin(request, num_cached)
        if not self._loads or request.request_id in self._begun:
            return 0
        searches = self._searches
        if searches is None:
            return None
        # the prompt alone: nothing is known of the answer
        num_tokens = int(request.num_prompt_tokens)
        # The engine computes the last token of a prompt, for the first one of the answer. What is
        # before it has another window, and another state.
        chain = self._chain(request, num_tokens - self._frees_blocks)
        if chain is None:
            return 0
        stop = searches.find(request.request_id, chain, num_cached)
        if stop is None:
            return None
        self._num_cached[request.request_id] = num_cached
        return max(0, min(stop, num_tokens - 1) - num_cached)

    def begin_load(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Load ``num_tokens`` positions of a request into its blocks."""
        num_cached = self._forget(request)
        chain = self._chain(request, request.num_prompt_tokens) if num_tokens else None
        if chain is None:
            return
        self._begun.add(request.request_id)
        self._state.load(request.request_id)
        stop = num_cached + num_tokens
        positions = {}
        for group in self._tables.indices:
            # a group may have cached less than others
            start = min(num_cached, self._tables.first_uncached(group, blocks))
            if group in self._attended:
                start = max(start, self._attended[group](stop))
            positions[group] = (stop if group in self._tables.states else min(start, stop), stop)
        tables = self._tables.of_ids(blocks.get_block_ids())
        self._step.loads.append(StoreJob(request.request_id, chain, tables, positions, stop))

    def _forget(self, request: Request) -> int:
        """Forget what was found of a request, and return how many of its positions were cached."""
        if self._searches is not None:
            self._searches.forget(request.request_id)
        return self._num_cached.pop(request.request_id, 0)

    def leave_out(self, request: str, group: str, stop: int) -> None:
        """Leave out what is before a position when a request is saved.

        Another connector reads the group from there on, in the middle of a block: its source has
        freed the beginning.
        """
        self._read_from.setdefault(request, {})[group] = stop

    def begin_save(self, request: Request, ids: Sequence[Sequence[int]]) -> bool:
        """Save a finished request, and return whether its blocks stay until that is done."""
        self._begun.discard(request.request_id)
        self._forget(request)
        read_from = self._read_from.pop(request.request_id, {})
        is_done = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        if not (self._saves and is_done and any(ids)):
            return False
        if not self._state.is_current(request):
            logger.warning("request %r: KV is not stored: %s", request.request_id, OUTDATED)
            return False
        # a step under way writes the positions of tokens that may not be the request's
        num_computed = request.num_computed_tokens - request.num_in_flight_tokens
        num_tokens = min(num_computed, request.num_tokens)
        chain = self._chain(request, num_tokens)
        # what is shorter than a page has no key
        if chain is None or not chain.keys:
            return False
        is_pinned, pin_owner = _pin_of(request, self._settings)
        tables = self._tables.of_ids(ids)
        positions = {}
        for group in self._tables.indices.keys() - self._tables.states:
            first = first_listed(tables[group], self._tables.block_sizes[group])
            first = max(first, read_from.get(group, 0))
            positions[group] = (min(first, chain.num_tokens), chain.num_tokens)
        # a state has a key where a page ends, if no later token has gone into it
        if request.num_computed_tokens == chain.num_tokens == num_tokens:
            for group in self._tables.states:
                positions[group] = (num_tokens, num_tokens)
        self._step.saves.append(
            StoreJob(
                request.request_id,
                chain,
                tables,
                positions,
                chain.num_tokens,
                is_pinned=is_pinned,
                pin_owner=pin_owner,
                pin_stop=min(request.num_prompt_tokens, chain.num_tokens),
            )
        )
        return True

    def take_step(self) -> KvplanStoreMetadata:
        """Return the work of the workers in this step."""
        step = self._step
        self._step = KvplanStoreMetadata()
        return step


def _pin_of(request: Request, settings: StoreSettings) -> tuple[bool | None, str]:
    """Return whether a request wants its prompt to stay in the store, and for whom.

    Requests may pin only if the operator has set how much.
    """
    params = params_of(request)
    for label, is_pinned in ((PIN, True), (UNPIN, False)):
        owner = params.get(label)
        if owner is None:
            continue
        if not settings.max_pinned_bytes:
            logger.warning(
                "request %r: not pinned: max_pinned_bytes is 0",
                request.request_id,
            )
        elif not isinstance(owner, str) or not owner:
            message = "request %r: not pinned: %s must be a string that only the client knows"
            logger.warning(message, request.request_id, label)
        else:
            return is_pinned, owner
    return None, ""
