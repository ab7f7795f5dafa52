"""Transfers whose peer dies, hangs or restarts. They go over TCP, which takes long enough to interrupt."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import attrs
import numpy as np
import pytest

from benchmarks.real_memory import PeerProcess, pattern, placed
from kvplan import (
    Axis,
    Blocks,
    Group,
    KVPlanError,
    Region,
    Status,
    Transfer,
    TransferPlan,
    View,
    Worker,
    plan_reads,
)
from kvplan_nixl import UCX, NixlExecutor, NixlTransfer, Peer, settle

BLOCKS, BLOCK_BYTES = 2048, 4096
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX moves bytes between two processes by TCP."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # other interfaces come and go, as those of tests/nixl/test_backends.py


def worker(engine: str, rank: int = 0) -> Worker:
    """A worker with many blocks of one tensor, 8 MiB."""
    axes = (Axis("token", 0, 4, 4, BLOCK_BYTES // 4), Axis("dim", 0, 1024, 1024, 1))
    region = Region("kv", 1 << 40, BLOCKS * BLOCK_BYTES)
    return Worker(
        engine, rank, (region,), (Group("attn", 4),), (View("mla", "attn", region, "uint8", axes, BLOCKS, BLOCK_BYTES),)
    )


@attrs.define
class Reader:
    """This process: a worker that reads, its memory, and its executor."""

    worker: Worker
    memory: np.ndarray
    executor: NixlExecutor
    order: np.ndarray

    def plan(self, peer: PeerProcess) -> TransferPlan:
        """Connect to a peer and prepare to read from it."""
        source = self.executor.connect(peer.ask("envelope"))
        plan = plan_reads(self.worker, [source])
        self.executor.prepare(plan)
        return plan

    def start(self, plan: TransferPlan, blocks: int = BLOCKS, request: str = "request") -> Transfer:
        """Start to read scattered blocks of the peer into the first ``blocks`` of this worker."""
        local, remote = Blocks(np.arange(blocks)), Blocks(self.order[:blocks])
        (spec,) = plan.bind(local={"attn": local}, remote={"attn": remote}, tokens=(0, 4 * blocks))
        return self.executor.start(spec, request)

    def right(self, blocks: int) -> bool:
        """Whether the first ``blocks`` hold those of the peer, and all others 0."""
        expected = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        expected[:blocks] = pattern(worker("prefill"), "kv").reshape(BLOCKS, -1)[self.order[:blocks]]
        return np.array_equal(self.memory, expected.reshape(-1))

    def is_left_alone(self) -> bool:
        """Clear all memory, and return whether it stays 0 for a while."""
        self.memory[:] = 0
        time.sleep(0.5)
        return not self.memory.any()


@pytest.fixture
def reader() -> Iterator[Reader]:
    """A worker of this process."""
    there, memory = placed(worker("decode"))
    with NixlExecutor(there) as executor:
        yield Reader(there, memory["kv"].numpy(), executor, np.random.default_rng(1).permutation(BLOCKS))


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    """A process to read from."""
    with PeerProcess(worker("prefill"), UCX) as process:
        yield process


def failed(transfer: Transfer) -> str:
    """The code of a failed transfer's error."""
    assert transfer.status is Status.FAILED
    assert transfer.error is not None
    return transfer.error.code


def test_a_peer_killed_before(reader: Reader, peer: PeerProcess) -> None:
    """A transfer with a process that was killed is FAILED, and so is every later one."""
    plan = reader.plan(peer)
    assert settle(reader.executor, [reader.start(plan, 10)], TIMEOUT_S)
    peer.kill()
    first = reader.start(plan)
    assert settle(reader.executor, [first], TIMEOUT_S)
    assert failed(first) == "PEER"
    assert failed(reader.start(plan)) == "PEER"
    assert reader.is_left_alone()


def test_a_peer_killed_during(reader: Reader, peer: PeerProcess) -> None:
    """A transfer whose peer is killed halfway is FAILED, and nothing is written from then on."""
    plan = reader.plan(peer)
    assert settle(reader.executor, [reader.start(plan, 10)], TIMEOUT_S)
    peer.stop()
    transfers = [reader.start(plan), reader.start(plan, request="another")]
    assert [reader.executor.poll(transfer) for transfer in transfers] == [Status.RUNNING] * 2
    peer.kill()
    assert settle(reader.executor, transfers, TIMEOUT_S)
    assert [failed(transfer) for transfer in transfers] == ["PEER"] * 2
    assert reader.is_left_alone()


def test_a_peer_killed_after(reader: Reader, peer: PeerProcess) -> None:
    """A transfer that was DONE stays so, and can be released."""
    transfer = reader.start(reader.plan(peer))
    assert settle(reader.executor, [transfer], TIMEOUT_S)
    peer.kill()
    assert reader.executor.poll(transfer) is Status.DONE
    assert reader.right(BLOCKS)
    reader.executor.release(transfer)
    reader.executor.disconnect(worker("prefill"))


