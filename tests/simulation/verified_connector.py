"""The simulation's connector with cache digests: what has arrived is compared with what the source has (read.R6)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from kvplan.describe.blocks import Request
from kvplan.testing.simulation import LeaseConnector, Simulation, Site
from kvplan.testing.simulation.fabric import VirtualExecutor
from kvplan_nixl.digest import WorkerDigests
from kvplan_nixl.rearrange import Memory
from tests.simulation.vllm_connector import VllmConnector

CACHE = "kv_cache"


def digests_of(executor: VirtualExecutor, request: Request) -> dict[str, Any]:
    """The digests of a request's blocks in a worker's memory, in which each byte is a part of its label."""
    worker = executor.port.worker
    bytes_of_cells = (executor.port.memory.cells * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(np.uint8)
    memories = []
    first = 0
    for region in sorted(worker.regions, key=lambda region: region.address):
        memory = Memory(torch.from_numpy(bytes_of_cells[first : first + region.size_bytes].copy()))
        memory.address = region.address
        memories.append(memory)
        first += region.size_bytes
    return WorkerDigests(worker, memories).of(request["local"], request["tokens"])


class VerifiedConnector(LeaseConnector):
    """Requests are right only if their digests are equal."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, digest=digests_of)


def vllm_verified_fleets() -> Simulation:
    """A simulation of vLLM's fleets in which digests are compared."""
    return Simulation(partial(VllmConnector, digest=digests_of))
