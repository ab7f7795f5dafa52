"""A remote worker in a process of its own, which tests tell what to do, stop and kill."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvplan import Worker
from kvplan_nixl import NixlExecutor
from tests.nixl.worlds import placed, synchronized

TIMEOUT_S = 60.0


def pattern(worker: Worker, region: str) -> Any:
    """What the process keeps in a region: no two blocks or regions are alike, and no byte is 0."""
    (held,) = (held for held in worker.regions if held.name == region)
    return np.random.default_rng([*region.encode()]).integers(1, 256, held.size_bytes, np.uint8)


def digests(memory: Mapping[str, Any]) -> dict[str, str]:
    """What tells the bytes of regions from others, region by region."""
    return {name: hashlib.sha256(tensor.cpu().numpy()).hexdigest() for name, tensor in memory.items()}


def fill(worker: Worker, memory: Mapping[str, Any], device: str) -> None:
    """Write :func:`pattern` to all regions."""
    for name, tensor in memory.items():
        tensor.copy_(torch.from_numpy(pattern(worker, name)))
    synchronized(device)


CLONE_NEWNS, CLONE_NEWNET, MS_PRIVATE, MNT_DETACH = 1 << 17, 1 << 30, 1 << 18, 2


def enter(namespace: str) -> None:
    """Move this process to another network, and mount that network's interfaces, by which UCX finds its devices."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        done = [
            libc.setns(file.fileno(), CLONE_NEWNET),
            libc.unshare(CLONE_NEWNS),
            libc.mount(b"none", b"/", None, MS_PRIVATE | 1 << 14, None),
            libc.umount2(b"/sys", MNT_DETACH),
            libc.mount(b"sys", b"/sys", b"sysfs", 0, None),
        ]
    if any(done):
        raise OSError(ctypes.get_errno(), f"enter network namespace {namespace}: {done}")


def serve(
    channel: Connection,
    worker: Worker,
    backends: Mapping[str, Mapping[str, str]],
    environment: Mapping[str, str],
    namespace: str | None,
    device: str,
) -> None:
    """The process: memory of the worker with :func:`pattern` in it, and an executor that does as it is told."""
    os.environ.update(environment)
    if namespace is not None:
        enter(namespace)
    there, memory = placed(worker, device)
    fill(worker, memory, device)
    executor = NixlExecutor(there, backends)
    told: list[Any] = []
    while True:
        command, *arguments = channel.recv()
        if command == "envelope":
            channel.send(executor.envelope())
        elif command == "notices":
            (count,) = arguments
            deadline = time.monotonic() + TIMEOUT_S
            while len(told) < count and time.monotonic() < deadline:
                told += executor.notices()
            channel.send(tuple(told))
        elif command == "clear":
            for tensor in memory.values():
                tensor.zero_()
            synchronized(device)
            channel.send(True)
        elif command == "digests":
            channel.send(digests(memory))
        elif command == "deregister":
            executor._agent.deregister(executor._registered or ())
            channel.send(True)
        elif command == "close":
            executor.close()
            channel.send(True)


def forkserver() -> ForkServerContext:
    """Makes processes that have NIXL imported, and have not used it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class PeerProcess:
    """The process, seen from the test."""

    def __init__(
        self,
        worker: Worker,
        backends: Mapping[str, Mapping[str, str]],
        namespace: str | None = None,
        device: str = "cpu",
    ) -> None:
        context = forkserver()
        self.channel, theirs = context.Pipe()
        plain = {name: dict(options) for name, options in backends.items()}
        environment = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
        arguments = (theirs, worker, plain, environment, namespace, device)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, *command: Any) -> Any:
        """Tell the process to do something, and wait for what comes of it."""
        self.channel.send(command)
        assert self.channel.poll(TIMEOUT_S), f"no answer to {command[0]}"
        return self.channel.recv()

    def stop(self) -> None:
        """Stop the process where it is."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the process go on."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, as kill -9 does."""
        self.process.kill()
        self.process.join(TIMEOUT_S)
