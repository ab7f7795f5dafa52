"""Block tables of vLLM's cache groups, as kvplan's, and what a request has in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvplan import Blocks
from kvplan.describe import Range
from kvplan.protocol import CacheGroup
from kvplan_nixl.vllm.description import (
    first_attended,
    frees_blocks,
    groups_of,
    is_state,
    tokens_per_table_block,
)

NULL_BLOCK: Final = 0
"""The id in a block table where vLLM has freed a block of the request, or never had one."""


class BlockTables:
    """The cache groups that are transferred, by name: their ``indices``, and what each is.

    ``block_sizes`` are in positions. ``states`` names the groups of recurrent states, and
    ``positioned`` the others. ``cache_groups`` is what an exporter and an importer know of them.
    """

    def __init__(self, config: VllmConfig, cache: KVCacheConfig) -> None:
        self.indices: dict[str, int] = groups_of(cache)
        self.groups: dict[str, Any] = {
            name: cache.kv_cache_groups[index] for name, index in self.indices.items()
        }
        self.block_sizes: dict[str, int] = {
            name: tokens_per_table_block(group, config) for name, group in self.groups.items()
        }
        self.states: set[str] = {name for name, group in self.groups.items() if is_state(group)}
        self.positioned: set[str] = self.indices.keys() - self.states
        self.cache_groups: dict[str, CacheGroup] = {}
        for name, group in self.groups.items():
            size = None if name in self.states else self.block_sizes[name]
            attended = partial(first_attended, group) if frees_blocks(group) else None
            self.cache_groups[name] = CacheGroup(size, attended)
        self._managers: Sequence[SingleTypeKVCacheManager] = ()

    @property
    def first_loaded(self) -> dict[str, Callable[[int], int]]:
        """The first position of a group with a window that is loaded for a prefix of any length.

        It is where a block begins: vLLM may share blocks, and only as a whole.
        """

        def first(group: Any, size: int, position: int) -> int:
            attended = first_attended(group, position)
            return attended - attended % size

        return {
            name: partial(first, self.groups[name], self.block_sizes[name])
            for name in sorted(self.positioned)
            if frees_blocks(self.groups[name])
        }

    def set_managers(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        """Take the managers of all cache groups, which register blocks in the prefix cache."""
        self._managers = managers

    def num_missing(self, num_tokens: int) -> int:
        """Return how many more blocks so many positions need than are free, negative if fewer."""
        sizes = [self.block_sizes[group] for group in self.positioned]
        needed = sum(-(-num_tokens // size) for size in sizes) + len(self.states)
        num_free: int = self._managers[0].block_pool.get_num_free_blocks()
        return needed - num_free

    def of_request(self, request: str) -> dict[str, Blocks]:
        """Return the block tables of a running request by group."""
        blocks = KVCacheBlocks(tuple(manager.req_to_blocks[request] for manager in self._managers))
        return self.of_ids(blocks.get_block_ids())

    def leave_uncached(self, request: str, group: str, stop: int) -> None:
        """Keep a request's blocks before the position ``stop`` out of the prefix cache."""
        manager = self._managers[self.indices[group]]
        # vLLM caches a request's blocks from this ordinal on, and takes earlier ones for cached.
        num_blocks = stop // manager.block_size
        num_cached = manager.num_cached_block.get(request, 0)
        manager.num_cached_block[request] = max(num_cached, num_blocks)

    def of_ids(self, ids: Sequence[Sequence[int]]) -> dict[str, Blocks]:
        """Return block tables by group.

        Of states only the last one counts, that of the last token computed.
        """
        tables = {}
        for group, index in self.indices.items():
            block_ids = ids[index][-1:] if group in self.states else ids[index]
            tables[group] = Blocks([*block_ids], null=NULL_BLOCK)
        return tables

    def within(self, group: str, blocks: Blocks, tokens: Range) -> list[int]:
        """Return the ids of a group's blocks that hold some of these positions, or its state."""
        ids: list[int] = blocks.ids.tolist()
        if group not in self.states:
            first, stop = tokens
            size = self.block_sizes[group]
            is_within = (blocks.ordinals >= first // size) & (blocks.ordinals * size < stop)
            ids = blocks.ids[is_within].tolist()
        return ids

    def first_uncached(self, group: str, blocks: KVCacheBlocks) -> int:
        """Return the position from which on a group's blocks are not from the prefix cache."""
        cached = takewhile(
            lambda block: block.is_null or block.block_hash is not None,
            blocks.blocks[self.indices[group]],
        )
        return len([*cached]) * self.block_sizes[group]
