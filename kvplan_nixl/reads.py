"""Reads over NIXL: what a connector's workers read, for every engine alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from logging import Logger

from kvplan.budget import BUDGET_BYTES
from kvplan.connector import Access, Claims, Connections, HandshakeResult, Reads, fetch
from kvplan.connector.access import access_or_default
from kvplan.connector.digest_requests import fetch_digests
from kvplan.connector.peer_engines import HANDSHAKE_S
from kvplan.connector.reads import Digest
from kvplan.connector.system import SYSTEM, System
from kvplan.describe import Worker
from kvplan.staging import Copier, Pipeline, Rates
from kvplan_nixl.envelope import Envelope
from kvplan_nixl.executor import NixlExecutor
from kvplan_nixl.rearrange import STAGING


def make_reads(
    executor: NixlExecutor,
    claims: Claims,
    logger: Logger,
    *,
    access: Access | None = None,
    copier: Copier | None = None,
    timeout_s: float = HANDSHAKE_S,
    digest: Digest | None = None,
    on_handshake: Callable[[HandshakeResult], object] | None = None,
    budget_bytes: int = BUDGET_BYTES,
    rates: Rates | None = None,
    system: System = SYSTEM,
) -> Reads:
    """Return the reads of an executor's worker. Offers are envelopes of the key of ``access``.

    With a ``copier``, as :func:`~kvplan_nixl.rearrange.with_staging` makes it, a pipeline stages
    requests in the worker's staging region. Other arguments are those of
    :class:`~kvplan.connector.Reads`.
    """

    key = access_or_default(access).key

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
            fetch_offers=partial(fetch, access=access, system=system),
            fetch_digests=partial(fetch_digests, access=access, system=system),
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
