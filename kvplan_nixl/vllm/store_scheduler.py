"""The part of the connector to a store in vLLM's scheduler: what is loaded, and what is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import attrs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from kvplan import Blocks, KVPlanError, decode
from kvplan.describe.blocks import Range
from kvplan.store import Chain, FileBackend, StoreReader, find
from kvplan_nixl.settings import StoreSettings
from kvplan_nixl.vllm.description import facts_of, groups_of

logger = init_logger(f"vllm.{__name__}")


@attrs.frozen
class StoreJob:
    """What all workers do for one request: load, or save, positions of its blocks, by group."""

    request: str
    chain: Chain
    tables: dict[str, Blocks]
    positions: Range


@dataclass
class KvplanStoreMetadata(KVConnectorMetadata):
    """The work of all workers in one step."""

    loads: list[StoreJob] = field(default_factory=list)
    saves: list[StoreJob] = field(default_factory=list)


@dataclass
class KvplanStoreHandshake(KVConnectorHandshakeMetadata):
    """The offer of one worker, by which the scheduler knows what that can load."""

    offer: bytes


class StoreScheduler:
    """Finds the longest prefix of each request that all workers can load.

    A finished request is saved with its answer. Its blocks stay until all workers have done so.
    """

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, settings: StoreSettings) -> None:
        assert config.kv_transfer_config is not None
        self._settings = settings
        self._saves = config.kv_transfer_config.is_kv_producer
        self._loads = config.kv_transfer_config.is_kv_consumer
        self._groups = groups_of(cache)
        self._backend = FileBackend(settings.folder)
        self._readers: list[StoreReader] = []
        self._num_cached: dict[str, int] = {}
        self._begun: set[str] = set()
        self._step = KvplanStoreMetadata()

    def set_offers(self, offers: Sequence[bytes]) -> None:
        """Take the offers of all workers."""
        size = self._settings.tokens_per_page
        self._readers = [
            StoreReader(self._backend, decode(offer), tokens_per_page=size) for offer in offers
        ]

    def _chain(self, request: Request, num_tokens: int) -> Chain | None:
        """Return the keys of a request's first positions, ``None`` if tokens do not say them."""
        if request.prompt_embeds is not None or not self._readers:
            return None
        return self._readers[0].chain(request._all_token_ids[:num_tokens], facts_of(request))

    def count_tokens_to_load(self, request: Request, num_cached: int) -> int:
        """Return the number of positions to load after the first ``num_cached`` of a request.

        A request is loaded once. Nothing is if the store fails, and the request is computed.
        """
        if not self._loads or request.request_id in self._begun:
            return 0
        # the prompt alone: nothing is known of the answer
        chain = self._chain(request, request.num_prompt_tokens)
        if chain is None:
            return 0
        try:
            stop = find(self._readers, chain, start=num_cached)
        except KVPlanError as error:
            logger.warning("nothing is loaded of request %r: %s", request.request_id, error)
            return 0
        self._num_cached[request.request_id] = num_cached
        # the engine computes the last token of a prompt, for the first one of the answer
        return max(0, min(stop, int(request.num_prompt_tokens) - 1) - num_cached)

    def begin_load(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Load ``num_tokens`` positions of a request into its blocks."""
        num_cached = self._num_cached.pop(request.request_id, 0)
        chain = self._chain(request, request.num_prompt_tokens) if num_tokens else None
        if chain is None:
            return
        self._begun.add(request.request_id)
        positions = (num_cached, num_cached + num_tokens)
        tables = self._tables(blocks.get_block_ids())
        self._step.loads.append(StoreJob(request.request_id, chain, tables, positions))

    def _tables(self, ids: Sequence[Sequence[int]]) -> dict[str, Blocks]:
        return {group: Blocks([*ids[index]]) for group, index in self._groups.items()}

    def begin_save(self, request: Request, ids: Sequence[Sequence[int]]) -> bool:
        """Save a finished request, and return whether its blocks stay until that is done."""
        self._begun.discard(request.request_id)
        self._num_cached.pop(request.request_id, None)
        is_done = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        if not (self._saves and is_done and any(ids)):
            return False
        # a step under way writes the positions of tokens that may not be the request's
        num_computed = request.num_computed_tokens - request.num_in_flight_tokens
        chain = self._chain(request, min(num_computed, request.num_tokens))
        # what is shorter than a page has no key
        if chain is None or not chain.keys:
            return False
        positions = (0, chain.num_tokens)
        self._step.saves.append(StoreJob(request.request_id, chain, self._tables(ids), positions))
        return True

    def take_step(self) -> KvplanStoreMetadata:
        """Return the work of the workers in this step."""
        step = self._step
        self._step = KvplanStoreMetadata()
        return step
