"""The backends that executors really use: shared memory, TCP, and files."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import stat
import struct
import subprocess
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import nixl
import numpy as np
import pytest

from benchmarks.real_memory import NixlCluster, PeerProcess, fill, forkserver, pattern, placed
from kvplan import Blocks, KVPlanError, Model, Region, Status, Worker, plan_reads, plan_writes, region_of, verify
from kvplan.testing.executors import Transmission
from kvplan.verification import FakeMemory
from kvplan_nixl import UCX, NixlExecutor, settle
from kvplan_nixl.agent import PROGRESS_US, Agent
from kvplan_nixl.backends import Backends
from tests.small import engine

TIMEOUT_S = 60.0
SHARED_MEMORY: Backends = {"UCX": {"ucx_error_handling_mode": "none"}}
"""The option by which UCX uses shared memory alone. It does not notice then that a peer is gone."""


def tcp_bytes() -> Counter[int]:
    """The number of bytes that this process has sent and received, by each TCP socket that is open."""
    found = Counter[int]()
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the one that lists them is closed; some are no TCP sockets
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    # tcpi_bytes_acked, tcpi_bytes_received
                    found[status.st_ino] = sum(struct.unpack_from("=QQ", info, 120))
    return found


def choose(monkeypatch: pytest.MonkeyPatch, transports: str | None) -> None:
    """Name UCX's transports, or leave them to kvplan."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="no counters of sockets")
