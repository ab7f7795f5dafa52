"""Block tables of vLLM's cache groups, as kvplan's, and what a request has in them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvplan import Blocks
from kvplan.describe.blocks import Range
from kvplan_nixl.vllm.description import groups_of, is_state, tokens_per_table_block

NULL_BLOCK: Final = 0
"""The block that stands where vLLM has freed one of a request, or never had one."""


class BlockTables:
    """The cache groups that are transferred, by name: their ``indices``, and what each is.

    ``block_sizes`` are in positions. ``states`` names the groups of recurrent states.
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

    def first_listed(self, group: str, blocks: Blocks) -> int:
        """Return the position from which on a group has all blocks of a request."""
        # the index of the last block before each gap
        gaps = (blocks.ordinals[1:] - blocks.ordinals[:-1] > 1).nonzero()[0]
        if not blocks.ids.size:
            first_block = blocks.listed[1]
        elif gaps.size:
            first_block = int(blocks.ordinals[gaps[-1] + 1])
        else:
            first_block = blocks.first
        return first_block * self.block_sizes[group]

    def first_uncached(self, group: str, blocks: KVCacheBlocks) -> int:
        """Return the position from which on a group's blocks are not from the prefix cache."""
        cached = takewhile(
            lambda block: block.is_null or block.block_hash is not None,
            blocks.blocks[self.indices[group]],
        )
        return len([*cached]) * self.block_sizes[group]
