"""Cases: two engines of one model, and one decode worker's request between them, for kvplan and for its peers alike.

The model has 80 layers of 8 KV heads of 128 bfloat16 values, the layout of Llama 3.1 70B. Engines stand at addresses
where no memory is, as planning reads none: peers are told of arrays at the addresses that kvplan's Workers have.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import numpy as np

from kvplan import Model, TransferPlan, Worker, contacts, plan_reads
from tests.second_opinion.engines import Cache, Engine, Ints, Rank, Side

MODEL: Final = Model.shipped("llama-3.1-70b")
LAYERS: Final = 80
HEADS: Final = 8
HEAD_BYTES: Final = 256
"""Of K or of V, in one slot."""

POOLS: Final = {"prefill": 8192, "decode": 6144}
"""Blocks of each engine's pools."""

RANK: Final = 1
"""The decode worker whose request it is."""


@attrs.frozen
class Case:
    """Two engines, and whose planners are made for caches like these.

    An order names the dimensions of a cache from the slowest to the fastest: L layer, B block, K before V, H head, N
    slot, D dim. ``strands`` is how many runs of bytes a position has between two workers that move any. Blocks of a
    request stand in the pools in runs of ``run``, which are in no order.
    """

    name: str
    source: Side
    destination: Side
    strands: int
    peers: str
    run: int = 1


def _case(name: str, orders: str, tp: tuple[int, int], strands: int, tokens: int = 16, run: int = 1) -> Case:
    source, _, destination = orders.partition(" ")
    ends = Side(source, HEADS, tp[0], 16), Side(destination or source, HEADS, tp[1], tokens)
    return Case(name, *ends, strands, "SGLang" if source.startswith("K") else "vLLM", run)


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
"""K and V stand side by side in each slot where the peers are vLLM's, and in arrays of their own where SGLang's."""


@attrs.frozen(eq=False)
class Request:
    """The block ids of a request on both sides, as lists."""

    source: list[int]
    destination: list[int]
    stop: int

    @classmethod
    def of(cls, case: Case, blocks: int) -> Request:
        """A request of ``blocks`` whole blocks of the source."""
        rng = np.random.default_rng([7, blocks])
        stop = blocks * case.source.tokens
        counts = (blocks, stop // case.destination.tokens)
        source, destination = (
            np.add.outer(rng.permutation(pool // case.run) * case.run, np.arange(case.run)).reshape(-1)[:count].tolist()
            for pool, count in zip(POOLS.values(), counts, strict=True)
        )
        return cls(source, destination, stop)


@attrs.frozen(eq=False)
class World:
    """A case with its engines; ``plan`` is the decode worker's, with the prefill workers that it asks."""

    case: Case
    source: Engine
    destination: Engine
    plan: TransferPlan

    @classmethod
    def of(cls, case: Case) -> World:
        """Engines of a case, where nothing is in memory."""
        source, destination = engine("prefill", case.source), engine("decode", case.destination)
        decode = [rank.worker for rank in destination.ranks]
        prefill = {rank.worker.key: rank.worker for rank in source.ranks}
        asked = contacts(decode, list(prefill.values()))[decode[RANK].key]
        return cls(case, source, destination, plan_reads(decode[RANK], [prefill[key] for key in asked]))


class _Place:
    """What numpy takes for an array of bytes at an address."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": "|u1", "version": 3}


def engine(name: str, side: Side) -> Engine:
    """An engine of the model; its arrays can be described, and not read."""
    layout = side.order.removeprefix("K").replace("KD", "C").replace("HD", "HC")
    apart: dict[str, Any] = {"kv": "split"} if side.order.startswith("K") else {}
    workers = MODEL.engine(
        name, tp=side.tp, layout=layout, tokens_per_block=side.tokens, num_blocks=POOLS[name], **apart
    )
    none = np.zeros(0, np.int64)
    return Engine(side, tuple(Rank(worker, _caches(worker, side, POOLS[name])) for worker in workers), none, 0)


def _caches(worker: Worker, side: Side, num_blocks: int) -> tuple[Cache, ...]:
    first, stop = side.held(worker.rank)
    sizes = {"L": LAYERS, "B": num_blocks, "K": 2, "H": stop - first, "N": side.tokens, "D": HEAD_BYTES}
    letters = side.order[side.order.index("B") :]
    regions, nothing = worker.regions, np.zeros(0, np.int64)
    if side.order.startswith("K"):
        regions = tuple(sorted(regions, key=lambda region: region.name.endswith(".v")))  # all K, then all V
    shape = tuple(sizes[letter] for letter in letters)
    return tuple(Cache(letters, np.asarray(_Place(region.address, shape)), nothing) for region in regions)


def moves(parts: Any) -> tuple[Ints, Ints, Ints]:
    """Addresses read, addresses written and lengths, in order of those written; what goes on at both ends is one.

    The same for all descriptors that say the same copies.

    >>> moves([([0, 4], [100, 104], [4, 4]), ([50], [10], [2])])
    (array([50,  0]), array([ 10, 100]), array([2, 8]))
    """
    columns = zip(*parts, strict=True)
    reads, writes, lengths = (np.concatenate([np.asarray(part, np.int64) for part in column]) for column in columns)
    order = np.argsort(writes)
    reads, writes, lengths = reads[order], writes[order], lengths[order]
    apart = (writes[:-1] + lengths[:-1] != writes[1:]) | (reads[:-1] + lengths[:-1] != reads[1:])
    first = np.flatnonzero(np.concatenate([[True], apart]))
    return reads[first], writes[first], np.add.reduceat(lengths, first)