@pytest.mark.parametrize(
    ("transports", "backends", "over_tcp"),
    [("self,sm", SHARED_MEMORY, False), ("tcp", UCX, True), (None, UCX, False)],
    ids=["sm", "tcp", "default"],
)
class TestTransports:
    """The named transport moves the bytes, and no other does. By default that is CMA, on one host."""

    def test_in_one_process(
        self, monkeypatch: pytest.MonkeyPatch, transports: str | None, backends: Backends, over_tcp: bool
    ) -> None:
        """A request moves between two executors of one process, both ways."""
        choose(monkeypatch, transports)
        (source,), (local,) = engine("prefill", blocks=200), engine("decode", tokens=6, blocks=200)
        blocks = {"attn": Blocks(np.random.default_rng(1).permutation(200))}
        before = tcp_bytes()
        with NixlCluster([source, local], backends=backends) as cluster:
            one = Transmission(cluster, cluster.workers[:1], cluster.workers[1:], blocks, blocks, {"attn": (3, 790)})
            one.move("READ")
            one.move("WRITE")
            # of sockets that are open: those of other tests may be closed meanwhile
            found = (tcp_bytes() - before).total()
        num_bytes = 2 * 787 * 2 * 64 * 2  # both ways, tokens, layers, bytes of 4 heads' K and V, sent and received
        assert (found > num_bytes // 2) == over_tcp

    def test_between_two_processes(
        self, monkeypatch: pytest.MonkeyPatch, transports: str | None, backends: Backends, over_tcp: bool
    ) -> None:
        """Blocks of another process are read, byte for byte."""
        choose(monkeypatch, transports)
        before = tcp_bytes()
        num_bytes, after = read_from_another_process(backends)
        assert ((after - before).total() > num_bytes) == over_tcp


def read_from_another_process(backends: Backends, begin: Callable[[], None] | None = None) -> tuple[int, Counter[int]]:
    """Read a model's blocks from a process, and check them.

    Returns how many bytes that was, and :func:`tcp_bytes` then.
    """
    model = Model.shipped("llama-3.2-1b")
    (source,), (local,) = (model.engine(name, num_blocks=20) for name in ("prefill", "decode"))
    there, memory = placed(local)
    with PeerProcess(source, backends, begin=begin) as peer, NixlExecutor(there, backends) as executor:
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
        return spec.num_bytes, tcp_bytes()


def addresses() -> tuple[str, str]:
    """Two addresses for this process alone: another one that tests may have a network namespace at the same time."""
    network = ipaddress.ip_network("198.18.0.0/15")  # for measurements, of which no host has an address
    ours = network[4 * (os.getpid() % (network.num_addresses // 4)) + 1]
    return f"{ours}", f"{ours + 1}"


@contextmanager
def network_namespace() -> Iterator[str]:
    """A network namespace with a pair of interfaces to this one. Skips where that is not allowed."""
    name = f"kv{os.getpid()}"
    ours, theirs = addresses()
    commands = [
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b netns {name}",
        f"ip addr add {ours}/30 dev {name}a",
        f"ip link set {name}a up",
        f"ip -n {name} addr add {theirs}/30 dev {name}b",
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
        for command in (f"ip link del {name}a", f"ip netns del {name}"):  # a namespace's links go some time after it
            with suppress(OSError):  # no such program
                subprocess.run(command.split(), check=False, capture_output=True)


CLONE_NEWNS, CLONE_NEWNET, MS_PRIVATE, MS_REC, MNT_DETACH = 1 << 17, 1 << 30, 1 << 18, 1 << 14, 2


def enter(namespace: str) -> None:
    """Move this process to a network namespace, and mount its interfaces in /sys, where UCX finds its devices."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        results = [
            libc.setns(file.fileno(), CLONE_NEWNET),
            libc.unshare(CLONE_NEWNS),
            libc.mount(b"none", b"/", None, MS_PRIVATE | MS_REC, None),
            libc.umount2(b"/sys", MNT_DETACH),
            libc.mount(b"sys", b"/sys", b"sysfs", 0, None),
        ]
    if any(results):
        raise OSError(ctypes.get_errno(), f"enter network namespace {namespace}: {results}")


def connect_to_silence(namespace: str, address: str) -> None:
    """Connect to an agent whose host answers nothing any more, as the executor's thread would."""
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "all", "UCX_TCP_SYN_CNT": "1"}
    (source,), (local,) = engine("prefill"), engine("decode")
    there, _ = placed(local)
    with PeerProcess(source, UCX, begin=partial(enter, namespace)) as peer:
        envelope = peer.ask("envelope")
    for command in (
        f"ip -n {namespace} addr flush dev {namespace}b",
        f"ip neigh replace {address} lladdr 02:00:00:00:00:01 dev {namespace}a nud permanent",
    ):
        subprocess.run(command.split(), check=True)
    with NixlExecutor(there) as executor:
        plan = plan_reads(there, [executor.connect(envelope)])
        executor.prepare(plan)
        blocks = {"attn": Blocks([1])}
        (spec,) = plan.bind(local=blocks, remote=blocks, tokens=(0, 4))
        transfer = executor.start(spec, "request")
        assert transfer.status is Status.RUNNING
        assert settle(executor, [transfer], TIMEOUT_S)
        assert transfer.error is not None
        assert transfer.error.code == "PEER"


def test_connect_does_not_wait_where_nobody_answers() -> None:
    """It returns before the connection is made, and a transfer is FAILED when TCP gives up."""
    with network_namespace() as name:
        process = forkserver().Process(target=connect_to_silence, args=(name, addresses()[1]))
        process.start()
        process.join(TIMEOUT_S)
        process.kill()
        assert process.exitcode == 0


def read_over_tcp(namespace: str) -> None:
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "all"}
    assert read_from_another_process(UCX, partial(enter, namespace))


def test_between_two_network_namespaces() -> None:
    """Blocks are read from a process on another network, over TCP.

    A new process reads them, because UCX reads the routes of this machine once.
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
    blocks = {"first": Blocks([21, 4, 17, 9, 2, 28, 11]), "file": Blocks([7, 1, 4, 9]), "second": Blocks([6, 3, 10])}
    with (tmp_path / "cache").open("w+b") as file:
        file.truncate(whole.size_bytes)
        stored = attrs.evolve(stored, regions=[Region(whole.name, 0, whole.size_bytes, "FILE", file.fileno())])
        with (
            NixlCluster([*first, *second], backends={**UCX, "POSIX": {}}) as cluster,
            FakeMemory([*cluster.workers, stored]) as memory,
        ):
            for worker in cluster.workers:
                for region in worker.regions:
                    cluster.write(worker, region, pattern(worker, region.name))
                    memory.write(worker, region.address, pattern(worker, region.name))
            for worker in cluster.workers:
                executor = cluster.nixl[worker.key]
                executor.attach(stored)
                saves = worker.engine_id == "first"
                plan = plan_writes(worker, [stored]) if saves else plan_reads(worker, [stored])
                executor.prepare(plan)
                local, remote = {"attn": blocks[worker.engine_id]}, {"attn": blocks["file"]}
                assert verify(plan, local=local, remote=remote, tokens=(5, 101))
                (spec,) = plan.bind(local=local, remote=remote, tokens=(5, 101))
                memory.execute(spec)
                transfer = executor.start(spec, "request")
                assert settle(executor, [transfer], TIMEOUT_S)
                assert transfer.status is Status.DONE, transfer.error
                assert executor.backend_of(transfer) == "POSIX"
                executor.release(transfer)
                executor.disconnect(stored)
            for worker in cluster.workers:
                for region in worker.regions:
                    expected = memory.read(worker, region.address, region.size_bytes)
                    assert np.array_equal(cluster.read(worker, region), expected)


def test_ucx_moves_between_main_memory_where_posix_is_there_too() -> None:
    """Backends are tried in order: after UCX, POSIX moves files and nothing else."""
    (source,), (local,) = engine("prefill"), engine("decode")
    with NixlCluster([source, local], backends={**UCX, "POSIX": {}}) as cluster:
        one = Transmission(
            cluster,
            cluster.workers[:1],
            cluster.workers[1:],
            {"attn": Blocks([1])},
            {"attn": Blocks([2])},
            {"attn": (0, 4)},
        )
        ((executor, transfer),) = started = one.start(one.plan("READ").plans, "request")
        one.finish(started)
        assert executor is cluster.nixl["decode", 0]
        assert cluster.nixl["decode", 0].backend_of(transfer) == "UCX"
        executor.release(transfer)
        assert cluster.nixl["decode", 0].backend_of(transfer) == ""


def test_a_worker_of_the_same_process(device: str) -> None:
    """One executor alone moves blocks to a second engine of this process."""
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
    for (name, tensor), region in zip(ours.items(), local.regions, strict=True):
        moved = int((tensor != 0).sum())
        assert moved == 6 * 64, (name, region)


def test_the_progress_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent's progress thread has a delay, without which it takes a core. Its name is of one agent at a time."""
    delays_us: list[int] = []
    made: list[Any] = []
    real = nixl._bindings.nixlAgent

    def noted(name: str, config: Any) -> Any:
        assert [agent() for agent in made if agent() is not None] == []
        agent = Noted(real(name, config))
        made.append(weakref.ref(agent))
        delays_us.extend([config.pthrDelay] if config.useProgThread else [])
        return agent

    monkeypatch.setattr(nixl._bindings, "nixlAgent", noted)
    agent = Agent("a", {})
    assert delays_us == [PROGRESS_US]
    agent.close()


class Noted:
    """NIXL's own agent, and whether anything still refers to it."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


def test_an_agent_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL's reason is told."""

    def refuse(_: str, config: object) -> object:
        raise RuntimeError("no agent is made here")

    monkeypatch.setattr(nixl._bindings, "nixlAgent", refuse)
    with pytest.raises(KVPlanError, match=r"BACKEND: cannot make a NIXL agent: .*no agent is made here"):
        Agent("a", {})


def test_memory_that_was_resized_is_not_used() -> None:
    """Neither is it registered, nor are plans prepared for it: the bytes there belong to others by now."""
    cache = np.zeros(4 << 10, np.uint8)
    worker = Worker("d", 0, [region_of(cache, "cache")], [], [])
    with NixlExecutor(worker) as executor:
        executor.prepare(plan_reads(worker, []))
        cache.resize(64, refcheck=False)
        for action in (
            lambda: executor.prepare(plan_reads(worker, [])),
            lambda: executor.attach(attrs.evolve(worker, engine_id="other")),
            lambda: NixlExecutor(worker),
        ):
            with pytest.raises(KVPlanError, match=r"MEMORY: .* region 'cache' .* resized"):
                action()
