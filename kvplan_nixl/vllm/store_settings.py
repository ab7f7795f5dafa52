"""The settings of vLLM's connector to a store, read once, from vLLM's configuration."""

from __future__ import annotations

from typing import Any

import attrs
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvplan_nixl.backends import UCX, Backends
from kvplan_nixl.settings import StoreSettings, backends_of, setting, store_refusal
from kvplan_nixl.vllm.description import check_kinds, is_state, specs_of
from kvplan_nixl.vllm.drafts import WITH_CACHE
from kvplan_nixl.vllm.settings import OPTION, check_engine, check_transfer


@attrs.frozen(kw_only=True)
class VllmStoreSettings(StoreSettings):
    """The settings of vLLM's connector, which copies by NIXL from and to a GPU."""

    backends: Backends = setting(backends_of, UCX)  # noqa: RUF009


def store_settings_of(config: VllmConfig) -> VllmStoreSettings:
    """Return the settings of an engine. Raises ``SETTING``, ``TYPE`` and ``RANGE``."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    check_transfer(transfer)
    settings = VllmStoreSettings.read(transfer.kv_connector_extra_config, OPTION)
    # a page may be evicted or damaged, which must not fail a request
    policy = transfer.kv_load_failure_policy
    if policy != "recompute":
        raise store_refusal("kv_load_failure_policy", "recompute", policy)
    return settings


def check_store_engine(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Refuse engines whose caches the connector does not store yet, or not rightly.

    Raises ``LAYOUT`` or ``SETTING``.
    """
    check_engine(config)
    check_kinds(cache)
    for group in cache.transfer_groups:
        # a ring, or a window that vLLM recomputes after a hit
        if not group.kv_cache_spec.prefix_cacheable:
            expected = "layers that a prefix cache keeps"
            raise store_refusal("model", expected, type(specs_of(group)[0]).__name__)
    speculative: Any = config.speculative_config
    # what drafts cache at a page's last position may depend on the next token, which no key has
    if speculative is not None and speculative.method in WITH_CACHE:
        expected = "no drafts that have a cache"
        raise store_refusal("speculative_config", expected, f"{speculative.method}")
    has_states = any(is_state(group) for group in cache.transfer_groups)
    # A prefix cache keeps states in blocks of its own, and drafts keep several of them.
    if has_states and config.cache_config.mamba_cache_mode != "none":
        expected = "none, for a model with states"
        raise store_refusal("mamba_cache_mode", expected, config.cache_config.mamba_cache_mode)
    if has_states and speculative is not None:
        expected = "none, for a model with states"
        raise store_refusal("speculative_config", expected, f"{speculative.method}")
    if config.parallel_config.prefill_context_parallel_size > 1:
        raise store_refusal("prefill_context_parallel_size", "1", "more")
