"""Engines in real memory: arrays that a peer and kvplan both read, and what each byte of them means.

An order names the dimensions of an engine's cache from the slowest to the fastest: L layer, B block, K before V, H
head, N token slot, D dim. Leading K and L make arrays of their own. A byte is an element. What it means is a number,
of its layer, kv, head, position and dim: the same number wherever another engine keeps the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan import Context, Group, Region, View, Worker, view_of

NAMES: Final = {"B": "block", "K": "kv", "H": "head", "N": "token", "D": "dim"}
LAYERS: Final = 2
DIM: Final = 4
NONE: Final = -1
"""The meaning of a byte that belongs to no request."""

Ints = npt.NDArray[np.int64]


@attrs.frozen
class Side:
    """One engine of a pair. Positions spread over ``dcp`` neighbours of ``tp`` ranks, and over ``pcp`` such grids."""

    order: str
    heads: int = 1
    tp: int = 1
    tokens: int = 4
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1

    def __str__(self) -> str:
        """The order, and all sizes that are not 1."""
        sizes = attrs.asdict(self, filter=lambda field, value: value not in (self.order, 1))
        return " ".join([self.order, *(f"{name}={value}" for name, value in sizes.items())])

    @property
    def contexts(self) -> int:
        """Over how many workers positions spread."""
        return self.dcp * self.pcp

    @property
    def has_heads(self) -> bool:
        """Whether there are heads, and no latents that each rank has whole."""
        return "H" in self.order

    @property
    def possible(self) -> bool:
        """Whether engines of the peers start so: all ranks have as many heads, all heads as many ranks."""
        shared = self.heads % self.tp == 0 or self.tp % self.heads == 0
        copies = max(1, self.tp // self.heads) if self.has_heads else self.tp
        return (shared or not self.has_heads) and copies % self.dcp == 0

    @property
    def ranks(self) -> range:
        """The workers, by number: the ``tp`` ranks of one grid, then those of the next."""
        return range(self.tp * self.pcp)

    def held(self, rank: int) -> tuple[int, int]:
        """The heads of a worker: the first, and the one behind the last."""
        if not self.has_heads:
            return 0, 1
        rank %= self.tp
        if self.tp > self.heads:
            return rank // (self.tp // self.heads), rank // (self.tp // self.heads) + 1
        share = self.heads // self.tp
        return rank * share, (rank + 1) * share

    def turn(self, rank: int) -> int:
        """Which of the workers that positions spread over a worker is."""
        return rank // self.tp * self.dcp + rank % self.tp % self.dcp

    def position(self, rank: int, index: Ints) -> Ints:
        """The position that a worker keeps at an index of its own: runs of ``interleave`` go to the turns in turn."""
        run, within = np.divmod(index, self.interleave)
        return (run * self.contexts + self.turn(rank)) * self.interleave + within


@attrs.frozen(eq=False)
class Cache:
    """One array of a worker: the letters of its dimensions, and what its bytes mean."""

    letters: str
    memory: Any
    meaning: Ints

    @property
    def address(self) -> int:
        """Where the array starts."""
        return int(self.memory.__array_interface__["data"][0])

    def layer(self, number: int) -> Any:
        """A view of what one layer is in memory, without the dimension of layers."""
        at = self.letters.find("L")
        return self.memory if at < 0 else self.memory[(slice(None),) * at + (number,)]


@attrs.frozen(eq=False)
class Rank:
    """One worker: for kvplan, and as arrays by layer, by kv and layer where they lie apart."""

    worker: Worker
    caches: tuple[Cache, ...]


@attrs.frozen(eq=False)
class Engine:
    """All workers of one side. ``ids`` are the blocks of its one request, whose first block is ordinal ``first``."""

    side: Side
    ranks: tuple[Rank, ...]
    ids: Ints
    first: int


def make(name: str, side: Side, ids: Ints, num_blocks: int, span: tuple[int, int], first: int = 0) -> Engine:
    """An engine that keeps positions ``[start, stop)`` of a request in blocks ``ids`` of its pools."""
    ranks = tuple(Rank(*_rank(name, side, rank, ids, num_blocks, span, first)) for rank in side.ranks)
    return Engine(side, ranks, ids, first)


def _rank(
    name: str, side: Side, rank: int, ids: Ints, num_blocks: int, span: tuple[int, int], first: int
) -> tuple[Worker, tuple[Cache, ...]]:
    start, stop = side.held(rank)
    has_kv = "K" in side.order
    sizes = {"L": LAYERS, "B": num_blocks, "K": 2, "H": stop - start, "N": side.tokens, "D": DIM}
    outer = "".join(itertools.takewhile("KL".__contains__, side.order))
    inner = side.order[len(outer) :]
    caches, regions, views = [], [], list[View]()
    for place in itertools.product(*(range(sizes[letter]) for letter in outer)):
        at = dict(zip(outer, place, strict=True))
        memory = np.zeros([sizes[letter] for letter in inner], np.uint8)
        index = dict(zip(inner, np.ogrid[tuple(slice(sizes[letter]) for letter in inner)], strict=True))
        caches.append(Cache(inner, memory, _meaning({**at, **index}, side, rank, ids, num_blocks, span, first)))
        label = "".join(f"{letter}{number}" for letter, number in at.items()) or "pool"
        regions.append(Region(label, caches[-1].address, memory.nbytes))
        for layer in [at["L"]] if "L" in at else range(LAYERS):
            views.append(_view(caches[-1], layer, at.get("K"), regions[-1], (start, stop, side.heads), has_kv))
    context = Context(side.turn(rank), side.contexts, side.interleave)
    group = Group("attn", side.tokens, context)
    return Worker(name, rank, regions, (group,), views), tuple(caches)


def _view(cache: Cache, layer: int, half: int | None, region: Region, heads: Any, has_kv: bool) -> View:
    array = cache.layer(layer)
    letters = cache.letters.replace("L", "")
    parts = {"head": heads} if "H" in letters else {}
    if has_kv and half is not None:
        array, letters = array[None], "K" + letters
        parts["kv"] = (half, half + 1, 2)
    pattern = " ".join(NAMES[letter] for letter in letters)
    return view_of(array, pattern, name=f"layers.{layer}.attn", group="attn", region=region, parts=parts)


def _meaning(
    at: dict[str, Any], side: Side, rank: int, ids: Ints, num_blocks: int, span: tuple[int, int], first: int
) -> Ints:
    """What each byte of an array means, from the index of each dimension; none of a position outside the span."""
    ordinal = np.full(num_blocks, NONE, np.int64)
    ordinal[ids] = np.arange(first, first + len(ids))
    ordinal = ordinal[at["B"]]
    position = side.position(rank, ordinal * side.tokens + at["N"])
    head = at.get("H", 0) + side.held(rank)[0]
    number = (at["L"] * 2 + at.get("K", 0)) * side.heads + head
    number = (number * (1 << 20) + position) * DIM + at["D"]
    kept = (ordinal != NONE) & (span[0] <= position) & (position < span[1])
    return np.asarray(np.where(kept, number, NONE), np.int64)


class Meanings:
    """What bytes mean, by address, of some engines."""

    def __init__(self, *engines: Engine) -> None:
        caches = sorted((cache for one in engines for rank in one.ranks for cache in rank.caches), key=_address)
        self.starts = np.array([cache.address for cache in caches])
        self.sizes = np.array([cache.memory.nbytes for cache in caches])
        self.firsts = np.cumsum(self.sizes) - self.sizes
        self.all = np.concatenate([cache.meaning.ravel() for cache in caches])

    def of(self, addresses: Ints) -> Ints:
        """The meaning of each address: ``NONE`` where it is of no request, or in no array."""
        at = np.maximum(np.searchsorted(self.starts, addresses, side="right") - 1, 0)
        offset = addresses - self.starts[at]
        inside = (offset >= 0) & (offset < self.sizes[at])
        return np.where(inside, self.all[np.where(inside, self.firsts[at] + offset, 0)], NONE)

    def needed(self) -> Ints:
        """The addresses, ascending, of all bytes of the request."""
        found = np.flatnonzero(self.all != NONE)
        at = np.searchsorted(self.firsts, found, side="right") - 1
        return np.asarray(self.starts[at] + found - self.firsts[at], np.int64)


def _address(cache: Cache) -> int:
    return cache.address


def sides(**choices: Any) -> Iterator[Side]:
    """All possible sides of the product of the choices, each a sequence by the name of a field."""
    for values in itertools.product(*choices.values()):
        side = Side(**dict(zip(choices, values, strict=True)))
        if side.possible:
            yield side
