"""Staged requests through NIXL: every byte as direct plans write it, also when a peer dies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from benchmarks import staging
from benchmarks.real_memory import NixlCluster, PeerProcess, digests, pattern, placed, synchronized
from kvplan import Blocks, Model, Region, Worker
from kvplan.executor import Executor, Status, Transfer
from kvplan.staging import Pipeline, Rates, StagedPlan, StagedTransfer, stage
from kvplan_nixl import UCX, NixlExecutor
from kvplan_nixl.rearrange import TorchCopier
from tests.blocking import wait_until
from tests.small import engine
from tests.staged import NAME, plans_of, request_of, with_staging

TIMEOUT_S = 60.0
TOKENS = ((0, 256), (5, 201), (64, 66), (32, 32))
"""The positions of each request, at most 256: 16 blocks of 16, or 4 of 64."""

SIZES = {"exact": 1 << 19, "whole": 1 << 19, "write": 1_600_000}
"""Bytes of the staging region. A writer needs room for two blocks of each destination."""


def few_layers(model: str, layers: int = 3) -> Model:
    """A model cut short."""
    made = Model.shipped(model)
    return attrs.evolve(made, layers=made.layers[:layers])


def token_major_to_head_major() -> tuple[Sequence[Worker], Sequence[Worker]]:
    model = few_layers("qwen3-0.6b")
    return (
        model.engine("prefill", layout="LBNHC", num_blocks=80),
        model.engine("decode", tp=2, layout="LBHNC", num_blocks=80),
    )


def to_context_parallel_ranks() -> tuple[Sequence[Worker], Sequence[Worker]]:
    model = few_layers("deepseek-v3")
    return model.engine("prefill", num_blocks=80), model.engine("decode", tp=8, dcp=8, num_blocks=10)


def to_longer_blocks() -> tuple[Sequence[Worker], Sequence[Worker]]:
    model = few_layers("qwen3-0.6b")
    return (
        model.engine("prefill", layout="LBHNC", num_blocks=80),
        model.engine("decode", layout="LBHNC", num_blocks=20, tokens_per_block=64),
    )


def from_two_ranks() -> tuple[Sequence[Worker], Sequence[Worker]]:
    model = few_layers("qwen3-0.6b")
    return (
        model.engine("prefill", tp=2, layout="LBNHC", num_blocks=80),
        model.engine("decode", layout="LBHNC", num_blocks=80),
    )


PAIRS = [token_major_to_head_major, to_context_parallel_ranks, to_longer_blocks, from_two_ranks]


def tables(pool: int, seed: int) -> list[Blocks]:
    """The blocks of each request: a fifth of a pool, in no order."""
    return [Blocks(ids) for ids in np.split(np.random.default_rng(seed).permutation(pool), 5)]


def until_settled(pipelines: Sequence[Pipeline], submitted: Sequence[StagedTransfer]) -> None:
    """Poll pipelines until requests are settled."""
    deadline = time.monotonic() + TIMEOUT_S
    while not all(transfer.status.is_settled for transfer in submitted):
        assert time.monotonic() < deadline, submitted
        for pipeline in pipelines:
            pipeline.poll()
        time.sleep(0.001)


def taken(world: NixlCluster, workers: Sequence[Worker]) -> dict[Any, Any]:
    """Take the bytes of workers' regions, without staging regions, and leave zeros."""
    found = {}
    for worker in workers:
        for region in worker.regions:
            if region.name != NAME:
                found[worker.key, region.name] = world.read(worker, region)
                world.write(worker, region, np.zeros(region.size_bytes, np.uint8))
    return found


