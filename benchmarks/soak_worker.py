"""A worker of the soak in a process of its own: it reads requests, and gives them up, as the scheduler says.

It is as a connector should be: a request ends when all its transfers are settled, and then the scheduler is told.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import torch

from kvplan import Blocks, Model, Region, Status, Worker, plan_reads
from kvplan.staging import Pipeline, StagedTransfer, stage
from kvplan_nixl import NixlExecutor
from kvplan_nixl.rearrange import TorchCopier

Key = tuple[str, int]
LAYERS: Final = 2
HEADS: Final = 12
DIM: Final = 32
STAGING_BYTES: Final = 1 << 17
SECRET: Final = b"the key of both engines"
PLANTS: Final = ("early", "byte", "late", "leak")
"""Faults to plant: the source's blocks freed with the first reader's end; a wrong byte; a late byte; transfers that are
not released."""


def engines(decode_tp: int) -> dict[str, tuple[Worker, ...]]:
    """Both engines: of unequal TP, block sizes and axis order. Every worker has a staging region."""
    keys = {
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
    }
    model = Model.from_config(keys)
    sides = {
        "prefill": model.engine("prefill", tp=2, layout="LBNHC", tokens_per_block=4, num_blocks=256),
        "decode": model.engine("decode", tp=decode_tp, layout="BLHNC", tokens_per_block=6, num_blocks=176),
    }
    return {
        name: tuple(
            attrs.evolve(worker, regions=(*worker.regions, Region("staging", 1 << 50, STAGING_BYTES)))
            for worker in workers
        )
        for name, workers in sides.items()
    }


def mapped(path: Path, template: Worker) -> tuple[Worker, dict[str, Any]]:
    """A worker whose regions are in a file that is mapped, and the bytes of each region."""
    bounds = np.cumsum([0, *(-(-region.size_bytes // 4096) * 4096 for region in template.regions)])
    memory = np.memmap(path, np.uint8, "r+" if path.exists() else "w+", shape=(int(bounds[-1]),))
    parts = {
        region.name: memory[start : start + region.size_bytes]
        for region, start in zip(template.regions, bounds.tolist(), strict=False)
    }
    regions = [attrs.evolve(region, address=parts[region.name].ctypes.data) for region in template.regions]
    return attrs.evolve(template, regions=regions), parts


@attrs.define(eq=False)
class Moving:
    """A request that this worker reads: a transfer for each remote worker, or a staged one for all."""

    name: str
    attempt: int
    transfers: list[Any]
    local_ids: Sequence[int]


class Rank:
    """One worker's process."""

    def __init__(self, channel: Connection, path: Path, key: Key, decode_tp: int, plant: str) -> None:
        self.channel = channel
        self.plant = plant
        sides = engines(decode_tp)
        self.worker, self.memory = mapped(path, sides[key[0]][key[1]])
        self.wanted = {worker.key for name, workers in sides.items() if name != key[0] for worker in workers}
        self.executor = NixlExecutor(self.worker, key=SECRET)
        self.copier = TorchCopier({name: torch.from_numpy(part) for name, part in self.memory.items()})
        self.serials: dict[Key, int] = {}
        self.peers: dict[Key, Worker] = {}
        self.plan: Any = None
        self.pipeline = Pipeline(self.executor, "staging", self.copier)
        self.moving: dict[str, Moving] = {}
        self.held: list[Any] = []
        self.late: deque[tuple[float, int]] = deque()
        self.connections = 0
        self.say("ready", self.executor.envelope())

    def say(self, *message: Any) -> None:
        """Tell the scheduler."""
        self.channel.send(message)

    def run(self) -> None:
        """Obey until told to close."""
        is_open = True
        while is_open:
            while is_open and self.channel.poll(0 if self.moving else 0.002):
                command, *arguments = self.channel.recv()
                is_open = command != "close"
                if is_open:
                    getattr(self, f"on_{command}")(*arguments)
            self.step()
        self.executor.close()

    def step(self) -> None:
        """One step of an engine."""
        self.pipeline.poll()
        for request in list(self.moving.values()):
            statuses = [self.status_of(transfer) for transfer in request.transfers]
            if not {Status.DONE, Status.RUNNING}.issuperset(statuses):
                self.on_cancel(request.name)
            if all(status.is_settled for status in statuses):
                self.end(request)
        while self.late and self.late[0][0] < time.monotonic():
            self.scribble(self.late.popleft()[1])
        time.sleep(0.0002)

    def status_of(self, transfer: Any) -> Status:
        return transfer.status if isinstance(transfer, StagedTransfer) else self.executor.poll(transfer)

    # -- peers

    def on_connect(self, key: Key, serial: int, envelope: bytes) -> None:
        """Connect to a worker of the other engine, which may replace one that hangs or is dead."""
        if key in self.peers:
            self.executor.disconnect(self.peers[key], force=True)
        self.peers[key] = self.executor.connect(envelope)
        assert self.executor.connect(envelope) == self.peers[key]
        self.serials[key] = serial
        self.connections += 1
        self.plan = None
        if self.peers.keys() == self.wanted:
            remotes = [self.peers[key] for key in sorted(self.peers)]
            self.plan, self.staged = plan_reads(self.worker, remotes), stage(self.worker, remotes, staging="staging")
            self.executor.prepare(self.plan)
            self.pipeline.prepare(self.staged)
        self.say("connected", serial)

    # -- requests that this worker moves

    def on_start(
        self,
        name: str,
        attempt: int,
        is_staged: bool,
        serials: Mapping[Key, int],
        tables: tuple[list[int], list[int]],
        tokens: tuple[int, int],
    ) -> None:
        """Begin to read."""
        arguments: Any = {
            "local": {"attn": Blocks(tables[0])},
            "remote": {"attn": Blocks(tables[1])},
            "tokens": tokens,
        }
        request = Moving(name, attempt, [], tables[0])
        self.moving[name] = request
        if self.plan is None or any(self.serials[key] != serials[key] for key in self.serials):
            self.end(request, "REPLACED")
            return
        # while requests with earlier peers have the staging region, which may hang, others move directly
        if is_staged and all(staged.plan is self.staged for staged in self.pipeline._requests.values()):
            request.transfers.append(self.pipeline.submit(self.staged, name, **arguments))
            return
        request.transfers += [self.executor.start(spec, name) for spec in self.plan.bind(**arguments)]

    def on_cancel(self, name: str) -> None:
        """Ask a request to stop."""
        request = self.moving.get(name)
        for transfer in () if request is None else request.transfers:
            if isinstance(transfer, StagedTransfer):
                self.pipeline.cancel(transfer)
            else:
                self.executor.cancel(transfer)

    def end(self, request: Moving, code: str = "") -> None:
        """A request is settled: tell the scheduler."""
        del self.moving[request.name]
        errors = [transfer.error for transfer in request.transfers if transfer.error is not None]
        ended = {transfer.status for transfer in request.transfers}
        status = Status.DONE if ended == {Status.DONE} else Status.FAILED if errors or code else Status.CANCELLED
        for transfer in request.transfers:
            if self.plant == "leak":
                self.held.append(transfer)
            elif not isinstance(transfer, StagedTransfer):
                self.executor.release(transfer)
        if self.plant == "byte":
            self.scribble(request.local_ids[-1])
        if self.plant == "late":
            self.late.append((time.monotonic() + 0.2, request.local_ids[-1]))
        self.say("ended", request.name, request.attempt, status, errors[0].code if errors else code)

    def scribble(self, block: int) -> None:
        """A wrong byte in a block."""
        region = self.worker.views[0].region
        self.memory[region][block * self.worker.views[0].block_stride_bytes] ^= 0xFF

    # -- what the process holds

    def on_measure(self) -> None:
        """Report what this process holds."""
        gc.collect()
        executor = self.executor
        peers = [*executor._peers.values(), *executor._disconnected]
        self.say(
            "measured",
            {
                "MiB": int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20),
                "files": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "handles": len(executor._agent._handles),
                "transfers": sum(len(peer.held) for peer in peers),
                "removed peers": len(executor._disconnected),
                "pending": len(self.moving),
                "connections": self.connections,
            },
        )


def serve(channel: Connection, path: Path, key: Key, decode_tp: int, plant: str, environment: Any) -> None:
    """The process of a worker. What it raises goes to the scheduler."""
    os.environ.update(environment)
    with open(path.with_suffix(".err"), "wb") as log:
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    gc.freeze()  # collecting what was imported takes seconds on a busy machine, in which a worker does not answer
    try:
        with suppress(EOFError, BrokenPipeError):  # the scheduler has ended
            Rank(channel, path, key, decode_tp, plant).run()
    except BaseException:
        channel.send(("crashed", traceback.format_exc()))
        raise
