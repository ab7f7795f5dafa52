"""Engines as arrays that a peer and kvplan both describe.

An order names the dimensions of an engine's cache from the slowest to the fastest: L layer, B block, K before V, H
head, N token slot, D dim. Leading K and L make arrays of their own. An element is a byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan import Blocks, Context, Group, Region, View, Worker, view_of

NAMES: Final = {"B": "block", "K": "kv", "H": "head", "N": "token", "D": "dim"}
LAYERS: Final = 2
DIM: Final = 4
Ints = npt.NDArray[np.int64]


@attrs.frozen
class Side:
    """One engine of a pair. ``dcp`` of the ``tp`` ranks share the positions, and so do ``pcp`` such groups of ranks."""

    order: str
    heads: int = 1
    tp: int = 1
    tokens: int = 4
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1

    def __str__(self) -> str:
        """The order, and all sizes except 1."""
        sizes = attrs.asdict(self, filter=lambda field, value: value not in (self.order, 1))
        return " ".join([self.order, *(f"{name}={value}" for name, value in sizes.items())])

    @property
    def contexts(self) -> int:
        """How many workers share the positions."""
        return self.dcp * self.pcp

    @property
    def has_heads(self) -> bool:
        """Whether the cache has heads. A cache of latents is whole on each rank."""
        return "H" in self.order

    @property
    def possible(self) -> bool:
        """Whether the peers' engines start so: all ranks have as many heads, or all heads as many ranks."""
        shared = self.heads % self.tp == 0 or self.tp % self.heads == 0
        copies = max(1, self.tp // self.heads) if self.has_heads else self.tp
        return (shared or not self.has_heads) and copies % self.dcp == 0

    @property
    def ranks(self) -> range:
        """The workers by number: the ``tp`` ranks of the first pcp rank, then those of the next."""
        return range(self.tp * self.pcp)

    def held(self, rank: int) -> tuple[int, int]:
        """The heads of a worker, ``[start, stop)``."""
        if not self.has_heads:
            return 0, 1
        rank %= self.tp
        if self.tp > self.heads:
            return rank // (self.tp // self.heads), rank // (self.tp // self.heads) + 1
        share = self.heads // self.tp
        return rank * share, (rank + 1) * share

    def context(self, rank: int) -> int:
        """The context rank of a worker among those that share the positions."""
        return rank // self.tp * self.dcp + rank % self.tp % self.dcp


@attrs.frozen(eq=False)
class Cache:
    """One array of a worker, and the letters of its dimensions."""

    letters: str
    memory: Any

    @property
    def address(self) -> int:
        """Where the array starts."""
        return int(self.memory.__array_interface__["data"][0])

    def layer(self, number: int) -> Any:
        """The part of the array of one layer, without the dimension of layers."""
        at = self.letters.find("L")
        return self.memory if at < 0 else self.memory[(slice(None),) * at + (number,)]


@attrs.frozen(eq=False)
class Rank:
    """One worker for kvplan, and its arrays: one for each layer, or for each of K and V of each layer."""

    worker: Worker
    caches: tuple[Cache, ...]


@attrs.frozen(eq=False)
class Engine:
    """All workers of one side, whose model has ``layers`` layers and heads of ``dim`` bytes.

    ``table`` has the blocks of its one request.
    """

    side: Side
    ranks: tuple[Rank, ...]
    table: Blocks
    layers: int = LAYERS
    dim: int = DIM


def make(name: str, side: Side, table: Blocks, num_blocks: int) -> Engine:
    """An engine in real memory, with pools of ``num_blocks``."""
    return Engine(side, tuple(Rank(*_rank(name, side, rank, num_blocks)) for rank in side.ranks), table)


def _rank(name: str, side: Side, rank: int, num_blocks: int) -> tuple[Worker, tuple[Cache, ...]]:
    start, stop = side.held(rank)
    sizes = {"L": LAYERS, "B": num_blocks, "K": 2, "H": stop - start, "N": side.tokens, "D": DIM}
    outer = "".join(itertools.takewhile("KL".__contains__, side.order))
    inner = side.order[len(outer) :]
    caches, regions, views = [], [], list[View]()
    for place in itertools.product(*(range(sizes[letter]) for letter in outer)):
        at = dict(zip(outer, place, strict=True))
        cache = Cache(inner, np.zeros([sizes[letter] for letter in inner], np.uint8))
        label = "".join(f"{letter}{number}" for letter, number in at.items()) or "pool"
        region = Region(label, cache.address, cache.memory.nbytes)
        for layer in [at["L"]] if "L" in at else range(LAYERS):
            views.append(_view(cache, layer, at.get("K"), region, (start, stop, side.heads)))
        caches.append(cache)
        regions.append(region)
    group = Group("attn", side.tokens, Context(side.context(rank), side.contexts, side.interleave))
    return Worker(name, rank, regions, (group,), views), tuple(caches)


def _view(cache: Cache, layer: int, kv: int | None, region: Region, heads: tuple[int, int, int]) -> View:
    array = cache.layer(layer)
    letters = cache.letters.replace("L", "")
    parts = {"head": heads} if "H" in letters else {}
    if kv is not None:
        array, letters = array[None], "K" + letters
        parts["kv"] = (kv, kv + 1, 2)
    pattern = " ".join(NAMES[letter] for letter in letters)
    return view_of(array, pattern, name=f"layers.{layer}.attn", group="attn", region=region, parts=parts)


def sides(**choices: Any) -> Iterator[Side]:
    """All possible sides of the product of the choices, each a sequence by the name of a field."""
    for values in itertools.product(*choices.values()):
        side = Side(**dict(zip(choices, values, strict=True)))
        if side.possible:
            yield side
