"""UCX's copies between processes of one host, which go on after a read of them has failed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest

from benchmarks.real_memory import PeerProcess, pattern, placed
from kvplan import Axis, Blocks, Group, Region, Status, TransferPlan, View, Worker, plan_reads
from kvplan_nixl import UCX, NixlExecutor, NixlTransfer, settle
from kvplan_nixl.backends import UCX_OPTIONS
from kvplan_nixl.cma import Process, is_enabled, may_copy

BLOCKS, BLOCK_BYTES = 16384, 8192
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def by_cma(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX moves bytes between two processes by CMA, as it does by default."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # other interfaces come and go, as those of tests/nixl/test_backends.py


def worker(engine: str) -> Worker:
    """A worker with many blocks of one tensor, 128 MiB."""
    axes = (Axis("token", 0, 4, 4, BLOCK_BYTES // 4), Axis("dim", 0, 2048, 2048, 1))
    region = Region("kv", 1 << 40, BLOCKS * BLOCK_BYTES)
    view = View("mla", "attn", region, "uint8", axes, BLOCKS, BLOCK_BYTES)
    return Worker(engine, 0, (region,), (Group("attn", 4),), (view,))


@attrs.define
class Reader:
    """This process, which reads scattered blocks of another one into all of its own."""

    memory: np.ndarray
    executor: NixlExecutor
    plan: TransferPlan
    order: np.ndarray

    def start(self, num_blocks: int = BLOCKS) -> NixlTransfer:
        """Start to read."""
        local, remote = Blocks(range(num_blocks)), Blocks(self.order[:num_blocks])
        (spec,) = self.plan.bind(local={"attn": local}, remote={"attn": remote}, tokens=(0, 4 * num_blocks))
        return self.executor.start(spec, "request")

    def num_written(self) -> int:
        """Return how many blocks are no zeros. No byte of the other process is 0."""
        return int(self.memory.reshape(BLOCKS, -1)[:, [0, -1]].any(axis=1).sum())


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    """A process to read from."""
    with PeerProcess(worker("prefill"), UCX) as process:
        yield process


@pytest.fixture
def reader(peer: PeerProcess) -> Iterator[Reader]:
    """A worker of this process, with a plan to read from the peer, whose connection is warm."""
    local, memory = placed(worker("decode"))
    with NixlExecutor(local) as executor:
        plan = plan_reads(local, [executor.connect(peer.ask("envelope"))])
        executor.prepare(plan)
        there = Reader(memory["kv"].numpy(), executor, plan, np.random.default_rng(1).permutation(BLOCKS))
        assert settle(executor, [there.start(num_blocks=1)], TIMEOUT_S)
        yield there


def failed_read(peer: PeerProcess, reader: Reader) -> NixlTransfer:
    """Return a read that fails, since its source has closed.

    While NIXL has not noticed that, reads are whole, and another is begun.
    """
    peer.ask("close")
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        transfer = reader.start()
        while reader.executor.poll(transfer) is Status.RUNNING and transfer.error is None:
            assert time.monotonic() < until, "a read does not end"
            time.sleep(0.001)
        if transfer.error is not None:
            return transfer
    raise AssertionError("no read has failed")


def test_all_bytes(peer: PeerProcess, reader: Reader) -> None:
    transfer = reader.start()
    assert settle(reader.executor, [transfer], TIMEOUT_S)
    expected = pattern(worker("prefill"), "kv").reshape(BLOCKS, -1)[reader.order]
    assert np.array_equal(reader.memory, expected.reshape(-1))


def test_a_read_that_fails_is_held_until_its_source_has_ended(peer: PeerProcess, reader: Reader) -> None:
    """Copies go on for a while, and may until then: the blocks stay out of use."""
    transfer = failed_read(peer, reader)
    assert not settle(reader.executor, [transfer], 0.2)
    assert transfer.error is not None
    (lost,) = reader.executor.peers
    assert not lost.is_connected
    assert reader.start().status is Status.FAILED  # nothing is posted to a peer that is lost
    peer.kill()
    assert settle(reader.executor, [transfer], TIMEOUT_S)
    assert (transfer.status, transfer.error.code) == (Status.FAILED, "PEER")
    reader.executor.release(transfer)


def test_nothing_lands_once_it_has_failed(peer: PeerProcess, reader: Reader) -> None:
    """The source closes while NIXL posts, and is killed while copies are under way, which else would land."""
    peer.channel.send(("close",))
    transfer = reader.start()
    if not transfer.status.is_settled:
        peer.kill()
    assert settle(reader.executor, [transfer], TIMEOUT_S)
    before = reader.num_written()
    time.sleep(0.3)
    assert before == reader.num_written()


def test_a_cancelled_read_is_held_too(peer: PeerProcess, reader: Reader) -> None:
    """A worker that is disconnected by force stays in NIXL until its transfers have ended."""
    transfer = failed_read(peer, reader)
    reader.executor.disconnect(worker("prefill"), force=True)
    assert reader.executor.poll(transfer) is Status.RUNNING
    peer.kill()
    assert settle(reader.executor, [transfer], TIMEOUT_S)
    assert transfer.status is Status.CANCELLED


def test_close_ends_what_is_held(peer: PeerProcess, reader: Reader) -> None:
    transfer = failed_read(peer, reader)
    reader.executor.close()
    assert transfer.status is Status.CANCELLED
    before = reader.num_written()
    time.sleep(0.3)
    assert before == reader.num_written()


def test_a_source_out_of_sight_holds_nothing(
    peer: PeerProcess, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX does not copy from processes of other hosts, or of other PID namespaces."""
    here = Process.current()
    assert here is not None
    monkeypatch.setattr(reader.executor, "_process", attrs.evolve(here, boot="0" * 32))
    assert failed_read(peer, reader).status is Status.FAILED


