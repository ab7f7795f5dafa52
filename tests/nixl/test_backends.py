"""The backends that are really used: shared memory, TCP, and files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvplan import Blocks, Model, Region, plan_reads, plan_writes
from kvplan.executor import Status
from kvplan_nixl import UCX, NixlExecutor, settle
from kvplan_nixl.executor import Backends
from tests.contents import contents
from tests.contract import Engines, move
from tests.nixl.peers import PeerProcess, fill, forkserver, pattern
from tests.nixl.worlds import NixlWorld, placed
from tests.small import engine

TIMEOUT_S = 60.0
SHARED_MEMORY: Backends = {"UCX": {"ucx_error_handling_mode": "none"}}
"""What UCX needs to use shared memory alone; it then can't tell that a peer is gone."""

LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")


def loopback_bytes() -> int:
    """How many bytes this machine has sent to itself."""
    return int(LOOPBACK.read_text())


@pytest.mark.skipif(not LOOPBACK.exists(), reason="no counter of the loopback interface")
@pytest.mark.parametrize(
    ("transports", "backends", "over_tcp"), [("self,sm", SHARED_MEMORY, False), ("tcp", UCX, True)], ids=["sm", "tcp"]
)
class TestTransports:
    """The transport named moves the bytes, and not another."""

    def test_in_one_process(
        self, monkeypatch: pytest.MonkeyPatch, transports: str, backends: Backends, over_tcp: bool
    ) -> None:
        """A request moves between two executors of one process, both ways."""
        monkeypatch.setenv("UCX_TLS", transports)
        (source,), (local,) = engine("prefill", blocks=200), engine("decode", tokens=6, blocks=200)
        blocks = {"attn": Blocks(np.random.default_rng(1).permutation(200))}
        before = loopback_bytes()
        with NixlWorld([source, local], backends=backends) as world:
            engines = Engines(world, 1, blocks, blocks, {"attn": (3, 790)})
            move(engines, "READ")
            move(engines, "WRITE")
        num_bytes = 2 * 787 * 2 * 64 * 2  # both ways, tokens, layers, bytes of 4 heads' K and V, sent and acknowledged
        assert (loopback_bytes() - before > num_bytes // 2) == over_tcp

    def test_between_two_processes(
        self, monkeypatch: pytest.MonkeyPatch, transports: str, backends: Backends, over_tcp: bool
    ) -> None:
        """Blocks of another process are read, byte for byte."""
        monkeypatch.setenv("UCX_TLS", transports)
        before = loopback_bytes()
        num_bytes = read_from_another_process(backends, None)
        assert (loopback_bytes() - before > num_bytes) == over_tcp


def read_from_another_process(backends: Backends, namespace: str | None) -> int:
    """Read a model's blocks from a process, check them, and tell it; how many bytes that was."""
    model = Model.shipped("llama-3.2-1b")
    (source,), (local,) = (model.engine(name, num_blocks=20) for name in ("prefill", "decode"))
    there, memory = placed(local)
    with PeerProcess(source, backends, namespace) as peer, NixlExecutor(there, backends) as executor:
        plan = plan_reads(there, [executor.connect(peer.ask("envelope"))])
        executor.prepare(plan)
        ours, theirs = np.arange(20), np.random.default_rng(1).permutation(20)
        (spec,) = plan.bind(local={"attn": Blocks(ours)}, remote={"attn": Blocks(theirs)}, tokens=(0, 320))
        transfer = executor.start(spec, "request")
        assert settle(executor, [transfer], TIMEOUT_S)
        assert transfer.status is Status.DONE, transfer.error
        for region in local.regions:
            expected = pattern(source, region.name).reshape(20, -1)[theirs]
            assert np.array_equal(memory[region.name].numpy().reshape(20, -1), expected)
        assert [notice.request for notice in peer.ask("notices", 1)] == ["request"]
        return spec.num_bytes


@contextmanager
def network_namespace() -> Iterator[str]:
    """A network namespace that is joined to this one by a pair of interfaces; skips where that is not allowed."""
    name = f"kv{os.getpid()}"
    commands = [
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b netns {name}",
        f"ip addr add 10.213.7.1/24 dev {name}a",
        f"ip link set {name}a up",
        f"ip -n {name} addr add 10.213.7.2/24 dev {name}b",
        f"ip -n {name} link set {name}b up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for command in commands:
            try:
                subprocess.run(command.split(), check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"{command}: {getattr(error, 'stderr', '') or error}")
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def read_over_tcp(namespace: str) -> None:
    os.environ["UCX_TLS"] = "tcp"
    assert read_from_another_process(UCX, namespace)


def test_between_two_network_namespaces() -> None:
    """Blocks are read from a process on another network, over TCP.

    By a process that is new, since UCX reads the routes of this machine once.
    """
    with network_namespace() as name:
        process = forkserver().Process(target=read_over_tcp, args=(name,))
        process.start()
        process.join(TIMEOUT_S)
        process.kill()
        assert process.exitcode == 0


def test_offload_to_a_file_and_back(tmp_path: Path) -> None:
    """A request's blocks are written to a file in one layout, and read from it into memory of another."""
    model = Model.shipped("llama-3.2-1b")
    first, second = (
        model.engine("first", layout="LBNHC", num_blocks=30),
        model.engine("second", tp=2, num_blocks=12, tokens_per_block=48),
    )
    (stored,) = model.engine("file", layout="BLHNC", tokens_per_block=32, num_blocks=10)
    (whole,) = stored.regions
    blocks = {"attn": Blocks([21, 4, 17, 9, 2, 28, 11])}, {"attn": Blocks([7, 1, 4, 9])}, {"attn": Blocks([6, 3, 10])}
    tokens = {"attn": (5, 101)}
    with (tmp_path / "cache").open("w+b") as file:
        file.truncate(whole.size_bytes)
        stored = attrs.evolve(stored, regions=[Region(whole.name, 0, whole.size_bytes, "FILE", file.fileno())])
        with NixlWorld([*first, *second], backends={**UCX, "POSIX": {}}) as world:
            before, _ = contents(world.workers[:1], world.workers[1:], blocks[2], blocks[0], tokens)
            _, after = contents(world.workers[:1], world.workers[1:], blocks[2], blocks[0], tokens)
            for worker in world.workers:
                for region in worker.regions:
                    world.write(worker, region.name, before[worker.key, region.name])
            for worker in world.workers:
                saves = worker.engine_id == "first"
                executor = world.nixl[worker.key]
                executor.attach(stored)
                plan = plan_writes(worker, [stored]) if saves else plan_reads(worker, [stored])
                executor.prepare(plan)
                local = blocks[0] if saves else blocks[2]
                (spec,) = plan.bind(local=local, remote=blocks[1], tokens=tokens)
                transfer = executor.start(spec, "request")
                assert settle(executor, [transfer], TIMEOUT_S)
                assert transfer.status is Status.DONE, transfer.error
                assert executor.backend_of(transfer) == "POSIX"
                executor.release(transfer)
                executor.disconnect(stored)
            for worker in world.workers:
                for region in worker.regions:
                    assert np.array_equal(world.read(worker, region.name), after[worker.key, region.name])


def test_ucx_moves_between_main_memory_where_posix_is_there_too() -> None:
    """Backends are tried in order: with UCX first, files are POSIX's and nothing else."""
    (source,), (local,) = engine("prefill"), engine("decode")
    with NixlWorld([source, local], backends={**UCX, "POSIX": {}}) as world:
        engines = Engines(world, 1, {"attn": Blocks([1])}, {"attn": Blocks([2])}, {"attn": (0, 4)})
        executor = world.nixl["decode", 0]
        (started,) = engines.start(engines.mesh("READ"), "READ", "request")
        engines.finish([started])
        assert executor.backend_of(started[1]) == "UCX"


def test_a_worker_of_the_same_process(device: str) -> None:
    """Blocks are moved to a second engine in this process by one executor alone."""
    (source,), (local,) = engine("prefill"), engine("decode", tokens=6)
    (source, theirs), (local, ours) = placed(source, device), placed(local, device)
    fill(source, theirs, device)
    with NixlExecutor(local) as executor:
        executor.attach(source)
        plan = plan_reads(local, [source])
        executor.prepare(plan)
        (spec,) = plan.bind(local={"attn": Blocks([1])}, remote={"attn": Blocks([2, 3])}, tokens=(0, 6))
        transfer = executor.start(spec, "request")
        assert settle(executor, [transfer], TIMEOUT_S)
        assert transfer.status is Status.DONE
        assert executor.notices() == ()
    for (name, tensor), region in zip(ours.items(), local.regions, strict=True):
        moved = int((tensor != 0).sum())
        assert moved == 6 * 64, (name, region)
