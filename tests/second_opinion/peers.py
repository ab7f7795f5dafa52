"""A peer as the driver sees it: pairs of engines, and what the peer copies for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import attrs
import numpy as np

from benchmarks.peers.engines import Engine, Side, make
from kvplan import Blocks, plan_reads
from tests.second_opinion.copies import Copies

BLOCKS: Final = {"source": 27, "destination": 32}
"""Blocks of the pools of each side."""


@attrs.frozen
class Pair:
    """Two engines and a request: its positions ``[start, stop)``, whole blocks of both sides."""

    source: Side
    destination: Side
    stop: int
    start: int = 0

    def __str__(self) -> str:
        return f"{self.source} -> {self.destination}, positions [{self.start}, {self.stop})"

    def engines(self) -> tuple[Engine, Engine]:
        """The two engines, with the request in scattered blocks."""
        source = _engine("source", self.source, 0, self.stop)
        return source, _engine("destination", self.destination, self.start, self.stop)


def _engine(name: str, side: Side, start: int, stop: int) -> Engine:
    span = side.tokens * side.contexts
    first, last = start // span, -(-stop // span)
    assert last <= BLOCKS[name], f"{last} blocks of a pool of {BLOCKS[name]}"
    ids = np.random.default_rng([len(name), stop]).permutation(BLOCKS[name])[: last - first]
    return make(name, side, Blocks(ids, first), BLOCKS[name])


@attrs.frozen
class Peer:
    """An outside planner: its name, its pairs, and how it copies one. ``plan`` raises ``RefusedError``."""

    name: str
    function: str
    pairs: Callable[[], Iterator[Pair]]
    plan: Callable[[Pair, Engine, Engine], Copies]


def ours(pair: Pair, source: Engine, destination: Engine) -> Copies:
    """What kvplan copies: each destination worker reads from all source workers."""
    parts = []
    local, remote = {"attn": destination.table}, {"attn": source.table}
    for rank in destination.ranks:
        plan = plan_reads(rank.worker, [other.worker for other in source.ranks])
        for spec in plan.bind(local=local, remote=remote, tokens=(pair.start, pair.stop)):
            writes, reads = spec.descriptors()
            parts.append((reads[:, 0], writes[:, 0], writes[:, 1]))
    return Copies.of(parts)
