"""The soak: two engines of several processes each move requests while processes die, hang and restart.

    python -m benchmarks.soak --seconds 3600

Prefill has 2 workers, decode 3 by default, with other blocks and another axis order. Decode reads requests, directly or
through staging buffers. Meanwhile workers are killed (``kill -9``), suspended, replaced while they hang, and closed
under their transfers; requests are cancelled, time out and are tried again. The scheduler of both engines, this
process, allocates blocks and maps all memory:

- Every byte of a request that is DONE is compared, when its last transfer is settled and when its blocks are evicted.
  Blocks of any other request hold what was there before, or the right bytes.
- Blocks that were declared reusable are filled with a pattern, which no late write may change.
- A request may fail only where one of its workers was disturbed, and every request comes to its end.
- At the end each worker holds what it held before: memory, files (but for one for each connection, which NIXL keeps),
  threads, and NIXL's handles.

UCX moves bytes by TCP unless the environment says otherwise, and there the death of a reader may abort its
source (docs/how-to/nixl.md). These are counted apart. The exit status is 1 if anything else went wrong. ``--plant``
plants a fault, to see that the soak finds it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing.connection
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from benchmarks.held import growth
from benchmarks.real_memory import forkserver
from benchmarks.soak_worker import DIM, HEADS, LAYERS, PLANTS, Key, engines, mapped, serve
from kvplan import Status, Worker

Words = npt.NDArray[np.uint16]

MAX_REQUESTS: Final = 8
STUCK_S: Final = 600.0
"""How long a request may take in the worst case, on a machine that does much else."""

EXPLAINED_S: Final = 20.0
"""How long the death of a worker may remain unnoticed, which explains why a request failed."""

ABORTED_S: Final = 60.0
"""How long after a worker is to end, or has ended, UCX may abort another one."""

MAX_HANDLES: Final = 16
MAX_GROWTH_MIB: Final = 64
"""A process grows by about 30 MiB until all its memory and UCX's buffers are in use."""


def blocks_of(worker: Worker, memory: dict[str, Any]) -> list[Any]:
    """Return a worker's cache: for each layer an array of 16-bit words, ``[block, token, kv, head, dim]``."""
    caches = []
    for view in worker.views:
        axes = {axis.name: axis for axis in view.axes}
        order = [axes[name] for name in ("token", "kv", "head", "dim")]
        shape = (view.num_blocks, *(axis.extent for axis in order))
        strides = (view.block_stride_bytes, *(axis.stride_bytes for axis in order))
        caches.append(np.ndarray(shape, np.uint16, memory[view.region], view.offset_bytes, strides))
    return caches


