"""Cache groups: which positions of a request an engine keeps in each, and which ones it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from kvplan._checks import instance
from kvplan._text import brief_repr
from kvplan.describe.blocks import Blocks, Range
from kvplan.errors import KVPlanError

__all__ = ["CacheGroup", "first_listed"]


@attrs.frozen
class CacheGroup:
    """A group of layers that share a block table.

    A block holds ``tokens_per_block`` positions, or None for a state, which is read as it is after
    the last token. Tokens from a position on attend to positions from ``first_attended`` of it on;
    without that, to all, and the engine keeps all.

    A state is the last block of its table, or a ring of ``ring_slots``, which has position ``p`` in
    slot ``p % ring_slots`` of all its blocks together. In the workers of a ring's group, slots are
    what tokens are in other groups.
    """

    tokens_per_block: int | None
    first_attended: Callable[[int], int] | None = None
    ring_slots: int | None = None

    __repr__ = brief_repr

    @classmethod
    def of_window(cls, tokens_per_block: int, window: int | None) -> CacheGroup:
        """Return a group with a sliding window of so many tokens, the attending token included.

        >>> CacheGroup.of_window(16, 40).attended(100)
        61
        """
        if window is None:
            return cls(tokens_per_block)
        return cls(tokens_per_block, lambda position: max(0, position - window + 1))

    @property
    def keeps_all(self) -> bool:
        """Whether a running request has all its positions in the group."""
        return self.tokens_per_block is not None and self.first_attended is None

    def slots_of(self, num_tokens: int) -> Range | None:
        """Return the slots of a ring that are in use after some tokens, None of other groups.

        >>> ring = CacheGroup(None, ring_slots=56)
        >>> ring.slots_of(40), ring.slots_of(99)
        ((0, 40), (0, 56))
        """
        return None if self.ring_slots is None else (0, min(num_tokens, self.ring_slots))

    def attended(self, position: int) -> int:
        """Return the first position to which the token at a position, or a later one, attends."""
        return 0 if self.first_attended is None else self.first_attended(position)


def cache_groups(values: Mapping[str, CacheGroup]) -> Mapping[str, CacheGroup]:
    """Return ``values``, which must be a mapping to cache groups."""
    groups: Mapping[str, CacheGroup] = instance(Mapping, values, "cache groups")
    for group in groups.values():
        instance(CacheGroup, group, "cache group")
    return groups


def whole_groups(groups: Mapping[str, CacheGroup]) -> list[str]:
    """Return the names of the groups that keep all positions, which can be read early."""
    return [name for name, group in groups.items() if group.keeps_all]


def first_listed(blocks: Blocks, tokens_per_block: int) -> int:
    """Return the position from which on a table has all blocks of a request.

    >>> first_listed(Blocks([7, 0, 3, 4], null=0), 16)
    32
    """
    gaps = (blocks.ordinals[1:] - blocks.ordinals[:-1] > 1).nonzero()[0]
    if not blocks.ids.size:
        first = blocks.listed[1]
    elif gaps.size:
        first = int(blocks.ordinals[gaps[-1] + 1])
    else:
        first = blocks.first
    return first * tokens_per_block


@attrs.frozen
class WholeBlocks:
    """The positions of a group that a request reads, and the position from which blocks are whole.

    A block that starts before ``first_whole`` was read in part, so no other request may find it in
    a prefix cache.
    """

    start: int
    stop: int
    first_whole: int

    __repr__ = brief_repr


def whole_blocks(
    tokens: Range, attended: int, tokens_per_block: int, listed: int, kept: int
) -> WholeBlocks:
    """Choose the positions of ``tokens`` that a group reads, so that each block it fills is whole.

    A prefix cache keeps blocks, not positions: of a block that was read from the middle it keeps
    bytes that were never written, for a later request whose window reaches further back. So a group
    reads from ``listed`` on, the first position of its first block, also if its window begins
    later, at ``attended``. If the source has only positions from ``kept`` on, and these are fewer,
    the group reads them, and says from which position on blocks are whole. Raises ``BLOCKS`` if the
    source lacks positions that are attended to.

    >>> whole_blocks((0, 100), attended=37, tokens_per_block=32, listed=32, kept=32)
    WholeBlocks(start=32, stop=100, first_whole=32)
    >>> whole_blocks((0, 100), attended=70, tokens_per_block=64, listed=64, kept=68)
    WholeBlocks(start=68, stop=100, first_whole=128)
    """
    first, stop = tokens
    first_wanted = max(first, listed)
    # Positions before a window need not be there, and those after ``stop`` are not read.
    first_needed = max(first, attended)
    if first_needed < min(kept, stop):
        raise KVPlanError(
            "BLOCKS",
            "read all positions that a window reaches",
            expected=f"positions from {first_needed} on",
            got=f"those from {kept} on",
            hint="the source has freed what it does not attend to any more",
            needed=first_needed,
            kept=kept,
        )
    start = min(max(first_wanted, kept), stop)
    # the next block, if the source lacks the beginning of this one
    size = tokens_per_block
    first_whole = start if start == first_wanted else -(-start // size) * size
    return WholeBlocks(start, stop, first_whole)