def test_another_peer_is_not_concerned(reader: Reader, peer: PeerProcess) -> None:
    """When one peer dies, a transfer with another one still completes."""
    with PeerProcess(worker("other"), UCX) as other:
        plans = reader.plan(peer), reader.plan(other)
        for plan in plans:
            assert settle(reader.executor, [reader.start(plan, 10)], TIMEOUT_S)
        peer.stop()
        lost, other_one = (reader.start(plan) for plan in plans)
        peer.kill()
        assert settle(reader.executor, [lost, other_one], TIMEOUT_S)
        assert failed(lost) == "PEER"
        assert other_one.status is Status.DONE


def test_a_peer_that_came_back(reader: Reader, peer: PeerProcess) -> None:
    """A process that replaces a killed one is another peer, to connect, plan and prepare again."""
    plan = reader.plan(peer)
    assert settle(reader.executor, [reader.start(plan, 10)], TIMEOUT_S)
    peer.kill()
    with PeerProcess(worker("prefill"), UCX) as second:
        envelope = second.ask("envelope")
        with pytest.raises(KVPlanError, match=r"PEER: cannot connect prefill/0: .* \(disconnect it first\)"):
            reader.executor.connect(envelope)  # the executor has not noticed yet that the first one is gone
        lost = reader.start(plan)
        assert settle(reader.executor, [lost], TIMEOUT_S)
        assert failed(lost) == "PEER"
        reader.executor.connect(envelope)
        with pytest.raises(KVPlanError, match="TRANSFER: cannot start a transfer with prefill/0"):
            reader.start(plan)
        reader.executor.disconnect(worker("prefill"))
        transfer = reader.start(reader.plan(second))
        assert settle(reader.executor, [transfer], TIMEOUT_S)
        assert transfer.status is Status.DONE
        assert reader.right(BLOCKS)


def test_an_envelope_of_a_process_that_is_gone(reader: Reader, peer: PeerProcess) -> None:
    """It is refused, or transfers with it fail, whichever NIXL notices first. Later the worker can connect."""
    envelope = peer.ask("envelope")
    peer.kill()
    try:
        source = reader.executor.connect(envelope)
    except KVPlanError as error:
        assert error.code == "PEER"
        assert not reader.executor.peers
    else:
        plan = plan_reads(reader.worker, [source])
        reader.executor.prepare(plan)
        transfer = reader.start(plan)
        assert settle(reader.executor, [transfer], TIMEOUT_S)
        assert failed(transfer) == "PEER"
    with PeerProcess(worker("prefill"), UCX) as second:
        assert settle(reader.executor, [reader.start(reader.plan(second), 10)], TIMEOUT_S)


def test_a_peer_that_hangs(reader: Reader, peer: PeerProcess) -> None:
    """A stuck transfer is waited for as long as the caller asks, and holds its memory until it has ended."""
    plan = reader.plan(peer)
    assert settle(reader.executor, [reader.start(plan, 10)], TIMEOUT_S)
    peer.stop()
    transfer = reader.start(plan)
    began = time.monotonic()
    assert not settle(reader.executor, [transfer], 1.0)
    assert time.monotonic() - began >= 1.0
    reader.executor.cancel(transfer)
    assert reader.executor.poll(transfer) is Status.RUNNING
    with pytest.raises(KVPlanError, match="TRANSFER: cannot release"):
        reader.executor.release(transfer)
    with pytest.raises(KVPlanError, match="TRANSFER: cannot disconnect prefill/0"):
        reader.executor.disconnect(worker("prefill"))
    peer.resume()
    assert settle(reader.executor, [transfer], TIMEOUT_S)
    assert transfer.status is Status.CANCELLED
    reader.executor.release(transfer)
    assert reader.is_left_alone()


def test_a_peer_that_hangs_is_removed_by_force(reader: Reader, peer: PeerProcess) -> None:
    """Another process takes its name and serves requests. The old transfer runs until NIXL reports its end."""
    plan = reader.plan(peer)
    assert settle(reader.executor, [reader.start(plan, 10)], TIMEOUT_S)
    peer.stop()
    old = reader.start(plan, request="old")
    assert reader.executor.poll(old) is Status.RUNNING
    reader.executor.disconnect(worker("prefill"), force=True)
    assert not reader.executor.peers
    with PeerProcess(worker("prefill"), UCX) as second:
        new = reader.plan(second)
        transfer = reader.start(new)
        assert settle(reader.executor, [transfer], TIMEOUT_S)
        assert transfer.status is Status.DONE
        assert reader.executor.poll(old) is Status.RUNNING
        with pytest.raises(KVPlanError, match="TRANSFER: cannot release"):
            reader.executor.release(old)
        peer.resume()
        assert settle(reader.executor, [old], TIMEOUT_S)
        assert (old.status, old.error) == (Status.CANCELLED, None)
        reader.executor.release(old)
        assert not reader.executor._disconnected
        assert reader.is_left_alone()
        transfer = reader.start(new)
        assert settle(reader.executor, [transfer], TIMEOUT_S)
        assert reader.right(BLOCKS)