@attrs.define(eq=False)
class Process:
    """One process of a worker. Another one takes its place where it dies or hangs."""

    serial: int
    key: Key
    process: Any
    channel: Any
    path: Path
    worker: Worker = attrs.field(repr=False)
    caches: list[Words] = attrs.field(repr=False)
    envelope: bytes = attrs.field(default=b"", repr=False)
    connected: set[int] = attrs.field(factory=set)
    disturbed_at: float = 0.0
    resumes_at: float | None = None
    dies_at: float | None = None
    is_closing: bool = False
    measured: list[dict[str, float]] = attrs.field(factory=list, repr=False)

    def send(self, *message: Any) -> None:
        """Send a command, unless the process has ended."""
        with suppress(OSError):
            self.channel.send(message)

    def disturb(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        self.disturbed_at = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def heads(self, layer: int) -> slice:
        """Return the heads that it stores of a layer."""
        (axis,) = (axis for axis in self.worker.views[layer].axes if axis.name == "head")
        return slice(axis.start, axis.stop)


@attrs.define(eq=False)
class Request:
    """A request under way, with the processes that it began with.

    ``active`` are the workers of decode that have not ended it so far. In the beginning all words of the destination's
    blocks are ``before``.
    """

    name: str
    attempt: int
    is_staged: bool
    tokens: tuple[int, int]
    tables: dict[str, list[int]]
    content: Words = attrs.field(repr=False)
    before: int
    processes: dict[Key, Process] = attrs.field(repr=False)
    active: set[Key]
    began: float
    deadline: float
    statuses: dict[Key, Status] = attrs.field(factory=dict)
    codes: list[str] = attrs.field(factory=list)
    freed: set[str] = attrs.field(factory=set)

    @property
    def is_done(self) -> bool:
        """All workers that move it have moved their parts."""
        return not self.active and set(self.statuses.values()) == {Status.DONE}

    def is_right(self, process: Process, *, whole: bool) -> bool:
        """Return whether its blocks in a worker of the destination hold the right bytes.

        Unless ``whole``, each byte may be that of before too.
        """
        start, stop = self.tokens
        for layer, cache in enumerate(process.caches):
            # all slots of the request's blocks, in order of position
            words = cache[self.tables["decode"]]
            expected = np.full((words.shape[0] * words.shape[1], *words.shape[2:]), self.before, np.uint16)
            expected[start:stop] = self.content[layer, start:stop, :, process.heads(layer)]
            old = np.full(words.size, self.before, np.uint16).view(np.uint8)
            stored = bytes_of(words)
            if not np.all((stored == bytes_of(expected)) | (not whole and stored == old)):
                return False
        return True


def bytes_of(words: Words) -> npt.NDArray[np.uint8]:
    """Return all bytes of an array in order."""
    return np.ascontiguousarray(words).reshape(-1).view(np.uint8)


class Pool:
    """The blocks of an engine. All words of a free block have one value in all workers."""

    def __init__(self, template: Worker) -> None:
        tokens_per_block = template.groups[0].tokens_per_block
        assert tokens_per_block is not None
        self.tokens = tokens_per_block
        self.free = dict.fromkeys(range(template.views[0].num_blocks), 0)
        self.kept: list[Request] = []
        """Requests that are done and whose blocks are in use."""


class Soak:
    """The scheduler of both engines."""

    def __init__(self, seconds: float, decode_tp: int, seed: int, plant: str, folder: Path) -> None:
        self.seconds = seconds
        self.decode_tp = decode_tp
        self.plant = plant
        self.folder = folder
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.templates = engines(decode_tp)
        self.pools = {name: Pool(workers[0]) for name, workers in self.templates.items()}
        self.spared = {(name, self.random.randrange(len(workers))) for name, workers in self.templates.items()}
        self.serials = itertools.count()
        self.names = itertools.count()
        self.present: dict[Key, Process] = {}
        self.replaced: list[Process] = []
        self.requests: dict[str, Request] = {}
        self.unexplained: dict[Request, float] = {}
        """Requests that failed, and when a cause must be known."""
        self.counts: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.defects: list[str] = []
        self.last_death = self.next_measure = 0.0
        self.closed = self.next_event = 0
        self.is_over = False
        self.began = time.monotonic()

    def run(self) -> None:
        """Run for some seconds, or until the first defect; then let all requests end, and all processes."""
        try:
            for key in [worker.key for workers in self.templates.values() for worker in workers]:
                self.spawn(key)
            self.until(self.is_whole, STUCK_S)
            end = time.monotonic() + self.seconds
            self.until(lambda: time.monotonic() >= end, self.seconds + 1, is_loaded=True)
            self.calm()
            self.until(lambda: self.is_whole() and not self.requests and not self.replaced, 2 * STUCK_S)
            self.until(lambda: not self.unexplained, 2 * EXPLAINED_S)
            for name, pool in self.pools.items():
                while pool.kept:
                    self.evict(name)
                self.watch(name, [*pool.free])
            if self.defects:
                return
            self.measure()
            counts = {process: len(process.measured) for process in self.present.values()}
            self.until(lambda: all(len(process.measured) > count for process, count in counts.items()), STUCK_S)
            for process in self.present.values():
                self.check_held(process)
            self.is_over = True
            for process in self.present.values():
                process.send("close")
                process.is_closing = True
            self.until(lambda: not self.present, STUCK_S)
        finally:
            for process in self.everybody():
                process.process.kill()

    def until(self, condition: Callable[[], bool], timeout_s: float, is_loaded: bool = False) -> None:
        """Go on until a condition holds."""
        deadline = time.monotonic() + timeout_s
        while not self.defects and not condition():
            if time.monotonic() > deadline:
                self.defects.append(f"it does not end: {self.requests}, {self.everybody()}")
            self.receive()
            now = time.monotonic()
            self.time_out(now)
            if is_loaded:
                self.admit()
                if self.closed >= self.next_event and self.requests:
                    self.next_event = self.closed + self.random.randrange(20)
                    self.event()
                if now > self.next_measure:
                    self.next_measure = now + 5
                    self.measure()

    # Processes

    def spawn(self, key: Key) -> None:
        """Start a process as a worker. Free blocks are the same in its memory as in that of others."""
        serial = next(self.serials)
        path = self.folder / f"{serial}"
        worker, memory = mapped(path, self.templates[key[0]][key[1]])
        caches = blocks_of(worker, memory)
        free = self.pools[key[0]].free
        for cache in caches:
            cache[[*free]] = np.array([*free.values()], np.uint16)[:, None, None, None, None]
        channel, worker_channel = forkserver().Pipe()
        environment = {name: value for name, value in os.environ.items() if name.startswith(("UCX_", "NIXL_"))}
        arguments = (worker_channel, path, key, self.decode_tp, self.plant, environment)
        process = forkserver().Process(target=serve, args=arguments, daemon=True)
        process.start()
        worker_channel.close()
        now = time.monotonic()
        self.present[key] = Process(serial, key, process, channel, path, worker, caches, disturbed_at=now)

    def everybody(self) -> list[Process]:
        """Return all processes."""
        return [*self.present.values(), *self.replaced]

    def is_whole(self) -> bool:
        """Return whether all workers of decode are connected to all of prefill."""
        serials = {process.serial for process in self.present.values() if process.key[0] == "prefill"}
        return all(serials <= process.connected for process in self.present.values() if process.key[0] == "decode")

    def receive(self) -> None:
        """Take the messages of all processes, and see which have ended."""
        everybody = self.everybody()
        waiting: list[Any] = [process.channel for process in everybody]
        waiting += [process.process.sentinel for process in everybody]
        ready = multiprocessing.connection.wait(waiting, 0.002)
        for process in everybody:
            has_ended = process.process.sentinel in ready
            with suppress(EOFError, OSError):
                while process.channel.poll():
                    message, *arguments = process.channel.recv()
                    getattr(self, f"on_{message}")(process, *arguments)
            if has_ended:
                self.bury(process)

    def on_ready(self, process: Process, envelope: bytes) -> None:
        """Connect a new worker: decode's to all of prefill, prefill's to all of decode."""
        process.envelope = envelope
        if process in self.replaced:
            return
        for peer in self.present.values():
            if peer.key[0] != process.key[0] and peer.envelope:
                reader, source = (peer, process) if peer.key[0] == "decode" else (process, peer)
                reader.send("connect", source.key, source.serial, source.envelope)

    def on_connected(self, process: Process, serial: int) -> None:
        """A worker is connected to another."""
        process.connected.add(serial)

    def on_crashed(self, process: Process, text: str) -> None:
        """A worker has raised an exception."""
        self.defects.append(f"{process.key} raised {text}")

    def on_measured(self, process: Process, held: dict[str, float]) -> None:
        """What a process holds."""
        process.measured.append({"seconds": time.monotonic() - self.began, **held})

    def bury(self, process: Process) -> None:
        """A process has ended: replace it, and give up what it had to do with."""
        process.process.join()
        code = process.process.exitcode
        now = time.monotonic()
        if code == -signal.SIGABRT and process.dies_at is None and now - self.last_death < ABORTED_S:
            self.counts["workers aborted by UCX"] += 1
        elif code != 0 if process.is_closing and process.dies_at is None else process.dies_at is None:
            errors = process.path.with_suffix(".err").read_text(errors="replace")[-4000:]
            self.defects.append(f"{process.key} has ended with {code}: {errors}")
        self.last_death = process.disturbed_at = now
        process.channel.close()
        for path in (process.path, process.path.with_suffix(".err")):
            path.unlink(missing_ok=True)
        if process in self.replaced:
            self.replaced.remove(process)
        else:
            del self.present[process.key]
            if not self.is_over:
                self.spawn(process.key)
        for request in [*self.requests.values()]:
            if request.processes[process.key] is process and process.key in request.active:
                self.end(request, process, Status.FAILED, "KILLED")

    # What disturbs them

    def event(self) -> None:
        """Kill, suspend, replace or close a worker, or cancel a request."""
        event = self.random.choice(("kill", "suspend", "suspend", "suspend and kill", "replace", "close", "cancel"))
        ready = [process for process in self.present.values() if process.envelope and process.resumes_at is None]
        undisturbed = [process for process in ready if process.dies_at is None and not process.is_closing]
        target = self.random.choice(undisturbed or [None])
        if event == "cancel" and self.requests:
            self.cancel(self.random.choice([*self.requests.values()]))
        elif event != "cancel" and target is not None:
            if target.key in self.spared:
                event = "suspend"
            now = target.disturbed_at = time.monotonic()
            if event != "suspend":
                self.last_death = now  # another worker may abort, and end, before this one is seen to have ended
            if event == "close":
                target.is_closing = True
                target.send("close")
            elif event == "kill":
                target.dies_at = now
            else:
                target.disturb(signal.SIGSTOP)
                if event != "suspend and kill":
                    target.resumes_at = now + self.random.choice((0.02, 0.2, 2)) * self.random.random()
                if event != "suspend":
                    target.dies_at = now + 3 * self.random.random()
                if event == "replace":
                    self.replaced.append(target)
                    self.spawn(target.key)
        else:
            return
        self.counts[f"event: {event}"] += 1
        self.time_out(time.monotonic())

    def calm(self) -> None:
        """Let everybody go on."""
        for process in self.everybody():
            if process.resumes_at is not None:
                process.resumes_at = 0.0

    def time_out(self, now: float) -> None:
        """Do what is due."""
        for process in self.everybody():
            if process.resumes_at is not None and process.resumes_at <= now:
                process.resumes_at = None
                process.disturb(signal.SIGCONT)
            if process.dies_at is not None and 0 < process.dies_at <= now:
                process.dies_at = 0.0
                process.disturb(signal.SIGKILL)
        for request in [*self.requests.values()]:
            if request.deadline <= now:
                request.deadline = now + 1
                self.cancel(request)
            if now - request.began > STUCK_S:
                self.defects.append(f"a request does not end: {request}")
        for request in [request for request, deadline in self.unexplained.items() if deadline <= now]:
            del self.unexplained[request]
            if all(process.disturbed_at < request.began for process in request.processes.values()):
                self.defects.append(f"a request failed without a cause: {request}")

    # Requests

    def admit(self) -> None:
        """Begin a request, where both engines have blocks for it."""
        if len(self.requests) < MAX_REQUESTS and self.is_whole():
            start = self.random.choice((0, 0, self.random.randrange(60)))
            tokens = start, start + self.random.randrange(1, 220)
            self.offer(f"request {next(self.names)}", 0, self.random.random() < 0.3, tokens)

    def offer(self, name: str, attempt: int, is_staged: bool, tokens: tuple[int, int]) -> None:
        """Allocate blocks and fill them, and let decode read."""
        need = {engine: -(-tokens[1] // pool.tokens) for engine, pool in self.pools.items()}
        for engine, pool in self.pools.items():
            while len(pool.free) < need[engine]:
                if not pool.kept:
                    return
                self.evict(engine)
        tables = {engine: self.allocate(engine, count) for engine, count in need.items()}
        content = self.numbers.integers(0, 1 << 16, (LAYERS, tokens[1], 2, HEADS, DIM), np.uint16)
        now = time.monotonic()
        request = self.requests[name] = Request(
            name,
            attempt,
            is_staged,
            tokens,
            tables,
            content,
            before=self.random.randrange(1 << 16),
            processes=dict(self.present),
            active={key for key in self.present if key[0] == "decode"},
            began=now,
            deadline=now + self.random.choice((8.0,) * 19 + (0.05 * self.random.random(),)),
        )
        for process in self.present.values():
            for layer, cache in enumerate(process.caches):
                blocks = tables[process.key[0]]
                if process.key[0] == "prefill":
                    words = self.numbers.integers(
                        0, 1 << 16, (len(blocks) * cache.shape[1], *cache.shape[2:]), np.uint16
                    )
                    words[: tokens[1]] = content[layer, :, :, process.heads(layer)]
                    cache[blocks] = words.reshape(len(blocks), *cache.shape[1:])
                else:
                    cache[blocks] = request.before
        serials = {key: process.serial for key, process in request.processes.items()}
        for key in request.active:
            request.processes[key].send(
                "start", name, attempt, is_staged, serials, (tables["decode"], tables["prefill"]), tokens
            )
        self.counts[f"{'staged ' * is_staged}reads"] += 1

    def cancel(self, request: Request) -> None:
        """Ask the active workers to stop."""
        self.counts["cancels"] += bool(request.active)
        for key in request.active:
            request.processes[key].send("cancel", request.name)

    def on_ended(self, process: Process, name: str, attempt: int, status: Status, code: str) -> None:
        """All transfers of an active worker are settled."""
        request = self.requests.get(name)
        if request is None or request.attempt != attempt or request.processes[process.key] is not process:
            return
        if process.key in request.active:
            self.check(request, process, whole=status is Status.DONE)
            self.end(request, process, status, code)

    def end(self, request: Request, process: Process, status: Status, code: str) -> None:
        """An active worker touches no block of a request any more."""
        request.active.discard(process.key)
        request.statuses[process.key] = status
        if status is not Status.DONE:
            request.codes.append(code or status.name)
        if not request.active or self.plant == "early":
            self.give_back(request, "prefill")
        if not request.active:
            self.give_back(request, "decode")
            self.close(request)

    def check(self, request: Request, process: Process, *, whole: bool) -> None:
        """Compare every byte in the destination's blocks."""
        self.counts["bytes compared"] += sum(cache[request.tables["decode"]].nbytes for cache in process.caches)
        if not request.is_right(process, whole=whole):
            self.defects.append(f"wrong bytes in {process.key} {'of a request that is DONE' * whole}: {request}")

    def give_back(self, request: Request, engine: str) -> None:
        """An engine needs the blocks of a request no more, or keeps them until it needs others."""
        if engine not in request.freed:
            request.freed.add(engine)
            if engine == "decode" and request.is_done:
                self.pools[engine].kept.append(request)
            else:
                self.free(request, engine)

    def close(self, request: Request) -> None:
        """A request has ended on all workers; it may be tried again."""
        del self.requests[request.name]
        self.closed += 1
        self.codes.update(request.codes)
        if request.is_done:
            self.counts["requests done"] += 1
            self.counts["bytes moved"] += (request.tokens[1] - request.tokens[0]) * LAYERS * 2 * HEADS * DIM * 2
            return
        self.counts["requests failed or cancelled"] += 1
        if not {"KILLED", "REPLACED", "CANCELLED"}.intersection(request.codes):
            self.unexplained[request] = time.monotonic() + EXPLAINED_S
        if not request.is_staged and self.is_whole() and self.random.random() < 0.5:
            self.counts["requests tried again"] += 1
            self.offer(request.name, request.attempt + 1, False, request.tokens)

    # Blocks

    def allocate(self, engine: str, count: int) -> list[int]:
        """Allocate blocks. A write since they were freed is a defect."""
        free = self.pools[engine].free
        blocks = self.random.sample([*free], count)
        self.watch(engine, blocks)
        for block in blocks:
            del free[block]
        return blocks

    def watch(self, engine: str, blocks: list[int]) -> None:
        """Look for late writes to free blocks."""
        free = self.pools[engine].free
        wanted = np.array([free[block] for block in blocks], np.uint16)[:, None, None, None, None]
        for process in self.present.values():
            for cache in process.caches if process.key[0] == engine else ():
                if (cache[blocks] != wanted).any():
                    self.defects.append(f"late write to free blocks of {process.key}")

    def free(self, request: Request, engine: str) -> None:
        """Declare the blocks of a request reusable, and fill them with a word of their own."""
        blocks = request.tables[engine]
        word = self.random.randrange(1 << 16)
        for process in self.present.values():
            for cache in process.caches if process.key[0] == engine else ():
                cache[blocks] = word
        self.pools[engine].free.update(dict.fromkeys(blocks, word))

    def evict(self, engine: str) -> None:
        """Free the blocks of a request that is done, whose bytes are still the right ones."""
        request = self.pools[engine].kept.pop(0)
        for key, process in request.processes.items():
            if key[0] == engine and self.present.get(key) is process and not request.is_right(process, whole=True):
                self.defects.append(f"late write to a request of {key} that was DONE: {request}")
        self.free(request, engine)
        self.counts["evictions"] += 1

    # What processes hold

    def measure(self) -> None:
        """Ask what processes hold."""
        for process in self.present.values():
            process.send("measure")

    def check_held(self, process: Process) -> None:
        """Compare what a process holds now with what it held first, when all requests have ended."""
        first = process.measured[0]
        last = process.measured[-1]
        grown = {name: last[name] - first[name] for name in last}
        if process.key in self.spared:
            print(f"{process.key} from first to last: {first} {last}")
            seconds, mib = zip(*((each["seconds"], each["MiB"]) for each in process.measured), strict=True)
            print(f"{process.key} grows by {growth(seconds, mib)} MiB, of {len(mib)} points")
        for name in ("transfers", "removed peers", "pending"):
            if last[name]:
                self.defects.append(f"{process.key} holds {last[name]} {name} in the end")
        if last["handles"] > MAX_HANDLES:
            self.defects.append(f"{process.key} holds {last['handles']} handles of NIXL in the end")
        if grown["files"] > grown["connections"] + 4 or grown["threads"] > 1:
            self.defects.append(f"{process.key} leaks files or threads: {grown}")
        if grown["MiB"] > MAX_GROWTH_MIB + grown["connections"] / 4:
            self.defects.append(f"{process.key} leaks memory: {grown}")


def main(arguments: list[str]) -> int:
    """Run the soak, and print what happened."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--decode-tp", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--plant", choices=PLANTS, default="")
    options = parser.parse_args(arguments)
    os.environ |= {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_NET_DEVICES": "lo"}
    os.environ.setdefault("UCX_TLS", "tcp")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="soak-"))
    try:
        soak = Soak(options.seconds, options.decode_tp, options.seed, options.plant, folder)
        print(f"seed {options.seed}, spared: {sorted(soak.spared)}", flush=True)
        soak.run()
    finally:
        shutil.rmtree(folder)
    for name, count in sorted(soak.counts.items()):
        print(f"{name}: {count:,}")
    print("failures of workers by code:", dict(sorted(soak.codes.items())) or "none")
    print("defects:", *[defect[:6000] for defect in soak.defects] or ["none"], sep="\n")
    return 1 if soak.defects else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
