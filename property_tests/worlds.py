"""Small worlds: two engines that store the same one or two tensors, each in its own layout, and their workers.

>>> side = Side(tp=2, tokens=(3,), order="htbd", spread=(3, 2))
>>> print(*workers("prefill", 4096, (4,), side, 25), sep="; ")  # doctest: +ELLIPSIS
prefill/0: 2 views of 1 tensor in 2 regions, 1 group; ... prefill/5: 2 views of 1 tensor in 2 regions, 1 group
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Final

import attrs

from kvplan import Axis, Context, Group, Region, View, Worker

Heads = tuple[int, ...]
"""The number of heads of each tensor."""

APART, BEHIND, WITHIN = "apart", "behind", "within"
DIM: Final = 2
SPARE_BLOCKS: Final = 2


@attrs.frozen(repr=False)
class Side:
    """How one engine stores the tensors.

    ``tp`` ranks share the heads, and contexts of size and interleave ``spread`` share the positions. ``tokens`` has the
    tokens per block of one group for all tensors, or of a group for each. ``order`` has the axes by falling stride:
    b block, h head, t token, k K and V, d dim. Without k, K and V are views in regions of their own.

    Tensors are ``apart`` in regions of their own; or one pool is ``behind`` the other in one region; or they are
    ``within`` the same blocks, one after the other in each block or, with a group for each, in different blocks of one
    pool. ``first`` is the first tensor.
    """

    tp: int
    tokens: tuple[int, ...]
    order: str
    spread: tuple[int, int] = (1, 1)
    packing: str = APART
    first: int = 0

    def part(self, heads: int, rank: int) -> tuple[int, int]:
        """The heads of a rank, ``[start, stop)``."""
        return rank * heads // self.tp, -(-(rank + 1) * heads // self.tp)

    def group_of(self, tensor: int) -> int:
        """The index in ``tokens`` of a tensor's group."""
        return tensor % len(self.tokens)

    def possible(self, heads: Heads) -> bool:
        """Whether the tensors can be stored so, and only so with this packing."""
        if len(heads) == 1 and (self.packing, self.first, len(self.tokens)) != (APART, 0, 1):
            return False
        if self.packing != APART and "k" not in self.order:
            return False
        return self.packing != WITHIN or self.order[0] == "b"

    def settled(self, heads: Heads) -> Side:
        """The representative of all sides that differ only in the places of axes with one coordinate."""
        several = frozenset(
            (stop - start > 1, self.tokens[self.group_of(tensor)] > 1)
            for tensor, count in enumerate(heads)
            for start, stop in (self.part(count, rank) for rank in range(self.tp))
        )
        return attrs.evolve(self, order=_settled(self.order, several))

    def __repr__(self) -> str:
        fields = [(field.name, getattr(self, field.name), field.default) for field in attrs.fields(Side)]
        return f"Side({', '.join(f'{name}={value!r}' for name, value, default in fields if value != default)})"


@cache
def _settled(order: str, several: frozenset[tuple[bool, bool]]) -> str:
    """The first order that equals this one where heads, or tokens, are several."""

    def seen(letters: Sequence[str]) -> list[str]:
        return [
            "".join(a for a in letters if (a != "h" or heads) and (a != "t" or tokens)) for heads, tokens in several
        ]

    orders = itertools.permutations(sorted(order))
    return "".join(next(letters for letters in orders if seen(letters) == seen(order)))


@attrs.frozen
class World:
    """Two engines that store the same tensors, and the number of positions of a request."""

    heads: Heads
    destination: Side
    source: Side
    positions: int


@attrs.frozen
class Request:
    """Positions ``[start, stop)``, moved by descriptor ids or by coalesced ranges."""

    start: int
    stop: int
    by_ids: bool


def needed_blocks(side: Side, positions: int) -> list[int]:
    """The blocks of each group on the rank that holds most of a request."""
    size, run = side.spread
    most = sum(position // run % size == 0 for position in range(positions))
    return [-(-most // tokens) for tokens in side.tokens]


def pools(side: Side, positions: int) -> list[int]:
    """The number of blocks of each group. Groups in the same memory share all of them."""
    needed = needed_blocks(side, positions)
    if side.packing == WITHIN:
        needed = [sum(needed)] * len(needed)
    return [count + SPARE_BLOCKS for count in needed]


def workers(engine_id: str, address: int, heads: Heads, side: Side, positions: int) -> tuple[Worker, ...]:
    """The workers of an engine, all with memory from ``address`` on, each on the device with its rank."""
    size, run = side.spread
    made = []
    for rank, (context, shard) in enumerate(itertools.product(range(size), range(side.tp))):
        groups = [Group(f"g{i}", tokens, Context(context, size, run)) for i, tokens in enumerate(side.tokens)]
        views = _views(heads, side, shard, pools(side, positions))
        used: dict[str, int] = {}
        for view in views:
            used[view.region] = max(view.end_bytes, used.get(view.region, 0))
        starts = itertools.accumulate(used.values(), initial=address)
        regions = [Region(name, at, end, device_id=rank) for at, (name, end) in zip(starts, used.items(), strict=False)]
        made.append(Worker(engine_id, rank, regions, groups, views))
    return tuple(made)


def _views(heads: Heads, side: Side, shard: int, pool: Sequence[int]) -> list[View]:
    """The views of a tensor-parallel rank."""
    views: list[View] = []
    offset = 0
    listed = [(side.first + i) % len(heads) for i in range(len(heads))]
    for tensor, (low, high) in itertools.product(listed, [(0, 2)] if "k" in side.order else [(0, 1), (1, 2)]):
        group, (start, stop) = side.group_of(tensor), side.part(heads[tensor], shard)
        tokens = side.tokens[group]
        extent = {"b": pool[group], "h": stop - start, "t": tokens, "k": high - low, "d": DIM}
        if side.packing == WITHIN:
            extent["b"] = 1
        stride, end = {"k": 0}, 1
        for letter in reversed(side.order):
            stride[letter] = end
            end *= extent[letter]
        axes = [
            Axis("head", start, stop, heads[tensor], stride["h"]),
            Axis("token", 0, tokens, tokens, stride["t"]),
            Axis("kv", low, high, 2, stride["k"]),
            Axis("dim", 0, DIM, DIM, stride["d"]),
        ]
        region = "pool" if side.packing != APART else f"t{tensor}.{low}"
        views.append(View(f"t{tensor}", f"g{group}", region, "uint8", axes, pool[group], stride["b"], offset))
        if side.packing == BEHIND or (side.packing == WITHIN and len(side.tokens) == 1):
            offset += end
    if side.packing != WITHIN:
        return views
    step = max(view.offset_bytes + view.block_bytes for view in views)
    return [attrs.evolve(view, block_stride_bytes=step) for view in views]