def test_a_peer_that_dies_after_it_was_removed(reader: Reader, peer: PeerProcess) -> None:
    """The end of the old process does not concern the one that has its name now."""
    plan = reader.plan(peer)
    assert settle(reader.executor, [reader.start(plan, 10)], TIMEOUT_S)
    peer.stop()
    old = reader.start(plan)
    reader.executor.disconnect(worker("prefill"), force=True)
    with PeerProcess(worker("prefill"), UCX) as second:
        new = reader.plan(second)
        peer.kill()
        assert settle(reader.executor, [old], TIMEOUT_S)
        assert old.status is Status.CANCELLED
        assert [each.is_connected for each in reader.executor.peers] == [True]
        transfer = reader.start(new)
        assert settle(reader.executor, [transfer], TIMEOUT_S)
        assert transfer.status is Status.DONE


def test_peers_and_their_state(reader: Reader, peer: PeerProcess) -> None:
    """Peers are listed, with the error of those that are lost."""
    with NixlExecutor(reader.worker) as executor:
        reader.executor = executor
        plan = reader.plan(peer)
        assert executor.peers == (Peer(plan.remotes[0]),)
        assert executor.peers[0].is_connected
        peer.kill()
        transfers = [reader.start(plan), reader.start(plan)]
        assert settle(executor, transfers, TIMEOUT_S)
        (lost,) = executor.peers
        assert not lost.is_connected
        assert str(lost).startswith("prefill/0 lost: PEER: cannot ")
        executor.disconnect(worker("prefill"))
        assert not executor.peers


def test_starts_with_a_lost_peer_leave_nothing_behind(reader: Reader, peer: PeerProcess) -> None:
    """Each start fails with its own error, which keeps no other transfer alive if it is raised."""
    plan = reader.plan(peer)
    peer.kill()
    assert settle(reader.executor, [reader.start(plan)], TIMEOUT_S)
    gc.collect()
    gc.disable()
    try:
        num_before = num_transfers()
        for _ in range(100):
            transfer = reader.start(plan)
            assert failed(transfer) == "PEER"
            with pytest.raises(KVPlanError):
                raise transfer.error  # type: ignore[misc]
        assert num_transfers() - num_before < 10
    finally:
        gc.enable()


def num_transfers() -> int:
    """How many transfers are in the memory of this process."""
    return sum(type(each) is NixlTransfer for each in gc.get_objects())


def test_an_executor_closed_under_a_transfer(reader: Reader, peer: PeerProcess) -> None:
    """After close, a suspended peer writes nothing when it resumes, so all blocks can be reused.

    UCX over TCP ends the process of a peer that resumes and finds its reader closed or killed. A peer that was not
    suspended lives on.
    """
    plan = reader.plan(peer)
    assert settle(reader.executor, [reader.start(plan, 10)], TIMEOUT_S)
    peer.stop()
    transfer = reader.start(plan)
    assert reader.executor.poll(transfer) is Status.RUNNING
    reader.executor.close()
    assert transfer.status is Status.CANCELLED
    peer.resume()
    assert reader.is_left_alone()


def test_a_peer_that_has_closed(reader: Reader, peer: PeerProcess) -> None:
    """A transfer with a peer that has deregistered its memory and closed its agent fails."""
    plan = reader.plan(peer)
    assert settle(reader.executor, [reader.start(plan, 10)], TIMEOUT_S)
    peer.ask("close")
    transfer = reader.start(plan)
    assert settle(reader.executor, [transfer], TIMEOUT_S)
    assert failed(transfer) == "PEER"
    assert reader.is_left_alone()


@pytest.mark.parametrize("what", ["deregister", "close"])
def test_memory_deregistered_under_a_transfer(reader: Reader, peer: PeerProcess, what: str) -> None:
    """A transfer whose peer deregisters its memory meanwhile settles: with right bytes, or with an error."""
    plan = reader.plan(peer)
    assert settle(reader.executor, [reader.start(plan, 10)], TIMEOUT_S)
    peer.stop()
    transfer = reader.start(plan)
    assert reader.executor.poll(transfer) is Status.RUNNING
    peer.channel.send((what,))
    peer.resume()
    assert settle(reader.executor, [transfer], TIMEOUT_S)
    if transfer.status is Status.DONE:
        assert reader.right(BLOCKS)
    else:
        assert failed(transfer) in ("PEER", "TRANSFER")
    reader.executor.release(transfer)
    assert reader.is_left_alone()


@pytest.mark.parametrize("backend", ["CARRIER_PIGEON", "GDS"])
def test_a_backend_that_is_not_there(backend: str) -> None:
    """A backend that NIXL lacks, or that does not work on this machine, is refused by name."""
    there, _ = placed(worker("decode"))
    with pytest.raises(KVPlanError, match="BACKEND: cannot make a NIXL agent") as caught:
        NixlExecutor(there, {backend: {}})
    assert backend in str(caught.value)


def test_memory_that_no_backend_takes() -> None:
    """A file is refused where UCX is the only backend."""
    there = Worker("offload", 0, (Region("kv", 0, 4096, "FILE", 0),), (), ())
    with pytest.raises(KVPlanError, match="BACKEND: cannot register FILE memory"):
        NixlExecutor(there)
