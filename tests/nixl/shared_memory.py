"""A stand-in for CUDA IPC: memory of one process that others map, by memfd, and workers in it.

As with CUDA, a mapping outlives the process that made the memory, and memory that was not made for it has no handle.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs
import numpy as np

from benchmarks.real_memory import TIMEOUT_S, forkserver
from kvplan import Executor, KVPlanError, Region, Worker
from kvplan.describe.worker import Key
from kvplan.staging.copy_plan import BoundCopy, PairCopy
from kvplan.testing.executors import Bytes
from kvplan_nixl.cma import Process
from kvplan_nixl.kernel import Copies
from kvplan_nixl.mapped import MakeCopies, MappedExecutor, copies_between
from kvplan_nixl.mapping import Mapped


class MemfdMapper:
    """Maps memory that :meth:`allocate` made, here or in another process."""

    kind = "memfd"

    def __init__(self) -> None:
        self.memory: dict[int, tuple[int, mmap.mmap]] = {}
        self.num_open = 0

    def allocate(self, size: int) -> int:
        """Return the address of new memory, of zeros."""
        descriptor = os.memfd_create("region")
        os.ftruncate(descriptor, size)
        shared = mmap.mmap(descriptor, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        self.memory[address] = (descriptor, shared)
        return address

    def free(self) -> None:
        """Unmap all memory that was made here."""
        while self.memory:
            _, (descriptor, shared) = self.memory.popitem()
            os.close(descriptor)
            shared.close()

    def _start(self, region: Region) -> int | None:
        """Where the memory begins that a region is in."""
        for start, (_, shared) in self.memory.items():
            if start <= region.address and region.end <= start + len(shared):
                return start
        return None

    def why_not(self, region: Region) -> str:
        return "private memory" if self._start(region) is None else ""

    def export(self, region: Region) -> bytes:
        start = self._start(region)
        assert start is not None
        descriptor, shared = self.memory[start]
        place = {"offset": region.address - start, "size": len(shared)}
        return json.dumps({"pid": os.getpid(), "descriptor": descriptor, **place}).encode()

    def open(self, handle: bytes, process: Process) -> Mapped:
        try:
            values = json.loads(handle)
            assert values["pid"] == process.pid
            descriptor = os.open(f"/proc/{values['pid']}/fd/{values['descriptor']}", os.O_RDWR)
        except (OSError, ValueError, KeyError) as error:
            expected = "memory of another process"
            raise KVPlanError("MEMORY", "map memory", expected=expected, got=repr(error)) from None
        shared = mmap.mmap(descriptor, values["size"])
        os.close(descriptor)
        self.num_open += 1
        view = ctypes.c_char.from_buffer(shared)
        address = ctypes.addressof(view)
        # mmap refuses to unmap memory that a view is on
        views = [view]
        del view

        def close() -> None:
            views.clear()
            shared.close()
            self.num_open -= 1

        return Mapped(address + values["offset"], values["size"] - values["offset"], close)


def in_shared_memory(worker: Worker, mapper: MemfdMapper) -> Worker:
    """Return a worker with regions in memory of a mapper."""
    regions = [attrs.evolve(region, address=mapper.allocate(region.size_bytes)) for region in worker.regions]
    return attrs.evolve(worker, regions=regions)


def array_of(region: Region) -> Any:
    """Return the bytes of a region."""
    memory = (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
    return np.ctypeslib.as_array(memory)


def filled(worker: Worker, seed: int = 1) -> None:
    """Fill all regions with bytes that depend on the seed."""
    random = np.random.default_rng(seed)
    for region in worker.regions:
        array_of(region)[:] = random.integers(1, 256, region.size_bytes, np.uint8)


class MappedCluster:
    """A :class:`kvplan.testing.executors.Cluster` of executors that map each other's memory, all in this process."""

    def __init__(self, workers: Sequence[Worker], make_copies: MakeCopies = copies_between) -> None:
        self.mappers = [MemfdMapper() for _ in workers]
        self.workers = [in_shared_memory(*both) for both in zip(workers, self.mappers, strict=True)]
        self.mapped: dict[Key, MappedExecutor] = {}
        for worker, mapper in zip(self.workers, self.mappers, strict=True):
            self.mapped[worker.key] = MappedExecutor(worker, mapper=mapper, make_copies=make_copies)
        self.executors: dict[Key, Executor] = dict(self.mapped)
        envelopes = {key: executor.envelope() for key, executor in self.mapped.items()}
        for key, executor in self.mapped.items():
            for peer, envelope in envelopes.items():
                if peer[0] != key[0]:
                    assert executor.maps(executor.connect(envelope))

    def __enter__(self) -> MappedCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self.mapped.values():
            executor.close()
        assert [mapper.num_open for mapper in self.mappers] == [0] * len(self.mappers)

    def read(self, worker: Worker, region: Region) -> Bytes:
        """A copy of all bytes of a region."""
        values: Bytes = array_of(region).copy()
        return values

    def write(self, worker: Worker, region: Region, values: Bytes) -> None:
        """Set all bytes of a region."""
        array_of(region)[:] = values

    def lose(self, worker: Worker) -> None:
        """Close the executor of a worker, whose memory stays mapped."""
        self.mapped[worker.key].close()


class HeldCopies:
    """Copies that run when a test lets them, as a kernel behind others on its stream."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.waiting: list[BoundCopy] = []

    def prepare(self, pair: PairCopy) -> None:
        self._copies.prepare(pair)

    def begin(self, bound: BoundCopy) -> Any:
        self.waiting.append(bound)
        return bound

    def run(self) -> None:
        """Carry out what waits."""
        while self.waiting:
            self._copies.begin(self.waiting.pop())

    def done(self, ticket: Any) -> bool:
        return ticket not in self.waiting

    def wait(self) -> None:
        self.run()


def serve(channel: Connection, worker: Worker, environment: dict[str, str]) -> None:
    """The process of a source: it owns memory, and obeys commands. Its UCX has the settings of an environment."""
    for key in [key for key in os.environ if key.startswith("UCX_")]:
        del os.environ[key]
    os.environ.update(environment)
    mapper = MemfdMapper()
    here = in_shared_memory(worker, mapper)
    filled(here)
    executor = MappedExecutor(here, mapper=mapper)

    commands: dict[str, Callable[..., Any]] = {
        "envelope": executor.envelope,
        "connect": lambda envelope: executor.connect(envelope) and None,
        "fill": lambda seed: filled(here, seed),
        "close": executor.close,
        "free": mapper.free,
    }
    while True:
        command, *arguments = channel.recv()
        channel.send(commands[command](*arguments))


class Source:
    """A source in a process of its own, which a test suspends and kills."""

    def __init__(self, worker: Worker) -> None:
        context = forkserver()
        self._channel, theirs = context.Pipe()
        # the server of processes has the environment of whoever asked it first
        environment = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
        self.process: multiprocessing.process.BaseProcess = context.Process(
            target=serve, args=(theirs, worker, environment), daemon=True
        )
        self.process.start()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, *command: Any) -> Any:
        """Send a command, and return the answer."""
        self._channel.send(command)
        assert self._channel.poll(TIMEOUT_S), f"no answer to {command[0]}"
        return self._channel.recv()

    def kill(self) -> None:
        """Kill the process, as kill -9 does."""
        self.process.kill()
        self.process.join(TIMEOUT_S)
