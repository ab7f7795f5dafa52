"""The fabric that moves bytes between workers, and each worker's executor over it.

A transfer moves in parts. Each part is read at one time and lands at a later one. Meanwhile the
source may give its blocks to another request, or die: what has been read still lands. A transfer
that fails has the status RUNNING until no byte of it can land, as rule executor.E2 of
:mod:`kvplan.executor` says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan.describe import Worker
from kvplan.describe.worker import Key
from kvplan.errors import KVPlanError
from kvplan.executor import (
    Status,
    Transfer,
    not_connected,
    not_planned_for,
    still_running,
    unprepared,
)
from kvplan.plan import ReadSpec, Table, TransferPlan
from kvplan.staging import Copy
from kvplan.testing.simulation.catalog import Catalog
from kvplan.testing.simulation.features import NO_FEATURES, Feature
from kvplan.testing.simulation.memory import LabelledMemory
from kvplan.testing.simulation.network import Host
from kvplan.testing.simulation.tasks import BrokenRuleError

TOKEN_CHARACTERS: Final = 16
"""The length of the token that an offer begins with: of one start of an engine."""

POST_S: Final = 0.011
"""Seconds that it takes to post a transfer where reads are cut into slices."""

OTHER_BYTE: Final = np.uint64(1 << 56)
"""What is added to a label that stands for a wrong byte."""

GONE_S: Final = 4.0
"""Seconds after which a transfer notices that its source is gone, or cannot be reached."""

MAX_ROUNDS: Final = 3
"""How often a request may be read again, one time after another, when a transfer has failed."""


@attrs.frozen
class Trouble:
    """What transfers between two times suffer, with the probability ``chance``.

    Their parts take up to ``delay_s`` longer; with ``breaks`` they fail when some have landed. With
    the probability ``refuses`` a transfer cannot be posted. With the probability ``spoils`` it ends
    as done, and a part of it has brought a wrong byte, or nothing.
    """

    begins_at: float
    ends_at: float
    source: str
    chance: float
    delay_s: float = 0.0
    breaks: bool = False
    refuses: float = 0.0
    spoils: float = 0.0

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the names of the engines, or ``*``."""
        return (self.source,)

    def concerns(self, source: str, now: float) -> bool:
        """Return whether a transfer from a host that starts now may suffer from this."""
        return self.begins_at <= now < self.ends_at and self.source in ("*", source)


@attrs.frozen(eq=False)
class Port:
    """A worker's memory on the fabric, at one start of its engine."""

    host: Host
    worker: Worker
    memory: LabelledMemory


@attrs.define(eq=False)
class _Link:
    """A connection to a worker's memory, and why it was lost, if it was."""

    port: Port
    lost: KVPlanError | None = None


@attrs.define(eq=False)
class _Flight:
    """A transfer under way: cells that are read, cells where they land, and the parts to come."""

    transfer: Transfer
    link: _Link
    reads: Ints
    writes: Ints
    num_parts: int = 0
    landing_s: float = 0.01
    error: KVPlanError | None = None
    is_cancelled: bool = False
    is_spoiled: bool = False


