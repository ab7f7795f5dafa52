"""Pipelines of either direction for tests, whose transfers and copies end when a test says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from kvplan import Blocks, FakeMemory, Worker
from kvplan.describe.worker import Key
from kvplan.executor import FakeNetwork, Transfer
from kvplan.staging.pipeline import Pipeline, StagedTransfer
from kvplan.staging.plan import StagedPlan
from tests.late import LateCopier, LateExecutor
from tests.small import engine
from tests.staged import NAME, cells, labelled, staged, staged_writes

OPERATIONS = ("READ", "WRITE")

ONE_BLOCK = 2 * 2 * 256
"""Both halves of one block of 4 tokens and 4 heads, of both layers: a staging region of chunks of 4 positions."""

PEERS = 2
"""Workers that each have half of what another one has: each chunk has a transfer with either."""

Places = set[tuple[Key, str, int]]
"""Blocks, by worker and region."""


def tables(number: int) -> dict[str, Any]:
    """Block tables of a request, in no order, which no other request has."""
    ours, theirs = ([5 * number + at for at in order] for order in ([3, 0, 4, 1, 2], [2, 4, 0, 1, 3]))
    return {"local": {"attn": Blocks(ours)}, "remote": {"attn": Blocks(theirs)}}


@attrs.define
class Rig:
    """A worker that reads from its peers, or writes to them, through a region of two halves of a block each."""

    plan: StagedPlan
    network: FakeNetwork
    executor: LateExecutor
    copier: LateCopier
    pipeline: Pipeline

    @classmethod
    def of(cls, network: FakeNetwork, plan: StagedPlan) -> Rig:
        """A pipeline with nothing in it; memory of sources is filled."""
        labelled(network.memory, sources(plan))
        local = plan.direct.local
        executor, copier = LateExecutor(network.executor(local)), LateCopier(network.memory, local.key)
        return cls(plan, network, executor, copier, Pipeline(executor, plan, copier))

    def submit(self, number: int, tokens: tuple[int, int] = (0, 4)) -> StagedTransfer:
        """A request of blocks of its own, in chunks of 4 positions."""
        return self.pipeline.submit(f"request {number}", **tables(number), tokens=tokens)

    @property
    def reads(self) -> bool:
        """Whether transfers fill halves, and copies empty them."""
        return self.plan.operation == "READ"

    @property
    def moving(self) -> list[Transfer]:
        """The transfers that run and move bytes."""
        return [transfer for transfer in self.executor.running if transfer.spec.local_ids.size]

    @property
    def telling(self) -> list[Transfer]:
        """The transfers that run and move no bytes."""
        return [transfer for transfer in self.executor.running if not transfer.spec.local_ids.size]

    @property
    def under_way(self) -> tuple[int, int]:
        """How many chunks fill their half now, and how many empty it, where each has a transfer with all peers."""
        filling, emptying = len(self.moving) // PEERS, len(self.copier.running)
        return (filling, emptying) if self.reads else (emptying, filling)

    def fill(self, which: int = 0) -> None:
        """End what fills the half of a chunk; ``which`` of those that are at it, in order."""
        self._end(self.reads, which)

    def empty(self, which: int = 0) -> None:
        """End what empties the half of a chunk."""
        self._end(not self.reads, which)

    def _end(self, moving: bool, which: int) -> None:
        if moving:
            for transfer in self.moving[PEERS * which : PEERS * (which + 1)]:
                self.executor.end(transfer)
        else:
            self.copier.end(self.copier.running[which])

    def go(self, steps: str) -> None:
        """The first half is filled, f, or emptied, e; then the pipeline is polled, and nothing is settled."""
        for step in steps:
            self.fill() if step == "f" else self.empty()
            assert self.pipeline.poll() == ()

    def until_transfers(self, chunks: int = 1) -> list[Transfer]:
        """Go on to where transfers of so many chunks run."""
        if not self.reads:
            self.go("f" * chunks)
        assert len(self.moving) == PEERS * chunks
        return self.moving

    def until_copies(self) -> None:
        """Go on to where copies run."""
        if self.reads:
            self.go("f")
        assert self.copier.running

    def finish(self) -> list[StagedTransfer]:
        """Let everything go on to its end."""
        settled: list[StagedTransfer] = []
        while self.executor.running or self.copier.running:
            for transfer in tuple(self.executor.running):
                self.executor.end(transfer)
            for ticket in tuple(self.copier.running):
                self.copier.end(ticket)
            settled += self.pipeline.poll()
        return settled

    def told(self) -> dict[int, list[str]]:
        """By rank of a peer, the requests that it has been told of since the last call."""
        return {
            peer.rank: [notice.request for notice in self.network.executor(peer).notices()]
            for peer in self.plan.direct.remotes
        }

    def wrong(self, requests: dict[int, tuple[int, int]]) -> Places:
        """What of destinations differs from what direct plans write of some requests."""
        return differing(self.network, [self.plan], requests)


def plans(blocks: int, operation: str = "READ") -> StagedPlan:
    """The plan of a worker that reads from two others, or writes to them, what each has half of."""
    if operation == "READ":
        (local,) = engine("decode", order="NH", blocks=blocks)
        return staged(local, engine("prefill", tp=PEERS, blocks=blocks), ONE_BLOCK)
    (plan,) = staged_writes(
        engine("prefill", blocks=blocks), engine("decode", tp=PEERS, order="NH", blocks=blocks), ONE_BLOCK
    )
    return plan


def sources(plan: StagedPlan) -> tuple[Worker, ...]:
    """Those that bytes come from."""
    return plan.direct.remotes if plan.operation == "READ" else (plan.direct.local,)


def destinations(plan: StagedPlan) -> tuple[Worker, ...]:
    """Those that bytes go to."""
    return (plan.direct.local,) if plan.operation == "READ" else plan.direct.remotes


def network_of(*staged_plans: StagedPlan) -> FakeNetwork:
    """The network of all workers that plans of one local engine know."""
    return FakeNetwork([*(plan.direct.local for plan in staged_plans), *staged_plans[0].direct.remotes])


def differing(network: FakeNetwork, some: Sequence[StagedPlan], requests: dict[int, tuple[int, int]]) -> Places:
    """The blocks of destinations that differ from what direct plans write of some requests."""
    with FakeMemory(tuple(network.workers.values())) as memory:
        for plan in some:
            labelled(memory, sources(plan))
            for number, tokens in requests.items():
                for spec in plan.direct.bind(**tables(number), tokens=tokens):
                    memory.execute(spec)
        return {
            (worker.key, name, int(at) // worker.views[0].block_stride_bytes)
            for worker in {worker.key: worker for plan in some for worker in destinations(plan)}.values()
            for name, found in cells(network.memory, worker).items()
            if name != NAME
            for at in np.flatnonzero(cells(memory, worker)[name] != found)
        }


def own_blocks(plan: StagedPlan, numbers: Iterable[int], chunks: int = 5) -> Places:
    """The blocks of destinations that some requests have for their first chunks."""
    side = "local" if plan.operation == "READ" else "remote"
    return {
        (worker.key, region.name, int(block))
        for worker in destinations(plan)
        for region in worker.regions
        for number in numbers
        for block in tables(number)[side]["attn"].ids[:chunks]
    }
