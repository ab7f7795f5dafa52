"""Staged requests through NIXL: every byte as direct plans write it, and what becomes of them when a peer dies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from kvplan import Blocks, Model, Pipeline, Region, StagedTransfer, Worker, stage
from kvplan.executor import Executor, Notice, Status, Transfer
from kvplan_nixl import UCX, NixlExecutor
from kvplan_nixl.rearrange import TorchCopier
from tests.nixl.peers import PeerProcess, pattern
from tests.nixl.worlds import NixlWorld, placed, synchronized
from tests.small import engine
from tests.staged import NAME, with_staging

TIMEOUT_S = 60.0
TOKENS = ((0, 128), (5, 101), (64, 66), (32, 32))
"""The positions of each request, at most 128: 8 blocks of 16, or 2 of 64."""


def few_layers(model: str, layers: int = 3) -> Model:
    """A model cut short."""
    made = Model.shipped(model)
    return attrs.evolve(made, layers=made.layers[:layers])


def token_major_to_head_major() -> tuple[Sequence[Worker], Sequence[Worker]]:
    model = few_layers("qwen3-0.6b")
    return (
        model.engine("prefill", layout="LBNHC", num_blocks=40),
        model.engine("decode", tp=2, layout="LBHNC", num_blocks=40),
    )


def to_context_parallel_ranks() -> tuple[Sequence[Worker], Sequence[Worker]]:
    model = few_layers("deepseek-v3")
    return model.engine("prefill", num_blocks=40), model.engine("decode", tp=8, dcp=8, num_blocks=5)


def to_longer_blocks() -> tuple[Sequence[Worker], Sequence[Worker]]:
    model = few_layers("qwen3-0.6b")
    return (
        model.engine("prefill", layout="LBHNC", num_blocks=40),
        model.engine("decode", layout="LBHNC", num_blocks=10, tokens_per_block=64),
    )


PAIRS = [token_major_to_head_major, to_context_parallel_ranks, to_longer_blocks]


def tables(pool: int, seed: int) -> list[Blocks]:
    """Blocks of each request, a fifth of a pool, in no order."""
    return [Blocks(ids) for ids in np.split(np.random.default_rng(seed).permutation(pool), 5)]


def until_settled(
    world: NixlWorld, pipelines: Sequence[Pipeline], submitted: Sequence[StagedTransfer]
) -> dict[Any, list[Notice]]:
    """Poll all executors of a world until requests are settled; what workers have been told."""
    told: dict[Any, list[Notice]] = {key: [] for key in world.executors}
    deadline = time.monotonic() + TIMEOUT_S
    while not all(transfer.status.is_settled for transfer in submitted):
        assert time.monotonic() < deadline, submitted
        for pipeline in pipelines:
            pipeline.poll()
        for key, executor in world.executors.items():
            told[key] += executor.notices()
    deadline = time.monotonic() + 2
    while sum(map(len, told.values())) < len(submitted) and time.monotonic() < deadline:
        for key, executor in world.executors.items():
            told[key] += executor.notices()
    return told


def taken(world: NixlWorld, workers: Sequence[Worker]) -> dict[Any, Any]:
    """The bytes of workers' regions but for staging ones; zeros in their place."""
    found = {}
    for worker in workers:
        for region in worker.regions:
            if region.name != NAME:
                found[worker.key, region.name] = world.read(worker, region.name)
                world.write(worker, region.name, np.zeros(region.size_bytes, np.uint8))
    return found


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_requests_are_what_direct_plans_make_them(pair: Any, whole: bool, device: str) -> None:
    """Of several requests at once, of several chunks each, all bytes are right; each source is told of each once."""
    sources, locals_ = pair()
    size = 1 << 19
    with NixlWorld([*sources, *(with_staging(worker, size) for worker in locals_)], device) as world:
        sources, locals_ = world.workers[: len(sources)], world.workers[len(sources) :]
        for worker in sources:
            for region in worker.regions:
                world.write(worker, region.name, pattern(worker, region.name))
        ours, theirs = (tables(side[0].views[0].num_blocks, seed) for seed, side in enumerate((locals_, sources)))
        requests: list[dict[str, Any]] = [
            {"local": {"attn": near}, "remote": {"attn": far}, "tokens": tokens}
            for near, far, tokens in zip(ours, theirs, TOKENS, strict=False)
        ]
        plans = [stage(worker, sources, staging=NAME, whole=whole) for worker in locals_]
        pipelines = [
            Pipeline(world.executors[worker.key], plan, TorchCopier(world.memory[worker.key]))
            for worker, plan in zip(locals_, plans, strict=True)
        ]
        submitted = [
            pipeline.submit(f"request {i}", **request) for pipeline in pipelines for i, request in enumerate(requests)
        ]
        assert max(len(list(plan.bind(**requests[0]))) for plan in plans) > 1
        told = until_settled(world, pipelines, submitted)
        assert {(transfer.status, transfer.error) for transfer in submitted} == {(Status.DONE, None)}
        for source in sources:
            heard = [(notice.rank, notice.request) for notice in told[source.key]]
            served = [plan.direct.local.rank for plan in plans for read in plan.reads if read.remotes == (source,)]
            assert sorted(heard) == [(rank, f"request {i}") for rank in sorted(served) for i in range(len(requests))]
        found = taken(world, locals_)
        started: list[tuple[Executor, Transfer]] = []
        for plan in plans:
            executor = world.executors[plan.direct.local.key]
            executor.prepare(plan.direct)
            started += [
                (executor, executor.start(spec, "direct"))
                for request in requests
                for spec in plan.direct.bind(**request)
            ]
        deadline = time.monotonic() + TIMEOUT_S
        while not {executor.poll(transfer).is_settled for executor, transfer in started} <= {True}:
            assert time.monotonic() < deadline, started
            for executor in world.executors.values():
                executor.notices()
        expected = taken(world, locals_)
        assert all(np.array_equal(found[place], expected[place]) for place in expected)
        assert any(values.any() for values in expected.values())


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX moves bytes between processes by TCP, which takes its time."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@attrs.define
class Reader:
    """A worker of this process that stages what it reads of two others, in a region for each."""

    executor: NixlExecutor
    memory: dict[str, Any]
    peers: tuple[PeerProcess, PeerProcess]
    pipelines: list[Pipeline]

    def submit(self, which: int, number: int) -> StagedTransfer:
        """A request of 256 blocks of its own."""
        ids = np.random.default_rng(which).permutation(256) + 256 * number
        blocks = {"attn": Blocks(ids)}
        return self.pipelines[which].submit(f"request {number}", local=blocks, remote=blocks, tokens=(0, 1024))

    def polled_until(self, *transfers: StagedTransfer) -> None:
        """Let requests go on until some are settled."""
        deadline = time.monotonic() + TIMEOUT_S
        while not all(transfer.status.is_settled for transfer in transfers):
            assert time.monotonic() < deadline, transfers
            for pipeline in self.pipelines:
                pipeline.poll()

    def blocks(self, number: int) -> np.ndarray:
        """The bytes of a request's blocks, layer by layer."""
        return np.concatenate(
            [
                tensor.numpy().reshape(1024, -1)[256 * number : 256 * (number + 1)]
                for name, tensor in self.memory.items()
                if name.startswith("kv")
            ]
        )


