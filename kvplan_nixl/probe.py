"""Probes: what the doctor tries in separate processes, since NIXL may crash or hang there.

Each writes JSON to stdout, one document a line, as it goes. ``python -m kvplan_nixl.probe`` runs
one, whose name and texts are its arguments.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvplan import Axis, Blocks, Group, KVPlanError, View, Worker, plan_reads, region_of
from kvplan.protocol import Leases, Listener
from kvplan_nixl.agent import Agent
from kvplan_nixl.backends import UCX
from kvplan_nixl.executor import NixlExecutor, settle
from kvplan_nixl.mapping import CudaMapper
from kvplan_nixl.serving import Driver
from kvplan_nixl.settings import Settings, secrets_of_environment

MEMORY_BYTES: Final = 16 << 20
BLOCK_BYTES: Final = 64 << 10
TRANSFER_S: Final = 1.0
"""How long bytes are moved. A single transfer may take longer."""

PROBE_TIMEOUT_S: Final = 30.0


def tell(**fields: Any) -> None:
    """Write a document on a separate line: libraries write to stdout too."""
    print(f"\n{json.dumps(fields)}", flush=True)


def start_backends(*backends: str) -> None:
    """Start backends one after the other, and tell the error of each, empty if there is none.

    Without ``backends`` they are all of NIXL's, whose names are told first, with its version.
    """
    if not backends:
        agent = Agent("doctor", {})
        backends = tuple(agent.plugins())
        agent.close()
        tell(version=version("nixl"), backends=backends)
    for backend in backends:
        error = ""
        try:
            Agent("doctor", {backend: UCX.get(backend, {})}).close()
        except KVPlanError as refused:
            error = str(refused)
        tell(backend=backend, error=error)


def listen(host: str, port: str) -> None:
    """Listen as a prefill engine would, and fetch its offers as a decode engine would."""
    texts = secrets_of_environment((), os.environ)
    try:
        system = Driver(Settings.read_texts(texts, "the environment").access())
        listener = Listener(
            "doctor", host, [b"offer"], Leases(system), port=int(port), system=system
        )
        try:
            system.run(listener.check(PROBE_TIMEOUT_S))
        finally:
            listener.close()
    except KVPlanError as error:
        tell(error=str(error.with_hint("")), hint=error.hint, has_key=bool(texts))
        return
    tell(error="", hint="", has_key=bool(texts))


def on_device(memory: npt.NDArray[np.uint8], device: str) -> Any:
    """Return bytes in memory of a device, as torch names it: the array itself is on ``cpu``."""
    if device == "cpu":
        return memory
    import torch

    torch.cuda.set_device(device)
    return torch.from_numpy(memory).to(device)


def worker_of(engine_id: str, memory: Any) -> Worker:
    """Return a worker whose cache is ``memory``, in blocks of :data:`BLOCK_BYTES`."""
    region = region_of(memory)
    axes = (Axis("byte", 0, BLOCK_BYTES, BLOCK_BYTES, 1),)
    num_blocks = MEMORY_BYTES // BLOCK_BYTES
    view = View("bytes", "bytes", region, "uint8", axes, num_blocks, BLOCK_BYTES)
    return Worker(engine_id, 0, (region,), (Group("bytes"),), (view,))


def source_memory() -> npt.NDArray[np.uint8]:
    """Return bytes of which no two blocks have the same."""
    return np.random.default_rng(1).integers(0, 256, MEMORY_BYTES, np.uint8)


def serve(channel: Connection, device: str) -> None:
    """Register the source's memory until the other process ends. Another process runs this."""
    logging.disable(logging.WARNING)
    memory = on_device(source_memory(), device)  # it has to outlive the executor
    with NixlExecutor(worker_of("source", memory)) as executor:
        channel.send_bytes(executor.envelope())
        channel.poll(PROBE_TIMEOUT_S)


def move(device: str = "cpu") -> None:
    """Read memory of another process for about a second. Tell the bytes, and whether all agree.

    Both are on one device, as torch names it.
    """
    context = multiprocessing.get_context("spawn")
    channel, source_channel = context.Pipe()
    # a daemon ends with this process
    process = context.Process(target=serve, args=(source_channel, device), daemon=True)
    process.start()
    source_channel.close()
    memory = on_device(np.zeros(MEMORY_BYTES, np.uint8), device)
    tables = {"bytes": Blocks(np.arange(MEMORY_BYTES // BLOCK_BYTES))}
    num_bytes = 0
    try:
        with NixlExecutor(worker_of("destination", memory)) as executor:
            plan = plan_reads(executor.worker, [executor.connect(channel.recv_bytes())])
            executor.prepare(plan)
            (spec,) = plan.bind(local=tables, remote=tables)
            began = time.monotonic()
            while time.monotonic() < began + TRANSFER_S:
                transfer = executor.start(spec, "doctor")
                if not settle(executor, [transfer], PROBE_TIMEOUT_S):
                    raise TimeoutError(f"{transfer!r}")
                if transfer.error is not None:
                    raise transfer.error
                executor.release(transfer)
                num_bytes += spec.num_bytes
            elapsed_s = time.monotonic() - began
    except (KVPlanError, TimeoutError, EOFError) as error:
        tell(error=str(error) or "the source's process has ended")
        return
    moved = memory if device == "cpu" else memory.cpu().numpy()
    is_right = bool(np.array_equal(moved, source_memory()))
    tell(error="", num_bytes=num_bytes, elapsed_s=elapsed_s, is_right=is_right)


def map_memory(device: str = "cuda:0") -> None:
    """Ask CUDA whether memory that torch allocates can be mapped by other processes."""
    try:
        memory = on_device(np.zeros(MEMORY_BYTES, np.uint8), device)
        reason = CudaMapper().why_not(region_of(memory))
    except (OSError, RuntimeError, ImportError) as error:
        tell(error=" ".join(str(error).split()))
        return
    tell(error="", reason=reason, has_triton=find_spec("triton") is not None)


PROBES: Final[Mapping[str, Callable[..., None]]] = MappingProxyType(
    {"start": start_backends, "listen": listen, "map": map_memory, "move": move}
)
"""The probes by name."""

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    PROBES[sys.argv[1]](*sys.argv[2:])
