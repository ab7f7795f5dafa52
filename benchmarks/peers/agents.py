"""Agents that take what a planner hands over, and do nothing with it while it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.second_opinion.agents import Agent


class Quiet(Agent):
    """A NIXL agent that keeps the ids of transfers, and looks them up in its lists only when asked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.given: list[tuple[Any, ...]] = []

    def make_prepped_xfer(
        self, operation: str, local: int, local_ids: Any, remote: int, remote_ids: Any, **given: Any
    ) -> int:
        """Keep a transfer."""
        self.given.append((operation, local, local_ids, remote, remote_ids))
        return 1

    def during(self, call: Callable[[], Any]) -> list[tuple[Any, ...]]:
        """The transfers of one call."""
        given: list[tuple[Any, ...]] = []
        self.given = given
        call()
        return given

    def moves(self, given: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Addresses read, addresses written and lengths of transfers."""
        self.moved = []
        for transfer in given:
            super().make_prepped_xfer(*transfer)
        return self.moved


def ids_of(given: Iterable[tuple[Any, ...]]) -> int:
    """How many ids transfers have on one side."""
    return sum(np.size(transfer[2]) for transfer in given)


class Wire:
    """In place of Mooncake's engine: counts ranges, and keeps them only when asked."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[Any] | None = None

    def batch_transfer_sync(self, session: str, reads: list[int], writes: list[int], lengths: list[int]) -> int:
        """Take a batch; 0 is success."""
        self.count += len(lengths)
        if self.kept is not None:
            self.kept.append([np.asarray(side, np.int64) for side in (reads, writes, lengths)])
        return 0

    def moves(self, call: Callable[[], Any]) -> list[Any]:
        """Addresses read, addresses written and lengths that a call hands over."""
        kept: list[Any] = []
        self.kept = kept
        call()
        self.kept = None
        return kept
