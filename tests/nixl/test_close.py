"""After close nothing of NIXL runs, whatever the caller keeps. Each test is a process, which a late write would end."""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from benchmarks.held import running_threads
from benchmarks.real_memory import PeerProcess, forkserver
from kvplan import Axis, Blocks, Group, KVPlanError, Region, Status, TransferPlan, View, Worker, plan_reads
from kvplan_nixl import UCX, Envelope, NixlExecutor, settle

BLOCKS, BLOCK_BYTES = 2048, 4096
SIZE = BLOCKS * BLOCK_BYTES
TIMEOUT_S = 60.0


def worker(engine: str, *addresses: int) -> Worker:
    """A worker with one tensor of many blocks, and a region at each address."""
    axes = (Axis("token", 0, 4, 4, BLOCK_BYTES // 4), Axis("dim", 0, 1024, 1024, 1))
    regions = [Region(f"kv.{i}", address, SIZE) for i, address in enumerate(addresses or (1 << 40,))]
    view = View("mla", "attn", regions[0], "uint8", axes, BLOCKS, BLOCK_BYTES)
    return Worker(engine, 0, regions, (Group("attn", 4),), (view,))


def mapped() -> tuple[mmap.mmap, int]:
    """Memory that can be unmapped, and its address."""
    memory = mmap.mmap(-1, SIZE)
    return memory, int(np.frombuffer(memory, np.uint8).ctypes.data)


def succeeds(run: Callable[[], None]) -> None:
    """Run a function in a process of its own, over TCP."""
    process = forkserver().Process(target=over_tcp, args=(run,))
    process.start()
    process.join(TIMEOUT_S)
    process.kill()
    assert process.exitcode == 0


def over_tcp(run: Callable[[], None]) -> None:
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    run()


def connected(executor: NixlExecutor, peer: PeerProcess) -> TransferPlan:
    """A plan to read from a peer, of which some blocks were read."""
    plan = plan_reads(executor.worker, [executor.connect(peer.ask("envelope"))])
    executor.prepare(plan)
    first = start(executor, plan, 4)
    assert settle(executor, [first], TIMEOUT_S)
    executor.release(first)
    return plan


def start(executor: NixlExecutor, plan: TransferPlan, blocks: int = BLOCKS) -> Any:
    """Start to read all blocks, or some."""
    tables = {"attn": Blocks(np.arange(blocks))}
    (spec,) = plan.bind(local=tables, remote=tables, tokens=(0, 4 * blocks))
    return executor.start(spec, "request")


def raised(call: Callable[..., Any], *arguments: Any) -> KVPlanError:
    """The error of a call, with its traceback."""
    try:
        call(*arguments)
    except KVPlanError as error:
        return error
    raise AssertionError("no error")


def close_and_keep_all_errors() -> None:
    """Keep every kind of error and transfer, close, unmap the memory, and let a suspended peer go on."""
    gc.disable()
    NixlExecutor(worker("decode", mapped()[1])).close()  # UCX keeps a thread of its own from the first agent on
    before = running_threads()
    memory, address = mapped()
    executor = NixlExecutor(worker("decode", address))
    with PeerProcess(worker("prefill"), UCX) as peer, PeerProcess(worker("other"), UCX) as dead:
        plan, lost = connected(executor, peer), connected(executor, dead)
        forged = attrs.evolve(Envelope.unpack(dead.ask("envelope")), metadata=b"metadata")
        forged = attrs.evolve(forged, worker=worker("third"), agent="third.0.a1")
        boast = attrs.evolve(plan.remotes[0], regions=(Region("kv.0", 1 << 45, SIZE),))
        kept: list[Any] = [raised(executor.connect, forged.pack())]
        dead.kill()
        failed = start(executor, lost)
        assert settle(executor, [failed], TIMEOUT_S)
        assert failed.status is Status.FAILED
        kept += [failed, failed.error, start(executor, lost), raised(executor.disconnect, worker("nobody"))]
        kept += [raised(executor.prepare, plan_reads(executor.worker, [boast]))]
        peer.stop()
        running = start(executor, plan)
        assert executor.poll(running) is Status.RUNNING
        kept += [running, raised(executor.release, running), raised(executor.disconnect, plan.remotes[0])]
        executor.close()
        assert running.status is Status.CANCELLED
        assert running_threads() <= before
        memory.close()
        peer.resume()
        time.sleep(1)
    assert len(kept) == 9


def test_nothing_runs_after_close() -> None:
    """No error and no transfer that the caller keeps holds NIXL, and no byte is written to memory that is gone."""
    succeeds(close_and_keep_all_errors)


def register_one_range_twice() -> None:
    """Regions that are equal, within each other or overlap, also of an attached worker, move bytes and are closed."""
    memory, address = mapped()
    values = np.frombuffer(memory, np.uint8)
    half = SIZE // 2
    (whole,) = worker("decode", address).regions
    parts = [
        Region("equal", address, SIZE),
        Region("within", address + 64, 64),
        Region("begin", address, half),
        Region("end", address + half - 64, half + 64),
    ]
    local = attrs.evolve(worker("decode", address), regions=(whole, *parts))
    source = attrs.evolve(worker("prefill", address), regions=(whole, Region("more", address + 64, 64)))
    values[half:] = 7
    with NixlExecutor(local) as executor:
        for _ in range(2):
            executor.attach(source)
            plan = plan_reads(local, [source])
            executor.prepare(plan)
            near, far = Blocks([3]), Blocks([BLOCKS - 1])
            (spec,) = plan.bind(local={"attn": near}, remote={"attn": far}, tokens=(0, 4))
            transfer = executor.start(spec, "request")
            assert settle(executor, [transfer], TIMEOUT_S)
            assert transfer.status is Status.DONE
            executor.release(transfer)
            executor.disconnect(source)
        beyond = worker("prefill", address + half)
        error = raised(executor.attach, beyond)
        assert (error.code, error.hint) == ("BACKEND", "register the whole allocation first")
    assert values[3 * BLOCK_BYTES : 4 * BLOCK_BYTES].all()
    assert not values[4 * BLOCK_BYTES : half].any()


def test_a_range_is_registered_once() -> None:
    """NIXL would end the process when it deregisters two equal ranges."""
    succeeds(register_one_range_twice)


def test_an_executor_that_cannot_be_made() -> None:
    """An executor whose memory is refused leaves nothing behind, though its error is kept."""
    NixlExecutor(worker("decode", mapped()[1])).close()
    before = running_threads()
    error = raised(NixlExecutor, Worker("offload", 0, [Region("file", 0, 4096, "FILE", 0)], (), ()))
    assert error.code == "BACKEND"
    assert running_threads() <= before
