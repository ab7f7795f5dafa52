"""Workers on real memory, each with a NIXL executor, all in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from kvplan import Worker
from kvplan.describe.worker import Key
from kvplan.executor import Executor
from kvplan_nixl import UCX, NixlExecutor
from kvplan_nixl.executor import Backends
from tests.contents import Bytes

Memory = dict[str, Any]
"""One tensor of bytes for each region, by name."""


def synchronized(device: str) -> None:
    """Wait until what torch has begun on a device is done, since NIXL does not wait for it."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def placed(worker: Worker, device: str = "cpu") -> tuple[Worker, Memory]:
    """A worker with its regions in memory of a device, as torch names it, and that memory."""
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
    return attrs.evolve(worker, regions=regions), memory


class NixlWorld:
    """Workers on memory of one device. Each executor knows those workers of other engines that are its ``contacts``.

    Where nothing is said, those are all of them.

    Executors have no thread each: there are many in one process, and all of them are polled.
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
            there, self.memory[worker.key] = placed(worker, device)
            self.workers.append(there)
        self.nixl = {worker.key: NixlExecutor(worker, backends, progress_thread=False) for worker in self.workers}
        self.executors: dict[Key, Executor] = dict(self.nixl)
        envelopes = {key: executor.envelope() for key, executor in self.nixl.items()}
        for key, executor in self.nixl.items():
            for other, envelope in envelopes.items():
                if other[0] == key[0]:
                    continue
                if contacts is None or other in contacts[key]:
                    executor.connect(envelope)

    def __enter__(self) -> NixlWorld:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self.nixl.values():
            executor.close()

    def read(self, worker: Worker, region: str) -> Bytes:
        """All bytes of a region."""
        values: Bytes = self.memory[worker.key][region].cpu().numpy().copy()
        return values

    def write(self, worker: Worker, region: str, values: Bytes) -> None:
        """Set all bytes of a region."""
        self.memory[worker.key][region].copy_(torch.from_numpy(np.ascontiguousarray(values)))
        synchronized(self.device)
