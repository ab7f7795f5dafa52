"""Agents in place of NIXL and Mooncake: they record what a planner hands over, and move nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvplan._arrays import Ints

Copies = tuple[Ints, Ints, Ints]
"""Addresses read, addresses written and lengths in bytes."""

Transfer = tuple[str, int, Any, int, Any]
"""The operation, then a prepared list and ids into it: local, remote."""


class Agent:
    """A NIXL agent. It keeps prepared lists and transfers, and looks up the addresses of a transfer only when asked."""

    def __init__(self, *args: Any) -> None:
        self.lists: list[Any] = []
        self.transfers: list[Transfer] = []

    def prep_xfer_dlist(self, agent: str, descriptors: Any, mem_type: str | None = None) -> int:
        """Keep rows of address, length, device, stride and count. Return the number of this list."""
        self.lists.append(np.asarray(descriptors, np.int64))
        return len(self.lists) - 1

    def make_prepped_xfer(
        self, operation: str, local: int, local_ids: Any, remote: int, remote_ids: Any, **given: Any
    ) -> int:
        """Keep a transfer. Its ids count the elements of the rows, one row after the other."""
        self.transfers.append((operation, local, local_ids, remote, remote_ids))
        return 1

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: str) -> int:
        """Keep a transfer of descriptors: rows of address, length and device."""
        local, remote = (
            np.pad(np.asarray(side).astype(np.int64), ((0, 0), (0, 2)), constant_values=1) for side in (local, remote)
        )
        ids = np.arange(len(local))
        return self.make_prepped_xfer(
            operation, self.prep_xfer_dlist("", local), ids, self.prep_xfer_dlist("", remote), ids
        )

    def during(self, call: Callable[[], Any]) -> list[Transfer]:
        """The transfers of one call."""
        self.transfers = []
        call()
        return self.transfers

    def copies(self, transfers: Iterable[Transfer] | None = None) -> list[Copies]:
        """The copies of some transfers, or of all."""
        found = []
        for operation, local, local_ids, remote, remote_ids in self.transfers if transfers is None else transfers:
            sides = [_elements(self.lists[local], local_ids), _elements(self.lists[remote], remote_ids)]
            assert np.array_equal(sides[0][1], sides[1][1]), "paired descriptors of different lengths"
            source, destination = sides if operation == "WRITE" else sides[::-1]
            found.append((source[0], destination[0], source[1]))
        return found

    def get_xfer_descs(self, descriptors: Any, mem_type: str) -> Any:
        """The descriptors themselves."""
        return descriptors

    get_reg_descs = get_xfer_descs

    def get_agent_metadata(self) -> bytes:
        """Metadata without content."""
        return b""

    def add_remote_agent(self, metadata: bytes) -> str:
        """The name of another agent."""
        return "peer"

    def check_xfer_state(self, handle: int) -> str:
        """Every transfer is done at once."""
        return "DONE"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """No notifications."""
        return {}

    def _nothing(self, *args: Any, **given: Any) -> None:
        return None

    transfer = send_notif = register_memory = deregister_memory = get_xfer_telemetry = _nothing
    release_xfer_handle = release_dlist_handle = remove_remote_agent = _nothing


class Wire:
    """Mooncake's engine. It counts ranges, and keeps them where ``kept`` is a list."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[Copies] | None = None

    def batch_transfer_sync(self, session: str, reads: list[int], writes: list[int], lengths: list[int]) -> int:
        """Take a batch. 0 is success."""
        self.count += len(lengths)
        if self.kept is not None:
            self.kept.append((np.asarray(reads, np.int64), np.asarray(writes, np.int64), np.asarray(lengths, np.int64)))
        return 0

    def copies(self, call: Callable[[], Any]) -> list[Copies]:
        """The copies that one call hands over."""
        kept: list[Copies] = []
        self.kept = kept
        call()
        self.kept = None
        return kept


def ids_of(transfers: Iterable[Transfer]) -> int:
    """How many ids transfers have on one side."""
    return sum(np.size(transfer[2]) for transfer in transfers)


def _elements(rows: Ints, ids: Any) -> tuple[Ints, Ints]:
    """Addresses and lengths of elements of rows, by id. An id beyond the last is an error, as it is to NIXL."""
    ids = np.asarray(ids, np.int64)
    # rows of address, length, device, stride, count; first: the id of each row's first element
    first = np.cumsum(rows[:, 4]) - rows[:, 4]
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < rows[:, 4].sum()), "an id beyond the list"
    row = np.searchsorted(first, ids, side="right") - 1
    return rows[row, 0] + (ids - first[row]) * rows[row, 3], rows[row, 1]
