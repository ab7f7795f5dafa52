"""A connector made of an exporter and an importer, for any groups of a cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from kvplan.describe import Blocks
from kvplan.describe.blocks import Request
from kvplan.errors import KVPlanError
from kvplan.protocol import Claims, Leases, Listener, Reads, leases
from kvplan.protocol.exporter import PINNED, PUBLISHED, Exporter
from kvplan.protocol.groups import CacheGroup
from kvplan.protocol.importer import Importer
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.leases import LEASE_S
from kvplan.staging import Pipeline
from kvplan.testing.simulation.catalog import NULL_BLOCK, STAGING
from kvplan.testing.simulation.engine import EngineRequest, Site, StepReport
from kvplan.testing.simulation.fabric import VirtualExecutor
from kvplan.testing.simulation.network import Host
from kvplan.testing.simulation.scenario import KEPT_S
from kvplan.testing.simulation.tasks import BrokenRuleError

KEY: Final = SharedKey.of(b"the key of all engines")

PORT: Final = 5600

MemoryDigest = Callable[[VirtualExecutor, Request], Mapping[str, Any]]
"""Digests the local blocks of a request in the memory of an executor's worker."""


class Promises:
    """What the readers of an engine were told: until when each lease stands, by its reader.

    This is a second opinion of :class:`~kvplan.protocol.Leases`, of the messages alone. Of a lease
    whose request is gone nobody is told that it is valid. While one reader was told that a lease
    stands, another one is not told that it has ended, nor refused, unless the lease has as many
    readers as it may have (rule CLAIM). ``start`` is that of the engine, which messages name.
    """

    def __init__(self, host: Host, start: str) -> None:
        self._host = host
        self._start = start
        # by lease: the end of each promise, by reader
        self._ends: dict[str, dict[str, float]] = {}
        self._lease_of: dict[str, str] = {}
        # their hashes: nothing remembers requests that are gone
        self._gone: set[int] = set()
        host.witnesses.append(self._hear)

    def grant(self, lease: str, request: str, first_s: float = LEASE_S) -> None:
        """Promise a first lease to any reader, or nothing yet where it may give way.

        What was promised of it to readers while the request was computed stands.
        """
        self._lease_of[request] = lease
        self._ends.setdefault(lease, {})[""] = self._host.monotonic() + first_s

    def take(self, request: str) -> bool:
        """Return whether a promise about a request stands, and forget the request."""
        lease = self._lease_of.pop(request)
        ends = self._ends.pop(lease, {})
        self._gone.add(hash(lease))
        return any(self._host.monotonic() < end for end in ends.values())

    def reset(self) -> None:
        """Promise nothing any more of what was granted until now."""
        for ends in self._ends.values():
            ends.clear()

    def _hear(self, path: str, sent: bytes, answer: bytes) -> None:
        """Hear a message of claims and the answer to it."""
        # handshakes promise nothing
        if path != "/claims":
            return
        message = json.loads(sent)
        # a message for another start, maybe since somebody has garbled it, is refused
        if message["start"] != self._start:
            return
        stand = json.loads(answer)
        # one that somebody has garbled may lack something
        for (lease, reader), stands in zip(message.get("claims", ()), stand["claims"], strict=True):
            self._check(lease, stands)
            self._check_claim(lease, reader, stands)
            if stands and lease in self._ends:
                self._ends[lease][reader] = self._host.monotonic() + LEASE_S
        for (lease, reader), stands in zip(message.get("done", ()), stand["done"], strict=True):
            self._check(lease, stands)
            self._check_kept(lease, stands)
            if stands and lease in self._ends:
                self._ends[lease].pop(reader, None)
                self._ends[lease].pop("", None)
        for lease, stands in zip(message.get("asks", ()), stand["asks"], strict=True):
            self._check(lease, stands)
            self._check_kept(lease, stands)

    def _check(self, lease: str, is_valid: bool) -> None:
        """Refuse to say of a lease whose request is gone that it is valid."""
        if is_valid and hash(lease) in self._gone:
            message = f"a reader of {lease} is told that it is valid, and its request is gone"
            raise BrokenRuleError("CLAIM", message)

    def _holders(self, lease: str) -> set[str]:
        """Return the readers to whom a lease is promised now, with "" for any reader."""
        now = self._host.monotonic()
        return {reader for reader, end in self._ends.get(lease, {}).items() if now < end}

    def _check_kept(self, lease: str, is_valid: bool) -> None:
        """Refuse to say of a lease that it has ended while a reader was told that it stands."""
        if not is_valid and self._holders(lease):
            message = f"a reader of {lease} is told that it has ended, which is promised"
            raise BrokenRuleError("CLAIM", message)

    def _check_claim(self, lease: str, reader: str, is_taken: bool) -> None:
        """Refuse to turn a reader away from a lease that stands, or to take too many readers."""
        holders = self._holders(lease)
        is_full = len(holders - {"", reader}) >= leases.MAX_READERS
        if holders and is_taken == is_full:
            words = f"{len(holders)} readers hold it"
            message = f"{reader} {'gets' if is_taken else 'does not get'} {lease}: {words}"
            raise BrokenRuleError("CLAIM", message)