@pytest.mark.parametrize("way", ["exact", "whole"])
@pytest.mark.parametrize("pair", PAIRS)
def test_requests_are_what_direct_plans_make_them(pair: Any, way: str, device: str) -> None:
    """Of several requests at once, of several chunks each, all bytes are right."""
    sources, destinations = pair()
    number = len(sources)
    with NixlCluster([with_staging(worker, SIZES[way]) for worker in (*sources, *destinations)], device) as world:
        sources, destinations = world.workers[:number], world.workers[number:]
        for worker in sources:
            for region in worker.regions:
                world.write(worker, region, pattern(worker, region.name))
        options: dict[str, Any] = {"whole": True} if way == "whole" else {}
        ends = [tables(side[0].views[0].num_blocks, seed) for seed, side in enumerate((destinations, sources))]
        requests = [request_of(*each) for each in zip(*ends, TOKENS, strict=False)]
        plans = plans_of(sources, destinations, **options)
        assert max(len(list(plan.bind(**requests[0]))) for plan in plans) > 1
        pipelines = [
            Pipeline(world.executors[worker.key], NAME, TorchCopier(world.memory[worker.key]))
            for worker in destinations
        ]
        submitted = []
        for pipeline, plan in zip(pipelines, plans, strict=True):
            pipeline.prepare(plan)
            submitted += [pipeline.submit(plan, f"request {i}", **request) for i, request in enumerate(requests)]
        until_settled(pipelines, submitted)
        assert {(transfer.status, transfer.error) for transfer in submitted} == {(Status.DONE, None)}
        found = taken(world, destinations)
        started: list[tuple[Executor, Transfer]] = []
        for plan in plans:
            executor = world.executors[plan.direct.local.key]
            executor.prepare(plan.direct)
            started += [
                (executor, executor.start(spec, "direct"))
                for request in requests
                for spec in plan.direct.bind(**request)
            ]
        wait_until(lambda: {executor.poll(transfer).is_settled for executor, transfer in started} <= {True}, TIMEOUT_S)
        direct = taken(world, destinations)
        assert all(np.array_equal(found[place], direct[place]) for place in direct)
        assert any(values.any() for values in direct.values())


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX moves bytes between processes by TCP, which is slow enough to interrupt."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # other interfaces come and go, as those of tests/nixl/test_backends.py


HEADS, PAGE_BYTES, BLOCKS, REQUEST_BLOCKS = 64, 4096, 1024, 256
"""Heads, bytes of a block of 4 tokens in each of 2 layers, blocks of a pool and of a request."""


@attrs.define
class Mover:
    """A worker of this process that reads from two others, with a staging region for each."""

    executor: NixlExecutor
    memory: dict[str, Any]
    peers: tuple[PeerProcess, PeerProcess]
    plans: list[StagedPlan]
    pipelines: list[Pipeline]

    def submit(self, which: int, number: int) -> StagedTransfer:
        """Submit a request of blocks of its own, with one of the peers."""
        ids = np.random.default_rng(which).permutation(REQUEST_BLOCKS) + REQUEST_BLOCKS * number
        blocks = {"attn": Blocks(ids)}
        request: Any = {"local": blocks, "remote": blocks, "tokens": (0, 4 * REQUEST_BLOCKS)}
        return self.pipelines[which].submit(self.plans[which], f"request {number}", **request)

    def polled_until(self, *transfers: StagedTransfer) -> None:
        """Poll until these requests are settled."""
        until_settled(self.pipelines, transfers)

    def is_done(self, which: int, number: int) -> bool:
        """Carry out a request; whether it is done."""
        transfer = self.submit(which, number)
        self.polled_until(transfer)
        return transfer.status is Status.DONE

    def caches(self) -> dict[str, np.ndarray]:
        """The blocks of each layer."""
        return {
            name: tensor.numpy().reshape(BLOCKS, PAGE_BYTES)
            for name, tensor in self.memory.items()
            if name.startswith("kv")
        }

    def blocks(self, number: int) -> np.ndarray:
        """The bytes of a request's blocks, layer by layer."""
        mine = slice(REQUEST_BLOCKS * number, REQUEST_BLOCKS * (number + 1))
        return np.concatenate([pages[mine] for pages in self.caches().values()])