@pytest.fixture
def reader(tcp: None) -> Iterator[Reader]:
    """A worker and two peers, of 1024 blocks of 8 KiB, and chunks of 128 blocks."""
    sources = [engine(name, heads=64, blocks=1024, layers=2)[0] for name in ("first", "second")]
    (local,) = engine("decode", heads=64, order="NH", blocks=1024, layers=2)
    staging = [Region(f"{NAME}.{i}", (1 << 50) + (i << 40), 2 << 20) for i in range(2)]
    there, memory = placed(attrs.evolve(local, regions=(*local.regions, *staging)))
    with (
        PeerProcess(sources[0], UCX) as first,
        PeerProcess(sources[1], UCX) as second,
        NixlExecutor(there) as executor,
    ):
        copier = TorchCopier(memory)
        pipelines = [
            Pipeline(executor, stage(there, [executor.connect(peer.ask("envelope"))], staging=region.name), copier)
            for peer, region in zip((first, second), staging, strict=True)
        ]
        yield Reader(executor, memory, (first, second), pipelines)


def test_a_peer_killed_under_a_request(reader: Reader) -> None:
    """Requests that read from it are FAILED; those of another peer go on, and no other block is touched."""
    before = reader.submit(0, 0)
    reader.polled_until(before)
    assert before.status is Status.DONE
    done = reader.blocks(0).copy()
    reader.peers[0].stop()
    lost = [reader.submit(0, 1), reader.submit(0, 2)]
    reader.pipelines[0].poll()
    assert {transfer.status for transfer in lost} == {Status.RUNNING}
    reader.peers[0].kill()
    kept = reader.submit(1, 3)
    reader.polled_until(*lost, kept)
    for transfer in lost:
        assert transfer.status is Status.FAILED
        assert transfer.error is not None
        assert transfer.error.code == "PEER"
    assert kept.status is Status.DONE
    assert reader.peers[1].ask("notices", 1) == (Notice("decode", 0, "request 3"),)
    assert np.array_equal(reader.blocks(0), done)
    assert not reader.blocks(1).any()
    assert not reader.blocks(2).any()
    assert reader.blocks(3).all()


