"""The mover of a store's client: NIXL copies between a cache and pages in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvplan import KVPlanError, ReadSpec, Status, TransferPlan
from kvplan_nixl.executor import NixlExecutor, settle

TIMEOUT_S: Final = 60.0
"""A copy within a host that takes longer will not end."""


class NixlMover:
    """Moves the bytes of a store's client by an executor of the worker, such as to and from a GPU.

    It attaches the pages in memory to the executor. A copy that does not end makes it useless: its
    pages might still be written.
    """

    def __init__(self, executor: NixlExecutor) -> None:
        self._executor = executor
        self._is_stuck = False

    def prepare(self, plan: TransferPlan) -> None:
        """Attach the pages of a plan, and prepare it."""
        for pages in plan.remotes:
            self._executor.attach(pages)
        self._executor.prepare(plan)

    def move(self, specs: Sequence[ReadSpec]) -> None:
        """Move the bytes of specs. Raises ``TRANSFER``, or the error of a transfer."""
        if self._is_stuck:
            raise _stuck()
        transfers = [self._executor.start(spec, "page") for spec in specs]
        if not settle(self._executor, transfers, TIMEOUT_S):
            self._is_stuck = True
            raise _stuck()
        # all are settled, so all can be released, also if one has failed
        for transfer in transfers:
            self._executor.release(transfer)
        for transfer in transfers:
            if transfer.status is not Status.DONE:
                assert transfer.error is not None
                raise transfer.error


def _stuck() -> KVPlanError:
    return KVPlanError(
        "TRANSFER",
        "move pages of a store",
        expected=f"copies that end within {TIMEOUT_S:.0f} s",
        got="one that has not",
    )