@pytest.fixture
def mover(tcp: None) -> Iterator[Mover]:
    """A worker and two peers, of 1024 blocks of 8 KiB, and chunks of 128 blocks. Destinations are filled with zeros."""
    remotes = [engine(name, heads=HEADS, order="HN", blocks=BLOCKS, layers=2)[0] for name in ("first", "second")]
    (local,) = engine("near", heads=HEADS, order="NH", blocks=BLOCKS, layers=2)
    regions = [Region(f"{NAME}.{i}", (1 << 50) + (i << 40), 2 << 20) for i in range(2)]
    there, memory = placed(attrs.evolve(local, regions=(*local.regions, *regions)))
    with (
        PeerProcess(remotes[0], UCX) as first,
        PeerProcess(remotes[1], UCX) as second,
        NixlExecutor(there) as executor,
    ):
        copier = TorchCopier(memory)
        plans = [
            stage(there, [executor.connect(peer.ask("envelope"))], staging=region.name)
            for peer, region in zip((first, second), regions, strict=True)
        ]
        pipelines = [Pipeline(executor, plan.staging, copier) for plan in plans]
        for pipeline, plan in zip(pipelines, plans, strict=True):
            pipeline.prepare(plan)
        yield Mover(executor, memory, (first, second), plans, pipelines)


def killed(mover: Mover) -> None:
    """Kill the first peer during two requests with it, which fail; the next one, with the second peer, is done."""
    assert mover.is_done(0, 0)
    mover.peers[0].stop()
    lost = [mover.submit(0, 1), mover.submit(0, 2)]
    mover.pipelines[0].poll()
    assert {transfer.status for transfer in lost} == {Status.RUNNING}
    mover.peers[0].kill()
    kept = mover.submit(1, 3)
    mover.polled_until(*lost, kept)
    for transfer in lost:
        assert transfer.status is Status.FAILED
        assert transfer.error is not None
        assert transfer.error.code == "PEER"
    assert kept.status is Status.DONE


def test_a_source_killed_during_a_request(mover: Mover) -> None:
    """Requests that read from it are FAILED; those of another one go on, and no other block is touched."""
    killed(mover)
    assert mover.blocks(0).all()
    assert not mover.blocks(1).any()
    assert not mover.blocks(2).any()
    assert mover.blocks(3).all()


def test_a_request_that_is_cancelled_while_its_peer_hangs(mover: Mover) -> None:
    """It is CANCELLED when the peer goes on, and not before; then nothing touches its blocks or the staging region."""
    assert mover.is_done(0, 0)
    mover.peers[0].stop()
    transfer = mover.submit(0, 1)
    mover.pipelines[0].cancel(transfer)
    for _ in range(100):
        mover.pipelines[0].poll()
    assert transfer.status is Status.RUNNING
    mover.peers[0].resume()
    mover.polled_until(transfer)
    assert (transfer.status, transfer.error) == (Status.CANCELLED, None)
    mover.memory[f"{NAME}.0"].zero_()
    before = digests(mover.memory)
    time.sleep(0.2)
    assert digests(mover.memory) == before
    assert not mover.blocks(1).any()


def test_an_executor_closed_during_a_request(mover: Mover) -> None:
    """What runs is CANCELLED; what is submitted afterwards is FAILED."""
    assert mover.is_done(0, 0)
    mover.peers[0].stop()
    transfer = mover.submit(0, 1)
    assert mover.pipelines[0].poll() == ()
    mover.executor.close()
    assert mover.pipelines[0].poll() == (transfer,)
    assert transfer.status is Status.CANCELLED
    late = mover.submit(0, 2)
    assert mover.pipelines[0].poll() == (late,)
    assert late.status is Status.FAILED


def test_copies_are_done_when_their_ticket_is(device: str) -> None:
    """No other stream of a GPU waits for the stream of copies; the ticket knows when they are done."""
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    there, memory = placed(with_staging(local), device)
    plan = stage(there, sources, staging=NAME)
    blocks = {"attn": Blocks([7, 3, 5])}
    (chunk,) = plan.bind(local=blocks, remote=blocks, tokens=(0, 12))
    memory[NAME].fill_(7)
    synchronized(device)
    copier = TorchCopier(memory)
    ticket = copier.begin(chunk.copies)
    wait_until(lambda: copier.done(ticket), TIMEOUT_S)
    assert int((memory["kv.0"] == 7).sum()) == 3 * 256


def test_all_ways_of_the_benchmark_leave_the_same_bytes() -> None:
    """They take turns in one world."""
    with staging.World.of(staging.CASES[0], 4, 16 << 20, "cpu") as world:
        ways = staging.ways(world, 64, Rates("by hand", 0, 1, 0, 0, 0))
        assert {way.option.strategy for way in ways} == {"direct", "receive-staged", "receive-staged-whole"}
        staging.check(world, ways)