@pytest.mark.parametrize(
    ("options", "listed", "expected"),
    [
        ({}, None, True),
        ({"engine_config": UCX_OPTIONS}, None, True),
        ({"engine_config": UCX_OPTIONS}, "tcp", False),
        ({"engine_config": "TLS=^cma,TCP_SYN_CNT=3"}, None, False),
        ({"engine_config": "TLS=^cma,TCP_SYN_CNT=3"}, "all", True),
        ({}, "tcp", False),
        ({}, "tcp,cuda_copy", False),
        ({}, "tcp,sm", True),
        ({}, "rc,shm,cuda", True),
        ({}, "self,cma", True),
        ({}, "^sm", False),
        ({}, "^cma,tcp", False),
        ({}, "^tcp", True),
    ],
)
def test_settings_of_ucx(options: dict[str, str], listed: str | None, expected: bool) -> None:
    assert is_enabled(options, {} if listed is None else {"UCX_TLS": listed}) is expected


def test_a_process_has_ended() -> None:
    """As soon as no thread of it is left, whether or not its parent has asked for it, and not before."""
    here = Process.current()
    assert here is not None
    assert not here.has_ended()
    assert here.shares_host(here)
    assert not here.shares_host(attrs.evolve(here, boot="0" * 32))
    assert not here.shares_host(attrs.evolve(here, pid_namespace=1))
    # a later process with its number
    assert attrs.evolve(here, start_ticks=here.start_ticks - 1).has_ended()
    program = "import sys; from kvplan_nixl.cma import Process; print(Process.current(), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        process = Process.of_agent(f"prefill.0.{child.stdout.readline().strip()}.a1")
        assert process is not None
        assert (process.pid, process.shares_host(here), process.has_ended()) == (child.pid, True, False)
        child.kill()
        # its parent has not asked for it, so its number is taken
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.has_ended()
    assert process.has_ended()


def test_a_process_that_the_system_does_not_tell_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has not ended, and UCX may copy from it."""
    here = Process.current()
    assert here is not None
    with monkeypatch.context() as patches:
        patches.setattr("kvplan_nixl.cma.PROC", tmp_path)
        assert Process.current() is None
        local, _ = placed(worker("decode"))
        with NixlExecutor(local) as executor:
            assert Process.of_agent(executor._agent.name) is None
    assert may_copy(None, here)
    assert may_copy(here, Process.of_agent("prefill.0.0123456789abcdef"))

    def refuse(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not here.has_ended()
