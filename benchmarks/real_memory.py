"""Workers in real memory with NIXL executors: several in this process, or one in a process of its own."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from benchmarks.held import running_threads
from kvplan import Blocks, Executor, Region, Status, Transfer, Worker, plan_writes
from kvplan.testing.executors import Bytes
from kvplan_nixl import UCX, NixlExecutor, settle
from kvplan_nixl.backends import Backends

TIMEOUT_S = 60.0

Key = tuple[str, int]
Memory = dict[str, Any]
"""One tensor of bytes for each region, by name."""


def synchronized(device: str) -> None:
    """Wait until torch has finished its work on a device. NIXL does not wait for it."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def placed(worker: Worker, device: str = "cpu") -> tuple[Worker, Memory]:
    """A worker whose regions are zeros in memory of a device, as torch names it, and that memory.

    The memory lives as long as the worker, whether or not the caller keeps it. The device becomes torch's present one,
    as UCX wants it before an executor is made.
    """
    if device != "cpu":
        torch.cuda.set_device(device)
    memory: Memory = {
        region.name: torch.zeros(region.size_bytes, dtype=torch.uint8, device=device) for region in worker.regions
    }
    synchronized(device)
    index = torch.device(device).index or 0
    kind = "DRAM" if device == "cpu" else "VRAM"
    regions = [
        attrs.evolve(region, address=memory[region.name].data_ptr(), memory=kind, device_id=index)
        for region in worker.regions
    ]
    placed_worker = attrs.evolve(worker, regions=regions)
    # holds the memory, which the worker names only by address
    weakref.finalize(placed_worker, lambda memory: None, memory)
    return placed_worker, memory


def pattern(worker: Worker, region: str) -> Any:
    """Random bytes for a region, none of them 0, which depend on its name and size alone."""
    (size,) = (candidate.size_bytes for candidate in worker.regions if candidate.name == region)
    return np.random.default_rng([*region.encode()]).integers(1, 256, size, np.uint8)


def fill(worker: Worker, memory: Mapping[str, Any], device: str) -> None:
    """Write :func:`pattern` to all regions."""
    for name, tensor in memory.items():
        tensor.copy_(torch.from_numpy(pattern(worker, name)))
    synchronized(device)


def digests(memory: Mapping[str, Any]) -> dict[str, str]:
    """A hash of the bytes of each region."""
    return {name: hashlib.sha256(tensor.cpu().numpy()).hexdigest() for name, tensor in memory.items()}


class NixlCluster:
    """A :class:`kvplan.testing.executors.Cluster` of NIXL executors in memory of one device, all in this process.

    Each executor connects to those workers of other engines that ``contacts`` lists, by default to all of them.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        device: str = "cpu",
        backends: Backends = UCX,
        contacts: Mapping[Key, Sequence[Key]] | None = None,
    ) -> None:
        self.device = device
        self.workers: list[Worker] = []
        self.memory: dict[Key, Memory] = {}
        for worker in workers:
            placed_worker, self.memory[worker.key] = placed(worker, device)
            self.workers.append(placed_worker)
        self.nixl = {worker.key: NixlExecutor(worker, backends) for worker in self.workers}
        self.executors: dict[Key, Executor] = dict(self.nixl)
        envelopes = {key: executor.envelope() for key, executor in self.nixl.items()}
        for key, executor in self.nixl.items():
            for peer, envelope in envelopes.items():
                if peer[0] != key[0] and (contacts is None or peer in contacts[key]):
                    executor.connect(envelope)

    def __enter__(self) -> NixlCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self.nixl.values():
            executor.close()

    def read(self, worker: Worker, region: Region) -> Bytes:
        """A copy of all bytes of a region."""
        values: Bytes = self.memory[worker.key][region.name].cpu().numpy().copy()
        return values

    def write(self, worker: Worker, region: Region, values: Bytes) -> None:
        """Set all bytes of a region."""
        self.memory[worker.key][region.name].copy_(torch.from_numpy(np.ascontiguousarray(values)))
        synchronized(self.device)

    def lose(self, worker: Worker) -> None:
        """Close the executor of a worker."""
        self.nixl[worker.key].close()


def serve(
    channel: Connection,
    worker: Worker,
    backends: Mapping[str, Mapping[str, str]],
    environment: Mapping[str, str],
    device: str,
    begin: Callable[[], None] | None,
) -> None:
    """The other process: fill the worker's memory with :func:`pattern`, then obey commands."""
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        del os.environ[name]  # inherited from the first process of the forkserver
    os.environ.update(environment)
    if begin is not None:
        begin()
    here, memory = placed(worker, device)
    fill(worker, memory, device)
    executor = NixlExecutor(here, backends)
    written: list[Transfer] = []

    def write(envelope: bytes, blocks: int, wait: bool) -> Status:
        """Write the first blocks to those of a worker with one group, and perhaps wait until they are there."""
        plan = plan_writes(here, [executor.connect(envelope)])
        executor.prepare(plan)
        tables = {group.name: Blocks(range(blocks)) for group in here.groups}
        tokens_per_block = here.groups[0].tokens_per_block
        assert tokens_per_block is not None
        (spec,) = plan.bind(local=tables, remote=tables, tokens=(0, blocks * tokens_per_block))
        written.append(executor.start(spec, "request"))
        if wait:
            settle(executor, written, TIMEOUT_S)
        return written[-1].status

    def clear() -> None:
        for tensor in memory.values():
            tensor.zero_()
        synchronized(device)

    commands: dict[str, Callable[..., Any]] = {
        "envelope": executor.envelope,
        "clear": clear,
        "digests": lambda: digests(memory),
        "write": write,
        "connect": lambda envelope: executor.connect(envelope) and None,
        "deregister": lambda: executor._agent.deregister(executor._agent._registered.elements()),
        "close": executor.close,
    }
    while True:
        command, *arguments = channel.recv()
        channel.send(commands[command](*arguments))


def forkserver() -> ForkServerContext:
    """A context whose processes start with NIXL imported and unused."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class PeerProcess:
    """A remote worker in a process of its own, which a caller commands, stops and kills.

    The process calls ``begin`` first. The commands are those of :func:`serve`.
    """

    def __init__(
        self, worker: Worker, backends: Backends, device: str = "cpu", begin: Callable[[], None] | None = None
    ) -> None:
        context = forkserver()
        self.channel, peer_channel = context.Pipe()
        plain = {name: dict(options) for name, options in backends.items()}
        environment = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
        arguments = (peer_channel, worker, plain, environment, device, begin)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, *command: Any) -> Any:
        """Send a command, and return the process's answer."""
        self.channel.send(command)
        assert self.channel.poll(TIMEOUT_S), f"no answer to {command[0]}"
        return self.channel.recv()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Suspend the process, and wait until all its threads are: one that is not yet may still serve reads."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + TIMEOUT_S
        while not self._is_suspended():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _is_suspended(self) -> bool:
        """Return whether each thread of the process is in state T, the field after its name in /proc."""
        threads = [
            Path(f"/proc/{self.process.pid}/task/{thread}/stat") for thread in running_threads(self.process.pid or 0)
        ]
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads)

    def resume(self) -> None:
        """Resume the suspended process."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, as kill -9 does."""
        self.process.kill()
        self.process.join(TIMEOUT_S)
