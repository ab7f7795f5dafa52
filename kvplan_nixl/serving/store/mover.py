"""Movers: they copy between a cache and the pages in memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvplan import KVPlanError
from kvplan.plan import ReadSpec, Table, TransferPlan
from kvplan.support import Ints, instance, members
from kvplan_nixl.serving.store.parallel import FILES_AT_ONCE, in_parallel

LOCKED_ITEMS: Final = 500
"""While numpy copies no more items than this, it keeps the interpreter's lock."""


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
        checked = members(ReadSpec, specs, "specs")
        num_ids = max((spec.num_ids for spec in checked), default=0)
        in_parallel(_copy, checked, FILES_AT_ONCE if num_ids > LOCKED_ITEMS else 1)


def _copy(spec: ReadSpec) -> None:
    local, lengths = _ranges(spec.local_table, spec.local_ids)
    remote, _ = _ranges(spec.remote_table, spec.remote_ids)
    written, read = (local, remote) if spec.operation == "READ" else (remote, local)
    # the ranges of pages follow each other, in the order of their addresses
    order = np.argsort(remote)
    for num_bytes in np.unique(lengths).tolist():
        ranges = order[lengths[order] == num_bytes]
        items, index = _items(written[ranges], num_bytes)
        read_items, read_index = _items(read[ranges], num_bytes)
        items[index] = read_items[read_index]


def _ranges(table: Table, ids: npt.NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Return the address and the length of the range of each id.

    They are not coalesced, as ``descriptors`` are: that would take longer than it saves.
    """
    row = table.row_of(ids)
    rows = table.rows.astype(np.int64)[row]
    return rows[:, 0] + (ids - table.first[row]) * rows[:, 3], rows[:, 1]


def _items(addresses: Ints, num_bytes: int) -> tuple[Any, Any]:
    """Return an array of the ranges of a length that begin at some addresses, and their index.

    If they follow each other, they are all of the array; if not, an item begins at each byte.
    """
    first, last = int(addresses.min()), int(addresses.max())
    is_dense = bool((np.diff(addresses) == num_bytes).all())
    memory = SimpleNamespace(
        __array_interface__={
            "version": 3,
            "data": (first, False),
            "typestr": f"|V{num_bytes}",
            "shape": (len(addresses) if is_dense else last - first + 1,),
            "strides": (num_bytes if is_dense else 1,),
        }
    )
    return np.asarray(memory), slice(None) if is_dense else addresses - first
