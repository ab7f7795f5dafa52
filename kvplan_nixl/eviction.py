"""Evictions of a store by the engines that use it."""

from __future__ import annotations

from logging import Logger

from kvplan import KVPlanError
from kvplan.store import Backend, BackgroundEviction, Evicted, Limits


def evict_beside(backend: Backend, limits: Limits, logger: Logger) -> BackgroundEviction | None:
    """Keep a store within limits beside an engine, which logs what was evicted.

    Return ``None`` if there are no limits.
    """
    if limits.are_none:
        return None

    def report(evicted: Evicted | KVPlanError) -> None:
        if isinstance(evicted, KVPlanError):
            logger.warning("the store is not kept within its limits: %s", evicted)
        elif evicted.num_pages:
            logger.info("the store is kept within its limits: %s", evicted)
        if isinstance(evicted, Evicted) and evicted.faults:
            faults, first = len(evicted.faults), evicted.faults[0]
            logger.warning("%d entries of the store stay, such as: %s", faults, first)

    return BackgroundEviction(backend, limits, report)