def check_count(exporter: Exporter) -> None:
    """Refuse to count blocks that no reader may read, or not to count some that one may."""
    exports = exporter._requests.values()
    readable = [each.blocks for each in exports if each.state in (PUBLISHED, PINNED)]
    number = sum(table.ids.size for blocks in readable for table in blocks.values())
    if number != exporter.num_blocks:
        message = f"{exporter.num_blocks} blocks are exported by a count, and {number} are"
        raise BrokenRuleError("REPORT", message)


class LeaseConnector:
    """A connector: that of the scheduler and those of all workers in one.

    With ``is_staged`` requests go through the workers' staging regions where that is faster. With
    ``digest``, which digests a request's blocks in the memory of an executor's worker, readers
    compare what has arrived.
    """

    reads_lagging_groups: Final = True

    def __init__(
        self, site: Site, *, is_staged: bool = False, digest: MemoryDigest | None = None
    ) -> None:
        host = site.host
        self._groups = site.groups
        groups = {
            group.name: CacheGroup(None)
            if group.is_state
            else CacheGroup.of_window(group.tokens_per_block, group.window)
            for group in site.groups
        }
        held = Leases(host)
        self._listener = Listener(
            site.workers[0].engine_id, host.name, site.offers, held, port=PORT, system=host
        )
        self._exporter = Exporter(
            self._listener.source, held, groups, withdraw=self._listener.withdraw
        )
        logger = logging.getLogger(__name__)
        claims = Claims(logger, host)
        self._weights = site.weights
        reader = host.token_hex(8)
        self._importer = Importer(
            groups, claims, reader, KEY, weights=site.weights, to_block_end=True
        )
        self._importer.siblings |= site.siblings
        self._arrived: dict[str, EngineRequest] = {}
        self._has_copies = site.has_copies
        self._keeps_answers = site.keeps_answers
        # the positions of requests that have got no blocks for them in this step
        self._waiting: dict[str, int] = {}
        self._tokens_per_block = site.groups[0].tokens_per_block
        self._requests: dict[str, EngineRequest] = {}
        self._reads = [
            Reads(
                worker,
                executor,
                logger,
                connections=site.connections(executor),
                claims=Claims(logger, host),
                pipeline=Pipeline(executor, STAGING, copier) if is_staged else None,
                digest=None if digest is None else partial(digest, executor),
                system=host,
                max_transfer_ids=site.max_transfer_ids,
            )
            for worker, executor, copier in zip(
                site.workers, site.executors, site.copiers, strict=True
            )
        ]
        self._executors = site.executors
        self._digest = digest
        # by request: the workers that have not reported it
        self._unreported: dict[str, int] = {}
        self._promises = Promises(host, self._listener.source.start)

    def add(self, request: EngineRequest) -> None:
        """Claim the lease of a request that another engine has computed.

        Where the last token would pass what decode needs, prefill stops one token short of it.
        """
        self._arrived[request.name] = request
        is_passing = any(group.window is not None for group in self._groups)
        if request.is_for_another and is_passing:
            request.stop_short()
        if request.params is not None:
            # the next turn of a conversation can be computed too
            min_tokens = 0 if request.is_for_another else None
            # what drafts cache at the last position is of the token that came next then
            has_drafts = any(group.num_ahead for group in self._groups)
            num_stale = int(has_drafts and request.is_for_another)
            self._importer.claim(
                request.name,
                request.params,
                request.digest,
                num_stale=num_stale,
                min_tokens=min_tokens,
            )

    def count_readable(self, request: EngineRequest, num_cached: int) -> int | None:
        """Return the positions that are computed and not cached, but the last of the prompt."""
        number = self._importer.count(request.name, num_cached, request.num_prompt - 1)
        if number is not None:
            self._waiting[request.name] = len(request.tokens) - num_cached
        return number

    def begin_read(self, request: EngineRequest, num_tokens: int) -> None:
        """Read positions of a request in all workers, or end its claim if there are none."""
        self._waiting.pop(request.name, None)
        if num_tokens == 0:
            self._importer.skip(request.name)
            return
        self._requests[request.name] = request
        self._unreported[request.name] = len(self._reads)
        size = self._tokens_per_block
        starts = {name: size * number for name, number in request.found_blocks.items()}
        self._importer.read(request.name, self._tables(request), num_tokens, starts)

    def _tables(self, request: EngineRequest) -> dict[str, Blocks]:
        """Return the block tables of a request; of states the last one counts."""
        tables = {}
        for group in self._groups:
            ids = request.blocks[group.name]
            tables[group.name] = Blocks(ids[-1:] if group.is_state else ids, null=NULL_BLOCK)
        return tables

    def step(self) -> StepReport:
        """Poll all workers: a request is received when each of them has reported it."""
        self._give_way()
        ended = self._exporter.step()
        check_count(self._exporter)
        self._digest_exported()
        self._start_reads()
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
            self._requests.pop(name, None)
            self._importer.end(name)
        return StepReport(received, failed, ended.released, self._saves())

    def _saves(self) -> dict[str, set[int]] | None:
        """Return all blocks of all requests: some of them are computed in this step."""
        if not self._has_copies:
            return None
        saves = {group.name: set[int]() for group in self._groups}
        for request in self._arrived.values():
            for group, table in request.blocks.items():
                saves[group].update(table)
        return saves

    def _give_way(self) -> None:
        """End kept answers where requests wait for blocks."""
        num_blocks = sum(-(-number // self._tokens_per_block) for number in self._waiting.values())
        self._exporter.give_way(num_blocks * len(self._groups))
        self._waiting.clear()

    def _start_reads(self) -> None:
        """Let all workers read what the importer says."""
        for partial_read in self._importer.step():
            for group, whole in partial_read.partial.items():
                request = self._requests[partial_read.request]
                request.num_partial[group] = whole.first_whole // self._tokens_per_block
            for reads in self._reads:
                reads.submit(partial_read)

    def _digest_exported(self) -> None:
        """Compute the digests that readers ask for."""
        for asked in self._listener.digests.take():
            blocks = self._exporter.blocks_of(asked.lease)
            if self._digest is not None and blocks is not None:
                binding: Request = {"local": blocks, "remote": {}, "tokens": dict(asked.tokens)}
                digests = [dict(self._digest(executor, binding)) for executor in self._executors]
                self._listener.digests.put(asked, digests)

    def finish(self, request: EngineRequest) -> Mapping[str, Any] | None:
        """Export the blocks of a request that was computed for another engine."""
        self._arrived.pop(request.name, None)
        read_from = self._importer.finish(request.name)
        is_answer = not request.is_for_another
        if request.is_aborted or (is_answer and not self._keeps_answers):
            return None
        # a step under way computes the position after the answer, and a state passes the answer
        num_computed = min(request.num_computed - request.num_in_flight, len(request.tokens))
        if request.num_in_flight and any(group.is_state for group in self._groups):
            return None
        num_prompt = request.num_prompt
        # the next turn may have another answer
        has_answer = num_prompt < num_computed
        handoff = self._exporter.finish(
            request.name,
            num_computed,
            self._tables(request),
            request.digest,
            first_s=KEPT_S if is_answer else None,
            read_from=read_from,
            prefixes={num_prompt: request.digest(num_prompt)} if has_answer else {},
            weights_version=self._weights(),
        )
        assert handoff is not None
        self._promises.grant(handoff.lease, request.name, 0.0 if is_answer else LEASE_S)
        params: Mapping[str, Any] = json.loads(json.dumps(handoff.params(KEY)))
        return params

    def is_promised(self, request: str) -> bool:
        """Return whether a reader was told that the blocks of a request stay."""
        return self._promises.take(request)

    def reset(self) -> None:
        """End all leases: readers are told that they get no more."""
        self._exporter.reset()
        self._promises.reset()
