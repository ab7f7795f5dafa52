"""The simulation's connector with cache digests: what has arrived is compared with what the source has (read.R6)."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import torch

from kvplan.describe.blocks import Request
from kvplan.testing.simulation import BrokenRuleError, LeaseConnector, Simulation, Site
from kvplan.testing.simulation.engine import TOKENS_PER_STEP
from kvplan.testing.simulation.fabric import VirtualExecutor
from kvplan.testing.simulation.fleet import MakeParams
from kvplan_nixl.digest import WorkerDigests
from kvplan_nixl.rearrange import Memory
from tests.simulation.vllm_connector import ROOM_TOKENS_PER_STEP, VllmConnector

CACHE = "kv_cache"


def digests_of(executor: VirtualExecutor, request: Request) -> dict[str, Any]:
    """The digests of a request's blocks in a worker's memory, in which each byte is a part of its label."""
    worker = executor.port.worker
    bytes_of_cells = (executor.port.memory.landed * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(np.uint8)
    memories = []
    first = 0
    for region in sorted(worker.regions, key=lambda region: region.address):
        memory = Memory(torch.from_numpy(bytes_of_cells[first : first + region.size_bytes].copy()))
        memory.address = region.address
        memories.append(memory)
        first += region.size_bytes
    return WorkerDigests(worker, memories).of(request["local"], request["tokens"])


class _DigestLogger(logging.Logger):
    """Refuses to use what was not compared: all engines divide heads evenly, so it can be, if no answer is garbled."""

    def __init__(self, site: Site) -> None:
        super().__init__(__name__)
        self._is_garbled = any(each.garbling for each in site.host.network.disturbances)

    def warning(self, msg: object, *args: object, **_: Any) -> None:
        if "digests are not compared" in str(msg) and not self._is_garbled:
            raise BrokenRuleError("DIGEST", str(msg) % args)


class VerifiedConnector(LeaseConnector):
    """Requests are right only if their digests are equal."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, digest=digests_of)
        for reads in self._reads:
            reads._logger = _DigestLogger(site)


class VerifiedVllmConnector(VllmConnector):
    """The same of vLLM's requests."""

    def __init__(self, site: Site, *, hears_late: bool = False) -> None:
        super().__init__(site, digest=digests_of, hears_late=hears_late)
        for worker in self._workers:
            worker._reads._logger = _DigestLogger(site)


def vllm_verified_fleets(make_params: MakeParams | None = None, *, hears_late: bool = False) -> Simulation:
    """A simulation of vLLM's fleets in which digests are compared, of each part where there are rooms."""
    tokens_per_step = TOKENS_PER_STEP if make_params is None else ROOM_TOKENS_PER_STEP
    connector = partial(VerifiedVllmConnector, hears_late=hears_late)
    return Simulation(connector, make_params, tokens_per_step=tokens_per_step)
