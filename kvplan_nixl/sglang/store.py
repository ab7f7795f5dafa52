"""A store as SGLang sees it: a storage of HiCache, between its host memory and pages."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import attrs
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult
from sglang.srt.runtime_context import (
    get_disagg,
    get_exec,
    get_memory,
    get_model,
    get_spec,
    process_model_config,
)

from kvplan import Blocks, KVPlanError
from kvplan.bridges import RankInfo, from_sglang, sglang_model
from kvplan.models import FP8_DTYPES
from kvplan.protocol.page_keys import Chain
from kvplan_nixl.identity import short_model
from kvplan_nixl.serving.store import (
    BackgroundEviction,
    StallGuard,
    StoreClient,
    StoreReader,
    open_backend,
)
from kvplan_nixl.serving.store.eviction import evict_beside
from kvplan_nixl.settings import StoreSettings, store_refusal
from kvplan_nixl.sglang.description import MODEL, dtype_name, kv_heads_of, require
from kvplan_nixl.sglang.identity import facts_of
from kvplan_nixl.sglang.rank import logger
from kvplan_nixl.sglang.store_prompts import PromptPages

OPTION: Final = "hicache_storage_backend_extra_config"

OF_SGLANG: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""The names in that configuration by which SGLang makes a storage."""

UNSERVED: Final = MappingProxyType({"attn_cp_size": 1, "dcp_size": 1})
"""Fields of SGLang's configuration of a storage that have to have a value."""

WITHOUT_CACHE: Final = (None, "NGRAM")
"""Algorithms of speculative decoding whose drafts have no cache, by SGLang's names."""

FP8_WORDS: Final = ("fp8_e4m3", "fp8_e5m2")
"""SGLang's words for dtypes of caches whose values it stores as bytes."""


