"""Reads of requests in parts, which come while prefill computes the rest.

A part is read when the one before it has ended. The request is reported once, when its last part
has ended: then no byte of it can move any more.
"""

from __future__ import annotations

from collections import deque

import attrs

from kvplan._checks import having, instance, name
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.protocol.importer import PartialRead
from kvplan.protocol.read import Read, ReadResult
from kvplan.protocol.reads import Reads


@attrs.define(eq=False)
class _RequestParts:
    """A request that is read in parts: those that wait, and the results of those that have ended.

    No other part comes once ``has_last``. ``error`` is the first reason to fail. One
    ``is_under_way`` until its result has come, and ``is_moving`` if bytes of it may move.
    """

    waiting: deque[Read] = attrs.field(factory=deque)
    results: list[ReadResult] = attrs.field(factory=list)
    is_under_way: bool = False
    is_moving: bool = False
    has_last: bool = False
    error: KVPlanError | None = None
    is_reported_late: bool = False

    def result(self, request: str) -> ReadResult:
        """Return the result of all parts together."""
        return ReadResult(
            request=request,
            error=self.error,
            num_bytes=sum(result.num_bytes for result in self.results),
            seconds=sum(result.seconds for result in self.results),
            post_seconds=sum(result.post_seconds for result in self.results),
            transfer_seconds=sum(result.transfer_seconds for result in self.results),
            num_descriptors=sum(result.num_descriptors for result in self.results),
            is_staged=any(result.is_staged for result in self.results),
        )


class ReadParts:
    """The requests of ``reads`` that come in parts, one after the other. Most have one part.

    A request is reported, also if it has failed, after :meth:`begin` or :meth:`fail` was told of
    its last part: its blocks stay until no other part can come.
    """

    def __init__(self, reads: Reads) -> None:
        self._reads: Reads = having("begin", reads, "reads", "Reads")
        self._requests: dict[str, _RequestParts] = {}

    @property
    def worker(self) -> Worker:
        """Return the worker that reads."""
        return self._reads.worker

    def take(self, part: PartialRead) -> None:
        """Do what an importer says of a request."""
        if part.read is not None:
            self.begin(part.read, is_last=part.is_last)
        elif part.error is not None:
            self.fail(part.request, part.error, is_last=part.is_last)

    def is_moving(self, request: str) -> bool:
        """Return whether bytes of a request may move now, also if it has failed."""
        return request in self._requests and self._requests[request].is_moving

    def begin(self, read: Read, *, is_last: bool = True) -> None:
        """Read a part of a request when the parts before it are read."""
        instance(Read, read, "read")
        parted = self._requests.setdefault(read.request, _RequestParts())
        parted.has_last = instance(bool, is_last, "is_last")
        parted.waiting.append(read)
        self._begin_next(parted)

    def fail(self, request: str, error: KVPlanError, *, is_last: bool = True) -> None:
        """Report a request that cannot be read, when what is under way has ended.

        If that is not said of its last part, others may still come, of which none is read.
        """
        parted = self._requests.setdefault(name(request, "name of a request"), _RequestParts())
        instance(KVPlanError, error, "error of a read")
        parted.has_last = instance(bool, is_last, "is_last")
        parted.waiting.clear()
        if parted.is_under_way:
            parted.error = parted.error or error
        elif parted.error is None:
            # nothing is read, but this logs and reports the reason
            parted.is_under_way = True
            self._reads.fail(request, error)

    def poll(self) -> list[ReadResult]:
        """Continue without waiting, and return the requests that have ended since the last call."""
        for result in self._reads.poll():
            parted = self._requests[result.request]
            parted.results.append(result)
            parted.is_under_way = parted.is_moving = False
            parted.error = parted.error or result.error
            self._begin_next(parted)
        # only now, since a part may have failed before it began
        ended = []
        for request, parted in [*self._requests.items()]:
            if parted.has_last and not parted.is_under_way:
                del self._requests[request]
                ended.append(parted.result(request))
        return ended

    @property
    def num_held(self) -> int:
        """The number of failed requests whose blocks stay, as :attr:`Reads.num_held`."""
        return self._reads.num_held

    def late(self) -> dict[str, KVPlanError]:
        """Return the requests that have failed while bytes may still move, or other parts may come.

        Each is returned once. Its blocks must stay until :meth:`poll` reports it.
        """
        late = self._reads.late()
        # the part that is late ends with an error too, which is not news then
        for request in late:
            self._requests[request].is_reported_late = True
        for request, parted in self._requests.items():
            if parted.error is not None and not parted.is_reported_late:
                parted.is_reported_late = True
                late[request] = parted.error
        return late

    def _begin_next(self, parted: _RequestParts) -> None:
        """Begin the next part, if none is under way and none has failed."""
        if parted.error is not None:
            parted.waiting.clear()
        elif parted.waiting and not parted.is_under_way:
            parted.is_under_way = parted.is_moving = True
            self._reads.begin(parted.waiting.popleft())
