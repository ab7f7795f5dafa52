"""Agents that write down what a peer tells NIXL or Mooncake to move, and move nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.second_opinion.engines import Ints

Descriptors = tuple[Ints, Ints, Ints]


class Agent:
    """In place of a NIXL agent: prepared lists are kept, and each transfer's descriptors written down."""

    def __init__(self, *args: Any) -> None:
        self.lists: list[Any] = []
        self.moved: list[Descriptors] = []

    def prep_xfer_dlist(self, agent: str, descriptors: Any, mem_type: str | None = None) -> int:
        """Keep rows of address, length, device, stride, count: a handle counts these lists."""
        self.lists.append(np.asarray(descriptors, np.int64))
        return len(self.lists) - 1

    def make_prepped_xfer(
        self, operation: str, local: int, local_ids: Any, remote: int, remote_ids: Any, **given: Any
    ) -> int:
        """Ids count the elements of the rows, one after the other."""
        sides = [_elements(self.lists[local], local_ids), _elements(self.lists[remote], remote_ids)]
        return self._move(operation, *sides)

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: str) -> int:
        """Descriptors of address, length and device."""
        local, remote = (np.asarray(side).astype(np.int64) for side in (local, remote))
        return self._move(operation, (local[:, 0], local[:, 1]), (remote[:, 0], remote[:, 1]))

    def _move(self, operation: str, local: Any, remote: Any) -> int:
        assert np.array_equal(local[1], remote[1]), "paired descriptors of different lengths"
        source, destination = (remote, local) if operation == "READ" else (local, remote)
        self.moved.append((source[0], destination[0], local[1]))
        return len(self.moved)

    def get_xfer_descs(self, descriptors: Any, mem_type: str) -> Any:
        """Descriptors as they are."""
        return descriptors

    get_reg_descs = get_xfer_descs

    def get_agent_metadata(self) -> bytes:
        """What an agent tells others of itself: nothing."""
        return b""

    def add_remote_agent(self, metadata: bytes) -> str:
        """The name of another agent."""
        return "peer"

    def check_xfer_state(self, handle: int) -> str:
        """Every transfer is over at once."""
        return "DONE"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Nobody tells anything."""
        return {}

    def _nothing(self, *args: Any, **given: Any) -> None:
        return None

    transfer = send_notif = register_memory = deregister_memory = get_xfer_telemetry = _nothing
    release_xfer_handle = release_dlist_handle = remove_remote_agent = _nothing


class Wire:
    """In place of Mooncake's engine."""

    def __init__(self) -> None:
        self.moved: list[Descriptors] = []

    def batch_transfer_sync(self, session: str, sources: Any, destinations: Any, lengths: Any) -> int:
        """Write down a batch; 0 is success."""
        self.moved.append(tuple(np.asarray(side).astype(np.int64) for side in (sources, destinations, lengths)))  # type: ignore[arg-type]
        return 0


def _elements(rows: Ints, ids: Any) -> tuple[Ints, Ints]:
    """Addresses and lengths of elements of rows, by id. An id beyond the last is an error, as it is to NIXL."""
    ids = np.asarray(ids, np.int64)
    first = np.cumsum(rows[:, 4]) - rows[:, 4]
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < rows[:, 4].sum()), "an id beyond the list"
    row = np.searchsorted(first, ids, side="right") - 1
    return rows[row, 0] + (ids - first[row]) * rows[row, 3], rows[row, 1]