class KvplanStore(HiCacheStorage):
    """Saves the pages that SGLang backs up, and loads those of a prompt before it is computed.

    SGLang searches, loads and saves in a thread each. Its hooks hand the prompt to each call.
    """

    def __init__(self, storage_config: Any, options: Any = None) -> None:
        self._config = storage_config
        extra = storage_config.extra_config or {}
        values = {label: extra[label] for label in extra.keys() - OF_SGLANG}
        self._settings = StoreSettings.read(values, OPTION)
        if not extra.get("interface_v1"):
            raise store_refusal("interface_v1", "1", "0, with which SGLang copies each page")
        self._check_engine()
        self._lock = threading.Lock()
        self._window = 0  # the positions before its end that a search needs of windows
        self._eviction: BackgroundEviction | None = None
        self.prompt_to_save: PromptPages | None = None

    def _check_engine(self) -> None:
        """Refuse an engine whose caches are not stored rightly. Raises ``LAYOUT``."""
        for field, expected in UNSERVED.items():
            require(field, expected, getattr(self._config, field))
        # there, pages are not in host memory long enough to be joined to those of a store
        require("hicache_host_memory_mode", "cache", get_memory().hicache_host_memory_mode)
        is_offloading = get_disagg().disaggregation_decode_enable_offload_kvcache
        require("disaggregation_decode_enable_offload_kvcache", False, is_offloading)
        # a sleeping engine forgets its weights, unless it keeps a copy
        features = get_exec().features
        if features.enable_memory_saver:
            require("enable_weights_cpu_backup", True, features.enable_weights_cpu_backup)
        # What drafts cache at a page's last position may depend on the next token.
        algorithm = get_spec().speculative_algorithm
        if algorithm not in WITHOUT_CACHE:
            require("speculative_algorithm", "None or NGRAM", algorithm)

    def on_host_pools_registered(self) -> None:
        """Describe the host memory. Raises ``LAYOUT`` for memory that is not described."""
        pools = {PoolName.KV: self.mem_pool_host, **getattr(self, "registered_pools", {})}
        unserved = sorted(f"{name}" for name in pools.keys() - {PoolName.KV, PoolName.SWA})
        require("host pools beside kv and swa", [], unserved)
        config, settings = self._config, self._settings
        rank = config.pp_rank * config.tp_size + config.tp_rank
        info = RankInfo(f"sglang-{os.getpid()}", rank, config.tp_rank, config.tp_size)
        pool = self.mem_pool_host
        model_config = process_model_config()
        dtype = _cached_dtype(pool.dtype)
        attended = {}
        if PoolName.SWA in pools:
            require("pp_size", 1, config.pp_size)
            pool = windows_apart(model_config, pool, pools[PoolName.SWA])
        heads = kv_heads_of(model_config, None, settings)
        model = sglang_model(MODEL, info, pool, kv_heads=heads, dtype=dtype)
        facts = facts_of(settings)
        worker = attrs.evolve(from_sglang(model, info, pool), model=short_model(facts))
        # a block table of HiCache's pages for each pool
        names = [group.name for group in worker.groups]
        self._groups = dict(zip((PoolName.KV, PoolName.SWA), names, strict=False))
        if PoolName.SWA in self._groups:
            attended[self._groups[PoolName.SWA]] = lambda stop: max(stop - self._window, 0)
        backend = open_backend(settings.folder)
        # one rank of an engine does so, and any number of engines
        if rank == 0:
            self._eviction = evict_beside(backend, settings.limits, logger)
        size = settings.tokens_per_page

        def make_reader() -> StoreReader:
            return StoreReader(backend, worker, tokens_per_page=size, attended=attended)

        def make_client() -> StoreClient:
            buffer_bytes = settings.buffer_bytes
            return StoreClient(backend, worker, tokens_per_page=size, buffer_bytes=buffer_bytes)

        self._reader = make_reader()
        # one serves one thread, and SGLang searches and loads while it saves
        self._searcher = StallGuard(make_reader, stall_s=settings.search_timeout_s)
        self._loader = StallGuard(make_client, stall_s=settings.stall_s)
        self._saver = StallGuard(make_client, stall_s=settings.stall_s)
        logger.info("%s uses the store in %s", worker, settings.folder)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many pages in a row can be loaded, without windows."""
        return self._find(keys, extra_info, 0)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return how many pages in a row can be loaded, with the windows before their end."""
        # SGLang names as many pages as the windows before any end need
        sizes = [len(transfer.keys) for transfer in pool_transfers or ()]
        num_pages = self._find(keys, extra_info, max(sizes, default=0))
        return PoolTransferResult(num_pages, {}, [num_pages] if num_pages else [])

    def _find(self, keys: list[str], extra_info: Any, num_window_pages: int) -> int:
        prompt = _prompt_of(extra_info)
        positions = prompt.positions(keys)
        if positions is None:
            return 0
        start, stop = positions
        try:
            # SGLang's scheduler may search too
            with self._lock:
                self._window = num_window_pages * prompt.page_size
                chain = self._chain(prompt)
                end = self._searcher.call(
                    lambda reader: reader.find(chain, start=start, stop=stop, step=prompt.page_size)
                )
        except Exception as error:  # whatever it is, SGLang goes on without the store
            logger.warning("nothing is loaded from the store: %s", error, exc_info=_is_fault(error))
            return 0
        return (end - start) // prompt.page_size

    def _chain(self, prompt: PromptPages) -> Chain:
        return self._reader.chain(prompt.tokens, prompt.facts)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Load pages into host memory: all of them or, as far as SGLang may use, none."""
        return self._load(PoolName.KV, keys, host_indices, extra_info)

    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Load pages of other pools, as of the first one."""
        return {
            transfer.name: self._load(
                transfer.name, transfer.keys, transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    def _load(
        self, pool: str, keys: list[str], host_indices: torch.Tensor, extra_info: Any
    ) -> list[bool]:
        prompt = _prompt_of(extra_info)
        positions = prompt.positions(keys)
        if positions is None:
            return [False] * len(keys)
        start, stop = positions
        group = self._groups[pool]
        tables = {group: pages_of(host_indices, prompt.page_size, start)}
        chain = self._chain(prompt)
        try:
            self._loader.call(lambda client: client.load(chain, tables, {group: positions}))
            self._loader.call(lambda client: client.use(chain, stop))
        except Exception as error:  # whatever it is, SGLang goes on without the store
            logger.warning(
                "%d tokens are recomputed, since their KV cannot be loaded from the store: %s",
                stop - start,
                error,
                exc_info=_is_fault(error),
            )
            return [False] * len(keys)
        return [True] * len(keys)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Save the store's pages that end in these pages. They may begin in pages before."""
        prompt = _prompt_of(extra_info)
        return self._save(PoolName.KV, keys, prompt, prompt.table)

    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Save pages of other pools, as of the first one."""
        prompt = _prompt_of(extra_info)
        return {
            transfer.name: self._save(transfer.name, transfer.keys, prompt, prompt.window_table)
            for transfer in transfers
        }

    def _save(
        self, pool: str, keys: list[str], prompt: PromptPages, table: Blocks | None
    ) -> list[bool]:
        positions = prompt.positions(keys)
        if positions is None or table is None:
            return [False] * len(keys)
        start, stop = positions
        # the page of the store that an earlier node has begun, if that is still there
        begun = start - start % self._settings.tokens_per_page
        first = max(begun, table.first * prompt.page_size)
        chain = self._chain(prompt)
        group = self._groups[pool]
        try:
            self._saver.call(
                lambda client: client.save(chain, {group: table}, {group: (first, stop)})
            )
            self._saver.call(lambda client: client.use(chain, stop))
        except Exception as error:  # whatever it is, SGLang goes on without the store
            message = "KV of %d tokens is not stored: %s"
            logger.warning(message, stop - start, error, exc_info=_is_fault(error))
            return [False] * len(keys)
        return [True] * len(keys)

    def close(self) -> None:
        """Evict nothing more."""
        if self._eviction is not None:
            self._eviction.close()

    def clear(self) -> bool:
        """Clear nothing, since other engines use the store too."""
        logger.warning(
            "flushing the cache does not empty the store; to delete pages: kvplan store gc"
        )
        return False

    # SGLang's older interface names a page by its hash alone, which no store has.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return False


def _is_fault(error: Exception) -> bool:
    """Return whether an error is unexpected: the log has its traceback."""
    return not isinstance(error, KVPlanError)


def _cached_dtype(dtype: torch.dtype) -> str | None:
    """Return the dtype of a cache. Host memory has the values of fp8 as bytes."""
    name = dtype_name(dtype)
    if name != "uint8":
        return name
    setting = get_model().kv_cache_dtype
    if setting not in FP8_WORDS:
        require("kv_cache_dtype", " or ".join(FP8_WORDS), setting)
    return FP8_DTYPES[setting]


def windows_apart(config: Any, full: Any, sliding: Any) -> SimpleNamespace:
    """Return host pools as SGLang has pools of layers without and with windows, each in order."""
    # by whether they have windows; a layer's index is that in its own pool
    layers = (config.full_attention_layer_ids or (), config.swa_attention_layer_ids or ())
    counts = [len(numbers) for numbers in layers]
    # layers may share the cache of another layer
    require("layers of the host pools", counts, [full.layer_num, sliding.layer_num])
    mapping = {}
    for slides, numbers in enumerate(layers):
        for index, layer in enumerate(numbers):
            mapping[layer] = (index, bool(slides))
    return SimpleNamespace(full_kv_pool=full, swa_kv_pool=sliding, layers_mapping=mapping)


def pages_of(host_indices: torch.Tensor, page_size: int, start: int) -> Blocks:
    """Return a block table of the pages whose slots SGLang lists, from position ``start`` on."""
    return Blocks((host_indices[::page_size] // page_size).tolist(), start // page_size)


def _prompt_of(extra_info: Any) -> PromptPages:
    """Return the prompt that a hook has handed to a call."""
    prompt = None if extra_info is None else extra_info.prefix_keys
    if not isinstance(prompt, PromptPages):
        raise KVPlanError(
            "TYPE",
            "use a store",
            expected="the prompt of the pages",
            got=f"{prompt!r}"[:80],
            hint="set module_path to kvplan_nixl.sglang, which hooks SGLang's cache",
        )
    return prompt
