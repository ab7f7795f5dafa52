"""Block ids as an engine gives them out: shared by reference count, cached while nobody uses them, then reused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable

NULL = 0
"""The id that stands for no block; no pool gives it out."""


class OutOfBlocksError(Exception):
    """A pool in which every block is in use."""


class Allocator:
    """The block ids of one pool.

    A block is free, in use by one or more, or cached: in use by nobody, but found by a key until someone needs the
    room. Free blocks are given out in no order.
    """

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.free = list(range(1, num_blocks))
        self.users = Counter[int]()
        self.blocks: dict[Hashable, int] = {}
        self.keys: dict[int, Hashable] = {}
        self.random = random.Random(seed)

    def take(self) -> int:
        """A block that nobody else uses: a free one, or else a cached one. Raises OutOfBlocksError."""
        if not self.free and not self.evict(self.random.randrange(64)):
            raise OutOfBlocksError
        block = self.free.pop(self.random.randrange(len(self.free)))
        self.users[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more user of a block in use, or of a cached one."""
        assert block in self.keys or self.users[block]
        self.users[block] += 1
        return block

    def drop(self, block: int) -> None:
        """One user less; without any, a block is free or, if it has a key, cached."""
        assert self.users[block]
        self.users[block] -= 1
        if not self.users[block] and block not in self.keys:
            self.free.append(block)

    def cache(self, key: Hashable, block: int) -> None:
        """Let a block in use be found by a key, unless another one is."""
        if key not in self.blocks and block not in self.keys:
            self.blocks[key], self.keys[block] = block, key

    def evict(self, which: int) -> bool:
        """Free one of the cached blocks that nobody uses, if there is one."""
        idle = [block for block in self.keys if not self.users[block]]
        if idle:
            block = idle[which % len(idle)]
            del self.blocks[self.keys.pop(block)]
            self.free.append(block)
        return bool(idle)