def test_a_request_that_is_cancelled_while_its_peer_hangs(reader: Reader) -> None:
    """It is CANCELLED when the peer goes on, and not before; then its blocks and the staging region are left alone."""
    reader.submit(0, 0)
    reader.polled_until(*reader.pipelines[0]._requests)
    reader.peers[0].stop()
    transfer = reader.submit(0, 1)
    reader.pipelines[0].cancel(transfer)
    for _ in range(100):
        reader.pipelines[0].poll()
    assert transfer.status is Status.RUNNING
    reader.peers[0].go_on()
    reader.polled_until(transfer)
    assert (transfer.status, transfer.error) == (Status.CANCELLED, None)
    staging = reader.memory[f"{NAME}.0"]
    staging.zero_()
    time.sleep(0.2)
    assert not staging.any()
    assert not reader.blocks(1).any()


def test_an_executor_closed_under_a_request(reader: Reader) -> None:
    """What runs is CANCELLED; what is submitted afterwards is FAILED."""
    reader.submit(0, 0)
    reader.polled_until(*reader.pipelines[0]._requests)
    reader.peers[0].stop()
    transfer = reader.submit(0, 1)
    reader.executor.close()
    assert reader.pipelines[0].poll() == (transfer,)
    assert transfer.status is Status.CANCELLED
    late = reader.submit(0, 2)
    assert reader.pipelines[0].poll() == (late,)
    assert late.status is Status.FAILED


def test_copies_on_a_gpu_are_done_when_they_say_so() -> None:
    """The stream of copies is not waited for by others: what a request says is that they are done."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    (local,), sources = engine("decode", order="NH"), engine("prefill")
    there, memory = placed(with_staging(local), "cuda:0")
    plan = stage(there, sources, staging=NAME)
    blocks = {"attn": Blocks([7, 3, 5])}
    (chunk,) = plan.bind(local=blocks, remote=blocks, tokens=(0, 12))
    memory[NAME].fill_(7)
    synchronized("cuda:0")
    copier = TorchCopier(memory)
    ticket = copier.begin(chunk.copies)
    while not copier.done(ticket):
        pass
    assert int((memory["kv.0"] == 7).sum()) == 3 * 256
