"""A peer as the driver sees it: pairs of engines, and what the peer copies for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import attrs

from kvplan import plan_reads
from kvplan.testing.conformance import EngineMemory, PairCase
from tests.second_opinion.copies import Copies


class NotRunError(Exception):
    """A case has something that is no part of a planner's plans."""


@attrs.frozen
class Peer:
    """An outside planner: its name, its pairs, and how it copies one. ``plan`` raises ``RefusedError``.

    ``order`` is that of its engine's caches, ``package`` the one of its version.
    """

    name: str
    function: str
    pairs: Callable[[], Iterator[PairCase]]
    plan: Callable[[PairCase, EngineMemory, EngineMemory], Copies]
    order: str = "LBHNKD"
    package: str = "vllm"


def ours(pair: PairCase, source: EngineMemory, destination: EngineMemory) -> Copies:
    """What kvplan copies: each destination worker reads from all source workers."""
    parts = []
    local, remote = {"attn": destination.table}, {"attn": source.table}
    for rank in destination.ranks:
        plan = plan_reads(rank.worker, [other.worker for other in source.ranks])
        for spec in plan.bind(local=local, remote=remote, tokens=(pair.start, pair.stop)):
            writes, reads = spec.descriptors()
            parts.append((reads[:, 0], writes[:, 0], writes[:, 1]))
    return Copies.of(parts)


KVPLAN: Final = Peer("kvplan", "plan_reads", lambda: iter(()), ours, package="kvplan")
