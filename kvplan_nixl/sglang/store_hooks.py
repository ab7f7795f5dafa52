"""Hooks of SGLang's cache that hand a store the prompt of the pages which it is asked for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvplan_nixl.sglang.store import KvplanStore, pages_of
from kvplan_nixl.sglang.store_prompts import PromptPages

TREE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
CONTROLLER: Final = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
)


@cache
def hook_cache() -> None:
    """Hook what SGLang's cache does with its storage. Other storages stay as they are."""
    hooks = {
        f"{TREE}.prefetch_from_storage": _prefetch,
        f"{TREE}.query_storage_hit_length": _query,
        f"{TREE}.write_backup_storage": _back_up,
        f"{CONTROLLER}.write_storage": _write,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()


def _store_of(tree: Any) -> KvplanStore | None:
    storage = getattr(tree.cache_controller, "storage_backend", None)
    return storage if isinstance(storage, KvplanStore) else None


def _prefetch(
    original: Any,
    tree: Any,
    request: Any,
    last_host_node_id: Any,
    new_input_tokens: Any,
    last_hash: Any = None,
    prefix_keys: Any = None,
    matched_prefix_tokens: Any = None,
    extra_key: Any = None,
    cache_salt: Any = None,
    **options: Any,
) -> Any:
    """Hand on the prompt of a request, of which some tokens are cached already."""
    if _store_of(tree) is not None:
        tokens = [*(matched_prefix_tokens or ()), *new_input_tokens]
        prefix_keys = PromptPages.of(tokens, extra_key, cache_salt, tree.page_size)
    return original(
        tree,
        request,
        last_host_node_id,
        new_input_tokens,
        last_hash,
        prefix_keys,
        matched_prefix_tokens=matched_prefix_tokens,
        extra_key=extra_key,
        cache_salt=cache_salt,
        **options,
    )


def _query(
    original: Any,
    tree: Any,
    last_host_node_id: Any,
    new_input_tokens: Any,
    last_hash: Any = None,
    prefix_keys: Any = None,
    extra_key: Any = None,
    cache_salt: Any = None,
) -> Any:
    """Hand on the prompt of a request that decode asks about."""
    if _store_of(tree) is not None:
        before = _backed_up(tree, last_host_node_id)
        if before is None:
            return 0
        tokens = [*before.tokens, *new_input_tokens]
        prefix_keys = PromptPages.of(tokens, extra_key, cache_salt, tree.page_size)
    return original(
        tree, last_host_node_id, new_input_tokens, last_hash, prefix_keys, extra_key, cache_salt
    )


def _back_up(original: Any, tree: Any, node_id: Any) -> None:
    """Save a node of the tree, if all tokens before it are in host memory too."""
    store = _store_of(tree)
    if store is None:
        original(tree, node_id)
        return
    store.prompt_to_save = _backed_up(tree, node_id)
    if store.prompt_to_save is not None:
        original(tree, node_id)
        # what else SGLang writes is of another prompt
        store.prompt_to_save = None


def _write(
    original: Any,
    controller: Any,
    host_indices: Any,
    token_ids: Any,
    hash_value: Any = None,
    prefix_keys: Any = None,
    **options: Any,
) -> Any:
    """Hand on the prompt of the node that is saved."""
    storage = controller.storage_backend
    if isinstance(storage, KvplanStore):
        prefix_keys = storage.prompt_to_save
    return original(controller, host_indices, token_ids, hash_value, prefix_keys, **options)


def _backed_up(tree: Any, node_id: Any) -> PromptPages | None:
    """Return the prompt up to the end of a node, and where it is in host memory.

    ``None`` if a part of it is not there: with the policy ``write_back``, for one.
    """
    core = tree.tree_core
    (path,) = core.collect_path_info([node_id])
    specs = [core.build_storage_backup_spec(node.node_id, False) for node in path]
    if None in specs:
        return None
    tokens = array("q")
    # SGLang evicts no node before those that follow it, and none that it saves
    slots = [torch.empty(0, dtype=torch.int64)]
    for spec in specs:
        tokens.extend(spec.token_ids)
        slots.append(spec.host_value)
    extra_key, salt = core.prefetch_anchor_info(node_id)
    size = tree.page_size
    table = pages_of(torch.cat(slots), size, 0)
    window_slots = _window_slots(specs, tree.swa_retain_window or 0)
    window_table = pages_of(window_slots, size, len(tokens) - len(window_slots))
    return PromptPages.of(tokens, extra_key, salt, size, table, window_table)


def _window_slots(specs: Sequence[Any], num_retained: int) -> torch.Tensor:
    """Return the slots of windows in the last nodes of a prompt that SGLang locks while it saves.

    It locks nodes from the last one on until they have as many positions as it retains. What is
    before them it may evict at any time, and the slots are another prompt's then.
    """
    slots = [torch.empty(0, dtype=torch.int64)]
    num_positions = 0
    for spec in reversed(specs):
        transfers = chain.from_iterable(spec.comp_xfers.values())
        by_pool = {transfer.name: transfer.host_indices for transfer in transfers}
        # a node whose windows are evicted has none
        if num_positions >= num_retained or PoolName.SWA not in by_pool:
            break
        node_slots = by_pool[PoolName.SWA]
        slots.insert(0, node_slots)
        num_positions += len(spec.token_ids)
        if len(node_slots) < len(spec.token_ids):
            break
    return torch.cat(slots)
