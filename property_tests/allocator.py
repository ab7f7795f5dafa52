"""An engine's block allocator: blocks are shared by reference count, cached while unused, and then reused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable

NULL = 0
"""The id of the null block, which no pool hands out."""


class OutOfBlocksError(Exception):
    """Every block of a pool is in use."""


class Allocator:
    """The block ids of one pool.

    A block is free, in use by one or more users, or cached: unused, but found by a key until the pool needs it. Free
    blocks are handed out in random order.
    """

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.free = list(range(1, num_blocks))
        self.users = Counter[int]()
        self.blocks: dict[Hashable, int] = {}
        self.keys: dict[int, Hashable] = {}
        self.random = random.Random(seed)

    def take(self) -> int:
        """A block for one user: a free one, or else a cached one. Raises OutOfBlocksError."""
        if not self.free and not self.evict(self.random.randrange(64)):
            raise OutOfBlocksError
        block = self.free.pop(self.random.randrange(len(self.free)))
        self.users[block] = 1
        return block

    def share(self, block: int) -> int:
        """Add a user to a block that is in use or cached."""
        assert block in self.keys or self.users[block]
        self.users[block] += 1
        return block

    def drop(self, block: int) -> None:
        """Remove a user. A block without users is free or, if it has a key, cached."""
        assert self.users[block]
        self.users[block] -= 1
        if not self.users[block] and block not in self.keys:
            self.free.append(block)

    def cache(self, key: Hashable, block: int) -> None:
        """Make a block in use available under a key, unless another block is."""
        if key not in self.blocks and block not in self.keys:
            self.blocks[key], self.keys[block] = block, key

    def evict(self, which: int) -> bool:
        """Free one of the unused cached blocks, if there is one."""
        idle = [block for block in self.keys if not self.users[block]]
        if idle:
            block = idle[which % len(idle)]
            del self.blocks[self.keys.pop(block)]
            self.free.append(block)
        return bool(idle)