class Fabric:
    """All memory that can be reached, by the token of an offer. One for a simulation."""

    def __init__(
        self,
        seed: int,
        troubles: tuple[Trouble, ...],
        catalog: Catalog,
        features: Feature = NO_FEATURES,
    ) -> None:
        self.catalog = catalog
        self.post_s = POST_S if Feature.SLICES in features else 0.0
        self.shows_held = Feature.HELD_TRANSFERS in features
        self.random = random.Random(f"{seed} fabric")
        self.post_random = random.Random(f"{seed} posts")
        self.spoiling_random = random.Random(f"{seed} wrong bytes")
        self.troubles = troubles
        self.ports: dict[str, Port] = {}

    def open_offer(self, offer: bytes) -> Worker:
        """Return the worker in an offer."""
        return self.catalog.open(offer[TOKEN_CHARACTERS:])

    def register(self, port: Port) -> bytes:
        """Return the offer of a worker's memory: a token of this start, and its description."""
        token = port.host.token_hex(TOKEN_CHARACTERS // 2)
        self.ports[token] = port
        return token.encode() + self.catalog.offer(port.worker)


@attrs.define(eq=False)
class _PendingCopies:
    """Copies under way, of which ``num_left`` are not done."""

    num_left: int


class VirtualCopier:
    """The :class:`~kvplan.staging.Copier` of a worker: each copy takes a while."""

    def __init__(self, fabric: Fabric, port: Port) -> None:
        self._fabric = fabric
        self._port = port

    def begin(self, copies: Sequence[Copy]) -> _PendingCopies:
        """Plan when each copy reads and writes."""
        ticket = _PendingCopies(len(copies))
        loop = self._port.host.loop
        for copy in copies:
            writes, reads = (self._port.memory.cells_of(ranges) for ranges in copy.ranges())
            self._port.memory.landing[writes] += 1
            copied_at = loop.now + 0.02 * self._fabric.random.random()
            loop.at(copied_at, partial(self._copy, ticket, reads, writes))
        return ticket

    def _copy(self, ticket: _PendingCopies, reads: Ints, writes: Ints) -> None:
        """Copy what is there now."""
        memory = self._port.memory
        memory.land(writes, memory.landed[reads])
        memory.landing[writes] -= 1
        memory.last_landing_at = self._port.host.loop.now
        ticket.num_left -= 1

    def done(self, ticket: _PendingCopies) -> bool:
        """Return whether all copies are done."""
        return ticket.num_left == 0


class VirtualExecutor:
    """The :class:`~kvplan.Executor` of a worker on the fabric.

    It treats connections as :class:`kvplan_nixl.NixlExecutor` does: a transfer whose source cannot
    be reached takes the connection with it, also for all later transfers, until somebody connects
    again.
    """

    def __init__(self, fabric: Fabric, port: Port) -> None:
        self.fabric = fabric
        self.port = port
        self._links: dict[Key, _Link] = {}
        self._prepared: dict[tuple[Key, Table], _Link] = {}
        self._flights: dict[Transfer, _Flight] = {}
        self.unreleased: set[Transfer] = set()
        # by request: when bytes of it have last landed
        self.landed_at: dict[str, float] = {}
        # the requests of which a transfer has failed since one was started, and how often each was
        # read again after that, if none has ended well
        self._failed: set[str] = set()
        self._num_rounds = Counter[str]()

    def connect(self, offer: bytes) -> None:
        """Make the worker of an offer known, or change nothing where it is connected."""
        remote = self.fabric.ports.get(offer[:TOKEN_CHARACTERS].decode())
        if remote is None or remote.host.is_dead:
            raise KVPlanError("PEER", "connect", expected="memory that is there", got="none")
        link = self._links.get(remote.worker.key)
        if link is None or link.lost is not None:
            self._links[remote.worker.key] = _Link(remote)
        elif link.port is not remote:
            action = f"connect {remote.worker.label}"
            expected = "a worker that is not connected"
            got = "another start of it that is"
            raise KVPlanError("PEER", action, expected=expected, got=got)

    def older_connections(self) -> list[str]:
        """Return the workers that are connected beside those of a later start of their engine."""
        newest = {key[0]: link.port.host for key, link in self._links.items()}
        return [
            link.port.worker.label
            for key, link in self._links.items()
            if link.port.host is not newest[key[0]]
        ]

    def disconnect(self, worker: Worker) -> None:
        """Forget a worker, and cancel the transfers with it."""
        link = self._links.pop(worker.key, None)
        if link is None:
            raise not_connected(worker.key)
        for flight in self._flights.values():
            flight.is_cancelled |= flight.link is link

    def prepare(self, plan: TransferPlan) -> None:
        """Check that the plan's workers are those that are connected."""
        for pair, remote in zip(plan.pairs, plan.remotes, strict=True):
            if not pair.group_pairs:
                continue
            link = self._links.get(remote.key)
            if link is None or link.port.worker != remote:
                present = None if link is None else link.port.worker
                raise not_planned_for(remote, present, "remote")
            self._prepared[remote.key, pair.local_table] = link

    def start(self, spec: ReadSpec, request: str) -> Transfer:
        """Start to move the bytes of a spec, part by part."""
        if request in self._failed:
            self._failed.remove(request)
            self._num_rounds[request] += 1
            if self._num_rounds[request] > MAX_ROUNDS:
                raise BrokenRuleError("END", f"{request} is read again and again, and fails")
        transfer = self._post(spec, request)
        self.unreleased.add(transfer)
        return transfer

    def _post(self, spec: ReadSpec, request: str) -> Transfer:
        transfer = Transfer(spec, request)
        self.port.host.spend(self.fabric.post_s)
        # workers that exchange nothing need no connection
        if not len(spec.local_table.rows):
            transfer.status = Status.DONE
            return transfer
        link = self._links.get(spec.remote)
        if link is None:
            raise not_connected(spec.remote)
        if self._prepared.get((spec.remote, spec.local_table)) is not link:
            raise unprepared(spec)
        if link.lost is not None:
            transfer.status = Status.FAILED
            transfer.error = link.lost.with_details()
            return transfer
        if self._is_refused(link.port.host):
            action = f"post a read of {link.port.worker.label}"
            raise KVPlanError("TRANSFER", action, expected="a transfer", got="an error")
        # cell by cell, both sides in the same order
        local, remote = spec.descriptors()
        writes = self.port.memory.cells_of(local)
        flight = _Flight(transfer, link, link.port.memory.cells_of(remote), writes)
        self._flights[transfer] = flight
        self.port.memory.landing[writes] += 1
        self._send(flight)
        return transfer

    def _is_refused(self, source: Host) -> bool:
        """Draw whether a transfer cannot be posted."""
        return self._happens("refuses", self.fabric.post_random, source)

    def _happens(self, what: str, draw: random.Random, source: Host) -> bool:
        """Draw whether something happens now to a transfer from a source, by its probability."""
        return any(
            draw.random() < chance
            for trouble in self.fabric.troubles
            if (chance := getattr(trouble, what)) and trouble.concerns(source.name, source.loop.now)
        )

    def poll(self, transfer: Transfer) -> Status:
        """Update the status of a transfer: it is settled when no part can land any more."""
        flight = self._flights.get(transfer)
        if flight is not None and flight.num_parts == 0:
            if flight.error is not None:
                transfer.status = Status.FAILED
                transfer.error = flight.error
            elif flight.is_cancelled:
                transfer.status = Status.CANCELLED
            else:
                transfer.status = Status.DONE
                self._num_rounds.pop(transfer.request, None)
            del self._flights[transfer]
        elif flight is not None and flight.error is not None and self.fabric.shows_held:
            # as rule executor.E4 says: it has failed, and holds its blocks
            transfer.error = flight.error
        if transfer.error is not None:
            self._failed.add(transfer.request)
        return transfer.status

    def held(self) -> list[str]:
        """Return the requests whose transfers have shown an error, and whose bytes may land."""
        return [transfer.request for transfer in self._flights if transfer.error is not None]

    def cancel(self, transfer: Transfer) -> None:
        """Read no further part of a transfer."""
        if transfer in self._flights:
            self._flights[transfer].is_cancelled = True

    def release(self, transfer: Transfer) -> None:
        """Forget a transfer, after a check that it is settled."""
        if not transfer.status.is_settled:
            raise still_running(transfer.request, "release a transfer")
        self.unreleased.discard(transfer)

    def _send(self, flight: _Flight) -> None:
        """Plan when each part of a transfer is read, and when it lands."""
        loop = self.port.host.loop
        draw = self.fabric.random.random
        # a transfer suffers from some of what happens when it begins
        present = [
            trouble
            for trouble in self.fabric.troubles
            if trouble.chance
            and trouble.concerns(flight.link.port.host.name, loop.now)
            and draw() < trouble.chance
        ]
        delay_s = max((trouble.delay_s for trouble in present), default=0.0)
        # parts are slow to be read, or to land
        if draw() < 0.5:
            flight.landing_s += delay_s
        parts = np.array_split(np.arange(flight.writes.size), 1 + int(3 * draw()))
        flight.num_parts = len(parts)
        # the parts before the first one that fails
        num_right = len(parts)
        if any(trouble.breaks for trouble in present):
            num_right = int(draw() * len(parts))
        code = "PEER" if draw() < 0.5 else "TRANSFER"
        flight.is_spoiled = self._happens(
            "spoils", self.fabric.spoiling_random, flight.link.port.host
        )
        for number, part in enumerate(parts):
            read_at = loop.now + 0.001 + (0.02 + delay_s) * draw() ** 2
            read = partial(self._read, gives_up_at=loop.now + GONE_S + delay_s)
            if number >= num_right:
                read = partial(self._break, code=code)
            loop.at(read_at, partial(read, flight, part))

    def _read(self, flight: _Flight, part: Ints, gives_up_at: float) -> None:
        """Read a part from its source, or wait for a source that cannot be reached."""
        loop = self.port.host.loop
        source = flight.link.port.host
        if flight.is_cancelled or flight.error is not None:
            self._drop(flight, part)
        elif source.is_dead or source.network.is_cut(source.name, self.port.host.name):
            if loop.now >= gives_up_at:
                self._break(flight, part, "PEER")
            else:
                loop.at(loop.now + 0.5, partial(self._read, flight, part, gives_up_at))
        else:
            # what the source has now, whoever owns the blocks
            labels = flight.link.port.memory.exported[flight.reads[part]]
            lands_at = loop.now + 0.001 + flight.landing_s * self.fabric.random.random()
            loop.at(lands_at, partial(self._land, flight, part, labels))

    def _land(self, flight: _Flight, part: Ints, labels: np.ndarray) -> None:
        """Let a part land that was read, whatever has happened meanwhile."""
        cells = flight.writes[part]
        if flight.is_spoiled and cells.size:
            flight.is_spoiled = False
            draw = self.fabric.spoiling_random
            labels = labels + OTHER_BYTE * (np.arange(cells.size) == draw.randrange(cells.size))
            if draw.random() < 0.5:
                labels = self.port.memory.landed[cells]
        self.port.memory.land(cells, labels)
        self.landed_at[flight.transfer.request] = self.port.host.loop.now
        self._drop(flight, part)

    def _break(self, flight: _Flight, part: Ints, code: str) -> None:
        """Let a transfer fail. Parts that are read already still land."""
        action = f"read from {flight.link.port.worker.label}"
        error = KVPlanError(code, action, expected="its bytes", got="an error of the network")
        flight.error = error
        # all later transfers of the connection fail too
        if code == "PEER":
            flight.link.lost = error
        self._drop(flight, part)

    def _drop(self, flight: _Flight, part: Ints) -> None:
        """Let nothing more of a part land."""
        self.port.memory.landing[flight.writes[part]] -= 1
        self.port.memory.last_landing_at = self.port.host.loop.now
        flight.num_parts -= 1
