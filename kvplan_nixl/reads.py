"""Reads over NIXL: what a connector's workers read, for every engine alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from logging import Logger

from kvplan import Budget, Worker
from kvplan.protocol import (
    HANDSHAKE_S,
    Claims,
    Connections,
    Digest,
    HandshakeResult,
    Reads,
    SharedKey,
    System,
    fetch,
    fetch_digests,
)
from kvplan.staging import Copier, Pipeline, Rates
from kvplan_nixl.envelope import Envelope
from kvplan_nixl.executor import NixlExecutor
from kvplan_nixl.rearrange import STAGING


def make_reads(
    executor: NixlExecutor,
    claims: Claims,
    logger: Logger,
    *,
    key: SharedKey,
    system: System,
    copier: Copier | None = None,
    timeout_s: float = HANDSHAKE_S,
    digest: Digest | None = None,
    on_handshake: Callable[[HandshakeResult], object] | None = None,
    budget_bytes: int = Budget.DEFAULT_BYTES,
    rates: Rates | None = None,
) -> Reads:
    """Return the reads of an executor's worker. Offers are envelopes of the ``key``.

    With a ``copier``, as :func:`~kvplan_nixl.kernel.with_staging` makes it, a pipeline stages
    requests in the worker's staging region. Other arguments are those of
    :class:`~kvplan.protocol.Reads`.
    """

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
            fetch_offers=partial(fetch, system=system),
            fetch_digests=partial(fetch_digests, system=system),
        ),
        claims=claims,
        timeout_s=timeout_s,
        pipeline=None if copier is None else Pipeline(executor, STAGING, copier),
        digest=digest,
        on_handshake=on_handshake,
        budget_bytes=budget_bytes,
        rates=rates,
        system=system,
    )
