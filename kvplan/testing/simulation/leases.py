"""A connector made of :mod:`kvplan.protocol`, for any groups of a cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs

from kvplan.describe import Blocks
from kvplan.describe.blocks import Range, Request
from kvplan.errors import KVPlanError
from kvplan.protocol import (
    Claims,
    Handoff,
    Leases,
    Listener,
    Read,
    Reads,
    prompt_digest,
    send_claims,
    whole_blocks,
)
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.leases import LEASE_S
from kvplan.staging import Pipeline
from kvplan.testing.simulation.catalog import NULL_BLOCK, STAGING
from kvplan.testing.simulation.engine import EngineRequest, Site, StepReport
from kvplan.testing.simulation.fabric import VirtualExecutor
from kvplan.testing.simulation.network import Host

KEY: Final = SharedKey.of(b"the key of all engines")

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

    This is a second opinion of :class:`~kvplan.protocol.Leases`, of the messages alone.
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
        self._groups = site.groups
        self._leases = Leases(host)
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
        """Claim the lease of a request that another engine has computed.

        Where the last token would pass what decode needs, prefill stops one token short of it.
        """
        is_passing = any(group.window is not None for group in self._groups)
        if request.is_for_another and is_passing:
            request.stop_short()
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
        stop = request.num_computed
        positions = (stop - num_tokens, stop)
        local = self._tables(request)
        tokens = dict[str, Range]()
        for group in self._groups:
            if group.is_state:
                _check_state(handoff, stop)
                continue
            size = group.tokens_per_block
            attended = group.first_needed(stop)
            listed = local[group.name].first * size
            whole = whole_blocks(positions, attended, size, listed, handoff.kept[group.name])
            tokens[group.name] = (whole.start, whole.stop)
            # the source may lack the beginning of a block here
            request.num_partial[group.name] = whole.first_whole // size
        return Read(
            request=request.name,
            source=source,
            lease=handoff.lease,
            local=local,
            remote=handoff.blocks,
            tokens=tokens,
            to_block_end=True,
        )

    def _tables(self, request: EngineRequest) -> dict[str, Blocks]:
        """Return the block tables of a request; of states the last one counts."""
        tables = {}
        for group in self._groups:
            ids = request.blocks[group.name]
            tables[group.name] = Blocks(ids[-1:] if group.is_state else ids, null=NULL_BLOCK)
        return tables

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
        blocks = self._tables(request)
        self._lent[lease] = _HeldBlocks(request.name, blocks)
        handoff = Handoff(
            source=self._listener.source,
            lease=lease,
            num_tokens=request.num_computed,
            prompt=prompt_digest(request.tokens[: request.num_computed]),
            blocks=blocks,
            kept={
                group.name: blocks[group.name].first * group.tokens_per_block
                for group in self._groups
                if not group.is_state
            },
        )
        params: Mapping[str, Any] = json.loads(json.dumps(handoff.params(KEY)))
        return params

    def is_promised(self, request: str) -> bool:
        """Return whether a reader was told that the blocks of a request stay."""
        return self._promises.take(request)


def _check_state(handoff: Handoff, stop: int) -> None:
    """Refuse a state of another position than the last one that is read."""
    if handoff.num_tokens != stop:
        action = f"read {handoff.lease!r}"
        got = f"one after {handoff.num_tokens}"
        raise KVPlanError("TOKENS", action, expected=f"a state after {stop} positions", got=got)
