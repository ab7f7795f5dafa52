"""A connector made of :mod:`kvplan.connector`, for requests with one table of blocks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs

from kvplan.connector import (
    Claims,
    Handoff,
    Leases,
    Listener,
    Read,
    Reads,
    prompt_digest,
    send_claims,
)
from kvplan.connector.leases import LEASE_S
from kvplan.describe import Blocks
from kvplan.describe.blocks import Request
from kvplan.errors import KVPlanError
from kvplan.staging import Pipeline
from kvplan.testing.simulation.catalog import STAGING
from kvplan.testing.simulation.engine import EngineRequest, Site, StepReport
from kvplan.testing.simulation.fabric import VirtualExecutor
from kvplan.testing.simulation.network import Host

KEY: Final = b"the key of all engines"

PORT: Final = 5600

MemoryDigest = Callable[[VirtualExecutor, Request], Mapping[str, Any]]
"""Digests the local blocks of a request in the memory of an executor's worker."""


@attrs.frozen
class _HeldBlocks:
    """A request that is lent, and its blocks."""

    request: str
    blocks: Mapping[str, Blocks]


class Promises:
    """What the readers of an engine were told: until when each lease stands, by its reader.

    This is a second opinion of :class:`~kvplan.connector.Leases`, of the messages alone.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        # by lease: the end of each promise, by reader
        self._ends: dict[str, dict[str, float]] = {}
        self._lease_of: dict[str, str] = {}
        host.witnesses.append(self._hear)

    def grant(self, lease: str, request: str) -> None:
        """Promise a first lease, to whoever comes."""
        self._lease_of[request] = lease
        self._ends[lease] = {"": self._host.monotonic() + LEASE_S}

    def take(self, request: str) -> bool:
        """Return whether a promise about a request stands, and forget the request."""
        ends = self._ends.pop(self._lease_of.pop(request), {})
        return any(self._host.monotonic() < end for end in ends.values())

    def _hear(self, path: str, sent: bytes, answer: bytes) -> None:
        """Hear a message of claims and the answer to it."""
        # handshakes promise nothing
        if path != "/claims":
            return
        message = json.loads(sent)
        stand = json.loads(answer)
        for (lease, reader), stands in zip(message["claims"], stand["claims"], strict=True):
            if stands and lease in self._ends:
                self._ends[lease][reader] = self._host.monotonic() + LEASE_S
        for (lease, reader), stands in zip(message["done"], stand["done"], strict=True):
            if stands and lease in self._ends:
                self._ends[lease].pop(reader, None)
                self._ends[lease].pop("", None)


class LeaseConnector:
    """The scheduler's part and all workers' parts of a connector in one.

    With ``is_staged`` requests go through the workers' staging regions where that is faster. With
    ``digest``, which digests a request's blocks in the memory of an executor's worker, readers
    compare what has arrived.
    """

    def __init__(
        self, site: Site, *, is_staged: bool = False, digest: MemoryDigest | None = None
    ) -> None:
        host = site.host
        self._host = host
        self._group = site.workers[0].groups[0].name
        self._leases = Leases(clock=host.monotonic, token=host.token_hex)
        self._listener = Listener(
            site.workers[0].engine_id, host.name, site.offers, self._leases, port=PORT, system=host
        )
        logger = logging.getLogger(__name__)
        send = partial(send_claims, system=host)
        self._claims = Claims(logger, send, host)
        self._reader = host.token_hex(8)
        # requests that wait for blocks, with what they are to read, or why they cannot
        self._unread: dict[str, Handoff | KVPlanError] = {}
        # requests that are read
        self._handoffs: dict[str, Handoff] = {}
        self._reads = [
            Reads(
                worker,
                executor,
                logger,
                connections=site.connections(executor),
                claims=Claims(logger, send, host),
                pipeline=Pipeline(executor, STAGING, copier) if is_staged else None,
                digest=None if digest is None else partial(digest, executor),
                system=host,
            )
            for worker, executor, copier in zip(
                site.workers, site.executors, site.copiers, strict=True
            )
        ]
        self._executors = site.executors
        self._digest = digest
        # by lease: the request that is lent, and its blocks
        self._lent: dict[str, _HeldBlocks] = {}
        # by request: the workers that have not reported it
        self._unreported: dict[str, int] = {}
        self._promises = Promises(host)

    def add(self, request: EngineRequest) -> None:
        """Claim the lease of a request that another engine has computed."""
        if request.params is None:
            return
        try:
            handoff = Handoff.of_params(request.params, KEY)
            handoff.check_prompt(prompt_digest(request.tokens[: handoff.num_tokens]))
            self._claims.begin(handoff.source, handoff.lease, self._reader_name(request.name))
            self._unread[request.name] = handoff
        except KVPlanError as error:
            self._unread[request.name] = error

    def _reader_name(self, request: str) -> str:
        return f"{self._reader} {request}"

    def count_readable(self, request: EngineRequest, num_cached: int) -> int:
        """Return the positions that are computed and not cached, but the last of the prompt."""
        if request.name not in self._unread:
            return 0
        return max(0, request.num_prompt - 1 - num_cached)

    def begin_read(self, request: EngineRequest, num_tokens: int) -> None:
        """Read positions of a request in all workers, or end its claim if there are none."""
        if request.name not in self._unread:
            return
        handoff = self._unread.pop(request.name)
        if isinstance(handoff, Handoff):
            self._handoffs[request.name] = handoff
        if num_tokens == 0:
            self._end_claim(request.name)
            return
        self._unreported[request.name] = len(self._reads)
        for reads in self._reads:
            try:
                reads.begin(self._read(request, handoff, num_tokens))
            except KVPlanError as error:
                reads.fail(request.name, error)

    def _read(
        self, request: EngineRequest, handoff: Handoff | KVPlanError, num_tokens: int
    ) -> Read:
        """Return what is to be read. Raises the reason why it cannot be read."""
        if isinstance(handoff, KVPlanError):
            raise handoff
        source = handoff.source
        refusal = self._claims.refusal(source, handoff.lease, self._reader_name(request.name))
        if refusal is not None:
            raise refusal
        return Read(
            request=request.name,
            source=source,
            lease=handoff.lease,
            local={self._group: Blocks(request.blocks)},
            remote=handoff.blocks,
            tokens={self._group: (request.num_computed - num_tokens, request.num_computed)},
            to_block_end=True,
        )

    def _end_claim(self, request: str) -> None:
        handoff = self._handoffs.pop(request, None)
        if handoff is not None:
            self._claims.end(handoff.source, handoff.lease, self._reader_name(request))

    def step(self) -> StepReport:
        """Poll all workers: a request is received when each of them has reported it."""
        ended = self._leases.take_ended()
        released = [*ended.done, *ended.late]
        self._digest_lent({*released})
        received = []
        failed = dict[str, KVPlanError]()
        for reads in self._reads:
            for result in reads.poll():
                self._unreported[result.request] -= 1
                if result.error is not None:
                    failed.setdefault(result.request, result.error)
                if not self._unreported[result.request]:
                    del self._unreported[result.request]
                    received.append(result.request)
            for name, error in reads.late().items():
                failed.setdefault(name, error)
        # no byte of it can move any more, in any worker
        for name in received:
            self._end_claim(name)
        return StepReport(received, failed, released)

    def _digest_lent(self, released: set[str]) -> None:
        """Forget the digests of released requests, and compute those that readers ask for."""
        for lease, lent in [*self._lent.items()]:
            if lent.request in released:
                del self._lent[lease]
                self._listener.digests.forget(lease)
        for asked in self._listener.digests.take():
            if self._digest is not None and asked.lease in self._lent:
                binding: Request = {"local": self._lent[asked.lease].blocks, "remote": {}}
                binding["tokens"] = dict(asked.tokens)
                digests = [dict(self._digest(executor, binding)) for executor in self._executors]
                self._listener.digests.put(asked, digests)

    def finish(self, request: EngineRequest) -> Mapping[str, Any] | None:
        """Lend the blocks of a request that was computed for another engine."""
        unread = self._unread.pop(request.name, None)
        if isinstance(unread, Handoff):
            self._claims.end(unread.source, unread.lease, self._reader_name(request.name))
        if not request.is_for_another or request.is_aborted:
            return None
        lease = self._leases.grant(request.name)
        self._promises.grant(lease, request.name)
        blocks = {self._group: Blocks(request.blocks)}
        self._lent[lease] = _HeldBlocks(request.name, blocks)
        handoff = Handoff(
            source=self._listener.source,
            lease=lease,
            num_tokens=request.num_computed,
            prompt=prompt_digest(request.tokens[: request.num_computed]),
            blocks=blocks,
        )
        params: Mapping[str, Any] = json.loads(json.dumps(handoff.params(KEY)))
        return params

    def is_promised(self, request: str) -> bool:
        """Return whether a reader was told that the blocks of a request stay."""
        return self._promises.take(request)
