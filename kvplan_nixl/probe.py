"""Probes: what the doctor tries in separate processes, since NIXL may crash or hang there.

Each writes JSON to stdout, one document a line, as it goes. ``python -m kvplan_nixl.probe`` runs
one, whose name and texts are its arguments.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from kvplan import Blocks, KVPlanError, plan_reads, region_of
from kvplan.protocol import Leases, Listener
from kvplan_nixl.agent import Agent
from kvplan_nixl.backends import UCX
from kvplan_nixl.executor import NixlExecutor
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


def move(device: str = "cpu") -> None:
    """Read memory of another process for about a second. Tell the bytes, and whether all agree.

    Both are on one device, as torch names it.
    """
    # torch, which other probes do without
    from kvplan_nixl.calibrate import allocated, memory, move_blocks, peer

    where = (device, MEMORY_BYTES, (BLOCK_BYTES,))
    tables = {f"{BLOCK_BYTES}": Blocks(np.arange(MEMORY_BYTES // BLOCK_BYTES))}
    num_bytes = 0
    try:
        worker, tensor = memory("destination", *where)
        tensor.zero_()
        with peer(*where) as envelope, NixlExecutor(worker) as executor:
            plan = plan_reads(worker, [executor.connect(envelope)])
            executor.prepare(plan)
            began = time.monotonic()
            while time.monotonic() < began + TRANSFER_S:
                num_bytes += move_blocks(executor, plan, tables, tables, PROBE_TIMEOUT_S)
            elapsed_s = time.monotonic() - began
    except (KVPlanError, TimeoutError, EOFError) as error:
        tell(error=str(error) or "the source's process has ended")
        return
    is_right = bool((tensor == allocated(device, MEMORY_BYTES)).all())
    tell(error="", num_bytes=num_bytes, elapsed_s=elapsed_s, is_right=is_right)


def map_memory(device: str = "cuda:0") -> None:
    """Ask CUDA whether memory that torch allocates can be mapped by other processes."""
    try:
        from kvplan_nixl.calibrate import allocated

        tensor = allocated(device, MEMORY_BYTES)  # it has to outlive the question
        reason = CudaMapper().why_not(region_of(tensor))
    except (OSError, ImportError, KVPlanError) as error:
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
