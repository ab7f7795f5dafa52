"""Cases: two engines of one model, and one decode worker's request between them, for kvplan and for its peers.

The model has 80 layers of 8 KV heads of 128 bfloat16 values, as Llama 3.1 70B has. Engines have addresses without
memory, because planners read none. Peers see arrays at the addresses of kvplan's Workers.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import numpy as np

from kvplan import Blocks, Model, TransferPlan, Worker, contacts, plan_reads
from kvplan._arrays import Ints
from kvplan.testing.conformance import CacheArray, EngineMemory, Rank, Side

MODEL: Final = Model.shipped("llama-3.1-70b")
LAYERS: Final = 80
HEADS: Final = 8
HEAD_BYTES: Final = 256
"""Bytes of K or of V of one head in one slot."""

POOLS: Final = {"prefill": 8192, "decode": 6144}
"""Blocks of each engine's pools."""

RANK: Final = 1
"""The decode worker that reads the request."""


@attrs.frozen
class Case:
    """Two engines, and the ``peers`` whose planners take such caches.

    An order names the dimensions of a cache from the slowest to the fastest: L layer, B block, K before V, H head, N
    slot, D dim. ``runs`` is how many runs of bytes one position has between two workers. The blocks of a request are
    consecutive in the pools for ``run`` blocks each, in random order.
    """

    name: str
    source: Side
    destination: Side
    runs: int
    peers: str
    run: int = 1


def _case(name: str, orders: str, tp: tuple[int, int], runs: int, tokens: int = 16, run: int = 1) -> Case:
    source, _, destination = orders.partition(" ")
    ends = Side(source, HEADS, tp[0], 16), Side(destination or source, HEADS, tp[1], tokens)
    return Case(name, *ends, runs, "SGLang" if source.startswith("K") else "vLLM", run)


CASES: Final = (
    _case("TP 8 to 8", "LBNHKD", (8, 8), 80),
    _case("TP 8 to 8, runs of 8 blocks", "LBNHKD", (8, 8), 80, run=8),
    _case("TP 8 to 4", "LBHNKD", (8, 4), 80),
    _case("TP 4 to 8", "LBHNKD", (4, 8), 80),
    _case("blocks of 16 to 64", "LBNHKD", (8, 8), 80, tokens=64),
    _case("layers together, BLHNC", "BLHNKD", (8, 8), 1),
    _case("LBNHC to BLHNC", "LBNHKD BLHNKD", (8, 8), 80),
    _case("TP 8 to 8, K and V apart", "KLBNHD", (8, 8), 160),
    _case("TP 8 to 8, K and V apart, runs of 8 blocks", "KLBNHD", (8, 8), 160, run=8),
    _case("TP 8 to 4, K and V apart", "KLBNHD", (8, 4), 160),
    _case("TP 4 to 8, K and V apart", "KLBNHD", (4, 8), 160),
)
"""vLLM's cases have K and V side by side in each slot, SGLang's in arrays of their own."""


@attrs.frozen(eq=False)
class Request:
    """The block ids of a request on both sides, as lists."""

    source: list[int]
    destination: list[int]
    stop: int

    @classmethod
    def of(cls, case: Case, blocks: int) -> Request:
        """Return a request of ``blocks`` whole blocks of the source."""
        rng = np.random.default_rng([7, blocks])
        stop = blocks * case.source.tokens

        def block_ids(pool: str, count: int) -> list[int]:
            # one row for each run of blocks, in random order
            first_blocks = rng.permutation(POOLS[pool] // case.run) * case.run
            ids: list[int] = np.add.outer(first_blocks, np.arange(case.run)).reshape(-1)[:count].tolist()
            return ids

        source = block_ids("prefill", blocks)
        return cls(source, block_ids("decode", stop // case.destination.tokens), stop)


@attrs.frozen(eq=False)
class World:
    """A case with its engines. ``plan`` is the decode worker's plan with the prefill workers that it reads from."""

    case: Case
    source: EngineMemory
    destination: EngineMemory
    plan: TransferPlan

    @classmethod
    def of(cls, case: Case) -> World:
        """Return the engines of a case, without memory."""
        source = engine("prefill", case.source)
        destination = engine("decode", case.destination)
        decode = [rank.worker for rank in destination.ranks]
        prefill = {rank.worker.key: rank.worker for rank in source.ranks}
        asked = contacts(decode, list(prefill.values()))[decode[RANK].key]
        return cls(case, source, destination, plan_reads(decode[RANK], [prefill[key] for key in asked]))


class _Place:
    """An object that numpy wraps as an array of bytes at an address."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": "|u1", "version": 3}


def engine(name: str, side: Side) -> EngineMemory:
    """An engine of the model. Its arrays can be described, but not read."""
    layout = side.order.removeprefix("K").replace("KD", "C").replace("HD", "HC")
    apart: dict[str, Any] = {"kv": "split"} if side.order.startswith("K") else {}
    workers = MODEL.engine(
        name, tp=side.tp, layout=layout, tokens_per_block=side.tokens, num_blocks=POOLS[name], **apart
    )
    ranks = tuple(Rank(worker, _caches(worker, side, POOLS[name])) for worker in workers)
    return EngineMemory(side, ranks, Blocks([]), LAYERS, HEAD_BYTES)


def _caches(worker: Worker, side: Side, num_blocks: int) -> tuple[CacheArray, ...]:
    first, stop = side.held(worker.rank)
    sizes = {"L": LAYERS, "B": num_blocks, "K": 2, "H": stop - first, "N": side.tokens, "D": HEAD_BYTES}
    letters = side.order[side.order.index("B") :]
    regions = worker.regions
    if side.order.startswith("K"):
        regions = tuple(sorted(regions, key=lambda region: region.name.endswith(".v")))  # all K, then all V
    shape = tuple(sizes[letter] for letter in letters)
    return tuple(CacheArray(letters, np.asarray(_Place(region.address, shape))) for region in regions)


def moves(parts: Any) -> tuple[Ints, Ints, Ints]:
    """Addresses read, addresses written and lengths, in order of those written, with contiguous copies joined.

    Equal for all descriptors of the same copies.

    >>> moves([([0, 4], [100, 104], [4, 4]), ([50], [10], [2])])
    (array([50,  0]), array([ 10, 100]), array([2, 8]))
    """
    columns = zip(*parts, strict=True)
    # one column for each copy: the address read, the address written and the length
    copies = np.array([np.concatenate([np.asarray(part, np.int64) for part in column]) for column in columns])
    reads, writes, lengths = copies[:, np.argsort(copies[1])]
    # each copy but the first starts a new one, unless it continues the copy before on both sides
    is_apart = (writes[:-1] + lengths[:-1] != writes[1:]) | (reads[:-1] + lengths[:-1] != reads[1:])
    first = np.flatnonzero(np.concatenate([[True], is_apart]))
    return reads[first], writes[first], np.add.reduceat(lengths, first)
