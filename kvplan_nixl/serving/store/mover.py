"""Movers: they copy between a cache and the pages in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, Protocol

import numpy as np

from kvplan import KVPlanError
from kvplan.plan import ReadSpec, TransferPlan
from kvplan.support import Ints, instance, members

LONG_BYTES: Final = 4096
"""Longer ranges are copied one by one: numpy copies shorter ones up to 20 times faster."""


class Mover(Protocol):
    """Moves the bytes between a cache and the pages in memory, as executors do."""

    def prepare(self, plan: TransferPlan) -> None:
        """Prepare for the specs of a plan, once."""

    def move(self, specs: Sequence[ReadSpec]) -> None:
        """Move the bytes of specs, and return when all have moved. Raises what made it fail."""


class MemoryMover:
    """Moves bytes within the memory of this process. Raises ``MEMORY`` for other memory."""

    def prepare(self, plan: TransferPlan) -> None:
        """Check that all regions are in host memory."""
        for worker in (instance(TransferPlan, plan, "plan").local, *plan.remotes):
            kinds = {region.memory for region in worker.regions} - {"DRAM"}
            if kinds:
                raise KVPlanError(
                    "MEMORY",
                    f"move pages of {worker.label}",
                    expected="regions in DRAM",
                    got=", ".join(sorted(kinds)),
                    hint="an executor moves other memory",
                )

    def move(self, specs: Sequence[ReadSpec]) -> None:
        """Copy all ranges of a length at once: there may be one for each element."""
        for spec in members(ReadSpec, specs, "specs"):
            local, remote = (side.astype(np.int64) for side in spec.descriptors())
            # both sides list the same lengths
            written, read = (local, remote) if spec.operation == "READ" else (remote, local)
            lengths = written[:, 1]
            for num_bytes in np.unique(lengths).tolist():
                ranges = lengths == num_bytes
                _copy(written[ranges, 0], read[ranges, 0], num_bytes)


def _copy(destinations: Ints, sources: Ints, num_bytes: int) -> None:
    """Copy a number of bytes from each address to the other of its pair."""
    if num_bytes >= LONG_BYTES:
        for destination, source in zip(destinations.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(destination, source, num_bytes)
        return
    # a range is an item of an array in which an item begins at each byte
    first_written, written = _items(destinations, num_bytes)
    first_read, read = _items(sources, num_bytes)
    written[destinations - first_written] = read[sources - first_read]


def _items(addresses: Ints, num_bytes: int) -> tuple[int, Any]:
    """Return the lowest of some addresses, and an array of the items from there to the highest."""
    first = int(addresses.min())
    memory = SimpleNamespace(
        __array_interface__={
            "version": 3,
            "data": (first, False),
            "typestr": f"|V{num_bytes}",
            "shape": (int(addresses.max()) - first + 1,),
            "strides": (1,),
        }
    )
    return first, np.asarray(memory)
