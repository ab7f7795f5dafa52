"""Reads over NIXL: what a connector's workers read, for every engine alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from logging import Logger
from typing import Any, Final

from kvplan import Request, Worker
from kvplan.protocol import Claims, Connections, Handshakes, Reads, SharedKey, System
from kvplan.staging import Copier, Pipeline, Rates
from kvplan.support import instance
from kvplan_nixl.envelope import Envelope
from kvplan_nixl.executor import NixlExecutor
from kvplan_nixl.rearrange import STAGING

USUAL: Final = Handshakes()


def pipeline_of(
    executor: NixlExecutor, copier: Copier | None, rates: Rates | None = None
) -> Pipeline | None:
    """Return the pipeline of a worker that has a staging region, with a copier for it."""
    return None if copier is None else Pipeline(executor, STAGING, copier, rates)


def make_reads(
    executor: NixlExecutor,
    claims: Claims,
    logger: Logger,
    *,
    key: SharedKey,
    system: System,
    pipeline: Pipeline | None = None,
    digest: Callable[[Request], Mapping[str, Any]] | None = None,
    handshakes: Handshakes = USUAL,
) -> Reads:
    """Return the reads of an executor's worker. Offers are envelopes of the ``key``.

    Other arguments are those of :class:`~kvplan.protocol.Reads`, and the ``handshakes`` of its
    :class:`~kvplan.protocol.Connections`.
    """

    instance(NixlExecutor, executor, "executor")
    instance(SharedKey, key, "key")
    instance(System, system, "system")

    def open_offer(envelope: bytes) -> Worker:
        return Envelope.unpack(envelope, key).worker

    return Reads(
        executor.worker,
        executor,
        logger,
        connections=Connections(
            open_offer=open_offer,
            connect=executor.connect,
            # Transfers with the worker are cancelled: it has another memory now, or none.
            disconnect=partial(executor.disconnect, force=True),
            handshakes=handshakes,
        ),
        claims=claims,
        pipeline=pipeline,
        digest=digest,
        system=system,
    )
