"""Pipelines: carry staged requests out, one chunk on its way while another is put in order.

An :class:`~kvplan.Executor` moves chunks, a :class:`Copier` puts them in order, and a staged plan says what. A
chunk of a ``READ`` moves first, one of a ``WRITE`` is put in order first. Rules:

- D1: chunks go through the staging region in the order in which requests were submitted, the halves in turn, also from
  one request to the next. Requests wait for as long as it takes; none fails because there are many.
- D2: a half is filled only when all transfers of the chunk before in it are settled, and its copies are done.
- D3: what comes second of a chunk begins when all that comes first is done; never, if a transfer or copy has failed.
- D4: when all chunks of a request have moved, each of its peers is told so once, under the request's name; earlier or
  otherwise none is. That needs no half: a request of no bytes may be done before those that were submitted earlier.
- D5: where something goes wrong, or as the caller asks, a request's transfers are cancelled, and no more of it begins.
  It is settled when they are, and the copies that had begun are done. Only its own blocks may have been written. What
  cannot be stopped keeps its half until it ends.
- D6: what goes wrong under way is the request's ``error``, never an exception, and concerns no other request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import attrs

from kvplan._text import count
from kvplan.describe.blocks import Tokens
from kvplan.describe.worker import Key
from kvplan.errors import KVPlanError
from kvplan.executor import Executor, Status, Transfer, still_running
from kvplan.plan.specs import ReadSpec
from kvplan.staging.plan import Chunk, StagedPlan
from kvplan.staging.rearrange import Copy
from kvplan.staging.windows import Tables
from kvplan.verification.memory import FakeMemory


class Copier(Protocol):
    """Carries out the copies of one worker. Not for several threads at once."""

    def begin(self, copies: Sequence[Copy]) -> Any:
        """Begin copies, no two of which write the same bytes; return what :meth:`done` takes.

        What it raises is a :class:`~kvplan.KVPlanError`, and nothing is being copied then.
        """

    def done(self, ticket: Any) -> bool:
        """Whether copies are done, without waiting. Raises as ``begin`` does where they have failed."""


@attrs.frozen(eq=False)
class FakeCopier:
    """The :class:`Copier` of a worker in fake memory. Bytes are copied when copies begin."""

    memory: FakeMemory
    key: Key

    def begin(self, copies: Sequence[Copy]) -> None:
        """Copy all, range by range."""
        for copy in copies:
            writes, reads = copy.ranges()
            self.memory.move(self.key, self.key, reads, writes)

    def done(self, ticket: None) -> bool:
        """They are."""
        return True


@attrs.define(eq=False, repr=False)
class StagedTransfer:
    """A request that goes through a pipeline.

    ``status`` is what the last poll found; ``error`` is set where that is FAILED. When it is settled, no byte of the
    request's blocks is touched any more, and all are in order if it is DONE.
    """

    request: str
    status: Status = Status.RUNNING
    error: KVPlanError | None = None

    def __repr__(self) -> str:
        return f"<StagedTransfer {self.request!r} {self.status.value}>"


@attrs.define(eq=False)
class _Request:
    """What is left of a request, None where all chunks have been made, and how it is going to end."""

    transfer: StagedTransfer
    chunks: Iterator[Chunk] | None
    ends: Status = Status.DONE
    error: KVPlanError | None = None
    is_told: bool = False

    @property
    def is_stopped(self) -> bool:
        return self.ends is not Status.DONE


@attrs.define(eq=False)
class _Part:
    """A chunk that is on its way in a half, or what tells the peers of a request, which has none; step by step."""

    request: _Request
    half: int | None
    steps: Iterator[None] = attrs.field(init=False)
    transfers: list[Transfer] = attrs.field(factory=list)
    has_moved: bool = False


class Pipeline:
    """Moves requests through the staging region of one plan, which nothing else may use meanwhile.

    Prepares the plan's transfers. Raises ``PEER`` as :meth:`Executor.prepare` does. Not for several threads at once.

    >>> import attrs
    >>> from kvplan import Blocks, Model, Region
    >>> from kvplan.staging import stage
    >>> from kvplan.executor import FakeNetwork
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (decode,), (prefill,) = (model.engine(name, num_blocks=99, layout=layout)
    ...                          for name, layout in (("decode", "LBHNC"), ("prefill", "LBNHC")))
    >>> local = attrs.evolve(decode, regions=(*decode.regions, Region("staging", 1 << 50, 8 << 20)))
    >>> network = FakeNetwork([prefill, local])
    >>> copier = FakeCopier(network.memory, local.key)
    >>> pipeline = Pipeline(network.executor(local), stage(local, [prefill], staging="staging"), copier)
    >>> tables = {"local": {"attn": Blocks(range(20, 32))}, "remote": {"attn": Blocks(range(7, 19))}}
    >>> pipeline.submit("request 1", **tables, tokens=(10, 190))
    <StagedTransfer 'request 1' running>
    >>> pipeline.poll()  # once in each step of an engine
    (<StagedTransfer 'request 1' done>,)
    >>> network.executor(prefill).notices()
    (Notice(engine_id='decode', rank=0, request='request 1'),)
    """

    def __init__(self, executor: Executor, staged: StagedPlan, copier: Copier) -> None:
        for plan in staged.transfers:
            executor.prepare(plan)
        self.staged = staged
        self._executor, self._copier = executor, copier
        self._requests: dict[StagedTransfer, _Request] = {}
        self._next: tuple[_Request, Chunk] | None = None
        self._parts: list[_Part] = []
        self._last_half = 1

    def submit(self, request: str, *, local: Tables, remote: Tables, tokens: Tokens = None) -> StagedTransfer:
        """Begin a request, or queue it. Takes and raises what :meth:`StagedPlan.bind` does; nothing is queued then.

        Its blocks are the request's until it is settled; those that a writer sends from must be filled by now, and on a
        GPU no other stream is waited for. Ids are made chunk by chunk.
        """
        chunks = self.staged.bind(local=local, remote=remote, tokens=tokens, halves=self._turns())
        transfer = StagedTransfer(request)
        self._requests[transfer] = _Request(transfer, chunks)
        self._begin_chunks()
        return transfer

    def poll(self) -> tuple[StagedTransfer, ...]:
        """Go on without waiting, by a step or two in each half; the requests that this has settled."""
        self._parts = [part for part in self._parts if part.half is None or not self._is_over(part)]
        self._begin_chunks()
        self._tell()
        self._parts = [part for part in self._parts if part.half is not None or not self._is_over(part)]
        busy = self._busy()
        settled = [
            request
            for request in self._requests.values()
            if request not in busy and (request.is_told or request.is_stopped)
        ]
        for request in settled:
            request.transfer.status, request.transfer.error = request.ends, request.error
            del self._requests[request.transfer]
        return tuple([request.transfer for request in settled])

    def cancel(self, transfer: StagedTransfer) -> None:
        """Ask a running request to stop: it is CANCELLED once it touches no byte any more, however long that takes."""
        if transfer in self._requests:
            self._stop(self._requests[transfer], Status.CANCELLED)

    def release(self, transfer: StagedTransfer) -> None:
        """Check that a request is settled: it holds nothing then. Raises ``TRANSFER`` for one that is not."""
        if not transfer.status.is_settled:
            raise still_running(transfer.request, "release a staged transfer")

    def _turns(self) -> Iterator[int]:
        """Whenever it is asked, the half that was not begun last."""
        while True:
            yield 1 - self._last_half

    def _busy(self, but_moved: bool = False) -> set[_Request]:
        """Requests of which a chunk is yet to be made or carried out; with ``but_moved``, other than those moved."""
        busy = {request for request in self._requests.values() if request.chunks is not None}
        if self._next is not None:
            busy.add(self._next[0])
        return busy.union(part.request for part in self._parts if not (but_moved and part.has_moved))

    def _begin_chunks(self) -> None:
        """Rules D1 and D2. The chunk after the last one that could be begun is made as well, while bytes move."""
        while (following := self._following()) is not None:
            request, chunk = following
            if chunk.half in [part.half for part in self._parts]:
                return
            self._next, self._last_half = None, chunk.half
            # a peer that nothing of the chunk moves from or to need not be asked
            specs = [spec for spec in chunk.specs if spec.local_ids.size]
            self._begin(_Part(request, chunk.half), specs, chunk.copies)

    def _following(self) -> tuple[_Request, Chunk] | None:
        """The chunk to begin next."""
        for request in self._requests.values():
            while self._next is None and request.chunks is not None:
                try:
                    chunk = next(request.chunks, None)
                except KVPlanError as error:
                    self._stop(request, Status.FAILED, error)
                else:
                    if chunk is None:
                        request.chunks = None
                    else:
                        self._next = request, chunk
        return self._next

    def _tell(self) -> None:
        """Rule D4."""
        unmoved = self._busy(but_moved=True)
        for request in self._requests.values():
            if request not in unmoved and not (request.is_told or request.is_stopped):
                request.is_told = True
                self._begin(_Part(request, half=None), self.staged.closing)

    def _begin(self, part: _Part, specs: Iterable[ReadSpec], copies: Sequence[Copy] = ()) -> None:
        legs = [self._moved(part, specs), self._in_order(part, copies)] if copies else [self._moved(part, specs)]
        part.steps = self._steps(part, legs if self.staged.operation == "READ" else legs[::-1])
        self._parts.append(part)
        if self._is_over(part):
            self._parts.remove(part)

    def _is_over(self, part: _Part) -> bool:
        """Whether nothing is left of a part, after going on with it."""
        return next(part.steps, part) is part

    def _steps(self, part: _Part, legs: Iterable[Iterator[None]]) -> Iterator[None]:
        """Rule D3."""
        for leg in legs:
            if not part.request.is_stopped:
                yield from leg

    def _moved(self, part: _Part, specs: Iterable[ReadSpec]) -> Iterator[None]:
        """Transfers of a part begin, and are settled."""
        request = part.request
        try:
            for spec in specs:
                part.transfers.append(self._executor.start(spec, request.transfer.request, notify=part.half is None))
        except KVPlanError as error:
            self._stop(request, Status.FAILED, error)
        yield
        while self._is_running(part):
            yield
        while part.transfers:
            try:
                self._executor.release(part.transfers.pop())
            except KVPlanError as error:
                self._stop(request, Status.FAILED, error)
        part.has_moved = True

    def _is_running(self, part: _Part) -> bool:
        for transfer in part.transfers:
            status = self._executor.poll(transfer)
            if status.is_settled and status is not Status.DONE:
                self._stop(part.request, status, transfer.error)
        return not all(transfer.status.is_settled for transfer in part.transfers)

    def _in_order(self, part: _Part, copies: Sequence[Copy]) -> Iterator[None]:
        """Copies of a part begin, and are done."""
        try:
            ticket = self._copier.begin(copies)
            while not self._copier.done(ticket):
                yield
        except KVPlanError as error:
            self._stop(part.request, Status.FAILED, error)

    def _stop(self, request: _Request, ends: Status, error: KVPlanError | None = None) -> None:
        """Rule D5. What a request is stopped for first is what it ends by."""
        if not request.is_stopped:
            request.ends, request.error, request.chunks = ends, error, None
        if self._next is not None and self._next[0] is request:
            self._next = None
        for part in self._parts:
            if part.request is request:
                for transfer in part.transfers:
                    self._executor.cancel(transfer)

    def __repr__(self) -> str:
        return f"<Pipeline {self.staged.direct.local.label}: {count(len(self._requests), 'request')}>"
