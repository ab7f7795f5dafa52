"""A peer as the driver sees it: pairs of engines, and what the peer copies for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from kvplan import plan_reads
from kvplan.testing.conformance import Case, Engine
from tests.second_opinion.copies import Copies


@attrs.frozen
class Peer:
    """An outside planner: its name, its pairs, and how it copies one. ``plan`` raises ``RefusedError``."""

    name: str
    function: str
    pairs: Callable[[], Iterator[Case]]
    plan: Callable[[Case, Engine, Engine], Copies]


def ours(pair: Case, source: Engine, destination: Engine) -> Copies:
    """What kvplan copies: each destination worker reads from all source workers."""
    parts = []
    local, remote = {"attn": destination.table}, {"attn": source.table}
    for rank in destination.ranks:
        plan = plan_reads(rank.worker, [other.worker for other in source.ranks])
        for spec in plan.bind(local=local, remote=remote, tokens=(pair.start, pair.stop)):
            writes, reads = spec.descriptors()
            parts.append((reads[:, 0], writes[:, 0], writes[:, 1]))
    return Copies.of(parts)
